//! Arithmetic on integers that follow from sizes, done at import: what exporters write around
//! `Reshape`, `Expand`, `Slice` and `Range` never reaches the graph.
//!
//! A node is folded when all of its inputs are known ([`Ints`]) and the result is decided for every
//! size of at least 1; otherwise it becomes data like any other.

use super::node::{NodeCx, Refusal};
use super::proto::attribute_type;
use super::tensor::dtype_of;
use super::value::{Ints, MAX_KNOWN, Value};
use graph::{Bindings, DType, SymExpr};

/// An integer that is a sum of more terms is not known.
const MAX_TERMS: usize = 32;

/// Whether an operator gives whole numbers for whole numbers, also for floats: by arithmetic or by moving them.
fn keeps_whole(op: &str) -> bool {
    let is_arithmetic = matches!(op, "Add" | "Mul" | "Neg" | "Sub");
    let moves = matches!(op, "Concat" | "Gather" | "Reshape" | "Squeeze");
    is_arithmetic || moves || matches!(op, "Cast" | "Unsqueeze")
}

type Folded = Result<Option<Ints>, Refusal>;

/// The node's outputs, if they follow from sizes and constants.
pub fn fold(cx: &mut NodeCx) -> Result<Option<Vec<Value>>, Refusal> {
    let op = cx.node.op_type.as_str();
    match op {
        "Shape" => return shape(cx).map(|ints| Some(vec![Value::Ints(ints)])),
        "Size" => {
            let n = SymExpr::product(&cx.input_shape(0)?);
            return Ok(Some(vec![Value::Ints(Ints::scalar(n))]));
        }
        _ => {}
    }
    let mut inputs = Vec::new();
    for position in 0..cx.n_inputs() {
        inputs.push(match cx.given(position).then(|| cx.value(position)) {
            None => None,
            Some(Ok(Value::Ints(ints))) => Some(ints),
            Some(_) => return Ok(None),
        });
    }
    // Whole numbers stay exact as floats under a few operators.
    let has_floats = inputs.iter().flatten().any(|ints| ints.dtype.is_float());
    if op == "Split" || (has_floats && !keeps_whole(op)) {
        return Ok(None);
    }
    let folded = match inputs.as_slice() {
        [Some(x)] => one(cx, op, x)?,
        [Some(x), Some(y)] => two(cx, op, x, y)?,
        _ => many(cx, op, &inputs)?,
    };
    // Products of long sums would grow beyond all bounds.
    let is_short = |n: &SymExpr| n.terms().len() <= MAX_TERMS;
    let fits = |ints: &Ints| ints.elements.len() <= MAX_KNOWN && ints.elements.iter().all(is_short);
    Ok(folded.filter(fits).map(|ints| vec![Value::Ints(ints)]))
}

fn shape(cx: &NodeCx) -> Result<Ints, Refusal> {
    let sizes = cx.input_shape(0)?;
    let rank = sizes.len() as i64;
    let clamp = |at: i64| (if at < 0 { at + rank } else { at }).clamp(0, rank) as usize;
    let start = clamp(cx.int("start", 0)?);
    let end = clamp(cx.int("end", rank)?).max(start);
    Ok(Ints::vector(sizes[start..end].to_vec()))
}

