//! For each rule of nodes, types and sizes: a file that only this rule refuses, and one that passes.

use super::tests::{notes_of, problems_of};
use crate::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    attribute_type,
};
use crate::rewrite::trial::{model_of, node, typed};
use bytes::Bytes;

fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        i: Some(value),
        r#type: attribute_type::INT,
        ..Default::default()
    }
}

fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        ints: values.to_vec(),
        r#type: attribute_type::INTS,
        ..Default::default()
    }
}

fn text(name: &str, value: &'static str) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        s: Some(Bytes::from_static(value.as_bytes())),
        r#type: attribute_type::STRING,
        ..Default::default()
    }
}

fn body(name: &str, graph: GraphProto) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        g: Some(graph),
        r#type: attribute_type::GRAPH,
        ..Default::default()
    }
}

fn with(node: NodeProto, attributes: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        attribute: attributes,
        ..node
    }
}

fn model(
    opset: i64,
    nodes: Vec<NodeProto>,
    inputs: &[(&str, i32, &str)],
    outputs: &[(&str, i32, &str)],
) -> ModelProto {
    let graph = GraphProto {
        node: nodes,
        input: inputs.iter().map(typed).collect(),
        output: outputs.iter().map(typed).collect(),
        ..Default::default()
    };
    model_of(graph, opset)
}

/// `y` of one node that reads `a`, or `a` and `b`.
fn one(opset: i64, made: NodeProto, inputs: &[(&str, i32, &str)], y: (i32, &str)) -> String {
    problems_of(model(opset, vec![made], inputs, &[("y", y.0, y.1)]))
}

const F: i32 = 1;
const I: i32 = 7;
const D: i32 = 11;
const A: (&str, i32, &str) = ("a", F, "n 4");

#[test]
fn a_node_has_as_many_values_as_its_operator_takes() {
    let relu = |inputs: &[&str]| one(18, node("Relu", inputs, "y"), &[A], (F, "n 4"));
    assert_eq!(relu(&["a"]), "");
    assert_eq!(relu(&["a", ""]), "");
    assert_eq!(
        relu(&["a", "a"]),
        "Relu → `y`: it has 2 inputs, and takes 1"
    );
    let clip = |inputs: &[&str]| {
        let inputs_are = [A, ("m", F, "")];
        one(18, node("Clip", inputs, "y"), &inputs_are, (F, "n 4"))
    };
    assert_eq!(clip(&["a", "", "m"]), "");
    assert_eq!(
        clip(&["a", "m", "m", "m"]),
        "Clip → `y`: it has 4 inputs, and takes 1 to 3"
    );
    let choice = node("Where", &["", "a", "a"], "y");
    let found = one(18, choice, &[A], (F, "n 4"));
    assert_eq!(found, "Where → `y`: its input `condition` is missing");
    let twice = NodeProto {
        output: vec!["y".to_string(), "z".to_string()],
        ..node("Relu", &["a"], "y")
    };
    let found = one(18, twice, &[A], (F, "n 4"));
    assert_eq!(found, "Relu → `y`: it has 2 outputs, and gives 1");
}

#[test]
fn a_node_has_the_attributes_of_its_operator() {
    let transposed = |attribute| {
        let made = with(node("Transpose", &["a"], "y"), vec![attribute]);
        one(18, made, &[A], (F, "4 n"))
    };
    assert_eq!(transposed(ints("perm", &[1, 0])), "");
    assert_eq!(
        transposed(text("perm", "1 0")),
        "Transpose → `y`: its attribute `perm` is a string, and is to be integers"
    );
    let named = AttributeProto {
        s: Some(Bytes::from_static(b"1 0")),
        ..ints("perm", &[])
    };
    assert_eq!(
        transposed(named),
        "Transpose → `y`: its attribute `perm` is a string, and is to be integers"
    );
    assert_eq!(
        transposed(int("foo", 1)),
        "Transpose → `y`: `Transpose` has no attribute `foo`"
    );
    let joined = |attributes| {
        let made = with(node("Concat", &["a", "a"], "y"), attributes);
        one(18, made, &[A], (F, "n 8"))
    };
    assert_eq!(joined(vec![int("axis", 1)]), "");
    assert_eq!(
        joined(vec![]),
        "Concat → `y`: its attribute `axis` is missing"
    );
    // The standard lets layer normalizations have attributes of other names.
    let normalized = with(
        node("LayerNormalization", &["a", "b"], "y"),
        vec![int("foo", 1)],
    );
    assert_eq!(one(18, normalized, &[A, ("b", F, "4")], (F, "n 4")), "");
    let constant = node("Constant", &[], "y");
    assert_eq!(
        one(18, constant, &[], (F, "")),
        "Constant → `y`: it has 0 attributes for its value, but must have one"
    );
}

