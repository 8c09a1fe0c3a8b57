//! Unfinished files: in a folder of their own beside the target, gone if they are never finished.
//!
//! Owns the list of these folders, so that an interrupted program can leave nothing behind, and the
//! moment at which finished files take the place of older ones. An interruption waits for that moment to
//! pass, and so does another run with a target in the same folder; after a crash in it the older files are in
//! the folder. A folder that a killed run left is removed by the next run for the same target, which first puts such
//! older files back where no newer ones are: every run holds a lock on a file in its own.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
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
        // It may be gone.
        let _ = fs::remove_dir_all(path);
    }
    last();
}

/// Most folders of other programs or of earlier runs that may be in the way.
const MOST_TAKEN: usize = 100;

/// Characters of the target's name that the folder's name repeats.
const SHOWN_OF_NAME: usize = 40;

/// End of the name of a file that was replaced.
const OLD: &str = ".old";
/// The file that a run holds a lock on while it lives. No target has this name.
const LOCK: &str = ".held-while-the-run-that-made-this-folder-lives";

/// A folder for unfinished files; gone with what is in it if they are never finished.
#[derive(Debug)]
pub(super) struct Part {
    folder: PathBuf,
    /// Held for others to see; `None` where the file system knows no locks.
    _lock: Option<File>,
}

impl Part {
    /// An empty folder in `folder` for the file `name`. Only its owner can look into it.
    pub(super) fn within(folder: &Path, name: &str) -> io::Result<Part> {
        let mut paths = unfinished();
        // A name may be as long as names can be.
        let start: String = name.chars().take(SHOWN_OF_NAME).collect();
        // Held until the new folder has its lock: no other run takes it for one that nobody holds. Where folders
        // cannot be locked, only runs of this process wait for each other.
        let around = File::open(folder)?;
        let _ = around.lock();
        remove_abandoned(folder, &start, name);
        for n in 0..MOST_TAKEN {
            let part = folder.join(format!(".{start}.{}-{n}.part", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&part) {
                // After a crash it may hold files that were to be replaced.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => {
                    made?;
                    paths.insert(part.clone());
                    let lock = File::create(part.join(LOCK)).ok();
                    return Ok(Part {
                        folder: part,
                        _lock: lock.filter(|file| file.try_lock().is_ok()),
                    });
                }
            }
        }
        Err(io::Error::from(io::ErrorKind::AlreadyExists))
    }

    /// The path of an unfinished file.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Gives unfinished files their places, all or none.
    ///
    /// # Errors
    /// A file cannot be renamed; every target then is as it was, or the error says where it is.
    pub(super) fn replace(self, files: &[(PathBuf, PathBuf)]) -> io::Result<()> {
        self.replace_while(files, || ())
    }

    /// Like [`Part::replace`]; calls `meanwhile` after each renaming.
    fn replace_while(
        self,
        files: &[(PathBuf, PathBuf)],
        mut meanwhile: impl FnMut(),
    ) -> io::Result<()> {
        // Held to the end: an interruption never finds half of the files replaced.
        let mut paths = unfinished();
        // Held to the end, too: of two runs with one target one comes after the other. Where folders cannot be
        // locked, only within this process.
        let around = File::open(super::folder_of(&self.folder))?;
        let _ = around.lock();
        if let [(from, to)] = files {
            return fs::rename(from, to);
        }
        let mut renamed = Vec::new();
        let mut rename = |from: PathBuf, to: PathBuf| -> io::Result<()> {
            fs::rename(&from, &to)?;
            renamed.push((from, to));
            meanwhile();
            Ok(())
        };
        // The older files leave in the other order: after a crash a model may be missing, but there is
        // never one beside another one's data.
        let leave = || {
            files
                .iter()
                .enumerate()
                .rev()
                .filter(|(_, (_, to))| to.exists())
        };
        let done = leave()
            .try_for_each(|(n, (_, to))| rename(to.clone(), self.file(&format!("{n}{OLD}"))))
            .and_then(|()| {
                files
                    .iter()
                    .try_for_each(|(from, to)| rename(from.clone(), to.clone()))
            });
        let Err(error) = done else {
            // Not every file system knows how; renaming is done either way.
            let _ = self.sync_around();
            return Ok(());
        };
        for (from, to) in renamed.into_iter().rev() {
            if fs::rename(&to, &from).is_err() {
                paths.remove(&self.folder);
                let kept = self.folder.display().to_string();
                // What is in it is the user's.
                std::mem::forget(self);
                return Err(io::Error::other(format!(
                    "{error}; the older files are in {kept}"
                )));
            }
        }
        Err(error)
    }

