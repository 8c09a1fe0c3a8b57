//! What tuning has learned on this machine: how long one way to compute takes beside another.
//!
//! Owns the file in the cache folder, which the Python package reads and writes too (`_tuning_database.py`). An entry
//! names two lists of kernels by their keys, so it holds for every network that has such kernels. Processes that write
//! take turns by a lock on a file beside it. Never times anything.

use kernels::features::cpu_identity;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The form of the file.
const FORMAT: u32 = 1;
/// Most bytes of a list of keys that is a name as it is. A longer one is replaced by a digest.
const LONGEST_NAME: usize = 24;

#[derive(Serialize, Deserialize)]
struct File {
    format: u32,
    ratios: BTreeMap<String, f64>,
}

/// Ratios by the keys of what is replaced and of what replaces it.
#[derive(Debug)]
pub struct Database {
    path: PathBuf,
    /// Entries of earlier runs.
    before: BTreeMap<String, f64>,
    ratios: BTreeMap<String, f64>,
    used: BTreeSet<String>,
}

impl Database {
    /// Reads a file, which may not exist yet. If it cannot be read, there is a sentence about it; a damaged one is set
    /// aside.
    pub fn open(path: &Path) -> (Database, Option<String>) {
        let (before, warning) = match read(path) {
            Ok(Content::Ratios(ratios)) => (ratios, None),
            Ok(Content::Damaged(_)) => read_or_set_aside(path),
            Err(error) => (BTreeMap::new(), Some(unreadable(path, &error))),
        };
        let database = Database {
            path: path.to_path_buf(),
            ratios: before.clone(),
            before,
            used: BTreeSet::new(),
        };
        (database, warning)
    }

    /// Entries of earlier runs that served this one.
    pub fn n_used(&self) -> usize {
        self.used.len()
    }

    /// How many times as long `new` takes as `old`, if that is known.
    pub fn ratio(&mut self, old: &[String], new: &[String]) -> Option<f64> {
        let name = name(old, new);
        if self.before.contains_key(&name) {
            self.used.insert(name.clone());
        }
        self.ratios.get(&name).copied()
    }

    /// Adds an entry and writes the file, with what other processes have added meanwhile. If the file was damaged
    /// meanwhile, it is set aside, and there is a sentence about it. A ratio that is no number teaches nothing.
    ///
    /// # Errors
    /// The file cannot be read, locked or written.
    pub fn learn(
        &mut self,
        old: &[String],
        new: &[String],
        ratio: f64,
    ) -> io::Result<Option<String>> {
        if !ratio.is_finite() {
            return Ok(None);
        }
        let ratio = (ratio * 1e4).round() / 1e4;
        self.ratios.insert(name(old, new), ratio);
        let _turn = locked(&self.path)?;
        let (mut ratios, warning) = match read(&self.path)? {
            Content::Ratios(ratios) => (ratios, None),
            Content::Damaged(why) => (BTreeMap::new(), Some(set_aside(&self.path, &why))),
        };
        ratios.extend(self.ratios.clone());
        self.ratios.clone_from(&ratios);
        let file = File {
            format: FORMAT,
            ratios,
        };
        write_whole(&self.path, &serde_json::to_string(&file)?)?;
        Ok(warning)
    }
}

/// The name of this CPU among those that share a cache folder: its model, features and number of threads.
pub fn machine_key() -> String {
    let text = format!("{}\n{}", cpu_identity(), n_online());
    hex(&text, 8)
}

/// A file in the cache folder for this CPU alone.
pub fn file_of_this_machine(folder: &Path, kind: &str) -> PathBuf {
    folder.join(format!("{kind}-{}.json", machine_key()))
}

