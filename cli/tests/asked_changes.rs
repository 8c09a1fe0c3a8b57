//! Changes that a user asks of `optimize`: other names, dynamic sizes, 16-bit floats, an older operator set, no rule.

// Each test binary uses a part of it.
#[allow(dead_code)]
mod program;

use onnx::edit::version;
use onnx::file::Model;
use program::{arg, save, shorthaul, small, stderr, stdout};
use std::path::{Path, PathBuf};

/// A file, and what `optimize` is called with before the change that is asked for.
struct Asked {
    folder: tempfile::TempDir,
    path: PathBuf,
    out: PathBuf,
}

impl Asked {
    fn new() -> Asked {
        let folder = tempfile::tempdir().expect("a folder");
        let path = save(&small(), folder.path(), "m.onnx");
        let out = folder.path().join("t.onnx");
        Asked { folder, path, out }
    }

    fn args<'a>(&'a self, from: &'a Path, asked: &[&'a str]) -> Vec<&'a str> {
        [&["optimize", arg(from), "-o", arg(&self.out)], asked].concat()
    }

    /// What is printed, and the file that is written.
    fn done(&self, from: &Path, asked: &[&str]) -> (String, Model) {
        let said = stdout(&self.args(from, asked), 0);
        (said, Model::read(&self.out).expect("written"))
    }
}

#[test]
fn ports_have_other_names() {
    let asked = Asked::new();
    let (_, made) = asked.done(&asked.path, &["--rename", "x=image", "--rename", "y=score"]);
    let graph = made.proto.graph.as_ref().expect("a graph");
    assert_eq!(graph.input[0].name, "image");
    assert_eq!(graph.output[0].name, "score");
    let refused = stderr(&asked.args(&asked.path, &["--rename", "z=image"]));
    assert!(
        refused.contains("there is no input or output `z`"),
        "{refused}"
    );
    let wrong = shorthaul(&asked.args(&asked.path, &["--rename", "x"]));
    assert_eq!(wrong.status.code(), Some(2));
}

#[test]
fn fixed_sizes_become_dynamic_again() {
    let asked = Asked::new();
    let fixed = asked.folder.path().join("fixed.onnx");
    let set = [
        "optimize",
        arg(&asked.path),
        "-o",
        arg(&fixed),
        "--set-shape",
        "x=2,4",
    ];
    stdout(&set, 0);
    let (_, made) = asked.done(&fixed, &["--free-shape", "x=n,_"]);
    drop(made);
    let info = stdout(&["info", arg(&asked.out)], 0);
    assert!(info.contains("[n, 4]"), "{info}");
    stdout(&["check", arg(&asked.path), arg(&asked.out)], 0);
    let inside = stderr(&asked.args(&fixed, &["--free-shape", "x=_,features"]));
    assert!(inside.contains("does not run with other sizes"), "{inside}");
}

#[test]
fn a_file_computes_in_16_bit_floats_with_a_measured_error() {
    let asked = Asked::new();
    let (said, made) = asked.done(&asked.path, &["--half", "f16"]);
    assert!(
        said.contains("compute in float16, with an error of"),
        "{said}"
    );
    let graph = made.proto.graph.as_ref().expect("a graph");
    assert!(graph.node.iter().any(|node| node.op_type == "Cast"));
    let strict = ["--half", "bf16", "--tolerance", "1e-9"];
    let refused = stderr(&asked.args(&asked.path, &strict));
    assert!(refused.contains("differs by more than"), "{refused}");
}

#[test]
fn the_measured_error_is_in_the_json_too() {
    let asked = Asked::new();
    let half = ["--half", "f16", "--keep-f32", "Relu", "--json"];
    let (said, _) = asked.done(&asked.path, &half);
    let said: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    let half = &said["half"];
    assert_eq!(half["type"], "float16");
    assert_eq!(half["tolerance"], 1e-2);
    assert_eq!(half["kept_f32"]["Relu"], 1);
    assert!(half["nodes"].as_u64().is_some_and(|n| n > 0), "{half}");
    let error = half["error"].as_f64().expect("a measured error");
    assert!(error > 1e-6 && error < 1e-2, "{error}");
    let (said, _) = asked.done(&asked.path, &["--json"]);
    let said: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert!(said["half"].is_null());
    let misspelled = ["--half", "f16", "--keep-f32", "Rleu"];
    let refused = stderr(&asked.args(&asked.path, &misspelled));
    assert!(
        refused.contains("no operator and no node `Rleu`"),
        "{refused}"
    );
}

#[test]
fn every_option_names_values_as_the_file_does() {
    let asked = Asked::new();
    let fixed = asked.folder.path().join("fixed.onnx");
    let set = ["--set-shape", "x=2,4"];
    stdout(
        &[&["optimize", arg(&asked.path), "-o", arg(&fixed)], &set[..]].concat(),
        0,
    );
    let both = ["--free-shape", "x=n,_", "--rename", "x=image"];
    let (_, made) = asked.done(&fixed, &both);
    let graph = made.proto.graph.as_ref().expect("a graph");
    assert_eq!(graph.input[0].name, "image");
}

#[test]
fn an_older_operator_set_and_no_rule() {
    let asked = Asked::new();
    let (_, made) = asked.done(&asked.path, &["--opset", "13", "--rules", "none"]);
    assert_eq!(version(&made.proto), 13);
    let n_nodes = |model: &Model| model.proto.graph.as_ref().map(|g| g.node.len());
    let original = Model::read(&asked.path).expect("a model");
    assert_eq!(n_nodes(&made), n_nodes(&original));
    let unknown = shorthaul(&asked.args(&asked.path, &["--rules", "nothing"]));
    assert_eq!(unknown.status.code(), Some(2));
    for version in ["6", "-1", "newest"] {
        let version = format!("--opset={version}");
        let refused = shorthaul(&asked.args(&asked.path, &[&version]));
        assert_eq!(refused.status.code(), Some(2));
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(
            said.contains("version 7 of the operators or a newer one"),
            "{said}"
        );
    }
}

#[test]
fn every_command_reads_nodes_out_of_order() {
    // As ONNX Runtime's converter to 16-bit floats writes them.
    let asked = Asked::new();
    let mut reversed = small();
    if let Some(graph) = &mut reversed.graph {
        graph.node.reverse();
    }
    let path = save(&reversed, asked.folder.path(), "reversed.onnx");
    asked.done(&path, &["--half", "f16"]);
    let (said, _) = asked.done(&path, &["--opset", "23"]);
    assert!(said.contains("nodes were out of order"), "{said}");
    stdout(&["run", arg(&path), "--random", "0"], 0);
    stdout(&["bisect", arg(&path), arg(&asked.path)], 0);
    stdout(&["report", arg(&path), "--bind", "batch=2"], 0);
    let loss = ["grad", arg(&path), "-o", arg(&asked.out), "--loss", "mse"];
    stdout(&loss, 0);
    // It is a problem all the same: the standard asks for an order.
    let check = stdout(&["check", arg(&path), arg(&asked.path)], 3);
    assert!(check.contains("computed later"), "{check}");
    assert!(check.contains("the results are the same"), "{check}");
}
