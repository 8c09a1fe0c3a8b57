//! Where two models begin to differ: the first value that both compute under one name, that is not the same, and that
//! may cause a difference of an output.
//!
//! A rewrite may keep the name of a value and give it another meaning: a convolution takes over a normalization, say,
//! and keeps its own name. So a value is not blamed if only values that are the same again lie between it and the
//! outputs, or if the first model has it under another name. Values are compared in the order of the first model, with
//! the tolerances of verification. Keeps every compared value of a run in memory.

use super::cuts::Cuts;
use super::renamed::{Difference, differences, renamed};
use super::{Options, VerifyError, compare, program};
use crate::diff::same_elements;
use crate::evaluate::{Precision, Values, label, reads};
use crate::file::Model;
use crate::proto::{GraphProto, NodeProto, TensorProto};
use crate::tensor::Tensor;
use crate::verify::samples::{Planted, Sampler};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// What a comparison of two models value by value gives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Values that both compute, in the order of the first model.
    pub n_values: usize,
    /// One line per run: seed and sizes.
    pub runs: Vec<String>,
    /// The first difference, if there is one.
    pub first: Option<Divergence>,
    /// Values that differ and are not to blame, in the order of the first model.
    pub reused: Vec<Reused>,
    /// Names of values that the same nodes compute from the same values: in the first model, in the second.
    pub renamed: Vec<(String, String)>,
}

/// A name that has another value in the second model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reused {
    /// The name.
    pub value: String,
    /// The name that the first model has for the second model's value, if it has that value.
    pub like: Option<String>,
    /// What is not the same about the nodes that compute it.
    pub differences: Vec<Difference>,
}

/// The first value that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Divergence {
    /// Its name.
    pub value: String,
    /// The run in which it differs.
    pub run: String,
    /// A sentence that says how it differs.
    pub what: String,
    /// The element that differs most: its position, and what it is in each model.
    pub element: Option<(Vec<usize>, f64, f64)>,
    /// The node that computes it in the first model.
    pub a: Computed,
    /// The node that computes it in the second model.
    pub b: Computed,
    /// What is not the same about these nodes.
    pub differences: Vec<Difference>,
    /// Values before it that are the same.
    pub n_same: usize,
    /// The last of these.
    pub last_same: Option<String>,
}

/// A node, and whether what it reads is the same in both models.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Computed {
    /// The node.
    pub node: String,
    /// What it reads, and whether it is the same; `None` if only one model has it.
    pub inputs: Vec<(String, Option<bool>)>,
}

