//! Operators of ONNX Runtime (domain `com.microsoft`) on weights of few bits, quantized in blocks along their last
//! dimension: MatMulNBits and GatherBlockQuantized.
//!
//! Owns how numbers of 2, 4 and 8 bits lie in bytes: the first one in the lowest bits, each row in bytes of its own.
//! Products are exact: `accuracy_level`, by which ONNX Runtime may round the other operand, is not followed.

use super::products::{matrix, matrix_mut, multiply};
use super::real::{Real, in_real};
use super::{Call, Inference, Operator};
use crate::attributes::Attributes;
use crate::fact::Fact;
use crate::tensor::{Tensor, Values};
use graph::SymExpr;
use std::borrow::Cow;

pub const ROWS: &[Operator] = &[
    Operator::new(
        "MatMulNBits",
        infer_product,
        |call| in_real!(call.input(0)?.element(), R => product::<R>(call)),
    )
    .domain("com.microsoft"),
    Operator::new(
        "GatherBlockQuantized",
        infer_rows,
        |call| in_real!(call.input(2)?.element(), R => rows::<R>(call)),
    )
    .domain("com.microsoft"),
];

/// Rows of numbers of few bits.
struct Packed<'a> {
    bytes: &'a [u8],
    /// Bytes of a row.
    row: usize,
    bits: usize,
}

impl<'a> Packed<'a> {
    fn new(tensor: &'a Tensor, n_rows: usize, bits: usize) -> Result<Packed<'a>, String> {
        let Values::U8(bytes) = &*tensor.values else {
            return Err(format!(
                "weights or zero points of type {} are not supported",
                tensor.element()
            ));
        };
        let row = bytes.len().checked_div(n_rows).unwrap_or(0);
        match row * n_rows == bytes.len() {
            true => Ok(Packed { bytes, row, bits }),
            false => Err(format!("{:?} are not {n_rows} rows", tensor.shape)),
        }
    }

    /// Numbers that a row has room for.
    fn length(&self) -> usize {
        self.row * 8 / self.bits
    }

    fn at(&self, row: usize, n: usize) -> u8 {
        let (byte, shift) = (n * self.bits / 8, n * self.bits % 8);
        let mask = u8::MAX >> (8 - self.bits);
        self.bytes[row * self.row + byte] >> shift & mask
    }
}

/// Quantized rows: `(number − zero point) · scale`, with one scale and zero point for each block.
struct Blocks<'a, R: Real> {
    numbers: Packed<'a>,
    scales: Cow<'a, [R]>,
    zeros: Zeros<'a, R>,
    /// Numbers in a block, and blocks of a row.
    size: usize,
    n_blocks: usize,
    /// The block of each number of a row, where numbers were reordered.
    order: Option<Vec<usize>>,
}

enum Zeros<'a, R: Real> {
    Same(R),
    Packed(Packed<'a>),
    Real(Cow<'a, [R]>),
}

impl<'a, R: Real> Blocks<'a, R> {
    /// `n_rows` rows of `length` numbers; `inputs` are the positions of numbers, scales and zero points.
    fn new(
        call: &'a Call,
        [numbers, scales, zeros]: [usize; 3],
        (n_rows, length): (usize, usize),
        (bits, size): (usize, usize),
    ) -> Result<Blocks<'a, R>, String> {
        let n_blocks = length.div_ceil(size);
        let numbers = Packed::new(call.input(numbers)?, n_rows, bits)?;
        let scales = R::read(call.input(scales)?)?;
        let zeros = match call.optional(zeros) {
            None => Zeros::Same(R::of(f64::from(1u32 << (bits - 1)))),
            Some(zeros) if zeros.element().is_float() => Zeros::Real(R::read(zeros)?),
            Some(zeros) => Zeros::Packed(Packed::new(zeros, n_rows, bits)?),
        };
        let n_zeros = match &zeros {
            Zeros::Same(_) => n_blocks,
            Zeros::Packed(zeros) => zeros.length(),
            Zeros::Real(zeros) => zeros.len().checked_div(n_rows).unwrap_or(0),
        };
        if numbers.length() < length || scales.len() != n_rows * n_blocks || n_zeros < n_blocks {
            return Err("its numbers, scales and zero points do not fit".to_string());
        }
        Ok(Blocks {
            numbers,
            scales,
            zeros,
            size,
            n_blocks,
            order: None,
        })
    }

    /// Writes the numbers of a row as floats.
    fn read(&self, row: usize, to: &mut [R]) {
        for (n, to) in to.iter_mut().enumerate() {
            let block = self.order.as_ref().map_or(n / self.size, |order| order[n]);
            let at = row * self.n_blocks + block;
            let zero = match &self.zeros {
                Zeros::Same(zero) => *zero,
                Zeros::Packed(zeros) => R::of(f64::from(zeros.at(row, block))),
                Zeros::Real(zeros) => zeros[at],
            };
            *to = (R::of(f64::from(self.numbers.at(row, n))) - zero) * self.scales[at];
        }
    }
}

