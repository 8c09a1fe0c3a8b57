//! Products of matrices: MatMul, Gemm, MatMulInteger, and the product all others are made of.

use super::blocks::{self, Matrix};
use super::movement::Broadcast;
use super::real::{Real, in_real};
use super::{Call, Inference, Operator, broadcast, threads};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::{Tensor, Values};
use graph::SymExpr;
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2, Axis};

pub const ROWS: &[Operator] = &[
    Operator::new("MatMul", infer_matmul, |call| {
        matmul(call.input(0)?, call.input(1)?).map(|y| vec![y])
    }),
    Operator::new("Gemm", infer_gemm, gemm),
    Operator::new("MatMulInteger", infer_matmul_integer, matmul_integer),
];

/// Products of fewer multiplications are not worth a thread.
pub const LEAST: usize = 1 << 18;

/// Rows from which on packing the right operand pays.
const LEAST_ROWS: usize = 4;

/// `c = a·b` on this thread.
pub fn multiply_here<R: Real>(a: ArrayView2<R>, b: ArrayView2<R>, c: &mut ArrayViewMut2<R>) {
    multiply_piece(a, b, c, is_packed(c));
}

/// Whether a product is worth packing its right operand.
fn is_packed<R>(c: &ArrayViewMut2<R>) -> bool {
    c.nrows() >= LEAST_ROWS && c.row(0).as_slice().is_some()
}

/// One thread's part of a product. How it is computed is decided for the whole, so that its roundings do not
/// depend on how many parts there are.
fn multiply_piece<R: Real>(
    a: ArrayView2<R>,
    b: ArrayView2<R>,
    c: &mut ArrayViewMut2<R>,
    packed: bool,
) {
    if packed && a.ncols() > 0 {
        blocks::multiply(a, &mut Matrix(b), c);
    } else {
        general_mat_mul(R::one(), &a, &b, R::zero(), c);
    }
}

/// `c = a·b`, rows or columns of `c` over the threads, whichever are more.
pub fn multiply<R: Real>(a: ArrayView2<R>, b: ArrayView2<R>, mut c: ArrayViewMut2<R>) {
    let (m, n) = c.dim();
    let n_threads = threads::count();
    if n_threads < 2 || m.max(n) < 16 || m * n * a.ncols() < LEAST {
        return multiply_here(a, b, &mut c);
    }
    let packed = is_packed(&c);
    let (axis, size) = if m >= n { (Axis(0), m) } else { (Axis(1), n) };
    // A multiple of the widest register tile.
    let run = size.div_ceil(n_threads).next_multiple_of(16);
    let pieces = c.axis_chunks_iter_mut(axis, run).enumerate();
    threads::each(
        pieces,
        || (),
        |(), (at, mut c)| {
            if axis == Axis(0) {
                let end = at * run + c.nrows();
                let a = a.slice(ndarray::s![at * run..end, ..]);
                multiply_piece(a, b, &mut c, packed);
            } else {
                let end = at * run + c.ncols();
                let b = b.slice(ndarray::s![.., at * run..end]);
                multiply_piece(a, b, &mut c, packed);
            }
        },
    );
}

/// Row-major elements as a matrix.
///
/// # Errors
/// The sizes do not fit.
pub fn matrix<R>(values: &[R], rows: usize, columns: usize) -> Result<ArrayView2<'_, R>, String> {
    ArrayView2::from_shape((rows, columns), values).map_err(|e| e.to_string())
}

/// Row-major elements as a matrix to be written.
///
/// # Errors
/// The sizes do not fit.
pub fn matrix_mut<R>(
    values: &mut [R],
    rows: usize,
    columns: usize,
) -> Result<ArrayViewMut2<'_, R>, String> {
    ArrayViewMut2::from_shape((rows, columns), values).map_err(|e| e.to_string())
}

/// Sizes of the product of tensors of sizes `a` and `b` in the way of NumPy.
pub fn product_shape(a: &[SymExpr], b: &[SymExpr], cx: &Inference) -> Option<Vec<SymExpr>> {
    if a.is_empty() || b.is_empty() {
        return None;
    }
    let rows = a.len().checked_sub(2);
    let columns = b.len().checked_sub(2);
    let batch_a = &a[..rows.unwrap_or(0)];
    let batch_b = &b[..columns.unwrap_or(0)];
    let mut shape = broadcast(&[batch_a, batch_b], cx.unknowns)?;
    shape.extend(rows.map(|d| a[d].clone()));
    shape.extend(columns.map(|d| b[d + 1].clone()));
    Some(shape)
}

