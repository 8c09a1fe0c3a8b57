//! Inlining: reads of a container that is defined point by point are replaced with its definition.
//!
//! Before: `t[i] = f(x[i]); y[i] = g(t[i], z[i])`. After: `y[i] = g(f(x[i]), z[i])`.
//! Legal because `t` is written once at every index, by one map without conflict resolution, from
//! values that do not change afterwards. Movement (permute, slice, broadcast, pad) is inlined
//! everywhere, because index expressions compose. The exception is a product whose operand would no longer be indexed
//! by sums of its parameters, as after a roll. The contraction generator could not write it, which costs more than a
//! copy, so it reads a copy. Values that many points look up one by one are stored too (`lookup.rs`). Arithmetic is
//! inlined into maps other than contractions when that moves fewer bytes. Without inlining, `t` is written once, and
//! every reader reads it; with inlining, each reader reads the operands of the definition that it does not read yet.
//! Each reader computes the values again. So the backward pass recomputes forward values instead of saving them.

mod lookup;
mod obstacle;

use crate::decision::{Applied, Decision, Demand, Refusal};
use crate::unit::{
    Definition, bytes, definition, elements, is_blockable, is_contraction, is_movement, points,
    unit, unit_tasklet_mut,
};
use graph::{
    Binary, ContainerId, DType, Expr, Graph, Index, Lifetime, Memlet, Node, NodeKind, Place,
    Recipe, Reduction, Rewrite, SymExpr, Symbol, Tasklet, Unary,
};
pub use obstacle::Obstacle;
use std::collections::{BTreeMap, BTreeSet};

/// Most operations a tasklet may grow to, so that recomputation stays cheaper than memory.
const MAX_EXPRESSION_COST: u32 = 400;
/// Most operations worth doing again for each of several points that read one value.
const MAX_REPEATED_COST: u32 = 4;
/// Most inputs of a tasklet, so that a loop keeps its pointers in registers.
const MAX_INPUTS: usize = 14;

/// Inlines until nothing more pays. Containers that were inlined everywhere disappear.
pub fn inline(
    graph: &Graph,
    nodes: &mut Vec<Node>,
    recipe: &Recipe,
    decisions: &mut Vec<Decision>,
) {
    let outputs: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    let mut refused = BTreeMap::new();
    // Producers come before consumers, so one sweep composes whole chains. A second one inlines
    // what the first made cheap.
    for _ in 0..2 {
        refused.clear();
        let mut at = 0;
        while at < nodes.len() {
            for id in nodes[at].writes() {
                match inline_container(graph, nodes, at, id, (&outputs, recipe)) {
                    Ok(applied) => decisions.extend(applied),
                    Err(refusal) => {
                        refused.insert(id, *refusal);
                    }
                }
            }
            at += 1;
        }
        remove_dead(nodes, &outputs);
    }
    decisions.extend(refused.into_values());
}

/// Inlines movement only.
pub fn inline_movement(graph: &Graph, nodes: &mut Vec<Node>) {
    let outputs: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    for at in 0..nodes.len() {
        for id in nodes[at].writes() {
            let moved =
                definition(graph, &nodes[at], id).is_some_and(|d| is_movement(graph, &d, id));
            if moved {
                // What is refused here is tried, and recorded, again by `inline`.
                let _ = inline_container(graph, nodes, at, id, (&outputs, &Recipe::default()));
            }
        }
    }
    remove_dead(nodes, &outputs);
}

