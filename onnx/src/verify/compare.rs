//! Whether two tensors are the same output, and how far each is from the exact one.

use super::{ROUNDINGS, SLACK};
use crate::element::Element;
use crate::tensor::Tensor;

/// Errors of one value: largest difference from float64 over the largest exact element.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputError {
    /// The value.
    pub name: String,
    /// Of the original in its own types.
    pub before: f64,
    /// Of the rewritten model in its own types.
    pub after: f64,
}

/// Compares a value of the original with that of the rewritten model; `exact` is the original's in
/// float64, absent where NaN or infinities were planted.
pub(super) fn errors(
    name: &str,
    before: &Tensor,
    after: &Tensor,
    exact: Option<&Tensor>,
) -> Result<OutputError, String> {
    let described = |t: &Tensor| format!("{} {:?}", t.element(), t.shape);
    if before.shape != after.shape || before.element() != after.element() {
        return Err(format!("{} became {}", described(before), described(after)));
    }
    let mut error = OutputError {
        name: name.to_string(),
        before: 0.0,
        after: 0.0,
    };
    if !before.element().is_float() {
        return match before.same_bits(after) {
            true => Ok(error),
            false => Err(format!(
                "elements of type {} are not equal",
                before.element()
            )),
        };
    }
    let (Some(old), Some(new)) = (before.to_f64(), after.to_f64()) else {
        return Err("it cannot be compared".to_string());
    };
    same_kinds(&old, &new)?;
    let exact = exact.and_then(Tensor::to_f64);
    // Without an exact result the original stands for it.
    let reference = exact.as_deref().unwrap_or(&old);
    if reference.len() != old.len() {
        return Err("the original has other sizes in float64".to_string());
    }
    // Elements that both give exactly, such as what a mask fills in, say nothing of the others' size.
    let pairs = reference.iter().zip(old.iter().zip(&new));
    let inexact = pairs.filter(|(r, (a, b))| r.is_finite() && !(a == b && a == r));
    let scale = inexact.fold(0.0f64, |m, (r, _)| m.max(r.abs()));
    let scale = if scale > 0.0 { scale } else { 1.0 };
    error.before = distance(&old, reference) / scale;
    error.after = distance(&new, reference) / scale;
    let allowed = SLACK * error.before + ROUNDINGS * epsilon(before.element());
    if error.after > allowed {
        return Err(format!(
            "its error is {:.1e} of its largest element, the original's {:.1e}; {:.1e} is allowed",
            error.after, error.before, allowed
        ));
    }
    let values = Values {
        reference,
        before: &old,
        after: &new,
    };
    values.compare_slices(&before.shape, epsilon(before.element()))?;
    Ok(error)
}

/// Slices of fewer elements say nothing: an original may happen to be exact there.
const LEAST_SLICE: usize = 16;

/// One output three times, row-major.
struct Values<'a> {
    reference: &'a [f64],
    before: &'a [f64],
    after: &'a [f64],
}

impl Values<'_> {
    /// Holds the mean square errors of every slice along every dimension against each other, since what
    /// is joined may be of different magnitude, and the largest elements would hide the others.
    fn compare_slices(&self, shape: &[usize], epsilon: f64) -> Result<(), String> {
        let n: usize = shape.iter().product();
        let mut inner = n;
        for (d, size) in shape.iter().enumerate() {
            inner /= (*size).max(1);
            if *size < 2 || n / size < LEAST_SLICE {
                continue;
            }
            let mut sums = vec![[0.0f64; 3]; *size];
            let elements = self.reference.iter().zip(self.before).zip(self.after);
            for (at, ((r, a), b)) in elements.enumerate() {
                if r.is_finite() && a.is_finite() && b.is_finite() {
                    let [of_r, of_a, of_b] = &mut sums[at / inner % size];
                    *of_r += r * r;
                    *of_a += (a - r) * (a - r);
                    *of_b += (b - r) * (b - r);
                }
            }
            for (at, sums) in sums.iter().enumerate() {
                let [r, a, b] = sums.map(f64::sqrt);
                if b > SLACK * a + ROUNDINGS * epsilon * r {
                    let scale = if r > 0.0 { r } else { 1.0 };
                    return Err(format!(
                        "at {at} of dimension {d} its error is {:.1e} of the elements there, the \
                         original's {:.1e}",
                        b / scale,
                        a / scale
                    ));
                }
            }
        }
        Ok(())
    }
}

/// NaN where there was NaN, the same infinities.
fn same_kinds(old: &[f64], new: &[f64]) -> Result<(), String> {
    let kind = |v: f64| match v {
        v if v.is_nan() => "NaN",
        v if v == f64::INFINITY => "infinity",
        v if v == f64::NEG_INFINITY => "-infinity",
        _ => "finite",
    };
    let changed = old.iter().zip(new).position(|(a, b)| kind(*a) != kind(*b));
    match changed {
        None => Ok(()),
        Some(n) => Err(format!(
            "element {n} was {} and is {}",
            kind(old[n]),
            kind(new[n])
        )),
    }
}

fn distance(values: &[f64], reference: &[f64]) -> f64 {
    let pairs = values
        .iter()
        .zip(reference)
        .filter(|(a, b)| a.is_finite() && b.is_finite());
    pairs.fold(0.0, |m, (a, b)| m.max((a - b).abs()))
}

/// Half a unit in the last place of 1.
fn epsilon(element: Element) -> f64 {
    match element {
        Element::F64 => f64::EPSILON / 2.0,
        Element::F16 => 4.9e-4,
        Element::BF16 => 3.9e-3,
        _ => f64::from(f32::EPSILON) / 2.0,
    }
}

/// Keeps the larger errors of each value.
pub(super) fn merge(all: &mut Vec<OutputError>, error: OutputError) {
    match all.iter_mut().find(|e| e.name == error.name) {
        Some(known) => {
            if error.after > known.after {
                *known = error;
            }
        }
        None => all.push(error),
    }
}
