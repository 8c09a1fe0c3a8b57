//! Softmax, LogSoftmax, Hardmax: along one dimension from operator set 13 on, before that over all
//! dimensions from `axis` on.

use super::real::{Real, in_real};
use super::threads;
use super::{Call, Operator};
use crate::tensor::Tensor;

pub const ROWS: &[Operator] = &[
    Operator::new("Softmax", super::movement::same, |call| {
        along(call, Kind::Soft)
    }),
    Operator::new("LogSoftmax", super::movement::same, |call| {
        along(call, Kind::Log)
    }),
    Operator::new("Hardmax", super::movement::same, |call| {
        along(call, Kind::Hard)
    }),
];

#[derive(Clone, Copy)]
enum Kind {
    Soft,
    Log,
    Hard,
}

fn along(call: &Call, kind: Kind) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let rank = x.shape.len();
    let (size, inner) = if call.opset < 13 {
        let axis = match call.attributes.int("axis").unwrap_or(1) {
            // An axis after the last dimension makes every element a row of its own.
            end if end == rank as i64 => rank,
            _ => call.axis(1, rank)?,
        };
        (x.shape[axis..].iter().product(), 1)
    } else {
        let axis = call.axis(-1, rank)?;
        let inner = x.shape.get(axis + 1..).unwrap_or(&[]).iter().product();
        (x.shape.get(axis).copied().unwrap_or(1), inner)
    };
    let y = in_real!(x.element(), R => {
        let mut y = R::read(x)?.into_owned();
        strided_rows(&mut y, size, inner, kind);
        R::tensor(x.element(), &x.shape, y)
    });
    y.map(|y| vec![y])
}

/// Rows of `size` elements that are `inner` apart.
fn strided_rows<R: Real>(y: &mut [R], size: usize, inner: usize, kind: Kind) {
    let least = 1 << 14;
    if inner == 1 {
        threads::runs(y, size, least, |_, row| row_of(row, kind));
        return;
    }
    threads::runs(y, size * inner, least, |_, block| {
        let mut row = Vec::with_capacity(size);
        for at in 0..inner {
            row.clear();
            row.extend(block[at..].iter().step_by(inner));
            row_of(&mut row, kind);
            let to = block[at..].iter_mut().step_by(inner);
            to.zip(&row).for_each(|(to, x)| *to = *x);
        }
    });
}

fn row_of<R: Real>(row: &mut [R], kind: Kind) {
    match kind {
        Kind::Soft => softmax(row),
        Kind::Log => log_softmax(row),
        Kind::Hard => {
            let mut best = 0;
            for n in 1..row.len() {
                if row[n] > row[best] {
                    best = n;
                }
            }
            row.fill(R::zero());
            row[best] = R::one();
        }
    }
}

fn largest<R: Real>(row: &[R]) -> R {
    row.iter().copied().fold(R::neg_infinity(), R::max)
}

/// `exp(x - max) / Σ exp(x - max)` in place.
pub fn softmax<R: Real>(row: &mut [R]) {
    let max = largest(row);
    let mut sum = 0.0;
    for x in row.iter_mut() {
        *x = (*x - max).exp();
        sum += x.wide();
    }
    let sum = R::of(sum);
    row.iter_mut().for_each(|x| *x = *x / sum);
}

/// `x - max - ln Σ exp(x - max)` in place.
pub fn log_softmax<R: Real>(row: &mut [R]) {
    let max = largest(row);
    let sum: f64 = row.iter().map(|x| (*x - max).exp().wide()).sum();
    let log = R::of(sum.ln());
    row.iter_mut().for_each(|x| *x = *x - max - log);
}
