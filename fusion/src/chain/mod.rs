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
//! it and sums over rows or columns; and when no other kernel must run between what becomes one. A
//! tile that is read otherwise, or is a result of the graph, is also stored by one of the kernels. Heads of
//! queries may share heads of keys, so one factor may have several dimensions that the other lacks. Pays when the
//! kernels' operands, read again for every copy, are fewer bytes than the tiles. Papers: FlashAttention (arXiv
//! 2205.14135, 2307.08691) for the schedule, arXiv 2007.00072 for why. Needs a target that has such kernels.

mod find;
mod part;
mod prepare;
mod write;

use crate::decision::{Applied, Decision, Refusal};
use find::Chain;
use graph::{ContainerId, DType, Graph, Node, Place, Recipe, Rewrite};
use prepare::Prepared;
use std::collections::BTreeSet;
use write::Written;

// What the kernels of `cuda_kernels::chain` can do; `compiler/tests/cuda_chains.rs` holds the two together.

/// Largest width of an operand that a product sums along, and of a result: rows of both stay in registers.
const MOST_WIDTH: i64 = 128;
/// Largest sum of the widths of all operands that a kernel's products sum along, and of the widths of all results.
const MOST_TOGETHER: i64 = 2 * MOST_WIDTH;
/// Numbers that are copied together.
const VECTOR: i64 = 8;
/// Rows of a block of threads.
const ROWS: i64 = 64;
/// Fewest rows and columns worth a tile.
const LEAST: i64 = 16;

/// Why products are not chained.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The messages say it.
pub enum Obstacle {
    #[error("{0} uses `{1}` and another product's numbers at different points")]
    Use(String, String),
    #[error("its factors have no common type of 16 bits")]
    Types,
    #[error(
        "`{0}` is {1}; tiles are of at most 32 bits, and those that are multiplied of their factors' type"
    )]
    Tile(String, DType),
    #[error("`{0}` has {1} numbers side by side; kernels keep multiples of 8 up to 128")]
    Width(String, i64),
    #[error("its {0} are {1} numbers wide together; kernels keep up to 256")]
    Together(&'static str, i64),
    #[error("`{0}` does not hold side by side what is summed or stored along")]
    Strided(String),
    #[error("its products do not have the same rows and columns")]
    Rows,
    #[error("`{0}` is read from memory, and no kernel of its pass makes it")]
    Stored(String),
    #[error("tiles of {0} x {1} numbers are too small")]
    Small(i64, i64),
    #[error("{0} blocks of threads would each go over {1} columns")]
    Blocks(i64, i64),
    #[error("another kernel must run between its parts")]
    Between,
    #[error("its kernels would move {0} bytes more than what they take the place of")]
    Bytes(i64),
    #[error("the recipe forbids it")]
    ByRecipe,
}

/// Puts chains of products among `nodes` into kernels, in an order in which producers come first.
pub(crate) fn chain(
    graph: &mut Graph,
    mut nodes: Vec<Node>,
    recipe: &Recipe,
    decisions: &mut Vec<Decision>,
) -> Vec<Node> {
    let mut tried: BTreeSet<ContainerId> = BTreeSet::new();
    while let Some(done) = chain_one(graph, &nodes, &mut tried, recipe, decisions) {
        *graph = done.graph;
        nodes = done.nodes;
    }
    nodes
}

/// The first chain that is possible and pays, beginning with the largest products.
fn chain_one(
    graph: &Graph,
    nodes: &[Node],
    tried: &mut BTreeSet<ContainerId>,
    recipe: &Recipe,
    decisions: &mut Vec<Decision>,
) -> Option<Written> {
    for seed in find::seeds(graph, nodes) {
        if !tried.insert(seed) {
            continue;
        }
        let Some(found) = Chain::grow(graph, nodes, seed) else {
            continue;
        };
        tried.extend(&found.tiles);
        let first = &nodes[found.first()];
        let place = Place::new(Rewrite::Chain, first, &graph.container(seed).name);
        let tile_bytes = found.tile_bytes(graph);
        let done = match recipe.override_for(|| place.clone()) {
            Some(false) => Err(Obstacle::ByRecipe),
            _ => written(graph, nodes, &found, seed),
        };
        match done {
            Ok(done) => {
                let applied = Applied::Chained {
                    n_kernels: done.n_kernels,
                    n_replaced: done.n_replaced,
                    tile_bytes,
                    n_stored: done.n_stored,
                    tiles: done.tiles.clone(),
                };
                let decision = Decision::applied(place, &first.origin, applied, done.saved);
                decisions.push(decision);
                return Some(done);
            }
            Err(obstacle) => {
                let refusal = Refusal::Unchained(obstacle);
                decisions.push(Decision::refused(place, &first.origin, refusal, tile_bytes));
            }
        }
    }
    None
}

fn written(
    graph: &Graph,
    nodes: &[Node],
    found: &Chain,
    seed: ContainerId,
) -> Result<Written, Obstacle> {
    found.check_factors(graph, nodes)?;
    let prepared = Prepared::new(graph, nodes, found)?;
    let chain = Chain::grow(&prepared.graph, &prepared.nodes, seed).ok_or(Obstacle::Rows)?;
    let parts = chain.parts(&prepared.graph, &prepared.nodes)?;
    write::write(graph, nodes, &prepared, &chain, &parts)
}

#[cfg(test)]
mod tests;
