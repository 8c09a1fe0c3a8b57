//! What a file costs to run: arithmetic, bytes moved and memory, from sizes alone.
//!
//! Owns the counting, node by node in the order of the file. Every node reads its inputs from memory
//! and writes its outputs to it; nodes that only rename dimensions move nothing, and those that pick
//! elements read what they give. Bodies of control flow are counted once, whatever their number of
//! runs; calls of functions count as the function's nodes. Never runs anything and never guesses: a
//! node whose sizes do not follow is counted as unknown.

mod arithmetic;

use crate::attributes::{Attributes, bodies, is_standard};
use crate::evaluate::{label, qualified, reads};
use crate::fact::Fact;
use crate::functions::{MOST_NODES, specialized};
use crate::infer::{Facts, Functions, Opsets, Walk, complete, declared, give_sizes};
use crate::operators::Unknowns;
use crate::proto::{FunctionProto, GraphProto, ModelProto, NodeProto, ValueInfoProto};
use crate::stored::{External, Stored};
use graph::{Bindings, Symbol};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// What one node costs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NodeCost {
    /// The node, for people.
    pub node: String,
    /// Its operator with domain.
    pub operator: String,
    /// Names of the values it reads, in bodies too.
    pub inputs: Vec<String>,
    /// Names of the values it gives.
    pub outputs: Vec<String>,
    /// Sizes of its first output; `None` if they do not follow.
    pub shape: Option<Vec<usize>>,
    /// Element type of its first output.
    pub element: Option<String>,
    /// Multiply-adds: of matrix products, convolutions and the like.
    pub multiply_adds: u64,
    /// Elements it writes.
    pub elements: u64,
    /// Bytes of what it reads.
    pub bytes_read: u64,
    /// Bytes of what it writes.
    pub bytes_written: u64,
    /// Whether all its sizes follow.
    pub is_known: bool,
    /// How many bodies or functions it is inside.
    pub depth: usize,
    /// Position of the node in the graph, or of the graph's node that it is inside of.
    pub top: usize,
}

/// What a model costs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// Node by node, in order.
    pub nodes: Vec<NodeCost>,
    /// Sum over the nodes.
    pub multiply_adds: u64,
    /// Bytes read and written, summed over the nodes.
    pub bytes_moved: u64,
    /// What no order and no fusion avoids: inputs, initializers and outputs, once each.
    pub bytes_least: u64,
    /// Largest sum of values that are alive at once, initializers aside.
    pub peak_bytes: u64,
    /// Nodes with a size that does not follow; the sums leave them out.
    pub n_unknown: usize,
}

/// Counts a model at the given sizes of its inputs, by name; others are as the file declares them.
/// External data is in `folder`.
pub fn cost(model: &ModelProto, folder: &Arc<Path>, shapes: &BTreeMap<String, Vec<usize>>) -> Cost {
    let Some(graph) = &model.graph else {
        return Cost::default();
    };
    let unknowns = Unknowns::default();
    let mut counting = Counting {
        folder,
        unknowns: &unknowns,
        functions: Functions::new(&model.functions),
        n_open: MOST_NODES,
        is_following: false,
        bindings: bindings(graph, shapes),
        cost: Cost::default(),
        top: 0,
    };
    let mut facts = Facts::default();
    give_sizes(graph, &unknowns);
    for info in &graph.input {
        let mut fact = declared(info, &unknowns);
        if let Some(shape) = shapes.get(&info.name) {
            fact.shape = Some(shape.iter().map(|n| (*n as i64).into()).collect());
        }
        facts.set(&info.name, fact);
    }
    let opsets = Opsets::new(&model.opset_import);
    let body = Body {
        nodes: &graph.node,
        infos: infos(graph),
        opsets: &opsets,
        depth: 0,
    };
    counting.initializers(graph, &mut facts);
    let outputs: BTreeSet<&str> = graph.output.iter().map(|o| o.name.as_str()).collect();
    let given: Vec<&str> = graph.input.iter().map(|i| i.name.as_str()).collect();
    let stored: BTreeSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
    counting.cost.peak_bytes = counting.body(&body, &mut facts, &given, &outputs, &stored);
    let ends = given.iter().copied().chain(outputs).chain(stored);
    let ends: BTreeSet<&str> = ends.collect();
    counting.cost.bytes_least = ends.iter().filter_map(|n| counting.bytes(&facts, n)).sum();
    counting.cost
}

