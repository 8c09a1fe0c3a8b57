//! The C text of a depthwise convolution: the main function and the one that adds up the parts of a weight
//! gradient. Owns no condition: what is emitted here was recognized before.

use super::{Coord, Depthwise, aligned};
use crate::contraction::text::{CText, affine};

impl Depthwise {
    /// The function that makes a row of the image, unless it is there already.
    pub(super) fn row_function(&self, t: &mut CText) {
        let Some(prologue) = &self.x_prologue else {
            return;
        };
        let number = self.vector.element.c_type();
        t.line(format!(
            "static inline const {number} *{}_row(void *const *buf, {number} *row, long at, long *made) {{",
            self.prefix
        ));
        t.line(format!(
            "if (*made != at) {{ *made = at; {prologue}(buf, row, at, 1, {}L); }}",
            self.row_numbers()
        ));
        t.line("return row;");
        t.line("}");
    }

    pub(super) fn main_function(&self, t: &mut CText) {
        let cp = self.padded_channels();
        let (number, bytes) = (self.vector.element.c_type(), self.vector.element.bytes());
        t.line(format!(
            "static void {}_main(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "const {number} *X = (const {number} *)buf[{}] + {}L;",
            self.x_buf, self.x.base
        ));
        let units: i64 = self.outer.iter().map(|&d| self.dims[d]).product();
        if self.x_prologue.is_some() {
            t.line(format!(
                "(void)X; {number} *rows = ({number} *)scratch + {}L;",
                self.made_rows_at()[0]
            ));
            let n = self.kept_rows();
            t.line(format!(
                "long made[{n}]; for (long i = 0; i < {n}L; i++) made[i] = -1;"
            ));
        }
        if self.zero_numbers() > 0 {
            t.line(format!(
                "{number} *zero = ({number} *)scratch + {}L;",
                self.weight_numbers()
            ));
            t.line(format!(
                "memset(zero, 0, {}L);",
                self.zero_numbers() * bytes
            ));
        }
        if self.reduce {
            let y_buf = 1 - self.x_buf;
            t.line(format!(
                "const {number} *Y = (const {number} *)buf[{y_buf}] + {}L;",
                self.y.base
            ));
            t.line(format!(
                "for (long part = tid; part < {}L; part += nt) {{",
                self.parts
            ));
            let taps = self.taps().len() as i64;
            t.line(format!(
                "{number} *wt = ({number} *)buf[3] + {}L + part*{}L;",
                self.shared_at,
                taps * cp
            ));
            t.line(format!("memset(wt, 0, {}L);", taps * cp * bytes));
            t.line(format!(
                "for (long u = {units}L*part/{0}L; u < {units}L*(part + 1)/{0}L; u++) {{",
                self.parts
            ));
        } else {
            t.line(format!(
                "{number} *Y = ({number} *)buf[2] + {}L;",
                self.y.base
            ));
            t.line(format!("{number} *wt = scratch;"));
            self.load_weights(t);
            if self.sums.is_some() {
                let bands = self.bands(self.threads);
                t.line(format!(
                    "for (long band = {bands}L*tid/nt; band < {bands}L*(tid + 1)/nt; band++) {{"
                ));
                t.line(format!(
                    "for (long u = {units}L*band/{bands}L; u < {units}L*(band + 1)/{bands}L; u++) {{"
                ));
            } else {
                t.line(format!(
                    "for (long u = {units}L*tid/nt; u < {units}L*(tid + 1)/nt; u++) {{"
                ));
            }
        }
        self.row_pointers(t, units);
        let whole = self.channels / self.vector.lanes * self.vector.lanes;
        for (kind, lanes) in [
            (self.vector.c_type(), self.vector.lanes),
            (number.to_string(), 1),
        ] {
            let (from, to) = match lanes {
                1 => (whole, self.channels),
                _ => (0, whole),
            };
            if from < to {
                t.line(format!(
                    "for (long c = {from}L; c < {to}L; c += {lanes}L) {{"
                ));
                self.row(t, &kind);
                t.line("}");
            }
        }
        if let Some(e) = self.epilogue.as_ref().filter(|_| !self.reduce) {
            let w = self.dims[self.column];
            t.line(format!(
                "{e}(buf, tid, 0, u*{w}L, (u + 1)*{w}L, 0, {}L);",
                self.channels
            ));
        }
        if let Some(sums) = &self.sums {
            let (w, bands) = (self.dims[self.column], self.bands(self.threads));
            t.close(1);
            t.line(format!(
                "{sums}(buf, tid, band, 0, {units}L*band/{bands}L*{w}L, {units}L*(band + 1)/{bands}L*{w}L, 0, {}L);",
                self.channels
            ));
        }
        t.close(if self.reduce { 3 } else { 2 });
    }

