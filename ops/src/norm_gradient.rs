//! Gradients of the normalizations in closed form; `norm` states the formula.
//!
//! dx needs one reduction over dy and x and one element-wise pass over both. The sums for the weights
//! are the same reduction for `batch_norm` and a second one for the others.

use crate::index_space::{IndexSpace, Reads, combine, write};
use crate::norm::{self, Norm};
use crate::norm_plan::{Case, Group, NormShapes, Walk, cases, tensor, values};
use crate::op::{Call, Op, OpError, Sample, TensorType};
use crate::reference::constant_shape;
use graph::{Builder, ContainerId, Expr, Reduction, Tensor};

/// The gradient of a [`Norm`] (dy, x, weight?, mean?, inv_std) → (dx, dweight, dbias); attributes as
/// the norm. Of `rms_norm`, mean is absent and there is no dbias.
#[derive(Debug)]
pub struct NormGradient {
    name: &'static str,
    norm: &'static Norm,
}

/// `batch_norm_gradient`
pub static BATCH_NORM_GRADIENT: NormGradient = gradient("batch_norm_gradient", &norm::BATCH_NORM);
/// `layer_norm_gradient`
pub static LAYER_NORM_GRADIENT: NormGradient = gradient("layer_norm_gradient", &norm::LAYER_NORM);
/// `group_norm_gradient`
pub static GROUP_NORM_GRADIENT: NormGradient = gradient("group_norm_gradient", &norm::GROUP_NORM);
/// `rms_norm_gradient`
pub static RMS_NORM_GRADIENT: NormGradient = gradient("rms_norm_gradient", &norm::RMS_NORM);

const fn gradient(name: &'static str, norm: &'static Norm) -> NormGradient {
    NormGradient { name, norm }
}

impl NormGradient {
    fn plan(&self, call: &Call) -> Result<NormShapes, OpError> {
        let plan = NormShapes::new(call, self.norm.group, call.input(1)?)?;
        plan.check(call, 2)?;
        if call.input(0)?.shape != plan.x.shape {
            return Err(call.shape_error("the gradient has another shape than the input"));
        }
        Ok(plan)
    }

    /// dy and x̂, read at a point of the walk.
    fn dy_and_normalized(
        &self,
        call: &Call,
        reads: &mut Reads,
        walk: &Walk,
    ) -> Result<(Expr, Expr), OpError> {
        let dy = reads.at(call.input_id(0)?, &walk.x);
        let pair = (call.input_id(1)?, call.optional_id(3));
        let centered = self.norm.centered(reads, walk, pair);
        let inv_std = reads.at(call.input_id(4)?, &walk.stat);
        Ok((dy, centered.mul(inv_std)))
    }

    /// Appends `sum[…] += dy` and `sum_xhat[…] += dy·x̂` in one map. With `weighted`, the terms are those of
    /// `dy·w` and the sums are for statistics; without, the sums are for weights.
    fn append_sums(
        &self,
        (call, plan, weighted): (&Call, &NormShapes, bool),
        builder: &mut Builder,
        (sum, sum_xhat): (Option<ContainerId>, Option<ContainerId>),
    ) -> Result<(), OpError> {
        let walk = match weighted {
            true => plan.stat_walk(),
            false => plan.element_walk(),
        };
        let at = if weighted { &walk.stat } else { &walk.affine };
        let mut reads = Reads::default();
        let (mut dy, xhat) = self.dy_and_normalized(call, &mut reads, &walk)?;
        if let Some(w) = call.optional_id(2).filter(|_| weighted) {
            dy = dy.mul(reads.at(w, &walk.affine));
        }
        let mut writes = Vec::new();
        if let Some(out) = sum {
            writes.push(combine(Reduction::Sum, out, at, dy.clone()));
        }
        if let Some(out) = sum_xhat {
            writes.push(combine(Reduction::Sum, out, at, dy.mul(xhat)));
        }
        if !writes.is_empty() {
            walk.space.append(builder, reads, writes);
        }
        Ok(())
    }

    /// Appends the element-wise map for dx. With `weighted` the sums hold `dy·w`.
    fn append_dx(
        &self,
        (call, plan, weighted): (&Call, &NormShapes, bool),
        builder: &mut Builder,
        (sum, sum_xhat): (Option<ContainerId>, ContainerId),
        dx: ContainerId,
    ) -> Result<(), OpError> {
        let walk = plan.element_walk();
        let mut reads = Reads::default();
        let (mut dy, xhat) = self.dy_and_normalized(call, &mut reads, &walk)?;
        let weight = call.optional_id(2).map(|w| reads.at(w, &walk.affine));
        let mut outer = reads.at(call.input_id(4)?, &walk.stat);
        match (weight, weighted) {
            (Some(w), true) => dy = dy.mul(w),
            (Some(w), false) => outer = outer.mul(w),
            (None, _) => {}
        }
        let mut shared = xhat.mul(reads.at(sum_xhat, &walk.stat));
        if let Some(sum) = sum {
            shared = reads.at(sum, &walk.stat).add(shared);
        }
        let value = dy.sub(shared.mul(plan.inverse_count())).mul(outer);
        walk.space
            .append(builder, reads, vec![write(dx, &walk.x, value)]);
        Ok(())
    }
}

