//! `optimize`, `check` and `run` on files that are well.

// Each test binary uses a part of it.
#[allow(dead_code)]
mod program;

use onnx::file::Model;
use onnx::npy;
use onnx::tensor::{Tensor, Values};
use program::{
    arg, floats, listing, model, move_outside, node, save, shorthaul, small, stderr, stdout,
};
use serde_json::Value;
use std::fs;
use std::path::Path;

#[test]
fn a_better_file_is_written_and_told_of() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let out = folder.path().join("t.onnx");
    let text = stdout(&["optimize", arg(&path), "-o", arg(&out)], 0);
    let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(joined.contains("operators 4 2 −50%"), "{text}");
    for part in [
        "m.onnx → ",
        "worst error",
        "fold-constants ×1",
        "verified in 5 runs (seed 0, batch=1;",
        "counted at x [1, 4]",
    ] {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "no colours in a pipe");
    let first = fs::read(&out).expect("written");
    let json = stdout(&["optimize", arg(&path), "-o", arg(&out), "--json"], 0);
    assert_eq!(fs::read(&out).expect("written"), first, "the same bytes");
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["verified"], true);
    assert_eq!(json["before"]["operators"], 4);
    assert_eq!(json["after"]["operators"], 2);
    assert_eq!(json["after"]["file_bytes"], first.len());
    assert_eq!(json["shapes"]["x"], serde_json::json!([1, 4]));
    assert_eq!(listing(folder.path()), ["m.onnx", "t.onnx"]);
    let same = stdout(&["check", arg(&path), arg(&out)], 0);
    assert!(
        same.contains("the results are the same in 5 runs"),
        "{same}"
    );
}

#[test]
fn sizes_are_fixed_in_the_file_that_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let out = folder.path().join("t.onnx");
    let args = |shape| {
        [
            "optimize",
            arg(&path),
            "-o",
            arg(&out),
            "--set-shape",
            shape,
        ]
    };
    let said = stdout(&args("x=2,4"), 0);
    assert!(said.contains("counted at x [2, 4]"), "{said}");
    let info = stdout(&["info", arg(&out)], 0);
    assert!(info.contains("[2, 4]") && !info.contains("batch"), "{info}");
    let written = fs::read(&out).expect("written");
    let refused = stderr(&args("x=2,5"));
    assert!(
        refused.contains("dimension 1 of input `x` is fixed to 4 in the file and cannot be 5"),
        "{refused}"
    );
    let usage = shorthaul(&args("x=2,n"));
    assert_eq!(usage.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&usage.stderr).contains("`n` is no size"));
    let related = shorthaul(&["optimize", "m", "-o", "t", "--bind", "batch=p+"]);
    assert_eq!(related.status.code(), Some(2));
    assert_eq!(fs::read(&out).expect("as it was"), written);
}

#[test]
fn an_initializer_that_is_stored_twice_is_kept_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut twice = small();
    let graph = twice.graph.as_mut().expect("a graph");
    graph.initializer.push(graph.initializer[0].clone());
    let path = save(&twice, folder.path(), "m.onnx");
    let out = folder.path().join("t.onnx");
    let args = ["optimize", arg(&path), "-o", arg(&out), "--rules", "none"];
    let text = stdout(&args, 0);
    assert!(text.contains("of which one is kept: w"), "{text}");
    let written = Model::read(&out).expect("read").proto.graph;
    assert_eq!(written.expect("a graph").initializer.len(), 1);
    let text = stdout(&["check", arg(&path), arg(&out)], 0);
    let note = "note: initializer `w`: it is stored more than once";
    assert!(text.contains(note), "{text}");
    assert!(text.contains("the results are the same"), "{text}");
    stdout(&["report", arg(&path), "--bind", "batch=2"], 0);
}

