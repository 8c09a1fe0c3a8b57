//! Attention that keeps the logarithm of each row's sum, and its gradient from that.
//!
//! With scores `s = scale·q·kᵀ + mask`, `lse_l = ln Σ_m e^(s_lm)` and `p = e^(s − lse)`: `y = p·v`. For incoming
//! `dy`, with `δ_l = Σ_e dy_le·y_le`: `dv = pᵀ·dy`, `ds = p·(dy·vᵀ − δ)`, `dq = scale·ds·k`,
//! `dk = scale·dsᵀ·q` (FlashAttention, arXiv 2205.14135, section 3 and appendix B; PyTorch's
//! `_scaled_dot_product_flash_attention` and its backward). Neither scores nor probabilities pass from
//! the forward to the backward pass.
//!
//! Rounding lse loses the sum if |lse| is large, for example if all scores of a row are −10⁹. The operator therefore
//! also returns the residual `rest_l = ln Σ_m e^(s_lm − lse_l)`: `p = e^((s − lse) − rest)` sums to 1 in every row.
//!
//! With dropout, each probability is multiplied by `d`, which is 0 or 1/(1 − probability): `y = (p·d)·v`,
//! `dv = (p·d)ᵀ·dy`, `ds = p·(d·(dy·vᵀ) − δ)`. `d` is computed again from the seed, and δ is as before, since
//! `Σ_m p_lm·d_lm·(dy·vᵀ)_lm = Σ_e dy_le·y_le`.

use crate::attention::{AttentionShapes, weighted};
use crate::index_space::for_each_index;
use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{broadcast_offset, constant_shape, required};
use graph::{Attr, Attrs, Binary, Builder, ContainerId, DType, Expr, Library, SymExpr, Tensor};

/// `attention_with_lse` (q `[…, L, D]`, k `[…, M, D]`, v `[…, M, E]`, mask?, seed?) → y `[…, L, E]`, lse `[…, L]`,
/// rest `[…, L]`, the last two in f32 (f64 of f64).
///
/// Attributes: see `attention`. A row without visible keys has lse −∞ and rest 0. Dropout affects neither. The mask has
/// no gradient except by expansion.
#[derive(Debug)]
pub struct AttentionWithLse;

/// `attention_gradient` (dy, q, k, v, mask?, y, lse, seed?, rest?) → dq, dk, dv; attributes as
/// `attention_with_lse`.
#[derive(Debug)]
pub struct AttentionGradient;

/// Position of `y` among the inputs of the gradient; lse, the seed and the rest follow.
const Y: usize = 5;
/// Position of the seed among the inputs of the gradient.
const SEED: usize = Y + 2;
/// Position of the rest among the inputs of the gradient.
const REST: usize = Y + 3;

/// The logarithms of the rows' sums, and what their rounding leaves, among the results of the forward operator or the
/// inputs of the gradient.
pub(crate) fn row_sums(library: &Library) -> impl Iterator<Item = ContainerId> + '_ {
    let (containers, at) = match library.op.as_str() {
        "attention_gradient" => (&library.inputs, [Y + 1, REST]),
        _ => (&library.outputs, [1, 2]),
    };
    let known = at.into_iter().map(|n| containers.get(n).copied().flatten());
    known.flatten()
}

/// Inputs of the forward operator, from those of its gradient: q, k, v, the mask and the seed.
fn forward_inputs<T: Clone>(inputs: &[Option<T>]) -> Vec<Option<T>> {
    let mut forward = inputs[1..Y].to_vec();
    forward.push(inputs.get(SEED).cloned().flatten());
    forward
}

/// The call of the forward operator that a gradient belongs to.
fn forward_call<'a>(call: &Call<'a>) -> Result<Call<'a>, OpError> {
    call.input(Y + 1)?;
    Ok(Call {
        library: call.library,
        inputs: forward_inputs(&call.inputs),
    })
}

fn lse_type(plan: &AttentionShapes) -> TensorType {
    let dtype = match plan.y.dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    TensorType::new(dtype, plan.scores[..plan.scores.len() - 1].to_vec())
}

fn typed(expr: Expr, dtype: DType) -> Attrs {
    attrs([("expr", Attr::Expr(expr)), ("dtype", Attr::DType(dtype))])
}