/// Values of the dynamic sizes that the inputs' sizes give.
fn bindings(graph: &GraphProto, shapes: &BTreeMap<String, Vec<usize>>) -> Bindings {
    let mut bound = Bindings::new();
    for info in &graph.input {
        let tensor = info.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
        let dims = tensor.and_then(|t| t.shape.as_ref()).map(|s| &s.dim);
        let sizes = shapes.get(&info.name);
        for (dim, size) in dims.into_iter().flatten().zip(sizes.into_iter().flatten()) {
            if let Some(name) = dim.name() {
                bound.insert(Symbol::new(name), *size as i64);
            }
        }
    }
    bound
}

fn infos(graph: &GraphProto) -> BTreeMap<&str, &ValueInfoProto> {
    let infos = graph.value_info.iter().chain(&graph.output);
    infos.map(|i| (i.name.as_str(), i)).collect()
}

/// Nodes in one name space.
struct Body<'a> {
    nodes: &'a [NodeProto],
    infos: BTreeMap<&'a str, &'a ValueInfoProto>,
    opsets: &'a Opsets,
    depth: usize,
}

struct Counting<'a> {
    folder: &'a Arc<Path>,
    unknowns: &'a Unknowns,
    functions: Functions<'a>,
    /// Nodes of functions that may still be counted.
    n_open: u64,
    /// Whether nodes of a function are counted.
    is_following: bool,
    bindings: Bindings,
    cost: Cost,
    /// Position of the node of the graph that is counted.
    top: usize,
}

/// Bodies inside each other, at most.
const MAX_DEPTH: usize = 32;

impl<'a> Counting<'a> {
    fn initializers(&self, graph: &GraphProto, facts: &mut Facts) {
        for tensor in &graph.initializer {
            let stored = Arc::new(Stored::new(tensor.clone(), self.folder));
            facts.set(&tensor.name, Fact::of_stored(&stored));
        }
    }

    /// Sizes of a value, if they follow.
    fn sizes(&self, fact: &Fact) -> Option<Vec<usize>> {
        let size = |n: &graph::SymExpr| usize::try_from(n.eval(&self.bindings).ok()?).ok();
        fact.shape.as_ref()?.iter().map(size).collect()
    }

    fn elements(&self, fact: &Fact) -> Option<u64> {
        let sizes = self.sizes(fact)?;
        sizes.iter().try_fold(1u64, |p, n| p.checked_mul(*n as u64))
    }

    fn bytes(&self, facts: &Facts, name: &str) -> Option<u64> {
        let fact = facts.get(name)?;
        let each = fact.element.and_then(crate::element::Element::bytes);
        let bytes = match (each, &fact.constant) {
            (Some(each), _) => self.elements(fact)?.checked_mul(each as u64),
            // Types that nothing is computed with here still have bytes.
            (None, Some(stored)) => Some(stored_bytes(stored)),
            (None, None) => None,
        };
        bytes.filter(|n| *n <= MOST_BYTES)
    }

    /// Counts nodes; gives the largest sum of values alive at once.
    fn body(
        &mut self,
        body: &Body,
        facts: &mut Facts,
        given: &[&str],
        outputs: &BTreeSet<&str>,
        stored: &BTreeSet<&str>,
    ) -> u64 {
        let mut alive = Alive::new(body.nodes, outputs);
        for name in given.iter().filter(|n| !stored.contains(**n)) {
            alive.add(name, self.bytes(facts, name).unwrap_or(0));
        }
        for (n, node) in body.nodes.iter().enumerate() {
            if body.depth == 0 {
                self.top = n;
            }
            let inner = self.node(node, body, facts);
            let is_constant = node.op_type == "Constant" && is_standard(node);
            for name in node.output.iter().filter(|o| !o.is_empty()) {
                let source = node.input.first().filter(|_| is_view(node));
                match source.filter(|s| !stored.contains(s.as_str())) {
                    Some(source) => alive.alias(name, source),
                    None if is_constant || source.is_some() => {}
                    None => alive.add(name, self.bytes(facts, name).unwrap_or(0)),
                }
            }
            alive.step(n, inner);
        }
        alive.peak
    }

