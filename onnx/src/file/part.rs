//! Unfinished files: beside the target under a name of their own, gone if they are never finished.
//!
//! Owns the list of those that exist, so that an interrupted program can leave nothing behind.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn unfinished() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    // The set is whole whenever the lock is free.
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has a folder of temporary files removed, too, when the program is interrupted.
pub fn on_abandon(folder: &Path) {
    unfinished().insert(folder.to_path_buf());
}

/// Removes every unfinished file of this process, then calls `last`; no new one appears before it
/// returns. For handlers of signals, whose `last` ends the process.
pub fn abandon(last: impl FnOnce()) {
    let mut paths = unfinished();
    for path in std::mem::take(&mut *paths) {
        // It may not have been created yet, or be gone.
        let _ = match path.is_dir() {
            true => fs::remove_dir_all(path),
            false => fs::remove_file(path),
        };
    }
    last();
}

/// A file under another name until it is finished; gone if it never is.
pub(super) struct Part {
    pub(super) path: PathBuf,
}

impl Part {
    /// An empty file beside `path`, which is called `name`.
    pub(super) fn beside(path: &Path, name: &str) -> io::Result<Part> {
        let path = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
        let mut paths = unfinished();
        paths.insert(path.clone());
        let part = Part { path };
        let created = File::create(&part.path);
        // Before `part` goes, which takes the lock again.
        drop(paths);
        created?;
        Ok(part)
    }

    /// Waits until its bytes are on disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    /// Gives the file its name, once its bytes are on disk.
    pub(super) fn finish(&self, path: &Path) -> io::Result<()> {
        self.sync()?;
        let _paths = unfinished();
        fs::rename(&self.path, path)
    }

    /// Gives `data` and then this file their names, or neither: the old data is kept until both have.
    pub(super) fn finish_after(
        &self,
        path: &Path,
        data: &Part,
        data_path: &Path,
    ) -> io::Result<()> {
        self.sync()?;
        data.sync()?;
        let name = data_path.file_name().unwrap_or_default().to_string_lossy();
        let old = Part::beside(data_path, &format!("{name}.old"))?;
        let had_data = data_path.exists();
        if had_data {
            fs::rename(data_path, &old.path)?;
        }
        let given = fs::rename(&data.path, data_path).and_then(|()| self.finish(path));
        if given.is_err() {
            let _paths = unfinished();
            // The first error is the one to tell; there is nothing else to do about a second.
            let _ = match had_data {
                true => fs::rename(&old.path, data_path),
                false => fs::remove_file(data_path),
            };
        }
        given
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut paths = unfinished();
        // Already renamed if all went well.
        let _ = fs::remove_file(&self.path);
        paths.remove(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_finished_goes() {
        let folder = tempfile::tempdir().expect("a folder");
        let target = folder.path().join("t");
        fs::write(&target, "old").expect("written");
        let part = Part::beside(&target, "t").expect("created");
        fs::write(&part.path, "half of").expect("written");
        drop(part);
        assert_eq!(fs::read_to_string(&target).expect("read"), "old");
        assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 1);

        let part = Part::beside(&target, "t").expect("created");
        fs::write(&part.path, "new").expect("written");
        part.finish(&target).expect("renamed");
        drop(part);
        assert_eq!(fs::read_to_string(&target).expect("read"), "new");
        assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 1);
    }
}
