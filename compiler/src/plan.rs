//! The part of the straight line that works on graphs: simplify, differentiate, bind, expand, lay out,
//! fuse.
//!
//! Each pass takes the type of the stage before, so a wrong order does not compile. What each pass makes is verified.
//! Nothing here emits or runs code.

use crate::attention_loops;
use crate::boundary;
use crate::budget::{self, KeptBudget, Limit};
use crate::error::{CompileError, check};
use crate::recipe::{Unmet, unmet};
use crate::usual::{self, Chosen};
use autodiff::Request;
use fusion::{Applied, Bound, Decision, Expanded, Fused, RecomputeProblem, Refusal, Speed, Target};
use graph::{Bindings, ContainerId, Graph, Machine, Place, Recipe, SymExpr};
use layouts::Assignment;
use serde::Serialize;

/// A training or inference step before sizes are known.
#[derive(Clone, Debug)]
pub struct Step {
    /// Forward nodes, and backward nodes if gradients were asked for.
    graph: Graph,
    /// How many of the graph's inputs the model has; seeds of gradients follow.
    pub n_inputs: usize,
    /// How many of the graph's outputs the model has; gradients follow.
    pub n_outputs: usize,
    /// Positions among the outputs whose gradient is an input, in the order of those inputs.
    pub seeded_outputs: Vec<usize>,
    /// Positions among the inputs that have a gradient, in the order of those outputs.
    pub gradient_inputs: Vec<usize>,
}

impl Step {
    /// Builds the step for a CPU: the forward pass and, if `wrt` names positions of inputs, their gradients. Large
    /// attention becomes a kernel that stores no scores. `hints` are the expected values of symbolic sizes. `widens`:
    /// whether attention in bf16 does too, computed in single precision; for CPUs without instructions that multiply
    /// bf16 numbers faster.
    ///
    /// # Errors
    /// As for [`Step::forward`] and [`Step::training`].
    pub fn on_cpu(
        graph: &Graph,
        hints: &Bindings,
        wrt: &[usize],
        widens: bool,
    ) -> Result<Step, CompileError> {
        check("import", graph)?;
        let mut own = graph.clone();
        attention_loops::replace(&mut own, hints, wrt, widens)?;
        match wrt {
            [] => Step::forward(&own),
            _ => Step::training(&own, wrt),
        }
    }

    /// The model as it is, without gradients.
    ///
    /// # Errors
    /// A result of a type that cannot be copied.
    pub fn forward(graph: &Graph) -> Result<Step, CompileError> {
        check("import", graph)?;
        let mut own = graph.clone();
        graph::simplify(&mut own, &ops::Meaning);
        check("simplify", &own)?;
        boundary::separate(&mut own, graph.outputs.len())?;
        check("separate", &own)?;
        Ok(Step {
            n_inputs: graph.inputs.len(),
            n_outputs: graph.outputs.len(),
            graph: own,
            seeded_outputs: Vec::new(),
            gradient_inputs: Vec::new(),
        })
    }

    /// The model with the gradients of its floating-point results with respect to the inputs at
    /// positions `wrt`. Inputs that influence no result get none.
    ///
    /// # Errors
    /// An operator without a derivative, or control flow.
    pub fn training(graph: &Graph, wrt: &[usize]) -> Result<Step, CompileError> {
        check("import", graph)?;
        let graph = &mut graph.clone();
        graph::simplify_before_gradients(graph, &ops::Meaning);
        check("simplify", graph)?;
        let wrt_ids: Vec<ContainerId> = wrt.iter().map(|i| graph.inputs[*i]).collect();
        let active = autodiff::active(graph, &wrt_ids);
        let seeded: Vec<usize> = (0..graph.outputs.len())
            .filter(|i| {
                let output = &graph.outputs[*i];
                let unique = graph.outputs[..*i]
                    .iter()
                    .all(|o| o.container != output.container);
                output.updates.is_none() && unique && active.contains(&output.container)
            })
            .collect();
        let request = Request {
            of: seeded.iter().map(|i| graph.outputs[*i].container).collect(),
            wrt: wrt_ids,
        };
        let mut step = autodiff::differentiate(graph, &request)?;
        check("differentiate", &step.graph)?;
        graph::simplify(&mut step.graph, &ops::Meaning);
        check("simplify gradients", &step.graph)?;
        boundary::separate(&mut step.graph, graph.outputs.len())?;
        check("separate", &step.graph)?;
        let with_gradient = wrt.iter().zip(&step.gradients);
        Ok(Step {
            n_inputs: graph.inputs.len(),
            n_outputs: graph.outputs.len(),
            gradient_inputs: with_gradient
                .filter_map(|(i, g)| g.is_some().then_some(*i))
                .collect(),
            seeded_outputs: seeded,
            graph: step.graph,
        })
    }

