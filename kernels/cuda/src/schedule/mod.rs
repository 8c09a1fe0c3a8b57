//! Which loops of a kernel are blocks, which are threads, which run inside a thread; what stays in
//! registers.
//!
//! Owns these choices only; they depend on nothing but the kernel. Every element of memory is written
//! by one thread of one block, so nothing needs atomics and results do not depend on the order in
//! which blocks run. Never prints.
//!
//! - A *flat* kernel (one nest) gives a vector of neighbouring points of the loops that all its
//!   reductions own to each thread; loops that are reduced run inside the thread.
//! - *Tiles* are flat kernels whose loads and stores run along different dimensions: a block reads a
//!   square along one and writes it along the other, through shared memory.
//! - A *scatter* adds rows to the places that data name: destinations are dealt out to warps by their
//!   remainder, and each warp walks all sources in order.
//! - *Rows* give each outer point to a group of threads: a part of a warp for short rows, a block for
//!   long ones. Phases run one after another; what one made and the next reads stays in registers
//!   where the same thread meets it again. Sums over the outer points are kept in registers over all
//!   points of a block, and blocks leave their parts in a workspace for a launch that adds them up.

mod free;
mod homes;
pub(super) mod loops;
mod rows;

pub(super) use free::is_turned;

use graph::{ContainerId, Reduction, SymExpr, Symbol};
use kernels::emit::body::{Array, Body, Kernel, Nest, Statement, Write};
use kernels::emit::index::{Extents, Loop};
use kernels::emit::values::Address;
use std::collections::BTreeMap;

/// The variable of a vector's first element.
pub(super) const BASE: &str = "base";

/// One nest of statements.
#[derive(Clone, Debug)]
pub(super) struct Leaf {
    /// Shared out to threads as one flat loop, outermost first.
    pub(super) spread: Vec<Loop>,
    /// Run inside a thread.
    pub(super) inner: Vec<Loop>,
    pub(super) statements: Vec<Statement>,
    /// Neighbours along the last of `spread` that a thread takes at once.
    pub(super) vector: i64,
    /// Position in [`Rows::classes`] if its points are those of a class.
    pub(super) class: Option<usize>,
}

/// A step of a group.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    Leaf(Leaf),
    /// Loops that all threads of the group run together.
    Repeat(Vec<Loop>, Vec<Phase>),
}

/// Leaves that give the same point to the same thread, so that registers pass values on.
#[derive(Clone, Debug)]
pub(super) struct Class {
    pub(super) loops: Vec<Loop>,
    pub(super) vector: i64,
    /// Vectors for each thread.
    pub(super) steps: i64,
}

/// Where a value written in the kernel is found by what reads it later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// Shared memory.
    Shared,
    /// One number in a register of every thread of the group.
    Uniform,
    /// The registers of the threads that a class gives it to.
    Registers(usize),
}

/// A load that is made once and kept in registers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Kept {
    pub(super) address: Address,
    /// The class whose points it is for; `None` for a number that all threads of a group need.
    pub(super) class: Option<usize>,
    /// The same for all points of the kernel.
    pub(super) hoisted: bool,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    /// Outer loops by which blocks differ besides their part of `points`.
    pub(super) blocks: Vec<Loop>,
    /// Blocks that share `points`.
    pub(super) parts: i64,
    /// Outer loops of which a group takes one point at a time.
    pub(super) points: Vec<Loop>,
    /// Outer loops that several blocks could not share: each block runs them in order.
    pub(super) serial: Vec<Loop>,
    /// Threads of a group.
    pub(super) group: i64,
    /// Groups of a block.
    pub(super) groups: i64,
    pub(super) phases: Vec<Phase>,
    pub(super) classes: Vec<Class>,
    pub(super) homes: BTreeMap<ContainerId, Home>,
    pub(super) kept: Vec<Kept>,
}

/// Squares of `side` points of two loops.
#[derive(Clone, Debug)]
pub(super) struct Tiles {
    /// One block for each point and each square.
    pub(super) blocks: Vec<Loop>,
    /// Along which transposed loads are contiguous.
    pub(super) rows: Loop,
    /// Along which stores are contiguous.
    pub(super) columns: Loop,
    pub(super) side: i64,
    pub(super) statements: Vec<Statement>,
}

/// Rows added to destinations that data name.
#[derive(Clone, Debug)]
pub(super) struct Scatter {
    /// Loops over sources, in order.
    pub(super) sources: Vec<Loop>,
    /// Loops over the elements of a row.
    pub(super) row: Vec<Loop>,
    pub(super) vector: i64,
    /// Destinations that are equal modulo this number belong to the same warps.
    pub(super) n_classes: i64,
    pub(super) reduction: Reduction,
    pub(super) statements: Vec<Statement>,
}

/// How a kernel runs.
#[derive(Clone, Debug)]
pub(super) enum Shape {
    Flat(Leaf),
    Tiles(Tiles),
    Scatter(Scatter),
    Rows(Rows),
}

/// A kernel with every decision taken.
#[derive(Clone, Debug)]
pub(super) struct Scheduled {
    pub(super) shape: Shape,
    pub(super) arrays: BTreeMap<ContainerId, Array>,
    pub(super) extents: Extents,
    /// The C type of loop variables.
    pub(super) index: &'static str,
}

/// Decides everything; `None` if the phases should be kernels of their own.
pub(super) fn schedule(mut kernel: Kernel, alone: bool) -> Option<Scheduled> {
    let widest = widest_loop(&kernel);
    kernel.extents.insert(&Symbol::new(BASE), widest);
    let index = loops::index_type(&kernel);
    let shape = match free_leaf(&kernel) {
        Some((loops, statements)) => free::schedule(loops, statements, &mut kernel),
        None => Shape::Rows(rows::schedule(&mut kernel, alone)?),
    };
    Some(Scheduled {
        shape,
        arrays: kernel.arrays,
        extents: kernel.extents,
        index,
    })
}

fn widest_loop(kernel: &Kernel) -> i64 {
    fn widest(nests: &[Nest]) -> i64 {
        let one = |n: &Nest| {
            let own = n.loops.iter().map(|l| l.size).product::<i64>();
            match &n.body {
                Body::Leaf(_) => own,
                Body::Phases(inner) => own.max(widest(inner)),
            }
        };
        nests.iter().map(one).max().unwrap_or(1)
    }
    loops::points(&kernel.outer).saturating_mul(widest(&kernel.phases))
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

/// Whether any of the loops moves the element.
pub(super) fn moved_by(offset: &SymExpr, loops: &[Loop]) -> bool {
    let mentions = |l: &Loop| kernels::emit::index::mentions(offset, &l.var);
    loops.iter().any(mentions)
}
