//! The Python side: the virtual environment with its pinned packages, and the build of our package
//! into it. Finished work is not done again: the environment remembers what it was made from.
//!
//! A failure that the user can fix is explained: which package, which program, how much room on disk.

use crate::command::{Finished, display, run_quiet, run_shown};
use crate::test::target_folder;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The oldest Python that the pinned packages support.
const MIN_PYTHON: (u32, u32) = (3, 11);

/// Names the file in the environment that holds the requirements it was made from.
const STAMP: &str = "shorthaul-requirements.txt";

/// What the demo and the examples need.
const DEMO: &str = "requirements-demo.txt";
/// What tests need in addition.
const ALL: &str = "requirements.txt";

/// A virtual environment that has the pinned packages.
pub struct Venv {
    root: PathBuf,
    folder: PathBuf,
}

impl Venv {
    /// `python -m NAME` of this environment, in the folder of the workspace.
    pub fn module(&self, name: &str) -> Command {
        let mut command = self.python();
        command.args(["-m", name]);
        command
    }

    /// `python` of this environment, in the folder of the workspace.
    pub fn python(&self) -> Command {
        let bin = self.folder.join("bin");
        let mut command = Command::new(bin.join("python"));
        command
            .current_dir(&self.root)
            .env("VIRTUAL_ENV", &self.folder)
            .env_remove("PYTHONHOME");
        let old_path = std::env::var_os("PATH").unwrap_or_default();
        let paths = std::iter::once(bin).chain(std::env::split_paths(&old_path));
        if let Ok(path) = std::env::join_paths(paths) {
            command.env("PATH", path);
        }
        command
    }

    /// The folder of NVRTC and of cuBLASLt, which PyTorch's packages bring.
    pub fn nvrtc_folder(&self) -> Result<PathBuf> {
        self.library_folder("libnvrtc.so")
    }

    /// The folder of cuDNN, which they bring too.
    pub fn cudnn_folder(&self) -> Result<PathBuf> {
        self.library_folder("libcudnn.so")
    }

    fn library_folder(&self, name: &str) -> Result<PathBuf> {
        let ask = format!(
            "import glob, os, sysconfig\n\
             root = sysconfig.get_paths()['purelib']\n\
             found = sorted(glob.glob(os.path.join(root, 'nvidia', '*', 'lib', '{name}*')))\n\
             print(os.path.dirname(found[-1]) if found else '')"
        );
        let mut python = self.python();
        let done = python.args(["-c", &ask]).output()?;
        let folder = String::from_utf8_lossy(&done.stdout).trim().to_string();
        if folder.is_empty() {
            bail!("the Python environment has no {name}: is its PyTorch a CPU build?");
        }
        Ok(PathBuf::from(folder))
    }
}

/// Makes the environment if there is none and installs the pinned packages if they changed.
pub fn prepare(root: &Path) -> Result<Venv> {
    let wanted = requirements(root, &[DEMO, ALL])?;
    prepare_in(root, own_folder(root), &[&wanted], |venv| {
        install_large(venv, &wanted)?;
        install(venv, ALL)
    })
}

/// Like [`prepare`], but installs only the packages of the demo and the examples. Accepts an environment that has all
/// packages.
pub fn prepare_for_demo(root: &Path) -> Result<Venv> {
    let (wanted, all) = (
        requirements(root, &[DEMO])?,
        requirements(root, &[DEMO, ALL])?,
    );
    prepare_in(root, own_folder(root), &[&wanted, &all], |venv| {
        let mut build = start_demo_build(venv);
        let installed = install_large(venv, &wanted).and_then(|()| install(venv, DEMO));
        if let Some(build) = &mut build {
            if installed.is_err() {
                let _ = build.kill();
            }
            let _ = build.wait();
        }
        installed
    })
}

