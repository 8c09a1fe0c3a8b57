//! Cuts a chain into kernels by stage and by what is summed over, if each has a form that targets know.
//! Never changes a graph.

use super::find::{Chain, TileProduct, tile_product};
use super::{LEAST, MOST_TOGETHER, MOST_WIDTH, Obstacle, ROWS, VECTOR};
use crate::unit::{constant, is_contraction, mentions, unit};
use graph::{ContainerId, DType, Graph, Index, Memlet, Node, Param, Stage};
use std::collections::{BTreeMap, BTreeSet};

/// The sinks of one stage that sum over the same dimensions, and all they need.
#[derive(Clone, Debug)]
pub(super) struct ChainKernel {
    pub stage: Stage,
    /// Positions among the nodes, in order.
    pub members: BTreeSet<usize>,
    /// Tiles that it also stores in memory.
    pub stored: BTreeSet<ContainerId>,
    /// The dimensions that are summed over.
    swept: Vec<usize>,
}

/// What a part's members are made of.
#[derive(Default)]
struct Survey {
    /// Types of factors.
    dtypes: BTreeSet<DType>,
    /// Dimensions that, in all products, only the factor of the rows has.
    rows: Option<Vec<usize>>,
    /// Sum of the widths that products sum along.
    inner: i64,
    /// Sum of the widths of results.
    out: i64,
}

impl Chain {
    /// The kernels it becomes.
    pub(super) fn parts(
        &self,
        graph: &Graph,
        nodes: &[Node],
    ) -> Result<Vec<ChainKernel>, Obstacle> {
        self.sides(graph, nodes)?;
        self.check_points(graph, nodes)?;
        let mut parts: BTreeMap<(Stage, &[usize]), ChainKernel> = BTreeMap::new();
        for (at, swept) in &self.sinks {
            let stage = nodes[*at].stage;
            let part = parts.entry((stage, swept)).or_insert_with(|| ChainKernel {
                stage,
                members: BTreeSet::new(),
                stored: BTreeSet::new(),
                swept: swept.clone(),
            });
            part.members.insert(*at);
        }
        let mut parts: Vec<ChainKernel> = parts.into_values().collect();
        for id in self.kept(graph, nodes) {
            self.keep(graph, nodes, &mut parts, id)?;
        }
        for part in &mut parts {
            self.complete(nodes, part);
            self.check_part(graph, nodes, part)?;
        }
        Ok(parts)
    }

    /// Checks that products into tiles multiply short rows of contiguous 16-bit numbers.
    pub(super) fn check_factors(&self, graph: &Graph, nodes: &[Node]) -> Result<(), Obstacle> {
        let products = self.products.iter();
        let products = products.filter_map(|at| tile_product(graph, &nodes[*at]));
        let products: Vec<TileProduct> = products.collect();
        let is_half = |m: &Memlet| {
            let dtype = graph.container(m.container).dtype;
            matches!(dtype, DType::F16 | DType::BF16)
        };
        if !products.iter().flat_map(|p| p.factors).all(is_half) {
            return Err(Obstacle::Types);
        }
        let factors = products.iter();
        let mut factors = factors.flat_map(|p| p.factors.map(|m| (m, p.inner)));
        factors.try_for_each(|(m, inner)| check_lines(graph, m, inner))
    }

    /// Checks that members read all tiles at the same points.
    fn check_points(&self, graph: &Graph, nodes: &[Node]) -> Result<(), Obstacle> {
        for at in self.members() {
            let Some((_, tasklet)) = unit(&nodes[at]) else {
                continue;
            };
            let inputs = tasklet.inputs.iter();
            let mut tiles = inputs.filter(|m| self.tiles.contains(&m.container));
            let Some(first) = tiles.next() else { continue };
            let other = tiles.find(|m| m.subset != first.subset || m.fill.is_some());
            if let Some(other) = other {
                let name = graph.container(other.container).name.clone();
                return Err(Obstacle::Use(nodes[at].origin.to_string(), name));
            }
        }
        Ok(())
    }

    /// Tiles that are results of the graph or read by other units.
    pub(super) fn kept(&self, graph: &Graph, nodes: &[Node]) -> BTreeSet<ContainerId> {
        let outside = self.outside.iter().flat_map(|at| nodes[*at].reads());
        let outputs = graph.outputs.iter().map(|o| o.container);
        let all = outside.chain(outputs);
        all.filter(|id| self.tiles.contains(id)).collect()
    }

    /// Finds the kernel of the tile's stage that stores it; preferably one that sums over the tile's contiguous
    /// dimension.
    fn keep(
        &self,
        graph: &Graph,
        nodes: &[Node],
        parts: &mut [ChainKernel],
        id: ContainerId,
    ) -> Result<(), Obstacle> {
        let c = graph.container(id);
        let obstacle = || Obstacle::Stored(c.name.clone());
        let maker = *self.makers.get(&id).ok_or_else(obstacle)?;
        let side = c.layout.order().last().copied();
        let mut able: Vec<&mut ChainKernel> = (parts.iter_mut())
            .filter(|p| p.stage == nodes[maker].stage && p.swept.len() == 1)
            .collect();
        able.sort_by_key(|p| p.swept.first() != side.as_ref());
        let part = able.into_iter().next().ok_or_else(obstacle)?;
        let is_known = matches!(c.dtype, DType::F32 | DType::F16 | DType::BF16);
        if !is_known || self.products.contains(&maker) {
            return Err(obstacle());
        }
        part.members.insert(maker);
        part.stored.insert(id);
        Ok(())
    }

