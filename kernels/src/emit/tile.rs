//! Transpositions inside a map: an element is computed where the operands are contiguous, and stored where the
//! result is. Between the two stands a small tile.
//!
//! Owns the choice of the two loops and the rewriting of the statements. Legal for any map whose points are
//! independent: the points of a tile run twice, once to compute and once to store, and nothing reads in between what
//! is stored. The values are those of the map, bit by bit. Parts of cache lines that are neighbors are touched
//! together; a vector loop that crosses the result touches one line for every element.

use super::body::{Array, Body, ElementAccess, Kernel, Nest, Statement, Write};
use super::index::{Loop, coefficient};
use super::merge::substituted;
use super::schedule::{LINE, STEPS_PER_THREAD, Scheduled, TURNED_BLOCK};
use super::schedule::{access_cost, blocks, order, points, used_lanes, vector_cost};
use graph::{ContainerId, DType, Expr, SymExpr, Symbol};
use std::collections::{BTreeMap, BTreeSet};

/// Elements of the result that a tile has in a run.
const RUN: i64 = 32;
/// Cost of an element's way through a tile, in units of a contiguous access.
const THROUGH: f64 = 2.0;
/// Tiles of one kernel: what they hold stays in the first-level cache.
const MOST: usize = 2;

/// Which loops a tile has.
pub(super) struct Tile {
    /// The loop along which elements are computed.
    vector: usize,
    /// The loop along which they are stored.
    turned: usize,
    /// How many elements of it are stored together.
    run: i64,
}

/// Elements of a run: 32, 16, or else the largest divisor of `size` from 4 to 32.
fn run_of(size: i64) -> Option<i64> {
    let fits = |n: &i64| size % n == 0;
    let whole_lines = [RUN, LINE].into_iter().find(fits);
    whole_lines.or_else(|| (4..=RUN).rev().find(fits))
}

fn step(place: &ElementAccess, l: &Loop) -> i64 {
    coefficient(&place.offset, &l.var).unwrap_or(0).abs()
}

/// Whether the write crosses its container along `vector` and is contiguous along `turned`.
fn crosses(w: &Write, vector: &Loop, turned: &Loop, arrays: &BTreeMap<ContainerId, Array>) -> bool {
    let array = &arrays[&w.place.container];
    let is_plain = !array.local
        && array.rounded_to.is_none()
        && w.place.gather.is_empty()
        && w.place.guards.is_empty();
    is_plain && step(&w.place, vector) >= LINE && step(&w.place, turned) == 1
}

/// The containers that a tile of these loops would turn; `None` if there are none or too many, or if one is written
/// twice or read.
fn turned_by(
    vector: &Loop,
    turned: &Loop,
    statements: &[Statement],
    arrays: &BTreeMap<ContainerId, Array>,
) -> Option<BTreeSet<ContainerId>> {
    let writes: Vec<ContainerId> = statements
        .iter()
        .flat_map(|s| &s.writes)
        .filter(|w| crosses(w, vector, turned, arrays))
        .map(|w| w.place.container)
        .collect();
    let found: BTreeSet<ContainerId> = writes.iter().copied().collect();
    let is_read = |r: &ElementAccess| found.contains(&r.container);
    let fits = !found.is_empty()
        && found.len() <= MOST
        && writes.len() == found.len()
        && !statements.iter().flat_map(|s| &s.reads).any(is_read);
    fits.then_some(found)
}

/// Cost of an element, as [`vector_cost`] counts it: what is turned goes through the tile, and into lines of which a
/// short run uses a part.
fn cost(
    vector: &Loop,
    run: i64,
    turns: &BTreeSet<ContainerId>,
    statements: &[Statement],
    arrays: &BTreeMap<ContainerId, Array>,
) -> f64 {
    let direct: f64 = statements
        .iter()
        .flat_map(|s| s.writes.iter().map(move |w| (s, w)))
        .filter(|(_, w)| turns.contains(&w.place.container))
        .map(|(s, w)| access_cost(&w.place, s, &vector.var, false))
        .sum();
    let lines = (LINE as f64 / run as f64).max(1.0);
    let through = THROUGH * lines * turns.len() as f64;
    vector_cost(statements, vector, arrays) + (through - direct) / used_lanes(vector)
}

/// The loops of a tile, if one makes the map cheaper than `best`, the cost of its best vector loop.
pub(super) fn tile(
    loops: &[Loop],
    statements: &[Statement],
    arrays: &BTreeMap<ContainerId, Array>,
    best: f64,
    threads: i64,
) -> Option<Tile> {
    let mut writes = statements.iter().flat_map(|s| &s.writes);
    if writes.any(|w| w.conflict.is_some()) {
        return None;
    }
    let mut found: Option<(f64, Tile)> = None;
    for (vector, v) in loops.iter().enumerate().filter(|(_, v)| v.size >= LINE) {
        for (turned, t) in loops.iter().enumerate().filter(|(at, _)| *at != vector) {
            let Some(run) = run_of(t.size) else { continue };
            let Some(turns) = turned_by(v, t, statements, arrays) else {
                continue;
            };
            let n_tiles = points(loops) / (run * v.size.min(TURNED_BLOCK));
            let cost = cost(v, run, &turns, statements, arrays);
            let least = found.as_ref().map_or(best, |(least, _)| *least);
            if cost < least && n_tiles >= threads * STEPS_PER_THREAD {
                let tile = Tile {
                    vector,
                    turned,
                    run,
                };
                found = Some((cost, tile));
            }
        }
    }
    found.map(|(_, tile)| tile)
}

