//! Copies of strided views: what transposes, slices, repetitions and broadcasts come down to.
//!
//! Owns the walk over several operands at once ([`Walk`]). Never computes with elements.

use crate::same_type;
use crate::tensor::Tensor;

/// Elements of a tensor as another one sees them: sizes, and per dimension the distance in the source.
#[derive(Clone, Debug)]
pub struct View {
    /// Sizes of the result.
    pub shape: Vec<usize>,
    /// Distance in the source between neighbours along each dimension; 0 repeats.
    pub strides: Vec<isize>,
    /// Position of the first element in the source.
    pub first: usize,
}

/// Distances between neighbours of a row-major tensor.
pub fn steps(shape: &[usize]) -> Vec<usize> {
    let mut steps = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        steps[d - 1] = steps[d] * shape[d];
    }
    steps
}

impl View {
    /// The whole of a row-major tensor.
    pub fn whole(shape: &[usize]) -> View {
        View {
            shape: shape.to_vec(),
            strides: steps(shape).into_iter().map(|s| s as isize).collect(),
            first: 0,
        }
    }

    /// Dimension `d` of the result is dimension `order[d]` of this.
    pub fn permuted(&self, order: &[usize]) -> View {
        View {
            shape: order.iter().map(|d| self.shape[*d]).collect(),
            strides: order.iter().map(|d| self.strides[*d]).collect(),
            first: self.first,
        }
    }

    /// Repeated along leading and size-1 dimensions to sizes `to`, which this broadcasts to.
    pub fn broadcast(&self, to: &[usize]) -> View {
        let skip = to.len() - self.shape.len();
        let mut strides = vec![0; skip];
        let own = self.shape.iter().zip(&self.strides);
        strides.extend(own.map(|(n, s)| if *n == 1 { 0 } else { *s }));
        View {
            shape: to.to_vec(),
            strides,
            first: self.first,
        }
    }

    /// The elements in the order of the result.
    pub fn copied<T: Clone + Default>(&self, from: &[T]) -> Vec<T> {
        let n: usize = self.shape.iter().product();
        if n == 0 {
            return Vec::new();
        }
        let walk = Walk::new(&self.shape, [&self.strides]);
        match walk.transposed() {
            Some(across) => walk.copy_tiles(from, self.first, across, n),
            None => walk.copy_runs(from, self.first, n),
        }
    }
}

/// The elements a view sees, as a tensor.
pub fn taken(x: &Tensor, view: &View) -> Tensor {
    let values = same_type!(&*x.values, v => view.copied(v));
    Tensor::new(&view.shape, values)
}

/// A row-major walk over a result, with positions in `K` operands. Neighbouring dimensions that every operand walks
/// with one distance are merged.
pub struct Walk<const K: usize> {
    shape: Vec<usize>,
    strides: [Vec<isize>; K],
}

impl<const K: usize> Walk<K> {
    /// A walk over sizes `shape` with the distances that each operand has along them.
    pub fn new(shape: &[usize], strides: [&[isize]; K]) -> Walk<K> {
        let mut merged: Vec<usize> = Vec::new();
        let mut kept: [Vec<isize>; K] = std::array::from_fn(|_| Vec::new());
        for (d, n) in shape.iter().enumerate() {
            if *n == 1 {
                continue;
            }
            let even = |k: usize| kept[k].last().copied() == Some(strides[k][d] * *n as isize);
            if !merged.is_empty() && (0..K).all(even) {
                let last = merged.len() - 1;
                merged[last] *= n;
                (0..K).for_each(|k| kept[k][last] = strides[k][d]);
            } else {
                merged.push(*n);
                (0..K).for_each(|k| kept[k].push(strides[k][d]));
            }
        }
        if merged.is_empty() {
            merged.push(1);
            (0..K).for_each(|k| kept[k].push(0));
        }
        Walk {
            shape: merged,
            strides: kept,
        }
    }

    /// Elements and distances of the innermost dimension.
    pub fn run(&self) -> (usize, [isize; K]) {
        let last = self.shape.len() - 1;
        (
            self.shape[last],
            std::array::from_fn(|k| self.strides[k][last]),
        )
    }

    /// Calls `f` with the operands' positions at the start of every run, in order.
    pub fn runs(&self, f: impl FnMut([isize; K])) {
        self.outer(&[self.shape.len() - 1], f);
    }

    /// Calls `f` with the operands' positions for every index of the dimensions but `without`.
    fn outer(&self, without: &[usize], mut f: impl FnMut([isize; K])) {
        if self.shape.contains(&0) {
            return;
        }
        let dims: Vec<usize> = (0..self.shape.len())
            .filter(|d| !without.contains(d))
            .collect();
        let mut index = vec![0; dims.len()];
        let mut at = [0isize; K];
        loop {
            f(at);
            let mut moved = false;
            for (i, d) in dims.iter().enumerate().rev() {
                index[i] += 1;
                for (at, strides) in at.iter_mut().zip(&self.strides) {
                    *at += strides[*d];
                }
                if index[i] < self.shape[*d] {
                    moved = true;
                    break;
                }
                for (at, strides) in at.iter_mut().zip(&self.strides) {
                    *at -= strides[*d] * self.shape[*d] as isize;
                }
                index[i] = 0;
            }
            if !moved {
                return;
            }
        }
    }
}

/// Elements of a square that is transposed at a time.
const TILE: usize = 32;

