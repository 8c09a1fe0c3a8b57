//! An ONNX file as a model to train.
//!
//! Owns what training needs that running does not: values for sizes without which shapes do not fit together, weights
//! where an exporter wrote none as initializers, and the output that a loss is of. What the training graph is,
//! `training_graph` decides.

use crate::trained::{LeftOut, listed, reasons};
use crate::training_graph::TrainingGraphError;
use importer::onnx::{File, Model, OnnxError, Options, Port};
use onnx::parameters::{NotTrained, Parameters, Shared, parameters};
use onnx::verify::{self, VerifyError};
use std::collections::BTreeMap;

/// A model to train, and what was settled for it.
#[derive(Debug)]
pub struct TrainingInput {
    /// The model.
    pub model: Model,
    /// Values for sizes that nobody gave; without them the model has no graph.
    pub sizes: BTreeMap<String, i64>,
    /// The results of `Constant` nodes that are trained, in the file's order.
    pub constants: Vec<String>,
    /// What the file stores and is not trained by default, as [`onnx::parameters`] says. Empty if somebody named what
    /// to train.
    pub left_out: Vec<LeftOut>,
    /// Trained tensors that several nodes of the file read.
    pub shared: Vec<Shared>,
    /// Whether nobody named the constants.
    by_default: bool,
}

impl TrainingInput {
    /// What was settled that nobody asked for, in sentences without a full stop. The options that would settle it are
    /// called `sizes` and `wrt`.
    pub fn notes(&self, sizes: &str, wrt: &str) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.sizes.is_empty() {
            let known = self.sizes.iter().map(|(name, n)| format!("{name}={n}"));
            let known: Vec<String> = known.collect();
            notes.push(format!(
                "the training graph is for {}: the model's shapes do not fit together for all sizes; {sizes} gives \
                 other sizes",
                known.join(", ")
            ));
        }
        if self.by_default && !self.constants.is_empty() {
            notes.push(format!(
                "no initializer of the model is a weight, so the values of {} `Constant` nodes are trained; {wrt} \
                 chooses among them",
                self.constants.len()
            ));
        }
        for shared in self.shared.iter().take(MOST_SHARED) {
            let readers = shared.readers.iter().map(String::as_str).collect();
            notes.push(format!(
                "`{}` is one array that {} nodes read, so its gradient is the sum over them: {}",
                shared.name,
                shared.readers.len(),
                listed(readers)
            ));
        }
        if self.shared.len() > MOST_SHARED {
            let more = self.shared.len() - MOST_SHARED;
            notes.push(format!("{more} more parameters are read by several nodes"));
        }
        notes
    }

    /// A sentence about what is left out though it may be a parameter ([`NotTrained::is_guess`]); the option that
    /// chooses otherwise is called `wrt`.
    pub fn guessed(&self, wrt: &str) -> Option<String> {
        let guesses = self.left_out.iter().filter(|l| l.reason.is_guess());
        let guesses: Vec<LeftOut> = guesses.cloned().collect();
        (!guesses.is_empty()).then(|| {
            format!(
                "not trained ({wrt} names what to train instead): {}",
                reasons(&guesses).join("; ")
            )
        })
    }
}

/// Most notes about parameters that several nodes read.
const MOST_SHARED: usize = 3;

