//! Contractions as products in cuBLASLt's terms: what a description means, executed on the host, is
//! what the graph means; and what is no plain product is refused with the reason.

mod described_cases;

use cuda_kernels::contraction::gemm;
use cuda_kernels::vendor::{Compute, Gemm, Matrix, Operands, multiply};
use described_cases::{found, graph};
use graph::{DType, Graph};

/// The product of a graph.
fn product(graph: &Graph) -> Gemm {
    let (found, types) = found(graph);
    gemm(&found.contraction, types).unwrap_or_else(|e| panic!("{e}"))
}

fn refusal(graph: &Graph) -> String {
    let (found, types) = found(graph);
    let refused = gemm(&found.contraction, types);
    refused.expect_err("no plain product").to_string()
}

/// Holds the executed description against the interpreter, and returns it.
fn check(graph: &Graph) -> Gemm {
    let gemm = product(graph);
    described_cases::check(graph, gemm.is_swapped, |operands, store| {
        multiply(&gemm, operands, store)
    });
    gemm
}

/// `y[b, l, o]` of a Linear layer, and its gradients.
const LINEAR: &str = "[b < 2, l < 9, o < 12, i < 10] {
      tasklet %y[b, l, o] (sum) = $0 * $1 from %x[b, l, i], %w[o, i] }";
const DATA_GRADIENT: &str = "[b < 2, l < 9, i < 10, o < 12] {
      tasklet %y[b, l, i] (sum) = $0 * $1 from %x[b, l, o], %w[o, i] }";
const WEIGHT_GRADIENT: &str = "[o < 12, i < 10, b < 2, l < 9] {
      tasklet %y[o, i] (sum) = $0 * $1 from %x[b, l, o], %w[b, l, i] }";

#[test]
fn a_linear_layer_and_its_gradients_are_products() {
    let forward = check(&graph(
        "f32[2, 9, 10]",
        "f32[12, 10]",
        "f32[2, 9, 12]",
        LINEAR,
    ));
    assert_eq!(
        forward.to_string(),
        "m 12 n 18 k 10 batch 1; A f32 transposed ld 10; B f32 ld 10; D f32 ld 12"
    );
    assert_eq!(forward.compute, Compute::F32Pedantic);
    assert_eq!(forward.flops(), 2 * 12 * 18 * 10);
    let data = check(&graph(
        "f32[2, 9, 12]",
        "f32[12, 10]",
        "f32[2, 9, 10]",
        DATA_GRADIENT,
    ));
    assert_eq!(
        data.to_string(),
        "m 10 n 18 k 12 batch 1; A f32 ld 10; B f32 ld 12; D f32 ld 10"
    );
    let weight = graph(
        "f32[2, 9, 12]",
        "f32[2, 9, 10]",
        "f32[12, 10]",
        WEIGHT_GRADIENT,
    );
    assert_eq!(
        check(&weight).to_string(),
        "m 10 n 12 k 18 batch 1; A f32 ld 10; B f32 transposed ld 12; D f32 ld 10"
    );
}

#[test]
fn types_decide_how_sums_are_made() {
    let linear = |factor: &str, result: &str| {
        let (x, w) = (format!("{factor}[2, 9, 10]"), format!("{factor}[12, 10]"));
        graph(&x, &w, &format!("{result}[2, 9, 12]"), LINEAR)
    };
    for (factor, result, compute) in [
        ("bf16", "bf16", Compute::F32),
        ("bf16", "f32", Compute::F32),
        ("f16", "f16", Compute::F32),
        ("f16", "f32", Compute::F32),
        ("f64", "f64", Compute::F64),
    ] {
        let gemm = check(&linear(factor, result));
        assert_eq!(gemm.compute, compute, "{gemm}");
        let (factor, result) = (DType::parse(factor), DType::parse(result));
        assert_eq!((Some(gemm.a.dtype), Some(gemm.d.dtype)), (factor, result));
    }
    for (factor, result) in [
        ("f32", "bf16"),
        ("f32", "f64"),
        ("bf16", "f16"),
        ("f64", "f32"),
    ] {
        let reason = refusal(&linear(factor, result));
        assert_eq!(
            reason,
            format!("cuBLASLt has no product of {factor} and {factor} to {result}")
        );
    }
    let mixed = graph("bf16[2, 9, 10]", "f32[12, 10]", "f32[2, 9, 12]", LINEAR);
    assert!(refusal(&mixed).contains("bf16 and f32"));
}

