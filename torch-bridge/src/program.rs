//! A compiled program as a Python object.
//!
//! Data comes as addresses of contiguous tensors. The Python side keeps these alive, with the sizes
//! that `inputs`, `outputs` and the `*_bytes` attributes state. The interpreter lock is released
//! while kernels are compiled and run.

use crate::built::{Blocks, Built, ProductRow, Times};
use crate::calls::{self, AttentionRow, CallRow, PyOperators};
use crate::cuda::{cuda_target, products_by};
use crate::listener::{Listener, detached, interruptible};
use crate::steering;
use compiler::CompileError;
use compiler::attention::Operators;
use compiler::cuda_kernels::CudaError;
use compiler::graph::{Bindings, ContainerId, DType, Graph, Symbol};
use compiler::importer::torch::ImportError;
use compiler::internal_error::{InternalError, caught};
use compiler::kernels::compile::CompileError as kernels;
use compiler::predict::predict;
use compiler::report::Report;
use compiler::torch::{Captured, Sizes, locked};
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

create_exception!(
    shorthaul._native,
    CompileFailure,
    PyException,
    "No kernels could be made; the message says why."
);
create_exception!(
    shorthaul._native,
    InternalFailure,
    CompileFailure,
    "A defect of Shorthaul; the message asks for a report."
);
create_exception!(
    shorthaul._native,
    ToolchainFailure,
    CompileFailure,
    "The machine cannot compile any kernel: no compiler, no place for what it makes, a bad table."
);
create_exception!(
    shorthaul._native,
    UnsupportedOperators,
    PyException,
    "Operators without an implementation: `args[1]` lists `(target, places)`."
);

