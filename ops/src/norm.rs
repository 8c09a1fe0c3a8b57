//! Normalization: batch, layer, group and root-mean-square norm, with their gradients.
//!
//! `y = (x − mean)·inv_std·w + b` with `inv_std = 1/√(var + eps)`, the mean and the (biased) variance
//! taken over the elements that share statistics. The norms differ only in which elements share
//! statistics and which share a weight ([`Group`]). `rms_norm` has no mean: `inv_std = 1/√(Σx²/n + eps)`.
//!
//! Gradient, with `x̂ = (x − mean)·inv_std`, `g = dy·w` and n elements sharing statistics:
//! `dx = inv_std·(g − (Σ g + x̂·Σ g·x̂)/n)`, `dw = Σ dy·x̂`, `db = Σ dy`.
//! It needs one reduction and one element-wise pass over dy and x, and for the norms whose weights
//! are not shared like their statistics one more reduction.
//!
//! Sources: ONNX `BatchNormalization`, `LayerNormalization`, `GroupNormalization`,
//! `RMSNormalization`; arXiv 1502.03167, 1607.06450, 1803.08494, 1910.07467.
//! The variance is summed in a second pass over x, so that it does not cancel.

use crate::index_space::{IndexSpace, Reads, write};
use crate::norm_plan::{Case, Group, NormShapes, Walk, cases, tensor, values};
use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType};
use crate::reference::constant_shape;
use graph::{Builder, ContainerId, DType, Expr, Tensor};

/// A normalization (x, weight?, bias?) → (y, mean, inv_std, …), attribute `eps`.
///
/// - `batch_norm`: outputs y, mean `[C]`, inv_std `[C]`, var `[C]` (biased).
/// - `layer_norm`: attribute `axes`, how many trailing dimensions make a row; y, mean, inv_std of
///   the leading shape.
/// - `group_norm`: attribute `groups`; y, mean `[N, groups]`, inv_std `[N, groups]`.
/// - `rms_norm`: attribute `axes`; y, inv_std of the leading shape; no bias.
#[derive(Debug)]
pub struct Norm {
    name: &'static str,
    pub(crate) group: Group,
    pub(crate) centered: bool,
}

/// `batch_norm_inference` (x, weight?, bias?, running mean, running variance), attribute `eps`.
#[derive(Debug)]
pub struct BatchNormInference;

const fn norm(name: &'static str, group: Group, centered: bool) -> Norm {
    Norm {
        name,
        group,
        centered,
    }
}

/// `batch_norm`, as in training.
pub static BATCH_NORM: Norm = norm("batch_norm", Group::Batch, true);
/// `layer_norm`
pub static LAYER_NORM: Norm = norm("layer_norm", Group::Layer, true);
/// `group_norm`
pub static GROUP_NORM: Norm = norm("group_norm", Group::Channels, true);
/// `rms_norm`
pub static RMS_NORM: Norm = norm("rms_norm", Group::Layer, false);
impl Norm {
    fn plan(&self, call: &Call) -> Result<NormShapes, OpError> {
        let plan = NormShapes::new(call, self.group, call.input(0)?)?;
        plan.check(call, 1)?;
        plan.check(call, 2)?;
        Ok(plan)
    }

    /// Position of `inv_std` among the outputs.
    fn inv_std(&self) -> usize {
        if self.centered { 2 } else { 1 }
    }

    /// `x − mean`, or x where there is no mean.
    pub(crate) fn centered(
        &self,
        reads: &mut Reads,
        walk: &Walk,
        (x, mean): (ContainerId, Option<ContainerId>),
    ) -> Expr {
        let value = reads.at(x, &walk.x);
        match mean {
            Some(mean) => value.sub(reads.at(mean, &walk.stat)),
            None => value,
        }
    }

