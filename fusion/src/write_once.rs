//! Drops conflict resolutions that resolve nothing.
//!
//! Derived gradients are sums in general form; where every element is written exactly once, the sum
//! is a plain write, which other maps may then inline. This file never changes what is computed.

use graph::range::{Ranges, undetermined_params};
use graph::{ContainerId, Graph, Index, Memlet, Node, NodeKind, SymExpr};

/// Before: `map [i < n] { %y[i] (sum) = e }` with `%y: [n]`. After: `map [i < n] { %y[i] = e }`.
///
/// Legal when different points write different elements and there are as many points as elements:
/// each element is then the resolution's identity combined with one value, which is that value.
pub(crate) fn drop_idle_conflicts(graph: &Graph, nodes: &mut [Node]) {
    for node in nodes {
        let mut written = Vec::new();
        node.visit_containers(&mut |id, write| {
            if write {
                written.push(id);
            }
        });
        visit(graph, &written, &mut Ranges::new(), node);
    }
}

fn visit(graph: &Graph, written: &[ContainerId], ranges: &mut Ranges, node: &mut Node) {
    match &mut node.kind {
        NodeKind::Library(_) => {}
        NodeKind::Map(map) => {
            let mut inner = ranges.clone();
            let params = map.params.iter().map(|p| (p.name.clone(), p.size.clone()));
            inner.extend(params);
            for n in &mut map.body {
                visit(graph, written, &mut inner, n);
            }
        }
        NodeKind::Tasklet(tasklet) => {
            for (memlet, _) in &mut tasklet.outputs {
                let writers = written.iter().filter(|id| **id == memlet.container);
                if writers.count() == 1 && is_onto(graph, memlet, ranges) {
                    memlet.conflict = None;
                }
            }
        }
    }
}

/// Whether the points of `ranges` and the elements of the container are in one-to-one relation.
fn is_onto(graph: &Graph, memlet: &Memlet, ranges: &Ranges) -> bool {
    let subset: Option<Vec<SymExpr>> = memlet
        .subset
        .iter()
        .map(|index| match index {
            Index::At(e) => Some(e.clone()),
            Index::Data(_) => None,
        })
        .collect();
    let elements = SymExpr::product(&graph.container(memlet.container).shape);
    memlet.fill.is_none()
        && SymExpr::product(ranges.values()) == elements
        && subset.is_some_and(|s| undetermined_params(&s, ranges).is_empty())
}

#[cfg(test)]
mod tests {
    use super::drop_idle_conflicts;
    use graph::{Graph, Node, parse};

    fn conflicts_left(shape: &str, params: &str, target: &str) -> usize {
        left_of(
            shape,
            &format!("map [{params}] {{ tasklet %y[{target}] (sum) = $0 from %x[0] }}"),
        )
    }

    fn left_of(shape: &str, node: &str) -> usize {
        let text = format!(
            "graph \"g\" {{\n%x: f32[4] input\n%ids: i64[4] input\n%y: f32[{shape}]\n\
             inputs %x, %ids\nstate {{\n{node}\n}}\noutputs %y\n}}\n"
        );
        let mut graph: Graph = parse(&text).unwrap();
        let mut nodes: Vec<Node> = std::mem::take(&mut graph.last_state().nodes);
        drop_idle_conflicts(&graph, &mut nodes);
        let mut left = 0;
        for n in &nodes {
            n.visit_tasklets(&mut |t| left += usize::from(t.outputs[0].0.conflict.is_some()));
        }
        left
    }

    #[test]
    fn a_sum_of_one_value_is_a_write() {
        assert_eq!(conflicts_left("4", "i < 4", "i"), 0);
        assert_eq!(conflicts_left("2, 3", "i < 3, j < 2", "j, i"), 0);
        assert_eq!(conflicts_left("6", "i < 3, j < 2", "2*i + j"), 0);
    }

    #[test]
    fn a_sum_that_meets_an_element_twice_or_never_stays() {
        assert_eq!(conflicts_left("4", "i < 4, j < 2", "i"), 1);
        assert_eq!(conflicts_left("8", "i < 4", "2*i"), 1);
        assert_eq!(conflicts_left("4", "i < 2, j < 2", "i + j"), 1);
    }

    #[test]
    fn a_sum_whose_place_is_not_known_stays() {
        let scattered = "map [i < 4] { tasklet %y[$1] (sum) = $0 from %x[i], %ids[i] }";
        assert_eq!(left_of("4", scattered), 1);
        let dropped = "map [i < 4] { tasklet %y[i - 1 | 0.0] (sum) = $0 from %x[i] }";
        assert_eq!(left_of("4", dropped), 1);
    }

    #[test]
    fn a_sum_of_several_writers_stays() {
        let twice = "map [] {
               map [i < 4] { tasklet %y[i] (sum) = $0 from %x[i] }
               map [i < 4] { tasklet %y[i] (sum) = $0 * 2.0 from %x[i] }
             }";
        assert_eq!(left_of("4", twice), 2);
        let once = "map [] { map [i < 4] { tasklet %y[i] (sum) = $0 from %x[i] } }";
        assert_eq!(left_of("4", once), 0);
    }
}
