//! Chains of products as CUDA text executed on the host, compared with the interpreter in double precision.

#![allow(dead_code)]

use crate::chain_cases::{Case, Mask, graph, input};
use cuda_kernels::lower::CudaProgram;
use cuda_kernels::{execute, lower};
use graph::{Bindings, DType, Graph, NoLibrary, Precision, Tensor, interpret};

/// Orders of blocks and threads.
pub const SEEDS: [u64; 2] = [1, 2];

pub const CASE: Case = Case {
    name: "",
    dtype: "bf16",
    batch: 1,
    heads: 2,
    rows: 33,
    columns: 33,
    widths: [32, 32],
    mask: Mask::None,
    is_backward: true,
    is_stored: false,
};

/// The tolerance as a part of an output's largest number, by the type of its case's factors: probabilities and their
/// gradients are rounded once before they are factors, results once more.
pub fn tolerance(graph: &Graph, name: &str) -> f64 {
    let (case, _) = name.rsplit_once('_').expect("a case and a name");
    let factor = graph.find(&format!("{case}_q")).expect("a factor");
    match graph.container(factor).dtype {
        DType::BF16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-10),
        // Sums of a hundred terms.
        _ => 2f64.powi(-18),
    }
}

pub fn check(cases: &[Case], is_chained: bool) {
    let graph = graph(cases);
    let program = check_graph(&graph);
    for map in &program.maps {
        assert_eq!(map.path == "chain", is_chained, "{}", map.origin);
    }
}

pub fn check_graph(graph: &Graph) -> CudaProgram {
    let program = lower::lower(graph).unwrap();
    let inputs: Vec<Tensor> = graph.inputs.iter().map(|id| input(graph, *id)).collect();
    let none = Bindings::new();
    let expected = interpret(graph, &inputs, &none, &NoLibrary, Precision::Double).unwrap();
    let host = execute::compile(graph, &program).unwrap();
    for seed in SEEDS {
        let found = host.run(&inputs, seed).unwrap();
        for ((output, e), f) in graph.outputs.iter().zip(&expected).zip(&found) {
            let name = &graph.container(output.container).name;
            close(name, tolerance(graph, name), &e.to_f64(), &f.to_f64());
        }
    }
    program
}

fn close(name: &str, tolerance: f64, expected: &[f64], found: &[f64]) {
    assert_eq!(expected.len(), found.len(), "{name}");
    let sizes = expected.iter().map(|e| e.abs()).filter(|e| e.is_finite());
    let scale = sizes.fold(0.0, f64::max);
    for (i, (e, f)) in expected.iter().zip(found).enumerate() {
        let same = e == f || e.is_nan() && f.is_nan();
        let near = same || (e - f).abs() <= tolerance * scale;
        assert!(near, "{name}: element {i} is {f}, expected {e} of {scale}");
    }
}
