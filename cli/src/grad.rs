//! `shorthaul grad`: the training graph of a model, as an ONNX file.

use anyhow::{Context, Result};
use compiler::importer::onnx::{File, Mode, Options};
use compiler::training_graph::{TrainingOptions, training_graph};
use std::fs;
use std::io::Write;
use std::path::Path;

/// Writes the file and says what it holds.
///
/// # Errors
/// The model cannot be read, differentiated or written; the target then is as it was.
pub fn run(
    path: &Path,
    out: &Path,
    options: &Options,
    training: &TrainingOptions,
) -> Result<String> {
    let model = File::read(path)?.import(options)?;
    let bytes = training_graph(&model, training)
        .with_context(|| format!("no training graph of {}", path.display()))?;
    write_whole(out, &bytes)?;
    let mut said = format!(
        "{}: {} of gradients of {}\n",
        out.display(),
        crate::units::bytes(bytes.len() as i64),
        path.display()
    );
    if options.mode == Mode::File && !model.frozen.is_empty() {
        said.push_str(&format!(
            "{} of its BatchNormalization nodes keep their running statistics, as the file says; \
             --mode train normalizes by the batch\n",
            model.frozen.len()
        ));
    }
    Ok(said)
}

/// Writes a file beside the target and renames it, so that the target is whole or untouched.
fn write_whole(out: &Path, bytes: &[u8]) -> Result<()> {
    let cannot = || format!("cannot write {}", out.display());
    let name = out.file_name().with_context(cannot)?.to_string_lossy();
    let part = out.with_file_name(format!(".{name}.{}.part", std::process::id()));
    let written = fs::File::create(&part).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    let renamed = written.and_then(|()| fs::rename(&part, out));
    if renamed.is_err() {
        // What is left of it, if anything.
        let _ = fs::remove_file(&part);
    }
    renamed.with_context(cannot)
}
