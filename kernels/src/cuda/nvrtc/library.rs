//! The NVRTC library: found, loaded, called.
//!
//! Owns the search (`SHORTHAUL_NVRTC`, the caller's folders, the loader's own) and the C interface.
#![allow(unsafe_code)]

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

use super::NvrtcError;
use crate::cuda::Arch;

type Program = *mut c_void;
type Status = c_int;

/// Declares the functions used, each once, with their loading.
macro_rules! interface {
    ($($field:ident = $symbol:literal : fn($($arg:ty),*) -> $result:ty;)*) => {
        struct Interface { $($field: unsafe extern "C" fn($($arg),*) -> $result,)* }
        impl Interface {
            fn of(library: &Library) -> Result<Interface, libloading::Error> {
                // SAFETY: the signatures are those of nvrtc.h, unchanged since CUDA 11.
                unsafe { Ok(Interface { $($field: *library.get($symbol)?,)* }) }
            }
        }
    };
}

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
    archs: Vec<i32>,
    path: PathBuf,
    _library: Library,
    /// The functions built into the language; NVRTC looks for them by name when it compiles.
    _builtins: Option<Library>,
}

impl Nvrtc {
    /// Loads NVRTC from the folder that `SHORTHAUL_NVRTC` names, else from the first of `folders`
    /// (such as the wheels' `nvidia/*/lib`) that has it, else by the system's loader.
    pub fn find(folders: &[PathBuf]) -> Result<Nvrtc, NvrtcError> {
        let explicit = env::var_os("SHORTHAUL_NVRTC").filter(|value| !value.is_empty());
        let folders: Vec<PathBuf> = match explicit {
            Some(list) => env::split_paths(&list).collect(),
            None => folders.to_vec(),
        };
        for folder in &folders {
            if let Some(path) = newest(folder, "libnvrtc.so") {
                return Nvrtc::load(&path, newest(folder, "libnvrtc-builtins.so").as_deref());
            }
        }
        for name in ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"] {
            match Nvrtc::load(Path::new(name), None) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(_) => continue,
            }
        }
        Err(NvrtcError::NotFound { folders })
    }

    fn load(path: &Path, builtins: Option<&Path>) -> Result<Nvrtc, NvrtcError> {
        let unusable = |problem: libloading::Error| NvrtcError::Unusable {
            path: path.to_path_buf(),
            problem: problem.to_string(),
        };
        // SAFETY: NVIDIA's libraries; loading them runs only their own constructors.
        let (builtins, library) = unsafe {
            let builtins = builtins.map(|path| Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL));
            let library = Library::open(Some(path), RTLD_NOW | RTLD_LOCAL).map_err(unusable)?;
            (builtins.transpose().map_err(unusable)?, library)
        };
        let interface = Interface::of(&library).map_err(unusable)?;
        let (mut major, mut minor, mut n_archs) = (0, 0, 0);
        // SAFETY: the pointers lead to numbers, the last to as many as the call before said.
        let archs = unsafe {
            interface.check("nvrtcVersion", (interface.version)(&mut major, &mut minor))?;
            interface.check(
                "nvrtcGetNumSupportedArchs",
                (interface.n_archs)(&mut n_archs),
            )?;
            let mut archs = vec![0; usize::try_from(n_archs).unwrap_or(0)];
            interface.check(
                "nvrtcGetSupportedArchs",
                (interface.archs)(archs.as_mut_ptr()),
            )?;
            archs
        };
        Ok(Nvrtc {
            interface,
            version: format!("{major}.{minor}"),
            archs,
            path: path.to_path_buf(),
            _library: library,
            _builtins: builtins,
        })
    }

    /// Such as `13.2`.
    pub fn version(&self) -> &str {
        &self.version
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

/// The last of a folder's files, by name, that begin with `stem`; not the variants with another stem.
fn newest(folder: &Path, stem: &str) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder)
        .ok()?
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(stem))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found.pop()
}
