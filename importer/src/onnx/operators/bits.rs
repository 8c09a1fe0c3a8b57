//! Operators on the bits of integers. Nothing here has a gradient.

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::tensor::dtype_of;
use graph::{Binary, DType, Expr};

pub static RULES: Rules = &[
    ("BitCast", bit_cast),
    ("BitShift", shift),
    ("BitwiseAnd", |cx| binary(cx, Binary::BitAnd)),
    ("BitwiseNot", not),
    ("BitwiseOr", |cx| binary(cx, Binary::BitOr)),
    ("BitwiseXor", |cx| binary(cx, Binary::BitXor)),
];

/// The same bits as another type of as many bits.
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

/// An operand as `i64`, so that a cast of the result cuts off the bits that its type does not have.
fn wide(n: usize) -> Expr {
    Expr::In(n).cast(DType::I64)
}

fn not(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let flipped = Expr::binary(Binary::BitXor, wide(0), Expr::int(-1));
    let dtype = cx.dtype(x);
    single(cx.elementwise(flipped.cast(dtype), &[x])?)
}

/// A function of two operands, both of one integer type.
fn binary(cx: &mut NodeCx, f: Binary) -> Values {
    let inputs = [cx.input(0)?, cx.input(1)?];
    let [dtype, other] = inputs.map(|id| cx.dtype(id));
    if dtype != other || !dtype.is_int() {
        return Err(Refusal(format!(
            "its inputs have types {dtype} and {other}, not one of integers"
        )));
    }
    let y = Expr::binary(f, wide(0), wide(1)).cast(dtype);
    single(cx.elementwise(y, &inputs)?)
}

fn shift(cx: &mut NodeCx) -> Values {
    match cx.text("direction", "")?.as_str() {
        "LEFT" => binary(cx, Binary::Shl),
        "RIGHT" => binary(cx, Binary::Shr),
        other => Err(Refusal(format!("its attribute `direction` is `{other}`"))),
    }
}
