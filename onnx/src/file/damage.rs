//! What is wrong with bytes that are no model: another format, a truncated or damaged file.
//!
//! Finds the place by walking the outermost message. Never decodes tensors.

use super::FileError;
use std::path::PathBuf;

/// What the file is instead, for formats that are given by mistake.
pub fn foreign(bytes: &[u8]) -> Option<String> {
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
pub fn undecodable(path: PathBuf, bytes: &[u8], error: &prost::DecodeError) -> FileError {
    let broken = first_broken_field(bytes);
    // A model starts with `ir_version` (field 1, a small integer), as every writer emits it.
    let looks_like_model = bytes.starts_with(&[0x08]) || broken.fields_read > 1;
    if !looks_like_model {
        return FileError::NotOnnx {
            path,
            found: "it does not start with an ONNX model's version; give a file written by \
                    `torch.onnx.export` or `onnx.save`"
                .to_string(),
        };
    }
    FileError::Damaged {
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
    // The graph is nearly all of a file: if no outer field is broken, the fault is inside the graph.
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
