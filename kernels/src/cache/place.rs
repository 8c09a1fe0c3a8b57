//! Whether a folder may hold compiled code: whose it is, who else can write to it, whether its disk has room
//! and lets code run.
//!
//! Whoever can write an entry decides what runs in the process that loads it. So the folder and everything in
//! it belong to this user (or the system's), and nobody else can write there.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

/// Room that a disk must have left: a few large kernel libraries.
const LEAST_FREE_BYTES: u64 = 8 << 20;
const WRITABLE_BY_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// Creates a folder and those above it that only this user may enter; one that exists stays as it is.
pub(super) fn create(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Takes from others the right to write to a folder of this user's own.
pub(super) fn close_to_others(folder: &Path) {
    let Ok(found) = fs::symlink_metadata(folder) else {
        return;
    };
    if found.is_dir() && found.uid() == user() && found.mode() & WRITABLE_BY_OTHERS != 0 {
        let closed = fs::Permissions::from_mode(found.mode() & 0o7777 & !WRITABLE_BY_OTHERS);
        // Where it does not succeed, the folder is refused afterwards.
        let _ = fs::set_permissions(folder, closed);
    }
}

/// Refuses a folder above the entries that others could exchange. In one with the sticky bit, such as `/tmp`,
/// they cannot rename what is not theirs.
pub(super) fn check_above(folder: &Path) -> io::Result<()> {
    check(folder, fs::metadata(folder)?, true)
}

/// Refuses a folder of entries that is another user's or that others can write to, and a link.
pub(super) fn check_own(folder: &Path) -> io::Result<()> {
    check(folder, fs::symlink_metadata(folder)?, false)
}

fn check(folder: &Path, found: Metadata, sticky_will_do: bool) -> io::Result<()> {
    let refuse = |why: &str| {
        let text = format!("{} {why}", folder.display());
        Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
    };
    if !found.is_dir() {
        return refuse("is not a folder");
    }
    if !is_trusted_owner(found.uid()) {
        return refuse("belongs to another user");
    }
    let is_sticky = sticky_will_do && found.mode() & STICKY != 0;
    if found.mode() & WRITABLE_BY_OTHERS != 0 && !is_sticky {
        return refuse("can be written to by other users (`chmod go-w` it)");
    }
    Ok(())
}

/// Whether an entry is a file of this user's that nobody else can write to.
pub(super) fn is_own_entry(found: &Metadata) -> bool {
    found.is_file() && is_trusted_owner(found.uid()) && found.mode() & WRITABLE_BY_OTHERS == 0
}

fn is_trusted_owner(uid: u32) -> bool {
    uid == 0 || uid == user()
}

fn user() -> u32 {
    // SAFETY: a plain query that cannot fail.
    unsafe { libc::geteuid() }
}

/// Refuses a folder on a disk that is full or forbids execution.
#[allow(clippy::unnecessary_cast)] // The fields' widths differ from system to system.
pub(super) fn check_disk(folder: &Path) -> io::Result<()> {
    let path = CString::new(folder.as_os_str().as_bytes())?;
    let mut found = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the path ends with a zero byte, and the system fills what `found` has room for.
    let found = match unsafe { libc::statvfs(path.as_ptr(), found.as_mut_ptr()) } {
        // SAFETY: it was filled.
        0 => unsafe { found.assume_init() },
        _ => return Err(io::Error::last_os_error()),
    };
    let (flags, no_execution, free) = (
        found.f_flag as u64,
        libc::ST_NOEXEC as u64,
        (found.f_bavail as u64).saturating_mul(found.f_frsize as u64),
    );
    judge_disk(flags & no_execution != 0, free)
}

/// [`check_disk`] without asking the system.
fn judge_disk(forbids_execution: bool, free_bytes: u64) -> io::Result<()> {
    if forbids_execution {
        let text = "its disk forbids execution";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    if free_bytes < LEAST_FREE_BYTES {
        let text = format!("its disk is full: {free_bytes} bytes are left");
        return Err(io::Error::new(io::ErrorKind::StorageFull, text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_mode(folder: &Path, mode: u32) {
        fs::set_permissions(folder, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        for (mode, own, above) in [
            (0o700, true, true),
            (0o755, true, true),
            (0o775, false, false),
            (0o757, false, false),
            (0o1777, false, true),
        ] {
            with_mode(path, mode);
            assert_eq!(check_own(path).is_ok(), own, "{mode:o}");
            assert_eq!(check_above(path).is_ok(), above, "{mode:o}");
        }
        with_mode(path, 0o775);
        close_to_others(path);
        check_own(path).unwrap();
        let link = path.join("link");
        std::os::unix::fs::symlink(path, &link).unwrap();
        assert!(check_own(&link).is_err());
        assert!(is_trusted_owner(user()) && !is_trusted_owner(user() + 12345));
    }

    #[test]
    fn full_disks_and_those_that_forbid_execution_are_refused() {
        judge_disk(false, LEAST_FREE_BYTES).unwrap();
        let full = judge_disk(false, LEAST_FREE_BYTES - 1).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        let forbidden = judge_disk(true, u64::MAX).unwrap_err().to_string();
        assert!(forbidden.contains("forbids execution"), "{forbidden}");
        check_disk(tempfile::tempdir().unwrap().path()).unwrap();
    }
}
