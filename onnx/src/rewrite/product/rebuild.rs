//! A product with a scale and a shift folded in.
//!
//! Computes in `f64` and rounds once to the type of the weights.

use super::{LinearKind, LinearOperation, at};
use crate::attributes::Attributes;
use crate::element::Element;
use crate::proto::{AttributeProto, NodeProto, attribute_type};
use crate::rewrite::patch::{Patch, heir, node};
use crate::rewrite::scope::Scope;
use crate::tensor::Tensor;

/// `scale · y + shift`, by channel; one element stands for all channels.
#[derive(Clone, Debug, PartialEq)]
pub struct Affine {
    /// Factors.
    pub scale: Vec<f64>,
    /// Terms.
    pub shift: Vec<f64>,
}

impl Affine {
    /// `scale · y`.
    pub fn scaled(scale: Vec<f64>) -> Affine {
        let shift = vec![0.0];
        Affine { scale, shift }
    }

    /// `y + shift`.
    pub fn shifted(shift: Vec<f64>) -> Affine {
        let scale = vec![1.0];
        Affine { scale, shift }
    }

    fn only_shifts(&self) -> bool {
        self.scale.iter().all(|s| *s == 1.0)
    }

    fn only_scales(&self) -> bool {
        self.shift.iter().all(|s| *s == 0.0)
    }

    fn is_finite(&self) -> bool {
        self.scale.iter().chain(&self.shift).all(|s| s.is_finite())
    }
}

/// New weights and a new bias, where they change.
struct Changed {
    weight: Option<Vec<f64>>,
    bias: Option<Vec<f64>>,
}

/// What the changed product reads and computes.
struct Operands {
    x: String,
    weight: String,
    bias: Option<String>,
    outputs: Vec<String>,
}

