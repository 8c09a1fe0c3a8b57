//! The product of a step: weights in panels, and a block's rows with all of them.

use super::Recurrence;
use std::fmt::Write;

impl Recurrence {
    /// The product of some rows with one panel: `z[r, panel] = x[r, :]·W[:, panel]`.
    fn part_text(&self, name: &str, rows: i64) -> String {
        let (_, depth) = self.product();
        let (panel, lanes, stride, real) = (self.panel(), self.lanes(), self.stride(), self.real());
        let mut text = format!(
            "static void {name}_part{rows}(const {real} *restrict x, const {real} *restrict w, {real} *restrict z) {{\n"
        );
        for r in 0..rows {
            let _ = writeln!(text, "  {name}_v a{r} = {{0}}, b{r} = {{0}};");
        }
        let _ = writeln!(
            text,
            "  for (long k = 0; k < {depth}; ++k) {{\n    \
             const {name}_v u = *(const {name}_v *)(w + k * {panel}), v = *(const {name}_v *)(w + k * {panel} + {lanes});"
        );
        for r in 0..rows {
            let at = r * depth;
            let _ = writeln!(
                text,
                "    const {name}_v x{r} = {name}_v_all(x[{at} + k]);\n    \
                 a{r} = {name}_v_fma(x{r}, u, a{r}); b{r} = {name}_v_fma(x{r}, v, b{r});"
            );
        }
        text.push_str("  }\n");
        for r in 0..rows {
            let at = r * stride;
            let _ = writeln!(
                text,
                "  *({name}_v *)(z + {at}) = a{r}; *({name}_v *)(z + {at} + {lanes}) = b{r};"
            );
        }
        text + "}\n"
    }

    /// The product of a block's rows with all panels.
    pub(super) fn product_text(&self, name: &str) -> String {
        let (_, depth) = self.product();
        let (panels, panel, stride, real) =
            (self.panels(), self.panel(), self.stride(), self.real());
        let sizes = self.block_sizes();
        let mut counts: Vec<i64> = sizes.iter().flat_map(|rows| self.parts(*rows)).collect();
        counts.sort_unstable();
        counts.dedup();
        let mut text: String = counts.iter().map(|n| self.part_text(name, *n)).collect();
        for rows in sizes {
            let _ = writeln!(
                text,
                "static void {name}_product{rows}(const {real} *restrict x, const {real} *restrict packed, {real} *restrict z) {{\n  \
                 for (long p = 0; p < {panels}; ++p) {{\n    const {real} *w = packed + p * {};",
                depth * panel
            );
            let mut first = 0;
            for n in self.parts(rows) {
                let _ = writeln!(
                    text,
                    "    {name}_part{n}(x + {}, w, z + {} + p * {panel});",
                    first * depth,
                    first * stride
                );
                first += n;
            }
            text.push_str("  }\n}\n");
        }
        text
    }

    /// Packs `w [G·H, H]` in panels, each `[depth, panel]`; columns after the last are 0.
    pub(super) fn pack_text(&self, name: &str) -> String {
        let (columns, depth) = self.product();
        let (panels, panel, real, h) = (self.panels(), self.panel(), self.real(), self.width);
        let from = match self.is_forward() {
            true => format!("w[j * {h} + k]"),
            false => format!("w[k * {h} + j]"),
        };
        let places = self.places();
        let position = |name: &str| places.iter().position(|p| self.name_of(*p) == name);
        let (w, packed) = (position("w").unwrap_or(0), places.len() - 1);
        let offset = self.offsets[w];
        // Blocks of 16 positions of depth, so that what lies far apart in `w` stays in the cache.
        format!(
            "void {name}_pack(void *const *buf, void *scratch, long tid, long nt) {{\n  \
             const {real} *restrict w = (const {real} *)buf[{w}] + {offset};\n  \
             {real} *restrict packed = ({real} *)buf[{packed}];\n  (void)scratch;\n  \
             for (long p = tid; p < {panels}; p += nt)\n    for (long k0 = 0; k0 < {depth}; k0 += 16)\n      \
             for (long l = 0; l < {panel}; ++l) {{\n        const long j = p * {panel} + l;\n        \
             for (long k = k0; k < k0 + 16 && k < {depth}; ++k)\n          \
             packed[(p * {depth} + k) * {panel} + l] = j < {columns} ? {from} : 0;\n      }}\n}}\n"
        )
    }

    /// The call of the product for the rows of a block.
    pub(super) fn call(&self, name: &str, x: &str) -> String {
        match self.block_sizes()[..] {
            [rows, last] => format!(
                "if (rows == {rows}) {name}_product{rows}({x}, packed, z); else {name}_product{last}({x}, packed, z);"
            ),
            _ => format!("{name}_product{}({x}, packed, z);", self.blocks().1),
        }
    }
}
