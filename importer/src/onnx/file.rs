//! Reading a file: bytes to messages, with damage located and the operator set's version checked.
//!
//! This file never looks at operators.

use super::error::{NEWEST_OPSET, OLDEST_OPSET, OnnxError};
use super::proto::{Dimension, DimensionProto, GraphProto, ModelProto, ValueInfoProto};
use super::tensor::dtype_of;
use bytes::Bytes;
use prost::Message;
use std::path::{Path, PathBuf};

/// A decoded ONNX file.
#[derive(Clone, Debug)]
pub struct File {
    path: PathBuf,
    n_bytes: usize,
    opset: i64,
    producer: String,
    functions: Vec<(String, String)>,
    pub(super) graph: GraphProto,
}

impl File {
    /// Reads and decodes a file.
    ///
    /// # Errors
    /// It cannot be read, is not an ONNX file, is damaged, or uses another version of the operators.
    pub fn read(path: impl AsRef<Path>) -> Result<File, OnnxError> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|error| OnnxError::Read {
            path: path.to_path_buf(),
            error,
        })?;
        File::decode(path, Bytes::from(bytes))
    }

    /// Decodes the bytes of a file; `path` is for messages and to find external data beside it.
    ///
    /// # Errors
    /// As [`File::read`].
    pub fn decode(path: impl AsRef<Path>, bytes: Bytes) -> Result<File, OnnxError> {
        let path = path.as_ref().to_path_buf();
        if let Some(found) = foreign(&bytes) {
            return Err(OnnxError::NotOnnx { path, found });
        }
        let n_bytes = bytes.len();
        let model = match ModelProto::decode(bytes.clone()) {
            Ok(model) => model,
            Err(error) => return Err(undecodable(path, &bytes, &error)),
        };
        let (Some(_), Some(graph)) = (model.ir_version, model.graph) else {
            let found = "it has no `ir_version` or no `graph`; give a file written by \
                         `torch.onnx.export` or `onnx.save`";
            let found = found.to_string();
            return Err(OnnxError::NotOnnx { path, found });
        };
        let standard = |domain: &str| domain.is_empty() || domain == "ai.onnx";
        let opset = model
            .opset_import
            .iter()
            .find(|entry| standard(&entry.domain))
            .map_or(1, |entry| entry.version);
        if !(OLDEST_OPSET..=NEWEST_OPSET).contains(&opset) {
            return Err(OnnxError::OpsetVersion { path, found: opset });
        }
        let producer = format!("{} {}", model.producer_name, model.producer_version);
        let functions = model.functions.into_iter().map(|f| (f.domain, f.name));
        Ok(File {
            path,
            n_bytes,
            opset,
            producer: producer.trim().to_string(),
            functions: functions.collect(),
            graph,
        })
    }

    /// Where it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes, without external data.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Version of the standard's operator set.
    pub fn opset(&self) -> i64 {
        self.opset
    }

    /// Program that wrote it, with version; may be empty.
    pub fn producer(&self) -> &str {
        &self.producer
    }

    /// Inputs as the file declares them, without initializers.
    pub fn inputs(&self) -> Vec<Declared> {
        let stored = |name: &str| self.graph.initializer.iter().any(|t| t.name == name);
        let given = self.graph.input.iter().filter(|info| !stored(&info.name));
        given.map(declared).collect()
    }

    /// Outputs as the file declares them.
    pub fn outputs(&self) -> Vec<Declared> {
        self.graph.output.iter().map(declared).collect()
    }

    /// Its initializers together, used or not.
    pub fn initializers(&self) -> Initializers {
        let elements = |dims: &[i64]| {
            dims.iter()
                .fold(1u64, |p, n| p.saturating_mul((*n).max(0) as u64))
        };
        let all = self.graph.initializer.iter();
        Initializers {
            n: all.len(),
            n_elements: all.fold(0, |sum, t| sum.saturating_add(elements(&t.dims))),
        }
    }

    /// Whether the model defines that operator as a function of its own.
    pub(super) fn defines(&self, domain: &str, name: &str) -> bool {
        self.functions.iter().any(|(d, n)| d == domain && n == name)
    }

    /// The folder in which external data is looked for.
    pub(super) fn folder(&self) -> &Path {
        match self.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        }
    }
}

/// What the file says of an input or output, before anything is imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declared {
    /// Its name.
    pub name: String,
    /// Its element type; `?` if the file does not say or Shorthaul does not have it.
    pub dtype: String,
    /// Its sizes: numbers, names, or `?`; `None` if not even their number is known.
    pub shape: Option<Vec<String>>,
}

/// Initializers of a file together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Initializers {
    /// How many.
    pub n: usize,
    /// Their elements together.
    pub n_elements: u64,
}

