//! What is removed from a cache folder: entries beyond the limit, and what processes that died left behind.
//!
//! Only files with the place and the name that this room gives them are looked at. Whatever else a user keeps in
//! or around the folder stays, and does not count.

use std::fs::{self, DirEntry};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::{Cache, EntryKind, FORMAT_VERSION};

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

/// Number and bytes of the entries, of this and of older versions of the format.
pub(super) fn contents(cache: &Cache) -> (usize, u64) {
    let kept = entries(cache);
    (kept.len(), kept.iter().map(|entry| entry.bytes).sum())
}

/// Removes all entries; gives how many were removed, with their bytes. Best effort, as [`trim`].
pub(super) fn clear(cache: &Cache) -> (usize, u64) {
    let removed = entries(cache)
        .into_iter()
        .filter(|entry| fs::remove_file(&entry.path).is_ok());
    removed.fold((0, 0), |(n, bytes), entry| (n + 1, bytes + entry.bytes))
}

fn entries(cache: &Cache) -> Vec<Entry> {
    let mut kept = Vec::new();
    for version in 1..=FORMAT_VERSION {
        collect(&cache.root.with_file_name(format!("v{version}")), &mut kept);
    }
    kept
}

/// Removes the entries unused for longest, of this and of older versions of the format, until the rest fits the
/// limit. Best effort: another process may be doing the same.
pub(super) fn trim(cache: &Cache) {
    for version in 1..=FORMAT_VERSION {
        let base = cache.root.with_file_name(format!("v{version}"));
        remove_stale(&base.join("work"), |name, is_folder| {
            name.starts_with(if is_folder { WORKING } else { PARTIAL })
        });
    }
    let mut kept = entries(cache);
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
    for kind in EntryKind::ALL {
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
        // For a link, this is the metadata of the link itself.
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

/// Removes old things directly below a folder that are, by their names, unfinished files or folders of Shorthaul.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Key;
    use std::os::unix::fs::PermissionsExt;

    /// Sets its times as if nobody had touched it for two days.
    fn make_old(path: &Path) {
        let then = SystemTime::now() - 2 * STALE_AFTER;
        fs::File::open(path).unwrap().set_modified(then).unwrap();
    }

    #[test]
    fn trimming_removes_nothing_of_a_users_own() {
        let folder = tempfile::tempdir().unwrap();
        // A folder called `work` above the cache means nothing.
        let cache = Cache::at(&folder.path().join("work").join("cache"), 0).unwrap();
        let root = cache.root();
        let entry = cache
            .write(EntryKind::Library, &Key::new(&["made here"]), b"x")
            .unwrap();
        let group = entry.parent().unwrap();
        let outside = folder.path().join("checkpoint.bin");
        fs::write(&outside, "mine").unwrap();
        fs::create_dir(root.join("mine")).unwrap();
        fs::create_dir_all(root.join("work").join("mine")).unwrap();
        let own = [
            root.join("mine").join("checkpoint.bin"),
            root.join("work").join("notes.txt"),
            root.join("work").join("mine").join("kernel.c"),
            root.join("lib").join("model.so"),
            group.join("model.so"),
            root.with_file_name("notes.txt"),
        ];
        for file in &own {
            fs::write(file, "mine").unwrap();
            make_old(file);
        }
        let name = entry.file_name().unwrap();
        let linked = root.join("lib").join("zz");
        std::os::unix::fs::symlink(folder.path(), linked).unwrap();
        let link = root.join("lib").join("00");
        fs::create_dir_all(&link).unwrap();
        std::os::unix::fs::symlink(&outside, link.join(name)).unwrap();
        assert_eq!(cache.contents().0, 1);
        cache.trim();
        assert!(!entry.exists(), "an entry beyond the limit stays");
        cache
            .write(EntryKind::Library, &Key::new(&["made here"]), b"x")
            .unwrap();
        assert_eq!(cache.clear().0, 1);
        assert!(!entry.exists(), "an entry stays when the cache is cleared");
        assert_eq!(cache.contents(), (0, 0));
        for file in own.iter().chain([&outside, &link.join(name)]) {
            assert!(file.exists(), "{} is gone", file.display());
        }
    }

    #[test]
    fn an_entry_that_others_could_have_written_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path(), 1 << 30).unwrap();
        let key = Key::new(&["entry"]);
        let entry = cache.write(EntryKind::Library, &key, b"payload").unwrap();
        let read = || cache.read(EntryKind::Library, &key);
        let allow = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        assert!(read().is_some());
        allow(&entry, 0o666);
        assert_eq!(read(), None, "everybody can write it");
        allow(&entry, 0o600);
        allow(entry.parent().unwrap(), 0o777);
        assert_eq!(read(), None, "everybody can replace it");
        allow(entry.parent().unwrap(), 0o700);
        assert!(read().is_some());
        let elsewhere = folder.path().join("elsewhere");
        fs::rename(&entry, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &entry).unwrap();
        assert_eq!(read(), None, "it is a link");
        allow(cache.root(), 0o770);
        let refused = Cache::at(folder.path(), 1 << 30).unwrap_err().to_string();
        assert!(refused.contains("chmod go-w"), "{refused}");
    }
}
