//! A CUDA program as two passes, forward and backward, with the place of every buffer.
//!
//! Owns what both ways of running a program share: which launches a pass has, where each argument
//! lies (the caller's buffer, arena, saved block, constant), how many bytes it has, the bytes of
//! constants. Never runs anything.

use super::LaunchOp;
use super::emulate::Memory;
use super::lower::CudaProgram;
use graph::{ContainerId, Graph, Lifetime, Stage, Tensor};
use kernels::plan::{self, Buffer, PlanError};
use kernels::run::{BufferRef, ExternalSpec};

/// Alignment in bytes that every buffer has: a vector of 16 bytes is the widest access.
pub const ALIGNMENT: u64 = 16;

/// One argument of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    /// Where it lies.
    pub at: BufferRef,
    /// Its size in bytes.
    pub bytes: usize,
    /// The container or workspace.
    pub name: String,
}

/// One launch with the places of its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedLaunch {
    /// What runs, by its position in the program.
    pub work: LaunchOp,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared_bytes: u32,
    /// Its buffers, in the order of [`CudaProgram::params`].
    pub args: Vec<Argument>,
    /// Whether it writes to the saved block.
    pub writes_saved: bool,
    /// The part of the model that it computes; kernels of equal text serve several.
    pub origin: String,
}

/// One pass: its launches in order, and the memory that they need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Launches in order.
    pub launches: Vec<PlacedLaunch>,
    /// The caller's buffers: inputs of the graph, then its outputs.
    pub externals: Vec<ExternalSpec>,
    /// Size of the arena in bytes.
    pub arena_bytes: usize,
    /// Size of the block between the passes in bytes.
    pub saved_bytes: usize,
    /// Alignment in bytes of the address of every buffer; 0: any.
    pub alignment: u64,
}

/// Splits a program into its forward and its backward pass.
///
/// # Errors
/// A size without a value.
pub fn passes(graph: &Graph, program: &CudaProgram) -> Result<[Pass; 2], PlanError> {
    Ok([pass(graph, program, false)?, pass(graph, program, true)?])
}

fn pass(graph: &Graph, program: &CudaProgram, backward: bool) -> Result<Pass, PlanError> {
    let memory = &program.memory;
    let mut pass = Pass {
        arena_bytes: match backward {
            true => memory.backward_arena_bytes,
            false => memory.forward_arena_bytes,
        },
        saved_bytes: memory.saved_bytes,
        alignment: ALIGNMENT,
        ..Pass::default()
    };
    let slots = graph.inputs.len() + graph.outputs.len();
    let unused = ExternalSpec {
        bytes: 0,
        written: false,
    };
    pass.externals = vec![unused; slots];
    for launch in &program.launches {
        if (launch.stage != Stage::Forward) != backward {
            continue;
        }
        let mut placed = PlacedLaunch {
            work: launch.work,
            grid: [launch.grid, 1, 1],
            dynamic_shared_bytes: program.dynamic_shared_bytes(launch.work),
            args: Vec::new(),
            writes_saved: false,
            origin: program.maps[launch.map].origin.clone(),
        };
        for (buffer, param) in launch.args.iter().zip(program.params(launch.work)) {
            let Some(at) = memory.place(*buffer) else {
                continue;
            };
            let argument = argument(graph, program, *buffer, at)?;
            let written = param.ty.is_written();
            if let BufferRef::External(slot) = at {
                let spec = &mut pass.externals[slot];
                spec.bytes = spec.bytes.max(argument.bytes);
                spec.written |= written;
            }
            placed.writes_saved |= written && matches!(at, BufferRef::Saved(_));
            placed.args.push(argument);
        }
        pass.launches.push(placed);
    }
    Ok(pass)
}

fn argument(
    graph: &Graph,
    program: &CudaProgram,
    buffer: Buffer,
    at: BufferRef,
) -> Result<Argument, PlanError> {
    let (bytes, name) = match buffer {
        Buffer::Container(id) => (
            plan::container_bytes(graph, id)?,
            graph.container(id).name.clone(),
        ),
        Buffer::Workspace(n) => (program.workspace_bytes[n], format!("workspace {n}")),
    };
    Ok(Argument { at, bytes, name })
}

/// The bytes of every constant, by its number in [`BufferRef::Constant`].
pub fn constants(graph: &Graph, program: &CudaProgram) -> Vec<Vec<u8>> {
    let bytes = |id: &ContainerId| match &graph.container(*id).lifetime {
        Lifetime::Constant(value) => laid_out(graph, *id, value),
        _ => Vec::new(),
    };
    program.memory.constants.iter().map(bytes).collect()
}

/// A constant's bytes in the order that its container's layout asks for.
fn laid_out(graph: &Graph, id: ContainerId, value: &Tensor) -> Vec<u8> {
    let c = graph.container(id);
    let size = c.dtype.bytes();
    let mut memory = Memory::default();
    let buffer = memory.add(&c.name, value);
    let mut bytes = vec![0; value.len() * size];
    let elements = memory.bytes(buffer).chunks_exact(size);
    for (at, element) in positions(graph, id).into_iter().zip(elements) {
        if let Some(place) = bytes.get_mut(at * size..(at + 1) * size) {
            place.copy_from_slice(element);
        }
    }
    bytes
}

/// Position in memory of each element of a container, in row-major order.
pub(super) fn positions(graph: &Graph, id: ContainerId) -> Vec<usize> {
    let c = graph.container(id);
    let shape: Vec<i64> = c.shape.iter().filter_map(|s| s.as_const()).collect();
    let strides = c.layout.strides(&shape);
    let position = |flat: i64| {
        let (mut rest, mut at) = (flat, 0);
        for d in (0..shape.len()).rev() {
            at += rest % shape[d] * strides[d];
            rest /= shape[d];
        }
        at as usize
    };
    (0..shape.iter().product()).map(position).collect()
}
