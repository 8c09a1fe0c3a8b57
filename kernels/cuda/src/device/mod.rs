//! CUDA devices through NVIDIA's driver.
//!
//! Owns which devices there are, their primary contexts (the ones that PyTorch works in), and what is
//! known of each. The driver is loaded at run time; without one every call gives an error that says so.
//! Never allocates a model's memory: that is the caller's.

mod convolutions;
mod cublaslt;
mod cudnn;
mod driver;
mod module;
mod plans;
mod products;

use super::vendor::Operation;
use super::{Arch, CudaError};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use cublaslt::CublasLt;
pub use cudnn::Cudnn;
pub use module::CudaModule;

/// One device, with its primary context held for the rest of the process.
pub struct Device {
    info: DeviceInfo,
    arch: Arch,
    context: driver::Context,
    /// What waits to be given back to the driver.
    dropped: Mutex<module::Dropped>,
    /// A session for each cuBLASLt that was asked for, by its file.
    sessions: Mutex<BTreeMap<PathBuf, Arc<cublaslt::Session>>>,
    /// A session for each cuDNN, by its file.
    dnn_sessions: Mutex<BTreeMap<PathBuf, Arc<cudnn::Session>>>,
}

/// The libraries that may compute products and convolutions.
pub struct Libraries {
    blas: Option<Arc<CublasLt>>,
    dnn: Option<Arc<Cudnn>>,
    folders: Vec<PathBuf>,
}

impl Libraries {
    /// Looks for both, as [`CublasLt::find`] and [`Cudnn::find`] do. It is no error if one is nowhere: the first
    /// product or convolution that needs it gives that error.
    ///
    /// # Errors
    /// One is there and cannot be used, or not in the folder that its variable names.
    pub fn find(folders: &[PathBuf]) -> Result<Libraries, CudaError> {
        let blas = unless_nowhere(CublasLt::find(folders))?;
        let dnn = unless_nowhere(Cudnn::find(folders))?;
        Ok(Libraries::new(blas, dnn, folders))
    }

    /// The libraries that exist; `folders` were searched for the others.
    pub fn new(
        blas: Option<Arc<CublasLt>>,
        dnn: Option<Arc<Cudnn>>,
        folders: &[PathBuf],
    ) -> Libraries {
        let folders = folders.to_vec();
        Libraries { blas, dnn, folders }
    }

    /// The version of cuBLASLt, if there is one.
    pub fn cublaslt_version(&self) -> Option<&str> {
        self.blas.as_ref().map(|blas| blas.version())
    }

    /// The version of cuDNN, if there is one.
    pub fn cudnn_version(&self) -> Option<&str> {
        self.dnn.as_ref().map(|dnn| dnn.version())
    }

    /// cuBLASLt, for what needs it.
    fn blas(&self) -> Result<&Arc<CublasLt>, CudaError> {
        let folders = || self.folders.clone();
        self.blas
            .as_ref()
            .ok_or_else(|| CublasLt::nowhere(folders()))
    }

    /// cuDNN, for what needs it.
    fn dnn(&self) -> Result<&Arc<Cudnn>, CudaError> {
        let folders = || self.folders.clone();
        self.dnn.as_ref().ok_or_else(|| Cudnn::nowhere(folders()))
    }
}

