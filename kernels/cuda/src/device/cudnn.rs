//! The cuDNN library: found, loaded, called.
//!
//! Owns its names and every use of the C interface, each behind a function that gives the library's own
//! words for a failure. Of cuDNN's two interfaces this is the graph one (`cudnnBackend…`): the older calls
//! are deprecated since version 9, know no ranking of algorithms for a given workspace, and fuse no bias
//! into a bf16 convolution. Numbers are cudarc's bindings; its loader is not used, as for cuBLASLt. Never
//! keeps a stream, never waits.
#![allow(unsafe_code)]

use super::cublaslt::Complaint;
use super::plans::Rankings;
use crate::CudaError;
use crate::interface::interface;
use crate::library::{Files, Names};
use cudarc::cudnn::sys;
use libloading::os::unix::Library;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

static NAMES: Names = Names {
    name: "cuDNN",
    package: "nvidia-cudnn-cu13",
    variable: "SHORTHAUL_CUDNN",
    stem: "libcudnn.so",
    loader_names: &["libcudnn.so.9"],
};

/// `cudnnStatus_t`, of which newer libraries may know more values.
type Status = c_uint;
type Handle = *mut c_void;
type Raw = *mut c_void;

pub(super) use sys::cudnnBackendAttributeName_t as Attribute;
pub(super) use sys::cudnnBackendDescriptorType_t as Kind;

// Declarations of cudnn_graph.h, unchanged in version 9; descriptors, attributes and types are numbers there too.
interface! {
    version = c"cudnnGetVersion": fn() -> usize;
    status_text = c"cudnnGetErrorString": fn(Status) -> *const c_char;
    last_error = c"cudnnGetLastErrorString": fn(*mut c_char, usize) -> ();
    create = c"cudnnCreate": fn(*mut Handle) -> Status;
    set_stream = c"cudnnSetStream": fn(Handle, *mut c_void) -> Status;
    describe = c"cudnnBackendCreateDescriptor": fn(c_uint, *mut Raw) -> Status;
    forget = c"cudnnBackendDestroyDescriptor": fn(Raw) -> Status;
    finalize = c"cudnnBackendFinalize": fn(Raw) -> Status;
    set = c"cudnnBackendSetAttribute": fn(Raw, c_uint, c_uint, i64, *const c_void) -> Status;
    get = c"cudnnBackendGetAttribute": fn(Raw, c_uint, c_uint, i64, *mut i64, *mut c_void) -> Status;
    execute = c"cudnnBackendExecute": fn(Handle, Raw, Raw) -> Status;
}

/// A loaded cuDNN; stays loaded.
pub struct Cudnn {
    interface: Interface,
    version: String,
    path: PathBuf,
    _library: Library,
}

static FILES: Files<Cudnn> = Files::new(&NAMES, Cudnn::new);

impl Cudnn {
    /// Loads cuDNN from the folder that `SHORTHAUL_CUDNN` names, else from the first of `folders` (such as
    /// the wheels' `nvidia/*/lib`) that has it, else by the system's loader.
    ///
    /// # Errors
    /// None is there, or one is and cannot be used; a folder named explicitly is never passed over.
    pub fn find(folders: &[PathBuf]) -> Result<Arc<Cudnn>, CudaError> {
        FILES.find(folders)
    }

    /// The error for a library that is in none of these folders, nor where the loader looks.
    pub(super) fn nowhere(folders: Vec<PathBuf>) -> CudaError {
        CudaError::NoLibrary {
            library: &NAMES,
            folders,
        }
    }

    fn new(library: Library, path: &Path) -> Result<Cudnn, libloading::Error> {
        let interface = Interface::new(&library)?;
        // SAFETY: takes nothing and gives a number.
        let version = unsafe { (interface.version)() };
        Ok(Cudnn {
            version: version_text(version),
            interface,
            path: path.to_path_buf(),
            _library: library,
        })
    }

    /// The version, such as `9.26.0`.
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
        // SAFETY: the library gives a text of its own, also for a number it does not know.
        let name = unsafe { (self.interface.status_text)(status) };
        // SAFETY: it ends in zero and stays.
        let name = match name.is_null() {
            true => format!("status {status}"),
            false => unsafe { CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned(),
        };
        let mut sentence = [0 as c_char; 512];
        // SAFETY: the library writes at most as many bytes, the last being zero.
        let sentence = unsafe {
            (self.interface.last_error)(sentence.as_mut_ptr(), sentence.len());
            sentence[sentence.len() - 1] = 0;
            CStr::from_ptr(sentence.as_ptr())
        };
        let sentence = sentence.to_string_lossy();
        let problem = match sentence.trim() {
            "" => name,
            sentence => format!("{name} ({sentence})"),
        };
        Err(Complaint { call, problem })
    }
}

