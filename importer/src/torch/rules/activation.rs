//! Functions of one value: activations and elementary functions.

use super::Table;
use crate::torch::site::{Results, Site};
use graph::{Binary, Expr, Unary};

pub(super) const RULES: Table = &[
    ("aten.abs.default", |s| unary(s, Unary::Abs)),
    ("aten.acos.default", |s| unary(s, Unary::Acos)),
    ("aten.acosh.default", |s| unary(s, Unary::Acosh)),
    ("aten.asin.default", |s| unary(s, Unary::Asin)),
    ("aten.asinh.default", |s| unary(s, Unary::Asinh)),
    ("aten.atan.default", |s| unary(s, Unary::Atan)),
    ("aten.atanh.default", |s| unary(s, Unary::Atanh)),
    ("aten.ceil.default", |s| unary(s, Unary::Ceil)),
    ("aten.cos.default", |s| unary(s, Unary::Cos)),
    ("aten.cosh.default", |s| unary(s, Unary::Cosh)),
    ("aten.erf.default", |s| unary(s, Unary::Erf)),
    ("aten.exp.default", |s| unary(s, Unary::Exp)),
    ("aten.expm1.default", |s| unary(s, Unary::Expm1)),
    ("aten.floor.default", |s| unary(s, Unary::Floor)),
    ("aten.isnan.default", |s| unary(s, Unary::IsNan)),
    ("aten.log.default", |s| unary(s, Unary::Log)),
    ("aten.log1p.default", |s| unary(s, Unary::Log1p)),
    ("aten.logical_not.default", |s| unary(s, Unary::Not)),
    ("aten.bitwise_not.default", bitwise_not),
    ("aten.neg.default", |s| unary(s, Unary::Neg)),
    ("aten.reciprocal.default", |s| unary(s, Unary::Recip)),
    ("aten.round.default", |s| unary(s, Unary::Round)),
    ("aten.rsqrt.default", |s| unary(s, Unary::Rsqrt)),
    ("aten.sigmoid.default", |s| unary(s, Unary::Sigmoid)),
    ("aten.sign.default", |s| unary(s, Unary::Sign)),
    ("aten.sgn.default", |s| unary(s, Unary::Sign)),
    ("aten.sin.default", |s| unary(s, Unary::Sin)),
    ("aten.sinh.default", |s| unary(s, Unary::Sinh)),
    ("aten.sqrt.default", |s| unary(s, Unary::Sqrt)),
    ("aten.tan.default", |s| unary(s, Unary::Tan)),
    ("aten.tanh.default", |s| unary(s, Unary::Tanh)),
    ("aten.trunc.default", |s| unary(s, Unary::Trunc)),
    ("aten.square.default", |s| of(s, x().mul(x()))),
    ("aten.log2.default", |s| {
        of(s, x().log().mul(Expr::float(std::f64::consts::LOG2_E)))
    }),
    ("aten.log10.default", |s| {
        of(s, x().log().mul(Expr::float(std::f64::consts::LOG10_E)))
    }),
    ("aten.relu.default", |s| of(s, relu(x()))),
    ("aten.relu6.default", |s| of(s, clip(x(), 0.0, 6.0))),
    ("aten.silu.default", |s| of(s, x().mul(x().sigmoid()))),
    ("aten.mish.default", |s| {
        of(s, x().mul(softplus(x()).tanh()))
    }),
    ("aten.hardsigmoid.default", |s| of(s, hard_sigmoid())),
    ("aten.hardswish.default", |s| of(s, x().mul(hard_sigmoid()))),
    ("aten.log_sigmoid.default", |s| {
        of(s, softplus(x().neg()).neg())
    }),
    ("aten.softsign.default", |s| {
        of(s, x().div(x().abs().add(Expr::float(1.0))))
    }),
    ("aten.tanhshrink.default", |s| of(s, x().sub(x().tanh()))),
    ("aten.gelu.default", gelu),
    ("aten.hardtanh.default", hardtanh),
    ("aten.leaky_relu.default", leaky_relu),
    ("aten.elu.default", elu),
    ("aten.selu.default", selu),
    ("aten.celu.default", celu),
    ("aten.softplus.default", softplus_scaled),
    ("aten.threshold.default", threshold),
    ("aten.clamp.default", clamp),
    ("aten.clip.default", clamp),
    ("aten.clamp_min.default", clamp),
    ("aten.clamp_max.default", clamp),
    ("aten.prelu.default", prelu),
];

fn x() -> Expr {
    Expr::In(0)
}

fn unary(s: &mut Site, f: Unary) -> Results {
    of(s, Expr::unary(f, x()))
}

/// `expr` of the first argument, computed in the result's type.
fn of(s: &mut Site, expr: Expr) -> Results {
    let (input, dtype) = (s.subject()?, s.out_dtype(0));
    let converted = dtype.is_float() && s.builder.dtype(input) != dtype;
    let expr = match converted {
        true => expr.map_leaves(&|leaf| matches!(leaf, Expr::In(0)).then(|| x().cast(dtype))),
        false => expr,
    };
    Ok(vec![Some(s.elementwise(expr, &[input], dtype)?)])
}

/// Gradient 0 at 0, as PyTorch has it.
fn relu(x: Expr) -> Expr {
    Expr::select(
        Expr::binary(Binary::Gt, x.clone(), Expr::float(0.0)),
        x,
        Expr::float(0.0),
    )
}