fn infer_matmul(cx: &Inference) -> Option<Vec<Fact>> {
    let shape = match (cx.shape(0), cx.shape(1)) {
        (Some(a), Some(b)) => Some(product_shape(a, b, cx)?),
        _ => None,
    };
    cx.like_first(shape)
}

fn infer_matmul_integer(cx: &Inference) -> Option<Vec<Fact>> {
    let mut outputs = infer_matmul(cx)?;
    outputs[0].element = Some(Element::I32);
    Some(outputs)
}

/// Matrices of a product in the way of NumPy.
struct Batch {
    rows: usize,
    inner: usize,
    columns: usize,
    /// Sizes of the batch.
    batch: Vec<usize>,
    a: Broadcast,
    b: Broadcast,
    /// Whether all of `a` times the one matrix `b` is one product.
    one: bool,
    shape: Vec<usize>,
}

impl Batch {
    fn new(a: &[usize], b: &[usize]) -> Result<Batch, String> {
        let refuse = || format!("{a:?} and {b:?} cannot be multiplied");
        let (Some(inner), Some(rank_b)) = (a.last(), b.len().checked_sub(1)) else {
            return Err(refuse());
        };
        let rows = if a.len() > 1 { a[a.len() - 2] } else { 1 };
        let columns = if b.len() > 1 { b[rank_b] } else { 1 };
        if b[rank_b.saturating_sub(1)] != *inner {
            return Err(refuse());
        }
        let batch_a = &a[..a.len().saturating_sub(2)];
        let batch_b = &b[..b.len().saturating_sub(2)];
        let batch = broadcast_sizes(&[batch_a, batch_b]).ok_or_else(refuse)?;
        let mut shape = batch.clone();
        shape.extend((a.len() > 1).then_some(rows));
        shape.extend((b.len() > 1).then_some(columns));
        Ok(Batch {
            rows,
            inner: *inner,
            columns,
            a: Broadcast::new(batch_a, &batch),
            b: Broadcast::new(batch_b, &batch),
            one: batch_b.iter().product::<usize>() == 1,
            batch,
            shape,
        })
    }

    fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Sizes that shapes broadcast to; `None` if they do not fit.
pub fn broadcast_sizes(shapes: &[&[usize]]) -> Option<Vec<usize>> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut joined = vec![1; rank];
    for shape in shapes {
        for (size, given) in joined[rank - shape.len()..].iter_mut().zip(*shape) {
            if *size == 1 {
                *size = *given;
            } else if *given != 1 && given != size {
                return None;
            }
        }
    }
    Some(joined)
}

/// The product in the way of NumPy.
///
/// # Errors
/// A sentence: sizes or types that do not fit.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor, String> {
    if a.element() != b.element() {
        return Err(format!(
            "{} times {} is not defined",
            a.element(),
            b.element()
        ));
    }
    if a.element().is_int() {
        return whole_matmul(a, b);
    }
    in_real!(a.element(), R => real_matmul::<R>(a, b))
}

fn real_matmul<R: Real>(a: &Tensor, b: &Tensor) -> Result<Tensor, String> {
    let batch = Batch::new(&a.shape, &b.shape)?;
    let (va, vb) = (R::read(a)?, R::read(b)?);
    let mut y = vec![R::zero(); batch.len()];
    let (m, k, n) = (batch.rows, batch.inner, batch.columns);
    if y.is_empty() || k == 0 {
        return R::tensor(a.element(), &batch.shape, y);
    }
    let n_products: usize = batch.batch.iter().product();
    if batch.one {
        let rows = y.len() / n;
        let (va, vb) = (matrix(&va, rows, k)?, matrix(&vb, k, n)?);
        multiply(va, vb, matrix_mut(&mut y, rows, n)?);
    } else {
        let operands = |at: usize| {
            let (a, b) = (batch.a.at(at) * m * k, batch.b.at(at) * k * n);
            let a = matrix(&va[a..a + m * k], m, k)?;
            Ok((a, matrix(&vb[b..b + k * n], k, n)?))
        };
        each_product(&mut y, m, n, n_products, operands)?;
    }
    R::tensor(a.element(), &batch.shape, y)
}

type Operands<'a, R> = (ArrayView2<'a, R>, ArrayView2<'a, R>);

