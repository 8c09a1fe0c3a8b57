//! From file to graph: inputs, initializers and nodes in the file's order, all problems collected.
//!
//! Operators are in [`super::operators`]; this file knows them by their rules only.

use super::constants;
use super::error::{OnnxError, Problem, UnsupportedOperator};
use super::file::{About, File};
use super::given_sizes::unknown_sizes;
use super::mode::Mode;
use super::names::{SizeNames, identifier};
use super::node::NodeCx;
use super::normalize::normalized;
use super::operators;
use super::proto::{Dimension, NodeProto, TensorProto, ValueInfoProto};
use super::shape_values;
use super::tensor::{Stored, dtype_of};
use super::value::{Ints, MAX_KNOWN, Value};
use graph::{
    Attr, Builder, ContainerId, DType, Expr, Graph, Lifetime, Origin, Stage, SymExpr, Symbol,
};
use ops::{OpBuilder, attrs};
use std::collections::BTreeMap;
use std::sync::Arc;

/// How to import.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Values for dynamic sizes, by the name they have in the file or in [`Model::sizes`]. One that the file
    /// does not have is a problem of the import.
    pub sizes: BTreeMap<String, i64>,
    /// The form of batch normalization and dropout.
    pub mode: Mode,
}

/// An imported model.
#[derive(Clone, Debug)]
pub struct Model {
    /// Library nodes; its inputs are [`Model::inputs`], then [`Model::parameters`].
    pub graph: Graph,
    /// What a caller gives at every call.
    pub inputs: Vec<Port>,
    /// What a caller gets.
    pub outputs: Vec<Port>,
    /// Initializers that the nodes use as data, in the order of first use.
    pub parameters: Vec<Parameter>,
    /// What batch normalization in training form makes of running statistics: the statistic's
    /// container and its successor's, in the order of first use.
    pub statistics: Vec<(ContainerId, ContainerId)>,
    /// Nodes that normalize by fixed statistics, by name.
    pub frozen: Vec<String>,
    /// Dynamic sizes: the name in the file and the symbol in the graph.
    pub sizes: Vec<(String, Symbol)>,
    /// What the file says of itself.
    pub about: About,
}

/// An input or output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its name in the file.
    pub name: String,
    /// The container.
    pub container: ContainerId,
}

/// An initializer.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Its name in the file.
    pub name: String,
    /// The container.
    pub container: ContainerId,
    /// Whether training changes it by gradients: false for statistics of batch normalization.
    pub trainable: bool,
    /// Its elements.
    pub stored: Arc<Stored>,
}

impl File {
    /// The model as a graph.
    ///
    /// # Errors
    /// [`OnnxError::Model`] with everything that stands in the way.
    pub fn import(&self, options: &Options) -> Result<Model, OnnxError> {
        let (normal, problem) = match normalized(self, &options.sizes) {
            Ok(normal) => (normal, None),
            Err(problem) => (None, Some(problem)),
        };
        let file = normal.as_ref().unwrap_or(self);
        let mut unsupported = file.unsupported();
        if problem.is_some() {
            // The problem itself says what it keeps from being inlined.
            unsupported.retain(|entry| !entry.is_function);
        }
        let mut graph = Graph::new(identifier(&file.graph.name));
        let mut importer = Importer::new(file, options, &mut graph);
        importer.problems.extend(problem);
        importer.run();
        let mut finished = importer.finish();
        if !(unsupported.is_empty() && finished.problems.is_empty()) {
            return Err(OnnxError::Model {
                path: self.path().to_path_buf(),
                unsupported,
                problems: finished.problems,
            });
        }
        graph.last_state().nodes.append(&mut finished.nodes);
        for port in &finished.outputs {
            graph.add_output(port.container);
        }
        for (_, symbol) in &finished.sizes {
            graph.symbols.push(symbol.clone());
        }
        // A seed is added late, but parameters come after it.
        let inputs = finished.inputs.iter().map(|port| port.container);
        let parameters = finished.parameters.iter().map(|p| p.container);
        graph.inputs = inputs.chain(parameters).collect();
        Ok(Model {
            graph,
            inputs: finished.inputs,
            outputs: finished.outputs,
            parameters: finished.parameters,
            statistics: finished.statistics,
            frozen: finished.frozen,
            sizes: finished.sizes,
            about: self.about().clone(),
        })
    }

