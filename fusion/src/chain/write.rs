//! Writes chains down as kernels, each with tiles of its own.

use super::Obstacle;
use super::find::Chain;
use super::part::ChainKernel;
use super::prepare::Prepared;
use crate::unit::bytes;
use graph::{
    ContainerId, DType, Graph, Map, Memlet, Node, NodeKind, Origin, Schedule, Stage, Storage,
};
use std::collections::{BTreeMap, BTreeSet};

/// A graph's nodes with a chain in kernels.
pub(super) struct Written {
    pub graph: Graph,
    pub nodes: Vec<Node>,
    pub n_kernels: usize,
    pub n_replaced: usize,
    /// Tiles that are in memory too.
    pub n_stored: usize,
    /// The tiles of all kernels.
    pub tiles: Vec<ContainerId>,
    /// Bytes not moved.
    pub saved: i64,
}

/// Replaces the members of the parts by one kernel for each part, if that saves bytes and nothing must run between.
pub(super) fn write(
    graph: &Graph,
    nodes: &[Node],
    prepared: &Prepared,
    chain: &Chain,
    parts: &[ChainKernel],
) -> Result<Written, Obstacle> {
    let members = chain.members();
    let mut were: BTreeSet<usize> = members.iter().map(|at| prepared.from[*at]).collect();
    were.extend(&prepared.changed);
    let before = replaced(graph, nodes, &were);
    let mut graph = prepared.graph.clone();
    let nodes = &prepared.nodes;
    let kept = chain.kept(&graph, nodes);
    let mut taken = kept.clone();
    let (mut kernels, mut tiles) = (Vec::new(), Vec::new());
    for part in parts {
        let (kernel, own) = kernel(&mut graph, nodes, chain, part, &mut taken);
        kernels.push(kernel);
        tiles.extend(own);
    }
    settle_scalars(&mut graph, nodes, chain, &kernels);
    let others = nodes.iter().enumerate();
    let others = others.filter(|(at, _)| !members.contains(at));
    let new = others
        .clone()
        .filter(|(at, _)| were.contains(&prepared.from[*at]));
    let new: Vec<Node> = new.map(|(_, n)| n.clone()).collect();
    let after = kernels.iter().chain(&new);
    let after: i64 = after.map(|k| moved(&graph, std::slice::from_ref(k))).sum();
    let n_replaced = before.len();
    let saved = before.iter().sum::<i64>() - after;
    if saved <= 0 {
        return Err(Obstacle::Bytes(-saved));
    }
    let n_kernels = kernels.len();
    let mut all: Vec<Node> = others.map(|(_, n)| n.clone()).collect();
    all.append(&mut kernels);
    Ok(Written {
        nodes: ordered(all).ok_or(Obstacle::Between)?,
        graph,
        n_kernels,
        n_replaced,
        n_stored: kept.len(),
        tiles,
        saved,
    })
}

/// Bytes of containers in memory that kernels read and write, each once for each kernel.
fn moved(graph: &Graph, kernel: &[Node]) -> i64 {
    let ids: BTreeSet<ContainerId> = kernel
        .iter()
        .flat_map(|n| n.reads().into_iter().chain(n.writes()))
        .filter(|id| graph.container(*id).storage != Storage::Local)
        .collect();
    ids.into_iter().map(|id| bytes(graph, id)).sum()
}

/// Bytes that the members' kernels would move without chaining. A product is a kernel alone, the rest of a stage is one
/// kernel.
fn replaced(graph: &Graph, nodes: &[Node], members: &BTreeSet<usize>) -> Vec<i64> {
    let mut kernels: Vec<Vec<Node>> = Vec::new();
    let mut others: BTreeMap<Stage, Vec<Node>> = BTreeMap::new();
    for node in members.iter().map(|at| nodes[*at].clone()) {
        match crate::unit::is_contraction(&node) {
            true => kernels.push(vec![node]),
            false => others.entry(node.stage).or_default().push(node),
        }
    }
    kernels.extend(others.into_values());
    kernels.iter().map(|k| moved(graph, k)).collect()
}

/// One kernel and its tiles. A tile that another kernel has taken gets a new container, unless this kernel stores it.
fn kernel(
    graph: &mut Graph,
    nodes: &[Node],
    chain: &Chain,
    part: &ChainKernel,
    taken: &mut BTreeSet<ContainerId>,
) -> (Node, Vec<ContainerId>) {
    let mut names: BTreeMap<ContainerId, ContainerId> = BTreeMap::new();
    let mut body = Vec::new();
    for at in &part.members {
        let mut node = nodes[*at].clone();
        for id in node
            .writes()
            .into_iter()
            .filter(|id| chain.tiles.contains(id))
        {
            let own = match part.stored.contains(&id) {
                true => id,
                false => local(graph, id, taken.insert(id)),
            };
            names.insert(id, own);
        }
        let rename = |m: &mut Memlet| {
            if let Some(own) = names.get(&m.container) {
                m.container = *own;
            }
        };
        node.visit_tasklets_mut(&mut |t| {
            t.inputs.iter_mut().for_each(rename);
            t.outputs.iter_mut().for_each(|(m, _)| rename(m));
        });
        node.stage = part.stage;
        if let NodeKind::Map(map) = &mut node.kind {
            map.schedule = Schedule::Sequential;
            map.body.iter_mut().for_each(|n| n.stage = part.stage);
        }
        body.push(node);
    }
    let kernel = Node {
        kind: NodeKind::Map(Map {
            params: Vec::new(),
            body,
            schedule: Schedule::Kernel,
        }),
        origin: joined_origin(nodes, part).into(),
        stage: part.stage,
    };
    (kernel, names.into_values().collect())
}

