//! Programs with products by the library: which contractions become some, what is finished by the
//! library's epilogue and what is not, and that the program computes what the graph means.

use cuda_kernels::lower::{CudaProgram, lower, lower_with};
use cuda_kernels::passes::passes;
use cuda_kernels::vendor::{Candidate, Finish, Offers, Operation, Products, Table};
use cuda_kernels::{LaunchOp, execute};
use graph::{Bindings, DType, Graph, NoLibrary, Precision, Tensor, interpret};
use std::path::Path;
use std::sync::Arc;

/// A product `[18, 10] x [12, 10]ᵀ` and a map on it, with what else the map reads and writes.
struct Case<'a> {
    dtype: &'a str,
    /// Lines of containers.
    more: &'a str,
    inputs: &'a str,
    /// The map behind the product.
    rest: &'a str,
    outputs: &'a str,
    /// `local`, or nothing where the product is kept.
    product: &'a str,
}

const LINEAR: Case = Case {
    dtype: "f32",
    more: "%bias: f32[12] input\n  %y: f32[18, 12]",
    inputs: "%x, %w, %bias",
    rest: "map [i < 18, j < 12] { tasklet %y[i, j] = $0 + $1 from %p[i, j], %bias[j] }",
    outputs: "%y",
    product: "local",
};

fn graph(case: &Case) -> Graph {
    let Case {
        dtype,
        more,
        inputs,
        rest,
        outputs,
        product,
    } = case;
    let text = format!(
        "graph \"g\" {{\n  %x: {dtype}[18, 10] input\n  %w: {dtype}[12, 10] input\n  {more}\n  \
         %p: {dtype}[18, 12] {product}\n  inputs {inputs}\n  state {{\n    map [] kernel @\"layer\" {{\n      \
         map [i < 18, j < 12, k < 10] {{\n        tasklet %p[i, j] (sum) = $0 * $1 from %x[i, k], %w[j, k]\n      \
         }}\n      {rest}\n    }}\n  }}\n  outputs {outputs}\n}}\n"
    );
    graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

const LIBRARY: Candidate = Candidate::Library(0);
const THEN_MAP: Candidate = Candidate::LibraryThenMap(1);

fn every(candidate: Candidate) -> Products {
    Products::Every {
        candidate,
        workspace_bytes: 1 << 16,
        offers: Offers::default(),
    }
}

fn paths(program: &CudaProgram) -> Vec<&'static str> {
    program.maps.iter().map(|m| m.path).collect()
}

fn inputs(graph: &Graph) -> Vec<Tensor> {
    let input = |(salt, id): (u64, &graph::ContainerId)| {
        let c = graph.container(*id);
        let shape: Vec<usize> = (c.shape.iter())
            .map(|s| s.as_const().unwrap() as usize)
            .collect();
        let unit = |i| f64::from(graph::philox::uniform(salt, i)) * 2.0 - 1.0;
        let n: usize = shape.iter().product();
        let data = (0..n as u64).map(|i| (unit(i) * 8.0).round() / 8.0);
        Tensor::from_f64(c.dtype, &shape, data.collect())
    };
    (1..).zip(&graph.inputs).map(input).collect()
}

/// Runs a program on multiples of 1/8, where each result is exact but for its own rounding.
fn computes(graph: &Graph, program: &CudaProgram) {
    let given = inputs(graph);
    let none = Bindings::new();
    let expected = interpret(graph, &given, &none, &NoLibrary, Precision::Double).unwrap();
    let host = execute::compile(graph, program).unwrap();
    let found = host.run(&given, 1).unwrap();
    for ((found, expected), output) in found.iter().zip(&expected).zip(&graph.outputs) {
        let dtype = graph.container(output.container).dtype;
        for (a, b) in found.to_f64().iter().zip(expected.to_f64()) {
            let near = (a - dtype.round(b)).abs() <= 1e-6 * b.abs().max(1.0);
            assert!(near, "{a} is not {b}: {program:#?}");
        }
    }
}

