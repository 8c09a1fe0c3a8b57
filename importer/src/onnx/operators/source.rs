//! Where values come from without computation: constants, ranges, copies, dropout.

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::shape_values::{fold, n_elements};
use crate::onnx::tensor::dtype_of;
use crate::onnx::value::Value;
use graph::{Attr, ContainerId, DType, Expr, Scalar, SymExpr, Symbol, Tensor};
use ops::attrs;
use std::sync::Arc;

pub static RULES: Rules = &[
    ("Bernoulli", bernoulli),
    ("Constant", constant),
    ("ConstantOfShape", constant_of_shape),
    ("Dropout", dropout),
    ("EyeLike", eye_like),
    ("Identity", identity),
    ("RandomUniformLike", random_uniform_like),
    ("Range", range),
    ("Shape", folded),
    ("Size", folded),
];

/// An initializer that is used already stays one parameter. One that is copied first is two: an
/// exporter that stores equal tensors once restores their names by such copies.
fn identity(cx: &mut NodeCx) -> Values {
    Ok(vec![match cx.made(0)? {
        Some(id) => Value::Data(id),
        None => cx.value(0)?,
    }])
}

/// Operators whose result always follows from sizes.
fn folded(cx: &mut NodeCx) -> Values {
    fold(cx)?.ok_or_else(|| "its input has no shape".into())
}

/// Integers are folded before this.
fn constant(cx: &mut NodeCx) -> Values {
    let tensor = if cx.has("value_float") {
        Tensor::from_f64(DType::F32, &[], vec![cx.float("value_float", 0.0)?])
    } else if let Some(list) = cx.floats("value_floats").filter(|_| cx.has("value_floats")) {
        Tensor::from_f64(DType::F32, &[list.len()], list)
    } else if let Some(list) = cx.ints("value_ints")? {
        Tensor::from_i64(DType::I64, &[list.len()], list)
    } else {
        let missing = "it holds no number; texts and sparse tensors are not supported";
        cx.tensor("value")?.ok_or(missing)?
    };
    Ok(vec![Value::Constant(Arc::new(tensor))])
}

fn constant_of_shape(cx: &mut NodeCx) -> Values {
    let value = match cx.tensor("value")? {
        Some(tensor) if tensor.len() == 1 => tensor,
        Some(_) => return Err("its attribute `value` is not a single number".into()),
        None => Tensor::zeros(DType::F32, &[1]),
    };
    full(cx, cx.sizes(0)?, value.dtype, value.at(0))
}

/// A value of `shape` with every element the same.
fn full(cx: &mut NodeCx, shape: Vec<SymExpr>, dtype: DType, value: Scalar) -> Values {
    let sizes: Option<Vec<usize>> = shape
        .iter()
        .map(|n| usize::try_from(n.as_const()?).ok())
        .collect();
    if let Some(sizes) = sizes.filter(|sizes| n_elements(sizes).is_some()) {
        let tensor = Tensor::filled(dtype, &sizes, value);
        return Ok(vec![Value::Constant(Arc::new(tensor))]);
    }
    let value = match value {
        Scalar::Float(x) => Attr::Float(x),
        other => Attr::Int(other.as_i64()),
    };
    let list = attrs([
        ("shape", Attr::Sizes(shape)),
        ("value", value),
        ("dtype", Attr::DType(dtype)),
    ]);
    Ok(vec![Value::Data(cx.op("full", &[], list)?[0])])
}

/// Floats below this number hold every whole number.
const WHOLE_FLOATS: f64 = (1u64 << 24) as f64;