#[test]
fn options_are_heeded() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let out = folder.path().join("t.onnx");
    let optimize = |options: &[&str]| -> Value {
        let mut args = vec!["optimize", arg(&path), "-o", arg(&out), "--json"];
        args.extend(options);
        serde_json::from_str(&stdout(&args, 0)).expect("JSON")
    };
    let without = optimize(&["--without", "fold-constants,remove-no-op"]);
    assert_eq!(without["after"]["operators"], 4);
    let unproven = optimize(&["--no-verify"]);
    assert_eq!(unproven["verified"], false);
    assert_eq!(unproven["before"]["worst_error"], Value::Null);
    let bound = optimize(&["--bind", "batch=7", "--seeds", "1"]);
    assert_eq!(bound["shapes"]["x"], serde_json::json!([7, 4]));
    assert_eq!(bound["runs"].as_array().expect("runs").len(), 3);
    optimize(&["--target", "ort-cpu"]);
    let stamped = Model::read(&out).expect("read").proto.metadata_props;
    assert_eq!(stamped[0].value, "ort-cpu");
    let rules = stdout(&["optimize", "--list-rules"], 0);
    let line = rules
        .lines()
        .find(|rule| rule.starts_with("fold-constants "));
    assert!(line.is_some_and(|l| l.ends_with("with initializers, up to the fold limit")));
    // No file shrinks to nothing, so a growth of 0 is always exceeded.
    fs::remove_file(&out).expect("removed");
    let grown = ["optimize", arg(&path), "-o", arg(&out), "--max-growth", "0"];
    assert!(stderr(&grown).contains("the largest allowed growth is 0; nothing is written"));
    assert!(!out.exists());
    optimize(&["--max-growth", "1.5"]);
    // Inputs of the user's own.
    let x = Tensor::new(&[2, 4], Values::F32(vec![1.0; 8]));
    let npy = folder.path().join("x.npy");
    fs::write(&npy, npy::npy(&x).expect("encoded")).expect("written");
    let given = optimize(&["--inputs", arg(&npy)]);
    assert_eq!(given["shapes"]["x"], serde_json::json!([2, 4]));
}

#[test]
fn each_file_of_inputs_is_a_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = |name: &str| folder.path().join(name);
    let path = save(&small(), folder.path(), "m.onnx");
    let out = place("t.onnx");
    let ones = |shape: &[usize]| Tensor::new(shape, Values::F32(vec![1.0; shape.iter().product()]));
    for (name, shape) in [
        ("a.npz", &[2, 4][..]),
        ("b.npz", &[3, 4][..]),
        ("bad.npz", &[4][..]),
    ] {
        let file = fs::File::create(place(name)).expect("created");
        npy::write_npz([("x", &ones(shape))], file).expect("written");
    }
    for name in ["x.npy", "z.npy"] {
        let bytes = npy::npy(&ones(&[5, 4])).expect("encoded");
        fs::write(place(name), bytes).expect("written");
    }
    let (a, b) = (place("a.npz"), place("b.npz"));
    let (x, z) = (place("x.npy"), place("z.npy"));
    let inputs = |files: &[&Path]| -> Vec<String> {
        let shown = files.iter().map(|file| arg(file).to_string());
        shown
            .flat_map(|file| ["--inputs".to_string(), file])
            .collect()
    };
    // The runs that name files of inputs.
    let runs = |first: &[&str], files: &[&Path]| -> Vec<String> {
        let files = inputs(files);
        let mut args = first.to_vec();
        args.extend(files.iter().map(String::as_str));
        let json: Value = serde_json::from_str(&stdout(&args, 0)).expect("JSON");
        let runs = json["runs"].as_array().expect("runs").iter();
        let runs = runs.map(|run| run.as_str().expect("text").to_string());
        runs.filter(|run| run.contains("inputs of")).collect()
    };
    let optimize = ["optimize", arg(&path), "-o", arg(&out), "--json"];
    let of = |batch: usize, files: &str| format!("seed 0, batch={batch}, inputs of {files}");
    let expected = [of(2, arg(&a)), of(3, arg(&b))];
    assert_eq!(runs(&optimize, &[&a, &b]), expected);
    let check = ["check", arg(&path), arg(&out), "--json"];
    assert_eq!(runs(&check, &[&a, &b]), expected);
    // A file with one tensor begins another run where its input is given already.
    assert_eq!(
        runs(&optimize, &[&a, &x, &x]),
        [of(2, arg(&a)), of(5, arg(&x)), of(5, arg(&x))]
    );
    let mut sum = model(vec![node("Add", &["x", "z"], "y")], Vec::new(), 4);
    let ports = sum.graph.as_mut().map(|graph| &mut graph.input);
    ports.expect("a graph").push(program::port("z", 4));
    let sum = save(&sum, folder.path(), "sum.onnx");
    let optimize = ["optimize", arg(&sum), "-o", arg(&out), "--json"];
    let both = format!("{} and {}", arg(&x), arg(&z));
    assert_eq!(runs(&optimize, &[&x, &z]), [of(5, &both)]);
    // What does not fit, or is given twice, is named.
    let bad = place("bad.npz");
    let text = stderr(&[
        "optimize",
        arg(&path),
        "-o",
        arg(&out),
        "--inputs",
        arg(&a),
        "--inputs",
        arg(&bad),
    ]);
    let named = format!(
        "with the inputs of {}, the input `x` has 2 dimensions",
        arg(&bad)
    );
    assert!(text.contains(&named), "{text}");
    let twice = ["run", arg(&path), "--inputs", arg(&a), "--inputs", arg(&b)];
    let text = stderr(&twice);
    let named = format!("{} and {} both give the input `x`", arg(&a), arg(&b));
    assert!(text.contains(&named), "{text}");
}

