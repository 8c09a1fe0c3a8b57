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

use crate::index_space::for_each_index;
use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType};
use crate::reference::constant_shape;
use crate::window::Window;
use graph::{
    Attr, Attrs, Builder, ContainerId, DType, Expr, Memlet, Reduction, SymExpr, Tasklet, Tensor,
};

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

/// The three arrays of a convolution.
struct Convolution {
    window: Window,
    groups: i64,
    x: Vec<SymExpr>,
    w: Vec<SymExpr>,
    y: Vec<SymExpr>,
}

/// The index space of a convolution and where each array is accessed in it.
struct Space {
    params: Vec<(&'static str, SymExpr)>,
    /// Whether anything is summed in y.
    contracts: bool,
    x: Vec<SymExpr>,
    w: Vec<SymExpr>,
    y: Vec<SymExpr>,
}

impl Convolution {
    /// From the shapes of x and w; the shape of y follows.
    fn new(call: &Call, x: &[SymExpr], w: &[SymExpr]) -> Result<Self, OpError> {
        if !(3..=5).contains(&x.len()) || w.len() != x.len() {
            return Err(call.shape_error(format!(
                "expects input and weight of equal rank, 3 to 5; found {} and {}",
                x.len(),
                w.len()
            )));
        }
        let kernel = w[2..].iter().map(|r| {
            r.as_const()
                .ok_or_else(|| call.unsupported(format!("a window of symbolic size `{r}`")))
        });
        let window = Window::new(call, kernel.collect::<Result<_, _>>()?)?;
        let groups = call.int_or("groups", 1)?;
        let divides = |n: &SymExpr| n.divide_exactly(&SymExpr::constant(groups)).is_some();
        if groups < 1 || w[1].clone() * groups != x[1] || !divides(&w[0]) {
            return Err(call.shape_error(format!(
                "{} channels do not fit a weight of {} x {} channels in {groups} groups",
                x[1], w[0], w[1]
            )));
        }
        let mut y = vec![x[0].clone(), w[0].clone()];
        y.extend(window.output_sizes(call, &x[2..])?);
        Ok(Convolution {
            window,
            groups,
            x: x.to_vec(),
            w: w.to_vec(),
            y,
        })
    }

    /// As [`Convolution::new`], for a given y.
    fn with_output(
        call: &Call,
        x: &[SymExpr],
        w: &[SymExpr],
        y: &[SymExpr],
    ) -> Result<Self, OpError> {
        let conv = Self::new(call, x, w)?;
        if conv.y != y {
            return Err(call.shape_error(format!(
                "expects an output of shape {:?}, found {:?}",
                texts(&conv.y),
                texts(y)
            )));
        }
        Ok(conv)
    }

    /// The arrays of a transposed convolution; its output is `x` here.
    fn transposed(call: &Call) -> Result<Self, OpError> {
        let (y, w) = (&call.input(0)?.shape, &call.input(1)?.shape);
        if !(3..=5).contains(&y.len()) || w.len() != y.len() {
            return Err(call.shape_error("expects input and weight of equal rank, 3 to 5"));
        }
        let d = y.len() - 2;
        let kernel = w[2..].iter().map(|r| r.as_const().unwrap_or(1)).collect();
        let window = Window::new(call, kernel)?;
        let extra = call.ints_or("output_padding", vec![0; d])?;
        let mut x = vec![y[0].clone(), w[1].clone() * call.int_or("groups", 1)?];
        for (d, o) in y[2..].iter().enumerate() {
            let padded = (o.clone() - 1) * window.stride[d] + window.span(d);
            let extra = extra.get(d).copied().unwrap_or(0);
            x.push(padded + (extra - window.pad_low[d] - window.pad_high[d]));
        }
        Self::with_output(call, &x, w, y)
    }

