//! Adds to a chain the tiles that others read from memory, and merges sums of products' results into the products.
//!
//! Before: `map (b,h,i,j): g[h,i,j] += p[b,h,i,j]·t[b,h,i,j]` beside products into and out of `t`.
//! After: `map (b,h,i,j): z[b,h,i,j] = p[b,h,i,j]·t[b,h,i,j]; map (b,h,i,j): g[h,i,j] += z[b,h,i,j]`: only
//! `z` is stored. A product's result that the graph returns, or that is read otherwise, becomes a copy: `t = t'`.
//!
//! Before: `map (b,g,r,i,j,e): w[b,g,r,j,e] += p[b,g,r,i,j]·x[b,g,r,i,e]; map (b,g,r,j,e): y[b,g,j,e] +=
//! w[b,g,r,j,e]`. After: `map (b,g,r,i,j,e): y[b,g,j,e] += p[b,g,r,i,j]·x[b,g,r,i,e]`: gradients of heads of
//! keys that heads of queries share.
//!
//! Legal because sums may be taken in any order, terms keep single precision until they are summed, and a
//! copy has the type of what it copies. Whether it pays is decided with the kernels that result.

use super::Obstacle;
use super::find::{Chain, plain_dims, tile_product};
use crate::unit::{is_contraction, mentions, unit, unit_tasklet_mut};
use graph::{
    ContainerId, DType, Expr, Graph, Index, Lifetime, Map, Memlet, Node, NodeKind, Reduction,
    Storage, Symbol, Tasklet,
};
use std::collections::{BTreeMap, BTreeSet};

/// Nodes from which a chain can be made, and where they came from.
pub(super) struct Prepared {
    pub graph: Graph,
    pub nodes: Vec<Node>,
    /// For each node, the position of the original node that it is or is a part of.
    pub from: Vec<usize>,
    /// Original positions of nodes that have changed.
    pub changed: BTreeSet<usize>,
}

impl Prepared {
    pub(super) fn new(graph: &Graph, nodes: &[Node], chain: &Chain) -> Result<Prepared, Obstacle> {
        let mut prepared = Prepared {
            graph: graph.clone(),
            nodes: nodes.to_vec(),
            from: (0..nodes.len()).collect(),
            changed: BTreeSet::new(),
        };
        let sides = chain.sides(graph, nodes)?;
        for at in chain.outside.iter().copied() {
            prepared.split(at, chain);
        }
        // Splitting made readers read other containers.
        let made: Vec<ContainerId> = (chain.products.iter())
            .filter_map(|at| tile_product(graph, &nodes[*at]))
            .map(|p| p.tile)
            .collect();
        for id in made {
            let is_read = |at: &usize| {
                let now = prepared.from.iter().zip(&prepared.nodes);
                let mut now = now.filter(|(from, n)| *from == at && !prepared.is_tile_unit(n, id));
                now.any(|(_, n)| n.reads().contains(&id))
            };
            let is_result = graph.outputs.iter().any(|o| o.container == id);
            if is_result || chain.outside.iter().any(is_read) {
                prepared.copy(id);
            }
        }
        for (at, swept) in &chain.sinks {
            prepared.fold(*at, swept, &sides, chain);
        }
        Ok(prepared)
    }

    /// Where the node that was at a position is now, or the last of its parts.
    fn now(&self, at: usize) -> Option<usize> {
        self.from.iter().rposition(|from| *from == at)
    }

    /// Whether a unit reads a tile and writes its points.
    fn is_tile_unit(&self, node: &Node, id: ContainerId) -> bool {
        let Some((_, tasklet)) = unit(node) else {
            return false;
        };
        let at = tasklet.inputs.iter().find(|m| m.container == id);
        let mut outputs = tasklet.outputs.iter();
        at.is_some_and(|read| outputs.all(|(w, _)| w.conflict.is_none() && w.subset == read.subset))
    }

