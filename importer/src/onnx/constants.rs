//! Nodes whose inputs are all numbers of the file, computed at import by the room `onnx`'s meaning of the operator.
//!
//! What a model computes from constants (a window, a table of angles) never reaches the graph, and operands that have
//! to be constant may be computed. Initializers of floats are parameters, so they are not folded.

use super::node::NodeCx;
use super::tensor::{dtype_of, element_of};
use super::value::{Ints, MAX_KNOWN, Value};
use graph::{DType, Tensor};
use onnx::attributes::bodies;
use onnx::evaluate::{Precision, Program, Values};
use onnx::proto::{GraphProto, ModelProto, OperatorSetIdProto};
use std::path::Path;
use std::sync::Arc;

/// Operators whose results may be much larger than what they read; their rules say what is known of them.
const GROWING: [&str; 8] = [
    "ConstantOfShape",
    "Expand",
    "EyeLike",
    "OneHot",
    "Pad",
    "Range",
    "Resize",
    "Tile",
];

/// The values of the node's outputs, if all of its inputs are known numbers and the results are few.
pub(super) fn folded(cx: &NodeCx) -> Option<Vec<Value>> {
    let node = cx.node;
    let is_standard = node.domain.is_empty() || node.domain == "ai.onnx";
    let known = is_standard && !node.input.is_empty() && bodies(node).next().is_none();
    if !known || GROWING.contains(&node.op_type.as_str()) {
        return None;
    }
    let mut feeds = Values::new();
    for (position, name) in node.input.iter().enumerate() {
        if name.is_empty() {
            continue;
        }
        let tensor = match cx.value(position).ok()? {
            Value::Constant(tensor) if tensor.len() <= MAX_KNOWN => given(&tensor)?,
            Value::Ints(ints) => given(&ints.to_tensor()?)?,
            _ => return None,
        };
        feeds.insert(name.clone(), tensor);
    }
    let model = ModelProto {
        graph: Some(GraphProto {
            node: vec![node.clone()],
            ..Default::default()
        }),
        opset_import: vec![OperatorSetIdProto {
            version: cx.opset(),
            ..Default::default()
        }],
        ..Default::default()
    };
    let program = Program::new(&model, Path::new("."), Precision::AsStored)?;
    let wanted: Vec<&str> = node.output.iter().map(String::as_str).collect();
    if wanted.iter().any(|name| name.is_empty()) {
        return None;
    }
    let outputs = program.run(&feeds, &wanted).ok()?;
    outputs.iter().map(value).collect()
}

/// A tensor as the room `onnx` has it.
fn given(tensor: &Tensor) -> Option<onnx::tensor::Tensor> {
    let element = element_of(tensor.dtype);
    match tensor.dtype.is_float() {
        true => onnx::tensor::Tensor::floats(element, &tensor.shape, &tensor.to_f64()),
        false => onnx::tensor::Tensor::of_ints(element, &tensor.shape, &tensor.to_i64()),
    }
}

fn value(tensor: &onnx::tensor::Tensor) -> Option<Value> {
    if tensor.len() > MAX_KNOWN {
        return None;
    }
    let dtype: DType = dtype_of(tensor.element().number()).ok()?;
    if dtype.is_float() {
        let made = Tensor::from_f64(dtype, &tensor.shape, tensor.to_f64()?);
        return Some(Value::Constant(Arc::new(made)));
    }
    let made = Tensor::from_i64(dtype, &tensor.shape, tensor.to_i64()?);
    Some(match Ints::of_tensor(&made) {
        Some(ints) => Value::Ints(ints),
        None => Value::Constant(Arc::new(made)),
    })
}
