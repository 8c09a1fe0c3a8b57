//! Expansion of a whole graph: operators become maps.
//!
//! An operator may expand into simpler operators, so expansion is repeated until only maps,
//! `reshape` nodes (which fusion turns into shared containers) and nodes that are computed whole
//! ([`Library::computed_by`]) remain.

use crate::op::{Call, OpError};
use crate::registry;
use graph::{Block, Builder, Graph, Library, Node, NodeKind, State};

/// Most rounds of expansion. If more are needed, an operator expands into itself.
const MAX_DEPTH: usize = 16;

/// Replaces every library node with its expansion, which keeps origin and stage. `reshape` and nodes
/// that are computed whole ([`Library::computed_by`]) stay.
///
/// # Errors
/// An operator is unknown, or its expansion refuses.
pub fn expand_all(graph: &mut Graph) -> Result<(), OpError> {
    let mut body = std::mem::take(&mut graph.body);
    let result = body.iter_mut().try_for_each(|b| expand_block(graph, b));
    graph.body = body;
    result
}

fn expand_block(graph: &mut Graph, block: &mut Block) -> Result<(), OpError> {
    match block {
        Block::State(state) => expand_state(graph, state),
        Block::Loop(l) => l.body.iter_mut().try_for_each(|b| expand_block(graph, b)),
        Block::Branch(b) => {
            let blocks = b.then.iter_mut().chain(&mut b.otherwise);
            blocks.into_iter().try_for_each(|b| expand_block(graph, b))
        }
    }
}

fn expand_state(graph: &mut Graph, state: &mut State) -> Result<(), OpError> {
    for _ in 0..MAX_DEPTH {
        let mut done = true;
        let mut nodes = Vec::with_capacity(state.nodes.len());
        for node in std::mem::take(&mut state.nodes) {
            match &node.kind {
                NodeKind::Library(library) if expands(library) => {
                    let mut builder = Builder::new(graph, node.origin.clone(), node.stage);
                    let call = Call::of(builder.graph, library);
                    registry::find(&library.op)?.expand(&call, &mut builder)?;
                    done &= !builder.nodes.iter().any(is_operator);
                    nodes.append(&mut builder.nodes);
                }
                _ => nodes.push(node),
            }
        }
        state.nodes = nodes;
        if done {
            return Ok(());
        }
    }
    let stuck = state.nodes.iter().find(|n| is_operator(n));
    Err(OpError::Unsupported {
        op: stuck.map_or_else(String::new, |n| n.origin.to_string()),
        what: "an expansion that ends".into(),
    })
}

fn is_operator(node: &Node) -> bool {
    matches!(&node.kind, NodeKind::Library(l) if expands(l))
}

fn expands(library: &Library) -> bool {
    library.op != "reshape" && library.computed_by().is_none()
}
