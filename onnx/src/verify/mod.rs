//! Proof by running: a rewritten model gives what the original gives.
//!
//! There are several seeds, each with sizes of its own where sizes are dynamic. The original in float64 is the
//! reference. The rewritten model's error against it may be larger than that of the original in its own types only by
//! a factor ([`SLACK`]) and a few roundings ([`ROUNDINGS`]). Integers, truth values and text are equal. With NaN and
//! infinities planted in the inputs, the same elements are NaN or infinite afterwards. Where the original runs with a
//! dynamic size of 0, so does the rewritten model. Both models are cut at operators that have no meaning here: what
//! goes in is compared, what comes out is given. If its sizes are not known, another program is asked for it
//! (`asked.rs`), or they are guessed. If inputs and outputs are so large that several runs would fill the memory,
//! there is one run. Never trusts a rule.

mod asked;
mod attempts;
mod bisect;
mod compare;
mod cuts;
mod divergence;
mod fitting;
mod given;
mod gradient;
mod masks;
mod numbers;
mod options;
mod random;
mod related;
mod renamed;
mod rounding;
mod runs;
mod samples;

pub use bisect::{Dropped, Proof, ProveError, Stopped, prove};
pub use compare::OutputError;
pub use cuts::is_known;
pub use divergence::{Comparison, Computed, Divergence, Reused, compare_values};

pub use given::relation;
pub use gradient::{
    GradientError, GradientEvidence, MOST_ERROR, Objective, Original, check_gradients,
    check_same_step,
};
pub use options::{Options, Sample, SamplesRun};
pub use renamed::Difference;
pub use rounding::Unsettled;

use crate::evaluate::{EvaluateError, Outcome, Precision, Program, Values, label};
use crate::file::Model;
use crate::proto::ModelProto;
use crate::tensor::Tensor;
use cuts::Cuts;
use runs::{Programs, Run, is_blind};
use samples::{Planted, Sampler};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// A rewritten model's error against float64 may be that many times the original's.
pub const SLACK: f64 = 4.0;
/// Units of the last place of the output's largest element that are allowed besides: a rewrite rounds constants anew,
/// and an original may happen to be exact.
pub const ROUNDINGS: f64 = 64.0;

/// Most bytes of a run's inputs and outputs with which more than one run is made: all of them are kept.
const MOST_OF_SEVERAL_RUNS: usize = 64 << 20;

/// Trips after which a loop is given up: on made-up inputs one that waits for something may never end.
const MOST_TRIPS: i64 = 1 << 13;

/// Another program that runs models, as an independent witness.
pub trait Oracle: fmt::Debug + Send + Sync {
    /// Its name, in messages.
    fn name(&self) -> &str;

    /// The outputs of a model for each set of inputs, in the order of the model.
    ///
    /// # Errors
    /// See [`OracleError`].
    fn outputs(&self, model: &Model, feeds: &[Values]) -> Result<Vec<Vec<Tensor>>, OracleError>;
}

/// Why an oracle says nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OracleError {
    /// It refuses the model or its inputs.
    #[error("{0}")]
    Refused(String),
    /// It could not be asked: no file could be written, or it could not be started.
    #[error("{0}")]
    Unasked(String),
}

