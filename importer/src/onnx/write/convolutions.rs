//! Convolutions and their gradients, as convolutions or as matrix products.

use super::nodes::{Nodes, Refusal, int, int_list};
use super::rules::Written;
use graph::SymExpr;
use ops::Call;
use ops::window::Window;

/// The window and the groups of a convolution.
fn window(c: &Call, weight: &[SymExpr]) -> Result<(Window, i64), Refusal> {
    let kernel = weight[2..].iter().map(SymExpr::as_const);
    let kernel = kernel.collect::<Option<Vec<i64>>>();
    let kernel = kernel.ok_or_else(|| Refusal("a kernel of dynamic size".into()))?;
    Ok((Window::new(c, kernel)?, c.int_or("groups", 1)?))
}

fn pads(low: &[i64], high: &[i64]) -> super::nodes::Attribute {
    int_list("pads", &[low, high].concat())
}

pub(super) fn conv(n: &mut Nodes, c: &Call) -> Written {
    let (w, groups) = window(c, &c.input(1)?.shape)?;
    let (x, weight) = (n.input(c, 0)?, n.input(c, 1)?);
    let attributes = vec![
        int_list("strides", &w.stride),
        pads(&w.pad_low, &w.pad_high),
        int_list("dilations", &w.dilation),
        int("group", groups),
    ];
    let value = n.node("Conv", &[&x, &weight], attributes);
    n.output(c, 0, value);
    Ok(())
}

/// A transposed convolution from sizes to sizes. The output padding adds the positions that the stride
/// leaves out. If their number depends on a dynamic size, the largest number is added, and the rest is cut off.
pub(super) fn conv_transposed(
    n: &mut Nodes,
    (x, weight): (&str, &str),
    (w, groups): (&Window, i64),
    (from, to): (&[SymExpr], &[SymExpr]),
) -> Result<String, Refusal> {
    let mut high = w.pad_high.clone();
    let mut extra = vec![0; w.rank()];
    let mut cut = Vec::new();
    for d in 0..w.rank() {
        let made = (from[d].clone() - 1) * w.stride[d] - w.pad_low[d] - high[d] + w.span(d);
        match (to[d].clone() - made).as_const() {
            Some(missing) => {
                extra[d] = missing.max(0);
                high[d] += (-missing).max(0);
            }
            None => {
                extra[d] = w.stride[d] - 1;
                cut.push(d);
            }
        }
    }
    let attributes = vec![
        int_list("strides", &w.stride),
        pads(&w.pad_low, &high),
        int_list("dilations", &w.dilation),
        int_list("output_padding", &extra),
        int("group", groups),
    ];
    let value = n.node("ConvTranspose", &[x, weight], attributes);
    if cut.is_empty() {
        return Ok(value);
    }
    let starts = n.ints(&vec![0; cut.len()]);
    let ends: Vec<SymExpr> = cut.iter().map(|d| to[*d].clone()).collect();
    let ends = n.shape(&ends)?;
    let axes: Vec<i64> = cut.iter().map(|d| 2 + *d as i64).collect();
    let axes = n.ints(&axes);
    Ok(n.node("Slice", &[&value, &starts, &ends, &axes], Vec::new()))
}

pub(super) fn conv_transpose(n: &mut Nodes, c: &Call) -> Written {
    let (w, groups) = window(c, &c.input(1)?.shape)?;
    let Some(out) = c.output_id(0) else {
        return Ok(());
    };
    let to = n.graph.container(out).shape[2..].to_vec();
    let from = c.input(0)?.shape[2..].to_vec();
    let (x, weight) = (n.input(c, 0)?, n.input(c, 1)?);
    let value = conv_transposed(n, (&x, &weight), (&w, groups), (&from, &to))?;
    n.output(c, 0, value);
    Ok(())
}

