//! What is written, when, and what is never replaced.

// Each test binary uses a part of it.
#[allow(dead_code)]
mod program;

use onnx::proto::{ModelProto, StringStringEntryProto};
use program::{arg, floats, listing, model, move_outside, node, save, small, stderr, stdout};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shorthaul"));
    command.args(args);
    command
}

/// A run that must fail with all of `parts` in its message.
fn fails(mut command: Command, parts: &[&str]) -> Output {
    let output = command.output().expect("the program starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    output
}

/// `y = x + w0 + w1 …` whose vectors are in the file `weights.data`, in the order of the offsets.
fn outside(folder: &Path, vectors: &[(u64, i64)]) -> PathBuf {
    let name = |k: usize| match k {
        0 => "x".to_string(),
        k if k == vectors.len() => "y".to_string(),
        k => format!("h{k}"),
    };
    let (mut nodes, mut weights) = (Vec::new(), Vec::new());
    let mut data = Vec::new();
    for (k, (offset, n)) in vectors.iter().enumerate() {
        let w = format!("w{k}");
        let dims = [n / 4, 4];
        let mut weight = floats(&w, &dims, k as f32);
        let bytes = weight.raw_data.clone().expect("bytes");
        let end = *offset as usize + bytes.len();
        data.resize(data.len().max(end), 0);
        data[*offset as usize..end].copy_from_slice(&bytes);
        move_outside(&mut weight, "weights.data");
        for (key, value) in [("offset", *offset), ("length", bytes.len() as u64)] {
            weight.external_data.push(StringStringEntryProto {
                key: key.to_string(),
                value: value.to_string(),
            });
        }
        nodes.push(node(
            if k % 2 == 0 { "Add" } else { "Max" },
            &[&name(k), &w],
            &name(k + 1),
        ));
        weights.push(weight);
    }
    fs::write(folder.join("weights.data"), data).expect("written");
    save(&model(nodes, weights, 4), folder, "m.onnx")
}

/// A shell script in the place of a Python with ONNX Runtime, which measures by `script`: `$4` and `$5`
/// are the two models.
fn clock(folder: &Path, script: &str) -> PathBuf {
    let path = folder.join("python");
    let text = format!("#!/bin/sh\nif [ \"$3\" = measure ]; then\n{script}\nfi\n");
    fs::write(&path, text).expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("set");
    path
}

#[test]
fn nothing_is_replaced_before_all_is_well() {
    let folder = tempfile::tempdir().expect("a folder");
    let tools = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let target = folder.path().join("t.onnx");
    fs::write(&target, "as it was").expect("written");
    let optimize = ["optimize", arg(&path), "-o", arg(&target)];
    // What is measured is complete, and beside its target.
    let refuses = "test -s \"$5\" && echo it refuses the model >&2; exit 1";
    let mut measured = command(&[&optimize[..], &["--measure"]].concat());
    measured.env("SHORTHAUL_PYTHON", clock(tools.path(), refuses));
    fails(measured, &["it refuses the model"]);
    let grad = ["grad", arg(&path), "-o", arg(&target), "--loss", "mse"];
    let run = ["run", arg(&path), "--random", "0", "--out", arg(&target)];
    let report = [
        "report",
        arg(&path),
        "--bind",
        "batch=2",
        "--html",
        arg(&target),
    ];
    for args in [&optimize[..], &grad, &run, &report] {
        let mut full = command(args);
        full.stdout(
            File::options()
                .write(true)
                .open("/dev/full")
                .expect("opened"),
        );
        fails(full, &["cannot print the result"]);
    }
    assert_eq!(fs::read(&target).expect("read"), b"as it was");
    assert_eq!(listing(folder.path()), ["m.onnx", "t.onnx"]);
}

#[test]
fn a_model_is_measured_with_its_data_against_the_one_it_replaces() {
    let folder = tempfile::tempdir().expect("a folder");
    let tools = tempfile::tempdir().expect("a folder");
    let path = outside(folder.path(), &[(0, 4), (16, 4)]);
    let before = fs::read(&path).expect("read");
    fs::write(tools.path().join("before"), &before).expect("written");
    let script = format!(
        "cmp -s \"$4\" {}/before && test -s \"$5\" && test -s \"$(dirname \"$5\")/m.onnx.data\" && echo 4 2",
        tools.path().display()
    );
    let output = command(&[
        "optimize",
        arg(&path),
        "-o",
        arg(&path),
        "--measure",
        "--json",
    ])
    .env("SHORTHAUL_PYTHON", clock(tools.path(), &script))
    .output()
    .expect("the program starts");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(json["before"]["milliseconds"], 4.0);
    assert_eq!(json["after"]["milliseconds"], 2.0);
    assert_ne!(fs::read(&path).expect("read"), before);
    assert_eq!(
        listing(folder.path()),
        ["m.onnx", "m.onnx.data", "weights.data"]
    );
}

#[test]
fn growth_is_that_of_the_bytes_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let small: Vec<(u64, i64)> = (0..60).map(|k| (16 * k, 4)).collect();
    let path = outside(folder.path(), &small);
    let target = folder.path().join("t.onnx");
    let optimize = [
        "optimize",
        arg(&path),
        "-o",
        arg(&target),
        "--max-growth",
        "1",
    ];
    stdout(&optimize, 0);
    let length = |name: &str| fs::metadata(folder.path().join(name)).expect("there").len();
    assert_eq!((length("t.onnx.data"), length("weights.data")), (960, 960));
    // Now the small vector comes first, and the large one is aligned, as it was before.
    fs::write(&target, "as it was").expect("written");
    let path = outside(folder.path(), &[(1 << 20, 4), (0, 1 << 18)]);
    let text = stderr(&[&optimize[..], &["--bind", "batch=65536"]].concat());
    assert!(text.contains("the file would be 1.00"), "{text}");
    assert_eq!(fs::read(&target).expect("read"), b"as it was");
    assert_eq!(length("t.onnx.data"), 960);
    assert!(path.exists());
}

