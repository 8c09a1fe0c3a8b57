//! Depthwise convolutions: one channel dim in all three operands, contiguous, becomes the vector.
//! Forward and data gradient keep the taps' weights in registers along an output row; the weight
//! gradient keeps the taps' sums. Rows outside the image read a row of zeros; border columns are
//! written out with the taps they have. Takes no prologue.

use super::access::{Access, Coord, Problem};
use super::driver::zero_fill;
use super::gather::GatherForm;
use super::text::{CText, Vector, affine, preamble};
use super::{EmittedContraction, Hooks, Launch, NoFastForm, Roles, Target};

/// Most register-tile code a border may cost.
const MOST_TAPS: usize = 128;
const MOST_BORDER_TERMS: usize = 400;
/// How many times as long as at a product's peak a multiply-add takes that loads one of its factors, and one
/// that loads both.
const ONE_LOAD: f64 = 3.0;
const TWO_LOADS: f64 = 4.5;
/// Positions whose sums are kept together.
const POSITIONS_IN_BAND: i64 = 64;
/// Bands for each thread, so that all have work.
const BANDS_PER_THREAD: i64 = 8;

/// A depthwise problem, seen from its image operand: positions move the window, taps are inside it.
struct Depthwise {
    prefix: String,
    vector: Vector,
    /// Whether the sum runs over positions (weight gradient) and not over taps.
    reduce: bool,
    /// Pieces of the sum over positions.
    parts: i64,
    threads: i64,
    channels: i64,
    x: Access,
    x_buf: usize,
    /// What moves with the positions: the output, or the other operand of a weight gradient.
    y: Access,
    /// What moves with the taps: the weights, or their gradient.
    w: Access,
    w_buf: usize,
    lane: usize,
    dims: Vec<i64>,
    /// Position dims but the innermost, outermost first.
    outer: Vec<usize>,
    /// The innermost position dim, its coordinate in `x`, its tap dim.
    column: usize,
    column_coord: Coord,
    column_tap: Option<usize>,
    /// Tap dims but the innermost.
    row_taps: Vec<usize>,
    shared_at: i64,
    epilogue: Option<String>,
    sums: Option<String>,
}

/// Emits all parts of `form` if each is depthwise; `None` if this is not the place for it.
pub fn emit(
    name: &str,
    form: &GatherForm,
    hooks: &Hooks,
    vector: Vector,
    target: &Target,
) -> Result<Option<EmittedContraction>, NoFastForm> {
    if hooks.prologue_a.is_some() || hooks.prologue_b.is_some() || form.parts.is_empty() {
        return Ok(None);
    }
    let mut parts = Vec::new();
    let mut shared = 0;
    for (i, p) in form.parts.iter().enumerate() {
        let Some(mut part) = Depthwise::recognize(p, vector, target) else {
            return Ok(None);
        };
        if part.reduce && hooks.follow() {
            return Err(NoFastForm::SplitSum);
        }
        part.prefix = format!("{name}_p{i}");
        part.shared_at = shared;
        part.epilogue.clone_from(&hooks.epilogue);
        part.sums.clone_from(&hooks.sums);
        shared += part.shared_numbers();
        parts.push(part);
    }
    let mut t = CText::default();
    t.raw(&preamble(vector));
    for p in &parts {
        p.main_function(&mut t);
        if p.reduce {
            p.combine_function(&mut t);
        }
    }
    let mut launches = vec![Launch {
        symbol: name.to_string(),
    }];
    let call = |t: &mut CText, symbol: &str, stage: &str| {
        t.line(format!(
            "void {symbol}(void *const *buf, void *scratch, long tid, long nt) {{"
        ));
        for p in &parts {
            t.line(format!("{}_{stage}(buf, scratch, tid, nt);", p.prefix));
        }
    };
    call(&mut t, name, "main");
    for z in &form.zeros {
        zero_fill(&mut t, z, vector.element);
    }
    t.line("}");
    if parts.iter().any(|p| p.reduce) {
        let symbol = format!("{name}_combine");
        call(&mut t, &symbol, "combine");
        t.line("}");
        launches.push(Launch { symbol });
    }
    let thread = parts
        .iter()
        .map(|p| p.weight_numbers() + p.zero_numbers())
        .max()
        .unwrap_or(0);
    Ok(Some(EmittedContraction {
        source: t.finish(),
        launches,
        shared_scratch_bytes: (shared * vector.element.bytes()) as usize,
        thread_scratch_bytes: (thread * vector.element.bytes()) as usize,
        flops: 0,
        predicted_ns: parts.iter().map(|p| p.predicted_ns(target)).sum::<f64>() as u64,
        refusal: None,
        path: if parts[0].reduce {
            "depthwise, reduced"
        } else {
            "depthwise"
        },
        takes_prologues: false,
        cuts: None,
        choices: Vec::new(),
        sum_slots: match &hooks.sums {
            Some(_) => parts[0].bands(target.threads.max(1)),
            None => 0,
        },
        finishes_in_blocks: !parts[0].reduce,
        roles: parts[0].roles(),
    }))
}

