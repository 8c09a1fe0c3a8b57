//! `shorthaul optimize`: a better file that was verified to compute what the original computes.
//!
//! Owns the arguments and the order read, optimize, write, measure; the file takes its place after that.
//! The summary's text is in `summary.rs`.

use crate::answer::{Answer, apart};
use crate::progress::Progress;
use crate::{sizes, summary};
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use compiler::graph::SymExpr;
use onnx::check::is_in_order;
use onnx::edit::{self, Request};
use onnx::element::Element;
use onnx::file::{self, Model};
use onnx::ort::OnnxRuntime;
use onnx::rewrite::{self, Target};
use onnx::{near, optimize, set_shape, verify};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What to optimize, and how.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct Optimize {
    /// The ONNX file
    #[arg(value_name = "MODEL.onnx", required_unless_present = "list_rules")]
    path: Option<PathBuf>,
    /// The file to write
    #[arg(
        short,
        long,
        value_name = "OUT.onnx",
        required_unless_present = "list_rules"
    )]
    out: Option<PathBuf>,
    /// Operators to use: standard, ort-cpu or ort-cuda (files for the last two run only in ONNX Runtime)
    #[arg(long, default_value_t = Target::Standard)]
    target: Target,
    /// Write the file without verifying it
    #[arg(long)]
    no_verify: bool,
    /// Inputs to verify with, instead of made-up ones: .npz, .npy or .pb. Repeat it for several runs: each .npz starts
    /// a new run, and so does a .npy or .pb for an input that the run already has
    #[arg(long, value_name = "FILE", conflicts_with = "no_verify")]
    inputs: Vec<PathBuf>,
    /// A value for a dynamic size, for verification and the summary: a number, or a sum of other sizes
    /// (total=past+new); repeat it for several
    #[arg(long, value_name = "NAME=SIZE", value_parser = sizes::parse)]
    bind: Vec<(String, SymExpr)>,
    /// Fix the sizes of an input in the file that is written: x=1,3,224,224 (`_` leaves a size as it
    /// is); repeat it for several
    #[arg(long, value_name = "INPUT=SIZES", value_parser = set_shape::parse)]
    set_shape: Vec<(String, set_shape::Wanted)>,
    /// Give names to fixed sizes of an input, which makes them dynamic: x=batch,_,height,width (`_` leaves a
    /// size as it is); repeat it for several
    #[arg(long, value_name = "INPUT=NAMES", value_parser = edit::parse_names, conflicts_with_all = ["measure", "no_verify"])]
    free_shape: Vec<(String, edit::Names)>,
    /// Give an input or output another name; repeat it for several
    #[arg(long, value_name = "OLD=NEW", value_parser = renaming, conflicts_with = "measure")]
    rename: Vec<(String, String)>,
    /// Compute in f16 or bf16; outputs may then differ by --tolerance, by default 1e-2 (f16) or 5e-2 (bf16)
    #[arg(long, value_name = "TYPE", value_enum, conflicts_with_all = ["measure", "no_verify"])]
    half: Option<Half>,
    /// Operators or nodes that stay in f32 with --half, in addition to those that always do; separated by commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "half")]
    keep_f32: Vec<String>,
    /// Number of runs with finite made-up inputs; two more runs have NaN and infinities
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..))]
    seeds: u8,
    /// Also compare both files in another engine: ort (ONNX Runtime, in a Python that has it) or tract (if
    /// this program was built with it)
    #[arg(long, value_name = "WHO", value_enum, conflicts_with = "no_verify")]
    oracle: Option<Witness>,
    /// Time both files in ONNX Runtime, with all its optimizations, in a Python that has it
    #[arg(long)]
    measure: bool,
    /// The most bytes that folding one node into a constant may add to the file
    #[arg(long, value_name = "BYTES", default_value_t = 16 << 10)]
    fold_limit: usize,
    /// The only rewrites to use, separated by commas; `none` for no rewrite
    #[arg(long, value_name = "RULES", value_delimiter = ',', value_parser = rule_or_none)]
    rules: Vec<String>,
    /// Rewrites not to use, separated by commas
    #[arg(long, visible_alias = "skip-rules", value_name = "RULES", value_delimiter = ',', value_parser = rule)]
    without: Vec<String>,
    /// Accept this difference as a fraction of the output's largest element, in addition to rounding, for example 1e-4
    #[arg(long, value_name = "PART", default_value_t = 0.0, value_parser = part, conflicts_with = "no_verify")]
    tolerance: f64,
    /// Stop verifying after this many seconds; the file gets the rewrites that are verified by then
    #[arg(long, value_name = "SECONDS", value_parser = seconds, conflicts_with = "no_verify")]
    time_limit: Option<Duration>,
    /// Take only the part of the file that starts at these values; separated by commas
    #[arg(
        long,
        value_name = "VALUES",
        value_delimiter = ',',
        conflicts_with = "measure"
    )]
    from: Vec<String>,
    /// Take only the part of the file that ends at these values; separated by commas
    #[arg(
        long,
        value_name = "VALUES",
        value_delimiter = ',',
        conflicts_with = "measure"
    )]
    to: Vec<String>,
    /// Convert the file to this newer or older version of the standard's operators; this is verified too
    #[arg(long, value_name = "VERSION", conflicts_with = "measure", value_parser = opset)]
    opset: Option<i64>,
    /// Remove documentation, metadata, names of nodes and types of inner values
    #[arg(long)]
    strip: bool,
    /// Write the known types and sizes of inner values into the file
    #[arg(long, conflicts_with = "strip")]
    infer_shapes: bool,
    /// List the rewrites and exit
    #[arg(long)]
    list_rules: bool,
    /// Write nothing if file size (with external data), peak memory or bytes moved exceed the original's by
    /// more than this factor
    #[arg(long, value_name = "FACTOR", value_parser = factor)]
    max_growth: Option<f64>,
    /// Print the summary as JSON
    #[arg(long)]
    pub json: bool,
}

