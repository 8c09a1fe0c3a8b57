//! A convolution as cuDNN describes it: images, filters, a window, and what is done to each finished sum.
//!
//! Owns the description and its one text, which tables are keyed by. Never reads a graph.

use super::gemm::Finish;
use graph::DType;
use std::fmt;

/// Over two spatial directions, as deep learning means it (cross-correlation):
/// `y[n, k, p, q] = sum over c, r, s of x[n, c, p*stride + r*dilation - pad, likewise] * w[k, c, r, s]`,
/// where x is 0 beyond its borders and each group of channels has filters of its own; or the sum of
/// those same products that gives x or w.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Convolution {
    /// Which of the three is computed.
    pub direction: Direction,
    /// Images `[N, C, H, W]`.
    pub x: Array,
    /// Filters `[K, C / groups, R, S]`.
    pub w: Array,
    /// Responses `[N, K, P, Q]`.
    pub y: Array,
    /// Groups of channels.
    pub groups: i64,
    /// Zeros before the first row and column of x, and those after the last that are read.
    pub pads: [[i64; 2]; 2],
    /// Rows and columns from one response to the next.
    pub strides: [i64; 2],
    /// Rows and columns from one tap to the next.
    pub dilations: [i64; 2],
    /// What is done to a finished sum: nothing, except for responses.
    pub finish: Finish,
    /// Whether the first operand is the contraction's second factor.
    pub is_swapped: bool,
}

/// Which array of a convolution is computed from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// y from x and w.
    Forward,
    /// x from y and w: the gradient of the images.
    Data,
    /// w from x and y: the gradient of the filters.
    Filter,
}

/// An array of four dimensions in memory: element `[i, j, k, l]` is `offset` plus the sum of each index times
/// its stride, in elements after the buffer's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Array {
    /// Type of its elements; sums are f32.
    pub dtype: DType,
    /// Sizes in the order of the convolution's description, whatever lies where.
    pub sizes: [i64; 4],
    /// Distances of neighbours.
    pub strides: [i64; 4],
    /// Elements before the first.
    pub offset: i64,
}

impl Convolution {
    /// Multiplications and additions, two per term, borders included.
    pub fn flops(&self) -> u64 {
        let [_, c, r, s] = self.w.sizes;
        (self.y.sizes.iter().chain(&[c, r, s])).fold(2, |all: u64, n| all.saturating_mul(*n as u64))
    }

    /// What it reads, first and second, and what it writes, with the names of its description.
    pub fn operands(&self) -> [(&'static str, &Array); 3] {
        let (x, w, y) = (("x", &self.x), ("w", &self.w), ("y", &self.y));
        match self.direction {
            Direction::Forward => [x, w, y],
            Direction::Data => [y, w, x],
            Direction::Filter => [x, y, w],
        }
    }
}

impl Array {
    /// Elements.
    pub fn len(&self) -> i64 {
        self.sizes.iter().product()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Position of an element in the buffer.
    pub fn place(&self, at: [i64; 4]) -> i64 {
        let along = at.iter().zip(&self.strides);
        self.offset + along.map(|(i, stride)| i * stride).sum::<i64>()
    }

    /// Whether every element is there once, without gaps, in the order of these dimensions, the slowest
    /// first.
    pub fn is_dense_in(&self, order: [usize; 4]) -> bool {
        let mut stride = 1;
        order.iter().rev().all(|d| {
            let fits = self.sizes[*d] == 1 || self.strides[*d] == stride;
            stride *= self.sizes[*d];
            fits
        })
    }

    /// Bytes from the buffer's start to the first element.
    pub fn offset_bytes(&self) -> u64 {
        self.offset.unsigned_abs() * self.dtype.bytes() as u64
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Direction::Forward => "forward",
            Direction::Data => "data gradient",
            Direction::Filter => "filter gradient",
        })
    }
}

impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |all: &[i64; 4]| all.map(|n| n.to_string()).join("x");
        write!(f, "{} {}", self.dtype, text(&self.sizes))?;
        if self.is_dense_in([0, 2, 3, 1]) {
            f.write_str(" channels last")?;
        } else if self.is_dense_in([0, 1, 2, 3]) {
            f.write_str(" channels first")?;
        } else {
            write!(f, " strides {}", text(&self.strides))?;
        }
        if self.offset != 0 {
            write!(f, " offset {}", self.offset)?;
        }
        Ok(())
    }
}

/// Everything that a time depends on but the device: tables know a convolution by this text.
impl fmt::Display for Convolution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pair = |[a, b]: [i64; 2]| format!("{a}x{b}");
        write!(f, "convolution {}", self.direction)?;
        for (name, array) in [("x", &self.x), ("w", &self.w), ("y", &self.y)] {
            write!(f, "; {name} {array}")?;
        }
        let [before, behind] = self.pads.map(pair);
        write!(f, "; pads {before} {behind} strides {}", pair(self.strides))?;
        write!(f, " dilations {}", pair(self.dilations))?;
        match self.groups {
            1 => Ok(()),
            n => write!(f, " groups {n}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_of_one_may_lie_anywhere() {
        let array = Array {
            dtype: DType::BF16,
            sizes: [8, 64, 1, 1],
            strides: [64, 1, 7, 9],
            offset: 0,
        };
        assert!(array.is_dense_in([0, 2, 3, 1]) && array.is_dense_in([0, 1, 2, 3]));
        assert_eq!(array.to_string(), "bf16 8x64x1x1 channels last");
        let part = Array {
            sizes: [8, 32, 2, 3],
            strides: [384, 1, 192, 64],
            offset: 32,
            ..array
        };
        assert_eq!(
            part.to_string(),
            "bf16 8x32x2x3 strides 384x1x192x64 offset 32"
        );
        assert_eq!((part.place([1, 2, 1, 1]), part.offset_bytes()), (674, 64));
    }
}
