//! Variances along axes: `variance`.

use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reduce::{gather_groups, kept_index, reduce_kept};
use crate::reference::{constant_shape, required};
use crate::shape_rules::{axes, extent, reciprocal, reduced, reshape};
use graph::{Attr, Builder, DType, Expr, Memlet, Reduction, SymExpr, Tensor};

/// `variance`: `Σ(x − mean)² / max(0, n − correction)` along axes, in two passes.
///
/// Attributes `axes: Ints` (absent or empty: all), `keep: Bool` (false), `correction: Float` (1).
/// Gradient: `2 · g · (x − mean) / (n − correction)`. Source: `torch.var`.
#[derive(Debug)]
pub struct Variance;

/// `1 / max(0, n − correction)`, in the type of `x`, but at least single precision. If `n` is a symbol, the quotient is
/// computed in double precision.
fn variance_scale(call: &Call, n: &SymExpr) -> Result<Expr, OpError> {
    let correction = call.float_or("correction", 1.0)?;
    Ok(match n.as_const() {
        Some(n) => Expr::float(1.0 / (n as f64 - correction).max(0.0)),
        None => {
            let left = Expr::Index(n.clone())
                .cast(DType::F64)
                .sub(Expr::float(correction));
            let double = call.input(0)?.dtype == DType::F64;
            let dtype = if double { DType::F64 } else { DType::F32 };
            Expr::float(1.0).div(left.max(Expr::float(0.0))).cast(dtype)
        }
    })
}

/// Whether there are no more elements than the correction.
fn is_infinite(scale: &Expr) -> bool {
    scale.as_number() == Some(f64::INFINITY)
}

impl Op for Variance {
    fn name(&self) -> &'static str {
        "variance"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let x = call.input(0)?;
        if !x.dtype.is_float() {
            return Err(call.unsupported(format!("{}; convert it to a float first", x.dtype)));
        }
        let axes = axes(call, x.rank())?;
        let shape = reduced(&x.shape, &axes, call.bool_or("keep", false)?);
        Ok(vec![TensorType::new(x.dtype, shape)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let x = required(call, inputs, 0)?;
        let ty = &self.infer(call)?[0];
        let shape = constant_shape(call, &ty.shape)?;
        let correction = call.float_or("correction", 1.0)?;
        let variance = |values: &Vec<f64>| {
            let n = values.len() as f64;
            let mean = values.iter().sum::<f64>() / n;
            let squares: f64 = values.iter().map(|v| (v - mean) * (v - mean)).sum();
            squares / (n - correction).max(0.0)
        };
        let groups = gather_groups(x, &axes(call, x.shape.len())?);
        let values = groups.iter().map(variance).collect();
        Ok(vec![Tensor::from_f64(ty.dtype, &shape, values)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let x = call.input_id(0)?;
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let (shape, dtype) = (builder.shape(x), builder.dtype(x));
        let axes = axes(call, shape.len())?;
        let n = extent(&shape, &axes);
        let kept = reduced(&shape, &axes, true);
        let mean = builder.transient("mean", dtype.arithmetic(), &kept);
        let term = (Reduction::Sum, Expr::In(0).mul(reciprocal(&n)));
        builder.reduce_over(&shape, (&axes, true), mean, term, |i| {
            vec![Memlet::new(x, i.iter().cloned())]
        });
        let off = Expr::In(0).sub(Expr::In(1));
        let scale = variance_scale(call, &n)?;
        let square = off.clone().mul(off);
        let dims = (axes.as_slice(), call.bool_or("keep", false)?);
        let reads = |i: &[SymExpr]| {
            let group = Memlet::new(mean, kept_index(i, &axes));
            vec![Memlet::new(x, i.iter().cloned()), group]
        };
        if is_infinite(&scale) {
            // Infinity times the square of one element that equals the mean would be NaN for all.
            let result = builder.shape(out);
            let squares = builder.transient("squares", dtype.arithmetic(), &result);
            builder.reduce_over(&shape, dims, squares, (Reduction::Sum, square), reads);
            builder.map_over(&result, out, Expr::In(0).mul(scale), |i| {
                vec![Memlet::new(squares, i.iter().cloned())]
            });
            return Ok(());
        }
        let term = (Reduction::Sum, square.mul(scale));
        builder.reduce_over(&shape, dims, out, term, reads);
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        let x = g.call.input_id(0)?;
        let shape = builder.shape(x);
        let axes = axes(&g.call, shape.len())?;
        let dy = reshape(builder, dy, &reduced(&shape, &axes, true))?;
        let dtype = builder.dtype(x);
        let wide = if dtype.arithmetic() == dtype {
            x
        } else {
            // A mean in 16 bits would lose the differences between the elements.
            builder.elementwise(Expr::In(0).cast(dtype.arithmetic()), &[x])?
        };
        let mean = reduce_kept(builder, "mean", wide, &axes)?;
        let scale = variance_scale(&g.call, &extent(&shape, &axes))?;
        let slope = Expr::In(1)
            .sub(Expr::In(2))
            .mul(scale.mul(Expr::float(2.0)));
        let dx = Expr::In(0).mul(slope).cast(builder.dtype(x));
        let dx = builder.elementwise(dx, &[dy, x, mean])?;
        Ok(g.only(0, dx))
    }

    fn samples(&self) -> Vec<Sample> {
        let by = |axes: &[i64], keep, correction| {
            attrs([
                ("axes", Attr::Ints(axes.to_vec())),
                ("keep", Attr::Bool(keep)),
                ("correction", Attr::Float(correction)),
            ])
        };
        vec![
            Sample::new("last, unbiased", &[&[3, 5]], by(&[-1], false, 1.0)),
            Sample::new("two, biased", &[&[2, 3, 4]], by(&[0, 2], true, 0.0)),
        ]
    }
}