/// The case's program where the library computes all that it can by itself.
fn finished(case: &Case) -> (Graph, CudaProgram) {
    let graph = graph(case);
    let program = lower_with(&graph, &every(LIBRARY)).unwrap();
    (graph, program)
}

#[test]
fn a_bias_and_a_relu_are_the_librarys_own() {
    let rectified = |rest| Case { rest, ..LINEAR };
    for (case, finish) in [
        (LINEAR, Finish::Bias),
        (
            rectified(
                "map [i < 18, j < 12] { tasklet %y[i, j] = max($0 + $1, 0.0) from %p[i, j], %bias[j] }",
            ),
            Finish::BiasRelu,
        ),
        (
            rectified(
                "map [i < 18, j < 12] { tasklet %y[i, j] = select($1 + $0 <= 0.0, 0.0, $1 + $0) from %p[i, j], %bias[j] }",
            ),
            Finish::BiasRelu,
        ),
        (
            rectified(
                "map [j < 12, i < 18] { tasklet %y[i, j] = select($1 + $0 > 0.0, $1 + $0, 0.0) from %p[i, j], %bias[j] }",
            ),
            Finish::BiasRelu,
        ),
    ] {
        let (graph, program) = finished(&case);
        assert_eq!(paths(&program), ["cublaslt"], "{}", case.rest);
        let [product] = program.products.as_slice() else {
            panic!("{:#?}", program.products);
        };
        assert_eq!(product.operation.finish(), finish, "{}", case.rest);
        assert_eq!(
            program.launches[0].args.len(),
            5,
            "A, B, D, the bias, the workspace"
        );
        assert!(program.kernels.is_empty());
        assert_eq!(program.workspace_bytes, [1 << 16]);
        computes(&graph, &program);
    }
}

#[test]
fn half_precision_is_rounded_once() {
    for dtype in ["bf16", "f16"] {
        let more = format!("%bias: {dtype}[12] input\n  %y: {dtype}[18, 12]");
        let case = Case {
            dtype,
            more: &more,
            ..LINEAR
        };
        let (graph, program) = finished(&case);
        assert_eq!(program.products[0].operation.finish(), Finish::Bias);
        assert_eq!(
            Some(program.products[0].operation.dtypes()[2]),
            DType::parse(dtype)
        );
        computes(&graph, &program);
    }
}

