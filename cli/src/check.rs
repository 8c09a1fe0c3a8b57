//! `shorthaul check`: whether a file is well formed, and whether another one computes the same.

use crate::answer::Answer;
use crate::progress::Progress;
use crate::sizes;
use crate::style::Style;
use anyhow::{Context, Result, bail};
use clap::Args;
use compiler::graph::SymExpr;
use onnx::check::{Problem, Severity, errors, in_order, problems};
use onnx::edit;
use onnx::file::Model;
use onnx::verify::{self, Checker, Evidence, VerifyError};
use serde_json::json;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// What to check.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct Check {
    /// The ONNX file
    #[arg(value_name = "A.onnx")]
    path: PathBuf,
    /// A file that should compute the same as A.onnx
    #[arg(value_name = "B.onnx")]
    other: Option<PathBuf>,
    #[command(flatten)]
    runs: Runs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The sizes and inputs with which models run when they are compared.
#[derive(Args, Debug)]
pub struct Runs {
    /// A value for a dynamic size: a number, or a sum of other sizes (total=past+new); repeat it for several
    #[arg(long, value_name = "NAME=SIZE", value_parser = sizes::parse)]
    bind: Vec<(String, SymExpr)>,
    /// A file with inputs instead of made-up ones: .npz, .npy or .pb. Repeat it for several runs: each .npz starts
    /// a new run, and so does a .npy or .pb for an input that the run already has
    #[arg(long, value_name = "FILE")]
    inputs: Vec<PathBuf>,
}

impl Runs {
    /// The options of verification for `model`.
    ///
    /// # Errors
    /// Inputs cannot be read, or a size is given twice.
    pub fn options(&self, model: &Model) -> Result<verify::Options> {
        let (sizes, relations) = sizes::apart(sizes::each_once("--bind", &self.bind)?);
        Ok(verify::Options {
            sizes,
            relations,
            samples: crate::tensors::samples(&self.inputs, model)?,
            ..Default::default()
        })
    }
}

const HELP: &str = "\
Examples:
  shorthaul check model.onnx
  shorthaul check model.onnx optimized.onnx --bind batch=8

Exit code 3: a file has problems, or the two files differ.";

/// Lists problems; compares.
///
/// # Errors
/// A file cannot be read, or the first one cannot be run.
pub fn run(args: &Check, quiet: bool) -> Result<Answer> {
    let mut progress = Progress::new(quiet);
    progress.stage("reading");
    let first = looked_at(&args.path)?;
    let other = args.other.as_deref().map(looked_at).transpose()?;
    let files: Vec<&(Model, Vec<Problem>)> = [&first].into_iter().chain(&other).collect();
    let is_sound = |list: &[Problem]| list.iter().all(|p| p.severity != Severity::Error);
    let all_sound = files.iter().all(|(_, list)| is_sound(list));
    // Nodes that are only out of order can be run.
    let ordered = |(model, list): &(Model, Vec<Problem>)| {
        let ordered = in_order(model.clone());
        (is_sound(list) || is_sound(&problems(&ordered))).then_some(ordered)
    };
    let compared = match other
        .as_ref()
        .map(|other| (ordered(&first), ordered(other)))
    {
        Some((Some(model), Some(other))) => {
            progress.stage("running both");
            let checker = Checker::new(&model, &args.runs.options(&model)?)
                .with_context(|| format!("cannot compare with {}", model.path.display()))?;
            Some(checker.check_other(&other))
        }
        _ => None,
    };
    drop(progress);
    let is_yes = all_sound && compared.as_ref().is_none_or(Result::is_ok);
    let text = match args.json {
        true => as_json(&files, compared.as_ref()),
        false => as_text(&files, compared.as_ref()),
    };
    Ok(Answer::new(text, is_yes))
}

/// Reads a file, and converts operators of an unknown older version to the oldest known version.
///
/// # Errors
/// The file cannot be read, or its operators cannot be converted to that version.
pub fn read_known(path: &Path) -> Result<Model> {
    known(in_order(Model::read(path)?))
}

/// The model in a known version of the operators.
///
/// # Errors
/// Its operators cannot be converted to one.
pub fn known(model: Model) -> Result<Model> {
    let raised = edit::in_known_version(&model);
    let raised = raised.with_context(|| format!("{} is too old", model.path.display()))?;
    Ok(raised.unwrap_or(model))
}

