//! Packing of the vector operand into panels: `[panel][reduction][lane]`, so that the micro-kernel
//! walks it with unit stride. Emits the copy of one panel; who calls it when is the driver's business.

use super::text::{CText, Vector, affine};
use crate::emit::scalar::{c_type, cast};
use graph::DType;

/// A reduction loop of the block that is packed.
#[derive(Clone, Debug)]
pub struct PackLevel {
    pub extent: i64,
    /// The extent is the run-time count `kn`.
    pub runtime: bool,
    /// Step in the source.
    pub b: i64,
    /// Row step in the panel.
    pub row: i64,
    /// Programs that share the text have other extents.
    pub is_open: bool,
}

/// Copy of one panel of `width` lanes, of which `valid` exist; without `valid`, its last argument says how many.
pub struct Panel<'a> {
    pub levels: Vec<PackLevel>,
    pub vector: Vector,
    pub width: i64,
    pub valid: Option<i64>,
    /// Source step between lanes.
    pub lane: i64,
    pub buffer: usize,
    pub prologue: Option<&'a str>,
    /// The operand's 16-bit type, if the prologue only widens it.
    pub widens: Option<DType>,
}

/// Rows of a panel kept in L1 while lanes are filled one by one.
const ROWS_IN_L1: i64 = 128;

/// Lanes this close are gathered instead of filled one by one.
const NEAR_LANES: i64 = 32;

enum Loop {
    Level(usize),
    /// The outer loop over a level, in chunks of the second number; `Rest` is the loop inside.
    Chunk(usize, i64),
    Rest(usize, i64),
    Lane,
}

