//! Gradients of the losses over classes: one pass over the scores.

use super::log_probability::Normalizer;
use super::samples::{Case, cases};
use super::shapes::{Combine, LossShapes, weight_of, without};
use crate::index_space::{IndexSpace, Reads, combine, for_each_index, write};
use crate::op::{Call, Op, OpError, Sample, TensorType};
use crate::reference::{constant_shape, ravel, required};
use graph::{Builder, ContainerId, DType, Expr, Reduction, Tensor};

/// `cross_entropy_gradient` or `nll_loss_gradient` (dloss, x, target i64, weight?, total?, max?, log_sum?)
/// → dx; attributes as the loss. `total` is read for a mean only, `max` and `log_sum` for cross entropy
/// only. A row that does not count has a gradient of 0, or NaN where its scores have no probabilities, as
/// in PyTorch.
#[derive(Debug)]
pub struct ClassLossGradient {
    of_logits: bool,
}

/// `cross_entropy_gradient`
pub static CROSS_ENTROPY_GRADIENT: ClassLossGradient = ClassLossGradient { of_logits: true };
/// `nll_loss_gradient`
pub static NLL_LOSS_GRADIENT: ClassLossGradient = ClassLossGradient { of_logits: false };

impl ClassLossGradient {
    fn plan(&self, call: &Call) -> Result<LossShapes, OpError> {
        let plan = LossShapes::new(call, 1, self.of_logits)?;
        if call.input(0)?.shape != plan.loss_shape() {
            return Err(call.shape_error("the gradient has another shape than the loss"));
        }
        if plan.soft {
            return Err(call.unsupported("probabilities as targets"));
        }
        if plan.combine == Combine::Mean {
            call.input(4)?;
        }
        if self.of_logits {
            call.input(5)?;
            call.input(6)?;
        }
        Ok(plan)
    }

    /// Appends `s/C·Σ w = A − (1 − s)·w_t`. Without weights this is s, and need not be computed.
    fn append_even_sum(
        &self,
        plan: &LossShapes,
        builder: &mut Builder,
        weight: ContainerId,
    ) -> ContainerId {
        let out = builder.transient("even", plan.x.dtype, &[]);
        let space = IndexSpace::over(&plan.x.shape[plan.axis..=plan.axis]);
        let mut reads = Reads::default();
        let value = reads.at(weight, &space.indices()).mul(plan.even());
        space.append(
            builder,
            reads,
            vec![combine(Reduction::Sum, out, &[], value)],
        );
        out
    }
}

