//! The configuration problem: orders of all containers chosen together, by predicted time.
//!
//! Each container that may have another order is a variable, whose choices are a few orders. A contraction costs
//! what it is predicted to take with its operands and its result in these orders. A loop that writes in one order and
//! reads in another moves the smaller array once more, as a conversion would. The rule's orders are the first choice of
//! every container, so connected containers change only if they are predicted to be faster together. All costs are
//! whole nanoseconds, so their sums are exact.
//!
//! "Data Movement Is All You Need" (arXiv 2007.00072) solves this problem as a shortest path, for operators in a chain;
//! here it is solved for any graph ([`crate::quadratic`]). Predicts nothing itself: the caller passes in [`Times`].

use crate::quadratic::Quadratic;
use crate::{Assignment, alias_ends};
use graph::{
    ContainerId, Graph, Index, Layout, Lifetime, Memlet, Node, NodeKind, SymExpr, Symbol, Tasklet,
};
use std::collections::{BTreeMap, BTreeSet};

/// Most orders of one container.
const MAX_ORDERS: usize = 4;

/// Predicted times.
pub trait Times {
    /// Nanoseconds of a contraction with the layouts that `graph` has; `None` if the node is not a contraction.
    fn contraction_ns(&mut self, graph: &Graph, node: &Node) -> Option<f64>;

    /// Nanoseconds that moving `bytes` bytes takes.
    fn moved_ns(&self, bytes: i64) -> f64;
}

/// Orders that were chosen together, and what they are predicted to save.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayoutChoice {
    /// Containers that get another order than the rule gives them.
    pub changed: Vec<(ContainerId, Vec<usize>)>,
    /// Nanoseconds of contractions and conversions with every container in row-major order.
    pub row_major_ns: f64,
    /// The same time with the orders of the rule.
    pub rule_ns: f64,
    /// The same time with the chosen orders.
    pub chosen_ns: f64,
    /// A lower bound for every choice of orders.
    pub bound_ns: f64,
    /// Containers with a choice.
    pub n_containers: usize,
    /// Contractions with a choice.
    pub n_contractions: usize,
    /// Branches of the search; 0 if none was needed.
    pub n_branches: usize,
}

/// Chooses orders for the containers of an expanded graph in which the rule has given its own.
pub fn choose(
    graph: &Graph,
    assignment: &Assignment,
    times: &mut dyn Times,
    max_branches: usize,
) -> LayoutChoice {
    let Some(state) = graph.single_state() else {
        return LayoutChoice::default();
    };
    let orders = candidates(graph, &state.nodes, assignment);
    let mut problem = ConfigurationProblem::new(graph, &orders);
    for node in &state.nodes {
        problem.add_node(node, times);
    }
    let rule = problem.completed(&|_, _| 0);
    let row_major = problem.completed(&|_, orders| {
        let found = orders.iter().position(Layout::is_row_major);
        found.unwrap_or(0)
    });
    let found = problem.quadratic.solve(max_branches);
    let changed = problem.variables.iter().filter_map(|(id, v)| {
        let order = orders[id][found.choices[*v]].order().to_vec();
        (found.choices[*v] != 0).then_some((*id, order))
    });
    LayoutChoice {
        changed: changed.collect(),
        row_major_ns: problem.quadratic.cost(&row_major),
        rule_ns: problem.quadratic.cost(&rule),
        chosen_ns: found.cost,
        bound_ns: found.bound,
        n_containers: problem.variables.len(),
        n_contractions: problem.n_contractions,
        n_branches: found.n_branches,
    }
}

/// Orders of each container that may have several: first the rule's, then row-major order, then, if a product touches
/// the container, the rule's with its last two dimensions exchanged. Loops pass orders on to containers that they index
/// alike.
fn candidates(
    graph: &Graph,
    nodes: &[Node],
    assignment: &Assignment,
) -> BTreeMap<ContainerId, Vec<Layout>> {
    let aliased = alias_ends(nodes);
    let owned: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    let is_free = |id: &ContainerId| {
        let c = graph.container(*id);
        let is_ours = c.lifetime == Lifetime::Transient && c.shape.len() >= 2;
        is_ours && !owned.contains(id) && !aliased.contains(id)
    };
    let mut tasklets: Vec<&Tasklet> = Vec::new();
    nodes
        .iter()
        .for_each(|node| node.visit_tasklets(&mut |t| tasklets.push(t)));
    let mut found: BTreeMap<ContainerId, Vec<Layout>> = BTreeMap::new();
    for tasklet in &tasklets {
        let is_product = tasklet.summed_product().is_some();
        for id in arrays(tasklet).map(|m| m.container).filter(&is_free) {
            let c = graph.container(id);
            let orders = found.entry(id).or_insert_with(|| vec![c.layout.clone()]);
            add(orders, &Layout::row_major(c.shape.len()));
            if is_product && !assignment.channels_last.contains(&id) {
                add(orders, &exchanged(&c.layout));
            }
        }
    }
    loop {
        let mut has_grown = false;
        for tasklet in tasklets.iter().filter(|t| t.summed_product().is_none()) {
            for (written, _) in &tasklet.outputs {
                for read in tasklet.inputs.iter().filter(|r| r.subset == written.subset) {
                    for (from, to) in [(read, written), (written, read)] {
                        let more = found.get(&from.container).cloned().unwrap_or_default();
                        let Some(orders) = found.get_mut(&to.container) else {
                            continue;
                        };
                        has_grown |= more.iter().fold(false, |any, o| any | add(orders, o));
                    }
                }
            }
        }
        if !has_grown {
            break;
        }
    }
    found.retain(|_, orders| orders.len() > 1);
    found
}

