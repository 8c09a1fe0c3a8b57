//! Which loops run in parallel, which is the vector loop, in which order the rest runs.
//!
//! Owns these choices and the joining of loops that are contiguous together. Everything here is
//! deterministic and depends only on the kernel and the number of threads. Never prints.

use super::body::{Array, Body, ElementAccess, Kernel, Nest, Statement, Write};
use super::index::{Extents, Loop, coefficient, mentions};
use super::merge::{substituted, visit_statements};
use super::tile;
use graph::{ContainerId, Expr, SymExpr, Symbol};
use std::collections::{BTreeMap, BTreeSet};

/// A loop cut into blocks; the block number is the last parallel loop.
#[derive(Clone, Debug)]
pub(crate) struct Strip {
    /// The loop that is cut; inside, it runs over one block.
    pub(crate) var: Symbol,
    /// Its whole extent.
    pub(crate) size: i64,
    /// Elements in a block.
    pub(crate) block: i64,
    /// The variable that holds the first element of the block.
    pub(crate) first: Symbol,
}

/// A kernel with every decision taken.
#[derive(Clone, Debug)]
pub(crate) struct Scheduled {
    /// Run in parallel as one flat loop, outermost first.
    pub(crate) parallel: Vec<Loop>,
    /// If set, the last of `parallel` counts its blocks.
    pub(crate) strip: Option<Strip>,
    /// Run in sequence at each parallel point; loops outermost first, vector loop last.
    pub(crate) phases: Vec<Nest>,
    /// Containers reduced over parallel points: each thread makes a part, a second launch combines.
    pub(crate) partial: BTreeSet<ContainerId>,
    pub(crate) arrays: BTreeMap<ContainerId, Array>,
    pub(crate) extents: Extents,
}

/// Elements of a vector loop that one parallel step handles.
const BLOCK: i64 = 4096;
/// Elements of an outer vector loop moved inside the phases of a kernel.
const SUNK_BLOCK: i64 = 64;
/// Elements of a vector loop between two steps of the loop along which an operand is contiguous: the cache
/// lines that they touch stay in the first-level cache until all of each line is used.
pub(super) const TURNED_BLOCK: i64 = 64;
/// Elements of a cache line, of the smallest type that is worth it.
pub(super) const LINE: i64 = 16;
/// Parallel steps wanted for each thread, for balance.
pub(super) const STEPS_PER_THREAD: i64 = 4;

/// Decides everything for a kernel whose nests are merged. `None` if it has several phases and too
/// few outer points to keep the threads busy: the phases should then be kernels of their own.
pub(crate) fn schedule(mut kernel: Kernel, threads: usize) -> Option<Scheduled> {
    let threads = threads.max(1) as i64;
    if is_free(&kernel)
        && let [nest] = kernel.phases.as_mut_slice()
        && let Body::Leaf(statements) = &mut nest.body
    {
        let mut loops = std::mem::take(&mut kernel.outer);
        loops.append(&mut nest.loops);
        let mut statements = std::mem::take(statements);
        join_loops(&mut loops, &mut [&mut statements], &mut kernel.extents);
        return Some(schedule_free(loops, statements, kernel, threads));
    }
    schedule_phases(kernel, threads)
}

/// Whether all loops may be permuted: one nest, nothing private to an outer point.
fn is_free(kernel: &Kernel) -> bool {
    let [nest] = kernel.phases.as_slice() else {
        return false;
    };
    let Body::Leaf(statements) = &nest.body else {
        return false;
    };
    statements
        .iter()
        .flat_map(|s| &s.writes)
        .all(|w| w.conflict.is_none() || !kernel.arrays[&w.place.container].local)
}

/// Joins loops `a` around `b` into one wherever every access moves along them as along one.
fn join_loops(loops: &mut Vec<Loop>, leaves: &mut [&mut Vec<Statement>], extents: &mut Extents) {
    'search: loop {
        for a in 0..loops.len() {
            for b in 0..loops.len() {
                if a == b || !joinable(&loops[a], &loops[b], leaves) {
                    continue;
                }
                let outer = loops[a].clone();
                let inner = loops[b].clone();
                let size = outer.size * inner.size;
                let var = Symbol::new(format!("{}_{}", outer.var, inner.var));
                for leaf in leaves.iter_mut() {
                    for s in leaf.iter_mut() {
                        *s = joined(s, &outer.var, &inner.var, &var);
                    }
                }
                extents.insert(&var, size);
                loops[b] = Loop { var, size };
                loops.remove(a);
                continue 'search;
            }
        }
        return;
    }
}

