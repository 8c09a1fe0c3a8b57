//! A file brought into the form that the rules of operators read: functions inlined, branches of known conditions
//! taken, operators of version 13 or newer, loops and recurrent cells of a known length written out.
//!
//! The `onnx` room does each of these on the file's own messages. This file owns their order, and leaves a file as it
//! is if it needs none of them. Inputs, outputs and initializers keep their names.

use super::error::{FIRST_READ_OPSET, Problem};
use super::file::File;
use super::names::unnamed_size;
use super::proto::{Dimension, ModelProto, ValueInfoProto};
use onnx::edit::{raise, unrolled};
use onnx::rewrite::{self, inline_all};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// The oldest version whose operators mean what they mean now.
const FIRST_KNOWN_OPSET: i64 = *onnx::check::OPSETS.start();

/// The rewrite that removes what no rule reads.
const RULE: &str = "inline-branch";

/// The file in that form, for these values of dynamic sizes; `None` if it has it already.
///
/// # Errors
/// Its operators are too old and cannot be raised, or its functions cannot be inlined.
pub(super) fn normalized(
    file: &File,
    sizes: &BTreeMap<String, i64>,
) -> Result<Option<File>, Problem> {
    let is_old = file.opset() < FIRST_READ_OPSET;
    if !is_old && file.unsupported().is_empty() {
        return Ok(None);
    }
    let folder: Arc<Path> = Arc::from(file.folder());
    let sound = onnx::file::Model {
        stamps: onnx::file::Stamps::default(),
        proto: file.model(),
        path: file.path().to_path_buf(),
        n_bytes: file.n_bytes(),
        folder: Arc::clone(&folder),
    };
    // The problems of a broken file are told in the terms of the file itself.
    if !onnx::check::errors_of_any_version(&sound).is_empty() {
        return match is_old {
            true => Err(too_old(file, "it is not well formed")),
            false => Ok(None),
        };
    }
    let model = with_sizes(sound.proto, sizes);
    let inlined = inline_all(&model).map_err(|error| Problem {
        place: format!("function `{}`", error.function()),
        message: error.to_string(),
    })?;
    let mut model = without(&inlined, &folder);
    // Before version 7 operands broadcast in another way: what is known of sizes holds from there on.
    for version in [FIRST_KNOWN_OPSET, FIRST_READ_OPSET] {
        if file.opset() < version {
            let raised = raise(&model, &folder, version);
            model = raised.map_err(|error| too_old(file, &error.to_string()))?;
        }
    }
    model = unrolled(&model, &folder);
    let has_branches = |m: &ModelProto| {
        let mut nodes = m.graph.iter().flat_map(|g| &g.node);
        nodes.any(|node| node.op_type == "If")
    };
    if has_branches(&model) {
        model = without(&model, &folder);
    }
    // Sizes stay as the file names them: they are bound with everything else.
    if let (Some(graph), Some(original)) = (&mut model.graph, file.model().graph) {
        let kept: BTreeSet<String> = graph.input.iter().map(|i| i.name.clone()).collect();
        graph.input = original.input;
        graph.input.retain(|input| kept.contains(&input.name));
        graph.output = original.output;
    }
    Ok(Some(file.with(model)))
}

fn too_old(file: &File, why: &str) -> Problem {
    Problem {
        place: format!("version {} of the operators", file.opset()),
        message: format!("{why}; export the model again with `opset_version=18`"),
    }
}

/// Returns the model without branches that are never taken.
fn without(model: &ModelProto, folder: &Arc<Path>) -> ModelProto {
    let others = rewrite::rule_names().into_iter();
    let others = others.filter(|name| *name != RULE);
    let options = rewrite::Options {
        without: others.map(str::to_string).collect(),
        ..Default::default()
    };
    rewrite::rewrite(model, folder, &options).model
}

/// The model with numbers for these sizes.
fn with_sizes(mut model: ModelProto, sizes: &BTreeMap<String, i64>) -> ModelProto {
    let Some(graph) = &mut model.graph else {
        return model;
    };
    let ports = graph.input.iter_mut().chain(&mut graph.output);
    for port in ports.chain(&mut graph.value_info) {
        fix(port, sizes);
    }
    model
}

fn fix(port: &mut ValueInfoProto, sizes: &BTreeMap<String, i64>) {
    let name = port.name.clone();
    let tensor = port.r#type.as_mut().and_then(|t| t.tensor_type.as_mut());
    let shape = tensor.and_then(|t| t.shape.as_mut());
    for (d, dim) in shape.into_iter().flat_map(|s| &mut s.dim).enumerate() {
        let given = match (&dim.value, dim.name()) {
            (Some(Dimension::DimValue(_)), _) => continue,
            (_, Some(size)) => sizes.get(size),
            _ => sizes.get(&unnamed_size(&name, d)),
        };
        if let Some(n) = given {
            dim.value = Some(Dimension::DimValue(*n));
        }
    }
}
