//! From an ONNX file to numbers: networks that PyTorch exported are imported, differentiated, compiled
//! and run; outputs are PyTorch's, gradients those of the interpreter.

use bytes::Bytes;
use compiler::{Executable, Step};
use graph::{Bindings, DType, Precision, SymExpr, Tensor, infer_bindings, interpret};
use importer::onnx::{File, Model, Options, decode_tensor};
use kernels::compile::CompileOptions;
use kernels::memory::AlignedBuffer;
use kernels::pool::Pool;
use kernels::progress::Silent;
use tests::stored_cases::stored_cases;

/// See importer/tests/data/export.py, which writes the cases.
const CASES: &[u8] = include_bytes!("../../importer/tests/data/exported.cases");

/// Single precision, through a few layers: relative to the largest value.
const TOLERANCE: f64 = 2e-5;

fn buffer(tensor: &Tensor) -> AlignedBuffer {
    let buffer = match tensor.dtype {
        DType::F32 => {
            let values: Vec<f32> = tensor.to_f64().iter().map(|x| *x as f32).collect();
            AlignedBuffer::from_slice(&values)
        }
        DType::I64 => AlignedBuffer::from_slice(&tensor.to_i64()),
        other => panic!("an input of {other}"),
    };
    buffer.expect("memory")
}

/// The largest difference.
fn worst(found: &[f32], expected: &Tensor) -> f64 {
    let expected = expected.to_f64();
    let errors = found
        .iter()
        .zip(&expected)
        .map(|(x, y)| (f64::from(*x) - y).abs());
    errors.fold(
        0.0,
        |m: f64, e| if e.is_nan() { f64::INFINITY } else { m.max(e) },
    )
}

fn largest(tensor: &Tensor) -> f64 {
    tensor.to_f64().iter().fold(0.0, |m: f64, x| m.max(x.abs()))
}

/// A tensor of ones for a seed gradient.
fn ones(shape: &[SymExpr], bindings: &Bindings) -> Tensor {
    let size = |s: &SymExpr| s.eval(bindings).expect("bound") as usize;
    let shape: Vec<usize> = shape.iter().map(size).collect();
    let n = shape.iter().product();
    Tensor::from_f64(DType::F32, &shape, vec![1.0; n])
}

fn check(name: &str, model: &Model, given: Vec<Tensor>, expected: &[Tensor]) {
    let graph = &model.graph;
    let mut tensors = given;
    tensors.extend(
        model
            .parameters
            .iter()
            .map(|p| p.stored.tensor().expect("stored")),
    );
    let shapes: Vec<_> = tensors.iter().map(|t| t.shape.clone()).collect();
    let bindings = infer_bindings(graph, &shapes).expect("sizes follow from the inputs");
    let is_trained = |position: &usize| {
        let id = graph.inputs[*position];
        model
            .parameters
            .iter()
            .any(|p| p.container == id && p.trainable)
    };
    let trained: Vec<usize> = (0..graph.inputs.len()).filter(is_trained).collect();
    let step = Step::training(graph, &trained).expect("differentiates");
    for id in &step.graph().inputs[step.n_inputs..] {
        tensors.push(ones(&step.graph().container(*id).shape, &bindings));
    }
    let exact = interpret(
        step.graph(),
        &tensors,
        &bindings,
        &ops::Meaning,
        Precision::Double,
    );
    let exact = exact.expect("interprets");

    let plan = step.plan(&bindings).expect("plans");
    let options = CompileOptions::from_environment(&mut Silent).expect("a compiler");
    let executable = Executable::build(plan, &options, 2, &mut Silent).expect("builds");
    let mut buffers: Vec<AlignedBuffer> = tensors.iter().map(buffer).collect();
    let not_written = |t: &Tensor| AlignedBuffer::from_slice(&vec![f32::NAN; t.len()]);
    buffers.extend(exact.iter().map(|t| not_written(t).expect("memory")));
    let pool = Pool::global();
    pool.set_threads(2);
    let n_saved = executable.forward.parts().saved_bytes;
    let mut saved = AlignedBuffer::zeroed(n_saved).expect("memory");
    for program in [&executable.forward, &executable.backward] {
        let mut arena = AlignedBuffer::zeroed(program.parts().arena_bytes).expect("memory");
        let external: Vec<_> = buffers.iter_mut().map(AlignedBuffer::as_buffer).collect();
        let run = program.run(&external, arena.as_buffer(), saved.as_buffer(), pool);
        run.expect("runs");
    }
    let results = &buffers[tensors.len()..];
    let mut scale = 0.0;
    for (n, (result, exact)) in results.iter().zip(&exact).enumerate() {
        // The gradient of a bias before a batch norm is 0: a sum of terms like those of its layer's weight, which comes
        // before it.
        if largest(exact) > 1e-12 {
            scale = largest(exact);
        }
        let error = worst(result.as_slice(), exact) / scale;
        assert!(error <= TOLERANCE, "{name}: result {n} is off by {error:e}");
    }
    for (n, (result, expected)) in results.iter().zip(expected).enumerate() {
        let error = worst(result.as_slice(), expected) / largest(expected);
        assert!(
            error <= TOLERANCE,
            "{name}: output {n} is off from PyTorch's by {error:e}"
        );
    }
    assert_eq!(
        results.len(),
        expected.len() + trained.len(),
        "{name}: a gradient is missing"
    );
}

#[test]
fn exported_networks_train() {
    let cases = stored_cases(CASES).expect("well-formed cases");
    let tensors = |list: &[Bytes]| -> Vec<Tensor> {
        list.iter()
            .cloned()
            .map(|b| decode_tensor(b).expect("a tensor"))
            .collect()
    };
    // One size of each model: others only repeat the same kernels.
    for case in cases.iter().filter(|c| c.name.ends_with("_3")) {
        let file = File::decode(&case.name, case.model.clone()).expect("decodes");
        let model = file.import(&Options::default()).expect("imports");
        check(
            &case.name,
            &model,
            tensors(&case.input),
            &tensors(&case.output),
        );
    }
}
