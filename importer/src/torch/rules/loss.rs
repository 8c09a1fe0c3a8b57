//! Losses: over classes by their operators, others as element-wise terms and a reduction, which fuse.

use super::Table;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site};
use graph::{Attr, Binary, ContainerId, DType, Expr, Unary};
use ops::elementwise::gradient_attr;
use ops::{OpBuilder, attrs};

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
    let value = Expr::select(near.clone(), square, line);
    // NaN of NaN, unlike the slope of an absolute value.
    let slope = Expr::select(
        near,
        difference().mul(Expr::float(2.0 * quadratic)),
        difference().sign().mul(Expr::float(linear)),
    );
    let by_x = Expr::In(2).mul(slope);
    let dtype = s.out_dtype(0);
    let list = attrs([
        ("expr", Attr::Expr(value)),
        ("dtype", Attr::DType(dtype)),
        (&gradient_attr(0), Attr::Expr(by_x.clone())),
        (&gradient_attr(1), Attr::Expr(by_x.neg())),
    ]);
    let inputs = [s.subject()?, s.tensor("target")?];
    let values = s.op1("elementwise", &inputs, list)?;
    combined(s, values)
}

fn binary_cross_entropy(s: &mut Site) -> Results {
    let (x, y) = (s.subject()?, s.tensor("target")?);
    let dtype = s.out_dtype(0);
    let (x, y) = (s.cast(x, dtype)?, s.cast(y, dtype)?);
    let mut terms = s.op1("binary_cross_entropy", &[x, y], attrs([]))?;
    if let Some(w) = s.optional_tensor("weight")? {
        terms = s.elementwise(Expr::In(0).mul(Expr::In(1)), &[terms, w], dtype)?;
    }
    combined(s, terms)
}

/// `(1 − y)·x + (1 + (p − 1)·y)·softplus(−x)` with `p` the weight of positives.
fn binary_cross_entropy_with_logits(s: &mut Site) -> Results {
    let (x, y) = (Expr::In(0), Expr::In(1));
    let one = || Expr::float(1.0);
    let softplus = ops::activations::softplus(x.clone().neg());
    let mut inputs = vec![s.subject()?, s.tensor("target")?];
    // Derived term by term, the slope would be a difference of numbers near 1 where it is near 0.
    let sigmoid = |x: Expr| Expr::unary(Unary::Sigmoid, x);
    let negative = one().sub(y.clone());
    let to_negative = negative.clone().mul(sigmoid(x.clone()));
    let to_positive = y.clone().mul(sigmoid(x.clone().neg()));
    let value = negative.mul(x);
    let (value, slope) = match s.optional_tensor("pos_weight")? {
        None => (value.add(softplus), to_negative.sub(to_positive)),
        Some(weight) => {
            inputs.push(weight);
            let factor = one().add(Expr::In(2).sub(one()).mul(y));
            let slope = to_negative.sub(Expr::In(2).mul(to_positive));
            (value.add(factor.mul(softplus)), slope)
        }
    };
    let dtype = s.out_dtype(0);
    let list = attrs([
        ("expr", Attr::Expr(value)),
        ("dtype", Attr::DType(dtype)),
        (
            &gradient_attr(0),
            Attr::Expr(Expr::In(inputs.len()).mul(slope)),
        ),
    ]);
    let values = s.op1("elementwise", &inputs, list)?;
    let values = match s.optional_tensor("weight")? {
        Some(w) => s.elementwise(Expr::In(0).mul(Expr::In(1)), &[values, w], dtype)?,
        None => values,
    };
    combined(s, values)
}

fn cross_entropy(s: &mut Site) -> Results {
    let smoothing = s.float_or("label_smoothing", 0.0)?;
    of_classes(s, "cross_entropy", smoothing)
}

fn nll(s: &mut Site) -> Results {
    of_classes(s, "nll_loss", 0.0)
}

/// The loss, and for `nll_loss_forward` what its mean divides by.
fn of_classes(s: &mut Site, op: &str, smoothing: f64) -> Results {
    let (x, target) = (s.subject()?, s.tensor("target")?);
    let target = match s.builder.dtype(target).is_float() {
        true => target,
        false => s.cast(target, DType::I64)?,
    };
    let reduction = match combine(s)? {
        Combine::Not => "none",
        Combine::Mean => "mean",
        Combine::Sum => "sum",
    };
    let mut a = attrs([
        ("reduction", Attr::Str(reduction.into())),
        ("ignore_index", Attr::Int(s.int_or("ignore_index", -100)?)),
    ]);
    if smoothing > 0.0 {
        a.insert("label_smoothing".into(), Attr::Float(smoothing));
    }
    let inputs = [Some(x), Some(target), s.optional_tensor("weight")?];
    let made = s.builder.op(op, &inputs, a)?;
    let wanted = s.node.outputs.len().min(2);
    Ok(made[..wanted].iter().copied().map(Some).collect())
}
