//! Pooling over windows of one size: what maximum and average share, and the maximum.
//!
//! `y[n,c,o] = max_r x[n,c,o·stride + r·dilation − pad]`. Positions outside x never win. Source: ONNX
//! `MaxPool`.
//!
//! The gradient of the maximum needs only which position of its window won: one byte for each
//! output in place of the inputs. Where several are equal the first wins, and of several NaN the last, as in
//! PyTorch. One minimum over a window finds both: with n positions, a maximum at position p has the number
//! p, and a NaN there has `2n − 1 − p`. The winner is stored as this number.

use crate::index_space::{IndexSpace, Reads, combine, for_each_index, write};
use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType};
use crate::reference::{constant_shape, ravel, required};
use crate::window::Window;
use graph::{
    Attr, Attrs, Builder, ContainerId, DType, Expr, Library, Memlet, Reduction, SymExpr, Tensor,
    Unary,
};

/// `max_pool` (x `[N, C, I…]`) → y `[N, C, O…]`, index (i64: row-major position of the maximum within
/// its `I…`), winner (number of the position within the window, `u8` where that suffices).
/// Attributes `kernel`, `stride`, `pad_low`, `pad_high`, `dilation`, `ceil`.
#[derive(Debug)]
pub struct MaxPool;

/// `max_pool_gradient` (dy, winner) → dx of shape `input_shape`; attributes as [`MaxPool`].
#[derive(Debug)]
pub struct MaxPoolGradient;

/// Pooling of one input: the window and both shapes.
pub(crate) struct Pooling {
    pub(crate) window: Window,
    pub(crate) x: Vec<SymExpr>,
    pub(crate) y: Vec<SymExpr>,
}

impl Pooling {
    pub(crate) fn new(call: &Call, x: &[SymExpr]) -> Result<Pooling, OpError> {
        let window = Window::new(call, call.ints("kernel")?)?;
        if x.len() != window.rank() + 2 || !(1..=3).contains(&window.rank()) {
            return Err(call.shape_error(format!(
                "a window of {} dimensions does not fit an input of rank {}",
                window.rank(),
                x.len()
            )));
        }
        let mut y = x[..2].to_vec();
        y.extend(window.output_sizes(call, &x[2..])?);
        Ok(Pooling {
            window,
            x: x.to_vec(),
            y,
        })
    }

    /// Parameters for outputs and for window positions; window dimensions of size 1 have none.
    pub(crate) fn space(&self) -> (IndexSpace, Walk) {
        let mut space = IndexSpace::over(&self.y);
        let y = space.indices();
        let mut x = y[..2].to_vec();
        let (_, names) = self.window.names();
        let mut position = SymExpr::constant(0);
        for (d, size) in self.window.kernel.iter().enumerate() {
            let mut r = SymExpr::constant(0);
            if *size > 1 {
                space = space.and(names[d], SymExpr::constant(*size));
                r = SymExpr::symbol(names[d]);
            }
            x.push(self.window.index(d, &y[2 + d], &r));
            position = position * *size + r;
        }
        (space, Walk { x, y, position })
    }

    pub(crate) fn x_memlet(&self, x: ContainerId, walk: &Walk, outside: f64) -> Memlet {
        let memlet = Memlet::new(x, walk.x.iter().cloned());
        if self.window.leaves(&self.x[2..], &self.y[2..]) {
            memlet.or_fill(outside)
        } else {
            memlet
        }
    }

    /// Positions of a window.
    fn n_positions(&self) -> i64 {
        self.window.kernel.iter().product()
    }

    /// The narrowest type for winners with a value to spare.
    fn winner_type(&self) -> DType {
        match self.n_positions() {
            0..=127 => DType::U8,
            _ => DType::I32,
        }
    }

    /// The number of a position where it holds NaN, from its number where it holds a maximum, or back.
    fn of_nan(&self, number: Expr) -> Expr {
        Expr::int(2 * self.n_positions() - 1).sub(number)
    }

    /// Attributes for another operator with this window.
    pub(crate) fn attrs(&self) -> Attrs {
        let mut attrs = self.window.attrs();
        attrs.insert("kernel".into(), Attr::Ints(self.window.kernel.clone()));
        attrs
    }

