//! The choice of a plan: the one that is requested, else the cheapest, or one whose text other sizes of the same model
//! compiled.

use super::blocking::{
    ContractionPlan, Dim, Shape, TileLengths, VectorSource, Wishes, consider, div_up, orders,
    staging,
};
use super::cost::{cost, ns};
use super::open::Open;
use super::text::Element;
use std::collections::{BTreeMap, BTreeSet};

/// How much more a plan may cost if its text is known.
const MOST_FOR_KNOWN: f64 = 1.1;
/// How much more it may cost if its text is compiled: predicted times of kernels are off by a quarter
/// (`python -m shorthaul.bench --predicted`), and a text that is compiled only for a gain below that costs more
/// time than it saves in thousands of steps.
const MOST_FOR_COMPILED: f64 = 1.25;
/// Nanoseconds that it may always cost more: about the time that threads need to meet after a launch.
const LITTLE_NS: f64 = 2000.0;

/// The parts of a plan that decide the structure of its text. Sizes decide only the numbers in it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Form {
    ranks: [usize; 4],
    /// The dims of the columns and of the reduction, in their order.
    dims: [Vec<usize>; 2],
    element: Element,
    open: Open,
    nv: i64,
    tail_vectors: Option<i64>,
    axis: usize,
    lengths: TileLengths,
    depths: [usize; 2],
    cuts_reduction: [bool; 2],
    parts: i64,
    to_scratch: bool,
    source: VectorSource,
    swapped: bool,
}

/// How a part of a contraction was planned.
#[derive(Clone, Debug)]
pub struct PlanSignature {
    part: usize,
    form: Form,
    sizes: [Vec<i64>; 4],
}

/// Choices of other sizes that led to one text.
#[derive(Clone, Debug)]
pub struct PriorPlan {
    choice: PlanSignature,
    /// Whether a text of such a plan is compiled that takes its numbers from launches.
    is_compiled: bool,
    /// Whether those sizes differ, for each dim of each role.
    differ: [Vec<bool>; 4],
}

/// How the contractions of other sizes of a model were planned, by the container of each product.
#[derive(Clone, Debug, Default)]
pub struct PriorPlans {
    by_product: BTreeMap<String, Vec<PriorPlan>>,
}

impl PriorPlans {
    /// Choices for one product.
    pub fn of(&self, product: &str) -> Vec<PriorPlan> {
        self.by_product.get(product).cloned().unwrap_or_default()
    }

    /// Adds choices, each for the product that it was made for; `is_compiled` if their texts are compiled and take
    /// numbers from launches.
    pub fn learn(&mut self, choices: &[(String, PlanSignature)], is_compiled: bool) {
        for (product, choice) in choices {
            let known = self.by_product.entry(product.clone()).or_default();
            let is_same =
                |k: &&mut PriorPlan| k.choice.part == choice.part && k.choice.form == choice.form;
            match known.iter_mut().find(is_same) {
                Some(known) => {
                    known.is_compiled |= is_compiled;
                    known.differ_from(&choice.sizes);
                }
                None => known.push(PriorPlan {
                    differ: choice.sizes.clone().map(|sizes| vec![false; sizes.len()]),
                    choice: choice.clone(),
                    is_compiled,
                }),
            }
        }
    }
}

impl PriorPlan {
    /// Whether it is of the part of a contraction at this position.
    pub(super) fn is_of_part(&self, part: usize) -> bool {
        self.choice.part == part
    }

    /// Whether its text has tiles of every length.
    pub(super) fn has_short_tiles(&self) -> bool {
        self.choice.form.lengths == TileLengths::Any { long: false }
    }

    /// Whether a dim of a shape has had another size.
    pub(super) fn is_open(&self, s: &Shape, role: usize, at: usize) -> bool {
        let sizes = sizes(s);
        let has_ranks = (0..4).all(|role| sizes[role].len() == self.differ[role].len());
        let other = |sizes: &[Vec<i64>; 4]| self.choice.sizes[role][at] != sizes[role][at];
        has_ranks && (self.differ[role][at] || other(&sizes))
    }

