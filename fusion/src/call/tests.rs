//! What becomes a view and what stays a copy, each condition alone.

use crate::{Bound, Target, expand, fuse};
use graph::{
    Bindings, ContainerId, DType, Graph, Node, NodeKind, Operand, Precision, Recipe, Rewrite,
    Tensor, View, interpret,
};
use models::text_graph as graph;

/// The rest of a graph with `%q` to be read by attention: containers and the node that makes it.
struct Case {
    containers: &'static str,
    makes: &'static str,
}

/// Two sequences of two heads, three rows of eight.
fn planned(case: &Case) -> (Graph, Graph, Vec<String>) {
    planned_by("torch_flash", Target::Cuda, case)
}

fn planned_by(by: &str, target: Target, case: &Case) -> (Graph, Graph, Vec<String>) {
    let containers = format!(
        "%k: f32[2, 2, 3, 8] input
         %v: f32[2, 2, 3, 8] input
         {}
         %q: f32[2, 2, 3, 8]
         %y: f32[2, 2, 3, 8]
         %z: f32[2, 3, 2, 8]",
        case.containers
    );
    let nodes = format!(
        "{}
         %y, -, - = attention_with_lse(%q, %k, %v) {{by=\"{by}\", order=[0, 2, 1, 3]}}
         map [b < 2, l < 3, h < 2, e < 8] {{ tasklet %z[b, l, h, e] = $0 from %y[b, h, l, e] }}",
        case.makes
    );
    let given = graph(&containers, &nodes, "%z");
    let bound = Bound::new(given.clone()).unwrap();
    let expanded = expand(&bound, &Recipe::default()).unwrap();
    let (laid_out, ()) = expanded.lay_out(|_| ());
    let fused = fuse(laid_out, target, &Recipe::default()).unwrap();
    graph::verify(&fused.graph).unwrap_or_else(|e| panic!("{e:?}\n{}", fused.graph));
    let own = fused
        .decisions
        .iter()
        .filter(|d| d.rewrite() == Rewrite::Call);
    let told = own
        .map(|d| format!("{} {}", d.is_applied(), d.sentence()))
        .collect();
    (given, fused.graph, told)
}

fn call(graph: &Graph) -> &Node {
    let nodes = &graph.single_state().unwrap().nodes;
    let is_call = |n: &&Node| matches!(n.kind, NodeKind::Library(_));
    nodes.iter().find(is_call).unwrap()
}

/// The graph means the same before and after, which also holds the views to be right.
fn assert_same(before: &Graph, after: &Graph) {
    let run = |g: &Graph| {
        let inputs = g.inputs.iter().enumerate();
        let given: Vec<Tensor> = inputs.map(|(n, id)| tensor(g, n, *id)).collect();
        let none = Bindings::new();
        let all = interpret(g, &given, &none, &ops::Meaning, Precision::Double);
        all.unwrap_or_else(|e| panic!("{e}\n{g}"))
    };
    let (expected, found) = (run(before), run(after));
    for (a, b) in expected[0].to_f64().iter().zip(found[0].to_f64()) {
        assert!((a - b).abs() < 1e-12, "{a} {b}\n{after}");
    }
}

/// The same numbers whatever an input's dimensions.
fn tensor(graph: &Graph, n: usize, id: ContainerId) -> Tensor {
    let c = graph.container(id);
    let sizes = c.shape.iter().map(|s| s.as_const().unwrap() as usize);
    let shape: Vec<usize> = sizes.collect();
    let len: usize = shape.iter().product();
    let value = |i: usize| (((i * 37 + n * 11) % 97) as f64) / 48.5 - 1.0;
    match c.dtype {
        DType::I64 => Tensor::from_i64(c.dtype, &shape, (0..len).map(|i| i as i64 % 2).collect()),
        dtype => Tensor::from_f64(dtype, &shape, (0..len).map(value).collect()),
    }
}

#[test]
fn attention_as_a_loop_reads_permuted_operands_where_they_lie() {
    let (before, after, _) = planned_by(
        "loop",
        Target::Cpu,
        &Case {
            containers: "%t: f32[2, 3, 2, 8] input",
            makes: "map [b < 2, h < 2, l < 3, d < 8] { tasklet %q[b, h, l, d] = $0 from %t[b, l, h, d] }",
        },
    );
    let NodeKind::Library(library) = &call(&after).kind else {
        unreachable!()
    };
    let view = library.view(Operand::Input(0)).unwrap();
    assert_eq!(view.strides, [48, 8, 16, 1]);
    assert_same(&before, &after);
}

#[test]
fn permuted_slices_are_read_where_they_lie() {
    let (before, after, told) = planned(&Case {
        containers: "%t: f32[2, 3, 3, 2, 8] input",
        makes: "map [b < 2, h < 2, l < 3, d < 8] { tasklet %q[b, h, l, d] = $0 from %t[b, l, 1, h, d] }",
    });
    let NodeKind::Library(library) = &call(&after).kind else {
        unreachable!()
    };
    let view = View {
        offset: 16,
        sizes: vec![2, 2, 3, 8],
        strides: vec![144, 8, 48, 1],
    };
    assert_eq!(library.view(Operand::Input(0)), Some(view));
    let order = View::dense(&[2, 2, 3, 8], &[0, 2, 1, 3]);
    assert_eq!(library.view(Operand::Output(0)), Some(order));
    assert!(told.iter().all(|t| t.starts_with("true")), "{told:?}");
    // The result is permuted as it is read: only the copy to what the step returns is left.
    assert_eq!(after.single_state().unwrap().nodes.len(), 2, "{after}");
    assert_same(&before, &after);
}

#[test]
fn reshapes_on_the_way_are_no_copies() {
    let (before, after, told) = planned(&Case {
        containers: "%t: f32[6, 16] input
         %r: f32[2, 3, 2, 8]",
        makes: "%r = reshape(%t) {shape=sizes[2, 3, 2, 8]}
         map [b < 2, h < 2, l < 3, d < 8] { tasklet %q[b, h, l, d] = $0 from %r[b, l, h, d] }",
    });
    assert!(told.iter().all(|t| t.starts_with("true")), "{told:?}");
    assert_eq!(after.single_state().unwrap().nodes.len(), 2, "{after}");
    assert_same(&before, &after);
}

#[test]
fn each_condition_alone_keeps_the_copy() {
    let plain = "map [b < 2, h < 2, l < 3, d < 8]";
    let cases = [
        (
            "%t: f32[2, 2, 8, 3] input",
            format!("{plain} {{ tasklet %q[b, h, l, d] = $0 from %t[b, h, d, l] }}"),
            "not contiguous",
        ),
        (
            "%t: f32[2, 3, 8] input",
            format!("{plain} {{ tasklet %q[b, h, l, d] = $0 from %t[b, l, d] }}"),
            "repeated",
        ),
        (
            "%t: f32[2, 2, 3, 9] input",
            format!("{plain} {{ tasklet %q[b, h, l, d] = $0 from %t[b, h, l, d] }}"),
            "not aligned",
        ),
        (
            "%t: f32[2, 2, 3, 12] input",
            format!("{plain} {{ tasklet %q[b, h, l, d] = $0 from %t[b, h, l, d + 1] }}"),
            "not aligned",
        ),
        (
            "%t: f32[2, 2, 2, 8] input",
            format!("{plain} {{ tasklet %q[b, h, l, d] = $0 from %t[b, h, l, d | 0.0] }}"),
            "outside",
        ),
        (
            "%t: f32[2, 2, 3, 8] input",
            format!("{plain} {{ tasklet %q[b, h, l, d] = $0 * 2.0 from %t[b, h, l, d] }}"),
            "",
        ),
        (
            "%t: f32[4, 2, 3, 8] input\n%i: i64[2] input",
            format!("{plain} {{ tasklet %q[b, h, l, d] = $0 from %t[$1, h, l, d], %i[b] }}"),
            "looked up",
        ),
    ];
    for (containers, makes, why) in cases {
        let case = Case {
            containers,
            makes: Box::leak(makes.into_boxed_str()),
        };
        let (before, after, told) = planned(&case);
        let refused: Vec<&String> = told.iter().filter(|t| t.starts_with("false")).collect();
        if why.is_empty() {
            // What is computed is stored for the operator, and read there.
            assert!(refused.is_empty(), "{told:?}");
        } else {
            assert!(
                matches!(refused.as_slice(), [one] if one.contains(why)),
                "{why}: {told:?}"
            );
        }
        assert_same(&before, &after);
    }
}