/// Adds an order if it is new and there are fewer than [`MAX_ORDERS`]. Returns whether it did.
fn add(orders: &mut Vec<Layout>, order: &Layout) -> bool {
    let is_new = orders.len() < MAX_ORDERS && !orders.contains(order);
    if is_new {
        orders.push(order.clone());
    }
    is_new
}

/// The order with its last two dimensions exchanged.
fn exchanged(layout: &Layout) -> Layout {
    let mut order = layout.order().to_vec();
    let n = order.len();
    order.swap(n - 2, n - 1);
    Layout::from_order(order).unwrap_or_else(|| unreachable!("a permutation stays one"))
}

fn arrays(tasklet: &Tasklet) -> impl Iterator<Item = &Memlet> {
    let written = tasklet.outputs.iter().map(|(memlet, _)| memlet);
    tasklet.inputs.iter().chain(written)
}

/// The problem while it is put together.
struct ConfigurationProblem<'a> {
    /// The graph, in which contractions get the layouts to predict.
    graph: Graph,
    orders: &'a BTreeMap<ContainerId, Vec<Layout>>,
    quadratic: Quadratic,
    /// The variable of each container.
    variables: BTreeMap<ContainerId, usize>,
    /// Contractions of three containers with a choice: their own variable, which numbers the combinations of the three
    /// choices, and the containers.
    configurations: Vec<(usize, Vec<ContainerId>)>,
    n_contractions: usize,
}

impl<'a> ConfigurationProblem<'a> {
    fn new(graph: &Graph, orders: &'a BTreeMap<ContainerId, Vec<Layout>>) -> Self {
        let mut quadratic = Quadratic::default();
        let variable = |(id, orders): (&ContainerId, &Vec<Layout>)| {
            (*id, quadratic.add_variable(vec![0.0; orders.len()]))
        };
        ConfigurationProblem {
            variables: orders.iter().map(variable).collect(),
            graph: graph.clone(),
            orders,
            quadratic,
            configurations: Vec::new(),
            n_contractions: 0,
        }
    }

    /// Adds the costs of a node.
    fn add_node(&mut self, node: &Node, times: &mut dyn Times) {
        if let Some(now_ns) = times.contraction_ns(&self.graph, node) {
            self.add_contraction(node, now_ns.ceil(), times);
            return;
        }
        // A reshape has no loops, and its ends have no choice.
        if let NodeKind::Library(_) = node.kind {
            return;
        }
        let mut tasklets = Vec::new();
        node.visit_tasklets(&mut |t| tasklets.push(t));
        for tasklet in tasklets {
            for (written, _) in &tasklet.outputs {
                for read in &tasklet.inputs {
                    self.add_loop(written, read, times);
                }
            }
        }
    }

    /// Adds a contraction: its predicted time in each combination of orders.
    fn add_contraction(&mut self, node: &Node, now_ns: f64, times: &mut dyn Times) {
        let mut free: Vec<ContainerId> = node.reads().into_iter().chain(node.writes()).collect();
        free.retain(|id| self.orders.contains_key(id));
        free.sort_unstable();
        free.dedup();
        let sizes: Vec<usize> = free.iter().map(|id| self.orders[id].len()).collect();
        let n: usize = sizes.iter().product();
        if free.is_empty() {
            self.quadratic.add_constant(now_ns);
            return;
        }
        self.n_contractions += 1;
        let costs: Vec<f64> = (0..n)
            .map(|at| self.predicted(node, &free, &digits(at, &sizes), times))
            .collect();
        let v = |at: usize| self.variables[&free[at]];
        match free.len() {
            1 => self.quadratic.add_costs(v(0), &costs),
            2 => {
                let (a, b) = (v(0), v(1));
                self.quadratic
                    .add_edge(a, b, |i, j| costs[i + sizes[0] * j]);
            }
            _ => {
                let own = self.quadratic.add_variable(costs);
                for (at, id) in free.iter().enumerate() {
                    let same = |n: usize, choice: usize| match digits(n, &sizes)[at] == choice {
                        true => 0.0,
                        false => f64::INFINITY,
                    };
                    self.quadratic.add_edge(own, self.variables[id], same);
                }
                self.configurations.push((own, free));
            }
        }
    }

