//! Chooses which values to keep under a limit of bytes, such that the least time is added.
//!
//! With a price on kept bytes, the best choice is a minimum cut: a value that is needed is kept unless its unit runs
//! again, and a unit that runs again needs the values that it reads. The price is raised until the limit holds, along
//! the corners of the curve of bytes against time. This also gives a bound that no choice beats. Between corners, a
//! search decides value by value, beginning with the largest, and continues at the part with the best bound. So a
//! problem of few values is solved exactly. In a larger one, the search ends early, and the gap to the bound is known.
//! The same problem always gets the same answer.

use super::{Choice, Cost, Problem};
use petgraph::algo::dinics;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;
use std::collections::BTreeSet;

/// Most minimum cuts in a search among few values.
const MAX_CUTS: usize = 300;
/// Values of a problem that is solved exactly, where [`MAX_CUTS`] suffice.
const FEW_VALUES: usize = 60;
/// A price of a byte in microseconds that outweighs all times: the time of moving ten thousand bytes.
const HIGHEST_PRICE: f64 = 1.0;
/// Parts of a microsecond that capacities count.
const SCALE: f64 = 1000.0;
const INFINITE: u64 = 1 << 60;
/// The search among many values ends when it can gain less than this part of the forward pass, or after this many cuts.
const GOOD_ENOUGH: f64 = 0.005;
const MAX_CUTS_OF_MANY: usize = 40;

/// A choice and how good it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// The choice.
    pub choice: Choice,
    /// What it costs.
    pub cost: Cost,
    /// Least microseconds that any choice under the limit adds.
    pub bound_us: f64,
}

/// No choice keeps as few bytes as the budget allows.
#[derive(Clone, Debug, PartialEq)]
pub struct Infeasible {
    /// The choice that keeps the fewest bytes.
    pub least: Choice,
    /// Bytes that it keeps.
    pub least_bytes: i64,
}

/// A part of the search: the values that are decided, and a lower bound for all its choices.
struct Subproblem {
    pinned: Vec<Option<bool>>,
    bound_us: f64,
    /// The value to decide next.
    open: Option<usize>,
}

struct Search<'a> {
    problem: &'a Problem,
    limit: i64,
    cuts: usize,
    best: Option<(Choice, Cost)>,
}

impl Problem {
    /// The best choice that the search finds: it keeps at most `limit` bytes and adds the least time.
    ///
    /// # Errors
    /// More is kept even if everything that can be computed again is computed again.
    pub fn solve(&self, limit: i64) -> Result<Solution, Infeasible> {
        let mut search = Search {
            problem: self,
            limit,
            cuts: 0,
            best: None,
        };
        let (max_cuts, good_enough) = match self.values.len() <= FEW_VALUES {
            true => (MAX_CUTS, 0.0),
            false => (MAX_CUTS_OF_MANY, GOOD_ENOUGH),
        };
        let forward_us: f64 = self.units.iter().map(|u| u.us).sum();
        let pinned: Vec<Option<bool>> = self.values.iter().map(|v| v.pinned).collect();
        let mut parts: Vec<Subproblem> = search.part(pinned).into_iter().collect();
        let mut bound_us = f64::INFINITY;
        while let Some(at) = best_part(&parts) {
            let part = parts.swap_remove(at);
            let best_us = search.best.as_ref().map_or(f64::INFINITY, |b| b.1.us);
            let is_done = part.bound_us >= best_us - good_enough * forward_us;
            let Some(open) = part.open.filter(|_| !is_done && search.cuts < max_cuts) else {
                bound_us = bound_us.min(part.bound_us);
                if is_done || search.cuts >= max_cuts {
                    break;
                }
                continue;
            };
            for again in [true, false] {
                let mut pinned = part.pinned.clone();
                pinned[open] = Some(again);
                parts.extend(search.part(pinned));
            }
        }
        match search.best {
            Some((choice, cost)) => Ok(Solution {
                choice,
                bound_us: bound_us.min(cost.us),
                cost,
            }),
            None => {
                let pinned: Vec<Option<bool>> = self.values.iter().map(|v| v.pinned).collect();
                let (least, cost, _) = self.cut(HIGHEST_PRICE, &pinned);
                Err(Infeasible {
                    least,
                    least_bytes: cost.kept_bytes,
                })
            }
        }
    }

