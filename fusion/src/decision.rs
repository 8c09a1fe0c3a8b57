//! What fusion did, what it refused and why, as data; the sentences of reports are printed from it.

use crate::{
    CallObstacle, ChainObstacle, GroupObstacle, InlineObstacle, JoinObstacle, PrologueObstacle,
    RecomputeObstacle,
};
use graph::{ContainerId, Origin, Place, Rewrite};
use std::fmt;
use std::sync::Arc;

/// One rewrite applied or refused at one place.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The rewrite and where: the decision's identity.
    pub place: Place,
    /// The node, with the line it came from.
    pub origin: Arc<Origin>,
    /// What was done, or why not.
    pub outcome: Outcome,
    /// Bytes not moved because of it; for a refusal, those that it would have saved, as far as is known.
    pub bytes: i64,
    /// Bytes that are not kept from the forward to the backward pass because of it, or would not be.
    pub memory_bytes: i64,
    /// Operations done again because of it, or that would be.
    pub operations: i64,
}

/// What came of a rewrite at a place.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It was done.
    Applied(Applied),
    /// It was not done.
    Refused(Refusal),
}

/// What was done.
#[derive(Clone, Debug, PartialEq)]
pub enum Applied {
    /// Every reader computes the container itself.
    Inlined,
    /// The backward pass computes the container again.
    Recomputed,
    /// The kernel joined another one.
    Joined {
        /// The other one.
        other: Arc<Origin>,
    },
    /// The products that read the container compute it while they pack their operands.
    Packed {
        /// The operand of each product: the container itself for the first, copies of it for the others.
        operands: Vec<ContainerId>,
    },
    /// The product that reads the container first computes it while it packs its operand, and stores it for
    /// the others.
    PackedFirst {
        /// The product.
        reader: Arc<Origin>,
    },
    /// Products keep their results in registers.
    Chained {
        /// Kernels there are.
        n_kernels: usize,
        /// Kernels there would have been.
        n_replaced: usize,
        /// Bytes of results in registers.
        tile_bytes: i64,
        /// Results that are also stored.
        n_stored: usize,
        /// The results in registers, those of each kernel.
        tiles: Vec<ContainerId>,
    },
    /// An operator reads the container by strides.
    Viewed,
    /// The parts of the container are ranges of its bytes.
    PartsInPlace {
        /// How many.
        n_parts: usize,
    },
    /// The container's dimensions lie in this order in memory.
    LaidOut {
        /// Dimensions, slowest first.
        order: Vec<usize>,
    },
}

/// Why a rewrite was not done.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// The container is stored and read.
    Stored {
        /// The reader that cannot compute it, if it is a single one.
        reader: Option<Arc<Origin>>,
        /// Why.
        obstacle: InlineObstacle,
    },
    /// The container is kept for the backward pass.
    Kept(RecomputeObstacle),
    /// Two kernels stay two.
    Apart {
        /// The other one.
        other: Arc<Origin>,
        /// Why.
        obstacle: GroupObstacle,
    },
    /// The container is stored for the products that read it.
    Unpacked(PrologueObstacle),
    /// Products store their results.
    Unchained(ChainObstacle),
    /// The operand of an operator is copied.
    Copied(CallObstacle),
    /// The parts of a concatenation are copied.
    PartsCopied(JoinObstacle),
    /// The recipe asks for row-major order.
    RowMajor,
    /// The recipe asks for an order that the container cannot have.
    OrderFixed,
}

impl Decision {
    /// A rewrite that was applied.
    pub fn applied(place: Place, origin: &Arc<Origin>, done: Applied, bytes: i64) -> Self {
        Decision {
            place,
            origin: origin.clone(),
            outcome: Outcome::Applied(done),
            bytes,
            memory_bytes: 0,
            operations: 0,
        }
    }

    /// A rewrite that was refused.
    pub fn refused(place: Place, origin: &Arc<Origin>, refusal: Refusal, bytes: i64) -> Self {
        Decision {
            place,
            origin: origin.clone(),
            outcome: Outcome::Refused(refusal),
            bytes,
            memory_bytes: 0,
            operations: 0,
        }
    }

    /// Returns the decision with the memory that it spares and the operations that it does again.
    pub fn with_cost(self, memory_bytes: i64, operations: i64) -> Self {
        Decision {
            memory_bytes,
            operations,
            ..self
        }
    }

    /// The rewrite.
    pub fn rewrite(&self) -> Rewrite {
        self.place.rewrite
    }

    /// Whether it was done.
    pub fn is_applied(&self) -> bool {
        matches!(self.outcome, Outcome::Applied(_))
    }

    /// Why it was refused, if it was.
    pub fn reason(&self) -> Option<String> {
        match &self.outcome {
            Outcome::Applied(_) => None,
            Outcome::Refused(refusal) => Some(refusal.to_string()),
        }
    }

