//! Damaged ONNX files, and files with extreme attributes and sizes, through everything that reads one: an error or a
//! result, never a panic, a hang, or more memory than a file may take.
//!
//! The models are a few files of this repository and the standard's node cases, in the folder that
//! `SHORTHAUL_NODE_CASES` names (`cargo xtask test` writes them). Each damage follows from its number.
//! `SHORTHAUL_MUTATIONS` says how many damaged files there are, or which ones (`1200..1201`); `cargo xtask
//! mutations` sets it. `SHORTHAUL_EXTREMES` and `cargo xtask extremes` do the same for extreme attributes. Another
//! process looks at each file (`src/bin/every_command.rs`), which may die or hang without taking the test with it. A
//! file with a problem is kept beside the test's other outputs.

use onnx::proto::ModelProto;
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use tests::every_command::LONGEST;
use tests::extremes::{Attributes, make_extreme};
use tests::mutate::{Random, mutate};

/// How many damaged files there are if nobody says: as many as take less than a minute unoptimized.
const USUAL: usize = 2000;
/// How many files with extreme attributes there are if nobody says.
const USUAL_EXTREMES: usize = 400;
/// Most memory of the commands for one file; four times the size of the file if that is more.
const MOST_MEMORY_KIB: usize = 1 << 20;
/// A process that has not answered by then is taken to hang; the commands' own limit counts time on the processor.
const PATIENCE: Duration = Duration::from_secs(120);

#[test]
fn damaged_files_of_this_repository() {
    let corpus = Corpus::read(&own_models());
    survive(0..100, |n| corpus.damaged(n));
    survive(0..60, |n| corpus.extreme(n));
}

#[test]
#[ignore = "needs the standard's node cases in SHORTHAUL_NODE_CASES"]
fn every_node_model_through_every_command() {
    let paths = node_models();
    assert!(paths.len() > 1000, "only {} models", paths.len());
    survive(0..paths.len(), |n| {
        let bytes = std::fs::read(&paths[n]).expect("a model");
        (paths[n].display().to_string(), bytes)
    });
}

#[test]
#[ignore = "needs the standard's node cases in SHORTHAUL_NODE_CASES"]
fn damaged_node_models_through_every_command() {
    let corpus = Corpus::read(&node_models());
    survive(asked_for("SHORTHAUL_MUTATIONS", USUAL), |n| {
        corpus.damaged(n)
    });
}

#[test]
#[ignore = "needs the standard's node cases in SHORTHAUL_NODE_CASES"]
fn extreme_node_models_through_every_command() {
    let corpus = Corpus::read(&node_models());
    survive(asked_for("SHORTHAUL_EXTREMES", USUAL_EXTREMES), |n| {
        corpus.extreme(n)
    });
}

