//! Memory budgets: what to keep for the backward pass and what to compute again, so that a step's planned memory
//! stays under a limit.
//!
//! Which values those are is [`RecomputeProblem::within`]'s choice under a limit of estimated memory. Here the
//! choice is held against the memory plan of the whole fused step, and taken again with another limit. First the
//! estimates learn from these plans ([`Estimates`]). If the result may be far from the best, the search is made again
//! with estimates that do not learn, and the cheaper plan is taken. Nothing is run.

use crate::error::CompileError;
use crate::plan::{Finish, Plan, PlanOptions};
use crate::report::Memory;
use crate::usual::{self, Chosen};
use fusion::{Choice, Copies, Expanded, PlannedRecomputation, RecomputeProblem, Target};
use graph::{Graph, Rewrite};
use kernels::features;
use kernels::lowering::lower;
use serde::Serialize;

/// Plans tried for one budget with each kind of estimate.
const MAX_PLANS: usize = 8;
/// Limits that differ by less than the budget divided by this are not told apart.
const CLOSE_PARTS: i64 = 32;
/// Plans tried from the largest memory to the smallest, if none of the others is small enough.
const SCANNED_PLANS: i64 = 12;
/// A plan that leaves less than this part of the budget unused is not improved.
const GOOD_ENOUGH: f64 = 0.02;

/// A plan is not improved by another search if it adds less than this many times the time of the bound.
const GOOD_TIME: f64 = 1.25;

/// How much memory a step's intermediate results may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryBudget {
    /// Bytes.
    Bytes(usize),
    /// A part of what the step takes without a budget.
    Fraction(f64),
}

/// A budget and the machine for which memory is planned.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    /// The budget.
    pub budget: MemoryBudget,
    /// The CPU; a plan for a GPU needs none.
    pub isa: features::CpuTarget,
    /// Threads.
    pub threads: usize,
}

/// How a budget was kept.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct KeptBudget {
    /// Bytes that were allowed.
    pub budget_bytes: usize,
    /// Bytes that the step takes without a budget.
    pub default_bytes: usize,
    /// Bytes that the plan takes.
    pub peak_bytes: usize,
    /// Microseconds that computing again is predicted to add.
    pub added_us: f64,
    /// Least microseconds that a choice that keeps as few bytes can add.
    pub least_us: f64,
}

/// Memory of a fused step.
fn memory(graph: &Graph, target: Target, limit: &Limit) -> Result<Memory, CompileError> {
    match target {
        Target::Cpu => {
            let lowered = lower(graph, &limit.isa, limit.threads)?;
            Ok(Memory {
                forward_arena_bytes: lowered.memory.forward_arena_bytes,
                backward_arena_bytes: lowered.memory.backward_arena_bytes,
                saved_bytes: lowered.memory.saved_bytes,
                thread_scratch_bytes: lowered.thread_scratch_bytes,
            })
        }
        Target::Cuda => {
            let program = cuda_kernels::lower::lower(graph)?;
            Ok(Memory {
                forward_arena_bytes: program.memory.forward_arena_bytes,
                backward_arena_bytes: program.memory.backward_arena_bytes,
                saved_bytes: program.memory.saved_bytes,
                thread_scratch_bytes: 0,
            })
        }
    }
}

/// Finishes an expanded step so that its planned memory keeps the limit.
///
/// # Errors
/// [`CompileError::Budget`] with the least memory that was found possible.
pub(crate) fn fit(
    expanded: &Expanded,
    finish: &Finish<'_>,
    options: &PlanOptions,
    limit: &Limit,
) -> Result<Plan, CompileError> {
    let problem = RecomputeProblem::new(expanded, &options.recipe, &options.speed());
    let settings = (options, limit);
    let usual = usual::choose(expanded, finish, options, &problem)?;
    let default = usual.choice.clone();
    let first = Trial::new(expanded, settings, &problem, usual)?;
    let default_bytes = match limit.budget {
        MemoryBudget::Bytes(_) => first.peak_bytes,
        MemoryBudget::Fraction(_) => {
            usual_bytes(expanded, finish, settings)?.unwrap_or(first.peak_bytes)
        }
    };
    let budget_bytes = match limit.budget {
        MemoryBudget::Bytes(bytes) => bytes,
        MemoryBudget::Fraction(part) => (default_bytes as f64 * part) as usize,
    };
    let kept = |trial: Trial, us: f64, least_us: f64| Plan {
        budget: Some(KeptBudget {
            budget_bytes,
            default_bytes,
            peak_bytes: trial.peak_bytes,
            added_us: us,
            least_us,
        }),
        ..trial.plan
    };
    let least_us = |choice: &Choice| {
        let as_few = problem.solve(problem.cost(choice).kept_bytes);
        as_few.map_or(f64::INFINITY, |s| s.bound_us)
    };
    if first.peak_bytes <= budget_bytes || first.plan.step.gradient_inputs.is_empty() {
        let us = problem.cost(&default).us;
        return Ok(kept(first, us, least_us(&default).min(us)));
    }
    let mut search = Search {
        expanded,
        default: &default,
        trial: &|choice| {
            let chosen = Chosen::new(expanded, finish, &problem, choice.clone())?;
            Trial::new(expanded, settings, &problem, chosen)
        },
        budget_bytes,
        best: None,
        least_bytes: default_bytes,
    };
    let mut learning = problem.clone();
    learning.learn(expanded, &first.plan.graph, &first.copies);
    search.close_in(learning, first.peak_bytes, Estimates::FromPlans)?;
    if search
        .best
        .as_ref()
        .is_none_or(|b| b.1.cost.us > GOOD_TIME * least_us(&b.1.choice))
    {
        search.close_in(problem.clone(), first.peak_bytes, Estimates::BeforeFusion)?;
    }
    if search.best.is_none() {
        search.scan(&problem)?;
    }
    let Some((trial, planned)) = search.best else {
        return Err(CompileError::Budget {
            budget_bytes,
            default_bytes,
            least_bytes: search.least_bytes,
        });
    };
    let least_us = least_us(&planned.choice).min(planned.cost.us);
    Ok(kept(trial, planned.cost.us, least_us))
}

