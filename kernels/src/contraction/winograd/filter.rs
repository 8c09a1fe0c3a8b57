//! The filter's gradient: sums of products of transformed tiles, over all tiles, transformed once at the end.

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
pub(super) struct FilterCut {
    /// Runs of tiles with sums of their own, and runs of channels.
    parts: i64,
    splits: i64,
    /// Runs of rows of tiles of a part, each transformed and multiplied as one.
    blocks: i64,
    /// Channels and vectors of a micro-kernel.
    rows: i64,
    nv: i64,
}

struct FilterGradient<'a> {
    c: &'a Convolution,
    prefix: String,
    /// The functions that make the image, and the gradient of the results.
    prologues: [Option<&'a str>; 2],
    cut: FilterCut,
}

/// Writes the gradient.
pub(super) fn write(
    name: &str,
    c: &Convolution,
    hooks: &Hooks,
    cut: FilterCut,
) -> EmittedContraction {
    let prologues = c.prologues(hooks);
    let f = FilterGradient {
        c,
        prefix: format!("{name}_p0"),
        prologues,
        cut,
    };
    let mut t = CText::default();
    t.raw(&preamble(c.vector));
    c.rows_function(&mut t, &f.prefix, prologues[0]);
    let tiles = f.tiles();
    let place = |at: &str| format!("{at}*{tiles}L");
    let input = format!("{}_image", f.prefix);
    transforms::image(
        &mut t,
        &input,
        c.vector,
        f.channels(),
        f.image_point(),
        &place,
    );
    f.gradient_function(&mut t);
    f.main(&mut t);
    f.combine(&mut t);
    let sums = cut.parts * POINTS * c.summed() * c.features();
    let stages = [("", "main"), ("_combine", "combine")];
    c.emitted(t, name, stages, (sums, f.scratch()[5]))
}

/// The fastest cut by prediction, and its predicted nanoseconds.
pub(super) fn best(
    c: &Convolution,
    has_prologue: bool,
    target: &ContractionTarget,
) -> Option<(FilterCut, f64)> {
    let lanes = c.vector.lanes;
    let vectors = c.features() / lanes;
    let is_wide = target.vector_width == 16;
    let nv = [3, 2, 1].into_iter().find(|nv| vectors % nv == 0)?;
    let rows = lanes.min(if is_wide { 8 } else { 4 });
    let threads = target.threads.max(1);
    let mut best: Option<(FilterCut, f64)> = None;
    for splits in (1..=threads).filter(|n| c.channels() % (n * lanes) == 0) {
        let parts = div_up(threads, splits).min(c.strips());
        let strips = div_up(c.strips(), parts);
        for most in 1..=strips.min(64) {
            let cut = FilterCut {
                parts,
                splits,
                blocks: div_up(strips, most),
                rows,
                nv,
            };
            let tiles = c.unit_tiles(cut.parts * cut.blocks);
            let numbers = POINTS * tiles * (c.summed() / splits + c.features());
            let bytes = (numbers * c.vector.element.bytes()) as f64;
            if !is_within_reach(bytes, most == 1, &target.machine) {
                continue;
            }
            let ns = predicted_ns(c, cut, has_prologue, target);
            if best.is_none_or(|b| ns < b.1) {
                best = Some((cut, ns));
            }
        }
    }
    best
}

