//! The target of a file: what exists there, and which properties a finished file takes over.
//!
//! Never writes a byte.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, chown};
use std::path::{Path, PathBuf};

/// Most links that may lead to a file, as in Linux itself.
const MOST_LINKS: usize = 40;

/// What is written to.
#[derive(Debug)]
pub(super) enum Destination {
    /// A file, which may exist already, to which the given path leads through any links. The file is
    /// replaced, and the links stay.
    File(PathBuf),
    /// A pipe or a device, into which bytes go.
    Stream(PathBuf),
}

impl Destination {
    /// What is at a path.
    ///
    /// # Errors
    /// It cannot be written to.
    pub(super) fn new(path: &Path) -> io::Result<Destination> {
        if path.file_name().is_none() {
            return Err(io::Error::other("it names no file"));
        }
        let kind = match fs::metadata(path) {
            Ok(found) if found.is_file() && found.permissions().readonly() => {
                return Err(io::Error::other("it is read-only"));
            }
            Ok(found) if found.is_file() => return Ok(Destination::File(behind_links(path)?)),
            Ok(found) => found.file_type(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Destination::File(behind_links(path)?));
            }
            Err(error) => return Err(error),
        };
        match kind {
            kind if kind.is_dir() => Err(io::Error::other("it is a folder")),
            kind if kind.is_fifo() || kind.is_char_device() => {
                Ok(Destination::Stream(path.to_path_buf()))
            }
            _ => Err(io::Error::other("it is neither a file nor a pipe")),
        }
    }
}

fn behind_links(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_path_buf();
    for _ in 0..MOST_LINKS {
        match fs::read_link(&path) {
            Ok(to) => path = super::folder_of(&path).join(to),
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::other("its links lead in a circle"))
}

/// Whether two paths lead to the same existing file.
pub(super) fn same(a: &Path, b: &Path) -> bool {
    match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    }
}

/// Gives a finished file the owner and the permissions of the one it replaces, if there is one, and waits
/// until it is on disk.
pub(super) fn take_after(path: &Path, old: Option<&Metadata>) -> io::Result<()> {
    let file = File::open(path)?;
    if let Some(old) = old {
        let own = file.metadata()?;
        if (own.uid(), own.gid()) != (old.uid(), old.gid()) {
            // Only the superuser may give files away; whoever else replaces one owns it.
            let _ = chown(path, Some(old.uid()), Some(old.gid()));
        }
        // This comes after the owner, because changing the owner may remove permissions.
        if file.metadata()?.permissions() != old.permissions() {
            fs::set_permissions(path, old.permissions())?;
        }
    }
    file.sync_all()
}
