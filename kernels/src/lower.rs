//! Lowering of a fused graph to launches.

/// Why a graph cannot be lowered.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LowerError {
    /// A library node is left.
    #[error("{origin}: operator `{op}` has not been expanded to maps; run fusion before lowering")]
    Library {
        /// The operator.
        op: String,
        /// Where it is.
        origin: String,
    },
    /// A recurrence whose step has no C text.
    #[error("{origin}: {reason}")]
    NoLoop {
        /// What its step needs.
        reason: String,
        /// Where it is.
        origin: String,
    },
    /// A node at top level that is not a map.
    #[error("{origin}: expected a map at top level")]
    NotAMap {
        /// Where it is.
        origin: String,
    },
    /// A size that is not a number.
    #[error("{origin}: size `{size}` has no value; bind the graph's sizes before lowering")]
    UnboundSize {
        /// The expression.
        size: String,
        /// Where it is.
        origin: String,
    },
    /// A map with an empty range.
    #[error(
        "{origin}: parameter `{param}` has no points; a graph with empty containers cannot be compiled"
    )]
    EmptyRange {
        /// The parameter.
        param: String,
        /// Where it is.
        origin: String,
    },
    /// An access with the wrong number of indices.
    #[error(
        "{origin}: container `{container}` has {rank} dimensions but is accessed with {indices} indices"
    )]
    Rank {
        /// The container.
        container: String,
        /// Its dimensions.
        rank: usize,
        /// Indices given.
        indices: usize,
        /// Where.
        origin: String,
    },
    /// Nested phases without enough outer points that cannot become launches of their own.
    #[error("{origin}: the kernel's nested loops cannot be shared out over threads")]
    Unsplit {
        /// Where it is.
        origin: String,
    },
    /// More blocks than a launch can have.
    #[error(
        "{origin}: a launch of {blocks} blocks, but a GPU takes at most {limit}; split the operator's \
         input"
    )]
    Grid {
        /// Where it is.
        origin: String,
        /// Blocks needed.
        blocks: u64,
        /// Blocks allowed.
        limit: u32,
    },
    /// A contraction that no generator takes.
    #[error("{origin}: {what}")]
    Contraction {
        /// Where it is.
        origin: String,
        /// Why.
        what: String,
    },
    /// Memory could not be planned.
    #[error(transparent)]
    Plan(#[from] crate::plan::PlanError),
    /// Loops or branches.
    #[error("graphs with loops or branches are not lowered yet; unroll them first")]
    ControlFlow,
}
