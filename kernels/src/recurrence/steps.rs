//! The loops over blocks, steps, rows and positions, around what a step computes.

use super::statements::{NotReal, Statements};
use super::{Place, Recurrence};
use graph::{Cell, CellGradient, Expr};
use std::collections::BTreeMap;
use std::fmt::Write;

impl Recurrence {
    /// The function's head, its operands, and the loop over blocks.
    pub(super) fn frame(&self, name: &str) -> String {
        let ((n_blocks, rows), real) = (self.blocks(), self.real());
        let mut text =
            format!("void {name}(void *const *buf, void *scratch, long tid, long nt) {{\n");
        for (n, place) in self.places().into_iter().enumerate() {
            let (c, operand) = match place {
                Place::Output(_) => ("", self.name_of(place)),
                _ => ("const ", self.name_of(place)),
            };
            if operand != "w" {
                let offset = self.offsets[n];
                let _ = writeln!(
                    text,
                    "  {c}{real} *restrict const {operand} = ({c}{real} *)buf[{n}] + {offset};"
                );
            }
        }
        let b = self.rows;
        text + &format!(
            "  {real} *restrict const z = ({real} *)scratch;\n  \
             for (long block = tid; block < {n_blocks}; block += nt) {{\n    \
             const long r0 = block * {rows}, rows = {b} - r0 < {rows} ? {b} - r0 : {rows};\n"
        )
    }

    /// Where the previous state `k` of a row begins in memory: `row = t·B + r0 + r`, `n` is the step's number in time.
    fn before(&self, k: usize) -> String {
        let h = self.width;
        format!(
            "(n ? state{k} + (row {}) * {h} : first{k} + (r0 + r) * {h})",
            self.to_before()
        )
    }

    /// The distance from a row of a step to the same row of the step before.
    fn to_before(&self) -> String {
        let sign = if self.reverse { "+" } else { "-" };
        format!("{sign} {}", self.rows)
    }

    /// The position in the sequence of the `n`-th step that runs.
    fn place(&self) -> String {
        match self.reverse {
            true => format!("{} - n", self.steps - 1),
            false => "n".into(),
        }
    }

