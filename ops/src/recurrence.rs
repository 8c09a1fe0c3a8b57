//! The recurrence of an LSTM over time, without the products of its inputs, and its gradient.
//!
//! With `z_t = x_t + h_(t−1)·Wᵀ` of width `4H` and its quarters `i, f, o` through the sigmoid, `g` through tanh (in the
//! order i, f, g, o): `c_t = f·c_(t−1) + i·g`, `h_t = o·tanh c_t` (PyTorch's `LSTM`; Hochreiter and Schmidhuber 1997).
//! Backwards in time, with `dh = dh_t + dz_(t+1)·W` and `dc = dc_t + dc_(t+1)·f_(t+1) + dh·o·(1 − tanh² c_t)`:
//! `dz = (dc·g·i(1−i), dc·c_(t−1)·f(1−f), dc·i·(1−g²), dh·tanh c_t·o(1−o))`. Gradients of weights and inputs are
//! ordinary products over all steps. Expansion unrolls the steps; a target may keep the node whole.

use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{constant, constant_shape, required};
use graph::{Attr, Builder, ContainerId, DType, Expr, Graph, Library, NodeKind, SymExpr, Tensor};

/// `lstm_recurrence` (x `[T, B, 4H]`, w `[4H, H]`, h0 `[B, H]`, c0 `[B, H]`) → h `[T, B, H]`, c `[T, B, H]`, the gates
/// behind their functions `[T, B, 4H]`.
#[derive(Debug)]
pub struct LstmRecurrence;

/// `lstm_recurrence_gradient` (dh `[T, B, H]`, dc? `[T, B, H]`, w, c0, c, gates) → dz `[T, B, 4H]`, dh0, dc0 `[B, H]`.
#[derive(Debug)]
pub struct LstmRecurrenceGradient;

/// Who computes recurrences that stay whole: a loop over time.
pub const LOOP: &str = "loop";

/// Keeps recurrences of 32 or 64 bits whole, for a target that has loops over time.
pub fn keep_recurrences(graph: &mut Graph) {
    let float = |graph: &Graph, id: &ContainerId| {
        matches!(graph.container(*id).dtype, DType::F32 | DType::F64)
    };
    let Some(state) = graph.single_state_mut() else {
        return;
    };
    let mut nodes = std::mem::take(&mut state.nodes);
    for node in &mut nodes {
        if let NodeKind::Library(library) = &mut node.kind
            && library.op.starts_with("lstm_recurrence")
            && library.inputs.iter().flatten().all(|id| float(graph, id))
        {
            library.compute_by(LOOP);
        }
    }
    graph.last_state().nodes = nodes;
}

/// Steps, rows and width.
struct Sizes {
    t: SymExpr,
    b: SymExpr,
    h: SymExpr,
}

impl Sizes {
    fn new(
        call: &Call,
        w: usize,
        states: &[usize],
        rows: &[usize],
        wide: &[usize],
    ) -> Result<Self, OpError> {
        let (x, w) = (call.input(wide[0])?, call.input(w)?);
        if x.rank() != 3 || w.rank() != 2 {
            return Err(call.shape_error("gates of rank 3 and weights of rank 2 expected"));
        }
        let sizes = Sizes {
            t: x.shape[0].clone(),
            b: x.shape[1].clone(),
            h: w.shape[1].clone(),
        };
        let expected = [
            (wide, sizes.gates()),
            (rows, sizes.states()),
            (states, sizes.state()),
        ];
        for (positions, shape) in expected {
            for n in positions {
                if call.optional_id(*n).is_some() && call.input(*n)?.shape != shape {
                    return Err(call.shape_error(format!("input {n} does not fit the weights")));
                }
            }
        }
        match w.shape[0] == sizes.h.clone() * SymExpr::constant(4) {
            true => Ok(sizes),
            false => Err(call.shape_error("weights are not [4·width, width]")),
        }
    }

    fn state(&self) -> Vec<SymExpr> {
        vec![self.b.clone(), self.h.clone()]
    }

    fn states(&self) -> Vec<SymExpr> {
        vec![self.t.clone(), self.b.clone(), self.h.clone()]
    }

    fn gates(&self) -> Vec<SymExpr> {
        let wide = self.h.clone() * SymExpr::constant(4);
        vec![self.t.clone(), self.b.clone(), wide]
    }
}

