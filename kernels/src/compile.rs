//! Compiles emitted C text into loaded modules, in parallel and at most once.
//!
//! Owns: removing duplicates within a call, the cache key of a source, running
//! several compiler processes at once, and turning a compiler's complaint into an
//! error that names the kernel. Never looks inside the text and never prints.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::cache::{Cache, CacheError, CacheSettings, EntryKind, Key};
use crate::features::{self, CpuTarget, FeatureError};
use crate::progress::{Progress, UnitReady};
use crate::run::{LoadError, Module};
use crate::toolchain::{self, Search, Toolchain, ToolchainError};

/// Lines of a compiler's complaint that an error shows.
const SHOWN_LINES: usize = 12;
/// How often a listener is asked whether to go on.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// How often a compiler is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(4);
/// If a compiler fails and this many bytes cannot be written, a full disk is taken for the cause.
const ROOM_BYTES: usize = 4 << 20;

/// One C file: usually several kernels, batched by the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceUnit {
    /// What people call it: the kernel's or the batch's name.
    pub name: String,
    /// Complete C text, prelude included.
    pub source: String,
    /// The kernels that the module must define.
    pub symbols: Vec<String>,
}

/// Everything compilation needs besides the sources. Cheap to clone.
#[derive(Debug, Clone)]
pub struct CompileOptions {
    /// The compiler.
    pub toolchain: Toolchain,
    /// The instructions to use and the flags that follow.
    pub target: CpuTarget,
    /// Where compiled modules are kept.
    pub cache: Cache,
    /// Compiler processes at once, at least 1.
    pub jobs: usize,
}

impl CompileOptions {
    /// Reads the environment (`SHORTHAUL_CACHE_DIR`, `SHORTHAUL_CC`,
    /// `SHORTHAUL_ISA`, …), finds the compiler and probes the CPU. With a warm
    /// cache it runs no process.
    ///
    /// # Errors
    /// If no compiler works, the cache has no folder, or a variable holds no known value.
    pub fn from_environment(progress: &mut dyn Progress) -> Result<Self, CompileError> {
        let cache = Cache::open(&CacheSettings::from_environment(), progress)?;
        let toolchain = toolchain::find(&Search::from_environment(), &cache)?;
        let target = features::detect(&toolchain, features::forced_isa()?, &cache)?;
        Ok(CompileOptions {
            toolchain,
            target,
            cache,
            jobs: thread::available_parallelism().map_or(1, usize::from),
        })
    }

    fn key(&self, source: &str) -> Key {
        Key::new(&[
            "module",
            self.toolchain.identity(),
            &self.target.cflags.join("\0"),
            features::cpu_identity(),
            source,
        ])
    }
}

/// A source that the compiler refused.
#[derive(Debug)]
pub struct UnitFailure {
    /// The unit's name.
    pub name: String,
    /// The first lines of the compiler's complaint.
    pub diagnostics: String,
    /// Where the source was kept, if it could be.
    pub source_path: Option<PathBuf>,
}

