//! Dead code: nodes and initializers whose values nobody reads.
//!
//! Before: `a = Relu(x)`, nobody reads `a`; after: nothing. Legal because operators have no effect but
//! their outputs. Inputs stay, but for those of files before version 4 that only name an initializer.

use super::scope::Constants;
use crate::evaluate::reads;
use crate::proto::{
    Dimension, DimensionProto, GraphProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use crate::stored::Stored;
use std::collections::BTreeSet;

/// Removes them, and what only they read. `replaceable`: whether a caller may replace initializers
/// that are also inputs.
pub fn remove(body: &mut GraphProto, constants: &mut Constants, replaceable: bool) {
    let mut used: BTreeSet<String> = body.output.iter().map(|o| o.name.clone()).collect();
    let mut kept = vec![false; body.node.len()];
    for (n, node) in body.node.iter_mut().enumerate().rev() {
        kept[n] = node.output.iter().any(|o| used.contains(o)) || node.output.is_empty();
        if kept[n] {
            used.extend(reads(node).into_iter().map(str::to_string));
        }
    }
    let mut kept = kept.into_iter();
    body.node.retain(|_| kept.next().unwrap_or(true));
    let inputs: BTreeSet<&String> = body.input.iter().map(|i| &i.name).collect();
    let goes: Vec<String> = constants
        .keys()
        .filter(|name| !(used.contains(*name) || replaceable && inputs.contains(name)))
        .cloned()
        .collect();
    for name in goes {
        constants.remove(&name);
        body.input.retain(|i| i.name != name);
    }
}

/// The declaration of an initializer as an input.
pub fn info(name: &str, stored: &Stored) -> ValueInfoProto {
    let dim = |n: &i64| DimensionProto {
        value: Some(Dimension::DimValue(*n)),
        ..Default::default()
    };
    let shape = TensorShapeProto {
        dim: stored.proto().dims.iter().map(dim).collect(),
    };
    ValueInfoProto {
        name: name.to_string(),
        r#type: Some(TypeProto {
            tensor_type: Some(TensorTypeProto {
                elem_type: stored.proto().data_type,
                shape: Some(shape),
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::trial::{Trial, reals};

    #[test]
    fn what_nobody_reads_goes_with_what_only_it_reads() {
        let trial = Trial::new(17)
            .input("x", "4")
            .constant("w", reals(&[4]))
            .constant("v", reals(&[4]));
        let trial = trial
            .node("a = Mul(x, w)")
            .node("b = Exp(a)")
            .node("y = Neg(x)");
        let done = trial.output("y", "4").rewritten();
        let graph = done.model.graph.as_ref().expect("a graph");
        assert_eq!(graph.node.len(), 1);
        assert!(graph.initializer.is_empty());
        assert_eq!(graph.input.len(), 1);
    }

    #[test]
    fn inputs_stay_though_nobody_reads_them() {
        let trial = Trial::new(17)
            .input("x", "4")
            .input("unread", "4")
            .input("w", "4");
        let trial = trial.constant("w", reals(&[4])).node("y = Neg(x)");
        let done = trial.output("y", "4").rewritten();
        let graph = done.model.graph.as_ref().expect("a graph");
        assert_eq!(graph.input.len(), 3);
        assert_eq!(graph.initializer.len(), 1, "the default of an input");
    }
}
