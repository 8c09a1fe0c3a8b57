//! The choice of a plan: the cheapest, or one whose text other sizes of the same model compiled.

use super::blocking::{Plan, Shape, VectorSource, Wishes, consider, div_up, orders, staging};
use super::text::Element;
use std::collections::{BTreeMap, BTreeSet};

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

/// A choice of another size.
#[derive(Clone, Debug)]
pub struct KnownChoice {
    choice: Choice,
    /// Whether a text of such a plan is compiled that takes its numbers from launches.
    is_compiled: bool,
}

/// How the contractions of other sizes of a model were planned, by the container of each product.
#[derive(Clone, Debug, Default)]
pub struct Known {
    by_product: BTreeMap<String, Vec<KnownChoice>>,
}

impl Known {
    /// Choices for one product.
    pub(crate) fn of(&self, product: &str) -> Vec<KnownChoice> {
        self.by_product.get(product).cloned().unwrap_or_default()
    }

    /// Adds choices, each for the product that it was made for.
    pub(crate) fn learn(&mut self, choices: &[(String, Choice)], is_compiled: bool) {
        for (product, choice) in choices {
            let known = self.by_product.entry(product.clone()).or_default();
            match known.iter_mut().find(|known| known.choice == *choice) {
                Some(known) => known.is_compiled |= is_compiled,
                None => known.push(KnownChoice {
                    choice: choice.clone(),
                    is_compiled,
                }),
            }
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
            has_big_tiles: p.tiling.has_big,
            depths: [p.m_cut.depth, p.k_cut.depth],
            cuts_reduction: p.k_cut.count(&s.k) > 1,
            parts: p.parts,
            to_scratch: p.to_scratch,
            source: p.source,
            swapped: s.swapped,
        }
    }
}

/// Chooses the cheapest plan, or one that costs little more and whose text is compiled for other sizes, or at
/// least known from them.
pub fn plan(s: &Shape, w: &Wishes) -> Plan {
    let orders = orders(s, w);
    let mut best: Option<(f64, Plan)> = None;
    for order in &orders {
        consider(order, w, &|_| true, None, &mut best);
    }
    let (least, mut plan) =
        best.unwrap_or_else(|| unreachable!("every role has a dim, so a cut exists"));
    plan.staging = staging(&plan, w);
    for only_compiled in [true, false] {
        let known = w.known.iter().filter(|k| k.is_compiled || !only_compiled);
        let known: Vec<&Choice> = known.map(|known| &known.choice).collect();
        if known.contains(&&Choice::of(&plan)) {
            return plan;
        }
        if let Some((cost, mut other)) = cheapest_of(&known, &orders, w)
            && cost <= least * MOST_FOR_KNOWN
        {
            other.staging = staging(&other, w);
            return other;
        }
    }
    if w.known.is_empty() {
        return plan;
    }
    // A text with tiles of two lengths serves more sizes than one whose tiles happen to be equal.
    let tile = plan.tiling.of_two_lengths();
    let mut wide = None;
    for order in &orders {
        consider(order, w, &|_| true, Some(tile), &mut wide);
    }
    match wide {
        Some((cost, mut other)) if cost <= least * MOST_FOR_KNOWN => {
            other.staging = staging(&other, w);
            other
        }
        _ => plan,
    }
}

/// The cheapest plan among known choices.
fn cheapest_of(known: &[&Choice], orders: &[Shape], w: &Wishes) -> Option<(f64, Plan)> {
    let tiles: BTreeSet<(i64, bool)> = known.iter().map(|c| (c.small, c.has_big_tiles)).collect();
    let is_known = |p: &Plan| known.contains(&&Choice::of(p));
    let mut best = None;
    for order in orders {
        for tile in &tiles {
            consider(order, w, &is_known, Some(*tile), &mut best);
        }
    }
    best
}
