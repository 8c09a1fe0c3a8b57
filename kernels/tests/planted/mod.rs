//! Small kernels for the emulator's tests, and how they are run.

use graph::{DType, Tensor};
use kernels::cuda::emulate::{EmulateError, Emulator, FaultKind, Memory, Settings};
use kernels::cuda::{Arg, Kernel, Launch, Param, ParamType};

pub const N: usize = 256;

/// A kernel of 128 threads from `x` to `y`, both of 256 floats.
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

pub fn input() -> Tensor {
    Tensor::from_f64(DType::F32, &[N], (0..N).map(|i| i as f64).collect())
}

/// Runs a kernel of two blocks under several seeds; the outputs, or the faults' kinds.
pub fn run(emulator: &Emulator, idx: usize) -> Result<Vec<f64>, Vec<FaultKind>> {
    let mut last = Vec::new();
    for seed in 0..4 {
        let mut memory = Memory::default();
        let x = memory.add("input", &input());
        let y = memory.add_unwritten("output", DType::F32, N);
        let launch = Launch {
            kernel: idx,
            grid: [2, 1, 1],
            dynamic_shared_bytes: 4096,
            args: vec![Arg::Buffer(x), Arg::Buffer(y)],
        };
        match emulator.run(&launch, &mut memory, &Settings::of_seed(seed)) {
            Ok(()) => last = memory.values(y),
            Err(EmulateError::Faults(faults)) => {
                return Err(faults.into_iter().map(|fault| fault.kind).collect());
            }
            Err(error) => panic!("{error}"),
        }
    }
    Ok(last)
}

pub const I: &str = "const int i = SH_BID * 128 + SH_TID;\n";

pub fn reverse(barrier: &str) -> String {
    format!("{I}SH_SHARED(float, s, 128);\ns[SH_TID] = x[i];\n{barrier}\ny[i] = s[127 - SH_TID];")
}

pub fn reversed(i: usize) -> f64 {
    (i / 128 * 128 + 127 - i % 128) as f64
}
