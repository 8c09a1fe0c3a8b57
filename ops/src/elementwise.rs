//! Element-wise arithmetic with broadcasting: `out[i…] = expr(inputs[i…])`.
//!
//! One operator covers all of it: activations, arithmetic, comparisons, casts and dropout masks are
//! [`graph::Expr`]s. Inputs are broadcast as in NumPy (aligned at the last dimension, size 1
//! stretches). The gradient for an input is the symbolic derivative of the expression times the
//! incoming gradient, summed over the dimensions along which that input was broadcast.

use crate::op::{Call, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use graph::{Attr, Builder, DType, Expr, Memlet, SymExpr, Tensor};

/// `elementwise`: attribute `expr`, and optionally `dtype` of the result.
#[derive(Debug)]
pub struct Elementwise;

/// The shape both broadcast to; `None` if they do not fit. A symbolic size fits itself and 1.
pub fn broadcast(a: &[SymExpr], b: &[SymExpr]) -> Option<Vec<SymExpr>> {
    let rank = a.len().max(b.len());
    let one = SymExpr::constant(1);
    let at = |s: &[SymExpr], d: usize| match (d + s.len()).checked_sub(rank) {
        Some(i) => s[i].clone(),
        None => SymExpr::constant(1),
    };
    (0..rank)
        .map(|d| match (at(a, d), at(b, d)) {
            (x, y) if x == y || y == one => Some(x),
            (x, y) if x == one => Some(y),
            _ => None,
        })
        .collect()
}

/// Memlet of a broadcast input for indices over the result.
pub fn broadcast_memlet(
    input: graph::ContainerId,
    shape: &[SymExpr],
    indices: &[SymExpr],
) -> Memlet {
    let skip = indices.len() - shape.len();
    let one = SymExpr::constant(1);
    let subset = shape.iter().zip(&indices[skip..]).map(|(size, index)| {
        if *size == one {
            SymExpr::constant(0)
        } else {
            index.clone()
        }
    });
    Memlet::new(input, subset)
}

impl Op for Elementwise {
    fn name(&self) -> &'static str {
        "elementwise"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let mut shape = Vec::new();
        let mut dtypes = Vec::new();
        for position in 0..call.inputs.len() {
            let input = call.input(position)?;
            shape = broadcast(&shape, &input.shape).ok_or_else(|| {
                call.shape_error(format!(
                    "input {position} of shape {:?} does not broadcast with {:?}",
                    display(&input.shape),
                    display(&shape)
                ))
            })?;
            dtypes.push(input.dtype);
        }
        let expr = call.expr("expr")?;
        let dtype = call.dtype_or("dtype", expr.dtype(&dtypes))?;
        Ok(vec![TensorType::new(dtype, shape)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let ty = &self.infer(call)?[0];
        let expr = call.expr("expr")?;
        let shape = constant_shape(call, &ty.shape)?;
        let mut out = Tensor::zeros(ty.dtype, &shape);
        for at in 0..out.len() {
            let index = unravel(at, &shape);
            let scalars: Vec<_> = inputs
                .iter()
                .flatten()
                .map(|t| t.at(broadcast_offset(&t.shape, &index)))
                .collect();
            let value = expr
                .eval(&scalars, &|s| {
                    // `i0, i1, …` are the result's indices, as in the expansion.
                    let d: usize = s.as_str().strip_prefix('i')?.parse().ok()?;
                    index.get(d).map(|i| *i as i64)
                })
                .map_err(|e| call.shape_error(e.to_string()))?;
            out.set(at, value);
        }
        Ok(vec![out])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let shape = builder.shape(out);
        let expr = call.expr("expr")?;
        let ids: Vec<_> = call.library.inputs.iter().flatten().copied().collect();
        let shapes: Vec<_> = ids.iter().map(|id| builder.shape(*id)).collect();
        builder.map_over(&shape, out, expr, |i| {
            ids.iter()
                .zip(&shapes)
                .map(|(id, s)| broadcast_memlet(*id, s, i))
                .collect()
        });
        Ok(())
    }

    fn samples(&self) -> Vec<Sample> {
        let t = |shape: &[i64]| {
            let shape = shape.iter().map(|n| SymExpr::constant(*n)).collect();
            Some(TensorType::new(DType::F32, shape))
        };
        vec![Sample {
            name: "x·tanh(y) with y broadcast".into(),
            inputs: vec![t(&[2, 3, 4]), t(&[3, 1])],
            attrs: attrs([("expr", Attr::Expr(Expr::In(0).mul(Expr::In(1).tanh())))]),
            values: vec![],
            range: (-2.0, 2.0),
            differentiable: true,
        }]
    }
}

/// Sums a broadcast value back to `shape`.
///
/// # Errors
/// As [`OpBuilder::op`].
pub fn sum_to(
    builder: &mut Builder,
    value: graph::ContainerId,
    shape: &[SymExpr],
) -> Result<graph::ContainerId, OpError> {
    let wide = builder.shape(value);
    if wide == shape {
        return Ok(value);
    }
    let extra = wide.len() - shape.len();
    let axes = (0..wide.len())
        .filter(|d| *d < extra || wide[*d] != shape[*d - extra])
        .map(|d| d as i64)
        .collect();
    let summed = builder.op1(
        "reduce",
        &[value],
        attrs([
            ("kind", Attr::Str("sum".into())),
            ("axes", Attr::Ints(axes)),
            ("keep", Attr::Bool(true)),
        ]),
    )?;
    if extra == 0 {
        return Ok(summed);
    }
    builder.op1(
        "reshape",
        &[summed],
        attrs([("shape", Attr::Sizes(shape.to_vec()))]),
    )
}

fn display(shape: &[SymExpr]) -> Vec<String> {
    shape.iter().map(ToString::to_string).collect()
}

/// The shape as numbers.
///
/// # Errors
/// A size is symbolic.
pub fn constant_shape(call: &Call, shape: &[SymExpr]) -> Result<Vec<usize>, OpError> {
    let number = |s: &SymExpr| {
        s.as_const()
            .and_then(|n| usize::try_from(n).ok())
            .ok_or_else(|| call.shape_error(format!("size `{s}` has no value here")))
    };
    shape.iter().map(number).collect()
}

/// Index of a row-major position.
pub fn unravel(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for d in (0..shape.len()).rev() {
        index[d] = at % shape[d];
        at /= shape[d];
    }
    index
}

/// Row-major position in a broadcast operand.
pub fn broadcast_offset(shape: &[usize], index: &[usize]) -> usize {
    let skip = index.len() - shape.len();
    let along = shape.iter().zip(&index[skip..]);
    along.fold(0, |at, (n, i)| at * n + if *n == 1 { 0 } else { *i })
}
