//! How far rounding alone moves the outputs of the original.
//!
//! Rounding to integers, the position of the largest number, and thresholds turn tiny errors into whole steps: an
//! original and a right rewrite of it, both rounded as usual, may differ by a step. So where a comparison fails, the
//! original is run again with other roundings ([`Perturbed`]), each as much larger as a rewritten model's error may be
//! ([`SLACK`]). For floats, the largest error of the rewritten model may be that of the farthest of these runs: one
//! maximum over the tensor, and the mean square error of every slice. Each whole number must be one that was seen at
//! its place. If such runs lie so far apart that hardly anything would be compared ([`MOST_MOVED`], [`MOST_CHANGED`]),
//! they do not count.

use super::runs::Run;
use super::{Checker, SLACK, VerifyError, compare, program};
use crate::element::Element;
use crate::evaluate::{Perturbed, Precision};
use crate::tensor::Tensor;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most runs with other roundings; a comparison is tried again after each doubling.
const MOST_SAMPLES: usize = 16;
/// Most seeds that are tried for these: with some roundings a model may not run.
const MOST_SEEDS: u64 = 32;
/// Rounding excuses no output that it moves by more than this part of the output's largest element.
const MOST_MOVED: f64 = 0.125;
/// The same for whole numbers: the part of the elements that rounding alone may change; one always may.
const MOST_CHANGED: f64 = 0.0625;
/// How long the original is run with other roundings, over all comparisons.
const LONGEST: Duration = Duration::from_secs(60);
/// Most bytes of a run's outputs with which runs with other roundings are made and kept.
const MOST_BYTES: usize = 32 << 20;
/// Most bytes of outputs of all such runs together that are kept.
const MOST_KEPT: usize = 256 << 20;
/// A whole number of 8 or 16 bits stands for a float: it may lie between those seen if they are at most this far apart.
const WIDEST: i64 = 2;

/// An output that rounding alone moves farther than a rewritten model may be off elsewhere.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Unsettled {
    /// The output, or an input of a node where the models are cut.
    pub output: String,
    /// Runs in which it was compared with what rounding does.
    pub n_runs: usize,
    /// How far rounding moves it: the largest difference over the largest element, or the part of the elements that
    /// change.
    pub moved: f64,
    /// Whether `moved` is the part of the elements that change, as it is for whole numbers.
    pub is_share: bool,
}

/// How far rounding moves a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Moved {
    by: f64,
    is_share: bool,
}

/// Adds what was found in one run.
pub(super) fn note(all: &mut Vec<Unsettled>, output: &str, moved: Moved) {
    match all.iter_mut().find(|known| known.output == output) {
        Some(known) => {
            known.n_runs += 1;
            known.moved = known.moved.max(moved.by);
        }
        None => all.push(Unsettled {
            output: output.to_string(),
            n_runs: 1,
            moved: moved.by,
            is_share: moved.is_share,
        }),
    }
}

/// Runs with other roundings, by the position of the run that they repeat.
#[derive(Debug, Default)]
pub(super) struct Samples {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    outputs: BTreeMap<usize, Vec<Vec<Tensor>>>,
    /// Seeds tried for each run, including those with which the original did not run.
    n_seeds: BTreeMap<usize, u64>,
    n_bytes: usize,
    spent: Duration,
}

/// A value to compare with instead of the original's, and how far rounding moves the original's.
pub(super) struct Yardstick {
    pub tensor: Tensor,
    pub moved: Moved,
}

