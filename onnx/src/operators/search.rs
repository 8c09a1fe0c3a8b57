//! Operators that order, count or find elements: ArgMax, TopK, Unique, NonZero.

use super::gather::picked_runs;
use super::permute::permuted;
use super::{Call, Inference, Operator, axis};
use crate::each_type;
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::{Item, Tensor, Values};
use graph::SymExpr;
use std::cmp::Ordering;

pub const ROWS: &[Operator] = &[
    Operator::new("ArgMax", infer_arg, |c| arg(c, Ordering::Greater)),
    Operator::new("ArgMin", infer_arg, |c| arg(c, Ordering::Less)),
    Operator::new("TopK", infer_top, top),
    Operator::new("Unique", infer_unique, unique),
    Operator::new("NonZero", infer_non_zero, non_zero),
];

/// Elements with an order.
pub trait Ordered: Item {
    /// Numbers by size, NaN above all; text by its bytes.
    fn order(&self, other: &Self) -> Ordering;
}

macro_rules! ordered {
    ($($t:ty)*) => {$(
        impl Ordered for $t {
            fn order(&self, other: &Self) -> Ordering {
                self.cmp(other)
            }
        }
    )*};
}

macro_rules! partly_ordered {
    ($($t:ty)*) => {$(
        impl Ordered for $t {
            fn order(&self, other: &Self) -> Ordering {
                self.partial_cmp(other)
                    .unwrap_or_else(|| self.is_nan().cmp(&other.is_nan()))
            }
        }
    )*};
}

ordered!(i8 i16 i32 i64 u8 u16 u32 u64 bool bytes::Bytes);
partly_ordered!(f32 f64 half::f16 half::bf16);

fn infer_arg(cx: &Inference) -> Option<Vec<Fact>> {
    let shape = cx.shape(0).and_then(|from| {
        let at = axis(cx.attributes.int("axis").unwrap_or(0), from.len())?;
        let mut shape = from.to_vec();
        match cx.attributes.int("keepdims").unwrap_or(1) != 0 {
            true => *shape.get_mut(at)? = SymExpr::constant(1),
            false => drop(shape.remove(at)),
        }
        Some(shape)
    });
    Some(vec![Fact::new(Some(Element::I64), shape)])
}

/// Sizes before, at and after an axis.
fn around(shape: &[usize], axis: usize) -> Result<(usize, usize, usize), String> {
    let n = *shape.get(axis).ok_or("its data is a scalar")?;
    let (before, after) = (&shape[..axis], &shape[axis + 1..]);
    Ok((before.iter().product(), n, after.iter().product()))
}

fn arg(call: &Call, wins: Ordering) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let at = call.axis(0, x.shape.len())?;
    let (outer, n, inner) = around(&x.shape, at)?;
    if n == 0 {
        return Err("there is no element to choose from".to_string());
    }
    let last = call.attributes.flag("select_last_index");
    fn best<T: Ordered>(
        v: &[T],
        (first, step, n): (usize, usize, usize),
        wins: Ordering,
        last: bool,
    ) -> i64 {
        let mut best = 0;
        for i in 1..n {
            let order = v[first + i * step].order(&v[first + best * step]);
            if order == wins || (last && order == Ordering::Equal) {
                best = i;
            }
        }
        best as i64
    }
    let mut found = Vec::with_capacity(outer * inner);
    for o in 0..outer {
        for i in 0..inner {
            let walk = (o * n * inner + i, inner, n);
            found.push(each_type!(&*x.values, v => best(v, walk, wins, last)));
        }
    }
    let mut shape = x.shape.clone();
    match call.attributes.int("keepdims").unwrap_or(1) != 0 {
        true => shape[at] = 1,
        false => drop(shape.remove(at)),
    }
    Ok(vec![Tensor::new(&shape, Values::I64(found))])
}

fn infer_top(cx: &Inference) -> Option<Vec<Fact>> {
    let shape = cx.shape(0).and_then(|from| {
        let at = axis(cx.attributes.int("axis").unwrap_or(-1), from.len())?;
        let k = match cx.attributes.int("k") {
            Some(k) => Some(SymExpr::constant(k)),
            None => cx.ints(1).and_then(|k| k.first().cloned()),
        };
        let mut shape = from.to_vec();
        *shape.get_mut(at)? = k.unwrap_or_else(|| cx.unknown());
        Some(shape)
    });
    Some(vec![
        Fact::new(cx.element(0), shape.clone()),
        Fact::new(Some(Element::I64), shape),
    ])
}

