//! Cutting and joining: slice, concat, pad.
//!
//! Rearrangements within one value are in [`crate::movement`], data-dependent indices in
//! [`crate::index`].

use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{constant, constant_shape, ravel, rearrange, required};
use crate::shape_rules::{axis, display, fixed};
use graph::{
    Attr, Builder, ContainerId, Expr, Map, Memlet, NodeKind, Scalar, Schedule, SymExpr, Tensor,
};

/// `slice`: `out[…, i, …] = x[…, start + step·i, …]` for `start + step·i < stop`.
///
/// Attributes `axis: Int`, `start` and `stop: Sizes` of one element each, `step: Int ≥ 1` (1).
/// Constant bounds may be negative (counted from the end) and are clamped to the value when its size
/// is constant too; symbolic bounds must be within it. Gradient: padding with zeros; with a step,
/// the derivative of the expansion. Source: ONNX Slice-13 (one axis), `torch.ops.aten.slice`.
#[derive(Debug)]
pub struct Slice;

struct Cut {
    axis: usize,
    start: SymExpr,
    size: SymExpr,
    step: i64,
}

fn cut(call: &Call) -> Result<Cut, OpError> {
    let x = call.input(0)?;
    let axis = axis(call, call.int("axis")?, x.rank())?;
    let size = &x.shape[axis];
    let bound = |attr: &str| match call.sizes(attr)?.as_slice() {
        [one] => Ok(within(one, size)),
        many => Err(call.shape_error(format!("`{attr}` has {} elements, not 1", many.len()))),
    };
    let (start, stop) = (bound("start")?, bound("stop")?);
    let step = call.int_or("step", 1)?;
    if step < 1 {
        return Err(call.unsupported(format!("step {step}; flip the value first")));
    }
    let extent = stop.clone() - start.clone();
    if extent.as_const().is_some_and(|n| n < 0) {
        return Err(call.shape_error(format!(
            "the slice {start}..{stop} of axis {axis} in {} is negative",
            display(&x.shape)
        )));
    }
    let size = (extent + (step - 1)).floor_div(&SymExpr::constant(step));
    Ok(Cut {
        axis,
        start,
        size,
        step,
    })
}

/// A bound counted from the front, and clamped to the size if both are numbers.
fn within(bound: &SymExpr, size: &SymExpr) -> SymExpr {
    let bound = match bound.as_const() {
        Some(n) if n < 0 => size.clone() + n,
        _ => bound.clone(),
    };
    match (bound.as_const(), size.as_const()) {
        (Some(b), Some(n)) => SymExpr::constant(b.clamp(0, n.max(0))),
        // PyTorch writes "to the end" as the largest integer.
        (Some(b), None) if b > i64::from(u32::MAX) => size.clone(),
        _ => bound,
    }
}

