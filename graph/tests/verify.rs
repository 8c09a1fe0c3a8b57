//! Each rule of the verifier has a graph in which it alone fires.

use graph::{ContainerId, Graph, Layout, Problem, parse, verify};

/// The violations of a graph in text form, as they are reported.
fn problems(text: &str) -> Vec<String> {
    reports(&parse(text).unwrap_or_else(|e| panic!("{e}\n{text}")))
}

fn reports(g: &Graph) -> Vec<String> {
    let found = verify(g).err().unwrap_or_default();
    found.iter().map(ToString::to_string).collect()
}

/// A graph that copies `%x: f32[4, n]`, with another body and more declarations.
fn body(declarations: &str, state: &str) -> String {
    format!(
        "graph \"g\" {{ symbols n %x: f32[4, n] input %ids: i64[4] input {declarations} \
         inputs %x, %ids state {{ {state} }} }}"
    )
}

fn fires(declarations: &str, state: &str, expect: &str) {
    assert_eq!(problems(&body(declarations, state)), [expect], "{state}");
}

fn passes(declarations: &str, state: &str) {
    assert_eq!(problems(&body(declarations, state)), [""; 0], "{state}");
}

#[test]
fn a_good_graph_passes() {
    passes("", "");
    passes(
        "%y: f32[4] %z: f32[4, n] %t: f32[4] local %u: f32[n, 4]",
        "map [i < 4] kernel {
            map [j < n] { tasklet %t[i] (max) = $0 from %x[i, j + 1 | -inf] }
            map [j < n] { tasklet %z[i, j] = $0 - $1 from %x[i, j], %t[i] }
        }
        map [i < 4] { tasklet %y[$1] (sum) = $0 from %x[$1, 0], %ids[i] }
        map [i < 4*n] { tasklet %u[mod(i, n), floordiv(i, n)] = 0.0 }",
    );
}

#[test]
fn ids_must_exist() {
    let mut g = parse(&body("%y: f32[4, n]", "%y = relu(%x) @ \"r\"")).unwrap();
    let node = &mut g.single_state_mut().unwrap().nodes[0];
    if let graph::NodeKind::Library(l) = &mut node.kind {
        l.inputs[0] = Some(ContainerId(9));
    }
    assert_eq!(reports(&g), ["r: container number 9 does not exist"]);
}

#[test]
fn names_are_unique() {
    let mut g = parse(&body("%y: f32[4, n]", "%y = relu(%x)")).unwrap();
    g.containers[2].name = "x".into();
    assert_eq!(reports(&g), ["graph: the name `x` is taken twice"]);
    g.containers[2].name = "y".into();
    g.symbols.push("n".into());
    assert_eq!(reports(&g), ["graph: the name `n` is taken twice"]);
}

#[test]
fn layouts_fit_shapes() {
    let mut g = parse(&body("", "")).unwrap();
    g.containers[0].layout = Layout::row_major(3);
    assert_eq!(reports(&g), ["graph: `x` has 2 dimensions, its layout 3"]);
}

#[test]
fn constants_are_as_declared() {
    fires(
        "%c: f32[2] constant f32[1] [0.5]",
        "",
        "graph: the value of constant `c` has another type or shape than declared",
    );
}

#[test]
fn inputs_are_listed_once() {
    let rule = "must be listed as input exactly once if the caller gives it, else never";
    fires("%p: f32[] parameter", "", &format!("graph: `p` {rule}"));
    let mut g = parse(&body("", "")).unwrap();
    g.inputs.push(ContainerId(0));
    assert_eq!(reports(&g), [format!("graph: `x` {rule}")]);
}

#[test]
fn outputs_are_written_and_replace_inputs() {
    let mut g = parse(&body("%y: f32[4, n]", "")).unwrap();
    g.add_output(ContainerId(2));
    assert_eq!(reports(&g), ["graph: output `y` is never written"]);
    let mut g = parse(&body("%y: f32[4, n]", "%y = relu(%x)")).unwrap();
    g.add_output(ContainerId(2));
    g.outputs[0].updates = Some(ContainerId(0));
    assert_eq!(reports(&g), [""; 0]);
    g.outputs[0].updates = Some(ContainerId(1));
    assert_eq!(
        reports(&g),
        ["graph: output `y` cannot replace `ids`: not an input of the same type and shape"]
    );
}