    /// The function that a node calls, unless it is too deep, or there are too many nodes to count.
    fn followed(&mut self, node: &NodeProto, depth: usize) -> Option<&'a FunctionProto> {
        let index = self.functions.index();
        let position = index.position(node)?;
        let extent = index.extent_of(position)?;
        // The nodes inside of a function were counted with it.
        let n_nodes = if self.is_following { 0 } else { extent.n_nodes };
        let is_followed = index.is_followed(position, depth) && n_nodes <= self.n_open;
        self.n_open -= if is_followed { n_nodes } else { 0 };
        self.functions.called(node).filter(|_| is_followed)
    }

    /// Counts a node and notes what is known of its outputs; gives the memory its inside takes.
    fn node(&mut self, node: &NodeProto, body: &Body, facts: &mut Facts) -> u64 {
        let unknowns = self.unknowns;
        let mut peak = 0;
        let function = self.followed(node, body.depth);
        let is_followed = function.is_some();
        let mut known = if let Some(function) = function {
            let mut inner = Facts::default();
            for (name, given) in function.input.iter().zip(&node.input) {
                inner.set(name, facts.get(given).cloned().unwrap_or_default());
            }
            let nodes = specialized(function, node);
            let inside = Body {
                nodes: &nodes,
                infos: function
                    .value_info
                    .iter()
                    .map(|i| (i.name.as_str(), i))
                    .collect(),
                opsets: &Opsets::new(&function.opset_import),
                depth: body.depth + 1,
            };
            let outputs: BTreeSet<&str> = function.output.iter().map(String::as_str).collect();
            let was_following = std::mem::replace(&mut self.is_following, true);
            peak = self.body(&inside, &mut inner, &[], &outputs, &BTreeSet::new());
            self.is_following = was_following;
            let fact = |name: &String| inner.get(name).cloned().unwrap_or_default();
            function.output.iter().map(fact).collect()
        } else if bodies(node).next().is_some() && body.depth < MAX_DEPTH {
            let (facts, inner) = self.control(node, body, facts);
            peak = inner;
            facts
        } else {
            let walk = Walk {
                opsets: body.opsets,
                functions: self.functions.clone(),
                unknowns,
                inputs_are_constant: true,
            };
            walk.node(node, facts)
        };
        known.resize_with(node.output.len(), Fact::default);
        for (name, mut fact) in node.output.iter().zip(known) {
            if let Some(info) = body.infos.get(name.as_str()) {
                complete(&mut fact, info, unknowns);
            }
            facts.set(name, fact);
        }
        if !(is_followed || bodies(node).next().is_some()) {
            let mut entry = self.entry(node, facts, body.depth);
            entry.is_known &= self.functions.called(node).is_none();
            let sum = &mut self.cost;
            sum.multiply_adds = sum.multiply_adds.saturating_add(entry.multiply_adds);
            sum.bytes_moved += entry.bytes_read + entry.bytes_written;
            self.cost.n_unknown += usize::from(!entry.is_known);
            self.cost.nodes.push(entry);
        }
        peak
    }

    /// Counts each body once. What a branch gives is what the node gives.
    fn control(&mut self, node: &NodeProto, body: &Body, facts: &Facts) -> (Vec<Fact>, u64) {
        let (mut known, mut peak) = (Vec::new(), 0);
        for inside in bodies(node) {
            let mut inner = facts.clone();
            for info in &inside.input {
                inner.set(&info.name, declared(info, self.unknowns));
            }
            self.initializers(inside, &mut inner);
            let nodes = Body {
                nodes: &inside.node,
                infos: infos(inside),
                opsets: body.opsets,
                depth: body.depth + 1,
            };
            let outputs: BTreeSet<&str> = inside.output.iter().map(|o| o.name.as_str()).collect();
            let given: Vec<&str> = inside.input.iter().map(|i| i.name.as_str()).collect();
            let stored: BTreeSet<&str> =
                inside.initializer.iter().map(|t| t.name.as_str()).collect();
            peak = peak.max(self.body(&nodes, &mut inner, &given, &outputs, &stored));
            if node.op_type == "If" && known.is_empty() {
                let fact = |o: &ValueInfoProto| inner.get(&o.name).cloned().unwrap_or_default();
                known = inside.output.iter().map(fact).collect();
                // The other branch may give other elements.
                for fact in &mut known {
                    *fact = Fact::new(fact.element, fact.shape.take());
                }
            }
        }
        (known, peak)
    }

    fn entry(&self, node: &NodeProto, facts: &Facts, depth: usize) -> NodeCost {
        let names = |list: &[String]| -> Vec<String> {
            let some = list.iter().filter(|n| !n.is_empty());
            some.cloned().collect()
        };
        let first = node.output.first().and_then(|o| facts.get(o));
        let mut entry = NodeCost {
            node: label(node),
            operator: qualified(node),
            inputs: reads(node).into_iter().map(str::to_string).collect(),
            outputs: names(&node.output),
            shape: first.and_then(|f| self.sizes(f)),
            element: first.and_then(|f| f.element).map(|e| e.to_string()),
            multiply_adds: 0,
            elements: 0,
            bytes_read: 0,
            bytes_written: 0,
            is_known: true,
            depth,
            top: self.top,
        };
        if is_view(node) || moves_nothing(node) {
            return entry;
        }
        let counted = || -> Option<(u64, u64, u64, u64)> {
            let (mut written, mut elements) = (0u64, 0u64);
            for name in &entry.outputs {
                written += self.bytes(facts, name)?;
                elements += self.elements(facts.get(name)?)?;
            }
            let mut read = 0;
            let inputs: BTreeSet<&String> = node.input.iter().filter(|i| !i.is_empty()).collect();
            for name in inputs {
                let picked = picks(node) && node.input.first() == Some(name);
                read += match picked {
                    true => written,
                    false => self.bytes(facts, name)?,
                };
            }
            let sizes = |name: &String| facts.get(name).and_then(|f| self.sizes(f));
            let inputs: Vec<_> = node.input.iter().map(sizes).collect();
            let outputs: Vec<_> = node.output.iter().map(sizes).collect();
            let products =
                arithmetic::multiply_adds(node, Attributes::new(node), &inputs, &outputs)?;
            Some((read, written, elements, products))
        };
        match counted() {
            Some((read, written, elements, products)) => {
                entry.bytes_read = read;
                entry.bytes_written = written;
                entry.elements = elements;
                entry.multiply_adds = products;
            }
            None => entry.is_known = false,
        }
        entry
    }
}

