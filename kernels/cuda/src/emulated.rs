//! A CUDA program on host memory, in the places that it has on a device.
//!
//! Owns the run of a pass by the emulator over the caller's buffers, arena and saved block: the same
//! launches, offsets and order as on a device, so what two buffers share there they share here. Each
//! launch works on copies, so every access is checked and a faulty launch writes nothing. Slow: for
//! tests and dry runs. Never plans, never emits.
#![allow(unsafe_code)]

use super::emulate::{BATCH, EmulateError, Emulator, Fault, FaultKind, Memory, Settings};
use super::machine::{Addresses, NoOperators, Operators, check};
use super::passes::{Argument, Pass, PlacedLaunch};
use super::vendor::{self, Call, LibraryProduct};
use super::{Arg, CudaError, Kernel, Launch, LaunchOp, Param, ParamType};
use kernels::progress::{Progress, UnitReady};
use kernels::run::BufferRef;
use std::collections::BTreeMap;
use std::time::Instant;

/// Kernels compiled for the host, products, and their constants.
pub struct Emulated {
    kernels: Vec<Kernel>,
    products: Vec<LibraryProduct>,
    calls: Vec<Call>,
    batches: Vec<Emulator>,
    constants: Vec<Vec<u8>>,
    settings: Settings,
}

/// For each block, a number per byte that says whether it holds something.
type Written = BTreeMap<Block, Vec<u8>>;

/// A block of the caller's memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Block {
    Arena,
    Saved,
    External(usize),
}

impl Emulated {
    /// Compiles kernels for the host; `progress` is told of each file, and asked whether to stop. `seed` decides
    /// the order of blocks and threads.
    ///
    /// # Errors
    /// No C++ compiler, or a text that it refuses; [`EmulateError::Interrupted`].
    pub fn compile(
        kernels: &[Kernel],
        constants: Vec<Vec<u8>>,
        seed: u64,
        progress: &mut dyn Progress,
    ) -> Result<Emulated, EmulateError> {
        let start = Instant::now();
        let total = kernels.len().div_ceil(BATCH);
        let mut batches = Vec::new();
        for batch in kernels.chunks(BATCH) {
            if progress.is_interrupted() {
                return Err(EmulateError::Interrupted);
            }
            batches.push(Emulator::from_environment(batch)?);
            progress.unit_ready(&UnitReady {
                name: "kernels",
                done: batches.len(),
                total,
                seconds: start.elapsed().as_secs_f64(),
                cached: false,
            });
        }
        Ok(Emulated {
            kernels: kernels.to_vec(),
            products: Vec::new(),
            calls: Vec::new(),
            batches,
            constants,
            settings: Settings {
                partial_outputs: true,
                ..Settings::of_seed(seed)
            },
        })
    }

    /// Returns it with the program's products, which the host computes by what they mean.
    #[must_use]
    pub fn with_products(mut self, products: &[LibraryProduct]) -> Emulated {
        self.products = products.to_vec();
        self
    }

    /// Returns it with the program's calls. Whoever runs it brings their operators.
    #[must_use]
    pub fn with_calls(mut self, calls: &[Call]) -> Emulated {
        self.calls = calls.to_vec();
        self
    }

    /// Runs a pass without calls.
    ///
    /// # Errors
    /// Addresses that do not fit, or a fault of a kernel with its name, block and thread.
    ///
    /// # Safety
    /// As for [`super::machine::Machine::run`], with addresses of host memory.
    pub unsafe fn run(&self, pass: &Pass, addresses: &Addresses<'_>) -> Result<(), CudaError> {
        // SAFETY: passed on.
        unsafe { self.run_with(pass, addresses, &NoOperators) }.map(|_| ())
    }

    /// Runs a pass. Returns the seconds of each launch in the emulator, which say nothing about a device.
    ///
    /// # Errors
    /// As for [`Emulated::run`]; a call that fails, or reads what nobody wrote.
    ///
    /// # Safety
    /// As for [`super::machine::Machine::run_with`], with addresses of host memory.
    pub unsafe fn run_with(
        &self,
        pass: &Pass,
        addresses: &Addresses<'_>,
        operators: &dyn Operators,
    ) -> Result<Vec<f64>, CudaError> {
        check(pass, addresses)?;
        let mut written = self.at_start(pass);
        let (mut seconds, mut n_calls) = (Vec::new(), 0);
        for launch in &pass.launches {
            let start = Instant::now();
            if let LaunchOp::Call(n) = launch.work {
                self.call(&self.calls[n], launch, &mut written, &|| {
                    operators.call(n_calls)
                })?;
                n_calls += 1;
            } else {
                // SAFETY: passed on; the places were planned within the stated sizes.
                unsafe { self.launch(launch, addresses, &mut written)? };
            }
            seconds.push(start.elapsed().as_secs_f64());
        }
        Ok(seconds)
    }