fn predicted_ns(
    c: &Convolution,
    cut: FilterCut,
    has_prologue: bool,
    target: &ContractionTarget,
) -> f64 {
    let machine = &target.machine;
    let cycles_per_us = machine.product_operations_per_us.max(1) as f64 / OPERATIONS;
    let per_byte = |level: graph::Level| cycles_per_us / level.bytes_per_us.max(1) as f64;
    let (l3, memory) = (per_byte(machine.l3), per_byte(machine.memory));
    let each = c.vector.element.bytes() as f64;
    let wide = each / 64.0;
    let threads = target.threads.max(1) as f64;
    let (features, points) = (c.features() as f64, POINTS as f64);
    let channels = (c.summed() / cut.splits) as f64;
    let tiles = c.unit_tiles(cut.parts * cut.blocks) as f64;

    let room = machine.l2.bytes as f64 * 0.7;
    let sums = points * channels * features * each;
    let transformed = points * tiles * (channels + features) * each;
    let panel = (cut.nv * c.vector.lanes) as f64;
    let calls = points * channels / cut.rows as f64 * features / panel * 30.0;
    // Few rows of a micro-kernel load more for each product.
    let rate = RATE * if cut.nv == 1 { 0.7 } else { 0.95 };
    let mut block = points * tiles * channels * features * 2.0 / OPERATIONS * (each / 4.0) / rate;
    block += calls;
    let gradient = RESULT_CYCLES * if has_prologue { 2.0 } else { 1.0 };
    block += tiles * (channels * IMAGE_CYCLES + features * gradient) * wide;
    block += (transformed - room * 0.6).clamp(0.0, transformed) * 2.0 * l3;
    let from = if sums + transformed < room {
        0.1 * l3
    } else {
        0.7 * l3
    };
    block += 2.0 * sums * from;
    let turns = ((cut.parts * cut.splits) as f64 / threads).ceil();
    let all = points * c.summed() as f64 * features * each * cut.parts as f64;
    let combine = all * memory.max(l3) + c.summed() as f64 * features * FILTER_CYCLES * wide;
    let cycles = turns * cut.blocks as f64 * block + combine / threads + 3000.0;
    cycles * 1e3 / cycles_per_us
}

