//! Kernels whose outer points are rows for groups of threads.
//!
//! Owns which outer loops blocks share, how many threads take a row, and how many rows a block takes.

use super::homes::{self, Seen};
use super::loops::{conflicts, contiguous_last, join, points, vector};
use super::{Class, Home, Leaf, Phase, Rows, moved_by};
use graph::{ContainerId, Symbol};
use kernels::emit::body::{Array, Body, Kernel, Nest, Statement, Write};
use kernels::emit::index::Loop;
use kernels::emit::merge::renamed;
use kernels::emit::merge::visit_statements;
use std::collections::BTreeMap;

/// Shared memory that every architecture gives a block without asking.
pub(super) const STATIC_SHARED_BYTES: i64 = 48 * 1024 - 1024;
/// The part of it that sums of groups that meet at the end may take.
const EXCHANGE_BYTES: i64 = 32 * 1024;
/// Points of several phases below which one block may run all of them.
const LIGHT: i64 = 4096;
/// Outer points that keep a device busy.
const BUSY_BLOCKS: i64 = 64;
/// Threads of a block of several rows.
const BLOCK_THREADS: i64 = 256;
/// The same where blocks leave parts of sums: fewer, larger blocks leave fewer parts.
const SUMMING_THREADS: i64 = 512;
/// Numbers of four bytes that a thread keeps for a row; more if the largest block needs them.
const KEPT: i64 = 24;
const MOST_KEPT: i64 = 64;
/// The same in the largest blocks, whose threads have half the registers.
const KEPT_BY_MANY: i64 = 40;
/// Vectors that a thread takes of a row, if registers allow.
const STEPS: i64 = 4;
/// Most blocks that leave parts of sums: one for each multiprocessor of the largest device.
pub(super) const PARTS: i64 = 132;
/// Fewest points that a group takes before it leaves a part.
pub(super) const TURNS: i64 = 8;
/// Threads among which rows are shared out where blocks keep what all rows read: half of what the
/// largest device runs at once.
const SHARING_THREADS: i64 = 1024 * PARTS;

/// The row schedule; `None` if the phases should be kernels of their own.
pub(super) fn schedule(kernel: &mut Kernel, alone: bool) -> Option<Rows> {
    let shared = shared_conflicts(kernel);
    let owned = |l: &Loop| shared.iter().all(|w| w.owned.contains(&l.var));
    let (mine, others): (Vec<Loop>, Vec<Loop>) = kernel.outer.iter().cloned().partition(owned);
    let sums = !others.is_empty();
    if sums && !sums_in_registers(kernel, &others) {
        return alone.then(|| in_order(kernel, mine, others));
    }
    let (blocks, points_of) = if sums {
        (mine, others)
    } else {
        (Vec::new(), mine)
    };
    let work: i64 = kernel.phases.iter().map(|n| points(&n.loops)).sum();
    let busy = points(&blocks) * points(&points_of);
    let idle = busy < BUSY_BLOCKS && work * busy.min(points(&points_of)) > LIGHT;
    let before = kernel.clone();
    let (rows, kept) = of_leaves(kernel, blocks, points_of, sums);
    if sums && kept > most_kept(rows.group) {
        *kernel = before;
        let (mine, others) = kernel.outer.iter().cloned().partition(owned);
        return alone.then(|| in_order(kernel, mine, others));
    }
    let fits = shared_bytes(&rows, &kernel.arrays) <= STATIC_SHARED_BYTES;
    (alone || fits && !idle).then_some(rows)
}

fn shared_bytes(rows: &Rows, arrays: &BTreeMap<ContainerId, Array>) -> i64 {
    let homes = rows.homes.iter().filter(|(_, h)| **h == Home::Shared);
    let locals = homes.map(|(id, _)| &arrays[id]).filter(|a| a.local);
    locals.map(|a| a.len * a.dtype.bytes() as i64).sum()
}