/// Compares every value that both models compute, on the same inputs.
///
/// # Errors
/// [`VerifyError::Original`], [`VerifyError::Cut`]; [`VerifyError::Second`].
pub fn compare_values(a: &Model, b: &Model, options: &Options) -> Result<Comparison, VerifyError> {
    let empty = GraphProto::default();
    let graph = |model: &'_ Model| model.proto.graph.clone().unwrap_or_default();
    let (graph_a, graph_b) = (a.proto.graph.as_ref().unwrap_or(&empty), graph(b));
    let cuts = Cuts::new(&a.proto);
    let unknown: BTreeSet<&str> = cuts
        .nodes
        .iter()
        .flat_map(|n| &n.output)
        .map(String::as_str)
        .collect();
    let in_b: BTreeSet<&str> = outputs(&graph_b).collect();
    let shared: Vec<&str> = outputs(graph_a)
        .filter(|name| in_b.contains(name) && !unknown.contains(name) && !cuts.is_opaque(name))
        .collect();
    if shared.is_empty() {
        let names = |graph| outputs(graph).collect::<Vec<_>>().join(", ");
        return Err(VerifyError::Outputs {
            before: names(graph_a),
            after: names(&graph_b),
        });
    }
    let samples = options.by_sample();
    let mut samplers = Vec::new();
    for given in &samples {
        let sampler = Sampler::new(a, &cuts, given).map_err(|error| given.in_sample(error))?;
        samplers.push(sampler);
    }
    let mut comparison = Comparison {
        n_values: shared.len(),
        runs: Vec::new(),
        first: None,
        reused: Vec::new(),
        renamed: renamed(graph_a, &graph_b),
    };
    let names: BTreeMap<String, String> = comparison.renamed.iter().cloned().collect();
    let (wanted, made) = (cuts.wanted(&a.proto), BTreeSet::from_iter(outputs(graph_a)));
    let is_missing = |name: &str| {
        let is_given = unknown.contains(name) || cuts.is_opaque(name);
        made.contains(name) && !is_given && !in_b.contains(name)
    };
    let ends = match graph_a.output.iter().any(|o| is_missing(&o.name)) {
        true => Vec::new(),
        false => {
            let is_wanted = |name: &&str| wanted.iter().any(|w| w == name);
            shared.iter().copied().filter(is_wanted).collect()
        }
    };
    let only_a: Vec<&str> = outputs(graph_a)
        .filter(|name| !in_b.contains(name) && !unknown.contains(name) && !cuts.is_opaque(name))
        .collect();
    let of_first = (0..options.n_seeds).map(|seed| (0, seed));
    for (n, seed) in of_first.chain((1..samples.len()).map(|n| (n, 0))) {
        let found = run(a, &mut samplers[n], &shared, seed);
        let (described, feeds, found) = found.map_err(|error| samples[n].in_sample(error))?;
        let described = samples[n].described(described);
        let exact = program(&a.proto, &a.folder, Precision::Float64, None)
            .and_then(|program| program.run(&feeds, &shared))
            .map_err(|cause| VerifyError::Original { cause })?;
        let other = program(&b.proto, &b.folder, Precision::AsStored, None)
            .and_then(|program| program.run(&feeds, &shared))
            .map_err(|cause| VerifyError::Second { cause })?;
        let differs = |n: usize| {
            let error = compare::errors(shared[n], &found[n], &other[n], Some(&exact[n]), 0.0);
            error.err().map(|what| (n, what))
        };
        let differing: BTreeMap<usize, String> = (0..shared.len()).filter_map(differs).collect();
        comparison.runs.push(described.clone());
        if differing.is_empty() {
            continue;
        }
        let judged = Judged {
            models: (a, b),
            graphs: (graph_a, &graph_b),
            shared: &shared,
            ends: &ends,
            same: same(&feeds, &shared, &differing),
            differing: &differing,
            renamed: &names,
        };
        let reached = judged.reached();
        let alike = Alike::new(a, &only_a, &feeds);
        let is_output = |name: &str| graph_a.output.iter().any(|o| o.name == name);
        for (n, what) in &differing {
            let name = shared[*n];
            let like = alike.name_of(&other[*n]);
            if is_output(name) || reached.contains(name) && like.is_none() {
                let element = worst(&found[*n], &other[*n]);
                comparison.first = Some(judged.divergence(*n, described, what.clone(), element));
                break;
            }
            if comparison.reused.iter().all(|known| known.value != name) {
                comparison.reused.push(Reused {
                    value: name.to_string(),
                    like,
                    differences: judged.differences(name),
                });
            }
        }
        if comparison.first.is_some() {
            break;
        }
    }
    if let Some(changed) = cuts.changed(graph_a, &graph_b) {
        comparison.first = Some(earlier(graph_a, &shared, comparison.first, changed, &names));
    }
    Ok(comparison)
}

/// Two models after a run in which values differ.
struct Judged<'m> {
    models: (&'m Model, &'m Model),
    graphs: (&'m GraphProto, &'m GraphProto),
    /// Names that both models compute, in the order of the first.
    shared: &'m [&'m str],
    /// Those of them that show whether the models do the same: outputs, and what nodes without a meaning read. Empty if
    /// the second model lacks an output.
    ends: &'m [&'m str],
    /// Those that differ, by position, and how.
    differing: &'m BTreeMap<usize, String>,
    /// Whether values that both have are the same, by name.
    same: BTreeMap<&'m str, bool>,
    /// Names in the second model by those in the first.
    renamed: &'m BTreeMap<String, String>,
}

