//! Proof by running: a rewritten model gives what the original gives.
//!
//! Several seeds, each with sizes of its own where sizes are dynamic; the original in float64 is the
//! reference, and the rewritten model may be further from it than the original in its own types only
//! by a factor ([`SLACK`]) and a few roundings ([`ROUNDINGS`]). Integers, truth values and text are equal. With
//! NaN and infinities planted in the inputs, the same elements are NaN or infinite afterwards. At
//! operators that have no meaning here both models are cut: what goes in is compared, what comes out
//! is given. Never trusts a rule.

mod bisect;
mod compare;
mod samples;

pub use bisect::{Dropped, Proof, ProveError, prove};
pub use compare::OutputError;

use crate::attributes::{Attributes, bodies};
use crate::evaluate::{self, EvaluateError, Precision, Program, Values, label};
use crate::file::Model;
use crate::infer::is_random;
use crate::operators;
use crate::proto::{ModelProto, NodeProto};
use crate::tensor::Tensor;
use samples::{Planted, Sampler};
use std::collections::BTreeMap;
use std::path::Path;

/// A rewritten model's error against float64 may be that many times the original's.
pub const SLACK: f64 = 4.0;
/// And that many units of the last place of the output's largest element more: a rewrite rounds
/// constants anew, and an original may happen to be exact.
pub const ROUNDINGS: f64 = 64.0;

/// How to verify.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seeds with finite inputs; one more has NaN, one more infinities.
    pub n_seeds: usize,
    /// Sizes to use for dynamic sizes instead of those tried here, by name.
    pub sizes: BTreeMap<String, i64>,
    /// Inputs to use instead of random ones, by name.
    pub inputs: Values,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            n_seeds: 2,
            sizes: BTreeMap::new(),
            inputs: Values::new(),
        }
    }
}

/// Why models cannot be compared, or how they differ.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum VerifyError {
    /// The original does not run, whatever sizes were tried.
    #[error(
        "the model does not run on random inputs ({cause}); give sizes with --bind, inputs with --inputs"
    )]
    Original {
        /// The last reason.
        cause: EvaluateError,
    },
    /// What an operator without a meaning here gives has sizes nobody knows.
    #[error(
        "what {node} gives cannot be made up: its sizes are not known; declare them, or give up verification with --no-verify"
    )]
    Cut {
        /// The node.
        node: String,
    },
    /// The rewritten model does not run where the original does.
    #[error("the rewritten model does not run: {cause}")]
    Rewritten {
        /// Why.
        cause: EvaluateError,
    },
    /// They do not have the same outputs.
    #[error("one gives {before}, the other {after}")]
    Outputs {
        /// Of the original.
        before: String,
        /// Of the other one.
        after: String,
    },
    /// They differ.
    #[error("`{output}` differs ({run}): {what}")]
    Differs {
        /// The output, or an input of a node where the models are cut.
        output: String,
        /// Seed, sizes, planted values.
        run: String,
        /// In what way.
        what: String,
    },
}

/// That a model gives what the original gives.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// One line per run: seed, sizes, what was planted.
    pub runs: Vec<String>,
    /// The largest errors of each compared value over all runs with finite inputs.
    pub errors: Vec<OutputError>,
    /// Nodes at which both models were cut, because their operators have no meaning here.
    pub cuts: Vec<String>,
    /// Sizes of the inputs in the first run, by name.
    pub shapes: BTreeMap<String, Vec<usize>>,
}

impl Evidence {
    /// The largest error against float64, of the original and of the rewritten model.
    pub fn worst(&self) -> Option<(f64, f64)> {
        let by_after = |a: &&OutputError, b: &&OutputError| a.after.total_cmp(&b.after);
        self.errors
            .iter()
            .max_by(by_after)
            .map(|e| (e.before, e.after))
    }
}

/// An original with its results, to which rewritten models are compared.
pub struct Checker<'m> {
    original: &'m Model,
    cuts: Vec<&'m NodeProto>,
    runs: Vec<Run>,
}

/// One run of the original.
struct Run {
    described: String,
    feeds: Values,
    stored: Vec<Tensor>,
    /// Absent where NaN or infinities were planted.
    exact: Option<Vec<Tensor>>,
}

