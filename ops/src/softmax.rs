//! `softmax` and `log_softmax` along one axis, with gradients from their results.
//!
//! `y_i = e^(x_i − m) / Σ_j e^(x_j − m)` with `m = max_j x_j`; `dx = y·(dy − Σ dy·y)`.
//! `y_i = x_i − m − ln Σ_j e^(x_j − m)`; `dx = dy − e^y·Σ dy`. Source: ONNX `Softmax`, `LogSoftmax`.
//! The exponentials are computed twice rather than stored once.

use crate::index_space::{IndexSpace, Reads, combine, write};
use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::constant_shape;
use graph::{Attr, Builder, ContainerId, DType, Expr, Reduction, SymExpr, Tensor};

/// `softmax` or `log_softmax` (x), attribute `axis` (negative ones count from the end).
///
/// `softmax` with attribute `safe: Bool` (false) gives zeros instead of NaN where every x of a row is −∞, as when a
/// mask hides all scores of a row (`torch._safe_softmax`).
#[derive(Debug)]
pub struct Softmax {
    log: bool,
}

/// `softmax_gradient` or `log_softmax_gradient` (dy, y), attribute `axis`.
#[derive(Debug)]
pub struct SoftmaxGradient {
    log: bool,
}

/// `softmax`
pub const SOFTMAX: Softmax = Softmax { log: false };
/// `log_softmax`
pub const LOG_SOFTMAX: Softmax = Softmax { log: true };
/// `softmax_gradient`
pub const SOFTMAX_GRADIENT: SoftmaxGradient = SoftmaxGradient { log: false };
/// `log_softmax_gradient`
pub const LOG_SOFTMAX_GRADIENT: SoftmaxGradient = SoftmaxGradient { log: true };

/// The axis of a call, counted from the start.
fn axis_of(call: &Call) -> Result<usize, OpError> {
    let rank = call.input(0)?.rank() as i64;
    let axis = call.int("axis")?;
    if axis < -rank || axis >= rank {
        return Err(call.shape_error(format!("axis {axis} of a value of rank {rank}")));
    }
    Ok(axis.rem_euclid(rank) as usize)
}

fn is_safe(call: &Call) -> Result<bool, OpError> {
    call.bool_or("safe", false)
}

/// `value`, or `other` where `value` is `what`.
fn unless(value: Expr, what: f64, other: f64) -> Expr {
    let is_what = value.clone().eq_(Expr::float(what));
    Expr::select(is_what, Expr::float(other), value)
}

fn without<T: Clone>(list: &[T], axis: usize) -> Vec<T> {
    [&list[..axis], &list[axis + 1..]].concat()
}

fn float_type(call: &Call) -> Result<Vec<TensorType>, OpError> {
    axis_of(call)?;
    let x = call.input(0)?;
    if !x.dtype.is_float() {
        return Err(call.unsupported(format!("elements of type {}", x.dtype)));
    }
    Ok(vec![x.clone()])
}

/// Calls `f` with the positions of each row along the axis.
fn for_each_row(shape: &[usize], axis: usize, mut f: impl FnMut(&[usize])) {
    let inner: usize = shape[axis + 1..].iter().product();
    let outer: usize = shape[..axis].iter().product();
    for row in 0..outer * inner {
        let start = row / inner * shape[axis] * inner + row % inner;
        let positions: Vec<usize> = (0..shape[axis]).map(|i| start + i * inner).collect();
        f(&positions);
    }
}

