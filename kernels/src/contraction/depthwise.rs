//! Depthwise convolutions: one channel dim in all three operands, contiguous, becomes the vector.
//! Forward and data gradient keep the taps' weights in registers along an output row; the weight
//! gradient keeps the taps' sums. Rows outside the image read a row of zeros; border columns are
//! written out with the taps they have. Takes no prologue.

use super::access::{Access, Coord, Problem};
use super::driver::zero_fill;
use super::gather::GatherForm;
use super::text::{CText, Vector, preamble};
use super::{EmittedContraction, Hooks, Launch, NoFastForm, Roles, Target};

mod text;

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

    /// Runs of rows whose columns are summed together: some rows each, and enough for all threads.
    fn bands(&self, threads: i64) -> i64 {
        let units: i64 = self.outer.iter().map(|&d| self.dims[d]).product();
        let rows = (POSITIONS_IN_BAND / self.dims[self.column]).max(1);
        (units / rows).max(BANDS_PER_THREAD * threads).min(units)
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
}
