//! ONNX files made from Python.

use ::onnx::file;
use compiler::importer::onnx::{File, Mode, Options};
use compiler::internal_error::caught_deep;
use compiler::training_graph::{
    self as training, Loss, Optimizer, OptimizerState, TrainingOptions,
};
use compiler::training_input::training_input;
use compiler::training_proof::{Proof, prove};
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::path::{Path, PathBuf};
use std::str::FromStr;

create_exception!(
    shorthaul._native,
    OnnxFailure,
    PyException,
    "An ONNX file cannot be read or made; the message says why."
);

/// What is asked for; the fields are as `shorthaul.onnx.grad` documents them.
#[derive(FromPyObject)]
pub struct Request {
    path: Option<PathBuf>,
    /// The bytes of the file, if there is no path.
    bytes: Option<Vec<u8>>,
    out: Option<PathBuf>,
    loss: String,
    output: Option<String>,
    optimizer: Option<String>,
    optimizer_state: String,
    gradients: bool,
    wrt: Option<Vec<String>>,
    mode: String,
    label_smoothing: f64,
    sizes: Vec<(String, i64)>,
    verify: bool,
}

/// The bytes of the training graph of a model, unless it is written to a file, and warnings: what was settled that
/// nobody asked for, and why the graph was not verified, if it should have been; see `compiler::training_graph`.
/// Runs without the interpreter's lock.
#[pyfunction]
pub fn training_graph(
    py: Python<'_>,
    request: Request,
) -> PyResult<(Option<Bound<'_, PyBytes>>, Vec<String>)> {
    let Ok(loss) = Loss::from_str(&request.loss);
    let optimizer = request.optimizer.as_deref().map(Optimizer::from_str);
    let options = TrainingOptions {
        loss,
        output: request.output,
        optimizer: optimizer.transpose().map_err(PyValueError::new_err)?,
        optimizer_state: OptimizerState::from_str(&request.optimizer_state)
            .map_err(PyValueError::new_err)?,
        wrt: request.wrt,
        gradients: request.gradients,
        label_smoothing: request.label_smoothing,
    };
    let import = Options {
        sizes: request.sizes.into_iter().collect(),
        mode: Mode::from_str(&request.mode).map_err(PyValueError::new_err)?,
    };
    let (path, bytes, out, verify) = (request.path, request.bytes, request.out, request.verify);
    let work = || {
        let made = made(path, bytes, &import, &options, verify)?;
        let Some(out) = out else {
            return Ok((Some(made.bytes), made.warnings));
        };
        let sources: Vec<&Path> = made.sources.iter().map(PathBuf::as_path).collect();
        let staged = file::stage_bytes(&made.bytes, &out, &sources);
        let written = staged.and_then(file::Staged::place);
        let written = written.map_err(|error| error.to_string());
        written.map(|_| (None, made.warnings))
    };
    let made = py.detach(|| caught_deep(work).unwrap_or_else(|error| Err(error.to_string())));
    let (bytes, warnings) = made.map_err(OnnxFailure::new_err)?;
    Ok((bytes.map(|bytes| PyBytes::new(py, &bytes)), warnings))
}

/// A training graph, and the files it was made from.
struct Made {
    bytes: Vec<u8>,
    warnings: Vec<String>,
    sources: Vec<PathBuf>,
}

fn made(
    path: Option<PathBuf>,
    bytes: Option<Vec<u8>>,
    import: &Options,
    options: &TrainingOptions,
    verify: bool,
) -> Result<Made, String> {
    let (path, bytes) = match path {
        Some(path) => {
            let bytes = file::read_whole(&path).map_err(|error| error.to_string())?;
            (path, bytes)
        }
        None => ("the given model".into(), bytes.unwrap_or_default().into()),
    };
    let read = file::Model::of_bytes(&path, bytes.clone()).map_err(|error| error.to_string())?;
    let input = File::decode(&path, bytes)
        .and_then(|file| training_input(file, &read, import, options.wrt.as_deref()))
        .map_err(|error| error.to_string())?;
    let model = &input.model;
    let sources = read.files().into_iter().map(Path::to_path_buf).collect();
    let bytes = training::training_graph(model, options).map_err(|error| error.to_string())?;
    let mut warnings = input.notes("sizes", "wrt");
    warnings.extend(input.guessed("wrt"));
    if verify {
        let made = file::Model::of_bytes(Path::new("train.onnx"), bytes.clone().into())
            .map_err(|error| error.to_string())?;
        let proof = prove((&read, model), &made, options, import.mode);
        let wrong = |error| {
            format!(
                "the training graph of {} is wrong; please report it (`verify=False` makes it anyway): {error}",
                path.display()
            )
        };
        if let Proof::Untried(why) = proof.map_err(wrong)? {
            warnings.push(format!("the training graph is not verified: {why}"));
        }
    }
    Ok(Made {
        bytes,
        warnings,
        sources,
    })
}
