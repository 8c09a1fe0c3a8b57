//! What a file is meant for.

use std::fmt;
use std::str::FromStr;

/// The entry of a file's metadata that names the runtime it was made for.
pub const TARGET_KEY: &str = "shorthaul.target";

/// Which operators a rewritten file may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// The standard's only.
    #[default]
    Standard,
    /// Also those that ONNX Runtime has on CPUs.
    OrtCpu,
    /// Also those that ONNX Runtime has on NVIDIA GPUs.
    OrtCuda,
}

const NAMES: [(Target, &str); 3] = [
    (Target::Standard, "standard"),
    (Target::OrtCpu, "ort-cpu"),
    (Target::OrtCuda, "ort-cuda"),
];

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = NAMES.iter().find(|(target, _)| target == self);
        f.write_str(row.map_or("standard", |(_, name)| name))
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Target, String> {
        let row = NAMES.iter().find(|(_, name)| *name == text);
        let known = NAMES.map(|(_, name)| name).join(", ");
        row.map(|(target, _)| *target)
            .ok_or_else(|| format!("`{text}` is none of {known}"))
    }
}
