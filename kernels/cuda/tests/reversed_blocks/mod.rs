//! Kernels of two blocks that write their input backwards, and how they are run. Plants nothing.

use crate::emulator_cases::{I, N, input};
use cuda_kernels::emulate::{EmulateError, Emulator, FaultKind, Memory, Settings};
use cuda_kernels::{Arg, Launch};
use graph::DType;

/// Runs a kernel of two blocks under several seeds. Returns the outputs, or the faults' kinds.
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

/// Reverses each block's elements through shared memory, with `barrier` between writing and reading.
pub fn reverse(barrier: &str) -> String {
    format!("{I}SH_SHARED(float, s, 128);\ns[SH_TID] = x[i];\n{barrier}\ny[i] = s[127 - SH_TID];")
}

/// What [`reverse`] gives at `i`.
pub fn reversed(i: usize) -> f64 {
    (i / 128 * 128 + 127 - i % 128) as f64
}
