//! `cargo xtask mutations`: as many damaged ONNX files as asked for, through everything that reads one.
//!
//! Owns the number and the standard's node cases; the damage and the judgement are in `tests/tests/hostile_files.rs`.

use crate::command::run_shown;
use crate::python;
use crate::test::hostile_files;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::ExitCode;

/// How many if nobody says.
const USUAL: usize = 20_000;

/// Writes the node cases, then damages them.
pub fn run(root: &Path, args: &[String]) -> Result<ExitCode> {
    let n = match args {
        [] => USUAL,
        [n] => n.parse().with_context(|| format!("`{n}` is no number"))?,
        _ => bail!("`cargo xtask mutations` takes one number"),
    };
    let venv = python::prepare(root)?;
    let mut dump = venv.python();
    dump.arg("onnx/tests/dump_node_cases.py");
    let dumped = run_shown(dump.arg(root.join("target/onnx-node-cases")))?;
    if !dumped.success {
        bail!("the node cases cannot be written: {}", dumped.ending);
    }
    let mut test = hostile_files(root, &["--release"]);
    let done = run_shown(test.env("SHORTHAUL_MUTATIONS", n.to_string()))?;
    Ok(match done.success {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
