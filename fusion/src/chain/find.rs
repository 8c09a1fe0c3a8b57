//! Finds the products, the work between them and their uses that have the same points. Never changes a
//! graph.

use super::Obstacle;
use crate::unit::{bytes, is_contraction, mentions, unit};
use graph::{
    ContainerId, Graph, Index, Lifetime, Map, Memlet, Node, Param, SymExpr, Symbol, Tasklet,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// What a unit is to a tile.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Use {
    /// Makes another tile, point by point.
    Point,
    /// Sums, or takes the largest, over dimensions of the tile.
    Reduction(Vec<usize>),
    /// A product with the tile as a factor, summed over dimensions of it.
    Product(Vec<usize>),
}

/// Units around tiles: positions among the nodes.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    pub tiles: BTreeSet<ContainerId>,
    /// Sizes of every tile's dimensions.
    pub dims: Vec<i64>,
    /// What makes each tile.
    pub makers: BTreeMap<ContainerId, usize>,
    /// Makers that are products.
    pub products: BTreeSet<usize>,
    /// Reductions and products out of tiles, with the dimensions they sum over.
    pub sinks: BTreeMap<usize, Vec<usize>>,
    /// Units that read tiles in another way, from memory.
    pub outside: BTreeSet<usize>,
    seed: ContainerId,
}

/// Results of products that may be tiles, the largest first.
pub(super) fn seeds(graph: &Graph, nodes: &[Node]) -> Vec<ContainerId> {
    let made = nodes.iter().filter_map(|n| tile_product(graph, n));
    let mut seeds: Vec<ContainerId> = made.map(|p| p.tile).collect();
    seeds.sort_by_key(|id| Reverse(bytes(graph, *id)));
    seeds
}

/// `tile[…, r, …, c, …] += a[…, r, …, d]·b[…, c, …, d]`.
pub(super) struct TileProduct<'a> {
    pub tile: ContainerId,
    /// The dimensions that only `a` has, and those that only `b` has. Queries have several where heads share keys.
    pub own: [Vec<usize>; 2],
    pub factors: [&'a Memlet; 2],
    pub inner: &'a Param,
}

pub(super) fn tile_product<'a>(graph: &Graph, node: &'a Node) -> Option<TileProduct<'a>> {
    let (map, tasklet) = unit(node).filter(|_| is_contraction(node))?;
    let [(write, _)] = tasklet.outputs.as_slice() else {
        return None;
    };
    let [a, b] = tasklet.inputs.as_slice() else {
        return None;
    };
    let dims = plain_dims(graph, map, write)?;
    let mut inner = map.params.iter().filter(|p| !mentions(write, &p.name));
    let (inner, None) = (inner.next()?, inner.next()) else {
        return None;
    };
    let only = |x: &Memlet, y: &Memlet| -> Vec<usize> {
        let own = (0..dims.len()).filter(|d| {
            let has = |m: &Memlet| dims[*d].as_ref().is_some_and(|s| mentions(m, s));
            has(x) && !has(y)
        });
        own.collect()
    };
    let own = [only(a, b), only(b, a)];
    let transient = graph.container(write.container).lifetime == Lifetime::Transient;
    let is_summed = |m: &Memlet| mentions(m, &inner.name);
    let is_one = transient && is_summed(a) && is_summed(b) && own.iter().all(|o| !o.is_empty());
    is_one.then_some(TileProduct {
        tile: write.container,
        own,
        factors: [a, b],
        inner,
    })
}

/// The parameter of each dimension of a memlet whose indices are distinct whole parameters; `None` for a dimension of
/// size 1 that is indexed by 0.
pub(super) fn plain_dims(graph: &Graph, map: &Map, memlet: &Memlet) -> Option<Vec<Option<Symbol>>> {
    let shape = &graph.container(memlet.container).shape;
    let mut found: Vec<Option<Symbol>> = Vec::new();
    for (index, size) in memlet.subset.iter().zip(shape) {
        let Index::At(at) = index else { return None };
        match at.as_symbol() {
            Some(s) => {
                let param = map.params.iter().find(|p| p.name == *s)?;
                let twice = found.iter().flatten().any(|f| f == s);
                if param.size != *size || twice {
                    return None;
                }
                found.push(Some(s.clone()));
            }
            None if at.is_zero() && size.as_const() == Some(1) => found.push(None),
            None => return None,
        }
    }
    memlet.fill.is_none().then_some(found)
}

