//! What the program's commands do with one ONNX file, called as the program calls them, in this process.
//!
//! Owns the list of commands and which of them came to a result. A panic, or an inconsistent file that Shorthaul wrote,
//! is a problem; an error that names what is wrong with the user's file is not.

use compiler::Step;
use compiler::importer::onnx::{File, Mode, Options as ImportOptions};
use compiler::internal_error::caught_deep;
use compiler::report::Report;
use compiler::training_graph::{Loss, OptimizerState, TrainingOptions, training_graph};
use graph::Bindings;
use onnx::cost::cost;
use onnx::file::Model;
use onnx::rewrite::Target;
use onnx::{check, diff, optimize, verify};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// A command that computes for longer hangs. Time on the processor counts, since the machine may be busy.
pub const LONGEST: Duration = Duration::from_secs(10);

/// What the commands made of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Commands that came to a result instead of an error, in order.
    pub passed: Vec<String>,
    /// Panics, hangs, and results that do not fit together.
    pub problems: Vec<String>,
}

impl Outcome {
    /// Runs `work`, which returns something if the command came to a result.
    fn try_out<T: Send>(
        &mut self,
        command: &str,
        work: impl FnOnce() -> Option<T> + Send,
    ) -> Option<T> {
        let before = processor_time();
        let done = caught_deep(work);
        let took = processor_time().saturating_sub(before);
        if took > LONGEST {
            let seconds = took.as_secs();
            self.problems.push(format!("{command}: took {seconds} s"));
        }
        match done {
            Ok(result) => {
                if result.is_some() {
                    self.passed.push(command.to_string());
                }
                result
            }
            Err(error) => {
                self.problems.push(format!("{command}: {error}"));
                None
            }
        }
    }
}

/// Runs every command on a file.
pub fn every_command(bytes: &[u8]) -> Outcome {
    let path = Path::new("damaged.onnx");
    let bytes = bytes::Bytes::copy_from_slice(bytes);
    let mut outcome = Outcome::default();
    let read = || Model::of_bytes(path, bytes.clone()).ok();
    let Some(model) = outcome.try_out("read", read) else {
        return outcome;
    };
    outcome.try_out("check", || {
        check::errors(&model)
            .is_empty()
            .then(|| check::problems(&model))
    });
    outcome.try_out("info", || {
        Some(cost(&model.proto, &model.folder, &BTreeMap::new()))
    });
    outcome.try_out("optimize", || {
        let optimized = optimized(&model, Target::Standard, true)?;
        Some(diff::diff(&model, &optimized.model))
    });
    outcome.try_out("optimize --target ort-cpu --no-verify", || {
        optimized(&model, Target::OrtCpu, false)
    });
    let decode = || File::decode(path, bytes.clone()).ok();
    if let Some(file) = outcome.try_out("import", decode) {
        outcome.try_out("report", || reported(&file, false));
        outcome.try_out("report --train", || reported(&file, true));
        outcome.try_out("grad", || differentiated(&file));
    }
    outcome
}

fn optimized(model: &Model, target: Target, verified: bool) -> Option<optimize::Optimized> {
    let options = optimize::Options {
        rewriting: onnx::rewrite::Options {
            target,
            ..Default::default()
        },
        verifying: verified.then(verify::Options::default),
    };
    match optimize::optimize(model, &options, &mut |_| ()) {
        Ok(optimized) => Some(optimized),
        // A rewrite of a damaged file that broke it is a defect of Shorthaul.
        Err(error @ optimize::OptimizeError::Broken { .. }) => panic!("{error}"),
        Err(_) => None,
    }
}

fn reported(file: &File, trains: bool) -> Option<Report> {
    let options = ImportOptions {
        sizes: BTreeMap::new(),
        mode: Mode::File,
    };
    let imported = file.import(&options).ok()?;
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
    let plan = step.and_then(|step| step.plan(&sizes)).ok()?;
    Report::of_plan(&plan, 2).ok()
}

fn differentiated(file: &File) -> Option<()> {
    let options = ImportOptions {
        sizes: BTreeMap::new(),
        mode: Mode::Train,
    };
    let imported = file.import(&options).ok()?;
    let wrt = imported
        .graph
        .inputs
        .iter()
        .map(|id| imported.graph.container(*id).name.clone());
    let options = TrainingOptions {
        output: None,
        loss: Loss::MeanSquaredError,
        optimizer: None,
        optimizer_state: OptimizerState::Outside,
        wrt: Some(wrt.take(2).collect()),
        gradients: true,
        label_smoothing: 0.0,
    };
    training_graph(&imported, &options).ok().map(drop)
}

/// Time that this process has had on the processor, to a hundredth of a second.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name in parentheses may have spaces. Fields 14 and 15, counted from 1, are user and system ticks.
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after_name.split_whitespace().skip(11).take(2);
    let ticks: u64 = ticks.filter_map(|n| n.parse::<u64>().ok()).sum();
    // Linux counts a hundred ticks a second for user programs.
    Duration::from_millis(10 * ticks)
}