/// Joins neighbours of a list of loops, outermost first, where that is possible; the list keeps its order.
pub(crate) fn joined_in_order(
    mut loops: Vec<Loop>,
    statements: &mut Vec<Statement>,
    extents: &mut Extents,
) -> Vec<Loop> {
    let mut at = 1;
    while at < loops.len() {
        let mut pair = loops[at - 1..=at].to_vec();
        if joinable(&pair[0], &pair[1], &[statements]) {
            join_loops(&mut pair, &mut [statements], extents);
            loops.splice(at - 1..=at, pair);
        } else {
            at += 1;
        }
    }
    loops
}

fn joinable(outer: &Loop, inner: &Loop, leaves: &[&mut Vec<Statement>]) -> bool {
    let along = |e: &SymExpr| {
        matches!((coefficient(e, &outer.var), coefficient(e, &inner.var)),
            (Some(a), Some(b)) if a == b * inner.size)
    };
    let place = |p: &ElementAccess| along(&p.offset) && p.guards.iter().all(|g| along(&g.index));
    leaves.iter().flat_map(|l| l.iter()).all(|s| {
        s.reads.iter().all(place)
            && s.writes.iter().all(|w| {
                let mut indices_ok = true;
                w.expr.visit(&mut |e| {
                    if let Expr::Index(i) = e {
                        indices_ok &= along(i);
                    }
                });
                place(&w.place)
                    && indices_ok
                    && w.owned.contains(&outer.var) == w.owned.contains(&inner.var)
            })
    })
}

fn joined(s: &Statement, outer: &Symbol, inner: &Symbol, var: &Symbol) -> Statement {
    let mut s = substituted(s, outer, &SymExpr::default());
    s = substituted(&s, inner, &SymExpr::from(var));
    for w in &mut s.writes {
        if w.owned.contains(inner) {
            w.owned.insert(var.clone());
        }
    }
    s
}

/// Cost of one access when `var` is the vector loop, in units of a contiguous access.
pub(super) fn access_cost(
    place: &ElementAccess,
    statement: &Statement,
    var: &Symbol,
    local: bool,
) -> f64 {
    let gathered = place.gather.iter().any(|g| {
        let index = &statement.reads[g.read];
        mentions(&index.offset, var) || !index.gather.is_empty()
    });
    let stride = coefficient(&place.offset, var);
    let guarded = place.guards.iter().any(|g| mentions(&g.index, var));
    let cost = match stride {
        _ if gathered => 8.0,
        Some(0) => 0.0,
        Some(1) => 1.0,
        Some(c) => (1.0 + c.abs() as f64 / 2.0).min(8.0),
        None => 8.0,
    };
    let cost = if local { cost / 4.0 } else { cost };
    if guarded { cost + 0.5 } else { cost }
}

pub(super) fn vector_cost(
    statements: &[Statement],
    l: &Loop,
    arrays: &BTreeMap<ContainerId, Array>,
) -> f64 {
    let mut cost = 0.05;
    for s in statements {
        for p in s.reads.iter().chain(s.writes.iter().map(|w| &w.place)) {
            cost += access_cost(p, s, &l.var, arrays[&p.container].local);
        }
    }
    cost / used_lanes(l)
}

/// The part of a vector's lanes that a loop uses: a short loop wastes some.
pub(super) fn used_lanes(l: &Loop) -> f64 {
    l.size as f64 / ((l.size + 15) / 16 * 16) as f64
}

/// The index of the best vector loop; the last one among equals.
fn best_vector(
    loops: &[Loop],
    statements: &[Statement],
    arrays: &BTreeMap<ContainerId, Array>,
) -> Option<(usize, f64)> {
    let mut best: Option<(usize, f64)> = None;
    for (at, l) in loops.iter().enumerate() {
        let cost = vector_cost(statements, l, arrays);
        if best.is_none_or(|(_, c)| cost <= c) {
            best = Some((at, cost));
        }
    }
    best
}

/// Largest step that any access takes along the loop: outer loops take large steps.
fn reach(statements: &[Statement], var: &Symbol) -> i64 {
    let places = statements
        .iter()
        .flat_map(|s| s.reads.iter().chain(s.writes.iter().map(|w| &w.place)));
    places
        .map(|p| coefficient(&p.offset, var).map_or(1, i64::abs))
        .max()
        .unwrap_or(0)
}