    fn differ_from(&mut self, sizes: &[Vec<i64>; 4]) {
        for (role, differ) in self.differ.iter_mut().enumerate() {
            let pairs = self.choice.sizes[role].iter().zip(&sizes[role]);
            for (differ, (own, other)) in differ.iter_mut().zip(pairs) {
                *differ |= own != other;
            }
        }
    }
}

impl PlanSignature {
    /// The same choice, for the part at this position.
    pub(super) fn of_part(self, part: usize) -> PlanSignature {
        PlanSignature { part, ..self }
    }
}

fn sizes(s: &Shape) -> [Vec<i64>; 4] {
    [&s.batch, &s.m, &s.n, &s.k].map(|dims| dims.iter().map(|d| d.size).collect())
}

impl Form {
    fn new(p: &ContractionPlan) -> Form {
        let s = &p.shape;
        Form {
            ranks: [s.batch.len(), s.m.len(), s.n.len(), s.k.len()],
            dims: [&s.n, &s.k].map(|dims| dims.iter().map(|d| d.id).collect()),
            element: p.vector.element,
            open: p.open,
            nv: p.nv,
            tail_vectors: p.tail().map(|columns| div_up(columns, p.vector.lanes)),
            axis: p.tiling.axis,
            lengths: p.tiling.lengths,
            depths: [p.m_cut.depth, p.k_cut.depth],
            cuts_reduction: [p.k_cut.count(&s.k) > 1, p.k_cut.blocks > 1],
            parts: p.parts,
            to_scratch: p.to_scratch,
            source: p.source,
            swapped: s.swapped,
        }
    }

    /// Whether it is the form of plan `p`. Same as a comparison with [`Form::new`], but makes no lists.
    fn is_of(&self, p: &ContractionPlan) -> bool {
        let s = &p.shape;
        let cuts = [p.k_cut.count(&s.k) > 1, p.k_cut.blocks > 1];
        let tail = || p.tail().map(|columns| div_up(columns, p.vector.lanes));
        let has_dims = |own: &[usize], dims: &[Dim]| own.iter().eq(dims.iter().map(|d| &d.id));
        self.source == p.source
            && self.depths == [p.m_cut.depth, p.k_cut.depth]
            && self.cuts_reduction == cuts
            && (self.parts, self.to_scratch) == (p.parts, p.to_scratch)
            && (self.axis, self.lengths) == (p.tiling.axis, p.tiling.lengths)
            && (self.open, self.nv, self.swapped) == (p.open, p.nv, s.swapped)
            && self.element == p.vector.element
            && self.tail_vectors == tail()
            && self.ranks == [s.batch.len(), s.m.len(), s.n.len(), s.k.len()]
            && has_dims(&self.dims[0], &s.n)
            && has_dims(&self.dims[1], &s.k)
    }
}

/// A plan and how else the contraction could be cut.
pub(super) struct Chosen {
    pub(super) plan: ContractionPlan,
    /// What its text depends on.
    pub(super) choice: PlanSignature,
    /// The plan as numbers.
    pub(super) cut: [i64; 8],
    /// Others, the best first, each with its nanoseconds.
    pub(super) others: Vec<([i64; 8], f64)>,
    /// Nanoseconds of the cheapest plan, which may be another one.
    pub(super) least_ns: f64,
}

