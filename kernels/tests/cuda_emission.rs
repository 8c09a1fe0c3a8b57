//! Emitted CUDA text, executed on the host, against the reference interpreter.
//!
//! Every file of `emission_cases` is a graph of maps in text form. It runs under two orders of threads
//! on random inputs; all memory holds NaN before. `EMISSION_CASE=name` runs only cases of which the
//! name contains that.

use graph::{Bindings, ContainerId, DType, Graph, NoLibrary, Precision, Tensor, interpret};
use kernels::cuda::{execute, lower};
use std::fs;
use std::path::PathBuf;

/// Sums of up to a few thousand terms in single precision, and 1-2 ulp of the functions.
const F32_TOLERANCE: f64 = 2e-5;
/// The same in double precision.
const F64_TOLERANCE: f64 = 1e-12;
/// Orders of threads.
const SEEDS: [u64; 2] = [1, 2];

fn cases() -> Vec<(String, Graph)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/emission_cases");
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "graph"))
        .collect();
    paths.sort();
    let wanted = std::env::var("EMISSION_CASE").unwrap_or_default();
    let named = paths.into_iter().map(|p| {
        let name = p.file_stem().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&p).unwrap();
        let graph = graph::parse(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        (name, graph)
    });
    named.filter(|(name, _)| name.contains(&wanted)).collect()
}

/// Floats in [-2, 2], integers in 0..3, truth values.
fn input(graph: &Graph, n: usize, id: ContainerId) -> Tensor {
    let c = graph.container(id);
    let shape: Vec<usize> = c
        .shape
        .iter()
        .map(|s| s.as_const().unwrap() as usize)
        .collect();
    let unit = |i: usize| f64::from(graph::philox::uniform(n as u64, i as u64));
    let all = 0..shape.iter().product::<usize>();
    if c.dtype.is_float() {
        let data = all.map(|i| c.dtype.round(unit(i) * 4.0 - 2.0)).collect();
        return Tensor::from_f64(c.dtype, &shape, data);
    }
    let bound = if c.dtype == DType::Bool { 2.0 } else { 3.0 };
    let data = all.map(|i| (unit(i) * bound) as i64).collect();
    Tensor::from_i64(c.dtype, &shape, data)
}

fn compare(expected: &Tensor, found: &Tensor) -> Result<(), String> {
    let tolerance = match expected.dtype {
        DType::F64 => F64_TOLERANCE,
        DType::F32 => F32_TOLERANCE,
        _ => 0.0,
    };
    let (expected, found) = (expected.to_f64(), found.to_f64());
    if expected.len() != found.len() {
        return Err(format!("{} elements of {}", found.len(), expected.len()));
    }
    for (n, (e, f)) in expected.iter().zip(&found).enumerate() {
        let same = e == f || e.is_nan() && f.is_nan();
        let near = (e - f).abs() <= tolerance * e.abs().max(1.0);
        if !(same || near) {
            return Err(format!("element {n} is {f}, expected {e}"));
        }
    }
    Ok(())
}

fn check(graph: &Graph) -> Result<(), String> {
    let program = lower::lower(graph).map_err(|e| e.to_string())?;
    let inputs: Vec<Tensor> = graph
        .inputs
        .iter()
        .enumerate()
        .map(|(n, id)| input(graph, n, *id))
        .collect();
    let none = Bindings::new();
    let expected = interpret(graph, &inputs, &none, &NoLibrary, Precision::Double)
        .map_err(|e| e.to_string())?;
    let host = execute::compile(graph, &program).map_err(|e| e.to_string())?;
    for seed in SEEDS {
        let found = host.run(&inputs, seed).map_err(|e| e.to_string())?;
        for (n, (e, f)) in expected.iter().zip(&found).enumerate() {
            compare(e, f).map_err(|e| format!("seed {seed}, output {n}: {e}"))?;
        }
    }
    Ok(())
}

#[test]
fn emitted_text_computes_what_the_interpreter_does() {
    let failed: Vec<String> = cases()
        .iter()
        .filter_map(|(name, graph)| Some(format!("{name}: {}", check(graph).err()?)))
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
