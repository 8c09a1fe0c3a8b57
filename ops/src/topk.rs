//! The largest elements along an axis in order: `topk`. With k = size, it sorts.

use crate::index::scatter_zeros;
use crate::op::{Call, Gradient, GradientCall, Op, OpError, Sample, TensorType, attrs};
use crate::reference::{constant_shape, ravel, required, unravel};
use crate::shape_rules::axis;
use graph::{
    Attr, Builder, DType, Expr, Index, Memlet, Reduction, Scalar, SymExpr, Tasklet, Tensor,
};

/// `topk`: the k largest (or smallest) elements along an axis, best first, and their positions.
///
/// Attributes `axis: Int`, `k: Sizes[1]`, `largest: Bool` (true). Outputs values and positions
/// (i64). Of equal elements the one with the lower position comes first; NaN counts as largest.
/// Gradient: the incoming gradients, placed at the positions. Source: ONNX TopK-11, `torch.topk`, `torch.sort`.
/// The expansion ranks every element by counting those before it: n² comparisons for n elements; see `loops`.
#[derive(Debug)]
pub struct TopK;

struct TopKAttributes {
    axis: usize,
    k: SymExpr,
    largest: bool,
}

fn plan(call: &Call) -> Result<TopKAttributes, OpError> {
    let x = call.input(0)?;
    let axis = axis(call, call.int_or("axis", -1)?, x.rank())?;
    let k = match call.sizes("k")?.as_slice() {
        [k] => k.clone(),
        many => return Err(call.shape_error(format!("`k` has {} elements, not 1", many.len()))),
    };
    let beyond = (k.clone() - x.shape[axis].clone()).as_const();
    if beyond.is_some_and(|n| n > 0) {
        return Err(call.shape_error(format!("k = {k} of {} elements", x.shape[axis])));
    }
    Ok(TopKAttributes {
        axis,
        k,
        largest: call.bool_or("largest", true)?,
    })
}

/// Whether element 1 comes before element 0 when values differ in order.
fn before(largest: bool, float: bool) -> Expr {
    let (this, other) = (Expr::In(0), Expr::In(1));
    let better = if largest {
        other.clone().gt(this.clone())
    } else {
        other.clone().lt(this.clone())
    };
    if !float {
        return better;
    }
    // NaN is larger than every number.
    let (high, low) = if largest {
        (other, this)
    } else {
        (this, other)
    };
    better.or(high.is_nan().and(low.is_nan().not()))
}

fn equal(float: bool) -> Expr {
    let same = Expr::In(0).eq_(Expr::In(1));
    if float {
        same.or(Expr::In(0).is_nan().and(Expr::In(1).is_nan()))
    } else {
        same
    }
}

