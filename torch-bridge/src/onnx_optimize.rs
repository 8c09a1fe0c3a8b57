//! ONNX files made better from Python.

use crate::onnx::OnnxFailure;
use ::onnx::file::{self, Model};
use ::onnx::optimize::{self as optimizing, Options, Summary};
use ::onnx::ort::OnnxRuntime;
use ::onnx::rewrite::Target;
use ::onnx::{npy, rewrite, set_shape, verify};
use compiler::internal_error::caught_deep;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

/// What is asked for; the fields are as `shorthaul.onnx.optimize` documents them.
#[derive(FromPyObject)]
pub struct Request {
    path: Option<PathBuf>,
    /// The bytes of the file, if there is no path.
    bytes: Option<Vec<u8>>,
    out: Option<PathBuf>,
    target: String,
    verify: bool,
    /// Numbers, or sums of other sizes.
    sizes: Vec<(String, String)>,
    /// Sizes of inputs to fix in the file.
    shapes: Vec<(String, Vec<Option<i64>>)>,
    /// The bytes of an `.npz` file.
    inputs: Option<Vec<u8>>,
    seeds: usize,
    without: Vec<String>,
    fold_limit: usize,
    max_growth: Option<f64>,
    /// Whether ONNX Runtime runs both files besides.
    ask_runtime: bool,
    /// Whether it times them.
    measure: bool,
    /// The interpreter that has it.
    python: PathBuf,
}

/// The bytes of the better file, if it is not written, and the summary as JSON. Runs without the
/// interpreter's lock.
#[pyfunction]
pub fn optimize(
    py: Python<'_>,
    request: Request,
) -> PyResult<(Option<Bound<'_, PyBytes>>, String)> {
    let target = Target::from_str(&request.target).map_err(PyValueError::new_err)?;
    let work = || run(request, target);
    let made = py.detach(|| caught_deep(work).unwrap_or_else(|error| Err(said(error))));
    let (bytes, summary) = made.map_err(OnnxFailure::new_err)?;
    Ok((bytes.map(|bytes| PyBytes::new(py, &bytes)), summary))
}

fn said(error: impl Display) -> String {
    error.to_string()
}

fn run(request: Request, target: Target) -> Result<(Option<Vec<u8>>, String), String> {
    let runtime = match request.ask_runtime || request.measure {
        true => Some(OnnxRuntime::new(&request.python).map_err(said)?),
        false => None,
    };
    let model = match (&request.path, request.bytes) {
        (Some(path), _) => Model::read(path),
        (None, bytes) => {
            let name = PathBuf::from("the given model");
            Model::of_bytes(&name, bytes.unwrap_or_default().into())
        }
    };
    let model = model.map_err(said)?;
    let inputs = request.inputs.as_deref().map(npy::read_npz);
    let inputs = inputs.transpose()?.unwrap_or_default();
    let shapes = request.shapes.into_iter().collect();
    let model = model.with(set_shape::set_shapes(&model.proto, &shapes).map_err(said)?);
    let (mut sizes, mut relations) = (BTreeMap::new(), BTreeMap::new());
    for (name, text) in request.sizes {
        let size = verify::relation(&text)?;
        match size.as_const() {
            Some(n) => drop(sizes.insert(name, n)),
            None => drop(relations.insert(name, size)),
        }
    }
    let verifying = verify::Options {
        n_seeds: request.seeds,
        sizes,
        relations,
        inputs: inputs.into_iter().collect(),
        oracle: match (&runtime, request.ask_runtime) {
            (Some(runtime), true) => Some(Arc::new(runtime.clone())),
            _ => None,
        },
        ..Default::default()
    };
    let clock = runtime.filter(|_| request.measure);
    let timed = clock.map(|clock| (clock, verifying.clone()));
    let options = Options {
        rewriting: rewrite::Options {
            target,
            fold_limit: request.fold_limit,
            without: request.without.into_iter().collect(),
            ..rewrite::Options::default()
        },
        verifying: request.verify.then_some(verifying),
    };
    let mut optimized = optimizing::optimize(&model, &options, &mut |_| {}).map_err(said)?;
    if let Some((clock, options)) = timed {
        let found = milliseconds(&clock, [&model, &optimized.model], &options)?;
        optimized.summary.before.milliseconds = Some(found.0);
        optimized.summary.after.milliseconds = Some(found.1);
    }
    let summary = &mut optimized.summary;
    let held = |summary: &Summary| match request.max_growth {
        Some(most) => summary.held(most).map_err(said),
        None => Ok(()),
    };
    let bytes = match &request.out {
        Some(out) => {
            let staged = file::stage(&optimized.model, out).map_err(said)?;
            summary.after.file_bytes = staged.written().n_bytes + staged.written().n_external;
            held(summary)?;
            staged.place().map_err(said)?;
            None
        }
        None => {
            let bytes = file::encoded(&optimized.model).map_err(said)?;
            summary.after.file_bytes = bytes.len() as u64;
            held(summary)?;
            Some(bytes)
        }
    };
    let mut value = serde_json::to_value(&*summary).map_err(said)?;
    value["grows"] = serde_json::Value::from(summary.grows());
    Ok((bytes, value.to_string()))
}

/// Median milliseconds of a run of either model in ONNX Runtime, on the same inputs.
fn milliseconds(
    clock: &OnnxRuntime,
    models: [&Model; 2],
    options: &verify::Options,
) -> Result<(f64, f64), String> {
    let folder = tempfile::tempdir().map_err(said)?;
    let [before, after] = ["before.onnx", "after.onnx"].map(|name| folder.path().join(name));
    for (model, path) in models.iter().zip([&before, &after]) {
        file::write(model, path).map_err(said)?;
    }
    let feeds = verify::made_up(models[0], 0, options).map_err(said)?;
    let found = clock.measure(&before, &after, &feeds);
    found.map_err(|error| format!("cannot time the files in ONNX Runtime: {error}"))
}
