//! `cargo xtask test`: every check of house rules and every test, in one run.
//!
//! A step that fails does not stop the later ones, so that all problems show at once. The last line
//! printed is `N passed, N failed` over all steps; a step without a runner of its own counts as one.

use crate::command::{Finished, display, run_quiet, run_shown};
use crate::python::{Build, Venv};
use crate::tally::Tally;
use crate::{browser, layering, python, release, tidy};
use anyhow::{Result, bail};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Which of the checks to run.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Parts {
    rust: bool,
    python: bool,
    /// The tests of the Python package alone, with this version of PyTorch.
    torch: Option<String>,
}

impl Parts {
    /// Reads the arguments behind `cargo xtask test`.
    pub fn parse(args: &[String]) -> Result<Self> {
        match args
            .iter()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .as_slice()
        {
            [] => Ok(Parts {
                rust: true,
                python: true,
                ..Parts::default()
            }),
            ["--rust"] => Ok(Parts {
                rust: true,
                ..Parts::default()
            }),
            ["--python"] => Ok(Parts {
                python: true,
                ..Parts::default()
            }),
            ["--torch", version] => Ok(Parts {
                torch: Some(version.to_string()),
                ..Parts::default()
            }),
            other => bail!(
                "`cargo xtask test` takes --rust, --python or --torch VERSION, not {}",
                other.join(" ")
            ),
        }
    }
}

/// The steps done so far.
#[derive(Default)]
struct Steps {
    done: Vec<Step>,
}

struct Step {
    name: &'static str,
    tally: Tally,
    took: Duration,
}

/// Runs the checks and prints their sum.
pub fn run(root: &Path, parts: Parts) -> Result<ExitCode> {
    let mut steps = Steps::default();
    // The Rust tests do not keep every processor busy.
    let package = (parts.rust && parts.python).then(start_package);
    if parts.rust {
        run_rust(root, &mut steps);
    }
    if parts.python {
        run_python(root, package, &mut steps);
    }
    if let Some(version) = &parts.torch {
        run_with_torch(root, version, &mut steps);
    }
    Ok(steps.report())
}

fn run_rust(root: &Path, steps: &mut Steps) {
    steps.run("layering", || {
        check_list("the dependency table", layering::breaches(root)?)
    });
    steps.run("tidy", || {
        check_list("the house rules", tidy::breaches(root)?)
    });
    steps.run("format", || {
        check(cargo(root).args(["fmt", "--all", "--check"]))
    });
    steps.run("clippy", || {
        let mut clippy = cargo(root);
        check(clippy.args([
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ]))
    });
    steps.run("cargo test", || {
        let done = run_shown(cargo(root).args(["test", "--workspace", "--no-fail-fast"]))?;
        Ok(tally_of_runner(&done, Tally::of_cargo_test(&done.text)))
    });
}

/// `cargo xtask package`, running.
type Package = JoinHandle<Result<Option<Finished>>>;

/// Starts `cargo xtask package` beside what follows.
fn start_package() -> Package {
    std::thread::spawn(|| run_quiet(Command::new(std::env::current_exe()?).arg("package")))
}

/// Waits for the package and shows the output. If it failed, the steps that need it try again and report why.
fn show_package(package: Package) {
    if let Ok(Ok(Some(done))) = package.join() {
        print!("{}", done.text);
    }
}

