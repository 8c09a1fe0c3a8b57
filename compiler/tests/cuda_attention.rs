//! Training steps whose attention an operator of PyTorch's computes: executed on the host, where each call has its
//! reference meaning, forward and backward, against the interpreter in double precision; and what is chosen, and why.

use compiler::attention::{ChosenAttention, Operators, choose};
use compiler::cuda::ProductsBy;
use compiler::{CompileError, Step, Target};
use cuda_kernels::CudaError;
use cuda_kernels::execute;
use cuda_kernels::lower::{CudaProgram, lower};
use cuda_kernels::vendor::{Attending, Candidate, Table};
use graph::{Attr, Bindings, ContainerId, DType, Graph, Precision, Tensor, interpret, parse};
use models::net::Net;
use ops::{Meaning, OpBuilder, OpError, attrs};
use std::path::Path;
use std::sync::Arc;

/// Gradients of keys' biases are exactly 0 and differences of sums of about 1.
const LEAST_SCALE: f64 = 1.0;

fn sizes(list: &[i64]) -> Vec<graph::SymExpr> {
    list.iter().map(|n| graph::SymExpr::constant(*n)).collect()
}

/// Self-attention of two sequences of 6 rows, two heads of 8; one product for queries, keys and values.
fn layer(causal: bool) -> Result<Graph, OpError> {
    let mut net = Net::new("layer");
    let x = net.input("x", DType::F32, &sizes(&[2, 6, 16]));
    let stacked = net.linear("qkv", x, 48)?;
    let mut parts = Vec::new();
    for (n, name) in ["q", "k", "v"].into_iter().enumerate() {
        let bounds = |at: i64| Attr::Sizes(sizes(&[at]));
        let (start, stop) = (16 * n as i64, 16 * (n as i64 + 1));
        let list = attrs([
            ("axis", Attr::Int(2)),
            ("start", bounds(start)),
            ("stop", bounds(stop)),
        ]);
        let part = net.with(name, |b| b.op1("slice", &[stacked], list))?;
        let part = net.reshape(name, part, &sizes(&[2, 6, 2, 8]))?;
        parts.push(net.permute(name, part, &[0, 2, 1, 3])?);
    }
    let list = attrs([("causal", Attr::Bool(causal))]);
    let y = net.with("attention", |b| b.op1("attention", &parts, list))?;
    let y = net.permute("merge", y, &[0, 2, 1, 3])?;
    let y = net.reshape("merge", y, &sizes(&[2, 6, 16]))?;
    let y = net.linear("out", y, 16)?;
    Ok(net.finish(&[y]))
}

fn shape(graph: &Graph, id: ContainerId) -> Vec<usize> {
    let sizes = graph.container(id).shape.iter();
    sizes
        .map(|s| s.as_const().expect("bound") as usize)
        .collect()
}

fn every(by: Attending) -> ProductsBy {
    ProductsBy::Every {
        candidate: Candidate::Attention(by),
        workspace_bytes: 0,
    }
}

fn chosen(graph: &mut Graph, products: &ProductsBy) -> Vec<ChosenAttention> {
    let all: Vec<usize> = (0..graph.inputs.len()).collect();
    let found = choose(graph, &Bindings::new(), products, &all, Operators::PyTorch);
    found.expect("chooses")
}

/// The step by the operator, executed on the host, has the values of the step without it.
fn check(graph: &Graph) -> (Graph, CudaProgram) {
    let all: Vec<usize> = (0..graph.inputs.len()).collect();
    let none = Bindings::new();
    let plain = Step::training(graph, &all).expect("differentiates");
    let input = |(salt, id): (u64, &ContainerId)| {
        let shape = shape(plain.graph(), *id);
        let unit = |i| f64::from(graph::philox::uniform(salt, i)) - 0.5;
        let n: usize = shape.iter().product();
        Tensor::from_f64(DType::F32, &shape, (0..n as u64).map(unit).collect())
    };
    let given: Vec<Tensor> = (1..).zip(&plain.graph().inputs).map(input).collect();
    let expected = interpret(plain.graph(), &given, &none, &Meaning, Precision::Double);
    let expected = expected.expect("interprets");

    let mut called = graph.clone();
    let all_chosen = chosen(&mut called, &every(Attending::Efficient));
    assert_eq!(all_chosen.len(), 1);
    let step = Step::training(&called, &all).expect("differentiates");
    let fused = step.plan_for(&none, Target::Cuda).expect("plans").graph;
    let program = lower(&fused).expect("lowers");
    let host = execute::compile(&fused, &program).expect("compiles");
    let reshaped = given.iter().zip(&fused.inputs).map(|(t, id)| Tensor {
        shape: shape(&fused, *id),
        ..t.clone()
    });
    let found = host.run(&reshaped.collect::<Vec<_>>(), 1);
    let found = found.expect("no fault");
    for (n, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let expected = expected.to_f64();
        let scale = expected
            .iter()
            .fold(LEAST_SCALE, |m, x| f64::max(m, x.abs()));
        for (i, (a, b)) in found.to_f64().iter().zip(expected).enumerate() {
            // Sums of some tens of products of single precision.
            let near = (a - b).abs() <= 1e-5 * scale;
            assert!(
                near,
                "element {i} of output {n} is {a}, expected {b} of {scale}"
            );
        }
    }
    (fused, program)
}

