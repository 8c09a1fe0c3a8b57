//! All operators by name. Adding one: its file, and a line here.
//!
//! | operator | inputs | attributes |
//! |---|---|---|
//! | `elementwise` | any, broadcast | `expr`, `dtype`?, `gradient_N`? |
//! | `reshape` | x | `shape: Sizes` (one may be −1) |
//! | `permute` | x | `order: Ints` |
//! | `expand` | x | `shape: Sizes` |
//! | `flip` | x | `axes: Ints` |
//! | `tile` | x | `repeats: Sizes` |
//! | `slice` | x | `axis: Int`, `start`, `stop: Sizes[1]`, `step: Int`? |
//! | `concat` | x… | `axis: Int` |
//! | `pad` | x | `low`, `high: Sizes`, `mode: constant, reflect, replicate, wrap`?, `value: Float`? |
//! | `reduce` | x | `kind`, `axes: Ints`?, `keep: Bool`?, `at_nan: Str`? |
//! | `variance` | x | `axes: Ints`?, `keep: Bool`?, `correction: Float`? |
//! | `arg_reduce` | x | `kind: argmax, argmin`, `axis: Int`, `keep: Bool`? |
//! | `cumsum` | x | `axis: Int`, `reverse: Bool`? |
//! | `topk` → values, positions | x | `axis: Int`, `k: Sizes[1]`, `largest: Bool`? |
//! | `gather` | x, index | `axis: Int`, `padding_idx: Int`? |
//! | `gather_gradient` | dy, index | `axis: Int`, `size: Sizes[1]`, `padding_idx: Int`? |
//! | `gather_elements` | x, index | `axis: Int` |
//! | `scatter_add` | x?, index, src | `axis: Int`, `shape: Sizes` where x is absent |
//! | `scatter_max`, `scatter_min` | x, index, src | `axis: Int`, `include_self: Bool` |
//! | `full` | – | `shape: Sizes`, `value: Float, Int`, `dtype` |
//! | `iota` | – | `start`, `step`, `size: Sizes[1]`, `dtype` |
//! | `one_hot` | index | `depth: Sizes[1]`, `dtype` |
//! | `stop_gradient` | x | – |
//! | `straight_through` | y, v | – |
//! | `dropout` → y, mask if asked | x, seed | `p: Float`, `id: Int`?, `mask: Bool`? |
//! | `einsum` | a, b? | `equation: Str` |
//! | `conv` | x, w | `stride`, `pad_low`, `pad_high`, `dilation: Ints`?, `groups: Int`? |
//! | `conv_transpose` | x, w | as `conv`, `output_padding: Ints`? |
//! | `conv_data_gradient` | dy, w | as `conv`, `input_shape: Sizes` |
//! | `conv_weight_gradient` | dy, x | as `conv`, `weight_shape: Sizes` |
//! | `batch_norm` → y, mean, inv_std, var | x, weight?, bias? | `eps: Float`? |
//! | `batch_norm_inference` | x, weight?, bias?, mean, var | `eps` |
//! | `layer_norm` → y, mean, inv_std | x, weight?, bias? | `axes: Int` (trailing ones), `eps` |
//! | `group_norm` → y, mean, inv_std | x, weight?, bias? | `groups: Int`, `eps` |
//! | `rms_norm` → y, inv_std | x, weight? | `axes: Int`, `eps` |
//! | `batch_norm_gradient` and so on → dx, dweight, dbias | dy, x, weight?, mean?, inv_std | as the norm |
//! | `max_pool` → y, index, winner | x | `kernel`, and as `conv` without `groups`, `ceil: Bool`? |
//! | `max_pool_gradient` | dy, winner | as `max_pool`, `input_shape: Sizes` |
//! | `average_pool` | x | as `max_pool`, `count_include_pad: Bool`?, `divisor: Int`? |
//! | `average_pool_gradient` | dy | as `average_pool`, `input_shape: Sizes` |
//! | `adaptive_average_pool` | x | `output: Ints` |
//! | `adaptive_max_pool` → y, index | x | `output: Ints` |
//! | `attention` | q, k, v, mask?, seed? | `scale: Float`?, `causal: Bool`?, `dropout: Float`?, `id: Int`?, `fill: Float`?, `safe: Bool`? |
//! | `attention_with_lse` → y, lse, rest | q, k, v, mask?, seed? | as `attention` |
//! | `attention_gradient` → dq, dk, dv | dy, q, k, v, mask?, y, lse, seed?, rest? | as `attention_with_lse` |
//! | `recurrence` → states…, kept? | x, w, b?, first states… | a cell: `gates: Int`, `states: Ints`, `value0: Expr`, …; `reverse: Bool`? |
//! | `recurrence_gradient` → dx, dq, dstates… | w, first states…, states…, kept?, dstates?… | `states`, `n_values: Int`, `x0: Expr`, …, `q0`, …, `before0`, …; `reverse: Bool`? |
//! | `binary_cross_entropy` | x, target | |
//! | `cross_entropy` → loss, total, max, log_sum | x, target, weight? | `reduction: none, mean, sum`?, `ignore_index: Int`?, `label_smoothing: Float`? |
//! | `nll_loss` → loss, total | x, target, weight? | as `cross_entropy` without smoothing |
//! | `cross_entropy_gradient`, `nll_loss_gradient` | dloss, x, target, weight?, total?, max?, log_sum? | as the loss |
//! | `softmax`, `log_softmax` | x | `axis: Int`, `safe: Bool`? |
//! | `softmax_gradient`, `log_softmax_gradient` | dy, y | `axis: Int` |

