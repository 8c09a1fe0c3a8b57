//! Where a shared library of NVIDIA's is looked for.
//!
//! Owns the order: the folders of a variable, which are then the only ones; the caller's, such as the
//! wheels' `nvidia/*/lib`; the system's loader. Never loads.

use crate::cuda::CudaError;
use crate::cuda::nvrtc::newest;
use std::env;
use std::path::{Path, PathBuf};

/// A library's names.
pub(super) struct Search {
    /// Of the environment, with folders.
    pub(super) variable: &'static str,
    /// Of the file, without its version.
    pub(super) stem: &'static str,
    /// For the system's loader, in this order.
    pub(super) loader_names: &'static [&'static str],
}

impl Search {
    /// What `load` makes of the library's file, or of the first name by which the loader finds it; `none`
    /// is told of the folders.
    ///
    /// # Errors
    /// None is there, or one is and cannot be used; a folder named explicitly is never passed over.
    pub(super) fn find<L>(
        &self,
        folders: &[PathBuf],
        load: impl Fn(&Path) -> Result<L, CudaError>,
        none: impl Fn(Vec<PathBuf>) -> CudaError,
    ) -> Result<L, CudaError> {
        let explicit = env::var_os(self.variable).filter(|value| !value.is_empty());
        let explicit: Option<Vec<PathBuf>> = explicit.map(|list| env::split_paths(&list).collect());
        let searched = explicit.as_deref().unwrap_or(folders);
        let file = |folder: &PathBuf| newest(folder, self.stem);
        if let Some(path) = searched.iter().find_map(file) {
            return load(&path);
        }
        let loaded = match explicit {
            Some(_) => None,
            None => (self.loader_names.iter()).find_map(|name| load(Path::new(name)).ok()),
        };
        loaded.ok_or_else(|| none(searched.to_vec()))
    }
}
