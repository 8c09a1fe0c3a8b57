//! Normal form of axes that several dims index as digits of one position.
//!
//! Before: `dx[2*p0 + p1 + r - 1] += dy[p0][p1] * w[r]`, `y[4*g + k] += x[2*g + c] * w[4*g + k][c]`.
//! After: `dx[p + r - 1] += dy[p] * w[r]` with `p = 2*p0 + p1`, `y[g][k] += x[g][c] * w[g][k][c]`.
//! Legal because with `0 <= p1 < 2`, `2*p0 + p1` takes every position once, in order. Digits that occur
//! together in all three operands become one dim. An axis whose digits play different roles becomes
//! one axis for each digit. Pools without overlaps produce the first form, groups of channels the second.
//! Decides nothing about implementation and emits no text.

use super::{Axis, Contraction, Operand};

/// The same contraction with as few dims and as plain axes as possible. Dims keep their numbers; one
/// that became part of another has size 1 and indexes nothing.
pub fn normal_form(c: &Contraction) -> Contraction {
    let mut c = c.clone();
    tidy(&mut c);
    while let Some((high, low)) = joinable_pair(&c) {
        join(&mut c, high, low);
    }
    let dims = c.dims.clone();
    for read in [&mut c.a, &mut c.b] {
        split_axes(read, &dims, false);
    }
    split_axes(&mut c.out, &dims, true);
    c
}

fn operands(c: &mut Contraction) -> [&mut Operand; 3] {
    [&mut c.a, &mut c.b, &mut c.out]
}

/// Drops terms of dims with one position and guards that cannot fail.
fn tidy(c: &mut Contraction) {
    let dims = c.dims.clone();
    for operand in operands(c) {
        for axis in &mut operand.axes {
            axis.terms.retain(|t| dims[t.0] > 1 && t.1 != 0);
            if axis.guarded {
                let (low, high) = reach(axis, &dims);
                axis.guarded = low < 0 || high >= axis.size;
            }
        }
    }
}

/// Smallest and largest position.
fn reach(axis: &Axis, dims: &[i64]) -> (i64, i64) {
    let ends = axis.terms.iter().map(|&(d, k)| k * (dims[d] - 1));
    let (low, high) = ends.fold((0, 0), |(low, high), end| {
        (low + end.min(0), high + end.max(0))
    });
    (axis.offset + low, axis.offset + high)
}

fn coefficient(axis: &Axis, dim: usize) -> i64 {
    axis.terms.iter().filter(|t| t.0 == dim).map(|t| t.1).sum()
}

/// How an operand is indexed by two dims that may be digits of one.
enum DigitIndexing {
    /// Neither digit indexes it.
    Nowhere,
    /// Both digits index it, in one axis.
    Together(usize),
    /// Each digit indexes an axis of its own, the lower digit's inside the higher one's.
    Adjacent { high: usize, low: usize },
}

/// Where two dims stand in an operand if they can be joined there.
fn place(operand: &Operand, dims: &[i64], high: usize, low: usize) -> Option<DigitIndexing> {
    let with = |dim: usize| {
        let mut found = (0..operand.axes.len()).filter(move |i| {
            let axis: &Axis = &operand.axes[*i];
            axis.terms.iter().any(|t| t.0 == dim)
        });
        (found.next(), found.next())
    };
    match (with(high), with(low)) {
        ((None, _), (None, _)) => Some(DigitIndexing::Nowhere),
        ((Some(x), None), (Some(y), None)) if x == y => {
            let axis = &operand.axes[x];
            let fits = coefficient(axis, high) == coefficient(axis, low) * dims[low];
            fits.then_some(DigitIndexing::Together(x))
        }
        ((Some(x), None), (Some(y), None)) => {
            let (outer, inner) = (&operand.axes[x], &operand.axes[y]);
            let whole = inner.terms == [(low, 1)] && inner.offset == 0 && inner.size == dims[low];
            let fits = whole
                && !inner.guarded
                && coefficient(outer, high) == 1
                && outer.stride == inner.stride * inner.size;
            fits.then_some(DigitIndexing::Adjacent { high: x, low: y })
        }
        _ => None,
    }
}

/// Fewer neighbouring elements than that do not fill a vector.
const FEW: i64 = 16;

