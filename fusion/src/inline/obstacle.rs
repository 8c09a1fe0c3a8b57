//! Why a container is not computed where it is read, and which of the reasons are a matter of cost.

use crate::decision::Weighed;

/// Most operations that a tasklet may grow to on demand: its text must stay one that compiles.
const MAX_DEMANDED_COST: u32 = 4000;

/// Why a definition does not take the place of a read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The messages say it.
pub enum Obstacle {
    #[error("a product reads its operands from memory")]
    Product,
    #[error("a product's operand would be indexed by data, a remainder or a quotient")]
    ProductIndex,
    #[error("a product's operand would be read from its end")]
    ProductBackwards,
    #[error(
        "a product can read only one of its operands beyond the bounds of an array, and would read two"
    )]
    ProductGuard,
    #[error("it would be computed {times} times, {cost} operations each")]
    Repeated { times: i64, cost: u32 },
    #[error("its readers would look up each of its elements {0} times, one by one")]
    Lookup(i64),
    #[error("its reader would grow to {0} operations")]
    Cost(u32),
    #[error("its reader would read {0} elements at each point")]
    Inputs(usize),
    #[error("it is computed, and its reader pads it")]
    GuardOfComputed,
    #[error("its padding is not padding of the data that it is copied from")]
    Guard,
    #[error("it is computed, and its value is used as an index")]
    ComputedIndex,
    #[error("it is indexed by data where its definition needs a position")]
    DataPosition,
    #[error("the step returns it")]
    Returned,
    #[error("an operator that stays whole reads it from memory")]
    Called,
    #[error("reading its operands again would move {0} bytes more")]
    Traffic(i64),
    #[error("the recipe forbids it")]
    ByRecipe,
}

impl Weighed for Obstacle {
    fn is_cost(&self) -> bool {
        match self {
            Obstacle::Repeated { .. }
            | Obstacle::Lookup(_)
            | Obstacle::Inputs(_)
            | Obstacle::Traffic(_)
            | Obstacle::ByRecipe => true,
            Obstacle::Cost(cost) => *cost <= MAX_DEMANDED_COST,
            Obstacle::Product
            | Obstacle::ProductIndex
            | Obstacle::ProductBackwards
            | Obstacle::ProductGuard
            | Obstacle::GuardOfComputed
            | Obstacle::Guard
            | Obstacle::ComputedIndex
            | Obstacle::DataPosition
            | Obstacle::Returned
            | Obstacle::Called => false,
        }
    }
}
