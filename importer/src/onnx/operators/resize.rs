//! Resize, where it repeats elements a whole number of times.

use super::shape::expanded;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::SymExpr;

pub static RULES: Rules = &[("Resize", resize)];

/// Nearest neighbours at whole factors: every way of rounding that keeps an element's own area
/// repeats it. Inputs: x, region (unused), scales, sizes.
fn resize(cx: &mut NodeCx) -> Values {
    let mode = cx.text("mode", "nearest")?;
    if mode != "nearest" {
        return Err(Refusal(format!("mode `{mode}` is not supported")));
    }
    let transformation = cx.text("coordinate_transformation_mode", "half_pixel")?;
    let rounding = cx.text("nearest_mode", "round_prefer_floor")?;
    let repeats = match transformation.as_str() {
        "half_pixel" | "half_pixel_symmetric" | "pytorch_half_pixel" => {
            rounding.starts_with("round_prefer")
        }
        "asymmetric" => rounding == "floor",
        _ => false,
    };
    if !repeats {
        return Err(Refusal(format!(
            "nearest neighbours by `{transformation}` and `{rounding}` are not supported"
        )));
    }
    // They matter only for other modes, or for factors that are not whole.
    for name in [
        "cubic_coeff_a",
        "exclude_outside",
        "extrapolation_value",
        "antialias",
    ] {
        cx.has(name);
    }
    let x = cx.input(0)?;
    let shape = cx.shape(x);
    let (mut split, mut wide, mut merged) = (Vec::new(), Vec::new(), Vec::new());
    for (size, factor) in shape.iter().zip(factors(cx, &shape)?) {
        split.extend([size.clone(), SymExpr::constant(1)]);
        wide.extend([size.clone(), SymExpr::constant(factor)]);
        merged.push(size.clone() * factor);
    }
    let x = cx.reshape(x, split)?;
    let x = expanded(cx, x, wide)?;
    single(cx.reshape(x, merged)?)
}

/// A whole factor for every dimension, from scales or from sizes.
fn factors(cx: &NodeCx, shape: &[SymExpr]) -> Result<Vec<i64>, Refusal> {
    let rank = shape.len();
    let axes = match cx.ints("axes")? {
        Some(axes) => axes
            .iter()
            .map(|a| cx.axis(*a, rank))
            .collect::<Result<Vec<_>, _>>()?,
        None => (0..rank).collect(),
    };
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
    let mut factors = vec![1; rank];
    for (axis, factor) in axes.into_iter().zip(given) {
        let whole = "only whole factors of at least 1 are supported";
        factors[axis] = factor.filter(|f| *f >= 1).ok_or(whole)?;
    }
    Ok(factors)
}
