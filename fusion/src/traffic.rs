//! The least bytes that a program must move: its inputs, read once, and its outputs, written once
//! ("Data Movement Is All You Need", arXiv 2007.00072, calls it Q).

use crate::unit::bytes;
use graph::{ContainerId, Graph, Lifetime, Touched, traffic};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes that no schedule can avoid moving: outputs, and inputs that are read. Only elements that are read for any data
/// count, so a table that is read by lookups counts as zero.
pub fn lower_bound(graph: &Graph) -> i64 {
    let nodes = graph.single_state().map_or(&[][..], |s| &s.nodes);
    let outputs: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    let mut read: BTreeMap<ContainerId, Touched> = BTreeMap::new();
    for node in nodes {
        for (id, touched) in traffic(graph, node).reads {
            let is_given = graph.container(id).lifetime != Lifetime::Transient;
            if is_given && !outputs.contains(&id) {
                read.entry(id).or_default().add(&touched);
            }
        }
    }
    let written: i64 = outputs.iter().map(|id| bytes(graph, *id)).sum();
    written + read.values().map(Touched::sure_bytes).sum::<i64>()
}
