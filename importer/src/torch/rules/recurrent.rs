//! LSTM layers: the products of their inputs for all steps at once, and a recurrence over time.

use super::Table;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site};
use graph::{Attr, ContainerId, DType, SymExpr};
use ops::{OpBuilder, attrs};

pub(super) const RULES: Table = &[("aten.lstm.input", lstm)];

/// Layers of PyTorch's `LSTM` over `[T, B, n]` (or `[B, T, n]`): the last layer's states, and the last step's of all.
fn lstm(s: &mut Site) -> Results {
    let mut x = s.tensor("input")?;
    let (hx, params) = (s.tensors("hx")?, s.tensors("params")?);
    let n_layers = usize::try_from(s.int("num_layers")?).unwrap_or(0);
    let (has_biases, both) = (s.flag("has_biases")?, s.flag("bidirectional")?);
    let (directions, each) = (1 + usize::from(both), if has_biases { 4 } else { 2 });
    if s.rank(x) != 3 || hx.len() != 2 || params.len() != n_layers * directions * each {
        return Err(s.unsupported("projections of an LSTM's states"));
    }
    let dtype = s.builder.dtype(x);
    let others = params.iter().chain(&hx);
    if !matches!(dtype, DType::F32 | DType::F64)
        || others.into_iter().any(|p| s.builder.dtype(*p) != dtype)
    {
        return Err(s.unsupported("an LSTM of other elements than float32 or float64"));
    }
    if n_layers > 1 && s.flag("train")? && s.float("dropout")? > 0.0 {
        return Err(s.unsupported("dropout between layers of an LSTM"));
    }
    let batch_first = s.flag("batch_first")?;
    if batch_first {
        x = s.permute(x, vec![1, 0, 2])?;
    }
    let (mut last_h, mut last_c) = (Vec::new(), Vec::new());
    for layer in 0..n_layers {
        let mut ways = Vec::new();
        for way in 0..directions {
            let n = layer * directions + way;
            let mut own = x;
            if way == 1 {
                own = flipped(s, own)?;
            }
            let (h0, c0) = (part(s, hx[0], n as i64)?, part(s, hx[1], n as i64)?);
            let (h, c) = one_way(s, own, &params[n * each..][..each], (h0, c0))?;
            let steps = s.builder.shape(h)[0].clone() - SymExpr::constant(1);
            last_h.push(from(s, h, steps.clone())?);
            last_c.push(from(s, c, steps)?);
            ways.push(if way == 1 { flipped(s, h)? } else { h });
        }
        x = joined(s, &ways, 2)?;
    }
    if batch_first {
        x = s.permute(x, vec![1, 0, 2])?;
    }
    let (h, c) = (joined(s, &last_h, 0)?, joined(s, &last_c, 0)?);
    Ok(vec![Some(x), Some(h), Some(c)])
}

/// One layer in one direction over `[T, B, n]`: all its states.
fn one_way(
    s: &mut Site,
    x: ContainerId,
    params: &[ContainerId],
    (h0, c0): (ContainerId, ContainerId),
) -> Result<(ContainerId, ContainerId), RuleError> {
    let einsum = attrs([("equation", Attr::Str("tbn,kn->tbk".into()))]);
    let mut z = s.op1("einsum", &[x, params[0]], einsum)?;
    if let [_, _, bias, other] = params {
        let sum = graph::Expr::In(0)
            .add(graph::Expr::In(1))
            .add(graph::Expr::In(2));
        let dtype = s.builder.dtype(x);
        z = s.elementwise(sum, &[z, *bias, *other], dtype)?;
    }
    let inputs = [z, params[1], h0, c0].map(Some);
    let made = s.builder.op("lstm_recurrence", &inputs, attrs([]))?;
    Ok((made[0], made[1]))
}

/// Position `n` of the first dimension, without it.
fn part(s: &mut Site, x: ContainerId, n: i64) -> Result<ContainerId, RuleError> {
    let one = ops::slicing::slice_attrs(0, SymExpr::constant(n), SymExpr::constant(n + 1), 1);
    let one = s.op1("slice", &[x], one)?;
    let shape = s.builder.shape(one)[1..].to_vec();
    s.reshape(one, shape)
}

/// What the first dimension has from `start` on.
fn from(s: &mut Site, x: ContainerId, start: SymExpr) -> Result<ContainerId, RuleError> {
    let stop = s.builder.shape(x)[0].clone();
    s.op1("slice", &[x], ops::slicing::slice_attrs(0, start, stop, 1))
}

fn flipped(s: &mut Site, x: ContainerId) -> Result<ContainerId, RuleError> {
    s.op1("flip", &[x], attrs([("axes", Attr::Ints(vec![0]))]))
}

fn joined(s: &mut Site, parts: &[ContainerId], axis: i64) -> Result<ContainerId, RuleError> {
    match parts {
        [only] => Ok(*only),
        _ => s.op1("concat", parts, attrs([("axis", Attr::Int(axis))])),
    }
}
