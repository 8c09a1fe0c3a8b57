//! What may come before a contraction in its kernel: element-wise work on an operand.
//!
//! Before: `kernel: map (n,c,h,w): y[n,c,h,w] = relu(x[n,c,h,w]·s[c] + b[c]); kernel: map …: z[…] += y[…]·w[…]`, and
//! `y` kept for the weight's gradient.
//! After: one kernel for each contraction that reads `y`. It computes the elements of `y` that a block needs while it
//! packs them, and zeros where the contraction's window leaves `y`.
//! Legal when only contractions read `y`, each as one of its two operands, and each element of `y` is computed from
//! values that exist when the last of them runs. Saves writing `y`, and reading what it is computed from once;
//! `y` is not kept for the backward pass.
//!
//! If others read `y` too, such as the addition around a residual block, one contraction may compute it and store it.
//! It must be of the same pass and read each element at one point, and no other reader may have to run before it. That
//! saves reading `y` once.
//!
//! This runs after grouping: what could join the kernel that makes its operands has done so, and needs no reading
//! that a prologue would save.

use super::links::Links;
use super::{Group, Member, constant};
use crate::InlineObstacle;
use crate::decision::{Applied, Decision, Demand, Outcome, Refusal, Weighed};
use crate::unit::{bytes, definition, elements, is_blockable, unit};
use graph::{
    Container, ContainerId, DType, Graph, Index, Lifetime, Memlet, Node, NodeKind, Origin, Place,
    Recipe, Rewrite, Stage, Storage,
};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Most operations for an element: several blocks may compute it again.
const MOST_OPERATIONS: u32 = 64;

/// Why a container is stored for the contractions that read it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The messages say it.
pub enum Obstacle {
    #[error("other kernels than products read it")]
    OtherReader,
    #[error("a product reads it twice, or at an index that is not a sum of its loops' positions")]
    Index,
    #[error("products compute operands in the type of their sums only, which is f32 or f64")]
    Type,
    #[error("it is the smaller operand, which is packed again for each block of the larger one")]
    SmallOperand,
    #[error("each element takes {0} operations, and may be computed for several blocks")]
    Operations(u32),
    #[error("it would be computed from `{0}` across its order in memory")]
    Strided(String),
    #[error("the products would read {0} bytes more")]
    Traffic(i64),
    #[error("moving {0} bytes less would save less time than computing it several times takes")]
    Repeated(i64),
    #[error("{0} bytes more would be kept for the backward pass")]
    Kept(i64),
    #[error("the recipe forbids it")]
    ByRecipe,
}

impl Weighed for Obstacle {
    fn is_cost(&self) -> bool {
        match self {
            Obstacle::SmallOperand
            | Obstacle::Operations(_)
            | Obstacle::Strided(_)
            | Obstacle::Traffic(_)
            | Obstacle::Repeated(_)
            | Obstacle::Kept(_)
            | Obstacle::ByRecipe => true,
            Obstacle::OtherReader | Obstacle::Index | Obstacle::Type => false,
        }
    }
}