/// Why sources could not become modules.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// The compiler refused one or more sources; all of them are listed.
    #[error("{}", failures_message(.0))]
    Refused(Vec<UnitFailure>),
    /// The compiler could not be started.
    #[error("the C compiler {compiler} does not start: {source}")]
    Start {
        /// The compiler.
        compiler: String,
        /// Why.
        source: io::Error,
    },
    /// A compiled module could not be loaded.
    #[error("kernel {name}: {source}")]
    Load {
        /// The unit's name.
        name: String,
        /// Why.
        source: LoadError,
    },
    /// [`Progress::is_interrupted`] said so.
    #[error("the compilation was interrupted")]
    Interrupted,
    /// A file could not be written.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// There is no C compiler.
    #[error(transparent)]
    Toolchain(#[from] ToolchainError),
    /// Compiled code does not run on this CPU.
    #[error(transparent)]
    Feature(#[from] FeatureError),
}

fn failures_message(failures: &[UnitFailure]) -> String {
    let mut lines = Vec::new();
    for failure in failures {
        lines.push(format!("the C compiler refused kernel {}:", failure.name));
        lines.extend(failure.diagnostics.lines().map(|line| format!("  {line}")));
        if let Some(path) = &failure.source_path {
            lines.push(format!("  its source is kept in {}", path.display()));
        }
    }
    lines.join("\n")
}

/// Compiles `units` and loads them; the result has one module per unit, in order,
/// and units with equal sources share one. Every failure is collected before an
/// error is returned. Failed calls leave only whole cache entries behind.
///
/// # Errors
/// All files that do not compile, with the compiler's messages; that a compiler does not start or a result does
/// not load; or that the caller interrupted the work.
pub fn compile(
    units: &[SourceUnit],
    options: &CompileOptions,
    progress: &mut dyn Progress,
) -> Result<Vec<Arc<Module>>, CompileError> {
    let start = Instant::now();
    show_sources(units, progress);
    let keys: Vec<Key> = units.iter().map(|unit| options.key(&unit.source)).collect();
    // Sources in order of first appearance: one job each.
    let mut job_of_key = BTreeMap::new();
    let mut jobs: Vec<(&SourceUnit, Key)> = Vec::new();
    for (unit, key) in units.iter().zip(&keys) {
        job_of_key.entry(*key).or_insert_with(|| {
            jobs.push((unit, *key));
            jobs.len() - 1
        });
    }
    let mut results: Vec<Option<Result<Arc<Module>, JobError>>> = Vec::new();
    results.resize_with(jobs.len(), || None);
    let mut done = 0;
    let mut stored = false;
    let mut unkept = None;
    progress.units_written(jobs.len());
    run_jobs(&jobs, options, progress, |progress, job_idx, outcome| {
        done += 1;
        let cached = matches!(outcome, Ok((_, Origin::Cache)));
        stored |= matches!(outcome, Ok((_, Origin::Compiler)));
        if let Ok((_, Origin::Unkept(problem))) = &outcome {
            unkept.get_or_insert_with(|| problem.clone());
        }
        progress.unit_ready(&UnitReady {
            name: &jobs[job_idx].0.name,
            done,
            total: jobs.len(),
            seconds: start.elapsed().as_secs_f64(),
            cached,
        });
        results[job_idx] = Some(outcome.map(|(module, _)| module));
    });
    if stored {
        options.cache.trim();
    }
    if let Some(problem) = unkept {
        progress.warn(&format!(
            "compiled kernels are not kept for the next process: {problem}"
        ));
    }
    let modules = settle(results)?;
    units
        .iter()
        .zip(&keys)
        .map(|(unit, key)| {
            let module = Arc::clone(&modules[job_of_key[key]]);
            check_symbols(unit, &module)?;
            Ok(module)
        })
        .collect()
}

/// Writes the C text into the folder that `SHORTHAUL_SOURCES` names, for whoever wants to read it.
fn show_sources(units: &[SourceUnit], progress: &mut dyn Progress) {
    let Some(folder) = std::env::var_os("SHORTHAUL_SOURCES").map(PathBuf::from) else {
        return;
    };
    for unit in units {
        let path = folder.join(format!("{}.c", unit.name));
        let written =
            std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&path, &unit.source));
        if let Err(error) = written {
            progress.warn(&format!(
                "SHORTHAUL_SOURCES: {} cannot be written: {error}",
                path.display()
            ));
            return;
        }
    }
}

fn check_symbols(unit: &SourceUnit, module: &Arc<Module>) -> Result<(), CompileError> {
    for symbol in &unit.symbols {
        module
            .function(symbol)
            .map_err(|source| CompileError::Load {
                name: unit.name.clone(),
                source,
            })?;
    }
    Ok(())
}

/// Where a module came from.
enum Origin {
    Cache,
    Compiler,
    /// The compiler; the module could not be kept in the cache, for this reason.
    Unkept(String),
}

enum JobError {
    Refused(UnitFailure),
    Other(CompileError),
}

impl<E: Into<CompileError>> From<E> for JobError {
    fn from(error: E) -> Self {
        JobError::Other(error.into())
    }
}

