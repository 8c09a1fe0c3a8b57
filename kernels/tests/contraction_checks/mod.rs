//! Compiles and runs emitted contractions, and holds them against plain loops in f64.

#![allow(dead_code)]

use std::ffi::c_void;
use std::path::Path;
use std::process::Command;

use crate::contraction_cases::extent;
use kernels::contraction::{
    Contraction, ContractionTarget, Element, EmittedContraction, Hooks, Operand, emit,
};

type Kernel = unsafe extern "C" fn(*const *mut c_void, *mut c_void, i64, i64);

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    pub fn within(&mut self, lo: i64, hi: i64) -> i64 {
        lo + (self.next() % (hi - lo + 1) as u64) as i64
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.next() as usize % of.len()]
    }

    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n)
            .map(|_| self.within(-1000, 1000) as f32 / 1000.0)
            .collect()
    }
}

/// Numbers that a contraction may be made of.
pub trait Number: Copy + Into<f64> {
    const ELEMENT: Element;
    const NAN: Self;
    /// Largest error of a sum of some thousand products of numbers in [-1, 1].
    const ERROR: f64;

    fn from_f32(x: f32) -> Self;
}

impl Number for f32 {
    const ELEMENT: Element = Element::F32;
    const NAN: f32 = f32::NAN;
    const ERROR: f64 = 1e-4;

    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Number for f64 {
    const ELEMENT: Element = Element::F64;
    const NAN: f64 = f64::NAN;
    const ERROR: f64 = 1e-12;

    fn from_f32(x: f32) -> f64 {
        f64::from(x)
    }
}

/// The definition, straight from the index expressions.
pub fn reference<T: Number>(c: &Contraction, a: &[T], b: &[T], len: usize) -> Vec<f64> {
    let [of_a, of_b, of_out] = [&c.a, &c.b, &c.out].map(|op| Addresses::new(op, &c.dims));
    let mut out = vec![0.0f64; len];
    let mut at = vec![0i64; c.dims.len()];
    let inner = at.len() - 1;
    loop {
        let (mut p, mut q, mut r) = (of_a.place(&at), of_b.place(&at), of_out.place(&at));
        for _ in 0..c.dims[inner] {
            let (x, y, z) = (of_a.of[p], of_b.of[q], of_out.of[r]);
            if x != NOWHERE && y != NOWHERE && z != NOWHERE {
                out[z] += a[x].into() * b[y].into();
            }
            p += of_a.strides[inner];
            q += of_b.strides[inner];
            r += of_out.strides[inner];
        }
        let Some(d) = (0..inner).rev().find(|&d| at[d] + 1 < c.dims[d]) else {
            return out;
        };
        at[d] += 1;
        at[d + 1..].fill(0);
    }
}

/// Where a position outside a guarded axis lies.
const NOWHERE: usize = usize::MAX;

/// The address of an operand for each value of the dimensions that it depends on: most loops of a contraction move
/// only some of its operands, and evaluating the expressions anew for each product takes minutes.
struct Addresses {
    /// An index of the operand's buffer, or [`NOWHERE`].
    of: Vec<usize>,
    /// What a step of each dimension adds to the place in `of`.
    strides: Vec<usize>,
}

impl Addresses {
    fn new(op: &Operand, dims: &[i64]) -> Addresses {
        let mut used: Vec<usize> = op
            .axes
            .iter()
            .flat_map(|ax| ax.terms.iter().map(|&(d, _)| d))
            .collect();
        used.sort_unstable();
        used.dedup();
        let (mut strides, mut len) = (vec![0; dims.len()], 1);
        for &d in used.iter().rev() {
            strides[d] = len;
            len *= dims[d] as usize;
        }
        let mut at = vec![0; dims.len()];
        let of = (0..len)
            .map(|place| {
                for &d in &used {
                    at[d] = (place / strides[d]) as i64 % dims[d];
                }
                let found = address(op, &at);
                assert_ne!(found, Some(NOWHERE), "an address before the first");
                found.unwrap_or(NOWHERE)
            })
            .collect();
        Addresses { of, strides }
    }

