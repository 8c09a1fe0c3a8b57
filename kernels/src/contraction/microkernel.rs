//! The micro-kernel: a register tile of the output under a nest of reduction loops
//! (batch-reduce GEMM, arXiv 1906.06440, section 2). Emits one C function; knows no blocking.

use super::text::{CText, Vector, affine, hash};

/// One reduction loop, with its step in each operand.
#[derive(Clone, Debug)]
pub struct Level {
    pub extent: i64,
    /// Multiplies the run-time count `kn`; at most one level, the outermost, has this.
    pub runtime: bool,
    pub a: i64,
    pub b: i64,
}

/// A register tile of `rows.len()` x `nv` vectors.
pub struct MicroKernel {
    pub vector: Vector,
    /// Offset of each row in the broadcast operand and in the output, in elements.
    pub rows: Vec<(i64, i64)>,
    pub nv: i64,
    /// Lanes of the last vector that are stored.
    pub last_lanes: i64,
    pub nest: Vec<Level>,
    /// Whether a short innermost loop is unrolled.
    pub unrolls: bool,
    /// Numbers of the next panel fetched into L2 per reduction step, counted from the argument `next`.
    pub ahead: i64,
    /// Distances in front of the broadcast and the vector operand that are fetched into L2 at every
    /// reduction step: what later tiles read of rows that lie far apart.
    pub ahead_a: Vec<i64>,
    pub ahead_b: Vec<i64>,
    /// What a tile may lack of this at run time, if anything.
    pub ragged: Option<Ragged>,
}

/// What a tile may lack. The function takes two more arguments: `long rows`, the positions that there are, and
/// `long lanes`, the lanes of the last vector that are stored.
#[derive(Clone, Copy, Debug)]
pub struct Ragged {
    /// The first position that may be missing, the rows of each position, and the step of a position in the
    /// broadcast operand.
    pub rows: Option<(i64, i64, i64)>,
    /// Whether lanes may be missing.
    pub lanes: bool,
}

/// Innermost reduction loops up to this length are unrolled.
const SHORT_LOOP: i64 = 8;
/// Steps of the reduction between the fetch of a number into the first-level cache and its use.
const STEPS_AHEAD: i64 = 8;
/// Shortest innermost loop in which the rows of the broadcast operand are fetched in turn.
const LONG_LOOP: i64 = 32;

/// Joins neighbouring loops that walk both operands in one stride.
pub fn merge_levels(levels: &[Level]) -> Vec<Level> {
    let mut out: Vec<Level> = Vec::new();
    for l in levels.iter().filter(|l| l.extent > 1 || l.runtime) {
        match out.last_mut() {
            Some(p) if !l.runtime && p.a == l.a * l.extent && p.b == l.b * l.extent => {
                *p = Level {
                    extent: p.extent * l.extent,
                    runtime: p.runtime,
                    a: l.a,
                    b: l.b,
                };
            }
            _ => out.push(l.clone()),
        }
    }
    out
}

impl MicroKernel {
    /// The function's name and its guarded text. Signature:
    /// `(const T *a, const T *b, T *c, const T *next, long kn, long acc)` for numbers of type `T`; `acc` adds
    /// to `c`, `next` is the part of the next panel that this call fetches.
    pub fn emit(&self) -> (String, String) {
        let body = self.body();
        let name = format!("shl_mk{:016x}", hash(&body));
        let guard = name.to_uppercase();
        let head = "static __attribute__((noinline)) void";
        let number = self.vector.element.c_type();
        let args = format!(
            "(const {number} *restrict a, const {number} *restrict b, {number} *restrict c, \
             const {number} *next, long kn, long acc{})",
            if self.ragged.is_some() {
                ", long rows, long lanes"
            } else {
                ""
            }
        );
        (
            name.clone(),
            format!("#ifndef {guard}\n#define {guard}\n{head} {name}{args} {{\n{body}}}\n#endif\n"),
        )
    }

    fn body(&self) -> String {
        let mut t = CText::default();
        let vf = self.vector.c_type();
        let line = self.vector.element.per_line();
        let tile = || (0..self.rows.len()).flat_map(|i| (0..self.nv).map(move |j| (i, j)));
        t.line("(void)kn; (void)next;");
        if self.ragged.is_some() {
            t.line("(void)rows; (void)lanes;");
        }
        for i in 0..self.rows.len() {
            let regs: Vec<String> = (0..self.nv).map(|j| format!("c{i}_{j} = {{0}}")).collect();
            t.line(format!("{vf} {};", regs.join(", ")));
        }
        // The output is fetched while the reduction runs, instead of stalling the stores after it.
        for (_, at) in &self.rows {
            for n in 0..(self.nv * self.vector.lanes + line - 1) / line {
                t.line(format!("__builtin_prefetch(c + {}, 1);", at + n * line));
            }
        }
        self.missing_rows(&mut t);
        self.reduction(&mut t, &vf);
        for (head, acc) in [("if (acc) {", true), ("} else {", false)] {
            t.line(head);
            for (i, j) in tile() {
                if let Some(position) = self.may_lack(i).filter(|_| j == 0) {
                    t.line(format!("if (rows > {position}) {{"));
                }
                self.store(&mut t, &vf, i, j, acc);
                if self.may_lack(i).is_some() && j + 1 == self.nv {
                    t.line("}");
                }
            }
        }
        t.line("}");
        t.finish()
    }

    /// The position of a row, if a tile may lack it.
    fn may_lack(&self, row: usize) -> Option<i64> {
        let (first, columns, _) = self.ragged?.rows?;
        Some(row as i64 / columns).filter(|position| *position >= first)
    }

