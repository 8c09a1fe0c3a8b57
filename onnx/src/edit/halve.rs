//! A model that computes in 16-bit floats.
//!
//! Before → after: `y = MatMul(x, w)` in f32 → `h = Cast(x); k = MatMul(h, w16); y = Cast(k)`. Inputs and outputs of
//! the model keep their types. A node stays in f32 if the standard's version of it takes no such floats, if it has
//! bodies, if it draws at random, if it is not evaluated here, if the type of a result does not follow from its inputs,
//! if the type of a value is not known, if it reads or gives a constant beyond the largest 16-bit float, or if the
//! caller says so. How far results move is measured by verification, not here.

use super::{names, version};
use crate::attributes::{bodies, is_standard};
use crate::check::schemas::{Port, Schema, Type, port, versions};
use crate::element::Element;
use crate::evaluate::captured;
use crate::fact::Fact;
use crate::infer::{Facts, is_random, known_values};
use crate::near;
use crate::operators::{self, Unknowns};
use crate::proto::{GraphProto, ModelProto, NodeProto};
use crate::rewrite::patch::int;
use crate::stored::Stored;
use crate::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// Operators that always stay in f32: sums of many terms and of large ones.
pub const ALWAYS_KEPT: [&str; 3] = ["ReduceSumSquare", "ReduceL2", "CumSum"];

/// Why a model stays in f32.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HalveError {
    /// The nodes of functions are not looked into.
    #[error(
        "the file has functions of its own, which are not converted to half precision; inline them first"
    )]
    Functions,
    /// A name of `keep` that nothing has.
    #[error("the file has no operator and no node `{name}` that could stay in f32{near}")]
    Unknown {
        /// What was given.
        name: String,
        /// Names like it, as the end of a sentence.
        near: String,
    },
}

/// A model that computes in 16-bit floats.
#[derive(Clone, Debug)]
pub struct Halved {
    /// The model.
    pub model: ModelProto,
    /// Nodes that compute in 16-bit floats now.
    pub n_halved: usize,
    /// Nodes with f32 that stay, by operator.
    pub kept: BTreeMap<String, usize>,
}

/// The model with f32 replaced by `half` (f16 or bf16), but for nodes whose operator or name is in `keep` or
/// [`ALWAYS_KEPT`].
///
/// # Errors
/// See [`HalveError`].
pub fn halve(
    model: &ModelProto,
    folder: &Arc<Path>,
    half: Element,
    keep: &BTreeSet<String>,
) -> Result<Halved, HalveError> {
    if !model.functions.is_empty() {
        return Err(HalveError::Functions);
    }
    all_there(model, keep)?;
    let mut model = model.clone();
    let facts = known_values(&model, folder, &Unknowns::default());
    let opset = version(&model);
    let mut made = Halved {
        model: ModelProto::default(),
        n_halved: 0,
        kept: BTreeMap::new(),
    };
    if let Some(graph) = &mut model.graph {
        let mut taken = BTreeSet::new();
        names(graph, &mut taken);
        let mut halving = Halving {
            half,
            facts: &facts,
            taken,
            halves: BTreeMap::new(),
            too_large: BTreeSet::new(),
            nodes: Vec::new(),
        };
        halving.weights(graph, folder);
        for node in std::mem::take(&mut graph.node) {
            let is_kept = ALWAYS_KEPT.contains(&node.op_type.as_str())
                || keep.contains(&node.op_type)
                || keep.contains(&node.name);
            let ports = halving.ports(&node, opset).filter(|_| !is_kept);
            match ports {
                Some(ports) => {
                    made.n_halved += 1;
                    halving.halved(node, &ports);
                }
                None => {
                    if halving.has_floats(&node) {
                        *made.kept.entry(node.op_type.clone()).or_default() += 1;
                    }
                    halving.nodes.push(node);
                }
            }
        }
        graph.node = halving.nodes;
        unread_goes(graph);
        // Types of inner values have changed. Those from operators that are not evaluated here stay, and nothing else
        // says their sizes.
        let kept = graph.node.iter().filter(|n| operators::find(n).is_none());
        let kept: BTreeSet<&String> = kept.flat_map(|node| &node.output).collect();
        graph.value_info.retain(|info| kept.contains(&info.name));
    }
    made.model = model;
    Ok(made)
}

