//! Every operator's samples through the whole line: the planned graph and the compiled kernels
//! compute what the operators mean, forward and backward.

use compiler::{Executable, Step};
use graph::{Bindings, DType, Graph, Precision, Tensor, interpret};
use kernels::compile::CompileOptions;
use kernels::features::{CpuTarget, Isa};
use kernels::halves;
use kernels::lowering::lower;
use kernels::memory::AlignedBuffer;
use kernels::pool::Pool;
use kernels::progress::Silent;
use kernels::toolchain::Family;
use ops::Meaning;
use ops::check::{Case, append, builder, compare};

type Checked<T> = Result<T, Box<dyn std::error::Error>>;

/// Fusion reorders sums of a few dozen terms.
const PLANNED: f64 = 1e-10;
/// Sums of a few dozen terms in single precision, through a division or a logarithm.
const SINGLE: f64 = 2e-5;
const THREADS: usize = 2;

/// Cases as one step, with values for its inputs and seeds, and what it must give.
struct Joined {
    step: Step,
    given: Vec<Tensor>,
    expected: Vec<Tensor>,
    /// The case of each output.
    names: Vec<String>,
}

/// Inputs are rounded first, so that comparisons and conversions see the same numbers in single
/// precision as in double.
fn join(cases: &[&Case]) -> Checked<Joined> {
    let mut graph = Graph::new("operators");
    let (mut given, mut trained) = (Vec::new(), Vec::new());
    let mut names = Vec::new();
    for case in cases {
        let library = case.add_to(&mut graph)?;
        for tensor in case.given() {
            if case.sample.differentiable && tensor.dtype.is_float() {
                trained.push(given.len());
            }
            let mut tensor = tensor;
            tensor.round_to_dtype();
            given.push(tensor);
        }
        for output in case.differentiated_outputs(&library) {
            graph.add_output(output);
            names.push(case.name());
        }
        let mut nodes = builder(&mut graph);
        nodes.library(library);
        append(nodes);
    }
    let step = Step::training(&graph, &trained)?;
    let owner = |position: &usize| {
        let mut left = *position;
        let case = cases.iter().find(|case| {
            let n = case.given().len();
            let inside = left < n;
            left = left.saturating_sub(n);
            inside
        });
        format!(
            "gradient of {}",
            case.map_or_else(String::new, |c| c.name())
        )
    };
    names.extend(step.gradient_inputs.iter().map(owner));
    for (n, output) in step.seeded_outputs.iter().enumerate() {
        let seed = graph.outputs[*output].container;
        let shape = constant(&graph, seed);
        let value = |i| f64::from(graph::philox::uniform(77 + n as u64, i as u64)) * 2.0 - 1.0;
        let data = (0..shape.iter().product()).map(value).collect();
        let mut tensor = Tensor::from_f64(graph.container(seed).dtype, &shape, data);
        tensor.round_to_dtype();
        given.push(tensor);
    }
    let none = Bindings::new();
    let expected = interpret(step.graph(), &given, &none, &Meaning, Precision::Double)?;
    Ok(Joined {
        step,
        given,
        expected,
        names,
    })
}

fn constant(graph: &Graph, id: graph::ContainerId) -> Vec<usize> {
    let sizes = graph.container(id).shape.iter();
    sizes
        .map(|s| s.as_const().expect("sizes are bound") as usize)
        .collect()
}

/// One case at a time, so that each failure is named.
fn for_all(check: impl Fn(&Case) -> Checked<()>) {
    let failed: Vec<String> = Case::all()
        .unwrap()
        .iter()
        .filter_map(|case| Some(format!("{}: {}", case.name(), check(case).err()?)))
        .collect();
    assert!(
        failed.is_empty(),
        "{} cases failed:\n{}",
        failed.len(),
        failed.join("\n")
    );
}

#[test]
fn planned_graphs_mean_what_operators_say() {
    for_all(|case| {
        let joined = join(&[case])?;
        let none = Bindings::new();
        let plan = joined.step.plan(&none)?;
        graph::verify(&plan.graph).map_err(|e| format!("{e:?}"))?;
        // Fusion gives containers the shape of their views; the elements stay in order.
        let shaped = |t: &Tensor, id| Tensor {
            shape: constant(&plan.graph, id),
            ..t.clone()
        };
        let inputs = joined.given.iter().zip(&plan.graph.inputs);
        let given: Vec<_> = inputs.map(|(t, id)| shaped(t, *id)).collect();
        let found = interpret(&plan.graph, &given, &none, &Meaning, Precision::Double)?;
        for (n, (expected, found)) in joined.expected.iter().zip(&found).enumerate() {
            let expected = shaped(expected, plan.graph.outputs[n].container);
            compare(&expected, found, PLANNED).map_err(|e| format!("{}: {e}", joined.names[n]))?;
        }
        Ok(())
    });
}

#[test]
fn every_operator_has_kernels() {
    for_all(|case| {
        let plan = join(&[case])?.step.plan(&Bindings::new())?;
        lower(
            &plan.graph,
            &CpuTarget::for_isa(Isa::Avx2, Family::Gcc),
            THREADS,
        )?;
        Ok(())
    });
}