    /// The graph. Its symbols still need values.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Fixes the sizes and decides fusion and layout for a CPU.
    ///
    /// # Errors
    /// A size without a value, control flow, an operator that refuses these sizes.
    pub fn plan(&self, bindings: &Bindings) -> Result<Plan, CompileError> {
        self.plan_for(bindings, Target::Cpu)
    }

    /// Like [`Step::plan`], for a given target.
    ///
    /// # Errors
    /// As for [`Step::plan`].
    pub fn plan_for(&self, bindings: &Bindings, target: Target) -> Result<Plan, CompileError> {
        self.plan_with(bindings, &PlanOptions::for_target(target))
    }

    /// The expanded step before fusion, and the orders of dimensions that the rule and the recipe give it. Computes
    /// nothing again but what the recipe asks for.
    ///
    /// # Errors
    /// As for [`Step::plan`].
    pub(crate) fn laid_out(
        &self,
        bindings: &Bindings,
        options: &PlanOptions,
    ) -> Result<(Graph, Assignment), CompileError> {
        let recipe = &options.recipe;
        let expanded = expand(self.graph.bind(bindings), recipe, options.target)?;
        let problem = RecomputeProblem::new(&expanded, recipe, &options.speed());
        let pinned = problem.pinned();
        let (expanded, _) = problem.apply(expanded, &pinned);
        let (laid_out, assignment) = expanded.lay_out(|graph| layouts::assign(graph, recipe));
        check("lay out", &laid_out.graph)?;
        Ok((laid_out.graph, assignment))
    }

    /// Like [`Step::plan`], for a given target and with a recipe.
    ///
    /// # Errors
    /// As for [`Step::plan`]. What the recipe says and cannot be done is no error: see [`Plan::unmet`].
    pub fn plan_with(
        &self,
        bindings: &Bindings,
        options: &PlanOptions,
    ) -> Result<Plan, CompileError> {
        let recipe = &options.recipe;
        let bound = self.graph.bind(bindings);
        let expanded = expand(bound.clone(), recipe, options.target)?;
        let finish = Finish {
            step: self,
            bound: &bound,
            options,
        };
        if let Some(limit) = &options.limit {
            return budget::fit(&expanded, &finish, options, limit);
        }
        let problem = RecomputeProblem::new(&expanded, recipe, &options.speed());
        if let Some(known) = &options.recomputation {
            let mut decided = recipe.clone();
            for (place, take) in known {
                if decided.override_for(|| place.clone()).is_none() {
                    decided.tell(place.clone(), *take);
                }
            }
            let choice = RecomputeProblem::new(&expanded, &decided, &options.speed()).pinned();
            let chosen = Chosen::new(&expanded, &finish, &problem, choice)?;
            return Ok(Plan {
                recomputation: known.clone(),
                ..chosen.plan
            });
        }
        let chosen = usual::choose(&expanded, &finish, options, &problem)?;
        Ok(Plan {
            recomputation: problem.recipe(&expanded, &chosen.choice),
            ..chosen.plan
        })
    }
}

/// Expands a step whose sizes are fixed. On a CPU, recurrences stay loops over time.
fn expand(mut bound: Graph, recipe: &Recipe, target: Target) -> Result<Expanded, CompileError> {
    check("bind", &bound)?;
    check_sizes(&bound)?;
    if target == Target::Cpu {
        ops::keep_loops(&mut bound);
    }
    let expanded = fusion::expand(&Bound::new(bound)?, recipe)?;
    check("expand", &expanded.graph)?;
    Ok(expanded)
}

/// The passes after expansion and after the choice of what to compute again.
pub(crate) struct Finish<'a> {
    step: &'a Step,
    bound: &'a Graph,
    options: &'a PlanOptions,
}

impl Finish<'_> {
    /// Lays out and fuses an expanded step.
    pub(crate) fn plan(&self, expanded: Expanded) -> Result<Plan, CompileError> {
        let PlanOptions { target, recipe, .. } = self.options;
        check("recompute", &expanded.graph)?;
        let (mut laid_out, assignment) = expanded.lay_out(|graph| layouts::assign(graph, recipe));
        check("lay out", &laid_out.graph)?;
        let layouts = layout_decisions(&laid_out.graph, &assignment);
        laid_out.decisions.extend(layouts);
        let Fused { graph, decisions } = fusion::fuse(laid_out, *target, recipe)?;
        check("fuse", &graph)?;
        Ok(Plan {
            step: self.step.clone(),
            bound: self.bound.clone(),
            graph,
            unmet: unmet(recipe, &decisions),
            recipe: recipe.clone(),
            recomputation: Vec::new(),
            notes: Vec::new(),
            machine: self.options.machine,
            budget: None,
            one_thread: None,
            decisions,
        })
    }
}