    /// Whether a recipe may decide otherwise: everything done may be left out, and everything refused that is legal
    /// may be done.
    pub fn may_change(&self) -> bool {
        match &self.outcome {
            Outcome::Applied(_) => true,
            Outcome::Refused(refusal) => refusal.may_be_overruled(),
        }
    }

    /// What happened, or why not.
    pub fn sentence(&self) -> String {
        let name = &self.place.container;
        match &self.outcome {
            Outcome::Applied(done) => done.sentence(name),
            Outcome::Refused(refusal) => refusal.sentence(name),
        }
    }
}

impl Applied {
    fn sentence(&self, name: &str) -> String {
        match self {
            Applied::Inlined => format!("{name} is computed where it is read"),
            Applied::Recomputed => format!("{name} is computed again in the backward pass"),
            Applied::Joined { other } => format!("joins {other}"),
            Applied::Packed { operands } => match operands.len() {
                1 => format!("{name} is computed by the product that reads it"),
                n => format!("{name} is computed by each of the {n} products that read it"),
            },
            Applied::PackedFirst { reader } => {
                format!("{name} is computed and stored by {reader}, which reads it first")
            }
            Applied::Chained {
                n_kernels,
                n_replaced,
                tile_bytes,
                n_stored,
                ..
            } => {
                let stored = match n_stored {
                    0 => String::new(),
                    n => format!(", and store {n} of them besides"),
                };
                format!(
                    "{n_kernels} kernels instead of {n_replaced} keep {tile_bytes} bytes of products in \
                     registers{stored}"
                )
            }
            Applied::Viewed => format!("{name} is read where it lies, by strides"),
            Applied::PartsInPlace { n_parts } => {
                format!("the {n_parts} parts of {name} are written to their places in it")
            }
            Applied::LaidOut { order } => {
                format!("{name} has its dimensions in the order {order:?} in memory")
            }
        }
    }
}

impl Refusal {
    fn may_be_overruled(&self) -> bool {
        match self {
            Refusal::Stored { obstacle, .. } => obstacle.is_cost(),
            Refusal::Kept(obstacle) => obstacle.is_cost(),
            Refusal::Apart { obstacle, .. } => obstacle.is_cost(),
            Refusal::Unpacked(obstacle) => obstacle.is_cost(),
            Refusal::Unchained(obstacle) => *obstacle == ChainObstacle::ByRecipe,
            Refusal::Copied(obstacle) => *obstacle == CallObstacle::ByRecipe,
            Refusal::PartsCopied(obstacle) => obstacle.is_cost(),
            Refusal::RowMajor => true,
            Refusal::OrderFixed => false,
        }
    }

    fn sentence(&self, name: &str) -> String {
        match self {
            Refusal::Stored {
                reader: Some(reader),
                obstacle,
            } => format!("{name} is stored for {reader}: {obstacle}"),
            Refusal::Stored { obstacle, .. } => format!("{name} is stored: {obstacle}"),
            Refusal::Kept(obstacle) => format!("{name} is kept for the backward pass: {obstacle}"),
            Refusal::Apart { other, obstacle } => format!("does not join {other}: {obstacle}"),
            Refusal::Unpacked(obstacle) => {
                format!("{name} is stored for the products that read it: {obstacle}")
            }
            Refusal::Unchained(obstacle) => format!("is not chained: {obstacle}"),
            Refusal::Copied(obstacle) => format!("{name} is stored for its operator: {obstacle}"),
            Refusal::PartsCopied(obstacle) => {
                format!("the parts of {name} are copied to their places in it: {obstacle}")
            }
            Refusal::RowMajor => format!("{name} is in row-major order: {self}"),
            Refusal::OrderFixed => format!("{name} keeps its order: {self}"),
        }
    }
}

/// The reason alone.
impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Stored { obstacle, .. } => obstacle.fmt(f),
            Refusal::Kept(obstacle) => obstacle.fmt(f),
            Refusal::Apart { obstacle, .. } => obstacle.fmt(f),
            Refusal::Unpacked(obstacle) => obstacle.fmt(f),
            Refusal::Unchained(obstacle) => obstacle.fmt(f),
            Refusal::Copied(obstacle) => obstacle.fmt(f),
            Refusal::PartsCopied(obstacle) => obstacle.fmt(f),
            Refusal::RowMajor => f.write_str("the recipe forbids it"),
            Refusal::OrderFixed => f.write_str(
                "the caller sees the value or a reshape shares its memory, or the order in the recipe does not \
                 name each of its dimensions once",
            ),
        }
    }
}

/// Whether a rewrite must pay, or was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    IfItPays,
    ByRecipe,
}

impl Demand {
    /// What stands in the way, as far as it counts.
    pub(crate) fn weigh<O: Weighed>(self, obstacle: O) -> Result<(), O> {
        match self == Demand::ByRecipe && obstacle.is_cost() {
            true => Ok(()),
            false => Err(obstacle),
        }
    }
}

/// A reason against a rewrite.
pub(crate) trait Weighed {
    /// Whether the rewrite would be legal, so that a recipe may ask for it.
    fn is_cost(&self) -> bool;
}