fn stored_bytes(stored: &Stored) -> u64 {
    let proto = stored.proto();
    match stored.external() {
        Ok(Some(External { length, .. })) => length,
        _ => proto.raw_data.as_ref().map_or(0, |raw| raw.len() as u64),
    }
}

/// Whether a node gives the elements of its first input as they are.
pub fn is_view(node: &NodeProto) -> bool {
    const VIEWS: [&str; 6] = [
        "Reshape",
        "Squeeze",
        "Unsqueeze",
        "Flatten",
        "Identity",
        "Dropout",
    ];
    is_standard(node) && VIEWS.contains(&node.op_type.as_str())
}

fn moves_nothing(node: &NodeProto) -> bool {
    is_standard(node) && ["Constant", "Shape", "Size"].contains(&node.op_type.as_str())
}

/// Whether a node reads no more of its first input than it gives.
fn picks(node: &NodeProto) -> bool {
    const PICKS: [&str; 5] = ["Gather", "GatherElements", "GatherND", "Slice", "Split"];
    is_standard(node) && PICKS.contains(&node.op_type.as_str())
}

/// A file that names a larger value names sizes beyond reason: they count as unknown, and sums stay numbers.
const MOST_BYTES: u64 = 1 << 44;

/// Values alive at a point of a body.
struct Alive {
    last: BTreeMap<String, usize>,
    /// For each value that is a view: the value whose elements it shows.
    roots: BTreeMap<String, String>,
    bytes: BTreeMap<String, u64>,
    now: u64,
    peak: u64,
}

impl Alive {
    fn new(nodes: &[NodeProto], outputs: &BTreeSet<&str>) -> Alive {
        let mut last = BTreeMap::new();
        let mut roots: BTreeMap<String, String> = BTreeMap::new();
        for (n, node) in nodes.iter().enumerate() {
            for name in &node.output {
                let source = node.input.first().filter(|_| is_view(node));
                if let Some(source) = source {
                    let root = roots.get(source).unwrap_or(source).clone();
                    roots.insert(name.clone(), root);
                }
                last.insert(name.clone(), n);
            }
            for name in reads(node) {
                let root = roots.get(name).map_or(name, String::as_str);
                last.insert(root.to_string(), n);
            }
        }
        for name in outputs {
            let root = roots.get(*name).map_or(*name, String::as_str);
            last.insert(root.to_string(), usize::MAX);
        }
        Alive {
            last,
            roots: BTreeMap::new(),
            bytes: BTreeMap::new(),
            now: 0,
            peak: 0,
        }
    }

    fn add(&mut self, name: &str, bytes: u64) {
        self.bytes.insert(name.to_string(), bytes);
        self.now += bytes;
    }

    fn alias(&mut self, name: &str, source: &str) {
        let root = self.roots.get(source).map_or(source, String::as_str);
        let root = root.to_string();
        self.roots.insert(name.to_string(), root);
    }

    /// Goes on to node `n`, whose inside takes `inner` bytes, and drops what nobody reads after it.
    fn step(&mut self, n: usize, inner: u64) {
        self.peak = self.peak.max(self.now + inner);
        let last = &self.last;
        let mut freed = 0;
        self.bytes.retain(|name, bytes| {
            let stays = last.get(name).is_some_and(|at| *at > n);
            freed += if stays { 0 } else { *bytes };
            stays
        });
        self.now -= freed;
    }
}

#[cfg(test)]
mod tests;
