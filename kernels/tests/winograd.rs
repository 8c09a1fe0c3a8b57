//! Convolutions by minimal filtering against plain loops in f64: borders, images of odd and even sizes, and hooks.

#![allow(unsafe_code)]

mod contraction_cases;
mod contraction_checks;

use contraction_cases::{Conv, extent};
use contraction_checks::{
    Case, EPILOGUE, Number, Random, check_emitted, check_hooks_for, compile, reference, run,
};
use kernels::contraction::{BlockingRequest, Contraction, ContractionTarget, Hooks, emit};

/// A target that computes convolutions by minimal filtering where it is predicted to gain.
fn target(width: i64) -> ContractionTarget {
    ContractionTarget {
        requested: BlockingRequest {
            allows_winograd: true,
            ..BlockingRequest::default()
        },
        ..contraction_checks::target(width)
    }
}

/// The contraction in all three directions.
fn directions(conv: &Conv) -> [(&'static str, Contraction); 3] {
    [
        ("forward", conv.forward()),
        ("data gradient", conv.data_gradient()),
        ("weight gradient", conv.weight_gradient()),
    ]
}

/// Convolutions large enough that filtering gains: 3×3 taps with step 1, and images of odd and even sizes.
fn convolutions() -> Vec<Conv> {
    let of = |n, c, k, size: [i64; 2], pad| Conv {
        size: size.to_vec(),
        pad,
        ..Conv::square(n, c, k, 1, 3, 1)
    };
    vec![
        of(3, 64, 96, [15, 17], 1),
        of(1, 96, 64, [16, 23], 0),
        of(1, 64, 64, [21, 14], 2),
        of(5, 64, 64, [7, 7], 1),
    ]
}

/// The same with windows that also move in a third direction, with three taps and with two.
fn convolutions_in_three_dimensions() -> Vec<Conv> {
    let of = |n, c, k, size: [i64; 3], taps, pad| Conv {
        size: size.to_vec(),
        kernel: vec![taps, 3, 3],
        pad,
        ..Conv::square(n, c, k, 1, 3, 1)
    };
    vec![
        of(2, 64, 96, [3, 9, 10], 3, 1),
        of(1, 96, 64, [3, 15, 15], 2, 0),
        of(1, 64, 64, [2, 10, 9], 3, 1),
    ]
}

fn emitted<T: Number>(label: &str, n: usize, c: &Contraction, width: i64) -> Case {
    let contraction = Contraction {
        element: T::ELEMENT,
        ..c.clone()
    };
    let emitted = emit(
        &format!("k{n}"),
        &contraction,
        &Hooks::default(),
        &target(width),
    )
    .expect("a kernel");
    assert!(
        emitted.path.starts_with("winograd"),
        "{label} took the path {}",
        emitted.path
    );
    Case {
        label: label.to_string(),
        contraction,
        emitted,
    }
}

fn check<T: Number>(width: i64, convolutions: &[Conv]) {
    let mut cases = Vec::new();
    for conv in convolutions {
        for (direction, c) in directions(conv) {
            let label = format!("{direction} of {conv:?}, {width} lanes");
            cases.push(emitted::<T>(&label, cases.len(), &c, width));
        }
    }
    check_emitted::<T>("winograd", &cases);
}

#[test]
fn results_are_those_of_the_definition() {
    check::<f32>(16, &convolutions());
}

#[test]
fn results_in_three_dimensions_are_those_of_the_definition() {
    check::<f32>(16, &convolutions_in_three_dimensions());
    check::<f64>(8, &convolutions_in_three_dimensions()[..1]);
}

#[test]
fn results_of_short_vectors_are_those_of_the_definition() {
    // The last is too small for a gain.
    check::<f32>(8, &convolutions()[..3]);
}

#[test]
fn results_in_double_precision_are_those_of_the_definition() {
    check::<f64>(16, &convolutions());
}

#[test]
fn features_that_fill_no_vector_are_written_and_no_others() {
    let conv = Conv {
        size: vec![18, 19],
        ..Conv::square(2, 64, 88, 1, 3, 1)
    };
    let cases = [emitted::<f32>("88 features", 0, &conv.forward(), 16)];
    check_emitted::<f32>("features", &cases);
}

#[test]
fn hooks_see_every_element_once() {
    let prologue =
        "static inline void pro(void *const *buf, float *dst, long offset, long stride, long len) {
    const float *s = (const float *)buf[SIDE] + offset;
    for (long i = 0; i < len; i++) { float v = 2*s[i*stride] + 1; dst[i] = v > 0 ? v : 0; }
}
";
    let on = |a: bool, b: bool, after: bool| Hooks {
        prologue_a: a.then(|| "pro".to_string()),
        prologue_b: b.then(|| "pro".to_string()),
        epilogue: after.then(|| "epi".to_string()),
        ..Hooks::default()
    };
    let all = convolutions().into_iter();
    for conv in all.chain(convolutions_in_three_dimensions().into_iter().skip(1)) {
        let (n_in, n_out) = (conv.c, conv.k);
        let [(_, forward), (_, data), (_, weight)] = directions(&conv);
        let at = format!("m*{n_out} + n");
        let text = format!("{}{EPILOGUE}", prologue.replace("SIDE", "0"));
        for (hooks, c, at) in [
            (on(true, false, true), &forward, at),
            (on(true, false, true), &data, format!("m*{n_in} + n")),
            (on(true, false, false), &weight, "0".to_string()),
        ] {
            let label = format!("{conv:?}");
            let path = check_hooks_for::<f32>(&target(16), &label, c, &hooks, &text, &at);
            assert!(path.starts_with("winograd"), "{label} took the path {path}");
        }
        let text = prologue.replace("SIDE", "1");
        let path = check_hooks_for::<f32>(
            &target(16),
            "other",
            &weight,
            &on(false, true, false),
            &text,
            "0",
        );
        assert_eq!(path, "winograd, reduced");
    }
}

