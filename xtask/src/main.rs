//! `cargo xtask`: the commands a developer runs. Owns the command line; each command is a module.
//!
//! It never takes part in the product: no room depends on it.

mod browser;
mod command;
mod demo;
mod layering;
mod mutations;
mod notebook;
mod onnx_coverage;
mod python;
mod release;
mod snapshots;
mod source;
mod tally;
mod test;
mod tidy;

use anyhow::{Result, bail};
use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "\
cargo xtask test [--rust | --python]   check the house rules and run every test, or one half
cargo xtask test --torch VERSION       test the Python package with another PyTorch, in target/torch-VERSION
cargo xtask package                    build the Python package into .venv as the tests run it
cargo xtask demo [ARGS...]             train on digits in PyTorch and in Shorthaul, side by side
cargo xtask notebook [ARGS...]         open the guided tuning notebook in JupyterLab
cargo xtask release                    build the wheel and a static program into dist, and try them
cargo xtask release --from-index [--torch VERSION]
                                       also try the wheel with the dependencies that pip gets from the package
                                       index, or with that PyTorch
cargo xtask snapshots [ARGS...]        run the Rust tests and rewrite their snapshot files
cargo xtask mutations [N | A..B]       run every command on N damaged ONNX files (default: 20000)
cargo xtask extremes [N | A..B]        the same on N ONNX files with extreme attributes and sizes
cargo xtask onnx-coverage              try the ONNX standard's cases and write docs/src/onnx-coverage.md

ARGS are passed on: those of `demo` to `python -m shorthaul.demo`, of `notebook` to `jupyter lab`,
of `snapshots` to `cargo test`.
Python packages are installed into .venv, or into the folder that SHORTHAUL_VENV names.";

fn main() -> ExitCode {
    match dispatch() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch() -> Result<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let root = workspace_root()?;
    match args.first().map(String::as_str) {
        Some("test") => test::run(&root, test::Parts::parse(&args[1..])?),
        Some("package") if args.len() == 1 => python::package(&root).map(|()| ExitCode::SUCCESS),
        Some("package") => bail!("`cargo xtask package` takes no argument"),
        Some("demo") => demo::run(&root, &args[1..]),
        Some("notebook") => notebook::run(&root, &args[1..]),
        Some("release") => release::run(&root, &args[1..]),
        Some("snapshots") => snapshots::run(&root, &args[1..]),
        Some("mutations") => mutations::run(&root, mutations::Change::Damage, &args[1..]),
        Some("extremes") => mutations::run(&root, mutations::Change::Extremes, &args[1..]),
        Some("onnx-coverage") => onnx_coverage::run(&root, &args[1..]),
        Some("help" | "--help" | "-h") => {
            println!("{USAGE}");
            Ok(ExitCode::SUCCESS)
        }
        Some(other) => bail!("no command `{other}`\n\n{USAGE}"),
        None => bail!("no command given\n\n{USAGE}"),
    }
}

/// The folder of the workspace: the parent of this crate's folder.
fn workspace_root() -> Result<PathBuf> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    match here.parent() {
        Some(root) if root.join("Cargo.toml").is_file() => Ok(root.to_path_buf()),
        _ => bail!(
            "{} is not inside the workspace any more: run through `cargo xtask`",
            here.display()
        ),
    }
}
