//! A compiled program as a Python object.
//!
//! Data comes as addresses of contiguous tensors that the Python side keeps alive and of the sizes
//! that `inputs`, `outputs` and the `*_bytes` attributes state. The interpreter lock is released
//! while kernels are compiled and run.
#![allow(unsafe_code)]

use compiler::graph::{ContainerId, Graph};
use compiler::importer::torch::ImportError;
use compiler::kernels;
use compiler::kernels::memory::Buffer;
use compiler::kernels::pool::Pool;
use compiler::kernels::progress::{Progress, UnitReady};
use compiler::kernels::run::RunError;
use compiler::report::{Memory, Report};
use compiler::torch::Captured;
use compiler::{CompileError, Executable};
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use std::ptr::null_mut;

create_exception!(
    shorthaul._native,
    CompileFailure,
    PyException,
    "No kernels could be made; the message says why."
);
create_exception!(
    shorthaul._native,
    UnsupportedOperators,
    PyException,
    "Operators without an implementation: `args[1]` lists `(target, places)`."
);

/// Name, shape and dtype (PyTorch's name) of a tensor at the boundary.
type Spec = (String, Vec<i64>, &'static str);

/// Kernels for the forward and, where gradients are wanted, the backward pass.
#[pyclass(frozen, module = "shorthaul._native")]
pub struct Program {
    executable: Executable,
    threads: usize,
    /// Slots: the model's inputs, gradients of outputs, the model's outputs, gradients of inputs.
    n_seeds: usize,
    #[pyo3(get)]
    inputs: Vec<Spec>,
    #[pyo3(get)]
    outputs: Vec<Spec>,
    /// Whether the last input is the seed of random numbers.
    #[pyo3(get)]
    uses_seed: bool,
    /// Positions among the outputs whose gradient `backward` takes.
    #[pyo3(get)]
    differentiable_outputs: Vec<usize>,
    /// Positions among the inputs whose gradient `backward` gives.
    #[pyo3(get)]
    grad_inputs: Vec<usize>,
    /// Positions among the inputs that `backward` reads.
    #[pyo3(get)]
    backward_reads: Vec<usize>,
    /// Positions among the outputs that `backward` reads.
    #[pyo3(get)]
    backward_output_reads: Vec<usize>,
}

#[pymethods]
impl Program {
    /// Compiles a captured graph. `requires_grad` are positions among its inputs without constants;
    /// `progress(done, total, name)` is called as sources become ready.
    #[staticmethod]
    #[pyo3(signature = (graph_json, constants, requires_grad, threads, progress=None))]
    fn compile(
        py: Python<'_>,
        graph_json: &str,
        constants: Vec<Vec<u8>>,
        requires_grad: Vec<usize>,
        threads: usize,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Program> {
        let constants: Vec<&[u8]> = constants.iter().map(Vec::as_slice).collect();
        let threads = threads.max(1);
        let built = py.detach(|| {
            let captured = Captured::parse(graph_json, &constants).map_err(Failure::Import)?;
            let mut listener = Listener { progress };
            let executable = captured
                .compile(&requires_grad, threads, &mut listener)
                .map_err(Failure::Compile)?;
            Ok((captured.uses_seed(), executable))
        });
        let (uses_seed, executable) = built.map_err(|failure: Failure| failure.into_python(py))?;
        Program::new(executable, uses_seed, threads)
    }

    /// Bytes that live from the forward to the backward pass.
    #[getter]
    fn saved_bytes(&self) -> usize {
        self.executable.forward.parts().saved_bytes
    }

    /// Bytes that the forward pass needs while it runs.
    #[getter]
    fn forward_scratch_bytes(&self) -> usize {
        self.executable.forward.parts().arena_bytes
    }

    /// Bytes that the backward pass needs while it runs.
    #[getter]
    fn backward_scratch_bytes(&self) -> usize {
        self.executable.backward.parts().arena_bytes
    }

    /// Computes the outputs and the saved block. With `timed`, gives the launches' names and seconds.
    #[pyo3(signature = (inputs, outputs, saved, scratch, timed=false))]
    fn forward(
        &self,
        py: Python<'_>,
        inputs: Vec<usize>,
        outputs: Vec<usize>,
        saved: usize,
        scratch: usize,
        timed: bool,
    ) -> PyResult<Times> {
        expect("input", inputs.len(), self.inputs.len())?;
        expect("output", outputs.len(), self.outputs.len())?;
        let mut slots = addresses(&inputs);
        slots.extend(std::iter::repeat_n(null_mut(), self.n_seeds));
        slots.extend(addresses(&outputs));
        slots.extend(std::iter::repeat_n(null_mut(), self.grad_inputs.len()));
        let blocks = (Address(scratch as *mut u8), Address(saved as *mut u8));
        self.run(py, &self.executable.forward, slots, blocks, timed)
    }

    /// Computes the gradients of the inputs named by `grad_inputs`.
    ///
    /// `reads` are the inputs of `backward_reads`, `output_reads` the outputs of
    /// `backward_output_reads`, as they were in the forward pass.
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (grad_outputs, reads, output_reads, saved, grads, scratch, timed=false))]
    fn backward(
        &self,
        py: Python<'_>,
        grad_outputs: Vec<usize>,
        reads: Vec<usize>,
        output_reads: Vec<usize>,
        saved: usize,
        grads: Vec<usize>,
        scratch: usize,
        timed: bool,
    ) -> PyResult<Times> {
        expect("output gradient", grad_outputs.len(), self.n_seeds)?;
        expect("input to read", reads.len(), self.backward_reads.len())?;
        expect(
            "output to read",
            output_reads.len(),
            self.backward_output_reads.len(),
        )?;
        expect("gradient", grads.len(), self.grad_inputs.len())?;
        let mut slots = vec![null_mut(); self.inputs.len()];
        for (at, address) in self.backward_reads.iter().zip(addresses(&reads)) {
            slots[*at] = address;
        }
        slots.extend(addresses(&grad_outputs));
        let first_output = slots.len();
        slots.extend(std::iter::repeat_n(null_mut(), self.outputs.len()));
        for (at, address) in self
            .backward_output_reads
            .iter()
            .zip(addresses(&output_reads))
        {
            slots[first_output + at] = address;
        }
        slots.extend(addresses(&grads));
        let blocks = (Address(scratch as *mut u8), Address(saved as *mut u8));
        self.run(py, &self.executable.backward, slots, blocks, timed)
    }

    /// What the program does in numbers, as JSON: the fields of `compiler::report::Report`.
    fn report(&self) -> PyResult<String> {
        let (forward, backward) = (
            self.executable.forward.parts(),
            self.executable.backward.parts(),
        );
        let memory = Memory {
            forward_arena_bytes: forward.arena_bytes,
            backward_arena_bytes: backward.arena_bytes,
            saved_bytes: forward.saved_bytes,
            thread_scratch_bytes: forward
                .thread_scratch_bytes
                .max(backward.thread_scratch_bytes),
        };
        let report = Report::new(&self.executable.plan, &self.executable.kernels, memory);
        serde_json::to_string(&report).map_err(|e| CompileFailure::new_err(e.to_string()))
    }
}