#[test]
fn values_are_made_before_they_are_used() {
    fires(
        "%y: f32[4, n] %z: f32[4, n]",
        "%z = relu(%y) @ \"first\" %y = relu(%x)",
        "first: `y` is read before anything writes it",
    );
    fires(
        "%y: f32[4, n]",
        "map [i < 4, j < n] { tasklet %y[i, j] = $0 + 1.0 from %y[i, j] @ \"self\" }",
        "self: `y` is read before anything writes it",
    );
}

#[test]
fn transients_have_one_writer() {
    fires(
        "%y: f32[4, n]",
        "%y = relu(%x) %y = exp(%x)",
        "graph: `y` is written by more than one node",
    );
    let branch = "graph \"g\" { %c: bool[] input %y: f32[] inputs %c branch %c {
        state { tasklet %y[] = 1.0 } } else { state { tasklet %y[] = 2.0 } } outputs %y }";
    assert_eq!(problems(branch), [""; 0]);
}

#[test]
fn inputs_are_not_written() {
    fires(
        "",
        "%x = relu(%x)",
        "graph: `x` is written, but only the caller may change it",
    );
}

#[test]
fn local_containers_stay_in_their_kernel() {
    fires(
        "%t: f32[4] local %y: f32[4]",
        "map [i < 4] { tasklet %t[i] = 1.0 } map [i < 4] { tasklet %y[i] = $0 from %t[i] }",
        "graph: local container `t` is used outside a single kernel",
    );
    fires(
        "%t: f32[4, n] local",
        "%t = relu(%x)",
        "graph: local container `t` is used outside a single kernel",
    );
}

#[test]
fn local_containers_start_afresh_at_each_point() {
    let kernel = |t: &str| {
        format!(
            "map [i < 4] kernel {{ map [j < n] {{ tasklet {t} = $0 from %x[i, j] @ \"acc\" }}
             map [j < n] {{ tasklet %y[i, j] = $0 from {} }} }}",
            t.replace(" (sum)", "")
        )
    };
    passes("%t: f32[4] local %y: f32[4, n]", &kernel("%t[i] (sum)"));
    passes("%t: f32[n] local %y: f32[4, n]", &kernel("%t[j]"));
    fires(
        "%t: f32[] local %y: f32[4, n]",
        &kernel("%t[] (sum)"),
        "acc: local container `t` reduces over `i`, over which its kernel is parallel",
    );
}

#[test]
fn subsets_have_an_index_for_each_dimension() {
    fires(
        "%y: f32[4]",
        "map [i < 4] { tasklet %y[i] = $0 from %x[i] @ \"t\" }",
        "t: `x` has 2 dimensions, accessed with 1 indices",
    );
}

#[test]
fn symbols_are_in_scope() {
    let rule = "is neither a size nor a parameter of an enclosing map or loop";
    fires(
        "%y: f32[4]",
        "map [i < 4] { tasklet %y[i] = $0 from %x[i, k] @ \"t\" }",
        &format!("t: `k` {rule}"),
    );
    fires("%y: f32[m]", "", &format!("graph: `m` {rule}"));
    fires(
        "%y: f32[4]",
        "map [i < 4] { tasklet %y[i] = f32({k}) @ \"t\" }",
        &format!("t: `k` {rule}"),
    );
    fires(
        "%y: f32[4, n]",
        "%y = view(%x) {shape=sizes[k]} @ \"v\"",
        &format!("v: `k` {rule}"),
    );
}

#[test]
fn params_do_not_hide_names() {
    let rule = "hides a size or an enclosing parameter of the same name";
    fires(
        "%y: f32[4]",
        "map [i < 4] @ \"m\" { map [i < 4] @ \"inner\" { tasklet %y[i] (sum) = 1.0 } }",
        &format!("inner: parameter `i` {rule}"),
    );
    fires(
        "%y: f32[n]",
        "map [n < n] @ \"m\" { tasklet %y[n - 1] (sum) = 1.0 }",
        &format!("m: parameter `n` {rule}"),
    );
}

