//! Merging the loops of consecutive nests inside a kernel.
//!
//! Two nests of equal extents become one loop when every value that passes from the first to the
//! second is made and used at the same iteration; values then stay in registers. Never moves a nest
//! before one it depends on.

use super::body::{Body, ElementAccess, Nest, Statement, Write};
use super::index::replace;
use graph::{ContainerId, Expr, SymExpr, Symbol};

/// Merges every nest into the nearest earlier one that allows it.
pub fn merge_nests(nests: Vec<Nest>) -> Vec<Nest> {
    let mut merged: Vec<Nest> = Vec::new();
    for mut nest in nests {
        if let Body::Phases(inner) = nest.body {
            nest.body = Body::Phases(merge_nests(inner));
            if let Body::Phases(inner) = &mut nest.body
                && inner.len() == 1
                && let Some(only) = inner.pop()
            {
                nest.loops.extend(only.loops);
                nest.body = only.body;
            }
        }
        let mut target = None;
        for (at, earlier) in merged.iter().enumerate().rev() {
            if let Some(statements) = mergeable(earlier, &nest) {
                target = Some((at, statements));
                break;
            }
            if depends(earlier, &nest) {
                break;
            }
        }
        match target {
            Some((at, statements)) => {
                if let Body::Leaf(all) = &mut merged[at].body {
                    all.extend(statements);
                }
            }
            None => merged.push(nest),
        }
    }
    merged
}

/// Calls `f(place, is_write)` on every access.
pub fn visit_places<'a>(nest: &'a Nest, f: &mut dyn FnMut(&'a ElementAccess, bool)) {
    visit_statements(nest, &mut |s| {
        s.reads.iter().for_each(|p| f(p, false));
        s.writes.iter().for_each(|w| f(&w.place, true));
    });
}

/// Calls `f` on every statement.
pub fn visit_statements<'a>(nest: &'a Nest, f: &mut dyn FnMut(&'a Statement)) {
    match &nest.body {
        Body::Leaf(statements) => statements.iter().for_each(f),
        Body::Phases(nests) => nests.iter().for_each(|n| visit_statements(n, f)),
    }
}

/// Containers read and written.
fn accesses(nest: &Nest) -> (Vec<ContainerId>, Vec<ContainerId>) {
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    visit_places(nest, &mut |p, write| {
        let list = if write { &mut writes } else { &mut reads };
        list.push(p.container);
    });
    (reads, writes)
}

fn depends(first: &Nest, second: &Nest) -> bool {
    let (r1, w1) = accesses(first);
    let (r2, w2) = accesses(second);
    w1.iter().any(|c| r2.contains(c) || w2.contains(c)) || r1.iter().any(|c| w2.contains(c))
}

/// The second nest's statements in terms of the first's loops, if they may run in one loop.
fn mergeable(first: &Nest, second: &Nest) -> Option<Vec<Statement>> {
    let (Body::Leaf(before), Body::Leaf(after)) = (&first.body, &second.body) else {
        return None;
    };
    let sizes = |n: &Nest| n.loops.iter().map(|l| l.size).collect::<Vec<_>>();
    if sizes(first) != sizes(second) {
        return None;
    }
    let names: Vec<(Symbol, Symbol)> = second
        .loops
        .iter()
        .zip(&first.loops)
        .map(|(b, a)| (b.var.clone(), a.var.clone()))
        .collect();
    let after: Vec<Statement> = after.iter().map(|s| renamed(s, &names)).collect();
    let independent = before
        .iter()
        .flat_map(|s| &s.writes)
        .all(|w| after.iter().all(|s| same_point(w, s)))
        && before.iter().flat_map(|s| &s.reads).all(|r| {
            !after
                .iter()
                .flat_map(|s| &s.writes)
                .any(|w| w.place.container == r.container)
        });
    independent.then_some(after)
}

/// Whether the later statement accesses what `write` wrote only at the same iteration.
pub fn same_point(write: &Write, later: &Statement) -> bool {
    let id = write.place.container;
    let reads_ok = later.reads.iter().filter(|r| r.container == id).all(|r| {
        write.conflict.is_none()
            && r.offset == write.place.offset
            && r.gather.is_empty()
            && write.place.gather.is_empty()
            && r.guards.is_empty()
            && write.place.guards.is_empty()
    });
    let writes_ok = later
        .writes
        .iter()
        .filter(|w| w.place.container == id)
        .all(|w| w.conflict.is_none() && write.conflict.is_none());
    reads_ok && writes_ok
}

/// The statement with loop variables replaced all at once.
pub fn renamed(statement: &Statement, names: &[(Symbol, Symbol)]) -> Statement {
    let map = |e: &SymExpr| {
        e.substitute(&|s| {
            let found = names.iter().find(|(from, _)| from == s);
            found.map(|(_, to)| SymExpr::symbol(to.clone()))
        })
    };
    let mut s = rewritten(statement, &map);
    for w in &mut s.writes {
        w.owned = w
            .owned
            .iter()
            .map(|v| {
                let found = names.iter().find(|(from, _)| from == v);
                found.map_or_else(|| v.clone(), |(_, to)| to.clone())
            })
            .collect();
    }
    s
}

/// The statement with `var` replaced by an expression; [`Write::owned`] is left alone.
pub fn substituted(statement: &Statement, var: &Symbol, by: &SymExpr) -> Statement {
    rewritten(statement, &|e| replace(e, var, by))
}

fn rewritten(statement: &Statement, map: &dyn Fn(&SymExpr) -> SymExpr) -> Statement {
    let place = |p: &ElementAccess| {
        let mut p = p.clone();
        p.offset = map(&p.offset);
        for g in &mut p.guards {
            g.index = map(&g.index);
        }
        p
    };
    Statement {
        reads: statement.reads.iter().map(place).collect(),
        writes: statement
            .writes
            .iter()
            .map(|w| Write {
                place: place(&w.place),
                conflict: w.conflict,
                owned: w.owned.clone(),
                expr: w.expr.map_leaves(&|leaf| match leaf {
                    Expr::Index(e) => Some(match map(e) {
                        e if e.as_const().is_some() => Expr::int(e.as_const().unwrap_or_default()),
                        e => Expr::Index(e),
                    }),
                    _ => None,
                }),
            })
            .collect(),
    }
}