impl LinearOperation<'_> {
    /// `by(product)` as one product. The nodes that compute the product are removed, and `also` with them; the last
    /// new node has the outputs of node `outputs`. `None` if a number would overflow or vanish, if the file would grow
    /// by more than the limit, or if no node is saved.
    pub fn then(
        &self,
        scope: &Scope,
        by: &Affine,
        also: &[usize],
        outputs: usize,
    ) -> Option<Patch> {
        let (alpha, beta) = self.factors(scope);
        let weight = if by.only_shifts() {
            None
        } else {
            let mut values = self.weight.values(scope)?;
            let run = self.channel_run();
            for (n, values) in values.chunks_mut(run).enumerate() {
                let factor = alpha * at(&by.scale, self.out_channel(n * run));
                values.iter_mut().for_each(|value| *value *= factor);
            }
            Some(values)
        };
        let bias = self.bias_values(scope, beta)?;
        let bias = (0..self.n_channels)
            .map(|m| at(&bias, m) * at(&by.scale, m) + at(&by.shift, m))
            .collect();
        let has_bias = !by.only_scales() || self.bias.is_some();
        let changed = Changed {
            weight,
            bias: has_bias.then_some(bias),
        };
        let x = scope.input(self.first(), 0)?;
        by.is_finite()
            .then(|| self.rebuilt(scope, changed, x, also, outputs))?
    }

    /// `product(by(x))` as a product of `x`; otherwise as [`LinearOperation::then`]. `None` also if a shift
    /// would be missing in the padding.
    pub fn after(&self, scope: &Scope, by: &Affine, x: &str, also: &[usize]) -> Option<Patch> {
        let a = Attributes::new(scope.node(self.first()));
        let pads_nothing = matches!(a.text("auto_pad"), None | Some("NOTSET" | "VALID"))
            && a.ints("pads").is_none_or(|p| p.iter().all(|p| *p == 0));
        let shiftable = match self.kind {
            LinearKind::Conv => pads_nothing,
            LinearKind::Gemm | LinearKind::MatMul => true,
            LinearKind::ConvTranspose | LinearKind::Norm => false,
        };
        let by_rows = a.flag("transA") && by.scale.len().max(by.shift.len()) > 1;
        if self.kind == LinearKind::Norm
            || by_rows
            || !(by.only_scales() || shiftable)
            || !by.is_finite()
        {
            return None;
        }
        let (alpha, beta) = self.factors(scope);
        let mut values = self.weight.values(scope)?;
        let mut shift = vec![0.0; self.n_channels];
        for (n, value) in values.iter_mut().enumerate() {
            let c = self.in_channel(n);
            *value *= alpha;
            shift[self.out_channel(n)] += *value * at(&by.shift, c);
            *value *= at(&by.scale, c);
        }
        let bias = self.bias_values(scope, beta)?;
        let bias = (0..self.n_channels).map(|m| at(&bias, m) + shift[m]);
        let has_bias = !by.only_scales() || self.bias.is_some();
        let changed = Changed {
            weight: Some(values),
            bias: has_bias.then(|| bias.collect()),
        };
        self.rebuilt(scope, changed, x, also, *self.nodes.last()?)
    }

    /// `alpha` and `beta` of a Gemm.
    fn factors(&self, scope: &Scope) -> (f64, f64) {
        let a = Attributes::new(scope.node(self.first()));
        let factor = |name| f64::from(a.float(name).unwrap_or(1.0));
        match self.kind {
            LinearKind::Gemm => (factor("alpha"), factor("beta")),
            _ => (1.0, 1.0),
        }
    }

    fn bias_values(&self, scope: &Scope, beta: f64) -> Option<Vec<f64>> {
        let Some(bias) = &self.bias else {
            return Some(vec![0.0]);
        };
        let values = bias.values(scope)?;
        Some(values.into_iter().map(|b| beta * b).collect())
    }

    fn rebuilt(
        &self,
        scope: &Scope,
        changed: Changed,
        x: &str,
        also: &[usize],
        outputs: usize,
    ) -> Option<Patch> {
        let mut patch = Patch {
            remove: self.nodes.iter().chain(also).copied().collect(),
            ..Patch::default()
        };
        let keeps_alpha = changed.weight.is_none();
        let weight = match &changed.weight {
            None => self.weight.name.to_string(),
            Some(values) => self.add_weights(scope, &mut patch, values)?,
        };
        // Only weights are counted: a bias is small beside them.
        let added: usize = patch.constants.iter().map(|(_, t)| t.n_bytes()).sum();
        if added > self.weight.freed(scope) + scope.around().fold_limit {
            return None;
        }
        let bias = match &changed.bias {
            None => None,
            Some(values) => {
                let base = match &self.bias {
                    Some(bias) => bias.name.to_string(),
                    None => format!("{}_bias", self.weight.name),
                };
                let tensor = rounded(self.element(), &[self.n_channels], values)?;
                Some(patch.constant(scope, &base, tensor))
            }
        };
        let operands = Operands {
            x: x.to_string(),
            weight,
            bias,
            outputs: vec![scope.node(outputs).output.first()?.clone()],
        };
        self.add_nodes(scope, &mut patch, operands, keeps_alpha)?;
        let made = patch.insert.iter();
        let made = made.filter(|n| !matches!(n.op_type.as_str(), "ConstantOfShape" | "Expand"));
        (made.count() < patch.remove.len()).then_some(patch)
    }

    /// Adds changed weights. If a node fills the old ones and the new ones are all equal, a node fills these too.
    fn add_weights(&self, scope: &Scope, patch: &mut Patch, values: &[f64]) -> Option<String> {
        let first = *values.first()?;
        let shape = self.weight.generated.as_ref().map(|g| g.shape);
        if let (Some(shape), true) = (shape, values.iter().all(|v| *v == first)) {
            let value = rounded(self.element(), &[1], &[first])?;
            let value = AttributeProto {
                name: "value".to_string(),
                r#type: attribute_type::TENSOR,
                t: Some(value.to_proto("")),
                ..Default::default()
            };
            let repeated = node("ConstantOfShape", &[shape], vec![value]);
            return Some(patch.node(scope, self.weight.name, repeated));
        }
        let run = self.channel_run();
        let by_channel = || values.chunks(run).all(|c| c.iter().all(|v| *v == c[0]));
        if let (Some(shape), LinearKind::Conv, true) = (shape, self.kind, scope.opset() >= 8)
            && by_channel()
        {
            let each: Vec<f64> = values.chunks(run).map(|c| c[0]).collect();
            let mut sizes = vec![1; self.weight.shape.len()];
            sizes[0] = self.n_channels;
            let each = rounded(self.element(), &sizes, &each)?;
            let each = patch.constant(scope, self.weight.name, each);
            let expanded = node("Expand", &[&each, shape], Vec::new());
            return Some(patch.node(scope, self.weight.name, expanded));
        }
        let tensor = rounded(self.element(), &self.weight.shape, values)?;
        Some(patch.constant(scope, self.weight.name, tensor))
    }

    fn add_nodes(
        &self,
        scope: &Scope,
        patch: &mut Patch,
        operands: Operands,
        keeps_alpha: bool,
    ) -> Option<()> {
        let old = scope.node(self.first());
        let mut made = NodeProto {
            input: vec![operands.x, operands.weight],
            output: operands.outputs,
            op_type: old.op_type.clone(),
            attribute: old.attribute.clone(),
            domain: old.domain.clone(),
            ..NodeProto::default()
        };
        made.input.extend(operands.bias.clone());
        match (self.kind, operands.bias) {
            (LinearKind::Norm, bias) => {
                if bias.is_none() && old.op_type != "LayerNormalization" {
                    return None;
                }
                made.input.extend(old.input.iter().skip(3).cloned());
            }
            (LinearKind::Gemm, bias) => {
                made.attribute
                    .retain(|a| a.name != "beta" && (keeps_alpha || a.name != "alpha"));
                if bias.is_none() && scope.opset() < 11 {
                    return None;
                }
            }
            (LinearKind::MatMul, Some(bias))
                if !is_matrix_product(scope, &made.input[0], self.element()) =>
            {
                made.input.truncate(2);
                let outputs = std::mem::take(&mut made.output);
                let base = format!("{}_product", outputs.first()?);
                let product = patch.node(scope, &base, heir(&NodeProto::default(), made));
                let mut add = node("Add", &[&product, &bias], Vec::new());
                add.output = outputs;
                patch
                    .insert
                    .push(heir(scope.node(*self.nodes.last()?), add));
                return Some(());
            }
            (LinearKind::MatMul, Some(_)) => made.op_type = "Gemm".to_string(),
            _ => {}
        }
        patch.insert.push(heir(old, made));
        Some(())
    }
}

/// Whether a product of `x` with a matrix may be a Gemm.
pub fn is_matrix_product(scope: &Scope, x: &str, element: Element) -> bool {
    let float = matches!(element, Element::F32 | Element::F64 | Element::F16);
    float && scope.opset() >= 7 && scope.fact(x).and_then(|f| f.rank()) == Some(2)
}

/// A tensor of those values; `None` if one overflows or vanishes: such weights would no longer let
/// infinities and small numbers through as before.
fn rounded(element: Element, shape: &[usize], values: &[f64]) -> Option<Tensor> {
    let tensor = Tensor::floats(element, shape, values)?;
    let kept = |(new, old): (&f64, &f64)| new.is_finite() && (*new != 0.0 || *old == 0.0);
    tensor
        .to_f64()?
        .iter()
        .zip(values)
        .all(kept)
        .then_some(tensor)
}