fn run_python(root: &Path, package: Option<Package>, steps: &mut Steps) {
    let mut venv = None;
    steps.run("python environment", || {
        if let Some(package) = package {
            show_package(package);
        }
        venv = Some(python::prepare(root)?);
        Ok(Tally::one(true))
    });
    let Some(venv) = venv else { return };
    steps.run("ruff check", || {
        check(venv.module("ruff").args(["check", "."]))
    });
    steps.run("ruff format", || {
        check(venv.module("ruff").args(["format", "--check", "."]))
    });
    steps.run("onnx node cases", || {
        let cases = root.join("target/onnx-node-cases");
        let mut dump = venv.python();
        check(dump.arg("onnx/tests/dump_node_cases.py").arg(&cases))?;
        let mut test = cargo(root);
        test.args(WHOLE)
            .args(["--test", "node_cases", "--", "--ignored"]);
        let done = run_shown(test.env("SHORTHAUL_NODE_CASES", &cases))?;
        Ok(tally_of_runner(&done, Tally::of_cargo_test(&done.text)))
    });
    steps.run("damaged files", || {
        let done = run_shown(&mut hostile_files(root, &WHOLE))?;
        Ok(tally_of_runner(&done, Tally::of_cargo_test(&done.text)))
    });
    steps.run("onnx coverage", || {
        let mut test = cargo(root);
        test.args(WHOLE)
            .args(["--test", "onnx_coverage", "--", "--ignored"]);
        test.env("SHORTHAUL_NODE_CASES", root.join("target/onnx-node-cases"));
        let done = run_shown(&mut test)?;
        Ok(tally_of_runner(&done, Tally::of_cargo_test(&done.text)))
    });
    steps.run("nvrtc", || {
        let folder = venv.nvrtc_folder()?;
        let mut test = cargo(root);
        test.args(WHOLE).arg("--lib");
        for file in [
            "nvrtc",
            "contraction",
            "warpgroup",
            "cuda_nvrtc_networks",
            "cuda_operators",
        ] {
            test.args(["--test", file]);
        }
        let done = run_shown(
            test.args(["--", "--ignored"])
                .env("SHORTHAUL_NVRTC", &folder)
                .env("SHORTHAUL_CUBLASLT", &folder)
                .env("SHORTHAUL_CUDNN", venv.cudnn_folder()?),
        )?;
        Ok(tally_of_runner(&done, Tally::of_cargo_test(&done.text)))
    });
    let mut built = false;
    steps.run("python package", || {
        python::build_package(root, &venv, Build::Tested)?;
        built = true;
        Ok(Tally::one(true))
    });
    if built {
        steps.run("wheel", || {
            let wheel = release::build_wheel(&venv, Build::Tested, &root.join("target/wheel"))?;
            release::try_wheel(&venv, &wheel)?;
            Ok(Tally::one(true))
        });
    }
    steps.run("browser", || {
        browser::require()?;
        Ok(Tally::one(true))
    });
    if built {
        run_pytest(root, &venv, steps);
    }
}

fn run_with_torch(root: &Path, version: &str, steps: &mut Steps) {
    let mut venv = None;
    steps.run("python package", || {
        let prepared = python::prepare_with_torch(root, version)?;
        python::build_package(root, &prepared, Build::Tested)?;
        venv = Some(prepared);
        Ok(Tally::one(true))
    });
    if let Some(venv) = venv {
        run_pytest(root, &venv, steps);
    }
}

fn run_pytest(root: &Path, venv: &Venv, steps: &mut Steps) {
    // This test runs two programs at a time itself.
    const PROGRAMS: &str = "torch-bridge/tests/test_programs.py";
    steps.run("small programs", || {
        let mut pytest = venv.module("pytest");
        pytest.args(["-q", PROGRAMS]);
        use_unoptimized_kernels(&mut pytest, &target_folder(root))?;
        let done = run_shown(&mut pytest)?;
        Ok(tally_of_runner(&done, Tally::of_pytest(&done.text)))
    });
    steps.run("pytest", || {
        let (program, network) = built_programs(root)?;
        let workers = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_WORKERS));
        let mut pytest = venv.module("pytest");
        // A file's tests share what they prepare, so a file stays with one worker.
        pytest.args(["-q", "-n", &workers.to_string(), "--dist", "loadfile"]);
        pytest.args(["--durations=15", "--ignore", PROGRAMS, "torch-bridge/tests"]);
        pytest.env("SHORTHAUL_PROGRAM", program);
        let done = run_shown(pytest.env("SHORTHAUL_RUST_NETWORK", network))?;
        Ok(tally_of_runner(&done, Tally::of_pytest(&done.text)))
    });
}

/// Lets a command compile kernels without optimization, into a cache of their own. The small programs test what is
/// captured, and optimized kernels would add a third to their time. The other tests of the package run optimized ones.
fn use_unoptimized_kernels(command: &mut Command, target: &Path) -> Result<()> {
    let named = std::env::var("SHORTHAUL_CC").ok();
    let compiler = named
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "cc".to_owned());
    let script = target.join("cc-unoptimized");
    // Of two options, the last one counts.
    fs::write(&script, format!("#!/bin/sh\nexec {compiler} \"$@\" -O0\n"))?;
    fs::set_permissions(&script, Permissions::from_mode(0o755))?;
    // The variable is split into words as by a shell, so the path is quoted.
    command.env("SHORTHAUL_CC", format!("'{}'", script.display()));
    command.env("SHORTHAUL_CACHE_DIR", target.join("test-cache-unoptimized"));
    Ok(())
}

/// Each worker of pytest is a PyTorch, and keeps up to 3 GB.
const MAX_WORKERS: usize = 4;

