//! Text of what a chain leaves in memory: numbers of rows, and results rounded once.

use super::form::Lines;
use super::kernel::Job;
use crate::cuda::element_type;
use crate::cuda::value_text::cast;
use crate::emit::text::CText;
use graph::DType;

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

    /// Rounds and stores one result's part.
    pub(super) fn store(&self, t: &mut CText, q: usize) {
        let out = &self.form.out_products[q].out;
        let part = self.part(out.width);
        let dtype = self.form.arrays[&out.container].dtype;
        let (ctype, name) = (element_type(dtype), &self.names[&out.container]);
        t.line("SH_UNROLL");
        t.open("for (int h = 0; h < 2; h++)");
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
        if out.inner == 1 && is_paired(out) {
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
        t.close();
    }
}

/// Whether pairs of a line are aligned to their size.
fn is_paired(lines: &Lines) -> bool {
    let even = |k: &i64| k % 2 == 0;
    even(&lines.base) && even(&lines.line) && lines.batch.iter().all(even)
}
