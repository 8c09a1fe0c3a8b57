//! Graphs of library nodes become ONNX files of the standard's operators.
//!
//! Owns the translation of our operators to nodes of the standard (operator set 20), sizes that are
//! computed when the file runs, and the file's bytes. Every file is self-contained, and the same graph
//! gives the same bytes. Never changes what a graph computes.

mod arranged;
mod convolutions;
mod joined;
mod lookups;
mod losses;
mod nodes;
mod norms;
mod products;
mod rows;
mod rules;
mod scalar;
mod scaled;
mod shifts;
mod sizes;
#[cfg(test)]
mod trial;
mod turned;
mod windows;

use super::file::About;
use super::proto::{
    Dimension, DimensionProto, GraphProto, ModelProto, OperatorSetIdProto, TensorProto,
    TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};
use graph::{ContainerId, Graph, Lifetime, NodeKind, SymExpr, Tensor};
use nodes::Nodes;
use prost::Message;
use std::collections::BTreeMap;

/// The version of the standard's operators that is written.
pub const WRITTEN_OPSET: i64 = 20;
/// The file format that goes with it.
const IR_VERSION: i64 = 9;

/// Why a graph has no ONNX file.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// A node that the standard's operators do not express.
    #[error("{origin}: `{op}` cannot be written as ONNX: {what}")]
    Node {
        /// The node.
        origin: String,
        /// Its operator.
        op: String,
        /// What is missing.
        what: String,
    },
    /// Control flow.
    #[error("cannot write a graph with control flow as ONNX yet")]
    ControlFlow,
}

/// What a file calls its inputs and outputs, and the data it holds.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Names of inputs; others are called as in the graph.
    pub inputs: BTreeMap<ContainerId, String>,
    /// Names of outputs, one for each output of the graph, in order.
    pub outputs: Vec<String>,
    /// Inputs that have a value in the file, which a caller may replace.
    pub initial: Vec<(ContainerId, Tensor)>,
    /// Names of dynamic sizes, by symbol.
    pub sizes: BTreeMap<String, String>,
    /// What made the file.
    pub producer: String,
    /// What the file is to say of itself.
    pub about: About,
}

/// The bytes of an ONNX file that computes the graph.
///
/// # Errors
/// See [`WriteError`].
pub fn write(graph: &Graph, names: &Names) -> Result<Vec<u8>, WriteError> {
    let state = graph.single_state().ok_or(WriteError::ControlFlow)?;
    let mut nodes = Nodes::new(graph, names);
    for node in &state.nodes {
        let refuse = |op: &str, what: String| WriteError::Node {
            origin: node.origin.to_string(),
            op: op.to_string(),
            what,
        };
        match &node.kind {
            NodeKind::Library(library) => {
                nodes.begin(&node.origin.node);
                let call = ops::Call::of(graph, library);
                let written = rules::rule_of(&library.op)
                    .ok_or_else(|| "no rule is known".to_string())
                    .and_then(|rule| rule(&mut nodes, &call).map_err(|refusal| refusal.0));
                written.map_err(|what| refuse(&library.op, what))?;
            }
            _ => {
                let what = "its gradient exists as loops only".to_string();
                return Err(refuse("map", what));
            }
        }
    }
    let results = graph.outputs.iter().zip(&names.outputs);
    let results: Vec<(String, &str)> = results
        .map(|(output, name)| (nodes.operand(output.container), name.as_str()))
        .collect();
    nodes.finish(&results);
    Ok(model(graph, names, nodes).encode_to_vec())
}

fn model(graph: &Graph, names: &Names, nodes: Nodes) -> ModelProto {
    let info = |id: ContainerId, name: String| {
        let c = graph.container(id);
        let dim = |size: &SymExpr| DimensionProto {
            value: Some(match (size.as_const(), size.as_symbol()) {
                (Some(n), _) => Dimension::DimValue(n),
                (_, Some(s)) => {
                    let known = names.sizes.get(s.as_str());
                    Dimension::DimParam(known.cloned().unwrap_or_else(|| s.to_string()))
                }
                _ => Dimension::DimParam(size.to_string()),
            }),
            ..Default::default()
        };
        ValueInfoProto {
            name,
            r#type: Some(TypeProto {
                tensor_type: Some(TensorTypeProto {
                    elem_type: nodes::type_number(c.dtype),
                    shape: Some(TensorShapeProto {
                        dim: c.shape.iter().map(dim).collect(),
                    }),
                }),
                ..Default::default()
            }),
            ..Default::default()
        }
    };
    let inputs = graph.inputs.iter().filter(|id| {
        let lifetime = &graph.container(**id).lifetime;
        !matches!(lifetime, Lifetime::Constant(_))
    });
    let input = inputs.map(|id| info(*id, nodes.value(*id))).collect();
    let outputs = graph.outputs.iter().zip(&names.outputs);
    let output = outputs
        .map(|(o, name)| info(o.container, name.clone()))
        .collect();
    let initial = names.initial.iter().map(|(id, tensor)| TensorProto {
        name: nodes.value(*id),
        ..nodes::stored(tensor)
    });
    let initializer = initial.chain(nodes.constants.iter().cloned()).collect();
    ModelProto {
        ir_version: Some(IR_VERSION),
        producer_name: names.producer.clone(),
        producer_version: env!("CARGO_PKG_VERSION").to_string(),
        opset_import: vec![OperatorSetIdProto {
            domain: String::new(),
            version: WRITTEN_OPSET,
        }],
        graph: Some(GraphProto {
            node: nodes.list,
            name: graph.name.clone(),
            initializer,
            input,
            output,
            doc_string: names.about.graph_doc.clone(),
            ..Default::default()
        }),
        doc_string: names.about.model_doc.clone(),
        metadata_props: names.about.metadata.clone(),
        ..Default::default()
    }
}
