//! The choice of a plan: the one that is told, else the cheapest, or one whose text other sizes of the same model
//! compiled.

use super::blocking::{Plan, Shape, VectorSource, Wishes, consider, div_up, orders, staging};
use super::cost::{cost, ns};
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

/// A plan and how else the contraction could be cut.
pub(super) struct Chosen {
    pub(super) plan: Plan,
    /// The plan as numbers.
    pub(super) cut: [i64; 8],
    /// Others, the best first, each with its nanoseconds.
    pub(super) others: Vec<([i64; 8], f64)>,
}

/// The plan as told; else the cheapest, or one that costs little more and whose text is known from other sizes.
pub(super) fn choose(s: &Shape, w: &Wishes) -> Chosen {
    let orders = orders(s, w);
    let mut best: Option<(f64, usize, Plan)> = None;
    let mut told: Option<(usize, Plan)> = None;
    let mut all: Vec<(f64, [i64; 8])> = Vec::new();
    for (n, order) in orders.iter().enumerate() {
        consider(order, w, None, &mut |p: Plan| {
            let cost = cost(&p, w);
            if w.n_others > 0 {
                all.push((cost, numbers(n, &p)));
            }
            if w.told.is_some_and(|told| told == numbers(n, &p)) {
                told = Some((n, p.clone()));
            }
            if best.as_ref().is_none_or(|b| cost < b.0) {
                best = Some((cost, n, p));
            }
        });
    }
    let (least, n, cheapest) =
        best.unwrap_or_else(|| unreachable!("every role has a dim, so a cut exists"));
    let (n, mut plan) = match told {
        Some(told) => told,
        None => known(&orders, w, least, &cheapest).unwrap_or((n, cheapest)),
    };
    plan.staging = staging(&plan, w);
    let cut = numbers(n, &plan);
    Chosen {
        others: others(all, cut, w),
        cut,
        plan,
    }
}

/// A plan that costs little more than the cheapest and whose text is compiled for other sizes, or at least known from
/// them; else one whose text serves more sizes.
fn known(orders: &[Shape], w: &Wishes, least: f64, cheapest: &Plan) -> Option<(usize, Plan)> {
    let is_good = |best: &(f64, usize, Plan)| best.0 <= least * MOST_FOR_KNOWN;
    for only_compiled in [true, false] {
        let known = w.known.iter().filter(|k| k.is_compiled || !only_compiled);
        let known: Vec<&Choice> = known.map(|known| &known.choice).collect();
        if known.contains(&&Choice::of(cheapest)) {
            return None;
        }
        let tiles: BTreeSet<(i64, bool)> =
            known.iter().map(|c| (c.small, c.has_big_tiles)).collect();
        let is_known = |p: &Plan| known.contains(&&Choice::of(p));
        let best = cheapest_of(&is_known, &tiles, orders, w);
        if let Some((_, n, other)) = best.filter(is_good) {
            return Some((n, other));
        }
    }
    if w.known.is_empty() {
        return None;
    }
    // A text with tiles of two lengths serves more sizes than one whose tiles happen to be equal.
    let tile = BTreeSet::from([cheapest.tiling.of_two_lengths()]);
    let (_, n, wide) = cheapest_of(&|_| true, &tile, orders, w).filter(is_good)?;
    Some((n, wide))
}

/// The cheapest plan that `admits` takes, among those of some tiles.
fn cheapest_of(
    admits: &dyn Fn(&Plan) -> bool,
    tiles: &BTreeSet<(i64, bool)>,
    orders: &[Shape],
    w: &Wishes,
) -> Option<(f64, usize, Plan)> {
    let mut best: Option<(f64, usize, Plan)> = None;
    for (n, order) in orders.iter().enumerate() {
        for tile in tiles {
            consider(order, w, Some(*tile), &mut |p: Plan| {
                if !admits(&p) {
                    return;
                }
                let cost = cost(&p, w);
                if best.as_ref().is_none_or(|b| cost < b.0) {
                    best = Some((cost, n, p));
                }
            });
        }
    }
    best
}

/// What of a plan is decided once its shape is given: the order of its dims, cuts, chunks, parts, source.
fn numbers(order: usize, p: &Plan) -> [i64; 8] {
    let source = match p.source {
        VectorSource::Direct => 0,
        VectorSource::Shared => 1,
        VectorSource::Thread => 2,
    };
    [
        order as i64,
        p.m_cut.depth as i64,
        p.m_cut.blocks,
        p.k_cut.depth as i64,
        p.k_cut.blocks,
        p.n_chunks,
        p.parts,
        source,
    ]
}

/// The cheapest plans that differ from the chosen one and from each other by more than a little of one number.
fn others(mut all: Vec<(f64, [i64; 8])>, cut: [i64; 8], w: &Wishes) -> Vec<([i64; 8], f64)> {
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let is_like = |a: &[i64; 8], b: &[i64; 8]| {
        let apart = |n: usize| a[n].max(b[n]) as f64 / a[n].min(b[n]).max(1) as f64;
        let same = [0, 1, 3, 6, 7].iter().all(|n| a[*n] == b[*n]);
        same && [2, 4, 5].iter().all(|n| apart(*n) < 1.5)
    };
    let mut kept: Vec<([i64; 8], f64)> = Vec::new();
    for (cost, numbers) in all {
        if kept.len() == w.n_others {
            break;
        }
        let is_new = kept.iter().all(|k| !is_like(&k.0, &numbers)) && !is_like(&cut, &numbers);
        if is_new {
            kept.push((numbers, ns(cost, w)));
        }
    }
    kept
}
