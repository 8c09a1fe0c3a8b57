//! Transpositions moved to where they cost least, for a whole region of operators at once.
//!
//! Before: `y = Transpose(Relu(Add(Transpose(x, p), c)), p⁻¹)`; after: `y = Relu(Add(x, c'))`.
//!
//! Around a transposition `p`, the region is every operator of `agnostic.rs` that is connected through
//! values of its rank. Each of them may compute on values as they are or moved by `p`; a value that is
//! computed in one way and read in the other costs a transposition of its bytes. Which operators move
//! is a minimum cut: values that a transposition `p` gives are there moved for free, readers that
//! transpose by `p⁻¹` want them moved, everything outside of the region wants them as they are.
//!
//! Legal because these operators compute the same elements, constants are stored moved, and values
//! keep their names where something outside reads them. Fires only if that leaves fewer transpositions that
//! move no more bytes, or as many that move fewer bytes, so rewriting ends.

use super::Rule;
use super::agnostic::{
    data, inverse, is_agnostic, is_indifferent, is_movable_constant, is_number, moved,
    moved_constant,
};
use super::min_cut::{Network, SINK, SOURCE, UNCUT};
use super::patch::{Patch, heir, ints, node};
use super::reshapes::order_of;
use super::scope::Scope;
use crate::fact::Fact;
use std::collections::{BTreeMap, BTreeSet};

pub const RULES: &[Rule] = &[Rule {
    name: "move-transpositions",
    at: move_transpositions,
}];

/// What a transposition costs beside its bytes.
const LAUNCH: u64 = 1 << 12;
/// The size that symbols are counted as.
const TYPICAL_SIZE: i64 = 16;
/// Most operators of a region; larger ones are left alone.
const MAX_REGION: usize = 4096;

fn move_transpositions(scope: &Scope, n: usize) -> Option<Patch> {
    let order = order_of(scope, n)?;
    let (x, y) = (scope.input(n, 0)?, scope.node(n).output.first()?);
    let behind = Region::around(scope, y, order.clone());
    let before = || Region::around(scope, x, inverse(&order));
    let patch = behind.and_then(|region| region.patch());
    patch.or_else(|| before()?.patch())
}

/// Operators that may be moved by `q` together.
struct Region<'s, 'a> {
    scope: &'s Scope<'a>,
    q: Vec<usize>,
    nodes: BTreeSet<usize>,
    /// Values that are not constants, of `q`'s rank, that operators of the region read or compute.
    values: BTreeSet<&'a str>,
}

/// The way in which something computes or reads a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The way of the operator of the region with this number.
    Of(usize),
    AsItIs,
    Moved,
    /// Either, at no cost.
    Any,
}

impl<'s, 'a> Region<'s, 'a> {
    fn around(scope: &'s Scope<'a>, value: &'a str, q: Vec<usize>) -> Option<Region<'s, 'a>> {
        let mut region = Region {
            scope,
            q,
            nodes: BTreeSet::new(),
            values: BTreeSet::new(),
        };
        let mut open = vec![value];
        while let Some(value) = open.pop() {
            if !region.values.insert(value) {
                continue;
            }
            let around = scope
                .readers(value)
                .iter()
                .copied()
                .chain(scope.producer(value));
            for n in around {
                if region.nodes.contains(&n) || !is_agnostic(scope, n, region.q.len()) {
                    continue;
                }
                region.nodes.insert(n);
                let outputs = scope.node(n).output.iter();
                let all = outputs.chain(data(scope, n)).map(String::as_str);
                open.extend(all.filter(|v| region.is_value(v)));
            }
            if region.nodes.len() > MAX_REGION {
                return None;
            }
        }
        (!region.nodes.is_empty()).then_some(region)
    }

    fn is_value(&self, name: &str) -> bool {
        let Some(fact) = self.scope.fact(name) else {
            return false;
        };
        let stored = is_movable_constant(self.scope, name, self.q.len());
        fact.rank() == Some(self.q.len()) && !stored
    }

    fn computed(&self, value: &str) -> Way {
        match self.scope.producer(value) {
            Some(n) if self.nodes.contains(&n) => Way::Of(n),
            Some(n) if order_of(self.scope, n).as_ref() == Some(&self.q) => Way::Moved,
            _ => Way::AsItIs,
        }
    }

    fn read(&self, value: &str, reader: usize) -> Way {
        let scope = self.scope;
        let in_body = scope.node(reader).input.iter().all(|i| i != value);
        if in_body {
            return Way::AsItIs;
        }
        if self.nodes.contains(&reader) {
            return Way::Of(reader);
        }
        match order_of(scope, reader) {
            Some(order) if order == inverse(&self.q) => Way::Moved,
            Some(_) => Way::Any,
            None if is_indifferent(scope, reader, &self.q) => Way::Any,
            None => Way::AsItIs,
        }
    }

