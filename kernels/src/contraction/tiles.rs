//! The micro-kernels that a plan needs: one for each size of tile and panel that occurs.

use super::blocking::{Dim, VectorSource, div_up};
use super::driver::GatherPart;
use super::microkernel::{Level, MicroKernel, merge_levels};
use super::open::ForTile;
use super::text::CText;

impl GatherPart<'_> {
    pub(super) fn a_stride(&self, d: &Dim) -> i64 {
        self.plan.staging.as_ref().map_or(d.a, |s| s.stride(d.id))
    }

    /// Output stride of each M dim, in the real output or in shared scratch.
    pub(super) fn o_strides(&self) -> Vec<i64> {
        let m = &self.plan.shape.m;
        let row = match self.plan.to_scratch {
            true => Some(self.plan.nr()),
            false => self.pitch,
        };
        let inner = |j: usize| m[j + 1..].iter().map(|d| d.size).product::<i64>();
        m.iter()
            .enumerate()
            .map(|(j, d)| row.map_or(d.o, |row| inner(j) * row))
            .collect()
    }

    /// Emits the micro-kernels, and says when each is called.
    pub(super) fn micro_kernels(&self, t: &mut CText) -> Vec<ForTile> {
        if self.is_ragged() {
            return self.ragged_kernels(t);
        }
        let (p, last) = (&self.plan, self.plan.inner_panels() - 1);
        let lengths = p.tiling.kernel_lengths();
        let whole = (last > 0 || p.tail().is_none()).then_some(None);
        let tails: Vec<Option<i64>> = whole.into_iter().chain(p.tail().map(Some)).collect();
        let mut kernels = Vec::new();
        for (i, length) in lengths.iter().enumerate() {
            for &tail in &tails {
                let nv = div_up(tail.unwrap_or(p.nr()), p.vector.lanes);
                let (name, text) = self.kernel_of(*length, nv, tail).emit();
                t.raw(&text);
                let mut when = Vec::new();
                if lengths.len() > 1 {
                    let sign = if i == 0 { "<" } else { ">=" };
                    when.push(format!("t {sign} {}L", p.tiling.n_big));
                }
                if p.tail().is_some() {
                    let sign = if tail.is_some() { "==" } else { "!=" };
                    when.push(format!("pi {sign} {last}L"));
                }
                kernels.push(ForTile {
                    name,
                    when,
                    more: String::new(),
                });
            }
        }
        kernels
    }

    /// The micro-kernel for tiles of `n_rows` positions and panels of `nv` vectors, of which only `tail` columns
    /// exist if `tail` is given.
    pub(super) fn kernel_of(&self, n_rows: i64, nv: i64, tail: Option<i64>) -> MicroKernel {
        let (p, s) = (&self.plan, &self.plan.shape);
        let o = self.o_strides();
        let axis = p.tiling.axis;
        let (cols, a_col, o_col) = match s.m.get(axis + 1) {
            Some(d) => (d.size, self.a_stride(d), o[axis + 1]),
            None => (1, 0, 0),
        };
        let (a_row, o_row) = (self.a_stride(&s.m[axis]), o[axis]);
        let rows = (0..n_rows)
            .flat_map(|r| (0..cols).map(move |c| (r * a_row + c * a_col, r * o_row + c * o_col)));
        let lanes = p.vector.lanes;
        let last_lanes = match tail.filter(|_| !p.to_scratch) {
            Some(tail) => tail - (nv - 1) * lanes,
            None => lanes,
        };
        // Panels of open width are packed as wide as all others.
        let width = if p.open.columns { p.nr() } else { nv * lanes };
        let levels: Vec<Level> = self
            .block_levels()
            .into_iter()
            .map(|(d, runtime, row)| Level {
                extent: if runtime { 1 } else { d.size },
                runtime,
                a: self.a_stride(d),
                b: if p.source == VectorSource::Direct {
                    d.b
                } else {
                    row * width
                },
            })
            .collect();
        MicroKernel {
            vector: p.vector,
            rows: rows.collect(),
            nv,
            last_lanes,
            nest: merge_levels(&levels),
            unrolls: !p.open.reduction,
            ahead: self.ahead(),
            ahead_a: self.ahead_a(),
            ahead_b: self.ahead_b(),
            ragged: None,
        }
    }

    /// Tiles that use a panel before the next one is needed.
    pub(super) fn tiles_per_panel(&self) -> i64 {
        let (p, m) = (&self.plan, &self.plan.shape.m);
        let size = |j: usize| {
            if j == p.tiling.axis {
                p.tiling.n_tiles
            } else {
                m[j].size
            }
        };
        let inner: i64 = (p.m_cut.depth + 1..=p.tiling.axis).map(size).product();
        (size(p.m_cut.depth) + p.m_cut.blocks - 1) / p.m_cut.blocks * inner
    }

    /// Numbers of the next panel that a tile fetches per reduction step, so that all tiles of a panel
    /// together fetch the whole next one; panels in the thread's own scratch are near already.
    pub(super) fn ahead(&self) -> i64 {
        let is_open = self.plan.open.columns || self.plan.open.reduction;
        let bytes = self.bytes(self.plan.k_total() * self.result_row());
        let small = bytes < 400_000 && !is_open;
        if self.plan.source != VectorSource::Shared || small {
            return 0;
        }
        let tiles = self.tiles_per_panel();
        ((self.plan.nr() + tiles - 1) / tiles).min(self.plan.vector.element.per_line())
    }

    /// Where to fetch ahead in a column-wise operand that is read in place: each step reads a few numbers of another
    /// row, which no hardware prefetcher follows.
    pub(super) fn ahead_a(&self) -> Vec<i64> {
        let m = &self.plan.shape.m;
        let column = m[m.len() - 1].a == 1 && self.plan.staging.is_none();
        let tile = self.plan.tiling.roomiest();
        if column && (self.plan.open.rows || m[m.len() - 1].size > 2 * tile) {
            vec![2 * tile]
        } else {
            Vec::new()
        }
    }

    /// Where to fetch ahead in a vector operand that is read in place: the next panel's part of the row.
    pub(super) fn ahead_b(&self) -> Vec<i64> {
        let nr = self.plan.nr();
        if self.plan.source != VectorSource::Direct || self.plan.inner_panels() == 1 {
            return Vec::new();
        }
        let line = self.plan.vector.element.per_line();
        (0..(nr + line - 1) / line).map(|n| nr + n * line).collect()
    }
}
