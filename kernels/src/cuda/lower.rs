//! A graph of maps as a CUDA program: kernels, launches, a memory plan.
//!
//! Kernels of equal text are kept once. Nothing here decides what is fused: each top-level map
//! becomes the launches it needs, in the graph's order. Contractions are emitted like any other map,
//! one thread for each result: correct, far from the device's speed.

use super::Kernel;
use super::emit::{self, NAME, Printed};
use super::schedule;
use crate::emit::body::{self, HalfPrecision};
use crate::emit::prepared;
use crate::lower::LowerError;
use crate::plan::{self, Buffer, MemoryPlan, Touches};
use crate::recognize::recognize;
use graph::{Graph, Node, NodeKind, Stage};
use std::collections::BTreeMap;

/// A fused graph as CUDA kernels.
#[derive(Clone, Debug)]
pub struct CudaProgram {
    /// Kernels, each text once.
    pub kernels: Vec<Kernel>,
    /// Launches in order.
    pub launches: Vec<Placed>,
    /// Bytes of each [`Buffer::Workspace`].
    pub workspace_bytes: Vec<usize>,
    /// Where containers live.
    pub memory: MemoryPlan,
    /// What each top-level map became.
    pub maps: Vec<MapInfo>,
}

/// One launch: a kernel on buffers of the memory plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Position in [`CudaProgram::kernels`].
    pub kernel: usize,
    /// Blocks, in one direction.
    pub grid: u32,
    /// Its buffers, in the kernel's order.
    pub args: Vec<Buffer>,
    /// The pass it belongs to.
    pub stage: Stage,
}

/// How a map was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapInfo {
    /// Where its operators came from.
    pub origin: String,
    /// Which generator wrote it: `loops`, or `direct` for a contraction without blocking.
    pub path: &'static str,
    /// Launches it takes.
    pub n_launches: usize,
}

/// Lowers a graph of maps (and reshapes, which become aliases).
///
/// # Errors
/// See [`LowerError`].
pub fn lower(graph: &Graph) -> Result<CudaProgram, LowerError> {
    let state = graph.single_state().ok_or(LowerError::ControlFlow)?;
    let mut program = CudaProgram {
        kernels: Vec::new(),
        launches: Vec::new(),
        workspace_bytes: Vec::new(),
        memory: MemoryPlan::default(),
        maps: Vec::new(),
    };
    let mut known: BTreeMap<String, usize> = BTreeMap::new();
    for node in state.nodes.iter().filter(|n| plan::alias(n).is_none()) {
        if let NodeKind::Library(l) = &node.kind {
            return Err(LowerError::Library {
                op: l.op.clone(),
                origin: node.origin.to_string(),
            });
        }
        let emitted = emit_map(graph, node)?;
        let path = if recognize(graph, node).is_some() {
            "direct"
        } else {
            "loops"
        };
        program.maps.push(MapInfo {
            origin: node.origin.to_string(),
            path,
            n_launches: emitted.launches.len(),
        });
        let first = program.workspace_bytes.len();
        program.workspace_bytes.extend(emitted.workspace_bytes);
        for e in emitted.launches {
            let kernel = *known.entry(e.kernel.text.clone()).or_insert_with(|| {
                program.kernels.push(named(e.kernel, program.kernels.len()));
                program.kernels.len() - 1
            });
            program.launches.push(Placed {
                kernel,
                grid: e.grid as u32,
                args: e.args.into_iter().map(|b| renumbered(b, first)).collect(),
                stage: node.stage,
            });
        }
    }
    let touches: Vec<Touches> = program
        .launches
        .iter()
        .map(|l| Touches {
            stage: l.stage,
            buffers: l.args.clone(),
        })
        .collect();
    program.memory = plan::plan_memory(graph, &touches, &program.workspace_bytes)?;
    Ok(program)
}

/// A map's own count of workspaces starts at `first` in the program.
fn renumbered(buffer: Buffer, first: usize) -> Buffer {
    match buffer {
        Buffer::Workspace(n) => Buffer::Workspace(first + n),
        container => container,
    }
}

fn named(mut kernel: Kernel, n: usize) -> Kernel {
    kernel.name = format!("sh_k{n}");
    kernel.text = kernel.text.replace(NAME, &kernel.name);
    kernel
}

/// One kernel for a map where its meaning allows, else one for each phase.
fn emit_map(graph: &Graph, node: &Node) -> Result<Printed, LowerError> {
    let origin = node.origin.to_string();
    let kernel = prepared(body::kernel_of(
        graph,
        node,
        false,
        HalfPrecision::Converted,
    )?);
    if let Some(scheduled) = schedule::schedule(kernel, false) {
        return Ok(emit::print(&scheduled, &origin));
    }
    let kernel = prepared(body::kernel_of(
        graph,
        node,
        true,
        HalfPrecision::Converted,
    )?);
    let mut all = Printed::default();
    for phase in &kernel.phases {
        let part = prepared(body::Kernel {
            phases: vec![phase.clone()],
            ..kernel.clone()
        });
        let unsplit = || LowerError::Unsplit {
            origin: origin.clone(),
        };
        let scheduled = schedule::schedule(part, true).ok_or_else(unsplit)?;
        all.append(emit::print(&scheduled, &origin));
    }
    Ok(all)
}
