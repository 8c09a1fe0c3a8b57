//! A model brought to an older version of the standard's operators.
//!
//! Owns which nodes an older version has as they are: the operator is there, takes and gives as many values and has
//! the attributes. Inputs that were attributes before are written as such, and defaults that moved are written down.
//! Whether the older operators compute the same is for the verification of both files. Raising is in `raise.rs`.

use super::raise::{RaiseError, version};
use crate::attributes::{Attributes, bodies_mut, is_standard};
use crate::check::OPSETS;
use crate::check::schemas::{Schema, counts, versions};
use crate::evaluate::label;
use crate::fact::MAX_ELEMENTS;
use crate::infer::{Facts, known_values};
use crate::operators::Unknowns;
use crate::proto::{AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto};
use crate::rewrite::patch::{int, ints, text};
use crate::stored::Stored;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// Operators with an input that older versions have as an attribute: position, attribute, whether it is a list.
const WERE_ATTRIBUTES: [(&str, usize, &str, bool); 16] = [
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
        let lowering = Lowering {
            from,
            to,
            facts: &facts,
            replaceable: graph.input.iter().map(|port| port.name.clone()).collect(),
        };
        lowering.body(graph, &BTreeMap::new())?;
    }
    let standard = |domain: &str| domain.is_empty() || domain == "ai.onnx";
    for set in &mut model.opset_import {
        if standard(&set.domain) {
            set.version = to;
        }
    }
    Ok(model)
}

/// Constants of integers in a body and those around it, by name.
type Constants = BTreeMap<String, Vec<i64>>;

/// What nodes are lowered with.
struct Lowering<'a> {
    from: i64,
    to: i64,
    /// What is known of the values of the outermost graph.
    facts: &'a Facts,
    /// Inputs of the model: a caller may give them other values than the file does.
    replaceable: BTreeSet<String>,
}

/// The operator as a version has it.
fn schema(node: &NodeProto, at: i64) -> Option<&'static Schema> {
    let known = versions("", &node.op_type).iter();
    known.rev().find(|s| s.since <= at && !s.is_deprecated)
}

impl Lowering<'_> {
    fn body(&self, graph: &mut GraphProto, around: &Constants) -> Result<(), RaiseError> {
        for node in &mut graph.node {
            for inner in bodies_mut(node) {
                let mut constants = around.clone();
                constants.extend(constants_of(inner));
                self.body(inner, &constants)?;
            }
            if is_standard(node) {
                self.node(node, around)?;
            }
        }
        Ok(())
    }

    /// Integers that are the same in every run.
    fn ints(&self, name: &str, constants: &Constants) -> Option<Vec<i64>> {
        let inner = constants.get(name).cloned();
        inner.or_else(|| match self.replaceable.contains(name) {
            true => None,
            false => self.facts.get(name)?.known_ints(),
        })
    }

    fn rank(&self, node: &NodeProto) -> Option<i64> {
        let rank = self.facts.get(node.input.first()?)?.rank()?;
        i64::try_from(rank).ok()
    }

    fn node(&self, node: &mut NodeProto, constants: &Constants) -> Result<(), RaiseError> {
        let to = self.to;
        let refused = |node: &NodeProto, what: String| RaiseError::Node {
            node: label(node),
            what: format!("version {to} of the operators {what}"),
        };
        let older = schema(node, to);
        let older = older.ok_or_else(|| refused(node, format!("has no {}", node.op_type)))?;
        if schema(node, self.from).is_some_and(|newer| newer.since == older.since) {
            return Ok(());
        }
        self.reworded(node, older.since)
            .map_err(|what| refused(node, what.to_string()))?;
        for (op, at, name, is_list) in WERE_ATTRIBUTES {
            if op != node.op_type || !older.attributes.contains_key(name) {
                continue;
            }
            let Some(input) = node.input.get(at).filter(|name| !name.is_empty()) else {
                continue;
            };
            let value = self.ints(input, constants);
            let value = value.ok_or_else(|| refused(node, format!("needs a constant `{name}`")))?;
            node.attribute.push(attribute(name, &value, is_list));
            node.input[at].clear();
        }
        while node.input.last().is_some_and(String::is_empty) {
            node.input.pop();
        }
        let has =
            |a: &AttributeProto| older.is_open || older.attributes.contains_key(a.name.as_str());
        let unknown = node.attribute.iter().find(|a| {
            let asks = !self.is_idle(node, a, constants);
            asks && !has(a)
        });
        if let Some(unknown) = unknown {
            let what = format!("has no attribute `{}`", unknown.name);
            return Err(refused(node, what));
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

    /// Whether a node means the same without this attribute.
    fn is_idle(&self, node: &NodeProto, a: &AttributeProto, constants: &Constants) -> bool {
        let is_number = a.ints.is_empty() && a.s.is_none();
        match (a.name.as_str(), a.i) {
            // It matters only for 8-bit floats, which are as new as it is.
            ("saturate", Some(1)) => true,
            // Without it, a size of 0 in the shape stands for that of the input.
            ("allowzero", Some(1)) => {
                let shape = node.input.get(1).and_then(|s| self.ints(s, constants));
                shape.is_some_and(|shape| !shape.contains(&0))
            }
            (_, Some(0)) => is_number,
            _ => false,
        }
    }

    /// Writes the node as version `since` does, where defaults or names changed after it.
    fn reworded(&self, node: &mut NodeProto, since: i64) -> Result<(), &'static str> {
        let is_before = |version: i64| since < version && version <= self.from;
        match node.op_type.as_str() {
            "Softmax" | "LogSoftmax" | "Hardmax" if is_before(13) => self.flattening(node),
            "DFT" if is_before(20) && node.input.get(2).is_none_or(String::is_empty) => {
                node.attribute.push(int("axis", -2));
                Ok(())
            }
            "GridSample" if is_before(20) => {
                if self.rank(node).is_some_and(|rank| rank != 4) {
                    return Err("samples images of two dimensions only");
                }
                let named = match Attributes::new(node).text("mode") {
                    Some("linear") => "bilinear",
                    Some("cubic") => "bicubic",
                    _ => return Ok(()),
                };
                set(node, text("mode", named));
                Ok(())
            }
            "RoiAlign" if is_before(16) => {
                let name = "coordinate_transformation_mode";
                match Attributes::new(node).text(name) {
                    Some("output_half_pixel") => {
                        node.attribute.retain(|a| a.name != name);
                        Ok(())
                    }
                    _ => Err("takes samples half a pixel away from those asked for"),
                }
            }
            "Pad" if is_before(19) && Attributes::new(node).text("mode") == Some("wrap") => {
                Err("does not pad with what is at the other end")
            }
            "ScatterElements" | "ScatterND"
                if is_before(18)
                    && matches!(Attributes::new(node).text("reduction"), Some("min" | "max")) =>
            {
                Err("has no such reduction")
            }
            _ => Ok(()),
        }
    }

    /// Before version 13, all dimensions from `axis` on were taken as one. It is the same if `axis` is the last.
    fn flattening(&self, node: &mut NodeProto) -> Result<(), &'static str> {
        let rank = self.rank(node);
        let rank = rank.ok_or("needs an input whose number of dimensions is known")?;
        let axis = Attributes::new(node).int("axis").unwrap_or(-1);
        if axis != -1 && axis != rank - 1 {
            return Err("takes all dimensions from `axis` on together, not one of them");
        }
        set(node, int("axis", (rank - 1).max(0)));
        Ok(())
    }
}

