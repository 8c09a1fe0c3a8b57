//! Adaptive pooling: the output's size is given, and window o covers `⌊o·I/O⌋ … ⌈(o+1)·I/O⌉` of each
//! dimension. Sources: `torch.nn.functional.adaptive_avg_pool2d`, `adaptive_max_pool2d`.
//!
//! Where every window has the same size this is plain pooling.

use crate::average_pool::divided;
use crate::index_space::{IndexSpace, Reads, combine, for_each_index};
use crate::op::{Call, Op, OpError, Sample, TensorType, attrs};
use crate::pool::{float_input, library};
use crate::reference::{constant_shape, ravel, required};
use graph::{Attr, Binary, Builder, ContainerId, DType, Expr, Memlet, Reduction, SymExpr, Tensor};

/// `adaptive_average_pool` (x `[N, C, I…]`) → y `[N, C, O…]`, attribute `output: Ints`.
#[derive(Debug)]
pub struct AdaptiveAveragePool;

/// `adaptive_max_pool` (x `[N, C, I…]`) → y `[N, C, O…]`, index (i64: row-major position of the maximum
/// within its `I…`), attribute `output: Ints`.
///
/// The elements of every window are copied side by side, the last one again where a window is
/// smaller than the largest; plain pooling does the rest. Of equal elements the first wins, of NaN the last.
#[derive(Debug)]
pub struct AdaptiveMaxPool;

/// Input and output sizes along the pooled dimensions.
fn sizes(call: &Call) -> Result<Vec<(i64, i64)>, OpError> {
    let x = float_input(call)?;
    let output = call.ints("output")?;
    if x.rank() != output.len() + 2 || !(1..=3).contains(&output.len()) {
        return Err(call.shape_error(format!(
            "{} output sizes for an input of rank {}",
            output.len(),
            x.rank()
        )));
    }
    let pair = |(size, out): (&SymExpr, i64)| match size.as_const() {
        Some(n) if out >= 1 && n >= 1 => Ok((n, out)),
        _ => Err(call.unsupported(format!("{size} elements into {out}"))),
    };
    x.shape[2..].iter().zip(output).map(pair).collect()
}

/// The size of a window of each dimension, if all windows have the same size.
fn kernel(sizes: &[(i64, i64)]) -> Option<Vec<i64>> {
    sizes
        .iter()
        .map(|(n, out)| (n % out == 0).then_some(n / out))
        .collect()
}

/// The size of the largest window of each dimension. It may be one element more than ⌈I/O⌉, since
/// starts are rounded down and ends up.
fn largest(sizes: &[(i64, i64)]) -> Vec<i64> {
    let extent = |(n, out): &(i64, i64)| {
        let of = |o: i64| ((o + 1) * n + out - 1) / out - o * n / out;
        (0..*out).map(of).max().unwrap_or(1)
    };
    sizes.iter().map(extent).collect()
}

/// Where window `o` starts, and how many elements it has.
fn window(o: SymExpr, (n, out): (i64, i64)) -> (SymExpr, SymExpr) {
    let out = SymExpr::constant(out);
    let start = (o.clone() * n).floor_div(&out);
    let end = -(((-o) * n - n).floor_div(&out));
    let extent = end - start.clone();
    (start, extent)
}

fn output_type(call: &Call) -> Result<TensorType, OpError> {
    let sizes = sizes(call)?;
    let x = call.input(0)?;
    let mut shape = x.shape[..2].to_vec();
    shape.extend(sizes.iter().map(|(_, out)| SymExpr::constant(*out)));
    Ok(TensorType::new(x.dtype, shape))
}