/// The scores, masked and scaled, in lse's type.
fn append_scores(
    plan: &AttentionShapes,
    builder: &mut Builder,
    (q, k, mask): (ContainerId, ContainerId, Option<ContainerId>),
) -> Result<ContainerId, OpError> {
    let equation = attrs([("equation", plan.equation("ld", "md", "lm"))]);
    let products = builder.op1("einsum", &[q, k], equation)?;
    let expr = plan.masked(mask.map(|m| builder.dtype(m)));
    let inputs: Vec<_> = [products].into_iter().chain(mask).collect();
    builder.op1("elementwise", &inputs, typed(expr, lse_type(plan).dtype))
}

/// `x` as a column beside scores.
fn append_column(
    plan: &AttentionShapes,
    builder: &mut Builder,
    x: ContainerId,
) -> Result<ContainerId, OpError> {
    let mut column = lse_type(plan).shape;
    column.push(SymExpr::constant(1));
    builder.op1("reshape", &[x], attrs([("shape", Attr::Sizes(column))]))
}

/// `e^((s − lse) − rest)` in y's type.
fn append_probabilities(
    plan: &AttentionShapes,
    builder: &mut Builder,
    (scores, lse, rest): (ContainerId, ContainerId, Option<ContainerId>),
) -> Result<ContainerId, OpError> {
    let mut inputs = vec![scores, append_column(plan, builder, lse)?];
    let mut p = Expr::In(0).sub(Expr::In(1));
    if let Some(rest) = rest {
        inputs.push(append_column(plan, builder, rest)?);
        p = p.sub(Expr::In(2));
    }
    p = p.exp();
    if plan.is_safe() {
        let never = Expr::float(f64::NEG_INFINITY);
        let sees_nothing = Expr::binary(Binary::Eq, Expr::In(1), never);
        p = Expr::select(sees_nothing, Expr::float(0.0), p);
    }
    builder.op1("elementwise", &inputs, typed(p, plan.y.dtype))
}

/// `e^((s − lse) − rest)` in place of a row of scores.
fn probabilities(plan: &AttentionShapes, row: &mut [f64], (lse, rest): (f64, f64)) {
    for s in row {
        *s = match lse {
            f64::NEG_INFINITY if plan.is_safe() => 0.0,
            _ => (*s - lse - rest).exp(),
        };
    }
}

/// Appends an operator that writes an existing container.
fn append_into(
    builder: &mut Builder,
    op: &str,
    attrs: Attrs,
    inputs: &[ContainerId],
    out: ContainerId,
) {
    builder.library(Library {
        op: op.into(),
        attrs,
        inputs: inputs.iter().map(|id| Some(*id)).collect(),
        outputs: vec![Some(out)],
    });
}

/// Rows and columns exchanged in each head: `shape` is `[…, L, M]`.
fn transposed(p: &[f64], shape: &[usize]) -> (Vec<f64>, Vec<usize>) {
    let n = shape.len();
    let (rows, columns) = (shape[n - 2], shape[n - 1]);
    let mut turned = Vec::with_capacity(p.len());
    for head in p.chunks((rows * columns).max(1)) {
        turned.extend((0..columns).flat_map(|m| (0..rows).map(move |l| head[l * columns + m])));
    }
    let shape = [&shape[..n - 2], &[columns, rows]].concat();
    (turned, shape)
}

