//! What a product's description means, executed on the host, and the emulator's run of a library's launch.
//!
//! Written from cuBLASLt's documentation of `cublasLtMatmul` and of its layouts' attributes, and from
//! nothing else: tests hold descriptions against it that were made from graphs, and the emulator runs
//! launches by it and by [`super::convolve()`]. Sums are made in f64 and rounded once, to the result's type.

use super::convolution::Array;
use super::convolve::{convolve, for_each};
use super::gemm::{Finish, Gemm, Matrix};
use super::{LibraryProduct, Operation};
use crate::emulate::{EmulateError, Fault, FaultKind, Memory, Traffic};

/// The elements of the buffers, each counted from its buffer's start.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    /// Elements of A, or of the first operand of a convolution.
    pub a: &'a [f64],
    /// Elements of B, or of the second operand of a convolution.
    pub b: &'a [f64],
    /// Elements of the bias, if there is one.
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

/// Runs a product on the emulator's memory. `buffers` are those of its parameters up to the workspace,
/// in which nothing is kept.
///
/// # Errors
/// What a kernel's launch would be blamed for: an element that was never written, or outside its buffer.
pub(crate) fn run(
    product: &LibraryProduct,
    memory: &mut Memory,
    buffers: &[usize],
) -> Result<(), EmulateError> {
    let fault = |kind| {
        EmulateError::Faults(vec![Fault {
            kernel: product.name.clone(),
            origin: String::new(),
            block: 0,
            thread: 0,
            kind,
        }])
    };
    let bias = product.bias().map(|at| buffers[at]);
    let reads = [buffers[0], buffers[1]].into_iter().chain(bias);
    for (buffer, places) in reads.zip(places_read(&product.operation)) {
        unread(memory, buffer, &places).map_err(|element| {
            let array = memory.name(buffer).to_string();
            fault(FaultKind::Uninitialized { array, element })
        })?;
    }
    let (a, b) = (memory.values(buffers[0]), memory.values(buffers[1]));
    let bias = bias.map(|buffer| memory.values(buffer));
    let operands = Operands {
        a: &a,
        b: &b,
        bias: bias.as_deref(),
    };
    let mut outside = None;
    let mut store = |at, value| {
        if !memory.put(buffers[2], at, value) {
            outside = outside.or(Some(at));
        }
    };
    let computed = match &product.operation {
        Operation::Gemm(gemm) => multiply(gemm, &operands, &mut store),
        Operation::Convolution(convolution) => convolve(convolution, &operands, &mut store),
    };
    let failed = |problem| EmulateError::Launch {
        kernel: product.name.clone(),
        origin: String::new(),
        problem,
    };
    computed.map_err(failed)?;
    match outside {
        None => Ok(()),
        Some(at) => Err(failed(format!(
            "element {at} of its result is not in its buffer"
        ))),
    }
}

/// What a launch must move: each element of its operands and its result once. What the library's kernels
/// move in addition is not known.
pub(crate) fn traffic(operation: &Operation) -> Traffic {
    let biases = |n: i64, dtype: graph::DType| match operation.finish() {
        Finish::Nothing => 0,
        Finish::Bias | Finish::BiasRelu => n as u64 * dtype.bytes() as u64,
    };
    match operation {
        Operation::Gemm(gemm) => {
            let bytes = |x: &Matrix| {
                let n_matrices = if x.batch_stride == 0 { 1 } else { gemm.batch };
                (x.rows * x.columns * n_matrices) as u64 * x.dtype.bytes() as u64
            };
            let bias = biases(gemm.m, gemm.d.dtype);
            Traffic::once(bytes(&gemm.a) + bytes(&gemm.b) + bias, bytes(&gemm.d))
        }
        Operation::Convolution(c) => {
            let [a, b, d] = (c.operands()).map(|(_, x)| x.len() as u64 * x.dtype.bytes() as u64);
            Traffic::once(a + b + biases(c.y.sizes[1], c.y.dtype), d)
        }
    }
}

/// Positions of the elements that a launch reads: in each operand, then in the bias.
fn places_read(operation: &Operation) -> [Vec<i64>; 3] {
    match operation {
        Operation::Gemm(gemm) => {
            let of = |x| places(x, gemm.batch).collect();
            [of(&gemm.a), of(&gemm.b), (0..gemm.m).collect()]
        }
        Operation::Convolution(c) => {
            let [(_, a), (_, b), _] = c.operands();
            [
                array_places(a),
                array_places(b),
                (0..c.y.sizes[1]).collect(),
            ]
        }
    }
}

/// Every position of an array; for images also those that no window reaches, which the library may read.
fn array_places(x: &Array) -> Vec<i64> {
    let mut all = Vec::new();
    let _: Result<(), String> = for_each(x.sizes, |at| {
        all.push(x.place(at));
        Ok(())
    });
    all
}

/// Positions of a matrix's elements in all products.
fn places(x: &Matrix, batch: i64) -> impl Iterator<Item = i64> {
    let x = *x;
    let n_matrices = if x.batch_stride == 0 { 1 } else { batch };
    (0..n_matrices).flat_map(move |p| {
        (0..x.columns).flat_map(move |column| (0..x.rows).map(move |row| place(&x, row, column, p)))
    })
}

/// The first of these elements that was never written.
fn unread(memory: &Memory, buffer: usize, places: &[i64]) -> Result<(), i64> {
    let known = memory.initialized(buffer);
    // What is outside of the buffer is told by the launch itself.
    let is_unwritten = |at: &&i64| known.get(**at as usize) == Some(&0);
    places
        .iter()
        .find(is_unwritten)
        .map_or(Ok(()), |at| Err(*at))
}
