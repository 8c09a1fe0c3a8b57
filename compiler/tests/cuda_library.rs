//! Training steps whose products the library or warpgroups compute, as a table says: executed on the host,
//! forward and backward, against the interpreter in double precision.

use compiler::{Step, Target};
use cuda_kernels::execute;
use cuda_kernels::lower::{CudaProgram, lower, lower_with};
use cuda_kernels::vendor::{Candidate, LibraryProduct, Offers, Products, Table};
use graph::{Attr, Bindings, ContainerId, DType, Graph, Precision, Tensor, interpret};
use models::net::{Net, Window};
use ops::{Meaning, OpBuilder, OpError, attrs};
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

fn sizes(list: &[i64]) -> Vec<graph::SymExpr> {
    list.iter().map(|n| graph::SymExpr::constant(*n)).collect()
}

/// A pointwise convolution with ReLU, then attention over its positions with one head, then two linear
/// layers with ReLU between.
fn network(dtype: DType) -> Result<Graph, OpError> {
    let mut net = Net::new("network");
    net.dtype = dtype;
    let x = net.input("x", dtype, &sizes(&[2, 8, 4, 4]));
    let y = net.conv("mix", x, 16, Window::new(1, 1, 0))?;
    let y = net.relu("mix.relu", y)?;
    let y = net.permute("rows", y, &[0, 2, 3, 1])?;
    let y = net.reshape("rows", y, &sizes(&[2, 16, 16]))?;
    let query = net.linear("query", y, 16)?;
    let key = net.linear("key", y, 16)?;
    let equation = |s: &str| attrs([("equation", Attr::Str(s.into()))]);
    let scores = net.with("scores", |b| {
        b.op1("einsum", &[query, key], equation("bid,bjd->bij"))
    })?;
    let softmax = attrs([("axis", Attr::Int(-1))]);
    let p = net.with("softmax", |b| b.op1("softmax", &[scores], softmax))?;
    let y = net.with("context", |b| {
        b.op1("einsum", &[p, y], equation("bij,bjd->bid"))
    })?;
    let y = net.linear("inner", y, 24)?;
    let y = net.relu("inner.relu", y)?;
    let y = net.linear("outer", y, 16)?;
    Ok(net.finish(&[y]))
}

/// Convolutions with windows, with and without strides, and a pointwise one with a stride, then a linear layer.
/// Parameters are f32; with autocast, they are converted before every use.
fn convolutional(autocast: Option<DType>) -> Result<Graph, OpError> {
    let mut net = Net::new("convolutional");
    net.autocast = autocast;
    let x = net.input("x", DType::F32, &sizes(&[2, 8, 9, 9]));
    let y = net.conv("down", x, 16, Window::new(3, 2, 1))?;
    let y = net.relu("down.relu", y)?;
    let y = net.conv("mix", y, 16, Window::new(3, 1, 1))?;
    let bias = net.parameter("mix.bias", &[16, 1, 1]);
    let sum = graph::Expr::In(0).add(graph::Expr::In(1));
    let y = net.apply("mix.bias", sum, &[y, bias])?;
    let y = net.relu("mix.relu", y)?;
    let y = net.conv("points", y, 24, Window::new(1, 2, 0))?;
    let y = net.relu("points.relu", y)?;
    let y = net.permute("rows", y, &[0, 2, 3, 1])?;
    let y = net.linear("last", y, 16)?;
    Ok(net.finish(&[y]))
}

fn shape(graph: &Graph, id: ContainerId) -> Vec<usize> {
    let sizes = graph.container(id).shape.iter();
    sizes
        .map(|s| s.as_const().expect("bound") as usize)
        .collect()
}

/// A gradient of the keys' biases, which is exactly 0, is the difference of sums of about 1.
const LEAST_SCALE: f64 = 1.0;

struct Case {
    given: Vec<Tensor>,
    expected: Vec<Tensor>,
    fused: Graph,
}

fn case(dtype: DType) -> Case {
    case_of(network(dtype))
}