impl Program {
    fn new(executable: Executable, uses_seed: bool, threads: usize) -> PyResult<Program> {
        let step = &executable.plan.step;
        let graph = &executable.plan.bound;
        let n_seeds = step.seeded_outputs.len();
        let n_inputs = step.n_inputs;
        let specs = |ids: &[ContainerId]| -> PyResult<Vec<Spec>> {
            ids.iter().map(|id| spec(graph, *id)).collect()
        };
        let outputs: Vec<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
        let backward = executable.backward.parts();
        let is_read = |slot: &usize| {
            let external = backward.externals.get(*slot);
            external.is_some_and(|e| e.bytes > 0)
        };
        let first_output = n_inputs + n_seeds;
        Ok(Program {
            threads,
            n_seeds,
            inputs: specs(&graph.inputs[..n_inputs])?,
            outputs: specs(&outputs[..step.n_outputs])?,
            uses_seed,
            differentiable_outputs: step.seeded_outputs.clone(),
            grad_inputs: step.gradient_inputs.clone(),
            backward_reads: (0..n_inputs).filter(|i| is_read(i)).collect(),
            backward_output_reads: (0..step.n_outputs)
                .filter(|i| is_read(&(first_output + i)))
                .collect(),
            executable,
        })
    }

    fn run(
        &self,
        py: Python<'_>,
        program: &compiler::kernels::run::Program,
        slots: Vec<*mut u8>,
        (scratch, saved): (Address, Address),
        timed: bool,
    ) -> PyResult<Times> {
        let slots: Vec<Address> = slots.into_iter().map(Address).collect();
        py.detach(move || {
            // Whole values, so that the closure captures the wrappers and not their raw pointers.
            let (slots, scratch, saved) = (slots, scratch, saved);
            let pool = Pool::global();
            // A program of fewer threads than another's leaves the rest of them asleep.
            if pool.threads() < self.threads {
                pool.set_threads(self.threads);
            }
            let failed = |error: RunError| CompileFailure::new_err(error.to_string());
            let slots: Vec<*mut u8> = slots.into_iter().map(|a| a.0).collect();
            // SAFETY: the package passes contiguous tensors of the shapes and dtypes in `inputs` and
            // `outputs`, and blocks of the stated sizes from PyTorch's allocator, which aligns them
            // to 64 bytes; it keeps them alive and untouched during the call. Slots that a pass does
            // not touch may be null.
            unsafe {
                if timed {
                    return run_timed(program, &slots, scratch.0, saved.0, pool).map_err(failed);
                }
                program
                    .run_raw(&slots, scratch.0, saved.0, pool)
                    .map_err(failed)?;
            }
            Ok(Vec::new())
        })
    }
}

