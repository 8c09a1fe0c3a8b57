//! `shorthaul grad`: the training graph of a model, as an ONNX file.

use crate::answer::{Answer, apart};
use crate::check::refuse_unsound;
use crate::progress::Progress;
use crate::sizes;
use anyhow::{Context, Result};
use clap::Args;
use compiler::importer::onnx::{File, Mode, Options};
use compiler::training_graph::{Loss, Optimizer, TrainingOptions, training_graph};
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
    /// What is minimized: cross-entropy, mse, or an output of the model
    #[arg(long)]
    loss: Loss,
    /// How parameters are updated: sgd, momentum, adam, adamw
    #[arg(long)]
    optimizer: Option<Optimizer>,
    /// Initializers or inputs to differentiate (default: every trainable initializer)
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    wrt: Option<Vec<String>>,
    /// With an optimizer: do not give NAME.grad, which costs passes over memory
    #[arg(long, requires = "optimizer")]
    no_gradients: bool,
    /// How much of each label cross-entropy spreads over all classes
    #[arg(long, value_name = "PART", default_value_t = 0.0)]
    label_smoothing: f64,
    /// The form of BatchNormalization and Dropout: file (each node's own), train (statistics of
    /// the batch, values dropped), eval (running statistics, nothing dropped)
    #[arg(long, default_value = "file")]
    mode: Mode,
    /// A value for a dynamic size; repeat it for several
    #[arg(long, value_name = "NAME=SIZE", value_parser = sizes::parse_positive)]
    bind: Vec<(String, i64)>,
    /// Do not try the gradients against differences of the loss
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

The file has the model's inputs, its initializers (which keep their values as defaults), `labels` or
`target`, and with an optimizer `lr` and its state, zeros at first. Classes are dimension 1 of the output:
logits are [N, C, …], labels [N, …]. It gives `loss`, NAME.grad and NAME.next; the loop gives every
NAME.next back as NAME. A loop that does not look at gradients is faster with --no-gradients. State of parameters in half precision is in single precision.
adam and adamw also read `step`, the number of the step as a float: 1 in the first, then 2, 3 and so on;
there is no `step.next`. momentum keeps 0.9 of the last step; adam and adamw have betas 0.9 and 0.999 and
an epsilon of 1e-8, adamw a weight decay of 0.01.
The loss is computed again from the model's outputs, and gradients are held against differences of the
loss along random directions, in float64; nothing is written if they disagree.
PyTorch exports BatchNormalization in evaluation form even from a model in training mode: --mode train
normalizes by the batch instead, and NAME.next then holds the running statistics as well.";

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
    let sources = Model::of_bytes(path, bytes.clone())?;
    refuse_unsound(&sources)?;
    let options = Options {
        sizes: args.bind.iter().cloned().collect(),
        mode: args.mode,
    };
    let model = File::decode(path, bytes)?.import(&options)?;
    progress.stage("differentiating");
    let training = TrainingOptions {
        loss: args.loss.clone(),
        optimizer: args.optimizer,
        wrt: args.wrt.clone(),
        gradients: !args.no_gradients,
        label_smoothing: args.label_smoothing,
    };
    let bytes = training_graph(&model, &training)
        .with_context(|| format!("no training graph of {}", path.display()))?;
    let made = Model::of_bytes(&args.out, bytes.clone().into())?;
    let proof = match args.no_verify {
        true => None,
        false => {
            progress.stage("verifying");
            let found = prove((&sources, &model), &made, &training, args.mode);
            Some(found.with_context(|| {
                format!(
                    "wrong training graph of {}, nothing is written; please report it \
                     (--no-verify writes it all the same)",
                    path.display()
                )
            })?)
        }
    };
    progress.stage("writing");
    let staged = file::stage_bytes(&bytes, &args.out, &sources.files())?;
    drop(progress);
    // By the batch they are normalized with --mode train, and on purpose they are not with eval.
    let frozen = match args.mode {
        Mode::File => model.frozen.as_slice(),
        _ => &[],
    };
    let text = match args.json {
        true => as_json(args, &made, frozen, proof.as_ref()),
        false => text(args, &made, frozen.len(), proof.as_ref()),
    };
    Ok(Answer::with(text, staged))
}

fn text(args: &Grad, made: &Model, n_frozen: usize, proof: Option<&Proof>) -> String {
    let mut said = format!(
        "{}: {} of gradients of {}\n",
        args.out.display(),
        crate::units::bytes(made.n_bytes as i64),
        args.path.display()
    );
    if n_frozen > 0 {
        said.push_str(&format!(
            "{n_frozen} of its BatchNormalization nodes keep their running statistics, as the file says; \
             --mode train normalizes by the batch\n"
        ));
    }
    match proof {
        Some(Proof::Found(found)) => {
            let loss = match found.loss {
                Some(error) => format!("the loss within {error:.1e} of the model's, "),
                None => "the loss in that form not compared, ".to_string(),
            };
            let step = match found.step {
                Some(error) => {
                    format!(", the step within {error:.1e} of that of the graph with gradients")
                }
                None => String::new(),
            };
            said.push_str(&format!(
                "verified in float64 ({}): {loss}gradients within {:.1e} of differences of the loss{step}\n",
                found.run, found.gradients
            ));
        }
        Some(Proof::Untried(why)) => said.push_str(&format!("not verified: {why}\n")),
        None => {}
    }
    said
}

fn as_json(args: &Grad, made: &Model, frozen: &[String], proof: Option<&Proof>) -> String {
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
