//! Which operators read a stored tensor, and as what.
//!
//! A tensor is followed through operators that give the same elements in another shape, order or type.

use crate::attributes::{bodies, is_standard};
use crate::element::Element;
use crate::evaluate::label;
use crate::proto::{GraphProto, NodeProto, TensorProto};
use std::collections::{BTreeMap, BTreeSet};

/// What an operator reads a tensor as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// A weight of a layer.
    Weight,
    /// An operand that may be a parameter, and may be something else.
    Operand,
    /// A limit, a scale or the like.
    Setting,
    /// A running mean or variance.
    Statistic,
}

impl Role {
    pub(super) fn may_be_parameter(self) -> bool {
        matches!(self, Role::Weight | Role::Operand)
    }

    fn new(node: &NodeProto, at: usize) -> Role {
        if !is_standard(node) {
            return Role::Operand;
        }
        match (node.op_type.as_str(), at) {
            ("BatchNormalization", 3 | 4) => Role::Statistic,
            ("Clip" | "Resize" | "Upsample" | "Dropout", 1..) => Role::Setting,
            ("QuantizeLinear" | "DequantizeLinear", 1..) => Role::Setting,
            ("Pad" | "OneHot", 2) => Role::Setting,
            // Weights of classes.
            ("SoftmaxCrossEntropyLoss" | "NegativeLogLikelihoodLoss", 2) => Role::Setting,
            ("Range" | "NonMaxSuppression" | "Shape" | "Size", _) => Role::Setting,
            ("Greater" | "GreaterOrEqual" | "Less" | "LessOrEqual" | "Equal", _) => Role::Setting,
            ("Conv" | "ConvTranspose" | "DeformConv", 1..) => Role::Weight,
            ("Gemm" | "MatMul" | "Einsum", _) => Role::Weight,
            ("LSTM" | "GRU" | "RNN", 1 | 2 | 3 | 7) => Role::Weight,
            ("BatchNormalization" | "InstanceNormalization", 1 | 2) => Role::Weight,
            ("LayerNormalization" | "GroupNormalization" | "RMSNormalization", 1 | 2) => {
                Role::Weight
            }
            ("Gather", 0) | ("PRelu", 1) => Role::Weight,
            _ => Role::Operand,
        }
    }
}

/// Nodes by what they read and give.
pub(super) struct Uses<'m> {
    readers: BTreeMap<&'m str, Vec<(&'m NodeProto, usize)>>,
    makers: BTreeMap<&'m str, &'m NodeProto>,
    /// Outputs of the graph and of bodies: what reads them is not known here.
    given_away: BTreeSet<&'m str>,
    /// Stored tensors and inputs of whole numbers.
    whole: BTreeSet<&'m str>,
    /// Stored single elements.
    single: BTreeSet<&'m str>,
}

/// Stored tensors by name: initializers, then what `Constant` nodes give.
pub(super) fn stored(graph: &GraphProto) -> impl Iterator<Item = (&str, &TensorProto)> {
    let initializers = graph.initializer.iter().map(|t| (t.name.as_str(), t));
    let constants = graph.node.iter().filter_map(|node| {
        let is_constant = node.op_type == "Constant" && is_standard(node);
        let name = node.output.first().filter(|_| is_constant)?;
        let tensor = node.attribute.iter().find_map(|a| a.t.as_ref())?;
        Some((name.as_str(), tensor))
    });
    initializers.chain(constants)
}

/// Elements of a tensor; sizes come from the file, so the number may be beyond what can be counted.
pub(super) fn n_elements(tensor: &TensorProto) -> i64 {
    let sizes = tensor.dims.iter();
    sizes.fold(1i64, |n, size| n.saturating_mul((*size).max(0)))
}

/// Operators whose results hold the elements of the first operand only.
const CARRIERS: [&str; 12] = [
    "Identity",
    "Cast",
    "CastLike",
    "Reshape",
    "Flatten",
    "Transpose",
    "Unsqueeze",
    "Squeeze",
    "Expand",
    "Tile",
    "Slice",
    "Split",
];

