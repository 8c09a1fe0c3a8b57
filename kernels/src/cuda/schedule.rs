//! Which loops of a kernel are blocks, which are threads, which run inside a thread.
//!
//! Owns these choices only; they depend on nothing but the kernel. Every element of memory is written
//! by one thread of one block, so nothing needs atomics and results do not depend on the order in
//! which blocks run. Never prints.
//!
//! - A *free* kernel (one nest) gives each point of the loops that all its reductions own to one
//!   thread of the grid; the loops that are reduced run inside the thread. A scatter owns the loops
//!   along its plain dimensions, so a thread walks the sources of its column in order.
//! - A *row* kernel gives each outer point to a block. Its phases run one after another with barriers
//!   between them; containers local to the point live in shared memory. A phase that reduces to single
//!   numbers spreads the reduced loops over the threads and adds up through the block.

use crate::emit::body::{Array, Body, Kernel, Nest, Statement, Write};
use crate::emit::index::{Extents, Loop, coefficient, mentions};
use crate::emit::merge::visit_statements;
use graph::{ContainerId, Symbol};
use std::collections::BTreeMap;

/// Shared memory that every architecture gives a block without asking.
const STATIC_SHARED_BYTES: i64 = 48 * 1024 - 1024;
/// Points of several phases below which one block may run all of them.
const LIGHT: i64 = 4096;
/// Outer points that keep a device busy.
const BUSY_BLOCKS: i64 = 64;
/// Points owned by threads that keep a device busy although each reduces alone.
const BUSY_THREADS: i64 = 2048;
/// Terms of a reduction worth a block.
const BLOCK_TERMS: i64 = 64;

/// Who runs the points of a leaf's [`Leaf::spread`] loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spread {
    /// Threads of all blocks, each point being one thread's own.
    Grid,
    /// Threads of the block, each point being one thread's own.
    Block,
    /// Threads of the block, each making a part of the same sums.
    Reduced,
}

/// One nest of statements.
#[derive(Clone, Debug)]
pub(super) struct Leaf {
    pub(super) how: Spread,
    /// Shared out as one flat loop, outermost first.
    pub(super) spread: Vec<Loop>,
    /// Run inside a thread.
    pub(super) inner: Vec<Loop>,
    pub(super) statements: Vec<Statement>,
}

/// A step of a block.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    Leaf(Leaf),
    /// Loops that all threads of the block run together.
    Repeat(Vec<Loop>, Vec<Phase>),
}

/// A kernel with every decision taken.
#[derive(Clone, Debug)]
pub(super) struct Scheduled {
    /// One block for each point; empty for free kernels.
    pub(super) blocks: Vec<Loop>,
    /// Outer loops that several blocks could not share: each block runs them in order.
    pub(super) serial: Vec<Loop>,
    pub(super) phases: Vec<Phase>,
    pub(super) threads: i64,
    pub(super) grid: i64,
    pub(super) arrays: BTreeMap<ContainerId, Array>,
    pub(super) extents: Extents,
}

/// Number of points.
pub(super) fn points(loops: &[Loop]) -> i64 {
    loops.iter().map(|l| l.size).product()
}

/// Decides everything; `None` if the phases should be kernels of their own.
pub(super) fn schedule(kernel: Kernel, alone: bool) -> Option<Scheduled> {
    match free_leaf(&kernel) {
        Some((loops, statements)) => Some(schedule_free(loops, statements, kernel)),
        None => schedule_rows(kernel, alone),
    }
}

fn free_leaf(kernel: &Kernel) -> Option<(Vec<Loop>, Vec<Statement>)> {
    let [
        Nest {
            loops,
            body: Body::Leaf(statements),
        },
    ] = kernel.phases.as_slice()
    else {
        return None;
    };
    let local = |w: &Write| w.conflict.is_some() && kernel.arrays[&w.place.container].local;
    if statements.iter().flat_map(|s| &s.writes).any(local) {
        return None;
    }
    let loops = kernel.outer.iter().chain(loops).cloned().collect();
    Some((loops, statements.clone()))
}

fn conflicts(statements: &[Statement]) -> impl Iterator<Item = &Write> {
    let writes = statements.iter().flat_map(|s| &s.writes);
    writes.filter(|w| w.conflict.is_some())
}

/// Loops of which different values write different elements, and the others; the most contiguous
/// loop comes last among the first, so that neighbouring threads meet neighbouring elements.
fn split_owned(loops: Vec<Loop>, statements: &[Statement]) -> (Vec<Loop>, Vec<Loop>) {
    let owned = |l: &Loop| conflicts(statements).all(|w| w.owned.contains(&l.var));
    let (mine, rest): (Vec<Loop>, Vec<Loop>) = loops.into_iter().partition(owned);
    (contiguous_last(mine, statements), rest)
}

