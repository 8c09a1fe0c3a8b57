//! The `shorthaul` program: looks at ONNX models before anything is trained.
//!
//! Owns arguments, output and exit codes; every number comes from the `compiler` room. Exit code 0:
//! done; 1: the model or the machine stands in the way (one message on standard error); 2: the
//! command line is wrong.

mod grad;
mod info;
mod optimize;
mod report;
mod sizes;
mod units;

use clap::{Args, Parser, Subcommand};
use compiler::importer::onnx::{Mode, Options};
use compiler::training_graph::{Loss, Optimizer, TrainingOptions};
use onnx::rewrite::Target;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Looks at ONNX models: what is in them, and what Shorthaul makes of them.
#[derive(Debug, Parser)]
#[command(name = "shorthaul", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  shorthaul info model.onnx
  shorthaul report model.onnx --bind batch=8
  shorthaul report model.onnx --bind batch=8 --train --json > report.json
  shorthaul grad model.onnx -o train.onnx --loss cross-entropy --optimizer adam";

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
                      shorthaul report model.onnx --bind batch=8 --train\n\nNothing is compiled or run."
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
    },
    /// A better file that was shown to give what the original gives
    Optimize {
        /// The ONNX file
        #[arg(value_name = "MODEL.onnx")]
        path: PathBuf,
        /// The file to write
        #[arg(short, long, value_name = "OUT.onnx")]
        out: PathBuf,
        /// Operators to use: standard, ort-cpu, ort-cuda
        #[arg(long, default_value_t = Target::Standard)]
        target: Target,
        /// Write without proof
        #[arg(long)]
        no_verify: bool,
        /// Bytes of constants that one folding may add to the file
        #[arg(long, value_name = "BYTES", default_value_t = 16 << 10)]
        fold_limit: usize,
        /// Rules not to use; see `shorthaul optimize --help`
        #[arg(long, value_name = "RULES", value_delimiter = ',')]
        without: Vec<String>,
        /// A value for a dynamic size; repeat it for several
        #[arg(long, value_name = "NAME=SIZE", value_parser = sizes::parse)]
        bind: Vec<(String, i64)>,
    },
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
    let text = match &cli.command {
        Command::Info(model) => info::run(&model.path, &model.options(), model.json),
        Command::Report {
            model,
            train,
            threads,
        } => report::run(&model.path, &model.options(), *train, *threads, model.json),
        Command::Optimize {
            path,
            out,
            target,
            no_verify,
            fold_limit,
            without,
            bind,
        } => {
            let rewriting = onnx::rewrite::Options {
                target: *target,
                fold_limit: *fold_limit,
                without: without.iter().cloned().collect(),
                ..Default::default()
            };
            let sizes = bind.iter().cloned().collect();
            let verifying = onnx::verify::Options {
                sizes,
                ..Default::default()
            };
            let verifying = (!no_verify).then_some(verifying);
            optimize::run(
                path,
                out,
                &optimize::Optimize {
                    rewriting,
                    verifying,
                },
            )
        }
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
            grad::run(path, out, &options, &training)
        }
    };
    match text {
        Ok(text) => print(&text),
        Err(error) => {
            // Nothing is left to do if even standard error is gone.
            let _ = writeln!(io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Writes to standard output; a reader that has seen enough (`| head`) is no error.
fn print(text: &str) -> ExitCode {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let _ = writeln!(io::stderr(), "error: cannot write the result: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}
