//! Products of warpgroups: executed by the emulator against plain sums in f64, over blocks with ends
//! inside, every order of the factors' elements, batches, split reductions, epilogues and convolutions;
//! planted faults are found; every tile is compiled for Hopper.

#[path = "../../tests/contraction_cases/mod.rs"]
mod contraction_cases;
mod contraction_runs;
mod warpgroup_cases;

use contraction_cases::{Conv, matmul};
use contraction_runs::{BF16, BUFFERS, Case, F32, Numbers, cases, check, run};
use cuda_kernels::contraction::{emit_for_warpgroups, n_warpgroup_tiles};
use cuda_kernels::emulate::{EmulateError, Emulator, FaultKind};
use cuda_kernels::lower::lower_with;
use cuda_kernels::nvrtc::{Nvrtc, compile, gate};
use cuda_kernels::passes::passes;
use cuda_kernels::vendor::{Candidate, Offers, Products};
use cuda_kernels::{Arch, Kernel, execute};
use graph::{Bindings, DType, NoLibrary, Precision, Tensor, interpret};
use kernels::cache::Cache;
use kernels::contraction::Contraction;
use std::path::{Path, PathBuf};
use std::process::Command;
use warpgroup_cases::{large, others, products};

#[test]
fn products_in_every_order_and_tile() {
    check(emit_for_warpgroups, products());
}

#[test]
fn batches_splits_epilogues_and_convolutions() {
    let (emitted, _) = cases(emit_for_warpgroups, others());
    let long = emitted.iter().find(|c| c.label == "long");
    let long = long.expect("a case with a long reduction");
    assert_eq!(
        (long.emitted.launches.len(), long.emitted.path),
        (2, "wgmma")
    );
    check(emit_for_warpgroups, others());
}

/// What an emulated launch must come to.
enum Found {
    Nothing,
    Fault(fn(&FaultKind) -> bool),
    WrongNumbers,
}

