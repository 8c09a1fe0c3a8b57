//! What can be wrong with a captured graph; everything that is missing is listed at once.

use ops::OpError;
use std::fmt;

/// An operator that cannot be imported, and where the model uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// `aten.…`, with what it lacks if only a case of it is missing.
    pub target: String,
    /// Module paths with source lines.
    pub places: Vec<String>,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.target, self.places.join(", "))
    }
}

/// Why a captured graph is not imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// Not a document of this schema.
    #[error("the captured graph cannot be read: {0}")]
    Document(#[from] serde_json::Error),
    /// Written by another version of the Python package.
    #[error(
        "the captured graph has schema version {found}, but this build reads {expected}; install the package again, so that its Python and native parts match"
    )]
    Version {
        /// The version in the document.
        found: u32,
        /// The version that this build reads.
        expected: u32,
    },
    /// The document contradicts itself.
    #[error("{origin}: {message}")]
    Node {
        /// The node.
        origin: String,
        /// What is wrong.
        message: String,
    },
    /// Operators that have no implementation.
    #[error("{} operator(s) are not supported: {}", .0.len(), join(.0))]
    Unsupported(Vec<Missing>),
}

fn join(missing: &[Missing]) -> String {
    missing
        .iter()
        .map(Missing::to_string)
        .collect::<Vec<_>>()
        .join("; ")
}

/// Why a rule does not apply.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RuleError {
    /// A case that the rule does not cover.
    #[error("{0}")]
    Unsupported(String),
    /// An argument is not what the operator's schema says.
    #[error("argument `{name}` should be {expected}, found {found}")]
    Argument {
        name: String,
        expected: &'static str,
        found: String,
    },
    /// The operator library refuses.
    #[error(transparent)]
    Op(#[from] OpError),
}
