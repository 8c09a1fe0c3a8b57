//! The generator writes as many chained kernels for a GPU as fusion decided: widths, types, masks and limits of both.

use compiler::{Step, Target};
use cuda_kernels::lower::lower;
use fusion::{Applied, Outcome};
use graph::{Bindings, Graph, parse};

/// How many chained kernels were decided, and how many there are.
fn chained(graph: &Graph, is_trained: bool) -> [usize; 2] {
    let step = match is_trained {
        true => {
            let is_float = |i: &usize| graph.container(graph.inputs[*i]).dtype.is_float();
            let trained: Vec<usize> = (0..graph.inputs.len()).filter(is_float).collect();
            Step::training(graph, &trained).expect("differentiates")
        }
        false => Step::forward(graph).expect("a step"),
    };
    let plan = step.plan_for(&Bindings::new(), Target::Cuda);
    let plan = plan.expect("plans");
    let counted = plan.decisions.iter().map(|d| match &d.outcome {
        Outcome::Applied(Applied::Chained { n_kernels, .. }) => *n_kernels,
        _ => 0,
    });
    let program = lower(&plan.graph).expect("lowers");
    let maps = program.maps.iter().filter(|m| m.path == "chain");
    [counted.sum(), maps.map(|m| m.n_launches).sum()]
}

/// Attention with widths of keys and values, over 70 rows and 200 columns.
fn attention(dtype: &str, [d, e]: [i64; 2], [more, arguments, attributes]: [&str; 3]) -> Graph {
    let text = format!(
        "graph \"g\" {{
         %q: {dtype}[2, 3, 70, {d}] input
         %k: {dtype}[2, 3, 200, {d}] input
         %v: {dtype}[2, 3, 200, {e}] input
         {more}
         %y: {dtype}[2, 3, 70, {e}]
         inputs %q, %k, %v{arguments}
         state {{ %y = attention(%q, %k, %v{arguments}) {{{attributes}}} }}
         outputs %y
         }}"
    );
    parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

const PLAIN: [&str; 3] = ["", "", "causal=false"];

#[test]
fn every_width_that_is_chained_has_kernels() {
    let widths = [8, 16, 24, 40, 64, 72, 104, 112, 128];
    for d in widths {
        for e in widths {
            let graph = attention("bf16", [d, e], PLAIN);
            assert_eq!(chained(&graph, true), [3, 3], "{d} and {e}");
        }
    }
    for [d, e] in [[136, 64], [64, 136], [20, 64]] {
        let graph = attention("f16", [d, e], PLAIN);
        assert_eq!(chained(&graph, true), [0, 0], "{d} and {e}");
    }
}

#[test]
fn every_mask_that_is_chained_has_kernels() {
    for mask in [
        ["", "", "causal=true"],
        ["%mask: bool[70, 200] input", ", %mask", "causal=true"],
        ["%mask: f16[2, 1, 1, 200] input", ", %mask", "causal=false"],
        ["%mask: f16[3, 70, 200] input", ", %mask", "causal=false"],
        ["%mask: f16[2, 3, 70, 200] input", ", %mask", "causal=true"],
    ] {
        let graph = attention("f16", [64, 64], mask);
        assert_eq!(chained(&graph, true), [3, 3], "{mask:?}");
    }
    let single = attention("f32", [64, 64], PLAIN);
    assert_eq!(chained(&single, true), [0, 0]);
}

/// Scores with several values, or with several keys.
fn several(n: usize, is_values: bool) -> Graph {
    let (mut containers, mut inputs, mut nodes) = (String::new(), String::new(), String::new());
    let mut scores = Vec::new();
    let mut outputs = Vec::new();
    for k in 0..n {
        containers += &format!("%k{k}: bf16[2, 200, 128] input\n%q{k}: bf16[2, 200, 128] input\n");
        containers += &format!("%s{k}: bf16[2, 200, 200]\n%y{k}: bf16[2, 200, 128]\n");
        inputs += &format!(", %k{k}, %q{k}");
        if !is_values || k == 0 {
            nodes += &format!("%s{k} = einsum(%q{k}, %k{k}) {{equation=\"bid,bjd->bij\"}}\n");
            scores.push(k);
        }
    }
    let sum: Vec<String> = (0..scores.len()).map(|k| format!("${k}")).collect();
    let terms: Vec<String> = scores.iter().map(|k| format!("%s{k}")).collect();
    nodes += &format!(
        "%p = elementwise({}) {{expr=(tanh({}))}}\n",
        terms.join(", "),
        sum.join(" + ")
    );
    for k in 0..if is_values { n } else { 1 } {
        nodes += &format!("%y{k} = einsum(%p, %k{k}) {{equation=\"bij,bje->bie\"}}\n");
        outputs.push(format!("%y{k}"));
    }
    let text = format!(
        "graph \"g\" {{\n{containers}%p: bf16[2, 200, 200]\ninputs {}\nstate {{\n{nodes}}}\noutputs {}\n}}",
        &inputs[2..],
        outputs.join(", ")
    );
    parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

#[test]
fn as_many_products_are_chained_as_kernels_keep() {
    for is_values in [true, false] {
        for (n, kernels) in [(1, 1), (2, 1), (3, 0)] {
            let graph = several(n, is_values);
            assert_eq!(chained(&graph, false), [kernels; 2], "{n}: {graph}");
        }
    }
}

/// The forward pass computes a number for each row; the backward pass computes products.
#[test]
fn sums_of_scores_are_as_many_kernels_as_decided() {
    let text = "graph \"g\" {
        %q: bf16[2, 200, 64] input
        %k: bf16[2, 200, 64] input
        %s: bf16[2, 200, 200]
        %y: bf16[2, 200]
        inputs %q, %k
        state {
          %s = einsum(%q, %k) {equation=\"bid,bjd->bij\"}
          %y = reduce(%s) {kind=\"logsumexp\", axes=[2], keep=false}
        }
        outputs %y
      }";
    let graph = parse(text).unwrap_or_else(|e| panic!("{e}"));
    let [decided, are] = chained(&graph, true);
    assert_eq!((decided, are), (3, 3));
}
