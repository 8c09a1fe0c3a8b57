//! Where models are cut: nodes that have no meaning here.
//!
//! What such a node reads is compared, what it gives is made up. A value that cannot be made up, such as a
//! sequence, makes the nodes that read it cuts too. What cannot be read, such as an initializer of 4-bit
//! integers, is compared bit by bit. The node itself must be the same in both models.

use super::VerifyError;
use crate::attributes::{Attributes, bodies, bodies_mut, is_standard};
use crate::element::Element;
use crate::evaluate;
use crate::infer::{Functions, is_random};
use crate::operators;
use crate::proto::{GraphProto, ModelProto, NodeProto, TensorProto};
use crate::tensor::Tensor;
use prost::Message;
use std::collections::BTreeSet;

/// The cuts of a model.
pub struct Cuts<'m> {
    /// The nodes, in the model's order.
    pub nodes: Vec<&'m NodeProto>,
    /// Values that cannot be computed with: given by cuts, or stored.
    opaque: BTreeSet<&'m str>,
}

/// Values that are compared.
pub struct Compared {
    /// Names in the original, then in the rewritten model.
    pub pairs: Vec<(String, String)>,
    /// What cuts give under another name in the rewritten model: names as in `pairs`.
    pub renamed: Vec<(String, String)>,
}

impl<'m> Cuts<'m> {
    /// Where a model is to be cut.
    pub fn new(model: &'m ModelProto) -> Cuts<'m> {
        let mut cuts = Cuts {
            nodes: Vec::new(),
            opaque: BTreeSet::new(),
        };
        let Some(graph) = &model.graph else {
            return cuts;
        };
        let functions = Functions::new(&model.functions);
        let stored = graph
            .initializer
            .iter()
            .filter(|t| Element::of_number(t.data_type).is_none());
        cuts.opaque.extend(stored.map(|t| t.name.as_str()));
        let other = graph
            .input
            .iter()
            .filter(|i| !is_computed_with(graph, &i.name));
        cuts.opaque.extend(other.map(|i| i.name.as_str()));
        let needed = needed(graph);
        // Nodes stand after what they read, so one walk is enough.
        for (n, node) in graph.node.iter().enumerate() {
            if !needed.contains(&n) {
                continue;
            }
            let opaque = evaluate::reads(node)
                .into_iter()
                .any(|r| cuts.opaque.contains(r));
            let known = is_known(&functions, node) && !makes_no_tensor(node);
            let known = known && !may_drop(graph, node);
            if (known && !opaque) || node.output.is_empty() {
                continue;
            }
            cuts.nodes.push(node);
            let outputs = node.output.iter().filter(|o| !o.is_empty());
            cuts.opaque.extend(
                outputs
                    .map(String::as_str)
                    .filter(|o| makes_no_tensor(node) || !is_computed_with(graph, o)),
            );
        }
        cuts
    }

    /// Whether a cut gives other numbers in every run.
    pub fn draws(&self, node: &NodeProto) -> bool {
        is_random(node) || (node.op_type == "Dropout" && is_standard(node))
    }

    /// Values that depend on the cuts that `kind` chooses.
    pub fn after(
        &self,
        model: &'m ModelProto,
        kind: &dyn Fn(&NodeProto) -> bool,
    ) -> BTreeSet<&'m str> {
        let chosen = self.nodes.iter().filter(|node| kind(node));
        let mut found: BTreeSet<&str> = chosen
            .flat_map(|node| node.output.iter().map(String::as_str))
            .collect();
        found.remove("");
        for node in model.graph.iter().flat_map(|g| &g.node) {
            if evaluate::reads(node)
                .iter()
                .any(|name| found.contains(name))
            {
                let outputs = node.output.iter().filter(|o| !o.is_empty());
                found.extend(outputs.map(String::as_str));
            }
        }
        found
    }

    /// Outputs of the model that can be compared, then what cuts read.
    pub fn wanted(&self, model: &ModelProto) -> Vec<String> {
        let outputs = model
            .graph
            .iter()
            .flat_map(|g| &g.output)
            .map(|o| o.name.as_str());
        let read = self.nodes.iter().flat_map(|n| reads(n));
        let known = outputs
            .chain(read)
            .filter(|name| !self.opaque.contains(name));
        known.map(str::to_string).collect()
    }

