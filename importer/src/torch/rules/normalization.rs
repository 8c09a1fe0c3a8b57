//! Batch, layer and group normalization, and softmax.

use super::Table;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site};
use graph::{Attr, Attrs, ContainerId, Expr, SymExpr};
use ops::{OpBuilder, attrs};

pub(super) const RULES: Table = &[
    (
        "aten._native_batch_norm_legit_functional.default",
        batch_norm_training,
    ),
    (
        "aten._native_batch_norm_legit.no_stats",
        batch_norm_without_statistics,
    ),
    (
        "aten._native_batch_norm_legit_no_training.default",
        batch_norm_inference,
    ),
    ("aten.layer_norm.default", layer_norm),
    ("aten.native_layer_norm.default", layer_norm),
    ("aten.rms_norm.default", rms_norm),
    ("aten.group_norm.default", group_norm),
    ("aten.softmax.int", |s| softmax(s, "softmax")),
    ("aten._softmax.default", |s| softmax(s, "softmax")),
    ("aten._safe_softmax.default", safe_softmax),
    ("aten.log_softmax.int", |s| softmax(s, "log_softmax")),
    ("aten._log_softmax.default", |s| softmax(s, "log_softmax")),
];

fn eps(s: &Site, default: f64) -> Result<(&'static str, Attr), RuleError> {
    Ok(("eps", Attr::Float(s.float_or("eps", default)?)))
}

/// y, batch mean, batch inverse deviation, batch variance (biased).
fn normalized(s: &mut Site) -> Result<Vec<ContainerId>, RuleError> {
    let inputs = [
        Some(s.tensor("input")?),
        s.optional_tensor("weight")?,
        s.optional_tensor("bias")?,
    ];
    let a = attrs([eps(s, 1e-5)?]);
    Ok(s.builder.op("batch_norm", &inputs, a)?)
}

/// `new = (1 − momentum)·running + momentum·batch`, the variance unbiased by n/(n − 1).
fn batch_norm_training(s: &mut Site) -> Results {
    let made = normalized(s)?;
    let x = s.tensor("input")?;
    let mut shape = s.builder.shape(x);
    shape.remove(1);
    let count = SymExpr::product(&shape);
    let momentum = s.float_or("momentum", 0.1)?;
    let n = Expr::Index(count).cast(graph::DType::F64);
    let unbiased = n
        .clone()
        .div(n.sub(Expr::float(1.0)))
        .cast(s.builder.dtype(made[3]));
    let blend = |batch: Expr| {
        let kept = Expr::In(0).mul(Expr::float(1.0 - momentum));
        kept.add(batch.mul(Expr::float(momentum)))
    };
    let running = [s.tensor("running_mean")?, s.tensor("running_var")?];
    let dtypes = running.map(|id| s.builder.dtype(id));
    let mean = s.elementwise(blend(Expr::In(1)), &[running[0], made[1]], dtypes[0])?;
    let var = s.elementwise(
        blend(Expr::In(1).mul(unbiased)),
        &[running[1], made[3]],
        dtypes[1],
    )?;
    Ok(vec![
        Some(made[0]),
        Some(made[1]),
        Some(made[2]),
        Some(mean),
        Some(var),
    ])
}

fn batch_norm_without_statistics(s: &mut Site) -> Results {
    let made = normalized(s)?;
    Ok(made[..3].iter().copied().map(Some).collect())
}

fn batch_norm_inference(s: &mut Site) -> Results {
    let inputs = [
        Some(s.tensor("input")?),
        s.optional_tensor("weight")?,
        s.optional_tensor("bias")?,
        Some(s.tensor("running_mean")?),
        Some(s.tensor("running_var")?),
    ];
    let a = attrs([eps(s, 1e-5)?]);
    let y = s.builder.op("batch_norm_inference", &inputs, a)?[0];
    // PyTorch also gives two empty tensors, which nothing reads.
    Ok(vec![Some(y)])
}

/// y, and for `native_layer_norm` mean and inverse deviation with the normalized dimensions as ones.
fn layer_norm(s: &mut Site) -> Results {
    let inputs = [
        Some(s.tensor("input")?),
        s.optional_tensor("weight")?,
        s.optional_tensor("bias")?,
    ];
    let axes = Attr::Int(s.sizes("normalized_shape")?.len() as i64);
    let a = attrs([("axes", axes), eps(s, 1e-5)?]);
    let made = s.builder.op("layer_norm", &inputs, a)?;
    let mut results = vec![Some(made[0])];
    for (position, statistic) in made.iter().enumerate().take(s.node.outputs.len()).skip(1) {
        let shape = s.out_shape(position);
        results.push(Some(s.reshape(*statistic, shape)?));
    }
    Ok(results)
}

fn rms_norm(s: &mut Site) -> Results {
    let inputs = [Some(s.tensor("input")?), s.optional_tensor("weight")?];
    // PyTorch's default is the machine epsilon of the element type.
    let default = if s.out_dtype(0) == graph::DType::F64 {
        f64::EPSILON
    } else {
        f64::from(f32::EPSILON)
    };
    let axes = Attr::Int(s.sizes("normalized_shape")?.len() as i64);
    let a = attrs([("axes", axes), eps(s, default)?]);
    Ok(vec![Some(s.builder.op("rms_norm", &inputs, a)?[0])])
}

fn group_norm(s: &mut Site) -> Results {
    let inputs = [
        Some(s.tensor("input")?),
        s.optional_tensor("weight")?,
        s.optional_tensor("bias")?,
    ];
    let a = attrs([("groups", Attr::Int(s.int("num_groups")?)), eps(s, 1e-5)?]);
    Ok(vec![Some(s.builder.op("group_norm", &inputs, a)?[0])])
}

fn softmax(s: &mut Site, op: &str) -> Results {
    softmax_with(s, op, attrs([]))
}

/// Zeros for a row of −∞.
fn safe_softmax(s: &mut Site) -> Results {
    softmax_with(s, "softmax", attrs([("safe", Attr::Bool(true))]))
}

fn softmax_with(s: &mut Site, op: &str, mut a: Attrs) -> Results {
    let (x, dtype) = (s.subject()?, s.out_dtype(0));
    let x = s.cast(x, dtype)?;
    if s.rank(x) == 0 {
        return Err(s.unsupported("of a scalar"));
    }
    let axis = s.axis("dim", s.rank(x))? as i64;
    a.insert("axis".into(), Attr::Int(axis));
    Ok(vec![Some(s.op1(op, &[x], a)?)])
}
