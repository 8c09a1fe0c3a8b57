//! Units: top-level maps with one tasklet, the form in which fusion sees every operator.
//!
//! Owns the questions about units: which one defines a container, which ones read it, whether a map
//! is a contraction, how many bytes a container has. Never changes a graph.

use graph::{
    ContainerId, Expr, Graph, Index, Map, Memlet, Node, NodeKind, Param, SymExpr, Symbol, Tasklet,
};

/// The map and its only tasklet, if the node has that form.
pub fn unit(node: &Node) -> Option<(&Map, &Tasklet)> {
    let NodeKind::Map(map) = &node.kind else {
        return None;
    };
    match map.body.as_slice() {
        [one] => match &one.kind {
            NodeKind::Tasklet(t) => Some((map, t)),
            _ => None,
        },
        _ => None,
    }
}

/// The tasklet of a unit, mutable.
pub fn unit_tasklet_mut(node: &mut Node) -> Option<&mut Tasklet> {
    let NodeKind::Map(map) = &mut node.kind else {
        return None;
    };
    match map.body.as_mut_slice() {
        [one] => match &mut one.kind {
            NodeKind::Tasklet(t) => Some(t),
            _ => None,
        },
        _ => None,
    }
}

/// Number of elements.
pub fn elements(graph: &Graph, id: ContainerId) -> i64 {
    constant(&SymExpr::product(&graph.container(id).shape))
}

/// A size, which is a number in all graphs that are fused.
pub fn constant(size: &SymExpr) -> i64 {
    let size = size.as_const();
    size.unwrap_or_else(|| unreachable!("sizes are fixed before fusion"))
}

/// Size in bytes.
pub fn bytes(graph: &Graph, id: ContainerId) -> i64 {
    elements(graph, id) * graph.container(id).dtype.bytes() as i64
}

/// Number of points of a map.
pub fn points(map: &Map) -> i64 {
    map.params.iter().map(|p| constant(&p.size)).product()
}

/// `T[p…] = expr(inputs)` where each map parameter is one plain index of `T`.
#[derive(Debug)]
pub struct Definition<'a> {
    /// The parameter of each dimension of the container; `None` for dimensions of size 1.
    pub params: Vec<Option<Symbol>>,
    /// What the expression reads.
    pub inputs: &'a [Memlet],
    /// The value.
    pub expr: &'a Expr,
}

/// How a container is defined point by point, if it is.
pub fn definition<'a>(graph: &Graph, node: &'a Node, id: ContainerId) -> Option<Definition<'a>> {
    let (map, tasklet) = unit(node)?;
    let mut writes = tasklet.outputs.iter().filter(|(m, _)| m.container == id);
    let (write, expr) = writes.next()?;
    if writes.next().is_some() || write.conflict.is_some() || write.fill.is_some() {
        return None;
    }
    let params = plain_params(graph, &map.params, write)?;
    Some(Definition {
        params,
        inputs: &tasklet.inputs,
        expr,
    })
}

/// The parameter of each dimension of a memlet whose indices are distinct parameters that cover container and map
/// exactly.
fn plain_params(graph: &Graph, params: &[Param], write: &Memlet) -> Option<Vec<Option<Symbol>>> {
    let shape = &graph.container(write.container).shape;
    let mut found: Vec<Option<Symbol>> = Vec::new();
    for (index, size) in write.subset.iter().zip(shape) {
        let Index::At(at) = index else { return None };
        match at.as_symbol() {
            Some(s) => {
                let param = params.iter().find(|p| p.name == *s)?;
                if param.size != *size || found.iter().flatten().any(|f| f == s) {
                    return None;
                }
                found.push(Some(s.clone()));
            }
            None if at.is_zero() && size.as_const() == Some(1) => found.push(None),
            None => return None,
        }
    }
    let covered = params
        .iter()
        .all(|p| p.size.as_const() == Some(1) || found.iter().flatten().any(|f| *f == p.name));
    covered.then_some(found)
}

/// Whether the unit is a contraction: a sum over a product of two reads, written once.
pub fn is_contraction(node: &Node) -> bool {
    let Some((map, tasklet)) = unit(node) else {
        return false;
    };
    let affine = |m: &Memlet| m.subset.iter().all(|i| matches!(i, Index::At(_)));
    let product = tasklet.summed_product();
    product.is_some_and(|p| affine(p.out))
        && tasklet.inputs.iter().all(affine)
        && is_large_product(map, tasklet)
}

/// Whether the unit is a contraction that the contraction generators take: every index is a sum of
/// parameters with factors.
pub fn is_blockable(node: &Node) -> bool {
    let sum = |i: &Index| matches!(i, Index::At(e) if e.as_affine().is_some());
    is_contraction(node)
        && unit(node).is_some_and(|(_, tasklet)| {
            let written = tasklet.outputs.iter().map(|(m, _)| m);
            let mut all = tasklet.inputs.iter().chain(written);
            all.all(|m| m.subset.iter().all(sum))
        })
}

/// Whether both operands are reused, so that blocking pays: along a parameter that one of them
/// lacks, or in a window. False for sums of element-wise products and for broadcast scaling.
fn is_large_product(map: &Map, tasklet: &Tasklet) -> bool {
    let [a, b] = tasklet.inputs.as_slice() else {
        return false;
    };
    let window = |i: &Index| matches!(i, Index::At(e) if e.symbols().len() > 1);
    let reused = |m: &Memlet| {
        m.subset.iter().any(window) || map.params.iter().any(|p| !mentions(m, &p.name))
    };
    reused(a) && reused(b)
}

/// Whether a parameter occurs in a memlet's indices.
pub fn mentions(memlet: &Memlet, symbol: &Symbol) -> bool {
    memlet
        .subset
        .iter()
        .any(|i| matches!(i, Index::At(e) if e.mentions(symbol)))
}

/// Whether the container's values are only moved from another one's: not computed, nor converted where
/// they are stored.
pub fn is_movement(graph: &Graph, definition: &Definition, id: ContainerId) -> bool {
    let dtype = |id| graph.container(id).dtype;
    match definition.expr {
        Expr::In(i) => definition
            .inputs
            .get(*i)
            .is_some_and(|m| dtype(m.container) == dtype(id)),
        _ => false,
    }
}
