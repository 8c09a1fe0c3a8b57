//! `cargo xtask mutations` and `cargo xtask extremes`: runs a number of damaged ONNX files, or files with extreme
//! attributes, through everything that reads one.
//!
//! Owns the numbers (`N` files, or those from `A..B`) and the standard's node cases; the damage and the judgement
//! are in `tests/tests/hostile_files.rs`.

use crate::command::run_shown;
use crate::python;
use crate::test::hostile_files;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::ExitCode;

/// How many files, if the command does not say.
const USUAL: &str = "20000";

/// What is done to the node cases.
#[derive(Clone, Copy)]
pub enum Change {
    /// Anything that damages a file.
    Damage,
    /// Extreme attributes and sizes.
    Extremes,
}

impl Change {
    /// The command, the variable that holds the numbers, and which tests read it.
    fn names(self) -> (&'static str, &'static str, &'static [&'static str]) {
        match self {
            Change::Damage => ("mutations", "SHORTHAUL_MUTATIONS", &["--skip", "extreme"]),
            Change::Extremes => ("extremes", "SHORTHAUL_EXTREMES", &["extreme"]),
        }
    }
}

/// Writes the node cases, then changes them.
pub fn run(root: &Path, change: Change, args: &[String]) -> Result<ExitCode> {
    let (command, variable, tests) = change.names();
    let numbers = match args {
        [] => USUAL,
        [numbers] => numbers,
        _ => bail!("`cargo xtask {command}` takes one number, or a range `A..B`"),
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
    let done = run_shown(test.args(tests).env(variable, numbers))?;
    Ok(match done.success {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
