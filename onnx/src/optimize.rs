//! A file made better: checked, rewritten, verified, counted before and after.
//!
//! Owns the order of these and the summary. Never writes: what comes out is a model for
//! [`crate::file::write`].

use crate::attributes::{bodies, is_standard};
use crate::check::{self, Problem};
use crate::cost::{Cost, cost};
use crate::edit::{self, RaiseError};
use crate::evaluate::{function_of, is_control, qualified};
use crate::file::Model;
use crate::interface;
use crate::operators;
use crate::proto::{GraphProto, ModelProto, NodeProto, StringStringEntryProto};
use crate::rewrite::{self, Rewritten, TARGET_KEY, Target};
use crate::stored::External;
use crate::verify::{self, Evidence, ProveError, Stopped, Unsettled, VerifyError};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// How to make a file better.
#[derive(Clone, Debug)]
pub struct Options {
    /// How to rewrite.
    pub rewriting: rewrite::Options,
    /// How to verify; `None`: not at all.
    pub verifying: Option<verify::Options>,
}

/// Why there is no better file.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OptimizeError {
    /// The file is not well formed.
    #[error("{} is not well formed:{}", path.display(), listed(problems))]
    Unsound {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problems: Vec<Problem>,
    },
    /// Its operators are too old, and cannot be brought to a known version.
    #[error("{} is too old: {cause}", path.display())]
    Old {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: RaiseError,
    },
    /// It cannot be verified.
    #[error("cannot verify {}, so it is not optimized: {cause}", path.display())]
    Unproven {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: ProveError,
    },
    /// A rule that does not exist.
    #[error("there is no rule `{name}`; the rules are {}", rewrite::rule_names().join(", "))]
    Rule {
        /// What was given.
        name: String,
    },
    /// The file contradicts itself, which shows where more is known of its values; it does not run.
    #[error(
        "{} contradicts itself: {problem}; and it does not run: {cause}",
        path.display()
    )]
    Contradictory {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
        /// Why it does not run.
        cause: VerifyError,
    },
    /// A rewrite broke the file.
    #[error("internal error: after rewriting {}, {problem}; report this file", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// Largest number of problems that a message lists.
const LISTED: usize = 20;

fn listed(problems: &[Problem]) -> String {
    let mut text = String::new();
    for problem in problems.iter().take(LISTED) {
        text.push_str(&format!("\n  {problem}"));
    }
    if problems.len() > LISTED {
        text.push_str(&format!("\n  and {} more", problems.len() - LISTED));
    }
    text
}

/// Numbers of one file.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Nodes, in bodies and functions too.
    pub operators: usize,
    /// Products that are summed, at the counted sizes.
    pub multiply_adds: u64,
    /// Bytes that nodes read and write, at the counted sizes.
    pub bytes_moved: u64,
    /// Largest sum of activations alive at once, at the counted sizes.
    pub peak_bytes: u64,
    /// Nodes whose sizes do not follow; the three sums above leave them out.
    pub n_unknown: usize,
    /// Bytes of the file and its external data; of a model that is not written yet, an estimate.
    pub file_bytes: u64,
    /// Largest error against float64 over the largest element, if verified.
    pub worst_error: Option<f64>,
    /// Median time of a run in ONNX Runtime, if measured.
    pub milliseconds: Option<f64>,
}

/// A rewrite that made a difference and was dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DroppedRewrite {
    /// The rule.
    pub rule: String,
    /// The node.
    pub node: String,
    /// What it changed.
    pub difference: String,
}

/// A rule and how often it fired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fired {
    /// The rule.
    pub rule: String,
    /// How often.
    pub n: usize,
}

