//! `cargo xtask release`: what a release consists of, in `dist`: the wheel of the Python package and the program
//! `shorthaul` as one static file. Both are tried out: the wheel in an empty environment, the program on a small file.

use crate::command::{Finished, display, run_quiet, run_shown};
use crate::python::{self, Build, Venv, run_explained};
use crate::test::{cargo, target_folder};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Builds both, tries them out and says where they are. With `--from-index`, the wheel is also installed as its users
/// do: with its dependencies, perhaps with a version of PyTorch that `--torch` names.
pub fn run(root: &Path, args: &[String]) -> Result<ExitCode> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (from_index, torch) = match args.as_slice() {
        [] => (false, None),
        ["--from-index"] => (true, None),
        ["--from-index", "--torch", version] => (true, Some(*version)),
        _ => bail!("`cargo xtask release` takes no arguments but `--from-index [--torch VERSION]`"),
    };
    python::require_c_compiler()?;
    let venv = python::prepare(root)?;
    let dist = root.join("dist");
    fs::create_dir_all(&dist).with_context(|| format!("cannot make {}", dist.display()))?;
    let wheel = build_wheel(&venv, Build::Release, &dist)?;
    try_wheel(&venv, &wheel)?;
    if from_index {
        try_from_index(root, &venv, &wheel, torch)?;
    }
    let program = build_program(root, &dist)?;
    let sizes = [fs::metadata(&wheel)?.len(), fs::metadata(&program)?.len()];
    println!("\n{}", summary([&wheel, &program], sizes));
    Ok(ExitCode::SUCCESS)
}

/// What was made, how large it is, and how to install it.
fn summary([wheel, program]: [&Path; 2], bytes: [u64; 2]) -> String {
    let [of_wheel, of_program] = bytes.map(|n| format!("{:.1} MiB", n as f64 / f64::from(1 << 20)));
    let (wheel, program) = (wheel.display(), program.display());
    format!(
        "Made the Python package, {of_wheel}. Install it beside PyTorch:\n  \
         pip install {wheel}\n\
         Made the ONNX program, {of_program}, which needs no other file. Install it for this user:\n  \
         install -D {program} ~/.local/bin/shorthaul"
    )
}

/// Builds the wheel, in a folder that has no other wheel afterwards.
pub fn build_wheel(venv: &Venv, build: Build, folder: &Path) -> Result<PathBuf> {
    for old in wheels(folder) {
        fs::remove_file(&old).with_context(|| format!("cannot remove {}", old.display()))?;
    }
    let mut maturin = venv.module("maturin");
    maturin.arg("build").args(build.options());
    maturin.args(["--manifest-path", "torch-bridge/Cargo.toml", "--out"]);
    succeed(maturin.arg(folder))?;
    match wheels(folder).as_slice() {
        [wheel] => Ok(wheel.clone()),
        found => bail!("maturin wrote {} wheels instead of one", found.len()),
    }
}

