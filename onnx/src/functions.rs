//! Functions local to a model: which one a node calls, what it takes to follow a call, and a function's nodes as
//! one call sees them.

use crate::attributes::{bodies, bodies_mut};
use crate::proto::{AttributeProto, FunctionProto, GraphProto, NodeProto};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

/// Nodes that following a call may take. Where each function calls the next one twice, every level doubles them.
pub const MOST_NODES: u64 = 1 << 17;

/// How many calls of functions may be inside of each other. The standard allows no recursion.
pub const MOST_CALLS_INSIDE: usize = 32;

/// Domain, name and overload of a function.
type Key<'m> = (&'m str, &'m str, &'m str);

/// The functions of a model, found by the nodes that call them. Where two have one name, the first counts.
#[derive(Debug, Default)]
pub struct Index<'m> {
    all: &'m [FunctionProto],
    positions: BTreeMap<Key<'m>, usize>,
    extents: OnceLock<Vec<Option<Extent>>>,
    understood: OnceLock<Vec<bool>>,
}

/// What it takes to follow the calls among some nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// The nodes, with those of a function as often as it is called. A call is a node too. At most `u64::MAX`.
    pub n_nodes: u64,
    /// How many calls are inside of each other.
    pub n_calls_inside: usize,
    /// How many bodies are inside of each other.
    pub n_bodies_inside: usize,
}

impl Extent {
    fn add(&mut self, inner: Extent) {
        self.n_nodes = self.n_nodes.saturating_add(inner.n_nodes);
        self.n_calls_inside = self.n_calls_inside.max(inner.n_calls_inside);
        self.n_bodies_inside = self.n_bodies_inside.max(inner.n_bodies_inside);
    }
}

impl<'m> Index<'m> {
    /// The functions of a model.
    pub fn new(all: &'m [FunctionProto]) -> Index<'m> {
        let mut positions = BTreeMap::new();
        for (n, f) in all.iter().enumerate() {
            let key = (f.domain.as_str(), f.name.as_str(), f.overload.as_str());
            positions.entry(key).or_insert(n);
        }
        Index {
            all,
            positions,
            ..Index::default()
        }
    }

    /// Position of the function that a node calls.
    pub fn position(&self, node: &NodeProto) -> Option<usize> {
        #[cfg(test)]
        tests::looked_at_one();
        let key = (
            node.domain.as_str(),
            node.op_type.as_str(),
            node.overload.as_str(),
        );
        self.positions.get(&key).copied()
    }

    /// The function that a node calls.
    pub fn called(&self, node: &NodeProto) -> Option<&'m FunctionProto> {
        self.position(node).map(|n| &self.all[n])
    }

    /// What it takes to follow the calls among nodes; `None` if functions call each other in a circle.
    pub fn extent(&self, nodes: &[NodeProto]) -> Option<Extent> {
        self.sum(nodes, self.extents())
    }

    /// What it takes to follow a call of the function at that position, not counting the call itself; `None` as for
    /// [`Index::extent`].
    pub fn extent_of(&self, position: usize) -> Option<Extent> {
        self.extents()[position]
    }

    /// Whether a call of the function at that position is followed, inside of that many calls.
    pub fn is_followed(&self, position: usize, n_around: usize) -> bool {
        self.extent_of(position).is_some_and(|extent| {
            n_around + 1 + extent.n_calls_inside <= MOST_CALLS_INSIDE
                && extent.n_nodes <= MOST_NODES
        })
    }

    /// Whether all nodes of the function at that position have a meaning, those of the functions it calls included.
    /// `has_meaning` answers for a node that calls none, without its bodies. It must always be the same function: the
    /// answers are kept.
    pub fn is_understood(&self, position: usize, has_meaning: fn(&NodeProto) -> bool) -> bool {
        fn all(
            index: &Index,
            nodes: &[NodeProto],
            known: &[bool],
            own: fn(&NodeProto) -> bool,
        ) -> bool {
            nodes.iter().all(|node| match index.position(node) {
                Some(n) => known[n],
                None => own(node) && bodies(node).all(|b| all(index, &b.node, known, own)),
            })
        }
        let understood = self.understood.get_or_init(|| {
            let mut known = vec![false; self.all.len()];
            for n in self.callees_first() {
                known[n] = all(self, &self.all[n].node, &known, has_meaning);
            }
            known
        });
        understood[position]
    }