/// Two dims that are digits of one position in every operand that has them, and that some axis sums or whose lower
/// digit alone would leave vectors nearly empty, as the channels of a group do.
fn joinable_pair(c: &Contraction) -> Option<(usize, usize)> {
    let all = [&c.a, &c.b, &c.out];
    let fits =
        |high, low| high != low && all.iter().all(|o| place(o, &c.dims, high, low).is_some());
    for axis in all.iter().flat_map(|o| &o.axes) {
        for &(high, k_high) in &axis.terms {
            for &(low, k_low) in &axis.terms {
                if k_high == k_low * c.dims[low] && fits(high, low) {
                    return Some((high, low));
                }
            }
        }
    }
    let innermost = all
        .iter()
        .flat_map(|o| &o.axes)
        .filter(|axis| axis.stride == 1);
    for low in innermost.flat_map(|axis| &axis.terms).map(|t| t.0) {
        let is_short = (2..FEW).contains(&c.dims[low]);
        let high = (0..c.dims.len()).find(|high| c.dims[*high] > 1 && is_short && fits(*high, low));
        if let Some(high) = high {
            return Some((high, low));
        }
    }
    None
}

/// Makes `high` the dim of both digits.
fn join(c: &mut Contraction, high: usize, low: usize) {
    let dims = c.dims.clone();
    for operand in operands(c) {
        match place(operand, &dims, high, low) {
            Some(DigitIndexing::Together(x)) => {
                let axis = &mut operand.axes[x];
                let step = coefficient(axis, low);
                axis.terms.retain(|t| t.0 != low);
                axis.terms
                    .iter_mut()
                    .filter(|t| t.0 == high)
                    .for_each(|t| t.1 = step);
            }
            Some(DigitIndexing::Adjacent { high: x, low: y }) => {
                let inner = operand.axes[y].clone();
                let outer = &mut operand.axes[x];
                outer.stride = inner.stride;
                outer.size *= inner.size;
                outer.offset *= inner.size;
                for t in outer.terms.iter_mut().filter(|t| t.0 != high) {
                    t.1 *= inner.size;
                }
                operand.axes.remove(y);
            }
            Some(DigitIndexing::Nowhere) | None => {}
        }
    }
    c.dims[high] *= dims[low];
    c.dims[low] = 1;
}

/// Gives each digit of an unguarded axis an axis of its own. With `covers`, only where the digits
/// reach every position: positions of an output that nothing reaches are zero, and one axis must say so.
fn split_axes(operand: &mut Operand, dims: &[i64], covers: bool) {
    let mut axes = Vec::new();
    for axis in std::mem::take(&mut operand.axes) {
        let sorted = digits(&axis, dims);
        let reached = || sorted.iter().map(|t| dims[t.0]).product::<i64>() == axis.size;
        if sorted.len() < 2 || (covers && !(axis.offset == 0 && reached())) {
            axes.push(axis);
            continue;
        }
        operand.base += axis.offset * axis.stride;
        axes.extend(sorted.into_iter().map(|(dim, k)| Axis {
            size: dims[dim],
            stride: axis.stride * k,
            terms: vec![(dim, 1)],
            offset: 0,
            guarded: false,
        }));
    }
    operand.axes = axes;
}

/// The terms of an unguarded axis from the highest digit to the lowest, if no two positions of the
/// lower digits together reach the next higher one's step; empty if they overlap.
fn digits(axis: &Axis, dims: &[i64]) -> Vec<(usize, i64)> {
    let mut terms = axis.terms.clone();
    terms.sort_by_key(|t| std::cmp::Reverse(t.1));
    let mut reached = 0;
    for &(dim, k) in terms.iter().rev() {
        if axis.guarded || k <= reached {
            return Vec::new();
        }
        reached += k * (dims[dim] - 1);
    }
    terms
}

#[cfg(test)]
mod tests {
    use super::super::Element;
    use super::*;

    fn axis(size: i64, stride: i64, terms: &[(usize, i64)], offset: i64) -> Axis {
        Axis {
            size,
            stride,
            terms: terms.to_vec(),
            offset,
            guarded: true,
        }
    }

    fn operand(axes: Vec<Axis>) -> Operand {
        Operand { axes, base: 0 }
    }

