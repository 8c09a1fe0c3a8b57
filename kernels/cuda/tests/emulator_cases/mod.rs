//! The kernel that tests of the emulator plant faults in, and its input. Runs nothing.

use cuda_kernels::{Kernel, Param, ParamType};
use graph::{DType, Tensor};

/// Elements of its buffers.
pub const N: usize = 256;

/// A kernel of 128 threads from `x` to `y`, both of [`N`] floats.
pub fn kernel(name: &str, body: &str) -> Kernel {
    Kernel {
        name: name.into(),
        text: format!(
            "SH_KERNEL({name}, 128, 1)(SH_IN(float) x, SH_OUT(float) y) {{\n{body}\n}}\n"
        ),
        params: vec![
            Param {
                name: "x".into(),
                ty: ParamType::In(DType::F32),
            },
            Param {
                name: "y".into(),
                ty: ParamType::Out(DType::F32),
            },
        ],
        threads: 128,
        min_blocks: 1,
        origin: "planted".into(),
    }
}

/// Its input: 0, 1, 2, ….
pub fn input() -> Tensor {
    Tensor::from_f64(DType::F32, &[N], (0..N).map(|i| i as f64).collect())
}

/// The element of a thread, at the beginning of a body.
pub const I: &str = "const int i = SH_BID * 128 + SH_TID;\n";
