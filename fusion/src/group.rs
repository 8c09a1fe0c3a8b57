//! Grouping: units that touch the same data at the same outer points become one kernel.
//!
//! Before: `map (b,l,h): s[b,l] += x[b,l,h]; map (b,l,h): y[b,l,h] = x[b,l,h] / s[b,l]`.
//! After: `kernel (b,l): { map h: s += x[b,l,h]; map h: y[b,l,h] = x[b,l,h] / s }`, with `s` local.
//!
//! Legal when every container that one member writes and another reads is indexed, in both, by the
//! kernel's outer parameters at the same dimensions: what a point needs, the same point made before.
//! And when no third kernel must run between the two. Pays when the data passed between members,
//! or read by both, stays in registers or cache: so the inner working set is bounded, and the
//! dimension that is contiguous in memory never becomes the outer one of a kernel with inner loops.
//! A contraction takes element-wise successors over its whole output as its epilogue.

use crate::decision::Decision;
use crate::unit::{bytes, is_contraction, unit};
use crate::view::substitute_symbol;
use graph::{
    ContainerId, Graph, Index, Map, Memlet, Node, NodeKind, Origin, Param, Schedule, Stage,
    Storage, SymExpr, Symbol,
};
use std::collections::{BTreeMap, BTreeSet};

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
    /// Sizes of the outer parameters.
    outer: Vec<i64>,
    /// Whether the first member is a contraction, which others may only follow.
    contraction: bool,
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
pub fn group(graph: &mut Graph, nodes: Vec<Node>, decisions: &mut Vec<Decision>) -> Vec<Node> {
    let mut groups: Vec<Option<Group>> = nodes
        .into_iter()
        .enumerate()
        .map(|(at, node)| Some(Group::of(graph, at, node)))
        .collect();
    loop {
        let links = Links::of(&groups);
        let mut pairs = candidate_pairs(graph, &groups, &links);
        pairs.sort_by_key(|(gain, a, b)| (-gain, *a, *b));
        let mut touched = BTreeSet::new();
        let mut merged = false;
        for (gain, a, b) in pairs {
            if touched.contains(&a) || touched.contains(&b) {
                continue;
            }
            let (Some(x), Some(y)) = (&groups[a], &groups[b]) else {
                continue;
            };
            // Links describe this round's start; a merge elsewhere may have made a longer path, so
            // only groups far from merged ones are judged by it.
            let Some(group) = merge(graph, x, y) else {
                continue;
            };
            if Links::of(&groups).path_through_another(a, b) {
                continue;
            }
            decisions.push(Decision::applied(
                if x.contraction { "epilogue" } else { "fuse" },
                &y.members[0].node.origin,
                format!("joins {}", x.members[0].node.origin),
                gain,
            ));
            groups[a] = Some(group);
            groups[b] = None;
            touched.extend([a, b]);
            merged = true;
        }
        if !merged {
            break;
        }
    }
    emit_kernels(graph, &groups)
}

impl Group {
    fn of(graph: &Graph, at: usize, node: Node) -> Group {
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
            alone,
            stage: node.stage,
            reads: node.reads().into_iter().collect(),
            writes: node.writes().into_iter().collect(),
            members: vec![Member { at, node, bound }],
        }
    }

    /// For each dimension of a container the outer parameter that indexes it in every access.
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

    fn first(&self) -> usize {
        self.members.iter().map(|m| m.at).min().unwrap_or(0)
    }
}