impl Op for Softmax {
    fn name(&self) -> &'static str {
        if self.log { "log_softmax" } else { "softmax" }
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        float_type(call)
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let ty = &self.infer(call)?[0];
        let shape = constant_shape(call, &ty.shape)?;
        let x = inputs[0].map(Tensor::to_f64).unwrap_or_default();
        let safe = is_safe(call)?;
        let mut y = vec![0.0; x.len()];
        for_each_row(&shape, axis_of(call)?, |row| {
            let max = row.iter().fold(f64::NEG_INFINITY, |m, i| m.max(x[*i]));
            if safe && row.iter().all(|i| x[*i] == f64::NEG_INFINITY) {
                return;
            }
            let sum: f64 = row.iter().map(|i| (x[*i] - max).exp()).sum();
            for i in row {
                y[*i] = match self.log {
                    true => x[*i] - max - sum.ln(),
                    false => (x[*i] - max).exp() / sum,
                };
            }
        });
        Ok(vec![Tensor::from_f64(ty.dtype, &shape, y)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let axis = axis_of(call)?;
        let (x, ty) = (call.input_id(0)?, call.input(0)?);
        let Some(y) = call.output_id(0) else {
            return Ok(());
        };
        let space = IndexSpace::over(&ty.shape);
        let at = space.indices();
        let row = without(&at, axis);
        let row_shape = without(&ty.shape, axis);
        let max = builder.transient("max", ty.dtype, &row_shape);
        let mut reads = Reads::default();
        let value = reads.at(x, &at);
        space.append(
            builder,
            reads,
            vec![combine(Reduction::Max, max, &row, value)],
        );

        let safe = is_safe(call)?;
        let shifted = |reads: &mut Reads| {
            let (x, max) = (reads.at(x, &at), reads.at(max, &row));
            x.sub(if safe {
                unless(max, f64::NEG_INFINITY, 0.0)
            } else {
                max
            })
        };
        let sum = builder.transient("sum", ty.dtype.arithmetic(), &row_shape);
        let mut reads = Reads::default();
        let value = shifted(&mut reads).exp();
        space.append(
            builder,
            reads,
            vec![combine(Reduction::Sum, sum, &row, value)],
        );

        let mut reads = Reads::default();
        let shifted = shifted(&mut reads);
        let sum = reads.at(sum, &row);
        let value = match (self.log, safe) {
            (true, _) => shifted.sub(sum.log()),
            (false, true) => shifted.exp().div(unless(sum, 0.0, 1.0)),
            (false, false) => shifted.exp().div(sum),
        };
        space.append(builder, reads, vec![write(y, &at, value)]);
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let [Some(dy)] = *g.output_gradients else {
            return Ok(Gradient::Zero);
        };
        let Some(y) = g.call.output_id(0) else {
            return Ok(Gradient::Zero);
        };
        let op = match self.log {
            true => "log_softmax_gradient",
            false => "softmax_gradient",
        };
        let axis = Attr::Int(axis_of(&g.call)? as i64);
        let dx = builder.op1(op, &[dy, y], attrs([("axis", axis)]))?;
        Ok(Gradient::Rule(vec![Some(dx)]))
    }

    fn samples(&self) -> Vec<Sample> {
        samples(1)
    }
}

impl SoftmaxGradient {
    fn sum_over_row(
        &self,
        builder: &mut Builder,
        (dy, y, sum): (ContainerId, ContainerId, ContainerId),
        (space, axis): (&IndexSpace, usize),
    ) {
        let at = space.indices();
        let mut reads = Reads::default();
        let mut value = reads.at(dy, &at);
        if !self.log {
            value = value.mul(reads.at(y, &at));
        }
        let row = without(&at, axis);
        space.append(
            builder,
            reads,
            vec![combine(Reduction::Sum, sum, &row, value)],
        );
    }
}

impl Op for SoftmaxGradient {
    fn name(&self) -> &'static str {
        match self.log {
            true => "log_softmax_gradient",
            false => "softmax_gradient",
        }
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        if call.input(1)?.shape != call.input(0)?.shape {
            return Err(call.shape_error("the gradient has another shape than the result"));
        }
        float_type(call)
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let ty = &self.infer(call)?[0];
        let shape = constant_shape(call, &ty.shape)?;
        let dy = inputs[0].map(Tensor::to_f64).unwrap_or_default();
        let y = inputs[1].map(Tensor::to_f64).unwrap_or_default();
        let mut dx = vec![0.0; dy.len()];
        for_each_row(&shape, axis_of(call)?, |row| {
            let weight = |i: &usize| if self.log { 1.0 } else { y[*i] };
            let sum: f64 = row.iter().map(|i| dy[*i] * weight(i)).sum();
            for i in row {
                dx[*i] = match self.log {
                    true => dy[*i] - y[*i].exp() * sum,
                    false => y[*i] * (dy[*i] - sum),
                };
            }
        });
        Ok(vec![Tensor::from_f64(ty.dtype, &shape, dx)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let axis = axis_of(call)?;
        let ty = call.input(0)?;
        let (dy, y) = (call.input_id(0)?, call.input_id(1)?);
        let Some(dx) = call.output_id(0) else {
            return Ok(());
        };
        let space = IndexSpace::over(&ty.shape);
        // A sum of 16-bit gradients may be beyond their largest number.
        let sum = builder.transient("sum", ty.dtype.arithmetic(), &without(&ty.shape, axis));
        self.sum_over_row(builder, (dy, y, sum), (&space, axis));
        let at = space.indices();
        let mut reads = Reads::default();
        let (dy, y) = (reads.at(dy, &at), reads.at(y, &at));
        let sum = reads.at(sum, &without(&at, axis));
        let value = match self.log {
            true => dy.sub(y.exp().mul(sum)),
            false => y.mul(dy.sub(sum)),
        };
        space.append(builder, reads, vec![write(dx, &at, value)]);
        Ok(())
    }

    fn samples(&self) -> Vec<Sample> {
        samples(2)
    }
}

fn samples(n_inputs: usize) -> Vec<Sample> {
    let cases: &[(&str, &[i64], i64)] = &[
        ("last axis", &[3, 5], -1),
        ("first axis", &[4, 3], 0),
        ("middle axis", &[2, 3, 4], 1),
        ("one dimension", &[7], 0),
        ("attention scores", &[2, 2, 3, 5], 3),
        ("one element a row", &[3, 1], 1),
    ];
    let sample = |(name, shape, axis): &(&str, &[i64], i64)| {
        let shape: Vec<_> = shape.iter().map(|n| SymExpr::constant(*n)).collect();
        Sample {
            name: name.to_string(),
            inputs: vec![Some(TensorType::new(DType::F32, shape)); n_inputs],
            attrs: attrs([("axis", Attr::Int(*axis))]),
            values: vec![],
            range: (-3.0, 3.0),
            differentiable: true,
        }
    };
    cases.iter().map(sample).collect()
}
