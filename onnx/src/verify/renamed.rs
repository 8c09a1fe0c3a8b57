//! What is not the same about two nodes, and which values have another name in another model.
//!
//! From the files alone: runs nothing.

use crate::diff::attribute_value;
use crate::evaluate::qualified;
use crate::proto::{AttributeProto, GraphProto, NodeProto};
use prost::Message;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Something that is not the same about two nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// `operator`, `attribute NAME`, or `input N`, counted from 0.
    pub what: String,
    /// What it is in the first model; `None` if it is not there.
    pub a: Option<String>,
    /// What it is in the second model.
    pub b: Option<String>,
}

/// Everything that is not the same about two nodes. Inputs that are only `renamed`, names in the second model by those
/// in the first, are the same.
pub(super) fn differences(
    a: &NodeProto,
    b: &NodeProto,
    renamed: &BTreeMap<String, String>,
) -> Vec<Difference> {
    let mut found = Vec::new();
    let mut note = |what: String, a: Option<String>, b: Option<String>| {
        if a != b {
            found.push(Difference { what, a, b });
        }
    };
    let operators = (qualified(a), qualified(b));
    note("operator".to_string(), Some(operators.0), Some(operators.1));
    let get = |node: &NodeProto, name: &str| -> Option<AttributeProto> {
        node.attribute.iter().find(|a| a.name == name).cloned()
    };
    let names = a.attribute.iter().chain(&b.attribute);
    let names: BTreeSet<&str> = names.map(|a| a.name.as_str()).collect();
    for name in names {
        let [a, b] = [get(a, name), get(b, name)].map(|a| a.map(|a| attribute_value(&a)));
        note(format!("attribute {name}"), a, b);
    }
    let get = |node: &NodeProto, n: usize| -> Option<String> {
        node.input.get(n).filter(|name| !name.is_empty()).cloned()
    };
    for n in 0..a.input.len().max(b.input.len()) {
        let (a, b) = (get(a, n), get(b, n));
        let both = a.as_ref().zip(b.as_ref());
        let is_renamed = both.is_some_and(|(a, b)| renamed.get(a) == Some(b));
        if !is_renamed {
            let [a, b] = [a, b].map(|name| name.map(|name| format!("`{name}`")));
            note(format!("input {n}"), a, b);
        }
    }
    found
}

/// Values that the same nodes compute from inputs and initializers of the same names, but under another name: the name
/// in the first model, which the second does not have, and the one in the second. In the order of the first.
pub(super) fn renamed(a: &GraphProto, b: &GraphProto) -> Vec<(String, String)> {
    let mut known = BTreeMap::new();
    let (in_a, in_b) = (numbered(a, &mut known), numbered(b, &mut known));
    fn names<'g>(values: &[(&'g str, usize)]) -> BTreeSet<&'g str> {
        values.iter().map(|(name, _)| *name).collect()
    }
    let (names_a, names_b) = (names(&in_a), names(&in_b));
    let mut others: BTreeMap<usize, &str> = BTreeMap::new();
    for (name, number) in &in_b {
        if !names_a.contains(name) {
            others.entry(*number).or_insert(*name);
        }
    }
    let own = in_a.iter().filter(|(name, _)| !names_b.contains(name));
    let pairs = own.filter_map(|(name, number)| {
        let other = others.get(number)?;
        Some((name.to_string(), other.to_string()))
    });
    pairs.collect()
}

/// A value: the node without its names, its operands by number, and which of its results.
type Made = (Vec<u8>, Vec<Operand>, usize);

/// An operand of a node.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Operand {
    /// An input or initializer, by name; no operand has an empty one.
    Given(String),
    /// What a node gives.
    Made(usize),
}

/// What the nodes of a graph give, with numbers: values that are made in the same way have the same.
fn numbered<'g>(graph: &'g GraphProto, known: &mut BTreeMap<Made, usize>) -> Vec<(&'g str, usize)> {
    let mut values: Vec<(&str, usize)> = Vec::new();
    let mut by_name: BTreeMap<&str, usize> = BTreeMap::new();
    for node in &graph.node {
        let operand = |name: &String| match by_name.get(name.as_str()) {
            Some(number) => Operand::Made(*number),
            None => Operand::Given(name.clone()),
        };
        let operands: Vec<Operand> = node.input.iter().map(operand).collect();
        let mut attributes = node.attribute.clone();
        attributes.sort_by(|a, b| a.name.cmp(&b.name));
        let bare = NodeProto {
            op_type: node.op_type.clone(),
            domain: node.domain.clone(),
            overload: node.overload.clone(),
            attribute: attributes,
            ..Default::default()
        };
        let bare = bare.encode_to_vec();
        for (at, name) in node.output.iter().enumerate() {
            let next = known.len();
            let made = (bare.clone(), operands.clone(), at);
            let number = *known.entry(made).or_insert(next);
            if !name.is_empty() {
                values.push((name.as_str(), number));
                by_name.insert(name, number);
            }
        }
    }
    values
}