fn one(cx: &NodeCx, op: &str, x: &Ints) -> Folded {
    let every = |f: &dyn Fn(&SymExpr) -> Option<SymExpr>| {
        let elements: Option<Vec<_>> = x.elements.iter().map(f).collect();
        elements.map(|elements| Ints {
            elements,
            ..x.clone()
        })
    };
    Ok(match op {
        "Cast" => {
            let dtype = dtype_of(cx.int("to", 0)? as i32)?;
            match dtype {
                DType::Bool => {
                    let truth = every(&|e| Some(truth(compare("Equal", e, &0.into())? == 0)));
                    truth.map(|t| Ints { dtype, ..t })
                }
                // Numbers of the file are folded elsewhere, which keeps floats exact.
                d if d.is_float() && x.to_tensor().is_some() => None,
                _ => Some(Ints { dtype, ..x.clone() }),
            }
        }
        "Neg" => every(&|e| Some(-e.clone())),
        "Abs" => every(&|e| Some(e.clone().max_with(&-e.clone()))),
        "Not" => every(&|e| Some(SymExpr::constant(1) - e.clone())),
        "Concat" => Some(x.clone()),
        "Transpose" => transpose(cx, x)?,
        "Squeeze" => {
            let shape = x.shape.iter().copied().filter(|n| *n != 1).collect();
            Some(Ints { shape, ..x.clone() })
        }
        "ReduceProd" | "ReduceSum" | "ReduceMax" | "ReduceMin" => reduce(cx, op, x, None)?,
        "ConstantOfShape" => constant_of_shape(cx, x)?,
        _ => None,
    })
}

fn two(cx: &NodeCx, op: &str, x: &Ints, y: &Ints) -> Folded {
    Ok(match op {
        "Add" | "Sub" | "Mul" | "Div" | "Mod" | "Min" | "Max" => {
            if op == "Mod" && cx.int("fmod", 0)? != 0 {
                return Ok(None);
            }
            pointwise(x, y, x.dtype, &|a, b| arithmetic(op, a, b))
        }
        "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" => {
            pointwise(x, y, DType::Bool, &|a, b| {
                Some(truth(compare(op, a, b)? != 0))
            })
        }
        "And" => pointwise(x, y, DType::Bool, &|a, b| Some(a.clone() * b.clone())),
        "Or" => pointwise(x, y, DType::Bool, &|a, b| Some(a.max_with(b))),
        "Gather" => gather(cx, x, y)?,
        "Concat" => concat(cx, &[x.clone(), y.clone()])?,
        "Squeeze" | "Unsqueeze" => restack(cx, op, x, y)?,
        "Reshape" => reshape(cx, x, y)?,
        "Expand" => {
            let Some(to) = y.to_tensor() else {
                return Ok(None);
            };
            let to = to
                .to_i64()
                .iter()
                .map(|n| usize::try_from(*n).ok())
                .collect();
            let Some(shape): Option<Vec<usize>> = to else {
                return Ok(None);
            };
            let Some(n) = n_elements(&shape) else {
                return Ok(None);
            };
            let ones = Ints {
                dtype: DType::I64,
                elements: vec![SymExpr::constant(1); n],
                shape,
            };
            pointwise(x, &ones, x.dtype, &|a, _| Some(a.clone()))
        }
        "ReduceProd" | "ReduceSum" | "ReduceMax" | "ReduceMin" => reduce(cx, op, x, Some(y))?,
        _ => None,
    })
}

fn many(cx: &NodeCx, op: &str, inputs: &[Option<Ints>]) -> Folded {
    let all: Option<Vec<Ints>> = inputs.iter().cloned().collect();
    Ok(match (op, inputs) {
        ("Concat", _) => match all {
            Some(all) => concat(cx, &all)?,
            None => None,
        },
        ("Where", [Some(c), Some(x), Some(y)]) => choose(c, x, y),
        ("Range", [Some(start), Some(limit), Some(step)]) => range(start, limit, step),
        ("Slice", [Some(x), Some(start), Some(stop), rest @ ..]) => {
            let rest = |n: usize| rest.get(n).cloned().flatten();
            slice(cx, x, (start, stop), rest(0), rest(1))?
        }
        ("Constant", []) => constant(cx)?,
        _ => None,
    })
}

fn truth(value: bool) -> SymExpr {
    SymExpr::constant(i64::from(value))
}

