//! What a program is made of, kernels for the CPU or CUDA kernels, and the call of either.
//!
//! Owns the addresses of a call and the one place where they are handed to kernels. The interpreter
//! lock is released meanwhile.
#![allow(unsafe_code)]

use crate::program::CompileFailure;
use compiler::cuda::CudaExecutable;
use compiler::cuda_kernels::lower::MapInfo;
use compiler::cuda_kernels::machine::{Addresses, Operators};
use compiler::graph::Stage;
use compiler::kernels::lowering::KernelInfo;
use compiler::kernels::memory::Buffer;
use compiler::kernels::pool::Pool;
use compiler::kernels::run::{ExternalSpec, LaunchTime, Program, RunError, Threads};
use compiler::predict::On;
use compiler::report::Memory;
use compiler::{Executable, Plan};
use pyo3::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Launches with the seconds they took.
pub type Times = Vec<(String, f64)>;

/// First map, number of maps, product and rest as a table has them, kind and rank of what computes it, origin.
pub type ProductRow = (
    usize,
    usize,
    String,
    String,
    &'static str,
    Option<usize>,
    String,
);

/// Compiled kernels of both passes.
pub enum Built {
    /// A program for the CPU, with the number of threads that runs it.
    Cpu(Box<Executable>, AtomicUsize),
    /// A program for a device or the emulator.
    Cuda(Box<CudaExecutable>),
}

impl Built {
    /// What was decided.
    pub fn plan(&self) -> &Plan {
        match self {
            Built::Cpu(executable, _) => &executable.plan,
            Built::Cuda(executable) => &executable.plan,
        }
    }

    /// How each kernel was made.
    pub fn kernels(&self) -> &[KernelInfo] {
        match self {
            Built::Cpu(executable, _) => &executable.kernels,
            Built::Cuda(executable) => &executable.kernels,
        }
    }

    /// What kernels of a CPU are for.
    pub fn on(&self) -> Option<On> {
        match self {
            Built::Cpu(executable, _) => Some(executable.on),
            Built::Cuda(_) => None,
        }
    }

    /// What a pass asks of each of the caller's buffers.
    pub fn externals(&self, backward: bool) -> &[ExternalSpec] {
        match (self, backward) {
            (Built::Cpu(executable, _), false) => &executable.forward.parts().externals,
            (Built::Cpu(executable, _), true) => &executable.backward.parts().externals,
            (Built::Cuda(executable), false) => &executable.forward.externals,
            (Built::Cuda(executable), true) => &executable.backward.externals,
        }
    }

    /// Memory of both passes.
    pub fn memory(&self) -> Memory {
        match self {
            Built::Cpu(executable, _) => {
                let (forward, backward) = (executable.forward.parts(), executable.backward.parts());
                Memory {
                    forward_arena_bytes: forward.arena_bytes,
                    backward_arena_bytes: backward.arena_bytes,
                    saved_bytes: forward.saved_bytes,
                    thread_scratch_bytes: forward
                        .thread_scratch_bytes
                        .max(backward.thread_scratch_bytes),
                }
            }
            Built::Cuda(executable) => executable.memory(),
        }
    }

    /// Name, origin and text of every CUDA kernel.
    pub fn cuda_kernels(&self) -> Vec<(String, String, String)> {
        let Built::Cuda(executable) = self else {
            return Vec::new();
        };
        let kernels = executable.program.kernels.iter();
        kernels
            .map(|k| (k.name.clone(), k.origin.clone(), k.text.clone()))
            .collect()
    }

    /// The products of matrices that a table can choose for.
    pub fn cuda_products(&self) -> Vec<ProductRow> {
        let Built::Cuda(executable) = self else {
            return Vec::new();
        };
        let maps = executable.program.maps.iter().enumerate();
        let row = |(n, map): (usize, &MapInfo)| {
            let choice = map.product.as_ref()?;
            let key = choice.key.clone()?;
            let (kind, rank) = choice.candidate.parts();
            let origin = map.origin.clone();
            Some((n, choice.n_maps, key.product, key.rest, kind, rank, origin))
        };
        maps.filter_map(row).collect()
    }

    /// The position among [`Built::kernels`] of each launch of a pass, in the order of its times.
    pub fn launch_kernels(&self, backward: bool) -> Vec<usize> {
        let executable = match self {
            Built::Cpu(executable, _) => {
                return executable.launch_kernels[usize::from(backward)].clone();
            }
            Built::Cuda(executable) => executable,
        };
        let launches = executable.program.launches.iter();
        let own = launches.filter(|l| (l.stage != Stage::Forward) == backward);
        own.map(|l| l.map).collect()
    }

    /// The part of the backward pass that computes some of the graph's outputs: for each launch, whether it is in it,
    /// and for each output, whether the part touches its memory. `None` where all launches are needed, or for a device.
    pub fn part_for(&self, outputs: &[usize]) -> Option<(Arc<[bool]>, Vec<bool>)> {
        let Built::Cpu(executable, _) = self else {
            return None;
        };
        let part = executable.dependences.part_for(outputs);
        let [_, backward] = &executable.launch_kernels;
        let runs: Arc<[bool]> = backward.iter().map(|k| part.kernels[*k]).collect();
        runs.contains(&false).then_some((runs, part.outputs))
    }

    /// Lets `n` threads run the kernels from now on, but never more than they were planned for. The
    /// results do not change.
    pub fn use_threads(&self, n: usize) {
        if let Built::Cpu(_, threads) = self {
            threads.store(n.max(1), Ordering::Relaxed);
        }
    }

