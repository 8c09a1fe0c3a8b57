//! `shorthaul grad`: the training graph of a model, as an ONNX file.

use anyhow::{Context, Result};
use compiler::importer::onnx::{File, Mode, Options};
use compiler::training_graph::{TrainingOptions, training_graph};
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
    onnx::file::write_bytes(&bytes, out)?;
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
