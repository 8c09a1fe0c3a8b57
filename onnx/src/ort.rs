//! ONNX Runtime as a witness and a clock: a Python with the package `onnxruntime` runs the models.
//!
//! It is a process of its own: nothing of it is linked, and a model that makes it crash ends only that process. The
//! oracle runs without ONNX Runtime's own optimizations, the clock with all of them.

use crate::evaluate::Values;
use crate::file::{self, Model};
use crate::npy;
use crate::tensor::Tensor;
use crate::verify::{Oracle, OracleError};
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A Python that has ONNX Runtime.
#[derive(Clone, Debug)]
pub struct OnnxRuntime {
    python: OsString,
}

/// Why ONNX Runtime says nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RuntimeError {
    /// No Python has the package.
    #[error(
        "no Python with ONNX Runtime was found: `pip install onnxruntime`, and activate that \
         environment or name its interpreter in SHORTHAUL_PYTHON"
    )]
    Missing,
    /// A Python that was named cannot import it.
    #[error(
        "{python} cannot run models: {why} (`pip install onnxruntime` into its environment, or name \
         another interpreter in SHORTHAUL_PYTHON)"
    )]
    Unusable {
        /// The interpreter.
        python: String,
        /// What it says.
        why: String,
    },
    /// It could not be asked: no file could be written, or Python could not be started.
    #[error("{0}")]
    Unasked(String),
    /// It refuses the model or its inputs; its last line.
    #[error("{0}")]
    Refused(String),
}

/// `-c` puts the working folder on the path, and it may hold modules with the names of those imported here.
const SCRIPT: &str = concat!(
    "import sys\nsys.path[:] = [folder for folder in sys.path if folder]\n",
    include_str!("ort.py")
);

fn unasked(error: impl ToString) -> RuntimeError {
    RuntimeError::Unasked(error.to_string())
}

impl OnnxRuntime {
    /// Finds one: `SHORTHAUL_PYTHON`, the active virtual environment, `python3`, `python`.
    ///
    /// # Errors
    /// [`RuntimeError::Missing`]; [`RuntimeError::Unusable`] for the first of them.
    pub fn find() -> Result<OnnxRuntime, RuntimeError> {
        if let Some(named) = std::env::var_os("SHORTHAUL_PYTHON") {
            return OnnxRuntime::new(named);
        }
        let active = std::env::var_os("VIRTUAL_ENV");
        let active = active.map(|folder| PathBuf::from(folder).join("bin/python").into_os_string());
        let usual = ["python3", "python"].map(OsString::from);
        let mut all = active.into_iter().chain(usual);
        all.find_map(|python| OnnxRuntime::new(python).ok())
            .ok_or(RuntimeError::Missing)
    }

    /// The ONNX Runtime of one interpreter.
    ///
    /// # Errors
    /// [`RuntimeError::Unusable`] if it does not have the package.
    pub fn new(python: impl Into<OsString>) -> Result<OnnxRuntime, RuntimeError> {
        let python = python.into();
        let found = OnnxRuntime { python };
        match found.call(&["version".as_ref()]) {
            Ok(_) => Ok(found),
            Err(error) => Err(RuntimeError::Unusable {
                python: found.python.display().to_string(),
                why: error.to_string(),
            }),
        }
    }

    fn call(&self, args: &[&Path]) -> Result<String, RuntimeError> {
        let mut command = Command::new(&self.python);
        let output = command.arg("-c").arg(SCRIPT).args(args).output();
        let output = output
            .map_err(|error| unasked(format!("cannot start {}: {error}", self.python.display())))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.trim().lines().last().unwrap_or("it says nothing");
            return Err(RuntimeError::Refused(last.to_string()));
        }
        String::from_utf8(output.stdout).map_err(unasked)
    }

    /// Median milliseconds of a run of each file on the same inputs, interleaved.
    ///
    /// # Errors
    /// ONNX Runtime refuses a file or the inputs, or cannot be asked.
    pub fn measure(
        &self,
        before: &Path,
        after: &Path,
        feeds: &Values,
    ) -> Result<(f64, f64), RuntimeError> {
        let folder = Folder::new()?;
        let inputs = folder.path("inputs.npz");
        write(feeds, &inputs)?;
        let said = self.call(&["measure".as_ref(), before, after, &inputs])?;
        let times: Vec<f64> = said.split_whitespace().flat_map(str::parse).collect();
        match times.as_slice() {
            [before, after] => Ok((*before, *after)),
            _ => Err(RuntimeError::Refused(format!("it gave no times: {said}"))),
        }
    }

    fn run(&self, model: &Model, feeds: &[Values]) -> Result<Vec<Vec<Tensor>>, RuntimeError> {
        let folder = Folder::new()?;
        let path = folder.path("model.onnx");
        file::write(model, &path).map_err(unasked)?;
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for (n, feeds) in feeds.iter().enumerate() {
            inputs.push(folder.path(&format!("inputs{n}.npz")));
            outputs.push(folder.path(&format!("outputs{n}.npz")));
            write(feeds, &inputs[n])?;
        }
        let mut args: Vec<&Path> = vec!["outputs".as_ref(), &path];
        for (input, output) in inputs.iter().zip(&outputs) {
            args.extend([input.as_path(), output.as_path()]);
        }
        self.call(&args)?;
        let read = |path: &PathBuf| {
            let arrays = npy::read_npz(&fs::read(path).map_err(unasked)?).map_err(unasked)?;
            Ok(arrays.into_iter().map(|(_, tensor)| tensor).collect())
        };
        outputs.iter().map(read).collect()
    }
}

impl Oracle for OnnxRuntime {
    fn name(&self) -> &str {
        "ONNX Runtime"
    }

    fn outputs(&self, model: &Model, feeds: &[Values]) -> Result<Vec<Vec<Tensor>>, OracleError> {
        self.run(model, feeds).map_err(|error| match error {
            RuntimeError::Refused(why) => OracleError::Refused(why),
            other => OracleError::Unasked(other.to_string()),
        })
    }
}

fn write(feeds: &Values, path: &Path) -> Result<(), RuntimeError> {
    let file = File::create(path).map_err(unasked)?;
    npy::write_npz(feeds.iter().map(|(name, t)| (name.as_str(), t)), file).map_err(unasked)
}

/// A folder for what the two processes give each other; gone at the end.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Result<Folder, RuntimeError> {
        let made = tempfile::Builder::new().prefix("shorthaul-").tempdir();
        let made =
            made.map_err(|error| unasked(format!("cannot make a temporary folder: {error}")))?;
        file::on_abandon(made.path());
        Ok(Folder(made))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}
