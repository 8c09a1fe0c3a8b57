//! Where a shared library of NVIDIA's is looked for, and its loading.
//!
//! Owns the order (the folders of a variable, which are then the only ones; the caller's, such as the
//! wheels' `nvidia/*/lib`; the system's loader), what can stand in the way, and the files that were loaded,
//! which stay. Never calls a library's functions.
#![allow(unsafe_code)]

use super::CudaError;
use super::interface::told;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// What a library is called.
#[derive(Debug, PartialEq, Eq)]
pub struct Names {
    /// The name in sentences.
    pub(crate) name: &'static str,
    /// The package of Python that brings it.
    pub(crate) package: &'static str,
    /// The environment variable with its folders.
    pub(crate) variable: &'static str,
    /// The file's name, without its version.
    pub(crate) stem: &'static str,
    /// The names for the system's loader, in this order.
    pub(crate) loader_names: &'static [&'static str],
}

/// Why there is no library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// It is in none of the folders, and the loader does not find it.
    Nowhere { folders: Vec<PathBuf> },
    /// It is in none of the folders that the variable names.
    NotInFolders { folders: Vec<PathBuf> },
    /// It is there and cannot be used.
    Unusable { path: PathBuf, problem: String },
}

impl Missing {
    /// A file that the loader refuses, or one without a function that is needed.
    pub(crate) fn refused(path: &Path, problem: &libloading::Error) -> Missing {
        Missing::Unusable {
            path: path.to_path_buf(),
            problem: told(problem),
        }
    }

    /// The error for a missing library of products or convolutions.
    fn of_library(self, library: &'static Names) -> CudaError {
        match self {
            Missing::Nowhere { folders } => CudaError::NoLibrary { library, folders },
            Missing::NotInFolders { folders } => CudaError::NotInFolders { library, folders },
            Missing::Unusable { path, problem } => CudaError::LibraryUnusable {
                library,
                path,
                problem,
            },
        }
    }

    /// Whether the loader does not know a name at all.
    fn is_absence_of(&self, name: &Path) -> bool {
        match self {
            Missing::Unusable { problem, .. } => {
                problem.contains("No such file") && problem.contains(&*name.to_string_lossy())
            }
            _ => false,
        }
    }
}

impl Names {
    /// What `load` makes of the library's file, or of the first name by which the loader finds one that
    /// can be used.
    ///
    /// # Errors
    /// None is there, or one is and cannot be used; a folder named explicitly is never passed over.
    pub(crate) fn find<L>(
        &self,
        folders: &[PathBuf],
        load: impl Fn(&Path) -> Result<L, Missing>,
    ) -> Result<L, Missing> {
        let explicit = env::var_os(self.variable).filter(|value| !value.is_empty());
        let explicit = explicit.map(|list| env::split_paths(&list).collect());
        let names: Vec<&Path> = self.loader_names.iter().map(Path::new).collect();
        search(self.stem, explicit, folders, &names, load)
    }
}

fn search<L>(
    stem: &str,
    explicit: Option<Vec<PathBuf>>,
    folders: &[PathBuf],
    loader_names: &[&Path],
    load: impl Fn(&Path) -> Result<L, Missing>,
) -> Result<L, Missing> {
    let file = |folders: &[PathBuf]| folders.iter().find_map(|folder| newest(folder, stem));
    if let Some(folders) = explicit {
        return match file(&folders) {
            Some(path) => load(&path),
            None => Err(Missing::NotInFolders { folders }),
        };
    }
    if let Some(path) = file(folders) {
        return load(&path);
    }
    let mut unusable = None;
    for name in loader_names {
        match load(name) {
            Ok(loaded) => return Ok(loaded),
            Err(missing) if missing.is_absence_of(name) => {}
            Err(missing) => unusable = unusable.or(Some(missing)),
        }
    }
    let folders = folders.to_vec();
    Err(unusable.unwrap_or(Missing::Nowhere { folders }))
}

/// Loads a file, or what the loader finds by a name.
pub(crate) fn open(path: &Path) -> Result<Library, Missing> {
    // SAFETY: NVIDIA's library; loading it runs only its own constructors.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    library.map_err(|problem| Missing::refused(path, &problem))
}

