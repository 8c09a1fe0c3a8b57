//! What runs a pass: a device through the driver, or the emulator on host memory.
//!
//! Owns the one way to call both, the addresses of a call and the checks on them. Never plans.
#![allow(unsafe_code)]

use super::CudaError;
use super::device::CudaModule;
use super::emulated::Emulated;
use super::passes::Pass;

/// Where the memory of a call lies: addresses of the device's memory, or of the host's for the
/// emulator.
#[derive(Clone, Copy, Debug)]
pub struct Addresses<'a> {
    /// The address of each slot of [`Pass::externals`]; 0 for those that the pass does not touch.
    pub externals: &'a [u64],
    /// Address of the arena, which has at least [`Pass::arena_bytes`]; 0 if the pass needs none.
    pub arena: u64,
    /// Address of the saved block, which has at least [`Pass::saved_bytes`]; 0 if the pass needs none.
    pub saved: u64,
}

/// Runs what a program leaves to operators that this crate does not have: its calls.
pub trait Operators {
    /// Enqueues the `n`-th call of the pass that runs, counted from 0, on that pass's stream; computes
    /// it, where the pass is emulated. The caller knows where its memory lies.
    ///
    /// # Errors
    /// The operator's words.
    fn call(&self, n: usize) -> Result<(), String>;
}

/// The operators of programs without calls.
#[derive(Clone, Copy, Debug)]
pub struct NoOperators;

impl Operators for NoOperators {
    fn call(&self, _: usize) -> Result<(), String> {
        Err("it was run without PyTorch, which has the operator".into())
    }
}

/// Kernels that can be launched.
pub enum Machine {
    /// The emulator on the CPU, checked and slow.
    Emulated(Emulated),
    /// A GPU.
    Device(CudaModule),
}

impl Machine {
    /// Enqueues the launches of a pass on a stream of the device (its handle as an integer; 0 is the
    /// default stream), without waiting and without allocating, so that a stream that is being captured
    /// takes them too; or executes them, in the emulator, which has no streams.
    ///
    /// # Errors
    /// Addresses that do not fit the pass; a launch that the driver refuses; a fault in the emulator.
    ///
    /// # Safety
    /// Every external address leads to as many bytes as its slot's [`kernels::run::ExternalSpec`] says,
    /// on this machine, writable where it says so; arena and saved block have the stated sizes; all stay
    /// allocated and untouched by others until the stream has done the launches. The stream belongs to
    /// the device's primary context.
    pub unsafe fn run(
        &self,
        pass: &Pass,
        stream: u64,
        addresses: &Addresses<'_>,
    ) -> Result<(), CudaError> {
        // SAFETY: passed on.
        unsafe { self.run_with(pass, stream, addresses, &NoOperators) }
    }

    /// Like [`Machine::run`], with operators for the program's calls.
    ///
    /// # Errors
    /// As for [`Machine::run`]; a call that fails.
    ///
    /// # Safety
    /// As for [`Machine::run`]. A call touches nothing of that memory but its operands.
    pub unsafe fn run_with(
        &self,
        pass: &Pass,
        stream: u64,
        addresses: &Addresses<'_>,
        operators: &dyn Operators,
    ) -> Result<(), CudaError> {
        // SAFETY: passed on.
        unsafe {
            match self {
                Machine::Emulated(emulated) => {
                    (emulated.run_with(pass, addresses, operators)).map(|_| ())
                }
                Machine::Device(module) => module.run_with(pass, stream, addresses, operators),
            }
        }
    }
}

impl Machine {
    /// Like [`Machine::run_with`], but waits, and returns the seconds of each launch. Those of the emulator say nothing
    /// about a device.
    ///
    /// # Errors
    /// As for [`Machine::run_with`]; a stream that is being captured cannot be waited for.
    ///
    /// # Safety
    /// As for [`Machine::run_with`].
    pub unsafe fn run_timed(
        &self,
        pass: &Pass,
        stream: u64,
        addresses: &Addresses<'_>,
        operators: &dyn Operators,
    ) -> Result<Vec<f64>, CudaError> {
        // SAFETY: passed on.
        unsafe {
            match self {
                Machine::Emulated(emulated) => emulated.run_with(pass, addresses, operators),
                Machine::Device(module) => {
                    module.run_timed_with(pass, stream, addresses, operators)
                }
            }
        }
    }
}

/// Checks that everything that a pass touches has a well-aligned address.
pub(super) fn check(pass: &Pass, addresses: &Addresses<'_>) -> Result<(), CudaError> {
    let (found, expected) = (addresses.externals.len(), pass.externals.len());
    if found != expected {
        return Err(CudaError::ExternalCount { expected, found });
    }
    let externals = addresses.externals.iter().zip(&pass.externals);
    for (slot, (address, spec)) in externals.enumerate() {
        one(&|| format!("buffer {slot}"), *address, spec.bytes, pass)?;
    }
    let (arena, saved) = (addresses.arena, addresses.saved);
    one(&|| "the arena".into(), arena, pass.arena_bytes, pass)?;
    one(&|| "the saved block".into(), saved, pass.saved_bytes, pass)
}

fn one(
    name: &dyn Fn() -> String,
    address: u64,
    bytes: usize,
    pass: &Pass,
) -> Result<(), CudaError> {
    match bytes {
        0 => Ok(()),
        _ if address == 0 => Err(CudaError::NoMemory {
            buffer: name(),
            bytes,
        }),
        _ if !address.is_multiple_of(pass.alignment.max(1)) => {
            Err(CudaError::Misaligned { buffer: name() })
        }
        _ => Ok(()),
    }
}
