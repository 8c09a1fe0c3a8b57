//! Whether the files that hold a model's external data are still what they were.
//!
//! Owns lengths and times of change. A model is read, proven and written over minutes, and its weights
//! are read from disk each time: what is written has to be what was proven.

use crate::proto::{ModelProto, TensorProto};
use crate::stored::External;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Length and time of the last change of every file with external data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stamps {
    files: BTreeMap<PathBuf, (u64, Option<SystemTime>)>,
}

impl Stamps {
    /// The present stamps of a model's files. A file that cannot be found has none: reading it is an error of its own.
    pub fn new(model: &ModelProto, folder: &Path) -> Stamps {
        let mut files = BTreeMap::new();
        super::stored_tensors::each(model, &mut |tensor: &TensorProto| {
            if let Ok(Some(external)) = External::new(tensor, folder)
                && let Some(stamp) = stamp(&external.path)
            {
                files.entry(external.path).or_insert(stamp);
            }
        });
        Stamps { files }
    }

    /// The files.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.keys().map(PathBuf::as_path)
    }

    /// Bytes of the files together.
    pub fn n_bytes(&self) -> u64 {
        self.files.values().map(|(length, _)| length).sum()
    }

    /// A file that was changed or removed since, if there is one.
    pub fn changed(&self) -> Option<&Path> {
        let mut files = self.files.iter();
        let found = files.find(|(path, was)| stamp(path) != Some(**was))?;
        Some(found.0)
    }
}

fn stamp(path: &Path) -> Option<(u64, Option<SystemTime>)> {
    let metadata = path.metadata().ok()?;
    Some((metadata.len(), metadata.modified().ok()))
}
