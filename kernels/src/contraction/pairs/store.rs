//! From blocks of sums to the output: where they go, the epilogue, and the launch that adds the parts of
//! a divided reduction.

use super::super::driver::{decode, strided};
use super::super::text::{CText, affine};
use super::{PairsPart, last};

impl PairsPart<'_> {
    /// Declares `O`: the output, or this part's place in shared scratch.
    pub(super) fn output(&self, t: &mut CText, batch: &[String]) {
        if self.parts > 1 {
            t.line(format!(
                "float *O = (float *)((char *)buf[3] + {}L) + (part*{}L + bt)*{}L;",
                self.shared_at + self.packed_bytes(),
                self.batches(),
                self.m_total() * self.n_total()
            ));
            return;
        }
        let at = affine(&strided(batch, &self.s.batch, |d| d.o), self.s.o_base);
        t.line(format!("float *O = (float *)buf[2] + {at};"));
    }

    fn lane(&self) -> i64 {
        if self.parts > 1 { 1 } else { last(&self.s.n).o }
    }

    /// Computes one block; between pieces of the reduction its sums wait in the output.
    pub(super) fn tile(&self, t: &mut CText) {
        let lane = self.lane();
        t.line("if (kc > kc0) {");
        t.line("for (long i = 0; i < rows; i++) {");
        t.line("const float *o = O + to[r + i] + column;");
        t.line(format!(
            "for (long j = 0; j < lanes; j++) c[i*32 + j] = o[j*{lane}L];"
        ));
        t.close(2);
        t.line("sh_pairs_block(sa + r*nk*32, b, c, nk, kc > kc0);");
        t.line("for (long i = 0; i < rows; i++) {");
        t.line("float *o = O + to[r + i] + column;");
        if lane == 1 {
            t.line("if (lanes == 32) memcpy(o, c + i*32, 128);");
            t.line("else for (long j = 0; j < lanes; j++) o[j] = c[i*32 + j];");
        } else {
            t.line(format!(
                "for (long j = 0; j < lanes; j++) o[j*{lane}L] = c[i*32 + j];"
            ));
        }
        t.line("}");
    }

    /// Calls the epilogue on the rows and columns of an item, which are final.
    pub(super) fn epilogue_call(&self, t: &mut CText) {
        let now = self.parts == 1 && self.in_order;
        let Some(epilogue) = self.hooks.epilogue.as_ref().filter(|_| now) else {
            return;
        };
        let (inner, size) = (self.inner_panels(), last(&self.s.n).size);
        let column = |panel: &str| {
            format!("{panel}/{inner}L*{size}L + shl_min({panel}%{inner}L*32, {size}L)")
        };
        t.line(format!(
            "{epilogue}(buf, tid, bt, m0, m1, {}, {});",
            column("p0"),
            column("p1")
        ));
    }

    /// Sums the parts of each row and moves them to the output.
    pub(super) fn combine_function(&self, t: &mut CText) {
        let (s, n_total) = (&self.s, self.n_total());
        let rows = self.batches() * self.m_total();
        t.line(format!(
            "static void {}_combine(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "(void)scratch; const float *R = (const float *)((const char *)buf[3] + {}L);",
            self.shared_at + self.packed_bytes()
        ));
        t.line(format!(
            "for (long u = {rows}L*tid/nt; u < {rows}L*(tid + 1)/nt; u++) {{"
        ));
        t.line(format!(
            "const long l = u%{0}L, bt = u/{0}L;",
            self.m_total()
        ));
        let batch = decode(t, &s.batch, "bt", "bt");
        let digits = decode(t, &s.m, "l", "y");
        let mut at = strided(&batch, &s.batch, |d| d.o);
        at.extend(strided(&digits, &s.m, |d| d.o));
        t.line(format!(
            "float *o = (float *)buf[2] + {};",
            affine(&at, s.o_base)
        ));
        t.line(format!("const float *r = R + u*{n_total}L;"));
        let outer_dims = &s.n[..s.n.len() - 1];
        let n_outer: i64 = outer_dims.iter().map(|d| d.size).product();
        t.line(format!("for (long po = 0; po < {n_outer}L; po++) {{"));
        let outer = decode(t, outer_dims, "po", "po");
        let place = affine(&strided(&outer, outer_dims, |d| d.o), 0);
        let size = last(&s.n).size;
        let sum: Vec<String> = (0..self.parts)
            .map(|q| format!("r[po*{size}L + j + {}L]", q * rows * n_total))
            .collect();
        t.line(format!(
            "for (long j = 0; j < {size}L; j++) o[{place} + j*{}L] = {};",
            last(&s.n).o,
            sum.join(" + ")
        ));
        t.line("}");
        if let Some(epilogue) = self.hooks.epilogue.as_ref().filter(|_| self.in_order) {
            t.line(format!(
                "{epilogue}(buf, tid, bt, l, l + 1, 0, {n_total}L);"
            ));
        }
        t.close(2);
    }
}
