//! Measured times of products and convolutions, read from a file.
//!
//! Owns the file's format, version 1, and every complaint about one. `bench/gpu/tables.py` writes it.
//! It is a JSON object:
//!
//! ```json
//! {
//!   "format": "shorthaul products",
//!   "version": 1,
//!   "machine": {"device": "NVIDIA H200", "driver": "13.0", "cublaslt": "13.4.1", "cudnn": "9.26.0"},
//!   "workspace_bytes": 33554432,
//!   "entries": [
//!     {
//!       "product": "m 4096 n 4096 k 1024 batch 1; A bf16 transposed ld 1024; B bf16 ld 1024; D bf16 ld 4096",
//!       "rest": "bias",
//!       "candidates": [
//!         {"kind": "own", "microseconds": 61.2},
//!         {"kind": "library", "rank": 1, "microseconds": 52.9},
//!         {"kind": "library_then_map", "rank": 0, "microseconds": 63.5}
//!       ]
//!     },
//!     {
//!       "product": "attention batch 8 heads 16 rows 512 columns 512 width 64 values 64; bf16",
//!       "rest": "gradients",
//!       "candidates": [
//!         {"kind": "own", "microseconds": 310},
//!         {"kind": "torch_flash", "microseconds": 204.5}
//!       ]
//!     }
//!   ]
//! }
//! ```
//!
//! - `machine`: what the times were taken on. A program for another device, or with another cuBLASLt or
//!   cuDNN, refuses the table: neither the times nor the ranks mean anything there. A missing library is an
//!   error only for a product that needs it. The driver's version is for the reader. `cudnn` is left
//!   out where there was none. The emulator, which computes every candidate alike, takes any table.
//! - `workspace_bytes`: what every product of the library is given; ranks hold for this size.
//! - `product`: sizes, types and places as the text of [`super::Gemm`], of [`super::Convolution`] or of
//!   [`super::Attention`] has them.
//! - `rest`: the element-wise work that was fused to the product: `nothing`, `bias`, `bias_relu`, or
//!   a digest of its text. For attention, `gradients` if times are those of forward and backward together,
//!   else `nothing`.
//! - `kind`: `own` is our kernel with the rest in its registers; `library` is the library's (cuBLASLt's
//!   for products, cuDNN's for convolutions), with the rest as its epilogue; `library_then_map` is the
//!   library's alone, and then the rest as one of our kernels; `wgmma` is our kernel for Hopper, with the
//!   rest in its registers. `rank` is the algorithm's position in the library's own order of those that it
//!   offers in this workspace, or the number of the kernel's tile (0 to 2: operands copied by threads, the
//!   largest tile first; 3 and 4: by the copy engine). For attention, `torch_flash`, `torch_efficient` and
//!   `torch_cudnn` are PyTorch's operators, without a rank.
//! - `microseconds`: of all launches of the candidate together.
//!
//! The fastest candidate is taken; of equally fast ones the first. A product without an entry is our
//! own kernel's.

use super::attention::{Attending, Attention};
use super::operation::Operation;
use serde::{Deserialize, Deserializer, de};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// The only format there is.
const FORMAT: &str = "shorthaul products";
/// The version that this file describes.
const VERSION: u64 = 1;
/// What to do about a table that cannot be used.
const ADVICE: &str = "measure one with bench/gpu/tables.py on this machine, or leave the table out";

/// A product and what is done to it, as tables know them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The product's text.
    pub product: String,
    /// The rest.
    pub rest: String,
}

impl Key {
    /// The key of an operation, whatever its epilogue is, with a rest.
    pub fn new(operation: &Operation, rest: &str) -> Key {
        Key {
            product: operation.to_string(),
            rest: rest.to_string(),
        }
    }

    /// The key of attention, with its gradients or alone.
    pub fn of_attention(attention: &Attention, with_gradients: bool) -> Key {
        Key {
            product: attention.to_string(),
            rest: if with_gradients {
                "gradients"
            } else {
                "nothing"
            }
            .to_string(),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; then {}", self.product, self.rest)
    }
}

/// A way to compute a product with its rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Candidate {
    /// Our kernel, with the rest in its registers where it can be.
    Own,
    /// The library with the rest as its epilogue, by the algorithm of that rank.
    Library(usize),
    /// The library, and then one of our kernels for the rest.
    LibraryThenMap(usize),
    /// Our kernel by products of warpgroups, in the tile of that number, as
    /// [`crate::contraction::emit_for_warpgroups`] counts them: on Hopper only.
    Warpgroup(usize),
    /// For attention: an operator of PyTorch.
    Attention(Attending),
}

