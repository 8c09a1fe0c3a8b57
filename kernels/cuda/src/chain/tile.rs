//! How much of a chain a block takes at a time: columns, and parts of the results.

use super::form::{Form, Lines};

/// Bytes of shared memory that need not be asked for.
const SHARED_BYTES: i64 = 48 << 10;

/// Columns of all products out of tiles that a block sums up; with more, blocks share them.
const MOST_OUT: i64 = 128;

/// How many columns a block takes at a time, and into how many parts the results' columns are split.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    pub(super) cols: i64,
    pub(super) parts: i64,
}

impl Tile {
    pub(super) fn new(form: &Form) -> Option<Tile> {
        let out: i64 = form.out_products.iter().map(|p| padded(p.out.width)).sum();
        let rows: i64 = form
            .tile_products
            .iter()
            .map(|p| padded(p.rows.width))
            .sum();
        let most = match (rows, form.tile_products.len()) {
            (..=64, 1) => 64,
            (..=128, _) => 32,
            _ => 16,
        };
        let parts = ceil(out, MOST_OUT).max(1);
        let tiles = [64, 32, 16].into_iter().filter(|c| *c <= most);
        let mut tiles = tiles.map(|cols| Tile { cols, parts });
        tiles.find(|tile| {
            let words = form.panels.iter().map(|p| 2 * tile.cols * tile.pitch(p));
            4 * words.sum::<i64>() <= SHARED_BYTES
        })
    }

    /// Columns of a result that a block sums up.
    pub(super) fn part(&self, width: i64) -> i64 {
        padded(ceil(padded(width), self.parts))
    }

    /// Numbers of a line in shared memory: all that the parts read, where they divide it unevenly too.
    pub(super) fn held(&self, panel: &Lines) -> i64 {
        padded(panel.width).max(self.part(panel.width) * self.parts)
    }

    /// Words between lines in shared memory: four more than a multiple of eight, so that the eight lines
    /// of a matrix fall into different banks.
    pub(super) fn pitch(&self, panel: &Lines) -> i64 {
        self.held(panel) / 2 + 4
    }
}

pub(super) fn ceil(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}

/// Numbers of a line with the zeros that fill the last product.
pub(super) fn padded(width: i64) -> i64 {
    ceil(width, 16) * 16
}
