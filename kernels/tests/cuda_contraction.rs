//! Contractions as CUDA kernels, executed by the emulator in several orders of threads, against
//! plain sums in f64 over small shapes of every kind; planted faults are found.

mod contraction_cases;

use contraction_cases::{Conv, extent, matmul, plain};
use graph::{ContainerId, DType, Tensor};
use kernels::contraction::{Axis, Contraction, Operand};
use kernels::cuda::contraction::{self as cuda, Buffers, EmittedContraction, Epilogue, Types};
use kernels::cuda::emulate::{EmulateError, Emulator, FaultKind, Memory, Settings};
use kernels::cuda::{Arg, Kernel, Launch, Param, ParamType};
use kernels::plan::Buffer;

const F32: Types = Types {
    a: DType::F32,
    b: DType::F32,
    out: DType::F32,
};
const BF16: Types = Types {
    a: DType::BF16,
    b: DType::BF16,
    out: DType::F32,
};

const A: Buffer = Buffer::Container(ContainerId(0));
const B: Buffer = Buffer::Container(ContainerId(1));
const OUT: Buffer = Buffer::Container(ContainerId(2));
const BIAS: Buffer = Buffer::Container(ContainerId(3));
const DONE: Buffer = Buffer::Container(ContainerId(4));
const BUFFERS: Buffers = Buffers {
    a: A,
    b: B,
    out: OUT,
};

struct Case {
    label: String,
    c: Contraction,
    types: Types,
    epilogue: Option<Epilogue>,
    emitted: EmittedContraction,
    /// Of its first kernel among those compiled together.
    first: usize,
}

fn cases(of: Vec<(String, Contraction, Types, Option<Epilogue>)>) -> (Vec<Case>, Vec<Kernel>) {
    let mut kernels = Vec::new();
    let mut cases = Vec::new();
    for (i, (label, c, types, epilogue)) in of.into_iter().enumerate() {
        let emitted = cuda::emit(&format!("k{i}"), &c, types, BUFFERS, epilogue.as_ref());
        let emitted = emitted.unwrap_or_else(|e| panic!("{label}: {e}"));
        let first = kernels.len();
        kernels.extend(emitted.launches.iter().map(|l| l.kernel.clone()));
        cases.push(Case {
            label,
            c,
            types,
            epilogue,
            emitted,
            first,
        });
    }
    (cases, kernels)
}

/// Numbers in [-1, 1] with a fixed pattern.
fn numbers(dtype: DType, n: usize, salt: u64) -> Tensor {
    let mut state = salt;
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((state >> 33) % 2001) as f64 / 1000.0 - 1.0
    };
    Tensor::from_f64(dtype, &[n], (0..n).map(|_| next()).collect())
}

fn address(op: &Operand, at: &[i64]) -> Option<usize> {
    let mut sum = op.base;
    for ax in &op.axes {
        let v = ax.offset + ax.terms.iter().map(|&(d, k)| k * at[d]).sum::<i64>();
        if ax.guarded && !(0..ax.size).contains(&v) {
            return None;
        }
        sum += v * ax.stride;
    }
    Some(sum as usize)
}

/// The definition: each element's sum and the sum of its terms' magnitudes, and the most terms.
fn reference(c: &Contraction, a: &[f64], b: &[f64]) -> Vec<(f64, f64)> {
    let mut out = vec![(0.0, 0.0); extent(&c.out)];
    let mut at = vec![0i64; c.dims.len()];
    loop {
        if let (Some(x), Some(y), Some(z)) =
            (address(&c.a, &at), address(&c.b, &at), address(&c.out, &at))
        {
            out[z].0 += a[x] * b[y];
            out[z].1 += (a[x] * b[y]).abs();
        }
        let Some(d) = (0..at.len()).rev().find(|&d| at[d] + 1 < c.dims[d]) else {
            return out;
        };
        at[d] += 1;
        at[d + 1..].fill(0);
    }
}