    /// Splits a unit that computes values from tiles and sums them over other dimensions: the values become a tile, and
    /// a unit of its own sums them.
    fn split(&mut self, at: usize, chain: &Chain) {
        let Some((map, tasklet)) = unit(&self.nodes[at_of(&self.from, at)]) else {
            return;
        };
        let [(write, value)] = tasklet.outputs.as_slice() else {
            return;
        };
        let inputs = tasklet.inputs.iter();
        let mut tiles = inputs.filter(|m| chain.tiles.contains(&m.container));
        let Some(first) = tiles.next() else { return };
        let same = tiles.all(|m| m.subset == first.subset) && first.fill.is_none();
        let dims = plain_dims(&self.graph, map, first);
        let is_covered = dims.is_some_and(|dims| {
            let mut params = map.params.iter();
            params.all(|p| dims.contains(&Some(p.name.clone())))
        });
        let is_data = |i: &Index| matches!(i, Index::Data(_));
        let is_sum = write.conflict.is_some() && !write.subset.iter().any(is_data);
        let is_plain = matches!(value, Expr::In(_)) && tasklet.inputs.len() == 1;
        let is_made = |id: &ContainerId| {
            chain
                .makers
                .get(id)
                .is_some_and(|m| chain.products.contains(m))
        };
        if !same || !is_covered || !is_sum || (is_plain && !is_made(&first.container)) {
            return;
        }
        let mut container = self.graph.container(first.container).clone();
        container.lifetime = Lifetime::Transient;
        // The sum is rounded to its type; its terms are not rounded.
        container.dtype = match self.graph.container(write.container).dtype {
            DType::F16 | DType::BF16 => DType::F32,
            other => other,
        };
        let (map, first) = (map.clone(), first.clone());
        let (write, tasklet) = (write.clone(), tasklet.clone());
        let id = self.graph.add_container(container);
        let point = Memlet {
            container: id,
            conflict: None,
            ..first
        };
        let value = tasklet.outputs[0].1.clone();
        let values = Tasklet {
            inputs: tasklet.inputs,
            outputs: vec![(point.clone(), value)],
        };
        let sum = Tasklet {
            inputs: vec![point],
            outputs: vec![(write, Expr::In(0))],
        };
        let at_now = at_of(&self.from, at);
        let node = |t: Tasklet| unit_of(&self.nodes[at_now], &map, t);
        let both = [node(values), node(sum)];
        self.nodes.splice(at_now..=at_now, both);
        self.from.insert(at_now, at);
        self.changed.insert(at);
    }

    /// Lets a product write a new container, and makes the old one, which others read, a copy of it.
    fn copy(&mut self, id: ContainerId) {
        let Some(at) = self.nodes.iter().position(|n| n.writes().contains(&id)) else {
            return;
        };
        let mut container = self.graph.container(id).clone();
        container.storage = Storage::default();
        let own = self.graph.add_container(container);
        let Some(tasklet) = unit_tasklet_mut(&mut self.nodes[at]) else {
            return;
        };
        let Some((write, _)) = tasklet.outputs.first_mut() else {
            return;
        };
        write.container = own;
        let read = Memlet {
            conflict: None,
            ..write.clone()
        };
        let to = Memlet {
            container: id,
            ..read.clone()
        };
        let NodeKind::Map(map) = &self.nodes[at].kind else {
            return;
        };
        let mut map = map.clone();
        map.params.retain(|p| mentions(&read, &p.name));
        let copied = Tasklet {
            inputs: vec![read],
            outputs: vec![(to, Expr::In(0))],
        };
        let node = unit_of(&self.nodes[at], &map, copied);
        self.nodes.insert(at + 1, node);
        self.from.insert(at + 1, self.from[at]);
        self.changed.insert(self.from[at]);
    }

