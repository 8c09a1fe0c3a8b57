//! What Python asks about CUDA devices before anything is compiled.

use crate::program::{CompileFailure, ToolchainFailure};
use compiler::cuda::{CudaTarget, ProductsBy};
use compiler::cuda_kernels::CudaError;
use compiler::cuda_kernels::device::{self, CublasLt, Cudnn, arch_for};
use compiler::cuda_kernels::nvrtc::Nvrtc;
use compiler::cuda_kernels::vendor::{Candidate, Table};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;

/// The device of that number with folders to look for NVRTC in, or the emulator.
pub(crate) fn cuda_target(device: Option<usize>, nvrtc: &[PathBuf]) -> CudaTarget<'_> {
    match device {
        Some(ordinal) => CudaTarget::Device { ordinal, nvrtc },
        None => CudaTarget::Emulated { seed: 1 },
    }
}

/// Number, name, compute capability, memory in bytes, and the architecture that kernels are compiled
/// for, if there is one.
type DeviceRow = (usize, String, (i32, i32), usize, Option<&'static str>);

/// The driver's version and the devices it offers. Raises `CompileFailure` with a sentence where there
/// is no driver or no device.
#[pyfunction]
pub fn cuda_devices() -> PyResult<(String, Vec<DeviceRow>)> {
    let failed = |error: CudaError| CompileFailure::new_err(error.to_string());
    let version = device::driver_version().map_err(failed)?;
    let mut rows = Vec::new();
    for ordinal in 0..device::count().map_err(failed)? {
        let info = device::describe(ordinal).map_err(failed)?;
        let arch = arch_for(info.capability).map(|a| a.name());
        rows.push((ordinal, info.name, info.capability, info.memory_bytes, arch));
    }
    Ok((version, rows))
}

/// Version and path of the NVRTC that would compile. Raises `CompileFailure` where there is none.
#[pyfunction]
pub fn nvrtc_version(folders: Vec<PathBuf>) -> PyResult<(String, PathBuf)> {
    match Nvrtc::find(&folders) {
        Ok(nvrtc) => Ok((nvrtc.version().to_string(), nvrtc.path().to_path_buf())),
        Err(error) => Err(CompileFailure::new_err(error.to_string())),
    }
}

/// Version and path of the cuBLASLt that would compute products. Raises `CompileFailure` where there is
/// none.
#[pyfunction]
pub fn cublaslt_version(folders: Vec<PathBuf>) -> PyResult<(String, PathBuf)> {
    match CublasLt::find(&folders) {
        Ok(library) => Ok((library.version().to_string(), library.path().to_path_buf())),
        Err(error) => Err(CompileFailure::new_err(error.to_string())),
    }
}

/// Version and path of the cuDNN that would compute convolutions; `None` where there is none. Raises
/// `CompileFailure` where one cannot be used, or is not in the folder that `SHORTHAUL_CUDNN` names.
#[pyfunction]
pub fn cudnn_version(folders: Vec<PathBuf>) -> PyResult<Option<(String, PathBuf)>> {
    match Cudnn::find(&folders) {
        Ok(library) => {
            let path = library.path().to_path_buf();
            Ok(Some((library.version().to_string(), path)))
        }
        Err(CudaError::NoLibrary { .. }) => Ok(None),
        Err(error) => Err(CompileFailure::new_err(error.to_string())),
    }
}

/// Reads a table of products: what it was measured on (device, driver, cuBLASLt), bytes of workspace,
/// and how many products it has. Raises `CompileFailure` with a sentence about what is wrong with it.
#[pyfunction]
pub fn cuda_table(path: PathBuf) -> PyResult<(String, String, String, usize, usize)> {
    let table = read(&path)?;
    let machine = &table.machine;
    Ok((
        machine.device.clone(),
        machine.driver.clone(),
        machine.cublaslt.clone(),
        table.workspace_bytes,
        table.len(),
    ))
}

fn read(path: &std::path::Path) -> PyResult<Table> {
    Table::read(path).map_err(|error| ToolchainFailure::new_err(error.to_string()))
}

/// What computes products: a table's file, one candidate by kind, rank and bytes of workspace, or our
/// own kernels.
pub fn products_by(
    table: Option<PathBuf>,
    every: Option<(String, usize, usize)>,
) -> PyResult<ProductsBy> {
    match (every, table) {
        (Some((kind, rank, workspace_bytes)), _) => Ok(ProductsBy::Every {
            candidate: Candidate::of(&kind, rank).ok_or_else(|| {
                PyValueError::new_err(format!(
                    "`{kind}` cannot compute products; see `shorthaul.products.KINDS`"
                ))
            })?,
            workspace_bytes,
        }),
        (None, Some(path)) => Ok(ProductsBy::Table(Arc::new(read(&path)?))),
        (None, None) => Ok(ProductsBy::Own),
    }
}
