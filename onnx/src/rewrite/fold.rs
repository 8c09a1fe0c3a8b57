//! Constant folding: nodes that give the same in every run become initializers.
//!
//! Before: `y = Mul(c1, c2)`; after: an initializer `y`. Also where the value follows from sizes that
//! are known though the tensor is not: `Shape(x)` of a fixed `x`. Legal because the operators are
//! functions of their inputs; random ones are left, and so is DequantizeLinear. [`super::Options::fold_limit`] caps
//! what one folding adds to the file beyond what it frees.

use super::Rule;
use super::patch::Patch;
use super::scope::Scope;
use crate::attributes::{Attributes, bodies};
use crate::infer::{is_dequantized, is_random};
use crate::operators::{self, Call};
use crate::tensor::Tensor;

/// Bytes of constants that are computed with at once, at most.
const MOST_READ: usize = 1 << 30;

pub const RULES: &[Rule] = &[Rule {
    name: "fold-constants",
    at: fold,
}];

fn fold(scope: &Scope, n: usize) -> Option<Patch> {
    let node = scope.node(n);
    let known = bodies(node).next().is_none() && !is_random(node) && !is_dequantized(node);
    let outputs = node.output.iter().filter(|o| !o.is_empty());
    if !known || outputs.clone().any(|o| scope.is_output(o)) || outputs.clone().next().is_none() {
        return None;
    }
    let fact = |name: &String| scope.fact(name)?.constant.clone();
    let inferred: Option<Vec<_>> = node.output.iter().map(fact).collect();
    let own = Attributes::new(node)
        .tensor("value")
        .map_or(0, prost::Message::encoded_len);
    let freed: usize = node.input.iter().map(|name| freed_bytes(scope, name)).sum();
    let allowed = freed + own + scope.around().fold_limit;
    let tensors = match inferred {
        Some(stored) => {
            if stored.iter().map(|s| s.n_bytes()).sum::<usize>() > allowed {
                return None;
            }
            let tensors = stored.iter().map(|s| s.tensor().ok());
            tensors.collect::<Option<Vec<Tensor>>>()?
        }
        None => computed(scope, n, allowed)?,
    };
    if tensors.iter().map(Tensor::n_bytes).sum::<usize>() > allowed {
        return None;
    }
    let constants = node
        .output
        .iter()
        .cloned()
        .zip(tensors)
        .filter(|(name, _)| scope.is_used(name));
    Some(Patch {
        remove: vec![n],
        constants: constants.collect(),
        ..Patch::default()
    })
}

/// The outputs of a node whose inputs are all constants, of any size; `None` if they are foreseen to take more than
/// `allowed` bytes.
fn computed(scope: &Scope, n: usize, allowed: usize) -> Option<Vec<Tensor>> {
    let node = scope.node(n);
    let operator = operators::find(node)?;
    let constant =
        |name: &String| name.is_empty() || scope.fact(name).is_some_and(|f| f.constant.is_some());
    if !node.input.iter().all(constant) {
        return None;
    }
    let foreseen = node.output.iter().filter_map(|o| {
        let fact = scope.fact(o)?;
        Some(fact.len()?.saturating_mul(fact.element?.bytes()?))
    });
    let foreseen = foreseen.fold(0, usize::saturating_add);
    // A constant that repeats one number takes memory only when it is computed with.
    let read: usize = node.input.iter().map(|name| bytes(scope, name)).sum();
    if foreseen > allowed || read > MOST_READ {
        return None;
    }
    let inputs: Vec<Option<Tensor>> = node.input.iter().map(|name| scope.constant(name)).collect();
    let call = Call {
        node,
        attributes: Attributes::new(node),
        opset: scope.around().opsets.version(&node.domain),
        inputs: &inputs,
        widened: false,
    };
    let outputs = operator.run(&call, allowed).ok()?;
    (outputs.len() == node.output.len()).then_some(outputs)
}

fn bytes(scope: &Scope, name: &str) -> usize {
    let constant = scope.fact(name).and_then(|f| f.constant.as_ref());
    constant.map_or(0, |stored| stored.n_bytes())
}

