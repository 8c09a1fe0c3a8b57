//! What is known of every value of a body, from its inputs forward.
//!
//! Owns the walk, into branches, loops and local functions too; what an operator does is in `operators`.
//! Never changes the body. A value of which nothing is known has the type that the file declares, if it declares one.

mod control;
mod unevaluated;

use crate::attributes::{Attributes, bodies, is_standard};
use crate::check::schemas::{Type, port, versions};
use crate::element::Element;
use crate::evaluate::{is_control, reads};
use crate::fact::{Fact, MAX_ELEMENTS};
use crate::functions::Index;
use crate::operators::{self, Call, Inference, Unknowns, shared};
use crate::proto::{
    Dimension, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto,
};
use crate::stored::Stored;
use crate::tensor::Tensor;
use graph::{SymExpr, Symbol};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// Versions of the operator sets a model imports, by domain; the standard's domain is empty.
#[derive(Clone, Debug, Default)]
pub struct Opsets(BTreeMap<String, i64>);

impl Opsets {
    /// The operator sets that a model or a function imports.
    pub fn new(imports: &[crate::proto::OperatorSetIdProto]) -> Opsets {
        let domain = |d: &str| {
            if d == "ai.onnx" {
                String::new()
            } else {
                d.to_string()
            }
        };
        Opsets(
            imports
                .iter()
                .map(|o| (domain(&o.domain), o.version))
                .collect(),
        )
    }

    /// The version of a domain; 1 if the model does not import it.
    pub fn version(&self, domain: &str) -> i64 {
        let domain = if domain == "ai.onnx" { "" } else { domain };
        self.0.get(domain).copied().unwrap_or(1)
    }
}

/// Most bytes that are computed to find a small result.
const MOST_FOLDED: usize = 1 << 20;

/// Functions local to a model, with limits on how far inference follows them. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Functions<'a> {
    index: Arc<Index<'a>>,
    /// Number of enclosing calls.
    depth: usize,
}

impl<'a> Functions<'a> {
    /// The functions of a model.
    pub fn new(all: &'a [FunctionProto]) -> Functions<'a> {
        Functions {
            index: Arc::new(Index::new(all)),
            depth: 0,
        }
    }

    /// The function a node calls.
    pub(crate) fn called(&self, node: &NodeProto) -> Option<&'a FunctionProto> {
        self.index.called(node)
    }

    /// All functions of the model.
    pub(crate) fn index(&self) -> &Index<'a> {
        &self.index
    }

    /// Whether calls of the function at that position are followed here: it is neither too deep nor too long.
    pub(crate) fn is_followed(&self, position: usize) -> bool {
        self.index.is_followed(position, self.depth)
    }

    /// The same inside of a call; `None` if the call is not followed.
    pub(crate) fn inside(&self, call: &NodeProto) -> Option<Functions<'a>> {
        let position = self.index.position(call)?;
        self.is_followed(position).then(|| Functions {
            index: Arc::clone(&self.index),
            depth: self.depth + 1,
        })
    }
}

/// What is known of the values of a body, and of those around it. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    values: Arc<BTreeMap<String, Fact>>,
    outer: Option<Arc<Facts>>,
}

impl Facts {
    /// Empty facts inside of a body with the facts `outer`.
    pub fn inside(outer: &Facts) -> Facts {
        Facts {
            values: Arc::default(),
            outer: Some(Arc::new(outer.clone())),
        }
    }

    /// Whether nothing is known, as around the graph of a model.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty() && self.outer.as_ref().is_none_or(|o| o.is_empty())
    }

    /// What is known of a value; `None` for an unknown name.
    pub fn get(&self, name: &str) -> Option<&Fact> {
        let outer = || self.outer.as_ref()?.get(name);
        self.values.get(name).or_else(outer)
    }

    /// Adds what is known of a value.
    pub fn set(&mut self, name: &str, fact: Fact) {
        if !name.is_empty() {
            Arc::make_mut(&mut self.values).insert(name.to_string(), fact);
        }
    }
}

/// The parts of the model around a body that a walk needs.
pub struct Walk<'a> {
    /// Operator-set versions.
    pub opsets: &'a Opsets,
    /// Functions local to the model.
    pub functions: Functions<'a>,
    /// Sizes of which nothing is known.
    pub unknowns: &'a Unknowns,
    /// Whether initializers that are also inputs are constants, as in files before version 4.
    pub inputs_are_constant: bool,
}