/// The program `shorthaul` and the example `rust_network`, brought up to date: `cargo test` builds them too.
fn built_programs(root: &Path) -> Result<(PathBuf, PathBuf)> {
    let mut build = cargo(root);
    build.args([
        "build",
        "--workspace",
        "--bin",
        "shorthaul",
        "--example",
        "rust_network",
    ]);
    check(&mut build)?;
    let folder = target_folder(root).join("debug");
    Ok((
        folder.join("shorthaul"),
        folder.join("examples/rust_network"),
    ))
}

/// What `cargo test` tests here. A part of the workspace alone would be built anew, since it needs fewer features of
/// the crates that all share.
const WHOLE: [&str; 2] = ["test", "--workspace"];

/// The tests of damaged files on the standard's node cases, where these are written.
pub fn hostile_files(root: &Path, tested: &[&str]) -> Command {
    let mut test = cargo(root);
    test.args(tested)
        .args(["--test", "hostile_files", "--", "--ignored"]);
    test.env("SHORTHAUL_NODE_CASES", root.join("target/onnx-node-cases"));
    test
}

/// A `cargo` command in the folder of the workspace.
pub fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}

/// Where `cargo` puts what it builds.
pub fn target_folder(root: &Path) -> PathBuf {
    root.join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// A command that counts as one check: it holds where the command succeeds.
fn check(command: &mut Command) -> Result<Tally> {
    let done = run_shown(command)?;
    if !done.success {
        bail!("`{}` ended with {}", display(command), done.ending);
    }
    Ok(Tally::one(true))
}

/// A check of the house rules, which counts as one, with the breaches it found.
fn check_list(rule: &str, breaches: Vec<String>) -> Result<Tally> {
    if breaches.is_empty() {
        return Ok(Tally::one(true));
    }
    bail!(
        "{} breach(es) of {rule}:\n  {}",
        breaches.len(),
        breaches.join("\n  ")
    )
}

/// The counts of a runner. If it failed without counting a failure (it did not compile, or crashed), it fails once.
fn tally_of_runner(done: &Finished, counted: Tally) -> Tally {
    let unseen = !done.success && counted.failed == 0;
    Tally {
        failed: counted.failed + u64::from(unseen),
        ..counted
    }
}

impl Steps {
    fn run(&mut self, name: &'static str, step: impl FnOnce() -> Result<Tally>) {
        println!("==> {name}");
        let start = Instant::now();
        let tally = step().unwrap_or_else(|error| {
            eprintln!("error: {name}: {error:#}");
            Tally::one(false)
        });
        self.done.push(Step {
            name,
            tally,
            took: start.elapsed(),
        });
    }

    /// Prints a line per step and the sum as the last line.
    fn report(&self) -> ExitCode {
        println!();
        let mut sum = Tally::default();
        for step in &self.done {
            let skipped = match step.tally.skipped {
                0 => String::new(),
                n => format!(", {n} skipped"),
            };
            let seconds = step.took.as_secs_f64();
            println!(
                "{:<20} {:>7.1} s  {}{skipped}",
                step.name, seconds, step.tally
            );
            sum += step.tally;
        }
        println!("{sum}");
        if sum.failed == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(success: bool) -> Finished {
        Finished {
            success,
            ending: String::new(),
            text: String::new(),
        }
    }

    #[test]
    fn a_crash_without_a_count_is_one_failure() {
        let four = Tally {
            passed: 4,
            failed: 0,
            skipped: 0,
        };
        assert_eq!(tally_of_runner(&finished(false), four).failed, 1);
        assert_eq!(tally_of_runner(&finished(true), four), four);
        let counted = Tally {
            passed: 4,
            failed: 2,
            skipped: 0,
        };
        assert_eq!(tally_of_runner(&finished(false), counted), counted);
    }

    #[test]
    fn a_failed_step_is_counted_and_does_not_stop_the_next() {
        let mut steps = Steps::default();
        steps.run("first", || bail!("broken"));
        steps.run("second", || Ok(Tally::one(true)));
        let tallies: Vec<Tally> = steps.done.iter().map(|step| step.tally).collect();
        assert_eq!(tallies, [Tally::one(false), Tally::one(true)]);
    }

    #[test]
    fn unknown_options_are_refused() {
        let parse =
            |args: &[&str]| Parts::parse(&args.iter().map(|a| a.to_string()).collect::<Vec<_>>());
        assert!(parse(&["--fast"]).is_err());
        assert_eq!(
            parse(&["--rust"]).ok(),
            Some(Parts {
                rust: true,
                ..Parts::default()
            })
        );
        assert!(parse(&["--torch"]).is_err());
        assert_eq!(
            parse(&["--torch", "2.12.1"]).ok(),
            Some(Parts {
                torch: Some("2.12.1".to_owned()),
                ..Parts::default()
            })
        );
    }
}