impl Chain {
    /// All units and tiles that are linked to the tile `seed` through equal points; `None` if nothing multiplies a
    /// tile again and sums over its rows or columns.
    pub(super) fn grow(graph: &Graph, nodes: &[Node], seed: ContainerId) -> Option<Chain> {
        let shape = graph.container(seed).shape.iter();
        let mut chain = Chain {
            tiles: BTreeSet::new(),
            dims: shape.map(SymExpr::as_const).collect::<Option<_>>()?,
            makers: BTreeMap::new(),
            products: BTreeSet::new(),
            sinks: BTreeMap::new(),
            outside: BTreeSet::new(),
            seed,
        };
        let mut open = vec![seed];
        while let Some(id) = open.pop() {
            if chain.tiles.insert(id) {
                chain.visit(graph, nodes, id, &mut open);
            }
        }
        let sides = chain.sides(graph, nodes).ok();
        let is_swept = |at: usize, summed: &[usize]| {
            let sides = sides.as_ref();
            sides.is_none_or(|sides| Chain::is_swept(sides, &nodes[at], summed))
        };
        let sinks = std::mem::take(&mut chain.sinks);
        for (at, summed) in sinks {
            if !chain.outside.contains(&at) && is_swept(at, &summed) {
                chain.sinks.insert(at, summed);
            } else {
                chain.outside.insert(at);
            }
        }
        let multiplies = |at: &usize| is_contraction(&nodes[*at]);
        chain.sinks.keys().any(multiplies).then_some(chain)
    }

    /// Records the tile's maker and readers, and adds the other tiles that they make or read to `open`.
    fn visit(
        &mut self,
        graph: &Graph,
        nodes: &[Node],
        id: ContainerId,
        open: &mut Vec<ContainerId>,
    ) {
        if let Some(at) = nodes.iter().position(|n| n.writes().contains(&id)) {
            self.makers.insert(id, at);
            if tile_product(graph, &nodes[at]).is_some() {
                self.products.insert(at);
            } else {
                open.extend(self.other_tiles(graph, nodes, at));
            }
        }
        for (at, node) in nodes.iter().enumerate() {
            if !node.reads().contains(&id) {
                continue;
            }
            match self.role(graph, node, id) {
                Some(Use::Point) => open.extend(node.writes()),
                Some(Use::Reduction(d) | Use::Product(d)) => {
                    // The unit sums another tile over other dimensions: it cannot have both in registers.
                    if *self.sinks.entry(at).or_insert_with(|| d.clone()) != d {
                        self.outside.insert(at);
                    }
                }
                None => {
                    self.outside.insert(at);
                    continue;
                }
            }
            open.extend(self.other_tiles(graph, nodes, at));
        }
    }

    /// What a unit reads that has the tile's shape and is made of products too.
    fn other_tiles(&self, graph: &Graph, nodes: &[Node], at: usize) -> Vec<ContainerId> {
        let reads = nodes[at].reads();
        let all = reads.into_iter();
        all.filter(|id| self.is_made_of_products(graph, nodes, *id))
            .collect()
    }

    fn is_made_of_products(&self, graph: &Graph, nodes: &[Node], id: ContainerId) -> bool {
        let shape = graph.container(id).shape.iter();
        if !shape
            .map(SymExpr::as_const)
            .eq(self.dims.iter().map(|d| Some(*d)))
        {
            return false;
        }
        let Some(maker) = nodes.iter().find(|n| n.writes().contains(&id)) else {
            return false;
        };
        if tile_product(graph, maker).is_some() {
            return true;
        }
        let Some((map, tasklet)) = unit(maker) else {
            return false;
        };
        let [(write, _)] = tasklet.outputs.as_slice() else {
            return false;
        };
        let plain = write.conflict.is_none() && plain_dims(graph, map, write).is_some();
        let mut inputs = tasklet.inputs.iter().filter(|m| m.subset == write.subset);
        plain && inputs.any(|m| self.is_made_of_products(graph, nodes, m.container))
    }