    /// The ways in which a value is read, outputs of the body too.
    fn reads(&self, value: &str) -> Vec<Way> {
        let readers = self.scope.readers(value).iter();
        let mut ways: Vec<Way> = readers.map(|r| self.read(value, *r)).collect();
        if self.scope.is_output(value) {
            ways.push(Way::AsItIs);
        }
        ways
    }

    /// Number and bytes of transpositions if these operators are moved.
    fn cost(&self, moved: &BTreeSet<usize>) -> (u64, u64) {
        let (mut count, mut bytes) = (0, 0);
        for value in &self.values {
            let is_moved = |way: Way| match way {
                Way::Of(n) => Some(moved.contains(&n)),
                Way::AsItIs => Some(false),
                Way::Moved => Some(true),
                Way::Any => None,
            };
            let here = is_moved(self.computed(value));
            let mut reads = self.reads(value).into_iter().filter_map(is_moved);
            if reads.any(|way| Some(way) != here) {
                count += 1;
                bytes += n_bytes(self.scope.fact(value));
            }
        }
        (count, bytes)
    }

    /// The operators to move.
    fn choice(&self) -> BTreeSet<usize> {
        let mut network = Network::new();
        let vertices: BTreeMap<usize, usize> =
            self.nodes.iter().map(|n| (*n, network.vertex())).collect();
        let vertex = |way: Way| match way {
            Way::Of(n) => vertices.get(&n).copied(),
            Way::Moved => Some(SOURCE),
            Way::AsItIs => Some(SINK),
            Way::Any => None,
        };
        for value in &self.values {
            let Some(here) = vertex(self.computed(value)) else {
                continue;
            };
            let cost = LAUNCH + n_bytes(self.scope.fact(value));
            let (back, forth) = (network.vertex(), network.vertex());
            network.edge(here, back, cost);
            network.edge(forth, here, cost);
            for reader in self.reads(value).into_iter().filter_map(vertex) {
                network.edge(back, reader, UNCUT);
                network.edge(reader, forth, UNCUT);
            }
        }
        let side = network.side();
        self.nodes
            .iter()
            .copied()
            .filter(|n| side[vertices[n]])
            .collect()
    }

    fn patch(&self) -> Option<Patch> {
        let chosen = self.choice();
        let (old, new) = (self.cost(&BTreeSet::new()), self.cost(&chosen));
        if new.0 > old.0 || new.1 > old.1 || new == old {
            return None;
        }
        Move {
            region: self,
            chosen,
            patch: Patch::default(),
            names: BTreeMap::new(),
        }
        .patch()
    }
}

/// Bytes of a value, with symbols of a typical size.
fn n_bytes(fact: Option<&Fact>) -> u64 {
    let count = |fact: &Fact| {
        let size = |s: &graph::SymExpr| s.eval_with(&|_| Some(TYPICAL_SIZE)).ok();
        let sizes: Option<Vec<i64>> = fact.shape.as_ref()?.iter().map(size).collect();
        let n = sizes?
            .iter()
            .fold(1u64, |p, s| p.saturating_mul((*s).max(0) as u64));
        Some(n.saturating_mul(fact.element?.bytes()? as u64))
    };
    fact.and_then(count).unwrap_or(1 << 16).min(1 << 40)
}

/// The patch that moves operators.
struct Move<'r, 's, 'a> {
    region: &'r Region<'s, 'a>,
    chosen: BTreeSet<usize>,
    patch: Patch,
    /// For each value, the name of its moved form.
    names: BTreeMap<String, String>,
}

