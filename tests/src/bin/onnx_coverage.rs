//! `onnx-coverage CASES… [--compile[=N]] [PAGE.md]`: the standard's cases through importer, interpreter and C, as a
//! page. With `--compile=N`, every N-th case is compiled.
//!
//! `cargo xtask onnx-coverage` writes the cases and calls it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use tests::onnx_coverage::{Found, look_at, page};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_option = |a: &&String| a.starts_with("--compile");
    let every = match arguments.iter().find(is_option) {
        None => None,
        Some(option) => match option.strip_prefix("--compile=").map(str::parse::<usize>) {
            None => Some(1),
            Some(Ok(n)) if n > 0 => Some(n),
            Some(_) => {
                eprintln!("error: {option} does not say every how many-th case is compiled");
                return ExitCode::from(2);
            }
        },
    };
    let paths = arguments.iter().filter(|a| !is_option(a));
    let (pages, cases): (Vec<&String>, Vec<&String>) = paths.partition(|p| p.ends_with(".md"));
    if cases.is_empty() {
        eprintln!("error: give the folders of the cases");
        return ExitCode::from(2);
    }
    let all: Vec<PathBuf> = cases.iter().flat_map(|c| folders(Path::new(c))).collect();
    let found = look_at_all(&all, every);
    let text = page(&found, "cargo xtask onnx-coverage");
    let written = match pages.first() {
        Some(path) => std::fs::write(path, text),
        None => {
            print!("{text}");
            Ok(())
        }
    };
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The cases, by name.
fn folders(cases: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(cases).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    folders.sort();
    folders
}

/// Looks at all cases; compiles one in `every`, or none.
fn look_at_all(folders: &[PathBuf], every: Option<usize>) -> Vec<Found> {
    let next = AtomicUsize::new(0);
    let found = Mutex::new(Vec::new());
    let work = || {
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            let Some(folder) = folders.get(n) else { break };
            let compiles = every.is_some_and(|every| n.is_multiple_of(every));
            if let (Some(one), Ok(mut all)) = (look_at(folder, compiles), found.lock()) {
                all.push(one);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, |n| n.get()) {
            scope.spawn(work);
        }
    });
    let mut found = found.into_inner().unwrap_or_default();
    found.sort_by(|a, b| a.case.cmp(&b.case));
    found
}
