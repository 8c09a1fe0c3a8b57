//! Finished files that are not in their place yet.
//!
//! Whatever can fail, such as measuring them, can come between writing them and replacing what is there.

use super::WriteError;
use super::part::Part;
use super::target::{Destination, take_after};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Bytes of the file itself.
    pub n_bytes: u64,
    /// Bytes of the external data beside it.
    pub n_external: u64,
}

/// A file, with its external data, that is complete but not in its place. It goes when this is dropped,
/// and the target stays as it was.
#[derive(Debug)]
#[must_use]
pub struct Staged {
    part: Part,
    /// The target as it was given.
    path: PathBuf,
    target: Destination,
    /// The name of the file until then, and the target's own.
    name: String,
    /// The external data's name and place, if there is some.
    data: Option<(String, PathBuf)>,
    pub(super) written: Written,
}

impl Staged {
    /// Nothing yet: [`Staged::path`] is where to write.
    pub(super) fn empty(path: &Path) -> io::Result<Staged> {
        let target = Destination::new(path)?;
        let elsewhere = std::env::temp_dir();
        let (place, folder) = match &target {
            // Beside the target, so that it can be renamed.
            Destination::File(file) => (file, super::folder_of(file)),
            Destination::Stream(stream) => (stream, elsewhere.as_path()),
        };
        let name = place.file_name().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        Ok(Staged {
            part: Part::within(folder, &name)?,
            path: path.to_path_buf(),
            target,
            name,
            data: None,
            written: Written::default(),
        })
    }

    /// Where the file is until it is in its place; its external data is beside it.
    pub fn path(&self) -> PathBuf {
        self.part.file(&self.name)
    }

    /// How many bytes were written.
    pub fn written(&self) -> Written {
        self.written
    }

    /// The name that external data has beside the file.
    pub(super) fn data_name(&self) -> String {
        format!("{}.data", self.name)
    }

    /// Gives the file external data. Returns the path to write the data to, and its final place.
    ///
    /// # Errors
    /// Readers would not find the data beside that target, or its own place is taken.
    pub(super) fn with_data(&mut self) -> io::Result<(PathBuf, PathBuf)> {
        let Destination::File(file) = &self.target else {
            return Err(io::Error::other(
                "its elements are in a file beside it, so it needs to be a file as well",
            ));
        };
        let folder = |path: &Path| super::folder_of(path).canonicalize();
        if folder(&self.path)? != folder(file)? {
            return Err(io::Error::other(format!(
                "it is a link to {}, and its external data would not be found beside the link; choose a \
                 target that is no link",
                file.display()
            )));
        }
        let name = self.data_name();
        let place = file.with_file_name(&name);
        let taken = |what| Err(io::Error::other(format!("{} is {what}", place.display())));
        match fs::symlink_metadata(&place) {
            Ok(found) if !found.is_file() => return taken("no regular file"),
            Ok(found) if found.permissions().readonly() => return taken("read-only"),
            _ => {}
        }
        let to = self.part.file(&name);
        self.data = Some((name, place.clone()));
        Ok((to, place))
    }

    /// Puts the file in its place: a file there is replaced, with its owner and permissions, a pipe or
    /// device is written to.
    ///
    /// # Errors
    /// [`WriteError::Target`]; a file that was there is as it was.
    pub fn place(self) -> Result<Written, WriteError> {
        let (path, written) = (self.path.clone(), self.written);
        match self.put() {
            Ok(()) => Ok(written),
            Err(error) => Err(WriteError::Target { path, error }),
        }
    }

    fn put(self) -> io::Result<()> {
        let from = self.path();
        let to = match self.target {
            Destination::File(to) => to,
            Destination::Stream(stream) => {
                let mut stream = File::options().write(true).open(stream)?;
                return io::copy(&mut File::open(from)?, &mut stream).map(drop);
            }
        };
        let old = fs::metadata(&to).ok();
        let mut files = Vec::new();
        if let Some((name, place)) = self.data {
            let from = self.part.file(&name);
            // New data of a model that others may not read is not for them either.
            let own = fs::metadata(&place).ok();
            take_after(&from, own.as_ref().or(old.as_ref()))?;
            files.push((from, place));
        }
        take_after(&from, old.as_ref())?;
        files.push((from, to));
        self.part.replace(&files)
    }
}
