//! Inlining: a container that is defined point by point is replaced, where it is read, by its definition.
//!
//! Before: `t[i] = f(x[i]); y[i] = g(t[i], z[i])`. After: `y[i] = g(f(x[i]), z[i])`.
//! Legal because `t` is written once at every index, by one map without conflict resolution, from
//! values that do not change afterwards. Movement (permute, slice, broadcast, pad) is inlined
//! everywhere: index expressions compose. Arithmetic is inlined into maps other than contractions
//! when that moves fewer bytes: without it `t` is written once and read by every reader; with it
//! each reader reads what the definition reads and the reader does not read yet. The values are
//! computed again in each reader, which is how forward values come to be recomputed in the
//! backward pass instead of saved.

use crate::decision::Decision;
use crate::unit::{
    Uses, bytes, definition, elements, expression_cost, is_contraction, is_movement, points, unit,
    unit_tasklet_mut,
};
use graph::{
    ContainerId, Expr, Graph, Index, Lifetime, Memlet, Node, Scalar, SymExpr, Symbol, Tasklet,
};
use std::collections::{BTreeMap, BTreeSet};

/// Most operations a tasklet may grow to, so that recomputation stays cheaper than memory.
const MAX_EXPRESSION_COST: u32 = 400;
/// Most containers one map may read, so that a loop keeps its pointers in registers.
const MAX_INPUTS: usize = 14;

/// Inlines until nothing more pays; what was inlined everywhere disappears.
pub fn inline(graph: &Graph, nodes: &mut Vec<Node>, decisions: &mut Vec<Decision>) {
    let outputs: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    // Producers come before consumers, so one sweep composes whole chains; a second one finds
    // what the first made cheap.
    for _ in 0..2 {
        let mut at = 0;
        while at < nodes.len() {
            for id in nodes[at].writes() {
                inline_container(graph, nodes, at, id, &outputs, decisions);
            }
            at += 1;
        }
        remove_dead(nodes, &outputs);
    }
}

/// Inlines movement only.
pub fn inline_movement(graph: &Graph, nodes: &mut Vec<Node>) {
    let outputs: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    for at in 0..nodes.len() {
        for id in nodes[at].writes() {
            let moved = definition(graph, &nodes[at], id).is_some_and(|d| is_movement(d.expr));
            if moved {
                inline_container(graph, nodes, at, id, &outputs, &mut Vec::new());
            }
        }
    }
    remove_dead(nodes, &outputs);
}

fn inline_container(
    graph: &Graph,
    nodes: &mut [Node],
    at: usize,
    id: ContainerId,
    outputs: &BTreeSet<ContainerId>,
    decisions: &mut Vec<Decision>,
) {
    if graph.container(id).lifetime != Lifetime::Transient {
        return;
    }
    let (before, after) = nodes.split_at_mut(at + 1);
    let producer = &before[at];
    let Some(def) = definition(graph, producer, id) else {
        return;
    };
    let movement = is_movement(def.expr);
    let readers: Vec<usize> = (0..after.len())
        .filter(|r| after[*r].reads().contains(&id))
        .collect();
    let inlined: Vec<Option<Node>> = readers
        .iter()
        .map(|r| inlined_node(graph, producer, id, &after[*r]))
        .collect();
    let kept = inlined.iter().any(Option::is_none) || outputs.contains(&id);
    if !movement {
        // A container that must exist anyway is read rather than computed again.
        if kept || readers.is_empty() {
            return;
        }
        let saved = bytes_saved(graph, producer, id, &readers, after);
        if saved <= 0 {
            return;
        }
        decisions.push(Decision::applied(
            "inline",
            &producer.origin,
            format!("{} is computed where it is read", graph.container(id).name),
            saved,
        ));
    }
    for (r, node) in readers.into_iter().zip(inlined) {
        if let Some(node) = node {
            after[r] = node;
        }
    }
}

/// The reader with every read of `id` replaced; `None` where that is not possible or not wanted.
fn inlined_node(graph: &Graph, producer: &Node, id: ContainerId, reader: &Node) -> Option<Node> {
    let def = definition(graph, producer, id)?;
    let movement = is_movement(def.expr);
    let (map, tasklet) = unit(reader)?;
    if !movement && is_contraction(reader) {
        return None;
    }
    let spread = points(map) / elements(graph, id).max(1);
    if !movement && spread > 1 && expression_cost(def.expr) > 4 {
        return None;
    }
    let mut node = reader.clone();
    let mut position = 0;
    while position < tasklet_len(&node) {
        let hit = unit(&node).is_some_and(|(_, t)| t.inputs[position].container == id);
        if hit {
            replace_input(graph, &mut node, position, producer, id)?;
        }
        position += 1;
    }
    let (_, t) = unit(&node)?;
    let cost: u32 = t.outputs.iter().map(|(_, e)| expression_cost(e)).sum();
    let before: u32 = tasklet
        .outputs
        .iter()
        .map(|(_, e)| expression_cost(e))
        .sum();
    let grew = t.inputs.len() > MAX_INPUTS && t.inputs.len() > tasklet.inputs.len();
    if !movement && ((cost > MAX_EXPRESSION_COST && cost > before) || grew) {
        return None;
    }
    Some(node)
}

