//! Quantization: floats as small integers with a scale and a zero point, and products of such integers.
//!
//! Sums of products of integers are exact: they are computed in the narrowest float type that holds them. Nothing has a
//! gradient through an integer.

use super::contraction::{contract, product_equation};
use super::convolution::{Geometry, kernel_of, spatial};
use super::shape::expanded;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::tensor::dtype_of;
use crate::onnx::value::Value;
use graph::{Attr, ContainerId, DType, Expr, SymExpr, Unary};

pub static RULES: Rules = &[
    ("ConvInteger", conv_integer),
    ("DequantizeLinear", dequantize),
    ("DynamicQuantizeLinear", dynamic),
    ("MatMulInteger", matmul_integer),
    ("QLinearConv", qlinear_conv),
    ("QLinearMatMul", qlinear_matmul),
    ("QuantizeLinear", quantize),
];

/// Integers up to this number are exact in `f32`.
const EXACT: f64 = (1u64 << 24) as f64;
/// The largest product of two numbers of 8 bits, their zero points subtracted.
const LARGEST_PRODUCT: f64 = 255.0 * 255.0;

/// The least and greatest number of a type that is quantized to.
fn bounds(dtype: DType) -> Result<(f64, f64), Refusal> {
    Ok(match dtype {
        DType::U8 => (0.0, 255.0),
        DType::I8 => (-128.0, 127.0),
        DType::I16 => (-32768.0, 32767.0),
        DType::I32 => (f64::from(i32::MIN), f64::from(i32::MAX)),
        other => return Err(Refusal(format!("quantizing to {other} is not supported"))),
    })
}

/// `value`, a float, plus `zero`, rounded and cut to a type.
fn rounded(value: Expr, zero: Option<Expr>, dtype: DType) -> Result<Expr, Refusal> {
    let (low, high) = bounds(dtype)?;
    let mut value = Expr::unary(Unary::Round, value);
    if let Some(zero) = zero {
        value = value.add(zero);
    }
    let cut = value.max(Expr::float(low)).min(Expr::float(high));
    Ok(cut.cast(dtype))
}

/// Scales or zero points as they broadcast to `x`: one, one for each position along the axis, or one for each block.
fn spread(cx: &mut NodeCx, position: usize, x: ContainerId) -> Result<ContainerId, Refusal> {
    let given = cx.input(position)?;
    let (shape, to) = (cx.shape(given), cx.shape(x));
    let block = cx.int("block_size", 0)?;
    let axis = cx.int("axis", 1)?;
    if block <= 0 {
        let is_one = SymExpr::product(&shape).as_const() == Some(1);
        if shape.is_empty() || is_one {
            return cx.reshape(given, Vec::new());
        }
        let axis = cx.axis(axis, to.len())?;
        let mut wide = vec![SymExpr::constant(1); to.len()];
        wide[axis] = shape[0].clone();
        return cx.reshape(given, wide);
    }
    let axis = cx.axis(axis, to.len())?;
    if shape.len() != to.len() {
        return Err("its blocks do not fit its input".into());
    }
    // Each scale is repeated for its block; what goes beyond the input is cut.
    let (mut split, mut wide, mut merged) = (shape.clone(), shape.clone(), shape.clone());
    split.insert(axis + 1, 1.into());
    wide.insert(axis + 1, block.into());
    merged[axis] = shape[axis].clone() * block;
    let each = cx.reshape(given, split)?;
    let each = expanded(cx, each, wide)?;
    let each = cx.reshape(each, merged)?;
    cx.part(each, axis, 0.into(), to[axis].clone())
}