/// Memory that the step takes without a budget and without the recipe's decisions about computing again; `None` if it
/// has none. Such a recipe may come from a budget, and a fraction of the memory that it leaves would count twice.
fn usual_bytes(
    expanded: &Expanded,
    finish: &Finish<'_>,
    (options, limit): (&PlanOptions, &Limit),
) -> Result<Option<usize>, CompileError> {
    let mut recipe = options.recipe.clone();
    recipe.retain(|place| place.rewrite != Rewrite::Recompute);
    if recipe == options.recipe {
        return Ok(None);
    }
    let problem = RecomputeProblem::new(expanded, &recipe, &options.speed());
    let usual = usual::choose(expanded, finish, options, &problem)?;
    Ok(Some(
        memory(&usual.plan.graph, options.target, limit)?.peak_bytes(),
    ))
}

/// What the memory of a choice is estimated from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Estimates {
    /// The step before fusion.
    BeforeFusion,
    /// Also the plans so far, which say what fusion keeps inside a kernel.
    FromPlans,
}

/// Plans for limits of estimated memory.
struct Search<'a> {
    expanded: &'a Expanded,
    /// The choice without a budget.
    default: &'a Choice,
    trial: &'a dyn Fn(&Choice) -> Result<Trial, CompileError>,
    budget_bytes: usize,
    /// The plan that adds the least time, of those that keep the budget.
    best: Option<(Trial, PlannedRecomputation)>,
    /// Least memory of the plan without a budget and the plans of the scan.
    least_bytes: usize,
}

impl Search<'_> {
    /// Looks for the largest limit whose plan keeps the budget: first as far below the budget as the last plan is
    /// below its estimate, then farther and farther below, then between what was too much and what fits.
    fn close_in(
        &mut self,
        mut problem: RecomputeProblem,
        default_bytes: usize,
        estimates: Estimates,
    ) -> Result<(), CompileError> {
        let budget = self.budget_bytes as i64;
        let mut limit = budget - default_bytes as i64 + problem.peak_bytes(self.default);
        let (mut fits, mut too_much): (Option<i64>, Option<i64>) = (None, None);
        let mut factor = 1;
        let mut seen: Vec<Choice> = Vec::new();
        for _ in 0..MAX_PLANS {
            let planned = problem.within(limit);
            if seen.contains(&planned.choice) {
                break;
            }
            seen.push(planned.choice.clone());
            let new = (self.trial)(&planned.choice)?;
            let over = new.peak_bytes as i64 - budget;
            let is_news = estimates == Estimates::FromPlans
                && problem.learn(self.expanded, &new.plan.graph, &new.copies);
            if is_news {
                (fits, too_much, factor) = (None, None, 1);
            } else if over <= 0 {
                fits = fits.max(Some(limit));
            } else {
                too_much = Some(too_much.map_or(limit, |t| t.min(limit)));
            }
            let estimate = problem.peak_bytes(&planned.choice);
            self.take(new, planned);
            let is_close = |too_much: i64| too_much - limit < budget / CLOSE_PARTS;
            let is_full = over <= 0 && (-over as f64) < GOOD_ENOUGH * budget as f64;
            if is_full && too_much.is_none_or(is_close) {
                break;
            }
            limit = match (fits, too_much) {
                (Some(fits), Some(too_much)) => fits + (too_much - fits) / 2,
                _ => estimate - over * factor,
            };
            factor *= 2;
        }
        Ok(())
    }

    /// Tries the same limits for every budget, so that the least memory that an error names is found again.
    fn scan(&mut self, problem: &RecomputeProblem) -> Result<(), CompileError> {
        let most = problem.peak_bytes(&problem.pinned());
        for step in (0..SCANNED_PLANS).rev() {
            let planned = problem.within(most * step / SCANNED_PLANS);
            let new = (self.trial)(&planned.choice)?;
            self.least_bytes = self.least_bytes.min(new.peak_bytes);
            self.take(new, planned);
            if self.best.is_some() {
                break;
            }
        }
        Ok(())
    }

    fn take(&mut self, trial: Trial, planned: PlannedRecomputation) {
        let is_cheaper = |b: &(Trial, PlannedRecomputation)| planned.cost.us < b.1.cost.us;
        if trial.peak_bytes <= self.budget_bytes && self.best.as_ref().is_none_or(is_cheaper) {
            self.best = Some((trial, planned));
        }
    }
}

/// A choice with its plan.
struct Trial {
    plan: Plan,
    peak_bytes: usize,
    copies: Copies,
}

impl Trial {
    fn new(
        expanded: &Expanded,
        (options, limit): (&PlanOptions, &Limit),
        problem: &RecomputeProblem,
        chosen: Chosen,
    ) -> Result<Trial, CompileError> {
        let Chosen {
            mut plan,
            choice,
            copies,
        } = chosen;
        for (place, take) in problem.recipe(expanded, &choice) {
            plan.recipe.tell(place, take);
        }
        Ok(Trial {
            peak_bytes: memory(&plan.graph, options.target, limit)?.peak_bytes(),
            plan,
            copies,
        })
    }
}
