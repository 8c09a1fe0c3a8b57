//! Inputs from files: `.npz`, `.npy`, and `.pb` with one tensor as the standard's test data have it.

use anyhow::{Context, Result, bail};
use onnx::evaluate::Values;
use onnx::file::Model;
use onnx::npy;
use onnx::proto::{TensorProto, ValueInfoProto};
use onnx::tensor::Tensor;
use prost::Message;
use std::path::Path;

/// The tensors of a file by the names of the model's inputs. An `.npy` or nameless `.pb` is for the
/// input that the file is called after, or else for the only input.
///
/// # Errors
/// The file cannot be read, or is for no input of the model.
pub fn read(path: &Path, model: &Model) -> Result<Values> {
    let cannot = || format!("cannot read {}", path.display());
    let bytes = std::fs::read(path).with_context(cannot)?;
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("");
    let mut values = Values::new();
    match extension {
        "npz" => {
            let arrays = npy::read_npz(&bytes).map_err(anyhow::Error::msg);
            values.extend(arrays.with_context(cannot)?);
        }
        "npy" => {
            let tensor = npy::read_npy(&bytes).map_err(anyhow::Error::msg);
            let name = input_for(path, "", model)?;
            values.insert(name, tensor.with_context(cannot)?);
        }
        "pb" => {
            let proto = TensorProto::decode(bytes.as_slice()).with_context(cannot)?;
            let tensor = Tensor::of_proto(&proto).map_err(anyhow::Error::msg);
            let name = input_for(path, &proto.name, model)?;
            values.insert(name, tensor.with_context(cannot)?);
        }
        _ => bail!(
            "cannot read {}: inputs are .npz, .npy or .pb files",
            path.display()
        ),
    }
    let inputs = inputs(model);
    if let Some(name) = values
        .keys()
        .find(|n| !inputs.iter().any(|i| i.name == **n))
    {
        let known: Vec<&str> = inputs.iter().map(|i| i.name.as_str()).collect();
        bail!(
            "{} has no input `{name}`, but {} has an array of that name; the inputs are {}",
            model.path.display(),
            path.display(),
            known.join(", ")
        );
    }
    Ok(values)
}

/// Inputs that have to be given, then those that may be.
pub fn inputs(model: &Model) -> Vec<&ValueInfoProto> {
    model.proto.graph.iter().flat_map(|g| &g.input).collect()
}

/// Which input a file with one tensor is for.
fn input_for(path: &Path, name: &str, model: &Model) -> Result<String> {
    let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or("");
    let graph = model.proto.graph.as_ref();
    let is_stored = |n: &str| graph.is_some_and(|g| g.initializer.iter().any(|t| t.name == n));
    let inputs = inputs(model);
    // `input_0.pb`, as the standard's test data have it.
    let numbered = stem.strip_prefix("input_").and_then(|n| n.parse().ok());
    let named = inputs.iter().find(|i| i.name == name || i.name == stem);
    let mut open = inputs.iter().filter(|i| !is_stored(&i.name));
    let found = match (named, numbered, open.next(), open.next()) {
        (Some(named), ..) => Some(named),
        (None, Some(n), ..) => inputs.get::<usize>(n),
        (None, None, Some(only), None) => Some(only),
        _ => None,
    };
    match found {
        Some(input) => Ok(input.name.clone()),
        None => bail!(
            "cannot tell which input {} belongs to; name the file after an input: {}",
            path.display(),
            inputs
                .iter()
                .map(|i| format!("{}.npy", i.name))
                .collect::<Vec<_>>()
                .join(", ")
        ),
    }
}