    fn place(&self, at: &[i64]) -> usize {
        let steps = self.strides.iter().zip(at);
        steps.map(|(stride, &v)| stride * v as usize).sum()
    }
}

pub fn address(op: &Operand, at: &[i64]) -> Option<usize> {
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

/// A contraction with its text.
pub struct Case {
    pub label: String,
    pub contraction: Contraction,
    pub emitted: EmittedContraction,
}

/// 64 aligned bytes of scratch, all NaN.
#[repr(align(64))]
pub struct Line(#[allow(dead_code)] [f32; 16]);

pub fn scratch(bytes: usize) -> Vec<Line> {
    (0..bytes / 64 + 2).map(|_| Line([f32::NAN; 16])).collect()
}

pub fn compile(dir: &Path, name: &str, source: &str) -> libloading::Library {
    let (c, so) = (
        dir.join(format!("{name}.c")),
        dir.join(format!("{name}.so")),
    );
    std::fs::write(&c, source).expect("writable directory");
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".to_string());
    let done = Command::new(cc)
        .args([
            "-O1",
            "-march=native",
            "-Wall",
            "-Werror",
            "-Wno-psabi",
            "-Wno-unused",
            "-shared",
            "-fPIC",
            "-o",
        ])
        .args([&so, &c])
        .output()
        .expect("a C compiler");
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    unsafe { libloading::Library::new(&so).expect("a loadable library") }
}

/// Runs every launch with `nt` threads, one after the other.
pub fn run<T: Number>(
    lib: &libloading::Library,
    e: &EmittedContraction,
    a: &[T],
    b: &[T],
    out: &mut [T],
    nt: i64,
) {
    let mut shared = scratch(e.shared_scratch_bytes);
    let mut own = scratch(e.thread_scratch_bytes);
    let buf: [*mut c_void; 4] = [
        a.as_ptr() as *mut c_void,
        b.as_ptr() as *mut c_void,
        out.as_mut_ptr().cast(),
        shared.as_mut_ptr().cast(),
    ];
    for launch in &e.launches {
        let f: libloading::Symbol<Kernel> = unsafe {
            lib.get(launch.symbol.as_bytes())
                .expect("the launch's symbol")
        };
        for tid in 0..nt {
            unsafe { f(buf.as_ptr(), own.as_mut_ptr().cast(), tid, nt) };
        }
    }
}

/// Holds cases in single precision against the definition.
pub fn check_all(name: &str, vw: i64, cases: Vec<(String, Contraction)>, fallback: bool) {
    check_all_of::<f32>(name, vw, cases, fallback);
}

/// Holds cases against the definition, with numbers of type `T`.
pub fn check_all_of<T: Number>(
    name: &str,
    vw: i64,
    cases: Vec<(String, Contraction)>,
    fallback: bool,
) {
    let target = target(vw);
    let mut ready = Vec::new();
    for (i, (label, mut contraction)) in cases.into_iter().enumerate() {
        contraction.element = T::ELEMENT;
        let emitted =
            emit(&format!("k{i}"), &contraction, &Hooks::default(), &target).expect("supported");
        assert_eq!(
            emitted.path == "generic",
            fallback,
            "{label} took the path {}",
            emitted.path
        );
        ready.push(Case {
            label,
            contraction,
            emitted,
        });
    }
    check_emitted::<T>(name, &ready);
}

/// A target for two threads that knows no other sizes.
pub fn target(vector_width: i64) -> ContractionTarget {
    ContractionTarget {
        vector_width,
        threads: 2,
        machine: graph::Machine::with_vector_width(16),
        requested: kernels::contraction::BlockingRequest::default(),
        known: Vec::new(),
    }
}

/// Holds emitted texts, which have names of their own, against the definition.
pub fn check_emitted<T: Number>(name: &str, ready: &[Case]) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let source: String = ready.iter().map(|c| c.emitted.source.as_str()).collect();
    let lib = compile(dir.path(), name, &source);
    let mut r = Random(7);
    for case in ready {
        let c = &case.contraction;
        let mut numbers = |n| -> Vec<T> { r.floats(n).into_iter().map(T::from_f32).collect() };
        let (a, b) = (numbers(extent(&c.a)), numbers(extent(&c.b)));
        let len = extent(&c.out);
        let expected = reference(c, &a, &b, len);
        for nt in [1, 2, 3] {
            let mut out = vec![T::NAN; len + 64];
            run(&lib, &case.emitted, &a, &b, &mut out, nt);
            for (i, want) in expected.iter().enumerate() {
                let got: f64 = out[i].into();
                assert!(
                    (got - want).abs() < T::ERROR,
                    "{} ({}), {nt} threads: element {i} is {got}, expected {want}",
                    case.label,
                    case.emitted.path,
                );
            }
            assert!(
                out[len..].iter().all(|x| (*x).into().is_nan()),
                "{}: wrote past the end",
                case.label
            );
        }
    }
}

/// Runs one contraction with hooks whose effect is also applied to the reference, in both precisions.
pub fn check_hooks(label: &str, c: &Contraction, hooks: &Hooks, hook_text: &str, out_at: &str) {
    check_hooks_for::<f32>(&target(16), label, c, hooks, hook_text, out_at);
    let text = hook_text.replace("float", "double");
    check_hooks_for::<f64>(&target(16), label, c, hooks, &text, out_at);
}

/// Like [`check_hooks`] with numbers of type `T`, for a target; returns which implementation it was.
pub fn check_hooks_for<T: Number>(
    target: &ContractionTarget,
    label: &str,
    c: &Contraction,
    hooks: &Hooks,
    hook_text: &str,
    out_at: &str,
) -> &'static str {
    let c = &Contraction {
        element: T::ELEMENT,
        ..c.clone()
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let e = emit("k", c, hooks, target).expect("supported");
    let text = hook_text.replace("OUT_AT", out_at);
    let lib = compile(dir.path(), "hooks", &format!("{text}{}", e.source));
    let mut r = Random(5);
    let (a, b) = (r.floats(extent(&c.a)), r.floats(extent(&c.b)));
    let len = extent(&c.out);
    let numbers = |x: Vec<f32>| -> Vec<T> { x.into_iter().map(T::from_f32).collect() };
    let (a, b) = (numbers(a), numbers(b));
    let through = |x: &[T], hook: &Option<String>| -> Vec<f64> {
        x.iter()
            .map(|v| match (hook, (*v).into()) {
                (Some(_), v) => (2.0 * v + 1.0).max(0.0),
                (None, v) => v,
            })
            .collect()
    };
    let expected = reference(
        c,
        &through(&a, &hooks.prologue_a),
        &through(&b, &hooks.prologue_b),
        len,
    );
    for nt in [1, 2, 3] {
        let mut out = vec![T::NAN; len];
        run(&lib, &e, &a, &b, &mut out, nt);
        for (i, want) in expected.iter().enumerate() {
            let want = if hooks.epilogue.is_some() {
                3.0 * want + i as f64 / 64.0
            } else {
                *want
            };
            let got: f64 = out[i].into();
            assert!(
                (got - want).abs() < 10.0 * T::ERROR,
                "{label} ({}): element {i} is {got}, expected {want}",
                e.path,
            );
        }
    }
    e.path
}

/// The epilogue triples each element once and adds a multiple of its position.
pub const EPILOGUE: &str = "static inline void epi(void *const *buf, long tid, long bt, long m0, long m1, long n0, long n1) {
    float *o = buf[2]; (void)tid; (void)bt;
    for (long m = m0; m < m1; m++) for (long n = n0; n < n1; n++) o[OUT_AT] = 3*o[OUT_AT] + (OUT_AT)/64.0f;
}
";
