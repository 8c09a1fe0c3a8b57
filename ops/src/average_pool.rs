//! Average pooling and its gradient.
//!
//! y is the mean of x over a window; positions outside x count as zeros or not at all. The gradient
//! gives each element of a window an equal share: `dx[x(o, r)] += dy[o]/divisor(o)`. Source: ONNX
//! `AveragePool`.

use crate::index_space::{Reads, combine, for_each_index};
use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::pool::{Pooling, cases, float_input, library};
use crate::reference::{constant_shape, required};
use graph::{Attr, Builder, Expr, Reduction, SymExpr, Tensor};

/// `average_pool` (x `[N, C, I…]`) → y. Attributes as `max_pool` without dilation, `count_include_pad`
/// (true if absent) and `divisor` (in place of the window's size).
#[derive(Debug)]
pub struct AveragePool;

/// `average_pool_gradient` (dy) → dx of shape `input_shape`; attributes as [`AveragePool`].
#[derive(Debug)]
pub struct AveragePoolGradient;

/// Pooling of an x of that shape.
fn pooling(call: &Call, x: &[SymExpr]) -> Result<Pooling, OpError> {
    let pooling = Pooling::new(call, x)?;
    if pooling.window.dilation.iter().any(|d| *d != 1) {
        return Err(call.unsupported("dilation"));
    }
    Ok(pooling)
}

/// What a window's sum is divided by, for the output's indices.
fn divisor(call: &Call, pooling: &Pooling, y: &[SymExpr]) -> Result<SymExpr, OpError> {
    if call.library.attrs.contains_key("divisor") {
        return Ok(SymExpr::constant(call.int("divisor")?));
    }
    let w = &pooling.window;
    let with_padding = call.bool_or("count_include_pad", true)?;
    let never_leaves = !w.leaves(&pooling.x[2..], &pooling.y[2..]);
    if never_leaves || with_padding && !w.ceil {
        return Ok(SymExpr::constant(w.kernel.iter().product()));
    }
    let zero = SymExpr::constant(0);
    let extents = (0..w.rank()).map(|d| {
        let size = &pooling.x[2 + d];
        let start = w.index(d, &y[2 + d], &zero);
        let end = start.clone() + w.kernel[d];
        if with_padding {
            end.min_with(&(size.clone() + w.pad_high[d])) - start
        } else {
            end.min_with(size) - start.max_with(&zero)
        }
    });
    Ok(extents.fold(SymExpr::constant(1), |product, e| product * e))
}

/// What the sums of windows are divided by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Divisor {
    /// One number for all.
    Number(i64),
    /// For each dimension, a factor by the window's position. The divisor is the product over the dimensions.
    Extents(Vec<Vec<i64>>),
}

/// The divisor of an average pool of an x of that shape.
///
/// # Errors
/// It depends on a dynamic size, or the attributes do not fit.
pub fn divisor_of(call: &Call, x: &[SymExpr]) -> Result<Divisor, OpError> {
    let pooling = pooling(call, x)?;
    let (_, walk) = pooling.space();
    if let Some(number) = divisor(call, &pooling, &walk.y)?.as_const() {
        return Ok(Divisor::Number(number));
    }
    let (w, with_padding) = (&pooling.window, call.bool_or("count_include_pad", true)?);
    let (x, y) = (
        constant_shape(call, &pooling.x[2..])?,
        constant_shape(call, &pooling.y[2..])?,
    );
    let extents = (0..w.rank()).map(|d| {
        let counted = match with_padding {
            true => -w.pad_low[d]..x[d] as i64 + w.pad_high[d],
            false => 0..x[d] as i64,
        };
        let taps = |o: usize| {
            let taps = 0..w.kernel[d] as usize;
            taps.filter(|r| counted.contains(&w.at(d, o, *r))).count() as i64
        };
        (0..y[d]).map(taps).collect()
    });
    Ok(Divisor::Extents(extents.collect()))
}

/// `value / divisor`, a product where the divisor is a number.
pub(crate) fn divided(value: Expr, divisor: &SymExpr) -> Expr {
    match divisor.as_const() {
        Some(n) => value.mul(Expr::float(1.0 / n as f64)),
        None => value.div(Expr::Index(divisor.clone())),
    }
}