/// Launches with the seconds they took.
type Times = Vec<(String, f64)>;

/// As `run_raw`, with the time of each launch.
///
/// # Safety
/// As `run_raw`.
unsafe fn run_timed(
    program: &compiler::kernels::run::Program,
    slots: &[*mut u8],
    scratch: *mut u8,
    saved: *mut u8,
    pool: &Pool,
) -> Result<Times, RunError> {
    let parts = program.parts();
    let lend = |start: *mut u8, bytes: usize| match bytes {
        0 => Buffer::none(),
        // SAFETY: the caller vouches for the sizes.
        _ => unsafe { Buffer::from_raw(start, bytes, true) },
    };
    let sized = slots.iter().zip(&parts.externals);
    let externals: Vec<Buffer> = sized.map(|(slot, spec)| lend(*slot, spec.bytes)).collect();
    let arena = lend(scratch, parts.arena_bytes);
    let times = program.run_timed(&externals, arena, lend(saved, parts.saved_bytes), pool)?;
    let seconds = |t: kernels::run::LaunchTime<'_>| (t.name.to_string(), t.time.as_secs_f64());
    Ok(times.into_iter().map(seconds).collect())
}

/// An address that the caller vouches for.
#[derive(Clone, Copy)]
struct Address(*mut u8);
// SAFETY: an address is plain data; who may touch what it points to is the caller's promise.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

fn addresses(list: &[usize]) -> Vec<*mut u8> {
    list.iter().map(|a| *a as *mut u8).collect()
}

fn expect(what: &str, found: usize, expected: usize) -> PyResult<()> {
    match found == expected {
        true => Ok(()),
        false => Err(PyValueError::new_err(format!(
            "the program takes {expected} {what} addresses, {found} were given"
        ))),
    }
}

fn shape_of(graph: &Graph, id: ContainerId) -> PyResult<Vec<i64>> {
    let c = graph.container(id);
    let size = |s: &compiler::graph::SymExpr| {
        s.as_const().ok_or_else(|| {
            CompileFailure::new_err(format!("size `{s}` of `{}` has no value", c.name))
        })
    };
    c.shape.iter().map(size).collect()
}

fn spec(graph: &Graph, id: ContainerId) -> PyResult<Spec> {
    use compiler::graph::DType;
    let c = graph.container(id);
    let dtype = match c.dtype {
        DType::Bool => "bool",
        DType::U8 => "uint8",
        DType::I8 => "int8",
        DType::I16 => "int16",
        DType::I32 => "int32",
        DType::I64 => "int64",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        DType::F32 => "float32",
        DType::F64 => "float64",
    };
    Ok((c.name.clone(), shape_of(graph, id)?, dtype))
}

enum Failure {
    Import(ImportError),
    Compile(CompileError),
}

impl Failure {
    fn into_python(self, py: Python<'_>) -> PyErr {
        let message = match &self {
            Failure::Import(error) => error.to_string(),
            Failure::Compile(error) => error.to_string(),
        };
        match self {
            Failure::Import(ImportError::Unsupported(missing)) => {
                let list: Vec<_> = missing.into_iter().map(|m| (m.target, m.places)).collect();
                match list.into_pyobject(py) {
                    Ok(list) => UnsupportedOperators::new_err((message, list.unbind())),
                    Err(error) => error,
                }
            }
            _ => CompileFailure::new_err(message),
        }
    }
}

/// Passes progress on to a Python callable, and warnings to Python's `warnings`.
struct Listener {
    progress: Option<Py<PyAny>>,
}

impl Progress for Listener {
    fn warn(&mut self, message: &str) {
        Python::attach(|py| {
            let warn = || -> PyResult<()> {
                py.import("warnings")?.call_method1("warn", (message,))?;
                Ok(())
            };
            if let Err(error) = warn() {
                error.write_unraisable(py, None);
            }
        });
    }

    fn unit_ready(&mut self, unit: &UnitReady<'_>) {
        let Some(progress) = &self.progress else {
            return;
        };
        Python::attach(|py| {
            if let Err(error) = progress.call1(py, (unit.done, unit.total, unit.name)) {
                error.write_unraisable(py, None);
            }
        });
    }
}
