//! What a command has to say, and whether the answer is yes: exit codes 0 and 3.
//!
//! A file that a command makes takes its place when everything else has gone well, last of all.

use anyhow::{Result, bail};
use onnx::file::Staged;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// The end of a command that could do its work.
#[derive(Debug)]
pub struct Answer {
    /// Text for standard output.
    pub text: String,
    /// Whether the answer is yes; it is no if problems were found or files differ.
    pub is_yes: bool,
    /// A file that is put in its place once the text is printed.
    pub file: Option<Staged>,
}

impl Answer {
    /// Done, or nothing is wrong.
    pub fn yes(text: String) -> Answer {
        Answer::new(text, true)
    }

    /// Yes or no.
    pub fn new(text: String, is_yes: bool) -> Answer {
        Answer {
            text,
            is_yes,
            file: None,
        }
    }

    /// Done, with a file.
    pub fn with(text: String, file: Staged) -> Answer {
        Answer {
            file: Some(file),
            ..Answer::yes(text)
        }
    }
}

/// Refuses a target that is also standard output: the answer would be mixed into the file.
///
/// # Errors
/// The target is standard output.
pub fn apart(target: &Path) -> Result<()> {
    if target == Path::new("-") {
        bail!(
            "cannot write the file to standard output, which gets the summary; name a file (`./-` for one called -)"
        );
    }
    let (Ok(target_is), Ok(output)) = (fs::metadata(target), fs::metadata("/dev/stdout")) else {
        return Ok(());
    };
    let is_one = (target_is.dev(), target_is.ino()) == (output.dev(), output.ino());
    // A terminal shows what it gets; `/dev/null` takes everything.
    if is_one && !output.file_type().is_char_device() {
        bail!(
            "cannot write {}: standard output, which gets the summary, is the same file",
            target.display()
        );
    }
    Ok(())
}
