//! `cargo xtask onnx-coverage`: what is known of each operator of the ONNX standard, as a page.
//!
//! Owns where the cases and the page are; how a case is run and judged is in `tests/src/onnx_coverage`.

use crate::command::run_shown;
use crate::python;
use crate::test::cargo;
use anyhow::{Result, bail};
use std::path::Path;
use std::process::ExitCode;

/// Writes the cases of the onnx package, then the page. Takes minutes: the C of every imported case is compiled.
pub fn run(root: &Path, args: &[String]) -> Result<ExitCode> {
    if !args.is_empty() {
        bail!("`cargo xtask onnx-coverage` takes no arguments");
    }
    let venv = python::prepare(root)?;
    let cases = root.join("target/onnx-node-cases");
    let models = root.join("target/onnx-model-cases");
    for (folder, kind) in [(&cases, None), (&models, Some("--models"))] {
        let mut dump = venv.python();
        dump.arg("onnx/tests/dump_node_cases.py")
            .arg(folder)
            .args(kind);
        let dumped = run_shown(&mut dump)?;
        if !dumped.success {
            bail!("the cases cannot be written: {}", dumped.ending);
        }
    }
    let mut coverage = cargo(root);
    coverage.args([
        "run",
        "--release",
        "-p",
        "shorthaul-tests",
        "--bin",
        "onnx-coverage",
        "--",
    ]);
    coverage.arg(&cases).arg(&models).arg("--compile");
    let done = run_shown(coverage.arg(root.join("docs/src/onnx-coverage.md")))?;
    Ok(match done.success {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
