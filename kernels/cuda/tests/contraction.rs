//! Contractions as CUDA kernels, executed by the emulator in several orders of threads, against
//! plain sums in f64 over small shapes of every kind; planted faults are found.
//!
//! Each runs on numbers whose sums are exact in any order, so that every rounding is seen, and on
//! numbers that need every bit of their type, so that a loss of bits is.

#[path = "../../tests/contraction_cases/mod.rs"]
mod contraction_cases;
mod contraction_runs;

use contraction_cases::{Conv, matmul, plain};
use contraction_runs::{BF16, BUFFERS, Case, F32, Numbers, Wanted, epilogue, plainly, run};
use cuda_kernels::contraction::{self as cuda, Types};
use cuda_kernels::emulate::{EmulateError, Emulator, FaultKind};
use cuda_kernels::nvrtc::{Nvrtc, compile_all, gate};
use cuda_kernels::{Arch, Kernel};
use graph::DType;
use kernels::cache::Cache;
use kernels::contraction::{Axis, Contraction, Element, Operand};
use kernels::progress::Silent;

fn cases(of: Vec<Wanted>) -> (Vec<Case>, Vec<Kernel>) {
    contraction_runs::cases(cuda::emit_in_tiles, of)
}

fn check(of: Vec<Wanted>) {
    contraction_runs::check(cuda::emit_in_tiles, of);
}

fn products() -> Vec<(String, Contraction)> {
    [
        ("mk", "kn", "mn", [1, 37, 45, 50]),
        ("mk", "nk", "mn", [1, 40, 24, 64]),
        ("km", "kn", "mn", [1, 32, 40, 30]),
        ("km", "nk", "mn", [1, 17, 33, 40]),
        ("mk", "kn", "nm", [1, 20, 35, 48]),
        ("bmk", "bnk", "bmn", [3, 18, 20, 24]),
        ("mbk", "nbk", "bmn", [2, 16, 24, 32]),
        ("bmk", "kn", "bmn", [2, 9, 16, 16]),
        ("mk", "kn", "mn", [1, 1, 5, 1]),
    ]
    .map(|(a, b, out, s)| (format!("{a},{b}->{out} {s:?}"), matmul(s, a, b, out)))
    .to_vec()
}

fn convolutions() -> Vec<(String, Contraction)> {
    let dense = Conv::square(2, 8, 16, 7, 3, 1);
    let strided = Conv::square(1, 5, 8, 8, 3, 2);
    let grouped = Conv {
        groups: 2,
        ..Conv::square(1, 4, 6, 6, 3, 1)
    };
    let dilated = Conv {
        size: vec![19],
        kernel: vec![3],
        dilation: 2,
        nchw_input: true,
        ..Conv::square(2, 4, 8, 1, 1, 1)
    };
    let mut all = Vec::new();
    for (label, conv) in [
        ("dense", dense),
        ("strided", strided),
        ("grouped", grouped),
        ("dilated", dilated),
    ] {
        all.push((format!("{label} forward"), conv.forward()));
        all.push((format!("{label} data gradient"), conv.data_gradient()));
        all.push((format!("{label} weight gradient"), conv.weight_gradient()));
    }
    all.push((
        "pointwise strided data gradient".into(),
        Conv::square(1, 4, 6, 5, 1, 2).data_gradient(),
    ));
    all
}

#[test]
fn scalar_products_and_convolutions() {
    check(plainly(F32, [products(), convolutions()].concat()));
}

#[test]
fn warp_products_and_convolutions() {
    check(plainly(BF16, [products(), convolutions()].concat()));
}

#[test]
fn long_reductions_are_split_and_types_mix() {
    let long = || matmul([1, 20, 24, 1000], "km", "kn", "mn");
    let half = Types {
        a: DType::F16,
        b: DType::F16,
        out: DType::F16,
    };
    let mixed = Types {
        a: DType::BF16,
        ..F32
    };
    let large = || matmul([1, 70, 66, 40], "mk", "nk", "mn");
    let strided = Conv::square(1, 4, 6, 5, 1, 2).data_gradient();
    let of: Vec<Wanted> = vec![
        ("long f32".into(), long(), F32, None, None),
        (
            "long bf16".into(),
            long(),
            BF16,
            Some(epilogue(2, false)),
            None,
        ),
        ("f16".into(), large(), half, None, None),
        (
            "mixed".into(),
            large(),
            mixed,
            Some(epilogue(2, true)),
            None,
        ),
        (
            "strided gradient with epilogue".into(),
            strided,
            BF16,
            Some(epilogue(5, true)),
            None,
        ),
    ];
    let (split, _) = cases(of[..2].to_vec());
    for case in split {
        assert_eq!(case.emitted.launches.len(), 2, "{}", case.label);
        assert!(case.emitted.workspace_bytes > 0);
    }
    check(of);
}

