//! Memory over the time of a step, and the choice that keeps it within a limit at every moment.
//!
//! A value that is kept takes memory during the whole backward pass. A value that is computed again takes memory only
//! from the kernel of its copy to the last reader, but this kernel needs its operands at that moment. So two copies
//! that live at the same time free less than two that follow each other. A price on kept bytes ([`Problem::solve`])
//! cannot express this. [`Problem::within`] therefore chooses step by step. Each step takes the unit (alone, or with
//! the units that it needs) that removes the most memory above the limit for the time that it adds. When nothing is
//! above the limit, it drops the units that were not needed. It does the same starting from the choices of some minimum
//! cuts, and returns the result that adds the least time.
//!
//! The memory here is an estimate, because fusion then removes containers between nodes, and readers compute normalized
//! values themselves. [`Problem::learn`] learns from a plan which containers these are.

use super::{Choice, Cost, Problem};
use graph::{ContainerId, Graph, Lifetime, Node, Stage};
use std::collections::{BTreeMap, BTreeSet};

/// Most profiles that one search computes.
const MAX_PROFILES: usize = 20_000;

/// Searches start from minimum cuts that free this many quarters of the bytes above the limit.
const FREED_QUARTERS: std::ops::RangeInclusive<i64> = 4..=6;

/// A node of the backward pass.
#[derive(Clone, Debug, Default)]
pub(super) struct BackwardNode {
    /// Values of the forward pass that it reads, by number.
    pub reads: Vec<usize>,
    /// Bytes of the backward pass's own values that are in memory while it runs.
    pub own_bytes: i64,
    /// The part of `own_bytes` that is in memory already right before the node.
    pub carried_bytes: i64,
}

/// A choice that was made for a limit of memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// The choice.
    pub choice: Choice,
    /// What it costs.
    pub cost: Cost,
    /// Most bytes in memory at one time, as estimated before fusion.
    pub peak_bytes: i64,
}

/// The nodes of the backward pass, with the memory at each. `numbers` are the numbers of the forward pass's values.
pub(super) fn backward_nodes(
    graph: &Graph,
    numbers: &BTreeMap<ContainerId, usize>,
    is_in_memory: impl Fn(ContainerId) -> bool,
) -> Vec<BackwardNode> {
    let nodes = graph.single_state().map_or(&[][..], |s| &s.nodes);
    let results: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    let backward: Vec<&Node> = nodes.iter().filter(|n| n.stage != Stage::Forward).collect();
    let mut lives: BTreeMap<ContainerId, (usize, usize)> = BTreeMap::new();
    for (at, node) in backward.iter().enumerate() {
        for id in node.reads().into_iter().chain(node.writes()) {
            let is_own = graph.container(id).lifetime == Lifetime::Transient
                && !numbers.contains_key(&id)
                && !results.contains(&id)
                && is_in_memory(id);
            if is_own {
                lives.entry(id).or_insert((at, at)).1 = at;
            }
        }
    }
    let reads = |node: &Node| {
        node.reads()
            .iter()
            .filter_map(|id| numbers.get(id).copied())
            .collect()
    };
    let mut result: Vec<BackwardNode> = backward
        .iter()
        .map(|node| BackwardNode {
            reads: reads(node),
            ..BackwardNode::default()
        })
        .collect();
    for (id, (first, last)) in lives {
        let size = crate::unit::bytes(graph, id);
        for (at, node) in result.iter_mut().enumerate().take(last + 1).skip(first) {
            node.own_bytes += size;
            node.carried_bytes += if at > first { size } else { 0 };
        }
    }
    result
}

impl Problem {
    /// Most bytes in memory at one time under a choice, as far as they can be told before fusion.
    pub fn peak_bytes(&self, choice: &Choice) -> i64 {
        self.profile(choice).into_iter().max().unwrap_or(0)
    }

    /// Bytes in memory under a choice: most during the forward pass, then most around each node of the backward
    /// pass.
    fn profile(&self, choice: &Choice) -> Vec<i64> {
        let needed = self.needed(choice);
        let is_kept = |v: usize| needed[v] && !choice.copied.contains(&self.values[v].unit);
        let kept: i64 = (0..self.values.len())
            .filter(|v| is_kept(*v))
            .map(|v| self.values[v].kept_bytes)
            .sum();
        let mut copier = Copier {
            problem: self,
            copied: &choice.copied,
            events: Vec::new(),
            lives: vec![None; self.values.len()],
        };
        for (at, node) in self.backward.iter().enumerate() {
            node.reads.iter().for_each(|v| copier.copy(*v, at));
            copier.events.push((at, node.own_bytes));
            node.reads.iter().for_each(|v| copier.touch(*v));
        }
        let Copier { events, lives, .. } = copier;
        // What each event adds to the copies in memory, and the rest after it.
        let mut changes = vec![0; events.len() + 1];
        for (v, life) in lives.iter().enumerate() {
            if let Some((first, last)) = life {
                changes[*first] += self.values[v].passing_bytes;
                changes[last + 1] -= self.values[v].passing_bytes;
            }
        }
        let mut most = vec![0; self.backward.len() + 1];
        most[0] = self.forward_bytes(is_kept);
        let mut copies = 0;
        for ((at, own), change) in events.iter().zip(&changes) {
            copies += change;
            most[at + 1] = most[at + 1].max(own + copies);
        }
        most.iter_mut().for_each(|bytes| *bytes += kept);
        most
    }

