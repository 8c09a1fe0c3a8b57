//! Bad input: one clear message, exit code 1, the target as it was, nothing left behind.

// Each test binary uses a part of it.
#[allow(dead_code)]
mod program;

use onnx::proto::ModelProto;
use program::{arg, floats, listing, model, move_outside, node, save, shorthaul, small, stderr};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

/// Asks `optimize` for a file that exists, and expects one message with all of `parts`.
fn refuses(folder: &Path, path: &Path, parts: &[&str]) {
    let target = folder.join("t.onnx");
    fs::write(&target, "as it was").expect("written");
    let before = listing(folder);
    for options in [&[][..], &["--no-verify"]] {
        let mut args = vec!["optimize", arg(path), "-o", arg(&target)];
        args.extend(options);
        let text = stderr(&args);
        for part in parts {
            assert!(text.contains(part), "`{part}` is not in:\n{text}");
        }
        let after = fs::read_to_string(&target).expect("the target");
        assert_eq!(after, "as it was");
        assert_eq!(listing(folder), before);
    }
}

/// Like [`refuses`], with a model made by `change`.
fn refuses_model(change: impl FnOnce(&mut ModelProto), parts: &[&str]) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut model = small();
    change(&mut model);
    let path = save(&model, folder.path(), "m.onnx");
    refuses(folder.path(), &path, parts);
}

fn graph(model: &mut ModelProto) -> &mut onnx::proto::GraphProto {
    model.graph.as_mut().expect("a graph")
}

#[test]
fn wrongly_typed_files() {
    let relu = "Relu → `r`: it has 2 inputs, and takes 1";
    let twice = |model: &mut ModelProto| graph(model).node[1].input.push("x".to_string());
    refuses_model(twice, &["m.onnx is not well formed", relu]);
    // Nor is a training graph made of one.
    let folder = tempfile::tempdir().expect("a folder");
    let mut model = small();
    twice(&mut model);
    let path = save(&model, folder.path(), "m.onnx");
    let out = folder.path().join("t.onnx");
    let text = stderr(&["grad", arg(&path), "-o", arg(&out), "--loss", "mse"]);
    assert!(text.contains(relu), "{text}");
    assert_eq!(listing(folder.path()), ["m.onnx"]);
}

#[test]
fn truncated_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let whole = fs::read(save(&small(), folder.path(), "m.onnx")).expect("read");
    for n in [whole.len() / 2, whole.len() - 3, 0] {
        let path = folder.path().join("m.onnx");
        fs::write(&path, &whole[..n]).expect("written");
        refuses(folder.path(), &path, &["m.onnx is"]);
    }
    fs::remove_file(folder.path().join("m.onnx")).expect("removed");
    refuses(
        folder.path(),
        Path::new("no-such.onnx"),
        &["cannot read no-such.onnx"],
    );
}

#[test]
fn cyclic_files() {
    let cycle = |model: &mut ModelProto| graph(model).node[1].input[0] = "y".to_string();
    refuses_model(
        cycle,
        &[
            "m.onnx is not well formed",
            "cycle of 3 nodes: each reads from the next: Relu → `r`",
        ],
    );
}

#[test]
fn names_defined_twice_or_never() {
    let twice = |model: &mut ModelProto| graph(model).node.push(node("Relu", &["x"], "i"));
    refuses_model(twice, &["Relu → `i`: `i` is defined twice"]);
    let other = |model: &mut ModelProto| graph(model).initializer.push(floats("w", &[4], 0.75));
    refuses_model(
        other,
        &["initializers 0 and 1 of the file are float [4], with other elements"],
    );
    let never = |model: &mut ModelProto| graph(model).node[1].input[0] = "z".to_string();
    refuses_model(never, &["Relu → `r`: it reads `z`, which nothing computes"]);
}

#[test]
fn wrongly_typed_tensors() {
    let longer = |model: &mut ModelProto| graph(model).initializer[0].dims = vec![5];
    refuses_model(
        longer,
        &["initializer `w`: its shape [5] of float does not take 16 bytes"],
    );
    let typed = |model: &mut ModelProto| graph(model).initializer[0].data_type = 99;
    refuses_model(typed, &["there is no element type of number 99"]);
}

