//! `cargo xtask mutations`: as many damaged ONNX files as asked for, through everything that reads one.
//!
//! Owns the numbers (`N` files, or those from `A..B`) and the standard's node cases; the damage and the judgement
//! are in `tests/tests/hostile_files.rs`.

use crate::command::run_shown;
use crate::python;
use crate::test::hostile_files;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::ExitCode;

/// How many if nobody says.
const USUAL: &str = "20000";

/// Writes the node cases, then damages them.
pub fn run(root: &Path, args: &[String]) -> Result<ExitCode> {
    let numbers = match args {
        [] => USUAL,
        [numbers] => numbers,
        _ => bail!("`cargo xtask mutations` takes one number, or a range `A..B`"),
    };
    for number in numbers.splitn(2, "..") {
        let _: usize = number
            .parse()
            .with_context(|| format!("`{number}` is not a number"))?;
    }
    let venv = python::prepare(root)?;
    let mut dump = venv.python();
    dump.arg("onnx/tests/dump_node_cases.py");
    let dumped = run_shown(dump.arg(root.join("target/onnx-node-cases")))?;
    if !dumped.success {
        bail!(
            "cannot write the node cases: `onnx/tests/dump_node_cases.py` ended with {}",
            dumped.ending
        );
    }
    let mut test = hostile_files(root, &["test", "-p", "shorthaul-tests", "--release"]);
    let done = run_shown(test.env("SHORTHAUL_MUTATIONS", numbers))?;
    Ok(match done.success {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
