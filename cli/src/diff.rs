//! `shorthaul diff`: in what two files differ, without running them.

use crate::answer::Answer;
use crate::progress::Progress;
use crate::style::Style;
use crate::units;
use anyhow::Result;
use clap::Args;
use onnx::diff::{Changes, Diff, diff};
use onnx::file::Model;
use std::fmt::Write;
use std::path::PathBuf;

/// What to compare.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct DiffArgs {
    /// The first ONNX file
    #[arg(value_name = "A.onnx")]
    a: PathBuf,
    /// The second ONNX file
    #[arg(value_name = "B.onnx")]
    b: PathBuf,
    /// The most lines to print for each kind of change (0: all)
    #[arg(long, value_name = "N", default_value_t = 20)]
    lines: usize,
    /// Print everything as JSON
    #[arg(long)]
    pub json: bool,
}

const HELP: &str = "\
Examples:
  shorthaul diff model.onnx optimized.onnx
  shorthaul diff model.onnx optimized.onnx --json | jq .operators

Nodes are matched by the name of their first output, everything else by its own name. Exit code 3: the
files differ.";

/// Lists the differences.
///
/// # Errors
/// A file cannot be read.
pub fn run(args: &DiffArgs, quiet: bool) -> Result<Answer> {
    let mut progress = Progress::new(quiet);
    progress.stage("reading");
    let (a, b) = (Model::read(&args.a)?, Model::read(&args.b)?);
    progress.stage("comparing");
    let found = diff(&a, &b);
    drop(progress);
    let text = match args.json {
        true => format!("{:#}\n", serde_json::to_value(&found)?),
        false => text(&found, args.lines),
    };
    Ok(Answer::new(text, found.is_empty()))
}

fn text(found: &Diff, lines: usize) -> String {
    let style = Style::of_output();
    if found.is_empty() {
        return "no difference\n".to_string();
    }
    let mut text = String::new();
    for (title, changes) in found.kinds().into_iter().filter(|(_, c)| !c.is_empty()) {
        let (added, removed) = (changes.added.len(), changes.removed.len());
        let counts = format!(
            "{added} added, {removed} removed, {} changed",
            changes.changed.len()
        );
        // Writing to a string succeeds.
        let _ = writeln!(text, "{} {counts}", style.bold(title));
        text.push_str(&listed(changes, lines, style));
    }
    if found.is_reordered {
        text.push_str("the entries of both files are in a different order\n");
    }
    if !found.operators.is_empty() {
        let _ = writeln!(text, "{}", style.bold("operators"));
        let rows: Vec<Vec<String>> = found
            .operators
            .iter()
            .map(|o| {
                let change = o.after as i64 - o.before as i64;
                let change = format!("{change:+}");
                vec![
                    o.operator.clone(),
                    o.before.to_string(),
                    o.after.to_string(),
                    change,
                ]
            })
            .collect();
        text.push_str(&units::table(&rows));
    }
    let size = |n: usize| units::bytes(n as i64);
    let _ = writeln!(
        text,
        "{} → {}",
        size(found.bytes_before),
        size(found.bytes_after)
    );
    text
}

fn listed(changes: &Changes, lines: usize, style: Style) -> String {
    let mut all: Vec<String> = Vec::new();
    let entry = |sign: &str, (name, what): &(String, String)| format!("  {sign} {name}: {what}");
    for removed in &changes.removed {
        all.push(style.bad(&entry("-", removed)));
    }
    for added in &changes.added {
        all.push(style.good(&entry("+", added)));
    }
    for changed in &changes.changed {
        let (before, after) = (&changed.before, &changed.after);
        all.push(style.warn(&format!("  ~ {}: {before} → {after}", changed.name)));
    }
    let shown = if lines == 0 { all.len() } else { lines };
    let mut text = String::new();
    for line in all.iter().take(shown) {
        text.push_str(line);
        text.push('\n');
    }
    if all.len() > shown {
        let rest = all.len() - shown;
        let _ = writeln!(text, "  … and {rest} more; --lines 0 shows all");
    }
    text
}
