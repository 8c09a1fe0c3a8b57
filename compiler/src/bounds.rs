//! Lower bounds: what a kernel must move and how long it must take, whatever its schedule.
//!
//! Compulsory bytes are those of the elements that it reads and writes, each once. A product of matrices in a
//! cache of S elements moves at least 2·m·n·k/√S + m·n elements to and from it (Kwasniewski et al., "Red-Blue
//! Pebbling Revisited", arXiv 1908.09606, theorem 2, with the result written once); that holds where no operand
//! has a window, in which one element serves several points. The roofline is the longer of two times: that of moving
//! the compulsory bytes, and that of the products of the form with the fewest. How much of the memory's best a kernel
//! or a program reaches is MUE = Q/D · B/B̂ · 100 ("Data Movement Is All You Need", arXiv 2007.00072), with Q the bytes
//! it must move, D those it moves in the time taken, B their rate and B̂ the memory's.

use crate::report::bytes;
use graph::{
    ContainerId, DType, Graph, Machine, Node, NodeKind, Storage, Touched, Traffic, traffic,
};
use kernels::contraction::{Contraction, least_flops};
use kernels::lowering::KernelInfo;
use kernels::recognize::{Recognized, recognize};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Lower bounds of one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Bound {
    /// Bytes of the elements that it reads and writes, each once. Elements that may be left out, depending on data, do
    /// not count.
    pub compulsory_bytes: i64,
    /// Bytes that its product moves between a core's own cache and the memory behind it; 0 without a product, or with
    /// one that has windows.
    pub cache_bytes: i64,
    /// Microseconds of moving the compulsory bytes from memory, or of multiplying.
    pub roofline_us: f64,
}

/// The bounds of a top-level node on `threads` threads of a machine.
pub fn bound(graph: &Graph, node: &Node, machine: &Machine, threads: usize) -> Bound {
    let compulsory_bytes = touched(graph, node).values().sum();
    let product = product(graph, node);
    let are_bf16 = product.as_ref().is_some_and(|found| {
        let operands = [found.a, found.b].map(|id| graph.container(id).dtype);
        operands == [DType::BF16; 2]
    });
    let products = if are_bf16 { DType::BF16 } else { DType::F32 };
    let cache_bytes = product
        .as_ref()
        .map_or(0, |found| pebbling_bytes(graph, found, machine.l2.bytes));
    let product = product.map(|found| found.contraction);
    let operations = product.as_ref().map_or(0.0, |c| least_flops(c) as f64);
    let rate = machine.product_rate(products) as f64 * threads.max(1) as f64;
    let moving = compulsory_bytes as f64 / machine.memory.rate(threads);
    Bound {
        compulsory_bytes,
        cache_bytes,
        roofline_us: moving.max(operations / rate),
    }
}

/// The contraction that a node holds or is.
fn product(graph: &Graph, node: &Node) -> Option<Recognized> {
    match &node.kind {
        NodeKind::Map(map) if map.params.is_empty() => {
            map.body.iter().find_map(|member| recognize(graph, member))
        }
        _ => recognize(graph, node),
    }
}

fn volume(c: &Contraction) -> f64 {
    c.dims.iter().map(|d| *d as f64).product()
}

/// Bytes between a cache and the memory behind it; 0 for a contraction with windows. Where the types differ, the
/// smallest one counts: the cache holds at most that many elements, and each moved element has at least its bytes.
fn pebbling_bytes(graph: &Graph, found: &Recognized, cache_bytes: u64) -> i64 {
    let c = &found.contraction;
    let [a, b, of_result] =
        [found.a, found.b, found.out].map(|id| graph.container(id).dtype.bytes() as f64);
    let least = a.min(b).min(of_result);
    let operands = [&c.a, &c.b, &c.out];
    if operands
        .iter()
        .any(|o| o.axes.iter().any(|axis| axis.terms.len() > 1))
    {
        return 0;
    }
    let has = |n: usize, dim: usize| {
        let mut terms = operands[n].axes.iter().flat_map(|axis| &axis.terms);
        terms.any(|t| t.0 == dim)
    };
    let result: f64 = (0..c.dims.len())
        .filter(|d| has(2, *d))
        .map(|d| c.dims[d] as f64)
        .product();
    let cache_elements = (cache_bytes as f64 / least).max(1.0);
    (2.0 * volume(c) / cache_elements.sqrt() * least + result * of_result) as i64
}

/// Bytes of the elements that a kernel reads from or writes to memory, by container.
pub fn touched(graph: &Graph, node: &Node) -> BTreeMap<ContainerId, i64> {
    let Traffic { reads, writes } = traffic(graph, node);
    let mut found = BTreeMap::new();
    for (id, touched) in reads.iter().chain(&writes) {
        let most = found.entry(*id).or_insert(0);
        *most = touched.least_bytes().max(*most);
    }
    found
}

/// Bytes that a kernel reads and writes, for each container in the order in which it lists them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes of each container that it reads.
    pub reads: Vec<i64>,
    /// Bytes of each container that it writes.
    pub writes: Vec<i64>,
}

/// What each kernel moves. A lookup or a slice moves no more than the elements that its indices can reach. A kernel
/// that is only a part of a node moves whole containers.
pub fn moved(graph: &Graph, kernels: &[KernelInfo]) -> Vec<Moved> {
    let nodes = graph.single_state().map_or(&[][..], |state| &state.nodes);
    let mut writers = BTreeMap::new();
    for node in nodes {
        for id in node.writes() {
            writers.entry(id).or_insert_with(Vec::new).push(node);
        }
    }
    kernels
        .iter()
        .map(|info| {
            let known = whole_node(graph, info, &writers).map(|node| traffic(graph, node));
            let Traffic { reads, writes } = known.unwrap_or_default();
            let whole = |id: &ContainerId| bytes(graph, [id]);
            let read = |id: &ContainerId| reads.get(id).map_or(whole(id), Touched::most_bytes);
            let written = |id: &ContainerId| match writes.get(id) {
                // What data leaves out was written before.
                Some(touched) if !touched.depends_on_data() => touched.most_bytes(),
                _ => whole(id),
            };
            Moved {
                reads: info.reads.iter().map(read).collect(),
                writes: info.writes.iter().map(written).collect(),
            }
        })
        .collect()
}

/// The node that a kernel was made of, if the kernel is the whole node.
fn whole_node<'a>(
    graph: &Graph,
    info: &KernelInfo,
    writers: &BTreeMap<ContainerId, Vec<&'a Node>>,
) -> Option<&'a Node> {
    let stored = |node: &Node, ids: fn(&Node) -> Vec<ContainerId>| -> BTreeSet<ContainerId> {
        let in_memory = |id: &ContainerId| graph.container(*id).storage != Storage::Local;
        ids(node).into_iter().filter(in_memory).collect()
    };
    let [reads, writes] = [&info.reads, &info.writes].map(|ids| ids.iter().copied().collect());
    let without = |ids: &BTreeSet<ContainerId>| -> BTreeSet<ContainerId> { ids - &writes };
    let mut found = writers.get(info.writes.first()?)?.iter().filter(|node| {
        // What it reads back of its own results stays in registers.
        let read = without(&stored(node, Node::reads));
        stored(node, Node::writes) == writes && read == without(&reads)
    });
    let node = found.next()?;
    found.next().is_none().then_some(*node)
}
