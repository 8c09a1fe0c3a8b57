//! From blocks of sums to the output: where they go, the epilogue, and the launch that adds the parts of
//! a divided reduction.

use super::super::BUFFERS;
use super::super::driver::{decode, strided};
use super::super::text::{CText, affine};
use super::{BLOCK, PairsPart, ROW_GAP, div_up, last};

impl PairsPart<'_> {
    /// Floats between the rows of sums.
    pub(super) fn pitch(&self) -> i64 {
        self.group * BLOCK + ROW_GAP
    }

    /// Floats between the lines of sums that the epilogue is given.
    pub(super) fn given_pitch(&self) -> i64 {
        if self.across {
            self.rows + ROW_GAP
        } else {
            self.pitch()
        }
    }

    /// Bytes of a block's sums, by rows and where needed by columns. Where an epilogue takes added parts, a whole
    /// line of the result has to fit.
    pub(super) fn sum_bytes(&self) -> i64 {
        let (length, _) = self.lines();
        let line = if self.local && self.parts > 1 {
            div_up(length * 4, 64) * 64
        } else {
            0
        };
        (self.row_sum_bytes() + self.turned_bytes()).max(line)
    }

    fn row_sum_bytes(&self) -> i64 {
        self.rows * self.pitch() * 4
    }

    fn turned_bytes(&self) -> i64 {
        if self.across {
            self.group * BLOCK * self.given_pitch() * 4
        } else {
            0
        }
    }

    /// Length and number of the lines of the result that the epilogue is given.
    fn lines(&self) -> (i64, i64) {
        if self.across {
            (self.m_total(), self.n_total())
        } else {
            (self.n_total(), self.m_total())
        }
    }

    /// Declares `own`: the buffers, for an epilogue that finds sums where they were made.
    pub(super) fn own_buffers(&self, t: &mut CText) {
        if self.local {
            t.line(format!(
                "void *own[{BUFFERS}]; memcpy(own, buf, sizeof own);"
            ));
        }
    }

    /// Whether the main function, not the one that adds parts, calls the epilogue on its sums.
    fn consumes_here(&self) -> bool {
        self.local && self.parts == 1
    }

    /// Declares `O`: the output, or this part's place in shared scratch.
    pub(super) fn output(&self, t: &mut CText, batch: &[String]) {
        if self.consumes_here() {
            return;
        }
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

    /// Hands the final sums of rows `m0..m1` and panels `g0..g1` to the epilogue, or stores them.
    pub(super) fn consume(&self, t: &mut CText) {
        if self.across {
            self.turn(t);
        }
        if let Some(epilogue) = self
            .hooks
            .epilogue
            .as_ref()
            .filter(|_| self.consumes_here())
        {
            let [first, end] = ["g0", "g1"].map(|p| self.flat_column(p));
            t.line(format!("const long n0 = {first}, n1 = {end};"));
            let (from, lines, line) = match self.across {
                true => ("turned", "n0, n1, m0, m1", "n0*{}L + m0"),
                false => ("sums", "m0, m1, n0, n1", "m0*{}L + n0"),
            };
            let place = line.replace("{}", &self.given_pitch().to_string());
            t.line(format!("own[2] = {from} - ({place});"));
            t.line(format!("{epilogue}(own, tid, bt, {lines});"));
            return;
        }
        if self.across {
            let length = self.m_total();
            t.line("for (long j = 0; j < columns; j++)");
            t.line(format!(
                "memcpy(O + ({} + j)*{length}L + m0, turned + j*{}L, (m1 - m0)*4);",
                self.flat_column("g0"),
                self.given_pitch()
            ));
            return;
        }
        let lane = self.lane();
        t.line("for (long p = g0; p < g1; p++) {");
        self.decode_panel(t);
        t.line(format!(
            "const float *c = sums + ({} - ({}));",
            self.flat_column("p"),
            self.flat_column("g0")
        ));
        t.line("for (long i = 0; i < m1 - m0; i++) {");
        t.line(format!(
            "float *o = O + to[i] + column; const float *from = c + i*{}L;",
            self.pitch()
        ));
        if lane == 1 {
            t.line("if (lanes == 32) memcpy(o, from, 128);");
            t.line("else for (long j = 0; j < lanes; j++) o[j] = from[j];");
        } else {
            t.line(format!(
                "for (long j = 0; j < lanes; j++) o[j*{lane}L] = from[j];"
            ));
        }
        t.close(2);
    }

    /// Declares `turned`, the sums of the group by columns.
    fn turn(&self, t: &mut CText) {
        t.line(format!(
            "float *turned = (float *)((char *)sums + {}L);",
            self.row_sum_bytes()
        ));
        t.line(format!(
            "const long columns = {} - ({});",
            self.flat_column("g1"),
            self.flat_column("g0")
        ));
        t.line("for (long i = 0; i < m1 - m0; i += 16) for (long j = 0; j < columns; j += 16)");
        t.line(format!(
            "sh_pairs_turn(sums + i*{0}L + j, {0}L, turned + j*{1}L + i, {1}L);",
            self.pitch(),
            self.given_pitch()
        ));
    }

    /// Calls the epilogue on the rows and columns of an item, which lie in the output.
    pub(super) fn epilogue_on_output(&self, t: &mut CText) {
        let now = self.parts == 1 && self.in_order && !self.local;
        if let Some(epilogue) = self.hooks.epilogue.as_ref().filter(|_| now) {
            let [first, end] = ["p0", "p1"].map(|p| self.flat_column(p));
            t.line(format!("{epilogue}(buf, tid, bt, m0, m1, {first}, {end});"));
        }
    }

    /// Sums the parts of each line and gives them to the epilogue, or moves them to the output.
    pub(super) fn combine_function(&self, t: &mut CText) {
        let s = &self.s;
        let (length, count) = self.lines();
        let lines = self.batches() * count;
        t.line(format!(
            "static void {}_combine(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        self.own_buffers(t);
        t.line(format!(
            "(void)scratch; const float *R = (const float *)((const char *)buf[3] + {}L);",
            self.shared_at + self.packed_bytes()
        ));
        t.line(format!(
            "for (long u = {lines}L*tid/nt; u < {lines}L*(tid + 1)/nt; u++) {{"
        ));
        t.line(format!("const long l = u%{count}L, bt = u/{count}L;"));
        t.line(format!("const float *r = R + u*{length}L;"));
        let sum = |at: &str| -> String {
            let part = |q| format!("r[{at} + {}L]", q * lines * length);
            let all: Vec<String> = (0..self.parts).map(part).collect();
            all.join(" + ")
        };
        if self.local {
            t.line("float *line = scratch;");
            t.line(format!(
                "for (long j = 0; j < {length}L; j++) line[j] = {};",
                sum("j")
            ));
            t.line(format!("own[2] = line - l*{}L;", self.given_pitch()));
        } else {
            let batch = decode(t, &s.batch, "bt", "bt");
            let digits = decode(t, &s.m, "l", "y");
            let mut at = strided(&batch, &s.batch, |d| d.o);
            at.extend(strided(&digits, &s.m, |d| d.o));
            t.line(format!(
                "float *o = (float *)buf[2] + {};",
                affine(&at, s.o_base)
            ));
            let outer_dims = &s.n[..s.n.len() - 1];
            let n_outer: i64 = outer_dims.iter().map(|d| d.size).product();
            t.line(format!("for (long po = 0; po < {n_outer}L; po++) {{"));
            let outer = decode(t, outer_dims, "po", "po");
            let place = affine(&strided(&outer, outer_dims, |d| d.o), 0);
            let size = last(&s.n).size;
            t.line(format!(
                "for (long j = 0; j < {size}L; j++) o[{place} + j*{}L] = {};",
                last(&s.n).o,
                sum(&format!("po*{size}L + j"))
            ));
            t.line("}");
        }
        if let Some(epilogue) = self.hooks.epilogue.as_ref().filter(|_| self.in_order) {
            let from = if self.local { "own" } else { "buf" };
            t.line(format!(
                "{epilogue}({from}, tid, bt, l, l + 1, 0, {length}L);"
            ));
        }
        t.close(2);
    }
}