fn wheels(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    files
        .filter(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .collect()
}

/// What a new environment with nothing but the wheel and PyTorch must be able to do.
const TRIAL: &str = "\
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import shorthaul

package = Path(shorthaul.__file__).parent
assert package.is_relative_to(sys.prefix), package
assert (package / 'py.typed').is_file()
assert (package / '_native.pyi').is_file()
assert any(file.name == 'LICENSE' for file in metadata.files('shorthaul'))
told = metadata.metadata('shorthaul')
assert told['License-Expression'] == 'Apache-2.0' and told['Requires-Python'] == '>=3.11', told
assert '# Shorthaul' in told['Description'] and told['Description-Content-Type'], told
assert metadata.version('shorthaul') == shorthaul.__version__
assert 'shorthaul' in torch._dynamo.list_backends(), torch._dynamo.list_backends()
measures = [Path(sys.prefix) / 'bin/shorthaul-bench', 'yolo_block', '--small', '--no-first-step']
measures += ['--rounds', '1', '--warmup', '1', '--against', 'eager']
measured = subprocess.run(measures, capture_output=True, text=True)
assert measured.returncode == 0 and 'the best peer, eager' in measured.stdout, measured


class Weighted(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


plain = Weighted(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
model, x = shorthaul.module(plain), torch.randn(5, 8)
optimizer = shorthaul.optim.AdamW(model.parameters())
expected = plain(x)
found = model(x)
torch.testing.assert_close(found, expected)
found.sum().backward()
optimizer.step()
assert not torch.equal(plain(x), expected)
print('shorthaul', shorthaul.__version__, 'beside PyTorch', torch.__version__)
";

/// Installs the wheel into a new environment, which sees PyTorch's packages but no other copy of Shorthaul, and trains
/// a step.
///
/// # Errors
/// A wheel that does not install, or misses a part.
pub fn try_wheel(venv: &Venv, wheel: &Path) -> Result<()> {
    within_folder("wheel", |folder| try_in(venv, wheel, folder))
}

/// Installs the wheel into a new environment with nothing else, where pip gets its dependencies from the package index,
/// and trains a step. This is left out of the test run: it loads 3 GB and fills 6 GB.
///
/// # Errors
/// A package index that cannot be reached, dependencies that do not fit together, or a wheel that misses a part.
fn try_from_index(root: &Path, venv: &Venv, wheel: &Path, torch: Option<&str>) -> Result<()> {
    println!("Installing the wheel and PyTorch into an empty environment (about 6 GB on disk) ...");
    // Where temporary files are kept, there may be less room.
    within(&target_folder(root), "index", |folder| {
        succeed(venv.module("venv").arg("--clear").arg(folder))?;
        let python = folder.join("bin/python");
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "--disable-pip-version-check"]);
        pip.args(["--no-input", "--no-cache-dir", "--quiet"]);
        pip.args(torch.map(|version| format!("torch=={version}")));
        run_explained(pip.arg(wheel))?;
        succeed(Command::new(&python).args(["-m", "pip", "check"]))?;
        train(&python, folder)
    })
}

/// Tries something in a temporary folder, which is gone afterwards.
fn within_folder(name: &str, tried: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    within(&std::env::temp_dir(), name, tried)
}

fn within(parent: &Path, name: &str, tried: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let folder = parent.join(format!("shorthaul-{name}-{}", std::process::id()));
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let result = tried(&folder);
    // What cannot be removed does no harm.
    let _ = fs::remove_dir_all(&folder);
    result
}

fn try_in(venv: &Venv, wheel: &Path, folder: &Path) -> Result<()> {
    succeed(
        venv.module("venv")
            .args(["--clear", "--without-pip"])
            .arg(folder),
    )?;
    let python = folder.join("bin/python");
    let mut pip = venv.module("pip");
    pip.arg("--python").arg(&python);
    pip.args(["--disable-pip-version-check", "install", "--quiet"]);
    succeed(pip.args(["--no-deps", "--no-index"]).arg(wheel))?;
    let others = packages(&mut venv.python())?;
    let own = packages(&mut Command::new(&python))?;
    // A folder named in such a file is searched last.
    fs::write(own.join("pytorch.pth"), others.display().to_string())?;
    train(&python, folder)
}

/// Trains a step with a Python that has the wheel and PyTorch.
fn train(python: &Path, folder: &Path) -> Result<()> {
    let mut step = Command::new(python);
    // A package on the path of this process would be found before the installed one.
    step.current_dir(folder).env_remove("PYTHONPATH");
    succeed(step.args(["-c", TRIAL]))
}

/// The folder that a Python looks for packages in.
fn packages(python: &mut Command) -> Result<PathBuf> {
    let ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])";
    let name = display(python);
    match run_quiet(python.args(["-c", ask]))? {
        Some(done) if done.success => Ok(PathBuf::from(done.text.trim())),
        _ => bail!("`{name}` does not say where its packages are"),
    }
}

/// Builds the program without any library of the system: for musl if the toolchain has that target, else with the
/// static parts of glibc.
fn build_program(root: &Path, dist: &Path) -> Result<PathBuf> {
    let arch = std::env::consts::ARCH;
    let musl = format!("{arch}-unknown-linux-musl");
    let mut build = cargo(root);
    let target = match has_target(root, &musl)? {
        true => musl,
        false => {
            println!(
                "The toolchain has no {musl} (`rustup target add {musl}` adds it): the program is linked with glibc's \
                 static libraries instead."
            );
            build.env("RUSTFLAGS", "-C target-feature=+crt-static");
            format!("{arch}-unknown-linux-gnu")
        }
    };
    build.args([
        "build",
        "--release",
        "--locked",
        "--package",
        "shorthaul-cli",
    ]);
    succeed(build.args(["--target", &target]))?;
    let built = target_folder(root).join(&target).join("release/shorthaul");
    let program = dist.join(format!("shorthaul-{arch}-linux"));
    fs::copy(&built, &program).with_context(|| format!("cannot copy {}", built.display()))?;
    let bytes = fs::read(&program)?;
    if let Some(loader) = interpreter(&bytes) {
        bail!("the program is not static: it asks for {loader}");
    }
    if has_symbols(&bytes) {
        bail!("the program is not stripped: the release profile in Cargo.toml must say so");
    }
    try_program(root, &program)?;
    Ok(program)
}

/// Optimizes a small file, which the program verifies.
fn try_program(root: &Path, program: &Path) -> Result<()> {
    succeed(Command::new(program).arg("--version"))?;
    within_folder("program", |folder| {
        let mut optimize = Command::new(program);
        optimize.current_dir(folder).arg("optimize");
        optimize.arg(root.join("cli/tests/data/mlp.onnx"));
        succeed(optimize.args(["-o", "smaller.onnx"]))
    })
}

