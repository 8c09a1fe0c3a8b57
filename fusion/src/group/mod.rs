//! Grouping: units that touch the same data at the same outer points become one kernel.
//!
//! Before: `map (b,l,h): s[b,l] += x[b,l,h]; map (b,l,h): y[b,l,h] = x[b,l,h] / s[b,l]`.
//! After: `kernel (b,l): { map h: s += x[b,l,h]; map h: y[b,l,h] = x[b,l,h] / s }`, with `s` local.
//!
//! Legal when every container that one member writes and another reads is indexed, in both, by the
//! kernel's outer parameters at the same dimensions, so that a point reads only what the same point wrote before.
//! Also, no third kernel may have to run between the two. Pays when the data passed between members,
//! or read by both, stays in registers or cache. So the inner working set is bounded, and the
//! dimension that is contiguous in memory never becomes the outer one of a kernel with inner loops.
//! A contraction takes successors over its whole output as its epilogue, see [`epilogue`]. If only contractions read
//! the result of a remaining element-wise kernel, the kernel becomes their prologue, see [`prologue`].

mod epilogue;
mod links;
mod obstacle;
mod overrides;
mod prologue;
mod write;

use crate::decision::{Applied, Decision, Demand, Refusal};
use crate::unit::{bytes, constant, is_contraction, unit};
use crate::{FuseError, Target};
use graph::{
    ContainerId, Graph, Index, Memlet, Node, Origin, Place, Recipe, Rewrite, Stage, Symbol,
};
use links::Links;
pub use obstacle::Obstacle;
pub use prologue::Obstacle as PrologueObstacle;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use write::emit_kernels;

/// Bytes one thread may touch at one outer point: half of a typical private L2 cache.
const MAX_INNER_BYTES: i64 = 1 << 19;
/// Containers smaller than this may be accessed in any order.
const SMALL_BYTES: i64 = 1 << 15;
/// Fewest outer points of a kernel with inner loops, so that threads share the work evenly.
const MIN_OUTER_POINTS: i64 = 32;
/// Most containers a kernel touches.
const MAX_CONTAINERS: usize = 24;

/// A set of units run as one kernel.
#[derive(Clone, Debug)]
struct Group {
    members: Vec<Member>,
    /// The units that compute the contraction's operands while it packs them.
    prologues: Vec<Member>,
    /// Sizes of the outer parameters.
    outer: Vec<i64>,
    /// Whether the first member is a contraction. Other members may only follow it.
    contraction: bool,
    /// Sums of the contraction's columns, which are final after its last block.
    sums: BTreeSet<ContainerId>,
    /// Whether nothing may join (scatters, unexpanded nodes).
    alone: bool,
    stage: Stage,
    reads: BTreeSet<ContainerId>,
    writes: BTreeSet<ContainerId>,
}

#[derive(Clone, Debug)]
struct Member {
    /// Position in the original order.
    at: usize,
    node: Node,
    /// This member's parameter for each outer parameter; empty for a contraction, whose output
    /// dimensions stand for them.
    bound: Vec<Symbol>,
}

/// Groups the units of `nodes` into kernels and marks what became local to one.
///
/// # Errors
/// [`FuseError::Circle`], which no input should reach.
pub fn group(
    graph: &mut Graph,
    nodes: Vec<Node>,
    target: Target,
    recipe: &Recipe,
    decisions: &mut Vec<Decision>,
) -> Result<Vec<Node>, FuseError> {
    let mut groups: Vec<Option<Group>> = nodes
        .into_iter()
        .enumerate()
        .map(|(at, node)| Some(Group::new(graph, at, node)))
        .collect();
    while merge_round(graph, &mut groups, target, recipe, decisions) {}
    if target == Target::Cpu {
        prologue::absorb(graph, &mut groups, recipe, decisions);
    }
    decisions.extend(overrides::settled(graph, &groups, recipe, decisions));
    emit_kernels(graph, &groups)
}

