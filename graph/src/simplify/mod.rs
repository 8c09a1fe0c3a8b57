//! Simplification: the same results from fewer nodes and simpler ones.
//!
//! Repeats until nothing changes: operators of constants are computed, copies and repeated operators
//! are replaced with the value that they equal, expressions and maps of one point are simplified, and
//! unused nodes and results are dropped.
//! Results are unchanged up to the sign of a zero (see [`crate::Expr::simplify`]). Operators are known
//! only through [`LibraryMeaning`]. Containers keep their ids; [`Graph::compact`] drops unused containers.

mod dead;
mod library;
mod maps;

use crate::graph::{Block, ContainerId, Graph, Lifetime, Node, Origin};
use crate::layout::Storage;
use crate::meaning::LibraryMeaning;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// A kind of simplification.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Rule {
    /// An operator of constants was computed.
    FoldConstant,
    /// A constant was replaced with an equal one.
    MergeConstants,
    /// The output of a copy was replaced with its input.
    ForwardCopy,
    /// The result of an operator was replaced with that of an equal operator.
    MergeOperators,
    /// A node, or a result of a node, that nobody needs was dropped.
    DropDead,
    /// A tasklet's expression or list of inputs became simpler.
    SimplifyTasklet,
    /// A map parameter with one point was dropped, or a group inside a map dissolved.
    FlattenMap,
}

/// What simplification did, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SimplifyReport {
    /// Each application with the node it applied to.
    pub fired: Vec<(Rule, Arc<Origin>)>,
}

impl SimplifyReport {
    /// How often a rule applied.
    pub fn count(&self, rule: Rule) -> usize {
        self.fired.iter().filter(|(r, _)| *r == rule).count()
    }
}

impl fmt::Display for SimplifyReport {
    /// `3 DropDead, 1 FoldConstant`, or `nothing`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for (rule, _) in &self.fired {
            *counts.entry(format!("{rule:?}")).or_default() += 1;
        }
        if counts.is_empty() {
            return f.write_str("nothing");
        }
        let parts: Vec<_> = counts.iter().map(|(r, n)| format!("{n} {r}")).collect();
        f.write_str(&parts.join(", "))
    }
}

/// What happens to a result that nobody reads, if its operator stays for another result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Results {
    Drop,
    Keep,
}

/// Simplifies the graph until nothing changes.
pub fn simplify(graph: &mut Graph, meaning: &dyn LibraryMeaning) -> SimplifyReport {
    run(graph, meaning, Results::Drop)
}

/// Like [`simplify`], for a graph that is yet to be differentiated: an operator that stays keeps all its results,
/// because its gradient may read what the forward pass does not (the winners of a maximum).
pub fn simplify_before_gradients(
    graph: &mut Graph,
    meaning: &dyn LibraryMeaning,
) -> SimplifyReport {
    run(graph, meaning, Results::Keep)
}

fn run(graph: &mut Graph, meaning: &dyn LibraryMeaning, results: Results) -> SimplifyReport {
    let mut report = SimplifyReport::default();
    loop {
        let before = report.fired.len();
        library::merge_constants(graph, &mut report);
        library::simplify_operators(graph, meaning, &mut report);
        maps::simplify_maps(graph, &mut report);
        dead::drop_dead(graph, results, &mut report);
        // Every application removes something, so this ends.
        if report.fired.len() == before {
            return report;
        }
    }
}

/// Facts about containers that decide whether one may stand for another.
struct Containers {
    writers: BTreeMap<ContainerId, usize>,
    outputs: BTreeSet<ContainerId>,
}

impl Containers {
    fn new(graph: &Graph) -> Self {
        let mut writers: BTreeMap<ContainerId, usize> = BTreeMap::new();
        graph.visit_nodes(&mut |n: &Node| {
            for id in n.writes() {
                *writers.entry(id).or_default() += 1;
            }
        });
        Containers {
            writers,
            outputs: graph.outputs.iter().map(|o| o.container).collect(),
        }
    }

    /// Whether the container holds one value from its write to the end.
    fn is_fixed(&self, graph: &Graph, id: ContainerId) -> bool {
        let transient = graph.container(id).lifetime == Lifetime::Transient;
        let once = self.writers.get(&id).copied().unwrap_or(0) == 1;
        (!transient || once) && graph.container(id).storage == Storage::Global
    }

    /// Whether readers of `old` may read `new`, which holds the same elements, instead.
    fn may_replace(&self, graph: &Graph, old: ContainerId, new: ContainerId) -> bool {
        let (a, b) = (graph.container(old), graph.container(new));
        let alike = a.dtype == b.dtype && a.shape == b.shape && a.layout == b.layout;
        // An output must be written by this graph, and each output has its own container.
        let output_fits = !self.outputs.contains(&old)
            || (b.lifetime == Lifetime::Transient && !self.outputs.contains(&new));
        alike && output_fits && self.is_fixed(graph, old) && self.is_fixed(graph, new)
    }
}

/// Which container stands for which. A replacement that is replaced itself is followed to the end.
#[derive(Default)]
struct Replacements(BTreeMap<ContainerId, ContainerId>);

impl Replacements {
    fn insert(&mut self, old: ContainerId, new: ContainerId) {
        let new = self.get(new);
        self.0.insert(old, new);
    }

    fn get(&self, id: ContainerId) -> ContainerId {
        self.0.get(&id).copied().unwrap_or(id)
    }

    fn apply(&self, graph: &mut Graph) {
        if !self.0.is_empty() {
            graph.rename_containers(&|id| self.get(id));
        }
    }
}

/// Calls `f` on every list of nodes that run in sequence.
fn for_each_state(blocks: &mut [Block], f: &mut dyn FnMut(&mut Vec<Node>)) {
    for block in blocks {
        match block {
            Block::State(s) => f(&mut s.nodes),
            Block::Loop(l) => for_each_state(&mut l.body, f),
            Block::Branch(b) => {
                for_each_state(&mut b.then, f);
                for_each_state(&mut b.otherwise, f);
            }
        }
    }
}