#[test]
fn external_data_that_is_missing_or_elsewhere() {
    let at = |location: &'static str| {
        move |model: &mut ModelProto| move_outside(&mut graph(model).initializer[0], location)
    };
    refuses_model(at("w.bin"), &["initializer `w`: cannot read", "w.bin"]);
    for outside in ["../w.bin", "/etc/hostname"] {
        refuses_model(
            at(outside),
            &["only paths below the model's folder are read"],
        );
    }
    let folder = tempfile::tempdir().expect("a folder");
    let elsewhere = tempfile::tempdir().expect("a folder");
    fs::write(elsewhere.path().join("w.bin"), [0; 16]).expect("written");
    symlink(elsewhere.path().join("w.bin"), folder.path().join("w.bin")).expect("linked");
    let mut linked = small();
    at("w.bin")(&mut linked);
    let path = save(&linked, folder.path(), "m.onnx");
    refuses(
        folder.path(),
        &path,
        &["`w.bin` is a link that leaves the model's folder"],
    );
    fs::remove_file(folder.path().join("w.bin")).expect("removed");
    fs::write(folder.path().join("w.bin"), [0; 12]).expect("written");
    refuses(folder.path(), &path, &["beyond the end of", "(12 bytes)"]);
}

#[test]
fn versions_that_are_not_known() {
    refuses_model(
        |model| model.ir_version = Some(15),
        &[
            "version 15 of the format; versions up to 14 are known",
            "would be lost",
        ],
    );
    refuses_model(
        |model| model.opset_import[0].version = 29,
        &["version 29 of the standard's operators; versions 7 to 28"],
    );
}

#[test]
fn targets_that_cannot_be_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let target = folder.path().join("t.onnx");
    fs::write(&target, "").expect("written");
    fs::set_permissions(&target, fs::Permissions::from_mode(0o444)).expect("set");
    let text = stderr(&["optimize", arg(&path), "-o", arg(&target)]);
    assert!(text.contains("t.onnx: it is read-only"), "{text}");
    let nowhere = folder.path().join("none/t.onnx");
    let text = stderr(&["optimize", arg(&path), "-o", arg(&nowhere)]);
    assert!(
        text.contains("cannot write") && text.contains("none/t.onnx"),
        "{text}"
    );
    let text = stderr(&["optimize", arg(&path), "-o", arg(folder.path())]);
    assert!(text.contains("it is a folder"), "{text}");
    assert_eq!(listing(folder.path()), ["m.onnx", "t.onnx"]);
    assert_eq!(fs::read(&target).expect("the target"), b"");
}

/// A limit on file sizes makes a write fail halfway, as a full disk does.
#[test]
fn a_disk_that_is_full() {
    let folder = tempfile::tempdir().expect("a folder");
    let large = model(
        vec![node("MatMul", &["x", "w"], "y")],
        vec![floats("w", &[512, 512], -1.0)],
        512,
    );
    let path = save(&large, folder.path(), "m.onnx");
    let target = folder.path().join("t.onnx");
    fs::write(&target, "as it was").expect("written");
    let script = r#"trap "" XFSZ; ulimit -f 64; exec "$0" "$@""#;
    let output = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_shorthaul")])
        .args(["optimize", arg(&path), "-o", arg(&target), "--no-verify"])
        .output()
        .expect("the program starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.starts_with("error: cannot write"), "{text}");
    assert_eq!(fs::read(&target).expect("the target"), b"as it was");
    assert_eq!(listing(folder.path()), ["m.onnx", "t.onnx"]);
}

#[test]
fn an_interrupted_program_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    // Products that take far longer than this test waits.
    let n = 1024;
    let name = |k: usize| {
        if k == 0 {
            "x".to_string()
        } else {
            format!("h{k}")
        }
    };
    let mut nodes: Vec<_> = (0..200)
        .map(|k| node("MatMul", &[&name(k), "w"], &name(k + 1)))
        .collect();
    nodes[199].output[0] = "y".to_string();
    let slow = model(nodes, vec![floats("w", &[n, n], -1.0)], n);
    let path = save(&slow, folder.path(), "m.onnx");
    let target = folder.path().join("t.onnx");
    let mut child = Command::new(env!("CARGO_BIN_EXE_shorthaul"))
        .args([
            "optimize",
            arg(&path),
            "-o",
            arg(&target),
            "--bind",
            "batch=1024",
        ])
        .spawn()
        .expect("the program starts");
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let pid = child.id().to_string();
    let sent = Command::new("kill").args(["-INT", &pid]).status();
    assert!(sent.expect("kill starts").success());
    let status = child.wait().expect("the program ends");
    assert_eq!(status.code(), Some(130));
    assert_eq!(listing(folder.path()), ["m.onnx"]);
}