#[test]
fn indices_stay_inside() {
    let read = |index: &str| {
        format!("map [i < 4, j < n] {{ tasklet %y[i, j] = $0 from %x[{index}] @ \"t\" }}")
    };
    let y = "%y: f32[4, n]";
    passes(y, &read("3 - i, j"));
    passes(y, &read("i + 1, j | 0.0"));
    fires(
        y,
        &read("i + 1, j"),
        "t: index i + 1 of `x` reaches 4, outside dimension 0 of size 4",
    );
    fires(
        y,
        &read("i, j + 1"),
        "t: index j + 1 of `x` reaches n, outside dimension 1 of size n",
    );
    fires(
        y,
        &read("2 - i, j"),
        "t: index -i + 2 of `x` reaches -1, outside dimension 0 of size 4",
    );
}

#[test]
fn tasklets_use_inputs_they_have() {
    let rule = "the tasklet has 1 inputs, input 1 is used";
    fires(
        "%y: f32[4]",
        "map [i < 4] { tasklet %y[i] = $0 + $1 from %x[i, 0] @ \"t\" }",
        &format!("t: {rule}"),
    );
    fires(
        "%y: f32[4]",
        "map [i < 4] { tasklet %y[i] = $0 from %x[$1, 0] @ \"t\" }",
        &format!("t: {rule}"),
    );
}

#[test]
fn data_indices_are_integers_in_order() {
    fires(
        "%y: f32[4]",
        "map [i < 4] { tasklet %y[i] = $0 from %x[$1, 0], %x[i, 0] @ \"t\" }",
        "t: input 1 is used as an index but is not an integer",
    );
    fires(
        "%y: i64[4]",
        "map [i < 4] { tasklet %y[i] = $0 from %ids[$1], %ids[$0] @ \"t\" }",
        "t: inputs of the tasklet index each other in a circle",
    );
}

#[test]
fn reads_have_no_conflicts() {
    fires(
        "%y: f32[4]",
        "map [i < 4] { tasklet %y[i] = $0 from %x[i, 0] (sum) @ \"t\" }",
        "t: the read of `x` has a conflict resolution; only writes have one",
    );
}

#[test]
fn points_write_different_elements() {
    let rule = |p: &str| {
        format!(
            "t: points of a map that differ in `{p}` may write the same element of `y`; \
             a conflict resolution is missing"
        )
    };
    let write = |params: &str, index: &str| {
        format!("map [{params}] {{ tasklet %y[{index}] = 1.0 @ \"t\" }}")
    };
    passes("%y: f32[8]", &write("i < 4, j < 2", "2*i + j"));
    passes("%y: f32[4]", &write("i < 4, j < 1", "i"));
    passes("%y: f32[n]", &write("i < n", "n - 1 - i"));
    fires("%y: f32[4]", &write("i < 4, j < n", "i"), &rule("j"));
    fires("%y: f32[8]", &write("i < 4, j < 3", "i + j"), &rule("i"));
    fires(
        "%y: f32[4]",
        "map [k < 2] { map [i < 4] { tasklet %y[i] = 1.0 @ \"t\" } }",
        &rule("k"),
    );
}

#[test]
fn real_numbers_need_a_cast() {
    let write = |e: &str| format!("map [i < 4] {{ tasklet %y[i] = {e} from %x[i, 0] @ \"t\" }}");
    passes("%y: i32[4]", &write("i32($0)"));
    passes("%y: bool[4]", &write("$0 > 0.0"));
    passes("%y: bf16[4]", &write("$0"));
    fires(
        "%y: i32[4]",
        &write("floor($0)"),
        "t: a value of type f32 is written to `y` of type i32 without a cast",
    );
}

#[test]
fn operators_stand_outside_maps() {
    fires(
        "%y: f32[4, n]",
        "map [] { %y = relu(%x) @ \"r\" }",
        "r: operator `relu` stands inside a map; expand it first",
    );
}

#[test]
fn conditions_are_truth_values() {
    let branch = "graph \"g\" { %c: i32[] input inputs %c branch %c { } else { } }";
    assert_eq!(
        problems(branch),
        ["graph: condition `c` is not a scalar of type bool"]
    );
}

#[test]
fn all_problems_are_reported_at_once() {
    let text = body(
        "%y: f32[4]",
        "map [i < 4] { tasklet %y[0] = $0 from %x[i + 1, k] }",
    );
    let found = verify(&parse(&text).unwrap()).unwrap_err();
    assert_eq!(found.len(), 3);
    assert!(
        found
            .iter()
            .any(|e| matches!(e.problem, Problem::OutOfBounds { .. }))
    );
}
