//! `cargo xtask snapshots`: runs the Rust tests with `SHORTHAUL_UPDATE=1`, under which a snapshot
//! test writes its file instead of comparing it. What changed is then read with `git diff`.

use anyhow::Result;
use std::path::Path;
use std::process::{Command, ExitCode};

use crate::command::run_shown;
use crate::test::cargo;

/// Runs `cargo test` with `args` (all of the workspace without any) and lists the changed files.
pub fn run(root: &Path, args: &[String]) -> Result<ExitCode> {
    let mut tests = cargo(root);
    tests.arg("test").env("SHORTHAUL_UPDATE", "1");
    if args.is_empty() {
        tests.args(["--workspace", "--no-fail-fast"]);
    }
    let done = run_shown(tests.args(args))?;
    run_shown(
        Command::new("git")
            .current_dir(root)
            .args(["status", "--short"]),
    )?;
    println!("Read the changes with `git diff`; a commit that changes a snapshot says why.");
    Ok(if done.success {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
