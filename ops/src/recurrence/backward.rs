//! The backward pass of a recurrence over all its steps.

use super::unrolled::Unrolled;
use super::{Order, Sizes, cells, evaluated, tensors};
use crate::op::{Call, Op, OpError, Sample, TensorType};
use crate::reference::{constant, required};
use graph::{Attr, Builder, CellGradient, ContainerId, Expr, Tensor};

/// `recurrence_gradient` (w, first states `[B, H]`, …, states `[T, B, H]`, …, kept?, gradients of states?, …) → dx,
/// dq `[T, B, G·H]`, gradients of first states `[B, H]`, …. `dq` is asked for where it differs from `dx`.
#[derive(Debug)]
pub struct RecurrenceGradient;

fn gradient_of(call: &Call) -> Result<CellGradient, OpError> {
    let found = CellGradient::from_attrs(&call.library.attrs);
    found.ok_or_else(|| call.shape_error("the attributes hold no gradient of a cell"))
}

fn gradient_sizes(call: &Call, cell: &CellGradient) -> Result<Sizes, OpError> {
    let n_states = cell.states.len();
    for n in 0..2 * n_states {
        call.input(1 + n)?;
    }
    Sizes::new(call, (1 + n_states, 0), &|sizes| {
        let mut shapes = vec![vec![sizes.times(cell.x.len()), sizes.h.clone()]];
        shapes.extend(cell.states.iter().map(|_| sizes.state()));
        shapes.extend(cell.states.iter().map(|_| sizes.all(1)));
        shapes.push(sizes.all(cell.kept().len()));
        shapes.extend(cell.states.iter().map(|_| sizes.all(1)));
        shapes
    })
}