    /// Waits until the new names are on disk.
    fn sync_around(&self) -> io::Result<()> {
        File::open(super::folder_of(&self.folder))?.sync_all()
    }
}

/// Removes the folders that killed runs left for the file `name`; their names begin with `start`. The caller holds the
/// lock of `folder`.
fn remove_abandoned(folder: &Path, start: &str, name: &str) {
    let (head, tail) = (format!(".{start}."), ".part");
    let is_part = |name: &str| {
        let numbers = name.strip_prefix(&head).and_then(|n| n.strip_suffix(tail));
        let numbers = numbers.and_then(|n| n.split_once('-'));
        numbers.is_some_and(|(a, b)| a.parse::<u32>().is_ok() && b.parse::<u32>().is_ok())
    };
    for item in fs::read_dir(folder).into_iter().flatten().flatten() {
        if !item.file_name().to_str().is_some_and(is_part) {
            continue;
        }
        let path = item.path();
        // There is no such file if the run was killed before it made the file, or while it removed the folder.
        let lock = File::options().write(true).open(path.join(LOCK));
        let is_held = match &lock {
            Ok(lock) => lock.try_lock().is_err(),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        };
        if !is_held && put_back(&path, folder, start, name).is_ok() {
            // Another run may remove it at the same time.
            let _ = fs::remove_dir_all(path);
        }
    }
}