#[test]
fn products_of_attention_are_batched() {
    let scores = check(&graph(
        "f32[2, 3, 9, 8]",
        "f32[2, 3, 10, 8]",
        "f32[2, 3, 9, 10]",
        "[b < 2, h < 3, i < 9, j < 10, p < 8] {
      tasklet %y[b, h, i, j] (sum) = $0 * $1 from %x[b, h, i, p], %w[b, h, j, p] }",
    ));
    assert_eq!(
        scores.to_string(),
        "m 10 n 9 k 8 batch 6; A f32 transposed ld 8 stride 80; B f32 ld 8 stride 72; \
         D f32 ld 10 stride 90"
    );
    check(&graph(
        "f32[2, 3, 9, 10]",
        "f32[2, 3, 10, 8]",
        "f32[2, 3, 9, 8]",
        "[b < 2, h < 3, i < 9, p < 8, j < 10] {
      tasklet %y[b, h, i, p] (sum) = $0 * $1 from %x[b, h, i, j], %w[b, h, j, p] }",
    ));
    // Heads side by side in a row, of one sequence.
    let heads = "[h < 3, i < 9, j < 10, p < 8] {
      tasklet %y[h, i, j] (sum) = $0 * $1 from %x[i, 8*h + p], %w[j, 8*h + p] }";
    let one = check(&graph("f32[9, 24]", "f32[10, 24]", "f32[3, 9, 10]", heads));
    assert_eq!(
        one.to_string(),
        "m 10 n 9 k 8 batch 3; A f32 transposed ld 24 stride 8; B f32 ld 24 stride 8; \
         D f32 ld 10 stride 90"
    );
    // The result's heads side by side too.
    check(&graph(
        "f32[3, 9, 10]",
        "f32[10, 24]",
        "f32[9, 3, 8]",
        "[h < 3, i < 9, p < 8, j < 10] {
      tasklet %y[i, h, p] (sum) = $0 * $1 from %x[h, i, j], %w[j, 8*h + p] }",
    ));
}

const POINTWISE: &str = "[n < 2, k < 9, i < 4, j < 5, c < 8] {
      tasklet %y[n, k, i, j] (sum) = $0 * $1 from %x[n, c, i, j], %w[k, c, 0, 0] }";

#[test]
fn pointwise_convolutions_are_products() {
    let last = "<0,2,3,1>";
    let images = |channels: usize, layout: &str| format!("f32[2, {channels}, 4, 5] {layout}");
    let forward = graph(
        &images(8, last),
        "f32[9, 8, 1, 1]",
        &images(9, last),
        POINTWISE,
    );
    let whole = "m 9 n 40 k 8 batch 1; A f32 transposed ld 8; B f32 ld 8; D f32 ld 9";
    assert_eq!(check(&forward).to_string(), whole);
    let data = "[n < 2, c < 8, i < 4, j < 5, k < 9] {
      tasklet %y[n, c, i, j] (sum) = $0 * $1 from %x[n, k, i, j], %w[k, c, 0, 0] }";
    check(&graph(
        &images(9, last),
        "f32[9, 8, 1, 1]",
        &images(8, last),
        data,
    ));
    let weight = "[k < 9, c < 8, n < 2, i < 4, j < 5] {
      tasklet %y[k, c, 0, 0] (sum) = $0 * $1 from %x[n, k, i, j], %w[n, c, i, j] }";
    check(&graph(
        &images(9, last),
        &images(8, last),
        "f32[9, 8, 1, 1]",
        weight,
    ));
    // Channels first: the images are a batch with the same weight.
    let first = graph(&images(8, ""), "f32[9, 8, 1, 1]", &images(9, ""), POINTWISE);
    assert_eq!(
        check(&first).to_string(),
        "m 20 n 9 k 8 batch 2; A f32 ld 20 stride 160; B f32 ld 8 stride 0; D f32 ld 20 stride 180"
    );
    let terms = graph(&images(9, ""), &images(8, ""), "f32[9, 8, 1, 1]", weight);
    assert!(refusal(&terms).contains("terms lie at more than one distance"));
}

