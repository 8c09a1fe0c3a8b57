//! `shorthaul grad`: the training graph of a model, as an ONNX file.

use crate::answer::{Answer, apart};
use crate::check::{known, refuse_unsound};
use crate::progress::Progress;
use crate::sizes;
use anyhow::{Context, Result};
use clap::Args;
use compiler::graph::SymExpr;
use compiler::importer::onnx::{File, Mode, Options};
use compiler::trained::Trained;
use compiler::training_graph::{Loss, Optimizer, OptimizerState, TrainingOptions, training_graph};
use compiler::training_input::{TrainingInput, training_input};
use compiler::training_proof::{Proof, prove};
use onnx::file::{self, Model};
use serde_json::json;
use std::path::PathBuf;

/// What to differentiate, and how to train.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct Grad {
    /// The ONNX file
    #[arg(value_name = "MODEL.onnx")]
    path: PathBuf,
    /// The file to write
    #[arg(short, long, value_name = "TRAIN.onnx")]
    out: PathBuf,
    /// The loss to minimize: cross-entropy, mse, or the name of an output with one element
    #[arg(long)]
    loss: Loss,
    /// The output from which cross-entropy or mse is computed, if the model has several
    #[arg(long, value_name = "NAME")]
    output: Option<String>,
    /// The optimizer to include: sgd, momentum, adam or adamw (default: none, gradients only)
    #[arg(long)]
    optimizer: Option<Optimizer>,
    /// Who provides the optimizer's first state: outside (the training loop gives the state to every step, zeros to the
    /// first) or inside (the file holds these zeros, and 1 as `step`, as defaults)
    #[arg(long, value_name = "WHERE", requires = "optimizer")]
    optimizer_state: Option<OptimizerState>,
    /// Initializers, constants or inputs with respect to which the loss is differentiated, separated by commas
    /// (default: the initializers that are parameters; if there are none, the values of Constant nodes with more than
    /// one real number)
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    wrt: Option<Vec<String>>,
    /// With an optimizer: leave out the outputs NAME.grad, which take time to write
    #[arg(long, requires = "optimizer")]
    no_gradients: bool,
    /// Label smoothing: the fraction of each label that cross-entropy spreads over all classes
    #[arg(long, value_name = "PART", default_value_t = 0.0)]
    label_smoothing: f64,
    /// The form of BatchNormalization and Dropout: file (each node's own), train (statistics of
    /// the batch, values dropped), eval (running statistics, nothing dropped)
    #[arg(long, default_value = "file")]
    mode: Mode,
    /// A value for a dynamic size: a number, or a sum of other sizes that have values (total=past+new); repeat it for
    /// several (default: it stays dynamic, or if the graph needs a number, one with which the model runs)
    #[arg(long, value_name = "NAME=SIZE", value_parser = sizes::parse_positive)]
    bind: Vec<(String, SymExpr)>,
    /// Write the file without verifying its gradients
    #[arg(long)]
    no_verify: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const HELP: &str = "\
Examples:
  shorthaul grad model.onnx -o train.onnx --loss cross-entropy
  shorthaul grad model.onnx -o train.onnx --loss mse --optimizer adam --wrt fc.weight,fc.bias
  shorthaul grad resnet.onnx -o train.onnx --loss cross-entropy --optimizer adamw --mode train
  shorthaul grad model.onnx -o train.onnx --loss mse --optimizer sgd --no-gradients

Inputs of the file: those of the model, its initializers (their present values are the defaults), `labels`
or `target`, and with an optimizer `lr` and the optimizer's state, which starts as zeros. Logits have the
shape [N, C, …], labels [N, …]. adam and adamw also read `step`, the number of the step as a float: 1 in
the first step, then 2, 3 and so on. With --optimizer-state inside, the first step may leave out
the state and `step`.
The command trains initializers that PyTorch's exporter marked as parameters. It also trains initializers
without a mark, unless it recognizes them as something else: running statistics, limits and scales of
operators, frequencies of position embeddings, tables of sines, masks, constants of exporters. It prints
what is trained, and what is not, with the reasons.
Outputs: `loss`, and for each parameter NAME its gradient NAME.grad and its new value NAME.next. The
training loop feeds each NAME.next back as NAME in the next step; there is no `step.next`. A loop that does
not read gradients is faster with --no-gradients.
momentum uses 0.9; adam and adamw use betas 0.9 and 0.999 and epsilon 1e-8, adamw a weight decay of 0.01.
For parameters in half precision, the optimizer's state is stored in single precision.
Before it writes the file, the command verifies it in float64: it computes the loss again from the model's
outputs, and compares the gradients with finite differences of the loss along random directions.
PyTorch exports BatchNormalization in evaluation form even from a model in training mode. With --mode train
it uses the statistics of the batch instead, and the running statistics have NAME.next too.";

