//! Quantization: floats as small integers with a scale and a zero point.

use super::convolution::{integer_conv, output_shape};
use super::products::centered_product;
use super::real::{Real, in_real};
use super::{Call, Inference, Operator, broadcast};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::{Tensor, Values};

pub const ROWS: &[Operator] = &[
    Operator::new("QuantizeLinear", infer_quantize, quantize),
    Operator::new("DequantizeLinear", infer_dequantize, dequantize),
    Operator::new("DynamicQuantizeLinear", infer_dynamic, dynamic),
    Operator::new("QLinearConv", infer_conv, conv),
    Operator::new("QLinearMatMul", infer_matmul, matmul),
];

/// Which scale goes with an element.
enum Spread {
    One,
    Along {
        inner: usize,
        size: usize,
    },
    Blocks {
        inner: usize,
        size: usize,
        count: usize,
        block: usize,
    },
}

impl Spread {
    fn new(call: &Call, x: &Tensor, scale: &Tensor) -> Result<Spread, String> {
        let refuse = || {
            format!(
                "a scale of sizes {:?} does not fit {:?}",
                scale.shape, x.shape
            )
        };
        let block = call.attributes.int("block_size").unwrap_or(0);
        if block <= 0 && scale.len() == 1 {
            return Ok(Spread::One);
        }
        let axis = call.axis(1, x.shape.len())?;
        let inner = x.shape[axis + 1..].iter().product();
        let size = *x.shape.get(axis).ok_or_else(refuse)?;
        if block <= 0 {
            let fits = scale.shape == [size];
            return fits
                .then_some(Spread::Along { inner, size })
                .ok_or_else(refuse);
        }
        let block = block as usize;
        let count = size.div_ceil(block);
        let mut shape = x.shape.clone();
        shape[axis] = count;
        let blocks = Spread::Blocks {
            inner,
            size,
            count,
            block,
        };
        (scale.shape == shape).then_some(blocks).ok_or_else(refuse)
    }

    fn at(&self, n: usize) -> usize {
        match *self {
            Spread::One => 0,
            Spread::Along { inner, size } => n / inner % size,
            Spread::Blocks {
                inner,
                size,
                count,
                block,
            } => (n / (inner * size) * count + n / inner % size / block) * inner + n % inner,
        }
    }
}

/// The least and greatest number of a type that is quantized to.
fn bounds(element: Element) -> Result<(f64, f64), String> {
    Ok(match element {
        Element::U8 => (0.0, 255.0),
        Element::I8 => (-128.0, 127.0),
        Element::U16 => (0.0, 65535.0),
        Element::I16 => (-32768.0, 32767.0),
        Element::I32 => (f64::from(i32::MIN), f64::from(i32::MAX)),
        other => return Err(format!("quantizing to {other} is not supported")),
    })
}

/// Zero points, zeros if none are given.
fn zeros(given: Option<&Tensor>, n: usize) -> Result<Vec<i64>, String> {
    let Some(given) = given else {
        return Ok(vec![0; n]);
    };
    let v = given.to_i64().ok_or("a zero point is not of integers")?;
    match v.len() {
        len if len == n => Ok(v),
        1 => Ok(vec![v[0]; n]),
        len => Err(format!("{len} zero points do not fit {n} scales")),
    }
}

/// A type an attribute gives by its number.
fn number(given: Option<i64>) -> Option<Result<Element, String>> {
    let number = given.filter(|n| *n != 0)?;
    let element = i32::try_from(number).ok().and_then(Element::of_number);
    Some(element.ok_or_else(|| format!("element type number {number} is not supported")))
}

pub(super) fn infer_quantize(cx: &Inference) -> Option<Vec<Fact>> {
    let element = match (cx.fact(2), number(cx.attributes.int("output_dtype"))) {
        (Some(zero), _) => zero.element,
        (None, Some(given)) => given.ok(),
        (None, None) => Some(Element::U8),
    };
    Some(vec![Fact::new(element, cx.shape(0).map(<[_]>::to_vec))])
}

pub(super) fn quantize(call: &Call) -> Result<Vec<Tensor>, String> {
    let (x, scale, zero) = (call.input(0)?, call.input(1)?, call.optional(2));
    let element = match (zero, number(call.attributes.int("output_dtype"))) {
        (Some(zero), _) => zero.element(),
        (None, Some(given)) => given?,
        (None, None) => Element::U8,
    };
    let (low, high) = bounds(element)?;
    let spread = Spread::new(call, x, scale)?;
    let zero = zeros(zero, scale.len())?;
    let y: Result<Vec<i64>, String> = in_real!(scale.element(), R => {
        let scale = R::read(scale)?;
        let x: Vec<R> = match x.element().is_float() {
            true => R::read(x)?.into_owned(),
            false => {
                let v = x.to_i64().ok_or("it is not of numbers")?;
                v.into_iter().map(|x| R::of(x as f64)).collect()
            }
        };
        let one = |(n, x): (usize, &R)| {
            let at = spread.at(n);
            let rounded = ties_even((*x / scale[at]).wide());
            (rounded + zero[at] as f64).max(low).min(high) as i64
        };
        Ok(x.iter().enumerate().map(one).collect())
    });
    Tensor::of_ints(element, &x.shape, &y?)
        .map(|y| vec![y])
        .ok_or_else(String::new)
}

fn ties_even(x: f64) -> f64 {
    x.round_ties_even()
}

pub(super) fn infer_dequantize(cx: &Inference) -> Option<Vec<Fact>> {
    let element = match number(cx.attributes.int("output_dtype")) {
        Some(given) => given.ok(),
        None => cx.element(1),
    };
    Some(vec![Fact::new(element, cx.shape(0).map(<[_]>::to_vec))])
}