/// An operator that is kept as it is, since it has no meaning here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Kept {
    /// The operator with its domain.
    pub operator: String,
    /// Nodes that apply it.
    pub n: usize,
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Rules that fired, most often first.
    pub fired: Vec<Fired>,
    /// Rewrites that were dropped.
    pub dropped: Vec<DroppedRewrite>,
    /// Operators that are kept as they are.
    pub kept: Vec<Kept>,
    /// Nodes at which the models were cut to be compared.
    pub cuts: Vec<String>,
    /// Outputs that never had a finite element: only that they are NaN or infinite alike is known.
    pub blind: Vec<String>,
    /// Branches that no run took.
    pub untried: Vec<String>,
    /// Runs that were left out, since the original does not run there: which, and why.
    pub left_out: Vec<String>,
    /// Outputs that rounding alone moves far. They were compared with how far it moves them.
    pub unsettled: Vec<Unsettled>,
    /// Runs in which the models were compared; empty if not verified.
    pub runs: Vec<String>,
    /// Sizes of the inputs, by name, at which the figures were counted.
    pub shapes: BTreeMap<String, Vec<usize>>,
    /// The file that was read.
    pub before: Figures,
    /// The file that was made.
    pub after: Figures,
    /// Whether nodes were put in order first.
    pub was_sorted: bool,
    /// The file's version of the operators, if it was too old and the file was brought to a newer one first.
    pub raised_from: Option<i64>,
    /// Initializers that the file stored more than once, each time the same; one of each is kept.
    pub repeated: BTreeSet<String>,
    /// How far verification came, if the time limit was reached before its end.
    pub stopped: Option<Stopped>,
}

impl Summary {
    /// A sentence for each number that became larger.
    pub fn grows(&self) -> Vec<String> {
        let numbers = [
            ("the file", self.before.file_bytes, self.after.file_bytes),
            (
                "peak memory of activations",
                self.before.peak_bytes,
                self.after.peak_bytes,
            ),
            (
                "the number of bytes moved",
                self.before.bytes_moved,
                self.after.bytes_moved,
            ),
        ];
        // Sums over different sets of nodes cannot be compared; a sentence says so instead.
        let comparable = self.before.n_unknown == self.after.n_unknown;
        let grown = numbers
            .iter()
            .enumerate()
            .filter(|(n, (_, before, after))| after > before && (*n == 0 || comparable));
        let mut sentences: Vec<String> = grown
            .map(|(_, (what, before, after))| {
                format!("{what} grows from {before} to {after} bytes")
            })
            .collect();
        if !comparable {
            sentences.push(format!(
                "whether memory and bytes moved grow is not known: the sizes of {} nodes do not follow \
                 before, of {} after",
                self.before.n_unknown, self.after.n_unknown
            ));
        }
        sentences
    }
}

impl Summary {
    /// What grew by the largest factor, and the factor: the file, peak memory or bytes moved. `None` if the last two
    /// cannot be compared. A number that was 0 before grew by an infinite factor.
    pub fn most_growth(&self) -> Option<(&'static str, f64)> {
        let factor = |before: u64, after: u64| match (before, after) {
            (_, 0) => 0.0,
            (0, _) => f64::INFINITY,
            (before, after) => after as f64 / before as f64,
        };
        let (before, after) = (&self.before, &self.after);
        let factors = [
            ("the file", factor(before.file_bytes, after.file_bytes)),
            ("peak memory", factor(before.peak_bytes, after.peak_bytes)),
            (
                "the number of bytes moved",
                factor(before.bytes_moved, after.bytes_moved),
            ),
        ];
        let comparable = before.n_unknown == after.n_unknown;
        let largest = factors.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        largest.filter(|_| comparable)
    }
}

impl Summary {
    /// Refuses a model that grew beyond a factor of the original.
    ///
    /// # Errors
    /// The file, peak memory or bytes moved grew by more, or may have.
    pub fn held(&self, most: f64) -> Result<(), GrowthError> {
        match self.most_growth() {
            Some((what, factor)) if factor > most => Err(GrowthError::Grows { what, factor, most }),
            Some(_) => Ok(()),
            None => Err(GrowthError::Unknown { most }),
        }
    }
}

/// Why a model that was made better is not written after all.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GrowthError {
    /// It grew.
    #[error(
        "{what} would be {factor:.3} times the original's, but the largest allowed growth is {most}; nothing is written"
    )]
    Grows {
        /// The file, peak memory or bytes moved.
        what: &'static str,
        /// Its size over the original's.
        factor: f64,
        /// The largest factor allowed.
        most: f64,
    },
    /// Before and after, sizes are known for different nodes, so the numbers cannot be compared.
    #[error(
        "cannot tell whether memory and bytes moved grow by more than {most}, since sizes of some nodes are \
         not known; nothing is written. Give the inputs' dynamic sizes, or no limit for growth"
    )]
    Unknown {
        /// The largest factor allowed.
        most: f64,
    },
}