impl Op for Slice {
    fn name(&self) -> &'static str {
        "slice"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let cut = cut(call)?;
        let mut ty = call.input(0)?.clone();
        ty.shape[cut.axis] = cut.size;
        Ok(vec![ty])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let x = required(call, inputs, 0)?;
        let cut = cut(call)?;
        let start = constant(call, &cut.start)?;
        let mut shape = x.shape.clone();
        shape[cut.axis] = constant_shape(call, &[cut.size])?[0];
        Ok(vec![rearrange(x, &shape, |index| {
            let mut source = index.to_vec();
            source[cut.axis] = (start + cut.step * index[cut.axis] as i64) as usize;
            Some(ravel(&source, &x.shape))
        })])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let x = call.input_id(0)?;
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let cut = cut(call)?;
        let shape = builder.shape(out);
        builder.map_over(&shape, out, Expr::In(0), |i| {
            let mut source = i.to_vec();
            source[cut.axis] = i[cut.axis].clone() * cut.step + cut.start;
            vec![Memlet::new(x, source)]
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        let cut = cut(&g.call)?;
        if cut.step != 1 {
            return Ok(Gradient::Derive);
        }
        let x = g.call.input(0)?;
        let mut low = vec![SymExpr::constant(0); x.rank()];
        let mut high = low.clone();
        high[cut.axis] = x.shape[cut.axis].clone() - cut.start.clone() - cut.size;
        low[cut.axis] = cut.start;
        let amounts = attrs([("low", Attr::Sizes(low)), ("high", Attr::Sizes(high))]);
        let dx = builder.op1("pad", &[dy], amounts)?;
        Ok(g.only(0, dx))
    }

    fn is_movement(&self) -> bool {
        true
    }

    fn samples(&self) -> Vec<Sample> {
        let cut = |axis: i64, start: i64, stop: i64, step: i64| {
            slice_attrs(axis, start.into(), stop.into(), step)
        };
        vec![
            Sample::new("middle", &[&[2, 5, 3]], cut(1, 1, 4, 1)),
            Sample::new("from the end", &[&[2, 5]], cut(-1, -3, i64::MAX, 1)),
            Sample::new("every second", &[&[2, 7]], cut(1, 1, 7, 2)),
            Sample::new("nothing left out", &[&[2, 3]], cut(0, 0, 2, 1)),
        ]
    }
}

/// Attributes of a slice.
pub fn slice_attrs(axis: i64, start: SymExpr, stop: SymExpr, step: i64) -> graph::Attrs {
    attrs([
        ("axis", Attr::Int(axis)),
        ("start", Attr::Sizes(vec![start])),
        ("stop", Attr::Sizes(vec![stop])),
        ("step", Attr::Int(step)),
    ])
}

/// `concat`: the inputs one after another along an axis.
///
/// Attribute `axis: Int`. Gradient: slices. Source: ONNX Concat-13, `torch.cat`.
///
/// Expands to one group with a copy for each input, so that a fused producer can write its part in
/// place.
#[derive(Debug)]
pub struct Concat;

/// The axis, and where along it each input starts.
fn joints(call: &Call) -> Result<(usize, Vec<SymExpr>, TensorType), OpError> {
    let mut whole = call.input(0)?.clone();
    let axis = axis(call, call.int("axis")?, whole.rank())?;
    let mut starts = vec![SymExpr::constant(0)];
    for position in 1..call.inputs.len() {
        let next = call.input(position)?;
        let fits = next.rank() == whole.rank()
            && (0..whole.rank()).all(|d| d == axis || whole.shape[d] == next.shape[d]);
        if !fits {
            return Err(call.shape_error(format!(
                "input {position} of shape {} cannot follow {} along axis {axis}",
                display(&next.shape),
                display(&whole.shape)
            )));
        }
        whole.dtype = whole.dtype.promote(next.dtype);
        starts.push(whole.shape[axis].clone());
        whole.shape[axis] = whole.shape[axis].clone() + next.shape[axis].clone();
    }
    Ok((axis, starts, whole))
}

impl Op for Concat {
    fn name(&self) -> &'static str {
        "concat"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![joints(call)?.2])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let (axis, starts, whole) = joints(call)?;
        let shape = constant_shape(call, &whole.shape)?;
        let starts = constant_shape(call, &starts)?;
        let mut out = Tensor::zeros(whole.dtype, &shape);
        for (position, start) in starts.iter().enumerate() {
            let part = required(call, inputs, position)?;
            for at in 0..part.len() {
                let mut index = crate::reference::unravel(at, &part.shape);
                index[axis] += start;
                out.set(ravel(&index, &shape), part.at(at));
            }
        }
        Ok(vec![out])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let (axis, starts, _) = joints(call)?;
        let parts: Vec<ContainerId> = (0..starts.len())
            .map(|p| call.input_id(p))
            .collect::<Result<_, _>>()?;
        let outer = builder.nodes.len();
        for (part, start) in parts.into_iter().zip(starts) {
            let shape = builder.shape(part);
            builder.map_into(&shape, Expr::In(0), |i| {
                let mut target = i.to_vec();
                target[axis] = target[axis].clone() + start;
                let read = Memlet::new(part, i.iter().cloned());
                (vec![read], Memlet::new(out, target))
            });
        }
        let body = builder.nodes.split_off(outer);
        builder.push(NodeKind::Map(Map {
            params: Vec::new(),
            body,
            schedule: Schedule::Default,
        }));
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0) else {
            return Ok(g.nothing());
        };
        let (axis, starts, _) = joints(&g.call)?;
        let mut gradients = Vec::new();
        for (position, start) in starts.into_iter().enumerate() {
            if !g.wants(position) {
                gradients.push(None);
                continue;
            }
            let stop = start.clone() + g.call.input(position)?.shape[axis].clone();
            let part = builder.op1("slice", &[dy], slice_attrs(axis as i64, start, stop, 1))?;
            gradients.push(Some(part));
        }
        Ok(Gradient::Rule(gradients))
    }

    fn is_movement(&self) -> bool {
        true
    }

    fn samples(&self) -> Vec<Sample> {
        let along = |axis: i64| attrs([("axis", Attr::Int(axis))]);
        vec![
            Sample::new("three", &[&[2, 1, 3], &[2, 4, 3], &[2, 2, 3]], along(1)),
            Sample::new("two rows", &[&[2], &[3]], along(-1)),
            Sample::new("one", &[&[2, 2]], along(0)),
        ]
    }
}

