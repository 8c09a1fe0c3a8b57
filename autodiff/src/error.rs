//! Why a graph cannot be differentiated.

use ops::OpError;

/// Why a graph cannot be differentiated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AutodiffError {
    /// Loops and branches are not differentiated yet.
    #[error(
        "`{graph}` has loops or branches, which cannot be differentiated yet; unroll them first"
    )]
    ControlFlow {
        /// The graph.
        graph: String,
    },
    /// An operator's rule failed.
    #[error("cannot differentiate {origin}: {source}")]
    Op {
        /// Where the operator came from.
        origin: String,
        /// What its rule said.
        source: OpError,
    },
    /// A map has a form that has no rule.
    #[error("cannot differentiate {origin}: {what}")]
    Map {
        /// Where the map came from.
        origin: String,
        /// The form.
        what: String,
    },
    /// The graph was differentiated already.
    #[error(
        "`{graph}` already holds backward nodes ({origin}); gradients of gradients are not supported"
    )]
    SecondOrder {
        /// The graph.
        graph: String,
        /// The first backward node.
        origin: String,
    },
}
