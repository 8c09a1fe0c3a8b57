//! A model as a file: read whole, written whole or not at all.
//!
//! Owns bytes on disk. What a reader gives is what was there at one time: a file that changes while it
//! is read is an error, and what is no file, such as a pipe, is read once. A target is replaced by
//! renaming a finished file beside it, so that it is either the old or the new one whatever happens.

mod damage;
mod links;
mod part;
mod staged;
mod stamps;
mod stored_tensors;
mod target;
mod write;

pub use links::settle;
pub use part::{abandon, on_abandon};
pub use staged::{Staged, Written};
pub use stamps::Stamps;
pub use write::{WriteError, encoded, stage, stage_bytes, write};

use crate::proto::ModelProto;
use bytes::Bytes;
use prost::Message;
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The newest version of the file format that is known here; fields of newer ones would be lost.
pub const NEWEST_IR: i64 = 14;

/// Why a file gives no model.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The file is something else.
    #[error("{} is not an ONNX file: {found}", path.display())]
    NotOnnx {
        /// The file.
        path: PathBuf,
        /// What it seems to be, and what to do.
        found: String,
    },
    /// The file is truncated or corrupted.
    #[error("{} is damaged: {place}: {detail}; copy or export the model again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Byte offset and field.
        place: String,
        /// What is wrong there.
        detail: String,
    },
    /// Somebody writes the file at this moment.
    #[error("{} changed while it was read; try again when it is complete", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
}

/// A model and where it comes from.
#[derive(Clone, Debug)]
pub struct Model {
    /// Everything in the file.
    pub proto: ModelProto,
    /// The file.
    pub path: PathBuf,
    /// Its size in bytes, without external data.
    pub n_bytes: usize,
    /// The folder in which external data is looked for.
    pub folder: Arc<Path>,
    /// What the files of its external data were when it was read.
    pub stamps: Stamps,
}

impl Model {
    /// Reads a file. Tensors stay slices of its bytes; external data is not read.
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn read(path: impl AsRef<Path>) -> Result<Model, FileError> {
        let path = path.as_ref();
        Model::of_bytes(path, read_whole(path)?)
    }

    /// A model from the bytes of a file; `path` is for messages and to find external data beside it.
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn of_bytes(path: &Path, bytes: Bytes) -> Result<Model, FileError> {
        let n_bytes = bytes.len();
        let mut proto = decode(path, bytes)?;
        let folder: Arc<Path> = Arc::from(settle(path, &mut proto));
        let stamps = Stamps::new(&proto, &folder);
        Ok(Model {
            stamps,
            proto,
            path: path.to_path_buf(),
            n_bytes,
            folder,
        })
    }

    /// The file and those of its external data.
    pub fn files(&self) -> Vec<&Path> {
        let own = std::iter::once(self.path.as_path());
        own.chain(self.stamps.files()).collect()
    }

    /// Returns the file with another model in it.
    pub fn with(&self, proto: ModelProto) -> Model {
        Model {
            proto,
            ..self.clone()
        }
    }
}

/// The folder a file is in.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// All bytes of a file.
///
/// # Errors
/// It cannot be read, or changed meanwhile.
pub fn read_whole(path: &Path) -> Result<Bytes, FileError> {
    read_while(path, || ())
}

/// Reads a file; `meanwhile` happens after its bytes were read and before it is looked at again.
fn read_while(path: &Path, meanwhile: impl FnOnce()) -> Result<Bytes, FileError> {
    let failed = |error| FileError::Read {
        path: path.to_path_buf(),
        error,
    };
    let stamp = |m: Metadata| (m.len(), m.modified().ok());
    let found = std::fs::metadata(path).map_err(failed)?;
    let bytes = std::fs::read(path).map_err(failed)?;
    meanwhile();
    // A pipe gives what it gives, once.
    if !found.is_file() {
        return Ok(Bytes::from(bytes));
    }
    let before = stamp(found);
    let after = stamp(std::fs::metadata(path).map_err(failed)?);
    if before != after || bytes.len() as u64 != after.0 {
        return Err(FileError::Changed {
            path: path.to_path_buf(),
        });
    }
    Ok(Bytes::from(bytes))
}

/// The message in a file's bytes, which has a version and a graph.
///
/// # Errors
/// [`FileError::NotOnnx`], [`FileError::Damaged`].
pub fn decode(path: &Path, bytes: Bytes) -> Result<ModelProto, FileError> {
    let path = path.to_path_buf();
    if let Some(found) = damage::foreign(&bytes) {
        return Err(FileError::NotOnnx { path, found });
    }
    let model = match ModelProto::decode(bytes.clone()) {
        Ok(model) => model,
        Err(error) => return Err(damage::undecodable(path, &bytes, &error)),
    };
    if model.ir_version.is_none() || model.graph.is_none() {
        let found = "it has no `ir_version` or no `graph`; give a file written by \
                     `torch.onnx.export` or `onnx.save`";
        return Err(FileError::NotOnnx {
            path,
            found: found.to_string(),
        });
    }
    Ok(model)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::io::Write;

    #[test]
    fn a_file_that_changes_while_it_is_read_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("m.onnx");
        std::fs::write(&path, "model").expect("written");
        assert_eq!(read_whole(&path).expect("read"), "model");
        let append = || {
            let mut file = OpenOptions::new().append(true).open(&path).expect("opened");
            file.write_all(b" and more").expect("written");
        };
        let changed = read_while(&path, append).expect_err("changed");
        assert!(matches!(changed, FileError::Changed { .. }), "{changed}");
        let made = std::process::Command::new("mkfifo")
            .arg(folder.path().join("pipe"))
            .status();
        assert!(made.expect("mkfifo starts").success());
        let pipe = folder.path().join("pipe");
        let writer = std::thread::spawn(move || std::fs::write(pipe, "piped"));
        let piped = read_whole(&folder.path().join("pipe")).expect("read");
        assert_eq!(piped, "piped");
        writer.join().expect("joined").expect("written");
        let goes = read_while(&path, || std::fs::remove_file(&path).expect("removed"));
        assert!(matches!(goes, Err(FileError::Read { .. })));
    }
}
