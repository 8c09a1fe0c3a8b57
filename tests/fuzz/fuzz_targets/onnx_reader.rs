//! Bytes as an ONNX file: an error, or a model that is read again as it is written.

#![no_main]

use bytes::Bytes;
use fuzz::{PATH, deep};
use libfuzzer_sys::fuzz_target;
use onnx::file::{Model, encoded};
use std::path::Path;

fuzz_target!(|bytes: &[u8]| {
    deep(|| {
        let path = Path::new(PATH);
        let Ok(model) = Model::of_bytes(path, Bytes::copy_from_slice(bytes)) else {
            return;
        };
        // A model with data in another file cannot be written in one piece.
        let Ok(written) = encoded(&model) else { return };
        let again = Model::of_bytes(path, written.clone().into()).expect("what is written is read");
        assert_eq!(encoded(&again).ok(), Some(written));
    });
});
