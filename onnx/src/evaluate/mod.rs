//! A model's outputs, computed node by node: the meaning of a file.
//!
//! Runs in the types the file gives, or with every float as `f64` ([`Precision::Float64`]), which is
//! the reference that verification measures errors against. Values are dropped after their last
//! use and initializers are decoded when they are read, so that memory stays near the largest live set.
//! This is an interpreter for checking: products and convolutions use a blocked matrix product, all
//! else is plain.

mod control;
mod lanes;
mod perturbed;

pub use control::is_control;
pub use lanes::{Lane, Outcome, run_in_step};
pub use perturbed::Perturbed;

use crate::attributes::{Attributes, bodies};
use crate::element::Element;
use crate::infer::Opsets;
use crate::operators::bounds::{self, OperatorError};
use crate::operators::{self, Call};
use crate::proto::{FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto};
use crate::stored;
use crate::tensor::{STRING_BYTES, Tensor};
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

/// The number format floats are computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// The types of the file; halves are computed in `f32` and rounded.
    AsStored,
    /// Every float is an `f64`.
    Float64,
}

/// Why a model gives no outputs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvaluateError {
    /// A node's operator has no meaning here.
    #[error("{node}: Shorthaul does not know the operator `{operator}`")]
    Unsupported {
        /// The node.
        node: String,
        /// Its operator with domain.
        operator: String,
    },
    /// A node's operator gives no outputs.
    #[error("{node}: {error}")]
    Operator {
        /// The node.
        node: String,
        /// Why.
        error: OperatorError,
    },
    /// A node of control flow or a call refuses its inputs, or takes too many steps.
    #[error("{node}: {what}")]
    Node {
        /// The node.
        node: String,
        /// What does not fit.
        what: String,
    },
    /// Values take more memory than they may.
    #[error("{node}: values up to here take {held} bytes, more than {most}")]
    Large {
        /// The node whose outputs are too many.
        node: String,
        /// Bytes of the values up to there.
        held: usize,
        /// What they may take.
        most: usize,
    },
    /// The time that was given is over.
    #[error("the time limit was reached at {node}")]
    Late {
        /// The node that came next.
        node: String,
    },
    /// An input or output nobody gives.
    #[error("`{name}` {what}")]
    Value {
        /// The value.
        name: String,
        /// What is wrong with it.
        what: String,
    },
}

/// A model ready to run.
pub struct Program<'m> {
    model: &'m ModelProto,
    graph: &'m GraphProto,
    folder: &'m Path,
    opsets: Opsets,
    precision: Precision,
    /// Other roundings than the usual ones.
    perturbed: Option<Perturbed>,
    /// Initializers of the graph that were read, where all of them may be kept.
    kept: Option<Vec<OnceLock<Tensor>>>,
    /// Trips after which a loop is given up.
    most_trips: i64,
    /// Nodes that ran, over all runs.
    steps: AtomicI64,
    /// When to stop.
    deadline: Option<Instant>,
    /// The most bytes that values of a run took together.
    most_held: AtomicUsize,
    /// Most bytes of one value; raised when larger values are given.
    most_bytes: AtomicUsize,
    /// First outputs of the If nodes that ran, with the condition's value.
    branches: Mutex<BTreeSet<(String, bool)>>,
}

/// Bytes of decoded initializers that a program keeps from run to run, if all of them fit.
const MOST_KEPT: usize = 256 << 20;

/// Nodes that may run, for each trip that a loop may take.
const STEPS_PER_TRIP: i64 = 64;

/// A value may take this many times the bytes of what a program is given...
const TIMES_GIVEN: usize = 4;
/// ... or of what its file stores, and a few of them together twice as much.
const TIMES_STORED: usize = 8;
const TIMES_HELD: usize = 2;

/// Bytes that a value may take beside what a graph stores.
fn room_beside(graph: &GraphProto) -> usize {
    let bytes = |t: &TensorProto| {
        let n = crate::tensor::sizes(&t.dims).map_or(0, |(_, n)| n);
        let each = Element::of_number(t.data_type).and_then(Element::bytes);
        // Elements inside the file count with the bytes that are there, not with the sizes that it claims.
        match t.data_location {
            1 => n.saturating_mul(each.unwrap_or(1)),
            _ => t.encoded_len(),
        }
    };
    let stored = graph.initializer.iter().map(bytes);
    let stored = stored.fold(0usize, usize::saturating_add);
    stored.saturating_mul(TIMES_STORED).max(bounds::ALWAYS)
}

/// Named tensors.
pub type Values = BTreeMap<String, Tensor>;

