//! Costs that can be counted by hand.

use super::*;
use crate::element::Element;
use crate::proto::TensorProto;
use crate::rewrite::trial::{model_of, node, value};

/// `y = Relu(x · w)`, with `x` [batch, 4] and `w` [4, 8], through nodes of `between`.
fn product(between: &[NodeProto], last: &str) -> ModelProto {
    let weight = TensorProto {
        dims: vec![4, 8],
        data_type: 1,
        float_data: vec![0.5; 32],
        name: "w".to_string(),
        ..Default::default()
    };
    let mut nodes = vec![node("MatMul", &["x", "w"], "h")];
    nodes.extend_from_slice(between);
    nodes.push(node("Relu", &[last], "y"));
    let graph = GraphProto {
        node: nodes,
        input: vec![value("x", Element::F32, "batch 4")],
        output: vec![value("y", Element::F32, "batch 8")],
        initializer: vec![weight],
        ..Default::default()
    };
    model_of(graph, 18)
}

fn at_batch(model: &ModelProto, batch: usize) -> Cost {
    let shapes = BTreeMap::from([("x".to_string(), vec![batch, 4])]);
    cost(model, &Arc::from(Path::new(".")), &shapes)
}

#[test]
fn a_product_reads_both_operands_and_writes_one() {
    let found = at_batch(&product(&[], "h"), 3);
    assert_eq!(found.n_unknown, 0);
    assert_eq!(found.multiply_adds, 3 * 4 * 8);
    let (x, w, h) = (3 * 4 * 4, 4 * 8 * 4, 3 * 8 * 4);
    assert_eq!(found.bytes_moved, (x + w + h) + (h + h));
    assert_eq!(found.bytes_least, x + w + h);
    // The input is dropped once the product is computed.
    assert_eq!(found.peak_bytes, h + h);
}

#[test]
fn views_move_nothing_and_keep_alive_what_they_show() {
    let views = [node("Identity", &["h"], "v")];
    let with = at_batch(&product(&views, "v"), 3);
    let without = at_batch(&product(&[], "h"), 3);
    assert_eq!(with.bytes_moved, without.bytes_moved);
    assert_eq!(with.peak_bytes, without.peak_bytes);
    assert_eq!(with.nodes.len(), without.nodes.len() + 1);
}

#[test]
fn what_does_not_follow_is_counted_as_unknown() {
    let mystery = NodeProto {
        domain: "somewhere".to_string(),
        ..node("Mystery", &["h"], "m")
    };
    let found = at_batch(&product(&[mystery], "m"), 3);
    // The unknown node and the one that reads it. The output's sizes are declared, so they are known again.
    assert_eq!(found.n_unknown, 2);
    assert!(!found.nodes[1].is_known);
    let open = cost(
        &product(&[], "h"),
        &Arc::from(Path::new(".")),
        &BTreeMap::new(),
    );
    assert_eq!(open.n_unknown, 2);
}
