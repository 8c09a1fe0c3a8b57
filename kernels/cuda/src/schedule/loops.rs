//! What loops can be made into: orders, joined loops, split loops, vectors.
//!
//! Owns transformations of loops that leave the meaning of statements as it is, and the questions
//! that decide them. Never decides what runs in parallel.

use super::moved_by;
use graph::{ContainerId, Expr, SymExpr, Symbol};
use kernels::emit::body::{Array, Body, ElementAccess, Kernel, Nest, Statement, Write};
use kernels::emit::index::{Extents, Loop, coefficient, mentions, replace};
use kernels::emit::merge::substituted;
use std::collections::BTreeMap;

/// Bytes of the widest load and store.
const VECTOR_BYTES: i64 = 16;
/// Most elements of a vector: wider ones of single bytes would need many registers for other operands.
const VECTOR_ELEMENTS: i64 = 8;

/// Number of points.
pub(crate) fn points(loops: &[Loop]) -> i64 {
    loops.iter().map(|l| l.size).product()
}

/// The writes that resolve a conflict.
pub(super) fn conflicts(statements: &[Statement]) -> impl Iterator<Item = &Write> {
    let writes = statements.iter().flat_map(|s| &s.writes);
    writes.filter(|w| w.conflict.is_some())
}

/// Reads and writes.
pub(super) fn places(statements: &[Statement]) -> impl Iterator<Item = &ElementAccess> {
    statements
        .iter()
        .flat_map(|s| s.reads.iter().chain(s.writes.iter().map(|w| &w.place)))
}

/// Loops in the order in which their last varies fastest through memory.
pub(super) fn contiguous_last(mut loops: Vec<Loop>, statements: &[Statement]) -> Vec<Loop> {
    loops.sort_by_key(|l| std::cmp::Reverse(step(statements, &l.var)));
    loops
}

/// The sum of the steps that accesses take along a loop.
pub(super) fn step(statements: &[Statement], var: &Symbol) -> i64 {
    places(statements)
        .map(|p| coefficient(&p.offset, var).map_or(64, |c| c.abs().min(1 << 20)))
        .sum()
}

/// Joins neighbouring loops, outermost first, that all statements walk as one: `a*size(b) + b`
/// becomes a single variable everywhere.
pub(super) fn join(
    mut loops: Vec<Loop>,
    leaves: &mut [&mut Vec<Statement>],
    extents: &mut Extents,
) -> Vec<Loop> {
    let mut n = 0;
    while n + 1 < loops.len() {
        let (a, b) = (loops[n].clone(), loops[n + 1].clone());
        let joint = |s: &Statement| walked_as_one(s, &a, &b);
        if !leaves.iter().all(|l| l.iter().all(joint)) {
            n += 1;
            continue;
        }
        let var = fresh(&format!("{}_{}", a.var, b.var), a.size * b.size, extents);
        for leaf in leaves.iter_mut() {
            for s in leaf.iter_mut() {
                *s = joined(s, &a.var, &b.var, &var);
            }
        }
        let size = a.size * b.size;
        loops.splice(n..n + 2, [Loop { var, size }]);
        n = n.saturating_sub(1);
    }
    loops
}

fn fresh(name: &str, size: i64, extents: &mut Extents) -> Symbol {
    let mut wanted = name.to_string();
    while extents.known(&Symbol::new(&wanted)).is_some() {
        wanted.push('_');
    }
    let var = Symbol::new(wanted);
    extents.insert(&var, size);
    var
}

fn walked_as_one(s: &Statement, a: &Loop, b: &Loop) -> bool {
    let one = |e: &SymExpr| match (coefficient(e, &a.var), coefficient(e, &b.var)) {
        (Some(x), Some(y)) => x == y * b.size,
        _ => false,
    };
    let place = |p: &ElementAccess| one(&p.offset) && p.guards.iter().all(|g| one(&g.index));
    s.reads.iter().all(place)
        && s.writes.iter().all(|w| {
            let mut alike = true;
            w.expr.visit(&mut |e| {
                if let Expr::Index(i) = e {
                    alike &= one(i);
                }
            });
            let owned = w.owned.contains(&a.var) == w.owned.contains(&b.var);
            place(&w.place) && alike && owned
        })
}

fn joined(s: &Statement, a: &Symbol, b: &Symbol, var: &Symbol) -> Statement {
    let s = substituted(s, a, &SymExpr::default());
    let mut s = substituted(&s, b, &SymExpr::symbol(var.clone()));
    for w in &mut s.writes {
        let owned = w.owned.remove(a);
        if w.owned.remove(b) || owned {
            w.owned.insert(var.clone());
        }
    }
    s
}