impl Op for AttentionWithLse {
    fn name(&self) -> &'static str {
        "attention_with_lse"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let plan = AttentionShapes::new(call)?;
        Ok(vec![plan.y.clone(), lse_type(&plan), lse_type(&plan)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let types = self.infer(call)?;
        let plan = AttentionShapes::new(call)?;
        let (mut p, shape) = plan.masked_scores(call, inputs)?;
        let rows = &shape[..shape.len() - 1];
        let columns = shape[shape.len() - 1].max(1);
        let sum = |row: &[f64], from: f64| row.iter().map(|s| (s - from).exp()).sum::<f64>();
        let lse = p.chunks(columns).map(|row| {
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            match max {
                f64::NEG_INFINITY => max,
                _ => max + sum(row, max).ln(),
            }
        });
        let lse = Tensor::from_f64(types[1].dtype, rows, lse.collect());
        let mut rest = Vec::new();
        for (row, lse) in p.chunks_mut(columns).zip(lse.to_f64()) {
            rest.push(match lse {
                f64::NEG_INFINITY => 0.0,
                _ => sum(row, lse).ln(),
            });
            probabilities(&plan, row, (lse, rest[rest.len() - 1]));
        }
        let out = constant_shape(call, &types[0].shape)?;
        let v = required(call, inputs, 2)?.to_f64();
        let p = plan.dropped(call, inputs, &shape, p)?;
        let y = weighted(&p, &v, &shape, out[out.len() - 1]);
        Ok(vec![
            Tensor::from_f64(types[0].dtype, &out, y),
            lse,
            Tensor::from_f64(types[2].dtype, rows, rest),
        ])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let plan = AttentionShapes::new(call)?;
        let (q, k, v) = (call.input_id(0)?, call.input_id(1)?, call.input_id(2)?);
        let scores = append_scores(&plan, builder, (q, k, call.optional_id(3)))?;
        let sum = attrs([
            ("kind", Attr::Str("logsumexp".into())),
            ("axes", Attr::Ints(vec![-1])),
        ]);
        let lse = match call.output_id(1) {
            Some(lse) => {
                append_into(builder, "reduce", sum.clone(), &[scores], lse);
                lse
            }
            None => builder.op1("reduce", &[scores], sum.clone())?,
        };
        let needs_rest = call.output_id(2).is_some() || call.output_id(0).is_some();
        let rest = match needs_rest {
            false => None,
            true => {
                let column = append_column(&plan, builder, lse)?;
                let never = Expr::float(f64::NEG_INFINITY);
                let sees_nothing = Expr::binary(Binary::Eq, Expr::In(1), never);
                let left = Expr::In(0).sub(Expr::In(1));
                // In a row that sees nothing, ln Σ e^(−∞) takes the place of -∞ − (-∞).
                let left = Expr::select(sees_nothing, Expr::In(0), left);
                let left = typed(left, lse_type(&plan).dtype);
                let left = builder.op1("elementwise", &[scores, column], left)?;
                let rest = builder.op1("reduce", &[left], sum)?;
                let never = Expr::float(f64::NEG_INFINITY);
                let sees_nothing = Expr::binary(Binary::Eq, Expr::In(0), never);
                let rest_or_zero = Expr::select(sees_nothing, Expr::float(0.0), Expr::In(0));
                let list = typed(rest_or_zero, lse_type(&plan).dtype);
                match call.output_id(2) {
                    Some(out) => {
                        append_into(builder, "elementwise", list, &[rest], out);
                        Some(out)
                    }
                    None => Some(builder.op1("elementwise", &[rest], list)?),
                }
            }
        };
        if let Some(y) = call.output_id(0) {
            let p = append_probabilities(&plan, builder, (scores, lse, rest))?;
            let p = plan.append_dropout(call, builder, p, call.optional_id(4))?;
            let equation = attrs([("equation", plan.equation("lm", "me", "le"))]);
            append_into(builder, "einsum", equation, &[p, v], y);
        }
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0) else {
            return Ok(match g.dy(1).or(g.dy(2)) {
                None => Gradient::Zero,
                Some(_) => Gradient::Derive,
            });
        };
        if g.dy(1).is_some() || g.dy(2).is_some() || g.wants(3) {
            return Ok(Gradient::Derive);
        }
        let mut inputs = vec![Some(dy)];
        inputs.extend((0..4).map(|n| g.call.optional_id(n)));
        inputs.extend([Some(g.output(0)?), Some(g.output(1)?)]);
        let rest = g.call.output_id(2);
        if rest.is_some() || g.call.optional_id(4).is_some() {
            inputs.extend([g.call.optional_id(4), rest]);
        }
        let wanted = [0, 1, 2].map(|n| g.wants(n));
        let attrs = g.call.library.attrs.clone();
        let mut parts = builder.op_for("attention_gradient", &inputs, attrs, &wanted)?;
        parts.resize(g.call.inputs.len(), None);
        Ok(Gradient::Rule(parts))
    }

    fn samples(&self) -> Vec<Sample> {
        let qkv: [&[i64]; 3] = [&[2, 2, 3, 4], &[2, 2, 5, 4], &[2, 2, 5, 3]];
        let causal = attrs([("causal", Attr::Bool(true)), ("scale", Attr::Float(0.7))]);
        let bias: Vec<f64> = (0..10).map(|i| f64::from(i) * 0.2 - 1.0).collect();
        let bias = Tensor::from_f64(DType::F32, &[2, 1, 1, 5], bias);
        let mut seen = vec![1.0; 15];
        seen[5..10].fill(0.0);
        seen[12] = 0.0;
        let nothing = Tensor::from_f64(DType::Bool, &[3, 5], seen);
        let filled = attrs([("fill", Attr::Float(-2.5)), ("safe", Attr::Bool(false))]);
        let drop = attrs([("dropout", Attr::Float(0.3)), ("id", Attr::Int(2))]);
        let seed = Tensor::from_i64(DType::I64, &[], vec![7]);
        vec![
            Sample::new("plain", &qkv, attrs([])),
            Sample::new("causal", &qkv, causal.clone()),
            Sample::new("no leading dimension", &[&[3, 2], &[3, 2], &[3, 2]], causal),
            Sample::new("added mask", &qkv, attrs([])).value(3, bias),
            Sample::new("dropout", &qkv, drop).value(4, seed),
            Sample::new("hidden scores are a number", &qkv, filled).value(3, nothing.clone()),
            // The difference of two infinite lse is no number.
            Sample::new("a row that sees nothing", &qkv, attrs([]))
                .value(3, nothing)
                .not_differentiable(),
        ]
    }
}