/// Replaces the reads of `id`, which node `at` writes, where that is possible and pays. Returns the decision, if it is
/// worth telling, or the refusal.
fn inline_container(
    graph: &Graph,
    nodes: &mut [Node],
    at: usize,
    id: ContainerId,
    (outputs, recipe): (&BTreeSet<ContainerId>, &Recipe),
) -> Result<Option<Decision>, Box<Decision>> {
    if graph.container(id).lifetime != Lifetime::Transient {
        return Ok(None);
    }
    let (before, after) = nodes.split_at_mut(at + 1);
    let producer = &before[at];
    let Some(def) = definition(graph, producer, id) else {
        return Ok(None);
    };
    let movement = is_movement(graph, &def, id);
    let readers: Vec<usize> = (0..after.len())
        .filter(|r| after[*r].reads().contains(&id))
        .collect();
    if readers.is_empty() {
        return Ok(None);
    }
    let place = || Place::new(Rewrite::Inline, producer, &graph.container(id).name);
    let saved = bytes_saved(graph, producer, id, &readers, after);
    let (memory, again) = recomputed(graph, producer, id, &readers, after);
    let refusal = |obstacle: Obstacle, reader: Option<usize>| {
        let reader = reader.map(|r| after[r].origin.clone());
        let refusal = Refusal::Stored { reader, obstacle };
        let decision = Decision::refused(place(), &producer.origin, refusal, saved);
        Box::new(decision.with_cost(memory, again))
    };
    let demand = match (movement, recipe.override_for(place)) {
        (false, Some(false)) => return Err(refusal(Obstacle::ByRecipe, None)),
        (false, Some(true)) => Demand::ByRecipe,
        _ => Demand::IfItPays,
    };
    let mut inlined: Vec<Result<Node, Obstacle>> = readers
        .iter()
        .map(|r| inlined_node(graph, producer, id, &after[*r], demand))
        .collect();
    let possible: Vec<&Node> = inlined.iter().flatten().collect();
    if let Some(obstacle) = lookup::obstacle(graph, id, &possible)
        && let Err(obstacle) = demand.weigh(obstacle)
    {
        inlined.fill(Err(obstacle));
    }
    let mut results = readers.iter().zip(&inlined);
    let refused = results.find_map(|(r, i)| i.as_ref().err().map(|o| refusal(o.clone(), Some(*r))));
    let mut applied = None;
    if !movement {
        // A container that must exist anyway is read rather than computed again.
        if let Some(refused) = refused {
            return Err(refused);
        }
        if outputs.contains(&id) {
            return Err(refusal(Obstacle::Returned, None));
        }
        if saved <= 0 {
            let weighed = demand.weigh(Obstacle::Traffic(-saved));
            weighed.map_err(|obstacle| refusal(obstacle, None))?;
        }
        let done = Decision::applied(place(), &producer.origin, Applied::Inlined, saved);
        applied = Some(done.with_cost(memory, again));
    }
    for (r, node) in readers.into_iter().zip(inlined) {
        if let Ok(node) = node {
            after[r] = node;
        }
    }
    match refused {
        Some(refused) => Err(refused),
        None => Ok(applied),
    }
}

/// The reader with every read of `id` replaced.
fn inlined_node(
    graph: &Graph,
    producer: &Node,
    id: ContainerId,
    reader: &Node,
    demand: Demand,
) -> Result<Node, Obstacle> {
    if matches!(&reader.kind, NodeKind::Library(l) if l.computed_by().is_some()) {
        return Err(Obstacle::Called);
    }
    let (Some(def), Some((map, tasklet))) = (definition(graph, producer, id), unit(reader)) else {
        return Err(Obstacle::Returned);
    };
    let movement = is_movement(graph, &def, id);
    if !movement && is_contraction(reader) {
        return Err(Obstacle::Product);
    }
    let times = points(map) / elements(graph, id).max(1);
    let cost = def.expr.cost();
    if !movement && times > 1 && cost > MAX_REPEATED_COST {
        demand.weigh(Obstacle::Repeated { times, cost })?;
    }
    let mut node = reader.clone();
    // Each replacement takes one read of `id` away and adds none.
    while let Some(tasklet) = unit_tasklet_mut(&mut node)
        && let Some(position) = tasklet.inputs.iter().position(|m| m.container == id)
    {
        replace_input(graph, tasklet, position, &def, id)?;
    }
    if is_blockable(reader) && !is_blockable(&node) {
        return Err(Obstacle::ProductIndex);
    }
    if is_contraction(reader) && backwards(&node) > backwards(reader) {
        return Err(Obstacle::ProductBackwards);
    }
    if is_contraction(reader) && guarded(&node) > guarded(reader).max(1) {
        return Err(Obstacle::ProductGuard);
    }
    let total = |t: &Tasklet| -> u32 { t.outputs.iter().map(|(_, e)| e.cost()).sum() };
    let Some((_, t)) = unit(&node).filter(|_| !movement) else {
        return Ok(node);
    };
    if total(t) > MAX_EXPRESSION_COST && total(t) > total(tasklet) {
        demand.weigh(Obstacle::Cost(total(t)))?;
    }
    if t.inputs.len() > MAX_INPUTS && t.inputs.len() > tasklet.inputs.len() {
        demand.weigh(Obstacle::Inputs(t.inputs.len()))?;
    }
    Ok(node)
}