    /// Adds what makes the tiles that its members read.
    fn complete(&self, nodes: &[Node], part: &mut ChainKernel) {
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
        part: &ChainKernel,
    ) -> Result<(), Obstacle> {
        let mut survey = Survey::default();
        for at in &part.members {
            let node = &nodes[*at];
            if let Some(p) = tile_product(graph, node).filter(|_| self.products.contains(at)) {
                survey.product(graph, &p, part)?;
            } else if is_contraction(node) {
                self.survey_out(graph, node, &mut survey)?;
            } else if self.sinks.contains_key(at) {
                node.writes()
                    .into_iter()
                    .try_for_each(|id| check_single(graph, id))?;
            }
        }
        if survey.dtypes.len() != 1 {
            return Err(Obstacle::Types);
        }
        for (what, width) in [("operands", survey.inner), ("results", survey.out)] {
            if width > MOST_TOGETHER {
                return Err(Obstacle::Together(what, width));
            }
        }
        self.check_sizes(&survey.rows.unwrap_or_default(), &part.swept)
    }

    /// Adds a product with a tile as a factor. The tile must have the other factor's type, to which it is rounded.
    fn survey_out(&self, graph: &Graph, node: &Node, survey: &mut Survey) -> Result<(), Obstacle> {
        let (map, tasklet) = unit(node).ok_or(Obstacle::Rows)?;
        let is_tile = |m: &&Memlet| self.tiles.contains(&m.container);
        let tile = tasklet.inputs.iter().find(is_tile).ok_or(Obstacle::Rows)?;
        let factor = tasklet.inputs.iter().find(|m| !is_tile(m));
        let inner = map.params.iter().find(|p| !mentions(tile, &p.name));
        let (factor, inner) = factor.zip(inner).ok_or(Obstacle::Rows)?;
        check_lines(graph, factor, inner)?;
        let c = graph.container(tile.container);
        let dtype = graph.container(factor.container).dtype;
        survey.dtypes.insert(dtype);
        survey.out += padded(inner);
        match c.dtype == dtype {
            true => Ok(()),
            false => Err(Obstacle::Tile(c.name.clone(), c.dtype)),
        }
    }

    fn check_sizes(&self, rows: &[usize], swept: &[usize]) -> Result<(), Obstacle> {
        let largest = |dims: &[usize]| dims.iter().map(|d| self.dims[*d]).max();
        let (rows, columns) = largest(rows).zip(largest(swept)).ok_or(Obstacle::Rows)?;
        if rows < LEAST || columns < LEAST {
            return Err(Obstacle::Small(rows, columns));
        }
        let (blocks, all) = self.blocks(rows, swept);
        match blocks * ROWS < all {
            true => Err(Obstacle::Blocks(blocks, all)),
            false => Ok(()),
        }
    }

    /// How many blocks of threads there are, and how many columns each runs over.
    pub(super) fn blocks(&self, rows: i64, swept: &[usize]) -> (i64, i64) {
        let all: i64 = swept.iter().map(|d| self.dims[*d]).product();
        let batch = self.dims.iter().product::<i64>() / (rows * all);
        (batch * ((rows + ROWS - 1) / ROWS), all)
    }
}

impl Survey {
    /// Adds a product whose result is a tile.
    fn product(
        &mut self,
        graph: &Graph,
        p: &TileProduct,
        part: &ChainKernel,
    ) -> Result<(), Obstacle> {
        let is_swept = |own: &Vec<usize>| part.swept.iter().all(|d| own.contains(d));
        let own = match &p.own {
            [rows, cols] if is_swept(cols) => rows,
            [cols, rows] if is_swept(cols) => rows,
            _ => return Err(Obstacle::Rows),
        };
        let rows = self.rows.get_or_insert_with(|| own.clone());
        rows.retain(|d| own.contains(d));
        if rows.is_empty() {
            return Err(Obstacle::Rows);
        }
        for factor in p.factors {
            self.dtypes.insert(graph.container(factor.container).dtype);
        }
        self.inner += padded(p.inner);
        check_single(graph, p.tile)
    }
}

/// Whether numbers fit registers of single precision.
fn check_single(graph: &Graph, id: ContainerId) -> Result<(), Obstacle> {
    let c = graph.container(id);
    match c.dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        other => Err(Obstacle::Tile(c.name.clone(), other)),
    }
}

/// Numbers of a line, rounded up to whole products of 16.
fn padded(inner: &Param) -> i64 {
    (constant(&inner.size) + 15) / 16 * 16
}

/// Checks that the numbers along `inner` are contiguous, few, and whole vectors. What else moves along the same
/// dimension (heads in one row, a part of stacked projections) must move by whole vectors.
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
    let width = constant(&inner.size);
    let row = constant(&c.shape[last]);
    if row % VECTOR != 0 || width % VECTOR != 0 || width > MOST_WIDTH {
        return Err(Obstacle::Width(c.name.clone(), width));
    }
    Ok(())
}