    pub(super) fn forward(&self, name: &str, cell: &Cell) -> Result<String, NotReal> {
        let (steps, b, h, real) = (self.steps, self.rows, self.width, self.real());
        let (wide, stride) = (self.gates() * h, self.stride());
        let (n_kept, has_bias) = (cell.kept().len() as i64, self.has(Place::Input(2)));
        let stores_kept = self.has(Place::Output(cell.n_states()));
        let mut inputs: Vec<String> = Vec::new();
        inputs.extend((0..cell.gates).map(|g| format!("xr[{} + j]", g as i64 * h)));
        for g in 0..cell.gates as i64 {
            let at = g * h;
            inputs.push(match has_bias {
                true => format!("(zr[{at} + j] + bias[{at} + j])"),
                false => format!("zr[{at} + j]"),
            });
        }
        inputs.extend((0..cell.n_states()).map(|k| format!("before{k}[j]")));
        let mut rows = format!(
            "        const {real} *restrict const zr = z + r * {stride}, *restrict const xr = x + row * {wide};\n"
        );
        for k in 0..cell.n_states() {
            let _ = writeln!(
                rows,
                "        const {real} *restrict const before{k} = {};\n        \
                 {real} *restrict const after{k} = state{k} + row * {h};",
                self.before(k)
            );
        }
        if stores_kept {
            let _ = writeln!(
                rows,
                "        {real} *restrict const own = kept + row * {};",
                n_kept * h
            );
        }
        let mut known = BTreeMap::new();
        let mut step = String::new();
        for value in &cell.values {
            let mut statements = Statements {
                dtype: self.dtype,
                inputs: &inputs,
                known: std::mem::take(&mut known),
                text: String::new(),
            };
            let found = statements.value(value)?;
            known = statements.known;
            step += &statements.text;
            inputs.push(found);
        }
        let first = inputs.len() - cell.values.len();
        for (k, n) in cell.states.iter().enumerate() {
            let _ = writeln!(step, "          after{k}[j] = {};", inputs[first + n]);
        }
        for (k, n) in cell.kept().iter().enumerate().filter(|_| stores_kept) {
            let at = k as i64 * h;
            let _ = writeln!(step, "          own[{at} + j] = {};", inputs[first + n]);
        }
        let call = self.call(name, "before");
        let (place, to_before) = (self.place(), self.to_before());
        Ok(format!(
            "    for (long n = 0; n < {steps}; ++n) {{
      const long t = {place};
      const {real} *before = n ? state0 + (t * {b} + r0 {to_before}) * {h} : first0 + r0 * {h};
      {call}
      for (long r = 0; r < rows; ++r) {{
        const long row = t * {b} + r0 + r;
{rows}        #pragma omp simd
        for (long j = 0; j < {h}; ++j) {{
{step}        }}
      }}
    }}
  }}
}}
"
        ))
    }

    pub(super) fn backward(
        &self,
        name: &str,
        cell: &CellGradient,
        given: &[bool],
    ) -> Result<String, NotReal> {
        let (steps, b, h, real) = (self.steps, self.rows, self.width, self.real());
        let (wide, stride, kept) = (self.gates() * h, self.stride(), cell.kept());
        let n_states = cell.states.len();
        let block = self.blocks().1;
        let mut rows = format!(
            "        {real} *restrict const dxr = dx + row * {wide}, *restrict const zr = z + r * {stride};\n"
        );
        let stores_products = self.has(Place::Output(1));
        if stores_products {
            let _ = writeln!(
                rows,
                "        {real} *restrict const dqr = dq + row * {wide};"
            );
        }
        if !kept.is_empty() {
            let _ = writeln!(
                rows,
                "        const {real} *restrict const own = kept + row * {};",
                kept.len() as i64 * h
            );
        }
        let mut states = String::new();
        let mut inputs: Vec<String> = (0..n_states).map(|k| format!("before{k}[j]")).collect();
        for (k, is_given) in given.iter().enumerate() {
            let _ = writeln!(
                rows,
                "        const {real} *restrict const before{k} = {}, *restrict const after{k} = state{k} + row * {h};",
                self.before(k)
            );
            let carry = stride * block + k as i64 * h * block;
            let _ = writeln!(
                rows,
                "        {real} *restrict const carry{k} = z + {carry} + r * {h};"
            );
            let mut sum = format!("carry{k}[j]");
            if k == 0 {
                sum += " + zr[j]";
            }
            if *is_given {
                let _ = write!(sum, " + given{k}[row * {h} + j]");
            }
            let _ = writeln!(states, "          const {real} d{k} = {sum};");
        }
        for n in 0..cell.n_values {
            inputs.push(match cell.states.iter().position(|s| *s == n) {
                Some(k) => format!("after{k}[j]"),
                None => {
                    let k = kept.iter().position(|s| *s == n).unwrap_or_default() as i64;
                    format!("own[{} + j]", k * h)
                }
            });
        }
        inputs.extend((0..n_states).map(|k| format!("d{k}")));
        let mut statements = Statements {
            dtype: self.dtype,
            inputs: &inputs,
            known: BTreeMap::new(),
            text: String::new(),
        };
        let mut values = |list: &[Expr]| {
            let values = list.iter().map(|e| statements.value(e));
            values.collect::<Result<Vec<String>, NotReal>>()
        };
        let (x, q, before) = (values(&cell.x)?, values(&cell.q)?, values(&cell.before)?);
        let mut step = states + &statements.text;
        for (list, into) in [(x, "dxr"), (q, "dqr")] {
            for (g, value) in list.iter().enumerate() {
                if into == "dxr" || stores_products {
                    let at = g as i64 * h;
                    let _ = writeln!(step, "          {into}[{at} + j] = {value};");
                }
            }
        }
        for (k, value) in before.iter().enumerate() {
            let _ = writeln!(step, "          carry{k}[j] = {value};");
        }
        let mut last = String::new();
        for k in 0..n_states {
            let carry = stride * block + k as i64 * h * block;
            let through = match k {
                0 => format!(" + z[r * {stride} + j]"),
                _ => String::new(),
            };
            let _ = writeln!(
                last,
                "        dfirst{k}[(r0 + r) * {h} + j] = z[{carry} + r * {h} + j]{through};"
            );
        }
        let all = block * (stride + n_states as i64 * h);
        let dq = if stores_products { "dq" } else { "dx" };
        let place = self.place();
        let call = self.call(name, &format!("{dq} + (t * {b} + r0) * {wide}"));
        Ok(format!(
            "    for (long n = 0; n < {all}; ++n) z[n] = 0;
    for (long n = {steps} - 1; n >= 0; --n) {{
      const long t = {place};
      for (long r = 0; r < rows; ++r) {{
        const long row = t * {b} + r0 + r;
{rows}        #pragma omp simd
        for (long j = 0; j < {h}; ++j) {{
{step}        }}
      }}
      {call}
    }}
    for (long r = 0; r < rows; ++r)
      for (long j = 0; j < {h}; ++j) {{
{last}      }}
  }}
}}
"
        ))
    }
}
