//! Trying a training graph against the model it was made of.
//!
//! Owns which loss of `onnx::verify` a request means; the proof is there. Never changes a graph.

use crate::training_graph::{Loss, TrainingOptions, training_graph};
use importer::onnx::{Mode, Model as Imported};
use onnx::file::Model;
use onnx::verify::{
    GradientError, GradientEvidence, Objective, Options, Original, check_gradients, check_same_step,
};
use std::path::Path;

/// What is known of a training graph.
#[derive(Clone, Debug, PartialEq)]
pub enum Proof {
    /// It agrees with the model and with differences of its loss.
    Found(GradientEvidence),
    /// It could not be tried; a sentence.
    Untried(String),
}

/// Tries `made`, the training graph of `original`, which is `imported` in the form `mode`.
/// In another form than the file's the model itself has another loss, which is then not compared. One
/// that does not give its gradients is held against the one that does, which is tried.
///
/// # Errors
/// The loss or a gradient is wrong.
pub fn prove(
    (original, imported): (&Model, &Imported),
    made: &Model,
    options: &TrainingOptions,
    mode: Mode,
) -> Result<Proof, GradientError> {
    match options.gradients {
        true => proven(original, made, options, mode),
        false => {
            let all = TrainingOptions {
                gradients: true,
                ..options.clone()
            };
            let bytes = training_graph(imported, &all).map_err(|error| error.to_string());
            let read = |bytes: Vec<u8>| {
                let whole = Model::of_bytes(Path::new("with gradients"), bytes.into());
                whole.map_err(|error| error.to_string())
            };
            let whole = match bytes.and_then(read) {
                Ok(whole) => whole,
                Err(why) => return Ok(Proof::Untried(why)),
            };
            let proof = proven(original, &whole, &all, mode)?;
            if let Proof::Untried(_) = proof {
                return Ok(proof);
            }
            told(check_same_step(&whole, made, &Options::default()).map(|()| proof))
        }
    }
}

fn told(found: Result<Proof, GradientError>) -> Result<Proof, GradientError> {
    match found {
        Err(GradientError::Untried(why)) => Ok(Proof::Untried(why)),
        found => found,
    }
}

fn proven(
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
    told(check_gradients(made, Some(original), &Options::default()).map(Proof::Found))
}
