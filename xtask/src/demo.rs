//! `cargo xtask demo`: from a fresh clone to a trained model: environment, package, run.
//!
//! The demo itself is the Python module `shorthaul.demo`, which writes its pictures to `out/`; this
//! only starts it and says where the pictures are.

use crate::command::run_shown;
use crate::python::{self, Build};
use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

/// What to try after the demo.
const NEXT: &str = "
What to try next:
  .venv/bin/python examples/language_model.py --eager    one of the scripts in examples/
  .venv/bin/python -m shorthaul.bench resnet50           training steps beside PyTorch's
  cargo install --path cli                               the program `shorthaul` for ONNX files
  docs/src/getting-started.md                            how to compile your own model";

/// Prepares what is missing and runs the demo with `args`.
pub fn run(root: &Path, args: &[String]) -> Result<ExitCode> {
    python::require_c_compiler()?;
    let venv = python::prepare_for_demo(root)?;
    python::build_package(root, &venv, Build::Demo)?;
    let start = SystemTime::now();
    let done = run_shown(venv.module("shorthaul.demo").args(args))?;
    for picture in pictures_since(&root.join("out"), start) {
        println!("Picture: {}", picture.display());
    }
    if done.success {
        println!("{NEXT}");
    }
    Ok(if done.success {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The PNG files directly in `folder` that were written at or after `start`, by name.
fn pictures_since(folder: &Path, start: SystemTime) -> Vec<PathBuf> {
    let files = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let written_since = |path: &PathBuf| {
        let written = fs::metadata(path).and_then(|about| about.modified());
        written.is_ok_and(|written| written >= start)
    };
    let is_png = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "png");
    let mut found: Vec<PathBuf> = files.filter(is_png).filter(written_since).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_to_try_next_exists() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let words = NEXT.split_whitespace().filter(|word| word.contains('/'));
        let paths: Vec<&str> = words.filter(|word| !word.starts_with(".venv/")).collect();
        assert!(paths.contains(&"docs/src/getting-started.md"), "{paths:?}");
        for path in paths {
            assert!(root.join(path).exists(), "{path}");
        }
    }

    #[test]
    fn only_new_pictures_are_named() {
        let folder = std::env::temp_dir().join(format!("xtask-pictures-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let (picture, text) = (folder.join("loss.png"), folder.join("loss.txt"));
        fs::write(&picture, "x")
            .and_then(|()| fs::write(&text, "x"))
            .expect("files");
        let written = fs::metadata(&picture)
            .and_then(|about| about.modified())
            .expect("a time");
        assert_eq!(pictures_since(&folder, written), [picture]);
        assert!(pictures_since(&folder, written + Duration::from_secs(1)).is_empty());
        fs::remove_dir_all(&folder).expect("the folder goes");
    }
}