impl Walk<'_> {
    /// What is known of the values of `body`, whose initializers are `constants`; `outer` is what is
    /// known around it.
    pub fn body(
        &self,
        body: &GraphProto,
        constants: &BTreeMap<String, Arc<Stored>>,
        outer: &Facts,
    ) -> Facts {
        let facts = self.before(body, constants, outer);
        self.nodes(body, facts, &mut |_, _, _| ())
    }

    /// What is known of the values of `body` before its first node.
    pub(crate) fn before(
        &self,
        body: &GraphProto,
        constants: &BTreeMap<String, Arc<Stored>>,
        outer: &Facts,
    ) -> Facts {
        let mut facts = Facts::inside(outer);
        if outer.is_empty() {
            give_sizes(body, self.unknowns);
        }
        for info in &body.input {
            facts.set(&info.name, declared_fact(info, self.unknowns));
        }
        for sparse in &body.sparse_initializer {
            if let Some(values) = &sparse.values {
                let shape = sparse.dims.iter().map(|n| SymExpr::constant(*n)).collect();
                let fact = Fact::new(Element::of_number(values.data_type), Some(shape));
                facts.set(&values.name, fact);
            }
        }
        for (name, stored) in constants {
            let replaceable = body.input.iter().any(|i| i.name == *name);
            if !replaceable || self.inputs_are_constant {
                facts.set(name, Fact::of_stored(stored));
            }
        }
        facts
    }

    /// What is known after the last node of `body`, given what is known before the first one. Calls `seen` with every
    /// node, what is known before it, and what is inferred of its outputs before the file's declarations are used.
    pub(crate) fn nodes(
        &self,
        body: &GraphProto,
        mut facts: Facts,
        seen: &mut dyn FnMut(&NodeProto, &Facts, &mut [Fact]),
    ) -> Facts {
        let infos = body.value_info.iter().chain(&body.output);
        let infos: BTreeMap<&str, &ValueInfoProto> = infos.map(|i| (i.name.as_str(), i)).collect();
        let mut counted: BTreeSet<&str> = BTreeSet::new();
        for node in &body.node {
            let is_counted =
                counts_elements(node) || reads(node).into_iter().any(|name| counted.contains(name));
            let mut outputs = self.node(node, &facts);
            seen(node, &facts, &mut outputs);
            for (name, mut fact) in node.output.iter().zip(outputs) {
                if let Some(info) = infos.get(name.as_str()) {
                    match is_counted {
                        true => complete_type(&mut fact, info, self.unknowns),
                        false => complete(&mut fact, info, self.unknowns),
                    }
                }
                if is_counted {
                    counted.insert(name);
                }
                facts.set(name, fact);
            }
        }
        facts
    }

    /// What is known of a node's outputs, one for each.
    pub fn node(&self, node: &NodeProto, facts: &Facts) -> Vec<Fact> {
        let mut outputs = self.known(node, facts).unwrap_or_default();
        outputs.resize_with(node.output.len(), Fact::default);
        outputs
    }

    fn known(&self, node: &NodeProto, facts: &Facts) -> Option<Vec<Fact>> {
        if is_control(node) {
            return self.control(node, facts);
        }
        let given = |name: &String| {
            (!name.is_empty()).then(|| facts.get(name).cloned().unwrap_or_default())
        };
        let inputs: Vec<Option<Fact>> = node.input.iter().map(given).collect();
        if let Some(function) = self.functions.called(node) {
            return self.function(function, node, inputs);
        }
        let cx = Inference {
            node,
            attributes: Attributes::new(node),
            opset: self.opsets.version(&node.domain),
            inputs: &inputs,
            unknowns: self.unknowns,
        };
        let Some(operator) = operators::find(node) else {
            return unevaluated::with_sizes(&cx, stated_types(node, cx.opset, &inputs));
        };
        if let Some(constants) = self.folded(operator, &cx) {
            return Some(constants.into_iter().map(Fact::of_tensor).collect());
        }
        let mut outputs = (operator.infer)(&cx)?;
        for size in outputs.iter_mut().flat_map(|o| &mut o.shape).flatten() {
            if is_too_long(size) {
                *size = self.unknowns.size();
            }
        }
        if let Some(elements) = operators::symbolic_elements(operator, &cx, &outputs)
            && !elements.iter().any(is_too_long)
        {
            let known: Option<Vec<i64>> = elements.iter().map(SymExpr::as_const).collect();
            let output = outputs.first_mut()?;
            match (known, output.sizes(), output.element) {
                (Some(known), Some(shape), Some(element))
                    if shape.iter().product::<usize>() == known.len() =>
                {
                    *output = Fact::of_tensor(Tensor::of_ints(element, &shape, &known)?);
                }
                _ => output.elements = shared(elements),
            }
        }
        Some(outputs)
    }

    /// What is known of the outputs of a call of a local function.
    fn function(
        &self,
        function: &FunctionProto,
        call: &NodeProto,
        inputs: Vec<Option<Fact>>,
    ) -> Option<Vec<Fact>> {
        let functions = self.functions.inside(call)?;
        if !self.unknowns.looks_into_call() {
            return None;
        }
        let walk = Walk {
            opsets: &Opsets::new(&function.opset_import),
            functions,
            unknowns: self.unknowns,
            inputs_are_constant: false,
        };
        let mut facts = Facts::default();
        for (name, fact) in function.input.iter().zip(inputs) {
            if let Some(fact) = fact {
                facts.set(name, fact);
            }
        }
        for node in &crate::functions::specialized(function, call) {
            for (name, fact) in node.output.iter().zip(walk.node(node, &facts)) {
                facts.set(name, fact);
            }
        }
        let fact = |name: &String| facts.get(name).cloned().unwrap_or_default();
        Some(function.output.iter().map(fact).collect())
    }

    /// The outputs of a node of small constants.
    fn folded(&self, operator: &operators::Operator, cx: &Inference) -> Option<Vec<Tensor>> {
        if bodies(cx.node).next().is_some() || is_random(cx.node) || is_dequantized(cx.node) {
            return None;
        }
        let mut inputs = Vec::new();
        for fact in cx.inputs {
            inputs.push(match fact {
                None => None,
                Some(fact) => Some(fact.small()?),
            });
        }
        // The size of a result is checked before it is computed, since it could be large.
        let foreseen = (operator.infer)(cx).unwrap_or_default();
        if foreseen
            .iter()
            .any(|f| f.len().is_some_and(|n| n > MAX_ELEMENTS))
        {
            return None;
        }
        let call = Call {
            node: cx.node,
            attributes: cx.attributes,
            opset: cx.opset,
            inputs: &inputs,
            widened: false,
        };
        let outputs = operator.run(&call, MOST_FOLDED).ok()?;
        outputs
            .iter()
            .all(|t| t.len() <= MAX_ELEMENTS)
            .then_some(outputs)
    }
}

