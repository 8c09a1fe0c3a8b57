//! Functions local to a model: their nodes as one call sees them.

use crate::attributes::bodies_mut;
use crate::proto::{AttributeProto, FunctionProto, GraphProto, NodeProto};
use std::collections::BTreeMap;

/// The function that a node calls.
pub fn called<'m>(functions: &'m [FunctionProto], node: &NodeProto) -> Option<&'m FunctionProto> {
    let same = |f: &&FunctionProto| {
        f.name == node.op_type && f.domain == node.domain && f.overload == node.overload
    };
    functions.iter().find(same)
}

/// The nodes of a function with the attributes of a call in place, and the call's absent inputs absent.
pub fn specialized(function: &FunctionProto, call: &NodeProto) -> Vec<NodeProto> {
    let mut given: BTreeMap<&str, &AttributeProto> = function
        .attribute_proto
        .iter()
        .map(|a| (a.name.as_str(), a))
        .collect();
    given.extend(call.attribute.iter().map(|a| (a.name.as_str(), a)));
    let absent: Vec<&str> = function
        .input
        .iter()
        .enumerate()
        .filter(|(n, _)| call.input.get(*n).is_none_or(String::is_empty))
        .map(|(_, name)| name.as_str())
        .collect();
    let mut nodes = function.node.clone();
    for node in &mut nodes {
        specialize(node, &given, &absent);
    }
    nodes
}

fn specialize(node: &mut NodeProto, given: &BTreeMap<&str, &AttributeProto>, absent: &[&str]) {
    for input in &mut node.input {
        if absent.contains(&input.as_str()) {
            input.clear();
        }
    }
    let attributes = std::mem::take(&mut node.attribute);
    for attribute in attributes {
        if attribute.ref_attr_name.is_empty() {
            node.attribute.push(attribute);
        } else if let Some(value) = given.get(attribute.ref_attr_name.as_str()) {
            let name = attribute.name;
            node.attribute.push(AttributeProto {
                name,
                ..(*value).clone()
            });
        }
    }
    for body in bodies_mut(node) {
        specialize_body(body, given, absent);
    }
}

fn specialize_body(
    body: &mut GraphProto,
    given: &BTreeMap<&str, &AttributeProto>,
    absent: &[&str],
) {
    for node in &mut body.node {
        specialize(node, given, absent);
    }
}
