//! C emission of maps.
//!
//! A map of the graph goes through four forms: [`body::Kernel`] (numbers instead of symbols, offsets
//! instead of memlets), merged nests, [`schedule::Scheduled`] (parallel loops, vector loops, blocks),
//! and C text. One map may need several launches: filling, the kernel, combining the threads' parts,
//! or one for each phase where there are too few outer points to share out.
//!
//! Never compiles, never plans buffers, and knows operators by no name.

pub mod body;
mod columns;
mod epilogue;
mod frame;
pub mod index;
mod leaf;
pub mod merge;
mod prologue;
mod reduce;
mod rows;
pub mod scalar;
mod schedule;
pub mod text;
mod tile;
pub mod values;
mod widen;

use crate::lower::LowerError;
use body::{Body, Kernel};
use graph::{ContainerId, Graph, Node};

pub(crate) use columns::{Around, emit_columns};
pub(crate) use epilogue::{Buffers, Epilogue, ProductDim, ProductRoles, emit_epilogue};
pub(crate) use prologue::emit_prologue;
pub(crate) use scalar::INTEGER_SUPPORT;
pub(crate) use text::comment;

/// Stands for the kernel's name in [`EmittedFunction::text`].
pub(crate) const NAME: &str = "@NAME@";

/// What a launch is given, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arg {
    /// A container's memory.
    Container(ContainerId),
    /// Memory that the launches of one [`Emitted`] share: the threads' parts.
    Workspace,
}

/// One C function and its arguments.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EmittedFunction {
    /// Added to the kernel's name.
    pub(crate) suffix: &'static str,
    /// C text with [`NAME`] for the kernel's name.
    pub(crate) text: String,
    pub(crate) args: Vec<Arg>,
}

/// The launches of one kernel, in order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Emitted {
    pub(crate) functions: Vec<EmittedFunction>,
    /// Size of what the threads share in [`Arg::Workspace`].
    pub(crate) workspace_bytes_shared: usize,
    /// Additional size of [`Arg::Workspace`] for each thread.
    pub(crate) workspace_bytes_per_thread: usize,
    /// Scratch for each thread.
    pub(crate) scratch_bytes: usize,
}

/// Emits a top-level map for `threads` threads: one [`Emitted`], or one for each phase.
///
/// # Errors
/// A size that is not a number, an element type without C, a library node inside.
pub(crate) fn emit_map(
    graph: &Graph,
    node: &Node,
    threads: usize,
) -> Result<Vec<Emitted>, LowerError> {
    let kernel = prepared(body::kernel_of(graph, node, false)?);
    if let Some(scheduled) = schedule::schedule(kernel, threads) {
        return Ok(vec![frame::print(&scheduled)]);
    }
    let kernel = prepared(body::kernel_of(graph, node, true)?);
    let mut emitted = Vec::new();
    for phase in &kernel.phases {
        let part = prepared(Kernel {
            phases: vec![phase.clone()],
            ..kernel.clone()
        });
        let scheduled = schedule::schedule(part, threads).ok_or_else(|| LowerError::Unsplit {
            origin: node.origin.to_string(),
        })?;
        emitted.push(frame::print(&scheduled));
    }
    Ok(emitted)
}

/// Merges nests; loops around a single sequence of nests become outer loops.
pub fn prepared(mut kernel: Kernel) -> Kernel {
    kernel.phases = merge::merge_nests(kernel.phases);
    while let [only] = kernel.phases.as_mut_slice()
        && let Body::Phases(inner) = &mut only.body
    {
        let inner = std::mem::take(inner);
        kernel.outer.append(&mut only.loops);
        kernel.phases = inner;
    }
    kernel
}