impl Run {
    fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let shape = |(name, tensor): (&String, &Tensor)| (name.clone(), tensor.shape.clone());
        self.feeds.iter().map(shape).collect()
    }
}

impl<'m> Checker<'m> {
    /// Runs the original on inputs made up for it.
    ///
    /// # Errors
    /// [`VerifyError::Original`], [`VerifyError::Cut`].
    pub fn new(original: &'m Model, options: &Options) -> Result<Checker<'m>, VerifyError> {
        let cuts = cuts(&original.proto);
        let mut sampler = Sampler::new(original, &cuts, options);
        let wanted = wanted(&original.proto, &cuts);
        let mut runs = Vec::new();
        let plans = (0..options.n_seeds).map(|seed| (seed, Planted::Nothing));
        let planted = [Planted::Nan, Planted::Infinity].into_iter().enumerate();
        let planted = planted.map(|(n, planted)| (options.n_seeds + n, planted));
        for (seed, planted) in plans.chain(planted) {
            if planted != Planted::Nothing && !sampler.has_floats() {
                continue;
            }
            runs.push(run(original, &mut sampler, &wanted, seed, planted)?);
        }
        Ok(Checker {
            original,
            cuts,
            runs,
        })
    }

    /// Compares a rewritten model.
    ///
    /// # Errors
    /// [`VerifyError::Rewritten`], [`VerifyError::Differs`].
    pub fn check(&self, rewritten: &ModelProto) -> Result<Evidence, VerifyError> {
        self.compare(rewritten, &self.original.folder)
    }

    /// Compares a model that may have come about in any way.
    ///
    /// # Errors
    /// [`VerifyError::Outputs`], [`VerifyError::Rewritten`], [`VerifyError::Differs`].
    pub fn check_other(&self, other: &Model) -> Result<Evidence, VerifyError> {
        let names = |model: &Model| -> Vec<String> {
            let outputs = model.proto.graph.iter().flat_map(|g| &g.output);
            outputs.map(|o| o.name.clone()).collect()
        };
        let (a, b) = (names(self.original), names(other));
        if a != b {
            return Err(VerifyError::Outputs {
                before: a.join(", "),
                after: b.join(", "),
            });
        }
        self.compare(&other.proto, &other.folder)
    }

    fn compare(&self, rewritten: &ModelProto, folder: &Path) -> Result<Evidence, VerifyError> {
        let failed = |cause| VerifyError::Rewritten { cause };
        let program = program(rewritten, folder, Precision::AsStored).map_err(failed)?;
        let wanted = self.counterparts(rewritten);
        let names: Vec<String> = wanted.iter().map(|(shown, _)| shown.clone()).collect();
        let mut evidence = Evidence {
            cuts: self.cuts.iter().map(|n| label(n)).collect(),
            shapes: self.runs.first().map(Run::shapes).unwrap_or_default(),
            ..Evidence::default()
        };
        for run in &self.runs {
            let values: Vec<&str> = wanted.iter().map(|(_, name)| name.as_str()).collect();
            let found = program.run(&run.feeds, &values).map_err(failed)?;
            for (n, after) in found.iter().enumerate() {
                let exact = run.exact.as_ref().map(|e| &e[n]);
                let error =
                    compare::errors(&names[n], &run.stored[n], after, exact).map_err(|what| {
                        VerifyError::Differs {
                            output: names[n].clone(),
                            run: run.described.clone(),
                            what,
                        }
                    })?;
                compare::merge(&mut evidence.errors, error);
            }
            evidence.runs.push(run.described.clone());
        }
        Ok(evidence)
    }

    /// What is compared: shown name, and name in the rewritten model. Outputs keep their names; what a
    /// cut node reads may have another.
    fn counterparts(&self, rewritten: &ModelProto) -> Vec<(String, String)> {
        let own = wanted(&self.original.proto, &self.cuts);
        let Some(graph) = &rewritten.graph else {
            return Vec::new();
        };
        let mut names: Vec<(String, String)> = Vec::new();
        let n_outputs = graph.output.len();
        names.extend(own[..n_outputs].iter().map(|n| (n.clone(), n.clone())));
        for cut in &self.cuts {
            let same = |n: &&NodeProto| {
                n.output
                    .iter()
                    .any(|o| !o.is_empty() && cut.output.contains(o))
            };
            let twin = graph.node.iter().find(same).unwrap_or(cut);
            let pairs = cut
                .input
                .iter()
                .zip(&twin.input)
                .filter(|(a, _)| !a.is_empty());
            names.extend(pairs.map(|(a, b)| (a.clone(), b.clone())));
        }
        names
    }
}

/// Values that are compared: outputs, then what cut nodes read.
fn wanted(model: &ModelProto, cuts: &[&NodeProto]) -> Vec<String> {
    let outputs = model.graph.iter().flat_map(|g| &g.output).map(|o| &o.name);
    let read = cuts.iter().flat_map(|n| &n.input).filter(|i| !i.is_empty());
    outputs.chain(read).cloned().collect()
}

/// Nodes of the graph that outputs depend on and that cannot be evaluated.
fn cuts(model: &ModelProto) -> Vec<&NodeProto> {
    let nodes = model.graph.iter().flat_map(|g| &g.node);
    nodes
        .filter(|n| !is_known(model, n) && !n.output.is_empty())
        .collect()
}

/// Whether a node has a meaning here.
fn is_known(model: &ModelProto, node: &NodeProto) -> bool {
    if let Some(function) = evaluate::function_of(model, node) {
        return function.node.iter().all(|n| is_known(model, n));
    }
    let inner = bodies(node)
        .flat_map(|b| &b.node)
        .all(|n| is_known(model, n));
    let training = node.op_type == "Dropout" && Attributes::of(node).int("is_test") == Some(0);
    let known = operators::find(node).is_some() || evaluate::is_control(node);
    inner && known && !is_random(node) && !training
}

fn program<'a>(
    proto: &'a ModelProto,
    folder: &'a Path,
    precision: Precision,
) -> Result<Program<'a>, EvaluateError> {
    Program::new(proto, folder, precision).ok_or_else(|| EvaluateError::Value {
        name: "graph".to_string(),
        what: "is missing".to_string(),
    })
}

