//! What may follow a contraction in its kernel: work on single elements, and sums of its columns.
//!
//! Before: `map (i,c,k): y[i,c] += a[i,k]·b[k,c]; map (i,c): m[c] += y[i,c]·1/n; map (i,c): v[c] += (y[i,c] − m[c])²·1/n`.
//! After: one kernel in which each block of `y` is summed while it is in cache, and the blocks' sums and second
//! moments are combined at the end.
//! Legal when every member covers the result point by point, and a sum is over all its dimensions but the one
//! that lies contiguous. Nothing in the kernel may read a sum, which is final after the last block, but a second
//! moment its own mean. Saves the bytes of the result for each sum.

use super::{Group, Member, Obstacle, common_params, constant, has_conflict};
use crate::unit::unit;
use graph::{
    Container, ContainerId, DType, Expr, Graph, Index, Memlet, Reduction, SymExpr, Symbol, Tasklet,
};
use std::collections::BTreeSet;

/// Most columns that are summed in a kernel: a block's sums stay in the first-level cache.
const MOST_COLUMNS: i64 = 4096;

/// A contraction with what follows it; with `sums` also sums of columns.
pub(super) fn with_epilogue(
    graph: &Graph,
    x: &Group,
    y: &Group,
    sums: bool,
) -> Result<Group, Obstacle> {
    let unsummed = Group {
        writes: x.writes.difference(&x.sums).copied().collect(),
        ..x.clone()
    };
    let pairs = common_params(graph, &unsummed, y)?;
    let wide = |outer: &[i64]| outer.iter().filter(|n| **n != 1).count();
    let common: Vec<i64> = pairs.iter().map(|(k, _)| x.outer[*k]).collect();
    let covers = wide(&common) == wide(&x.outer) && wide(&common) == wide(&y.outer);
    let passed = unsummed.writes.intersection(&y.reads).next();
    if !covers || passed.is_none() {
        return Err(Obstacle::Epilogue);
    }
    let of_output = |k: usize, m: &Member| {
        let paired = pairs.iter().find(|p| p.0 == k);
        paired.map_or(Symbol::new(""), |p| m.bound[p.1].clone())
    };
    let bound = |m: &Member| Member {
        bound: (0..x.outer.len()).map(|k| of_output(k, m)).collect(),
        ..m.clone()
    };
    let added: Vec<Member> = y.members.iter().map(bound).collect();
    let mut group = x.united(y);
    for member in &added {
        let summed = match has_conflict(&member.node) {
            true if !sums => return Err(Obstacle::Epilogue),
            true => column_sums(graph, x, member).ok_or(Obstacle::Epilogue)?,
            false => Vec::new(),
        };
        let reads_sum = member.node.reads().iter().any(|id| group.sums.contains(id));
        if reads_sum && (summed.is_empty() || !is_about_a_mean(graph, x, member)) {
            return Err(Obstacle::Epilogue);
        }
        group.sums.extend(summed);
    }
    let own: BTreeSet<ContainerId> = group.sums.difference(&x.sums).copied().collect();
    let within = |m: &Member| m.node.reads().iter().any(|id| own.contains(id));
    if added.iter().any(within) {
        return Err(Obstacle::Epilogue);
    }
    group.members.extend(added);
    // The product stays first: `y` may have a member that stood before it, a sum of something else.
    group.members[1..].sort_by_key(|m| m.at);
    Ok(group)
}

fn only_write(tasklet: &Tasklet) -> Option<(&Memlet, &Expr)> {
    match tasklet.outputs.as_slice() {
        [(memlet, expr)] => Some((memlet, expr)),
        _ => None,
    }
}

/// The containers of a member that only sums columns of the contraction's result.
fn column_sums(graph: &Graph, x: &Group, member: &Member) -> Option<Vec<ContainerId>> {
    let (map, tasklet) = unit(&member.node)?;
    let mut params = map.params.iter();
    if !params.all(|p| constant(&p.size) == 1 || member.bound.contains(&p.name)) {
        return None;
    }
    let (_, first) = unit(&x.members[0].node)?;
    let product = graph.container(first.outputs.first()?.0.container);
    let sums = tasklet.outputs.iter();
    sums.map(|(write, _)| column_sum(graph, product, member, write))
        .collect()
}

fn column_sum(
    graph: &Graph,
    product: &Container,
    member: &Member,
    write: &Memlet,
) -> Option<ContainerId> {
    let target = graph.container(write.container);
    let fits = write.conflict == Some(Reduction::Sum)
        && write.fill.is_none()
        && target.dtype == product.dtype
        && matches!(target.dtype, DType::F32 | DType::F64);
    let innermost = product.layout.order().iter().rev();
    let column = innermost
        .copied()
        .find(|d| constant(&product.shape[*d]) > 1)?;
    let size = constant(&product.shape[column]);
    let mut n_wide = 0;
    for (index, extent) in write.subset.iter().zip(&target.shape) {
        let Index::At(at) = index else { return None };
        if constant(extent) == 1 && at.is_zero() {
            continue;
        }
        let is_column = at.as_symbol() == member.bound.get(column) && constant(extent) == size;
        if !is_column {
            return None;
        }
        n_wide += 1;
    }
    (fits && n_wide == 1 && size <= MOST_COLUMNS).then_some(write.container)
}

/// Whether the one sum that a member reads is the mean about which it sums squares.
fn is_about_a_mean(graph: &Graph, x: &Group, member: &Member) -> bool {
    let Some((_, square)) = unit(&member.node) else {
        return false;
    };
    let mut sums = square.inputs.iter().enumerate();
    let Some((m, mean)) = sums.find(|(_, read)| x.sums.contains(&read.container)) else {
        return false;
    };
    let others = square.inputs.iter().enumerate();
    let reads_another = others
        .filter(|(i, _)| *i != m)
        .any(|(_, read)| x.sums.contains(&read.container));
    let makes_it = |other: &&Member| other.node.writes().contains(&mean.container);
    let Some(maker) = x.members.iter().find(makes_it) else {
        return false;
    };
    let Some((_, made)) = unit(&maker.node) else {
        return false;
    };
    let (Some((to, mean_expr)), Some((about, square_expr))) =
        (only_write(made), only_write(square))
    else {
        return false;
    };
    let here = |memlet: &Memlet| in_terms_of(memlet, &maker.bound, &member.bound);
    let same = |i: usize, j: usize| here(&made.inputs[i]) == square.inputs[j];
    let at_own_column = here(to).subset == mean.subset && mean.subset == about.subset;
    let columns = constant(&SymExpr::product(&graph.container(to.container).shape));
    let points = x.outer.iter().product::<i64>() / columns.max(1);
    !reads_another
        && at_own_column
        && graph::is_second_moment(mean_expr, square_expr, m, points, &same)
}

/// A memlet of one member with the parameters of another.
fn in_terms_of(memlet: &Memlet, own: &[Symbol], other: &[Symbol]) -> Memlet {
    let mut memlet = memlet.clone();
    for index in &mut memlet.subset {
        if let Index::At(e) = index {
            *e = e.substitute(&|s| {
                let at = own.iter().position(|o| o == s)?;
                Some(SymExpr::symbol(other[at].clone()))
            });
        }
    }
    memlet
}
