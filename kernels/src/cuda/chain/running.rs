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
use crate::emit::text::CText;
use crate::emit::values::{Op, ValueId};
use graph::{Binary, DType, Reduction, Unary};
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

/// The sweeps with those joined that may be.
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
        .find(|joined| Elements::of(form, joined, 1).running().is_some())
        .unwrap_or(sweeps)
}

/// The first `n` sweeps as one of two parts.
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
    /// For values whose first sink is the sum and whose further ones are left factors.
    pub(super) fn of(elements: &Elements<'_>) -> Option<Running> {
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
        let mut found = Running {
            max,
            sum,
            shift: *shift,
            postponed: BTreeSet::new(),
            divisors: Vec::new(),
        };
        let mut corrected = elements.values_of(*shift);
        corrected.extend([power.0, difference.0]);
        for factor in elements.factors() {
            let mut multiple = Multiple {
                elements,
                power,
                quotients: Vec::new(),
                visited: BTreeSet::new(),
            };
            if !multiple.is(factor) {
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

    /// After a block's maximum: what was summed up before is for the new one.
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

    /// After the sweep: the sum of a row without any number above −∞ is what its maximum makes of it, and
    /// what waited for the row divides.
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

/// Whether values are a power times what does not depend on the row's numbers, over what does.
struct Multiple<'e, 'f> {
    elements: &'e Elements<'f>,
    power: ValueId,
    quotients: Vec<(usize, ValueId)>,
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
                Op::Binary(Binary::Mul, DType::F32, a, b) if free(&b) => self.is(a),
                Op::Binary(Binary::Mul, DType::F32, a, b) if free(&a) => self.is(b),
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
}
