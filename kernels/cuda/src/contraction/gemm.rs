//! From a contraction to the plain product that it is, in cuBLASLt's terms, if it is one.
//!
//! Owns the conditions: each role's dims count as one, with one distance from neighbour to neighbour
//! in every operand; nothing is read beyond a border; every operand has a contiguous direction. Where
//! rows or columns do not count as one, the outer ones become a batch over which the other factor is
//! the same. Chooses nothing.

use super::form::{Form, Forms, constant, forms};
use super::{Types, Unsupported};
use crate::vendor::{Compute, Finish, Gemm, Matrix};
use graph::DType;
use kernels::contraction::Contraction;
use kernels::contraction::access::Access;

/// Why a contraction is no plain product.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum NotAGemm {
    /// It has no form at all.
    #[error(transparent)]
    Form(#[from] Unsupported),
    /// It is more than one product.
    #[error("{0}")]
    Shape(&'static str),
    /// The library does not multiply these types.
    #[error("cuBLASLt has no product of {a} and {b} to {out}")]
    Types {
        /// Type of the left factor.
        a: DType,
        /// Type of the right factor.
        b: DType,
        /// Type of the result.
        out: DType,
    },
}

/// The product that a contraction is, without anything done to its sums.
///
/// # Errors
/// Why it is none.
pub fn gemm(c: &Contraction, types: Types) -> Result<Gemm, NotAGemm> {
    kernels::contraction::check(c).map_err(Unsupported::from)?;
    let compute = compute(types)?;
    let Forms { parts, zeros } = forms(c)?;
    let [form] = parts.as_slice() else {
        return Err(NotAGemm::Shape("its results are made in several phases"));
    };
    if !zeros.is_empty() {
        return Err(NotAGemm::Shape(
            "it leaves positions of its result to be zero",
        ));
    }
    if form.a.any_guard() || form.b.any_guard() {
        return Err(NotAGemm::Shape("it reads beyond the border of an operand"));
    }
    Distances::new(form)?.gemm(form, types, compute)
}

fn compute(types: Types) -> Result<Compute, NotAGemm> {
    let Types { a, b, out } = types;
    match (a, b, out) {
        (DType::F32, DType::F32, DType::F32) => Ok(Compute::F32Pedantic),
        (DType::F64, DType::F64, DType::F64) => Ok(Compute::F64),
        (DType::BF16, DType::BF16, DType::BF16 | DType::F32)
        | (DType::F16, DType::F16, DType::F16 | DType::F32) => Ok(Compute::F32),
        _ => Err(NotAGemm::Types { a, b, out }),
    }
}

/// Several dims counted as one.
#[derive(Clone, Copy, Debug)]
struct Counted {
    size: i64,
    /// Distance of neighbours in a, b and out; 0 where the operand lacks the dims.
    a: i64,
    b: i64,
    out: i64,
}

/// Sizes and distances of a product.
struct Distances {
    batch: Counted,
    m: Counted,
    n: Counted,
    k: Counted,
}

impl Distances {
    fn new(form: &Form) -> Result<Distances, NotAGemm> {
        let k = counted(form, &form.k);
        let k = k.ok_or(NotAGemm::Shape("its terms lie at more than one distance"))?;
        let whole = |batch: &[usize], m: &[usize], n: &[usize]| {
            Some(Distances {
                batch: counted(form, batch)?,
                m: counted(form, m)?,
                n: counted(form, n)?,
                k,
            })
        };
        if let Some(done) = whole(&form.batch, &form.m, &form.n) {
            return Ok(done);
        }
        if !form.batch.is_empty() {
            let several = "its products, rows or columns lie at more than one distance";
            return Err(NotAGemm::Shape(several));
        }
        let (m, n) = (sorted(form, &form.m), sorted(form, &form.n));
        let split_m = (1..m.len()).find_map(|at| whole(&m[..at], &m[at..], &n));
        let split_n = || (1..n.len()).find_map(|at| whole(&n[..at], &m, &n[at..]));
        let several = NotAGemm::Shape("its rows or columns lie at more than one distance");
        split_m.or_else(split_n).ok_or(several)
    }

    fn gemm(&self, form: &Form, types: Types, compute: Compute) -> Result<Gemm, NotAGemm> {
        let Distances { batch, m, n, k } = self;
        let is_swapped = match (m.size, n.size) {
            (_, 2..) if n.out == 1 => true,
            (2.., _) if m.out == 1 => false,
            (1, _) => false,
            (_, 1) => true,
            _ => return Err(NotAGemm::Shape("no direction of its result is contiguous")),
        };
        let side = |x: &Access, dtype, batch_stride| Side {
            dtype,
            batch_stride,
            offset: constant(x),
        };
        let a = side(&form.a, types.a, batch.a);
        let b = side(&form.b, types.b, batch.b);
        let out = side(&form.out, types.out, batch.out);
        let (rows, columns) = if is_swapped { (n, m) } else { (m, n) };
        let (left, right, rows_left, columns_right) = match is_swapped {
            true => (b, a, (n.size, n.b, k.b), (m.size, m.a, k.a)),
            false => (a, b, (m.size, m.a, k.a), (n.size, n.b, k.b)),
        };
        let (size, along, term) = rows_left;
        let a = left.matrix(size, along, k.size, term)?;
        let (size, along, term) = columns_right;
        let b = right.matrix(k.size, term, size, along)?;
        let d = out.matrix(rows.size, rows.out, columns.size, columns.out)?;
        if d.is_transposed {
            return Err(NotAGemm::Shape("no direction of its result is contiguous"));
        }
        Ok(Gemm {
            m: rows.size,
            n: columns.size,
            k: k.size,
            a,
            b,
            d,
            batch: batch.size,
            compute,
            finish: Finish::Nothing,
            is_swapped,
        })
    }
}

/// An operand, apart from its rows and columns.
#[derive(Clone, Copy)]
struct Side {
    dtype: DType,
    batch_stride: i64,
    offset: i64,
}

impl Side {
    /// The operand of `rows` that lie `along_rows` apart and columns likewise, as stored.
    fn matrix(
        self,
        rows: i64,
        along_rows: i64,
        columns: i64,
        along_columns: i64,
    ) -> Result<Matrix, NotAGemm> {
        if self.offset < 0 || self.batch_stride < 0 {
            return Err(NotAGemm::Shape("it reads an operand backwards"));
        }
        let fits = |rows, along_rows, columns, ld| {
            (rows == 1 || along_rows == 1) && (columns == 1 || ld >= rows)
        };
        let stored = |is_transposed, rows: i64, columns, ld| Matrix {
            dtype: self.dtype,
            is_transposed,
            rows,
            columns,
            // The distance of a single column means nothing, but must be a legal one.
            ld: if columns == 1 { rows } else { ld },
            batch_stride: self.batch_stride,
            offset: self.offset,
        };
        if fits(rows, along_rows, columns, along_columns) {
            return Ok(stored(false, rows, columns, along_columns));
        }
        if fits(columns, along_columns, rows, along_rows) {
            return Ok(stored(true, columns, rows, along_rows));
        }
        let reason = "no direction of an operand is contiguous, or its columns overlap";
        Err(NotAGemm::Shape(reason))
    }
}

/// Dims as one, if neighbours are equally far apart across all of them, in every operand.
fn counted(form: &Form, dims: &[usize]) -> Option<Counted> {
    let dims = sorted(form, dims);
    let one = |x: &Access| {
        let regular = dims
            .windows(2)
            .all(|d| x.stride(d[0]) == x.stride(d[1]) * form.sizes[d[1]]);
        regular.then(|| dims.last().map_or(0, |d| x.stride(*d)))
    };
    Some(Counted {
        size: form.count(&dims),
        a: one(&form.a)?,
        b: one(&form.b)?,
        out: one(&form.out)?,
    })
}

/// Sorts dims slowest first, as they lie in the result, or else in a.
fn sorted(form: &Form, dims: &[usize]) -> Vec<usize> {
    let mut dims = dims.to_vec();
    dims.sort_by_key(|d| {
        std::cmp::Reverse((form.out.stride(*d), form.a.stride(*d), form.b.stride(*d)))
    });
    dims
}