    /// Has an operator called, whose operands lie where the launch's arguments do.
    fn call(
        &self,
        call: &Call,
        launch: &PlacedLaunch,
        written: &mut Written,
        operator: &dyn Fn() -> Result<(), String>,
    ) -> Result<(), CudaError> {
        for (argument, operand) in launch.args.iter().zip(&call.operands) {
            if operand.is_written {
                continue;
            }
            let held = holds(argument, operand.dtype.bytes(), written);
            let unwritten = |at: &usize| held.get(*at) != Some(&1);
            if let Some(at) = operand.view.places().into_iter().find(unwritten) {
                let kind = FaultKind::Uninitialized {
                    array: argument.name.clone(),
                    element: at as i64,
                };
                let fault = Fault {
                    kernel: call.name.clone(),
                    origin: launch.origin.clone(),
                    block: 0,
                    thread: 0,
                    kind,
                };
                return Err(EmulateError::Faults(vec![fault]).into());
            }
        }
        operator().map_err(|problem| CudaError::Operator {
            operator: call.operator(),
            origin: launch.origin.clone(),
            problem,
        })?;
        for (argument, operand) in launch.args.iter().zip(&call.operands) {
            if operand.is_written {
                let size = operand.dtype.bytes();
                let mut held = holds(argument, size, written);
                for at in operand.view.places() {
                    if let Some(element) = held.get_mut(at) {
                        *element = 1;
                    }
                }
                note(argument, size, &held, written);
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for `run`.
    unsafe fn launch(
        &self,
        launch: &PlacedLaunch,
        addresses: &Addresses<'_>,
        written: &mut Written,
    ) -> Result<(), CudaError> {
        let mut memory = Memory::default();
        let mut buffers: BTreeMap<BufferRef, usize> = BTreeMap::new();
        let mut args = Vec::new();
        let params = launch.args.iter().zip(self.params(launch.work));
        for (argument, param) in params.clone() {
            if matches!(param.ty, ParamType::Scalar(_)) {
                continue;
            }
            let dtype = param.ty.dtype();
            let known = buffers.get(&argument.at).filter(|_| argument.bytes > 0);
            let buffer = match known {
                Some(buffer) => *buffer,
                None => {
                    // SAFETY: passed on.
                    let bytes = unsafe { self.bytes(argument, addresses) };
                    let holds = holds(argument, dtype.bytes(), written);
                    let buffer = memory.add_bytes(&argument.name, dtype, bytes, &holds);
                    // The copy is aligned as well as its source.
                    if let Some(start) = address(argument, addresses) {
                        memory.place(buffer, start as usize);
                    }
                    buffer
                }
            };
            buffers.insert(argument.at, buffer);
            args.push(buffer);
        }
        let done = self.execute(launch, &args, &mut memory);
        done.map_err(|error| error.of_launch(&launch.origin))?;
        for ((argument, param), buffer) in params.zip(args) {
            if param.ty.is_written() {
                let bytes = memory.bytes(buffer);
                if let Some(place) = address(argument, addresses) {
                    // SAFETY: the place has `argument.bytes` bytes, and `memory` is our own.
                    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
                }
                let size = param.ty.dtype().bytes();
                note(argument, size, memory.initialized(buffer), written);
            }
        }
        // SAFETY: passed on.
        unsafe { self.spoil_workspace(launch, addresses, written) };
        Ok(())
    }

    /// A product may leave anything in its workspace.
    ///
    /// # Safety
    /// As for `run`.
    unsafe fn spoil_workspace(
        &self,
        launch: &PlacedLaunch,
        addresses: &Addresses<'_>,
        written: &mut Written,
    ) {
        let LaunchOp::Product(n) = launch.work else {
            return;
        };
        let workspace = self.products[n].workspace().map(|at| &launch.args[at]);
        if let Some(argument) = workspace
            && let Some(place) = address(argument, addresses)
        {
            // SAFETY: the place has `argument.bytes` bytes.
            unsafe { std::ptr::write_bytes(place, 0xff, argument.bytes) };
            note(argument, 1, &vec![0; argument.bytes], written);
        }
    }

    /// The parameters of a launch, without a product's workspace: nothing reads what is left there.
    fn params(&self, work: LaunchOp) -> &[Param] {
        match work {
            LaunchOp::Kernel(n) => &self.kernels[n].params,
            LaunchOp::Product(n) => {
                let product = &self.products[n];
                &product.params[..product.workspace().unwrap_or(product.params.len())]
            }
            LaunchOp::Call(n) => &self.calls[n].params,
        }
    }

    fn execute(
        &self,
        launch: &PlacedLaunch,
        buffers: &[usize],
        memory: &mut Memory,
    ) -> Result<(), EmulateError> {
        match launch.work {
            LaunchOp::Kernel(n) => {
                let call = Launch {
                    kernel: n % BATCH,
                    grid: launch.grid,
                    dynamic_shared_bytes: launch.dynamic_shared_bytes,
                    args: buffers.iter().map(|buffer| Arg::Buffer(*buffer)).collect(),
                };
                self.batches[n / BATCH].run(&call, memory, &self.settings)
            }
            LaunchOp::Product(n) => vendor::run(&self.products[n], memory, buffers),
            LaunchOp::Call(n) => Err(EmulateError::Launch {
                kernel: self.calls[n].name.clone(),
                origin: String::new(),
                problem: "a call has no kernel".into(),
            }),
        }
    }

    /// Which bytes hold something before the first launch: all except the arena, what the pass writes before it
    /// reads it, and the saved block of a pass that writes it (the forward pass).
    fn at_start(&self, pass: &Pass) -> Written {
        let saves = pass.launches.iter().any(|launch| launch.writes_saved);
        let mut written = Written::new();
        written.insert(Block::Arena, vec![0; pass.arena_bytes]);
        written.insert(Block::Saved, vec![u8::from(!saves); pass.saved_bytes]);
        for (slot, spec) in pass.externals.iter().enumerate() {
            let holds = u8::from(!spec.written);
            written.insert(Block::External(slot), vec![holds; spec.bytes]);
        }
        for launch in &pass.launches {
            for (argument, param) in launch.args.iter().zip(self.params(launch.work)) {
                if let (ParamType::InOut(_), BufferRef::External(slot)) = (param.ty, argument.at) {
                    written.insert(Block::External(slot), vec![1; argument.bytes]);
                }
            }
        }
        written
    }

    /// # Safety
    /// As for `run`.
    unsafe fn bytes<'a>(&'a self, argument: &Argument, addresses: &Addresses<'a>) -> &'a [u8] {
        match (argument.at, address(argument, addresses)) {
            (BufferRef::Constant(n), _) => &self.constants[n],
            // SAFETY: the caller vouches for the sizes; nobody writes while the copy is made.
            (_, Some(start)) if argument.bytes > 0 => unsafe {
                std::slice::from_raw_parts(start, argument.bytes)
            },
            _ => &[],
        }
    }
}

/// Where an argument starts; `None` for constants.
fn address(argument: &Argument, addresses: &Addresses<'_>) -> Option<*mut u8> {
    let address = match argument.at {
        BufferRef::Arena(offset) => addresses.arena + offset as u64,
        BufferRef::Saved(offset) => addresses.saved + offset as u64,
        BufferRef::External(slot) => addresses.externals[slot],
        BufferRef::Constant(_) => return None,
    };
    Some(address as usize as *mut u8)
}

fn range(argument: &Argument) -> Option<(Block, std::ops::Range<usize>)> {
    let (block, start) = match argument.at {
        BufferRef::Arena(offset) => (Block::Arena, offset),
        BufferRef::Saved(offset) => (Block::Saved, offset),
        BufferRef::External(slot) => (Block::External(slot), 0),
        BufferRef::Constant(_) => return None,
    };
    Some((block, start..start + argument.bytes))
}

/// A byte per element: whether it holds something.
fn holds(argument: &Argument, size: usize, written: &Written) -> Vec<u8> {
    let of_block = range(argument).and_then(|(block, range)| written.get(&block)?.get(range));
    match of_block {
        Some(bytes) => {
            let elements = bytes.chunks_exact(size);
            elements
                .map(|e| e.iter().copied().min().unwrap_or(0))
                .collect()
        }
        None => vec![1; argument.bytes / size],
    }
}

fn note(argument: &Argument, size: usize, elements: &[u8], written: &mut Written) {
    let Some((block, range)) = range(argument) else {
        return;
    };
    let Some(bytes) = written.get_mut(&block).and_then(|b| b.get_mut(range)) else {
        return;
    };
    for (place, element) in bytes.chunks_exact_mut(size).zip(elements) {
        place.fill(*element);
    }
}
