//! ONNX Runtime as a witness and a clock: a Python with the package `onnxruntime` runs the models.
//!
//! A process of its own, so that nothing of it is linked, and a model that kills it kills only it. The
//! oracle runs without ONNX Runtime's own optimizations, the clock with all of them.

use anyhow::{Context, Result, bail};
use onnx::evaluate::Values;
use onnx::file::{self, Model};
use onnx::npy;
use onnx::tensor::Tensor;
use onnx::verify::{Oracle, OracleError};
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A Python that has ONNX Runtime.
#[derive(Clone, Debug)]
pub struct OnnxRuntime {
    python: OsString,
}

const SCRIPT: &str = include_str!("ort.py");

impl OnnxRuntime {
    /// Finds one: `SHORTHAUL_PYTHON`, the active virtual environment, `python3`, `python`.
    ///
    /// # Errors
    /// None has the package.
    pub fn find() -> Result<OnnxRuntime> {
        let named = std::env::var_os("SHORTHAUL_PYTHON");
        let active = std::env::var_os("VIRTUAL_ENV");
        let active = active.map(|folder| PathBuf::from(folder).join("bin/python").into_os_string());
        let usual = ["python3", "python"].map(OsString::from);
        for python in named.into_iter().chain(active).chain(usual) {
            let found = OnnxRuntime { python };
            if found.call(&["version".as_ref()]).is_ok() {
                return Ok(found);
            }
        }
        bail!(
            "no Python with ONNX Runtime was found: `pip install onnxruntime`, and activate that \
             environment or name its interpreter in SHORTHAUL_PYTHON"
        )
    }

    fn call(&self, args: &[&Path]) -> Result<String> {
        let output = Command::new(&self.python)
            .arg("-c")
            .arg(SCRIPT)
            .args(args)
            .output()
            .with_context(|| format!("cannot start {}", self.python.display()))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.trim().lines().last().unwrap_or("it says nothing");
            bail!("{last}");
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Median milliseconds of a run of each file on the same inputs, interleaved.
    ///
    /// # Errors
    /// ONNX Runtime refuses a file or the inputs.
    pub fn measure(&self, before: &Path, after: &Path, feeds: &Values) -> Result<(f64, f64)> {
        let folder = Folder::new()?;
        let inputs = folder.path("inputs.npz");
        write(feeds, &inputs).map_err(anyhow::Error::msg)?;
        let said = self.call(&["measure".as_ref(), before, after, &inputs]);
        let said = said.context("ONNX Runtime cannot be measured")?;
        let times: Vec<f64> = said.split_whitespace().flat_map(str::parse).collect();
        match times.as_slice() {
            [before, after] => Ok((*before, *after)),
            _ => bail!("ONNX Runtime was measured, but gave no times: {said}"),
        }
    }

    /// The outputs, or what ONNX Runtime says against it.
    fn run(&self, model: &Model, feeds: &[Values]) -> Result<Result<Vec<Vec<Tensor>>>> {
        let folder = Folder::new()?;
        let path = folder.path("model.onnx");
        file::write(model, &path)?;
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for (n, feeds) in feeds.iter().enumerate() {
            inputs.push(folder.path(&format!("inputs{n}.npz")));
            outputs.push(folder.path(&format!("outputs{n}.npz")));
            write(feeds, &inputs[n]).map_err(anyhow::Error::msg)?;
        }
        let mut args: Vec<&Path> = vec!["outputs".as_ref(), &path];
        for (input, output) in inputs.iter().zip(&outputs) {
            args.extend([input.as_path(), output.as_path()]);
        }
        if let Err(refused) = self.call(&args) {
            return Ok(Err(refused));
        }
        let read = |path: &PathBuf| -> Result<Vec<Tensor>> {
            let arrays = npy::read_npz(&fs::read(path)?).map_err(anyhow::Error::msg)?;
            Ok(arrays.into_iter().map(|(_, tensor)| tensor).collect())
        };
        outputs.iter().map(read).collect::<Result<_>>().map(Ok)
    }
}

impl Oracle for OnnxRuntime {
    fn name(&self) -> &str {
        "ONNX Runtime"
    }

    fn outputs(&self, model: &Model, feeds: &[Values]) -> Result<Vec<Vec<Tensor>>, OracleError> {
        match self.run(model, feeds) {
            Ok(said) => said.map_err(|error| OracleError::Refused(format!("{error:#}"))),
            Err(error) => Err(OracleError::Unasked(format!("{error:#}"))),
        }
    }
}

fn write(feeds: &Values, path: &Path) -> Result<(), String> {
    let file = File::create(path).map_err(|error| error.to_string())?;
    npy::write_npz(feeds.iter().map(|(name, t)| (name.as_str(), t)), file)
}

/// A folder for what the two processes give each other; gone at the end.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Result<Folder> {
        let made = tempfile::Builder::new().prefix("shorthaul-").tempdir();
        let made = made.context("cannot make a temporary folder")?;
        file::on_abandon(made.path());
        Ok(Folder(made))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}
