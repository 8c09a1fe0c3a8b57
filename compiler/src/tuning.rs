//! Decisions by measurement: which ways to compute the kernels of a step are faster than those it was planned with.
//!
//! The order is that of `shorthaul.tune` in the Python package. First contractions are cut into other blocks, beginning
//! with those that are predicted to take longest. Then decisions of fusion, inlining and layout are changed, beginning
//! with those that move most bytes. Kernels are timed alone (`cutout`), in turns with those that they would replace. A
//! change that is faster beyond noise stays. Every result is stored in the database before the next measurement.

use crate::cutout::{Cutout, Cutouts};
use crate::error::CompileError;
use crate::plan::{Plan, PlanOptions, Step};
use crate::predict::{On, Prediction, predict};
use crate::tuning_database::Database;
use fusion::Decision;
use graph::{Bindings, Blocking, Place, Recipe, Rewrite};
use kernels::features::CpuTarget;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::{Duration, Instant};

/// A replacement must take at most this part of the time of what it replaces.
const FASTER: f64 = 0.97;
/// How many ways to cut a contraction are tried beside the chosen one.
const N_OTHERS: usize = 4;
/// The part of the time that goes to contractions first.
const FOR_BLOCKING: f64 = 0.6;
/// Seconds of one comparison, at least and at most.
const SECONDS: [f64; 2] = [0.15, 1.5];
/// Contractions below this part of the step's predicted time are not tried.
const SMALL: f64 = 0.003;
/// Decisions that are worth timing.
const TRIED: [Rewrite; 5] = [
    Rewrite::Inline,
    Rewrite::Fuse,
    Rewrite::Epilogue,
    Rewrite::Prologue,
    Rewrite::Layout,
];

/// Runs kernels in turns for about the given seconds. Returns the seconds of each round, for each kernel. An
/// interruption is [`CompileError::Compile`].
pub type Timer<'a> = dyn FnMut(&[Cutout], f64) -> Result<Vec<Vec<f64>>, CompileError> + 'a;

/// What tuning found.
#[derive(Clone, Debug, Default)]
pub struct Tuned {
    /// The changed decisions.
    pub recipe: Recipe,
    /// A sentence for each change.
    pub kept: Vec<String>,
    /// Ways that were timed.
    pub n_tried: usize,
    /// A sentence for each way that could not be planned or compiled.
    pub failed: Vec<String>,
    /// Whether the search was interrupted.
    pub is_interrupted: bool,
}

/// What to tune, and with what.
pub struct Tuner<'a> {
    /// The step.
    pub step: &'a Step,
    /// Its sizes.
    pub sizes: &'a Bindings,
    /// How it is planned, with the recipe to start from.
    pub options: PlanOptions,
    /// What its kernels are compiled for.
    pub target: &'a CpuTarget,
    /// The identity of the compiler, [`kernels::toolchain::Toolchain::identity`]: times hold for one compiler only.
    pub toolchain: &'a str,
    /// Results of earlier measurements.
    pub database: &'a mut Database,
    /// Receives lines about the state of the search.
    pub say: &'a mut dyn FnMut(&str),
}

/// Why a search ends early.
enum Stop {
    Interrupted,
    Failed(CompileError),
}

impl From<CompileError> for Stop {
    fn from(error: CompileError) -> Stop {
        match error {
            CompileError::Compile(kernels::compile::CompileError::Interrupted) => Stop::Interrupted,
            other => Stop::Failed(other),
        }
    }
}

/// Reports a problem with the file of the database once, like a way that fails.
fn tell(learned: io::Result<Option<String>>, found: &mut Tuned) {
    let sentence = match learned {
        Ok(warning) => warning,
        Err(error) => Some(format!("what was learned is not kept: {error}")),
    };
    if let Some(sentence) = sentence.filter(|s| !found.failed.contains(s)) {
        found.failed.push(sentence);
    }
}

/// Equal contractions.
struct Group {
    key: String,
    /// One of them.
    position: usize,
    places: Vec<Place>,
    us: f64,
}

/// A plan with its kernels cut out.
struct Cut {
    cutouts: Cutouts,
    keys: Vec<Option<String>>,
    predicted: Vec<Prediction>,
}

