//! What changes in a node where the standard changed its operator, one version at a time.

mod experimental;
mod oldest;

use super::Raising;
use crate::attributes::Attributes;
use crate::element::Element;
use crate::proto::{
    AttributeProto, GraphProto, NodeProto, TypeProto, ValueInfoProto, attribute_type,
};
use crate::rewrite::patch::{float, heir, int, ints, node, text};
use crate::stored::Stored;
use crate::tensor::{Tensor, Values};

/// A change: `true` if the last node is as version `since` wants it, `false` if nothing is known of the change.
type Change = Result<bool, String>;

/// Brings the last of `nodes` to version `since` of its operator.
pub(super) fn raise(cx: &mut Raising, nodes: &mut Vec<NodeProto>, since: i64) -> Change {
    let Some(last) = nodes.pop() else {
        return Ok(true);
    };
    let mut made = Made {
        cx,
        before: Vec::new(),
        node: last,
    };
    let op = made.node.op_type.clone();
    let changed = match (op.as_str(), since) {
        _ if since <= 7 => oldest::raise(&mut made, since),
        ("Scan", 9) => made.scan_of_batches(),
        ("BatchNormalization", 9) => made.without_spatial(),
        ("BatchNormalization", 14) => made.statistics(),
        ("Upsample", 9) => made.upsample_scales(),
        ("Upsample", 10) => made.renamed("Resize"),
        ("Scatter", 11) => made.renamed("ScatterElements"),
        ("Slice", 10) => made.inputs_of_ints(&["starts", "ends", "axes"]),
        ("TopK", 10) => made.inputs_of_ints(&["k"]),
        ("Clip", 11) => made.clip(),
        ("Pad", 11) => made.pad(),
        ("Resize", 11) => made.resize(),
        ("Dropout", 12) => made.inputs_of_floats(&["ratio"]),
        ("Squeeze" | "Unsqueeze" | "ReduceSum", 13) => made.inputs_of_ints(&["axes"]),
        ("Split", 13) => made.inputs_of_ints(&["split"]),
        ("Split", 18) => made.equal_pieces(),
        ("Softmax" | "LogSoftmax" | "Hardmax", 13) => made.softmax(),
        ("RoiAlign", 16) => {
            made.default_text("coordinate_transformation_mode", "output_half_pixel")
        }
        ("GridSample", 20) => made.sampling(),
        (
            "ReduceL1" | "ReduceL2" | "ReduceLogSum" | "ReduceLogSumExp" | "ReduceMax"
            | "ReduceMean" | "ReduceMin" | "ReduceProd" | "ReduceSumSquare",
            18,
        ) => made.inputs_of_ints(&["axes"]),
        ("GroupNormalization", 21) => {
            Err("has scales of channels, and the node has those of groups".to_string())
        }
        _ => Ok(false),
    };
    let Made { before, node, .. } = made;
    nodes.extend(before);
    nodes.push(node);
    changed
}

/// Replaces the last of `nodes` if it is an experiment that version `to` no longer has; returns whether it was one.
pub(super) fn leave_experiments(cx: &mut Raising, nodes: &mut Vec<NodeProto>) -> Change {
    let is_one = |node: &NodeProto| experimental::NAMES.contains(&node.op_type.as_str());
    let passes = cx.from < experimental::UNTIL && cx.to >= experimental::UNTIL;
    let Some(last) = nodes.pop_if(|node| passes && is_one(node)) else {
        return Ok(false);
    };
    let mut made = Made {
        cx,
        before: Vec::new(),
        node: last,
    };
    let changed = experimental::raise(&mut made);
    let Made { before, node, .. } = made;
    nodes.extend(before);
    nodes.push(node);
    changed
}

/// A node that changes, and what comes before it.
struct Made<'r, 'a> {
    cx: &'r mut Raising<'a>,
    before: Vec<NodeProto>,
    node: NodeProto,
}

impl Made<'_, '_> {
    fn take(&mut self, name: &str) -> Option<AttributeProto> {
        let at = self.node.attribute.iter().position(|a| a.name == name)?;
        Some(self.node.attribute.remove(at))
    }

    /// The element type of the first input; f32 if it is not known.
    fn element(&self) -> Element {
        let first = self.node.input.first();
        let known = first.and_then(|name| self.cx.facts.get(name)?.element);
        known.unwrap_or(Element::F32)
    }

    /// A constant before the node; gives its name.
    fn constant(&mut self, base: &str, tensor: Tensor) -> String {
        let named = format!("{}_{base}", self.base());
        let name = self.cx.fresh(&named);
        let value = AttributeProto {
            name: "value".to_string(),
            r#type: attribute_type::TENSOR,
            t: Some(Stored::of_tensor(&name, tensor).proto().clone()),
            ..Default::default()
        };
        let mut constant = node("Constant", &[], vec![value]);
        constant.output = vec![name.clone()];
        self.before.push(constant);
        name
    }