/// Bytes the file loses if a node no longer reads a value.
fn freed_bytes(scope: &Scope, name: &str) -> usize {
    let alone = scope.is_initializer(name) && scope.sole_reader(name).is_some();
    if alone { bytes(scope, name) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::super::patch::int;
    use super::super::trial::{Trial, reals};
    use crate::element::Element;
    use crate::tensor::Tensor;

    const RULE: &[&str] = &["fold-constants"];

    #[test]
    fn more_bytes_than_can_be_counted_stay() {
        let number = |x: f32| Tensor::new(&[], crate::tensor::Values::F32(vec![x]));
        let trial = Trial::new(17).only(RULE).input("x", "n");
        let trial = trial.constant("a", number(0.0)).constant("b", number(1e30));
        let trial = trial.constant("c", number(1.0)).node("r = Range(a, b, c)");
        let trial = trial.node("y = Add(x, r)").output("y", "m");
        assert_eq!(trial.unverified(), ["r = Range(a, b, c)", "y = Add(x, r)"]);
    }

    #[test]
    fn nodes_of_constants_become_initializers() {
        let trial = Trial::new(17).only(RULE).input("x", "n 4");
        let trial = trial.constant("v", reals(&[4])).constant("w", reals(&[4]));
        let trial = trial
            .node("a = Mul(v, w)")
            .node("b = Exp(a)")
            .node("y = Add(x, b)");
        trial.output("y", "n 4").gives(&["y = Add(x, b)"]);
    }

    #[test]
    fn constants_that_fit_no_memory_stay() {
        let trial = Trial::new(17).only(RULE).input("x", "n 4");
        let trial = trial.ints("sizes", &[1 << 40]).output("y", "n 4");
        let trial = trial.node("k = ConstantOfShape(sizes)");
        let trial = trial.with("r = ReduceSum(k)", vec![int("keepdims", 0)]);
        assert_eq!(trial.node("y = Add(x, r)").unverified().len(), 3);
    }

    #[test]
    fn what_follows_from_known_sizes_does_too() {
        let trial = Trial::new(17)
            .only(RULE)
            .input("x", "3 4")
            .node("s = Shape(x)");
        let trial = trial
            .ints("one", &[1])
            .node("t = Add(s, one)")
            .node("e = Expand(x, s)");
        let trial = trial.node("y = Relu(e)").output("y", "3 4");
        let trial = trial
            .node("z = Mul(t, t)")
            .output_of("z", Element::I64, "2");
        trial.gives(&[
            "e = Expand(x, [3, 4])",
            "y = Relu(e)",
            "z = Mul([4, 5], [4, 5])",
        ]);
    }

    #[test]
    fn an_initializer_that_a_caller_may_replace_is_no_constant() {
        let trial = Trial::new(17)
            .input("x", "n 4")
            .input("w", "4")
            .constant("w", reals(&[4]));
        let trial = trial.node("a = Exp(w)").node("y = Add(x, a)");
        trial.output("y", "n 4").stays();
    }

    #[test]
    fn folding_that_makes_the_file_much_larger_is_refused() {
        let fold = |n: i64| {
            let trial = Trial::new(17).only(RULE).input("x", &n.to_string());
            let trial = trial.ints("sizes", &[n]).node("f = ConstantOfShape(sizes)");
            let trial = trial.node("g = Exp(f)").node("y = Add(x, g)");
            trial.output("y", &n.to_string()).run().1.len()
        };
        assert_eq!(fold(1000), 1);
        assert_eq!(fold(100_000), 3);
    }

    #[test]
    fn folding_that_frees_what_it_adds_is_done_at_any_size() {
        let trial = Trial::new(17).only(RULE).input("x", "50000");
        let trial = trial.constant("w", reals(&[50_000])).node("e = Exp(w)");
        trial
            .node("y = Add(x, e)")
            .output("y", "50000")
            .gives(&["y = Add(x, e)"]);
    }

    #[test]
    fn random_numbers_are_not_folded() {
        let trial = Trial::new(17)
            .input("x", "4")
            .constant("w", Tensor::ints(&[4]));
        let trial = trial
            .node("c = ConstantOfShape(w)")
            .node("r = RandomNormalLike(c)");
        let nodes = trial.node("y = Add(x, r)").output("y", "4").unverified();
        assert_eq!(nodes, ["r = RandomNormalLike(c)", "y = Add(x, r)"]);
    }
}
