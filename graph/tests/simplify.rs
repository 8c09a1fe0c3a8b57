//! Simplification: each rule before and after, what stops it, and unchanged results.

use graph::{
    Bindings, Graph, Library, LibraryMeaning, Precision, Refusal, Rule, Tensor, interpret, parse,
    simplify, simplify_before_gradients, verify,
};

/// `exp`, `copy`, `add` of equal shapes, `spread` to 100 elements, `halves`, `noise`.
struct Toy;

impl LibraryMeaning for Toy {
    fn evaluate(&self, l: &Library, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, Refusal> {
        let x = inputs[0].ok_or("absent input")?;
        let of = |data: Vec<f64>| Tensor::from_f64(x.dtype, &[data.len()], data);
        let v = x.to_f64();
        Ok(match l.op.as_str() {
            "exp" => vec![of(v.iter().map(|a| a.exp()).collect())],
            "copy" => vec![x.clone()],
            "add" => {
                let w = inputs[1].ok_or("absent input")?.to_f64();
                vec![of(v.iter().zip(w).map(|(a, b)| a + b).collect())]
            }
            "spread" => vec![of(vec![v[0]; 100])],
            "halves" => {
                let (a, b) = v.split_at(v.len() / 2);
                vec![of(a.to_vec()), of(b.to_vec())]
            }
            "noise" => vec![x.clone()],
            op => return Err(format!("no operator `{op}`").into()),
        })
    }
    fn is_random(&self, op: &str) -> bool {
        op == "noise"
    }
    fn copied_input(&self, _: &Graph, l: &Library) -> Option<usize> {
        (l.op == "copy").then_some(0)
    }
}

fn text(declarations: &str, state: &str, outputs: &str) -> String {
    format!(
        "graph \"g\" {{ %x: f32[2] input {declarations} inputs %x \
         state {{ {state} }} outputs {outputs} }}"
    )
}

/// Simplifies, checks that results are unchanged, and gives what is left of the nodes.
fn nodes_after(g: &str, fired: &[(Rule, usize)]) -> String {
    let before = parse(g).unwrap_or_else(|e| panic!("{e}\n{g}"));
    assert_eq!(verify(&before), Ok(()), "{g}");
    let mut after = before.clone();
    let report = simplify(&mut after, &Toy);
    assert_eq!(verify(&after), Ok(()), "{after}");
    for (rule, n) in fired {
        assert_eq!(report.count(*rule), *n, "{rule:?} in {report}\n{after}");
    }
    let total: usize = fired.iter().map(|(_, n)| n).sum();
    assert_eq!(report.fired.len(), total, "{report}");
    let x = Tensor::from_f64(graph::DType::F32, &[2], vec![0.5, -2.0]);
    let run = |g: &Graph| {
        interpret(
            g,
            std::slice::from_ref(&x),
            &Bindings::new(),
            &Toy,
            Precision::Double,
        )
        .unwrap_or_else(|e| panic!("{e}\n{g}"))
    };
    assert_eq!(run(&after), run(&before));
    after.compact();
    assert_eq!(run(&after), run(&before));
    assert_eq!(verify(&after), Ok(()), "{after}");
    let text = after.to_string();
    let state = text.split("state {\n").nth(1).unwrap_or_default();
    state
        .split("\n  }\n")
        .next()
        .unwrap_or_default()
        .to_string()
}

#[test]
fn what_nobody_needs_goes() {
    let g = text(
        "%a: f32[2] %b: f32[2] %c: f32[1] %d: f32[1]",
        "%a = exp(%x) %b = exp(%a) %c, %d = halves(%x)",
        "%d",
    );
    assert_eq!(
        nodes_after(&g, &[(Rule::DropDead, 3)]),
        "    -, %d = halves(%x)"
    );
}

#[test]
fn dead_writes_inside_maps_go() {
    let g = text(
        "%a: f32[2] %b: f32[2] %t: f32[2] local",
        "map [i < 2] {
            tasklet %t[i] = $0 * 3.0 from %x[i]
            tasklet %a[i] = $0, %b[i] = $0 + 1.0 from %x[i]
         }",
        "%b",
    );
    assert_eq!(
        nodes_after(&g, &[(Rule::DropDead, 2)]),
        "    map [i < 2] {\n      tasklet %b[i] = $0 + 1.0 from %x[i]\n    }"
    );
}

