//! Loaded modules and the programs that call them.
//!
//! Owns dynamic loading, the kernel calling convention
//! (`void NAME(void *const *buf, void *scratch, long tid, long nt)`) and, in
//! [`Program`], the order in which kernels run. Never allocates a container's
//! memory: the caller brings arena, saved and external buffers.
#![allow(unsafe_code)]

use std::ffi::{c_long, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::memory::{ALIGNMENT, AlignedBuffer, Buffer};
use crate::pool::{Pool, PoolError};
use clock::Clock;

mod clock;

/// A compiled kernel: a launch calls it once for each `tid` in `0..nt`, where `nt` is the number of threads
/// that it was planned for, with a scratch block of the calling thread's own.
pub type KernelFn = unsafe extern "C" fn(
    buffers: *const *mut c_void,
    scratch: *mut c_void,
    tid: c_long,
    n_threads: c_long,
);

/// Why a compiled module cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The system's loader refused the file.
    #[error(
        "the compiled module {} cannot be loaded: {source}; if its folder forbids execution, \
         set SHORTHAUL_CACHE_DIR to another folder",
        path.display()
    )]
    Refused {
        /// The shared library.
        path: PathBuf,
        /// The loader's message.
        source: libloading::Error,
    },
    /// A kernel is not defined by the module.
    #[error("the compiled module {} does not define '{symbol}'", path.display())]
    MissingSymbol {
        /// The shared library.
        path: PathBuf,
        /// The kernel.
        symbol: String,
    },
}

/// A loaded shared library of kernels.
pub struct Module {
    library: Library,
    path: PathBuf,
}

impl Module {
    /// Loads a library that this room compiled.
    pub fn load(path: &Path) -> Result<Module, LoadError> {
        // SAFETY: the file is the output of our own compiler run, verified by its
        // checksum; it has no constructors, so loading runs no foreign code.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        match library {
            Ok(library) => Ok(Module {
                library,
                path: path.to_path_buf(),
            }),
            Err(source) => Err(LoadError::Refused {
                path: path.to_path_buf(),
                source,
            }),
        }
    }

    /// The kernel named `symbol`, which keeps this module loaded.
    ///
    /// # Errors
    /// If the module has no such symbol.
    pub fn function(self: &Arc<Self>, symbol: &str) -> Result<Function, LoadError> {
        // SAFETY: every symbol emitted for a module has the kernel signature.
        let found = unsafe { self.library.get::<KernelFn>(symbol) };
        match found {
            Ok(entry) => Ok(Function {
                entry: *entry,
                module: Arc::clone(self),
            }),
            Err(_) => Err(LoadError::MissingSymbol {
                path: self.path.clone(),
                symbol: symbol.to_string(),
            }),
        }
    }

    /// The address of `symbol`, valid while this module is loaded.
    pub fn symbol(&self, symbol: &str) -> Result<*mut c_void, LoadError> {
        // SAFETY: only the address is taken; whoever calls it knows its signature.
        let found = unsafe { self.library.get::<*mut c_void>(symbol) };
        match found {
            Ok(entry) => Ok(*entry),
            Err(_) => Err(LoadError::MissingSymbol {
                path: self.path.clone(),
                symbol: symbol.to_string(),
            }),
        }
    }

    /// The shared library's file; another process may have trimmed it since.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").field("path", &self.path).finish()
    }
}

/// A kernel of a loaded module.
#[derive(Debug, Clone)]
pub struct Function {
    entry: KernelFn,
    /// Held so that the code stays mapped.
    module: Arc<Module>,
}

impl Function {
    /// Calls the kernel on this thread.
    ///
    /// # Safety
    /// `buffers` points to the pointers the kernel was emitted for, each to memory
    /// of the size it was emitted for, valid for the kernel's reads and writes and
    /// not touched by others meanwhile, except by the same launch under another
    /// `tid`; `scratch` is a block of the size the kernel asks for, aligned to 64
    /// bytes, used by no other thread; `0 <= tid < n_threads`.
    pub unsafe fn call(
        &self,
        buffers: *const *mut c_void,
        scratch: *mut c_void,
        tid: usize,
        n_threads: usize,
    ) {
        // SAFETY: the caller's promise is the kernel's contract.
        unsafe { (self.entry)(buffers, scratch, tid as c_long, n_threads as c_long) }
    }