/// Processors of the machine, however many of them this process may use.
fn n_online() -> usize {
    let text = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let count = |range: &str| -> Option<usize> {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        last.checked_sub(first).map(|n| n + 1)
    };
    let counts: Option<Vec<usize>> = text.trim().split(',').map(count).collect();
    let known = counts.map(|counts| counts.iter().sum());
    known.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

fn name(old: &[String], new: &[String]) -> String {
    let list = |keys: &[String]| {
        let mut sorted = keys.to_vec();
        sorted.sort();
        let text = sorted.join(",");
        match text.len() <= LONGEST_NAME {
            true => text,
            false => hex(&text, LONGEST_NAME / 2),
        }
    };
    format!("{}>{}", list(old), list(new))
}

/// The first `n_bytes` bytes of a text's digest, in hexadecimal.
fn hex(text: &str, n_bytes: usize) -> String {
    let digest = Sha256::digest(text);
    digest[..n_bytes]
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

/// What a file holds.
enum Content {
    Ratios(BTreeMap<String, f64>),
    /// It is no database, for this reason.
    Damaged(String),
}

/// Reads a file; one that does not exist holds nothing yet.
fn read(path: &Path) -> io::Result<Content> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => {
            return match error.kind() {
                io::ErrorKind::NotFound => Ok(Content::Ratios(BTreeMap::new())),
                io::ErrorKind::InvalidData => Ok(Content::Damaged(error.to_string())),
                _ => Err(error),
            };
        }
    };
    Ok(match serde_json::from_str::<File>(&text) {
        Ok(file) if file.format == FORMAT => Content::Ratios(file.ratios),
        Ok(file) => Content::Damaged(format!("format {}, not {FORMAT}", file.format)),
        Err(error) => Content::Damaged(error.to_string()),
    })
}

/// Reads a file that was damaged when it was first read; sets it aside if no other process has done so meanwhile.
fn read_or_set_aside(path: &Path) -> (BTreeMap<String, f64>, Option<String>) {
    let under_lock = locked(path).and_then(|turn| Ok((turn, read(path)?)));
    match under_lock {
        Ok((_turn, Content::Ratios(ratios))) => (ratios, None),
        Ok((_turn, Content::Damaged(why))) => (BTreeMap::new(), Some(set_aside(path, &why))),
        Err(error) => (BTreeMap::new(), Some(unreadable(path, &error))),
    }
}

/// Waits until no other process writes the database. The lock ends when the file is dropped.
fn locked(path: &Path) -> io::Result<fs::File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let lock = path.with_extension("lock");
    // Appending makes the file if there is none, and changes nothing.
    let lock = fs::File::options().create(true).append(true).open(lock)?;
    lock.lock()?;
    Ok(lock)
}

fn unreadable(path: &Path, error: &io::Error) -> String {
    format!(
        "{} cannot be read ({error}); tuning starts from nothing",
        path.display()
    )
}

/// Moves a damaged file out of the way. Returns what to tell about it.
fn set_aside(path: &Path, why: &str) -> String {
    let aside = path.with_extension("damaged");
    let lies = match fs::rename(path, &aside) {
        Ok(()) => format!("; it now lies at {}", aside.display()),
        Err(_) => String::new(),
    };
    format!(
        "{} is not a tuning database ({why}){lies}; tuning starts from nothing",
        path.display()
    )
}