    /// The first cut that another model computes under the same name by another node, with its position among the
    /// model's nodes.
    pub fn changed<'o>(
        &self,
        model: &'m GraphProto,
        other: &'o GraphProto,
    ) -> Option<(usize, &'m NodeProto, &'o NodeProto)> {
        self.nodes.iter().find_map(|cut| {
            let shares = |n: &&NodeProto| {
                let mut outputs = n.output.iter().filter(|o| !o.is_empty());
                outputs.any(|o| cut.output.contains(o))
            };
            let twin = other.node.iter().find(shares)?;
            let at = model.node.iter().position(|n| std::ptr::eq(n, *cut))?;
            let differs =
                anonymous(cut) != anonymous(twin) || reads(cut).len() != reads(twin).len();
            differs.then_some((at, *cut, twin))
        })
    }

    /// Whether nothing can be computed with a value.
    pub fn is_opaque(&self, name: &str) -> bool {
        self.opaque.contains(name)
    }

    /// What is compared with a rewritten model, in the order of [`Cuts::wanted`]. Outputs keep their
    /// names; what cuts read may have other ones.
    ///
    /// # Errors
    /// [`VerifyError::Changed`]: a cut is not the same node any more.
    pub fn counterparts(
        &self,
        model: &ModelProto,
        rewritten: &ModelProto,
    ) -> Result<Compared, VerifyError> {
        let (Some(before), Some(after)) = (&model.graph, &rewritten.graph) else {
            return Ok(Compared {
                pairs: Vec::new(),
                renamed: Vec::new(),
            });
        };
        let known = |name: &str| !self.opaque.contains(name);
        let outputs = before
            .output
            .iter()
            .map(|o| o.name.as_str())
            .filter(|o| known(o));
        let mut pairs: Vec<(String, String)> =
            outputs.map(|o| (o.to_string(), o.to_string())).collect();
        let mut renamed = Vec::new();
        let mut twins: Vec<&NodeProto> = Vec::new();
        for cut in &self.nodes {
            let changed = || VerifyError::Changed {
                node: evaluate::label(cut),
            };
            let twin = twin(cut, before, after).ok_or_else(changed)?;
            if twins.iter().any(|t| std::ptr::eq(*t, twin)) {
                return Err(changed());
            }
            twins.push(twin);
            let given = cut.output.iter().zip(&twin.output);
            let renamed_now = given.filter(|(a, b)| a != b);
            renamed.extend(renamed_now.map(|(a, b)| (a.clone(), b.clone())));
            let (old, new) = (reads(cut), reads(twin));
            if old.len() != new.len() || anonymous(cut) != anonymous(twin) {
                return Err(changed());
            }
            for (a, b) in old.into_iter().zip(new) {
                if known(a) {
                    pairs.push((a.to_string(), b.to_string()));
                } else if stored(before, a).map(content) != stored(after, b).map(content) {
                    return Err(changed());
                }
            }
        }
        Ok(Compared { pairs, renamed })
    }
}

/// Whether a node has a meaning here, with all that is in its bodies or in the function it calls. A function that is
/// too deep or too long to be followed has none.
pub fn is_known(functions: &Functions, node: &NodeProto) -> bool {
    match functions.index().position(node) {
        Some(n) => functions.is_followed(n) && functions.index().is_understood(n, has_meaning),
        None => {
            let mut inner = bodies(node).flat_map(|b| &b.node);
            has_meaning(node) && inner.all(|n| is_known(functions, n))
        }
    }
}

/// Whether a node that calls no function has a meaning here, apart from its bodies.
fn has_meaning(node: &NodeProto) -> bool {
    let training = match node.op_type.as_str() {
        "Dropout" => Attributes::new(node).int("is_test") == Some(0),
        // These are versions up to operator set 13 with further outputs, which only training needs.
        "BatchNormalization" => node.output.len() > 3,
        _ => false,
    };
    let known = operators::find(node).is_some() || evaluate::is_control(node);
    let is_refused = is_random(node) || is_foreign(node) || training && is_standard(node);
    known && !is_refused
}

/// Whether a dropout is asked to drop, or may be: its third input is not a stored `false`.
fn may_drop(graph: &GraphProto, node: &NodeProto) -> bool {
    let mode = node.input.get(2).filter(|name| !name.is_empty());
    let Some(mode) = mode.filter(|_| node.op_type == "Dropout" && is_standard(node)) else {
        return false;
    };
    let mut made = graph.node.iter().filter(|n| n.output.contains(mode));
    let constant = made.next().filter(|n| n.op_type == "Constant");
    let value = constant.and_then(|n| Attributes::new(n).tensor("value"));
    let value = value.or_else(|| stored(graph, mode));
    let value = value.and_then(|value| Tensor::of_proto(value).ok());
    value.and_then(|value| value.to_i64()) != Some(vec![0])
}

/// Whether a node gives elements of a type that is not computed with, such as 8-bit floats.
fn is_foreign(node: &NodeProto) -> bool {
    let a = Attributes::new(node);
    let types = ["to", "dtype", "output_dtype"].map(|name| a.int(name));
    let mut types = types.into_iter().flatten().filter(|n| *n != 0);
    let given = types.any(|n| i32::try_from(n).is_ok_and(|n| Element::of_number(n).is_none()));
    let stored = a.tensor("value").map(|t| t.data_type);
    given || stored.is_some_and(|n| Element::of_number(n).is_none())
}

/// Whether what a node gives cannot be made up as a tensor.
fn makes_no_tensor(node: &NodeProto) -> bool {
    is_sequence(node) || (is_foreign(node) && is_standard(node))
}

