//! Kernels of a program alone, for tuning from Python: keys, other ways to cut contractions, times.
//!
//! Owns the Python object; what a cut-out is, and how it is timed, is the compiler's.

use crate::listener::{Listener, detached};
use crate::program::{CompileFailure, Failure};
use crate::steering;
use compiler::Target;
use compiler::cutout::{self, Cutout, Cutouts};
use compiler::graph::Blocking;
use compiler::kernels::compile::CompileOptions;
use compiler::predict::{On, predict};
use compiler::torch::Captured;
use pyo3::prelude::*;
use serde::Serialize;

/// The kernels of a captured graph under a recipe.
#[pyclass(frozen, module = "shorthaul._native")]
pub struct Kernels {
    cutouts: Cutouts,
    options: CompileOptions,
    on: On,
}

/// One kernel to Python.
#[derive(Serialize)]
struct Row {
    origin: String,
    stage: &'static str,
    path: &'static str,
    predicted_us: f64,
    /// The place of its contraction's decision: node, module, container; none if there is no choice.
    place: Option<[String; 3]>,
    blocking: Option<String>,
    /// Other ways to cut it, the best first by prediction, with microseconds.
    others: Vec<(String, f64)>,
}

#[pymethods]
impl Kernels {
    /// Plans a captured graph as `plan_program` does and lists its kernels; for each contraction, `n_others` other ways
    /// to cut it.
    #[new]
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (graph_json, constants, requires_grad, threads, recipe=None, budget=None, machine=None, n_others=0))]
    fn new(
        py: Python<'_>,
        graph_json: &str,
        constants: Vec<Vec<u8>>,
        requires_grad: Vec<usize>,
        threads: usize,
        recipe: Option<&str>,
        budget: Option<f64>,
        machine: Option<&str>,
        n_others: usize,
    ) -> PyResult<Kernels> {
        let choices = steering::choices(recipe, budget, machine)?;
        let constants: Vec<&[u8]> = constants.iter().map(Vec::as_slice).collect();
        let threads = threads.max(1);
        let work = || {
            let captured = Captured::parse(graph_json, &constants).map_err(Failure::Import)?;
            let plan = captured.plan(&requires_grad, Target::Cpu, threads, &choices);
            let plan = plan.map_err(Failure::Compile)?;
            let mut listener = Listener::new(None);
            let options = CompileOptions::from_environment(&mut listener);
            let options = options.map_err(|e| Failure::Compile(e.into()))?;
            let machine = plan.machine.unwrap_or(options.target.machine);
            let on = On { machine, threads };
            let made_by = (&options.target, options.toolchain.identity());
            let cutouts = Cutouts::new(plan, &on, made_by, n_others);
            Ok(Kernels {
                cutouts: cutouts.map_err(Failure::Compile)?,
                options,
                on,
            })
        };
        detached(py, work)
    }

    /// The kernels in order, as JSON.
    fn rows(&self) -> PyResult<String> {
        let graph = &self.cutouts.plan().graph;
        let predicted = predict(graph, &self.cutouts.kernels, &self.on);
        let row = |(info, predicted): (
            &compiler::kernels::lowering::KernelInfo,
            &compiler::predict::Prediction,
        )| {
            let cuts = info.cuts.as_ref();
            let place = cuts.map(|c| &c.place);
            Row {
                origin: info.origin.clone(),
                stage: info.stage.name(),
                path: info.path,
                predicted_us: predicted.us,
                place: place.map(|p| [p.node.clone(), p.module.clone(), p.container.clone()]),
                blocking: cuts.map(|c| c.cuts.blocking.to_string()),
                others: cuts.map_or_else(Vec::new, |c| {
                    let others = c.cuts.others.iter();
                    others
                        .map(|(b, ns)| (b.to_string(), *ns as f64 / 1e3))
                        .collect()
                }),
            }
        };
        let rows: Vec<Row> = self
            .cutouts
            .kernels
            .iter()
            .zip(&predicted)
            .map(row)
            .collect();
        steering::json(&rows)
    }

    /// The key of a kernel alone, with its contraction cut as told. Kernels with the same text and compiler have the
    /// same key. `None` if the kernel cannot be cut out.
    #[pyo3(signature = (kernel, blocking=None))]
    fn key(
        &self,
        py: Python<'_>,
        kernel: usize,
        blocking: Option<&str>,
    ) -> PyResult<Option<String>> {
        Ok(self.cut(py, kernel, blocking)?.map(|cutout| cutout.key))
    }
}

impl Kernels {
    fn cut(
        &self,
        py: Python<'_>,
        kernel: usize,
        blocking: Option<&str>,
    ) -> PyResult<Option<Cutout>> {
        let blocking = blocking.map(parsed).transpose()?;
        let work = || {
            let cut = self.cutouts.cut(kernel, blocking.as_ref());
            cut.map_err(Failure::Compile)
        };
        detached(py, work)
    }
}

fn parsed(text: &str) -> PyResult<Blocking> {
    let wrong = || {
        CompileFailure::new_err(format!(
            "`{text}` is not a blocking: eight numbers, such as a recipe's `cut` has"
        ))
    };
    Blocking::parse(text).ok_or_else(wrong)
}

/// Compiles kernels alone, `(kernels, position, blocking)`, and runs them in turns for `seconds`. Returns
/// the seconds of each round, for each. Stops for signals.
#[pyfunction]
pub fn time_kernels(
    py: Python<'_>,
    items: Vec<(Py<Kernels>, usize, Option<String>)>,
    seconds: f64,
) -> PyResult<Vec<Vec<f64>>> {
    let mut cutouts = Vec::new();
    for (kernels, kernel, blocking) in &items {
        let cut = kernels.get().cut(py, *kernel, blocking.as_deref())?;
        let refused = || CompileFailure::new_err("this kernel cannot be cut out".to_string());
        cutouts.push(cut.ok_or_else(refused)?);
    }
    let Some((first, ..)) = items.first() else {
        return Ok(Vec::new());
    };
    let first = first.get();
    let mut listener = Listener::new(None);
    let work = || {
        let (options, threads) = (&first.options, first.on.threads);
        let times = cutout::time(&cutouts, threads, options, seconds, &mut listener);
        times.map_err(|error| listener.failure(error))
    };
    detached(py, work)
}
