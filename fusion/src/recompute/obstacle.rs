//! Why a value is kept for the backward pass, and which of the reasons are a matter of cost.

use crate::decision::Weighed;

/// Why a value is kept instead of computed again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The messages say it.
pub enum Obstacle {
    #[error("no memory budget asks for its bytes")]
    Unasked,
    #[error("the memory budget is kept at less cost without it")]
    Cheaper,
    #[error("an operator that is no kernel of ours computes it")]
    Called,
    #[error("the recipe says so")]
    Told,
}

impl Weighed for Obstacle {
    fn is_cost(&self) -> bool {
        *self != Obstacle::Called
    }
}