fn forward_sizes(call: &Call) -> Result<Sizes, OpError> {
    Sizes::new(call, 1, &[2, 3], &[], &[0])
}

fn gradient_sizes(call: &Call) -> Result<Sizes, OpError> {
    Sizes::new(call, 2, &[3], &[0, 1, 4], &[5])
}

/// Appends operators of an unrolled loop.
struct Unrolled<'a, 'g> {
    builder: &'a mut Builder<'g>,
    sizes: &'a Sizes,
}

impl Unrolled<'_, '_> {
    fn element(&mut self, expr: Expr, inputs: &[ContainerId]) -> Result<ContainerId, OpError> {
        self.builder
            .op1("elementwise", inputs, attrs([("expr", Attr::Expr(expr))]))
    }

    fn part(
        &mut self,
        x: ContainerId,
        axis: i64,
        from: SymExpr,
        to: SymExpr,
    ) -> Result<ContainerId, OpError> {
        let list = attrs([
            ("axis", Attr::Int(axis)),
            ("start", Attr::Sizes(vec![from])),
            ("stop", Attr::Sizes(vec![to])),
        ]);
        self.builder.op1("slice", &[x], list)
    }

    /// Step `t` of `[T, B, n]` as `[B, n]`.
    fn step(&mut self, x: ContainerId, t: i64) -> Result<ContainerId, OpError> {
        let one = self.part(x, 0, SymExpr::constant(t), SymExpr::constant(t + 1))?;
        let shape = self.builder.shape(one)[1..].to_vec();
        self.builder
            .op1("reshape", &[one], attrs([("shape", Attr::Sizes(shape))]))
    }

    /// The four quarters of `[B, 4H]`.
    fn quarters(&mut self, z: ContainerId) -> Result<Vec<ContainerId>, OpError> {
        let at = |n: i64| self.sizes.h.clone() * SymExpr::constant(n);
        (0..4).map(|n| self.part(z, 1, at(n), at(n + 1))).collect()
    }

    fn product(
        &mut self,
        a: ContainerId,
        b: ContainerId,
        equation: &str,
    ) -> Result<ContainerId, OpError> {
        let list = attrs([("equation", Attr::Str(equation.into()))]);
        self.builder.op1("einsum", &[a, b], list)
    }

    fn joined(&mut self, parts: &[ContainerId], axis: i64) -> Result<ContainerId, OpError> {
        self.builder
            .op1("concat", parts, attrs([("axis", Attr::Int(axis))]))
    }

    /// Values `[B, n]` of all steps into `[T, B, n]`.
    fn stack(&mut self, steps: &[ContainerId], into: Option<ContainerId>) -> Result<(), OpError> {
        let Some(into) = into else {
            return Ok(());
        };
        let mut rows = Vec::new();
        for step in steps {
            let mut shape = vec![SymExpr::constant(1)];
            shape.extend(self.builder.shape(*step));
            let list = attrs([("shape", Attr::Sizes(shape))]);
            rows.push(Some(self.builder.op1("reshape", &[*step], list)?));
        }
        self.builder.library(Library {
            op: "concat".into(),
            attrs: attrs([("axis", Attr::Int(0))]),
            inputs: rows,
            outputs: vec![Some(into)],
        });
        Ok(())
    }