impl Op for NormGradient {
    fn name(&self) -> &'static str {
        self.name
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let plan = self.plan(call)?;
        let weight = match call.inputs.get(2) {
            Some(Some(w)) => w.dtype,
            _ => plan.stat_type().dtype,
        };
        let affine = TensorType::new(weight, plan.affine_shape.clone());
        let mut types = vec![plan.x, affine.clone()];
        if self.norm.centered {
            types.push(affine);
        }
        Ok(types)
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let plan = self.plan(call)?;
        let types = self.infer(call)?;
        let (dy, x) = (
            values(inputs, 0).unwrap_or_default(),
            values(inputs, 1).unwrap_or_default(),
        );
        let w = values(inputs, 2);
        let inv_std = values(inputs, 4).unwrap_or_default();
        let mean = values(inputs, 3).unwrap_or_else(|| vec![0.0; inv_std.len()]);
        let positions = plan.positions(call)?;
        let affine_shape = constant_shape(call, &plan.affine_shape)?;
        let n_affine = affine_shape.iter().product();
        let (mut dw, mut db) = (vec![0.0; n_affine], vec![0.0; n_affine]);
        let mut sums = vec![(0.0, 0.0); inv_std.len()];
        let count = (x.len() / inv_std.len().max(1)) as f64;
        let xhat = |i: usize| (x[i] - mean[positions[i].0]) * inv_std[positions[i].0];
        let weighted = |i: usize| dy[i] * w.as_ref().map_or(1.0, |w| w[positions[i].1]);
        for (i, (stat, affine)) in positions.iter().enumerate() {
            sums[*stat].0 += weighted(i);
            sums[*stat].1 += weighted(i) * xhat(i);
            dw[*affine] += dy[i] * xhat(i);
            db[*affine] += dy[i];
        }
        let dx = positions.iter().enumerate().map(|(i, (stat, _))| {
            let mean_g = if self.norm.centered {
                sums[*stat].0
            } else {
                0.0
            };
            inv_std[*stat] * (weighted(i) - (mean_g + xhat(i) * sums[*stat].1) / count)
        });
        let shape = constant_shape(call, &plan.x.shape)?;
        let dx = Tensor::from_f64(types[0].dtype, &shape, dx.collect());
        let mut out = vec![dx, Tensor::from_f64(types[1].dtype, &affine_shape, dw)];
        if self.norm.centered {
            out.push(Tensor::from_f64(types[1].dtype, &affine_shape, db));
        }
        Ok(out)
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let plan = self.plan(call)?;
        let (dx, dw, db) = (call.output_id(0), call.output_id(1), call.output_id(2));
        // Where weights are shared as statistics are, the sums for both are the same.
        let same = plan.group == Group::Batch;
        if same {
            let stat = |builder: &mut Builder, name: &str| plan.transient_stat(builder, name);
            // Rounded to the 16 bits of a weight, a sum would make all of dx less exact.
            let needs = |out: Option<ContainerId>, builder: &mut Builder, name: &str| {
                let is_exact =
                    |id: &ContainerId| builder.dtype(*id).arithmetic() == builder.dtype(*id);
                let exact = out.filter(|id| dx.is_none() || is_exact(id));
                exact.or_else(|| dx.map(|_| stat(builder, name)))
            };
            let sum = needs(db, builder, "sum_dy");
            let sum_xhat = needs(dw, builder, "sum_dy_xhat");
            self.append_sums((call, &plan, false), builder, (sum, sum_xhat))?;
            if let (Some(dx), Some(sum_xhat)) = (dx, sum_xhat) {
                self.append_dx((call, &plan, false), builder, (sum, sum_xhat), dx)?;
            }
            for (sum, rounded) in [(sum, db), (sum_xhat, dw)] {
                if let (Some(sum), Some(rounded)) = (sum, rounded.filter(|_| sum != rounded)) {
                    let space = IndexSpace::over(&plan.affine_shape);
                    let (at, mut reads) = (space.indices(), Reads::default());
                    let value = reads.at(sum, &at);
                    space.append(builder, reads, vec![write(rounded, &at, value)]);
                }
            }
            return Ok(());
        }
        if let Some(dx) = dx {
            let sum = self
                .norm
                .centered
                .then(|| plan.transient_stat(builder, "sum_g"));
            let sum_xhat = plan.transient_stat(builder, "sum_g_xhat");
            self.append_sums((call, &plan, true), builder, (sum, Some(sum_xhat)))?;
            self.append_dx((call, &plan, true), builder, (sum, sum_xhat), dx)?;
        }
        self.append_sums((call, &plan, false), builder, (db, dw))
    }

    fn samples(&self) -> Vec<Sample> {
        let sample = |(name, x, w, attrs): Case| {
            let library = graph::Library {
                op: self.name.into(),
                attrs: attrs.clone(),
                inputs: vec![],
                outputs: vec![],
            };
            let call = Call {
                library: &library,
                inputs: vec![],
            };
            let plan = NormShapes::new(&call, self.norm.group, &tensor(&x)).ok()?;
            let stat = plan.stat_type();
            Some(Sample {
                name: name.into(),
                inputs: vec![
                    Some(tensor(&x)),
                    Some(tensor(&x)),
                    w.map(|w| tensor(&w)),
                    self.norm.centered.then(|| stat.clone()),
                    Some(stat),
                ],
                attrs,
                values: vec![],
                range: (-1.5, 1.5),
                differentiable: true,
            })
        };
        cases(self.norm.group)
            .into_iter()
            .filter_map(sample)
            .collect()
    }
}
