//! What a library of NVIDIA's computes in one launch: a product of matrices, or a convolution.
//!
//! Owns what both have in common. Never reads a graph.

use super::convolution::Convolution;
use super::gemm::{Finish, Gemm};
use graph::DType;
use std::fmt;

/// One launch of a library.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// cuBLASLt's.
    Gemm(Gemm),
    /// cuDNN's.
    Convolution(Convolution),
}

impl Operation {
    /// Which library computes it.
    pub fn library(&self) -> &'static str {
        match self {
            Operation::Gemm(_) => "cuBLASLt",
            Operation::Convolution(_) => "cuDNN",
        }
    }

    /// How reports name its launches.
    pub fn path(&self) -> &'static str {
        match self {
            Operation::Gemm(_) => "cublaslt",
            Operation::Convolution(_) => "cudnn",
        }
    }

    /// Multiplications and additions, two per term.
    pub fn flops(&self) -> u64 {
        match self {
            Operation::Gemm(gemm) => gemm.flops(),
            Operation::Convolution(convolution) => convolution.flops(),
        }
    }

    /// Types of what it reads, first and second, and of what it writes.
    pub fn dtypes(&self) -> [DType; 3] {
        match self {
            Operation::Gemm(gemm) => [gemm.a.dtype, gemm.b.dtype, gemm.d.dtype],
            Operation::Convolution(c) => c.operands().map(|(_, array)| array.dtype),
        }
    }

    /// Whether what it reads first is the contraction's second factor.
    pub fn is_swapped(&self) -> bool {
        match self {
            Operation::Gemm(gemm) => gemm.is_swapped,
            Operation::Convolution(convolution) => convolution.is_swapped,
        }
    }

    /// What is done to a finished sum.
    pub fn finish(&self) -> Finish {
        match self {
            Operation::Gemm(gemm) => gemm.finish,
            Operation::Convolution(convolution) => convolution.finish,
        }
    }

    /// Returns the operation with something else done to its sums.
    #[must_use]
    pub fn finished(&self, finish: Finish) -> Operation {
        match self {
            Operation::Gemm(gemm) => Operation::Gemm(Gemm {
                finish,
                ..gemm.clone()
            }),
            Operation::Convolution(convolution) => Operation::Convolution(Convolution {
                finish,
                ..convolution.clone()
            }),
        }
    }

    /// Number of elements of the bias that its result could be finished with, if the row or channel of an
    /// element of the result is its place modulo that number; else `None`.
    pub fn biases(&self) -> Option<i64> {
        match self {
            // A dense result of one product.
            Operation::Gemm(gemm) => {
                let is_dense = gemm.batch == 1 && gemm.d.ld == gemm.m && gemm.d.offset == 0;
                (is_dense && gemm.d.dtype != DType::F64).then_some(gemm.m)
            }
            Operation::Convolution(c) => {
                let is_dense = c.y.is_dense_in([0, 2, 3, 1]) && c.y.offset == 0;
                let is_forward = c.direction == super::Direction::Forward;
                (is_dense && is_forward).then_some(c.y.sizes[1])
            }
        }
    }
}

/// The text that tables know it by.
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::Gemm(gemm) => gemm.fmt(f),
            Operation::Convolution(convolution) => convolution.fmt(f),
        }
    }
}
