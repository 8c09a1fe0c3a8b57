//! Arithmetic, comparison, logic and conversion, element by element with NumPy broadcasting.

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::tensor::dtype_of;
use crate::onnx::value::Value;
use graph::{Binary, DType, Expr, Tensor, Unary};
use std::sync::Arc;

macro_rules! unary {
    ($kind:ident) => {
        |cx| unary(cx, Unary::$kind)
    };
}
macro_rules! binary {
    ($kind:ident) => {
        |cx| binary(cx, Binary::$kind)
    };
}
macro_rules! variadic {
    ($kind:ident) => {
        |cx| variadic(cx, Binary::$kind)
    };
}

pub static RULES: Rules = &[
    ("Abs", unary!(Abs)),
    ("Acos", unary!(Acos)),
    ("Acosh", unary!(Acosh)),
    ("Add", binary!(Add)),
    ("And", binary!(And)),
    ("Asin", unary!(Asin)),
    ("Asinh", unary!(Asinh)),
    ("Atan", unary!(Atan)),
    ("Atanh", unary!(Atanh)),
    ("Cast", cast),
    ("CastLike", cast_like),
    ("Ceil", unary!(Ceil)),
    ("Clip", clip),
    ("Cos", unary!(Cos)),
    ("Cosh", unary!(Cosh)),
    ("Div", div),
    ("Equal", binary!(Eq)),
    ("Erf", unary!(Erf)),
    ("Exp", unary!(Exp)),
    ("Floor", unary!(Floor)),
    ("Greater", binary!(Gt)),
    ("GreaterOrEqual", binary!(Ge)),
    ("IsInf", is_inf),
    ("IsNaN", unary!(IsNan)),
    ("Less", binary!(Lt)),
    ("LessOrEqual", binary!(Le)),
    ("Log", unary!(Log)),
    ("Max", variadic!(Max)),
    ("Mean", mean),
    ("Min", variadic!(Min)),
    ("Mod", modulo),
    ("Mul", binary!(Mul)),
    ("Neg", unary!(Neg)),
    ("Not", unary!(Not)),
    ("Or", binary!(Or)),
    ("Pow", pow),
    ("Reciprocal", unary!(Recip)),
    ("Round", unary!(Round)),
    ("Sign", unary!(Sign)),
    ("Sin", unary!(Sin)),
    ("Sinh", unary!(Sinh)),
    ("Sqrt", unary!(Sqrt)),
    ("Sub", binary!(Sub)),
    ("Sum", variadic!(Add)),
    ("Tan", unary!(Tan)),
    ("Where", select),
    ("Xor", binary!(Xor)),
];

fn unary(cx: &mut NodeCx, f: Unary) -> Values {
    let x = cx.input(0)?;
    single(cx.elementwise(Expr::unary(f, Expr::In(0)), &[x])?)
}

/// Two inputs of one type; ONNX never promotes.
fn pair(cx: &mut NodeCx) -> Result<[graph::ContainerId; 2], Refusal> {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    let (x, y) = (cx.dtype(a), cx.dtype(b));
    if x != y {
        return Err(Refusal(format!(
            "its inputs have types {x} and {y}; ONNX wants one type"
        )));
    }
    Ok([a, b])
}

fn binary(cx: &mut NodeCx, f: Binary) -> Values {
    let inputs = pair(cx)?;
    single(cx.elementwise(Expr::binary(f, Expr::In(0), Expr::In(1)), &inputs)?)
}

fn folded(cx: &mut NodeCx, f: Binary) -> Result<(Expr, Vec<graph::ContainerId>), Refusal> {
    let inputs = cx.all_inputs()?;
    let all = (1..inputs.len()).fold(Expr::In(0), |e, n| Expr::binary(f, e, Expr::In(n)));
    Ok((all, inputs))
}

fn variadic(cx: &mut NodeCx, f: Binary) -> Values {
    let (all, inputs) = folded(cx, f)?;
    single(cx.elementwise(all, &inputs)?)
}

fn mean(cx: &mut NodeCx) -> Values {
    let (sum, inputs) = folded(cx, Binary::Add)?;
    let mean = sum.mul(Expr::float(1.0 / inputs.len().max(1) as f64));
    single(cx.elementwise(mean, &inputs)?)
}

/// Integers round towards zero.
fn div(cx: &mut NodeCx) -> Values {
    let inputs = pair(cx)?;
    let (a, b) = (Expr::In(0), Expr::In(1));
    let quotient = if cx.dtype(inputs[0]).is_float() {
        a.div(b)
    } else {
        let whole = Expr::binary(Binary::FloorDiv, a.clone().abs(), b.clone().abs());
        whole.mul(a.sign().mul(b.sign()))
    };
    single(cx.elementwise(quotient, &inputs)?)
}

