//! When and from where panels of the vector operand are packed: the packing launch, and the index
//! arithmetic that finds a panel and a block of the reduction.

use super::blocking::Dim;
use super::convert;
use super::driver::{GatherPart, decode, sides, strided};
use super::groups::GroupDim;
use super::pack::{PackLevel, Panel};
use super::text::{CText, affine};

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
        let levels = self.block_levels().into_iter();
        let levels = levels.map(|(d, runtime, row)| PackLevel {
            extent: d.size,
            runtime,
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
        t.line(format!(
            "for (long u = {units}L*tid/nt; u < {units}L*(tid + 1)/nt; u++) {{"
        ));
        t.line(format!(
            "const long kb = u%{blocks}L, p = u/{blocks}L%{}L, bt = u/{}L;",
            self.plan.panels(),
            blocks * self.plan.panels()
        ));
        let batch = decode(t, &s.batch, "bt", "bt");
        let outer = self.decode_panel(t);
        let starts = self.decode_reduction(t);
        let mut src = strided(&batch, &s.batch, |d| d.b);
        src.extend(self.panel_source(&outer));
        src.extend(strided(&starts, &s.k, |d| d.b));
        let dst = format!(
            "W + (bt*{}L + p)*{}L + ({})*{}",
            self.plan.panels(),
            self.plan.k_total() * self.plan.nr(),
            self.flat_start(&starts),
            self.width()
        );
        self.pack_call(t, &affine(&src, s.b_base), &dst, "kn");
        t.close(2);
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