impl<'m> Program<'m> {
    /// A model whose external data is in `folder`; `None` if it has no graph.
    pub fn new(
        model: &'m ModelProto,
        folder: &'m Path,
        precision: Precision,
    ) -> Option<Program<'m>> {
        let graph = model.graph.as_ref()?;
        let opsets = Opsets::new(&model.opset_import);
        Some(Program {
            model,
            graph,
            folder,
            opsets,
            precision,
            perturbed: None,
            kept: None,
            most_trips: control::MAX_TRIPS,
            steps: AtomicI64::new(0),
            deadline: None,
            most_held: AtomicUsize::new(0),
            most_bytes: AtomicUsize::new(room_beside(graph)),
            branches: Mutex::default(),
        })
    }

    /// Returns the program so that it gives loops up after `trips`.
    #[must_use]
    pub fn within(self, trips: i64) -> Program<'m> {
        Program {
            most_trips: trips,
            ..self
        }
    }

    /// Returns the program with other roundings.
    #[must_use]
    pub fn perturbed(self, perturbed: Perturbed) -> Program<'m> {
        Program {
            perturbed: Some(perturbed),
            ..self
        }
    }

    /// Returns the program so that it stops before the node that comes after `deadline`.
    #[must_use]
    pub fn until(self, deadline: Option<Instant>) -> Program<'m> {
        Program { deadline, ..self }
    }

    /// Returns the program so that it reads initializers once for all runs, if there is room for them.
    #[must_use]
    pub fn keeping(self) -> Program<'m> {
        let initializers = &self.graph.initializer;
        let widest = |t: &TensorProto| {
            let n = crate::tensor::sizes(&t.dims).map_or(0, |(_, n)| n);
            let each = match Element::of_number(t.data_type) {
                Some(element) if element.is_float() && self.precision == Precision::Float64 => 8,
                element => element.and_then(Element::bytes).unwrap_or(STRING_BYTES),
            };
            n.saturating_mul(each)
        };
        let total = initializers
            .iter()
            .fold(0usize, |sum, t| sum.saturating_add(widest(t)));
        let kept = (total <= MOST_KEPT).then(|| vec![OnceLock::new(); initializers.len()]);
        Program { kept, ..self }
    }

    /// The most bytes that values of a run took together so far.
    pub fn most_held(&self) -> usize {
        self.most_held.load(Ordering::Relaxed)
    }

    /// Branches of If nodes, also of nested ones, that no run took so far.
    pub fn untried(&self) -> Vec<String> {
        let taken = match self.branches.lock() {
            Ok(taken) => taken,
            Err(poisoned) => poisoned.into_inner(),
        };
        let mut untried = Vec::new();
        let mut open: Vec<&GraphProto> = vec![self.graph];
        while let Some(body) = open.pop() {
            for node in &body.node {
                open.extend(bodies(node));
                let first = node.output.first().cloned().unwrap_or_default();
                if node.op_type == "If" && control::is_control(node) {
                    let was_taken = |value| taken.contains(&(first.clone(), value));
                    let branches = [("then", true), ("else", false)];
                    let never = branches.into_iter().filter(|(_, value)| !was_taken(*value));
                    untried.extend(never.map(|(name, _)| format!("{name} of {}", label(node))));
                }
            }
        }
        untried.sort_unstable();
        untried
    }

    /// Whether initializers are read once for all runs.
    pub fn keeps(&self) -> bool {
        self.kept.is_some()
    }

    /// The values called `wanted`, given `feeds`. A node all of whose outputs are fed does not run, so
    /// a model can be cut at any value. Inputs with an initializer may be left out.
    ///
    /// # Errors
    /// See [`EvaluateError`].
    pub fn run(&self, feeds: &Values, wanted: &[&str]) -> Result<Vec<Tensor>, EvaluateError> {
        self.make_room(feeds);
        let scope = Scope {
            values: BTreeMap::new(),
            outer: None,
            depth: 0,
            held: 0,
        };
        self.body(self.graph, feeds, wanted, &scope, &self.opsets)
    }

    /// The outputs of the model, in its order.
    ///
    /// # Errors
    /// See [`EvaluateError`].
    pub fn outputs(&self, feeds: &Values) -> Result<Vec<Tensor>, EvaluateError> {
        let wanted: Vec<&str> = self.graph.output.iter().map(|o| o.name.as_str()).collect();
        self.run(feeds, &wanted)
    }

    /// Lets a value take `n_bytes`, where the caller knows that all that are alive at once take no more.
    pub(crate) fn allow(&self, n_bytes: usize) {
        self.most_bytes.fetch_max(n_bytes, Ordering::Relaxed);
    }

    /// Raises the limit on one value to what these values may lead to.
    fn make_room(&self, feeds: &Values) {
        let given = feeds.values().map(Tensor::n_bytes_in_memory);
        let given = given.fold(0usize, usize::saturating_add);
        let room = given.saturating_mul(TIMES_GIVEN);
        self.most_bytes.fetch_max(room, Ordering::Relaxed);
    }

    fn most_bytes(&self) -> usize {
        self.most_bytes.load(Ordering::Relaxed)
    }

    fn widened(&self, tensor: Tensor) -> Tensor {
        match self.precision {
            Precision::Float64 => tensor.widened(),
            Precision::AsStored => tensor,
        }
    }

    fn body(
        &self,
        body: &GraphProto,
        feeds: &Values,
        wanted: &[&str],
        outer: &Scope,
        opsets: &Opsets,
    ) -> Result<Vec<Tensor>, EvaluateError> {
        let lane = Lane {
            program: self,
            feeds,
        };
        let mut outcomes = lanes::walk(body, &[lane], wanted, outer, opsets);
        outcomes.pop().unwrap_or_else(|| Ok(Vec::new()))
    }

    fn initializer(&self, body: &GraphProto, at: usize) -> Result<Tensor, EvaluateError> {
        let proto = &body.initializer[at];
        let decode =
            || stored::decode(proto, self.folder).map_err(|what| unreadable(&proto.name, &what));
        // Bodies inside are decoded anew.
        let kept = self
            .kept
            .as_ref()
            .filter(|_| std::ptr::eq(body, self.graph));
        let Some(place) = kept.and_then(|kept| kept.get(at)) else {
            return decode();
        };
        if let Some(tensor) = place.get() {
            return Ok(tensor.clone());
        }
        let tensor = self.widened(decode()?);
        Ok(place.get_or_init(|| tensor).clone())
    }

    /// The outputs of a node; fewer than it names if the last ones are optional.
    fn node(
        &self,
        node: &NodeProto,
        scope: &Scope,
        opsets: &Opsets,
    ) -> Result<Vec<Tensor>, EvaluateError> {
        let most = self.most_trips.saturating_mul(STEPS_PER_TRIP);
        if self.steps.fetch_add(1, Ordering::Relaxed) >= most {
            return Err(EvaluateError::Node {
                node: label(node),
                what: format!("the model takes more than {most} steps; a loop may not end"),
            });
        }
        if self.deadline.is_some_and(|end| Instant::now() >= end) {
            return Err(EvaluateError::Late { node: label(node) });
        }
        if let Some(outputs) = self.control(node, scope, opsets)? {
            return Ok(outputs);
        }
        let mut inputs = Vec::with_capacity(node.input.len());
        for name in &node.input {
            inputs.push(match name.as_str() {
                "" => None,
                name => Some(scope.get(name).ok_or_else(|| missing(name))?.clone()),
            });
        }
        if let Some(function) = function_of(self.model, node) {
            return self.function(function, node, inputs, scope.depth + 1);
        }
        let operator = operators::find(node).ok_or_else(|| EvaluateError::Unsupported {
            node: label(node),
            operator: qualified(node),
        })?;
        // Initializers are as stored. Where elements only move, few of a large table may be left, so
        // that what comes out is widened.
        let moves = matches!(operator.symbolic, operators::Symbolic::Moves(_));
        let wide = |t: &Tensor| t.element() == Element::F64;
        if !moves || inputs.iter().flatten().any(wide) {
            let widen = |tensor: Option<Tensor>| tensor.map(|t| self.widened(t));
            inputs = inputs.into_iter().map(widen).collect();
        }
        let call = Call {
            node,
            attributes: Attributes::new(node),
            opset: opsets.version(&node.domain),
            inputs: &inputs,
            widened: self.precision == Precision::Float64,
        };
        let outputs = operator.run(&call, self.most_bytes());
        let outputs = outputs.map_err(|error| EvaluateError::Operator {
            node: label(node),
            error,
        })?;
        let outputs: Vec<Tensor> = outputs.into_iter().map(|t| self.widened(t)).collect();
        Ok(match &self.perturbed {
            Some(perturbed) => perturbed.moved(node, operator, outputs),
            None => outputs,
        })
    }

    /// Refuses a body whose values together take more memory than they should need.
    fn has_room(&self, node: &NodeProto, scope: &Scope) -> Result<(), EvaluateError> {
        let most = self.most_bytes().saturating_mul(TIMES_HELD);
        self.most_held.fetch_max(scope.held, Ordering::Relaxed);
        match scope.held > most {
            false => Ok(()),
            true => Err(EvaluateError::Large {
                node: label(node),
                held: scope.held,
                most,
            }),
        }
    }

    fn function(
        &self,
        function: &FunctionProto,
        node: &NodeProto,
        inputs: Vec<Option<Tensor>>,
        depth: usize,
    ) -> Result<Vec<Tensor>, EvaluateError> {
        if depth > MAX_CALLS {
            return Err(EvaluateError::Node {
                node: label(node),
                what: "its function calls itself, or others too deep to follow".to_string(),
            });
        }
        let given = function.input.iter().cloned().zip(inputs);
        let feeds = given
            .filter_map(|(name, tensor)| Some((name, tensor?)))
            .collect();
        let body = GraphProto {
            node: crate::functions::specialized(function, node),
            ..Default::default()
        };
        let wanted: Vec<&str> = function.output.iter().map(String::as_str).collect();
        let outer = Scope {
            values: BTreeMap::new(),
            outer: None,
            depth,
            held: 0,
        };
        self.body(
            &body,
            &feeds,
            &wanted,
            &outer,
            &Opsets::new(&function.opset_import),
        )
    }
}