/// Sorts loops outermost first: reduced ones inside, large steps outside.
pub(super) fn order(loops: &mut [Loop], statements: &[Statement]) {
    loops.sort_by_key(|l| {
        let reduced = statements
            .iter()
            .flat_map(|s| &s.writes)
            .any(|w| w.conflict.is_some() && !w.owned.contains(&l.var));
        (reduced, -reach(statements, &l.var))
    });
}

pub(super) fn points(loops: &[Loop]) -> i64 {
    loops.iter().map(|l| l.size).product()
}

/// How the loops of one free nest are shared out.
struct Shares {
    parallel: Vec<Loop>,
    inner: Vec<Loop>,
    partial: bool,
}

fn schedule_free(
    loops: Vec<Loop>,
    statements: Vec<Statement>,
    mut kernel: Kernel,
    threads: i64,
) -> Scheduled {
    let mut rest = loops;
    let best = best_vector(&rest, &statements, &kernel.arrays);
    let tile =
        best.and_then(|(_, cost)| tile::tile(&rest, &statements, &kernel.arrays, cost, threads));
    if let Some(tile) = tile {
        return tile::schedule(&tile, rest, statements, kernel);
    }
    let vector = best.map(|(at, _)| rest.remove(at));
    order(&mut rest, &statements);
    let conflicts: Vec<&Write> = statements
        .iter()
        .flat_map(|s| &s.writes)
        .filter(|w| w.conflict.is_some())
        .collect();
    let turned = vector
        .as_ref()
        .filter(|_| conflicts.is_empty())
        .and_then(|v| turned(&rest, v, &statements, &kernel.arrays, threads));
    let turned = turned.map(|at| rest.remove(at));
    let shares = share(rest, vector.as_ref(), &conflicts, &kernel, threads);
    let partial = conflicts
        .iter()
        .filter(|_| shares.partial)
        .map(|w| w.place.container)
        .collect();
    let vector_owned =
        |v: &Loop| shares.partial || conflicts.iter().all(|w| w.owned.contains(&v.var));
    let mut parallel = shares.parallel;
    let mut inner = shares.inner;
    let mut strip = None;
    if let Some(v) = vector {
        let steps = points(&parallel);
        let long = inner.is_empty() && v.size > 2 * BLOCK;
        if let Some(turned) = turned {
            inner.push(turned);
            strip = blocks(&v, TURNED_BLOCK, &mut kernel.extents);
        } else if vector_owned(&v) && (long || steps < threads * STEPS_PER_THREAD) {
            strip = cut(&v, steps, threads, &mut kernel.extents);
        }
        if let Some(s) = &strip {
            parallel.push(Loop {
                var: Symbol::new(format!("{}_b", v.var)),
                size: (v.size + s.block - 1) / s.block,
            });
        }
        inner.push(v);
    }
    Scheduled {
        parallel,
        strip,
        phases: vec![Nest {
            loops: inner,
            body: Body::Leaf(statements),
        }],
        partial,
        arrays: kernel.arrays,
        extents: kernel.extents,
    }
}

/// A loop along which an operand is contiguous, while the vector loop crosses that operand in large steps, as in a
/// transposition. It runs inside, around a block of the vector loop, if enough points are left for the threads.
fn turned(
    rest: &[Loop],
    vector: &Loop,
    statements: &[Statement],
    arrays: &BTreeMap<ContainerId, Array>,
    threads: i64,
) -> Option<usize> {
    let step = |p: &ElementAccess, l: &Loop| coefficient(&p.offset, &l.var).unwrap_or(0).abs();
    let places = statements
        .iter()
        .flat_map(|s| s.reads.iter().chain(s.writes.iter().map(|w| &w.place)));
    let crossed = places
        .filter(|p| !arrays[&p.container].local && p.gather.is_empty())
        .filter(|p| step(p, vector) >= LINE);
    let along = |p: &ElementAccess| rest.iter().position(|l| step(p, l) == 1 && l.size > 1);
    let at = crossed.filter_map(along).max_by_key(|at| rest[*at].size)?;
    let n_blocks = vector.size / TURNED_BLOCK;
    let steps = points(rest) / rest[at].size * n_blocks;
    (n_blocks > 1 && steps >= threads * STEPS_PER_THREAD).then_some(at)
}

