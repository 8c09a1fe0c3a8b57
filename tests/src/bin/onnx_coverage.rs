//! `onnx-coverage CASES… [--compile] [PAGE.md]`: the standard's cases through importer, interpreter and C, as a page.
//!
//! `cargo xtask onnx-coverage` writes the cases and calls it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use tests::onnx_coverage::{Found, look_at, page};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let compiles = arguments.iter().any(|a| a == "--compile");
    let paths = arguments.iter().filter(|a| *a != "--compile");
    let (pages, cases): (Vec<&String>, Vec<&String>) = paths.partition(|p| p.ends_with(".md"));
    if cases.is_empty() {
        eprintln!("error: give the folders of the cases");
        return ExitCode::from(2);
    }
    let all: Vec<PathBuf> = cases.iter().flat_map(|c| folders(Path::new(c))).collect();
    let found = look_at_all(&all, compiles);
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

fn look_at_all(folders: &[PathBuf], compiles: bool) -> Vec<Found> {
    let next = AtomicUsize::new(0);
    let found = Mutex::new(Vec::new());
    let work = || {
        while let Some(folder) = folders.get(next.fetch_add(1, Ordering::Relaxed)) {
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
