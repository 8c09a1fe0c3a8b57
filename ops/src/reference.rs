//! What reference evaluations share: constant shapes and row-major index arithmetic.
//!
//! These run on tensors of the tests' sizes; clarity goes before speed.

use crate::op::{Call, OpError};
use graph::{Binary, DType, Scalar, SymExpr, Tensor};

/// The shape as numbers.
///
/// # Errors
/// A size is symbolic or negative.
pub fn constant_shape(call: &Call, shape: &[SymExpr]) -> Result<Vec<usize>, OpError> {
    let number = |s: &SymExpr| {
        s.as_const()
            .and_then(|n| usize::try_from(n).ok())
            .ok_or_else(|| call.shape_error(format!("size `{s}` has no value here")))
    };
    shape.iter().map(number).collect()
}

/// The size as a number, which may be negative (a crop, an offset).
///
/// # Errors
/// The size is symbolic.
pub fn constant(call: &Call, size: &SymExpr) -> Result<i64, OpError> {
    size.as_const()
        .ok_or_else(|| call.shape_error(format!("size `{size}` has no value here")))
}

/// A required input's tensor.
///
/// # Errors
/// It is absent.
pub fn required<'t>(
    call: &Call,
    inputs: &[Option<&'t Tensor>],
    position: usize,
) -> Result<&'t Tensor, OpError> {
    inputs
        .get(position)
        .copied()
        .flatten()
        .ok_or_else(|| OpError::MissingInput {
            op: call.library.op.clone(),
            position,
        })
}

/// Index of a row-major position.
pub fn unravel(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for d in (0..shape.len()).rev() {
        index[d] = at % shape[d];
        at /= shape[d];
    }
    index
}

/// Row-major position of an index.
pub fn ravel(index: &[usize], shape: &[usize]) -> usize {
    index.iter().zip(shape).fold(0, |at, (i, n)| at * n + i)
}

/// Row-major position in a broadcast operand.
pub fn broadcast_offset(shape: &[usize], index: &[usize]) -> usize {
    let skip = index.len() - shape.len();
    let along = shape.iter().zip(&index[skip..]);
    along.fold(0, |at, (n, i)| at * n + if *n == 1 { 0 } else { *i })
}

/// Adds to the element at a row-major position; integers keep all their bits.
pub fn add_at(sums: &mut Tensor, at: usize, term: Scalar) {
    sums.set(at, Binary::Add.eval(sums.at(at), term));
}

/// A tensor whose element at each index is that of `source` at the position `from` gives; where it
/// gives none the element is zero.
pub fn rearrange(
    source: &Tensor,
    shape: &[usize],
    mut from: impl FnMut(&[usize]) -> Option<usize>,
) -> Tensor {
    let mut out = Tensor::zeros(source.dtype, shape);
    for at in 0..out.len() {
        if let Some(offset) = from(&unravel(at, shape)) {
            out.set(at, source.at(offset));
        }
    }
    out
}

/// A tensor with each element computed from its index.
pub fn tabulate(dtype: DType, shape: &[usize], mut f: impl FnMut(&[usize]) -> f64) -> Tensor {
    let n = shape.iter().product();
    let data = (0..n).map(|at| f(&unravel(at, shape))).collect();
    Tensor::from_f64(dtype, shape, data)
}