impl Depthwise {
    fn recognize(p: &Problem, vector: Vector, target: &Target) -> Option<Depthwise> {
        let mut p = p.clone();
        p.tidy();
        let n = p.dims.len();
        p.a.simplify_read(false);
        p.b.simplify_read(false);
        p.out.simplify_read(true);
        let everywhere = |d: usize| p.a.has(d) && p.b.has(d) && p.out.has(d);
        let mut batch = (0..n).filter(|&d| p.dims[d] > 1 && everywhere(d));
        let (lane, None) = (batch.next()?, batch.next()) else {
            return None;
        };
        if p.dims[lane] < vector.lanes {
            return None;
        }
        let unit = |x: &Access| {
            x.stride(lane) == 1 && x.coords.iter().any(|c| c.coeff(lane) == 1 && c.is_plain())
        };
        let reduce = !unit(&p.out) || (unit(&p.a) && unit(&p.b));
        let others: Vec<usize> = (0..n).filter(|&d| d != lane && p.dims[d] > 1).collect();
        let count = |x: &Access| others.iter().filter(|&&d| x.has(d)).count();
        // The image is the operand whose windows have positions and taps.
        let image_is_a = count(&p.a) >= count(&p.b);
        let (x, o, x_buf) = if image_is_a {
            (&p.a, &p.b, 0)
        } else {
            (&p.b, &p.a, 1)
        };
        let (mut y, mut w) = if reduce {
            (o.clone(), p.out.clone())
        } else {
            (p.out.clone(), o.clone())
        };
        y.simplify_read(true);
        w.simplify_read(true);
        let w_buf = if reduce { 2 } else { 1 - x_buf };
        let sound = unit(x) && unit(&y) && !y.any_guard() && !w.any_guard() && !x.repeats_a_dim(n);
        let split = others.iter().all(|&d| x.has(d) && y.has(d) != w.has(d));
        if !sound || !split {
            return None;
        }
        let mut positions: Vec<usize> = others.iter().copied().filter(|&d| y.has(d)).collect();
        positions.sort_by_key(|&d| std::cmp::Reverse(y.stride(d)));
        let column = positions.pop()?;
        let column_coord = x.coords.iter().find(|c| c.coeff(column) != 0)?.clone();
        let taps: Vec<usize> = others.iter().copied().filter(|&d| w.has(d)).collect();
        let windows = x.coords.iter().all(|c| {
            let of = |set: &[usize]| c.terms.iter().filter(|t| set.contains(&t.0)).count();
            let at = positions
                .iter()
                .copied()
                .chain([column])
                .collect::<Vec<_>>();
            of(&at) <= 1 && of(&taps) <= 1 && c.terms.iter().all(|t| t.1 > 0) && c.stride > 0
        });
        let column_tap = taps.iter().copied().find(|&d| column_coord.coeff(d) != 0);
        let d = Depthwise {
            prefix: String::new(),
            vector,
            reduce,
            threads: target.threads.max(1),
            parts: if reduce { target.threads.max(1) } else { 1 },
            channels: p.dims[lane],
            x: x.clone(),
            x_buf,
            y,
            w,
            w_buf,
            lane,
            outer: positions,
            column,
            column_coord,
            column_tap,
            row_taps: taps
                .into_iter()
                .filter(|&d| Some(d) != column_tap)
                .collect(),
            dims: p.dims.clone(),
            shared_at: 0,
            epilogue: None,
            sums: None,
        };
        let n_taps = d.taps().len();
        (windows && n_taps <= MOST_TAPS && d.border_columns().len() * n_taps <= MOST_BORDER_TERMS)
            .then_some(d)
    }

    fn roles(&self) -> Roles {
        let positions = self.outer.iter().copied().chain([self.column]).collect();
        let taps = self
            .row_taps
            .iter()
            .copied()
            .chain(self.column_tap)
            .collect();
        let place = |d: usize| (d, self.dims[d], self.y.stride(d));
        let written = self.outer.iter().copied().chain([self.column, self.lane]);
        Roles {
            places: match self.reduce {
                true => Vec::new(),
                false => written.map(place).collect(),
            },
            batch: Vec::new(),
            m: if self.reduce { taps } else { positions },
            n: vec![self.lane],
        }
    }

