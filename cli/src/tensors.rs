//! Inputs from files: `.npz`, `.npy`, and `.pb` with one tensor as the standard's test data have it.

use anyhow::{Context, Result, bail};
use onnx::evaluate::Values;
use onnx::file::Model;
use onnx::npy;
use onnx::proto::{TensorProto, ValueInfoProto};
use onnx::tensor::Tensor;
use onnx::verify::Sample;
use prost::Message;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Inputs for one or several runs. An `.npz` file starts a new run. A file with one tensor belongs to the run of
/// the file before it, unless that run has a tensor for the same input.
///
/// # Errors
/// As for [`read`].
pub fn samples(files: &[PathBuf], model: &Model) -> Result<Vec<Sample>> {
    let mut samples: Vec<Sample> = Vec::new();
    for file in files {
        let inputs = read(file, model)?;
        let is_archive = file.extension().is_some_and(|e| e == "npz");
        let takes = |sample: &&mut Sample| {
            let is_taken = inputs.keys().any(|name| sample.inputs.contains_key(name));
            !(is_archive || is_taken)
        };
        let shown = file.display().to_string();
        match samples.last_mut().filter(takes) {
            Some(sample) => {
                sample.files = format!("{} and {shown}", sample.files);
                sample.inputs.extend(inputs);
            }
            None => samples.push(Sample {
                files: shown,
                inputs,
            }),
        }
    }
    Ok(samples)
}

/// The inputs of one run, from all files together.
///
/// # Errors
/// As for [`read`], or two files are for the same input.
pub fn together(files: &[PathBuf], model: &Model) -> Result<Values> {
    let mut all = Values::new();
    let mut sources: BTreeMap<String, &Path> = BTreeMap::new();
    for file in files {
        for (name, tensor) in read(file, model)? {
            if let Some(other) = sources.insert(name.clone(), file) {
                bail!(
                    "{} and {} both give the input `{name}`; one run takes it once",
                    other.display(),
                    file.display()
                );
            }
            all.insert(name, tensor);
        }
    }
    Ok(all)
}

/// The tensors of a file by the names of the model's inputs. An `.npy` or nameless `.pb` is for the
/// input that the file is called after, or else for the only input.
///
/// # Errors
/// The file cannot be read, or is for no input of the model.
fn read(path: &Path, model: &Model) -> Result<Values> {
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