/// Writes the file and says what it holds.
///
/// # Errors
/// The model cannot be read, differentiated or written; the target then is as it was.
pub fn run(args: &Grad, quiet: bool) -> Result<Answer> {
    apart(&args.out)?;
    let path = args.path.as_path();
    let mut progress = Progress::new(quiet);
    progress.stage("reading");
    let bytes = file::read_whole(path)?;
    let sources = known(Model::of_bytes(path, bytes.clone())?)?;
    refuse_unsound(&sources)?;
    let options = Options {
        sizes: sizes::numbers("--bind", &args.bind)?,
        mode: args.mode,
    };
    let file = File::decode(path, bytes)?;
    let input = training_input(file, &sources, &options, args.wrt.as_deref())?;
    let model = &input.model;
    progress.stage("differentiating");
    let training = TrainingOptions {
        loss: args.loss.clone(),
        output: args.output.clone(),
        optimizer: args.optimizer,
        optimizer_state: args.optimizer_state.unwrap_or_default(),
        wrt: args.wrt.clone(),
        gradients: !args.no_gradients,
        label_smoothing: args.label_smoothing,
    };
    let bytes = training_graph(model, &training)
        .with_context(|| format!("cannot make a training graph of {}", path.display()))?;
    let made = Model::of_bytes(&args.out, bytes.clone().into())?;
    let proof = match args.no_verify {
        true => None,
        false => {
            progress.stage("verifying");
            let found = prove((&sources, model), &made, &training, args.mode);
            Some(found.with_context(|| {
                format!(
                    "the training graph of {} is wrong, so nothing is written; please report it \
                     (--no-verify writes it anyway)",
                    path.display()
                )
            })?)
        }
    };
    progress.stage("writing");
    let staged = file::stage_bytes(&bytes, &args.out, &sources.files())?;
    drop(progress);
    // With `--mode train` they normalize by the batch, and with `eval` fixed statistics are what was asked for.
    let frozen = match args.mode {
        Mode::File => model.frozen.as_slice(),
        _ => &[],
    };
    let trained = Trained::new(&input, &made, args.wrt.as_deref());
    let text = match args.json {
        true => as_json(args, &made, (&input, &trained), frozen, proof.as_ref()),
        false => text(
            args,
            &made,
            (&input, &trained),
            frozen.len(),
            proof.as_ref(),
        ),
    };
    Ok(Answer::with(text, staged))
}

fn text(
    args: &Grad,
    made: &Model,
    (input, trained): (&TrainingInput, &Trained),
    n_frozen: usize,
    proof: Option<&Proof>,
) -> String {
    let mut said = format!(
        "{}: {}, a training graph of {}\n",
        args.out.display(),
        crate::units::bytes(made.n_bytes as i64),
        args.path.display()
    );
    for line in trained.lines("--wrt") {
        said.push_str(&format!("{line}\n"));
    }
    for note in input.notes("--bind", "--wrt") {
        said.push_str(&format!("{note}\n"));
    }
    if n_frozen > 0 {
        said.push_str(&format!(
            "{n_frozen} BatchNormalization nodes use their running statistics, as in the file; --mode train uses \
             the statistics of the batch\n"
        ));
    }
    match proof {
        Some(Proof::Found(found)) => {
            let loss = match found.loss {
                Some(error) => format!("loss within {error:.1e} of the model's, "),
                None => "loss not compared, ".to_string(),
            };
            let step = match found.step {
                Some(error) => {
                    format!(", update within {error:.1e} of that of the graph with gradients")
                }
                None => String::new(),
            };
            said.push_str(&format!(
                "verified in float64 ({}): {loss}gradients within {:.1e} of finite differences{step}\n",
                found.run, found.gradients
            ));
        }
        Some(Proof::Untried(why)) => said.push_str(&format!("not verified: {why}\n")),
        None => {}
    }
    said
}

fn as_json(
    args: &Grad,
    made: &Model,
    (input, trained): (&TrainingInput, &Trained),
    frozen: &[String],
    proof: Option<&Proof>,
) -> String {
    let graph = made.proto.graph.iter();
    let names = |ports: &[onnx::proto::ValueInfoProto]| -> Vec<String> {
        ports.iter().map(|port| port.name.clone()).collect()
    };
    let value = json!({
        "path": args.path.display().to_string(),
        "out": args.out.display().to_string(),
        "file_bytes": made.n_bytes,
        "inputs": graph.clone().flat_map(|g| names(&g.input)).collect::<Vec<_>>(),
        "outputs": graph.flat_map(|g| names(&g.output)).collect::<Vec<_>>(),
        "found_sizes": input.sizes,
        "constants": input.constants,
        "trained": trained.trained,
        "left_out": trained.left_out,
        "shared": input.shared,
        "keep_running_statistics": frozen,
        "verified": match proof {
            Some(Proof::Found(found)) => json!({
                "run": found.run,
                "loss_error": found.loss,
                "gradient_error": found.gradients,
                "step_error": found.step,
            }),
            _ => json!(null),
        },
        "not_verified": match proof {
            Some(Proof::Untried(why)) => Some(why),
            _ => None,
        },
    });
    format!("{value:#}\n")
}
