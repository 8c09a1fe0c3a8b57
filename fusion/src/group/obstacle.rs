//! Why two kernels do not become one, and which of the reasons are a matter of cost.

use crate::decision::Weighed;

/// Why two groups do not become one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The messages say it.
pub enum Obstacle {
    #[error("one of them writes to computed positions, or is not a single loop nest")]
    Alone,
    #[error("they run in different passes")]
    Stage,
    #[error("a product must come first in its kernel")]
    Product,
    #[error(
        "an epilogue must be element-wise over the product's result, or sum whole columns, and cannot read such a sum"
    )]
    Epilogue,
    #[error("together they would touch {0} containers")]
    Containers(usize),
    #[error("each needs a result of the other")]
    Circular,
    #[error("another kernel must run between them")]
    Between,
    #[error("they index their shared data differently")]
    Indices,
    #[error("one of them accesses a diagonal")]
    Diagonal,
    #[error("their loops have only {0} points in common, too few to share among threads")]
    FewPoints(i64),
    #[error("a thread would touch {0} bytes at each point they have in common")]
    InnerBytes(i64),
    #[error("each point would read `{0}` across its order in memory")]
    Strided(String),
    #[error("the recipe forbids it")]
    ByRecipe,
}

impl Weighed for Obstacle {
    fn is_cost(&self) -> bool {
        match self {
            Obstacle::Containers(_)
            | Obstacle::FewPoints(_)
            | Obstacle::InnerBytes(_)
            | Obstacle::Strided(_)
            | Obstacle::ByRecipe => true,
            Obstacle::Alone
            | Obstacle::Stage
            | Obstacle::Product
            | Obstacle::Epilogue
            | Obstacle::Circular
            | Obstacle::Between
            | Obstacle::Indices
            | Obstacle::Diagonal => false,
        }
    }
}
