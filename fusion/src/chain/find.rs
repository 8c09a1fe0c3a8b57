//! Finds the products, the work between them and their uses that have the same points, and cuts them
//! into kernels by stage and by what is summed over. Never changes a graph.

use super::{LEAST, MOST_WIDTH, Obstacle, ROWS, VECTOR};
use crate::unit::{bytes, is_contraction, mentions, unit};
use graph::{
    ContainerId, DType, Graph, Index, Lifetime, Map, Memlet, Node, Origin, Param, Stage, SymExpr,
    Symbol, Tasklet,
};
use std::collections::{BTreeMap, BTreeSet};

/// What a unit is to a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// Makes another tile, point by point.
    Point,
    /// Sums, or takes the largest, over a dimension of the tile.
    Reduction(usize),
    /// A product with the tile as a factor, summed over a dimension of it.
    Product(usize),
}

/// Units around tiles: positions among the nodes.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    pub tiles: BTreeSet<ContainerId>,
    /// Sizes of every tile's dimensions.
    dims: Vec<i64>,
    /// What makes each tile.
    makers: BTreeMap<ContainerId, usize>,
    /// Makers that are products.
    products: BTreeSet<usize>,
    /// Reductions and products out of tiles, with the dimension they sum over.
    sinks: BTreeMap<usize, usize>,
    seed: ContainerId,
    obstacle: Option<Obstacle>,
}

/// The sinks of one stage that sum over the same dimension, and all they need.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub stage: Stage,
    /// Positions among the nodes, in order.
    pub members: BTreeSet<usize>,
}

/// The first product not tried yet whose result may be tiles.
pub(super) fn seed(
    graph: &Graph,
    nodes: &[Node],
    tried: &BTreeSet<ContainerId>,
) -> Option<ContainerId> {
    let made = nodes.iter().filter_map(|n| tile_product(graph, n));
    made.map(|p| p.tile).find(|id| !tried.contains(id))
}

/// `tile[…, r, …, c, …] += a[…, r, …, d]·b[…, c, …, d]`.
struct TileProduct<'a> {
    tile: ContainerId,
    /// The dimensions that only `a` and only `b` have.
    own: [usize; 2],
    factors: [&'a Memlet; 2],
    inner: &'a Param,
}

fn tile_product<'a>(graph: &Graph, node: &'a Node) -> Option<TileProduct<'a>> {
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
    let only = |x: &Memlet, y: &Memlet| {
        let mut own = (0..dims.len()).filter(|d| {
            let has = |m: &Memlet| dims[*d].as_ref().is_some_and(|s| mentions(m, s));
            has(x) && !has(y)
        });
        own.next().filter(|_| own.next().is_none())
    };
    let transient = graph.container(write.container).lifetime == Lifetime::Transient;
    let is_summed = |m: &Memlet| mentions(m, &inner.name);
    (transient && is_summed(a) && is_summed(b)).then_some(())?;
    Some(TileProduct {
        tile: write.container,
        own: [only(a, b)?, only(b, a)?],
        factors: [a, b],
        inner,
    })
}