/// Name, shape and dtype (PyTorch's name) of a tensor at the boundary.
type Spec = (String, Vec<i64>, &'static str);

/// What programs of one graph compiled, for its programs of later sizes.
#[pyclass(frozen, module = "shorthaul._native")]
#[derive(Default)]
pub struct Templates {
    texts: Mutex<compiler::kernels::templates::Templates>,
}

#[pymethods]
impl Templates {
    #[new]
    fn new() -> Templates {
        Templates::default()
    }

    /// Whether kernels of sizes that may come were looked at.
    #[getter]
    fn has_foreseen(&self) -> bool {
        locked(&self.texts).has_foreseen()
    }
}

/// An imported graph whose sizes are symbols, for programs of several sizes.
#[pyclass(frozen, module = "shorthaul._native")]
pub struct Traced {
    captured: Captured,
}

#[pymethods]
impl Traced {
    /// Imports a captured graph and the bytes of its constants.
    #[new]
    fn new(py: Python<'_>, graph_json: &str, constants: Vec<Vec<u8>>) -> PyResult<Traced> {
        let constants: Vec<&[u8]> = constants.iter().map(Vec::as_slice).collect();
        let work = || Captured::parse(graph_json, &constants).map_err(Failure::Import);
        let captured = detached(py, work)?;
        Ok(Traced { captured })
    }
}

fn bindings(sizes: BTreeMap<String, i64>) -> Bindings {
    let sizes = sizes.into_iter();
    sizes.map(|(name, n)| (Symbol::new(name), n)).collect()
}

/// Kernels for the forward and, where gradients are wanted, the backward pass.
#[pyclass(frozen, module = "shorthaul._native")]
pub struct Program {
    built: Built,
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

/// The part of a backward pass that computes some of the gradients.
#[pyclass(frozen, module = "shorthaul._native")]
pub struct BackwardPart {
    /// For each launch of the pass, whether it is in the part.
    runs: Arc<[bool]>,
    /// Positions in `grad_inputs` of the gradients whose memory it touches.
    #[pyo3(get)]
    touched: Vec<usize>,
}

#[pymethods]
impl Program {
    /// Compiles a captured graph. `requires_grad` are positions among its inputs without constants;
    /// `progress(done, total, name)` is called as sources become ready. `recipe` is the text of one.
    /// `budget` is the bytes that intermediate results may take or, below 1, the part of what they take without it.
    /// `templates` is what earlier sizes of the same graph compiled; what this one compiles is added.
    /// `machine` has the machine's limits as JSON, if they were measured.
    #[staticmethod]
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (graph_json, constants, requires_grad, threads, progress=None, recipe=None, budget=None, templates=None, machine=None))]
    fn compile(
        py: Python<'_>,
        graph_json: &str,
        constants: Vec<Vec<u8>>,
        requires_grad: Vec<usize>,
        threads: usize,
        progress: Option<Py<PyAny>>,
        recipe: Option<&str>,
        budget: Option<f64>,
        templates: Option<Py<Templates>>,
        machine: Option<&str>,
    ) -> PyResult<Program> {
        let choices = steering::choices(recipe, budget, machine)?;
        let graph_json = graph_json.to_owned();
        let threads = threads.max(1);
        let work = move |abandoned| {
            let templates = templates.as_ref().map(|templates| &templates.get().texts);
            let constants: Vec<&[u8]> = constants.iter().map(Vec::as_slice).collect();
            let captured = Captured::parse(&graph_json, &constants).map_err(Failure::Import)?;
            let mut listener = Listener::of(progress, abandoned);
            let executable = captured
                .compile(&requires_grad, threads, &choices, templates, &mut listener)
                .map_err(|error| listener.failure(error))?;
            let built = Built::Cpu(Box::new(executable), threads.into());
            Ok((captured.uses_seed(), built))
        };
        let (uses_seed, built) = interruptible(py, work)?;
        Program::new(built, uses_seed)
    }

    /// Like `compile`, but with a number for each symbolic size of `traced`, by name. `expected` are other sets of
    /// numbers that may come later; the kernels serve these as well.
    #[staticmethod]
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (traced, sizes, expected, requires_grad, threads, progress=None, recipe=None, budget=None, templates=None, machine=None))]
    fn compile_for(
        py: Python<'_>,
        traced: Py<Traced>,
        sizes: BTreeMap<String, i64>,
        expected: Vec<BTreeMap<String, i64>>,
        requires_grad: Vec<usize>,
        threads: usize,
        progress: Option<Py<PyAny>>,
        recipe: Option<&str>,
        budget: Option<f64>,
        templates: Option<Py<Templates>>,
        machine: Option<&str>,
    ) -> PyResult<Program> {
        let choices = steering::choices(recipe, budget, machine)?;
        let threads = threads.max(1);
        let uses_seed = traced.get().captured.uses_seed();
        let sizes = Sizes {
            own: bindings(sizes),
            expected: expected.into_iter().map(bindings).collect(),
        };
        let work = move |abandoned| {
            let templates = templates.as_ref().map(|templates| &templates.get().texts);
            let mut listener = Listener::of(progress, abandoned);
            let executable = traced
                .get()
                .captured
                .compile_for(
                    &sizes,
                    &requires_grad,
                    threads,
                    &choices,
                    templates,
                    &mut listener,
                )
                .map_err(|error| listener.failure(error))?;
            Ok(Built::Cpu(Box::new(executable), threads.into()))
        };
        Program::new(interruptible(py, work)?, uses_seed)
    }

    /// Compiles a captured graph to CUDA kernels for the device of number `device`, or for the
    /// emulator on the host's memory where it is `None`. `nvrtc` are folders to look for NVRTC and cuBLASLt
    /// in. Products are computed as the file `table` says, or all by the candidate `every` (its kind as in
    /// such a file, its rank, and bytes of workspace), or by our own kernels if both are `None`.
    #[staticmethod]
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (graph_json, constants, requires_grad, device, nvrtc, progress=None, table=None, every=None, recipe=None, budget=None))]
    fn compile_cuda(
        py: Python<'_>,
        graph_json: &str,
        constants: Vec<Vec<u8>>,
        requires_grad: Vec<usize>,
        device: Option<usize>,
        nvrtc: Vec<PathBuf>,
        progress: Option<Py<PyAny>>,
        table: Option<PathBuf>,
        every: Option<(String, usize, usize)>,
        recipe: Option<&str>,
        budget: Option<f64>,
    ) -> PyResult<Program> {
        // Measured limits are the CPU's: they say nothing of a device.
        let choices = steering::choices(recipe, budget, None)?;
        let products = products_by(table, every)?;
        let graph_json = graph_json.to_owned();
        let work = move |abandoned| {
            let target = cuda_target(device, &nvrtc);
            let constants: Vec<&[u8]> = constants.iter().map(Vec::as_slice).collect();
            let captured = Captured::parse(&graph_json, &constants).map_err(Failure::Import)?;
            let mut listener = Listener::of(progress, abandoned);
            let executable = captured
                .compile_cuda(
                    &requires_grad,
                    &target,
                    &products,
                    Operators::PyTorch,
                    &choices,
                    &mut listener,
                )
                .map_err(|error| listener.failure(error))?;
            Ok((captured.uses_seed(), Built::Cuda(Box::new(executable))))
        };
        let (uses_seed, built) = interruptible(py, work)?;
        Program::new(built, uses_seed)
    }

    /// The CUDA text of every kernel, as `(name, origin, text)`; empty for the CPU.
    fn cuda_kernels(&self) -> Vec<(String, String, String)> {
        self.built.cuda_kernels()
    }

    /// The products of matrices of CUDA programs: `(map, maps, product, rest, kind, rank, origin)`, where a
    /// product covers `maps` maps from `map` on, and kind and rank say what computes it, as in a table.
    fn cuda_products(&self) -> Vec<ProductRow> {
        self.built.cuda_products()
    }

    /// The kernel of each launch of a pass, in the order of its times: its position in the report. In a CUDA
    /// program, this is the position of its map.
    fn launch_kernels(&self, backward: bool) -> Vec<usize> {
        self.built.launch_kernels(backward)
    }

    /// The calls of PyTorch's operators that a pass makes, in order; see [`CallRow`].
    fn cuda_calls(&self, backward: bool) -> Vec<CallRow> {
        calls::rows(&self.built, backward)
    }

    /// What computes each attention of a CUDA program where a table or a decree could choose: `(product,
    /// rest, kind, reason, origin)`. Product and rest are as a table has them, if it can have them.
    fn cuda_attentions(&self) -> Vec<AttentionRow> {
        calls::attentions(&self.built)
    }

    /// Threads that its kernels are for; one where the step is too small for more.
    #[getter]
    fn threads(&self) -> usize {
        self.built.on().map_or(1, |on| on.threads)
    }

    /// Microseconds that the kernels of both passes are predicted to take; 0 on a device.
    #[getter]
    fn predicted_us(&self) -> f64 {
        self.built.on().map_or(0.0, |on| {
            let predicted = predict(&self.built.plan().graph, self.built.kernels(), &on);
            predicted.iter().map(|kernel| kernel.us).sum()
        })
    }

    /// Bytes that live from the forward to the backward pass.
    #[getter]
    fn saved_bytes(&self) -> usize {
        self.built.memory().saved_bytes
    }

    /// Bytes that the forward pass needs while it runs.
    #[getter]
    fn forward_scratch_bytes(&self) -> usize {
        self.built.memory().forward_arena_bytes
    }

    /// Bytes that the backward pass needs while it runs.
    #[getter]
    fn backward_scratch_bytes(&self) -> usize {
        self.built.memory().backward_arena_bytes
    }

    /// Lets `n` threads run the kernels from now on, but never more than they were planned for.
    fn use_threads(&self, n: usize) {
        self.built.use_threads(n);
    }

    /// Computes the outputs and the saved block. CUDA kernels are enqueued on `stream`. With `timed`,
    /// gives the launches' names and seconds, and waits for those on a device. `operators(n)` is called
    /// for the n-th of `cuda_calls`, between the launches that stand before and after it.
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (inputs, outputs, saved, scratch, timed=false, stream=0, operators=None))]
    fn forward(
        &self,
        py: Python<'_>,
        inputs: Vec<usize>,
        outputs: Vec<usize>,
        saved: usize,
        scratch: usize,
        timed: bool,
        stream: u64,
        operators: Option<Py<PyAny>>,
    ) -> PyResult<Times> {
        expect("input", inputs.len(), self.inputs.len())?;
        expect("output", outputs.len(), self.outputs.len())?;
        let mut slots = addresses(&inputs);
        slots.extend(std::iter::repeat_n(null_mut(), self.n_seeds));
        slots.extend(addresses(&outputs));
        slots.extend(std::iter::repeat_n(null_mut(), self.grad_inputs.len()));
        let blocks = Blocks::new(slots, scratch, saved);
        let called = PyOperators::new(operators);
        let work = || self.built.run(py, false, blocks, timed, (stream, &called));
        let result = caught(work).unwrap_or_else(|e| Err(Failure::Internal(e).into_python(py)));
        called.outcome(py, result)
    }

    /// Computes the gradients of the inputs named by `grad_inputs`.
    ///
    /// `reads` are the inputs of `backward_reads`, `output_reads` the outputs of
    /// `backward_output_reads`, as they were in the forward pass. Where only a `part` of the pass
    /// runs, the addresses of gradients that it does not touch may be 0.
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (grad_outputs, reads, output_reads, saved, grads, scratch, timed=false, stream=0, operators=None, part=None))]
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
        stream: u64,
        operators: Option<Py<PyAny>>,
        part: Option<Py<BackwardPart>>,
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
        let blocks = Blocks::new(slots, scratch, saved);
        let called = PyOperators::new(operators);
        let runs = part.map(|part| part.get().runs.clone());
        let blocks = blocks.for_part(runs);
        let work = || self.built.run(py, true, blocks, timed, (stream, &called));
        let result = caught(work).unwrap_or_else(|e| Err(Failure::Internal(e).into_python(py)));
        called.outcome(py, result)
    }

    /// The part of the backward pass that computes the gradients at these positions in `grad_inputs`; `None` if it is
    /// the whole pass.
    fn part_of_backward(&self, wanted: Vec<usize>) -> Option<BackwardPart> {
        let first = self.outputs.len();
        let outputs: Vec<usize> = wanted.iter().map(|k| first + k).collect();
        let (runs, is_touched) = self.built.part_for(&outputs)?;
        let touched = (0..self.grad_inputs.len()).filter(|k| is_touched[first + k]);
        Some(BackwardPart {
            runs,
            touched: touched.collect(),
        })
    }

    /// The program's decisions, as JSON: the fields of `compiler::steering::Described`.
    fn decisions(&self) -> PyResult<String> {
        steering::described(&self.built)
    }

    /// What the caller should know about the recipe, in sentences.
    #[getter]
    fn notes(&self) -> Vec<String> {
        self.built.plan().notes.clone()
    }

    /// What the program does in numbers, as JSON: the fields of `compiler::report::Report`.
    fn report(&self) -> PyResult<String> {
        let built = &self.built;
        let mut report = Report::new(built.plan(), built.kernels(), built.memory(), built.on());
        report.attentions = calls::sentences(built);
        steering::json(&report)
    }
}

