//! Removes what a file says of itself and no computation uses.

use crate::attributes::bodies_mut;
use crate::proto::{GraphProto, ModelProto};
use crate::rewrite::TARGET_KEY;

/// The model without documentation, metadata, names of nodes, and types of inner values. The entry that names
/// the runtime it is meant for stays.
pub fn strip(model: &ModelProto) -> ModelProto {
    let mut model = model.clone();
    model.doc_string.clear();
    model.metadata_props.retain(|entry| entry.key == TARGET_KEY);
    if let Some(graph) = &mut model.graph {
        strip_graph(graph);
    }
    for function in &mut model.functions {
        function.doc_string.clear();
        function.metadata_props.clear();
        function.value_info.clear();
        function.node.iter_mut().for_each(strip_node);
    }
    model
}

fn strip_graph(graph: &mut GraphProto) {
    graph.doc_string.clear();
    graph.metadata_props.clear();
    graph.value_info.clear();
    for port in graph.input.iter_mut().chain(&mut graph.output) {
        port.doc_string.clear();
        port.metadata_props.clear();
    }
    for tensor in &mut graph.initializer {
        tensor.doc_string.clear();
        tensor.metadata_props.clear();
    }
    graph.node.iter_mut().for_each(strip_node);
}

fn strip_node(node: &mut crate::proto::NodeProto) {
    node.doc_string.clear();
    node.metadata_props.clear();
    node.name.clear();
    bodies_mut(node).for_each(strip_graph);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::StringStringEntryProto;
    use crate::rewrite::trial::Trial;

    #[test]
    fn texts_go_and_the_target_stays() {
        let trial = Trial::new(17).input("x", "n").node("y = Exp(x)");
        let mut model = trial.output("y", "n").model().proto;
        let plain = strip(&model);
        let entry = |key: &str| StringStringEntryProto {
            key: key.to_string(),
            value: "ort-cpu".to_string(),
        };
        model.metadata_props = vec![entry("author"), entry(TARGET_KEY)];
        model.doc_string = "long".to_string();
        let graph = model.graph.get_or_insert_default();
        graph.node[0].doc_string = "where it comes from".to_string();
        graph.node[0].name = "/layer/Exp".to_string();
        graph.node[0].metadata_props = vec![entry("namespace")];
        let stripped = strip(&model);
        assert_eq!(stripped.metadata_props, [entry(TARGET_KEY)]);
        assert_eq!(stripped.graph, plain.graph);
    }
}