/// A model made better, not yet written.
#[derive(Clone, Debug)]
pub struct Optimized {
    /// The model.
    pub model: Model,
    /// What was done.
    pub summary: Summary,
}

/// Makes a model better. `progress` is told what goes on.
///
/// # Errors
/// See [`OptimizeError`].
pub fn optimize(
    model: &Model,
    options: &Options,
    progress: &mut dyn FnMut(&str),
) -> Result<Optimized, OptimizeError> {
    known_rules(&options.rewriting.without)?;
    progress("checking");
    let Sound {
        model,
        was_sorted,
        raised_from,
        repeated,
    } = sound(model)?;
    let (rewritten, proof) = match &options.verifying {
        Some(verifying) => {
            let proof = verify::prove(&model, &options.rewriting, verifying, progress);
            let proof = proof.map_err(|cause| OptimizeError::Unproven {
                path: model.path.clone(),
                cause,
            })?;
            (
                proof.rewritten,
                Some((proof.evidence, proof.dropped, proof.stopped)),
            )
        }
        None => {
            progress("rewriting");
            let rewritten = rewrite::rewrite(&model.proto, &model.folder, &options.rewriting);
            (rewritten, None)
        }
    };
    progress("counting");
    let mut proto = rewritten.model.clone();
    stamp(&mut proto, options.rewriting.target);
    let after = model.with(proto);
    let broken = |problem: String| OptimizeError::Broken {
        path: model.path.clone(),
        problem,
    };
    if let Some(problem) = check::errors(&after).into_iter().next() {
        let problem = problem.to_string();
        // It is a defect of Shorthaul only if the original runs.
        return Err(
            match verify::made_up(&model, 0, &verify::Options::default()) {
                Ok(_) => broken(problem),
                Err(cause) => OptimizeError::Contradictory {
                    path: model.path.clone(),
                    problem,
                    cause,
                },
            },
        );
    }
    if let Some(what) = interface::changed(&model.proto, &after.proto) {
        return Err(broken(format!("{what} is not what it was")));
    }
    let (evidence, dropped, stopped) = proof.unwrap_or_default();
    let mut summary = summary(&model, &after, &rewritten, &evidence);
    summary.was_sorted = was_sorted;
    summary.raised_from = raised_from;
    summary.repeated = repeated;
    summary.stopped = stopped;
    summary.dropped = dropped
        .into_iter()
        .map(|d| DroppedRewrite {
            rule: d.application.rule.to_string(),
            node: d.application.origin,
            difference: d.difference.to_string(),
        })
        .collect();
    Ok(Optimized {
        model: after,
        summary,
    })
}

fn known_rules(names: &BTreeSet<String>) -> Result<(), OptimizeError> {
    let known = rewrite::rule_names();
    match names.iter().find(|name| !known.contains(&name.as_str())) {
        Some(name) => Err(OptimizeError::Rule { name: name.clone() }),
        None => Ok(()),
    }
}

/// A model in which nothing is wrong.
struct Sound {
    /// The model with its nodes in order and operators of a known version.
    model: Model,
    /// Whether nodes had to be moved.
    was_sorted: bool,
    /// The version that it had before.
    raised_from: Option<i64>,
    /// Initializers that were stored more than once.
    repeated: BTreeSet<String>,
}

fn sound(model: &Model) -> Result<Sound, OptimizeError> {
    let unsound = |problems| OptimizeError::Unsound {
        path: model.path.clone(),
        problems,
    };
    let Ok(proto) = check::sorted(model.proto.clone()) else {
        return Err(unsound(check::errors(model)));
    };
    let was_sorted = !check::is_in_order(&model.proto);
    let sorted = model.with(proto);
    let raised = edit::in_known_version(&sorted).map_err(|cause| OptimizeError::Old {
        path: model.path.clone(),
        cause,
    })?;
    let raised_from = raised.as_ref().map(|_| edit::version(&sorted.proto));
    let mut model = raised.unwrap_or(sorted);
    let problems = check::errors(&model);
    match problems.is_empty() {
        true => Ok(Sound {
            repeated: check::repeats::remove(&mut model.proto),
            model,
            was_sorted,
            raised_from,
        }),
        false => Err(unsound(problems)),
    }
}