use crate::op::{Op, OpError};
use crate::{
    adaptive_pool, arg_reduce, attention, attention_lse, average_pool, binary_loss, contraction,
    convolution, creation, cumsum, elementwise, index, loss, movement, norm, norm_gradient, pool,
    random, recurrence, reduce, scatter_extreme, slicing, softmax, stop_gradient, topk, variance,
};

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
    &variance::Variance,
    &arg_reduce::ArgReduce,
    &cumsum::Cumsum,
    &topk::TopK,
    &index::Gather,
    &index::GatherGradient,
    &index::GatherElements,
    &index::ScatterAdd,
    &scatter_extreme::ScatterExtreme { largest: true },
    &scatter_extreme::ScatterExtreme { largest: false },
    &creation::Full,
    &creation::Iota,
    &creation::OneHot,
    &random::Dropout,
    &stop_gradient::StopGradient,
    &stop_gradient::StraightThrough,
    &contraction::Einsum,
    &convolution::Conv,
    &convolution::ConvTranspose,
    &convolution::ConvDataGradient,
    &convolution::ConvWeightGradient,
    &norm::BATCH_NORM,
    &norm_gradient::BATCH_NORM_GRADIENT,
    &norm::BatchNormInference,
    &norm::LAYER_NORM,
    &norm_gradient::LAYER_NORM_GRADIENT,
    &norm::GROUP_NORM,
    &norm_gradient::GROUP_NORM_GRADIENT,
    &norm::RMS_NORM,
    &norm_gradient::RMS_NORM_GRADIENT,
    &pool::MaxPool,
    &pool::MaxPoolGradient,
    &average_pool::AveragePool,
    &average_pool::AveragePoolGradient,
    &adaptive_pool::AdaptiveAveragePool,
    &adaptive_pool::AdaptiveMaxPool,
    &attention::Attention,
    &attention_lse::AttentionWithLse,
    &attention_lse::AttentionGradient,
    &recurrence::Recurrence,
    &recurrence::RecurrenceGradient,
    &binary_loss::BinaryCrossEntropy,
    &loss::CROSS_ENTROPY,
    &loss::gradient::CROSS_ENTROPY_GRADIENT,
    &loss::NLL_LOSS,
    &loss::gradient::NLL_LOSS_GRADIENT,
    &softmax::SOFTMAX,
    &softmax::SOFTMAX_GRADIENT,
    &softmax::LOG_SOFTMAX,
    &softmax::LOG_SOFTMAX_GRADIENT,
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