fn constant(size: &SymExpr) -> i64 {
    size.as_const().unwrap_or(1)
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

/// Who feeds whom.
struct Links {
    after: Vec<BTreeSet<usize>>,
    writer: BTreeMap<ContainerId, usize>,
    readers: BTreeMap<ContainerId, BTreeSet<usize>>,
}

impl Links {
    fn of(groups: &[Option<Group>]) -> Links {
        let mut links = Links {
            after: vec![BTreeSet::new(); groups.len()],
            writer: BTreeMap::new(),
            readers: BTreeMap::new(),
        };
        for (at, group) in groups.iter().enumerate() {
            for id in group.iter().flat_map(|g| &g.writes) {
                links.writer.insert(*id, at);
            }
            for id in group.iter().flat_map(|g| &g.reads) {
                links.readers.entry(*id).or_default().insert(at);
            }
        }
        for (id, readers) in &links.readers {
            if let Some(w) = links.writer.get(id) {
                links.after[*w].extend(readers.iter().filter(|r| *r != w));
            }
        }
        links
    }

    /// Whether some other group must run between the two, in either direction.
    fn path_through_another(&self, a: usize, b: usize) -> bool {
        self.reaches_indirectly(a, b) || self.reaches_indirectly(b, a)
    }

    fn reaches_indirectly(&self, from: usize, to: usize) -> bool {
        let mut stack: Vec<usize> = self.after[from]
            .iter()
            .copied()
            .filter(|n| *n != to)
            .collect();
        let mut seen: BTreeSet<usize> = stack.iter().copied().collect();
        while let Some(n) = stack.pop() {
            for next in &self.after[n] {
                if *next == to {
                    return true;
                }
                if seen.insert(*next) {
                    stack.push(*next);
                }
            }
        }
        false
    }
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

/// The union of two groups, `x` before `y`; `None` where that is not legal or does not pay.
fn merge(graph: &Graph, x: &Group, y: &Group) -> Option<Group> {
    let joinable = !x.alone && !y.alone && !y.contraction && x.stage == y.stage;
    let containers: BTreeSet<_> = [&x.reads, &x.writes, &y.reads, &y.writes]
        .into_iter()
        .flatten()
        .collect();
    if !joinable || containers.len() > MAX_CONTAINERS {
        return None;
    }
    let passed: Vec<ContainerId> = x.writes.intersection(&y.reads).copied().collect();
    if y.writes.iter().any(|id| x.reads.contains(id)) {
        return None;
    }
    let pairs = if passed.is_empty() {
        let shared = x.reads.intersection(&y.reads);
        let largest = shared.max_by_key(|id| bytes(graph, **id))?;
        let pairs = aligned(x, y, *largest);
        (pairs.len() == x.outer.len() && pairs.len() == y.outer.len()).then_some(pairs)?
    } else {
        let mut all = passed.iter().map(|id| aligned(x, y, *id));
        let first = all.next()?;
        all.fold(first, |common, p| {
            common.intersection(&p).copied().collect()
        })
    };
    let pairs: Vec<(usize, usize)> = pairs.into_iter().collect();
    // On a diagonal one parameter stands at two dimensions: the other side has no such point.
    let distinct = |side: &dyn Fn(&(usize, usize)) -> usize| {
        pairs.iter().map(side).collect::<BTreeSet<_>>().len() == pairs.len()
    };
    if !distinct(&|p| p.0) || !distinct(&|p| p.1) {
        return None;
    }
    let full = pairs.len() == x.outer.len() && pairs.len() == y.outer.len();
    if x.contraction {
        // An epilogue covers the output point by point and reduces nothing.
        let reduces = y.members.iter().any(|m| has_conflict(&m.node));
        if !full || reduces {
            return None;
        }
    }
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
        contraction: x.contraction,
        alone: false,
        stage: x.stage,
        reads: x.reads.union(&y.reads).copied().collect(),
        writes: x.writes.union(&y.writes).copied().collect(),
    };
    (full || inner_loops_pay(graph, &group)).then_some(group)
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

/// Whether a kernel with inner loops keeps its data near and gives every thread work.
fn inner_loops_pay(graph: &Graph, group: &Group) -> bool {
    let points: i64 = group.outer.iter().product();
    if group.outer.is_empty() || points < MIN_OUTER_POINTS {
        return false;
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
            return false;
        }
    }
    inner_bytes <= MAX_INNER_BYTES
}

/// Writes groups down as kernels, in an order in which producers come first.
fn emit_kernels(graph: &mut Graph, groups: &[Option<Group>]) -> Vec<Node> {
    let links = Links::of(groups);
    let outputs: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    let mut waiting: BTreeMap<usize, usize> = BTreeMap::new();
    for (at, group) in groups.iter().enumerate() {
        if group.is_some() {
            let before = links.after.iter().filter(|s| s.contains(&at)).count();
            waiting.insert(at, before);
        }
    }
    let mut kernels = Vec::new();
    while !waiting.is_empty() {
        let ready = waiting.iter().filter(|(_, n)| **n == 0).map(|(at, _)| *at);
        let first = |at: &usize| {
            let g = groups[*at].as_ref();
            (g.map(|g| g.stage), g.map_or(0, Group::first))
        };
        let Some(next) = ready.min_by_key(first) else {
            break; // Unreachable: merging refuses cycles.
        };
        waiting.remove(&next);
        for later in &links.after[next] {
            if let Some(n) = waiting.get_mut(later) {
                *n -= 1;
            }
        }
        if let Some(group) = &groups[next] {
            let inside = |id: &ContainerId| {
                let readers = links.readers.get(id);
                !outputs.contains(id) && readers.is_some_and(|r| r.iter().all(|r| *r == next))
            };
            if group.members.len() > 1 {
                for id in group.writes.iter().filter(|id| inside(id)) {
                    graph.container_mut(*id).storage = Storage::Local;
                }
            }
            kernels.push(kernel_of(group));
        }
    }
    kernels
}

fn kernel_of(group: &Group) -> Node {
    let first = &group.members[0].node;
    if group.members.len() == 1 {
        return first.clone();
    }
    let names: Vec<Symbol> = (0..group.outer.len())
        .map(|k| Symbol::new(format!("p{k}")))
        .collect();
    let body = group
        .members
        .iter()
        .map(|m| inner_node(group, m, &names))
        .collect();
    let params = if group.contraction {
        Vec::new()
    } else {
        let sized = names.iter().zip(&group.outer);
        sized
            .map(|(name, size)| Param {
                name: name.clone(),
                size: SymExpr::constant(*size),
            })
            .collect()
    };
    let origin = Origin {
        node: joined_names(group),
        ..(*first.origin).clone()
    };
    Node {
        kind: NodeKind::Map(Map {
            params,
            body,
            schedule: Schedule::Kernel,
        }),
        origin: origin.into(),
        stage: group.stage,
    }
}

/// The names of a kernel's members, each once, in order.
fn joined_names(group: &Group) -> String {
    let mut names: Vec<&str> = Vec::new();
    for m in &group.members {
        if !names.contains(&m.node.origin.node.as_str()) {
            names.push(&m.node.origin.node);
        }
    }
    names.join("+")
}

/// A member inside a kernel: its bound parameters get the outer names and are dropped, the others
/// stay as inner loops under new names. A contraction and its epilogue keep their own parameters.
fn inner_node(group: &Group, member: &Member, outer: &[Symbol]) -> Node {
    let NodeKind::Map(map) = &member.node.kind else {
        return member.node.clone();
    };
    let mut map = map.clone();
    map.schedule = Schedule::Sequential;
    if !group.contraction {
        let target = |n: usize, name: &Symbol| match member.bound.iter().position(|b| b == name) {
            Some(k) => outer[k].clone(),
            None => Symbol::new(format!("q{n}")),
        };
        let targets: Vec<Symbol> = map
            .params
            .iter()
            .enumerate()
            .map(|(n, p)| target(n, &p.name))
            .collect();
        // Through temporary names, so that no new name meets an old one.
        let temporary = |n: usize| Symbol::new(format!("%{n}"));
        for (n, param) in map.params.clone().iter().enumerate() {
            substitute_symbol(&mut map, &param.name, &(&temporary(n)).into());
        }
        for (n, to) in targets.iter().enumerate() {
            substitute_symbol(&mut map, &temporary(n), &to.into());
            map.params[n].name = to.clone();
        }
        map.params.retain(|p| !outer.contains(&p.name));
        if map.params.is_empty() && map.body.len() == 1 {
            return map.body.remove(0);
        }
    }
    Node {
        kind: NodeKind::Map(map),
        ..member.node.clone()
    }
}
