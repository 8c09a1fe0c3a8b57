//! Cutting and joining: Concat, Split, Slice, Pad.

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::shape_values::at_least_one;
use crate::onnx::value::{Ints, Value};
use graph::{Attr, ContainerId, SymExpr};
use ops::attrs;

pub static RULES: Rules = &[
    ("CenterCropPad", center_crop_pad),
    ("Concat", concat),
    ("Pad", pad),
    ("Slice", slice),
    ("Split", split),
];

fn concat(cx: &mut NodeCx) -> Values {
    let inputs = cx.all_inputs()?;
    let first = *inputs.first().ok_or("it has no inputs")?;
    let axis = cx.axis(cx.int("axis", 0)?, cx.rank(first))?;
    let zero = |cx: &NodeCx, id: &ContainerId| cx.shape(*id)[axis].is_zero();
    let some: Vec<_> = inputs
        .iter()
        .copied()
        .filter(|id| cx.rank(*id) > axis && !zero(cx, id))
        .collect();
    match some.as_slice() {
        [] => single(first),
        [one] => single(*one),
        all => single(cx.op1("concat", all, attrs([("axis", Attr::Int(axis as i64))]))?),
    }
}

/// Appends `x[…, start:stop:step, …]` along one axis.
fn cut(
    cx: &mut NodeCx,
    x: ContainerId,
    axis: usize,
    (start, stop, step): (SymExpr, SymExpr, i64),
) -> Result<ContainerId, Refusal> {
    let whole = start.is_zero() && stop == cx.shape(x)[axis] && step == 1;
    if whole {
        return Ok(x);
    }
    let list = attrs([
        ("axis", Attr::Int(axis as i64)),
        ("start", Attr::Sizes(vec![start])),
        ("stop", Attr::Sizes(vec![stop])),
        ("step", Attr::Int(step)),
    ]);
    cx.op1("slice", &[x], list)
}

fn slice(cx: &mut NodeCx) -> Values {
    let mut x = cx.input(0)?;
    let rank = cx.rank(x);
    let (starts, stops) = (cx.sizes(1)?, cx.sizes(2)?);
    let n = starts.len();
    let axes = cx
        .ints_of("axes", 3)?
        .unwrap_or_else(|| (0..n as i64).collect());
    let steps = cx.ints_of("steps", 4)?.unwrap_or_else(|| vec![1; n]);
    if stops.len() != n || axes.len() != n || steps.len() != n {
        return Err(Refusal(
            "its starts, ends, axes and steps differ in number".into(),
        ));
    }
    cx.axes(&axes, rank)?;
    for d in 0..n {
        let axis = cx.axis(axes[d], rank)?;
        let size = cx.shape(x)[axis].clone();
        let (mut start, mut stop, mut step) = (starts[d].clone(), stops[d].clone(), steps[d]);
        if step == 0 {
            return Err(Refusal("its step is 0".into()));
        }
        if step < 0 {
            // Counted from the end: element i is element size − 1 − i of the flipped value.
            x = cx.op1(
                "flip",
                &[x],
                attrs([("axes", Attr::Ints(vec![axis as i64]))]),
            )?;
            (start, stop) = (mirrored(&start, &size), mirrored(&stop, &size));
            step = step.checked_neg().unwrap_or(i64::MAX);
        }
        // A step beyond every size is as good as any other.
        let step = step.min(i64::from(i32::MAX));
        let start = bound(&start, &size);
        let stop = bound(&stop, &size);
        let empty = (stop.clone() - start.clone())
            .as_const()
            .is_some_and(|n| n < 0);
        let stop = if empty { start.clone() } else { stop };
        x = cut(cx, x, axis, (start, stop, step))?;
    }
    single(x)
}

/// A bound for the flipped value.
fn mirrored(at: &SymExpr, size: &SymExpr) -> SymExpr {
    match at.as_const() {
        // Far beyond either end.
        Some(n) if n <= i64::from(i32::MIN) => size.clone(),
        Some(n) if n >= i64::from(i32::MAX) => SymExpr::constant(0),
        Some(n) if n < 0 => SymExpr::constant(-1 - n),
        _ => (size.clone() - at.clone() - 1).max_with(&SymExpr::constant(0)),
    }
}

/// A bound counted from the front and clamped to the size.
fn bound(at: &SymExpr, size: &SymExpr) -> SymExpr {
    let zero = SymExpr::constant(0);
    let Some(n) = at.as_const() else {
        // A bound that follows from sizes is taken to lie within.
        return if at_least_one(&-at.clone()) {
            size.clone() + at.clone()
        } else {
            at.clone()
        };
    };
    if n >= i64::from(i32::MAX) {
        return size.clone();
    }
    if n <= i64::from(i32::MIN) {
        return zero;
    }
    let counted = if n < 0 { size.clone() + n } else { at.clone() };
    if n < 0 {
        return if at_least_one(&(counted.clone() + 1)) {
            counted
        } else {
            counted.max_with(&zero)
        };
    }
    if at_least_one(&(size.clone() - counted.clone() + 1)) {
        counted
    } else {
        counted.min_with(size)
    }
}

