//! The cuBLASLt library: found, loaded, called.
//!
//! Owns its names and every use of the C interface, each behind a function that gives the library's own
//! words for a failure. Types and numbers are cudarc's bindings. Its loader is not used: it looks for
//! names only, so it does not find the library of PyTorch's wheels, and it panics without one. Never keeps a
//! stream, never waits.
#![allow(unsafe_code)]

use crate::CudaError;
use crate::interface::interface;
use crate::library::{Files, Names};
use cudarc::cublaslt::sys;
use libloading::os::unix::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::Arc;

static NAMES: Names = Names {
    name: "cuBLASLt",
    package: "nvidia-cublas",
    variable: "SHORTHAUL_CUBLASLT",
    stem: "libcublasLt.so",
    loader_names: &["libcublasLt.so.13", "libcublasLt.so.12"],
};

/// `cublasStatus_t`, of which newer libraries may know more values.
type Status = c_uint;
type Handle = sys::cublasLtHandle_t;
type Description = sys::cublasLtMatmulDesc_t;
type Layout = sys::cublasLtMatrixLayout_t;
type Preference = sys::cublasLtMatmulPreference_t;

// Declarations of cublasLt.h, unchanged since CUDA 11; attributes are numbers there too.
interface! {
    version = c"cublasLtGetVersion": fn() -> usize;
    status_name = c"cublasLtGetStatusName": fn(Status) -> *const c_char;
    status_text = c"cublasLtGetStatusString": fn(Status) -> *const c_char;
    create = c"cublasLtCreate": fn(*mut Handle) -> Status;
    describe = c"cublasLtMatmulDescCreate": fn(*mut Description, sys::cublasComputeType_t, sys::cudaDataType) -> Status;
    set = c"cublasLtMatmulDescSetAttribute": fn(Description, sys::cublasLtMatmulDescAttributes_t, *const c_void, usize) -> Status;
    forget = c"cublasLtMatmulDescDestroy": fn(Description) -> Status;
    layout = c"cublasLtMatrixLayoutCreate": fn(*mut Layout, sys::cudaDataType, u64, u64, i64) -> Status;
    set_layout = c"cublasLtMatrixLayoutSetAttribute": fn(Layout, sys::cublasLtMatrixLayoutAttribute_t, *const c_void, usize) -> Status;
    forget_layout = c"cublasLtMatrixLayoutDestroy": fn(Layout) -> Status;
    preference = c"cublasLtMatmulPreferenceCreate": fn(*mut Preference) -> Status;
    set_preference = c"cublasLtMatmulPreferenceSetAttribute": fn(Preference, sys::cublasLtMatmulPreferenceAttributes_t, *const c_void, usize) -> Status;
    forget_preference = c"cublasLtMatmulPreferenceDestroy": fn(Preference) -> Status;
    offers = c"cublasLtMatmulAlgoGetHeuristic": fn(Handle, Description, Layout, Layout, Layout, Layout, Preference, c_int, *mut Offer, *mut c_int) -> Status;
    multiply = c"cublasLtMatmul": fn(Handle, Description, *const c_void, *const c_void, Layout, *const c_void, Layout, *const c_void, *const c_void, Layout, *mut c_void, Layout, *const Algorithm, *mut c_void, usize, *mut c_void) -> Status;
}

/// The library's description of an algorithm, opaque.
pub(super) type Algorithm = sys::cublasLtMatmulAlgo_t;

/// `cublasLtMatmulHeuristicResult_t`, with the status as the number that it is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Offer {
    pub(super) algorithm: Algorithm,
    pub(super) workspace_bytes: usize,
    pub(super) status: Status,
    pub(super) waves: f32,
    pub(super) reserved: [c_int; 4],
}

const _: () = {
    assert!(size_of::<Offer>() == size_of::<sys::cublasLtMatmulHeuristicResult_t>());
    assert!(align_of::<Offer>() == align_of::<sys::cublasLtMatmulHeuristicResult_t>());
};

/// A loaded cuBLASLt; stays loaded.
pub struct CublasLt {
    interface: Interface,
    version: String,
    path: PathBuf,
    _library: Library,
}

static FILES: Files<CublasLt> = Files::new(&NAMES, CublasLt::new);

impl CublasLt {
    /// Loads cuBLASLt from the folder that `SHORTHAUL_CUBLASLT` names, else from the first of `folders`
    /// (such as the wheels' `nvidia/*/lib`) that has it, else by the system's loader.
    ///
    /// # Errors
    /// None is there, or one is and cannot be used; a folder named explicitly is never passed over.
    pub fn find(folders: &[PathBuf]) -> Result<Arc<CublasLt>, CudaError> {
        FILES.find(folders)
    }

    /// The error for a library that is in none of these folders, nor where the loader looks.
    pub(super) fn nowhere(folders: Vec<PathBuf>) -> CudaError {
        CudaError::NoLibrary {
            library: &NAMES,
            folders,
        }
    }

