//! A builder for networks: layers that add parameters and operators to a graph.

use graph::{
    Attr, Builder, ContainerId, DType, Expr, Graph, Lifetime, Node, Origin, Output, Stage, SymExpr,
};
use ops::{OpBuilder, OpError, attrs};
use std::sync::Arc;

/// A network under construction. Layer methods take and give containers; names are the
/// parameters' prefixes, as in PyTorch's `state_dict`.
#[derive(Debug)]
pub struct Net {
    /// The graph so far; nodes are added by [`Net::finish`].
    pub graph: Graph,
    /// The type of parameters made from now on: `f32`, unless changed.
    pub dtype: DType,
    /// The type in which convolutions and linear layers compute from now on, if it is not the type of their
    /// operands. The operands are converted, as by PyTorch's autocast, and gradients of parameters have the
    /// parameters' type.
    pub autocast: Option<DType>,
    nodes: Vec<Node>,
    updates: Vec<Output>,
}

/// Geometry of a convolution: the same kernel size, stride, zero padding and dilation in every
/// dimension; groups.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Kernel size.
    pub kernel: i64,
    /// Stride.
    pub stride: i64,
    /// Zeros on every side.
    pub pad: i64,
    /// Distance between the taps of the kernel.
    pub dilation: i64,
    /// Groups.
    pub groups: i64,
}

impl Window {
    /// A window without dilation and groups.
    pub fn new(kernel: i64, stride: i64, pad: i64) -> Self {
        Window {
            kernel,
            stride,
            pad,
            dilation: 1,
            groups: 1,
        }
    }
}

impl Net {
    /// An empty network.
    pub fn new(name: &str) -> Self {
        Net {
            graph: Graph::new(name),
            dtype: DType::F32,
            autocast: None,
            nodes: Vec::new(),
            updates: Vec::new(),
        }
    }

    /// A model input, `f32` unless it holds indices.
    pub fn input(&mut self, name: &str, dtype: DType, shape: &[SymExpr]) -> ContainerId {
        self.graph
            .add_input(name, dtype, shape.to_vec(), Lifetime::Input)
    }

    /// A parameter of constant shape.
    pub fn parameter(&mut self, name: &str, shape: &[i64]) -> ContainerId {
        let shape = shape.iter().map(|n| SymExpr::constant(*n)).collect();
        self.graph
            .add_input(name, self.dtype, shape, Lifetime::Parameter)
    }

    /// The finished graph with its results.
    pub fn finish(mut self, outputs: &[ContainerId]) -> Graph {
        for id in outputs {
            self.graph.add_output(*id);
        }
        self.graph.outputs.append(&mut self.updates);
        self.graph.last_state().nodes = self.nodes;
        self.graph
    }

    /// Runs `f` with a builder whose nodes carry `name` as origin.
    ///
    /// # Errors
    /// What `f` returns.
    pub fn with<T>(
        &mut self,
        name: &str,
        f: impl FnOnce(&mut Builder) -> Result<T, OpError>,
    ) -> Result<T, OpError> {
        let origin = Arc::new(Origin {
            node: name.to_string(),
            ..Origin::default()
        });
        let mut builder = Builder::new(&mut self.graph, origin, Stage::Forward);
        let result = f(&mut builder)?;
        self.nodes.append(&mut builder.nodes);
        Ok(result)
    }

    /// The size of a dimension, which must be constant.
    pub(crate) fn size(&self, id: ContainerId, dim: usize) -> i64 {
        self.graph.container(id).shape[dim].as_const().unwrap_or(0)
    }

