//! The NVRTC library: found, loaded, called.
//!
//! Owns the search (`SHORTHAUL_NVRTC`, the caller's folders, the loader's own) and the C interface.
#![allow(unsafe_code)]

use std::env;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

use super::NvrtcError;
use crate::cache::Key;
use crate::cuda::Arch;
use crate::cuda::interface::{interface, told};

const LIBRARY: &str = "libnvrtc.so";
const BUILTINS: &str = "libnvrtc-builtins.so";
/// What the system's loader is asked for, in this order.
const LOADER_NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", LIBRARY];

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
        let explicit = env::var_os("SHORTHAUL_NVRTC").filter(|value| !value.is_empty());
        let explicit = explicit.map(|list| env::split_paths(&list).collect());
        Nvrtc::search(explicit, folders, &LOADER_NAMES.map(Path::new))
    }

    fn search(
        explicit: Option<Vec<PathBuf>>,
        folders: &[PathBuf],
        loader_names: &[&Path],
    ) -> Result<Nvrtc, NvrtcError> {
        if let Some(explicit) = explicit {
            return match explicit.iter().find_map(|folder| newest(folder, LIBRARY)) {
                Some(path) => Nvrtc::load(&path),
                None => Err(NvrtcError::NotInFolders { folders: explicit }),
            };
        }
        if let Some(path) = folders.iter().find_map(|folder| newest(folder, LIBRARY)) {
            return Nvrtc::load(&path);
        }
        let mut unusable = None;
        for name in loader_names {
            match Nvrtc::load(name) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(error) if error.is_absence_of(name) => {}
                Err(error) => unusable = unusable.or(Some(error)),
            }
        }
        let folders = folders.to_vec();
        Err(unusable.unwrap_or(NvrtcError::NotFound { folders }))
    }

    fn load(path: &Path) -> Result<Nvrtc, NvrtcError> {
        let unusable = |problem: libloading::Error| NvrtcError::Unusable {
            path: path.to_path_buf(),
            problem: told(&problem),
        };
        // SAFETY: NVIDIA's library; loading it runs only its own constructors.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(unusable)?;
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
        let version = format!("{major}.{minor}");
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
            _builtins: builtins.transpose().map_err(unusable)?,
        })
    }

    /// Such as `13.2`.
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
    Ok(format!("{length} {}", Key::of(&[samples])))
}

/// The newest of a folder's files that are called `stem`, or `stem` with a version behind it.
pub(in crate::cuda) fn newest(folder: &Path, stem: &str) -> Option<PathBuf> {
    let files = fs::read_dir(folder).ok()?.flatten();
    let versions = files.filter_map(|entry| {
        let name = entry.file_name();
        let numbers = name.to_str()?.strip_prefix(stem)?;
        let numbers: Option<Vec<u64>> = match numbers.strip_prefix('.') {
            Some(numbers) => numbers.split('.').map(|n| n.parse().ok()).collect(),
            None => numbers.is_empty().then(Vec::new),
        };
        Some((numbers?, entry.path()))
    });
    versions.max().map(|(_, path)| path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            fs::write(folder.path().join(file), "no library").unwrap();
        }
        folder
    }

    #[test]
    fn versions_are_numbers() {
        let folder = folder(&[
            "libnvrtc.so.12.9",
            "libnvrtc.so.12.10",
            "libnvrtc.so",
            "libnvrtc.so.old",
            "libnvrtc.so.9",
            "libnvrtc-builtins.so.12.9",
            "libnvrtc-builtins.so.12.10.7",
            "libnvrtc-builtins.so.13.0",
        ]);
        let found =
            |stem: &str| newest(folder.path(), stem).map(|p| p.file_name().unwrap().to_owned());
        assert_eq!(found(LIBRARY).unwrap(), "libnvrtc.so.12.10");
        let builtins = |version| found(&format!("{BUILTINS}.{version}"));
        assert_eq!(builtins("12.10").unwrap(), "libnvrtc-builtins.so.12.10.7");
        assert_eq!(builtins("12.1"), None);
        assert_eq!(builtins("13.0").unwrap(), "libnvrtc-builtins.so.13.0");
    }

    #[test]
    fn an_explicit_folder_is_not_passed_over() {
        let (empty, damaged) = (folder(&[]), folder(&["libnvrtc.so.13"]));
        let path = |folder: &tempfile::TempDir| folder.path().to_path_buf();
        let search = |explicit: &tempfile::TempDir| {
            let others = [path(&damaged)];
            let found = Nvrtc::search(Some(vec![path(explicit)]), &others, &[]);
            found.err().unwrap()
        };
        let error = search(&empty);
        assert!(
            matches!(&error, NvrtcError::NotInFolders { folders } if folders[0] == empty.path())
        );
        assert!(matches!(search(&damaged), NvrtcError::Unusable { .. }));
    }

    #[test]
    fn what_the_loader_finds_and_cannot_use_is_told() {
        let folder = folder(&["libnvrtc.so.13"]);
        let (absent, damaged) = (
            folder.path().join("libnvrtc.so.14"),
            folder.path().join("libnvrtc.so.13"),
        );
        let search = |names: &[&Path]| Nvrtc::search(None, &[], names).err().unwrap();
        let error = search(&[&absent, &damaged, &absent]);
        assert!(matches!(&error, NvrtcError::Unusable { path, .. } if *path == damaged));
        assert!(error.to_string().contains("too short"), "{error}");
        let error = search(&[&absent, Path::new("libnvrtc-that-is-nowhere.so")]);
        assert!(matches!(error, NvrtcError::NotFound { .. }), "{error}");
    }

    #[test]
    fn files_of_other_content_are_told_apart() {
        let folder = folder(&["a", "b", "c"]);
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