impl AttentionGradient {
    /// `ds·scale` appended in y's type.
    fn append_score_gradient(
        &self,
        (call, plan): (&Call, &AttentionShapes),
        builder: &mut Builder,
        p: ContainerId,
    ) -> Result<ContainerId, OpError> {
        let (dy, v, y) = (call.input_id(0)?, call.input_id(3)?, call.input_id(Y)?);
        let equation = attrs([("equation", plan.equation("le", "me", "lm"))]);
        let dp = builder.op1("einsum", &[dy, v], equation)?;
        let dp = plan.append_dropout(call, builder, dp, call.optional_id(SEED))?;
        let products = typed(Expr::In(0).mul(Expr::In(1)), lse_type(plan).dtype);
        let products = builder.op1("elementwise", &[dy, y], products)?;
        let list = attrs([
            ("kind", Attr::Str("sum".into())),
            ("axes", Attr::Ints(vec![-1])),
            ("keep", Attr::Bool(true)),
        ]);
        let delta = builder.op1("reduce", &[products], list)?;
        let ds = Expr::In(0).mul(Expr::In(1).sub(Expr::In(2)));
        let mut ds = ds.mul(plan.scale.clone());
        let mut inputs = vec![p, dp, delta];
        if let Some(mask) = call.optional_id(4)
            && plan.replaces_scores(Some(builder.dtype(mask)))
        {
            ds = Expr::select(Expr::In(3), ds, Expr::float(0.0));
            inputs.push(mask);
        }
        builder.op1("elementwise", &inputs, typed(ds, plan.y.dtype))
    }
}