    /// Convolution without bias, in one to three dimensions: `[N, C, I…] → [N, out, O…]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn conv(
        &mut self,
        name: &str,
        x: ContainerId,
        out: i64,
        window: Window,
    ) -> Result<ContainerId, OpError> {
        let n_dims = self.n_spatial(x);
        let mut shape = vec![out, self.size(x, 1) / window.groups];
        shape.resize(2 + n_dims, window.kernel);
        let w = self.parameter(&format!("{name}.weight"), &shape);
        let each = |n: i64| Attr::Ints(vec![n; n_dims]);
        let a = attrs([
            ("stride", each(window.stride)),
            ("pad_low", each(window.pad)),
            ("pad_high", each(window.pad)),
            ("dilation", each(window.dilation)),
            ("groups", Attr::Int(window.groups)),
        ]);
        let operands = [self.converted(name, x)?, self.converted(name, w)?];
        self.with(name, |b| b.op1("conv", &operands, a))
    }

    /// Convolution with bias: as [`Net::conv`].
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn conv_with_bias(
        &mut self,
        name: &str,
        x: ContainerId,
        out: i64,
        window: Window,
    ) -> Result<ContainerId, OpError> {
        let y = self.conv(name, x, out, window)?;
        self.channel_bias(name, y)
    }

    /// Transposed convolution with bias whose windows lie side by side: each dimension grows by its
    /// factor, `[N, C, I…] → [N, out, I·factor…]`.
    ///
    /// # Errors
    /// Not one factor for each dimension.
    pub fn upsample(
        &mut self,
        name: &str,
        x: ContainerId,
        out: i64,
        factors: &[i64],
    ) -> Result<ContainerId, OpError> {
        let shape = [&[self.size(x, 1), out], factors].concat();
        let w = self.parameter(&format!("{name}.weight"), &shape);
        let a = attrs([("stride", Attr::Ints(factors.to_vec()))]);
        let y = self.with(name, |b| b.op1("conv_transpose", &[x, w], a))?;
        self.channel_bias(name, y)
    }

    /// Maximum over windows that lie side by side: `[N, C, I…] → [N, C, I/window…]`.
    ///
    /// # Errors
    /// Not one size for each dimension.
    pub fn max_pool(
        &mut self,
        name: &str,
        x: ContainerId,
        window: &[i64],
    ) -> Result<ContainerId, OpError> {
        let size = || Attr::Ints(window.to_vec());
        let a = attrs([("kernel", size()), ("stride", size())]);
        self.with(name, |b| Ok(b.op("max_pool", &[Some(x)], a)?[0]))
    }

    /// One number for each channel, added: `[N, C, …]`.
    fn channel_bias(&mut self, name: &str, x: ContainerId) -> Result<ContainerId, OpError> {
        let channels = self.size(x, 1);
        let bias = self.parameter(&format!("{name}.bias"), &[channels]);
        let mut shape = vec![channels];
        shape.resize(1 + self.n_spatial(x), 1);
        let bias = self.reshape(name, bias, &sizes(&shape))?;
        self.apply(name, Expr::In(0).add(Expr::In(1)), &[x, bias])
    }

    /// Dimensions behind batch and channels.
    fn n_spatial(&self, x: ContainerId) -> usize {
        self.graph.container(x).shape.len().saturating_sub(2)
    }

    /// A value in the type that autocast asks for.
    fn converted(&mut self, name: &str, x: ContainerId) -> Result<ContainerId, OpError> {
        match self.autocast {
            Some(dtype) if dtype != self.graph.container(x).dtype => self.with(name, |b| {
                let cast = attrs([
                    ("expr", Attr::Expr(Expr::In(0).cast(dtype))),
                    ("dtype", Attr::DType(dtype)),
                ]);
                b.op1("elementwise", &[x], cast)
            }),
            _ => Ok(x),
        }
    }

    /// Batch normalization in training form with running statistics as outputs.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn batch_norm(&mut self, name: &str, x: ContainerId) -> Result<ContainerId, OpError> {
        let c = self.size(x, 1);
        let n = self.graph.container(x).shape.clone();
        let count = n.iter().enumerate().filter(|(d, _)| *d != 1);
        let count = SymExpr::product(count.map(|(_, size)| size));
        let count = count.as_const().unwrap_or(0) as f64;
        let weight = self.parameter(&format!("{name}.weight"), &[c]);
        let bias = self.parameter(&format!("{name}.bias"), &[c]);
        let running =
            ["running_mean", "running_var"].map(|s| self.parameter(&format!("{name}.{s}"), &[c]));
        let (y, updated) = self.with(name, |b| {
            let inputs = [Some(x), Some(weight), Some(bias)];
            let out = b.op("batch_norm", &inputs, attrs([("eps", Attr::Float(1e-5))]))?;
            let blend = |factor: f64| {
                let new = Expr::In(1).mul(Expr::float(0.1 * factor));
                Expr::In(0).mul(Expr::float(0.9)).add(new)
            };
            let mean = b.elementwise(blend(1.0), &[running[0], out[1]])?;
            // var = inv_std⁻² − eps, unbiased.
            let var = Expr::In(1).mul(Expr::In(1)).recip().sub(Expr::float(1e-5));
            let unbiased = var.mul(Expr::float(0.1 * count / (count - 1.0)));
            let var = Expr::In(0).mul(Expr::float(0.9)).add(unbiased);
            let var = b.elementwise(var, &[running[1], out[2]])?;
            Ok((out[0], [mean, var]))
        })?;
        for (container, input) in updated.into_iter().zip(running) {
            self.updates.push(Output {
                container,
                updates: Some(input),
            });
        }
        Ok(y)
    }

    /// An element-wise function of one or more values.
    ///
    /// # Errors
    /// Shapes that do not broadcast.
    pub fn apply(
        &mut self,
        name: &str,
        expr: Expr,
        inputs: &[ContainerId],
    ) -> Result<ContainerId, OpError> {
        self.with(name, |b| b.elementwise(expr, inputs))
    }

    /// `max(x, 0)`.
    ///
    /// # Errors
    /// None for a valid `x`.
    pub fn relu(&mut self, name: &str, x: ContainerId) -> Result<ContainerId, OpError> {
        let positive = Expr::In(0).gt(Expr::float(0.0));
        let relu = Expr::select(positive, Expr::In(0), Expr::float(0.0));
        self.apply(name, relu, &[x])
    }

    /// `x·Wᵀ + b` over the last dimension.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn linear(&mut self, name: &str, x: ContainerId, out: i64) -> Result<ContainerId, OpError> {
        let rank = self.graph.container(x).shape.len();
        let inner = self.size(x, rank - 1);
        let w = self.parameter(&format!("{name}.weight"), &[out, inner]);
        let bias = self.parameter(&format!("{name}.bias"), &[out]);
        let x = self.converted(name, x)?;
        let w = self.converted(name, w)?;
        let bias = self.converted(name, bias)?;
        let outer: String = ('a'..).take(rank - 1).collect();
        let equation = format!("{outer}i,oi->{outer}o");
        self.with(name, |b| {
            let y = b.op1(
                "einsum",
                &[x, w],
                attrs([("equation", Attr::Str(equation))]),
            )?;
            b.elementwise(Expr::In(0).add(Expr::In(1)), &[y, bias])
        })
    }

    /// Layer normalization over the last dimension, with BERT's `eps` of 1e-12.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn layer_norm(&mut self, name: &str, x: ContainerId) -> Result<ContainerId, OpError> {
        self.layer_norm_with(name, x, 1e-12)
    }

    /// Layer normalization over the last dimension, with this `eps`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn layer_norm_with(
        &mut self,
        name: &str,
        x: ContainerId,
        eps: f64,
    ) -> Result<ContainerId, OpError> {
        let rank = self.graph.container(x).shape.len();
        let h = self.size(x, rank - 1);
        let weight = self.parameter(&format!("{name}.weight"), &[h]);
        let bias = self.parameter(&format!("{name}.bias"), &[h]);
        let a = attrs([("axes", Attr::Int(1)), ("eps", Attr::Float(eps))]);
        self.with(name, |b| {
            Ok(b.op("layer_norm", &[Some(x), Some(weight), Some(bias)], a)?[0])
        })
    }

    /// Returns the same elements under another shape.
    ///
    /// # Errors
    /// The number of elements differs.
    pub fn reshape(
        &mut self,
        name: &str,
        x: ContainerId,
        shape: &[SymExpr],
    ) -> Result<ContainerId, OpError> {
        let a = attrs([("shape", Attr::Sizes(shape.to_vec()))]);
        self.with(name, |b| b.op1("reshape", &[x], a))
    }

    /// Dimensions in another order.
    ///
    /// # Errors
    /// `order` is no permutation.
    pub fn permute(
        &mut self,
        name: &str,
        x: ContainerId,
        order: &[i64],
    ) -> Result<ContainerId, OpError> {
        let a = attrs([("order", Attr::Ints(order.to_vec()))]);
        self.with(name, |b| b.op1("permute", &[x], a))
    }

    /// Values behind one another along a dimension.
    ///
    /// # Errors
    /// Other sizes differ.
    pub fn concat(
        &mut self,
        name: &str,
        parts: &[ContainerId],
        axis: i64,
    ) -> Result<ContainerId, OpError> {
        let a = attrs([("axis", Attr::Int(axis))]);
        self.with(name, |b| b.op1("concat", parts, a))
    }

    /// The positions from `start` to before `stop` of a dimension.
    ///
    /// # Errors
    /// `axis` is none of its dimensions.
    pub fn slice(
        &mut self,
        name: &str,
        x: ContainerId,
        axis: i64,
        (start, stop): (i64, i64),
    ) -> Result<ContainerId, OpError> {
        let bound = |n: i64| Attr::Sizes(sizes(&[n]));
        let a = attrs([
            ("axis", Attr::Int(axis)),
            ("start", bound(start)),
            ("stop", bound(stop)),
        ]);
        self.with(name, |b| b.op1("slice", &[x], a))
    }

    /// Sum or mean (`kind`) over dimensions, which disappear.
    ///
    /// # Errors
    /// Axes that `x` does not have.
    pub fn reduce(
        &mut self,
        name: &str,
        kind: &str,
        x: ContainerId,
        axes: &[i64],
    ) -> Result<ContainerId, OpError> {
        let a = attrs([
            ("kind", Attr::Str(kind.into())),
            ("axes", Attr::Ints(axes.to_vec())),
            ("keep", Attr::Bool(false)),
        ]);
        self.with(name, |b| b.op1("reduce", &[x], a))
    }

    /// The elements of `x` at the positions `index` of a dimension, whose sizes replace it.
    ///
    /// # Errors
    /// `index` holds no integers.
    pub fn gather(
        &mut self,
        name: &str,
        x: ContainerId,
        index: ContainerId,
        axis: i64,
    ) -> Result<ContainerId, OpError> {
        let a = attrs([("axis", Attr::Int(axis))]);
        self.with(name, |b| b.op1("gather", &[x, index], a))
    }

    /// A sum of products, as `einsum` writes it.
    ///
    /// # Errors
    /// An equation that does not fit the operands.
    pub fn einsum(
        &mut self,
        name: &str,
        equation: &str,
        operands: &[ContainerId],
    ) -> Result<ContainerId, OpError> {
        let a = attrs([("equation", Attr::Str(equation.into()))]);
        self.with(name, |b| b.op1("einsum", operands, a))
    }
}

/// Constant sizes.
pub(crate) fn sizes(list: &[i64]) -> Vec<SymExpr> {
    list.iter().map(|n| SymExpr::constant(*n)).collect()
}
