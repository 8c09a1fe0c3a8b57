//! Operators that work element by element, with broadcasting.

use super::{Call, Inference, Operator, broadcast};
use crate::fact::Fact;
use crate::tensor::{Tensor, Values};
use graph::SymExpr;

pub const ROWS: &[Operator] = &[Operator::new("Relu", super::movement::same, |call| {
    unary(
        call,
        |x| if x < 0.0 { 0.0 } else { x },
        |x| if x < 0.0 { 0.0 } else { x },
    )
})];

/// The type of the first input, sizes broadcast.
pub fn infer_broadcast(cx: &Inference) -> Option<Vec<Fact>> {
    let shapes: Option<Vec<&[SymExpr]>> = (0..cx.inputs.len()).map(|n| cx.shape(n)).collect();
    cx.like_first(shapes.and_then(|shapes| broadcast(&shapes, cx.unknowns)))
}

/// A float function of each element; halves are computed in `f32`.
pub fn unary(call: &Call, f: fn(f32) -> f32, g: fn(f64) -> f64) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let values = match &*x.values {
        Values::F32(v) => Values::F32(v.iter().map(|x| f(*x)).collect()),
        Values::F64(v) => Values::F64(v.iter().map(|x| g(*x)).collect()),
        Values::F16(v) => Values::F16(
            v.iter()
                .map(|x| half::f16::from_f32(f(x.to_f32())))
                .collect(),
        ),
        Values::BF16(v) => Values::BF16(
            v.iter()
                .map(|x| half::bf16::from_f32(f(x.to_f32())))
                .collect(),
        ),
        _ => return Err(format!("it is not defined on {}", x.element())),
    };
    Ok(vec![Tensor::new(&x.shape, values)])
}