/// `a op b`, if it is the same for every size.
fn arithmetic(op: &str, a: &SymExpr, b: &SymExpr) -> Option<SymExpr> {
    Some(match op {
        "Add" => a.clone() + b.clone(),
        "Sub" => a.clone() - b.clone(),
        "Mul" => a.clone() * b.clone(),
        "Min" => a.min_with(b),
        "Max" => a.max_with(b),
        // ONNX rounds towards zero; sizes are not negative, so that is downwards.
        "Div" => match (a.as_const(), b.as_const()) {
            (_, Some(0)) => return None,
            (Some(x), Some(y)) => SymExpr::constant(x.wrapping_div(y)),
            _ if at_least_zero(a) && at_least_one(b) => a.floor_div(b),
            _ => return None,
        },
        "Mod" if b.as_const() != Some(0) => a.modulo(b),
        _ => return None,
    })
}

/// Whether `a op b` (1 or 0), if it is the same for all sizes of at least 1.
fn compare(op: &str, a: &SymExpr, b: &SymExpr) -> Option<i64> {
    let difference = a.clone() - b.clone();
    let sign = match difference.as_const() {
        Some(d) => d.signum(),
        None if at_least_one(&difference) => 1,
        None if at_least_one(&-difference) => -1,
        None => return None,
    };
    Some(i64::from(match op {
        "Equal" => sign == 0,
        "Less" => sign < 0,
        "LessOrEqual" => sign <= 0,
        "Greater" => sign > 0,
        _ => sign >= 0,
    }))
}

/// Whether the value is at least 1 for all sizes of at least 1.
pub fn at_least_one(e: &SymExpr) -> bool {
    lower_bound(e).is_some_and(|low| low >= 1)
}

fn at_least_zero(e: &SymExpr) -> bool {
    lower_bound(e).is_some_and(|low| low >= 0)
}

/// The value where all sizes are 1, if the expression is smallest there: no symbolic term is
/// subtracted.
fn lower_bound(e: &SymExpr) -> Option<i64> {
    let grows = e.terms().iter().all(|(atoms, c)| {
        let plain = atoms.iter().all(|a| matches!(a, graph::Atom::Symbol(_)));
        atoms.is_empty() || (plain && *c > 0)
    });
    let ones: Bindings = e.symbols().into_iter().map(|s| (s, 1)).collect();
    grows.then(|| e.eval(&ones).ok()).flatten()
}

fn pointwise(
    x: &Ints,
    y: &Ints,
    dtype: DType,
    f: &dyn Fn(&SymExpr, &SymExpr) -> Option<SymExpr>,
) -> Option<Ints> {
    let shape = broadcast(&x.shape, &y.shape)?;
    let n: usize = shape.iter().product();
    let at = |n: usize| f(element(x, &shape, n), element(y, &shape, n));
    let elements: Option<Vec<_>> = (0..n).map(at).collect();
    Some(Ints {
        dtype,
        elements: elements?,
        shape,
    })
}

fn choose(condition: &Ints, x: &Ints, y: &Ints) -> Option<Ints> {
    let shape = broadcast(&broadcast(&condition.shape, &x.shape)?, &y.shape)?;
    let mut elements = Vec::new();
    for n in 0..shape.iter().product() {
        let from = match element(condition, &shape, n).as_const()? {
            0 => y,
            _ => x,
        };
        elements.push(element(from, &shape, n).clone());
    }
    Some(Ints {
        dtype: x.dtype,
        shape,
        elements,
    })
}

fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let at = |s: &[usize], d: usize| (d + s.len()).checked_sub(rank).map_or(1, |i| s[i]);
    let joined: Option<Vec<usize>> = (0..rank)
        .map(|d| match (at(a, d), at(b, d)) {
            (x, y) if x == y || y == 1 => Some(x),
            (1, y) => Some(y),
            _ => None,
        })
        .collect();
    joined.filter(|shape| n_elements(shape).is_some())
}

/// The number of elements of that shape, if they are few enough to be known.
pub(super) fn n_elements(shape: &[usize]) -> Option<usize> {
    let n = shape.iter().try_fold(1usize, |p, n| p.checked_mul(*n));
    n.filter(|n| *n <= MAX_KNOWN)
}

