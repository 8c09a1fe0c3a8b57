//! Losses over classes: cross entropy of logits, and negative log likelihood of log probabilities.
//!
//! With target t of a row of scores x, class weights w (1 if absent), smoothing s and C classes,
//! cross entropy is `−(1 − s)·w_t·l_t − s/C·Σ_c w_c·l_c` with `l_c = x_c − max − log_sum`,
//! `log_sum = ln Σ_c e^(x_c − max)`; negative log likelihood is `−w_t·x_t`. Rows whose target is
//! `ignore_index` count nothing. The mean divides by the sum of `w_t` over the rows that count. Sources:
//! ONNX `SoftmaxCrossEntropyLoss`, `NegativeLogLikelihoodLoss`; label smoothing as in PyTorch
//! (arXiv 1512.00567).
//!
//! Neither the probabilities nor their logarithms are stored: the gradient
//! `dx_c = g·(A·e^(l_c) − (1 − s)·w_t·[c = t] − s/C·w_c)`, `A = (1 − s)·w_t + s/C·Σ w`, is one pass over x
//! from the stored `max` and `log_sum` of each row. These two are never added: beside a large maximum the
//! sum would lose the logarithm.

pub mod gradient;
mod log_probability;
mod samples;
mod shapes;

use crate::index_space::{IndexSpace, Reads, combine, for_each_index, write};
use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{constant_shape, ravel, required};
use crate::shape_rules::reciprocal;
use graph::{Attr, Builder, ContainerId, Expr, Library, Memlet, Reduction, SymExpr, Tensor};
use log_probability::Normalizer;
use samples::cases;
use shapes::{Combine, LossShapes, weight_of};

/// `cross_entropy` or `nll_loss` (x `[N, C, …]` or `[C]`, target i64 `[N, …]` or, for cross entropy,
/// probabilities of the shape of x, weight? `[C]`) → loss, total, and for cross entropy max and log_sum
/// `[N, …]`.
///
/// Attributes `reduction` (`none`, `mean`, `sum`; absent: `mean`), `ignore_index` (−100),
/// `label_smoothing` (0). `total` is what the mean divides by.
#[derive(Debug)]
pub struct ClassLoss {
    of_logits: bool,
}

/// `cross_entropy`
pub static CROSS_ENTROPY: ClassLoss = ClassLoss { of_logits: true };
/// `nll_loss`
pub static NLL_LOSS: ClassLoss = ClassLoss { of_logits: false };

impl ClassLoss {
    fn plan(&self, call: &Call) -> Result<LossShapes, OpError> {
        LossShapes::new(call, 0, self.of_logits)
    }

    /// Appends the map over rows with class targets that writes or sums loss and total.
    fn append_rows(
        &self,
        (call, plan): (&Call, &LossShapes),
        builder: &mut Builder,
        (normalizer, smooth): (Option<Normalizer>, Option<ContainerId>),
        (loss, total): (Option<ContainerId>, Option<ContainerId>),
    ) -> Result<(), OpError> {
        let space = IndexSpace::over(&plan.rows);
        let row = space.indices();
        let mut reads = Reads::default();
        let (class, counts) = plan.target(&mut reads, call.input_id(1)?, &row);
        let weight = weight_of(&mut reads, call.optional_id(2), &class);
        let zero = || Expr::float(0.0);
        let mut writes = Vec::new();
        if let Some(loss) = loss {
            let mut memlet = Memlet::new(call.input_id(0)?, []).or_fill(0.0);
            memlet.subset = plan.at_class(&row, 0);
            let score = reads.memlet(memlet);
            let log = match normalizer {
                Some(normalizer) => normalizer.log_probability(&mut reads, score, &row),
                None => score,
            };
            let mut value = log.neg();
            if let Some(w) = weight.clone() {
                value = value.mul(w);
            }
            if let Some(smooth) = smooth {
                let hard = value.mul(Expr::float(1.0 - plan.smoothing));
                value = hard.add(reads.at(smooth, &row));
            }
            let value = Expr::select(counts.clone(), value, zero());
            writes.push(match plan.combine {
                Combine::No => write(loss, &row, value),
                _ => combine(Reduction::Sum, loss, &[], value),
            });
        }
        if let Some(total) = total {
            let one = weight.unwrap_or(Expr::float(1.0));
            let value = Expr::select(counts, one, zero());
            writes.push(combine(Reduction::Sum, total, &[], value));
        }
        if !writes.is_empty() {
            space.append(builder, reads, writes);
        }
        Ok(())
    }