/// Operands of every sum's type and of mixed ones.
const TYPES: [Types; 6] = [
    F32,
    BF16,
    Types {
        a: DType::F16,
        b: DType::F16,
        out: DType::F16,
    },
    Types {
        a: DType::F64,
        b: DType::F64,
        out: DType::F64,
    },
    Types {
        a: DType::F64,
        b: DType::F32,
        out: DType::F32,
    },
    Types {
        a: DType::F32,
        b: DType::BF16,
        out: DType::BF16,
    },
];

/// Every tile with every type, over more than one block in each direction, with ends inside of blocks;
/// with operands that lie along the reduction and across it; split reductions; wide addresses.
fn tiles() -> Vec<Wanted> {
    let mut all = Vec::new();
    for types in TYPES {
        for tile in 0..cuda::n_tiles(types) {
            let (batch, a, b) = [(1, "mk", "nk"), (3, "km", "kn")][tile % 2];
            let skipped = usize::from(tile > 0 && cuda::n_tiles(types) == 3);
            let size = [136, 136, 72, 40, 24][tile + skipped];
            let dims = [batch, size, size + 8, 24];
            let (a, b) = match batch {
                1 => (a.to_string(), b.to_string()),
                _ => (format!("b{a}"), format!("b{b}")),
            };
            let out = if batch == 1 { "mn" } else { "bmn" };
            let c = matmul(dims, &a, &b, out);
            all.push((
                format!("{types:?}, tile {tile}"),
                c,
                types,
                None,
                Some(tile),
            ));
        }
        let last = cuda::n_tiles(types) - 1;
        let long = matmul([1, 9, 12, 700], "mk", "kn", "mn");
        all.push((format!("{types:?}, split"), long, types, None, Some(last)));
        all.push((format!("{types:?}, wide"), wide(), types, None, None));
    }
    all
}

/// A product over one of three planes that lie 2^30 elements apart: the others are not there.
fn wide() -> Contraction {
    let mut c = matmul([1, 20, 24, 32], "mk", "kn", "mn");
    c.dims.push(3);
    c.a.axes.push(Axis {
        size: 1,
        stride: 1 << 30,
        terms: vec![(c.dims.len() - 1, 1)],
        offset: -1,
        guarded: true,
    });
    c
}

#[test]
fn every_tile_is_right() {
    let of = tiles();
    let wide: Vec<&Wanted> = of.iter().filter(|w| w.0.ends_with("wide")).collect();
    for case in cases(wide.into_iter().cloned().collect()).0 {
        let text = &case.emitted.launches[0].kernel.text;
        assert!(text.contains("long long a_row"), "{}: {text}", case.label);
    }
    check(of);
}

#[test]
#[ignore = "needs NVRTC: run by `cargo xtask test`"]
fn every_tile_becomes_a_cubin_without_spills() {
    let nvrtc = Nvrtc::find(&[]).expect("NVRTC is there");
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Cache::at(folder.path(), 1 << 30).expect("a cache");
    let (_, kernels) = cases(tiles());
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    for arch in Arch::ALL {
        let cubins =
            compile_all(&kernels, arch, &nvrtc, &cache, threads, &mut Silent).expect("compiles");
        assert_eq!(gate(&kernels, &cubins), []);
    }
}

