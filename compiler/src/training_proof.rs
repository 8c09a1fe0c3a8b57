//! Trying a training graph against the model it was made of.
//!
//! Owns which loss of `onnx::verify` a request means; the proof is there. Never changes a graph.

use crate::training_graph::{Loss, TrainingOptions, training_graph};
use crate::training_input::output_of_loss;
use importer::onnx::{Mode, Model as Imported};
use onnx::attributes::bodies;
use onnx::file::Model;
use onnx::proto::{AttributeProto, attribute_type};
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

/// Tries `made`, the training graph of `original`, which is `imported` in the form `mode`. If the model cannot be
/// brought into that form, its loss is not compared. If `made` has no gradients among its outputs, a training graph
/// that has them is tried instead, and the steps of the two are compared.
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
        true => proven((original, imported), made, options, mode),
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
            let found = match proven((original, imported), &whole, &all, mode)? {
                Proof::Found(found) => found,
                untried => return Ok(untried),
            };
            let step = check_same_step(&whole, made, &Options::default());
            told(step.map(|error| {
                Proof::Found(GradientEvidence {
                    step: Some(error),
                    ..found
                })
            }))
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
    (original, imported): (&Model, &Imported),
    made: &Model,
    options: &TrainingOptions,
    mode: Mode,
) -> Result<Proof, GradientError> {
    let objective = match &options.loss {
        Loss::CrossEntropy => Objective::CrossEntropy(options.label_smoothing),
        Loss::MeanSquaredError => Objective::MeanSquaredError,
        Loss::Output(name) => Objective::Output(name.clone()),
    };
    let output = output_of_loss(imported, options.output.as_deref());
    let formed = in_form(original, mode);
    let original = Original {
        model: formed.as_ref().unwrap_or(original),
        objective: &objective,
        // A loss that is an output itself needs none.
        output: output.ok().map(|port| port.name.as_str()),
        same_form: formed.is_some(),
    };
    told(check_gradients(made, Some(original), &Options::default()).map(Proof::Found))
}

/// The model in a form; `None` if the form cannot be set by attributes and inputs of its nodes, as for dropout in
/// training.
fn in_form(model: &Model, mode: Mode) -> Option<Model> {
    let mut proto = model.proto.clone();
    if mode == Mode::File {
        return Some(model.with(proto));
    }
    let is_formed = |op: &str| matches!(op, "BatchNormalization" | "Dropout");
    let called = proto.functions.iter().flat_map(|f| &f.node);
    let version = proto.opset_import.iter().find(|o| o.domain.is_empty());
    let has_modes = version.is_some_and(|o| o.version >= 14);
    let graph = proto.graph.as_mut()?;
    let in_bodies = graph.node.iter().flat_map(bodies).flat_map(|b| &b.node);
    if called.chain(in_bodies).any(|node| is_formed(&node.op_type)) {
        return None;
    }
    let formed = graph
        .node
        .iter_mut()
        .filter(|node| is_formed(&node.op_type));
    for node in formed {
        match (node.op_type.as_str(), mode) {
            ("Dropout", Mode::Eval) => node.input.truncate(1),
            ("BatchNormalization", _) if has_modes => {
                node.attribute.retain(|a| a.name != "training_mode");
                node.attribute.push(AttributeProto {
                    name: "training_mode".to_string(),
                    i: Some(i64::from(mode == Mode::Train)),
                    r#type: attribute_type::INT,
                    ..AttributeProto::default()
                });
                node.output.truncate(1);
            }
            _ => return None,
        }
    }
    Some(model.with(proto))
}