pub(super) fn conv_data_gradient(n: &mut Nodes, c: &Call) -> Written {
    let (w, groups) = window(c, &c.input(1)?.shape)?;
    let to = c.sizes("input_shape")?[2..].to_vec();
    let from = c.input(0)?.shape[2..].to_vec();
    let (dy, weight) = (n.input(c, 0)?, n.input(c, 1)?);
    let value = conv_transposed(n, (&dy, &weight), (&w, groups), (&from, &to))?;
    n.output(c, 0, value);
    Ok(())
}

/// Writes a gradient of one tap as a matrix product per sample, and one of a few taps with enough channels as a matrix
/// product per tap. Others become a convolution: the matrices of the first two forms would be as narrow as the window.
pub(super) fn conv_weight_gradient(n: &mut Nodes, c: &Call) -> Written {
    let shape = c.sizes("weight_shape")?;
    let (w, groups) = window(c, &shape)?;
    let channels = shape[0].as_const().zip(shape[1].as_const());
    let n_taps = w.kernel.iter().product::<i64>();
    let is_unpadded = [&w.pad_low, &w.pad_high]
        .iter()
        .all(|p| p.iter().all(|p| *p == 0));
    let value = match channels.filter(|_| groups == 1) {
        Some(channels) if n_taps == 1 && is_unpadded => per_sample(n, c, &w, channels)?,
        Some((k, x)) if x >= 8 && (n_taps <= 9 || k * x >= 4096 && n_taps <= 49) => {
            per_tap(n, c, &w, (k, x))?
        }
        _ => as_convolution(n, c, (&w, groups), &shape)?,
    };
    let value = n.reshaped(&value, &shape)?;
    n.output(c, 0, value);
    Ok(())
}

/// The elements that one tap of the window reads from a value with spatial dimensions from the third on.
fn met(
    n: &mut Nodes,
    value: &str,
    (w, tap): (&Window, &[i64]),
    out: &[SymExpr],
) -> Result<String, Refusal> {
    let rank = w.rank();
    let starts: Vec<i64> = (0..rank).map(|d| tap[d] * w.dilation[d]).collect();
    let ends: Vec<SymExpr> = (0..rank)
        .map(|d| (out[d].clone() - 1) * w.stride[d] + (starts[d] + 1))
        .collect();
    let axes: Vec<i64> = (2..2 + rank as i64).collect();
    let (starts, ends) = (n.ints(&starts), n.shape(&ends)?);
    let (axes, steps) = (n.ints(&axes), n.ints(&w.stride));
    Ok(n.node("Slice", &[value, &starts, &ends, &axes, &steps], Vec::new()))
}

/// `dw = Σ_n dy[n] · x[n]ᵀ`.
fn per_sample(
    n: &mut Nodes,
    c: &Call,
    w: &Window,
    (k, channels): (i64, i64),
) -> Result<String, Refusal> {
    let out = c.input(0)?.shape[2..].to_vec();
    let (dy, mut x) = (n.input(c, 0)?, n.input(c, 1)?);
    if w.stride.iter().any(|s| *s != 1) {
        x = met(n, &x, (w, &vec![0; w.rank()]), &out)?;
    }
    let shape = n.ints(&[0, k, -1]);
    let dy = n.of2("Reshape", &dy, &shape);
    let shape = n.ints(&[0, channels, -1]);
    let x = n.of2("Reshape", &x, &shape);
    let x = n.node("Transpose", &[&x], vec![int_list("perm", &[0, 2, 1])]);
    let products = n.of2("MatMul", &dy, &x);
    Ok(n.reduced("ReduceSum", &products, &[0], false))
}