    /// `dx[2*p0 + p1 + r - 1] += dy[p0][p1] * w[r]`, `dy` with the given strides.
    fn behind_a_pool(outer: i64, inner: i64) -> Contraction {
        Contraction {
            element: Element::F32,
            dims: vec![5, 2, 3],
            a: operand(vec![
                axis(5, outer, &[(0, 1)], 0),
                axis(2, inner, &[(1, 1)], 0),
            ]),
            b: operand(vec![axis(3, 1, &[(2, 1)], 0)]),
            out: operand(vec![axis(10, 1, &[(0, 2), (1, 1), (2, 1)], -1)]),
        }
    }

    #[test]
    fn digits_of_one_position_become_one_dim() {
        let c = normal_form(&behind_a_pool(2, 1));
        assert_eq!(c.dims, [10, 1, 3]);
        let [dy] = c.a.axes.as_slice() else {
            panic!("{:?}", c.a)
        };
        assert_eq!(
            (dy.size, dy.stride, dy.terms.as_slice()),
            (10, 1, &[(0, 1)][..])
        );
        assert_eq!(c.out.axes[0].terms, [(0, 1), (2, 1)]);
        assert!(c.out.axes[0].guarded);
    }

    #[test]
    fn groups_of_few_channels_become_one_dim() {
        // dw[8][6][i] += dy[r][8][6] * x[r][i]
        let grouped = |few: i64| Contraction {
            element: Element::F32,
            dims: vec![8, few, 48, 100],
            a: operand(vec![
                axis(100, 8 * few, &[(3, 1)], 0),
                axis(8, few, &[(0, 1)], 0),
                axis(few, 1, &[(1, 1)], 0),
            ]),
            b: operand(vec![axis(100, 48, &[(3, 1)], 0), axis(48, 1, &[(2, 1)], 0)]),
            out: operand(vec![
                axis(8, 48 * few, &[(0, 1)], 0),
                axis(few, 48, &[(1, 1)], 0),
                axis(48, 1, &[(2, 1)], 0),
            ]),
        };
        let c = normal_form(&grouped(6));
        assert_eq!(c.dims, [48, 1, 48, 100]);
        assert_eq!((c.a.axes.len(), c.out.axes.len()), (2, 2));
        assert_eq!(
            (c.out.axes[0].stride, c.out.axes[0].terms.as_slice()),
            (48, &[(0, 1)][..])
        );
        assert_eq!(normal_form(&grouped(64)).dims, [8, 64, 48, 100]);
    }

    #[test]
    fn digits_that_are_not_neighbours_in_memory_stay_two_dims() {
        let c = normal_form(&behind_a_pool(1, 5));
        assert_eq!(c.dims, [5, 2, 3]);
        assert_eq!(c.out.axes[0].terms.len(), 3);
    }

    #[test]
    fn groups_become_axes_of_their_own() {
        let grouped = Contraction {
            element: Element::F32,
            dims: vec![3, 4, 2],
            a: operand(vec![axis(6, 1, &[(0, 2), (2, 1)], 0)]),
            b: operand(vec![
                axis(12, 2, &[(0, 4), (1, 1)], 0),
                axis(2, 1, &[(2, 1)], 0),
            ]),
            out: operand(vec![axis(12, 1, &[(0, 4), (1, 1)], 0)]),
        };
        let c = normal_form(&grouped);
        let strides = |o: &Operand| o.axes.iter().map(|a| a.stride).collect::<Vec<_>>();
        assert_eq!(strides(&c.a), [2, 1]);
        assert_eq!(strides(&c.b), [8, 2, 1]);
        assert_eq!(strides(&c.out), [4, 1]);
    }

    #[test]
    fn an_output_with_gaps_between_its_digits_keeps_one_axis() {
        let strided = Contraction {
            element: Element::F32,
            dims: vec![3, 2, 4],
            a: operand(vec![axis(3, 4, &[(0, 1)], 0), axis(4, 1, &[(2, 1)], 0)]),
            b: operand(vec![axis(2, 4, &[(1, 1)], 0), axis(4, 1, &[(2, 1)], 0)]),
            out: operand(vec![axis(9, 1, &[(0, 3), (1, 1)], 0)]),
        };
        assert_eq!(normal_form(&strided).out.axes[0].terms.len(), 2);
    }
}