/// Starts to compile the package's Rust code, while packages are downloaded and unpacked. [`build_package`] finds all
/// of it done but the crates that know Python. If this build fails, that one says why.
fn start_demo_build(venv: &Venv) -> Option<Child> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args([
        "build",
        "--quiet",
        "--lib",
        "--features",
        "extension-module",
    ]);
    build.args(Build::Demo.options());
    build.args(["--manifest-path", "torch-bridge/Cargo.toml"]);
    build.env("PYO3_PYTHON", venv.folder.join("bin/python"));
    build.current_dir(&venv.root);
    build.stdout(Stdio::null()).stderr(Stdio::null());
    let started = build.spawn().ok();
    if started.is_some() {
        println!("Compiling the Rust code meanwhile ...");
    }
    started
}

/// The environment's folder.
fn own_folder(root: &Path) -> PathBuf {
    match std::env::var_os("SHORTHAUL_VENV") {
        Some(folder) => root.join(folder),
        None => root.join(".venv"),
    }
}

/// Like [`prepare`], with another PyTorch, in an environment of its own.
pub fn prepare_with_torch(root: &Path, version: &str) -> Result<Venv> {
    let folder = target_folder(root).join(format!("torch-{version}"));
    let wanted = with_torch(&requirements(root, &[DEMO, ALL])?, version);
    prepare_in(root, folder, &[&wanted], |venv| {
        let list = venv.folder.join("requirements.txt");
        fs::write(&list, &wanted).with_context(|| format!("cannot write {}", list.display()))?;
        run_explained(pip_install(venv).arg("-r").arg(&list))
    })
}

/// Returns the environment in `folder`. Installs the first of the `accepted` requirements unless the environment was
/// made from one of them.
fn prepare_in(
    root: &Path,
    folder: PathBuf,
    accepted: &[&str],
    install: impl Fn(&Venv) -> Result<()>,
) -> Result<Venv> {
    let venv = Venv {
        root: root.to_path_buf(),
        folder,
    };
    let stamp = venv.folder.join(STAMP);
    // pip is the last thing that `venv` writes: without it the environment was left half made, and
    // a Python that was removed since leaves a dangling link.
    let usable = ["bin/python", "bin/pip"]
        .iter()
        .all(|file| venv.folder.join(file).exists());
    let is_made = |installed: String| accepted.contains(&installed.as_str());
    if usable && fs::read_to_string(&stamp).is_ok_and(is_made) {
        return Ok(venv);
    }
    if !usable {
        create(&venv)?;
    }
    println!(
        "Installing the pinned Python packages (the first time: about 3 GB to download, 6 GB on disk) ..."
    );
    install(&venv)?;
    fs::write(&stamp, accepted[0]).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(venv)
}

/// The pinned packages with another PyTorch, which chooses the versions of what belongs to it.
fn with_torch(pinned: &str, version: &str) -> String {
    const OF_PYTORCH: [&str; 7] = [
        "-c ",
        "-r ",
        "torch",
        "triton==",
        "nvidia-",
        "cuda-",
        "setuptools==",
    ];
    let kept = pinned.lines().filter(|line| {
        line.starts_with("torchmetrics") || !OF_PYTORCH.iter().any(|name| line.starts_with(name))
    });
    let own = [format!("torch=={version}"), "torchvision".to_owned()];
    own.into_iter()
        .chain(kept.map(str::to_owned))
        .map(|line| line + "\n")
        .collect()
}

/// Installs the packages that fill the disk one by one. Asked for all of them at once, pip has every archive on disk
/// before it unpacks the first: 3 GB more.
fn install_large(venv: &Venv, pinned: &str) -> Result<()> {
    let packages = large_packages(pinned);
    for (n, &package) in packages.iter().enumerate() {
        println!("  {package} ({} of {} large ones)", n + 1, packages.len());
        let mut pip = pip_install(venv);
        run_explained(pip.args(["--quiet", "--no-deps", package]))?;
    }
    Ok(())
}

/// PyTorch and the libraries for GPUs, on the one kind of machine whose PyTorch surely asks for them.
fn large_packages(pinned: &str) -> Vec<&str> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Vec::new();
    }
    let large = |line: &&str| {
        ["nvidia-", "torch==", "triton=="]
            .iter()
            .any(|name| line.starts_with(name))
    };
    pinned.lines().map(str::trim).filter(large).collect()
}

