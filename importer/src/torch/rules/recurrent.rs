//! Recurrent layers: the products of their inputs for all steps at once, and a recurrence over time.

use super::Table;
use super::attention::dropped;
use super::movement::{cut, pick};
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site};
use graph::{Attr, Cell, ContainerId, DType, Expr, SymExpr};
use ops::recurrence::cells;
use ops::{OpBuilder, attrs};

pub(super) const RULES: Table = &[
    ("aten.lstm.input", lstm),
    ("aten.gru.input", gru),
    ("aten.rnn_tanh.input", rnn_tanh),
    ("aten.rnn_relu.input", rnn_relu),
];

fn lstm(s: &mut Site) -> Results {
    let states = s.tensors("hx")?;
    layers(s, &cells::lstm(), &states)
}

fn gru(s: &mut Site) -> Results {
    of_one_state(s, &cells::gru())
}

fn rnn_tanh(s: &mut Site) -> Results {
    of_one_state(s, &cells::rnn_tanh())
}

fn rnn_relu(s: &mut Site) -> Results {
    of_one_state(s, &cells::rnn_relu())
}

fn of_one_state(s: &mut Site, cell: &Cell) -> Results {
    let state = s.tensor("hx")?;
    layers(s, cell, &[state])
}

/// Layers over `[T, B, n]` (or `[B, T, n]`), from initial states `[layers, B, H]`. Returns the last layer's `h` of all
/// steps, and the last step's states of all layers.
fn layers(s: &mut Site, cell: &Cell, first: &[ContainerId]) -> Results {
    let mut x = s.tensor("input")?;
    let params = s.tensors("params")?;
    let n_layers = usize::try_from(s.int("num_layers")?).unwrap_or(0);
    let (has_biases, both) = (s.flag("has_biases")?, s.flag("bidirectional")?);
    let (directions, each) = (1 + usize::from(both), if has_biases { 4 } else { 2 });
    if s.rank(x) != 3
        || first.len() != cell.n_states()
        || params.len() != n_layers * directions * each
    {
        return Err(s.unsupported("projections of a recurrent layer's states"));
    }
    let dtype = s.builder.dtype(x);
    let others = params.iter().chain(first);
    if !dtype.is_float() || others.into_iter().any(|p| s.builder.dtype(*p) != dtype) {
        return Err(s.unsupported("a recurrent layer of integers, or of several types"));
    }
    // States of 16 bits are carried from step to step in 32.
    let carried = if dtype == DType::F64 {
        dtype
    } else {
        DType::F32
    };
    x = s.cast(x, carried)?;
    let params = all_cast(s, &params, carried)?;
    let first = all_cast(s, first, carried)?;
    let dropout = match s.flag("train")? {
        true => s.float("dropout")?,
        false => 0.0,
    };
    let batch_first = s.flag("batch_first")?;
    if batch_first {
        x = s.permute(x, vec![1, 0, 2])?;
    }
    let mut last: Vec<Vec<ContainerId>> = vec![Vec::new(); cell.n_states()];
    for layer in 0..n_layers {
        if layer > 0 && dropout > 0.0 {
            x = dropped(s, x, dropout, false)?[0];
        }
        let mut ways = Vec::new();
        for way in 0..directions {
            let n = layer * directions + way;
            let place = SymExpr::constant(n as i64);
            let before = first.iter().map(|f| pick(s, *f, 0, place.clone()));
            let before = before.collect::<Result<Vec<_>, _>>()?;
            let params = &params[n * each..][..each];
            let states = one_way(s, cell, x, params, (&before, way == 1))?;
            for (last, state) in last.iter_mut().zip(&states) {
                last.push(last_step(s, *state, way == 1)?);
            }
            ways.push(states[0]);
        }
        x = joined(s, &ways, 2)?;
    }
    if batch_first {
        x = s.permute(x, vec![1, 0, 2])?;
    }
    let mut results = vec![Some(s.cast(x, dtype)?)];
    for list in last {
        let states = joined(s, &list, 0)?;
        results.push(Some(s.cast(states, dtype)?));
    }
    Ok(results)
}

fn all_cast(
    s: &mut Site,
    list: &[ContainerId],
    dtype: DType,
) -> Result<Vec<ContainerId>, RuleError> {
    list.iter().map(|x| s.cast(*x, dtype)).collect()
}

/// One layer in one direction over `[T, B, n]`, from its initial states. Returns the states of all steps.
fn one_way(
    s: &mut Site,
    cell: &Cell,
    x: ContainerId,
    params: &[ContainerId],
    (before, reverse): (&[ContainerId], bool),
) -> Result<Vec<ContainerId>, RuleError> {
    let einsum = attrs([("equation", Attr::Str("tbn,kn->tbk".into()))]);
    let mut x = s.op1("einsum", &[x, params[0]], einsum)?;
    let mut bias = None;
    if let [_, _, own, other] = params {
        let dtype = s.builder.dtype(x);
        let sum = Expr::In(0).add(Expr::In(1));
        // If a gate only adds products of states and inputs, their biases are added too.
        if cell.gradient().is_some_and(|gradient| gradient.is_shared()) {
            let sum = sum.add(Expr::In(2));
            x = s.elementwise(sum, &[x, *own, *other], dtype)?;
        } else {
            x = s.elementwise(sum, &[x, *own], dtype)?;
            bias = Some(*other);
        }
    }
    let mut inputs = vec![Some(x), Some(params[1]), bias];
    inputs.extend(before.iter().copied().map(Some));
    let mut list = cell.attrs();
    list.insert("reverse".into(), Attr::Bool(reverse));
    let mut made = s.builder.op("recurrence", &inputs, list)?;
    made.truncate(cell.n_states());
    Ok(made)
}

/// The last step in time of `[T, B, H]`, as `[1, B, H]`.
fn last_step(s: &mut Site, x: ContainerId, reverse: bool) -> Result<ContainerId, RuleError> {
    let one = SymExpr::constant(1);
    let stop = if reverse {
        one.clone()
    } else {
        s.builder.shape(x)[0].clone()
    };
    let start = stop.clone() - one;
    cut(s, x, 0, (start, stop, 1))
}

fn joined(s: &mut Site, parts: &[ContainerId], axis: i64) -> Result<ContainerId, RuleError> {
    match parts {
        [only] => Ok(*only),
        _ => s.op1("concat", parts, attrs([("axis", Attr::Int(axis))])),
    }
}