#[test]
fn parts_of_larger_arrays_are_products() {
    // The middle third of a packed projection, into a part of its result.
    let part = check(&graph(
        "f32[10, 40]",
        "f32[36, 16]",
        "f32[10, 12]",
        "[i < 10, o < 12, k < 16] {
      tasklet %y[i, o] (sum) = $0 * $1 from %x[i, k + 8], %w[o + 12, k] }",
    ));
    assert_eq!(
        part.to_string(),
        "m 12 n 10 k 16 batch 1; A f32 transposed ld 16 offset 192; B f32 ld 40 offset 8; D f32 ld 12"
    );
    assert_eq!((part.b.offset_bytes(), part.b.alignment(16)), (32, 16));
    let odd = Matrix {
        offset: 6,
        dtype: DType::BF16,
        ..part.b
    };
    assert_eq!(odd.alignment(16), 4);
    // A column-major result needs no exchange of the factors.
    let columns = check(&graph(
        "f32[10, 16]",
        "f32[12, 16]",
        "f32[10, 12] <1,0>",
        "[i < 10, o < 12, k < 16] { tasklet %y[i, o] (sum) = $0 * $1 from %x[i, k], %w[o, k] }",
    ));
    assert!(!columns.is_swapped && columns.m == 10);
}

#[test]
fn what_is_no_plain_product_is_refused_with_the_reason() {
    let windows = "[n < 2, k < 9, i < 4, j < 4, c < 8, r < 3, s < 3] {
      tasklet %y[n, k, i, j] (sum) = $0 * $1 from %x[n, c, i + r - 1, j + s - 1 | 0.0], %w[k, c, r, s] }";
    let last = "f32[2, 9, 4, 4] <0,2,3,1>";
    let convolution = graph(
        "f32[2, 8, 4, 4] <0,2,3,1>",
        "f32[9, 8, 3, 3]",
        last,
        windows,
    );
    assert!(refusal(&convolution).contains("beyond the border"));
    let transposed = "[n < 2, c < 8, i < 4, j < 4, k < 9, r < 3, s < 3] {
      tasklet %y[n, c, i + r - 1, j + s - 1] (sum) = $0 * $1 from %x[n, k, i, j], %w[k, c, r, s] }";
    let scattered = graph(
        last,
        "f32[9, 8, 3, 3]",
        "f32[2, 8, 4, 4] <0,2,3,1>",
        transposed,
    );
    assert!(!refusal(&scattered).is_empty());
    let heads = "[b < 2, h < 3, i < 9, j < 10, p < 8] {
      tasklet %y[b, h, i, j] (sum) = $0 * $1 from %x[b, i, 8*h + p], %w[b, j, 8*h + p] }";
    let several = graph("f32[2, 9, 24]", "f32[2, 10, 24]", "f32[2, 3, 9, 10]", heads);
    assert!(refusal(&several).contains("products, rows or columns"));
    let strided = graph(
        "f32[20, 32]",
        "f32[12, 16]",
        "f32[10, 12]",
        "[i < 10, o < 12, k < 16] { tasklet %y[i, o] (sum) = $0 * $1 from %x[2*i, 2*k], %w[o, k] }",
    );
    assert!(refusal(&strided).contains("operand is contiguous"));
    let overlapping = graph(
        "f32[32]",
        "f32[12, 16]",
        "f32[10, 12]",
        "[i < 10, o < 12, k < 16] { tasklet %y[i, o] (sum) = $0 * $1 from %x[i + k], %w[o, k] }",
    );
    assert!(refusal(&overlapping).contains("overlap"));
    let backwards = graph(
        "f32[10, 16]",
        "f32[12, 16]",
        "f32[10, 12]",
        "[i < 10, o < 12, k < 16] { tasklet %y[i, o] (sum) = $0 * $1 from %x[9 - i, k], %w[o, k] }",
    );
    assert!(!refusal(&backwards).is_empty());
}

#[test]
fn a_description_beyond_its_buffers_is_told() {
    let gemm = product(&graph(
        "f32[2, 9, 10]",
        "f32[12, 10]",
        "f32[2, 9, 12]",
        LINEAR,
    ));
    let (a, b) = (vec![0.0; 120], vec![0.0; 179]);
    let operands = Operands {
        a: &a,
        b: &b,
        bias: None,
    };
    let told = multiply(&gemm, &operands, &mut |_, _| {}).unwrap_err();
    assert!(told.contains("element [9, 17] of B in product 0"), "{told}");
}