#[test]
fn sizes_may_follow_from_others_in_every_command() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut joined = node("Concat", &["x", "z"], "h");
    joined.attribute.push(onnx::proto::AttributeProto {
        name: "axis".to_string(),
        r#type: onnx::proto::attribute_type::INT,
        i: Some(0),
        ..Default::default()
    });
    let mut cache = model(vec![joined, node("Add", &["h", "m"], "y")], Vec::new(), 4);
    let graph = cache.graph.as_mut().expect("a graph");
    graph.input.push(program::port("z", 4));
    graph.input.push(program::port("m", 4));
    let ports = graph.input.iter_mut().chain(&mut graph.output);
    for (port, name) in ports.zip(["p", "s", "t", "t"]) {
        let tensor = port.r#type.as_mut().and_then(|t| t.tensor_type.as_mut());
        let shape = tensor.and_then(|t| t.shape.as_mut()).expect("a shape");
        shape.dim[0].value = Some(onnx::proto::Dimension::DimParam(name.to_string()));
    }
    let path = save(&cache, folder.path(), "m.onnx");
    let bound = ["--bind", "p=2", "--bind", "s=3", "--bind", "t=p+s"];
    let with = |args: &[&'static str]| [&[args[0], arg(&path)][..], &args[1..], &bound].concat();
    let ran = stdout(&with(&["run", "--random", "0"]), 0);
    assert!(ran.contains("[5, 4]"), "{ran}");
    let json: Value = serde_json::from_str(&stdout(&with(&["report", "--json"]), 0)).expect("JSON");
    assert_eq!(json["sizes"]["t"], 5);
    // What verification makes up keeps the relation where no number is given.
    let same = ["check", arg(&path), arg(&path), "--bind", "t=p+s"];
    let same = stdout(&same, 0);
    assert!(same.contains("the results are the same"), "{same}");
    let nothing = [
        "run",
        arg(&path),
        "--random",
        "0",
        "--bind",
        "p=0",
        "--bind",
        "t=p+s",
    ];
    assert!(stdout(&nothing, 0).contains("4]"));
    let open = stderr(&["report", arg(&path), "--bind", "t=p+s"]);
    assert!(
        open.contains("needs numbers here: --bind p=… --bind s=…"),
        "{open}"
    );
}

#[test]
fn external_data_moves_with_the_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut outside = model(
        vec![
            node("Identity", &["x"], "i"),
            node("MatMul", &["i", "w"], "y"),
        ],
        vec![floats("w", &[64, 64], -0.5)],
        64,
    );
    if let Some(graph) = &mut outside.graph {
        let bytes = graph.initializer[0].raw_data.clone().expect("bytes");
        fs::write(folder.path().join("w.bin"), bytes).expect("written");
        move_outside(&mut graph.initializer[0], "w.bin");
    }
    let path = save(&outside, folder.path(), "m.onnx");
    let out = folder.path().join("t.onnx");
    let json = stdout(&["optimize", arg(&path), "-o", arg(&out), "--json"], 0);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["after"]["operators"], 1);
    assert_eq!(
        listing(folder.path()),
        ["m.onnx", "t.onnx", "t.onnx.data", "w.bin"]
    );
    let data = |name: &str| fs::read(folder.path().join(name)).expect("read");
    assert_eq!(data("t.onnx.data"), data("w.bin"));
    stdout(&["check", arg(&path), arg(&out)], 0);
}

