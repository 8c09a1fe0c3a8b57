//! What a machine can do: the limits by which the rooms that choose compare what costs less.
//!
//! Owns one value that every prediction of time starts from, and how many operations an expression counts as. Numbers
//! are whole, so that two equal machines give two equal plans. Never measures anything: whoever knows better numbers
//! than the defaults passes them in.

use crate::dtype::DType;
use crate::expr::Expr;
use crate::function::{Binary, Unary};
use serde::{Deserialize, Serialize};

/// A level of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Level {
    /// Bytes that it holds, for one thread; for memory, the largest number.
    pub bytes: u64,
    /// Bytes that one thread reads or writes in a microsecond.
    pub bytes_per_us: u64,
    /// Bytes that all threads together read or write in a microsecond.
    pub shared_bytes_per_us: u64,
}

/// Limits of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Operations of a product of f32 matrices that one thread does in a microsecond; an addition and a
    /// multiplication are two.
    pub product_operations_per_us: u64,
    /// The same rate for bf16 matrices, by instructions for pairs of numbers; 0 if there are none or nothing is known.
    #[serde(default)]
    pub pair_operations_per_us: u64,
    /// Operations of element-wise loops in f32 that one thread does in a microsecond.
    pub loop_operations_per_us: u64,
    /// The cache of a core.
    pub l2: Level,
    /// The cache that cores share.
    pub l3: Level,
    /// Memory.
    pub memory: Level,
    /// Nanoseconds from the end of a launch to the start of the next one.
    pub launch_ns: u64,
    /// Further nanoseconds if threads wait for each other.
    pub barrier_ns: u64,
}

impl Machine {
    /// The limits assumed where none were measured: a server's core of about 2 GHz with vectors of `floats` floats.
    pub fn with_vector_width(floats: usize) -> Machine {
        let floats = floats.max(1) as u64;
        Machine {
            product_operations_per_us: 10_000 * floats,
            pair_operations_per_us: 0,
            loop_operations_per_us: 5_000 * floats,
            l2: Level {
                bytes: 2_000_000,
                bytes_per_us: 62_500,
                shared_bytes_per_us: u64::MAX,
            },
            l3: Level {
                bytes: 16 << 20,
                bytes_per_us: 25_000,
                shared_bytes_per_us: u64::MAX,
            },
            memory: Level {
                bytes: u64::MAX,
                bytes_per_us: 12_500,
                shared_bytes_per_us: 64_000,
            },
            launch_ns: 200,
            barrier_ns: 1_500,
        }
    }

    /// Operations in a microsecond of products of numbers of that type: the rate of instructions for pairs for bf16, if
    /// it is known, and the rate for f32 in all other cases.
    pub fn product_rate(&self, products: DType) -> u64 {
        let pairs = match products {
            DType::BF16 => self.pair_operations_per_us,
            _ => 0,
        };
        self.product_operations_per_us.max(pairs).max(1)
    }

    /// The levels from the nearest on.
    pub fn levels(&self) -> [Level; 3] {
        [self.l2, self.l3, self.memory]
    }
}

/// One thread with short vectors.
impl Default for Machine {
    fn default() -> Machine {
        Machine::with_vector_width(4)
    }
}

impl Level {
    /// Bytes that `threads` threads together move in a microsecond.
    pub fn rate(&self, threads: usize) -> f64 {
        let alone = self.bytes_per_us.saturating_mul(threads.max(1) as u64);
        alone.min(self.shared_bytes_per_us).max(1) as f64
    }
}

impl Expr {
    /// Operations of the expression; functions that take many instructions count as several.
    pub fn cost(&self) -> u32 {
        let mut cost = 0;
        self.visit(&mut |e| {
            cost += match e {
                Expr::Const(_) | Expr::In(_) | Expr::Index(_) => 0,
                Expr::Unary(Unary::Neg | Unary::Abs | Unary::Not | Unary::Floor, _) => 1,
                Expr::Unary(Unary::Sqrt | Unary::Rsqrt | Unary::Recip, _) => 8,
                Expr::Unary(..) | Expr::Uniform(..) => 16,
                Expr::Binary(Binary::Div | Binary::Mod | Binary::FloorDiv, ..) => 8,
                Expr::Binary(Binary::Pow | Binary::Atan2, ..) => 32,
                Expr::Binary(..) | Expr::Cast(..) | Expr::Select(..) => 1,
            }
        });
        cost
    }
}
