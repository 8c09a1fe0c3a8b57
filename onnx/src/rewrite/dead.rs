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
        .filter(|name| !used.contains(*name) && !(replaceable && inputs.contains(name)))
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
