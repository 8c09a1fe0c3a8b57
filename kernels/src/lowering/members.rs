//! The members of a kernel around its contraction: what makes its operands, the contraction, and what follows it.
//!
//! Lowers nothing.

use super::emit;
use crate::contraction::{Axis, Contraction, Roles};
use crate::recognize::recognize;
use graph::{Graph, Map, Node, NodeKind, Schedule};

/// The members of a kernel without loops of its own; any other node alone.
pub fn members(kernel: &Node) -> &[Node] {
    match &kernel.kind {
        NodeKind::Map(map) if map.schedule == Schedule::Kernel && map.params.is_empty() => {
            &map.body
        }
        _ => std::slice::from_ref(kernel),
    }
}

/// The product's dimensions by role, where each is an axis of its container.
pub(super) fn product_dims(c: &Contraction, roles: &Roles) -> Option<emit::ProductRoles> {
    let dim = |d: &usize| {
        let alone = |axis: &&Axis| axis.terms == [(*d, 1)] && axis.offset == 0;
        let mut axes = c.out.axes.iter().filter(alone);
        let own = axes.next().filter(|axis| axis.size == c.dims[*d]);
        let gone_through = |axis: &&Axis| roles.places.contains(&(*d, axis.size, axis.stride));
        let axis = own.or_else(|| c.out.axes.iter().find(gone_through))?;
        Some(emit::ProductDim {
            size: axis.size,
            stride: axis.stride,
        })
    };
    let of = |dims: &[usize]| dims.iter().map(dim).collect::<Option<Vec<_>>>();
    let product = emit::ProductRoles {
        batch: of(&roles.batch)?,
        m: of(&roles.m)?,
        n: of(&roles.n)?,
    };
    let n_dims = product.batch.len() + product.m.len() + product.n.len();
    let n_axes = c.out.axes.iter().filter(|axis| axis.size > 1).count();
    (n_dims == n_axes).then_some(product)
}

/// Splits a kernel that begins with a contraction into the contraction and the rest.
pub fn split_epilogue(node: &Node, map: &Map) -> Option<(Node, Node)> {
    if map.schedule != Schedule::Kernel || !map.params.is_empty() {
        return None;
    }
    let (first, rest) = map.body.split_first()?;
    let rest = match rest {
        [
            one @ Node {
                kind: NodeKind::Map(_),
                ..
            },
        ] => one.clone(),
        _ => Node {
            kind: NodeKind::Map(Map {
                params: Vec::new(),
                body: rest.to_vec(),
                schedule: Schedule::Kernel,
            }),
            ..node.clone()
        },
    };
    Some((first.clone(), rest))
}

/// Splits a kernel in which other maps come before its contraction into those maps and the rest, as a kernel.
pub(super) fn split_prologues(graph: &Graph, node: &Node, map: &Map) -> Option<(Vec<Node>, Node)> {
    if map.schedule != Schedule::Kernel || !map.params.is_empty() {
        return None;
    }
    let is_product = |n: &Node| recognize(graph, n).is_some();
    let at = map.body.iter().position(is_product).filter(|at| *at > 0)?;
    let (before, rest) = map.body.split_at(at);
    let kind = match rest {
        [only] => only.kind.clone(),
        _ => NodeKind::Map(Map {
            body: rest.to_vec(),
            ..map.clone()
        }),
    };
    let product = Node {
        kind,
        ..node.clone()
    };
    Some((before.to_vec(), product))
}