/// Numbers of the files that a variable asks for.
fn asked_for(variable: &str, usual: usize) -> Range<usize> {
    let number = |text: &str| text.parse().expect("a number of files");
    match std::env::var(variable) {
        Err(_) => 0..usual,
        Ok(text) => match text.split_once("..") {
            Some((from, to)) => number(from)..number(to),
            None => 0..number(&text),
        },
    }
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

/// Models to damage.
struct Corpus {
    models: Vec<(String, ModelProto)>,
    operators: Vec<String>,
    attributes: Attributes,
}

impl Corpus {
    fn read(paths: &[PathBuf]) -> Corpus {
        let read = |path: &PathBuf| {
            let bytes = std::fs::read(path).expect("a model");
            let name = path.display().to_string();
            (name, ModelProto::decode(&*bytes).expect("a model"))
        };
        let models: Vec<(String, ModelProto)> = paths.iter().map(read).collect();
        let nodes = models.iter().flat_map(|(_, m)| &m.graph);
        let names = nodes.flat_map(|g| &g.node).map(|n| n.op_type.clone());
        let operators: BTreeSet<String> = names.collect();
        Corpus {
            attributes: Attributes::new(models.iter().map(|(_, m)| m)),
            models,
            operators: operators.into_iter().collect(),
        }
    }

    /// Extreme file number `n`, and what it was made of.
    fn extreme(&self, n: usize) -> (String, Vec<u8>) {
        let mut random = Random::new((1 << 40) + n as u64);
        let (name, model) = &self.models[random.below(self.models.len())];
        let mut model = model.clone();
        make_extreme(&mut model, &self.attributes, &mut random);
        (format!("extreme {n} of {name}"), model.encode_to_vec())
    }

    /// Damaged file number `n`, and what it was made of.
    fn damaged(&self, n: usize) -> (String, Vec<u8>) {
        let mut random = Random::new(n as u64);
        let (name, model) = &self.models[random.below(self.models.len())];
        let mut model = model.clone();
        mutate(&mut model, &self.operators, &mut random);
        let mut bytes = model.encode_to_vec();
        if random.below(10) == 0 && !bytes.is_empty() {
            let at = random.below(bytes.len());
            bytes[at] ^= 1 << random.below(8);
        }
        (format!("damage {n} to {name}"), bytes)
    }
}

/// What is known after all files.
#[derive(Default)]
struct Statistics {
    /// How many files each command came to a result on.
    passed: BTreeMap<String, usize>,
    /// The most memory that a file took.
    most_kib: (usize, String),
    problems: Vec<String>,
}

impl Statistics {
    fn add(&mut self, name: &str, bytes: &[u8], answer: Answer) {
        for command in answer.passed {
            *self.passed.entry(command).or_default() += 1;
        }
        let mut problems = answer.problems;
        let most = MOST_MEMORY_KIB.max(4 * bytes.len() / 1024);
        if answer.kib > most {
            problems.push(format!("{} KiB of memory were in use at once", answer.kib));
        }
        if answer.kib > self.most_kib.0 {
            self.most_kib = (answer.kib, name.to_string());
        }
        if !problems.is_empty() {
            let kept = keep(name, bytes);
            for problem in problems {
                let line = format!("{name}: {problem} ({})", kept.display());
                eprintln!("{line}");
                self.problems.push(line);
            }
        }
    }
}

/// Writes a file that has a problem, to look at it.
fn keep(name: &str, bytes: &[u8]) -> PathBuf {
    let case = Path::new(name).parent().and_then(Path::file_name);
    let case = case.map_or("model", |case| case.to_str().unwrap_or("model"));
    let (kind, number) = match name.split(' ').collect::<Vec<_>>()[..] {
        [kind @ ("damage" | "extreme"), number, ..] => (kind, number),
        _ => ("whole", ""),
    };
    let file = format!("{case}-{kind}{number}.onnx");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(file);
    std::fs::write(&path, bytes).expect("room for a damaged file");
    path
}

/// Has every command look at the files with these numbers.
fn survive(numbers: Range<usize>, file: impl Fn(usize) -> (String, Vec<u8>) + Sync) {
    let n_files = numbers.len();
    let next = AtomicUsize::new(numbers.start);
    let statistics = Mutex::new(Statistics::default());
    let work = || {
        let mut looker = Looker::start();
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= numbers.end {
                return;
            }
            let (name, bytes) = file(n);
            let answer = looker.ask(&bytes);
            if answer.died {
                looker = Looker::start();
            }
            let mut statistics = statistics.lock().expect("whole");
            statistics.add(&name, &bytes, answer);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, |n| n.get()) {
            scope.spawn(work);
        }
    });
    let statistics = statistics.into_inner().expect("whole");
    println!("{n_files} files; a result of");
    for (command, n) in &statistics.passed {
        println!("  {command}: {n}");
    }
    let (kib, name) = &statistics.most_kib;
    println!("most memory: {kib} KiB, {name}");
    println!("problems: {}", statistics.problems.len());
    let problems = &statistics.problems;
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// A process that looks at files.
struct Looker {
    process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

/// What it found of one file.
#[derive(Default)]
struct Answer {
    passed: Vec<String>,
    problems: Vec<String>,
    kib: usize,
    died: bool,
}

impl Looker {
    fn start() -> Looker {
        let mut command = Command::new(env!("CARGO_BIN_EXE_every-command"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("every-command starts");
        let input = process.stdin.take().expect("a pipe");
        let output = BufReader::new(process.stdout.take().expect("a pipe"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Looker {
            process,
            input,
            lines,
        }
    }

    fn ask(&mut self, bytes: &[u8]) -> Answer {
        let mut answer = Answer::default();
        let length = (bytes.len() as u64).to_le_bytes();
        let sent = self.input.write_all(&length);
        let sent = sent.and_then(|()| self.input.write_all(bytes));
        if let Err(error) = sent.and_then(|()| self.input.flush()) {
            return self.ended(answer, &format!("the process is gone: {error}"));
        }
        loop {
            let line = match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => {
                    let what = format!("no end after {} s", PATIENCE.as_secs());
                    return self.ended(answer, &what);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return self.ended(answer, "the process died");
                }
            };
            match line.split_once(' ') {
                Some(("passed", command)) => answer.passed.push(command.to_string()),
                Some(("problem", what)) => answer.problems.push(what.to_string()),
                Some(("done", kib)) => {
                    answer.kib = kib.parse().expect("a number of KiB");
                    return answer;
                }
                _ => panic!("every-command says `{line}`"),
            }
        }
    }

    /// The answer of a process that will give no more.
    fn ended(&mut self, mut answer: Answer, what: &str) -> Answer {
        // It may be gone already.
        let _ = self.process.kill();
        let status = self.process.wait().map(|status| status.to_string());
        let status = status.unwrap_or_else(|error| error.to_string());
        answer.problems.push(format!("{what} ({status})"));
        answer.died = true;
        answer
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A command's limit is well below the test's patience, or no hang would have a name.
const _: () = assert!(4 * LONGEST.as_secs() < PATIENCE.as_secs());
