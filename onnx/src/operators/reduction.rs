//! Reductions: ReduceSum, ReduceMean, ReduceMax, … Sums of floats are taken in `f64`.

use super::permute::permuted;
use super::symbolic;
use super::{Call, Inference, Operator, Symbolic, axis};
use crate::fact::Fact;
use crate::tensor::{Tensor, Values};
use graph::SymExpr;
use half::{bf16, f16};

pub const ROWS: &[Operator] = &[
    Operator::new("ReduceSum", infer, |c| reduced(c, &SUM))
        .symbolic(Symbolic::Own(|cx| symbolic::reduced(cx, symbolic::add))),
    Operator::new("ReduceMean", infer, |c| reduced(c, &MEAN)),
    Operator::new("ReduceMax", infer, |c| reduced(c, &MAX))
        .symbolic(Symbolic::Own(|cx| symbolic::reduced(cx, symbolic::max))),
    Operator::new("ReduceMin", infer, |c| reduced(c, &MIN))
        .symbolic(Symbolic::Own(|cx| symbolic::reduced(cx, symbolic::min))),
    Operator::new("ReduceProd", infer, |c| reduced(c, &PROD))
        .symbolic(Symbolic::Own(|cx| symbolic::reduced(cx, symbolic::mul))),
    Operator::new("ReduceL1", infer, |c| reduced(c, &L1)),
    Operator::new("ReduceL2", infer, |c| reduced(c, &L2)),
    Operator::new("ReduceSumSquare", infer, |c| reduced(c, &SUM_SQUARE)),
    Operator::new("ReduceLogSum", infer, |c| reduced(c, &LOG_SUM)),
    Operator::new("ReduceLogSumExp", infer, |c| reduced(c, &LOG_SUM_EXP)),
];

/// What is computed from the elements of a row, which may be empty.
struct Reduction {
    floats: fn(&[f64]) -> f64,
    /// Integers wrap in their own type; `None` if not defined on them.
    ints: Option<fn(&[i128]) -> i128>,
    /// Whether truth values are reduced too.
    truths: bool,
    /// The result for a row without elements, for integers.
    empty: Empty,
}

#[derive(Clone, Copy, PartialEq)]
enum Empty {
    AsComputed,
    Least,
    Greatest,
}

const fn plain(floats: fn(&[f64]) -> f64, ints: Option<fn(&[i128]) -> i128>) -> Reduction {
    Reduction {
        floats,
        ints,
        truths: false,
        empty: Empty::AsComputed,
    }
}

const SUM: Reduction = plain(sum, Some(|v| v.iter().sum()));
const MEAN: Reduction = plain(
    |v| sum(v) / v.len() as f64,
    Some(|v| v.iter().sum::<i128>() / (v.len() as i128).max(1)),
);
const PROD: Reduction = plain(
    |v| v.iter().product(),
    Some(|v| v.iter().fold(1i128, |p, x| p.wrapping_mul(*x))),
);
const L1: Reduction = plain(
    |v| sum_of(v, f64::abs),
    Some(|v| v.iter().map(|x| x.abs()).sum()),
);
const L2: Reduction = plain(
    |v| sum_of(v, |x| x * x).sqrt(),
    Some(|v| (v.iter().map(|x| *x as f64 * *x as f64).sum::<f64>()).sqrt() as i128),
);
const SUM_SQUARE: Reduction = plain(
    |v| sum_of(v, |x| x * x),
    Some(|v| {
        v.iter()
            .fold(0i128, |s, x| s.wrapping_add(x.wrapping_mul(*x)))
    }),
);
const LOG_SUM: Reduction = plain(
    |v| sum(v).ln(),
    Some(|v| (v.iter().sum::<i128>() as f64).ln() as i128),
);
const LOG_SUM_EXP: Reduction = plain(log_sum_exp, None);
const MAX: Reduction = Reduction {
    floats: |v| v.iter().copied().fold(f64::NEG_INFINITY, larger),
    ints: Some(|v| v.iter().copied().max().unwrap_or(0)),
    truths: true,
    empty: Empty::Least,
};
const MIN: Reduction = Reduction {
    floats: |v| -v.iter().map(|x| -x).fold(f64::NEG_INFINITY, larger),
    ints: Some(|v| v.iter().copied().min().unwrap_or(0)),
    truths: true,
    empty: Empty::Greatest,
};

/// NaN wins.
fn larger(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}

fn sum(v: &[f64]) -> f64 {
    sum_of(v, |x| x)
}

/// Sums in eight interleaved sums, which are independent of each other.
fn sum_of(v: &[f64], f: impl Fn(f64) -> f64) -> f64 {
    let mut sums = [0.0; 8];
    let (chunks, rest) = v.as_chunks::<8>();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += f(*x);
        }
    }
    let rest: f64 = rest.iter().map(|x| f(*x)).sum();
    sums.iter().sum::<f64>() + rest
}

fn log_sum_exp(v: &[f64]) -> f64 {
    let top = v.iter().copied().fold(f64::NEG_INFINITY, larger);
    // Around an infinite maximum there is nothing to subtract.
    let shift = if top.is_finite() { top } else { 0.0 };
    sum_of(v, |x| (x - shift).exp()).ln() + shift
}

/// Which dimensions are reduced.
enum Axes {
    These(Vec<bool>),
    NoneAtAll,
    NotKnown,
}

fn marked(axes: Option<Vec<i64>>, rank: usize, keeps_if_empty: bool) -> Option<Axes> {
    let axes = axes.unwrap_or_default();
    if axes.is_empty() && keeps_if_empty {
        return Some(Axes::NoneAtAll);
    }
    let mut marks = vec![axes.is_empty(); rank];
    for d in axes {
        // A scalar has an axis 0, though it has no dimension.
        if let Some(mark) = marks.get_mut(axis(d, rank.max(1))?) {
            *mark = true;
        }
    }
    Some(Axes::These(marks))
}

