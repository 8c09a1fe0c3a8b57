//! Puts copies of forward units into the backward pass, each right before the first node that needs it.

use super::Copies;
use graph::{ContainerId, Graph, Memlet, Node, NodeKind, Stage};
use std::collections::{BTreeMap, BTreeSet};

/// Copies the units at these positions; the backward pass then reads what the copies write. Returns the original of
/// each new container.
pub(super) fn copy_units(graph: &mut Graph, units: &BTreeSet<usize>) -> Copies {
    let nodes = std::mem::take(&mut graph.last_state().nodes);
    let makers: BTreeMap<ContainerId, usize> = units
        .iter()
        .flat_map(|at| nodes[*at].writes().into_iter().map(|id| (id, *at)))
        .collect();
    let mut copier = Copier {
        graph,
        nodes: &nodes,
        makers,
        names: BTreeMap::new(),
        done: Vec::new(),
    };
    for node in &nodes {
        match node.stage {
            Stage::Forward => copier.done.push(node.clone()),
            _ => copier.push(node.clone()),
        }
    }
    let copies = copier.names.iter().map(|(id, copy)| (*copy, *id)).collect();
    let mut done = copier.done;
    remove_dead(graph, &mut done);
    graph.last_state().nodes = done;
    copies
}

struct Copier<'a> {
    graph: &'a mut Graph,
    nodes: &'a [Node],
    /// The unit to copy for each container.
    makers: BTreeMap<ContainerId, usize>,
    /// The copy of each container, so far.
    names: BTreeMap<ContainerId, ContainerId>,
    done: Vec<Node>,
}

impl Copier<'_> {
    /// Appends a node of the backward pass after the copies that it reads.
    fn push(&mut self, mut node: Node) {
        for id in node.reads() {
            self.copy(id);
        }
        rename(&mut node, &self.names);
        self.done.push(node);
    }

    /// Appends the copy of the unit that makes a container, after the copies that it reads.
    fn copy(&mut self, id: ContainerId) {
        // Containers to copy, each pushed twice: when it comes up again, the copies that its unit reads exist.
        let mut open = vec![(id, false)];
        while let Some((id, is_ready)) = open.pop() {
            let Some(at) = self.makers.get(&id).copied() else {
                continue;
            };
            if self.names.contains_key(&id) {
                continue;
            }
            let mut node = self.nodes[at].clone();
            if !is_ready {
                open.push((id, true));
                open.extend(node.reads().into_iter().rev().map(|read| (read, false)));
                continue;
            }
            set_stage(&mut node);
            for written in node.writes() {
                let c = self.graph.container(written);
                let (name, dtype, shape) = (format!("{}.again", c.name), c.dtype, c.shape.clone());
                let copy = self.graph.add_transient(&name, dtype, shape);
                self.names.insert(written, copy);
            }
            rename(&mut node, &self.names);
            self.done.push(node);
        }
    }
}

/// Moves a node and what is inside it to the backward pass.
fn set_stage(node: &mut Node) {
    node.stage = Stage::Backward;
    if let NodeKind::Map(map) = &mut node.kind {
        map.body.iter_mut().for_each(set_stage);
    }
}

/// Gives a node's containers their new names.
fn rename(node: &mut Node, names: &BTreeMap<ContainerId, ContainerId>) {
    if let NodeKind::Library(library) = &mut node.kind {
        let all = library.inputs.iter_mut().chain(&mut library.outputs);
        for id in all.flatten() {
            *id = names.get(id).copied().unwrap_or(*id);
        }
    }
    let new = |m: &mut Memlet| {
        m.container = names.get(&m.container).copied().unwrap_or(m.container);
    };
    node.visit_tasklets_mut(&mut |t| {
        t.inputs.iter_mut().for_each(new);
        t.outputs.iter_mut().for_each(|(m, _)| new(m));
    });
}

/// Drops nodes of the forward pass that only fed values which are now computed again.
fn remove_dead(graph: &Graph, nodes: &mut Vec<Node>) {
    let results: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    loop {
        let read: BTreeSet<ContainerId> = nodes.iter().flat_map(Node::reads).collect();
        let before = nodes.len();
        nodes.retain(|n| {
            let mut writes = n.writes().into_iter();
            writes.any(|id| results.contains(&id) || read.contains(&id))
        });
        if nodes.len() == before {
            return;
        }
    }
}