/// All modules, or all refusals, or the first failure of another sort. Jobs without
/// a result were not started; there are some only after such a failure.
fn settle(
    results: Vec<Option<Result<Arc<Module>, JobError>>>,
) -> Result<Vec<Arc<Module>>, CompileError> {
    let mut modules = Vec::new();
    let mut refused = Vec::new();
    let mut other = None;
    for result in results.into_iter().flatten() {
        match result {
            Ok(module) => modules.push(module),
            Err(JobError::Refused(failure)) => refused.push(failure),
            Err(JobError::Other(error)) => other = other.or(Some(error)),
        }
    }
    match other {
        Some(error) => Err(error),
        None if refused.is_empty() => Ok(modules),
        None => Err(CompileError::Refused(refused)),
    }
}

type Outcome = Result<(Arc<Module>, Origin), JobError>;

/// Runs the jobs on up to `options.jobs` threads; `report` is called on this
/// thread as each ends. A broken disk or compiler stops the start of further jobs, and so does an
/// interruption, which ends the compilers that run as well.
fn run_jobs(
    jobs: &[(&SourceUnit, Key)],
    options: &CompileOptions,
    progress: &mut dyn Progress,
    mut report: impl FnMut(&mut dyn Progress, usize, Outcome),
) {
    let next = AtomicUsize::new(0);
    let broken = AtomicBool::new(false);
    let interrupted = AtomicBool::new(false);
    let work = |send: mpsc::Sender<(usize, Outcome)>| {
        while !broken.load(Ordering::Relaxed) {
            let job_idx = next.fetch_add(1, Ordering::Relaxed);
            let Some((unit, key)) = jobs.get(job_idx) else {
                break;
            };
            let outcome = obtain(unit, key, options, &interrupted);
            if matches!(outcome, Err(JobError::Other(_))) {
                broken.store(true, Ordering::Relaxed);
            }
            if send.send((job_idx, outcome)).is_err() {
                break;
            }
        }
    };
    thread::scope(|scope| {
        let (send, receive) = mpsc::channel();
        let mut started = 0;
        for _ in 0..options.jobs.clamp(1, jobs.len().max(1)) {
            let send = send.clone();
            let spawned = thread::Builder::new().spawn_scoped(scope, || work(send));
            started += usize::from(spawned.is_ok());
        }
        if started == 0 {
            // No thread to be had: compile here, one after the other.
            work(send);
        } else {
            drop(send);
        }
        loop {
            match receive.recv_timeout(ASK_EVERY) {
                Ok((job_idx, outcome)) => report(progress, job_idx, outcome),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
            if !interrupted.load(Ordering::Relaxed) && progress.is_interrupted() {
                interrupted.store(true, Ordering::Relaxed);
                broken.store(true, Ordering::Relaxed);
            }
        }
    });
}

/// Takes a module from the cache or compiles it.
fn obtain(
    unit: &SourceUnit,
    key: &Key,
    options: &CompileOptions,
    interrupted: &AtomicBool,
) -> Outcome {
    if let Some(path) = options.cache.find(EntryKind::Library, key)
        // Another process may trim the entry between the two steps, or it may be
        // whole and still not load here (a shared folder): then compile.
        && let Ok(module) = Module::load(&path)
    {
        return Ok((Arc::new(module), Origin::Cache));
    }
    let (folder, library_path) = compile_source(unit, key, options, interrupted)?;
    let kept = read(&library_path).and_then(|library| {
        let path = options.cache.write(EntryKind::Library, key, &library)?;
        Ok((path, Origin::Compiler))
    });
    // Code that is loaded stays mapped when its file goes.
    let (path, origin) = match kept {
        Ok(kept) => kept,
        Err(error) => (library_path, Origin::Unkept(error.to_string())),
    };
    let module = Module::load(&path).map_err(|source| CompileError::Load {
        name: unit.name.clone(),
        source,
    })?;
    drop(folder);
    Ok((Arc::new(module), origin))
}

/// Runs the compiler. Returns the folder it worked in and the path of the shared library there. If the cache's
/// disk fills up, the compiler works elsewhere.
fn compile_source(
    unit: &SourceUnit,
    key: &Key,
    options: &CompileOptions,
    interrupted: &AtomicBool,
) -> Result<(TempDir, PathBuf), JobError> {
    let full = match options.cache.work_folder() {
        Ok(folder) => match compile_in(folder, unit, key, options, interrupted) {
            Err(JobError::Other(CompileError::Cache(full))) => full,
            done => return done,
        },
        Err(full) => full,
    };
    for folder in options.cache.work_folders_elsewhere() {
        match compile_in(folder, unit, key, options, interrupted) {
            Err(JobError::Other(CompileError::Cache(_))) => {}
            done => return done,
        }
    }
    Err(full.into())
}

/// Compiles in this folder. A full disk is an error of the cache, not a refusal.
fn compile_in(
    folder: TempDir,
    unit: &SourceUnit,
    key: &Key,
    options: &CompileOptions,
    interrupted: &AtomicBool,
) -> Result<(TempDir, PathBuf), JobError> {
    let source_path = folder.path().join("kernel.c");
    let library_path = folder.path().join("kernel.so");
    let cannot_write = |source| CacheError::Write {
        path: source_path.clone(),
        source,
    };
    fs::write(&source_path, &unit.source).map_err(cannot_write)?;
    let complaint_path = folder.path().join("complaint");
    let complaint = fs::File::create(&complaint_path).map_err(cannot_write)?;
    let status = options
        .toolchain
        .process()
        // Relative names keep machine paths out of the library and the messages.
        .current_dir(folder.path())
        // The compiler's own temporary files go with the folder if it is killed.
        .env("TMPDIR", folder.path())
        .args(&options.target.cflags)
        .args(["-o", "kernel.so", "kernel.c", "-lm"])
        .stdout(Stdio::null())
        .stderr(complaint)
        .spawn()
        .and_then(|compiler| end_of(compiler, interrupted))
        .map_err(|source| CompileError::Start {
            compiler: options.toolchain.describe(),
            source,
        })?
        .ok_or(CompileError::Interrupted)?;
    if !status.success() {
        // Writing as many bytes as the compiler may have asked for tells whether the disk is full.
        let room = vec![1u8; ROOM_BYTES];
        fs::write(folder.path().join("room"), room).map_err(cannot_write)?;
        let complaint = fs::read(&complaint_path).unwrap_or_default();
        let complaint = String::from_utf8_lossy(&complaint);
        return Err(JobError::Refused(UnitFailure {
            name: unit.name.clone(),
            diagnostics: first_lines(&complaint, &status.to_string()),
            source_path: keep_source(unit, key, &options.cache),
        }));
    }
    Ok((folder, library_path))
}

/// Waits for a compiler; `None` if it was ended by an interruption.
fn end_of(mut compiler: Child, interrupted: &AtomicBool) -> io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = compiler.try_wait()? {
            return Ok(Some(status));
        }
        if interrupted.load(Ordering::Relaxed) {
            // It may have ended in between.
            let _ = compiler.kill();
            compiler.wait()?;
            return Ok(None);
        }
        thread::sleep(LOOK_EVERY);
    }
}

