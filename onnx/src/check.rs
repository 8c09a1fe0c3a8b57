//! Whether a file is well formed: everything that is wrong with it, at once.
//!
//! Owns the rules that every reader relies on: each name has one definition, before its uses; operator
//! sets are imported and known; tensors have the bytes their sizes ask for; external data is there. What
//! the standard asks of nodes is in `nodes.rs`, and whether types and sizes fit in `types.rs`.
//! Notes tell of what is legal but odd. Never changes a file, but [`sorted`] puts nodes in order.

mod nodes;
pub(crate) mod repeats;
pub(crate) mod schemas;
mod sizes;
mod types;

use crate::attributes::{bodies, bodies_mut, is_standard};
use crate::evaluate::{function_of, label, qualified, reads};
use crate::file::{Model, NEWEST_IR};
use crate::infer::Opsets;
use crate::operators;
use crate::proto::{GraphProto, ModelProto, NodeProto, TensorProto};
use crate::stored::External;
use crate::tensor::Tensor;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

/// Versions of the standard's operators whose meaning is known here.
pub const OPSETS: std::ops::RangeInclusive<i64> = 7..=28;

/// How bad a problem is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The file cannot be relied upon.
    Error,
    /// Legal, but odd.
    Note,
}

/// An error or a note about a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Problem {
    /// How bad it is.
    pub severity: Severity,
    /// The place: a node, a tensor, the file.
    pub place: String,
    /// What is wrong or odd.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// All problems of a file, errors first, each kind in the order of the file.
pub fn problems(model: &Model) -> Vec<Problem> {
    let mut list = Problems::default();
    versions(&model.proto, &mut list);
    collect(model, &mut list);
    list.finish()
}

/// What is wrong with a file apart from its versions, for a file that is raised to a known version.
pub fn errors_of_any_version(model: &Model) -> Vec<Problem> {
    let mut list = Problems::default();
    collect(model, &mut list);
    let mut problems = list.finish();
    problems.retain(|p| p.severity == Severity::Error);
    problems
}

/// All problems apart from those of versions.
fn collect(model: &Model, list: &mut Problems) {
    let proto = &model.proto;
    if let Some(graph) = &proto.graph {
        let around = Around {
            model: proto,
            folder: &model.folder,
            opsets: Opsets::new(&proto.opset_import),
            imported: imported(&proto.opset_import),
            values: BTreeSet::new(),
            replaceable: proto.ir_version.unwrap_or(0) >= 4,
        };
        graph_problems(graph, &around, "", list);
        unused(graph, list);
    }
    if let Some(circle) = calls_in_a_circle(proto) {
        list.error(
            "functions".to_string(),
            format!("these functions call each other in a cycle: {circle}"),
        );
    }
    for function in &proto.functions {
        let around = Around {
            model: proto,
            folder: &model.folder,
            opsets: Opsets::new(&function.opset_import),
            imported: imported(&function.opset_import),
            values: function.input.iter().cloned().collect(),
            replaceable: true,
        };
        let body = GraphProto {
            node: function.node.clone(),
            ..Default::default()
        };
        let place = format!("function `{}`, ", function.name);
        let defined = graph_problems(&body, &around, &place, list);
        for output in function.output.iter().filter(|o| !defined.contains(*o)) {
            list.error(
                format!("{place}output `{output}`"),
                "nothing computes it".to_string(),
            );
        }
    }
    types::problems(proto, list);
}

/// Functions that call each other without end, as text.
fn calls_in_a_circle(model: &ModelProto) -> Option<String> {
    type Name<'m> = (&'m str, &'m str, &'m str);
    fn calls<'m>(nodes: &'m [NodeProto], into: &mut BTreeSet<Name<'m>>) {
        for node in nodes {
            into.insert((&node.domain, &node.op_type, &node.overload));
            for body in bodies(node) {
                calls(&body.node, into);
            }
        }
    }
    let mut open: BTreeMap<Name, BTreeSet<Name>> = BTreeMap::new();
    for f in &model.functions {
        let called = open.entry((&f.domain, &f.name, &f.overload)).or_default();
        calls(&f.node, called);
    }
    // A function is done when all functions that it calls are done. One that never is done is in a circle or calls into
    // one.
    let names: BTreeSet<Name> = open.keys().copied().collect();
    let mut callers: BTreeMap<Name, Vec<Name>> = BTreeMap::new();
    for (name, called) in &mut open {
        called.retain(|c| names.contains(c));
        for c in called.iter() {
            callers.entry(*c).or_default().push(*name);
        }
    }
    let is_done = |called: &BTreeSet<Name>| called.is_empty();
    let mut done: Vec<Name> = open
        .iter()
        .filter(|(_, called)| is_done(called))
        .map(|(name, _)| *name)
        .collect();
    while let Some(name) = done.pop() {
        open.remove(&name);
        for caller in callers.remove(&name).unwrap_or_default() {
            if let Some(called) = open.get_mut(&caller)
                && called.remove(&name)
                && is_done(called)
            {
                done.push(caller);
            }
        }
    }
    let circle = model
        .functions
        .iter()
        .filter(|f| open.contains_key(&(f.domain.as_str(), f.name.as_str(), f.overload.as_str())));
    let names: Vec<&str> = circle.map(|f| f.name.as_str()).collect();
    (!names.is_empty()).then(|| names.join(", "))
}