    /// Every combination of row taps, each as index per dim of `row_taps`.
    fn rows(&self) -> Vec<Vec<i64>> {
        let mut all = vec![Vec::new()];
        for &d in &self.row_taps {
            let grow = |r: Vec<i64>| (0..self.dims[d]).map(move |i| [r.clone(), vec![i]].concat());
            all = all.into_iter().flat_map(grow).collect();
        }
        all
    }

    fn column_taps(&self) -> i64 {
        self.column_tap.map_or(1, |d| self.dims[d])
    }

    /// All (row, column tap) pairs.
    fn taps(&self) -> Vec<(usize, i64)> {
        let s = self.column_taps();
        (0..self.rows().len())
            .flat_map(|r| (0..s).map(move |i| (r, i)))
            .collect()
    }

    fn padded_channels(&self) -> i64 {
        (self.channels + 15) / 16 * 16
    }

    fn weight_numbers(&self) -> i64 {
        if self.reduce {
            0
        } else {
            self.taps().len() as i64 * self.padded_channels()
        }
    }

    fn shared_numbers(&self) -> i64 {
        if self.reduce {
            self.parts * self.taps().len() as i64 * self.padded_channels()
        } else {
            0
        }
    }

    fn row_guards(&self) -> impl Iterator<Item = &Coord> {
        self.x
            .coords
            .iter()
            .filter(|c| c.guarded && **c != self.column_coord)
    }

    /// Length of the row that stands in for rows outside the image.
    fn zero_numbers(&self) -> i64 {
        let c = &self.column_coord;
        let last = if c.guarded {
            c.size - 1
        } else {
            self.column_position(self.dims[self.column] - 1, self.column_taps() - 1)
        };
        if self.row_guards().next().is_some() {
            last.max(0) * c.stride + self.padded_channels()
        } else {
            0
        }
    }

    fn column_position(&self, x: i64, tap: i64) -> i64 {
        let c = &self.column_coord;
        c.offset + x * c.coeff(self.column) + self.column_tap.map_or(0, |d| c.coeff(d) * tap)
    }

    fn column_exists(&self, x: i64, tap: i64) -> bool {
        !self.column_coord.guarded
            || (0..self.column_coord.size).contains(&self.column_position(x, tap))
    }

    fn is_interior(&self, x: i64) -> bool {
        (0..self.column_taps()).all(|s| self.column_exists(x, s))
    }

    fn border_columns(&self) -> Vec<i64> {
        (0..self.dims[self.column])
            .filter(|&x| !self.is_interior(x))
            .collect()
    }

    // ---- text ----

    fn main_function(&self, t: &mut CText) {
        let cp = self.padded_channels();
        let (number, bytes) = (self.vector.element.c_type(), self.vector.element.bytes());
        t.line(format!(
            "static void {}_main(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "const {number} *X = (const {number} *)buf[{}] + {}L;",
            self.x_buf, self.x.base
        ));
        let units: i64 = self.outer.iter().map(|&d| self.dims[d]).product();
        if self.zero_numbers() > 0 {
            t.line(format!(
                "{number} *zero = ({number} *)scratch + {}L;",
                self.weight_numbers()
            ));
            t.line(format!(
                "memset(zero, 0, {}L);",
                self.zero_numbers() * bytes
            ));
        }
        if self.reduce {
            let y_buf = 1 - self.x_buf;
            t.line(format!(
                "const {number} *Y = (const {number} *)buf[{y_buf}] + {}L;",
                self.y.base
            ));
            t.line(format!(
                "for (long part = tid; part < {}L; part += nt) {{",
                self.parts
            ));
            let taps = self.taps().len() as i64;
            t.line(format!(
                "{number} *wt = ({number} *)buf[3] + {}L + part*{}L;",
                self.shared_at,
                taps * cp
            ));
            t.line(format!("memset(wt, 0, {}L);", taps * cp * bytes));
            t.line(format!(
                "for (long u = {units}L*part/{0}L; u < {units}L*(part + 1)/{0}L; u++) {{",
                self.parts
            ));
        } else {
            t.line(format!(
                "{number} *Y = ({number} *)buf[2] + {}L;",
                self.y.base
            ));
            t.line(format!("{number} *wt = scratch;"));
            self.load_weights(t);
            if self.sums.is_some() {
                let bands = self.bands(self.threads);
                t.line(format!(
                    "for (long band = {bands}L*tid/nt; band < {bands}L*(tid + 1)/nt; band++) {{"
                ));
                t.line(format!(
                    "for (long u = {units}L*band/{bands}L; u < {units}L*(band + 1)/{bands}L; u++) {{"
                ));
            } else {
                t.line(format!(
                    "for (long u = {units}L*tid/nt; u < {units}L*(tid + 1)/nt; u++) {{"
                ));
            }
        }
        self.row_pointers(t, units);
        let whole = self.channels / self.vector.lanes * self.vector.lanes;
        for (kind, lanes) in [
            (self.vector.c_type(), self.vector.lanes),
            (number.to_string(), 1),
        ] {
            let (from, to) = match lanes {
                1 => (whole, self.channels),
                _ => (0, whole),
            };
            if from < to {
                t.line(format!(
                    "for (long c = {from}L; c < {to}L; c += {lanes}L) {{"
                ));
                self.row(t, &kind);
                t.line("}");
            }
        }
        if let Some(e) = self.epilogue.as_ref().filter(|_| !self.reduce) {
            let w = self.dims[self.column];
            t.line(format!(
                "{e}(buf, tid, 0, u*{w}L, (u + 1)*{w}L, 0, {}L);",
                self.channels
            ));
        }
        if let Some(sums) = &self.sums {
            let (w, bands) = (self.dims[self.column], self.bands(self.threads));
            t.close(1);
            t.line(format!(
                "{sums}(buf, tid, band, 0, {units}L*band/{bands}L*{w}L, {units}L*(band + 1)/{bands}L*{w}L, 0, {}L);",
                self.channels
            ));
        }
        t.close(if self.reduce { 3 } else { 2 });
    }

