//! Why two kernels do not become one, and which of the reasons are a matter of cost.

use crate::decision::Weighed;

/// Why two groups do not become one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The messages say it.
pub enum Obstacle {
    #[error("a kernel that scatters, or is no single loop nest, stays alone")]
    Alone,
    #[error("one runs in the forward pass and the other does not")]
    Stage,
    #[error("nothing runs before a product within its kernel")]
    Product,
    #[error(
        "an epilogue covers its product point by point, sums at most whole columns up, and reads no such sum"
    )]
    Epilogue,
    #[error("together they would touch {0} containers")]
    Containers(usize),
    #[error("each needs what the other makes")]
    Circular,
    #[error("another kernel must run between them")]
    Between,
    #[error("they index what they share differently")]
    Indices,
    #[error("one of them goes along a diagonal")]
    Diagonal,
    #[error("their loops have only {0} points in common, too few to share among threads")]
    FewPoints(i64),
    #[error("a thread would touch {0} bytes at each point they have in common")]
    InnerBytes(i64),
    #[error("each point would read `{0}` across its order in memory")]
    Strided(String),
    #[error("the recipe says so")]
    Told,
}

impl Weighed for Obstacle {
    fn is_cost(&self) -> bool {
        match self {
            Obstacle::Containers(_)
            | Obstacle::FewPoints(_)
            | Obstacle::InnerBytes(_)
            | Obstacle::Strided(_)
            | Obstacle::Told => true,
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
