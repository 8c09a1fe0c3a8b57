//! From lowered launches and loaded modules to programs that run.

use crate::halves;
use crate::lowering::{Lowered, LoweredLaunch};
use crate::memory::AlignedBuffer;
use crate::plan::{self, Buffer, PlanError};
use crate::run::{
    BufferRef, ExternalSpec, Launch, LoadError, Module, Program, ProgramError, ProgramParts,
};
use graph::{DType, Graph, Lifetime, Stage, Tensor};
use std::sync::Arc;

/// Why a program could not be put together.
#[derive(Debug, thiserror::Error)]
pub enum AssembleError {
    /// A kernel is missing from its module.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Launches and memory do not fit together.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A size without a value.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// No memory for constants.
    #[error("there is no memory for {bytes} bytes of constants")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
    },
}

/// The forward program, and the backward one (without launches if there is no backward pass).
/// External slots of both are the graph's inputs, then its outputs; a slot that a program does not
/// touch needs no bytes.
///
/// # Errors
/// See [`AssembleError`].
pub fn assemble(
    graph: &Graph,
    lowered: &Lowered,
    modules: &[Arc<Module>],
) -> Result<[Program; 2], AssembleError> {
    let pass = |backward: bool| -> Result<Program, AssembleError> {
        let launches: Vec<&LoweredLaunch> = lowered
            .launches
            .iter()
            .filter(|l| (l.stage != Stage::Forward) == backward)
            .collect();
        let memory = &lowered.memory;
        let mut parts = ProgramParts {
            externals: externals(graph, lowered, &launches)?,
            arena_bytes: if backward {
                memory.backward_arena_bytes
            } else {
                memory.forward_arena_bytes
            },
            saved_bytes: memory.saved_bytes,
            thread_scratch_bytes: lowered.thread_scratch_bytes,
            planned_threads: Some(lowered.threads),
            ..ProgramParts::default()
        };
        for id in &memory.constants {
            let c = graph.container(*id);
            if let Lifetime::Constant(value) = &c.lifetime {
                parts.constants.push(constant_bytes(value)?);
            }
        }
        let first_values = parts.constants.len();
        for values in &lowered.values {
            let bytes = values.len() * size_of::<i64>();
            let block = AlignedBuffer::from_slice(values);
            parts
                .constants
                .push(block.ok_or(AssembleError::OutOfMemory { bytes })?);
        }
        for launch in launches {
            let place = |b: &Buffer| memory.place(*b);
            let values = launch
                .values
                .map(|at| BufferRef::Constant(first_values + at));
            parts.launches.push(Launch {
                function: modules[launch.unit].function(&launch.symbol)?,
                args: launch.args.iter().filter_map(place).chain(values).collect(),
                name: launch.name.clone(),
            });
        }
        Ok(Program::new(parts)?)
    };
    Ok([pass(false)?, pass(true)?])
}

/// What a pass asks of each of the caller's buffers.
fn externals(
    graph: &Graph,
    lowered: &Lowered,
    launches: &[&LoweredLaunch],
) -> Result<Vec<ExternalSpec>, AssembleError> {
    let outputs = graph.outputs.iter().map(|o| o.container);
    let ids: Vec<_> = graph.inputs.iter().copied().chain(outputs).collect();
    let touched: Vec<usize> = launches
        .iter()
        .flat_map(|l| &l.args)
        .filter_map(|b| match lowered.memory.place(*b) {
            Some(BufferRef::External(slot)) => Some(slot),
            _ => None,
        })
        .collect();
    let mut specs = Vec::new();
    for (slot, id) in ids.iter().enumerate() {
        let used = touched.contains(&slot);
        specs.push(ExternalSpec {
            bytes: if used {
                plan::container_bytes(graph, *id)?
            } else {
                0
            },
            written: used && slot >= graph.inputs.len(),
        });
    }
    Ok(specs)
}

fn constant_bytes(value: &Tensor) -> Result<AlignedBuffer, AssembleError> {
    let floats = value.to_f64();
    let ints = value.to_i64();
    let block = match value.dtype {
        DType::F32 => {
            AlignedBuffer::from_slice(&floats.iter().map(|x| *x as f32).collect::<Vec<_>>())
        }
        DType::F64 => AlignedBuffer::from_slice(&floats),
        DType::I64 => AlignedBuffer::from_slice(&ints),
        DType::I32 => {
            AlignedBuffer::from_slice(&ints.iter().map(|i| *i as i32).collect::<Vec<_>>())
        }
        DType::I16 => {
            AlignedBuffer::from_slice(&ints.iter().map(|i| *i as i16).collect::<Vec<_>>())
        }
        DType::I8 => AlignedBuffer::from_slice(&ints.iter().map(|i| *i as i8).collect::<Vec<_>>()),
        DType::U8 | DType::Bool => {
            AlignedBuffer::from_slice(&ints.iter().map(|i| *i as u8).collect::<Vec<_>>())
        }
        half @ (DType::F16 | DType::BF16) => {
            let bits = |x: &f64| halves::bits(half, *x);
            AlignedBuffer::from_slice(&floats.iter().map(bits).collect::<Vec<u16>>())
        }
    };
    block.ok_or(AssembleError::OutOfMemory {
        bytes: value.len() * value.dtype.bytes(),
    })
}
