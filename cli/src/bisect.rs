//! `shorthaul bisect`: where two files begin to differ, value by value.

use crate::answer::Answer;
use crate::check::{Runs, read_known};
use crate::progress::Progress;
use crate::style::Style;
use anyhow::{Context, Result};
use clap::Args;
use onnx::verify::{Comparison, Computed, Difference, compare_values};
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

Compares the values that have the same name in both files, in the order of A.onnx. Shows the first one that differs
and can cause the difference of an output, and the attributes and inputs of its node that differ. If every output is
the same, B.onnx may use a name for another value; such values are listed, but they are not the cause. Exit code 3: an
output differs, or a node that Shorthaul does not know.";

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

/// Names that a list shows; the rest is counted.
const SHOWN: usize = 5;

fn text(found: &Comparison) -> String {
    let style = Style::of_output();
    let Some(first) = &found.first else {
        let runs = found.runs.join("; ");
        let n = found.n_values - found.reused.len();
        let same = style.good(&format!("{n} values are the same"));
        return format!("{same} ({runs})\n{}", names(found));
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
    for line in first.differences.iter().map(difference) {
        let _ = writeln!(text, "  {line}");
    }
    let _ = match &first.last_same {
        Some(last) => writeln!(
            text,
            "{} values before it are the same, up to `{last}`",
            first.n_same
        ),
        None if found.reused.is_empty() => {
            writeln!(text, "it is the first value that both files compute")
        }
        None => writeln!(text, "no value before it is the same in both files"),
    };
    text + &names(found)
}

/// Names that stand for another value in B, and values that have another name there.
fn names(found: &Comparison) -> String {
    let mut text = String::new();
    for reused in found.reused.iter().take(SHOWN) {
        let _ = match &reused.like {
            Some(like) => writeln!(
                text,
                "B uses the name `{}` for the value that A calls `{like}`",
                reused.value
            ),
            None => writeln!(
                text,
                "`{}` stands for a different value in B, and no output differs because of it",
                reused.value
            ),
        };
        for line in reused.differences.iter().map(difference) {
            let _ = writeln!(text, "  {line}");
        }
    }
    if found.reused.len() > SHOWN {
        let more = found.reused.len() - SHOWN;
        let _ = writeln!(text, "{more} more names stand for different values in B");
    }
    let renamed = found.renamed.iter().take(SHOWN);
    let renamed: Vec<String> = renamed.map(|(a, b)| format!("`{a}` is `{b}`")).collect();
    let more = match found.renamed.len() - renamed.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    if !renamed.is_empty() {
        let _ = writeln!(text, "other names in B: {}{more}", renamed.join(", "));
    }
    text
}

fn difference(difference: &Difference) -> String {
    let side = |value: &Option<String>, side: &str| match value {
        Some(value) => format!("{value} in {side}"),
        None => format!("none in {side}"),
    };
    let (a, b) = (side(&difference.a, "A"), side(&difference.b, "B"));
    format!("{}: {a}, {b}", difference.what)
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
