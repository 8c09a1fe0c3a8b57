//! Contractions as CUDA kernels, executed by the emulator in several orders of threads, against
//! plain sums in f64 over small shapes of every kind; planted faults are found.
//!
//! Each runs on numbers whose sums are exact in any order, so that every rounding is seen, and on
//! numbers that need every bit of their type, so that a loss of bits is.

mod contraction_cases;

use contraction_cases::{Conv, extent, matmul, plain};
use graph::{ContainerId, DType, Tensor};
use kernels::cache::Cache;
use kernels::contraction::{Axis, Contraction, Operand};
use kernels::cuda::contraction::{self as cuda, Buffers, EmittedContraction, Epilogue, Types};
use kernels::cuda::emulate::{EmulateError, Emulator, FaultKind, Memory, Settings};
use kernels::cuda::nvrtc::{Nvrtc, compile_all, gate};
use kernels::cuda::{Arch, Arg, Kernel, Launch, Param, ParamType};
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

/// What is emitted: label, contraction, types, epilogue, tile (by the shape if none).
type Wanted = (String, Contraction, Types, Option<Epilogue>, Option<usize>);

struct Case {
    label: String,
    c: Contraction,
    types: Types,
    epilogue: Option<Epilogue>,
    emitted: EmittedContraction,
    /// Of its first kernel among those compiled together.
    first: usize,
}

