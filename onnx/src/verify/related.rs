//! Sizes that follow from others: a mask of keys has one element for each key, those that are kept and the new ones.
//!
//! Owns what ONNX Runtime's attention operators say of the sizes of inputs. What the user gives comes first.

use super::given::known_relations;
use crate::infer::Facts;
use crate::proto::{GraphProto, NodeProto};
use graph::SymExpr;
use std::collections::BTreeMap;

/// Relations between dynamic sizes with these `names`, besides the `given` ones and the sizes that have a `preset`.
pub(super) fn with_masks(
    graph: &GraphProto,
    facts: &Facts,
    names: &[String],
    given: &BTreeMap<String, SymExpr>,
    preset: &BTreeMap<String, i64>,
) -> BTreeMap<String, SymExpr> {
    let mut relations = given.clone();
    for node in &graph.node {
        let Some((keys, follows)) = keys_of_mask(node, facts) else {
            continue;
        };
        if relations.contains_key(&keys) || preset.contains_key(&keys) {
            continue;
        }
        let mut more = relations.clone();
        more.insert(keys, follows);
        if known_relations(&more, names).is_ok() {
            relations = more;
        }
    }
    relations
}

/// The name of the size that counts a node's keys, and the sum of sizes that it equals.
fn keys_of_mask(node: &NodeProto, facts: &Facts) -> Option<(String, SymExpr)> {
    let (new, mask, past) = match (node.domain.as_str(), node.op_type.as_str()) {
        ("com.microsoft", "Attention") => ((0, 1), 3, (4, 3)),
        ("com.microsoft", "MultiHeadAttention") => ((1, 1), 4, (6, 2)),
        // Takes the number itself, which exporters compute from the sizes of a mask.
        ("com.microsoft", "GroupQueryAttention") => ((0, 1), 6, (3, 2)),
        _ => return None,
    };
    let input = |at: usize| node.input.get(at).filter(|name| !name.is_empty());
    let fact = |at: usize| facts.get(input(at)?);
    let shape = |at: usize| fact(at)?.shape.as_deref();
    let keys = match node.op_type.as_str() {
        "GroupQueryAttention" => fact(mask)?.elements.as_deref()?.first()?,
        _ => match shape(mask)? {
            [_, .., keys] => keys,
            _ => return None,
        },
    };
    let [_, _, _] = shape(new.0)? else {
        return None;
    };
    let mut all = shape(new.0)?.get(new.1)?.clone();
    if input(past.0).is_some() {
        all = all + shape(past.0)?.get(past.1)?.clone();
    }
    let [symbol] = &keys.symbols().into_iter().collect::<Vec<_>>()[..] else {
        return None;
    };
    let is_its_own = SymExpr::symbol(symbol.clone()) == *keys && !all.symbols().contains(symbol);
    is_its_own.then(|| (symbol.as_str().to_string(), all))
}

#[cfg(test)]
mod tests {
    use crate::element::Element;
    use crate::file::Model;
    use crate::rewrite::patch::int;
    use crate::rewrite::trial::{Trial, reals};
    use crate::verify::{Checker, Options};

    /// Checks that a model runs with sizes of which one is the sum of the others.
    fn sizes_fit(model: &Model) {
        let runs = Checker::new(model, &Options::default()).expect("it runs");
        let runs = runs.check(&model.proto).expect("it is itself").runs;
        let sizes = |run: &str| -> Vec<usize> {
            let given = run
                .split([' ', ','])
                .filter_map(|word| word.split_once('='));
            let given = given.filter(|(name, _)| ["new", "kept", "total"].contains(name));
            given.filter_map(|(_, n)| n.parse().ok()).collect()
        };
        assert!(runs.iter().any(|run| sizes(run).len() == 3), "{runs:?}");
        for run in &runs {
            if let [new, a, b] = sizes(run)[..] {
                assert!(new + a == b || new + b == a || a + b == new, "{run}");
            }
        }
    }

    #[test]
    fn a_mask_of_keys_is_as_long_as_all_keys() {
        let trial = Trial::new(17).input("x", "b new 8");
        let trial = trial.input_of("mask", Element::I32, "b total");
        let trial = trial.constant("w", reals(&[8, 24]));
        let trial = trial.input("past", "2 b 2 kept 4");
        let heads = || vec![int("num_heads", 2)];
        let call = "y, present = com.microsoft.Attention(x, w, , mask, past)";
        let trial = trial.with(call, heads()).output("y", "b new 8");
        let model = trial.model();
        sizes_fit(&model);
        // What the user gives comes first.
        let options = Options {
            sizes: [("total".to_string(), 9)].into(),
            ..Options::default()
        };
        assert!(Checker::new(&model, &options).is_err());
    }

    #[test]
    fn the_number_of_keys_may_come_from_the_sizes_of_a_mask() {
        let trial = Trial::new(17).input("q", "b new 64").input("k", "b new 32");
        let trial = trial.input("v", "b new 32");
        let trial = trial.input_of("mask", Element::I64, "b total");
        let trial = trial
            .input("keys", "b 2 kept 16")
            .input("values", "b 2 kept 16");
        let trial = trial.ints("one", &[1]);
        let trial = trial.with("sums = ReduceSum(mask, one)", vec![int("keepdims", 0)]);
        let trial = trial.node("before = Sub(sums, one)");
        let trial = trial.with("last = Cast(before)", vec![int("to", 6)]);
        let trial = trial
            .node("sizes = Shape(mask)")
            .node("n = Gather(sizes, one)");
        let trial = trial.with("total32 = Cast(n)", vec![int("to", 6)]);
        let heads = vec![int("num_heads", 4), int("kv_num_heads", 2)];
        let inputs = "q, k, v, keys, values, last, total32";
        let call = format!("y, a, b = com.microsoft.GroupQueryAttention({inputs})");
        let trial = trial.with(&call, heads).output("y", "b new 64");
        sizes_fit(&trial.model());
    }
}
