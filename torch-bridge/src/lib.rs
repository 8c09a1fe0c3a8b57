//! The Python package's native half: `shorthaul._native`.
//!
//! Owns the boundary between Python and the compiler: a captured graph comes in as text, a program
//! goes out, and calls pass data pointers. Never decides anything about graphs or kernels.

mod built;
mod cache;
mod calls;
mod cuda;
mod listener;
mod onnx;
mod onnx_optimize;
mod optimizer;
mod program;
mod steering;
mod threads;
mod tuning;

use program::{CompileFailure, InternalFailure, Program, ToolchainFailure, UnsupportedOperators};
use pyo3::prelude::*;

/// The ATen operators that the importer has a rule for.
#[pyfunction]
fn supported_targets() -> Vec<&'static str> {
    compiler::importer::torch::supported_targets()
}

/// Compiled programs for `shorthaul.module`.
#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<Program>()?;
    m.add_class::<program::Templates>()?;
    m.add_class::<program::BackwardPart>()?;
    m.add_class::<program::Traced>()?;
    m.add_class::<optimizer::CpuStep>()?;
    m.add_class::<optimizer::PooledStep>()?;
    m.add_class::<tuning::Kernels>()?;
    m.add_function(wrap_pyfunction!(tuning::time_kernels, m)?)?;
    m.add("CompileFailure", m.py().get_type::<CompileFailure>())?;
    m.add("InternalFailure", m.py().get_type::<InternalFailure>())?;
    m.add("ToolchainFailure", m.py().get_type::<ToolchainFailure>())?;
    m.add(
        "UnsupportedOperators",
        m.py().get_type::<UnsupportedOperators>(),
    )?;
    m.add_function(wrap_pyfunction!(supported_targets, m)?)?;
    m.add_function(wrap_pyfunction!(cache::cache_info, m)?)?;
    m.add_function(wrap_pyfunction!(cache::cache_clear, m)?)?;
    m.add_function(wrap_pyfunction!(cache::machine_key, m)?)?;
    m.add_function(wrap_pyfunction!(cuda::cuda_devices, m)?)?;
    m.add_function(wrap_pyfunction!(cuda::nvrtc_version, m)?)?;
    m.add_function(wrap_pyfunction!(cuda::cublaslt_version, m)?)?;
    m.add_function(wrap_pyfunction!(cuda::cudnn_version, m)?)?;
    m.add_function(wrap_pyfunction!(cuda::cuda_table, m)?)?;
    m.add(
        "BudgetFailure",
        m.py().get_type::<steering::BudgetFailure>(),
    )?;
    m.add(
        "RecipeFailure",
        m.py().get_type::<steering::RecipeFailure>(),
    )?;
    m.add_function(wrap_pyfunction!(steering::plan_program, m)?)?;
    m.add_function(wrap_pyfunction!(steering::assumed_machine, m)?)?;
    m.add_function(wrap_pyfunction!(steering::search_program, m)?)?;
    m.add_function(wrap_pyfunction!(steering::recipe_text, m)?)?;
    m.add_function(wrap_pyfunction!(steering::recipe_parsed, m)?)?;
    m.add("OnnxFailure", m.py().get_type::<onnx::OnnxFailure>())?;
    m.add_function(wrap_pyfunction!(onnx::training_graph, m)?)?;
    m.add_function(wrap_pyfunction!(onnx_optimize::optimize, m)?)?;
    m.add_function(wrap_pyfunction!(onnx_optimize::rewrites, m)?)?;
    m.add_function(wrap_pyfunction!(threads::share_threads, m)?)
}
