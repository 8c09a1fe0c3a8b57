//! Bytes as an ONNX file through the importer: an error, or a graph that the verifier accepts.

#![no_main]

use bytes::Bytes;
use fuzz::{PATH, deep};
use importer::onnx::{File, Options};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    deep(|| {
        let Ok(file) = File::decode(PATH, Bytes::copy_from_slice(bytes)) else {
            return;
        };
        if let Ok(model) = file.import(&Options::default()) {
            graph::verify(&model.graph).expect("what is imported is verified");
        }
    });
});
