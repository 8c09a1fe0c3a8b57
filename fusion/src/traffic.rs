//! The least bytes a program must move: what crosses its border, inputs read once and outputs written
//! once ("Data Movement Is All You Need", arXiv 2007.00072, calls it Q).

use crate::unit::bytes;
use graph::{ContainerId, Graph, Lifetime, Node};
use std::collections::BTreeSet;

/// Inputs that are read plus outputs: what no schedule can avoid moving, in bytes.
pub fn lower_bound(graph: &Graph) -> i64 {
    let nodes = graph.single_state().map_or(&[][..], |s| &s.nodes);
    let mut border: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    for id in nodes.iter().flat_map(Node::reads) {
        if graph.container(id).lifetime != Lifetime::Transient {
            border.insert(id);
        }
    }
    border.iter().map(|id| bytes(graph, *id)).sum()
}