    fn new(library: Library, path: &Path) -> Result<CublasLt, libloading::Error> {
        let interface = Interface::new(&library)?;
        // SAFETY: takes nothing and gives a number.
        let version = unsafe { (interface.version)() };
        Ok(CublasLt {
            version: version_text(version),
            interface,
            path: path.to_path_buf(),
            _library: library,
        })
    }

    /// The version, such as `13.4.1`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The library's file, or the name that the loader found it by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), Complaint> {
        if status == 0 {
            return Ok(());
        }
        let text = |get: unsafe extern "C" fn(Status) -> *const c_char| {
            // SAFETY: the library gives a text of its own, or none for a number it does not know.
            let text = unsafe { get(status) };
            // SAFETY: it ends in zero and stays.
            (!text.is_null()).then(|| {
                unsafe { CStr::from_ptr(text) }
                    .to_string_lossy()
                    .into_owned()
            })
        };
        let name = text(self.interface.status_name).unwrap_or_else(|| format!("status {status}"));
        let problem = match text(self.interface.status_text) {
            Some(sentence) => format!("{name} ({sentence})"),
            None => name,
        };
        Err(Complaint { call, problem })
    }
}

/// A major version counts 10,000; the older ones, which counted it less, are left as numbers.
fn version_text(version: usize) -> String {
    match version >= 100_000 {
        true => format!(
            "{}.{}.{}",
            version / 10_000,
            version / 100 % 100,
            version % 100
        ),
        false => version.to_string(),
    }
}

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Complaint {
    pub(super) call: &'static str,
    /// Name and sentence of the library.
    pub(super) problem: String,
}

impl Complaint {
    /// The same, saying what the call was about.
    pub(super) fn about(self, what: &str) -> Complaint {
        Complaint {
            problem: format!("{what}: {}", self.problem),
            ..self
        }
    }
}

/// The library's state on a device, made with the device's context current; stays for good, since
/// nobody knows when its last product is done.
pub(super) struct Session {
    library: Arc<CublasLt>,
    handle: Handle,
}

// SAFETY: a handle may be used from any thread, by several at once.
unsafe impl Send for Session {}
// SAFETY: as above.
unsafe impl Sync for Session {}

impl Session {
    pub(super) fn open(library: &Arc<CublasLt>) -> Result<Session, Complaint> {
        let mut handle = null_mut();
        // SAFETY: the pointer leads to a handle; a context is current.
        let status = unsafe { (library.interface.create)(&mut handle) };
        library.check("cublasLtCreate", status)?;
        Ok(Session {
            library: Arc::clone(library),
            handle,
        })
    }

    /// The algorithms for a product in the library's order, at most `most`.
    pub(super) fn offers(
        &self,
        product: &Described,
        preferences: &Preferences,
        most: usize,
    ) -> Result<Vec<Offer>, Complaint> {
        let unknown = Offer {
            algorithm: Algorithm { data: [0; 8] },
            workspace_bytes: 0,
            status: 0,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut offers = vec![unknown; most];
        let mut found: c_int = 0;
        let [a, b, d] = &product.layouts;
        // SAFETY: all descriptions live, and there is room for as many results as asked for.
        let status = unsafe {
            (self.library.interface.offers)(
                self.handle,
                product.description.raw,
                a.raw,
                b.raw,
                d.raw,
                d.raw,
                preferences.raw,
                most as c_int,
                offers.as_mut_ptr(),
                &mut found,
            )
        };
        // Where there is none at all, some versions say so by their status.
        const NOT_SUPPORTED: Status = sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as Status;
        if status != NOT_SUPPORTED {
            self.library
                .check("cublasLtMatmulAlgoGetHeuristic", status)?;
        }
        offers.truncate(usize::try_from(found).unwrap_or(0));
        offers.retain(|offer| offer.status == 0);
        Ok(offers)
    }

    /// Enqueues a product.
    ///
    /// # Safety
    /// The addresses are good for what the product reads and writes, until it has run; the workspace has
    /// as many bytes as stated; the stream belongs to the current context.
    pub(super) unsafe fn multiply(
        &self,
        product: &Described,
        algorithm: &Algorithm,
        at: &Addresses,
        stream: u64,
    ) -> Result<(), Complaint> {
        let [a, b, d] = &product.layouts;
        let pointer = |address: u64| address as usize as *mut c_void;
        // Read by the library before it returns, in the type of the sums.
        let (single, double) = ([1.0_f32, 0.0], [1.0_f64, 0.0]);
        let (alpha, beta): (*const c_void, *const c_void) = match product.is_double {
            true => ((&raw const double[0]).cast(), (&raw const double[1]).cast()),
            false => ((&raw const single[0]).cast(), (&raw const single[1]).cast()),
        };
        // SAFETY: the caller's promise; descriptions live. C is not read, since beta is 0.
        let status = unsafe {
            (self.library.interface.multiply)(
                self.handle,
                product.description.raw,
                alpha,
                pointer(at.a),
                a.raw,
                pointer(at.b),
                b.raw,
                beta,
                pointer(at.d),
                d.raw,
                pointer(at.d),
                d.raw,
                algorithm,
                pointer(at.workspace),
                at.workspace_bytes,
                pointer(stream),
            )
        };
        self.library.check("cublasLtMatmul", status)
    }
}

/// Where a product's matrices and workspace lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addresses {
    pub(super) a: u64,
    pub(super) b: u64,
    pub(super) d: u64,
    pub(super) workspace: u64,
    pub(super) workspace_bytes: usize,
}

