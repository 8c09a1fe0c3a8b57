//! What a rule asks for, and how a body becomes that.
//!
//! Owns names and order: outputs of the body keep their names, nodes stand after what they read.

use super::scope::{Constants, Names, Scope};
use crate::attributes::{bodies_mut, is_standard};
use crate::evaluate::reads;
use crate::proto::{AttributeProto, GraphProto, NodeProto, attribute_type};
use crate::stored::Stored;
use crate::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A change of a body that keeps the values of everything it leaves.
#[derive(Clone, Debug, Default)]
pub struct Patch {
    /// Positions of nodes that go.
    pub remove: Vec<usize>,
    /// Nodes that come, in the place of the last one that goes.
    pub insert: Vec<NodeProto>,
    /// Initializers that come.
    pub constants: Vec<(String, Tensor)>,
    /// Readers of the first value read the second from now on.
    pub replace: Vec<(String, String)>,
    /// Values that keep their name but not their elements: nothing else may begin to read them in the
    /// same sweep.
    pub changed: Vec<String>,
}

/// Separates the values that several nodes' metadata have for one key.
const SEPARATOR: &str = "; ";

impl Patch {
    /// Node `n` goes; what read its first output reads `name`. `None` if an output of the body would
    /// be left without a node of its own.
    pub fn forward(scope: &Scope, n: usize, name: &str) -> Option<Patch> {
        let node = scope.node(n);
        let (first, rest) = node.output.split_first()?;
        if rest.iter().any(|o| scope.is_used(o)) || !may_stand_for(scope, first, name) {
            return None;
        }
        let replace = vec![(first.clone(), name.to_string())];
        Some(Patch {
            remove: vec![n],
            replace,
            ..Patch::default()
        })
    }

    /// Node `n` becomes `node`, which keeps its outputs, name, documentation and metadata.
    pub fn exchange(scope: &Scope, n: usize, node: NodeProto) -> Patch {
        Patch {
            remove: vec![n],
            insert: vec![heir(scope.node(n), node)],
            ..Patch::default()
        }
    }

    /// Adds an initializer like `base` and gives its name.
    pub fn constant(&mut self, scope: &Scope, base: &str, tensor: Tensor) -> String {
        let name = scope.fresh(base);
        self.constants.push((name.clone(), tensor));
        name
    }

    /// Adds a node before the last one, with one new output like `base`, and gives the output's name.
    pub fn node(&mut self, scope: &Scope, base: &str, mut node: NodeProto) -> String {
        let name = scope.fresh(base);
        node.output = vec![name.clone()];
        if node.name.is_empty() {
            node.name.clone_from(&name);
        }
        self.insert.push(node);
        name
    }

    /// Values that do not exist afterwards under their name and with their elements.
    pub fn gone<'s>(&'s self, scope: &'s Scope) -> BTreeSet<&'s str> {
        let outputs = self.remove.iter().flat_map(|n| &scope.node(*n).output);
        let mut gone: BTreeSet<&str> = outputs.map(String::as_str).collect();
        for kept in self.insert.iter().flat_map(|n| &n.output) {
            gone.remove(kept.as_str());
        }
        // A value that replaces an output of the body is renamed to it.
        let renamed = self.replace.iter().filter(|(old, _)| scope.is_output(old));
        gone.extend(renamed.map(|(_, new)| new.as_str()));
        gone.extend(self.changed.iter().map(String::as_str));
        gone
    }

    /// Adds the metadata of the removed nodes to the last inserted one: for each key every different value, in the
    /// order of the nodes.
    fn keep_provenance(&mut self, body: &GraphProto) {
        let (Some(heir), true) = (self.insert.last_mut(), self.remove.len() > 1) else {
            return;
        };
        let own = std::mem::take(&mut heir.metadata_props);
        let gone: BTreeSet<usize> = self.remove.iter().copied().collect();
        let gone = gone.iter().filter_map(|n| body.node.get(*n));
        for entry in gone.flat_map(|n| &n.metadata_props).chain(&own) {
            let all = &mut heir.metadata_props;
            match all.iter_mut().find(|e| e.key == entry.key) {
                None => all.push(entry.clone()),
                Some(known) if known.value.split(SEPARATOR).any(|v| v == entry.value) => {}
                Some(known) => known.value = [&known.value, SEPARATOR, &entry.value].concat(),
            }
        }
    }