/// A tile, text that is replaced once, by what, and how that is found.
fn planted() -> Vec<(usize, &'static str, &'static str, Found)> {
    let is_race = |kind: &FaultKind| {
        matches!(
            kind,
            FaultKind::Race { .. } | FaultKind::Uninitialized { .. }
        )
    };
    let is_unordered = |kind: &FaultKind| {
        matches!(
            kind,
            FaultKind::Race { .. }
                | FaultKind::Uninitialized { .. }
                | FaultKind::DivergentBarrier { .. }
        )
    };
    let is_unbegun =
        |kind: &FaultKind| matches!(kind, FaultKind::Unfenced { array, .. } if array == "full");
    vec![
        (1, "sh_async_fence();", "sh_async_fence();", Found::Nothing),
        (
            1,
            "sh_async_fence();",
            "",
            Found::Fault(
                |kind| matches!(kind, FaultKind::Unfenced { array, .. } if array == "pool"),
            ),
        ),
        (
            1,
            "SH_SYNC(); /* the block is written",
            "/* ",
            Found::Fault(is_race),
        ),
        (1, "sh_copy_wait<0>();", "", Found::Fault(is_race)),
        (1, "sh_wgmma_wait<1>(acc);", "", Found::Fault(is_race)),
        (
            1,
            "sh_wgmma_wait<1>(acc);",
            "sh_wgmma_wait<2>(acc);",
            Found::Fault(is_race),
        ),
        (1, "sh_wgmma_wait<0>(acc);", "", Found::WrongNumbers),
        (
            1,
            "sh_wgmma_bf16<0, 1>(acc, x, y);",
            "if (SH_WARP != 6) sh_wgmma_bf16<0, 1>(acc, x, y);",
            Found::Fault(|kind| matches!(kind, FaultKind::MissingLanes { .. })),
        ),
        (
            1,
            "(warpgroup*64)",
            "(SH_WARP / 2 % 2 * 64)",
            Found::Fault(|kind| matches!(kind, FaultKind::MissingLanes { .. })),
        ),
        (
            1,
            "sh_wgmma_fence(acc);",
            "",
            Found::Fault(|kind| matches!(kind, FaultKind::SumsUnfenced)),
        ),
        (1, "(piece ^ line % 8)", "piece", Found::WrongNumbers),
        (
            1,
            "sh_matrix<1, 16,",
            "sh_matrix<2, 16,",
            Found::WrongNumbers,
        ),
        (
            1,
            "sh_matrix<1, 16, 1024>",
            "sh_matrix<1, 16, 2048>",
            Found::WrongNumbers,
        ),
        (
            1,
            "sh_matrix<1, 8192,",
            "sh_matrix<1, 1024,",
            Found::WrongNumbers,
        ),
        (1, "<0, 1>(acc", "<1, 1>(acc", Found::WrongNumbers),
        (1, "(warpgroup*64)", "(0)", Found::WrongNumbers),
        (1, "next == 2", "next == 1", Found::Fault(is_race)),
        (
            4,
            "sh_phases_begin();",
            "sh_phases_begin();",
            Found::Nothing,
        ),
        (4, "sh_phases_begin();", "", Found::Fault(is_unbegun)),
        (
            4,
            "sh_phases_begin();",
            "sh_async_fence();",
            Found::Fault(is_unbegun),
        ),
        (
            4,
            "sh_phase_wait(empty, s, step / 3 % 2 ^ 1);",
            "",
            Found::Fault(is_unordered),
        ),
        (
            4,
            "sh_phase_wait(full, now, step / 3 % 2);",
            "",
            Found::Fault(is_unordered),
        ),
        (4, "sh_wgmma_wait<1>(acc);", "", Found::Fault(is_race)),
        (
            4,
            "if (step > 0 && SH_LANE == 0) sh_phase_arrive(empty, (step - 1) % 3);",
            "if (SH_LANE == 0) sh_phase_arrive(empty, now);",
            Found::Fault(is_race),
        ),
        (
            4,
            "sh_phase_init(empty, s, 8);",
            "sh_phase_init(empty, s, 16);",
            Found::Fault(is_unordered),
        ),
        (
            4,
            "sh_phase_init(empty, s, 8);",
            "sh_phase_init(empty, s, 1);",
            Found::Fault(is_unordered),
        ),
        (
            4,
            "sh_phase_expect(full, s, 32768);",
            "sh_phase_expect(full, s, 16384);",
            Found::Fault(is_unordered),
        ),
        (
            4,
            "step / 3 % 2 ^ 1",
            "step / 3 % 2",
            Found::Fault(is_unordered),
        ),
        (
            4,
            "SH_SYNC(); /* the barriers",
            "/* ",
            Found::Fault(is_unordered),
        ),
        (
            4,
            "block_n*128 + 64, k0",
            "block_n*128, k0",
            Found::WrongNumbers,
        ),
        (4, "sh_wgmma_wait<0>(acc);", "", Found::WrongNumbers),
    ]
}

#[test]
fn planted_faults_are_found() {
    let planted = planted();
    let c = || matmul([1, 130, 136, 64 * 5], "mk", "kn", "mn");
    let of = planted.iter().map(|(tile, from, to, _)| {
        (
            format!("{from} -> {to} in {tile}"),
            c(),
            BF16,
            None,
            Some(*tile),
        )
    });
    let (cases, mut kernels) = cases(emit_for_warpgroups, of.collect());
    for (kernel, (_, from, to, _)) in kernels.iter_mut().zip(&planted) {
        assert!(
            kernel.text.contains(from),
            "{from} is not in {}",
            kernel.text
        );
        kernel.text = kernel.text.replacen(from, to, 1);
    }
    let emulator = Emulator::from_environment(&kernels).expect("kernels compile");
    for (case, (.., found)) in cases.iter().zip(&planted) {
        match (run(case, &emulator, Numbers::Exact, 1), found) {
            (Err(EmulateError::Faults(faults)), Found::Fault(is_it)) => {
                assert!(
                    faults.iter().any(|f| is_it(&f.kind)),
                    "{}: {faults:?}",
                    case.label
                );
            }
            (Ok([a, b, out, _]), Found::WrongNumbers) => {
                assert!(!is_right(case, &a, &b, &out), "{} was not seen", case.label);
            }
            (Ok([a, b, out, _]), Found::Nothing) => assert!(is_right(case, &a, &b, &out)),
            // Memory that nothing was written to is a way to see a wrong place.
            (Err(EmulateError::Faults(_)), Found::WrongNumbers) => {}
            (other, _) => panic!("{}: {:?}", case.label, other.map(|_| ())),
        }
    }
}

