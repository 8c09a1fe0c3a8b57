//! The emulator of CUDA text: sound kernels pass under several orders of execution, and each planted
//! fault is found while its sound twin is not blamed.

mod emulator_cases;
mod reversed_blocks;

use cuda_kernels::emulate::{Access, EmulateError, Emulator, FaultKind, Memory, Settings};
use cuda_kernels::{Arg, Kernel, Launch};
use emulator_cases::{I, N, input, kernel};
use graph::DType;
use reversed_blocks::{reverse, reversed, run};

#[test]
fn sound_kernels_compute() {
    let kernels = [
        kernel("reversed", &reverse("SH_SYNC();")),
        kernel(
            "sums",
            &format!("{I}y[i] = sh_block_sum<128>(x[i]) + sh_block_max<128>(x[i]);"),
        ),
        kernel(
            "pairs",
            &format!(
                "{I}SH_DYNAMIC(pool);\nSH_CARVE(float, s, pool, 1024, 128);\ns[SH_TID] = x[i];\n\
                 SH_WARP_SYNC();\nfloat v[2] = {{s[SH_TID ^ 1], sh_shuffle_down(x[i], 1)}};\n\
                 sh_block_sum<128, 2>(v);\ny[i] = s[SH_TID ^ 1] + 0.0f * v[1] + v[0];"
            ),
        ),
        kernel(
            "vectors",
            "if (SH_TID < 32) {\nsh_vec<float, 4> v = sh_load<4>(x, SH_BID * 128 + 4 * SH_TID);\n\
             SH_UNROLL\nfor (int k = 0; k < 4; k++) v[k] = sh_exp(0.0f * v[k]);\n\
             sh_store<4>(y, SH_BID * 128 + 4 * SH_TID, v);\n}",
        ),
        kernel(
            "random",
            &format!("{I}y[i] = sh_uniform(0x123456789abcull, 1000000007ull * i);"),
        ),
    ];
    let emulator = Emulator::from_environment(&kernels).unwrap();
    let expected: [&dyn Fn(usize) -> f64; 5] = [
        &reversed,
        &|i| {
            (0..128).map(|t| (i / 128 * 128 + t) as f64).sum::<f64>() + (i / 128 * 128 + 127) as f64
        },
        &|i| (i ^ 1) as f64 + (0..128).map(|t| (i / 128 * 128 + t) as f64).sum::<f64>(),
        &|_| 1.0,
        &|i| {
            f64::from(graph::philox::uniform(
                0x1234_5678_9abc,
                1_000_000_007 * i as u64,
            ))
        },
    ];
    for (idx, expected) in expected.iter().enumerate() {
        let found = run(&emulator, idx).unwrap();
        let expected: Vec<f64> = (0..N).map(expected).collect();
        assert_eq!(found, expected, "{}", kernels[idx].name);
    }
}