/// Inputs made up for a model, at sizes it runs with.
///
/// # Errors
/// [`VerifyError::Original`], [`VerifyError::Cut`].
pub fn made_up(model: &Model, seed: usize, options: &Options) -> Result<Values, VerifyError> {
    let mut sampler = Sampler::new(model, &[], options);
    let wanted = wanted(&model.proto, &[]);
    Ok(run(model, &mut sampler, &wanted, seed, Planted::Nothing)?.feeds)
}

/// Runs the original; sizes are tried until it runs.
fn run(
    original: &Model,
    sampler: &mut Sampler,
    wanted: &[String],
    seed: usize,
    planted: Planted,
) -> Result<Run, VerifyError> {
    let failed = |cause| VerifyError::Original { cause };
    let names: Vec<&str> = wanted.iter().map(String::as_str).collect();
    let stored = program(&original.proto, &original.folder, Precision::AsStored).map_err(failed)?;
    let mut last = None;
    for attempt in sampler.attempts(seed) {
        let Some(feeds) = sampler.feeds(seed, &attempt, planted)? else {
            continue;
        };
        match stored.run(&feeds, &names) {
            Ok(outputs) => {
                sampler.settle(&attempt);
                let exact = match planted {
                    Planted::Nothing => {
                        let exact = program(&original.proto, &original.folder, Precision::Float64)
                            .map_err(failed)?;
                        Some(exact.run(&feeds, &names).map_err(failed)?)
                    }
                    _ => None,
                };
                let described = attempt.describe(seed, planted);
                return Ok(Run {
                    described,
                    feeds,
                    stored: outputs,
                    exact,
                });
            }
            Err(cause) => last = Some(cause),
        }
    }
    let none = EvaluateError::Value {
        name: "inputs".to_string(),
        what: "could not be made up".to_string(),
    };
    Err(VerifyError::Original {
        cause: last.unwrap_or(none),
    })
}
