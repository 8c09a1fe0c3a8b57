//! Search over recipes by predicted time: which decisions to take otherwise than the greedy passes do.
//!
//! Starts from the greedy plan and changes decisions in groups: those of one rewrite that move the same bytes and
//! cost the same operations, as the repeated blocks of a network have them. A change stays where the whole step,
//! planned and lowered again, is predicted to be faster; so the result is never worse than the start by prediction.
//! Bounded by plans, not by a clock: the same step, machine and bound give the same recipe. Nothing is run.

use crate::error::CompileError;
use crate::plan::{Plan, Step};
use crate::recipe::{Entry, RecipeFile, Section, fingerprint};
use crate::report::Report;
use crate::steering::{Choices, planned};
use fusion::{Decision, Target};
use graph::{Bindings, Place, Rewrite};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Plans of a search, where the caller asks for no other number.
pub const USUAL_PLANS: usize = 8;
/// A change must save this part of the step's predicted time to be kept.
const WORTH: f64 = 1e-3;

/// What a search found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Searched {
    /// Decisions to take otherwise, as in a recipe's file.
    pub changes: Vec<Entry>,
    /// Microseconds of the greedy plan, as predicted.
    pub start_us: f64,
    /// Microseconds with the changes.
    pub found_us: f64,
    /// Microseconds that the step takes at least on the machine.
    pub bound_us: f64,
    /// What was tried, in order.
    pub tried: Vec<Move>,
    /// Groups of decisions for which no plan was left.
    pub n_untried: usize,
}

/// A group of decisions that was changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Move {
    /// The rewrite.
    pub kind: &'static str,
    /// Whether it was asked for, or left out.
    pub take: bool,
    /// Decisions.
    pub n_decisions: usize,
    /// Bytes that each was counted to save.
    pub bytes: i64,
    /// Microseconds of the step with the change.
    pub us: f64,
    /// Whether it stayed.
    pub kept: bool,
}

/// What makes decisions alike: rewrite, whether applied, bytes, bytes of memory, operations.
type Likeness = (Rewrite, bool, i64, i64, i64);

/// Searches with so many plans besides the first.
///
/// # Errors
/// As for [`Step::plan`].
pub fn search(
    step: &Step,
    sizes: &Bindings,
    threads: usize,
    choices: &Choices,
    max_plans: usize,
) -> Result<Searched, CompileError> {
    let place = (Target::Cpu, threads);
    let greedy = planned(step, sizes, place, choices)?;
    let report = Report::of_plan(&greedy, threads)?;
    let start_us = predicted_us(&report);
    let mut groups = groups(&greedy);
    // Those first that move most bytes.
    groups.sort_by_key(|(key, places)| {
        let weight = key.2.unsigned_abs().saturating_mul(places.len() as u64);
        (Reverse(weight), *key)
    });
    let mut told: BTreeMap<Place, bool> = BTreeMap::new();
    let (mut found_us, mut tried) = (start_us, Vec::new());
    for (key, places) in groups.iter().take(max_plans) {
        let take = !key.1;
        let mut next = told.clone();
        next.extend(places.iter().map(|place| (place.clone(), take)));
        let us = match planned(step, sizes, place, &with(choices, &greedy, &next)) {
            Ok(plan) => predicted_us(&Report::of_plan(&plan, threads)?),
            Err(CompileError::Budget { .. }) => f64::INFINITY,
            Err(error) => return Err(error),
        };
        let kept = us < found_us * (1.0 - WORTH);
        tried.push(Move {
            kind: key.0.name(),
            take,
            n_decisions: places.len(),
            bytes: key.2,
            us,
            kept,
        });
        if kept {
            (told, found_us) = (next, us);
        }
    }
    Ok(Searched {
        changes: told
            .iter()
            .map(|(place, take)| Entry::of_place(place, !take, Some(*take)))
            .collect(),
        start_us,
        found_us,
        bound_us: report.roofline_us.unwrap_or(0.0),
        n_untried: groups.len().saturating_sub(tried.len()),
        tried,
    })
}

/// Alike decisions that a recipe may change and has not.
fn groups(plan: &Plan) -> Vec<(Likeness, BTreeSet<Place>)> {
    let mut groups: BTreeMap<Likeness, BTreeSet<Place>> = BTreeMap::new();
    let is_free =
        |d: &&Decision| d.may_change() && plan.recipe.override_for(|| d.place.clone()).is_none();
    for decision in plan.decisions.iter().filter(is_free) {
        let key = (
            decision.place.rewrite,
            decision.is_applied(),
            decision.bytes,
            decision.memory_bytes,
            decision.operations,
        );
        let place = decision.place.clone();
        groups.entry(key).or_default().insert(place);
    }
    groups.into_iter().collect()
}

/// The caller's choices with more decisions told.
fn with(choices: &Choices, greedy: &Plan, told: &BTreeMap<Place, bool>) -> Choices {
    let own = greedy
        .recipe
        .iter()
        .map(|(place, take)| (place.clone(), take));
    let all: BTreeMap<Place, bool> = own
        .chain(told.iter().map(|(p, t)| (p.clone(), *t)))
        .collect();
    let mut decisions: Vec<Entry> = all
        .iter()
        .map(|(place, take)| Entry::of_place(place, !take, Some(*take)))
        .collect();
    decisions.extend(greedy.recipe.blockings().map(|(place, blocking)| Entry {
        blocking: Some(blocking.to_string()),
        ..Entry::of_place(place, true, Some(true))
    }));
    let section = Section {
        structure: fingerprint(greedy.step.graph()),
        training: !greedy.step.gradient_inputs.is_empty(),
        decisions,
    };
    Choices {
        recipe: Some(RecipeFile::new("", vec![section])),
        ..choices.clone()
    }
}

fn predicted_us(report: &Report) -> f64 {
    let predicted = report.predicted_us();
    predicted.unwrap_or_else(|| unreachable!("each kernel of a CPU has a prediction"))
}
