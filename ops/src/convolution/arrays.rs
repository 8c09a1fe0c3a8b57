//! The three arrays of a convolution, and what any two of them contract to.
//!
//! Owns the shapes, the index space in which all four operators are maps, and the products that the
//! reference meaning visits. Which array is the result is the operator's to say.

use crate::index_space::for_each_index;
use crate::op::{Call, OpBuilder, OpError};
use crate::reference::constant_shape;
use crate::window::Window;
use graph::{
    Attr, Attrs, Builder, ContainerId, DType, Expr, Memlet, Reduction, SymExpr, Tasklet, Tensor,
};

/// The three arrays of a convolution.
pub(super) struct Convolution {
    window: Window,
    groups: i64,
    pub(super) x: Vec<SymExpr>,
    pub(super) w: Vec<SymExpr>,
    pub(super) y: Vec<SymExpr>,
}

/// The index space of a convolution and where each array is accessed in it.
pub(super) struct Space {
    params: Vec<(&'static str, SymExpr)>,
    /// Whether anything is summed in y.
    pub(super) contracts: bool,
    pub(super) x: Vec<SymExpr>,
    pub(super) w: Vec<SymExpr>,
    pub(super) y: Vec<SymExpr>,
}

impl Convolution {
    /// The arrays of a convolution of x and w with these shapes; the shape of y follows.
    pub(super) fn new(call: &Call, x: &[SymExpr], w: &[SymExpr]) -> Result<Self, OpError> {
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

    /// Like [`Convolution::new`], for a given y.
    pub(super) fn with_output(
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
    pub(super) fn transposed(call: &Call) -> Result<Self, OpError> {
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
    pub(super) fn x_memlet(&self, id: ContainerId, space: &Space) -> Memlet {
        let memlet = Memlet::new(id, space.x.iter().cloned());
        if self.window.leaves(&self.x[2..], &self.y[2..]) {
            memlet.or_fill(0.0)
        } else {
            memlet
        }
    }

    /// Appends the map `out[…] += In(0)·In(1)`.
    pub(super) fn contract(
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
    pub(super) fn for_each_product(
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

    pub(super) fn data_gradient(
        &self,
        builder: &mut Builder,
        dy: ContainerId,
        w: ContainerId,
    ) -> Result<ContainerId, OpError> {
        let mut attrs = self.attrs();
        attrs.insert("input_shape".into(), Attr::Sizes(self.x.clone()));
        builder.op1("conv_data_gradient", &[dy, w], attrs)
    }

    pub(super) fn weight_gradient(
        &self,
        builder: &mut Builder,
        dy: ContainerId,
        x: ContainerId,
    ) -> Result<ContainerId, OpError> {
        let mut attrs = self.attrs();
        attrs.insert("weight_shape".into(), Attr::Sizes(self.w.clone()));
        builder.op1("conv_weight_gradient", &[dy, x], attrs)
    }

    pub(super) fn forward(
        &self,
        builder: &mut Builder,
        x: ContainerId,
        w: ContainerId,
    ) -> Result<ContainerId, OpError> {
        builder.op1("conv", &[x, w], self.attrs())
    }

    /// dx by scattering dy·w.
    pub(super) fn evaluate_data(
        &self,
        call: &Call,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, OpError> {
        let (dy, w) = operands(call, inputs)?;
        let mut dx = vec![0.0; constant_shape(call, &self.x)?.iter().product()];
        self.for_each_product(call, |i, k, o| dx[i] += dy[o] * w[k])?;
        result(call, &self.x, dx)
    }

    pub(super) fn expand_data(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let (dy, w) = (call.input_id(0)?, call.input_id(1)?);
        let Some(dx) = call.output_id(0) else {
            return Ok(());
        };
        self.contract(builder, |space| {
            let dy = Memlet::new(dy, space.y.iter().cloned());
            let w = Memlet::new(w, space.w.iter().cloned());
            // No product is written to elements between strides: they keep the identity of the sum.
            ([dy, w], self.x_memlet(dx, space), true)
        });
        Ok(())
    }
}

fn texts(shape: &[SymExpr]) -> Vec<String> {
    shape.iter().map(ToString::to_string).collect()
}

pub(super) fn operands(
    call: &Call,
    inputs: &[Option<&Tensor>],
) -> Result<(Vec<f64>, Vec<f64>), OpError> {
    let get = |position: usize| match inputs.get(position).copied().flatten() {
        Some(t) => Ok(t.to_f64()),
        None => Err(OpError::MissingInput {
            op: call.library.op.clone(),
            position,
        }),
    };
    Ok((get(0)?, get(1)?))
}

pub(super) fn result(
    call: &Call,
    shape: &[SymExpr],
    data: Vec<f64>,
) -> Result<Vec<Tensor>, OpError> {
    let shape = constant_shape(call, shape)?;
    Ok(vec![Tensor::from_f64(result_type(call)?, &shape, data)])
}

pub(super) fn result_type(call: &Call) -> Result<DType, OpError> {
    let dtype = call.input(0)?.dtype.promote(call.input(1)?.dtype);
    if dtype.is_float() {
        Ok(dtype)
    } else {
        Err(call.unsupported(format!("elements of type {dtype}")))
    }
}
