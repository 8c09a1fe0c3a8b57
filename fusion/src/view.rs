//! Reshapes disappear: both sides of a `reshape` are given one common, finest shape.
//!
//! Before: `T: [8, 16, 64]; V = reshape(T): [8, 16, 4, 16]; … V[b, l, h, d] …`.
//! After: `T: [8, 16, 4, 16]`, written and read with four indices, and no `V`.
//! Legal because both are row-major over the same bytes: an index `e` along a dimension of size
//! `f0·f1` equals indices `(e0, e1)` with `e = e0·f1 + e1`, `0 ≤ e1 < f1`. A map parameter that is such an
//! index is split in two. Saves the reads and writes of a copy, and lets the maps on both sides
//! fuse. Where an index cannot be taken apart the reshape stays and becomes an alias of its input.

use graph::{
    ContainerId, Expr, Graph, Index, Layout, Library, Lifetime, Map, Memlet, Node, NodeKind, Param,
    SymExpr, Symbol, Tensor,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Merges containers across reshapes; reshapes that cannot go stay as nodes.
pub fn merge_views(graph: &mut Graph, nodes: &mut Vec<Node>) {
    let mut at = 0;
    while at < nodes.len() {
        if let Some((from, to)) = reshape_of(&nodes[at])
            && merge(graph, nodes, at, from, to).is_some()
        {
            continue;
        }
        at += 1;
    }
}

/// Containers indexed by `p0·f + p1` at some dimension, because a map's parameter was split for the
/// sake of another container, are split at that dimension too, so that indices stay plain.
pub fn split_composite_dims(graph: &mut Graph, nodes: &mut [Node]) {
    let mut users: BTreeMap<ContainerId, Vec<usize>> = BTreeMap::new();
    for (at, node) in nodes.iter().enumerate() {
        let used: BTreeSet<ContainerId> = node.reads().into_iter().chain(node.writes()).collect();
        for id in used {
            users.entry(id).or_default().push(at);
        }
    }
    let mut refused = BTreeSet::new();
    // A node without such an index gets one only by a change.
    let mut unseen: BTreeSet<usize> = (0..nodes.len()).collect();
    while let Some(at) = unseen.first().copied() {
        let Some((id, fine)) = composite_container(graph, &nodes[at], &refused) else {
            unseen.remove(&at);
            continue;
        };
        let touched = users.get(&id).map_or(&[][..], Vec::as_slice);
        let refined = constant_sizes(graph, id).and_then(|old| {
            let refine = |at: &usize| -> Option<Node> {
                let mut node = nodes[*at].clone();
                refine_node(&mut node, id, &old, &fine)?;
                Some(node)
            };
            touched.iter().map(refine).collect::<Option<Vec<_>>>()
        });
        match refined {
            Some(all) => {
                for (at, node) in touched.iter().zip(all) {
                    nodes[*at] = node;
                }
                unseen.extend(touched);
                set_shape(graph, id, &fine);
            }
            None => {
                refused.insert(id);
            }
        }
    }
}

/// The first container, not refused before, with a dimension that a map indexes by a sum of digits
/// (`p0·f + p1`), and the shape that gives each digit its own dimension.
fn composite_container(
    graph: &Graph,
    node: &Node,
    refused: &BTreeSet<ContainerId>,
) -> Option<(ContainerId, Vec<i64>)> {
    let NodeKind::Map(map) = &node.kind else {
        return None;
    };
    let mut found = None;
    for_memlets(map, &mut |m| {
        let allowed = !refused.contains(&m.container) && m.fill.is_none();
        if found.is_some() || !allowed {
            return;
        }
        let Some(sizes) = constant_sizes(graph, m.container) else {
            return;
        };
        let split: Option<Vec<Vec<i64>>> = m
            .subset
            .iter()
            .zip(&sizes)
            .map(|(index, size)| match index {
                Index::At(e) => digit_factors(e, *size, map),
                Index::Data(_) => Some(vec![*size]),
            })
            .collect();
        if let Some(split) = split.filter(|s| s.iter().any(|f| f.len() > 1)) {
            let ones = |n: &i64| *n != 1;
            found = Some((
                m.container,
                split.into_iter().flatten().filter(ones).collect(),
            ));
        }
    });
    found
}

/// The factors of `size` if the index is `Σ p_k·Π f_{k+1…}` with each `p_k` of size `f_k`; the size
/// itself for any other index.
fn digit_factors(e: &SymExpr, size: i64, map: &Map) -> Option<Vec<i64>> {
    let whole = Some(vec![size]);
    let Some((mut terms, 0)) = e.as_affine() else {
        return whole;
    };
    if terms.len() < 2 {
        return whole;
    }
    terms.sort_by_key(|(_, c)| -c);
    let mut factors = Vec::new();
    let mut stride = size;
    for (symbol, c) in &terms {
        let param = map.params.iter().find(|p| p.name == *symbol)?;
        let range = param.size.as_const()?;
        if *c <= 0 || c * range != stride {
            return whole;
        }
        factors.push(range);
        stride = *c;
    }
    if stride == 1 { Some(factors) } else { whole }
}

fn reshape_of(node: &Node) -> Option<(ContainerId, ContainerId)> {
    match &node.kind {
        NodeKind::Library(Library {
            op,
            inputs,
            outputs,
            ..
        }) if op == "reshape" => Some((*inputs.first()?.as_ref()?, *outputs.first()?.as_ref()?)),
        _ => None,
    }
}

/// Gives `from` and `to` one shape and removes node `at`; `None` (nothing changed) if impossible.
fn merge(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    at: usize,
    from: ContainerId,
    to: ContainerId,
) -> Option<()> {
    let old_from = constant_sizes(graph, from)?;
    let old_to = constant_sizes(graph, to)?;
    let fine = common_refinement(&old_from, &old_to)?;
    let is_output = |id| graph.outputs.iter().any(|o| o.container == id);
    let made_here = graph.container(from).lifetime == Lifetime::Transient;
    if is_output(to) && (!made_here || is_output(from)) {
        return None;
    }
    // Other reshapes of the same containers see a container, not its shape: they are untouched.
    let mut changed: BTreeMap<usize, Node> = BTreeMap::new();
    for (i, node) in nodes.iter().enumerate() {
        let touches = |id| node.reads().contains(&id) || node.writes().contains(&id);
        if i == at || reshape_of(node).is_some() || !(touches(from) || touches(to)) {
            continue;
        }
        let mut node = node.clone();
        refine_node(&mut node, from, &old_from, &fine)?;
        refine_node(&mut node, to, &old_to, &fine)?;
        rename_container(&mut node, to, from);
        changed.insert(i, node);
    }
    for (i, node) in changed {
        nodes[i] = node;
    }
    for node in nodes.iter_mut() {
        rename_container(node, to, from);
    }
    for output in &mut graph.outputs {
        if output.container == to {
            output.container = from;
        }
    }
    set_shape(graph, from, &fine);
    nodes.remove(at);
    Some(())
}

fn set_shape(graph: &mut Graph, id: ContainerId, sizes: &[i64]) {
    let c = graph.container_mut(id);
    c.shape = sizes.iter().map(|n| SymExpr::constant(*n)).collect();
    c.layout = Layout::row_major(sizes.len());
    if let Lifetime::Constant(value) = &c.lifetime {
        let shape = sizes.iter().map(|n| *n as usize).collect();
        c.lifetime = Lifetime::Constant(Arc::new(Tensor {
            shape,
            ..(**value).clone()
        }));
    }
}

fn constant_sizes(graph: &Graph, id: ContainerId) -> Option<Vec<i64>> {
    let c = graph.container(id);
    if !c.layout.is_row_major() {
        return None;
    }
    c.shape.iter().map(SymExpr::as_const).collect()
}

/// The coarsest shape without sizes of 1 from which both result by merging adjacent dimensions; `None` if there is
/// none.
fn common_refinement(a: &[i64], b: &[i64]) -> Option<Vec<i64>> {
    // If the product of the sizes overflows, there is none.
    let boundaries = |s: &[i64]| {
        let mut product = 1i64;
        let mut all = vec![1];
        for n in s.iter().rev() {
            product = product.checked_mul(*n)?;
            all.push(product);
        }
        Some(all)
    };
    let mut cuts = boundaries(a)?;
    cuts.extend(boundaries(b)?);
    cuts.sort_unstable();
    cuts.dedup();
    if cuts.first().is_some_and(|least| *least < 1) {
        return None;
    }
    let mut fine = Vec::new();
    for pair in cuts.windows(2) {
        if pair[1] % pair[0] != 0 {
            return None;
        }
        fine.push(pair[1] / pair[0]);
    }
    fine.reverse();
    Some(fine)
}

/// Splits every access of `id` from the `old` to the `fine` shape.
fn refine_node(node: &mut Node, id: ContainerId, old: &[i64], fine: &[i64]) -> Option<()> {
    let groups = group_factors(old, fine)?;
    let NodeKind::Map(map) = &mut node.kind else {
        return None;
    };
    // First the parameters that must be split, then the indices.
    loop {
        let mut to_split: Option<(Symbol, Vec<i64>)> = None;
        for_memlets(map, &mut |m| {
            if m.container == id {
                for (index, factors) in m.subset.iter().zip(&groups) {
                    if let (Index::At(e), true) = (index, factors.len() > 1)
                        && let Some(s) = e.as_symbol()
                    {
                        to_split.get_or_insert((s.clone(), factors.clone()));
                    }
                }
            }
        });
        let Some((symbol, factors)) = to_split else {
            break;
        };
        split_param(map, &symbol, &factors)?;
    }
    let ranges: BTreeMap<Symbol, i64> = map
        .params
        .iter()
        .map(|p| Some((p.name.clone(), p.size.as_const()?)))
        .collect::<Option<_>>()?;
    let mut possible = true;
    for_memlets_mut(map, &mut |m| {
        if m.container == id && possible {
            match refined_subset(m, &groups, &ranges) {
                Some(subset) => m.subset = subset,
                None => possible = false,
            }
        }
    });
    possible.then_some(())
}

/// For each dimension of `old`, the dimensions of `fine` that it consists of (none for size 1).
fn group_factors(old: &[i64], fine: &[i64]) -> Option<Vec<Vec<i64>>> {
    let mut rest = fine;
    let mut groups = Vec::new();
    for size in old {
        let mut product = 1;
        let mut factors = Vec::new();
        while product < *size {
            let (first, tail) = rest.split_first()?;
            product = i64::checked_mul(product, *first)?;
            factors.push(*first);
            rest = tail;
        }
        if product != *size {
            return None;
        }
        groups.push(factors);
    }
    rest.is_empty().then_some(groups)
}

fn refined_subset(
    memlet: &Memlet,
    groups: &[Vec<i64>],
    ranges: &BTreeMap<Symbol, i64>,
) -> Option<Vec<Index>> {
    let mut subset = Vec::new();
    for (index, factors) in memlet.subset.iter().zip(groups) {
        match (factors.len(), index) {
            // A guarded index along a dimension of size one could be outside, so such reshapes stay.
            (0, Index::At(e)) if e.is_zero() => {}
            (0, _) => return None,
            (1, index) => subset.push(index.clone()),
            (_, Index::Data(_)) => return None,
            (_, Index::At(_)) if memlet.fill.is_some() => return None,
            (_, Index::At(e)) => {
                subset.extend(digits(e, factors, ranges)?.into_iter().map(Index::At));
            }
        }
    }
    Some(subset)
}

/// `e` as digits in the mixed radix of `factors`, if its terms fall apart that way.
fn digits(e: &SymExpr, factors: &[i64], ranges: &BTreeMap<Symbol, i64>) -> Option<Vec<SymExpr>> {
    let (mut terms, mut constant) = e.as_affine()?;
    let mut result = Vec::new();
    for k in 0..factors.len() {
        let stride: i64 = factors[k + 1..].iter().product();
        let (here, rest): (Vec<_>, Vec<_>) = terms.into_iter().partition(|(_, c)| c % stride == 0);
        let shift = constant.div_euclid(stride);
        constant -= shift * stride;
        let digit = here.iter().fold(SymExpr::constant(shift), |d, (s, c)| {
            d + SymExpr::symbol(s.clone()) * (c / stride)
        });
        if span(&digit, ranges)? >= factors[k] {
            return None;
        }
        result.push(digit);
        terms = rest;
    }
    (terms.is_empty() && constant == 0).then_some(result)
}

/// Largest value of an affine expression whose smallest is not negative.
fn span(e: &SymExpr, ranges: &BTreeMap<Symbol, i64>) -> Option<i64> {
    let (terms, constant) = e.as_affine()?;
    let mut high = constant;
    for (symbol, c) in terms {
        if c < 0 {
            return None;
        }
        high += c * (ranges.get(&symbol)? - 1);
    }
    (constant >= 0).then_some(high)
}

/// Replaces parameter `p` of size `Π factors` by one parameter for each factor.
fn split_param(map: &mut Map, symbol: &Symbol, factors: &[i64]) -> Option<()> {
    let at = map.params.iter().position(|p| p.name == *symbol)?;
    let size: i64 = factors.iter().product();
    if map.params[at].size.as_const() != Some(size) {
        return None;
    }
    let mut whole = SymExpr::default();
    let mut parts = Vec::new();
    for (k, factor) in factors.iter().enumerate() {
        let name = Symbol::new(format!("{symbol}_{k}"));
        let stride: i64 = factors[k + 1..].iter().product();
        whole = whole + SymExpr::symbol(name.clone()) * stride;
        parts.push(Param {
            name,
            size: SymExpr::constant(*factor),
        });
    }
    map.params.splice(at..=at, parts);
    substitute_symbol(map, symbol, &whole);
    Some(())
}

/// Replaces a parameter by an expression in every index and expression of a map's body.
pub(crate) fn substitute_symbol(map: &mut Map, symbol: &Symbol, by: &SymExpr) {
    let replace = |s: &Symbol| (s == symbol).then(|| by.clone());
    for_memlets_mut(map, &mut |m| {
        for index in &mut m.subset {
            if let Index::At(e) = index {
                *e = e.substitute(&replace);
            }
        }
    });
    for node in &mut map.body {
        node.visit_tasklets_mut(&mut |t| {
            for (_, expr) in &mut t.outputs {
                *expr = expr.map_leaves(&|leaf| match leaf {
                    Expr::Index(e) => Some(Expr::Index(e.substitute(&replace))),
                    _ => None,
                });
            }
        });
    }
}

fn for_memlets(map: &Map, f: &mut dyn FnMut(&Memlet)) {
    for node in &map.body {
        node.visit_tasklets(&mut |t| {
            t.inputs.iter().for_each(&mut *f);
            t.outputs.iter().for_each(|(m, _)| f(m));
        });
    }
}

pub(crate) fn for_memlets_mut(map: &mut Map, f: &mut dyn FnMut(&mut Memlet)) {
    for node in &mut map.body {
        node.visit_tasklets_mut(&mut |t| {
            t.inputs.iter_mut().for_each(&mut *f);
            t.outputs.iter_mut().for_each(|(m, _)| f(m));
        });
    }
}

fn rename_container(node: &mut Node, from: ContainerId, to: ContainerId) {
    match &mut node.kind {
        NodeKind::Map(map) => for_memlets_mut(map, &mut |m| {
            if m.container == from {
                m.container = to;
            }
        }),
        NodeKind::Library(l) => {
            let all = l.inputs.iter_mut().chain(&mut l.outputs).flatten();
            all.filter(|id| **id == from).for_each(|id| *id = to);
        }
        NodeKind::Tasklet(_) => {}
    }
}

/// Parameters of size one become the constant 0.
pub fn drop_unit_params(nodes: &mut [Node]) {
    for node in nodes {
        if let NodeKind::Map(map) = &mut node.kind {
            let ones: Vec<Symbol> = map
                .params
                .iter()
                .filter(|p| p.size.as_const() == Some(1))
                .map(|p| p.name.clone())
                .collect();
            for symbol in ones {
                substitute_symbol(map, &symbol, &SymExpr::constant(0));
                map.params.retain(|p| p.name != symbol);
            }
        }
    }
}

#[cfg(test)]
mod tests;
