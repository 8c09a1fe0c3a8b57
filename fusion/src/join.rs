//! Parts of a concatenation that are written to their places in it.
//!
//! Before: `%p = ..; %q = ..; map [] { map [i < n] { %s[0, i] = %p[i] }; map [i < n] { %s[1, i] = %q[i] } }`.
//! After: `%p = ..; %q = ..; %s = concat(%p, %q)`, for which there is no kernel: `%p` and `%q` are ranges of the bytes
//! of `%s`, and whoever writes them writes it. The gradients of queries, keys and values that one layer made are
//! stacked like this.
//! Legal when the parts lie one behind another in memory: the axis is the slowest dimension of the whole, and each
//! part has the order of the others. The caller owns none of them, and a container is part of one whole only. Every
//! part begins at a cache line, as kernels expect of containers. Saves reading and writing the whole once.

use crate::decision::{Applied, Decision, Refusal, Weighed};
use crate::unit::{bytes, constant};
use graph::{
    Attr, Attrs, Container, ContainerId, Graph, Joined, Lifetime, Node, NodeKind, Part, Place,
    Recipe, Rewrite, Storage, SymExpr,
};
use std::collections::BTreeSet;

/// Bytes of a cache line.
const LINE_BYTES: i64 = 64;

/// Why the parts of a concatenation are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// The recipe says so.
    #[error("the recipe forbids it")]
    ByRecipe,
    /// Somebody else decides where the whole or a part lies.
    #[error("the caller, or a reshape or concatenation beside this one, decides where a part lies")]
    Placed,
    /// The parts are not one behind another in the order of the whole.
    #[error("its parts do not lie one behind another in memory")]
    Order,
}

impl Weighed for Obstacle {
    fn is_cost(&self) -> bool {
        *self == Obstacle::ByRecipe
    }
}

/// Gives the parts of concatenations their places in them, where that is possible.
pub(crate) fn join(
    graph: &mut Graph,
    nodes: Vec<Node>,
    recipe: &Recipe,
    decisions: &mut Vec<Decision>,
) -> Vec<Node> {
    let mut placed: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    let mut made = BTreeSet::new();
    for node in &nodes {
        match &node.kind {
            NodeKind::Map(_) => made.extend(node.writes()),
            _ => placed.extend(node.reads().into_iter().chain(node.writes())),
        }
    }
    let mut result = Vec::new();
    for node in nodes {
        let Some(joined) = Joined::of(graph, &node) else {
            result.push(node);
            continue;
        };
        let place = Place::new(Rewrite::Join, &node, &graph.container(joined.whole).name);
        let saved = 2 * bytes(graph, joined.whole);
        let is_free = |id: ContainerId| {
            let c = graph.container(id);
            let own = c.lifetime == Lifetime::Transient && c.storage == Storage::Global;
            own && made.contains(&id) && !placed.contains(&id)
        };
        let containers = || joined.parts.iter().map(|p| p.container);
        let obstacle = if recipe.override_for(|| place.clone()) == Some(false) {
            Some(Obstacle::ByRecipe)
        } else if !is_free(joined.whole) || !containers().all(is_free) {
            Some(Obstacle::Placed)
        } else if !joined.parts.iter().all(|p| is_range(graph, &joined, p)) {
            Some(Obstacle::Order)
        } else {
            None
        };
        if let Some(obstacle) = obstacle {
            let refusal = Refusal::PartsCopied(obstacle);
            decisions.push(Decision::refused(place, &node.origin, refusal, saved));
            result.push(node);
            continue;
        }
        let done = Applied::PartsInPlace {
            n_parts: joined.parts.len(),
        };
        decisions.push(Decision::applied(place, &node.origin, done, saved));
        placed.extend(containers().chain([joined.whole]));
        result.extend(concatenation(graph, &joined, &node));
    }
    result
}

/// Whether a part's elements are a range of those of the whole, in their order in memory.
fn is_range(graph: &Graph, joined: &Joined, part: &Part) -> bool {
    let whole = graph.container(joined.whole);
    let own = graph.container(part.container);
    let is_wide = |c: &Container, d: usize| constant(&c.shape[d]) > 1;
    let mut order = whole.layout.order().iter().copied();
    if order.find(|d| is_wide(whole, *d)) != Some(joined.axis) {
        return false;
    }
    let rest = order.filter_map(|d| part.dims[d]);
    let expected: Vec<usize> = part.dims[joined.axis].into_iter().chain(rest).collect();
    let found = own.layout.order().iter().copied();
    let found: Vec<usize> = found.filter(|d| is_wide(own, *d)).collect();
    let dims: Vec<usize> = part.dims.iter().copied().flatten().collect();
    let is_reshape = dims.is_sorted();
    found == expected && is_reshape && bytes(graph, part.container) % LINE_BYTES == 0
}

/// The concatenation as an operator, whose inputs have as many dimensions as the whole.
fn concatenation(graph: &mut Graph, joined: &Joined, node: &Node) -> Vec<Node> {
    let whole = graph.container(joined.whole).clone();
    let mut nodes = Vec::new();
    let mut operator = |op: &str, attrs: Attrs, inputs: Vec<ContainerId>, output: ContainerId| {
        nodes.push(Node {
            kind: NodeKind::Library(graph::Library {
                op: op.to_string(),
                attrs,
                inputs: inputs.into_iter().map(Some).collect(),
                outputs: vec![Some(output)],
            }),
            ..node.clone()
        });
    };
    let mut inputs = Vec::new();
    for part in &joined.parts {
        let mut shape = whole.shape.clone();
        shape[joined.axis] = SymExpr::constant(part.extent);
        let own = graph.container(part.container);
        if own.shape == shape && own.layout == whole.layout {
            inputs.push(part.container);
            continue;
        }
        let view = graph.add_container(Container {
            name: format!("{}_in_{}", graph.container(part.container).name, whole.name),
            shape: shape.clone(),
            ..whole.clone()
        });
        let attrs = Attrs::from([("shape".to_string(), Attr::Sizes(shape))]);
        operator("reshape", attrs, vec![part.container], view);
        inputs.push(view);
    }
    let axis = Attr::Int(joined.axis as i64);
    let attrs = Attrs::from([("axis".to_string(), axis)]);
    operator("concat", attrs, inputs, joined.whole);
    nodes
}

#[cfg(test)]
mod tests;