    fn base(&self) -> String {
        let first = self.node.output.first();
        first.map_or(String::new(), String::clone)
    }

    fn of_ints(&mut self, base: &str, values: &[i64]) -> String {
        let tensor = Tensor::new(&[values.len()], Values::I64(values.to_vec()));
        self.constant(base, tensor)
    }

    /// Turns integer attributes into inputs, after those there are; a missing attribute becomes an absent input.
    fn inputs_of_ints(&mut self, names: &[&str]) -> Change {
        let taken: Vec<_> = names.iter().map(|name| self.take(name)).collect();
        let mut inputs = Vec::new();
        for (name, attribute) in names.iter().zip(taken) {
            inputs.push(match attribute {
                Some(a) if a.r#type == attribute_type::INT => {
                    self.of_ints(name, &[a.i.unwrap_or(0)])
                }
                Some(a) => self.of_ints(name, &a.ints),
                None => String::new(),
            });
        }
        self.append(inputs);
        Ok(true)
    }

    /// The same for attributes of one float each, which get the element type of the first input.
    fn inputs_of_floats(&mut self, names: &[&str]) -> Change {
        let element = match self.node.op_type.as_str() {
            "Dropout" => Element::F32,
            _ => self.element(),
        };
        let mut inputs = Vec::new();
        for name in names {
            let value = self.take(name).and_then(|a| a.f);
            inputs.push(match value {
                Some(value) => {
                    let tensor = Tensor::floats(element, &[], &[f64::from(value)]);
                    let tensor = tensor.ok_or("has bounds of the values' own type")?;
                    self.constant(name, tensor)
                }
                None => String::new(),
            });
        }
        self.append(inputs);
        Ok(true)
    }

    fn append(&mut self, mut inputs: Vec<String>) {
        while inputs.last().is_some_and(String::is_empty) {
            inputs.pop();
        }
        self.node.input.append(&mut inputs);
    }

    fn renamed(&mut self, op: &str) -> Change {
        self.node.op_type = op.to_string();
        Ok(true)
    }

    fn default_text(&mut self, name: &str, value: &str) -> Change {
        if Attributes::new(&self.node).text(name).is_none() {
            self.node.attribute.push(text(name, value));
        }
        Ok(true)
    }

    fn without_spatial(&mut self) -> Change {
        match self.take("spatial").and_then(|a| a.i) {
            Some(0) => Err("has one mean for each channel".to_string()),
            _ => Ok(true),
        }
    }

    /// Nothing changed for nodes in evaluation form.
    fn statistics(&mut self) -> Change {
        match self.node.output.iter().skip(1).any(|o| !o.is_empty()) {
            true => Err("says in another way that statistics are taken of the batch".to_string()),
            false => {
                self.node.output.truncate(1);
                Ok(true)
            }
        }
    }

    fn upsample_scales(&mut self) -> Change {
        let scales = self.take("scales").map(|a| a.floats).unwrap_or_default();
        let tensor = Tensor::new(&[scales.len()], Values::F32(scales));
        let name = self.constant("scales", tensor);
        self.append(vec![name]);
        Ok(true)
    }

    /// Before, a bound that was left out was the largest or least number of `f32`, and infinities were cut to it.
    fn clip(&mut self) -> Change {
        for (name, bound) in [("min", f32::MIN), ("max", f32::MAX)] {
            if Attributes::new(&self.node).float(name).is_none() {
                self.node.attribute.push(float(name, bound));
            }
        }
        self.inputs_of_floats(&["min", "max"])
    }

    fn pad(&mut self) -> Change {
        let pads = self.take("pads").map(|a| a.ints).unwrap_or_default();
        let pads = self.of_ints("pads", &pads);
        let value = self.take("value").and_then(|a| a.f).unwrap_or(0.0);
        let tensor = Tensor::floats(self.element(), &[], &[f64::from(value)]);
        let value = self.constant("value", tensor.ok_or("pads with the values' own type")?);
        self.append(vec![pads, value]);
        Ok(true)
    }

    /// Before version 11, positions were multiplied and rounded down.
    fn resize(&mut self) -> Change {
        self.node.input.insert(1, String::new());
        let mode = "coordinate_transformation_mode";
        self.node.attribute.push(text(mode, "asymmetric"));
        if Attributes::new(&self.node)
            .text("mode")
            .unwrap_or("nearest")
            == "nearest"
        {
            self.node.attribute.push(text("nearest_mode", "floor"));
        }
        Ok(true)
    }

    fn equal_pieces(&mut self) -> Change {
        let n = self.node.output.len() as i64;
        if self.node.input.get(1).is_none_or(String::is_empty) {
            self.node.input.truncate(1);
            self.node.attribute.push(int("num_outputs", n));
        }
        Ok(true)
    }

    /// Before: over all dimensions from `axis` on together; after: over one dimension.
    fn softmax(&mut self) -> Change {
        let axis = self.take("axis").and_then(|a| a.i).unwrap_or(1);
        let x = self.node.input[0].clone();
        let rank = self.cx.facts.get(&x).and_then(|f| f.rank());
        let last = |axis: i64| rank.is_some_and(|n| axis == n as i64 - 1 || axis == -1);
        if last(axis) {
            self.node.attribute.push(int("axis", -1));
            return Ok(true);
        }
        let base = self.base();
        let add = |made: &mut Self, op: &str, inputs: &[&str], attributes| {
            let name = made.cx.fresh(&format!("{base}_{op}"));
            let mut new = node(op, inputs, attributes);
            new.output = vec![name.clone()];
            made.before.push(new);
            name
        };
        let flat = add(self, "Flatten", &[&x], vec![int("axis", axis)]);
        let op = self.node.op_type.clone();
        let normal = add(self, &op, &[&flat], vec![int("axis", -1)]);
        let shape = add(self, "Shape", &[&x], Vec::new());
        let back = node("Reshape", &[&normal, &shape], Vec::new());
        self.node = heir(&self.node, back);
        Ok(true)
    }

    /// Before version 9, Scan's first dimension was the batch: it becomes a scan over the batch, with one over time in
    /// its body.
    fn scan_of_batches(&mut self) -> Change {
        let old = self.node.clone();
        if old.input.first().is_some_and(|lengths| !lengths.is_empty()) {
            return Err("has sequences of one length, and the node has several".to_string());
        }
        let n_sequences = Attributes::new(&old).int("num_scan_inputs").unwrap_or(0);
        let directions = self.take("directions").map(|a| a.ints);
        let body = self.take("body").and_then(|a| a.g);
        let body = body.ok_or("has a body, and the node has none")?;
        let read: Vec<String> = old.input.iter().skip(1).cloned().collect();
        let fits = body.input.len() == read.len()
            && body.output.len() == old.output.len()
            && (0..=read.len() as i64).contains(&n_sequences);
        if !fits {
            return Err("has a body that fits its inputs and outputs".to_string());
        }
        let base = self.base();
        let mut ports = |of: &[ValueInfoProto]| -> Vec<ValueInfoProto> {
            let one = |port: &ValueInfoProto| ValueInfoProto {
                name: self.cx.fresh(&format!("{base}_of_one_{}", port.name)),
                r#type: port.r#type.clone().map(without_sizes),
                ..Default::default()
            };
            of.iter().map(one).collect()
        };
        let (inputs, outputs) = (ports(&body.input), ports(&body.output));
        let names = |ports: &[ValueInfoProto]| -> Vec<String> {
            ports.iter().map(|port| port.name.clone()).collect()
        };
        let mut over_time = vec![graph("body", body), int("num_scan_inputs", n_sequences)];
        over_time.extend(directions.map(|directions| ints("scan_input_directions", &directions)));
        let mut inner = node("Scan", &[], over_time);
        (inner.input, inner.output) = (names(&inputs), names(&outputs));
        let of_one = GraphProto {
            name: format!("{base}_of_one"),
            node: vec![inner],
            input: inputs,
            output: outputs,
            ..Default::default()
        };
        let n = read.len() as i64;
        let over_batch = vec![graph("body", of_one), int("num_scan_inputs", n)];
        let mut outer = node("Scan", &[], over_batch);
        outer.input = read;
        self.node = heir(&old, outer);
        Ok(true)
    }

    fn sampling(&mut self) -> Change {
        for attribute in self.node.attribute.iter_mut().filter(|a| a.name == "mode") {
            let named = match attribute.s.as_deref() {
                Some(b"bilinear") => "linear",
                Some(b"bicubic") => "cubic",
                _ => continue,
            };
            *attribute = text("mode", named);
        }
        Ok(true)
    }
}

/// An attribute that is a graph.
fn graph(name: &str, body: GraphProto) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        r#type: attribute_type::GRAPH,
        g: Some(body),
        ..Default::default()
    }
}

/// The type without its sizes.
fn without_sizes(mut of: TypeProto) -> TypeProto {
    if let Some(tensor) = &mut of.tensor_type {
        tensor.shape = None;
    }
    of
}