    /// Values that inserted nodes and redirected readers read afterwards.
    pub fn uses(&self) -> BTreeSet<&str> {
        let inserted = self.insert.iter().flat_map(reads);
        inserted
            .chain(self.replace.iter().map(|(_, to)| to.as_str()))
            .collect()
    }
}

/// Whether readers of `old` may read `new`: not if `old` is an output of the body and `new` cannot
/// take its name.
pub fn may_stand_for(scope: &Scope, old: &str, new: &str) -> bool {
    !scope.is_output(old) || (scope.producer(new).is_some() && !scope.is_output(new))
}

/// `node` in the place of `old`: the same outputs, name, documentation, metadata.
pub fn heir(old: &NodeProto, mut node: NodeProto) -> NodeProto {
    if node.output.is_empty() {
        node.output.clone_from(&old.output);
    }
    node.name.clone_from(&old.name);
    node.doc_string.clone_from(&old.doc_string);
    node.metadata_props.clone_from(&old.metadata_props);
    node.device_configurations
        .clone_from(&old.device_configurations);
    node
}

/// A node of the standard; outputs and name come later.
pub fn node(op: &str, inputs: &[&str], attribute: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        op_type: op.to_string(),
        input: inputs.iter().map(ToString::to_string).collect(),
        attribute,
        ..Default::default()
    }
}

/// An integer attribute.
pub fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        r#type: attribute_type::INT,
        i: Some(value),
        ..Default::default()
    }
}

/// An attribute of integers.
pub fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        r#type: attribute_type::INTS,
        ints: values.to_vec(),
        ..Default::default()
    }
}

/// A real attribute.
pub fn float(name: &str, value: f32) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        r#type: attribute_type::FLOAT,
        f: Some(value),
        ..Default::default()
    }
}

/// A text attribute.
pub fn text(name: &str, value: &str) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        r#type: attribute_type::STRING,
        s: Some(bytes::Bytes::copy_from_slice(value.as_bytes())),
        ..Default::default()
    }
}

/// Applies patches that do not touch each other. Some bodies hold constants that nodes fill when the model runs. There,
/// new constants of one repeated element and more than `filled_from` bytes are filled too, not stored.
pub fn apply(
    body: &mut GraphProto,
    constants: &mut Constants,
    patches: Vec<Patch>,
    names: &Names,
    filled_from: usize,
) {
    let fills = body
        .node
        .iter()
        .any(|n| n.op_type == "ConstantOfShape" && is_standard(n));
    let mut replace = BTreeMap::new();
    let mut gone = BTreeSet::new();
    let mut inserted: BTreeMap<usize, Vec<NodeProto>> = BTreeMap::new();
    for mut patch in patches {
        patch.keep_provenance(body);
        let at = patch
            .remove
            .iter()
            .max()
            .copied()
            .unwrap_or(body.node.len());
        inserted.entry(at).or_default().extend(patch.insert);
        gone.extend(patch.remove);
        replace.extend(patch.replace);
        for (name, tensor) in patch.constants {
            let large = fills && tensor.n_bytes() > filled_from;
            let stored = Stored::of_tensor(&name, tensor);
            if large && stored.all_equal().is_some() {
                let (shape, node) = filled(&name, &stored, names);
                inserted.entry(0).or_default().push(node);
                constants.insert(shape.proto().name.clone(), Arc::new(shape));
                continue;
            }
            constants.insert(name, Arc::new(stored));
        }
    }
    let mut nodes = Vec::with_capacity(body.node.len());
    for (n, node) in std::mem::take(&mut body.node).into_iter().enumerate() {
        if !gone.contains(&n) {
            nodes.push(node);
        }
        nodes.extend(inserted.remove(&n).unwrap_or_default());
    }
    nodes.extend(inserted.into_values().flatten());
    body.node = nodes;
    rename_outputs(body, &mut replace);
    let resolved = |name: &str| {
        let mut to = replace.get(name)?;
        while let Some(next) = replace.get(to.as_str()) {
            to = next;
        }
        Some(to.clone())
    };
    for node in &mut body.node {
        rename_reads(node, &resolved);
    }
    sort(body);
}

