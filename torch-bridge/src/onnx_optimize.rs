//! Optimizes ONNX files for Python.

use crate::onnx::OnnxFailure;
use ::onnx::check::is_in_order;
use ::onnx::edit;
use ::onnx::element::Element;
use ::onnx::file::{self, Model};
use ::onnx::optimize::{self as optimizing, OptimizeError, Options, Summary};
use ::onnx::ort::OnnxRuntime;
use ::onnx::rewrite::Target;
use ::onnx::{npy, rewrite, verify};
use compiler::internal_error::caught_deep;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    /// The only rewrites to use.
    rules: Option<Vec<String>>,
    without: Vec<String>,
    /// Names for sizes of inputs, which become dynamic.
    free_shape: Vec<(String, Vec<Option<String>>)>,
    rename: Vec<(String, String)>,
    half: Option<String>,
    keep_f32: Vec<String>,
    tolerance: f64,
    /// In seconds.
    time_limit: Option<f64>,
    #[pyo3(attribute("from_"))]
    from: Vec<String>,
    to: Vec<String>,
    opset: Option<i64>,
    strip: bool,
    infer_shapes: bool,
    fold_limit: usize,
    max_growth: Option<f64>,
    /// Whether ONNX Runtime runs both files too.
    ask_runtime: bool,
    /// Whether it times them.
    measure: bool,
    /// The Python interpreter that has ONNX Runtime.
    python: PathBuf,
}

/// The bytes of the better file, unless it is written, and the summary as JSON. Runs without the
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

/// Every rewrite by name, and what it does.
#[pyfunction]
pub fn rewrites() -> Vec<(&'static str, &'static str)> {
    let names = rewrite::rule_names().into_iter();
    names.map(|name| (name, rewrite::about(name))).collect()
}

impl Request {
    /// The edits of the file that are asked for.
    fn changes(&self) -> Result<edit::Request, String> {
        let half = match self.half.as_deref() {
            None => None,
            Some("f16") => Some(Element::F16),
            Some("bf16") => Some(Element::BF16),
            Some(other) => return Err(format!("`{other}` is none of f16, bf16")),
        };
        Ok(edit::Request {
            shapes: self.shapes.iter().cloned().collect(),
            from: self.from.clone(),
            to: self.to.clone(),
            free: self.free_shape.clone(),
            renamed: self.rename.clone(),
            opset: self.opset,
            half,
            keep_f32: self.keep_f32.iter().cloned().collect(),
            strip: self.strip,
            infer_shapes: self.infer_shapes,
        })
    }

    /// Rewrites that are not used.
    fn unused(&self) -> Result<BTreeSet<String>, String> {
        let mut unused: BTreeSet<String> = self.without.iter().cloned().collect();
        let Some(wanted) = &self.rules else {
            return Ok(unused);
        };
        let names = rewrite::rule_names();
        if let Some(name) = wanted.iter().find(|name| !names.contains(&name.as_str())) {
            return Err(said(OptimizeError::Rule { name: name.clone() }));
        }
        let others = names.into_iter().map(str::to_string);
        unused.extend(others.filter(|name| !wanted.contains(name)));
        Ok(unused)
    }

    /// When the time is over.
    fn deadline(&self) -> Result<Option<Instant>, String> {
        let end = |seconds: f64| {
            let time = Duration::try_from_secs_f64(seconds).ok();
            let end = time.and_then(|time| Instant::now().checked_add(time));
            end.ok_or_else(|| format!("time_limit is {seconds}, which a clock does not count"))
        };
        self.time_limit.map(end).transpose()
    }
}

fn run(request: Request, target: Target) -> Result<(Option<Vec<u8>>, String), String> {
    let runtime = match request.ask_runtime || request.measure {
        true => Some(OnnxRuntime::new(&request.python).map_err(said)?),
        false => None,
    };
    let (changes, unused) = (request.changes()?, request.unused()?);
    let deadline = request.deadline()?;
    let model = match (&request.path, request.bytes) {
        (Some(path), _) => Model::read(path),
        (None, bytes) => {
            let name = PathBuf::from("the given model");
            Model::of_bytes(&name, bytes.unwrap_or_default().into())
        }
    };
    let whole = model.map_err(said)?;
    let part = changes.part(&whole).map_err(said)?;
    let inputs = request.inputs.as_deref().map(npy::read_npz);
    let inputs = inputs.transpose()?.unwrap_or_default();
    let (mut sizes, mut relations) = (BTreeMap::new(), BTreeMap::new());
    for (name, text) in request.sizes {
        let size = verify::relation(&text)?;
        match size.as_const() {
            Some(n) => drop(sizes.insert(name, n)),
            None => drop(relations.insert(name, size)),
        }
    }
    let mut verifying = verify::Options {
        n_seeds: request.seeds,
        sizes,
        relations,
        inputs: inputs.into_iter().collect(),
        oracle: match (&runtime, request.ask_runtime) {
            (Some(runtime), true) => Some(Arc::new(runtime.clone())),
            _ => None,
        },
        tolerance: request.tolerance,
        deadline,
        ..verify::Options::default()
    };
    let changed = changes.changed(&part, &mut verifying, request.verify, &mut |_| {});
    let edit::Changed { model, in_half } = changed.map_err(said)?;
    let clock = runtime.filter(|_| request.measure);
    let timed = clock.map(|clock| (clock, verifying.clone()));
    let options = Options {
        rewriting: rewrite::Options {
            target,
            fold_limit: request.fold_limit,
            without: unused,
            ..rewrite::Options::default()
        },
        verifying: request.verify.then_some(verifying),
    };
    let mut optimized = optimizing::optimize(&model, &options, &mut |_| {}).map_err(said)?;
    optimized.model = changes.finished(optimized.model);
    if let Some((clock, options)) = timed {
        let found = milliseconds(&clock, [&model, &optimized.model], &options)?;
        optimized.summary.before.milliseconds = Some(found.0);
        optimized.summary.after.milliseconds = Some(found.1);
    }
    let summary = &mut optimized.summary;
    summary.was_sorted = !is_in_order(&whole.proto);
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
    value["half"] = serde_json::to_value(in_half).map_err(said)?;
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
