//! Search over recipes by predicted time: which decisions to take otherwise than the greedy passes do.
//!
//! Starts from the greedy plan. The orders of all containers that are predicted to be fastest together
//! (`layout_choice`) are tried first. Then decisions are changed in groups: those of one rewrite that move the same
//! bytes and cost the same operations, as the repeated blocks of a network have them. A change stays if the whole step,
//! planned and lowered again, is predicted to be faster; so the result is never worse than the start by prediction.
//! Bounded by plans, not by a clock: the same step, machine and bound give the same recipe. Nothing is run.

use crate::error::CompileError;
use crate::layout_choice::{LayoutGain, chosen_layouts};
use crate::plan::{Plan, PlanOptions, Step};
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
    /// What orders of dimensions save, all chosen together.
    pub layouts: LayoutGain,
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

/// Searches with `plans` plans besides the first.
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
    let mut greedy = planned(step, sizes, place, choices)?;
    // What is computed again stays so. A search by time alone would undo it, since that saves time but no memory.
    let recomputation = std::mem::take(&mut greedy.recomputation);
    for (place, take) in &recomputation {
        greedy.recipe.tell(place.clone(), *take);
    }
    let report = Report::of_plan(&greedy, threads)?;
    let start_us = predicted_us(&report);
    let options = PlanOptions {
        recipe: greedy.recipe.clone(),
        machine: greedy.machine,
        threads,
        ..PlanOptions::default()
    };
    let layouts = chosen_layouts(step, sizes, &options)?;
    let changes = changes(&greedy, layouts.orders);
    let mut told: BTreeMap<Place, Told> = BTreeMap::new();
    let (mut found_us, mut tried) = (start_us, Vec::new());
    for change in changes.iter().take(max_plans) {
        let mut next = told.clone();
        next.extend(change.told.clone());
        let us = match planned(step, sizes, place, &with(choices, &greedy, &next)) {
            Ok(plan) => predicted_us(&Report::of_plan(&plan, threads)?),
            Err(CompileError::Budget { .. }) => f64::INFINITY,
            Err(error) => return Err(error),
        };
        let kept = us < found_us * (1.0 - WORTH);
        tried.push(Move {
            kind: change.rewrite.name(),
            take: change.take,
            n_decisions: change.told.len(),
            bytes: change.bytes,
            us,
            kept,
        });
        if kept {
            (told, found_us) = (next, us);
        }
    }
    // Without these, the step with the changes could compute something else again.
    if !told.is_empty() {
        let told_too = recomputation
            .into_iter()
            .map(|(place, take)| (place, Told::Take(take)));
        told.extend(told_too);
    }
    Ok(Searched {
        n_untried: changes.len().saturating_sub(tried.len()),
        changes: told.iter().map(|(place, told)| told.entry(place)).collect(),
        start_us,
        found_us,
        bound_us: report.roofline_us.unwrap_or(0.0),
        layouts: layouts.gain,
        tried,
    })
}

/// Decisions that are changed together.
struct Change {
    rewrite: Rewrite,
    take: bool,
    bytes: i64,
    told: BTreeMap<Place, Told>,
}

/// What to try, in order: the orders that were chosen together, then groups of alike decisions, beginning with those
/// that move most bytes.
fn changes(greedy: &Plan, orders: BTreeMap<Place, Vec<usize>>) -> Vec<Change> {
    let mut groups = groups(greedy);
    groups.sort_by_key(|(key, places)| {
        let weight = key.2.unsigned_abs().saturating_mul(places.len() as u64);
        (Reverse(weight), *key)
    });
    let told = orders.into_iter().map(|(p, order)| (p, Told::Order(order)));
    let layouts = Change {
        rewrite: Rewrite::Layout,
        take: true,
        bytes: 0,
        told: told.collect(),
    };
    let others = groups.into_iter().map(|(key, places)| Change {
        rewrite: key.0,
        take: !key.1,
        bytes: key.2,
        told: places
            .into_iter()
            .map(|p| (p, Told::Take(!key.1)))
            .collect(),
    });
    let layouts = Some(layouts).filter(|l| !l.told.is_empty());
    layouts.into_iter().chain(others).collect()
}

/// What a change says about a place.
#[derive(Clone, Debug)]
enum Told {
    /// Take a decision, or leave it.
    Take(bool),
    /// The order of a container's dimensions.
    Order(Vec<usize>),
}

impl Told {
    fn entry(&self, place: &Place) -> Entry {
        match self {
            Told::Take(take) => Entry::of_place(place, !take, Some(*take)),
            Told::Order(order) => Entry::of_place(place, false, Some(true)).with_order(order),
        }
    }
}

/// Groups of alike decisions that a recipe may change and does not change yet. What the backward pass computes again
/// stays as it is: predictions of its time are too coarse.
fn groups(plan: &Plan) -> Vec<(Likeness, BTreeSet<Place>)> {
    let mut groups: BTreeMap<Likeness, BTreeSet<Place>> = BTreeMap::new();
    let is_free =
        |d: &&Decision| d.may_change() && plan.recipe.override_for(|| d.place.clone()).is_none();
    let may_move = |d: &&Decision| d.place.rewrite != Rewrite::Recompute && is_free(d);
    for decision in plan.decisions.iter().filter(may_move) {
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

/// The caller's choices with the recipe of the greedy plan, to which the decisions `told` are added.
fn with(choices: &Choices, greedy: &Plan, told: &BTreeMap<Place, Told>) -> Choices {
    let own = greedy.recipe.iter();
    let own = own.map(|(place, take)| (place.clone(), Told::Take(take)));
    let orders = greedy.recipe.orders();
    let orders = orders.map(|(place, order)| (place.clone(), Told::Order(order.to_vec())));
    let mut all: BTreeMap<Place, Told> = own.chain(orders).collect();
    all.extend(told.clone());
    let mut decisions: Vec<Entry> = all.iter().map(|(place, told)| told.entry(place)).collect();
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
