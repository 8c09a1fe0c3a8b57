//! A part of a file, between named values.

use super::described;
use crate::evaluate::reads;
use crate::infer::known_values;
use crate::near::suggestion;
use crate::operators::Unknowns;
use crate::proto::{GraphProto, ModelProto, ValueInfoProto};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Why a part cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtractError {
    /// No value of that name.
    #[error("the graph has no value `{name}`{near}")]
    NoValue {
        /// What was given.
        name: String,
        /// What may have been meant.
        near: String,
    },
    /// An input or output of a file needs a type, and that of this value is not known.
    #[error("the type of `{name}` is not known, so it cannot be an input or output of a file")]
    NoType {
        /// The value.
        name: String,
    },
    /// An input that nothing reads.
    #[error("`{name}` is not read by anything that the outputs need")]
    Unread {
        /// The value.
        name: String,
    },
}

/// The part of a model that computes the values `to` from the values `from`. An empty `to` stands for the model's own
/// outputs. An input of the model that is needed besides `from` stays an input.
///
/// # Errors
/// See [`ExtractError`].
pub fn extract(
    model: &ModelProto,
    folder: &Arc<Path>,
    from: &[String],
    to: &[String],
) -> Result<ModelProto, ExtractError> {
    let mut model = model.clone();
    let facts = known_values(&model, folder, &Unknowns::default());
    let Some(graph) = &mut model.graph else {
        return Ok(model);
    };
    let values = values(graph);
    let given = from.iter().chain(to);
    if let Some(name) = given.clone().find(|name| !values.contains(*name)) {
        return Err(ExtractError::NoValue {
            name: name.clone(),
            near: suggestion(name, values.iter().map(String::as_str)),
        });
    }
    let said = graph.input.iter().chain(&graph.output);
    let said: Vec<ValueInfoProto> = said.chain(&graph.value_info).cloned().collect();
    // What the file says of its own inputs and outputs is kept word for word.
    let port = |name: &String| {
        let known = said.iter().find(|i| i.name == *name && i.r#type.is_some());
        let inferred = || described(name, facts.get(name)?);
        known
            .cloned()
            .or_else(inferred)
            .ok_or_else(|| ExtractError::NoType { name: name.clone() })
    };
    let inputs: Vec<ValueInfoProto> = from.iter().map(port).collect::<Result<_, _>>()?;
    if !to.is_empty() {
        graph.output = to.iter().map(port).collect::<Result<_, _>>()?;
    }
    let mut wanted: BTreeSet<String> = graph.output.iter().map(|o| o.name.clone()).collect();
    let is_given = |name: &str| from.iter().any(|f| f == name);
    let mut kept = vec![false; graph.node.len()];
    for (n, node) in graph.node.iter().enumerate().rev() {
        let gives = |name: &String| wanted.contains(name) && !is_given(name);
        kept[n] = node.output.iter().any(gives);
        if kept[n] {
            wanted.extend(reads(node).into_iter().map(str::to_string));
        }
    }
    if let Some(unread) = from.iter().find(|name| !wanted.contains(*name)) {
        return Err(ExtractError::Unread {
            name: unread.clone(),
        });
    }
    let mut kept = kept.into_iter();
    graph.node.retain(|_| kept.next().unwrap_or(true));
    let still_read = |name: &String| wanted.contains(name) && !is_given(name);
    graph.initializer.retain(|t| still_read(&t.name));
    let sparse = |t: &crate::proto::SparseTensorProto| {
        t.values.as_ref().is_some_and(|v| still_read(&v.name))
    };
    graph.sparse_initializer.retain(sparse);
    graph.input.retain(|i| still_read(&i.name));
    graph.input.splice(0..0, inputs);
    let made: BTreeSet<&String> = graph.node.iter().flat_map(|n| &n.output).collect();
    graph.value_info.retain(|i| made.contains(&i.name));
    Ok(model)
}

/// Names of all values of a graph.
fn values(graph: &GraphProto) -> BTreeSet<String> {
    let computed = graph.node.iter().flat_map(|n| &n.output);
    let given = graph.input.iter().map(|i| &i.name);
    let stored = graph.initializer.iter().map(|t| &t.name);
    let all = computed.chain(given).chain(stored);
    all.filter(|name| !name.is_empty()).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rewrite::trial::{Trial, reals};

    fn part(from: &[&str], to: &[&str]) -> Result<GraphProto, ExtractError> {
        let trial = Trial::new(17).input("x", "n 4").input("z", "n 3");
        let trial = trial.constant("w", reals(&[4, 3])).node("p = MatMul(x, w)");
        let trial = trial.node("q = Add(p, z)").node("y = Relu(q)");
        let model = trial.output("y", "n 3").model();
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let made = extract(&model.proto, &model.folder, &names(from), &names(to))?;
        Ok(made.graph.expect("a graph"))
    }

    fn names(ports: &[ValueInfoProto]) -> Vec<&str> {
        ports.iter().map(|p| p.name.as_str()).collect()
    }

    #[test]
    fn a_part_has_what_lies_between() {
        let graph = part(&["p"], &["q"]).expect("a part");
        assert_eq!(names(&graph.input), ["p", "z"]);
        assert_eq!(names(&graph.output), ["q"]);
        assert_eq!(graph.node.len(), 1);
        assert_eq!(graph.initializer, []);
        let graph = part(&[], &["p"]).expect("a part");
        assert_eq!(names(&graph.input), ["x"]);
        assert_eq!(graph.initializer.len(), 1);
        let graph = part(&["w"], &[]).expect("a part");
        assert_eq!(names(&graph.input), ["w", "x", "z"]);
        assert_eq!(names(&graph.output), ["y"]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let refused = |from: &[&str], to: &[&str]| part(from, to).expect_err("no part").to_string();
        assert_eq!(
            refused(&["P"], &[]),
            "the graph has no value `P`; did you mean p, q, w?"
        );
        assert_eq!(
            refused(&["z"], &["p"]),
            "`z` is not read by anything that the outputs need"
        );
    }
}
