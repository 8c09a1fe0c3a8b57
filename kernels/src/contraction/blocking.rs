//! Roles of the dims and the blocking plan of a contraction whose output is plain: register tile,
//! blocks of M and of the reduction, chunks of N, what is packed or staged where. Chosen by the cost
//! model in `cost`; emits no text.

use super::access::{Access, Coord, Problem};
use super::choice::PriorPlan;
use super::groups::{Diagonal, GroupDim};
use super::open::{Open, OpenDims};
use super::stage::Staging;
use super::text::Vector;
use super::{Hooks, NoFastForm};
use graph::Machine;
use std::sync::Arc;

mod shape;
mod tiling;

pub use shape::shape;
pub use tiling::{TileLengths, Tiling};

/// A loop dimension with its step in each operand; `a` is without staging.
#[derive(Clone, Debug)]
pub struct Dim {
    pub id: usize,
    pub size: i64,
    pub a: i64,
    pub b: i64,
    pub o: i64,
}

/// A contraction with its dims sorted into roles; every role has at least one dim.
#[derive(Clone, Debug)]
pub struct Shape {
    pub batch: Vec<Dim>,
    pub m: Vec<Dim>,
    pub n: Vec<Dim>,
    pub k: Vec<Dim>,
    /// Coordinates of `a` without the batch dims.
    pub a: Access,
    pub b_base: i64,
    pub o_base: i64,
    /// The broadcast operand is the caller's `b`.
    pub swapped: bool,
    /// Several groups of a batch dim side by side in a panel.
    pub diagonal: Option<Diagonal>,
}

/// A cut of an ordered list of dims: dims before `depth` one index at a time, dim `depth` in `blocks`
/// nearly equal pieces, dims after it whole.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    pub depth: usize,
    pub blocks: i64,
}

/// Where the micro-kernel finds the vector operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VectorSource {
    /// The array itself, in place.
    Direct,
    /// Packed by a launch of its own into shared scratch.
    Shared,
    /// Packed block by block into the thread's scratch.
    Thread,
}

/// All decisions.
#[derive(Clone, Debug)]
pub struct ContractionPlan {
    pub shape: Arc<Shape>,
    pub vector: Vector,
    /// Vectors of a full panel.
    pub nv: i64,
    pub tiling: Tiling,
    pub m_cut: Cut,
    pub k_cut: Cut,
    pub n_chunks: i64,
    /// Pieces of the reduction that are summed by a last launch.
    pub parts: i64,
    pub staging: Option<Staging>,
    pub source: VectorSource,
    /// Results go to shared scratch and are moved (and summed) by a last launch.
    pub to_scratch: bool,
    /// Roles whose sizes differ between programs that share the text.
    pub open: Open,
    /// Largest number of elements of the broadcast operand in a block.
    pub a_numbers: i64,
}

impl Shape {
    /// Whether the operands that are to be kept are staged in blocks without common elements.
    pub fn keeps(&self, hooks: &Hooks, is_only_part: bool) -> bool {
        let [a, b] = &hooks.keeps;
        let (staged, packed) = if self.swapped { (b, a) } else { (a, b) };
        let disjoint = self.a.coords.iter().all(Coord::is_plain);
        packed.is_none() && (staged.is_none() || (disjoint && is_only_part))
    }
}

impl Cut {
    /// Number of blocks over `dims`, of which dim `depth` counts `units`.
    pub fn count(&self, dims: &[Dim]) -> i64 {
        dims[..self.depth].iter().map(|d| d.size).product::<i64>() * self.blocks
    }
}

impl ContractionPlan {
    /// Lanes of a full panel.
    pub fn nr(&self) -> i64 {
        self.nv * self.vector.lanes
    }

    /// The decisions in one line, for the reader of the emitted text.
    pub fn summary(&self) -> String {
        let sizes = |dims: &[Dim]| {
            let each: Vec<String> = dims.iter().map(|d| d.size.to_string()).collect();
            each.join("x")
        };
        let s = &self.shape;
        format!(
            "batch {} m {} n {} k {}: tile {}+ along m{}, {} vectors; m{} in {}, k{} in {}, n in {}; {} parts, \
             {} numbers staged, vectors from {:?}{}",
            sizes(&s.batch),
            sizes(&s.m),
            sizes(&s.n),
            sizes(&s.k),
            self.tiling.small,
            self.tiling.axis,
            self.nv,
            self.m_cut.depth,
            self.m_cut.blocks,
            self.k_cut.depth,
            self.k_cut.blocks,
            self.n_chunks,
            self.parts,
            self.staging.as_ref().map_or(0, |s| s.numbers),
            self.source,
            s.diagonal.as_ref().map_or(String::new(), |d| format!(
                ", {} groups together",
                d.together
            ))
        )
    }

