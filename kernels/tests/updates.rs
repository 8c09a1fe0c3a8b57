//! Updates in place on the CPU, compiled and run on several threads, against their meaning in double precision.

#![allow(unsafe_code)]

use graph::{Binary, DType, Expr, Unary};
use kernels::cache::Cache;
use kernels::compile::{CompileOptions, compile};
use kernels::features::{CpuTarget, Isa};
use kernels::pool::Pool;
use kernels::progress::Silent;
use kernels::run::{RunError, Threads};
use kernels::toolchain::{self, Search};
use kernels::update::cpu::{Updater, emit};
use kernels::update::{Operand, Update, UpdateError};

/// `m ← 0.9·m + g·scale`, `p ← p − rate²·√|m|`, unless `skip`.
fn update(dtype: DType) -> Update {
    let operand = |name: &str, dtype, written| Operand {
        name: name.into(),
        dtype,
        written,
    };
    let [p, g, m, rate, scale] = [0, 1, 2, 3, 4].map(Expr::In);
    let next = Expr::float(0.9).mul(m).add(g.mul(scale));
    let root = Expr::unary(Unary::Sqrt, Expr::unary(Unary::Abs, next.clone()));
    let rate = Expr::binary(Binary::Pow, rate, Expr::float(2.0));
    Update {
        name: "test".into(),
        operands: vec![
            operand("p", dtype, true),
            operand("g", dtype, false),
            operand("m", DType::F32, true),
        ],
        numbers: ["rate", "scale", "skip"].map(String::from).into(),
        unless: Some(2),
        rules: vec![(0, p.sub(rate.mul(root))), (2, next)],
        dtype: DType::F32,
    }
}

fn compiled(update: &Update) -> Updater {
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Cache::at(folder.path(), 1 << 30).expect("a cache");
    let toolchain = toolchain::find(&Search::from_environment(), &cache).expect("a compiler");
    let options = CompileOptions {
        target: CpuTarget::for_isa(Isa::Portable, toolchain.family()),
        toolchain,
        cache,
        jobs: 1,
    };
    let unit = emit(update).expect("emits");
    let modules = compile(&[unit], &options, &mut Silent).expect("compiles");
    Updater::new(update, &modules[0]).expect("loads")
}

/// Numbers that every type holds.
fn values(n: usize, salt: u64) -> Vec<f32> {
    let one = |i| (graph::philox::uniform(salt, i) * 64.0).round() / 32.0 - 1.0;
    (0..n as u64).map(one).collect()
}

/// The upper halves, which are the numbers in bf16.
fn halves(values: &[f32]) -> Vec<u16> {
    values.iter().map(|v| (v.to_bits() >> 16) as u16).collect()
}

const SIZES: [usize; 6] = [1, 0, 70_001, 63, 40_000, 5];
const NUMBERS: [f64; 3] = [0.25, 0.5, 0.0];

/// The successors of `p` and of `m`.
fn expected(p: f32, g: f32, m: f32) -> [f64; 2] {
    let next = 0.9 * f64::from(m) + f64::from(g) * NUMBERS[1];
    [
        f64::from(p) - NUMBERS[0] * NUMBERS[0] * next.abs().sqrt(),
        next,
    ]
}

#[test]
fn every_element_is_updated_once_by_any_number_of_threads() {
    let updater = compiled(&update(DType::F32));
    for threads in 1..=4 {
        let pool = Pool::new();
        pool.set_threads(threads);
        let arrays = || {
            let of = |(at, n): (usize, &usize)| [0, 1, 2].map(|k| values(*n, (3 * at + k) as u64));
            SIZES.iter().enumerate().map(of).collect::<Vec<_>>()
        };
        let (before, mut after) = (arrays(), arrays());
        let operands: Vec<*mut u8> = after
            .iter_mut()
            .flat_map(|array| array.each_mut().map(|o| o.as_mut_ptr().cast()))
            .collect();
        // SAFETY: each operand is a vector of its own with as many elements as stated.
        unsafe { updater.run(&operands, &SIZES, &NUMBERS, Threads::of(&pool)) }.expect("runs");
        for (before, after) in before.iter().zip(&after) {
            assert_eq!(before[1], after[1], "the gradient is read only");
            for i in 0..before[0].len() {
                let wanted = expected(before[0][i], before[1][i], before[2][i]);
                for (found, wanted) in [after[0][i], after[2][i]].into_iter().zip(wanted) {
                    let error = (f64::from(found) - wanted).abs();
                    assert!(error <= 1e-6, "element {i}: {found} instead of {wanted}");
                }
            }
        }
    }
}

#[test]
fn half_precision_is_computed_in_single_and_rounded_once() {
    let updater = compiled(&update(DType::BF16));
    let n = 1000;
    let [p, g, mut m] = [0, 1, 2].map(|salt| values(n, salt));
    let (before, mut p16, mut g16) = (m.clone(), halves(&p), halves(&g));
    let operands = [
        p16.as_mut_ptr().cast(),
        g16.as_mut_ptr().cast(),
        m.as_mut_ptr().cast(),
    ];
    // SAFETY: as above.
    unsafe { updater.run(&operands, &[n], &NUMBERS, Threads::of(&Pool::new())) }.expect("runs");
    for i in 0..n {
        let [wanted, next] = expected(p[i], g[i], before[i]);
        let found = f64::from(f32::from_bits(u32::from(p16[i]) << 16));
        assert!((found - wanted).abs() <= wanted.abs() / 256.0 + 1e-6);
        assert!((f64::from(m[i]) - next).abs() <= 1e-6);
    }
}

#[test]
fn a_skipped_update_changes_nothing() {
    let updater = compiled(&update(DType::F32));
    let mut arrays = [0, 1, 2].map(|salt| values(100, salt));
    let before = arrays.clone();
    let operands = arrays.each_mut().map(|o| o.as_mut_ptr().cast());
    // SAFETY: as above.
    unsafe {
        updater.run(
            &operands,
            &[100],
            &[0.25, 0.5, 1.0],
            Threads::of(&Pool::new()),
        )
    }
    .expect("runs");
    assert_eq!(arrays, before);
}

#[test]
fn wrong_counts_are_refused() {
    let updater = compiled(&update(DType::F32));
    let pool = Pool::new();
    // SAFETY: nothing is run.
    let run = |operands: &[*mut u8], sizes: &[usize], numbers: &[f64]| unsafe {
        updater.run(operands, sizes, numbers, Threads::of(&pool))
    };
    let null = std::ptr::null_mut();
    for refused in [
        run(&[null; 2], &[1], &NUMBERS),
        run(&[null; 3], &[1], &NUMBERS[..2]),
    ] {
        assert!(matches!(refused, Err(RunError::ExternalCount { .. })));
    }
    assert_eq!(run(&[], &[], &NUMBERS), Ok(()));
}

#[test]
fn an_update_without_a_rule_is_refused() {
    let mut missing = update(DType::F32);
    missing.rules.pop();
    assert!(matches!(emit(&missing), Err(UpdateError::Rules { .. })));
    let mut choice = update(DType::F32);
    choice.rules[0].1 = Expr::select(Expr::In(0), Expr::In(1), Expr::In(2));
    assert!(matches!(emit(&choice), Err(UpdateError::Operation { .. })));
}
