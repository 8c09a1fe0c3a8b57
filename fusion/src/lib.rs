//! Fusion: operators become maps, maps are composed and grouped so that less data moves.
//!
//! [`expand`] rewrites operators as maps, merges containers across reshapes and inlines what is
//! cheaper to compute again than to store. [`fuse`] groups the resulting units into kernels, for
//! forward and backward together. If the target has such kernels, products whose results only one kernel needs become
//! parts of that kernel. What another library's operator computes stays whole, on views of containers. Both functions
//! need constant sizes. Between them the layouts room decides the order of dimensions, since what may share a loop
//! depends on what is contiguous. What was applied is recorded with the bytes it saves, what was refused with the
//! reason. Papers: arXiv 1902.10345 (map fusion), 2007.00072 (fusion by data movement).

mod call;
mod chain;
mod decision;
mod empty;
mod equal_terms;
mod group;
mod inline;
mod join;
mod parts;
mod recompute;
mod row_values;
mod stages;
mod traffic;
mod unit;
mod view;
mod write_once;

pub use call::Obstacle as CallObstacle;
pub use chain::Obstacle as ChainObstacle;
pub use decision::{Applied, Decision, Outcome, Refusal};
pub use group::Obstacle as GroupObstacle;
pub use group::PrologueObstacle;
pub use inline::Obstacle as InlineObstacle;
pub use join::Obstacle as JoinObstacle;
pub use recompute::{
    Choice, Copies, Cost, Infeasible, Obstacle as RecomputeObstacle,
    Planned as PlannedRecomputation, Problem as RecomputeProblem, Solution, Speed,
};
pub use stages::{Bound, Expanded, Fused, LaidOut};
pub use traffic::lower_bound;

use graph::{Graph, Node, Recipe};

/// Why a graph cannot be fused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FuseError {
    /// Loops and branches are not fused yet.
    #[error("`{graph}` has loops or branches, which are not compiled yet; unroll them first")]
    ControlFlow {
        /// The graph.
        graph: String,
    },
    /// A size has no value.
    #[error("size `{size}` of `{container}` has no value; bind it before fusing")]
    Unbound {
        /// The container.
        container: String,
        /// The size.
        size: String,
    },
    /// Kernels that need each other: a defect of Shorthaul.
    #[error("internal error: kernels need each other's results: {kernels}; please report it")]
    Circle {
        /// Origins of the kernels.
        kernels: String,
    },
    /// An operator has no expansion.
    #[error(transparent)]
    Op(#[from] ops::OpError),
}

/// Rewrites operators as maps, merges reshapes and inlines definitions. Follows the recipe where it says something.
///
/// # Errors
/// Control flow, operators without expansion.
pub fn expand(bound: &Bound, recipe: &Recipe) -> Result<Expanded, FuseError> {
    let mut graph = bound.graph().clone();
    // Which input a result replaces concerns only the caller; it holds for the shapes before dimensions are split.
    graph.outputs.iter_mut().for_each(|o| o.updates = None);
    call::separate(&mut graph);
    ops::expand_all(&mut graph)?;
    let mut decisions = Vec::new();
    let mut nodes = take_nodes(&mut graph)?;
    empty::drop_empty(&graph, &mut nodes);
    view::drop_unit_params(&mut nodes);
    for node in &mut nodes {
        node.visit_tasklets_mut(&mut |t| inline::simplify_expressions(&graph, t));
    }
    inline::inline_movement(&graph, &mut nodes);
    view::merge_views(&mut graph, &mut nodes);
    view::split_composite_dims(&mut graph, &mut nodes);
    view::drop_unit_params(&mut nodes);
    // Copies between reshapes, such as heads of keys repeated for heads of queries, are inlined before what they copy
    // is computed in their place.
    inline::inline_movement(&graph, &mut nodes);
    equal_terms::multiply_equal_terms(&graph, &mut nodes);
    write_once::drop_idle_conflicts(&graph, &mut nodes);
    call::absorb(&graph, &mut nodes, recipe, &mut decisions);
    inline::inline(&graph, &mut nodes, recipe, &mut decisions);
    equal_terms::multiply_equal_terms(&graph, &mut nodes);
    write_once::drop_idle_conflicts(&graph, &mut nodes);
    if parts::separate(&graph, &mut nodes) {
        // Merges reshapes of the parts, which stood between a guarded read and what makes the parts.
        view::merge_views(&mut graph, &mut nodes);
    }
    graph.last_state().nodes = nodes;
    Ok(Expanded { graph, decisions })
}

/// What runs the kernels, as far as it decides which kernels there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// Threads on cores.
    #[default]
    Cpu,
    /// A GPU that multiplies tiles in registers: products may be chained.
    Cuda,
}

/// Groups units into kernels. Follows the recipe where it says something.
///
/// # Errors
/// Control flow; kernels that need each other.
pub fn fuse(laid_out: LaidOut, target: Target, recipe: &Recipe) -> Result<Fused, FuseError> {
    let LaidOut {
        mut graph,
        mut decisions,
    } = laid_out;
    let mut nodes = take_nodes(&mut graph)?;
    if target == Target::Cuda {
        nodes = chain::chain(&mut graph, nodes, recipe, &mut decisions);
    }
    let mut kernels = group::group(&mut graph, nodes, target, recipe, &mut decisions)?;
    if target == Target::Cpu {
        kernels = join::join(&mut graph, kernels, recipe, &mut decisions);
        row_values::keep(&mut graph, &mut kernels);
    }
    graph.last_state().nodes = kernels;
    Ok(Fused { graph, decisions })
}

fn take_nodes(graph: &mut Graph) -> Result<Vec<Node>, FuseError> {
    let name = graph.name.clone();
    match graph.single_state_mut() {
        Some(state) => Ok(std::mem::take(&mut state.nodes)),
        None => Err(FuseError::ControlFlow { graph: name }),
    }
}

fn require_constant_sizes(graph: &Graph) -> Result<(), FuseError> {
    for c in &graph.containers {
        if let Some(size) = c.shape.iter().find(|s| s.as_const().is_none()) {
            return Err(FuseError::Unbound {
                container: c.name.clone(),
                size: size.to_string(),
            });
        }
    }
    Ok(())
}