    fn tap_offset(&self, row: &[i64], s: i64) -> i64 {
        let rows: i64 = self
            .row_taps
            .iter()
            .zip(row)
            .map(|(&d, i)| self.w.stride(d) * i)
            .sum();
        rows + self.column_tap.map_or(0, |d| self.w.stride(d) * s)
    }

    fn load_weights(&self, t: &mut CText) {
        let number = self.vector.element.c_type();
        t.line(format!(
            "const {number} *B = (const {number} *)buf[{}] + {}L;",
            self.w_buf, self.w.base
        ));
        t.line(format!("for (long c = 0; c < {}L; c++) {{", self.channels));
        let rows = self.rows();
        for (i, (r, s)) in self.taps().into_iter().enumerate() {
            let at = i as i64 * self.padded_channels();
            let from = self.tap_offset(&rows[r], s);
            t.line(format!(
                "wt[{at}L + c] = B[c*{}L + {from}L];",
                self.w.stride(self.lane)
            ));
        }
        t.line("}");
    }

    /// Declares `y` and `r0, r1, ..`: the row of each combination of row taps, or the zero row.
    fn row_pointers(&self, t: &mut CText, units: i64) {
        let mut inner = units;
        for &d in &self.outer {
            inner /= self.dims[d];
            t.line(format!("const long q{d} = u/{inner}L%{}L;", self.dims[d]));
        }
        let at: Vec<(String, i64)> = self
            .outer
            .iter()
            .map(|&d| (format!("q{d}"), self.y.stride(d)))
            .collect();
        let constness = if self.reduce { "const " } else { "" };
        let number = self.vector.element.c_type();
        match &self.y_prologue {
            Some(prologue) => {
                t.line(format!(
                    "{number} *y = ({number} *)scratch + {}L; (void)Y;",
                    self.made_rows_at()[1]
                ));
                t.line(format!(
                    "{prologue}(buf, y, {}, 1, {}L);",
                    affine(&at, self.y.base),
                    self.y_row_numbers()
                ));
            }
            None => t.line(format!("{constness}{number} *y = Y + {};", affine(&at, 0))),
        }
        for (i, row) in self.rows().iter().enumerate() {
            let tap = |c: &Coord| -> i64 {
                self.row_taps
                    .iter()
                    .zip(row)
                    .map(|(&d, i)| c.coeff(d) * i)
                    .sum()
            };
            let mut terms = Vec::new();
            let mut fixed = 0;
            let mut tests = Vec::new();
            for c in self
                .x
                .coords
                .iter()
                .filter(|c| **c != self.column_coord && c.coeff(self.lane) == 0)
            {
                let here: Vec<(String, i64)> = self
                    .outer
                    .iter()
                    .map(|&d| (format!("q{d}"), c.coeff(d)))
                    .collect();
                terms.extend(here.iter().map(|(v, k)| (v.clone(), k * c.stride)));
                fixed += (c.offset + tap(c)) * c.stride;
                if c.guarded {
                    tests.push(format!(
                        "(unsigned long)({}) < {}UL",
                        affine(&here, c.offset + tap(c)),
                        c.size
                    ));
                }
            }
            let from = match &self.x_prologue {
                Some(_) => {
                    let slot = self.slot(&tap);
                    format!(
                        "{}_row(buf, rows + ({slot})*{}L, {}, made + {slot})",
                        self.prefix,
                        aligned(self.row_numbers()),
                        affine(&terms, fixed + self.x.base)
                    )
                }
                None => format!("X + {}", affine(&terms, fixed)),
            };
            let value = if tests.is_empty() {
                from
            } else {
                format!("{} ? {from} : zero", tests.join(" && "))
            };
            t.line(format!("const {number} *r{i} = {value};"));
        }
    }

