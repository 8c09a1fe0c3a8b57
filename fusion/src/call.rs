//! Nodes that stay whole, for another library's operator or an ordered loop: their operands are views of containers,
//! not copies. Ordered loops take dense views only.
//!
//! Before: `t: [8, 512, 16, 64]; map (b,h,l,d): q[b,h,l,d] = t[b,l,h,d]; y = attention(q, …)`.
//! After: `y = attention(t as [8, 16, 512, 64] by strides (524288, 64, 1024, 1), …)`.
//! Legal because the operator takes strides, the values are the same, and `t` does not change. Saves the
//! copy: `q` written and read. Results get the order in memory that attribute `order` asks for, so that
//! readers that permute them find them in place.
//!
//! [`separate`] comes before expansion: every operand becomes a container of its own beside a copy, so
//! that reshapes and permutations around the node meet maps only. [`absorb`] comes when movement is
//! inlined: a copy that still moves from one container to the operand becomes a view. A copy
//! that cannot be a view (of a gathered, padded, repeated or badly aligned container) stays.

use crate::decision::{Applied, Decision, Refusal};
use crate::unit::{bytes, constant, definition, is_movement};
use graph::{
    Attr, Builder, ContainerId, Expr, Graph, Index, Lifetime, Memlet, Node, NodeKind, Operand,
    Place, Recipe, Rewrite, SymExpr, View,
};
use ops::LOOP;

/// Operators want each row to start at a multiple of this many bytes.
const ALIGNMENT: i64 = 16;

/// Why an operand is copied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The messages say it.
pub enum Obstacle {
    #[error("it is computed where it is stored")]
    Computed,
    #[error("it is looked up")]
    LookedUp,
    #[error("what it is moved from is not in the step's memory in row-major order")]
    Source,
    #[error("positions outside of what it is moved from have a value")]
    Fill,
    #[error("what it is moved from has no fixed size")]
    Size,
    #[error("its places are no sums of multiples")]
    Places,
    #[error("its elements are not one after the other")]
    Gaps,
    #[error("its rows are not contiguous")]
    Rows,
    #[error("it is repeated or reversed")]
    Repeated,
    #[error("its rows are not aligned to 16 bytes")]
    Alignment,
    #[error("the recipe forbids it")]
    ByRecipe,
}

/// Gives each operand of each such node a container of its own, copied to or from the old one, and its view.
pub fn separate(graph: &mut Graph) {
    let Some(state) = graph.single_state_mut() else {
        return;
    };
    let mut all = Vec::new();
    for node in std::mem::take(&mut state.nodes) {
        match &node.kind {
            NodeKind::Library(library) if library.computed_by().is_some() => {
                all.extend(separated(graph, &node));
            }
            _ => all.push(node),
        }
    }
    graph.last_state().nodes = all;
}

/// The node with copies before and after it.
fn separated(graph: &mut Graph, node: &Node) -> Vec<Node> {
    let NodeKind::Library(mut library) = node.kind.clone() else {
        return vec![node.clone()];
    };
    let wished = match library.attrs.get("order") {
        Some(Attr::Ints(order)) => order.iter().map(|d| *d as usize).collect(),
        _ => Vec::new(),
    };
    let mut builder = Builder::new(graph, node.origin.clone(), node.stage);
    for n in 0..library.inputs.len() {
        let Some(id) = library.inputs[n] else {
            continue;
        };
        let shape = builder.shape(id);
        let (name, dtype) = (builder.graph.container(id).name.clone(), builder.dtype(id));
        let own = builder.transient(&name, dtype, &shape);
        builder.map_over(&shape, own, Expr::In(0), |i| {
            vec![Memlet::new(id, i.iter().cloned())]
        });
        library.set_view(Operand::Input(n), &whole(&shape, &[]));
        library.inputs[n] = Some(own);
    }
    let at = builder.nodes.len();
    for n in 0..library.outputs.len() {
        let Some(id) = library.outputs[n] else {
            continue;
        };
        let shape = builder.shape(id);
        let order: Vec<usize> = match wished.len() == shape.len() {
            true => wished.clone(),
            false => (0..shape.len()).collect(),
        };
        let stored: Vec<SymExpr> = order.iter().map(|d| shape[*d].clone()).collect();
        let (name, dtype) = (builder.graph.container(id).name.clone(), builder.dtype(id));
        let own = builder.transient(&name, dtype, &stored);
        builder.map_over(&shape, id, Expr::In(0), |i| {
            vec![Memlet::new(own, order.iter().map(|d| i[*d].clone()))]
        });
        library.set_view(Operand::Output(n), &whole(&shape, &order));
        library.outputs[n] = Some(own);
    }
    let mut nodes = builder.nodes;
    let kind = NodeKind::Library(library);
    nodes.insert(
        at,
        Node {
            kind,
            ..node.clone()
        },
    );
    nodes
}

/// The view of a whole container whose dimensions lie in memory in `order`; row-major if that is empty.
fn whole(shape: &[SymExpr], order: &[usize]) -> View {
    let sizes: Vec<i64> = shape.iter().map(constant).collect();
    match order.is_empty() {
        true => View::dense(&sizes, &(0..sizes.len()).collect::<Vec<_>>()),
        false => View::dense(&sizes, order),
    }
}

