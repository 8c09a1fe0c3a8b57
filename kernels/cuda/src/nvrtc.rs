//! Compiles CUDA text to cubins by NVRTC, the compiler that comes with PyTorch's wheels.
//!
//! Owns finding and loading the library at run time, its options, the resource report of each kernel,
//! the gate on it, and the cache of cubins. No GPU and no driver are needed. Never launches anything.

mod library;
mod resources;

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use crate::library::Missing;
use crate::{Arch, Kernel, prelude};
use kernels::cache::{Cache, CacheError, EntryKind, Key};
use kernels::progress::{Progress, UnitReady};

pub use library::Nvrtc;
pub use resources::{GateError, Resources, gate};

/// Why kernels could not be compiled for a GPU.
#[derive(Debug, thiserror::Error)]
pub enum NvrtcError {
    /// No folder held a library that loads.
    #[error(
        "NVRTC (libnvrtc.so) was not found; looked in {}. Install the CUDA build of PyTorch or \
         `pip install nvidia-cuda-nvrtc`, or set SHORTHAUL_NVRTC to the folder of libnvrtc.so",
        display_folders(.folders)
    )]
    NotFound {
        /// The folders searched.
        folders: Vec<PathBuf>,
    },
    /// `SHORTHAUL_NVRTC` names folders without it.
    #[error(
        "SHORTHAUL_NVRTC names {}, where no libnvrtc.so is; set it to the folder of libnvrtc.so, or \
         unset it",
        paths(.folders)
    )]
    NotInFolders {
        /// The folders named.
        folders: Vec<PathBuf>,
    },
    /// The library is there and cannot be used.
    #[error("{} cannot be used: {problem}; set SHORTHAUL_NVRTC to another folder", path.display())]
    Unusable {
        /// The library.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// This NVRTC does not know the architecture.
    #[error("NVRTC {version} does not compile for {}; it knows sm_{known}", arch.name())]
    Unsupported {
        /// What was asked for.
        arch: Arch,
        /// The library's version.
        version: String,
        /// What it knows.
        known: String,
    },
    /// NVRTC refused the text.
    #[error("NVRTC refused the kernels {names} for {}:\n{log}", arch.name())]
    Refused {
        /// The kernels with their origins.
        names: String,
        /// What was asked for.
        arch: Arch,
        /// NVRTC's messages; lines are those of the kernel's text.
        log: String,
    },
    /// A call failed for another reason.
    #[error("NVRTC failed in {call}: {problem}")]
    Call {
        /// The function.
        call: &'static str,
        /// Its message.
        problem: String,
    },
    /// The cubin does not tell its kernels' resources.
    #[error("the cubin for {} cannot be read: {problem}", arch.name())]
    Cubin {
        /// The architecture.
        arch: Arch,
        /// What is wrong.
        problem: String,
    },
    /// The cache cannot be written.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// [`Progress::is_interrupted`] said so.
    #[error("the compilation was interrupted")]
    Interrupted,
}

pub(super) fn display_folders(folders: &[PathBuf]) -> String {
    if folders.is_empty() {
        return "the loader's folders".to_string();
    }
    format!("{} and the loader's folders", paths(folders))
}

pub(super) fn paths(folders: &[PathBuf]) -> String {
    let folders: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
    folders.join(", ")
}

impl From<Missing> for NvrtcError {
    fn from(missing: Missing) -> NvrtcError {
        match missing {
            Missing::Nowhere { folders } => NvrtcError::NotFound { folders },
            Missing::NotInFolders { folders } => NvrtcError::NotInFolders { folders },
            Missing::Unusable { path, problem } => NvrtcError::Unusable { path, problem },
        }
    }
}

/// Machine code for one architecture, and what it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cubin {
    /// The architecture.
    pub arch: Arch,
    /// An ELF file for the driver.
    pub bytes: Vec<u8>,
    /// One entry per kernel, in the kernels' order.
    pub resources: Vec<Resources>,
    /// NVRTC's and ptxas' messages without what ptxas tells of every kernel; empty if there were none.
    pub log: String,
}

/// What is passed besides the architecture: line numbers cost nothing at run time, ptxas tells what
/// each kernel needs, and a kernel uses few functions of the prelude (177).
const OPTIONS: [&str; 4] = [
    "--std=c++17",
    "--generate-line-info",
    "--ptxas-options=-v",
    "--diag-suppress=177",
];

/// Bytes of kernels' text in one file: reading the prelude costs as much as compiling a small kernel,
/// while few large files leave threads idle at the end.
const BATCH_BYTES: usize = 12_000;

