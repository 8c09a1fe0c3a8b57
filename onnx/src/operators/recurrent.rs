//! Recurrent layers: RNN, GRU, LSTM.

use super::activation::{Activation, clipped};
use super::products::{matrix, matrix_mut, multiply};
use super::real::{Real, in_real};
use super::{Call, Inference, Operator};
use crate::fact::Fact;
use crate::tensor::Tensor;
use graph::SymExpr;

pub const ROWS: &[Operator] = &[
    Operator::new(
        "RNN",
        infer,
        |call| in_real!(call.input(0)?.element(), R => layer::<R>(call, Cell::Rnn)),
    ),
    Operator::new(
        "GRU",
        infer,
        |call| in_real!(call.input(0)?.element(), R => layer::<R>(call, Cell::Gru)),
    ),
    Operator::new(
        "LSTM",
        infer,
        |call| in_real!(call.input(0)?.element(), R => layer::<R>(call, Cell::Lstm)),
    ),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Cell {
    Rnn,
    Gru,
    Lstm,
}

impl Cell {
    fn gates(self) -> usize {
        match self {
            Cell::Rnn => 1,
            Cell::Gru => 3,
            Cell::Lstm => 4,
        }
    }

    fn activations(self) -> &'static [&'static str] {
        match self {
            Cell::Rnn => &["Tanh"],
            Cell::Gru => &["Sigmoid", "Tanh"],
            Cell::Lstm => &["Sigmoid", "Tanh", "Tanh"],
        }
    }
}

fn infer(cx: &Inference) -> Option<Vec<Fact>> {
    let (x, r) = (cx.shape(0)?, cx.shape(2)?);
    let ([first, second, _], [directions, _, hidden]) = (x, r) else {
        return None;
    };
    let own = |e: &SymExpr| e.clone();
    let (y, last) = if cx.attributes.flag("layout") {
        let (batch, steps) = (own(first), own(second));
        (
            vec![batch.clone(), steps, own(directions), own(hidden)],
            vec![batch, own(directions), own(hidden)],
        )
    } else {
        let (steps, batch) = (own(first), own(second));
        (
            vec![steps, own(directions), batch.clone(), own(hidden)],
            vec![own(directions), batch, own(hidden)],
        )
    };
    let shapes = [y, last.clone(), last];
    let facts = shapes
        .into_iter()
        .map(|s| Fact::new(cx.element(0), Some(s)));
    Some(facts.take(cx.node.output.len()).collect())
}

/// The activations of all directions, one direction after the other.
fn activations<R: Real>(
    call: &Call,
    cell: Cell,
    directions: usize,
) -> Result<Vec<Activation<R>>, String> {
    let given = call.attributes.get("activations").map(|a| {
        let text = |s: &bytes::Bytes| String::from_utf8_lossy(s).into_owned();
        a.strings.iter().map(text).collect::<Vec<_>>()
    });
    let default = || {
        let names = cell.activations().iter().map(ToString::to_string);
        let n = cell.activations().len() * directions;
        names.cycle().take(n).collect()
    };
    let names: Vec<String> = given.filter(|g| !g.is_empty()).unwrap_or_else(default);
    if names.len() != cell.activations().len() * directions {
        return Err(format!("{} activations do not fit", names.len()));
    }
    let floats = |name: &str| call.attributes.floats(name).unwrap_or(&[]).iter();
    let mut alphas = floats("activation_alpha");
    let mut betas = floats("activation_beta");
    let each = |name: &String| Activation::named(name, &mut alphas, &mut betas);
    names.iter().map(each).collect()
}

/// Sizes of a layer.
struct Sizes {
    steps: usize,
    batch: usize,
    input: usize,
    hidden: usize,
    directions: usize,
    batch_first: bool,
}