#[test]
fn a_model_its_data_and_its_inputs_are_never_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = outside(folder.path(), &[(0, 4)]);
    let data = folder.path().join("weights.data");
    let before = (
        fs::read(&path).expect("read"),
        fs::read(&data).expect("read"),
    );
    for target in [&path, &data] {
        let commands: [&[&str]; 3] = [
            &["grad", arg(&path), "--loss", "mse", "-o", arg(target)],
            &["run", arg(&path), "--random", "0", "--out", arg(target)],
            &[
                "report",
                arg(&path),
                "--bind",
                "batch=2",
                "--html",
                arg(target),
            ],
        ];
        for args in commands {
            let text = stderr(args);
            assert!(
                text.contains("is read from and would be replaced"),
                "{text}"
            );
        }
    }
    let text = stderr(&["optimize", arg(&path), "-o", arg(&data)]);
    assert!(
        text.contains("is read from and would be replaced"),
        "{text}"
    );
    assert_eq!(
        before,
        (
            fs::read(&path).expect("read"),
            fs::read(&data).expect("read")
        )
    );
    let x = folder.path().join("x.npz");
    stdout(&["run", arg(&path), "--random", "0", "--out", arg(&x)], 0);
    fs::rename(&x, folder.path().join("y.npz")).expect("renamed");
    let tensor = onnx::tensor::Tensor::new(&[1, 4], onnx::tensor::Values::F32(vec![1.0; 4]));
    onnx::npy::write_npz([("x", &tensor)], File::create(&x).expect("created")).expect("written");
    let text = stderr(&["run", arg(&path), "--inputs", arg(&x), "--out", arg(&x)]);
    assert!(text.contains("x.npz is read from"), "{text}");
}

/// Runs with a model on standard input.
fn piped(model: &ModelProto, args: &[&str]) -> Output {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(model, folder.path(), "m.onnx");
    let mut cat = Command::new("cat")
        .arg(path)
        .stdout(Stdio::piped())
        .spawn()
        .expect("cat starts");
    let input = cat.stdout.take().expect("a pipe");
    let output = command(args)
        .stdin(input)
        .output()
        .expect("the program starts");
    cat.wait().expect("cat ends");
    output
}

#[test]
fn models_come_through_pipes() {
    let folder = tempfile::tempdir().expect("a folder");
    let target = folder.path().join("t.onnx");
    let commands: [&[&str]; 6] = [
        &["info", "/dev/stdin"],
        &["check", "/dev/stdin"],
        &["optimize", "/dev/stdin", "-o", arg(&target)],
        &["grad", "/dev/stdin", "-o", arg(&target), "--loss", "mse"],
        &["report", "/dev/stdin", "--bind", "batch=2"],
        &[
            "report",
            "/dev/stdin",
            "--bind",
            "batch=2",
            "--html",
            arg(&target),
        ],
    ];
    for args in commands {
        let output = piped(&small(), args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {text}");
    }
    let args = ["optimize", "/dev/stdin", "-o", arg(&target), "--measure"];
    let output = piped(&small(), &args);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("it must be a regular file"), "{text}");
}

#[test]
fn pipes_and_devices_stay_what_they_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    stdout(&["optimize", arg(&path), "-o", "/dev/null"], 0);
    let kind = fs::metadata("/dev/null").expect("there").file_type();
    assert!(kind.is_char_device());
    let pipe = folder.path().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo starts").success());
    let reader = pipe.clone();
    let reader = std::thread::spawn(move || fs::read(reader).expect("read"));
    let target = folder.path().join("t.onnx");
    stdout(&["optimize", arg(&path), "-o", arg(&target)], 0);
    stdout(&["optimize", arg(&path), "-o", arg(&pipe)], 0);
    assert_eq!(
        reader.join().expect("bytes"),
        fs::read(&target).expect("read")
    );
    // The summary would be among the model's bytes.
    let mut mixed = command(&["optimize", arg(&path), "-o", "/dev/stdout"]);
    mixed.stdout(Stdio::piped());
    fails(
        mixed,
        &["standard output, which gets the summary, is the same file"],
    );
}

#[test]
fn errors_are_json_where_it_is_asked_for() {
    let commands: [&[&str]; 8] = [
        &["info", "none.onnx"],
        &["report", "none.onnx"],
        &["check", "none.onnx"],
        &["bisect", "none.onnx", "none.onnx"],
        &["diff", "none.onnx", "none.onnx"],
        &["run", "none.onnx"],
        &["optimize", "none.onnx", "-o", "t.onnx"],
        &["grad", "none.onnx", "-o", "t.onnx", "--loss", "mse"],
    ];
    for args in commands {
        let output = fails(
            command(&[args, &["--json"]].concat()),
            &["error: cannot read none.onnx"],
        );
        let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let message = json["error"].as_str().expect("a message");
        assert!(message.starts_with("cannot read none.onnx"), "{message}");
    }
}

#[test]
fn a_name_may_be_as_long_as_names_can_be() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let name = format!("{}.onnx", "n".repeat(250));
    stdout(
        &[
            "optimize",
            arg(&path),
            "-o",
            arg(&folder.path().join(&name)),
        ],
        0,
    );
    assert_eq!(listing(folder.path()), ["m.onnx".to_string(), name]);
}
