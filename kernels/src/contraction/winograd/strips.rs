//! Rows of tiles: where they are in the arrays, and the loop that transforms the image of one.

use super::{Convolution, Depth};
use crate::contraction::access::Access;
use crate::contraction::blocking::div_up;
use crate::contraction::text::{CText, affine};

/// Rows, and columns, of the image that a tile reads.
const TILE: i64 = 4;

impl Convolution {
    /// The number of tiles in the longest run, where rows of tiles are divided into `units` runs.
    pub(super) fn unit_tiles(&self, units: i64) -> i64 {
        div_up(self.strips(), units) * self.columns.tiles()
    }

    /// Rows of the image that are kept at a time, for each tap of the depth.
    fn kept_rows(&self) -> i64 {
        TILE * self.depth_taps()
    }

    /// Numbers of the rows that a prologue makes: four, of which the next row of tiles uses two again.
    pub(super) fn made_numbers(&self, prologue: Option<&str>) -> i64 {
        prologue.map_or(0, |_| self.kept_rows() * self.row_numbers())
    }

    /// The function that makes a row of the image, unless it is there already.
    pub(super) fn rows_function(&self, t: &mut CText, prefix: &str, prologue: Option<&str>) {
        let Some(prologue) = prologue else {
            return;
        };
        let number = self.vector.element.c_type();
        t.line(format!(
            "static inline const {number} *{prefix}_row(void *const *buf, {number} *row, long at, long *made) {{"
        ));
        t.line(format!(
            "if (*made != at) {{ *made = at; {prologue}(buf, row, at, 1, {}L); }}",
            self.row_numbers()
        ));
        t.line("return row;");
        t.line("}");
    }

    /// Declares the image and places in scratch: a row of zeros, a tile at the border, rows that a prologue makes.
    pub(super) fn declare_rows(
        &self,
        t: &mut CText,
        [zeros, border, made]: [i64; 3],
        prologue: Option<&str>,
    ) {
        let number = self.vector.element.c_type();
        t.line(format!(
            "const {number} *X = (const {number} *)buf[{}] + {}L; (void)X;",
            self.image_buffer, self.image.base
        ));
        t.line(format!(
            "{number} *zeros = ({number} *)scratch + {zeros}L, *border = ({number} *)scratch + {border}L;"
        ));
        t.line(format!(
            "memset(zeros, 0, {}L);",
            (border - zeros) * self.vector.element.bytes()
        ));
        if prologue.is_some() {
            let none = vec!["-1"; self.kept_rows() as usize].join(", ");
            t.line(format!(
                "{number} *rows = ({number} *)scratch + {made}L; long made[{}] = {{{none}}};",
                self.kept_rows()
            ));
        }
    }

    /// Declares the row of tiles inside of its image, and the place of the image in each dim.
    pub(super) fn decode_strip(&self, t: &mut CText, strip: &str) {
        let mut inner = self.strips();
        let tiles = self.rows.tiles();
        t.line(format!("const long ty = {strip}%{tiles}L;"));
        for &d in &self.outer {
            inner /= self.dims[d];
            t.line(format!(
                "const long q{d} = {strip}/{inner}L%{}L;",
                self.dims[d]
            ));
        }
    }

    /// Where row `q` of tiles begins in an operand, if each row of tiles takes `row` numbers.
    pub(super) fn strip_place(&self, of: &Access, row: i64) -> String {
        let mut terms: Vec<(String, i64)> = (self.outer.iter())
            .map(|d| (format!("q{d}"), of.stride(*d)))
            .collect();
        terms.push(("ty".to_string(), row));
        affine(&terms, 0)
    }