#[pymethods]
impl BackwardPart {
    /// How many launches it has, and how many the whole pass has.
    #[getter]
    fn n_launches(&self) -> (usize, usize) {
        let own = self.runs.iter().filter(|runs| **runs).count();
        (own, self.runs.len())
    }
}

impl Program {
    fn new(built: Built, uses_seed: bool) -> PyResult<Program> {
        let step = &built.plan().step;
        let graph = &built.plan().bound;
        let n_seeds = step.seeded_outputs.len();
        let n_inputs = step.n_inputs;
        let specs = |ids: &[ContainerId]| -> PyResult<Vec<Spec>> {
            ids.iter().map(|id| spec(graph, *id)).collect()
        };
        let outputs: Vec<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
        let backward = built.externals(true);
        let is_read = |slot: &usize| backward.get(*slot).is_some_and(|e| e.bytes > 0);
        let first_output = n_inputs + n_seeds;
        Ok(Program {
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
            built,
        })
    }
}

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
    let c = graph.container(id);
    Ok((c.name.clone(), shape_of(graph, id)?, dtype_name(c.dtype)))
}

/// PyTorch's name of a type.
pub(crate) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
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
    }
}

pub(crate) enum Failure {
    Import(ImportError),
    Compile(CompileError),
    Internal(InternalError),
    /// What a signal's handler raised.
    Interrupted(PyErr),
}

