//! A product as cuBLASLt describes it: column-major matrices with leading dimensions, transposed or
//! not, in a strided batch, with what is done to each finished sum.
//!
//! Owns the description and its one text, which tables are keyed by. Never reads a graph.

use graph::DType;
use std::fmt;

/// `D[i, j] = finish(sum over l of op(A)[i, l] * op(B)[l, j])` for every product of the batch: alpha is
/// 1, beta 0. `op(A)` is `[m, k]`, `op(B)` is `[k, n]`, D is `[m, n]`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gemm {
    /// Rows of D.
    pub m: i64,
    /// Columns of D.
    pub n: i64,
    /// Terms of a sum.
    pub k: i64,
    /// The left factor.
    pub a: Matrix,
    /// The right factor.
    pub b: Matrix,
    /// The result; never transposed.
    pub d: Matrix,
    /// Number of products.
    pub batch: i64,
    /// How sums are made.
    pub compute: Compute,
    /// What is done to a finished sum.
    pub finish: Finish,
    /// Whether A is the second factor of the contraction: a row-major result is the transposed
    /// product in column-major terms.
    pub is_swapped: bool,
}

/// A matrix in memory: element `[i, j]` of product `p` is `offset + i + j * ld + p * batch_stride`
/// elements after the buffer's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Matrix {
    /// Type of its elements.
    pub dtype: DType,
    /// Whether the operand is this matrix transposed.
    pub is_transposed: bool,
    /// Rows as stored, neighbours in memory.
    pub rows: i64,
    /// Columns as stored.
    pub columns: i64,
    /// Elements from one column to the next, at least `rows`.
    pub ld: i64,
    /// Elements from one product's matrix to the next one's; 0 for one matrix in all products.
    pub batch_stride: i64,
    /// Elements before the first.
    pub offset: i64,
}

/// How sums are made. None rounds factors to fewer bits than they have: f32 is never TF32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Compute {
    /// Sums of f32 products in f32, without any substitute (`CUBLAS_COMPUTE_32F_PEDANTIC`).
    F32Pedantic,
    /// Sums of products of 16-bit factors in f32 (`CUBLAS_COMPUTE_32F`).
    F32,
    /// Sums in f64 (`CUBLAS_COMPUTE_64F`).
    F64,
}

/// What is done to a finished sum before it is rounded once to the result's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finish {
    /// Nothing (`CUBLASLT_EPILOGUE_DEFAULT`).
    Nothing,
    /// The bias of its row is added: a packed vector of m elements of the result's type
    /// (`CUBLASLT_EPILOGUE_BIAS`).
    Bias,
    /// The same, then negative values become 0 (`CUBLASLT_EPILOGUE_RELU_BIAS`).
    BiasRelu,
}

impl Gemm {
    /// Multiplications and additions, two per term.
    pub fn flops(&self) -> u64 {
        [self.m, self.n, self.k, self.batch]
            .iter()
            .fold(2, |all: u64, n| all.saturating_mul(*n as u64))
    }

    /// The matrices with their names, in cuBLASLt's order.
    pub fn matrices(&self) -> [(&'static str, &Matrix); 3] {
        [("A", &self.a), ("B", &self.b), ("D", &self.d)]
    }
}

impl Matrix {
    /// Alignment in bytes of the address of the first element, if its buffer starts at a
    /// multiple of `buffer` bytes.
    pub fn alignment(&self, buffer: u64) -> u64 {
        gcd(buffer, self.offset_bytes())
    }

    /// Bytes from the buffer's start to the first element.
    pub fn offset_bytes(&self) -> u64 {
        self.offset.unsigned_abs() * self.dtype.bytes() as u64
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    match b {
        0 => a,
        _ => gcd(b, a % b),
    }
}

/// Everything that a time depends on but the device: tables know a product by this text.
impl fmt::Display for Gemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Gemm { m, n, k, batch, .. } = self;
        write!(f, "m {m} n {n} k {k} batch {batch}")?;
        for (name, x) in self.matrices() {
            let sort = if x.is_transposed { " transposed" } else { "" };
            write!(f, "; {name} {}{sort} ld {}", x.dtype, x.ld)?;
            if *batch > 1 {
                write!(f, " stride {}", x.batch_stride)?;
            }
            if x.offset != 0 {
                write!(f, " offset {}", x.offset)?;
            }
        }
        Ok(())
    }
}
