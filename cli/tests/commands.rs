//! The program as a user runs it: what it prints, where, and with which exit code.

use std::process::{Command, Output, Stdio};

const MLP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/mlp.onnx");
const NORMALIZED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/normalized.onnx");
const UNSUPPORTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/unsupported.onnx");
/// Why a node of that file cannot be imported, which is more than that its operator is not supported.
const NON_ZERO: &str = "node `find` (NonZero): the size of its result depends on data";

fn shorthaul(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shorthaul"));
    command.args(args).env_remove("SHORTHAUL_ISA");
    command.output().expect("the program starts")
}

/// Standard output of a run that must succeed.
fn stdout(args: &[&str]) -> String {
    let output = shorthaul(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    String::from_utf8(output.stdout).expect("text")
}

/// Standard error of a run that must end with `code` and print nothing else.
fn stderr(args: &[&str], code: i32) -> String {
    let output = shorthaul(args);
    let stderr = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert!(output.stdout.is_empty());
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

#[test]
fn info_says_what_is_in_a_model() {
    let text = stdout(&["info", MLP]);
    for part in [
        "ONNX operators version 18, written by shorthaul-tests",
        "  x  f32  [batch, 4]",
        "dynamic sizes: batch",
        "parameters: 3 with 72 elements (288 B), 72 of them trainable",
        "  MatMul  1",
        "imported: 4 library nodes",
    ] {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    let bound = stdout(&["info", MLP, "--bind", "batch=8"]);
    assert!(
        bound.contains("  x  f32  [8, 4]") && !bound.contains("dynamic"),
        "{bound}"
    );
}

#[test]
fn info_lists_every_unsupported_operator() {
    let text = stdout(&["info", UNSUPPORTED]);
    for part in ["    RandomNormalLike: first, second\n", NON_ZERO] {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    let json = stdout(&["info", UNSUPPORTED, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["unsupported"][0]["operator"], "RandomNormalLike");
    assert_eq!(json["unsupported"][0]["nodes"][1], "second");
    assert_eq!(json["operators"]["Add"], 1);
}

#[test]
fn report_counts_kernels_bytes_and_arithmetic() {
    let json = stdout(&["report", MLP, "--bind", "batch=8", "--train", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let report = &json["report"];
    let kernels = report["kernels"].as_array().expect("kernels");
    let sum = |key: &str| -> i64 { kernels.iter().filter_map(|k| k[key].as_i64()).sum() };
    assert_eq!(
        sum("bytes_read") + sum("bytes_written"),
        report["bytes_moved"]
    );
    // x, 3 parameters, y, its gradient and the parameters' gradients, once each.
    let least = (8 * 4 + 72) + 8 * 4 + 8 * 4 + 72;
    assert_eq!(report["bytes_least"], 4 * least);
    let stages: Vec<_> = kernels.iter().filter_map(|k| k["stage"].as_str()).collect();
    assert!(stages.contains(&"forward") && stages.contains(&"backward"));
    // Three products of 8·4·8 multiplications and additions, two of them again backward.
    let products: i64 = kernels
        .iter()
        .filter(|k| k["path"] == "gemm")
        .filter_map(|k| k["operations"].as_i64())
        .sum();
    // On the products' blocks run the bias with the ReLU, the ReLU's mask, and the sum of the bias's gradient.
    let on_blocks = 8 * 8 * (4 + 3 + 1);
    assert_eq!(products, 5 * 2 * 8 * 4 * 8 + on_blocks);
    let text = stdout(&["report", MLP, "--bind", "batch=8"]);
    assert!(
        text.contains("times the least possible")
            && text.contains("memory for intermediate results: "),
        "{text}"
    );
}

#[test]
fn errors_are_one_message_with_the_next_step() {
    let missing = stderr(&["info", "no-such.onnx"], 1);
    assert!(
        missing.starts_with("error: cannot read no-such.onnx: "),
        "{missing}"
    );
    let other = stderr(&["info", file!()], 1);
    assert!(
        other.contains("cannot read") || other.contains("is not an ONNX file"),
        "{other}"
    );
    let found = stdout(&["report", MLP]);
    assert!(
        found.starts_with("sizes found by running the model: batch=1; --bind sets others\n"),
        "{found}"
    );
    let unknown = stderr(&["report", MLP, "--bind", "batch=8", "--bind", "seq=2"], 1);
    assert!(
        unknown.contains("size `seq`: the file has no dynamic size of that name; it has batch"),
        "{unknown}"
    );
    let page = [
        "report",
        UNSUPPORTED,
        "--html",
        "/dev/null",
        "--bind",
        "seq=2",
    ];
    let drawn = stderr(&page, 1);
    assert!(
        drawn.contains("no dynamic size of the name `seq`"),
        "{drawn}"
    );
    let told = stderr(&["info", MLP, "--bind", "seq=2"], 1);
    assert!(
        told.contains("size `seq`: the file has no dynamic size"),
        "{told}"
    );
    let unsupported = stderr(&["report", UNSUPPORTED], 1);
    assert!(unsupported.contains(NON_ZERO), "{unsupported}");
    let usage = stderr(&["report", MLP, "--bind", "batch=0"], 2);
    assert!(usage.contains("`0` is not a size of at least 1"), "{usage}");
    let part = stderr(&["report", MLP, "--bind", "batch=3.5"], 2);
    assert!(
        part.contains("`3.5` is no size; a size is a whole number"),
        "{part}"
    );
    let open = stderr(&["report", MLP, "--bind", "batch=none"], 1);
    let needs = "`--bind batch=none` needs numbers here: --bind none=…";
    assert!(open.contains(needs), "{open}");
    assert_eq!(shorthaul(&[]).status.code(), Some(2));
}

#[test]
fn a_truncated_file_is_one_message() {
    let whole = std::fs::read(MLP).expect("the file is there");
    let path = std::env::temp_dir().join(format!("truncated-{}.onnx", std::process::id()));
    for command in ["info", "report"] {
        for length in [whole.len() / 2, whole.len() - 3, 0] {
            std::fs::write(&path, &whole[..length]).expect("written");
            let text = stderr(&[command, &path.to_string_lossy()], 1);
            assert_eq!(text.matches("error:").count(), 1, "{text}");
            assert!(text.contains("truncated-"), "{text}");
        }
    }
    std::fs::remove_file(&path).expect("removed");
}

#[test]
fn help_shows_examples() {
    for command in [&["--help"][..], &["info", "--help"], &["report", "--help"]] {
        assert!(
            stdout(command).contains("shorthaul info")
                || stdout(command).contains("--bind batch=8")
        );
    }
}

#[test]
fn a_closed_pipe_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_shorthaul"))
        .args(["info", MLP])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the program ends");
    assert!(output.status.success());
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn grad_writes_a_file_that_can_be_read_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("train.onnx");
    let out = path.to_str().expect("text");
    let args = [
        "grad",
        MLP,
        "-o",
        out,
        "--loss",
        "mse",
        "--optimizer",
        "adam",
    ];
    assert!(stdout(&args).contains("train.onnx"));
    let first = std::fs::read(&path).expect("the file");
    let text = stdout(&["info", out]);
    for part in [
        "  target     f32  [batch, 4]",
        "  lr         f32  []",
        "loss",
        ".grad",
        ".next",
        "Sqrt",
    ] {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    stdout(&args);
    assert_eq!(first, std::fs::read(&path).expect("the file"));
    assert_eq!(
        std::fs::read_dir(folder.path()).expect("a folder").count(),
        1
    );
}

#[test]
fn grad_says_that_statistics_stay_and_how_they_would_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("train.onnx");
    let out = path.to_str().expect("text");
    let grad = ["grad", NORMALIZED, "-o", out, "--loss", "mse"];
    let said = stdout(&grad);
    assert!(
        said.contains("1 BatchNormalization nodes use their running statistics"),
        "{said}"
    );
    assert!(!stdout(&["info", out]).contains("mean.next"));
    let trains = [&grad[..], &["--mode", "train"]].concat();
    assert!(!stdout(&trains).contains("BatchNormalization"));
    let info = stdout(&["info", out]);
    for part in ["mean.next", "var.next", "scale.grad"] {
        assert!(info.contains(part), "`{part}` is not in:\n{info}");
    }
    let wrong = stderr(&[&grad[..], &["--mode", "fast"]].concat(), 2);
    assert!(wrong.contains("choose file, train or eval"), "{wrong}");
}

#[test]
fn what_grad_refuses_leaves_the_target_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, broken) = (folder.path().join("t.onnx"), folder.path().join("b.onnx"));
    std::fs::write(&path, "as it was").expect("written");
    let model = std::fs::read(MLP).expect("the model");
    std::fs::write(&broken, &model[..model.len() / 2]).expect("written");
    let (out, broken) = (path.to_str().expect("text"), broken.to_str().expect("text"));
    let damaged = stderr(&["grad", broken, "-o", out, "--loss", "mse"], 1);
    assert!(damaged.contains("damaged"), "{damaged}");
    let loss = stderr(&["grad", MLP, "-o", out, "--loss", "hinge"], 1);
    assert!(
        loss.contains("the loss is cross-entropy, mse or an output of the model"),
        "{loss}"
    );
    let name = stderr(
        &["grad", MLP, "-o", out, "--loss", "mse", "--wrt", "bais"],
        1,
    );
    assert!(name.contains("no initializer or input `bais`"), "{name}");
    let kind = stderr(
        &[
            "grad",
            MLP,
            "-o",
            out,
            "--loss",
            "mse",
            "--optimizer",
            "lion",
        ],
        2,
    );
    assert!(kind.contains("sgd, momentum, adam, adamw"), "{kind}");
    let nowhere = folder.path().join("none/t.onnx");
    let nowhere = [
        "grad",
        MLP,
        "-o",
        nowhere.to_str().expect("text"),
        "--loss",
        "mse",
    ];
    let nowhere = stderr(&nowhere, 1);
    assert!(nowhere.contains("cannot write"), "{nowhere}");
    assert_eq!(
        std::fs::read_to_string(&path).expect("the file"),
        "as it was"
    );
    assert_eq!(
        std::fs::read_dir(folder.path()).expect("a folder").count(),
        2
    );
}