#[test]
fn a_layer_trains_by_calls_on_views_of_one_product() {
    for causal in [false, true] {
        let (fused, program) = check(&layer(causal).expect("builds"));
        assert_eq!(program.calls.len(), 2);
        let forward = &program.calls[0];
        let offsets: Vec<i64> = forward.operands.iter().map(|o| o.view.offset).collect();
        assert_eq!(offsets, [0, 16, 32, 0, 0]);
        assert_eq!(forward.is_causal, causal);
        let launch = program
            .launches
            .iter()
            .find(|l| matches!(l.work, cuda_kernels::LaunchOp::Call(0)));
        let args = &launch.expect("is launched").args;
        assert!(args[0] == args[1] && args[1] == args[2], "{args:?}");
        let copied: Vec<u64> = program
            .maps
            .iter()
            .map(|m| m.bytes_copied)
            .filter(|n| *n > 0)
            .collect();
        let (rows, lse) = (2 * 2 * 6 * 8 * 4, 2 * 2 * 6 * 4);
        assert_eq!(copied, [2 * (rows + lse), 2 * 3 * rows]);
        // Scores, 6 columns of each row of each head, are nowhere in memory.
        let squares = |id: &ContainerId| shape(&fused, *id).ends_with(&[6, 6]);
        let stored = program.launches.iter().flat_map(|l| &l.args);
        let is_square = |b: &kernels::plan::Buffer| matches!(b, kernels::plan::Buffer::Container(id) if squares(id));
        assert!(!stored.into_iter().any(is_square));
    }
}

/// Attention over 8 rows and columns of eight.
fn attention(dtype: &str) -> Graph {
    let text = format!(
        "graph \"g\" {{
         %q: {dtype}[1, 2, 8, 8] input
         %k: {dtype}[1, 2, 8, 8] input
         %v: {dtype}[1, 2, 8, 8] input
         %y: {dtype}[1, 2, 8, 8]
         inputs %q, %k, %v
         state {{ %y = attention(%q, %k, %v) {{causal=false}} }}
         outputs %y
         }}"
    );
    parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

#[test]
fn a_table_chooses_the_fastest_that_can_and_tells_of_others() {
    let table = |dtype: &str| {
        let product =
            format!("attention batch 1 heads 2 rows 8 columns 8 width 8 values 8; {dtype}");
        let text = format!(
            r#"{{"format": "shorthaul products", "version": 1,
                "machine": {{"device": "D", "driver": "13.0", "cublaslt": "13.0.0"}}, "workspace_bytes": 0,
                "entries": [{{"product": "{product}", "rest": "gradients", "candidates": [
                    {{"kind": "own", "microseconds": 3}},
                    {{"kind": "torch_efficient", "microseconds": 2}},
                    {{"kind": "torch_flash", "microseconds": 1}}]}}]}}"#
        );
        let table = Table::parse(Path::new("t.json"), &text);
        ProductsBy::Table(Arc::new(table.expect("parses")))
    };
    let of = |dtype: &str| {
        let found = chosen(&mut attention(dtype), &table(dtype));
        let choice = &found[0].choice;
        (choice.candidate, choice.reason.clone())
    };
    let (candidate, reason) = of("bf16");
    assert_eq!(candidate, Candidate::Attention(Attending::Flash));
    assert!(reason.starts_with("1 us in t.json"), "{reason}");
    let (candidate, reason) = of("f32");
    assert_eq!(candidate, Candidate::Attention(Attending::Efficient));
    assert!(
        reason.ends_with("; PyTorch's flash attention cannot: it takes bf16 and f16, not f32"),
        "{reason}"
    );
    // Nobody chose, nobody is told.
    assert!(chosen(&mut attention("bf16"), &ProductsBy::Own).is_empty());
}

#[test]
fn without_pytorch_its_operators_are_an_error() {
    let mut graph = attention("bf16");
    let none = Bindings::new();
    let flash = every(Attending::Flash);
    let refused = choose(&mut graph, &none, &flash, &[0], Operators::None);
    let Err(CompileError::Cuda(CudaError::NoOperators { operator, .. })) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(operator, "PyTorch's flash attention");
    // Where our own kernels are chosen, nothing is missing.
    let mut single = attention("f32");
    let found = choose(&mut single, &none, &flash, &[0], Operators::None);
    assert_eq!(found.expect("chooses")[0].choice.candidate, Candidate::Own);
}
