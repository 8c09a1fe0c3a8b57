//! Random numbers that stay: they follow from positions, not from chance.
//!
//! A training graph draws a mask of Dropout, or uniform numbers, in the forward pass and uses them in the backward pass.
//! With numbers that are the same in every run its loss is a function, whose gradients can be tried as those of any
//! other. A pseudo-random number in [0, 1) is made of each element's position; Dropout keeps an element if the number is
//! at least the ratio.

use crate::attributes::is_standard;
use crate::proto::{AttributeProto, ModelProto, NodeProto};
use crate::tensor::{Tensor, Values};

/// The model with every Dropout of the graph that may draw, and every `RandomUniformLike`, replaced by arithmetic with
/// numbers that stay; `None` if it has none.
pub(super) fn held(model: &ModelProto) -> Option<ModelProto> {
    let graph = model.graph.as_ref()?;
    let draws = |node: &NodeProto| {
        let mode = node.input.get(2).is_some_and(|name| !name.is_empty());
        is_standard(node) && (is_uniform(node) || (node.op_type == "Dropout" && mode))
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
                match is_uniform(&node) {
                    true => held.write_uniform(),
                    false => held.write_dropout(),
                }
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

fn is_uniform(node: &NodeProto) -> bool {
    node.op_type == "RandomUniformLike"
}

/// What stands for one node that draws.
struct Held<'n> {
    drawing: &'n NodeProto,
    /// How many came before it, so that each has other numbers.
    at: usize,
    nodes: Vec<NodeProto>,
    numbers: Vec<crate::proto::TensorProto>,
    n_names: usize,
}

impl<'n> Held<'n> {
    fn new(drawing: &'n NodeProto, at: usize) -> Held<'n> {
        Held {
            drawing,
            at,
            nodes: Vec::new(),
            numbers: Vec::new(),
            n_names: 0,
        }
    }

    /// A value of this node, by number; no name of a file has such a form.
    fn fresh(&mut self) -> String {
        self.n_names += 1;
        format!("{}\u{1}held.{}", self.drawing.output[0], self.n_names)
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
            name: self.drawing.name.clone(),
            op_type: op.to_string(),
            input: inputs.iter().map(ToString::to_string).collect(),
            output: vec![output.to_string()],
            attribute: list,
            ..NodeProto::default()
        });
    }

    /// `y = mask ? x · scale : 0`; nothing is dropped where the mode is not that of training.
    fn write_dropout(&mut self) {
        let dropout = self.drawing;
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

    /// `y = low + (high - low) · u`, in the type that the node asks for.
    fn write_uniform(&mut self) {
        let drawing = self.drawing;
        let (x, y) = (&drawing.input[0], &drawing.output[0]);
        let given = |name: &str| drawing.attribute.iter().find(|a| a.name == name);
        let bound = |name: &str, usual: f32| given(name).and_then(|a| a.f).unwrap_or(usual);
        let (low, high) = (bound("low", 0.0), bound("high", 1.0));
        let (_, fraction) = self.fractions(x);
        let range = self.number((high - low).into());
        let low = self.number(low.into());
        let part = self.node("Mul", &[&fraction, &range]);
        let value = self.node("Add", &[&part, &low]);
        let shape = self.node("Shape", &[x]);
        let value = self.node("Reshape", &[&value, &shape]);
        match given("dtype").and_then(|a| a.i) {
            Some(to) => {
                let to = crate::rewrite::patch::int("to", to);
                self.node_as("Cast", &[&value], y, vec![to]);
            }
            None => self.node_as("CastLike", &[&value, x], y, Vec::new()),
        }
    }

    /// Whether each element of x is kept. The first is kept in any case, since gradients of what is dropped altogether
    /// say nothing.
    fn chosen(&mut self, x: &str, ratio: &str) -> String {
        let (positions, fraction) = self.fractions(x);
        let kept = self.node("GreaterOrEqual", &[&fraction, ratio]);
        let zero = self.whole(0);
        let first = self.node("Equal", &[&positions, &zero]);
        let kept = self.node("Or", &[&kept, &first]);
        let shape = self.node("Shape", &[x]);
        self.node("Reshape", &[&kept, &shape])
    }

    /// The positions of x's elements in a row, and the fractions of `43758.5453 · sin(12.9898 · position)`.
    fn fractions(&mut self, x: &str) -> (String, String) {
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
        (positions, fraction)
    }
}