/// The file as far as it is known here, and its problems.
fn looked_at(path: &Path) -> Result<(Model, Vec<Problem>)> {
    let model = Model::read(path)?;
    let version = edit::version(&model.proto);
    let about = |severity, message| Problem {
        severity,
        place: "the file".to_string(),
        message,
    };
    match edit::in_known_version(&model) {
        Ok(None) => {
            let problems = problems(&model);
            Ok((model, problems))
        }
        Ok(Some(raised)) => {
            let mut problems = problems(&raised);
            let message = format!(
                "it has version {version} of the operators, and is read as one of version {}",
                edit::RAISED_TO
            );
            problems.push(about(Severity::Note, message));
            Ok((raised, problems))
        }
        Err(cause) => {
            let message = format!("it has version {version} of the operators; {cause}");
            Ok((model, vec![about(Severity::Error, message)]))
        }
    }
}

/// Refuses a file that is not well formed. Its nodes may be out of order if they can be put in order.
///
/// # Errors
/// The first problem.
pub fn refuse_unsound(model: &Model) -> Result<()> {
    let sorted = onnx::check::sorted(model.proto.clone());
    let found = match sorted {
        Ok(proto) => errors(&model.with(proto)),
        Err(_) => errors(model),
    };
    if let Some(problem) = found.first() {
        bail!(
            "{} is not well formed: {problem}; `shorthaul check` lists all problems",
            model.path.display()
        );
    }
    Ok(())
}

fn as_text(
    files: &[&(Model, Vec<Problem>)],
    compared: Option<&Result<Evidence, VerifyError>>,
) -> String {
    let style = Style::of_output();
    let mut text = String::new();
    let mut line = |painted: String| {
        // Writing to a string succeeds.
        let _ = writeln!(text, "{painted}");
    };
    for (model, list) in files {
        let path = model.path.display();
        let n = list
            .iter()
            .filter(|p| p.severity == Severity::Error)
            .count();
        match n {
            0 => line(format!("{path}: {}", style.good("well formed"))),
            n => line(format!("{path}: {}", style.bad(&format!("{n} problems")))),
        }
        for problem in list {
            let mark = match problem.severity {
                Severity::Error => style.bad("error"),
                Severity::Note => style.dim("note"),
            };
            line(format!("  {mark}: {problem}"));
        }
    }
    match compared {
        Some(Ok(evidence)) => {
            let (before, after) = evidence.worst().unwrap_or_default();
            line(format!(
                "{} in {} runs; largest error {before:.1e} and {after:.1e}, relative to the largest element",
                style.good("the results are the same"),
                evidence.runs.len()
            ));
            for left_out in &evidence.left_out {
                line(style.dim(&crate::summary::left_out_line(left_out)));
            }
            for unsettled in &evidence.unsettled {
                line(style.warn(&crate::summary::unsettled_line(unsettled)));
            }
        }
        Some(Err(difference)) => {
            line(format!("{}: {difference}", style.bad("the results differ")));
            line("`shorthaul bisect` finds the first value that differs".to_string());
        }
        None => {}
    }
    text
}

fn as_json(
    files: &[&(Model, Vec<Problem>)],
    compared: Option<&Result<Evidence, VerifyError>>,
) -> String {
    let file = |(model, list): &&(Model, Vec<Problem>)| json!({"path": model.path.display().to_string(), "problems": list});
    let mut value = json!({"files": files.iter().map(file).collect::<Vec<_>>()});
    match compared {
        Some(Ok(evidence)) => {
            let error =
                |e: &verify::OutputError| json!({"output": e.name, "a": e.before, "b": e.after});
            value["same"] = json!(true);
            value["runs"] = json!(evidence.runs);
            value["errors"] = evidence.errors.iter().map(error).collect();
            value["cuts"] = json!(evidence.cuts);
            value["blind"] = json!(evidence.blind);
            value["untried"] = json!(evidence.untried);
            value["left_out"] = json!(evidence.left_out);
            value["unsettled"] = json!(evidence.unsettled);
        }
        Some(Err(difference)) => {
            value["same"] = json!(false);
            value["difference"] = json!(difference.to_string());
        }
        None => {}
    }
    format!("{value:#}\n")
}
