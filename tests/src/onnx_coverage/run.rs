//! A case compiled to C and run.

use super::{Case, Output, dtype, given};
use compiler::{Executable, Step};
use graph::{Tensor, infer_bindings};
use importer::onnx::Model;
use kernels::compile::CompileOptions;
use kernels::memory::AlignedBuffer;
use kernels::pool::Pool;
use kernels::progress::Silent;
use onnx::stored::Stored;

/// What the C of a case gives in memory of its own.
pub(super) fn compiled(model: &Model, case: &Case) -> Result<Vec<Output>, String> {
    let told = |error: &dyn std::fmt::Display| error.to_string();
    let tensors = given(model, case)?;
    let shapes: Vec<_> = tensors.iter().map(|t| t.shape.clone()).collect();
    let bindings = infer_bindings(&model.graph, &shapes).map_err(|e| told(&e))?;
    let step = Step::forward(&model.graph).map_err(|e| format!("{e:#}"))?;
    let plan = step.plan(&bindings).map_err(|e| format!("{e:#}"))?;
    let options = CompileOptions::from_environment(&mut Silent).map_err(|e| told(&e))?;
    let executable = Executable::build(plan, &options, 1, &mut Silent);
    let executable = executable.map_err(|e| format!("{e:#}"))?;
    let none = "no memory";
    let mut buffers = Vec::new();
    for tensor in &tensors {
        let bytes = bytes_of(tensor)?;
        buffers.push(AlignedBuffer::from_slice(&bytes).ok_or(none)?);
    }
    for expected in &case.outputs {
        let dtype = dtype(expected).ok_or("an element type that graphs do not have")?;
        let n: i64 = expected.dims.iter().product();
        let n = usize::try_from(n).map_err(|e| told(&e))? * dtype.bytes();
        buffers.push(AlignedBuffer::from_slice(&vec![0xa5u8; n]).ok_or(none)?);
    }
    let pool = Pool::global();
    let program = &executable.forward;
    let mut arena = AlignedBuffer::zeroed(program.parts().arena_bytes).ok_or(none)?;
    let mut saved = AlignedBuffer::zeroed(program.parts().saved_bytes).ok_or(none)?;
    let external: Vec<_> = buffers.iter_mut().map(AlignedBuffer::as_buffer).collect();
    let run = program.run(&external, arena.as_buffer(), saved.as_buffer(), pool);
    run.map_err(|e| told(&e))?;
    let mut outputs = Vec::new();
    for (found, expected) in buffers[tensors.len()..].iter().zip(&case.outputs) {
        let proto = onnx::proto::TensorProto {
            dims: expected.dims.clone(),
            data_type: expected.data_type,
            raw_data: Some(bytes::Bytes::copy_from_slice(found.as_slice::<u8>())),
            ..Default::default()
        };
        let found = onnx::tensor::Tensor::of_proto(&proto)?;
        let values = found.to_f64().ok_or("an output of no numbers")?;
        outputs.push((values, found.shape));
    }
    Ok(outputs)
}

/// A tensor's elements as kernels read them.
fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>, String> {
    let element = importer::onnx::element_of(tensor.dtype);
    let made = match tensor.dtype.is_float() {
        true => onnx::tensor::Tensor::floats(element, &tensor.shape, &tensor.to_f64()),
        false => onnx::tensor::Tensor::of_ints(element, &tensor.shape, &tensor.to_i64()),
    };
    let made = made.ok_or("an element type that files do not have")?;
    let stored = Stored::of_tensor("", made);
    let raw = stored.proto().raw_data.clone();
    Ok(raw.map(|raw| raw.to_vec()).unwrap_or_default())
}
