//! Resize: elements repeated a whole number of times, or weighted sums of elements along one dimension after the
//! other. The weights are those with which the room `onnx` evaluates the operator.

use super::contraction::contract;
use super::shape::expanded;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::{ContainerId, DType, Expr, SymExpr, Tensor};
use onnx::attributes::Attributes;
use onnx::element::Element;
use onnx::operators::{Call, Interpolation, interpolations};

pub static RULES: Rules = &[("Resize", resize)];

/// An output element that depends on at most this many input elements is their weighted sum, read where they are. If
/// it depends on more, a dimension is resized by a product with the matrix of weights.
const MOST_READS: usize = 4;

/// Elements along a dimension that is interpolated, at most.
const MOST_ALONG: f64 = 65536.0;

/// Inputs: x, region, scales, sizes. Nearest neighbours at whole factors repeat elements, whatever the sizes are; all
/// else needs numbers for the sizes that change.
fn resize(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let shape = cx.shape(x);
    let factors = match repeats(cx)? {
        true => factors(cx, &shape)?,
        false => None,
    };
    let Some(factors) = factors else {
        return interpolated(cx, x);
    };
    // They matter only for other modes, or for factors that are not whole.
    for name in [
        "cubic_coeff_a",
        "exclude_outside",
        "extrapolation_value",
        "antialias",
        "keep_aspect_ratio_policy",
    ] {
        cx.has(name);
    }
    let (mut split, mut wide, mut merged) = (Vec::new(), Vec::new(), Vec::new());
    for (size, factor) in shape.iter().zip(factors) {
        split.extend([size.clone(), SymExpr::constant(1)]);
        wide.extend([size.clone(), SymExpr::constant(factor)]);
        merged.push(size.clone() * factor);
    }
    let x = cx.reshape(x, split)?;
    let x = expanded(cx, x, wide)?;
    single(cx.reshape(x, merged)?)
}

/// Whether nearest neighbours at whole factors keep an element's own area.
fn repeats(cx: &NodeCx) -> Result<bool, Refusal> {
    let mode = cx.text("mode", "nearest")?;
    let transformation = cx.text("coordinate_transformation_mode", "half_pixel")?;
    let rounding = cx.text("nearest_mode", "round_prefer_floor")?;
    let stretches = cx.text("keep_aspect_ratio_policy", "stretch")? == "stretch";
    Ok(mode == "nearest"
        && (stretches || !cx.given(3))
        && match transformation.as_str() {
            "half_pixel" | "half_pixel_symmetric" | "pytorch_half_pixel" => {
                rounding.starts_with("round_prefer")
            }
            "asymmetric" => rounding == "floor",
            _ => false,
        })
}

fn axes(cx: &NodeCx, rank: usize) -> Result<Vec<usize>, Refusal> {
    match cx.ints("axes")? {
        Some(axes) => axes.iter().map(|a| cx.axis(*a, rank)).collect(),
        None => Ok((0..rank).collect()),
    }
}