    /// Lets a product take the sum of its results, if kernels can sum over those dimensions too.
    fn fold(&mut self, at: usize, swept: &[usize], sides: &[Vec<usize>; 2], chain: &Chain) {
        let Some(now) = self.now(at).filter(|now| is_contraction(&self.nodes[*now])) else {
            return;
        };
        let made = self.nodes[now].writes();
        let [made] = made.as_slice() else { return };
        let is_transient = self.graph.container(*made).lifetime == Lifetime::Transient;
        let is_result = self.graph.outputs.iter().any(|o| o.container == *made);
        let readers = (0..self.nodes.len()).filter(|n| self.nodes[*n].reads().contains(made));
        let readers: Vec<usize> = readers.collect();
        let [reader] = readers[..] else { return };
        if is_result || !is_transient || self.nodes[reader].stage != self.nodes[now].stage {
            return;
        }
        let Some(write) = summed(&self.graph, &self.nodes[now], &self.nodes[reader]) else {
            return;
        };
        let Some(all) = swept_by(&self.graph, &self.nodes[now], &write, chain) else {
            return;
        };
        let side = sides
            .iter()
            .find(|side| all.iter().all(|d| side.contains(d)));
        let other = sides.iter().find(|other| Some(*other) != side);
        let rows = other.and_then(|dims| dims.iter().map(|d| chain.dims[*d]).max());
        let (Some(_), Some(rows)) = (side, rows) else {
            return;
        };
        let (blocks, columns) = chain.blocks(rows, &all);
        if all.len() == swept.len() || blocks * super::ROWS < columns {
            return;
        }
        if let Some(tasklet) = unit_tasklet_mut(&mut self.nodes[now]) {
            tasklet.outputs[0].0 = write;
        }
        self.changed.extend([at, self.from[reader]]);
        self.nodes.remove(reader);
        self.from.remove(reader);
    }
}

/// The present position of the node that was at `at` and has no parts yet.
fn at_of(from: &[usize], at: usize) -> usize {
    from.iter().position(|f| *f == at).unwrap_or(at)
}

/// A unit like another one with other parameters and another tasklet.
fn unit_of(node: &Node, map: &Map, tasklet: Tasklet) -> Node {
    let inner = Node {
        kind: NodeKind::Tasklet(tasklet),
        ..node.clone()
    };
    Node {
        kind: NodeKind::Map(Map {
            body: vec![inner],
            ..map.clone()
        }),
        ..node.clone()
    }
}

/// Where a product writes if it takes over the sum of its result over some dimensions, which `reader` does now.
fn summed(graph: &Graph, product: &Node, reader: &Node) -> Option<Memlet> {
    let (map, tasklet) = unit(reader)?;
    let ([read], [(write, Expr::In(0))]) = (&tasklet.inputs[..], &tasklet.outputs[..]) else {
        return None;
    };
    let dims = plain_dims(graph, map, read)?;
    let written = plain_dims(graph, map, write)?;
    let covered = map
        .params
        .iter()
        .all(|p| dims.contains(&Some(p.name.clone())));
    let made = &unit(product)?.1.outputs.first()?.0;
    if write.conflict != Some(Reduction::Sum) || !covered || written == dims {
        return None;
    }
    let places: BTreeMap<&Symbol, &Index> = (dims.iter().zip(&made.subset))
        .filter_map(|(d, index)| Some((d.as_ref()?, index)))
        .collect();
    let subset = written.iter().zip(&write.subset).map(|(d, index)| match d {
        Some(d) => places.get(d).map(|i| (*i).clone()),
        None => Some(index.clone()),
    });
    Some(Memlet {
        subset: subset.collect::<Option<_>>()?,
        ..write.clone()
    })
}

/// The tile's dimensions that a product sums over if it writes to `write`.
fn swept_by(graph: &Graph, product: &Node, write: &Memlet, chain: &Chain) -> Option<Vec<usize>> {
    let (map, tasklet) = unit(product)?;
    let mut inputs = tasklet.inputs.iter();
    let tile = inputs.find(|m| chain.tiles.contains(&m.container))?;
    let dims = plain_dims(graph, map, tile)?;
    let is_summed = |d: &Option<Symbol>| d.as_ref().is_some_and(|s| !mentions(write, s));
    let all = dims.iter().enumerate().filter(|(_, d)| is_summed(d));
    Some(all.map(|(at, _)| at).collect())
}