fn quantize(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let scale = spread(cx, 1, x)?;
    let float = match cx.int("precision", 0)? {
        0 => cx.dtype(scale),
        given => dtype_of(given as i32)?,
    };
    let mut inputs = vec![x, scale];
    let given = cx.int("output_dtype", 0)?;
    let dtype = if cx.given(2) {
        let zero = spread(cx, 2, x)?;
        inputs.push(zero);
        cx.dtype(zero)
    } else if given != 0 {
        dtype_of(given as i32)?
    } else {
        DType::U8
    };
    // The quotient is a value of its own, rounded to its type before it is rounded to an integer.
    let ratio = Expr::In(0).cast(float).div(Expr::In(1).cast(float));
    let ratio = cx.elementwise(ratio.cast(float), &[x, scale])?;
    let zero = (inputs.len() == 3).then(|| Expr::In(1).cast(float));
    inputs.splice(..2, [ratio]);
    single(cx.elementwise(rounded(Expr::In(0), zero, dtype)?, &inputs)?)
}

fn dequantize(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let scale = spread(cx, 1, x)?;
    let dtype = match cx.int("output_dtype", 0)? {
        0 => cx.dtype(scale),
        given => dtype_of(given as i32)?,
    };
    let mut inputs = vec![x, scale];
    let mut number = Expr::In(0).cast(DType::I32);
    if cx.given(2) {
        inputs.push(spread(cx, 2, x)?);
        number = number.sub(Expr::In(2).cast(DType::I32));
    }
    // A number of 32 bits may be beyond those of 16 bits where its product with the scale is not.
    let float = cx.dtype(scale).promote(DType::F32);
    let y = number.cast(float).mul(Expr::In(1).cast(float)).cast(dtype);
    single(cx.elementwise(y, &inputs)?)
}

/// Numbers of `u8` with the scale and zero point that the least and greatest element give.
fn dynamic(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let all: Vec<usize> = (0..cx.rank(x)).collect();
    let (low, high) = match all.is_empty() {
        true => (x, x),
        false => (
            cx.reduce(x, "min", &all, false)?,
            cx.reduce(x, "max", &all, false)?,
        ),
    };
    let zero = || Expr::float(0.0);
    let range = Expr::In(1).max(zero()).sub(Expr::In(0).min(zero()));
    let is_one_number = range.clone().eq_(zero());
    let scale = Expr::select(
        is_one_number,
        Expr::float(1.0),
        range.div(Expr::float(255.0)),
    );
    let scale = cx.elementwise(scale, &[low, high])?;
    let least = Expr::In(0).min(zero()).neg().div(Expr::In(1));
    let least = cx.elementwise(least, &[low, scale])?;
    let point = cx.elementwise(rounded(Expr::In(0), None, DType::U8)?, &[least])?;
    let ratio = cx.elementwise(Expr::In(0).div(Expr::In(1)), &[x, scale])?;
    let float = cx.dtype(x);
    let y = rounded(Expr::In(0), Some(Expr::In(1).cast(float)), DType::U8)?;
    let y = cx.elementwise(y, &[ratio, point])?;
    Ok([y, scale, point].map(Value::Data).to_vec())
}

/// The float type in which sums of `n_terms` products are exact.
fn exact(n_terms: &SymExpr) -> DType {
    match n_terms.as_const() {
        Some(n) if n as f64 * LARGEST_PRODUCT <= EXACT => DType::F32,
        _ => DType::F64,
    }
}

/// An input minus its zero point. There is one zero point, or one for each position along `axis` from the end.
fn centered(
    cx: &mut NodeCx,
    (x, zero): (usize, usize),
    from_end: usize,
    float: DType,
) -> Result<ContainerId, Refusal> {
    let x = cx.input(x)?;
    let number = Expr::In(0).cast(float);
    if !cx.given(zero) {
        return cx.elementwise(number, &[x]);
    }
    let zero = one_or_along(cx, zero, from_end)?;
    cx.elementwise(number.sub(Expr::In(1).cast(float)), &[x, zero])
}

