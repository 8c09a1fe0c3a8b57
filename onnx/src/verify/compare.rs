//! Whether two tensors are the same output, and how far each is from the exact one.

use super::{ROUNDINGS, SLACK};
use crate::element::Element;
use crate::tensor::Tensor;
use std::collections::BTreeMap;

/// Errors of one value: largest difference from float64 over the largest exact element.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputError {
    /// The value.
    pub name: String,
    /// Error of the original in its own types.
    pub before: f64,
    /// Error of the rewritten model in its own types.
    pub after: f64,
}

/// Compares a value of the original with that of the rewritten model; `exact` is the original's in
/// float64, absent where NaN or infinities were planted. `tolerance` is a part of the largest element that is
/// allowed whatever rounding explains.
pub(super) fn errors(
    name: &str,
    before: &Tensor,
    after: &Tensor,
    exact: Option<&Tensor>,
    tolerance: f64,
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
        return Err(
            "it is neither a tensor nor a sequence of tensors, so it cannot be compared"
                .to_string(),
        );
    };
    same_kinds(&old, &new)?;
    let exact = exact.and_then(Tensor::to_f64);
    // Without an exact result, the original is the reference.
    let reference = exact.as_deref().unwrap_or(&old);
    if reference.len() != old.len() {
        return Err("the original has other sizes in float64".to_string());
    }
    // Elements that both give exactly, such as what a mask fills in, say nothing about the size of the others.
    let pairs = reference.iter().zip(old.iter().zip(&new));
    let inexact = pairs.filter(|(r, (a, b))| r.is_finite() && !(a == b && a == r));
    let scale = inexact.fold(0.0f64, |m, (r, _)| m.max(r.abs()));
    let scale = if scale > 0.0 { scale } else { 1.0 };
    error.before = distance(&old, reference) / scale;
    error.after = distance(&new, reference) / scale;
    let allowed = SLACK * error.before + ROUNDINGS * epsilon(before.element());
    let allowed = allowed.max(tolerance);
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
    let rounding = ROUNDINGS * epsilon(before.element());
    values.compare_slices(&before.shape, rounding.max(tolerance))?;
    Ok(error)
}

/// Slices of fewer elements say nothing by themselves: an original may happen to be exact there. See
/// [`ShortSlices`].
const LEAST_SLICE: usize = 16;
/// Most short slices whose sums are kept: more would take more memory than the compared values.
const MOST_SHORT_SLICES: usize = 1 << 16;

/// One output three times, row-major.
struct Values<'a> {
    reference: &'a [f64],
    before: &'a [f64],
    after: &'a [f64],
}

impl Values<'_> {
    /// Compares the mean square errors of both models for every slice along every dimension: joined parts may differ in
    /// magnitude, and the largest elements would hide the others. `relative` is a tolerance relative to the elements of
    /// the slice.
    fn compare_slices(&self, shape: &[usize], relative: f64) -> Result<(), String> {
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
                if b > SLACK * a + relative * r {
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

/// Slices of few elements, summed over all runs with finite inputs. If a model gives one number of each kind, only this
/// shows that one of them is wrong beside much larger ones.
#[derive(Debug, Default)]
pub(super) struct ShortSlices {
    /// Sums by value and dimension; `None` if sizes differ between runs.
    sums: BTreeMap<(usize, usize), Option<Vec<Sums>>>,
}

/// Square sums of a slice: the exact elements, both errors, and how many elements there are.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    exact: f64,
    before: f64,
    after: f64,
    n: usize,
    epsilon: f64,
}

impl ShortSlices {
    /// Adds the value at position `n` among those compared, from one run.
    pub(super) fn add(&mut self, n: usize, [before, after, exact]: [&Tensor; 3]) {
        let len: usize = before.shape.iter().product();
        let is_short = |size: usize| {
            let few = (2..=MOST_SHORT_SLICES).contains(&size);
            few && len >= size && len / size < LEAST_SLICE
        };
        let shapes = before.shape == after.shape && before.shape == exact.shape;
        let has_short = before.shape.iter().any(|size| is_short(*size));
        if !before.element().is_float() || !shapes || !has_short {
            return;
        }
        let (Some(a), Some(b), Some(r)) = (before.to_f64(), after.to_f64(), exact.to_f64()) else {
            return;
        };
        let mut inner = len;
        for (d, size) in before.shape.iter().enumerate() {
            inner /= (*size).max(1);
            if !is_short(*size) {
                continue;
            }
            let known = self.sums.entry((n, d));
            let known = known.or_insert_with(|| Some(vec![Sums::default(); *size]));
            let Some(sums) = known.as_mut().filter(|sums| sums.len() == *size) else {
                *known = None;
                continue;
            };
            for (at, r) in r.iter().enumerate() {
                let sum = &mut sums[at / inner % size];
                if r.is_finite() && a[at].is_finite() && b[at].is_finite() {
                    sum.exact += r * r;
                    sum.before += (a[at] - r) * (a[at] - r);
                    sum.after += (b[at] - r) * (b[at] - r);
                    sum.n += 1;
                    sum.epsilon = epsilon(before.element());
                }
            }
        }
    }

    /// Forgets what was added for a value.
    pub(super) fn forget(&mut self, n: usize) {
        self.sums.retain(|(value, _), _| *value != n);
    }

    /// The position of a value with a slice whose error is larger than chance explains, and a sentence about it.
    pub(super) fn worst(&self, tolerance: f64) -> Option<(usize, String)> {
        let known = self.sums.iter();
        let known = known.filter_map(|(key, sums)| Some((key, sums.as_ref()?)));
        known
            .flat_map(|(key, sums)| {
                let n_slices = sums.len();
                let slices = sums.iter().enumerate();
                slices.map(move |(at, sum)| (key, n_slices, at, sum))
            })
            .find(|(_, n_slices, _, sum)| sum.is_wrong(*n_slices, tolerance))
            .map(|((n, d), _, at, sum)| {
                let [r, a, b] = [sum.exact, sum.before, sum.after].map(f64::sqrt);
                let scale = if r > 0.0 { r } else { 1.0 };
                let what = format!(
                    "at {at} of dimension {d} its error is {:.1e} of the elements there, the \
                     original's {:.1e}",
                    b / scale,
                    a / scale
                );
                (*n, what)
            })
    }
}

impl Sums {
    /// Compares root mean squares of the two errors. The fewer elements, the more often chance makes one `s` times
    /// the other: of n elements about as often as s⁻ⁿ. What chance explains less than once in a million, over all
    /// slices together, is a difference.
    fn is_wrong(&self, n_slices: usize, tolerance: f64) -> bool {
        if self.n < 2 {
            return false;
        }
        let slack = SLACK * (1e6 * n_slices as f64).powf(1.0 / self.n as f64);
        let rounding = (ROUNDINGS * self.epsilon).max(tolerance) * self.exact.sqrt();
        self.after.sqrt() > slack * self.before.sqrt() + rounding
    }
}

/// Checks that NaN and both infinities are at the same places.
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