    /// The module that defines it.
    pub fn module(&self) -> &Arc<Module> {
        &self.module
    }
}

/// Where a launch finds one of its buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BufferRef {
    /// Byte offset in the arena: transient containers of one run.
    Arena(usize),
    /// The caller's buffer in this slot: inputs, parameters, outputs.
    External(usize),
    /// Byte offset in the block that outlives the run: what forward leaves for backward.
    Saved(usize),
    /// The program's own constant buffer of this index.
    Constant(usize),
}

/// One kernel, called once for each thread that it was planned for, followed by a barrier.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The kernel.
    pub function: Function,
    /// Its buffers, in the kernel's order.
    pub args: Vec<BufferRef>,
    /// What reports call it.
    pub name: String,
}

/// What a program asks of the caller's buffer in one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExternalSpec {
    /// Least size in bytes.
    pub bytes: usize,
    /// Whether some kernel writes it.
    pub written: bool,
}

/// The contents of a [`Program`].
#[derive(Debug, Default)]
pub struct ProgramParts {
    /// Kernels in order of execution.
    pub launches: Vec<Launch>,
    /// Buffers that belong to the program.
    pub constants: Vec<AlignedBuffer>,
    /// The caller's buffers, one entry per slot.
    pub externals: Vec<ExternalSpec>,
    /// Size of the arena in bytes.
    pub arena_bytes: usize,
    /// Size of the saved block in bytes.
    pub saved_bytes: usize,
    /// Scratch that the most demanding kernel needs per thread, in bytes.
    pub thread_scratch_bytes: usize,
    /// The number of threads for which the kernels were planned: partial sums are cut for that number, so results do
    /// not depend on how many threads run them. `None`: the number of threads that run them.
    pub planned_threads: Option<usize>,
}

/// A program that does not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("launch {launch} names {buffer:?} as argument {argument}, but {limit}")]
pub struct ProgramError {
    /// The launch's name.
    pub launch: String,
    /// Which of its arguments.
    pub argument: usize,
    /// What it names.
    pub buffer: BufferRef,
    /// What there is.
    pub limit: String,
}

/// Why a program did not run. Nothing was written then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// The number of external buffers is wrong.
    #[error("the program takes {expected} buffers, {found} were given")]
    ExternalCount {
        /// Slots of the program.
        expected: usize,
        /// Buffers given.
        found: usize,
    },
    /// A buffer is too small.
    #[error("{buffer} needs {expected} bytes, {found} were given")]
    TooSmall {
        /// `buffer N`, `the arena` or `the saved block`.
        buffer: String,
        /// Bytes needed.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// A read-only buffer was given for a slot that kernels write.
    #[error("the program writes buffer {slot}, but it was given read-only")]
    ReadOnly {
        /// The slot.
        slot: usize,
    },
    /// Arena or saved block are not aligned.
    #[error("{buffer} must be aligned to {ALIGNMENT} bytes")]
    Misaligned {
        /// `the arena` or `the saved block`.
        buffer: String,
    },
    /// The threads could not run it.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// The threads that may run a program.
#[derive(Clone, Copy)]
pub struct Threads<'a> {
    /// Where they come from.
    pub pool: &'a Pool,
    /// How many of them run the program at most; it never takes more than it was planned for.
    pub at_most: usize,
}

impl Threads<'_> {
    /// All threads of a pool.
    pub fn of(pool: &Pool) -> Threads<'_> {
        Threads {
            pool,
            at_most: usize::MAX,
        }
    }
}

/// How long one launch took, from barrier to barrier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchTime<'a> {
    /// The launch's name.
    pub name: &'a str,
    /// Wall time seen by the calling thread. Where it works alone, its CPU time, which excludes
    /// other programs.
    pub time: Duration,
}

/// A sequence of launches with everything they need except the caller's memory.
///
/// Compiled text is trusted as much as the emitter that wrote it: that each kernel
/// stays within the sizes stated here is the lowering's promise.
#[derive(Debug)]
pub struct Program {
    parts: ProgramParts,
    /// The arguments of all launches, one after the other.
    args: Vec<BufferRef>,
}

impl Program {
    /// Checks that every argument exists.
    ///
    /// # Errors
    /// If an argument names a buffer or a value that is not there.
    pub fn new(parts: ProgramParts) -> Result<Program, ProgramError> {
        let mut args = Vec::new();
        for launch in &parts.launches {
            for (argument, buffer) in launch.args.iter().enumerate() {
                check_argument(*buffer, &parts).map_err(|limit| ProgramError {
                    launch: launch.name.clone(),
                    argument,
                    buffer: *buffer,
                    limit,
                })?;
                args.push(*buffer);
            }
        }
        Ok(Program { parts, args })
    }

