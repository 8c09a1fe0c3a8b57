//! Writing: initializers go from where they are to the target one by one, external data range by range.
//!
//! Field order: all of the model but its graph, the graph without initializers, the initializers. The
//! same model gives the same bytes. External data goes to one file beside the target, each range once.
//! Ranges of at least [`ALIGNED_FROM`] bytes start at multiples of [`ALIGNMENT`] if they did so where they
//! come from: no padding is added that was not there.

use super::Model;
use super::staged::{Staged, Written};
use super::stored_tensors::{change_each, each};
use super::target::same;
use crate::element::Element;
use crate::proto::{ModelProto, StringStringEntryProto, TensorProto};
use crate::stored::External;
use prost::Message;
use prost::encoding::{encode_varint, encoded_len_varint};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Offsets of large tensors in external data are multiples of this many bytes, so that readers can map
/// them, as the standard recommends.
const ALIGNMENT: u64 = 4096;
/// Tensors from this many bytes on start at a page, so that readers can map them. ONNX Runtime's and PyTorch's
/// exporters do the same.
/// Smaller ones are at multiples of their elements' size.
const ALIGNED_FROM: u64 = 1 << 20;
/// Protobuf messages end at 2 GiB; initializers of larger models go to external data.
const MAX_INSIDE: u64 = i32::MAX as u64 - (1 << 20);
/// Initializers from this many bytes on go to external data where the model is too large.
const LARGE: usize = 1024;

/// Why nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The target or a file beside it cannot be written.
    #[error("cannot write {}: {error}", path.display())]
    Target {
        /// The target.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// External data of the model cannot be read, or is not what it was.
    #[error("cannot write {}: `{name}`: {what}", path.display())]
    Data {
        /// The target.
        path: PathBuf,
        /// The initializer.
        name: String,
        /// What is wrong.
        what: String,
    },
}

/// Writes a model, whole or not at all. External data goes to `PATH.data`.
///
/// # Errors
/// See [`WriteError`]; the target and its data then are as they were.
pub fn write(model: &Model, path: &Path) -> Result<Written, WriteError> {
    stage(model, path)?.place()
}

/// Writes a model beside its target, which stays as it is until [`Staged::place`].
///
/// # Errors
/// See [`WriteError`].
pub fn stage(model: &Model, path: &Path) -> Result<Staged, WriteError> {
    let target = |error| WriteError::Target {
        path: path.to_path_buf(),
        error,
    };
    let in_place = same(&model.path, path);
    let sources: Vec<&Path> = match in_place {
        // Only a target that is the model itself may replace files that the model reads.
        true => Vec::new(),
        false => model.stamps.files().collect(),
    };
    refuse_to_lose(&sources, path)?;
    let mut staged = Staged::empty(path).map_err(target)?;
    let (proto, ranges) = placed(model, path, &staged.data_name())?;
    if !ranges.is_empty() {
        let (to, place) = staged.with_data().map_err(target)?;
        refuse_to_lose(&sources, &place)?;
        staged.written.n_external = copy(&ranges, &to, path)?;
        unchanged(model, path)?;
    }
    staged.written.n_bytes = File::create(staged.path())
        .map(|file| BufWriter::with_capacity(1 << 20, file))
        .and_then(|mut file| encode(&proto, &mut file))
        .map_err(target)?;
    Ok(staged)
}

/// Writes bytes beside their target, which stays as it is until [`Staged::place`]. Never replaces one of
/// `sources`, from which the bytes were made.
///
/// # Errors
/// [`WriteError::Target`].
pub fn stage_bytes(bytes: &[u8], path: &Path, sources: &[&Path]) -> Result<Staged, WriteError> {
    refuse_to_lose(sources, path)?;
    let target = |error| WriteError::Target {
        path: path.to_path_buf(),
        error,
    };
    let mut staged = Staged::empty(path).map_err(target)?;
    fs::write(staged.path(), bytes).map_err(target)?;
    staged.written.n_bytes = bytes.len() as u64;
    Ok(staged)
}

/// A file that something else is read from is not replaced.
fn refuse_to_lose(sources: &[&Path], target: &Path) -> Result<(), WriteError> {
    match sources.iter().find(|source| same(source, target)) {
        None => Ok(()),
        Some(source) => Err(WriteError::Target {
            path: target.to_path_buf(),
            error: io::Error::other(format!(
                "{} is read from and would be replaced; choose another target",
                source.display()
            )),
        }),
    }
}

/// Checks that the files copied from are still those that were read and proven.
fn unchanged(model: &Model, path: &Path) -> Result<(), WriteError> {
    match model.stamps.changed() {
        None => Ok(()),
        Some(file) => Err(WriteError::Target {
            path: path.to_path_buf(),
            error: io::Error::other(format!(
                "{} was changed while {} was worked on; begin again when it is complete",
                file.display(),
                model.path.display()
            )),
        }),
    }
}