/// Lengths from the attribute, the second input, `num_outputs`, or equal shares.
fn split(cx: &mut NodeCx) -> Values {
    let shape = cx.input_shape(0)?;
    let axis = cx.axis(cx.int("axis", 0)?, shape.len())?;
    let size = &shape[axis];
    let n_outputs = cx.node.output.len() as i64;
    let n = cx.int("num_outputs", n_outputs)?.max(1);
    if n != n_outputs {
        return Err(Refusal(format!(
            "it has {n_outputs} outputs, and `num_outputs` is {n}"
        )));
    }
    let lengths: Vec<SymExpr> = match cx.ints("split")? {
        Some(list) => list.into_iter().map(SymExpr::constant).collect(),
        None if cx.given(1) => cx.sizes(1)?,
        None => {
            let each = size.ceil_div(&SymExpr::constant(n));
            let last = size.clone() - each.clone() * (n - 1);
            let mut all = vec![each; n as usize];
            all[n as usize - 1] = last;
            all
        }
    };
    let total = lengths
        .iter()
        .cloned()
        .fold(SymExpr::constant(0), |a, b| a + b);
    if (total.clone() - size.clone())
        .as_const()
        .is_some_and(|n| n != 0)
    {
        return Err(Refusal(format!(
            "its parts have {total} elements together, its input {size}"
        )));
    }
    if let (Value::Ints(ints), [_]) = (cx.value(0)?, shape.as_slice()) {
        return split_ints(&ints, &lengths);
    }
    let x = cx.input(0)?;
    let mut from = SymExpr::constant(0);
    let mut values = Vec::new();
    for length in lengths {
        let to = from.clone() + length;
        values.push(Value::Data(cut(cx, x, axis, (from, to.clone(), 1))?));
        from = to;
    }
    Ok(values)
}

fn split_ints(ints: &Ints, lengths: &[SymExpr]) -> Values {
    let mut rest = ints.elements.as_slice();
    let mut values = Vec::new();
    for length in lengths {
        let n = length.as_const().and_then(|n| usize::try_from(n).ok());
        let n = n
            .filter(|n| *n <= rest.len())
            .ok_or("its parts have dynamic sizes")?;
        let (part, after) = rest.split_at(n);
        let dtype = ints.dtype;
        values.push(Value::Ints(Ints {
            dtype,
            ..Ints::vector(part.to_vec())
        }));
        rest = after;
    }
    Ok(values)
}

fn pad(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let rank = cx.rank(x);
    let pads = match cx.ints("pads")? {
        Some(list) => list.into_iter().map(SymExpr::constant).collect(),
        None => cx.sizes(1)?,
    };
    let axes = match cx.ints_of("axes", 3)? {
        Some(axes) => {
            cx.axes(&axes, rank)?;
            let counted: Result<Vec<_>, _> = axes.iter().map(|a| cx.axis(*a, rank)).collect();
            counted?
        }
        None => (0..rank).collect(),
    };
    if pads.len() != 2 * axes.len() {
        return Err(Refusal(format!(
            "it has {} pads for {} dimensions",
            pads.len(),
            axes.len()
        )));
    }
    let (mut low, mut high) = (
        vec![SymExpr::constant(0); rank],
        vec![SymExpr::constant(0); rank],
    );
    for (n, axis) in axes.iter().enumerate() {
        low[*axis] = pads[n].clone();
        high[*axis] = pads[n + axes.len()].clone();
    }
    let mode = match cx.text("mode", "constant")?.as_str() {
        "constant" => "constant",
        "reflect" => "reflect",
        "edge" => "replicate",
        "wrap" => "wrap",
        other => {
            return Err(Refusal(format!(
                "padding of mode `{other}` is not supported"
            )));
        }
    };
    if low.iter().chain(&high).all(SymExpr::is_zero) {
        return single(x);
    }
    let value = cx.scalar(2)?.unwrap_or(0.0);
    let whole = cx.known(2).ok();
    let whole = whole.and_then(|ints| ints.elements.first()?.as_const());
    if whole.is_some_and(|whole| whole != value as i64) {
        return Err("it pads with an integer of more than 53 bits".into());
    }
    let list = attrs([
        ("low", Attr::Sizes(low)),
        ("high", Attr::Sizes(high)),
        ("mode", Attr::Str(mode.to_string())),
        ("value", Attr::Float(value)),
    ]);
    single(cx.op1("pad", &[x], list)?)
}

/// The middle of the input, or zeros around it: an odd element is cut or added at the end.
fn center_crop_pad(cx: &mut NodeCx) -> Values {
    let mut x = cx.input(0)?;
    let rank = cx.rank(x);
    let wanted = cx.sizes(1)?;
    let axes = cx
        .ints("axes")?
        .unwrap_or_else(|| (0..rank as i64).collect());
    if axes.len() != wanted.len() {
        return Err("its sizes and axes differ in number".into());
    }
    let zero = SymExpr::constant(0);
    let (mut low, mut high) = (vec![zero.clone(); rank], vec![zero; rank]);
    for (axis, wanted) in axes.iter().zip(&wanted) {
        let axis = cx.axis(*axis, rank)?;
        let sizes = (wanted.as_const(), cx.shape(x)[axis].as_const());
        let (Some(wanted), Some(own)) = sizes else {
            return Err("it changes a dynamic size; fix that size".into());
        };
        if wanted < 0 {
            return Err(Refusal(format!("it asks for {wanted} elements")));
        }
        if wanted <= own {
            let start = (own - wanted) / 2;
            x = cx.part(x, axis, start.into(), (start + wanted).into())?;
        } else {
            let before = (wanted - own) / 2;
            low[axis] = before.into();
            high[axis] = (wanted - own - before).into();
        }
    }
    single(cx.padded(x, (low, high), 0.0)?)
}