    /// Most bytes of values that are not kept at one time of the forward pass.
    fn forward_bytes(&self, is_kept: impl Fn(usize) -> bool) -> i64 {
        let mut last: Vec<usize> = self.values.iter().map(|v| v.unit).collect();
        for (n, unit) in self.units.iter().enumerate() {
            unit.reads.iter().for_each(|v| last[*v] = n);
        }
        let mut changes = vec![0; self.units.len() + 1];
        for (v, value) in self.values.iter().enumerate().filter(|(v, _)| !is_kept(*v)) {
            changes[value.unit] += value.passing_bytes;
            changes[last[v] + 1] -= value.passing_bytes;
        }
        let sums = changes.iter().scan(0, |bytes, change| {
            *bytes += change;
            Some(*bytes)
        });
        sums.max().unwrap_or(0)
    }

    /// The choice that adds the least time, among those found whose memory stays within `limit` at every moment. If there
    /// is none, the choice that is above the limit least, summed over the forward pass and the nodes of the backward pass.
    pub fn within(&self, limit: i64) -> Planned {
        let pinned = self.pinned();
        let over = self.peak_bytes(&pinned) - limit;
        let mut starts = vec![pinned.clone()];
        if over > 0 {
            let kept_bytes = self.cost(&pinned).kept_bytes;
            // Copies take some of what they free.
            let limits = FREED_QUARTERS.map(|quarters| kept_bytes - over / 4 * quarters);
            starts.extend(limits.filter_map(|l| self.solve(l).ok()).map(|s| s.choice));
        }
        let mut search = Search {
            problem: self,
            limit,
            pinned,
            profiles: 0,
        };
        let found = starts.into_iter().map(|start| {
            let choice = search.descend(start);
            let (above, us) = search.above(&choice);
            (above, us, choice)
        });
        let best = found.min_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let choice = best.map_or_else(Choice::default, |b| b.2);
        Planned {
            cost: self.cost(&choice),
            peak_bytes: self.peak_bytes(&choice),
            choice,
        }
    }

    /// Drops units, except those of `pinned`, whose copies are not needed to keep the estimated memory within `limit`.
    pub(super) fn without_idle(&self, choice: Choice, pinned: &Choice, limit: i64) -> Choice {
        let mut search = Search {
            problem: self,
            limit,
            pinned: pinned.clone(),
            profiles: 0,
        };
        let choice = search.without_idle(choice);
        self.trimmed(choice)
    }

    /// A choice without units whose values nobody needs.
    fn trimmed(&self, mut choice: Choice) -> Choice {
        let needed = self.needed(&choice);
        choice
            .copied
            .retain(|n| self.outputs(*n).any(|v| needed[v]));
        choice
    }
}

/// Places copies as `apply` does: each right before the first node that reads it.
struct Copier<'a> {
    problem: &'a Problem,
    copied: &'a BTreeSet<usize>,
    /// Kernels in order. For each, the node of the backward pass that it is or, for a copy, that it runs before; and
    /// the bytes of that pass's own values.
    events: Vec<(usize, i64)>,
    /// First and last event of each copied value.
    lives: Vec<Option<(usize, usize)>>,
}

impl Copier<'_> {
    /// Runs the copies of a value's unit and of those whose values it reads, before the node at `at`.
    fn copy(&mut self, v: usize, at: usize) {
        // Values to copy, each pushed twice: when it comes up again, the copies that its unit reads exist.
        let mut open = vec![(v, false)];
        while let Some((v, is_ready)) = open.pop() {
            let problem = self.problem;
            let n = problem.values[v].unit;
            if self.lives[v].is_some() || !self.copied.contains(&n) {
                continue;
            }
            let reads = &problem.units[n].reads;
            if !is_ready {
                open.push((v, true));
                open.extend(reads.iter().rev().map(|r| (*r, false)));
                continue;
            }
            let event = self.events.len();
            self.events.push((at, problem.backward[at].carried_bytes));
            for o in problem.outputs(n) {
                self.lives[o] = Some((event, event));
            }
            reads.iter().for_each(|r| self.touch(*r));
        }
    }

    /// Notes that the newest event reads a value.
    fn touch(&mut self, v: usize) {
        let event = self.events.len() - 1;
        if let Some(life) = &mut self.lives[v] {
            life.1 = event;
        }
    }
}