    /// Operators of the model with the number of nodes that use them, ordered by name.
    pub fn operators(&self) -> Vec<(String, usize)> {
        let mut counts = BTreeMap::new();
        for node in &self.graph.node {
            *counts.entry(qualified(node)).or_insert(0) += 1;
        }
        counts.into_iter().collect()
    }

    /// Operators that the importer does not know, ordered by name.
    pub fn unsupported(&self) -> Vec<UnsupportedOperator> {
        let mut found: BTreeMap<(String, bool), Vec<String>> = BTreeMap::new();
        for (n, node) in self.graph.node.iter().enumerate() {
            if rule_for(node).is_some() {
                continue;
            }
            let is_function = self.defines(&node.domain, &node.op_type);
            let key = (qualified(node), is_function);
            found.entry(key).or_default().push(label(n, node));
        }
        let entry = |((operator, is_function), nodes)| UnsupportedOperator {
            operator,
            is_function,
            nodes,
        };
        found.into_iter().map(entry).collect()
    }
}

/// The rule for a node; `None` if its operator is not of the standard or not supported.
pub(super) fn rule_for(node: &NodeProto) -> Option<operators::Rule> {
    operators::find(&qualified(node))
}

fn qualified(node: &NodeProto) -> String {
    match node.domain.as_str() {
        "" | "ai.onnx" => node.op_type.clone(),
        domain => format!("{domain}.{}", node.op_type),
    }
}

/// The node's name, or one from its operator and position.
fn label(position: usize, node: &NodeProto) -> String {
    if node.name.is_empty() {
        format!("{}_{position}", node.op_type)
    } else {
        node.name.clone()
    }
}

/// State of an import.
pub(super) struct Importer<'g> {
    file: &'g File,
    options: &'g Options,
    /// Where nodes are appended.
    pub(super) builder: Builder<'g>,
    pub(super) values: BTreeMap<String, Value>,
    /// Containers of values that are not [`Value::Data`], made when first used as data.
    pub(super) made: BTreeMap<String, ContainerId>,
    names: SizeNames,
    sizes: Vec<(String, Symbol)>,
    /// The sizes that have a value, by the names that the graph gives them.
    bound: Vec<String>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    parameters: Vec<Parameter>,
    statistics: Vec<(ContainerId, ContainerId)>,
    frozen: Vec<String>,
    pub(super) problems: Vec<Problem>,
    seed: Option<ContainerId>,
    /// Random nodes so far: each draws other numbers.
    n_random: i64,
}

/// What an import leaves behind when it no longer borrows the graph.
struct Finished {
    nodes: Vec<graph::Node>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    parameters: Vec<Parameter>,
    statistics: Vec<(ContainerId, ContainerId)>,
    frozen: Vec<String>,
    sizes: Vec<(String, Symbol)>,
    problems: Vec<Problem>,
}

impl<'g> Importer<'g> {
    fn new(file: &'g File, options: &'g Options, graph: &'g mut Graph) -> Self {
        Importer {
            file,
            options,
            builder: Builder::new(graph, Arc::default(), Stage::Forward),
            values: BTreeMap::new(),
            made: BTreeMap::new(),
            names: SizeNames::default(),
            sizes: Vec::new(),
            bound: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            parameters: Vec::new(),
            statistics: Vec::new(),
            frozen: Vec::new(),
            problems: Vec::new(),
            seed: None,
            n_random: 0,
        }
    }

    fn run(&mut self) {
        let graph = &self.file.graph;
        for tensor in &graph.initializer {
            self.initializer(tensor);
        }
        for sparse in &graph.sparse_initializer {
            let name = sparse.values.as_ref().map_or("", |v| v.name.as_str());
            self.problem(
                format!("initializer `{name}`"),
                "sparse tensors are not supported",
            );
            self.values.insert(name.to_string(), Value::Broken);
        }
        for input in &graph.input {
            if !self.values.contains_key(&input.name) {
                self.input(input);
            }
        }
        let made = self.sizes.iter().map(|(_, symbol)| symbol.as_str());
        let made = made.chain(self.bound.iter().map(String::as_str));
        self.problems
            .extend(unknown_sizes(graph, &made.collect(), &self.options.sizes));
        for (n, node) in graph.node.iter().enumerate() {
            self.node(n, node);
        }
        for output in &graph.output {
            self.output(&output.name);
        }
    }