    /// The best choice if a kept byte has a price in microseconds; its cost; and the sum of its time and the price of
    /// its kept bytes.
    pub(super) fn cut(&self, price: f64, pinned: &[Option<bool>]) -> (Choice, Cost, f64) {
        let mut network: DiGraph<(), u64> = DiGraph::new();
        let (source, sink) = (network.add_node(()), network.add_node(()));
        let needs: Vec<NodeIndex> = self.values.iter().map(|_| network.add_node(())).collect();
        let runs: Vec<NodeIndex> = self.units.iter().map(|_| network.add_node(())).collect();
        let whole = |us: f64| (us * SCALE).round() as u64;
        for (v, value) in self.values.iter().enumerate() {
            if value.crosses {
                network.add_edge(source, needs[v], INFINITE);
            }
            let keep = whole(price * value.kept_bytes as f64 + value.store_us);
            let is_ours = self.units[value.unit].is_ours;
            match pinned[v] {
                Some(true) if is_ours => network.add_edge(needs[v], runs[value.unit], INFINITE),
                None if is_ours => network.add_edge(needs[v], runs[value.unit], keep),
                _ => network.add_edge(needs[v], sink, keep),
            };
        }
        for (n, unit) in self.units.iter().enumerate() {
            network.add_edge(runs[n], sink, whole(unit.us));
            for v in &unit.reads {
                network.add_edge(runs[n], needs[*v], INFINITE);
            }
        }
        let (_, flows) = dinics(&network, source, sink);
        let mut reached: BTreeSet<NodeIndex> = BTreeSet::from([source]);
        let mut open = vec![source];
        while let Some(node) = open.pop() {
            let onward = network
                .edges(node)
                .filter(|e| flows[e.id().index()] < *e.weight())
                .map(|e| e.target());
            let back = network
                .edges_directed(node, petgraph::Direction::Incoming)
                .filter(|e| flows[e.id().index()] > 0)
                .map(|e| e.source());
            for next in onward.chain(back) {
                if reached.insert(next) {
                    open.push(next);
                }
            }
        }
        let copied = (0..self.units.len()).filter(|n| reached.contains(&runs[*n]));
        let choice = Choice {
            copied: copied.collect(),
        };
        let cost = self.cost(&choice);
        let total = cost.us + price * cost.kept_bytes as f64;
        (choice, cost, total)
    }
}

/// The part that may hold the best choice: the least bound.
fn best_part(parts: &[Subproblem]) -> Option<usize> {
    let all = parts.iter().enumerate();
    all.min_by(|a, b| a.1.bound_us.total_cmp(&b.1.bound_us))
        .map(|(at, _)| at)
}

impl Search<'_> {
    /// Bounds the choices under `pinned`, and notes the best one that it finds. `None` if none of them is within the
    /// limit.
    fn part(&mut self, pinned: Vec<Option<bool>>) -> Option<Subproblem> {
        let (cheap, cheap_cost, _) = self.cut(0.0, &pinned);
        if cheap_cost.kept_bytes <= self.limit {
            self.take(cheap, cheap_cost);
            return Some(Subproblem {
                pinned,
                bound_us: cheap_cost.us,
                open: None,
            });
        }
        let (small, small_cost, _) = self.cut(HIGHEST_PRICE, &pinned);
        if small_cost.kept_bytes > self.limit {
            return None;
        }
        // Corners of the curve on both sides of the limit, until no corner is left between them.
        let (mut over, mut under) = ((cheap, cheap_cost), (small, small_cost));
        let bound_us = loop {
            let bytes = (over.1.kept_bytes - under.1.kept_bytes) as f64;
            let price = ((under.1.us - over.1.us) / bytes).max(0.0);
            let line = under.1.us + price * under.1.kept_bytes as f64;
            let (choice, cost, total) = self.cut(price, &pinned);
            let is_corner = total >= line - 1e-6 * line.abs() - 1.0 / SCALE;
            if is_corner || self.cuts >= 2 * MAX_CUTS {
                break total - price * self.limit as f64;
            }
            match cost.kept_bytes <= self.limit {
                true => under = (choice, cost),
                false => over = (choice, cost),
            }
        };
        let differ = |v: &usize| {
            let unit = self.problem.values[*v].unit;
            pinned[*v].is_none() && over.0.copied.contains(&unit) != under.0.copied.contains(&unit)
        };
        let mut open: Vec<usize> = (0..pinned.len()).filter(differ).collect();
        open.sort_by_key(|v| (-self.problem.values[*v].kept_bytes, *v));
        let (choice, cost) = self.filled(under.0, &pinned);
        self.take(choice, cost);
        Some(Subproblem {
            open: open.first().copied(),
            pinned,
            bound_us: bound_us.max(0.0),
        })
    }

    fn cut(&mut self, price: f64, pinned: &[Option<bool>]) -> (Choice, Cost, f64) {
        self.cuts += 1;
        self.problem.cut(price, pinned)
    }

    /// The choice without units whose values can be kept after all. It tries the units that take longest first.
    fn filled(&self, mut choice: Choice, pinned: &[Option<bool>]) -> (Choice, Cost) {
        let mut cost = self.problem.cost(&choice);
        let mut units: Vec<usize> = choice.copied.iter().copied().collect();
        units.sort_by(|a, b| {
            let us = |n: &usize| self.problem.units[*n].us;
            us(b).total_cmp(&us(a)).then(a.cmp(b))
        });
        for unit in units {
            if self.problem.outputs(unit).any(|v| pinned[v] == Some(true)) {
                continue;
            }
            let mut less = choice.clone();
            less.copied.remove(&unit);
            let new = self.problem.cost(&less);
            if new.kept_bytes <= self.limit && new.us < cost.us {
                (choice, cost) = (less, new);
            }
        }
        (choice, cost)
    }

    fn take(&mut self, choice: Choice, cost: Cost) {
        let is_within = cost.kept_bytes <= self.limit;
        if is_within && self.best.as_ref().is_none_or(|b| cost.us < b.1.us) {
            self.best = Some((choice, cost));
        }
    }
}