/// The errors among [`problems`].
pub fn errors(model: &Model) -> Vec<Problem> {
    let mut all = problems(model);
    all.retain(|p| p.severity == Severity::Error);
    all
}

/// The model with the nodes of every body sorted: each after those it reads from. Nodes keep their order unless they
/// have to move.
///
/// # Errors
/// The nodes of a cycle.
pub fn sorted(mut model: ModelProto) -> Result<ModelProto, Vec<String>> {
    if let Some(graph) = &mut model.graph {
        sort(graph)?;
    }
    Ok(model)
}

/// The model with its nodes in an order in which they can run; ONNX Runtime sorts them too. If there is no such order,
/// the model as it is.
pub fn in_order(model: Model) -> Model {
    match sorted(model.proto.clone()) {
        Ok(proto) => model.with(proto),
        Err(_) => model,
    }
}

/// Whether the nodes of the graph are in an order in which they can run.
pub fn is_in_order(model: &ModelProto) -> bool {
    let nodes = model.graph.as_ref().map_or(&[][..], |graph| &graph.node);
    order(nodes).is_ok_and(|order| order.is_sorted())
}

fn sort(graph: &mut GraphProto) -> Result<(), Vec<String>> {
    for body in graph.node.iter_mut().flat_map(bodies_mut) {
        sort(body)?;
    }
    let order = order(&graph.node)?;
    if order.is_sorted() {
        return Ok(());
    }
    let mut nodes: Vec<Option<NodeProto>> = graph.node.drain(..).map(Some).collect();
    graph.node = order.iter().filter_map(|n| nodes[*n].take()).collect();
    Ok(())
}

/// Positions of the nodes in an order in which they can run, close to the given one.
fn order(nodes: &[NodeProto]) -> Result<Vec<usize>, Vec<String>> {
    let outputs = |n: usize| nodes[n].output.iter().filter(|o| !o.is_empty());
    let makers: BTreeMap<&str, usize> = (0..nodes.len())
        .flat_map(|n| outputs(n).map(move |o| (o.as_str(), n)))
        .collect();
    let mut readers = vec![Vec::new(); nodes.len()];
    let mut waits = vec![0usize; nodes.len()];
    for (n, node) in nodes.iter().enumerate() {
        let from: BTreeSet<usize> = reads(node)
            .into_iter()
            .filter_map(|name| makers.get(name).copied())
            .collect();
        waits[n] = from.len();
        for maker in from {
            readers[maker].push(n);
        }
    }
    let mut ready: BTreeSet<usize> = (0..nodes.len()).filter(|n| waits[*n] == 0).collect();
    let mut order = Vec::with_capacity(nodes.len());
    while let Some(n) = ready.pop_first() {
        order.push(n);
        for reader in &readers[n] {
            waits[*reader] -= 1;
            if waits[*reader] == 0 {
                ready.insert(*reader);
            }
        }
    }
    if order.len() == nodes.len() {
        return Ok(order);
    }
    Err(cycle(nodes, &makers, &waits))
}

/// The nodes of one cycle among those that wait, each reading from the next.
fn cycle(nodes: &[NodeProto], makers: &BTreeMap<&str, usize>, waits: &[usize]) -> Vec<String> {
    let mut path: Vec<usize> = Vec::new();
    let mut at = waits.iter().position(|w| *w > 0);
    while let Some(n) = at {
        if let Some(start) = path.iter().position(|p| *p == n) {
            return path[start..].iter().map(|n| label(&nodes[*n])).collect();
        }
        path.push(n);
        at = reads(&nodes[n])
            .into_iter()
            .filter_map(|name| makers.get(name).copied())
            .find(|m| waits[*m] > 0);
    }
    path.iter().map(|n| label(&nodes[*n])).collect()
}

#[derive(Default)]
struct Problems {
    list: Vec<Problem>,
    /// Places and messages that the list has already, so that each is reported once.
    said: BTreeSet<(String, String)>,
}

impl Problems {
    fn error(&mut self, place: String, message: String) {
        self.add(Severity::Error, place, message);
    }

    fn note(&mut self, place: String, message: String) {
        self.add(Severity::Note, place, message);
    }

