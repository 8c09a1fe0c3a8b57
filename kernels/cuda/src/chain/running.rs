//! One sweep instead of three: a maximum, the sum of powers against it and products of these powers go
//! on together, block by block (online softmax, arXiv 1805.02867 and 2205.14135).
//!
//! `l = Σ exp(a − b(m))` with `m` the largest of the columns so far is multiplied by `exp(b(m) − b(m'))`
//! where a block makes it `m'`; so is a product out of tiles whose left factor is a multiple of
//! the same power, and what it is divided by for each row comes last. Owns the condition and the text
//! of the corrections.

use super::element::{Elements, Names};
use super::form::Form;
use super::sweep::Sweeps;
use graph::{Binary, DType, Reduction, Unary};
use kernels::emit::text::CText;
use kernels::emit::values::{Op, ValueId};
use std::collections::BTreeSet;

/// What is corrected when a block has a larger maximum.
#[derive(Clone, Debug)]
pub(super) struct Running {
    /// Positions of the maximum and of the sum among the numbers of rows.
    pub max: usize,
    pub sum: usize,
    /// `b(m)`.
    pub shift: ValueId,
    /// Quotients whose divisor waits for the whole row.
    pub postponed: BTreeSet<usize>,
    /// The divisors of each product out of tiles.
    divisors: Vec<Vec<ValueId>>,
}

/// The sweeps, joined where they may be.
pub(super) fn joined(form: &Form, sweeps: Sweeps) -> Sweeps {
    let is_pair = matches!(
        &sweeps.scalars[..],
        [max, sum] if (max.reduction, max.sweep) == (Reduction::Max, 0)
            && (sum.reduction, sum.sweep) == (Reduction::Sum, 1)
    );
    if !is_pair {
        return sweeps;
    }
    // With the products out of tiles, else without.
    let all = (2..=sweeps.sweeps.len()).rev();
    all.map(|n| join(&sweeps, n))
        .find(|joined| Elements::new(form, joined, 1).running().is_some())
        .unwrap_or(sweeps)
}

/// The first `n` sweeps joined to one pass of two parts.
fn join(sweeps: &Sweeps, n: usize) -> Sweeps {
    let mut joined = sweeps.clone();
    let mut rest = joined.sweeps.split_off(1);
    let mut after = rest.split_off(n - 1);
    let first = &mut joined.sweeps[0];
    let mut second = rest[0].clone();
    for sweep in &rest {
        first.products.extend(&sweep.products);
        second.statements.extend(&sweep.statements);
        second.is_last |= sweep.is_last;
    }
    second.statements.sort_unstable();
    second.statements.dedup();
    second.products.clear();
    second.is_joined = true;
    joined.sweeps.push(second);
    joined.sweeps.append(&mut after);
    joined
}

impl Running {
    /// The running values whose first sink is the sum and whose further sinks are left factors.
    pub(super) fn new(elements: &Elements<'_>) -> Option<Running> {
        let scalars = &elements.sweeps().scalars;
        let is = |r: Reduction| scalars.iter().position(|s| s.reduction == r);
        let (max, sum) = (is(Reduction::Max)?, is(Reduction::Sum)?);
        let power = elements.reduced(sum)?;
        let Op::Unary(Unary::Exp, difference) = elements.op(power) else {
            return None;
        };
        let Op::Binary(Binary::Sub, DType::F32, a, shift) = elements.op(*difference) else {
            return None;
        };
        let of_max = elements.scalars_of(*shift);
        let shifts = of_max == BTreeSet::from([max]) && elements.is_function_of_scalars(*shift);
        if !shifts || !elements.scalars_of(*a).is_empty() {
            return None;
        }
        // A maximum of anything else bounds no power, and tells nothing of a row of −∞.
        let first = Elements::new(elements.form(), elements.sweeps(), 0);
        if !is_same((elements, *a), (&first, first.reduced(max)?)) {
            return None;
        }
        let mut found = Running {
            max,
            sum,
            shift: *shift,
            postponed: BTreeSet::new(),
            divisors: Vec::new(),
        };
        // What is stored is not corrected, nor is a tile's product that is a left factor as it is.
        let factors = elements.factors();
        if factors.len() != elements.n_out() || elements.stores() {
            return None;
        }
        let mut corrected = elements.values_of(*shift);
        corrected.extend([power.0, difference.0]);
        for factor in factors {
            let mut multiple = Multiple {
                elements,
                power,
                quotients: Vec::new(),
                is_small: true,
                visited: BTreeSet::new(),
            };
            // Before the division a half may overflow that would not after it.
            let overflows = |m: &Multiple<'_, '_>| {
                elements.form().dtype == DType::F16 && !m.quotients.is_empty() && !m.is_small
            };
            if !multiple.is(factor) || overflows(&multiple) {
                return None;
            }
            found
                .postponed
                .extend(multiple.quotients.iter().map(|(n, _)| *n));
            let divisors = multiple.quotients.iter().map(|(_, b)| *b);
            found.divisors.push(divisors.collect());
            corrected.extend(multiple.visited);
        }
        // Nothing else may depend on numbers that are not final.
        let needed = elements.needed_without(&found.postponed);
        let early = |n: &usize| !elements.scalars_of(ValueId(*n)).is_empty();
        let shift_elsewhere = |n: &usize| {
            *n != difference.0 && elements.used_by(*n, &found.postponed).contains(shift)
        };
        let sound = needed
            .iter()
            .all(|n| (!early(n) || corrected.contains(n)) && !shift_elsewhere(n));
        sound.then_some(found)
    }