/// Conflicts in memory that outlives a point.
fn shared_conflicts(kernel: &Kernel) -> Vec<Write> {
    let mut shared = Vec::new();
    for nest in &kernel.phases {
        visit_statements(nest, &mut |s| {
            shared.extend(conflicts(std::slice::from_ref(s)).cloned());
        });
    }
    shared.retain(|w| !kernel.arrays[&w.place.container].local);
    shared
}

/// Whether every sum over the outer points can wait in registers: its element is the same at all of
/// them, nothing in the kernel reads it, no other sum goes to it, and each element is met.
fn sums_in_registers(kernel: &Kernel, others: &[Loop]) -> bool {
    let mut n_writes: BTreeMap<ContainerId, usize> = BTreeMap::new();
    let mut read = Vec::new();
    for nest in &kernel.phases {
        visit_statements(nest, &mut |s| {
            read.extend(s.reads.iter().map(|p| p.container));
            for w in &s.writes {
                *n_writes.entry(w.place.container).or_insert(0) += 1;
            }
        });
    }
    let others_points = points(others);
    let outer_points = points(&kernel.outer);
    kernel.phases.iter().all(|nest| {
        let Body::Leaf(statements) = &nest.body else {
            return false;
        };
        let mut writes = statements.iter().flat_map(|s| &s.writes);
        writes.all(|w| {
            let id = w.place.container;
            let array = &kernel.arrays[&id];
            if array.local || others.iter().all(|l| w.owned.contains(&l.var)) {
                return true;
            }
            let moving = |l: &&Loop| moved_by(&w.place.offset, std::slice::from_ref(*l));
            let made: i64 = nest.loops.iter().filter(moving).map(|l| l.size).product();
            let injective = |l: &&Loop| w.owned.contains(&l.var);
            w.conflict.is_some()
                && w.place.gather.is_empty()
                && w.place.guards.is_empty()
                && !moved_by(&w.place.offset, others)
                && nest.loops.iter().filter(moving).all(|l| injective(&l))
                && made * (outer_points / others_points) == array.len
                && n_writes[&id] == 1
                && !read.contains(&id)
        })
    })
}

/// Every block runs in order the loops that blocks could not share.
fn in_order(kernel: &mut Kernel, mine: Vec<Loop>, serial: Vec<Loop>) -> Rows {
    let (mut rows, _) = of_leaves(kernel, Vec::new(), mine, false);
    rows.serial = serial;
    // Registers would have to be set anew at each step.
    whole_block(&mut rows, kernel);
    rows
}

/// Locals in shared memory, one row for each block.
fn whole_block(rows: &mut Rows, kernel: &Kernel) {
    rows.kept.clear();
    rows.homes.retain(|id, home| {
        *home = Home::Shared;
        kernel.arrays[id].local
    });
    rows.groups = 1;
    rows.group = threads_for(rows.group * rows.groups, widest(&rows.phases));
    rows.parts = points(&rows.points);
}

fn widest(phases: &[Phase]) -> i64 {
    let one = |p: &Phase| match p {
        Phase::Leaf(l) => points(&l.spread) / l.vector,
        Phase::Repeat(_, inner) => widest(inner),
    };
    phases.iter().map(one).max().unwrap_or(1)
}

/// Whole warps, at most 256 threads.
fn threads_for(least: i64, n: i64) -> i64 {
    least.max(((n + 31) / 32 * 32).clamp(32, BLOCK_THREADS))
}

/// A leaf with its loops divided into those whose points all belong to different sums, and those that a thread
/// runs. Sums of single numbers do not bind loops: a group adds them up.
pub(super) fn leaf(loops: Vec<Loop>, statements: Vec<Statement>) -> Leaf {
    let bound: Vec<&Write> = conflicts(&statements)
        .filter(|w| {
            let p = &w.place;
            moved_by(&p.offset, &loops) || !p.gather.is_empty() || !p.guards.is_empty()
        })
        .collect();
    let owned = |l: &Loop| bound.iter().all(|w| w.owned.contains(&l.var));
    let (spread, inner): (Vec<Loop>, Vec<Loop>) = loops.iter().cloned().partition(owned);
    Leaf {
        spread,
        inner,
        statements,
        vector: 1,
        class: None,
    }
}

