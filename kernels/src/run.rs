//! Loaded modules and the programs that call them.
//!
//! Owns dynamic loading, the kernel calling convention
//! (`void NAME(void *const *buf, void *scratch, long tid, long nt)`) and, in
//! [`Program`], the order in which kernels run. Never allocates a container's
//! memory: the caller brings arena, saved and external buffers.
#![allow(unsafe_code)]

use std::ffi::{c_long, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// A compiled kernel: every thread of a launch calls it once with its own `tid`
/// in `0..nt` and its own scratch block.
pub type KernelFn = unsafe extern "C" fn(
    buffers: *const *mut c_void,
    scratch: *mut c_void,
    tid: c_long,
    n_threads: c_long,
);

/// Why a compiled module cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The system's loader refused the file.
    #[error(
        "the compiled module {} cannot be loaded: {source}; if its folder forbids execution, \
         set SHORTHAUL_CACHE_DIR to another folder",
        path.display()
    )]
    Refused {
        /// The shared library.
        path: PathBuf,
        /// The loader's message.
        source: libloading::Error,
    },
    /// A kernel is not defined by the module.
    #[error("the compiled module {} does not define '{symbol}'", path.display())]
    MissingSymbol {
        /// The shared library.
        path: PathBuf,
        /// The kernel.
        symbol: String,
    },
}

/// A loaded shared library of kernels.
pub struct Module {
    library: Library,
    path: PathBuf,
}

impl Module {
    /// Loads a library that this room compiled.
    pub(crate) fn load(path: &Path) -> Result<Module, LoadError> {
        // SAFETY: the file is the output of our own compiler run, verified by its
        // checksum; it has no constructors, so loading runs no foreign code.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        match library {
            Ok(library) => Ok(Module {
                library,
                path: path.to_path_buf(),
            }),
            Err(source) => Err(LoadError::Refused {
                path: path.to_path_buf(),
                source,
            }),
        }
    }

    /// The kernel named `symbol`, which keeps this module loaded.
    pub fn function(self: &Arc<Self>, symbol: &str) -> Result<Function, LoadError> {
        // SAFETY: every symbol emitted for a module has the kernel signature.
        let found = unsafe { self.library.get::<KernelFn>(symbol) };
        match found {
            Ok(entry) => Ok(Function {
                entry: *entry,
                module: Arc::clone(self),
            }),
            Err(_) => Err(LoadError::MissingSymbol {
                path: self.path.clone(),
                symbol: symbol.to_string(),
            }),
        }
    }

    /// The shared library's file; another process may have trimmed it since.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").field("path", &self.path).finish()
    }
}

/// A kernel of a loaded module.
#[derive(Debug, Clone)]
pub struct Function {
    entry: KernelFn,
    /// Held so that the code stays mapped.
    module: Arc<Module>,
}

impl Function {
    /// Calls the kernel on this thread.
    ///
    /// # Safety
    /// `buffers` points to the pointers the kernel was emitted for, each to memory
    /// of the size it was emitted for, valid for the kernel's reads and writes and
    /// not touched by others meanwhile, except by the same launch under another
    /// `tid`; `scratch` is a block of the size the kernel asks for, aligned to 64
    /// bytes, used by no other thread; `0 <= tid < n_threads`.
    pub unsafe fn call(
        &self,
        buffers: *const *mut c_void,
        scratch: *mut c_void,
        tid: usize,
        n_threads: usize,
    ) {
        // SAFETY: the caller's promise is the kernel's contract.
        unsafe { (self.entry)(buffers, scratch, tid as c_long, n_threads as c_long) }
    }

    /// The module that defines it.
    pub fn module(&self) -> &Arc<Module> {
        &self.module
    }
}