fn declared(info: &ValueInfoProto) -> Declared {
    let tensor = info.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
    let dtype = tensor.and_then(|t| dtype_of(t.elem_type).ok());
    let size = |dim: &DimensionProto| match &dim.value {
        Some(Dimension::DimValue(n)) => n.to_string(),
        Some(Dimension::DimParam(name)) if !name.is_empty() => name.clone(),
        _ => "?".to_string(),
    };
    let shape = tensor.and_then(|t| t.shape.as_ref());
    Declared {
        name: info.name.clone(),
        dtype: dtype.map_or_else(|| "?".to_string(), |d| d.to_string()),
        shape: shape.map(|s| s.dim.iter().map(size).collect()),
    }
}

/// What the file is instead, for formats that are given by mistake.
fn foreign(bytes: &[u8]) -> Option<String> {
    let known: [(&[u8], &str); 5] = [
        (
            b"PK\x03\x04",
            "it is a zip archive, perhaps a PyTorch checkpoint; export the model with `torch.onnx.export`",
        ),
        (
            b"\x80\x02",
            "it is a pickle, perhaps a PyTorch checkpoint; export the model with `torch.onnx.export`",
        ),
        (b"\x89HDF", "it is an HDF5 file; export the model to ONNX"),
        (
            b"version https://git-lfs",
            "it is a Git LFS pointer; run `git lfs pull`",
        ),
        (b"ORTM", "it is an ORT-format model; give the ONNX file"),
    ];
    if bytes.is_empty() {
        return Some("it is empty".to_string());
    }
    let at =
        |offset: usize, magic: &[u8]| bytes.get(offset..).is_some_and(|b| b.starts_with(magic));
    let hit = known
        .iter()
        .find(|(magic, _)| at(0, magic) || (*magic == b"ORTM" && at(4, magic)));
    hit.map(|(_, text)| (*text).to_string())
}

/// The error for bytes that do not decode: damaged, if the start looks like a model.
fn undecodable(path: PathBuf, bytes: &[u8], error: &prost::DecodeError) -> OnnxError {
    let broken = first_broken_field(bytes);
    // A model starts with `ir_version` (field 1, a small integer), as every writer emits it.
    let looks_like_model = bytes.starts_with(&[0x08]) || broken.fields_read > 1;
    if !looks_like_model {
        return OnnxError::NotOnnx {
            path,
            found: "it does not start with an ONNX model's version; give a file written by \
                    `torch.onnx.export` or `onnx.save`"
                .to_string(),
        };
    }
    OnnxError::Damaged {
        path,
        place: broken.place,
        detail: broken.detail.unwrap_or_else(|| error.to_string()),
    }
}

/// Where decoding stops making sense, by the fields of the outermost message.
struct Broken {
    place: String,
    detail: Option<String>,
    fields_read: usize,
}

fn first_broken_field(bytes: &[u8]) -> Broken {
    let mut at = 0;
    let mut fields_read = 0;
    // The graph is nearly all of a file: its own contents are where a fault is, if nothing above is.
    let mut suspect = "byte 0".to_string();
    while at < bytes.len() {
        let start = at;
        let Some((field, end)) = field_at(bytes, &mut at) else {
            return Broken {
                place: format!("byte {start}"),
                detail: Some(format!(
                    "no field of a model starts here (the file has {} bytes)",
                    bytes.len()
                )),
                fields_read,
            };
        };
        let name = field_name(field);
        if end > bytes.len() as u64 {
            let detail = format!(
                "{name} ends at byte {end}, but the file has {}",
                bytes.len()
            );
            return Broken {
                place: format!("byte {start}"),
                detail: Some(detail),
                fields_read,
            };
        }
        if field == 7 {
            suspect = format!("bytes {start} to {end} ({name})");
        }
        fields_read += 1;
        at = end as usize;
    }
    Broken {
        place: suspect,
        detail: None,
        fields_read,
    }
}

fn field_name(field: u64) -> String {
    let names = [
        (1, "ir_version"),
        (2, "producer_name"),
        (7, "graph"),
        (8, "opset_import"),
        (14, "metadata_props"),
        (20, "training_info"),
        (25, "functions"),
    ];
    match names.iter().find(|(n, _)| *n == field) {
        Some((_, name)) => format!("`{name}`"),
        None => format!("field {field}"),
    }
}

/// Number and end of the field at `at`; `None` if there is none. Moves `at` past key and length.
fn field_at(bytes: &[u8], at: &mut usize) -> Option<(u64, u64)> {
    let key = varint(bytes, at)?;
    let fixed = |at: &usize, n: u64| *at as u64 + n;
    let end = match key & 7 {
        0 => {
            varint(bytes, at)?;
            fixed(at, 0)
        }
        1 => fixed(at, 8),
        2 => {
            let length = varint(bytes, at)?;
            fixed(at, 0).checked_add(length)?
        }
        5 => fixed(at, 4),
        _ => return None,
    };
    (key >> 3 != 0).then_some((key >> 3, end))
}

fn varint(bytes: &[u8], at: &mut usize) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.get(*at)?;
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}