/// Compiles `kernels` as one file, or takes the cubin from the cache.
///
/// # Errors
/// If NVRTC refuses a kernel, with its messages, or if the cubin cannot be stored.
pub fn compile(
    kernels: &[Kernel],
    arch: Arch,
    nvrtc: &Nvrtc,
    cache: &Cache,
) -> Result<Cubin, NvrtcError> {
    let source = source(kernels);
    let key = Key::new(&[
        "cubin",
        nvrtc.identity(),
        arch.name(),
        &OPTIONS.join("\0"),
        &source,
    ]);
    let (bytes, log) = match cache.read(EntryKind::Cubin, &key).and_then(unpack) {
        Some(known) => known,
        None => {
            let (bytes, log) = nvrtc.compile(&source, arch, &OPTIONS, &kernel_names(kernels))?;
            cache.write(EntryKind::Cubin, &key, &pack(&bytes, &log))?;
            (bytes, log)
        }
    };
    let (told, log) = resources::told(&log);
    let resources = resources::read(&bytes, kernels, &told)
        .map_err(|problem| NvrtcError::Cubin { arch, problem })?;
    Ok(Cubin {
        arch,
        bytes,
        resources,
        log,
    })
}

/// Compiles a program's kernels, or takes them from the cache, in several files at a time on `threads`
/// threads. The cubins follow the kernels' order: each holds the next `resources.len()` of them.
/// `progress` is asked after each file whether to stop, which ends when the files at hand are compiled: NVRTC
/// itself cannot be stopped.
///
/// # Errors
/// As [`compile`], for the first kernels that fail; [`NvrtcError::Interrupted`].
pub fn compile_all(
    kernels: &[Kernel],
    arch: Arch,
    nvrtc: &Nvrtc,
    cache: &Cache,
    threads: usize,
    progress: &mut dyn Progress,
) -> Result<Vec<Cubin>, NvrtcError> {
    let start = Instant::now();
    let batches = batches(kernels);
    let interrupted = AtomicBool::new(false);
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<Option<Result<Cubin, NvrtcError>>>> =
        Mutex::new(batches.iter().map(|_| None).collect());
    let compile_next = || {
        if interrupted.load(Ordering::Relaxed) {
            return None;
        }
        let at = next.fetch_add(1, Ordering::Relaxed);
        let cubin = compile(batches.get(at)?, arch, nvrtc, cache);
        let mut done = done.lock().unwrap_or_else(|broken| broken.into_inner());
        done[at] = Some(cubin);
        Some(done.iter().flatten().count())
    };
    thread::scope(|scope| {
        let helpers = threads.clamp(1, batches.len().max(1)) - 1;
        for _ in 0..helpers {
            scope.spawn(|| while compile_next().is_some() {});
        }
        while let Some(n_done) = compile_next() {
            progress.unit_ready(&UnitReady {
                name: arch.name(),
                done: n_done,
                total: batches.len(),
                seconds: start.elapsed().as_secs_f64(),
                cached: false,
            });
            if progress.is_interrupted() {
                interrupted.store(true, Ordering::Relaxed);
            }
        }
    });
    if interrupted.into_inner() || progress.is_interrupted() {
        return Err(NvrtcError::Interrupted);
    }
    let done = done
        .into_inner()
        .unwrap_or_else(|broken| broken.into_inner());
    done.into_iter().flatten().collect()
}

/// Neighbours with about [`BATCH_BYTES`] of text together.
fn batches(kernels: &[Kernel]) -> Vec<&[Kernel]> {
    let mut batches = Vec::new();
    let (mut first, mut bytes) = (0, 0);
    for (at, kernel) in kernels.iter().enumerate() {
        bytes += kernel.text.len();
        if bytes >= BATCH_BYTES || at + 1 == kernels.len() {
            batches.push(&kernels[first..=at]);
            (first, bytes) = (at + 1, 0);
        }
    }
    batches
}

fn kernel_names(kernels: &[Kernel]) -> String {
    let names: Vec<String> = kernels
        .iter()
        .map(|kernel| format!("{} (of {})", kernel.name, kernel.origin))
        .collect();
    names.join(", ")
}

fn source(kernels: &[Kernel]) -> String {
    let mut text = prelude::device();
    for kernel in kernels {
        text.push_str(&format!("#line 1 \"{}\"\n{}\n", kernel.name, kernel.text));
    }
    text
}

/// A cache entry: the cubin's length, the cubin, the log.
fn pack(cubin: &[u8], log: &str) -> Vec<u8> {
    [&(cubin.len() as u64).to_le_bytes(), cubin, log.as_bytes()].concat()
}

fn unpack(entry: Vec<u8>) -> Option<(Vec<u8>, String)> {
    let (length, rest) = entry.split_first_chunk::<8>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let (cubin, log) = rest.split_at_checked(length)?;
    Some((cubin.to_vec(), String::from_utf8(log.to_vec()).ok()?))
}
