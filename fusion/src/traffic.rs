//! Bytes moved: what each kernel reads and writes, and the least the whole program must move.
//!
//! A kernel moves each container it touches once, whole, unless the container is local to it: what
//! a cache of the size of one outer point's data achieves. The lower bound of a program is what
//! crosses its border: inputs read once, outputs written once ("Data Movement Is All You Need",
//! arXiv 2007.00072, calls it Q).

use crate::unit::{bytes, unit};
use graph::{ContainerId, Graph, Lifetime, Node, NodeKind, Stage, Storage};
use std::collections::BTreeSet;

/// Traffic of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Where the kernel's operators came from.
    pub origin: String,
    /// Forward, backward or optimizer.
    pub stage: Stage,
    /// Bytes read from memory.
    pub read: i64,
    /// Bytes written to memory.
    pub written: i64,
}

/// Traffic of every kernel, in execution order.
pub fn kernel_traffic(graph: &Graph) -> Vec<Traffic> {
    let nodes = graph.single_state().map_or(&[][..], |s| &s.nodes);
    nodes
        .iter()
        .filter(|n| matches!(n.kind, NodeKind::Map(_)))
        .map(|node| Traffic {
            origin: node.origin.to_string(),
            stage: node.stage,
            read: moved(graph, &read_from_memory(node)),
            written: moved(graph, &node.writes()),
        })
        .collect()
}

/// Containers a kernel needs from before it: read, and not made by an earlier member.
fn read_from_memory(node: &Node) -> Vec<ContainerId> {
    let written = node.writes();
    let reads = node.reads();
    if unit(node).is_some() {
        return reads;
    }
    reads
        .into_iter()
        .filter(|id| !written.contains(id))
        .collect()
}

fn moved(graph: &Graph, ids: &[ContainerId]) -> i64 {
    ids.iter()
        .filter(|id| graph.container(**id).storage != Storage::Local)
        .map(|id| bytes(graph, *id))
        .sum()
}

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
