//! The content-addressed cache of compiled kernels and of compiler probes.
//!
//! Owns: where entries live, how they are named, written and verified; `place.rs` says which folders are
//! trusted, `trim.rs` what is removed.
//! An entry is a file `<root>/v2/<kind>/<two hex digits>/<key>` whose last
//! [`FOOTER_BYTES`] bytes hold a magic number, the payload's length and its
//! SHA-256. (An ELF loader ignores trailing bytes, so a shared library is loaded
//! straight from its entry.) Entries appear by atomic rename and are never
//! changed in place, so any number of processes may share one folder. A
//! truncated or altered entry reads as absent and is replaced.
//!
//! Never knows what a payload means, and never prints.

mod place;
mod trim;

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::progress::Progress;

/// Raised whenever the meaning or the layout of entries changes.
pub const FORMAT_VERSION: u32 = 2;
/// Bytes of footer after an entry's payload.
pub const FOOTER_BYTES: usize = 48;
const MAGIC: &[u8; 8] = b"SHORTHL1";
const DEFAULT_LIMIT_BYTES: u64 = 4 << 30;
/// Bytes that are written to find out whether the disk takes them: quotas show nowhere else.
const TRIAL_BYTES: usize = 256 << 10;
/// A folder in memory, where temporary files find room when the disks have none.
const IN_MEMORY: &str = "/dev/shm";

/// A failure to keep something in the cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// Writing failed, most often because the disk is full.
    #[error("{}", write_message(path, source))]
    Write {
        /// The file that could not be written.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Neither the cache folder nor a temporary folder can be written.
    #[error(
        "no folder for compiled kernels can be written (tried {tried}): {source}; \
         set SHORTHAUL_CACHE_DIR to a writable folder"
    )]
    NoFolder {
        /// The folders tried, in order.
        tried: String,
        /// Why the last one failed.
        source: io::Error,
    },
    /// `SHORTHAUL_CACHE_LIMIT` is not a size.
    #[error(
        "SHORTHAUL_CACHE_LIMIT is '{0}', expected a number of bytes, \
         optionally with K, M or G (for example 4G)"
    )]
    BadLimit(String),
}

fn write_message(path: &Path, source: &io::Error) -> String {
    let path = path.display();
    if matches!(
        source.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    ) {
        format!(
            "the disk is full: writing {path} failed ({source}); free space, lower \
             SHORTHAUL_CACHE_LIMIT, or set SHORTHAUL_CACHE_DIR to another disk"
        )
    } else {
        format!("cannot write {path}: {source}; set SHORTHAUL_CACHE_DIR to a writable folder")
    }
}

/// What kind of thing an entry holds; kinds live in separate folders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum EntryKind {
    /// A shared library of kernels.
    Library,
    /// The text result of probing a compiler or a CPU.
    Probe,
    /// A measured table, for example of tuning.
    Table,
    /// Machine code for a GPU.
    Cubin,
}

impl EntryKind {
    const ALL: [EntryKind; 4] = [
        EntryKind::Library,
        EntryKind::Probe,
        EntryKind::Table,
        EntryKind::Cubin,
    ];

    fn folder(self) -> &'static str {
        match self {
            EntryKind::Library => "lib",
            EntryKind::Probe => "probe",
            EntryKind::Table => "table",
            EntryKind::Cubin => "cubin",
        }
    }

    fn extension(self) -> &'static str {
        match self {
            EntryKind::Library => "so",
            EntryKind::Probe | EntryKind::Table => "txt",
            EntryKind::Cubin => "cubin",
        }
    }
}

/// The SHA-256 of everything an entry depends on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key([u8; 32]);