    fn add(&mut self, severity: Severity, place: String, message: String) {
        if self.said.insert((place.clone(), message.clone())) {
            self.list.push(Problem {
                severity,
                place,
                message,
            });
        }
    }

    fn is_sound(&self) -> bool {
        self.list.iter().all(|p| p.severity != Severity::Error)
    }

    fn finish(mut self) -> Vec<Problem> {
        self.list.sort_by_key(|p| p.severity);
        self.list
    }
}

/// What surrounds a body.
struct Around<'a> {
    model: &'a ModelProto,
    folder: &'a Path,
    opsets: Opsets,
    imported: BTreeSet<String>,
    /// Values that bodies see from outside.
    values: BTreeSet<String>,
    /// Whether an input may share its name with an initializer, its default. In older files it must.
    replaceable: bool,
}

fn imported(imports: &[crate::proto::OperatorSetIdProto]) -> BTreeSet<String> {
    imports.iter().map(|o| plain(&o.domain)).collect()
}

fn plain(domain: &str) -> String {
    match domain {
        "ai.onnx" => String::new(),
        other => other.to_string(),
    }
}

fn versions(model: &ModelProto, list: &mut Problems) {
    let file = || "the file".to_string();
    let ir = model.ir_version.unwrap_or(0);
    if ir > NEWEST_IR {
        let message = format!(
            "it is of version {ir} of the format; versions up to {NEWEST_IR} are known, and what is \
             new would be lost"
        );
        list.error(file(), message);
    }
    if model.opset_import.is_empty() && ir >= 3 {
        list.error(file(), "it imports no operator set".to_string());
    }
    let standard = model
        .opset_import
        .iter()
        .filter(|o| plain(&o.domain).is_empty());
    for import in standard.filter(|o| !OPSETS.contains(&o.version)) {
        let (first, last) = (OPSETS.start(), OPSETS.end());
        let message = format!(
            "it imports version {} of the standard's operators; versions {first} to {last} are \
             known; convert it with `onnx.version_converter`",
            import.version
        );
        list.error(file(), message);
    }
}

/// Problems of a body; gives the names defined in it.
fn graph_problems(
    graph: &GraphProto,
    around: &Around,
    place: &str,
    list: &mut Problems,
) -> BTreeSet<String> {
    let mut defined = around.values.clone();
    let own = initial(graph, around, place, list, &mut defined);
    let all: BTreeSet<&str> = graph
        .node
        .iter()
        .flat_map(|n| &n.output)
        .map(String::as_str)
        .collect();
    if let Err(nodes) = order(&graph.node) {
        let message = format!("each reads from the next: {}", nodes.join(", "));
        list.error(format!("{place}cycle of {} nodes", nodes.len()), message);
    }
    let mut outputs: BTreeSet<&str> = BTreeSet::new();
    for node in &graph.node {
        let at = format!("{place}{}", label(node));
        node_problems(node, around, &at, list);
        for name in reads(node).into_iter().filter(|n| !defined.contains(*n)) {
            let message = match all.contains(name) {
                true => format!("it reads `{name}`, which is computed later"),
                false => format!("it reads `{name}`, which nothing computes"),
            };
            list.error(at.clone(), message);
        }
        for body in bodies(node) {
            let inner = Around {
                values: defined.clone(),
                opsets: around.opsets.clone(),
                imported: around.imported.clone(),
                ..*around
            };
            graph_problems(body, &inner, &format!("{at}, "), list);
        }
        for name in node.output.iter().filter(|o| !o.is_empty()) {
            if !outputs.insert(name) || own.contains(name) {
                list.error(at.clone(), format!("`{name}` is defined twice"));
            }
            defined.insert(name.clone());
        }
    }
    for output in graph.output.iter().filter(|o| !defined.contains(&o.name)) {
        let message = "nothing computes it".to_string();
        list.error(format!("{place}output `{}`", output.name), message);
    }
    defined
}

