//! All operators by name. Adding one: its file, and a line here.
//!
//! | operator | inputs | attributes |
//! |---|---|---|
//! | `elementwise` | any, broadcast | `expr`, `dtype`? |
//! | `reshape` | x | `shape: Sizes` (one may be −1) |
//! | `permute` | x | `order: Ints` |
//! | `expand` | x | `shape: Sizes` |
//! | `flip` | x | `axes: Ints` |
//! | `tile` | x | `repeats: Sizes` |
//! | `slice` | x | `axis: Int`, `start`, `stop: Sizes[1]`, `step: Int`? |
//! | `concat` | x… | `axis: Int` |
//! | `pad` | x | `low`, `high: Sizes`, `mode: constant, reflect, replicate`?, `value: Float`? |
//! | `reduce` | x | `kind`, `axes: Ints`?, `keep: Bool`? |
//! | `variance` | x | `axes: Ints`?, `keep: Bool`?, `correction: Float`? |
//! | `arg_reduce` | x | `kind: argmax, argmin`, `axis: Int`, `keep: Bool`? |
//! | `cumsum` | x | `axis: Int`, `reverse: Bool`? |

use crate::op::{Op, OpError};
use crate::{arg_reduce, contraction, convolution, cumsum, elementwise, movement, reduce, slicing};

/// Every operator, ordered by family.
#[rustfmt::skip]
pub static ALL: &[&dyn Op] = &[
    &elementwise::Elementwise,
    &movement::Reshape,
    &movement::Permute,
    &movement::Expand,
    &movement::Flip,
    &movement::Tile,
    &slicing::Slice,
    &slicing::Concat,
    &slicing::Pad,
    &reduce::Reduce,
    &reduce::Variance,
    &arg_reduce::ArgReduce,
    &cumsum::Cumsum,
    &contraction::Einsum,
    &convolution::Conv,
    &convolution::ConvTranspose,
    &convolution::ConvDataGradient,
    &convolution::ConvWeightGradient,
];

/// The operator of that name.
///
/// # Errors
/// There is none.
pub fn find(name: &str) -> Result<&'static dyn Op, OpError> {
    ALL.iter()
        .copied()
        .find(|op| op.name() == name)
        .ok_or_else(|| OpError::Unknown(name.to_string()))
}
