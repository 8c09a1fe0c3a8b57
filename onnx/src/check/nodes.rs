//! Whether a node has the form the standard gives its operator: one that the version has, with as many
//! inputs and outputs and the attributes it takes.
//!
//! Never looks at values; their types are in `types.rs`.

use super::plain;
use super::schemas::{self, Many, Port, Schema, counts};
use crate::attributes::bodies;
use crate::evaluate::qualified;
use crate::infer::Opsets;
use crate::proto::{AttributeProto, GraphProto, NodeProto, attribute_type};
use std::ops::RangeInclusive;

/// Whether a node is a layer normalization in a version of the standard that has none yet. ONNX Runtime runs it in
/// every version, and its optimizer for transformers writes it into older files.
pub fn is_early(node: &NodeProto, opsets: &Opsets) -> bool {
    let versions = schemas::versions("", &node.op_type);
    let is_early = |first: &Schema| first.since > opsets.version("");
    let is_layer_norm = plain(&node.domain).is_empty() && node.op_type == "LayerNormalization";
    is_layer_norm && versions.first().is_some_and(is_early)
}

/// What the standard says of a node's operator; `None` if it says nothing. An error is what is wrong.
pub fn schema(node: &NodeProto, opsets: &Opsets) -> Result<Option<&'static Schema>, String> {
    let domain = plain(&node.domain);
    let version = opsets.version(&domain);
    if schemas::newest(&domain).is_none_or(|newest| version > newest) || node.op_type.is_empty() {
        return Ok(None);
    }
    let operator = qualified(node);
    let all = schemas::versions(&domain, &node.op_type);
    // An operator that no version of the standard has belongs to some runtime; a note reports it.
    let Some(first) = all.first() else {
        return Ok(None);
    };
    if is_early(node, opsets) {
        return Ok(None);
    }
    let Some(schema) = all.iter().rev().find(|s| s.since <= version) else {
        let since = first.since;
        return Err(format!(
            "version {version} has no operator `{operator}`, which came with version {since}"
        ));
    };
    match schema.is_deprecated {
        true => Err(format!(
            "version {version} has no operator `{operator}` any more; `onnx.version_converter` replaces it"
        )),
        false => Ok(Some(schema)),
    }
}

/// Every difference between a node and what the standard says of its operator.
pub fn differences(node: &NodeProto, schema: &Schema) -> Vec<String> {
    let mut found = Vec::new();
    found.extend(ports(&node.input, &schema.inputs, ("input", "takes")));
    found.extend(ports(&node.output, &schema.outputs, ("output", "gives")));
    for attribute in &node.attribute {
        found.extend(attribute_problem(node, attribute, schema));
    }
    for (name, _) in schema.attributes.iter().filter(|(_, a)| a.is_required) {
        if node.attribute.iter().all(|a| a.name != *name) {
            found.push(format!("its attribute `{name}` is missing"));
        }
    }
    if node.op_type == "Constant" && node.attribute.len() != 1 {
        let n = node.attribute.len();
        found.push(format!(
            "it has {n} attributes for its value, but must have one"
        ));
    }
    found.extend(body_problem(node, schema));
    found
}

/// What is wrong with the number of values that go into a node's bodies and come out.
fn body_problem(node: &NodeProto, schema: &Schema) -> Option<String> {
    let (inputs, outputs) = match node.op_type.as_str() {
        "If" => (0, node.output.len()),
        "Loop" => (node.input.len().max(2), node.output.len() + 1),
        // In the first version of Scan, an input of lengths comes before those that the body takes.
        "Scan" if schema.since == 8 => (node.input.len().saturating_sub(1), node.output.len()),
        "Scan" => (node.input.len(), node.output.len()),
        _ => return None,
    };
    let wrong = |body: &&GraphProto| (body.input.len(), body.output.len()) != (inputs, outputs);
    let body = bodies(node).find(wrong)?;
    Some(format!(
        "its body takes {} values and gives {}, and is to take {inputs} and give {outputs}",
        body.input.len(),
        body.output.len(),
    ))
}