/// Every fault planted in one kernel, and what must be found of it.
#[test]
fn planted_faults_are_found() {
    type Found = fn(&FaultKind) -> bool;
    let planted: Vec<(&str, String, Found)> = vec![
        (
            "removed_barrier",
            reverse(""),
            |kind| matches!(kind, FaultKind::Race { array, .. } | FaultKind::Uninitialized { array, .. } if array == "s"),
        ),
        (
            "second_use_without_barrier",
            reverse("SH_SYNC();") + "\ns[SH_TID] = 0.0f;",
            |kind| {
                matches!(kind, FaultKind::Race { array, access: Access::Write, other_access: Access::Read, .. } if array == "s")
                    || matches!(kind, FaultKind::Race { array, access: Access::Read, .. } if array == "s")
            },
        ),
        (
            "off_by_one",
            format!("{I}y[i] = x[i + 1];"),
            |kind| matches!(kind, FaultKind::OutOfBounds { array, element: 256, n: 256, access: Access::Read } if array == "input"),
        ),
        (
            "write_outside",
            format!("{I}y[i] = 0.0f;\nif (i == 255) y[-1] = 0.0f;"),
            |kind| {
                matches!(
                    kind,
                    FaultKind::OutOfBounds {
                        element: -1,
                        access: Access::Write,
                        ..
                    }
                )
            },
        ),
        (
            "shared_outside",
            format!("{I}SH_SHARED(float, s, 127);\ns[SH_TID] = 0.0f;\ny[i] = x[i];"),
            |kind| matches!(kind, FaultKind::OutOfBounds { array, element: 127, .. } if array == "s"),
        ),
        (
            "unwritten_output",
            format!("{I}if (i != 77) y[i] = x[i];"),
            |kind| {
                matches!(
                    kind,
                    FaultKind::Unwritten {
                        n: 1,
                        first: 77,
                        ..
                    }
                )
            },
        ),
        (
            "unwritten_read",
            format!("{I}y[i] += x[i];"),
            |kind| matches!(kind, FaultKind::Uninitialized { array, .. } if array == "output"),
        ),
        (
            "divergent_barrier",
            format!("{I}y[i] = x[i];\nif (SH_TID < 64) SH_SYNC();"),
            |kind| matches!(kind, FaultKind::DivergentBarrier { line: 4, threads } if threads == "0-63 barrier@4, 64-127 ended"),
        ),
        (
            "two_barriers",
            format!("{I}y[i] = x[i];\nif (SH_TID < 64)\n SH_SYNC();\nelse\n SH_SYNC();"),
            |kind| matches!(kind, FaultKind::DivergentBarrier { threads, .. } if threads == "0-63 barrier@5, 64-127 barrier@7"),
        ),
        (
            "missing_lane",
            format!("{I}y[i] = x[i];\nif (SH_TID != 40) y[i] = sh_shuffle_xor(x[i], 1);"),
            |kind| matches!(kind, FaultKind::MissingLanes { line: 4, threads } if threads.contains("40 ended")),
        ),
        (
            "misaligned_vector",
            format!("{I}y[i] = sh_load<2>(x, i - (SH_TID == 127))[0];"),
            |kind| matches!(kind, FaultKind::Misaligned { array, width: 2, .. } if array == "input"),
        ),
        (
            "threads_collide",
            format!("{I}y[i] = x[i];\ny[SH_BID * 128] = x[i];"),
            |kind| matches!(kind, FaultKind::Race { array, .. } if array == "output"),
        ),
        (
            "blocks_collide",
            format!("{I}y[i] = x[i];\nif (SH_TID == 0) y[SH_BID ? 5 : 250] = 0.0f;"),
            |kind| matches!(kind, FaultKind::Race { array, .. } if array == "output"),
        ),
        (
            "no_warp_barrier",
            format!("{I}SH_SHARED(float, s, 128);\ns[SH_TID] = x[i];\ny[i] = s[SH_TID ^ 1];"),
            |kind| matches!(kind, FaultKind::Race { array, .. } | FaultKind::Uninitialized { array, .. } if array == "s"),
        ),
        (
            "pool_too_small",
            format!(
                "{I}SH_DYNAMIC(pool);\nSH_CARVE(float, s, pool, 4000, 128);\ns[SH_TID] = 0.0f;\ny[i] = x[i];"
            ),
            |kind| matches!(kind, FaultKind::SharedTooLarge { array, bytes: 4512 } if array == "s"),
        ),
        (
            "halves_of_a_warp_in_two_calls",
            format!("{I}y[i] = SH_LANE < 16 ? sh_block_sum<128>(x[i]) : sh_block_sum<128>(2 * x[i]);"),
            |kind| matches!(kind, FaultKind::MissingLanes { line: 3, threads } if threads.starts_with("0-15 warp@3, 16-31 warp@3")),
        ),
        (
            "two_barriers_on_a_line",
            format!("{I}y[i] = x[i];\nif (SH_TID < 64) SH_SYNC(); else SH_SYNC();"),
            |kind| matches!(kind, FaultKind::DivergentBarrier { threads, .. } if threads == "0-63 barrier@4, 64-127 barrier@4"),
        ),
        (
            "misaligned_scalar",
            format!(
                "{I}SH_DYNAMIC(pool);\nSH_CARVE(float, s, pool, 2, 128);\ns[SH_TID] = 0.0f;\ny[i] = x[i];"
            ),
            |kind| matches!(kind, FaultKind::Misaligned { array, width: 1, .. } if array == "s"),
        ),
        (
            "sum_of_another_block",
            format!("{I}y[i] = sh_block_sum<64>(x[i]);"),
            |kind| matches!(kind, FaultKind::BlockSize { threads: 64 }),
        ),
        (
            "arrays_of_two_branches",
            format!(
                "{I}if (SH_BID == 0) {{ SH_SHARED(float, s, 30 * 256); s[SH_TID] = x[i]; y[i] = s[SH_TID]; }}\n\
                 else {{ SH_SHARED(float, r, 30 * 256); r[SH_TID] = x[i]; y[i] = r[SH_TID]; }}"
            ),
            |kind| matches!(kind, FaultKind::SharedTooLarge { bytes: 65536, .. }),
        ),
        (
            "carve_of_more_than_addresses",
            format!(
                "{I}SH_DYNAMIC(pool);\nSH_CARVE(float, s, pool, 0, 0x4000000000000001ll);\n\
                 s[SH_TID] = 0.0f;\ny[i] = x[i];"
            ),
            |kind| matches!(kind, FaultKind::SharedTooLarge { array, .. } if array == "s"),
        ),
        (
            "name_that_another_begins",
            format!(
                "{I}y[i] = x[i];\nSH_SHARED(float, s1, 4);\nSH_SHARED(float, s10, 4);\n\
                 if (i) return;\nfor (int k = 1; k < 4; k++) s1[-k] = 0.0f;\ns10[-1] = 0.0f;"
            ),
            |kind| matches!(kind, FaultKind::OutOfBounds { array, .. } if array == "s10"),
        ),
        (
            "deadlock_when_the_list_is_full",
            format!(
                "{I}y[i] = x[i];\nif (i) return;\n{}SH_SYNC();",
                (0..11)
                    .map(|n| format!(
                        "{{ SH_SHARED(float, s_{n}_, 4); for (int k = 0; k < {}; k++) s_{n}_[-1] = 0.0f; }}\n",
                        if n < 10 { 3 } else { 2 }
                    ))
                    .collect::<String>()
            ),
            |kind| matches!(kind, FaultKind::OutOfBounds { array, .. } if array == "s_10_"),
        ),
    ];
    let kernels: Vec<Kernel> = planted
        .iter()
        .map(|(name, body, _)| kernel(name, body))
        .collect();
    let emulator = Emulator::from_environment(&kernels).unwrap();
    for (idx, (name, _, is_it)) in planted.iter().enumerate() {
        let faults = run(&emulator, idx).expect_err(name);
        assert!(faults.iter().any(is_it), "{name}: {faults:?}");
    }
}

#[test]
fn a_loop_without_end_is_ended_and_the_next_launch_is_sound() {
    let kernels = [
        kernel("endless", &format!("{I}while (x[0] == 0.0f) y[i] = 1.0f;")),
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
    let settings = Settings {
        step_limit: 100_000,
        ..Settings::of_seed(1)
    };
    let error = emulator.run(&launch, &mut memory, &settings).unwrap_err();
    assert!(matches!(&error, EmulateError::Faults(faults) if faults[0].kind == FaultKind::Endless));
    assert!(
        error.to_string().contains("kernel endless (of planted)"),
        "{error}"
    );
    launch.kernel = 1;
    emulator.run(&launch, &mut memory, &settings).unwrap();
    assert_eq!(memory.values(y), input().to_f64());
}
