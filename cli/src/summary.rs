//! The summary of `shorthaul optimize`, for people and as JSON.

use crate::style::Style;
use crate::units::{bytes, count, table};
use anyhow::Result;
use onnx::edit::{self, InHalf};
use onnx::optimize::{Figures, Summary};
use onnx::verify::{SamplesRun, Stopped, Unsettled};
use serde_json::json;
use std::fmt::Write;
use std::path::Path;

/// What `--half` made of a model.
fn half_text(half: &InHalf) -> String {
    let error = match half.error {
        Some(error) => format!("with an error of {error:.1e} of the largest element"),
        None => "with an unknown error, since no output has a finite element".to_string(),
    };
    let kept = half.kept_f32.iter().map(|(op, n)| format!("{n} {op}"));
    let kept: Vec<String> = kept.collect();
    let kept = match kept.is_empty() {
        true => String::new(),
        false => format!("; in f32 stay {}", kept.join(", ")),
    };
    let (n, element) = (half.nodes, &half.element);
    format!("{n} nodes compute in {element}, {error}{kept}\n")
}

/// One JSON document with everything that the text says.
///
/// # Errors
/// None in practice: every field can be written.
pub fn json(
    path: &Path,
    out: &Path,
    summary: &Summary,
    in_half: Option<&InHalf>,
) -> Result<String> {
    let mut value = json!({
        "path": path.display().to_string(),
        "out": out.display().to_string(),
        "verified": !summary.runs.is_empty(),
        "grows": summary.grows(),
        "half": in_half,
    });
    let rest = serde_json::to_value(summary)?;
    if let (Some(value), Some(rest)) = (value.as_object_mut(), rest.as_object()) {
        value.extend(rest.clone());
    }
    Ok(format!("{value:#}\n"))
}

/// The table, then one line for whatever needs one.
pub fn text(path: &Path, out: &Path, summary: &Summary, in_half: Option<&InHalf>) -> String {
    let style = Style::of_output();
    let arrow = format!("{} → {}", path.display(), out.display());
    let mut text = in_half.map(half_text).unwrap_or_default();
    text.push_str(&format!("{}\n", style.bold(&arrow)));
    text.push_str(&table(&rows(summary)));
    let mut line = |painted: String| {
        // Writing to a string succeeds.
        let _ = writeln!(text, "{painted}");
    };
    let fired = summary.fired.iter().map(|f| format!("{} ×{}", f.rule, f.n));
    match summary.fired.is_empty() {
        true => line("no rewrite applied".to_string()),
        false => line(format!(
            "rewrites: {}",
            fired.collect::<Vec<_>>().join(", ")
        )),
    }
    match summary.runs.as_slice() {
        [] => line(style.warn("not verified")),
        runs => {
            line(style.good(&format!("verified in {} runs", runs.len())) + &dim(style, runs));
        }
    }
    if let Some(stopped) = &summary.stopped {
        line(style.warn(&stopped_line(stopped)));
    }
    for dropped in &summary.dropped {
        let what = format!("dropped {} at {}", dropped.rule, dropped.node);
        line(format!("{}: {}", style.warn(&what), dropped.difference));
    }
    if let Some(version) = summary.raised_from {
        line(format!(
            "version {version} of the operators is older than what Shorthaul knows: the file was converted to \
             version {} first",
            edit::RAISED_TO
        ));
    }
    if summary.was_sorted {
        line("nodes were out of order and have been sorted".to_string());
    }
    if !summary.repeated.is_empty() {
        let names: Vec<&str> = summary.repeated.iter().map(String::as_str).collect();
        line(format!(
            "initializers that were stored more than once with the same elements, of which one is kept: {}",
            names.join(", ")
        ));
    }
    if !summary.kept.is_empty() {
        let kept = summary
            .kept
            .iter()
            .map(|k| format!("{} ×{}", k.operator, k.n));
        let kept = kept.collect::<Vec<_>>().join(", ");
        line(format!(
            "operators that Shorthaul does not know, kept as they are: {kept}"
        ));
    }
    if !summary.cuts.is_empty() {
        let cuts = summary.cuts.join(", ");
        line(format!(
            "not run, only their inputs and outputs compared: {cuts}"
        ));
    }
    if !summary.untried.is_empty() {
        let branches = summary.untried.join(", ");
        let sentence =
            format!("branches that no run took, so not compared: {branches} (try --inputs)");
        line(style.warn(&sentence));
    }
    for left_out in &summary.left_out {
        line(style.dim(&left_out_line(left_out)));
    }
    for unsettled in &summary.unsettled {
        line(style.warn(&unsettled_line(unsettled)));
    }
    if !summary.blind.is_empty() {
        let blind = summary.blind.join(", ");
        let sentence = format!(
            "outputs without a finite element in any run, so their error is not known: {blind}"
        );
        line(style.warn(&sentence));
    }
    for sentence in summary.grows() {
        line(style.warn(&sentence));
    }
    if let Some(sizes) = counted_at(summary) {
        line(style.dim(&sizes));
    }
    text
}

/// A sentence on how far verification came.
fn stopped_line(stopped: &Stopped) -> String {
    let Stopped {
        n_verified,
        n_rewrites,
        samples,
    } = stopped;
    let samples = samples.map_or(String::new(), |samples| {
        let SamplesRun { n_run, n_given } = samples;
        format!("; the original ran with {n_run} of {n_given} sets of given inputs")
    });
    format!(
        "the time limit was reached: the file has the {n_verified} of {n_rewrites} rewrites that were \
         verified{samples}"
    )
}

