//! Tile chains on a GPU: products whose results are used at the same points only, in one kernel that
//! never stores them.
//!
//! `T[r,c] = Σ_d X[r,d]·Y[c,d]` (one or two), element-wise work on tiles of them, reductions over `c`
//! to a scalar for each row, and `O[r,e] = Σ_c g(T…)[r,c]·Z[c,e]` (any number): attention, forward and
//! backward, among others; tiles that others read are stored besides. A block owns rows and sweeps over
//! the columns, except those of which it sees nothing; where a value needs a reduction that must be
//! complete before, the columns are swept again and the products computed again, unless a running
//! maximum will do (FlashAttention, arXiv 2205.14135 and 2307.08691). Sums are fp32 in the registers of
//! warp products, and the accumulators of one product are the left factor of the next.
//!
//! Owns the recognition of such maps from their memlets, tiles and text. Never decides what is
//! chained: that is fusion's.

mod element;
mod form;
mod hidden;
mod kernel;
mod running;
mod store;
mod sweep;
mod tile;

use super::Emitted;
use graph::{Graph, Node};
use kernels::emit::body::{self};
use kernels::lower::LowerError;

/// One kernel for a chain.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EmittedChain {
    /// Its launch.
    pub(super) launch: Emitted,
    /// Multiplications and additions of all products, as often as they are computed.
    pub(super) flops: u64,
}

/// The kernel of a top-level map that is a chain; `None` if it is not one, or one of a form that has no
/// kernel here.
///
/// # Errors
/// As for any map.
pub(super) fn emit(
    name: &str,
    graph: &Graph,
    node: &Node,
) -> Result<Option<EmittedChain>, LowerError> {
    let body = body::kernel_of(graph, node, false)?;
    Ok(form::form(graph, &body).and_then(|form| kernel::emit(name, &form)))
}
