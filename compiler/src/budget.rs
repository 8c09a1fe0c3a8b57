//! Memory budgets: what to keep for the backward pass and what to compute again, so that a step's planned memory
//! stays under a limit.
//!
//! Which values those are is [`RecomputeProblem::within`]'s choice under a limit of estimated memory. Here the
//! choice is held against the memory plan of the whole fused step, and taken again with the difference between
//! plan and estimate until the plan fits. Nothing is run.

use crate::error::CompileError;
use crate::plan::{Finish, Plan, PlanOptions};
use crate::report::Memory;
use fusion::{Choice, Fused, PlannedRecomputation, RecomputeProblem, Target};
use graph::Graph;
use kernels::features;
use kernels::lowering::lower;
use serde::Serialize;

/// Plans tried for one budget.
const MAX_PLANS: usize = 6;
/// Plans tried from the largest memory to the smallest where none of those is small enough.
const SCANNED_PLANS: i64 = 12;
/// A plan that leaves less than this part of the budget unused is not improved.
const GOOD_ENOUGH: f64 = 0.02;

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
    /// Microseconds that every choice which keeps as few bytes adds at least.
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
    expanded: &Fused,
    finish: &Finish<'_>,
    options: &PlanOptions,
    limit: &Limit,
) -> Result<Plan, CompileError> {
    let problem = RecomputeProblem::new(expanded, &options.recipe, &options.speed());
    let pinned = problem.pinned();
    let trial = |choice: &Choice| Trial::new(expanded, finish, (options, limit), &problem, choice);
    let first = trial(&pinned)?;
    let default_bytes = first.peak_bytes;
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
    if default_bytes <= budget_bytes || first.plan.step.gradient_inputs.is_empty() {
        return Ok(kept(first, 0.0, 0.0));
    }
    let bound = |us: f64, choice: &Choice| {
        let kept_bytes = problem.cost(choice).kept_bytes;
        problem.solve(kept_bytes).map_or(us, |s| s.bound_us.min(us))
    };
    // How much more a plan takes than was estimated before fusion.
    let mut offset = default_bytes as i64 - problem.peak_bytes(&pinned);
    let mut best: Option<(Trial, PlannedRecomputation)> = None;
    let mut seen: Vec<Choice> = Vec::new();
    for _ in 0..MAX_PLANS {
        let planned = problem.within(budget_bytes as i64 - offset);
        if seen.contains(&planned.choice) {
            break;
        }
        seen.push(planned.choice.clone());
        let new = trial(&planned.choice)?;
        offset = new.peak_bytes as i64 - planned.peak_bytes;
        let spare = budget_bytes as f64 - new.peak_bytes as f64;
        if spare < 0.0 {
            continue;
        }
        if best.as_ref().is_none_or(|b| planned.cost.us < b.1.cost.us) {
            best = Some((new, planned));
        }
        if spare < GOOD_ENOUGH * budget_bytes as f64 {
            break;
        }
    }
    if best.is_none() {
        // The same limits for every budget: the least memory that an error names is found again.
        let most = problem.peak_bytes(&pinned);
        let mut least_bytes = default_bytes;
        for step in (0..SCANNED_PLANS).rev() {
            let planned = problem.within(most * step / SCANNED_PLANS);
            let new = trial(&planned.choice)?;
            least_bytes = least_bytes.min(new.peak_bytes);
            if new.peak_bytes <= budget_bytes {
                best = Some((new, planned));
                break;
            }
        }
        if best.is_none() {
            return Err(CompileError::Budget {
                budget_bytes,
                default_bytes,
                least_bytes,
            });
        }
    }
    let Some((trial, planned)) = best else {
        return Ok(kept(first, 0.0, 0.0));
    };
    let us = planned.cost.us;
    Ok(kept(trial, us, bound(us, &planned.choice)))
}

/// A choice with its plan.
struct Trial {
    plan: Plan,
    peak_bytes: usize,
}

impl Trial {
    fn new(
        expanded: &Fused,
        finish: &Finish<'_>,
        (options, limit): (&PlanOptions, &Limit),
        problem: &RecomputeProblem,
        choice: &Choice,
    ) -> Result<Trial, CompileError> {
        let chosen = problem.apply(expanded.clone(), choice);
        let mut plan = finish.plan(chosen)?;
        for (place, take) in problem.recipe(expanded, choice) {
            plan.recipe.tell(place, take);
        }
        Ok(Trial {
            peak_bytes: memory(&plan.graph, options.target, limit)?.peak_bytes(),
            plan,
        })
    }
}
