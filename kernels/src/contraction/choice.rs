//! The choice of a plan: the cheapest, or one whose text other sizes of the same model compiled.

use super::blocking::{Plan, Shape, VectorSource, Wishes, consider, div_up, orders, staging};
use super::text::Element;
use std::collections::BTreeSet;

/// How much more a plan may cost if its text is known.
const MOST_FOR_KNOWN: f64 = 1.1;

/// What of a plan decides the shape of its text, where sizes decide the numbers in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    ranks: [usize; 4],
    element: Element,
    nv: i64,
    tail_vectors: Option<i64>,
    axis: usize,
    small: i64,
    has_big_tiles: bool,
    depths: [usize; 2],
    cuts_reduction: bool,
    parts: i64,
    to_scratch: bool,
    source: VectorSource,
    swapped: bool,
}

/// Adds to `known` what it does not have.
pub(crate) fn learn(known: &mut Vec<Choice>, choices: &[Choice]) {
    for choice in choices {
        if !known.contains(choice) {
            known.push(choice.clone());
        }
    }
}

impl Choice {
    pub(super) fn of(p: &Plan) -> Choice {
        let s = &p.shape;
        Choice {
            ranks: [s.batch.len(), s.m.len(), s.n.len(), s.k.len()],
            element: p.vector.element,
            nv: p.nv,
            tail_vectors: p.tail().map(|columns| div_up(columns, p.vector.lanes)),
            axis: p.tiling.axis,
            small: p.tiling.small,
            has_big_tiles: p.tiling.n_big > 0,
            depths: [p.m_cut.depth, p.k_cut.depth],
            cuts_reduction: p.k_cut.count(&s.k) > 1,
            parts: p.parts,
            to_scratch: p.to_scratch,
            source: p.source,
            swapped: s.swapped,
        }
    }
}

/// Chooses the cheapest plan, or one that costs little more and whose text is known from other sizes.
pub fn plan(s: &Shape, w: &Wishes) -> Plan {
    let orders = orders(s, w);
    let mut best: Option<(f64, Plan)> = None;
    for order in &orders {
        consider(order, w, &|_| true, None, &mut best);
    }
    let (least, mut plan) =
        best.unwrap_or_else(|| unreachable!("every role has a dim, so a cut exists"));
    plan.staging = staging(&plan, w);
    if w.known.is_empty() || w.known.contains(&Choice::of(&plan)) {
        return plan;
    }
    let mut known: Option<(f64, Plan)> = None;
    let tiles: BTreeSet<i64> = w.known.iter().map(|choice| choice.small).collect();
    for order in &orders {
        for small in &tiles {
            let is_known = |p: &Plan| w.known.contains(&Choice::of(p));
            consider(order, w, &is_known, Some(*small), &mut known);
        }
    }
    match known {
        Some((cost, mut other)) if cost <= least * MOST_FOR_KNOWN => {
            other.staging = staging(&other, w);
            other
        }
        _ => plan,
    }
}