impl Op for AdaptiveAveragePool {
    fn name(&self) -> &'static str {
        "adaptive_average_pool"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![output_type(call)?])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let ty = &self.infer(call)?[0];
        let shape = constant_shape(call, &ty.shape)?;
        let x = required(call, inputs, 0)?;
        let data = x.to_f64();
        let mut y = Vec::new();
        for_each_window(&shape, &x.shape, |positions| {
            let sum: f64 = positions.iter().map(|at| data[*at]).sum();
            y.push(sum / positions.len() as f64);
        });
        Ok(vec![Tensor::from_f64(ty.dtype, &shape, y)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let sizes = sizes(call)?;
        let (x, Some(y)) = (call.input_id(0)?, call.output_id(0)) else {
            return Ok(());
        };
        if let Some(kernel) = kernel(&sizes) {
            let kernel = Attr::Ints(kernel);
            let attrs = attrs([("stride", kernel.clone()), ("kernel", kernel)]);
            let mut pool = library("average_pool", attrs);
            pool.inputs = vec![Some(x)];
            pool.outputs = vec![Some(y)];
            builder.library(pool);
            return Ok(());
        }
        let mut space = IndexSpace::over(&builder.shape(y));
        let out = space.indices();
        let mut index = out[..2].to_vec();
        let mut inside = Expr::Const(graph::Scalar::Bool(true));
        let mut count = SymExpr::constant(1);
        for (d, (pair, most)) in sizes.iter().zip(largest(&sizes)).enumerate() {
            let name = format!("r{d}");
            let (start, extent) = window(out[2 + d].clone(), *pair);
            space = space.and(&name, SymExpr::constant(most));
            let r = SymExpr::symbol(name.as_str());
            inside = inside.and(Expr::Index(r.clone()).lt(Expr::Index(extent.clone())));
            index.push(start + r);
            count = count * extent;
        }
        let mut reads = Reads::default();
        let value = reads.memlet(Memlet::new(x, index).or_fill(0.0));
        let value = divided(Expr::select(inside, value, Expr::float(0.0)), &count);
        space.append(
            builder,
            reads,
            vec![combine(Reduction::Sum, y, &out, value)],
        );
        Ok(())
    }

    fn samples(&self) -> Vec<Sample> {
        samples()
    }
}

impl AdaptiveMaxPool {
    /// Appends the windows' elements side by side: `[N, C, O·K…]`.
    fn windows(
        builder: &mut Builder,
        x: ContainerId,
        (sizes, kernel): (&[(i64, i64)], &[i64]),
    ) -> ContainerId {
        let mut shape = builder.shape(x);
        for ((size, (_, out)), k) in shape[2..].iter_mut().zip(sizes).zip(kernel) {
            *size = SymExpr::constant(out * k);
        }
        let all = builder.transient("windows", builder.dtype(x), &shape);
        builder.map_over(&shape, all, Expr::In(0), |i| {
            let mut at = i[..2].to_vec();
            for (d, (pair, k)) in sizes.iter().zip(kernel).enumerate() {
                let k = SymExpr::constant(*k);
                let (start, extent) = window(i[2 + d].floor_div(&k), *pair);
                at.push(start + i[2 + d].modulo(&k).min_with(&(extent - 1)));
            }
            vec![Memlet::new(x, at)]
        });
        all
    }

    /// The position in x of an element of [`Self::windows`], both row-major and without `[N, C]`.
    fn position(sizes: &[(i64, i64)], kernel: &[i64]) -> Expr {
        let (mut rest, mut stride) = (Expr::In(0), 1);
        let mut position = Expr::int(0);
        let divided = |a: Expr, by: i64| Expr::binary(Binary::FloorDiv, a, Expr::int(by));
        for ((n, out), k) in sizes.iter().zip(kernel).rev() {
            let at = Expr::binary(Binary::Mod, rest.clone(), Expr::int(out * k));
            rest = divided(rest, out * k);
            let o = divided(at.clone(), *k);
            let start = divided(o.clone().mul(Expr::int(*n)), *out);
            let end = divided(
                o.add(Expr::int(1))
                    .mul(Expr::int(*n))
                    .add(Expr::int(out - 1)),
                *out,
            );
            let r = Expr::binary(Binary::Mod, at, Expr::int(*k));
            let here = Expr::binary(Binary::Min, start.add(r), end.sub(Expr::int(1)));
            position = position.add(here.mul(Expr::int(stride)));
            stride *= n;
        }
        position
    }
}