fn case_of(graph: Result<Graph, OpError>) -> Case {
    let graph = graph.expect("builds");
    let all: Vec<usize> = (0..graph.inputs.len()).collect();
    let step = Step::training(&graph, &all).expect("differentiates");
    let input = |(salt, id): (u64, &ContainerId)| {
        let (shape, dtype) = (shape(step.graph(), *id), step.graph().container(*id).dtype);
        // Small, so that no softmax is decided by one term.
        let unit = |i| (f64::from(graph::philox::uniform(salt, i)) - 0.5) * 0.5;
        let n: usize = shape.iter().product();
        let mut tensor = Tensor::from_f64(dtype, &shape, (0..n as u64).map(unit).collect());
        tensor.round_to_dtype();
        tensor
    };
    let given: Vec<Tensor> = (1..).zip(&step.graph().inputs).map(input).collect();
    let none = Bindings::new();
    let expected = interpret(step.graph(), &given, &none, &Meaning, Precision::Double);
    Case {
        given,
        expected: expected.expect("interprets"),
        fused: (step.plan_for(&none, Target::Cuda)).expect("plans").graph,
    }
}

impl Case {
    /// Runs a program; its results may differ from the interpreter's by `tolerance` of the largest value.
    fn check(&self, program: &CudaProgram, tolerance: f64) {
        let host = execute::compile(&self.fused, program).expect("compiles");
        let given = self.given.iter().zip(&self.fused.inputs);
        let given: Vec<Tensor> = given
            .map(|(t, id)| Tensor {
                shape: shape(&self.fused, *id),
                ..t.clone()
            })
            .collect();
        let found = host.run(&given, 1).expect("no fault");
        for (n, (found, expected)) in found.iter().zip(&self.expected).enumerate() {
            let expected = expected.to_f64();
            let scale = expected
                .iter()
                .fold(LEAST_SCALE, |m, x| f64::max(m, x.abs()));
            for (i, (a, b)) in found.to_f64().iter().zip(expected).enumerate() {
                let near = (a - b).abs() <= tolerance * scale;
                assert!(
                    near,
                    "element {i} of output {n} is {a}, expected {b} of {scale}"
                );
            }
        }
    }
}

fn by_library(program: &CudaProgram) -> usize {
    launches_of(program, "cublaslt")
}

fn launches_of(program: &CudaProgram, path: &str) -> usize {
    program.maps.iter().filter(|m| m.path == path).count()
}

fn every(candidate: Candidate) -> Products {
    Products::Every {
        candidate,
        workspace_bytes: 256,
        offers: Offers::default(),
    }
}

#[test]
fn a_network_trains_with_the_librarys_products() {
    let case = case(DType::F32);
    let own = lower(&case.fused).expect("lowers");
    let plain = own
        .maps
        .iter()
        .filter_map(|m| m.product.as_ref()?.key.as_ref());
    let n_products = plain.count();
    assert!(n_products >= 10, "{:#?}", own.maps);
    let finished = lower_with(&case.fused, &every(Candidate::Library(0))).expect("lowers");
    let biased = finished.products.iter().map(|p| p.bias().is_some());
    assert!(
        biased.filter(|is| *is).count() >= 2,
        "{:#?}",
        finished.products
    );
    case.check(&finished, 3e-5);
    let apart = lower_with(&case.fused, &every(Candidate::LibraryThenMap(0))).expect("lowers");
    assert!(by_library(&finished) + by_library(&apart) >= n_products);
    case.check(&apart, 3e-5);
}

/// The tolerance is a dozen roundings to 8 bits on the way from input to gradient.
#[test]
fn a_network_trains_in_bf16_with_the_librarys_products() {
    let case = case(DType::BF16);
    for candidate in [Candidate::Library(0), Candidate::LibraryThenMap(0)] {
        let program = lower_with(&case.fused, &every(candidate)).expect("lowers");
        assert!(by_library(&program) >= 4, "{:#?}", program.maps);
        case.check(&program, 4e-2);
    }
}