/// Whether each value is the same in both models: inputs always are.
fn same<'m>(
    feeds: &'m Values,
    shared: &[&'m str],
    differing: &BTreeMap<usize, String>,
) -> BTreeMap<&'m str, bool> {
    let computed = shared.iter().enumerate();
    let computed = computed.map(|(n, name)| (*name, !differing.contains_key(&n)));
    let given = feeds.keys().map(|name| (name.as_str(), true));
    computed.chain(given).collect()
}

impl<'m> Judged<'m> {
    fn is_same(&self, name: &str) -> Option<bool> {
        let known = self.same.get(name).copied();
        known.or_else(|| self.is_stored_same(name))
    }

    /// Whether initializers of that name hold the same; `None` if a model has none.
    fn is_stored_same(&self, name: &str) -> Option<bool> {
        fn stored<'g>(graph: &'g GraphProto, name: &str) -> Option<&'g TensorProto> {
            graph.initializer.iter().find(|t| t.name == name)
        }
        let (a, b) = (stored(self.graphs.0, name)?, stored(self.graphs.1, name)?);
        let folders = (&self.models.0.folder, &self.models.1.folder);
        Some(same_elements(a, folders.0, b, folders.1))
    }

    /// Names from which, in one of the models, a differing end is computed with no value in between that is the same.
    /// All names, if there are no ends.
    fn reached(&self) -> BTreeSet<&'m str> {
        if self.ends.is_empty() {
            return self.shared.iter().copied().collect();
        }
        let ends = self.ends.iter().copied();
        let wrong: Vec<&str> = ends.filter(|end| !self.same[end]).collect();
        let mut reached = BTreeSet::new();
        for graph in [self.graphs.0, self.graphs.1] {
            let mut makers: BTreeMap<&str, &NodeProto> = BTreeMap::new();
            for node in &graph.node {
                makers.extend(node.output.iter().map(|o| (o.as_str(), node)));
            }
            let mut open: Vec<&'m str> = wrong.clone();
            let mut seen: BTreeSet<&'m str> = open.iter().copied().collect();
            while let Some(name) = open.pop() {
                reached.insert(name);
                let read = makers.get(name).map(|node| reads(node)).unwrap_or_default();
                let suspect = |read: &&'m str| self.same.get(read) != Some(&true);
                open.extend(read.into_iter().filter(suspect).filter(|r| seen.insert(*r)));
            }
        }
        reached
    }

    fn makers(&self, value: &str) -> (Option<&'m NodeProto>, Option<&'m NodeProto>) {
        let maker = |graph: &'m GraphProto| {
            let gives = |n: &&NodeProto| n.output.iter().any(|o| o == value);
            graph.node.iter().find(gives)
        };
        (maker(self.graphs.0), maker(self.graphs.1))
    }

    fn differences(&self, value: &str) -> Vec<Difference> {
        match self.makers(value) {
            (Some(a), Some(b)) => differences(a, b, self.renamed),
            _ => Vec::new(),
        }
    }

    fn divergence(
        &self,
        n: usize,
        run: String,
        what: String,
        element: Option<(Vec<usize>, f64, f64)>,
    ) -> Divergence {
        let value = self.shared[n];
        let (a, b) = self.makers(value);
        let state = |name: &str| self.is_same(name);
        let same: Vec<usize> = (0..n).filter(|n| !self.differing.contains_key(n)).collect();
        Divergence {
            value: value.to_string(),
            run,
            what,
            element,
            a: computed(a, &state),
            b: computed(b, &state),
            differences: self.differences(value),
            n_same: same.len(),
            last_same: same.last().map(|n| self.shared[*n].to_string()),
        }
    }
}

/// The values in a run that only the first model has a name for.
#[derive(Default)]
struct Alike {
    names: Vec<String>,
    found: Vec<Tensor>,
    exact: Vec<Tensor>,
}

impl Alike {
    fn new(a: &Model, names: &[&str], feeds: &Values) -> Alike {
        let run = |precision: Precision| {
            let made = program(&a.proto, &a.folder, precision, None);
            made.and_then(|program| program.run(feeds, names)).ok()
        };
        match (run(Precision::AsStored), run(Precision::Float64)) {
            (Some(found), Some(exact)) => Alike {
                names: names.iter().map(ToString::to_string).collect(),
                found,
                exact,
            },
            // If the first model does not run, nothing is known of them.
            _ => Alike::default(),
        }
    }

