//! `shorthaul run`: a model's outputs, by the interpreter that verification uses.

use crate::answer::{Answer, apart};
use crate::check::read_known;
use crate::progress::Progress;
use crate::{sizes, tensors, units};
use anyhow::{Context, Result, bail};
use clap::Args;
use compiler::graph::SymExpr;
use onnx::evaluate::{Precision, Program, Values};
use onnx::file::{self, Model};
use onnx::npy;
use onnx::tensor::Tensor;
use onnx::verify;
use serde_json::json;
use std::io::Cursor;
use std::path::PathBuf;

/// What to run, on what.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct Run {
    /// The ONNX file
    #[arg(value_name = "MODEL.onnx")]
    path: PathBuf,
    /// A file with inputs (.npz, .npy or .pb); repeat it if they are in several files
    #[arg(long, value_name = "FILE")]
    inputs: Vec<PathBuf>,
    /// Make up the inputs that are not given, from this seed
    #[arg(long, value_name = "SEED")]
    random: Option<u32>,
    /// A value for a dynamic size of made-up inputs: a number, or a sum of other sizes (total=past+new); repeat
    /// it for several
    #[arg(long, value_name = "NAME=SIZE", value_parser = sizes::parse)]
    bind: Vec<(String, SymExpr)>,
    /// The file to write the outputs to
    #[arg(short, long, value_name = "FILE.npz")]
    out: Option<PathBuf>,
    /// Compute all floating-point values in float64
    #[arg(long)]
    float64: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const HELP: &str = "\
Examples:
  shorthaul run model.onnx --inputs batch.npz --out outputs.npz
  shorthaul run model.onnx --inputs image.npy --inputs mask.npy --float64
  shorthaul run model.onnx --random 0 --bind batch=2

This runs a simple interpreter, which is slow; use it to check results.";

/// Runs, writes, and says what the outputs are.
///
/// # Errors
/// A file cannot be read or written, an input is missing, a node refuses its inputs.
pub fn run(args: &Run, quiet: bool) -> Result<Answer> {
    args.out.as_deref().map_or(Ok(()), apart)?;
    let mut progress = Progress::new(quiet);
    progress.stage("reading");
    let model = read_known(&args.path)?;
    let precision = match args.float64 {
        true => Precision::Float64,
        false => Precision::AsStored,
    };
    let program =
        Program::new(&model.proto, &model.folder, precision).context("the file has no graph")?;
    let mut feeds = tensors::together(&args.inputs, &model)?;
    if let Some(seed) = args.random {
        let (sizes, relations) = sizes::apart(sizes::each_once("--bind", &args.bind)?);
        let options = verify::Options {
            sizes,
            relations,
            inputs: feeds,
            ..Default::default()
        };
        progress.stage("making up inputs");
        feeds = verify::made_up(&model, seed as usize, &options)?;
    }
    check_inputs(&model, &feeds)?;
    progress.stage("running");
    let outputs = program
        .outputs(&feeds)
        .with_context(|| format!("{} does not run", args.path.display()))?;
    drop(progress);
    let names = model.proto.graph.iter().flat_map(|g| &g.output);
    let named: Vec<(&str, &Tensor)> = names.map(|o| o.name.as_str()).zip(&outputs).collect();
    let text = match args.json {
        true => as_json(&named),
        false => units::table(&named.iter().map(|(n, t)| row(n, t)).collect::<Vec<_>>()),
    };
    let mut answer = Answer::yes(text);
    if let Some(out) = &args.out {
        let mut bytes = Cursor::new(Vec::new());
        npy::write_npz(named.iter().copied(), &mut bytes)
            .map_err(anyhow::Error::msg)
            .with_context(|| format!("cannot write {}", out.display()))?;
        let mut sources = model.files();
        sources.extend(args.inputs.iter().map(PathBuf::as_path));
        answer.file = Some(file::stage_bytes(&bytes.into_inner(), out, &sources)?);
    }
    Ok(answer)
}

/// Every input has a tensor of its type and shape.
fn check_inputs(model: &Model, feeds: &Values) -> Result<()> {
    let Some(graph) = &model.proto.graph else {
        return Ok(());
    };
    let mut wrong = Vec::new();
    for input in &graph.input {
        let is_stored = graph.initializer.iter().any(|t| t.name == input.name);
        let declared = onnx::infer::declared(input, &onnx::operators::Unknowns::default());
        let expected = describe(&declared);
        match feeds.get(&input.name) {
            None if is_stored => {}
            None => wrong.push(format!("`{}` is missing: {expected}", input.name)),
            Some(tensor) if !fits(tensor, &declared) => wrong.push(format!(
                "`{}` is {} {:?}, not {expected}",
                input.name,
                tensor.element(),
                tensor.shape
            )),
            Some(_) => {}
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    bail!(
        "cannot run {}: {}; give inputs with --inputs, or make them up with --random SEED",
        model.path.display(),
        wrong.join("; ")
    )
}

fn describe(fact: &onnx::fact::Fact) -> String {
    let element = fact
        .element
        .map_or("a value".to_string(), |e| e.to_string());
    match &fact.shape {
        Some(shape) => {
            let size = |n: &compiler::graph::SymExpr| match onnx::infer::is_unknown(n) {
                true => "?".to_string(),
                false => n.to_string(),
            };
            let sizes: Vec<String> = shape.iter().map(size).collect();
            format!("{element} [{}]", sizes.join(", "))
        }
        None => format!("{element} of any shape"),
    }
}

fn fits(tensor: &Tensor, fact: &onnx::fact::Fact) -> bool {
    let same_type = fact.element.is_none_or(|e| e == tensor.element());
    let same_shape = fact.shape.as_ref().is_none_or(|shape| {
        let size = |(a, n): (&compiler::graph::SymExpr, &usize)| {
            a.as_const().is_none_or(|a| a == *n as i64)
        };
        shape.len() == tensor.shape.len() && shape.iter().zip(&tensor.shape).all(size)
    });
    same_type && same_shape
}

/// Smallest, mean and largest finite element, and how many are not finite.
fn statistics(tensor: &Tensor) -> Option<(f64, f64, f64, usize)> {
    let values = tensor.to_f64()?;
    let finite: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
    let least = finite.iter().copied().fold(f64::INFINITY, f64::min);
    let most = finite.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mean = finite.iter().sum::<f64>() / finite.len() as f64;
    let odd = values.len() - finite.len();
    (!finite.is_empty()).then_some((least, mean, most, odd))
}

fn row(name: &str, tensor: &Tensor) -> Vec<String> {
    let about = match statistics(tensor) {
        Some((least, mean, most, 0)) => format!("from {least:.6} to {most:.6}, mean {mean:.6}"),
        Some((least, mean, most, odd)) => {
            format!("from {least:.6} to {most:.6}, mean {mean:.6}, {odd} NaN or infinite")
        }
        None => String::new(),
    };
    vec![
        name.to_string(),
        tensor.element().to_string(),
        format!("{:?}", tensor.shape),
        about,
    ]
}

fn as_json(outputs: &[(&str, &Tensor)]) -> String {
    let one = |(name, tensor): &(&str, &Tensor)| {
        let mut value = json!({
            "name": name,
            "dtype": tensor.element().to_string(),
            "shape": tensor.shape,
        });
        if let Some((least, mean, most, odd)) = statistics(tensor) {
            value["least"] = json!(least);
            value["mean"] = json!(mean);
            value["most"] = json!(most);
            value["not_finite"] = json!(odd);
        }
        value
    };
    let outputs: Vec<_> = outputs.iter().map(one).collect();
    format!("{:#}\n", json!({ "outputs": outputs }))
}