/// Why models cannot be compared, or how they differ.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum VerifyError {
    /// The original does not run, whatever sizes were tried.
    #[error(
        "the model does not run on random inputs ({cause}); give sizes or inputs that it runs with"
    )]
    Original {
        /// The last reason.
        cause: EvaluateError,
    },
    /// The time was over before the original had run.
    #[error(
        "the time limit was reached before the original had run on all made-up inputs, at {node}"
    )]
    Late {
        /// The node that came next.
        node: String,
    },
    /// Inputs or sizes that were given do not fit the model.
    #[error("{what}")]
    Given {
        /// Which, and what would fit.
        what: String,
    },
    /// The model does not take inputs that were given, or does not run on them.
    #[error("with the inputs of {files}, {what}")]
    Sample {
        /// The files that they are from.
        files: String,
        /// Why.
        what: String,
    },
    /// An output of an operator without a meaning here has sizes that are not known.
    #[error(
        "cannot make up results of {node}, which Shorthaul does not know: their sizes are not declared; declare them in the file, or skip verification"
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
    /// Another model does not run where the first one does.
    #[error("the second model does not run where the first one does: {cause}")]
    Second {
        /// Why.
        cause: EvaluateError,
    },
    /// A node without a meaning here is not the same any more.
    #[error("{node} was changed, though Shorthaul does not know its operator")]
    Changed {
        /// The node.
        node: String,
    },
    /// The other program does not run the model.
    #[error("{oracle} cannot run the model: {what}")]
    Oracle {
        /// Its name.
        oracle: String,
        /// What it says.
        what: String,
    },
    /// The other program could not be asked, which says nothing about the model.
    #[error("cannot start {oracle}: {what}")]
    Unasked {
        /// Its name.
        oracle: String,
        /// What stood in the way.
        what: String,
    },
    /// They do not have the same outputs.
    #[error("the outputs are {before} in one file and {after} in the other")]
    Outputs {
        /// Outputs of the original.
        before: String,
        /// Outputs of the other model.
        after: String,
    },
    /// They differ.
    #[error("`{output}` differs ({run}): {what}")]
    Differs {
        /// The output, or an input of a node where the models are cut.
        output: String,
        /// Seed, sizes, planted values.
        run: String,
        /// A sentence that says how they differ.
        what: String,
    },
}

/// Evidence that a model computes what the original computes.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// One line per run: seed, sizes, what was planted.
    pub runs: Vec<String>,
    /// The largest errors of each compared value over all runs with finite inputs.
    pub errors: Vec<OutputError>,
    /// Nodes at which both models were cut, because their operators have no meaning here.
    pub cuts: Vec<String>,
    /// Outputs of which no run with finite inputs gave a finite element: nothing is known of their error.
    pub blind: Vec<String>,
    /// Branches that no run took: nothing is known of what they give.
    pub untried: Vec<String>,
    /// Runs that were left out because the original does not run there: which, and why.
    pub left_out: Vec<String>,
    /// Outputs that rounding alone moves far. They were compared with how far it moves them.
    pub unsettled: Vec<Unsettled>,
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
    cuts: Cuts<'m>,
    runs: Vec<Run>,
    left_out: Vec<String>,
    /// Runs of the original with other roundings.
    samples: rounding::Samples,
    untried: Vec<String>,
    witness: Option<Witness>,
    tolerance: f64,
    deadline: Option<Instant>,
    /// Set if the time was over before the original had run with all samples: the error, and with how many it had run.
    late: Option<(VerifyError, SamplesRun)>,
}

/// What another program gives for the original in the runs with finite inputs.
struct Witness {
    oracle: Arc<dyn Oracle>,
    outputs: Vec<Vec<Tensor>>,
}

