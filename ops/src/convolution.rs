//! Convolution, its transpose and its gradients (cross-correlation, as deep learning means it).
//!
//! All four contract two of the same three arrays, x `[N, C, I…]`, w `[K, C/groups, R…]` and
//! y `[N, K, O…]`, over one index space:
//!
//! `y[n,k,o] += x[n, c, o·stride + r·dilation − pad] · w[k,c,r]`, and likewise with `x` or `w` on the left.
//!
//! Input elements outside x are zero. Sources: ONNX `Conv`, `ConvTranspose`; arXiv 1603.07285.
//! There is no bias here; it is an element-wise addition. The order in which elements are visited
//! is the kernels' concern.

mod arrays;
mod samples;

use crate::op::{Call, Gradient, GradientCall, Op, OpError, Sample, TensorType};
use crate::reference::constant_shape;
use arrays::{Convolution, operands, result, result_type};
use graph::{Attr, Attrs, Builder, ContainerId, Memlet, Tensor};
use samples::{geometries, gradient_samples, ints, sample, sizes};

/// `conv` (x `[N, C, I…]`, w `[K, C/groups, R…]`) → y `[N, K, O…]`, one to three spatial dimensions.
/// Attributes `stride`, `pad_low`, `pad_high`, `dilation` (a number for each dimension), `groups`.
#[derive(Debug)]
pub struct Conv;

/// `conv_transpose` (x `[N, K, O…]`, w `[K, C/groups, R…]`) → `[N, C, I…]`: the data gradient of
/// [`Conv`] as an operator. Attributes as [`Conv`], and `output_padding`:
/// `I = (O−1)·stride − pad_low − pad_high + dilation·(R−1) + output_padding + 1`.
#[derive(Debug)]
pub struct ConvTranspose;

/// `conv_data_gradient` (dy `[N, K, O…]`, w `[K, C/groups, R…]`) → dx of shape `input_shape`.
#[derive(Debug)]
pub struct ConvDataGradient;

/// `conv_weight_gradient` (dy `[N, K, O…]`, x `[N, C, I…]`) → dw of shape `weight_shape`.
#[derive(Debug)]
pub struct ConvWeightGradient;