/// A product as the library knows it.
pub(super) struct Described {
    pub(super) description: Object<Description>,
    pub(super) layouts: [Object<Layout>; 3],
    /// Whether sums are f64.
    pub(super) is_double: bool,
}

/// What an algorithm may ask for.
pub(super) type Preferences = Object<Preference>;

/// Something that the library made for us and takes back.
pub(super) struct Object<T: Copy> {
    raw: T,
    forget: unsafe extern "C" fn(T) -> Status,
    library: Arc<CublasLt>,
}

// SAFETY: descriptions are plain memory; whoever changes one has it alone.
unsafe impl<T: Copy> Send for Object<T> {}
// SAFETY: as above.
unsafe impl<T: Copy> Sync for Object<T> {}

impl<T: Copy> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: made by the library, and forgotten once. A product that was enqueued needs it no more.
        unsafe { (self.forget)(self.raw) };
    }
}

/// A value's bytes, as attributes are set.
fn bytes<V>(value: &V) -> (*const c_void, usize) {
    (std::ptr::from_ref(value).cast(), size_of::<V>())
}

impl Object<Description> {
    pub(super) fn of_description(
        library: &Arc<CublasLt>,
        compute: sys::cublasComputeType_t,
        scale: sys::cudaDataType,
    ) -> Result<Self, Complaint> {
        let mut raw = null_mut();
        // SAFETY: the pointer leads to a description, here and below.
        let status = unsafe { (library.interface.describe)(&mut raw, compute, scale) };
        library.check("cublasLtMatmulDescCreate", status)?;
        Ok(Object {
            raw,
            forget: library.interface.forget,
            library: Arc::clone(library),
        })
    }

    /// Sets an attribute, whose type is the header's.
    pub(super) fn set<V>(
        &mut self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &V,
    ) -> Result<(), Complaint> {
        let (at, size) = bytes(value);
        // SAFETY: the description lives and the value is read before the call returns, here and below.
        let status = unsafe { (self.library.interface.set)(self.raw, attribute, at, size) };
        self.library.check("cublasLtMatmulDescSetAttribute", status)
    }
}

impl Object<Layout> {
    pub(super) fn of_layout(
        library: &Arc<CublasLt>,
        dtype: sys::cudaDataType,
        [rows, columns]: [u64; 2],
        ld: i64,
    ) -> Result<Self, Complaint> {
        let mut raw = null_mut();
        // SAFETY: as above.
        let status = unsafe { (library.interface.layout)(&mut raw, dtype, rows, columns, ld) };
        library.check("cublasLtMatrixLayoutCreate", status)?;
        Ok(Object {
            raw,
            forget: library.interface.forget_layout,
            library: Arc::clone(library),
        })
    }

    pub(super) fn set<V>(
        &mut self,
        attribute: sys::cublasLtMatrixLayoutAttribute_t,
        value: &V,
    ) -> Result<(), Complaint> {
        let (at, size) = bytes(value);
        // SAFETY: as above.
        let status = unsafe { (self.library.interface.set_layout)(self.raw, attribute, at, size) };
        self.library
            .check("cublasLtMatrixLayoutSetAttribute", status)
    }
}

impl Object<Preference> {
    pub(super) fn of_preference(library: &Arc<CublasLt>) -> Result<Self, Complaint> {
        let mut raw = null_mut();
        // SAFETY: as above.
        let status = unsafe { (library.interface.preference)(&mut raw) };
        library.check("cublasLtMatmulPreferenceCreate", status)?;
        Ok(Object {
            raw,
            forget: library.interface.forget_preference,
            library: Arc::clone(library),
        })
    }

    pub(super) fn set<V>(
        &mut self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &V,
    ) -> Result<(), Complaint> {
        let (at, size) = bytes(value);
        let set = self.library.interface.set_preference;
        // SAFETY: as above.
        let status = unsafe { set(self.raw, attribute, at, size) };
        self.library
            .check("cublasLtMatmulPreferenceSetAttribute", status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(version_text(130_401), "13.4.1");
        assert_eq!(version_text(120_803), "12.8.3");
        assert_eq!(version_text(11_803), "11803");
    }
}
