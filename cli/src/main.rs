//! The `shorthaul` program: makes ONNX files better, compares them, looks into them.
//!
//! Owns arguments, output and exit codes; every number comes from the `compiler` and `onnx` rooms.
//! Exit code 0: done; 1: the model or the machine stands in the way (one message on standard error);
//! 2: the command line is wrong; 3: done, and the answer is no; 130: interrupted.

mod answer;
mod bisect;
mod check;
mod diff;
mod grad;
mod info;
mod interrupt;
mod optimize;
mod ort;
mod page;
mod progress;
mod report;
mod run;
mod sizes;
mod style;
mod summary;
mod tensors;
#[cfg(feature = "tract")]
mod tract;
mod units;

use answer::Answer;
use anyhow::Result;
use clap::{Args, CommandFactory, Parser, Subcommand};
use compiler::importer::onnx::{Mode, Options};
use compiler::training_graph::{Loss, Optimizer, TrainingOptions};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use style::Style;

/// Makes ONNX files better and proves it, turns them into training steps, compares them, looks into them.
#[derive(Debug, Parser)]
#[command(name = "shorthaul", version, after_help = EXAMPLES)]
struct Cli {
    /// Show no progress
    #[arg(short, long, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  shorthaul optimize model.onnx -o smaller.onnx
  shorthaul check model.onnx smaller.onnx
  shorthaul info model.onnx
  shorthaul run model.onnx --random 0 --out outputs.npz
  shorthaul report model.onnx --bind batch=8
  shorthaul report model.onnx --bind batch=8 --train --json > report.json
  shorthaul grad model.onnx -o train.onnx --loss cross-entropy --optimizer adam

Exit codes:
  0    done; of `optimize`: verified and written
  1    the model or the machine stands in the way: one message, and the target is as it was
  2    the command line is wrong
  3    done, and the answer is no: `check` found problems, or files differ
  130  interrupted; nothing is left behind";

#[derive(Debug, Subcommand)]
enum Command {
    /// Inputs, outputs, dynamic sizes, parameters and operators of a model
    #[command(
        after_help = "Examples:\n  shorthaul info model.onnx\n  shorthaul info model.onnx --json"
    )]
    Info(Model),
    /// Kernels after fusion: bytes moved against the least possible, arithmetic, memory
    #[command(
        after_help = "Examples:\n  shorthaul report model.onnx --bind batch=8 --bind seq=128\n  \
                      shorthaul report model.onnx --bind batch=8 --train\n  \
                      shorthaul report model.onnx --bind batch=8 --html report.html\n\nNothing is compiled or run."
    )]
    Report {
        #[command(flatten)]
        model: Model,
        /// Differentiate first: forward and backward of a training step
        #[arg(long)]
        train: bool,
        /// Threads to plan for
        #[arg(long, default_value_t = default_threads(), value_parser = clap::value_parser!(u16).range(1..=1024))]
        threads: u16,
        /// Write one page with the graph, its bytes and its kernels; for any ONNX file
        #[arg(long, value_name = "FILE.html", conflicts_with = "json")]
        html: Option<PathBuf>,
    },
    /// A better file that was shown to give what the original gives
    Optimize(optimize::Optimize),
    /// Whether a file is well formed, and whether another one gives the same
    Check(check::Check),
    /// Where two files begin to differ, value by value
    Bisect(bisect::Bisect),
    /// What two files have and have not in common, without running them
    Diff(diff::DiffArgs),
    /// The outputs of a model on given or made-up inputs
    Run(run::Run),
    /// The gradients of a model, and an optimizer's update, as an ONNX file
    #[command(after_help = GRAD_EXAMPLES)]
    Grad {
        /// The ONNX file
        #[arg(value_name = "MODEL.onnx")]
        path: PathBuf,
        /// The file to write
        #[arg(short, long, value_name = "TRAIN.onnx")]
        out: PathBuf,
        /// What is minimized: cross-entropy, mse, or an output of the model
        #[arg(long)]
        loss: Loss,
        /// How parameters are updated: sgd, momentum, adam, adamw
        #[arg(long)]
        optimizer: Option<Optimizer>,
        /// Initializers or inputs to differentiate (default: every trainable initializer)
        #[arg(long, value_name = "NAMES", value_delimiter = ',')]
        wrt: Option<Vec<String>>,
        /// How much of each label cross-entropy spreads over all classes
        #[arg(long, value_name = "PART", default_value_t = 0.0)]
        label_smoothing: f64,
        /// The form of BatchNormalization and Dropout: file (each node's own), train (statistics of
        /// the batch, values dropped), eval (running statistics, nothing dropped)
        #[arg(long, default_value = "file")]
        mode: Mode,
        /// A value for a dynamic size; repeat it for several
        #[arg(long, value_name = "NAME=SIZE", value_parser = sizes::parse)]
        bind: Vec<(String, i64)>,
    },
    /// A script that completes this program's commands in a shell
    #[command(
        after_help = "Examples:\n  shorthaul completions bash > ~/.local/share/bash-completion/completions/shorthaul\n  \
                      shorthaul completions zsh > ~/.zfunc/_shorthaul\n  \
                      shorthaul completions fish > ~/.config/fish/completions/shorthaul.fish"
    )]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// Ways to train.