/// `start, start + step, …` below `limit`; symbolic limits give a symbolic size.
fn range(cx: &mut NodeCx) -> Values {
    let numbers = [cx.scalar(0), cx.scalar(1), cx.scalar(2)];
    if let [Ok(Some(start)), Ok(Some(limit)), Ok(Some(step))] = numbers {
        let id = cx.input(0)?;
        let n = ((limit - start) / step).ceil().max(0.0);
        if n <= 1e6 {
            let values: Vec<f64> = (0..n as usize).map(|i| start + step * i as f64).collect();
            let tensor = Tensor::from_f64(cx.dtype(id), &[values.len()], values);
            return Ok(vec![Value::Constant(Arc::new(tensor))]);
        }
    }
    let scalar = |position: usize| {
        // A whole number of the file, as a float.
        let whole = cx.scalar(position).ok().flatten();
        let whole = whole.filter(|x| x.fract() == 0.0 && x.abs() < WHOLE_FLOATS);
        if let (Some(whole), Err(_)) = (whole, cx.known(position)) {
            return Ok((SymExpr::constant(whole as i64), None));
        }
        let ints = cx.known(position)?;
        let one = ints
            .elements
            .first()
            .cloned()
            .ok_or("one of its inputs is empty")?;
        Ok::<_, Refusal>((one, Some(ints.dtype)))
    };
    let [(start, first), (limit, second), (step, third)] = [scalar(0)?, scalar(1)?, scalar(2)?];
    let dtype = first
        .or(second)
        .or(third)
        .ok_or("it has too many elements")?;
    let step = step.as_const().filter(|s| *s > 0);
    let step = step.ok_or("its step must be a positive constant")?;
    let size = (limit - start.clone()).ceil_div(&SymExpr::constant(step));
    let list = attrs([
        ("start", Attr::Sizes(vec![start])),
        ("step", Attr::Sizes(vec![SymExpr::constant(step)])),
        ("size", Attr::Sizes(vec![size])),
        ("dtype", Attr::DType(dtype)),
    ]);
    Ok(vec![Value::Data(cx.op("iota", &[], list)?[0])])
}

/// Training mode needs a seed, which becomes an input of the graph; else it is a copy.
fn dropout(cx: &mut NodeCx) -> Values {
    let ratio = cx.scalar(1)?.unwrap_or(0.5);
    let training = cx.scalar(2)?.unwrap_or(0.0) != 0.0;
    if cx.trains(training) && ratio > 0.0 {
        let x = cx.input(0)?;
        let (seed, id) = cx.randomness();
        let list = attrs([
            ("p", Attr::Float(ratio)),
            ("id", Attr::Int(id)),
            ("mask", Attr::Bool(cx.wants(1))),
        ]);
        let outputs = cx.op("dropout", &[Some(x), Some(seed)], list)?;
        return Ok(outputs.into_iter().map(Value::Data).collect());
    }
    let mut values = vec![cx.value(0)?];
    if cx.wants(1) {
        values.extend(full(
            cx,
            cx.input_shape(0)?,
            DType::Bool,
            Scalar::Bool(true),
        )?);
    }
    Ok(values)
}

/// A number in `[0, 1)` for each element of `x`, which `In(1)`, a seed, decides together with the position.
fn uniform(cx: &mut NodeCx, x: ContainerId) -> (Expr, ContainerId) {
    let (seed, id) = cx.randomness();
    let shape = cx.shape(x);
    let index = |d: usize| SymExpr::symbol(Symbol::new(format!("i{d}")));
    let position = (0..shape.len()).fold(SymExpr::constant(0), |at, d| {
        at * shape[d].clone() + index(d)
    });
    // Keys of random nodes are as far apart as those of dropout.
    let key = Expr::In(1).add(Expr::int(id << 32));
    let uniform = Expr::Uniform(key.into(), Expr::Index(position).into());
    (uniform, seed)
}

fn dtype_like(cx: &NodeCx, x: ContainerId) -> Result<DType, Refusal> {
    Ok(match cx.int("dtype", 0)? {
        0 => cx.dtype(x),
        number => dtype_of(number as i32)?,
    })
}

/// Numbers in `[low, high)`; the values of the input do not matter.
fn random_uniform_like(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let dtype = dtype_like(cx, x)?;
    let (low, high) = (cx.float("low", 0.0)?, cx.float("high", 1.0)?);
    let (uniform, seed) = uniform(cx, x);
    let y = uniform.mul(Expr::float(high - low)).add(Expr::float(low));
    let shaped = Expr::select(Expr::In(0).eq_(Expr::In(0)), y.clone(), y);
    single(cx.elementwise(shaped.cast(dtype), &[x, seed])?)
}

/// 1 with the probability that the input gives, else 0.
fn bernoulli(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let dtype = dtype_like(cx, x)?;
    let (uniform, seed) = uniform(cx, x);
    single(cx.elementwise(uniform.lt(Expr::In(0)).cast(dtype), &[x, seed])?)
}

/// Ones where column − row is `k`.
fn eye_like(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let dtype = dtype_like(cx, x)?;
    let index = |name: &str| SymExpr::symbol(Symbol::new(name));
    let diagonal = Expr::Index(index("i1") - index("i0")).eq_(Expr::int(cx.int("k", 0)?));
    // The input only gives the shape; it stays in the expression for its size.
    let shaped = Expr::select(
        diagonal.clone(),
        diagonal.clone(),
        Expr::In(0).lt(Expr::In(0)).and(diagonal),
    );
    single(cx.elementwise(shaped.cast(dtype), &[x])?)
}
