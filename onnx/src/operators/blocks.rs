//! The matrix product that all other products use: blocks that fit the caches, in the widest vectors of the machine.
//!
//! Right operands are packed into panels, which have the columns of two vectors and fit the first cache. Left operands
//! are read in place. (Goto, van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, with the roles of
//! the operands exchanged.) A packed operand is a matrix or the windows of a convolution. Never starts a thread.

use ndarray::{ArrayView2, ArrayViewMut2};
use pulp::{Arch, Simd, WithSimd};
use std::cell::RefCell;
use std::ops::Range;
use std::thread::LocalKey;

/// Rows of a right operand that are packed at once.
const DEPTH: usize = 256;
/// Elements of a right operand that are packed at once: half of a second cache.
const PACKED: usize = 1 << 18;
/// Most elements of a cache line.
const LINE: usize = 16;
/// Elements of a tile: of 8 rows and two of the widest vectors.
const TILE: usize = 8 * 2 * 16;

/// A number that vectors are made of.
pub trait Lanes: Copy + num_traits::Zero + std::ops::AddAssign + 'static {
    /// A vector of them.
    type Vector<S: Simd>: Copy;

    /// A vector of equal numbers.
    fn splat<S: Simd>(simd: S, x: Self) -> Self::Vector<S>;

    /// `a·b + c`.
    fn multiply_add<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
    ) -> Self::Vector<S>;

    /// Elements as vectors; elements at the end that do not fill one are left out.
    fn vectors<S: Simd>(elements: &[Self]) -> &[Self::Vector<S>];

    /// The same, mutable.
    fn vectors_mut<S: Simd>(elements: &mut [Self]) -> &mut [Self::Vector<S>];

    /// How many elements a vector has.
    fn width<S: Simd>() -> usize;

    /// Memory of this thread for packed operands, kept between products.
    fn packed() -> &'static LocalKey<RefCell<Vec<Self>>>;
}

macro_rules! lanes {
    ($real:ty, $vector:ident, $splat:ident, $multiply_add:ident, $as:ident, $as_mut:ident, $width:ident) => {
        impl Lanes for $real {
            type Vector<S: Simd> = S::$vector;

            #[inline(always)]
            fn splat<S: Simd>(simd: S, x: $real) -> S::$vector {
                simd.$splat(x)
            }

            #[inline(always)]
            fn multiply_add<S: Simd>(
                simd: S,
                a: S::$vector,
                b: S::$vector,
                c: S::$vector,
            ) -> S::$vector {
                simd.$multiply_add(a, b, c)
            }

            #[inline(always)]
            fn vectors<S: Simd>(elements: &[$real]) -> &[S::$vector] {
                S::$as(elements).0
            }

            #[inline(always)]
            fn vectors_mut<S: Simd>(elements: &mut [$real]) -> &mut [S::$vector] {
                S::$as_mut(elements).0
            }

            fn width<S: Simd>() -> usize {
                S::$width
            }

            fn packed() -> &'static LocalKey<RefCell<Vec<$real>>> {
                thread_local! {
                    static PACKED: RefCell<Vec<$real>> = const { RefCell::new(Vec::new()) };
                }
                &PACKED
            }
        }
    };
}

lanes!(
    f32,
    f32s,
    splat_f32s,
    mul_add_e_f32s,
    as_simd_f32s,
    as_mut_simd_f32s,
    F32_LANES
);
lanes!(
    f64,
    f64s,
    splat_f64s,
    mul_add_e_f64s,
    as_simd_f64s,
    as_mut_simd_f64s,
    F64_LANES
);

/// A right operand `[depth, columns]` that can be packed.
pub trait Right<R> {
    /// Copies rows `rows` and columns `columns` into panels of `width` columns, one after the other, each
    /// row by row; columns that fill no panel are followed by zeros.
    fn pack(&mut self, rows: Range<usize>, columns: Range<usize>, width: usize, panels: &mut [R]);
}

/// A matrix where it is.
pub struct Matrix<'a, R>(pub ArrayView2<'a, R>);

