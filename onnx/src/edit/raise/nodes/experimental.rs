//! Operators that the standard had as experiments before version 10, and the operators that replace them.

use super::{Change, Made};
use crate::attributes::Attributes;
use crate::operators::Border;
use crate::proto::NodeProto;
use crate::rewrite::patch::{heir, node};
use crate::tensor::Tensor;

/// The names of the experiments, in the order of the rows of `operators/experimental.rs`.
pub const NAMES: [&str; 7] = [
    "Affine",
    "Scale",
    "ScaledTanh",
    "ParametricSoftplus",
    "ImageScaler",
    "Crop",
    "DynamicSlice",
];

/// The first version without them.
pub const UNTIL: i64 = 10;

/// Replaces a node of an experiment by nodes of any version from [`UNTIL`] on.
pub(super) fn raise(made: &mut Made) -> Change {
    match made.node.op_type.as_str() {
        "Affine" => {
            let scaled = made.times("alpha", Some(1.0))?;
            made.plus_parameter(scaled, "beta", 0.0)
        }
        "Scale" => {
            let scaled = made.times("scale", Some(1.0))?;
            made.become_last(scaled)
        }
        "ScaledTanh" => made.between("Tanh"),
        "ParametricSoftplus" => made.between("Softplus"),
        "ImageScaler" => made.scaled_image(),
        "Crop" => made.crop(),
        "DynamicSlice" => made.renamed("Slice"),
        _ => Ok(false),
    }
}

impl Made<'_, '_> {
    /// The input times an attribute, as a node without a name.
    fn times(&mut self, attribute: &str, default: Option<f32>) -> Result<NodeProto, String> {
        let given = self.take(attribute).and_then(|a| a.f).or(default);
        let factor = given.ok_or_else(|| format!("needs `{attribute}`, and the node has none"))?;
        let x = self.node.input.first().cloned().unwrap_or_default();
        let factor = self.number(attribute, factor)?;
        Ok(node("Mul", &[&x, &factor], Vec::new()))
    }

    /// A constant of the type of the input.
    fn number(&mut self, base: &str, value: f32) -> Result<String, String> {
        let tensor = Tensor::floats(self.element(), &[], &[f64::from(value)]);
        Ok(self.constant(base, tensor.ok_or("computes with floats")?))
    }

    /// Puts a node before the last one; gives the name of what it computes.
    fn put(&mut self, base: &str, mut new: NodeProto) -> String {
        let name = self.cx.fresh(&format!("{}_{base}", self.base()));
        new.output = vec![name.clone()];
        self.before.push(new);
        name
    }

    fn become_last(&mut self, new: NodeProto) -> Change {
        self.node = heir(&self.node, new);
        Ok(true)
    }

    fn plus_parameter(&mut self, scaled: NodeProto, attribute: &str, default: f32) -> Change {
        let shift = self.take(attribute).and_then(|a| a.f).unwrap_or(default);
        let scaled = self.put("scaled", scaled);
        let shift = self.number(attribute, shift)?;
        self.become_last(node("Add", &[&scaled, &shift], Vec::new()))
    }

    /// Both parameters, one before a function and one after it.
    fn between(&mut self, function: &str) -> Change {
        let scaled = self.times("beta", None)?;
        let scaled = self.put("scaled", scaled);
        let inner = self.put("inner", node(function, &[&scaled], Vec::new()));
        self.node.input = vec![inner];
        let last = self.times("alpha", None)?;
        self.become_last(last)
    }

    fn scaled_image(&mut self) -> Change {
        let bias = self.take("bias").map(|a| a.floats).unwrap_or_default();
        let bias: Vec<f64> = bias.into_iter().map(f64::from).collect();
        let bias = Tensor::floats(self.element(), &[bias.len(), 1, 1], &bias);
        let scaled = self.times("scale", Some(1.0))?;
        let scaled = self.put("scaled", scaled);
        let bias = self.constant("bias", bias.ok_or("computes with floats")?);
        self.become_last(node("Add", &[&scaled, &bias], Vec::new()))
    }

    fn crop(&mut self) -> Change {
        let border = Border::new(Attributes::new(&self.node))?;
        let end = |d: usize| match (border.sizes, border.after[d]) {
            (Some(sizes), _) => border.before[d] + sizes[d],
            (None, 0) => i64::MAX,
            (None, after) => -after,
        };
        let x = self.node.input.first().cloned().unwrap_or_default();
        let starts = self.of_ints("starts", &border.before);
        let ends = self.of_ints("ends", &[end(0), end(1)]);
        let axes = self.of_ints("axes", &[2, 3]);
        self.become_last(node("Slice", &[&x, &starts, &ends, &axes], Vec::new()))
    }
}