fn cases(of: Vec<Wanted>) -> (Vec<Case>, Vec<Kernel>) {
    let mut kernels = Vec::new();
    let mut cases = Vec::new();
    for (i, (label, c, types, epilogue, tile)) in of.into_iter().enumerate() {
        let (name, also) = (format!("k{i}"), epilogue.as_ref());
        let emitted = cuda::emit_in_tiles(&name, &c, types, BUFFERS, also, tile);
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

/// What the operands hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbers {
    /// Multiples of 1/8 in [-1, 1]: sums of thousands of their products are exact in single precision.
    Exact,
    /// Any in [-1, 1], as the type rounds them.
    Any,
}

/// Numbers with a fixed pattern.
fn numbers(sort: Numbers, dtype: DType, n: usize, salt: u64) -> Tensor {
    let unit = |i| f64::from(graph::philox::uniform(salt, i as u64)) * 2.0 - 1.0;
    let number = |i| match sort {
        Numbers::Exact => (unit(i) * 8.0).round() / 8.0,
        Numbers::Any => dtype.round(unit(i) * (1.0 - unit(i + n) * 2f64.powi(-30))),
    };
    Tensor::from_f64(dtype, &[n], (0..n).map(number).collect())
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

/// An element of the definition: a sum, of its terms' magnitudes too, and how many terms there are.
#[derive(Clone, Copy, Default)]
struct Sum {
    value: f64,
    magnitude: f64,
    n_terms: u32,
}

fn reference(c: &Contraction, a: &[f64], b: &[f64]) -> Vec<Sum> {
    let mut out = vec![Sum::default(); extent(&c.out)];
    let mut at = vec![0i64; c.dims.len()];
    loop {
        if let (Some(x), Some(y), Some(z)) =
            (address(&c.a, &at), address(&c.b, &at), address(&c.out, &at))
        {
            let term = a[x] * b[y];
            out[z].value += term;
            out[z].magnitude += term.abs();
            out[z].n_terms += 1;
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
fn run(
    case: &Case,
    emulator: &Emulator,
    sort: Numbers,
    seed: u64,
) -> Result<[Vec<f64>; 4], EmulateError> {
    let (c, types) = (&case.c, case.types);
    let mut memory = Memory::default();
    let a = memory.add("a", &numbers(sort, types.a, extent(&c.a), 3));
    let b = memory.add("b", &numbers(sort, types.b, extent(&c.b), 5));
    let out = memory.add_unwritten("out", types.out, extent(&c.out));
    let done = memory.add_unwritten("done", DType::F32, extent(&c.out));
    let sum = types.sum();
    let n_sums = case.emitted.workspace_bytes as usize / sum.bytes();
    let sums = memory.add_unwritten("sums", sum, n_sums);
    let bias = memory.add("bias", &numbers(sort, DType::F32, 1024, 9));
    let number = |buffer: &Buffer| match *buffer {
        A => a,
        B => b,
        OUT => out,
        BIAS => bias,
        DONE => done,
        _ => sums,
    };
    // Where nothing is aligned better than it must be.
    let mut alignments = [1; 6];
    for emitted in &case.emitted.launches {
        for (n, buffer) in emitted.args.iter().enumerate() {
            let needed = &mut alignments[number(buffer)];
            *needed = emitted.kernel.alignment(n).max(*needed);
        }
    }
    for (buffer, alignment) in alignments.into_iter().enumerate() {
        memory.place(buffer, alignment);
    }
    let last = case.emitted.launches.len() - 1;
    for (i, emitted) in case.emitted.launches.iter().enumerate() {
        let arg = |buffer: &Buffer| Arg::Buffer(number(buffer));
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

/// Half the distance of neighbours relative to a number.
fn roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F32 => 2f64.powi(-24),
        _ => 2f64.powi(-53),
    }
}

impl Sum {
    /// A sum in any order, of products that are rounded too: n roundings of the terms' magnitudes,
    /// to first order. Of the definition's own sum as many in double precision.
    fn allowed(&self, types: Types) -> f64 {
        let each = roundoff(types.sum()) + roundoff(DType::F64);
        f64::from(self.n_terms + 1) * each * self.magnitude
    }
}

fn check(of: Vec<Wanted>) {
    let (cases, kernels) = cases(of);
    let emulator = Emulator::from_environment(&kernels).expect("kernels compile");
    for (sort, seed) in [(Numbers::Exact, 0), (Numbers::Any, 7)] {
        for case in &cases {
            let [a, b, out, done] =
                run(case, &emulator, sort, seed).unwrap_or_else(|e| panic!("{}: {e}", case.label));
            let bias = numbers(sort, DType::F32, 1024, 9).to_f64();
            for (i, sum) in reference(&case.c, &a, &b).into_iter().enumerate() {
                let check = |what: &str, found: f64, want: f64, allowed: f64| {
                    let near = match sort {
                        Numbers::Exact => found == want,
                        Numbers::Any => (found - want).abs() <= allowed,
                    };
                    assert!(
                        near,
                        "{} ({}), {sort:?}: {what} {i} is {found}, expected {want} within {allowed}",
                        case.label, case.emitted.path,
                    );
                };
                let (types, allowed) = (case.types, sum.allowed(case.types));
                if case.epilogue.as_ref().is_none_or(|e| e.keeps_product) {
                    let stored = roundoff(types.out) * (sum.value.abs() + allowed);
                    let want = match sort {
                        Numbers::Exact => types.out.round(sum.value),
                        Numbers::Any => sum.value,
                    };
                    // Below the least normal number of half precision, neighbours keep their distance.
                    check("element", out[i], want, allowed + stored + 2f64.powi(-25));
                }
                if case.epilogue.is_some() {
                    let (bias, place) = (bias[i % 1024], position(&case.c, i));
                    let v = 3.0 * sum.value + bias;
                    // Rounded three times: tripled, with the bias, with the position.
                    let size = 3.0 * sum.value.abs() + bias.abs() + place;
                    let rounded = 3.0 * roundoff(DType::F32) * size;
                    check("made", done[i], v.max(0.0) + place, 3.0 * allowed + rounded);
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

fn plainly(types: Types, of: Vec<(String, Contraction)>) -> Vec<Wanted> {
    of.into_iter()
        .map(|(l, c)| (l, c, types, None, None))
        .collect()
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
            compile_all(&kernels, arch, &nvrtc, &cache, threads, &mut |_, _| ()).expect("compiles");
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
        dims: vec![4, 4],
        a: grid(),
        b: grid(),
        out: both,
    };
    let refused = cuda::emit("k", &c, F32, BUFFERS, None).expect_err("a sum along diagonals");
    assert!(refused.to_string().contains("plain loops"), "{refused}");
}