/// Merges pairs of groups: first those that the recipe asks for, then those that save most; each group once. Returns
/// whether there was one. If there was none, records the refusals.
fn merge_round(
    graph: &Graph,
    groups: &mut [Option<Group>],
    target: Target,
    recipe: &Recipe,
    decisions: &mut Vec<Decision>,
) -> bool {
    let mut links = Links::new(groups);
    let mut pairs = candidate_pairs(graph, groups, &links);
    let forbidden = overrides::forbidden(graph, recipe);
    let told = |a: usize, b: usize, groups: &[Option<Group>]| {
        let (x, y) = groups[a].as_ref().zip(groups[b].as_ref())?;
        match overrides::is_apart(&forbidden, x, y) {
            true => Some(false),
            false => recipe
                .override_for(|| place(graph, x, y))
                .filter(|take| *take),
        }
    };
    pairs.sort_by_cached_key(|(gain, a, b)| (told(*a, *b, groups) != Some(true), -gain, *a, *b));
    let mut touched = BTreeSet::new();
    let mut refused = Vec::new();
    for (gain, a, b) in pairs {
        if touched.contains(&a) || touched.contains(&b) {
            continue;
        }
        let (Some(x), Some(y)) = (&groups[a], &groups[b]) else {
            continue;
        };
        let (at, other) = (y.origin(), x.origin().clone());
        let place = place(graph, x, y);
        let merged = match told(a, b, groups) {
            Some(false) => Err(Obstacle::ByRecipe),
            Some(true) => merge(graph, x, y, target, Demand::ByRecipe),
            None => merge(graph, x, y, target, Demand::IfItPays),
        };
        // Merges of this round may have made a longer path.
        let merged = merged.and_then(|group| {
            if links.path_through_another(a, b) {
                Err(Obstacle::Between)
            } else {
                Ok(group)
            }
        });
        match merged {
            Ok(group) => {
                decisions.push(Decision::applied(
                    place,
                    at,
                    Applied::Joined { other },
                    gain,
                ));
                groups[a] = Some(group);
                if let Some(taken) = groups[b].take() {
                    links.join(groups, a, (b, &taken));
                }
                touched.extend([a, b]);
            }
            Err(obstacle) => {
                let refusal = Refusal::Apart { other, obstacle };
                refused.push(Decision::refused(place, at, refusal, gain));
            }
        }
    }
    if touched.is_empty() {
        decisions.append(&mut refused);
    }
    !touched.is_empty()
}

/// Where it is decided whether `y` joins `x`.
fn place(graph: &Graph, x: &Group, y: &Group) -> Place {
    let rewrite = match x.contraction {
        true => Rewrite::Epilogue,
        false => Rewrite::Fuse,
    };
    let made = |group: &Group| {
        let written = group.members[0].node.writes().first().copied();
        written.map_or("", |id| graph.container(id).name.as_str())
    };
    Place::new(rewrite, &y.members[0].node, made(y)).with_other(made(x))
}

impl Group {
    fn new(graph: &Graph, at: usize, node: Node) -> Group {
        let contraction = is_contraction(&node);
        let (mut outer, mut bound, mut alone) = (Vec::new(), Vec::new(), true);
        if let Some((map, tasklet)) = unit(&node) {
            let scatters = |m: &Memlet| m.subset.iter().any(|i| matches!(i, Index::Data(_)));
            alone = tasklet.outputs.iter().any(|(m, _)| scatters(m));
            if contraction {
                let shape = &graph.container(tasklet.outputs[0].0.container).shape;
                outer = shape.iter().map(constant).collect();
            } else {
                outer = map.params.iter().map(|p| constant(&p.size)).collect();
                bound = map.params.iter().map(|p| p.name.clone()).collect();
            }
        }
        Group {
            outer,
            contraction,
            sums: BTreeSet::new(),
            alone,
            stage: node.stage,
            reads: node.reads().into_iter().collect(),
            writes: node.writes().into_iter().collect(),
            members: vec![Member { at, node, bound }],
            prologues: Vec::new(),
        }
    }

    /// This group with what another one reads and writes added.
    fn united(&self, other: &Group) -> Group {
        Group {
            reads: self.reads.union(&other.reads).copied().collect(),
            writes: self.writes.union(&other.writes).copied().collect(),
            ..self.clone()
        }
    }

    /// The outer parameter that indexes a dimension in every access, for each dimension of a container.
    fn dims_of(&self, id: ContainerId) -> BTreeMap<usize, usize> {
        let mut common: Option<BTreeMap<usize, usize>> = None;
        for member in &self.members {
            for memlet in accesses(&member.node, id) {
                let dims: BTreeMap<usize, usize> = if member.bound.is_empty() && self.contraction {
                    let is_output = self.writes.contains(&id);
                    let all = 0..memlet.subset.len();
                    all.filter(|_| is_output).map(|d| (d, d)).collect()
                } else {
                    outer_dims(memlet, &member.bound)
                };
                common = Some(match common {
                    None => dims,
                    Some(c) => c
                        .into_iter()
                        .filter(|(d, k)| dims.get(d) == Some(k))
                        .collect(),
                });
            }
        }
        common.unwrap_or_default()
    }

