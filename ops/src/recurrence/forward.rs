//! The forward pass of a recurrence, and the rule of its gradient.

use super::unrolled::Unrolled;
use super::{Order, Sizes, cells, evaluated, tensors};
use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reduce::reduce_attrs;
use crate::reference::{constant, required};
use graph::{Attr, Builder, Cell, ContainerId, Expr, Library, SymExpr, Tensor};

/// `recurrence` (x `[T, B, G·H]`, w `[G·H, H]`, b? `[G·H]`, states `[B, H]`, …) → states `[T, B, H]`, …, kept values
/// `[T, B, K·H]` if there are any.
#[derive(Debug)]
pub struct Recurrence;

fn cell_of(call: &Call) -> Result<Cell, OpError> {
    Cell::from_attrs(&call.library.attrs)
        .ok_or_else(|| call.shape_error("the attributes hold no cell"))
}

fn forward_sizes(call: &Call, cell: &Cell) -> Result<Sizes, OpError> {
    for n in 0..cell.n_states() {
        call.input(3 + n)?;
    }
    Sizes::new(call, (0, 1), &|sizes| {
        let gates = sizes.times(cell.gates);
        let weights = vec![gates.clone(), sizes.h.clone()];
        let mut shapes = vec![sizes.all(cell.gates), weights, vec![gates]];
        shapes.extend(cell.states.iter().map(|_| sizes.state()));
        shapes
    })
}

impl Op for Recurrence {
    fn name(&self) -> &'static str {
        "recurrence"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let cell = cell_of(call)?;
        let sizes = forward_sizes(call, &cell)?;
        let mut shapes: Vec<_> = cell.states.iter().map(|_| sizes.all(1)).collect();
        match cell.kept().len() {
            0 => {}
            n => shapes.push(sizes.all(n)),
        }
        Ok(sizes.typed(shapes))
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let (cell, types) = (cell_of(call)?, self.infer(call)?);
        let [n_steps, b, h] = forward_sizes(call, &cell)?.constants(call)?;
        let at = |n: usize| required(call, inputs, n).map(Tensor::to_f64);
        let (x, w, wide, kept) = (at(0)?, at(1)?, cell.gates * h, cell.kept());
        let bias = inputs[2].map(Tensor::to_f64);
        let first = (0..cell.n_states()).map(|k| at(3 + k));
        let mut states: Vec<Vec<f64>> = first.collect::<Result<_, _>>()?;
        let mut made: Vec<Vec<Vec<f64>>> = vec![Vec::new(); types.len()];
        let order = Order::from_call(call, n_steps as i64)?;
        for t in order.places().into_iter().map(|t| t as usize) {
            let before = states.clone();
            let mut all_kept = vec![0.0; b * kept.len() * h];
            for (r, j) in (0..b).flat_map(|r| (0..h).map(move |j| (r, j))) {
                let gate = |g: usize| x[(t * b + r) * wide + g * h + j];
                let product = |g: usize| {
                    let row = g * h + j;
                    let sum: f64 = (0..h).map(|k| before[0][r * h + k] * w[row * h + k]).sum();
                    sum + bias.as_ref().map_or(0.0, |b| b[row])
                };
                let mut known: Vec<f64> = (0..cell.gates).map(gate).collect();
                known.extend((0..cell.gates).map(product));
                known.extend(before.iter().map(|s| s[r * h + j]));
                let first = known.len();
                for value in &cell.values {
                    known.push(evaluated(value, &known));
                }
                for (state, n) in states.iter_mut().zip(&cell.states) {
                    state[r * h + j] = known[first + n];
                }
                for (k, n) in kept.iter().enumerate() {
                    all_kept[(r * kept.len() + k) * h + j] = known[first + n];
                }
            }
            for (steps, state) in made.iter_mut().zip(&states) {
                steps.push(state.clone());
            }
            if let Some(steps) = made.get_mut(cell.n_states()) {
                steps.push(all_kept);
            }
        }
        let made = made.into_iter().map(|steps| order.in_place(steps).concat());
        tensors(call, &types, made.collect())
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let cell = cell_of(call)?;
        let sizes = forward_sizes(call, &cell)?;
        let n_steps = constant(call, &sizes.t)?;
        let (x, w) = (call.input_id(0)?, call.input_id(1)?);
        let first = (0..cell.n_states()).map(|k| call.input_id(3 + k));
        let mut states: Vec<ContainerId> = first.collect::<Result<_, _>>()?;
        let mut loops = Unrolled {
            builder,
            sizes: &sizes,
        };
        let mut made: Vec<Vec<ContainerId>> = vec![Vec::new(); cell.n_states() + 1];
        let order = Order::from_call(call, n_steps)?;
        for t in order.places() {
            let own = loops.step(x, t)?;
            let mut product = loops.product(states[0], w, "bh,kh->bk")?;
            if let Some(bias) = call.optional_id(2) {
                product = loops.element(&Expr::In(0).add(Expr::In(1)), &[product, bias])?;
            }
            let mut table = loops.parts(own, cell.gates)?;
            table.extend(loops.parts(product, cell.gates)?);
            table.extend(&states);
            let first = table.len();
            for value in &cell.values {
                table.push(loops.element(value, &table)?);
            }
            states = cell.states.iter().map(|n| table[first + n]).collect();
            for (steps, state) in made.iter_mut().zip(&states) {
                steps.push(*state);
            }
            if call.output_id(cell.n_states()).is_some() {
                let kept: Vec<_> = cell.kept().iter().map(|n| table[first + n]).collect();
                made[cell.n_states()].push(loops.joined(&kept, 1)?);
            }
        }
        for (n, steps) in made.into_iter().enumerate() {
            loops.stack(&order.in_place(steps), call.output_id(n))?;
        }
        Ok(())
    }

    fn has_gradient(&self, library: &Library, output: usize) -> bool {
        Cell::from_attrs(&library.attrs).is_none_or(|cell| output < cell.n_states())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let cell = cell_of(&g.call)?;
        let (n_states, sizes) = (cell.n_states(), forward_sizes(&g.call, &cell)?);
        let Some(gradient) = cell.gradient() else {
            return Ok(Gradient::Derive);
        };
        let has_kept = !cell.kept().is_empty();
        if has_kept && g.dy(n_states).is_some() {
            return Ok(Gradient::Derive);
        }
        let dstates: Vec<_> = (0..n_states).map(|k| g.dy(k)).collect();
        if dstates.iter().all(Option::is_none) {
            return Ok(g.nothing());
        }
        let mut inputs = vec![Some(g.call.input_id(1)?)];
        for k in 0..n_states {
            inputs.push(Some(g.call.input_id(3 + k)?));
        }
        for k in 0..n_states {
            inputs.push(Some(g.output(k)?));
        }
        inputs.push(if has_kept {
            Some(g.output(n_states)?)
        } else {
            None
        });
        inputs.extend(dstates);
        let mut wanted = vec![true, !gradient.is_shared()];
        wanted.extend((0..n_states).map(|k| g.wants(3 + k)));
        let reverse = g.call.bool_or("reverse", false)?;
        let mut list = gradient.attrs();
        list.insert("reverse".into(), Attr::Bool(reverse));
        let made = builder.op_for("recurrence_gradient", &inputs, list, &wanted)?;
        let dq = made[1].or(made[0]);
        let h = (g.call.input_id(3)?, g.output(0)?);
        let dw = match dq.filter(|_| g.wants(1)) {
            Some(dq) => Some(weight_gradient(builder, &sizes, dq, h, reverse)?),
            None => None,
        };
        let db = match dq.filter(|_| g.wants(2)) {
            Some(dq) => Some(bias_gradient(builder, dq)?),
            None => None,
        };
        let mut all = vec![made[0].filter(|_| g.wants(0)), dw, db];
        all.extend(&made[2..]);
        Ok(Gradient::Rule(all))
    }

    fn samples(&self) -> Vec<Sample> {
        let mut all = Vec::new();
        for (name, cell) in cells::all() {
            for (t, b, h) in [(3, 2, 3), (1, 2, 2), (2, 1, 1)] {
                let wide = cell.gates as i64 * h;
                let x = [t, b, wide];
                let (w, bias, state) = ([wide, h], [wide], [b, h]);
                let mut shapes: Vec<&[i64]> = vec![&x, &w, &bias];
                shapes.extend(cell.states.iter().map(|_| -> &[i64] { &state }));
                let title = format!("{name}, {t} steps of {b} rows of {h}");
                let mut list = cell.attrs();
                if b == 1 {
                    list.insert("reverse".into(), Attr::Bool(true));
                }
                let sample = Sample::new(&title, &shapes, list);
                all.push(if b == 1 { sample.without(2) } else { sample });
            }
        }
        all
    }
}