    /// Whether the batch, such as groups of channels, lies inside the positions in memory: its members then
    /// share pages and neighbouring lines, and follow one another for each block of positions.
    pub fn batch_inside(&self) -> bool {
        let s = &self.shape;
        let [g] = s.batch.as_slice() else {
            return false;
        };
        let inside = |m: &Dim| m.o >= g.o * g.size;
        g.size > 1 && !self.to_scratch && s.m.iter().all(inside)
    }

    /// The innermost N dim.
    pub fn n_inner(&self) -> &Dim {
        &self.shape.n[self.shape.n.len() - 1]
    }

    /// Panels along the innermost N dim.
    pub fn inner_panels(&self) -> i64 {
        (self.n_inner().size + self.nr() - 1) / self.nr()
    }

    /// All panels.
    pub fn panels(&self) -> i64 {
        let outer: i64 = self.shape.n[..self.shape.n.len() - 1]
            .iter()
            .map(|d| d.size)
            .product();
        outer * self.inner_panels()
    }

    /// Columns that exist in the last inner panel, if it is not full; `None` where any number may.
    pub fn tail(&self) -> Option<i64> {
        Some(self.n_inner().size % self.nr()).filter(|&r| r > 0 && !self.open.columns)
    }

    /// Reduction length of the whole problem.
    pub fn k_total(&self) -> i64 {
        product(&self.shape.k)
    }

    /// Most reduction steps in one block.
    pub fn k_block(&self) -> i64 {
        k_block(&self.shape, &self.k_cut)
    }
}

pub(super) fn product(dims: &[Dim]) -> i64 {
    dims.iter().map(|d| d.size).product()
}

pub(super) fn div_up(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}

fn k_block(s: &Shape, cut: &Cut) -> i64 {
    div_up(s.k[cut.depth].size, cut.blocks) * product(&s.k[cut.depth + 1..])
}

// ---- roles ----

// ---- the plan ----

/// What the caller fixes.
pub struct Wishes {
    pub vector: Vector,
    pub threads: i64,
    pub prologue_a: bool,
    pub prologue_b: bool,
    pub epilogue: bool,
    pub machine: Machine,
    /// The numbers of the plan to take, if it exists.
    pub requested: Option<[i64; 8]>,
    /// How many of the best other plans to report.
    pub n_others: usize,
    /// Whether columns of the result are summed; then the reduction is not divided into parts.
    pub sums: bool,
    /// How other sizes were planned.
    pub known: Vec<PriorPlan>,
    /// Dims whose sizes differ from those of other sizes of the model.
    pub open: OpenDims,
    /// Whether to take, instead of the best plan, one of the same text that differs in as many numbers as possible.
    pub varies: bool,
}

/// Longest chain of additions in single precision, unless the reduction has no dims to cut.
const MOST_TERMS: i64 = 4608;
/// The same where an operand is computed while it is packed: its panels are packed block by block anyway, so that short
/// chains cost little.
const MOST_COMPUTED_TERMS: i64 = 1152;

/// The orders of a shape's dims that plans are made for, the given one first.
pub(super) fn orders(s: &Shape, w: &Wishes) -> Vec<Shape> {
    let mut all = in_lines(s, w);
    // The last, so that recipes keep the numbers of the others.
    all.extend(wide(s, w));
    all
}

/// The shape itself and, where a large vector operand is contiguous along a dim that the others do not
/// walk innermost, with that dim innermost: packing then reads whole cache lines.
fn in_lines(s: &Shape, w: &Wishes) -> Vec<Shape> {
    const LARGE: i64 = 1 << 20;
    let mut all = vec![s.clone()];
    let lane = s.n[s.n.len() - 1].b;
    // If a size varies between programs, every size is offered the same orders.
    let is_small = product(&s.n) * product(&s.k) < LARGE && w.open.is_empty();
    if lane == 1 || s.diagonal.is_some() || is_small {
        return all;
    }
    let contiguous = s.k.iter().any(|d| d.b == 1) && s.k.last().is_some_and(|d| d.b != 1);
    if contiguous && !s.a.any_composite() {
        let mut turned = s.clone();
        turned.k.sort_by_key(|d| std::cmp::Reverse((d.b, d.a)));
        all.push(turned);
    }
    // Results then go through scratch, where an epilogue's columns would not be in order.
    if s.n.iter().any(|d| d.b == 1) && !w.epilogue {
        let mut turned = s.clone();
        turned.n.sort_by_key(|d| std::cmp::Reverse((d.b, d.o)));
        all.push(turned);
    }
    all
}

