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

use crate::index_space::{IndexSpace, Reads, combine, for_each_index, write};
use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{constant_shape, ravel, required};
use crate::shape_rules::reciprocal;
use graph::{
    Attr, Attrs, Binary, Builder, ContainerId, DType, Expr, Index, Library, Memlet, Reduction,
    SymExpr, Tensor,
};

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

/// `cross_entropy_gradient` or `nll_loss_gradient` (dloss, x, target i64, weight?, total?, max?, log_sum?)
/// → dx; attributes as the loss. `total` is read for a mean only, `max` and `log_sum` for cross entropy
/// only. A row that does not count has a gradient of 0, or NaN where its scores have no probabilities, as
/// in PyTorch.
#[derive(Debug)]
pub struct ClassLossGradient {
    of_logits: bool,
}

/// `cross_entropy`
pub static CROSS_ENTROPY: ClassLoss = ClassLoss { of_logits: true };
/// `nll_loss`
pub static NLL_LOSS: ClassLoss = ClassLoss { of_logits: false };
/// `cross_entropy_gradient`
pub static CROSS_ENTROPY_GRADIENT: ClassLossGradient = ClassLossGradient { of_logits: true };
/// `nll_loss_gradient`
pub static NLL_LOSS_GRADIENT: ClassLossGradient = ClassLossGradient { of_logits: false };

/// PyTorch's number for targets that do not count.
const IGNORED: i64 = -100;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Combine {
    No,
    Mean,
    Sum,
}

/// The attributes and shapes of a loss.
struct LossShapes {
    x: TensorType,
    /// Dimension of the classes.
    axis: usize,
    rows: Vec<SymExpr>,
    /// Targets are probabilities.
    soft: bool,
    combine: Combine,
    ignored: i64,
    smoothing: f64,
}

fn without<T: Clone>(list: &[T], axis: usize) -> Vec<T> {
    [&list[..axis], &list[axis + 1..]].concat()
}

impl LossShapes {
    /// `first` is the position of x among the inputs; target and weight follow.
    fn new(call: &Call, first: usize, of_logits: bool) -> Result<LossShapes, OpError> {
        let (x, target) = (call.input(first)?.clone(), call.input(first + 1)?);
        if x.rank() == 0 || !x.dtype.is_float() {
            return Err(
                call.shape_error("scores must be floating-point, with a dimension of classes")
            );
        }
        let axis = usize::from(x.rank() > 1);
        let rows = without(&x.shape, axis);
        let soft = target.dtype.is_float();
        let expected = if soft { &x.shape } else { &rows };
        if target.shape != *expected || soft && !of_logits {
            return Err(call.shape_error(
                "targets must be classes, one for each row, or (cross entropy) probabilities",
            ));
        }
        if let Some(Some(w)) = call.inputs.get(first + 2)
            && w.shape != x.shape[axis..=axis]
        {
            return Err(call.shape_error("there must be one weight for each class"));
        }
        let combine = match call.str_or("reduction", "mean".into())?.as_str() {
            "none" => Combine::No,
            "mean" => Combine::Mean,
            "sum" => Combine::Sum,
            other => return Err(call.unsupported(format!("reduction `{other}`"))),
        };
        let smoothing = match of_logits {
            true => call.float_or("label_smoothing", 0.0)?,
            false => 0.0,
        };
        Ok(LossShapes {
            axis,
            rows,
            soft,
            combine,
            ignored: call.int_or("ignore_index", IGNORED)?,
            smoothing,
            x,
        })
    }

    fn n_classes(&self) -> &SymExpr {
        &self.x.shape[self.axis]
    }

    /// Smoothing spread over the classes: `s/C`.
    fn even(&self) -> Expr {
        Expr::float(self.smoothing).mul(reciprocal(self.n_classes()))
    }

    fn loss_shape(&self) -> Vec<SymExpr> {
        match self.combine {
            Combine::No => self.rows.clone(),
            _ => vec![],
        }
    }

    /// Index of x in a row, at the class another input of the tasklet names.
    fn at_class(&self, row: &[SymExpr], class_input: usize) -> Vec<Index> {
        let mut index: Vec<Index> = row.iter().cloned().map(Index::At).collect();
        index.insert(self.axis, Index::Data(class_input));
        index
    }

    /// Appends maximum and log_sum of each row.
    fn append_normalizer(
        &self,
        builder: &mut Builder,
        x: ContainerId,
        [max, log_sum]: [Option<ContainerId>; 2],
    ) -> Normalizer {
        let mut row = |name: &str, id: Option<ContainerId>| {
            id.unwrap_or_else(|| builder.transient(name, self.x.dtype, &self.rows))
        };
        let (greatest, sum) = (row("greatest", None), row("sum", None));
        let (max, log_sum) = (row("max", max), row("log_sum", log_sum));
        let mut library = |op: &str, attrs: Attrs, from: ContainerId, to: ContainerId| {
            builder.library(Library {
                op: op.into(),
                attrs,
                inputs: vec![Some(from)],
                outputs: vec![Some(to)],
            });
        };
        let list = attrs([
            ("kind", Attr::Str("max".into())),
            ("axes", Attr::Ints(vec![self.axis as i64])),
        ]);
        library("reduce", list, x, greatest);
        // Any shift gives the same loss, so its derivative is 0.
        library("stop_gradient", Attrs::new(), greatest, max);
        let space = IndexSpace::over(&self.x.shape);
        let at = space.indices();
        let row = without(&at, self.axis);
        let mut reads = Reads::default();
        let term = reads.at(x, &at).sub(reads.at(max, &row)).exp();
        space.append(
            builder,
            reads,
            vec![combine(Reduction::Sum, sum, &row, term)],
        );
        let space = IndexSpace::over(&self.rows);
        let row = space.indices();
        let mut reads = Reads::default();
        let value = reads.at(sum, &row).log();
        space.append(builder, reads, vec![write(log_sum, &row, value)]);
        Normalizer { max, log_sum }
    }

