//! Kernels of one nest of loops.
//!
//! Owns the choice among flat kernels, tiles, scatters and rows for such a nest.

use super::loops::{conflicts, contiguous_last, join, points, split, step, vector};
use super::rows::{self, PARTS, STATIC_SHARED_BYTES, TURNS};
use super::{Leaf, Rows, Scatter, Shape, Tiles, moved_by};
use graph::{ContainerId, SymExpr};
use kernels::emit::body::{Body, ElementAccess, Kernel, Nest, Statement};
use kernels::emit::index::{Loop, coefficient, mentions};
use std::collections::BTreeSet;

/// Neighbouring terms of a sum worth several threads.
const TERMS: i64 = 8;
/// Rows that keep a device busy.
const BUSY_ROWS: i64 = 256;
/// The same where each thread would read along its own results, which is already dense.
const DENSE_TERMS: i64 = 32;
/// Vectors of results that keep a device busy although each thread adds alone.
const BUSY_THREADS: i64 = 32 * 1024;
/// Sums below which blocks share the terms of each.
const FEW_SUMS: i64 = 256;
/// Threads of a block that adds up terms of few sums.
const TOTAL_THREADS: i64 = 256;
/// Elements of a row that blocks of column sums split.
const ROW: i64 = 2048;
/// Destinations that are told apart by the warps of a scatter.
const DESTINATIONS: i64 = 512;
/// Side of a tile of 4-byte elements; twice as many of narrower ones.
const SIDE: i64 = 32;
/// Smallest side, of which a warp still loads two rows at once.
const SMALL_SIDE: i64 = 16;

/// Chooses for one nest.
pub(super) fn schedule(
    loops: Vec<Loop>,
    mut statements: Vec<Statement>,
    kernel: &mut Kernel,
) -> Shape {
    let loops = contiguous_last(loops, &statements);
    let loops = join(loops, &mut [&mut statements], &mut kernel.extents);
    let owned = |l: &Loop| conflicts(&statements).all(|w| w.owned.contains(&l.var));
    let (mine, rest): (Vec<Loop>, Vec<Loop>) = loops.into_iter().partition(owned);
    if rest.is_empty() {
        if let Some(tiles) = tiles(&mine, &statements, kernel) {
            return Shape::Tiles(tiles);
        }
        if let Some(rows) = with_shared_operands(&mine, &statements, kernel) {
            return Shape::Rows(rows);
        }
    } else if let Some(scatter) = scatter(&mine, &rest, &statements, kernel) {
        return Shape::Scatter(scatter);
    } else if plain_sums(&rest, &statements)
        && let Some(rows) = sums(&mine, &rest, &statements, kernel)
    {
        return Shape::Rows(rows);
    }
    let vector = vector(&mine, &[], &statements, &kernel.arrays);
    Shape::Flat(Leaf {
        spread: mine,
        inner: rest,
        statements,
        vector,
        class: None,
    })
}

/// Element-wise work on rows that share an operand, or of which each has numbers of its own. These operands are
/// loaded once for a row or for several. `None` if there are none, or rows do not fill threads well.
fn with_shared_operands(
    loops: &[Loop],
    statements: &[Statement],
    kernel: &mut Kernel,
) -> Option<Rows> {
    let (last, others) = loops.split_last()?;
    let row = std::slice::from_ref(last);
    let width = last.size / vector(loops, &[], statements, &kernel.arrays);
    let full = width >= 24 || width >= 8 && (width as u64).is_power_of_two();
    let by_one = |p: &ElementAccess| moved_by(&p.offset, row) != moved_by(&p.offset, others);
    let by_data = |p: &ElementAccess| !p.gather.is_empty() || !p.guards.is_empty();
    let reads = || statements.iter().flat_map(|s| &s.reads);
    if others.is_empty() || !full || points(others) < BUSY_ROWS || !reads().any(by_one) {
        return None;
    }
    let written = statements.iter().flat_map(|s| &s.writes);
    if written.clone().any(|w| by_data(&w.place)) {
        return None;
    }
    kernel.phases = nest(row.to_vec(), statements);
    Some(rows::of_leaves(kernel, Vec::new(), others.to_vec(), false).0)
}

