//! Runs that are killed, have no room on the disk, or share a target: the target is whole, and the next run leaves
//! nothing of an earlier one behind.
//!
//! `SHORTHAUL_SURVIVALS` says how many runs each test makes; a few take seconds.

// Each test binary uses a part of it.
#[allow(dead_code)]
mod program;

use onnx::proto::ModelProto;
use program::{arg, floats, listing, model, move_outside, node, save, shorthaul};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Runs of each test if nobody says.
const USUAL: u32 = 12;

fn n_runs() -> u32 {
    let said = std::env::var("SHORTHAUL_SURVIVALS").ok();
    said.map_or(USUAL, |n| n.parse().expect("a number of runs"))
}

/// Elements of the vectors, so that data is in a file beside the model.
const N: i64 = 1 << 15;

/// `y = Relu(x) + w`, with `w` in a file of its own that counts from `first`.
fn outside(folder: &Path, name: &str, first: f32) -> PathBuf {
    let mut weight = floats("w", &[1, N], first);
    let data = format!("{name}.bin");
    let bytes = weight.raw_data.clone().expect("bytes");
    fs::write(folder.join(&data), bytes).expect("written");
    move_outside(&mut weight, &data);
    let nodes = vec![
        node("Identity", &["x"], "i"),
        node("Relu", &["i"], "r"),
        node("Add", &["r", "w"], "y"),
    ];
    let made: ModelProto = model(nodes, vec![weight], N);
    save(&made, folder, &format!("{name}.onnx"))
}

/// Bytes of a target and of its data; `None` where a file is missing.
type Pair = (Option<Vec<u8>>, Option<Vec<u8>>);

fn pair(target: &Path) -> Pair {
    let data = PathBuf::from(format!("{}.data", target.display()));
    (fs::read(target).ok(), fs::read(data).ok())
}

fn optimize(from: &Path, to: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shorthaul"));
    command.args(["optimize", arg(from), "-o", arg(to), "-q"]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Two models in a folder, a folder for targets, and what each model becomes.
struct Scene {
    sources: tempfile::TempDir,
    targets: tempfile::TempDir,
    models: [PathBuf; 2],
    made: [Pair; 2],
    took: Duration,
}

impl Scene {
    fn new() -> Scene {
        let sources = tempfile::tempdir().expect("a folder");
        let targets = tempfile::tempdir().expect("a folder");
        let models = [("a", 0.0), ("b", 9.0)].map(|(n, v)| outside(sources.path(), n, v));
        let target = targets.path().join("t.onnx");
        let mut took = Duration::ZERO;
        let made = models.clone().map(|from| {
            let started = Instant::now();
            let done = optimize(&from, &target).status().expect("it starts");
            assert!(done.success());
            took = started.elapsed();
            pair(&target)
        });
        assert!(made[0] != made[1] && made[0].1.is_some());
        Scene {
            sources,
            targets,
            models,
            made,
            took,
        }
    }

    fn target(&self) -> PathBuf {
        self.targets.path().join("t.onnx")
    }

    /// Asserts that the target is what one of the models becomes. A run that is killed between its renamings
    /// leaves no model, never one beside another one's data; the older files are in its folder then.
    fn is_whole(&self, when: &str) {
        let found = pair(&self.target());
        if found.0.is_none() {
            let folders = listing(self.targets.path()).into_iter();
            let mut folders = folders.filter(|name| name.ends_with(".part"));
            let older = |name: String| self.targets.path().join(name).join("1.old").exists();
            assert!(folders.any(older), "{when}: the older model is gone");
            return;
        }
        assert!(self.made.contains(&found), "{when}: neither old nor new");
    }

    /// Asserts that a run that ends well leaves only the target and its data.
    fn ends_clean(&self) {
        let done = optimize(&self.models[0], &self.target()).status();
        assert!(done.expect("it starts").success());
        assert_eq!(pair(&self.target()), self.made[0]);
        assert_eq!(listing(self.targets.path()), ["t.onnx", "t.onnx.data"]);
        let sources = ["a.bin", "a.onnx", "b.bin", "b.onnx"];
        assert_eq!(listing(self.sources.path()), sources);
    }
}

#[test]
fn a_killed_run_leaves_the_old_file_or_the_new_one() {
    let scene = Scene::new();
    let mut killed = 0;
    for n in 0..n_runs() {
        let mut run = optimize(&scene.models[n as usize % 2], &scene.target());
        let mut run = run.spawn().expect("it starts");
        // Kills are spread over the whole run, with more of them near its end.
        let part = f64::from(n * 37 % 101) / 100.0;
        std::thread::sleep(scene.took.mul_f64(1.1 * part.sqrt()));
        killed += u32::from(run.kill().is_ok());
        run.wait().expect("it ends");
        scene.is_whole(&format!("run {n}, killed at {part}"));
    }
    assert!(killed > 0);
    scene.ends_clean();
}

#[test]
fn a_full_disk_leaves_the_old_file() {
    let scene = Scene::new();
    let before = pair(&scene.target());
    for n in 0..n_runs() {
        // A signal ends the run, or where it is ignored, an error does.
        let ignored = if n % 2 == 0 { "trap '' XFSZ;" } else { "" };
        let blocks = n % 120;
        let script = format!("{ignored} ulimit -f {blocks}; exec \"$0\" \"$@\"");
        let mut run = Command::new("bash");
        run.args(["-c", &script, env!("CARGO_BIN_EXE_shorthaul"), "optimize"]);
        run.args([arg(&scene.models[0]), "-o", arg(&scene.target()), "-q"]);
        let run = run.output().expect("it starts");
        assert!(!run.status.success(), "{blocks} blocks are enough");
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(!said.contains("internal error"), "{said}");
        if n % 2 == 0 {
            assert_eq!(run.status.code(), Some(1), "{said}");
            assert!(said.contains("cannot write"), "{said}");
        }
        assert!(pair(&scene.target()) == before, "{blocks} blocks: changed");
    }
    scene.ends_clean();
}

#[test]
fn of_two_runs_with_one_target_one_wins_whole() {
    let scene = Scene::new();
    for n in 0..n_runs() {
        let start = |from: &PathBuf| optimize(from, &scene.target()).spawn().expect("it starts");
        let runs: Vec<_> = scene.models.iter().map(start).collect();
        for mut run in runs {
            assert!(run.wait().expect("it ends").success());
        }
        scene.is_whole(&format!("pair {n}"));
    }
    scene.ends_clean();
    let same = shorthaul(&["check", arg(&scene.models[0]), arg(&scene.target())]);
    assert_eq!(same.status.code(), Some(0));
}
