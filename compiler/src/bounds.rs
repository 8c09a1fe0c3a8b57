//! Lower bounds: what a kernel must move and how long it must take, whatever its schedule.
//!
//! Compulsory bytes are those of the elements that it reads and writes, each once. A product of matrices in a
//! cache of S elements moves at least 2·m·n·k/√S + m·n elements to and from it (Kwasniewski et al., "Red-Blue
//! Pebbling Revisited", arXiv 1908.09606, theorem 2, with the result written once); that holds where no operand
//! has a window, in which one element serves several points. The roofline is the longer of two times: that of moving
//! the compulsory bytes, and that of the products of the form with the fewest. How much of the memory's best a kernel
//! or a program reaches is MUE = Q/D · B/B̂ · 100 ("Data Movement Is All You Need", arXiv 2007.00072), with Q the bytes
//! it must move, D those it moves in the time taken, B their rate and B̂ the memory's.

use graph::{
    ContainerId, DType, Graph, Index, Machine, Map, Memlet, Node, NodeKind, Param, Storage, SymExpr,
};
use kernels::contraction::{Contraction, least_flops};
use kernels::recognize::{Recognized, recognize};
use serde::Serialize;
use std::collections::BTreeMap;

/// Lower bounds of one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Bound {
    /// Bytes of the elements that it reads and writes, each once; those that data says are none.
    pub compulsory_bytes: i64,
    /// Bytes that its product moves between a core's own cache and what lies behind it; 0 where it has none
    /// without windows.
    pub cache_bytes: i64,
    /// Microseconds of moving the compulsory bytes from memory, or of multiplying.
    pub roofline_us: f64,
}

/// The bounds of a top-level node on so many threads of a machine.
pub fn bound(graph: &Graph, node: &Node, machine: &Machine, threads: usize) -> Bound {
    let compulsory_bytes = touched(graph, node).values().sum();
    let product = product(graph, node);
    let are_bf16 = product.as_ref().is_some_and(|found| {
        let operands = [found.a, found.b].map(|id| graph.container(id).dtype);
        operands == [DType::BF16; 2]
    });
    let products = if are_bf16 { DType::BF16 } else { DType::F32 };
    let product = product.map(|found| found.contraction);
    let operations = product.as_ref().map_or(0.0, |c| least_flops(c) as f64);
    let rate = machine.product_rate(products) as f64 * threads.max(1) as f64;
    let moving = compulsory_bytes as f64 / machine.memory.rate(threads);
    Bound {
        compulsory_bytes,
        cache_bytes: product.map_or(0, |c| pebbling_bytes(&c, machine.l2.bytes)),
        roofline_us: moving.max(operations / rate),
    }
}

/// The contraction in a kernel, or that the node itself is.
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

/// Bytes between a cache and what lies behind it; 0 for a contraction with windows.
fn pebbling_bytes(c: &Contraction, cache_bytes: u64) -> i64 {
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
    let cache_elements = (cache_bytes as f64 / 4.0).max(1.0);
    ((2.0 * volume(c) / cache_elements.sqrt() + result) * 4.0) as i64
}

/// Bytes of the elements that a kernel reads from or writes to memory, by container.
pub fn touched(graph: &Graph, node: &Node) -> BTreeMap<ContainerId, i64> {
    let mut found = BTreeMap::new();
    collect(graph, node, &mut Vec::new(), &mut found);
    found
}

fn collect<'a>(
    graph: &Graph,
    node: &'a Node,
    params: &mut Vec<&'a Param>,
    found: &mut BTreeMap<ContainerId, i64>,
) {
    match &node.kind {
        NodeKind::Map(Map {
            params: own, body, ..
        }) => {
            let before = params.len();
            params.extend(own);
            body.iter()
                .for_each(|inner| collect(graph, inner, params, found));
            params.truncate(before);
        }
        NodeKind::Tasklet(tasklet) => {
            let written = tasklet.outputs.iter().map(|(memlet, _)| memlet);
            for memlet in tasklet.inputs.iter().chain(written) {
                let container = graph.container(memlet.container);
                if container.storage != Storage::Local {
                    let bytes = elements(graph, memlet, params) * container.dtype.bytes() as i64;
                    let most = found.entry(memlet.container).or_insert(0);
                    *most = (*most).max(bytes);
                }
            }
        }
        NodeKind::Library(_) => {}
    }
}

/// Elements that a memlet touches in all points of the maps around it: as many as its indices have values, as far
/// as the container has them; none where data says which.
fn elements(graph: &Graph, memlet: &Memlet, params: &[&Param]) -> i64 {
    let mut count: i64 = 1;
    let shape = &graph.container(memlet.container).shape;
    for (index, size) in memlet.subset.iter().zip(shape) {
        let Index::At(index) = index else { return 0 };
        let size = size.as_const().unwrap_or(0);
        count = count.saturating_mul(positions(index, params).min(size));
    }
    count
}

/// Values of an index: of an affine one, at least as many as its largest part has.
fn positions(index: &SymExpr, params: &[&Param]) -> i64 {
    let sizes = params.iter().filter(|p| index.mentions(&p.name));
    let sizes = sizes.filter_map(|p| p.size.as_const());
    match index.as_affine() {
        Some((terms, _)) if terms.len() > 1 => {
            // A window: the steps of one part fill the gaps of the other, or leave some.
            let span = terms.iter().map(|(name, step)| {
                let size = params
                    .iter()
                    .find(|p| p.name == *name)
                    .and_then(|p| p.size.as_const());
                step.abs() * (size.unwrap_or(1) - 1)
            });
            let whole: i64 = span.sum::<i64>() + 1;
            whole.min(sizes.fold(1, i64::saturating_mul))
        }
        Some(_) => sizes.fold(1, i64::saturating_mul),
        // Quotients and remainders: at least one.
        None => 1,
    }
}
