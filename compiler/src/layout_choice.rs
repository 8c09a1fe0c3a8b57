//! Orders of all containers of a step chosen together by predicted time.
//!
//! The problem and its solution are the room `layouts`'; here it gets the times of contractions, which the room
//! `kernels` predicts. Gives a recipe's entries and numbers; plans, compiles and runs nothing.

use crate::error::CompileError;
use crate::plan::{PlanOptions, Step};
use crate::predict::On;
use crate::report::planning_target;
use graph::{Bindings, Graph, Node, Place};
use kernels::contraction::{BlockingRequest, Contraction, ContractionTarget, Hooks, emit};
use kernels::recognize::recognize;
use layouts::Times;
use layouts::quadratic::USUAL_BRANCHES;
use serde::Serialize;
use std::collections::BTreeMap;

/// What orders of dimensions save.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayoutGain {
    /// Predicted microseconds of contractions and conversions with every container in row-major order.
    pub row_major_us: f64,
    /// The same time with the orders that the compiler gives by its rule.
    pub rule_us: f64,
    /// The same time with the orders that are chosen together.
    pub chosen_us: f64,
    /// What every choice of orders takes at least; `chosen_us` if the choice is the best.
    pub bound_us: f64,
    /// Containers with a choice.
    pub n_containers: usize,
    /// Contractions with a choice.
    pub n_contractions: usize,
    /// Containers that would get another order than the rule's.
    pub n_changed: usize,
}

/// Orders that are predicted to be faster together than the rule's.
pub(crate) struct ChosenLayouts {
    /// What they save.
    pub(crate) gain: LayoutGain,
    /// The order of each container that would get another one than by the rule.
    pub(crate) orders: BTreeMap<Place, Vec<usize>>,
}

/// Chooses orders for the containers of a step under a recipe.
///
/// # Errors
/// As for [`Step::plan`].
pub(crate) fn chosen_layouts(
    step: &Step,
    sizes: &Bindings,
    options: &PlanOptions,
) -> Result<ChosenLayouts, CompileError> {
    let (graph, assignment) = step.laid_out(sizes, options)?;
    let machine = options.machine.unwrap_or_default();
    let mut times = PredictedTimes {
        on: On {
            machine,
            threads: options.threads,
        },
        target: ContractionTarget {
            vector_width: planning_target()?.vector_width_f32 as i64,
            threads: options.threads.max(1) as i64,
            machine,
            known: Vec::new(),
            requested: BlockingRequest::default(),
        },
        known: BTreeMap::new(),
    };
    let choice = layouts::choose(&graph, &assignment, &mut times, USUAL_BRANCHES);
    let us = |ns: f64| ns / 1e3;
    let place = |id| layouts::place(&graph, id);
    let changed = choice.changed.iter();
    Ok(ChosenLayouts {
        gain: LayoutGain {
            row_major_us: us(choice.row_major_ns),
            rule_us: us(choice.rule_ns),
            chosen_us: us(choice.chosen_ns),
            bound_us: us(choice.bound_ns),
            n_containers: choice.n_containers,
            n_contractions: choice.n_contractions,
            n_changed: choice.changed.len(),
        },
        orders: changed
            .filter_map(|(id, order)| Some((place(*id)?, order.clone())))
            .collect(),
    })
}

/// Times by the cost model of contractions and the machine's memory.
struct PredictedTimes {
    on: On,
    target: ContractionTarget,
    /// The time of each contraction, by its sizes and strides.
    known: BTreeMap<String, f64>,
}

impl Times for PredictedTimes {
    fn contraction_ns(&mut self, graph: &Graph, node: &Node) -> Option<f64> {
        let found = recognize(graph, node)?;
        let key = format!("{:?}", found.contraction);
        if let Some(ns) = self.known.get(&key) {
            return Some(*ns);
        }
        let ns = self.emitted_ns(&found.contraction)?;
        self.known.insert(key, ns);
        Some(ns)
    }

    fn moved_ns(&self, bytes: i64) -> f64 {
        bytes as f64 / self.on.machine.memory.rate(self.on.threads) * 1e3
    }
}

impl PredictedTimes {
    fn emitted_ns(&self, contraction: &Contraction) -> Option<f64> {
        let emitted = emit("predicted", contraction, &Hooks::default(), &self.target);
        Some(emitted.ok()?.predicted_ns as f64)
    }
}
