//! Types and sizes of values, written into the file where they are inferred.

use crate::fact::Fact;
use crate::infer::{is_unknown, known_values};
use crate::operators::Unknowns;
use crate::proto::{
    Dimension, DimensionProto, ModelProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use graph::SymExpr;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// The model with a type written down for every value of its graph whose type is known, and how many were added.
/// What the file says already stays. Values inside of bodies and functions are left as they are.
pub fn with_sizes(model: &ModelProto, folder: &Arc<Path>) -> (ModelProto, usize) {
    let mut model = model.clone();
    let facts = known_values(&model, folder, &Unknowns::default());
    let Some(graph) = &mut model.graph else {
        return (model, 0);
    };
    let said = graph.value_info.iter().filter(|i| i.r#type.is_some());
    let said = said.chain(&graph.output).chain(&graph.input);
    let said: BTreeSet<String> = said.map(|i| i.name.clone()).collect();
    let names = graph.node.iter().flat_map(|n| &n.output);
    let new = names.filter(|name| !name.is_empty() && !said.contains(*name));
    let new: Vec<ValueInfoProto> = new
        .filter_map(|name| described(name, facts.get(name)?))
        .collect();
    graph
        .value_info
        .retain(|old| new.iter().all(|i| i.name != old.name));
    let n_new = new.len();
    graph.value_info.extend(new);
    (model, n_new)
}

/// What is known of a value, as a file says it; `None` if not even its type is known. A size that nothing is known
/// of has no name, one that follows from others is written as their sum.
pub fn described(name: &str, fact: &Fact) -> Option<ValueInfoProto> {
    let size = |n: &SymExpr| {
        let value = match n.as_const() {
            Some(n) => Some(Dimension::DimValue(n)),
            None if is_unknown(n) || n.symbols().iter().any(|s| s.as_str().starts_with('?')) => {
                None
            }
            None => Some(Dimension::DimParam(n.to_string())),
        };
        DimensionProto {
            value,
            ..Default::default()
        }
    };
    let shape = fact.shape.as_ref().map(|shape| TensorShapeProto {
        dim: shape.iter().map(size).collect(),
    });
    Some(ValueInfoProto {
        name: name.to_string(),
        r#type: Some(TypeProto {
            tensor_type: Some(TensorTypeProto {
                elem_type: fact.element?.number(),
                shape,
            }),
            ..Default::default()
        }),
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rewrite::patch::int;
    use crate::rewrite::trial::{Trial, reals};

    #[test]
    fn inferred_sizes_are_written_and_those_said_stay() {
        let trial = Trial::new(17)
            .input("x", "n 4")
            .constant("w", reals(&[4, 3]));
        let trial = trial.node("p = MatMul(x, w)");
        let trial = trial.with("c = Concat(p, p)", vec![int("axis", 0)]);
        let trial = trial.node("q = Exp(c)").output("q", "m 3");
        let model = trial.model();
        let (made, n_new) = with_sizes(&model.proto, &model.folder);
        let graph = made.graph.clone().expect("a graph");
        assert_eq!(n_new, 2);
        let sizes = |at: usize| {
            let shape = graph.value_info[at].r#type.clone().expect("a type");
            let dims = shape
                .tensor_type
                .expect("a tensor")
                .shape
                .expect("sizes")
                .dim;
            let values = dims.into_iter().map(|d| d.value.expect("a size"));
            values.collect::<Vec<_>>()
        };
        assert_eq!(graph.value_info[0].name, "p");
        assert_eq!(
            sizes(0),
            [Dimension::DimParam("n".to_string()), Dimension::DimValue(3)]
        );
        assert!(matches!(&sizes(1)[0], Dimension::DimParam(size) if size.contains('n')));
        let (again, n_new) = with_sizes(&made, &model.folder);
        assert_eq!((again == made, n_new), (true, 0));
    }
}
