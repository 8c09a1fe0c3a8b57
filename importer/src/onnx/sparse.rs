//! Sparse tensors of a file, converted to dense ones, which the rules read.
//!
//! A sparse initializer becomes a `Constant` node, not a parameter, because training would change its zeros. A tensor
//! that cannot be converted stays as it is, and the import names it.

use super::proto::{AttributeProto, GraphProto, NodeProto, SparseTensorProto};
use onnx::proto::attribute_type;
use onnx::stored;
use prost::Message;
use std::path::Path;

/// Converts the sparse initializers and the sparse values of `Constant` nodes; `folder` has external data.
pub(super) fn write_out(graph: &mut GraphProto, folder: &Path) {
    for node in &mut graph.node {
        write_out_constant(node, folder);
    }
    let (mut nodes, mut others) = (Vec::new(), Vec::new());
    for sparse in std::mem::take(&mut graph.sparse_initializer) {
        let name = sparse.values.as_ref().map_or("", |v| v.name.as_str());
        // An input of that name may replace it.
        let is_open = graph.input.iter().any(|input| input.name == name);
        match value(&sparse, folder).filter(|_| !is_open) {
            Some(value) => nodes.push(NodeProto {
                op_type: "Constant".to_string(),
                output: vec![name.to_string()],
                attribute: vec![value],
                ..NodeProto::default()
            }),
            None => others.push(sparse),
        }
    }
    graph.sparse_initializer = others;
    graph.node.splice(0..0, nodes);
}

/// The same for one node.
fn write_out_constant(node: &mut NodeProto, folder: &Path) {
    if node.op_type != "Constant" {
        return;
    }
    for attribute in &mut node.attribute {
        let sparse = attribute.sparse_tensor.clone();
        let sparse = sparse.and_then(|sparse| SparseTensorProto::decode(sparse).ok());
        if let Some(value) = sparse.and_then(|sparse| value(&sparse, folder)) {
            *attribute = value;
        }
    }
}

/// The attribute `value` of a `Constant` for a sparse tensor; `None` if it cannot be converted.
fn value(sparse: &SparseTensorProto, folder: &Path) -> Option<AttributeProto> {
    let dense = stored::dense(sparse, folder).ok()?;
    Some(AttributeProto {
        name: "value".to_string(),
        t: Some(dense.to_proto("")),
        r#type: attribute_type::TENSOR,
        ..AttributeProto::default()
    })
}