/// Cuts the vector loop into blocks: enough for all threads, at most [`BLOCK`] long.
fn cut(v: &Loop, steps: i64, threads: i64, extents: &mut Extents) -> Option<Strip> {
    let wanted = (threads * STEPS_PER_THREAD + steps - 1) / steps;
    blocks(v, ((v.size / wanted) / 16 * 16).clamp(64, BLOCK), extents)
}

/// The vector loop in blocks of length `block`; `None` if that is a single block.
pub(super) fn blocks(v: &Loop, block: i64, extents: &mut Extents) -> Option<Strip> {
    if block >= v.size {
        return None;
    }
    let first = Symbol::new(format!("{}_0", v.var));
    extents.insert(&first, v.size);
    Some(Strip {
        var: v.var.clone(),
        size: v.size,
        block,
        first,
    })
}

/// Chooses parallel loops so that no two threads write one element; if that leaves a thread without two
/// points and the reduced containers are small, lets each thread reduce into a part of its own. A lone
/// thread has such a part too, since parts add up in double precision.
fn share(
    rest: Vec<Loop>,
    vector: Option<&Loop>,
    conflicts: &[&Write],
    kernel: &Kernel,
    threads: i64,
) -> Shares {
    let owned_by_all = |l: &Loop| conflicts.iter().all(|w| w.owned.contains(&l.var));
    let (owned, reduced): (Vec<Loop>, Vec<Loop>) = rest.iter().cloned().partition(owned_by_all);
    let all_points = points(&rest) * vector.map_or(1, |v| v.size);
    let shared_len: i64 = conflicts
        .iter()
        .map(|w| kernel.arrays[&w.place.container].len)
        .sum();
    let gathers = conflicts.iter().any(|w| !w.place.gather.is_empty());
    let idle = points(&owned) < 2 * threads;
    let small = shared_len * threads * 8 <= all_points;
    let reduces = !reduced.is_empty() || vector.is_some_and(|v| !owned_by_all(v));
    if !conflicts.is_empty() && reduces && idle && small && !gathers {
        return Shares {
            parallel: rest,
            inner: Vec::new(),
            partial: true,
        };
    }
    Shares {
        parallel: owned,
        inner: reduced,
        partial: false,
    }
}

fn leaves_of(nests: &mut [Nest]) -> Vec<&mut Vec<Statement>> {
    let mut leaves = Vec::new();
    for nest in nests {
        match &mut nest.body {
            Body::Leaf(statements) => leaves.push(statements),
            Body::Phases(inner) => leaves.extend(leaves_of(inner)),
        }
    }
    leaves
}

fn schedule_phases(mut kernel: Kernel, threads: i64) -> Option<Scheduled> {
    let work = |n: &Nest| points(&n.loops);
    let heavy = kernel.phases.iter().map(work).sum::<i64>() > 1024;
    if points(&kernel.outer) < threads && heavy && kernel.phases.len() > 1 {
        return None;
    }
    join_loops(
        &mut kernel.outer,
        &mut leaves_of(&mut kernel.phases),
        &mut kernel.extents,
    );
    let mut statements = Vec::new();
    for nest in &kernel.phases {
        visit_statements(nest, &mut |s| statements.push(s.clone()));
    }
    order(&mut kernel.outer, &statements);
    // The order above puts reduced loops inside; among parallel loops only the steps matter.
    kernel.outer.sort_by_key(|l| -reach(&statements, &l.var));
    let strip = sink(&mut kernel);
    for nest in &mut kernel.phases {
        arrange(nest, &kernel.arrays, &mut kernel.extents, strip.as_ref());
    }
    let mut parallel = kernel.outer;
    if let Some(s) = &strip {
        parallel.push(Loop {
            var: Symbol::new(format!("{}_b", s.var)),
            size: (s.size + s.block - 1) / s.block,
        });
    }
    let partial = partials(&kernel.phases, &parallel, strip.as_ref(), &kernel.arrays);
    Some(Scheduled {
        parallel,
        strip,
        phases: kernel.phases,
        partial,
        arrays: kernel.arrays,
        extents: kernel.extents,
    })
}

/// Shared containers that different parallel points write under a conflict resolution.
fn partials(
    phases: &[Nest],
    parallel: &[Loop],
    strip: Option<&Strip>,
    arrays: &BTreeMap<ContainerId, Array>,
) -> BTreeSet<ContainerId> {
    let mut found = BTreeSet::new();
    for nest in phases {
        visit_statements(nest, &mut |s| {
            for w in s.writes.iter().filter(|w| w.conflict.is_some()) {
                let shared = !arrays[&w.place.container].local;
                let last = parallel.len() - usize::from(strip.is_some());
                let owned = parallel[..last].iter().all(|l| w.owned.contains(&l.var))
                    && strip.is_none_or(|s| w.owned.contains(&s.var));
                if shared && !owned {
                    found.insert(w.place.container);
                }
            }
        });
    }
    found
}

