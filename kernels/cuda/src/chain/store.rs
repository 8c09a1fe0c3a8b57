//! Text of what a chain leaves in memory: numbers of rows, results rounded once, tiles that others read.

use super::element::{Elements, Names};
use super::form::{Form, Lines, VECTOR};
use super::kernel::Job;
use crate::element_type;
use crate::value_text::cast;
use graph::{DType, SymExpr, Symbol};
use kernels::emit::text::CText;
use kernels::emit::values::Effect;

impl Job<'_> {
    /// Numbers of rows that others read.
    pub(super) fn store_scalars(&self, t: &mut CText) {
        let form = self.form;
        for (n, scalar) in self.sweeps.scalars.iter().enumerate() {
            let array = &form.arrays[&scalar.container];
            if array.local {
                continue;
            }
            let writes = form.statements.iter().flat_map(|s| &s.writes);
            let mut writes = writes.filter(|w| w.place.container == scalar.container);
            let Some(write) = writes.next() else { continue };
            let offset = form.extents.c_text(&write.place.offset);
            let value = cast(&format!("scalar{n}[h]"), DType::F32, array.dtype);
            t.open("if (SH_LANE % 4 == 0 && part == 0)");
            t.line("SH_UNROLL");
            t.open("for (int h = 0; h < 2; h++)");
            t.line(&format!(
                "if (first_row + h*8 >= {}) continue;",
                form.row.size
            ));
            t.line(&format!("const {} row = row_at[h];", self.index_type()));
            t.line(&format!(
                "{}[{offset}] = {value};",
                self.names[&scalar.container]
            ));
            t.close();
            t.close();
        }
    }

    /// Rounds and stores one result's part: 16 bytes of a row at a time where they lie so.
    pub(super) fn store(&self, t: &mut CText, q: usize) {
        let out = &self.form.out_products[q].out;
        let dtype = self.form.arrays[&out.container].dtype;
        let whole = self.part(out.width) % 32 == 0 && is_aligned(out, VECTOR);
        t.line("SH_UNROLL");
        t.open("for (int h = 0; h < 2; h++)");
        match dtype {
            DType::BF16 | DType::F16 if whole => self.store_vectors(t, q),
            _ => self.store_pairs(t, q),
        }
        t.close();
    }

    /// The four lanes of a row exchange pairs, so that each has eight neighbours.
    fn store_vectors(&self, t: &mut CText, q: usize) {
        let out = &self.form.out_products[q].out;
        let part = self.part(out.width);
        let dtype = self.form.arrays[&out.container].dtype;
        let (ctype, name) = (element_type(dtype), &self.names[&out.container]);
        t.line("SH_UNROLL");
        t.open(&format!("for (int j = 0; j < {}; j += 4)", part / 8));
        t.line("unsigned pairs[4];");
        t.line("SH_UNROLL");
        let value = |k: usize| format!("sh_from_float<{ctype}>(out{q}[j + i][h*2 + {k}])");
        t.line(&format!(
            "for (int i = 0; i < 4; i++) pairs[i] = sh_pack({}, {});",
            value(0),
            value(1)
        ));
        t.line("SH_UNROLL");
        t.open("for (int mask = 1; mask < 4; mask *= 2)");
        t.line("const bool upper = SH_LANE & mask;");
        t.line("SH_UNROLL");
        t.open("for (int i = 0; i < 4; i++)");
        t.line("if (i & mask) continue;");
        t.line("const unsigned other = sh_shuffle_xor(upper ? pairs[i] : pairs[i + mask], mask);");
        t.line("if (upper) pairs[i] = other;");
        t.line("else pairs[i + mask] = other;");
        t.close();
        t.close();
        t.line(&format!(
            "const int e = part*{part} + j*8 + SH_LANE % 4*{VECTOR};"
        ));
        t.line(&format!("sh_vec<{ctype}, {VECTOR}> v;"));
        t.line("SH_UNROLL");
        t.line(&format!(
            "for (int i = 0; i < {VECTOR}; i++) v[i].bits = (unsigned short)(pairs[i/2] >> i%2*16);"
        ));
        let from = self.line(out, "row_at[h]");
        t.line(&format!(
            "if (first_row + h*8 < {} && e < {}) sh_store<{VECTOR}>({name}, {from} + e, v);",
            self.form.row.size, out.width
        ));
        t.close();
    }

    fn store_pairs(&self, t: &mut CText, q: usize) {
        let out = &self.form.out_products[q].out;
        let part = self.part(out.width);
        let dtype = self.form.arrays[&out.container].dtype;
        let (ctype, name) = (element_type(dtype), &self.names[&out.container]);
        t.line(&format!(
            "if (first_row + h*8 >= {}) continue;",
            self.form.row.size
        ));
        t.line("SH_UNROLL");
        t.open(&format!("for (int j = 0; j < {}; j++)", part / 8));
        t.line(&format!("const int e = part*{part} + j*8 + lane_col;"));
        if part * self.tile.parts != out.width {
            t.line(&format!("if (e >= {}) continue;", out.width));
        }
        let from = self.line(out, "row_at[h]");
        let value = |k: usize| format!("sh_from_float<{ctype}>(out{q}[j][h*2 + {k}])");
        if is_aligned(out, 2) {
            t.line(&format!("sh_vec<{ctype}, 2> v;"));
            t.line(&format!("v[0] = {}, v[1] = {};", value(0), value(1)));
            t.line(&format!("sh_store<2>({name}, {from} + e, v);"));
        } else {
            for k in 0..2 {
                t.line(&format!(
                    "{name}[{from} + (e + {k})*{}] = {};",
                    out.inner,
                    value(k)
                ));
            }
        }
        t.close();
    }
}

