//! Products that NVIDIA's cuBLASLt computes, and the choice between it and our own kernels.
//!
//! Owns the description of a product in cuBLASLt's terms, its meaning (executed on the host by tests
//! and by the emulator) and the tables of measured times that choices are read from. Never calls the
//! library, which is the device's; never decides what is a contraction.

mod choice;
mod gemm;
mod host;
mod table;

use crate::cuda::{Param, ParamType};
use graph::DType;

pub use choice::{Choice, Offers, Products};
pub use gemm::{Compute, Finish, Gemm, Matrix};
pub use host::{Operands, multiply};
pub(super) use host::{run, traffic};
pub use table::{Candidate, Key, Measured, Measurer, Table, TableError};

/// One product as the library computes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Product {
    /// Its name in messages, unique in a program.
    pub name: String,
    /// What it computes.
    pub gemm: Gemm,
    /// Which algorithm: the position in the library's own order of those that it offers for this
    /// product, this size of workspace and these alignments, the first being 0.
    pub rank: usize,
    /// Bytes of workspace that the algorithm may use.
    pub workspace_bytes: usize,
    /// What a launch is given: A, B and D, then the bias and the workspace, where there are some.
    pub params: Vec<Param>,
}

impl Product {
    /// A product whose parameters follow from its description.
    pub fn new(name: String, gemm: Gemm, rank: usize, workspace_bytes: usize) -> Product {
        let param = |name: &str, ty| Param {
            name: name.to_string(),
            ty,
        };
        let mut params = vec![
            param("a", ParamType::In(gemm.a.dtype)),
            param("b", ParamType::In(gemm.b.dtype)),
            param("d", ParamType::Out(gemm.d.dtype)),
        ];
        if gemm.finish != Finish::Nothing {
            params.push(param("bias", ParamType::In(gemm.d.dtype)));
        }
        if workspace_bytes > 0 {
            params.push(param("workspace", ParamType::Out(DType::U8)));
        }
        Product {
            name,
            gemm,
            rank,
            workspace_bytes,
            params,
        }
    }

    /// Position of the bias among the parameters.
    pub fn bias(&self) -> Option<usize> {
        (self.gemm.finish != Finish::Nothing).then_some(3)
    }

    /// Position of the workspace among the parameters.
    pub fn workspace(&self) -> Option<usize> {
        (self.workspace_bytes > 0).then(|| self.params.len() - 1)
    }
}