fn infer(cx: &Inference) -> Option<Vec<Fact>> {
    let keep = cx.attributes.int("keepdims").unwrap_or(1) != 0;
    let keeps_if_empty = cx.attributes.flag("noop_with_empty_axes");
    let axes = cx.ints_of("axes", 1);
    let from = match (cx.shape(0), &axes) {
        (Some(from), _) => from,
        // All dimensions are reduced; their number would only decide how many sizes of 1 are kept, and none is.
        (None, None) if cx.fact(1).is_none() && !keep && !keeps_if_empty => {
            return cx.like_first(Some(Vec::new()));
        }
        (None, _) => return cx.like_first(None),
    };
    let marks = if axes.is_none() && cx.fact(1).is_some() {
        Axes::NotKnown
    } else {
        marked(axes, from.len(), keeps_if_empty)?
    };
    let one = SymExpr::constant(1);
    cx.like_first(match marks {
        Axes::NotKnown => keep.then(|| cx.unknown_shape(from.len())),
        Axes::NoneAtAll => Some(from.to_vec()),
        Axes::These(marks) if keep => {
            let size = |(n, marked): (&SymExpr, &bool)| if *marked { &one } else { n }.clone();
            Some(from.iter().zip(&marks).map(size).collect())
        }
        Axes::These(marks) => {
            let kept = from.iter().zip(&marks).filter(|(_, marked)| !**marked);
            Some(kept.map(|(n, _)| n.clone()).collect())
        }
    })
}

fn reduced(call: &Call, reduction: &Reduction) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let rank = x.shape.len();
    let axes = call.ints_of("axes", 1)?;
    let keeps_if_empty = call.attributes.flag("noop_with_empty_axes");
    let marks = marked(axes, rank, keeps_if_empty).ok_or("its axes are not dimensions")?;
    let marks = match marks {
        Axes::These(marks) => marks,
        // No dimension is reduced: every element is a row of its own.
        _ => vec![false; rank],
    };
    let order: Vec<usize> = (0..rank)
        .filter(|d| !marks[*d])
        .chain((0..rank).filter(|d| marks[*d]))
        .collect();
    let size = |reduced: bool| -> usize {
        let sizes = x.shape.iter().zip(&marks);
        sizes
            .filter(|(_, m)| **m == reduced)
            .map(|(n, _)| n)
            .product()
    };
    let (rows, columns) = (size(false), size(true));
    let keep = call.attributes.int("keepdims").unwrap_or(1) != 0;
    let shape: Vec<usize> = match keep {
        true => x
            .shape
            .iter()
            .zip(&marks)
            .map(|(n, m)| if *m { 1 } else { *n })
            .collect(),
        false => order
            .iter()
            .filter(|d| !marks[**d])
            .map(|d| x.shape[*d])
            .collect(),
    };
    let ordered = permuted(x, &order);
    let values = of_rows(&ordered.values, rows, columns, reduction);
    let values = values.ok_or_else(|| format!("it is not defined on {}", x.element()))?;
    Ok(vec![Tensor::new(&shape, values)])
}

/// The reduction of every row of `columns` elements.
fn of_rows(values: &Values, rows: usize, columns: usize, reduction: &Reduction) -> Option<Values> {
    /// Each row widened into the same buffer.
    fn each<T: Copy, W: Copy, R>(
        v: &[T],
        (rows, columns): (usize, usize),
        widen: impl Fn(T) -> W,
        reduce: impl Fn(&[W]) -> R,
    ) -> Vec<R> {
        let mut buffer = Vec::with_capacity(columns);
        let row = |n: usize| {
            buffer.clear();
            buffer.extend(v[n * columns..(n + 1) * columns].iter().map(|x| widen(*x)));
            reduce(&buffer)
        };
        (0..rows).map(row).collect()
    }
    let size = (rows, columns);
    let floats = reduction.floats;
    macro_rules! whole {
        ($kind:ident, $v:ident, $t:ty) => {{
            let ints = reduction.ints?;
            let reduce = |row: &[i128]| match (row.is_empty(), reduction.empty) {
                (true, Empty::Least) => <$t>::MIN,
                (true, Empty::Greatest) => <$t>::MAX,
                _ => ints(row) as $t,
            };
            Values::$kind(each($v, size, |x: $t| i128::from(x), reduce))
        }};
    }
    Some(match values {
        Values::F32(v) => Values::F32(each(v, size, |x: f32| f64::from(x), |r| floats(r) as f32)),
        Values::F64(v) => Values::F64(each(v, size, |x: f64| x, floats)),
        Values::F16(v) => Values::F16(each(v, size, f16::to_f64, |r| f16::from_f64(floats(r)))),
        Values::BF16(v) => Values::BF16(each(v, size, bf16::to_f64, |r| bf16::from_f64(floats(r)))),
        Values::I8(v) => whole!(I8, v, i8),
        Values::I16(v) => whole!(I16, v, i16),
        Values::I32(v) => whole!(I32, v, i32),
        Values::I64(v) => whole!(I64, v, i64),
        Values::U8(v) => whole!(U8, v, u8),
        Values::U16(v) => whole!(U16, v, u16),
        Values::U32(v) => whole!(U32, v, u32),
        Values::U64(v) => whole!(U64, v, u64),
        Values::Bool(v) if reduction.truths => {
            let ints = reduction.ints?;
            let reduce = |row: &[i128]| match (row.is_empty(), reduction.empty) {
                (true, empty) => empty == Empty::Greatest,
                _ => ints(row) != 0,
            };
            Values::Bool(each(v, size, |x: bool| i128::from(x), reduce))
        }
        _ => return None,
    })
}