/// Bits of a number, and numbers of a block.
fn form(attributes: Attributes, size: i64) -> Result<(usize, usize), String> {
    let bits = attributes.int("bits").unwrap_or(4);
    let size = attributes.int("block_size").unwrap_or(size);
    match (bits, usize::try_from(size)) {
        (2 | 4 | 8, Ok(size)) if size > 0 => Ok((bits as usize, size)),
        _ => Err(format!("{bits} bits in blocks of {size} are not supported")),
    }
}

/// `x·wᵀ + bias` of the quantized rows `w`.
fn product<R: Real>(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let (inner, width) = (call.positive("K")?, call.positive("N")?);
    let form = form(call.attributes, 0)?;
    if x.shape.last() != Some(&inner) {
        return Err(format!("{:?} are not rows of {inner}", x.shape));
    }
    let mut blocks = Blocks::<R>::new(call, [1, 2, 3], (width, inner), form)?;
    if call.optional(4).is_some() {
        let order: Option<Vec<usize>> = (call.ints(4)?.iter().take(inner))
            .map(|n| usize::try_from(*n).ok().filter(|n| *n < blocks.n_blocks))
            .collect();
        let order = order.filter(|order| order.len() == inner);
        blocks.order = Some(order.ok_or("its group indices do not fit")?);
    }
    let mut weights = vec![R::zero(); width * inner];
    for (row, to) in weights.chunks_mut(inner.max(1)).enumerate() {
        blocks.read(row, to);
    }
    let n_rows = x.shape[..x.shape.len() - 1].iter().product();
    let mut y = vec![R::zero(); n_rows * width];
    if !y.is_empty() && inner > 0 {
        let values = R::read(x)?;
        let weights = matrix(&weights, width, inner)?;
        let to = matrix_mut(&mut y, n_rows, width)?;
        multiply(matrix(&values, n_rows, inner)?, weights.t(), to);
    }
    if let Some(bias) = call.optional(5) {
        let bias = R::read(bias)?;
        if bias.len() != width {
            return Err("its bias does not fit".to_string());
        }
        for row in y.chunks_mut(width.max(1)) {
            row.iter_mut().zip(bias.iter()).for_each(|(y, b)| *y += *b);
        }
    }
    let mut shape = x.shape.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = width;
    }
    Ok(vec![R::tensor(x.element(), &shape, y)?])
}

/// Rows of a quantized table.
fn rows<R: Real>(call: &Call) -> Result<Vec<Tensor>, String> {
    let (table, indices) = (call.input(0)?, call.input(1)?);
    let (bits, size) = form(call.attributes, 128)?;
    let axis = |name: &str, default: i64| call.attributes.int(name).unwrap_or(default);
    let [n_rows, n_bytes] = table.shape[..] else {
        return Err(format!(
            "a table of sizes {:?} is not supported",
            table.shape
        ));
    };
    if axis("gather_axis", 0) != 0 || !matches!(axis("quantize_axis", 1), 1 | -1) {
        return Err("a table of blocks along other dimensions is not supported".to_string());
    }
    let length = n_bytes.checked_mul(8).ok_or("its table is too large")? / bits;
    let blocks = Blocks::<R>::new(call, [0, 2, 3], (n_rows, length), (bits, size))?;
    let chosen = call.ints(1)?;
    let mut y = vec![R::zero(); chosen.len() * length];
    for (index, to) in chosen.iter().zip(y.chunks_mut(length.max(1))) {
        let row = if *index < 0 {
            *index + n_rows as i64
        } else {
            *index
        };
        let row = usize::try_from(row).ok().filter(|row| *row < n_rows);
        blocks.read(row.ok_or_else(|| format!("there is no row {index}"))?, to);
    }
    let shape = [&indices.shape[..], &[length]].concat();
    Ok(vec![R::tensor(call.input(2)?.element(), &shape, y)?])
}

fn infer_product(cx: &Inference) -> Option<Vec<Fact>> {
    let mut shape = cx.shape(0)?.to_vec();
    *shape.last_mut()? = SymExpr::constant(cx.attributes.int("N")?);
    cx.like_first(Some(shape))
}

fn infer_rows(cx: &Inference) -> Option<Vec<Fact>> {
    let (bits, _) = form(cx.attributes, 128).ok()?;
    let ([_, bytes], indices) = (cx.shape(0)?, cx.shape(1)?) else {
        return None;
    };
    let length = bytes.as_const()?.checked_mul(8)? / bits as i64;
    let shape = [indices, &[SymExpr::constant(length)]].concat();
    Some(vec![Fact::new(cx.element(2), Some(shape))])
}