fn version_text(version: usize) -> String {
    format!(
        "{}.{}.{}",
        version / 10_000,
        version / 100 % 100,
        version % 100
    )
}

/// The library's state on a device, made with the device's context current; stays for good.
pub(super) struct Session {
    pub(super) library: Arc<Cudnn>,
    state: Mutex<State>,
}

/// What one thread has at a time: the library allows only one thread to use a handle, and heuristics and the
/// finalization of graphs and plans use it, too.
pub(super) struct State {
    library: Arc<Cudnn>,
    handle: OfLibrary,
    /// What was found out about the plans of convolutions.
    pub(super) rankings: Rankings,
}

/// A pointer that the library gave.
#[derive(Clone, Copy)]
struct OfLibrary(Handle);

// SAFETY: a handle may be used from any thread, by one at a time, which the session's lock sees to.
unsafe impl Send for OfLibrary {}

impl Session {
    pub(super) fn open(library: &Arc<Cudnn>) -> Result<Session, Complaint> {
        let mut handle = null_mut();
        // SAFETY: the pointer leads to a handle; a context is current.
        let status = unsafe { (library.interface.create)(&mut handle) };
        library.check("cudnnCreate", status)?;
        Ok(Session {
            library: Arc::clone(library),
            state: Mutex::new(State {
                library: Arc::clone(library),
                handle: OfLibrary(handle),
                rankings: Rankings::default(),
            }),
        })
    }

    /// Waits until no other thread has the state.
    pub(super) fn turn(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Gives a descriptor the handle; it is used in this turn only.
    pub(super) fn set_handle(
        &self,
        descriptor: &mut Descriptor,
        attribute: Attribute,
    ) -> Result<(), Complaint> {
        let of_type = sys::cudnnBackendAttributeType_t::CUDNN_TYPE_HANDLE as c_uint;
        descriptor.set_raw(attribute, of_type, &[self.handle.0])
    }

    /// Enqueues a plan on what `pack` names.
    ///
    /// # Safety
    /// The addresses in the pack are good for what the plan reads and writes, until it has run, and the
    /// workspace is as large as the plan wants it; the stream belongs to the current context.
    pub(super) unsafe fn execute(
        &self,
        plan: &Descriptor,
        pack: &Descriptor,
        stream: u64,
    ) -> Result<(), Complaint> {
        let (interface, handle) = (&self.library.interface, self.handle.0);
        // SAFETY: the handle lives, and the stream is the caller's promise.
        let status = unsafe { (interface.set_stream)(handle, stream as usize as *mut c_void) };
        self.library.check("cudnnSetStream", status)?;
        // SAFETY: the caller's promise; all three live.
        let status = unsafe { (interface.execute)(handle, plan.raw, pack.raw) };
        self.library.check("cudnnBackendExecute", status)
    }
}

/// Something that the library made for us and takes back.
pub(super) struct Descriptor {
    raw: Raw,
    kind: Kind,
    library: Arc<Cudnn>,
}

// SAFETY: descriptors are plain memory; whoever changes one has it alone.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by the library, and forgotten once. What was enqueued needs it no more.
        unsafe { (self.library.interface.forget)(self.raw) };
    }
}

/// A value that attributes take, with the library's number of its type.
pub(super) trait Value: Copy + Default {
    /// `CUDNN_TYPE_…`.
    const TYPE: sys::cudnnBackendAttributeType_t;
}

macro_rules! values {
    ($($name:ident($of:ty) = $number:ident;)*) => {
        $(
            /// Such a value in memory.
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
            #[repr(transparent)]
            pub(super) struct $name(pub(super) $of);
            impl Value for $name {
                const TYPE: sys::cudnnBackendAttributeType_t =
                    sys::cudnnBackendAttributeType_t::$number;
            }
        )*
    };
}

values! {
    Int(i64) = CUDNN_TYPE_INT64;
    Flag(bool) = CUDNN_TYPE_BOOLEAN;
    DataType(u32) = CUDNN_TYPE_DATA_TYPE;
    ConvolutionMode(u32) = CUDNN_TYPE_CONVOLUTION_MODE;
    PointwiseMode(u32) = CUDNN_TYPE_POINTWISE_MODE;
    NanPropagation(u32) = CUDNN_TYPE_NAN_PROPOGATION;
    HeuristicMode(u32) = CUDNN_TYPE_HEUR_MODE;
    NumericalNote(u32) = CUDNN_TYPE_NUMERICAL_NOTE;
    Address(u64) = CUDNN_TYPE_VOID_PTR;
}

/// A character of text, such as the library's questions about a device that is not there.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Character(pub(super) u8);

#[cfg(test)]
impl Value for Character {
    const TYPE: sys::cudnnBackendAttributeType_t =
        sys::cudnnBackendAttributeType_t::CUDNN_TYPE_CHAR;
}