/// Reads `file` to train it; `source` is the same file for the room `onnx`.
///
/// If the file cannot be imported with its dynamic sizes, it gets numbers for those that stand in the way:
/// ones with which it runs, as `optimize` finds them. `wrt` is what to differentiate by, as
/// in [`TrainingOptions`](crate::training_graph::TrainingOptions): a name may be that of a constant. Without names, the
/// initializers that [`onnx::parameters`] takes for parameters are trainable; if there is none, so are the constants of
/// more than one real number that it takes for parameters.
///
/// # Errors
/// As [`File::import`] with the sizes that are given.
pub fn training_input(
    file: File,
    source: &onnx::file::Model,
    options: &Options,
    wrt: Option<&[String]>,
) -> Result<TrainingInput, OnnxError> {
    let is_named = |name: &str| wrt.is_some_and(|names| names.iter().any(|n| n == name));
    let known = parameters(source);
    let scalars = match wrt {
        Some(names) => names.iter().cloned().collect(),
        None => known.marked.clone(),
    };
    let file = file.with_scalar_parameters(scalars);
    let (file, constants) = file.with_constants_stored(|name, _| is_named(name));
    let (mut model, sizes) = with_needed_sizes(&file, source, options)?;
    if wrt.is_none() {
        mark(&mut model, &known);
    }
    if wrt.is_some() || model.parameters.iter().any(|p| p.trainable) {
        return Ok(finished((model, sizes), constants, &known, wrt));
    }
    // Nobody named a constant, so the file still has all of them as nodes.
    let (file, mut constants) =
        file.with_constants_stored(|_, shape| shape.iter().product::<i64>() > 1);
    let mut options = options.clone();
    options.sizes.extend(sizes.clone());
    let mut model = file.import(&options)?;
    mark(&mut model, &known);
    // Leaves out, among others, statistics of batch normalization and what decides sizes.
    let is_trained = |name: &String| {
        let mut parameters = model.parameters.iter();
        parameters.any(|p| p.name == *name && p.trainable)
    };
    constants.retain(is_trained);
    Ok(finished((model, sizes), constants, &known, wrt))
}

/// The model of a file. Its trainable initializers are those that [`training_input`] trains if nobody names what to
/// train. `source` is the same file for the room `onnx`.
///
/// # Errors
/// As [`File::import`].
pub fn import_to_train(
    file: File,
    source: &onnx::file::Model,
    options: &Options,
) -> Result<Model, OnnxError> {
    let known = parameters(source);
    let file = file.with_scalar_parameters(known.marked.iter().cloned());
    let mut model = file.import(options)?;
    mark(&mut model, &known);
    Ok(model)
}

fn mark(model: &mut Model, known: &Parameters) {
    for parameter in &mut model.parameters {
        parameter.trainable &= !known.left_out.contains_key(&parameter.name);
    }
}

fn finished(
    (model, sizes): (Model, BTreeMap<String, i64>),
    constants: Vec<String>,
    known: &Parameters,
    wrt: Option<&[String]>,
) -> TrainingInput {
    let left_out = match wrt {
        Some(_) => Vec::new(),
        None => left_out(&model, known),
    };
    let is_trained = |shared: &&Shared| match wrt {
        Some(names) => names.contains(&shared.name),
        None => {
            let mut parameters = model.parameters.iter();
            parameters.any(|p| p.trainable && p.name == shared.name)
        }
    };
    let shared = known.shared.iter().filter(is_trained).cloned().collect();
    TrainingInput {
        by_default: wrt.is_none(),
        shared,
        model,
        sizes,
        constants,
        left_out,
    }
}

/// What is not trained: arrays that the training graph takes as inputs, and single numbers.
fn left_out(model: &Model, known: &Parameters) -> Vec<LeftOut> {
    let arrays = model.parameters.iter().filter(|p| !p.trainable);
    // The importer leaves out all that batch normalization reads as statistics, in functions too.
    let reason = |name: &str| match known.left_out.get(name) {
        Some(reason) => *reason,
        None if known.also_statistics.contains(name) => NotTrained::AlsoStatistic,
        None => NotTrained::Statistic,
    };
    let arrays = arrays.map(|p| LeftOut {
        name: p.name.clone(),
        elements: p.stored.n_elements(),
        reason: reason(&p.name),
    });
    let numbers = known.left_out.iter();
    let numbers = numbers.filter(|(_, why)| **why == NotTrained::Number);
    let numbers = numbers.map(|(name, reason)| LeftOut {
        name: name.clone(),
        elements: 1,
        reason: *reason,
    });
    arrays.chain(numbers).collect()
}