/// Whether `n` numbers of a line lie side by side, aligned to their size.
fn is_aligned(lines: &Lines, n: i64) -> bool {
    let divides = |k: &i64| k % n == 0;
    let starts = divides(&lines.base) && divides(&lines.line);
    lines.inner == 1 && starts && lines.batch.iter().all(divides)
}

/// Two neighbours of each of the thread's rows of a tile to memory.
pub(super) fn tile(e: &Elements<'_>, t: &mut CText, names: &Names, n: usize, effect: &Effect) {
    let form = e.form();
    let (id, offset) = (effect.address.container, &effect.address.offset);
    let ctype = element_type(form.arrays[&id].dtype);
    let (name, size) = (&names[&id], form.col.size);
    let (index, at) = (e.index_type(), form.extents.c_text(offset));
    let value = |k: usize| format!("sh_from_float<{ctype}>(stored{n}_at[h][{k}])");
    t.line("SH_UNROLL");
    t.open("for (int h = 0; h < 2; h++)");
    t.line(&format!(
        "if (part != 0 || first_row + h*8 >= {}) continue;",
        form.row.size
    ));
    e.row(t);
    let place = "first + j*8 + lane_col";
    if is_paired(form, offset) {
        t.open(&format!("if ({place} < {size})"));
        t.line(&format!("const {index} col = {place};"));
        t.line(&format!("sh_vec<{ctype}, 2> v;"));
        t.line(&format!("v[0] = {}, v[1] = {};", value(0), value(1)));
        t.line(&format!("sh_store<2>({name}, {at}, v);"));
        t.close();
    } else {
        for k in 0..2 {
            t.open(&format!("if ({place} + {k} < {size})"));
            t.line(&format!("const {index} col = {place} + {k};"));
            t.line(&format!("{name}[{at}] = {};", value(k)));
            t.close();
        }
    }
    t.close();
}

/// Whether columns lie side by side, and pairs of them are aligned.
fn is_paired(form: &Form, offset: &SymExpr) -> bool {
    let Some((terms, base)) = offset.as_affine() else {
        return false;
    };
    let is_col = |s: &Symbol| *s == form.col.var;
    let is_even = |(s, k): &(Symbol, i64)| if is_col(s) { *k == 1 } else { k % 2 == 0 };
    let has_col = terms.iter().any(|(s, _)| is_col(s));
    has_col && base % 2 == 0 && form.col.size % 2 == 0 && terms.iter().all(is_even)
}
