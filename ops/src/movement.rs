//! Operators that only move data: reshape, permute, expand, flip, tile.
//!
//! Their results hold the elements of their input in another arrangement; fusion usually dissolves
//! them into the index expressions of whoever reads them. Joining and cutting is in
//! [`crate::slicing`].

use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{broadcast_offset, constant_shape, ravel, rearrange, required};
use crate::shape_rules::{
    axes, broadcast, broadcast_memlet, display, expand_to, is_one, reshape, sum_to,
};
use graph::{Attr, Builder, ContainerId, Expr, Memlet, SymExpr, Tensor};

/// `reshape`: the same elements in row-major order under another shape.
///
/// Attribute `shape: Sizes`, of which one may be −1 (whatever is left). Gradient: reshape back.
/// Source: ONNX Reshape-21, `torch.reshape`. Not expanded by default: it is a view.
#[derive(Debug)]
pub struct Reshape;

fn reshaped(call: &Call) -> Result<Vec<SymExpr>, OpError> {
    let from = &call.input(0)?.shape;
    let mut shape = call.sizes("shape")?;
    let total = SymExpr::product(from);
    if let Some(open) = shape.iter().position(|s| s.as_const() == Some(-1)) {
        shape[open] = SymExpr::constant(1);
        shape[open] = total.floor_div(&SymExpr::product(&shape));
    }
    // A difference that is a number other than zero proves a mistake; a symbolic one may vanish
    // once sizes are bound.
    let left = total - SymExpr::product(&shape);
    if left.as_const().is_some_and(|n| n != 0) {
        return Err(call.shape_error(format!(
            "a value of shape {} does not fill shape {}",
            display(from),
            display(&shape)
        )));
    }
    Ok(shape)
}