#[test]
fn nodes_out_of_order_are_sorted() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut reversed = small();
    if let Some(graph) = &mut reversed.graph {
        graph.node.reverse();
    }
    let path = save(&reversed, folder.path(), "m.onnx");
    let out = folder.path().join("t.onnx");
    let text = stdout(&["optimize", arg(&path), "-o", arg(&out)], 0);
    assert!(
        text.contains("nodes were out of order and have been sorted"),
        "{text}"
    );
    let check = stdout(&["check", arg(&path)], 3);
    assert!(check.contains("which is computed later"), "{check}");
}

#[test]
fn operators_without_a_meaning_are_kept_and_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut odd = model(
        vec![
            node("Identity", &["x"], "i"),
            node("Mystery", &["i"], "m"),
            node("Relu", &["m"], "y"),
        ],
        Vec::new(),
        4,
    );
    odd.opset_import.push(onnx::proto::OperatorSetIdProto {
        domain: "somewhere".to_string(),
        version: 1,
    });
    if let Some(graph) = &mut odd.graph {
        graph.node[1].domain = "somewhere".to_string();
        graph.value_info = vec![program::port("m", 4)];
    }
    let path = save(&odd, folder.path(), "m.onnx");
    let out = folder.path().join("t.onnx");
    let text = stdout(&["optimize", arg(&path), "-o", arg(&out)], 0);
    assert!(
        text.contains(
            "operators that Shorthaul does not know, kept as they are: somewhere.Mystery ×1"
        ),
        "{text}"
    );
    assert!(
        text.contains("not run, only their inputs and outputs compared: Mystery → `m`"),
        "{text}"
    );
    let graph = Model::read(&out)
        .expect("read")
        .proto
        .graph
        .expect("a graph");
    let names: Vec<&str> = graph.node.iter().map(|n| n.op_type.as_str()).collect();
    assert_eq!(names, ["Mystery", "Relu"]);
}

#[test]
fn a_model_runs_on_given_and_made_up_inputs() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let (x, out) = (folder.path().join("x.npz"), folder.path().join("y.npz"));
    let tensor = Tensor::new(&[1, 4], Values::F32(vec![-1.0, 0.0, 1.0, 2.0]));
    let file = fs::File::create(&x).expect("created");
    npy::write_npz([("x", &tensor)], file).expect("written");
    let text = stdout(
        &["run", arg(&path), "--inputs", arg(&x), "--out", arg(&out)],
        0,
    );
    assert!(text.contains("y  float  [1, 4]  from 1.0"), "{text}");
    let read = npy::read_npz(&fs::read(&out).expect("written")).expect("an archive");
    // w is 0.5, 0.75, 1, 1.25, and is added twice.
    let wanted = Tensor::new(&[1, 4], Values::F32(vec![1.0, 1.5, 3.0, 4.5]));
    assert_eq!(read, [("y".to_string(), wanted)]);
    let made = |seed: &str| {
        stdout(
            &["run", arg(&path), "--random", seed, "--bind", "batch=3"],
            0,
        )
    };
    assert!(made("1").contains("[3, 4]"));
    assert_eq!(made("1"), made("1"));
    assert_ne!(made("1"), made("2"));
}

#[test]
fn files_that_differ_are_told_apart() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let mut changed = small();
    if let Some(graph) = &mut changed.graph {
        graph.initializer = vec![floats("w", &[4], 0.75)];
    }
    let other = save(&changed, folder.path(), "n.onnx");
    let text = stdout(&["check", arg(&path), arg(&other)], 3);
    assert!(
        text.contains("the results differ: `y` differs (seed 0, batch=1)"),
        "{text}"
    );
}

