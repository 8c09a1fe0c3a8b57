//! What is different between two files, as they stand: never runs anything.
//!
//! Nodes are matched by the first value they give, all else by name. A node's name, documentation and
//! metadata do not count as differences; its operator, inputs, outputs, attributes and bodies do.

use crate::evaluate::qualified;
use crate::file::Model;
use crate::proto::{
    AttributeProto, Dimension, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto,
};
use crate::stored;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Something that both files have under one name, and that is not the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Changed {
    /// The name.
    pub name: String,
    /// The value in the first file.
    pub before: String,
    /// The value in the second file.
    pub after: String,
}

/// Differences of one kind of thing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Changes {
    /// What only the second file has: name and description.
    pub added: Vec<(String, String)>,
    /// What only the first file has.
    pub removed: Vec<(String, String)>,
    /// What differs.
    pub changed: Vec<Changed>,
}

impl Changes {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.changed.is_empty()
    }

    fn between(before: &[(String, String)], after: &[(String, String)]) -> Changes {
        fn index(list: &[(String, String)]) -> BTreeMap<&str, &str> {
            let pairs = list.iter().map(|(k, v)| (k.as_str(), v.as_str()));
            pairs.collect()
        }
        let (in_a, in_b) = (index(before), index(after));
        let only = |list: &[(String, String)], other: &BTreeMap<&str, &str>| {
            let missing = |(name, _): &&(String, String)| !other.contains_key(name.as_str());
            list.iter().filter(missing).cloned().collect()
        };
        let changed = before.iter().filter_map(|(name, before)| {
            let after = in_b.get(name.as_str()).filter(|after| *after != before)?;
            Some(Changed {
                name: name.clone(),
                before: before.clone(),
                after: after.to_string(),
            })
        });
        Changes {
            added: only(after, &in_a),
            removed: only(before, &in_b),
            changed: changed.collect(),
        }
    }
}

/// How often an operator is applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OperatorCount {
    /// The operator with its domain.
    pub operator: String,
    /// Nodes in the first file.
    pub before: usize,
    /// Nodes in the second.
    pub after: usize,
}

/// Differences between two files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Diff {
    /// Versions, producer, documentation.
    pub file: Changes,
    /// Metadata.
    pub metadata: Changes,
    /// Inputs, with type and sizes.
    pub inputs: Changes,
    /// Outputs.
    pub outputs: Changes,
    /// Initializers.
    pub initializers: Changes,
    /// Nodes of the graph, by the first value they give.
    pub nodes: Changes,
    /// Functions of the model.
    pub functions: Changes,
    /// Operators whose number of nodes differs, bodies included.
    pub operators: Vec<OperatorCount>,
    /// Bytes of the first file, without external data.
    pub bytes_before: usize,
    /// Bytes of the second.
    pub bytes_after: usize,
    /// Whether inputs, outputs, initializers or nodes come in another order.
    pub is_reordered: bool,
}

impl Diff {
    /// Every kind with its title.
    pub fn kinds(&self) -> [(&'static str, &Changes); 7] {
        [
            ("file", &self.file),
            ("metadata", &self.metadata),
            ("inputs", &self.inputs),
            ("outputs", &self.outputs),
            ("initializers", &self.initializers),
            ("nodes", &self.nodes),
            ("functions", &self.functions),
        ]
    }

    /// Whether there is no difference.
    pub fn is_empty(&self) -> bool {
        self.kinds().iter().all(|(_, changes)| changes.is_empty()) && !self.is_reordered
    }
}

/// Compares two files.
pub fn diff(a: &Model, b: &Model) -> Diff {
    let empty = GraphProto::default();
    let graph_a = a.proto.graph.as_ref().unwrap_or(&empty);
    let graph_b = b.proto.graph.as_ref().unwrap_or(&empty);
    let ports = |list: &[ValueInfoProto]| -> Vec<_> {
        list.iter()
            .map(|i| (i.name.clone(), describe_port(i)))
            .collect()
    };
    let nodes = |graph: &GraphProto| -> Vec<_> { graph.node.iter().map(describe_node).collect() };
    let entries = |model: &ModelProto| -> Vec<_> {
        let entries = model.metadata_props.iter();
        entries.map(|e| (e.key.clone(), e.value.clone())).collect()
    };
    let functions =
        |model: &ModelProto| -> Vec<_> { model.functions.iter().map(function).collect() };
    let (before, after) = (initializers(graph_a), initializers(graph_b));
    let lists = [
        (ports(&graph_a.input), ports(&graph_b.input)),
        (ports(&graph_a.output), ports(&graph_b.output)),
        (before, after),
        (nodes(graph_a), nodes(graph_b)),
    ];
    let [inputs, outputs, tensors, made] = &lists;
    Diff {
        file: Changes::between(&file(&a.proto), &file(&b.proto)),
        metadata: Changes::between(&entries(&a.proto), &entries(&b.proto)),
        inputs: Changes::between(&inputs.0, &inputs.1),
        outputs: Changes::between(&outputs.0, &outputs.1),
        initializers: tensor_changes(a, b, &tensors.0, &tensors.1),
        nodes: Changes::between(&made.0, &made.1),
        functions: Changes::between(&functions(&a.proto), &functions(&b.proto)),
        operators: operators(&a.proto, &b.proto),
        bytes_before: a.n_bytes,
        bytes_after: b.n_bytes,
        is_reordered: lists.iter().any(|(a, b)| is_reordered(a, b)),
    }
}

/// Whether names of both lists come in another order.
fn is_reordered(a: &[(String, String)], b: &[(String, String)]) -> bool {
    let names = |list: &[(String, String)]| -> BTreeSet<String> {
        list.iter().map(|(name, _)| name.clone()).collect()
    };
    let both: BTreeSet<String> = names(a).intersection(&names(b)).cloned().collect();
    let shared = |list: &'_ [(String, String)]| -> Vec<String> {
        let names = list.iter().map(|(name, _)| name);
        names.filter(|name| both.contains(*name)).cloned().collect()
    };
    shared(a) != shared(b)
}