#[test]
fn operators_of_constants_are_computed() {
    let constants = "%p: f32[2] constant [1.0, 2.0] %q: f32[2] constant [3.0, 4.0]
        %s: f32[2] %e: f32[2] %y: f32[2] %wide: f32[100]";
    let g = text(constants, "%s = add(%p, %q) %y = add(%x, %s)", "%y");
    assert_eq!(
        nodes_after(&g, &[(Rule::FoldConstant, 1)]),
        "    %y = add(%x, %s)"
    );

    // What grows, what is random, what is an output, and what refuses is not computed.
    for (state, output) in [
        ("%wide = spread(%p)", "%wide"),
        ("%wide = spread(%p) %y = copy(%x)", "%wide"),
        ("%s = noise(%p) %y = add(%x, %s)", "%y"),
        ("%s = exp(%p)", "%s"),
    ] {
        let kept = nodes_after_any(&text(constants, state, output));
        assert!(kept.contains("(%p)"), "{kept}");
    }
}

/// Like [`nodes_after`], whatever fired.
fn nodes_after_any(g: &str) -> String {
    let mut graph = parse(g).unwrap_or_else(|e| panic!("{e}\n{g}"));
    simplify(&mut graph, &Toy);
    assert_eq!(verify(&graph), Ok(()), "{graph}");
    graph.to_string()
}

#[test]
fn equal_constants_become_one() {
    let g = text(
        "%p: f32[2] constant [1.0, 2.0] %q: f32[2] constant [1.0, 2.0]
         %r: f32[2] constant [1.0, -2.0] %a: f32[2] %b: f32[2] %c: f32[2]",
        "%a = add(%x, %p) %b = add(%a, %q) %c = add(%b, %r)",
        "%c",
    );
    assert_eq!(
        nodes_after(&g, &[(Rule::MergeConstants, 1)]),
        "    %a = add(%x, %p)\n    %b = add(%a, %p)\n    %c = add(%b, %r)"
    );
}

#[test]
fn copies_give_way_to_what_they_copy() {
    let g = text(
        "%a: f32[2] %b: f32[2] %c: f32[2]",
        "%a = copy(%x) %b = copy(%a) %c = exp(%b)",
        "%c",
    );
    assert_eq!(
        nodes_after(&g, &[(Rule::ForwardCopy, 2)]),
        "    %c = exp(%x)"
    );

    // An output that copies a transient is the transient; two outputs stay two containers.
    let g = text(
        "%a: f32[2] %b: f32[2] %c: f32[2]",
        "%a = exp(%x) %b = copy(%a) %c = copy(%a)",
        "%b, %c",
    );
    assert_eq!(
        nodes_after(&g, &[(Rule::ForwardCopy, 1)]),
        "    %a = exp(%x)\n    %c = copy(%a)"
    );

    // A copy of an input that is an output stays, and so does a change of layout.
    let g = text("%a: f32[2]", "%a = copy(%x)", "%a");
    assert_eq!(nodes_after(&g, &[]), "    %a = copy(%x)");
    let layout = "graph \"g\" { %x: f32[2, 2] input %a: f32[2, 2] <1,0> %b: f32[2, 2] inputs %x
        state { %a = copy(%x) %b = exp(%a) } outputs %b }";
    assert!(nodes_after_any(layout).contains("%a = copy(%x)"));
}

