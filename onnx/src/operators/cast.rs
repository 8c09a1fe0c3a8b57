//! Cast and CastLike: every element in another type.

use super::symbolic;
use super::{Call, Inference, Operator, Symbolic};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::{Tensor, Values};
use bytes::Bytes;
use half::{bf16, f16};

pub const ROWS: &[Operator] = &[
    Operator::new("Cast", infer_cast, cast).symbolic(Symbolic::Own(symbolic::cast)),
    Operator::new("CastLike", infer_like, cast_like),
];

fn infer_cast(cx: &Inference) -> Option<Vec<Fact>> {
    let element = Element::of_number(cx.attributes.int("to")? as i32);
    Some(vec![Fact::new(element, cx.shape(0).map(<[_]>::to_vec))])
}

fn infer_like(cx: &Inference) -> Option<Vec<Fact>> {
    let shape = cx.shape(0).map(<[_]>::to_vec);
    Some(vec![Fact::new(cx.element(1), shape)])
}

fn cast(call: &Call) -> Result<Vec<Tensor>, String> {
    let number = call
        .attributes
        .int("to")
        .ok_or("it has no type to cast to")?;
    let to = Element::of_number(number as i32)
        .ok_or_else(|| format!("element type number {number} is not supported"))?;
    Ok(vec![converted(call.input(0)?, call.element(to))?])
}

fn cast_like(call: &Call) -> Result<Vec<Tensor>, String> {
    let to = call.input(1)?.element();
    Ok(vec![converted(call.input(0)?, to)?])
}

/// The elements in another type. Floats become integers towards zero and stay in the range of the type;
/// integers keep their low bits; NaN is true.
///
/// # Errors
/// Text that is no number, and floats as text, whose form the standard leaves open.
pub fn converted(x: &Tensor, to: Element) -> Result<Tensor, String> {
    if x.element() == to {
        return Ok(x.clone());
    }
    if x.element() == Element::String {
        return parsed(x, to);
    }
    // `$x` is a float or an integer as it is, halves as `f32`, truth values as `u8`.
    macro_rules! each {
        ($kind:ident, $x:ident => $body:expr) => {
            Values::$kind(match &*x.values {
                Values::F32(v) => v
                    .iter()
                    .map(|$x| {
                        let $x = *$x;
                        $body
                    })
                    .collect(),
                Values::F64(v) => v
                    .iter()
                    .map(|$x| {
                        let $x = *$x;
                        $body
                    })
                    .collect(),
                Values::F16(v) => v
                    .iter()
                    .map(|$x| {
                        let $x = $x.to_f32();
                        $body
                    })
                    .collect(),
                Values::BF16(v) => v
                    .iter()
                    .map(|$x| {
                        let $x = $x.to_f32();
                        $body
                    })
                    .collect(),
                Values::I8(v) => v
                    .iter()
                    .map(|$x| {
                        let $x = *$x;
                        $body
                    })
                    .collect(),
                Values::I16(v) => v
                    .iter()
                    .map(|$x| {
                        let $x = *$x;
                        $body
                    })
                    .collect(),
                Values::I32(v) => v
                    .iter()
                    .map(|$x| {
                        let $x = *$x;
                        $body
                    })
                    .collect(),
                Values::I64(v) => v
                    .iter()
                    .map(|$x| {
                        let $x = *$x;
                        $body
                    })
                    .collect(),
                Values::U8(v) => v
                    .iter()
                    .map(|$x| {
                        let $x = *$x;
                        $body
                    })
                    .collect(),
                Values::U16(v) => v
                    .iter()
                    .map(|$x| {
                        let $x = *$x;
                        $body
                    })
                    .collect(),
                Values::U32(v) => v
                    .iter()
                    .map(|$x| {
                        let $x = *$x;
                        $body
                    })
                    .collect(),
                Values::U64(v) => v
                    .iter()
                    .map(|$x| {
                        let $x = *$x;
                        $body
                    })
                    .collect(),
                Values::Bool(v) => v
                    .iter()
                    .map(|$x| {
                        let $x = u8::from(*$x);
                        $body
                    })
                    .collect(),
                Values::String(_) => Vec::new(),
            })
        };
    }
    #[allow(trivial_numeric_casts, clippy::unnecessary_cast)]
    let values = match to {
        Element::F32 => each!(F32, x => x as f32),
        Element::F64 => each!(F64, x => x as f64),
        Element::F16 => each!(F16, x => f16::from_f64(x as f64)),
        Element::BF16 => each!(BF16, x => bf16::from_f64(x as f64)),
        Element::I8 => each!(I8, x => x as i8),
        Element::I16 => each!(I16, x => x as i16),
        Element::I32 => each!(I32, x => x as i32),
        Element::I64 => each!(I64, x => x as i64),
        Element::U8 => each!(U8, x => x as u8),
        Element::U16 => each!(U16, x => x as u16),
        Element::U32 => each!(U32, x => x as u32),
        Element::U64 => each!(U64, x => x as u64),
        Element::Bool => each!(Bool, x => x as f64 != 0.0),
        Element::String if x.element().is_float() => {
            return Err("the standard leaves open how a float is written".to_string());
        }
        Element::String => each!(String, x => Bytes::from(x.to_string())),
    };
    Ok(Tensor::new(&x.shape, values))
}

fn parsed(x: &Tensor, to: Element) -> Result<Tensor, String> {
    let Values::String(texts) = &*x.values else {
        return Ok(x.clone());
    };
    let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).trim().to_string();
    let cannot = |bytes: &Bytes| format!("`{}` is no number", text(bytes));
    let made = if to.is_float() {
        let each = |b: &Bytes| text(b).parse::<f64>().map_err(|_| cannot(b));
        let numbers: Vec<f64> = texts.iter().map(each).collect::<Result<_, _>>()?;
        Tensor::floats(to, &x.shape, &numbers)
    } else {
        let each = |b: &Bytes| text(b).parse::<i64>().map_err(|_| cannot(b));
        let numbers: Vec<i64> = texts.iter().map(each).collect::<Result<_, _>>()?;
        Tensor::of_ints(to, &x.shape, &numbers)
    };
    made.ok_or_else(|| format!("text is not cast to {to}"))
}