#[test]
fn a_network_trains_in_bf16_with_products_of_warpgroups() {
    let case = case(DType::BF16);
    // The first tile is fed by threads that copy, the second by the copy engine.
    for tile in [2, 4] {
        let candidate = Candidate::Warpgroup(tile);
        let program = lower_with(&case.fused, &every(candidate)).expect("lowers");
        let n = program.maps.iter().filter(|m| m.path == "wgmma").count();
        assert!(n >= 4, "{:#?}", program.maps);
        case.check(&program, 4e-2);
    }
}

/// A table with times for every second product: the library is the fastest in every second of these.
#[test]
fn a_network_trains_as_a_table_says() {
    let case = case(DType::F32);
    let own = lower(&case.fused).expect("lowers");
    let keys = own
        .maps
        .iter()
        .filter_map(|m| m.product.as_ref()?.key.clone());
    let mut keys: Vec<_> = keys.collect();
    keys.sort();
    keys.dedup();
    let mut entries = Vec::new();
    for (n, key) in keys.iter().enumerate().step_by(2) {
        let (own, library) = if n % 4 == 0 { (3, 2) } else { (2, 3) };
        let (product, rest) = (&key.product, &key.rest);
        let mut entry = String::new();
        write!(
            entry,
            r#"{{"product": "{product}", "rest": "{rest}", "candidates": [
                {{"kind": "own", "microseconds": {own}}},
                {{"kind": "library", "rank": 0, "microseconds": {library}}},
                {{"kind": "library_then_map", "rank": 1, "microseconds": {library}}}]}}"#
        )
        .expect("text");
        entries.push(entry);
    }
    let text = format!(
        r#"{{"format": "shorthaul products", "version": 1, "workspace_bytes": 1024, "entries": [{}],
            "machine": {{"device": "D", "driver": "13.0", "cublaslt": "13.4.1"}}}}"#,
        entries.join(",")
    );
    let table = Table::parse(Path::new("t.json"), &text).expect("a table");
    let products = Products::Measured(Arc::new(table));
    let program = lower_with(&case.fused, &products).expect("lowers");
    for choice in program.maps.iter().filter_map(|m| m.product.as_ref()) {
        let Some(key) = &choice.key else { continue };
        let known = keys
            .iter()
            .position(|k| k == key)
            .expect("a key of the network");
        let wanted = matches!(known % 4, 0);
        let is_library = choice.candidate != Candidate::Own;
        assert_eq!(is_library, wanted, "{key}: {choice}");
    }
    assert!(by_library(&program) >= keys.len() / 4);
    case.check(&program, 3e-5);
}

/// Three convolutions forward and six gradients: the gradient of the network's input is wanted too.
#[test]
fn a_network_trains_with_the_librarys_convolutions() {
    let case = case_of(convolutional(None));
    let finished = lower_with(&case.fused, &every(Candidate::Library(0))).expect("lowers");
    let biased = (finished.products.iter()).find(|p| p.bias().is_some());
    let apart = lower_with(&case.fused, &every(Candidate::LibraryThenMap(0))).expect("lowers");
    let (fused, alone) = (
        launches_of(&finished, "cudnn"),
        launches_of(&apart, "cudnn"),
    );
    assert!(
        fused + alone >= 9,
        "{fused} and {alone}: {:#?}",
        finished.maps
    );
    assert!(biased.is_some(), "{:#?}", finished.products);
    // The pointwise convolution: forward and both gradients.
    let points = |p: &&LibraryProduct| p.operation.to_string().contains("w f32 24x16x1x1");
    let all = || finished.products.iter().chain(&apart.products);
    assert!(
        all().filter(points).count() >= 3,
        "{:#?}",
        finished.products
    );
    case.check(&finished, 3e-5);
    case.check(&apart, 3e-5);
}

/// The tolerance is a dozen roundings to 8 bits on the way from input to gradient.
#[test]
fn a_network_trains_in_bf16_with_the_librarys_convolutions() {
    let case = case_of(convolutional(Some(DType::BF16)));
    let mut n = 0;
    for candidate in [Candidate::Library(0), Candidate::LibraryThenMap(0)] {
        let program = lower_with(&case.fused, &every(candidate)).expect("lowers");
        n += launches_of(&program, "cudnn");
        case.check(&program, 4e-2);
    }
    assert!(n >= 9, "{n}");
}
