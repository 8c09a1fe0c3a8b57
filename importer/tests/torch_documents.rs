//! Captured documents, written by hand: what is imported, and what is refused.

use graph::{Attr, DType, NodeKind, Precision, Tensor};
use importer::torch::{ImportError, import};
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn tensor(name: &str, shape: &[i64], dtype: &str) -> Value {
    json!({"name": name, "shape": shape, "dtype": dtype})
}

fn input(name: &str, shape: &[i64], dtype: &str) -> Value {
    json!({"name": name, "kind": "user", "target": null, "constant": null, "shape": shape, "dtype": dtype})
}

fn node(name: &str, target: &str, args: Value, output: Value) -> Value {
    json!({
        "name": name, "target": target, "args": args, "outputs": [output],
        "origin": {"module": format!("layer.{name}"), "kind": "M", "source": "model.py:7"},
    })
}

fn document(inputs: Vec<Value>, nodes: Vec<Value>, result: &str) -> String {
    json!({
        "version": 1, "symbols": [], "inputs": inputs, "nodes": nodes,
        "outputs": [{"kind": "user", "target": null, "value": result}],
    })
    .to_string()
}

#[test]
fn a_linear_layer_is_a_product_and_an_addition() {
    let inputs = vec![
        input("x", &[2, 5, 3], "float32"),
        input("w", &[4, 3], "float32"),
        input("b", &[4], "float32"),
    ];
    let args = json!({"input": {"ref": "x"}, "weight": {"ref": "w"}, "bias": {"ref": "b"}});
    let linear = node(
        "y",
        "aten.linear.default",
        args,
        tensor("y", &[2, 5, 4], "float32"),
    );
    let imported = import(&document(inputs, vec![linear], "y"), &[]).unwrap();
    let nodes = &imported.graph.single_state().unwrap().nodes;
    let ops: Vec<_> = nodes
        .iter()
        .map(|n| match &n.kind {
            NodeKind::Library(l) => l.op.as_str(),
            _ => "",
        })
        .collect();
    assert_eq!(ops, ["einsum", "elementwise"]);
    let NodeKind::Library(product) = &nodes[0].kind else {
        panic!("the product is a library node");
    };
    assert_eq!(product.attrs["equation"], Attr::Str("ABk,nk->ABn".into()));
    assert_eq!(nodes[0].origin.module, "layer.y");
    assert_eq!(nodes[0].origin.source, "model.py:7");
}

#[test]
fn every_missing_operator_is_listed_with_its_places() {
    let x = || json!({"self": {"ref": "x"}});
    let nodes = vec![
        node(
            "a",
            "aten.frobnicate.default",
            x(),
            tensor("a", &[2], "float32"),
        ),
        node(
            "b",
            "aten.relu.default",
            json!({"self": {"ref": "a"}}),
            tensor("b", &[2], "float32"),
        ),
        node(
            "c",
            "aten.bessel.default",
            x(),
            tensor("c", &[2], "float32"),
        ),
        node(
            "d",
            "aten.frobnicate.default",
            x(),
            tensor("d", &[2], "float32"),
        ),
    ];
    let text = document(vec![input("x", &[2], "float32")], nodes, "d");
    let Err(ImportError::Unsupported(missing)) = import(&text, &[]) else {
        panic!("two operators are missing");
    };
    let found: Vec<_> = missing
        .iter()
        .map(|m| (m.target.as_str(), m.places.len()))
        .collect();
    assert_eq!(
        found,
        [("aten.bessel.default", 1), ("aten.frobnicate.default", 2)]
    );
    assert_eq!(
        missing[1].places,
        ["layer.a (model.py:7)", "layer.d (model.py:7)"]
    );
}

#[test]
fn integers_are_promoted_as_pytorch_says() {
    let inputs = vec![input("i", &[3], "int64"), input("f", &[3], "float32")];
    let args = json!({"self": {"ref": "i"}, "other": {"ref": "f"}, "alpha": 1});
    let add = node("y", "aten.add.Tensor", args, tensor("y", &[3], "float32"));
    let imported = import(&document(inputs, vec![add], "y"), &[]).unwrap();
    let NodeKind::Library(add) = &imported.graph.single_state().unwrap().nodes[0].kind else {
        panic!("the sum is a library node");
    };
    let Attr::Expr(expr) = &add.attrs["expr"] else {
        panic!("the sum has an expression");
    };
    let sum = expr.eval(&[graph::Scalar::Int(2), graph::Scalar::Float(0.5)], &|_| {
        None
    });
    assert_eq!(sum.unwrap(), graph::Scalar::Float(2.5));
    assert_eq!(add.attrs["dtype"], Attr::DType(graph::DType::F32));
}