    /// Appends the winner of each window. What lies outside x equals no maximum and is not NaN.
    fn append_winner(
        &self,
        builder: &mut Builder,
        (x, y, winner): (ContainerId, ContainerId, ContainerId),
    ) {
        let (space, walk) = self.space();
        let dtype = builder.dtype(winner);
        let mut reads = Reads::default();
        let here = self.x_memlet(x, &walk, f64::NAN);
        let is_guarded = here.fill.is_some();
        let here = reads.memlet(here);
        let is_max = here.clone().eq_(reads.at(y, &walk.y));
        let is_nan = match is_guarded {
            true => reads.memlet(self.x_memlet(x, &walk, 0.0)).is_nan(),
            false => here.is_nan(),
        };
        let number = Expr::Index(walk.position.clone());
        let of_nan = Expr::Index(-walk.position.clone() + (2 * self.n_positions() - 1));
        let none = Expr::Const(Reduction::Min.identity(dtype));
        let of_nan = Expr::select(is_nan, of_nan, none);
        let found = Expr::select(is_max, number, of_nan).cast(dtype);
        let write = combine(Reduction::Min, winner, &walk.y, found);
        space.append(builder, reads, vec![write]);
    }

    /// Appends the row-major position in x of each winner.
    fn append_index(&self, builder: &mut Builder, winner: ContainerId, index: ContainerId) {
        let space = IndexSpace::over(&self.y);
        let y = space.indices();
        let mut reads = Reads::default();
        let number = reads.at(winner, &y).cast(DType::I64);
        let is_max = number.clone().lt(Expr::int(self.n_positions()));
        let mut rest = Expr::select(is_max, number.clone(), self.of_nan(number));
        let mut at = Expr::int(0);
        let mut stride = SymExpr::constant(1);
        for (d, k) in self.window.kernel.iter().enumerate().rev() {
            let first = self.window.index(d, &y[2 + d], &SymExpr::constant(0));
            let above = quotient(rest.clone(), *k);
            let tap = rest.sub(above.clone().mul(Expr::int(*k)));
            rest = above;
            let step = tap.mul(Expr::int(self.window.dilation[d]));
            let place = Expr::Index(first).add(step);
            at = at.add(place.mul(Expr::Index(stride.clone())));
            stride = stride * self.x[2 + d].clone();
        }
        space.append(builder, reads, vec![write(index, &y, at)]);
    }

    /// Calls `f(y offset, window position, x offset)` for every position inside x.
    pub(crate) fn for_each_position(
        &self,
        call: &Call,
        mut f: impl FnMut(usize, usize, usize),
    ) -> Result<(), OpError> {
        let (x, y) = (
            constant_shape(call, &self.x)?,
            constant_shape(call, &self.y)?,
        );
        let kernel: Vec<usize> = self.window.kernel.iter().map(|k| *k as usize).collect();
        for_each_index(&y, |out| {
            for_each_index(&kernel, |tap| {
                let mut from = out[..2].to_vec();
                for d in 0..tap.len() {
                    match usize::try_from(self.window.at(d, out[2 + d], tap[d])) {
                        Ok(at) if at < x[2 + d] => from.push(at),
                        _ => return,
                    }
                }
                f(ravel(out, &y), ravel(tap, &kernel), ravel(&from, &x));
            });
        });
        Ok(())
    }
}

/// `⌊number / by⌋` of a small number. Loops with it are vectorized, unlike loops with integer divisions.
fn quotient(number: Expr, by: i64) -> Expr {
    let middle = number.cast(DType::F64).add(Expr::float(0.5));
    let quotient = middle.mul(Expr::float(1.0 / by as f64));
    Expr::unary(Unary::Floor, quotient).cast(DType::I64)
}

/// Indices of x and y, and the position in the window, at a point of the map.
pub(crate) struct Walk {
    pub(crate) x: Vec<SymExpr>,
    pub(crate) y: Vec<SymExpr>,
    position: SymExpr,
}

pub(crate) fn float_input<'a>(call: &'a Call) -> Result<&'a TensorType, OpError> {
    let x = call.input(0)?;
    if x.dtype.is_float() {
        Ok(x)
    } else {
        Err(call.unsupported(format!("elements of type {}", x.dtype)))
    }
}

