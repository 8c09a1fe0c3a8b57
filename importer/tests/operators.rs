//! The ONNX standard's node tests, and models that PyTorch exported: each case is imported,
//! interpreted in double precision and compared with the expected outputs.
//!
//! Data and how it is made: tests/data/generate.py and tests/data/export.py. A case the importer refuses must be in its
//! family's list of refusals below, with the words of the refusal; a case that is supported and
//! listed fails too, so the lists cannot go stale.

use bytes::Bytes;
use graph::{DType, InterpretError, Precision, Tensor, interpret};
use importer::onnx::{File, Options, decode_tensor};
use prost::Message;

/// A family's cases.
#[derive(Clone, PartialEq, prost::Message)]
struct Cases {
    #[prost(message, repeated, tag = "1")]
    case: Vec<Case>,
}

/// A model with inputs and expected outputs.
#[derive(Clone, PartialEq, prost::Message)]
struct Case {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(bytes = "bytes", tag = "2")]
    model: Bytes,
    #[prost(bytes = "bytes", repeated, tag = "3")]
    input: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "4")]
    output: Vec<Bytes>,
}

/// What became of a case.
enum Outcome {
    Equal,
    Refused(String),
    Wrong(String),
}

fn run(case: &Case) -> Outcome {
    let file = match File::decode("case.onnx", case.model.clone()) {
        Ok(file) => file,
        Err(error) => return Outcome::Refused(error.to_string()),
    };
    let model = match file.import(&Options::default()) {
        Ok(model) => model,
        Err(error) => return Outcome::Refused(error.to_string()),
    };
    if let Err(broken) = graph::verify(&model.graph) {
        return Outcome::Wrong(format!("verifier: {broken:?}"));
    }
    let decoded: Result<Vec<Tensor>, String> =
        case.input.iter().cloned().map(decode_tensor).collect();
    let mut inputs = match decoded {
        Ok(inputs) => inputs,
        Err(error) => return Outcome::Refused(error),
    };
    let stored = model.parameters.iter().map(|p| p.stored.tensor());
    inputs.extend(stored.map(|t| t.expect("stored inside the case")));
    // What a float is rounded to depends on every rounding before it.
    let outputs = model.graph.outputs.iter();
    let mut types = outputs.map(|o| model.graph.container(o.container).dtype);
    let precision = match types.any(DType::is_int) {
        true => Precision::Declared,
        false => Precision::Double,
    };
    let found = interpret(
        &model.graph,
        &inputs,
        &Default::default(),
        &ops::Meaning,
        precision,
    );
    let found = match found {
        Ok(found) => found,
        Err(error @ InterpretError::Library { .. }) => return Outcome::Refused(error.to_string()),
        Err(error) => return Outcome::Wrong(error.to_string()),
    };
    for (n, (found, expected)) in found.iter().zip(&case.output).enumerate() {
        let expected = match decode_tensor(expected.clone()) {
            Ok(expected) => expected,
            Err(error) => return Outcome::Refused(error),
        };
        if let Some(what) = difference(found, &expected) {
            return Outcome::Wrong(format!("output {n}: {what}"));
        }
    }
    Outcome::Equal
}

/// The expected outputs are computed in their own type, most in `f32`: relative and absolute error
/// of a few of its units. Half types keep 11 or 8 bits.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-5,
        DType::F64 => 1e-6,
        DType::F16 => 2e-3,
        DType::BF16 => 1e-2,
        _ => 0.0,
    }
}

fn difference(found: &Tensor, expected: &Tensor) -> Option<String> {
    if (found.dtype, &found.shape) != (expected.dtype, &expected.shape) {
        let (a, b) = (found, expected);
        return Some(format!(
            "{} {:?} instead of {} {:?}",
            a.dtype, a.shape, b.dtype, b.shape
        ));
    }
    if !expected.dtype.is_float() {
        let (found, expected) = (found.to_i64(), expected.to_i64());
        let at = (0..expected.len()).find(|at| found[*at] != expected[*at]);
        return at.map(|at| format!("element {at} is {} instead of {}", found[at], expected[at]));
    }
    let tolerance = tolerance(expected.dtype);
    for (at, (a, b)) in found
        .to_f64()
        .into_iter()
        .zip(expected.to_f64())
        .enumerate()
    {
        let same = a == b || (a.is_nan() && b.is_nan());
        let near = (a - b).abs() <= tolerance * (1.0 + b.abs());
        if !same && !near {
            return Some(format!("element {at} is {a} instead of {b}"));
        }
    }
    None
}

/// Runs a family; `refusals` are pairs of a case's name (or its beginning, with `*`) and a part of
/// the message.
fn check(bytes: &'static [u8], refusals: &[(&str, &str)]) {
    let cases = Cases::decode(Bytes::from_static(bytes))
        .expect("well-formed cases")
        .case;
    assert!(!cases.is_empty());
    let mut complaints = Vec::new();
    for case in &cases {
        let fits = |name: &str| match name.strip_suffix('*') {
            Some(start) => case.name.starts_with(start),
            None => case.name == name,
        };
        let listed = refusals.iter().find(|(name, _)| fits(name));
        match (run(case), listed) {
            (Outcome::Equal, None) => {}
            (Outcome::Refused(text), Some((_, part))) if text.contains(part) => {}
            (Outcome::Equal, Some(_)) => complaints.push(format!("{}: is supported", case.name)),
            (Outcome::Refused(text), _) => {
                complaints.push(format!("{}: refused: {text}", case.name))
            }
            (Outcome::Wrong(text), _) => complaints.push(format!("{}: WRONG: {text}", case.name)),
        }
    }
    let (n, all) = (complaints.len(), cases.len());
    assert!(
        complaints.is_empty(),
        "{n} of {all} cases:\n{}",
        complaints.join("\n")
    );
}

macro_rules! families {
    ($($name:ident: [$($refusal:expr),* $(,)?];)*) => { $(
        #[test]
        fn $name() {
            check(include_bytes!(concat!("data/", stringify!($name), ".cases")), &[$($refusal),*]);
        }
    )* };
}

families! {
    activation: [];
    arithmetic: [];
    attention: [];
    bits: [
        ("test_bitcast_2d_float32_to_int32", "those of floats are not computed with"),
        ("test_bitcast_float*", "those of floats are not computed with"),
        ("test_bitcast_int32_to_float32", "those of floats are not computed with"),
        ("test_bitcast_int64_to_float64", "those of floats are not computed with"),
        ("test_bitcast_scalar_float32_to_int32", "those of floats are not computed with"),
    ];
    contraction: [];
    convolution: [];
    deformed: [];
    edges: [
        ("LSTM: cut", "operators that are not supported"),
        ("Pad: beyond 53 bits", "more than 53 bits"),
        ("RNN: rectified, both ways", "operators that are not supported"),
    ];
    exported: [];
    indexing: [];
    loss: [];
    ngrams: [];
    normalization: [];
    pooling: [];
    quantization: [];
    reduction: [];
    resize: [];
    runtime: [];
    runtime_attention: [];
    sampling: [];
    sequence: [];
    sequences: [];
    shape: [];
    signal: [];
    slicing: [];
    source: [];
    unsized_results: [("test_*", "the size of its result depends on data")];
}