impl Sizes {
    fn new(call: &Call, cell: Cell) -> Result<Sizes, String> {
        let (x, w, r) = (call.input(0)?, call.input(1)?, call.input(2)?);
        let batch_first = call.attributes.flag("layout");
        let directions = match call.attributes.text("direction").unwrap_or("forward") {
            "bidirectional" => 2,
            "forward" | "reverse" => 1,
            other => return Err(format!("the direction `{other}` is not known")),
        };
        let ([a, b, input], [_, rows, hidden]) = (&x.shape[..], &r.shape[..]) else {
            return Err("its input or weights do not have three dimensions".to_string());
        };
        let (steps, batch) = if batch_first { (*b, *a) } else { (*a, *b) };
        let fits = *rows == cell.gates() * hidden
            && r.shape[0] == directions
            && w.shape == [directions, *rows, *input];
        if !fits {
            return Err(format!(
                "weights of sizes {:?} and {:?} do not fit",
                w.shape, r.shape
            ));
        }
        Ok(Sizes {
            steps,
            batch,
            input: *input,
            hidden: *hidden,
            directions,
            batch_first,
        })
    }

    /// The input as `[steps, batch, input]`, in whichever layout it is given.
    fn steps_first<R: Copy>(&self, x: &[R]) -> Vec<R> {
        if !self.batch_first {
            return x.to_vec();
        }
        let mut all = Vec::with_capacity(x.len());
        for step in 0..self.steps {
            for b in 0..self.batch {
                all.extend_from_slice(&x[(b * self.steps + step) * self.input..][..self.input]);
            }
        }
        all
    }

    /// One direction's state as `[batch, hidden]`, in whichever layout it is given; zeros if it is not given.
    fn state<R: Real>(&self, given: Option<&Tensor>, direction: usize) -> Result<Vec<R>, String> {
        let n = self.batch * self.hidden;
        let Some(given) = given else {
            return Ok(vec![R::zero(); n]);
        };
        let v = R::read(given)?;
        if v.len() != n * self.directions {
            return Err(format!("a state of sizes {:?} does not fit", given.shape));
        }
        let row = |b: usize| match self.batch_first {
            true => (b * self.directions + direction) * self.hidden,
            false => (direction * self.batch + b) * self.hidden,
        };
        Ok((0..self.batch)
            .flat_map(|b| v[row(b)..][..self.hidden].to_vec())
            .collect())
    }

    /// The states of all directions in the layout of the outputs, with its sizes.
    fn last<R: Real>(&self, states: &[Vec<R>]) -> (Vec<usize>, Vec<R>) {
        let (b, d, h) = (self.batch, self.directions, self.hidden);
        if !self.batch_first {
            return (vec![d, b, h], states.concat());
        }
        let mut all = Vec::new();
        for at in 0..b {
            states
                .iter()
                .for_each(|s| all.extend_from_slice(&s[at * h..][..h]));
        }
        (vec![b, d, h], all)
    }
}

/// One direction's parameters.
struct Direction<'a, R> {
    cell: Cell,
    hidden: usize,
    /// `[gates·hidden, hidden]`.
    r: &'a [R],
    /// Bias of the input's part and of the state's part, `[gates·hidden]` each.
    bias: Option<(&'a [R], &'a [R])>,
    /// Weights of the cell in the gates i, o, f.
    peepholes: Option<&'a [R]>,
    activations: &'a [Activation<R>],
    clip: R,
    linear_before_reset: bool,
    input_forget: bool,
}