/// Every element as the weighted sum that the standard makes of elements of the input.
fn interpolated(cx: &mut NodeCx, mut x: ContainerId) -> Values {
    // Which weights these give is known where files are evaluated.
    for name in [
        "antialias",
        "cubic_coeff_a",
        "exclude_outside",
        "extrapolation_value",
        "keep_aspect_ratio_policy",
    ] {
        cx.has(name);
    }
    let shape = cx.shape(x);
    let (fixed, inputs) = numbers(cx, &shape)?;
    let call = Call {
        node: cx.node,
        attributes: Attributes::new(cx.node),
        opset: cx.opset(),
        inputs: &inputs,
        widened: false,
    };
    let dtype = cx.dtype(x);
    for one in interpolations(&call, &fixed)? {
        let taps = one.taps.iter().flatten().map(Vec::len);
        x = match taps.max() {
            Some(1) if one.is_nearest => {
                let from = one.taps.iter().flatten().map(|taps| taps[0].0 as i64);
                let from = from.collect::<Vec<_>>();
                let from = cx.constant(Tensor::from_i64(DType::I64, &[from.len()], from));
                cx.along("gather", &[x, from], one.axis)?
            }
            _ if !dtype.is_float() => {
                return Err(Refusal(format!(
                    "elements of type {dtype} are not interpolated"
                )));
            }
            Some(n) if n <= MOST_READS => weighted(cx, x, &one, n)?,
            _ => multiplied(cx, x, &one)?,
        };
        if one.taps.iter().any(Option::is_none) {
            // What was read there does not count, not even infinities.
            let is_outside = one
                .taps
                .iter()
                .map(|taps| f64::from(u8::from(taps.is_none())));
            let is_outside = vector(cx, x, one.axis, is_outside.collect());
            let given = Expr::float(f64::from(one.extrapolation)).cast(dtype);
            let y = Expr::select(Expr::In(1).gt(Expr::float(0.0)), given, Expr::In(0));
            x = cx.elementwise(y, &[x, is_outside])?;
        }
    }
    single(x)
}

/// A constant vector along a dimension of `x`, in its type.
fn vector(cx: &mut NodeCx, x: ContainerId, axis: usize, values: Vec<f64>) -> ContainerId {
    let mut shape = vec![1; cx.rank(x)];
    shape[axis] = values.len();
    let dtype = cx.dtype(x);
    cx.constant(Tensor::from_f64(dtype, &shape, values))
}

/// Sums of `n` elements times their weights.
fn weighted(
    cx: &mut NodeCx,
    x: ContainerId,
    one: &Interpolation,
    n: usize,
) -> Result<ContainerId, Refusal> {
    // Where there are fewer, the first is read several times with a share of its weight: another element might be
    // infinite, which a weight of 0 does not take away.
    let tap = |taps: &Option<Vec<(usize, f32)>>, k: usize| {
        let taps = taps.as_deref().unwrap_or_default();
        match (taps.first(), taps.get(k)) {
            (Some(_), Some(own)) if k > 0 => *own,
            (Some((from, weight)), _) => (*from, weight / (n + 1 - taps.len()) as f32),
            (None, _) => (0, 0.0),
        }
    };
    let (mut read, mut weights) = (Vec::new(), Vec::new());
    for k in 0..n {
        let from = one.taps.iter().map(|taps| tap(taps, k).0 as i64);
        let from = from.collect::<Vec<_>>();
        let from = cx.constant(Tensor::from_i64(DType::I64, &[from.len()], from));
        read.push(cx.along("gather", &[x, from], one.axis)?);
        let weight = one.taps.iter().map(|taps| f64::from(tap(taps, k).1));
        weights.push(vector(cx, x, one.axis, weight.collect()));
    }
    let products = (0..n).map(|k| Expr::In(k).mul(Expr::In(n + k)));
    let sum = products.reduce(Expr::add).ok_or("its output is empty")?;
    cx.elementwise(sum, &[read, weights].concat())
}

/// The product with the matrix of weights `[output, input]`.
fn multiplied(
    cx: &mut NodeCx,
    x: ContainerId,
    one: &Interpolation,
) -> Result<ContainerId, Refusal> {
    let shape = cx.shape(x);
    let n_in = shape[one.axis].as_const().unwrap_or(0) as usize;
    let mut matrix = vec![0.0; one.taps.len() * n_in];
    for (row, taps) in one.taps.iter().enumerate() {
        for (at, weight) in taps.iter().flatten() {
            matrix[row * n_in + at] += f64::from(*weight);
        }
    }
    let dtype = cx.dtype(x);
    let matrix = cx.constant(Tensor::from_f64(dtype, &[one.taps.len(), n_in], matrix));
    let letters: String = ('a'..='y').take(shape.len()).collect();
    let own = &letters[one.axis..=one.axis];
    let result = letters.replace(own, "z");
    contract(cx, format!("{letters},z{own}->{result}"), &[x, matrix])
}

