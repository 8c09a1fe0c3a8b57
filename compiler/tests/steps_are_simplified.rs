//! Steps from any source are simplified, before and after differentiation, the same way every time.

use compiler::Step;
use graph::{Bindings, Graph, Stage, parse};

fn graph(text: &str) -> Graph {
    parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// `exp(x + 0)` twice, once unused.
const WASTEFUL: &str = "graph \"g\" {
  %x: f32[2, 3] input
  %zero: f32[] constant [0.0]
  %one: f32[] constant [1.0]
  %sum: f32[]
  %same: f32[2, 3]
  %a: f32[2, 3]
  %b: f32[2, 3]
  %y: f32[2, 3]
  %dead: f32[2, 3]
  inputs %x
  state {
    %sum = elementwise(%zero, %one) {expr=($0 + $1)}
    %same = reshape(%x) {shape=sizes[2, 3]}
    %a = elementwise(%same) {expr=(exp($0))}
    %b = elementwise(%x) {expr=(exp($0))}
    %y = elementwise(%a, %b, %sum) {expr=($0 * $1 * $2)}
    %dead = elementwise(%y) {expr=(exp($0))}
  }
  outputs %y
}";

fn operators(graph: &Graph, stage: Stage) -> usize {
    let mut n = 0;
    graph.visit_nodes(&mut |node| n += usize::from(node.stage == stage));
    n
}

#[test]
fn both_kinds_of_step_are_simplified() {
    let forward = Step::forward(&graph(WASTEFUL)).unwrap();
    assert_eq!(operators(forward.graph(), Stage::Forward), 2);
    let training = Step::training(&graph(WASTEFUL), &[0]).unwrap();
    assert_eq!(operators(training.graph(), Stage::Forward), 2);
    // Both factors are one container, so their gradients are one sum.
    let backward = operators(training.graph(), Stage::Backward);
    assert!((1..=4).contains(&backward), "{}", training.graph());
}

#[test]
fn the_same_graph_gives_the_same_bytes() {
    let text = || {
        let model = models::convolutional::resnet(2, 32, [1, 1, 0, 0]).unwrap();
        let wrt: Vec<usize> = (0..model.inputs.len()).collect();
        let step = Step::training(&model, &wrt).unwrap();
        let plan = step.plan(&Bindings::new()).unwrap();
        let decisions = format!("{:?}", plan.decisions);
        (step.graph().to_string(), plan.graph.to_string(), decisions)
    };
    assert_eq!(text(), text());
}

/// The forward pass keeps the winners of a maximum although it reads none: otherwise the backward
/// pass would look for them again.
#[test]
fn the_winners_of_a_pool_are_not_looked_for_twice() {
    let model = graph(
        "graph \"g\" {
  %x: f32[1, 2, 6, 6] input
  %y: f32[1, 2, 3, 3]
  %index: i64[1, 2, 3, 3]
  %winner: u8[1, 2, 3, 3]
  inputs %x
  state {
    %y, %index, %winner = max_pool(%x) {kernel=[2, 2], stride=[2, 2]}
  }
  outputs %y
}",
    );
    let step = Step::training(&model, &[0]).unwrap();
    let x = step.graph().inputs[0];
    step.graph().visit_nodes(&mut |node| {
        let again = node.stage == Stage::Backward && node.reads().contains(&x);
        assert!(!again, "{}", step.graph());
    });
}

#[test]
fn a_graph_that_breaks_a_rule_is_an_internal_error() {
    let broken = graph(
        "graph \"g\" {
  %x: f32[2] input
  %a: f32[2]
  %y: f32[2]
  inputs %x
  state {
    %y = elementwise(%a) {expr=(exp($0))} @ \"late\"
    %a = elementwise(%x) {expr=(exp($0))}
  }
  outputs %y
}",
    );
    let error = Step::forward(&broken).unwrap_err().to_string();
    assert_eq!(
        error,
        "internal error after pass `import`: late: `a` is read before anything writes it; please \
         report it"
    );
}
