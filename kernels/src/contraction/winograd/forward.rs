//! The convolution itself, and its image's gradient: filters transformed once, then blocks of rows of tiles.

use super::{
    Convolution, FILTER_CYCLES, IMAGE_CYCLES, OPERATIONS, POINTS, RATE, RESULT_CYCLES,
    is_within_reach, round_up, transforms,
};
use crate::contraction::blocking::div_up;
use crate::contraction::microkernel::{Level, MicroKernel};
use crate::contraction::text::{CText, preamble};
use crate::contraction::{ContractionTarget, EmittedContraction, Hooks};

/// How the work is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResultsCut {
    /// Runs of rows of tiles, each transformed and multiplied as one.
    units: i64,
    /// Tiles and vectors of a micro-kernel.
    rows: i64,
    nv: i64,
}

struct Forward<'a> {
    c: &'a Convolution,
    prefix: String,
    prologue: Option<&'a str>,
    cut: ResultsCut,
}

/// Writes the convolution.
pub(super) fn write(
    name: &str,
    c: &Convolution,
    hooks: &Hooks,
    cut: ResultsCut,
) -> EmittedContraction {
    let [prologue, _] = c.prologues(hooks);
    let f = Forward {
        c,
        prefix: format!("{name}_p0"),
        prologue,
        cut,
    };
    let mut t = CText::default();
    t.raw(&preamble(c.vector));
    f.pack(&mut t);
    c.rows_function(&mut t, &f.prefix, prologue);
    let place = |at: &str| at.to_string();
    let input = format!("{}_image", f.prefix);
    transforms::image(
        &mut t,
        &input,
        c.vector,
        c.channels(),
        f.image_point(),
        &place,
    );
    f.results_function(&mut t);
    f.main(&mut t, hooks);
    let scratch = (f.filter_numbers(), f.scratch()[4]);
    let stages = [("_pack", "pack"), ("", "main")];
    EmittedContraction {
        sum_slots: if hooks.sums.is_some() { cut.units } else { 0 },
        ..c.emitted(t, name, stages, scratch)
    }
}

/// How much longer a convolution may take so that its text serves other numbers of images too.
const MOST_FOR_SHARED: f64 = 1.1;
/// The number of images that decides the text of others.
const USUAL_IMAGES: i64 = 8;

/// The fastest cut by prediction, and its predicted nanoseconds; or one that is nearly as fast and whose micro-kernel is
/// that of the usual number of images.
pub(super) fn best(c: &Convolution, target: &ContractionTarget) -> Option<(ResultsCut, f64)> {
    let fastest = fastest(c, target, None)?;
    let shared = self::fastest(&c.with_images(USUAL_IMAGES), target, None)
        .and_then(|(cut, _)| self::fastest(c, target, Some(cut.rows)))
        .filter(|(_, ns)| *ns <= MOST_FOR_SHARED * fastest.1);
    shared.or(Some(fastest))
}

/// The cut that is predicted to be fastest; only those with micro-kernels of the given number of rows, if there is one.
fn fastest(
    c: &Convolution,
    target: &ContractionTarget,
    wanted: Option<i64>,
) -> Option<(ResultsCut, f64)> {
    let lanes = c.vector.lanes;
    let is_wide = target.vector_width == 16;
    // The vectors in a panel that leave the fewest unused, two where that is equal.
    let choices: &[i64] = if is_wide { &[2, 3, 1] } else { &[2, 3] };
    let width = |nv: &&i64| round_up(c.features(), **nv * lanes);
    let nv = *choices.iter().min_by_key(width)?;
    let registers = if is_wide { 28 } else { 12 };
    let strips = c.strips();
    let all = registers / nv / 2..=registers / nv;
    let mut best: Option<(ResultsCut, f64)> = None;
    for most in 1..=strips.min(64) {
        let units = div_up(strips, most);
        for rows in all.clone().filter(|rows| wanted.is_none_or(|w| w == *rows)) {
            let cut = ResultsCut { units, rows, nv };
            let bytes = scratch_bytes(c, cut);
            if !is_within_reach(bytes, most == 1, &target.machine) {
                continue;
            }
            let ns = predicted_ns(c, cut, target);
            if best.is_none_or(|b| ns < b.1) {
                best = Some((cut, ns));
            }
        }
    }
    best
}

