//! What the interpreter must be told (the meaning of operators), and its errors.
//!
//! The `graph` room knows no operator; [`LibraryMeaning`] is where the `ops` room plugs in. This
//! file never executes anything.

use crate::bind::BindError;
use crate::dtype::DType;
use crate::graph::{Graph, Library, Origin};
use crate::size::SizeError;
use crate::tensor::Tensor;
use std::sync::Arc;

/// What library nodes mean; implemented by the `ops` room.
pub trait LibraryMeaning {
    /// The values of all outputs in the operator's order, including those that nobody reads. Sizes
    /// in the attributes of `library` are constants.
    ///
    /// # Errors
    /// The operator refuses its operands or attributes.
    fn evaluate(
        &self,
        library: &Library,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, Refusal>;

    /// Like [`LibraryMeaning::evaluate`], but with the arithmetic of the operands' types, and rounded to the types of
    /// the results: kernels compute the same up to rounding.
    ///
    /// # Errors
    /// The operator refuses its operands or attributes.
    fn folded(
        &self,
        library: &Library,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, Refusal> {
        let mut results = self.evaluate(library, inputs)?;
        results.iter_mut().for_each(Tensor::round_to_dtype);
        Ok(results)
    }

    /// Whether two equal calls may give different results.
    fn is_random(&self, op: &str) -> bool;

    /// The position of the input whose elements the only output repeats unchanged, if there is one.
    fn copied_input(&self, _graph: &Graph, _library: &Library) -> Option<usize> {
        None
    }
}

/// An operator's own error.
pub type Refusal = Box<dyn std::error::Error + Send + Sync>;

/// The meaning for graphs without library nodes: it knows no operator.
#[derive(Clone, Copy, Debug)]
pub struct NoLibrary;

impl LibraryMeaning for NoLibrary {
    fn evaluate(&self, library: &Library, _: &[Option<&Tensor>]) -> Result<Vec<Tensor>, Refusal> {
        Err(format!("no meaning of operator `{}` was given", library.op).into())
    }
    fn is_random(&self, _: &str) -> bool {
        true
    }
}

/// Why a graph could not be interpreted.
#[derive(Debug, thiserror::Error)]
pub enum InterpretError {
    /// The inputs do not fit the graph.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// An input of another element type.
    #[error("input `{input}` is {expected}, a tensor of {found} was given")]
    InputType {
        /// Name of the container.
        input: String,
        /// Its element type.
        expected: DType,
        /// Element type given.
        found: DType,
    },
    /// A size could not be computed.
    #[error("{origin}: {error}")]
    Size {
        /// The node.
        origin: Arc<Origin>,
        /// What was missing.
        error: SizeError,
    },
    /// An index outside a container whose access has no fill.
    #[error("{origin}: index {index:?} is outside `{container}` of shape {shape:?}")]
    OutOfBounds {
        /// The node.
        origin: Arc<Origin>,
        /// Name of the container.
        container: String,
        /// The index.
        index: Vec<i64>,
        /// The container's shape.
        shape: Vec<usize>,
    },
    /// An element was read that no node wrote.
    #[error("{origin}: element {index:?} of `{container}` is read but was never written")]
    Unset {
        /// The reader.
        origin: Arc<Origin>,
        /// Name of the container.
        container: String,
        /// The index.
        index: Vec<i64>,
    },
    /// An operator refused.
    #[error("{origin}: operator `{op}`: {error}")]
    Library {
        /// The node.
        origin: Arc<Origin>,
        /// The operator.
        op: String,
        /// What it said.
        error: Refusal,
    },
    /// A result of an operator has another type or shape than the graph declares.
    #[error("{origin}: operator `{op}` gave {found} for `{container}`, declared {expected}")]
    LibraryResult {
        /// The node.
        origin: Arc<Origin>,
        /// The operator.
        op: String,
        /// Name of the container.
        container: String,
        /// Declared type and shape.
        expected: String,
        /// Type and shape given.
        found: String,
    },
    /// The graph is malformed; the verifier says more.
    #[error("{origin}: {what}; verify the graph")]
    Malformed {
        /// The node.
        origin: Arc<Origin>,
        /// The problem.
        what: String,
    },
}