/// The bytes of a model in one piece.
///
/// # Errors
/// [`WriteError::Data`]: it has external data or is too large for one message; it needs a file.
pub fn encoded(model: &Model) -> Result<Vec<u8>, WriteError> {
    let (proto, ranges) = placed(model, &model.path, "")?;
    if let Some(range) = ranges.first() {
        return Err(WriteError::Data {
            path: model.path.clone(),
            name: range.name.clone(),
            what:
                "its elements are in a file beside the model, so the model needs a file as well; \
                   give the path to write"
                    .to_string(),
        });
    }
    let mut bytes = Vec::new();
    encode(&proto, &mut bytes)
        .map_err(|error| WriteError::Target {
            path: model.path.clone(),
            error,
        })
        .map(|_| bytes)
}

/// Where bytes of the external data come from.
enum Source {
    File(External),
    Memory(bytes::Bytes),
}

/// A run of bytes of the external data, and the initializer it is for.
struct Range {
    source: Source,
    offset: u64,
    length: u64,
    name: String,
}

/// The model with its external tensors pointing to `data_name`, and what goes there.
fn placed(
    model: &Model,
    path: &Path,
    data_name: &str,
) -> Result<(ModelProto, Vec<Range>), WriteError> {
    let mut proto = model.proto.clone();
    let too_large = proto.encoded_len() as u64 > MAX_INSIDE;
    let mut places = Places::over(&model.proto, &model.folder);
    let data = |name: &str, what: String| WriteError::Data {
        path: path.to_path_buf(),
        name: name.to_string(),
        what,
    };
    let mut place = |tensor: &mut TensorProto| {
        let name = tensor.name.clone();
        let external = External::new(tensor, &model.folder).map_err(|what| data(&name, what))?;
        let source = match (external, &tensor.raw_data) {
            (Some(external), _) => Source::File(external),
            (None, Some(raw)) if too_large && raw.len() >= LARGE => Source::Memory(raw.clone()),
            _ => return Ok(()),
        };
        let element = Element::of_number(tensor.data_type).and_then(Element::bytes);
        let (offset, length) = places.add(source, &name, element.unwrap_or(1) as u64);
        tensor.raw_data = None;
        tensor.data_location = 1;
        let entry = |key: &str, value: String| StringStringEntryProto {
            key: key.to_string(),
            value,
        };
        tensor.external_data = vec![
            entry("location", data_name.to_string()),
            entry("offset", offset.to_string()),
            entry("length", length.to_string()),
        ];
        Ok(())
    };
    change_each(&mut proto, &mut place)?;
    Ok((proto, places.ranges))
}

/// Where ranges of external data go: those that overlap in a file stay together, each byte once.
struct Places {
    ranges: Vec<Range>,
    /// The runs of bytes in use, from their first byte to their end, for each file.
    runs: BTreeMap<PathBuf, BTreeMap<u64, u64>>,
    /// Offsets of the runs that are placed, by file and first byte.
    placed: BTreeMap<(PathBuf, u64), u64>,
    end: u64,
}

impl Places {
    fn over(model: &ModelProto, folder: &Path) -> Places {
        let mut used: BTreeMap<PathBuf, Vec<(u64, u64)>> = BTreeMap::new();
        each(model, &mut |tensor| {
            // What cannot be found is an error where it is placed.
            if let Ok(Some(e)) = External::new(tensor, folder) {
                used.entry(e.path)
                    .or_default()
                    .push((e.offset, e.offset + e.length));
            }
        });
        let joined = |mut ranges: Vec<(u64, u64)>| {
            ranges.sort_unstable();
            let mut runs: BTreeMap<u64, u64> = BTreeMap::new();
            for (start, end) in ranges {
                match runs.last_entry() {
                    // Neighbours that only touch are apart, so that each can be aligned.
                    Some(mut last) if start < *last.get() => {
                        let end = end.max(*last.get());
                        last.insert(end);
                    }
                    _ => {
                        let known = runs.entry(start).or_insert(end);
                        *known = end.max(*known);
                    }
                }
            }
            runs
        };
        Places {
            ranges: Vec::new(),
            runs: used
                .into_iter()
                .map(|(path, ranges)| (path, joined(ranges)))
                .collect(),
            placed: BTreeMap::new(),
            end: 0,
        }
    }