fn is_right(case: &Case, a: &[f64], b: &[f64], out: &[f64]) -> bool {
    let sums = contraction_runs::reference(&case.c, a, b);
    sums.iter().zip(out).all(|(sum, found)| sum.value == *found)
}

#[test]
fn what_warpgroups_do_not_multiply_is_refused() {
    let refused = |c: &Contraction, types| {
        let emitted = emit_for_warpgroups("k", c, types, BUFFERS, None, None);
        emitted.expect_err("refused").to_string()
    };
    let c = matmul([1, 64, 64, 64], "mk", "nk", "mn");
    assert!(refused(&c, F32).contains("bf16"));
    let padded = Conv::square(2, 8, 16, 7, 3, 1).weight_gradient();
    let emitted = emit_for_warpgroups("k", &padded, BF16, BUFFERS, None, Some(3));
    let reason = emitted.expect_err("refused").to_string();
    assert!(reason.contains("border"), "{reason}");
    let odd = matmul([1, 64, 64, 63], "mk", "nk", "mn");
    assert!(refused(&odd, BF16).contains("16 bytes"));
}

/// Dynamic shared memory of each tile: its places. With the copy engine, each place has two barriers of 8 bytes.
const BYTES: [u32; 5] = [
    192 << 10,
    96 << 10,
    64 << 10,
    (192 << 10) + 4 * 16,
    (96 << 10) + 3 * 16,
];

/// A product in bf16 with a bias and a ReLU, one of the same sizes whose first factor is half of a wider
/// matrix, twice, and another with too odd a number of terms.
const NETWORK: &str = r#"graph "g" {
  %x: bf16[72, 64] input
  %w: bf16[80, 64] input
  %bias: bf16[80] input
  %u: bf16[72, 63] input
  %v: bf16[63, 20] input
  %p: bf16[72, 80] local
  %y: bf16[72, 80]
  %z: bf16[72, 20]
  %wide: bf16[72, 128] input
  %left: bf16[72, 80]
  %right: bf16[72, 80]
  %whole: bf16[72, 80]
  inputs %x, %w, %bias, %u, %v, %wide
  state {
    map [] kernel @"layer" {
      map [i < 72, j < 80, k < 64] {
        tasklet %p[i, j] (sum) = $0 * $1 from %x[i, k], %w[j, k]
      }
      map [i < 72, j < 80] { tasklet %y[i, j] = max($0 + $1, 0.0) from %p[i, j], %bias[j] }
    }
    map [i < 72, j < 20, k < 63] {
      tasklet %z[i, j] (sum) = $0 * $1 from %u[i, k], %v[k, j]
    }
    map [i < 72, j < 80, k < 64] {
      tasklet %left[i, j] (sum) = $0 * $1 from %wide[i, k], %w[j, k]
    }
    map [i < 72, j < 80, k < 64] {
      tasklet %right[i, j] (sum) = $0 * $1 from %wide[i, k + 64], %w[j, k]
    }
    map [i < 72, j < 80, k < 64] {
      tasklet %whole[i, j] (sum) = $0 * $1 from %x[i, k], %w[j, k]
    }
  }
  outputs %y, %z, %left, %right, %whole
}
"#;