impl Op for AveragePool {
    fn name(&self) -> &'static str {
        "average_pool"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let y = pooling(call, &float_input(call)?.shape)?.y;
        Ok(vec![TensorType::new(call.input(0)?.dtype, y)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let pooling = pooling(call, &float_input(call)?.shape)?;
        let x = required(call, inputs, 0)?.to_f64();
        let shape = constant_shape(call, &pooling.y)?;
        let sizes = constant_shape(call, &pooling.x)?;
        let n = shape.iter().product();
        let (mut sum, mut inside) = (vec![0.0; n], vec![0.0; n]);
        pooling.for_each_position(call, |out, _, from| {
            sum[out] += x[from];
            inside[out] += 1.0;
        })?;
        let w = &pooling.window;
        // Positions in the padded input, which a window rounded up by `ceil` may leave.
        let padded = |index: &[usize]| -> f64 {
            let along = |d: usize| {
                let end = sizes[2 + d] as i64 + w.pad_high[d];
                let taps = 0..w.kernel[d] as usize;
                taps.filter(|r| w.at(d, index[2 + d], *r) < end).count() as f64
            };
            (0..w.rank()).map(along).product()
        };
        let with_padding = call.bool_or("count_include_pad", true)?;
        let divisor = call.int_or("divisor", 0)?;
        let mut at = 0;
        for_each_index(&shape, |index| {
            sum[at] /= match divisor {
                0 if with_padding => padded(index),
                0 => inside[at],
                d => d as f64,
            };
            at += 1;
        });
        Ok(vec![Tensor::from_f64(call.input(0)?.dtype, &shape, sum)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let pooling = pooling(call, &float_input(call)?.shape)?;
        let Some(y) = call.output_id(0) else {
            return Ok(());
        };
        let (space, walk) = pooling.space();
        let mut reads = Reads::default();
        let value = reads.memlet(pooling.x_memlet(call.input_id(0)?, &walk, 0.0));
        let value = divided(value, &divisor(call, &pooling, &walk.y)?);
        let write = combine(Reduction::Sum, y, &walk.y, value);
        space.append(builder, reads, vec![write]);
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        let mut attrs = g.call.library.attrs.clone();
        let shape = g.call.input(0)?.shape.clone();
        attrs.insert("input_shape".into(), Attr::Sizes(shape));
        let dx = builder.op1("average_pool_gradient", &[dy], attrs)?;
        Ok(g.only(0, dx))
    }

    fn samples(&self) -> Vec<Sample> {
        let without_dilation = cases()
            .into_iter()
            .filter(|(_, _, attrs)| !attrs.contains_key("dilation"));
        let mut samples = Vec::new();
        for (name, x, attrs) in without_dilation {
            for (suffix, counts) in [("", true), (", padding not counted", false)] {
                let mut attrs = attrs.clone();
                attrs.insert("count_include_pad".into(), Attr::Bool(counts));
                samples.push(Sample::new(&format!("{name}{suffix}"), &[&x], attrs));
            }
        }
        let divisor = attrs([
            ("kernel", Attr::Ints(vec![2, 3])),
            ("divisor", Attr::Int(5)),
        ]);
        samples.push(Sample::new("divisor of its own", &[&[1, 2, 3, 4]], divisor));
        samples
    }
}

impl Op for AveragePoolGradient {
    fn name(&self) -> &'static str {
        "average_pool_gradient"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let dy = float_input(call)?;
        let pooling = pooling(call, &call.sizes("input_shape")?)?;
        if dy.shape != pooling.y {
            return Err(call.shape_error("dy must have the shape of the pooled value"));
        }
        Ok(vec![TensorType::new(dy.dtype, pooling.x)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let ty = &self.infer(call)?[0];
        let pooling = pooling(call, &ty.shape)?;
        let dy = required(call, inputs, 0)?.to_f64();
        let divisor = divisor_of(call, &ty.shape)?;
        let mut divisors = Vec::new();
        for_each_index(&constant_shape(call, &pooling.y)?, |index| {
            divisors.push(match &divisor {
                Divisor::Number(n) => *n as f64,
                Divisor::Extents(along) => {
                    let extent = |(e, o): (&Vec<i64>, &usize)| e[*o] as f64;
                    along.iter().zip(&index[2..]).map(extent).product()
                }
            });
        });
        let shape = constant_shape(call, &ty.shape)?;
        let mut dx = vec![0.0; shape.iter().product()];
        pooling.for_each_position(call, |out, _, from| dx[from] += dy[out] / divisors[out])?;
        Ok(vec![Tensor::from_f64(ty.dtype, &shape, dx)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let pooling = pooling(call, &call.sizes("input_shape")?)?;
        let Some(dx) = call.output_id(0) else {
            return Ok(());
        };
        let (space, walk) = pooling.space();
        let mut reads = Reads::default();
        let dy = reads.at(call.input_id(0)?, &walk.y);
        let value = divided(dy, &divisor(call, &pooling, &walk.y)?);
        let mut target = pooling.x_memlet(dx, &walk, 0.0);
        // Windows that tile the input write each element once.
        if !pooling.window.tiles(&pooling.x[2..], &pooling.y[2..]) {
            target = target.reduce(Reduction::Sum);
        }
        space.append(builder, reads, vec![(target, value)]);
        Ok(())
    }

    fn samples(&self) -> Vec<Sample> {
        let case = |sample: Sample| {
            let x = sample.inputs[0].as_ref()?.shape.clone();
            let mut attrs = sample.attrs;
            attrs.insert("input_shape".into(), Attr::Sizes(x.clone()));
            let library = library("average_pool_gradient", attrs.clone());
            let call = Call {
                library: &library,
                inputs: vec![],
            };
            let y = pooling(&call, &x).ok()?.y;
            let y: Vec<i64> = y.iter().filter_map(SymExpr::as_const).collect();
            Some(Sample::new(&sample.name, &[&y], attrs))
        };
        AveragePool.samples().into_iter().filter_map(case).collect()
    }
}
