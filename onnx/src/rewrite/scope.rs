//! What a rule sees of a body: nodes, who computes and who reads a value, what is known of it.

use super::target::Target;
use crate::attributes::bodies;
use crate::element::Element;
use crate::evaluate::{captured, reads};
use crate::fact::Fact;
use crate::infer::{Facts, Functions, Opsets, Walk};
use crate::operators::Unknowns;
use crate::proto::{GraphProto, NodeProto};
use crate::stored::Stored;
use crate::tensor::Tensor;
use graph::SymExpr;
use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Initializers of a body, by name.
pub type Constants = BTreeMap<String, Arc<Stored>>;

/// Names in use anywhere in a model, so that new ones are new.
#[derive(Debug, Default)]
pub struct Names {
    taken: RefCell<BTreeSet<String>>,
    /// The last number that was added to a name: those below it are taken.
    numbers: RefCell<BTreeMap<String, usize>>,
}

impl Names {
    /// Every name in a body and in the bodies inside.
    pub fn take(&self, body: &GraphProto) {
        let mut names = self.taken.borrow_mut();
        let infos = body
            .input
            .iter()
            .chain(&body.output)
            .chain(&body.value_info);
        names.extend(infos.map(|i| i.name.clone()));
        names.extend(body.initializer.iter().map(|t| t.name.clone()));
        let sparse = body.sparse_initializer.iter().flat_map(|t| &t.values);
        names.extend(sparse.map(|t| t.name.clone()));
        for node in &body.node {
            names.extend(node.input.iter().chain(&node.output).cloned());
            names.insert(node.name.clone());
        }
        drop(names);
        for inner in body.node.iter().flat_map(bodies) {
            self.take(inner);
        }
    }

    /// A name like `base` that nothing has.
    pub fn fresh(&self, base: &str) -> String {
        let mut names = self.taken.borrow_mut();
        if names.insert(base.to_string()) {
            return base.to_string();
        }
        let mut numbers = self.numbers.borrow_mut();
        let n = numbers.entry(base.to_string()).or_default();
        loop {
            *n += 1;
            let name = format!("{base}_{n}");
            if names.insert(name.clone()) {
                return name;
            }
        }
    }
}

/// What stays the same for all bodies of a model.
pub struct Surroundings<'a> {
    /// Operator-set versions.
    pub opsets: &'a Opsets,
    /// Functions local to the model.
    pub functions: Functions<'a>,
    /// Names in use.
    pub names: &'a Names,
    /// Sizes nothing is known of.
    pub unknowns: &'a Unknowns,
    /// What the file is meant for.
    pub target: Target,
    /// Whether initializers that are also inputs are constants, as in files before version 4.
    pub inputs_are_constant: bool,
    /// Bytes of constants that folding may add to the file beyond those it removes.
    pub fold_limit: usize,
}

/// A body as a rule sees it.
pub struct Scope<'a> {
    body: &'a GraphProto,
    constants: &'a Constants,
    facts: Facts,
    producers: BTreeMap<&'a str, usize>,
    readers: BTreeMap<&'a str, Vec<usize>>,
    outputs: BTreeSet<&'a str>,
    equal: OnceCell<Groups<'a>>,
    integers: OnceCell<Integers<'a>>,
    around: &'a Surroundings<'a>,
}

/// Names of initializers by element type and number of elements.
type Groups<'a> = BTreeMap<(i32, usize), Vec<&'a str>>;

/// The first value, in order of the nodes, with these elements, of that type and those sizes.
type Integers<'a> = BTreeMap<(Element, Vec<SymExpr>, Vec<SymExpr>), &'a str>;

/// Initializers that no caller can replace.
fn equal_initializers<'a>(body: &GraphProto, constants: &'a Constants, fixed: bool) -> Groups<'a> {
    let inputs = body.input.iter().filter(|_| !fixed);
    let inputs: BTreeSet<&str> = inputs.map(|i| i.name.as_str()).collect();
    let mut groups = Groups::new();
    for (name, stored) in constants {
        if !inputs.contains(name.as_str()) {
            groups
                .entry((stored.proto().data_type, stored.len()))
                .or_default()
                .push(name);
        }
    }
    groups
}