#[test]
fn tiles_are_chosen_by_the_shape() {
    let chosen = |types, [a, b, out]: [&str; 3], dims| {
        let c = matmul(dims, a, b, out);
        let emitted = cuda::emit("k", &c, types, BUFFERS, None).expect("emits");
        emitted.launches[0].kernel.clone()
    };
    let many = [132, 65, 66, 8];
    for (types, threads) in [(F32, 256), (BF16, 256)] {
        let kernel = chosen(types, ["bkm", "bkn", "bmn"], many);
        assert_eq!(kernel.threads, threads, "{types:?}");
        assert!(kernel.text.contains("block_m*128"), "{}", kernel.text);
    }
    let smaller = chosen(BF16, ["bmk", "bnk", "bmn"], [132, 33, 34, 16]);
    assert!(smaller.text.contains("block_m*64"), "{}", smaller.text);
    let oblong = chosen(F32, ["bmk", "bkn", "bmn"], [132, 65, 33, 4]);
    assert!(oblong.text.contains("block_m*128"), "{}", oblong.text);
    assert!(oblong.text.contains("block_n*64"), "{}", oblong.text);
}

#[test]
fn removed_barriers_are_found() {
    let barriers = [
        (F32, "the block before is read"),
        (F32, "this block is written"),
        (BF16, "the first block is written"),
        (BF16, "the next block is written"),
        (BF16, "sh_copy_wait<0>();"),
    ];
    for layout in ["kn", "nk"] {
        for (types, comment) in barriers {
            let c = matmul([1, 40, 40, 96], "mk", layout, "mn");
            let (cases, mut kernels) = cases(vec![("planted".into(), c, types, None, None)]);
            let text = &mut kernels[0].text;
            let line = text.lines().find(|l| l.contains(comment));
            let line = line.expect("the barrier").to_string();
            *text = text.replacen(&line, "", 1);
            let emulator = Emulator::from_environment(&kernels).expect("kernels compile");
            match run(&cases[0], &emulator, Numbers::Exact, 1) {
                Err(EmulateError::Faults(faults)) => assert!(
                    faults.iter().any(|f| matches!(
                        f.kind,
                        FaultKind::Race { .. } | FaultKind::Uninitialized { .. }
                    )),
                    "{faults:?}"
                ),
                other => panic!("{types:?} without «{comment}»: {:?}", other.is_ok()),
            }
        }
    }
}

/// Kernels with vector loads need whole vectors; those without take what begins anywhere.
#[test]
fn kernels_say_what_alignment_they_need() {
    for types in TYPES {
        for (terms, vectors) in [(64, true), (63, false)] {
            let c = matmul([1, 37, 41, terms], "mk", "nk", "mn");
            let emitted = cuda::emit("k", &c, types, BUFFERS, None).expect("emits");
            let kernel = &emitted.launches[0].kernel;
            for (n, dtype) in [types.a, types.b].into_iter().enumerate() {
                let needed = if vectors { 16 } else { dtype.bytes() };
                assert_eq!(kernel.alignment(n), needed, "{types:?}, {terms} terms");
            }
            assert_eq!(kernel.alignment(2), types.out.bytes());
        }
    }
}

#[test]
fn what_has_no_kernel_is_refused() {
    let c = matmul([1, 4, 4, 4], "mk", "kn", "mn");
    let types = Types {
        a: DType::I32,
        ..F32
    };
    let refused = cuda::emit("k", &c, types, BUFFERS, None).expect_err("integers");
    assert!(refused.to_string().contains("operand a"), "{refused}");
    let huge = matmul([1 << 28, 1 << 28, 8, 4], "bmk", "bkn", "bmn");
    let refused = cuda::emit("k", &huge, F32, BUFFERS, None).expect_err("too many");
    assert!(refused.to_string().contains("too large"), "{refused}");
    // An output position that two dims of both operands reach.
    let both = Operand {
        axes: vec![Axis {
            size: 7,
            stride: 1,
            terms: vec![(0, 1), (1, 1)],
            offset: 0,
            guarded: false,
        }],
        base: 0,
    };
    let grid = || Operand {
        axes: vec![plain(0, 4, 4), plain(1, 4, 1)],
        base: 0,
    };
    let c = Contraction {
        element: Element::F32,
        dims: vec![4, 4],
        a: grid(),
        b: grid(),
        out: both,
    };
    let refused = cuda::emit("k", &c, F32, BUFFERS, None).expect_err("a sum along diagonals");
    assert!(refused.to_string().contains("plain loops"), "{refused}");
}