const GRAD_EXAMPLES: &str = "\
Examples:
  shorthaul grad model.onnx -o train.onnx --loss cross-entropy
  shorthaul grad model.onnx -o train.onnx --loss mse --optimizer adam --wrt fc.weight,fc.bias
  shorthaul grad resnet.onnx -o train.onnx --loss cross-entropy --optimizer adamw --mode train

The file has the model's inputs, its initializers (which keep their values as defaults), `labels` or
`target`, and with an optimizer `lr` and its state; it gives `loss`, NAME.grad and NAME.next.
PyTorch exports BatchNormalization in evaluation form even from a model in training mode: --mode train
normalizes by the batch instead, and NAME.next then holds the running statistics as well.";

#[derive(Args, Debug)]
struct Model {
    /// The ONNX file
    #[arg(value_name = "MODEL.onnx")]
    path: PathBuf,
    /// A value for a dynamic size; repeat it for several
    #[arg(long, value_name = "NAME=SIZE", value_parser = sizes::parse)]
    bind: Vec<(String, i64)>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Model {
    fn options(&self) -> Options {
        Options {
            sizes: self.bind.iter().cloned().collect(),
            mode: Mode::File,
        }
    }
}

fn default_threads() -> u16 {
    let n = std::thread::available_parallelism().map_or(1, usize::from);
    u16::try_from(n).unwrap_or(1024).min(1024)
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let answer = interrupt::install()
        .map_err(anyhow::Error::from)
        .and_then(|()| run(&cli));
    match answer {
        Ok(answer) => match (print(&answer.text), answer.is_yes) {
            (true, true) => ExitCode::SUCCESS,
            (true, false) => ExitCode::from(3),
            (false, _) => ExitCode::FAILURE,
        },
        Err(error) => {
            let mark = Style::of_errors().bad("error:");
            // Nothing is left to do if even standard error is gone.
            let _ = writeln!(io::stderr(), "{mark} {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<Answer> {
    match &cli.command {
        Command::Info(model) => {
            info::run(&model.path, &model.options(), model.json).map(Answer::yes)
        }
        Command::Report {
            model,
            train,
            threads,
            html: Some(out),
        } => report::page(&model.path, &model.options(), *train, *threads, out).map(Answer::yes),
        Command::Report {
            model,
            train,
            threads,
            html: None,
        } => report::run(&model.path, &model.options(), *train, *threads, model.json)
            .map(Answer::yes),
        Command::Optimize(args) => optimize::run(args, cli.quiet),
        Command::Check(args) => check::run(args, cli.quiet),
        Command::Bisect(args) => bisect::run(args, cli.quiet),
        Command::Diff(args) => diff::run(args),
        Command::Run(args) => run::run(args, cli.quiet),
        Command::Grad {
            path,
            out,
            loss,
            optimizer,
            wrt,
            label_smoothing,
            mode,
            bind,
        } => {
            let options = Options {
                sizes: bind.iter().cloned().collect(),
                mode: *mode,
            };
            let training = TrainingOptions {
                loss: loss.clone(),
                optimizer: *optimizer,
                wrt: wrt.clone(),
                label_smoothing: *label_smoothing,
            };
            grad::run(path, out, &options, &training).map(Answer::yes)
        }
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "shorthaul", &mut script);
            Ok(Answer::yes(String::from_utf8(script)?))
        }
    }
}

/// Writes to standard output; whether that went well. A reader that has seen enough (`| head`) is no
/// error.
fn print(text: &str) -> bool {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let _ = writeln!(io::stderr(), "error: cannot write the result: {error}");
            false
        }
        _ => true,
    }
}
