//! Simplifications inside maps: expressions, lists of inputs, parameters with one point.

use super::{Rule, SimplifyReport, for_each_state};
use crate::dtype::DType;
use crate::expr::Expr;
use crate::graph::{Container, Graph, Index, Map, Memlet, Node, NodeKind, Schedule, Tasklet};
use crate::size::{SymExpr, Symbol};

/// Simplifies all maps and tasklets.
pub(super) fn simplify_maps(graph: &mut Graph, report: &mut SimplifyReport) {
    let containers = std::mem::take(&mut graph.containers);
    for_each_state(&mut graph.body, &mut |nodes| {
        nodes.iter_mut().for_each(|n| node(n, &containers, report));
    });
    graph.containers = containers;
}

fn node(n: &mut Node, containers: &[Container], report: &mut SimplifyReport) {
    let changed = match &mut n.kind {
        NodeKind::Library(_) => None,
        NodeKind::Tasklet(t) => tasklet(t, containers).then_some(Rule::SimplifyTasklet),
        NodeKind::Map(m) => {
            let flattened = drop_single_points(m) | dissolve_groups(m);
            m.body.iter_mut().for_each(|n| node(n, containers, report));
            flattened.then_some(Rule::FlattenMap)
        }
    };
    if let Some(rule) = changed {
        report.fired.push((rule, n.origin.clone()));
    }
}

/// Before: `map [i < 1, j < n] { … %x[i, j] … }`. After: `map [j < n] { … %x[0, j] … }`.
///
/// Kernels keep their parameters, because an earlier pass decided on their shape.
fn drop_single_points(m: &mut Map) -> bool {
    let single = |size: &SymExpr| size.as_const() == Some(1);
    if m.schedule == Schedule::Kernel || !m.params.iter().any(|p| single(&p.size)) {
        return false;
    }
    let gone: Vec<Symbol> = m
        .params
        .extract_if(.., |p| single(&p.size))
        .map(|p| p.name)
        .collect();
    let zero = |s: &Symbol| gone.contains(s).then(SymExpr::default);
    for inner in &mut m.body {
        inner.rewrite_sizes(&|size| size.substitute(&zero));
    }
    true
}

/// Before: `map [i < n] { map [] { a b } c }`. After: `map [i < n] { a b c }`.
fn dissolve_groups(m: &mut Map) -> bool {
    let is_group = |n: &Node| matches!(&n.kind, NodeKind::Map(g) if g.params.is_empty() && g.schedule == Schedule::Default);
    if !m.body.iter().any(is_group) {
        return false;
    }
    let body = std::mem::take(&mut m.body);
    for inner in body {
        match inner.kind {
            NodeKind::Map(g) if g.params.is_empty() && g.schedule == Schedule::Default => {
                m.body.extend(g.body);
            }
            _ => m.body.push(inner),
        }
    }
    true
}

fn tasklet(t: &mut Tasklet, containers: &[Container]) -> bool {
    let types: Vec<DType> = t
        .inputs
        .iter()
        .map(|m| containers[m.container.idx()].dtype)
        .collect();
    let mut changed = false;
    for (_, e) in &mut t.outputs {
        let simple = e.simplify_typed(&types);
        changed |= simple != *e;
        *e = simple;
    }
    t.normalize_inputs() || changed
}

impl Tasklet {
    /// Merges equal inputs and drops those that neither an expression nor an index uses.
    /// Returns whether anything changed.
    pub fn normalize_inputs(&mut self) -> bool {
        let before = self.inputs.len();
        while self.merge_two_inputs() || self.drop_one_input() {}
        self.inputs.len() < before
    }

    fn merge_two_inputs(&mut self) -> bool {
        for later in 1..self.inputs.len() {
            let twin = (0..later).find(|i| self.inputs[*i] == self.inputs[later]);
            if let Some(first) = twin {
                self.renumber(&|i| match i {
                    i if i == later => first,
                    i if i > later => i - 1,
                    i => i,
                });
                self.inputs.remove(later);
                return true;
            }
        }
        false
    }

    fn drop_one_input(&mut self) -> bool {
        let mut used = vec![false; self.inputs.len()];
        let mut mark = |i: usize| {
            if let Some(u) = used.get_mut(i) {
                *u = true;
            }
        };
        for (memlet, e) in &self.outputs {
            e.inputs().into_iter().for_each(&mut mark);
            data_indices(memlet).for_each(&mut mark);
        }
        for memlet in &self.inputs {
            data_indices(memlet).for_each(&mut mark);
        }
        let Some(unused) = used.iter().position(|u| !u) else {
            return false;
        };
        self.renumber(&|i| if i > unused { i - 1 } else { i });
        self.inputs.remove(unused);
        true
    }

    /// Replaces positions of inputs in expressions and data indices.
    fn renumber(&mut self, to: &dyn Fn(usize) -> usize) {
        for (memlet, e) in &mut self.outputs {
            *e = e.substitute_inputs(&|i| Expr::In(to(i)));
            renumber_data(memlet, to);
        }
        for memlet in &mut self.inputs {
            renumber_data(memlet, to);
        }
    }
}

fn data_indices(memlet: &Memlet) -> impl Iterator<Item = usize> + '_ {
    memlet.subset.iter().filter_map(|i| match i {
        Index::Data(d) => Some(*d),
        Index::At(_) => None,
    })
}

fn renumber_data(memlet: &mut Memlet, to: &dyn Fn(usize) -> usize) {
    for index in &mut memlet.subset {
        if let Index::Data(d) = index {
            *d = to(*d);
        }
    }
}