/// Where the innermost columns do not fill a vector, such as the window of a transposed convolution: the shape with
/// the longest dim of the columns innermost. Its results go through scratch, which an epilogue does not read.
fn wide(s: &Shape, w: &Wishes) -> Option<Shape> {
    let (inner, outer) = s.n.split_last()?;
    let longest = outer.iter().max_by_key(|d| d.size)?;
    let gains = inner.size < w.vector.lanes && longest.size >= 2 * inner.size;
    // If a size varies between programs, every size is offered the same orders.
    let is_open = s.n.iter().any(|d| w.open.has(d));
    if !gains || w.epilogue || s.diagonal.is_some() || is_open {
        return None;
    }
    let mut turned = s.clone();
    turned.n.retain(|d| d.id != longest.id);
    turned.n.push(longest.clone());
    Some(turned)
}

/// Gives all plans to `take`; with `tiles`, only those with tiles of these lengths.
pub(super) fn consider(
    s: &Shape,
    w: &Wishes,
    tiles: Option<TileLengths>,
    take: &mut dyn FnMut(ContractionPlan),
) {
    let n_inner = s.n[s.n.len() - 1].size;
    let open = w.open.roles(s);
    let (nv, mr) = match open.columns {
        true => widest_tile(w.vector),
        false => register_tile(n_inner, w.vector),
    };
    let usual = Tiling::new(&s.m, mr, &w.open);
    let tiling = match tiles.map(|tiles| usual.with(tiles)) {
        None => usual,
        Some(Some(tiling)) => tiling,
        Some(None) => return,
    };
    let rows_on_diagonal = s.diagonal.as_ref().is_some_and(|d| d.place.is_rows());
    let to_scratch = s.n[s.n.len() - 1].o != 1 || rows_on_diagonal;
    let whole = s.diagonal.as_ref().and_then(|d| match d.place {
        GroupDim::Reduction(at) => Some(at),
        GroupDim::Rows(_) => None,
    });
    let mut k_cuts = cuts(&s.k, s.k.len(), |i| s.k[i].size);
    k_cuts.retain(|c| whole.is_none_or(|at| c.depth < at || (c.depth == at && c.blocks == 1)));
    let shape = Arc::new(s.clone());
    let shortest = k_cuts.iter().map(|c| k_block(s, c)).min();
    let most_terms = match w.prologue_a || w.prologue_b {
        true => MOST_COMPUTED_TERMS,
        false => MOST_TERMS,
    };
    k_cuts.retain(|c| k_block(s, c) <= shortest.unwrap_or(0).max(most_terms));
    for k_cut in k_cuts {
        for m_cut in cuts(&s.m, tiling.axis + 1, |i| {
            if i == tiling.axis {
                tiling.n_tiles
            } else {
                s.m[i].size
            }
        }) {
            for parts in [1, w.threads] {
                let mut candidate = ContractionPlan {
                    shape: Arc::clone(&shape),
                    vector: w.vector,
                    nv,
                    tiling,
                    m_cut,
                    k_cut,
                    n_chunks: 1,
                    parts,
                    staging: None,
                    source: VectorSource::Shared,
                    to_scratch: to_scratch || parts > 1,
                    open: open.in_rows(&tiling),
                    a_numbers: 0,
                };
                if parts > k_cut.count(&s.k) || (parts > 1 && (w.threads == 1 || w.sums)) {
                    continue;
                }
                candidate.a_numbers = a_numbers(&candidate);
                refine(candidate, w, take);
            }
        }
    }
}

/// Vectors and rows of a tile that is for any number of columns.
fn widest_tile(vector: Vector) -> (i64, i64) {
    match vector.bytes() {
        64 => (2, 14),
        _ => (2, 6),
    }
}