/// For a memlet whose indices are distinct whole parameters (or 0 where there is one): the
/// parameter of each dimension.
fn plain_dims(graph: &Graph, map: &Map, memlet: &Memlet) -> Option<Vec<Option<Symbol>>> {
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
    /// All that is linked to the tile `seed` by being at its points; `None` if nothing multiplies a
    /// tile again.
    pub(super) fn grow(graph: &Graph, nodes: &[Node], seed: ContainerId) -> Option<Chain> {
        let shape = graph.container(seed).shape.iter();
        let mut chain = Chain {
            tiles: BTreeSet::new(),
            dims: shape.map(SymExpr::as_const).collect::<Option<_>>()?,
            makers: BTreeMap::new(),
            products: BTreeSet::new(),
            sinks: BTreeMap::new(),
            seed,
            obstacle: None,
        };
        let mut open = vec![seed];
        while let Some(id) = open.pop() {
            if chain.tiles.insert(id) {
                chain.visit(graph, nodes, id, &mut open);
            }
        }
        let multiplies = |at: &usize| is_contraction(&nodes[*at]);
        chain.sinks.keys().any(multiplies).then_some(chain)
    }

    /// The tile's maker and readers, and the tiles that they make or read besides.
    fn visit(
        &mut self,
        graph: &Graph,
        nodes: &[Node],
        id: ContainerId,
        open: &mut Vec<ContainerId>,
    ) {
        let name = || graph.container(id).name.clone();
        if graph.outputs.iter().any(|o| o.container == id) {
            self.obstacle.get_or_insert(Obstacle::Result(name()));
        }
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
                Some(Use::Reduction(d) | Use::Product(d)) => _ = self.sinks.insert(at, d),
                None => {
                    let used = Obstacle::Use(node.origin.to_string(), name());
                    self.obstacle.get_or_insert(used);
                    continue;
                }
            }
            open.extend(self.other_tiles(graph, nodes, at));
        }
    }

    /// What a unit reads at the tile's points that is made of products there too.
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
        // The same point everywhere.
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
        match (write.conflict, summed.as_slice()) {
            (None, []) if covered && write.subset == first.subset => Some(Use::Point),
            (Some(_), [d]) if covered => Some(Use::Reduction(*d)),
            (Some(_), [d]) if is_contraction(node) && self.is_out(map, tasklet, &dims) => {
                Some(Use::Product(*d))
            }
            _ => None,
        }
    }

    /// Whether one parameter is not the tile's and stands in the result and the other factor only.
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

    /// Where the first product came from.
    pub(super) fn origin<'a>(&self, nodes: &'a [Node]) -> &'a Origin {
        let at = self.makers.get(&self.seed).copied().unwrap_or(0);
        &nodes[at].origin
    }

    /// Bytes of all tiles.
    pub(super) fn tile_bytes(&self, graph: &Graph) -> i64 {
        self.tiles.iter().map(|id| bytes(graph, *id)).sum()
    }

    /// All units of the chain.
    pub(super) fn members(&self) -> BTreeSet<usize> {
        self.makers
            .values()
            .chain(self.sinks.keys())
            .copied()
            .collect()
    }

    /// The kernels it becomes, if each has a form that targets know.
    pub(super) fn checked(&self, graph: &Graph, nodes: &[Node]) -> Result<Vec<Part>, Obstacle> {
        if let Some(obstacle) = &self.obstacle {
            return Err(obstacle.clone());
        }
        let mut parts: BTreeMap<(Stage, usize), Part> = BTreeMap::new();
        for (at, d) in &self.sinks {
            let stage = nodes[*at].stage;
            let part = parts.entry((stage, *d)).or_insert(Part {
                stage,
                members: BTreeSet::new(),
            });
            part.members.insert(*at);
        }
        for ((_, swept), part) in &mut parts {
            self.complete(nodes, part);
            self.check_part(graph, nodes, part, *swept)?;
        }
        Ok(parts.into_values().collect())
    }

    /// Adds what makes the tiles that its members read.
    fn complete(&self, nodes: &[Node], part: &mut Part) {
        let mut open: Vec<usize> = part.members.iter().copied().collect();
        while let Some(at) = open.pop() {
            for id in nodes[at].reads() {
                if let Some(maker) = self.makers.get(&id)
                    && part.members.insert(*maker)
                {
                    open.push(*maker);
                }
            }
        }
    }

    fn check_part(
        &self,
        graph: &Graph,
        nodes: &[Node],
        part: &Part,
        swept: usize,
    ) -> Result<(), Obstacle> {
        let mut row = None;
        let mut dtypes = BTreeSet::new();
        for at in &part.members {
            let node = &nodes[*at];
            let Some((map, tasklet)) = unit(node) else {
                continue;
            };
            if let Some(p) = tile_product(graph, node).filter(|_| self.products.contains(at)) {
                let [a, b] = p.own;
                let own = if a == swept { b } else { a };
                if ![a, b].contains(&swept) || row.is_some_and(|r| r != own) {
                    return Err(Obstacle::Rows);
                }
                row = Some(own);
                for factor in p.factors {
                    check_lines(graph, factor, p.inner)?;
                    dtypes.insert(graph.container(factor.container).dtype);
                }
            } else if is_contraction(node) {
                let is_factor = |m: &&Memlet| !self.tiles.contains(&m.container);
                let dims = tasklet
                    .inputs
                    .iter()
                    .find(|m| self.tiles.contains(&m.container));
                let inner = dims.and_then(|t| map.params.iter().find(|p| !mentions(t, &p.name)));
                let (Some(factor), Some(inner)) = (tasklet.inputs.iter().find(is_factor), inner)
                else {
                    return Err(Obstacle::Rows);
                };
                check_lines(graph, factor, inner)?;
                dtypes.insert(graph.container(factor.container).dtype);
            }
        }
        let is_half = |d: &DType| matches!(d, DType::F16 | DType::BF16);
        if dtypes.len() != 1 || !dtypes.iter().all(is_half) {
            return Err(Obstacle::Types);
        }
        self.check_sizes(row.ok_or(Obstacle::Rows)?, swept)
    }

    fn check_sizes(&self, row: usize, swept: usize) -> Result<(), Obstacle> {
        let (rows, columns) = (self.dims[row], self.dims[swept]);
        if rows < LEAST || columns < LEAST {
            return Err(Obstacle::Small(rows, columns));
        }
        let batch: i64 = self.dims.iter().product::<i64>() / (rows * columns);
        let blocks = batch * ((rows + ROWS - 1) / ROWS);
        match blocks * ROWS < columns {
            true => Err(Obstacle::Blocks(blocks, columns)),
            false => Ok(()),
        }
    }
}

/// Whether the numbers along `inner` lie side by side, few and whole vectors. What else moves along the
/// same dimension (heads in one row, a part of stacked projections) moves by whole vectors.
fn check_lines(graph: &Graph, memlet: &Memlet, inner: &Param) -> Result<(), Obstacle> {
    let c = graph.container(memlet.container);
    let strided = || Obstacle::Strided(c.name.clone());
    let last = *c.layout.order().last().ok_or_else(strided)?;
    let fits = |(d, index): (usize, &Index)| {
        let Index::At(e) = index else { return false };
        let Some((terms, first)) = e.as_affine() else {
            return false;
        };
        let own = terms
            .iter()
            .find(|(s, _)| *s == inner.name)
            .map(|(_, k)| *k);
        let mut others = terms.iter().filter(|(s, _)| *s != inner.name);
        match d == last {
            true => own == Some(1) && first % VECTOR == 0 && others.all(|(_, k)| k % VECTOR == 0),
            false => own.is_none(),
        }
    };
    if !memlet.subset.iter().enumerate().all(fits) || memlet.fill.is_some() {
        return Err(strided());
    }
    let width = inner.size.as_const().unwrap_or(0);
    let row = c.shape[last].as_const().unwrap_or(1);
    if row % VECTOR != 0 || width % VECTOR != 0 || width > MOST_WIDTH {
        return Err(Obstacle::Width(c.name.clone(), width));
    }
    Ok(())
}
