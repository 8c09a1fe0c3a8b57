//! Tile sizes and the split of the reduction, from the shape alone, so that a program is emitted the
//! same way everywhere. Emits no text.

use super::form::{Form, ceil};

/// Blocks that keep the largest known device (132 multiprocessors) busy.
const FULL_GRID: i64 = 132;

/// Fewest steps of a part of the reduction; below, the combining launch costs more than it brings.
const LEAST_STEPS: i64 = 8;

/// How a block of threads covers a block of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    /// Rows and columns of a block, terms of a step.
    pub m: i64,
    pub n: i64,
    pub k: i64,
    /// Rows and columns of a thread (`simt`), of a warp (`mma`) or of a warpgroup (`wgmma`).
    pub part_m: i64,
    pub part_n: i64,
    pub threads: i64,
    /// Parts of the reduction, each with `k_per_part` terms.
    pub parts: i64,
    pub k_per_part: i64,
}

const fn tile(m: i64, n: i64, k: i64, part_m: i64, part_n: i64, threads: i64) -> Tile {
    Tile {
        m,
        n,
        k,
        part_m,
        part_n,
        threads,
        parts: 1,
        k_per_part: 0,
    }
}

/// Register tiles of scalar multiply-adds.
const SIMT: [Tile; 5] = [
    tile(128, 128, 8, 8, 8, 256),
    tile(128, 64, 16, 8, 4, 256),
    tile(64, 64, 16, 4, 4, 256),
    tile(32, 32, 16, 4, 4, 64),
    tile(16, 16, 16, 2, 2, 64),
];

/// Warp tiles of 16×8 products.
const MMA: [Tile; 3] = [
    tile(128, 128, 32, 64, 32, 256),
    tile(64, 64, 32, 32, 32, 128),
    tile(32, 32, 32, 32, 16, 64),
];

/// Warpgroup tiles of 64 rows and all columns.
const WGMMA: [Tile; 3] = [
    tile(128, 256, 64, 64, 256, 256),
    tile(128, 128, 64, 64, 128, 256),
    tile(64, 64, 64, 64, 64, 128),
];

/// The same, which copies of whole blocks feed.
const BULK: [Tile; 2] = [WGMMA[0], WGMMA[1]];

/// How products are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    /// Scalar multiply-adds.
    Simt,
    /// Products of warps.
    Mma,
    /// Products of warpgroups, which copy their operands piece by piece.
    Wgmma,
    /// Products of warpgroups, whose operands the copy engine brings.
    Bulk,
}

impl Path {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Path::Simt => "simt",
            Path::Mma => "mma",
            Path::Wgmma | Path::Bulk => "wgmma",
        }
    }

    /// Its tiles, the largest first.
    pub fn tiles(self) -> &'static [Tile] {
        match self {
            Path::Simt => &SIMT,
            Path::Mma => &MMA,
            Path::Wgmma => &WGMMA,
            Path::Bulk => &BULK,
        }
    }
}

impl Tile {
    /// The `n`-th, whether it fits or not.
    pub fn nth(n: usize, form: &Form, path: Path) -> Option<Tile> {
        path.tiles().get(n).map(|tile| tile.split(form))
    }

    /// The largest tile that leaves no half of it idle and fills the device, else the largest whose
    /// reduction is long enough to be split, else the smallest.
    pub fn choose(form: &Form, path: Path) -> Tile {
        let all = path.tiles();
        let (m, n) = (form.count(&form.m), form.count(&form.n));
        let fits = |t: &&Tile| 2 * m > t.m && 2 * n > t.n;
        let full = |t: &&Tile| t.blocks(form) >= FULL_GRID;
        let splittable = |t: &&Tile| t.blocks(form) * t.splits(form) >= FULL_GRID;
        let chosen = all
            .iter()
            .filter(fits)
            .find(full)
            .or_else(|| all.iter().filter(fits).find(splittable))
            .unwrap_or(&all[all.len() - 1]);
        chosen.split(form)
    }

    /// Returns the tile with the reduction in as many parts as fill the device.
    fn split(mut self, form: &Form) -> Tile {
        let k = form.count(&form.k);
        let blocks = self.blocks(form);
        let parts = if blocks < FULL_GRID {
            ceil(2 * FULL_GRID, blocks).min(self.splits(form)).max(1)
        } else {
            1
        };
        self.k_per_part = ceil(ceil(k, parts), self.k) * self.k;
        self.parts = ceil(k, self.k_per_part);
        self
    }

    fn blocks(&self, form: &Form) -> i64 {
        let (m, n) = (form.count(&form.m), form.count(&form.n));
        form.count(&form.batch) * ceil(m, self.m) * ceil(n, self.n)
    }

    /// Most parts of the reduction.
    fn splits(&self, form: &Form) -> i64 {
        form.count(&form.k) / (self.k * LEAST_STEPS)
    }
}