/// `pad`: the value with `low` elements before and `high` elements after along each dimension;
/// negative amounts cut.
///
/// Attributes `low`, `high: Sizes` (one for each dimension), `mode: Str` (`constant`), `value: Float`
/// (0). `reflect` mirrors without repeating the edge, `replicate` repeats the edge, `wrap` starts again at
/// the other end. Gradient: `constant` cuts off the added elements; other modes differentiate the expansion.
/// Source: ONNX Pad-21 (`edge` is `replicate`), `torch.nn.functional.pad` (`circular` is `wrap`).
#[derive(Debug)]
pub struct Pad;

#[derive(Clone, Copy, PartialEq, Eq)]
enum PadMode {
    Constant,
    Reflect,
    Replicate,
    Wrap,
}

impl PadMode {
    fn new(call: &Call) -> Result<Self, OpError> {
        match call.str_or("mode", "constant".into())?.as_str() {
            "constant" => Ok(PadMode::Constant),
            "reflect" => Ok(PadMode::Reflect),
            "replicate" => Ok(PadMode::Replicate),
            "wrap" => Ok(PadMode::Wrap),
            other => Err(call.unsupported(format!("mode `{other}`"))),
        }
    }
}

fn amounts(call: &Call) -> Result<(Vec<SymExpr>, Vec<SymExpr>), OpError> {
    let rank = call.input(0)?.rank();
    let (low, high) = (call.sizes("low")?, call.sizes("high")?);
    if low.len() != rank || high.len() != rank {
        return Err(call.shape_error(format!(
            "{} low and {} high amounts for rank {rank}",
            low.len(),
            high.len()
        )));
    }
    Ok((low, high))
}

