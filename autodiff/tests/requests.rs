//! What a request for gradients yields: nothing that was not asked for, and no second derivatives.

use autodiff::{AutodiffError, Differentiated, Request, active, differentiate};
use graph::{Graph, NodeKind, Stage, parse};

/// Two linear layers, `y = relu(x·a)·b`, and an integer result.
const LAYERS: &str = "graph \"layers\" {
  %x: f32[4, 3] input
  %a: f32[3, 5] parameter
  %b: f32[5, 2] parameter
  %unused: f32[7] parameter
  %u: f32[4, 5]
  %h: f32[4, 5]
  %y: f32[4, 2]
  %best: i64[4]
  inputs %x, %a, %b, %unused
  state {
    %u = einsum(%x, %a) {equation=\"ni,io->no\"} @ \"first\"
    %h = elementwise(%u) {expr=(select($0 > 0.0, $0, 0.0))} @ \"relu\"
    %y = einsum(%h, %b) {equation=\"ni,io->no\"} @ \"second\"
    %best = arg_reduce(%y) {axis=1, keep=false, kind=\"max\"} @ \"best\"
  }
  outputs %y, %best
}";

fn layers() -> Graph {
    parse(LAYERS).unwrap_or_else(|e| panic!("{e}"))
}

fn gradients(wrt: &[&str]) -> Differentiated {
    let graph = layers();
    let id = |name: &&str| graph.find(name).expect("a container");
    let request = Request {
        of: vec![id(&"y")],
        wrt: wrt.iter().map(id).collect(),
    };
    differentiate(&graph, &request).expect("differentiates")
}

/// Products in the backward pass.
fn products(differentiated: &Differentiated) -> usize {
    let mut n = 0;
    differentiated.graph.visit_nodes(&mut |node| {
        let product = matches!(&node.kind, NodeKind::Library(l) if l.op == "einsum");
        n += usize::from(product && node.stage == Stage::Backward);
    });
    n
}

#[test]
fn only_gradients_that_were_asked_for_are_computed() {
    assert_eq!(products(&gradients(&[])), 0);
    assert_eq!(products(&gradients(&["b"])), 1);
    assert_eq!(
        products(&gradients(&["a"])),
        2,
        "through b to h, and a's own"
    );
    assert_eq!(products(&gradients(&["a", "b"])), 3);
    assert_eq!(products(&gradients(&["x", "a", "b"])), 4);
}

#[test]
fn what_has_no_influence_has_no_gradient() {
    let made = gradients(&["a", "unused"]);
    assert!(made.gradients[0].is_some() && made.gradients[1].is_none());
    let graph = layers();
    let id = |name| graph.find(name).expect("a container");
    let active = active(&graph, &[id("b")]);
    assert!(active.contains(&id("y")) && !active.contains(&id("h")));
    assert!(
        !active.contains(&id("best")),
        "an index is not differentiable"
    );
}

#[test]
fn second_derivatives_are_refused() {
    let first = gradients(&["a"]);
    let request = Request {
        of: vec![first.gradients[0].expect("a gradient")],
        wrt: vec![first.graph.find("x").expect("an input")],
    };
    let error = differentiate(&first.graph, &request).unwrap_err();
    assert!(
        matches!(error, AutodiffError::SecondOrder { .. }),
        "{error}"
    );
    assert_eq!(
        error.to_string(),
        "`layers` already holds backward nodes (second); gradients of gradients are not supported"
    );
}

/// The value is that of `y`, the gradient is that of `v`. There is no other gradient, and no product for one.
#[test]
fn a_gradient_that_goes_straight_through_passes_by_the_value() {
    let graph = parse(
        "graph \"estimator\" {
  %x: f32[4, 3] input
  %a: f32[3, 5] parameter
  %b: f32[3, 5] parameter
  %y: f32[4, 5]
  %v: f32[4, 5]
  %out: f32[4, 5]
  inputs %x, %a, %b
  state {
    %y = einsum(%x, %a) {equation=\"ni,io->no\"} @ \"y\"
    %v = einsum(%x, %b) {equation=\"ni,io->no\"} @ \"v\"
    %out = straight_through(%y, %v) @ \"out\"
  }
  outputs %out
}",
    )
    .unwrap_or_else(|e| panic!("{e}"));
    let id = |name: &str| graph.find(name).expect("a container");
    let request = Request {
        of: vec![id("out")],
        wrt: ["x", "a", "b"].map(id).to_vec(),
    };
    let made = differentiate(&graph, &request).expect("differentiates");
    let exists: Vec<bool> = made.gradients.iter().map(Option::is_some).collect();
    assert_eq!(exists, [true, false, true]);
    assert_eq!(products(&made), 2);
}