fn phase(nest: Nest, around: &[Loop], arrays: &BTreeMap<ContainerId, Array>) -> Phase {
    match nest.body {
        Body::Phases(inner) => {
            let around: Vec<Loop> = around.iter().chain(&nest.loops).cloned().collect();
            let inner = inner.into_iter().map(|n| phase(n, &around, arrays));
            Phase::Repeat(nest.loops, inner.collect())
        }
        Body::Leaf(statements) => {
            let mut leaf = leaf(nest.loops, statements);
            leaf.spread = contiguous_last(leaf.spread, &leaf.statements);
            leaf.vector = vector(&leaf.spread, around, &leaf.statements, arrays);
            Phase::Leaf(leaf)
        }
    }
}

/// Numbers of four bytes that fit the registers of a thread, besides what it computes with.
pub(super) fn most_kept(group: i64) -> i64 {
    if group > SUMMING_THREADS {
        KEPT_BY_MANY
    } else {
        MOST_KEPT
    }
}

/// Decides everything but the outer loops. Returns also how many numbers of four bytes a thread keeps.
pub(super) fn of_leaves(
    kernel: &mut Kernel,
    blocks: Vec<Loop>,
    points_of: Vec<Loop>,
    sums: bool,
) -> (Rows, i64) {
    let nests = std::mem::take(&mut kernel.phases);
    let nested = nests.iter().any(|n| matches!(n.body, Body::Phases(_)));
    let mut rows = Rows {
        parts: points(&points_of),
        blocks,
        points: points_of,
        serial: Vec::new(),
        group: 1,
        groups: 1,
        phases: Vec::new(),
        classes: Vec::new(),
        homes: BTreeMap::new(),
        kept: Vec::new(),
    };
    if nested {
        let around = around(&rows);
        let phases = nests.into_iter().map(|n| phase(n, &around, &kernel.arrays));
        rows.phases = phases.collect();
        for (id, _) in kernel.arrays.iter().filter(|(_, a)| a.local) {
            rows.homes.insert(*id, Home::Shared);
        }
        whole_block(&mut rows, kernel);
        return (rows, 0);
    }
    let mut leaves: Vec<Leaf> = nests
        .into_iter()
        .map(|n| match n.body {
            Body::Leaf(statements) => leaf(n.loops, statements),
            Body::Phases(_) => leaf(n.loops, Vec::new()),
        })
        .collect();
    rows.classes = classify(&mut leaves, &around(&rows), kernel);
    let kept = size(&mut rows, &leaves, kernel, sums);
    rows.phases = leaves.into_iter().map(Phase::Leaf).collect();
    (rows, kept)
}

/// The loops around the phases.
fn around(rows: &Rows) -> Vec<Loop> {
    rows.blocks.iter().chain(&rows.points).cloned().collect()
}

