//! Losses: NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss.

use super::real::{Real, in_real};
use super::softmax::log_softmax;
use super::{Call, Inference, Operator};
use crate::fact::Fact;
use crate::tensor::Tensor;

pub const ROWS: &[Operator] = &[
    Operator::new(
        "NegativeLogLikelihoodLoss",
        infer,
        |call| in_real!(call.input(0)?.element(), R => loss::<R>(call, false)),
    ),
    Operator::new(
        "SoftmaxCrossEntropyLoss",
        infer,
        |call| in_real!(call.input(0)?.element(), R => loss::<R>(call, true)),
    ),
];

fn infer(cx: &Inference) -> Option<Vec<Fact>> {
    let shape = match cx.attributes.text("reduction").unwrap_or("mean") {
        "none" => cx.shape(1).map(<[_]>::to_vec),
        _ => Some(Vec::new()),
    };
    let mut outputs = vec![Fact::new(cx.element(0), shape)];
    if cx.node.output.len() > 1 {
        outputs.extend(super::movement::same(cx)?);
    }
    Some(outputs)
}

/// Minus the (logarithm of the softmax of the) score of each target, weighted. Sums are in `f64`.
fn loss<R: Real>(call: &Call, is_softmax: bool) -> Result<Vec<Tensor>, String> {
    let (x, target) = (call.input(0)?, call.input(1)?);
    let element = x.element();
    let fits = x.shape.len() >= 2
        && target.shape.first() == x.shape.first()
        && target.shape.get(1..) == x.shape.get(2..);
    if !fits {
        return Err(format!(
            "targets of sizes {:?} do not fit {:?}",
            target.shape, x.shape
        ));
    }
    let (classes, inner) = (x.shape[1], x.shape[2..].iter().product::<usize>());
    let mut scores = R::read(x)?.into_owned();
    if is_softmax {
        let mut row = Vec::with_capacity(classes);
        for block in scores.chunks_mut((classes * inner).max(1)) {
            for at in 0..inner {
                row.clear();
                row.extend(block[at..].iter().step_by(inner));
                log_softmax(&mut row);
                let to = block[at..].iter_mut().step_by(inner);
                to.zip(&row).for_each(|(to, x)| *to = *x);
            }
        }
    }
    let weights = call.optional(2).map(|w| R::read(w)).transpose()?;
    if weights.as_ref().is_some_and(|w| w.len() != classes) {
        return Err(format!(
            "its weights are not one for each of {classes} classes"
        ));
    }
    let ignored = call.attributes.int("ignore_index");
    let mut losses = Vec::with_capacity(target.len());
    let (mut sum, mut weight_sum) = (0.0, 0.0);
    for (n, class) in call.ints(1)?.into_iter().enumerate() {
        if ignored == Some(class) {
            losses.push(R::zero());
            continue;
        }
        let at = usize::try_from(class).ok().filter(|c| *c < classes);
        let at = at.ok_or_else(|| format!("the target {class} is not one of {classes} classes"))?;
        let weight = weights.as_ref().map_or(1.0, |w| w[at].wide());
        let score = scores[(n / inner * classes + at) * inner + n % inner];
        let loss = -score.wide() * weight;
        sum += loss;
        weight_sum += weight;
        losses.push(R::of(loss));
    }
    let y = match call.attributes.text("reduction").unwrap_or("mean") {
        "none" => R::tensor(element, &target.shape, losses)?,
        "sum" => R::tensor(element, &[], vec![R::of(sum)])?,
        "mean" => R::tensor(element, &[], vec![R::of(sum / weight_sum)])?,
        other => return Err(format!("the reduction `{other}` is not known")),
    };
    let mut outputs = vec![y];
    if call.node.output.len() > 1 {
        outputs.push(R::tensor(element, &x.shape, scores)?);
    }
    Ok(outputs)
}