impl Tuner<'_> {
    /// Times other ways to compute the step for `seconds` seconds.
    ///
    /// # Errors
    /// The step cannot be planned or lowered. What goes wrong with a single way is counted instead.
    pub fn tune(&mut self, seconds: f64, timer: &mut Timer<'_>) -> Result<Tuned, CompileError> {
        let mut found = Tuned {
            recipe: self.options.recipe.clone(),
            ..Tuned::default()
        };
        let start = Instant::now();
        let after = |part: f64| start + Duration::from_secs_f64(part * seconds.max(0.0));
        let ends = [after(FOR_BLOCKING), after(1.0)];
        let run = self
            .cut_otherwise(ends[0], timer, &mut found)
            .and_then(|()| self.decide_otherwise(ends[1], timer, &mut found));
        match run {
            Ok(()) => Ok(found),
            Err(Stop::Interrupted) => {
                found.is_interrupted = true;
                Ok(found)
            }
            Err(Stop::Failed(error)) => Err(error),
        }
    }

    fn cutouts(&self, recipe: &Recipe, n_others: usize) -> Result<Cut, CompileError> {
        let options = PlanOptions {
            recipe: recipe.clone(),
            ..self.options.clone()
        };
        let plan: Plan = self.step.plan_with(self.sizes, &options)?;
        let on = On {
            machine: plan.machine.unwrap_or(self.target.machine),
            threads: self.options.threads.max(1),
        };
        let cutouts = Cutouts::new(plan, &on, (self.target, self.toolchain), n_others)?;
        let key = |at: usize| {
            let cutout = cutouts.cut(at, None);
            cutout.map(|cutout| cutout.map(|c| c.key))
        };
        let keys: Result<Vec<Option<String>>, CompileError> =
            (0..cutouts.kernels.len()).map(key).collect();
        Ok(Cut {
            predicted: predict(&cutouts.plan().graph, &cutouts.kernels, &on),
            keys: keys?,
            cutouts,
        })
    }

    /// Contractions in other blocks.
    fn cut_otherwise(
        &mut self,
        end: Instant,
        timer: &mut Timer<'_>,
        found: &mut Tuned,
    ) -> Result<(), Stop> {
        let cut = self.cutouts(&found.recipe, N_OTHERS)?;
        let whole: f64 = cut.predicted.iter().map(|p| p.us).sum();
        let groups = groups(&cut);
        let n_groups = groups.len();
        for (n, group) in groups.iter().enumerate() {
            if group.us < SMALL * whole {
                break;
            }
            (self.say)(&format!(
                "contraction {} of {n_groups}, {} ways timed, {} faster",
                n + 1,
                found.n_tried,
                found.kept.len()
            ));
            let best = self.best_blocking(&cut, group, Instant::now() < end, timer, found)?;
            if let Some((blocking, ratio)) = best {
                for place in &group.places {
                    found.recipe.cut(place.clone(), blocking.clone());
                }
                found.kept.push(format!(
                    "{} × {}: blocking {blocking}, {ratio:.2} of the time",
                    group.places.len(),
                    group.places[0].node
                ));
            }
        }
        Ok(())
    }

    /// The fastest other blocks of a contraction, if they are faster than its own.
    fn best_blocking(
        &mut self,
        cut: &Cut,
        group: &Group,
        may_time: bool,
        timer: &mut Timer<'_>,
        found: &mut Tuned,
    ) -> Result<Option<(Blocking, f64)>, Stop> {
        let cuts = cut.cutouts.kernels[group.position].cuts.as_ref();
        let others = cuts.map(|c| c.cuts.others.as_slice()).unwrap_or_default();
        let mut ways: Vec<(String, Blocking, Cutout)> = Vec::new();
        for (blocking, _) in others {
            let cutout = cut.cutouts.cut(group.position, Some(blocking))?;
            let is_new = |c: &Cutout| c.key != group.key && ways.iter().all(|w| w.0 != c.key);
            if let Some(cutout) = cutout.filter(is_new) {
                ways.push((cutout.key.clone(), blocking.clone(), cutout));
            }
        }
        let own = [group.key.clone()];
        let mut ratios: Vec<(f64, Blocking)> = Vec::new();
        let mut unknown: Vec<(String, Blocking, Cutout)> = Vec::new();
        for way in ways {
            match self.database.ratio(&own, std::slice::from_ref(&way.0)) {
                Some(ratio) => ratios.push((ratio, way.1)),
                None => unknown.push(way),
            }
        }
        if may_time && !unknown.is_empty() {
            let first = cut.cutouts.cut(group.position, None)?;
            let (names, cutouts): (Vec<(String, Blocking)>, Vec<Cutout>) =
                unknown.into_iter().map(|(k, b, c)| ((k, b), c)).unzip();
            let all: Vec<Cutout> = first.into_iter().chain(cutouts).collect();
            let each_us = group.us / group.places.len() as f64;
            match self.timed((&all, names.len()), each_us, timer, found)? {
                None => {}
                Some(times) => {
                    for ((key, blocking), own_times) in names.into_iter().zip(&times[1..]) {
                        let ratio = ratio(&times[0], own_times);
                        tell(self.database.learn(&own, &[key], ratio), found);
                        ratios.push((ratio, blocking));
                    }
                }
            }
        }
        let best = ratios.into_iter().min_by(|a, b| a.0.total_cmp(&b.0));
        Ok(best
            .filter(|(ratio, _)| *ratio <= FASTER)
            .map(|(ratio, blocking)| (blocking, ratio)))
    }

    /// Other decisions, one by one.
    fn decide_otherwise(
        &mut self,
        end: Instant,
        timer: &mut Timer<'_>,
        found: &mut Tuned,
    ) -> Result<(), Stop> {
        let mut now = self.cutouts(&found.recipe, 0)?;
        let mut tried: BTreeSet<Place> = BTreeSet::new();
        while Instant::now() < end {
            let Some(decision) = next(now.cutouts.plan(), &tried) else {
                break;
            };
            let place = decision.place.clone();
            let take = !decision.is_applied();
            tried.insert(place.clone());
            (self.say)(&format!(
                "{place}, {} ways timed, {} faster",
                found.n_tried,
                found.kept.len()
            ));
            let mut recipe = found.recipe.clone();
            recipe.tell(place.clone(), take);
            let new = match self.cutouts(&recipe, 0) {
                Ok(new) => new,
                Err(error) => {
                    found.failed.push(format!("{place}: {error}"));
                    continue;
                }
            };
            let ratio = self.replacement(&now, &new, timer, found)?;
            if let Some(ratio) = ratio.filter(|ratio| *ratio <= FASTER) {
                // Drops the blockings of contractions that are no longer there.
                let cut = new.cutouts.kernels.iter().filter_map(|k| k.cuts.as_ref());
                let there: BTreeSet<&Place> = cut.map(|c| &c.place).collect();
                recipe.retain_blockings(|place| there.contains(place));
                found.recipe = recipe;
                now = new;
                let verb = if take { "taken" } else { "left out" };
                found
                    .kept
                    .push(format!("{place}: {verb}, {ratio:.2} of its kernels' time"));
            }
        }
        Ok(())
    }

    /// The time of the kernels that only `new` has, divided by the time of those that only `old` has; `None` if there
    /// is no answer.
    fn replacement(
        &mut self,
        old: &Cut,
        new: &Cut,
        timer: &mut Timer<'_>,
        found: &mut Tuned,
    ) -> Result<Option<f64>, Stop> {
        let (gone, added) = (without(old, new), without(new, old));
        let names = |cut: &Cut, positions: &[usize]| -> Option<Vec<String>> {
            positions.iter().map(|at| cut.keys[*at].clone()).collect()
        };
        let (Some(gone_keys), Some(added_keys)) = (names(old, &gone), names(new, &added)) else {
            return Ok(None);
        };
        if gone.is_empty() || added.is_empty() {
            return Ok(None);
        }
        if let Some(known) = self.database.ratio(&gone_keys, &added_keys) {
            return Ok(Some(known));
        }
        let mut all = Vec::new();
        for (cut, positions) in [(old, &gone), (new, &added)] {
            for at in positions {
                all.extend(cut.cutouts.cut(*at, None)?);
            }
        }
        let Some(times) = self.timed((&all, 1), 0.0, timer, found)? else {
            return Ok(None);
        };
        let n_rounds = times.iter().map(Vec::len).min().unwrap_or(0);
        let sums = |own: &[Vec<f64>]| -> Vec<f64> {
            (0..n_rounds)
                .map(|round| own.iter().map(|times| times[round]).sum())
                .collect()
        };
        let ratio = ratio(&sums(&times[..gone.len()]), &sums(&times[gone.len()..]));
        tell(self.database.learn(&gone_keys, &added_keys, ratio), found);
        Ok(Some(ratio))
    }

    /// Times the kernels of `n_ways` ways in turns; `None` if one of them cannot be compiled or run.
    fn timed(
        &mut self,
        (cutouts, n_ways): (&[Cutout], usize),
        each_us: f64,
        timer: &mut Timer<'_>,
        found: &mut Tuned,
    ) -> Result<Option<Vec<Vec<f64>>>, Stop> {
        let wanted = 8.0 * each_us / 1e6 * cutouts.len() as f64;
        match timer(cutouts, wanted.clamp(SECONDS[0], SECONDS[1])).map_err(Stop::from) {
            Ok(times) => {
                found.n_tried += n_ways;
                Ok(Some(times))
            }
            Err(Stop::Interrupted) => Err(Stop::Interrupted),
            Err(Stop::Failed(error)) => {
                found.failed.push(format!("kernels cut out: {error}"));
                Ok(None)
            }
        }
    }
}

