//! The threads that run the kernels: PyTorch's, if they are found.

use compiler::kernels::host_threads::HostThreads;
use compiler::kernels::pool::Pool;
use pyo3::prelude::*;
use std::path::{Path, PathBuf};

/// Lets kernels run on the threads of the OpenMP runtime that was loaded from one of these folders;
/// false if there is none, and then kernels have threads of their own.
#[pyfunction]
pub fn share_threads(folders: Vec<PathBuf>) -> bool {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else {
        return false;
    };
    let files = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let mut runtimes = files.filter(|file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let is_runtime = ["libgomp", "libiomp", "libomp"]
            .iter()
            .any(|n| name.starts_with(n));
        is_runtime && folders.iter().any(|folder| file.starts_with(folder))
    });
    match runtimes.find_map(HostThreads::of_library) {
        Some(host) => {
            Pool::global().use_host_threads(host);
            true
        }
        None => false,
    }
}
