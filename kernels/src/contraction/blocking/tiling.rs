//! Register tiles along one M dim: how long they are and where each begins.
//!
//! A text for one size has tiles of one or two lengths, which divide the axis evenly. A text for many sizes has
//! a micro-kernel for each of a few lengths, some units apart, and every tile takes the shortest that holds it.

use super::{Dim, OpenDims, div_up};

/// Most lengths of tiles in a text for many sizes.
const MOST_LENGTHS: i64 = 7;

/// Register tiles along one M dim; the dim inside it, if any, is wholly in every tile.
#[derive(Clone, Copy, Debug)]
pub struct Tiling {
    /// Position in `Shape::m` of the dim that is cut into tiles.
    pub axis: usize,
    pub n_tiles: i64,
    /// Every tile has `small` positions of the axis, the first `n_big` of them `unit` more; the last tile of a
    /// text for many sizes ends where the axis does.
    pub small: i64,
    pub n_big: i64,
    pub unit: i64,
    pub lengths: TileLengths,
    /// Positions of a tile that there are registers for.
    most: i64,
    /// Positions of the axis.
    size: i64,
}

/// Lengths of tiles, as far as they change the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TileLengths {
    /// Tiles of `small` positions and, with `has_big`, also of one more.
    Two { small: i64, has_big: bool },
    /// Tiles of any length; with `long`, the axis is long enough that only the two longest occur.
    Any { long: bool },
}

impl Tiling {
    /// Tiles of at most `rows` rows; of any length if programs of other sizes share the text.
    pub(super) fn new(m: &[Dim], rows: i64, open: &OpenDims) -> Self {
        let last = m.len() - 1;
        let (axis, most) = match m[last].size {
            w if w < rows && last > 0 && !open.has(&m[last]) => (last - 1, (rows / w).max(1)),
            _ => (last, rows),
        };
        let size = m[axis].size;
        if most > 1 && open.has(&m[axis]) {
            return Tiling::of_any_length(axis, size, most, open.has_short);
        }
        let n_tiles = div_up(size, most);
        let (small, n_big) = (size / n_tiles, size % n_tiles);
        Tiling {
            axis,
            n_tiles,
            small,
            n_big,
            unit: 1,
            lengths: TileLengths::Two {
                small,
                has_big: n_big > 0,
            },
            most,
            size,
        }
    }

    fn of_any_length(axis: usize, size: i64, most: i64, has_short: bool) -> Self {
        let unit = div_up(most, MOST_LENGTHS);
        let in_units = most / unit;
        let units = div_up(size, unit);
        let n_tiles = div_up(units, in_units);
        Tiling {
            axis,
            n_tiles,
            small: units / n_tiles * unit,
            n_big: units % n_tiles,
            unit,
            lengths: TileLengths::Any {
                // From here on the shortest tile is at most one unit shorter than the longest.
                long: !has_short && in_units > 2 && units >= (in_units - 1) * (in_units - 1),
            },
            most,
            size,
        }
    }

    /// The same axis in tiles of other lengths, where those divide it.
    pub(super) fn with(&self, lengths: TileLengths) -> Option<Self> {
        match (lengths, self.lengths) {
            (TileLengths::Two { small, has_big }, TileLengths::Two { .. }) => {
                let big = small + i64::from(has_big);
                if small < 1 || big > self.most {
                    return None;
                }
                let n_tiles = div_up(self.size, big);
                let n_big = self.size - n_tiles * small;
                (n_big >= 0).then_some(Tiling {
                    n_tiles,
                    small,
                    n_big,
                    lengths,
                    ..*self
                })
            }
            (TileLengths::Any { long }, TileLengths::Any { long: may_be_long }) => {
                (!long || may_be_long).then_some(Tiling { lengths, ..*self })
            }
            _ => None,
        }
    }

    /// Lengths that micro-kernels are written for, the longest first.
    pub(in crate::contraction) fn kernel_lengths(&self) -> Vec<i64> {
        match self.lengths {
            TileLengths::Two { small, has_big } => {
                let big = has_big.then_some(small + 1);
                big.into_iter().chain([small]).collect()
            }
            TileLengths::Any { long } => {
                let longest = self.most / self.unit;
                let shortest = if long { longest - 1 } else { 1 };
                let units = (shortest..=longest).rev();
                units.map(|units| units * self.unit).collect()
            }
        }
    }

    /// Whether a tile's length is known only at run time.
    pub(in crate::contraction) fn is_open(&self) -> bool {
        matches!(self.lengths, TileLengths::Any { .. })
    }

    /// First position of tile `t`, as a C expression.
    pub fn start(&self, t: &str) -> String {
        let (small, n_big) = (self.small, self.n_big);
        match self.lengths {
            TileLengths::Two { has_big: false, .. } => format!("{t}*{small}L"),
            TileLengths::Two { has_big: true, .. } => {
                format!("({t}*{small}L + shl_min({t}, {n_big}L))")
            }
            TileLengths::Any { .. } => format!(
                "shl_min({t}*{small}L + shl_min({t}, {n_big}L)*{}L, {}L)",
                self.unit, self.size
            ),
        }
    }

    /// Positions of tile `t`, which begins at `y`, as a C expression; only for tiles of any length.
    pub(in crate::contraction) fn length(&self, t: &str, y: &str) -> String {
        let (small, n_big) = (self.small, self.n_big);
        format!(
            "shl_min({small}L + ({t} < {n_big}L ? {}L : 0L), {}L - {y})",
            self.unit, self.size
        )
    }

    /// Positions of the longest tile.
    pub(in crate::contraction) fn largest(&self) -> i64 {
        match self.lengths {
            TileLengths::Two { small, has_big } => small + i64::from(has_big),
            TileLengths::Any { .. } if self.n_big > 0 => self.small + self.unit,
            TileLengths::Any { .. } => self.small,
        }
    }

    /// Positions of the longest tile that the text has room for.
    pub(in crate::contraction) fn roomiest(&self) -> i64 {
        match self.lengths {
            TileLengths::Two { small, .. } => small,
            TileLengths::Any { .. } => self.most / self.unit * self.unit,
        }
    }
}