/// Turns copies that only feed such a node into views of what they copy, and drops the copies.
pub fn absorb(
    graph: &Graph,
    nodes: &mut Vec<Node>,
    recipe: &Recipe,
    decisions: &mut Vec<Decision>,
) {
    for at in 0..nodes.len() {
        let NodeKind::Library(library) = &nodes[at].kind else {
            continue;
        };
        if library.computed_by().is_none() {
            continue;
        }
        let mut library = library.clone();
        // Ordered loops along an axis read dense arrays; attention takes strides.
        let must_be_dense =
            library.computed_by() == Some(LOOP) && !library.op.starts_with("attention");
        for n in 0..library.inputs.len() {
            let (Some(id), Some(view)) = (library.inputs[n], library.view(Operand::Input(n)))
            else {
                continue;
            };
            let Some(copy) = nodes[..at].iter().find(|node| node.writes().contains(&id)) else {
                continue;
            };
            let place = Place::new(Rewrite::Call, copy, &graph.container(id).name);
            let found = match recipe.override_for(|| place.clone()) {
                Some(false) => Err(Obstacle::ByRecipe),
                _ => source(graph, copy, id, (&view, must_be_dense)),
            };
            let (origin, saved) = (&nodes[at].origin, 2 * bytes(graph, id));
            decisions.push(match &found {
                Ok(_) => Decision::applied(place, origin, Applied::Viewed, saved),
                Err(why) => {
                    let refusal = Refusal::Copied(why.clone());
                    Decision::refused(place, origin, refusal, saved)
                }
            });
            if let Ok((from, view)) = found {
                library.set_view(Operand::Input(n), &view);
                library.inputs[n] = Some(from);
            }
        }
        nodes[at].kind = NodeKind::Library(library);
    }
    let read: Vec<ContainerId> = nodes.iter().flat_map(Node::reads).collect();
    let outputs: Vec<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    nodes.retain(|n| {
        let writes = n.writes();
        writes
            .iter()
            .any(|id| read.contains(id) || outputs.contains(id))
    });
}

/// The container that a unit copies to `id`, and the view of it that `id` is.
fn source(
    graph: &Graph,
    copy: &Node,
    id: ContainerId,
    (own, must_be_dense): (&View, bool),
) -> Result<(ContainerId, View), Obstacle> {
    let found = definition(graph, copy, id).filter(|d| is_movement(graph, d, id));
    let found = found.ok_or(Obstacle::Computed)?;
    let [from] = found.inputs else {
        return Err(Obstacle::LookedUp);
    };
    let c = graph.container(from.container);
    if matches!(c.lifetime, Lifetime::Constant(_)) || !c.layout.is_row_major() {
        return Err(Obstacle::Source);
    }
    if from.fill.is_some() {
        return Err(Obstacle::Fill);
    }
    let sizes: Option<Vec<i64>> = c.shape.iter().map(SymExpr::as_const).collect();
    let sizes = sizes.ok_or(Obstacle::Size)?;
    let dense = View::dense(&sizes, &(0..sizes.len()).collect::<Vec<_>>());
    let mut view = View {
        offset: 0,
        sizes: own.sizes.clone(),
        strides: vec![0; own.sizes.len()],
    };
    for (index, stride) in from.subset.iter().zip(&dense.strides) {
        let Index::At(e) = index else {
            return Err(Obstacle::LookedUp);
        };
        let (terms, constant) = e.as_affine().ok_or(Obstacle::Places)?;
        view.offset += constant * stride;
        for (symbol, factor) in terms {
            let mut params = found.params.iter();
            let d = params.position(|p| p.as_ref() == Some(&symbol));
            view.strides[d.ok_or(Obstacle::Places)?] += factor * stride;
        }
    }
    usable(&mut view, c.dtype.bytes() as i64, must_be_dense)?;
    Ok((from.container, view))
}

/// Whether operators take such a view: the elements of a row are neighbours, rows are aligned, and nothing is repeated
/// or read backwards.
/// A dimension of one element gets the stride that it would have in a dense container of the view's order.
fn usable(view: &mut View, size: i64, must_be_dense: bool) -> Result<(), Obstacle> {
    let rank = view.sizes.len();
    if rank < 4 || must_be_dense {
        // For sums of rows, operators require a dense array.
        let dense = View::dense(&view.sizes, &(0..rank).collect::<Vec<_>>());
        let same = (0..rank).all(|d| view.sizes[d] == 1 || view.strides[d] == dense.strides[d]);
        view.strides = dense.strides;
        return match same && (view.offset * size) % ALIGNMENT == 0 {
            true => Ok(()),
            false => Err(Obstacle::Gaps),
        };
    }
    let last = rank - 1;
    if view.sizes[last] > 1 && view.strides[last] != 1 {
        return Err(Obstacle::Rows);
    }
    view.strides[last] = 1;
    let several = |d: &usize| view.sizes[*d] > 1;
    let extent = (0..rank)
        .filter(several)
        .map(|d| view.sizes[d] * view.strides[d])
        .max();
    for d in 0..last {
        if view.sizes[d] == 1 {
            view.strides[d] = extent.unwrap_or(1);
        } else if view.strides[d] <= 0 {
            return Err(Obstacle::Repeated);
        } else if view.strides[d] * size % ALIGNMENT != 0 {
            return Err(Obstacle::Alignment);
        }
    }
    match view.offset * size % ALIGNMENT {
        0 => Ok(()),
        _ => Err(Obstacle::Alignment),
    }
}

#[cfg(test)]
mod tests;
