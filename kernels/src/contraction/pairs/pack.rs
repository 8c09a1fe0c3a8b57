//! Packing of operands into tiles of pairs. Rows become `[16 rows][16 pairs]`, columns
//! `[16 pairs][16 columns]`; what is missing at the ends is zero, as is what a guard forbids.
//!
//! Where the operand's own order is the other one, 16 vectors are transposed in registers.

use super::super::driver::{decode, strided};
use super::super::text::{CText, affine};
use super::{BLOCK, CHUNK, Order, PairsPart, last, product};
use crate::contraction::blocking::Dim;

/// Chunks that one unit of the packing launch packs.
const UNIT_CHUNKS: i64 = 64;

/// One operand as its packing function sees it.
struct Side {
    order: Order,
    /// Tiles hold `[line][pair]`, not `[pair][line]`.
    is_rows: bool,
    step: fn(&Dim) -> i64,
}

impl PairsPart<'_> {
    /// Emits `PREFIX_rows` and `PREFIX_columns`:
    /// `(source, places of lines, their guards, number of lines, first chunk, end, destination)`.
    pub(super) fn pack_functions(&self, t: &mut CText) {
        let rows = Side {
            order: self.a,
            is_rows: true,
            step: |d| d.a,
        };
        let columns = Side {
            order: self.b,
            is_rows: false,
            step: |d| d.b,
        };
        for (name, side) in [("rows", rows), ("columns", columns)] {
            t.line(format!(
                "static __attribute__((noinline)) void {}_{name}(const sh_u16 *restrict s, const long *at, \
                 const long *range, long lines, long c0, long c1, sh_u16 *restrict d) {{",
                self.prefix
            ));
            t.line("(void)range;");
            t.line("for (long c = c0; c < c1; c++) {");
            match side.order {
                Order::Reduction => self.runs_of_steps(t, &side),
                Order::Lines => self.runs_of_lines(t, &side),
                Order::Scattered => self.single_numbers(t, &side),
            }
            t.close(2);
        }
    }

    fn n_guards(&self, side: &Side) -> usize {
        if side.is_rows { self.guards().len() } else { 0 }
    }

    /// Declares the place `{prefix}o` and guards `{prefix}v0, ..` of the reduction's flat index.
    fn decode_step(&self, t: &mut CText, side: &Side, index: &str) -> (String, Vec<String>) {
        let digits = decode(t, &self.s.k, index, "q");
        let place = affine(&strided(&digits, &self.s.k, side.step), 0);
        let guards = self.guards().into_iter().take(self.n_guards(side));
        let of = guards.map(|c| {
            let terms: Vec<(String, i64)> = digits
                .iter()
                .zip(&self.s.k)
                .map(|(v, d)| (v.clone(), c.coeff(d.id)))
                .collect();
            affine(&terms, 0)
        });
        (place, of.collect())
    }

    /// `a < lines && ..`: whether line `line` has an element where the step's guards are `steps`.
    fn exists(&self, side: &Side, line: &str, steps: &dyn Fn(usize) -> String) -> String {
        let n = self.n_guards(side);
        let mut all = vec![format!("{line} < lines")];
        for (j, c) in self.guards().into_iter().take(n).enumerate() {
            all.push(format!(
                "(unsigned long)(range[({line})*{n}L + {j}] + {}) < {}UL",
                steps(j),
                c.size
            ));
        }
        all.join(" && ")
    }

    fn tile_place(&self, group: &str) -> String {
        format!("d + (({group} >> 1)*(c1 - c0) + c - c0)*{CHUNK}L + ({group} & 1)*512")
    }

    fn store(&self, t: &mut CText, transposed: bool, group: &str) {
        if transposed {
            t.line("sh_pairs_transpose(v);");
        }
        t.line(format!("sh_pairs_store({}, v);", self.tile_place(group)));
    }

    /// Each line is a run of steps: 32 of them are a row of a tile.
    fn runs_of_steps(&self, t: &mut CText, side: &Side) {
        let k = product(&self.s.k);
        t.line("{");
        t.line("const long kk = c*32;");
        let (place, guards) = self.decode_step(t, side, "kk");
        t.line(format!("const long step = {place};"));
        for (j, g) in guards.iter().enumerate() {
            t.line(format!("const long g{j} = {g};"));
        }
        t.line("for (long g = 0; g < (lines + 31)/32*2; g++) {");
        t.line("sh_pairs v[16];");
        t.line("_Pragma(\"GCC unroll 16\") for (long i = 0; i < 16; i++) {");
        let exists = self.exists(side, "(g*16 + i)", &|j| format!("g{j}"));
        t.line("v[i] = (sh_pairs){0};");
        t.line(format!("if ({exists}) {{"));
        t.line("const sh_u16 *from = s + at[g*16 + i] + step;");
        if k % BLOCK == 0 {
            t.line("v[i] = *(const sh_pairs *)from;");
        } else {
            t.line(format!(
                "if (kk + 32 <= {k}L) v[i] = *(const sh_pairs *)from;"
            ));
            t.line(format!("else memcpy(&v[i], from, ({k}L - kk)*2);"));
        }
        t.close(2);
        self.store(t, !side.is_rows, "g");
        t.close(2);
    }

    /// Places and guards of the 32 steps of a chunk, as arrays.
    fn steps(&self, t: &mut CText, side: &Side) {
        let n = self.n_guards(side);
        t.line(format!("long step[32], sv[{}]; (void)sv;", 32 * n.max(1)));
        let k = product(&self.s.k);
        t.line(format!("const long nk = shl_min({k}L - c*32, 32);"));
        t.line("for (long e = 0; e < nk; e++) {");
        t.line("const long kk = c*32 + e;");
        let (place, guards) = self.decode_step(t, side, "kk");
        t.line(format!("step[e] = {place};"));
        for (j, g) in guards.iter().enumerate() {
            t.line(format!("sv[e*{n}L + {j}] = {g};"));
        }
        t.line("}");
    }

    /// Each step is a run of lines: two of them, interleaved, are a row of a tile.
    fn runs_of_lines(&self, t: &mut CText, side: &Side) {
        t.line("{");
        self.steps(t, side);
        t.line("for (long g = 0; g < (lines + 31)/32*2; g++) {");
        t.line("const long n = shl_min(lines - g*16, 16);");
        t.line("sh_pairs v[16];");
        t.line("_Pragma(\"GCC unroll 16\") for (long e = 0; e < 16; e++) {");
        t.line("sh_run low = {0}, high = {0};");
        let n = self.n_guards(side);
        for (name, e) in [("low", "2*e"), ("high", "2*e + 1")] {
            let exists = self.exists(side, "g*16", &|j| format!("sv[({e})*{n}L + {j}]"));
            t.line(format!("if ({e} < nk && {exists}) {{"));
            t.line(format!("const sh_u16 *from = s + at[g*16] + step[{e}];"));
            t.line(format!("if (n == 16) {name} = *(const sh_run *)from;"));
            t.line(format!("else memcpy(&{name}, from, n*2);"));
            t.line("}");
        }
        t.line("v[e] = sh_pairs_interleave(low, high);");
        t.line("}");
        self.store(t, side.is_rows, "g");
        t.close(2);
    }

    /// Number by number, for weights in an order of their own.
    fn single_numbers(&self, t: &mut CText, side: &Side) {
        t.line("{");
        self.steps(t, side);
        t.line("for (long g = 0; g < (lines + 31)/32*2; g++) {");
        t.line(format!("sh_u16 *tile = {};", self.tile_place("g")));
        t.line("memset(tile, 0, 1024);");
        t.line("for (long i = 0; i < shl_min(lines - g*16, 16); i++)");
        t.line("for (long e = 0; e < nk; e++)");
        t.line("tile[(e >> 1)*32 + i*2 + (e & 1)] = s[at[g*16 + i] + step[e]];");
        t.close(2);
    }

    /// The launch that packs all columns into shared scratch.
    pub(super) fn pack_launch(&self, t: &mut CText) {
        let (s, chunks) = (&self.s, self.chunks());
        let pieces = (chunks + UNIT_CHUNKS - 1) / UNIT_CHUNKS;
        let units = self.batches() * self.panels() * pieces;
        t.line(format!(
            "static void {}_pack(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "(void)scratch; sh_u16 *W = (sh_u16 *)((char *)buf[3] + {}L);",
            self.shared_at
        ));
        t.line(format!(
            "const sh_u16 *B = buf[{}]; long at[32];",
            self.buffers().1
        ));
        t.line(format!(
            "for (long u = {units}L*tid/nt; u < {units}L*(tid + 1)/nt; u++) {{"
        ));
        t.line(format!(
            "const long piece = u%{pieces}L, p = u/{pieces}L%{0}L, bt = u/{1}L;",
            self.panels(),
            pieces * self.panels()
        ));
        let batch = decode(t, &s.batch, "bt", "bt");
        self.decode_panel(t);
        let outer_dims = &s.n[..s.n.len() - 1];
        let names: Vec<String> = (0..outer_dims.len()).map(|j| format!("po{j}")).collect();
        let mut from = strided(&batch, &s.batch, |d| d.b);
        from.extend(strided(&names, outer_dims, |d| d.b));
        let lane = last(&s.n).b;
        from.push(("pi".to_string(), 32 * lane));
        t.line(format!(
            "for (long j = 0; j < lanes; j++) at[j] = j*{lane}L;"
        ));
        t.line(format!(
            "const long c0 = piece*{UNIT_CHUNKS}L, c1 = shl_min(c0 + {UNIT_CHUNKS}L, {chunks}L);"
        ));
        t.line(format!(
            "{}_columns(B + {}, at, at, lanes, c0, c1, W + ((bt*{}L + p)*{chunks}L + c0)*{CHUNK}L);",
            self.prefix,
            affine(&from, s.b_base),
            self.panels()
        ));
        t.close(2);
    }
}
