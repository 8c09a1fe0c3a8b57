//! The loop over time of an LSTM, forward and backward, as C.
//!
//! Each thread takes blocks of rows and runs all their steps: rows do not depend on one another, so threads meet
//! nowhere, and results do not depend on their number. A first launch packs the weights in panels of two vectors of
//! columns; a step multiplies the state's rows with every panel from registers, then updates the cell. Formulas:
//! `ops::recurrence`. Never decides which nodes stay whole.

use std::fmt::Write;

/// What surrounds the text of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Recurrence {
    /// Steps.
    pub(crate) steps: i64,
    /// Rows of a batch.
    pub(crate) rows: i64,
    /// Width of a state.
    pub(crate) width: i64,
    /// Whether elements have 64 bits.
    pub(crate) is_double: bool,
    /// Bytes of a vector.
    pub(crate) vector_bytes: i64,
    /// Threads to share rows among.
    pub(crate) threads: i64,
    /// Whether the gradient of the cell's states is given (backward only).
    pub(crate) has_cells: bool,
}

/// Most rows whose sums stay in registers, beside two vectors of weights.
const MAX_ROWS: i64 = 8;

impl Recurrence {
    fn real(&self) -> &'static str {
        if self.is_double { "double" } else { "float" }
    }

    fn bytes(&self) -> i64 {
        if self.is_double { 8 } else { 4 }
    }

    fn lanes(&self) -> i64 {
        self.vector_bytes / self.bytes()
    }

    /// Columns of a panel.
    fn panel(&self) -> i64 {
        2 * self.lanes()
    }

    /// Panels that hold so many columns.
    fn panels(&self, columns: i64) -> i64 {
        (columns + self.panel() - 1) / self.panel()
    }

    /// Blocks of rows and rows of a full block.
    fn blocks(&self) -> (i64, i64) {
        let n = self
            .threads
            .min(self.rows)
            .max((self.rows + MAX_ROWS - 1) / MAX_ROWS)
            .max(1);
        let rows = ((self.rows + n - 1) / n).max(1);
        ((self.rows + rows - 1) / rows, rows)
    }

    /// Columns and depth of the product of a step.
    fn product(&self, is_forward: bool) -> (i64, i64) {
        match is_forward {
            true => (4 * self.width, self.width),
            false => (self.width, 4 * self.width),
        }
    }

    /// Bytes of the packed weights.
    pub(crate) fn packed_bytes(&self, is_forward: bool) -> usize {
        let (columns, depth) = self.product(is_forward);
        (self.panels(columns) * self.panel() * depth * self.bytes()) as usize
    }

    /// Bytes that each thread needs.
    pub(crate) fn scratch_bytes(&self, is_forward: bool) -> usize {
        let (columns, _) = self.product(is_forward);
        let carried = if is_forward { 0 } else { self.width };
        let row = self.panels(columns) * self.panel() + carried;
        (self.blocks().1 * row * self.bytes()) as usize
    }

    /// Arithmetic operations: those of products, and some of the cell.
    pub(crate) fn operations(&self) -> u64 {
        (self.steps * self.rows * self.width * (8 * self.width + 30)) as u64
    }

    /// The product of `rows` rows with all panels: `z[r, :] = x[r, :]·W`.
    fn product_text(&self, name: &str, rows: i64, is_forward: bool) -> String {
        let (columns, depth) = self.product(is_forward);
        let (panels, panel, lanes) = (self.panels(columns), self.panel(), self.lanes());
        let (real, stride) = (self.real(), panels * panel);
        let mut text = format!(
            "static void {name}_product{rows}(const {real} *restrict x, const {real} *restrict w, {real} *restrict z) {{\n  \
             for (long p = 0; p < {panels}; ++p) {{\n    const {real} *wp = w + p * {};\n",
            depth * panel
        );
        for r in 0..rows {
            let _ = writeln!(text, "    {name}_v a{r} = {{0}}, b{r} = {{0}};");
        }
        let _ = writeln!(
            text,
            "    for (long k = 0; k < {depth}; ++k) {{\n      \
             const {name}_v u = *(const {name}_v *)(wp + k * {panel}), v = *(const {name}_v *)(wp + k * {panel} + {lanes});"
        );
        for r in 0..rows {
            let _ = writeln!(
                text,
                "      a{r} += x[{0} + k] * u; b{r} += x[{0} + k] * v;",
                r * depth
            );
        }
        text.push_str("    }\n");
        for r in 0..rows {
            let at = format!("z + {} + p * {panel}", r * stride);
            let _ = writeln!(
                text,
                "    *({name}_v *)({at}) = a{r}; *({name}_v *)({at} + {lanes}) = b{r};"
            );
        }
        text + "  }\n}\n"
    }

    /// Packs `w [4H, H]` in panels, each `[depth, panel]`; columns behind the last are 0.
    fn pack_text(&self, name: &str, is_forward: bool, offset: i64, place: usize) -> String {
        let (columns, depth) = self.product(is_forward);
        let (panels, panel, real, h) =
            (self.panels(columns), self.panel(), self.real(), self.width);
        let from = match is_forward {
            true => format!("w[j * {h} + k]"),
            false => format!("w[k * {h} + j]"),
        };
        format!(
            "void {name}_pack(void *const *buf, void *scratch, long tid, long nt) {{\n  \
             const {real} *restrict w = (const {real} *)buf[1] + {offset};\n  \
             {real} *restrict packed = ({real} *)buf[{place}];\n  (void)scratch;\n  \
             for (long p = tid; p < {panels}; p += nt)\n    for (long k = 0; k < {depth}; ++k)\n      \
             for (long l = 0; l < {panel}; ++l) {{\n        const long j = p * {panel} + l;\n        \
             packed[(p * {depth} + k) * {panel} + l] = j < {columns} ? {from} : 0;\n      }}\n}}\n"
        )
    }

    fn head(&self, name: &str, is_forward: bool) -> String {
        let (n_blocks, rows) = self.blocks();
        let last = self.rows - (n_blocks - 1) * rows;
        let mut text = format!(
            "typedef {} {name}_v __attribute__((vector_size({}), aligned({}), may_alias));\n",
            self.real(),
            self.vector_bytes,
            self.bytes()
        );
        text += &self.product_text(name, rows, is_forward);
        if last != rows {
            text += &self.product_text(name, last, is_forward);
        }
        text
    }

    /// The call of the product for the rows of a block.
    fn call(&self, name: &str, x: &str, z: &str) -> String {
        let (n_blocks, rows) = self.blocks();
        let last = self.rows - (n_blocks - 1) * rows;
        match last == rows {
            true => format!("{name}_product{rows}({x}, packed, {z});"),
            false => format!(
                "if (rows == {rows}) {name}_product{rows}({x}, packed, {z}); else {name}_product{last}({x}, packed, {z});"
            ),
        }
    }

    /// Declarations of operands: `(name, offset)`, the written ones from `n_inputs` on.
    fn operands(&self, list: &[(&str, i64)], n_inputs: usize) -> String {
        let real = self.real();
        let mut text = String::new();
        for (n, (operand, offset)) in list.iter().enumerate() {
            let c = if n < n_inputs { "const " } else { "" };
            let _ = writeln!(
                text,
                "  {c}{real} *restrict const {operand} = ({c}{real} *)buf[{n}] + {offset};"
            );
        }
        text
    }

    fn frame(&self, name: &str, operands: &str, place: usize) -> String {
        let (n_blocks, rows) = self.blocks();
        let real = self.real();
        format!(
            "void {name}(void *const *buf, void *scratch, long tid, long nt) {{\n{operands}  \
             const {real} *restrict const packed = (const {real} *)buf[{place}];\n  \
             {real} *restrict const z = ({real} *)scratch;\n  \
             for (long block = tid; block < {n_blocks}; block += nt) {{\n    \
             const long r0 = block * {rows}, rows = {0} - r0 < {rows} ? {0} - r0 : {rows};\n",
            self.rows
        )
    }

    /// Forward: buffers x, w, h0, c0, h, c, gates, packed; `offsets` of the inputs in elements.
    pub(crate) fn forward(&self, name: &str, offsets: &[i64]) -> String {
        let (steps, b, h, wide) = (self.steps, self.rows, self.width, 4 * self.width);
        let stride = self.panels(wide) * self.panel();
        let suffix = if self.is_double { "_f64" } else { "" };
        let operands = self.operands(
            &[
                ("x", offsets[0]),
                ("w", offsets[1]),
                ("h0", offsets[2]),
                ("c0", offsets[3]),
                ("h", 0),
                ("c", 0),
                ("gates", 0),
            ],
            4,
        );
        let call = self.call(name, "before", "z");
        let mut text = self.head(name, true) + &self.pack_text(name, true, offsets[1], 7);
        text += &self.frame(name, &operands, 7);
        let _ = write!(
            text,
            "    (void)w;\n    for (long t = 0; t < {steps}; ++t) {{
      const {real} *before = t ? h + ((t - 1) * {b} + r0) * {h} : h0 + r0 * {h};
      {call}
      for (long r = 0; r < rows; ++r) {{
        const long row = t * {b} + r0 + r;
        const {real} *restrict zr = z + r * {stride}, *restrict xr = x + row * {wide};
        const {real} *restrict cb = t ? c + (row - {b}) * {h} : c0 + (r0 + r) * {h};
        {real} *restrict hr = h + row * {h}, *restrict cr = c + row * {h}, *restrict gr = gates + row * {wide};
        #pragma omp simd
        for (long j = 0; j < {h}; ++j) {{
          const {real} i = sh_sigmoid{suffix}(zr[j] + xr[j]);
          const {real} f = sh_sigmoid{suffix}(zr[{h} + j] + xr[{h} + j]);
          const {real} g = sh_tanh{suffix}(zr[{h2} + j] + xr[{h2} + j]);
          const {real} o = sh_sigmoid{suffix}(zr[{h3} + j] + xr[{h3} + j]);
          const {real} cell = f * cb[j] + i * g;
          gr[j] = i; gr[{h} + j] = f; gr[{h2} + j] = g; gr[{h3} + j] = o;
          cr[j] = cell;
          hr[j] = o * sh_tanh{suffix}(cell);
        }}
      }}
    }}
  }}
}}
",
            real = self.real(),
            h2 = 2 * h,
            h3 = 3 * h,
        );
        text
    }

    /// Backward: buffers dh, w, c0, c, gates, dz, dh0, dc0, packed, and dcs where it is given.
    pub(crate) fn backward(&self, name: &str, offsets: &[i64]) -> String {
        let (steps, b, h, wide) = (self.steps, self.rows, self.width, 4 * self.width);
        let stride = self.panels(h) * self.panel();
        let (_, rows) = self.blocks();
        let suffix = if self.is_double { "_f64" } else { "" };
        let operands = self.operands(
            &[
                ("dhs", offsets[0]),
                ("w", offsets[1]),
                ("c0", offsets[2]),
                ("c", offsets[3]),
                ("gates", offsets[4]),
                ("dz", 0),
                ("dh0", 0),
                ("dc0", 0),
            ],
            5,
        );
        let real = self.real();
        let cells = match self.has_cells {
            true => format!(
                "    const {real} *restrict const dcs = (const {real} *)buf[9] + {};\n",
                offsets[5]
            ),
            false => String::new(),
        };
        let own_cell = if self.has_cells {
            " + dcs[row + j]"
        } else {
            ""
        };
        let call = self.call(name, &format!("dz + (t * {b} + r0) * {wide}"), "z");
        let mut text = self.head(name, false) + &self.pack_text(name, false, offsets[1], 8);
        text += &self.frame(name, &operands, 8);
        let _ = write!(
            text,
            "    (void)w;\n{cells}    {real} *restrict const dc = z + {dc};
    for (long n = 0; n < {all}; ++n) z[n] = 0;
    for (long t = {steps} - 1; t >= 0; --t) {{
      for (long r = 0; r < rows; ++r) {{
        const long row = (t * {b} + r0 + r) * {h};
        const {real} *restrict gr = gates + row * 4, *restrict up = z + r * {stride};
        const {real} *restrict cb = t ? c + row - {bh} : c0 + (r0 + r) * {h};
        {real} *restrict dr = dz + row * 4, *restrict down = dc + r * {h};
        #pragma omp simd
        for (long j = 0; j < {h}; ++j) {{
          const {real} i = gr[j], f = gr[{h} + j], g = gr[{h2} + j], o = gr[{h3} + j];
          const {real} y = sh_tanh{suffix}(c[row + j]), e = dhs[row + j] + up[j];
          const {real} d = down[j] + e * o * (1 - y * y){own_cell};
          dr[j] = d * g * i * (1 - i);
          dr[{h} + j] = d * cb[j] * f * (1 - f);
          dr[{h2} + j] = d * i * (1 - g * g);
          dr[{h3} + j] = e * y * o * (1 - o);
          down[j] = d * f;
        }}
      }}
      {call}
    }}
    for (long r = 0; r < rows; ++r)
      for (long j = 0; j < {h}; ++j) {{
        dh0[(r0 + r) * {h} + j] = z[r * {stride} + j];
        dc0[(r0 + r) * {h} + j] = dc[r * {h} + j];
      }}
  }}
}}
",
            dc = rows * stride,
            all = rows * (stride + h),
            bh = b * h,
            h2 = 2 * h,
            h3 = 3 * h,
        );
        text
    }
}