impl Checker<'_> {
    /// Compares value `n` of run `at` again, now with what rounding alone does to the original. If that does not
    /// explain the difference, returns `refused`, the error of the first comparison. `wanted` names the values.
    pub(super) fn compare_rounded(
        &self,
        (at, n): (usize, usize),
        wanted: &[String],
        [before, after]: [&Tensor; 2],
        refused: String,
    ) -> Result<(compare::OutputError, Moved), String> {
        let run = &self.runs[at];
        let exact = run.exact.as_ref().map(|exact| &exact[n]);
        let mut n_samples = 2;
        while n_samples <= MOST_SAMPLES {
            let known = self.samples(at, wanted, n_samples);
            let Some(all) = known.outputs.get(&at).filter(|all| all.len() >= n_samples) else {
                break;
            };
            let samples: Vec<&Tensor> = all.iter().filter_map(|outputs| outputs.get(n)).collect();
            let pair = [before, after];
            if let Some(found) = explained(&wanted[n], pair, exact, &samples, self.tolerance) {
                return Ok(found);
            }
            n_samples *= 2;
        }
        Err(refused)
    }

    /// The yardstick of value `n` of run `at`, from up to [`MOST_SAMPLES`] runs.
    pub(super) fn known_yardstick(
        &self,
        (at, n): (usize, usize),
        wanted: &[String],
        after: &Tensor,
    ) -> Option<Yardstick> {
        let run = &self.runs[at];
        let known = self.samples(at, wanted, MOST_SAMPLES);
        let all = known.outputs.get(&at)?;
        let samples: Vec<&Tensor> = all.iter().filter_map(|outputs| outputs.get(n)).collect();
        let exact = run.exact.as_ref().map(|exact| &exact[n]);
        yardstick([&run.stored[n], after], exact, &samples)
    }

    /// Runs the original until there are `n_samples` runs with other roundings, or there is no time or room for more.
    fn samples(&self, at: usize, wanted: &[String], n_samples: usize) -> MutexGuard<'_, Known> {
        let mut known = self
            .samples
            .known
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let run = &self.runs[at];
        let n_bytes: usize = run.stored.iter().map(Tensor::n_bytes).sum();
        let names: Vec<&str> = wanted.iter().map(String::as_str).collect();
        while known.outputs.get(&at).map_or(0, Vec::len) < n_samples
            && known.spent < LONGEST
            && n_bytes <= MOST_BYTES
            && known.n_bytes + n_bytes <= MOST_KEPT
            && !self.is_late()
        {
            let started = Instant::now();
            let seed = known.n_seeds.get(&at).copied().unwrap_or(0);
            if seed >= MOST_SEEDS {
                break;
            }
            known.n_seeds.insert(at, seed + 1);
            let outputs = self.perturbed(run, seed, &names);
            known.spent += started.elapsed();
            if let Ok(outputs) = outputs {
                known.n_bytes += outputs.iter().map(Tensor::n_bytes).sum::<usize>();
                known.outputs.entry(at).or_default().push(outputs);
            }
        }
        known
    }

    fn perturbed(&self, run: &Run, seed: u64, names: &[&str]) -> Result<Vec<Tensor>, VerifyError> {
        let failed = |cause| VerifyError::Original { cause };
        let original = self.original;
        let program = program(
            &original.proto,
            &original.folder,
            Precision::AsStored,
            self.deadline,
        );
        let perturbed = Perturbed {
            seed,
            roundings: SLACK,
        };
        let program = program.map_err(failed)?.perturbed(perturbed);
        program.run(&run.feeds, names).map_err(failed)
    }
}

/// The errors of both models, and how far rounding moves the original, if that explains the difference.
fn explained(
    name: &str,
    [before, after]: [&Tensor; 2],
    exact: Option<&Tensor>,
    samples: &[&Tensor],
    tolerance: f64,
) -> Option<(compare::OutputError, Moved)> {
    let Yardstick { tensor, moved } = yardstick([before, after], exact, samples)?;
    let reference = Some(exact.unwrap_or(before));
    let mut error = compare::errors(name, &tensor, after, reference, tolerance).ok()?;
    let own = compare::errors(name, before, before, exact, 0.0);
    error.before = own.map_or(0.0, |own| own.before);
    Some((error, moved))
}

/// What the original gives under some rounding, as near to `after` as was seen; `None` if rounding moves it too far to
/// compare anything, or not at all.
fn yardstick(
    [before, after]: [&Tensor; 2],
    exact: Option<&Tensor>,
    samples: &[&Tensor],
) -> Option<Yardstick> {
    if before.element() != after.element() {
        return None;
    }
    // Sizes may depend on data: then one of the runs must have these.
    if before.shape != after.shape {
        let alike = samples.iter().find(|sample| sample.shape == after.shape)?;
        return Some(Yardstick {
            tensor: (*alike).clone(),
            moved: Moved {
                by: 1.0,
                is_share: true,
            },
        });
    }
    let samples: Vec<&Tensor> = samples
        .iter()
        .copied()
        .filter(|sample| sample.shape == before.shape)
        .collect();
    match before.element().is_float() {
        true => floats([before, after], exact.unwrap_or(before), &samples),
        false => whole([before, after], exact, &samples),
    }
}

