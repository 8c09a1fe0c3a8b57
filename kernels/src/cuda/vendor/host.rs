//! What a product's description means, executed on the host.
//!
//! Written from cuBLASLt's documentation of `cublasLtMatmul` and of its layouts' attributes, and from
//! nothing else: tests hold descriptions against it that were made from graphs, and the emulator runs
//! products by it. Sums are made in f64 and rounded once, to the result's type.

use super::gemm::{Finish, Gemm, Matrix};

/// The elements of the buffers, each counted from its buffer's start.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    /// Of A.
    pub a: &'a [f64],
    /// Of B.
    pub b: &'a [f64],
    /// Of the bias, if there is one.
    pub bias: Option<&'a [f64]>,
}

/// Computes every element of D: calls `store` with its place in the buffer and its rounded value.
///
/// # Errors
/// An element of an operand lies outside its buffer; the sentence says which.
pub fn multiply(
    gemm: &Gemm,
    operands: &Operands<'_>,
    store: &mut dyn FnMut(usize, f64),
) -> Result<(), String> {
    let terms = gemm.k as usize;
    let (mut left, mut right) = (vec![0.0; terms], vec![0.0; terms]);
    for p in 0..gemm.batch {
        for j in 0..gemm.n {
            for (l, value) in right.iter_mut().enumerate() {
                *value = operand("B", operands.b, &gemm.b, l as i64, j, p)?;
            }
            for i in 0..gemm.m {
                for (l, value) in left.iter_mut().enumerate() {
                    *value = operand("A", operands.a, &gemm.a, i, l as i64, p)?;
                }
                let sum = left.iter().zip(&right).map(|(x, y)| x * y).sum();
                let value = finished(gemm.finish, sum, operands.bias, i)?;
                let at = place(&gemm.d, i, j, p);
                store(at as usize, gemm.d.dtype.round(value));
            }
        }
    }
    Ok(())
}

/// Element `[i, j]` of `op(X)` in product `p`.
fn operand(name: &str, all: &[f64], x: &Matrix, i: i64, j: i64, p: i64) -> Result<f64, String> {
    let (row, column) = if x.is_transposed { (j, i) } else { (i, j) };
    let at = place(x, row, column, p);
    let inside = row < x.rows && column < x.columns;
    let value = usize::try_from(at).ok().and_then(|at| all.get(at));
    value.filter(|_| inside).copied().ok_or_else(|| {
        format!("element [{row}, {column}] of {name} in product {p} is not in its buffer of {} elements", all.len())
    })
}

/// Position of a stored element: columns are `ld` apart, products `batch_stride`.
fn place(x: &Matrix, row: i64, column: i64, p: i64) -> i64 {
    x.offset + p * x.batch_stride + column * x.ld + row
}

/// The bias vector has an element for each row of D and is the same for all columns.
fn finished(finish: Finish, sum: f64, bias: Option<&[f64]>, row: i64) -> Result<f64, String> {
    let biased = || {
        let found = bias.and_then(|all| all.get(row as usize));
        let missing = || format!("there is no bias for row {row}");
        found.map(|b| sum + b).ok_or_else(missing)
    };
    Ok(match finish {
        Finish::Nothing => sum,
        Finish::Bias => biased()?,
        Finish::BiasRelu => biased().map(|v| if v < 0.0 { 0.0 } else { v })?,
    })
}