/// How many calls of local functions may be inside of each other. The standard allows no recursion.
const MAX_CALLS: usize = 32;

/// Values of a body and of those around it.
struct Scope<'a> {
    values: Values,
    outer: Option<&'a Scope<'a>>,
    /// Calls of functions around it.
    depth: usize,
    /// Bytes of the values that nodes of this body gave and that are still read.
    held: usize,
}

impl Scope<'_> {
    fn get(&self, name: &str) -> Option<&Tensor> {
        self.values.get(name).or_else(|| self.outer?.get(name))
    }
}

fn unreadable(name: &str, what: &str) -> EvaluateError {
    EvaluateError::Value {
        name: name.to_string(),
        what: format!("cannot be read: {what}"),
    }
}

fn missing(name: &str) -> EvaluateError {
    EvaluateError::Value {
        name: name.to_string(),
        what: "has no value: nothing computes it and none is given".to_string(),
    }
}

/// The function of the model that a node calls.
pub fn function_of<'m>(model: &'m ModelProto, node: &NodeProto) -> Option<&'m FunctionProto> {
    crate::functions::called(&model.functions, node)
}

/// A node for messages: its name, or what it computes.
pub fn label(node: &NodeProto) -> String {
    match (node.name.as_str(), node.output.first()) {
        ("", Some(output)) => format!("{} → `{output}`", node.op_type),
        ("", None) => node.op_type.clone(),
        (name, _) => format!("{} `{name}`", node.op_type),
    }
}