/// Whether every name is that of an operator or a node of the file.
fn all_there(model: &ModelProto, keep: &BTreeSet<String>) -> Result<(), HalveError> {
    let nodes = || model.graph.iter().flat_map(|graph| &graph.node);
    let known: BTreeSet<&str> = nodes()
        .flat_map(|node| [node.op_type.as_str(), node.name.as_str()])
        .filter(|name| !name.is_empty())
        .collect();
    match keep.iter().find(|name| !known.contains(name.as_str())) {
        None => Ok(()),
        Some(name) => Err(HalveError::Unknown {
            name: name.clone(),
            near: near::suggestion(name, known),
        }),
    }
}

/// Which inputs and outputs of a node are in 16-bit floats.
struct Ports {
    inputs: Vec<bool>,
    outputs: Vec<bool>,
}

struct Halving<'a> {
    half: Element,
    facts: &'a Facts,
    taken: BTreeSet<String>,
    /// Values that exist in 16-bit floats too, by name.
    halves: BTreeMap<String, String>,
    /// Stored values that do not fit them.
    too_large: BTreeSet<String>,
    nodes: Vec<NodeProto>,
}

impl Halving<'_> {
    fn element(&self, name: &str) -> Option<Element> {
        self.facts.get(name)?.element
    }

    fn has_floats(&self, node: &NodeProto) -> bool {
        let mut all = node.input.iter().chain(&node.output);
        all.any(|name| self.element(name) == Some(Element::F32))
    }

    /// Which values of a node may be halved; `None` if it stays as it is.
    fn ports(&self, node: &NodeProto, opset: i64) -> Option<Ports> {
        let asks_for_a_type = ["to", "dtype", "output_dtype", "value", "value_float"];
        let mut attributes = node.attribute.iter().map(|a| a.name.as_str());
        let stays = !is_standard(node)
            || bodies(node).next().is_some()
            || is_random(node)
            // Verification compares what such a node reads with the original, types too.
            || operators::find(node).is_none()
            || attributes.any(|name| asks_for_a_type.contains(&name))
            || node.input.iter().any(|name| self.is_too_large(name))
            || node.output.iter().any(|name| self.is_too_large(name));
        if stays {
            return None;
        }
        let schema = versions("", &node.op_type).iter().rev();
        let schema: &'static Schema = schema
            .into_iter()
            .find(|s| s.since <= opset && !s.is_deprecated)?;
        // A type variable that allows f32 but not the half keeps the node as it is.
        let takes = |element: &Type| Some(schema.allowed(element)?.contains(&self.half));
        let floats = |names: &[String], ports: &[Port]| -> Option<Vec<bool>> {
            let halved = |(at, name): (usize, &String)| match self.element(name) {
                _ if name.is_empty() => Some(false),
                Some(Element::F32) => match &port(ports, at)?.element {
                    Type::One(_) => Some(false),
                    element => takes(element)?.then_some(true),
                },
                Some(_) => Some(false),
                // It may be a float, unless the standard says that it is something else.
                None => matches!(port(ports, at)?.element, Type::One(_)).then_some(false),
            };
            names.iter().enumerate().map(halved).collect()
        };
        let ports = Ports {
            inputs: floats(&node.input, &schema.inputs)?,
            outputs: floats(&node.output, &schema.outputs)?,
        };
        let follows = types_follow(schema, &ports) || node.op_type == "DequantizeLinear";
        let mut all = ports.outputs.iter().chain(&ports.inputs);
        (follows && all.any(|half| *half)).then_some(ports)
    }

    /// Whether a value is a constant with elements beyond the largest 16-bit float.
    fn is_too_large(&self, name: &str) -> bool {
        if self.too_large.contains(name) {
            return true;
        }
        if self.halves.contains_key(name) || self.element(name) != Some(Element::F32) {
            return false;
        }
        let constant = self.facts.get(name).and_then(Fact::tensor);
        constant.is_some_and(|tensor| self.tensor(&tensor).is_none())
    }

    /// Stored values, in 16-bit floats where they fit.
    fn weights(&mut self, graph: &mut GraphProto, folder: &Arc<Path>) {
        let ports: BTreeSet<&str> = graph.input.iter().map(|port| port.name.as_str()).collect();
        let mut made = Vec::new();
        for tensor in &graph.initializer {
            let stored = Stored::new(tensor.clone(), folder);
            // What a caller may replace is cast like an input.
            if stored.element() != Some(Element::F32) || ports.contains(tensor.name.as_str()) {
                continue;
            }
            let Some(half) = stored.tensor().ok().and_then(|t| self.tensor(&t)) else {
                self.too_large.insert(tensor.name.clone());
                continue;
            };
            let name = self.fresh(&tensor.name);
            made.push(half.to_proto(&name));
            self.halves.insert(tensor.name.clone(), name);
        }
        graph.initializer.append(&mut made);
    }

    /// A tensor in 16-bit floats; `None` if a finite element becomes infinite.
    fn tensor(&self, tensor: &Tensor) -> Option<Tensor> {
        let values = tensor.to_f64()?;
        let half = Tensor::floats(self.half, &tensor.shape, &values)?;
        let rounded = half.to_f64()?;
        let fits = values
            .iter()
            .zip(&rounded)
            .all(|(a, b)| a.is_finite() == b.is_finite());
        fits.then_some(half)
    }

    fn cast(&mut self, from: &str, to: &str, element: Element) {
        self.nodes.push(NodeProto {
            op_type: "Cast".to_string(),
            input: vec![from.to_string()],
            output: vec![to.to_string()],
            attribute: vec![int("to", i64::from(element.number()))],
            ..Default::default()
        });
    }

    fn halved(&mut self, mut node: NodeProto, ports: &Ports) {
        for (name, half) in node.input.iter_mut().zip(&ports.inputs) {
            if !half {
                continue;
            }
            if !self.halves.contains_key(name) {
                let made = self.fresh(name);
                self.cast(name, &made, self.half);
                self.halves.insert(name.clone(), made);
            }
            *name = self.halves[name.as_str()].clone();
        }
        let mut whole = Vec::new();
        for (name, half) in node.output.iter_mut().zip(&ports.outputs) {
            if *half {
                let made = self.fresh(name);
                whole.push((made.clone(), name.clone()));
                self.halves.insert(name.clone(), made.clone());
                *name = made;
            }
        }
        self.nodes.push(node);
        for (half, whole) in whole {
            self.cast(&half, &whole, Element::F32);
        }
    }

    /// A name like `base` that nothing has.
    fn fresh(&mut self, base: &str) -> String {
        let mut n = 0;
        loop {
            let name = match n {
                0 => format!("{base}_16"),
                n => format!("{base}_16_{n}"),
            };
            if self.taken.insert(name.clone()) {
                return name;
            }
            n += 1;
        }
    }
}