/// Puts leaves of equal loops into classes, with equal names for their loops.
fn classify(leaves: &mut [Leaf], around: &[Loop], kernel: &mut Kernel) -> Vec<Class> {
    let sizes = |l: &Leaf| l.spread.iter().map(|l| l.size).collect::<Vec<_>>();
    let mut classes: Vec<(Vec<i64>, Vec<Loop>)> = Vec::new();
    for leaf in leaves.iter_mut().filter(|l| !l.spread.is_empty()) {
        let own = sizes(leaf);
        let found = classes.iter().position(|(s, loops)| {
            let inner = |l: &Loop| leaf.inner.iter().any(|i| i.var == l.var);
            *s == own && !loops.iter().any(inner)
        });
        let class = found.unwrap_or(classes.len());
        match found {
            Some(class) => {
                let names: Vec<(Symbol, Symbol)> = leaf
                    .spread
                    .iter()
                    .zip(&classes[class].1)
                    .map(|(b, a)| (b.var.clone(), a.var.clone()))
                    .collect();
                for s in &mut leaf.statements {
                    *s = renamed(s, &names);
                }
            }
            None => classes.push((own, leaf.spread.clone())),
        }
        leaf.class = Some(class);
    }
    let mut done = Vec::new();
    for (class, (_, loops)) in classes.into_iter().enumerate() {
        let mut members: Vec<&mut Leaf> = leaves
            .iter_mut()
            .filter(|l| l.class == Some(class))
            .collect();
        let all: Vec<Statement> = members.iter().flat_map(|l| l.statements.clone()).collect();
        let loops = contiguous_last(loops, &all);
        let mut bodies: Vec<&mut Vec<Statement>> =
            members.iter_mut().map(|l| &mut l.statements).collect();
        let loops = join(loops, &mut bodies, &mut kernel.extents);
        let all: Vec<Statement> = members.iter().flat_map(|l| l.statements.clone()).collect();
        let vector = vector(&loops, around, &all, &kernel.arrays);
        for leaf in members {
            leaf.spread = loops.clone();
            leaf.vector = vector;
        }
        done.push(Class {
            loops,
            vector,
            steps: 1,
        });
    }
    done
}

/// Numbers of four bytes that a thread of `group` keeps.
fn registers(rows: &Rows, seen: &[Seen], kernel: &Kernel, group: i64) -> i64 {
    let elements = |class: usize| {
        let c = &rows.classes[class];
        let n = points(&c.loops);
        (n + group * c.vector - 1) / (group * c.vector) * c.vector
    };
    let words = |id: &ContainerId| (kernel.arrays[id].dtype.bytes() as i64 + 3) / 4;
    let mut sum = 0;
    for k in &rows.kept {
        let bytes = kernel.arrays[&k.address.container].dtype.bytes() as i64;
        sum += k.class.map_or(1, |c| (elements(c) * bytes + 3) / 4);
    }
    for (id, home) in &rows.homes {
        if let Home::Registers(class) = home {
            sum += elements(*class) * words(id);
        }
    }
    for (class, _) in sums_of_rows(rows, seen, kernel) {
        sum += class.map_or(1, elements);
    }
    sum
}

/// Sums over the points that move with a row: the class that walks them and the container.
fn sums_of_rows(rows: &Rows, seen: &[Seen], kernel: &Kernel) -> Vec<(Option<usize>, ContainerId)> {
    let mut found = Vec::new();
    for s in seen {
        for e in s.values.effects.iter().filter(|e| e.conflict.is_some()) {
            let id = e.address.container;
            let others = rows.points.iter().any(|l| !e.write.owned.contains(&l.var));
            let local = kernel.arrays[&id].local;
            if others && !local && moved_by(&e.address.offset, &s.leaf.spread) {
                found.push((s.leaf.class, id));
            }
        }
    }
    found
}