impl Move<'_, '_, '_> {
    fn patch(mut self) -> Option<Patch> {
        let scope = self.region.scope;
        for n in self.chosen.clone() {
            for output in scope.node(n).output.iter().filter(|o| !o.is_empty()) {
                let fresh = scope.fresh(&format!("{output}_moved"));
                self.names.insert(output.clone(), fresh);
            }
        }
        for n in self.chosen.clone() {
            self.operator(n)?;
        }
        for value in &self.region.values {
            let is_moved =
                matches!(self.region.computed(value), Way::Of(n) if self.chosen.contains(&n));
            if is_moved {
                self.readers(value)?;
            }
        }
        Some(self.patch)
    }

    /// A moved operator.
    fn operator(&mut self, n: usize) -> Option<()> {
        let scope = self.region.scope;
        let mut node = moved(scope, n, &self.region.q, &mut self.patch)?;
        for at in 0..data(scope, n).len() {
            node.input[at] = self.moved_value(&scope.node(n).input[at])?;
        }
        for output in node.output.iter_mut().filter(|o| !o.is_empty()) {
            output.clone_from(self.names.get(output)?);
        }
        self.patch.remove.push(n);
        self.patch.insert.push(node);
        Some(())
    }

    /// The name of the moved form of a value; adds a transposition if there is none yet.
    fn moved_value(&mut self, value: &str) -> Option<String> {
        let scope = self.region.scope;
        if let Some(name) = self.names.get(value) {
            return Some(name.clone());
        }
        let name = if !self.region.is_value(value) {
            if is_number(scope, value) {
                return Some(value.to_string());
            }
            let tensor = moved_constant(&scope.constant(value)?, &self.region.q)?;
            self.patch
                .constant(scope, &format!("{value}_moved"), tensor)
        } else if self.region.computed(value) == Way::Moved {
            scope.input(scope.producer(value)?, 0)?.to_string()
        } else {
            let back = inverse(&self.region.q);
            let existing = scope.readers(value).iter().copied();
            let existing = existing
                .into_iter()
                .find(|r| order_of(scope, *r).as_ref() == Some(&back));
            match existing {
                Some(transpose) => scope.node(transpose).output[0].clone(),
                None => {
                    let transpose = transposition(value, &back);
                    self.patch.node(scope, &format!("{value}_moved"), transpose)
                }
            }
        };
        self.names.insert(value.to_string(), name.clone());
        Some(name)
    }

    /// Adapts the readers of a value that is now computed moved.
    fn readers(&mut self, value: &str) -> Option<()> {
        let (scope, q) = (self.region.scope, &self.region.q);
        let name = self.names.get(value)?.clone();
        let ways = self.region.reads(value).into_iter();
        let mut ways = ways.map(|way| match way {
            Way::Of(n) if self.chosen.contains(&n) => Way::Moved,
            Way::Of(_) => Way::AsItIs,
            way => way,
        });
        let is_kept = ways.any(|way| way == Way::AsItIs);
        if is_kept {
            let mut transpose = transposition(&name, q);
            transpose.output = vec![value.to_string()];
            transpose.name = scope.fresh(&format!("{value}_order"));
            self.patch.insert.push(transpose);
        }
        let mut last = None;
        let readers: BTreeSet<usize> = scope.readers(value).iter().copied().collect();
        for reader in readers {
            match self.region.read(value, reader) {
                Way::Moved => {
                    let output = scope.node(reader).output.first()?;
                    // Two outputs of the body cannot both be this value.
                    if scope.is_output(output) && last.replace(output).is_some() {
                        return None;
                    }
                    self.patch.remove.push(reader);
                    self.patch.replace.push((output.clone(), name.clone()));
                }
                Way::Any if !is_kept => {
                    let node = match order_of(scope, reader) {
                        Some(order) => {
                            let order: Vec<usize> = order.iter().map(|d| q[*d]).collect();
                            transposition(&name, &order)
                        }
                        None => {
                            let mut node = moved(scope, reader, q, &mut self.patch)?;
                            node.input[0].clone_from(&name);
                            node
                        }
                    };
                    self.patch.remove.push(reader);
                    self.patch.insert.push(heir(scope.node(reader), node));
                }
                _ => {}
            }
        }
        Some(())
    }
}

fn transposition(x: &str, order: &[usize]) -> crate::proto::NodeProto {
    let perm: Vec<i64> = order.iter().map(|d| *d as i64).collect();
    node("Transpose", &[x], vec![ints("perm", &perm)])
}

#[cfg(test)]
mod tests {
    use super::super::patch::int;
    use super::super::trial::{Trial, reals};
    use super::*;

    fn perm(order: &[i64]) -> Vec<crate::proto::AttributeProto> {
        vec![ints("perm", order)]
    }

    const LAST: [i64; 4] = [0, 2, 3, 1];
    const FIRST: [i64; 4] = [0, 3, 1, 2];

    fn between(trial: Trial) -> Trial {
        trial
            .input("x", "N 4 5 6")
            .output("y", "N 4 5 6")
            .constant("c", reals(&[4]))
            .with("t = Transpose(x)", perm(&LAST))
            .node("a = Add(t, c)")
            .node("r = Relu(a)")
            .with("y = Transpose(r)", perm(&FIRST))
            .only(&["move-transpositions"])
    }

    #[test]
    fn transpositions_around_a_region_cancel() {
        between(Trial::new(14)).gives(&["a_moved = Add(x, c_moved)", "y = Relu(a_moved)"]);
    }

    #[test]
    fn a_region_that_is_read_as_it_is_stays() {
        // One transposition would go and another come.
        between(Trial::new(14))
            .output("a", "N 5 6 4")
            .output("r", "N 5 6 4")
            .stays();
    }