    /// Runs of rows whose columns are summed together: some rows each, and enough for all threads.
    fn bands(&self, threads: i64) -> i64 {
        let units: i64 = self.outer.iter().map(|&d| self.dims[d]).product();
        let rows = (POSITIONS_IN_BAND / self.dims[self.column]).max(1);
        (units / rows).max(BANDS_PER_THREAD * threads).min(units)
    }

    fn tap_offset(&self, row: &[i64], s: i64) -> i64 {
        let rows: i64 = self
            .row_taps
            .iter()
            .zip(row)
            .map(|(&d, i)| self.w.stride(d) * i)
            .sum();
        rows + self.column_tap.map_or(0, |d| self.w.stride(d) * s)
    }

    fn load_weights(&self, t: &mut CText) {
        let number = self.vector.element.c_type();
        t.line(format!(
            "const {number} *B = (const {number} *)buf[{}] + {}L;",
            self.w_buf, self.w.base
        ));
        t.line(format!("for (long c = 0; c < {}L; c++) {{", self.channels));
        let rows = self.rows();
        for (i, (r, s)) in self.taps().into_iter().enumerate() {
            let at = i as i64 * self.padded_channels();
            let from = self.tap_offset(&rows[r], s);
            t.line(format!(
                "wt[{at}L + c] = B[c*{}L + {from}L];",
                self.w.stride(self.lane)
            ));
        }
        t.line("}");
    }

    /// Declares `y` and `r0, r1, ..`: the row of each combination of row taps, or the zero row.
    fn row_pointers(&self, t: &mut CText, units: i64) {
        let mut inner = units;
        for &d in &self.outer {
            inner /= self.dims[d];
            t.line(format!("const long q{d} = u/{inner}L%{}L;", self.dims[d]));
        }
        let at: Vec<(String, i64)> = self
            .outer
            .iter()
            .map(|&d| (format!("q{d}"), self.y.stride(d)))
            .collect();
        let constness = if self.reduce { "const " } else { "" };
        let number = self.vector.element.c_type();
        t.line(format!("{constness}{number} *y = Y + {};", affine(&at, 0)));
        for (i, row) in self.rows().iter().enumerate() {
            let tap = |c: &Coord| -> i64 {
                self.row_taps
                    .iter()
                    .zip(row)
                    .map(|(&d, i)| c.coeff(d) * i)
                    .sum()
            };
            let mut terms = Vec::new();
            let mut fixed = 0;
            let mut tests = Vec::new();
            for c in self
                .x
                .coords
                .iter()
                .filter(|c| **c != self.column_coord && c.coeff(self.lane) == 0)
            {
                let here: Vec<(String, i64)> = self
                    .outer
                    .iter()
                    .map(|&d| (format!("q{d}"), c.coeff(d)))
                    .collect();
                terms.extend(here.iter().map(|(v, k)| (v.clone(), k * c.stride)));
                fixed += (c.offset + tap(c)) * c.stride;
                if c.guarded {
                    tests.push(format!(
                        "(unsigned long)({}) < {}UL",
                        affine(&here, c.offset + tap(c)),
                        c.size
                    ));
                }
            }
            let from = format!("X + {}", affine(&terms, fixed));
            let value = if tests.is_empty() {
                from
            } else {
                format!("{} ? {from} : zero", tests.join(" && "))
            };
            t.line(format!("const {number} *r{i} = {value};"));
        }
    }