impl Op for Pad {
    fn name(&self) -> &'static str {
        "pad"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        PadMode::new(call)?;
        let (low, high) = amounts(call)?;
        let mut ty = call.input(0)?.clone();
        for (size, added) in ty.shape.iter_mut().zip(low.into_iter().zip(high)) {
            *size = size.clone() + added.0 + added.1;
        }
        Ok(vec![ty])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let x = required(call, inputs, 0)?;
        let mode = PadMode::new(call)?;
        let shape = constant_shape(call, &self.infer(call)?[0].shape)?;
        let low: Vec<i64> = amounts(call)?
            .0
            .iter()
            .map(|l| constant(call, l))
            .collect::<Result<_, _>>()?;
        let value = call.float_or("value", 0.0)?;
        let mut out = Tensor::filled(x.dtype, &shape, Scalar::Float(value));
        for at in 0..out.len() {
            let index = crate::reference::unravel(at, &shape);
            let source: Option<Vec<usize>> = (0..shape.len())
                .map(|d| padded_source(mode, index[d] as i64 - low[d], x.shape[d] as i64))
                .collect();
            if let Some(source) = source {
                out.set(at, x.at(ravel(&source, &x.shape)));
            }
        }
        Ok(vec![out])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let x = call.input_id(0)?;
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let mode = PadMode::new(call)?;
        let value = call.float_or("value", 0.0)?;
        let (low, high) = amounts(call)?;
        let (from, to) = (builder.shape(x), builder.shape(out));
        let only_cuts = low
            .iter()
            .chain(&high)
            .all(|n| n.as_const().is_some_and(|n| n <= 0));
        builder.map_over(&to, out, Expr::In(0), |i| {
            let inner = i.iter().zip(&low).map(|(i, l)| i.clone() - l.clone());
            let memlet = match mode {
                PadMode::Constant if only_cuts => Memlet::new(x, inner),
                PadMode::Constant => Memlet::new(x, inner).or_fill(value),
                _ => {
                    let at = inner.zip(&from).zip(low.iter().zip(&high));
                    Memlet::new(
                        x,
                        at.map(|((at, size), (l, h))| {
                            if l.is_zero() && h.is_zero() {
                                at
                            } else {
                                mirrored(mode, at, size)
                            }
                        }),
                    )
                }
            };
            vec![memlet]
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        if PadMode::new(&g.call)? != PadMode::Constant {
            return Ok(Gradient::Derive);
        }
        let (low, high) = amounts(&g.call)?;
        let negated = |v: Vec<SymExpr>| Attr::Sizes(v.into_iter().map(|s| -s).collect());
        let back = attrs([("low", negated(low)), ("high", negated(high))]);
        let dx = builder.op1("pad", &[dy], back)?;
        Ok(g.only(0, dx))
    }

    fn is_movement(&self) -> bool {
        true
    }

    fn samples(&self) -> Vec<Sample> {
        let by = |low: &[i64], high: &[i64], mode: &str, value: f64| {
            attrs([
                ("low", Attr::Sizes(fixed(low))),
                ("high", Attr::Sizes(fixed(high))),
                ("mode", Attr::Str(mode.into())),
                ("value", Attr::Float(value)),
            ])
        };
        let x: &[&[i64]] = &[&[3, 4]];
        vec![
            Sample::new("zeros", x, by(&[1, 2], &[0, 1], "constant", 0.0)),
            Sample::new(
                "a value and a cut",
                x,
                by(&[-1, 2], &[1, -2], "constant", 1.5),
            ),
            Sample::new("only cuts", x, by(&[-1, 0], &[0, -2], "constant", 0.0)),
            Sample::new("reflect", x, by(&[2, 0], &[1, 3], "reflect", 0.0)),
            Sample::new("replicate", x, by(&[2, 1], &[0, 3], "replicate", 0.0)),
            Sample::new("wrap", x, by(&[2, 4], &[3, 1], "wrap", 0.0)),
        ]
    }
}

/// The index inside `[0, size)` from which a padded element is copied; `None` if it is the constant.
fn padded_source(mode: PadMode, at: i64, size: i64) -> Option<usize> {
    let source = match mode {
        _ if (0..size).contains(&at) => at,
        PadMode::Constant => return None,
        PadMode::Replicate => at.clamp(0, size - 1),
        PadMode::Wrap => at.rem_euclid(size.max(1)),
        PadMode::Reflect if at < 0 => -at,
        PadMode::Reflect => 2 * (size - 1) - at,
    };
    usize::try_from(source).ok().filter(|s| *s < size as usize)
}

/// [`padded_source`] as an index expression.
fn mirrored(mode: PadMode, at: SymExpr, size: &SymExpr) -> SymExpr {
    if mode == PadMode::Wrap {
        return at.modulo(size);
    }
    let last = size.clone() - 1;
    if mode == PadMode::Replicate {
        return at.max_with(&SymExpr::constant(0)).min_with(&last);
    }
    let inside = at.max_with(&-at.clone());
    inside.min_with(&(last * 2 - inside.clone()))
}