    /// Appends `out[row] −= w_c·t_c·l_c`, with `t` absent (1) for smoothing.
    fn append_soft(
        &self,
        builder: &mut Builder,
        (x, normalizer, weight): (ContainerId, Normalizer, Option<ContainerId>),
        target: Option<ContainerId>,
        (out, factor): (ContainerId, Expr),
    ) {
        let space = IndexSpace::over(&self.x.shape);
        let at = space.indices();
        let row = without(&at, self.axis);
        let mut reads = Reads::default();
        let score = reads.at(x, &at);
        let log = normalizer.log_probability(&mut reads, score, &row);
        let mut value = log.neg().mul(factor);
        if let Some(t) = target {
            let smoothed = reads.at(t, &at).mul(Expr::float(1.0 - self.smoothing));
            value = value.mul(match self.smoothing > 0.0 {
                true => smoothed.add(self.even()),
                false => smoothed,
            });
        }
        if let Some(w) = weight {
            value = value.mul(reads.at(w, &at[self.axis..=self.axis]));
        }
        let index = if builder.shape(out).is_empty() {
            vec![]
        } else {
            row
        };
        space.append(
            builder,
            reads,
            vec![combine(Reduction::Sum, out, &index, value)],
        );
    }

    /// Reads the target of a row: its class, and whether it counts.
    fn target(&self, reads: &mut Reads, target: ContainerId, row: &[SymExpr]) -> (Expr, Expr) {
        let class = reads.at(target, row);
        let counts = Expr::binary(Binary::Ne, class.clone(), Expr::int(self.ignored));
        (class, counts)
    }
}

/// Containers of the parts of `ln Σ_c e^(x_c) = max + log_sum`, `[N, …]`.
#[derive(Clone, Copy)]
struct Normalizer {
    max: ContainerId,
    log_sum: ContainerId,
}

impl Normalizer {
    /// `l_c = (x_c − max) − log_sum`, in this order.
    fn log_probability(self, reads: &mut Reads, score: Expr, row: &[SymExpr]) -> Expr {
        let (max, log_sum) = (reads.at(self.max, row), reads.at(self.log_sum, row));
        score.sub(max).sub(log_sum)
    }
}

/// Reads the weight of the class that `class` (an input of the tasklet) names; 1 without weights.
fn weight_of(reads: &mut Reads, weight: Option<ContainerId>, class: &Expr) -> Option<Expr> {
    let (weight, Expr::In(class)) = (weight?, class) else {
        return None;
    };
    let mut memlet = Memlet::new(weight, []).or_fill(0.0);
    memlet.subset.push(Index::Data(*class));
    Some(reads.memlet(memlet))
}

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
            // What nobody asked for in the forward pass is computed here.
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

    /// Appends `A − (1 − s)·w_t = s/C·Σ w`, where weights make it differ from s.
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
        // Times 0, not replaced by it: NaN stays where a row that does not count has no probabilities.
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

/// From which the samples of losses and gradients are made.
struct Case {
    name: &'static str,
    x: &'static [i64],
    reduction: &'static str,
    smoothing: f64,
    ignored: Option<i64>,
    weighted: bool,
}

impl Case {
    fn axis(&self) -> usize {
        usize::from(self.x.len() > 1)
    }

    fn rows(&self) -> Vec<i64> {
        without(self.x, self.axis())
    }

    /// Classes, some of them ignored if the case says so.
    fn targets(&self) -> Tensor {
        let shape: Vec<usize> = self.rows().iter().map(|n| *n as usize).collect();
        let n = shape.iter().product::<usize>() as i64;
        let class = |i: i64| match self.ignored {
            Some(ignored) if i % 3 == 1 => ignored,
            _ => (i * 5 + 2) % self.x[self.axis()],
        };
        Tensor::from_i64(DType::I64, &shape, (0..n).map(class).collect())
    }

    fn attrs(&self) -> Attrs {
        let mut list = attrs([
            ("reduction", Attr::Str(self.reduction.into())),
            ("label_smoothing", Attr::Float(self.smoothing)),
        ]);
        if let Some(ignored) = self.ignored {
            list.insert("ignore_index".into(), Attr::Int(ignored));
        }
        list
    }

    fn with_weight(&self, sample: Sample, position: usize) -> Sample {
        if !self.weighted {
            return sample.without(position);
        }
        let n = self.x[self.axis()] as usize;
        let weights = (0..n).map(|c| 0.5 + 0.3 * c as f64).collect();
        sample.value(position, Tensor::from_f64(DType::F32, &[n], weights))
    }
}

fn cases(of_logits: bool) -> Vec<Case> {
    let case = |name, x, reduction, (smoothing, ignored, weighted)| Case {
        name,
        x,
        reduction,
        smoothing: if of_logits { smoothing } else { 0.0 },
        ignored,
        weighted,
    };
    vec![
        case("mean of rows", &[4, 5], "mean", (0.0, None, false)),
        case("images, sum", &[2, 3, 2, 2], "sum", (0.0, None, false)),
        case("every row", &[3, 4, 2], "none", (0.0, None, false)),
        case("some ignored", &[5, 3], "mean", (0.0, Some(-100), false)),
        case("a class ignored", &[5, 3], "none", (0.0, Some(2), false)),
        case("weights", &[4, 3], "mean", (0.0, Some(-100), true)),
        case("smoothing", &[4, 3], "mean", (0.1, None, false)),
        case("all of it", &[4, 3, 2], "mean", (0.2, Some(1), true)),
        case("one sample", &[4], "mean", (0.1, None, false)),
    ]
}
