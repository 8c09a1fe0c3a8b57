//! Products that NVIDIA's cuBLASLt, convolutions that its cuDNN and attention that PyTorch's operators
//! compute, and the choice between them and our own kernels.
//!
//! Owns the description of a product, of a convolution and of attention in the libraries' terms, their meaning
//! (executed on the host by tests and by the emulator) and the tables of measured times that choices are
//! read from. Never calls a library, which is the device's; never decides what is a contraction.

mod attend;
mod attention;
mod choice;
mod convolution;
mod convolve;
mod gemm;
mod host;
mod operation;
mod table;

use crate::{Param, ParamType};
use graph::DType;

pub(super) use attend::{attend, call_traffic};
pub use attention::{Attending, Attention, Call, CallOperand, Mask, Pass as CallPass};
pub use choice::{Choice, Offers, Products};
pub use convolution::{Array, Convolution, Direction};
pub use convolve::convolve;
pub use gemm::{Compute, Finish, Gemm, Matrix};
pub use host::{Operands, multiply};
pub(super) use host::{run, traffic};
pub use operation::Operation;
pub use table::{Candidate, Key, Measured, Measurer, Table, TableError};

/// One product or convolution as its library computes it.
#[derive(Clone, Debug, PartialEq)]
pub struct LibraryProduct {
    /// Its name in messages, unique in a program.
    pub name: String,
    /// What it computes.
    pub operation: Operation,
    /// Which algorithm: the position in the library's own order of those that it offers for this
    /// operation, this size of workspace and these alignments, the first being 0.
    pub rank: usize,
    /// Bytes of workspace that the algorithm may use.
    pub workspace_bytes: usize,
    /// What a launch is given: two operands and the result, then the bias and the workspace, where there
    /// are some.
    pub params: Vec<Param>,
}

impl LibraryProduct {
    /// A product whose parameters follow from its description.
    pub fn new(
        name: String,
        operation: Operation,
        rank: usize,
        workspace_bytes: usize,
    ) -> LibraryProduct {
        let param = |name: &str, ty| Param {
            name: name.to_string(),
            ty,
        };
        let [a, b, d] = operation.dtypes();
        let mut params = vec![
            param("a", ParamType::In(a)),
            param("b", ParamType::In(b)),
            param("d", ParamType::Out(d)),
        ];
        if operation.finish() != Finish::Nothing {
            params.push(param("bias", ParamType::In(d)));
        }
        if workspace_bytes > 0 {
            params.push(param("workspace", ParamType::Out(DType::U8)));
        }
        LibraryProduct {
            name,
            operation,
            rank,
            workspace_bytes,
            params,
        }
    }

    /// Position of the bias among the parameters.
    pub fn bias(&self) -> Option<usize> {
        (self.operation.finish() != Finish::Nothing).then_some(3)
    }

    /// Position of the workspace among the parameters.
    pub fn workspace(&self) -> Option<usize> {
        (self.workspace_bytes > 0).then(|| self.params.len() - 1)
    }
}