/// Moves an outer loop inside every phase if memory is contiguous along it and not along the
/// phases' own loops. Local containers get a dimension for it.
fn sink(kernel: &mut Kernel) -> Option<Strip> {
    let mut inner_cost = 0.0;
    let mut leaves = Vec::new();
    collect_leaves(&kernel.phases, 1, &mut leaves);
    for (loops, statements, runs) in &leaves {
        let best = best_vector(loops, statements, &kernel.arrays);
        let own = best.map_or(8.0 * statements.len() as f64, |(_, cost)| cost);
        inner_cost += own * (points(loops) * runs) as f64;
    }
    let mut best: Option<(usize, f64)> = None;
    for (at, l) in kernel.outer.iter().enumerate() {
        let cost: f64 = leaves
            .iter()
            .map(|(loops, s, runs)| {
                vector_cost(s, l, &kernel.arrays) * (points(loops) * runs) as f64
            })
            .sum();
        if best.is_none_or(|(_, c)| cost < c) {
            best = Some((at, cost));
        }
    }
    let (at, cost) = best?;
    if cost > 0.7 * inner_cost {
        return None;
    }
    let v = kernel.outer.remove(at);
    let first = Symbol::new(format!("{}_0", v.var));
    kernel.extents.insert(&first, v.size);
    let strip = Strip {
        var: v.var.clone(),
        size: v.size,
        block: SUNK_BLOCK.min(v.size),
        first,
    };
    deepen_locals(kernel, &strip);
    for nest in &mut kernel.phases {
        nest_inside(nest, &v);
    }
    Some(strip)
}

fn collect_leaves<'a>(
    nests: &'a [Nest],
    runs: i64,
    leaves: &mut Vec<(&'a [Loop], &'a [Statement], i64)>,
) {
    for nest in nests {
        match &nest.body {
            Body::Leaf(s) => leaves.push((&nest.loops, s, runs)),
            Body::Phases(inner) => collect_leaves(inner, runs * points(&nest.loops), leaves),
        }
    }
}

fn nest_inside(nest: &mut Nest, v: &Loop) {
    match &mut nest.body {
        Body::Leaf(_) => nest.loops.push(v.clone()),
        Body::Phases(inner) => inner.iter_mut().for_each(|n| nest_inside(n, v)),
    }
}

fn deepen_locals(kernel: &mut Kernel, strip: &Strip) {
    let along = SymExpr::from(&strip.var) - SymExpr::from(&strip.first);
    for array in kernel.arrays.values_mut().filter(|a| a.local) {
        array.len *= strip.block;
    }
    let arrays = kernel.arrays.clone();
    for leaf in leaves_of(&mut kernel.phases) {
        for s in leaf.iter_mut() {
            for p in s
                .reads
                .iter_mut()
                .chain(s.writes.iter_mut().map(|w| &mut w.place))
                .filter(|p| arrays[&p.container].local)
            {
                p.offset = p.offset.clone() * strip.block + along.clone();
                p.gather.iter_mut().for_each(|g| g.stride *= strip.block);
            }
            for w in s
                .writes
                .iter_mut()
                .filter(|w| arrays[&w.place.container].local)
            {
                w.owned.insert(strip.var.clone());
            }
        }
    }
}

/// Orders the loops of a nest, the vector loop last.
fn arrange(
    nest: &mut Nest,
    arrays: &BTreeMap<ContainerId, Array>,
    extents: &mut Extents,
    strip: Option<&Strip>,
) {
    match &mut nest.body {
        Body::Phases(inner) => inner
            .iter_mut()
            .for_each(|n| arrange(n, arrays, extents, strip)),
        Body::Leaf(statements) => {
            let sunk = strip.and_then(|s| {
                let at = nest.loops.iter().position(|l| l.var == s.var)?;
                Some(nest.loops.remove(at))
            });
            join_loops(&mut nest.loops, &mut [statements], extents);
            let vector = sunk.or_else(|| {
                let (at, _) = best_vector(&nest.loops, statements, arrays)?;
                Some(nest.loops.remove(at))
            });
            order(&mut nest.loops, statements);
            nest.loops.extend(vector);
        }
    }
}