/// Moves element-wise kernels into the contractions that alone read their results, or that read them first.
pub(super) fn absorb(
    graph: &mut Graph,
    groups: &mut [Option<Group>],
    recipe: &Recipe,
    decisions: &mut Vec<Decision>,
) {
    let outputs: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    // The links of the present groups, if they were needed since the last change.
    let mut links = None;
    for at in 0..groups.len() {
        let Some(group) = &groups[at] else { continue };
        let Some(id) = candidate(graph, group).filter(|id| !outputs.contains(id)) else {
            continue;
        };
        let reads = |g: &Option<Group>| g.as_ref().is_some_and(|g| g.reads.contains(&id));
        let readers: Vec<usize> = (0..groups.len()).filter(|r| reads(&groups[*r])).collect();
        let is_product = |r: &usize| groups[*r].as_ref().is_some_and(|g| g.contraction);
        if !readers.iter().any(is_product) {
            continue;
        }
        let member = &group.members[0];
        let (place, origin) = (place(graph, member, id), member.node.origin.clone());
        let requested = recipe.override_for(|| place.clone());
        let demand = match requested {
            Some(true) => Demand::ByRecipe,
            _ => Demand::IfItPays,
        };
        let packed = match requested {
            Some(false) => Err(Obstacle::ByRecipe),
            _ => check(graph, groups, (at, id), &readers, demand),
        };
        let (saved, kept) = gain(graph, groups, (at, id), &readers);
        let operations = elements(graph, id) * i64::from(operations(&member.node));
        let again = operations.saturating_mul(readers.len() as i64 - 1).max(0);
        let first = match (&packed, requested) {
            (Err(_), None | Some(true)) => {
                first_reader(graph, groups, &mut links, (at, id), &readers, demand)
            }
            _ => None,
        };
        let decision = match (packed, first) {
            (Ok(()), _) => {
                // The earlier decision that it is stored for a product no longer holds.
                decisions.retain(|d| !is_stored_for_product(d, &graph.container(id).name));
                let operands = move_into(graph, groups, (at, id), &readers);
                links = None;
                let done = Applied::Packed { operands };
                Decision::applied(place, &origin, done, saved).with_cost(kept, again)
            }
            (Err(_), Some((reader, saved))) => {
                let done = Applied::PackedFirst {
                    reader: keep_in(groups, (at, id), reader),
                };
                links = None;
                Decision::applied(place, &origin, done, saved)
            }
            (Err(obstacle), None) => {
                let refusal = Refusal::Unpacked(obstacle);
                Decision::refused(place, &origin, refusal, saved).with_cost(kept, again)
            }
        };
        decisions.push(decision);
    }
}

fn place(graph: &Graph, member: &Member, id: ContainerId) -> Place {
    Place::new(Rewrite::Prologue, &member.node, &graph.container(id).name)
}

/// The contraction that may compute the container and store it for the other readers, with the bytes that are not
/// moved: it reads each element at one point of its operand's own dimensions, and nothing that must run before it
/// reads the container.
fn first_reader(
    graph: &Graph,
    groups: &[Option<Group>],
    links: &mut Option<Links>,
    (at, id): (usize, ContainerId),
    readers: &[usize],
    demand: Demand,
) -> Option<(usize, i64)> {
    let group = groups[at].as_ref()?;
    check_made(graph, &group.members[0].node, id, demand).ok()?;
    let links = links.get_or_insert_with(|| Links::new(groups));
    let fits = |r: &&usize| {
        let reader = groups[**r].as_ref();
        reader.is_some_and(|reader| {
            let first = &reader.members[0].node;
            reader.stage == group.stage
                && check_reader(graph, reader, id, demand).is_ok()
                && reads_in_place(graph, first, id)
                && !links.path_through_another(at, **r)
        })
    };
    let reader = *readers.iter().find(fits)?;
    let known = groups[reader]
        .as_ref()
        .map(|g| group.reads.intersection(&g.reads))?;
    Some((reader, bytes(graph, id) + total(graph, known)))
}

/// Whether a contraction reads a container at one loop for each dimension, which reaches all of it.
fn reads_in_place(graph: &Graph, node: &Node, id: ContainerId) -> bool {
    let Some((map, tasklet)) = unit(node) else {
        return false;
    };
    let shape = &graph.container(id).shape;
    let mut seen = BTreeSet::new();
    tasklet
        .inputs
        .iter()
        .filter(|m| m.container == id)
        .all(|m| {
            m.subset.iter().zip(shape).all(|(index, size)| {
                let Index::At(e) = index else { return false };
                let Some(s) = e.as_symbol() else {
                    return e.is_zero() && constant(size) == 1;
                };
                let whole = |p: &graph::Param| p.name == *s && p.size == *size;
                map.params.iter().any(whole) && seen.insert(s.clone())
            })
        })
}

/// Lets a contraction compute `id` and store it. Returns the contraction's origin.
fn keep_in(
    groups: &mut [Option<Group>],
    (at, id): (usize, ContainerId),
    reader: usize,
) -> Arc<Origin> {
    let taken = groups[at].take();
    match (taken, groups[reader].as_mut()) {
        (Some(group), Some(reader)) => {
            reader.reads.remove(&id);
            reader.reads.extend(&group.reads);
            reader.writes.insert(id);
            reader.prologues.extend(group.members);
            reader.origin().clone()
        }
        _ => Arc::default(),
    }
}

fn is_stored_for_product(d: &Decision, name: &str) -> bool {
    let refused = matches!(
        &d.outcome,
        Outcome::Refused(Refusal::Stored {
            obstacle: InlineObstacle::Product,
            ..
        })
    );
    refused && d.place.container == name
}

