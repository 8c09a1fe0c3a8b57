//! What Python asks about CUDA devices before anything is compiled.

use crate::program::CompileFailure;
use compiler::kernels::cuda::device::{self, arch_for};
use compiler::kernels::cuda::nvrtc::Nvrtc;
use pyo3::prelude::*;
use std::path::PathBuf;

/// Number, name, compute capability, memory in bytes, and the architecture that kernels are compiled
/// for; `None` where there is none.
type DeviceRow = (usize, String, (i32, i32), usize, Option<&'static str>);

/// The driver's version and the devices it offers. Raises `CompileFailure` with a sentence where there
/// is no driver or no device.
#[pyfunction]
pub fn cuda_devices() -> PyResult<(String, Vec<DeviceRow>)> {
    let failed =
        |error: compiler::kernels::cuda::CudaError| CompileFailure::new_err(error.to_string());
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
