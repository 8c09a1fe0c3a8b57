//! Optimizers' steps in CPU and CUDA kernels, called from Python.

#![allow(unsafe_code)]

use crate::cuda::cuda_target;
use crate::listener::{Listener, detached};
use crate::program::CompileFailure;
use compiler::cuda_kernels::machine::Addresses;
use compiler::graph::DType;
use compiler::kernels::pool::Pool;
use compiler::kernels::run::Threads;
use compiler::kernels::update::cpu::Updater;
use compiler::optimizer::{OptimizerStep, Rule, compile_for_cpu};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::path::PathBuf;

/// An update rule; the fields are as `shorthaul.optim` documents them.
#[derive(FromPyObject)]
pub struct RuleRequest {
    /// `sgd`, `adam` or `adamw`.
    kind: String,
    momentum: bool,
    nesterov: bool,
    decay: bool,
    maximize: bool,
}

impl RuleRequest {
    fn rule(&self) -> PyResult<Rule> {
        match self.kind.as_str() {
            "sgd" => Ok(Rule::Sgd {
                momentum: self.momentum,
                decay: self.decay,
                nesterov: self.nesterov,
            }),
            "adam" | "adamw" => Ok(Rule::Adam {
                decay: self.decay,
                decoupled: self.kind == "adamw",
            }),
            other => Err(PyValueError::new_err(format!("no update rule `{other}`"))),
        }
    }
}

fn dtype_of(name: &str) -> PyResult<DType> {
    match name {
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::BF16),
        "float32" => Ok(DType::F32),
        "float64" => Ok(DType::F64),
        other => {
            let text = format!("there is no update for parameters of type {other}");
            Err(PyValueError::new_err(text))
        }
    }
}

/// A step of an optimizer over parameters of one type in the CPU's memory.
#[pyclass(frozen, module = "shorthaul._native")]
pub struct CpuStep {
    updater: Updater,
    /// Names of the rule's constants.
    #[pyo3(get)]
    constants: Vec<&'static str>,
}

#[pymethods]
impl CpuStep {
    /// Compiles a step.
    #[staticmethod]
    #[pyo3(signature = (rule, dtype, progress=None))]
    fn compile(
        py: Python<'_>,
        rule: RuleRequest,
        dtype: &str,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<CpuStep> {
        let dtype = dtype_of(dtype)?;
        let (maximize, rule) = (rule.maximize, rule.rule()?);
        let updater = detached(py, || {
            let mut listener = Listener::new(progress);
            compile_for_cpu(&rule.update(dtype, maximize), &mut listener)
                .map_err(|error| listener.failure(error))
        })?;
        Ok(CpuStep {
            constants: rule.constants().to_vec(),
            updater,
        })
    }

    /// Makes the step. Takes the addresses of each parameter, its gradient and its state; how many elements each
    /// parameter has; the rate, the number of the step, the factor of gradients, whether to skip the step, and the
    /// constants.
    fn run(
        &self,
        py: Python<'_>,
        addresses: Vec<usize>,
        sizes: Vec<usize>,
        numbers: Vec<f64>,
        threads: usize,
    ) -> PyResult<()> {
        let run = || {
            let arrays: Vec<*mut u8> = addresses.iter().map(|at| *at as *mut u8).collect();
            let pool = Pool::global();
            if pool.threads() < threads {
                pool.set_threads(threads);
            }
            let threads = Threads {
                pool,
                at_most: threads,
            };
            // SAFETY: the package passes dense tensors of the type that the step was compiled for, each with one
            // layout for a parameter, its gradient and its state; it has looked for parameters that overlap, and
            // keeps the tensors alive.
            unsafe { self.updater.run(&arrays, &sizes, &numbers, threads) }
        };
        let done = py.detach(run);
        done.map_err(|error| CompileFailure::new_err(error.to_string()))
    }
}

/// A step of an optimizer over parameters of one type and given sizes on a CUDA device.
#[pyclass(frozen, module = "shorthaul._native")]
pub struct PooledStep {
    step: OptimizerStep,
    /// Bytes read and written, each once.
    #[pyo3(get)]
    bytes_moved: u64,
    /// Names of the state of each parameter.
    #[pyo3(get)]
    state: Vec<&'static str>,
    /// Names of the rule's constants.
    #[pyo3(get)]
    constants: Vec<&'static str>,
}

#[pymethods]
impl PooledStep {
    /// Compiles a step for the device of that number, or for the emulator where it is `None`. `aligned`: all
    /// arrays start at multiples of 16 bytes.
    #[staticmethod]
    #[pyo3(signature = (rule, dtype, sizes, aligned, device, nvrtc, progress=None))]
    #[allow(clippy::too_many_arguments)]
    fn compile(
        py: Python<'_>,
        rule: RuleRequest,
        dtype: &str,
        sizes: Vec<usize>,
        aligned: bool,
        device: Option<usize>,
        nvrtc: Vec<PathBuf>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<PooledStep> {
        let dtype = dtype_of(dtype)?;
        let (maximize, rule) = (rule.maximize, rule.rule()?);
        let target = cuda_target(device, &nvrtc);
        let step = detached(py, || {
            let update = rule.update(dtype, maximize);
            let mut listener = Listener::new(progress);
            OptimizerStep::build(&update, &sizes, aligned, &target, &mut listener)
                .map_err(|error| listener.failure(error))
        })?;
        Ok(PooledStep {
            bytes_moved: step.pooled.bytes_moved,
            state: rule.state().to_vec(),
            constants: rule.constants().to_vec(),
            step,
        })
    }

    /// Enqueues the step on a stream. Takes the addresses of each parameter, its gradient and its state, then of the
    /// rate, the number of the step, the factor of gradients, whether to skip the step, and the constants.
    fn run(&self, py: Python<'_>, addresses: Vec<u64>, stream: u64) -> PyResult<()> {
        let addresses = Addresses {
            externals: &addresses,
            arena: 0,
            saved: 0,
        };
        // SAFETY: the package passes dense tensors of the sizes and the type that the step was compiled for,
        // each with one layout for a parameter, its gradient and its state, on the step's device; they are
        // PyTorch's, whose allocator gives memory of a stream back to that stream alone.
        let done = py.detach(|| unsafe {
            self.step
                .machine
                .run(&self.step.pooled.pass, stream, &addresses)
        });
        done.map_err(|error| CompileFailure::new_err(error.to_string()))
    }

    /// Name, origin and text of every kernel.
    fn cuda_kernels(&self) -> Vec<(String, String, String)> {
        let kernels = self.step.pooled.kernels.iter();
        kernels
            .map(|k| (k.name.clone(), k.origin.clone(), k.text.clone()))
            .collect()
    }
}