#[test]
fn an_operator_is_of_the_version_the_file_imports() {
    let gelu = |opset| one(opset, node("Gelu", &["a"], "y"), &[A], (F, "n 4"));
    assert_eq!(gelu(20), "");
    assert_eq!(
        gelu(13),
        "Gelu → `y`: version 13 has no operator `Gelu`, which came with version 20"
    );
    let scatter = |opset| {
        let made = node("Scatter", &["a", "i", "a"], "y");
        one(opset, made, &[A, ("i", I, "n 4")], (F, "n 4"))
    };
    assert_eq!(scatter(10), "");
    assert!(scatter(11).contains("version 11 has no operator `Scatter` any more"));
    // ONNX Runtime's optimizer for transformers writes it into older files.
    let early = node("LayerNormalization", &["a", "b"], "y");
    assert_eq!(one(14, early, &[A, ("b", F, "4")], (F, "n 4")), "");
    let unheard_of = node("Foo", &["a"], "y");
    // A runtime's own; it is kept as it is.
    assert_eq!(one(18, unheard_of.clone(), &[A], (F, "n 4")), "");
    // What other domains have is not known.
    let mut other = model(18, vec![unheard_of], &[A], &[("y", F, "n 4")]);
    other.opset_import[0].domain = "other".to_string();
    if let Some(graph) = &mut other.graph {
        graph.node[0].domain = "other".to_string();
    }
    assert_eq!(problems_of(other), "");
}

#[test]
fn operands_are_of_the_types_an_operator_takes() {
    let add = |b: i32| {
        let made = node("Add", &["a", "b"], "y");
        one(18, made, &[A, ("b", b, "n 4")], (F, "n 4"))
    };
    assert_eq!(add(F), "");
    assert_eq!(
        add(I),
        "Add → `y`: its inputs `a` and `b` are to be of one type, and are float and int64"
    );
    let not = |a: i32| one(18, node("Not", &["a"], "y"), &[("a", a, "n")], (9, "n"));
    assert_eq!(not(9), "");
    assert_eq!(
        not(F),
        "Not → `y`: its input `a` is float, and is to be bool"
    );
    let cast = |version, to| {
        let made = with(node("Cast", &["a"], "y"), vec![int("to", to)]);
        one(version, made, &[A], (to as i32, "n 4"))
    };
    assert_eq!(cast(13, 16), "");
    assert!(cast(9, 16).contains("its output `y` is bfloat16, and is to be "));
}

#[test]
fn what_the_file_says_of_a_value_may_be_so() {
    let relu = |element, sizes: &str| one(18, node("Relu", &["a"], "y"), &[A], (element, sizes));
    assert_eq!(relu(F, "n 4"), "");
    // Names of sizes are not compared.
    assert_eq!(relu(F, "m k"), "");
    assert_eq!(
        relu(D, "n 4"),
        "Relu → `y`: its output `y`: the file declares double, but it is float"
    );
    // Sizes are only a hint, those of an output too: runtimes warn and run.
    let noted = |sizes: &str| {
        let made = model(
            18,
            vec![node("Relu", &["a"], "y")],
            &[A],
            &[("y", F, sizes)],
        );
        (problems_of(made.clone()), notes_of(made))
    };
    let (wrong, note) = noted("n 5");
    assert_eq!(wrong, "");
    assert_eq!(
        note,
        "Relu → `y`: its output `y`: the file declares the shape [n, 5], but it is [n, 4]"
    );
    assert!(
        noted("n 4 1")
            .1
            .contains("the shape [n, 4, 1], but it is [n, 4]")
    );
    let inner = |sizes: &str| {
        let nodes = vec![node("Relu", &["a"], "h"), node("Relu", &["h"], "y")];
        let mut made = model(18, nodes, &[A], &[("y", F, "n 4")]);
        made.graph.get_or_insert_default().value_info = vec![typed(&("h", F, sizes))];
        (problems_of(made.clone()), notes_of(made))
    };
    assert_eq!(inner("n 4"), Default::default());
    // What the file says of inner sizes is only noted, and only once: not for `y` too.
    let (wrong, noted) = inner("n 5");
    assert_eq!(wrong, "");
    assert!(noted.ends_with("the file declares the shape [n, 5], but it is [n, 4]"));
    let passed = problems_of(model(18, vec![], &[A], &[("a", D, "n 4")]));
    assert_eq!(
        passed,
        "output `a`: the file declares double, but it is float"
    );
}