/// Whether every halved output has the type variable of a halved input. If not, an attribute or its default decides
/// the type, as for ConstantOfShape, windows, or the statistics of LayerNormalization. (DequantizeLinear without such
/// an attribute gives the type of its scale, though its variables differ.)
fn types_follow(schema: &'static Schema, ports: &Ports) -> bool {
    let variables = |halved: &[bool], of: &'static [Port]| -> BTreeSet<&'static str> {
        let halved = halved.iter().enumerate().filter(|(_, half)| **half);
        let elements = halved.filter_map(|(at, _)| Some(&port(of, at)?.element));
        elements
            .filter_map(|element| match element {
                Type::Variable(name) => Some(*name),
                _ => None,
            })
            .collect()
    };
    let given = variables(&ports.inputs, &schema.inputs);
    variables(&ports.outputs, &schema.outputs).is_subset(&given)
}

/// Removes casts and stored values that nothing reads.
fn unread_goes(graph: &mut GraphProto) {
    let mut read: BTreeSet<String> = graph.output.iter().map(|o| o.name.clone()).collect();
    let mut nodes: Vec<NodeProto> = Vec::new();
    for node in std::mem::take(&mut graph.node).into_iter().rev() {
        if node.op_type == "Cast"
            && is_standard(&node)
            && !node.output.iter().any(|o| read.contains(o))
        {
            continue;
        }
        read.extend(node.input.iter().cloned());
        for body in bodies(&node) {
            read.extend(captured(body).into_iter().map(str::to_string));
        }
        nodes.push(node);
    }
    nodes.reverse();
    graph.node = nodes;
    let ports: BTreeSet<String> = graph.input.iter().map(|port| port.name.clone()).collect();
    let is_read = |name: &String| read.contains(name) || ports.contains(name);
    graph.initializer.retain(|tensor| is_read(&tensor.name));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{AttributeProto, attribute_type};
    use crate::rewrite::trial::{Trial, line, reals, value};
    use crate::tensor::Values;
    use crate::verify::{Checker, Options};

    fn network() -> Trial {
        let trial = Trial::new(17)
            .input("x", "n 8")
            .constant("w", reals(&[8, 8]));
        let trial = trial.node("a = MatMul(x, w)").node("b = Relu(a)");
        trial.node("y = Softmax(b)").output("y", "n 8")
    }

    fn halved(trial: &Trial, half: Element, keep: &[&str]) -> Halved {
        let model = trial.model();
        let keep = keep.iter().map(|op| op.to_string()).collect();
        halve(&model.proto, &model.folder, half, &keep).expect("no functions")
    }

    fn operators(halved: &Halved) -> Vec<String> {
        let nodes = &halved.model.graph.as_ref().expect("a graph").node;
        nodes.iter().map(|node| node.op_type.clone()).collect()
    }

    #[test]
    fn nodes_between_the_ends_compute_in_16_bits_with_a_measured_error() {
        for (half, least, most) in [(Element::F16, 1e-6, 1e-2), (Element::BF16, 1e-5, 1e-1)] {
            let trial = network();
            let made = halved(&trial, half, &[]);
            assert_eq!(
                operators(&made),
                ["Cast", "MatMul", "Relu", "Softmax", "Cast"]
            );
            assert_eq!((made.n_halved, made.kept.len()), (3, 0));
            let model = trial.model();
            let allowed = |tolerance| Options {
                tolerance,
                ..Options::default()
            };
            let check = |tolerance| {
                let options = allowed(tolerance);
                let checker = Checker::new(&model, &options).expect("it runs");
                checker.check_other(&model.with(made.model.clone()))
            };
            let (_, error) = check(most)
                .expect("close enough")
                .worst()
                .expect("an output");
            assert!(error > least && error < most, "{half:?}: {error}");
            assert!(check(1e-7).is_err());
        }
    }

    #[test]
    fn kept_operators_and_large_weights_stay() {
        let made = halved(&network(), Element::F16, &["Softmax"]);
        assert_eq!(
            operators(&made),
            ["Cast", "MatMul", "Relu", "Cast", "Softmax"]
        );
        assert_eq!(made.kept["Softmax"], 1);
        let large = Tensor::new(&[1], Values::F32(vec![1e6]));
        let trial = Trial::new(17).input("x", "n").constant("c", large);
        let made = halved(
            &trial.node("y = Mul(x, c)").output("y", "n"),
            Element::F16,
            &[],
        );
        assert_eq!(operators(&made), ["Mul"]);
        assert_eq!((made.n_halved, made.kept["Mul"]), (0, 1));
    }

    #[test]
    fn a_large_constant_inside_stays() {
        let value = crate::rewrite::patch::float("value_float", 1e6);
        let trial = Trial::new(17).input("x", "n");
        let trial = trial.with("c = Constant()", vec![value]);
        let trial = trial.node("y = Div(x, c)").output("y", "n");
        assert_eq!(
            operators(&halved(&trial, Element::F16, &[])),
            ["Constant", "Div"]
        );
        let made = halved(&trial, Element::BF16, &[]);
        assert_eq!(made.n_halved, 1, "{:?}", operators(&made));
    }

    /// Checks that the halved model gives what the original gives, within a twentieth; returns its operators.
    fn is_near(trial: &Trial, half: Element) -> Vec<String> {
        let made = halved(trial, half, &[]);
        let model = trial.model();
        let options = Options {
            tolerance: 5e-2,
            ..Options::default()
        };
        let checker = Checker::new(&model, &options).expect("it runs");
        let other = model.with(made.model.clone());
        let problems = crate::check::errors(&other);
        assert!(problems.is_empty(), "{problems:?}");
        checker.check_other(&other).expect("close enough");
        operators(&made)
    }

    #[test]
    fn results_whose_type_does_not_follow_from_inputs_stay() {
        // Without the attribute, the result is filled with f32.
        let trial = Trial::new(17).input("x", "2 4").node("s = Shape(x)");
        let trial = trial.node("z = ConstantOfShape(s)").node("a = Exp(x)");
        let trial = trial.node("y = Add(a, z)").output("y", "2 4");
        assert_eq!(
            is_near(&trial, Element::F16),
            [
                "Cast",
                "Shape",
                "ConstantOfShape",
                "Exp",
                "Cast",
                "Add",
                "Cast"
            ]
        );
        let window = Trial::new(17).input("x", "8").constant("n", Tensor::int(8));
        let window = window.node("w = HannWindow(n)").node("y = Mul(x, w)");
        let made = halved(&window.output("y", "8"), Element::F16, &[]);
        let mut nodes = made.model.graph.iter().flat_map(|graph| &graph.node);
        assert!(nodes.any(|node| node.op_type == "HannWindow" && node.output == ["w"]));
        // Its statistics are in f32 whatever it normalizes.
        let norm = Trial::new(17).input("x", "4 8").constant("s", reals(&[8]));
        let norm = norm.node("a, m = LayerNormalization(x, s)");
        let norm = norm.node("y = Add(a, m)").output("y", "4 8");
        let made = is_near(&norm, Element::BF16);
        assert_eq!(made[0], "LayerNormalization");
    }

    #[test]
    fn operators_that_are_not_evaluated_read_f32() {
        let trial = Trial::new(17).input("x", "2 4 4").node("e = Exp(x)");
        let trial = trial.node("d = Det(e)").node("y = Neg(d)").output("y", "2");
        assert_eq!(
            is_near(&trial, Element::F16),
            ["Cast", "Exp", "Cast", "Det", "Cast", "Neg", "Cast"]
        );
    }

    #[test]
    fn sizes_that_only_the_file_declares_stay() {
        let trial = Trial::new(17).input("x", "2 4 4").node("e = Exp(x)");
        let trial = trial.node("d = Det(e)").constant("w", reals(&[2, 3]));
        let mut model = trial.node("y = MatMul(d, w)").output("y", "3").model();
        let graph = model.proto.graph.as_mut().expect("a graph");
        graph.value_info.push(value("d", Element::F32, "2"));
        let made = halve(&model.proto, &model.folder, Element::F16, &BTreeSet::new());
        let options = Options {
            tolerance: 5e-2,
            ..Options::default()
        };
        let checker = Checker::new(&model, &options).expect("it runs");
        let other = model.with(made.expect("it is halved").model);
        checker.check_other(&other).expect("close enough");
    }

    #[test]
    fn bodies_read_what_stands_around_them_in_f32() {
        let body = |op: &str| crate::proto::GraphProto {
            name: op.to_string(),
            node: vec![line(&format!("{op}_y = {op}(a)"), Vec::new())],
            output: vec![value(&format!("{op}_y"), Element::F32, "n 8")],
            ..Default::default()
        };
        let branch = |name: &str, op: &str| AttributeProto {
            name: name.to_string(),
            r#type: attribute_type::GRAPH,
            g: Some(body(op)),
            ..Default::default()
        };
        let trial = Trial::new(17)
            .input_of("c", Element::Bool, "")
            .input("x", "n 8")
            .constant("w", reals(&[8, 8]));
        let trial = trial.node("a = MatMul(x, w)");
        let branches = vec![branch("then_branch", "Relu"), branch("else_branch", "Neg")];
        let trial = trial.with("b = If(c)", branches);
        let trial = trial.node("y = MatMul(b, w)").output("y", "n 8");
        let made = is_near(&trial, Element::F16);
        assert_eq!(
            made,
            ["Cast", "MatMul", "Cast", "If", "Cast", "MatMul", "Cast"]
        );
    }

    #[test]
    fn a_value_of_unknown_type_keeps_its_readers() {
        let trial = Trial::new(17).input("x", "n 4");
        let trial = trial.node("a = com.example.Own(x)").node("y = Add(a, x)");
        let made = halved(&trial.output("y", "n 4"), Element::F16, &[]);
        assert_eq!(operators(&made), ["Own", "Add"]);
    }

    #[test]
    fn names_that_nothing_has_and_functions_are_refused() {
        let model = network().model();
        let refused = |keep: &str| {
            let keep = BTreeSet::from([keep.to_string()]);
            let refused = halve(&model.proto, &model.folder, Element::F16, &keep);
            refused.expect_err("no such name").to_string()
        };
        assert_eq!(
            refused("Sofmax"),
            "the file has no operator and no node `Sofmax` that could stay in f32; did you mean Softmax?"
        );
        assert!(refused("").contains("no node ``"));
        let mut proto = model.proto.clone();
        proto.functions.push(crate::proto::FunctionProto::default());
        let functions = halve(&proto, &model.folder, Element::F16, &BTreeSet::new());
        assert_eq!(functions.err(), Some(HalveError::Functions));
    }
}