/// Loops in the order in which their last varies fastest through memory.
fn contiguous_last(mut loops: Vec<Loop>, statements: &[Statement]) -> Vec<Loop> {
    loops.sort_by_key(|l| std::cmp::Reverse(step(statements, &l.var)));
    loops
}

/// The sum of the steps that accesses take along a loop.
fn step(statements: &[Statement], var: &Symbol) -> i64 {
    let places = statements
        .iter()
        .flat_map(|s| s.reads.iter().chain(s.writes.iter().map(|w| &w.place)));
    places
        .map(|p| coefficient(&p.offset, var).map_or(64, |c| c.abs().min(1 << 20)))
        .sum()
}

/// Whether all reductions of the leaf go to elements that none of the loops moves.
fn reduces_to_numbers(statements: &[Statement], loops: &[Loop]) -> bool {
    let fixed = |w: &Write| {
        w.place.gather.is_empty()
            && w.place.guards.is_empty()
            && !loops.iter().any(|l| mentions(&w.place.offset, &l.var))
    };
    let mut any = false;
    conflicts(statements).all(|w| {
        any = true;
        fixed(w)
    }) && any
}

fn schedule_free(loops: Vec<Loop>, statements: Vec<Statement>, kernel: Kernel) -> Scheduled {
    let (mine, rest) = split_owned(loops, &statements);
    let numbers = reduces_to_numbers(&statements, &rest);
    let few = points(&mine) < BUSY_THREADS && points(&rest) >= BLOCK_TERMS;
    if numbers && few {
        let (blocks, grid) = (mine.clone(), points(&mine));
        let threads = threads_for(points(&rest));
        let leaf = Leaf {
            how: Spread::Reduced,
            spread: contiguous_last(rest, &statements),
            inner: Vec::new(),
            statements,
        };
        return Scheduled {
            blocks,
            serial: Vec::new(),
            phases: vec![Phase::Leaf(leaf)],
            threads,
            grid,
            arrays: kernel.arrays,
            extents: kernel.extents,
        };
    }
    let n = points(&mine);
    let threads = threads_for(n);
    let leaf = Leaf {
        how: Spread::Grid,
        spread: mine,
        inner: rest,
        statements,
    };
    Scheduled {
        blocks: Vec::new(),
        serial: Vec::new(),
        phases: vec![Phase::Leaf(leaf)],
        threads,
        grid: (n + threads - 1) / threads,
        arrays: kernel.arrays,
        extents: kernel.extents,
    }
}

/// Whole warps, at most 256 threads.
fn threads_for(n: i64) -> i64 {
    ((n + 31) / 32 * 32).clamp(32, 256)
}

fn schedule_rows(kernel: Kernel, alone: bool) -> Option<Scheduled> {
    let mut shared = Vec::new();
    let mut widest = 1;
    for nest in &kernel.phases {
        widest = widest.max(points(&nest.loops));
        visit_statements(nest, &mut |s| {
            shared.extend(conflicts(std::slice::from_ref(s)).cloned());
        });
    }
    shared.retain(|w| !kernel.arrays[&w.place.container].local);
    let owned = |l: &Loop| shared.iter().all(|w| w.owned.contains(&l.var));
    let (blocks, serial): (Vec<Loop>, Vec<Loop>) = kernel.outer.into_iter().partition(owned);
    let locals = kernel.arrays.values().filter(|a| a.local);
    let shared_bytes: i64 = locals.map(|a| a.len * a.dtype.bytes() as i64).sum();
    let work: i64 = kernel.phases.iter().map(|n| points(&n.loops)).sum();
    let idle = points(&blocks) < BUSY_BLOCKS && work * points(&serial) > LIGHT;
    if !alone && (!serial.is_empty() || shared_bytes > STATIC_SHARED_BYTES || idle) {
        return None;
    }
    let phases = kernel.phases.into_iter().map(phase).collect();
    Some(Scheduled {
        grid: points(&blocks),
        blocks,
        serial,
        phases,
        threads: threads_for(widest),
        arrays: kernel.arrays,
        extents: kernel.extents,
    })
}

fn phase(nest: Nest) -> Phase {
    match nest.body {
        Body::Phases(inner) => Phase::Repeat(nest.loops, inner.into_iter().map(phase).collect()),
        Body::Leaf(statements) if reduces_to_numbers(&statements, &nest.loops) => {
            Phase::Leaf(Leaf {
                how: Spread::Reduced,
                spread: contiguous_last(nest.loops, &statements),
                inner: Vec::new(),
                statements,
            })
        }
        Body::Leaf(statements) => {
            let (spread, inner) = split_owned(nest.loops, &statements);
            Phase::Leaf(Leaf {
                how: Spread::Block,
                spread,
                inner,
                statements,
            })
        }
    }
}