    /// Which functions nodes call, directly or through others.
    pub fn reached(&self, nodes: &[NodeProto]) -> Vec<bool> {
        let mut reached = vec![false; self.all.len()];
        let mut open = BTreeSet::new();
        self.calls(nodes, &mut open);
        while let Some(n) = open.pop_first() {
            reached[n] = true;
            let mut inner = BTreeSet::new();
            self.calls(&self.all[n].node, &mut inner);
            open.extend(inner.into_iter().filter(|n| !reached[*n]));
        }
        // A function whose name an earlier one has is never called, but is removed or kept with that one.
        let first = |f: &FunctionProto| {
            let key = (f.domain.as_str(), f.name.as_str(), f.overload.as_str());
            self.positions.get(&key).copied()
        };
        let all = self.all.iter().enumerate();
        all.map(|(n, f)| reached[first(f).unwrap_or(n)]).collect()
    }

    fn extents(&self) -> &[Option<Extent>] {
        self.extents.get_or_init(|| {
            let mut known = vec![None; self.all.len()];
            for n in self.callees_first() {
                known[n] = self.sum(&self.all[n].node, &known);
            }
            known
        })
    }

    fn sum(&self, nodes: &[NodeProto], known: &[Option<Extent>]) -> Option<Extent> {
        let mut sum = Extent::default();
        for node in nodes {
            sum.n_nodes = sum.n_nodes.saturating_add(1);
            if let Some(n) = self.position(node) {
                let inner = known[n]?;
                let n_calls_inside = inner.n_calls_inside + 1;
                sum.add(Extent {
                    n_calls_inside,
                    ..inner
                });
            }
            for body in bodies(node) {
                let inner = self.sum(&body.node, known)?;
                let n_bodies_inside = inner.n_bodies_inside + 1;
                sum.add(Extent {
                    n_bodies_inside,
                    ..inner
                });
            }
        }
        Some(sum)
    }

    /// Positions of the functions, each after those that it calls. Without those in a circle of calls, and those that
    /// call one of these.
    fn callees_first(&self) -> Vec<usize> {
        let mut callers = vec![Vec::new(); self.all.len()];
        let mut n_open = Vec::with_capacity(self.all.len());
        for (n, function) in self.all.iter().enumerate() {
            let mut called = BTreeSet::new();
            self.calls(&function.node, &mut called);
            n_open.push(called.len());
            for callee in called {
                callers[callee].push(n);
            }
        }
        let mut order: Vec<usize> = (0..self.all.len()).filter(|n| n_open[*n] == 0).collect();
        let mut next = 0;
        while let Some(n) = order.get(next).copied() {
            next += 1;
            for caller in &callers[n] {
                n_open[*caller] -= 1;
                if n_open[*caller] == 0 {
                    order.push(*caller);
                }
            }
        }
        order
    }

    /// Adds the positions of the functions that nodes call themselves.
    fn calls(&self, nodes: &[NodeProto], into: &mut BTreeSet<usize>) {
        for node in nodes {
            into.extend(self.position(node));
            bodies(node).for_each(|body| self.calls(&body.node, into));
        }
    }
}

/// The function that a node calls, of those of a model.
pub fn called<'m>(functions: &'m [FunctionProto], node: &NodeProto) -> Option<&'m FunctionProto> {
    let same = |f: &&FunctionProto| {
        #[cfg(test)]
        tests::looked_at_one();
        f.name == node.op_type && f.domain == node.domain && f.overload == node.overload
    };
    functions.iter().find(same)
}

/// The nodes of a function with the attributes of a call in place, and the call's absent inputs absent.
pub fn specialized(function: &FunctionProto, call: &NodeProto) -> Vec<NodeProto> {
    let mut given: BTreeMap<&str, &AttributeProto> = function
        .attribute_proto
        .iter()
        .map(|a| (a.name.as_str(), a))
        .collect();
    given.extend(call.attribute.iter().map(|a| (a.name.as_str(), a)));
    let absent: Vec<&str> = function
        .input
        .iter()
        .enumerate()
        .filter(|(n, _)| call.input.get(*n).is_none_or(String::is_empty))
        .map(|(_, name)| name.as_str())
        .collect();
    let mut nodes = function.node.clone();
    for node in &mut nodes {
        specialize(node, &given, &absent);
    }
    nodes
}