impl Op for TopK {
    fn name(&self) -> &'static str {
        "topk"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let plan = plan(call)?;
        let mut ty = call.input(0)?.clone();
        ty.shape[plan.axis] = plan.k;
        let positions = TensorType::new(DType::I64, ty.shape.clone());
        Ok(vec![ty, positions])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let x = required(call, inputs, 0)?;
        let plan = plan(call)?;
        let shape = constant_shape(call, &self.infer(call)?[0].shape)?;
        let mut values = Tensor::zeros(x.dtype, &shape);
        let mut positions = Tensor::zeros(DType::I64, &shape);
        for at in (0..values.len()).filter(|at| unravel(*at, &shape)[plan.axis] == 0) {
            let mut index = unravel(at, &shape);
            let mut row: Vec<(Scalar, usize)> = (0..x.shape[plan.axis])
                .map(|n| {
                    index[plan.axis] = n;
                    (x.at(ravel(&index, &x.shape)), n)
                })
                .collect();
            // `total_cmp` puts positive NaN above all; zeros of both signs are equal here.
            row.sort_by(|(a, _), (b, _)| {
                let order = match x.dtype.is_float() {
                    true => (a.as_f64() + 0.0).total_cmp(&(b.as_f64() + 0.0)),
                    false => a.as_i64().cmp(&b.as_i64()),
                };
                if plan.largest { order.reverse() } else { order }
            });
            for (n, (value, from)) in row.into_iter().take(shape[plan.axis]).enumerate() {
                index[plan.axis] = n;
                let to = ravel(&index, &shape);
                values.set(to, value);
                positions.set(to, Scalar::Int(from as i64));
            }
        }
        Ok(vec![values, positions])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let x = call.input_id(0)?;
        let plan = plan(call)?;
        let (shape, float) = (builder.shape(x), builder.dtype(x).is_float());
        let (rank, axis) = (shape.len(), plan.axis);
        let places = builder.transient("rank", DType::I64, &shape);
        let mut space = shape.clone();
        space.push(shape[axis].clone());
        let position = |d: usize| Expr::Index(SymExpr::symbol(format!("i{d}").as_str()));
        let first = position(rank).lt(position(axis));
        let earlier = before(plan.largest, float).or(equal(float).and(first));
        let count = (Reduction::Sum, earlier.cast(DType::I64));
        builder.reduce_over(&space, (&[rank], false), places, count, |i| {
            let mut other = i[..rank].to_vec();
            other[axis] = i[rank].clone();
            vec![
                Memlet::new(x, i[..rank].iter().cloned()),
                Memlet::new(x, other),
            ]
        });
        let names: Vec<String> = (0..rank).map(|d| format!("i{d}")).collect();
        let params: Vec<_> = names.iter().map(String::as_str).zip(shape).collect();
        builder.map(&params, |i| {
            // Ranks from k on fall outside and are dropped.
            let target = |container| {
                let mut memlet = Memlet::new(container, i.iter().cloned()).or_fill(0.0);
                memlet.subset[axis] = Index::Data(0);
                memlet
            };
            let values = [(0, Expr::In(1)), (1, position(axis))];
            let outputs = values
                .into_iter()
                .filter_map(|(n, e)| Some((target(call.output_id(n)?), e)));
            Tasklet {
                inputs: [places, x]
                    .map(|id| Memlet::new(id, i.iter().cloned()))
                    .to_vec(),
                outputs: outputs.collect(),
            }
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        let axis = plan(&g.call)?.axis;
        let shape = g.call.input(0)?.shape.clone();
        let dx = scatter_zeros(builder, axis, &shape, g.output(1)?, dy)?;
        Ok(g.only(0, dx))
    }

    fn samples(&self) -> Vec<Sample> {
        let of = |axis, k: i64, largest| {
            attrs([
                ("axis", Attr::Int(axis)),
                ("k", Attr::Sizes(vec![SymExpr::constant(k)])),
                ("largest", Attr::Bool(largest)),
            ])
        };
        let ties = vec![1.0, 3.0, 3.0, 0.0, 2.0, f64::NAN, 2.0, f64::NAN];
        let ties = Tensor::from_f64(DType::F32, &[2, 4], ties);
        // NaN, zeros of both signs and many equal numbers.
        let number = |n: usize| match n % 7 {
            0 => f64::NAN,
            1 => -0.0,
            2 => 0.0,
            _ => (n % 5) as f64 - 2.0,
        };
        let long = Tensor::from_f64(DType::F32, &[1, 200], (0..200).map(number).collect());
        let long = |name: &str, k: i64, largest: bool| {
            Sample::new(name, &[], of(1, k, largest))
                .value(0, long.clone())
                .not_differentiable()
        };
        vec![
            long("sorted ties", 150, true),
            long("sorted ties upwards", 200, false),
            long("few ties", 40, true),
            long("few ties upwards", 60, false),
            Sample::new("two largest", &[&[2, 5]], of(-1, 2, true)),
            Sample::new("few of a long row", &[&[3, 100]], of(-1, 5, true)),
            Sample::new("a long axis, sorted", &[&[2, 70, 3]], of(1, 70, false)),
            Sample::new("most of a long row", &[&[2, 90]], of(1, 66, true)),
            Sample::new("sorted along the first", &[&[4, 3]], of(0, 4, false)),
            Sample::new("ties", &[], of(1, 4, true))
                .value(0, ties.clone())
                .not_differentiable(),
            Sample::new("ties upwards", &[], of(1, 3, false))
                .value(0, ties)
                .not_differentiable(),
        ]
    }
}