#[test]
fn sizes_of_operands_fit() {
    let two = |op: &str, attributes: Vec<AttributeProto>, a: &str, b: &str, y: &str| {
        let made = with(node(op, &["a", "b"], "y"), attributes);
        one(18, made, &[("a", F, a), ("b", F, b)], (F, y))
    };
    assert_eq!(two("MatMul", vec![], "n 4", "4 5", "n 5"), "");
    assert_eq!(two("MatMul", vec![], "n k", "5 4", "n 4"), "");
    assert_eq!(
        two("MatMul", vec![], "n 4", "5 4", "n 4"),
        "MatMul → `y`: its operands of shapes [n, 4] and [5, 4] never fit"
    );
    assert!(two("MatMul", vec![], "2 n 4", "3 4 5", "2 n 5").contains("never fit"));
    assert_eq!(two("Add", vec![], "n 1 4", "3 1", "n 3 4"), "");
    assert!(two("Add", vec![], "n 4", "5", "n 4").contains("[n, 4] and [5] never fit"));
    let flipped = || vec![int("transB", 1)];
    assert_eq!(two("Gemm", flipped(), "n 4", "5 4", "n 5"), "");
    assert!(two("Gemm", flipped(), "n 4", "4 5", "n 5").contains("never fit"));
    let along = |axis| vec![int("axis", axis)];
    assert_eq!(two("Concat", along(1), "n 4", "n 5", "n 9"), "");
    assert!(
        two("Concat", along(0), "n 4", "n 5", "m 4").contains("beside each other along axis 0")
    );
    assert!(two("Concat", along(2), "n 4", "n 4", "n 8").contains("its axis 2 is none"));
    assert_eq!(two("Conv", vec![], "n 3 8", "5 3 1", "n 5 8"), "");
    assert_eq!(
        two("Conv", vec![int("group", 2)], "n 6 8", "4 3 1", "n 4 8"),
        ""
    );
    assert!(two("Conv", vec![], "n 6 8", "5 3 1", "n 5 8").contains("never fit"));
    let strides = vec![ints("strides", &[1, 1])];
    assert!(two("Conv", strides, "n 3 8", "5 3 1", "n 5 8").contains("its `strides` has 2"));
    let turned = |perm: &[i64]| {
        let made = with(node("Transpose", &["a"], "y"), vec![ints("perm", perm)]);
        one(18, made, &[("a", F, "2 3 4")], (F, "a b c"))
    };
    assert_eq!(turned(&[2, 0, 1]), "");
    assert!(turned(&[1, 0]).contains("is no order of the dimensions of [2, 3, 4]"));
}

/// `y` is `inner` in one branch, and `a` in the other.
fn branch(condition: bool, inner: NodeProto, y: (i32, &str)) -> ModelProto {
    let graph = |made: NodeProto| GraphProto {
        output: vec![typed(&(made.output[0].as_str(), 0, "?"))],
        node: vec![made],
        ..Default::default()
    };
    let branches = vec![
        body("then_branch", graph(inner)),
        body("else_branch", graph(node("Relu", &["a"], "e"))),
    ];
    let mut made = model(
        18,
        vec![with(node("If", &["c"], "y"), branches)],
        &[A, ("w", F, "5 4"), ("c", 9, "")],
        &[("y", y.0, y.1)],
    );
    if condition {
        let graph = made.graph.get_or_insert_default();
        graph.input.pop();
        graph.initializer = vec![crate::proto::TensorProto {
            name: "c".to_string(),
            data_type: 9,
            raw_data: Some(Bytes::from_static(&[0])),
            ..Default::default()
        }];
    }
    made
}

#[test]
fn bodies_are_looked_into() {
    let found = |inner: NodeProto| problems_of(branch(false, inner, (F, "n 4")));
    assert_eq!(found(node("Abs", &["a"], "t")), "");
    assert_eq!(
        found(node("Abs", &["a", "a"], "t")),
        "If → `y`, Abs → `t`: it has 2 inputs, and takes 1"
    );
    assert!(found(node("MatMul", &["a", "w"], "t")).contains("[n, 4] and [5, 4] never fit"));
    let shape = found(node("Shape", &["a"], "t"));
    assert_eq!(
        shape,
        "If → `y`: its output 0 is int64 after one branch and float after the other"
    );
    // A branch that is never taken may be about other sizes.
    let never = branch(true, node("MatMul", &["a", "w"], "t"), (F, "n 4"));
    assert_eq!(problems_of(never), "");
    let mut few = branch(false, node("Abs", &["a"], "t"), (F, "n 4"));
    if let Some(graph) = &mut few.graph
        && let Some(body) = &mut graph.node[0].attribute[0].g
    {
        body.output.push(typed(&("t", F, "n 4")));
    }
    assert!(problems_of(few).contains("its body takes 0 values and gives 2"));
}

/// `y = f(a)`, where `f` applies `inner` to its input `i`.
fn called(inner: NodeProto) -> String {
    let own = |domain: &str, version| OperatorSetIdProto {
        domain: domain.to_string(),
        version,
    };
    let call = NodeProto {
        domain: "own".to_string(),
        ..with(node("f", &["a"], "y"), vec![ints("order", &[1, 0])])
    };
    let mut made = model(18, vec![call], &[A], &[("y", F, "4 n")]);
    made.opset_import.push(own("own", 1));
    made.functions = vec![FunctionProto {
        name: "f".to_string(),
        domain: "own".to_string(),
        input: vec!["i".to_string()],
        output: vec!["o".to_string()],
        attribute: vec!["order".to_string()],
        node: vec![inner],
        opset_import: vec![own("", 18)],
        ..Default::default()
    }];
    problems_of(made)
}

#[test]
fn functions_are_looked_into() {
    let referring = |name: &str| AttributeProto {
        ref_attr_name: "order".to_string(),
        ..ints(name, &[])
    };
    let turned = node("Transpose", &["i"], "o");
    assert_eq!(called(with(turned.clone(), vec![referring("perm")])), "");
    assert_eq!(
        called(with(turned, vec![referring("parm")])),
        "function `f`, Transpose → `o`: `Transpose` has no attribute `parm`"
    );
}