#[test]
fn sums_see_every_range_once_and_in_order() {
    let text = "static inline void sums(void *const *buf, long tid, long slot, long bt, long m0, long m1, long n0, long n1) {
    float *o = buf[2]; (void)tid;
    for (long m = m0; m < m1; m++) for (long n = n0; n < n1; n++) o[m*64 + n] += 1000*(slot + 1) + (bt != 0);
}
";
    let conv = Conv {
        size: vec![15, 12],
        ..Conv::square(3, 64, 64, 1, 3, 1)
    };
    let c = conv.forward();
    let hooks = Hooks {
        sums: Some("sums".into()),
        ..Hooks::default()
    };
    let e = emit("k", &c, &hooks, &target(16)).expect("a kernel");
    assert_eq!(e.path, "winograd");
    let dir = tempfile::tempdir().expect("a temporary directory");
    let lib = compile(dir.path(), "sums", &format!("{text}{}", e.source));
    let mut r = Random(3);
    let (a, b) = (r.floats(extent(&c.a)), r.floats(extent(&c.b)));
    let expected = reference(&c, &a, &b, extent(&c.out));
    let mut first: Option<Vec<f32>> = None;
    for nt in [1, 2, 3] {
        let mut out = vec![f32::NAN; expected.len()];
        run(&lib, &e, &a, &b, &mut out, nt);
        let mut last = 0;
        for (got, want) in out.iter().zip(&expected) {
            let slot = ((f64::from(*got) - want) / 1000.0).round() as i64;
            assert!((f64::from(*got) - want - 1000.0 * slot as f64).abs() < 1e-2);
            assert!(
                slot >= last.max(1) && slot <= e.sum_slots,
                "slot {slot} behind {last}"
            );
            last = slot;
        }
        assert_eq!(last, e.sum_slots);
        assert_eq!(
            first.get_or_insert_with(|| out.clone()),
            &out,
            "{nt} threads"
        );
    }
}

#[test]
fn errors_of_numbers_of_like_size_are_no_larger_than_those_of_the_definition() {
    for conv in [
        Conv::square(2, 64, 64, 28, 3, 1),
        Conv::square(2, 256, 64, 14, 3, 1),
    ] {
        for (direction, c) in directions(&conv) {
            let error = |target: ContractionTarget| {
                let e = emit("k", &c, &Hooks::default(), &target).expect("a kernel");
                let dir = tempfile::tempdir().expect("a temporary directory");
                let lib = compile(dir.path(), "errors", &e.source);
                let mut r = Random(9);
                let (a, b) = (r.floats(extent(&c.a)), r.floats(extent(&c.b)));
                let expected = reference(&c, &a, &b, extent(&c.out));
                let mut out = vec![f32::NAN; expected.len()];
                run(&lib, &e, &a, &b, &mut out, 2);
                let pairs = out.iter().zip(&expected);
                let squares = pairs.map(|(got, want)| (f64::from(*got) - want).powi(2));
                (e.path, squares.sum::<f64>().sqrt())
            };
            let (usual, definition) = error(contraction_checks::target(16));
            let (path, found) = error(target(16));
            assert!(path.starts_with("winograd") && !usual.starts_with("winograd"));
            assert!(
                found < definition,
                "{direction}: {found} beside {definition}"
            );
        }
    }
}

#[test]
fn scratch_stays_near_the_caches() {
    let target = target(16);
    let machine = target.machine;
    let of = |n, c, size: [i64; 2]| Conv {
        size: size.to_vec(),
        ..Conv::square(n, c, c, 1, 3, 1)
    };
    for conv in [
        of(1, 128, [256, 256]),
        of(8, 512, [14, 14]),
        of(1, 64, [1080, 1920]),
        of(1, 256, [512, 4096]),
    ] {
        for (direction, c) in directions(&conv) {
            let e = emit("k", &c, &Hooks::default(), &target).expect("a kernel");
            let most = (4 * machine.l2.bytes).max(machine.l3.bytes) as usize;
            // There are also rows of zeros and borders.
            assert!(
                e.thread_scratch_bytes < most + most / 4,
                "{direction} of {conv:?}, {}: {} bytes",
                e.path,
                e.thread_scratch_bytes
            );
        }
    }
}

#[test]
fn a_text_that_varies_is_of_the_same_form() {
    for n in [1, 2, 3, 8] {
        for (c, size) in [(64, 56), (128, 28), (256, 14), (512, 7), (32, 20), (96, 9)] {
            for (direction, contraction) in directions(&Conv::square(n, c, c, size, 3, 1)) {
                let path = |varies: bool| {
                    let mut target = target(16);
                    target.requested.varies = varies;
                    let emitted = emit("k", &contraction, &Hooks::default(), &target);
                    emitted.expect("a kernel").path
                };
                let (usual, varied) = (path(false), path(true));
                let is = |path: &str| path.starts_with("winograd");
                assert_eq!(is(usual), is(varied), "{direction} of {n} x {c} x {size}");
            }
        }
    }
}
