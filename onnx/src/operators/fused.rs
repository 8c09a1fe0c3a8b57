//! Operators of ONNX Runtime (domain `com.microsoft`) that stand for several of the standard's:
//! products, convolutions and normalizations with what follows or precedes them, forms of Gelu.

use super::activation::{Activation, sigmoid};
use super::convolution::{output_shape, real_conv};
use super::movement::{Broadcast, same};
use super::normalization::{Rows, epsilon_or};
use super::permute::permuted;
use super::products::{broadcast_sizes, matmul, real_gemm};
use super::real::{Real, in_real};
use super::{Call, Inference, Operator, normalization, products};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::Tensor;
use graph::SymExpr;

pub const ROWS: &[Operator] = &[
    Operator::new(
        "FusedConv",
        infer_conv,
        |call| in_real!(call.input(0)?.element(), R => conv::<R>(call)),
    )
    .domain("com.microsoft"),
    Operator::new(
        "FusedGemm",
        products::infer_gemm,
        |call| in_real!(call.input(0)?.element(), R => gemm::<R>(call)),
    )
    .domain("com.microsoft"),
    Operator::new("FusedMatMul", infer_product, product).domain("com.microsoft"),
    Operator::new("TransposeMatMul", infer_product, product).domain("com.microsoft"),
    Operator::new("Gelu", same, |call| each(call, |x, _| gelu(x))).domain("com.microsoft"),
    Operator::new("BiasGelu", same, |call| each(call, |x, _| gelu(x))).domain("com.microsoft"),
    Operator::new("FastGelu", same, |call| each(call, |x, _| fast_gelu(x))).domain("com.microsoft"),
    Operator::new("QuickGelu", same, |call| {
        each(call, |x, alpha| x * sigmoid(alpha * x))
    })
    .domain("com.microsoft"),
    Operator::new(
        "SkipLayerNormalization",
        infer_skip,
        |call| in_real!(call.input(0)?.element(), R => skip::<R>(call, true)),
    )
    .domain("com.microsoft"),
    Operator::new(
        "SkipSimplifiedLayerNormalization",
        infer_skip,
        |call| in_real!(call.input(0)?.element(), R => skip::<R>(call, false)),
    )
    .domain("com.microsoft"),
    // ONNX Runtime keeps it among the standard's operators.
    Operator::new(
        "SimplifiedLayerNormalization",
        normalization::infer_layer,
        simplified,
    ),
    Operator::new(
        "SimplifiedLayerNormalization",
        normalization::infer_layer,
        simplified,
    )
    .domain("com.microsoft"),
];

fn infer_conv(cx: &Inference) -> Option<Vec<Fact>> {
    cx.like_first(output_shape(cx, 0, 1))
}

/// `activation(conv(x, w) + b + z)`.
fn conv<R: Real>(call: &Call) -> Result<Vec<Tensor>, String> {
    let element = call.input(0)?.element();
    let (shape, mut y) = real_conv::<R>(call)?;
    if let Some(z) = call.optional(3) {
        if z.shape != shape {
            return Err(format!("{:?} cannot be added to {shape:?}", z.shape));
        }
        y.iter_mut()
            .zip(R::read(z)?.iter())
            .for_each(|(y, z)| *y += *z);
    }
    if let Some(name) = call.attributes.text("activation").filter(|n| !n.is_empty()) {
        let params = call.attributes.floats("activation_params").unwrap_or(&[]);
        let (mut alpha, mut beta) = (params.iter(), params.iter().skip(1));
        let activation = Activation::<R>::named(name, &mut alpha, &mut beta)?;
        y.iter_mut().for_each(|y| *y = activation.of(*y));
    }
    Ok(vec![R::tensor(element, &shape, y)?])
}

fn gemm<R: Real>(call: &Call) -> Result<Vec<Tensor>, String> {
    let y = real_gemm::<R>(call)?;
    let Some(name) = call.attributes.text("activation").filter(|n| !n.is_empty()) else {
        return Ok(vec![y]);
    };
    let param = |name: &str| call.attributes.float(name);
    let (alpha, beta) = (param("activation_alpha"), param("activation_beta"));
    let activation = Activation::<R>::named(name, &mut alpha.iter(), &mut beta.iter())?;
    let values = R::read(&y)?.iter().map(|x| activation.of(*x)).collect();
    Ok(vec![R::tensor(y.element(), &y.shape, values)?])
}

/// The order of an operand's dimensions in the product: batch, rows, columns.
fn order(rank: usize, batch: bool, transposed: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rank).collect();
    if rank < 2 {
        return order;
    }
    if batch {
        // The first dimension counts the rows, those between are the batch.
        order[..rank - 1].rotate_left(1);
    }
    if transposed {
        order.swap(rank - 2, rank - 1);
    }
    order
}

fn orders(attributes: crate::attributes::Attributes, a: usize, b: usize) -> [Vec<usize>; 2] {
    let flag = |name: &str| attributes.flag(name);
    [
        order(a, flag("transBatchA"), flag("transA")),
        order(b, flag("transBatchB"), flag("transB")),
    ]
}