    /// How a unit uses a tile.
    fn role(&self, graph: &Graph, node: &Node, tile: ContainerId) -> Option<Use> {
        let (map, tasklet) = unit(node)?;
        let [(write, _)] = tasklet.outputs.as_slice() else {
            return None;
        };
        let mut reads = tasklet.inputs.iter().filter(|m| m.container == tile);
        let first = reads.next()?;
        let dims = plain_dims(graph, map, first)?;
        // All reads must be of the same point.
        if reads.any(|m| m.subset != first.subset || m.fill.is_some()) {
            return None;
        }
        let written = plain_dims(graph, map, write)?;
        let covered = map
            .params
            .iter()
            .all(|p| dims.contains(&Some(p.name.clone())));
        let summed = (0..dims.len()).filter(|d| dims[*d].is_some() && !written.contains(&dims[*d]));
        let summed: Vec<usize> = summed.collect();
        match (write.conflict, summed.is_empty()) {
            (None, true) if covered && write.subset == first.subset => Some(Use::Point),
            (Some(_), false) if covered => Some(Use::Reduction(summed)),
            (Some(_), false) if is_contraction(node) && self.is_out(map, tasklet, &dims) => {
                Some(Use::Product(summed))
            }
            _ => None,
        }
    }

    /// Whether exactly one parameter is not the tile's, and it stands in the result and the other factor only.
    fn is_out(&self, map: &Map, tasklet: &Tasklet, dims: &[Option<Symbol>]) -> bool {
        let mut own = map
            .params
            .iter()
            .filter(|p| !dims.contains(&Some(p.name.clone())));
        let (Some(one), None) = (own.next(), own.next()) else {
            return false;
        };
        let factors = tasklet.inputs.iter().filter(|m| mentions(m, &one.name));
        factors.count() == 1 && mentions(&tasklet.outputs[0].0, &one.name)
    }

    /// The dimensions that, in all products, only the factor of the rows has, and those that only the factor of the
    /// columns has.
    pub(super) fn sides(&self, graph: &Graph, nodes: &[Node]) -> Result<[Vec<usize>; 2], Obstacle> {
        let mut sides: Option<[Vec<usize>; 2]> = None;
        let common = |a: &[usize], b: &[usize]| -> Vec<usize> {
            a.iter().copied().filter(|d| b.contains(d)).collect()
        };
        for p in self
            .products
            .iter()
            .filter_map(|at| tile_product(graph, &nodes[*at]))
        {
            let [x, y] = p.own;
            let Some([a, b]) = sides else {
                sides = Some([x, y]);
                continue;
            };
            let straight = [common(&a, &x), common(&b, &y)];
            let turned = [common(&a, &y), common(&b, &x)];
            let is_whole = |s: &[Vec<usize>; 2]| s.iter().all(|d| !d.is_empty());
            sides = Some(if is_whole(&straight) {
                straight
            } else {
                turned
            });
        }
        let both = sides.filter(|s| s.iter().all(|d| !d.is_empty()));
        both.ok_or(Obstacle::Rows)
    }

    /// Whether kernels can sum over these dimensions: all of one side, reductions over one only.
    pub(super) fn is_swept(sides: &[Vec<usize>; 2], node: &Node, summed: &[usize]) -> bool {
        let within = |side: &Vec<usize>| summed.iter().all(|d| side.contains(d));
        sides.iter().any(within) && (summed.len() == 1 || is_contraction(node))
    }

    /// The unit that makes the first product.
    pub(super) fn first(&self) -> usize {
        self.makers.get(&self.seed).copied().unwrap_or(0)
    }

    /// Bytes of all tiles.
    pub(super) fn tile_bytes(&self, graph: &Graph) -> i64 {
        self.tiles.iter().map(|id| bytes(graph, *id)).sum()
    }

    /// All units of the chain.
    pub(super) fn members(&self) -> BTreeSet<usize> {
        let makers = self.makers.values().chain(self.sinks.keys());
        makers.copied().collect()
    }
}