impl<R: Lanes> Right<R> for Matrix<'_, R> {
    #[inline(always)]
    fn pack(&mut self, rows: Range<usize>, columns: Range<usize>, width: usize, panels: &mut [R]) {
        let block = self.0.slice(ndarray::s![rows.clone(), columns.clone()]);
        if block.column(0).as_slice().is_some() && block.ncols() > 1 {
            panels.fill(R::zero());
            for (at, column) in block.columns().into_iter().enumerate() {
                let from = at / width * width * rows.len() + at % width;
                let places = panels[from..].iter_mut().step_by(width);
                places.zip(column).for_each(|(to, x)| *to = *x);
            }
            return;
        }
        for (at, row) in block.rows().into_iter().enumerate() {
            match row.as_slice() {
                Some(row) => pack_row(row, at, rows.len(), width, panels),
                None => pack_row(&row.to_vec(), at, rows.len(), width, panels),
            }
        }
    }
}

/// Copies a row, the one at `at` of `depth`, into its places in panels. Inlined, so that whole pieces are a
/// few of the widest moves.
#[inline(always)]
pub fn pack_row<R: Lanes>(row: &[R], at: usize, depth: usize, width: usize, panels: &mut [R]) {
    let pieces = row.chunks_exact(width);
    let last = pieces.remainder();
    let mut places = panels.chunks_exact_mut(width * depth);
    for (piece, panel) in pieces.zip(&mut places) {
        panel[at * width..][..width].copy_from_slice(piece);
    }
    if let (false, Some(panel)) = (last.is_empty(), places.next()) {
        let (to, rest) = panel[at * width..][..width].split_at_mut(last.len());
        to.copy_from_slice(last);
        rest.fill(R::zero());
    }
}

/// `c = a·b`; the rows of `c` are contiguous, and `a` has columns.
pub fn multiply<R: Lanes>(a: ArrayView2<R>, b: &mut impl Right<R>, c: &mut ArrayViewMut2<R>) {
    let a = a.as_standard_layout();
    R::packed().with_borrow_mut(|space| {
        let product = Product {
            a: a.view(),
            b,
            c,
            space,
        };
        Arch::new().dispatch(product);
    });
}

struct Product<'p, 'c, R, B> {
    a: ArrayView2<'p, R>,
    b: &'p mut B,
    c: &'p mut ArrayViewMut2<'c, R>,
    space: &'p mut Vec<R>,
}

impl<R: Lanes, B: Right<R>> WithSimd for Product<'_, '_, R, B> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Half of the registers hold a tile's sums.
        if S::REGISTER_COUNT >= 32 {
            self.run::<S, 8>(simd);
        } else {
            self.run::<S, 4>(simd);
        }
    }
}

impl<R: Lanes, B: Right<R>> Product<'_, '_, R, B> {
    #[inline(always)]
    fn run<S: Simd, const M: usize>(self, simd: S) {
        let (depth, n_columns) = (self.a.ncols(), self.c.ncols());
        let width = 2 * R::width::<S>();
        let most = (PACKED / DEPTH / width * width).max(width);
        let space = self.space;
        let n_space = DEPTH.min(depth) * most.min(n_columns.next_multiple_of(width)) + LINE;
        if space.len() < n_space {
            space.resize(n_space, R::zero());
        }
        let skip = space
            .as_ptr()
            .align_offset(LINE * size_of::<f32>())
            .min(LINE);
        let space = &mut space[skip..];
        for first in (0..n_columns).step_by(most) {
            let columns = first..(first + most).min(n_columns);
            for from in (0..depth).step_by(DEPTH) {
                let rows = from..(from + DEPTH).min(depth);
                let n_packed = rows.len() * columns.len().next_multiple_of(width);
                let panels = &mut space[..n_packed];
                self.b.pack(rows.clone(), columns.clone(), width, panels);
                let a = self.a.slice(ndarray::s![.., rows]);
                let mut c = self.c.slice_mut(ndarray::s![.., columns.clone()]);
                block::<S, R, M>(simd, a, panels, from > 0, &mut c);
            }
        }
    }
}

