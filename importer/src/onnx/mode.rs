//! The forms of operators that do other things in training than in use.

use std::str::FromStr;

/// Which form batch normalization and dropout take: the two operators that do other things in
/// training than in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Each node's own, by its `training_mode`.
    #[default]
    File,
    /// Statistics of the batch, values dropped.
    Train,
    /// Running statistics, no value dropped.
    Eval,
}

impl FromStr for Mode {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s {
            "file" => Ok(Mode::File),
            "train" => Ok(Mode::Train),
            "eval" => Ok(Mode::Eval),
            other => Err(format!(
                "`{other}` is not a mode; choose file, train or eval"
            )),
        }
    }
}