/// The model, and numbers for those sizes without which it has none.
fn with_needed_sizes(
    file: &File,
    source: &onnx::file::Model,
    options: &Options,
) -> Result<(Model, BTreeMap<String, i64>), OnnxError> {
    let error = match file.import(options) {
        Ok(model) => return Ok((model, BTreeMap::new())),
        Err(error) => error,
    };
    let mut sizes = found_sizes(source, file, &options.sizes).unwrap_or_default();
    if sizes.is_empty() {
        return Err(error);
    }
    let at = |sizes: &BTreeMap<String, i64>| {
        let mut options = options.clone();
        options.sizes.extend(sizes.clone());
        file.import(&options)
    };
    let Ok(mut model) = at(&sizes) else {
        return Err(error);
    };
    let names: Vec<String> = sizes.keys().cloned().collect();
    for name in names {
        let mut fewer = sizes.clone();
        fewer.remove(&name);
        if let Ok(found) = at(&fewer) {
            (model, sizes) = (found, fewer);
        }
    }
    Ok((model, sizes))
}

/// Values for the dynamic sizes of a model that are not given: ones with which it runs, as `optimize` finds them.
///
/// # Errors
/// There are none, or what is given does not fit.
pub fn found_sizes(
    model: &onnx::file::Model,
    file: &File,
    given: &BTreeMap<String, i64>,
) -> Result<BTreeMap<String, i64>, VerifyError> {
    let dynamic = file.dynamic_sizes();
    let open = dynamic
        .iter()
        .filter(|size| !given.contains_key(&size.name));
    let open: Vec<_> = open.collect();
    if open.is_empty() {
        return Ok(BTreeMap::new());
    }
    // Verification has names of its own for sizes that the file does not name.
    let own = |(name, n): (&String, &i64)| {
        let unnamed = dynamic.iter().find(|s| !s.is_named && s.name == *name);
        let own = unnamed.map(|s| format!("{}.{}", s.input, s.dimension));
        (own.unwrap_or_else(|| name.clone()), *n)
    };
    let options = verify::Options {
        sizes: given.iter().map(own).collect(),
        ..Default::default()
    };
    let feeds = verify::made_up(model, 0, &options)?;
    let mut found = BTreeMap::new();
    for size in open {
        let shape = feeds.get(&size.input).map(|tensor| &tensor.shape);
        if let Some(n) = shape.and_then(|shape| shape.get(size.dimension)) {
            found.insert(size.name.clone(), i64::try_from(*n).unwrap_or(i64::MAX));
        }
    }
    Ok(found)
}

/// The output that cross-entropy or the squared difference is of: the one that is wanted, or else the only one of real
/// numbers.
///
/// # Errors
/// There is none, or which one is not said.
pub(crate) fn output_of_loss<'m>(
    model: &'m Model,
    wanted: Option<&str>,
) -> Result<&'m Port, TrainingGraphError> {
    let dtype = |port: &Port| model.graph.container(port.container).dtype;
    let real = model.outputs.iter().filter(|port| dtype(port).is_float());
    let real: Vec<&Port> = real.collect();
    let found = match (wanted, real.as_slice()) {
        (None, [port]) => Some(*port),
        (None, _) => None,
        (Some(name), ports) => ports.iter().copied().find(|port| port.name == name),
    };
    found.ok_or_else(|| {
        let describe = |port: &Port| {
            let container = model.graph.container(port.container);
            let sizes: Vec<String> = container.shape.iter().map(ToString::to_string).collect();
            format!("`{}` {}[{}]", port.name, container.dtype, sizes.join(", "))
        };
        let outputs: Vec<String> = model.outputs.iter().map(describe).collect();
        let outputs = outputs.join(", ");
        TrainingGraphError::Request(match wanted {
            Some(wanted) => {
                format!("`{wanted}` is no output of real numbers of the model; its outputs are {outputs}")
            }
            None if real.is_empty() => {
                format!("a loss needs an output of real numbers, but the model's outputs are {outputs}")
            }
            None => format!(
                "the model has {} outputs of real numbers: {outputs}; name the one that the loss is of by the \
                 option `output`, or a loss among them by `loss`",
                real.len()
            ),
        })
    })
}
