//! Where two models begin to differ: the first value, by name, that both compute and that is not the
//! same.
//!
//! Values are compared in the order of the first model, with the tolerances of verification. Keeps
//! every compared value of a run in memory.

use super::cuts::Cuts;
use super::{Options, VerifyError, compare, program};
use crate::evaluate::{Precision, Values, label};
use crate::file::Model;
use crate::proto::{GraphProto, NodeProto};
use crate::tensor::Tensor;
use crate::verify::samples::{Planted, Sampler};
use serde::Serialize;
use std::collections::BTreeSet;

/// What a comparison of two models value by value gives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Values that both compute, in the order of the first model.
    pub n_values: usize,
    /// One line per run: seed and sizes.
    pub runs: Vec<String>,
    /// The first difference, if there is one.
    pub first: Option<Divergence>,
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
    };
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
        let differs = (0..shared.len()).find_map(|n| {
            let error = compare::errors(shared[n], &found[n], &other[n], Some(&exact[n]), 0.0);
            error.err().map(|what| (n, what))
        });
        comparison.runs.push(described.clone());
        if let Some((n, what)) = differs {
            let same: BTreeSet<&str> = shared[..n].iter().copied().collect();
            let given: BTreeSet<&str> = feeds.keys().map(String::as_str).collect();
            let state = |name: &str| match name {
                name if same.contains(name) || given.contains(name) => Some(true),
                name if shared.contains(&name) => Some(false),
                _ => None,
            };
            comparison.first = Some(Divergence {
                value: shared[n].to_string(),
                run: described,
                what,
                element: worst(&found[n], &other[n]),
                a: computed(graph_a, shared[n], &state),
                b: computed(&graph_b, shared[n], &state),
                n_same: n,
                last_same: n.checked_sub(1).map(|n| shared[n].to_string()),
            });
            break;
        }
    }
    if let Some(changed) = cuts.changed(graph_a, &graph_b) {
        comparison.first = Some(earlier(graph_a, &shared, comparison.first, changed));
    }
    Ok(comparison)
}

/// A node without a meaning here that is another one in the second model, unless what differs by its
/// numbers comes before it.
fn earlier(
    graph: &GraphProto,
    shared: &[&str],
    found: Option<Divergence>,
    (at, a, b): (usize, &NodeProto, &NodeProto),
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
        n_same,
        last_same: n_same.checked_sub(1).map(|n| shared[n].to_string()),
    }
}

/// Names that the nodes of a graph give, in order.
fn outputs(graph: &GraphProto) -> impl Iterator<Item = &str> {
    let names = graph.node.iter().flat_map(|n| &n.output);
    names.map(String::as_str).filter(|name| !name.is_empty())
}

/// The first model's values, on inputs and at sizes it runs with.
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

fn computed(graph: &GraphProto, value: &str, state: &dyn Fn(&str) -> Option<bool>) -> Computed {
    let gives = |n: &&NodeProto| n.output.iter().any(|o| o == value);
    let Some(node) = graph.node.iter().find(gives) else {
        return Computed {
            node: String::new(),
            inputs: Vec::new(),
        };
    };
    let inputs = crate::evaluate::reads(node);
    Computed {
        node: label(node),
        inputs: inputs
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