impl Op for RecurrenceGradient {
    fn name(&self) -> &'static str {
        "recurrence_gradient"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let cell = gradient_of(call)?;
        let sizes = gradient_sizes(call, &cell)?;
        let mut shapes = vec![sizes.all(cell.x.len()), sizes.all(cell.q.len())];
        shapes.extend(cell.states.iter().map(|_| sizes.state()));
        Ok(sizes.typed(shapes))
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let (cell, types) = (gradient_of(call)?, self.infer(call)?);
        let [n_steps, b, h] = gradient_sizes(call, &cell)?.constants(call)?;
        let (n_states, gates, kept) = (cell.states.len(), cell.x.len(), cell.kept());
        let at = |n: usize| required(call, inputs, n).map(Tensor::to_f64);
        let several = |from: usize| (0..n_states).map(|k| at(from + k)).collect();
        let (w, first) = (at(0)?, several(1));
        let states: Result<Vec<Vec<f64>>, OpError> = several(1 + n_states);
        let (first, states): (Vec<Vec<f64>>, _) = (first?, states?);
        let optional = |n: usize| inputs.get(n).copied().flatten().map(Tensor::to_f64);
        let all_kept = optional(1 + 2 * n_states);
        let given: Vec<_> = (0..n_states)
            .map(|k| optional(2 + 2 * n_states + k))
            .collect();
        let mut carried = vec![vec![0.0; b * h]; n_states];
        let mut dx = vec![0.0; n_steps * b * gates * h];
        let mut dq = dx.clone();
        let order = Order::from_call(call, n_steps as i64)?;
        for place in order.places().into_iter().rev() {
            let t = place as usize;
            for (r, j) in (0..b).flat_map(|r| (0..h).map(move |j| (r, j))) {
                let (own, here) = (r * h + j, (t * b + r) * h + j);
                let before = |k: usize| match order.before(place) {
                    None => first[k][own],
                    Some(before) => states[k][(before as usize * b + r) * h + j],
                };
                let mut known: Vec<f64> = (0..n_states).map(before).collect();
                let value = |n: usize| match cell.states.iter().position(|s| *s == n) {
                    Some(k) => states[k][here],
                    None => {
                        let k = kept.iter().position(|s| *s == n).unwrap_or_default();
                        let row = (t * b + r) * kept.len() + k;
                        all_kept.as_ref().map_or(f64::NAN, |list| list[row * h + j])
                    }
                };
                known.extend((0..cell.n_values).map(value));
                let of_state =
                    |k: usize| carried[k][own] + given[k].as_ref().map_or(0.0, |list| list[here]);
                known.extend((0..n_states).map(of_state));
                for g in 0..gates {
                    let place = ((t * b + r) * gates + g) * h + j;
                    dx[place] = evaluated(&cell.x[g], &known);
                    dq[place] = evaluated(&cell.q[g], &known);
                }
                for (k, before) in cell.before.iter().enumerate() {
                    carried[k][own] = evaluated(before, &known);
                }
            }
            for (r, j) in (0..b).flat_map(|r| (0..h).map(move |j| (r, j))) {
                let row = &dq[(t * b + r) * gates * h..][..gates * h];
                let product = row.iter().enumerate().map(|(k, d)| d * w[k * h + j]);
                carried[0][r * h + j] += product.sum::<f64>();
            }
        }
        tensors(call, &types, [vec![dx, dq], carried].concat())
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let cell = gradient_of(call)?;
        let sizes = gradient_sizes(call, &cell)?;
        let (n_states, n_steps) = (cell.states.len(), constant(call, &sizes.t)?);
        let several = |from: usize| (0..n_states).map(|k| call.input_id(from + k)).collect();
        let (w, first): (_, Result<Vec<ContainerId>, OpError>) = (call.input_id(0)?, several(1));
        let all: Result<Vec<ContainerId>, OpError> = several(1 + n_states);
        let (first, all) = (first?, all?);
        let mut loops = Unrolled {
            builder,
            sizes: &sizes,
        };
        let zero = loops.element(&Expr::float(0.0), &[])?;
        let sum = Expr::In(0).add(Expr::In(1));
        let mut carried = vec![zero; n_states];
        let mut steps = [Vec::new(), Vec::new()];
        let order = Order::from_call(call, n_steps)?;
        for t in order.places().into_iter().rev() {
            let mut table = Vec::new();
            for k in 0..n_states {
                table.push(match order.before(t) {
                    None => first[k],
                    Some(before) => loops.step(all[k], before)?,
                });
            }
            let mut kept = Vec::new();
            if let Some(list) = call.optional_id(1 + 2 * n_states) {
                let own = loops.step(list, t)?;
                kept = loops.parts(own, cell.kept().len())?;
            }
            let mut kept = kept.into_iter();
            for n in 0..cell.n_values {
                table.push(match cell.states.iter().position(|s| *s == n) {
                    Some(k) => loops.step(all[k], t)?,
                    None => kept
                        .next()
                        .ok_or_else(|| call.shape_error("no kept values"))?,
                });
            }
            for (k, carried) in carried.iter().enumerate() {
                table.push(match call.optional_id(2 + 2 * n_states + k) {
                    Some(list) => {
                        let own = loops.step(list, t)?;
                        loops.element(&sum, &[own, *carried])?
                    }
                    None => *carried,
                });
            }
            for (steps, list) in steps.iter_mut().zip([&cell.x, &cell.q]) {
                let parts = list.iter().map(|e| loops.element(e, &table));
                let parts = parts.collect::<Result<Vec<_>, _>>()?;
                steps.push(loops.joined(&parts, 1)?);
            }
            for (k, before) in cell.before.iter().enumerate() {
                carried[k] = loops.element(before, &table)?;
            }
            let dq = steps[1][steps[1].len() - 1];
            let through = loops.product(dq, w, "bk,kh->bh")?;
            carried[0] = loops.element(&sum, &[carried[0], through])?;
        }
        for (n, mut list) in steps.into_iter().enumerate() {
            list.reverse();
            loops.stack(&order.in_place(list), call.output_id(n))?;
        }
        for (n, value) in carried.into_iter().enumerate() {
            loops.copy(value, call.output_id(2 + n));
        }
        Ok(())
    }

    fn samples(&self) -> Vec<Sample> {
        let (t, b, h): (i64, i64, i64) = (3, 2, 3);
        let mut all = Vec::new();
        for (name, cell) in cells::all() {
            let Some(gradient) = cell.gradient() else {
                continue;
            };
            let (w, state, rows) = ([cell.gates as i64 * h, h], [b, h], [t, b, h]);
            let n_kept = cell.kept().len() as i64;
            let kept = [t, b, n_kept * h];
            let n_states = cell.n_states();
            let mut shapes: Vec<&[i64]> = vec![&w];
            shapes.extend(vec![&state[..]; n_states]);
            shapes.extend(vec![&rows[..]; n_states]);
            shapes.push(&kept);
            shapes.extend(vec![&rows[..]; n_states]);
            let title = format!("{name}, gradients of all states");
            let mut sample = Sample::new(&title, &shapes, gradient.attrs())
                // Values of a sigmoid: gates above 1 would amplify gradients from step to step.
                .range(0.05, 0.95)
                .not_differentiable();
            if n_kept == 0 {
                sample = sample.without(1 + 2 * n_states);
            }
            if n_states > 1 {
                let mut other = sample.clone().without(3 + 2 * n_states);
                other.name = format!("{name}, no gradient of the second state, in reverse");
                other.attrs.insert("reverse".into(), Attr::Bool(true));
                all.push(other);
            }
            all.push(sample);
        }
        all
    }
}