impl Candidate {
    /// The candidate of a table's `kind` and `rank`. Our own kernels and PyTorch's operators have no rank.
    pub fn of(kind: &str, rank: usize) -> Option<Candidate> {
        match kind {
            "own" => Some(Candidate::Own),
            "library" => Some(Candidate::Library(rank)),
            "library_then_map" => Some(Candidate::LibraryThenMap(rank)),
            "wgmma" => Some(Candidate::Warpgroup(rank)),
            _ => Attending::of(kind).map(Candidate::Attention),
        }
    }

    /// A table's `kind` and `rank`.
    pub fn parts(self) -> (&'static str, Option<usize>) {
        match self {
            Candidate::Own => ("own", None),
            Candidate::Library(rank) => ("library", Some(rank)),
            Candidate::LibraryThenMap(rank) => ("library_then_map", Some(rank)),
            Candidate::Warpgroup(tile) => ("wgmma", Some(tile)),
            Candidate::Attention(by) => (by.name(), None),
        }
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Candidate::Own => f.write_str("our own kernel"),
            Candidate::Library(rank) => write!(f, "the library's algorithm {rank}"),
            Candidate::LibraryThenMap(rank) => {
                write!(
                    f,
                    "the library's algorithm {rank} and a kernel for the rest"
                )
            }
            Candidate::Warpgroup(tile) => {
                write!(f, "our kernel by products of warpgroups in tile {tile}")
            }
            Candidate::Attention(by) => by.fmt(f),
        }
    }
}

/// A candidate with its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Which.
    pub candidate: Candidate,
    /// Time of all its launches.
    pub microseconds: f64,
}

/// What times were taken on.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurer {
    /// The device's name, as the driver says it.
    pub device: String,
    /// The driver's version.
    pub driver: String,
    /// The version of cuBLASLt.
    pub cublaslt: String,
    /// The version of cuDNN, where there was one.
    pub cudnn: Option<String>,
}

/// A table that was read.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    path: PathBuf,
    /// What it was measured on.
    pub machine: Measurer,
    /// Bytes of workspace of every product of the library.
    pub workspace_bytes: usize,
    entries: BTreeMap<Key, Vec<Measured>>,
}

/// Why a table is not used.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// There is no such file, or it cannot be read.
    #[error("the table of products {} cannot be read: {problem}; {ADVICE}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's words.
        problem: std::io::Error,
    },
    /// It is no table of this version.
    #[error("{}, line {line}: {problem}; {ADVICE}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// It was measured elsewhere.
    #[error("{} was measured on {what} {found}, but this is {expected}; {ADVICE}", path.display())]
    Elsewhere {
        /// The file.
        path: PathBuf,
        /// What differs: `a device`, `cuBLASLt`, `cuDNN`.
        what: &'static str,
        /// The value in the table.
        found: String,
        /// Here.
        expected: String,
    },
}

impl Table {
    /// Reads a file.
    ///
    /// # Errors
    /// See [`TableError`].
    pub fn read(path: &Path) -> Result<Table, TableError> {
        let text = std::fs::read_to_string(path).map_err(|problem| TableError::Read {
            path: path.to_path_buf(),
            problem,
        })?;
        Table::parse(path, &text)
    }

