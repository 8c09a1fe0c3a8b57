//! `diff`, `bisect`, `info` and `report --html` on small files.

// Each test binary uses a part of it.
#[allow(dead_code)]
mod program;

use onnx::proto::{AttributeProto, OperatorSetIdProto, attribute_type};
use onnx::tensor::Tensor;
use program::{arg, floats, listing, model, node, save, small, stdout};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// The small model and one with another initializer, node and attribute.
fn two(folder: &Path) -> (PathBuf, PathBuf) {
    let a = save(&small(), folder, "a.onnx");
    let mut changed = small();
    if let Some(graph) = &mut changed.graph {
        graph.initializer = vec![floats("w", &[4], 0.75)];
        graph.node[1] = node("Abs", &["x"], "r");
        graph.node.remove(2);
        graph.node[2].input[0] = "r".to_string();
    }
    changed.producer_name = "another".to_string();
    (a, save(&changed, folder, "b.onnx"))
}

#[test]
fn diff_names_what_changed() {
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = two(folder.path());
    let text = stdout(&["diff", arg(&a), arg(&b)], 3);
    for part in [
        "initializers 0 added, 0 removed, 1 changed",
        "  ~ w: float [4] → float [4] with other elements",
        "nodes 0 added, 1 removed, 2 changed",
        "  - i: Identity(r)",
        "  ~ r: Relu(x) → Abs(x)",
        "  ~ y: Add(i, w2) → Add(r, w2)",
        "producer",
    ] {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    let json = stdout(&["diff", arg(&a), arg(&b), "--json"], 3);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["nodes"]["removed"][0][0], "i");
    let operators = json["operators"].as_array().expect("operators");
    assert_eq!(operators.len(), 3);
    assert_eq!(stdout(&["diff", arg(&a), arg(&a)], 0), "no difference\n");
}

#[test]
fn bisect_finds_the_first_difference() {
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = two(folder.path());
    let text = stdout(&["bisect", arg(&a), arg(&b)], 3);
    for part in [
        "`w2` differs (seed 0, batch=1)",
        "at [",
        "A: Add → `w2` reads `w`",
        "it is the first value that both files compute",
    ] {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    let mut later = small();
    if let Some(graph) = &mut later.graph {
        graph.node[3].op_type = "Sub".to_string();
    }
    let later = save(&later, folder.path(), "c.onnx");
    let json = stdout(&["bisect", arg(&a), arg(&later), "--json"], 3);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    let first = &json["first"];
    assert_eq!(first["value"], "y");
    assert_eq!(first["a"]["node"], "Add → `y`");
    assert_eq!(first["b"]["node"], "Sub → `y`");
    assert_eq!(
        first["b"]["inputs"],
        serde_json::json!([["i", true], ["w2", true]])
    );
    assert_eq!(
        (&first["n_same"], &first["last_same"]),
        (&3.into(), &"i".into())
    );
    let same = stdout(&["bisect", arg(&a), arg(&a)], 0);
    assert!(same.starts_with("4 values are the same"), "{same}");
}

#[test]
fn bisect_compares_nodes_without_a_meaning_by_their_attributes() {
    let folder = tempfile::tempdir().expect("a folder");
    let custom = |alpha: f32, last: &str, name: &str| {
        let mut unknown = node("Mystery", &["r"], "m");
        unknown.domain = "own".to_string();
        unknown.attribute = vec![AttributeProto {
            name: "alpha".to_string(),
            r#type: attribute_type::FLOAT,
            f: Some(alpha),
            ..Default::default()
        }];
        let nodes = vec![node("Relu", &["x"], "r"), unknown, node(last, &["m"], "y")];
        let mut made = model(nodes, Vec::new(), 4);
        made.opset_import.push(OperatorSetIdProto {
            domain: "own".to_string(),
            version: 1,
        });
        save(&made, folder.path(), name)
    };
    let a = custom(1.0, "Abs", "a.onnx");
    let b = custom(2.0, "Neg", "b.onnx");
    let json = stdout(&["bisect", arg(&a), arg(&b), "--json"], 3);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["first"]["value"], "m");
    assert_eq!(json["first"]["last_same"], "r");
    assert_eq!(
        json["first"]["differences"],
        serde_json::json!([{"what": "attribute alpha", "a": "1", "b": "2"}])
    );
    // A node without a meaning here also counts by what it reads: nobody knows what it gives.
    let mut other = onnx::file::Model::read(&a).expect("read").proto;
    other.graph.as_mut().expect("a graph").node[0].op_type = "Neg".to_string();
    let d = save(&other, folder.path(), "d.onnx");
    let json = stdout(&["bisect", arg(&a), arg(&d), "--json"], 3);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["first"]["value"], "r");
    // A difference before it is found first.
    let c = custom(1.0, "Neg", "c.onnx");
    let json = stdout(&["bisect", arg(&a), arg(&c), "--json"], 3);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["first"]["value"], "y");
}

