//! Order of dimensions of what matrix products hand to each other.
//!
//! Two dimensions of an operand that play the same part in a product (both rows, both columns, both
//! summed) act as one long dimension when they are adjacent in memory in every array that has
//! them. A container that a product writes or reads, such as attention's context `[batch, head,
//! position, feature]` before the output projection, or the gradients of queries, keys and values
//! stacked as `[3, batch, head, position, feature]`, gets the order with most such merges; its last
//! dimension stays fastest. Nothing else about the products changes.

use graph::{ContainerId, Graph, Index, Layout, Lifetime, Memlet, Symbol, Tasklet};
use std::collections::BTreeSet;

/// Most dimensions of a container whose orders are tried: six factorial of them. What has more
/// stays row-major.
const MAX_RANK: usize = 7;

/// Gives containers of products the order in which most dimensions merge; those changed.
pub fn reorder(
    graph: &mut Graph,
    owned: &BTreeSet<ContainerId>,
    aliased: &BTreeSet<ContainerId>,
) -> Vec<ContainerId> {
    let Some(state) = graph.single_state() else {
        return Vec::new();
    };
    let (mut products, mut others): (Vec<Tasklet>, Vec<Tasklet>) = Default::default();
    for node in &state.nodes {
        node.visit_tasklets(&mut |t| match is_product(t) {
            true => products.push(t.clone()),
            false => others.push(t.clone()),
        });
    }
    let made: BTreeSet<ContainerId> = products.iter().map(|t| written(t).container).collect();
    // What follows a product element by element runs on the product's blocks, and keeps their order.
    let follows = |t: &&Tasklet| {
        let same = |m: &Memlet| made.contains(&m.container) && m.subset == written(t).subset;
        t.outputs.len() == 1 && t.inputs.iter().any(same)
    };
    let following: BTreeSet<ContainerId> = others
        .iter()
        .filter(follows)
        .map(|t| written(t).container)
        .collect();
    let touched: BTreeSet<ContainerId> = products
        .iter()
        .flat_map(|t| arrays(t).map(|m| m.container))
        .filter(|id| !following.contains(id))
        .filter(|id| !owned.contains(id) && !aliased.contains(id))
        .collect();
    let mut changed = Vec::new();
    for id in touched {
        let c = graph.container(id);
        let searched = (3..=MAX_RANK).contains(&c.shape.len());
        if c.lifetime != Lifetime::Transient || !c.layout.is_row_major() || !searched {
            continue;
        }
        let uses: Vec<&Tasklet> = products.iter().filter(|t| touches(t, id)).collect();
        let best = orders(c.shape.len())
            .into_iter()
            .filter_map(Layout::from_order)
            .map(|layout| (merges(graph, id, &layout, &uses), layout))
            // The first of equals: row-major comes first.
            .reduce(|best, next| if next.0 > best.0 { next } else { best });
        if let Some((_, layout)) = best
            && !layout.is_row_major()
        {
            graph.container_mut(id).layout = layout;
            changed.push(id);
        }
    }
    changed
}

fn written(t: &Tasklet) -> &Memlet {
    &t.outputs[0].0
}

fn is_product(t: &Tasklet) -> bool {
    let plain = |m: &Memlet| m.fill.is_none() && m.subset.iter().all(|i| symbol(i).is_some());
    // One read that is squared is no product of operands.
    t.inputs.len() == 2
        && t.summed_product()
            .is_some_and(|p| [p.a, p.b, p.out].into_iter().all(plain))
}

fn symbol(index: &Index) -> Option<&Symbol> {
    match index {
        Index::At(e) => e.as_symbol(),
        Index::Data(_) => None,
    }
}

fn touches(t: &Tasklet, id: ContainerId) -> bool {
    arrays(t).iter().any(|m| m.container == id)
}

fn arrays(t: &Tasklet) -> [&Memlet; 3] {
    [&t.inputs[0], &t.inputs[1], written(t)]
}

/// Permutations of `0..rank` that keep the last dimension last, row-major first.
fn orders(rank: usize) -> Vec<Vec<usize>> {
    let mut all = vec![Vec::new()];
    for _ in 1..rank {
        all = all
            .into_iter()
            .flat_map(|o: Vec<usize>| {
                (0..rank - 1)
                    .filter(|d| !o.contains(d))
                    .map(|d| o.iter().copied().chain([d]).collect())
                    .collect::<Vec<_>>()
            })
            .collect();
    }
    for order in &mut all {
        order.push(rank - 1);
    }
    all
}

/// Pairs of neighbouring dimensions that act as one, over all products that touch the container.
fn merges(graph: &Graph, id: ContainerId, layout: &Layout, uses: &[&Tasklet]) -> usize {
    let mut count = 0;
    for t in uses {
        let all = arrays(t);
        for own in all.iter().filter(|m| m.container == id) {
            for pair in layout.order().windows(2) {
                let (Some(outer), Some(inner)) =
                    (symbol(&own.subset[pair[0]]), symbol(&own.subset[pair[1]]))
                else {
                    continue;
                };
                let fits = |m: &&Memlet| {
                    let order = if m.container == id {
                        layout
                    } else {
                        &graph.container(m.container).layout
                    };
                    adjacent(m, order, outer, inner)
                };
                count += usize::from(all.iter().all(fits));
            }
        }
    }
    count
}

/// Whether an array has both or neither, and both only as neighbours in memory.
fn adjacent(m: &Memlet, layout: &Layout, outer: &Symbol, inner: &Symbol) -> bool {
    let place = |s: &Symbol| {
        let d = m.subset.iter().position(|i| symbol(i) == Some(s))?;
        layout.order().iter().position(|o| *o == d)
    };
    match (place(outer), place(inner)) {
        (Some(a), Some(b)) => a + 1 == b,
        (None, None) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