    /// Parameters n, \[g,\] k, o…, c, r…; those of size 1 are left out except n and the outputs.
    fn space(&self) -> Space {
        let (names_o, names_r) = self.window.names();
        let mut params = vec![("n", self.x[0].clone())];
        let n = SymExpr::symbol("n");
        let per_group = |size: &SymExpr| size.floor_div(&SymExpr::constant(self.groups));
        let (n_k, n_c) = (per_group(&self.w[0]), self.w[1].clone());
        let one = SymExpr::constant(1);
        let grouped = self.groups > 1;
        // The channel within its group, and the channel among all.
        let channel = |name: &str, size: &SymExpr, alone: bool| {
            let within = if *size == one && !alone {
                SymExpr::constant(0)
            } else {
                SymExpr::symbol(name)
            };
            let all = if grouped {
                SymExpr::symbol("g") * size.clone() + within.clone()
            } else {
                within.clone()
            };
            (within, all)
        };
        if grouped {
            params.push(("g", SymExpr::constant(self.groups)));
        }
        if !grouped || n_k != one {
            params.push(("k", n_k.clone()));
        }
        let (_, k) = channel("k", &n_k, !grouped);
        let (c_within, c) = channel("c", &n_c, false);
        let (mut x, mut w, mut y) = (vec![n.clone(), c], vec![k.clone(), c_within], vec![n, k]);
        for (name, size) in names_o.iter().zip(&self.y[2..]) {
            params.push((name, size.clone()));
            y.push(SymExpr::symbol(*name));
        }
        let n_outer = params.len();
        if n_c != one {
            params.push(("c", n_c));
        }
        for d in 0..self.window.rank() {
            let mut r = SymExpr::constant(0);
            if self.window.kernel[d] > 1 {
                params.push((names_r[d], self.w[2 + d].clone()));
                r = SymExpr::symbol(names_r[d]);
            }
            x.push(self.window.index(d, &y[2 + d], &r));
            w.push(r);
        }
        Space {
            contracts: params.len() > n_outer,
            params,
            x,
            w,
            y,
        }
    }

    /// Memlet of x; padding is zero where there is any.
    fn x_memlet(&self, id: ContainerId, space: &Space) -> Memlet {
        let memlet = Memlet::new(id, space.x.iter().cloned());
        if self.window.leaves(&self.x[2..], &self.y[2..]) {
            memlet.or_fill(0.0)
        } else {
            memlet
        }
    }

    /// Appends the map `out[…] += In(0)·In(1)`.
    fn contract(
        &self,
        builder: &mut Builder,
        arrays: impl FnOnce(&Space) -> ([Memlet; 2], Memlet, bool),
    ) {
        let space = self.space();
        let (inputs, mut out, sums) = arrays(&space);
        if sums {
            out = out.reduce(Reduction::Sum);
        }
        builder.map(&space.params, |_| Tasklet {
            inputs: inputs.into(),
            outputs: vec![(out, Expr::In(0).mul(Expr::In(1)))],
        });
    }

    /// Calls `f(x offset, w offset, y offset)` for every product in the convolution.
    fn for_each_product(
        &self,
        call: &Call,
        mut f: impl FnMut(usize, usize, usize),
    ) -> Result<(), OpError> {
        let x = constant_shape(call, &self.x)?;
        let w = constant_shape(call, &self.w)?;
        let y = constant_shape(call, &self.y)?;
        let k_per_group = w[0] / self.groups as usize;
        let offset =
            |shape: &[usize], at: &[usize]| at.iter().zip(shape).fold(0, |sum, (i, n)| sum * n + i);
        for_each_index(&y, |out| {
            let first_channel = out[1] / k_per_group * w[1];
            for_each_index(&w[1..], |tap| {
                let mut from = vec![out[0], first_channel + tap[0]];
                for d in 0..self.window.rank() {
                    let at = self.window.at(d, out[2 + d], tap[1 + d]);
                    match usize::try_from(at) {
                        Ok(at) if at < x[2 + d] => from.push(at),
                        _ => return,
                    }
                }
                let w_at = out[1] * w[1..].iter().product::<usize>() + offset(&w[1..], tap);
                f(offset(&x, &from), w_at, offset(&y, out));
            });
        });
        Ok(())
    }