impl Key {
    /// Hashes `parts` (each with its length, so no two lists collide) together
    /// with [`FORMAT_VERSION`].
    pub fn new<P: AsRef<[u8]>>(parts: &[P]) -> Key {
        let mut hasher = Sha256::new();
        hasher.update(FORMAT_VERSION.to_le_bytes());
        for part in parts {
            let part = part.as_ref();
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Key(hasher.finalize().into())
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The settings that choose a cache folder, separate from the environment so
/// that they can be tested.
#[derive(Debug, Clone, Default)]
pub struct CacheSettings {
    /// `SHORTHAUL_CACHE_DIR`: the folder itself.
    pub cache_dir: Option<OsString>,
    /// `XDG_CACHE_HOME`: the folder's parent.
    pub xdg_cache_home: Option<OsString>,
    /// `HOME`: the folder is `.cache/shorthaul` below it.
    pub home: Option<OsString>,
    /// `SHORTHAUL_CACHE_LIMIT`: bytes, optionally with K, M or G.
    pub limit: Option<OsString>,
}

impl CacheSettings {
    /// Reads the settings from the environment.
    pub fn from_environment() -> Self {
        let read = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        CacheSettings {
            cache_dir: read("SHORTHAUL_CACHE_DIR"),
            xdg_cache_home: read("XDG_CACHE_HOME"),
            home: read("HOME"),
            limit: read("SHORTHAUL_CACHE_LIMIT"),
        }
    }

    /// The folder these settings name, if they name one.
    pub fn folder(&self) -> Option<PathBuf> {
        if let Some(dir) = &self.cache_dir {
            return Some(PathBuf::from(dir));
        }
        if let Some(dir) = &self.xdg_cache_home {
            return Some(Path::new(dir).join("shorthaul"));
        }
        self.home
            .as_ref()
            .map(|home| Path::new(home).join(".cache").join("shorthaul"))
    }

    fn limit_bytes(&self) -> Result<u64, CacheError> {
        let Some(text) = &self.limit else {
            return Ok(DEFAULT_LIMIT_BYTES);
        };
        let text = text.to_string_lossy();
        let (digits, shift) = match text.trim().to_ascii_uppercase() {
            t if t.ends_with('K') => (t[..t.len() - 1].to_string(), 10),
            t if t.ends_with('M') => (t[..t.len() - 1].to_string(), 20),
            t if t.ends_with('G') => (t[..t.len() - 1].to_string(), 30),
            t => (t, 0),
        };
        digits
            .trim()
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(1 << shift))
            .ok_or_else(|| CacheError::BadLimit(text.into_owned()))
    }
}

/// A folder of verified entries, bounded in size. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
    limit_bytes: u64,
    /// Set when the folder lives only as long as this process.
    _temporary: Option<Arc<TempDir>>,
}

impl Cache {
    /// Opens the user's cache folder; where it cannot be written, warns once per
    /// process and uses a temporary folder that is removed with the last clone.
    ///
    /// # Errors
    /// If not even a temporary folder can be made.
    pub fn open(
        settings: &CacheSettings,
        progress: &mut dyn Progress,
    ) -> Result<Cache, CacheError> {
        let limit_bytes = settings.limit_bytes()?;
        let wanted = settings.folder();
        let problem = match &wanted {
            Some(root) => {
                if settings.cache_dir.is_none() {
                    place::close_to_others(root);
                }
                match Cache::at(root, limit_bytes) {
                    Ok(cache) => return Ok(cache),
                    Err(error) => format!(
                        "the cache folder {} cannot be used ({error})",
                        root.display()
                    ),
                }
            }
            None => "there is no home folder to keep the kernel cache in".to_string(),
        };
        let cache = Cache::temporary(limit_bytes).map_err(|source| CacheError::NoFolder {
            tried: match &wanted {
                Some(root) => format!("{}, {}", root.display(), env::temp_dir().display()),
                None => env::temp_dir().display().to_string(),
            },
            source,
        })?;
        warn_once(
            progress,
            &format!(
                "{problem}; compiled kernels go to a temporary folder and are compiled again by \
             the next process; set SHORTHAUL_CACHE_DIR to a folder that only you can write to"
            ),
        );
        Ok(cache)
    }

    /// A cache that is removed with its last clone, in the first temporary folder that will do.
    fn temporary(limit_bytes: u64) -> io::Result<Cache> {
        let mut problem = io::Error::from(io::ErrorKind::NotFound);
        for parent in temporary_parents() {
            let opened = tempfile::Builder::new()
                .prefix("shorthaul-")
                .tempdir_in(parent)
                .and_then(|folder| Ok((Cache::at(folder.path(), limit_bytes)?, folder)));
            match opened {
                Ok((mut cache, folder)) => {
                    cache._temporary = Some(Arc::new(folder));
                    return Ok(cache);
                }
                Err(error) => problem = error,
            }
        }
        Err(problem)
    }

    /// Opens (and creates) the cache in `root`; fails if it cannot be written, if it is another user's or others
    /// can write to it, and if its disk is full or forbids execution.
    pub fn at(root: &Path, limit_bytes: u64) -> io::Result<Cache> {
        let root = std::path::absolute(root)?;
        let base = root.join(format!("v{FORMAT_VERSION}"));
        place::create(&root)?;
        place::check_above(&root)?;
        let kinds = EntryKind::ALL.iter().map(|kind| base.join(kind.folder()));
        for folder in [base.clone(), base.join("work")].into_iter().chain(kinds) {
            place::create(&folder)?;
            place::check_own(&folder)?;
        }
        place::check_disk(&base)?;
        // Creating a folder that exists succeeds even where nothing can be written.
        let mut trial = tempfile::Builder::new()
            .prefix(trim::PARTIAL)
            .tempfile_in(base.join("work"))?;
        trial.write_all(&[1; TRIAL_BYTES])?;
        Ok(Cache {
            root: base,
            limit_bytes,
            _temporary: None,
        })
    }

    /// The folder of this cache's format version.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether entries vanish when this process ends.
    pub fn is_temporary(&self) -> bool {
        self._temporary.is_some()
    }

    /// A folder for unfinished files, on the same file system as the entries,
    /// removed when dropped.
    ///
    /// # Errors
    /// If the folder cannot be made: a full disk, or no rights.
    pub fn work_folder(&self) -> Result<TempDir, CacheError> {
        working_folder(&self.root.join("work"))
    }

    /// Folders for unfinished files elsewhere, for when this cache's disk is full.
    pub fn work_folders_elsewhere(&self) -> Vec<TempDir> {
        let made = temporary_parents().map(|parent| working_folder(&parent));
        made.flatten().collect()
    }