fn file(model: &ModelProto) -> Vec<(String, String)> {
    let mut facts = vec![
        (
            "format version".to_string(),
            model.ir_version.unwrap_or(0).to_string(),
        ),
        (
            "producer".to_string(),
            format!("{} {}", model.producer_name, model.producer_version),
        ),
        ("domain".to_string(), model.domain.clone()),
        ("model version".to_string(), model.model_version.to_string()),
        ("documentation".to_string(), model.doc_string.clone()),
    ];
    let set = |domain: &str| match domain {
        "" | "ai.onnx" => "operators".to_string(),
        domain => format!("operators of {domain}"),
    };
    let sets = model.opset_import.iter();
    facts.extend(sets.map(|o| (set(&o.domain), format!("version {}", o.version))));
    facts
}

/// Type and sizes of an input or output.
pub fn describe_port(info: &ValueInfoProto) -> String {
    let tensor = info.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
    let Some(tensor) = tensor else {
        return "no tensor".to_string();
    };
    let size = |d: &crate::proto::DimensionProto| match &d.value {
        Some(Dimension::DimValue(n)) => n.to_string(),
        Some(Dimension::DimParam(name)) if !name.is_empty() => name.clone(),
        _ => "?".to_string(),
    };
    let shape = match &tensor.shape {
        Some(shape) => shape.dim.iter().map(size).collect::<Vec<_>>().join(", "),
        None => "…".to_string(),
    };
    format!("{} [{shape}]", element(tensor.elem_type))
}

fn element(number: i32) -> String {
    match crate::element::Element::of_number(number) {
        Some(element) => element.to_string(),
        None => format!("type {number}"),
    }
}

fn describe_tensor(tensor: &TensorProto) -> String {
    let sizes: Vec<String> = tensor.dims.iter().map(ToString::to_string).collect();
    format!("{} [{}]", element(tensor.data_type), sizes.join(", "))
}

fn initializers(graph: &GraphProto) -> Vec<(String, String)> {
    let tensors = graph.initializer.iter();
    tensors
        .map(|t| (t.name.clone(), describe_tensor(t)))
        .collect()
}

/// Type, sizes and elements.
fn tensor_changes(
    a: &Model,
    b: &Model,
    before: &[(String, String)],
    after: &[(String, String)],
) -> Changes {
    let mut changes = Changes::between(before, after);
    fn index_tensors(model: &Model) -> BTreeMap<&str, &TensorProto> {
        let tensors = model.proto.graph.iter().flat_map(|g| &g.initializer);
        tensors.map(|t| (t.name.as_str(), t)).collect()
    }
    let (in_a, in_b) = (index_tensors(a), index_tensors(b));
    let index: BTreeMap<&str, &str> = after
        .iter()
        .map(|(n, d)| (n.as_str(), d.as_str()))
        .collect();
    for (name, described) in before {
        if index.get(name.as_str()) != Some(&described.as_str()) {
            continue;
        }
        let (Some(x), Some(y)) = (in_a.get(name.as_str()), in_b.get(name.as_str())) else {
            continue;
        };
        if !same_elements(x, &a.folder, y, &b.folder) {
            changes.changed.push(Changed {
                name: name.clone(),
                before: described.clone(),
                after: format!("{described} with other elements"),
            });
        }
    }
    changes
}

