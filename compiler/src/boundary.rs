//! Separates the caller's buffers: no result shares its bytes with an input or another result.
//!
//! A model may return its input reshaped, or one value twice; the gradient of an addition is the
//! incoming gradient itself. Each such result becomes a copy.
//!
//! before  `y = reshape(x); return y`   after  `y = reshape(x); y' = y[i…]; return y'`

use crate::error::CompileError;
use graph::{Builder, ContainerId, Expr, Graph, Lifetime, Node, NodeKind, Origin, Stage};
use ops::OpBuilder;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Adds copies to a graph whose outputs from position `n_forward` on belong to the backward pass.
pub(crate) fn separate(graph: &mut Graph, n_forward: usize) -> Result<(), CompileError> {
    let Some(state) = graph.single_state() else {
        return Ok(());
    };
    let roots = roots(&state.nodes);
    let root = |id: ContainerId| roots.get(&id).copied().unwrap_or(id);
    let mut taken: BTreeSet<ContainerId> = graph.inputs.iter().map(|id| root(*id)).collect();
    let mut shared = Vec::new();
    for (position, output) in graph.outputs.iter().enumerate() {
        let at = root(output.container);
        let is_own = graph.container(at).lifetime == Lifetime::Transient;
        if !is_own || !taken.insert(at) {
            shared.push(position);
        }
    }
    let mut copies: [Vec<Node>; 2] = Default::default();
    for position in shared {
        let backward = position >= n_forward;
        let stage = if backward {
            Stage::Backward
        } else {
            Stage::Forward
        };
        let of = graph.outputs[position].container;
        let origin = Arc::new(Origin {
            node: format!("copy of {}", graph.container(of).name),
            ..Origin::default()
        });
        let mut builder = Builder::new(graph, origin, stage);
        let copy = builder.elementwise(Expr::In(0), &[of])?;
        copies[usize::from(backward)].append(&mut builder.nodes);
        graph.outputs[position].container = copy;
    }
    let [forward, backward] = copies;
    let nodes = &mut graph.last_state().nodes;
    let first_backward = nodes
        .iter()
        .position(|n| n.stage != Stage::Forward)
        .unwrap_or(nodes.len());
    nodes.splice(first_backward..first_backward, forward);
    nodes.extend(backward);
    Ok(())
}

/// For each result of a reshape, the container whose bytes it shares.
fn roots(nodes: &[Node]) -> BTreeMap<ContainerId, ContainerId> {
    let mut roots = BTreeMap::new();
    for node in nodes {
        let NodeKind::Library(library) = &node.kind else {
            continue;
        };
        let (Some(Some(x)), Some(Some(y))) = (library.inputs.first(), library.outputs.first())
        else {
            continue;
        };
        if library.op == "reshape" {
            let root = roots.get(x).copied().unwrap_or(*x);
            roots.insert(*y, root);
        }
    }
    roots
}

#[cfg(test)]
mod tests {
    use super::*;
    use graph::{Attr, DType, SymExpr};
    use ops::attrs;

    fn sizes(list: &[i64]) -> Vec<SymExpr> {
        list.iter().map(|n| SymExpr::constant(*n)).collect()
    }

    #[test]
    fn results_that_share_bytes_are_copied() {
        let mut graph = Graph::new("shared");
        let x = graph.add_input("x", DType::F32, sizes(&[2, 3]), Lifetime::Input);
        let mut builder = Builder::new(&mut graph, Arc::default(), Stage::Forward);
        let flat = attrs([("shape", Attr::Sizes(sizes(&[6])))]);
        let view = builder.op1("reshape", &[x], flat).unwrap();
        let own = builder.elementwise(Expr::In(0).exp(), &[x]).unwrap();
        let nodes = builder.nodes;
        graph.last_state().nodes = nodes;
        for id in [view, own, own, x] {
            graph.add_output(id);
        }
        separate(&mut graph, 4).unwrap();
        let outputs: Vec<_> = graph.outputs.iter().map(|o| o.container).collect();
        assert_eq!(outputs[1], own);
        assert!(outputs[0] != view && outputs[2] != own && outputs[3] != x);
        let distinct: BTreeSet<_> = outputs.iter().collect();
        assert_eq!(distinct.len(), 4);
        assert_eq!(graph.last_state().nodes.len(), 5);
    }
}
