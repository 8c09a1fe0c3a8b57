//! Damaged ONNX files through everything that reads one: an error or a result, never a panic, never a hang.
//!
//! The models are the standard's node cases, in the folder that `SHORTHAUL_NODE_CASES` names (`cargo xtask test`
//! writes them), and a few files of this repository. Which damage is done follows from a seed.
//! `SHORTHAUL_MUTATIONS` says how many damaged files there are; `cargo xtask mutations 20000` asks for more.

use compiler::Step;
use compiler::importer::onnx::{File, Mode, Options as ImportOptions};
use compiler::internal_error::caught_deep;
use compiler::report::Report;
use compiler::training_graph::{Loss, TrainingOptions, training_graph};
use graph::Bindings;
use onnx::cost::cost;
use onnx::file::Model;
use onnx::proto::ModelProto;
use onnx::rewrite::Target;
use onnx::{check, diff, optimize, verify};
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tests::mutate::{Random, mutate};

/// A file that takes longer is a hang. The files are tiny; the machine may be busy.
const LONGEST: Duration = Duration::from_secs(30);
/// Memory that the whole run may take: more than any file's, less than two files that ask for too much.
const MOST_MEMORY_KIB: usize = 3 << 20;

/// What everything made of one file.
#[derive(Default)]
struct Found {
    problems: Vec<String>,
}

impl Found {
    fn try_out(&mut self, command: &str, work: impl FnOnce() + Send) {
        let start = Instant::now();
        if let Err(error) = caught_deep(work) {
            self.problems.push(format!("{command}: {error}"));
        }
        if start.elapsed() > LONGEST {
            let seconds = start.elapsed().as_secs();
            self.problems.push(format!("{command}: took {seconds} s"));
        }
    }
}

fn rewritten(model: &Model, target: Target, verified: bool) -> Option<optimize::Optimized> {
    let options = optimize::Options {
        rewriting: onnx::rewrite::Options {
            target,
            ..Default::default()
        },
        verifying: verified.then(verify::Options::default),
    };
    match optimize::optimize(model, &options, &mut |_| ()) {
        Ok(optimized) => Some(optimized),
        // A rewrite of a damaged file that broke it is a mistake of ours.
        Err(error @ optimize::OptimizeError::Broken { .. }) => panic!("{error}"),
        Err(_) => None,
    }
}

fn planned(file: &File, trains: bool) {
    let options = ImportOptions {
        sizes: BTreeMap::new(),
        mode: Mode::File,
    };
    let Ok(imported) = file.import(&options) else {
        return;
    };
    let graph = &imported.graph;
    let wrt: Vec<usize> = (0..graph.inputs.len())
        .filter(|at| graph.container(graph.inputs[*at]).dtype.is_float())
        .collect();
    let step = match trains {
        true => Step::training(graph, &wrt),
        false => Step::forward(graph),
    };
    let sizes: Bindings = imported
        .sizes
        .iter()
        .map(|(name, _)| (graph::Symbol::new(name), 3))
        .collect();
    if let Ok(plan) = step.and_then(|step| step.plan(&sizes)) {
        let _ = Report::of_plan(&plan, 2);
    }
}

fn differentiated(file: &File) {
    let options = ImportOptions {
        sizes: BTreeMap::new(),
        mode: Mode::Train,
    };
    let Ok(imported) = file.import(&options) else {
        return;
    };
    let wrt = imported
        .graph
        .inputs
        .iter()
        .map(|id| imported.graph.container(*id).name.clone());
    let options = TrainingOptions {
        loss: Loss::MeanSquaredError,
        optimizer: None,
        wrt: Some(wrt.take(2).collect()),
        gradients: true,
        label_smoothing: 0.0,
    };
    let _ = training_graph(&imported, &options);
}

/// Everything that the program does with a file, in one process.
fn all_commands(bytes: &[u8]) -> Vec<String> {
    let path = Path::new("damaged.onnx");
    let bytes = bytes::Bytes::copy_from_slice(bytes);
    let mut found = Found::default();
    let mut model = None;
    found.try_out("read", || {
        model = Model::of_bytes(path, bytes.clone()).ok();
    });
    let Some(model) = model else {
        return found.problems;
    };
    found.try_out("check", || drop(check::problems(&model)));
    found.try_out("info", || {
        drop(cost(&model.proto, &model.folder, &BTreeMap::new()));
    });
    found.try_out("optimize", || {
        if let Some(optimized) = rewritten(&model, Target::Standard, true) {
            drop(diff::diff(&model, &optimized.model));
        }
    });
    found.try_out("optimize --target ort-cpu --no-verify", || {
        drop(rewritten(&model, Target::OrtCpu, false));
    });
    let mut file = None;
    found.try_out("import", || file = File::decode(path, bytes.clone()).ok());
    if let Some(file) = file {
        found.try_out("report", || planned(&file, false));
        found.try_out("report --train", || planned(&file, true));
        found.try_out("grad", || differentiated(&file));
    }
    found.problems
}