/// A tile that is never in memory: the container itself if it is not taken, else one like it.
fn local(graph: &mut Graph, id: ContainerId, is_free: bool) -> ContainerId {
    let own = match is_free {
        true => id,
        false => graph.add_container(graph.container(id).clone()),
    };
    graph.container_mut(own).storage = Storage::Local;
    own
}

/// The names of a part's members, each once, in order.
fn joined_origin(nodes: &[Node], part: &ChainKernel) -> Origin {
    let mut origins: Vec<&str> = Vec::new();
    for at in &part.members {
        let name = nodes[*at].origin.node.as_str();
        if !origins.contains(&name) {
            origins.push(name);
        }
    }
    let first = part
        .members
        .first()
        .map_or_else(Origin::default, |at| (*nodes[*at].origin).clone());
    Origin {
        node: origins.join("+"),
        ..first
    }
}

/// Gives results of reductions of tiles single precision, which they have in registers, and makes them local if no
/// other kernel reads them.
fn settle_scalars(graph: &mut Graph, nodes: &[Node], chain: &Chain, kernels: &[Node]) {
    let outputs: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    let members = chain.members();
    let others = nodes
        .iter()
        .enumerate()
        .filter(|(at, _)| !members.contains(at));
    let others: Vec<&Node> = others.map(|(_, n)| n).collect();
    for kernel in kernels {
        for id in kernel.writes() {
            let reduces = is_reduced(kernel, id);
            // The result of a reshape shares its operand's memory, and with it the type.
            let is_aliased = || {
                let mut reshapes = others
                    .iter()
                    .filter(|n| !matches!(n.kind, NodeKind::Map(_)));
                reshapes.any(|n| n.reads().contains(&id))
            };
            if !reduces || outputs.contains(&id) || is_aliased() {
                continue;
            }
            let c = graph.container_mut(id);
            if matches!(c.dtype, DType::F16 | DType::BF16) {
                c.dtype = DType::F32;
            }
            let same = |k: &&Node| std::ptr::eq(*k, kernel);
            let elsewhere = kernels
                .iter()
                .filter(|k| !same(k))
                .chain(others.iter().copied());
            if !elsewhere.into_iter().any(|n| n.reads().contains(&id)) {
                c.storage = Storage::Local;
            }
        }
    }
}

/// Whether a member that is no product reduces into the container.
fn is_reduced(kernel: &Node, id: ContainerId) -> bool {
    let NodeKind::Map(map) = &kernel.kind else {
        return false;
    };
    let mut writers = map.body.iter().filter(|n| n.writes().contains(&id));
    writers.any(|n| {
        let mut resolves = false;
        n.visit_tasklets(&mut |t| resolves |= t.outputs.iter().any(|(m, _)| m.conflict.is_some()));
        resolves && !crate::unit::is_contraction(n)
    })
}

/// Orders nodes so that producers come before consumers, stage by stage; `None` if two need each other.
fn ordered(nodes: Vec<Node>) -> Option<Vec<Node>> {
    let writer: BTreeMap<ContainerId, usize> = nodes
        .iter()
        .enumerate()
        .flat_map(|(at, n)| n.writes().into_iter().map(move |id| (id, at)))
        .collect();
    let needed = |at: usize| -> BTreeSet<usize> {
        let made = nodes[at].reads();
        let made = made.iter().filter_map(|id| writer.get(id).copied());
        made.filter(|w| *w != at).collect()
    };
    let mut n_needed = Vec::new();
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    for at in 0..nodes.len() {
        let needed = needed(at);
        n_needed.push(needed.len());
        needed.into_iter().for_each(|w| readers[w].push(at));
    }
    let first = (0..nodes.len()).filter(|at| n_needed[*at] == 0);
    let mut ready: BTreeSet<(Stage, usize)> = first.map(|at| (nodes[at].stage, at)).collect();
    let mut order = Vec::new();
    while let Some((_, next)) = ready.pop_first() {
        for reader in &readers[next] {
            n_needed[*reader] -= 1;
            if n_needed[*reader] == 0 {
                ready.insert((nodes[*reader].stage, *reader));
            }
        }
        order.push(next);
    }
    if order.len() < nodes.len() {
        return None;
    }
    let mut nodes: Vec<Option<Node>> = nodes.into_iter().map(Some).collect();
    order.into_iter().map(|at| nodes[at].take()).collect()
}