/// The container that a group makes element by element, if it does nothing else.
fn candidate(graph: &Graph, group: &Group) -> Option<ContainerId> {
    let [only] = group.members.as_slice() else {
        return None;
    };
    let [id] = only.node.writes()[..] else {
        return None;
    };
    let is_own = graph.container(id).lifetime == Lifetime::Transient;
    let definition = definition(graph, &only.node, id)?;
    let plain = |m: &Memlet| m.fill.is_none() && m.subset.iter().all(|i| matches!(i, Index::At(_)));
    let is_plain = definition.inputs.iter().all(plain);
    (is_own && is_plain && !group.contraction && !group.alone).then_some(id)
}

fn check(
    graph: &Graph,
    groups: &[Option<Group>],
    (at, id): (usize, ContainerId),
    readers: &[usize],
    demand: Demand,
) -> Result<(), Obstacle> {
    for reader in readers.iter().filter_map(|r| groups[*r].as_ref()) {
        check_reader(graph, reader, id, demand)?;
    }
    let Some(member) = groups[at].as_ref().map(|g| &g.members[0]) else {
        return Err(Obstacle::OtherReader);
    };
    check_made(graph, &member.node, id, demand)?;
    let (saved, kept) = gain(graph, groups, (at, id), readers);
    if saved <= 0 {
        demand.weigh(Obstacle::Traffic(-saved))?;
    }
    if kept < 0 {
        demand.weigh(Obstacle::Kept(-kept))?;
    }
    // A gradient of a normalization is computed from two values and read by two products. It is better stored by one
    // of them than computed in both.
    if readers.len() > 1 && 2 * saved < 3 * bytes(graph, id) {
        demand.weigh(Obstacle::Repeated(saved))?;
    }
    Ok(())
}

/// Whether elements are cheap to compute where they are read.
fn check_made(graph: &Graph, node: &Node, id: ContainerId, demand: Demand) -> Result<(), Obstacle> {
    let operations = operations(node);
    if operations > MOST_OPERATIONS {
        demand.weigh(Obstacle::Operations(operations))?;
    }
    if let Some(other) = strided(graph, node, id) {
        demand.weigh(Obstacle::Strided(other))?;
    }
    Ok(())
}

fn check_reader(
    graph: &Graph,
    reader: &Group,
    id: ContainerId,
    demand: Demand,
) -> Result<(), Obstacle> {
    let others = || reader.members.iter().skip(1);
    if !reader.contraction || others().any(|m| m.node.reads().contains(&id)) {
        return Err(Obstacle::OtherReader);
    }
    let first = &reader.members[0].node;
    let Some((_, tasklet)) = unit(first).filter(|_| is_blockable(first)) else {
        return Err(Obstacle::Index);
    };
    let (own, other): (Vec<&Memlet>, Vec<&Memlet>) =
        tasklet.inputs.iter().partition(|m| m.container == id);
    let ([_], [other], [(out, _)]) = (own.as_slice(), other.as_slice(), tasklet.outputs.as_slice())
    else {
        return Err(Obstacle::Index);
    };
    let all = [id, other.container, out.container];
    let dtype = graph.container(id).dtype;
    let is_one = all.iter().all(|id| graph.container(*id).dtype == dtype);
    if !is_one || !matches!(dtype, DType::F32 | DType::F64) {
        return Err(Obstacle::Type);
    }
    let size = elements(graph, id);
    let is_small = |id: ContainerId| size < elements(graph, id);
    if is_small(other.container) && is_small(out.container) {
        demand.weigh(Obstacle::SmallOperand)?;
    }
    Ok(())
}

fn operations(node: &Node) -> u32 {
    let of = |(_, expr): &(Memlet, graph::Expr)| expr.cost();
    unit(node).map_or(0, |(_, t)| t.outputs.iter().map(of).sum())
}