/// The element of a broadcast operand at row-major position `n` of `shape`.
fn element<'x>(x: &'x Ints, shape: &[usize], mut n: usize) -> &'x SymExpr {
    let skip = shape.len() - x.shape.len();
    let (mut at, mut step) = (0, 1);
    for d in (0..shape.len()).rev() {
        let index = n % shape[d];
        n /= shape[d];
        if d >= skip {
            let size = x.shape[d - skip];
            at += if size == 1 { 0 } else { index * step };
            step *= size;
        }
    }
    &x.elements[at]
}

/// Sizes before, at and after an axis.
fn around(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    let (before, after) = (&shape[..axis], &shape[axis + 1..]);
    (before.iter().product(), shape[axis], after.iter().product())
}

fn gather(cx: &NodeCx, x: &Ints, index: &Ints) -> Folded {
    let axis = cx.axis(cx.int("axis", 0)?, x.shape.len())?;
    let Some(positions) = index.to_tensor() else {
        return Ok(None);
    };
    let (outer, n, inner) = around(&x.shape, axis);
    let mut elements = Vec::new();
    for o in 0..outer {
        for position in positions.to_i64() {
            let at = if position < 0 {
                position + n as i64
            } else {
                position
            };
            let Some(at) = usize::try_from(at).ok().filter(|at| *at < n) else {
                return Err(Refusal(format!(
                    "its index {position} is outside of {n} elements"
                )));
            };
            let from = (o * n + at) * inner;
            elements.extend_from_slice(&x.elements[from..from + inner]);
        }
    }
    let shape = [&x.shape[..axis], &index.shape, &x.shape[axis + 1..]].concat();
    Ok(Some(Ints {
        dtype: x.dtype,
        shape,
        elements,
    }))
}

fn concat(cx: &NodeCx, parts: &[Ints]) -> Folded {
    let Some(first) = parts.first() else {
        return Ok(None);
    };
    let rank = first.shape.len();
    let axis = cx.axis(cx.int("axis", 0)?, rank)?;
    let same = |p: &Ints| {
        p.shape.len() == rank
            && p.shape[..axis] == first.shape[..axis]
            && p.shape[axis + 1..] == first.shape[axis + 1..]
    };
    if !parts.iter().all(same) {
        return Ok(None);
    }
    let outer: usize = parts[0].shape[..axis].iter().product();
    let mut elements = Vec::new();
    for o in 0..outer {
        for part in parts {
            let run = part.elements.len() / outer;
            elements.extend_from_slice(&part.elements[o * run..(o + 1) * run]);
        }
    }
    let mut shape = parts[0].shape.clone();
    shape[axis] = parts.iter().map(|p| p.shape[axis]).sum();
    Ok(Some(Ints {
        dtype: parts[0].dtype,
        shape,
        elements,
    }))
}

fn restack(cx: &NodeCx, op: &str, x: &Ints, axes: &Ints) -> Folded {
    let Some(axes) = axes.to_tensor() else {
        return Ok(None);
    };
    let axes = axes.to_i64();
    let mut shape = x.shape.clone();
    if op == "Squeeze" {
        for axis in cx.axes(&axes, shape.len())?.into_iter().rev() {
            if shape.remove(axis) != 1 {
                return Err(Refusal(format!("its axis {axis} is not of size 1")));
            }
        }
    } else {
        for axis in cx.axes(&axes, shape.len() + axes.len())? {
            shape.insert(axis, 1);
        }
    }
    Ok(Some(Ints { shape, ..x.clone() }))
}

fn reshape(cx: &NodeCx, x: &Ints, to: &Ints) -> Folded {
    let n = x.elements.len() as i64;
    let Some(to) = to.to_tensor() else {
        return Ok(None);
    };
    let mut shape = to.to_i64();
    for (d, size) in shape.iter_mut().enumerate() {
        if *size == 0 && cx.int("allowzero", 0)? == 0 {
            *size = x.shape.get(d).map_or(0, |n| *n as i64);
        }
    }
    let given = shape.iter().filter(|n| **n != -1);
    let Some(rest) = given.copied().try_fold(1, i64::checked_mul) else {
        return Ok(None);
    };
    for size in shape.iter_mut().filter(|n| **n == -1) {
        *size = if rest == 0 { 0 } else { n / rest };
    }
    let shape: Option<Vec<usize>> = shape.iter().map(|n| usize::try_from(*n).ok()).collect();
    Ok(shape
        .filter(|s| n_elements(s) == usize::try_from(n).ok())
        .map(|shape| Ints { shape, ..x.clone() }))
}

