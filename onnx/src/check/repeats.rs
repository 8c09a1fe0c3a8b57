//! Initializers of one name: harmless where they are the same, which some exporters write, an error where they differ.

use crate::attributes::bodies_mut;
use crate::element::Element;
use crate::proto::{GraphProto, ModelProto, NodeProto, TensorProto};
use crate::stored::Stored;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Whether two initializers of one name have the same type, sizes and elements, however these are stored.
pub fn are_same(a: &TensorProto, b: &TensorProto, folder: &Path) -> bool {
    let folder: Arc<Path> = Arc::from(folder);
    let stored = |tensor: &TensorProto| Stored::new(tensor.clone(), &folder);
    // Types that cannot be decoded are compared as they are stored.
    a == b || stored(a).same_elements(&stored(b))
}

/// How two initializers of one name differ, with their positions among the initializers.
pub fn difference((n, a): (usize, &TensorProto), (m, b): (usize, &TensorProto)) -> String {
    let described = |tensor: &TensorProto| {
        let element = Element::of_number(tensor.data_type);
        let element = element.map_or("?".to_string(), |e| e.to_string());
        format!("{element} {:?}", tensor.dims)
    };
    let (first, second) = (described(a), described(b));
    let what = match first == second {
        true => format!("{first}, with other elements"),
        false => format!("{first} and {second}"),
    };
    format!("it is defined twice: initializers {n} and {m} of the file are {what}")
}

/// Removes every initializer that has the name of an earlier one in its body; returns the names. In a file without
/// errors the two hold the same.
pub fn remove(model: &mut ModelProto) -> BTreeSet<String> {
    let mut removed = BTreeSet::new();
    if let Some(graph) = &mut model.graph {
        remove_in(graph, &mut removed);
    }
    for function in &mut model.functions {
        remove_inside(&mut function.node, &mut removed);
    }
    removed
}

fn remove_in(graph: &mut GraphProto, removed: &mut BTreeSet<String>) {
    let mut known = BTreeSet::new();
    graph.initializer.retain(|tensor| {
        let is_new = known.insert(tensor.name.clone());
        if !is_new {
            removed.insert(tensor.name.clone());
        }
        is_new
    });
    remove_inside(&mut graph.node, removed);
}

fn remove_inside(nodes: &mut [NodeProto], removed: &mut BTreeSet<String>) {
    for body in nodes.iter_mut().flat_map(bodies_mut) {
        remove_in(body, removed);
    }
}
