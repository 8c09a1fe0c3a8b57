//! Every tensor that a file stores: initializers, attributes, in bodies and functions too.
//!
//! Owns where tensors may stand in a message. Never looks into them.

use crate::proto::{AttributeProto, GraphProto, ModelProto, TensorProto};

/// Calls `f` on every tensor of a model that may have external data.
pub(super) fn each(model: &ModelProto, f: &mut dyn FnMut(&TensorProto)) {
    fn graph(body: &GraphProto, f: &mut dyn FnMut(&TensorProto)) {
        body.initializer.iter().for_each(&mut *f);
        for sparse in &body.sparse_initializer {
            let parts = sparse.values.iter().chain(&sparse.indices);
            parts.for_each(&mut *f);
        }
        attributes(body.node.iter().flat_map(|n| &n.attribute), f);
    }
    fn attributes<'a>(
        all: impl Iterator<Item = &'a AttributeProto>,
        f: &mut dyn FnMut(&TensorProto),
    ) {
        for attribute in all {
            let own = attribute.t.iter().chain(&attribute.tensors);
            own.for_each(&mut *f);
            for body in attribute.g.iter().chain(&attribute.graphs) {
                graph(body, f);
            }
        }
    }
    if let Some(body) = &model.graph {
        graph(body, f);
    }
    for function in &model.functions {
        let own = function.node.iter().flat_map(|n| &n.attribute);
        attributes(own.chain(&function.attribute_proto), f);
    }
}

/// The same for tensors that `f` changes.
///
/// # Errors
/// The first one of `f`.
pub(super) fn change_each<E>(
    model: &mut ModelProto,
    f: &mut dyn FnMut(&mut TensorProto) -> Result<(), E>,
) -> Result<(), E> {
    if let Some(body) = &mut model.graph {
        change_graph(body, f)?;
    }
    for function in &mut model.functions {
        let own = function.node.iter_mut().flat_map(|n| &mut n.attribute);
        change_attributes(own.chain(&mut function.attribute_proto), f)?;
    }
    Ok(())
}

fn change_graph<E>(
    graph: &mut GraphProto,
    f: &mut dyn FnMut(&mut TensorProto) -> Result<(), E>,
) -> Result<(), E> {
    graph.initializer.iter_mut().try_for_each(&mut *f)?;
    for sparse in &mut graph.sparse_initializer {
        let mut parts = sparse.values.iter_mut().chain(&mut sparse.indices);
        parts.try_for_each(&mut *f)?;
    }
    change_attributes(graph.node.iter_mut().flat_map(|n| &mut n.attribute), f)
}

fn change_attributes<'a, E>(
    attributes: impl Iterator<Item = &'a mut AttributeProto>,
    f: &mut dyn FnMut(&mut TensorProto) -> Result<(), E>,
) -> Result<(), E> {
    for attribute in attributes {
        let mut own = attribute.t.iter_mut().chain(&mut attribute.tensors);
        own.try_for_each(&mut *f)?;
        for body in attribute.g.iter_mut().chain(&mut attribute.graphs) {
            change_graph(body, f)?;
        }
    }
    Ok(())
}