struct Search<'a> {
    problem: &'a Problem,
    limit: i64,
    pinned: Choice,
    profiles: usize,
}

/// Units that a choice may run again in addition.
struct Move {
    units: Vec<usize>,
    /// Bytes above the limit that it took away for each microsecond, when it was last tried.
    gain: f64,
}

impl Search<'_> {
    /// Bytes above the limit, summed over time, and microseconds.
    fn above(&mut self, choice: &Choice) -> (i64, f64) {
        self.profiles += 1;
        let profile = self.problem.profile(choice);
        let above = profile.iter().map(|b| (b - self.limit).max(0)).sum();
        (above, self.problem.cost(choice).us)
    }

    fn descend(&mut self, start: Choice) -> Choice {
        let mut choice = start;
        let mut moves = self.moves(&choice);
        let mut is_fresh = true;
        loop {
            let now = self.above(&choice);
            if now.0 == 0 || self.profiles > MAX_PROFILES {
                break;
            }
            match self.best(&choice, now, &mut moves) {
                Some(units) => {
                    choice.copied.extend(units);
                    is_fresh = false;
                }
                // What gained nothing may do so now, with other units run again.
                None if !is_fresh => {
                    moves = self.moves(&choice);
                    is_fresh = true;
                }
                None => break,
            }
        }
        let choice = self.without_idle(choice);
        self.problem.trimmed(choice)
    }

    /// Each unit that may run again in addition: alone, and with the units whose values would have to be kept for it.
    fn moves(&self, choice: &Choice) -> Vec<Move> {
        let problem = self.problem;
        let needed = problem.needed(choice);
        let may = |n: usize| {
            let is_free = |v: usize| problem.values[v].pinned != Some(false);
            problem.units[n].is_ours
                && !choice.copied.contains(&n)
                && problem.outputs(n).all(is_free)
        };
        let mut moves = Vec::new();
        for n in (0..problem.units.len()).filter(|n| may(*n)) {
            let mut with = BTreeSet::from([n]);
            let mut open = vec![n];
            while let Some(unit) = open.pop() {
                for v in &problem.units[unit].reads {
                    let maker = problem.values[*v].unit;
                    if !needed[*v] && may(maker) && with.insert(maker) {
                        open.push(maker);
                    }
                }
            }
            let all = [vec![n], with.into_iter().collect()];
            let different = if all[1].len() > 1 { 2 } else { 1 };
            moves.extend(all.into_iter().take(different).map(|units| Move {
                units,
                gain: f64::INFINITY,
            }));
        }
        moves
    }

    /// The move that takes most away for the time that it adds. A gain from before stands until it is the largest.
    fn best(
        &mut self,
        choice: &Choice,
        now: (i64, f64),
        moves: &mut Vec<Move>,
    ) -> Option<Vec<usize>> {
        let mut tried = BTreeSet::new();
        loop {
            let order =
                |a: &usize, b: &usize| moves[*a].gain.total_cmp(&moves[*b].gain).then(b.cmp(a));
            let at = (0..moves.len()).max_by(order)?;
            if moves[at].gain <= 0.0 || self.profiles > MAX_PROFILES {
                return None;
            }
            if tried.contains(&at) {
                return Some(moves.swap_remove(at).units);
            }
            let mut with = choice.clone();
            with.copied.extend(&moves[at].units);
            let (above, us) = self.above(&with);
            moves[at].gain = (now.0 - above) as f64 / (us - now.1).max(1e-3);
            tried.insert(at);
        }
    }

    /// Leaves out units, beginning with those that take longest, as long as that puts nothing above the limit.
    fn without_idle(&mut self, mut choice: Choice) -> Choice {
        let mut now = self.above(&choice);
        let mut units: Vec<usize> = choice
            .copied
            .difference(&self.pinned.copied)
            .copied()
            .collect();
        let us = |n: &usize| self.problem.units[*n].us;
        units.sort_by(|a, b| us(b).total_cmp(&us(a)).then(a.cmp(b)));
        for unit in units {
            if self.profiles > MAX_PROFILES {
                break;
            }
            let mut less = choice.clone();
            less.copied.remove(&unit);
            let new = self.above(&less);
            if new.0 <= now.0 && new.1 <= now.1 {
                (choice, now) = (less, new);
            }
        }
        choice
    }
}