impl Op for ClassLossGradient {
    fn name(&self) -> &'static str {
        match self.of_logits {
            true => "cross_entropy_gradient",
            false => "nll_loss_gradient",
        }
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![self.plan(call)?.x])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let plan = self.plan(call)?;
        let dloss = required(call, inputs, 0)?.to_f64();
        let x = required(call, inputs, 1)?;
        let (scores, classes) = (x.to_f64(), required(call, inputs, 2)?.to_i64());
        let optional = |n: usize| inputs.get(n).copied().flatten().map(Tensor::to_f64);
        let (weights, total) = (optional(3), optional(4));
        let normalizer = optional(5).zip(optional(6));
        let w = |c: usize| weights.as_ref().map_or(1.0, |w| w[c]);
        let rows = constant_shape(call, &plan.rows)?;
        let n_classes = x.shape[plan.axis];
        let (s, n) = (plan.smoothing, n_classes as f64);
        let mut dx = vec![0.0; scores.len()];
        let mut at_row = 0;
        for_each_index(&rows, |row| {
            let (t, this) = (classes[at_row], at_row);
            at_row += 1;
            let g = match (plan.combine, &total) {
                _ if t == plan.ignored => 0.0,
                (Combine::No, _) => dloss[this],
                (Combine::Mean, Some(total)) => dloss[0] / total[0],
                _ => dloss[0],
            };
            // Weight of −log p_c in the row's loss.
            let share = |c: usize| {
                let hard = if t == c as i64 { 1.0 - s } else { 0.0 };
                w(c) * (hard + s / n)
            };
            let all: f64 = (0..n_classes).map(share).sum();
            for c in 0..n_classes {
                let mut index = row.to_vec();
                index.insert(plan.axis, c);
                let at = ravel(&index, &x.shape);
                let p = normalizer.as_ref().map_or(0.0, |(max, log_sum)| {
                    (scores[at] - max[this] - log_sum[this]).exp()
                });
                dx[at] = g * (all * p - share(c));
            }
        });
        Ok(vec![Tensor::from_f64(plan.x.dtype, &x.shape, dx)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let plan = self.plan(call)?;
        let Some(dx) = call.output_id(0) else {
            return Ok(());
        };
        let mut scale = call.input_id(0)?;
        if plan.combine == Combine::Mean {
            let mut reads = Reads::default();
            let value = reads.at(scale, &[]).div(reads.at(call.input_id(4)?, &[]));
            scale = builder.transient("scale", plan.x.dtype, &[]);
            IndexSpace::over(&[]).append(builder, reads, vec![write(scale, &[], value)]);
        }
        let weight = call.optional_id(3);
        let smoothed = plan.smoothing > 0.0;
        let even_sum = weight
            .filter(|_| smoothed)
            .map(|w| self.append_even_sum(&plan, builder, w));
        let space = IndexSpace::over(&plan.x.shape);
        let at = space.indices();
        let row = without(&at, plan.axis);
        let mut reads = Reads::default();
        let (class, counts) = plan.target(&mut reads, call.input_id(2)?, &row);
        let zero = || Expr::float(0.0);
        let of_class = weight_of(&mut reads, weight, &class)
            .map(|w| Expr::select(counts.clone(), w, zero()))
            .unwrap_or(Expr::float(1.0));
        let hard = of_class.mul(Expr::float(1.0 - plan.smoothing));
        let is_class = class.eq_(Expr::Index(at[plan.axis].clone()));
        let index = match plan.combine {
            Combine::No => row.as_slice(),
            _ => &[],
        };
        // A row that does not count is multiplied by 0, not set to 0: where it has no probabilities, NaN stays.
        let scale = Expr::select(counts, reads.at(scale, index), zero());
        let mut value = Expr::select(is_class, hard.clone().neg(), zero());
        if self.of_logits {
            let all = match even_sum {
                Some(even) => hard.add(reads.at(even, &[])),
                None => hard.add(Expr::float(plan.smoothing)),
            };
            let x = reads.at(call.input_id(1)?, &at);
            let normalizer = Normalizer {
                max: call.input_id(5)?,
                log_sum: call.input_id(6)?,
            };
            let p = normalizer.log_probability(&mut reads, x, &row).exp();
            value = all.mul(p).add(value);
        }
        if smoothed {
            let even = match weight {
                Some(w) => reads.at(w, &at[plan.axis..=plan.axis]).mul(plan.even()),
                None => plan.even(),
            };
            value = value.sub(even);
        }
        let value = value.mul(scale);
        space.append(builder, reads, vec![write(dx, &at, value)]);
        Ok(())
    }

    fn samples(&self) -> Vec<Sample> {
        let case = |case: Case| {
            let (x, rows) = (case.x.to_vec(), case.rows());
            let loss = match case.reduction {
                "none" => rows.clone(),
                _ => vec![],
            };
            let mut sample = Sample::new(case.name, &[&loss, &x], case.attrs());
            sample = sample.value(2, case.targets());
            sample = case.with_weight(sample, 3);
            sample.inputs.resize(7, None);
            sample = sample.value(4, Tensor::from_f64(DType::F32, &[], vec![2.5]));
            if self.of_logits {
                sample.inputs[5] = Some(TensorType::fixed(DType::F32, &rows));
                sample.inputs[6] = sample.inputs[5].clone();
            }
            sample
        };
        cases(self.of_logits).into_iter().map(case).collect()
    }
}