    /// One row of positions for the channels from `c`.
    fn row(&self, t: &mut CText, kind: &str) {
        let taps = self.taps();
        let cp = self.padded_channels();
        // Each row's sums start anew, so that no chain of additions is longer than rows or columns are many.
        for i in 0..taps.len() {
            t.line(if self.reduce {
                format!("{kind} w{i} = {{0}};")
            } else {
                format!(
                    "{kind} w{i} = *(const {kind} *)(wt + {}L + c);",
                    i as i64 * cp
                )
            });
        }
        let columns = self.dims[self.column];
        let interior: Vec<i64> = (0..columns).filter(|&x| self.is_interior(x)).collect();
        for x in self.border_columns() {
            t.line("{");
            self.column(t, kind, &format!("{x}L"), Some(x));
            t.line("}");
        }
        if let (Some(first), Some(last)) = (interior.first(), interior.last()) {
            t.line(format!("for (long x = {first}L; x <= {last}L; x++) {{"));
            self.column(t, kind, "x", None);
            t.line("}");
        }
        if self.reduce {
            for i in 0..taps.len() {
                t.line(format!("*({kind} *)(wt + {}L + c) += w{i};", i as i64 * cp));
            }
        }
    }

    /// One position: all taps, or those that exist at border column `at`.
    fn column(&self, t: &mut CText, kind: &str, x: &str, at: Option<i64>) {
        let c = &self.column_coord;
        let y_at = format!("y + {x}*{}L + c", self.y.stride(self.column));
        if self.reduce {
            t.line(format!("const {kind} d = *(const {kind} *)({y_at});"));
        } else {
            t.line(format!("{kind} s = {{0}};"));
        }
        for (i, (r, tap)) in self.taps().into_iter().enumerate() {
            if at.is_some_and(|x| !self.column_exists(x, tap)) {
                continue;
            }
            let fixed = self.column_position(0, tap) * c.stride;
            let from = format!(
                "r{r} + {x}*{}L + {fixed}L + c",
                c.coeff(self.column) * c.stride
            );
            let value = format!("*(const {kind} *)({from})");
            t.line(if self.reduce {
                format!("w{i} += d*{value};")
            } else {
                format!("s += w{i}*{value};")
            });
        }
        if !self.reduce {
            t.line(format!("*({kind} *)({y_at}) = s;"));
        }
    }

    /// Nanoseconds while everything is in the nearest cache: each multiply-add loads an element.
    fn predicted_ns(&self, target: &Target) -> f64 {
        let positions: i64 = self.outer.iter().map(|d| self.dims[*d]).product();
        let terms = positions * self.dims[self.column] * self.channels * self.taps().len() as i64;
        let machine = &target.machine;
        let rate = machine.product_operations_per_us.max(1) as f64 * target.threads.max(1) as f64;
        let times = if self.reduce { TWO_LOADS } else { ONE_LOAD };
        2e3 * terms as f64 * times / rate
    }

    /// Sums the parts of a weight gradient.
    fn combine_function(&self, t: &mut CText) {
        let (cp, n_taps) = (self.padded_channels(), self.taps().len() as i64);
        let number = self.vector.element.c_type();
        t.line(format!(
            "static void {}_combine(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "(void)scratch; const {number} *R = (const {number} *)buf[3] + {}L;",
            self.shared_at
        ));
        t.line(format!(
            "{number} *O = ({number} *)buf[2] + {}L;",
            self.w.base
        ));
        t.line(format!(
            "for (long c = {0}L*tid/nt; c < {0}L*(tid + 1)/nt; c++) {{",
            self.channels
        ));
        let rows = self.rows();
        for (i, (r, s)) in self.taps().into_iter().enumerate() {
            let sum: Vec<String> = (0..self.parts)
                .map(|p| format!("R[{}L + c]", (p * n_taps + i as i64) * cp))
                .collect();
            let to = self.tap_offset(&rows[r], s);
            t.line(format!(
                "O[c*{}L + {to}L] = {};",
                self.w.stride(self.lane),
                sum.join(" + ")
            ));
        }
        t.close(2);
    }
}