    fn finish(self) -> Finished {
        Finished {
            nodes: self.builder.nodes,
            inputs: self.inputs,
            outputs: self.outputs,
            parameters: self.parameters,
            statistics: self.statistics,
            frozen: self.frozen,
            sizes: self.sizes,
            problems: self.problems,
        }
    }

    fn problem(&mut self, place: impl Into<String>, message: impl Into<String>) {
        self.problems.push(Problem {
            place: place.into(),
            message: message.into(),
        });
    }

    pub(super) fn initializer(&mut self, tensor: &TensorProto) {
        let value = match stored_value(tensor, self.file) {
            Ok(value) => value,
            Err(message) => {
                self.problem(format!("initializer `{}`", tensor.name), message);
                Value::Broken
            }
        };
        self.values.insert(tensor.name.clone(), value);
    }

    fn input(&mut self, info: &ValueInfoProto) {
        let value = match self.input_type(info) {
            Ok((dtype, shape)) => {
                let name = identifier(&info.name);
                let graph = &mut *self.builder.graph;
                let container = graph.add_input(&name, dtype, shape, Lifetime::Input);
                self.inputs.push(Port {
                    name: info.name.clone(),
                    container,
                });
                Value::Data(container)
            }
            Err(message) => {
                self.problem(format!("input `{}`", info.name), message);
                Value::Broken
            }
        };
        self.values.insert(info.name.clone(), value);
    }

    fn input_type(&mut self, info: &ValueInfoProto) -> Result<(DType, Vec<SymExpr>), String> {
        let tensor = info.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
        let tensor = tensor.ok_or("only tensors are supported as inputs")?;
        let dtype = dtype_of(tensor.elem_type)?;
        let dims = tensor.shape.as_ref().ok_or(
            "the file does not say how many dimensions it has; export the model with shapes",
        )?;
        let mut shape = Vec::new();
        for (d, dim) in dims.dim.iter().enumerate() {
            shape.push(match (&dim.value, dim.name()) {
                (Some(Dimension::DimValue(n)), _) if *n >= 0 => SymExpr::constant(*n),
                (Some(Dimension::DimValue(n)), _) => {
                    return Err(format!("dimension {d} has size {n}"));
                }
                (_, Some(name)) => {
                    let symbol = self.names.symbol(name);
                    self.size(name.to_string(), symbol)
                }
                _ => {
                    let symbol = self.names.unnamed(&info.name, d);
                    self.size(symbol.clone(), symbol)
                }
            });
        }
        Ok((dtype, shape))
    }

    /// A dynamic size: the caller's value for it, or its symbol.
    fn size(&mut self, name: String, symbol: String) -> SymExpr {
        let given = &self.options.sizes;
        if let Some(value) = given.get(&name).or_else(|| given.get(&symbol)) {
            let value = SymExpr::constant(*value);
            self.bound.push(symbol);
            return value;
        }
        let symbol = Symbol::new(symbol);
        if !self.sizes.iter().any(|(_, s)| *s == symbol) {
            self.sizes.push((name, symbol.clone()));
        }
        SymExpr::symbol(symbol)
    }

