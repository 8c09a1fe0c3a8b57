//! Why an ONNX file cannot be imported: errors that name the file, the place in it and what to do next.

use std::fmt::Write;
use std::path::PathBuf;

/// The newest version of the standard's operator set that is read.
pub const NEWEST_OPSET: i64 = 28;
/// The oldest version of the standard's operator set that is read; one before [`FIRST_READ_OPSET`] is raised to it.
pub const OLDEST_OPSET: i64 = 1;
/// The oldest version whose operators the rules read as they are.
pub(super) const FIRST_READ_OPSET: i64 = 13;

/// Why an ONNX file cannot be imported.
#[derive(Debug, thiserror::Error)]
pub enum OnnxError {
    /// The file cannot be read, is another format or damaged.
    #[error(transparent)]
    File(#[from] onnx::file::FileError),
    /// The operator set is too old or too new.
    #[error(
        "{} uses version {found} of the ONNX operators; versions {OLDEST_OPSET} to {NEWEST_OPSET} are \
         supported: export it again with `opset_version=18`, or use `onnx.version_converter`",
        path.display()
    )]
    OpsetVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: i64,
    },
    /// The model cannot be expressed; everything that stands in the way.
    #[error("{}", describe(path, unsupported, problems))]
    Model {
        /// The file.
        path: PathBuf,
        /// Operators that are not there, each with the nodes that use it.
        unsupported: Vec<UnsupportedOperator>,
        /// Other problems, in the order of the file.
        problems: Vec<Problem>,
    },
}

/// An operator that the importer does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedOperator {
    /// `Loop`, `com.microsoft.FusedMatMul`.
    pub operator: String,
    /// Whether the model defines it as a function, which something keeps from being inlined.
    pub is_function: bool,
    /// Names of the nodes that use it, in the order of the file.
    pub nodes: Vec<String>,
}

/// Something else that stands in the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Which node, input or initializer.
    pub place: String,
    /// What is wrong, and what to do where that is known.
    pub message: String,
}

/// Nodes listed by name before "and n more".
const LISTED_NODES: usize = 4;

fn describe(
    path: &std::path::Path,
    unsupported: &[UnsupportedOperator],
    problems: &[Problem],
) -> String {
    let mut text = format!("{} cannot be imported", path.display());
    if !unsupported.is_empty() {
        text.push_str("\n  operators that are not supported:");
        for entry in unsupported {
            let names: Vec<_> = entry.nodes.iter().take(LISTED_NODES).cloned().collect();
            let more = entry.nodes.len() - names.len();
            let about = match entry.is_function {
                true => {
                    " (a function of the model; `shorthaul check` says why it cannot be inlined)"
                }
                false => "",
            };
            let _ = write!(
                text,
                "\n    {}{about}: {}",
                entry.operator,
                names.join(", ")
            );
            if more > 0 {
                let _ = write!(text, " and {more} more");
            }
        }
    }
    for problem in problems {
        let _ = write!(text, "\n  {}: {}", problem.place, problem.message);
    }
    text
}