/// Gives a node an attribute, in place of one of that name.
fn set(node: &mut NodeProto, attribute: AttributeProto) {
    node.attribute.retain(|a| a.name != attribute.name);
    node.attribute.push(attribute);
}

/// The small constants of integers that a body holds.
fn constants_of(body: &GraphProto) -> Constants {
    let folder: Arc<Path> = Arc::from(Path::new("."));
    let ints = |tensor: &TensorProto| {
        let stored = Stored::new(tensor.clone(), &folder);
        let is_small = tensor.data_location == 0 && stored.len() <= MAX_ELEMENTS;
        let tensor = is_small.then(|| stored.tensor().ok()).flatten()?;
        (!tensor.element().is_float()).then(|| tensor.to_i64())?
    };
    let stored = body.initializer.iter();
    let stored = stored.filter_map(|tensor| Some((tensor.name.clone(), ints(tensor)?)));
    let constants = body.node.iter();
    let constants = constants.filter(|node| node.op_type == "Constant" && is_standard(node));
    let constants = constants.filter_map(|node| {
        let a = Attributes::new(node);
        let value = match (a.tensor("value"), a.ints("value_ints"), a.int("value_int")) {
            (Some(tensor), ..) => ints(tensor)?,
            (None, Some(ints), _) => ints.to_vec(),
            (None, None, int) => vec![int?],
        };
        Some((node.output.first()?.clone(), value))
    });
    stored.chain(constants).collect()
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
    use crate::element::Element;
    use crate::proto::attribute_type;
    use crate::rewrite::trial::{Trial, line, value};
    use crate::tensor::Tensor;
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
        let inner = Trial::new(20).input("x", "2 3 4");
        let inner = inner.with("y = Softmax(x)", vec![int("axis", 1)]);
        let inner = lowered_to(&inner.output("y", "2 3 4"), 12).expect_err("one dimension");
        assert!(
            inner.contains("takes all dimensions from `axis` on together"),
            "{inner}"
        );
        assert!(lowered_to(&trial("y = Relu(x)"), 12).is_ok());
        let dynamic = Trial::new(18).input("x", "2 3 4");
        let dynamic = dynamic.input_of("axes", Element::I64, "1");
        let dynamic = dynamic.node("y = ReduceMean(x, axes)").output("y", "1 3 4");
        let dynamic = lowered_to(&dynamic, 13).expect_err("no constant");
        assert!(dynamic.contains("needs a constant `axes`"), "{dynamic}");
        // A caller may give another value than the one that is stored.
        let default = Trial::new(18).input("x", "2 3 4").ints("axes", &[1]);
        let default = default.input_of("axes", Element::I64, "1");
        let default = default.node("y = ReduceMean(x, axes)").output("y", "2 1 4");
        let model = default.model();
        let default = lower(&model.proto, &model.folder, 13).expect_err("a default");
        assert!(default.to_string().contains("needs a constant `axes`"));
    }

    #[test]
    fn defaults_that_moved_are_written_down() {
        // Before version 13 it is along axis 1 and all after it.
        let trial = Trial::new(20).input("x", "2 3 4").node("y = Softmax(x)");
        let made = lowered_to(&trial.output("y", "2 3 4"), 12).expect("the last dimension");
        let node = &made.graph.as_ref().expect("a graph").node[0];
        assert_eq!(Attributes::new(node).int("axis"), Some(2));
        // Operators without a meaning here cannot be verified.
        let written = |trial: Trial, to: i64| {
            let model = trial.model();
            let made = lower(&model.proto, &model.folder, to).expect("it is lowered");
            made.graph.expect("a graph").node.remove(0)
        };
        // Before version 20 it is along axis 1.
        let trial = Trial::new(20).input("x", "2 3 4 1").node("y = DFT(x)");
        let node = written(trial.output("y", "2 3 4 2"), 17);
        assert_eq!(Attributes::new(&node).int("axis"), Some(-2));
        let trial = Trial::new(20).input("x", "1 1 3 3").input("g", "1 2 2 2");
        let trial = trial.with("y = GridSample(x, g)", vec![text("mode", "cubic")]);
        let node = written(trial.output("y", "1 1 2 2"), 16);
        assert_eq!(Attributes::new(&node).text("mode"), Some("bicubic"));
        let trial = Trial::new(20).input("x", "2 3").ints("p", &[0, 1, 0, 0]);
        let trial = trial.with("y = Pad(x, p)", vec![text("mode", "wrap")]);
        let wraps = lowered_to(&trial.output("y", "2 4"), 18).expect_err("a newer mode");
        assert!(wraps.contains("at the other end"), "{wraps}");
    }

    #[test]
    fn attributes_that_ask_for_nothing_are_left_out() {
        let reshaped = |sizes: &[i64]| {
            let trial = Trial::new(20).input("x", "2 6").ints("s", sizes);
            let trial = trial.with("r = Reshape(x, s)", vec![int("allowzero", 1)]);
            let cast = vec![int("to", 1), int("saturate", 1)];
            trial.with("y = Cast(r)", cast).output("y", "3 4")
        };
        assert!(lowered_to(&reshaped(&[3, 4]), 13).is_ok());
        let model = reshaped(&[0, 4]).model();
        let zero = lower(&model.proto, &model.folder, 13).expect_err("a size of 0");
        assert!(zero.to_string().contains("has no attribute `allowzero`"));
    }

    #[test]
    fn constants_of_bodies_become_attributes_too() {
        let body = |op: &str, sizes: &str| {
            let mut node = vec![line(&format!("{op}_y = {op}(x, axes)"), Vec::new())];
            let mut initializer = vec![Tensor::ints(&[1]).to_proto("axes")];
            if op == "ReduceMax" {
                let constant = line("axes = Constant()", vec![ints("value_ints", &[1])]);
                node.insert(0, constant);
                initializer.clear();
            }
            GraphProto {
                name: op.to_string(),
                node,
                initializer,
                output: vec![value(&format!("{op}_y"), Element::F32, sizes)],
                ..Default::default()
            }
        };
        let branch = |name: &str, op: &str| AttributeProto {
            name: name.to_string(),
            r#type: attribute_type::GRAPH,
            g: Some(body(op, "2 1 4")),
            ..Default::default()
        };
        let branches = vec![
            branch("then_branch", "ReduceMean"),
            branch("else_branch", "ReduceMax"),
        ];
        let trial = Trial::new(18).input_of("c", Element::Bool, "");
        let trial = trial.input("x", "2 3 4").with("y = If(c)", branches);
        let made = lowered_to(&trial.output("y", "2 1 4"), 13).expect("constants");
        let node = &made.graph.as_ref().expect("a graph").node[0];
        for body in crate::attributes::bodies(node) {
            let last = body.node.last().expect("a node");
            assert_eq!(Attributes::new(last).ints("axes"), Some(&[1][..]));
        }
    }
}