/// The carriers that give only a part. Parameters of several layers stored side by side are read this way.
const PARTS: [&str; 2] = ["Slice", "Split"];

/// Whether a node gives what it reads there, in another form.
fn carries(node: &NodeProto, at: usize) -> bool {
    let op = node.op_type.as_str();
    let is_carried = CARRIERS.contains(&op) || op == "DequantizeLinear";
    is_standard(node) && (at == 0 && is_carried || op == "Concat")
}

impl<'m> Uses<'m> {
    pub(super) fn new(graph: &'m GraphProto) -> Uses<'m> {
        let mut uses = Uses {
            readers: BTreeMap::new(),
            makers: BTreeMap::new(),
            given_away: BTreeSet::new(),
            whole: BTreeSet::new(),
            single: BTreeSet::new(),
        };
        uses.add(graph);
        uses
    }

    fn add(&mut self, graph: &'m GraphProto) {
        let is_whole = |number: i32| Element::of_number(number).is_some_and(Element::is_int);
        for (name, tensor) in stored(graph) {
            if is_whole(tensor.data_type) {
                self.whole.insert(name);
            }
            if n_elements(tensor) == 1 {
                self.single.insert(name);
            }
        }
        for input in &graph.input {
            let tensor = input.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
            if tensor.is_some_and(|t| is_whole(t.elem_type)) {
                self.whole.insert(&input.name);
            }
        }
        let outputs = graph.output.iter().map(|o| o.name.as_str());
        self.given_away.extend(outputs);
        for node in &graph.node {
            for (at, name) in node.input.iter().enumerate() {
                if !name.is_empty() {
                    self.readers.entry(name).or_default().push((node, at));
                }
            }
            for name in node.output.iter().filter(|o| !o.is_empty()) {
                self.makers.insert(name, node);
            }
            bodies(node).for_each(|body| self.add(body));
        }
    }

    /// Whether a node gives it, such as a `Constant`.
    pub(super) fn is_made(&self, name: &str) -> bool {
        self.makers.contains_key(name)
    }

    fn read(&self, name: &str) -> &[(&'m NodeProto, usize)] {
        self.readers.get(name).map_or(&[], Vec::as_slice)
    }

    /// The nodes that compute with a tensor, directly or after nodes that carry it, and whether it is given away.
    fn computing(
        &self,
        name: &'m str,
        is_followed: &dyn Fn(&NodeProto) -> bool,
    ) -> (Vec<(&'m NodeProto, usize)>, bool) {
        let (mut found, mut is_given) = (Vec::new(), false);
        let (mut open, mut seen) = (vec![name], BTreeSet::from([name]));
        while let Some(name) = open.pop() {
            is_given |= self.given_away.contains(name);
            for (node, at) in self.read(name) {
                match carries(node, *at) && is_followed(node) {
                    true => {
                        let next = node.output.iter().map(String::as_str);
                        open.extend(next.filter(|name| seen.insert(*name)));
                    }
                    false => found.push((*node, *at)),
                }
            }
        }
        (found, is_given)
    }

    /// What a tensor is read as.
    pub(super) fn roles(&self, name: &'m str) -> Vec<Role> {
        let (nodes, is_given) = self.computing(name, &|_| true);
        let mut roles: Vec<Role> = nodes.iter().map(|(n, at)| Role::new(n, *at)).collect();
        if is_given {
            roles.push(Role::Operand);
        }
        roles
    }

    /// The nodes that read the whole tensor as a parameter.
    pub(super) fn readers_as_weight(&self, name: &'m str) -> Vec<String> {
        let is_whole = |node: &NodeProto| {
            let op = node.op_type.as_str();
            !PARTS.contains(&op) && op != "Concat"
        };
        let (nodes, _) = self.computing(name, &is_whole);
        let is_parameter = |(node, at): &&(&NodeProto, usize)| {
            let is_product = matches!(node.op_type.as_str(), "Add" | "Mul");
            Role::new(node, *at) == Role::Weight || is_standard(node) && is_product
        };
        let nodes: Vec<&NodeProto> = nodes.iter().filter(is_parameter).map(|n| n.0).collect();
        let is_first = |n: usize| {
            !nodes[..n]
                .iter()
                .any(|other| std::ptr::eq(*other, nodes[n]))
        };
        let distinct = (0..nodes.len()).filter(|n| is_first(*n));
        distinct.map(|n| label(nodes[n])).collect()
    }

    /// Whether a tensor is only multiplied with positions, and only sines and cosines read the products.
    pub(super) fn is_frequency(&self, name: &'m str) -> bool {
        let (nodes, is_given) = self.computing(name, &|_| true);
        let mut known = BTreeMap::new();
        let is_angle = |(node, at): &(&'m NodeProto, usize)| {
            let is_product = matches!(node.op_type.as_str(), "Mul" | "MatMul" | "Einsum");
            let mut others = node.input.iter().enumerate().filter(|(n, _)| n != at);
            is_standard(node)
                && is_product
                && others.all(|(_, other)| self.is_position(other, &mut known))
                && node.output.iter().all(|angle| self.is_turned(angle))
        };
        !is_given && !nodes.is_empty() && nodes.iter().all(is_angle)
    }

    /// Whether only sines and cosines read a value, perhaps times a number.
    fn is_turned(&self, name: &'m str) -> bool {
        let mut open = vec![name];
        let mut seen = BTreeSet::from([name]);
        let mut turns = false;
        while let Some(name) = open.pop() {
            let (nodes, is_given) = self.computing(name, &|_| true);
            if is_given {
                return false;
            }
            for (node, _) in nodes {
                let is_scaled = matches!(node.op_type.as_str(), "Mul" | "Div")
                    && node.input.iter().any(|i| self.single.contains(i.as_str()));
                match (is_standard(node), node.op_type.as_str()) {
                    (true, "Sin" | "Cos") => turns = true,
                    (true, _) if is_scaled => {
                        let next = node.output.iter().map(String::as_str);
                        open.extend(next.filter(|name| seen.insert(*name)));
                    }
                    _ => return false,
                }
            }
        }
        turns
    }

    /// Whether a value is made of whole numbers and single numbers only, as positions are.
    fn is_position(&self, name: &'m str, known: &mut BTreeMap<&'m str, bool>) -> bool {
        // A damaged file may have a value that is made of itself.
        let mut entered = BTreeSet::new();
        let mut open = vec![name];
        while let Some(name) = open.last().copied() {
            if known.contains_key(name) {
                open.pop();
                continue;
            }
            let stored = self.whole.contains(name) || self.single.contains(name);
            let maker = self.makers.get(name).filter(|node| is_standard(node));
            let answer = match maker.map(|node| (node.op_type.as_str(), *node)) {
                _ if stored => Some(true),
                Some(("Range" | "Shape" | "Size" | "NonZero" | "ArgMax" | "ArgMin", _)) => {
                    Some(true)
                }
                Some((op, node)) if CARRIERS.contains(&op) || OF_POSITIONS.contains(&op) => {
                    let inputs = || node.input.iter().map(String::as_str);
                    let inputs = || inputs().filter(|i| !i.is_empty());
                    let missing: Vec<&str> = inputs().filter(|i| !known.contains_key(i)).collect();
                    match (missing.is_empty(), entered.insert(name)) {
                        (true, _) => Some(inputs().all(|i| known[i])),
                        (false, true) => {
                            open.extend(missing);
                            None
                        }
                        (false, false) => Some(false),
                    }
                }
                _ => Some(false),
            };
            if let Some(answer) = answer {
                known.insert(name, answer);
                open.pop();
            }
        }
        known.get(name).copied().unwrap_or(false)
    }
}

/// Operators that compute positions from positions, besides those that carry them.
const OF_POSITIONS: [&str; 10] = [
    "Concat",
    "Gather",
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Neg",
    "CumSum",
    "Where",
    "ConstantOfShape",
];