/// A sentence on an output that rounding alone moves far.
pub fn unsettled_line(found: &Unsettled) -> String {
    let Unsettled {
        output,
        n_runs,
        moved,
        is_share,
    } = found;
    let effect = match is_share {
        true => format!(
            "change up to {:.2} % of the elements of the original's output",
            100.0 * moved
        ),
        false => format!("move the original's output by up to {moved:.1e} of its largest element"),
    };
    format!(
        "`{output}`: in {n_runs} runs, other roundings alone {effect}; the two files differ by no more than that"
    )
}

/// A sentence on a run that was left out.
pub fn left_out_line(left_out: &str) -> String {
    format!("left out, since the original does not run there: {left_out}")
}

fn dim(style: Style, runs: &[String]) -> String {
    style.dim(&format!(" ({})", runs.join("; ")))
}

fn rows(summary: &Summary) -> Vec<Vec<String>> {
    let (before, after) = (&summary.before, &summary.after);
    let size = |n: u64| bytes(n as i64);
    let number = |n: u64| count(n as f64);
    let number_row = |name: &str, of: fn(&Figures) -> u64, shown: &dyn Fn(u64) -> String| {
        let (a, b) = (of(before), of(after));
        vec![name.to_string(), shown(a), shown(b), change(a, b)]
    };
    // Sums over different nodes cannot be compared.
    let is_whole = before.n_unknown == 0 && after.n_unknown == 0;
    let sum_row = |name: &str, of: fn(&Figures) -> u64, shown: &dyn Fn(u64) -> String| {
        let mut row = number_row(name, of, shown);
        if !is_whole {
            row[3] = "of the nodes whose sizes are known".to_string();
        }
        row
    };
    let mut rows = vec![
        ["", "before", "after", ""]
            .map(ToString::to_string)
            .to_vec(),
        number_row("operators", |f| f.operators as u64, &|n| n.to_string()),
        sum_row("multiply-adds", |f| f.multiply_adds, &number),
        sum_row("bytes moved", |f| f.bytes_moved, &size),
        sum_row("peak memory", |f| f.peak_bytes, &size),
        number_row("file", |f| f.file_bytes, &size),
    ];
    if let (Some(a), Some(b)) = (before.worst_error, after.worst_error) {
        let error = |e: f64| match e {
            0.0 => "0".to_string(),
            e => format!("{e:.1e}"),
        };
        rows.push(vec![
            "worst error".to_string(),
            error(a),
            error(b),
            "relative to the largest element, against float64".to_string(),
        ]);
    }
    if let (Some(a), Some(b)) = (before.milliseconds, after.milliseconds) {
        rows.push(vec![
            "time".to_string(),
            format!("{a:.3} ms"),
            format!("{b:.3} ms"),
            format!(
                "{:.2}× as fast in ONNX Runtime (medians, interleaved)",
                a / b
            ),
        ]);
    }
    rows
}

/// `−26%`; nothing where nothing changed.
fn change(before: u64, after: u64) -> String {
    if before == after || before == 0 {
        return String::new();
    }
    let percent = (after as f64 / before as f64 - 1.0) * 100.0;
    let sign = if percent < 0.0 { '−' } else { '+' };
    let digits = if percent.abs() < 1.0 { 2 } else { 0 };
    format!("{sign}{:.digits$}%", percent.abs())
}

/// A sentence with the sizes at which operators were counted, and the number of nodes left out.
fn counted_at(summary: &Summary) -> Option<String> {
    let one = |(name, shape): (&String, &Vec<usize>)| {
        let sizes: Vec<String> = shape.iter().map(ToString::to_string).collect();
        format!("{name} [{}]", sizes.join(", "))
    };
    let shapes: Vec<String> = summary.shapes.iter().map(one).collect();
    let mut text = String::new();
    if !shapes.is_empty() {
        text = format!("counted at {}", shapes.join(", "));
    }
    let (before, after) = (summary.before.n_unknown, summary.after.n_unknown);
    if before + after > 0 {
        let without =
            format!("without {before} nodes before and {after} after, whose sizes are not known");
        text = match text.is_empty() {
            true => format!("counted {without}"),
            false => format!("{text}, {without}"),
        };
    }
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_over_some_of_the_nodes_are_not_compared() {
        let figures = |multiply_adds, n_unknown| Figures {
            operators: 4,
            multiply_adds,
            file_bytes: multiply_adds,
            n_unknown,
            ..Figures::default()
        };
        let changes = |n_before, n_after| {
            let summary = Summary {
                before: figures(100, n_before),
                after: figures(839, n_after),
                ..Summary::default()
            };
            let rows = rows(&summary);
            let change = |name: &str| {
                let row = rows.iter().find(|row| row[0] == name);
                row.map(|row| row[3].clone())
            };
            [change("multiply-adds"), change("file")].map(Option::unwrap_or_default)
        };
        assert_eq!(changes(0, 0), ["+739%", "+739%"]);
        let part = "of the nodes whose sizes are known";
        for (before, after) in [(3, 0), (0, 3), (3, 3)] {
            assert_eq!(changes(before, after), [part, "+739%"]);
        }
    }

    #[test]
    fn samples_are_counted_where_the_time_was_over_between_them() {
        let with = |samples| {
            stopped_line(&Stopped {
                n_verified: 0,
                n_rewrites: 3,
                samples,
            })
        };
        let said =
            "the time limit was reached: the file has the 0 of 3 rewrites that were verified";
        assert_eq!(with(None), said);
        let (n_run, n_given) = (1, 2);
        assert_eq!(
            with(Some(SamplesRun { n_run, n_given })),
            format!("{said}; the original ran with 1 of 2 sets of given inputs")
        );
    }

    #[test]
    fn changes_are_signed_percentages() {
        assert_eq!(change(100, 74), "−26%");
        assert_eq!(change(100, 100), "");
        assert_eq!(change(1000, 1001), "+0.10%");
        assert_eq!(change(0, 3), "");
    }
}
