//! Global choice of data layout.
//!
//! A convolution reads its input at every tap of a window: with channels contiguous, one vector
//! load serves one tap of many channels, and element-wise neighbours and channel sums run along
//! the same direction. So activations that a convolution reads or writes are laid out
//! channels-last, and so is everything aligned with them through maps; whatever the caller owns
//! keeps the caller's layout. This is the special case of the configuration graph of "Data
//! Movement Is All You Need" (arXiv 2007.00072) in which one choice is best for every contraction;
//! the general problem is not solved here yet. What only matrix products touch is ordered so that
//! the products see few, long dimensions ([`products`]).

mod products;

use graph::{
    ContainerId, Graph, Index, Layout, Lifetime, Memlet, Node, Reduction, SymExpr, Tasklet,
};
use std::collections::BTreeSet;

/// Containers whose layout was changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// Containers now channels-last.
    pub channels_last: Vec<ContainerId>,
    /// Containers of matrix products in another order than row-major.
    pub reordered: Vec<ContainerId>,
}

/// Gives activations around convolutions the channels-last layout. Changes only containers made
/// inside the graph that are not its results.
pub fn assign(graph: &mut Graph) -> Assignment {
    let Some(state) = graph.single_state() else {
        return Assignment::default();
    };
    let mut tasklets = Vec::new();
    for node in &state.nodes {
        node.visit_tasklets(&mut |t| tasklets.push(t));
    }
    let mut marked: BTreeSet<ContainerId> = BTreeSet::new();
    for tasklet in &tasklets {
        marked.extend(convolution_activations(tasklet));
    }
    loop {
        let before = marked.len();
        for tasklet in &tasklets {
            spread(tasklet, &mut marked);
        }
        if marked.len() == before {
            break;
        }
    }
    let aliased = alias_ends(&state.nodes);
    let owned: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    let changed: Vec<ContainerId> = marked
        .into_iter()
        .filter(|id| {
            let c = graph.container(*id);
            c.lifetime == Lifetime::Transient && !owned.contains(id) && !aliased.contains(id)
        })
        .collect();
    for id in &changed {
        let c = graph.container_mut(*id);
        c.layout = Layout::channels_last(c.shape.len());
    }
    let reordered = products::reorder(graph, &owned, &aliased);
    Assignment {
        channels_last: changed,
        reordered,
    }
}

/// Containers on either side of a reshape that stayed: an alias needs row-major order.
fn alias_ends(nodes: &[Node]) -> BTreeSet<ContainerId> {
    let library = |n: &&Node| matches!(n.kind, graph::NodeKind::Library(_));
    nodes
        .iter()
        .filter(library)
        .flat_map(|n| n.reads().into_iter().chain(n.writes()))
        .collect()
}

/// The activations of a convolution in any of its three forms: operands and results of rank three
/// to five that share batch and spatial positions with one another, window or not.
fn convolution_activations(tasklet: &Tasklet) -> Vec<ContainerId> {
    let [(write, _)] = tasklet.outputs.as_slice() else {
        return Vec::new();
    };
    if write.conflict != Some(Reduction::Sum) || tasklet.inputs.len() != 2 {
        return Vec::new();
    }
    let all: Vec<&Memlet> = tasklet.inputs.iter().chain([write]).collect();
    let mut found = Vec::new();
    for (x, y, weights) in [(0, 1, 2), (0, 2, 1), (1, 2, 0)] {
        let (x, y) = (all[x], all[y]);
        // Weights know nothing of the batch; the third array of an attention product does.
        if is_activation_pair(x, y) && !all[weights].subset.iter().any(|i| related(i, &x.subset[0]))
        {
            found.extend([x.container, y.container]);
        }
    }
    found
}

/// Same rank, batch and every spatial dimension related, and either a window somewhere or channels
/// that differ (a pointwise convolution).
fn is_activation_pair(x: &Memlet, y: &Memlet) -> bool {
    let rank = x.subset.len();
    if rank != y.subset.len() || !(3..=5).contains(&rank) {
        return false;
    }
    let windowed = |m: &Memlet| (2..rank).any(|d| is_composite(&m.subset[d]));
    let spatial = (2..rank).all(|d| related(&x.subset[d], &y.subset[d]));
    let batch = related(&x.subset[0], &y.subset[0]);
    let channels_differ = !related(&x.subset[1], &y.subset[1]);
    batch && spatial && (windowed(x) || windowed(y) || (channels_differ && rank >= 4))
}

fn is_composite(index: &Index) -> bool {
    matches!(index, Index::At(e) if e.symbols().len() > 1)
}

fn related(x: &Index, y: &Index) -> bool {
    let (Index::At(x), Index::At(y)) = (x, y) else {
        return false;
    };
    let symbols: Vec<_> = x.symbols();
    let both_fixed = symbols.is_empty() && y.symbols().is_empty();
    both_fixed || symbols.iter().any(|s| y.mentions(s))
}

/// Whatever has the same indices as a marked container is marked too.
fn spread(tasklet: &Tasklet, marked: &mut BTreeSet<ContainerId>) {
    let all = || {
        tasklet
            .inputs
            .iter()
            .chain(tasklet.outputs.iter().map(|(m, _)| m))
    };
    let known: Vec<&Memlet> = all().filter(|m| marked.contains(&m.container)).collect();
    let Some(known) = known.first() else {
        return;
    };
    for m in all() {
        let aligned = m.subset.len() == known.subset.len()
            && m.subset.len() >= 3
            && m.subset
                .iter()
                .zip(&known.subset)
                .all(|(x, y)| related(x, y));
        // A window of weights relates to nothing in its first dimension, so it is never aligned.
        if aligned && !m.subset.iter().all(is_fixed) {
            marked.insert(m.container);
        }
    }
}

fn is_fixed(index: &Index) -> bool {
    matches!(index, Index::At(e) if SymExpr::as_const(e).is_some())
}
