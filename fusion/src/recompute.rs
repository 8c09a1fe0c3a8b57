//! Recomputation: values of the forward pass are computed again in the backward pass, instead of kept.
//!
//! Before: `forward { t = f(x); y = g(t) }; backward { dw = h(t, dy) }`, with `t` kept.
//! After: `forward { t = f(x); y = g(t) }; backward { t' = f(x); dw = h(t', dy) }`, with `x` kept or itself
//! computed again.
//! Legal because every transient container is written once, by values that do not change afterwards, and random
//! numbers are functions of seed and position. Frees the bytes of `t` between the passes, and costs the unit's
//! time again. [`Problem`] is the choice of the values to keep: `solve` answers it under a limit of kept bytes,
//! `within` under a limit of memory at every moment, and `by_default` without a limit.

mod apply;
mod default;
mod obstacle;
mod solve;
mod timeline;

pub use obstacle::Obstacle;
pub use solve::{Infeasible, Solution};
pub use timeline::Planned;

use crate::Expanded;
use crate::decision::{Applied, Decision, Refusal};
use crate::unit::{bytes, is_contraction, points, unit};
use graph::{
    ContainerId, Graph, Lifetime, Machine, Node, NodeKind, Place, Recipe, Rewrite, Stage, Storage,
};
use std::collections::{BTreeMap, BTreeSet};
use timeline::BackwardNode;

/// How much the machine does in a microsecond.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Bytes moved.
    pub bytes_per_us: f64,
    /// Operations of products.
    pub product_operations_per_us: f64,
    /// Operations of plain loops.
    pub loop_operations_per_us: f64,
}

impl Speed {
    /// The speed of `threads` threads of a machine.
    pub fn new(machine: &Machine, threads: usize) -> Speed {
        let n = threads.max(1) as f64;
        Speed {
            bytes_per_us: machine.memory.rate(threads),
            product_operations_per_us: machine.product_operations_per_us as f64 * n,
            loop_operations_per_us: machine.loop_operations_per_us as f64 * n,
        }
    }

    /// Microseconds of a kernel: the time to move its bytes or to compute, whichever is longer.
    pub fn us(&self, bytes: i64, operations: i64, is_product: bool) -> f64 {
        let rate = match is_product {
            true => self.product_operations_per_us,
            false => self.loop_operations_per_us,
        };
        (bytes as f64 / self.bytes_per_us).max(operations as f64 / rate)
    }
}

/// One thread with short vectors.
impl Default for Speed {
    fn default() -> Speed {
        Speed::new(&Machine::default(), 1)
    }
}

/// A unit of the forward pass.
#[derive(Clone, Debug)]
struct Unit {
    /// Position among the nodes.
    at: usize,
    /// Values it reads, by number.
    reads: Vec<usize>,
    /// What it would take to run it again.
    us: f64,
    bytes: i64,
    operations: i64,
    /// Whether it may run again at all.
    is_ours: bool,
}

/// A container that the forward pass writes.
#[derive(Clone, Debug)]
struct Value {
    id: ContainerId,
    unit: usize,
    /// Bytes that keeping it takes; 0 for a result of the step, which the caller owns.
    bytes: i64,
    /// The same for the fused step, as far as it is known; 0 if the readers compute the value themselves.
    kept_bytes: i64,
    /// Bytes that it takes from its kernel to its last reader if it is not kept.
    passing_bytes: i64,
    /// Whether the backward pass reads it.
    crosses: bool,
    /// Microseconds of storing it, if no kernel stores it for others.
    store_us: f64,
    /// What the recipe says: `true` is to compute it again.
    pinned: Option<bool>,
}

/// Which values of the forward pass to keep for the backward pass.
#[derive(Clone, Debug)]
pub struct Problem {
    units: Vec<Unit>,
    values: Vec<Value>,
    /// The nodes of the backward pass in order.
    backward: Vec<BackwardNode>,
    /// Microseconds of all nodes of the step.
    step_us: f64,
    /// Microseconds of moving a byte.
    byte_us: f64,
    /// Containers that were in memory in the plans so far.
    in_memory: BTreeSet<ContainerId>,
    /// Containers whose copies were in memory in the plans so far.
    copies_in_memory: BTreeSet<ContainerId>,
}

/// Which units the backward pass runs again. What these read is kept then, if it is not computed again too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Units that run again, by number.
    copied: BTreeSet<usize>,
}

/// Containers of the backward pass with those of the forward pass that they are copies of.
pub type Copies = BTreeMap<ContainerId, ContainerId>;

/// What a choice costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Bytes kept from the forward to the backward pass.
    pub kept_bytes: i64,
    /// Microseconds added.
    pub us: f64,
}

