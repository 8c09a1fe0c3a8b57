//! A chain's rows, columns and batch, its products and what lies between them, seen from the places
//! that its statements read and write. Decides no tiles, emits no text.

use graph::{Binary, ContainerId, DType, Expr, Graph, Reduction, Symbol};
use kernels::emit::body::{Array, Body, ElementAccess, Kernel, Statement};
use kernels::emit::index::{Extents, Loop};
use kernels::emit::merge::renamed;
use std::collections::{BTreeMap, BTreeSet};

/// Widest operand along which a product into tiles sums, and widest result of one out of them: rows of
/// both stay in registers.
const MOST_WIDTH: i64 = 128;

/// Elements that are copied together.
pub(super) const VECTOR: i64 = 8;

/// Lines of numbers side by side: `container[base + Σ batch·stride + at·line + i·inner]`, `i` below
/// `width`, at each row or each column `at`; the strides are those of [`Form::outer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lines {
    pub container: ContainerId,
    pub base: i64,
    pub batch: Vec<i64>,
    pub line: i64,
    pub inner: i64,
    pub width: i64,
}

/// `tile[r,c] = Σ_d rows[r,d]·panel[c,d]`.
#[derive(Clone, Debug)]
pub(super) struct TileProduct {
    pub tile: ContainerId,
    pub rows: Lines,
    /// Position in [`Form::panels`].
    pub panel: usize,
}

/// `out[r,e] = Σ_c tile[r,c]·panel[c,e]`.
#[derive(Clone, Debug)]
pub(super) struct OutProduct {
    pub tile: ContainerId,
    pub panel: usize,
    pub out: Lines,
}

/// A chain; its statements are in terms of [`Form::outer`], [`Form::row`] and [`Form::col`].
#[derive(Clone, Debug)]
pub(super) struct Form {
    pub batch: Vec<Loop>,
    /// Loops that are summed over besides the columns. The columns are swept for each of their points; rows' lines do
    /// not depend on them.
    pub groups: Vec<Loop>,
    pub row: Loop,
    pub col: Loop,
    /// Element type of all factors.
    pub dtype: DType,
    pub tile_products: Vec<TileProduct>,
    /// What is read at each column, each once.
    pub panels: Vec<Lines>,
    /// Element-wise work and reductions, in order.
    pub statements: Vec<Statement>,
    pub out_products: Vec<OutProduct>,
    /// Containers that are numbers at points of rows and columns.
    pub tiles: BTreeSet<ContainerId>,
    /// The part of `tiles` that is stored.
    pub stored: Vec<ContainerId>,
    pub arrays: BTreeMap<ContainerId, Array>,
    pub extents: Extents,
}

/// Whether a statement is a product.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sort {
    Into,
    Out,
    Between,
}

/// A statement with the position of each of its loops among the tile's dimensions.
struct Member<'k> {
    statement: &'k Statement,
    dims: Vec<(Symbol, usize)>,
    /// The loop that the tile lacks.
    inner: Option<Loop>,
    sort: Sort,
}

/// The form of a kernel's statements, if it is a chain.
pub(super) fn form(graph: &Graph, kernel: &Kernel) -> Option<Form> {
    if !kernel.outer.is_empty() {
        return None;
    }
    let mut reader = Reader {
        graph,
        kernel,
        dims: Vec::new(),
        tiles: BTreeSet::new(),
        stored: Vec::new(),
        swept: None,
    };
    let mut members = Vec::new();
    for nest in &kernel.phases {
        let Body::Leaf(statements) = &nest.body else {
            return None;
        };
        let [statement] = statements.as_slice() else {
            return None;
        };
        members.push(reader.member(statement, &nest.loops)?);
    }
    let swept = reader.swept.clone()?;
    let row = reader.row(&members, &swept)?;
    reader.form(&members, row, &swept)
}

struct Reader<'k> {
    graph: &'k Graph,
    kernel: &'k Kernel,
    /// Stride and size of each of a tile's dimensions; a tile's memory is never made, but its strides
    /// tell its dimensions apart.
    dims: Vec<(i64, i64)>,
    tiles: BTreeSet<ContainerId>,
    stored: Vec<ContainerId>,
    /// Dimensions that every reduction and product out of a tile sums over.
    swept: Option<Vec<usize>>,
}

