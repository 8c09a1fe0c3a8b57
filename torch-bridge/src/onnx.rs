//! ONNX files made from Python.

use compiler::importer::onnx::{File, Mode, Options};
use compiler::training_graph::{self as training, Loss, Optimizer, TrainingOptions};
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;

create_exception!(
    shorthaul._native,
    OnnxFailure,
    PyException,
    "An ONNX file cannot be read or made; the message says why."
);

/// The bytes of the training graph of the model at `path`; see `compiler::training_graph`.
#[pyfunction]
#[pyo3(signature = (path, loss, optimizer=None, wrt=None, mode="file", label_smoothing=0.0))]
pub fn training_graph<'py>(
    py: Python<'py>,
    path: PathBuf,
    loss: &str,
    optimizer: Option<&str>,
    wrt: Option<Vec<String>>,
    mode: &str,
    label_smoothing: f64,
) -> PyResult<Bound<'py, PyBytes>> {
    let Ok(loss) = Loss::from_str(loss);
    let optimizer = optimizer
        .map(Optimizer::from_str)
        .transpose()
        .map_err(PyValueError::new_err)?;
    let import = Options {
        sizes: BTreeMap::new(),
        mode: Mode::from_str(mode).map_err(PyValueError::new_err)?,
    };
    let options = TrainingOptions {
        loss,
        optimizer,
        wrt,
        label_smoothing,
    };
    let made = py.detach(|| {
        let model = File::read(&path)
            .and_then(|file| file.import(&import))
            .map_err(|e| e.to_string())?;
        training::training_graph(&model, &options).map_err(|e| e.to_string())
    });
    Ok(PyBytes::new(py, &made.map_err(OnnxFailure::new_err)?))
}