#[test]
fn bisect_heeds_outputs_that_the_second_model_lacks() {
    let folder = tempfile::tempdir().expect("a folder");
    let saved = |inner: &str, last: &str, name: &str| {
        let nodes = vec![
            node("Abs", &["x"], "y"),
            node(inner, &["x"], "s"),
            node("Exp", &["s"], last),
        ];
        let mut made = model(nodes, Vec::new(), 4);
        let outputs = &mut made.graph.as_mut().expect("a graph").output;
        let mut second = outputs[0].clone();
        second.name = last.to_string();
        outputs.push(second);
        save(&made, folder.path(), name)
    };
    let (a, b) = (saved("Neg", "z", "a.onnx"), saved("Abs", "z2", "b.onnx"));
    let json = stdout(&["bisect", arg(&a), arg(&b), "--json"], 3);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["first"]["value"], "s");
}

/// An attribute that holds an integer.
fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        r#type: attribute_type::INT,
        i: Some(value),
        ..Default::default()
    }
}

#[test]
fn bisect_blames_no_name_that_a_correct_rewrite_keeps() {
    let folder = tempfile::tempdir().expect("a folder");
    let stored = || vec![floats("w", &[4, 4], 0.5), floats("s", &[4], 0.5)];
    let a = vec![
        node("MatMul", &["x", "w"], "p"),
        node("Mul", &["p", "s"], "m"),
        node("Neg", &["m"], "n"),
        node("Abs", &["n"], "y"),
    ];
    // The scale goes into the weight, and the product keeps its name.
    let mut scaled = stored();
    let value = |k: usize| 0.5 + (k % 7) as f32 * 0.25;
    let bytes = (0..16usize).flat_map(|k| (value(k) * value(k % 4)).to_le_bytes());
    scaled[0].raw_data = Some(bytes.collect::<Vec<u8>>().into());
    let fused = |last: &str| {
        let nodes = vec![
            node("MatMul", &["x", "w"], "p"),
            node("Neg", &["p"], "n"),
            node(last, &["n"], "y"),
        ];
        model(nodes, scaled.clone(), 4)
    };
    let a = save(&model(a, stored(), 4), folder.path(), "a.onnx");
    let b = save(&fused("Abs"), folder.path(), "b.onnx");
    let text = stdout(&["bisect", arg(&a), arg(&b)], 0);
    for part in [
        "2 values are the same (seed 0",
        "B uses the name `p` for the value that A calls `m`",
    ] {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    // A difference after it is found all the same.
    let c = save(&fused("Relu"), folder.path(), "c.onnx");
    let json = stdout(&["bisect", arg(&a), arg(&c), "--json"], 3);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["first"]["value"], "y");
    assert_eq!(json["reused"][0]["like"], "m");
    assert_eq!(
        json["first"]["differences"],
        serde_json::json!([{"what": "operator", "a": "Abs", "b": "Relu"}])
    );
}

#[test]
fn bisect_shows_what_differs_about_a_node_and_names_what_is_renamed() {
    let folder = tempfile::tempdir().expect("a folder");
    let made = |inner: &str, factor: &str, axis: i64, name: &str| {
        let mut sums = node("CumSum", &[inner, factor], "y");
        sums.attribute = vec![int("exclusive", axis)];
        let nodes = vec![node("Relu", &["x"], inner), sums];
        let axes = ["one", "last"].map(|name| Tensor::int(1).to_proto(name));
        save(&model(nodes, axes.to_vec(), 4), folder.path(), name)
    };
    let a = made("r", "one", 0, "a.onnx");
    let b = made("t", "last", 1, "b.onnx");
    let text = stdout(&["bisect", arg(&a), arg(&b)], 3);
    for part in [
        "`y` differs",
        "  attribute exclusive: 0 in A, 1 in B\n",
        "  input 1: `one` in A, `last` in B\n",
        "other names in B: `r` is `t`\n",
    ] {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    // Another name alone is no difference of the node.
    assert!(!text.contains("input 0"), "{text}");
}

#[test]
fn info_works_on_files_that_cannot_be_imported() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut old = small();
    old.opset_import[0].version = 5;
    let nodes = &mut old.graph.as_mut().expect("a graph").node;
    let relu = nodes.iter_mut().find(|node| node.op_type == "Relu");
    // An operator of another domain has no meaning here.
    relu.expect("a Relu").domain = "example".into();
    let old = save(&old, folder.path(), "old.onnx");
    let text = stdout(&["info", arg(&old), "--bind", "batch=2"], 0);
    for part in [
        "ONNX operators version 5",
        "  x  f32  [2, 4]",
        "operators: 4 nodes of 3 kinds",
        "initializers: 1 with 4 elements",
        "not imported:",
    ] {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    let json = stdout(&["info", arg(&old), "--json"], 0);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["opset"], 5);
    assert_eq!(json["operators"]["Add"], 2);
}