    /// The table in a text; `path` stands in errors.
    ///
    /// # Errors
    /// [`TableError::Content`].
    pub fn parse(path: &Path, text: &str) -> Result<Table, TableError> {
        let wrong = |line, problem| TableError::Content {
            path: path.to_path_buf(),
            line,
            problem,
        };
        let of_json = |error: serde_json::Error| wrong(error.line(), error.to_string());
        // Another version may have other fields, so the version is checked before them.
        let Header { format, version } = serde_json::from_str(text).map_err(of_json)?;
        if format != FORMAT || version != VERSION {
            let problem = format!(
                "this is version {version} of `{format}`, but version {VERSION} of `{FORMAT}` is read"
            );
            return Err(wrong(1, problem));
        }
        let file: File = serde_json::from_str(text).map_err(of_json)?;
        let mut entries = BTreeMap::new();
        for entry in file.entries {
            let key = Key {
                product: entry.product,
                rest: entry.rest,
            };
            let line = line_of(text, &key.product);
            if let Some(row) = entry.candidates.iter().find(|c| c.is_misplaced()) {
                let (kind, _) = row.measured().candidate.parts();
                let rank =
                    "`own` has no `rank`, nor have PyTorch's operators; every other kind has one";
                return Err(wrong(line, format!("candidate `{kind}`: {rank}")));
            }
            if entry.candidates.is_empty() {
                return Err(wrong(line, format!("`{key}` has no candidates")));
            }
            let told = format!("`{key}` has two entries");
            let candidates = entry.candidates.iter().map(Row::measured).collect();
            if entries.insert(key, candidates).is_some() {
                return Err(wrong(line, told));
            }
        }
        Ok(Table {
            path: path.to_path_buf(),
            machine: file.machine,
            workspace_bytes: file.workspace_bytes,
            entries,
        })
    }

    /// The file it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The candidates of a product, in the file's order.
    pub fn candidates(&self, key: &Key) -> &[Measured] {
        self.entries.get(key).map_or(&[], Vec::as_slice)
    }

    /// How many products it has times of.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Checks that the table was measured on this device and with these libraries. A library that is absent is not
    /// compared: the first product that needs it gives the error.
    ///
    /// # Errors
    /// [`TableError::Elsewhere`].
    pub fn check(
        &self,
        device: &str,
        cublaslt: Option<&str>,
        cudnn: Option<&str>,
    ) -> Result<(), TableError> {
        let machine = &self.machine;
        let mut compared = vec![("a device", machine.device.as_str(), device)];
        if let Some(here) = cublaslt {
            compared.push(("cuBLASLt", &machine.cublaslt, here));
        }
        if let (Some(measured), Some(here)) = (&machine.cudnn, cudnn) {
            compared.push(("cuDNN", measured, here));
        }
        match compared
            .iter()
            .find(|(_, found, expected)| found != expected)
        {
            None => Ok(()),
            Some((what, found, expected)) => Err(TableError::Elsewhere {
                path: self.path.clone(),
                what,
                found: (*found).to_string(),
                expected: (*expected).to_string(),
            }),
        }
    }
}

/// The line that a text first stands in.
fn line_of(text: &str, what: &str) -> usize {
    let quoted = serde_json::to_string(what).unwrap_or_default();
    let at = text.find(&quoted).unwrap_or(0);
    text[..at].matches('\n').count() + 1
}

#[derive(Deserialize)]
struct Header {
    format: String,
    version: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "format")]
    _format: String,
    #[serde(rename = "version")]
    _version: u64,
    machine: Measurer,
    workspace_bytes: usize,
    entries: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    product: String,
    rest: String,
    candidates: Vec<Row>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    kind: Kind,
    rank: Option<usize>,
    #[serde(deserialize_with = "microseconds")]
    microseconds: f64,
}

#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Own,
    Library,
    LibraryThenMap,
    Wgmma,
    TorchFlash,
    TorchEfficient,
    TorchCudnn,
}

impl Row {
    fn is_misplaced(&self) -> bool {
        let (_, rank) = self.measured().candidate.parts();
        rank.is_some() != self.rank.is_some()
    }

    fn measured(&self) -> Measured {
        let rank = self.rank.unwrap_or(0);
        Measured {
            candidate: match self.kind {
                Kind::Own => Candidate::Own,
                Kind::Library => Candidate::Library(rank),
                Kind::LibraryThenMap => Candidate::LibraryThenMap(rank),
                Kind::Wgmma => Candidate::Warpgroup(rank),
                Kind::TorchFlash => Candidate::Attention(Attending::Flash),
                Kind::TorchEfficient => Candidate::Attention(Attending::Efficient),
                Kind::TorchCudnn => Candidate::Attention(Attending::Cudnn),
            },
            microseconds: self.microseconds,
        }
    }
}

/// A time: a number above 0.
fn microseconds<'de, D: Deserializer<'de>>(input: D) -> Result<f64, D::Error> {
    let time = f64::deserialize(input)?;
    match time.is_finite() && time > 0.0 {
        true => Ok(time),
        false => Err(de::Error::custom(format!(
            "{time} microseconds are no time"
        ))),
    }
}

#[cfg(test)]
mod tests;