#[test]
fn documents_that_contradict_themselves_are_refused() {
    let shapes = node(
        "y",
        "aten.relu.default",
        json!({"self": {"ref": "x"}}),
        tensor("y", &[9], "float32"),
    );
    let text = document(vec![input("x", &[2], "float32")], vec![shapes], "y");
    let message = import(&text, &[]).unwrap_err().to_string();
    assert!(
        message.contains("gives shape [2], PyTorch says [9]"),
        "{message}"
    );

    let args = json!({"self": {"ref": "nobody"}});
    let missing = node("y", "aten.relu.default", args, tensor("y", &[2], "float32"));
    let text = document(vec![input("x", &[2], "float32")], vec![missing], "y");
    let message = import(&text, &[]).unwrap_err().to_string();
    assert!(
        message.contains("argument `self` should be a tensor"),
        "{message}"
    );

    let message = import("{\"version\": 1", &[]).unwrap_err().to_string();
    assert!(message.contains("cannot be read"), "{message}");
    let newer = document(vec![], vec![], "x").replace("\"version\":1", "\"version\":2");
    let message = import(&newer, &[]).unwrap_err().to_string();
    assert!(message.contains("schema version 2"), "{message}");
}

#[test]
fn a_constant_needs_all_its_bytes() {
    let constant = json!({"name": "c", "kind": "constant", "target": "c", "constant": 0, "shape": [2], "dtype": "float32"});
    let copy = node(
        "y",
        "aten.neg.default",
        json!({"self": {"ref": "c"}}),
        tensor("y", &[2], "float32"),
    );
    let text = document(vec![constant], vec![copy], "y");
    assert!(import(&text, &[&[0; 8]]).is_ok());
    let message = import(&text, &[&[0; 7]]).unwrap_err().to_string();
    assert!(message.contains("bytes do not fit"), "{message}");
}

fn decode(value: &Value) -> Tensor {
    let sizes = value["shape"].as_array().expect("a shape").iter();
    let shape: Vec<usize> = sizes.map(|n| n.as_u64().unwrap() as usize).collect();
    let data = value["data"].as_array().expect("elements").iter();
    match value["dtype"].as_str() {
        Some("int64") => {
            let data = data.map(|v| v.as_i64().unwrap()).collect();
            Tensor::from_i64(DType::I64, &shape, data)
        }
        _ => {
            let data = data.map(|v| v.as_f64().unwrap()).collect();
            Tensor::from_f64(DType::F32, &shape, data)
        }
    }
}

/// What PyTorch captured once, at sizes it was not captured with.
#[test]
fn symbolic_sizes_stay_symbolic() {
    let text = include_str!("data/dynamic.json");
    let cases: BTreeMap<String, Value> = serde_json::from_str(text).unwrap();
    for (name, case) in cases {
        let imported = import(&case["document"].to_string(), &[]).unwrap();
        graph::verify(&imported.graph).unwrap();
        assert_eq!(imported.graph.symbols.len(), 2, "{name}");
        assert_eq!(imported.hints.len(), 2, "{name}");
        for run in case["runs"].as_array().unwrap() {
            let tensors = |key: &str| -> Vec<Tensor> {
                run[key].as_array().unwrap().iter().map(decode).collect()
            };
            let (inputs, expected) = (tensors("inputs"), tensors("outputs"));
            let shapes: Vec<_> = inputs.iter().map(|t| t.shape.clone()).collect();
            let bindings = graph::infer_bindings(&imported.graph, &shapes).unwrap();
            let found = graph::interpret(
                &imported.graph,
                &inputs,
                &bindings,
                &ops::Meaning,
                Precision::Double,
            );
            let found = found.unwrap();
            assert_eq!(found.len(), expected.len(), "{name}");
            for (n, (found, expected)) in found.iter().zip(&expected).enumerate() {
                // PyTorch computed in f32.
                let same = ops::check::compare(expected, found, 1e-5);
                assert_eq!(same, Ok(()), "{name}, output {n}");
            }
        }
    }
}

#[test]
fn a_mask_of_another_size_is_refused() {
    for (rows, is_refused) in [(3, false), (1, true)] {
        let inputs = vec![
            input("x", &[3, 4], "float32"),
            input("mask", &[rows], "bool"),
            input("value", &[], "float32"),
        ];
        let args = json!({
            "self": {"ref": "x"}, "indices": [{"ref": "mask"}], "values": {"ref": "value"}, "accumulate": false,
        });
        let put = node(
            "y",
            "aten.index_put.default",
            args,
            tensor("y", &[3, 4], "float32"),
        );
        let found = import(&document(inputs, vec![put], "y"), &[]);
        assert_eq!(found.is_err(), is_refused, "a mask of {rows} rows");
        if let Err(error) = found {
            assert!(
                error.to_string().contains("a mask of another size"),
                "{error}"
            );
        }
    }
}
