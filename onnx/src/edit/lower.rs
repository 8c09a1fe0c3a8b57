//! A model brought to an older version of the standard's operators.
//!
//! Owns which nodes an older version has as they are: the operator is there, takes and gives as many values and has
//! the attributes. Inputs that were attributes before are written as such. Whether the older operators compute the
//! same is for the verification of both files: a default that moved shows there. Raising is in `raise.rs`.

use super::raise::{RaiseError, version};
use crate::attributes::{bodies_mut, is_standard};
use crate::check::OPSETS;
use crate::check::schemas::{Schema, counts, versions};
use crate::evaluate::label;
use crate::infer::{Facts, known_values};
use crate::operators::Unknowns;
use crate::proto::{AttributeProto, GraphProto, ModelProto, NodeProto};
use crate::rewrite::patch::{int, ints};
use std::path::Path;
use std::sync::Arc;

/// Operators with an input that older versions have as an attribute: position, attribute, whether it is a list.
const WERE_ATTRIBUTES: [(&str, usize, &str, bool); 17] = [
    ("Squeeze", 1, "axes", true),
    ("Unsqueeze", 1, "axes", true),
    ("Split", 1, "split", true),
    ("ReduceSum", 1, "axes", true),
    ("ReduceMean", 1, "axes", true),
    ("ReduceMax", 1, "axes", true),
    ("ReduceMin", 1, "axes", true),
    ("ReduceProd", 1, "axes", true),
    ("ReduceL1", 1, "axes", true),
    ("ReduceL2", 1, "axes", true),
    ("ReduceLogSum", 1, "axes", true),
    ("ReduceLogSumExp", 1, "axes", true),
    ("ReduceSumSquare", 1, "axes", true),
    ("Pad", 1, "pads", true),
    ("Tile", 1, "repeats", true),
    ("TopK", 1, "k", false),
    ("DFT", 2, "axis", false),
];

/// The model with the older version `to` of the standard's operators.
///
/// # Errors
/// See [`RaiseError`].
pub fn lower(model: &ModelProto, folder: &Arc<Path>, to: i64) -> Result<ModelProto, RaiseError> {
    let from = version(model);
    if !OPSETS.contains(&to) {
        let newest = *OPSETS.end();
        return Err(RaiseError::Unknown { to, newest });
    }
    if from <= to {
        return super::raise(model, folder, to);
    }
    if !model.functions.is_empty() {
        return Err(RaiseError::Functions);
    }
    let mut model = model.clone();
    let facts = known_values(&model, folder, &Unknowns::default());
    if let Some(graph) = &mut model.graph {
        body(graph, &facts, (from, to))?;
    }
    let standard = |domain: &str| domain.is_empty() || domain == "ai.onnx";
    for set in &mut model.opset_import {
        if standard(&set.domain) {
            set.version = to;
        }
    }
    Ok(model)
}

fn body(graph: &mut GraphProto, facts: &Facts, versions: (i64, i64)) -> Result<(), RaiseError> {
    for node in &mut graph.node {
        for inner in bodies_mut(node) {
            body(inner, facts, versions)?;
        }
        if is_standard(node) {
            lowered(node, facts, versions)?;
        }
    }
    Ok(())
}

/// The operator as a version has it.
fn schema(node: &NodeProto, at: i64) -> Option<&'static Schema> {
    let known = versions("", &node.op_type).iter();
    known.rev().find(|s| s.since <= at && !s.is_deprecated)
}

