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
    let found = interpret(
        &model.graph,
        &inputs,
        &Default::default(),
        &ops::Meaning,
        Precision::Double,
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
    attention: [
        ("test_attention_23_fullymasked_qk_*", "only its first output"),
        ("test_attention_24_fullymasked_qk_*", "only its first output"),
        ("test_attention_24_qk_matmul_*", "only its first output"),
        ("test_attention_3d_local_window", "`left_window_size` is not supported"),
        ("test_attention_4d_causal_nonpad_*", "lengths of keys are not supported"),
        ("test_attention_4d_causal_padded_kv_bf16", "lengths of keys are not supported"),
        ("test_attention_4d_gqa_causal_nonpad_*", "lengths of keys are not supported"),
        ("test_attention_4d_padded_kv_bf16", "lengths of keys are not supported"),
        ("test_attention_4d_softcap*", "`softcap` is not supported"),
        ("test_attention_bidirectional_window", "`right_window_size` are not supported"),
        ("test_attention_local_window_ext_*", "lengths of keys are not supported"),
    ];
    contraction: [];
    convolution: [];
    exported: [];
    indexing: [
        ("test_gathernd_example_int32_batch_dim1", "`batch_dims` is not supported"),
        ("test_scatter_elements_with_reduction_max", "reduction `max` is not supported"),
        ("test_scatter_elements_with_reduction_min", "reduction `min` is not supported"),
        ("test_scatter_elements_with_reduction_mul", "reduction `mul` is not supported"),
    ];
    loss: [];
    normalization: [];
    pooling: [
        ("test_averagepool_2d_dilations", "does not support dilation"),
        ("test_averagepool_3d_dilations_small", "does not support dilation"),
        ("test_lppool_2d_dilations", "does not support dilation"),
        ("test_maxpool_with_argmax_2d_precomputed_strides", "column-major order"),
        ("test_maxpool_2d_uint8", "does not support elements of type u8"),
    ];
    reduction: [];
    resize: [
        ("test_resize_downsample_scales_cubic*", "mode `cubic` is not supported"),
        ("test_resize_downsample_scales_linear*", "mode `linear` is not supported"),
        ("test_resize_downsample_scales_nearest", "only whole factors"),
        ("test_resize_downsample_sizes_cubic*", "mode `cubic` is not supported"),
        ("test_resize_downsample_sizes_linear*", "mode `linear` is not supported"),
        ("test_resize_downsample_sizes_nearest*", "only whole factors"),
        ("test_resize_tf_crop_*", "mode `linear` is not supported"),
        ("test_resize_upsample_scales_cubic*", "mode `cubic` is not supported"),
        ("test_resize_upsample_scales_linear*", "mode `linear` is not supported"),
        ("test_resize_upsample_sizes_cubic", "mode `cubic` is not supported"),
        ("test_resize_upsample_sizes_nearest_ceil_half_pixel", "`half_pixel` and `ceil`"),
        ("test_resize_upsample_sizes_nearest_floor_align_corners", "`align_corners` and `floor`"),
        ("test_resize_upsample_sizes_nearest_round_prefer_ceil_*", "`asymmetric` and `round_prefer_ceil`"),
        ("test_resize_upsample_sizes_nearest*", "only whole factors"),
    ];
    shape: [];
    slicing: [];
    source: [];
}
