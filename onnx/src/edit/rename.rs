//! Inputs and outputs under other names.

use super::names;
use crate::attributes::bodies_mut;
use crate::evaluate::captured;
use crate::proto::{GraphProto, ModelProto, TensorAnnotation};
use prost::Message;
use std::collections::BTreeSet;

/// Why names stay.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RenameError {
    /// No input or output has that name.
    #[error("there is no input or output `{name}`; there are {known}")]
    Unknown {
        /// What was given.
        name: String,
        /// What there is.
        known: String,
    },
    /// Another value has the new name already.
    #[error("the name `{name}` is taken: another value of the file has it")]
    Taken {
        /// The new name.
        name: String,
    },
}

/// The model with its inputs and outputs renamed, from the first name of each pair to the second.
///
/// # Errors
/// See [`RenameError`].
pub fn rename(model: &ModelProto, pairs: &[(String, String)]) -> Result<ModelProto, RenameError> {
    let mut model = model.clone();
    let Some(graph) = &mut model.graph else {
        return Ok(model);
    };
    for (old, new) in pairs.iter().filter(|(old, new)| old != new) {
        let ports: BTreeSet<&String> = graph
            .input
            .iter()
            .chain(&graph.output)
            .map(|p| &p.name)
            .collect();
        if !ports.contains(old) {
            let known: Vec<&str> = ports.into_iter().map(String::as_str).collect();
            return Err(RenameError::Unknown {
                name: old.clone(),
                known: known.join(", "),
            });
        }
        let mut taken = BTreeSet::new();
        names(graph, &mut taken);
        if new.is_empty() || taken.contains(new) {
            return Err(RenameError::Taken { name: new.clone() });
        }
        within(graph, old, new);
    }
    Ok(model)
}

/// Renames a value of a graph everywhere in it, in bodies where they read it from around them.
fn within(graph: &mut GraphProto, old: &str, new: &str) {
    let change = |name: &mut String| {
        if name == old {
            *name = new.to_string();
        }
    };
    let ports = graph.input.iter_mut().chain(&mut graph.output);
    ports
        .chain(&mut graph.value_info)
        .for_each(|port| change(&mut port.name));
    graph
        .initializer
        .iter_mut()
        .for_each(|tensor| change(&mut tensor.name));
    let sparse = graph.sparse_initializer.iter_mut();
    sparse
        .flat_map(|s| &mut s.values)
        .for_each(|tensor| change(&mut tensor.name));
    for annotation in &mut graph.quantization_annotation {
        // An annotation that cannot be decoded says nothing to anybody, and stays.
        if let Ok(mut known) = TensorAnnotation::decode(annotation.clone()) {
            let before = known.clone();
            change(&mut known.tensor_name);
            let parameters = known.quant_parameter_tensor_names.iter_mut();
            parameters.for_each(|entry| change(&mut entry.value));
            if known != before {
                *annotation = known.encode_to_vec().into();
            }
        }
    }
    for node in &mut graph.node {
        node.input
            .iter_mut()
            .chain(&mut node.output)
            .for_each(change);
        for body in bodies_mut(node) {
            if captured(body).contains(old) {
                within(body, old, new);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Element;
    use crate::proto::{AttributeProto, SparseTensorProto, StringStringEntryProto, TensorProto};
    use crate::rewrite::trial::{Trial, line, value};
    use crate::verify::{Checker, Options};

    fn pair(old: &str, new: &str) -> (String, String) {
        (old.to_string(), new.to_string())
    }

    #[test]
    fn ports_are_renamed_with_all_that_reads_them() {
        let made = |x: &str, y: &str| {
            let trial = Trial::new(17)
                .input(x, "n 4")
                .node(&format!("a = Exp({x})"));
            let trial = trial.node(&format!("{y} = Mul(a, {x})"));
            trial.output(y, "n 4").model()
        };
        let model = made("x", "y");
        let renamed = rename(&model.proto, &[pair("x", "image"), pair("y", "score")]);
        let renamed = renamed.expect("free names");
        assert_eq!(renamed, made("image", "score").proto);
        assert!(Checker::new(&model.with(renamed), &Options::default()).is_ok());
    }

    #[test]
    fn bodies_sparse_values_and_annotations_follow() {
        let mut proto = Trial::new(17)
            .input("c", "")
            .input("x", "n 4")
            .model()
            .proto;
        let branch = |name: &str, op: &str| AttributeProto {
            name: name.to_string(),
            g: Some(GraphProto {
                node: vec![line(&format!("{op}_y = {op}(x)"), Vec::new())],
                output: vec![value(&format!("{op}_y"), Element::F32, "n 4")],
                ..Default::default()
            }),
            ..Default::default()
        };
        let graph = proto.graph.get_or_insert_default();
        let branches = vec![branch("then_branch", "Exp"), branch("else_branch", "Neg")];
        graph.node.push(line("y = If(c)", branches));
        graph.output.push(value("y", Element::F32, "n 4"));
        graph.sparse_initializer.push(SparseTensorProto {
            values: Some(TensorProto {
                name: "stored".to_string(),
                ..Default::default()
            }),
            ..Default::default()
        });
        let annotation = |of: &str| TensorAnnotation {
            tensor_name: of.to_string(),
            quant_parameter_tensor_names: vec![StringStringEntryProto {
                key: "SCALE_TENSOR".to_string(),
                value: of.to_string(),
            }],
        };
        graph.quantization_annotation = vec![annotation("x").encode_to_vec().into()];
        let renamed = rename(&proto, &[pair("x", "image"), pair("y", "y")]).expect("free names");
        let graph = renamed.graph.expect("a graph");
        let found = TensorAnnotation::decode(graph.quantization_annotation[0].clone());
        assert_eq!(found, Ok(annotation("image")));
        for body in crate::attributes::bodies(&graph.node[0]) {
            assert_eq!(body.node[0].input, ["image"]);
        }
        let taken = rename(&proto, &[pair("x", "stored")]).expect_err("a stored value has it");
        assert!(taken.to_string().contains("`stored` is taken"));
    }

    #[test]
    fn names_that_are_not_there_or_taken_are_refused() {
        let trial = Trial::new(17).input("x", "n 4").node("a = Exp(x)");
        let model = trial.node("y = Neg(a)").output("y", "n 4").model().proto;
        let refused = |old, new| rename(&model, &[pair(old, new)]).map(drop);
        let taken = |name: &str| {
            Err(RenameError::Taken {
                name: name.to_string(),
            })
        };
        assert_eq!(refused("x", "y"), taken("y"));
        assert_eq!(refused("x", "a"), taken("a"));
        let unknown = refused("a", "b").expect_err("not a port").to_string();
        assert_eq!(unknown, "there is no input or output `a`; there are x, y");
    }
}
