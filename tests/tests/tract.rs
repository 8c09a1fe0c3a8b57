//! tract, an inference engine with its own reading of ONNX, as an independent oracle: for every
//! model of the importer's cases that tract runs, its outputs are those of the imported graph.
//!
//! tract knows fewer operators and less of training than the importer, so what it refuses is counted
//! rather than listed; a floor under the number of agreeing models keeps the test from going empty.

use bytes::Bytes;
use compiler::Step;
use graph::{DType, Precision, Tensor, infer_bindings, interpret};
use importer::onnx::{File, Options, decode_tensor};
use prost::Message;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tract_onnx::prelude::{
    DatumType, Framework, InferenceFact, InferenceModelExt, IntoRunnable, IntoTensor, TValue, TVec,
    TractResult, tract_ndarray::ArrayD,
};

/// tract computes in single precision, in an order of its own; half a unit of 16-bit floats is larger.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 1e-3,
        _ => 5e-5,
    }
}

/// Cases of the standard whose given outputs are ours, not tract's: it starts maxima of nothing with
/// the smallest finite number and takes one mode of SpaceToDepth for the other.
const TRACT_DIFFERS: [&str; 3] = [
    "test_reduce_max_empty_set",
    "test_reduce_min_empty_set",
    "test_spacetodepth_crd_mode_example",
];

#[derive(Clone, PartialEq, prost::Message)]
struct Cases {
    #[prost(message, repeated, tag = "1")]
    case: Vec<Case>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Case {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(bytes = "bytes", tag = "2")]
    model: Bytes,
    #[prost(bytes = "bytes", repeated, tag = "3")]
    input: Vec<Bytes>,
}

/// The outputs as tract computes them; `Err` where it does not run the model.
fn by_tract(model: &[u8], inputs: &[Tensor]) -> TractResult<Vec<tract_onnx::prelude::Tensor>> {
    let mut read = tract_onnx::onnx().model_for_read(&mut &*model)?;
    let mut values: TVec<TValue> = TVec::new();
    for (position, input) in inputs.iter().enumerate() {
        let value = tract_tensor(input)?.ok_or_else(|| io::Error::other("no such type here"))?;
        let fact = InferenceFact::dt_shape(value.datum_type(), value.shape());
        read = read.with_input_fact(position, fact)?;
        values.push(value.into());
    }
    let outputs = read.into_optimized()?.into_runnable()?.run(values)?;
    Ok(outputs.into_iter().map(TValue::into_tensor).collect())
}

fn tract_tensor(input: &Tensor) -> TractResult<Option<tract_onnx::prelude::Tensor>> {
    let shape = input.shape.as_slice();
    let (floats, ints) = (input.to_f64(), input.to_i64());
    let made = match input.dtype {
        DType::F32 => ArrayD::from_shape_vec(shape, floats)?
            .mapv(|x| x as f32)
            .into(),
        DType::F64 => ArrayD::from_shape_vec(shape, floats)?.into(),
        DType::I64 => ArrayD::from_shape_vec(shape, ints)?.into(),
        DType::I32 => ArrayD::from_shape_vec(shape, ints)?
            .mapv(|i| i as i32)
            .into(),
        DType::Bool => ArrayD::from_shape_vec(shape, ints)?.mapv(|i| i != 0).into(),
        _ => return Ok(None),
    };
    Ok(Some(made))
}

/// The first difference from our result.
fn difference(ours: &Tensor, theirs: &tract_onnx::prelude::Tensor) -> Option<String> {
    if ours.shape != theirs.shape() {
        return Some(format!(
            "shape {:?}, tract {:?}",
            ours.shape,
            theirs.shape()
        ));
    }
    let theirs = match theirs.cast_to_dt(DatumType::F64) {
        Ok(cast) => cast.into_owned(),
        Err(e) => return Some(e.to_string()),
    };
    let view = theirs.to_plain_array_view::<f64>().ok()?;
    let tolerance = tolerance(ours.dtype);
    let ours = ours.to_f64();
    let finite = ours.iter().filter(|x| x.is_finite());
    let scale = finite.fold(1.0, |m: f64, x| m.max(x.abs()));
    for (at, (a, b)) in ours.iter().zip(view.iter()).enumerate() {
        let same = a == b || (a.is_nan() && b.is_nan());
        if !same && (a - b).abs() > tolerance * scale {
            return Some(format!("element {at} is {a}, tract {b}"));
        }
    }
    None
}