fn top(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let at = call.axis(-1, x.shape.len())?;
    let (outer, n, inner) = around(&x.shape, at)?;
    let k = match call.attributes.int("k") {
        Some(k) => k,
        None => *call
            .ints(1)?
            .first()
            .ok_or("its number of elements is missing")?,
    };
    let k = usize::try_from(k).ok().filter(|k| *k <= n);
    let k = k.ok_or_else(|| format!("there are only {n} elements to choose from"))?;
    let largest = call.attributes.int("largest").unwrap_or(1) != 0;
    fn first<T: Ordered>(
        v: &[T],
        (first, step, n): (usize, usize, usize),
        (k, largest): (usize, bool),
    ) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        // Equal elements keep their order.
        order.sort_by(|a, b| {
            let by_size = v[first + a * step].order(&v[first + b * step]);
            if largest { by_size.reverse() } else { by_size }
        });
        order.truncate(k);
        order
    }
    let mut starts = vec![0; outer * k * inner];
    let mut indices = vec![0; outer * k * inner];
    for o in 0..outer {
        for i in 0..inner {
            let walk = (o * n * inner + i, inner, n);
            let chosen = each_type!(&*x.values, v => first(v, walk, (k, largest)));
            for (place, index) in chosen.into_iter().enumerate() {
                let to = (o * k + place) * inner + i;
                starts[to] = walk.0 + index * inner;
                indices[to] = index as i64;
            }
        }
    }
    let mut shape = x.shape.clone();
    shape[at] = k;
    let values = picked_runs(x, &shape, &starts, 1);
    Ok(vec![values, Tensor::new(&shape, Values::I64(indices))])
}

fn infer_unique(cx: &Inference) -> Option<Vec<Fact>> {
    let n = cx.unknown();
    let (shape, all) = match cx.attributes.int("axis") {
        None => (Some(vec![n.clone()]), cx.shape(0).map(SymExpr::product)),
        Some(given) => match cx.shape(0) {
            None => (None, None),
            Some(from) => {
                let mut shape = from.to_vec();
                let size = shape.get_mut(axis(given, from.len())?)?;
                let all = std::mem::replace(size, n.clone());
                (Some(shape), Some(all))
            }
        },
    };
    let counts = |n: SymExpr| Fact::new(Some(Element::I64), Some(vec![n]));
    Some(vec![
        Fact::new(cx.element(0), shape),
        counts(n.clone()),
        counts(all.unwrap_or_else(|| cx.unknown())),
        counts(n),
    ])
}

fn unique(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let flat = x.reshaped(&[x.len()]);
    let (x, at) = match call.attributes.int("axis") {
        None => (&flat, 0),
        Some(_) => (x, call.axis(0, x.shape.len())?),
    };
    // Slices along the axis one after the other.
    let mut order: Vec<usize> = (0..x.shape.len()).collect();
    order.remove(at);
    order.insert(0, at);
    let rows = permuted(x, &order);
    let n = x.shape[at];
    let run = rows.len().checked_div(n).unwrap_or(0);
    fn sorted<T: Ordered>(v: &[T], n: usize, run: usize) -> Vec<(usize, bool)> {
        let order = |a: usize, b: usize| {
            let pairs = v[a * run..(a + 1) * run]
                .iter()
                .zip(&v[b * run..(b + 1) * run]);
            pairs
                .map(|(a, b)| a.order(b))
                .find(|o| o.is_ne())
                .unwrap_or(Ordering::Equal)
        };
        let mut rows: Vec<usize> = (0..n).collect();
        rows.sort_by(|a, b| order(*a, *b));
        let is_new = |i: usize| i == 0 || order(rows[i - 1], rows[i]).is_ne();
        (0..n).map(|i| (rows[i], is_new(i))).collect()
    }
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (row, is_new) in each_type!(&*rows.values, v => sorted(v, n, run)) {
        match groups.last_mut().filter(|_| !is_new) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    if call.attributes.int("sorted") == Some(0) {
        groups.sort_by_key(|group| group[0]);
    }
    let mut inverse = vec![0; n];
    for (g, group) in groups.iter().enumerate() {
        group.iter().for_each(|row| inverse[*row] = g as i64);
    }
    let firsts: Vec<i64> = groups.iter().map(|g| g[0] as i64).collect();
    let counts: Vec<i64> = groups.iter().map(|g| g.len() as i64).collect();
    let starts: Vec<usize> = groups.iter().map(|g| g[0] * run).collect();
    let mut shape = rows.shape.clone();
    shape[0] = groups.len();
    let kept = picked_runs(&rows, &shape, &starts, run);
    let mut back: Vec<usize> = (1..x.shape.len()).collect();
    back.insert(at, 0);
    let all = [firsts, inverse, counts];
    let mut outputs = vec![permuted(&kept, &back)];
    outputs.extend(all.iter().map(|v| Tensor::ints(v)));
    Ok(outputs)
}

fn infer_non_zero(cx: &Inference) -> Option<Vec<Fact>> {
    let shape = cx
        .rank(0)
        .map(|rank| vec![SymExpr::from(rank.max(1)), cx.unknown()]);
    Some(vec![Fact::new(Some(Element::I64), shape)])
}

fn non_zero(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    fn others<T: Item>(v: &[T]) -> Vec<usize> {
        let zero = T::default();
        (0..v.len()).filter(|n| v[*n] != zero).collect()
    }
    let found = each_type!(&*x.values, v => others(v));
    // The standard gives a scalar no row; ONNX Runtime, where the file will run, counts it as a list of one.
    let shape = if x.shape.is_empty() {
        &[1]
    } else {
        &x.shape[..]
    };
    let steps = super::strided::steps(shape);
    let mut indices = Vec::with_capacity(found.len() * shape.len());
    for (size, step) in shape.iter().zip(&steps) {
        indices.extend(found.iter().map(|n| (n / step % size) as i64));
    }
    Ok(vec![Tensor::new(
        &[shape.len(), found.len()],
        Values::I64(indices),
    )])
}