#[test]
fn the_page_needs_nothing_from_elsewhere() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut odd = small();
    if let Some(graph) = &mut odd.graph {
        // What a name holds is text, whatever it looks like.
        graph.node[1].name = "</script><b>{{rows}}".to_string();
        graph.node[1].op_type = "Mystery".to_string();
        graph.node[1].domain = "somewhere".to_string();
    }
    odd.opset_import.push(onnx::proto::OperatorSetIdProto {
        domain: "somewhere".to_string(),
        version: 1,
    });
    for (name, model, kernels) in [("a", small(), "kernels move"), ("b", odd, "None: ")] {
        let path = save(&model, folder.path(), &format!("{name}.onnx"));
        let out = folder.path().join(format!("{name}.html"));
        let found = stdout(&["report", arg(&path), "--html", arg(&out)], 0);
        assert!(found.contains("running the model: batch="), "{found}");
        let args = [
            "report",
            arg(&path),
            "--bind",
            "batch=8",
            "--html",
            arg(&out),
        ];
        assert!(stdout(&args, 0).contains(".html: "));
        let page = fs::read_to_string(&out).expect("the page");
        assert!(page.contains(kernels), "{name}");
        assert!(page.contains("<td>Add</td>") && page.contains("8×4"));
        assert!(!page.contains("src=") && !page.contains("href=") && !page.contains("@import"));
        assert_eq!(page.matches("</script>").count(), 2);
        assert!(!page.contains("<b>{{"));
        assert_eq!(page.contains("&lt;/script&gt;&lt;b&gt;"), name == "b");
    }
    assert_eq!(
        listing(folder.path()),
        ["a.html", "a.onnx", "b.html", "b.onnx"]
    );
}

#[test]
fn what_rounding_alone_decides_is_told_and_an_altered_weight_differs() {
    let folder = tempfile::tempdir().expect("a folder");
    // Sums far above 1, rounded to whole numbers: the last place decides some of them.
    let rounded = |factor: f32, altered: f32| {
        let mut weights = floats("w", &[32, 256], 0.1);
        let values = (0..32 * 256).map(|n: i32| {
            let value = ((n * 37 % 101) as f32 - 50.0) / 64.0 + n as f32 / 3e4;
            if n == 700 { value * altered } else { value }
        });
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        weights.raw_data = Some(bytes.into());
        let mut scale = floats("s", &[], 1e4 * factor);
        scale.dims.clear();
        let mut cast = node("Cast", &["q"], "y");
        cast.attribute.push(AttributeProto {
            name: "to".to_string(),
            r#type: attribute_type::INT,
            i: Some(6),
            ..Default::default()
        });
        let nodes = vec![
            node("MatMul", &["x", "w"], "p"),
            node("Mul", &["p", "s"], "q"),
            cast,
        ];
        let mut model = model(nodes, vec![weights, scale], 32);
        if let Some(graph) = &mut model.graph {
            graph.output[0] = program::port("y", 256);
            let kind = graph.output[0].r#type.as_mut();
            let tensor = kind.and_then(|kind| kind.tensor_type.as_mut());
            tensor.expect("a tensor").elem_type = 6;
        }
        model
    };
    let a = save(&rounded(1.0, 1.0), folder.path(), "a.onnx");
    let b = save(&rounded(1.0 + f32::EPSILON, 1.0), folder.path(), "b.onnx");
    let text = stdout(&["check", arg(&a), arg(&b)], 0);
    assert!(
        text.contains("`y`: in ") && text.contains("other roundings alone"),
        "{text}"
    );
    let json = stdout(&["check", arg(&a), arg(&b), "--json"], 0);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["unsettled"][0]["output"], "y");
    assert_eq!(json["left_out"], serde_json::json!([]));
    let c = save(&rounded(1.0, 1.001), folder.path(), "c.onnx");
    let text = stdout(&["check", arg(&a), arg(&c)], 3);
    assert!(text.contains("`y` differs"), "{text}");
}
