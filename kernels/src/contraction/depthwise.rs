//! Depthwise convolutions: one channel dim in all three operands, contiguous, becomes the vector.
//! Forward and data gradient keep the taps' weights in registers along an output row; the weight
//! gradient keeps the taps' sums. Rows outside the image read a row of zeros; border columns are
//! written out with the taps they have. A prologue makes each row of the image once for each thread that needs
//! it, and keeps as many as a window has.

use super::access::{Access, Coord, Problem};
use super::driver::zero_fill;
use super::gather::GatherForm;
use super::text::{CText, Vector, preamble};
use super::{ContractionTarget, EmittedContraction, Hooks, Launch, NoFastForm, Roles};

mod text;

/// Most taps, and most terms of border columns that are written out.
const MOST_TAPS: usize = 128;
const MOST_BORDER_TERMS: usize = 400;
/// The time of a multiply-add that loads one of its factors, relative to one at a product's peak, and the time of
/// one that loads both.
const ONE_LOAD: f64 = 3.0;
const TWO_LOADS: f64 = 4.5;
/// Positions whose sums are kept together.
const POSITIONS_IN_BAND: i64 = 64;
/// Bands for each thread, so that all have work.
const BANDS_PER_THREAD: i64 = 8;
/// Rows in scratch begin at a cache line.
const ALIGNED_NUMBERS: i64 = 16;

fn aligned(numbers: i64) -> i64 {
    (numbers + ALIGNED_NUMBERS - 1) / ALIGNED_NUMBERS * ALIGNED_NUMBERS
}

/// A depthwise problem, seen from its image operand: positions move the window, taps are inside it.
pub struct Depthwise {
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
    /// The functions that make the image, and the other operand of a weight gradient.
    x_prologue: Option<String>,
    y_prologue: Option<String>,
    epilogue: Option<String>,
    sums: Option<String>,
}

/// Emits all parts of `form` if each is depthwise; `None` if this form does not fit one of them.
pub fn emit(
    name: &str,
    form: &GatherForm,
    hooks: &Hooks,
    vector: Vector,
    target: &ContractionTarget,
) -> Result<Option<EmittedContraction>, NoFastForm> {
    let Some(mut parts) = recognize(form, hooks, vector, target)? else {
        return Ok(None);
    };
    let mut shared = 0;
    for (i, part) in parts.iter_mut().enumerate() {
        if part.reduce && hooks.follow() {
            return Err(NoFastForm::SplitSum);
        }
        part.prefix = format!("{name}_p{i}");
        part.shared_at = shared;
        part.epilogue.clone_from(&hooks.epilogue);
        part.sums.clone_from(&hooks.sums);
        shared += part.shared_numbers();
    }
    let mut t = CText::default();
    t.raw(&preamble(vector));
    for p in &parts {
        p.row_function(&mut t);
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
        .map(Depthwise::thread_numbers)
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
        products: vector.element.dtype(),
        takes_prologues: false,
        cuts: None,
        choices: Vec::new(),
        sum_slots: match &hooks.sums {
            Some(_) => parts[0].bands(target.threads.max(1)),
            None => 0,
        },
        finishes_in_blocks: !parts[0].reduce,
        pitch: None,
        roles: parts[0].roles(),
    }))
}

/// All parts of `form`, if each is depthwise.
pub fn recognize(
    form: &GatherForm,
    hooks: &Hooks,
    vector: Vector,
    target: &ContractionTarget,
) -> Result<Option<Vec<Depthwise>>, NoFastForm> {
    if form.parts.is_empty() {
        return Ok(None);
    }
    let mut parts = Vec::new();
    for p in &form.parts {
        let Some(mut part) = Depthwise::recognize(p, vector, target) else {
            return Ok(None);
        };
        let mut prologues = [hooks.prologue_a.clone(), hooks.prologue_b.clone()];
        part.x_prologue = prologues[part.x_buf].take();
        let other = prologues[1 - part.x_buf].take();
        if other.is_some() && !part.reduce {
            return Err(NoFastForm::ComputedWeights);
        }
        part.y_prologue = other;
        parts.push(part);
    }
    Ok(Some(parts))
}

impl Depthwise {
    fn recognize(p: &Problem, vector: Vector, target: &ContractionTarget) -> Option<Depthwise> {
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
            x_prologue: None,
            y_prologue: None,
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

    /// Numbers of a row of the image, from its first position on.
    fn row_numbers(&self) -> i64 {
        let c = &self.column_coord;
        let last = if c.guarded {
            c.size - 1
        } else {
            self.column_position(self.dims[self.column] - 1, self.column_taps() - 1)
        };
        last.max(0) * c.stride + self.channels
    }

    /// Length of the row that stands in for rows outside the image.
    fn zero_numbers(&self) -> i64 {
        match self.row_guards().next() {
            Some(_) => self.row_numbers() - self.channels + self.padded_channels(),
            None => 0,
        }
    }

    /// Coordinates of the image along which a window has rows, each with how many positions it spans.
    fn row_coords(&self) -> Vec<(&Coord, i64)> {
        let span = |c: &Coord| -> i64 {
            let steps = self
                .row_taps
                .iter()
                .map(|&d| c.coeff(d) * (self.dims[d] - 1));
            1 + steps.sum::<i64>()
        };
        let coords = self.x.coords.iter().map(|c| (c, span(c)));
        coords.filter(|(_, span)| *span > 1).collect()
    }

    /// Rows that a prologue has made and that are kept.
    fn kept_rows(&self) -> i64 {
        match self.x_prologue {
            Some(_) => self.row_coords().iter().map(|c| c.1).product(),
            None => 0,
        }
    }

    /// Numbers of a row of the other operand of a weight gradient.
    fn y_row_numbers(&self) -> i64 {
        (self.dims[self.column] - 1) * self.y.stride(self.column) + self.channels
    }

    /// Where the made rows of the image, and that of the other operand, lie in scratch; and where it ends.
    fn made_rows_at(&self) -> [i64; 3] {
        let x = aligned(self.weight_numbers() + self.zero_numbers());
        let y = x + self.kept_rows() * aligned(self.row_numbers());
        let y_row = match self.y_prologue {
            Some(_) => aligned(self.y_row_numbers()),
            None => 0,
        };
        [x, y, y + y_row]
    }

    fn thread_numbers(&self) -> i64 {
        self.made_rows_at()[2]
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
    fn predicted_ns(&self, target: &ContractionTarget) -> f64 {
        let positions: i64 = self.outer.iter().map(|d| self.dims[*d]).product();
        let terms = positions * self.dims[self.column] * self.channels * self.taps().len() as i64;
        let machine = &target.machine;
        let rate = machine.product_operations_per_us.max(1) as f64 * target.threads.max(1) as f64;
        let times = if self.reduce { TWO_LOADS } else { ONE_LOAD };
        2e3 * terms as f64 * times / rate
    }
}
