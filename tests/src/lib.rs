//! Tests that cross rooms.

pub mod every_command;
pub mod extremes;
pub mod mutate;
pub mod onnx_coverage;
pub mod stored_cases;