#[test]
fn programs_have_them_where_they_are_asked_for() {
    let graph = graph::parse(NETWORK).expect("parses");
    let given = graph.inputs.iter().map(|id| {
        let shape = graph.container(*id).shape.iter();
        let shape: Vec<usize> = shape
            .map(|s| s.as_const().expect("fixed") as usize)
            .collect();
        let n = shape.iter().product();
        let values = contraction_runs::numbers(Numbers::Exact, DType::BF16, n, n as u64);
        Tensor::from_f64(DType::BF16, &shape, values.to_f64())
    });
    let given: Vec<Tensor> = given.collect();
    let none = Bindings::new();
    let expected = interpret(&graph, &given, &none, &NoLibrary, Precision::Double);
    let expected = expected.expect("has a meaning");
    for tile in 0..=n_warpgroup_tiles() {
        let products = Products::Every {
            candidate: Candidate::Warpgroup(tile),
            workspace_bytes: 0,
            offers: Offers::default(),
        };
        let program = lower_with(&graph, &products).expect("lowers");
        let paths: Vec<&str> = program.maps.iter().map(|map| map.path).collect();
        let first = if tile < n_warpgroup_tiles() {
            "wgmma"
        } else {
            "mma"
        };
        assert_eq!(paths, [first, "mma", first, first, first]);
        let [forward, _] = passes(&graph, &program).expect("has places");
        let bytes = [BYTES[0], BYTES[1], BYTES[2], BYTES[3], BYTES[4], 0][tile];
        assert_eq!(forward.launches[0].dynamic_shared_bytes, bytes);
        let host = execute::compile(&graph, &program).expect("compiles");
        for seed in 0..2 {
            let found = host.run(&given, seed).expect("runs");
            for (found, expected) in found.iter().zip(&expected) {
                // The sum is rounded as if it had been to memory, then the result.
                for (a, b) in found.to_f64().iter().zip(expected.to_f64()) {
                    let allowed = 2f64.powi(-8) * (2.0 * b.abs() + 1.0);
                    assert!((a - b).abs() <= allowed, "tile {tile}: {a} is not {b}");
                }
            }
        }
    }
}

#[test]
fn kernels_say_how_much_shared_memory_they_carve() {
    let bytes: Vec<u32> = (0..n_warpgroup_tiles())
        .map(|tile| kernel(tile).dynamic_shared_bytes())
        .collect();
    assert_eq!(bytes, BYTES);
    // What the system keeps of each block counts too.
    for (bytes, blocks) in bytes.into_iter().zip([1, 2, 3, 1, 2]) {
        assert!(
            blocks * (bytes + 1024) <= 228 << 10,
            "{blocks} blocks of {bytes} bytes"
        );
    }
}

fn kernel(tile: usize) -> Kernel {
    let c = matmul([1, 4096, 4096, 1024], "mk", "nk", "mn");
    let emitted = emit_for_warpgroups("k", &c, BF16, BUFFERS, None, Some(tile)).expect("emits");
    emitted.launches[0].kernel.clone()
}

#[test]
#[ignore = "needs NVRTC: run by `cargo xtask test`"]
fn every_tile_becomes_a_cubin_of_asynchronous_products() {
    let nvrtc = Nvrtc::find(&[]).expect("NVRTC is there");
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Cache::at(folder.path(), 1 << 30).expect("a cache");
    let of = [large(), others()].concat();
    let (cases, kernels) = cases(emit_for_warpgroups, of);
    let disassembler = disassembler();
    for case in &cases {
        let kernels = &kernels[case.first..][..case.emitted.launches.len()];
        let cubin = compile(kernels, Arch::Sm90a, &nvrtc, &cache).expect("compiles");
        assert_eq!(
            gate(kernels, std::slice::from_ref(&cubin)),
            [],
            "{}",
            case.label
        );
        assert_eq!(cubin.log, "", "{}", case.label);
        println!("{} registers: {}", cubin.resources[0].registers, case.label);
        if let Some(program) = &disassembler {
            let path = folder.path().join("k.cubin");
            std::fs::write(&path, &cubin.bytes).expect("a file");
            let text = Command::new(program)
                .arg(&path)
                .output()
                .expect("disassembles")
                .stdout;
            let text = String::from_utf8_lossy(&text).into_owned();
            assert!(text.contains("HGMMA"), "{}: no HGMMA", case.label);
            let is_fed = case.emitted.launches[0].kernel.text.contains("sh_box_copy");
            for (name, wanted) in [("UTMALDG", is_fed), ("LDGSTS", !is_fed)] {
                assert_eq!(text.contains(name), wanted, "{}: {name}", case.label);
            }
        }
    }
    if disassembler.is_none() {
        println!("no nvdisasm beside NVRTC: instructions not looked at");
    }
}

/// The disassembler of Triton's wheel, where that is installed beside NVRTC's.
fn disassembler() -> Option<PathBuf> {
    let nvrtc = std::env::var_os("SHORTHAUL_NVRTC")?;
    let beside = |folder: &Path| folder.join("triton/backends/nvidia/bin/nvdisasm");
    Path::new(&nvrtc)
        .ancestors()
        .map(beside)
        .find(|path| path.is_file())
}
