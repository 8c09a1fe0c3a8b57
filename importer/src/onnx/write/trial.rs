//! Nodes written by hand and finished, as lines: what the passes over them are tested with.

use super::super::proto::{AttributeProto, NodeProto, TensorProto};
use super::Names;
use super::nodes::Nodes;
use graph::{DType, Graph, Lifetime, SymExpr};
use std::collections::BTreeSet;

/// The nodes of a file whose inputs are `a` and `b`, four by four, and `c` of four dimensions, as lines;
/// `build` gives the values that become the outputs `0`, `1`, ….
pub(super) fn written(build: impl FnOnce(&mut Nodes) -> Vec<String>) -> Vec<String> {
    let mut graph = Graph::new("trial");
    for (name, rank) in [("a", 2), ("b", 2), ("c", 4)] {
        let shape = vec![SymExpr::constant(4); rank];
        graph.add_input(name, DType::F32, shape, Lifetime::Input);
    }
    let mut nodes = Nodes::new(&graph, &Names::default());
    nodes.begin("n");
    let values = build(&mut nodes);
    let names: Vec<String> = (0..values.len()).map(|n| n.to_string()).collect();
    let results = values.into_iter().zip(names.iter().map(String::as_str));
    let results: Vec<(String, &str)> = results.collect();
    nodes.finish(&results);
    let mut seen = BTreeSet::new();
    for node in &nodes.list {
        assert!(seen.insert(&node.name), "two nodes `{}`", node.name);
    }
    let mut known: BTreeSet<&str> = BTreeSet::from(["a", "b", "c"]);
    known.extend(nodes.constants.iter().map(|c| c.name.as_str()));
    for node in &nodes.list {
        for input in &node.input {
            assert!(known.contains(input.as_str()), "`{input}` is made too late");
        }
        known.extend(node.output.iter().map(String::as_str));
    }
    nodes.list.iter().map(|node| line(&nodes, node)).collect()
}

fn line(nodes: &Nodes, node: &NodeProto) -> String {
    let operand = |name: &String| {
        let constant = nodes.constants.iter().find(|c| c.name == *name);
        constant.map_or_else(|| name.clone(), elements)
    };
    let inputs: Vec<String> = node.input.iter().map(operand).collect();
    let made = format!(
        "{} = {}({})",
        node.output[0],
        node.op_type,
        inputs.join(", ")
    );
    let attributes = node.attribute.iter().map(attribute);
    attributes.fold(made, |text, a| format!("{text} {a}"))
}

fn attribute(a: &AttributeProto) -> String {
    match (a.f, a.i, a.s.as_deref()) {
        (Some(f), ..) => format!("{} {f}", a.name),
        (_, Some(i), _) => format!("{} {i}", a.name),
        (.., Some(s)) => format!("{} {}", a.name, String::from_utf8_lossy(s)),
        _ => format!("{} {:?}", a.name, a.ints),
    }
}

/// A number in single precision, a list of integers.
fn elements(tensor: &TensorProto) -> String {
    let bytes = tensor.raw_data.as_deref().unwrap_or_default();
    if tensor.dims.is_empty() {
        let number: Option<[u8; 4]> = bytes.try_into().ok();
        return number.map_or_else(String::new, |n| f32::from_le_bytes(n).to_string());
    }
    let all = bytes.chunks_exact(8);
    let all = all.map(|n| i64::from_le_bytes(n.try_into().unwrap_or_default()));
    format!("{:?}", all.collect::<Vec<_>>())
}