impl Problem {
    /// The choice that an expanded step leaves.
    pub fn new(expanded: &Expanded, recipe: &Recipe, speed: &Speed) -> Problem {
        let graph = &expanded.graph;
        let nodes = graph.single_state().map_or(&[][..], |s| &s.nodes);
        let is_forward = |n: &Node| n.stage == Stage::Forward;
        let read_later: BTreeSet<ContainerId> = nodes
            .iter()
            .filter(|n| !is_forward(n))
            .flat_map(Node::reads)
            .collect();
        let results: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
        let mut problem = Problem {
            units: Vec::new(),
            values: Vec::new(),
            backward: Vec::new(),
            step_us: nodes.iter().map(|n| unit_us(graph, n, speed)).sum(),
            byte_us: speed.us(1, 0, false),
            in_memory: BTreeSet::new(),
            copies_in_memory: BTreeSet::new(),
        };
        let mut numbers: BTreeMap<ContainerId, usize> = BTreeMap::new();
        for (at, node) in nodes.iter().enumerate().filter(|(_, n)| is_forward(n)) {
            let known = node.reads();
            let (moved, operations) = work(graph, node);
            let is_view = is_reshape(node);
            for id in node.writes() {
                if graph.container(id).lifetime != Lifetime::Transient {
                    continue;
                }
                let size = bytes(graph, id);
                let crosses = read_later.contains(&id);
                let place = || place(graph, node, id);
                numbers.insert(id, problem.values.len());
                problem.values.push(Value {
                    id,
                    unit: problem.units.len(),
                    bytes: if results.contains(&id) { 0 } else { size },
                    kept_bytes: if results.contains(&id) { 0 } else { size },
                    passing_bytes: if results.contains(&id) { 0 } else { size },
                    crosses,
                    store_us: match crosses || results.contains(&id) {
                        true => 0.0,
                        false => speed.us(2 * size, 0, false),
                    },
                    pinned: recipe.override_for(place),
                });
            }
            problem.units.push(Unit {
                at,
                reads: known
                    .iter()
                    .filter_map(|id| numbers.get(id).copied())
                    .collect(),
                us: unit_us(graph, node, speed),
                bytes: moved,
                operations,
                is_ours: is_view || matches!(node.kind, NodeKind::Map(_)),
            });
        }
        problem.backward = timeline::backward_nodes(graph, &numbers, |_| true);
        problem
    }

    /// Takes from a fused plan of the step which containers, and which copies, take memory. The others stay inside
    /// a kernel, or their readers compute them. Returns whether something was in memory that was not in any plan
    /// before.
    pub fn learn(&mut self, expanded: &Expanded, planned: &Graph, copies: &Copies) -> bool {
        let nodes = planned.single_state().map_or(&[][..], |s| &s.nodes);
        let n_known = expanded.graph.containers.len();
        let n_before = self.in_memory.len() + self.copies_in_memory.len();
        for id in nodes
            .iter()
            .flat_map(|n| n.reads().into_iter().chain(n.writes()))
        {
            if planned.container(id).storage == Storage::Local {
                continue;
            }
            match copies.get(&id) {
                Some(original) => _ = self.copies_in_memory.insert(*original),
                None if (id.0 as usize) < n_known => _ = self.in_memory.insert(id),
                None => {}
            }
        }
        let (in_memory, copied) = (&self.in_memory, &self.copies_in_memory);
        for value in &mut self.values {
            let is_in_memory = in_memory.contains(&value.id);
            let passes = is_in_memory || copied.contains(&value.id);
            value.passing_bytes = if passes { value.bytes } else { 0 };
            value.kept_bytes = if is_in_memory || !value.crosses {
                value.bytes
            } else {
                0
            };
        }
        let numbers = self
            .values
            .iter()
            .enumerate()
            .map(|(v, value)| (value.id, v));
        let numbers: BTreeMap<ContainerId, usize> = numbers.collect();
        self.backward =
            timeline::backward_nodes(&expanded.graph, &numbers, |id| in_memory.contains(&id));
        in_memory.len() + copied.len() > n_before
    }

    /// What only the recipe asks for: its values are computed again from values that are kept anyway, or from
    /// what is computed again for that.
    pub fn pinned(&self) -> Choice {
        let mut choice = Choice::default();
        let mut needed = self.crossing();
        for (n, unit) in self.units.iter().enumerate().rev() {
            let outputs = || self.outputs(n).filter(|v| needed[*v]);
            let asked = outputs().any(|v| {
                let value = &self.values[v];
                value.pinned.unwrap_or(!value.crosses && value.bytes > 0)
            });
            let kept = outputs().any(|v| self.values[v].pinned == Some(false));
            if asked && !kept && unit.is_ours {
                choice.copied.insert(n);
                unit.reads.iter().for_each(|v| needed[*v] = true);
            }
        }
        choice
    }

    /// What a choice costs, without units that nobody needs.
    pub fn cost(&self, choice: &Choice) -> Cost {
        let needed = self.needed(choice);
        let mut cost = Cost {
            kept_bytes: 0,
            us: 0.0,
        };
        for (n, unit) in self.units.iter().enumerate() {
            let mut outputs = self.outputs(n).filter(|v| needed[*v]);
            if choice.copied.contains(&n) {
                cost.us += outputs.next().map_or(0.0, |_| unit.us);
            } else {
                for v in outputs {
                    cost.kept_bytes += self.values[v].kept_bytes;
                    cost.us += self.values[v].store_us;
                }
            }
        }
        cost
    }