/// Positions of the nodes that outputs depend on.
pub(super) fn needed(graph: &GraphProto) -> BTreeSet<usize> {
    let mut names: BTreeSet<&str> = graph.output.iter().map(|o| o.name.as_str()).collect();
    let mut needed = BTreeSet::new();
    for (n, node) in graph.node.iter().enumerate().rev() {
        if node.output.iter().any(|o| names.contains(o.as_str())) {
            needed.insert(n);
            names.extend(evaluate::reads(node));
        }
    }
    needed
}

/// Whether a standard operator gives a sequence or an optional value.
fn is_sequence(node: &NodeProto) -> bool {
    let op = node.op_type.as_str();
    let makes = matches!(
        op,
        "SequenceConstruct"
            | "SequenceEmpty"
            | "SequenceErase"
            | "SequenceInsert"
            | "SequenceMap"
            | "SplitToSequence"
    );
    let is_absent = op == "Optional" && node.input.iter().all(String::is_empty);
    (makes || is_absent) && is_standard(node)
}

/// Whether a value is declared as a tensor of a type that is computed with, or not declared at all.
fn is_computed_with(graph: &GraphProto, name: &str) -> bool {
    let infos = graph
        .input
        .iter()
        .chain(&graph.output)
        .chain(&graph.value_info);
    let declared = infos
        .filter(|i| i.name == name)
        .filter_map(|i| i.r#type.as_ref())
        .next();
    declared.is_none_or(|t| match &t.tensor_type {
        Some(tensor) => tensor.elem_type == 0 || Element::of_number(tensor.elem_type).is_some(),
        None => {
            t.sequence_type.is_none()
                && t.map_type.is_none()
                && t.opaque_type.is_none()
                && t.sparse_tensor_type.is_none()
                && t.optional_type.is_none()
        }
    })
}

/// Names that a node and its bodies read, in the order in which they stand there.
fn reads(node: &NodeProto) -> Vec<&str> {
    let mut names: Vec<&str> = node
        .input
        .iter()
        .map(String::as_str)
        .filter(|i| !i.is_empty())
        .collect();
    for body in bodies(node) {
        let captured = evaluate::captured(body);
        let inner = body.node.iter().flat_map(reads);
        let outputs = body.output.iter().map(|o| o.name.as_str());
        names.extend(inner.chain(outputs).filter(|n| captured.contains(n)));
    }
    names
}

/// The node of another graph that computes what a cut computes: under the same name, or else, where
/// a rewrite gave its value to the reader's name, the only one called as the cut is.
fn twin<'o>(cut: &NodeProto, own: &GraphProto, other: &'o GraphProto) -> Option<&'o NodeProto> {
    let shares = |n: &&NodeProto| {
        let mut outputs = n.output.iter().filter(|o| !o.is_empty());
        outputs.any(|o| cut.output.contains(o))
    };
    let called = |n: &&NodeProto| !cut.name.is_empty() && n.name == cut.name;
    let only = |graph: &'o GraphProto| {
        let mut all = graph.node.iter().filter(called);
        all.next().filter(|_| all.next().is_none())
    };
    let is_only = own.node.iter().filter(called).count() == 1;
    let found = other.node.iter().find(shares);
    let found = found.or_else(|| only(other).filter(|_| is_only))?;
    let given = |n: &NodeProto| n.output.iter().map(String::is_empty).collect::<Vec<_>>();
    (given(found) == given(cut)).then_some(found)
}

/// A node without its own name, the names of its outputs, and the names that it reads from outside.
fn anonymous(node: &NodeProto) -> Vec<u8> {
    fn blank(node: &mut NodeProto, free: &dyn Fn(&str) -> bool) {
        for input in node.input.iter_mut().filter(|i| free(i)) {
            input.clear();
        }
        for body in bodies_mut(node) {
            let captured: BTreeSet<String> = evaluate::captured(body)
                .into_iter()
                .map(str::to_string)
                .collect();
            let outer = |name: &str| captured.contains(name) && free(name);
            for output in body.output.iter_mut().filter(|o| outer(&o.name)) {
                output.name.clear();
            }
            for inner in &mut body.node {
                blank(inner, &outer);
            }
        }
    }
    let mut node = node.clone();
    let given: Vec<bool> = node.input.iter().map(|i| !i.is_empty()).collect();
    blank(&mut node, &|_| true);
    node.name.clear();
    node.output.iter_mut().for_each(String::clear);
    // Which optional inputs are absent still counts.
    let mut bytes = node.encode_to_vec();
    bytes.extend(given.into_iter().map(u8::from));
    bytes
}

fn stored<'g>(graph: &'g GraphProto, name: &str) -> Option<&'g TensorProto> {
    graph.initializer.iter().find(|t| t.name == name)
}

/// A stored tensor without its name.
fn content(tensor: &TensorProto) -> TensorProto {
    TensorProto {
        name: String::new(),
        ..tensor.clone()
    }
}
