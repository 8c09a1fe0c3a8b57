//! The `shorthaul` program: optimizes, differentiates, checks and compares ONNX files.
//!
//! Owns arguments, output and exit codes; every number comes from the `compiler` and `onnx` rooms.
//! Exit code 0: success; 1: failure, with one message on standard error; 2: the command line is wrong;
//! 3: success, but a problem or a difference was found; 130: interrupted.

mod answer;
mod bisect;
mod check;
mod diff;
mod grad;
mod info;
mod interrupt;
mod optimize;
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
mod tune;
mod units;

use answer::Answer;
use anyhow::{Context, Result};
use clap::{Args, CommandFactory, Parser, Subcommand};
use compiler::graph::SymExpr;
use compiler::importer::onnx::{Mode, Options};
use compiler::internal_error::caught_deep;
use onnx::file::Staged;
use progress::Progress;
use serde_json::json;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use style::Style;

/// Optimizes ONNX files and verifies the result, turns models into training steps, checks and compares files.
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
  shorthaul tune model.onnx --bind batch=8 --train -o recipe.toml

Exit codes:
  0    success; for `optimize`: the file is verified and written
  1    failure: one message on standard error, with --json also {\"error\": …} on standard output; the
       output file is unchanged
  2    the command line is wrong
  3    success, but `check` found problems, or the files differ
  130  interrupted; no temporary file is left";

#[derive(Debug, Subcommand)]
enum Command {
    /// Show inputs, outputs, dynamic sizes, parameters and operators of a model
    #[command(
        after_help = "Examples:\n  shorthaul info model.onnx\n  shorthaul info model.onnx --json"
    )]
    Info(Model),
    /// Show the kernels that Shorthaul would make, with bytes moved, arithmetic and memory
    #[command(
        after_help = "Examples:\n  shorthaul report model.onnx --bind batch=8 --bind seq=128\n  \
                      shorthaul report model.onnx --bind batch=8 --train\n  \
                      shorthaul report model.onnx --bind batch=8 --html report.html\n\nNothing is compiled or run."
    )]
    Report {
        #[command(flatten)]
        model: Model,
        /// Report on a training step (forward and backward) instead of inference
        #[arg(long)]
        train: bool,
        /// Number of threads to plan for
        #[arg(long, default_value_t = default_threads(), value_parser = clap::value_parser!(u16).range(1..=1024))]
        threads: u16,
        /// Plan with the decisions of a recipe, for example one from `tune`
        #[arg(long, value_name = "FILE.toml", conflicts_with = "html")]
        recipe: Option<PathBuf>,
        /// Write an HTML page with the graph and, if the model can be compiled, its kernels
        #[arg(long, value_name = "FILE.html", conflicts_with = "json")]
        html: Option<PathBuf>,
    },
    /// Write a smaller, faster file that is verified to compute the same
    Optimize(Box<optimize::Optimize>),
    /// List problems of a file, or check whether two files compute the same
    Check(check::Check),
    /// Find the first value in which two files differ
    Bisect(bisect::Bisect),
    /// List what was added, removed or changed between two files, without running them
    Diff(diff::DiffArgs),
    /// Run a model on given or made-up inputs
    Run(run::Run),
    /// Write a training step (gradients and the optimizer's update) as an ONNX file
    Grad(grad::Grad),
    /// Time other ways to compute the kernels of a model, and write the faster ones as a recipe
    Tune(tune::Tune),
    /// Print a script that completes the commands of this program in a shell
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

#[derive(Args, Debug)]
struct Model {
    /// The ONNX file
    #[arg(value_name = "MODEL.onnx")]
    path: PathBuf,
    /// A value for a dynamic size: a number, or a sum of other sizes that have values (total=past+new); repeat it for
    /// several
    #[arg(long, value_name = "NAME=SIZE", value_parser = sizes::parse_positive)]
    bind: Vec<(String, SymExpr)>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Model {
    fn options(&self) -> Result<Options> {
        Ok(Options {
            sizes: sizes::numbers("--bind", &self.bind)?,
            mode: Mode::File,
        })
    }
}

fn default_threads() -> u16 {
    let n = std::thread::available_parallelism().map_or(1, usize::from);
    u16::try_from(n).unwrap_or(1024).min(1024)
}

impl Command {
    /// Whether the answer is to be JSON.
    fn is_json(&self) -> bool {
        match self {
            Command::Info(model) | Command::Report { model, .. } => model.json,
            Command::Optimize(args) => args.json,
            Command::Check(args) => args.json,
            Command::Bisect(args) => args.json,
            Command::Diff(args) => args.json,
            Command::Run(args) => args.json,
            Command::Grad(args) => args.json,
            Command::Tune(args) => args.json,
            Command::Completions { .. } => false,
        }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let answer = interrupt::install().and_then(|()| caught_deep(|| run(&cli))?);
    let told = answer.map_err(|error| {
        if cli.command.is_json() {
            // The message below says the same to people.
            let _ = print(&format!("{:#}\n", json!({"error": format!("{error:#}")})));
        }
        error
    });
    match told.and_then(tell) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(3),
        Err(error) => {
            let mark = Style::of_errors().bad("error:");
            // Nothing is left to do if even standard error is gone.
            let _ = writeln!(io::stderr(), "{mark} {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints an answer, and only then puts its file in its place. Returns whether the answer is yes.
fn tell(answer: Answer) -> Result<bool> {
    print(&answer.text).context("cannot print the result")?;
    answer.file.map(Staged::place).transpose()?;
    Ok(answer.is_yes)
}

fn run(cli: &Cli) -> Result<Answer> {
    let progress = || Progress::new(cli.quiet);
    match &cli.command {
        Command::Info(model) => {
            info::run(&model.path, &model.options()?, model.json, progress()).map(Answer::yes)
        }
        Command::Report {
            model,
            train,
            threads,
            recipe,
            html,
        } => {
            let (path, options) = (&model.path, model.options()?);
            match html {
                Some(out) => report::page(path, &options, *train, *threads, out, progress()),
                None => {
                    let recipe = recipe.as_deref();
                    let json = model.json;
                    report::run(path, &options, *train, *threads, recipe, json, progress())
                }
            }
        }
        Command::Optimize(args) => optimize::run(args, cli.quiet),
        Command::Check(args) => check::run(args, cli.quiet),
        Command::Bisect(args) => bisect::run(args, cli.quiet),
        Command::Diff(args) => diff::run(args, cli.quiet),
        Command::Run(args) => run::run(args, cli.quiet),
        Command::Grad(args) => grad::run(args, cli.quiet),
        Command::Tune(args) => tune::run(args, cli.quiet),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "shorthaul", &mut script);
            Ok(Answer::yes(String::from_utf8(script)?))
        }
    }
}

/// Writes to standard output. A reader that has seen enough (`| head`) is no error.
fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        printed => printed,
    }
}
