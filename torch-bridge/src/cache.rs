//! The folder of compiled kernels, as `shorthaul.cache` sees it.
//!
//! Owns two calls of the cache in `kernels`. Never decides what is kept.

use crate::listener::Listener;
use crate::program::CompileFailure;
use compiler::kernels::cache::{Cache, CacheError, CacheSettings};
use pyo3::prelude::*;

fn open() -> PyResult<Cache> {
    let mut listener = Listener::new(None);
    Cache::open(&CacheSettings::from_environment(), &mut listener)
        .map_err(|error: CacheError| CompileFailure::new_err(error.to_string()))
}

/// Folder, number of entries, their bytes, the limit in bytes, and whether the folder is removed with the process.
#[pyfunction]
pub fn cache_info(py: Python<'_>) -> PyResult<(String, usize, u64, u64, bool)> {
    let cache = open()?;
    let (n_entries, n_bytes) = py.detach(|| cache.contents());
    let folder = cache.root().display().to_string();
    let limit = cache.limit_bytes();
    Ok((folder, n_entries, n_bytes, limit, cache.is_temporary()))
}

/// Removes all entries. Returns how many there were, and their bytes.
#[pyfunction]
pub fn cache_clear(py: Python<'_>) -> PyResult<(usize, u64)> {
    let cache = open()?;
    Ok(py.detach(|| cache.clear()))
}

/// The name of this CPU among those that share the folder. What is measured on it is kept under this name.
#[pyfunction]
pub fn machine_key() -> String {
    compiler::tuning_database::machine_key()
}
