//! Emitted contractions against plain loops in f64, over random small shapes of every kind,
//! for every vector width and several thread counts.

#![allow(unsafe_code)]

mod contraction_cases;

use std::ffi::c_void;
use std::path::Path;
use std::process::Command;

use contraction_cases::{Conv, extent, matmul, plain};
use kernels::contraction::{Axis, Contraction, EmittedContraction, Hooks, Operand, Target, emit};

type Kernel = unsafe extern "C" fn(*const *mut c_void, *mut c_void, i64, i64);

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    fn within(&mut self, lo: i64, hi: i64) -> i64 {
        lo + (self.next() % (hi - lo + 1) as u64) as i64
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.next() as usize % of.len()]
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n)
            .map(|_| self.within(-1000, 1000) as f32 / 1000.0)
            .collect()
    }
}

/// The definition, straight from the index expressions.
fn reference(c: &Contraction, a: &[f32], b: &[f32], len: usize) -> Vec<f64> {
    let mut out = vec![0.0f64; len];
    let mut at = vec![0i64; c.dims.len()];
    loop {
        if let (Some(x), Some(y), Some(z)) =
            (address(&c.a, &at), address(&c.b, &at), address(&c.out, &at))
        {
            out[z] += f64::from(a[x]) * f64::from(b[y]);
        }
        let Some(d) = (0..at.len()).rev().find(|&d| at[d] + 1 < c.dims[d]) else {
            return out;
        };
        at[d] += 1;
        at[d + 1..].fill(0);
    }
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

struct Case {
    label: String,
    contraction: Contraction,
    /// Acceptable paths; empty for any but the fallback.
    emitted: EmittedContraction,
}

/// 64 aligned bytes of scratch, all NaN.
#[repr(align(64))]
struct Line(#[allow(dead_code)] [f32; 16]);

fn scratch(bytes: usize) -> Vec<Line> {
    (0..bytes / 64 + 2).map(|_| Line([f32::NAN; 16])).collect()
}

fn compile(dir: &Path, name: &str, source: &str) -> libloading::Library {
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
fn run(
    lib: &libloading::Library,
    e: &EmittedContraction,
    a: &[f32],
    b: &[f32],
    out: &mut [f32],
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

fn check_all(name: &str, vw: i64, cases: Vec<(String, Contraction)>, fallback: bool) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = Target {
        vector_width: vw,
        threads: 2,
    };
    let mut source = String::new();
    let mut ready = Vec::new();
    for (i, (label, contraction)) in cases.into_iter().enumerate() {
        let emitted =
            emit(&format!("k{i}"), &contraction, &Hooks::default(), &target).expect("supported");
        assert_eq!(
            emitted.path == "generic",
            fallback,
            "{label} took the path {}",
            emitted.path
        );
        source.push_str(&emitted.source);
        ready.push(Case {
            label,
            contraction,
            emitted,
        });
    }
    let lib = compile(dir.path(), name, &source);
    let mut r = Random(7);
    for case in &ready {
        let c = &case.contraction;
        let (a, b) = (r.floats(extent(&c.a)), r.floats(extent(&c.b)));
        let len = extent(&c.out);
        let expected = reference(c, &a, &b, len);
        for nt in [1, 2, 3] {
            let mut out = vec![f32::NAN; len + 64];
            run(&lib, &case.emitted, &a, &b, &mut out, nt);
            for (i, want) in expected.iter().enumerate() {
                // Sums of at most some thousand products of numbers in [-1, 1].
                let error = (f64::from(out[i]) - want).abs();
                assert!(
                    error < 1e-4,
                    "{} ({}), {nt} threads: element {i} is {}, expected {want}",
                    case.label,
                    case.emitted.path,
                    out[i]
                );
            }
            assert!(
                out[len..].iter().all(|x| x.is_nan()),
                "{}: wrote past the end",
                case.label
            );
        }
    }
}

fn random_conv(r: &mut Random) -> Conv {
    let spatial = r.pick(&[1, 2, 2, 2, 3]);
    let top = [40, 17, 7][spatial - 1];
    let kernel: Vec<i64> = (0..spatial).map(|_| r.pick(&[1, 2, 3, 3, 5])).collect();
    let dilation = r.pick(&[1, 1, 2]);
    let pad = r.within(0, 2);
    let least = (kernel.iter().max().expect("a spatial dim") - 1) * dilation + 1 - 2 * pad;
    Conv {
        n: r.within(1, 3),
        c: r.pick(&[1, 3, 4, 16, 20, 33]),
        k: r.pick(&[1, 5, 16, 24, 32, 40, 50]),
        groups: r.pick(&[1, 1, 1, 2]),
        size: (0..spatial)
            .map(|_| r.within(least.max(1), top.max(least)))
            .collect(),
        kernel,
        stride: r.pick(&[1, 1, 2, 3]),
        dilation,
        pad,
        nchw_input: r.pick(&[false, false, true]),
    }
}

fn convs(seed: u64, n: usize, of: fn(&Conv) -> Contraction) -> Vec<(String, Contraction)> {
    let mut r = Random(seed);
    let mut conv = || {
        let c = random_conv(&mut r);
        (format!("{c:?}"), of(&c))
    };
    (0..n).map(|_| conv()).collect()
}

#[test]
fn convolution_forward() {
    for (vw, n) in [(16, 24), (8, 8), (4, 8)] {
        check_all("forward", vw, convs(vw as u64, n, Conv::forward), false);
    }
}

#[test]
fn convolution_data_gradient() {
    for (vw, n) in [(16, 24), (8, 8), (4, 8)] {
        let cases = convs(100 + vw as u64, n, |c| {
            Conv {
                nchw_input: false,
                ..c.clone()
            }
            .data_gradient()
        });
        check_all("data_gradient", vw, cases, false);
    }
}

#[test]
fn convolution_weight_gradient() {
    for (vw, n) in [(16, 24), (8, 8), (4, 8)] {
        check_all(
            "weight_gradient",
            vw,
            convs(200 + vw as u64, n, Conv::weight_gradient),
            false,
        );
    }
}

#[test]
fn depthwise_convolutions() {
    let mut r = Random(11);
    let mut cases = Vec::new();
    for _ in 0..14 {
        let conv = Conv {
            c: 1,
            k: 1,
            groups: r.pick(&[16, 24, 35, 64]),
            nchw_input: false,
            ..random_conv(&mut r)
        };
        cases.push((format!("forward {conv:?}"), conv.forward()));
        cases.push((format!("data gradient {conv:?}"), conv.data_gradient()));
        cases.push((format!("weight gradient {conv:?}"), conv.weight_gradient()));
    }
    for vw in [16, 8, 4] {
        check_all("depthwise", vw, cases.clone(), false);
    }
}

#[test]
fn depthwise_images_with_channels_outermost() {
    let mut r = Random(13);
    let mut cases = Vec::new();
    for _ in 0..5 {
        let conv = Conv {
            c: 1,
            k: 1,
            groups: r.pick(&[3, 16, 24]),
            nchw_input: true,
            ..random_conv(&mut r)
        };
        cases.push((format!("forward {conv:?}"), conv.forward()));
        cases.push((format!("data gradient {conv:?}"), conv.data_gradient()));
        cases.push((format!("weight gradient {conv:?}"), conv.weight_gradient()));
    }
    check_all("depthwise_nchw", 16, cases, false);
}

#[test]
fn matrix_products_in_every_transposition() {
    let mut r = Random(3);
    let mut cases = Vec::new();
    for (a, b, out) in [
        ("mk", "kn", "mn"),
        ("mk", "nk", "mn"),
        ("km", "kn", "mn"),
        ("km", "nk", "mn"),
        ("mk", "kn", "nm"),
        ("bmk", "bnk", "bmn"),
        ("bmk", "bkn", "bmn"),
        ("bkm", "bkn", "bmn"),
        ("mbk", "nbk", "bmn"),
        ("bmk", "kbn", "mbn"),
        ("bmk", "kn", "bmn"),
    ] {
        let sizes = [
            r.within(1, 4),
            r.within(1, 70),
            r.within(1, 90),
            r.within(1, 100),
        ];
        cases.push((
            format!("{a},{b}->{out} {sizes:?}"),
            matmul(sizes, a, b, out),
        ));
    }
    cases.push((
        "page-strided".into(),
        matmul([2, 33, 40, 1024], "bmk", "bnk", "bmn"),
    ));
    cases.push((
        "long reduction".into(),
        matmul([1, 20, 48, 3000], "km", "kn", "mn"),
    ));
    cases.push((
        "column-strided".into(),
        matmul([1, 512, 33, 50], "km", "kn", "mn"),
    ));
    for vw in [16, 8, 4] {
        check_all("matmul", vw, cases.clone(), false);
    }
}

#[test]
fn operands_may_come_swapped() {
    let swap = |c: Contraction| Contraction {
        a: c.b,
        b: c.a,
        ..c
    };
    let conv = Conv::square(2, 12, 40, 9, 3, 2);
    let cases = vec![
        ("forward".to_string(), swap(conv.forward())),
        ("data gradient".to_string(), swap(conv.data_gradient())),
        ("weight gradient".to_string(), swap(conv.weight_gradient())),
    ];
    check_all("swapped", 16, cases, false);
}

/// Runs one contraction with hooks whose effect is also applied to the reference.
fn check_hooks(label: &str, c: &Contraction, hooks: &Hooks, hook_text: &str, out_at: &str) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = Target {
        vector_width: 16,
        threads: 2,
    };
    let e = emit("k", c, hooks, &target).expect("supported");
    let text = hook_text.replace("OUT_AT", out_at);
    let lib = compile(dir.path(), "hooks", &format!("{text}{}", e.source));
    let mut r = Random(5);
    let (a, b) = (r.floats(extent(&c.a)), r.floats(extent(&c.b)));
    let len = extent(&c.out);
    let through = |x: &[f32], hook: &Option<String>| -> Vec<f32> {
        x.iter()
            .map(|v| {
                if hook.is_some() {
                    (2.0 * v + 1.0).max(0.0)
                } else {
                    *v
                }
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
        let mut out = vec![f32::NAN; len];
        run(&lib, &e, &a, &b, &mut out, nt);
        for (i, want) in expected.iter().enumerate() {
            let want = if hooks.epilogue.is_some() {
                3.0 * want + i as f64 / 64.0
            } else {
                *want
            };
            let error = (f64::from(out[i]) - want).abs();
            assert!(
                error < 1e-3,
                "{label} ({}): element {i} is {}, expected {want}",
                e.path,
                out[i]
            );
        }
    }
}

/// The epilogue triples each element once and adds a multiple of its position.
const EPILOGUE: &str = "static inline void epi(void *const *buf, long tid, long bt, long m0, long m1, long n0, long n1) {
    float *o = buf[2]; (void)tid; (void)bt;
    for (long m = m0; m < m1; m++) for (long n = n0; n < n1; n++) o[OUT_AT] = 3*o[OUT_AT] + (OUT_AT)/64.0f;
}
";

#[test]
fn epilogues_see_every_final_element_once() {
    let hooks = Hooks {
        epilogue: Some("epi".into()),
        ..Hooks::default()
    };
    let conv = Conv::square(3, 20, 40, 11, 3, 1);
    let strided = Conv::square(2, 24, 36, 13, 3, 2);
    let pointwise = Conv::square(2, 24, 36, 9, 1, 2);
    let deep = Conv::depthwise(2, 48, 9, 3, 1);
    let deep_strided = Conv::depthwise(2, 48, 9, 3, 2);
    for (label, c, at) in [
        ("forward", conv.forward(), "m*40 + n"),
        ("data gradient", conv.data_gradient(), "m*20 + n"),
        ("weight gradient", conv.weight_gradient(), "n*180 + m"),
        ("strided data gradient", strided.data_gradient(), "m*24 + n"),
        (
            "strided pointwise data gradient",
            pointwise.data_gradient(),
            "m*24 + n",
        ),
        ("depthwise", deep.forward(), "m*48 + n"),
        (
            "depthwise strided data gradient",
            deep_strided.data_gradient(),
            "m*48 + n",
        ),
        (
            "batched product",
            matmul([3, 50, 70, 33], "bmk", "bkn", "bmn"),
            "bt*3500 + m*70 + n",
        ),
        (
            "transposed result",
            matmul([1, 50, 70, 33], "mk", "kn", "nm"),
            "n + m*50",
        ),
        (
            "long reduction",
            matmul([1, 30, 40, 5000], "km", "kn", "mn"),
            "m*40 + n",
        ),
    ] {
        check_hooks(label, &c, &hooks, EPILOGUE, at);
    }
}

#[test]
fn prologues_transform_what_is_read_but_not_the_borders() {
    let text =
        "static inline void pro(void *const *buf, float *dst, long offset, long stride, long len) {
    const float *s = (const float *)buf[SIDE] + offset;
    for (long i = 0; i < len; i++) { float v = 2*s[i*stride] + 1; dst[i] = v > 0 ? v : 0; }
}
";
    let conv = Conv::square(2, 20, 40, 11, 3, 1);
    let image = Conv {
        nchw_input: true,
        ..Conv::square(2, 3, 40, 12, 5, 2)
    };
    for (label, c) in [
        ("forward", conv.forward()),
        ("forward from channels first", image.forward()),
        ("data gradient", conv.data_gradient()),
        ("weight gradient", conv.weight_gradient()),
        ("pointwise", Conv::square(2, 24, 36, 9, 1, 2).forward()),
        ("product", matmul([2, 50, 70, 33], "bmk", "bkn", "bmn")),
        (
            "transposed product",
            matmul([2, 50, 70, 300], "bkm", "bnk", "bmn"),
        ),
    ] {
        let on_a = Hooks {
            prologue_a: Some("pro".into()),
            ..Hooks::default()
        };
        check_hooks(
            &format!("{label}, a"),
            &c,
            &on_a,
            &text.replace("SIDE", "0"),
            "0",
        );
        let on_b = Hooks {
            prologue_b: Some("pro".into()),
            ..Hooks::default()
        };
        check_hooks(
            &format!("{label}, b"),
            &c,
            &on_b,
            &text.replace("SIDE", "1"),
            "0",
        );
    }
}

#[test]
fn what_has_no_fast_path_takes_plain_loops() {
    // Both operands guarded.
    let window = |dim: usize| Operand {
        axes: vec![Axis {
            size: 10,
            stride: 1,
            terms: vec![(dim, 1), (2, 1)],
            offset: -1,
            guarded: true,
        }],
        base: 0,
    };
    let out = Operand {
        axes: vec![plain(0, 10, 10), plain(1, 10, 1)],
        base: 0,
    };
    let c = Contraction {
        dims: vec![10, 10, 3],
        a: window(0),
        b: window(1),
        out,
    };
    check_all("fallback", 16, vec![("two windows".to_string(), c)], true);
}