    /// The divisors of what waits for the row's end.
    pub(super) fn divisors(&self) -> impl Iterator<Item = ValueId> {
        self.divisors.iter().flatten().copied()
    }

    /// Scales what was summed up before to a block's new maximum.
    pub(super) fn correct(&self, t: &mut CText, sums: &[(usize, i64)]) {
        t.line("SH_UNROLL");
        t.open("for (int h = 0; h < 2; h++)");
        t.line(&format!(
            "const float scale = largest[h] == -SH_INF ? 0.0f : sh_exp(shift[h] - of_row{}[h]);",
            self.shift.0
        ));
        t.line(&format!("scalar{}[h] *= scale;", self.sum));
        for (q, n) in sums {
            scale(t, *q, *n);
        }
        t.line(&format!("shift[h] = of_row{}[h];", self.shift.0));
        t.close();
    }

    /// Ends the sweep: computes the sum of a row without any number above −∞ from its maximum, and divides what waited
    /// for the row's end.
    pub(super) fn finish(
        &self,
        t: &mut CText,
        elements: &Elements<'_>,
        names: &Names,
        sums: &[(usize, i64)],
    ) {
        t.line("SH_UNROLL");
        t.open("for (int h = 0; h < 2; h++)");
        t.open(&format!("if (scalar{}[h] == -SH_INF)", self.max));
        elements.declare_all(t, names, &[self.shift]);
        t.line(&format!(
            "scalar{}[h] = sh_exp(-SH_INF - t{});",
            self.sum, self.shift.0
        ));
        t.close();
        for (q, n) in sums {
            let Some(divisors) = self.divisors.get(*q).filter(|d| !d.is_empty()) else {
                continue;
            };
            t.open("");
            elements.declare_all(t, names, divisors);
            let all: Vec<String> = divisors.iter().map(|d| format!("t{}", d.0)).collect();
            t.line(&format!(
                "const float scale = 1.0f / ({});",
                all.join(" * ")
            ));
            scale(t, *q, *n);
            t.close();
        }
        t.close();
    }
}

/// Multiplies a row of sums by `scale`.
fn scale(t: &mut CText, q: usize, n: i64) {
    t.line("SH_UNROLL");
    t.line(&format!(
        "for (int j = 0; j < {n}; j++) out{q}[j][h*2] *= scale, out{q}[j][h*2 + 1] *= scale;"
    ));
}

/// Whether values are a power, times what does not depend on the row's numbers, divided by what does.
struct Multiple<'e, 'f> {
    elements: &'e Elements<'f>,
    power: ValueId,
    quotients: Vec<(usize, ValueId)>,
    /// Whether what multiplies the power is known to be small.
    is_small: bool,
    visited: BTreeSet<usize>,
}

impl Multiple<'_, '_> {
    fn is(&mut self, v: ValueId) -> bool {
        let e = self.elements;
        let free =
            |v: &ValueId| e.scalars_of(*v).is_empty() && !e.values_of(*v).contains(&self.power.0);
        let is_multiple = v == self.power
            || match e.op(v).clone() {
                Op::Binary(Binary::Div, DType::F32, a, b) if e.is_of_row(b) => {
                    self.quotients.push((v.0, b));
                    self.is(a)
                }
                Op::Binary(Binary::Mul, DType::F32, a, b) if free(&b) => self.by(b, a),
                Op::Binary(Binary::Mul, DType::F32, a, b) if free(&a) => self.by(a, b),
                Op::Select(c, a, b) if free(&c) && e.is_zero(b) => self.is(a),
                Op::Select(c, a, b) if free(&c) && e.is_zero(a) => self.is(b),
                // A rounding is as good before a division as after it.
                Op::Cast(a) if e.is_float(v) && e.is_float(a) => self.is(a),
                _ => false,
            };
        if is_multiple {
            self.visited.insert(v.0);
        }
        is_multiple
    }

    fn by(&mut self, factor: ValueId, rest: ValueId) -> bool {
        self.is_small &= is_small(self.elements, factor);
        self.is(rest)
    }
}

/// Whether a value is a number up to 1024, a choice among such, or a truth value.
fn is_small(e: &Elements<'_>, v: ValueId) -> bool {
    match e.op(v) {
        Op::Const(x) => x.as_f64().abs() <= 1024.0,
        Op::Select(_, a, b) => is_small(e, *a) && is_small(e, *b),
        Op::Cast(a) => e.is_truth(*a) || is_small(e, *a),
        _ => false,
    }
}

/// Whether values of two sweeps are made alike.
fn is_same((x, a): (&Elements<'_>, ValueId), (y, b): (&Elements<'_>, ValueId)) -> bool {
    let (p, q) = (x.op(a), y.op(b));
    let operands = p.operands().into_iter().zip(q.operands());
    without_operands(p) == without_operands(q)
        && p.operands().len() == q.operands().len()
        && operands.into_iter().all(|(a, b)| is_same((x, a), (y, b)))
}

/// The operation alone.
fn without_operands(op: &Op) -> Op {
    let none = ValueId(0);
    match op.clone() {
        Op::Load(mut a) => {
            a.gather.iter_mut().for_each(|(v, ..)| *v = none);
            Op::Load(a)
        }
        Op::Unary(f, _) => Op::Unary(f, none),
        Op::Binary(f, dtype, ..) => Op::Binary(f, dtype, none, none),
        Op::Select(..) => Op::Select(none, none, none),
        Op::Cast(_) => Op::Cast(none),
        Op::Uniform(..) => Op::Uniform(none, none),
        op @ (Op::Const(_) | Op::Index(_)) => op,
    }
}