    #[test]
    fn operators_of_other_ranks_end_a_region() {
        Trial::new(14)
            .input("x", "N 4 5 6")
            .input("c", "4")
            .output("y", "N 4 5 6")
            .with("t = Transpose(x)", perm(&LAST))
            .node("a = Add(t, c)")
            .with("y = Transpose(a)", perm(&FIRST))
            .only(&["move-transpositions"])
            .stays();
    }

    #[test]
    fn one_transposition_behind_a_join_stands_for_two_before_it() {
        Trial::new(14)
            .input("x", "N 4 5 6")
            .input("z", "N 3 5 6")
            .output("y", "N 5 6 7")
            .with("a = Transpose(x)", perm(&LAST))
            .with("b = Transpose(z)", perm(&LAST))
            .with("y = Concat(a, b)", vec![int("axis", -1)])
            .only(&["move-transpositions"])
            .gives(&[
                "y_moved = Concat(x, z) {axis=1}",
                "y = Transpose(y_moved) {perm=[0, 2, 3, 1]}",
            ]);
    }

    #[test]
    fn a_transposition_moves_behind_what_makes_its_value_smaller() {
        let reduced = |keep: i64, to: &str| {
            Trial::new(14)
                .input("x", "N 4 5 6")
                .output("y", to)
                .with("t = Transpose(x)", perm(&LAST))
                .with(
                    "m = ReduceMax(t)",
                    vec![ints("axes", &[1]), int("keepdims", keep)],
                )
                .node("y = Exp(m)")
                .only(&["move-transpositions"])
        };
        reduced(1, "N 1 6 4").gives(&[
            "m_moved = ReduceMax(x) {keepdims=1, axes=[2]}",
            "m = Transpose(m_moved) {perm=[0, 2, 3, 1]}",
            "y = Exp(m)",
        ]);
        reduced(0, "N 6 4").stays();
    }

    #[test]
    fn a_reduction_that_leaves_one_order_reads_either_way() {
        Trial::new(14)
            .input("x", "N 4 5 6")
            .output("y", "N 4")
            .output("z", "N 4 5 6")
            .with("t = Transpose(x)", perm(&LAST))
            .node("r = Relu(t)")
            .with(
                "y = ReduceMean(r)",
                vec![ints("axes", &[1, 2]), int("keepdims", 0)],
            )
            .with("z = Transpose(r)", perm(&FIRST))
            .only(&["move-transpositions"])
            .gives(&["z = Relu(x)", "y = ReduceMean(z) {keepdims=0, axes=[2, 3]}"]);
    }

    #[test]
    fn axes_and_pads_follow() {
        Trial::new(14)
            .input("x", "N 4 5 6")
            .output("y", "N 5 2 9")
            .ints("pads", &[0, 1, 0, 0, 0, 2, 0, 1])
            .ints("s", &[0])
            .ints("e", &[2])
            .ints("d", &[2])
            .with("t = Transpose(x)", perm(&LAST))
            .node("p = Pad(t, pads)")
            .with("m = Softmax(p)", vec![int("axis", 3)])
            .node("c = Slice(m, s, e, d)")
            .with("y = Transpose(c)", perm(&FIRST))
            .only(&["move-transpositions"])
            .gives(&[
                "p_moved = Pad(x, [0, 0, 1, 0, 0, 1, 2, 0])",
                "m_moved = Softmax(p_moved) {axis=1}",
                "y = Slice(m_moved, [0], [2], [3])",
            ]);
    }

    #[test]
    fn nothing_crosses_quantization() {
        let nodes = Trial::new(14)
            .input("x", "N 4 5 6")
            .output("y", "N 4 5 6")
            .constant("s", reals(&[]))
            .with("t = Transpose(x)", perm(&LAST))
            .node("q = QuantizeLinear(t, s)")
            .node("d = DequantizeLinear(q, s)")
            .with("y = Transpose(d)", perm(&FIRST))
            .only(&["move-transpositions"])
            .unverified();
        assert_eq!(nodes.len(), 4);
    }

    #[test]
    fn branches_that_meet_move_together() {
        let (_, nodes) = Trial::new(14)
            .input("x", "N 4 5 6")
            .output("y", "N 4 5 6")
            .constant("c", reals(&[4]))
            .with("t = Transpose(x)", perm(&LAST))
            .node("a = Sigmoid(t)")
            .node("b = Mul(t, a)")
            .with("u = Transpose(b)", perm(&FIRST))
            .node("v = Neg(u)")
            .with("w = Transpose(v)", perm(&LAST))
            .node("e = Add(w, c)")
            .with("y = Transpose(e)", perm(&FIRST))
            .only(&["move-transpositions"])
            .run();
        assert_eq!(nodes.len(), 4, "{nodes:#?}");
    }
}
