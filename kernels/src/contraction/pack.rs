//! Packing of the vector operand into panels: `[panel][reduction][lane]`, so that the micro-kernel
//! walks it with unit stride. Emits the copy of one panel; who calls it when is the driver's business.

use super::text::{CText, affine};

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
}

/// Copy of one panel of `width` lanes, of which `valid` exist.
pub struct Panel<'a> {
    pub levels: Vec<PackLevel>,
    pub width: i64,
    pub valid: i64,
    /// Source step between lanes.
    pub lane: i64,
    pub buffer: usize,
    pub prologue: Option<&'a str>,
}

/// Rows of a panel kept in L1 while lanes are filled one by one.
const ROWS_IN_L1: i64 = 128;

enum Loop {
    Level(usize),
    /// A level in chunks of so many, outside; then the rest inside.
    Chunk(usize, i64),
    Rest(usize, i64),
    Lane,
}

impl Panel<'_> {
    /// Emits `static void NAME(buf, src, dst, kn)`; `src` is an element offset into the buffer.
    pub fn emit(&self, t: &mut CText, name: &str) {
        t.line(format!(
            "static __attribute__((noinline)) void {name}(void *const *buf, long src, float *restrict dst, long kn) {{"
        ));
        t.line(format!(
            "const float *restrict B = buf[{}]; (void)B; (void)kn;",
            self.buffer
        ));
        if self.valid < self.width {
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
                self.width * 4
            ));
            t.close(self.levels.len() + 1);
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
            } else if l.extent > chunk {
                before.push(Loop::Chunk(i, chunk));
                after.push(Loop::Rest(i, chunk));
            } else {
                after.push(Loop::Level(i));
            }
            rows *= l.extent;
        }
        order.extend(before.into_iter().rev());
        order.push(Loop::Lane);
        order.extend(after.into_iter().rev());
        order
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
                format!("for (long j = 0; j < {}L; j++)", self.valid),
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
            Loop::Lane => ("0".to_string(), format!("{}L", self.valid)),
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
            t.line(format!("float run[{ROWS_IN_L1}];"));
            t.line(format!("for (long r = 0; r < n; r += {ROWS_IN_L1}) {{"));
            t.line(format!("const long m = shl_min(n - r, {ROWS_IN_L1});"));
            t.line(format!(
                "{f}(buf, run, {from} + r*{}L, {}L, m);",
                step(src),
                step(src)
            ));
            t.line(format!("float *d = {to} + r*{}L;", step(dst)));
            t.line(format!(
                "for (long x = 0; x < m; x++) d[x*{}L] = run[x];",
                step(dst)
            ));
            t.line("}");
        }
    }
}

fn count(l: &PackLevel) -> String {
    if l.runtime {
        "kn".to_string()
    } else {
        format!("{}L", l.extent)
    }
}
