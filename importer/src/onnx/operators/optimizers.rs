//! Steps of optimizers, as the training domain of the standard has them: new values of parameters and of their state.
//!
//! Inputs are the learning rate R, the number of steps T, then all parameters, all gradients and all states of a kind;
//! outputs are the new parameters and states in the same order.

use super::{Rules, Values};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::value::Value;
use graph::{ContainerId, Expr};

pub static RULES: Rules = &[
    ("ai.onnx.preview.training.Adagrad", adagrad),
    ("ai.onnx.preview.training.Adam", adam),
    ("ai.onnx.preview.training.Momentum", momentum),
];

fn number(value: f64) -> Expr {
    Expr::float(value)
}

/// R and T; then for each parameter: the parameter, its gradient and its states.
fn grouped(
    cx: &mut NodeCx,
    kinds: usize,
) -> Result<(Vec<ContainerId>, Vec<Vec<ContainerId>>), Refusal> {
    let all = cx.all_inputs()?;
    let (rate, rest) = all.split_at_checked(2).ok_or("it has no inputs")?;
    let n = rest.len() / kinds;
    if n == 0 || n * kinds != rest.len() {
        return Err("its inputs are not as many of each kind".into());
    }
    let one = |at: usize| (0..kinds).map(|kind| rest[kind * n + at]).collect();
    Ok((rate.to_vec(), (0..n).map(one).collect()))
}

/// The gradient plus that of the regularizing term, the parameters' squares.
fn regular(x: Expr, gradient: Expr, coefficient: f64) -> Expr {
    gradient.add(x.mul(number(coefficient)))
}

/// All new parameters, then all new states of each kind.
fn in_order(groups: &[Vec<ContainerId>]) -> Values {
    let kinds = groups.first().map_or(0, Vec::len);
    let of_kind = |kind: usize| groups.iter().map(move |group| Value::Data(group[kind]));
    Ok((0..kinds).flat_map(of_kind).collect())
}

fn adagrad(cx: &mut NodeCx) -> Values {
    let decay = cx.float("decay_factor", 0.0)?;
    let epsilon = cx.float("epsilon", 0.0)?;
    let norm = cx.float("norm_coefficient", 0.0)?;
    let (rate, groups) = grouped(cx, 3)?;
    let mut new = Vec::new();
    for group in groups {
        let [x, g, h] = [Expr::In(2), Expr::In(3), Expr::In(4)];
        let inputs = [rate.clone(), group].concat();
        let gradient = regular(x.clone(), g, norm);
        let squares = h.add(gradient.clone().mul(gradient.clone()));
        let steps = Expr::In(1).cast(cx.dtype(inputs[2]));
        let rate = Expr::In(0).div(steps.mul(number(decay)).add(number(1.0)));
        let step = rate
            .mul(gradient)
            .div(squares.clone().sqrt().add(number(epsilon)));
        let x = cx.elementwise(x.sub(step), &inputs)?;
        new.push(vec![x, kept(cx, squares, &inputs)?]);
    }
    in_order(&new)
}

fn adam(cx: &mut NodeCx) -> Values {
    let (alpha, beta) = (cx.float("alpha", 0.9)?, cx.float("beta", 0.999)?);
    let epsilon = cx.float("epsilon", 0.0)?;
    let norm = cx.float("norm_coefficient", 0.0)?;
    let norm_after = cx.float("norm_coefficient_post", 0.0)?;
    let (rate, groups) = grouped(cx, 4)?;
    let mut new = Vec::new();
    for group in groups {
        let [x, g, v, h] = [Expr::In(2), Expr::In(3), Expr::In(4), Expr::In(5)];
        let inputs = [rate.clone(), group].concat();
        let gradient = regular(x.clone(), g, norm);
        let mean = v
            .mul(number(alpha))
            .add(gradient.clone().mul(number(1.0 - alpha)));
        let square = gradient.clone().mul(gradient);
        let squares = h.mul(number(beta)).add(square.mul(number(1.0 - beta)));
        let steps = Expr::In(1).cast(cx.dtype(inputs[2]));
        let left = |base: f64| number(1.0).sub(number(base).pow(steps.clone()));
        let corrected = Expr::In(0).mul(left(beta).sqrt()).div(left(alpha));
        let rate = Expr::select(Expr::In(1).gt(Expr::int(0)), corrected, Expr::In(0));
        let step = rate
            .mul(mean.clone())
            .div(squares.clone().sqrt().add(number(epsilon)));
        let x = x.sub(step).mul(number(1.0 - norm_after));
        let x = cx.elementwise(x, &inputs)?;
        new.push(vec![
            x,
            kept(cx, mean, &inputs)?,
            kept(cx, squares, &inputs)?,
        ]);
    }
    in_order(&new)
}

fn momentum(cx: &mut NodeCx) -> Values {
    let (alpha, beta) = (cx.float("alpha", 0.0)?, cx.float("beta", 0.0)?);
    let norm = cx.float("norm_coefficient", 0.0)?;
    let nesterov = match cx.text("mode", "standard")?.as_str() {
        "standard" => false,
        "nesterov" => true,
        other => return Err(Refusal(format!("its attribute `mode` is `{other}`"))),
    };
    let (rate, groups) = grouped(cx, 3)?;
    let mut new = Vec::new();
    for group in groups {
        let [x, g, v] = [Expr::In(2), Expr::In(3), Expr::In(4)];
        let inputs = [rate.clone(), group].concat();
        let gradient = regular(x.clone(), g, norm);
        // In the first step, the gradient counts with a share of 1.
        let is_later = Expr::In(1).gt(Expr::int(0));
        let share = Expr::select(is_later, number(beta), number(1.0));
        let mean = v.mul(number(alpha)).add(share.mul(gradient.clone()));
        let step = match nesterov {
            true => gradient.add(mean.clone().mul(number(alpha))),
            false => mean.clone(),
        };
        let x = cx.elementwise(x.sub(Expr::In(0).mul(step)), &inputs)?;
        new.push(vec![x, kept(cx, mean, &inputs)?]);
    }
    in_order(&new)
}

/// A state, from the inputs that it reads.
fn kept(cx: &mut NodeCx, state: Expr, inputs: &[ContainerId]) -> Result<ContainerId, Refusal> {
    let read = state.inputs();
    let moved = state.map_leaves(&|leaf| match leaf {
        Expr::In(n) => read.iter().position(|own| own == n).map(Expr::In),
        _ => None,
    });
    let inputs: Vec<_> = read.iter().map(|n| inputs[*n]).collect();
    cx.elementwise(moved, &inputs)
}