/// What is wrong with the number of inputs or outputs. Those left out at the end are not counted.
fn ports(names: &[String], ports: &[Port], (what, takes): (&str, &str)) -> Option<String> {
    let n = names.iter().rposition(|name| !name.is_empty());
    let n = n.map_or(0, |last| last + 1);
    let allowed = counts(ports);
    if !allowed.contains(&n) {
        let s = if n == 1 { "" } else { "s" };
        return Some(format!(
            "it has {n} {what}{s}, and {takes} {}",
            text_of(&allowed)
        ));
    }
    let absent = |(name, port): &(&String, &Port)| name.is_empty() && port.many == Many::One;
    let (_, port) = names.iter().zip(ports).find(absent)?;
    Some(format!("its {what} `{}` is missing", port.name))
}

fn text_of(allowed: &RangeInclusive<usize>) -> String {
    match (*allowed.start(), *allowed.end()) {
        (0, 0) => "none".to_string(),
        (least, usize::MAX) => format!("at least {least}"),
        (least, most) if least == most => least.to_string(),
        (least, most) => format!("{least} to {most}"),
    }
}

fn attribute_problem(
    node: &NodeProto,
    attribute: &AttributeProto,
    schema: &Schema,
) -> Option<String> {
    let name = &attribute.name;
    let Some(expected) = schema.attributes.get(name.as_str()) else {
        // Attributes of such names belong to a runtime.
        let may_be = schema.is_open || name.starts_with("__");
        return (!may_be).then(|| format!("`{}` has no attribute `{name}`", node.op_type));
    };
    // In a file without types, the value that is given tells the type.
    let stated = kind(attribute.r#type).into_iter();
    let is_reference = !attribute.ref_attr_name.is_empty();
    let mut given = stated.chain(held(attribute).filter(|_| !is_reference));
    let wrong = given.find(|kind| *kind != expected.kind)?;
    Some(format!(
        "its attribute `{name}` is {}, and is to be {}",
        spoken(wrong),
        spoken(expected.kind)
    ))
}

/// A type of attributes as the table names it; `None` if it is not stated.
fn kind(number: i32) -> Option<&'static str> {
    Some(match number {
        0 => return None,
        attribute_type::FLOAT => "float",
        attribute_type::INT => "int",
        attribute_type::STRING => "string",
        attribute_type::TENSOR => "tensor",
        attribute_type::GRAPH => "graph",
        attribute_type::FLOATS => "floats",
        attribute_type::INTS => "ints",
        attribute_type::STRINGS => "strings",
        9 => "tensors",
        10 => "graphs",
        11 => "sparse_tensor",
        12 => "sparse_tensors",
        13 => "type_proto",
        14 => "type_protos",
        _ => "of an unknown type",
    })
}

/// The types of the values in an attribute. An empty list or a default that was not written cannot be seen.
fn held(attribute: &AttributeProto) -> impl Iterator<Item = &'static str> {
    let a = attribute;
    let fields = [
        (a.f.is_some(), "float"),
        (a.i.is_some(), "int"),
        (a.s.is_some(), "string"),
        (a.t.is_some(), "tensor"),
        (a.g.is_some(), "graph"),
        (!a.floats.is_empty(), "floats"),
        (!a.ints.is_empty(), "ints"),
        (!a.strings.is_empty(), "strings"),
        (!a.tensors.is_empty(), "tensors"),
        (!a.graphs.is_empty(), "graphs"),
        (a.sparse_tensor.is_some(), "sparse_tensor"),
        (!a.sparse_tensors.is_empty(), "sparse_tensors"),
        (a.tp.is_some(), "type_proto"),
        (!a.type_protos.is_empty(), "type_protos"),
    ];
    fields
        .into_iter()
        .filter(|(is_there, _)| *is_there)
        .map(|(_, kind)| kind)
}

/// A type of attributes in a sentence.
fn spoken(kind: &str) -> &str {
    match kind {
        "float" => "a real number",
        "int" => "an integer",
        "string" => "a string",
        "tensor" => "a tensor",
        "graph" => "a body",
        "floats" => "real numbers",
        "ints" => "integers",
        "graphs" => "bodies",
        "sparse_tensor" => "a sparse tensor",
        "sparse_tensors" => "sparse tensors",
        "type_proto" => "a type",
        "type_protos" => "types",
        other => other,
    }
}