impl<'m> Checker<'m> {
    /// Runs the original on inputs made up for it, and with all samples.
    ///
    /// # Errors
    /// [`VerifyError::Given`], [`VerifyError::Original`], [`VerifyError::Cut`], [`VerifyError::Late`].
    pub fn new(original: &'m Model, options: &Options) -> Result<Checker<'m>, VerifyError> {
        let checker = Checker::in_time(original, options)?;
        match checker.late.clone() {
            Some((late, _)) => Err(late),
            None => Ok(checker),
        }
    }

    /// As [`Checker::new`], but where the time is over after the first sample, the runs up to there are kept.
    fn in_time(original: &'m Model, options: &Options) -> Result<Checker<'m>, VerifyError> {
        let cuts = Cuts::new(&original.proto);
        let samples = options.by_sample();
        let in_first = |error| samples[0].in_sample(error);
        let mut sampler = Sampler::new(original, &cuts, &samples[0]).map_err(in_first)?;
        let wanted = cuts.wanted(&original.proto);
        let plans = (1..options.n_seeds).map(|seed| (seed, Planted::Nothing));
        let planted = [Planted::Nan, Planted::Infinity].into_iter().enumerate();
        let planted = planted.map(|(n, planted)| (options.n_seeds.max(1) + n, planted));
        let planted = planted.filter(|_| sampler.has_floats());
        let others: Vec<(usize, Planted)> = plans.chain(planted).collect();
        // The first run finds sizes that work.
        let programs = Programs::new(original, options.deadline)?;
        let programs = programs.asking(original, &mut sampler, options.oracle.as_ref());
        let first = programs.run(&sampler, &wanted, 0, Planted::Nothing);
        let (mut first, attempt) = first.map_err(in_first)?;
        first.described = samples[0].described(first.described);
        sampler.settle(&attempt);
        let is_large = first.n_bytes() > MOST_OF_SEVERAL_RUNS;
        let (mut runs, mut left_out) = (vec![first], Vec::new());
        if !is_large {
            match programs.others(&sampler, &wanted, &others) {
                Ok(others) => {
                    runs.extend(others.runs);
                    left_out = others.left_out;
                }
                // One run of the original is enough to go on.
                Err(VerifyError::Late { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let n_before = runs.len();
        let late = programs.add_given(&mut runs, (original, &cuts), &samples[1..], &wanted)?;
        let n_run = 1 + runs.len() - n_before;
        let n_given = samples.len();
        let late = late.map(|late| (late, SamplesRun { n_run, n_given }));
        let mut checker = Checker {
            original,
            cuts,
            runs,
            left_out,
            samples: rounding::Samples::default(),
            untried: programs.stored.untried(),
            witness: None,
            tolerance: options.tolerance,
            deadline: options.deadline,
            late,
        };
        if let Some(oracle) = &options.oracle {
            let outputs = checker.ask(oracle, original)?;
            let oracle = Arc::clone(oracle);
            checker.witness = Some(Witness { oracle, outputs });
        }
        Ok(checker)
    }

    /// With how many samples the original ran, where the time was over before it had with all.
    fn samples_run(&self) -> Option<SamplesRun> {
        self.late.as_ref().map(|(_, samples)| *samples)
    }

    /// Whether the time that was given is over.
    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|end| Instant::now() >= end)
    }

    /// What an oracle gives for a model in the runs with finite inputs.
    fn ask(
        &self,
        oracle: &Arc<dyn Oracle>,
        model: &Model,
    ) -> Result<Vec<Vec<Tensor>>, VerifyError> {
        let graph = self.original.proto.graph.as_ref();
        let is_input = |name: &str| graph.is_some_and(|g| g.input.iter().any(|i| i.name == name));
        let finite = self.runs.iter().filter(|run| run.exact.is_some());
        let feeds: Vec<Values> = finite
            .map(|run| {
                let given = run.feeds.iter().filter(|(name, _)| is_input(name));
                given.map(|(name, t)| (name.clone(), t.clone())).collect()
            })
            .collect();
        let outputs = oracle.outputs(model, &feeds);
        let oracle = oracle.name().to_string();
        outputs.map_err(|error| match error {
            OracleError::Refused(what) => VerifyError::Oracle { oracle, what },
            OracleError::Unasked(what) => VerifyError::Unasked { oracle, what },
        })
    }

    /// Compares what the oracle gives for both models.
    fn compare_witness(
        &self,
        rewritten: &ModelProto,
        folder: &Arc<Path>,
        evidence: &mut Evidence,
    ) -> Result<(), VerifyError> {
        let Some(witness) = &self.witness else {
            return Ok(());
        };
        let model = Model {
            folder: Arc::clone(folder),
            ..self.original.with(rewritten.clone())
        };
        let found = self.ask(&witness.oracle, &model)?;
        let compared = self.cuts.wanted(&self.original.proto);
        let names: Vec<&String> = graph_outputs(&self.original.proto).collect();
        let runs = self.runs.iter().enumerate();
        let finite = runs.filter(|(_, run)| run.exact.is_some());
        let random = self
            .cuts
            .after(&self.original.proto, &|node| self.cuts.draws(node));
        let behind = self.cuts.after(&self.original.proto, &|_| true);
        for (n, (place, run)) in finite.enumerate() {
            for (k, name) in names.iter().copied().enumerate() {
                // Each model draws numbers of its own.
                if random.contains(name.as_str()) {
                    continue;
                }
                let at = compared.iter().position(|c| c == name);
                let exact = run.exact.as_ref().and_then(|e| e.get(at?));
                // The reference has made-up numbers where the oracle computes.
                let exact = exact.filter(|_| !behind.contains(name.as_str()));
                let (Some(before), Some(after)) = (witness.outputs[n].get(k), found[n].get(k))
                else {
                    continue;
                };
                let error = compare::errors(name, before, after, exact, self.tolerance);
                let error = error.or_else(|what| {
                    let at = at.filter(|_| exact.is_some()).ok_or(what.clone())?;
                    let pair = [before, after];
                    let again = self.compare_rounded((place, at), &compared, pair, what)?;
                    rounding::note(&mut evidence.unsettled, name, again.1);
                    Ok(again.0)
                });
                let error = error.map_err(|what| VerifyError::Differs {
                    output: name.clone(),
                    run: format!("{}, {}", witness.oracle.name(), run.described),
                    what,
                })?;
                if exact.is_some() {
                    compare::merge(&mut evidence.errors, error);
                }
            }
            let described = format!("{}: {}", witness.oracle.name(), run.described);
            evidence.runs.push(described);
        }
        Ok(())
    }

    /// Compares a rewritten model.
    ///
    /// # Errors
    /// [`VerifyError::Rewritten`], [`VerifyError::Differs`].
    pub fn check(&self, rewritten: &ModelProto) -> Result<Evidence, VerifyError> {
        // Where no rule changed anything, running it again would prove nothing.
        let unchanged = *rewritten == self.original.proto;
        self.compare(rewritten, &self.original.folder, unchanged)
    }

    /// Compares a model of any origin.
    ///
    /// # Errors
    /// [`VerifyError::Outputs`], [`VerifyError::Second`], [`VerifyError::Differs`].
    pub fn check_other(&self, other: &Model) -> Result<Evidence, VerifyError> {
        let names =
            |model: &Model| -> Vec<String> { graph_outputs(&model.proto).cloned().collect() };
        let (a, b) = (names(self.original), names(other));
        if a != b {
            return Err(VerifyError::Outputs {
                before: a.join(", "),
                after: b.join(", "),
            });
        }
        // Equal messages may still differ in the sign of a zero.
        let found = self.compare(&other.proto, &other.folder, false);
        found.map_err(|error| match error {
            VerifyError::Rewritten { cause } => VerifyError::Second { cause },
            error => error,
        })
    }

    fn compare(
        &self,
        rewritten: &ModelProto,
        folder: &Arc<Path>,
        unchanged: bool,
    ) -> Result<Evidence, VerifyError> {
        let failed = |cause| VerifyError::Rewritten { cause };
        let program =
            program(rewritten, folder, Precision::AsStored, self.deadline).map_err(failed)?;
        let compared = self.cuts.counterparts(&self.original.proto, rewritten)?;
        let wanted = compared.pairs;
        let names: Vec<String> = wanted.iter().map(|(shown, _)| shown.clone()).collect();
        let mut evidence = Evidence {
            cuts: self.cuts.nodes.iter().map(|n| label(n)).collect(),
            shapes: self.runs.first().map(Run::shapes).unwrap_or_default(),
            blind: self.blind(&names),
            untried: self.untried.clone(),
            left_out: self.left_out.clone(),
            ..Evidence::default()
        };
        let values: Vec<&str> = wanted.iter().map(|(_, name)| name.as_str()).collect();
        let found: Vec<Outcome> = match unchanged {
            true => self.runs.iter().map(|run| Ok(run.stored.clone())).collect(),
            false => {
                let feeds = self.runs.iter().map(|run| run.feeds_of(&compared.renamed));
                runs::all(&program, &feeds.collect::<Vec<_>>(), &values)
            }
        };
        self.compare_runs(&names, &found, &mut evidence)?;
        self.compare_witness(rewritten, folder, &mut evidence)?;
        Ok(evidence)
    }
}

impl Checker<'_> {
    /// Compares what the rewritten model gives in every run.
    fn compare_runs(
        &self,
        names: &[String],
        found: &[Outcome],
        evidence: &mut Evidence,
    ) -> Result<(), VerifyError> {
        let failed = |cause: &EvaluateError| VerifyError::Rewritten {
            cause: cause.clone(),
        };
        let mut short = compare::ShortSlices::default();
        for (at, (run, found)) in self.runs.iter().zip(found).enumerate() {
            let found = found.as_ref().map_err(failed)?;
            for (n, after) in found.iter().enumerate() {
                let exact = run.exact.as_ref().map(|e| &e[n]);
                let before = &run.stored[n];
                if let Some(exact) = exact {
                    short.add(n, [before, after, exact]);
                }
                let error = compare::errors(&names[n], before, after, exact, self.tolerance);
                let error = error.or_else(|what| {
                    let again = self.compare_rounded((at, n), names, [before, after], what);
                    let (error, moved) = again.map_err(|what| VerifyError::Differs {
                        output: names[n].clone(),
                        run: run.described.clone(),
                        what,
                    })?;
                    rounding::note(&mut evidence.unsettled, &names[n], moved);
                    Ok(error)
                })?;
                if run.exact.is_some() {
                    compare::merge(&mut evidence.errors, error);
                }
            }
            evidence.runs.push(run.described.clone());
        }
        let mut again = BTreeSet::new();
        while let Some((n, what)) = short.worst(self.tolerance) {
            if !again.insert(n) {
                return Err(VerifyError::Differs {
                    output: names[n].clone(),
                    run: "all runs together".to_string(),
                    what,
                });
            }
            short.forget(n);
            for (at, (run, found)) in self.runs.iter().zip(found).enumerate() {
                let (Some(exact), Ok(found)) = (&run.exact, found) else {
                    continue;
                };
                let yardstick = self.known_yardstick((at, n), names, &found[n]);
                let before = yardstick.as_ref().map_or(&run.stored[n], |y| &y.tensor);
                short.add(n, [before, &found[n], &exact[n]]);
                if let Some(yardstick) = &yardstick {
                    rounding::note(&mut evidence.unsettled, &names[n], yardstick.moved);
                }
            }
        }
        Ok(())
    }

    /// Which of the compared values never have a finite element.
    fn blind(&self, names: &[String]) -> Vec<String> {
        let finite = || self.runs.iter().filter(|run| run.exact.is_some());
        let is_blind_now = |run: &Run, n: usize| run.stored.get(n).is_some_and(is_blind);
        let never = |n: &usize| {
            let some = finite().any(|run| is_blind_now(run, *n));
            some && finite().all(|run| is_blind_now(run, *n) || run.stored[*n].is_empty())
        };
        let blind = (0..names.len()).filter(never);
        blind.map(|n| names[n].clone()).collect()
    }
}

/// Names of a model's outputs.
fn graph_outputs(model: &ModelProto) -> impl Iterator<Item = &String> {
    model.graph.iter().flat_map(|g| &g.output).map(|o| &o.name)
}

fn program<'a>(
    proto: &'a ModelProto,
    folder: &'a Path,
    precision: Precision,
    deadline: Option<Instant>,
) -> Result<Program<'a>, EvaluateError> {
    let program = Program::new(proto, folder, precision);
    let program = program.map(|p| p.within(MOST_TRIPS).until(deadline).keeping());
    program.ok_or_else(|| EvaluateError::Value {
        name: "graph".to_string(),
        what: "is missing".to_string(),
    })
}

/// Inputs made up for a model, at sizes it runs with.
///
/// # Errors
/// [`VerifyError::Given`], [`VerifyError::Original`], [`VerifyError::Cut`].
pub fn made_up(model: &Model, seed: usize, options: &Options) -> Result<Values, VerifyError> {
    let cuts = Cuts::new(&model.proto);
    let mut sampler = Sampler::new(model, &cuts, options)?;
    let wanted = cuts.wanted(&model.proto);
    let programs = Programs::new(model, options.deadline)?;
    let programs = programs.asking(model, &mut sampler, options.oracle.as_ref());
    let (run, _) = programs.run(&sampler, &wanted, seed, Planted::Nothing)?;
    // Values that stand for nodes without a meaning here are not inputs of the model.
    let inputs = model.proto.graph.iter().flat_map(|g| &g.input);
    let inputs: BTreeSet<&str> = inputs.map(|i| i.name.as_str()).collect();
    let given = run.feeds.into_iter();
    Ok(given
        .filter(|(name, _)| inputs.contains(name.as_str()))
        .collect())
}

#[cfg(test)]
mod made_up_tests;
#[cfg(test)]
mod rounding_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod witness_tests;
