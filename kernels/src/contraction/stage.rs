//! Staging of the broadcast operand: copies the part that a block needs into thread scratch, with
//! zero borders and a row stride that does not alias; a prologue is applied on the way.

use super::access::Coord;
use super::text::{CText, Element, affine};

/// The staged copy of a block of an operand.
#[derive(Clone, Debug)]
pub struct Staging {
    /// Coordinates, outermost first.
    pub coords: Vec<StagedCoord>,
    /// Numbers of the copy.
    pub numbers: i64,
    element: Element,
}

/// A coordinate and its place in the copy.
#[derive(Clone, Debug)]
pub struct StagedCoord {
    pub coord: Coord,
    /// Largest number of positions that a block spans.
    pub extent: i64,
    /// Whether every block spans exactly `extent` positions.
    pub full: bool,
    pub stride: i64,
}

impl Staging {
    /// Lays out coordinates in the source's order; `extent` tells the `extent` of each, and whether it is `full`.
    pub fn new(coords: &[Coord], element: Element, extent: impl Fn(&Coord) -> (i64, bool)) -> Self {
        let mut order: Vec<&Coord> = coords.iter().collect();
        order.sort_by_key(|c| std::cmp::Reverse(c.stride));
        let mut staged: Vec<StagedCoord> = Vec::new();
        let mut stride = 1;
        for (i, coord) in order.iter().rev().enumerate() {
            let (extent, full) = extent(coord);
            staged.push(StagedCoord {
                coord: (*coord).clone(),
                extent,
                full,
                stride,
            });
            stride *= extent;
            // Rows a multiple of 2 KiB apart fall into a few cache sets.
            if i == 0 && stride * element.bytes() % 2048 == 0 {
                stride += element.per_line();
            }
        }
        staged.reverse();
        Staging {
            coords: staged,
            numbers: stride,
            element,
        }
    }

    /// Step of the copy's address per step of `dim`.
    pub fn stride(&self, dim: usize) -> i64 {
        self.coords
            .iter()
            .map(|c| c.coord.coeff(dim) * c.stride)
            .sum()
    }

    /// How many of the innermost coordinates form one contiguous run in source and copy.
    fn run(&self) -> usize {
        let mut n = 1;
        while n < self.coords.len() {
            let (outer, inner) = (
                &self.coords[self.coords.len() - n - 1],
                &self.coords[self.coords.len() - n],
            );
            let joined = inner.full
                && !inner.coord.guarded
                && outer.coord.stride == inner.coord.stride * inner.extent
                && outer.stride == inner.stride * inner.extent
                && self.coords.last().is_some_and(|c| c.coord.stride == 1);
            if !joined {
                break;
            }
            n += 1;
        }
        n
    }

    /// Emits `static void NAME(buf, src, dst, lo0, n0, lo1, n1, ..)`; `src` is an element offset into
    /// `buf[buffer]`, `lo` and `n` the first position and the number of positions of each coordinate. If the
    /// prologue's numbers are kept, there is an argument `keep` behind `dst`, and a second function that keeps them.
    pub fn emit(
        &self,
        t: &mut CText,
        name: &str,
        buffer: usize,
        prologue: Option<(&str, Option<&str>)>,
    ) {
        let number = self.element.c_type();
        let args: String = (0..self.coords.len())
            .map(|i| format!(", long lo{i}, long n{i}"))
            .collect();
        let keep = match prologue {
            Some((_, Some(_))) => ", int keep",
            _ => "",
        };
        t.line(format!(
            "static __attribute__((noinline)) void {name}(void *const *buf, long src, {number} *dst{keep}{args}) {{"
        ));
        t.line(format!("const {number} *A = buf[{buffer}]; (void)A;"));
        if self.coords.is_empty() {
            // One number serves the whole block.
            t.line(format!(
                "const long s = src, p = 0, q = 1; {number} *d = dst;"
            ));
            copy(t, 1, 1, prologue);
            t.close(1);
            return;
        }
        let n_loops = self.coords.len() - self.run();
        for i in 0..n_loops {
            self.outer_loop(t, i);
        }
        self.copy_run(t, n_loops, prologue);
        t.close(n_loops + 1);
    }

    fn position(&self, i: usize, upto: usize, of: fn(&StagedCoord) -> i64) -> Vec<(String, i64)> {
        (i..upto)
            .map(|j| (format!("x{j}"), of(&self.coords[j])))
            .collect()
    }

    fn outer_loop(&self, t: &mut CText, i: usize) {
        let c = &self.coords[i];
        t.line(format!("for (long x{i} = 0; x{i} < n{i}; x{i}++) {{"));
        if c.coord.guarded {
            let at = affine(&self.position(0, i + 1, |c| c.stride), 0);
            t.line(format!(
                "if (lo{i} + x{i} < 0 || lo{i} + x{i} >= {}L) {{",
                c.coord.size
            ));
            t.line(format!(
                "memset(dst + {at}, 0, {}L); continue;",
                c.stride * self.element.bytes()
            ));
            t.line("}");
        }
    }

    /// The innermost run: its outermost coordinate is clipped to the container.
    fn copy_run(&self, t: &mut CText, i: usize, prologue: Option<(&str, Option<&str>)>) {
        let c = &self.coords[i];
        let unit: i64 = self.coords[i + 1..].iter().map(|c| c.extent).product();
        let step = if i + 1 == self.coords.len() {
            c.coord.stride
        } else {
            1
        };
        let mut from: Vec<(String, i64)> = (0..self.coords.len())
            .map(|j| (format!("lo{j}"), self.coords[j].coord.stride))
            .collect();
        from.extend(self.position(0, i, |c| c.coord.stride));
        t.line(format!("long s = src + {};", affine(&from, 0)));
        t.line(format!(
            "{} *d = dst + {};",
            self.element.c_type(),
            affine(&self.position(0, i, |c| c.stride), 0)
        ));
        if c.coord.guarded {
            t.line(format!("long p = shl_min(n{i}, shl_max(0, -lo{i})), q = shl_max(p, shl_min(n{i}, {}L - lo{i}));", c.coord.size));
            t.line(format!("for (long x = 0; x < p*{unit}L; x++) d[x] = 0.0f;"));
            t.line(format!(
                "for (long x = q*{unit}L; x < n{i}*{unit}L; x++) d[x] = 0.0f;"
            ));
        } else {
            t.line(format!("const long p = 0, q = n{i};"));
        }
        copy(t, unit, step, prologue);
    }
}

/// Copies positions `p..q` of `unit` numbers each from `A` at `s` to `d`.
fn copy(t: &mut CText, unit: i64, step: i64, prologue: Option<(&str, Option<&str>)>) {
    match prologue {
        Some((f, keep)) => {
            let args = format!(
                "(buf, d + p*{unit}L, s + p*{}L, {step}L, (q - p)*{unit}L);",
                unit * step
            );
            t.line(match keep {
                Some(keep) => format!("if (q > p) {{ if (keep) {keep}{args} else {f}{args} }}"),
                None => format!("if (q > p) {f}{args}"),
            });
        }
        None if step == 1 => t.line(format!(
            "for (long x = p*{unit}L; x < q*{unit}L; x++) d[x] = A[s + x];"
        )),
        None => t.line(format!(
            "for (long x = p; x < q; x++) d[x] = A[s + x*{step}L];"
        )),
    }
}