impl FilterGradient<'_> {
    fn panel(&self) -> i64 {
        self.cut.nv * self.c.vector.lanes
    }

    /// Channels of a split.
    fn channels(&self) -> i64 {
        self.c.channels() / self.cut.splits
    }

    /// Rows of the sums of a split: its channels at each tap of the depth.
    fn summed(&self) -> i64 {
        self.c.depth_taps() * self.channels()
    }

    fn tiles(&self) -> i64 {
        self.c.unit_tiles(self.cut.parts * self.cut.blocks)
    }

    /// Numbers between two elements of a transformed tile, of the image and of the gradient.
    fn image_point(&self) -> i64 {
        self.tiles() * self.summed() + self.c.vector.element.per_line()
    }

    fn gradient_point(&self) -> i64 {
        self.tiles() * self.c.features() + self.c.vector.element.per_line()
    }

    /// Numbers of a row of the gradient.
    fn gradient_row(&self) -> i64 {
        let c = self.c;
        (c.columns.size - 1) * c.results.stride(c.columns.position) + c.features()
    }

    /// Where in scratch the transformed gradient, a row of zeros, a tile at the border, and rows that prologues make of
    /// the image and of the gradient begin, and where it ends.
    fn scratch(&self) -> [i64; 6] {
        let line = self.c.vector.element.per_line();
        let gradient = POINTS * self.image_point();
        let zeros = gradient + POINTS * self.gradient_point();
        let border = zeros + round_up(self.c.row_numbers().max(self.gradient_row()), line);
        let made = border + POINTS * self.channels();
        let gradients = made + self.c.made_numbers(self.prologues[0]);
        let n = self.prologues[1].map_or(0, |_| 2 * self.gradient_row());
        [gradient, zeros, border, made, gradients, gradients + n]
    }

    /// `NAME(r0, r1, columns, z)` transforms the gradient of a tile of results.
    fn gradient_function(&self, t: &mut CText) {
        let c = self.c;
        let (number, vf) = (c.vector.element.c_type(), c.vector.c_type());
        let (panel, tiles) = (self.panel(), self.tiles());
        t.line(format!(
            "static __attribute__((noinline)) void {}_gradient(const {number} *r0, const {number} *r1, long columns, {number} *z) {{",
            self.prefix
        ));
        t.line(format!(
            "for (long k = 0; k < {}L; k += {}L) {{",
            c.features(),
            c.vector.lanes
        ));
        let column = c.results.stride(c.columns.position);
        t.line(format!("{vf} s01 = {{0}}, s11 = {{0}};"));
        t.line(format!(
            "const {vf} s00 = *(const {vf} *)(r0 + k), s10 = *(const {vf} *)(r1 + k);"
        ));
        t.line(format!(
            "if (columns > 1) {{ s01 = *(const {vf} *)(r0 + k + {column}L); s11 = *(const {vf} *)(r1 + k + {column}L); }}"
        ));
        t.line(format!(
            "{number} *o = z + (k/{panel}L*{}L + k%{panel}L);",
            panel * tiles
        ));
        transforms::result_gradients(t, c.vector, "o", self.gradient_point());
        t.close(2);
    }

    fn main(&self, t: &mut CText) {
        let c = self.c;
        let number = c.vector.element.c_type();
        let FilterCut {
            parts,
            splits,
            blocks,
            rows,
            ..
        } = self.cut;
        let (channels, features, panel) = (self.channels(), c.features(), self.panel());
        let summed = self.summed();
        let (lanes, tiles) = (c.vector.lanes, self.tiles());
        let (kernel, text) = self.kernel().emit();
        t.raw(&text);
        let [gradient, zeros, border, made, gradients, _] = self.scratch();
        t.line(format!(
            "static void {}_main(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "const {number} *D = (const {number} *)buf[{}] + {}L; (void)D;",
            1 - c.image_buffer,
            c.results.base
        ));
        t.line(format!("{number} *V = scratch, *Z = V + {gradient}L;"));
        c.declare_rows(t, [zeros, border, made], self.prologues[0]);
        let jobs = parts * splits;
        t.line(format!(
            "for (long job = {jobs}L*tid/nt; job < {jobs}L*(tid + 1)/nt; job++) {{"
        ));
        t.line(format!(
            "const long part = job/{splits}L, first = job%{splits}L*{channels}L;"
        ));
        t.line(format!(
            "{number} *S = ({number} *)buf[3] + job*{}L;",
            POINTS * summed * features
        ));
        let (strips, runs) = (c.strips(), parts * blocks);
        t.line(format!(
            "for (long block = 0; block < {blocks}L; block++) {{"
        ));
        t.line(format!(
            "const long u = part*{blocks}L + block, s0 = {strips}L*u/{runs}L, s1 = {strips}L*(u + 1)/{runs}L;"
        ));
        t.line(format!("const long n = (s1 - s0)*{}L;", c.columns.tiles()));
        t.line(format!("{number} *v = V, *z = Z;"));
        t.line("for (long s = s0; s < s1; s++) {");
        c.image_strip(
            t,
            &self.prefix,
            self.prologues[0],
            ("first", channels),
            [lanes, channels * tiles],
        );
        self.gradient_strip(t, gradients);
        t.line("}");
        t.line(format!("for (long p = 0; p < {POINTS}L; p++) {{"));
        t.line(format!("for (long r = 0; r < {summed}L; r += {rows}L) {{"));
        t.line(format!(
            "const {number} *a = V + (p*{}L + r/{lanes}L*{}L + r%{lanes}L);",
            self.image_point(),
            tiles * lanes
        ));
        t.line(format!(
            "for (long k = 0; k < {features}L; k += {panel}L) {kernel}(a, Z + (p*{}L + k*{tiles}L), S + ((p*{summed}L + r)*{features}L + k), a, n, block);",
            self.gradient_point()
        ));
        t.close(5);
    }

    /// Transforms the gradient of the results of the row of tiles `s`.
    fn gradient_strip(&self, t: &mut CText, gradients: i64) {
        let c = self.c;
        let number = c.vector.element.c_type();
        let (row, column) = (
            c.results.stride(c.rows.position),
            c.results.stride(c.columns.position),
        );
        let place = c.strip_place(&c.results, 2 * row);
        for i in 0..2 {
            let exists = match i {
                0 => "1".to_string(),
                _ => format!("2*ty + 1 < {}L", c.rows.size),
            };
            match self.prologues[1] {
                Some(prologue) => {
                    let n = self.gradient_row();
                    t.line(format!(
                        "{number} *g{i} = ({number} *)scratch + {}L;",
                        gradients + i * n
                    ));
                    t.line(format!(
                        "if ({exists}) {prologue}(buf, g{i}, {place} + {}L, 1, {n}L); else g{i} = zeros;",
                        c.results.base + i * row
                    ));
                }
                None => t.line(format!(
                    "const {number} *g{i} = {exists} ? D + {place} + {}L : zeros;",
                    i * row
                )),
            }
        }
        t.line(format!(
            "for (long x = 0; x < {0}L; x += 2, z += {1}L) {2}_gradient(g0 + x*{column}L, g1 + x*{column}L, {0}L - x, z);",
            c.columns.size,
            self.panel(),
            self.prefix
        ));
    }

    /// Adds up the parts and transforms the sums.
    fn combine(&self, t: &mut CText) {
        let c = self.c;
        let (number, vf) = (c.vector.element.c_type(), c.vector.c_type());
        let (parts, splits) = (self.cut.parts, self.cut.splits);
        let (channels, features, panel) = (self.channels(), c.features(), self.panel());
        let (summed, all) = (self.summed(), c.summed());
        t.line(format!(
            "static void {}_combine(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "(void)scratch; {number} *O = ({number} *)buf[2] + {}L;",
            c.filter.base
        ));
        let units = features / panel * all;
        t.line(format!(
            "for (long u = {units}L*tid/nt; u < {units}L*(tid + 1)/nt; u++) {{"
        ));
        let split = POINTS * summed * features;
        t.line(format!(
            "const long k = u/{all}L*{panel}L, split = u%{all}L/{summed}L, r = u%{summed}L;"
        ));
        t.line(format!(
            "const {number} *S = (const {number} *)buf[3] + (split*{split}L + r*{features}L + k);"
        ));
        t.line(format!("{number} g[{}];", 9 * panel));
        t.line(format!(
            "for (long i = 0; i < {panel}L; i += {}L) {{",
            c.vector.lanes
        ));
        let part = splits * split;
        for n in 0..POINTS {
            let at = n * summed * features;
            t.line(format!("{vf} s{n} = *(const {vf} *)(S + i + {at}L);"));
        }
        t.line(format!(
            "for (long part = {part}L; part < {}L; part += {part}L) {{",
            parts * part
        ));
        for n in 0..POINTS {
            let at = n * summed * features;
            t.line(format!("s{n} += *(const {vf} *)(S + i + part + {at}L);"));
        }
        t.line("}");
        transforms::filter_gradient(t, c.vector, "g + i", panel);
        t.line("}");
        t.line(format!(
            "{number} *o = O + k*{}L + (split*{channels}L + r%{channels}L)*{}L + r/{channels}L*{}L;",
            c.filter.stride(c.feature),
            c.filter.stride(c.channel),
            c.depth_step()
        ));
        for i in 0..9 {
            t.line(format!(
                "for (long i = 0; i < {panel}L; i++) o[i*{}L + {}L] = g[{}L + i];",
                c.filter.stride(c.feature),
                c.tap(i),
                i * panel
            ));
        }
        t.close(2);
    }

    fn kernel(&self) -> MicroKernel {
        let (lanes, features) = (self.c.vector.lanes, self.c.features());
        MicroKernel {
            vector: self.c.vector,
            rows: (0..self.cut.rows).map(|r| (r, r * features)).collect(),
            nv: self.cut.nv,
            last_lanes: lanes,
            nest: vec![Level {
                extent: 1,
                runtime: true,
                a: lanes,
                b: self.panel(),
            }],
            unrolls: true,
            ahead: 0,
            ahead_a: Vec::new(),
            ahead_b: Vec::new(),
            ragged: None,
        }
    }
}