/// `dw[·, ·, r] = dy · x_rᵀ`, with batch and positions as one dimension.
fn per_tap(
    n: &mut Nodes,
    c: &Call,
    w: &Window,
    (k, channels): (i64, i64),
) -> Result<String, Refusal> {
    let rank = w.rank();
    let out = c.input(0)?.shape[2..].to_vec();
    let (dy, x) = (n.input(c, 0)?, n.input(c, 1)?);
    let swapped: Vec<i64> = [1, 0].into_iter().chain(2..2 + rank as i64).collect();
    let dy = n.node("Transpose", &[&dy], vec![int_list("perm", &swapped)]);
    let shape = n.ints(&[k, -1]);
    let dy = n.of2("Reshape", &dy, &shape);
    let mut x = n.node("Transpose", &[&x], vec![int_list("perm", &swapped)]);
    if w.pad_low.iter().chain(&w.pad_high).any(|p| *p != 0) {
        let amounts = [&[0, 0], &w.pad_low[..], &[0, 0], &w.pad_high[..]].concat();
        let amounts = n.ints(&amounts);
        x = n.of2("Pad", &x, &amounts);
    }
    let mut products = Vec::new();
    let shape = n.ints(&[channels, -1]);
    for tap in 0..w.kernel.iter().product::<i64>() {
        let mut rest = tap;
        let mut at = vec![0; rank];
        for d in (0..rank).rev() {
            at[d] = rest % w.kernel[d];
            rest /= w.kernel[d];
        }
        let part = met(n, &x, (w, &at), &out)?;
        let part = n.of2("Reshape", &part, &shape);
        products.push(n.node("Gemm", &[&dy, &part], vec![int("transB", 1)]));
    }
    let products: Vec<&str> = products.iter().map(String::as_str).collect();
    let all = n.node("Concat", &products, vec![int("axis", 0)]);
    let shape = n.ints(&[products.len() as i64, k * channels]);
    let all = n.of2("Reshape", &all, &shape);
    Ok(n.node("Transpose", &[&all], vec![int_list("perm", &[1, 0])]))
}

/// `dw[k, c, r] = Σ dy[n, k, p] · x[n, c, p·stride + r·dilation − pad]`: a convolution of x with dy over
/// the batch, in which stride and dilation change places. Groups stay groups.
fn as_convolution(
    n: &mut Nodes,
    c: &Call,
    (w, n_groups): (&Window, i64),
    shape: &[SymExpr],
) -> Result<String, Refusal> {
    let x = c.input(1)?.clone();
    let spatial = w.rank();
    let (mut dy_name, mut x_name) = (n.input(c, 0)?, n.input(c, 1)?);
    let swapped: Vec<i64> = [1, 0].into_iter().chain(2..2 + spatial as i64).collect();
    dy_name = n.node("Transpose", &[&dy_name], vec![int_list("perm", &swapped)]);
    if n_groups == 1 {
        x_name = n.node("Transpose", &[&x_name], vec![int_list("perm", &swapped)]);
    } else {
        // [N, G·C, …] → [C, G·N, …]
        let groups = SymExpr::constant(n_groups);
        let channels = shape[1].clone();
        let tail = || x.shape[2..].iter().cloned();
        let split = [x.shape[0].clone(), groups.clone(), channels.clone()];
        let split: Vec<SymExpr> = split.into_iter().chain(tail()).collect();
        x_name = n.reshaped(&x_name, &split)?;
        let order: Vec<i64> = [2, 1, 0].into_iter().chain(3..3 + spatial as i64).collect();
        x_name = n.node("Transpose", &[&x_name], vec![int_list("perm", &order)]);
        let joined = [channels, groups * x.shape[0].clone()];
        let joined: Vec<SymExpr> = joined.into_iter().chain(tail()).collect();
        x_name = n.reshaped(&x_name, &joined)?;
    }
    let attributes = vec![
        int_list("strides", &w.dilation),
        pads(&w.pad_low, &w.pad_high),
        int_list("dilations", &w.stride),
        int("group", n_groups),
    ];
    let mut value = n.node("Conv", &[&x_name, &dy_name], attributes);
    // If the stride does not reach the last positions of x, there are too many taps.
    let starts = n.ints(&vec![0; spatial]);
    let ends = n.ints(&w.kernel);
    let axes: Vec<i64> = (2..2 + spatial as i64).collect();
    let axes = n.ints(&axes);
    value = n.node("Slice", &[&value, &starts, &ends, &axes], Vec::new());
    Ok(n.node("Transpose", &[&value], vec![int_list("perm", &swapped)]))
}
