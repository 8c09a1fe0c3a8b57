//! Contractions emitted in some way, run by the emulator and compared with plain sums in f64. Shared by the
//! tests of the ways that there are; plants no faults.

#![allow(dead_code)]

use crate::contraction_cases::extent;
use cuda_kernels::contraction::{Buffers, EmittedContraction, Epilogue, Types, Unsupported};
use cuda_kernels::emulate::{EmulateError, Emulator, Memory, Settings};
use cuda_kernels::{Arg, Kernel, Launch, Param, ParamType};
use graph::{ContainerId, DType, Tensor};
use kernels::contraction::{Contraction, Operand};
use kernels::plan::Buffer;

pub const F32: Types = Types {
    a: DType::F32,
    b: DType::F32,
    out: DType::F32,
};
pub const BF16: Types = Types {
    a: DType::BF16,
    b: DType::BF16,
    out: DType::F32,
};

const A: Buffer = Buffer::Container(ContainerId(0));
const B: Buffer = Buffer::Container(ContainerId(1));
const OUT: Buffer = Buffer::Container(ContainerId(2));
const BIAS: Buffer = Buffer::Container(ContainerId(3));
const DONE: Buffer = Buffer::Container(ContainerId(4));
pub const BUFFERS: Buffers = Buffers {
    a: A,
    b: B,
    out: OUT,
};

/// A way to emit: name of the kernels, contraction, types, buffers, epilogue, tile (by the shape if none).
pub type Emit = fn(
    &str,
    &Contraction,
    Types,
    Buffers,
    Option<&Epilogue>,
    Option<usize>,
) -> Result<EmittedContraction, Unsupported>;

/// What is emitted: label, contraction, types, epilogue, tile (by the shape if none).
pub type Wanted = (String, Contraction, Types, Option<Epilogue>, Option<usize>);

pub struct Case {
    pub label: String,
    pub c: Contraction,
    pub types: Types,
    pub epilogue: Option<Epilogue>,
    pub emitted: EmittedContraction,
    /// Position of its first kernel among those compiled together.
    pub first: usize,
}

pub fn cases(emit: Emit, of: Vec<Wanted>) -> (Vec<Case>, Vec<Kernel>) {
    let mut kernels = Vec::new();
    let mut cases = Vec::new();
    for (i, (label, c, types, epilogue, tile)) in of.into_iter().enumerate() {
        let (name, also) = (format!("k{i}"), epilogue.as_ref());
        let emitted = emit(&name, &c, types, BUFFERS, also, tile);
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
pub enum Numbers {
    /// Multiples of 1/8 in [-1, 1]: sums of thousands of their products are exact in single precision.
    Exact,
    /// Any in [-1, 1], as the type rounds them.
    Any,
}

/// Numbers with a fixed pattern.
pub fn numbers(sort: Numbers, dtype: DType, n: usize, salt: u64) -> Tensor {
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

/// An element of the definition: its sum, the sum of its terms' magnitudes, and the number of terms.
#[derive(Clone, Copy, Default)]
pub struct Sum {
    pub value: f64,
    magnitude: f64,
    n_terms: u32,
}

pub fn reference(c: &Contraction, a: &[f64], b: &[f64]) -> Vec<Sum> {
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

/// Runs all launches of a case with one seed. Returns the elements of a, b, the result and what the
/// epilogue makes of it.
pub fn run(
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
            dynamic_shared_bytes: emitted.kernel.dynamic_shared_bytes(),
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

/// Half the distance of neighboring numbers, relative to their size.
pub fn roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F32 => 2f64.powi(-24),
        _ => 2f64.powi(-53),
    }
}

impl Sum {
    /// A sum in any order, of products that are rounded too: n roundings of the terms' magnitudes,
    /// to first order. The definition's own sum has as many roundings in double precision.
    fn allowed(&self, types: Types) -> f64 {
        let each = roundoff(types.sum()) + roundoff(DType::F64);
        f64::from(self.n_terms + 1) * each * self.magnitude
    }
}

/// Runs all with numbers of both sorts and holds every element against its definition.
pub fn check(emit: Emit, of: Vec<Wanted>) {
    let (cases, kernels) = cases(emit, of);
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

pub fn plainly(types: Types, of: Vec<(String, Contraction)>) -> Vec<Wanted> {
    of.into_iter()
        .map(|(l, c)| (l, c, types, None, None))
        .collect()
}

/// Triples, adds a number that depends on the element, clips, and adds the element's position.
pub fn epilogue(n_axes: usize, keeps_product: bool) -> Epilogue {
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