fn scratch_bytes(c: &Convolution, cut: ResultsCut) -> f64 {
    let tiles = round_up(c.unit_tiles(cut.units), cut.rows);
    let numbers = POINTS * tiles * (c.summed() + cut.nv * c.vector.lanes);
    (numbers * c.vector.element.bytes()) as f64
}

fn predicted_ns(c: &Convolution, cut: ResultsCut, target: &ContractionTarget) -> f64 {
    let machine = &target.machine;
    let cycles_per_us = machine.product_operations_per_us.max(1) as f64 / OPERATIONS;
    let per_byte = |level: graph::Level| cycles_per_us / level.bytes_per_us.max(1) as f64;
    let (l3, memory) = (per_byte(machine.l3), per_byte(machine.memory));
    let each = c.vector.element.bytes() as f64;
    let threads = target.threads.max(1) as f64;
    let tiles = c.unit_tiles(cut.units);
    let padded = round_up(tiles, cut.rows) as f64;
    let width = round_up(c.features(), cut.nv * c.vector.lanes) as f64;
    let (tiles, channels, points) = (tiles as f64, c.summed() as f64, POINTS as f64);
    let wide = each / 64.0;

    let room = machine.l2.bytes as f64 * 0.7;
    let filter_bytes = points * channels * width * each;
    let image_bytes = points * padded * channels * each;
    let panel = (cut.nv * c.vector.lanes) as f64;
    let panel_bytes = points * padded * panel * each;
    let products = points * padded * width * channels * 2.0 / OPERATIONS * (each / 4.0) / RATE;
    let calls = points * (padded / cut.rows as f64) * (width / panel) * 20.0;
    let mut unit = products + calls;
    unit += tiles * (channels * IMAGE_CYCLES + width * RESULT_CYCLES) * wide;
    // The transformed image is read again for each panel, filters for each unit.
    let over = (image_bytes + panel_bytes - room).clamp(0.0, image_bytes);
    unit += over * (1.0 + width / panel) * l3;
    let from = if filter_bytes < room - image_bytes.min(room / 2.0) {
        0.1 * l3
    } else {
        0.7 * l3
    };
    unit += filter_bytes * from;
    let turns = (cut.units as f64 / threads).ceil();
    let filters = channels * width * FILTER_CYCLES * wide + filter_bytes * memory;
    let cycles = turns * unit + filters / threads + 3000.0;
    cycles * 1e3 / cycles_per_us
}

