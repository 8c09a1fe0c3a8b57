//! Dropping what nobody needs: nodes, single results of nodes, writes inside maps.

use super::{Results, Rule, SimplifyReport};
use crate::graph::{Block, ContainerId, Graph, Node, NodeKind};
use std::collections::BTreeSet;

type Live = BTreeSet<ContainerId>;

/// Before: `%y = relu(%x)` with nobody reading `%y`. After: nothing.
pub(super) fn drop_dead(graph: &mut Graph, results: Results, report: &mut SimplifyReport) {
    let mut live: Live = graph.outputs.iter().map(|o| o.container).collect();
    blocks(&mut graph.body, &mut live, results, report);
}

/// Goes backwards, so that a reader is seen before what it reads.
fn blocks(list: &mut Vec<Block>, live: &mut Live, results: Results, report: &mut SimplifyReport) {
    for block in list.iter_mut().rev() {
        match block {
            Block::State(s) => nodes(&mut s.nodes, live, results, report),
            Block::Loop(l) => {
                // What the body reads may come from its previous iteration.
                crate::compact::visit_nodes(&l.body, &mut |n| live.extend(n.reads()));
                blocks(&mut l.body, live, results, report);
            }
            Block::Branch(b) => {
                let mut otherwise = live.clone();
                blocks(&mut b.then, live, results, report);
                blocks(&mut b.otherwise, &mut otherwise, results, report);
                live.append(&mut otherwise);
                live.insert(b.condition);
            }
        }
    }
    let empty = |b: &Block| match b {
        Block::State(s) => s.nodes.is_empty(),
        Block::Loop(l) => l.body.is_empty(),
        Block::Branch(b) => b.then.is_empty() && b.otherwise.is_empty(),
    };
    if list.len() > 1 {
        list.retain(|b| !empty(b));
    }
}

fn nodes(list: &mut Vec<Node>, live: &mut Live, results: Results, report: &mut SimplifyReport) {
    let mut kept: Vec<Node> = Vec::with_capacity(list.len());
    for mut node in list.drain(..).rev() {
        if keep(&mut node, live, results, report) {
            live.extend(node.reads());
            kept.push(node);
        } else {
            report.fired.push((Rule::DropDead, node.origin.clone()));
        }
    }
    kept.reverse();
    *list = kept;
}

/// Whether the node does something needed. Drops what is not needed in it.
fn keep(node: &mut Node, live: &mut Live, results: Results, report: &mut SimplifyReport) -> bool {
    match &mut node.kind {
        NodeKind::Library(l) => {
            if !l.outputs.iter().flatten().any(|id| live.contains(id)) {
                return false;
            }
            if results == Results::Keep {
                return true;
            }
            for output in &mut l.outputs {
                if output.take_if(|id| !live.contains(id)).is_some() {
                    report.fired.push((Rule::DropDead, node.origin.clone()));
                }
            }
            true
        }
        NodeKind::Tasklet(t) => {
            let before = t.outputs.len();
            t.outputs.retain(|(m, _)| live.contains(&m.container));
            if !t.outputs.is_empty() && t.outputs.len() < before {
                report.fired.push((Rule::DropDead, node.origin.clone()));
            }
            !t.outputs.is_empty()
        }
        NodeKind::Map(m) => {
            // A copy for the inside of the map: what is read and written there is live only there.
            let mut inside = live.clone();
            let fired = report.fired.len();
            nodes(&mut m.body, &mut inside, results, report);
            if m.body.is_empty() {
                // One entry for the whole map.
                report.fired.truncate(fired);
            }
            !m.body.is_empty()
        }
    }
}
