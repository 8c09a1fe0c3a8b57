//! ONNX files made better from Python.

use crate::onnx::OnnxFailure;
use ::onnx::file::{self, Model};
use ::onnx::optimize::{self as optimizing, Options, Summary};
use ::onnx::rewrite::Target;
use ::onnx::{npy, rewrite, verify};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::path::PathBuf;
use std::str::FromStr;

/// What is asked for; the fields are as `shorthaul.onnx.optimize` documents them.
#[derive(FromPyObject)]
pub struct Request {
    path: Option<PathBuf>,
    /// The bytes of the file, if there is no path.
    bytes: Option<Vec<u8>>,
    out: Option<PathBuf>,
    target: String,
    verify: bool,
    sizes: Vec<(String, i64)>,
    /// The bytes of an `.npz` file.
    inputs: Option<Vec<u8>>,
    seeds: usize,
    without: Vec<String>,
    fold_limit: usize,
    max_growth: Option<f64>,
}

/// The bytes of the better file, if it is not written, and the summary as JSON. Runs without the
/// interpreter's lock.
#[pyfunction]
pub fn optimize(
    py: Python<'_>,
    request: Request,
) -> PyResult<(Option<Bound<'_, PyBytes>>, String)> {
    let target = Target::from_str(&request.target).map_err(PyValueError::new_err)?;
    let made = py.detach(|| run(request, target));
    let (bytes, summary) = made.map_err(OnnxFailure::new_err)?;
    Ok((bytes.map(|bytes| PyBytes::new(py, &bytes)), summary))
}

fn run(request: Request, target: Target) -> Result<(Option<Vec<u8>>, String), String> {
    let model = match (request.path, request.bytes) {
        (Some(path), _) => Model::read(path),
        (None, bytes) => {
            let name = PathBuf::from("the given model");
            Model::of_bytes(&name, bytes.unwrap_or_default().into())
        }
    };
    let model = model.map_err(|error| error.to_string())?;
    let inputs = request.inputs.as_deref().map(npy::read_npz);
    let inputs = inputs.transpose()?.unwrap_or_default();
    let verifying = verify::Options {
        n_seeds: request.seeds,
        sizes: request.sizes.into_iter().collect(),
        inputs: inputs.into_iter().collect(),
        oracle: None,
    };
    let options = Options {
        rewriting: rewrite::Options {
            target,
            fold_limit: request.fold_limit,
            without: request.without.into_iter().collect(),
            ..rewrite::Options::default()
        },
        verifying: request.verify.then_some(verifying),
    };
    let mut optimized =
        optimizing::optimize(&model, &options, &mut |_| {}).map_err(|error| error.to_string())?;
    let summary = &mut optimized.summary;
    let held = |summary: &Summary| match request.max_growth {
        Some(most) => summary.held(most).map_err(|error| error.to_string()),
        None => Ok(()),
    };
    let bytes = match &request.out {
        Some(out) => {
            let staged = file::stage(&optimized.model, out).map_err(|error| error.to_string())?;
            summary.after.file_bytes = staged.written().n_bytes + staged.written().n_external;
            held(summary)?;
            staged.place().map_err(|error| error.to_string())?;
            None
        }
        None => {
            let bytes = file::encoded(&optimized.model).map_err(|error| error.to_string())?;
            summary.after.file_bytes = bytes.len() as u64;
            held(summary)?;
            Some(bytes)
        }
    };
    let mut value = serde_json::to_value(&*summary).map_err(|error| error.to_string())?;
    value["grows"] = serde_json::Value::from(summary.grows());
    Ok((bytes, value.to_string()))
}