impl Op for MaxPool {
    fn name(&self) -> &'static str {
        "max_pool"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let x = float_input(call)?;
        let pooling = Pooling::new(call, &x.shape)?;
        let winner = pooling.winner_type();
        let of = |dtype| TensorType::new(dtype, pooling.y.clone());
        Ok(vec![of(x.dtype), of(DType::I64), of(winner)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let types = self.infer(call)?;
        let pooling = Pooling::new(call, &call.input(0)?.shape)?;
        let x = required(call, inputs, 0)?.to_f64();
        let plane: usize = constant_shape(call, &pooling.x[2..])?.iter().product();
        let shape = constant_shape(call, &pooling.y)?;
        let n = shape.iter().product();
        let mut y = vec![f64::NEG_INFINITY; n];
        let (mut index, mut winner) = (vec![0; n], vec![0; n]);
        let mut seen = vec![false; n];
        let last = 2 * pooling.n_positions() - 1;
        pooling.for_each_position(call, |out, tap, from| {
            if !seen[out] || x[from] > y[out] || x[from].is_nan() {
                seen[out] = true;
                y[out] = x[from];
                index[out] = (from % plane) as i64;
                winner[out] = match x[from].is_nan() {
                    true => last - tap as i64,
                    false => tap as i64,
                };
            }
        })?;
        Ok(vec![
            Tensor::from_f64(types[0].dtype, &shape, y),
            Tensor::from_i64(types[1].dtype, &shape, index),
            Tensor::from_i64(types[2].dtype, &shape, winner),
        ])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let (x, ty) = (call.input_id(0)?, call.input(0)?);
        let pooling = Pooling::new(call, &ty.shape)?;
        let y = call
            .output_id(0)
            .unwrap_or_else(|| builder.transient("max", ty.dtype, &pooling.y));
        let (space, walk) = pooling.space();
        let mut reads = Reads::default();
        let value = reads.memlet(pooling.x_memlet(x, &walk, f64::NEG_INFINITY));
        let write = combine(Reduction::Max, y, &walk.y, value);
        space.append(builder, reads, vec![write]);
        let (index, winner) = (call.output_id(1), call.output_id(2));
        if index.is_none() && winner.is_none() {
            return Ok(());
        }
        let winner = winner
            .unwrap_or_else(|| builder.transient("winner", pooling.winner_type(), &pooling.y));
        pooling.append_winner(builder, (x, y, winner));
        if let Some(index) = index {
            pooling.append_index(builder, winner, index);
        }
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let call = &g.call;
        let Some(Some(dy)) = g.output_gradients.first().copied() else {
            return Ok(Gradient::Zero);
        };
        let x = call.input_id(0)?;
        let pooling = Pooling::new(call, &call.input(0)?.shape)?;
        let winner = match call.output_id(2) {
            Some(winner) => winner,
            None => {
                let wanted = [false, false, true];
                let again = builder.op_for("max_pool", &[Some(x)], pooling.attrs(), &wanted)?;
                again[2].ok_or_else(|| call.unsupported("a gradient without its winner"))?
            }
        };
        let mut attrs = pooling.attrs();
        attrs.insert("input_shape".into(), Attr::Sizes(pooling.x.clone()));
        let dx = builder.op1("max_pool_gradient", &[dy, winner], attrs)?;
        Ok(Gradient::Rule(vec![Some(dx)]))
    }

    fn samples(&self) -> Vec<Sample> {
        let case = |(name, x, attrs): Case| Sample::new(name, &[&x], attrs);
        let mut samples: Vec<Sample> = cases().into_iter().map(case).collect();
        samples.extend(cases().into_iter().map(|(name, x, attrs)| {
            let shape: Vec<usize> = x.iter().map(|n| *n as usize).collect();
            let numbers = [f64::NEG_INFINITY, 1.0, f64::NAN, f64::NEG_INFINITY, 1.0];
            let number = |i: usize| numbers[if i % 7 < 3 { 0 } else { i % 5 }];
            let x = Tensor::from_f64(
                DType::F32,
                &shape,
                (0..shape.iter().product()).map(number).collect(),
            );
            Sample::new(&format!("{name}, of NaN and infinities"), &[], attrs)
                .value(0, x)
                .not_differentiable()
        }));
        samples
    }
}

impl Op for MaxPoolGradient {
    fn name(&self) -> &'static str {
        "max_pool_gradient"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let dy = float_input(call)?;
        let pooling = Pooling::new(call, &call.sizes("input_shape")?)?;
        if dy.shape != pooling.y || call.input(1)?.shape != pooling.y {
            return Err(call.shape_error("dy and winner must have the shape of the pooled value"));
        }
        Ok(vec![TensorType::new(dy.dtype, pooling.x)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let ty = &self.infer(call)?[0];
        let pooling = Pooling::new(call, &ty.shape)?;
        let dy = required(call, inputs, 0)?.to_f64();
        let winner = required(call, inputs, 1)?.to_i64();
        let shape = constant_shape(call, &ty.shape)?;
        let mut dx = vec![0.0; shape.iter().product()];
        let last = 2 * pooling.n_positions() - 1;
        pooling.for_each_position(call, |out, tap, from| {
            if [tap as i64, last - tap as i64].contains(&winner[out]) {
                dx[from] += dy[out];
            }
        })?;
        Ok(vec![Tensor::from_f64(ty.dtype, &shape, dx)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let pooling = Pooling::new(call, &call.sizes("input_shape")?)?;
        let Some(dx) = call.output_id(0) else {
            return Ok(());
        };
        let (space, walk) = pooling.space();
        let mut reads = Reads::default();
        let dy = reads.at(call.input_id(0)?, &walk.y);
        let winner = reads.at(call.input_id(1)?, &walk.y);
        let of_nan = Expr::Index(-walk.position.clone() + (2 * pooling.n_positions() - 1));
        let is_max = winner.clone().eq_(Expr::Index(walk.position.clone()));
        let won = is_max.or(winner.eq_(of_nan));
        let value = Expr::select(won, dy, Expr::float(0.0));
        let mut target = pooling.x_memlet(dx, &walk, 0.0);
        // Windows that tile the input write each element once.
        if !pooling.window.tiles(&pooling.x[2..], &pooling.y[2..]) {
            target = target.reduce(Reduction::Sum);
        }
        space.append(builder, reads, vec![(target, value)]);
        Ok(())
    }

    fn samples(&self) -> Vec<Sample> {
        let case = |(name, x, mut attrs): Case| {
            let x: Vec<_> = x.iter().map(|n| SymExpr::constant(*n)).collect();
            attrs.insert("input_shape".into(), Attr::Sizes(x.clone()));
            let library = library("max_pool_gradient", attrs.clone());
            let call = Call {
                library: &library,
                inputs: vec![],
            };
            let pooling = Pooling::new(&call, &x).ok()?;
            let y: Vec<i64> = pooling.y.iter().filter_map(SymExpr::as_const).collect();
            let shape: Vec<usize> = y.iter().map(|n| *n as usize).collect();
            let positions = 2 * pooling.n_positions();
            let n = shape.iter().product::<usize>() as i64;
            let winner = (0..n).map(|i| (i * 7 + 3) % positions).collect();
            let winner = Tensor::from_i64(pooling.winner_type(), &shape, winner);
            Some(Sample::new(name, &[&y], attrs).value(1, winner))
        };
        cases().into_iter().filter_map(case).collect()
    }
}

pub(crate) fn library(op: &str, attrs: Attrs) -> Library {
    Library {
        op: op.into(),
        attrs,
        inputs: vec![],
        outputs: vec![],
    }
}

pub(crate) type Case = (&'static str, Vec<i64>, Attrs);

/// Shapes of x with attributes: the samples of all pooling operators are made from these.
pub(crate) fn cases() -> Vec<Case> {
    let ints = |list: &[(&str, &[i64])]| -> Attrs {
        let entry = |(name, v): &(&str, &[i64])| (name.to_string(), Attr::Ints(v.to_vec()));
        list.iter().map(entry).collect()
    };
    let square: &[(&str, &[i64])] = &[("kernel", &[2, 2]), ("stride", &[2, 2])];
    let mut ceil = ints(&[
        ("kernel", &[3, 2]),
        ("stride", &[2, 2]),
        ("pad_low", &[1, 0]),
        ("pad_high", &[1, 0]),
    ]);
    ceil.insert("ceil".into(), Attr::Bool(true));
    vec![
        ("2x2 tiles", vec![2, 3, 4, 6], ints(square)),
        ("2x2 tiles with a rest", vec![1, 2, 5, 4], ints(square)),
        (
            "3x3, stride 2, padded",
            vec![1, 2, 7, 6],
            ints(&[
                ("kernel", &[3, 3]),
                ("stride", &[2, 2]),
                ("pad_low", &[1, 1]),
                ("pad_high", &[1, 1]),
            ]),
        ),
        ("rounded up", vec![1, 2, 6, 5], ceil),
        ("1-D, overlapping", vec![2, 2, 8], ints(&[("kernel", &[3])])),
        (
            "3-D, one size 1",
            vec![1, 2, 4, 3, 4],
            ints(&[("kernel", &[2, 1, 2]), ("stride", &[2, 1, 1])]),
        ),
        (
            "dilated",
            vec![1, 2, 7, 5],
            ints(&[
                ("kernel", &[3, 2]),
                ("stride", &[1, 2]),
                ("dilation", &[2, 2]),
            ]),
        ),
    ]
}