/// An operator with its domain.
pub fn qualified(node: &NodeProto) -> String {
    match node.domain.as_str() {
        "" | "ai.onnx" => node.op_type.clone(),
        domain => format!("{domain}.{}", node.op_type),
    }
}

/// Names a node reads, in its bodies too.
pub fn reads(node: &NodeProto) -> BTreeSet<&str> {
    let mut names: BTreeSet<&str> = node
        .input
        .iter()
        .map(String::as_str)
        .filter(|n| !n.is_empty())
        .collect();
    for body in bodies(node) {
        names.extend(captured(body));
    }
    names
}

/// Names a body reads from around it.
pub fn captured(body: &GraphProto) -> BTreeSet<&str> {
    let mut names: BTreeSet<&str> = body.node.iter().flat_map(reads).collect();
    names.extend(body.output.iter().map(|o| o.name.as_str()));
    for own in body.input.iter().map(|i| &i.name) {
        names.remove(own.as_str());
    }
    for own in body.initializer.iter().map(|t| &t.name) {
        names.remove(own.as_str());
    }
    for own in body.sparse_initializer.iter().flat_map(|t| &t.values) {
        names.remove(own.name.as_str());
    }
    for own in body.node.iter().flat_map(|n| &n.output) {
        names.remove(own.as_str());
    }
    names
}

/// Positions of the nodes that the wanted values need, given the fed ones.
fn needed(nodes: &[NodeProto], feeds: &Values, wanted: &[&str]) -> BTreeSet<usize> {
    let mut names: BTreeSet<&str> = wanted
        .iter()
        .copied()
        .filter(|n| !feeds.contains_key(*n))
        .collect();
    let mut needed = BTreeSet::new();
    for (n, node) in nodes.iter().enumerate().rev() {
        if node.output.iter().any(|o| names.contains(o.as_str())) {
            needed.insert(n);
            names.extend(reads(node).into_iter().filter(|r| !feeds.contains_key(*r)));
        }
    }
    needed
}

/// The names that nobody reads any more, after each node.
fn last_uses<'n>(
    nodes: &'n [NodeProto],
    needed: &BTreeSet<usize>,
) -> BTreeMap<usize, Vec<&'n str>> {
    let mut last: BTreeMap<&str, usize> = BTreeMap::new();
    for n in needed {
        let node = &nodes[*n];
        let outputs = node.output.iter().map(String::as_str);
        last.extend(
            reads(node)
                .into_iter()
                .chain(outputs)
                .map(|name| (name, *n)),
        );
    }
    let mut by_node: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
    for (name, n) in last {
        by_node.entry(n).or_default().push(name);
    }
    by_node
}
