//! Losses, written as element-wise terms and a reduction, which fuse.

use super::Table;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site, element_index};
use graph::{Attr, Binary, ContainerId, Expr, SymExpr};
use ops::attrs;

pub(super) const RULES: Table = &[
    ("aten.cross_entropy_loss.default", cross_entropy),
    ("aten.nll_loss.default", nll),
    ("aten.nll_loss_nd.default", nll),
    ("aten.nll_loss_forward.default", nll),
    ("aten.mse_loss.default", mean_squared),
    ("aten.l1_loss.default", mean_absolute),
    ("aten.smooth_l1_loss.default", |s| smooth(s, "beta")),
    ("aten.huber_loss.default", |s| smooth(s, "delta")),
    ("aten.binary_cross_entropy.default", binary_cross_entropy),
    (
        "aten.binary_cross_entropy_with_logits.default",
        binary_cross_entropy_with_logits,
    ),
];

/// PyTorch's numbers for `reduction`.
enum Combine {
    Not,
    Mean,
    Sum,
}

fn combine(s: &Site) -> Result<Combine, RuleError> {
    Ok(match s.int_or("reduction", 1)? {
        0 => Combine::Not,
        2 => Combine::Sum,
        _ => Combine::Mean,
    })
}

/// The terms' mean or sum over everything.
fn combined(s: &mut Site, terms: ContainerId) -> Results {
    let axes: Vec<usize> = (0..s.rank(terms)).collect();
    Ok(vec![Some(match combine(s)? {
        Combine::Not => terms,
        Combine::Mean => s.reduce("mean", terms, &axes, false)?,
        Combine::Sum => s.reduce("sum", terms, &axes, false)?,
    })])
}

fn terms(s: &mut Site, expr: Expr) -> Result<ContainerId, RuleError> {
    let (x, y) = (s.subject()?, s.tensor("target")?);
    let dtype = s.out_dtype(0);
    s.elementwise(expr, &[x, y], dtype)
}

fn difference() -> Expr {
    Expr::In(0).sub(Expr::In(1))
}

fn mean_squared(s: &mut Site) -> Results {
    let squares = terms(s, difference().mul(difference()))?;
    combined(s, squares)
}

fn mean_absolute(s: &mut Site) -> Results {
    let sizes = terms(s, difference().abs())?;
    combined(s, sizes)
}

/// Squares near zero, absolute values beyond; `smooth_l1` is Huber's loss divided by beta.
fn smooth(s: &mut Site, bound: &str) -> Results {
    let b = s.float_or(bound, 1.0)?;
    if b <= 0.0 {
        return mean_absolute(s);
    }
    let d = difference().abs();
    let near = Expr::binary(Binary::Lt, d.clone(), Expr::float(b));
    let (quadratic, linear) = match bound {
        "beta" => (0.5 / b, 1.0),
        _ => (0.5, b),
    };
    let square = difference().mul(difference()).mul(Expr::float(quadratic));
    let line = d.sub(Expr::float(0.5 * b)).mul(Expr::float(linear));
    let values = terms(s, Expr::select(near, square, line))?;
    combined(s, values)
}

/// `−w·(y·ln x + (1 − y)·ln(1 − x))`, logarithms not below −100 as PyTorch has it.
fn binary_cross_entropy(s: &mut Site) -> Results {
    let bounded = |e: Expr| Expr::binary(Binary::Max, e.log(), Expr::float(-100.0));
    let one = || Expr::float(1.0);
    let (x, y) = (Expr::In(0), Expr::In(1));
    let value = y
        .clone()
        .mul(bounded(x.clone()))
        .add(one().sub(y).mul(bounded(one().sub(x))));
    weighted_terms(s, value.neg())
}

/// `(1 − y)·x + (1 + (p − 1)·y)·softplus(−x)` with `p` the weight of positives.
fn binary_cross_entropy_with_logits(s: &mut Site) -> Results {
    let (x, y) = (Expr::In(0), Expr::In(1));
    let one = || Expr::float(1.0);
    let softplus = ops::activations::softplus(x.clone().neg());
    if !s.has("pos_weight") {
        return weighted_terms(s, one().sub(y).mul(x).add(softplus));
    }
    let factor = one().add(Expr::In(2).sub(one()).mul(y.clone()));
    let value = one().sub(y).mul(x).add(factor.mul(softplus));
    let inputs = [s.subject()?, s.tensor("target")?, s.tensor("pos_weight")?];
    let dtype = s.out_dtype(0);
    let values = s.elementwise(value, &inputs, dtype)?;
    let values = match s.optional_tensor("weight")? {
        Some(w) => s.elementwise(Expr::In(0).mul(Expr::In(1)), &[values, w], dtype)?,
        None => values,
    };
    combined(s, values)
}