    fn expand_soft(
        &self,
        (call, plan): (&Call, &LossShapes),
        builder: &mut Builder,
        normalizer: Normalizer,
    ) -> Result<(), OpError> {
        let n_rows = SymExpr::product(&plan.rows);
        if let Some(total) = call.output_id(1) {
            let count = Expr::Index(n_rows.clone()).cast(plan.x.dtype);
            let space = IndexSpace::over(&[]);
            space.append(builder, Reads::default(), vec![write(total, &[], count)]);
        }
        if let Some(loss) = call.output_id(0) {
            let factor = match plan.combine {
                Combine::Mean => reciprocal(&n_rows),
                _ => Expr::float(1.0),
            };
            let arrays = (call.input_id(0)?, normalizer, call.optional_id(2));
            let target = Some(call.input_id(1)?);
            plan.append_soft(builder, arrays, target, (loss, factor));
        }
        Ok(())
    }
}

impl Op for ClassLoss {
    fn name(&self) -> &'static str {
        match self.of_logits {
            true => "cross_entropy",
            false => "nll_loss",
        }
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let plan = self.plan(call)?;
        let of = |shape| TensorType::new(plan.x.dtype, shape);
        let mut types = vec![of(plan.loss_shape()), of(vec![])];
        if self.of_logits {
            types.extend([of(plan.rows.clone()), of(plan.rows.clone())]);
        }
        Ok(types)
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let plan = self.plan(call)?;
        let x = required(call, inputs, 0)?;
        let (scores, target) = (x.to_f64(), required(call, inputs, 1)?);
        let (classes, soft) = (target.to_i64(), target.to_f64());
        let weights = inputs.get(2).copied().flatten().map(Tensor::to_f64);
        let w = |c: usize| weights.as_ref().map_or(1.0, |w| w[c]);
        let rows = constant_shape(call, &plan.rows)?;
        let n_classes = x.shape[plan.axis];
        let (s, n) = (plan.smoothing, n_classes as f64);
        let (mut losses, mut total) = (vec![], 0.0);
        let (mut maxima, mut log_sums) = (vec![], vec![]);
        for_each_index(&rows, |row| {
            let position = |c: usize| {
                let mut index = row.to_vec();
                index.insert(plan.axis, c);
                ravel(&index, &x.shape)
            };
            let score = |c: usize| scores[position(c)];
            let (max, log_sum) = match self.of_logits {
                true => {
                    let max = (0..n_classes).map(score).fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = (0..n_classes).map(|c| (score(c) - max).exp()).sum();
                    (max, sum.ln())
                }
                false => (0.0, 0.0),
            };
            let class = (!plan.soft).then(|| classes[losses.len()]);
            let hard = |c: usize| match class {
                Some(t) => f64::from(u8::from(t == c as i64)),
                None => soft[position(c)],
            };
            let share = |c: usize| w(c) * (hard(c) * (1.0 - s) + s / n);
            let term = |c: usize| match class {
                // A class that has no share costs nothing, however improbable it is.
                Some(_) if share(c) == 0.0 => 0.0,
                _ => -share(c) * (score(c) - max - log_sum),
            };
            let counts = class != Some(plan.ignored);
            losses.push(if counts {
                (0..n_classes).map(term).sum()
            } else {
                0.0
            });
            total += match class {
                _ if !counts => 0.0,
                Some(t) => w(usize::try_from(t).unwrap_or(0)),
                None => 1.0,
            };
            maxima.push(max);
            log_sums.push(log_sum);
        });
        let sum = || losses.iter().sum::<f64>();
        let scalar = |v: f64| Tensor::from_f64(plan.x.dtype, &[], vec![v]);
        let loss = match plan.combine {
            Combine::Mean => scalar(sum() / total),
            Combine::Sum => scalar(sum()),
            Combine::No => Tensor::from_f64(plan.x.dtype, &rows, losses),
        };
        let mut out = vec![loss, scalar(total)];
        if self.of_logits {
            let rows = |values| Tensor::from_f64(plan.x.dtype, &rows, values);
            out.extend([rows(maxima), rows(log_sums)]);
        }
        Ok(out)
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let plan = self.plan(call)?;
        let (x, dtype) = (call.input_id(0)?, plan.x.dtype);
        let mut normalizer = None;
        if self.of_logits {
            let outputs = [call.output_id(2), call.output_id(3)];
            let made = plan.append_normalizer(builder, x, outputs);
            normalizer = Some(made);
            if plan.soft {
                return self.expand_soft((call, &plan), builder, made);
            }
        }
        let mut smooth = None;
        if let (Some(normalizer), true) = (normalizer, plan.smoothing > 0.0) {
            let id = builder.transient("smooth", dtype, &plan.rows);
            let arrays = (x, normalizer, call.optional_id(2));
            plan.append_soft(builder, arrays, None, (id, plan.even()));
            smooth = Some(id);
        }
        let (loss, total) = (call.output_id(0), call.output_id(1));
        let (Some(mean), Combine::Mean) = (loss, plan.combine) else {
            return self.append_rows((call, &plan), builder, (normalizer, smooth), (loss, total));
        };
        let sum = builder.transient("sum", dtype, &[]);
        let total = total.unwrap_or_else(|| builder.transient("total", dtype, &[]));
        let results = (Some(sum), Some(total));
        self.append_rows((call, &plan), builder, (normalizer, smooth), results)?;
        let mut reads = Reads::default();
        let value = reads.at(sum, &[]).div(reads.at(total, &[]));
        IndexSpace::over(&[]).append(builder, reads, vec![write(mean, &[], value)]);
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let call = &g.call;
        let plan = self.plan(call)?;
        let Some((Some(dloss), others)) = g.output_gradients.split_first() else {
            return Ok(Gradient::Derive);
        };
        let outputs = [1, 2, 3].map(|n| call.output_id(n));
        let more_than_x = g.wanted.iter().skip(1).any(|w| *w) && {
            let wants = |n: usize| g.wanted.get(n) == Some(&true) && call.optional_id(n).is_some();
            plan.soft && wants(1) || wants(2)
        };
        if others.iter().skip(1).any(Option::is_some) {
            return Err(call.unsupported(
                "gradients of `max` and `log_sum`, which only its own gradient reads",
            ));
        }
        if plan.soft || more_than_x || others.iter().any(Option::is_some) {
            return Ok(Gradient::Derive);
        }
        let reads = [
            plan.combine == Combine::Mean,
            self.of_logits,
            self.of_logits,
        ];
        let mut saved = [0, 1, 2].map(|n| outputs[n].filter(|_| reads[n]));
        let lacks: Vec<bool> = std::iter::once(false)
            .chain((0..3).map(|n| reads[n] && saved[n].is_none()))
            .collect();
        if lacks.contains(&true) {
            // Values that the forward pass was not asked for are computed here.
            let again = builder.op_for(
                self.name(),
                &call.library.inputs,
                call.library.attrs.clone(),
                &lacks,
            )?;
            for (n, id) in saved.iter_mut().enumerate() {
                *id = id.or(again.get(n + 1).copied().flatten());
            }
        }
        let [total, max, log_sum] = saved;
        let inputs = [
            Some(*dloss),
            call.optional_id(0),
            call.optional_id(1),
            call.optional_id(2),
            total,
            max,
            log_sum,
        ];
        let name = format!("{}_gradient", self.name());
        let dx = builder.op(&name, &inputs, call.library.attrs.clone())?[0];
        Ok(Gradient::Rule(vec![Some(dx), None, None]))
    }

    fn has_gradient(&self, _library: &Library, output: usize) -> bool {
        output < 2
    }

    fn samples(&self) -> Vec<Sample> {
        let mut samples: Vec<Sample> = cases(self.of_logits)
            .into_iter()
            .map(|case| {
                let sample =
                    Sample::new(case.name, &[case.x], case.attrs()).value(1, case.targets());
                case.with_weight(sample, 2)
            })
            .collect();
        if self.of_logits {
            let soft = |name: &str, smoothing: f64, reduction: &str| {
                let attrs = attrs([
                    ("label_smoothing", Attr::Float(smoothing)),
                    ("reduction", Attr::Str(reduction.into())),
                ]);
                Sample::new(name, &[&[3, 4, 2], &[3, 4, 2]], attrs)
            };
            samples.push(soft("probabilities", 0.0, "mean"));
            samples.push(soft("smoothed probabilities, every row", 0.2, "none"));
        }
        samples
    }
}