impl Walk<1> {
    /// The dimension whose neighbours are neighbours in the source, if it is not the innermost.
    fn transposed(&self) -> Option<usize> {
        let last = self.shape.len() - 1;
        if matches!(self.strides[0][last], 0 | 1) {
            return None;
        }
        (0..last).find(|d| self.strides[0][*d] == 1)
    }

    fn copy_runs<T: Clone>(&self, from: &[T], first: usize, n: usize) -> Vec<T> {
        let mut to = Vec::with_capacity(n);
        let (run, [stride]) = self.run();
        self.runs(|[at]| {
            let at = (first as isize + at) as usize;
            match stride {
                1 => to.extend_from_slice(&from[at..at + run]),
                0 => to.resize(to.len() + run, from[at].clone()),
                _ => to.extend(
                    (0..run as isize).map(|i| from[(at as isize + i * stride) as usize].clone()),
                ),
            }
        });
        to
    }

    fn copy_tiles<T: Clone + Default>(
        &self,
        from: &[T],
        first: usize,
        across: usize,
        n: usize,
    ) -> Vec<T> {
        let last = self.shape.len() - 1;
        let places = steps(&self.shape);
        let (rows, columns) = (self.shape[across], self.shape[last]);
        let (row, stride) = (places[across], self.strides[0][last]);
        let signed: Vec<isize> = places.iter().map(|s| *s as isize).collect();
        let both = Walk {
            shape: self.shape.clone(),
            strides: [self.strides[0].clone(), signed],
        };
        let mut to = vec![T::default(); n];
        both.outer(&[across, last], |[at, place]| {
            let (at, place) = (first as isize + at, place as usize);
            for top in (0..rows).step_by(TILE) {
                for left in (0..columns).step_by(TILE) {
                    for i in top..rows.min(top + TILE) {
                        let right = columns.min(left + TILE);
                        let line = &mut to[place + i * row + left..place + i * row + right];
                        let start = at + i as isize + left as isize * stride;
                        for (j, to) in line.iter_mut().enumerate() {
                            *to = from[(start + j as isize * stride) as usize].clone();
                        }
                    }
                }
            }
        });
        to
    }
}

/// `f` of two operands' elements, broadcast to sizes `shape`.
pub fn zipped<A: Copy, B: Copy, R: Clone>(
    (a, from_a): (&[A], &[usize]),
    (b, from_b): (&[B], &[usize]),
    shape: &[usize],
    f: impl Fn(A, B) -> R,
) -> Vec<R> {
    let (va, vb) = (
        View::whole(from_a).broadcast(shape),
        View::whole(from_b).broadcast(shape),
    );
    let walk = Walk::new(shape, [&va.strides, &vb.strides]);
    let (run, strides) = walk.run();
    let mut to = Vec::with_capacity(shape.iter().product());
    walk.runs(|[i, j]| {
        let (i, j) = (i as usize, j as usize);
        match strides {
            [0, 0] => to.resize(to.len() + run, f(a[i], b[j])),
            [0, _] => {
                let x = a[i];
                to.extend(b[j..j + run].iter().map(|y| f(x, *y)));
            }
            [_, 0] => {
                let y = b[j];
                to.extend(a[i..i + run].iter().map(|x| f(*x, y)));
            }
            _ => {
                let pairs = a[i..i + run].iter().zip(&b[j..j + run]);
                to.extend(pairs.map(|(x, y)| f(*x, *y)));
            }
        }
    });
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The view's elements one at a time.
    fn plain(view: &View, from: &[i32]) -> Vec<i32> {
        let n: usize = view.shape.iter().product();
        let at = |mut n: usize| {
            let mut at = view.first as isize;
            for d in (0..view.shape.len()).rev() {
                at += (n % view.shape[d]) as isize * view.strides[d];
                n /= view.shape[d];
            }
            from[at as usize]
        };
        (0..n).map(at).collect()
    }

    #[test]
    fn every_permutation_is_copied_right() {
        let shape = [3, 40, 2, 33];
        let from: Vec<i32> = (0..shape.iter().product::<usize>() as i32).collect();
        for a in 0..4 {
            for b in 0..4 {
                for c in 0..4 {
                    let order = [a, b, c, 6usize.wrapping_sub(a + b + c)];
                    let mut sorted = order;
                    sorted.sort_unstable();
                    if sorted != [0, 1, 2, 3] {
                        continue;
                    }
                    let view = View::whole(&shape).permuted(&order);
                    assert_eq!(view.copied(&from), plain(&view, &from), "{order:?}");
                }
            }
        }
    }

    #[test]
    fn repeated_and_reversed_views_are_copied_right() {
        let from: Vec<i32> = (0..12).collect();
        let view = View {
            shape: vec![2, 3, 2, 2],
            strides: vec![0, 4, 0, -2],
            first: 3,
        };
        assert_eq!(view.copied(&from), plain(&view, &from));
        let none = View::whole(&[3, 0]);
        assert_eq!(none.copied(&from), Vec::<i32>::new());
        let one = View::whole(&[]);
        assert_eq!(one.copied(&from[..1]), [0]);
    }

    #[test]
    fn operands_meet_where_they_broadcast() {
        let (a, b) = ([1, 2, 3, 4, 5, 6], [10, 20]);
        let sum = zipped((&a, &[3, 2]), (&b, &[2]), &[3, 2], |x, y| x + y);
        assert_eq!(sum, [11, 22, 13, 24, 15, 26]);
        let sum = zipped((&b, &[2, 1, 1]), (&a, &[3, 2]), &[2, 3, 2], |x, y| x + y);
        assert_eq!(sum, [11, 12, 13, 14, 15, 16, 21, 22, 23, 24, 25, 26]);
    }
}