fn weighted_terms(s: &mut Site, expr: Expr) -> Results {
    let values = match s.optional_tensor("weight")? {
        Some(w) => {
            let inputs = [s.subject()?, s.tensor("target")?, w];
            let dtype = s.out_dtype(0);
            s.elementwise(expr.mul(Expr::In(2)), &inputs, dtype)?
        }
        None => terms(s, expr)?,
    };
    combined(s, values)
}

fn cross_entropy(s: &mut Site) -> Results {
    let (x, target) = (s.subject()?, s.tensor("target")?);
    let axis = usize::from(s.rank(x) > 1);
    let log = s.op1(
        "log_softmax",
        &[x],
        attrs([("axis", Attr::Int(axis as i64))]),
    )?;
    let smoothing = s.float_or("label_smoothing", 0.0)?;
    if s.builder.dtype(target).is_float() {
        return with_probabilities(s, log, target, axis, smoothing);
    }
    with_classes(s, log, target, axis, smoothing)
}

fn nll(s: &mut Site) -> Results {
    let (log, target) = (s.subject()?, s.tensor("target")?);
    let axis = usize::from(s.rank(log) > 1);
    with_classes(s, log, target, axis, 0.0)
}

/// `−Σ_c t_c·log_c`, the mean taken over everything but the classes.
fn with_probabilities(
    s: &mut Site,
    log: ContainerId,
    target: ContainerId,
    axis: usize,
    smoothing: f64,
) -> Results {
    if s.has("weight") {
        return Err(s.unsupported("class weights with probabilities as targets"));
    }
    let n_classes = s.builder.shape(log)[axis].clone();
    let dtype = s.builder.dtype(log);
    let mut t = Expr::In(1);
    if smoothing > 0.0 {
        let even = Expr::float(smoothing).div(Expr::Index(n_classes).cast(dtype));
        t = t.mul(Expr::float(1.0 - smoothing)).add(even);
    }
    let products = s.elementwise(Expr::In(0).mul(t).neg(), &[log, target], dtype)?;
    let rows = s.reduce("sum", products, &[axis], false)?;
    combined(s, rows)
}

/// `−w[t]·log_t` where `t ≠ ignore_index`; the mean divides by the weights' sum. Which class is meant
/// is compared, not looked up: the terms of a row are summed in the same pass that reads it.
fn with_classes(
    s: &mut Site,
    log: ContainerId,
    target: ContainerId,
    axis: usize,
    smoothing: f64,
) -> Results {
    let dtype = s.builder.dtype(log);
    let n_classes = s.builder.shape(log)[axis].clone();
    let mut shape = s.builder.shape(target);
    shape.insert(axis, SymExpr::constant(1));
    let target = s.reshape(target, shape)?;
    let ignored = s.int_or("ignore_index", -100)?;
    let counted = Expr::binary(Binary::Ne, Expr::In(1), Expr::int(ignored));
    let class = Expr::binary(Binary::Eq, Expr::In(1), Expr::Index(element_index(axis)));
    let weight = s.optional_tensor("weight")?;
    let mut inputs = vec![log, target];
    let mut w = Expr::float(1.0);
    if let Some(weight) = weight {
        let mut shape = s.builder.shape(weight);
        shape.extend(std::iter::repeat_n(
            SymExpr::constant(1),
            s.rank(log) - axis - 1,
        ));
        inputs.push(s.reshape(weight, shape)?);
        w = Expr::In(2);
    }
    let zero = || Expr::float(0.0);
    let mut chosen = Expr::select(class.clone(), w.clone(), zero());
    if smoothing > 0.0 {
        let even = Expr::float(smoothing).div(Expr::Index(n_classes).cast(dtype));
        chosen = chosen
            .mul(Expr::float(1.0 - smoothing))
            .add(w.clone().mul(even));
    }
    let term = Expr::select(counted.clone(), Expr::In(0).mul(chosen).neg(), zero());
    let products = s.elementwise(term, &inputs, dtype)?;
    let rows = s.reduce("sum", products, &[axis], false)?;
    let total_weight = |s: &mut Site| -> Result<ContainerId, RuleError> {
        let counted = Expr::binary(Binary::And, counted.clone(), class.clone());
        let weights = s.elementwise(Expr::select(counted, w.clone(), zero()), &inputs, dtype)?;
        let axes: Vec<usize> = (0..s.rank(weights)).collect();
        s.reduce("sum", weights, &axes, false)
    };
    let axes: Vec<usize> = (0..s.rank(rows)).collect();
    let loss = match combine(s)? {
        Combine::Not => rows,
        Combine::Sum => s.reduce("sum", rows, &axes, false)?,
        Combine::Mean => {
            let sum = s.reduce("sum", rows, &axes, false)?;
            let divisor = total_weight(s)?;
            s.elementwise(Expr::In(0).div(Expr::In(1)), &[sum, divisor], dtype)?
        }
    };
    let mut results = vec![Some(loss)];
    if s.node.outputs.len() > 1 {
        results.push(Some(total_weight(s)?));
    }
    Ok(results)
}