impl Forward<'_> {
    fn panel(&self) -> i64 {
        self.cut.nv * self.c.vector.lanes
    }

    fn panels(&self) -> i64 {
        round_up(self.c.features(), self.panel()) / self.panel()
    }

    fn filter_numbers(&self) -> i64 {
        POINTS * self.c.summed() * self.panels() * self.panel()
    }

    /// Tiles that scratch has room for.
    fn tiles(&self) -> i64 {
        round_up(self.c.unit_tiles(self.cut.units), self.cut.rows)
    }

    /// Numbers between two elements of a transformed tile of the image, and of results. Not a multiple of a page, where
    /// all elements would fall into one set of a cache.
    fn image_point(&self) -> i64 {
        self.tiles() * self.c.summed() + self.c.vector.element.per_line()
    }

    fn result_point(&self) -> i64 {
        self.tiles() * self.panel() + self.c.vector.element.per_line()
    }

    /// Where in scratch the transformed results, a row of zeros, a tile at the border and rows that a prologue makes
    /// begin, and where it ends.
    fn scratch(&self) -> [i64; 5] {
        let line = self.c.vector.element.per_line();
        let results = POINTS * self.image_point();
        let zeros = results + POINTS * self.result_point();
        let border = zeros + round_up(self.c.row_numbers(), line);
        let made = border + POINTS * self.c.channels();
        [
            results,
            zeros,
            border,
            made,
            made + self.c.made_numbers(self.prologue),
        ]
    }

    /// Transforms the filters.
    fn pack(&self, t: &mut CText) {
        let (c, panel) = (self.c, self.panel());
        let number = c.vector.element.c_type();
        let (channels, summed, features) = (c.channels(), c.summed(), c.features());
        t.line(format!(
            "static void {}_pack(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "(void)scratch; const {number} *W = (const {number} *)buf[{}] + {}L;",
            1 - c.image_buffer,
            c.filter.base
        ));
        let units = self.panels() * summed;
        t.line(format!(
            "for (long u = {units}L*tid/nt; u < {units}L*(tid + 1)/nt; u++) {{"
        ));
        t.line(format!(
            "const long k = u/{summed}L*{panel}L, c = u%{summed}L, n = shl_min({panel}L, {features}L - k);"
        ));
        t.line(format!("{number} g[{}];", 9 * panel));
        t.line(format!("if (n < {panel}L) memset(g, 0, sizeof g);"));
        t.line(format!(
            "const {number} *w = W + k*{}L + c%{channels}L*{}L + c/{channels}L*{}L;",
            c.filter.stride(c.feature),
            c.filter.stride(c.channel),
            c.depth_step()
        ));
        for i in 0..9 {
            t.line(format!(
                "for (long i = 0; i < n; i++) g[{}L + i] = w[i*{}L + {}L];",
                i * panel,
                c.filter.stride(c.feature),
                c.tap(i)
            ));
        }
        t.line(format!(
            "{number} *U = ({number} *)buf[3] + (k*{POINTS}L*{summed}L + c*{panel}L);"
        ));
        t.line(format!(
            "for (long i = 0; i < {panel}L; i += {}L) {{",
            c.vector.lanes
        ));
        transforms::filter(t, c.vector, ("g + i", panel), "U + i", summed * panel);
        t.close(3);
    }

    /// `NAME(m, y, rows, columns, n)` writes a tile of results of a panel, of which `n` features exist.
    fn results_function(&self, t: &mut CText) {
        let c = self.c;
        let (number, vf) = (c.vector.element.c_type(), c.vector.c_type());
        let (lanes, bytes) = (c.vector.lanes, c.vector.element.bytes());
        t.line(format!(
            "static __attribute__((noinline)) void {}_results(const {number} *m, {number} *y, long rows, long columns, long n) {{",
            self.prefix
        ));
        t.line(format!("for (long k = 0; k < n; k += {lanes}L) {{"));
        transforms::results(t, c.vector, "m + k", self.result_point());
        let has_tail = c.features() % lanes != 0;
        for (i, j) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let at =
                i * c.results.stride(c.rows.position) + j * c.results.stride(c.columns.position);
            let mut store = format!("*({vf} *)(y + k + {at}L) = s{i}{j};");
            if has_tail {
                store = format!(
                    "if (k + {lanes}L <= n) {store} else memcpy(y + k + {at}L, &s{i}{j}, (n - k)*{bytes}L);"
                );
            }
            let test = match (i, j) {
                (0, 0) => String::new(),
                (0, 1) => "if (columns > 1) ".to_string(),
                (1, 0) => "if (rows > 1) ".to_string(),
                _ => "if (rows > 1 && columns > 1) ".to_string(),
            };
            t.line(format!("{test}{{"));
            t.line(store);
            t.line("}");
        }
        t.close(2);
    }

    fn main(&self, t: &mut CText, hooks: &Hooks) {
        let (c, panel) = (self.c, self.panel());
        let number = c.vector.element.c_type();
        let (summed, features) = (c.summed(), c.features());
        let (image_point, result_point) = (self.image_point(), self.result_point());
        let (kernel, text) = self.kernel().emit();
        t.raw(&text);
        let [results, zeros, border, made, _] = self.scratch();
        t.line(format!(
            "static void {}_main(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "const {number} *U = buf[3]; {number} *Y = ({number} *)buf[2] + {}L;",
            c.results.base
        ));
        t.line(format!("{number} *V = scratch, *M = V + {results}L;"));
        c.declare_rows(t, [zeros, border, made], self.prologue);
        let (strips, units) = (c.strips(), self.cut.units);
        // Tiles that only fill the last micro-kernel.
        let fewest = strips / units * c.columns.tiles();
        t.line(format!(
            "for (long p = 0; p < {POINTS}L; p++) memset(V + p*{image_point}L + {}L, 0, {}L);",
            fewest * summed,
            (self.tiles() - fewest) * summed * c.vector.element.bytes()
        ));
        t.line(format!(
            "for (long u = {units}L*tid/nt; u < {units}L*(tid + 1)/nt; u++) {{"
        ));
        t.line(format!(
            "const long s0 = {strips}L*u/{units}L, s1 = {strips}L*(u + 1)/{units}L;"
        ));
        t.line(format!("const long n = (s1 - s0)*{}L;", c.columns.tiles()));
        t.line(format!("{number} *v = V;"));
        t.line("for (long s = s0; s < s1; s++) {");
        let channels = c.channels();
        let steps = [summed, channels];
        c.image_strip(t, &self.prefix, self.prologue, ("0", channels), steps);
        t.line("}");
        t.line(format!(
            "for (long k = 0; k < {features}L; k += {panel}L) {{"
        ));
        t.line(format!("for (long p = 0; p < {POINTS}L; p++) {{"));
        t.line(format!(
            "const {number} *b = U + (k*{POINTS}L*{summed}L + p*{}L);",
            summed * panel
        ));
        t.line(format!(
            "for (long r = 0; r < n; r += {}L) {kernel}(V + p*{image_point}L + r*{summed}L, b, M + p*{result_point}L + r*{panel}L, b, 1, 0);",
            self.cut.rows
        ));
        t.line("}");
        t.line(format!("const {number} *m = M;"));
        t.line("for (long s = s0; s < s1; s++) {");
        c.decode_strip(t, "s");
        let rows = c.rows.size;
        t.line(format!("const long rows = shl_min(2L, {rows}L - 2*ty);"));
        t.line(format!(
            "{number} *y = Y + {} + k;",
            c.strip_place(&c.results, 2 * c.results.stride(c.rows.position))
        ));
        t.line(format!(
            "for (long x = 0; x < {0}L; x += 2, m += {panel}L) {1}_results(m, y + x*{2}L, rows, shl_min(2L, {0}L - x), shl_min({panel}L, {features}L - k));",
            c.columns.size,
            self.prefix,
            c.results.stride(c.columns.position)
        ));
        t.close(2);
        let places = |s: &str| {
            let (strips, row) = (c.rows.tiles(), c.columns.size);
            format!("{s}/{strips}L*{}L + {s}%{strips}L*{}L", rows * row, 2 * row)
        };
        let block = format!("0, {}, {}, 0, {features}L", places("s0"), places("s1"));
        if let Some(epilogue) = &hooks.epilogue {
            t.line(format!("{epilogue}(buf, tid, {block});"));
        }
        if let Some(sums) = &hooks.sums {
            t.line(format!("{sums}(buf, tid, u, {block});"));
        }
        t.close(2);
    }

    fn kernel(&self) -> MicroKernel {
        let (summed, panel) = (self.c.summed(), self.panel());
        MicroKernel {
            vector: self.c.vector,
            rows: (0..self.cut.rows)
                .map(|r| (r * summed, r * panel))
                .collect(),
            nv: self.cut.nv,
            last_lanes: self.c.vector.lanes,
            nest: vec![Level {
                extent: summed,
                runtime: false,
                a: 1,
                b: panel,
            }],
            unrolls: true,
            ahead: 0,
            ahead_a: Vec::new(),
            ahead_b: Vec::new(),
            ragged: None,
        }
    }
}