fn lowered(node: &mut NodeProto, facts: &Facts, (from, to): (i64, i64)) -> Result<(), RaiseError> {
    let refused = |node: &NodeProto, what: String| RaiseError::Node {
        node: label(node),
        what: format!("version {to} of the operators {what}"),
    };
    let older = schema(node, to);
    let older = older.ok_or_else(|| refused(node, format!("has no {}", node.op_type)))?;
    if schema(node, from).is_some_and(|newer| newer.since == older.since) {
        return Ok(());
    }
    for (op, at, name, is_list) in WERE_ATTRIBUTES {
        if op != node.op_type || !older.attributes.contains_key(name) {
            continue;
        }
        let Some(input) = node.input.get(at).filter(|name| !name.is_empty()) else {
            continue;
        };
        let value = facts.get(input).and_then(|fact| fact.known_ints());
        let value = value.ok_or_else(|| refused(node, format!("needs a constant `{name}`")))?;
        node.attribute.push(attribute(name, &value, is_list));
        node.input[at].clear();
    }
    while node.input.last().is_some_and(String::is_empty) {
        node.input.pop();
    }
    let has = |a: &AttributeProto| older.is_open || older.attributes.contains_key(a.name.as_str());
    // What asks for nothing need not be said.
    let asks = |a: &AttributeProto| a.i != Some(0) || !a.ints.is_empty() || a.s.is_some();
    let unknown = node.attribute.iter().find(|a| !has(a) && asks(a));
    if let Some(unknown) = unknown {
        return Err(refused(
            node,
            format!("has no attribute `{}`", unknown.name),
        ));
    }
    node.attribute.retain(has);
    let fits = counts(&older.inputs).contains(&node.input.len())
        && counts(&older.outputs).contains(&node.output.len());
    match fits {
        true => Ok(()),
        false => Err(refused(
            node,
            "takes other inputs or gives other outputs".to_string(),
        )),
    }
}

fn attribute(name: &str, value: &[i64], is_list: bool) -> AttributeProto {
    match (is_list, value) {
        (false, [one]) => int(name, *one),
        _ => ints(name, value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attributes::Attributes;
    use crate::rewrite::trial::Trial;
    use crate::verify::{Checker, Options};

    fn lowered_to(trial: &Trial, to: i64) -> Result<ModelProto, String> {
        let model = trial.model();
        let made = lower(&model.proto, &model.folder, to).map_err(|e| e.to_string())?;
        let checker = Checker::new(&model, &Options::default()).expect("it runs");
        let same = checker.check_other(&model.with(made.clone()));
        same.map(|_| made).map_err(|e| e.to_string())
    }

    #[test]
    fn inputs_become_attributes_again() {
        let trial = Trial::new(18).input("x", "2 3 4").ints("axes", &[1]);
        let trial = trial.node("y = ReduceMean(x, axes)").output("y", "2 1 4");
        let made = lowered_to(&trial, 13).expect("it is the same");
        let node = &made.graph.as_ref().expect("a graph").node[0];
        assert_eq!(node.input, ["x"]);
        assert_eq!(Attributes::new(node).ints("axes"), Some(&[1][..]));
        assert_eq!(version(&made), 13);
    }

    #[test]
    fn what_an_older_version_lacks_or_means_otherwise_is_refused() {
        let trial = |node: &str| {
            Trial::new(20)
                .input("x", "2 3 4")
                .node(node)
                .output("y", "2 3 4")
        };
        let lacks = lowered_to(&trial("y = Gelu(x)"), 17).expect_err("no Gelu");
        assert!(
            lacks.contains("version 17 of the operators has no Gelu"),
            "{lacks}"
        );
        // Before version 13 it is along axis 1 and all after it.
        let differs = lowered_to(&trial("y = Softmax(x)"), 12).expect_err("another default");
        assert!(differs.contains("`y` differs"), "{differs}");
        assert!(lowered_to(&trial("y = Relu(x)"), 12).is_ok());
        let dynamic = Trial::new(18).input("x", "2 3 4");
        let dynamic = dynamic.input_of("axes", crate::element::Element::I64, "1");
        let dynamic = dynamic.node("y = ReduceMean(x, axes)").output("y", "1 3 4");
        let dynamic = lowered_to(&dynamic, 13).expect_err("no constant");
        assert!(dynamic.contains("needs a constant `axes`"), "{dynamic}");
    }
}