impl<'k> Reader<'k> {
    fn member(&mut self, statement: &'k Statement, loops: &[Loop]) -> Option<Member<'k>> {
        let [write] = statement.writes.as_slice() else {
            return None;
        };
        let target = write.place.container;
        let is_local = self.kernel.arrays[&target].local;
        let read: Vec<&ElementAccess> = self.tile_reads(statement).collect();
        let product = factors(statement).is_some() && write.conflict == Some(Reduction::Sum);
        let place = match read.first() {
            Some(first) => first,
            None if product && is_local => &write.place,
            None => return None,
        };
        if self.dims.is_empty() {
            self.dims = tile_dims(place, loops)?;
        }
        let dims = self.dims_of(place, loops)?;
        if read
            .iter()
            .any(|p| p.offset != place.offset || !is_plain(p))
            || !is_plain(&write.place)
        {
            return None;
        }
        let extra: Vec<&Loop> = loops
            .iter()
            .filter(|l| dims.iter().all(|(s, _)| *s != l.var))
            .collect();
        let sort = match (extra.as_slice(), read.len()) {
            ([_], 0) => Sort::Into,
            ([_], 1) if product => Sort::Out,
            ([], 1..) => Sort::Between,
            _ => return None,
        };
        let is_tile = write.place.offset == place.offset;
        match sort {
            Sort::Into => _ = self.tiles.insert(target),
            Sort::Between if write.conflict.is_none() && is_tile => {
                self.tiles.insert(target);
                if !is_local {
                    self.stored.push(target);
                }
            }
            Sort::Between if write.conflict.is_none() || is_tile => return None,
            _ => {
                let (terms, _) = write.place.offset.as_affine()?;
                let lacks = |(s, _): &&(Symbol, usize)| terms.iter().all(|(t, _)| t != s);
                let summed = dims.iter().filter(lacks).map(|(_, d)| *d);
                let summed: BTreeSet<usize> = summed.collect();
                let summed: Vec<usize> = summed.into_iter().collect();
                let is_one = summed.len() == 1 || sort == Sort::Out;
                let known = self.swept.get_or_insert_with(|| summed.clone());
                if summed.is_empty() || !is_one || *known != summed {
                    return None;
                }
            }
        }
        Some(Member {
            statement,
            dims,
            inner: extra.first().map(|l| (*l).clone()),
            sort,
        })
    }

    fn tile_reads(&self, s: &'k Statement) -> impl Iterator<Item = &'k ElementAccess> {
        let tiles = self.tiles.clone();
        s.reads.iter().filter(move |p| tiles.contains(&p.container))
    }

    /// The dimension of each loop that indexes the tile.
    fn dims_of(&self, place: &ElementAccess, loops: &[Loop]) -> Option<Vec<(Symbol, usize)>> {
        let (terms, offset) = place.offset.as_affine()?;
        let dim = |(symbol, stride): (Symbol, i64)| {
            let size = loops.iter().find(|l| l.var == symbol)?.size;
            let at = self.dims.iter().position(|d| *d == (stride, size))?;
            Some((symbol, at))
        };
        let dims: Vec<(Symbol, usize)> = terms.into_iter().map(dim).collect::<Option<_>>()?;
        (dims.len() == self.dims.len() && offset == 0).then_some(dims)
    }

    /// The rows' dimension: in every product into tiles, only the factor without the swept dimensions has it. The
    /// largest, if there are several.
    fn row(&self, members: &[Member<'_>], swept: &[usize]) -> Option<usize> {
        let mut rows: Option<Vec<usize>> = None;
        for m in members.iter().filter(|m| m.sort == Sort::Into) {
            let (a, b) = factors(m.statement)?;
            let only = |x: &ElementAccess, y: &ElementAccess| {
                let own = m.dims.iter();
                let own = own.filter(|(s, _)| mentions(x, s) && !mentions(y, s));
                own.map(|(_, d)| *d).collect::<Vec<_>>()
            };
            let is_swept = |own: &[usize]| swept.iter().all(|d| own.contains(d));
            let own = match (only(a, b), only(b, a)) {
                (own, cols) | (cols, own) if is_swept(&cols) => own,
                _ => return None,
            };
            let common = rows.get_or_insert_with(|| own.clone());
            common.retain(|d| own.contains(d));
        }
        rows?.into_iter().max_by_key(|d| self.dims[*d].1)
    }

    fn sized(&self, name: &str, d: usize) -> Loop {
        Loop {
            var: Symbol::new(name),
            size: self.dims[d].1,
        }
    }

    /// The name of each dimension, and the loops of the batch and of the groups.
    fn names(&self, row: usize, col: usize, swept: &[usize]) -> (Vec<Symbol>, [Vec<Loop>; 2]) {
        let (mut names, mut loops) = (Vec::new(), [Vec::new(), Vec::new()]);
        for d in 0..self.dims.len() {
            let name = match d {
                d if d == row => "row".to_string(),
                d if d == col => "col".to_string(),
                d => {
                    let (sort, at) = match swept.contains(&d) {
                        true => ("group", 1),
                        false => ("batch", 0),
                    };
                    let name = format!("{sort}{}", loops[at].len());
                    loops[at].push(self.sized(&name, d));
                    name
                }
            };
            names.push(Symbol::new(name));
        }
        (names, loops)
    }

    fn form(&self, members: &[Member<'_>], row: usize, swept: &[usize]) -> Option<Form> {
        let col = swept.iter().copied().max_by_key(|d| self.dims[*d].1)?;
        let (names, [batch, groups]) = self.names(row, col, swept);
        let mut extents = self.kernel.extents.clone();
        for (d, name) in names.iter().enumerate() {
            extents.insert(name, self.dims[d].1);
        }
        let mut form = Form {
            batch,
            groups,
            row: self.sized("row", row),
            col: self.sized("col", col),
            dtype: DType::BF16,
            tile_products: Vec::new(),
            panels: Vec::new(),
            statements: Vec::new(),
            out_products: Vec::new(),
            tiles: self.tiles.clone(),
            stored: self.stored.clone(),
            arrays: self.kernel.arrays.clone(),
            extents,
        };
        let mut dtypes = BTreeSet::new();
        for m in members {
            let dims = m.dims.iter();
            let mut renames: Vec<(Symbol, Symbol)> =
                dims.map(|(s, d)| (s.clone(), names[*d].clone())).collect();
            // The loop that is left may have the name of a renamed one.
            let inner = m.inner.as_ref().map(|l| Loop {
                var: Symbol::new("inner"),
                size: l.size,
            });
            renames.extend(m.inner.iter().map(|l| (l.var.clone(), "inner".into())));
            form.add(renamed(m.statement, &renames), inner, m.sort, &mut dtypes)?;
            // A tile that is a factor is rounded to the other one's type; the array of a local one is wider.
            let tiles = self.tile_reads(m.statement).filter(|_| m.sort == Sort::Out);
            dtypes.extend(tiles.map(|p| self.graph.container(p.container).dtype));
        }
        let [dtype] = dtypes.into_iter().collect::<Vec<_>>()[..] else {
            return None;
        };
        form.dtype = dtype;
        let is_half = matches!(dtype, DType::BF16 | DType::F16);
        (is_half && form.are_numbers_single()).then_some(form)
    }
}

impl Form {
    /// Loops around rows and columns.
    pub(super) fn outer(&self) -> impl Iterator<Item = &Loop> {
        self.batch.iter().chain(&self.groups)
    }

    /// Whether a row's lines are the same for every group.
    fn is_of_rows(&self, lines: &Lines) -> bool {
        lines.batch[self.batch.len()..].iter().all(|k| *k == 0)
    }

    fn add(
        &mut self,
        statement: Statement,
        inner: Option<Loop>,
        sort: Sort,
        dtypes: &mut BTreeSet<DType>,
    ) -> Option<()> {
        let Some(inner) = inner else {
            self.statements.push(statement);
            let reduces = self.statements.iter().flat_map(|s| &s.writes);
            let reduces = reduces.filter(|w| w.conflict.is_some()).count() > 0;
            return (self.groups.is_empty() || !reduces).then_some(());
        };
        let write = &statement.writes[0].place;
        let (a, b) = factors(&statement)?;
        match sort {
            Sort::Into => {
                let (x, y) = if mentions(a, &self.row.var) {
                    (a, b)
                } else {
                    (b, a)
                };
                let rows = self.lines(x, &self.row, &inner)?;
                let panel = self.panel(y, &inner)?;
                dtypes.extend([x, y].map(|p| self.arrays[&p.container].dtype));
                if !is_vector(&rows) || !self.is_of_rows(&rows) {
                    return None;
                }
                self.tile_products.push(TileProduct {
                    tile: write.container,
                    rows,
                    panel,
                });
            }
            Sort::Out => {
                let is_tile = |p: &ElementAccess| self.tiles.contains(&p.container);
                let (g, z) = if is_tile(a) { (a, b) } else { (b, a) };
                let panel = self.panel(z, &inner)?;
                let out = self.lines(write, &self.row, &inner)?;
                dtypes.insert(self.arrays[&z.container].dtype);
                let dtype = self.arrays[&out.container].dtype;
                if !is_single(dtype) || out.inner < 1 || !self.is_of_rows(&out) {
                    return None;
                }
                self.out_products.push(OutProduct {
                    tile: g.container,
                    panel,
                    out,
                });
            }
            Sort::Between => return None,
        }
        Some(())
    }

    /// The position of what a product reads at each column; equal panels are kept once.
    fn panel(&mut self, place: &ElementAccess, inner: &Loop) -> Option<usize> {
        let lines = self.lines(place, &self.col, inner)?;
        if !is_vector(&lines) {
            return None;
        }
        let known = self.panels.iter().position(|p| *p == lines);
        Some(known.unwrap_or_else(|| {
            self.panels.push(lines);
            self.panels.len() - 1
        }))
    }

    fn lines(&self, place: &ElementAccess, at: &Loop, inner: &Loop) -> Option<Lines> {
        let (terms, base) = place.offset.as_affine()?;
        let stride = |s: &Symbol| terms.iter().find(|(t, _)| t == s).map_or(0, |(_, k)| *k);
        let known =
            |s: &Symbol| *s == at.var || *s == inner.var || self.outer().any(|l| l.var == *s);
        let fits = is_plain(place)
            && terms.iter().all(|(s, _)| known(s))
            && inner.size <= MOST_WIDTH
            && inner.size % VECTOR == 0;
        fits.then(|| Lines {
            container: place.container,
            base,
            batch: self.outer().map(|l| stride(&l.var)).collect(),
            line: stride(&at.var),
            inner: stride(&inner.var),
            width: inner.size,
        })
    }

    /// Whether products' tiles, what is reduced and what is stored fit registers of single precision.
    fn are_numbers_single(&self) -> bool {
        let written = self.statements.iter().flat_map(|s| &s.writes);
        let reduced = written.filter(|w| w.conflict.is_some());
        let reduced = reduced.map(|w| w.place.container);
        let made = self.tile_products.iter().map(|p| p.tile);
        let mut all = reduced.chain(made).chain(self.stored.iter().copied());
        all.all(|id| is_single(self.arrays[&id].dtype))
    }
}

fn is_single(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// Whether 16 bytes along a line lie at once in memory and are aligned.
fn is_vector(l: &Lines) -> bool {
    let aligned = |k: &i64| k % VECTOR == 0;
    l.inner == 1 && aligned(&l.base) && aligned(&l.line) && l.batch.iter().all(aligned)
}

fn is_plain(p: &ElementAccess) -> bool {
    p.gather.is_empty() && p.guards.is_empty()
}

fn mentions(p: &ElementAccess, s: &Symbol) -> bool {
    p.offset.mentions(s)
}

/// The factors of a statement that is a product of two reads.
fn factors(s: &Statement) -> Option<(&ElementAccess, &ElementAccess)> {
    let [write] = s.writes.as_slice() else {
        return None;
    };
    let Expr::Binary(Binary::Mul, a, b) = &write.expr else {
        return None;
    };
    match (&**a, &**b) {
        (Expr::In(i), Expr::In(j)) if i != j => Some((s.reads.get(*i)?, s.reads.get(*j)?)),
        _ => None,
    }
}

/// Stride and size of each dimension of the tile at that place, slowest first.
fn tile_dims(place: &ElementAccess, loops: &[Loop]) -> Option<Vec<(i64, i64)>> {
    let (terms, _) = place.offset.as_affine()?;
    let dim = |(symbol, stride): (Symbol, i64)| {
        let size = loops.iter().find(|l| l.var == symbol)?.size;
        (stride > 0).then_some((stride, size))
    };
    let mut dims: Vec<(i64, i64)> = terms.into_iter().map(dim).collect::<Option<_>>()?;
    dims.sort_unstable_by_key(|d| std::cmp::Reverse(*d));
    dims.dedup_by_key(|d| d.0);
    (dims.len() >= 2).then_some(dims)
}
