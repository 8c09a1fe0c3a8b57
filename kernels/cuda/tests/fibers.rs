//! The emulator's ground: traps of the processor inside fibers, fibers switched by the C library, and
//! conversions of half precision in the host's prelude.

mod emulator_cases;
mod reversed_blocks;

use cuda_kernels::emulate::{EmulateError, Emulator, FaultKind, Memory, Settings};
use cuda_kernels::{Arg, Kernel, Launch, Param, ParamType};
use emulator_cases::{I, N, input, kernel};
use graph::{DType, Tensor};
use reversed_blocks::{reverse, reversed, run};

/// An x86-64 processor traps the division; others return a number.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_division_by_zero_is_a_fault_and_the_next_launch_is_sound() {
    let kernels = [
        kernel(
            "divided",
            &format!("{I}const int d = (int)x[i] - 200;\ny[i] = (float)(7 / d);"),
        ),
        kernel("sound", &format!("{I}y[i] = x[i];")),
    ];
    let emulator = Emulator::from_environment(&kernels).unwrap();
    let mut memory = Memory::default();
    let x = memory.add("input", &input());
    let y = memory.add_unwritten("output", DType::F32, N);
    let mut launch = Launch {
        kernel: 0,
        grid: [2, 1, 1],
        dynamic_shared_bytes: 0,
        args: vec![Arg::Buffer(x), Arg::Buffer(y)],
    };
    for seed in 0..2 {
        let error = emulator.run(&launch, &mut memory, &Settings::of_seed(seed));
        let Err(EmulateError::Faults(faults)) = error else {
            panic!("{error:?}");
        };
        let [fault] = &faults[..] else {
            panic!("{faults:?}");
        };
        let found = (&*fault.kernel, fault.block, fault.thread, &fault.kind);
        assert_eq!(found, ("divided", 1, 72, &FaultKind::DividedByZero));
    }
    launch.kernel = 1;
    emulator
        .run(&launch, &mut memory, &Settings::of_seed(0))
        .unwrap();
    assert_eq!(memory.values(y), input().to_f64());
}

/// What CPUs other than x86-64 use.
#[test]
fn fibers_of_the_c_library_do_the_same() {
    let kernels = [
        kernel("portable", &reverse("SH_SYNC();")),
        kernel(
            "portable_sum",
            &format!("{I}y[i] = sh_block_sum<128>(x[i]);"),
        ),
        kernel(
            "portable_stuck",
            &format!("{I}y[i] = x[i];\nif (SH_TID < 64) SH_SYNC();"),
        ),
    ];
    let emulator = Emulator::with_portable_fibers(&kernels).unwrap();
    let expected: Vec<f64> = (0..N).map(reversed).collect();
    assert_eq!(run(&emulator, 0).unwrap(), expected);
    let sum = |i: usize| (0..128).map(|t| (i / 128 * 128 + t) as f64).sum();
    assert_eq!(
        run(&emulator, 1).unwrap(),
        (0..N).map(sum).collect::<Vec<f64>>()
    );
    let faults = run(&emulator, 2).unwrap_err();
    assert!(matches!(faults[0], FaultKind::DivergentBarrier { .. }));
}

/// Half-precision conversions of the prelude are those of the graph, around every number of the types.
#[test]
fn half_precision_rounds_to_nearest_even() {
    for (dtype, name) in [(DType::F16, "sh_f16"), (DType::BF16, "sh_bf16")] {
        let text = format!(
            "SH_KERNEL(round_{name}, 128, 1)(SH_IN(float) x, SH_OUT({name}) y, SH_OUT(float) z) {{\n\
             {I}y[i] = sh_from_float<{name}>(x[i]);\nz[i] = sh_to_float(y[i]);\n}}\n"
        );
        let param = |name: &str, ty| Param {
            name: name.into(),
            ty,
        };
        let kernel = Kernel {
            name: format!("round_{name}"),
            text,
            params: vec![
                param("x", ParamType::In(DType::F32)),
                param("y", ParamType::Out(dtype)),
                param("z", ParamType::Out(DType::F32)),
            ],
            ..kernel("x", "")
        };
        let mut values: Vec<f64> = neighbourhoods(dtype);
        values.resize(values.len().next_multiple_of(128), 0.0);
        let n = values.len();
        let mut memory = Memory::default();
        let x = memory.add("x", &Tensor::from_f64(DType::F32, &[n], values.clone()));
        let y = memory.add_unwritten("y", dtype, n);
        let z = memory.add_unwritten("z", DType::F32, n);
        let launch = Launch {
            kernel: 0,
            grid: [n as u32 / 128, 1, 1],
            dynamic_shared_bytes: 0,
            args: vec![Arg::Buffer(x), Arg::Buffer(y), Arg::Buffer(z)],
        };
        let emulator = Emulator::from_environment(&[kernel]).unwrap();
        emulator
            .run(&launch, &mut memory, &Settings::of_seed(0))
            .unwrap();
        let (rounded, widened) = (memory.values(y), memory.values(z));
        for (i, &value) in values.iter().enumerate() {
            let expected = dtype.round(value);
            let same = |found: f64| {
                found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan()
            };
            assert!(same(rounded[i]), "{name} of {value:e} is {:e}", rounded[i]);
            assert!(
                same(widened[i]),
                "{name} of {value:e} widens to {:e}",
                widened[i]
            );
        }
    }
}

/// Every number of the type that fits sixteen bits, its midpoint to the next, and the single-precision
/// numbers on both sides of that, with both signs: infinities, what rounds to them, subnormal numbers
/// and zeros, and what is not a number.
fn neighbourhoods(dtype: DType) -> Vec<f64> {
    let largest = if dtype == DType::F16 { 0x7c00 } else { 0x7f80 };
    let mut memory = Memory::default();
    let all = memory.add_unwritten("all", dtype, 1);
    let mut number = |bits: u16| {
        memory.set_bits(all, &bits.to_le_bytes());
        memory.values(all)[0] as f32
    };
    let mut values = vec![f64::NAN];
    for bits in 0..=largest {
        let (low, high) = (number(bits), number((bits + 1).min(largest)));
        // Infinity stands where the next number would.
        let high = if high.is_infinite() && low.is_finite() {
            low + (low - number(bits - 1))
        } else {
            high
        };
        let middle = if low.is_infinite() {
            low
        } else {
            low + (high - low) / 2.0
        };
        let below = f32::from_bits(middle.to_bits().saturating_sub(1));
        let above = f32::from_bits(middle.to_bits() + 1);
        let near = [low, middle, below, above];
        values.extend(near.iter().flat_map(|&v| [f64::from(v), f64::from(-v)]));
    }
    values
}
