//! What a step computes again without a memory budget.
//!
//! Which values those are is [`RecomputeProblem::by_default`]'s choice. Before fusion nobody knows which values the
//! readers compute themselves, so a plan without recomputation comes first, and the choice learns from it. A plan with
//! the choice is taken if it keeps less and moves little more than before. Nothing is run.

use crate::error::CompileError;
use crate::plan::{Finish, Plan, PlanOptions};
use crate::report::bytes;
use fusion::{Choice, Copies, Expanded, RecomputeProblem, Target};
use graph::{ContainerId, Graph, Lifetime, Node, Stage, Storage};
use std::collections::BTreeSet;

/// Plans with recomputation that are compared: the second one knows what fusion made of the copies of the first.
const MAX_PLANS: usize = 2;
/// Most bytes that the kernels may move more for each byte that is not kept any more. One element-wise kernel for
/// each freed value moves two; what is above that comes from fusion that copies prevent.
const MAX_MOVED_PER_FREED: i64 = 3;
/// The least part of the kept bytes that must become free.
const MIN_FREED_PART: f64 = 0.02;

/// A choice with its plan.
pub(crate) struct Chosen {
    pub plan: Plan,
    pub choice: Choice,
    pub copies: Copies,
}

impl Chosen {
    /// Applies a choice and finishes the plan.
    ///
    /// # Errors
    /// As for [`crate::Step::plan`].
    pub fn new(
        expanded: &Expanded,
        finish: &Finish<'_>,
        problem: &RecomputeProblem,
        choice: Choice,
    ) -> Result<Chosen, CompileError> {
        let (with_choice, copies) = problem.apply(expanded.clone(), &choice);
        let plan = finish.plan(with_choice)?;
        Ok(Chosen {
            plan,
            choice,
            copies,
        })
    }
}

/// The plan of a step for which no memory budget is given. For a GPU, only what the recipe asks for is computed
/// again: the gain has not been measured there.
///
/// # Errors
/// As for [`crate::Step::plan`].
pub(crate) fn choose(
    expanded: &Expanded,
    finish: &Finish<'_>,
    options: &PlanOptions,
    problem: &RecomputeProblem,
) -> Result<Chosen, CompileError> {
    let first = Chosen::new(expanded, finish, problem, problem.pinned())?;
    if options.target != Target::Cpu {
        return Ok(first);
    }
    let before = Traffic::new(&first.plan.graph);
    let mut plans = vec![first];
    let mut learned = problem.clone();
    for _ in 0..MAX_PLANS {
        let last = plans.last().unwrap_or_else(|| unreachable!("one is there"));
        learned.learn(expanded, &last.plan.graph, &last.copies);
        let choice = learned.by_default();
        if plans.iter().any(|p| p.choice == choice) {
            break;
        }
        plans.push(Chosen::new(expanded, finish, problem, choice)?);
    }
    // The first of the plans that keep the least. A plan that is not worth it counts as keeping as much as the first.
    let kept = |plan: &Chosen| {
        let traffic = Traffic::new(&plan.plan.graph);
        match traffic.is_worth(&before) {
            true => traffic.kept,
            false => before.kept,
        }
    };
    let best = plans.into_iter().min_by_key(kept);
    Ok(best.unwrap_or_else(|| unreachable!("one is there")))
}

/// What the kernels of a plan move, and what is kept from the forward to the backward pass, in bytes.
struct Traffic {
    moved: i64,
    kept: i64,
}

impl Traffic {
    fn new(graph: &Graph) -> Traffic {
        let nodes = graph.single_state().map_or(&[][..], |s| &s.nodes);
        let touched = |node: &Node| {
            let all = node.reads().into_iter().chain(node.writes());
            let all = all.filter(|id| graph.container(*id).storage != Storage::Local);
            all.collect::<BTreeSet<ContainerId>>()
        };
        let is_forward = |n: &&Node| n.stage == Stage::Forward;
        let of_forward: BTreeSet<ContainerId> =
            nodes.iter().filter(is_forward).flat_map(touched).collect();
        let later = nodes.iter().filter(|n| !is_forward(n));
        let of_later: BTreeSet<ContainerId> = later.flat_map(touched).collect();
        let outputs: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
        let is_kept = |id: &&ContainerId| {
            graph.container(**id).lifetime == Lifetime::Transient && !outputs.contains(id)
        };
        Traffic {
            moved: nodes.iter().map(|n| bytes(graph, &touched(n))).sum(),
            kept: bytes(graph, of_forward.intersection(&of_later).filter(is_kept)),
        }
    }

    /// Whether it frees enough bytes, compared with how many more it moves.
    fn is_worth(&self, before: &Traffic) -> bool {
        let freed = before.kept - self.kept;
        freed as f64 > MIN_FREED_PART * before.kept as f64
            && self.moved - before.moved <= MAX_MOVED_PER_FREED * freed
    }
}