/// The element types that the standard gives the outputs of an operator without a meaning here.
fn stated_types(node: &NodeProto, version: i64, inputs: &[Option<Fact>]) -> Option<Vec<Fact>> {
    let domain = if is_standard(node) { "" } else { &node.domain };
    let known = versions(domain, &node.op_type).iter();
    let schema = known.rev().find(|schema| schema.since <= version)?;
    let of_variable = |variable: &Type| {
        let mut given = inputs.iter().enumerate();
        given.find_map(|(at, fact)| {
            let is_same = port(&schema.inputs, at)?.element == *variable;
            fact.as_ref().filter(|_| is_same)?.element
        })
    };
    let element = |at: usize| match &port(&schema.outputs, at)?.element {
        Type::Any => None,
        Type::One(element) => Some(*element),
        variable => of_variable(variable),
    };
    let types = (0..node.output.len()).map(|at| Fact::new(element(at), None));
    Some(types.collect())
}

/// Sums of more terms are replaced with an unknown size: they are of no more use, and their products would grow without
/// bound.
const MOST_TERMS: usize = 16;

/// Whether a size is a sum of many terms, or one of a product of many sizes.
pub(crate) fn is_too_long(size: &SymExpr) -> bool {
    let terms = size.terms();
    terms.len() > MOST_TERMS || terms.iter().any(|(atoms, _)| atoms.len() > MOST_TERMS)
}

/// Whether the sizes of a node's outputs depend on the elements that it reads. The sizes that the file declares for
/// such outputs, and for values computed from them (one for each row, for example), were true for the data at export
/// and may not be true for other data.
fn counts_elements(node: &NodeProto) -> bool {
    let op = node.op_type.as_str();
    let counts = matches!(op, "Compress" | "NonMaxSuppression" | "NonZero" | "Unique");
    counts && is_standard(node)
}

/// Whether a node gives different numbers in every run.
pub fn is_random(node: &NodeProto) -> bool {
    let op = node.op_type.as_str();
    op.starts_with("Random") || matches!(op, "Multinomial" | "Bernoulli")
}

/// Whether a node dequantizes a constant. The constant stays quantized before this node, because runtimes recognize
/// quantized products in this form, and because it is smaller.
pub fn is_dequantized(node: &NodeProto) -> bool {
    node.op_type == "DequantizeLinear"
}