fn pip_install(venv: &Venv) -> Command {
    let mut pip = venv.module("pip");
    // pip's cache would hold another 3 GB of archives that nothing else needs.
    pip.args([
        "install",
        "--disable-pip-version-check",
        "--no-input",
        "--no-cache-dir",
    ]);
    pip
}

/// Installs the packages of a requirements file, with the versions of constraints.txt.
pub fn install(venv: &Venv, requirements: &str) -> Result<()> {
    let mut pip = pip_install(venv);
    run_explained(pip.args(["-c", "constraints.txt", "-r", requirements]))
}

/// How the Python package is built.
#[derive(Clone, Copy)]
pub enum Build {
    /// As it is shipped.
    Release,
    /// To try it: in less time, with the profile `demo` of Cargo.toml.
    Demo,
    /// As the Rust tests are: in a third of the time, and with more checks.
    Tested,
}

impl Build {
    /// The options of maturin for this build.
    pub fn options(self) -> &'static [&'static str] {
        match self {
            Build::Release => &["--release"],
            Build::Demo => &["--profile", "demo"],
            Build::Tested => &[],
        }
    }
}

/// Makes the environment and builds the package into it as the tests run it, unless that is done already.
pub fn package(root: &Path) -> Result<()> {
    let venv = prepare(root)?;
    build_package(root, &venv, Build::Tested)
}

/// Builds the Python package `shorthaul` and installs it into `venv`.
pub fn build_package(root: &Path, venv: &Venv, build: Build) -> Result<()> {
    if !root.join("torch-bridge/pyproject.toml").is_file() {
        bail!("torch-bridge/pyproject.toml is missing: there is no Python package to build");
    }
    println!("Building the Python package ...");
    let mut maturin = venv.module("maturin");
    maturin.arg("develop").args(build.options());
    maturin.args(["--manifest-path", "torch-bridge/Cargo.toml"]);
    run_explained(&mut maturin)
}

/// Fails with a sentence where the machine has no C compiler, which generated kernels need.
pub fn require_c_compiler() -> Result<()> {
    let named = std::env::var("SHORTHAUL_CC").ok();
    let candidates = match &named {
        Some(compiler) => vec![compiler.as_str()],
        None => vec!["cc", "gcc", "clang"],
    };
    for compiler in &candidates {
        let found = run_quiet(Command::new(compiler).arg("--version"))?;
        if found.is_some_and(|done| done.success) {
            return Ok(());
        }
    }
    match named {
        Some(compiler) => bail!("SHORTHAUL_CC names `{compiler}`, which does not run"),
        None => bail!(
            "no C compiler (tried cc, gcc, clang): install one, on Debian `apt-get install gcc \
             libc6-dev`, or name it in SHORTHAUL_CC"
        ),
    }
}

/// The pinned packages as text, by which an environment is recognized.
fn requirements(root: &Path, files: &[&str]) -> Result<String> {
    let mut text = String::new();
    for name in files.iter().chain(&["constraints.txt"]) {
        let path = root.join(name);
        text.push_str(
            &fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?,
        );
    }
    Ok(text)
}