/// Models of this repository.
fn own_models() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    ["mlp.onnx", "normalized.onnx", "unsupported.onnx"]
        .map(|name| root.join("cli/tests/data").join(name))
        .to_vec()
}

/// The standard's, one for each case.
fn node_models() -> Vec<PathBuf> {
    let folder = std::env::var_os("SHORTHAUL_NODE_CASES");
    let folder = folder.expect("SHORTHAUL_NODE_CASES names the folder of the node cases");
    let cases = std::fs::read_dir(folder).expect("the folder of the node cases");
    let mut models: Vec<PathBuf> = cases
        .flatten()
        .map(|case| case.path().join("model.onnx"))
        .filter(|path| path.is_file())
        .collect();
    models.sort();
    models
}

struct Corpus(Vec<(String, ModelProto)>);

impl Corpus {
    fn read(paths: &[PathBuf]) -> Corpus {
        let read = |path: &PathBuf| {
            let bytes = std::fs::read(path).expect("a model");
            let name = path.display().to_string();
            (name, ModelProto::decode(&*bytes).expect("a model"))
        };
        Corpus(paths.iter().map(read).collect())
    }

    fn operators(&self) -> Vec<String> {
        let nodes = self.0.iter().flat_map(|(_, m)| &m.graph);
        let names = nodes.flat_map(|g| &g.node).map(|n| n.op_type.clone());
        names.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Damaged file number `n`, and what it was made of.
    fn damaged(&self, n: usize, operators: &[String]) -> (String, Vec<u8>) {
        let mut random = Random::new(n as u64);
        let (name, model) = &self.0[random.below(self.0.len())];
        let mut model = model.clone();
        mutate(&mut model, operators, &mut random);
        let mut bytes = model.encode_to_vec();
        if random.below(10) == 0 && !bytes.is_empty() {
            let at = random.below(bytes.len());
            bytes[at] ^= 1 << random.below(8);
        }
        (format!("damage {n} to {name}"), bytes)
    }
}

/// Looks at files `0..n` on a few threads. What takes too long to wait for ends the test with its name.
fn survive(n: usize, file: impl Fn(usize) -> (String, Vec<u8>) + Sync) {
    let next = AtomicUsize::new(0);
    let problems = Mutex::new(Vec::new());
    let under_way: Arc<Mutex<BTreeMap<usize, (String, Instant)>>> = Arc::default();
    let watched = Arc::clone(&under_way);
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            for (name, since) in watched.lock().expect("whole").values() {
                if since.elapsed() > 4 * LONGEST {
                    eprintln!("{name}: no end after {} s", since.elapsed().as_secs());
                    std::process::exit(1);
                }
            }
        }
    });
    let work = || {
        loop {
            let k = next.fetch_add(1, Ordering::Relaxed);
            if k >= n {
                return;
            }
            let (name, bytes) = file(k);
            let entry = (name.clone(), Instant::now());
            under_way.lock().expect("whole").insert(k, entry);
            let found = all_commands(&bytes);
            under_way.lock().expect("whole").remove(&k);
            for problem in found {
                eprintln!("{name}: {problem}");
                problems
                    .lock()
                    .expect("whole")
                    .push(format!("{name}: {problem}"));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, |n| n.get()) {
            scope.spawn(work);
        }
    });
    let problems = problems.into_inner().expect("whole");
    assert!(
        problems.is_empty(),
        "{} problems:\n{}",
        problems.len(),
        problems.join("\n")
    );
    let most = most_memory_kib();
    assert!(
        most < MOST_MEMORY_KIB,
        "{most} KiB of memory were in use at once"
    );
    println!("{n} files, at most {most} KiB of memory");
}

/// The most memory that this process has used so far.
fn most_memory_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let number = line.and_then(|l| l.split_whitespace().next()?.parse().ok());
    number.unwrap_or(0)
}

fn n_mutations(default: usize) -> usize {
    let given = std::env::var("SHORTHAUL_MUTATIONS").ok();
    given.map_or(default, |n| n.parse().expect("a number"))
}

#[test]
fn damaged_files_of_this_repository() {
    let corpus = Corpus::read(&own_models());
    let operators = corpus.operators();
    survive(100, |n| corpus.damaged(n, &operators));
}

#[test]
#[ignore = "needs the standard's node cases in SHORTHAUL_NODE_CASES"]
fn every_node_model_through_every_command() {
    let paths = node_models();
    assert!(paths.len() > 1000, "only {} models", paths.len());
    survive(paths.len(), |n| {
        let bytes = std::fs::read(&paths[n]).expect("a model");
        (paths[n].display().to_string(), bytes)
    });
}

#[test]
#[ignore = "needs the standard's node cases in SHORTHAUL_NODE_CASES"]
fn damaged_node_models_through_every_command() {
    let corpus = Corpus::read(&node_models());
    let operators = corpus.operators();
    survive(n_mutations(2000), |n| corpus.damaged(n, &operators));
}
