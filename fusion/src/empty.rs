//! Takes loops without points out of a graph.
//!
//! Before: `map [b < 2, i < 0] { %y[b] (sum) = %x[b, i] }`. After: `map [d0 < 2] { %y[d0] = 0.0 }`.
//! Before: `map [i < 0] { %y[i] = %x[i] }`. After: nothing; a container without elements needs no writer.
//! Legal because such a map runs no tasklet. What it would have combined into a container is the identity of the
//! resolution there. Saves kernels, and spares every later pass and both back ends sizes of zero.

use crate::unit::constant;
use graph::{
    ContainerId, Expr, Graph, Map, Memlet, Node, NodeKind, Param, Reduction, Schedule, SymExpr,
    Symbol, Tasklet,
};
use std::collections::{BTreeMap, BTreeSet};

/// Drops what runs at no point, and fills what only that would have combined into.
pub(crate) fn drop_empty(graph: &Graph, nodes: &mut Vec<Node>) {
    *nodes = std::mem::take(nodes)
        .into_iter()
        .flat_map(|node| without_empty_loops(graph, node))
        .collect();
}

fn without_empty_loops(graph: &Graph, mut node: Node) -> Vec<Node> {
    if !has_empty_loops(&node) {
        return vec![node];
    }
    let combined = resolutions(&node);
    let stays = drop_inside(&mut node);
    let written: BTreeSet<ContainerId> = match stays {
        true => node.writes().into_iter().collect(),
        false => BTreeSet::new(),
    };
    let has_elements = |id: &ContainerId| {
        let shape = &graph.container(*id).shape;
        shape.iter().all(|size| constant(size) > 0)
    };
    let filled = combined
        .into_iter()
        .filter(|(id, _)| !written.contains(id) && has_elements(id))
        .map(|(id, reduction)| fill(graph, id, reduction, &node));
    let filled: Vec<Node> = filled.collect();
    filled.into_iter().chain(stays.then_some(node)).collect()
}

fn is_empty(map: &Map) -> bool {
    map.params.iter().any(|p| constant(&p.size) < 1)
}

fn has_empty_loops(node: &Node) -> bool {
    match &node.kind {
        NodeKind::Map(map) => is_empty(map) || map.body.iter().any(has_empty_loops),
        _ => false,
    }
}

/// Drops the empty loops inside a node. Returns whether anything is left of it.
fn drop_inside(node: &mut Node) -> bool {
    let NodeKind::Map(map) = &mut node.kind else {
        return true;
    };
    map.body.retain_mut(drop_inside);
    !is_empty(map) && !map.body.is_empty()
}

/// The containers that a node combines values into.
fn resolutions(node: &Node) -> BTreeMap<ContainerId, Reduction> {
    let mut found = BTreeMap::new();
    node.visit_tasklets(&mut |tasklet| {
        for (memlet, _) in &tasklet.outputs {
            if let Some(reduction) = memlet.conflict {
                found.insert(memlet.container, reduction);
            }
        }
    });
    found
}

/// A map that gives every element the identity of a resolution.
fn fill(graph: &Graph, id: ContainerId, reduction: Reduction, like: &Node) -> Node {
    let container = graph.container(id);
    let params: Vec<Param> = container
        .shape
        .iter()
        .enumerate()
        .map(|(d, size)| Param {
            name: Symbol::new(format!("d{d}")),
            size: size.clone(),
        })
        .collect();
    let at = params.iter().map(|p| SymExpr::from(&p.name));
    let written = Memlet::new(id, at.collect::<Vec<_>>());
    let value = Expr::Const(reduction.identity(container.dtype));
    let tasklet = Node {
        kind: NodeKind::Tasklet(Tasklet {
            inputs: Vec::new(),
            outputs: vec![(written, value)],
        }),
        ..like.clone()
    };
    Node {
        kind: NodeKind::Map(Map {
            params,
            body: vec![tasklet],
            schedule: Schedule::Default,
        }),
        ..like.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::drop_empty;
    use graph::Graph;
    use models::{results, text_graph as graph};

    /// The graph without empty loops, whose result `%y` is the same as before.
    fn dropped(containers: &str, nodes: &str) -> Graph {
        let mut graph = graph(containers, nodes, "%y");
        let before = results(&graph);
        let mut nodes = std::mem::take(&mut graph.last_state().nodes);
        drop_empty(&graph, &mut nodes);
        graph.last_state().nodes = nodes;
        graph::verify(&graph).unwrap_or_else(|e| panic!("{e:?}\n{graph}"));
        assert_eq!(before, results(&graph), "{graph}");
        assert!(!graph.to_string().contains("< 0"), "{graph}");
        graph
    }

    fn n_nodes(graph: &Graph) -> usize {
        graph.single_state().map_or(0, |state| state.nodes.len())
    }

    #[test]
    fn what_is_combined_over_nothing_is_the_identity() {
        for (reduction, identity) in [("sum", 0.0), ("prod", 1.0), ("max", f64::NEG_INFINITY)] {
            let graph = dropped(
                "%x: f32[2, 0] input\n%y: f32[2]",
                &format!("map [b < 2, i < 0] {{ tasklet %y[b] ({reduction}) = $0 from %x[b, i] }}"),
            );
            assert_eq!(results(&graph)[0].to_f64(), [identity, identity]);
        }
    }

    #[test]
    fn a_container_without_elements_needs_no_writer() {
        let graph = dropped(
            "%x: f32[3, 0] input\n%t: f32[3, 0]\n%y: f32[3]",
            "map [b < 3, i < 0] { tasklet %t[b, i] = $0 * 2.0 from %x[b, i] }
             map [b < 3, i < 0] { tasklet %y[b] (sum) = $0 from %t[b, i] }",
        );
        assert_eq!(n_nodes(&graph), 1);
        let graph = dropped(
            "%x: f32[0] input\n%y: f32[0]",
            "map [i < 0] { tasklet %y[i] = $0 from %x[i] }",
        );
        assert_eq!(n_nodes(&graph), 0);
    }

    #[test]
    fn the_empty_part_of_a_concatenation_goes() {
        let graph = dropped(
            "%a: f32[2] input\n%b: f32[0] input\n%y: f32[2]",
            "map [] {
               map [i < 2] { tasklet %y[i] = $0 from %a[i] }
               map [i < 0] { tasklet %y[2 + i] = $0 from %b[i] }
             }",
        );
        assert_eq!(n_nodes(&graph), 1);
    }

    #[test]
    fn a_sum_whose_other_part_has_points_needs_no_fill() {
        let graph = dropped(
            "%a: f32[2] input\n%b: f32[0] input\n%y: f32[2]",
            "map [] {
               map [i < 2] { tasklet %y[i] (sum) = $0 from %a[i] }
               map [i < 2, j < 0] { tasklet %y[i] (sum) = $0 from %b[j] }
             }",
        );
        assert_eq!(n_nodes(&graph), 1);
    }

    #[test]
    fn a_graph_with_points_everywhere_is_as_it_was() {
        let graph = dropped(
            "%x: f32[2] input\n%y: f32[2]",
            "map [i < 2] { tasklet %y[i] = $0 from %x[i] }",
        );
        assert_eq!(n_nodes(&graph), 1);
    }
}