    /// Which of the kept rows is the one at `tap`: rows of one window differ in it.
    fn slot(&self, tap: &dyn Fn(&Coord) -> i64) -> String {
        let mut slot = String::from("0");
        for (c, span) in self.row_coords() {
            let here: Vec<(String, i64)> = self
                .outer
                .iter()
                .map(|&d| (format!("q{d}"), c.coeff(d)))
                .collect();
            let digit = format!("({})%{span}L", affine(&here, c.offset + tap(c)));
            slot = match slot.as_str() {
                "0" => digit,
                before => format!("({before})*{span}L + {digit}"),
            };
        }
        slot
    }

    /// One row of positions for the channels from `c`.
    fn row(&self, t: &mut CText, kind: &str) {
        let taps = self.taps();
        let cp = self.padded_channels();
        // Each row's sums start anew, so that no chain of additions is longer than the number of rows or of columns.
        for i in 0..taps.len() {
            t.line(if self.reduce {
                format!("{kind} w{i} = {{0}};")
            } else {
                format!(
                    "{kind} w{i} = *(const {kind} *)(wt + {}L + c);",
                    i as i64 * cp
                )
            });
        }
        let columns = self.dims[self.column];
        let interior: Vec<i64> = (0..columns).filter(|&x| self.is_interior(x)).collect();
        for x in self.border_columns() {
            t.line("{");
            self.column(t, kind, &format!("{x}L"), Some(x));
            t.line("}");
        }
        if let (Some(first), Some(last)) = (interior.first(), interior.last()) {
            t.line(format!("for (long x = {first}L; x <= {last}L; x++) {{"));
            self.column(t, kind, "x", None);
            t.line("}");
        }
        if self.reduce {
            for i in 0..taps.len() {
                t.line(format!("*({kind} *)(wt + {}L + c) += w{i};", i as i64 * cp));
            }
        }
    }

    /// One position: all taps, or those that exist at border column `at`.
    fn column(&self, t: &mut CText, kind: &str, x: &str, at: Option<i64>) {
        let c = &self.column_coord;
        let y_at = format!("y + {x}*{}L + c", self.y.stride(self.column));
        if self.reduce {
            t.line(format!("const {kind} d = *(const {kind} *)({y_at});"));
        } else {
            t.line(format!("{kind} s = {{0}};"));
        }
        let is_scalar = kind == self.vector.element.c_type();
        let fused = |sum: &str, a: &str, b: &str| match is_scalar {
            true => format!("{sum} += {a}*{b};"),
            false => format!("{sum} = {kind}_fma({a}, {b}, {sum});"),
        };
        for (i, (r, tap)) in self.taps().into_iter().enumerate() {
            if at.is_some_and(|x| !self.column_exists(x, tap)) {
                continue;
            }
            let fixed = self.column_position(0, tap) * c.stride;
            let from = format!(
                "r{r} + {x}*{}L + {fixed}L + c",
                c.coeff(self.column) * c.stride
            );
            let value = format!("*(const {kind} *)({from})");
            t.line(if self.reduce {
                fused(&format!("w{i}"), "d", &value)
            } else {
                fused("s", &format!("w{i}"), &value)
            });
        }
        if !self.reduce {
            t.line(format!("*({kind} *)({y_at}) = s;"));
        }
    }

    /// Sums the parts of a weight gradient.
    pub(super) fn combine_function(&self, t: &mut CText) {
        let (cp, n_taps) = (self.padded_channels(), self.taps().len() as i64);
        let number = self.vector.element.c_type();
        t.line(format!(
            "static void {}_combine(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "(void)scratch; const {number} *R = (const {number} *)buf[3] + {}L;",
            self.shared_at
        ));
        t.line(format!(
            "{number} *O = ({number} *)buf[2] + {}L;",
            self.w.base
        ));
        t.line(format!(
            "for (long c = {0}L*tid/nt; c < {0}L*(tid + 1)/nt; c++) {{",
            self.channels
        ));
        let rows = self.rows();
        for (i, (r, s)) in self.taps().into_iter().enumerate() {
            let sum: Vec<String> = (0..self.parts)
                .map(|p| format!("R[{}L + c]", (p * n_taps + i as i64) * cp))
                .collect();
            let to = self.tap_offset(&rows[r], s);
            t.line(format!(
                "O[c*{}L + {to}L] = {};",
                self.w.stride(self.lane),
                sum.join(" + ")
            ));
        }
        t.close(2);
    }
}