impl Op for AttentionGradient {
    fn name(&self) -> &'static str {
        "attention_gradient"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let plan = AttentionShapes::new(&forward_call(call)?)?;
        let fits = call.input(0)?.shape == plan.y.shape
            && call.input(Y)?.shape == plan.y.shape
            && call.input(Y + 1)?.shape == lse_type(&plan).shape
            && call.inputs.get(REST).is_none_or(|rest| {
                rest.as_ref()
                    .is_none_or(|rest| rest.shape == lse_type(&plan).shape)
            });
        if !fits {
            return Err(call.shape_error("result, lse or gradient do not fit the operands"));
        }
        (1..=3).map(|n| call.input(n).cloned()).collect()
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let types = self.infer(call)?;
        let (forward, plan) = (
            forward_call(call)?,
            AttentionShapes::new(&forward_call(call)?)?,
        );
        let forward_inputs = forward_inputs(inputs);
        let (mut p, shape) = plan.masked_scores(&forward, &forward_inputs)?;
        let at = |n: usize| required(call, inputs, n).map(|t| (t.to_f64(), t.shape.clone()));
        let ((dy, wide), (y, _), (lse, _)) = (at(0)?, at(Y)?, at(Y + 1)?);
        let ((q, narrow), (k, _), (v, _)) = (at(1)?, at(2)?, at(3)?);
        let (columns, width) = (shape[shape.len() - 1], wide[wide.len() - 1]);
        let depth = narrow[narrow.len() - 1];
        let rest = match inputs.get(REST).copied().flatten() {
            Some(rest) => rest.to_f64(),
            None => vec![0.0; lse.len()],
        };
        for (row, own) in p.chunks_mut(columns.max(1)).zip(lse.into_iter().zip(rest)) {
            probabilities(&plan, row, own);
        }
        let scale = call.float_or("scale", 1.0 / (depth as f64).sqrt())?;
        // v has a row for each column of the scores, so dy·vᵀ is the product of dy and the transposed v.
        let values = [&shape[..shape.len() - 2], &[columns, width]].concat();
        let dp = weighted(&dy, &transposed(&v, &values).0, &wide, columns);
        let drop = |x| plan.dropped(&forward, &forward_inputs, &shape, x);
        let dp = drop(dp)?;
        let hidden = match forward_inputs[3] {
            Some(mask) if plan.replaces_scores(Some(mask.dtype)) => Some(mask),
            _ => None,
        };
        let mut ds = p.clone();
        for (l, row) in ds.chunks_mut(columns.max(1)).enumerate() {
            let own = l * width..(l + 1) * width;
            let delta: f64 = own.map(|at| dy[at] * y[at]).sum();
            for (m, s) in row.iter_mut().enumerate() {
                *s *= (dp[l * columns + m] - delta) * scale;
            }
        }
        if let Some(mask) = hidden {
            let mut own = ds.iter_mut();
            for_each_index(&shape, |index| {
                let sees = mask.at(broadcast_offset(&mask.shape, index)).as_bool();
                if let Some(own) = own.next().filter(|_| !sees) {
                    *own = 0.0;
                }
            });
        }
        let (pt, turned) = transposed(&drop(p)?, &shape);
        let dst = transposed(&ds, &shape).0;
        let results = [
            weighted(&ds, &k, &shape, depth),
            weighted(&dst, &q, &turned, depth),
            weighted(&pt, &dy, &turned, width),
        ];
        let typed = types.iter().zip(results);
        typed
            .map(|(ty, data)| {
                Ok(Tensor::from_f64(
                    ty.dtype,
                    &constant_shape(call, &ty.shape)?,
                    data,
                ))
            })
            .collect()
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let plan = AttentionShapes::new(&forward_call(call)?)?;
        let (dy, q, k) = (call.input_id(0)?, call.input_id(1)?, call.input_id(2)?);
        let scores = append_scores(&plan, builder, (q, k, call.optional_id(4)))?;
        let lse = call.input_id(Y + 1)?;
        let rest = call.optional_id(REST);
        let p = append_probabilities(&plan, builder, (scores, lse, rest))?;
        let into = |builder: &mut Builder, letters: [&str; 3], a, b, out| {
            let [x, y, z] = letters;
            let equation = attrs([("equation", plan.equation(x, y, z))]);
            append_into(builder, "einsum", equation, &[a, b], out);
        };
        if let Some(dv) = call.output_id(2) {
            let p = plan.append_dropout(call, builder, p, call.optional_id(SEED))?;
            into(builder, ["lm", "le", "me"], p, dy, dv);
        }
        if call.output_id(0).is_some() || call.output_id(1).is_some() {
            let ds = self.append_score_gradient((call, &plan), builder, p)?;
            if let Some(dq) = call.output_id(0) {
                into(builder, ["lm", "md", "ld"], ds, k, dq);
            }
            if let Some(dk) = call.output_id(1) {
                into(builder, ["lm", "ld", "md"], ds, q, dk);
            }
        }
        Ok(())
    }

    fn samples(&self) -> Vec<Sample> {
        let (q, k, v): (&[i64], &[i64], &[i64]) = (&[2, 2, 3, 4], &[2, 2, 5, 4], &[2, 2, 5, 3]);
        let (y, lse): (&[i64], &[i64]) = (&[2, 2, 3, 3], &[2, 2, 3]);
        let lse_shape = [2, 2, 3];
        let all: [&[i64]; 7] = [y, q, k, v, &[], y, lse];
        let causal = attrs([("causal", Attr::Bool(true)), ("scale", Attr::Float(0.7))]);
        let bias: Vec<f64> = (0..10).map(|i| f64::from(i) * 0.2 - 1.0).collect();
        let bias = Tensor::from_f64(DType::F32, &[2, 1, 1, 5], bias);
        let sample = |name: &str, attrs| Sample::new(name, &all, attrs).not_differentiable();
        let rest = (0..12).map(|i| f64::from(i) * 0.1 - 0.3).collect();
        let rest = Tensor::from_f64(DType::F32, &lse_shape, rest);
        let mut seen = vec![1.0; 15];
        seen[5..10].fill(0.0);
        let seen = Tensor::from_f64(DType::Bool, &[3, 5], seen);
        let filled = attrs([("fill", Attr::Float(-2.5)), ("safe", Attr::Bool(false))]);
        let drop = attrs([("dropout", Attr::Float(0.3)), ("id", Attr::Int(2))]);
        let seed = Tensor::from_i64(DType::I64, &[], vec![7]);
        vec![
            sample("plain", attrs([])).without(4),
            sample("causal", causal).without(4),
            sample("added mask", attrs([])).value(4, bias),
            sample("dropout", drop).without(4).value(SEED, seed),
            sample("hidden scores are a number", filled).value(4, seen),
            sample("the rest of lse", attrs([]))
                .without(4)
                .without(SEED)
                .value(REST, rest),
        ]
    }
}
