//! `shorthaul tune`: faster ways to compute the kernels of a model, found by measurement, as a recipe.
//!
//! The search is `compiler::tuning`'s. What it learns is kept in the cache folder, in the database that the Python
//! package uses too. Ctrl-C ends the search, and the recipe has what was found so far.

use crate::answer::{Answer, apart};
use crate::progress::Progress;
use crate::report::{read, read_recipe, step};
use crate::{default_threads, interrupt, sizes};
use anyhow::{Context, Result, bail};
use clap::Args;
use compiler::cutout::{time, time_steps};
use compiler::graph::{Bindings, Machine, SymExpr};
use compiler::importer::onnx::{Mode, Options};
use compiler::kernels::compile::CompileOptions;
use compiler::kernels::progress::Progress as Listener;
use compiler::recipe::{RecipeFile, Section, fingerprint};
use compiler::steering::Described;
use compiler::tuning::{Tuned, Tuner, ratio};
use compiler::tuning_database::{Database, file_of_this_machine};
use compiler::{CompileError, Executable, PlanOptions, Step};
use onnx::file;
use serde_json::json;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// For how many seconds whole steps run in turns.
const CHECKED_S: f64 = 3.0;

/// What to tune.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct Tune {
    /// The ONNX file
    #[arg(value_name = "MODEL.onnx")]
    path: PathBuf,
    /// The recipe to write
    #[arg(short, long, value_name = "RECIPE.toml")]
    out: PathBuf,
    /// A value for a dynamic size: a number, or a sum of other sizes that have values (total=past+new); repeat it for
    /// several
    #[arg(long, value_name = "NAME=SIZE", value_parser = sizes::parse_positive)]
    bind: Vec<(String, SymExpr)>,
    /// Tune a training step (forward and backward) instead of inference
    #[arg(long)]
    train: bool,
    /// Number of threads
    #[arg(long, default_value_t = default_threads(), value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Seconds in which kernels are timed; compiling takes additional time
    #[arg(long, default_value_t = 60.0, value_parser = positive)]
    seconds: f64,
    /// A recipe to start from
    #[arg(long, value_name = "FILE.toml")]
    recipe: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const HELP: &str = "\
Examples:
  shorthaul tune model.onnx --bind batch=8 --train -o recipe.toml
  shorthaul tune model.onnx --bind batch=8 --train -o better.toml --recipe recipe.toml --seconds 300
  shorthaul report model.onnx --bind batch=8 --train --recipe recipe.toml

Ctrl-C ends the search; the recipe has what was found so far. The measured times are kept in the cache folder,
and other models with the same kernels use them. Tune on a machine that does nothing else.";

fn positive(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "it is not a number".to_string())?;
    match seconds > 0.0 && seconds <= 1e6 {
        true => Ok(seconds),
        false => Err("it must be above 0 and at most 1000000".into()),
    }
}

/// Tunes, and writes the recipe.
///
/// # Errors
/// The file cannot be read, planned or compiled; the recipe cannot be read or written.
pub fn run(args: &Tune, quiet: bool) -> Result<Answer> {
    apart(&args.out)?;
    let mut progress = Progress::new(quiet);
    progress.stage("reading");
    let given = args.recipe.as_deref().map(read_recipe).transpose()?;
    let options = Options {
        sizes: sizes::numbers("--bind", &args.bind)?,
        mode: Mode::File,
    };
    let read = read(&args.path, &options, args.train)?;
    let step = step(&read.model, args.train)
        .with_context(|| format!("cannot plan {}", args.path.display()))?;
    let mut heard = Heard::default();
    let compile = CompileOptions::from_environment(&mut heard)?;
    let folder = compile.cache.root();
    let (mut database, warning) = Database::open(&file_of_this_machine(folder, "tuning"));
    heard.warnings.extend(warning);
    let start = options_of(&step, args, given, folder, &mut heard)?;
    let session = Session {
        args,
        step: &step,
        compile: &compile,
        start,
    };
    interrupt::be_patient(true);
    let mut tuned = session.tune(&mut database, &mut progress, &mut heard)?;
    let step_ratio = session.checked(&mut tuned, &mut progress, &mut heard)?;
    interrupt::be_patient(false);
    let recipe = session.file(&tuned)?;
    drop(progress);
    for warning in &heard.warnings {
        // Nothing is left to do if even standard error is gone.
        let _ = writeln!(io::stderr(), "warning: {warning}");
    }
    let staged = file::stage_bytes(recipe.text().as_bytes(), &args.out, &[&args.path])?;
    let text = match args.json {
        true => {
            let value = json!({
                "path": args.path.display().to_string(),
                "recipe": args.out.display().to_string(),
                "ways_timed": tuned.n_tried,
                "known": database.n_used(),
                "failed": tuned.failed,
                "changes": tuned.kept,
                "step_ratio": step_ratio,
                "interrupted": tuned.is_interrupted,
            });
            format!("{value:#}\n")
        }
        false => read.found_text() + &text(args, &tuned, database.n_used(), step_ratio),
    };
    Ok(Answer::with(text, staged))
}

/// Warnings of the compiler, and whether to stop.
#[derive(Default)]
struct Heard {
    warnings: Vec<String>,
}

impl Listener for Heard {
    fn warn(&mut self, message: &str) {
        self.warnings.push(message.to_string());
    }

    fn is_interrupted(&mut self) -> bool {
        interrupt::is_asked()
    }
}

