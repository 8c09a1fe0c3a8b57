//! Values that a caller gives for dynamic sizes: whether the file has such sizes.

use super::error::Problem;
use super::proto::GraphProto;
use std::collections::{BTreeMap, BTreeSet};

/// A problem for each given size that the file does not have: neither an input nor an output is declared with
/// it, and it is none of the symbols that were `made` for sizes without a name.
pub(super) fn unknown_sizes(
    graph: &GraphProto,
    made: &BTreeSet<&str>,
    given: &BTreeMap<String, i64>,
) -> Vec<Problem> {
    let ports = graph.input.iter().chain(&graph.output);
    let types = ports.filter_map(|p| p.r#type.as_ref()?.tensor_type.as_ref()?.shape.as_ref());
    let dims = types.flat_map(|shape| &shape.dim);
    let named = dims.filter_map(|dim| dim.name());
    let mut declared: BTreeSet<&str> = named.collect();
    let unknown =
        |name: &&String| !declared.contains(name.as_str()) && !made.contains(name.as_str());
    let unknown: Vec<&String> = given.keys().filter(unknown).collect();
    if declared.is_empty() {
        declared.clone_from(made);
    }
    let has = match declared.is_empty() {
        true => "it has none".to_string(),
        false => format!(
            "it has {}",
            declared.into_iter().collect::<Vec<_>>().join(", ")
        ),
    };
    let problem = |name: &String| Problem {
        place: format!("size `{name}`"),
        message: format!("the file has no dynamic size of that name; {has}"),
    };
    unknown.into_iter().map(problem).collect()
}

#[cfg(test)]
mod tests {
    use super::super::proto::{
        Dimension, DimensionProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
    };
    use super::*;

    fn port(sizes: &[&str]) -> ValueInfoProto {
        let dim = |name: &&str| DimensionProto {
            value: Some(Dimension::DimParam(name.to_string())),
            ..DimensionProto::default()
        };
        let shape = TensorShapeProto {
            dim: sizes.iter().map(dim).collect(),
        };
        let tensor = TensorTypeProto {
            elem_type: 1,
            shape: Some(shape),
        };
        ValueInfoProto {
            r#type: Some(TypeProto {
                tensor_type: Some(tensor),
                ..TypeProto::default()
            }),
            ..ValueInfoProto::default()
        }
    }

    #[test]
    fn sizes_of_inputs_and_outputs_and_made_ones_are_known() {
        let graph = GraphProto {
            input: vec![port(&["n", "k"])],
            output: vec![port(&["m"])],
            ..GraphProto::default()
        };
        let found = |name: &str| {
            let given = BTreeMap::from([(name.to_string(), 3)]);
            unknown_sizes(&graph, &BTreeSet::from(["x_dim0"]), &given)
        };
        for known in ["n", "k", "m", "x_dim0"] {
            assert_eq!(found(known), []);
        }
        let [problem] = &found("q")[..] else {
            panic!("one problem");
        };
        assert_eq!(problem.place, "size `q`");
        assert!(
            problem.message.ends_with("it has k, m, n"),
            "{}",
            problem.message
        );
    }
}
