//! Element-wise operators between two reshapes, computed in the sizes outside.
//!
//! - `compute-unreshaped`: `Reshape(Tanh(Mul(Reshape(x, s), 2)), t)` → `Tanh(Mul(x, 2))` where the last
//!   sizes are x's.
//!
//! Legal where every operator computes element by element on values of one shape and single numbers, nothing else
//! reads a value in between, and the sizes before the first reshape equal those after the last, symbol by symbol: the
//! elements stand in the same order throughout. Saves both reshapes and what computes their targets.

use super::Rule;
use super::agnostic::is_number;
use super::broadcasting::{broadcasts, is_unary};
use super::patch::Patch;
use super::reshapes::is_reshape;
use super::scope::Scope;
use std::collections::{BTreeMap, BTreeSet};

pub const RULES: &[Rule] = &[Rule {
    name: "compute-unreshaped",
    at: compute_unreshaped,
}];

fn same_sizes(scope: &Scope, a: &str, b: &str) -> bool {
    let sizes = |name: &str| scope.fact(name).and_then(|f| f.shape.as_ref());
    sizes(a).is_some() && sizes(a) == sizes(b)
}

/// The element-wise operators behind `value`, up to reshapes from the sizes of `outside`.
fn between(scope: &Scope, value: &str, outside: &str) -> Option<BTreeSet<usize>> {
    let rank = scope.fact(outside)?.rank()?;
    let mut nodes = BTreeSet::new();
    let mut open = vec![value.to_string()];
    while let Some(at) = open.pop() {
        let n = scope.producer(&at)?;
        if is_reshape(scope, n) && same_sizes(scope, scope.input(n, 0)?, outside) {
            continue;
        }
        let node = scope.node(n);
        if node.output.len() != 1 || !(broadcasts(node) || is_unary(node)) {
            return None;
        }
        if !nodes.insert(n) {
            continue;
        }
        let data = if is_unary(node) {
            &node.input[..1]
        } else {
            &node.input[..]
        };
        for input in data {
            let number = is_number(scope, input) && scope.fact(input)?.rank()? <= rank;
            if same_sizes(scope, input, value) {
                open.push(input.clone());
            } else if !number {
                return None;
            }
        }
    }
    (!nodes.is_empty()).then_some(nodes)
}

fn compute_unreshaped(scope: &Scope, n: usize) -> Option<Patch> {
    if !is_reshape(scope, n) {
        return None;
    }
    let (value, outside) = (scope.input(n, 0)?, scope.node(n).output.first()?);
    let nodes = between(scope, value, outside)?;
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    let mut patch = Patch::default();
    let mut back = BTreeSet::new();
    for m in &nodes {
        let output = scope.node(*m).output.first()?;
        for reader in scope.readers(output) {
            let out = scope.node(*reader).output.first()?;
            if nodes.contains(reader) {
                continue;
            }
            let is_back = is_reshape(scope, *reader)
                && scope.input(*reader, 0) == Some(output)
                && same_sizes(scope, out, outside)
                && !scope.is_output(out);
            if !is_back {
                return None;
            }
            back.insert(*reader);
        }
        if scope.is_output(output) {
            return None;
        }
        names.insert(output.clone(), scope.fresh(&format!("{output}_unreshaped")));
    }
    for m in &nodes {
        let mut node = scope.node(*m).clone();
        for input in &mut node.input {
            let made = scope.producer(input).filter(|r| is_reshape(scope, *r));
            if let Some(name) = names.get(input) {
                input.clone_from(name);
            } else if let Some(reshape) = made.filter(|_| same_sizes(scope, input, value)) {
                *input = scope.input(reshape, 0)?.to_string();
            }
        }
        node.output = vec![names.get(scope.node(*m).output.first()?)?.clone()];
        patch.insert.push(node);
    }
    for reader in &back {
        let old = scope.node(*reader).output.first()?.clone();
        let new = names.get(scope.input(*reader, 0)?)?.clone();
        patch.replace.push((old, new));
    }
    patch.remove.extend(nodes.into_iter().chain(back));
    Some(patch)
}

#[cfg(test)]
mod tests {
    use super::super::trial::{Trial, real, reals};

    fn trial(operand: &str, last: &[i64], to: &str) -> Trial {
        Trial::new(14)
            .input("x", "N 12")
            .output("y", to)
            .constant("two", real(2.0))
            .constant("row", reals(&[4]))
            .ints("s", &[0, 3, 4])
            .ints("t", last)
            .node("a = Reshape(x, s)")
            .node(&format!("b = Mul(a, {operand})"))
            .node("c = Tanh(b)")
            .node("d = Add(c, a)")
            .node("e = Reshape(d, t)")
            .node("y = Neg(e)")
            .only(&["compute-unreshaped"])
    }

    #[test]
    fn what_is_element_wise_needs_no_reshapes_around() {
        trial("two", &[-1, 12], "N 12").gives(&[
            "b_unreshaped = Mul(x, two)",
            "c_unreshaped = Tanh(b_unreshaped)",
            "d_unreshaped = Add(c_unreshaped, x)",
            "y = Neg(d_unreshaped)",
        ]);
    }

    #[test]
    fn an_operand_that_broadcasts_needs_the_sizes() {
        trial("row", &[-1, 12], "N 12").stays();
    }

    #[test]
    fn other_sizes_behind_need_the_reshape() {
        trial("two", &[-1, 6], "M 6").stays();
    }

    #[test]
    fn what_others_read_keeps_its_sizes() {
        trial("two", &[-1, 12], "N 12").output("c", "N 3 4").stays();
    }
}
