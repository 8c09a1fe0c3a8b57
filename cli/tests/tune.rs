//! `shorthaul tune`: a recipe is written, what was learned serves the next run, and nothing damaged stops it.

// This test uses a part of it.
#[allow(dead_code)]
mod program;

use compiler::kernels::cache::Cache;
use compiler::tuning_database::file_of_this_machine;
use program::arg;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const MLP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/mlp.onnx");

/// Runs the program with a cache folder of its own.
fn shorthaul(cache: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shorthaul"));
    command.args(args).env("SHORTHAUL_CACHE_DIR", cache);
    command.output().expect("the program starts")
}

fn stdout(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Where sessions of tuning keep what they learn.
fn database(folder: &Path) -> PathBuf {
    let cache = Cache::at(&folder.join("cache"), 1 << 30).expect("a cache");
    file_of_this_machine(cache.root(), "tuning")
}

/// A session of tuning that takes a second.
fn tuned(folder: &Path, more: &[&str]) -> Output {
    let out = folder.join("recipe.toml");
    let mut args = vec![
        "tune",
        MLP,
        "--bind",
        "batch=512",
        "--train",
        "-o",
        arg(&out),
    ];
    args.extend(["--seconds", "1", "--threads", "1"]);
    args.extend(more);
    shorthaul(&folder.join("cache"), &args)
}

#[test]
fn a_recipe_is_written_and_reported_with() {
    let folder = tempfile::tempdir().unwrap();
    // On a busy machine a second may be too short for a first answer.
    let session = |_| -> Option<serde_json::Value> {
        let json = stdout(&tuned(folder.path(), &["--json"]));
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        (json["ways_timed"].as_i64().expect("a number") > 0).then_some(json)
    };
    let json = (0..20).find_map(session).expect("ways that were timed");
    assert_eq!(json["interrupted"], false);
    let recipe = folder.path().join("recipe.toml");
    let text = fs::read_to_string(&recipe).unwrap();
    assert!(text.starts_with("# Recipe of Shorthaul") && text.contains("model = \"mlp\""));
    assert!(
        text.contains("kind = \"blocking\"") || text.contains("kind = \"epilogue\""),
        "{text}"
    );
    // With the recipe there are no warnings, and a recipe that forbids everything makes other kernels.
    let reported = |recipe: Option<&Path>| {
        let mut args = vec!["report", MLP, "--bind", "batch=512", "--train", "--json"];
        args.extend(recipe.iter().flat_map(|path| ["--recipe", arg(path)]));
        let output = shorthaul(&folder.path().join("cache"), &args);
        serde_json::from_str::<serde_json::Value>(&stdout(&output)).expect("JSON")
    };
    assert_eq!(reported(Some(&recipe))["notes"], serde_json::json!([]));
    let forbidden = folder.path().join("forbidden.toml");
    let undecided = text.lines().filter(|line| !line.starts_with("take = "));
    let undecided = undecided.collect::<Vec<_>>().join("\n");
    let text = undecided.replace("applied = true", "applied = true\ntake = false");
    fs::write(&forbidden, text).unwrap();
    let n_kernels =
        |report: &serde_json::Value| report["report"]["kernels"].as_array().map(Vec::len);
    assert!(n_kernels(&reported(Some(&forbidden))) > n_kernels(&reported(None)));
    // A later run starts from what an earlier one learned; on a busy machine a second may be too short for that.
    for _ in 0..20 {
        if database(folder.path()).exists() {
            break;
        }
        stdout(&tuned(folder.path(), &[]));
    }
    let again: serde_json::Value =
        serde_json::from_str(&stdout(&tuned(folder.path(), &["--json"]))).expect("JSON");
    assert!(again["known"].as_i64().expect("a number") > 0, "{again}");
}

#[test]
fn a_damaged_database_is_set_aside_with_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let database = database(folder.path());
    fs::create_dir_all(database.parent().expect("a folder")).unwrap();
    fs::write(&database, "{").unwrap();
    let output = tuned(folder.path(), &[]);
    stdout(&output);
    let warned = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(warned.contains("is not a tuning database ("), "{warned}");
    assert!(database.with_extension("damaged").exists());
}

#[test]
fn what_is_no_recipe_is_refused_before_anything_is_timed() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = folder.path().join("wrong.toml");
    fs::write(&wrong, "format = [").unwrap();
    let output = tuned(folder.path(), &["--recipe", arg(&wrong)]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("this is not a recipe of Shorthaul"), "{told}");
    assert_eq!(told.matches("error:").count(), 1);
    assert!(!folder.path().join("recipe.toml").exists());
    let other = "format = 1\nshorthaul = \"0.1.0\"\nmodel = \"other\"\n";
    fs::write(&wrong, other).unwrap();
    let output = tuned(folder.path(), &["--recipe", arg(&wrong)]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        told.contains("the recipe belongs to another model"),
        "{told}"
    );
}

/// Ctrl-C ends the search, and the recipe is there.
#[cfg(unix)]
#[test]
fn an_interruption_keeps_what_was_found() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("recipe.toml");
    let mut command = Command::new(env!("CARGO_BIN_EXE_shorthaul"));
    command
        .args([
            "tune",
            MLP,
            "--bind",
            "batch=512",
            "--train",
            "-o",
            arg(&out),
        ])
        .args(["--seconds", "600", "--threads", "1"])
        .env("SHORTHAUL_CACHE_DIR", folder.path().join("cache"))
        .stdout(std::process::Stdio::piped());
    let child = command.spawn().expect("the program starts");
    // The first answer is in the database; a small model is through before that only if it has few ways.
    for _ in 0..600 {
        if database(folder.path()).exists() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let interrupt = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(interrupt.expect("kill runs").success());
    let output = child.wait_with_output().expect("it ends");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert!(told.contains("written: "), "{told}");
    assert!(fs::read_to_string(&out).unwrap().starts_with("# Recipe"));
}
