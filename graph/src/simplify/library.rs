//! Simplifications of operators: folding, copies, repetition.

use super::{Containers, Replacements, Rule, SimplifyReport, for_each_state};
use crate::compact::sizes_are_constant;
use crate::graph::{ContainerId, Graph, Library, Lifetime, NodeKind, Stage};
use crate::meaning::LibraryMeaning;
use crate::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A folded constant may have this many elements even if its operands had fewer.
const SMALL_CONSTANT: usize = 64;
/// Largest number of elements computed while folding.
const LARGEST_FOLDED: usize = 1 << 20;

/// Before: `%a: f32[] constant [1.0]`, `%b: f32[] constant [1.0]`. After: `%a` stands for both.
pub(super) fn merge_constants(graph: &mut Graph, report: &mut SimplifyReport) {
    let facts = Containers::new(graph);
    let mut used = BTreeSet::new();
    graph.visit_nodes(&mut |n| used.extend(n.reads()));
    let mut first: BTreeMap<String, ContainerId> = BTreeMap::new();
    let mut replaced = Replacements::default();
    for id in graph.container_ids().filter(|id| used.contains(id)) {
        let Lifetime::Constant(value) = &graph.container(id).lifetime else {
            continue;
        };
        let kept = *first.entry(value.content_hash()).or_insert(id);
        if kept != id && facts.may_replace(graph, id, kept) {
            replaced.insert(id, kept);
            report.fired.push((Rule::MergeConstants, Arc::default()));
        }
    }
    replaced.apply(graph);
}

/// Folds, forwards and merges operators, in execution order.
pub(super) fn simplify_operators(
    graph: &mut Graph,
    meaning: &dyn LibraryMeaning,
    report: &mut SimplifyReport,
) {
    let facts = Containers::new(graph);
    let mut replaced = Replacements::default();
    let mut body = std::mem::take(&mut graph.body);
    for_each_state(&mut body, &mut |nodes| {
        let mut seen = Seen::new();
        nodes.retain_mut(|node| {
            let stage = node.stage;
            // Reads see earlier replacements; writes are never replaced before they are read.
            node.rename_containers(&|id| replaced.get(id));
            let NodeKind::Library(library) = &mut node.kind else {
                return true;
            };
            let rule = if fold(graph, meaning, &facts, library) {
                Rule::FoldConstant
            } else if forward(graph, meaning, &facts, library, &mut replaced) {
                Rule::ForwardCopy
            } else if merge(
                graph,
                meaning,
                &facts,
                (library, stage),
                &mut seen,
                &mut replaced,
            ) {
                Rule::MergeOperators
            } else {
                return true;
            };
            report.fired.push((rule, node.origin.clone()));
            false
        });
    });
    graph.body = body;
    replaced.apply(graph);
}