/// The name of an operand that is not contiguous along the result's innermost dimension, if there is one.
fn strided(graph: &Graph, node: &Node, id: ContainerId) -> Option<String> {
    let definition = definition(graph, node, id)?;
    let d = innermost(graph.container(id))?;
    let along = definition.params[d].clone()?;
    let lies_across = |m: &&Memlet| {
        let c = graph.container(m.container);
        let moved: Vec<usize> = (0..m.subset.len())
            .filter(|d| matches!(&m.subset[*d], Index::At(e) if e.mentions(&along)))
            .collect();
        let plain =
            |d: usize| matches!(&m.subset[d], Index::At(e) if e.as_symbol() == Some(&along));
        match moved.as_slice() {
            [] => false,
            [d] => !plain(*d) || Some(*d) != innermost(c),
            _ => true,
        }
    };
    let across = definition.inputs.iter().find(lies_across)?;
    Some(graph.container(across.container).name.clone())
}

fn innermost(c: &Container) -> Option<usize> {
    let order = c.layout.order();
    order
        .iter()
        .rev()
        .copied()
        .find(|d| constant(&c.shape[*d]) > 1)
}

/// Bytes that are no longer moved, and bytes that are no longer kept for the backward pass. Negative if there are more.
fn gain(
    graph: &Graph,
    groups: &[Option<Group>],
    (at, id): (usize, ContainerId),
    readers: &[usize],
) -> (i64, i64) {
    let Some(group) = &groups[at] else {
        return (0, 0);
    };
    let own = bytes(graph, id);
    let mut saved = total(graph, group.reads.iter()) + own * (1 + readers.len() as i64);
    for reader in readers.iter().filter_map(|r| groups[*r].as_ref()) {
        saved -= total(graph, group.reads.difference(&reader.reads));
    }
    let later = |r: &&usize| {
        let stage = groups[**r].as_ref().map(|g| g.stage);
        stage.is_some_and(|s| s != group.stage)
    };
    let crosses = group.stage == Stage::Forward && readers.iter().any(|r| later(&r));
    if !crosses {
        return (saved, 0);
    }
    let all_groups = || groups.iter().flatten();
    let is_returned = |id: &ContainerId| graph.outputs.iter().any(|o| o.container == *id);
    let is_made = |id: &ContainerId| {
        let made = |g: &Group| g.stage == Stage::Forward && g.writes.contains(id);
        !is_returned(id) && all_groups().any(made)
    };
    let is_kept = |id: &ContainerId| {
        let read = |g: &Group| g.stage != Stage::Forward && g.reads.contains(id);
        all_groups().any(read)
    };
    let more = group.reads.iter().filter(|id| is_made(id) && !is_kept(id));
    (saved, own - total(graph, more))
}

fn total<'a>(graph: &Graph, ids: impl Iterator<Item = &'a ContainerId>) -> i64 {
    ids.map(|id| bytes(graph, *id)).sum()
}

/// Gives each reader a copy of the kernel that makes `id`, and an operand of its own. Returns these operands.
fn move_into(
    graph: &mut Graph,
    groups: &mut [Option<Group>],
    (at, id): (usize, ContainerId),
    readers: &[usize],
) -> Vec<ContainerId> {
    let mut operands = Vec::new();
    let Some(group) = groups[at].take() else {
        return operands;
    };
    for (n, r) in readers.iter().enumerate() {
        let Some(reader) = groups[*r].as_mut() else {
            continue;
        };
        // Each container has one writer.
        let own = match n {
            0 => id,
            n => {
                let c = graph.container(id).clone();
                let name = format!("{}.packed{n}", c.name);
                graph.add_container(Container { name, ..c })
            }
        };
        graph.container_mut(own).storage = Storage::Local;
        operands.push(own);
        let renamed = |node: &Node| {
            let mut node = node.clone();
            node.visit_tasklets_mut(&mut |t| {
                let reads = t.inputs.iter_mut();
                let all = reads.chain(t.outputs.iter_mut().map(|(m, _)| m));
                all.filter(|m| m.container == id)
                    .for_each(|m| m.container = own);
            });
            node
        };
        let mut node = renamed(&group.members[0].node);
        set_stage(&mut node, reader.stage);
        reader.members[0].node = renamed(&reader.members[0].node);
        reader.reads.remove(&id);
        reader.reads.extend(&group.reads);
        reader.prologues.push(Member {
            node,
            ..group.members[0].clone()
        });
    }
    operands
}

/// Moves a node and what is inside it to a pass.
fn set_stage(node: &mut Node, stage: Stage) {
    node.stage = stage;
    if let NodeKind::Map(map) = &mut node.kind {
        map.body.iter_mut().for_each(|n| set_stage(n, stage));
    }
}

#[cfg(test)]
mod tests;