    /// Appends maps that compute mean and inverse deviation.
    fn expand_statistics(
        &self,
        call: &Call,
        plan: &NormShapes,
        builder: &mut Builder,
    ) -> Result<(Option<ContainerId>, ContainerId), OpError> {
        let x = call.input_id(0)?;
        let output = |builder: &mut Builder, position: Option<usize>, name: &str| {
            position
                .and_then(|p| call.output_id(p))
                .unwrap_or_else(|| plan.transient_stat(builder, name))
        };
        let mean = self.centered.then(|| output(builder, Some(1), "mean"));
        if let Some(mean) = mean {
            plan.mean_of(builder, mean, |reads, walk| reads.at(x, &walk.x));
        }
        let has_var = self.group == Group::Batch;
        let var = output(builder, has_var.then_some(3), "var");
        plan.mean_of(builder, var, |reads, walk| {
            let d = self.centered(reads, walk, (x, mean));
            d.clone().mul(d)
        });
        let inv_std = output(builder, Some(self.inv_std()), "inv_std");
        let space = IndexSpace::over(&plan.stat_shape);
        let at = space.indices();
        let mut reads = Reads::default();
        let value = reads.at(var, &at).add(Expr::float(plan.eps)).rsqrt();
        space.append(builder, reads, vec![write(inv_std, &at, value)]);
        Ok((mean, inv_std))
    }
}

impl Op for Norm {
    fn name(&self) -> &'static str {
        self.name
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let plan = self.plan(call)?;
        let n_statistics = match (self.group, self.centered) {
            (Group::Batch, _) => 3,
            (_, true) => 2,
            (_, false) => 1,
        };
        let mut types = vec![plan.x.clone()];
        types.extend(vec![plan.stat_type(); n_statistics]);
        Ok(types)
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let plan = self.plan(call)?;
        let x = values(inputs, 0).unwrap_or_default();
        let (w, b) = (values(inputs, 1), values(inputs, 2));
        let [mean, inv_std, var] = plan.statistics(call, (&x, self.centered))?;
        let (m, s) = (mean.to_f64(), inv_std.to_f64());
        let positions = plan.positions(call)?;
        let y = x.iter().zip(&positions).map(|(x, (stat, affine))| {
            let w = w.as_ref().map_or(1.0, |w| w[*affine]);
            let b = b.as_ref().map_or(0.0, |b| b[*affine]);
            (x - m[*stat]) * s[*stat] * w + b
        });
        let shape = constant_shape(call, &plan.x.shape)?;
        let y = Tensor::from_f64(plan.x.dtype, &shape, y.collect());
        Ok(match (self.group, self.centered) {
            (Group::Batch, _) => vec![y, mean, inv_std, var],
            (_, true) => vec![y, mean, inv_std],
            (_, false) => vec![y, inv_std],
        })
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let plan = self.plan(call)?;
        let (mean, inv_std) = self.expand_statistics(call, &plan, builder)?;
        let Some(y) = call.output_id(0) else {
            return Ok(());
        };
        let walk = plan.element_walk();
        let mut reads = Reads::default();
        let mut value = self
            .centered(&mut reads, &walk, (call.input_id(0)?, mean))
            .mul(reads.at(inv_std, &walk.stat));
        if let Some(w) = call.optional_id(1) {
            value = value.mul(reads.at(w, &walk.affine));
        }
        if let Some(b) = call.optional_id(2) {
            value = value.add(reads.at(b, &walk.affine));
        }
        walk.space
            .append(builder, reads, vec![write(y, &walk.x, value)]);
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let call = &g.call;
        let Some((Some(dy), of_statistics)) = g.output_gradients.split_first() else {
            return Ok(Gradient::Derive);
        };
        let mean = self.centered.then(|| call.output_id(1)).flatten();
        let inv_std = call.output_id(self.inv_std());
        let lacks_statistics = inv_std.is_none() || mean.is_none() && self.centered;
        if lacks_statistics || of_statistics.iter().any(Option::is_some) {
            return Ok(Gradient::Derive);
        }
        let inputs = [
            Some(*dy),
            call.optional_id(0),
            call.optional_id(1),
            mean,
            inv_std,
        ];
        let wants = |n: usize| g.wanted.get(n) == Some(&true) && call.optional_id(n).is_some();
        let name = format!("{}_gradient", self.name);
        let outputs = builder.op_for(
            &name,
            &inputs,
            call.library.attrs.clone(),
            &[wants(0), wants(1), wants(2)],
        )?;
        Ok(Gradient::Rule(outputs))
    }

    fn samples(&self) -> Vec<Sample> {
        let cases = cases(self.group);
        let with_bias = self.centered;
        let sample = |(name, x, w, attrs): Case| {
            let affine = |there: bool| w.as_ref().filter(|_| there).map(|w| tensor(w));
            Sample {
                name: name.into(),
                inputs: vec![Some(tensor(&x)), affine(true), affine(with_bias)],
                attrs,
                values: vec![],
                range: (-2.0, 2.0),
                differentiable: true,
            }
        };
        cases.into_iter().map(sample).collect()
    }
}