    /// Offset and length of a source in the data; an element of it has `element` bytes.
    fn add(&mut self, source: Source, name: &str, element: u64) -> (u64, u64) {
        let aligned = |length: u64, from: u64| match from.is_multiple_of(ALIGNMENT) {
            true if length >= ALIGNED_FROM => ALIGNMENT,
            _ => element,
        };
        match source {
            Source::Memory(bytes) => {
                let length = bytes.len() as u64;
                let at = self.end.next_multiple_of(aligned(length, 0));
                (self.append(Source::Memory(bytes), at, length, name), length)
            }
            Source::File(e) => {
                let (wanted, length) = (e.offset, e.length);
                let run = self
                    .runs
                    .get(&e.path)
                    .and_then(|runs| runs.range(..=wanted).next_back());
                let (start, end) = run.map_or((wanted, wanted + length), |(s, e)| (*s, *e));
                let key = (e.path.clone(), start);
                let offset = match self.placed.get(&key) {
                    Some(offset) => *offset,
                    None => {
                        let whole = External {
                            offset: start,
                            length: end - start,
                            ..e
                        };
                        let at = self.end.next_multiple_of(aligned(end - start, start));
                        let offset = self.append(Source::File(whole), at, end - start, name);
                        self.placed.insert(key, offset);
                        offset
                    }
                };
                (offset + (wanted - start), length)
            }
        }
    }

    fn append(&mut self, source: Source, offset: u64, length: u64, name: &str) -> u64 {
        self.end = offset + length;
        self.ranges.push(Range {
            source,
            offset,
            length,
            name: name.to_string(),
        });
        offset
    }
}

fn copy(ranges: &[Range], to: &Path, target: &Path) -> Result<u64, WriteError> {
    let failed = |error| WriteError::Target {
        path: target.to_path_buf(),
        error,
    };
    let mut file = BufWriter::new(File::create(to).map_err(failed)?);
    let mut at = 0;
    for range in ranges {
        let gap = range.offset - at;
        io::copy(&mut io::repeat(0).take(gap), &mut file).map_err(failed)?;
        match &range.source {
            Source::Memory(bytes) => file.write_all(bytes).map_err(failed)?,
            Source::File(external) => {
                let data = |what: String| WriteError::Data {
                    path: target.to_path_buf(),
                    name: range.name.clone(),
                    what,
                };
                let unreadable = |error: io::Error| data(external.cannot_read(&error));
                let mut from = File::open(&external.path).map_err(unreadable)?;
                from.seek(SeekFrom::Start(external.offset))
                    .map_err(unreadable)?;
                let copied =
                    io::copy(&mut from.take(external.length), &mut file).map_err(failed)?;
                if copied != external.length {
                    return Err(data(format!("{} became shorter", external.path.display())));
                }
            }
        }
        at = range.offset + range.length;
    }
    file.flush().map_err(failed)?;
    Ok(at)
}

/// Field numbers of `onnx.proto` whose contents are streamed.
const MODEL_GRAPH: u32 = 7;
const GRAPH_INITIALIZER: u32 = 5;
const TENSOR_RAW: u32 = 9;

/// Writes the message; gives its length.
fn encode(model: &ModelProto, out: &mut impl Write) -> io::Result<u64> {
    let mut around = model.clone();
    let mut graph = around.graph.take().unwrap_or_default();
    let initializers = std::mem::take(&mut graph.initializer);
    let lengths: Vec<u64> = initializers.iter().map(tensor_len).collect();
    let n_graph = graph.encoded_len() as u64
        + lengths
            .iter()
            .map(|n| 1 + encoded_len_varint(*n) as u64 + n)
            .sum::<u64>();
    let head = around.encode_to_vec();
    out.write_all(&head)?;
    delimited(out, MODEL_GRAPH, n_graph)?;
    out.write_all(&graph.encode_to_vec())?;
    for (tensor, length) in initializers.iter().zip(&lengths) {
        delimited(out, GRAPH_INITIALIZER, *length)?;
        out.write_all(&without_raw(tensor).encode_to_vec())?;
        if let Some(raw) = &tensor.raw_data {
            delimited(out, TENSOR_RAW, raw.len() as u64)?;
            out.write_all(raw)?;
        }
    }
    out.flush()?;
    Ok(head.len() as u64 + 1 + encoded_len_varint(n_graph) as u64 + n_graph)
}

/// Key and length of a length-delimited field below 16, whose key is one byte.
fn delimited(out: &mut impl Write, field: u32, length: u64) -> io::Result<()> {
    let mut bytes = vec![(field << 3 | 2) as u8];
    encode_varint(length, &mut bytes);
    out.write_all(&bytes)
}

fn without_raw(tensor: &TensorProto) -> TensorProto {
    TensorProto {
        raw_data: None,
        ..tensor.clone()
    }
}

fn tensor_len(tensor: &TensorProto) -> u64 {
    let raw = tensor.raw_data.as_ref().map_or(0, |raw| {
        let n = raw.len() as u64;
        1 + encoded_len_varint(n) as u64 + n
    });
    without_raw(tensor).encoded_len() as u64 + raw
}

#[cfg(test)]
mod tests;
