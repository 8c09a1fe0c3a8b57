//! Runs a small network of the room `models`, forward and backward, in double precision on given numbers.
//! `cargo run -p shorthaul-compiler --example rust_network -- unet_2d given.npz results.npz`
//!
//! `given.npz` has every input and parameter by its name, and `seed.N`, the gradient of a scalar with respect
//! to result N. `results.npz` gets `result.N`, `update.NAME` for what replaces a buffer, and `gradient.NAME`.
//! `torch-bridge/tests/test_rust_networks.py` compares these with PyTorch's.

use compiler::Step;
use graph::{Bindings, Graph, Precision, Tensor, interpret};
use onnx::npy::{read_npz, write_npz};
use onnx::tensor::{Tensor as Array, Values};
use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, given, results] = args.as_slice() else {
        return Err("give the name of a network, a file to read and a file to write".into());
    };
    let small = models::small::SMALL.iter().find(|(n, _)| n == name);
    let (_, make) = small.ok_or_else(|| format!("there is no network `{name}`"))?;
    let given = read_npz(&std::fs::read(given)?)?.into_iter().collect();
    let found = run(&make()?, given)?;
    let arrays = found.iter().map(|(name, array)| (name.as_str(), array));
    Ok(write_npz(arrays, File::create(results)?)?)
}

/// The results of a network by name.
fn run(
    network: &Graph,
    mut given: BTreeMap<String, Array>,
) -> Result<BTreeMap<String, Array>, Box<dyn Error>> {
    let name = |i: &usize| network.container(network.inputs[*i]).name.clone();
    let n_inputs = network.inputs.len();
    let wrt: Vec<usize> = (0..n_inputs)
        .filter(|i| network.container(network.inputs[*i]).dtype.is_float())
        .filter(|i| !name(i).contains("running_"))
        .collect();
    let step = Step::training(network, &wrt)?;
    let seeds = step.seeded_outputs.iter().map(|n| format!("seed.{n}"));
    let names: Vec<String> = (0..n_inputs).map(|i| name(&i)).chain(seeds).collect();
    let mut inputs = Vec::new();
    for (name, id) in names.iter().zip(&step.graph().inputs) {
        let array = given.remove(name);
        let array = array.ok_or_else(|| format!("`{name}` is not given"))?;
        inputs.push(tensor(&array, step.graph().container(*id).dtype)?);
    }
    if let Some(name) = given.keys().next() {
        return Err(format!("the network has no `{name}`").into());
    }
    let none = Bindings::new();
    let all = interpret(
        step.graph(),
        &inputs,
        &none,
        &ops::Meaning,
        Precision::Double,
    )?;
    let results = network
        .outputs
        .iter()
        .enumerate()
        .map(|(n, o)| match o.updates {
            Some(buffer) => format!("update.{}", network.container(buffer).name),
            None => format!("result.{n}"),
        });
    let gradients = step.gradient_inputs.iter();
    let gradients = gradients.map(|i| format!("gradient.{}", name(i)));
    let named = results.chain(gradients).zip(&all);
    Ok(named.map(|(name, t)| (name, array(t))).collect())
}

/// A tensor of that declared type; reals keep all their bits.
fn tensor(array: &Array, dtype: graph::DType) -> Result<Tensor, Box<dyn Error>> {
    match &*array.values {
        Values::F64(v) if dtype.is_float() => Ok(Tensor::from_f64(dtype, &array.shape, v.clone())),
        Values::I64(v) if dtype.is_int() => Ok(Tensor::from_i64(dtype, &array.shape, v.clone())),
        other => Err(format!("{:?} for elements of type {dtype}", other.element()).into()),
    }
}

fn array(tensor: &Tensor) -> Array {
    Array::new(&tensor.shape, Values::F64(tensor.to_f64()))
}