/// Each of these differs in one thing from a bias with or without ReLU, and stays our own kernel's; after
/// a product by the library it is a map.
#[test]
fn what_the_library_cannot_finish_stays_ours() {
    let square = "%bias: f32[18] input\n  %y: f32[18, 12]";
    let two = "%bias: f32[12] input\n  %y: f32[18, 12]\n  %z: f32[18, 12]";
    let long = "%bias: f32[24] input\n  %y: f32[18, 12]";
    let full = "%bias: f32[18, 12] input\n  %y: f32[18, 12]";
    let half = "%bias: bf16[12] input\n  %y: f32[18, 12]";
    let turned = "%bias: f32[12] input\n  %y: f32[18, 12] <1,0>";
    let map = |body: &str| format!("map [i < 18, j < 12] {{ tasklet {body} }}");
    let on = |expression: &str| map(&format!("%y[i, j] = {expression} from %p[i, j], %bias[j]"));
    let (erf, tanh) = (
        on("0.5 * ($0 + $1) * (1.0 + erf(($0 + $1) * 0.7071067811865476))"),
        on("0.5 * ($0 + $1) * (1.0 + tanh(($0 + $1) * 0.7978845608028654))"),
    );
    for (why, more, rest, outputs, product) in [
        ("exact GELU", LINEAR.more, erf, "%y", "local"),
        ("the tanh form of GELU", LINEAR.more, tanh, "%y", "local"),
        (
            "a product of both",
            LINEAR.more,
            on("$0 * $1"),
            "%y",
            "local",
        ),
        (
            "a scaled bias",
            LINEAR.more,
            on("$0 + 2.0 * $1"),
            "%y",
            "local",
        ),
        (
            "a leaky ReLU",
            LINEAR.more,
            on("max($0 + $1, 0.1 * ($0 + $1))"),
            "%y",
            "local",
        ),
        (
            "a bound that is not 0",
            LINEAR.more,
            on("max($0 + $1, 1.0)"),
            "%y",
            "local",
        ),
        (
            "the product twice",
            LINEAR.more,
            on("$0 + $0"),
            "%y",
            "local",
        ),
        ("no bias", LINEAR.more, on("max($0, 0.0)"), "%y", "local"),
        (
            "a bias of rows",
            square,
            map("%y[i, j] = $0 + $1 from %p[i, j], %bias[i]"),
            "%y",
            "local",
        ),
        (
            "every other bias",
            long,
            map("%y[i, j] = $0 + $1 from %p[i, j], %bias[2*j]"),
            "%y",
            "local",
        ),
        (
            "biases from the middle",
            long,
            map("%y[i, j] = $0 + $1 from %p[i, j], %bias[j + 4]"),
            "%y",
            "local",
        ),
        (
            "a residual",
            full,
            map("%y[i, j] = $0 + $1 from %p[i, j], %bias[i, j]"),
            "%y",
            "local",
        ),
        ("a bias of another type", half, on("$0 + $1"), "%y", "local"),
        (
            "another order of results",
            turned,
            on("$0 + $1"),
            "%y",
            "local",
        ),
        ("the product kept", LINEAR.more, on("$0 + $1"), "%p, %y", ""),
        (
            "two results",
            two,
            map("%y[i, j] = $0 + $1, %z[i, j] = $0 from %p[i, j], %bias[j]"),
            "%y, %z",
            "local",
        ),
    ] {
        let case = Case {
            more,
            rest: &rest,
            outputs,
            product,
            ..LINEAR
        };
        let (_, program) = finished(&case);
        assert_eq!(paths(&program), ["simt"], "{why}");
        let choice = program.maps[0].product.as_ref().unwrap();
        assert_eq!(choice.candidate, Candidate::Own, "{why}");
        assert!(
            choice.reason.contains("cannot compute it"),
            "{why}: {choice}"
        );
        let graph = graph(&case);
        let program = lower_with(&graph, &every(THEN_MAP)).unwrap();
        assert_eq!(paths(&program), ["cublaslt", "loops"], "{why}");
        assert_eq!(program.products[0].operation.finish(), Finish::Nothing);
    }
}

#[test]
fn a_map_after_the_librarys_product_computes_the_rest() {
    let rest =
        "map [i < 18, j < 12] { tasklet %y[i, j] = max($0, 0.0) * $1 from %p[i, j], %bias[j] }";
    let graph = graph(&Case { rest, ..LINEAR });
    let program = lower_with(&graph, &every(THEN_MAP)).unwrap();
    let works: Vec<LaunchOp> = program.launches.iter().map(|l| l.work).collect();
    assert_eq!(works, [LaunchOp::Product(0), LaunchOp::Kernel(0)]);
    let choice = program.maps[0].product.as_ref().unwrap();
    assert_eq!((choice.candidate, choice.n_maps), (THEN_MAP, 2));
    assert!(program.maps[1].product.is_none());
    assert_eq!(program.products[0].rank, 1);
    computes(&graph, &program);
    // The product needs memory now, and so does the workspace, while it runs.
    let [forward, _] = passes(&graph, &program).unwrap();
    assert!(forward.arena_bytes >= (1 << 16) + 18 * 12 * 4);
}

fn table(entries: &str) -> Products {
    let text = format!(
        "{{\"format\": \"shorthaul products\", \"version\": 1, \"machine\": {{\"device\": \"D\", \
         \"driver\": \"13.0\", \"cublaslt\": \"13.4.1\"}}, \"workspace_bytes\": 4096, \"entries\": [{entries}]}}"
    );
    Products::Measured(Arc::new(Table::parse(Path::new("t.json"), &text).unwrap()))
}