/// Inputs and initializers; gives their names.
fn initial(
    graph: &GraphProto,
    around: &Around,
    place: &str,
    list: &mut Problems,
    defined: &mut BTreeSet<String>,
) -> BTreeSet<String> {
    let mut own = BTreeSet::new();
    for input in &graph.input {
        if !own.insert(input.name.clone()) {
            list.error(
                format!("{place}input `{}`", input.name),
                "it is defined twice".to_string(),
            );
        }
    }
    let mut stored: BTreeMap<&str, usize> = BTreeMap::new();
    for (n, tensor) in graph.initializer.iter().enumerate() {
        let at = format!("{place}initializer `{}`", tensor.name);
        let first = *stored.entry(&tensor.name).or_insert(n);
        let other = &graph.initializer[first];
        if first != n && repeats::are_same(other, tensor, around.folder) {
            let message = "it is stored more than once, each time with the same elements";
            list.note(at.clone(), message.to_string());
        } else if first != n {
            list.error(at.clone(), repeats::difference((first, other), (n, tensor)));
        }
        if !around.replaceable && place.is_empty() && !own.contains(&tensor.name) {
            let message = "files before version 4 of the format name it among the inputs too; it is read as a constant";
            list.note(at.clone(), message.to_string());
        }
        if let Some(message) = tensor_problem(tensor, around.folder) {
            list.error(at.clone(), message);
        }
        let declared = graph.input.iter().find(|i| i.name == tensor.name);
        let element = declared
            .and_then(|i| i.r#type.as_ref()?.tensor_type.as_ref())
            .map(|t| t.elem_type);
        if element.is_some_and(|e| e != tensor.data_type) {
            let message = "the input of its name has another element type";
            list.error(at, message.to_string());
        }
    }
    own.extend(stored.into_keys().map(str::to_string));
    for tensor in &graph.sparse_initializer {
        own.extend(tensor.values.iter().map(|v| v.name.clone()));
    }
    defined.extend(own.iter().cloned());
    own
}

/// What is wrong with a stored tensor.
fn tensor_problem(tensor: &TensorProto, folder: &Path) -> Option<String> {
    match External::new(tensor, folder) {
        Err(message) => return Some(message),
        Ok(Some(_)) => return None,
        Ok(None) => {}
    }
    let known = crate::element::Element::of_number(tensor.data_type);
    match known {
        // Types that nothing is computed with are kept as they are.
        None if (1..=26).contains(&tensor.data_type) => crate::tensor::sizes(&tensor.dims).err(),
        None => Some(format!(
            "there is no element type of number {}",
            tensor.data_type
        )),
        Some(_) => Tensor::stored_size_problem(tensor),
    }
}

fn node_problems(node: &NodeProto, around: &Around, at: &str, list: &mut Problems) {
    if node.op_type.is_empty() {
        list.error(at.to_string(), "it has no operator".to_string());
    }
    let domain = plain(&node.domain);
    let is_call = function_of(around.model, node).is_some();
    let is_imported = around.imported.contains(&domain) || (is_call && domain.is_empty());
    if !is_imported {
        let message = format!(
            "the file imports no operators of the domain `{}`",
            node.domain
        );
        list.error(at.to_string(), message);
    }
    let mut names: BTreeSet<&str> = BTreeSet::new();
    for attribute in &node.attribute {
        if !names.insert(&attribute.name) {
            let message = format!("it has the attribute `{}` twice", attribute.name);
            list.error(at.to_string(), message);
        }
        for tensor in attribute.t.iter().chain(&attribute.tensors) {
            if let Some(message) = tensor_problem(tensor, around.folder) {
                list.error(format!("{at}, attribute `{}`", attribute.name), message);
            }
        }
    }
    if nodes::is_early(node, &around.opsets) {
        let version = around.opsets.version(&node.domain);
        let message = format!("version {version} of the standard has none, but ONNX Runtime does");
        list.note(format!("operator {}", qualified(node)), message);
    }
    let known = operators::find(node).is_some()
        || bodies(node).next().is_some()
        || is_call
        || !is_standard(node);
    if !known {
        let version = around.opsets.version(&node.domain);
        let message = format!(
            "`{}` of version {version} is not computed with here; it is kept as it is",
            qualified(node)
        );
        list.note(format!("operator {}", qualified(node)), message);
    }
}

/// Nodes, initializers and inputs that no output depends on.
fn unused(graph: &GraphProto, list: &mut Problems) {
    let mut used: BTreeSet<&str> = graph.output.iter().map(|o| o.name.as_str()).collect();
    // Nothing more is said about nodes that are out of order or in a cycle.
    let is_in_order = order(&graph.node).is_ok_and(|order| order.is_sorted());
    for node in graph.node.iter().rev().filter(|_| is_in_order) {
        let needed = node.output.iter().any(|o| used.contains(o.as_str()));
        if needed || node.output.is_empty() {
            used.extend(reads(node));
        } else {
            list.note(label(node), "no output depends on it".to_string());
        }
    }
    let stored: BTreeSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
    let read: BTreeSet<&str> = graph.node.iter().flat_map(reads).chain(used).collect();
    for name in stored.iter().filter(|n| !read.contains(**n)) {
        list.note(
            format!("initializer `{name}`"),
            "nothing reads it".to_string(),
        );
    }
    for input in graph
        .input
        .iter()
        .filter(|i| !stored.contains(i.name.as_str()))
    {
        if !read.contains(input.name.as_str()) {
            list.note(
                format!("input `{}`", input.name),
                "nothing reads it".to_string(),
            );
        }
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod typed_tests;
