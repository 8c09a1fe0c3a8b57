//! The oracle tract: an inference engine with its own reader of ONNX, linked into this program.
//!
//! Owns the conversion of tensors. If tract does not know an operator, or panics, that is a refusal.

use anyhow::{Context, Result, bail};
use onnx::evaluate::Values as Feeds;
use onnx::file::{self, Model};
use onnx::tensor::{Tensor, Values};
use onnx::verify::{Oracle, OracleError};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use tract_onnx::prelude::tract_ndarray::ArrayD;
use tract_onnx::prelude::{
    Datum, DatumType, Framework, InferenceFact, InferenceModelExt, IntoRunnable, IntoTensor,
    TValue, TVec,
};

type TractTensor = tract_onnx::prelude::Tensor;

/// The engine.
#[derive(Clone, Copy, Debug)]
pub struct Tract;

impl Oracle for Tract {
    fn name(&self) -> &str {
        "tract"
    }

    fn outputs(&self, model: &Model, feeds: &[Feeds]) -> Result<Vec<Vec<Tensor>>, OracleError> {
        let folder = tempfile::Builder::new().prefix("shorthaul-").tempdir();
        let folder = folder.map_err(|error| OracleError::Unasked(error.to_string()))?;
        file::on_abandon(folder.path());
        let path = folder.path().join("model.onnx");
        let written = file::write(model, &path);
        written.map_err(|error| OracleError::Unasked(error.to_string()))?;
        // Its panics become refusals, so their messages are not printed too. Those of other threads are.
        let hook = Arc::new(take_hook());
        let (own, others) = (thread::current().id(), Arc::clone(&hook));
        set_hook(Box::new(move |info| {
            if thread::current().id() != own {
                others(info);
            }
        }));
        let found = feeds
            .iter()
            .map(|feeds| catch_unwind(AssertUnwindSafe(|| outputs(&path, feeds))))
            .collect::<Vec<_>>();
        set_hook(Box::new(move |info| hook(info)));
        found
            .into_iter()
            .map(|found| match found {
                Ok(Ok(outputs)) => Ok(outputs),
                Ok(Err(error)) => Err(OracleError::Refused(format!("{error:#}"))),
                Err(_) => Err(OracleError::Refused("tract panicked".to_string())),
            })
            .collect()
    }
}

fn outputs(path: &Path, feeds: &Feeds) -> Result<Vec<Tensor>> {
    // Inputs have the sizes that are given; declared names of sizes would contradict them.
    let reader = tract_onnx::onnx()
        .with_ignore_output_shapes(true)
        .with_ignore_value_info(true);
    let mut read = reader.model_for_path(path)?;
    let mut values: TVec<TValue> = TVec::new();
    for (position, outlet) in read.input_outlets()?.to_vec().into_iter().enumerate() {
        let name = read.node(outlet.node).name.clone();
        let given = feeds.get(&name).with_context(|| {
            format!("tract asks for `{name}`, which is not an input of the model")
        })?;
        let value = there(given)?;
        let fact = InferenceFact::dt_shape(value.datum_type(), value.shape());
        read = read.with_input_fact(position, fact)?;
        values.push(value.into());
    }
    let outputs = read.into_optimized()?.into_runnable()?.run(values)?;
    let back_again = |value: TValue| back(&value.into_tensor());
    outputs.into_iter().map(back_again).collect()
}

fn there(tensor: &Tensor) -> Result<TractTensor> {
    let shape = tensor.shape.as_slice();
    Ok(match &*tensor.values {
        Values::F32(v) => ArrayD::from_shape_vec(shape, v.clone())?.into(),
        Values::F64(v) => ArrayD::from_shape_vec(shape, v.clone())?.into(),
        Values::I64(v) => ArrayD::from_shape_vec(shape, v.clone())?.into(),
        Values::I32(v) => ArrayD::from_shape_vec(shape, v.clone())?.into(),
        Values::I8(v) => ArrayD::from_shape_vec(shape, v.clone())?.into(),
        Values::U8(v) => ArrayD::from_shape_vec(shape, v.clone())?.into(),
        Values::Bool(v) => ArrayD::from_shape_vec(shape, v.clone())?.into(),
        other => bail!("tract cannot take tensors of type {}", other.element()),
    })
}

fn back(tensor: &TractTensor) -> Result<Tensor> {
    fn elements<T: Datum + Copy>(tensor: &TractTensor) -> Result<Vec<T>> {
        Ok(tensor.to_plain_array_view::<T>()?.iter().copied().collect())
    }
    let values = match tensor.datum_type() {
        DatumType::F32 => Values::F32(elements(tensor)?),
        DatumType::F64 => Values::F64(elements(tensor)?),
        DatumType::I64 => Values::I64(elements(tensor)?),
        DatumType::I32 => Values::I32(elements(tensor)?),
        DatumType::I8 => Values::I8(elements(tensor)?),
        DatumType::U8 => Values::U8(elements(tensor)?),
        DatumType::Bool => Values::Bool(elements(tensor)?),
        // Sizes are a type of their own there.
        DatumType::TDim => Values::I64(elements(&tensor.cast_to_dt(DatumType::I64)?.into_owned())?),
        other => bail!("cannot read tract's result of type {other:?}"),
    };
    Ok(Tensor::new(tensor.shape(), values))
}
