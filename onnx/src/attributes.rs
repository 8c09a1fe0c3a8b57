//! Attributes of a node by name, with the standard's defaults.

use crate::proto::{AttributeProto, GraphProto, NodeProto, TensorProto};

/// The attributes of a node.
#[derive(Clone, Copy, Debug)]
pub struct Attributes<'a>(pub &'a [AttributeProto]);

impl<'a> Attributes<'a> {
    /// The attributes of a node.
    pub fn new(node: &'a NodeProto) -> Self {
        Attributes(&node.attribute)
    }

    /// The attribute of that name.
    pub fn get(&self, name: &str) -> Option<&'a AttributeProto> {
        self.0.iter().find(|a| a.name == name)
    }

    /// An integer, if the attribute is there.
    pub fn int(&self, name: &str) -> Option<i64> {
        self.get(name).map(|a| a.i.unwrap_or(0))
    }

    /// An integer that is 0 (false) if absent.
    pub fn flag(&self, name: &str) -> bool {
        self.int(name).unwrap_or(0) != 0
    }

    /// A real number, if the attribute is there.
    pub fn float(&self, name: &str) -> Option<f32> {
        self.get(name).map(|a| a.f.unwrap_or(0.0))
    }

    /// Integers, if the attribute is there.
    pub fn ints(&self, name: &str) -> Option<&'a [i64]> {
        self.get(name).map(|a| a.ints.as_slice())
    }

    /// Real numbers, if the attribute is there.
    pub fn floats(&self, name: &str) -> Option<&'a [f32]> {
        self.get(name).map(|a| a.floats.as_slice())
    }

    /// Text, if the attribute is there and is UTF-8.
    pub fn text(&self, name: &str) -> Option<&'a str> {
        std::str::from_utf8(self.get(name)?.s.as_deref()?).ok()
    }

    /// A tensor, if the attribute is there.
    pub fn tensor(&self, name: &str) -> Option<&'a TensorProto> {
        self.get(name)?.t.as_ref()
    }

    /// A body of nodes, if the attribute is there.
    pub fn body(&self, name: &str) -> Option<&'a GraphProto> {
        self.get(name)?.g.as_ref()
    }
}

/// Whether the node is the standard's (not of another domain).
pub fn is_standard(node: &NodeProto) -> bool {
    matches!(node.domain.as_str(), "" | "ai.onnx")
}

/// The bodies inside a node: branches, loops.
pub fn bodies(node: &NodeProto) -> impl Iterator<Item = &GraphProto> {
    node.attribute
        .iter()
        .flat_map(|a| a.g.iter().chain(&a.graphs))
}

/// The bodies inside a node, to be changed.
pub fn bodies_mut(node: &mut NodeProto) -> impl Iterator<Item = &mut GraphProto> {
    node.attribute
        .iter_mut()
        .flat_map(|a| a.g.iter_mut().chain(&mut a.graphs))
}