    /// The name of the first model's value that `value` equals.
    fn name_of(&self, value: &Tensor) -> Option<String> {
        let is_value = |n: &usize| {
            let (found, exact) = (&self.found[*n], &self.exact[*n]);
            compare::errors(&self.names[*n], found, value, Some(exact), 0.0).is_ok()
        };
        let n = (0..self.names.len()).find(is_value)?;
        Some(self.names[n].clone())
    }
}

/// Blames a node without a meaning here that was replaced in the second model, unless a difference in numbers was
/// found before it.
fn earlier(
    graph: &GraphProto,
    shared: &[&str],
    found: Option<Divergence>,
    (at, a, b): (usize, &NodeProto, &NodeProto),
    renamed: &BTreeMap<String, String>,
) -> Divergence {
    let computes = |name: &str| {
        let gives = |n: &NodeProto| n.output.iter().any(|o| o == name);
        graph.node.iter().position(gives)
    };
    if let Some(found) = found
        && computes(&found.value).is_some_and(|n| n < at)
    {
        return found;
    }
    let described = |node: &NodeProto| Computed {
        node: label(node),
        inputs: node.input.iter().map(|i| (i.clone(), None)).collect(),
    };
    let before = |name: &&&str| computes(name).is_some_and(|n| n < at);
    let n_same = shared.iter().take_while(before).count();
    Divergence {
        value: a.output.first().cloned().unwrap_or_default(),
        run: "not run: the operator is not known here".to_string(),
        what: "the node, its attributes or the number of its inputs are not the same".to_string(),
        element: None,
        a: described(a),
        b: described(b),
        differences: differences(a, b, renamed),
        n_same,
        last_same: n_same.checked_sub(1).map(|n| shared[n].to_string()),
    }
}

/// Names that the nodes of a graph give, in order.
fn outputs(graph: &GraphProto) -> impl Iterator<Item = &str> {
    let names = graph.node.iter().flat_map(|n| &n.output);
    names.map(String::as_str).filter(|name| !name.is_empty())
}

/// The first model's values, on made-up inputs at sizes it runs with.
fn run(
    model: &Model,
    sampler: &mut Sampler,
    wanted: &[&str],
    seed: usize,
) -> Result<(String, Values, Vec<Tensor>), VerifyError> {
    let names: Vec<String> = wanted.iter().map(ToString::to_string).collect();
    let programs = super::Programs::new(model, None)?;
    let (run, attempt) = programs.run(sampler, &names, seed, Planted::Nothing)?;
    sampler.settle(&attempt);
    Ok((run.described, run.feeds, run.stored))
}

fn computed(node: Option<&NodeProto>, state: &dyn Fn(&str) -> Option<bool>) -> Computed {
    let Some(node) = node else {
        return Computed {
            node: String::new(),
            inputs: Vec::new(),
        };
    };
    Computed {
        node: label(node),
        inputs: reads(node)
            .into_iter()
            .map(|name| (name.to_string(), state(name)))
            .collect(),
    }
}

/// The element that differs most; one that is NaN or infinite on one side only counts as most.
fn worst(a: &Tensor, b: &Tensor) -> Option<(Vec<usize>, f64, f64)> {
    if a.shape != b.shape {
        return None;
    }
    let (x, y) = (a.to_f64()?, b.to_f64()?);
    let distance = |n: usize| match (x[n] - y[n]).abs() {
        d if d.is_nan() && x[n].to_bits() == y[n].to_bits() => 0.0,
        d if d.is_nan() => f64::INFINITY,
        d => d,
    };
    let n = (0..x.len()).max_by(|a, b| distance(*a).total_cmp(&distance(*b)))?;
    let (mut position, mut rest) = (vec![0; a.shape.len()], n);
    for (d, size) in a.shape.iter().enumerate().rev() {
        position[d] = rest % size;
        rest /= size;
    }
    Some((position, x[n], y[n]))
}
