//! What is removed from a cache folder: entries beyond the limit, and what processes that died left behind.
//!
//! Only files with the place and the name that this room gives them are looked at. Whatever else a user keeps in
//! or around the folder stays, and does not count.

use std::fs::{self, DirEntry};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::{Cache, FORMAT_VERSION, Kind};

/// Unfinished files older than this belong to a process that died.
const STALE_AFTER: Duration = Duration::from_secs(24 * 3600);

/// Beginning of the name of an entry that is being written.
pub(super) const PARTIAL: &str = ".partial-";
/// Beginning of the name of a folder that the compiler works in.
pub(super) const WORKING: &str = "compile-";

struct Entry {
    used: SystemTime,
    path: PathBuf,
    bytes: u64,
}

/// Removes the entries unused for longest, of this and of older versions of the format, until the rest fits the
/// limit. Best effort: another process may be doing the same.
pub(super) fn trim(cache: &Cache) {
    let mut kept = Vec::new();
    for version in 1..=FORMAT_VERSION {
        let base = cache.root.with_file_name(format!("v{version}"));
        collect(&base, &mut kept);
        remove_stale(&base.join("work"), |name, is_folder| {
            name.starts_with(if is_folder { WORKING } else { PARTIAL })
        });
    }
    let mut total: u64 = kept.iter().map(|entry| entry.bytes).sum();
    kept.sort_by(|a, b| (a.used, &a.path).cmp(&(b.used, &b.path)));
    for entry in kept {
        if total <= cache.limit_bytes {
            break;
        }
        if fs::remove_file(&entry.path).is_ok() {
            total -= entry.bytes;
        }
    }
}

/// The entries below the folder of one version, and the sources that compilers refused.
fn collect(base: &Path, kept: &mut Vec<Entry>) {
    for kind in Kind::ALL {
        for group in listing(&base.join(kind.folder())) {
            if !(is_folder(&group) && is_hex(&name_of(&group), 2)) {
                continue;
            }
            remove_stale(&group.path(), |name, is_folder| {
                !is_folder && name.starts_with(PARTIAL)
            });
            let is_entry = |name: &str| {
                let stem = name.strip_suffix(kind.extension());
                stem.and_then(|stem| stem.strip_suffix('.'))
                    .is_some_and(|stem| is_hex(stem, 62))
            };
            collect_files(&group.path(), is_entry, kept);
        }
    }
    let is_refused = |name: &str| {
        let stem = name.strip_suffix(".c");
        let key = stem.and_then(|stem| stem.rsplit_once('-'));
        key.is_some_and(|(_, key)| is_hex(key, 12))
    };
    collect_files(&base.join("failed"), is_refused, kept);
}

fn collect_files(folder: &Path, is_ours: impl Fn(&str) -> bool, kept: &mut Vec<Entry>) {
    for item in listing(folder) {
        // Of the link itself, where it is one.
        let Ok(found) = item.metadata() else { continue };
        if found.is_file() && is_ours(&name_of(&item)) {
            kept.push(Entry {
                used: found.modified().unwrap_or(SystemTime::UNIX_EPOCH),
                path: item.path(),
                bytes: found.len(),
            });
        }
    }
}

/// Removes what is old directly below a folder and, by its name, an unfinished thing of ours.
fn remove_stale(folder: &Path, is_ours: impl Fn(&str, bool) -> bool) {
    let now = SystemTime::now();
    for item in listing(folder) {
        let Ok(found) = item.metadata() else { continue };
        let age = found
            .modified()
            .ok()
            .and_then(|time| now.duration_since(time).ok());
        let is_stale = age.is_some_and(|age| age > STALE_AFTER);
        if !is_stale || !is_ours(&name_of(&item), found.is_dir()) {
            continue;
        }
        let _ = match found.is_dir() {
            true => fs::remove_dir_all(item.path()),
            false => fs::remove_file(item.path()),
        };
    }
}

fn listing(folder: &Path) -> Vec<DirEntry> {
    let is_link = fs::symlink_metadata(folder).is_ok_and(|found| found.is_symlink());
    match fs::read_dir(folder) {
        Ok(items) if !is_link => items.flatten().collect(),
        _ => Vec::new(),
    }
}

fn name_of(item: &DirEntry) -> String {
    item.file_name().to_string_lossy().into_owned()
}

fn is_folder(item: &DirEntry) -> bool {
    item.file_type().is_ok_and(|kind| kind.is_dir())
}

fn is_hex(text: &str, n_digits: usize) -> bool {
    let is_digit = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
    text.len() == n_digits && text.bytes().all(is_digit)
}
