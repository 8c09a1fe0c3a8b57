//! Arrays of many sizes updated by one launch: the emulator against the update's meaning in double
//! precision, for every order of blocks that is tried; and planted faults.

use cuda_kernels::emulate::{EmulateError, Emulator, Memory, Settings};
use cuda_kernels::pooled::{Pooled, emit};
use cuda_kernels::{Arg, Kernel, Launch};
use graph::{Binary, DType, Expr, Scalar, Tensor, Unary};
use kernels::run::BufferRef;
use kernels::update::{Operand, Update, UpdateError};

/// `m ← 0.9·m + g·scale`, `p ← p − rate·√|m|`, unless `skip`.
fn update(parameter: DType, state: DType) -> Update {
    let operand = |name: &str, dtype, written| Operand {
        name: name.into(),
        dtype,
        written,
    };
    let [p, g, m, rate, scale] = [0, 1, 2, 3, 4].map(Expr::In);
    let next = Expr::float(0.9).mul(m).add(g.mul(scale));
    let root = Expr::unary(Unary::Sqrt, Expr::unary(Unary::Abs, next.clone()));
    // Depends on no element.
    let rate = Expr::binary(Binary::Pow, rate, Expr::float(2.0));
    Update {
        name: "test".into(),
        operands: vec![
            operand("p", parameter, true),
            operand("g", parameter, false),
            operand("m", state, true),
        ],
        numbers: ["rate", "scale", "skip"].map(String::from).into(),
        unless: Some(2),
        rules: vec![(0, p.sub(rate.mul(root))), (2, next)],
        dtype: DType::F32,
    }
}

/// Numbers with few digits, which every type holds.
fn values(n: usize, salt: u64) -> Vec<f64> {
    let one = |i| (f64::from(graph::philox::uniform(salt, i)) * 64.0).round() / 32.0 - 1.0;
    (0..n as u64).map(one).collect()
}

const NUMBERS: [f64; 2] = [0.25, 0.5];

struct Run {
    pooled: Pooled,
    update: Update,
    sizes: Vec<usize>,
}

impl Run {
    fn of(update: Update, sizes: &[usize], aligned: bool) -> Run {
        Run {
            pooled: emit(&update, sizes, aligned).expect("emits"),
            update,
            sizes: sizes.to_vec(),
        }
    }

    /// Every operand of every array afterwards; `shift`: elements by which arrays start off.
    fn values(
        &self,
        kernels: &[Kernel],
        seed: u64,
        skip: f64,
        shift: usize,
    ) -> Result<Vec<Vec<f64>>, EmulateError> {
        let emulator = Emulator::from_environment(kernels)?;
        let mut memory = Memory::default();
        let mut buffers = Vec::new();
        for (at, n) in self.sizes.iter().enumerate() {
            for (k, o) in self.update.operands.iter().enumerate() {
                let list = values(*n, (at * 3 + k) as u64);
                let tensor = Tensor::from_f64(o.dtype, &[*n], list);
                let buffer = memory.add(&format!("{} {at}", o.name), &tensor);
                memory.place(buffer, 64 + shift * o.dtype.bytes());
                buffers.push(buffer);
            }
        }
        for (name, value) in self
            .update
            .numbers
            .iter()
            .zip([NUMBERS[0], NUMBERS[1], skip])
        {
            buffers.push(memory.add(name, &Tensor::from_f64(DType::F32, &[1], vec![value])));
        }
        for (n, launch) in self.pooled.pass.launches.iter().enumerate() {
            let place = |argument: &cuda_kernels::passes::Argument| match argument.at {
                BufferRef::External(slot) => Arg::Buffer(buffers[slot]),
                _ => panic!("no other memory"),
            };
            let launch = Launch {
                kernel: n,
                grid: launch.grid,
                dynamic_shared_bytes: 0,
                args: launch.args.iter().map(place).collect(),
            };
            emulator.run(&launch, &mut memory, &Settings::of_seed(seed))?;
        }
        let arrays = &buffers[..self.sizes.len() * self.update.operands.len()];
        Ok(arrays.iter().map(|b| memory.values(*b)).collect())
    }

    /// What the update means, in double precision.
    fn meaning(&self, skip: f64) -> Vec<Vec<f64>> {
        let mut all = Vec::new();
        for (at, n) in self.sizes.iter().enumerate() {
            let operands = 0..self.update.operands.len();
            let given: Vec<Vec<f64>> = operands.map(|k| values(*n, (at * 3 + k) as u64)).collect();
            let mut after = given.clone();
            for i in 0..*n {
                let elements = given.iter().map(|list| list[i]).chain(NUMBERS);
                let inputs: Vec<Scalar> = elements.map(Scalar::Float).collect();
                for (k, rule) in self.update.rules.iter().filter(|_| skip == 0.0) {
                    let value = rule.eval(&inputs, &|_| None).expect("computes");
                    after[*k][i] = value.as_f64();
                }
            }
            all.extend(after);
        }
        all
    }