/// `dw[k, h] = Σ_(t, b) dq[t, b, k]·h_(t−1)[b, h]`, with `h_(t+1)` in reversed time.
fn weight_gradient(
    builder: &mut Builder,
    sizes: &Sizes,
    dq: ContainerId,
    (h0, h): (ContainerId, ContainerId),
    reverse: bool,
) -> Result<ContainerId, OpError> {
    let first = [vec![SymExpr::constant(1)], sizes.state()].concat();
    let first = builder.op1("reshape", &[h0], attrs([("shape", Attr::Sizes(first))]))?;
    let mut before = first;
    if sizes.t.as_const() != Some(1) {
        let one = SymExpr::constant(1);
        let (start, stop) = match reverse {
            true => (one, sizes.t.clone()),
            false => (SymExpr::constant(0), sizes.t.clone() - one),
        };
        let list = attrs([
            ("axis", Attr::Int(0)),
            ("start", Attr::Sizes(vec![start])),
            ("stop", Attr::Sizes(vec![stop])),
        ]);
        let rest = builder.op1("slice", &[h], list)?;
        let parts = if reverse {
            [rest, first]
        } else {
            [first, rest]
        };
        before = builder.op1("concat", &parts, attrs([("axis", Attr::Int(0))]))?;
    }
    let rows = sizes.t.clone() * sizes.b.clone();
    let mut flat = |x: ContainerId| {
        let width = builder.shape(x)[2].clone();
        let shape = attrs([("shape", Attr::Sizes(vec![rows.clone(), width]))]);
        builder.op1("reshape", &[x], shape)
    };
    let (dq, before) = (flat(dq)?, flat(before)?);
    let equation = attrs([("equation", Attr::Str("nk,nh->kh".into()))]);
    builder.op1("einsum", &[dq, before], equation)
}

/// `db[k] = Σ_(t, b) dq[t, b, k]`.
fn bias_gradient(builder: &mut Builder, dq: ContainerId) -> Result<ContainerId, OpError> {
    builder.op1("reduce", &[dq], reduce_attrs("sum", &[0, 1], false))
}
