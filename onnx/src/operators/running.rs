//! Operators along one axis or over a triangle: CumSum, CumProd, Trilu.

use super::movement::same;
use super::{Call, Operator, axis};
use crate::same_type;
use crate::tensor::{Item, Tensor, Values};

pub const ROWS: &[Operator] = &[
    Operator::new("CumSum", same, |c| cumulative(c, false)),
    Operator::new("CumProd", same, |c| cumulative(c, true)),
    Operator::new("Trilu", same, triangle),
];

/// Running sums or products along an axis; floats are accumulated in `f64`.
fn cumulative(call: &Call, is_product: bool) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let given = *call.ints(1)?.first().ok_or("its axis is missing")?;
    let at = axis(given, x.shape.len()).filter(|at| *at < x.shape.len());
    let at = at.ok_or_else(|| format!("axis {given} is not one of {:?}", x.shape))?;
    let walk = Running {
        n: x.shape[at],
        inner: x.shape[at + 1..].iter().product(),
        reverse: call.attributes.flag("reverse"),
        exclusive: call.attributes.flag("exclusive"),
    };
    let made = if x.element().is_float() {
        let wide = x.to_f64().ok_or("it is not of numbers")?;
        let sums = match is_product {
            true => walk.along(&wide, 1.0, |a, b| a * b),
            false => walk.along(&wide, 0.0, |a, b| a + b),
        };
        Tensor::floats(x.element(), &x.shape, &sums)
    } else {
        let wide = x.to_i64().filter(|_| x.element().is_int());
        let wide = wide.ok_or_else(|| format!("it is not defined on {}", x.element()))?;
        let sums = match is_product {
            true => walk.along(&wide, 1, i64::wrapping_mul),
            false => walk.along(&wide, 0, i64::wrapping_add),
        };
        Tensor::of_ints(x.element(), &x.shape, &sums)
    };
    Ok(vec![made.ok_or_else(|| {
        format!("it is not defined on {}", x.element())
    })?])
}

struct Running {
    n: usize,
    inner: usize,
    reverse: bool,
    exclusive: bool,
}

impl Running {
    fn along<T: Copy>(&self, v: &[T], start: T, f: impl Fn(T, T) -> T) -> Vec<T> {
        let mut to = v.to_vec();
        let block = self.n * self.inner;
        for first in (0..v.len()).step_by(block.max(1)) {
            for i in 0..self.inner {
                let mut so_far = start;
                for k in 0..self.n {
                    let k = if self.reverse { self.n - 1 - k } else { k };
                    let at = first + k * self.inner + i;
                    let with = f(so_far, v[at]);
                    to[at] = if self.exclusive { so_far } else { with };
                    so_far = with;
                }
            }
        }
        to
    }
}

fn triangle(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let [.., rows, columns] = x.shape[..] else {
        return Err(format!("{:?} is no matrix", x.shape));
    };
    let k = match call.optional(1) {
        Some(_) => *call.ints(1)?.first().ok_or("its diagonal is missing")?,
        None => 0,
    };
    let upper = call.attributes.int("upper").unwrap_or(1) != 0;
    fn kept<T: Item>(v: &[T], (rows, columns): (usize, usize), k: i64, upper: bool) -> Vec<T> {
        let mut to = v.to_vec();
        for (n, to) in to.iter_mut().enumerate() {
            let (row, column) = ((n / columns % rows) as i64, (n % columns) as i64);
            let above = column.saturating_sub(row);
            if (upper && above < k) || (!upper && above > k) {
                *to = T::default();
            }
        }
        to
    }
    let values: Values = same_type!(&*x.values, v => kept(v, (rows, columns), k, upper));
    Ok(vec![Tensor::new(&x.shape, values)])
}