impl Op for AdaptiveMaxPool {
    fn name(&self) -> &'static str {
        "adaptive_max_pool"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let y = output_type(call)?;
        let index = TensorType::new(DType::I64, y.shape.clone());
        Ok(vec![y, index])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let types = self.infer(call)?;
        let shape = constant_shape(call, &types[0].shape)?;
        let x = required(call, inputs, 0)?;
        let data = x.to_f64();
        let plane: usize = x.shape[2..].iter().product();
        let (mut y, mut index) = (Vec::new(), Vec::new());
        for_each_window(&shape, &x.shape, |positions| {
            let better = |best: usize, at: &usize| {
                if data[*at] > data[best] || data[*at].is_nan() {
                    *at
                } else {
                    best
                }
            };
            let best = positions[1..].iter().fold(positions[0], better);
            y.push(data[best]);
            index.push((best % plane) as i64);
        });
        Ok(vec![
            Tensor::from_f64(types[0].dtype, &shape, y),
            Tensor::from_i64(DType::I64, &shape, index),
        ])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let sizes = sizes(call)?;
        let x = call.input_id(0)?;
        let (y, index) = (call.output_id(0), call.output_id(1));
        let even = kernel(&sizes);
        let size = even.clone().unwrap_or_else(|| largest(&sizes));
        let (from, position) = match (&even, index) {
            (None, Some(index)) => {
                let from = Self::windows(builder, x, (&sizes, &size));
                let place = builder.transient("place", DType::I64, &builder.shape(index));
                (from, Some(place))
            }
            (None, None) => (Self::windows(builder, x, (&sizes, &size)), None),
            (Some(_), index) => (x, index),
        };
        let window = Attr::Ints(size.clone());
        let list = attrs([("stride", window.clone()), ("kernel", window)]);
        let mut pool = library("max_pool", list);
        pool.inputs = vec![Some(from)];
        pool.outputs = vec![y, position, None];
        builder.library(pool);
        if let (None, Some(place), Some(index)) = (even, position, index) {
            let shape = builder.shape(index);
            let value = Self::position(&sizes, &size);
            builder.map_over(&shape, index, value, |i| {
                vec![Memlet::new(place, i.iter().cloned())]
            });
        }
        Ok(())
    }

    fn samples(&self) -> Vec<Sample> {
        samples()
    }
}

/// Calls `f` for every window of outputs of `shape`, with the positions in x that it covers.
fn for_each_window(shape: &[usize], x: &[usize], mut f: impl FnMut(&[usize])) {
    for_each_index(shape, |index| {
        let start = |d: usize| index[d] * x[d] / shape[d];
        let end = |d: usize| ((index[d] + 1) * x[d]).div_ceil(shape[d]);
        let extent: Vec<usize> = (2..shape.len()).map(|d| end(d) - start(d)).collect();
        let mut positions = Vec::new();
        for_each_index(&extent, |tap| {
            let mut from = index[..2].to_vec();
            from.extend(tap.iter().enumerate().map(|(d, r)| start(2 + d) + r));
            positions.push(ravel(&from, x));
        });
        f(&positions);
    });
}

fn samples() -> Vec<Sample> {
    let case = |name: &str, x: &[i64], output: &[i64]| {
        Sample::new(name, &[x], attrs([("output", Attr::Ints(output.to_vec()))]))
    };
    vec![
        case("equal windows", &[2, 3, 6, 4], &[3, 2]),
        case("unequal windows", &[1, 2, 7, 5], &[3, 2]),
        case("more outputs than inputs", &[1, 2, 3], &[5]),
        case("to one", &[2, 2, 3, 5], &[1, 1]),
        case("three dimensions", &[1, 1, 5, 4, 3], &[2, 4, 2]),
    ]
}