fn range(start: &Ints, limit: &Ints, step: &Ints) -> Option<Ints> {
    let (from, step) = (start.elements.first()?, step.elements.first()?.as_const()?);
    let distance = (limit.elements.first()?.clone() - from.clone()).as_const()?;
    let n = match step.signum() {
        1 => distance.max(0).checked_add(step - 1)? / step,
        -1 => {
            distance
                .checked_neg()?
                .max(0)
                .checked_add(step.checked_neg()? - 1)?
                / -step
        }
        _ => return None,
    };
    let n = usize::try_from(n).ok().filter(|n| *n <= MAX_KNOWN)?;
    let at = |i: usize| from.clone() + step.wrapping_mul(i as i64);
    Some(Ints {
        dtype: start.dtype,
        shape: vec![n],
        elements: (0..n).map(at).collect(),
    })
}

fn transpose(cx: &NodeCx, x: &Ints) -> Folded {
    let rank = x.shape.len();
    let reversed = (0..rank as i64).rev().collect();
    let order = cx.ints("perm")?.unwrap_or(reversed);
    if order.len() != rank || cx.axes(&order, rank)?.len() != rank {
        return Ok(None);
    }
    let order: Vec<usize> = order
        .iter()
        .map(|d| cx.axis(*d, rank))
        .collect::<Result<_, _>>()?;
    let shape: Vec<usize> = order.iter().map(|d| x.shape[*d]).collect();
    let at = |n: usize| {
        let mut index = vec![0; rank];
        for (to, from) in unravel(n, &shape).into_iter().zip(&order) {
            index[*from] = to;
        }
        x.elements[ravel(&index, &x.shape)].clone()
    };
    Ok(Some(Ints {
        dtype: x.dtype,
        elements: (0..x.elements.len()).map(at).collect(),
        shape: shape.clone(),
    }))
}

/// Index of a row-major position.
fn unravel(mut n: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for d in (0..shape.len()).rev() {
        index[d] = n % shape[d];
        n /= shape[d];
    }
    index
}

/// Row-major position of an index.
fn ravel(index: &[usize], shape: &[usize]) -> usize {
    index.iter().zip(shape).fold(0, |at, (i, n)| at * n + i)
}

fn slice(
    cx: &NodeCx,
    x: &Ints,
    (start, stop): (&Ints, &Ints),
    axes: Option<Ints>,
    steps: Option<Ints>,
) -> Folded {
    let constants = |ints: &Ints| ints.to_tensor().map(|t| t.to_i64());
    let all = (0..start.elements.len() as i64).collect();
    let axes = axes.map_or(Some(all), |a| constants(&a));
    let steps = steps.map_or(Some(vec![1; start.elements.len()]), |s| constants(&s));
    let known = (constants(start), constants(stop), axes, steps);
    let (Some(start), Some(stop), Some(axes), Some(steps)) = known else {
        return Ok(None);
    };
    let n = start.len();
    if [stop.len(), axes.len(), steps.len()] != [n; 3] || steps.contains(&0) {
        return Ok(None);
    }
    let mut kept: Vec<Vec<usize>> = x.shape.iter().map(|n| (0..*n).collect()).collect();
    for d in 0..n {
        let axis = cx.axis(axes[d], x.shape.len())?;
        kept[axis] = picked(x.shape[axis] as i64, (start[d], stop[d], steps[d]));
    }
    let shape: Vec<usize> = kept.iter().map(Vec::len).collect();
    let at = |n: usize| {
        let index = unravel(n, &shape);
        let from: Vec<usize> = index.iter().zip(&kept).map(|(i, k)| k[*i]).collect();
        x.elements[ravel(&from, &x.shape)].clone()
    };
    Ok(Some(Ints {
        dtype: x.dtype,
        elements: (0..shape.iter().product()).map(at).collect(),
        shape: shape.clone(),
    }))
}