impl Failure {
    pub(crate) fn into_python(self, py: Python<'_>) -> PyErr {
        let message = match &self {
            Failure::Import(error) => error.to_string(),
            Failure::Compile(error) => error.to_string(),
            Failure::Internal(error) => error.to_string(),
            Failure::Interrupted(error) => error.to_string(),
        };
        match self {
            Failure::Interrupted(error) => error,
            Failure::Import(ImportError::Unsupported(missing)) => {
                let list: Vec<_> = missing.into_iter().map(|m| (m.target, m.places)).collect();
                match list.into_pyobject(py) {
                    Ok(list) => UnsupportedOperators::new_err((message, list.unbind())),
                    Err(error) => error,
                }
            }
            Failure::Compile(CompileError::Budget { .. }) => {
                steering::BudgetFailure::new_err(message)
            }
            Failure::Compile(CompileError::Recipe(_)) => steering::RecipeFailure::new_err(message),
            Failure::Compile(error) if error.is_internal() => InternalFailure::new_err(message),
            // The model is right, and PyTorch can run it on such a device.
            Failure::Compile(CompileError::Cuda(CudaError::UnsupportedArch { .. })) => {
                CompileFailure::new_err(message)
            }
            Failure::Compile(CompileError::Compile(
                kernels::Start { .. } | kernels::Cache(_) | kernels::Toolchain(_),
            ))
            | Failure::Compile(CompileError::Cuda(_) | CompileError::Nvrtc(_)) => {
                ToolchainFailure::new_err(message)
            }
            Failure::Internal(_) => InternalFailure::new_err(message),
            _ => CompileFailure::new_err(message),
        }
    }
}