/// Writes `n_products` products of sizes `[m, n]` one after the other into `y`, whole products over
/// the threads where there are enough of them.
pub fn each_product<'a, R: Real>(
    y: &mut [R],
    m: usize,
    n: usize,
    n_products: usize,
    operands: impl Fn(usize) -> Result<Operands<'a, R>, String> + Sync,
) -> Result<(), String> {
    if n_products < threads::count() {
        for (at, y) in y.chunks_mut((m * n).max(1)).enumerate() {
            let (a, b) = operands(at)?;
            multiply(a, b, matrix_mut(y, m, n)?);
        }
        return Ok(());
    }
    let first = operands(0)?;
    let work = first.0.len() * n * n_products;
    let least = if work < LEAST { usize::MAX } else { 0 };
    let problem = std::sync::Mutex::new(None);
    threads::runs(y, m * n, least, |at, y| {
        let done = operands(at).and_then(|(a, b)| {
            multiply_here(a, b, &mut matrix_mut(y, m, n)?);
            Ok(())
        });
        if let (Err(what), Ok(mut problem)) = (done, problem.lock()) {
            *problem = Some(what);
        }
    });
    problem.into_inner().ok().flatten().map_or(Ok(()), Err)
}

/// The product of integers, wrapping as the type does.
fn whole_matmul(a: &Tensor, b: &Tensor) -> Result<Tensor, String> {
    let batch = Batch::new(&a.shape, &b.shape)?;
    let elements = |t: &Tensor| match &*t.values {
        Values::U64(v) => Ok(v.iter().map(|x| *x as i64).collect()),
        _ => t.to_i64().ok_or("it is not of integers"),
    };
    let y = whole_product(&batch, &elements(a)?, &elements(b)?);
    Tensor::of_ints(a.element(), &batch.shape, &y).ok_or_else(|| "it is not of integers".into())
}

fn whole_product(batch: &Batch, a: &[i64], b: &[i64]) -> Vec<i64> {
    let (m, k, n) = (batch.rows, batch.inner, batch.columns);
    let mut y = vec![0i64; batch.len()];
    threads::runs(&mut y, n, 1 << 12, |row, y| {
        let (at, row) = (row / m.max(1), row % m.max(1));
        let a = &a[(batch.a.at(at) * m + row) * k..][..k];
        let b = &b[batch.b.at(at) * k * n..];
        for (x, b) in a.iter().zip(b.chunks(n.max(1))) {
            for (y, w) in y.iter_mut().zip(b) {
                *y = y.wrapping_add(x.wrapping_mul(*w));
            }
        }
    });
    y
}

/// Integers less a zero point: one for all, or one for each element along `axis`.
///
/// # Errors
/// It is not of integers, or the zero point fits nothing.
pub fn centered(x: &Tensor, zero: Option<&Tensor>, axis: usize) -> Result<Vec<i64>, String> {
    let mut v = x.to_i64().ok_or("it is not defined on floats")?;
    let Some(zero) = zero else { return Ok(v) };
    let z = zero.to_i64().ok_or("its zero point is not of integers")?;
    if let [z] = z.as_slice() {
        v.iter_mut().for_each(|x| *x -= z);
        return Ok(v);
    }
    let inner: usize = x.shape[(axis + 1).min(x.shape.len())..].iter().product();
    let size = x.shape.get(axis).copied().unwrap_or(1);
    // One for each element along the axis, or for each row of each matrix.
    let per_row = zero.shape.len() == x.shape.len() && z.len() * inner == v.len();
    if z.len() != size && !per_row {
        return Err(format!(
            "a zero point of sizes {:?} fits nothing",
            zero.shape
        ));
    }
    for (n, x) in v.iter_mut().enumerate() {
        *x -= z[n / inner.max(1) % z.len()];
    }
    Ok(v)
}

/// The product of integers less their zero points, as `i64`, with its sizes.
///
/// # Errors
/// A sentence: sizes or types that do not fit.
pub fn centered_product(
    a: &Tensor,
    b: &Tensor,
    zero_a: Option<&Tensor>,
    zero_b: Option<&Tensor>,
) -> Result<(Vec<usize>, Vec<i64>), String> {
    let batch = Batch::new(&a.shape, &b.shape)?;
    let va = centered(a, zero_a, a.shape.len().saturating_sub(2))?;
    let vb = centered(b, zero_b, b.shape.len().saturating_sub(1))?;
    let y = whole_product(&batch, &va, &vb);
    Ok((batch.shape, y))
}

fn matmul_integer(call: &Call) -> Result<Vec<Tensor>, String> {
    let (a, b) = (call.input(0)?, call.input(1)?);
    let (shape, y) = centered_product(a, b, call.optional(2), call.optional(3))?;
    let y = y.into_iter().map(|x| x as i32).collect();
    Ok(vec![Tensor::new(&shape, Values::I32(y))])
}

