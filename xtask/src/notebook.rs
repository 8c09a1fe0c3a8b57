//! `cargo xtask notebook`: the guided notebook in JupyterLab, from a fresh clone on.
//!
//! Owns what is installed on demand. The notebook itself lies in `notebooks`.

use crate::command::run_quiet;
use crate::python::{self, Build};
use anyhow::{Context, Result};
use std::path::Path;
use std::process::ExitCode;

const NOTEBOOK: &str = "notebooks/guided_tuning.ipynb";

/// What JupyterLab needs besides the environment of the tests.
const REQUIREMENTS: &str = "notebooks/requirements.txt";

/// Prepares what is missing and starts JupyterLab with `args`, until it is stopped.
pub fn run(root: &Path, args: &[String]) -> Result<ExitCode> {
    python::require_c_compiler()?;
    let venv = python::prepare(root)?;
    python::build_package(root, &venv, Build::Release)?;
    let found = run_quiet(venv.python().args(["-c", "import jupyterlab"]))?;
    if !found.is_some_and(|done| done.success) {
        println!("Installing JupyterLab ...");
        python::install(&venv, REQUIREMENTS)?;
    }
    // It asks on the terminal before it stops, so input and output are the terminal's.
    let mut jupyter = venv.module("jupyter");
    let ended = jupyter
        .args(["lab", NOTEBOOK])
        .args(args)
        .status()
        .context("cannot start JupyterLab")?;
    Ok(match ended.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
