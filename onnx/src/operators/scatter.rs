//! Operators that write elements at looked-up places: ScatterElements, ScatterND, TensorScatter, OneHot.

use super::gather::{positions_along, positions_of_tuples};
use super::movement::same;
use super::strided::steps;
use super::{Call, Inference, Operator, Symbolic, axis, moved};
use crate::each_type;
use crate::fact::Fact;
use crate::tensor::{Item, Tensor, Values};
use graph::SymExpr;
use half::{bf16, f16};

pub const ROWS: &[Operator] = &[
    Operator::new("Scatter", same, scatter_elements).symbolic(Symbolic::Moves(&[0, 2])),
    Operator::new("ScatterElements", same, scatter_elements)
        .symbolic(Symbolic::Own(|cx| replaced(cx, scatter_elements))),
    Operator::new("ScatterND", same, scatter_nd)
        .symbolic(Symbolic::Own(|cx| replaced(cx, scatter_nd))),
    Operator::new("TensorScatter", same, write_cache),
    Operator::new("OneHot", infer_one_hot, one_hot),
];

/// Symbolic elements where they are only replaced, not combined.
fn replaced(
    cx: &Inference,
    evaluate: fn(&Call) -> Result<Vec<Tensor>, String>,
) -> Option<Vec<SymExpr>> {
    let combines = cx.attributes.text("reduction").is_some_and(|r| r != "none");
    if combines {
        return None;
    }
    moved(evaluate, cx, &[0, 2])
}

/// What is done where an element is written.
#[derive(Clone, Copy)]
enum Combine {
    Replace,
    Add,
    Mul,
    Max,
    Min,
}

fn combine(call: &Call) -> Result<Combine, String> {
    Ok(match call.attributes.text("reduction").unwrap_or("none") {
        "none" => Combine::Replace,
        "add" => Combine::Add,
        "mul" => Combine::Mul,
        "max" => Combine::Max,
        "min" => Combine::Min,
        other => return Err(format!("its reduction `{other}` is not known")),
    })
}

/// Elements that can be combined where they meet.
trait Meets: Item {
    /// `None` if the type is not computed with.
    fn meet(&self, other: &Self, how: Combine) -> Option<Self>;
}

macro_rules! meets {
    ($($t:ty: $add:expr, $mul:expr;)*) => {$(
        impl Meets for $t {
            fn meet(&self, other: &Self, how: Combine) -> Option<Self> {
                let (a, b) = (*self, *other);
                Some(match how {
                    Combine::Replace => b,
                    Combine::Add => $add(a, b),
                    Combine::Mul => $mul(a, b),
                    Combine::Max => if b > a || b != b { b } else { a },
                    Combine::Min => if b < a || b != b { b } else { a },
                })
            }
        }
    )*};
}

/// Elements that are replaced only.
macro_rules! replaces {
    ($($t:ty)*) => {$(
        impl Meets for $t {
            fn meet(&self, other: &Self, how: Combine) -> Option<Self> {
                matches!(how, Combine::Replace).then(|| other.clone())
            }
        }
    )*};
}

#[allow(clippy::eq_op)]
mod meetings {
    use super::*;
    use std::ops::{Add, Mul};

    meets!(
        f32: f32::add, f32::mul;
        f64: f64::add, f64::mul;
        f16: f16::add, f16::mul;
        bf16: bf16::add, bf16::mul;
        i8: i8::wrapping_add, i8::wrapping_mul;
        i16: i16::wrapping_add, i16::wrapping_mul;
        i32: i32::wrapping_add, i32::wrapping_mul;
        i64: i64::wrapping_add, i64::wrapping_mul;
        u8: u8::wrapping_add, u8::wrapping_mul;
        u16: u16::wrapping_add, u16::wrapping_mul;
        u32: u32::wrapping_add, u32::wrapping_mul;
        u64: u64::wrapping_add, u64::wrapping_mul;
    );
    replaces!(bool bytes::Bytes);
}

/// `x` with runs of `run` elements of `updates` written, in order, at these starts.
fn written(
    x: &Tensor,
    updates: &Tensor,
    (starts, run): (&[usize], usize),
    how: Combine,
) -> Result<Tensor, String> {
    fn each<T: Meets>(
        x: &[T],
        updates: &Tensor,
        (starts, run): (&[usize], usize),
        how: Combine,
    ) -> Option<Values> {
        let updates = T::of(&updates.values)?;
        if updates.len() != starts.len() * run {
            return None;
        }
        let mut to = x.to_vec();
        for (n, start) in starts.iter().enumerate() {
            for i in 0..run {
                to[start + i] = to[start + i].meet(&updates[n * run + i], how)?;
            }
        }
        Some(T::wrap(to))
    }
    let values = each_type!(&*x.values, v => each(v, updates, (starts, run), how));
    let values = values.ok_or_else(|| {
        let (from, to) = (&updates.shape, &x.shape);
        format!(
            "updates {from:?} of {} do not fit data {to:?} of {}",
            updates.element(),
            x.element()
        )
    })?;
    Ok(Tensor::new(&x.shape, values))
}