/// How the step is planned: with the recipe to start from and the limits of this machine, where they were measured.
fn options_of(
    step: &Step,
    args: &Tune,
    given: Option<RecipeFile>,
    folder: &Path,
    heard: &mut Heard,
) -> Result<PlanOptions> {
    let mut options = PlanOptions {
        machine: kept_machine(folder, heard),
        threads: usize::from(args.threads),
        ..PlanOptions::default()
    };
    if let Some(given) = given {
        let chosen = given.for_step(step.graph(), args.train)?;
        if !chosen.is_for_program {
            bail!(
                "the recipe belongs to another model: it has no section whose nodes are those of {}",
                args.path.display()
            );
        }
        options.recipe = chosen.recipe;
    }
    Ok(options)
}

/// The limits that `shorthaul.machine()` of the Python package measured and kept.
fn kept_machine(folder: &Path, heard: &mut Heard) -> Option<Machine> {
    let path = file_of_this_machine(folder, "machine");
    let text = fs::read_to_string(&path).ok()?;
    let machine = serde_json::from_str(&text);
    if let Err(error) = &machine {
        heard.warnings.push(format!(
            "{} does not hold the limits of a machine ({error}); assumed limits are used",
            path.display()
        ));
    }
    machine.ok()
}

/// One run of the command.
struct Session<'a> {
    args: &'a Tune,
    step: &'a Step,
    compile: &'a CompileOptions,
    start: PlanOptions,
}

impl Session<'_> {
    fn threads(&self) -> usize {
        usize::from(self.args.threads)
    }

    fn tune(
        &self,
        database: &mut Database,
        progress: &mut Progress,
        heard: &mut Heard,
    ) -> Result<Tuned, CompileError> {
        let mut tuner = Tuner {
            step: self.step,
            sizes: &Bindings::new(),
            options: self.start.clone(),
            target: &self.compile.target,
            toolchain: self.compile.toolchain.identity(),
            database,
            say: &mut |line| progress.stage(line),
        };
        tuner.tune(self.args.seconds, &mut |cutouts, seconds| {
            time(cutouts, self.threads(), self.compile, seconds, heard)
        })
    }

    /// The time of a whole step with the recipe divided by that without it. A recipe that is not faster is dropped.
    /// After an interruption, nothing is measured.
    fn checked(
        &self,
        tuned: &mut Tuned,
        progress: &mut Progress,
        heard: &mut Heard,
    ) -> Result<Option<f64>, CompileError> {
        if tuned.is_interrupted || tuned.kept.is_empty() {
            return Ok(None);
        }
        progress.stage("measuring whole steps");
        let with_recipe = PlanOptions {
            recipe: tuned.recipe.clone(),
            ..self.start.clone()
        };
        let mut steps = Vec::new();
        for options in [&self.start, &with_recipe] {
            let plan = self.step.plan_with(&Bindings::new(), options)?;
            match Executable::build(plan, self.compile, self.threads(), heard) {
                Ok(step) => steps.push(step),
                Err(error) => return interrupted(error, tuned),
            }
        }
        match time_steps(steps, self.threads(), CHECKED_S, heard) {
            Ok(times) => {
                let ratio = ratio(&times[0], &times[1]);
                if ratio >= 1.0 {
                    tuned.recipe.clone_from(&self.start.recipe);
                    tuned.kept.clear();
                }
                Ok(Some(ratio))
            }
            Err(error) => interrupted(error, tuned),
        }
    }

    /// All decisions of the step, planned with what was found.
    fn file(&self, tuned: &Tuned) -> Result<RecipeFile, CompileError> {
        let options = PlanOptions {
            recipe: tuned.recipe.clone(),
            ..self.start.clone()
        };
        let plan = self.step.plan_with(&Bindings::new(), &options)?;
        let described = Described::of_plan(&plan, self.threads())?;
        let section = Section {
            structure: fingerprint(self.step.graph()),
            training: self.args.train,
            decisions: described.decisions.into_iter().map(|d| d.entry).collect(),
        };
        let name = self.args.path.file_stem().unwrap_or_default();
        Ok(RecipeFile::new(&name.to_string_lossy(), vec![section]))
    }
}

/// An interruption is not a failure.
fn interrupted(error: CompileError, tuned: &mut Tuned) -> Result<Option<f64>, CompileError> {
    match interrupt::is_asked() {
        true => {
            tuned.is_interrupted = true;
            Ok(None)
        }
        false => Err(error),
    }
}

fn text(args: &Tune, tuned: &Tuned, n_known: usize, step_ratio: Option<f64>) -> String {
    let mut lines = vec![format!(
        "{}: timed {} ways to compute kernels, {n_known} known from earlier runs, {} failed, {} decisions changed",
        args.path.display(),
        tuned.n_tried,
        tuned.failed.len(),
        tuned.kept.len()
    )];
    lines.extend(tuned.kept.iter().map(|line| format!("  {line}")));
    lines.extend(tuned.failed.iter().map(|line| format!("  failed: {line}")));
    match step_ratio {
        Some(ratio) if ratio < 1.0 => {
            lines.push(format!(
                "a step with the recipe takes {ratio:.3} times as long as without it"
            ));
        }
        Some(ratio) => lines.push(format!(
            "a step with the changes takes {ratio:.3} times as long as without them, so they are dropped"
        )),
        None => {}
    }
    if tuned.is_interrupted {
        lines.push("interrupted: what was found so far is kept".into());
    }
    lines.push(format!("written: {}", args.out.display()));
    lines.join("\n") + "\n"
}