fn create(venv: &Venv) -> Result<()> {
    let python = std::env::var("SHORTHAUL_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let ask = "import sys; print(*sys.version_info[:2])";
    let Some(answer) = run_quiet(Command::new(&python).args(["-c", ask]))? else {
        bail!("`{python}` is not installed: on Debian `apt-get install python3 python3-venv`");
    };
    let Some(version) = parse_version(&answer.text) else {
        bail!("`{python}` does not run: {}", answer.text.trim());
    };
    if version < MIN_PYTHON {
        bail!(
            "`{python}` is Python {}.{}; the pinned packages need {}.{} or newer (SHORTHAUL_PYTHON \
             names another one)",
            version.0,
            version.1,
            MIN_PYTHON.0,
            MIN_PYTHON.1
        );
    }
    let has_venv = run_quiet(Command::new(&python).args(["-c", "import venv, ensurepip"]))?;
    if !has_venv.is_some_and(|done| done.success) {
        bail!(
            "`{python}` cannot make virtual environments: on Debian `apt-get install python3-venv`"
        );
    }
    println!(
        "Making a virtual environment in {} ...",
        venv.folder.display()
    );
    run_explained(Command::new(&python).args(["-m", "venv"]).arg(&venv.folder))
}

fn parse_version(answer: &str) -> Option<(u32, u32)> {
    let (major, minor) = answer.trim().split_once(' ')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Runs a command to its end.
///
/// # Errors
/// A failure, with the reason in words where it is known.
pub fn run_explained(command: &mut Command) -> Result<()> {
    let done = run_shown(command)?;
    if done.success {
        return Ok(());
    }
    let name = display(command);
    match explain(&done) {
        Some(reason) => bail!("{reason} (`{name}` ended with {})", done.ending),
        None => bail!(
            "`{name}` ended with {}; its messages are above",
            done.ending
        ),
    }
}

/// What to do about a failure, read from what the failed program said.
fn explain(done: &Finished) -> Option<&'static str> {
    const CAUSES: [(&[&str], &str); 4] = [
        (
            &["No space left on device", "Errno 28", "Disk quota exceeded"],
            "the disk is full: the Python packages take about 6 GB",
        ),
        (
            &[
                "Temporary failure in name resolution",
                "Name or service not known",
                "Failed to establish a new connection",
                "Network is unreachable",
                "Connection refused",
                "Read timed out",
                "Could not resolve host",
            ],
            "the package index cannot be reached: check the network and run the command again",
        ),
        (
            &["(from versions: none)"],
            "the package index offers no build of a package: it cannot be reached, or this kind of \
             machine is not served (Linux on x86-64 or aarch64 with glibc is)",
        ),
        (
            &["linker `cc` not found", "linker `link.exe` not found"],
            "no C compiler to link with: on Debian `apt-get install gcc libc6-dev`",
        ),
    ];
    let said = |marks: &[&str]| marks.iter().any(|mark| done.text.contains(mark));
    CAUSES
        .into_iter()
        .find(|(marks, _)| said(marks))
        .map(|(_, reason)| reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_failures_are_explained() {
        let explained = |text: &str| {
            let ending = "exit status: 1".to_owned();
            explain(&Finished {
                success: false,
                ending,
                text: text.to_owned(),
            })
        };
        let full = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left";
        assert!(explained(full).is_some_and(|reason| reason.starts_with("the disk is full")));
        let offline =
            "NewConnectionError('<...>: Failed to establish a new connection: [Errno -3]')";
        assert!(explained(offline).is_some_and(|reason| reason.contains("network")));
        assert_eq!(explained("SyntaxError: invalid syntax"), None);
    }

    #[test]
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    fn large_packages_are_found_among_the_pinned() {
        let pinned = "# a comment\ntorch==2.15.0\ntorchvision==0.29.2\nnvidia-cublas==13.4.1.3\nnumpy==2.4.6\n";
        assert_eq!(
            large_packages(pinned),
            ["torch==2.15.0", "nvidia-cublas==13.4.1.3"]
        );
    }

    #[test]
    fn another_pytorch_chooses_its_own_libraries() {
        let pinned = "-c constraints.txt\n-r requirements-demo.txt\ntorch==2.15.0\ntorchvision==0.29.2\nnumpy==2.4.6\ntorchmetrics==1.9.0\n\
                      nvidia-cublas==13.4.1.3\ntriton==3.9.0\nsetuptools==84.2.1\n";
        assert_eq!(
            with_torch(pinned, "2.12.1"),
            "torch==2.12.1\ntorchvision\nnumpy==2.4.6\ntorchmetrics==1.9.0\n"
        );
    }

    #[test]
    fn versions_are_read() {
        assert_eq!(parse_version("3 12\n"), Some((3, 12)));
        assert_eq!(parse_version("Traceback (most recent call last)"), None);
    }
}
