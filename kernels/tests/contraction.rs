//! Emitted contractions against plain loops in f64, over random small shapes of every kind,
//! for every vector width and several thread counts.

#![allow(unsafe_code)]

mod contraction_cases;
mod contraction_checks;

use contraction_cases::{Conv, extent, matmul, plain};
use contraction_checks::{
    EPILOGUE, Random, check_all, check_all_of, check_hooks, compile, reference, run, target,
};
use kernels::contraction::{Axis, Contraction, ContractionTarget, Element, Hooks, Operand, emit};

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
fn convolutions_in_double_precision() {
    for (vw, n) in [(16, 8), (8, 4), (4, 3)] {
        let mut cases = convs(300 + vw as u64, n, Conv::forward);
        cases.extend(convs(400 + vw as u64, n, Conv::weight_gradient));
        cases.extend(convs(500 + vw as u64, n, |c| {
            Conv {
                nchw_input: false,
                ..c.clone()
            }
            .data_gradient()
        }));
        check_all_of::<f64>("double", vw, cases, false);
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
    for vw in [16, 8] {
        check_all_of::<f64>("depthwise_f64", vw, cases.clone(), false);
    }
}

#[test]
fn groups_of_few_channels_share_panels() {
    let groups = |groups, c, k| Conv {
        groups,
        c,
        k,
        ..Conv::square(2, 1, 1, 9, 3, 1)
    };
    let all = |conv: &Conv| {
        [
            ("forward", conv.forward()),
            ("data gradient", conv.data_gradient()),
            ("weight gradient", conv.weight_gradient()),
        ]
        .map(|(what, c)| (format!("{what} {conv:?}"), c))
    };
    let target = ContractionTarget {
        vector_width: 16,
        threads: 2,
        machine: graph::Machine::with_vector_width(16),
        requested: kernels::contraction::BlockingRequest::default(),
        known: Vec::new(),
    };
    for (label, c) in all(&groups(32, 4, 4)) {
        let e = emit("k", &c, &Hooks::default(), &target).expect("supported");
        assert!(e.source.contains("4 groups together"), "{label}");
    }
    let mut r = Random(17);
    let mut cases = Vec::new();
    for _ in 0..8 {
        let conv = Conv {
            groups: r.pick(&[4, 6, 8, 15, 32]),
            c: r.pick(&[1, 2, 3, 4, 8]),
            k: r.pick(&[2, 3, 4, 6, 8]),
            nchw_input: r.pick(&[false, false, true]),
            ..Conv::square(
                2,
                1,
                1,
                r.within(5, 12),
                r.pick(&[1, 3, 5]),
                r.pick(&[1, 2]),
            )
        };
        cases.extend(all(&conv));
    }
    cases.extend(all(&groups(32, 4, 4)));
    for vw in [16, 8] {
        check_all("groups", vw, cases.clone(), false);
        check_all_of::<f64>("groups_f64", vw, cases.clone(), false);
    }
}

/// A contraction in single precision whose operands have these axes.
fn with_axes(dims: &[i64], operands: [&Vec<Axis>; 3]) -> Contraction {
    let [a, b, out] = operands.map(|axes| Operand {
        axes: axes.clone(),
        base: 0,
    });
    let dims = dims.to_vec();
    Contraction {
        element: Element::F32,
        dims,
        a,
        b,
        out,
    }
}

/// A linear layer behind an image that is flattened channels first but lies channels last.
#[test]
fn large_operands_that_lie_across_the_others() {
    let (m, n, c, places) = (8, 350, 64, 49);
    let image = vec![plain(0, m, c * places), plain(2, c, 1), plain(3, places, c)];
    let weight = vec![
        plain(1, n, c * places),
        plain(2, c, places),
        plain(3, places, 1),
    ];
    let rows = vec![plain(0, m, n), plain(1, n, 1)];
    let of = |a, b, out| with_axes(&[m, n, c, places], [a, b, out]);
    let cases = vec![
        ("forward".to_string(), of(&image, &weight, &rows)),
        ("data gradient".to_string(), of(&rows, &weight, &image)),
        ("weight gradient".to_string(), of(&rows, &image, &weight)),
    ];
    check_all("across", 16, cases, false);
}

/// The innermost columns of a transposed convolution are its windows, here two: instead, the channels fill the
/// vectors.
#[test]
fn channels_fill_the_vectors_of_transposed_convolutions() {
    let (inputs, height, width, outputs) = (32, 16, 15, 24);
    let [c, y, x, k, ky, kx] = [0, 1, 2, 3, 4, 5];
    let image = vec![
        plain(c, inputs, height * width),
        plain(y, height, width),
        plain(x, width, 1),
    ];
    let weight = vec![
        plain(c, inputs, outputs * 4),
        plain(k, outputs, 4),
        plain(ky, 2, 2),
        plain(kx, 2, 1),
    ];
    let result = vec![
        plain(k, outputs, 4 * height * width),
        plain(y, height, 4 * width),
        plain(ky, 2, 2 * width),
        plain(x, width, 2),
        plain(kx, 2, 1),
    ];
    let of = |a, b, out| with_axes(&[inputs, height, width, outputs, 2, 2], [a, b, out]);
    let forward = of(&image, &weight, &result);
    let weights = of(&image, &result, &weight);
    for vector_width in [16, 8, 4] {
        for contraction in [&forward, &weights] {
            let target = target(vector_width);
            let emitted = emit("k", contraction, &Hooks::default(), &target).expect("supported");
            let summary = (emitted.source.lines())
                .find(|line| line.starts_with("/* batch"))
                .expect("the plan in one line");
            assert!(summary.contains("n 2x2x24 "), "{summary}");
        }
        let cases = vec![
            ("forward".to_string(), forward.clone()),
            ("data gradient".to_string(), of(&result, &weight, &image)),
            ("weight gradient".to_string(), weights.clone()),
        ];
        check_all("transposed", vector_width, cases, false);
    }
}

/// Each step of a sum fetches what is read eight steps later in columns (64 and 56 numbers apart), and of rows (256
/// numbers long) the line after the next of one row.
#[test]
fn what_later_steps_read_is_fetched() {
    let fetches = |a: &str| {
        let product = matmul([1, 56, 64, 256], a, "kn", "mn");
        let emitted = emit("k", &product, &Hooks::default(), &target(16)).expect("supported");
        ["bp + 512", "ap + 448", "ap + (k0 % 16L)*255L + 32"]
            .map(|place| (emitted.source).contains(&format!("__builtin_prefetch({place});")))
    };
    assert_eq!(fetches("km"), [true, true, false]);
    assert_eq!(fetches("mk"), [true, false, true]);
}

/// One chain of all terms would be wrong by ten times as much.
#[test]
fn long_sums_are_blocked() {
    let c = matmul([1, 4, 16, 300_000], "mk", "kn", "mn");
    let target = ContractionTarget {
        vector_width: 16,
        threads: 1,
        machine: graph::Machine::with_vector_width(16),
        requested: kernels::contraction::BlockingRequest::default(),
        known: Vec::new(),
    };
    let e = emit("k", &c, &Hooks::default(), &target).expect("supported");
    let dir = tempfile::tempdir().expect("a temporary directory");
    let lib = compile(dir.path(), "long", &e.source);
    let mut r = Random(3);
    let mut positive = |n| -> Vec<f32> { r.floats(n).into_iter().map(f32::abs).collect() };
    let (a, b) = (positive(extent(&c.a)), positive(extent(&c.b)));
    let expected = reference(&c, &a, &b, extent(&c.out));
    let mut out = vec![f32::NAN; extent(&c.out)];
    run(&lib, &e, &a, &b, &mut out, 1);
    for (got, want) in out.iter().zip(&expected) {
        let error = (f64::from(*got) - want).abs() / want;
        assert!(error < 2e-6, "{got}, expected {want}");
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
    for vw in [16, 8] {
        check_all_of::<f64>("matmul_f64", vw, cases.clone(), false);
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
    let grouped = Conv {
        groups: 8,
        ..Conv::square(2, 4, 4, 9, 3, 1)
    };
    for (label, c, at) in [
        ("groups", grouped.forward(), "m*32 + n"),
        ("groups' data gradient", grouped.data_gradient(), "m*32 + n"),
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
        element: Element::F32,
        dims: vec![10, 10, 3],
        a: window(0),
        b: window(1),
        out,
    };
    check_all("fallback", 16, vec![("two windows".to_string(), c)], true);
}