#[test]
fn other_commands_refuse_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let text = stderr(&["run", arg(&path)]);
    assert!(text.contains("`x` is missing: float [batch, 4]"), "{text}");
    let text = stderr(&["run", arg(&path), "--inputs", arg(&path)]);
    assert!(
        text.contains("inputs are .npz, .npy or .pb files"),
        "{text}"
    );
    let npy = folder.path().join("x.npy");
    fs::write(&npy, "nothing").expect("written");
    let text = stderr(&["run", arg(&path), "--inputs", arg(&npy)]);
    assert!(text.contains("it is not an .npy file"), "{text}");
    let to = ["optimize", arg(&path), "-o"];
    let rule = shorthaul(&[&to[..], &["t.onnx", "--without", "no-such"]].concat());
    assert_eq!(rule.status.code(), Some(2));
    let said = String::from_utf8_lossy(&rule.stderr);
    assert!(
        said.contains("there is no rule `no-such`; `shorthaul optimize --list-rules` lists them"),
        "{said}"
    );
    let text = stderr(&[&to[..], &["-"]].concat());
    assert!(
        text.contains("cannot write the file to standard output"),
        "{text}"
    );
    let usage = shorthaul(&["optimize", arg(&path)]);
    assert_eq!(usage.status.code(), Some(2));
}

#[test]
fn a_limit_on_the_size_of_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let weights = vec![floats("w", &[64, 64], 0.5)];
    let large = model(vec![node("MatMul", &["x", "w"], "y")], weights, 64);
    let path = save(&large, folder.path(), "m.onnx");
    let target = folder.path().join("t.onnx");
    // Blocks of 512 or 1024 bytes, whatever the shell.
    let command = "ulimit -f 4; exec \"$0\" optimize \"$1\" -o \"$2\"";
    let output = Command::new("sh")
        .args([
            "-c",
            command,
            env!("CARGO_BIN_EXE_shorthaul"),
            arg(&path),
            arg(&target),
        ])
        .output()
        .expect("the shell starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("t.onnx") && text.to_lowercase().contains("too large"),
        "{text}"
    );
    assert_eq!(listing(folder.path()), ["m.onnx"]);
}

#[test]
fn a_witness_that_is_not_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let target = folder.path().join("t.onnx");
    for option in [&["--oracle", "ort"][..], &["--measure"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_shorthaul"))
            .args(["optimize", arg(&path), "-o", arg(&target)])
            .args(option)
            .env_clear()
            .env("PATH", folder.path())
            .output()
            .expect("the program starts");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("`pip install onnxruntime`"), "{text}");
        assert_eq!(listing(folder.path()), ["m.onnx"]);
    }
}

#[test]
fn sizes_that_no_plan_can_have() {
    let folder = tempfile::tempdir().expect("a folder");
    let sizes = onnx::tensor::Tensor::ints(&[-5]).to_proto("s");
    let filled = model(vec![node("ConstantOfShape", &["s"], "y")], vec![sizes], 4);
    let path = save(&filled, folder.path(), "filled.onnx");
    let said = stderr(&["report", arg(&path), "--bind", "batch=2"]);
    assert!(said.contains("of which one is negative"), "{said}");
    let repeats = onnx::tensor::Tensor::ints(&[1, i64::MIN]).to_proto("s");
    let tiled = model(vec![node("Tile", &["x", "s"], "y")], vec![repeats], 4);
    let path = save(&tiled, folder.path(), "tiled.onnx");
    let said = stderr(&["report", arg(&path), "--bind", "batch=2"]);
    assert!(said.contains("it repeats a dimension -"), "{said}");
    let mut wide = node("LRN", &["x"], "y");
    wide.attribute.push(onnx::proto::AttributeProto {
        name: "size".to_string(),
        i: Some(1 << 62),
        r#type: 2,
        ..Default::default()
    });
    let path = save(
        &model(vec![wide], Vec::new(), 4),
        folder.path(),
        "wide.onnx",
    );
    let said = stderr(&["report", arg(&path), "--bind", "batch=2"]);
    assert!(said.contains("a `size` from 1"), "{said}");
}