/// Sizes of `a'·b'`.
pub fn infer_gemm(cx: &Inference) -> Option<Vec<Fact>> {
    let (a, b) = (cx.shape(0)?, cx.shape(1)?);
    if a.len() != 2 || b.len() != 2 {
        return None;
    }
    let rows = a[usize::from(cx.attributes.flag("transA"))].clone();
    let columns = b[1 - usize::from(cx.attributes.flag("transB"))].clone();
    cx.like_first(Some(vec![rows, columns]))
}

fn gemm(call: &Call) -> Result<Vec<Tensor>, String> {
    let element = call.input(0)?.element();
    if element.is_int() {
        return whole_gemm(call).map(|y| vec![y]);
    }
    in_real!(element, R => real_gemm::<R>(call)).map(|y| vec![y])
}

fn two(t: &Tensor) -> Result<(usize, usize), String> {
    match t.shape[..] {
        [m, n] => Ok((m, n)),
        _ => Err(format!("{:?} are not the sizes of a matrix", t.shape)),
    }
}

/// `alpha·a'·b' + beta·c` of a node like Gemm.
///
/// # Errors
/// A sentence: sizes or types that do not fit.
pub fn real_gemm<R: Real>(call: &Call) -> Result<Tensor, String> {
    let (a, b) = (call.input(0)?, call.input(1)?);
    let ((ma, na), (mb, nb)) = (two(a)?, two(b)?);
    let (va, vb) = (R::read(a)?, R::read(b)?);
    let flag = |name: &str| call.attributes.flag(name);
    let (mut ma, mut mb) = (matrix(&va, ma, na)?, matrix(&vb, mb, nb)?);
    if flag("transA") {
        ma = ma.reversed_axes();
    }
    if flag("transB") {
        mb = mb.reversed_axes();
    }
    if ma.ncols() != mb.nrows() {
        return Err(format!(
            "{:?} and {:?} cannot be multiplied",
            ma.dim(),
            mb.dim()
        ));
    }
    let shape = [ma.nrows(), mb.ncols()];
    let mut y = vec![R::zero(); shape[0] * shape[1]];
    if ma.ncols() > 0 {
        multiply(ma, mb, matrix_mut(&mut y, shape[0], shape[1])?);
    }
    let scale = |name: &str| R::of(f64::from(call.attributes.float(name).unwrap_or(1.0)));
    let (alpha, beta) = (scale("alpha"), scale("beta"));
    if alpha != R::one() {
        y.iter_mut().for_each(|y| *y *= alpha);
    }
    if let Some(c) = call.optional(2) {
        if broadcast_sizes(&[&c.shape, &shape]).as_deref() != Some(&shape[..]) {
            return Err(format!("{:?} does not broadcast to {shape:?}", c.shape));
        }
        let (from, vc) = (Broadcast::new(&c.shape, &shape), R::read(c)?);
        for (n, y) in y.iter_mut().enumerate() {
            *y += beta * vc[from.at(n)];
        }
    }
    R::tensor(a.element(), &shape, y)
}

fn whole_gemm(call: &Call) -> Result<Tensor, String> {
    let turned = |at: usize, name: &str| -> Result<Tensor, String> {
        let t = call.input(at)?;
        two(t)?;
        Ok(match call.attributes.flag(name) {
            true => super::permute::permuted(t, &[1, 0]),
            false => t.clone(),
        })
    };
    let product = whole_matmul(&turned(0, "transA")?, &turned(1, "transB")?)?;
    let scale = |name: &str| call.attributes.float(name).unwrap_or(1.0);
    let (alpha, beta) = (scale("alpha"), scale("beta"));
    if alpha != alpha.trunc() || beta != beta.trunc() {
        return Err("a scale that is no integer is not defined on integers".to_string());
    }
    let mut y = product.to_i64().ok_or("it is not of integers")?;
    y.iter_mut().for_each(|y| *y = y.wrapping_mul(alpha as i64));
    if let Some(c) = call.optional(2) {
        if broadcast_sizes(&[&c.shape, &product.shape]).as_ref() != Some(&product.shape) {
            return Err(format!(
                "{:?} does not broadcast to {:?}",
                c.shape, product.shape
            ));
        }
        let from = Broadcast::new(&c.shape, &product.shape);
        let vc = c.to_i64().ok_or("its addend is not of integers")?;
        for (n, y) in y.iter_mut().enumerate() {
            *y = y.wrapping_add(vc[from.at(n)].wrapping_mul(beta as i64));
        }
    }
    Tensor::of_ints(product.element(), &product.shape, &y).ok_or_else(String::new)
}