    /// The attributes of the node, for another operator over the same arrays.
    fn attrs(&self) -> Attrs {
        let mut attrs = self.window.attrs();
        attrs.insert("groups".into(), Attr::Int(self.groups));
        attrs
    }

    fn data_gradient(
        &self,
        builder: &mut Builder,
        dy: ContainerId,
        w: ContainerId,
    ) -> Result<ContainerId, OpError> {
        let mut attrs = self.attrs();
        attrs.insert("input_shape".into(), Attr::Sizes(self.x.clone()));
        builder.op1("conv_data_gradient", &[dy, w], attrs)
    }

    fn weight_gradient(
        &self,
        builder: &mut Builder,
        dy: ContainerId,
        x: ContainerId,
    ) -> Result<ContainerId, OpError> {
        let mut attrs = self.attrs();
        attrs.insert("weight_shape".into(), Attr::Sizes(self.w.clone()));
        builder.op1("conv_weight_gradient", &[dy, x], attrs)
    }

    fn forward(
        &self,
        builder: &mut Builder,
        x: ContainerId,
        w: ContainerId,
    ) -> Result<ContainerId, OpError> {
        builder.op1("conv", &[x, w], self.attrs())
    }

    /// dx by scattering dy·w.
    fn evaluate_data(
        &self,
        call: &Call,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, OpError> {
        let (dy, w) = operands(call, inputs)?;
        let mut dx = vec![0.0; constant_shape(call, &self.x)?.iter().product()];
        self.for_each_product(call, |i, k, o| dx[i] += dy[o] * w[k])?;
        result(call, &self.x, dx)
    }

    fn expand_data(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let (dy, w) = (call.input_id(0)?, call.input_id(1)?);
        let Some(dx) = call.output_id(0) else {
            return Ok(());
        };
        self.contract(builder, |space| {
            let dy = Memlet::new(dy, space.y.iter().cloned());
            let w = Memlet::new(w, space.w.iter().cloned());
            // Elements between strides are written by nobody: the sum's identity fills them.
            ([dy, w], self.x_memlet(dx, space), true)
        });
        Ok(())
    }
}

fn texts(shape: &[SymExpr]) -> Vec<String> {
    shape.iter().map(ToString::to_string).collect()
}

fn operands(call: &Call, inputs: &[Option<&Tensor>]) -> Result<(Vec<f64>, Vec<f64>), OpError> {
    let get = |position: usize| match inputs.get(position).copied().flatten() {
        Some(t) => Ok(t.to_f64()),
        None => Err(OpError::MissingInput {
            op: call.library.op.clone(),
            position,
        }),
    };
    Ok((get(0)?, get(1)?))
}

fn result(call: &Call, shape: &[SymExpr], data: Vec<f64>) -> Result<Vec<Tensor>, OpError> {
    let shape = constant_shape(call, shape)?;
    Ok(vec![Tensor::from_f64(result_type(call)?, &shape, data)])
}

fn result_type(call: &Call) -> Result<DType, OpError> {
    let dtype = call.input(0)?.dtype.promote(call.input(1)?.dtype);
    if dtype.is_float() {
        Ok(dtype)
    } else {
        Err(call.unsupported(format!("elements of type {dtype}")))
    }
}

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

type Geometry = (&'static str, Vec<i64>, Vec<i64>, Attrs);

/// Shapes of x and w with attributes: what the samples of all four operators are made from.
fn geometries() -> Vec<Geometry> {
    let with_groups = |groups: i64, mut attrs: Attrs| {
        attrs.insert("groups".into(), Attr::Int(groups));
        attrs
    };
    let padded = |p: i64| ints(&[("pad_low", &[p, p]), ("pad_high", &[p, p])]);
    vec![
        (
            "2-D without padding",
            vec![2, 3, 5, 4],
            vec![4, 3, 3, 2],
            Attrs::new(),
        ),
        ("3x3, padded", vec![1, 2, 4, 5], vec![3, 2, 3, 3], padded(1)),
        (
            "1x1, stride 2",
            vec![2, 3, 5, 5],
            vec![4, 3, 1, 1],
            ints(&[("stride", &[2, 2])]),
        ),
        (
            "stride, dilation, asymmetric padding",
            vec![1, 2, 7, 6],
            vec![2, 2, 3, 2],
            ints(&[
                ("stride", &[2, 3]),
                ("dilation", &[2, 1]),
                ("pad_low", &[1, 0]),
                ("pad_high", &[2, 1]),
            ]),
        ),
        (
            "groups",
            vec![1, 4, 4, 4],
            vec![6, 2, 3, 3],
            with_groups(2, padded(1)),
        ),
        (
            "depthwise",
            vec![2, 3, 4, 4],
            vec![3, 1, 3, 3],
            with_groups(3, padded(1)),
        ),
        (
            "depthwise, two outputs a channel",
            vec![1, 2, 3, 3],
            vec![4, 1, 2, 2],
            with_groups(2, Attrs::new()),
        ),
        (
            "depthwise 1x1",
            vec![2, 3, 2, 2],
            vec![3, 1, 1, 1],
            with_groups(3, Attrs::new()),
        ),
        (
            "1-D, dilated",
            vec![2, 2, 9],
            vec![3, 2, 3],
            ints(&[("dilation", &[2]), ("pad_low", &[2]), ("pad_high", &[0])]),
        ),
        (
            "3-D",
            vec![1, 2, 3, 4, 3],
            vec![2, 2, 2, 3, 1],
            ints(&[
                ("stride", &[1, 2, 1]),
                ("pad_low", &[1, 1, 0]),
                ("pad_high", &[0, 1, 0]),
            ]),
        ),
        (
            "one channel in, one out",
            vec![1, 1, 3, 4],
            vec![1, 1, 2, 2],
            Attrs::new(),
        ),
    ]
}

fn gradient_samples(
    inputs: impl Fn(&[i64], &[i64], &[i64], &mut Attrs) -> (Vec<i64>, Vec<i64>),
) -> Vec<Sample> {
    let mut samples = Vec::new();
    for (name, x, w, mut attrs) in geometries() {
        let library = graph::Library {
            op: "conv".into(),
            attrs: attrs.clone(),
            inputs: vec![],
            outputs: vec![],
        };
        let call = Call {
            library: &library,
            inputs: vec![],
        };
        let Ok(conv) = Convolution::new(&call, &sizes(&x), &sizes(&w)) else {
            continue;
        };
        let y: Vec<i64> = conv.y.iter().filter_map(SymExpr::as_const).collect();
        let (a, b) = inputs(&x, &w, &y, &mut attrs);
        samples.push(sample(name, &a, &b, attrs));
    }
    samples
}

fn sizes(shape: &[i64]) -> Vec<SymExpr> {
    shape.iter().map(|n| SymExpr::constant(*n)).collect()
}

fn ints(list: &[(&str, &[i64])]) -> Attrs {
    list.iter()
        .map(|(name, values)| (name.to_string(), Attr::Ints(values.to_vec())))
        .collect()
}

fn sample(name: &str, a: &[i64], b: &[i64], attrs: Attrs) -> Sample {
    let tensor = |shape: &[i64]| Some(TensorType::new(DType::F32, sizes(shape)));
    Sample {
        name: name.into(),
        inputs: vec![tensor(a), tensor(b)],
        attrs,
        values: vec![],
        range: (-1.0, 1.0),
        differentiable: true,
    }
}