/// Values to compute again (`true`) and values to keep (`false`), as a recipe says it.
pub type Recomputation = Vec<(Place, bool)>;

/// How a step is planned.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanOptions {
    /// What runs the kernels.
    pub target: Target,
    /// Decisions to take otherwise than the compiler would.
    pub recipe: Recipe,
    /// The machine, where it was measured.
    pub machine: Option<Machine>,
    /// Threads on which the step will run.
    pub threads: usize,
    /// How much memory intermediate results may take.
    pub limit: Option<Limit>,
    /// Without a limit: what to compute again, where another size of the step has decided that.
    pub recomputation: Option<Recomputation>,
}

impl PlanOptions {
    /// The compiler's own decisions, for a target.
    pub fn for_target(target: Target) -> PlanOptions {
        PlanOptions {
            target,
            ..PlanOptions::default()
        }
    }

    /// What its threads do together in a microsecond.
    pub(crate) fn speed(&self) -> Speed {
        Speed::new(&self.machine.unwrap_or_default(), self.threads)
    }
}

/// The orders of dimensions that were chosen, and those that the recipe forbade.
fn layout_decisions(graph: &Graph, assignment: &Assignment) -> Vec<Decision> {
    let state = graph.single_state();
    let nodes = || state.into_iter().flat_map(|s| &s.nodes);
    let mut decisions = Vec::new();
    let rule = assignment.channels_last.iter().chain(&assignment.reordered);
    let chosen = rule.chain(&assignment.requested).map(|id| (*id, None));
    let forbidden = assignment.forbidden.iter();
    let forbidden = forbidden.map(|id| (*id, Some(Refusal::RowMajor)));
    let fixed = assignment.fixed.iter();
    let fixed = fixed.map(|id| (*id, Some(Refusal::OrderFixed)));
    for (id, refusal) in chosen.chain(forbidden).chain(fixed) {
        let writer = nodes().find(|n| n.writes().contains(&id));
        let (Some(writer), Some(place)) = (writer, layouts::place(graph, id)) else {
            continue;
        };
        decisions.push(match refusal {
            None => {
                let order = graph.container(id).layout.order().to_vec();
                Decision::applied(place, &writer.origin, Applied::LaidOut { order }, 0)
            }
            Some(refusal) => Decision::refused(place, &writer.origin, refusal, 0),
        });
    }
    decisions
}

/// Most bytes of one container. With it, no sum or product of sizes overflows later.
const MOST_BYTES: i64 = 1 << 40;

/// Refuses containers that fit no machine's memory, or have a negative size.
fn check_sizes(graph: &Graph) -> Result<(), CompileError> {
    for container in &graph.containers {
        let sizes = container.shape.iter().filter_map(SymExpr::as_const);
        let shown = || {
            let shape: Vec<String> = container.shape.iter().map(ToString::to_string).collect();
            (container.name.clone(), shape.join(", "))
        };
        if sizes.clone().any(|n| n < 0) {
            let (container, shape) = shown();
            return Err(CompileError::Negative { container, shape });
        }
        let bytes = sizes
            .filter(|n| *n > 0)
            .try_fold(container.dtype.bytes() as i64, i64::checked_mul);
        if bytes.is_none_or(|n| n > MOST_BYTES) {
            let (container, shape) = shown();
            return Err(CompileError::TooLarge { container, shape });
        }
    }
    Ok(())
}

/// The decision to run a step on one thread: threads would save less than they wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OneThread {
    /// Threads that there are.
    pub n_threads: usize,
    /// Microseconds of work that they are predicted to save.
    pub saved_us: f64,
    /// Microseconds that they are predicted to wait for each other after the launches.
    pub waited_us: f64,
}

/// A step with every decision taken, ready to be lowered.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What it is a plan of.
    pub step: Step,
    /// The step with its sizes fixed: shapes of inputs and outputs as the caller sees them.
    pub bound: Graph,
    /// Kernels in execution order.
    pub graph: Graph,
    /// What was decided, in the order in which it was.
    pub decisions: Vec<Decision>,
    /// What it was told to decide otherwise, and what its memory budget decided.
    pub recipe: Recipe,
    /// What a recipe must say so that the same values are computed again, where no budget was given.
    pub recomputation: Recomputation,
    /// How its memory budget was kept, if it has one.
    pub budget: Option<KeptBudget>,
    /// The machine it is for, where it was measured.
    pub machine: Option<Machine>,
    /// Why its kernels run on one thread, if they do so although there are more.
    pub one_thread: Option<OneThread>,
    /// What the recipe says and could not be done.
    pub unmet: Vec<Unmet>,
    /// What the caller should know about the recipe, in sentences.
    pub notes: Vec<String>,
}
