//! Sequences of tensors whose length and positions are known: they never reach the graph, their elements do. Optional
//! values are there or not.

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::value::{Ints, Value};
use graph::{ContainerId, DType, SymExpr};

pub static RULES: Rules = &[
    ("ConcatFromSequence", concat),
    ("OptionalGetElement", |cx| Ok(vec![cx.value(0)?])),
    ("OptionalHasElement", |cx| {
        Ok(vec![Value::Ints(Ints {
            dtype: DType::Bool,
            ..Ints::scalar(i64::from(cx.given(0)).into())
        })])
    }),
    ("SequenceAt", at),
    ("SequenceConstruct", |cx| {
        let elements = cx.all_inputs()?;
        Ok(vec![Value::Sequence(elements)])
    }),
    ("SequenceEmpty", |cx| {
        cx.int("dtype", 1)?;
        Ok(vec![Value::Sequence(Vec::new())])
    }),
    ("SequenceErase", erase),
    ("SequenceInsert", insert),
    ("SequenceLength", |cx| {
        let n = elements(cx)?.len();
        Ok(vec![Value::Ints(Ints::scalar(n.into()))])
    }),
    ("SplitToSequence", split),
];

/// Most parts that a dimension is split into.
const MOST_PARTS: i64 = 1 << 12;

fn elements(cx: &NodeCx) -> Result<Vec<ContainerId>, Refusal> {
    match cx.value(0)? {
        Value::Sequence(elements) => Ok(elements),
        _ => Err("its input is not a sequence of known length".into()),
    }
}

/// A position in a sequence of `n` places, counted from the end if it is negative.
fn position(cx: &NodeCx, input: usize, n: usize) -> Result<usize, Refusal> {
    let given = cx.scalar(input)?.ok_or("its position is absent")? as i64;
    let counted = if given < 0 { given + n as i64 } else { given };
    let counted = usize::try_from(counted).ok().filter(|at| *at < n);
    counted.ok_or_else(|| Refusal(format!("position {given} is not one of {n}")))
}

fn at(cx: &mut NodeCx) -> Values {
    let elements = elements(cx)?;
    let at = position(cx, 1, elements.len())?;
    single(elements[at])
}

fn erase(cx: &mut NodeCx) -> Values {
    let mut elements = elements(cx)?;
    let at = match cx.given(1) {
        true => position(cx, 1, elements.len())?,
        false => elements
            .len()
            .checked_sub(1)
            .ok_or("its sequence is empty")?,
    };
    elements.remove(at);
    Ok(vec![Value::Sequence(elements)])
}

fn insert(cx: &mut NodeCx) -> Values {
    let mut elements = elements(cx)?;
    let element = cx.input(1)?;
    // The position may also be after the last element; a negative one is that of an existing element.
    let n = elements.len();
    let at = match cx.scalar(2) {
        _ if !cx.given(2) => n,
        Ok(Some(given)) if given == n as f64 => n,
        _ => position(cx, 2, n)?,
    };
    elements.insert(at, element);
    Ok(vec![Value::Sequence(elements)])
}

fn concat(cx: &mut NodeCx) -> Values {
    let mut elements = elements(cx)?;
    let first = *elements.first().ok_or("its sequence is empty")?;
    let is_new = cx.int("new_axis", 0)? != 0;
    let axis = cx.int("axis", 0)?;
    let axis = cx.axis(axis, cx.rank(first) + usize::from(is_new))?;
    if is_new {
        for element in &mut elements {
            let mut shape = cx.shape(*element);
            if axis > shape.len() {
                return Err("its elements have different numbers of dimensions".into());
            }
            shape.insert(axis, 1.into());
            *element = cx.reshape(*element, shape)?;
        }
    }
    match elements.as_slice() {
        [one] => single(*one),
        all => single(cx.along("concat", all, axis)?),
    }
}

/// The number of parts, if it is not too large: each part is an operator.
fn at_most(parts: i64) -> Result<i64, Refusal> {
    match parts <= MOST_PARTS {
        true => Ok(parts),
        false => Err(Refusal(format!(
            "it splits into {parts} parts; at most {MOST_PARTS} are supported"
        ))),
    }
}

/// Parts of the given lengths along the axis. Without lengths, parts of one element, which lose the dimension unless
/// `keepdims` is set.
fn split(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let shape = cx.shape(x);
    let axis = cx.axis(cx.int("axis", 0)?, shape.len())?;
    let size = shape[axis].as_const().ok_or("it splits a dynamic size")?;
    let keeps = cx.int("keepdims", 1)? != 0;
    let parts: Vec<i64> = match cx.optional_known(1)? {
        None => vec![1; usize::try_from(at_most(size)?).unwrap_or(0)],
        Some(given) => {
            let sizes = given.elements.iter().map(SymExpr::as_const);
            let sizes: Option<Vec<i64>> = sizes.collect();
            match (
                sizes.ok_or("it splits by dynamic sizes")?,
                given.shape.len(),
            ) {
                (sizes, 1) => sizes,
                (sizes, _) => {
                    let each = sizes.first().copied().filter(|n| *n > 0);
                    let each = each.ok_or("it splits into empty parts")?;
                    at_most(size / each)?;
                    let starts = (0..size).step_by(each as usize);
                    starts.map(|start| each.min(size - start)).collect()
                }
            }
        }
    };
    let total = parts.iter().try_fold(0i64, |sum, n| sum.checked_add(*n));
    if parts.iter().any(|n| *n < 0) || total != Some(size) {
        return Err(Refusal(format!("{parts:?} are not the parts of {size}")));
    }
    let drops = !keeps && !cx.given(1);
    let mut elements = Vec::new();
    let mut start = 0;
    for n in parts {
        let mut part = cx.part(x, axis, start.into(), (start + n).into())?;
        if drops {
            let mut to = shape.clone();
            to.remove(axis);
            part = cx.reshape(part, to)?;
        }
        elements.push(part);
        start += n;
    }
    Ok(vec![Value::Sequence(elements)])
}