/// For each element a value that is as far from the reference as the original's, or as that of a run with other
/// roundings, whose distance is divided by [`SLACK`]. If the elements of the two models are of different kinds (finite,
/// NaN, an infinity): the value of the rewritten model's kind that such a run has there. If there is none, the
/// original's, so that the comparison refuses.
fn floats(
    [before, after]: [&Tensor; 2],
    reference: &Tensor,
    samples: &[&Tensor],
) -> Option<Yardstick> {
    let (old, new, exact) = (before.to_f64()?, after.to_f64()?, reference.to_f64()?);
    if exact.len() != old.len() {
        return None;
    }
    let samples: Vec<Vec<f64>> = samples.iter().filter_map(|s| s.to_f64()).collect();
    let kind = |v: f64| (v.is_nan(), v.is_infinite(), v.is_finite() || v > 0.0);
    let (mut values, mut moved, mut largest) = (old.clone(), 0.0f64, 0.0f64);
    for (n, value) in values.iter_mut().enumerate() {
        if kind(*value) != kind(new[n]) {
            let seen = samples.iter().map(|sample| sample[n]);
            if let Some(seen) = nearest(new[n], seen.filter(|v| kind(*v) == kind(new[n]))) {
                *value = seen;
                if seen.is_finite() && exact[n].is_finite() {
                    largest = largest.max(exact[n].abs());
                    moved = moved.max((seen - exact[n]).abs());
                }
            }
            continue;
        }
        if !value.is_finite() || !exact[n].is_finite() {
            continue;
        }
        largest = largest.max(exact[n].abs());
        let mut farthest = (*value - exact[n]).abs();
        for sample in samples.iter().filter(|sample| sample[n].is_finite()) {
            let distance = (sample[n] - exact[n]).abs();
            moved = moved.max(distance);
            farthest = farthest.max(distance / SLACK);
        }
        let up = *value >= exact[n];
        *value = if up {
            exact[n] + farthest
        } else {
            exact[n] - farthest
        };
    }
    let moved = moved / if largest > 0.0 { largest } else { 1.0 };
    let tensor = Tensor::floats(before.element(), &before.shape, &values)?;
    let is_near = moved > 0.0 && moved <= MOST_MOVED;
    let moved = Moved {
        by: moved,
        is_share: false,
    };
    is_near.then_some(Yardstick { tensor, moved })
}

/// The value nearest to `new` among those seen of its kind; `None` if `new` is outside of their range.
fn nearest(new: f64, seen: impl Iterator<Item = f64>) -> Option<f64> {
    let seen: Vec<f64> = seen.collect();
    if !new.is_finite() {
        return seen.first().copied();
    }
    let low = seen.iter().copied().fold(f64::INFINITY, f64::min);
    let high = seen.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let distance = |v: &f64| (v - new).abs();
    let nearest = seen
        .into_iter()
        .min_by(|a, b| distance(a).total_cmp(&distance(b)));
    nearest.filter(|_| low <= new && new <= high)
}

/// The original's elements, with each of `after` that the original, the reference or a run with other roundings has at
/// that place too. An element of 8 or 16 bits may also be between these, if they are at most [`WIDEST`] apart.
fn whole(
    [before, after]: [&Tensor; 2],
    exact: Option<&Tensor>,
    samples: &[&Tensor],
) -> Option<Yardstick> {
    let (old, new) = (before.to_i64()?, after.to_i64()?);
    let exact = exact.filter(|exact| exact.shape == before.shape);
    let others = samples.iter().copied().chain(exact);
    let seen: Vec<Vec<i64>> = others.filter_map(Tensor::to_i64).collect();
    let is_narrow = matches!(
        before.element(),
        Element::U8 | Element::I8 | Element::U16 | Element::I16
    );
    let (mut values, mut n_changed) = (old.clone(), 0usize);
    for (n, value) in values.iter_mut().enumerate() {
        let at_place = || seen.iter().map(|seen| seen[n]).chain([old[n]]);
        let (low, high) = (at_place().min()?, at_place().max()?);
        n_changed += usize::from(low != high);
        let fits = match is_narrow && high.saturating_sub(low) <= WIDEST {
            true => (low..=high).contains(&new[n]),
            false => at_place().any(|seen| seen == new[n]),
        };
        if fits {
            *value = new[n];
        }
    }
    let moved = n_changed as f64 / old.len().max(1) as f64;
    let tensor = Tensor::of_ints(before.element(), &before.shape, &values)?;
    let is_few = n_changed <= 1 || moved <= MOST_CHANGED;
    let moved = Moved {
        by: moved,
        is_share: true,
    };
    (n_changed > 0 && is_few).then_some(Yardstick { tensor, moved })
}

#[cfg(test)]
#[path = "yardstick_tests.rs"]
mod tests;