/// The product with packed panels, tile by tile; `M` rows of the left operand stay in the first cache.
#[inline(always)]
fn block<S: Simd, R: Lanes, const M: usize>(
    simd: S,
    a: ArrayView2<R>,
    panels: &[R],
    adds: bool,
    c: &mut ArrayViewMut2<R>,
) {
    let (n_rows, depth) = a.dim();
    let width = 2 * R::width::<S>();
    let mut sums = [R::zero(); TILE];
    for first in (0..n_rows).step_by(M) {
        let n = M.min(n_rows - first);
        // After the last row, this row is read again, and the sums are not used.
        let rows: [&[R]; M] = std::array::from_fn(|m| {
            let row = a.row(first + m.min(n - 1)).to_slice();
            row.unwrap_or(&[])
        });
        for (at, panel) in panels.chunks_exact(depth * width).enumerate() {
            tile::<S, R, M>(simd, rows, panel, &mut sums[..M * width]);
            for (m, sums) in sums.chunks_exact(width).take(n).enumerate() {
                let mut row = c.row_mut(first + m);
                let Some(row) = row.as_slice_mut() else {
                    continue;
                };
                let end = row.len().min((at + 1) * width);
                let row = &mut row[at * width..end];
                if adds {
                    row.iter_mut().zip(sums).for_each(|(c, sum)| *c += *sum);
                } else {
                    row.copy_from_slice(&sums[..row.len()]);
                }
            }
        }
    }
}

/// `M` rows times a panel of two vectors' columns.
#[inline(always)]
fn tile<S: Simd, R: Lanes, const M: usize>(simd: S, rows: [&[R]; M], panel: &[R], out: &mut [R]) {
    let (pairs, _) = R::vectors::<S>(panel).as_chunks::<2>();
    let rows = rows.map(|row| &row[..pairs.len()]);
    let mut sums = [[R::splat(simd, R::zero()); 2]; M];
    for (k, [b0, b1]) in pairs.iter().enumerate() {
        for m in 0..M {
            let a = R::splat(simd, rows[m][k]);
            sums[m] = [
                R::multiply_add(simd, a, *b0, sums[m][0]),
                R::multiply_add(simd, a, *b1, sums[m][1]),
            ];
        }
    }
    let (out, _) = R::vectors_mut::<S>(out).as_chunks_mut::<2>();
    out.iter_mut().zip(sums).for_each(|(out, sums)| *out = sums);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array2, s};

    fn numbers(rows: usize, columns: usize) -> Array2<f64> {
        Array2::from_shape_fn((rows, columns), |(i, j)| {
            ((i * 37 + j * 101) % 97) as f64 - 48.0
        })
    }

    fn product(a: ArrayView2<f64>, b: ArrayView2<f64>) -> Array2<f64> {
        let mut c = Array2::from_elem((a.nrows(), b.ncols()), f64::NAN);
        multiply(a, &mut Matrix(b), &mut c.view_mut());
        c
    }

    #[test]
    fn products_of_any_sizes_are_exact_where_numbers_are_whole() {
        for (m, k, n) in [
            (1, 1, 1),
            (3, 5, 2),
            (8, 256, 16),
            (9, 257, 33),
            (17, 700, 1100),
        ] {
            let (a, b) = (numbers(m, k), numbers(k, n));
            let expected = a.dot(&b);
            assert_eq!(product(a.view(), b.view()), expected, "{m} {k} {n}");
            // Transposed operands.
            let (at, bt) = (a.t().to_owned(), b.t().to_owned());
            assert_eq!(product(at.t(), bt.t()), expected, "{m} {k} {n}, turned");
            let narrow = |x: &Array2<f64>| x.mapv(|x| x as f32);
            let (a, b) = (narrow(&a).mapv(|x| x % 8.0), narrow(&b).mapv(|x| x % 8.0));
            let mut c = Array2::zeros((m, n));
            multiply(a.view(), &mut Matrix(b.view()), &mut c.view_mut());
            assert_eq!(c, a.dot(&b), "{m} {k} {n} in f32");
        }
    }

    #[test]
    fn parts_of_a_product_have_the_roundings_of_the_whole() {
        let scaled = |x: Array2<f64>| x.mapv(|x| x / 7.0);
        let (a, b) = (scaled(numbers(37, 600)), scaled(numbers(600, 90)));
        let whole = product(a.view(), b.view());
        let right = product(a.view(), b.slice(s![.., 32..]));
        assert_eq!(right, whole.slice(s![.., 32..]));
        let below = product(a.slice(s![16.., ..]), b.view());
        assert_eq!(below, whole.slice(s![16.., ..]));
    }
}
