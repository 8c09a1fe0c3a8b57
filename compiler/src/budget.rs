//! Memory budgets: what to keep for the backward pass and what to compute again, so that a step's planned memory
//! stays under a limit.
//!
//! Which values those are is [`RecomputeProblem`]'s choice under a limit of kept bytes. Here the choice is held
//! against the memory plan of the whole step, whose arenas depend on it, and taken again with another limit until
//! the plan fits. Nothing is run.

use crate::error::CompileError;
use crate::plan::{Finish, Plan, PlanOptions};
use crate::report::{Memory, bytes};
use fusion::{Choice, Copies, Fused, RecomputeProblem, Target};
use graph::{ContainerId, Graph, Lifetime, Node, Stage};
use kernels::features;
use kernels::lowering::lower;
use kernels::plan::touched;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

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

/// What the backward pass uses while its memory is fullest: values kept, and values that `copies` says are
/// computed again.
fn busy(graph: &Graph, copies: &Copies) -> BTreeSet<ContainerId> {
    let results: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    let nodes = graph.single_state().map_or(&[][..], |s| &s.nodes);
    let is_owned = |id: &ContainerId| {
        graph.container(*id).lifetime == Lifetime::Transient && !results.contains(id)
    };
    let is_forward = |n: &&Node| n.stage == Stage::Forward;
    let kept: BTreeSet<ContainerId> = nodes
        .iter()
        .filter(is_forward)
        .flat_map(Node::writes)
        .collect();
    // First and last kernel of the backward pass that uses each.
    let mut lives: BTreeMap<ContainerId, (usize, usize)> = BTreeMap::new();
    for (at, node) in nodes.iter().enumerate().filter(|(_, n)| !is_forward(n)) {
        for id in touched(graph, node).into_iter().filter(is_owned) {
            lives.entry(id).or_insert((at, at)).1 = at;
        }
    }
    let live = |at: usize| lives.iter().filter(move |(_, l)| l.0 <= at && at <= l.1);
    let arena = |at: usize| -> i64 {
        let own = live(at).map(|(id, _)| id).filter(|id| !kept.contains(id));
        bytes(graph, own)
    };
    let fullest = (0..nodes.len()).max_by_key(|at| (arena(*at), Reverse(*at)));
    let used = fullest.into_iter().flat_map(live).map(|(id, _)| *id);
    used.map(|id| copies.get(&id).copied().unwrap_or(id))
        .collect()
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
    let mut problem = RecomputeProblem::new(expanded, &options.recipe, &options.speed());
    let pinned = problem.pinned();
    let trial = |problem: &RecomputeProblem, choice: &Choice| {
        Trial::new(expanded, finish, (options, limit), problem, choice)
    };
    let first = trial(&problem, &pinned)?;
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
    let mut least_bytes = default_bytes;
    let mut best: Option<(Trial, f64, f64)> = None;
    // What was in use when a plan's memory was fullest, for each plan that was too large.
    let mut fullest = vec![first.busy];
    discount(&mut problem, &fullest);
    let mut over = default_bytes as i64 - budget_bytes as i64;
    let mut next = problem.cost(&pinned).kept_bytes - over;
    let mut enough: Option<i64> = None;
    for _ in 0..MAX_PLANS {
        let choice = match problem.solve(next) {
            Ok(solution) => Ok(solution),
            Err(infeasible) if enough.is_none() => Err(infeasible.least),
            Err(_) => break,
        };
        let chosen = choice.as_ref().map_or_else(|least| least, |s| &s.choice);
        let cost = problem.cost(chosen);
        let new = trial(&problem, chosen)?;
        least_bytes = least_bytes.min(new.peak_bytes);
        over = new.peak_bytes as i64 - budget_bytes as i64;
        if over <= 0 {
            enough = Some(next);
            let bound = choice.as_ref().map_or(0.0, |s| s.bound_us);
            if best.as_ref().is_none_or(|b| cost.us < b.1) {
                best = Some((new, cost.us, bound));
            }
            if (-over as f64) < GOOD_ENOUGH * budget_bytes as f64 {
                break;
            }
            next = cost.kept_bytes - over;
        } else {
            let is_new = !fullest.contains(&new.busy);
            if is_new {
                fullest.push(new.busy);
                discount(&mut problem, &fullest);
                enough = None;
                next = problem.cost(chosen).kept_bytes - over;
            } else {
                if choice.is_err() {
                    break;
                }
                next = enough.map_or(next.min(cost.kept_bytes) - over, |e| (e + next) / 2);
            }
        }
    }
    if best.is_none() {
        // Less kept is not always less memory: what is computed again lives on in the arena.
        let (most, least) = (
            problem.cost(&pinned).kept_bytes,
            problem.cost(&problem.least()).kept_bytes,
        );
        for step in 1..=SCANNED_PLANS {
            let limit = most - (most - least) * step / SCANNED_PLANS;
            let Ok(solution) = problem.solve(limit) else {
                break;
            };
            let new = trial(&problem, &solution.choice)?;
            least_bytes = least_bytes.min(new.peak_bytes);
            if new.peak_bytes <= budget_bytes {
                best = Some((new, solution.cost.us, solution.bound_us));
                break;
            }
        }
    }
    match best {
        Some((trial, us, bound)) => Ok(kept(trial, us, bound.min(us))),
        None => Err(CompileError::Budget {
            budget_bytes,
            default_bytes,
            least_bytes,
        }),
    }
}

/// Counts values less, the more often they are in use when memory is fullest.
fn discount(problem: &mut RecomputeProblem, fullest: &[BTreeSet<ContainerId>]) {
    problem.discount(|id| {
        let idle = fullest.iter().filter(|used| !used.contains(&id)).count();
        idle as f64 / fullest.len() as f64
    });
}

/// A choice with its plan.
struct Trial {
    plan: Plan,
    peak_bytes: usize,
    busy: BTreeSet<ContainerId>,
}

impl Trial {
    fn new(
        expanded: &Fused,
        finish: &Finish<'_>,
        (options, limit): (&PlanOptions, &Limit),
        problem: &RecomputeProblem,
        choice: &Choice,
    ) -> Result<Trial, CompileError> {
        let (chosen, copies) = problem.apply(expanded.clone(), choice);
        let mut plan = finish.plan(chosen)?;
        for (place, take) in problem.recipe(expanded, choice) {
            plan.recipe.tell(place, take);
        }
        Ok(Trial {
            peak_bytes: memory(&plan.graph, options.target, limit)?.peak_bytes(),
            busy: busy(&plan.graph, &copies),
            plan,
        })
    }
}
