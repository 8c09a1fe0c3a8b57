//! What can be wrong with a graph: one variant for each rule of the verifier.

use crate::dtype::DType;
use crate::graph::Origin;
use crate::size::{SymExpr, Symbol};
use std::fmt;
use std::sync::Arc;

/// A rule that a graph breaks, and where.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifyError {
    /// The node, or nothing if the graph's own lists are wrong.
    pub origin: Option<Arc<Origin>>,
    /// The rule.
    pub problem: Problem,
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Some(origin) => write!(f, "{origin}: {}", self.problem),
            None => write!(f, "graph: {}", self.problem),
        }
    }
}

impl std::error::Error for VerifyError {}

/// A broken rule. Containers are given by name.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Problem {
    /// An id without a container.
    #[error("container number {0} does not exist")]
    UnknownContainer(u32),
    /// Two containers, or two sizes, of one name.
    #[error("the name `{0}` is taken twice")]
    DuplicateName(String),
    /// A layout of another rank than the shape.
    #[error("`{container}` has {rank} dimensions, its layout {layout}")]
    LayoutRank {
        /// Container.
        container: String,
        /// Its dimensions.
        rank: usize,
        /// Dimensions of the layout.
        layout: usize,
    },
    /// A constant whose value has another type or shape than its container.
    #[error("the value of constant `{0}` has another type or shape than declared")]
    ConstantType(String),
    /// A container listed as input that is none, or the other way round, or twice.
    #[error("`{0}` must be listed as input exactly once if the caller gives it, else never")]
    InputList(String),
    /// An output that replaces something else than an input of the same type and shape.
    #[error("output `{output}` cannot replace `{input}`: not an input of the same type and shape")]
    Update {
        /// The output.
        output: String,
        /// What it should replace.
        input: String,
    },
    /// An output nobody writes.
    #[error("output `{0}` is never written")]
    OutputNotWritten(String),
    /// A read of what nobody has written yet.
    #[error("`{0}` is read before anything writes it")]
    ReadBeforeWrite(String),
    /// Several nodes write one container.
    #[error("`{0}` is written by more than one node")]
    SeveralWriters(String),
    /// A write to what the caller or the model gives.
    #[error("`{0}` is written, but only the caller may change it")]
    WriteToInput(String),
    /// A local container used by an operator, by several kernels, or as output.
    #[error("local container `{0}` is used outside a single kernel")]
    LocalEscapes(String),
    /// A local container that sums over points of its kernel, which each start afresh.
    #[error(
        "local container `{container}` reduces over `{param}`, over which its kernel is parallel"
    )]
    LocalReduction {
        /// Container.
        container: String,
        /// Parameter of the kernel.
        param: Symbol,
    },
    /// Another number of indices than dimensions.
    #[error("`{container}` has {rank} dimensions, accessed with {found} indices")]
    SubsetRank {
        /// Container.
        container: String,
        /// Its dimensions.
        rank: usize,
        /// Indices given.
        found: usize,
    },
    /// A symbol that is neither a size nor a loop symbol nor a parameter of an enclosing map.
    #[error("`{0}` is neither a size nor a parameter of an enclosing map or loop")]
    UnknownSymbol(Symbol),
    /// A parameter of the name of an enclosing parameter or of a size.
    #[error("parameter `{0}` hides a size or an enclosing parameter of the same name")]
    ShadowedParam(Symbol),
    /// An index that can fall outside.
    #[error(
        "index {index} of `{container}` reaches {reached}, outside dimension {dimension} of size {size}"
    )]
    OutOfBounds {
        /// Container.
        container: String,
        /// Position of the dimension.
        dimension: usize,
        /// Its size.
        size: SymExpr,
        /// The index.
        index: SymExpr,
        /// The value outside.
        reached: SymExpr,
    },
    /// An expression or a data index uses an input the tasklet does not have.
    #[error("the tasklet has {inputs} inputs, input {used} is used")]
    InputPosition {
        /// Inputs of the tasklet.
        inputs: usize,
        /// The position used.
        used: usize,
    },
    /// A data index that is no integer.
    #[error("input {0} is used as an index but is not an integer")]
    DataNotInteger(usize),
    /// Data indices that need each other.
    #[error("inputs of the tasklet index each other in a circle")]
    DataCircle,
    /// A read with a conflict resolution.
    #[error("the read of `{0}` has a conflict resolution; only writes have one")]
    ConflictOnRead(String),
    /// Two points of a map write one element.
    #[error(
        "points of a map that differ in `{param}` may write the same element of `{container}`; a conflict resolution is missing"
    )]
    WriteConflict {
        /// Container.
        container: String,
        /// Parameter the written element does not determine.
        param: Symbol,
    },
    /// A real number written to an integer container.
    #[error("a value of type {value} is written to `{container}` of type {dtype} without a cast")]
    DType {
        /// Container.
        container: String,
        /// Its element type.
        dtype: DType,
        /// Type of the expression.
        value: DType,
    },
    /// An operator inside a map.
    #[error("operator `{0}` stands inside a map; expand it first")]
    LibraryInMap(String),
    /// A condition that is no scalar truth value.
    #[error("condition `{0}` is not a scalar of type bool")]
    Condition(String),
}