fn infer_product(cx: &Inference) -> Option<Vec<Fact>> {
    let (Some(a), Some(b)) = (cx.shape(0), cx.shape(1)) else {
        return cx.like_first(None);
    };
    let [of_a, of_b] = orders(cx.attributes, a.len(), b.len());
    let turned = |shape: &[SymExpr], order: &[usize]| -> Vec<SymExpr> {
        order.iter().map(|d| shape[*d].clone()).collect()
    };
    let shape = products::product_shape(&turned(a, &of_a), &turned(b, &of_b), cx)?;
    cx.like_first(Some(shape))
}

fn product(call: &Call) -> Result<Vec<Tensor>, String> {
    let (a, b) = (call.input(0)?, call.input(1)?);
    let [of_a, of_b] = orders(call.attributes, a.shape.len(), b.shape.len());
    let turned = |t: &Tensor, order: &[usize]| match order.is_sorted() {
        true => t.clone(),
        false => permuted(t, order),
    };
    let y = matmul(&turned(a, &of_a), &turned(b, &of_b))?;
    let alpha = f64::from(call.attributes.float("alpha").unwrap_or(1.0));
    if alpha == 1.0 {
        return Ok(vec![y]);
    }
    let y = in_real!(y.element(), R => {
        let scaled = R::read(&y)?.iter().map(|x| *x * R::of(alpha)).collect();
        R::tensor(y.element(), &y.shape, scaled)
    });
    y.map(|y| vec![y])
}

fn gelu(x: f64) -> f64 {
    x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2) / 2.0
}

fn fast_gelu(x: f64) -> f64 {
    // x·(1 + tanh(u))/2 is x·sigmoid(2u), which loses no digits where tanh is near -1.
    let u = 0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x);
    if x == f64::NEG_INFINITY {
        0.0
    } else {
        x * sigmoid(2.0 * u)
    }
}

/// A function of each element and of `alpha`, after a bias along the last dimension is added.
fn each(call: &Call, f: impl Fn(f64, f64) -> f64) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let alpha = f64::from(call.attributes.float("alpha").unwrap_or(1.702));
    let y = in_real!(x.element(), R => {
        let mut y = R::read(x)?.into_owned();
        if let Some(bias) = call.optional(1) {
            added(&mut y, &x.shape, bias)?;
        }
        y.iter_mut().for_each(|y| *y = R::of(f(y.wide(), alpha)));
        R::tensor(x.element(), &x.shape, y)
    });
    y.map(|y| vec![y])
}

/// Adds a tensor that broadcasts to `shape`.
fn added<R: Real>(y: &mut [R], shape: &[usize], more: &Tensor) -> Result<(), String> {
    if broadcast_sizes(&[&more.shape, shape]).as_deref() != Some(shape) {
        return Err(format!("{:?} cannot be added to {shape:?}", more.shape));
    }
    let (from, v) = (Broadcast::new(&more.shape, shape), R::read(more)?);
    y.iter_mut()
        .enumerate()
        .for_each(|(n, y)| *y += v[from.at(n)]);
    Ok(())
}

fn infer_skip(cx: &Inference) -> Option<Vec<Fact>> {
    let mut outputs = same(cx)?;
    let mut rows = cx.shape(0).map(<[_]>::to_vec);
    if let Some(last) = rows.as_mut().and_then(|r| r.last_mut()) {
        *last = SymExpr::constant(1);
    }
    for _ in 0..2 {
        outputs.push(Fact::new(Some(Element::F32), rows.clone()));
    }
    outputs.push(outputs[0].clone());
    outputs.truncate(cx.node.output.len());
    Some(outputs)
}

/// Normalizes rows of `input + skip + bias`; the sum is the fourth output.
fn skip<R: Real>(call: &Call, centered: bool) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let (beta, bias) = match centered {
        true => (call.optional(3), call.optional(4)),
        false => (None, call.optional(3)),
    };
    let mut sum = R::read(x)?.into_owned();
    added(&mut sum, &x.shape, call.input(1)?)?;
    if let Some(bias) = bias {
        added(&mut sum, &x.shape, bias)?;
    }
    let rows = Rows {
        epsilon: epsilon_or(call, 1e-12),
        centered,
        shape: &x.shape[x.shape.len().saturating_sub(1)..],
    };
    let (gamma, beta) = (rows.along::<R>(call.optional(2))?, rows.along::<R>(beta)?);
    let mut y = sum.clone();
    let (means, factors) = rows.normalize(&mut y, gamma.as_deref(), beta.as_deref());
    let mut shape = x.shape.clone();
    if let Some(last) = shape.last_mut() {
        *last = 1;
    }
    let statistics = call.element(Element::F32);
    let mut outputs = vec![
        R::tensor(x.element(), &x.shape, y)?,
        <f64 as Real>::tensor(statistics, &shape, means)?,
        <f64 as Real>::tensor(statistics, &shape, factors)?,
        R::tensor(x.element(), &x.shape, sum)?,
    ];
    outputs.truncate(call.node.output.len());
    Ok(outputs)
}

/// Rows divided by the root of their mean square; the second output is its reciprocal.
fn simplified(call: &Call) -> Result<Vec<Tensor>, String> {
    let mut outputs = normalization::layer(call, false)?;
    if outputs.len() > 1 {
        // There is no mean.
        outputs.swap_remove(1);
    }
    Ok(outputs)
}