/// Sizes of the input as numbers, 1 for dynamic ones that stay; and the region, scales and sizes.
fn numbers(
    cx: &NodeCx,
    shape: &[SymExpr],
) -> Result<(Vec<usize>, Vec<Option<onnx::tensor::Tensor>>), Refusal> {
    let axes = axes(cx, shape.len())?;
    let mut fixed: Vec<Option<i64>> = shape.iter().map(SymExpr::as_const).collect();
    for (d, size) in fixed.iter_mut().enumerate() {
        if !axes.contains(&d) {
            size.get_or_insert(1);
        }
    }
    let mut inputs = vec![None];
    for position in 1..4 {
        if !cx.given(position) {
            inputs.push(None);
            continue;
        }
        let values = match position {
            3 => {
                let mut values = Vec::new();
                for (size, axis) in cx.sizes(3)?.iter().zip(&axes) {
                    let number = match *size == shape[*axis] {
                        true => Some(*fixed[*axis].get_or_insert(1)),
                        false => size.as_const(),
                    };
                    let number = number.ok_or("it changes a dynamic size; fix that size")?;
                    values.push(number as f64);
                }
                values
            }
            _ => cx.numbers(position)?,
        };
        if position == 2 {
            for (scale, axis) in values.iter().zip(&axes) {
                if *scale == 1.0 {
                    fixed[*axis].get_or_insert(1);
                }
            }
        }
        let tensor = onnx::tensor::Tensor::floats(Element::F64, &[values.len()], &values);
        inputs.push(tensor);
    }
    let fixed: Option<Vec<usize>> = fixed
        .into_iter()
        .map(|n| usize::try_from(n?).ok())
        .collect();
    let fixed = fixed.ok_or("it changes a dynamic size; fix that size")?;
    let given = |position: usize| inputs[position].as_ref().and_then(|t| t.to_f64());
    let sizes = given(3).unwrap_or_default();
    let scales = given(2).unwrap_or_default();
    let wanted = (0..axes.len()).map(|n| match (sizes.get(n), scales.get(n)) {
        (Some(size), _) => *size,
        (None, Some(scale)) => scale * fixed[axes[n]] as f64,
        (None, None) => 0.0,
    });
    let is_long = |(n, wanted): (usize, f64)| {
        let own = fixed[axes[n]] as f64;
        wanted != own && wanted.max(own) > MOST_ALONG
    };
    if wanted.enumerate().any(is_long) {
        return Err(Refusal(format!(
            "more than {MOST_ALONG} elements along a dimension are not resized"
        )));
    }
    Ok((fixed, inputs))
}

/// A whole factor for every dimension, from scales or from sizes; `None` if one is not whole.
fn factors(cx: &NodeCx, shape: &[SymExpr]) -> Result<Option<Vec<i64>>, Refusal> {
    let axes = axes(cx, shape.len())?;
    let given: Vec<Option<i64>> = if cx.given(3) {
        let sizes = cx.sizes(3)?;
        let factor =
            |(size, axis): (&SymExpr, &usize)| size.divide_exactly(shape.get(*axis)?)?.as_const();
        sizes.iter().zip(&axes).map(factor).collect()
    } else {
        let whole = |s: &f64| (s.fract() == 0.0 && *s >= 1.0).then_some(*s as i64);
        cx.numbers(2)?.iter().map(whole).collect()
    };
    if given.len() != axes.len() {
        return Err(Refusal(format!(
            "it has {} factors for {} dimensions",
            given.len(),
            axes.len()
        )));
    }
    let mut factors = vec![1; shape.len()];
    for (axis, factor) in axes.into_iter().zip(given) {
        match factor.filter(|f| *f >= 1) {
            Some(factor) => factors[axis] = factor,
            None => return Ok(None),
        }
    }
    Ok(Some(factors))
}