/// A vector followed by `after` dimensions of size 1, or one number without dimensions.
fn one_or_along(cx: &mut NodeCx, position: usize, after: usize) -> Result<ContainerId, Refusal> {
    let given = cx.input(position)?;
    let mut shape = cx.shape(given);
    match (shape.len(), SymExpr::product(&shape).as_const()) {
        (_, Some(1)) => cx.reshape(given, Vec::new()),
        (1, _) => {
            shape.resize(after + 1, 1.into());
            cx.reshape(given, shape)
        }
        // It already has the dimensions of the operand.
        _ => Ok(given),
    }
}

fn integer_product(
    cx: &mut NodeCx,
    (a, a_zero): (usize, usize),
    (b, b_zero): (usize, usize),
) -> Result<ContainerId, Refusal> {
    let terms = cx.input_shape(a)?;
    let float = exact(terms.last().unwrap_or(&SymExpr::constant(1)));
    let a = centered(cx, (a, a_zero), 1, float)?;
    let b = centered(cx, (b, b_zero), 0, float)?;
    let equation = product_equation(cx.rank(a), cx.rank(b))?;
    contract(cx, equation, &[a, b])
}

fn matmul_integer(cx: &mut NodeCx) -> Values {
    let sum = integer_product(cx, (0, 2), (1, 3))?;
    single(cx.cast(sum, DType::I32)?)
}

/// Sums times scales of both operands over the result's, rounded to the type of its zero point.
fn requantized(
    cx: &mut NodeCx,
    sums: ContainerId,
    [of_a, of_b, of_y]: [ContainerId; 3],
    zero: usize,
) -> Values {
    let zero = one_or_along(cx, zero, 0)?;
    let (dtype, float) = (cx.dtype(zero), cx.dtype(sums));
    let number = |n: usize| Expr::In(n).cast(float);
    let factor = number(1).mul(number(2)).div(number(3));
    let y = rounded(Expr::In(0).mul(factor), Some(number(4)), dtype)?;
    single(cx.elementwise(y, &[sums, of_a, of_b, of_y, zero])?)
}

fn qlinear_matmul(cx: &mut NodeCx) -> Values {
    let sums = integer_product(cx, (0, 2), (3, 5))?;
    let scales = [
        one_or_along(cx, 1, 1)?,
        one_or_along(cx, 4, 0)?,
        one_or_along(cx, 6, 0)?,
    ];
    requantized(cx, sums, scales, 7)
}

fn integer_conv(
    cx: &mut NodeCx,
    (x, x_zero): (usize, usize),
    (w, w_zero): (usize, usize),
) -> Result<ContainerId, Refusal> {
    let (shape, weight) = (cx.input_shape(x)?, cx.input_shape(w)?);
    spatial(&weight)?;
    let geometry = Geometry::new(cx, kernel_of(&weight)?)?.resolve(spatial(&shape)?)?;
    let float = exact(&SymExpr::product(&weight[1..]));
    let x = centered(cx, (x, x_zero), 0, float)?;
    let w = centered(cx, (w, w_zero), weight.len() - 1, float)?;
    let mut list = geometry.attrs();
    list.insert("groups".into(), Attr::Int(cx.int("group", 1)?));
    cx.op1("conv", &[x, w], list)
}

fn conv_integer(cx: &mut NodeCx) -> Values {
    let sum = integer_conv(cx, (0, 2), (1, 3))?;
    single(cx.cast(sum, DType::I32)?)
}

fn qlinear_conv(cx: &mut NodeCx) -> Values {
    let mut sums = integer_conv(cx, (0, 2), (3, 5))?;
    if let Some(bias) = cx.optional(8)? {
        // A sum with its bias has up to 32 bits.
        sums = cx.cast(sums, DType::F64)?;
        let bias = cx.cast(bias, DType::F64)?;
        sums = cx.add_channels(sums, bias)?;
    }
    let spatial = cx.rank(sums).saturating_sub(2);
    let scales = [
        one_or_along(cx, 1, 0)?,
        one_or_along(cx, 4, spatial)?,
        one_or_along(cx, 6, 0)?,
    ];
    requantized(cx, sums, scales, 7)
}