impl Op for Reshape {
    fn name(&self) -> &'static str {
        "reshape"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![TensorType::new(call.input(0)?.dtype, reshaped(call)?)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let mut out = required(call, inputs, 0)?.clone();
        out.shape = constant_shape(call, &reshaped(call)?)?;
        Ok(vec![out])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let x = call.input_id(0)?;
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let (from, to) = (builder.shape(x), builder.shape(out));
        builder.map_over(&to, out, Expr::In(0), |i| {
            vec![Memlet::new(x, reshape_indices(&from, &to, i))]
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        match g.dy(0) {
            Some(dy) if g.wants(0) => Ok(g.only(0, reshape(builder, dy, &g.call.input(0)?.shape)?)),
            _ => Ok(g.nothing()),
        }
    }

    fn is_movement(&self) -> bool {
        true
    }

    fn samples(&self) -> Vec<Sample> {
        let to = |shape: &[i64]| attrs([("shape", Attr::Sizes(crate::shape_rules::fixed(shape)))]);
        vec![
            Sample::new("merge dimensions", &[&[2, 3, 4]], to(&[2, 12])),
            Sample::new("split one, rest open", &[&[6, 5]], to(&[2, -1, 5])),
            Sample::new("drop and add ones", &[&[2, 1, 3, 1]], to(&[1, 2, 3])),
            Sample::new("regroup", &[&[4, 6]], to(&[3, 8])),
            Sample::new("one element to a scalar", &[&[1, 1]], to(&[])),
        ]
    }
}

/// The indices at which the element `at` of a value of shape `to` lies in the same value of shape
/// `from`. Dimensions are matched in the smallest groups of equal products, so that only real
/// merges and splits cost index arithmetic.
pub fn reshape_indices(from: &[SymExpr], to: &[SymExpr], at: &[SymExpr]) -> Vec<SymExpr> {
    let wide = |shape: &[SymExpr]| -> Vec<usize> {
        (0..shape.len()).filter(|d| !is_one(&shape[*d])).collect()
    };
    let (source, target) = (wide(from), wide(to));
    let mut result = vec![SymExpr::constant(0); from.len()];
    let (mut s, mut t) = (0, 0);
    while s < source.len() && t < target.len() {
        let (ns, nt) = group(from, &source[s..], to, &target[t..]);
        let group_target = &target[t..t + nt];
        let linear = group_target.iter().fold(SymExpr::constant(0), |sum, d| {
            sum * to[*d].clone() + at[*d].clone()
        });
        let group_source = &source[s..s + ns];
        let mut stride = SymExpr::constant(1);
        for (n, d) in group_source.iter().enumerate().rev() {
            let quotient = linear.floor_div(&stride);
            result[*d] = if n == 0 {
                quotient
            } else {
                quotient.modulo(&from[*d])
            };
            stride = stride * from[*d].clone();
        }
        (s, t) = (s + ns, t + nt);
    }
    result
}

/// How many leading dimensions of both form the smallest group of equal products (all, if none does).
fn group(from: &[SymExpr], source: &[usize], to: &[SymExpr], target: &[usize]) -> (usize, usize) {
    let product =
        |shape: &[SymExpr], dims: &[usize]| SymExpr::product(dims.iter().map(|d| &shape[*d]));
    for total in 2..source.len() + target.len() {
        for ns in 1..total.min(source.len() + 1) {
            let nt = total - ns;
            if nt <= target.len() && product(from, &source[..ns]) == product(to, &target[..nt]) {
                return (ns, nt);
            }
        }
    }
    (source.len(), target.len())
}

/// `permute`: `out[i_order[0], i_order[1], …] = x[i_0, i_1, …]`, dimension `d` of the result is
/// dimension `order[d]` of the input.
///
/// Attribute `order: Ints`. Gradient: the inverse permutation. Source: ONNX Transpose-21,
/// `torch.permute`.
#[derive(Debug)]
pub struct Permute;

fn order(call: &Call) -> Result<Vec<usize>, OpError> {
    let rank = call.input(0)?.rank();
    let given = call.ints("order")?;
    let order = given
        .iter()
        .map(|a| crate::shape_rules::axis(call, *a, rank))
        .collect::<Result<Vec<_>, _>>()?;
    if order.len() != rank || (0..rank).any(|d| !order.contains(&d)) {
        return Err(call.shape_error(format!(
            "order {given:?} is not a permutation of the {rank} dimensions"
        )));
    }
    Ok(order)
}

fn inverse(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    for (d, source) in order.iter().enumerate() {
        inverse[*source] = d;
    }
    inverse
}

impl Op for Permute {
    fn name(&self) -> &'static str {
        "permute"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let x = call.input(0)?;
        let shape = order(call)?.iter().map(|d| x.shape[*d].clone()).collect();
        Ok(vec![TensorType::new(x.dtype, shape)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let x = required(call, inputs, 0)?;
        let order = order(call)?;
        let shape: Vec<_> = order.iter().map(|d| x.shape[*d]).collect();
        Ok(vec![rearrange(x, &shape, |index| {
            let mut source = vec![0; order.len()];
            for (d, from) in order.iter().enumerate() {
                source[*from] = index[d];
            }
            Some(ravel(&source, &x.shape))
        })])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let x = call.input_id(0)?;
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let inverse = inverse(&order(call)?);
        let shape = builder.shape(out);
        builder.map_over(&shape, out, Expr::In(0), |i| {
            vec![Memlet::new(x, inverse.iter().map(|d| i[*d].clone()))]
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        let back = inverse(&order(&g.call)?);
        let back = Attr::Ints(back.into_iter().map(|d| d as i64).collect());
        Ok(g.only(0, builder.op1("permute", &[dy], attrs([("order", back)]))?))
    }

    fn is_movement(&self) -> bool {
        true
    }

    fn samples(&self) -> Vec<Sample> {
        let order = |order: &[i64]| attrs([("order", Attr::Ints(order.to_vec()))]);
        vec![
            Sample::new("transpose", &[&[2, 3]], order(&[1, 0])),
            Sample::new("rotate", &[&[2, 3, 4, 5]], order(&[1, 2, -1, 0])),
        ]
    }
}

/// `expand`: broadcasts to a larger shape, as in NumPy.
///
/// Attribute `shape: Sizes`. Gradient: sum over the stretched dimensions. Source: ONNX Expand-13,
/// `torch.Tensor.expand`.
#[derive(Debug)]
pub struct Expand;

impl Op for Expand {
    fn name(&self) -> &'static str {
        "expand"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let x = call.input(0)?;
        let shape = call.sizes("shape")?;
        match broadcast(&x.shape, &shape) {
            Some(both) if both == shape => Ok(vec![TensorType::new(x.dtype, shape)]),
            _ => Err(call.shape_error(format!(
                "shape {} does not broadcast to {}",
                display(&x.shape),
                display(&shape)
            ))),
        }
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let x = required(call, inputs, 0)?;
        let shape = constant_shape(call, &call.sizes("shape")?)?;
        Ok(vec![rearrange(x, &shape, |index| {
            Some(broadcast_offset(&x.shape, index))
        })])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let x = call.input_id(0)?;
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let (from, to) = (builder.shape(x), builder.shape(out));
        builder.map_over(&to, out, Expr::In(0), |i| {
            vec![broadcast_memlet(x, &from, i)]
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        match g.dy(0) {
            Some(dy) if g.wants(0) => Ok(g.only(0, sum_to(builder, dy, &g.call.input(0)?.shape)?)),
            _ => Ok(g.nothing()),
        }
    }

    fn is_movement(&self) -> bool {
        true
    }

    fn samples(&self) -> Vec<Sample> {
        let to = |shape: &[i64]| attrs([("shape", Attr::Sizes(crate::shape_rules::fixed(shape)))]);
        vec![
            Sample::new("middle dimension", &[&[2, 1, 3]], to(&[2, 4, 3])),
            Sample::new("new dimensions", &[&[3, 1]], to(&[2, 2, 3, 4])),
            Sample::new("a scalar", &[&[]], to(&[2, 3])),
        ]
    }
}

/// `flip`: reverses the order along axes.
///
/// Attribute `axes: Ints` (absent or empty: all). Gradient: flip. Source: `torch.flip`.
#[derive(Debug)]
pub struct Flip;

impl Op for Flip {
    fn name(&self) -> &'static str {
        "flip"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let x = call.input(0)?;
        axes(call, x.rank())?;
        Ok(vec![x.clone()])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let x = required(call, inputs, 0)?;
        let flipped = axes(call, x.shape.len())?;
        Ok(vec![rearrange(x, &x.shape, |index| {
            let mut source = index.to_vec();
            for d in &flipped {
                source[*d] = x.shape[*d] - 1 - index[*d];
            }
            Some(ravel(&source, &x.shape))
        })])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let x = call.input_id(0)?;
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let shape = builder.shape(out);
        let flipped = axes(call, shape.len())?;
        builder.map_over(&shape, out, Expr::In(0), |i| {
            let source = i.iter().enumerate().map(|(d, index)| {
                if flipped.contains(&d) {
                    shape[d].clone() - 1 - index.clone()
                } else {
                    index.clone()
                }
            });
            vec![Memlet::new(x, source)]
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        let back = builder.op1("flip", &[dy], g.call.library.attrs.clone())?;
        Ok(g.only(0, back))
    }

    fn is_movement(&self) -> bool {
        true
    }

    fn samples(&self) -> Vec<Sample> {
        vec![
            Sample::new("all axes", &[&[2, 3]], attrs([])),
            Sample::new(
                "last axis",
                &[&[2, 3, 4]],
                attrs([("axes", Attr::Ints(vec![-1]))]),
            ),
        ]
    }
}

/// `tile`: repeats the whole value along each dimension, `out[i…] = x[i mod n …]`.
///
/// Attribute `repeats: Sizes`, at least as many as dimensions (missing leading dimensions are 1).
/// Gradient: sum over the repetitions. Source: ONNX Tile-13, `torch.Tensor.repeat`.
#[derive(Debug)]
pub struct Tile;

/// The input's shape with leading ones up to the number of repeats, and the repeats.
fn tile_sizes(call: &Call) -> Result<(Vec<SymExpr>, Vec<SymExpr>), OpError> {
    let from = &call.input(0)?.shape;
    let repeats = call.sizes("repeats")?;
    let Some(missing) = repeats.len().checked_sub(from.len()) else {
        return Err(call.shape_error(format!(
            "{} repeats are given for shape {}",
            repeats.len(),
            display(from)
        )));
    };
    let mut shape = vec![SymExpr::constant(1); missing];
    shape.extend(from.iter().cloned());
    Ok((shape, repeats))
}

fn interleave(first: &[SymExpr], second: &[SymExpr]) -> Vec<SymExpr> {
    let pairs = first.iter().zip(second);
    pairs.flat_map(|(a, b)| [a.clone(), b.clone()]).collect()
}

impl Op for Tile {
    fn name(&self) -> &'static str {
        "tile"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let (shape, repeats) = tile_sizes(call)?;
        let sizes = shape.into_iter().zip(repeats).map(|(n, r)| n * r);
        Ok(vec![TensorType::new(call.input(0)?.dtype, sizes.collect())])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let x = required(call, inputs, 0)?;
        let shape = constant_shape(call, &self.infer(call)?[0].shape)?;
        let missing = shape.len() - x.shape.len();
        Ok(vec![rearrange(x, &shape, |index| {
            let wrapped = index[missing..].iter().zip(&x.shape).map(|(i, n)| i % n);
            Some(ravel(&wrapped.collect::<Vec<_>>(), &x.shape))
        })])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let (shape, repeats) = tile_sizes(call)?;
        let ones = vec![SymExpr::constant(1); shape.len()];
        let column = reshape(builder, call.input_id(0)?, &interleave(&ones, &shape))?;
        let wide = expand_to(builder, column, &interleave(&repeats, &shape))?;
        reshape_into(builder, wide, out);
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        let (shape, repeats) = tile_sizes(&g.call)?;
        let split = reshape(builder, dy, &interleave(&repeats, &shape))?;
        let ones = vec![SymExpr::constant(1); shape.len()];
        let summed = sum_to(builder, split, &interleave(&ones, &shape))?;
        Ok(g.only(0, reshape(builder, summed, &g.call.input(0)?.shape)?))
    }

    fn is_movement(&self) -> bool {
        true
    }

    fn samples(&self) -> Vec<Sample> {
        let repeats = |n: &[i64]| attrs([("repeats", Attr::Sizes(crate::shape_rules::fixed(n)))]);
        vec![
            Sample::new("both dimensions", &[&[2, 3]], repeats(&[3, 2])),
            Sample::new("a new dimension", &[&[2, 3]], repeats(&[2, 1, 2])),
        ]
    }
}

/// Appends a reshape that writes the existing container `out`.
pub fn reshape_into(builder: &mut Builder, value: ContainerId, out: ContainerId) {
    let shape = builder.shape(out);
    builder.library(graph::Library {
        op: "reshape".into(),
        attrs: attrs([("shape", Attr::Sizes(shape))]),
        inputs: vec![Some(value)],
        outputs: vec![Some(out)],
    });
}