/// The schedule of a map with a tile.
pub(super) fn schedule(
    tile: &Tile,
    mut rest: Vec<Loop>,
    statements: Vec<Statement>,
    mut kernel: Kernel,
) -> Scheduled {
    let (v, t) = (rest[tile.vector].clone(), rest[tile.turned].clone());
    rest.retain(|l| l.var != v.var && l.var != t.var);
    order(&mut rest, &statements);
    let (outer, inner, mut statements) = in_runs(&t, tile.run, &statements);
    for l in outer.iter().chain([&inner]) {
        kernel.extents.insert(&l.var, l.size);
    }
    let strip = blocks(&v, TURNED_BLOCK, &mut kernel.extents);
    let width = strip.as_ref().map_or(v.size, |s| s.block);
    let first = strip
        .as_ref()
        .map_or(SymExpr::default(), |s| SymExpr::from(&s.first));
    let place = SymExpr::from(&inner.var) * width + SymExpr::from(&v.var) - first;
    let mut stores = Vec::new();
    for w in statements.iter_mut().flat_map(|s| &mut s.writes) {
        if crosses(w, &v, &inner, &kernel.arrays) {
            let id = ContainerId(u32::MAX - stores.len() as u32);
            let array = tile_of(&kernel.arrays[&w.place.container], width * tile.run);
            kernel.arrays.insert(id, array);
            stores.push(through(w, id, &place));
        }
    }
    let mut parallel = rest;
    parallel.extend(outer);
    if let Some(s) = &strip {
        parallel.push(Loop {
            var: Symbol::new(format!("{}_b", v.var)),
            size: (s.size + s.block - 1) / s.block,
        });
    }
    let nest = |loops, leaf| Nest {
        loops,
        body: Body::Leaf(leaf),
    };
    Scheduled {
        parallel,
        strip,
        phases: vec![
            nest(vec![inner.clone(), v.clone()], statements),
            nest(vec![v, inner], stores),
        ],
        partial: BTreeSet::new(),
        arrays: kernel.arrays,
        extents: kernel.extents,
    }
}

/// The loop `t` in runs: the loop over them, if there are several, the loop over one, and the statements with both.
fn in_runs(t: &Loop, run: i64, statements: &[Statement]) -> (Option<Loop>, Loop, Vec<Statement>) {
    let part = |suffix: &str, size| Loop {
        var: Symbol::new(format!("{}_{suffix}", t.var)),
        size,
    };
    let (outer, inner) = (part("o", t.size / run), part("i", run));
    let outer = Some(outer).filter(|l| l.size > 1);
    let before = outer
        .as_ref()
        .map_or(SymExpr::default(), |l| SymExpr::from(&l.var));
    let position = before * run + SymExpr::from(&inner.var);
    let parts: Vec<Symbol> = outer
        .iter()
        .chain([&inner])
        .map(|l| l.var.clone())
        .collect();
    let statements = statements
        .iter()
        .map(|s| split(s, &t.var, &position, &parts))
        .collect();
    (outer, inner, statements)
}

/// The array of a tile for elements of `stored`. What is stored in 16 bits is rounded when it leaves the tile.
fn tile_of(stored: &Array, len: i64) -> Array {
    Array {
        dtype: match stored.dtype {
            DType::F16 | DType::BF16 => DType::F32,
            dtype => dtype,
        },
        len,
        local: true,
        literal: None,
        rounded_to: None,
    }
}

/// Sends a write into the tile `id` at `place`; returns the statement that stores it where it was sent before.
fn through(w: &mut Write, id: ContainerId, place: &SymExpr) -> Statement {
    let in_tile = ElementAccess {
        container: id,
        offset: place.clone(),
        gather: Vec::new(),
        guards: Vec::new(),
        fill: None,
    };
    let stored = std::mem::replace(&mut w.place, in_tile.clone());
    Statement {
        reads: vec![in_tile],
        writes: vec![Write {
            place: stored,
            expr: Expr::In(0),
            ..w.clone()
        }],
    }
}

/// The statement with the loop `var` cut into two.
fn split(s: &Statement, var: &Symbol, position: &SymExpr, parts: &[Symbol]) -> Statement {
    let mut s = substituted(s, var, position);
    for w in &mut s.writes {
        if w.owned.remove(var) {
            w.owned.extend(parts.iter().cloned());
        }
    }
    s
}