    /// Declares where each row that may be missing is read: a missing row reads the last one there is.
    fn missing_rows(&self, t: &mut CText) {
        let Some((_, _, step)) = self.ragged.and_then(|ragged| ragged.rows) else {
            return;
        };
        for (i, (at, _)) in self.rows.iter().enumerate() {
            if let Some(position) = self.may_lack(i) {
                let inside = at - position * step;
                t.line(format!(
                    "const long a{i} = shl_min({position}L, rows - 1L)*{step}L + {inside}L;"
                ));
            }
        }
    }

    fn reduction(&self, t: &mut CText, vf: &str) {
        for (l, level) in self.nest.iter().enumerate() {
            let count = match (level.runtime, level.extent) {
                (true, 1) => "kn".to_string(),
                (true, e) => format!("kn*{e}L"),
                (false, e) => format!("{e}L"),
            };
            let is_short = !level.runtime && level.extent <= SHORT_LOOP;
            if l + 1 == self.nest.len() && is_short && self.unrolls {
                t.line(format!("#pragma GCC unroll {SHORT_LOOP}"));
            }
            t.line(format!("for (long k{l} = 0; k{l} < {count}; k{l}++) {{"));
        }
        let at = |pick: fn(&Level) -> i64| {
            let terms: Vec<(String, i64)> = self
                .nest
                .iter()
                .enumerate()
                .map(|(l, v)| (format!("k{l}"), pick(v)))
                .collect();
            affine(&terms, 0)
        };
        let number = self.vector.element.c_type();
        t.line(format!("const {number} *ap = a + {};", at(|l| l.a)));
        t.line(format!("const {number} *bp = b + {};", at(|l| l.b)));
        for (operand, distances) in [("ap", &self.ahead_a), ("bp", &self.ahead_b)] {
            for d in distances {
                t.line(format!("__builtin_prefetch({operand} + {d}, 0, 2);"));
            }
        }
        self.fetch_soon(t);
        if self.ahead > 0 {
            t.line(format!(
                "__builtin_prefetch(next, 0, 2); next += {};",
                self.ahead
            ));
        }
        for j in 0..self.nv {
            t.line(format!(
                "const {vf} b{j} = *(const {vf} *)(bp + {});",
                j * self.vector.lanes
            ));
        }
        for (i, (off, _)) in self.rows.iter().enumerate() {
            let fma: Vec<String> = (0..self.nv)
                .map(|j| format!("c{i}_{j} = {vf}_fma(b{j}, s, c{i}_{j});"))
                .collect();
            let at = match self.may_lack(i) {
                Some(_) => format!("a{i}"),
                None => off.to_string(),
            };
            t.line(format!(
                "{{ const {vf} s = {vf}_all(ap[{at}]); {} }}",
                fma.join(" ")
            ));
        }
        t.close(self.nest.len());
    }

    /// Fetches into the first-level cache what the next steps read: without it, steps wait for the second-level cache,
    /// most of all where columns are read that lie pages apart. `bench/kernels/contractions.py` times products.
    fn fetch_soon(&self, t: &mut CText) {
        let Some((at, level)) = self.nest.iter().enumerate().next_back() else {
            return;
        };
        let line = self.vector.element.per_line();
        let lanes = self.nv * self.vector.lanes;
        for n in 0..(lanes + line - 1) / line {
            let distance = STEPS_AHEAD * level.b + n * line;
            t.line(format!("__builtin_prefetch(bp + {distance});"));
        }
        let n_rows = self.rows.len() as i64;
        let row = self.rows.get(1).map_or(0, |second| second.0);
        let is_even = (self.rows.iter().zip(0..)).all(|((a, _), n)| *a == n * row);
        if !is_even || n_rows == 1 {
            return;
        }
        if row == 1 && level.a != 1 {
            let distance = STEPS_AHEAD * level.a;
            t.line(format!("__builtin_prefetch(ap + {distance});"));
            t.line(format!(
                "__builtin_prefetch(ap + {});",
                distance + n_rows - 1
            ));
        }
        // The text for a reduction of any length does not depend on the length.
        let is_open = !self.unrolls;
        let is_long = is_open || level.runtime || level.extent >= LONG_LOOP;
        if (is_open || row > line) && level.a == 1 && is_long {
            // Each step fetches the line after the next of one row.
            for first in (0..n_rows).step_by(line as usize) {
                t.line(format!(
                    "__builtin_prefetch(ap + (k{at} % {line}L)*{}L + {});",
                    row - 1,
                    first * row + 2 * line
                ));
            }
        }
    }

    fn store(&self, t: &mut CText, vf: &str, i: usize, j: i64, acc: bool) {
        let whole = self.vector.lanes;
        let at = self.rows[i].1 + j * whole;
        let lanes = if j + 1 == self.nv {
            self.last_lanes
        } else {
            whole
        };
        let bytes = lanes * self.vector.element.bytes();
        if j + 1 == self.nv && self.ragged.is_some_and(|ragged| ragged.lanes) {
            let value = match acc {
                true => format!("shl_load_{vf}(c + {at}, lanes) + c{i}_{j}"),
                false => format!("c{i}_{j}"),
            };
            t.line(format!("shl_store_{vf}(c + {at}, {value}, lanes);"));
        } else if lanes == whole {
            let op = if acc { "+=" } else { "=" };
            t.line(format!("*({vf} *)(c + {at}) {op} c{i}_{j};"));
        } else if acc {
            let from = format!("{{ {vf} v = {{0}}; memcpy(&v, c + {at}, {bytes}); v += c{i}_{j};");
            t.line(format!("{from} memcpy(c + {at}, &v, {bytes}); }}"));
        } else {
            t.line(format!(
                "{{ {vf} v = c{i}_{j}; memcpy(c + {at}, &v, {bytes}); }}"
            ));
        }
    }
}