impl Op for Conv {
    fn name(&self) -> &'static str {
        "conv"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let conv = Convolution::new(call, &call.input(0)?.shape, &call.input(1)?.shape)?;
        Ok(vec![TensorType::new(result_type(call)?, conv.y)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let conv = Convolution::new(call, &call.input(0)?.shape, &call.input(1)?.shape)?;
        let (x, w) = operands(call, inputs)?;
        let mut y = vec![0.0; constant_shape(call, &conv.y)?.iter().product()];
        conv.for_each_product(call, |i, k, o| y[o] += x[i] * w[k])?;
        result(call, &conv.y, y)
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let conv = Convolution::new(call, &call.input(0)?.shape, &call.input(1)?.shape)?;
        let (x, w) = (call.input_id(0)?, call.input_id(1)?);
        let Some(y) = call.output_id(0) else {
            return Ok(());
        };
        conv.contract(builder, |space| {
            let x = conv.x_memlet(x, space);
            let w = Memlet::new(w, space.w.iter().cloned());
            let y = Memlet::new(y, space.y.iter().cloned());
            ([x, w], y, space.contracts)
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let call = &g.call;
        let conv = Convolution::new(call, &call.input(0)?.shape, &call.input(1)?.shape)?;
        let (x, w) = (call.input_id(0)?, call.input_id(1)?);
        let [Some(dy)] = *g.output_gradients else {
            return Ok(Gradient::Zero);
        };
        Ok(Gradient::Rule(vec![
            wanted(g, 0, || conv.data_gradient(builder, dy, w))?,
            wanted(g, 1, || conv.weight_gradient(builder, dy, x))?,
        ]))
    }

    fn samples(&self) -> Vec<Sample> {
        geometries()
            .into_iter()
            .map(|(name, x, w, attrs)| sample(name, &x, &w, attrs))
            .collect()
    }
}

/// `make()` if the gradient of input `position` is asked for.
fn wanted(
    g: &GradientCall,
    position: usize,
    make: impl FnOnce() -> Result<ContainerId, OpError>,
) -> Result<Option<ContainerId>, OpError> {
    if g.wanted.get(position) == Some(&true) {
        make().map(Some)
    } else {
        Ok(None)
    }
}

impl Op for ConvTranspose {
    fn name(&self) -> &'static str {
        "conv_transpose"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let conv = Convolution::transposed(call)?;
        Ok(vec![TensorType::new(result_type(call)?, conv.x)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        Convolution::transposed(call)?.evaluate_data(call, inputs)
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        Convolution::transposed(call)?.expand_data(call, builder)
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let conv = Convolution::transposed(&g.call)?;
        let (x, w) = (g.call.input_id(0)?, g.call.input_id(1)?);
        let [Some(dy)] = *g.output_gradients else {
            return Ok(Gradient::Zero);
        };
        Ok(Gradient::Rule(vec![
            wanted(g, 0, || conv.forward(builder, dy, w))?,
            wanted(g, 1, || conv.weight_gradient(builder, x, dy))?,
        ]))
    }

    fn samples(&self) -> Vec<Sample> {
        let mut cases = vec![
            sample("1-D", &[2, 3, 5], &[3, 2, 3], Attrs::new()),
            sample(
                "stride 2 with output padding",
                &[1, 2, 3, 4],
                &[2, 3, 3, 3],
                ints(&[
                    ("stride", &[2, 2]),
                    ("pad_low", &[1, 1]),
                    ("pad_high", &[1, 1]),
                    ("output_padding", &[1, 1]),
                ]),
            ),
        ];
        let mut grouped = ints(&[("stride", &[2, 1]), ("dilation", &[1, 2])]);
        grouped.insert("groups".into(), Attr::Int(2));
        cases.push(sample(
            "groups and dilation",
            &[1, 4, 2, 3],
            &[4, 1, 2, 2],
            grouped,
        ));
        cases
    }
}

impl ConvDataGradient {
    fn arrays(call: &Call) -> Result<Convolution, OpError> {
        let (dy, w) = (&call.input(0)?.shape, &call.input(1)?.shape);
        Convolution::with_output(call, &call.sizes("input_shape")?, w, dy)
    }
}

impl Op for ConvDataGradient {
    fn name(&self) -> &'static str {
        "conv_data_gradient"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![TensorType::new(
            result_type(call)?,
            Self::arrays(call)?.x,
        )])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        Self::arrays(call)?.evaluate_data(call, inputs)
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        Self::arrays(call)?.expand_data(call, builder)
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let conv = Self::arrays(&g.call)?;
        let (dy, w) = (g.call.input_id(0)?, g.call.input_id(1)?);
        let [Some(ddx)] = *g.output_gradients else {
            return Ok(Gradient::Zero);
        };
        Ok(Gradient::Rule(vec![
            wanted(g, 0, || conv.forward(builder, ddx, w))?,
            wanted(g, 1, || conv.weight_gradient(builder, dy, ddx))?,
        ]))
    }

    fn samples(&self) -> Vec<Sample> {
        gradient_samples(|x, w, y, attrs| {
            attrs.insert("input_shape".into(), Attr::Sizes(sizes(x)));
            (y.to_vec(), w.to_vec())
        })
    }
}

impl ConvWeightGradient {
    fn arrays(call: &Call) -> Result<Convolution, OpError> {
        let (dy, x) = (&call.input(0)?.shape, &call.input(1)?.shape);
        Convolution::with_output(call, x, &call.sizes("weight_shape")?, dy)
    }
}

impl Op for ConvWeightGradient {
    fn name(&self) -> &'static str {
        "conv_weight_gradient"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![TensorType::new(
            result_type(call)?,
            Self::arrays(call)?.w,
        )])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let conv = Self::arrays(call)?;
        let (dy, x) = operands(call, inputs)?;
        let mut dw = vec![0.0; constant_shape(call, &conv.w)?.iter().product()];
        conv.for_each_product(call, |i, k, o| dw[k] += dy[o] * x[i])?;
        result(call, &conv.w, dw)
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let conv = Self::arrays(call)?;
        let (dy, x) = (call.input_id(0)?, call.input_id(1)?);
        let Some(dw) = call.output_id(0) else {
            return Ok(());
        };
        conv.contract(builder, |space| {
            let dy = Memlet::new(dy, space.y.iter().cloned());
            let dw = Memlet::new(dw, space.w.iter().cloned());
            ([dy, conv.x_memlet(x, space)], dw, true)
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let conv = Self::arrays(&g.call)?;
        let (dy, x) = (g.call.input_id(0)?, g.call.input_id(1)?);
        let [Some(ddw)] = *g.output_gradients else {
            return Ok(Gradient::Zero);
        };
        Ok(Gradient::Rule(vec![
            wanted(g, 0, || conv.forward(builder, x, ddw))?,
            wanted(g, 1, || conv.data_gradient(builder, dy, ddw))?,
        ]))
    }

    fn samples(&self) -> Vec<Sample> {
        gradient_samples(|x, w, y, attrs| {
            attrs.insert("weight_shape".into(), Attr::Sizes(sizes(w)));
            (y.to_vec(), x.to_vec())
        })
    }
}