/// Whether every reduction goes to elements that only the loops outside of it name.
fn plain_sums(rest: &[Loop], statements: &[Statement]) -> bool {
    conflicts(statements).all(|w| {
        let p = &w.place;
        p.gather.is_empty() && p.guards.is_empty() && !moved_by(&p.offset, rest)
    })
}

/// Whether all elements of each sum's container are met.
fn whole(loops: &[Loop], statements: &[Statement], kernel: &Kernel) -> bool {
    conflicts(statements).all(|w| {
        let moving = |l: &&Loop| mentions(&w.place.offset, &l.var);
        let made: i64 = loops.iter().filter(moving).map(|l| l.size).product();
        made == kernel.arrays[&w.place.container].len
    })
}

/// Whether each container has one write and the sums are not read: their parts may wait.
fn apart(statements: &[Statement]) -> bool {
    conflicts(statements).all(|w| {
        let id = w.place.container;
        let writes = statements.iter().flat_map(|s| &s.writes);
        let reads = statements.iter().flat_map(|s| &s.reads);
        writes.filter(|o| o.place.container == id).count() == 1
            && reads.filter(|p| p.container == id).count() == 0
    })
}

/// Sums for which threads work together; `None` if one thread for each result does better.
fn sums(
    mine: &[Loop],
    rest: &[Loop],
    statements: &[Statement],
    kernel: &mut Kernel,
) -> Option<Rows> {
    let all: Vec<Loop> = mine.iter().chain(rest).cloned().collect();
    // Windows that slide (their loops and the results' move the same operand) are short.
    let last = all.iter().min_by_key(|l| step(statements, &l.var))?;
    let along = rest.iter().any(|l| l.var == last.var);
    let (n_mine, n_rest) = (points(mine), points(rest));
    let whole = whole(mine, statements, kernel) && apart(statements);
    if along && last.size >= TERMS {
        let share = n_rest / (TOTAL_THREADS * TURNS);
        let rest = contiguous_last(rest.to_vec(), statements);
        if n_mine < FEW_SUMS && share > 1 && whole && only_sums(statements) {
            return Some(total(mine, &rest, statements, kernel, share));
        }
        kernel.phases = nest(rest, statements);
        return Some(rows::of_leaves(kernel, Vec::new(), mine.to_vec(), false).0);
    }
    let n_vectors = n_mine / vector(mine, rest, statements, &kernel.arrays);
    if !along && n_rest >= DENSE_TERMS && n_vectors < BUSY_THREADS && whole {
        return columns(mine, rest, statements, kernel);
    }
    None
}

/// Whether the nest makes nothing but sums: what each point stores would be stored by several.
fn only_sums(statements: &[Statement]) -> bool {
    let mut writes = statements.iter().flat_map(|s| &s.writes);
    writes.all(|w| w.conflict.is_some())
}

fn nest(loops: Vec<Loop>, statements: &[Statement]) -> Vec<Nest> {
    let body = Body::Leaf(statements.to_vec());
    vec![Nest { loops, body }]
}

/// Few sums of many terms: blocks share the terms of each.
fn total(
    mine: &[Loop],
    rest: &[Loop],
    statements: &[Statement],
    kernel: &mut Kernel,
    share: i64,
) -> Rows {
    kernel.phases = nest(rest.to_vec(), statements);
    let (mut rows, _) = rows::of_leaves(kernel, mine.to_vec(), Vec::new(), false);
    let most = (4 * PARTS / points(mine)).max(1);
    rows.parts = share.min(most);
    (rows.group, rows.groups) = (TOTAL_THREADS, 1);
    rows.kept.clear();
    rows
}

/// Sums over rows of neighbouring results: groups take rows, blocks leave parts.
fn columns(
    mine: &[Loop],
    rest: &[Loop],
    statements: &[Statement],
    kernel: &mut Kernel,
) -> Option<Rows> {
    let (mut blocks, mut row) = (mine.to_vec(), Vec::new());
    let mut n = 1;
    while let Some(l) = blocks.last()
        && (row.is_empty() || n * l.size <= ROW)
    {
        n *= l.size;
        row.insert(0, l.clone());
        blocks.pop();
    }
    let mut statements = statements.to_vec();
    if let [only] = row.as_slice()
        && only.size > ROW
        && let Some(size) = (64..=ROW / 2)
            .rev()
            .find(|s| only.size % s == 0 && s % 8 == 0)
    {
        let (outer, inner) = split(only, size, &mut statements, &mut kernel.extents);
        blocks.push(outer);
        row = vec![inner];
    }
    let before = kernel.clone();
    kernel.phases = nest(row, &statements);
    let (rows, kept) = rows::of_leaves(kernel, blocks, rest.to_vec(), true);
    if kept > rows::most_kept(rows.group) {
        *kernel = before;
        return None;
    }
    Some(rows)
}