    fn origin(&self) -> &Arc<Origin> {
        &self.members[0].node.origin
    }

    fn first(&self) -> usize {
        self.members.iter().map(|m| m.at).min().unwrap_or(0)
    }
}

fn accesses(node: &Node, id: ContainerId) -> Vec<&Memlet> {
    let mut found = Vec::new();
    node.visit_tasklets(&mut |t| {
        found.extend(t.inputs.iter().filter(|m| m.container == id));
        found.extend(
            t.outputs
                .iter()
                .map(|(m, _)| m)
                .filter(|m| m.container == id),
        );
    });
    found
}

fn outer_dims(memlet: &Memlet, bound: &[Symbol]) -> BTreeMap<usize, usize> {
    let mut dims = BTreeMap::new();
    for (d, index) in memlet.subset.iter().enumerate() {
        if let Index::At(e) = index {
            let at = e
                .as_symbol()
                .and_then(|s| bound.iter().position(|b| b == s));
            if let Some(k) = at {
                dims.insert(d, k);
            }
        }
    }
    dims
}

/// Pairs of groups that share data, with the bytes their union would not move.
fn candidate_pairs(
    graph: &Graph,
    groups: &[Option<Group>],
    links: &Links,
) -> Vec<(i64, usize, usize)> {
    let mut pairs = BTreeSet::new();
    for (id, readers) in &links.readers {
        let mut users: Vec<usize> = readers.iter().copied().collect();
        if let Some(w) = links.writer.get(id) {
            users.insert(0, *w);
        }
        // Many readers of one input (a parameter, a seed): neighbours suffice.
        for (i, a) in users.iter().enumerate() {
            for b in users.iter().skip(i + 1).take(6) {
                if a != b {
                    pairs.insert((*a.min(b), *a.max(b)));
                }
            }
        }
    }
    let outputs: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    pairs
        .into_iter()
        .filter_map(|(a, b)| {
            let (x, y) = (groups[a].as_ref()?, groups[b].as_ref()?);
            let (a, b, x, y) = if x.writes.iter().any(|id| y.reads.contains(id))
                || !y.writes.iter().any(|id| x.reads.contains(id))
            {
                (a, b, x, y)
            } else {
                (b, a, y, x)
            };
            let gain = gain(graph, &outputs, links, (a, x), (b, y));
            (gain > 0).then_some((gain, a, b))
        })
        .collect()
}

fn gain(
    graph: &Graph,
    outputs: &BTreeSet<ContainerId>,
    links: &Links,
    (a, x): (usize, &Group),
    (b, y): (usize, &Group),
) -> i64 {
    let mut saved = 0;
    for id in &y.reads {
        let size = bytes(graph, *id);
        if x.writes.contains(id) {
            saved += size;
            let inside = |r: &usize| *r == a || *r == b;
            if links.readers[id].iter().all(inside) && !outputs.contains(id) {
                saved += size;
            }
        } else if x.reads.contains(id) && !x.contraction {
            saved += size;
        }
    }
    saved
}