fn layer<R: Real>(call: &Call, cell: Cell) -> Result<Vec<Tensor>, String> {
    let sizes = Sizes::new(call, cell)?;
    let (steps, batch, hidden) = (sizes.steps, sizes.batch, sizes.hidden);
    let (element, width) = (call.input(0)?.element(), cell.gates() * hidden);
    let x = sizes.steps_first(&R::read(call.input(0)?)?);
    let (w, r) = (R::read(call.input(1)?)?, R::read(call.input(2)?)?);
    let optional = |at: usize, n: usize| match call.optional(at) {
        None => Ok(None),
        Some(t) if t.len() == n * sizes.directions => R::read(t).map(Some),
        Some(t) => Err(format!(
            "its input {at} of sizes {:?} does not fit",
            t.shape
        )),
    };
    let bias = optional(3, 2 * width)?;
    let peepholes = if cell == Cell::Lstm {
        optional(7, 3 * hidden)?
    } else {
        None
    };
    let lengths = match call.optional(4) {
        Some(_) => call.ints(4)?,
        None => vec![steps as i64; batch],
    };
    if lengths.len() != batch || lengths.iter().any(|l| !(0..=steps as i64).contains(l)) {
        return Err("its lengths do not fit".to_string());
    }
    let activations = activations::<R>(call, cell, sizes.directions)?;
    let backward_first = call.attributes.text("direction") == Some("reverse");
    let each = cell.activations().len();
    let mut y = vec![R::zero(); steps * sizes.directions * batch * hidden];
    let (mut last_h, mut last_c) = (Vec::new(), Vec::new());
    for d in 0..sizes.directions {
        let direction = Direction {
            cell,
            hidden,
            r: &r[d * width * hidden..][..width * hidden],
            bias: bias
                .as_ref()
                .map(|b| b[d * 2 * width..][..2 * width].split_at(width)),
            peepholes: peepholes
                .as_ref()
                .map(|p| &p[d * 3 * hidden..][..3 * hidden]),
            activations: &activations[d * each..][..each],
            clip: R::of(
                call.attributes
                    .float("clip")
                    .map_or(f64::INFINITY, f64::from),
            ),
            linear_before_reset: call.attributes.flag("linear_before_reset"),
            input_forget: call.attributes.flag("input_forget"),
        };
        let w = matrix(
            &w[d * width * sizes.input..][..width * sizes.input],
            width,
            sizes.input,
        )?;
        let mut projected = vec![R::zero(); steps * batch * width];
        if !projected.is_empty() && sizes.input > 0 {
            let to = matrix_mut(&mut projected, steps * batch, width)?;
            multiply(matrix(&x, steps * batch, sizes.input)?, w.t(), to);
        }
        let mut h = sizes.state::<R>(call.optional(5), d)?;
        let mut c = match cell {
            Cell::Lstm => sizes.state::<R>(call.optional(6), d)?,
            _ => Vec::new(),
        };
        for turn in 0..steps {
            // The step of each sequence in this turn; `None` beyond its end.
            let backward = backward_first || d == 1;
            let at = |b: usize| {
                let length = lengths[b] as usize;
                (turn < length).then(|| if backward { length - 1 - turn } else { turn })
            };
            let next = direction.step(&projected, &at, &h, &mut c)?;
            for b in 0..batch {
                let Some(step) = at(b) else { continue };
                let row = &next[b * hidden..][..hidden];
                h[b * hidden..][..hidden].copy_from_slice(row);
                let to = match sizes.batch_first {
                    true => (b * steps + step) * sizes.directions + d,
                    false => (step * sizes.directions + d) * batch + b,
                };
                y[to * hidden..][..hidden].copy_from_slice(row);
            }
        }
        last_h.push(h);
        last_c.push(c);
    }
    let shape = match sizes.batch_first {
        true => [batch, steps, sizes.directions, hidden],
        false => [steps, sizes.directions, batch, hidden],
    };
    let mut outputs = vec![R::tensor(element, &shape, y)?];
    let states = [Some(last_h), (cell == Cell::Lstm).then_some(last_c)];
    for states in states.into_iter().flatten() {
        let (shape, values) = sizes.last(&states);
        outputs.push(R::tensor(element, &shape, values)?);
    }
    outputs.truncate(call.node.output.len());
    Ok(outputs)
}