/// The plan as requested; else the cheapest, or one that costs little more and whose text is known from other sizes.
pub(super) fn choose(s: &Shape, w: &Wishes) -> Chosen {
    let orders = orders(s, w);
    let mut best: Option<(f64, usize, ContractionPlan)> = None;
    let mut requested: Option<(usize, ContractionPlan)> = None;
    let mut all: Vec<(f64, [i64; 8])> = Vec::new();
    for (n, order) in orders.iter().enumerate() {
        consider(order, w, None, &mut |p: ContractionPlan| {
            let cost = cost(&p, w);
            if w.n_others > 0 {
                all.push((cost, numbers(n, &p)));
            }
            if w.requested
                .is_some_and(|requested| requested == numbers(n, &p))
            {
                requested = Some((n, p.clone()));
            }
            if best.as_ref().is_none_or(|b| cost < b.0) {
                best = Some((cost, n, p));
            }
        });
    }
    let (least, n, cheapest) =
        best.unwrap_or_else(|| unreachable!("every role has a dim, so a cut exists"));
    let (n, mut plan) = match requested {
        Some(requested) => requested,
        None => known(&orders, w, least, &cheapest).unwrap_or((n, cheapest)),
    };
    if w.varies {
        plan = varied(&orders[n], w, plan);
    }
    plan.staging = staging(&plan, w);
    let cut = numbers(n, &plan);
    Chosen {
        choice: PlanSignature {
            part: 0,
            form: Form::new(&plan),
            sizes: sizes(s),
        },
        others: others(all, cut, w),
        least_ns: ns(least, w),
        cut,
        plan,
    }
}

/// A plan that costs little more than the cheapest and whose text is compiled for other sizes, or at least known from
/// them.
fn known(
    orders: &[Shape],
    w: &Wishes,
    least: f64,
    cheapest: &ContractionPlan,
) -> Option<(usize, ContractionPlan)> {
    let own = Form::new(cheapest);
    for (is_enough, most) in [(true, MOST_FOR_COMPILED), (false, MOST_FOR_KNOWN)] {
        let serve = w.known.iter().filter(|k| k.is_compiled || !is_enough);
        let forms: Vec<&Form> = serve.map(|k| &k.choice.form).collect();
        if forms.contains(&&own) {
            return None;
        }
        let forms: Vec<&Form> = (forms.into_iter())
            .filter(|f| f.open.any == own.open.any)
            .collect();
        let lengths: BTreeSet<TileLengths> = forms.iter().map(|f| f.lengths).collect();
        let is_known = |p: &ContractionPlan| forms.iter().any(|form| form.is_of(p));
        let best = cheapest_of(&is_known, &lengths, orders, w);
        let is_good =
            |cost: f64| cost <= least * most || (is_enough && ns(cost - least, w) <= LITTLE_NS);
        if let Some((_, n, other)) = best.filter(|best| is_good(best.0)) {
            return Some((n, other));
        }
    }
    None
}

/// A plan of the same text in which as many numbers as possible differ, from the plan's and from each other. Texts of
/// both show which numbers are decisions, even where the decisions for all sizes that were seen are equal.
fn varied(order: &Shape, w: &Wishes, plan: ContractionPlan) -> ContractionPlan {
    let form = Form::new(&plan);
    let numbers = |p: &ContractionPlan| [p.m_cut.blocks, p.k_cut.blocks, p.n_chunks];
    let own = numbers(&plan);
    let mut best = (0, plan);
    consider(order, w, Some(form.lengths), &mut |p: ContractionPlan| {
        let its = numbers(&p);
        let changed = its.iter().zip(&own).filter(|(a, b)| a != b).count();
        let distinct = BTreeSet::from(its).len();
        let score = 4 * changed + distinct;
        if changed > 0 && score > best.0 && form.is_of(&p) {
            best = (score, p);
        }
    });
    best.1
}

/// The cheapest plan that `admits` takes, among those with one of the `tiles`.
fn cheapest_of(
    admits: &dyn Fn(&ContractionPlan) -> bool,
    tiles: &BTreeSet<TileLengths>,
    orders: &[Shape],
    w: &Wishes,
) -> Option<(f64, usize, ContractionPlan)> {
    let mut best: Option<(f64, usize, ContractionPlan)> = None;
    for (n, order) in orders.iter().enumerate() {
        for tile in tiles {
            consider(order, w, Some(*tile), &mut |p: ContractionPlan| {
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

/// What a plan decides for a given shape: the order of its dims, cuts, chunks, parts, source.
fn numbers(order: usize, p: &ContractionPlan) -> [i64; 8] {
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
