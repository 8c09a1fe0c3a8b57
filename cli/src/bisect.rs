//! `shorthaul bisect`: where two files begin to differ, value by value.

use crate::answer::Answer;
use crate::check::{Runs, read_known};
use crate::progress::Progress;
use crate::style::Style;
use anyhow::{Context, Result};
use clap::Args;
use onnx::verify::{Comparison, Computed, compare_values};
use std::fmt::Write;
use std::path::PathBuf;

/// What to compare.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct Bisect {
    /// The ONNX file to compare with
    #[arg(value_name = "A.onnx")]
    a: PathBuf,
    /// The ONNX file that may differ
    #[arg(value_name = "B.onnx")]
    b: PathBuf,
    #[command(flatten)]
    runs: Runs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const HELP: &str = "\
Examples:
  shorthaul bisect model.onnx optimized.onnx
  shorthaul bisect model.onnx optimized.onnx --inputs failing.npz

Compares the values that have the same name in both files, in the order of A.onnx, and shows the first one
that differs. Exit code 3: a value differs.";

/// Runs both and compares.
///
/// # Errors
/// A file cannot be read or run.
pub fn run(args: &Bisect, quiet: bool) -> Result<Answer> {
    let mut progress = Progress::new(quiet);
    progress.stage("reading");
    let (a, b) = (read_known(&args.a)?, read_known(&args.b)?);
    let options = args.runs.options(&a)?;
    progress.stage("running both");
    let found = compare_values(&a, &b, &options).context("cannot compare the files")?;
    drop(progress);
    let is_same = found.first.is_none();
    let text = match args.json {
        true => format!("{:#}\n", serde_json::to_value(&found)?),
        false => text(&found),
    };
    Ok(Answer::new(text, is_same))
}

fn text(found: &Comparison) -> String {
    let style = Style::of_output();
    let Some(first) = &found.first else {
        let runs = found.runs.join("; ");
        let same = style.good(&format!("{} values are the same", found.n_values));
        return format!("{same} ({runs})\n");
    };
    let mut text = format!(
        "{} ({}): {}\n",
        style.bad(&format!("`{}` differs", first.value)),
        first.run,
        first.what
    );
    if let Some((position, a, b)) = &first.element {
        let _ = writeln!(text, "  at {position:?}: {a} in A, {b} in B");
    }
    for (side, node) in [("A", &first.a), ("B", &first.b)] {
        let _ = writeln!(text, "  {side}: {}", computed(node));
    }
    let _ = match &first.last_same {
        Some(last) => writeln!(
            text,
            "{} values before it are the same, up to `{last}`",
            first.n_same
        ),
        None => writeln!(text, "it is the first value that both files compute"),
    };
    text
}

fn computed(node: &Computed) -> String {
    let input = |(name, same): &(String, Option<bool>)| match same {
        Some(true) => format!("`{name}` (the same)"),
        Some(false) => format!("`{name}` (differs too)"),
        None => format!("`{name}`"),
    };
    let inputs: Vec<String> = node.inputs.iter().map(input).collect();
    format!("{} reads {}", node.node, inputs.join(", "))
}
