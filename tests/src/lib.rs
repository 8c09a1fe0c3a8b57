//! Tests that cross rooms.

pub mod every_command;
pub mod mutate;
pub mod onnx_coverage;
pub mod stored_cases;