/// Whether two stored tensors hold the same, bit by bit.
pub(crate) fn same_elements(
    a: &TensorProto,
    folder_a: &Path,
    b: &TensorProto,
    folder_b: &Path,
) -> bool {
    if a.raw_data.is_some() && a.raw_data == b.raw_data {
        return true;
    }
    match (stored::decode(a, folder_a), stored::decode(b, folder_b)) {
        (Ok(a), Ok(b)) => a.same_bits(&b),
        // For types that nothing is computed with, compare the bytes.
        _ => a == b,
    }
}

/// Tells tensors apart that are too large to be shown: FNV-1a of the message.
fn checksum(tensor: &TensorProto) -> u32 {
    let bytes = prost::Message::encode_to_vec(tensor);
    let step = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
    bytes.iter().fold(0x811c_9dc5, step)
}

/// A node by the first value it gives, with everything that counts.
fn describe_node(node: &NodeProto) -> (String, String) {
    let name = node.output.iter().find(|o| !o.is_empty());
    let mut attributes: Vec<String> = node.attribute.iter().map(attribute).collect();
    attributes.sort();
    let mut text = format!("{}({})", qualified(node), node.input.join(", "));
    if !attributes.is_empty() {
        text.push_str(&format!(" {{{}}}", attributes.join(", ")));
    }
    if node.output.len() > 1 {
        text.push_str(&format!(" → {}", node.output.join(", ")));
    }
    (name.cloned().unwrap_or_default(), text)
}

fn attribute(attribute: &AttributeProto) -> String {
    format!("{} = {}", attribute.name, attribute_value(attribute))
}

/// What an attribute holds; a large tensor by its checksum.
pub(crate) fn attribute_value(attribute: &AttributeProto) -> String {
    let a = attribute;
    if let Some(i) = a.i {
        i.to_string()
    } else if let Some(f) = a.f {
        f.to_string()
    } else if let Some(s) = &a.s {
        String::from_utf8_lossy(s).into_owned()
    } else if let Some(t) = &a.t {
        match crate::tensor::Tensor::of_proto(t) {
            Ok(tensor) if tensor.len() <= 8 => match tensor.to_f64() {
                Some(values) => format!("{} {values:?}", describe_tensor(t)),
                None => describe_tensor(t),
            },
            _ => format!("{} #{:08x}", describe_tensor(t), checksum(t)),
        }
    } else if let Some(body) = &a.g {
        let nodes: Vec<String> = body.node.iter().map(|n| describe_node(n).1).collect();
        format!("[{}]", nodes.join("; "))
    } else if !a.ints.is_empty() {
        format!("{:?}", a.ints)
    } else if !a.floats.is_empty() {
        format!("{:?}", a.floats)
    } else if !a.strings.is_empty() {
        let text = |s: &bytes::Bytes| String::from_utf8_lossy(s).into_owned();
        format!("{:?}", a.strings.iter().map(text).collect::<Vec<_>>())
    } else if a.ref_attr_name.is_empty() {
        "[]".to_string()
    } else {
        format!("of the call: {}", a.ref_attr_name)
    }
}

fn function(function: &crate::proto::FunctionProto) -> (String, String) {
    let nodes: Vec<String> = function.node.iter().map(|n| describe_node(n).1).collect();
    (
        format!("{}.{}", function.domain, function.name),
        nodes.join("; "),
    )
}

/// Nodes per operator, in bodies and functions too.
pub fn histogram(model: &ModelProto) -> BTreeMap<String, usize> {
    fn visit(nodes: &[NodeProto], counts: &mut BTreeMap<String, usize>) {
        for node in nodes {
            *counts.entry(qualified(node)).or_default() += 1;
            for body in crate::attributes::bodies(node) {
                visit(&body.node, counts);
            }
        }
    }
    let mut counts = BTreeMap::new();
    if let Some(graph) = &model.graph {
        visit(&graph.node, &mut counts);
    }
    for function in &model.functions {
        visit(&function.node, &mut counts);
    }
    counts
}

fn operators(a: &ModelProto, b: &ModelProto) -> Vec<OperatorCount> {
    let (a, b) = (histogram(a), histogram(b));
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let count = |operator: &String| OperatorCount {
        operator: operator.clone(),
        before: a.get(operator).copied().unwrap_or(0),
        after: b.get(operator).copied().unwrap_or(0),
    };
    let counts = names.into_iter().map(count);
    counts.filter(|c| c.before != c.after).collect()
}