/// Positions of a slice among `n`.
fn picked(n: i64, (start, stop, step): (i64, i64, i64)) -> Vec<usize> {
    let counted = |at: i64| if at < 0 { at.saturating_add(n) } else { at };
    // Going down, one before the first element is a bound too.
    let (low, high) = if step > 0 { (0, n) } else { (-1, n - 1) };
    let stop = counted(stop).clamp(low, high.max(low));
    let mut at = counted(start).clamp(low, high.max(low));
    let mut positions = Vec::new();
    while if step > 0 { at < stop } else { at > stop } {
        positions.push(at as usize);
        at = at.saturating_add(step);
    }
    positions
}

fn reduce(cx: &NodeCx, op: &str, x: &Ints, axes: Option<&Ints>) -> Folded {
    let axes = match axes {
        Some(given) => given.to_tensor().map(|t| t.to_i64()),
        None => cx.ints("axes")?.or(Some(vec![0])),
    };
    let (Some(axes), [_]) = (axes, x.shape.as_slice()) else {
        return Ok(None);
    };
    let is_noop = axes.is_empty() && cx.int("noop_with_empty_axes", 0)? != 0;
    if is_noop || x.elements.is_empty() {
        return Ok(None);
    }
    let combine = |a: SymExpr, b: &SymExpr| match op {
        "ReduceProd" => a * b.clone(),
        "ReduceSum" => a + b.clone(),
        "ReduceMax" => a.max_with(b),
        _ => a.min_with(b),
    };
    let (first, rest) = (x.elements[0].clone(), &x.elements[1..]);
    let keep = cx.int("keepdims", 1)? != 0;
    Ok(Some(Ints {
        dtype: x.dtype,
        shape: if keep { vec![1] } else { Vec::new() },
        elements: vec![rest.iter().fold(first, combine)],
    }))
}

fn constant_of_shape(cx: &NodeCx, shape: &Ints) -> Folded {
    let value = cx.tensor("value")?.and_then(|t| Ints::of_tensor(&t));
    let (Some(value), Some(shape)) = (value, shape.to_tensor()) else {
        return Ok(None);
    };
    let shape: Option<Vec<usize>> = shape
        .to_i64()
        .iter()
        .map(|n| usize::try_from(*n).ok())
        .collect();
    let n = shape
        .as_ref()
        .and_then(|s| s.iter().try_fold(1usize, |p, n| p.checked_mul(*n)));
    let (Some(shape), Some(n), [element]) = (shape, n, value.elements.as_slice()) else {
        return Ok(None);
    };
    Ok((n <= MAX_KNOWN).then(|| Ints {
        dtype: value.dtype,
        elements: vec![element.clone(); n],
        shape,
    }))
}

/// Integers a `Constant` node spells out.
fn constant(cx: &NodeCx) -> Folded {
    let fixed = |v: &[i64]| v.iter().map(|i| SymExpr::constant(*i)).collect::<Vec<_>>();
    if let Some(list) = cx.ints("value_ints")? {
        return Ok((list.len() <= MAX_KNOWN).then(|| Ints::vector(fixed(&list))));
    }
    let is_int = |a: &super::proto::AttributeProto| matches!(a.r#type, 0 | attribute_type::INT);
    if let Some(a) = cx
        .node
        .attribute
        .iter()
        .find(|a| a.name == "value_int" && is_int(a))
    {
        return Ok(Some(Ints::scalar(SymExpr::constant(
            a.i.unwrap_or_default(),
        ))));
    }
    Ok(cx.tensor("value")?.and_then(|t| Ints::of_tensor(&t)))
}