fn scatter_elements(call: &Call) -> Result<Vec<Tensor>, String> {
    let (x, indices, updates) = (call.input(0)?, call.input(1)?, call.input(2)?);
    let axis = call.axis(0, x.shape.len())?;
    if updates.shape != indices.shape {
        return Err(format!(
            "updates {:?} are not one per index of {:?}",
            updates.shape, indices.shape
        ));
    }
    let starts = positions_along(&x.shape, indices, axis)?;
    Ok(vec![written(x, updates, (&starts, 1), combine(call)?)?])
}

fn scatter_nd(call: &Call) -> Result<Vec<Tensor>, String> {
    let (x, indices, updates) = (call.input(0)?, call.input(1)?, call.input(2)?);
    let (starts, run) = positions_of_tuples(&x.shape, indices, 0)?;
    Ok(vec![written(x, updates, (&starts, run), combine(call)?)?])
}

fn write_cache(call: &Call) -> Result<Vec<Tensor>, String> {
    let (cache, update) = (call.input(0)?, call.input(1)?);
    let rank = cache.shape.len();
    let at = call.axis(-2, rank)?;
    let fits = update.shape.len() == rank
        && (0..rank).all(|d| d == at || update.shape[d] == cache.shape[d])
        && at > 0;
    if !fits {
        return Err(format!(
            "update {:?} does not fit {:?}",
            update.shape, cache.shape
        ));
    }
    let firsts = match call.optional(2) {
        Some(_) => call.ints(2)?,
        None => vec![0; cache.shape[0]],
    };
    let circular = call.attributes.text("mode") == Some("circular");
    let (size, length, step) = (cache.shape[at], update.shape[at], steps(&cache.shape)[at]);
    let outer: usize = cache.shape[..at].iter().product();
    let per_batch = (outer / cache.shape[0].max(1)).max(1);
    let mut starts = Vec::new();
    for o in 0..outer {
        let first = firsts
            .get(o / per_batch)
            .and_then(|n| usize::try_from(*n).ok());
        let first = first.ok_or("its write indices are missing or negative")?;
        for i in 0..length {
            let at = if circular {
                (first + i) % size
            } else {
                first + i
            };
            if at >= size {
                return Err(format!("position {at} is outside of {size}"));
            }
            starts.push((o * size + at) * step);
        }
    }
    Ok(vec![written(
        cache,
        update,
        (&starts, step),
        Combine::Replace,
    )?])
}

fn infer_one_hot(cx: &Inference) -> Option<Vec<Fact>> {
    let mut shape = cx.shape(0).map(<[_]>::to_vec);
    if let Some(shape) = &mut shape {
        let at = axis(cx.attributes.int("axis").unwrap_or(-1), shape.len() + 1)?;
        let depth = cx.ints(1).and_then(|d| d.first().cloned());
        let depth = depth.or_else(|| Some(SymExpr::constant(cx.fact(1)?.scalar()? as i64)));
        shape.insert(at, depth.unwrap_or_else(|| cx.unknown()));
    }
    Some(vec![Fact::new(cx.element(2), shape)])
}

fn one_hot(call: &Call) -> Result<Vec<Tensor>, String> {
    let (indices, values) = (call.input(0)?, call.input(2)?);
    let depth = call.input(1)?.to_f64().and_then(|d| d.first().copied());
    let (_, depth) = crate::tensor::sizes(&[depth.ok_or("its depth is missing")? as i64])?;
    let at = call.axis(-1, indices.shape.len() + 1)?;
    if values.len() != 2 {
        return Err("its values are not an off and an on value".to_string());
    }
    // Floats that are no whole number point nowhere.
    let hot = indices.to_f64().ok_or("its indices are not numbers")?;
    let hot: Vec<usize> = hot
        .into_iter()
        .map(|i| if i < 0.0 { i + depth as f64 } else { i })
        .map(|i| {
            if i >= 0.0 && i.fract() == 0.0 {
                i as usize
            } else {
                usize::MAX
            }
        })
        .collect();
    let inner: usize = indices.shape[at..].iter().product();
    let outer: usize = indices.shape[..at].iter().product();
    let mut shape = indices.shape.clone();
    shape.insert(at, depth);
    crate::tensor::room(&shape)?;
    let mut on = Vec::with_capacity(outer * depth * inner);
    for o in 0..outer {
        for i in 0..depth {
            on.extend((0..inner).map(|k| hot[o * inner + k] == i));
        }
    }
    let values = values.values.pick(on.into_iter().map(usize::from));
    Ok(vec![Tensor::new(&shape, values)])
}
