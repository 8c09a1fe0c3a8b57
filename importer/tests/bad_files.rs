//! Files that cannot be imported: each has one message that says where and what to do, none panics.

use bytes::Bytes;
use graph::DType;
use importer::onnx::{File, OnnxError, Options};
use std::path::PathBuf;

const MLP: &[u8] = include_bytes!("data/bad_files/mlp.onnx");

fn decode(bytes: &[u8]) -> Result<File, OnnxError> {
    File::decode("m.onnx", Bytes::copy_from_slice(bytes))
}

fn message(bytes: &[u8]) -> String {
    match decode(bytes) {
        Err(error) => error.to_string(),
        Ok(file) => file
            .import(&Options::default())
            .expect_err("an error")
            .to_string(),
    }
}

/// The folder of vendored models with external data.
fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/bad_files")
        .join(name)
}

fn import_error(name: &str) -> String {
    let file = File::read(data(name)).expect("a file that decodes");
    let error = file.import(&Options::default()).expect_err("an error");
    error
        .to_string()
        .replace(data("").to_str().unwrap_or_default(), "")
}

#[test]
fn every_truncation_is_refused_or_imports_a_whole_model() {
    let whole = decode(MLP).expect("the whole file").operators();
    for n in 0..MLP.len() {
        match decode(&MLP[..n]) {
            Err(error) => {
                let text = error.to_string();
                let known = ["m.onnx is ", "m.onnx uses version 1 "];
                assert!(known.iter().any(|k| text.starts_with(k)), "{n}: {text}");
            }
            // Cut at the end of a field after the graph: all that is read is there.
            Ok(file) => assert_eq!(file.operators(), whole, "{n}"),
        }
    }
    let cut = message(&MLP[..MLP.len() / 2]);
    assert!(
        cut.contains("m.onnx is damaged: byte ") && cut.contains("`graph` ends at byte"),
        "{cut}"
    );
}

#[test]
fn every_flipped_byte_imports_or_is_refused() {
    for n in 0..MLP.len() {
        for mask in [0x01, 0x80, 0xff] {
            let mut bytes = MLP.to_vec();
            bytes[n] ^= mask;
            if let Ok(file) = decode(&bytes) {
                // Whatever comes of it, nothing panics.
                let _ = file.import(&Options::default());
            }
        }
    }
}

#[test]
fn other_formats_are_named() {
    assert!(message(b"").contains("it is empty"));
    assert!(message(b"PK\x03\x04rest").contains("zip archive"));
    assert!(message(b"version https://git-lfs.github.com/spec/v1\n").contains("git lfs pull"));
    assert!(message(b"import torch\n").contains("is not an ONNX file"));
    assert!(message(b"\x08\x08").contains("no `ir_version` or no `graph`"));
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = File::read("no/such.onnx").expect_err("an error");
    assert!(
        error.to_string().starts_with("cannot read no/such.onnx: "),
        "{error}"
    );
}

#[test]
fn old_operator_sets_are_raised_and_unknown_ones_refused_with_their_version() {
    let old = File::read(data("opset12.onnx")).expect("a file");
    assert_eq!(old.opset(), 12);
    let model = old.import(&Options::default()).expect("a model");
    assert_eq!(model.outputs.len(), 1);
    let error = File::read(data("opset99.onnx")).expect_err("an error");
    let error = error.to_string();
    assert!(
        error.contains("uses version 99 of the ONNX operators"),
        "{error}"
    );
    assert!(error.contains("opset_version=18"), "{error}");
}

#[test]
fn all_unsupported_operators_and_problems_are_named_at_once() {
    let text = import_error("problems.onnx");
    let expected = "problems.onnx cannot be imported
  operators that are not supported:
    If: choose
    ImageDecoder: d0, d1, d2, d3 and 1 more
    com.example.Magic: magic
    local.Twice (a function of the model; `shorthaul check` says why it cannot be inlined): twice
  initializer `wide`: element type `uint64` is not supported
  initializer `short`: its shape [2, 3] of f32 takes 24 bytes, but 20 are stored
  input `text`: element type `string` is not supported
  node `lost` (Relu): its input `nowhere` is defined nowhere before it
  node `shape` (Reshape): its input `x` depends on data; it must follow from shapes and constants
  node `mode` (Pad): padding of mode `mirror` is not supported
  node `attribute` (Relu): its attribute `magic` is not supported
  output `missing`: no node defines it";
    assert_eq!(text, expected);
}

#[test]
fn external_data_stays_in_the_models_folder() {
    let text = import_error("external_escape.onnx");
    assert!(
        text.contains("only paths below the model's folder are read"),
        "{text}"
    );
    let text = import_error("external_missing.onnx");
    assert!(text.contains("initializer `w`: cannot read "), "{text}");
    let text = import_error("external_short.onnx");
    assert!(text.contains("reach beyond the end of"), "{text}");
}

#[test]
fn external_data_is_read_at_its_offset() {
    let file = File::read(data("external.onnx")).expect("a file");
    let model = file.import(&Options::default()).expect("a model");
    let [parameter] = model.parameters.as_slice() else {
        panic!("one parameter");
    };
    let tensor = parameter.stored.tensor().expect("its data");
    assert_eq!(
        (tensor.dtype, tensor.shape.as_slice()),
        (DType::F32, &[4, 2][..])
    );
    assert_eq!(tensor.to_f64(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
}