fn tasklet_len(node: &Node) -> usize {
    unit(node).map_or(0, |(_, t)| t.inputs.len())
}

/// Replaces input `position` (a read of `id`) by the definition of `id` at that index.
fn replace_input(
    graph: &Graph,
    node: &mut Node,
    position: usize,
    producer: &Node,
    id: ContainerId,
) -> Option<()> {
    let def = definition(graph, producer, id)?;
    let tasklet = unit_tasklet_mut(node)?;
    let read = tasklet.inputs[position].clone();
    let mut replaced: BTreeMap<Symbol, Index> = BTreeMap::new();
    for (param, index) in def.params.iter().zip(&read.subset) {
        if let Some(p) = param {
            replaced.insert(p.clone(), index.clone());
        }
    }
    let base = tasklet.inputs.len();
    let mut inputs = Vec::new();
    for memlet in def.inputs {
        let mut memlet = substitute_memlet(memlet, &replaced, base)?;
        if let Some(fill) = read.fill {
            memlet = guarded_movement(graph, &def, id, memlet, fill)?;
        }
        inputs.push(memlet);
    }
    let value = substitute_expr(def.expr, &replaced, base)?;
    let dtypes: Vec<_> = def
        .inputs
        .iter()
        .map(|m| graph.container(m.container).dtype)
        .collect();
    let stored = graph.container(id).dtype;
    let value = if def.expr.dtype(&dtypes) == stored {
        value
    } else {
        value.cast(stored)
    };
    tasklet.inputs.extend(inputs);
    let is_index = |m: &Memlet| m.subset.contains(&Index::Data(position));
    let scatters = tasklet.outputs.iter().any(|(m, _)| is_index(m));
    let used_as_index = scatters || tasklet.inputs.iter().any(is_index);
    if used_as_index && !is_movement(def.expr) {
        return None;
    }
    if used_as_index {
        // An index read through movement: the data index follows to the moved input.
        let follow = |m: &mut Memlet| {
            for i in &mut m.subset {
                if *i == Index::Data(position) {
                    *i = Index::Data(base);
                }
            }
        };
        tasklet.inputs.iter_mut().for_each(follow);
        tasklet.outputs.iter_mut().for_each(|(m, _)| follow(m));
    }
    for (_, expr) in &mut tasklet.outputs {
        *expr = expr.map_leaves(&|leaf| (*leaf == Expr::In(position)).then(|| value.clone()));
    }
    simplify_expressions(graph, tasklet);
    tidy_inputs(tasklet);
    Some(())
}

/// A guarded read through movement: possible when being outside the moved container is the same as
/// being outside its source, or when both fill with the same value and the source is not larger.
fn guarded_movement(
    graph: &Graph,
    def: &crate::unit::Definition,
    id: ContainerId,
    memlet: Memlet,
    fill: Scalar,
) -> Option<Memlet> {
    if !is_movement(def.expr) || memlet.fill.is_some_and(|f| f != fill) {
        return None;
    }
    let source = &def.inputs[0];
    let sizes = &graph.container(source.container).shape;
    let moved = &graph.container(id).shape;
    let mut seen = BTreeSet::new();
    for (index, size) in source.subset.iter().zip(sizes) {
        let Index::At(at) = index else { return None };
        if at.is_zero() && size.as_const() == Some(1) {
            continue;
        }
        let (terms, _) = at.as_affine()?;
        let [(symbol, 1)] = terms.as_slice() else {
            return None;
        };
        let d = def.params.iter().position(|p| p.as_ref() == Some(symbol))?;
        // Unshifted and of equal size: outside one is outside the other. With a fill of its own
        // (a pad) the moved container must contain the source, so that leaving it leaves both.
        let same = at.as_symbol().is_some() && moved[d] == *size;
        let padded = memlet.fill.is_some() && covers(at, &moved[d], size);
        if !same && !padded {
            return None;
        }
        seen.insert(d);
    }
    // A dimension that the source lacks (a broadcast) would lose its guard.
    let all = def
        .params
        .iter()
        .enumerate()
        .all(|(d, p)| p.is_none() || seen.contains(&d));
    all.then_some(Memlet {
        fill: Some(fill),
        ..memlet
    })
}

/// Whether positions outside `[0, moved)` map outside `[0, source)` under `p + shift`.
fn covers(at: &SymExpr, moved: &SymExpr, source: &SymExpr) -> bool {
    let Some((_, shift)) = at.as_affine() else {
        return false;
    };
    match (moved.as_const(), source.as_const()) {
        (Some(moved), Some(source)) => shift <= 0 && moved + shift >= source,
        _ => false,
    }
}