/// How many dimensions of arrays a unit reads backwards: every parameter in their index has a negative factor.
fn backwards(node: &Node) -> usize {
    let is_backwards = |i: &&Index| {
        let Index::At(e) = i else { return false };
        let terms = e.as_affine().map(|(terms, _)| terms).unwrap_or_default();
        !terms.is_empty() && terms.iter().all(|(_, factor)| *factor < 0)
    };
    unit(node).map_or(0, |(_, tasklet)| {
        let all = tasklet.inputs.iter().flat_map(|m| &m.subset);
        all.filter(is_backwards).count()
    })
}

/// How many arrays a unit reads or writes at positions that may lie outside of them.
fn guarded(node: &Node) -> usize {
    unit(node).map_or(0, |(_, tasklet)| {
        let written = tasklet.outputs.iter().map(|(m, _)| m);
        let all = tasklet.inputs.iter().chain(written);
        all.filter(|m| m.fill.is_some()).count()
    })
}

/// Replaces input `position` (a read of `id`) by the definition of `id` at that index.
fn replace_input(
    graph: &Graph,
    tasklet: &mut Tasklet,
    position: usize,
    def: &Definition,
    id: ContainerId,
) -> Result<(), Obstacle> {
    let read = tasklet.inputs[position].clone();
    let mut replaced: BTreeMap<Symbol, Index> = BTreeMap::new();
    for (param, index) in def.params.iter().zip(&read.subset) {
        if let Some(p) = param {
            replaced.insert(p.clone(), index.clone());
        }
    }
    let base = tasklet.inputs.len();
    let moved = |m: &Memlet| substitute_memlet(m, &replaced, base).ok_or(Obstacle::DataPosition);
    let mut inputs = def
        .inputs
        .iter()
        .map(moved)
        .collect::<Result<Vec<_>, _>>()?;
    if read.fill.is_some() {
        guard_movement(graph, def, id, &read, &mut inputs)?;
    }
    let value = substitute_expr(def.expr, &replaced, base).ok_or(Obstacle::DataPosition)?;
    let dtypes: Vec<_> = def
        .inputs
        .iter()
        .map(|m| graph.container(m.container).dtype)
        .collect();
    let stored = graph.container(id).dtype;
    let converts = def.expr.dtype(&dtypes) != stored;
    tasklet.inputs.extend(inputs);
    let is_index = |m: &Memlet| m.subset.contains(&Index::Data(position));
    let scatters = tasklet.outputs.iter().any(|(m, _)| is_index(m));
    if scatters || tasklet.inputs.iter().any(is_index) {
        // An index that is read through movement: the data index now names the input that is the value; other inputs
        // only say where the value lies.
        let Expr::In(k) = def.expr else {
            return Err(Obstacle::ComputedIndex);
        };
        if converts {
            return Err(Obstacle::ComputedIndex);
        }
        let follow = |m: &mut Memlet| {
            for i in &mut m.subset {
                if *i == Index::Data(position) {
                    *i = Index::Data(base + k);
                }
            }
        };
        tasklet.inputs.iter_mut().for_each(follow);
        tasklet.outputs.iter_mut().for_each(|(m, _)| follow(m));
    }
    let rounds = matches!(stored, DType::F16 | DType::BF16)
        && !matches!(def.expr, Expr::In(_))
        && is_decided_by(tasklet, position);
    let value = if converts || rounds {
        value.cast(stored)
    } else {
        value
    };
    for (_, expr) in &mut tasklet.outputs {
        *expr = expr.map_leaves(&|leaf| (*leaf == Expr::In(position)).then(|| value.clone()));
    }
    simplify_expressions(graph, tasklet);
    tidy_inputs(tasklet);
    Ok(())
}

/// Whether an input's value is compared, ordered or rounded to a whole number. Then it must be the number that the
/// container would hold: computed again without rounding, it would not equal the maximum that was taken
/// of it elsewhere. Other arithmetic is better off without the rounding.
fn is_decided_by(tasklet: &Tasklet, position: usize) -> bool {
    let holds = |e: &Expr| e.inputs().contains(&position);
    tasklet.outputs.iter().any(|(m, expr)| {
        let mut decides =
            holds(expr) && matches!(m.conflict, Some(Reduction::Max | Reduction::Min));
        expr.visit(&mut |e| {
            decides |= match e {
                Expr::Binary(f, a, b) => {
                    let jumps = f.is_predicate()
                        || matches!(
                            f,
                            Binary::Max | Binary::Min | Binary::FloorDiv | Binary::Mod
                        );
                    jumps && (holds(a) || holds(b))
                }
                Expr::Unary(
                    Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc,
                    a,
                ) => holds(a),
                Expr::Cast(to, a) => !to.is_float() && holds(a),
                _ => false,
            };
        });
        decides
    })
}