/// Runs all launches of a case with one seed; the elements of a, b, the result and what the epilogue
/// makes of it.
fn run(case: &Case, emulator: &Emulator, seed: u64) -> Result<[Vec<f64>; 4], EmulateError> {
    let (c, types) = (&case.c, case.types);
    let mut memory = Memory::default();
    let a = memory.add("a", &numbers(types.a, extent(&c.a), 3));
    let b = memory.add("b", &numbers(types.b, extent(&c.b), 5));
    let out = memory.add_unwritten("out", types.out, extent(&c.out));
    let done = memory.add_unwritten("done", DType::F32, extent(&c.out));
    let n_sums = case.emitted.workspace_bytes.div_ceil(4) as usize;
    let sums = memory.add_unwritten("sums", DType::F32, n_sums);
    let bias = memory.add("bias", &numbers(DType::F32, 1024, 9));
    let last = case.emitted.launches.len() - 1;
    for (i, emitted) in case.emitted.launches.iter().enumerate() {
        let arg = |buffer: &Buffer| {
            Arg::Buffer(match *buffer {
                A => a,
                B => b,
                OUT => out,
                BIAS => bias,
                DONE => done,
                _ => sums,
            })
        };
        let launch = Launch {
            kernel: case.first + i,
            grid: [emitted.grid as u32, 1, 1],
            dynamic_shared_bytes: 0,
            args: emitted.args.iter().map(arg).collect(),
        };
        // Each phase of a strided gradient writes its own positions: only the last completes them.
        let settings = Settings {
            partial_outputs: i < last,
            ..Settings::of_seed(seed)
        };
        emulator.run(&launch, &mut memory, &settings)?;
    }
    Ok([a, b, out, done].map(|buffer| memory.values(buffer)))
}

/// A sum of n terms in fp32 in any order differs by at most n+1 roundings of 2^-24 of the terms'
/// magnitudes (products of 16-bit numbers are exact); what is stored in 16 bits is rounded once more.
fn tolerance(types: Types, n_terms: i64, magnitude: f64, value: f64) -> f64 {
    let stored = match types.out {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-10),
        _ => 2f64.powi(-22),
    };
    (n_terms + 2) as f64 * 2f64.powi(-24) * magnitude + stored * value.abs() + 1e-30
}

fn check(of: Vec<(String, Contraction, Types, Option<Epilogue>)>) {
    let (cases, kernels) = cases(of);
    for (cases, seed) in [(&cases, 0), (&cases, 7)] {
        let emulator = Emulator::from_environment(&kernels).expect("kernels compile");
        for case in cases {
            let [a, b, out, done] =
                run(case, &emulator, seed).unwrap_or_else(|e| panic!("{}: {e}", case.label));
            let bias = numbers(DType::F32, 1024, 9);
            let mut memory = Memory::default();
            let bias = memory.add("bias", &bias);
            let bias = memory.values(bias);
            let n_terms: i64 = case.c.dims.iter().product::<i64>() / case.c.dims[0].max(1);
            for (i, (sum, magnitude)) in reference(&case.c, &a, &b).into_iter().enumerate() {
                let check = |what: &str, found: f64, want: f64, allowed: f64| {
                    assert!(
                        (found - want).abs() <= allowed,
                        "{} ({}), seed {seed}: {what} {i} is {found}, expected {want} within {allowed}",
                        case.label,
                        case.emitted.path,
                    );
                };
                let allowed = |types, want| tolerance(types, n_terms.min(4096), magnitude, want);
                if case.epilogue.as_ref().is_none_or(|e| e.keeps_product) {
                    check("element", out[i], sum, allowed(case.types, sum));
                }
                if case.epilogue.is_some() {
                    let want = (3.0 * sum + bias[i % 1024]).max(0.0) + position(&case.c, i);
                    let unrounded = Types {
                        out: DType::F32,
                        ..case.types
                    };
                    check("made", done[i], want, 3.0 * allowed(unrounded, want) + 1e-6);
                }
            }
        }
    }
}

/// The element's position along the axes of the result, weighted by 1, 10, 100, …
fn position(c: &Contraction, element: usize) -> f64 {
    let digits = c.out.axes.iter().zip([1, 10, 100, 1000, 10_000]);
    let terms = digits.map(|(axis, weight)| element as i64 / axis.stride % axis.size * weight);
    terms.sum::<i64>() as f64
}

