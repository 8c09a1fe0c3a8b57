//! Bytes as an ONNX file through `shorthaul check`: a list of problems.

#![no_main]

use bytes::Bytes;
use fuzz::{PATH, deep};
use libfuzzer_sys::fuzz_target;
use onnx::check;
use onnx::file::Model;
use std::path::Path;

fuzz_target!(|bytes: &[u8]| {
    deep(|| {
        if let Ok(model) = Model::of_bytes(Path::new(PATH), Bytes::copy_from_slice(bytes)) {
            let n_errors = check::errors(&model).len();
            assert!(check::problems(&model).len() >= n_errors);
        }
    });
});