/// Gives the moved read the guard of the read it replaces. This is possible if what is outside the moved
/// container is exactly what is outside its source, or if both fill with the same value and
/// the source is not larger.
///
/// Only for a plain copy of one element. A computed value, or one without inputs, has nothing that
/// could be guarded. In a lookup, it is not the index that would be outside.
fn guard_movement(
    graph: &Graph,
    def: &Definition,
    id: ContainerId,
    read: &Memlet,
    moved: &mut [Memlet],
) -> Result<(), Obstacle> {
    let ([source], [memlet], Expr::In(0)) = (def.inputs, moved, def.expr) else {
        return Err(Obstacle::GuardOfComputed);
    };
    if memlet.fill.is_some() && memlet.fill != read.fill {
        return Err(Obstacle::Guard);
    }
    let sizes = &graph.container(source.container).shape;
    let shape = &graph.container(id).shape;
    let mut seen = BTreeSet::new();
    for (index, size) in source.subset.iter().zip(sizes) {
        let Index::At(at) = index else {
            return Err(Obstacle::Guard);
        };
        if at.is_zero() && size.as_const() == Some(1) {
            continue;
        }
        let terms = at.as_affine().map(|(terms, _)| terms).unwrap_or_default();
        let [(symbol, 1)] = terms.as_slice() else {
            return Err(Obstacle::Guard);
        };
        let d = def.params.iter().position(|p| p.as_ref() == Some(symbol));
        let d = d.ok_or(Obstacle::Guard)?;
        // Unshifted and of equal size: outside one is outside the other. With a fill of its own
        // (a pad) the moved container must contain the source, so that leaving it leaves both.
        let same = at.as_symbol().is_some() && shape[d] == *size;
        let padded = memlet.fill.is_some() && covers(at, &shape[d], size);
        if !same && !padded {
            return Err(Obstacle::Guard);
        }
        seen.insert(d);
    }
    // A dimension that the source lacks would lose its guard: a broadcast, or one of size one that
    // is not read at its only position.
    let only = |index: &Index| matches!(index, Index::At(at) if at.is_zero());
    let kept = |d: usize, p: &Option<Symbol>| match p {
        Some(_) => seen.contains(&d),
        None => only(&read.subset[d]),
    };
    if !def.params.iter().enumerate().all(|(d, p)| kept(d, p)) {
        return Err(Obstacle::Guard);
    }
    memlet.fill = read.fill;
    Ok(())
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
pub(crate) fn tidy_inputs(tasklet: &mut Tasklet) {
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
            // Each container counts whole, even if a gather reads a part of it.
            read(&extra)
        })
        .sum();
    // With equal traffic, one kernel and one buffer less decide for inlining.
    materialized - inlined + 1
}

/// Bytes that are no longer kept for the backward pass, and operations done again, when every reader computes
/// `id` itself.
fn recomputed(
    graph: &Graph,
    producer: &Node,
    id: ContainerId,
    readers: &[usize],
    nodes: &[Node],
) -> (i64, i64) {
    let crosses = |r: &usize| nodes[*r].stage != producer.stage;
    let memory = match readers.iter().any(crosses) {
        true => bytes(graph, id),
        false => 0,
    };
    let Some(def) = definition(graph, producer, id) else {
        return (memory, 0);
    };
    let of_reader = |r: &usize| unit(&nodes[*r]).map_or(0, |(map, _)| points(map));
    let all: i64 = readers.iter().map(of_reader).sum();
    let again = (all - elements(graph, id)).max(0);
    (memory, again.saturating_mul(def.expr.cost().into()))
}

/// Drops nodes whose results nobody reads.
fn remove_dead(nodes: &mut Vec<Node>, outputs: &BTreeSet<ContainerId>) {
    loop {
        let read: BTreeSet<ContainerId> = nodes.iter().flat_map(Node::reads).collect();
        let before = nodes.len();
        nodes.retain(|n| {
            let mut writes = n.writes().into_iter();
            writes.any(|id| outputs.contains(&id) || read.contains(&id))
        });
        if nodes.len() == before {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
