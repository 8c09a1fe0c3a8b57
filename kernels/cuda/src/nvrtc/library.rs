//! The NVRTC library: found, loaded, called.
//!
//! Owns its names and the C interface; the search is every library's.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::NvrtcError;
use crate::Arch;
use crate::interface::interface;
use crate::library::{Missing, Names, newest, open};
use kernels::cache::Key;

const NAMES: Names = Names {
    name: "NVRTC",
    package: "nvidia-cuda-nvrtc",
    variable: "SHORTHAUL_NVRTC",
    stem: "libnvrtc.so",
    loader_names: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
};
const BUILTINS: &str = "libnvrtc-builtins.so";

type Program = *mut c_void;
type Status = c_int;

// Unchanged in nvrtc.h since CUDA 11.
interface! {
    version = c"nvrtcVersion": fn(*mut c_int, *mut c_int) -> Status;
    n_archs = c"nvrtcGetNumSupportedArchs": fn(*mut c_int) -> Status;
    archs = c"nvrtcGetSupportedArchs": fn(*mut c_int) -> Status;
    create = c"nvrtcCreateProgram": fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> Status;
    destroy = c"nvrtcDestroyProgram": fn(*mut Program) -> Status;
    compile = c"nvrtcCompileProgram": fn(Program, c_int, *const *const c_char) -> Status;
    log_bytes = c"nvrtcGetProgramLogSize": fn(Program, *mut usize) -> Status;
    log = c"nvrtcGetProgramLog": fn(Program, *mut c_char) -> Status;
    cubin_bytes = c"nvrtcGetCUBINSize": fn(Program, *mut usize) -> Status;
    cubin = c"nvrtcGetCUBIN": fn(Program, *mut c_char) -> Status;
    message = c"nvrtcGetErrorString": fn(Status) -> *const c_char;
}

/// A loaded NVRTC.
pub struct Nvrtc {
    interface: Interface,
    version: String,
    identity: String,
    archs: Vec<i32>,
    path: PathBuf,
    _library: Library,
    /// The functions built into the language; NVRTC looks for them by name when it compiles.
    _builtins: Option<Library>,
}

impl Nvrtc {
    /// Loads NVRTC from the folder that `SHORTHAUL_NVRTC` names, else from the first of `folders`
    /// (such as the wheels' `nvidia/*/lib`) that has it, else by the system's loader.
    ///
    /// # Errors
    /// None is there, or one is and cannot be used; a folder named explicitly is never passed over.
    pub fn find(folders: &[PathBuf]) -> Result<Nvrtc, NvrtcError> {
        Ok(NAMES.find(folders, Nvrtc::load)?)
    }

    fn load(path: &Path) -> Result<Nvrtc, Missing> {
        let library = open(path)?;
        let refused = |problem: libloading::Error| Missing::refused(path, &problem);
        let interface = Interface::new(&library).map_err(refused)?;
        let (version, archs) = interface.known().map_err(|error| Missing::Unusable {
            path: path.to_path_buf(),
            problem: error.to_string(),
        })?;
        // Its file of built-in functions, which it opens by name at the first compilation.
        let stem = format!("{BUILTINS}.{version}");
        let builtins = path.parent().and_then(|folder| newest(folder, &stem));
        // SAFETY: as above.
        let builtins =
            builtins.map(|path| unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) });
        let file = loaded_file(&interface).unwrap_or_else(|| path.to_path_buf());
        Ok(Nvrtc {
            interface,
            identity: format!("{version} {}", content(&file).unwrap_or_default()),
            version,
            archs,
            path: file,
            _library: library,
            _builtins: builtins.transpose().map_err(refused)?,
        })
    }

    /// The version, such as `13.2`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Tells apart all that compile differently: the version, and what its file holds (builds of one
    /// version differ).
    pub(super) fn identity(&self) -> &str {
        &self.identity
    }

    /// The library's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The cubin and the messages. `names` stands in errors.
    pub(super) fn compile(
        &self,
        source: &str,
        arch: Arch,
        options: &[&str],
        names: &str,
    ) -> Result<(Vec<u8>, String), NvrtcError> {
        let number: String = arch.name().chars().filter(char::is_ascii_digit).collect();
        if !self.archs.iter().any(|known| known.to_string() == number) {
            let known: Vec<String> = self.archs.iter().map(i32::to_string).collect();
            return Err(NvrtcError::Unsupported {
                arch,
                version: self.version.clone(),
                known: known.join(", sm_"),
            });
        }
        let text = |text: &str| {
            CString::new(text).map_err(|_| NvrtcError::Call {
                call: "nvrtcCreateProgram",
                problem: format!("the text of {names} holds a zero byte"),
            })
        };
        let source = text(source)?;
        let mut words = vec![text(&format!("--gpu-architecture={}", arch.name()))?];
        for option in options {
            words.push(text(option)?);
        }
        let words: Vec<*const c_char> = words.iter().map(|word| word.as_ptr()).collect();
        let run = Run::create(&self.interface, &source)?;
        // SAFETY: the program lives, and there are as many options as said.
        let status =
            unsafe { (self.interface.compile)(run.program, words.len() as c_int, words.as_ptr()) };
        let log = run.bytes(
            "nvrtcGetProgramLog",
            self.interface.log_bytes,
            self.interface.log,
        )?;
        let log = String::from_utf8_lossy(&log);
        let log = log.trim_end_matches(['\0', '\n', ' ']).to_string();
        const COMPILATION_ERROR: Status = 6;
        if status == COMPILATION_ERROR {
            return Err(NvrtcError::Refused {
                names: names.to_string(),
                arch,
                log,
            });
        }
        self.interface.check("nvrtcCompileProgram", status)?;
        let cubin = run.bytes(
            "nvrtcGetCUBIN",
            self.interface.cubin_bytes,
            self.interface.cubin,
        )?;
        Ok((cubin, log))
    }
}