fn scatter(
    mine: &[Loop],
    rest: &[Loop],
    statements: &[Statement],
    kernel: &Kernel,
) -> Option<Scatter> {
    let writes: Vec<_> = statements.iter().flat_map(|s| &s.writes).collect();
    let [w] = writes.as_slice() else { return None };
    let [gather] = w.place.gather.as_slice() else {
        return None;
    };
    let [statement] = statements else { return None };
    let index = &statement.reads[gather.read];
    let read_again = statement
        .reads
        .iter()
        .any(|p| p.container == w.place.container);
    let simple = index.gather.is_empty() && !moved_by(&index.offset, mine) && !read_again;
    let moving: i64 = points(mine);
    let aside = w.place.guards.is_empty() && !moved_by(&w.place.offset, rest);
    if !simple || !aside || moving * gather.size != kernel.arrays[&w.place.container].len {
        return None;
    }
    Some(Scatter {
        vector: vector(mine, rest, statements, &kernel.arrays),
        sources: rest.to_vec(),
        row: mine.to_vec(),
        n_classes: gather.size.min(DESTINATIONS),
        reduction: w.conflict?,
        statements: statements.to_vec(),
    })
}

/// Squares for nests that load along one dimension and store along another.
fn tiles(loops: &[Loop], statements: &[Statement], kernel: &Kernel) -> Option<Tiles> {
    let plain = |p: &ElementAccess| p.gather.is_empty() && p.guards.is_empty();
    let writes = || statements.iter().flat_map(|s| &s.writes);
    let moves = |p: &ElementAccess, l: &Loop| coefficient(&p.offset, &l.var);
    let stored_along = |l: &&Loop| {
        writes().all(|w| w.conflict.is_none() && plain(&w.place) && moves(&w.place, l) == Some(1))
    };
    let columns = loops.iter().find(stored_along)?;
    let is_turned = |p: &ElementAccess, rows: &Loop| {
        plain(p) && moves(p, rows) == Some(1) && moves(p, columns).is_some_and(|c| c > 1)
    };
    let reads = || statements.iter().flat_map(|s| &s.reads);
    let turned_along = |l: &&Loop| reads().any(|p| is_turned(p, l));
    let rows = loops.iter().find(turned_along)?;
    let turned = reads().filter(|p| is_turned(p, rows));
    let places: BTreeSet<_> = turned
        .map(|p| (p.container, p.offset.to_string()))
        .collect();
    let bytes = |id: &ContainerId| kernel.arrays[id].dtype.bytes() as i64;
    let narrow = places.iter().all(|(id, _)| bytes(id) <= 2);
    let square_bytes = |side: i64| -> i64 {
        let squares = places.iter().map(|(id, _)| side * (side + 1) * bytes(id));
        squares.sum()
    };
    let mut side = if narrow { 2 * SIDE } else { SIDE };
    while square_bytes(side) > STATIC_SHARED_BYTES {
        side /= 2;
    }
    if side < SMALL_SIDE {
        return None;
    }
    let large = rows.size >= side / 2 && columns.size >= side / 2;
    let written = |p: &ElementAccess| writes().any(|w| w.place.container == p.container);
    if !large || reads().any(written) {
        return None;
    }
    let others = |l: &&Loop| l.var != rows.var && l.var != columns.var;
    Some(Tiles {
        blocks: loops.iter().filter(others).cloned().collect(),
        rows: rows.clone(),
        columns: columns.clone(),
        side,
        statements: statements.to_vec(),
    })
}

/// Whether a load goes through shared memory in such a tile.
pub(crate) fn is_turned(offset: &SymExpr, tiles: &Tiles) -> bool {
    coefficient(offset, &tiles.rows.var) == Some(1)
        && coefficient(offset, &tiles.columns.var).is_some_and(|c| c > 1)
}