/// What the forward step of the importer's graph means, in double precision.
fn by_us(case: &Case, inputs: &[Tensor]) -> Option<Vec<Tensor>> {
    let file = File::decode(&case.name, case.model.clone()).ok()?;
    let model = file.import(&Options::default()).ok()?;
    let mut given = inputs.to_vec();
    given.extend(
        model
            .parameters
            .iter()
            .filter_map(|p| p.stored.tensor().ok()),
    );
    let shapes: Vec<_> = given.iter().map(|t| t.shape.clone()).collect();
    let bindings = infer_bindings(&model.graph, &shapes).ok()?;
    let step = Step::forward(&model.graph).ok()?;
    interpret(
        step.graph(),
        &given,
        &bindings,
        &ops::Meaning,
        Precision::Double,
    )
    .ok()
}

#[derive(Default)]
struct Tally {
    agree: Vec<String>,
    differ: Vec<String>,
    known: usize,
    refused: Vec<String>,
}

fn check(bytes: &'static [u8], tally: &mut Tally) {
    let cases = Cases::decode(Bytes::from_static(bytes)).expect("well-formed cases");
    for case in cases.case {
        let decoded = case.input.iter().cloned().map(decode_tensor);
        let Ok(inputs) = decoded.collect::<Result<Vec<_>, _>>() else {
            continue;
        };
        let Some(ours) = by_us(&case, &inputs) else {
            continue;
        };
        // tract panics on some models it does not know.
        let theirs = catch_unwind(AssertUnwindSafe(|| by_tract(&case.model, &inputs)));
        let Ok(Ok(theirs)) = theirs else {
            tally.refused.push(case.name);
            continue;
        };
        let mut pairs = ours.iter().zip(&theirs).enumerate();
        match pairs.find_map(|(n, (a, b))| Some((n, difference(a, b)?))) {
            None => tally.agree.push(case.name),
            Some(_) if TRACT_DIFFERS.contains(&case.name.as_str()) => tally.known += 1,
            Some((n, what)) => tally
                .differ
                .push(format!("{}: output {n}: {what}", case.name)),
        }
    }
}

macro_rules! family {
    ($name:literal) => {
        include_bytes!(concat!("../../importer/tests/data/", $name, ".cases")).as_slice()
    };
}

#[test]
fn tract_computes_what_imported_graphs_mean() {
    let families = [
        family!("activation"),
        family!("arithmetic"),
        family!("attention"),
        family!("contraction"),
        family!("convolution"),
        family!("exported"),
        family!("indexing"),
        family!("loss"),
        family!("normalization"),
        family!("pooling"),
        family!("reduction"),
        family!("resize"),
        family!("shape"),
        family!("slicing"),
        family!("source"),
    ];
    let mut tally = Tally::default();
    for bytes in families {
        check(bytes, &mut tally);
    }
    println!("tract refuses: {}", tally.refused.join(", "));
    let n_agree = tally.agree.len();
    assert!(
        tally.differ.is_empty(),
        "{} differ, {n_agree} agree:\n{}",
        tally.differ.len(),
        tally.differ.join("\n")
    );
    assert_eq!(tally.known, TRACT_DIFFERS.len(), "tract has changed");
    assert!(n_agree >= 550, "only {n_agree} models agree");
    // Whole networks, by both of PyTorch's exporters.
    let networks = tally.agree.iter().filter(|name| !name.starts_with("test_"));
    let networks: Vec<_> = networks.collect();
    assert!(networks.len() >= 4, "{networks:?}");
}