/// Registers the sizes that the inputs of a model name.
pub(crate) fn give_sizes(graph: &GraphProto, unknowns: &Unknowns) {
    let types = graph.input.iter().filter_map(|i| i.r#type.as_ref());
    let shapes = types.filter_map(|t| t.tensor_type.as_ref()?.shape.as_ref());
    for dim in shapes.flat_map(|s| &s.dim) {
        if let Some(name) = dim.name() {
            unknowns.give(name);
        }
    }
}

/// What is known of the values of a model's graph, whose initializers that are also inputs keep their values.
pub fn known_values(model: &ModelProto, folder: &Arc<Path>, unknowns: &Unknowns) -> Facts {
    let Some(graph) = &model.graph else {
        return Facts::default();
    };
    let opsets = Opsets::new(&model.opset_import);
    let walk = Walk {
        opsets: &opsets,
        functions: Functions::new(&model.functions),
        unknowns,
        inputs_are_constant: true,
    };
    let stored = |t: &TensorProto| (t.name.clone(), Arc::new(Stored::new(t.clone(), folder)));
    let constants = graph.initializer.iter().map(stored).collect();
    walk.body(graph, &constants, &Facts::default())
}

/// What the file says of an input of the model.
pub fn declared(info: &ValueInfoProto, unknowns: &Unknowns) -> Fact {
    stated(info, unknowns, &|name| match name.starts_with('?') {
        true => unknowns.size(),
        false => SymExpr::symbol(Symbol::new(name)),
    })
}

/// What the file says of a value inside.
pub(crate) fn declared_fact(info: &ValueInfoProto, unknowns: &Unknowns) -> Fact {
    stated(info, unknowns, &|name| unknowns.named(name))
}

/// What the file says of a value, whose sizes `named` gives by their names.
fn stated(info: &ValueInfoProto, unknowns: &Unknowns, named: &dyn Fn(&str) -> SymExpr) -> Fact {
    let tensor = info.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
    let Some(tensor) = tensor else {
        return Fact::default();
    };
    let size = |dim: &crate::proto::DimensionProto| match (&dim.value, dim.name()) {
        (Some(Dimension::DimValue(n)), _) if *n >= 0 => SymExpr::constant(*n),
        (_, Some(name)) => named(name),
        _ => unknowns.size(),
    };
    let shape = tensor
        .shape
        .as_ref()
        .map(|s| s.dim.iter().map(size).collect());
    Fact::new(Element::of_number(tensor.elem_type), shape)
}

/// Adds what the file declares where nothing is known.
pub(crate) fn complete(fact: &mut Fact, info: &ValueInfoProto, unknowns: &Unknowns) {
    let stated = declared_fact(info, unknowns);
    fact.element = fact.element.or(stated.element);
    match (&mut fact.shape, stated.shape) {
        (Some(known), Some(stated)) if known.len() == stated.len() => {
            for (known, stated) in known.iter_mut().zip(stated) {
                if is_unknown(known) {
                    *known = stated;
                }
            }
        }
        (None, stated) => fact.shape = stated,
        _ => {}
    }
}

/// Adds the element type and the number of dimensions that the file declares, but no size.
fn complete_type(fact: &mut Fact, info: &ValueInfoProto, unknowns: &Unknowns) {
    let stated = stated(info, unknowns, &|_| unknowns.size());
    fact.element = fact.element.or(stated.element);
    if fact.shape.is_none() {
        let unknown = |shape: Vec<SymExpr>| shape.iter().map(|_| unknowns.size()).collect();
        fact.shape = stated.shape.map(unknown);
    }
}

/// Whether nothing is known of a size.
pub fn is_unknown(size: &SymExpr) -> bool {
    size.as_symbol()
        .is_some_and(|s| s.as_str().starts_with('?'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rewrite::trial::Trial;

    #[test]
    fn the_standard_says_types_of_operators_without_a_meaning() {
        let trial = Trial::new(22).input_of("x", Element::F64, "n 4");
        let trial = trial
            .node("s = ai.onnx.ml.Scaler(x)")
            .node("d = Det(x)")
            .node("o = Other(x)");
        let model = trial.output("s", "n 4").model();
        let facts = known_values(&model.proto, &model.folder, &Unknowns::default());
        let element = |name| facts.get(name).and_then(|fact| fact.element);
        assert_eq!(element("s"), Some(Element::F32));
        assert_eq!(element("d"), Some(Element::F64));
        assert_eq!(element("o"), None);
    }
}
