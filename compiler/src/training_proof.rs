//! Trying a training graph against the model it was made of.
//!
//! Owns which loss of `onnx::verify` a request means; the proof is there. Never changes a graph.

use crate::training_graph::{Loss, TrainingOptions};
use importer::onnx::Mode;
use onnx::file::Model;
use onnx::verify::{
    GradientError, GradientEvidence, Objective, Options, Original, check_gradients,
};

/// What is known of a training graph.
#[derive(Clone, Debug, PartialEq)]
pub enum Proof {
    /// It agrees with the model and with differences of its loss.
    Found(GradientEvidence),
    /// It could not be tried; a sentence.
    Untried(String),
}

/// Tries `made`, the training graph of `original` in the form `mode`.
/// In another form than the file's the model itself has another loss, which is then not compared.
///
/// # Errors
/// The loss or a gradient is wrong.
pub fn prove(
    original: &Model,
    made: &Model,
    options: &TrainingOptions,
    mode: Mode,
) -> Result<Proof, GradientError> {
    let objective = match &options.loss {
        Loss::CrossEntropy => Objective::CrossEntropy(options.label_smoothing),
        Loss::MeanSquaredError => Objective::MeanSquaredError,
        Loss::Output(name) => Objective::Output(name.clone()),
    };
    let original = Original {
        model: original,
        objective: &objective,
        same_form: mode == Mode::File,
    };
    match check_gradients(made, Some(original), &Options::default()) {
        Ok(found) => Ok(Proof::Found(found)),
        Err(GradientError::Untried(why)) => Ok(Proof::Untried(why)),
        Err(wrong) => Err(wrong),
    }
}