/// The cases whose names hold `OPERATOR_CASE`, with floating-point inputs of another type.
fn cases(dtype: DType) -> Checked<Vec<Case>> {
    let wanted = std::env::var("OPERATOR_CASE").unwrap_or_default();
    let mut cases = Case::all()?;
    cases.retain(|case| case.name().contains(&wanted));
    assert!(!cases.is_empty(), "OPERATOR_CASE names no case: {wanted}");
    let inputs = cases.iter_mut().flat_map(|case| case.inputs.iter_mut());
    for tensor in inputs.flatten().filter(|t| t.dtype == DType::F32) {
        *tensor = Tensor::from_f64(dtype, &tensor.shape, tensor.to_f64());
    }
    Ok(cases)
}

/// All cases in one step, as compiling them one by one would take minutes.
fn check_compiled(cases: &[Case], tolerance: f64) -> Checked<()> {
    let joined = join(&cases.iter().collect::<Vec<_>>())?;
    let plan = joined.step.plan(&Bindings::new())?;
    let options = CompileOptions::from_environment(&mut Silent)?;
    let exe = Executable::build(plan, &options, THREADS, &mut Silent)?;
    let tensors = joined.given.iter().chain(&joined.expected);
    let mut memory: Vec<AlignedBuffer> = tensors
        .enumerate()
        .map(|(n, t)| to_memory(t, n < joined.given.len()))
        .collect();
    let pool = Pool::global();
    pool.set_threads(THREADS);
    let mut saved = AlignedBuffer::zeroed(exe.forward.parts().saved_bytes).ok_or("memory")?;
    for program in [&exe.forward, &exe.backward] {
        let mut arena = AlignedBuffer::zeroed(program.parts().arena_bytes).ok_or("memory")?;
        let buffers: Vec<_> = memory.iter_mut().map(AlignedBuffer::as_buffer).collect();
        program.run(&buffers, arena.as_buffer(), saved.as_buffer(), pool)?;
    }
    let results = joined.expected.iter().zip(&memory[joined.given.len()..]);
    let failed: Vec<String> = results
        .zip(&joined.names)
        .filter_map(|((expected, found), name)| {
            let found = from_memory(found, expected);
            Some(format!(
                "{name}: {}",
                compare(expected, &found, tolerance).err()?
            ))
        })
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    Ok(())
}

#[test]
fn compiled_kernels_compute_what_operators_mean() -> Checked<()> {
    check_compiled(&cases(DType::F32)?, SINGLE)
}

/// A result is rounded when it is stored, and so is what it was made of where that reached memory. Most roundings are
/// on the way to attention's gradients: scores, masked scores, probabilities, the gradients of both, the result. Each
/// adds an error of at most half the distance between neighbouring numbers at the largest value.
const ROUNDINGS: f64 = 6.0;

#[test]
fn compiled_kernels_compute_what_operators_mean_in_bf16() -> Checked<()> {
    check_compiled(&cases(DType::BF16)?, ROUNDINGS * 2f64.powi(-8) + SINGLE)
}

#[test]
fn compiled_kernels_compute_what_operators_mean_in_f16() -> Checked<()> {
    check_compiled(&cases(DType::F16)?, ROUNDINGS * 2f64.powi(-11) + SINGLE)
}

/// The tensor as a caller holds it. A result that is still to be written (not `given`) holds other numbers.
fn to_memory(t: &Tensor, given: bool) -> AlignedBuffer {
    let floats: Vec<f64> = t
        .to_f64()
        .iter()
        .map(|x| if given { *x } else { 1e9 })
        .collect();
    let ints: Vec<i64> = t
        .to_i64()
        .iter()
        .map(|i| if given { *i } else { 99 })
        .collect();
    let buffer = match t.dtype {
        DType::F32 => {
            AlignedBuffer::from_slice(&floats.iter().map(|x| *x as f32).collect::<Vec<_>>())
        }
        DType::F64 => AlignedBuffer::from_slice(&floats),
        DType::F16 | DType::BF16 => {
            let bits = |x: &f64| halves::bits(t.dtype, *x);
            AlignedBuffer::from_slice(&floats.iter().map(bits).collect::<Vec<_>>())
        }
        DType::I64 => AlignedBuffer::from_slice(&ints),
        DType::I32 => {
            AlignedBuffer::from_slice(&ints.iter().map(|i| *i as i32).collect::<Vec<_>>())
        }
        DType::Bool | DType::U8 => {
            AlignedBuffer::from_slice(&ints.iter().map(|i| *i as u8).collect::<Vec<_>>())
        }
        other => panic!("no sample uses {other}"),
    };
    buffer.expect("memory")
}

fn from_memory(memory: &AlignedBuffer, like: &Tensor) -> Tensor {
    let data: Vec<f64> = match like.dtype {
        DType::F32 => memory
            .as_slice::<f32>()
            .iter()
            .map(|x| f64::from(*x))
            .collect(),
        DType::F64 => memory.as_slice::<f64>().to_vec(),
        DType::F16 | DType::BF16 => memory
            .as_slice::<u16>()
            .iter()
            .map(|bits| halves::value(like.dtype, *bits))
            .collect(),
        DType::I64 => memory.as_slice::<i64>().iter().map(|i| *i as f64).collect(),
        DType::I32 => memory
            .as_slice::<i32>()
            .iter()
            .map(|i| f64::from(*i))
            .collect(),
        _ => memory
            .as_slice::<u8>()
            .iter()
            .map(|i| f64::from(*i))
            .collect(),
    };
    Tensor::from_f64(like.dtype, &like.shape, data)
}