fn substitute_memlet(
    memlet: &Memlet,
    replaced: &BTreeMap<Symbol, Index>,
    base: usize,
) -> Option<Memlet> {
    let subset = memlet.subset.iter().map(|index| match index {
        Index::Data(d) => Some(Index::Data(base + d)),
        Index::At(e) => match e.as_symbol().and_then(|s| replaced.get(s)) {
            Some(index) => Some(index.clone()),
            None => substitute_affine(e, replaced).map(Index::At),
        },
    });
    Some(Memlet {
        subset: subset.collect::<Option<_>>()?,
        ..memlet.clone()
    })
}

fn substitute_affine(e: &SymExpr, replaced: &BTreeMap<Symbol, Index>) -> Option<SymExpr> {
    let data = |s: &Symbol| matches!(replaced.get(s), Some(Index::Data(_)));
    if e.symbols().iter().any(data) {
        return None;
    }
    Some(e.substitute(&|s| match replaced.get(s) {
        Some(Index::At(e)) => Some(e.clone()),
        _ => None,
    }))
}

fn substitute_expr(expr: &Expr, replaced: &BTreeMap<Symbol, Index>, base: usize) -> Option<Expr> {
    let mut possible = true;
    expr.visit(&mut |e| {
        if let Expr::Index(i) = e {
            possible &= substitute_affine(i, replaced).is_some();
        }
    });
    possible.then(|| {
        expr.map_leaves(&|leaf| match leaf {
            Expr::In(i) => Some(Expr::In(base + i)),
            Expr::Index(i) => substitute_affine(i, replaced).map(Expr::Index),
            _ => None,
        })
    })
}

/// Simplifies a tasklet's expressions, knowing the types of what it reads.
pub fn simplify_expressions(graph: &Graph, tasklet: &mut Tasklet) {
    let dtype = |m: &Memlet| graph.container(m.container).dtype;
    let types: Vec<_> = tasklet.inputs.iter().map(dtype).collect();
    for (_, expr) in &mut tasklet.outputs {
        *expr = expr.simplify_typed(&types);
    }
}

/// Merges equal inputs and drops unused ones.
fn tidy_inputs(tasklet: &mut Tasklet) {
    let data = |m: &Memlet| -> Vec<usize> {
        let at = |i: &Index| match i {
            Index::Data(d) => Some(*d),
            Index::At(_) => None,
        };
        m.subset.iter().filter_map(at).collect()
    };
    let mut used: BTreeSet<usize> = BTreeSet::new();
    for (memlet, expr) in &tasklet.outputs {
        used.extend(expr.inputs());
        used.extend(data(memlet));
    }
    loop {
        let more: Vec<_> = used
            .iter()
            .flat_map(|i| data(&tasklet.inputs[*i]))
            .collect();
        let before = used.len();
        used.extend(more);
        if used.len() == before {
            break;
        }
    }
    let mut kept: Vec<Memlet> = Vec::new();
    let mut renamed: BTreeMap<usize, usize> = BTreeMap::new();
    for i in used {
        let memlet = &tasklet.inputs[i];
        let same = kept
            .iter()
            .position(|k| k == memlet && data(memlet).is_empty());
        renamed.insert(
            i,
            same.unwrap_or_else(|| {
                kept.push(memlet.clone());
                kept.len() - 1
            }),
        );
    }
    let rename = |m: &mut Memlet| {
        for index in &mut m.subset {
            if let Index::Data(d) = index {
                *d = renamed.get(d).copied().unwrap_or(*d);
            }
        }
    };
    kept.iter_mut().for_each(rename);
    tasklet.inputs = kept;
    for (memlet, expr) in &mut tasklet.outputs {
        rename(memlet);
        *expr = expr.map_leaves(&|leaf| match leaf {
            Expr::In(i) => renamed.get(i).map(|n| Expr::In(*n)),
            _ => None,
        });
    }
}

/// Bytes not moved when every reader computes `id` itself.
fn bytes_saved(
    graph: &Graph,
    producer: &Node,
    id: ContainerId,
    readers: &[usize],
    nodes: &[Node],
) -> i64 {
    let own = bytes(graph, id);
    let inputs = producer.reads();
    let read = |ids: &[ContainerId]| -> i64 { ids.iter().map(|i| bytes(graph, *i)).sum() };
    let materialized = read(&inputs) + own + own * readers.len() as i64;
    let inlined: i64 = readers
        .iter()
        .map(|r| {
            let already = nodes[*r].reads();
            let extra: Vec<_> = inputs
                .iter()
                .filter(|i| !already.contains(i))
                .copied()
                .collect();
            // A broadcast or gather reads no more than the reader has points.
            read(&extra)
        })
        .sum();
    // Equal traffic: one kernel and one buffer less decides.
    materialized - inlined + 1
}

/// Drops nodes whose results nobody reads.
fn remove_dead(nodes: &mut Vec<Node>, outputs: &BTreeSet<ContainerId>) {
    loop {
        let uses = Uses::of(nodes);
        let before = nodes.len();
        nodes.retain(|n| {
            n.writes()
                .iter()
                .any(|id| outputs.contains(id) || !uses.readers(*id).is_empty())
        });
        if nodes.len() == before {
            return;
        }
    }
}