impl<R: Real> Direction<'_, R> {
    /// The next `[batch, hidden]` from `h`; `c` is a cell's state and is replaced. `projected` is
    /// `[steps, batch, gates·hidden]`, of which sequence `b` is at step `at(b)`.
    fn step(
        &self,
        projected: &[R],
        at: &dyn Fn(usize) -> Option<usize>,
        h: &[R],
        c: &mut [R],
    ) -> Result<Vec<R>, String> {
        let (hidden, width) = (self.hidden, self.cell.gates() * self.hidden);
        let batch = h.len() / hidden.max(1);
        let mut recurrent = vec![R::zero(); batch * width];
        if recurrent.is_empty() {
            return Ok(Vec::new());
        }
        let r = matrix(self.r, width, hidden)?;
        let to = matrix_mut(&mut recurrent, batch, width)?;
        multiply(matrix(h, batch, hidden)?, r.t(), to);
        let mut next = h.to_vec();
        for b in 0..batch {
            let Some(step) = at(b) else { continue };
            let x = &projected[(step * batch + b) * width..][..width];
            let rec = &recurrent[b * width..][..width];
            let h = &h[b * hidden..][..hidden];
            let next = &mut next[b * hidden..][..hidden];
            match self.cell {
                Cell::Rnn => self.rnn(x, rec, next),
                Cell::Gru => self.gru(x, rec, h, next),
                Cell::Lstm => self.lstm(x, rec, &mut c[b * hidden..][..hidden], next),
            }
        }
        Ok(next)
    }

    fn bias(&self, at: usize) -> (R, R) {
        self.bias
            .map_or((R::zero(), R::zero()), |(w, r)| (w[at], r[at]))
    }

    fn both(&self, at: usize) -> R {
        let (w, r) = self.bias(at);
        w + r
    }

    fn clipped(&self, x: R) -> R {
        clipped(x, -self.clip, self.clip)
    }

    fn rnn(&self, x: &[R], rec: &[R], next: &mut [R]) {
        for (n, next) in next.iter_mut().enumerate() {
            *next = self.activations[0].of(self.clipped(x[n] + rec[n] + self.both(n)));
        }
    }

    fn gru(&self, x: &[R], rec: &[R], h: &[R], next: &mut [R]) {
        let size = self.hidden;
        let gate =
            |at: usize| self.activations[0].of(self.clipped(x[at] + rec[at] + self.both(at)));
        let reset: Vec<R> = (size..2 * size).map(gate).collect();
        for (n, next) in next.iter_mut().enumerate() {
            let at = 2 * size + n;
            let (of_input, of_state) = self.bias(at);
            let inner = if self.linear_before_reset {
                reset[n] * (rec[at] + of_state)
            } else {
                let row = &self.r[at * size..][..size];
                let products = row.iter().zip(h).zip(&reset);
                of_state + products.map(|((w, h), r)| *w * *h * *r).sum::<R>()
            };
            let candidate = self.activations[1].of(self.clipped(x[at] + inner + of_input));
            let update = gate(n);
            *next = (R::one() - update) * candidate + update * h[n];
        }
    }

    fn lstm(&self, x: &[R], rec: &[R], c: &mut [R], next: &mut [R]) {
        let size = self.hidden;
        let [f, g, h] = [0, 1, 2].map(|n| self.activations[n]);
        let peep = |gate: usize, n: usize| self.peepholes.map_or(R::zero(), |p| p[gate * size + n]);
        for n in 0..size {
            let sum = |gate: usize| {
                let at = gate * size + n;
                x[at] + rec[at] + self.both(at)
            };
            let input = f.of(self.clipped(sum(0) + peep(0, n) * c[n]));
            let forget = match self.input_forget {
                true => R::one() - input,
                false => f.of(self.clipped(sum(2) + peep(2, n) * c[n])),
            };
            let candidate = g.of(self.clipped(sum(3)));
            c[n] = forget * c[n] + input * candidate;
            let output = f.of(self.clipped(sum(1) + peep(1, n) * c[n]));
            next[n] = output * h.of(c[n]);
        }
    }
}