fn plainly(
    types: Types,
    of: Vec<(String, Contraction)>,
) -> Vec<(String, Contraction, Types, Option<Epilogue>)> {
    of.into_iter().map(|(l, c)| (l, c, types, None)).collect()
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
    let of = vec![
        ("long f32".into(), long(), F32, None),
        ("long bf16".into(), long(), BF16, Some(epilogue(2, false))),
        ("f16".into(), large(), half, None),
        ("mixed".into(), large(), mixed, Some(epilogue(2, true))),
        (
            "strided gradient with epilogue".into(),
            Conv::square(1, 4, 6, 5, 1, 2).data_gradient(),
            BF16,
            Some(epilogue(5, true)),
        ),
    ];
    let (split, _) = cases(of[..2].to_vec());
    for case in split {
        assert_eq!(case.emitted.launches.len(), 2, "{}", case.label);
        assert!(case.emitted.workspace_bytes > 0);
    }
    check(of);
}

/// Triples, adds a number that depends on the element, clips, and adds the element's position.
fn epilogue(n_axes: usize, keeps_product: bool) -> Epilogue {
    let (mut along, mut sum) = (String::new(), String::from("0"));
    for axis in 0..n_axes {
        along += &format!(", int c{axis}");
        sum += &format!(" + c{axis}*{}", 10i64.pow(axis as u32));
    }
    let param = |name: &str, ty| Param {
        name: name.into(),
        ty,
    };
    Epilogue {
        text: format!(
            "SH_FN void EPILOGUE(float value, long long at{along}, SH_IN(float) bias, SH_OUT(float) done) {{\n  \
             const float v = 3*value + bias[at % 1024];\n  \
             done[at] = (v > 0 ? v : 0.0f) + (float)({sum});\n}}\n"
        ),
        params: vec![
            param("bias", ParamType::In(DType::F32)),
            param("done", ParamType::Out(DType::F32)),
        ],
        args: vec![BIAS, DONE],
        keeps_product,
    }
}

#[test]
fn every_tile_is_right() {
    // Large enough for each tile by rows, columns and batch; few terms keep the emulator quick.
    let of = vec![
        (
            "64x64 bf16".into(),
            matmul([132, 33, 34, 16], "bmk", "bnk", "bmn"),
            BF16,
            None,
        ),
        (
            "128x64 f32".into(),
            matmul([132, 65, 33, 4], "bmk", "bkn", "bmn"),
            F32,
            None,
        ),
        (
            "128x128 f32".into(),
            matmul([132, 65, 66, 4], "bkm", "bkn", "bmn"),
            F32,
            None,
        ),
        (
            "128x128 bf16".into(),
            matmul([132, 65, 66, 8], "bkm", "bkn", "bmn"),
            BF16,
            None,
        ),
    ];
    let (chosen, _) = cases(of.clone());
    let threads: Vec<u32> = chosen
        .iter()
        .map(|c| c.emitted.launches[0].kernel.threads)
        .collect();
    assert_eq!(threads, [128, 256, 256, 256]);
    check(of);
}

#[test]
fn removed_barriers_are_found() {
    for types in [F32, BF16] {
        for comment in ["the block before is read", "this block is written"] {
            let of = (
                "planted".into(),
                matmul([1, 40, 40, 100], "mk", "kn", "mn"),
                types,
                None,
            );
            let (cases, mut kernels) = cases(vec![of]);
            let text = &mut kernels[0].text;
            let line = text
                .lines()
                .find(|l| l.contains(comment))
                .expect("the barrier")
                .to_string();
            *text = text.replacen(&line, "", 1);
            let emulator = Emulator::from_environment(&kernels).expect("kernels compile");
            match run(&cases[0], &emulator, 1) {
                Err(EmulateError::Faults(faults)) => assert!(
                    faults
                        .iter()
                        .any(|f| matches!(f.kind, FaultKind::Race { .. })),
                    "{faults:?}"
                ),
                other => panic!("{types:?} without «{comment}»: {:?}", other.is_ok()),
            }
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
        dims: vec![4, 4],
        a: grid(),
        b: grid(),
        out: both,
    };
    let refused = cuda::emit("k", &c, F32, BUFFERS, None).expect_err("a sum along diagonals");
    assert!(refused.to_string().contains("plain loops"), "{refused}");
}