/// Vectors and rows of a tile: 28 of the 32 registers of 64 bytes, 12 of the 16 that are shorter.
fn register_tile(n_inner: i64, vector: Vector) -> (i64, i64) {
    match (vector.bytes(), div_up(n_inner, vector.lanes)) {
        (64, 1) => (1, 28),
        (64, 3) => (3, 9),
        (64, _) => (2, 14),
        (_, 1) => (1, 12),
        _ => (2, 6),
    }
}

fn cuts(dims: &[Dim], depths: usize, units: impl Fn(usize) -> i64) -> Vec<Cut> {
    let mut all = Vec::new();
    for depth in 0..depths.min(dims.len()) {
        for blocks in [
            1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 49, 56, 64, 80, 96, 112,
            128, 196, 256,
        ] {
            if blocks <= units(depth) && (depth == 0 || dims[depth - 1].size > 1 || blocks > 1) {
                all.push(Cut { depth, blocks });
            }
        }
    }
    all
}

/// Most positions of each dim in a block.
pub(super) fn block_size(p: &ContractionPlan, id: usize) -> i64 {
    if let Some(j) = p.shape.m.iter().position(|d| d.id == id) {
        let size = p.shape.m[j].size;
        return match j.cmp(&p.m_cut.depth) {
            std::cmp::Ordering::Less => 1,
            std::cmp::Ordering::Greater => size,
            std::cmp::Ordering::Equal if j == p.tiling.axis => {
                (div_up(p.tiling.n_tiles, p.m_cut.blocks) * p.tiling.largest()).min(size)
            }
            std::cmp::Ordering::Equal => div_up(size, p.m_cut.blocks),
        };
    }
    match p.shape.k.iter().position(|d| d.id == id) {
        Some(j) if j < p.k_cut.depth => 1,
        Some(j) if j == p.k_cut.depth => div_up(p.shape.k[j].size, p.k_cut.blocks),
        Some(j) => p.shape.k[j].size,
        None => 1,
    }
}

fn extent(p: &ContractionPlan, c: &Coord) -> i64 {
    1 + c
        .terms
        .iter()
        .map(|&(d, k)| k * (block_size(p, d) - 1))
        .sum::<i64>()
}

fn a_numbers(p: &ContractionPlan) -> i64 {
    p.shape.a.coords.iter().map(|c| extent(p, c)).product()
}

/// Whether rows or steps of the broadcast operand alias in a cache: one of its two strides is 1, and the other is
/// a multiple of a page.
fn aliases(p: &ContractionPlan) -> bool {
    let row = p.shape.m[p.shape.m.len() - 1].a;
    let step = p.shape.k[p.shape.k.len() - 1].a;
    let page = 4096 / p.vector.element.bytes();
    (step == 1 && row % page == 0) || (row == 1 && step % page == 0)
}

pub(super) fn must_stage(p: &ContractionPlan, w: &Wishes) -> bool {
    p.shape.a.any_guard() || w.prologue_a || aliases(p)
}

pub(super) fn staging(p: &ContractionPlan, w: &Wishes) -> Option<Staging> {
    must_stage(p, w).then(|| {
        Staging::new(&p.shape.a.coords, p.vector.element, |c| {
            let whole = |d: usize| {
                let dims = p.shape.m.iter().chain(&p.shape.k);
                dims.filter(|x| x.id == d)
                    .all(|x| block_size(p, d) == x.size)
            };
            // Which blocks are whole depends on sizes.
            let full = !p.open.any && c.terms.iter().all(|t| whole(t.0));
            (extent(p, c), full)
        })
    })
}

fn refine(p: ContractionPlan, w: &Wishes, take: &mut dyn FnMut(ContractionPlan)) {
    let s = &p.shape;
    let panels = p.panels();
    let in_place = s.n[s.n.len() - 1].b == 1
        && s.n[s.n.len() - 1].size % p.vector.lanes == 0
        && !w.prologue_b
        && !p.open.columns
        && s.diagonal.as_ref().is_none_or(|d| d.place.is_rows())
        && s.k[s.k.len() - 1].b * p.vector.element.bytes() % 2048 != 0;
    for n_chunks in [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
        .into_iter()
        .filter(|&c| c <= panels)
    {
        for source in [
            VectorSource::Shared,
            VectorSource::Thread,
            VectorSource::Direct,
        ] {
            let packed_often = source == VectorSource::Thread && p.batch_inside();
            if (source == VectorSource::Direct && !in_place) || packed_often {
                continue;
            }
            take(ContractionPlan {
                n_chunks,
                source,
                ..p.clone()
            });
        }
    }
}