/// Sizes of groups and blocks.
fn size(rows: &mut Rows, leaves: &[Leaf], kernel: &Kernel, sums: bool) -> i64 {
    let around = around(rows);
    let seen = homes::seen(leaves, &around, &kernel.arrays);
    rows.homes = homes::homes(&seen, &around, &rows.classes, &kernel.arrays);
    rows.kept = homes::kept(&seen, &rows.points, &rows.classes);
    let rows_of_sums = sums && !sums_of_rows(rows, &seen, kernel).is_empty();
    let threads = match rows_of_sums {
        true => SUMMING_THREADS,
        false => BLOCK_THREADS,
    };
    let vectors = |c: &Class| points(&c.loops) / c.vector;
    let width = rows.classes.iter().map(vectors).max().unwrap_or(1);
    let n = points(&rows.points);
    // What all rows read is worth registers only where blocks take several rows.
    let at_once = (threads / group(rows, &seen, kernel, width)).max(1);
    let several = n / at_once > SHARING_THREADS / threads;
    let invariant = rows_of_sums || several && shared_by_rows(rows, kernel);
    rows.kept.retain(|k| !k.hoisted || invariant);
    rows.group = group(rows, &seen, kernel, width);
    let mut kept = registers(rows, &seen, kernel, rows.group);
    if kept > most_kept(rows.group) && !sums {
        // The row is too long for registers.
        rows.kept.retain(|k| k.class.is_none());
        rows.homes.retain(|id, home| {
            if matches!(home, Home::Registers(_)) {
                *home = Home::Shared;
            }
            *home != Home::Shared || kernel.arrays[id].local
        });
        rows.group = ((width + 3) / 4 + 31).clamp(32, 1024) / 32 * 32;
        kept = 0;
    }
    let shared = rows.homes.values().any(|h| *h == Home::Shared);
    if shared {
        rows.group = (rows.group + 31) / 32 * 32;
    }
    rows.groups = match shared || rows.group >= threads {
        true => 1,
        false => (threads / rows.group).min((n as u64).next_power_of_two() as i64),
    };
    let sums_bytes = |(class, id): (Option<usize>, ContainerId)| {
        let n = class.map_or(1, |c| points(&rows.classes[c].loops));
        n * (kernel.arrays[&id].dtype.bytes() as i64).max(4)
    };
    let widest = sums_of_rows(rows, &seen, kernel)
        .into_iter()
        .map(sums_bytes);
    if let Some(widest) = widest.max() {
        // Groups put their sums together in shared memory.
        rows.groups = rows.groups.min(EXCHANGE_BYTES / widest).max(1);
    }
    if rows.points.is_empty() {
        rows.group = (rows.group + 31) / 32 * 32;
        rows.groups = 1;
    }
    // Whole warps.
    while rows.group * rows.groups % 32 != 0 {
        rows.groups += 1;
    }
    let turns = (n + rows.groups - 1) / rows.groups;
    rows.parts = if rows_of_sums {
        let room = (PARTS / points(&rows.blocks)).max(1);
        ((turns + TURNS - 1) / TURNS).clamp(1, room)
    } else if sums || invariant {
        let blocks = SHARING_THREADS / (rows.group * rows.groups);
        let room = (blocks / points(&rows.blocks)).max(1);
        turns.clamp(1, room)
    } else {
        turns
    };
    for c in &mut rows.classes {
        let per_step = rows.group * c.vector;
        c.steps = (points(&c.loops) + per_step - 1) / per_step;
    }
    kept
}

/// Whether blocks should take several rows because elements that all rows read are more than an eighth of
/// what a row moves.
fn shared_by_rows(rows: &Rows, kernel: &Kernel) -> bool {
    let bytes = |k: &super::Kept| {
        let size = kernel.arrays[&k.address.container].dtype.bytes() as i64;
        k.class.map_or(1, |c| points(&rows.classes[c].loops)) * size
    };
    let hoisted: i64 = rows.kept.iter().filter(|k| k.hoisted).map(bytes).sum();
    let n = points(&rows.points).max(1);
    let others = kernel.arrays.values().filter(|a| !a.local && a.len >= n);
    let row: i64 = others.map(|a| a.len / n * a.dtype.bytes() as i64).sum();
    hoisted * 8 > row
}

/// Threads of a group: as few as keep a row in registers, a part of a warp for short rows.
fn group(rows: &Rows, seen: &[Seen], kernel: &Kernel, width: i64) -> i64 {
    if width <= 32 {
        return (width as u64).next_power_of_two() as i64;
    }
    let size = |steps: i64| (((width + steps - 1) / steps + 31) / 32 * 32).min(1024);
    let fits = |g: &i64| registers(rows, seen, kernel, *g) <= KEPT;
    // Idle threads cost more than further exchanges between threads.
    let idle = |g: i64| (width + g - 1) / g * g - width;
    let sizes = (1..=STEPS).rev().map(size).filter(fits);
    let found = sizes.min_by_key(|g| idle(*g) * 8 / width);
    found.unwrap_or_else(|| size(1))
}