fn unless_nowhere<L>(found: Result<L, CudaError>) -> Result<Option<L>, CudaError> {
    match found {
        Ok(library) => Ok(Some(library)),
        Err(CudaError::NoLibrary { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What the driver says of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The device's number among the visible ones.
    pub ordinal: usize,
    /// The name, such as `NVIDIA H200`.
    pub name: String,
    /// Compute capability: before and after the dot.
    pub capability: (i32, i32),
    /// Bytes of its memory.
    pub memory_bytes: usize,
    /// Streaming multiprocessors.
    pub multiprocessors: i32,
    /// Bytes of shared memory that a block can have.
    pub shared_bytes: i32,
    /// Bytes of the second-level cache.
    pub l2_bytes: i32,
}

/// The devices opened so far.
static OPEN: Mutex<BTreeMap<usize, Arc<Device>>> = Mutex::new(BTreeMap::new());

impl Device {
    /// The device of that number; opened once in a process.
    ///
    /// # Errors
    /// No driver, no such device, an architecture that there is no code for.
    pub fn open(ordinal: usize) -> Result<Arc<Device>, CudaError> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.get(&ordinal) {
            return Ok(Arc::clone(device));
        }
        let info = describe(ordinal)?;
        let arch = arch_for(info.capability).ok_or_else(|| CudaError::UnsupportedArch {
            ordinal,
            name: info.name.clone(),
            major: info.capability.0,
            minor: info.capability.1,
        })?;
        let context = driver::Context::primary(ordinal)?;
        let device = Arc::new(Device {
            info,
            arch,
            context,
            dropped: Mutex::default(),
            sessions: Mutex::default(),
            dnn_sessions: Mutex::default(),
        });
        open.insert(ordinal, Arc::clone(&device));
        Ok(device)
    }

    /// What the driver says of it.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The library's state on this device, made once; the context is current.
    fn session(
        &self,
        library: &Arc<CublasLt>,
    ) -> Result<Arc<cublaslt::Session>, cublaslt::Complaint> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(session) = sessions.get(library.path()) {
            return Ok(Arc::clone(session));
        }
        let session = Arc::new(cublaslt::Session::open(library)?);
        sessions.insert(library.path().to_path_buf(), Arc::clone(&session));
        Ok(session)
    }

    /// The same of cuDNN.
    fn dnn_session(
        &self,
        library: &Arc<Cudnn>,
    ) -> Result<Arc<cudnn::Session>, cublaslt::Complaint> {
        let sessions = self.dnn_sessions.lock();
        let mut sessions = sessions.unwrap_or_else(PoisonError::into_inner);
        if let Some(session) = sessions.get(library.path()) {
            return Ok(Arc::clone(session));
        }
        let session = Arc::new(cudnn::Session::open(library)?);
        sessions.insert(library.path().to_path_buf(), Arc::clone(&session));
        Ok(session)
    }

    /// How many algorithms a library offers for an operation in a workspace of that size, at most
    /// `most`.
    ///
    /// # Errors
    /// The library refuses it, or is not there.
    pub fn offers(
        &self,
        libraries: &Libraries,
        operation: &Operation,
        workspace_bytes: usize,
        most: usize,
    ) -> Result<usize, CudaError> {
        let ask = || products::n_offers(self, libraries, operation, workspace_bytes, most);
        self.context.within(ask)?
    }

    fn dropped(&self) -> MutexGuard<'_, module::Dropped> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What its kernels are compiled for.
    pub fn arch(&self) -> Arch {
        self.arch
    }
}

/// How many devices are visible, at least 1.
///
/// # Errors
/// No driver, or no device.
pub fn count() -> Result<usize, CudaError> {
    driver::count()
}

/// What the driver says of a device; makes no context.
///
/// # Errors
/// No driver, or no such device.
pub fn describe(ordinal: usize) -> Result<DeviceInfo, CudaError> {
    let count = driver::count()?;
    if ordinal >= count {
        return Err(CudaError::NoSuchDevice { ordinal, count });
    }
    driver::describe(ordinal)
}

/// The driver's version, such as `13.0`.
///
/// # Errors
/// No driver.
pub fn driver_version() -> Result<String, CudaError> {
    driver::version()
}

/// The newest architecture whose code a device runs: code of 8.0 runs on all of 8.x, code of 9.0a on
/// 9.0 alone.
pub fn arch_for(capability: (i32, i32)) -> Option<Arch> {
    match capability {
        (8, minor) if minor >= 9 => Some(Arch::Sm89),
        (8, _) => Some(Arch::Sm80),
        (9, 0) => Some(Arch::Sm90a),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_run_the_newest_code_that_they_can() {
        assert_eq!(arch_for((8, 0)), Some(Arch::Sm80));
        assert_eq!(arch_for((8, 6)), Some(Arch::Sm80));
        assert_eq!(arch_for((8, 9)), Some(Arch::Sm89));
        assert_eq!(arch_for((9, 0)), Some(Arch::Sm90a));
        for unknown in [(7, 5), (9, 1), (10, 0), (12, 0)] {
            assert_eq!(arch_for(unknown), None);
        }
    }
}
