//! When and from where panels of the vector operand are packed: the packing launch, and the index
//! arithmetic that finds a panel and a block of the reduction.

use super::blocking::Dim;
use super::convert;
use super::driver::{GatherPart, decode, sides, strided};
use super::groups::GroupDim;
use super::pack::{PackLevel, Panel};
use super::text::{CText, affine};

/// Rows of several panels that are packed before the next ones.
const ROWS_TOGETHER: i64 = 16;

impl GatherPart<'_> {
    /// Emits the copy of a panel of `width` columns; `valid` of them exist, or as many as an argument says.
    pub(super) fn panel_function(
        &self,
        t: &mut CText,
        width: i64,
        valid: Option<i64>,
        suffix: &str,
    ) {
        let name = format!("{}_{suffix}", self.prefix);
        if let Some(d) = &self.plan.shape.diagonal
            && let GroupDim::Reduction(at) = d.place
        {
            self.diagonal_panel(t, d, at, &name);
            return;
        }
        let rows = self.rows_together();
        let levels = self.block_levels().into_iter().enumerate();
        let levels = levels.map(|(at, (d, runtime, row))| PackLevel {
            extent: if rows.is_some_and(|rows| at < rows) {
                1
            } else {
                d.size
            },
            runtime: rows.map_or(runtime, |rows| at == rows),
            b: d.b,
            row,
            is_open: self.plan.open.reduction,
        });
        let widens = self.hooks.widens[self.buffers().1];
        if let Some(dtype) = widens {
            t.raw(&convert::vector_load(self.plan.vector.lanes, dtype));
        }
        let panel = Panel {
            widens,
            levels: levels.collect(),
            vector: self.plan.vector,
            width,
            valid,
            lane: self.plan.n_inner().b,
            buffer: self.buffers().1,
            prologue: sides(self.hooks, self.plan.shape.swapped).1,
        };
        panel.emit(t, &name);
    }

    /// Calls the panel copy that fits panel `p`.
    pub(super) fn pack_call(&self, t: &mut CText, src: &str, dst: &str, kn: &str) {
        if self.plan.open.columns {
            let last = self.plan.inner_panels() - 1;
            let (prefix, lanes) = (&self.prefix, self.lanes_of_panel());
            t.line(format!(
                "if (pi == {last}L) {prefix}_panel_tail(buf, {src}, {dst}, {kn}, {lanes}); \
                 else {prefix}_panel(buf, {src}, {dst}, {kn});"
            ));
            return;
        }
        let call = |suffix: &str| format!("{}_{suffix}(buf, {src}, {dst}, {kn});", self.prefix);
        match self.plan.tail() {
            Some(_) => {
                let last = self.plan.inner_panels() - 1;
                t.line(format!(
                    "if (pi == {last}L) {} else {}",
                    call("panel_tail"),
                    call("panel")
                ));
            }
            None => t.line(call("panel")),
        }
    }

    /// The level of a block's rows, if several panels are packed together, some rows of all before the next rows. One
    /// panel's part of a row is two cache lines: read panel by panel, every row is in another page, and nothing is
    /// prefetched.
    pub(super) fn rows_together(&self) -> Option<usize> {
        let p = &self.plan;
        let (cut, k) = (p.k_cut, &p.shape.k[p.k_cut.depth..]);
        // Of a dim that is cut into single positions, a block has one.
        let at = usize::from(k.len() > 1 && cut.blocks == k[0].size);
        let is_plain = p.shape.diagonal.is_none() && p.n_inner().b == 1;
        (is_plain && k.get(at)?.b.abs() >= p.n_inner().size).then_some(at)
    }

    /// Width of panel `pi`, as a C expression.
    pub(super) fn width(&self) -> String {
        match self.plan.tail().map(|v| self.tail_width(v)) {
            Some(w) if w != self.plan.nr() => {
                format!(
                    "(pi == {}L ? {w}L : {}L)",
                    self.plan.inner_panels() - 1,
                    self.plan.nr()
                )
            }
            _ => format!("{}L", self.plan.nr()),
        }
    }

    /// Declares `po` variables and `pi` from panel `p`; returns the outer N variables.
    pub(super) fn decode_panel(&self, t: &mut CText) -> Vec<String> {
        let inner = self.plan.inner_panels();
        t.line(format!(
            "const long po = p/{inner}L, pi = p%{inner}L; (void)po; (void)pi;"
        ));
        let n = &self.plan.shape.n;
        decode(t, &n[..n.len() - 1], "po", "po")
    }

    pub(super) fn panel_source(&self, outer: &[String]) -> Vec<(String, i64)> {
        let n = &self.plan.shape.n;
        let mut src = strided(outer, n, |d| d.b);
        src.push(("pi".to_string(), self.plan.nr() * self.plan.n_inner().b));
        src
    }

    pub(super) fn pack_launch(&self, t: &mut CText) {
        let s = &self.plan.shape;
        let blocks = self.plan.k_cut.count(&s.k);
        let units = self.batches() * self.plan.panels() * blocks;
        let number = self.number();
        t.line(format!(
            "static void {}_pack(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "(void)scratch; {number} *W = ({number} *)buf[3] + {}L;",
            self.shared_at
        ));
        let panels = self.plan.panels();
        if self.rows_together().is_some() {
            // A thread's panels of one block at once.
            t.line(format!(
                "for (long u = {units}L*tid/nt, end = {units}L*(tid + 1)/nt, next; u < end; u = next) {{"
            ));
            t.line(format!(
                "const long p0 = u%{panels}L, kb = u/{panels}L%{blocks}L, bt = u/{}L;",
                panels * blocks
            ));
            t.line(format!("next = shl_min(end, u - p0 + {panels}L);"));
            t.line("const long p1 = p0 + next - u;");
        } else {
            t.line(format!(
                "for (long u = {units}L*tid/nt; u < {units}L*(tid + 1)/nt; u++) {{"
            ));
            t.line(format!(
                "const long kb = u%{blocks}L, p0 = u/{blocks}L%{panels}L, p1 = p0 + 1, bt = u/{}L;",
                blocks * panels
            ));
        }
        let batch = decode(t, &s.batch, "bt", "bt");
        let starts = self.decode_reduction(t);
        let place = format!("bt*{panels}L + p");
        let place = format!("W + ({place})*{}L", self.plan.k_total() * self.plan.nr());
        let within = format!(" + ({})*{}", self.flat_start(&starts), self.width());
        self.pack_panels(t, &batch, &starts, &(place + &within));
        t.close(2);
    }

    /// Packs panels `p0..p1` of a block of the reduction; `dst` is the place of panel `p`.
    pub(super) fn pack_panels(
        &self,
        t: &mut CText,
        batch: &[String],
        starts: &[String],
        dst: &str,
    ) {
        let s = &self.plan.shape;
        let rows = self.rows_together().map(|at| (at, self.block_levels()[at]));
        if let Some((at, (dim, ..))) = rows {
            let n = if at == 0 {
                "kn".to_string()
            } else {
                format!("{}L", dim.size)
            };
            t.line(format!(
                "for (long k = 0; k < {n}; k += {ROWS_TOGETHER}L) {{"
            ));
            t.line(format!(
                "const long kr = shl_min({n} - k, {ROWS_TOGETHER}L);"
            ));
        }
        t.line("for (long p = p0; p < p1; p++) {");
        let outer = self.decode_panel(t);
        let mut src = strided(batch, &s.batch, |d| d.b);
        src.extend(self.panel_source(&outer));
        src.extend(strided(starts, &s.k, |d| d.b));
        if let Some((_, (dim, _, row))) = rows {
            src.push(("k".to_string(), dim.b));
            let dst = format!("{dst} + k*{row}L*{}", self.width());
            self.pack_call(t, &affine(&src, s.b_base), &dst, "kr");
        } else {
            self.pack_call(t, &affine(&src, s.b_base), dst, "kn");
        }
        t.close(1 + usize::from(rows.is_some()));
    }

    /// Declares the start of each reduction dim of block `kb`, and `kn`; returns the start variables.
    pub(super) fn decode_reduction(&self, t: &mut CText) -> Vec<String> {
        self.decode_cut(
            t,
            &self.plan.shape.k,
            self.plan.k_cut.depth,
            self.plan.k_cut.blocks,
            "kb",
            "ks",
        );
        t.line(format!(
            "const long kn = ksn{}; (void)kn;",
            self.plan.k_cut.depth
        ));
        (0..self.plan.shape.k.len())
            .map(|j| format!("ks{j}"))
            .collect()
    }

    /// Declares `{prefix}{j}` (start) and `{prefix}n{j}` (count) of each dim for block `index`.
    pub(super) fn decode_cut(
        &self,
        t: &mut CText,
        dims: &[Dim],
        depth: usize,
        blocks: i64,
        index: &str,
        prefix: &str,
    ) {
        t.line(format!("const long {prefix}q = {index}%{blocks}L, {prefix}o = {index}/{blocks}L; (void){prefix}o; (void){prefix}q;"));
        let outer = decode(t, &dims[..depth], &format!("{prefix}o"), prefix);
        for v in outer {
            t.line(format!(
                "const long {prefix}n{} = 1; (void){prefix}n{};",
                &v[prefix.len()..],
                &v[prefix.len()..]
            ));
        }
        for (j, d) in dims.iter().enumerate().skip(depth) {
            let size = d.size;
            let (start, count) = if j == depth {
                (
                    format!("{size}L*{prefix}q/{blocks}L"),
                    format!("{size}L*({prefix}q + 1)/{blocks}L - {prefix}{j}"),
                )
            } else {
                ("0".to_string(), format!("{size}L"))
            };
            t.line(format!(
                "const long {prefix}{j} = {start}, {prefix}n{j} = {count}; (void){prefix}n{j};"
            ));
        }
    }

    pub(super) fn flat_start(&self, starts: &[String]) -> String {
        let k = &self.plan.shape.k;
        let inner = |j: usize| k[j + 1..].iter().map(|d| d.size).product::<i64>();
        let terms: Vec<(String, i64)> = starts
            .iter()
            .enumerate()
            .map(|(j, v)| (v.clone(), inner(j)))
            .collect();
        affine(&terms, 0)
    }
}