/// The union of two groups, `x` before `y`, where that is legal and pays.
fn merge(
    graph: &Graph,
    x: &Group,
    y: &Group,
    target: Target,
    demand: Demand,
) -> Result<Group, Obstacle> {
    if x.alone || y.alone {
        return Err(Obstacle::Alone);
    }
    if x.stage != y.stage {
        return Err(Obstacle::Stage);
    }
    if y.contraction {
        return Err(Obstacle::Product);
    }
    if y.writes.iter().any(|id| x.reads.contains(id)) {
        return Err(Obstacle::Circular);
    }
    let sets = [&x.reads, &x.writes, &y.reads, &y.writes];
    let n_containers = sets.into_iter().flatten().collect::<BTreeSet<_>>().len();
    if n_containers > MAX_CONTAINERS {
        demand.weigh(Obstacle::Containers(n_containers))?;
    }
    if x.contraction {
        // Only the CPU's contractions sum their columns.
        return epilogue::with_epilogue(graph, x, y, target == Target::Cpu);
    }
    let pairs = common_params(graph, x, y)?;
    let full = pairs.len() == x.outer.len() && pairs.len() == y.outer.len();
    let outer: Vec<i64> = pairs.iter().map(|(k, _)| x.outer[*k]).collect();
    let keep = |g: &Group, side: &dyn Fn(&(usize, usize)) -> usize| -> Vec<Member> {
        let members = g.members.iter().cloned();
        members
            .map(|mut m| {
                if !m.bound.is_empty() {
                    m.bound = pairs.iter().map(|p| m.bound[side(p)].clone()).collect();
                }
                m
            })
            .collect()
    };
    let mut members = keep(x, &|p| p.0);
    members.extend(keep(y, &|p| p.1));
    members.sort_by_key(|m| m.at);
    let group = Group {
        members,
        outer,
        ..x.united(y)
    };
    if !full {
        check_inner_loops(graph, &group, demand)?;
    }
    Ok(group)
}

/// The pairs of outer parameters that become one: those that index everything passed from `x` to `y` at the same
/// dimensions. If nothing is passed, those that index the largest container that both read; they must be all outer
/// parameters of one of the two.
fn common_params(graph: &Graph, x: &Group, y: &Group) -> Result<Vec<(usize, usize)>, Obstacle> {
    let mut passed = x.writes.intersection(&y.reads).map(|id| aligned(x, y, *id));
    let pairs = match passed.next() {
        Some(first) => passed.fold(first, |common, p| {
            common.intersection(&p).copied().collect()
        }),
        None => {
            let shared = x.reads.intersection(&y.reads);
            let largest = shared.max_by_key(|id| bytes(graph, **id));
            let pairs = largest.map_or(BTreeSet::new(), |id| aligned(x, y, *id));
            if pairs.len() != x.outer.len() && pairs.len() != y.outer.len() {
                return Err(Obstacle::Indices);
            }
            pairs
        }
    };
    // On a diagonal, one parameter stands at two dimensions; the other side has two parameters there.
    let distinct = |side: &dyn Fn(&(usize, usize)) -> usize| {
        pairs.iter().map(side).collect::<BTreeSet<_>>().len() == pairs.len()
    };
    if !distinct(&|p| p.0) || !distinct(&|p| p.1) {
        return Err(Obstacle::Diagonal);
    }
    Ok(pairs.into_iter().collect())
}

fn has_conflict(node: &Node) -> bool {
    let mut found = false;
    node.visit_tasklets(&mut |t| found |= t.outputs.iter().any(|(m, _)| m.conflict.is_some()));
    found
}

/// Outer parameters of both that index the same dimensions of a container.
fn aligned(x: &Group, y: &Group, id: ContainerId) -> BTreeSet<(usize, usize)> {
    let (a, b) = (x.dims_of(id), y.dims_of(id));
    a.into_iter()
        .filter_map(|(d, k)| b.get(&d).map(|l| (k, *l)))
        .filter(|(k, l)| x.outer[*k] == y.outer[*l])
        .collect()
}

/// Refuses a kernel with inner loops that does not keep its data near or give every thread work.
fn check_inner_loops(graph: &Graph, group: &Group, demand: Demand) -> Result<(), Obstacle> {
    let points: i64 = group.outer.iter().product();
    if group.outer.is_empty() {
        return Err(Obstacle::Indices);
    }
    if points < MIN_OUTER_POINTS {
        demand.weigh(Obstacle::FewPoints(points))?;
    }
    let mut inner_bytes = 0;
    for id in group.reads.union(&group.writes) {
        let size = bytes(graph, *id);
        let dims = group.dims_of(*id);
        let c = graph.container(*id);
        let covered: i64 = dims.keys().map(|d| constant(&c.shape[*d])).product();
        let per_point = size / covered.max(1);
        inner_bytes += per_point;
        let contiguous = c.layout.order().last();
        let strided = contiguous.is_some_and(|d| dims.contains_key(d));
        if size > SMALL_BYTES && per_point > c.dtype.bytes() as i64 && strided {
            demand.weigh(Obstacle::Strided(c.name.clone()))?;
        }
    }
    if inner_bytes > MAX_INNER_BYTES {
        demand.weigh(Obstacle::InnerBytes(inner_bytes))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