/// The node that fills a constant, and the initializer of its sizes.
fn filled(name: &str, stored: &Stored, names: &Names) -> (Stored, NodeProto) {
    let dims = Tensor::ints(&stored.proto().dims);
    let shape = Stored::of_tensor(&names.fresh(&format!("{name}_sizes")), dims);
    let every = stored.tensor().map(|t| t.values.pick(std::iter::once(0)));
    let value = every.map(|values| Tensor::new(&[1], values).to_proto(""));
    let value = AttributeProto {
        name: "value".to_string(),
        r#type: attribute_type::TENSOR,
        t: value.ok(),
        ..Default::default()
    };
    let mut node = node("ConstantOfShape", &[&shape.proto().name], vec![value]);
    node.output = vec![name.to_string()];
    node.name = names.fresh(name);
    (shape, node)
}

/// Where an output of the body is replaced, the value that stands for it takes its name.
fn rename_outputs(body: &mut GraphProto, replace: &mut BTreeMap<String, String>) {
    let outputs: Vec<String> = body.output.iter().map(|o| o.name.clone()).collect();
    for output in outputs {
        let Some(mut to) = replace.remove(&output) else {
            continue;
        };
        while let Some(next) = replace.get(&to) {
            to = next.clone();
        }
        for node in &mut body.node {
            for name in &mut node.output {
                if *name == to {
                    name.clone_from(&output);
                }
            }
        }
        for info in &mut body.value_info {
            if info.name == to {
                info.name.clear();
            }
        }
        replace.insert(to, output);
    }
    body.value_info.retain(|info| !info.name.is_empty());
}

/// Renames what a node reads, also in its bodies where they do not define the name themselves.
pub fn rename_reads(node: &mut NodeProto, to: &dyn Fn(&str) -> Option<String>) {
    for input in &mut node.input {
        if let Some(name) = to(input) {
            *input = name;
        }
    }
    for inner in bodies_mut(node) {
        let own: BTreeSet<String> = (inner.node.iter().flat_map(|n| &n.output))
            .chain(inner.input.iter().map(|i| &i.name))
            .chain(inner.initializer.iter().map(|t| &t.name))
            .cloned()
            .collect();
        let free = |name: &str| if own.contains(name) { None } else { to(name) };
        for node in &mut inner.node {
            rename_reads(node, &free);
        }
        for output in &mut inner.output {
            if let Some(name) = free(&output.name) {
                output.name = name;
            }
        }
    }
}

/// Puts every node after what it reads, otherwise leaving the order as it is. What is in a cycle stays
/// where it is, for the check afterwards to find.
pub fn sort(body: &mut GraphProto) {
    let producers: BTreeMap<&str, usize> = (body.node.iter().enumerate())
        .flat_map(|(n, node)| node.output.iter().map(move |o| (o.as_str(), n)))
        .collect();
    let needs: Vec<Vec<usize>> = body
        .node
        .iter()
        .map(|node| {
            reads(node)
                .into_iter()
                .filter_map(|r| producers.get(r).copied())
                .collect()
        })
        .collect();
    let mut order = Vec::with_capacity(needs.len());
    let mut state = vec![0u8; needs.len()];
    for n in 0..needs.len() {
        let mut stack = vec![(n, 0)];
        while let Some((at, next)) = stack.pop() {
            if next == 0 {
                if state[at] != 0 {
                    continue;
                }
                state[at] = 1;
            }
            match needs[at].get(next) {
                Some(need) => {
                    stack.push((at, next + 1));
                    if state[*need] == 0 {
                        stack.push((*need, 0));
                    }
                }
                None => {
                    state[at] = 2;
                    order.push(at);
                }
            }
        }
    }
    let mut nodes: Vec<Option<NodeProto>> = std::mem::take(&mut body.node)
        .into_iter()
        .map(Some)
        .collect();
    body.node = order.into_iter().filter_map(|n| nodes[n].take()).collect();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::StringStringEntryProto;

    #[test]
    fn one_node_for_several_says_where_all_came_from() {
        let from = |output: &str, name: &str| NodeProto {
            output: vec![output.to_string()],
            metadata_props: vec![StringStringEntryProto {
                key: "namespace".to_string(),
                value: name.to_string(),
            }],
            ..node("Relu", &["x"], Vec::new())
        };
        let body = GraphProto {
            node: vec![from("a", "conv"), from("b", "norm"), from("c", "norm")],
            ..GraphProto::default()
        };
        let mut patch = Patch {
            remove: vec![2, 0, 1],
            insert: vec![from("c", "norm")],
            ..Patch::default()
        };
        patch.keep_provenance(&body);
        let kept = &patch.insert[0].metadata_props;
        assert_eq!(kept.len(), 1);
        assert_eq!(kept[0].value, "conv; norm");
    }
}