/// Types to compute in.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Half {
    F16,
    Bf16,
}

impl Half {
    fn element(self) -> Element {
        match self {
            Half::F16 => Element::F16,
            Half::Bf16 => Element::BF16,
        }
    }
}

/// Other engines that can run both files.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Witness {
    Ort,
    Tract,
}

impl Witness {
    fn find(self) -> Result<Arc<dyn verify::Oracle>> {
        match self {
            Witness::Ort => Ok(Arc::new(OnnxRuntime::find()?)),
            Witness::Tract => tract(),
        }
    }
}

#[cfg(feature = "tract")]
fn tract() -> Result<Arc<dyn verify::Oracle>> {
    Ok(Arc::new(crate::tract::Tract))
}

#[cfg(not(feature = "tract"))]
fn tract() -> Result<Arc<dyn verify::Oracle>> {
    anyhow::bail!(
        "this program was built without tract; build it with `cargo install --path cli --features \
         tract` (this takes minutes), or use `--oracle ort`"
    )
}

const HELP: &str = "\
Examples:
  shorthaul optimize model.onnx -o smaller.onnx
  shorthaul optimize model.onnx -o smaller.onnx --bind batch=8 --bind seq=128
  shorthaul optimize model.onnx -o fixed.onnx --set-shape image=1,3,224,224
  shorthaul optimize decoder.onnx -o smaller.onnx --bind total=past+new
  shorthaul optimize model.onnx -o smaller.onnx --inputs batch.npz --json > summary.json
  shorthaul optimize model.onnx -o smaller.onnx --inputs first.npz --inputs second.npz
  shorthaul optimize model.onnx -o for-ort.onnx --target ort-cpu --oracle ort --measure
  shorthaul optimize model.onnx -o encoder.onnx --to /encoder/Add_output_0 --strip
  shorthaul optimize model.onnx -o half.onnx --half f16 --keep-f32 Softmax
  shorthaul optimize model.onnx -o smaller.onnx --time-limit 60 --skip-rules fold
  shorthaul optimize --list-rules

OUT.onnx is written only if it computes the same as MODEL.onnx. A rewrite that makes a difference is dropped
and named in the summary. If verification, --measure or printing the summary fails, OUT.onnx stays as it
was. If OUT.onnx is a symbolic link, the file behind it is replaced; its permissions stay.
External data is written to OUT.onnx.data.";

/// A line for each rule: its name and what it does.
fn rules() -> String {
    let names = rewrite::rule_names();
    let width = names.iter().map(|name| name.len()).max().unwrap_or(0);
    let line = |name: &&str| format!("{name:width$}  {}\n", rewrite::about(name));
    names.iter().map(line).collect()
}

/// The name of a rule.
fn rule(text: &str) -> Result<String, String> {
    let names = rewrite::rule_names();
    match names.contains(&text) {
        true => Ok(text.to_string()),
        false => Err(format!(
            "there is no rule `{text}`{}; `shorthaul optimize --list-rules` lists them",
            near::suggestion(text, names)
        )),
    }
}

/// The name of a rule, or that of none.
fn rule_or_none(text: &str) -> Result<String, String> {
    match text {
        NO_RULE => Ok(text.to_string()),
        text => rule(text),
    }
}

/// The word for no rule.
const NO_RULE: &str = "none";

/// `OLD=NEW`: a name and its replacement.
fn renaming(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((old, new)) if !old.is_empty() && !new.is_empty() => {
            Ok((old.to_string(), new.to_string()))
        }
        _ => Err(format!("`{text}` is not OLD=NEW")),
    }
}

/// The oldest version of the standard's operators that files are written in.
const OLDEST_OPSET: i64 = 7;

/// A version of the standard's operators.
fn opset(text: &str) -> Result<i64, String> {
    let newest = *onnx::check::OPSETS.end();
    match text.parse::<i64>() {
        Ok(version) if version > newest => Err(format!(
            "version {version} of the operators is not known; the newest is {newest}"
        )),
        Ok(version) if version >= OLDEST_OPSET => Ok(version),
        _ => Err(format!(
            "files are written in version {OLDEST_OPSET} of the operators or a newer one"
        )),
    }
}