    /// What the program is made of.
    pub fn parts(&self) -> &ProgramParts {
        &self.parts
    }

    /// Runs all launches on the pool's threads, on no more than the kernels were planned for. `externals` has
    /// one buffer per slot; arena and saved block are aligned to 64 bytes and at least as large as stated,
    /// [`Buffer::none`] where nothing is needed.
    ///
    /// # Errors
    /// If a buffer is missing, too small, misaligned, or not writable where it must be.
    pub fn run(
        &self,
        externals: &[Buffer<'_>],
        arena: Buffer<'_>,
        saved: Buffer<'_>,
        pool: &Pool,
    ) -> Result<(), RunError> {
        self.check(externals, arena, saved)?;
        let base = |slot: usize| externals[slot].as_ptr();
        let pointers = self.resolve(base, arena.as_ptr(), saved.as_ptr());
        self.launch_all(&pointers, Threads::of(pool), None, &|_| {})
    }

    /// Like [`Program::run`], and reports the time of each launch.
    ///
    /// # Errors
    /// As [`Program::run`].
    pub fn run_timed(
        &self,
        externals: &[Buffer<'_>],
        arena: Buffer<'_>,
        saved: Buffer<'_>,
        threads: Threads<'_>,
    ) -> Result<Vec<LaunchTime<'_>>, RunError> {
        self.check(externals, arena, saved)?;
        let base = |slot: usize| externals[slot].as_ptr();
        let pointers = self.resolve(base, arena.as_ptr(), saved.as_ptr());
        let clock = Clock::new(self.parts.planned_threads == Some(1));
        let ends = std::sync::Mutex::new(Vec::with_capacity(self.parts.launches.len() + 1));
        let note = |_: usize| {
            ends.lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .push(clock.now());
        };
        self.launch_all(&pointers, threads, None, &note)?;
        let ends = ends
            .into_inner()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let times = ends.windows(2).map(|pair| pair[1].saturating_sub(pair[0]));
        Ok(self
            .parts
            .launches
            .iter()
            .zip(times)
            .map(|(launch, time)| LaunchTime {
                name: &launch.name,
                time,
            })
            .collect())
    }

    /// Like [`Program::run`] for bare pointers, without any check.
    ///
    /// # Errors
    /// If a thread of the pool panics.
    ///
    /// # Safety
    /// There is one pointer per slot, each to as many bytes as the slot's
    /// [`ExternalSpec`] says, writable where it says so; arena and saved block have
    /// the stated sizes and alignment; nobody else touches any of them meanwhile.
    pub unsafe fn run_raw(
        &self,
        externals: &[*mut u8],
        arena: *mut u8,
        saved: *mut u8,
        threads: Threads<'_>,
    ) -> Result<(), RunError> {
        let pointers = self.resolve(|slot| externals[slot], arena, saved);
        self.launch_all(&pointers, threads, None, &|_| {})
    }

    /// Like [`Program::run_raw`], but leaves out the launches that have `false` in `runs`.
    ///
    /// # Errors
    /// As [`Program::run_raw`].
    ///
    /// # Safety
    /// As [`Program::run_raw`], for the slots that the other launches touch.
    pub unsafe fn run_part(
        &self,
        runs: &[bool],
        externals: &[*mut u8],
        arena: *mut u8,
        saved: *mut u8,
        threads: Threads<'_>,
    ) -> Result<(), RunError> {
        let pointers = self.resolve(|slot| externals[slot], arena, saved);
        self.launch_all(&pointers, threads, Some(runs), &|_| {})
    }

    fn check(
        &self,
        externals: &[Buffer<'_>],
        arena: Buffer<'_>,
        saved: Buffer<'_>,
    ) -> Result<(), RunError> {
        let specs = &self.parts.externals;
        if externals.len() != specs.len() {
            return Err(RunError::ExternalCount {
                expected: specs.len(),
                found: externals.len(),
            });
        }
        for (slot, (buffer, spec)) in externals.iter().zip(specs).enumerate() {
            if buffer.len() < spec.bytes {
                return Err(RunError::TooSmall {
                    buffer: format!("buffer {slot}"),
                    expected: spec.bytes,
                    found: buffer.len(),
                });
            }
            if spec.written && !buffer.is_writable() {
                return Err(RunError::ReadOnly { slot });
            }
        }
        check_block("the arena", arena, self.parts.arena_bytes)?;
        check_block("the saved block", saved, self.parts.saved_bytes)
    }

    fn resolve(
        &self,
        external: impl Fn(usize) -> *mut u8,
        arena: *mut u8,
        saved: *mut u8,
    ) -> Pointers {
        let pointer = |buffer: &BufferRef| -> *mut c_void {
            match *buffer {
                BufferRef::Arena(offset) => arena.wrapping_add(offset),
                BufferRef::Saved(offset) => saved.wrapping_add(offset),
                BufferRef::External(slot) => external(slot),
                BufferRef::Constant(index) => self.parts.constants[index].as_ptr(),
            }
            .cast()
        };
        Pointers(self.args.iter().map(pointer).collect())
    }

    /// Every thread walks the launches, or those with `true` in `runs`, and runs its share of the planned threads
    /// in each; `note` is called by the calling thread before the first launch and after each.
    fn launch_all(
        &self,
        pointers: &Pointers,
        threads: Threads<'_>,
        runs: Option<&[bool]>,
        note: &(dyn Fn(usize) + Sync),
    ) -> Result<(), RunError> {
        let launches = &self.parts.launches;
        let planned = self.parts.planned_threads;
        let at_most = threads.at_most.min(planned.unwrap_or(usize::MAX));
        threads
            .pool
            .run(at_most, self.parts.thread_scratch_bytes, &|member| {
                if member.tid == 0 {
                    note(0);
                }
                let planned = planned.unwrap_or(member.n_threads);
                let share = |tid: usize| tid * planned / member.n_threads;
                let own = share(member.tid)..share(member.tid + 1);
                let mut args = pointers.start();
                for (launch_idx, launch) in launches.iter().enumerate() {
                    if runs.is_some_and(|runs| !runs[launch_idx]) {
                        args = args.wrapping_add(launch.args.len());
                        continue;
                    }
                    for tid in own.clone() {
                        // SAFETY: `args` points to this launch's pointers, resolved from buffers that the
                        // caller lent for the whole run and checked (or vouched for) against the stated
                        // sizes; each `tid` is passed by one thread, with the scratch of that thread, on
                        // whose contents no kernel relies; the barrier ends the launch before the next.
                        unsafe {
                            launch
                                .function
                                .call(args, member.scratch.cast(), tid, planned);
                        }
                    }
                    args = args.wrapping_add(launch.args.len());
                    // The pool's own barrier follows the last launch.
                    if launch_idx + 1 < launches.len() {
                        member.barrier();
                    }
                    if member.tid == 0 {
                        note(launch_idx + 1);
                    }
                }
            })?;
        Ok(())
    }
}

/// Resolved arguments, shared by the threads of one run.
struct Pointers(Vec<*mut c_void>);

// SAFETY: threads only read the pointers; what they do with the memory behind them
// is governed by the kernel's contract.
unsafe impl Sync for Pointers {}

impl Pointers {
    fn start(&self) -> *const *mut c_void {
        self.0.as_ptr()
    }
}

fn check_argument(buffer: BufferRef, parts: &ProgramParts) -> Result<(), String> {
    let (value, bound, what) = match buffer {
        BufferRef::Arena(offset) => (offset, parts.arena_bytes, "bytes of arena"),
        BufferRef::Saved(offset) => (offset, parts.saved_bytes, "saved bytes"),
        BufferRef::External(slot) => (slot, parts.externals.len(), "external buffers"),
        BufferRef::Constant(index) => (index, parts.constants.len(), "constants"),
    };
    if value < bound {
        Ok(())
    } else {
        Err(format!("the program has {bound} {what}"))
    }
}

fn check_block(name: &str, block: Buffer<'_>, bytes: usize) -> Result<(), RunError> {
    if block.len() < bytes {
        return Err(RunError::TooSmall {
            buffer: name.to_string(),
            expected: bytes,
            found: block.len(),
        });
    }
    if bytes > 0 && !(block.as_ptr() as usize).is_multiple_of(ALIGNMENT) {
        return Err(RunError::Misaligned {
            buffer: name.to_string(),
        });
    }
    Ok(())
}