/// Puts the older files of a run that was killed while it replaced them back in their places. It moved the model away
/// first and put the new one in its place last, so where there is a model everything new is in its place.
fn put_back(part: &Path, folder: &Path, start: &str, name: &str) -> io::Result<()> {
    let old = |n: usize| part.join(format!("{n}{OLD}"));
    // The data comes first in the list of files, the model last.
    let (data, model) = (old(0), old(1));
    if !data.exists() && !model.exists() {
        return Ok(());
    }
    if start != name {
        return Err(io::Error::other("of which target they are is not known"));
    }
    let place = folder.join(name);
    if place.exists() {
        return Ok(());
    }
    if data.exists() {
        fs::rename(data, folder.join(format!("{name}.data")))?;
    }
    match model.exists() {
        true => fs::rename(model, place),
        false => Ok(()),
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut paths = unfinished();
        // What is in it now was never finished, or replaced.
        let _ = fs::remove_dir_all(&self.folder);
        paths.remove(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> usize {
        fs::read_dir(folder).expect("listed").count()
    }

    fn text(path: &Path) -> String {
        fs::read_to_string(path).expect("read")
    }

    #[test]
    fn what_is_not_finished_goes() {
        let folder = tempfile::tempdir().expect("a folder");
        let target = folder.path().join("t");
        fs::write(&target, "old").expect("written");
        let part = Part::within(folder.path(), "t").expect("created");
        fs::write(part.file("t"), "half of").expect("written");
        drop(part);
        assert_eq!((text(&target).as_str(), names(folder.path())), ("old", 1));

        let part = Part::within(folder.path(), "t").expect("created");
        fs::write(part.file("t"), "new").expect("written");
        let files = [(part.file("t"), target.clone())];
        part.replace(&files).expect("renamed");
        assert_eq!((text(&target).as_str(), names(folder.path())), ("new", 1));
    }

    /// A run is killed after each renaming in turn; the next run finds the older files or the newer ones.
    #[test]
    fn what_a_run_that_was_killed_while_it_replaced_left_goes_back() {
        for survived in 0..5 {
            let folder = tempfile::tempdir().expect("a folder");
            let (model, data) = (folder.path().join("m"), folder.path().join("m.data"));
            fs::write(&model, "old m").expect("written");
            fs::write(&data, "old data").expect("written");
            let part = Part::within(folder.path(), "m").expect("created");
            let mut part = std::mem::ManuallyDrop::new(part);
            let moves = [
                (model.clone(), part.file("1.old")),
                (data.clone(), part.file("0.old")),
                (part.file("m.data"), data.clone()),
                (part.file("m"), model.clone()),
            ];
            fs::write(part.file("m"), "new m").expect("written");
            fs::write(part.file("m.data"), "new data").expect("written");
            for (from, to) in &moves[..survived] {
                fs::rename(from, to).expect("moved");
            }
            // The lock goes, as with the process that held it.
            part._lock = None;
            drop(Part::within(folder.path(), "m").expect("created"));
            let when = if survived == 4 { "new" } else { "old" };
            assert_eq!(text(&model), format!("{when} m"), "{survived}");
            assert_eq!(text(&data), format!("{when} data"), "{survived}");
            assert_eq!(names(folder.path()), 2);
        }
    }

    #[test]
    fn what_a_killed_run_left_goes_with_the_next() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut killed =
            std::mem::ManuallyDrop::new(Part::within(folder.path(), "t").expect("created"));
        fs::write(killed.file("t"), "half of it").expect("written");
        let other = folder.path().join(".t.x.part");
        fs::create_dir(&other).expect("made");
        // It lives: the next run leaves it alone.
        drop(Part::within(folder.path(), "t").expect("created"));
        assert_eq!(text(&killed.file("t")), "half of it");
        killed._lock = None;
        let unlocked = folder.path().join(".t.1-0.part");
        fs::create_dir(&unlocked).expect("made");
        drop(Part::within(folder.path(), "u").expect("created"));
        assert_eq!(text(&killed.file("t")), "half of it", "of another target");
        drop(Part::within(folder.path(), "t").expect("created"));
        assert!(!killed.folder.exists());
        assert!(!unlocked.exists(), "killed before it had a lock");
        assert!(other.exists(), "nobody made it here");
    }

    /// At every moment an interruption has to wait, and the older data is somewhere; the older model is
    /// never beside the newer data.
    #[test]
    fn two_files_are_replaced_at_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let (model, data) = (folder.path().join("m"), folder.path().join("m.data"));
        fs::write(&model, "old m").expect("written");
        fs::write(&data, "old data").expect("written");
        let part = Part::within(folder.path(), "m").expect("created");
        for name in ["m", "m.data"] {
            fs::write(part.file(name), format!("new {name}")).expect("written");
        }
        let files = [
            (part.file("m.data"), data.clone()),
            (part.file("m"), model.clone()),
        ];
        let aside = part.file("0.old");
        let mut moments = 0;
        part.replace_while(&files, || {
            assert!(UNFINISHED.try_lock().is_err(), "an interruption waits");
            let here = fs::read_to_string(&data).ok();
            assert!(here.as_deref() == Some("old data") || text(&aside) == "old data");
            let is_mixed = fs::read_to_string(&model).is_ok_and(|m| m == "old m");
            assert!(!is_mixed || here.as_deref() == Some("old data"));
            moments += 1;
        })
        .expect("replaced");
        assert_eq!(moments, 4);
        assert_eq!(
            (text(&model), text(&data)),
            ("new m".into(), "new m.data".into())
        );
        assert_eq!(names(folder.path()), 2);
    }

    #[test]
    fn where_one_cannot_be_replaced_the_other_is_as_it_was() {
        for old in [None, Some("old")] {
            let folder = tempfile::tempdir().expect("a folder");
            let (model, data) = (folder.path().join("none/m"), folder.path().join("m.data"));
            if let Some(text) = old {
                fs::write(&data, text).expect("written");
            }
            let part = Part::within(folder.path(), "m").expect("created");
            fs::write(part.file("m.data"), "new").expect("written");
            fs::write(part.file("m"), "new").expect("written");
            let files = [(part.file("m.data"), data.clone()), (part.file("m"), model)];
            part.replace(&files).expect_err("there is no such folder");
            assert_eq!(fs::read_to_string(&data).ok().as_deref(), old);
            assert_eq!(names(folder.path()), usize::from(old.is_some()));
        }
    }
}