    /// The time of a contraction whose containers have taken their choices.
    fn predicted(
        &mut self,
        node: &Node,
        free: &[ContainerId],
        choices: &[usize],
        times: &mut dyn Times,
    ) -> f64 {
        for (id, choice) in free.iter().zip(choices) {
            self.graph.container_mut(*id).layout = self.orders[id][*choice].clone();
        }
        let ns = times.contraction_ns(&self.graph, node);
        for id in free {
            self.graph.container_mut(*id).layout = self.orders[id][0].clone();
        }
        // A contraction is one in every order, so there is a time.
        ns.map_or(f64::INFINITY, f64::ceil)
    }

    /// Adds a loop between two arrays: it costs a conversion if their fastest dimensions differ.
    fn add_loop(&mut self, written: &Memlet, read: &Memlet, times: &dyn Times) {
        if written.container == read.container {
            return;
        }
        let sizes = [written, read].map(|m| bytes(&self.graph, m.container));
        let conversion_ns = times.moved_ns(2 * sizes[0].min(sizes[1])).ceil();
        let own = |id: ContainerId| match self.orders.get(&id) {
            Some(orders) => orders.clone(),
            None => vec![self.graph.container(id).layout.clone()],
        };
        let (outs, ins) = (own(written.container), own(read.container));
        let graph = &self.graph;
        let cost = |i: usize, j: usize| {
            let (written, read) = ((written, &outs[i]), (read, &ins[j]));
            let is_converted = match sizes[0] < sizes[1] {
                true => differ(graph, read, written),
                false => differ(graph, written, read),
            };
            if is_converted { conversion_ns } else { 0.0 }
        };
        let variable = |m: &Memlet| self.variables.get(&m.container).copied();
        match (variable(written), variable(read)) {
            (Some(a), Some(b)) => self.quadratic.add_edge(a, b, cost),
            (Some(a), None) => {
                let costs: Vec<f64> = (0..outs.len()).map(|i| cost(i, 0)).collect();
                self.quadratic.add_costs(a, &costs);
            }
            (None, Some(b)) => {
                let costs: Vec<f64> = (0..ins.len()).map(|j| cost(0, j)).collect();
                self.quadratic.add_costs(b, &costs);
            }
            (None, None) => self.quadratic.add_constant(cost(0, 0)),
        }
    }

    /// A choice for each variable from one for each container.
    fn completed(&self, choice: &dyn Fn(ContainerId, &[Layout]) -> usize) -> Vec<usize> {
        let n = self.variables.len() + self.configurations.len();
        let mut choices = vec![0; n];
        for (id, v) in &self.variables {
            choices[*v] = choice(*id, &self.orders[id]);
        }
        for (own, free) in &self.configurations {
            let mut factor = 1;
            for id in free {
                choices[*own] += factor * choices[self.variables[id]];
                factor *= self.orders[id].len();
            }
        }
        choices
    }
}

/// The digits of a number in a mixed radix with these bases, the lowest digit first.
fn digits(mut n: usize, bases: &[usize]) -> Vec<usize> {
    let digit = |base: &usize| {
        let digit = n % base;
        n /= base;
        digit
    };
    bases.iter().map(digit).collect()
}

fn bytes(graph: &Graph, id: ContainerId) -> i64 {
    let c = graph.container(id);
    let sizes = SymExpr::product(&c.shape).as_const();
    sizes.unwrap_or(0).saturating_mul(c.dtype.bytes() as i64)
}

/// Whether a loop along the fastest dimension of the larger array runs along a slower one of the smaller.
fn differ(graph: &Graph, large: (&Memlet, &Layout), small: (&Memlet, &Layout)) -> bool {
    let other = fastest(graph, small);
    let is_slow = |s: &Symbol| {
        let mentions = |i: &Index| matches!(i, Index::At(e) if e.mentions(s));
        small.0.subset.iter().any(mentions) && !other.is_some_and(|e| e.mentions(s))
    };
    let along = fastest(graph, large).map(SymExpr::symbols);
    along.unwrap_or_default().iter().any(is_slow)
}

/// The index of the fastest dimension whose size is not 1.
fn fastest<'a>(graph: &Graph, (memlet, layout): (&'a Memlet, &Layout)) -> Option<&'a SymExpr> {
    let shape = &graph.container(memlet.container).shape;
    let is_long = |d: &&usize| shape[**d].as_const() != Some(1);
    let d = layout.order().iter().rev().find(is_long)?;
    match &memlet.subset[*d] {
        Index::At(index) => Some(index),
        Index::Data(_) => None,
    }
}

#[cfg(test)]
mod tests;