    fn check(&self, seed: u64, skip: f64, shift: usize, tolerance: f64) {
        let found = self.values(&self.pooled.kernels, seed, skip, shift);
        let found = found.expect("no fault");
        let wanted = self.meaning(skip);
        assert_eq!(found.len(), wanted.len());
        for (n, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            assert_eq!(found.len(), wanted.len());
            for (i, (f, w)) in found.iter().zip(wanted).enumerate() {
                let apart = (f - w).abs();
                assert!(apart <= tolerance, "operand {n}, element {i}: {f}, not {w}");
            }
        }
    }
}

/// More than a block takes, less than a vector, nothing, whole vectors.
const SIZES: [usize; 6] = [4100, 1, 0, 7, 256, 33];

#[test]
fn every_array_is_updated_whatever_its_size() {
    for (parameter, state, tolerance) in [
        (DType::F32, DType::F32, 1e-6),
        (DType::BF16, DType::BF16, 1e-2),
        (DType::F16, DType::F32, 2e-3),
    ] {
        let run = Run::of(update(parameter, state), &SIZES, true);
        assert_eq!(run.pooled.kernels.len(), 1);
        run.check(0, 0.0, 0, tolerance);
    }
    let run = Run::of(update(DType::F32, DType::F32), &SIZES, true);
    for seed in 1..4 {
        run.check(seed, 0.0, 0, 1e-6);
    }
}

#[test]
fn nothing_changes_where_a_number_says_so() {
    let run = Run::of(update(DType::F32, DType::F32), &SIZES, true);
    run.check(1, 1.0, 0, 0.0);
}

#[test]
fn arrays_that_start_anywhere_have_kernels_of_their_own() {
    let wide = Run::of(update(DType::F32, DType::F32), &SIZES, true);
    let refused = wide.values(&wide.pooled.kernels, 0, 0.0, 1);
    assert!(matches!(refused, Err(EmulateError::Launch { .. })));
    Run::of(update(DType::F32, DType::F32), &SIZES, false).check(1, 0.0, 1, 1e-6);
}

#[test]
fn as_many_launches_as_parameters_ask_for() {
    let sizes = vec![3; 400];
    let run = Run::of(update(DType::F32, DType::F32), &sizes, true);
    // 512 pointers of 8 bytes, three of them numbers, three for each array.
    let launches: Vec<usize> = run
        .pooled
        .pass
        .launches
        .iter()
        .map(|l| l.args.len())
        .collect();
    assert_eq!(launches, [169 * 3 + 3, 169 * 3 + 3, 62 * 3 + 3]);
    assert_eq!(run.pooled.bytes_moved, 400 * 3 * 4 * 5);
    run.check(1, 0.0, 0, 1e-6);
}

#[test]
fn the_same_arrays_have_the_same_text() {
    let text = || {
        Run::of(update(DType::BF16, DType::F32), &SIZES, true)
            .pooled
            .kernels
    };
    assert_eq!(text(), text());
}

#[test]
fn planted_faults_are_found() {
    let run = Run::of(update(DType::F32, DType::F32), &SIZES, true);
    let planted = |from: &str, to: &str| {
        let mut kernels = run.pooled.kernels.clone();
        assert!(kernels[0].text.contains(from), "{}", kernels[0].text);
        kernels[0].text = kernels[0].text.replacen(from, to, 1);
        run.values(&kernels, 1, 0.0, 0)
    };
    // The end of an array is passed.
    assert!(matches!(
        planted("if (i + 4 <= end)", "if (i <= end)"),
        Err(EmulateError::Faults(_))
    ));
    // Two blocks do the same part.
    assert!(matches!(
        planted("(SH_BID - first) * 4096", "(SH_BID - first) * 4092"),
        Err(EmulateError::Faults(_))
    ));
    // An array is taken for another: the values tell.
    let wrong = planted("x2 = x2_0;", "x2 = x2_1;");
    let right = |found: &Vec<Vec<f64>>| {
        let pairs = found
            .iter()
            .flatten()
            .zip(run.meaning(0.0).into_iter().flatten());
        pairs.into_iter().all(|(f, w)| (f - w).abs() <= 1e-6)
    };
    assert!(wrong.as_ref().map_or(true, |found| !right(found)));
    // A tail is left as it was.
    let left = planted("k < i + 4 && k < end", "k < i");
    assert!(left.as_ref().map_or(true, |found| !right(found)));
    let found = run.values(&run.pooled.kernels, 1, 0.0, 0);
    assert!(right(&found.expect("no fault")));
}

#[test]
fn what_has_no_kernel_is_refused() {
    let good = update(DType::F32, DType::F32);
    let mut choice = good.clone();
    choice.rules[0].1 = Expr::select(Expr::In(1), Expr::In(0), Expr::In(2));
    let refused = |u: &Update| emit(u, &[4], true).expect_err("refuses");
    assert!(matches!(refused(&choice), UpdateError::Operation { .. }));
    let mut missing = good.clone();
    missing.rules.pop();
    assert!(matches!(refused(&missing), UpdateError::Rules { .. }));
    let mut many = good.clone();
    many.numbers = (0..510).map(|n| n.to_string()).collect();
    assert!(matches!(refused(&many), UpdateError::Operands { .. }));
}
