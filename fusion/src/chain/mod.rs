//! Chaining: products whose results are used at the same points only become part of the kernels that use
//! them, and are computed again where a later one needs them.
//!
//! Before: `map (i,j,d): t[i,j] += q[i,d]·k[j,d]`, `map (i,j): m[i] max= t[i,j]`, `map (i,j): p[i,j] =
//! exp(t[i,j] − m[i])`, `map (i,j,e): o[i,e] += p[i,j]·v[j,e]`, and for gradients `map (i,j,e): w[j,e]
//! += p[i,j]·g[i,e]`.
//! After: `kernel { t; m; p; o }` and `kernel { t'; p'; w }` with `t`, `p`, `t'`, `p'` local: tiles of them
//! live in registers, and what passes between the kernels is `m`.
//!
//! Legal when all that reads a tile does so point by point, sums it over rows or columns, or multiplies
//! it and sums over one of the two; when no result of the graph is a tile; and when no other kernel must
//! run between what becomes one. Pays when the kernels' operands, read again for every copy, are
//! fewer bytes than the tiles. Papers: FlashAttention (arXiv 2205.14135, 2307.08691) for the
//! schedule, arXiv 2007.00072 for why. Needs a target that has such kernels.

mod find;
mod write;

use crate::decision::Decision;
use find::Chain;
use graph::{ContainerId, Graph, Node};
use std::collections::BTreeSet;

/// Widest operand along which a product is summed and widest result: rows of both stay in registers.
const MOST_WIDTH: i64 = 128;
/// Numbers that are copied together.
const VECTOR: i64 = 8;
/// Rows of a block of threads.
const ROWS: i64 = 64;
/// Fewest rows and columns worth a tile.
const LEAST: i64 = 16;

/// Why products are not chained.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Obstacle {
    #[error("`{0}` is a result of the graph")]
    Result(String),
    #[error(
        "{0} uses `{1}` neither point by point nor in a sum over its rows or its columns, of which one \
         may be of products"
    )]
    Use(String, String),
    #[error("its factors have no common type of 16 bits")]
    Types,
    #[error("`{0}` has {1} numbers side by side; kernels keep multiples of 8 up to 128")]
    Width(String, i64),
    #[error("`{0}` does not hold side by side what is summed or stored along")]
    Strided(String),
    #[error("its products do not have the same rows and columns")]
    Rows,
    #[error("tiles of {0} x {1} numbers are too small")]
    Small(i64, i64),
    #[error("{0} blocks of threads would each go over {1} columns")]
    Blocks(i64, i64),
    #[error("another kernel must run between its parts")]
    Between,
    #[error("its kernels would move {0} bytes more than what they take the place of")]
    Bytes(i64),
}

/// Puts chains of products among `nodes` into kernels, in an order in which producers come first.
pub(crate) fn chain(
    graph: &mut Graph,
    mut nodes: Vec<Node>,
    decisions: &mut Vec<Decision>,
) -> Vec<Node> {
    let mut tried: BTreeSet<ContainerId> = BTreeSet::new();
    while let Some(seed) = find::seed(graph, &nodes, &tried) {
        let Some(found) = Chain::grow(graph, &nodes, seed) else {
            tried.insert(seed);
            continue;
        };
        tried.extend(&found.tiles);
        tried.insert(seed);
        let origin = found.origin(&nodes).clone();
        let tiles: i64 = found.tile_bytes(graph);
        match found
            .checked(graph, &nodes)
            .and_then(|kernels| write::write(graph, &nodes, &found, &kernels))
        {
            Ok(done) => {
                let sentence = format!(
                    "{} kernels instead of {} keep {tiles} bytes of products in registers",
                    done.n_kernels, done.n_replaced
                );
                decisions.push(Decision::applied("chain", &origin, sentence, done.saved));
                *graph = done.graph;
                nodes = done.nodes;
            }
            Err(obstacle) => {
                let sentence = format!("is not chained: {obstacle}");
                decisions.push(Decision::refused("chain", &origin, sentence, tiles));
            }
        }
    }
    nodes
}

#[cfg(test)]
mod tests;