/// Says in the file that it is meant for one runtime.
fn stamp(proto: &mut ModelProto, target: Target) {
    if target == Target::Standard {
        return;
    }
    proto.metadata_props.retain(|entry| entry.key != TARGET_KEY);
    proto.metadata_props.push(StringStringEntryProto {
        key: TARGET_KEY.to_string(),
        value: target.to_string(),
    });
}

fn summary(before: &Model, after: &Model, rewritten: &Rewritten, evidence: &Evidence) -> Summary {
    let mut fired: BTreeMap<&str, usize> = BTreeMap::new();
    for application in &rewritten.applied {
        *fired.entry(application.rule).or_default() += 1;
    }
    let mut fired: Vec<Fired> = fired
        .into_iter()
        .map(|(rule, n)| Fired {
            rule: rule.to_string(),
            n,
        })
        .collect();
    fired.sort_by_key(|f| std::cmp::Reverse(f.n));
    let graph = before.proto.graph.as_ref();
    let is_input = |name: &String| graph.is_some_and(|g| g.input.iter().any(|i| i.name == *name));
    let mut shapes = evidence.shapes.clone();
    shapes.retain(|name, _| is_input(name));
    let count = |model: &Model| cost(&model.proto, &model.folder, &shapes);
    let errors = evidence.worst();
    let encoded = prost::Message::encoded_len(&after.proto) as u64;
    Summary {
        fired,
        dropped: Vec::new(),
        kept: kept(&before.proto),
        cuts: evidence.cuts.clone(),
        blind: evidence.blind.clone(),
        untried: evidence.untried.clone(),
        left_out: evidence.left_out.clone(),
        unsettled: evidence.unsettled.clone(),
        runs: evidence.runs.clone(),
        before: figures(
            before,
            &count(before),
            before.n_bytes as u64 + before.stamps.n_bytes(),
            errors.map(|e| e.0),
        ),
        after: figures(
            after,
            &count(after),
            encoded + external_bytes(after),
            errors.map(|e| e.1),
        ),
        shapes,
        was_sorted: false,
        raised_from: None,
        repeated: BTreeSet::new(),
        stopped: None,
    }
}

fn figures(model: &Model, cost: &Cost, file_bytes: u64, worst_error: Option<f64>) -> Figures {
    Figures {
        operators: n_nodes(&model.proto),
        multiply_adds: cost.multiply_adds,
        bytes_moved: cost.bytes_moved,
        peak_bytes: cost.peak_bytes,
        n_unknown: cost.n_unknown,
        file_bytes,
        worst_error,
        milliseconds: None,
    }
}

/// Bytes of the external data that initializers refer to, each range once.
fn external_bytes(model: &Model) -> u64 {
    let mut ranges = BTreeSet::new();
    for tensor in model.proto.graph.iter().flat_map(|g| &g.initializer) {
        if let Ok(Some(external)) = External::new(tensor, &model.folder) {
            ranges.insert((external.path, external.offset, external.length));
        }
    }
    ranges.iter().map(|(_, _, length)| length).sum()
}

/// Nodes of a model, in bodies and functions too.
pub fn n_nodes(model: &ModelProto) -> usize {
    fn body(graph: &GraphProto) -> usize {
        let inner = graph.node.iter().flat_map(bodies).map(body);
        graph.node.len() + inner.sum::<usize>()
    }
    let functions = model.functions.iter().map(|f| f.node.len());
    model.graph.as_ref().map_or(0, body) + functions.sum::<usize>()
}

/// Operators without a meaning here, by name.
pub fn kept(model: &ModelProto) -> Vec<Kept> {
    fn visit(model: &ModelProto, node: &NodeProto, found: &mut BTreeMap<String, usize>) {
        let is_known = operators::find(node).is_some()
            || function_of(model, node).is_some()
            || is_control(node)
            || (is_standard(node) && bodies(node).next().is_some());
        if !is_known {
            *found.entry(qualified(node)).or_default() += 1;
        }
        for inner in bodies(node).flat_map(|b| &b.node) {
            visit(model, inner, found);
        }
    }
    let mut found = BTreeMap::new();
    let functions = model.functions.iter().flat_map(|f| &f.node);
    let nodes = model.graph.iter().flat_map(|g| &g.node);
    for node in nodes.chain(functions) {
        visit(model, node, &mut found);
    }
    let row = |(operator, n)| Kept { operator, n };
    found.into_iter().map(row).collect()
}