    /// Runs a pass on the CPU, or enqueues it on a stream with the program's calls by `operators`.
    pub fn run(
        &self,
        py: Python<'_>,
        backward: bool,
        blocks: Blocks,
        timed: bool,
        (stream, operators): (u64, &(dyn Operators + Sync)),
    ) -> PyResult<Times> {
        py.detach(move || {
            // The whole value, so that the closure captures it and not its raw pointers.
            let blocks = blocks;
            match self {
                Built::Cpu(executable, threads) => {
                    let program = match backward {
                        true => &executable.backward,
                        false => &executable.forward,
                    };
                    let threads = threads.load(Ordering::Relaxed);
                    let times = run_cpu(program, threads, &blocks, timed);
                    times.map_err(|error| CompileFailure::new_err(error.to_string()))
                }
                Built::Cuda(executable) => {
                    run_cuda(executable, backward, &blocks, timed, (stream, operators))
                }
            }
        })
    }
}

fn run_cpu(
    program: &Program,
    n_threads: usize,
    blocks: &Blocks,
    timed: bool,
) -> Result<Times, RunError> {
    let pool = Pool::global();
    // A program for fewer threads than the pool has leaves the others asleep.
    if pool.threads() < n_threads {
        pool.set_threads(n_threads);
    }
    let threads = Threads {
        pool,
        at_most: n_threads,
    };
    let slots: Vec<*mut u8> = blocks.slots.iter().map(|a| a.0).collect();
    // SAFETY: the package passes contiguous tensors of the shapes and dtypes in `inputs` and
    // `outputs`, and blocks of the stated sizes from PyTorch's allocator, which aligns them to 64
    // bytes; it keeps them alive and untouched during the call. Slots that a pass does not touch may
    // be null.
    unsafe {
        if timed {
            return run_timed(program, &slots, blocks, threads);
        }
        let (scratch, saved) = (blocks.scratch.0, blocks.saved.0);
        match &blocks.runs {
            Some(runs) => program.run_part(runs, &slots, scratch, saved, threads)?,
            None => program.run_raw(&slots, scratch, saved, threads)?,
        }
    }
    Ok(Vec::new())
}

fn run_cuda(
    executable: &CudaExecutable,
    backward: bool,
    blocks: &Blocks,
    timed: bool,
    (stream, operators): (u64, &(dyn Operators + Sync)),
) -> PyResult<Times> {
    let pass = match backward {
        true => &executable.backward,
        false => &executable.forward,
    };
    let externals: Vec<u64> = blocks.slots.iter().map(|a| a.0 as usize as u64).collect();
    let addresses = Addresses {
        externals: &externals,
        arena: blocks.scratch.0 as usize as u64,
        saved: blocks.saved.0 as usize as u64,
    };
    // SAFETY: as for the CPU, with tensors on the program's device. PyTorch's allocator gives memory
    // of a stream back to that stream alone, so memory stays the tensors' until the launches are done. The
    // tensors of a call are views of these same blocks, one for each operand.
    let done = unsafe {
        match timed {
            true => (executable.machine).run_timed(pass, stream, &addresses, operators),
            false => {
                let machine = &executable.machine;
                (machine.run_with(pass, stream, &addresses, operators)).map(|()| Vec::new())
            }
        }
    };
    let seconds = done.map_err(|error| CompileFailure::new_err(error.to_string()))?;
    let names = pass
        .launches
        .iter()
        .map(|launch| executable.program.name(launch.work));
    Ok(names.map(String::from).zip(seconds).collect())
}

/// Like `run_raw`, with the time of each launch.
///
/// # Safety
/// As `run_raw`.
unsafe fn run_timed(
    program: &Program,
    slots: &[*mut u8],
    blocks: &Blocks,
    threads: Threads<'_>,
) -> Result<Times, RunError> {
    let parts = program.parts();
    let lend = |start: *mut u8, bytes: usize| match bytes {
        0 => Buffer::none(),
        // SAFETY: the caller vouches for the sizes.
        _ => unsafe { Buffer::from_raw(start, bytes, true) },
    };
    let sized = slots.iter().zip(&parts.externals);
    let externals: Vec<Buffer> = sized.map(|(slot, spec)| lend(*slot, spec.bytes)).collect();
    let arena = lend(blocks.scratch.0, parts.arena_bytes);
    let saved = lend(blocks.saved.0, parts.saved_bytes);
    let times = program.run_timed(&externals, arena, saved, threads)?;
    let seconds = |t: LaunchTime<'_>| (t.name.to_string(), t.time.as_secs_f64());
    Ok(times.into_iter().map(seconds).collect())
}

/// The memory of one call.
pub struct Blocks {
    slots: Vec<Address>,
    scratch: Address,
    saved: Address,
    /// The launches of a part of a pass; `None` for all.
    runs: Option<Arc<[bool]>>,
}

impl Blocks {
    /// Addresses that the caller vouches for.
    pub fn new(slots: Vec<*mut u8>, scratch: usize, saved: usize) -> Blocks {
        Blocks {
            slots: slots.into_iter().map(Address).collect(),
            scratch: Address(scratch as *mut u8),
            saved: Address(saved as *mut u8),
            runs: None,
        }
    }

    /// Leaves out the launches with `false`, on the CPU and without times.
    pub fn for_part(self, runs: Option<Arc<[bool]>>) -> Blocks {
        Blocks { runs, ..self }
    }
}

/// An address that the caller vouches for.
#[derive(Clone, Copy)]
struct Address(*mut u8);
// SAFETY: an address is plain data; who may touch what it points to is the caller's promise.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}