/// Writes a file so that a reader sees the old or the new text, never a part.
fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let staged = path.with_extension(format!("{}.new", std::process::id()));
    let written = fs::write(&staged, text).and_then(|()| fs::rename(&staged, path));
    if written.is_err() {
        // What was staged may not even be there.
        let _ = fs::remove_file(&staged);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::{Database, file_of_this_machine};
    use std::collections::BTreeSet;
    use std::ffi::OsString;
    use std::fs;

    fn keys(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_was_learned_is_there_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made/tuning.json");
        let (mut first, warning) = Database::open(&path);
        assert_eq!(warning, None);
        assert_eq!(first.ratio(&keys(&["a"]), &keys(&["b"])), None);
        first
            .learn(&keys(&["a"]), &keys(&["b"]), 0.512_345)
            .unwrap();
        assert_eq!(first.ratio(&keys(&["a"]), &keys(&["b"])), Some(0.5123));
        assert_eq!(first.n_used(), 0, "it is no entry of an earlier run");
        // Another process adds to the file meanwhile; the order of keys does not matter.
        let (mut second, _) = Database::open(&path);
        let long = keys(&["a key of a kernel", "a key of another"]);
        second.learn(&long, &keys(&["c"]), 2.0).unwrap();
        first.learn(&keys(&["a"]), &keys(&["d"]), 1.0).unwrap();
        let (mut third, _) = Database::open(&path);
        let turned: Vec<String> = long.iter().rev().cloned().collect();
        assert_eq!(third.ratio(&turned, &keys(&["c"])), Some(2.0));
        assert_eq!(third.ratio(&keys(&["a"]), &keys(&["d"])), Some(1.0));
        assert_eq!(third.n_used(), 2);
        let names = fs::read_dir(path.parent().unwrap()).unwrap();
        let names: BTreeSet<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        let expected = ["tuning.json", "tuning.lock"].map(OsString::from);
        assert_eq!(names, expected.into(), "no staged file is left");
    }

    #[test]
    fn no_answer_of_writers_at_the_same_time_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tuning.json");
        let (n_writers, n_answers) = (8, 25);
        let write = |writer: usize| {
            for answer in 0..n_answers {
                let (mut database, _) = Database::open(&path);
                let new = [format!("{writer}.{answer}")];
                database.learn(&keys(&["a"]), &new, 0.5).unwrap();
            }
        };
        std::thread::scope(|scope| {
            (0..n_writers).for_each(|writer| drop(scope.spawn(move || write(writer))));
        });
        let (mut database, warning) = Database::open(&path);
        assert_eq!(warning, None);
        for writer in 0..n_writers {
            for answer in 0..n_answers {
                let new = format!("{writer}.{answer}");
                let known = database.ratio(&keys(&["a"]), std::slice::from_ref(&new));
                assert_eq!(known, Some(0.5), "{new}");
            }
        }
    }

    #[test]
    fn a_ratio_that_is_no_number_does_not_damage_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tuning.json");
        let (mut database, _) = Database::open(&path);
        database.learn(&keys(&["a"]), &keys(&["b"]), 0.5).unwrap();
        for (new, ratio) in [("c", f64::INFINITY), ("d", f64::NAN)] {
            database.learn(&keys(&["a"]), &keys(&[new]), ratio).unwrap();
        }
        let (mut again, warning) = Database::open(&path);
        assert_eq!(warning, None);
        assert_eq!(again.ratio(&keys(&["a"]), &keys(&["b"])), Some(0.5));
        assert_eq!(again.ratio(&keys(&["a"]), &keys(&["c"])), None);
    }

    #[test]
    fn a_file_that_cannot_be_read_stays_where_it_is() {
        let folder = tempfile::tempdir().unwrap();
        // A folder is no damaged file: reading it fails for another reason.
        let path = folder.path().join("tuning.json");
        fs::create_dir(&path).unwrap();
        let (mut database, warning) = Database::open(&path);
        let warning = warning.expect("a sentence");
        assert!(warning.contains("cannot be read ("), "{warning}");
        assert!(database.learn(&keys(&["a"]), &keys(&["b"]), 0.5).is_err());
        assert!(path.is_dir() && !path.with_extension("damaged").exists());
    }

    #[test]
    fn a_file_that_is_damaged_during_a_run_is_told_and_loses_nothing_of_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tuning.json");
        let (mut database, _) = Database::open(&path);
        let learned = database.learn(&keys(&["a"]), &keys(&["b"]), 0.5);
        assert_eq!(learned.unwrap(), None);
        fs::write(&path, [0xff, 0xfe]).unwrap();
        let warning = database.learn(&keys(&["a"]), &keys(&["c"]), 0.7).unwrap();
        assert!(warning.expect("a sentence").contains("it now lies at"));
        let (mut again, _) = Database::open(&path);
        assert_eq!(again.ratio(&keys(&["a"]), &keys(&["b"])), Some(0.5));
    }

    #[test]
    fn a_damaged_file_is_set_aside_with_one_sentence() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["{", "{\"format\": 7, \"ratios\": {}}", "[1]"] {
            let path = file_of_this_machine(folder.path(), "tuning");
            fs::write(&path, text).unwrap();
            let (mut database, warning) = Database::open(&path);
            let warning = warning.expect("a sentence");
            assert!(warning.contains("is not a tuning database ("), "{warning}");
            let aside = path.with_extension("damaged");
            assert!(warning.contains(&aside.display().to_string()));
            assert_eq!(fs::read_to_string(&aside).unwrap(), text);
            database.learn(&keys(&["a"]), &keys(&["b"]), 0.5).unwrap();
            assert_eq!(Database::open(&path).1, None);
        }
    }
}
