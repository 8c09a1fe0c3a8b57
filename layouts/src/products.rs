//! Order of dimensions of the containers that matrix products read and write.
//!
//! Two dimensions of an operand that play the same part in a product (both rows, both columns, both
//! summed) act as one long dimension when they are adjacent in memory in every array that has
//! them. A container that a product writes or reads, such as attention's context `[batch, head,
//! position, feature]` before the output projection, or the gradients of queries, keys and values
//! stacked as `[3, batch, head, position, feature]`, gets the order with most such merges; its last
//! dimension stays fastest. Nothing else about the products changes.
//!
//! If products make all parts of such a stack, the axis of the stack is its slowest dimension, and the parts have the
//! order of the others. Then each product writes its part to its place (`join` in `fusion`), and nothing is copied.

use graph::{ContainerId, Graph, Index, Joined, Layout, Lifetime, Memlet, Symbol, Tasklet};
use std::collections::BTreeSet;

/// Most dimensions of a container whose orders are tried: the last one is fixed, so there are 6! orders. Containers
/// with more dimensions stay row-major.
const MAX_RANK: usize = 7;

/// Gives containers of products the order in which most dimensions merge. Returns those that changed.
pub fn reorder(
    graph: &mut Graph,
    owned: &BTreeSet<ContainerId>,
    aliased: &BTreeSet<ContainerId>,
) -> Vec<ContainerId> {
    let Some(state) = graph.single_state() else {
        return Vec::new();
    };
    let stacks: Vec<Joined> = state
        .nodes
        .iter()
        .filter_map(|n| Joined::of(graph, n))
        .collect();
    let (mut products, mut others): (Vec<Tasklet>, Vec<Tasklet>) = Default::default();
    for node in &state.nodes {
        node.visit_tasklets(&mut |t| match is_product(t) {
            true => products.push(t.clone()),
            false => others.push(t.clone()),
        });
    }
    let made: BTreeSet<ContainerId> = products.iter().map(|t| written(t).container).collect();
    // Element-wise work after a product runs on the product's blocks, and keeps their order.
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
    let is_ours = |graph: &Graph, id: &ContainerId| {
        let c = graph.container(*id);
        let free = !owned.contains(id) && !aliased.contains(id);
        free && c.lifetime == Lifetime::Transient && c.layout.is_row_major()
    };
    // Products that read a slice of something have no plain indices.
    let sliced = others.iter().filter(|t| t.summed_product().is_some());
    let summed: BTreeSet<ContainerId> = products
        .iter()
        .chain(sliced)
        .map(|t| written(t).container)
        .collect();
    let mut joined = BTreeSet::new();
    for stack in stacks {
        let mut parts = stack.parts.iter().map(|p| p.container);
        let all_ours =
            parts.all(|id| summed.contains(&id) && !joined.contains(&id) && is_ours(graph, &id));
        if !all_ours || !touched.contains(&stack.whole) || !is_ours(graph, &stack.whole) {
            continue;
        }
        let Some(order) = order_of_stack(graph, &stack, &products) else {
            continue;
        };
        for (id, layout) in order {
            joined.insert(id);
            if !layout.is_row_major() {
                graph.container_mut(id).layout = layout;
                changed.push(id);
            }
        }
    }
    for id in touched.difference(&joined).copied() {
        let c = graph.container(id);
        let searched = (3..=MAX_RANK).contains(&c.shape.len());
        if c.lifetime != Lifetime::Transient || !c.layout.is_row_major() || !searched {
            continue;
        }
        let best = best_order(graph, id, &products, orders(c.shape.len()));
        if let Some(layout) = best
            && !layout.is_row_major()
        {
            graph.container_mut(id).layout = layout;
            changed.push(id);
        }
    }
    changed
}

/// The given order in which most dimensions merge; the first one if several are equal.
fn best_order(
    graph: &Graph,
    id: ContainerId,
    products: &[Tasklet],
    orders: impl IntoIterator<Item = Vec<usize>>,
) -> Option<Layout> {
    let uses: Vec<&Tasklet> = products.iter().filter(|t| touches(t, id)).collect();
    orders
        .into_iter()
        .filter_map(Layout::from_order)
        .map(|layout| (merges(graph, id, &layout, &uses), layout))
        .reduce(|best, next| if next.0 > best.0 { next } else { best })
        .map(|(_, layout)| layout)
}

/// Orders of a stack, its axis slowest, and of its parts; `None` if the parts cannot be consecutive in memory.
fn order_of_stack(
    graph: &Graph,
    stack: &Joined,
    products: &[Tasklet],
) -> Option<Vec<(ContainerId, Layout)>> {
    let rank = graph.container(stack.whole).shape.len();
    if !(3..=MAX_RANK).contains(&rank) || stack.axis + 1 == rank {
        return None;
    }
    let begins = |order: &Vec<usize>| order[0] == stack.axis;
    let whole = best_order(
        graph,
        stack.whole,
        products,
        orders(rank).into_iter().filter(begins),
    )?;
    let mut found = Vec::new();
    for part in &stack.parts {
        let own_rank = graph.container(part.container).shape.len();
        let dims: Vec<usize> = part.dims.iter().copied().flatten().collect();
        if !dims.is_sorted() {
            return None;
        }
        // Dimensions of size 1 first: they have no place in memory.
        let unit = (0..own_rank).filter(|d| !dims.contains(d));
        let wide = whole.order().iter().filter_map(|d| part.dims[*d]);
        let layout = Layout::from_order(unit.chain(wide).collect())?;
        found.push((part.container, layout));
    }
    found.push((stack.whole, whole));
    Some(found)
}

fn written(t: &Tasklet) -> &Memlet {
    &t.outputs[0].0
}

fn is_product(t: &Tasklet) -> bool {
    let plain = |m: &Memlet| m.fill.is_none() && m.subset.iter().all(|i| symbol(i).is_some());
    // A square of one read is no product of two operands.
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

/// Whether an array has neither of two dimensions, or has both as neighbours in memory.
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