impl BatchNormInference {
    fn plan(call: &Call) -> Result<NormShapes, OpError> {
        let plan = NormShapes::new(call, Group::Batch, call.input(0)?)?;
        call.input(3)?;
        call.input(4)?;
        for position in 1..5 {
            plan.check(call, position)?;
        }
        Ok(plan)
    }
}

impl Op for BatchNormInference {
    fn name(&self) -> &'static str {
        "batch_norm_inference"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![Self::plan(call)?.x])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let plan = Self::plan(call)?;
        let x = values(inputs, 0).unwrap_or_default();
        let (w, b) = (values(inputs, 1), values(inputs, 2));
        let mean = values(inputs, 3).unwrap_or_default();
        let var = values(inputs, 4).unwrap_or_default();
        let positions = plan.positions(call)?;
        let y = x.iter().zip(&positions).map(|(x, (c, _))| {
            let w = w.as_ref().map_or(1.0, |w| w[*c]);
            let b = b.as_ref().map_or(0.0, |b| b[*c]);
            (x - mean[*c]) / (var[*c] + plan.eps).sqrt() * w + b
        });
        let shape = constant_shape(call, &plan.x.shape)?;
        Ok(vec![Tensor::from_f64(plan.x.dtype, &shape, y.collect())])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let plan = Self::plan(call)?;
        let Some(y) = call.output_id(0) else {
            return Ok(());
        };
        let inv_std = plan.transient_stat(builder, "inv_std");
        let space = IndexSpace::over(&plan.stat_shape);
        let at = space.indices();
        let mut reads = Reads::default();
        let var = reads.at(call.input_id(4)?, &at);
        let value = var.add(Expr::float(plan.eps)).rsqrt();
        space.append(builder, reads, vec![write(inv_std, &at, value)]);

        let walk = plan.element_walk();
        let mut reads = Reads::default();
        let mut value = reads
            .at(call.input_id(0)?, &walk.x)
            .sub(reads.at(call.input_id(3)?, &walk.stat))
            .mul(reads.at(inv_std, &walk.stat));
        if let Some(w) = call.optional_id(1) {
            value = value.mul(reads.at(w, &walk.affine));
        }
        if let Some(b) = call.optional_id(2) {
            value = value.add(reads.at(b, &walk.affine));
        }
        walk.space
            .append(builder, reads, vec![write(y, &walk.x, value)]);
        Ok(())
    }

    fn samples(&self) -> Vec<Sample> {
        let variance = Tensor::from_f64(DType::F32, &[3], vec![0.5, 1.0, 2.0]);
        let sample = |(name, x, w, attrs): Case| {
            let affine = w.as_ref().map(|w| tensor(w));
            Sample {
                name: name.into(),
                inputs: vec![
                    Some(tensor(&x)),
                    affine.clone(),
                    affine,
                    Some(tensor(&[3])),
                    Some(tensor(&[3])),
                ],
                attrs,
                values: vec![(4, variance.clone())],
                range: (-2.0, 2.0),
                differentiable: true,
            }
        };
        cases(Group::Batch).into_iter().map(sample).collect()
    }
}