/// With `fmod` the sign is the dividend's, without it the divisor's.
fn modulo(cx: &mut NodeCx) -> Values {
    let fmod = cx.int("fmod", 0)? != 0;
    let inputs = pair(cx)?;
    let (a, b) = (Expr::In(0), Expr::In(1));
    let is_float = cx.dtype(inputs[0]).is_float();
    let rest = if fmod {
        let magnitude = Expr::binary(Binary::Mod, a.clone().abs(), b.clone().abs());
        let rest = magnitude.mul(a.clone().sign());
        match is_float {
            true => Expr::select(is_finite_below_infinity(&a, &b), a, rest),
            false => rest,
        }
    } else if is_float {
        // A finite number modulo infinity is itself, or infinity where the signs differ.
        let is_beyond = is_finite_below_infinity(&a, &b);
        let opposite = a.clone().mul(b.clone()).lt(Expr::float(0.0));
        let beyond = Expr::select(opposite, b.clone(), a.clone());
        Expr::select(is_beyond, beyond, Expr::binary(Binary::Mod, a, b))
    } else {
        Expr::binary(Binary::Mod, a, b)
    };
    single(cx.elementwise(rest, &inputs)?)
}

/// Whether `a` is finite and `b` infinite.
fn is_finite_below_infinity(a: &Expr, b: &Expr) -> Expr {
    let infinity = || Expr::float(f64::INFINITY);
    let is_finite = a.clone().abs().lt(infinity());
    b.clone().abs().eq_(infinity()).and(is_finite)
}

/// The exponent may be of another type; the result has the base's.
fn pow(cx: &mut NodeCx) -> Values {
    let (base, exponent) = (cx.input(0)?, cx.input(1)?);
    let dtype = cx.dtype(base);
    let known = cx.scalar(1).ok().flatten();
    if let Some(n) = known.filter(|n| (*n == 2.0 || *n == 3.0) && cx.rank(exponent) == 0) {
        let x = Expr::In(0);
        let square = x.clone().mul(x.clone());
        let power = if n == 2.0 { square } else { square.mul(x) };
        return single(cx.elementwise(power, &[base])?);
    }
    let power = if dtype.is_int() && cx.dtype(exponent).is_int() {
        // A negative power of an integer is a fraction, apart from those of 1 and −1.
        let (x, n) = (Expr::In(0), Expr::In(1));
        let is_negative = n.clone().lt(Expr::int(0));
        let is_fraction = is_negative.and(x.clone().abs().gt(Expr::int(1)));
        Expr::select(is_fraction, Expr::int(0), x.pow(n.abs()))
    } else {
        Expr::In(0).pow(Expr::In(1))
    };
    single(cx.elementwise(power.cast(dtype), &[base, exponent])?)
}

fn cast_to(cx: &mut NodeCx, dtype: DType) -> Values {
    let x = cx.input(0)?;
    single(cx.cast(x, dtype)?)
}

fn cast(cx: &mut NodeCx) -> Values {
    let dtype = dtype_of(cx.int("to", 0)? as i32)?;
    cast_to(cx, dtype)
}

/// A constant stays a constant: only the type of the other input is read.
fn cast_like(cx: &mut NodeCx) -> Values {
    let like = cx.input(1)?;
    let dtype = cx.dtype(like);
    if let Value::Constant(tensor) = cx.value(0)?
        && tensor.dtype.is_float()
        && dtype.is_float()
    {
        let rounded = tensor.to_f64().into_iter().map(|x| dtype.round(x));
        let cast = Tensor::from_f64(dtype, &tensor.shape, rounded.collect());
        return Ok(vec![Value::Constant(Arc::new(cast))]);
    }
    cast_to(cx, dtype)
}

fn clip(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    // ReLU6 arrives as a clip; the ends have no gradient there.
    let bounds = (cx.scalar(1).ok().flatten(), cx.scalar(2).ok().flatten());
    if bounds == (Some(0.0), Some(6.0)) && cx.dtype(x).is_float() {
        let relu6 = ops::activations::hardtanh(Expr::In(0), 0.0, 6.0);
        return single(cx.elementwise(relu6, &[x])?);
    }
    let mut inputs = vec![x];
    let mut y = Expr::In(0);
    for (position, bound) in [(1, Binary::Max), (2, Binary::Min)] {
        if !cx.given(position) {
            continue;
        }
        // A bound that is a number of the file stays a number; a computed bound is an input.
        let whole = cx.known(position).ok();
        let whole = whole.and_then(|ints| ints.elements.first()?.as_const());
        let limit = match (cx.scalar(position), whole) {
            (Ok(Some(number)), _) if cx.dtype(x).is_float() => Expr::float(number),
            (_, Some(number)) => Expr::int(number),
            _ => {
                inputs.push(cx.input(position)?);
                Expr::In(inputs.len() - 1)
            }
        };
        y = Expr::binary(bound, y, limit);
    }
    single(cx.elementwise(y, &inputs)?)
}

fn is_inf(cx: &mut NodeCx) -> Values {
    let up = cx.int("detect_positive", 1)? != 0;
    let down = cx.int("detect_negative", 1)? != 0;
    let x = cx.input(0)?;
    let is = |value: f64| Expr::In(0).eq_(Expr::float(value));
    let (plus, minus) = (is(f64::INFINITY), is(f64::NEG_INFINITY));
    let found = match (up, down) {
        (true, true) => plus.or(minus),
        (true, false) => plus,
        (false, true) => minus,
        (false, false) => Expr::In(0).lt(Expr::In(0)),
    };
    single(cx.elementwise(found, &[x])?)
}

fn select(cx: &mut NodeCx) -> Values {
    let inputs = cx.all_inputs()?;
    let y = Expr::select(Expr::In(0), Expr::In(1), Expr::In(2));
    single(cx.elementwise(y, &inputs)?)
}
