//! Models in: exported PyTorch graphs and ONNX files become graphs of library nodes. Graphs out: ONNX files.

pub mod onnx;
pub mod torch;
