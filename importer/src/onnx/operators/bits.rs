//! Operators on the bits of integers, written as arithmetic on `i64`: a shift is a product with a power of two, and
//! a bit is the rest of a quotient by one. Nothing here has a gradient.

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::tensor::dtype_of;
use graph::{Binary, ContainerId, DType, Expr};

pub static RULES: Rules = &[
    ("BitCast", bit_cast),
    ("BitShift", shift),
    ("BitwiseAnd", |cx| together(cx, |_, _, both| both)),
    ("BitwiseNot", not),
    ("BitwiseOr", |cx| {
        together(cx, |x, y, both| x.add(y).sub(both))
    }),
    ("BitwiseXor", |cx| {
        together(cx, |x, y, both| x.add(y).sub(both.mul(Expr::int(2))))
    }),
];

/// The operands, both of one type, and how many bits it has.
fn pair(cx: &mut NodeCx) -> Result<([ContainerId; 2], DType, i64), Refusal> {
    let inputs = [cx.input(0)?, cx.input(1)?];
    let [dtype, other] = inputs.map(|id| cx.dtype(id));
    if dtype != other || !dtype.is_int() {
        return Err(Refusal(format!(
            "its inputs have types {dtype} and {other}, not one of integers"
        )));
    }
    Ok((inputs, dtype, 8 * dtype.bytes() as i64))
}

/// Integers read as another type of integers with as many bits.
fn bit_cast(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let (from, to) = (cx.dtype(x), dtype_of(cx.int("to", 0)? as i32)?);
    let is_of_bits = !from.is_float() && to.is_int() && from.bytes() == to.bytes();
    if from != to && !is_of_bits {
        return Err(Refusal(format!(
            "the bits of {from} are not read as {to}: those of floats are not computed with"
        )));
    }
    single(cx.cast(x, to)?)
}

fn wide(n: usize) -> Expr {
    Expr::In(n).cast(DType::I64)
}

fn not(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let dtype = cx.dtype(x);
    single(cx.elementwise(Expr::int(-1).sub(wide(0)).cast(dtype), &[x])?)
}

/// The result of `f` on both operands and their bitwise and.
fn together(cx: &mut NodeCx, f: fn(Expr, Expr, Expr) -> Expr) -> Values {
    let (inputs, dtype, n_bits) = pair(cx)?;
    let bit = |x: Expr, power: i64| {
        let above = Expr::binary(Binary::FloorDiv, x, Expr::int(power));
        Expr::binary(Binary::Mod, above, Expr::int(2))
    };
    let sign = |n: usize| Expr::select(wide(n).lt(Expr::int(0)), Expr::int(1), Expr::int(0));
    let mut both = Expr::int(0);
    for k in 0..n_bits {
        let (power, bits) = match k {
            // 2⁶³ itself is no number of 64 bits, so the highest bit is told by the sign.
            63 => (i64::MIN, [sign(0), sign(1)]),
            _ => (1 << k, [bit(wide(0), 1 << k), bit(wide(1), 1 << k)]),
        };
        let [x, y] = bits;
        both = both.add(x.mul(y).mul(Expr::int(power)));
    }
    let y = f(wide(0), wide(1), both).cast(dtype);
    single(cx.elementwise(y, &inputs)?)
}

/// A shift by a negative number or by all bits: to the right only the sign is left, to the left nothing.
fn shift(cx: &mut NodeCx) -> Values {
    let to_left = match cx.text("direction", "")?.as_str() {
        "LEFT" => true,
        "RIGHT" => false,
        other => return Err(Refusal(format!("its attribute `direction` is `{other}`"))),
    };
    let (inputs, dtype, n_bits) = pair(cx)?;
    let (x, n) = (wide(0), wide(1));
    let within = n
        .clone()
        .ge(Expr::int(0))
        .and(n.clone().lt(Expr::int(n_bits)));
    // In two steps, since 2⁶³ is no number of 64 bits.
    let first = n.clone().max(Expr::int(0)).min(Expr::int(62));
    let power = Expr::int(2).pow(first);
    let more = Expr::select(n.ge(Expr::int(63)), Expr::int(2), Expr::int(1));
    let (moved, rest) = if to_left {
        (x.mul(power).mul(more), Expr::int(0))
    } else {
        let quotient = Expr::binary(Binary::FloorDiv, x.clone(), power);
        let sign = Expr::select(x.lt(Expr::int(0)), Expr::int(-1), Expr::int(0));
        (Expr::binary(Binary::FloorDiv, quotient, more), sign)
    };
    let y = Expr::select(within, moved, rest).cast(dtype);
    single(cx.elementwise(y, &inputs)?)
}
