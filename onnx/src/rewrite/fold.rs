//! Constant folding: nodes that give the same in every run become initializers.
//!
//! Before: `y = Mul(c1, c2)`; after: an initializer `y`. Also where the value follows from sizes that
//! are known though the tensor is not: `Shape(x)` of a fixed `x`. Legal because the operators are
//! functions of their inputs; random ones are left, and so is DequantizeLinear. What one folding adds to the file beyond what it
//! frees is capped by [`super::Options::fold_limit`].

use super::Rule;
use super::patch::Patch;
use super::scope::Scope;
use crate::attributes::{Attributes, bodies};
use crate::infer::{is_dequantized, is_random};
use crate::operators::{self, Call};
use crate::tensor::Tensor;

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
    let from_facts = |name: &String| scope.fact(name)?.constant.as_ref()?.tensor().ok();
    let inferred: Option<Vec<Tensor>> = node.output.iter().map(from_facts).collect();
    let tensors = match inferred {
        Some(tensors) => tensors,
        None => computed(scope, n)?,
    };
    let freed: usize = node.input.iter().map(|name| freed_bytes(scope, name)).sum();
    let own = Attributes::of(node)
        .tensor("value")
        .map_or(0, prost::Message::encoded_len);
    let added: usize = tensors.iter().map(Tensor::n_bytes).sum();
    if added > freed + own + scope.around().fold_limit {
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

/// The outputs of a node of constants of any size, if they may be worth their bytes.
fn computed(scope: &Scope, n: usize) -> Option<Vec<Tensor>> {
    let node = scope.node(n);
    let operator = operators::find(node)?;
    let constant =
        |name: &String| name.is_empty() || scope.fact(name).is_some_and(|f| f.constant.is_some());
    if !node.input.iter().all(constant) {
        return None;
    }
    let foreseen = node.output.iter().filter_map(|o| {
        let fact = scope.fact(o)?;
        Some(fact.len()? * fact.element?.bytes()?)
    });
    let held: usize = node.input.iter().map(|name| bytes(scope, name)).sum();
    if foreseen.sum::<usize>() > held + scope.around().fold_limit {
        return None;
    }
    let inputs: Vec<Option<Tensor>> = node.input.iter().map(|name| scope.constant(name)).collect();
    let call = Call {
        node,
        attributes: Attributes::of(node),
        opset: scope.around().opsets.version(&node.domain),
        inputs: &inputs,
        widened: false,
    };
    let outputs = (operator.evaluate)(&call).ok()?;
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