impl Panel<'_> {
    /// Emits `static void NAME(buf, src, dst, kn)`; `src` is an element offset into the buffer.
    pub fn emit(&self, t: &mut CText, name: &str) {
        let number = self.vector.element.c_type();
        t.line(format!(
            "static __attribute__((noinline)) void {name}(void *const *buf, long src, {number} *restrict dst, long kn{}) {{",
            if self.valid.is_none() { ", long valid" } else { "" }
        ));
        t.line(format!(
            "const {number} *restrict B = buf[{}]; (void)B; (void)kn;",
            self.buffer
        ));
        if self.valid.is_none_or(|valid| valid < self.width) {
            t.line("{");
            for (i, l) in self.levels.iter().enumerate() {
                t.line(format!(
                    "for (long k{i} = 0; k{i} < {}; k{i}++) {{",
                    count(l)
                ));
            }
            let row: Vec<(String, i64)> = self
                .levels
                .iter()
                .enumerate()
                .map(|(i, l)| (format!("k{i}"), l.row * self.width))
                .collect();
            t.line(format!(
                "memset(dst + {}, 0, {});",
                affine(&row, 0),
                self.width * self.vector.element.bytes()
            ));
            t.close(self.levels.len() + 1);
        }
        if let Some((outside, chain)) = self.transposable() {
            self.transpose(t, &outside, &chain);
            t.line("}");
            return;
        }
        let order = self.order();
        for l in &order[..order.len() - 1] {
            self.open(t, l);
        }
        self.innermost(t, order.last().unwrap_or(&Loop::Lane));
        t.close(order.len() + 1);
    }

    /// Loops in the order of the source's strides, with inner reduction levels cut to stay in L1.
    fn order(&self) -> Vec<Loop> {
        let mut idx: Vec<usize> = (0..self.levels.len()).collect();
        idx.sort_by_key(|&i| std::cmp::Reverse(self.levels[i].b.abs()));
        let (outside, inside): (Vec<usize>, Vec<usize>) = idx
            .into_iter()
            .partition(|&i| self.levels[i].b.abs() >= self.lane.abs());
        let mut order: Vec<Loop> = outside.into_iter().map(Loop::Level).collect();
        let (mut before, mut after) = (Vec::new(), Vec::new());
        let mut rows = 1;
        for &i in inside.iter().rev() {
            let l = &self.levels[i];
            let chunk = (ROWS_IN_L1 / rows).max(1);
            if rows >= ROWS_IN_L1 {
                before.push(Loop::Level(i));
            } else if l.extent > chunk || l.is_open {
                before.push(Loop::Chunk(i, chunk));
                after.push(Loop::Rest(i, chunk));
                // The loops outside of an extent that may be any do not depend on it.
                rows = if l.is_open { ROWS_IN_L1 } else { rows };
            } else {
                after.push(Loop::Level(i));
            }
            rows *= l.extent;
        }
        order.extend(before.into_iter().rev());
        if self.lane.abs() <= NEAR_LANES {
            // Lanes interleaved with a few taps: gathers of a line or two, whole rows stored.
            order.extend(after.into_iter().rev());
            order.push(Loop::Lane);
        } else {
            order.push(Loop::Lane);
            order.extend(after.into_iter().rev());
        }
        order
    }

    /// If the levels inside a lane form one contiguous run: the levels outside, and the run's levels,
    /// innermost first. The run is then transposed in registers, `vw` lanes by `vw` steps at a time.
    fn transposable(&self) -> Option<(Vec<usize>, Vec<usize>)> {
        let mut idx: Vec<usize> = (0..self.levels.len()).collect();
        idx.sort_by_key(|&i| self.levels[i].b.abs());
        let chain: Vec<usize> = idx
            .iter()
            .copied()
            .filter(|&i| self.levels[i].b.abs() < self.lane)
            .collect();
        let mut run = 1;
        for (n, &i) in chain.iter().enumerate() {
            let l = &self.levels[i];
            if l.b != run || (l.runtime && n + 1 < chain.len()) {
                return None;
            }
            run *= l.extent;
        }
        let is_open = chain.iter().any(|&i| self.levels[i].is_open);
        let has_steps = !chain.is_empty() && (is_open || run >= self.vector.lanes);
        let fits = has_steps && self.valid.is_none_or(|valid| valid >= self.vector.lanes);
        let outside = idx
            .into_iter()
            .rev()
            .filter(|i| !chain.contains(i))
            .collect();
        let plain = self.prologue.is_none() || self.widens.is_some();
        (fits && plain && self.lane > NEAR_LANES).then_some((outside, chain))
    }

    fn transpose(&self, t: &mut CText, outside: &[usize], chain: &[usize]) {
        let vw = self.vector.lanes;
        let number = self.vector.element.c_type();
        for &i in outside {
            self.open(t, &Loop::Level(i));
        }
        let at = |of: fn(&PackLevel) -> i64| {
            let terms: Vec<(String, i64)> = outside
                .iter()
                .map(|&i| (format!("k{i}"), of(&self.levels[i])))
                .collect();
            affine(&terms, 0)
        };
        let element = self.widens.map_or(number, c_type);
        t.line(format!(
            "const {element} *s = (const {element} *)buf[{}] + src + {};",
            self.buffer,
            at(|l| l.b)
        ));
        t.line(format!(
            "{number} *d = dst + ({})*{}L;",
            at(|l| l.row),
            self.width
        ));
        let run: Vec<String> = chain.iter().map(|&i| count(&self.levels[i])).collect();
        t.line(format!(
            "const long run = {}, whole = run - run%{vw}L;",
            run.join("*")
        ));
        let (lanes, all) = match self.valid {
            Some(valid) => (format!("{}L", valid / vw * vw), format!("{valid}L")),
            None => (format!("valid/{vw}L*{vw}L"), "valid".to_string()),
        };
        t.line(format!("for (long j = 0; j < {lanes}; j += {vw}L) {{"));
        t.line(format!("for (long f = 0; f < whole; f += {vw}L) {{"));
        transpose_block(t, self.vector, self.lane, self.widens);
        for e in 0..vw {
            let row = self.row_of(chain, &format!("(f + {e}L)"));
            t.line(format!(
                "*({} *)(d + ({row})*{}L + j) = v{e};",
                self.vector.c_type(),
                self.width
            ));
        }
        t.close(2);
        for (from, first_lane, last_lane) in [("whole", "0L", lanes.as_str()), ("0", &lanes, &all)]
        {
            t.line(format!("for (long f = {from}; f < run; f++) {{"));
            t.line(format!(
                "for (long j = {first_lane}; j < {last_lane}; j++) {{"
            ));
            let row = self.row_of(chain, "f");
            let value = format!("s[j*{}L + f]", self.lane);
            let value = match self.widens {
                Some(dtype) => cast(&value, dtype, DType::F32),
                None => value,
            };
            t.line(format!("d[({row})*{}L + j] = {value};", self.width));
            t.close(2);
        }
        t.close(outside.len());
    }

    /// The panel's row of step `f` of the run.
    fn row_of(&self, chain: &[usize], f: &str) -> String {
        let mut before = 1;
        let mut terms = Vec::new();
        for (n, &i) in chain.iter().enumerate() {
            let l = &self.levels[i];
            let digit = match (before, n + 1 == chain.len()) {
                (1, true) => f.to_string(),
                (_, true) => format!("{f}/{before}L"),
                (_, false) => format!("{f}/{before}L%{}L", l.extent),
            };
            terms.push((digit, l.row));
            before *= l.extent;
        }
        affine(&terms, 0)
    }

    /// How many lanes exist, as a C expression.
    fn lanes(&self) -> String {
        self.valid
            .map_or("valid".to_string(), |valid| format!("{valid}L"))
    }

    fn open(&self, t: &mut CText, l: &Loop) {
        let (head, _) = self.head(l);
        t.line(format!("{head} {{"));
    }

    /// The loop's head, and its variable.
    fn head(&self, l: &Loop) -> (String, String) {
        match *l {
            Loop::Level(i) => (
                format!(
                    "for (long k{i} = 0; k{i} < {}; k{i}++)",
                    count(&self.levels[i])
                ),
                format!("k{i}"),
            ),
            Loop::Chunk(i, c) => (
                format!(
                    "for (long kc{i} = 0; kc{i} < {}; kc{i} += {c}L)",
                    count(&self.levels[i])
                ),
                format!("kc{i}"),
            ),
            Loop::Rest(i, c) => {
                let end = format!("shl_min({}, kc{i} + {c}L)", count(&self.levels[i]));
                (
                    format!("for (long k{i} = kc{i}, e{i} = {end}; k{i} < e{i}; k{i}++)"),
                    format!("k{i}"),
                )
            }
            Loop::Lane => (
                format!("for (long j = 0; j < {}; j++)", self.lanes()),
                "j".to_string(),
            ),
        }
    }

    fn innermost(&self, t: &mut CText, l: &Loop) {
        let mut src: Vec<(String, i64)> = self
            .levels
            .iter()
            .enumerate()
            .map(|(i, l)| (format!("k{i}"), l.b))
            .collect();
        let mut dst: Vec<(String, i64)> = self
            .levels
            .iter()
            .enumerate()
            .map(|(i, l)| (format!("k{i}"), l.row * self.width))
            .collect();
        src.push(("j".to_string(), self.lane));
        dst.push(("j".to_string(), 1));
        match self.prologue {
            None => {
                t.line(format!("{} {{", self.head(l).0));
                t.line(format!(
                    "dst[{}] = B[src + {}];",
                    affine(&dst, 0),
                    affine(&src, 0)
                ));
            }
            Some(f) => self.through_prologue(t, l, f, &src, &dst),
        }
    }

    /// One call of the prologue per innermost loop, through a small buffer if lanes are apart.
    fn through_prologue(
        &self,
        t: &mut CText,
        l: &Loop,
        f: &str,
        src: &[(String, i64)],
        dst: &[(String, i64)],
    ) {
        let (_, var) = self.head(l);
        let step = |v: &[(String, i64)]| v.iter().find(|x| x.0 == var).map_or(0, |x| x.1);
        let rest = |v: &[(String, i64)]| -> Vec<(String, i64)> {
            v.iter().filter(|x| x.0 != var).cloned().collect()
        };
        let (start, len) = match *l {
            Loop::Lane => ("0".to_string(), self.lanes()),
            Loop::Rest(i, c) => (
                format!("kc{i}"),
                format!("shl_min({} - kc{i}, {c}L)", count(&self.levels[i])),
            ),
            Loop::Level(i) | Loop::Chunk(i, _) => ("0".to_string(), count(&self.levels[i])),
        };
        t.line("{");
        t.line(format!("const long at = {start}, n = {len};"));
        let from = format!("src + {} + at*{}L", affine(&rest(src), 0), step(src));
        let to = format!("dst + {} + at*{}L", affine(&rest(dst), 0), step(dst));
        if step(dst) == 1 {
            t.line(format!("{f}(buf, {to}, {from}, {}L, n);", step(src)));
        } else {
            let number = self.vector.element.c_type();
            t.line(format!("{number} run[{ROWS_IN_L1}];"));
            t.line(format!("for (long r = 0; r < n; r += {ROWS_IN_L1}) {{"));
            t.line(format!("const long m = shl_min(n - r, {ROWS_IN_L1});"));
            t.line(format!(
                "{f}(buf, run, {from} + r*{}L, {}L, m);",
                step(src),
                step(src)
            ));
            t.line(format!("{number} *d = {to} + r*{}L;", step(dst)));
            t.line(format!(
                "for (long x = 0; x < m; x++) d[x*{}L] = run[x];",
                step(dst)
            ));
            t.line("}");
        }
    }
}

