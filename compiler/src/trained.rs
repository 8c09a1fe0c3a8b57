//! What a training graph trains, and which of a model's stored tensors it leaves as they are.
//!
//! Owns the lists that the program prints. Which tensors are parameters, `onnx::parameters` decides.

use crate::training_input::TrainingInput;
use onnx::file::Model;
use onnx::parameters::NotTrained;
use serde::Serialize;
use std::collections::BTreeSet;

/// Names that a list shows; the rest is counted.
const SHOWN: usize = 8;

/// Something that is trained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TrainedTensor {
    /// Its name.
    pub name: String,
    /// Its elements; unknown for an input with dynamic sizes.
    pub elements: Option<usize>,
}

/// Something that is not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Its name.
    pub name: String,
    /// Its elements.
    pub elements: usize,
    /// Why.
    pub reason: NotTrained,
}

/// What a training graph trains, and what it does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Trained {
    /// What has gradients, in the order of the graph's outputs.
    pub trained: Vec<TrainedTensor>,
    /// What has none, in the order of the model's parameters. Empty if somebody named what to train.
    pub left_out: Vec<LeftOut>,
}

impl Trained {
    /// What `made`, the training graph of `input`, trains. `wrt` is what was named.
    pub fn new(input: &TrainingInput, made: &Model, wrt: Option<&[String]>) -> Trained {
        let outputs = made.proto.graph.iter().flat_map(|g| &g.output);
        let outputs: BTreeSet<&str> = outputs.map(|o| o.name.as_str()).collect();
        // Without gradients among the outputs, what is trained has a successor.
        let has_one = |name: &str| {
            let mut suffixes = ["grad", "next"].into_iter();
            suffixes.any(|suffix| outputs.contains(format!("{name}.{suffix}").as_str()))
        };
        let parameters = input.model.parameters.iter();
        let elements = |name: &str| {
            let mut parameters = input.model.parameters.iter();
            let stored = parameters.find(|p| p.name == name);
            stored.map(|p| p.stored.n_elements())
        };
        let tensor = |name: &str| TrainedTensor {
            name: name.to_string(),
            elements: elements(name),
        };
        if let Some(named) = wrt {
            let mut seen = BTreeSet::new();
            let named = named.iter().filter(|name| seen.insert(*name));
            return Trained {
                trained: named.map(|name| tensor(name)).collect(),
                left_out: Vec::new(),
            };
        }
        let (mut trained, mut left_out) = (Vec::new(), input.left_out.clone());
        for parameter in parameters.filter(|p| p.trainable) {
            match has_one(&parameter.name) {
                true => trained.push(tensor(&parameter.name)),
                false => left_out.push(LeftOut {
                    name: parameter.name.clone(),
                    elements: parameter.stored.n_elements(),
                    reason: NotTrained::NoInfluence,
                }),
            }
        }
        Trained { trained, left_out }
    }

    /// Both lists as lines of text; the option that chooses otherwise is called `wrt`.
    pub fn lines(&self, wrt: &str) -> Vec<String> {
        let n_elements: usize = self.trained.iter().filter_map(|t| t.elements).sum();
        let elements = match self.trained.iter().all(|t| t.elements.is_some()) {
            true => format!(" with {n_elements} elements"),
            false => String::new(),
        };
        let names = self.trained.iter().map(|t| t.name.as_str()).collect();
        let n = self.trained.len();
        let mut lines = vec![format!("trained: {n}{elements}: {}", listed(names))];
        let parts = reasons(&self.left_out);
        if !parts.is_empty() {
            let n = self.left_out.len();
            lines.push(format!("left out: {n}; {wrt} names what to train instead"));
            lines.extend(parts.into_iter().map(|part| format!("  {part}")));
        }
        lines
    }
}

/// What is left out, one line for each reason.
pub(crate) fn reasons(left_out: &[LeftOut]) -> Vec<String> {
    let mut kinds: Vec<NotTrained> = left_out.iter().map(|l| l.reason).collect();
    kinds.sort();
    kinds.dedup();
    let line = |reason: NotTrained| {
        let names = left_out.iter().filter(|l| l.reason == reason);
        let names = names.map(|l| l.name.as_str()).collect();
        format!("{}: {reason}", listed(names))
    };
    kinds.into_iter().map(line).collect()
}

/// Names, the first of them if there are many.
pub(crate) fn listed(names: Vec<&str>) -> String {
    let shown: Vec<String> = names.iter().take(SHOWN).map(|n| format!("`{n}`")).collect();
    match names.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
