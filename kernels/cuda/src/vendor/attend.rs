//! What a call of attention means, executed on the host.
//!
//! Written from the formulas of FlashAttention (arXiv 2205.14135) in f64, rounded once where a result is
//! stored, so that whole programs with calls run in tests without PyTorch. Never on a device.

use super::Call;
use super::attention::{CallOperand, Pass};
use crate::emulate::{EmulateError, Fault, FaultKind, Memory, Traffic};

/// Runs a call on the emulator's memory; `buffers` are those of its parameters.
///
/// # Errors
/// An operand with an element that was never written, or outside of its buffer.
pub(crate) fn attend(
    call: &Call,
    memory: &mut Memory,
    buffers: &[usize],
) -> Result<(), EmulateError> {
    let operands = Operands::read(call, memory, buffers)?;
    let results = match call.pass {
        Pass::Forward => operands.forward(),
        Pass::Backward => operands.backward(),
    };
    let failed = |problem| EmulateError::Launch {
        kernel: call.name.clone(),
        origin: String::new(),
        problem,
    };
    for (operand, buffer) in call.operands.iter().zip(buffers) {
        let found = results.iter().find(|(role, _)| *role == operand.role);
        let Some((_, values)) = found.filter(|_| operand.is_written) else {
            continue;
        };
        for (place, value) in operand.view.places().into_iter().zip(values) {
            if !memory.put(*buffer, place, operand.dtype.round(*value)) {
                let role = operand.role;
                return Err(failed(format!(
                    "element {place} of {role} is not in its buffer"
                )));
            }
        }
    }
    Ok(())
}

/// What a call must move: each element of its operands once, and its results twice more, since the
/// operator returns them elsewhere.
pub(crate) fn call_traffic(call: &Call) -> Traffic {
    let bytes = |o: &CallOperand| o.view.elements() as u64 * o.dtype.bytes() as u64;
    let of = |is_written| {
        let own = call.operands.iter().filter(|o| o.is_written == is_written);
        own.map(bytes).sum::<u64>()
    };
    let copied = call.copied_bytes() / 2;
    Traffic::once(of(false) + copied, of(true) + copied)
}

/// Values by role, each row-major in its view.
struct Operands<'c> {
    call: &'c Call,
    read: Vec<(&'static str, Vec<f64>)>,
    /// Heads of all sequences, and of one.
    heads: usize,
    heads_of_one: usize,
    rows: usize,
    columns: usize,
    width: usize,
}

impl<'c> Operands<'c> {
    fn read(call: &'c Call, memory: &Memory, buffers: &[usize]) -> Result<Self, EmulateError> {
        let mut read = Vec::new();
        for (operand, buffer) in call.operands.iter().zip(buffers) {
            if operand.is_written {
                continue;
            }
            let (all, known) = (memory.values(*buffer), memory.initialized(*buffer));
            let places = operand.view.places();
            if let Some(at) = places.iter().find(|at| known.get(**at) != Some(&1)) {
                return Err(EmulateError::Faults(vec![Fault {
                    kernel: call.name.clone(),
                    origin: String::new(),
                    block: 0,
                    thread: 0,
                    kind: FaultKind::Uninitialized {
                        array: memory.name(*buffer).to_string(),
                        element: *at as i64,
                    },
                }]));
            }
            read.push((operand.role, places.into_iter().map(|at| all[at]).collect()));
        }
        let size = |role: &str, d: usize| {
            let sizes = call.operand(role).map(|o| o.view.sizes.as_slice());
            sizes.and_then(|s| s.get(d)).map_or(1, |n| *n as usize)
        };
        Ok(Operands {
            call,
            read,
            heads: size("q", 0) * size("q", 1),
            heads_of_one: size("q", 1),
            rows: size("q", 2),
            columns: size("k", 2),
            width: size("q", 3),
        })
    }

    fn of(&self, role: &str) -> &[f64] {
        let found = self.read.iter().find(|(own, _)| *own == role);
        found.map_or(&[], |(_, values)| values)
    }

    /// Row `l` of head `h` in an operand with `rows` rows.
    fn row(&self, role: &str, rows: usize, h: usize, l: usize) -> &[f64] {
        let at = (h * rows + l) * self.width;
        &self.of(role)[at..at + self.width]
    }

    fn score(&self, h: usize, l: usize, m: usize) -> f64 {
        if self.call.is_causal && m > l {
            return f64::NEG_INFINITY;
        }
        let (q, k) = (
            self.row("q", self.rows, h, l),
            self.row("k", self.columns, h, m),
        );
        dot(q, k) * self.call.scale + self.added(h, l, m)
    }

    /// What the mask adds to a score; its dimensions of one element are broadcast.
    fn added(&self, h: usize, l: usize, m: usize) -> f64 {
        let Some(mask) = self.call.operand("mask") else {
            return 0.0;
        };
        let heads = self.heads_of_one.max(1);
        let index = [h / heads, h % heads, l, m];
        let sizes = &mask.view.sizes;
        let index = &index[4 - sizes.len()..];
        let at = sizes.iter().zip(index).fold(0, |at, (size, i)| {
            at * *size as usize + if *size == 1 { 0 } else { *i }
        });
        self.of("mask")[at]
    }

    fn forward(&self) -> Vec<(&'static str, Vec<f64>)> {
        let (mut y, mut lse) = (Vec::new(), Vec::new());
        for h in 0..self.heads {
            for l in 0..self.rows {
                let scores: Vec<f64> = (0..self.columns).map(|m| self.score(h, l, m)).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let own = most + scores.iter().map(|s| (s - most).exp()).sum::<f64>().ln();
                let mut sums = vec![0.0; self.width];
                for (m, s) in scores.iter().enumerate() {
                    add(
                        &mut sums,
                        (s - own).exp(),
                        self.row("v", self.columns, h, m),
                    );
                }
                y.extend(sums);
                lse.push(own);
            }
        }
        vec![("y", y), ("lse", lse)]
    }

    fn backward(&self) -> Vec<(&'static str, Vec<f64>)> {
        let zeros = |rows: usize| vec![0.0; self.heads * rows * self.width];
        let (mut dq, mut dk, mut dv) = (zeros(self.rows), zeros(self.columns), zeros(self.columns));
        for h in 0..self.heads {
            for l in 0..self.rows {
                let own = self.of("lse")[h * self.rows + l];
                let dy = self.row("dy", self.rows, h, l);
                let delta = dot(dy, self.row("y", self.rows, h, l));
                let query = (h * self.rows + l) * self.width;
                for m in 0..self.columns {
                    let p = (self.score(h, l, m) - own).exp();
                    let dp = dot(dy, self.row("v", self.columns, h, m));
                    let ds = p * (dp - delta) * self.call.scale;
                    let key = (h * self.columns + m) * self.width;
                    let (q, k) = (
                        self.row("q", self.rows, h, l),
                        self.row("k", self.columns, h, m),
                    );
                    add(&mut dq[query..query + self.width], ds, k);
                    add(&mut dk[key..key + self.width], ds, q);
                    add(&mut dv[key..key + self.width], p, dy);
                }
            }
        }
        vec![("dq", dq), ("dk", dk), ("dv", dv)]
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn add(sums: &mut [f64], factor: f64, values: &[f64]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum += factor * value;
    }
}