/// Loads `vw` rows of `vw` numbers from `s + j*lane + f`, and transposes them into `v0, v1, ..`:
/// in step `b`, vectors that differ in bit `b` of their number exchange elements that differ in it.
fn transpose_block(t: &mut CText, vector: Vector, lane: i64, widens: Option<DType>) {
    let (vw, name) = (vector.lanes, vector.c_type());
    for i in 0..vw {
        let place = format!("(s + (j + {i}L)*{lane}L + f)");
        t.line(match widens {
            Some(dtype) => format!("{name} v{i} = shl_{}x{vw}{place};", dtype.name()),
            None => format!("{name} v{i} = *(const {name} *){place};"),
        });
    }
    let mut bit = 1;
    while bit < vw {
        for i in (0..vw).filter(|i| i & bit == 0) {
            let mask = |low: bool| {
                let pick = |e: i64| match (low, e & bit == 0) {
                    (true, true) => e,
                    (true, false) => vw + e - bit,
                    (false, true) => e + bit,
                    (false, false) => vw + e,
                };
                (0..vw)
                    .map(|e| pick(e).to_string())
                    .collect::<Vec<_>>()
                    .join(", ")
            };
            let (x, y) = (format!("v{i}"), format!("v{}", i + bit));
            t.line(format!(
                "{{ const {name} x = {x}, y = {y}; {x} = __builtin_shufflevector(x, y, {}); \
                 {y} = __builtin_shufflevector(x, y, {}); }}",
                mask(true),
                mask(false)
            ));
        }
        bit *= 2;
    }
}

fn count(l: &PackLevel) -> String {
    if l.runtime {
        "kn".to_string()
    } else {
        format!("{}L", l.extent)
    }
}