    /// Where the entry for `key` is kept, whether or not it exists.
    pub fn entry_path(&self, kind: EntryKind, key: &Key) -> PathBuf {
        let name = key.to_string();
        self.root.join(kind.folder()).join(&name[..2]).join(format!(
            "{}.{}",
            &name[2..],
            kind.extension()
        ))
    }

    /// The path of a whole entry, its time of use renewed; `None` if it is
    /// absent, truncated or altered.
    pub fn find(&self, kind: EntryKind, key: &Key) -> Option<PathBuf> {
        self.read(kind, key)?;
        Some(self.entry_path(kind, key))
    }

    /// The payload of a whole entry, its time of use renewed.
    pub fn read(&self, kind: EntryKind, key: &Key) -> Option<Vec<u8>> {
        let path = self.entry_path(kind, key);
        place::check_own(path.parent()?).ok()?;
        // Neither a link nor a pipe that would block.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let mut file = File::options()
            .read(true)
            .custom_flags(flags)
            .open(&path)
            .ok()?;
        let found = file.metadata().ok().filter(place::is_own_entry)?;
        let mut bytes = Vec::with_capacity(usize::try_from(found.len()).ok()?);
        file.read_to_end(&mut bytes).ok()?;
        let payload_bytes = verified_payload(&bytes)?;
        // Being unable to renew the time only makes the entry leave sooner.
        let _ = File::options()
            .append(true)
            .open(&path)
            .and_then(|file| file.set_modified(SystemTime::now()));
        bytes.truncate(payload_bytes);
        Some(bytes)
    }

    /// Writes `payload` as the entry for `key`, atomically.
    ///
    /// # Errors
    /// If the entry cannot be written whole; nothing of it is left then.
    pub fn write(&self, kind: EntryKind, key: &Key, payload: &[u8]) -> Result<PathBuf, CacheError> {
        let path = self.entry_path(kind, key);
        self.write_atomically(&path, payload)
            .map_err(|source| CacheError::Write {
                path: path.clone(),
                source,
            })?;
        Ok(path)
    }

    fn write_atomically(&self, path: &Path, payload: &[u8]) -> io::Result<()> {
        let folder = path.parent().unwrap_or(&self.root);
        place::create(folder)?;
        // Same folder as the target: rename is atomic only within a file system.
        let mut file = tempfile::Builder::new()
            .prefix(trim::PARTIAL)
            .tempfile_in(folder)?;
        file.write_all(payload)?;
        file.write_all(&footer(payload))?;
        // Without the sync, a power cut could leave a renamed but empty file.
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        Ok(())
    }

    /// Writes a text for a person to look at (a source that failed to compile)
    /// beside the entries and returns its path.
    ///
    /// # Errors
    /// If the text cannot be written.
    pub fn keep_text(&self, name: &str, text: &str) -> Result<PathBuf, CacheError> {
        let folder = self.root.join("failed");
        let path = folder.join(name);
        place::create(&folder)
            .and_then(|()| fs::write(&path, text))
            .map_err(|source| CacheError::Write {
                path: path.clone(),
                source,
            })?;
        Ok(path)
    }

    /// Bytes that the entries may take together.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Number and bytes of the entries. Linear in the number of entries.
    pub fn contents(&self) -> (usize, u64) {
        trim::contents(self)
    }

    /// Removes all entries and nothing else; gives how many were removed, with their bytes. Programs that are loaded
    /// keep running.
    pub fn clear(&self) -> (usize, u64) {
        trim::clear(self)
    }

    /// Removes the entries unused for longest until the rest fits the limit, and what processes that died left
    /// unfinished; nothing that this room has not made. Linear in the number of entries.
    pub fn trim(&self) {
        trim::trim(self);
    }
}

/// Folders for temporary files, in the order in which they are tried.
fn temporary_parents() -> impl Iterator<Item = PathBuf> {
    [env::temp_dir(), PathBuf::from(IN_MEMORY)].into_iter()
}

/// A folder to compile in, removed when dropped.
fn working_folder(parent: &Path) -> Result<TempDir, CacheError> {
    tempfile::Builder::new()
        .prefix(trim::WORKING)
        .tempdir_in(parent)
        .map_err(|source| CacheError::Write {
            path: parent.to_path_buf(),
            source,
        })
}

fn footer(payload: &[u8]) -> [u8; FOOTER_BYTES] {
    let mut footer = [0; FOOTER_BYTES];
    footer[..8].copy_from_slice(MAGIC);
    footer[8..16].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    footer[16..].copy_from_slice(&Sha256::digest(payload));
    footer
}

/// The payload's length if `entry` ends in a footer that fits it.
fn verified_payload(entry: &[u8]) -> Option<usize> {
    let payload_bytes = entry.len().checked_sub(FOOTER_BYTES)?;
    (entry[payload_bytes..] == footer(&entry[..payload_bytes])).then_some(payload_bytes)
}

/// Passes `message` on the first time this process says it.
fn warn_once(progress: &mut dyn Progress, message: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.insert(message.to_string()) {
        progress.warn(message);
    }
}