/// One program, destroyed at the end.
struct Run<'a> {
    interface: &'a Interface,
    program: Program,
}

type SizeFn = unsafe extern "C" fn(Program, *mut usize) -> Status;
type BytesFn = unsafe extern "C" fn(Program, *mut c_char) -> Status;

impl<'a> Run<'a> {
    fn create(interface: &'a Interface, source: &CStr) -> Result<Run<'a>, NvrtcError> {
        let mut program = ptr::null_mut();
        // SAFETY: texts end in zero, and there are no headers.
        let status = unsafe {
            let name = c"prelude".as_ptr();
            (interface.create)(
                &mut program,
                source.as_ptr(),
                name,
                0,
                ptr::null(),
                ptr::null(),
            )
        };
        interface.check("nvrtcCreateProgram", status)?;
        Ok(Run { interface, program })
    }

    fn bytes(&self, call: &'static str, size: SizeFn, get: BytesFn) -> Result<Vec<u8>, NvrtcError> {
        let mut n_bytes = 0;
        // SAFETY: the program lives; the second call writes as many bytes as the first said.
        unsafe {
            self.interface
                .check(call, size(self.program, &mut n_bytes))?;
            let mut bytes = vec![0_u8; n_bytes];
            self.interface
                .check(call, get(self.program, bytes.as_mut_ptr().cast()))?;
            Ok(bytes)
        }
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        // SAFETY: created by us and destroyed once.
        unsafe { (self.interface.destroy)(&mut self.program) };
    }
}

impl Interface {
    /// The version, such as `13.2`, and the numbers of the architectures.
    fn known(&self) -> Result<(String, Vec<i32>), NvrtcError> {
        let (mut major, mut minor, mut n_archs) = (0, 0, 0);
        // SAFETY: the pointers lead to numbers, the last to as many as the call before said.
        unsafe {
            self.check("nvrtcVersion", (self.version)(&mut major, &mut minor))?;
            self.check("nvrtcGetNumSupportedArchs", (self.n_archs)(&mut n_archs))?;
            let mut archs = vec![0; usize::try_from(n_archs).unwrap_or(0)];
            self.check("nvrtcGetSupportedArchs", (self.archs)(archs.as_mut_ptr()))?;
            Ok((format!("{major}.{minor}"), archs))
        }
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), NvrtcError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: NVRTC returns a text of its own for every number.
        let problem = unsafe { CStr::from_ptr((self.message)(status)) };
        Err(NvrtcError::Call {
            call,
            problem: problem.to_string_lossy().into_owned(),
        })
    }
}

/// The file that the library was loaded from.
fn loaded_file(interface: &Interface) -> Option<PathBuf> {
    let address = interface.version as *const c_void;
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the address is one of the library's, which is loaded, and so is its name.
    unsafe {
        if libc::dladdr(address, info.as_mut_ptr()) == 0 {
            return None;
        }
        let name = info.assume_init().dli_fname;
        (!name.is_null()).then(|| {
            let name = CStr::from_ptr(name).to_bytes();
            PathBuf::from(OsStr::from_bytes(name))
        })
    }
}

/// A file's length and a hash of samples of it: the whole has 100 MB.
fn content(file: &Path) -> io::Result<String> {
    const SAMPLES: u64 = 64;
    const SAMPLE_BYTES: usize = 4096;
    let mut opened = fs::File::open(file)?;
    let length = opened.metadata()?.len();
    let mut samples = Vec::new();
    for n in 0..SAMPLES {
        let start = length.saturating_sub(SAMPLE_BYTES as u64) * n / (SAMPLES - 1);
        opened.seek(SeekFrom::Start(start))?;
        let sample = &mut Read::by_ref(&mut opened).take(SAMPLE_BYTES as u64);
        sample.read_to_end(&mut samples)?;
    }
    Ok(format!("{length} {}", Key::new(&[samples])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_other_content_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name| folder.path().join(name);
        let mut bytes = vec![7; 1 << 20];
        fs::write(path("a"), &bytes).unwrap();
        fs::write(path("b"), &bytes).unwrap();
        bytes[(1 << 20) - 5] = 8;
        fs::write(path("c"), &bytes).unwrap();
        let of = |name| content(&path(name)).unwrap();
        assert_eq!(of("a"), of("b"));
        assert_ne!(of("a"), of("c"));
        fs::write(path("b"), &bytes[..1 << 19]).unwrap();
        assert_ne!(of("a"), of("b"));
        assert!(content(&path("absent")).is_err());
    }
}
