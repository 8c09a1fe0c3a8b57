//! Every operator's samples as CUDA text executed on the host: planned and emitted together, they
//! compute what the operators mean, forward and backward, in single and in half precision.

use compiler::{Step, Target};
use cuda_kernels::nvrtc::{Nvrtc, compile_all, gate};
use cuda_kernels::{Arch, execute, lower};
use graph::{Bindings, DType, Graph, Precision, Tensor, interpret};
use kernels::cache::{Cache, CacheSettings};
use kernels::progress::Silent;
use ops::Meaning;
use ops::check::{Case, append, builder, compare};

type Checked<T> = Result<T, Box<dyn std::error::Error>>;

/// Sums of a few dozen terms in single precision, through a division or a logarithm.
const SINGLE: f64 = 2e-5;
/// Orders of threads.
const SEEDS: [u64; 2] = [1, 2];

fn shape(graph: &Graph, id: graph::ContainerId) -> Vec<usize> {
    let sizes = graph.container(id).shape.iter();
    sizes
        .map(|s| s.as_const().expect("sizes are bound") as usize)
        .collect()
}

/// All cases as one step: compiling them one by one would take minutes. Inputs are rounded, so that
/// comparisons and conversions see the same numbers in single precision as in double.
fn join(cases: &[Case]) -> Checked<(Step, Vec<Tensor>, Vec<String>)> {
    let mut graph = Graph::new("operators");
    let (mut given, mut trained, mut owners) = (Vec::new(), Vec::new(), Vec::new());
    let mut names = Vec::new();
    for case in cases {
        let library = case.add_to(&mut graph)?;
        for mut tensor in case.given() {
            if case.sample.differentiable && tensor.dtype.is_float() {
                trained.push(given.len());
            }
            tensor.round_to_dtype();
            given.push(tensor);
            owners.push(case.name());
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
    let gradients = step.gradient_inputs.iter();
    names.extend(gradients.map(|i| format!("gradient of {}", owners[*i])));
    for (n, output) in step.seeded_outputs.iter().enumerate() {
        let seed = graph.outputs[*output].container;
        let shape = shape(&graph, seed);
        let value = |i| f64::from(graph::philox::uniform(77 + n as u64, i as u64)) * 2.0 - 1.0;
        let data = (0..shape.iter().product()).map(value).collect();
        let mut tensor = Tensor::from_f64(graph.container(seed).dtype, &shape, data);
        tensor.round_to_dtype();
        given.push(tensor);
    }
    Ok((step, given, names))
}

/// The cases whose names hold `OPERATOR_CASE`, with floating-point inputs of another type.
fn cases(dtype: DType) -> Checked<Vec<Case>> {
    let wanted = std::env::var("OPERATOR_CASE").unwrap_or_default();
    let mut cases = Case::all()?;
    cases.retain(|case| case.name().contains(&wanted));
    let inputs = cases.iter_mut().flat_map(|case| case.inputs.iter_mut());
    for tensor in inputs.flatten().filter(|t| t.dtype == DType::F32) {
        *tensor = Tensor::from_f64(dtype, &tensor.shape, tensor.to_f64());
    }
    Ok(cases)
}

/// Runs the cases in one program under each order of threads; `tolerance` is by case.
fn check(cases: &[Case], tolerance: impl Fn(&str) -> f64) -> Checked<()> {
    let (step, given, names) = join(cases)?;
    let none = Bindings::new();
    let expected = interpret(step.graph(), &given, &none, &Meaning, Precision::Double)?;
    let plan = step.plan_for(&none, Target::Cuda)?;
    let program = lower::lower(&plan.graph)?;
    let host = execute::compile(&plan.graph, &program)?;
    assert_eq!(given.len(), plan.graph.inputs.len());
    let inputs = given.iter().zip(&plan.graph.inputs);
    let shaped: Vec<Tensor> = inputs
        .map(|(t, id)| Tensor {
            shape: shape(&plan.graph, *id),
            ..t.clone()
        })
        .collect();
    for seed in SEEDS {
        let found = host.run(&shaped, seed)?;
        assert_eq!((expected.len(), names.len()), (found.len(), found.len()));
        let results = expected.iter().zip(&found).zip(&names);
        let failed: Vec<String> = results
            .filter_map(|((expected, found), name)| {
                let found = Tensor {
                    shape: expected.shape.clone(),
                    ..found.clone()
                };
                let told = compare(expected, &found, tolerance(name)).err()?;
                Some(format!("{name}: {told}"))
            })
            .collect();
        assert!(failed.is_empty(), "seed {seed}:\n{}", failed.join("\n"));
    }
    Ok(())
}

#[test]
fn emitted_kernels_compute_what_operators_mean() -> Checked<()> {
    check(&cases(DType::F32)?, |_| SINGLE)
}

/// Half the distance between neighbouring numbers, relative to them.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-11),
    }
}

/// A result is rounded when it is stored, and so is what it was made of where that reached memory. Most roundings are
/// on the way to attention's gradients: scores, masked scores, probabilities, the gradients of both, the result. Each
/// adds an error of at most half the distance between neighbouring numbers at the largest value.
const ROUNDINGS: f64 = 6.0;

fn check_in_half(dtype: DType) -> Checked<()> {
    check(&cases(dtype)?, |_| ROUNDINGS * rounding(dtype) + SINGLE)
}

#[test]
fn emitted_kernels_compute_what_operators_mean_in_bf16() -> Checked<()> {
    check_in_half(DType::BF16)
}

#[test]
fn emitted_kernels_compute_what_operators_mean_in_f16() -> Checked<()> {
    check_in_half(DType::F16)
}

fn check_registers(dtype: DType) -> Checked<()> {
    let (step, _, _) = join(&cases(dtype)?)?;
    let program = lower::lower(&step.plan_for(&Bindings::new(), Target::Cuda)?.graph)?;
    let nvrtc = Nvrtc::find(&[])?;
    let cache = Cache::open(&CacheSettings::from_environment(), &mut Silent)?;
    let threads = std::thread::available_parallelism()?.get();
    let cubins = compile_all(
        &program.kernels,
        Arch::Sm90a,
        &nvrtc,
        &cache,
        threads,
        &mut Silent,
    )?;
    let refused = gate(&program.kernels, &cubins);
    assert!(refused.is_empty(), "{refused:#?}");
    Ok(())
}

#[test]
#[ignore = "needs NVRTC: run by `cargo xtask test`"]
fn emitted_kernels_keep_to_registers() -> Checked<()> {
    check_registers(DType::F32)
}

#[test]
#[ignore = "needs NVRTC: run by `cargo xtask test`"]
fn emitted_kernels_keep_to_registers_in_half_precision() -> Checked<()> {
    check_registers(DType::BF16)
}