    /// Transforms the image of the row of tiles `s`, `channels` channels from the expression `first` on; the tiles go to
    /// `v`, which moves on by `step` for each. The taps of the depth lie `deep` apart.
    pub(super) fn image_strip(
        &self,
        t: &mut CText,
        prefix: &str,
        prologue: Option<&str>,
        (first, channels): (&str, i64),
        [step, deep]: [i64; 2],
    ) {
        self.decode_strip(t, "s");
        let Some(depth) = &self.depth else {
            self.image_rows(t, prefix, prologue, (first, channels), step);
            return;
        };
        let taps = depth.taps;
        t.line(format!(
            "for (long t = 0; t < {taps}L; t++, v += {}L) {{",
            deep - self.columns.tiles() * step
        ));
        let terms = [
            (
                format!("q{}", depth.position),
                depth.coord.coeff(depth.position),
            ),
            ("t".to_string(), depth.coord.coeff(depth.tap)),
        ];
        t.line(format!(
            "const long z = {};",
            affine(&terms, depth.coord.offset)
        ));
        self.image_rows(t, prefix, prologue, (first, channels), step);
        t.line("}");
        t.line(format!(
            "v += {}L;",
            self.columns.tiles() * step - taps * deep
        ));
    }

    /// Transforms the rows that a row of tiles reads, at the tap `t` of the depth.
    fn image_rows(
        &self,
        t: &mut CText,
        prefix: &str,
        prologue: Option<&str>,
        (first, channels): (&str, i64),
        step: i64,
    ) {
        let (row, column) = (&self.rows.coord, &self.columns.coord);
        let (low, high) = self.rows.bounds();
        let mut outer = self.strip_place(&self.image, 2 * row.stride);
        let mut is_there = String::new();
        let mut slot = "v{}&3".to_string();
        if let Some(Depth { coord, tap, .. }) = &self.depth {
            let (step, first) = (
                coord.coeff(*tap) * coord.stride,
                coord.offset * coord.stride,
            );
            outer = format!("{outer} + t*{step}L + {first}L");
            slot = format!("t*{TILE}L + (v{{}}&3)");
            if coord.guarded {
                is_there = format!("z >= 0 && z < {}L && ", coord.size);
            }
        }
        for i in 0..TILE {
            let at = row.offset + i;
            t.line(format!("const long v{i} = 2*ty + {at}L;"));
            let place = format!("{outer} + {}L", at * row.stride);
            let exists = match prologue {
                Some(_) => {
                    let slot = slot.replace("{}", &i.to_string());
                    format!(
                        "{prefix}_row(buf, rows + ({slot})*{}L, {place} + {}L, made + ({slot}))",
                        self.row_numbers(),
                        self.image.base
                    )
                }
                None => format!("X + {place}"),
            };
            t.line(format!(
                "const {} *r{i} = ({is_there}v{i} >= {low}L && v{i} < {high}L ? {exists} : zeros) + {first};",
                self.vector.element.c_type()
            ));
        }
        let (low, high) = self.columns.bounds();
        t.line(format!(
            "for (long x = 0; x < {}L; x++, v += {step}L) {{",
            self.columns.tiles()
        ));
        t.line(format!("const long at = 2*x + {}L;", column.offset));
        t.line(format!("if (at >= {low}L && at + {TILE}L <= {high}L) {{"));
        let inside: Vec<String> = (0..TILE)
            .map(|i| format!("r{i} + at*{}L", column.stride))
            .collect();
        t.line(format!(
            "{prefix}_image({}, {}L, v);",
            inside.join(", "),
            column.stride
        ));
        t.line("} else {");
        let bytes = channels * self.vector.element.bytes();
        t.line(format!("for (long j = 0; j < {TILE}L; j++) {{"));
        t.line(format!(
            "const long from = (at + j)*{}L, to = j*{channels}L, is_there = at + j >= {low}L && at + j < {high}L;",
            column.stride
        ));
        for i in 0..TILE {
            let to = format!("border + to + {}L", i * TILE * channels);
            t.line(format!(
                "if (is_there) memcpy({to}, r{i} + from, {bytes}L); else memset({to}, 0, {bytes}L);"
            ));
        }
        t.line("}");
        let at_border: Vec<String> = (0..TILE)
            .map(|i| format!("border + {}L", i * TILE * channels))
            .collect();
        t.line(format!(
            "{prefix}_image({}, {channels}L, v);",
            at_border.join(", ")
        ));
        t.close(2);
    }
}