/// Splits a loop in two, the second of `size`, which must divide it.
pub(super) fn split(
    l: &Loop,
    size: i64,
    statements: &mut [Statement],
    extents: &mut Extents,
) -> (Loop, Loop) {
    let n_outer = l.size / size;
    let outer = fresh(&format!("{}_o", l.var), n_outer, extents);
    let inner = fresh(&format!("{}_i", l.var), size, extents);
    let by = SymExpr::symbol(outer.clone()) * size + SymExpr::symbol(inner.clone());
    for s in statements.iter_mut() {
        *s = substituted(s, &l.var, &by);
        for w in &mut s.writes {
            if w.owned.remove(&l.var) {
                w.owned.extend([outer.clone(), inner.clone()]);
            }
        }
    }
    let (size_o, var) = (n_outer, outer);
    (Loop { var, size: size_o }, Loop { var: inner, size })
}

/// Whether `n` neighbours from a multiple of `n` along `var` are an aligned vector in memory.
pub(crate) fn is_vector(offset: &SymExpr, var: &Symbol, n: i64) -> bool {
    coefficient(offset, var) == Some(1) && {
        let rest = replace(offset, var, &SymExpr::default());
        rest.terms().iter().all(|(_, c)| c % n == 0)
    }
}

/// How many neighbours along the last loop a thread takes: as many as make vectors of all accesses that move
/// along it. Vectors of accesses that also move with loops around it have at most 16 bytes. What all
/// repetitions share (biases, weights of normalizations) may be wider: it is loaded in two pieces.
pub(super) fn vector(
    loops: &[Loop],
    around: &[Loop],
    statements: &[Statement],
    arrays: &BTreeMap<ContainerId, Array>,
) -> i64 {
    let Some((last, others)) = loops.split_last() else {
        return 1;
    };
    let moving = |p: &&ElementAccess| coefficient(&p.offset, &last.var) != Some(0);
    let bytes = |p: &ElementAccess| arrays[&p.container].dtype.bytes() as i64;
    let alone = others.is_empty() && around.is_empty();
    let streams = |p: &&ElementAccess| {
        let array = &arrays[&p.container];
        let outside = moved_by(&p.offset, others) || moved_by(&p.offset, around);
        moving(p) && !array.local && (alone || outside)
    };
    // Sums wait in registers: their width in memory matters little.
    let stored = statements.iter().flat_map(|s| &s.writes);
    let stored = stored.filter(|w| w.conflict.is_none()).map(|w| &w.place);
    let read = statements.iter().flat_map(|s| &s.reads);
    let widest = read.chain(stored).filter(streams).map(bytes).max();
    let mut n = (VECTOR_BYTES / widest.unwrap_or(4)).min(VECTOR_ELEMENTS);
    let fits = |p: &ElementAccess, n: i64| {
        let free = |g: &kernels::emit::body::Guard| !mentions(&g.index, &last.var);
        is_vector(&p.offset, &last.var, n)
            && p.guards.iter().all(free)
            && p.gather.iter().all(|g| g.stride % n == 0)
    };
    while n > 1 {
        if last.size % n == 0 && places(statements).filter(moving).all(|p| fits(p, n)) {
            break;
        }
        n /= 2;
    }
    n
}

/// `int` where every index and offset of the kernel fits it with room for a partial last block.
pub(super) fn index_type(kernel: &Kernel) -> &'static str {
    const LIMIT: i64 = 1 << 30;
    let mut largest = points(&kernel.outer);
    for array in kernel.arrays.values() {
        largest = largest.max(array.len);
    }
    let mut see = |e: &SymExpr| largest = largest.max(kernel.extents.magnitude(e));
    let mut most = 1;
    visit(&kernel.phases, points(&kernel.outer), &mut |n, s| {
        most = most.max(n);
        for p in places(std::slice::from_ref(s)) {
            see(&p.offset);
            p.guards.iter().for_each(|g| see(&g.index));
        }
        for w in &s.writes {
            w.expr.visit(&mut |e| {
                if let Expr::Index(i) = e {
                    see(i);
                }
            });
        }
    });
    if largest.max(most) < LIMIT {
        "int"
    } else {
        "long"
    }
}

fn visit(nests: &[Nest], around: i64, f: &mut dyn FnMut(i64, &Statement)) {
    for nest in nests {
        let n = around.saturating_mul(points(&nest.loops));
        match &nest.body {
            Body::Leaf(statements) => statements.iter().for_each(|s| f(n, s)),
            Body::Phases(inner) => visit(inner, n, f),
        }
    }
}