/// Whether the toolchain can compile for a target.
fn has_target(root: &Path, target: &str) -> Result<bool> {
    let mut rustc = Command::new("rustc");
    rustc.current_dir(root);
    let asked = run_quiet(rustc.args(["--print", "target-libdir", "--target", target]))?;
    let folder = asked.filter(|done| done.success);
    Ok(folder.is_some_and(|done| Path::new(done.text.trim()).is_dir()))
}

/// The unsigned number in `bytes` bytes of a file from position `at` on, lowest byte first.
fn number(file: &[u8], at: usize, bytes: usize) -> Option<u64> {
    let field = file.get(at..at + bytes)?;
    Some(field.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)))
}

/// The loader that a 64-bit ELF file asks for; `None` if it runs without one.
fn interpreter(elf: &[u8]) -> Option<String> {
    const PT_INTERP: u64 = 3;
    let number = |at, bytes| number(elf, at, bytes);
    let (headers, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    (0..count).find_map(|n| {
        let at = (headers + n * size) as usize;
        if number(at, 4)? != PT_INTERP {
            return None;
        }
        let (from, bytes) = (number(at + 8, 8)? as usize, number(at + 32, 8)? as usize);
        let name = elf.get(from..from + bytes)?;
        Some(
            String::from_utf8_lossy(name)
                .trim_end_matches('\0')
                .to_string(),
        )
    })
}

/// Whether a 64-bit ELF file has a table of symbols, as one that is not stripped has.
fn has_symbols(elf: &[u8]) -> bool {
    const SHT_SYMTAB: u64 = 2;
    let number = |at, bytes| number(elf, at, bytes);
    let sections = || Some((number(40, 8)?, number(58, 2)?, number(60, 2)?));
    sections().is_some_and(|(headers, size, count)| {
        let kind = |n: u64| number((headers + n * size) as usize + 4, 4);
        (0..count).any(|n| kind(n) == Some(SHT_SYMTAB))
    })
}

fn succeed(command: &mut Command) -> Result<()> {
    let Finished {
        success, ending, ..
    } = run_shown(command)?;
    match success {
        true => Ok(()),
        false => bail!("`{}` ended with {ending}", display(command)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_options_are_refused_before_anything_is_built() {
        let error = run(Path::new("/no-such-folder"), &["--from-indx".to_owned()]);
        let error = error.expect_err("there is no such option").to_string();
        assert!(error.contains("--from-index"), "{error}");
    }

    #[test]
    fn the_summary_says_what_to_run() {
        let files = [Path::new("/d/s.whl"), Path::new("/d/shorthaul-linux")];
        let lines = summary(files, [3 << 20, 20_447_232]);
        let lines: Vec<&str> = lines.lines().collect();
        assert!(lines[0].contains("3.0 MiB") && lines[2].contains("19.5 MiB"));
        assert_eq!(lines[1], "  pip install /d/s.whl");
        assert_eq!(
            lines[3],
            "  install -D /d/shorthaul-linux ~/.local/bin/shorthaul"
        );
    }

    #[test]
    fn a_program_with_a_loader_is_not_static() {
        let own = fs::read(std::env::current_exe().expect("this program")).expect("its file");
        let loader = interpreter(&own).expect("tests are linked dynamically");
        assert!(loader.starts_with('/') && loader.contains("ld"), "{loader}");
        let mut other = own;
        let [start, size] = [32, 54].map(|at| usize::from(other[at]));
        for n in 0..usize::from(other[56]) {
            // No header names a loader any more.
            let kind = &mut other[start + n * size];
            *kind = if *kind == 3 { 0 } else { *kind };
        }
        assert_eq!(interpreter(&other), None);
        assert_eq!(interpreter(&other[..60]), None);
    }

    #[test]
    fn a_program_with_symbols_is_not_stripped() {
        let mut own = fs::read(std::env::current_exe().expect("this program")).expect("its file");
        assert!(has_symbols(&own), "tests keep their symbols");
        let [start, size, count] = [(40, 8), (58, 2), (60, 2)]
            .map(|(at, bytes)| number(&own, at, bytes).expect("a header") as usize);
        for n in 0..count {
            // No section is a table of symbols any more.
            let kind = &mut own[start + n * size + 4];
            *kind = if *kind == 2 { 0 } else { *kind };
        }
        assert!(!has_symbols(&own));
        assert!(!has_symbols(&own[..60]));
    }

    #[test]
    fn the_release_profile_strips_and_profiling_does_not() {
        let manifest = include_str!("../../Cargo.toml");
        let profile = |name: &str| {
            let mut sections = manifest.split("\n[");
            let found = sections.find(|s| s.starts_with(&format!("profile.{name}]")));
            found.expect("the profile").to_string()
        };
        assert!(profile("release").contains("strip = \"symbols\""));
        let profiling = profile("profiling");
        assert!(profiling.contains("strip = \"none\"") && profiling.contains("line-tables-only"));
    }
}