    fn copy(&mut self, from: ContainerId, into: Option<ContainerId>) {
        if let Some(into) = into {
            self.builder.library(Library {
                op: "elementwise".into(),
                attrs: attrs([("expr", Attr::Expr(Expr::In(0)))]),
                inputs: vec![Some(from)],
                outputs: vec![Some(into)],
            });
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `1 − x²` or `x(1 − x)`: slopes of tanh and the sigmoid by their values.
fn slope_of_tanh(x: Expr) -> Expr {
    Expr::float(1.0).sub(x.clone().mul(x))
}

fn slope_of_sigmoid(x: Expr) -> Expr {
    x.clone().mul(Expr::float(1.0).sub(x))
}

impl Op for LstmRecurrence {
    fn name(&self) -> &'static str {
        "lstm_recurrence"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let (sizes, dtype) = (forward_sizes(call)?, call.input(0)?.dtype);
        let shapes = [sizes.states(), sizes.states(), sizes.gates()];
        Ok(shapes.map(|shape| TensorType::new(dtype, shape)).to_vec())
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let types = self.infer(call)?;
        let shape = constant_shape(call, &types[0].shape)?;
        let ([n_steps, b, h], wide) = ([shape[0], shape[1], shape[2]], 4 * shape[2]);
        let at = |n: usize| required(call, inputs, n).map(Tensor::to_f64);
        let (x, w, mut state, mut cell) = (at(0)?, at(1)?, at(2)?, at(3)?);
        let (mut hs, mut cs, mut gates) = (Vec::new(), Vec::new(), vec![0.0; x.len()]);
        for t in 0..n_steps {
            let before = state.clone();
            for r in 0..b {
                let row = &mut gates[(t * b + r) * wide..][..wide];
                for (j, gate) in row.iter_mut().enumerate() {
                    let sum: f64 = (0..h).map(|k| before[r * h + k] * w[j * h + k]).sum();
                    let z = x[(t * b + r) * wide + j] + sum;
                    *gate = if j / h == 2 { z.tanh() } else { sigmoid(z) };
                }
                for j in 0..h {
                    let c = row[h + j] * cell[r * h + j] + row[j] * row[2 * h + j];
                    cell[r * h + j] = c;
                    state[r * h + j] = row[3 * h + j] * c.tanh();
                }
            }
            hs.extend_from_slice(&state);
            cs.extend_from_slice(&cell);
        }
        let typed = types.iter().zip([hs, cs, gates]);
        typed
            .map(|(ty, data)| {
                let shape = constant_shape(call, &ty.shape)?;
                Ok(Tensor::from_f64(ty.dtype, &shape, data))
            })
            .collect()
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let sizes = forward_sizes(call)?;
        let n_steps = constant(call, &sizes.t)?;
        let (x, w) = (call.input_id(0)?, call.input_id(1)?);
        let (mut h, mut c) = (call.input_id(2)?, call.input_id(3)?);
        let mut loops = Unrolled {
            builder,
            sizes: &sizes,
        };
        let (mut hs, mut cs, mut gates) = (Vec::new(), Vec::new(), Vec::new());
        for t in 0..n_steps {
            let own = loops.step(x, t)?;
            let product = loops.product(h, w, "bh,kh->bk")?;
            let z = loops.element(Expr::In(0).add(Expr::In(1)), &[own, product])?;
            let mut quarters = loops.quarters(z)?;
            for (n, quarter) in quarters.iter_mut().enumerate() {
                let expr = match n {
                    2 => Expr::In(0).tanh(),
                    _ => Expr::In(0).sigmoid(),
                };
                *quarter = loops.element(expr, &[*quarter])?;
            }
            let [i, f, g, o] = [quarters[0], quarters[1], quarters[2], quarters[3]];
            let next = Expr::In(0)
                .mul(Expr::In(1))
                .add(Expr::In(2).mul(Expr::In(3)));
            c = loops.element(next, &[f, c, i, g])?;
            h = loops.element(Expr::In(0).mul(Expr::In(1).tanh()), &[o, c])?;
            hs.push(h);
            cs.push(c);
            if call.output_id(2).is_some() {
                gates.push(loops.joined(&quarters, 1)?);
            }
        }
        for (n, steps) in [hs, cs, gates].iter().enumerate() {
            loops.stack(steps, call.output_id(n))?;
        }
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        if g.dy(2).is_some() {
            return Ok(Gradient::Derive);
        }
        let sizes = forward_sizes(&g.call)?;
        let dh = match (g.dy(0), g.dy(1)) {
            (None, None) => return Ok(g.nothing()),
            (Some(dh), _) => dh,
            (None, Some(_)) => builder.op1(
                "full",
                &[],
                attrs([
                    ("shape", Attr::Sizes(sizes.states())),
                    ("value", Attr::Float(0.0)),
                    ("dtype", Attr::DType(g.call.input(0)?.dtype)),
                ]),
            )?,
        };
        let (w, h0, c0) = (
            g.call.input_id(1)?,
            g.call.input_id(2)?,
            g.call.input_id(3)?,
        );
        let inputs = [
            Some(dh),
            g.dy(1),
            Some(w),
            Some(c0),
            Some(g.output(1)?),
            Some(g.output(2)?),
        ];
        let wanted = [true, g.wants(2), g.wants(3)];
        let made = builder.op_for("lstm_recurrence_gradient", &inputs, attrs([]), &wanted)?;
        let dz = made[0].filter(|_| g.wants(0) || g.wants(1));
        let dw = match dz.filter(|_| g.wants(1)) {
            Some(dz) => Some(weight_gradient(builder, &sizes, dz, (h0, g.output(0)?))?),
            None => None,
        };
        Ok(Gradient::Rule(vec![
            dz.filter(|_| g.wants(0)),
            dw,
            made[1],
            made[2],
        ]))
    }

    fn samples(&self) -> Vec<Sample> {
        let sample = |name: &str, t: i64, b: i64, h: i64| {
            let shapes: [&[i64]; 4] = [&[t, b, 4 * h], &[4 * h, h], &[b, h], &[b, h]];
            Sample::new(name, &shapes, attrs([]))
        };
        vec![
            sample("three steps", 3, 2, 3),
            sample("one step", 1, 2, 2),
            sample("one row", 2, 1, 1),
        ]
    }
}

/// `dw[k, h] = Σ_(t, b) dz[t, b, k]·h_(t−1)[b, h]`.
fn weight_gradient(
    builder: &mut Builder,
    sizes: &Sizes,
    dz: ContainerId,
    (h0, h): (ContainerId, ContainerId),
) -> Result<ContainerId, OpError> {
    let first = [vec![SymExpr::constant(1)], sizes.state()].concat();
    let first = builder.op1("reshape", &[h0], attrs([("shape", Attr::Sizes(first))]))?;
    let mut before = first;
    if sizes.t.as_const() != Some(1) {
        let list = attrs([
            ("axis", Attr::Int(0)),
            ("start", Attr::Sizes(vec![SymExpr::constant(0)])),
            (
                "stop",
                Attr::Sizes(vec![sizes.t.clone() - SymExpr::constant(1)]),
            ),
        ]);
        let rest = builder.op1("slice", &[h], list)?;
        before = builder.op1("concat", &[first, rest], attrs([("axis", Attr::Int(0))]))?;
    }
    let rows = sizes.t.clone() * sizes.b.clone();
    let mut flat = |x: ContainerId, n: SymExpr| {
        let shape = attrs([("shape", Attr::Sizes(vec![rows.clone(), n]))]);
        builder.op1("reshape", &[x], shape)
    };
    let dz = flat(dz, sizes.gates()[2].clone())?;
    let before = flat(before, sizes.h.clone())?;
    let equation = attrs([("equation", Attr::Str("nk,nh->kh".into()))]);
    builder.op1("einsum", &[dz, before], equation)
}

impl Op for LstmRecurrenceGradient {
    fn name(&self) -> &'static str {
        "lstm_recurrence_gradient"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let (sizes, dtype) = (gradient_sizes(call)?, call.input(0)?.dtype);
        let shapes = [sizes.gates(), sizes.state(), sizes.state()];
        Ok(shapes.map(|shape| TensorType::new(dtype, shape)).to_vec())
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let types = self.infer(call)?;
        let shape = constant_shape(call, &types[0].shape)?;
        let (n_steps, b, wide) = (shape[0], shape[1], shape[2]);
        let h = wide / 4;
        let at = |n: usize| required(call, inputs, n).map(Tensor::to_f64);
        let (dhs, w, c0, cs, gates) = (at(0)?, at(2)?, at(3)?, at(4)?, at(5)?);
        let dcs = inputs[1].map(Tensor::to_f64);
        let (mut dz, mut dh, mut dc) = (vec![0.0; gates.len()], vec![0.0; b * h], vec![0.0; b * h]);
        for t in (0..n_steps).rev() {
            for r in 0..b {
                let row = (t * b + r) * wide;
                for j in 0..h {
                    let (own, all) = (r * h + j, (t * b + r) * h + j);
                    let [i, f, g, o] = [0, 1, 2, 3].map(|n| gates[row + n * h + j]);
                    let before = if t == 0 { c0[own] } else { cs[all - b * h] };
                    let (tanh, up) = (cs[all].tanh(), dhs[all] + dh[own]);
                    let own_dc = dcs.as_ref().map_or(0.0, |d| d[all]);
                    let down = dc[own] + own_dc + up * o * (1.0 - tanh * tanh);
                    let parts = [
                        down * g * i * (1.0 - i),
                        down * before * f * (1.0 - f),
                        down * i * (1.0 - g * g),
                        up * tanh * o * (1.0 - o),
                    ];
                    for (n, part) in parts.into_iter().enumerate() {
                        dz[row + n * h + j] = part;
                    }
                    dc[own] = down * f;
                }
                for j in 0..h {
                    dh[r * h + j] = (0..wide).map(|k| dz[row + k] * w[k * h + j]).sum();
                }
            }
        }
        let typed = types.iter().zip([dz, dh, dc]);
        typed
            .map(|(ty, data)| {
                let shape = constant_shape(call, &ty.shape)?;
                Ok(Tensor::from_f64(ty.dtype, &shape, data))
            })
            .collect()
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let sizes = gradient_sizes(call)?;
        let n_steps = constant(call, &sizes.t)?;
        let (dhs, w, c0) = (call.input_id(0)?, call.input_id(2)?, call.input_id(3)?);
        let (cs, gates) = (call.input_id(4)?, call.input_id(5)?);
        let mut loops = Unrolled {
            builder,
            sizes: &sizes,
        };
        let sum = Expr::In(0).add(Expr::In(1));
        let (mut dh, mut dc): (Option<ContainerId>, Option<ContainerId>) = (None, None);
        let mut steps = Vec::new();
        for t in (0..n_steps).rev() {
            let own = loops.step(gates, t)?;
            let quarters = loops.quarters(own)?;
            let [i, f, g, o] = [quarters[0], quarters[1], quarters[2], quarters[3]];
            let c = loops.step(cs, t)?;
            let before = if t == 0 { c0 } else { loops.step(cs, t - 1)? };
            let mut up = loops.step(dhs, t)?;
            if let Some(dh) = dh {
                up = loops.element(sum.clone(), &[up, dh])?;
            }
            let slope = Expr::In(0)
                .mul(Expr::In(1))
                .mul(slope_of_tanh(Expr::In(2).tanh()));
            let mut down = loops.element(slope, &[up, o, c])?;
            if let Some(dc) = dc {
                down = loops.element(sum.clone(), &[down, dc])?;
            }
            if let Some(dcs) = call.optional_id(1) {
                let own = loops.step(dcs, t)?;
                down = loops.element(sum.clone(), &[down, own])?;
            }
            let through = |slope: Expr| Expr::In(0).mul(Expr::In(1)).mul(slope);
            let parts = [
                loops.element(through(slope_of_sigmoid(Expr::In(2))), &[down, g, i])?,
                loops.element(through(slope_of_sigmoid(Expr::In(2))), &[down, before, f])?,
                loops.element(through(slope_of_tanh(Expr::In(2))), &[down, i, g])?,
                loops.element(
                    Expr::In(0)
                        .mul(Expr::In(1).tanh())
                        .mul(slope_of_sigmoid(Expr::In(2))),
                    &[up, c, o],
                )?,
            ];
            let dz = loops.joined(&parts, 1)?;
            dh = Some(loops.product(dz, w, "bk,kh->bh")?);
            dc = Some(loops.element(Expr::In(0).mul(Expr::In(1)), &[down, f])?);
            steps.push(dz);
        }
        steps.reverse();
        loops.stack(&steps, call.output_id(0))?;
        for (n, value) in [dh, dc].into_iter().enumerate() {
            if let Some(value) = value {
                loops.copy(value, call.output_id(n + 1));
            }
        }
        Ok(())
    }

    fn samples(&self) -> Vec<Sample> {
        let (t, b, h) = (3, 2, 3);
        let (rows, state): (&[i64], &[i64]) = (&[t, b, h], &[b, h]);
        let all: [&[i64]; 6] = [rows, rows, &[4 * h, h], state, rows, &[t, b, 4 * h]];
        let sample = |name: &str| Sample::new(name, &all, attrs([])).not_differentiable();
        vec![
            sample("gradients of both states"),
            sample("no gradient of the cell").without(1),
        ]
    }
}