/// A fraction of 1.
fn part(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(part) if (0.0..1.0).contains(&part) => Ok(part),
        _ => Err(format!(
            "`{text}` is not a number of at least 0 and below 1"
        )),
    }
}

/// A number of seconds above 0.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|n| *n > 0.0);
    let time = seconds.and_then(|n| Duration::try_from_secs_f64(n).ok());
    time.ok_or_else(|| format!("`{text}` is not a positive number of seconds"))
}

/// A factor of at least 0.
fn factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if factor.is_finite() && factor >= 0.0 => Ok(factor),
        _ => Err(format!("`{text}` is not a factor, a number of at least 0")),
    }
}

impl Optimize {
    /// Other changes that were asked for.
    fn request(&self) -> Result<Request> {
        Ok(Request {
            shapes: sizes::each_once("--set-shape", &self.set_shape)?,
            from: self.from.clone(),
            to: self.to.clone(),
            free: self.free_shape.clone(),
            renamed: self.rename.clone(),
            opset: self.opset,
            half: self.half.map(Half::element),
            keep_f32: self.keep_f32.iter().cloned().collect(),
            strip: self.strip,
            infer_shapes: self.infer_shapes,
        })
    }

    /// Rules that are not used.
    fn unused(&self) -> BTreeSet<String> {
        let mut unused: BTreeSet<String> = self.without.iter().cloned().collect();
        if !self.rules.is_empty() {
            let others = rewrite::rule_names().into_iter().map(str::to_string);
            unused.extend(others.filter(|name| !self.rules.contains(name)));
        }
        unused
    }
}

/// When a time that begins now is over.
fn deadline(limit: Option<Duration>) -> Result<Option<Instant>> {
    let end = |limit| {
        let end = Instant::now().checked_add(limit);
        end.context("--time-limit is longer than a clock counts")
    };
    limit.map(end).transpose()
}

/// Rewrites, verifies, writes; gives the summary.
///
/// # Errors
/// The file cannot be read, verified or written; the target then is as it was.
pub fn run(args: &Optimize, quiet: bool) -> Result<Answer> {
    if args.list_rules {
        return Ok(Answer::yes(rules()));
    }
    let path = args
        .path
        .as_deref()
        .context("name the ONNX file to optimize")?;
    let out = args
        .out
        .as_deref()
        .context("name the file to write: -o OUT.onnx")?;
    apart(out)?;
    if args.measure && path.exists() && !path.is_file() {
        anyhow::bail!(
            "with --measure, ONNX Runtime reads {} again, so it must be a regular file, not a pipe",
            path.display()
        );
    }
    let mut progress = Progress::new(quiet);
    progress.stage("reading");
    let request = args.request()?;
    let whole = Model::read(path)?;
    let part = request.part(&whole)?;
    let samples = crate::tensors::samples(&args.inputs, &part)?;
    let (sizes, relations) = sizes::apart(sizes::each_once("--bind", &args.bind)?);
    let mut verifying = verify::Options {
        n_seeds: usize::from(args.seeds),
        sizes,
        relations,
        samples,
        oracle: args.oracle.map(Witness::find).transpose()?,
        tolerance: args.tolerance,
        deadline: deadline(args.time_limit)?,
        ..Default::default()
    };
    let changed = request.changed(&part, &mut verifying, !args.no_verify, &mut |stage| {
        progress.stage(stage);
    })?;
    let (model, in_half) = (changed.model, changed.in_half);
    let clock = args.measure.then(OnnxRuntime::find).transpose()?;
    let timed = clock.map(|clock| (clock, verifying.clone()));
    let options = optimize::Options {
        rewriting: rewrite::Options {
            target: args.target,
            fold_limit: args.fold_limit,
            without: args.unused(),
            ..Default::default()
        },
        verifying: (!args.no_verify).then_some(verifying),
    };
    let mut optimized = optimize::optimize(&model, &options, &mut |stage| progress.stage(stage))?;
    optimized.model = request.finished(optimized.model);
    progress.stage("writing");
    let staged = file::stage(&optimized.model, out)?;
    let summary = &mut optimized.summary;
    summary.was_sorted = !is_in_order(&whole.proto);
    summary.after.file_bytes = staged.written().n_bytes + staged.written().n_external;
    args.max_growth.map_or(Ok(()), |most| summary.held(most))?;
    if let Some((clock, options)) = timed {
        let feeds = verify::made_up(&model, 0, &options)?;
        progress.stage("measuring");
        let (before, after) = clock
            .measure(path, &staged.path(), &feeds)
            .context("cannot time the files in ONNX Runtime")?;
        summary.before.milliseconds = Some(before);
        summary.after.milliseconds = Some(after);
    }
    drop(progress);
    let text = match args.json {
        true => summary::json(path, out, summary, in_half.as_ref())?,
        false => summary::text(path, out, summary, in_half.as_ref()),
    };
    Ok(Answer::with(text, staged))
}