pub(super) fn dequantize(call: &Call) -> Result<Vec<Tensor>, String> {
    let (x, scale) = (call.input(0)?, call.input(1)?);
    let element = match number(call.attributes.int("output_dtype")) {
        Some(given) => call.element(given?),
        None => scale.element(),
    };
    let spread = Spread::new(call, x, scale)?;
    let zero = zeros(call.optional(2), scale.len())?;
    let v = x
        .to_i64()
        .ok_or_else(|| format!("it is not defined on {}", x.element()))?;
    let y = in_real!(scale.element(), R => {
        let scale = R::read(scale)?;
        let one = |(n, x): (usize, &i64)| {
            let at = spread.at(n);
            R::of((x - zero[at]) as f64) * scale[at]
        };
        R::tensor(element, &x.shape, v.iter().enumerate().map(one).collect())
    });
    y.map(|y| vec![y])
}

fn infer_dynamic(cx: &Inference) -> Option<Vec<Fact>> {
    let shape = cx.shape(0).map(<[_]>::to_vec);
    Some(vec![
        Fact::new(Some(Element::U8), shape),
        Fact::new(Some(Element::F32), Some(Vec::new())),
        Fact::new(Some(Element::U8), Some(Vec::new())),
    ])
}

pub(super) fn dynamic(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    in_real!(x.element(), R => {
        let v = R::read(x)?;
        let low = v.iter().copied().fold(R::of(0.0), |a, b| a.min(b));
        let high = v.iter().copied().fold(R::of(0.0), |a, b| a.max(b));
        let scale = if low == high { R::of(1.0) } else { (high - low) / R::of(255.0) };
        let zero = ties_even((-low / scale).wide()).clamp(0.0, 255.0);
        let one = |x: &R| (ties_even((*x / scale).wide()) + zero).clamp(0.0, 255.0) as u8;
        Ok(vec![
            Tensor::new(&x.shape, Values::U8(v.iter().map(one).collect())),
            R::tensor(x.element(), &[], vec![scale])?,
            Tensor::new(&[], Values::U8(vec![zero as u8])),
        ])
    })
}

/// Scales as `f64`: one, or one for each of `n`.
fn scales(call: &Call, at: usize, n: usize) -> Result<Vec<f64>, String> {
    let v = call
        .input(at)?
        .to_f64()
        .ok_or("a scale is not of numbers")?;
    match v.len() {
        1 => Ok(vec![v[0]; n]),
        len if len == n => Ok(v),
        len => Err(format!("{len} scales do not fit {n}")),
    }
}

/// `sums·factor` rounded to the type of the zero point at input `at`.
fn rounded(
    call: &Call,
    at: usize,
    shape: &[usize],
    sums: &[i64],
    factor: impl Fn(usize) -> f64,
) -> Result<Vec<Tensor>, String> {
    let zero = call.input(at)?;
    let element = zero.element();
    let (low, high) = bounds(element)?;
    let zero = zero.scalar().ok_or("its zero point is not one number")?;
    let one = |(n, sum): (usize, &i64)| {
        let scaled = ties_even(*sum as f64 * factor(n)) + zero;
        scaled.max(low).min(high) as i64
    };
    let y: Vec<i64> = sums.iter().enumerate().map(one).collect();
    Tensor::of_ints(element, shape, &y)
        .map(|y| vec![y])
        .ok_or_else(String::new)
}

fn infer_conv(cx: &Inference) -> Option<Vec<Fact>> {
    Some(vec![Fact::new(cx.element(7), output_shape(cx, 0, 3))])
}

fn conv(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = (call.input(0)?, call.optional(2));
    let (shape, mut sums) = integer_conv(call, x, (call.input(3)?, call.optional(5)))?;
    let channels = shape[1].max(1);
    let image: usize = shape[2..].iter().product();
    if call.optional(8).is_some() {
        let bias = call.ints(8)?;
        if bias.len() != channels {
            return Err("its bias does not fit".to_string());
        }
        sums.iter_mut()
            .enumerate()
            .for_each(|(n, y)| *y += bias[n / image % channels]);
    }
    let weights = scales(call, 4, channels)?;
    let (of_x, of_y) = (scales(call, 1, 1)?[0], scales(call, 6, 1)?[0]);
    let factor = |n: usize| of_x * weights[n / image % channels] / of_y;
    rounded(call, 7, &shape, &sums, factor)
}

fn infer_matmul(cx: &Inference) -> Option<Vec<Fact>> {
    let (a, b) = (cx.shape(0)?, cx.shape(3)?);
    let shape = match (a.len().checked_sub(2), b.len().checked_sub(2)) {
        (Some(i), Some(j)) => {
            let mut shape = broadcast(&[&a[..i], &b[..j]], cx.unknowns)?;
            shape.extend([a[i].clone(), b[j + 1].clone()]);
            Some(shape)
        }
        _ => None,
    };
    Some(vec![Fact::new(cx.element(7), shape)])
}

fn matmul(call: &Call) -> Result<Vec<Tensor>, String> {
    let (a, b) = (call.input(0)?, call.input(3)?);
    let (shape, sums) = centered_product(a, b, call.optional(2), call.optional(5))?;
    let columns = if b.shape.len() > 1 {
        b.shape[b.shape.len() - 1]
    } else {
        1
    }
    .max(1);
    let rows = if a.shape.len() > 1 {
        a.shape[a.shape.len() - 2]
    } else {
        1
    }
    .max(1);
    let (of_a, of_b) = (scales(call, 1, rows)?, scales(call, 4, columns)?);
    let of_y = scales(call, 6, 1)?[0];
    let factor = |n: usize| of_a[n / columns % rows] * of_b[n % columns] / of_y;
    rounded(call, 7, &shape, &sums, factor)
}
