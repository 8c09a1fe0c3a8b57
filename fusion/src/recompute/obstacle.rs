//! Why a value is kept for the backward pass, and which of the reasons are a matter of cost.

use crate::decision::Weighed;

/// Why a value is kept instead of computed again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The messages say it.
pub enum Obstacle {
    #[error(
        "without a memory budget, only values that free much memory in little time are computed again"
    )]
    Unasked,
    #[error("PyTorch computes it")]
    Called,
    #[error("the recipe forbids it")]
    ByRecipe,
}

impl Weighed for Obstacle {
    fn is_cost(&self) -> bool {
        *self != Obstacle::Called
    }
}
