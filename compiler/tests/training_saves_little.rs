//! What crosses from the forward to the backward pass, and what the backward pass computes again.

use compiler::{Plan, Step};
use graph::{Bindings, DType, Expr, Graph, Stage, parse};
use kernels::features::{CpuTarget, Isa};
use kernels::lowering::{Lowered, lower};
use kernels::toolchain::Family;

/// `dropout(gelu(x·a + c))·b`: x [64, 32], the hidden layer [64, 128].
const FEED_FORWARD: &str = "graph \"feed_forward\" {
  %x: f32[64, 32] input
  %a: f32[32, 128] parameter
  %c: f32[128] parameter
  %b: f32[128, 32] parameter
  %seed: i64[] input
  %p: f32[64, 128]
  %u: f32[64, 128]
  %g: f32[64, 128]
  %d: f32[64, 128]
  %y: f32[64, 32]
  inputs %x, %a, %c, %b, %seed
  state {
    %p = einsum(%x, %a) {equation=\"ni,io->no\"} @ \"up\"
    %u = elementwise(%p, %c) {expr=($0 + $1)} @ \"bias\"
    %g = elementwise(%u) {expr=($0 * 0.5 * (1.0 + erf($0 * 0.7071067811865476)))} @ \"gelu\"
    %d = dropout(%g, %seed) {p=0.1, id=3} @ \"dropout\"
    %y = einsum(%d, %b) {equation=\"ni,io->no\"} @ \"down\"
  }
  outputs %y
}";

/// Bytes of one hidden layer.
const HIDDEN: usize = 64 * 128 * 4;

fn feed_forward() -> Graph {
    parse(FEED_FORWARD).unwrap_or_else(|e| panic!("{e}"))
}

fn plan(wrt: &[usize]) -> Plan {
    let step = Step::training(&feed_forward(), wrt).expect("differentiates");
    step.plan(&Bindings::new()).expect("plans")
}

fn lowered(plan: &Plan) -> Lowered {
    let target = CpuTarget::for_isa(Isa::Avx2, Family::Gcc);
    lower(&plan.graph, &target, 2).expect("lowers")
}

#[test]
fn neither_masks_nor_cheap_chains_are_stored() {
    let plan = plan(&[0, 1, 2, 3]);
    // The product before the bias, and what the second product reads: not u, g or the mask.
    assert_eq!(
        lowered(&plan).memory.saved_bytes,
        2 * HIDDEN,
        "{}",
        plan.graph
    );
    let crossing = plan.graph.single_state().expect("one state");
    for id in crossing.nodes.iter().flat_map(|n| n.writes()) {
        assert_eq!(plan.graph.container(id).dtype, DType::F32, "no mask");
    }
    let draws = |stage| {
        let mut n = 0;
        for node in crossing.nodes.iter().filter(|n| n.stage == stage) {
            node.visit_tasklets(&mut |t| {
                for (_, e) in &t.outputs {
                    e.visit(&mut |e| n += usize::from(matches!(e, Expr::Uniform(..))));
                }
            });
        }
        n
    };
    assert_eq!(draws(Stage::Forward), 1);
    assert!(draws(Stage::Backward) >= 1, "the mask is drawn again");
}

#[test]
fn without_the_second_weights_only_the_first_product_is_kept() {
    // b's gradient alone reads the dropped activations.
    let plan = plan(&[0, 1, 2]);
    assert_eq!(lowered(&plan).memory.saved_bytes, HIDDEN, "{}", plan.graph);
}

/// Kernels of the backward pass that the product generator writes, and all others.
fn backward_kernels(wrt: &[usize]) -> (usize, usize) {
    let lowered = lowered(&plan(wrt));
    let mut backward = lowered
        .kernels
        .iter()
        .filter(|k| k.stage == Stage::Backward);
    let all = backward.clone().count();
    let products = backward.by_ref().filter(|k| k.products.is_some()).count();
    (products, all - products)
}

#[test]
fn only_gradients_that_were_asked_for_have_kernels() {
    let [x, a, c, b] = [0, 1, 2, 3];
    assert_eq!(backward_kernels(&[b]).0, 1);
    assert_eq!(backward_kernels(&[c]).0, 1);
    assert_eq!(backward_kernels(&[a]).0, 2);
    assert_eq!(backward_kernels(&[x, a]).0, 3);
    assert_eq!(backward_kernels(&[x, a, c, b]).0, 4);
    assert_eq!(backward_kernels(&[b]).1, 0, "no element-wise work");
}