#[test]
fn shells_get_completions() {
    for (shell, part) in [
        ("bash", "complete -F _shorthaul"),
        ("zsh", "#compdef shorthaul"),
        ("fish", "complete -c shorthaul"),
    ] {
        let script = stdout(&["completions", shell], 0);
        assert!(
            script.contains(part) && script.contains("optimize"),
            "{shell}"
        );
    }
}

#[test]
fn rules_are_chosen_and_left_out_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let out = folder.path().join("t.onnx");
    let fired = |options: &[&str]| -> Vec<String> {
        let args = [
            &["optimize", arg(&path), "-o", arg(&out), "--json"],
            options,
        ]
        .concat();
        let json: Value = serde_json::from_str(&stdout(&args, 0)).expect("JSON");
        let fired = json["fired"].as_array().expect("a list").iter();
        fired
            .map(|f| f["rule"].as_str().expect("a name").to_string())
            .collect()
    };
    assert_eq!(fired(&["--rules", "fold-constants"]), ["fold-constants"]);
    let without = fired(&["--skip-rules", "fold-constants"]);
    assert!(!without.contains(&"fold-constants".to_string()) && !without.is_empty());
    let wrong = shorthaul(&["optimize", "m", "-o", "t", "--rules", "fold-constant"]);
    assert_eq!(wrong.status.code(), Some(2));
    let said = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(said.contains("did you mean fold-constants?"), "{said}");
}

#[test]
fn a_time_that_is_over_writes_what_is_verified_by_then() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let out = folder.path().join("t.onnx");
    let with = |seconds| {
        [
            "optimize",
            arg(&path),
            "-o",
            arg(&out),
            "--time-limit",
            seconds,
        ]
    };
    let text = stdout(&with("600"), 0);
    assert!(!text.contains("the time limit was reached"), "{text}");
    fs::remove_file(&out).expect("written");
    let text = stdout(&with("0.000001"), 0);
    assert!(
        text.contains("the time limit was reached: the file has the 0 of "),
        "{text}"
    );
    let [original, written] = [&path, &out].map(|path| Model::read(path).expect("a model"));
    assert_eq!(written.proto, original.proto);
    for wrong in ["0", "-1", "x", "inf"] {
        assert_eq!(shorthaul(&with(wrong)).status.code(), Some(2), "{wrong}");
    }
}

#[test]
fn a_part_is_taken_stripped_and_described() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let out = folder.path().join("t.onnx");
    let with = |options: &[&str]| {
        let args = [&["optimize", arg(&path), "-o", arg(&out)], options].concat();
        stdout(&args, 0);
        Model::read(&out)
            .expect("written")
            .proto
            .graph
            .expect("a graph")
    };
    let part = with(&["--to", "r"]);
    assert_eq!((part.output[0].name.as_str(), part.node.len()), ("r", 1));
    let rest = with(&["--from", "r"]);
    assert_eq!(rest.input[0].name, "r");
    assert!(rest.node.iter().all(|n| n.op_type == "Add"));
    let described = with(&["--infer-shapes"]);
    assert_eq!(described.value_info.len(), described.node.len() - 1);
    assert!(with(&["--strip"]).value_info.is_empty());
    let wrong = stderr(&["optimize", arg(&path), "-o", arg(&out), "--to", "rr"]);
    assert!(wrong.contains("no value `rr`; did you mean r"), "{wrong}");
}

#[test]
fn operators_are_raised_to_a_newer_version() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let out = folder.path().join("t.onnx");
    let args = |version| ["optimize", arg(&path), "-o", arg(&out), "--opset", version];
    stdout(&args("23"), 0);
    let written = Model::read(&out).expect("written").proto;
    assert_eq!(written.opset_import[0].version, 23);
    stdout(&["check", arg(&path), arg(&out)], 0);
    let unknown = shorthaul(&args("99"));
    assert_eq!(unknown.status.code(), Some(2));
    let said = String::from_utf8_lossy(&unknown.stderr);
    assert!(
        said.contains("version 99 of the operators is not known; the newest is"),
        "{said}"
    );
}