/// The newest of a folder's files that are called `stem`, or `stem` followed by a version.
pub(crate) fn newest(folder: &Path, stem: &str) -> Option<PathBuf> {
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

/// A library: each of its files is loaded once, and stays.
pub(crate) struct Files<L> {
    names: &'static Names,
    /// What is known of a loaded library; an error names a function that it lacks.
    known: fn(Library, &Path) -> Result<L, libloading::Error>,
    loaded: Mutex<BTreeMap<PathBuf, Arc<L>>>,
}

impl<L> Files<L> {
    pub(crate) const fn new(
        names: &'static Names,
        known: fn(Library, &Path) -> Result<L, libloading::Error>,
    ) -> Files<L> {
        Files {
            names,
            known,
            loaded: Mutex::new(BTreeMap::new()),
        }
    }

    /// The library of the first place that has it, loaded now or before.
    ///
    /// # Errors
    /// None is there, or one is and cannot be used; a folder named explicitly is never passed over.
    pub(crate) fn find(&self, folders: &[PathBuf]) -> Result<Arc<L>, CudaError> {
        let found = self.names.find(folders, |path| self.once(path));
        found.map_err(|missing| missing.of_library(self.names))
    }

    fn once(&self, path: &Path) -> Result<Arc<L>, Missing> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = loaded.get(path) {
            return Ok(Arc::clone(known));
        }
        let library = (self.known)(open(path)?, path);
        let library = Arc::new(library.map_err(|problem| Missing::refused(path, &problem))?);
        loaded.insert(path.to_path_buf(), Arc::clone(&library));
        Ok(library)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEM: &str = "libnvrtc.so";

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
        assert_eq!(found(STEM).unwrap(), "libnvrtc.so.12.10");
        let builtins = |version| found(&format!("libnvrtc-builtins.so.{version}"));
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
            let names = [Path::new("libc.so.6")];
            let found = search(STEM, Some(vec![path(explicit)]), &others, &names, open);
            found.err().unwrap()
        };
        let folders = vec![path(&empty)];
        assert_eq!(search(&empty), Missing::NotInFolders { folders });
        assert!(matches!(search(&damaged), Missing::Unusable { .. }));
    }

    #[test]
    fn what_the_loader_finds_and_cannot_use_is_told() {
        let folder = folder(&["libnvrtc.so.13"]);
        let (absent, damaged) = (
            folder.path().join("libnvrtc.so.14"),
            folder.path().join("libnvrtc.so.13"),
        );
        let search = |names: &[&Path]| search(STEM, None, &[], names, open).err().unwrap();
        let missing = search(&[&absent, &damaged, &absent]);
        let Missing::Unusable { path, problem } = missing else {
            panic!("{missing:?}");
        };
        assert_eq!(path, damaged);
        assert!(problem.contains("too short"), "{problem}");
        let missing = search(&[&absent, Path::new("libnvrtc-that-is-nowhere.so")]);
        assert_eq!(missing, Missing::Nowhere { folders: vec![] });
    }

    /// The sentences about a library that this machine may or may not have.
    #[test]
    fn what_is_missing_says_what_to_do() {
        static NAMES: Names = Names {
            name: "cuX",
            package: "nvidia-cux",
            variable: "SHORTHAUL_CUX",
            stem: "libcux.so",
            loader_names: &[],
        };
        let folders = vec![PathBuf::from("/one"), PathBuf::from("/two")];
        let nowhere = Missing::Nowhere { folders };
        assert_eq!(
            nowhere.of_library(&NAMES).to_string(),
            "cuX (libcux.so) was not found; looked in /one, /two and the loader's folders. Install the CUDA \
             build of PyTorch or `pip install nvidia-cux`, set SHORTHAUL_CUX to the library's folder, or \
             leave the table of products out"
        );
        let folders = vec![PathBuf::from("/one")];
        let elsewhere = Missing::NotInFolders { folders };
        assert_eq!(
            elsewhere.of_library(&NAMES).to_string(),
            "SHORTHAUL_CUX names /one, where no libcux.so is; set it to the folder of libcux.so, or unset it"
        );
    }
}