    pub(super) fn node(&mut self, position: usize, node: &NodeProto) {
        let label = label(position, node);
        let used = node.input.iter().filter(|name| !name.is_empty());
        let missing: Vec<_> = used
            .clone()
            .filter(|n| !self.values.contains_key(*n))
            .collect();
        let broken = used
            .clone()
            .any(|n| matches!(self.values.get(n), Some(Value::Broken)));
        let place = format!("node `{label}` ({})", node.op_type);
        if let Some(name) = missing.first() {
            let message = format!("its input `{name}` is defined nowhere before it");
            self.problem(place.clone(), message);
        }
        if broken || !missing.is_empty() {
            return self.broken(node);
        }
        self.builder.origin = Arc::new(Origin {
            node: identifier(&label),
            module: String::new(),
            source: format!("{}, node {position} of the file", node.op_type),
        });
        let Some(rule) = rule_for(node) else {
            return self.broken(node);
        };
        let mut cx = NodeCx::new(self, node);
        let folded = shape_values::fold(&mut cx).transpose();
        let folded = folded.or_else(|| constants::folded(&cx).map(Ok));
        let values = folded.unwrap_or_else(|| {
            let values = rule(&mut cx)?;
            cx.all_attributes_seen()?;
            Ok(values)
        });
        match values {
            Ok(values) => self.define(node, &place, values),
            Err(refusal) => {
                self.problem(place, refusal.0);
                self.broken(node);
            }
        }
    }

    fn broken(&mut self, node: &NodeProto) {
        for name in node.output.iter().filter(|name| !name.is_empty()) {
            self.values.insert(name.clone(), Value::Broken);
        }
    }

    fn define(&mut self, node: &NodeProto, place: &str, values: Vec<Value>) {
        for (n, name) in node.output.iter().enumerate() {
            if name.is_empty() {
                continue;
            }
            let value = values.get(n).cloned().unwrap_or_else(|| {
                let message = format!("its output {n} (`{name}`) is not supported");
                self.problem(place, message);
                Value::Broken
            });
            if self.values.insert(name.clone(), value).is_some() {
                self.problem(place, format!("its output `{name}` is defined twice"));
            }
        }
    }

    fn output(&mut self, name: &str) {
        let place = format!("output `{name}`");
        match self.values.get(name) {
            None => return self.problem(place, "no node defines it"),
            Some(Value::Broken) => return,
            Some(_) => {}
        }
        self.builder.origin = Arc::new(Origin {
            node: identifier(name),
            ..Origin::default()
        });
        let made = self.container(name).and_then(|id| {
            let inside = &self.builder.graph.container(id).lifetime;
            let listed = self.outputs.iter().any(|port| port.container == id);
            if matches!(inside, Lifetime::Transient) && !listed {
                return Ok(id);
            }
            // Results are the graph's own: one that is an input, or is listed twice, is copied.
            let copied = self.builder.elementwise(Expr::In(0), &[id]);
            copied.map_err(|e| e.to_string())
        });
        match made {
            Ok(container) => self.outputs.push(Port {
                name: name.to_string(),
                container,
            }),
            Err(message) => self.problem(place, message),
        }
    }

    /// What is known of a value that exists.
    pub(super) fn value(&self, name: &str) -> &Value {
        self.values.get(name).unwrap_or(&Value::Broken)
    }

    /// The container of a stored or known value that was used as data before.
    pub(super) fn made(&self, name: &str) -> Option<ContainerId> {
        self.made.get(name).copied()
    }

    /// The container of a value; made now if the value was only known so far.
    ///
    /// # Errors
    /// A sentence: external data cannot be read, or the value could not be imported.
    pub(super) fn container(&mut self, name: &str) -> Result<ContainerId, String> {
        if let Some(id) = self.made.get(name) {
            return Ok(*id);
        }
        let id = match self.value(name).clone() {
            Value::Data(id) => return Ok(id),
            Value::Sequence(_) => return Err(format!("its input `{name}` is a sequence")),
            Value::Broken => return Err(format!("its input `{name}` could not be imported")),
            Value::Constant(tensor) => {
                let name = identifier(name);
                self.builder.graph.add_constant(&name, (*tensor).clone())
            }
            Value::Ints(ints) => self.materialize(&identifier(name), &ints)?,
            Value::Stored(stored) => self.parameter(name, stored)?,
        };
        self.made.insert(name.to_string(), id);
        Ok(id)
    }

