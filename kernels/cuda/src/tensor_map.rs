//! What the copy engine of Hopper is told of matrices in memory.
//!
//! Owns the description and the conditions that `cuTensorMapEncodeTiled` sets for one, as cuda.h states them.
//! Never calls the driver.

use graph::DType;

/// Matrices of 16-bit elements in a buffer, as the copy engine is told of them. It copies boxes: lines of 64
/// elements, swizzled in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap {
    /// BF16 or F16.
    pub dtype: DType,
    /// The first element, a multiple of 8.
    pub offset: i64,
    /// Elements of a line, and of lines in two directions: the one with the shorter steps comes first.
    pub sizes: [u32; 3],
    /// Elements from line to line in both directions, multiples of 8.
    pub strides: [u64; 2],
    /// Lines of a box in both directions, at most 256.
    pub lines: [u32; 2],
}

impl TensorMap {
    /// Alignment in bytes of a buffer's address.
    pub const ALIGNMENT: usize = 16;
    /// Elements of a box's line.
    pub const LINE: u32 = 64;

    /// Bytes from line to line in both directions.
    pub fn stride_bytes(&self) -> [u64; 2] {
        self.strides
            .map(|elements| elements.saturating_mul(self.dtype.bytes() as u64))
    }

    /// Checks that the driver accepts the map for a buffer with that alignment.
    ///
    /// # Errors
    /// The condition that it does not keep.
    pub fn check(&self) -> Result<(), &'static str> {
        const SWIZZLED_BYTES: usize = 128;
        let [line, plane] = self.stride_bytes();
        let align = Self::ALIGNMENT as u64;
        let first = self.offset.checked_mul(self.dtype.bytes() as i64);
        let length = u64::from(self.sizes[0]) * self.dtype.bytes() as u64;
        let in_box = Self::LINE as usize * self.dtype.bytes();
        let conditions = [
            (
                matches!(self.dtype, DType::BF16 | DType::F16),
                "elements are bf16 or f16",
            ),
            (
                first.is_some_and(|first| first >= 0 && first % align as i64 == 0),
                "the first element lies at a multiple of 16 bytes",
            ),
            (self.sizes.iter().all(|n| *n > 0), "no size is 0"),
            (
                line % align == 0 && plane % align == 0,
                "lines lie at multiples of 16 bytes",
            ),
            (
                line < 1 << 40 && plane < 1 << 40,
                "lines lie less than 2^40 bytes apart",
            ),
            (line >= length, "lines do not overlap"),
            (
                line > 0 && plane % line == 0 && plane / line >= u64::from(self.sizes[1]),
                "the longer step is a multiple of the shorter, and behind all of its lines",
            ),
            (
                self.lines.iter().all(|n| (1..=256).contains(n)),
                "a box has 1 to 256 lines in each direction",
            ),
            (in_box <= SWIZZLED_BYTES, "a box's line has 128 bytes"),
        ];
        match conditions.into_iter().find(|(holds, _)| !holds) {
            None => Ok(()),
            Some((_, condition)) => Err(condition),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Breaks one condition of a map.
    type Change = fn(&mut TensorMap);

    const GOOD: TensorMap = TensorMap {
        dtype: DType::BF16,
        offset: 8,
        sizes: [64, 40, 3],
        strides: [72, 72 * 41],
        lines: [128, 1],
    };

    /// Each condition refuses alone.
    #[test]
    fn every_condition_is_asked_for() {
        assert_eq!(GOOD.check(), Ok(()));
        let broken = |change: fn(&mut TensorMap)| {
            let mut map = GOOD;
            change(&mut map);
            map.check().expect_err("refused")
        };
        let changes: [(&str, Change); 11] = [
            ("bf16 or f16", |m| m.dtype = DType::F32),
            ("first element", |m| m.offset = 4),
            ("first element", |m| m.offset = -8),
            ("no size", |m| m.sizes[2] = 0),
            ("multiples of 16 bytes", |m| m.strides = [68, 68 * 40]),
            ("2^40", |m| m.strides[1] = 72 << 33),
            ("overlap", |m| m.strides = [56, 56 * 40]),
            ("longer step", |m| m.strides[1] = 72 * 39),
            ("longer step", |m| m.strides[1] = 72 * 40 + 8),
            ("256 lines", |m| m.lines[0] = 257),
            ("256 lines", |m| m.lines[1] = 0),
        ];
        for (said, change) in changes {
            let told = broken(change);
            assert!(told.contains(said), "{told}, not {said}");
        }
    }
}