/// Before: `%y = add(%one, %two)` of constants. After: `%y: f32[] constant [3.0]`.
///
/// Legal for operators that are not random. The result is not made if it has more elements than
/// the operands (a broadcast is cheaper than what it makes) unless it is small.
fn fold(
    graph: &mut Graph,
    meaning: &dyn LibraryMeaning,
    facts: &Containers,
    library: &Library,
) -> bool {
    let mut operands: Vec<Option<Arc<Tensor>>> = Vec::new();
    for id in &library.inputs {
        operands.push(match id.map(|id| &graph.container(id).lifetime) {
            None => None,
            Some(Lifetime::Constant(value)) => Some(value.clone()),
            Some(_) => return false,
        });
    }
    let outputs: Vec<ContainerId> = library.outputs.iter().flatten().copied().collect();
    let foldable = |id: &ContainerId| facts.is_fixed(graph, *id) && !facts.outputs.contains(id);
    let known = operands.iter().flatten().next().is_some()
        && library.attrs.values().all(sizes_are_constant)
        && !meaning.is_random(&library.op)
        && outputs.iter().all(foldable);
    let operand_elements: usize = operands.iter().flatten().map(|t| t.len()).sum();
    let allowed = operand_elements.clamp(SMALL_CONSTANT, LARGEST_FOLDED);
    let too_large = |id: &ContainerId| elements(graph, *id).is_none_or(|n| n > allowed);
    if !known || outputs.iter().any(too_large) {
        return false;
    }
    let operands: Vec<Option<&Tensor>> = operands.iter().map(Option::as_deref).collect();
    // An operator that refuses stays where it is: whoever runs the graph will hear why.
    let Ok(results) = meaning.folded(library, &operands) else {
        return false;
    };
    let pairs: Vec<(ContainerId, Tensor)> = library
        .outputs
        .iter()
        .zip(results)
        .filter_map(|(id, t)| Some(((*id)?, t)))
        .collect();
    let fits = |(id, t): &(ContainerId, Tensor)| {
        let c = graph.container(*id);
        let shape: Vec<_> = t.shape.iter().map(|n| (*n).into()).collect();
        c.dtype == t.dtype && c.shape == shape
    };
    if pairs.len() != outputs.len() || !pairs.iter().all(fits) {
        return false;
    }
    for (id, value) in pairs {
        graph.container_mut(id).lifetime = Lifetime::Constant(Arc::new(value));
    }
    true
}

fn elements(graph: &Graph, id: ContainerId) -> Option<usize> {
    let sizes = graph.container(id).shape.iter();
    sizes
        .map(|s| s.as_const().and_then(|n| usize::try_from(n).ok()))
        .try_fold(1usize, |product, n| product.checked_mul(n?))
}

/// Before: `%y = reshape(%x)` to the same shape; `%z = relu(%y)`. After: `%z = relu(%x)`.
fn forward(
    graph: &Graph,
    meaning: &dyn LibraryMeaning,
    facts: &Containers,
    library: &Library,
    replaced: &mut Replacements,
) -> bool {
    let [Some(out)] = library.outputs.as_slice() else {
        return false;
    };
    let copied = meaning.copied_input(graph, library);
    let Some(from) = copied.and_then(|i| library.inputs.get(i).copied().flatten()) else {
        return false;
    };
    // Another replacement may have made the same container an output already.
    let taken = facts.outputs.contains(out) && replaced.0.values().any(|new| *new == from);
    if taken || !facts.may_replace(graph, *out, from) {
        return false;
    }
    replaced.insert(*out, from);
    true
}

/// Results of operators seen in this state, by operator, attributes and inputs.
type Seen = BTreeMap<String, Vec<Option<ContainerId>>>;

/// Before: `%a = exp(%x)`, `%b = exp(%x)`. After: `%a` stands for `%b`.
///
/// Not across stages: the backward pass was told to compute again what it computes again.
fn merge(
    graph: &Graph,
    meaning: &dyn LibraryMeaning,
    facts: &Containers,
    (library, stage): (&Library, Stage),
    seen: &mut Seen,
    replaced: &mut Replacements,
) -> bool {
    if meaning.is_random(&library.op) {
        return false;
    }
    let key = format!(
        "{stage:?} {:?} {:?} {:?}",
        library.op, library.attrs, library.inputs
    );
    let Some(earlier) = seen.get(&key) else {
        seen.insert(key, library.outputs.clone());
        return false;
    };
    let pairs: Option<Vec<_>> = library
        .outputs
        .iter()
        .enumerate()
        .filter_map(|(i, id)| id.map(|id| Some((id, earlier.get(i).copied().flatten()?))))
        .collect();
    let Some(pairs) = pairs else { return false };
    let fits = |(old, new): &(ContainerId, ContainerId)| {
        !facts.outputs.contains(old) && facts.may_replace(graph, *old, *new)
    };
    if !pairs.iter().all(fits) {
        return false;
    }
    for (old, new) in pairs {
        replaced.insert(old, new);
    }
    true
}