/// Gradient 0 at both ends, as `hardtanh` has it.
fn clip(x: Expr, low: f64, high: f64) -> Expr {
    let above = Expr::binary(Binary::Ge, x.clone(), Expr::float(high));
    let below = Expr::binary(Binary::Le, x.clone(), Expr::float(low));
    Expr::select(
        below,
        Expr::float(low),
        Expr::select(above, Expr::float(high), x),
    )
}

/// `max(x, 0) + log1p(e^−|x|)`, which does not overflow.
fn softplus(x: Expr) -> Expr {
    relu(x.clone()).add(x.abs().neg().exp().log1p())
}

fn hard_sigmoid() -> Expr {
    clip(
        x().add(Expr::float(3.0)).mul(Expr::float(1.0 / 6.0)),
        0.0,
        1.0,
    )
}

fn bitwise_not(s: &mut Site) -> Results {
    let input = s.subject()?;
    match s.builder.dtype(input) {
        graph::DType::Bool => unary(s, Unary::Not),
        dtype => Err(s.unsupported(format!("of {dtype}"))),
    }
}

fn gelu(s: &mut Site) -> Results {
    let half = x().mul(Expr::float(0.5));
    let inner = match s.text_or("approximate", "none")?.as_str() {
        "tanh" => {
            let cubic = x().mul(x()).mul(x()).mul(Expr::float(0.044715));
            let scale = Expr::float((2.0 / std::f64::consts::PI).sqrt());
            x().add(cubic).mul(scale).tanh()
        }
        _ => x().mul(Expr::float(std::f64::consts::FRAC_1_SQRT_2)).erf(),
    };
    of(s, half.mul(inner.add(Expr::float(1.0))))
}

fn hardtanh(s: &mut Site) -> Results {
    let expr = clip(
        x(),
        s.float_or("min_val", -1.0)?,
        s.float_or("max_val", 1.0)?,
    );
    of(s, expr)
}

fn leaky_relu(s: &mut Site) -> Results {
    let slope = Expr::float(s.float_or("negative_slope", 0.01)?);
    let positive = Expr::binary(Binary::Gt, x(), Expr::float(0.0));
    of(s, Expr::select(positive, x(), x().mul(slope)))
}

fn exponential_below_zero(scale: f64, alpha: f64, input_scale: f64) -> Expr {
    let positive = Expr::binary(Binary::Gt, x(), Expr::float(0.0));
    let negative = x()
        .mul(Expr::float(input_scale))
        .expm1()
        .mul(Expr::float(alpha * scale));
    Expr::select(positive, x().mul(Expr::float(scale)), negative)
}

fn elu(s: &mut Site) -> Results {
    let (alpha, scale) = (s.float_or("alpha", 1.0)?, s.float_or("scale", 1.0)?);
    of(
        s,
        exponential_below_zero(scale, alpha, s.float_or("input_scale", 1.0)?),
    )
}

fn selu(s: &mut Site) -> Results {
    // Constants of arXiv 1706.02515.
    of(
        s,
        exponential_below_zero(1.0507009873554805, 1.6732632423543772, 1.0),
    )
}

fn celu(s: &mut Site) -> Results {
    let alpha = s.float_or("alpha", 1.0)?;
    of(s, exponential_below_zero(1.0, alpha, 1.0 / alpha))
}

fn softplus_scaled(s: &mut Site) -> Results {
    let (beta, threshold) = (s.float_or("beta", 1.0)?, s.float_or("threshold", 20.0)?);
    let scaled = x().mul(Expr::float(beta));
    let linear = Expr::binary(Binary::Gt, scaled.clone(), Expr::float(threshold));
    of(
        s,
        Expr::select(linear, x(), softplus(scaled).mul(Expr::float(1.0 / beta))),
    )
}

fn threshold(s: &mut Site) -> Results {
    let above = Expr::binary(Binary::Gt, x(), s.scalar("threshold")?);
    let value = s.scalar("value")?;
    of(s, Expr::select(above, x(), value))
}

/// Gradient 1 at the bounds, as `clamp` has it.
fn clamp(s: &mut Site) -> Results {
    let mut expr = x();
    if s.has("max") {
        let max = s.scalar("max")?;
        expr = Expr::select(Expr::binary(Binary::Gt, x(), max.clone()), max, expr);
    }
    if s.has("min") {
        let min = s.scalar("min")?;
        expr = Expr::select(Expr::binary(Binary::Lt, x(), min.clone()), min, expr);
    }
    of(s, expr)
}

fn prelu(s: &mut Site) -> Results {
    let (input, mut weight) = (s.tensor("self")?, s.tensor("weight")?);
    let rank = s.rank(input);
    if rank > 2 {
        let mut shape = s.builder.shape(weight);
        shape.resize(rank - 1, graph::SymExpr::constant(1));
        weight = s.reshape(weight, shape)?;
    }
    let positive = Expr::binary(Binary::Gt, x(), Expr::float(0.0));
    let expr = Expr::select(positive, x(), x().mul(Expr::In(1)));
    let dtype = s.out_dtype(0);
    Ok(vec![Some(s.elementwise(expr, &[input, weight], dtype)?)])
}