impl<'a> Scope<'a> {
    /// A view of `body`; `outer` is what is known around it.
    pub fn new(
        body: &'a GraphProto,
        constants: &'a Constants,
        outer: &Facts,
        around: &'a Surroundings<'a>,
    ) -> Scope<'a> {
        let walk = Walk {
            opsets: around.opsets,
            functions: around.functions.clone(),
            unknowns: around.unknowns,
            inputs_are_constant: around.inputs_are_constant,
        };
        let mut producers = BTreeMap::new();
        let mut readers: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (n, node) in body.node.iter().enumerate() {
            producers.extend(node.output.iter().map(|o| (o.as_str(), n)));
            // A node that reads a value twice is a reader twice.
            let inner: BTreeSet<&str> = bodies(node).flat_map(captured).collect();
            let own = node
                .input
                .iter()
                .map(String::as_str)
                .filter(|i| !i.is_empty());
            for name in own.chain(inner) {
                readers.entry(name).or_default().push(n);
            }
        }
        Scope {
            body,
            constants,
            facts: walk.body(body, constants, outer),
            producers,
            readers,
            outputs: body.output.iter().map(|o| o.name.as_str()).collect(),
            equal: OnceCell::new(),
            integers: OnceCell::new(),
            around,
        }
    }

    /// The body.
    pub fn body(&self) -> &'a GraphProto {
        self.body
    }

    /// What is known of every value.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// What holds everywhere in the model.
    pub fn around(&self) -> &'a Surroundings<'a> {
        self.around
    }

    /// The standard's operator-set version.
    pub fn opset(&self) -> i64 {
        self.around.opsets.version("")
    }

    /// The node at that position.
    pub fn node(&self, n: usize) -> &'a NodeProto {
        &self.body.node[n]
    }

    /// Position of the node of this body that computes a value.
    pub fn producer(&self, name: &str) -> Option<usize> {
        self.producers.get(name).copied()
    }

    /// The standard's node of that operator that computes a value.
    pub fn made_by(&self, name: &str, op: &str) -> Option<usize> {
        self.producer(name).filter(|n| self.is(*n, op))
    }

    /// Whether a node applies that operator of the standard.
    pub fn is(&self, n: usize, op: &str) -> bool {
        let node = self.node(n);
        node.op_type == op && crate::attributes::is_standard(node)
    }

    /// Positions of the nodes that read a value, in order; a node that reads it twice is there twice.
    pub fn readers(&self, name: &str) -> &[usize] {
        self.readers.get(name).map_or(&[], Vec::as_slice)
    }

    /// Whether a value is an output of the body.
    pub fn is_output(&self, name: &str) -> bool {
        self.outputs.contains(name)
    }

    /// The one node that reads a value, once, not from within a body of its own; `None` also for
    /// outputs.
    pub fn sole_reader(&self, name: &str) -> Option<usize> {
        let [reader] = self.readers(name) else {
            return None;
        };
        let reads = self.node(*reader).input.iter().any(|i| i == name);
        (reads && !self.is_output(name)).then_some(*reader)
    }

    /// The one node that reads the first output of node `n`, which has no other output in use.
    pub fn sole_user(&self, n: usize) -> Option<usize> {
        let (first, rest) = self.node(n).output.split_first()?;
        if rest.iter().any(|o| self.is_used(o)) {
            return None;
        }
        self.sole_reader(first)
    }

    /// Whether anything reads a value.
    pub fn is_used(&self, name: &str) -> bool {
        !name.is_empty() && (self.is_output(name) || !self.readers(name).is_empty())
    }

    /// What is known of a value.
    pub fn fact(&self, name: &str) -> Option<&Fact> {
        self.facts.get(name)
    }

    /// The elements of a constant, whatever their number.
    pub fn constant(&self, name: &str) -> Option<Tensor> {
        self.fact(name)?.tensor()
    }

    /// The one element of a constant.
    pub fn scalar(&self, name: &str) -> Option<f64> {
        self.fact(name)?.scalar()
    }

    /// The value of every element of a constant, if they are the same bit by bit.
    pub fn all_equal(&self, name: &str) -> Option<f64> {
        self.fact(name)?.constant.as_ref()?.all_equal()
    }

    /// The first initializer, by name, of the same type, sizes and bits; it may be the given one.
    pub fn first_equal_initializer(&self, name: &str) -> Option<&'a str> {
        let own = self.constants.get(name)?;
        let given = self.body.input.iter().any(|i| i.name == name);
        if given && !self.around.inputs_are_constant {
            return None;
        }
        let groups = self.equal.get_or_init(|| {
            equal_initializers(self.body, self.constants, self.around.inputs_are_constant)
        });
        let same = groups.get(&(own.proto().data_type, own.len()))?;
        same.iter()
            .copied()
            .find(|other| *other == name || own.same_elements(&self.constants[*other]))
    }

    /// The first value of this body that has, symbol by symbol, the same integers, type and sizes;
    /// `None` for values whose integers do not follow from sizes, and for constants.
    pub fn first_of_equal_integers(&self, name: &str) -> Option<&'a str> {
        let key = |name: &str| {
            let fact = self.fact(name)?;
            let elements = fact.elements.as_ref()?.to_vec();
            Some((fact.element?, fact.shape.clone()?, elements))
        };
        let first = self.integers.get_or_init(|| {
            let mut first = Integers::new();
            for output in self.body.node.iter().flat_map(|n| &n.output) {
                if let Some(key) = key(output) {
                    first.entry(key).or_insert(output);
                }
            }
            first
        });
        first.get(&key(name)?).copied()
    }

    /// Whether a value is an initializer of this body.
    pub fn is_initializer(&self, name: &str) -> bool {
        self.constants.contains_key(name)
    }

    /// The input of a node at that position; `None` if absent.
    pub fn input(&self, n: usize, at: usize) -> Option<&'a str> {
        let name = self.node(n).input.get(at)?.as_str();
        (!name.is_empty()).then_some(name)
    }

    /// A name like `base` that nothing has.
    pub fn fresh(&self, base: &str) -> String {
        self.around.names.fresh(base)
    }

    /// Names a node reads, in its bodies too.
    pub fn reads(&self, n: usize) -> BTreeSet<&'a str> {
        reads(self.node(n))
    }
}
