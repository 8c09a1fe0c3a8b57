//! Threads of the process that we are a guest in: the OpenMP team that PyTorch computes with.
//!
//! An idle OpenMP thread spins for milliseconds before it sleeps. Threads of our own would share
//! its core with it at the beginning of every pass; the team's own threads are there at once.
//! Owns the entry points of the OpenMP runtime that is already loaded; never loads one.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};
use std::path::Path;
use std::process;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// `RTLD_NOLOAD`: only what is loaded already.
const NO_LOAD: c_int = if cfg!(target_os = "macos") { 0x10 } else { 4 };

type Body = unsafe extern "C" fn(*mut c_void);
/// `GOMP_parallel(body, data, n_threads, flags)`; Intel's and LLVM's runtimes have it as well.
type Parallel = unsafe extern "C" fn(Body, *mut c_void, c_uint, c_uint);
type Count = unsafe extern "C" fn() -> c_int;

/// An OpenMP runtime of this process.
#[derive(Debug)]
pub struct HostThreads {
    parallel: Parallel,
    thread_num: Count,
    num_threads: Count,
    /// A forked child has none of the team's threads, and some runtimes then wait for them for ever.
    process: u32,
    /// Held so that the code stays mapped.
    _library: Library,
}

impl HostThreads {
    /// The OpenMP runtime in this file, if the process has loaded it.
    pub fn of_library(path: &Path) -> Option<HostThreads> {
        // SAFETY: nothing is loaded, so no initializer runs.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL | NO_LOAD) }.ok()?;
        // SAFETY: the names have these signatures in every OpenMP runtime: `omp_*` by the standard,
        // `GOMP_parallel` by GCC's ABI, which the others imitate.
        unsafe {
            Some(HostThreads {
                parallel: *library.get::<Parallel>("GOMP_parallel").ok()?,
                thread_num: *library.get::<Count>("omp_get_thread_num").ok()?,
                num_threads: *library.get::<Count>("omp_get_num_threads").ok()?,
                process: process::id(),
                _library: library,
            })
        }
    }

    /// Whether the team's threads exist here.
    pub(crate) fn are_here(&self) -> bool {
        self.process == process::id()
    }

    /// Calls `job(tid, n_threads)` on every thread of a team of at most `n_threads`, the caller among
    /// them as thread 0, and returns when all are done. A job that panics ends the process.
    pub(crate) fn run(&self, n_threads: usize, job: &(dyn Fn(usize, usize) + Sync)) {
        let call = Call { host: self, job };
        let n_threads = c_uint::try_from(n_threads).unwrap_or(c_uint::MAX);
        // SAFETY: `enter` reads the call while it is borrowed here: the runtime returns when every
        // thread has left `enter`.
        unsafe { (self.parallel)(enter, (&raw const call).cast_mut().cast(), n_threads, 0) }
    }
}

struct Call<'a> {
    host: &'a HostThreads,
    job: &'a (dyn Fn(usize, usize) + Sync),
}

unsafe extern "C" fn enter(data: *mut c_void) {
    // SAFETY: `data` is the call that `run` borrows meanwhile.
    let call = unsafe { &*data.cast::<Call<'_>>() };
    // SAFETY: plain queries.
    let (tid, n_threads) = unsafe { ((call.host.thread_num)(), (call.host.num_threads)()) };
    (call.job)(
        tid.unsigned_abs() as usize,
        n_threads.unsigned_abs() as usize,
    );
}