fn specialize(node: &mut NodeProto, given: &BTreeMap<&str, &AttributeProto>, absent: &[&str]) {
    for input in &mut node.input {
        if absent.contains(&input.as_str()) {
            input.clear();
        }
    }
    let attributes = std::mem::take(&mut node.attribute);
    for attribute in attributes {
        if attribute.ref_attr_name.is_empty() {
            node.attribute.push(attribute);
        } else if let Some(value) = given.get(attribute.ref_attr_name.as_str()) {
            let name = attribute.name;
            node.attribute.push(AttributeProto {
                name,
                ..(*value).clone()
            });
        }
    }
    for body in bodies_mut(node) {
        specialize_body(body, given, absent);
    }
}

fn specialize_body(
    body: &mut GraphProto,
    given: &BTreeMap<&str, &AttributeProto>,
    absent: &[&str],
) {
    for node in &mut body.node {
        specialize(node, given, absent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::cost;
    use crate::optimize::{Options, optimize};
    use crate::rewrite::trial::nested;
    use crate::verify;
    use std::cell::Cell;

    thread_local! {
        /// How often this thread looked for the function of a node, or at a function to compare it with a node.
        static LOOKED_AT: Cell<u64> = const { Cell::new(0) };
    }

    /// Counts one look.
    pub(super) fn looked_at_one() {
        LOOKED_AT.set(LOOKED_AT.get() + 1);
    }

    #[test]
    fn functions_are_counted_as_often_as_they_are_called() {
        let extent = |n_functions, n_calls| {
            let model = nested(n_functions, n_calls).model();
            let graph = model.proto.graph.expect("a graph");
            Index::new(&model.proto.functions).extent(&graph.node)
        };
        // Calls: 1 + 2 + 4 + 8, and the last 8 are of functions of one node.
        let found = extent(4, 2).expect("no circle");
        assert_eq!((found.n_nodes, found.n_calls_inside), (23, 4));
        assert_eq!(extent(100, 2).expect("no circle").n_nodes, u64::MAX);
    }

    #[test]
    fn costs_of_functions_are_counted_up_to_the_limit() {
        let counted = |n_functions| {
            let model = nested(n_functions, 2).model();
            let cost = cost(&model.proto, &model.folder, &BTreeMap::new());
            (cost.nodes.len(), cost.n_unknown)
        };
        assert_eq!(counted(10), (512, 0));
        assert_eq!(counted(30), (1, 1));
    }

    /// How often optimizing such a model looks at functions on this thread.
    fn work(n_functions: usize, n_calls: usize, verifying: Option<verify::Options>) -> u64 {
        let model = nested(n_functions, n_calls).model();
        let options = Options {
            rewriting: Default::default(),
            verifying,
        };
        let before = LOOKED_AT.get();
        let done = optimize(&model, &options, &mut |_| ()).expect("it is optimized");
        let work = LOOKED_AT.get() - before;
        assert_eq!(done.summary.after.n_unknown, 1);
        if options.verifying.is_some() {
            assert_eq!(done.summary.cuts, ["F0 → `y`"]);
        }
        work
    }

    /// Work on nested functions must grow neither exponentially with their number nor with its cube.
    #[test]
    fn functions_in_each_other_are_not_followed_without_end() {
        // The cube of twice as many is 8 times as much; four more functions, each called twice, are 16 times as many
        // nodes.
        for ([few, more], n_calls, most) in [([400, 800], 1, 6), ([20, 24], 2, 4)] {
            // Without verification this thread rewrites, with it another one does.
            for verifying in [Some(verify::Options::default()), None] {
                let first = work(few, n_calls, verifying.clone());
                let second = work(more, n_calls, verifying);
                assert!(first > 0 && second < most * first, "{first} {second}");
            }
        }
    }
}