#[test]
fn a_table_decides_and_what_it_does_not_have_is_ours() {
    let graph = graph(&LINEAR);
    let own = lower(&graph).unwrap();
    let key = own.maps[0].product.as_ref().unwrap().key.clone().unwrap();
    assert_eq!(
        (key.product.as_str(), key.rest.as_str()),
        (
            "m 12 n 18 k 10 batch 1; A f32 transposed ld 10; B f32 ld 10; D f32 ld 12",
            "bias"
        )
    );
    let entry = |rest: &str, own: f64, library: f64, then_map: f64| {
        format!(
            "{{\"product\": \"{}\", \"rest\": \"{rest}\", \"candidates\": [\
             {{\"kind\": \"own\", \"microseconds\": {own}}}, \
             {{\"kind\": \"library\", \"rank\": 3, \"microseconds\": {library}}}, \
             {{\"kind\": \"library_then_map\", \"rank\": 2, \"microseconds\": {then_map}}}]}}",
            key.product
        )
    };
    for (entry, wanted, rank) in [
        (entry("bias", 3.0, 2.0, 4.0), vec!["cublaslt"], 3),
        (entry("bias", 3.0, 4.0, 2.5), vec!["cublaslt", "loops"], 2),
        (entry("bias", 2.0, 4.0, 2.5), vec!["simt"], 0),
        (entry("nothing", 3.0, 2.0, 4.0), vec!["simt"], 0),
    ] {
        let products = table(&entry);
        let program = lower_with(&graph, &products).unwrap();
        assert_eq!(paths(&program), wanted, "{entry}");
        assert!(
            program
                .products
                .iter()
                .all(|p| p.rank == rank && p.workspace_bytes == 4096)
        );
        let again = lower_with(&graph, &products).unwrap();
        assert_eq!(format!("{program:?}"), format!("{again:?}"));
    }
    let missing = lower_with(&graph, &table("")).unwrap();
    let choice = missing.maps[0].product.as_ref().unwrap();
    assert_eq!(
        choice.to_string(),
        "our own kernel: t.json has no time for it"
    );
    assert_eq!(missing.kernels, own.kernels);
}

/// A rank that is asked for everywhere is taken where the library has it.
#[test]
fn what_the_library_does_not_offer_stays_ours() {
    let graph = graph(&LINEAR);
    let paths_of = |candidate, offered: fn(Finish) -> usize| {
        let products = Products::Every {
            candidate,
            workspace_bytes: 64,
            offers: Offers::new(move |operation, most| Ok(offered(operation.finish()).min(most))),
        };
        paths(&lower_with(&graph, &products).unwrap())
    };
    let plain = |finish| if finish == Finish::Nothing { 3 } else { 1 };
    assert_eq!(paths_of(Candidate::Library(0), plain), ["cublaslt"]);
    assert_eq!(paths_of(Candidate::Library(1), plain), ["simt"]);
    assert_eq!(
        paths_of(Candidate::LibraryThenMap(2), plain),
        ["cublaslt", "loops"]
    );
    assert_eq!(paths_of(Candidate::LibraryThenMap(3), plain), ["simt"]);
}

/// A product that reads the result of another product before that has run.
#[test]
fn a_product_of_what_nothing_wrote_is_found() {
    let graph = graph(&LINEAR);
    let mut program = lower_with(&graph, &every(LIBRARY)).unwrap();
    let never = program.launches[0].args[2];
    program.launches[0].args[0] = never;
    let Operation::Gemm(gemm) = &mut program.products[0].operation else {
        panic!("{:#?}", program.products);
    };
    (gemm.a.rows, gemm.a.ld) = (10, 12);
    let host = execute::compile(&graph, &program).unwrap();
    let fault = host.run(&inputs(&graph), 1).unwrap_err().to_string();
    assert!(
        fault.contains("sh_p0") && fault.contains("layer"),
        "{fault}"
    );
}