fn read(path: &Path) -> Result<Vec<u8>, CacheError> {
    fs::read(path).map_err(|source| CacheError::Write {
        path: path.to_path_buf(),
        source,
    })
}

/// The complaint up to [`SHOWN_LINES`] lines; a compiler killed by a signal says
/// nothing, so `status` stands in.
fn first_lines(complaint: &str, status: &str) -> String {
    let mut lines: Vec<&str> = complaint.lines().collect();
    if lines.is_empty() {
        return format!("no message; the compiler ended with {status}");
    }
    let left_out = lines.len().saturating_sub(SHOWN_LINES);
    lines.truncate(SHOWN_LINES);
    let mut text = lines.join("\n");
    if left_out > 0 {
        text.push_str(&format!("\n({left_out} more lines)"));
    }
    text
}

/// Keeps the text a person needs to look into a refusal. The name is the unit's,
/// reduced to file name characters, and the start of its key.
fn keep_source(unit: &SourceUnit, key: &Key, cache: &Cache) -> Option<PathBuf> {
    let name: String = unit
        .name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .take(60)
        .collect();
    let hex = key.to_string();
    // If even this fails, the compiler's own message must still come through.
    cache
        .keep_text(&format!("{name}-{}.c", &hex[..12]), &unit.source)
        .ok()
}
