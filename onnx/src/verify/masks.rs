//! Dropout with masks that stay: what is dropped follows from positions, not from chance.
//!
//! A training graph draws a mask in the forward pass and uses it in the backward pass. With a mask that is
//! the same in every run its loss is a function, whose gradients can be tried as those of any other. A pseudo-random
//! number in [0, 1) is made of each element's position, and the element is kept if the number is at least the ratio.

use crate::attributes::is_standard;
use crate::proto::{AttributeProto, ModelProto, NodeProto};
use crate::tensor::{Tensor, Values};

/// The model with every Dropout of the graph that may draw replaced by its arithmetic with a mask that stays;
/// `None` if it has none.
pub(super) fn held(model: &ModelProto) -> Option<ModelProto> {
    let graph = model.graph.as_ref()?;
    let draws = |node: &NodeProto| {
        let mode = node.input.get(2).is_some_and(|name| !name.is_empty());
        node.op_type == "Dropout" && is_standard(node) && mode
    };
    if !graph.node.iter().any(draws) {
        return None;
    }
    let mut model = model.clone();
    let graph = model.graph.as_mut()?;
    let (mut nodes, mut n_held) = (Vec::new(), 0);
    for node in std::mem::take(&mut graph.node) {
        match draws(&node) {
            true => {
                let mut held = Held::new(&node, n_held);
                held.write();
                n_held += 1;
                nodes.append(&mut held.nodes);
                graph.initializer.extend(held.numbers);
            }
            false => nodes.push(node),
        }
    }
    graph.node = nodes;
    Some(model)
}

/// What stands for one Dropout.
struct Held<'n> {
    dropout: &'n NodeProto,
    /// How many came before it, so that each has another mask.
    at: usize,
    nodes: Vec<NodeProto>,
    numbers: Vec<crate::proto::TensorProto>,
    n_names: usize,
}

impl<'n> Held<'n> {
    fn new(dropout: &'n NodeProto, at: usize) -> Held<'n> {
        Held {
            dropout,
            at,
            nodes: Vec::new(),
            numbers: Vec::new(),
            n_names: 0,
        }
    }

    /// A value of this Dropout, by number; no name of a file has such a form.
    fn fresh(&mut self) -> String {
        self.n_names += 1;
        format!("{}\u{1}held.{}", self.dropout.output[0], self.n_names)
    }

    fn number(&mut self, value: f64) -> String {
        let name = self.fresh();
        let tensor = Tensor::new(&[], Values::F32(vec![value as f32]));
        self.numbers.push(tensor.to_proto(&name));
        name
    }

    fn whole(&mut self, value: i64) -> String {
        let name = self.fresh();
        let tensor = Tensor::new(&[], Values::I64(vec![value]));
        self.numbers.push(tensor.to_proto(&name));
        name
    }

    fn node(&mut self, op: &str, inputs: &[&str]) -> String {
        let output = self.fresh();
        self.node_as(op, inputs, &output, Vec::new());
        output
    }

    fn node_as(&mut self, op: &str, inputs: &[&str], output: &str, list: Vec<AttributeProto>) {
        self.nodes.push(NodeProto {
            name: self.dropout.name.clone(),
            op_type: op.to_string(),
            input: inputs.iter().map(ToString::to_string).collect(),
            output: vec![output.to_string()],
            attribute: list,
            ..NodeProto::default()
        });
    }

    /// `y = mask ? x · scale : 0`; nothing is dropped where the mode is not that of training.
    fn write(&mut self) {
        let dropout = self.dropout;
        let (x, mode) = (&dropout.input[0], &dropout.input[2]);
        let ratio = match dropout.input[1].as_str() {
            "" => self.number(0.5),
            given => given.to_string(),
        };
        let mask = match dropout.output.get(1).filter(|name| !name.is_empty()) {
            Some(mask) => mask.clone(),
            None => self.fresh(),
        };
        let kept = self.chosen(x, &ratio);
        let off = self.node("Not", &[mode]);
        self.node_as("Or", &[&kept, &off], &mask, Vec::new());
        let one = self.number(1.0);
        let rest = self.node("Sub", &[&one, &ratio]);
        let scale = self.node("Div", &[&one, &rest]);
        let scale = self.node("Where", &[mode, &scale, &one]);
        let scaled = self.node("Mul", &[x, &scale]);
        let zero = self.number(0.0);
        let y = &dropout.output[0];
        self.node_as("Where", &[&mask, &scaled, &zero], y, Vec::new());
    }

    /// Whether each element of x is kept: by the fraction of `43758.5453 · sin(12.9898 · position)`, and the
    /// first in any case, since gradients of what is dropped altogether say nothing.
    fn chosen(&mut self, x: &str, ratio: &str) -> String {
        let size = self.node("Size", &[x]);
        let (zero, one) = (self.whole(0), self.whole(1));
        let positions = self.node("Range", &[&zero, &size, &one]);
        let reals = self.fresh();
        let to = crate::rewrite::patch::int("to", 1);
        self.node_as("Cast", &[&positions], &reals, vec![to]);
        let (shift, factor) = (
            self.number(17.0 * self.at as f64 + 0.5),
            self.number(12.9898),
        );
        let shifted = self.node("Add", &[&reals, &shift]);
        let angle = self.node("Mul", &[&shifted, &factor]);
        let sine = self.node("Sin", &[&angle]);
        let much = self.number(43758.5453);
        let wide = self.node("Mul", &[&sine, &much]);
        let floor = self.node("Floor", &[&wide]);
        let fraction = self.node("Sub", &[&wide, &floor]);
        let kept = self.node("GreaterOrEqual", &[&fraction, ratio]);
        let first = self.node("Equal", &[&positions, &zero]);
        let kept = self.node("Or", &[&kept, &first]);
        let shape = self.node("Shape", &[x]);
        self.node("Reshape", &[&kept, &shape])
    }
}