    /// Values that the backward pass needs under a choice.
    fn needed(&self, choice: &Choice) -> Vec<bool> {
        let mut needed = self.crossing();
        for (n, unit) in self.units.iter().enumerate().rev() {
            if choice.copied.contains(&n) && self.outputs(n).any(|v| needed[v]) {
                unit.reads.iter().for_each(|v| needed[*v] = true);
            }
        }
        needed
    }

    fn crossing(&self) -> Vec<bool> {
        self.values.iter().map(|v| v.crosses).collect()
    }

    /// The values that a unit writes; they are numbered in the order of units.
    fn outputs(&self, unit: usize) -> impl Iterator<Item = usize> + use<'_> {
        let first = self.values.partition_point(|v| v.unit < unit);
        let last = self.values.partition_point(|v| v.unit <= unit);
        first..last
    }

    /// Carries out a choice in the expanded step and records a decision about each value. Also returns, for each new
    /// container, the one that it is a copy of.
    pub fn apply(&self, expanded: Expanded, choice: &Choice) -> (Expanded, Copies) {
        let decisions = self.decisions(&expanded, choice);
        let mut fused = expanded;
        let copied: BTreeSet<usize> = choice.copied.iter().map(|n| self.units[*n].at).collect();
        let copies = match copied.is_empty() {
            true => Copies::new(),
            false => apply::copy_units(&mut fused.graph, &copied),
        };
        fused.decisions.extend(decisions);
        (fused, copies)
    }

    fn decisions(&self, expanded: &Expanded, choice: &Choice) -> Vec<Decision> {
        let graph = &expanded.graph;
        let nodes = graph.single_state().map_or(&[][..], |s| &s.nodes);
        let needed = self.needed(choice);
        let mut decisions = Vec::new();
        for (_, value) in self.values.iter().enumerate().filter(|(v, _)| needed[*v]) {
            let unit = &self.units[value.unit];
            let node = &nodes[unit.at];
            let place = place(graph, node, value.id);
            let freed = if value.crosses { value.bytes } else { 0 };
            let decision = if choice.copied.contains(&value.unit) {
                Decision::applied(place, &node.origin, Applied::Recomputed, -unit.bytes)
            } else {
                if value.bytes == 0 && value.pinned.is_none() {
                    continue;
                }
                let obstacle = match (value.pinned, unit.is_ours) {
                    (Some(false), _) => Obstacle::ByRecipe,
                    (_, false) => Obstacle::Called,
                    (_, true) => Obstacle::Unasked,
                };
                let refusal = Refusal::Kept(obstacle);
                Decision::refused(place, &node.origin, refusal, -unit.bytes)
            };
            decisions.push(decision.with_cost(freed, unit.operations));
        }
        decisions
    }

    /// What a recipe must say to give this choice again, whatever is computed again by default. In order of places.
    pub fn recipe(&self, expanded: &Expanded, choice: &Choice) -> Vec<(Place, bool)> {
        let graph = &expanded.graph;
        let nodes = graph.single_state().map_or(&[][..], |s| &s.nodes);
        let needed = self.needed(choice);
        let of_value = |(v, value): (usize, &Value)| {
            let unit = &self.units[value.unit];
            let is_copied = choice.copied.contains(&value.unit);
            let newly_kept = !value.crosses && value.bytes > 0;
            let may_change = unit.is_ours && value.bytes >= default::MIN_BYTES;
            let is_said = is_copied || newly_kept || may_change;
            let place = place(graph, &nodes[unit.at], value.id);
            (needed[v] && is_said).then_some((place, is_copied))
        };
        self.values
            .iter()
            .enumerate()
            .filter_map(of_value)
            .collect()
    }
}

fn place(graph: &Graph, node: &Node, id: ContainerId) -> Place {
    Place::new(Rewrite::Recompute, node, &graph.container(id).name)
}

/// Bytes that a unit moves, and its operations.
fn work(graph: &Graph, node: &Node) -> (i64, i64) {
    let touched: BTreeSet<ContainerId> = node.reads().into_iter().chain(node.writes()).collect();
    let moved = touched.into_iter().map(|id| bytes(graph, id)).sum();
    let operations = unit(node).map_or(0, |(map, tasklet)| {
        let cost: u32 = tasklet.outputs.iter().map(|(_, e)| e.cost()).sum();
        let sums = tasklet.outputs.iter().filter(|(m, _)| m.conflict.is_some());
        let each = i64::from(cost) + sums.count() as i64;
        points(map).saturating_mul(each)
    });
    (moved, operations)
}

/// Microseconds of a unit before fusion. Views take none.
fn unit_us(graph: &Graph, node: &Node, speed: &Speed) -> f64 {
    if is_reshape(node) {
        return 0.0;
    }
    let (moved, operations) = work(graph, node);
    speed.us(moved, operations, is_contraction(node))
}

fn is_reshape(node: &Node) -> bool {
    matches!(&node.kind, NodeKind::Library(l) if l.op == "reshape")
}

#[cfg(test)]
mod tests;