#[test]
fn equal_operators_are_computed_once() {
    let g = text(
        "%a: f32[2] %b: f32[2] %c: f32[2] %d: f32[2] %e: f32[2]",
        "%a = exp(%x) %b = exp(%x) %c = exp(%a) %d = exp(%b) %e = add(%c, %d)",
        "%e",
    );
    assert_eq!(
        nodes_after(&g, &[(Rule::MergeOperators, 2)]),
        "    %a = exp(%x)\n    %c = exp(%a)\n    %e = add(%c, %c)"
    );
    // Random, of another stage, with other attributes, or an output: computed twice.
    for second in [
        "%a = noise(%x) %b = noise(%x)",
        "%a = exp(%x) %b = exp(%x) !backward",
        "%a = exp(%x) %b = exp(%x) {k=1}",
    ] {
        let state = format!("{second} %e = add(%a, %b)");
        let declared = "%a: f32[2] %b: f32[2] %e: f32[2]";
        let kept = nodes_after(&text(declared, &state, "%e"), &[]);
        assert_eq!(kept.lines().count(), 3, "{kept}");
    }
    let g = text(
        "%a: f32[2] %b: f32[2]",
        "%a = exp(%x) %b = exp(%x)",
        "%a, %b",
    );
    assert_eq!(nodes_after(&g, &[]).lines().count(), 2);
}

#[test]
fn tasklets_and_maps_become_simpler() {
    let g = text(
        "%a: f32[2]",
        "map [i < 2, k < 1] {
            map [] { tasklet %a[i] = $0 * 1.0 + $2 * f32({k}) from %x[i], %x[k], %x[i + k] }
         }",
        "%a",
    );
    let rules = [(Rule::FlattenMap, 1), (Rule::SimplifyTasklet, 1)];
    assert_eq!(
        nodes_after(&g, &rules),
        "    map [i < 2] {\n      tasklet %a[i] = $0 + $0 * f32(0) from %x[i]\n    }"
    );
}

#[test]
fn both_sides_of_a_branch_count_as_readers() {
    let g = "graph \"g\" { %x: f32[2] input %c: bool[] input %a: f32[2] %b: f32[2] inputs %x, %c
        state { %a = exp(%x) } branch %c { state { %b = exp(%a) } } else { state { %b = copy(%a) } }
        outputs %b }";
    let mut graph = parse(g).unwrap();
    let report = simplify(&mut graph, &Toy);
    assert_eq!(report.to_string(), "nothing");
    assert_eq!(graph, parse(g).unwrap());
}

#[test]
fn results_that_a_gradient_may_read_stay_before_differentiation() {
    let g = text(
        "%a: f32[1] %b: f32[1] %c: f32[2]",
        "%a, %b = halves(%x) %c = exp(%x)",
        "%a",
    );
    let left = |run: fn(&mut Graph, &dyn LibraryMeaning) -> graph::SimplifyReport| {
        let mut graph = parse(&g).unwrap();
        let report = run(&mut graph, &Toy);
        let outputs = match &graph.last_state().nodes[0].kind {
            graph::NodeKind::Library(l) => l.outputs.iter().flatten().count(),
            _ => 0,
        };
        (report.to_string(), outputs)
    };
    assert_eq!(left(simplify), ("2 DropDead".into(), 1));
    assert_eq!(left(simplify_before_gradients), ("1 DropDead".into(), 2));
}

#[test]
fn compaction_renumbers_in_order() {
    let mut g = parse(&text(
        "%unused: f32[2] %a: f32[2]",
        "%a = exp(%x)",
        "%a -> %x",
    ))
    .unwrap();
    let old = g.find("a").unwrap();
    let renumbered = g.compact();
    assert_eq!(renumbered[old.idx()], g.find("a"));
    assert_eq!(g.containers.len(), 2);
    assert_eq!(g.outputs[0].updates, g.find("x"));
    assert_eq!(verify(&g), Ok(()));
}
