//! Lookups that loops cannot do with whole vectors, and when to store their results.
//!
//! Before: `t[h, i, j] = table[ids[i, j], h]`; each of several loops over `j`, for each of many batches, reads `t`.
//! If `t` were inlined, each loop would look up one element at a time, which takes about ten times as long as reading
//! an element of an array. So `t` is stored if its readers have more points than it has elements. An example are the
//! biases of relative positions in attention. A lookup of whole rows, as in an embedding, stays inlined.

use super::Obstacle;
use crate::unit::{elements, mentions, points, unit};
use graph::{ContainerId, Graph, Index, Node, Tasklet};

/// Why a definition with lookups is not inlined, or `None`. `readers` are the readers with the definition inlined.
pub(super) fn obstacle(graph: &Graph, id: ContainerId, readers: &[&Node]) -> Option<Obstacle> {
    let fetched = |node: &&Node| {
        let (map, _) = unit(node).filter(|(_, tasklet)| is_scattered(tasklet))?;
        Some(points(map))
    };
    let lookups: i64 = readers.iter().filter_map(fetched).sum();
    let elements = elements(graph, id).max(1);
    (lookups > elements).then(|| Obstacle::Lookup(lookups / elements))
}

/// Whether the loop along contiguous elements looks at another row of a table in each step.
fn is_scattered(tasklet: &Tasklet) -> bool {
    let is_row = |i: usize| {
        let mut reads = tasklet.inputs.iter();
        reads.any(|m| m.subset.contains(&Index::Data(i)))
    };
    let rows: Vec<usize> = (0..tasklet.inputs.len()).filter(|i| is_row(*i)).collect();
    let arrays = tasklet.inputs.iter().enumerate();
    let arrays = arrays.filter(|(i, _)| !rows.contains(i)).map(|(_, m)| m);
    let arrays = arrays.chain(tasklet.outputs.iter().map(|(m, _)| m));
    let along: Vec<_> = arrays
        .filter(|m| !m.subset.iter().any(|i| matches!(i, Index::Data(_))))
        .filter_map(|m| match m.subset.last() {
            Some(Index::At(position)) => Some(position.symbols()),
            _ => None,
        })
        .flatten()
        .collect();
    let moves = |i: &usize| along.iter().any(|s| mentions(&tasklet.inputs[*i], s));
    rows.iter().any(moves)
}