/// Contractions that can be cut in other ways; those that take longest together come first.
fn groups(cut: &Cut) -> Vec<Group> {
    let mut groups: BTreeMap<&String, Group> = BTreeMap::new();
    let kernels = cut.cutouts.kernels.iter().enumerate();
    for (position, info) in kernels {
        let choice = info.cuts.as_ref().filter(|c| !c.cuts.others.is_empty());
        let (Some(choice), Some(key)) = (choice, &cut.keys[position]) else {
            continue;
        };
        let group = groups.entry(key).or_insert_with(|| Group {
            key: key.clone(),
            position,
            places: Vec::new(),
            us: 0.0,
        });
        group.places.push(choice.place.clone());
        group.us += cut.predicted[position].us;
    }
    let mut groups: Vec<Group> = groups.into_values().collect();
    groups.sort_by(|a, b| b.us.total_cmp(&a.us).then(a.position.cmp(&b.position)));
    groups
}

/// The decision to change next: of those not tried, the one with the most bytes or operations.
fn next<'a>(plan: &'a Plan, tried: &BTreeSet<Place>) -> Option<&'a Decision> {
    let is_free = |d: &&Decision| {
        let is_told = plan.recipe.override_for(|| d.place.clone()).is_some();
        TRIED.contains(&d.rewrite()) && d.may_change() && !is_told && !tried.contains(&d.place)
    };
    let weight = |d: &&Decision| Reverse(d.bytes.abs().max(d.operations));
    plan.decisions.iter().filter(is_free).min_by_key(weight)
}

/// Positions of the kernels that only the first plan has.
fn without(own: &Cut, other: &Cut) -> Vec<usize> {
    let mut left: BTreeMap<&Option<String>, usize> = BTreeMap::new();
    for key in &other.keys {
        *left.entry(key).or_default() += 1;
    }
    let is_new = |at: &usize| match left.get_mut(&own.keys[*at]) {
        Some(n) if *n > 0 => {
            *n -= 1;
            false
        }
        _ => true,
    };
    (0..own.keys.len()).filter(is_new).collect()
}

/// How many times as long `after` takes as `before`, which were timed in turns: the median of the rounds' ratios, or
/// the ratio of the least times if that is larger.
pub fn ratio(before: &[f64], after: &[f64]) -> f64 {
    let mut rounds: Vec<f64> = before.iter().zip(after).map(|(b, a)| a / b).collect();
    rounds.sort_by(f64::total_cmp);
    let n = rounds.len();
    let median = match n {
        0 => return f64::INFINITY,
        n if n % 2 == 1 => rounds[n / 2],
        n => f64::midpoint(rounds[n / 2 - 1], rounds[n / 2]),
    };
    let least = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
    median.max(least(after) / least(before))
}

#[cfg(test)]
mod tests;