    /// A stored tensor as data: a parameter if it holds real numbers and has a dimension or is asked for as one;
    /// otherwise a constant.
    fn parameter(&mut self, name: &str, stored: Arc<Stored>) -> Result<ContainerId, String> {
        let own = identifier(name);
        let has_place = !stored.shape().is_empty() || self.file.is_scalar_parameter(name);
        let is_weight = stored.dtype().is_float() && has_place;
        if !is_weight {
            let tensor = stored
                .tensor()
                .map_err(|e| format!("cannot read `{name}`: {e}"))?;
            return Ok(self.builder.graph.add_constant(&own, tensor));
        }
        let shape = stored.shape().iter().map(|n| SymExpr::from(*n)).collect();
        let graph = &mut *self.builder.graph;
        let container = graph.add_input(&own, stored.dtype(), shape, Lifetime::Parameter);
        self.parameters.push(Parameter {
            name: name.to_string(),
            container,
            trainable: true,
            stored,
        });
        Ok(container)
    }

    /// Marks a parameter as one that gradients do not change.
    pub(super) fn not_trainable(&mut self, container: ContainerId) {
        for parameter in &mut self.parameters {
            parameter.trainable &= parameter.container != container;
        }
    }

    /// The latest value of a running statistic: its successor if a node made one already.
    pub(super) fn statistic(&self, of: ContainerId) -> ContainerId {
        let known = self.statistics.iter().find(|(id, _)| *id == of);
        known.map_or(of, |(_, next)| *next)
    }

    /// Makes `next` the latest value of a running statistic.
    pub(super) fn follow_statistic(&mut self, of: ContainerId, next: ContainerId) {
        match self.statistics.iter_mut().find(|(id, _)| *id == of) {
            Some(known) => known.1 = next,
            None => self.statistics.push((of, next)),
        }
    }

    /// Notes that the current node normalizes by fixed statistics.
    pub(super) fn freeze(&mut self) {
        self.frozen.push(self.builder.origin.node.clone());
    }

    /// The form of batch normalization and dropout.
    pub(super) fn mode(&self) -> Mode {
        self.options.mode
    }

    /// Symbolic integers as data: a constant, or scalars computed from sizes and put together.
    fn materialize(&mut self, name: &str, ints: &Ints) -> Result<ContainerId, String> {
        if let Some(tensor) = ints.to_tensor() {
            return Ok(self.builder.graph.add_constant(name, tensor));
        }
        let shape: Vec<_> = ints.shape.iter().map(|n| SymExpr::from(*n)).collect();
        let builder = &mut self.builder;
        let build = |builder: &mut Builder| {
            let mut parts = Vec::new();
            for element in &ints.elements {
                let expr = Expr::Index(element.clone()).cast(ints.dtype);
                let scalar = builder.elementwise(expr, &[])?;
                if ints.shape.is_empty() {
                    return Ok(scalar);
                }
                let one = Attr::Sizes(vec![SymExpr::constant(1)]);
                parts.push(builder.op1("reshape", &[scalar], attrs([("shape", one)]))?);
            }
            let joined = builder.op1("concat", &parts, attrs([("axis", Attr::Int(0))]))?;
            builder.op1("reshape", &[joined], attrs([("shape", Attr::Sizes(shape))]))
        };
        build(builder).map_err(|e: ops::OpError| e.to_string())
    }

    /// The seed of random numbers, an input of the graph, and a number for this node's.
    pub(super) fn randomness(&mut self) -> (ContainerId, i64) {
        let graph = &mut *self.builder.graph;
        let inputs = &mut self.inputs;
        let seed = *self.seed.get_or_insert_with(|| {
            let container = graph.add_input("seed", DType::I64, Vec::new(), Lifetime::Input);
            inputs.push(Port {
                name: "seed".to_string(),
                container,
            });
            container
        });
        self.n_random += 1;
        (seed, self.n_random - 1)
    }

    /// Version of the operator set.
    pub(super) fn opset(&self) -> i64 {
        self.file.opset()
    }
}

/// An initializer's value: integers are known, floats are data.
fn stored_value(tensor: &TensorProto, file: &File) -> Result<Value, String> {
    let stored = Stored::new(tensor, file.folder())?;
    if !stored.dtype().is_float() && stored.n_elements() <= MAX_KNOWN {
        let tensor = stored.tensor().map_err(|e| e.to_string())?;
        if let Some(ints) = Ints::of_tensor(&tensor) {
            return Ok(Value::Ints(ints));
        }
    }
    Ok(Value::Stored(Arc::new(stored)))
}
