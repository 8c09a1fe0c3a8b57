//! What the elements of a stored tensor say: tables of sines and cosines, and masks.

use super::uses::n_elements;
use crate::proto::TensorProto;

/// Tensors of more elements are not looked into.
const MOST_ELEMENTS: i64 = 1 << 22;

/// Numbers of at most minus this stand for −∞ in a mask.
const MASKED: f64 = 1e4;

/// A table of fewer rows is not judged.
const FEWEST_ROWS: usize = 8;

/// Part of a column's largest element that rounding to half precision may move it by.
const ROUNDING: f64 = 4e-3;

pub(super) fn is_looked_into(tensor: &TensorProto) -> bool {
    tensor.dims.len() >= 2 && (1..=MOST_ELEMENTS).contains(&n_elements(tensor))
}

/// Whether each column is a sine or cosine of the row: `f(p − 1) + f(p + 1) = 2·cos(w)·f(p)` with its own `w`. Random
/// numbers are nowhere near that. At least one column has to rise and fall: otherwise a table of equal numbers, such as
/// a new weight of a normalization, would count as one.
pub(super) fn is_sinusoidal(shape: &[usize], values: &[f64]) -> bool {
    let rows = shape.iter().copied().find(|n| *n > 1).unwrap_or(1);
    if rows < FEWEST_ROWS || values.iter().any(|v| v.is_nan() || v.abs() > 1.001) {
        return false;
    }
    let n_columns = values.len() / rows;
    let mut swings = false;
    for column in 0..n_columns {
        let at = &|row: usize| values[row * n_columns + column];
        let largest = (0..rows).fold(0.0, |m: f64, row| m.max(at(row).abs()));
        let inner = || (1..rows - 1).map(move |row| (at(row), at(row - 1) + at(row + 1)));
        let squares: f64 = inner().map(|(here, _)| here * here).sum();
        if squares == 0.0 {
            if largest > 0.0 {
                return false;
            }
            continue;
        }
        let factor = inner().map(|(here, beside)| here * beside).sum::<f64>() / squares;
        let fits =
            |(here, beside): (f64, f64)| (beside - factor * here).abs() <= ROUNDING * largest;
        if !inner().all(fits) {
            return false;
        }
        swings |= factor < 1.9 && largest > 0.5;
    }
    swings
}

/// Whether the tensor is added to scores, or multiplied with them, to leave some out.
pub(super) fn is_mask(shape: &[usize], values: &[f64]) -> bool {
    if values.contains(&f64::NEG_INFINITY) {
        return true;
    }
    let masked = values.iter().copied().find(|v| *v <= -MASKED);
    if let Some(masked) = masked {
        let kept = values.iter().filter(|v| **v != masked);
        let mut kept = kept.peekable();
        return kept.peek().is_some() && kept.all(|v| *v == 0.0 || *v == 1.0);
    }
    is_triangle(shape, values)
}

/// Whether it is one square with ones on one side of the diagonal and zeros on the other. The diagonal is all ones or
/// all zeros.
fn is_triangle(shape: &[usize], values: &[f64]) -> bool {
    let [.., rows, columns] = *shape else {
        return false;
    };
    if rows != columns || rows < 3 || values.len() != rows * columns {
        return false;
    }
    let on_side = |below: f64, above: f64| {
        let diagonal = values[0];
        (diagonal == 0.0 || diagonal == 1.0)
            && values.iter().enumerate().all(|(n, v)| {
                let (row, column) = (n / columns, n % columns);
                let wanted = match row.cmp(&column) {
                    std::cmp::Ordering::Greater => below,
                    std::cmp::Ordering::Less => above,
                    std::cmp::Ordering::Equal => diagonal,
                };
                *v == wanted
            })
    };
    on_side(1.0, 0.0) || on_side(0.0, 1.0)
}
