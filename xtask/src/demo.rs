//! `cargo xtask demo`: from a fresh clone to a trained model: environment, package, run.
//!
//! The demo itself is the Python module `shorthaul.demo`; this only brings it up.

use crate::command::run_shown;
use crate::python;
use anyhow::Result;
use std::path::Path;
use std::process::ExitCode;

/// Prepares what is missing and runs the demo with `args`.
pub fn run(root: &Path, args: &[String]) -> Result<ExitCode> {
    python::require_c_compiler()?;
    let venv = python::prepare(root)?;
    python::build_package(root, &venv)?;
    let done = run_shown(venv.module("shorthaul.demo").args(args))?;
    Ok(if done.success {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