impl Value for f32 {
    const TYPE: sys::cudnnBackendAttributeType_t =
        sys::cudnnBackendAttributeType_t::CUDNN_TYPE_FLOAT;
}

/// The number of descriptors as attributes.
const DESCRIPTOR: c_uint =
    sys::cudnnBackendAttributeType_t::CUDNN_TYPE_BACKEND_DESCRIPTOR as c_uint;

impl Descriptor {
    pub(super) fn new(library: &Arc<Cudnn>, kind: Kind) -> Result<Descriptor, Complaint> {
        let mut raw = null_mut();
        // SAFETY: the pointer leads to a descriptor.
        let status = unsafe { (library.interface.describe)(kind as c_uint, &mut raw) };
        library.check("cudnnBackendCreateDescriptor", status)?;
        Ok(Descriptor {
            raw,
            kind,
            library: Arc::clone(library),
        })
    }

    fn set_raw<T>(
        &mut self,
        attribute: Attribute,
        of_type: c_uint,
        values: &[T],
    ) -> Result<(), Complaint> {
        let (n, at) = (values.len() as i64, values.as_ptr().cast());
        let set = self.library.interface.set;
        // SAFETY: the descriptor lives; the values are of the stated type, as many, and read before the
        // call returns.
        let status = unsafe { set(self.raw, attribute as c_uint, of_type, n, at) };
        let failed = self.library.check("cudnnBackendSetAttribute", status);
        failed.map_err(|complaint| complaint.about(&format!("{attribute:?}")))
    }

    /// Sets an attribute, whose type and count are the header's.
    pub(super) fn set<V: Value>(
        &mut self,
        attribute: Attribute,
        values: &[V],
    ) -> Result<(), Complaint> {
        self.set_raw(attribute, V::TYPE as c_uint, values)
    }

    /// Sets an attribute to finalized descriptors.
    pub(super) fn set_descriptors(
        &mut self,
        attribute: Attribute,
        values: &[&Descriptor],
    ) -> Result<(), Complaint> {
        let values: Vec<Raw> = values.iter().map(|d| d.raw).collect();
        self.set_raw(attribute, DESCRIPTOR, &values)
    }

    /// The descriptor with its attributes checked by the library; after that it does not change.
    pub(super) fn finalized(self) -> Result<Descriptor, Complaint> {
        // SAFETY: the descriptor lives.
        let status = unsafe { (self.library.interface.finalize)(self.raw) };
        let failed = self.library.check("cudnnBackendFinalize", status);
        failed.map_err(|complaint| complaint.about(&format!("{:?}", self.kind)))?;
        Ok(self)
    }

    /// An attribute's values, at most `most`.
    pub(super) fn get<V: Value>(
        &self,
        attribute: Attribute,
        most: usize,
    ) -> Result<Vec<V>, Complaint> {
        let mut values = vec![V::default(); most];
        let at = values.as_mut_ptr().cast();
        let n = self.get_raw(attribute, V::TYPE as c_uint, most, at)?;
        values.truncate(n);
        Ok(values)
    }

    /// How many descriptors an attribute has.
    pub(super) fn count(&self, attribute: Attribute) -> Result<usize, Complaint> {
        self.get_raw(attribute, DESCRIPTOR, 0, null_mut())
    }

    /// An attribute's first `most` descriptors, of a kind.
    pub(super) fn descriptors(
        &self,
        attribute: Attribute,
        kind: Kind,
        most: usize,
    ) -> Result<Vec<Descriptor>, Complaint> {
        // The library fills descriptors of ours.
        let made = (0..most).map(|_| Descriptor::new(&self.library, kind));
        let mut made: Vec<Descriptor> = made.collect::<Result<_, _>>()?;
        let mut raw: Vec<Raw> = made.iter().map(|d| d.raw).collect();
        let n = self.get_raw(attribute, DESCRIPTOR, most, raw.as_mut_ptr().cast())?;
        made.truncate(n);
        Ok(made)
    }

    /// How many values were written, or are there if none is wanted.
    fn get_raw(
        &self,
        attribute: Attribute,
        of_type: c_uint,
        most: usize,
        at: *mut c_void,
    ) -> Result<usize, Complaint> {
        let mut n: i64 = 0;
        let get = self.library.interface.get;
        // SAFETY: the descriptor lives, and there is room for as many values of the stated type.
        let status = unsafe {
            get(
                self.raw,
                attribute as c_uint,
                of_type,
                most as i64,
                &mut n,
                at,
            )
        };
        let failed = self.library.check("cudnnBackendGetAttribute", status);
        failed.map_err(|complaint| complaint.about(&format!("{attribute:?}")))?;
        let n = usize::try_from(n).unwrap_or(0);
        Ok(if at.is_null() { n } else { n.min(most) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(version_text(92_600), "9.26.0");
        assert_eq!(version_text(91_002), "9.10.2");
    }
}
