//! Reductions along axes: `reduce`.
//!
//! Positions of extremes are in [`crate::arg_reduce`], running sums in [`crate::cumsum`], variances in
//! [`crate::variance`].

use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{constant_shape, ravel, required, unravel};
use crate::shape_rules::{axes, expand_to, extent, reciprocal, reduced, reshape};
use graph::{
    Attr, Attrs, Binary, Builder, ContainerId, DType, Expr, Memlet, Reduction, Scalar, SymExpr,
    Tensor,
};

/// `reduce`: one value from all elements along axes.
///
/// Attributes `kind: Str`, `axes: Ints` (absent or empty: all), `keep: Bool` (false; reduced
/// dimensions stay with size 1). `at_nan: Str` says which elements get the gradient of a `max` or
/// `min` that is NaN: `none` (the default), `nan` (those that are NaN share it, as `torch.max`) or
/// `all` (NaN for each, as `torch.amax`). Kinds, with gradient for incoming `g`:
///
/// | kind | value | gradient |
/// |---|---|---|
/// | `sum` | Σx (integers and bool: in i64) | g |
/// | `mean` | Σx / n | g / n |
/// | `prod` | Πx (integers and bool: in i64) | g · (product of the others), zeros included |
/// | `max`, `min` | extreme; NaN if there is one | g shared evenly among the extremes, as `torch.amax` |
/// | `any`, `all` | whether one is / all are not zero | none |
/// | `logsumexp` | ln Σeˣ, shifted by the maximum | g · e^(x − y) |
/// | `l1` | Σ∣x∣ | g · sign x, 0 where x is NaN |
/// | `l2` | √Σx² | g · x / y, 0 where y is 0 |
/// | `sumsq` | Σx² | 2 · g · x |
///
/// Source: ONNX Reduce*-18, `torch.sum`, `amax`, `logsumexp`, `linalg.vector_norm`.
#[derive(Debug)]
pub struct Reduce;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Sum,
    Mean,
    Prod,
    Max,
    Min,
    Any,
    All,
    LogSumExp,
    L1,
    L2,
    SumSquares,
}

impl Kind {
    const NAMED: [(&'static str, Kind); 11] = [
        ("sum", Kind::Sum),
        ("mean", Kind::Mean),
        ("prod", Kind::Prod),
        ("max", Kind::Max),
        ("min", Kind::Min),
        ("any", Kind::Any),
        ("all", Kind::All),
        ("logsumexp", Kind::LogSumExp),
        ("l1", Kind::L1),
        ("l2", Kind::L2),
        ("sumsq", Kind::SumSquares),
    ];

    fn new(call: &Call) -> Result<Kind, OpError> {
        let name = call.str("kind")?;
        let known = Kind::NAMED.iter().find(|(n, _)| *n == name);
        known
            .map(|(_, kind)| *kind)
            .ok_or_else(|| call.unsupported(format!("kind `{name}`")))
    }

    fn dtype(self, call: &Call, x: DType) -> Result<DType, OpError> {
        match self {
            Kind::Any | Kind::All => Ok(DType::Bool),
            Kind::Max | Kind::Min => Ok(x),
            Kind::Sum | Kind::Prod | Kind::L1 | Kind::SumSquares if !x.is_float() => Ok(DType::I64),
            Kind::Mean | Kind::LogSumExp | Kind::L2 if !x.is_float() => {
                Err(call.unsupported(format!("{self:?} of {x}; convert it to a float first")))
            }
            _ => Ok(x),
        }
    }

    /// How elements combine, and what is combined. `n` is their number.
    fn tasklet(self, x: DType, n: &SymExpr) -> (Reduction, Expr) {
        let element = if x == DType::Bool {
            Expr::In(0).cast(DType::I64)
        } else {
            Expr::In(0)
        };
        let truth = Expr::binary(Binary::Ne, Expr::In(0), Expr::int(0));
        match self {
            Kind::Sum => (Reduction::Sum, element),
            // Scaled before summing: one map instead of two.
            Kind::Mean => (Reduction::Sum, element.mul(reciprocal(n))),
            Kind::Prod => (Reduction::Prod, element),
            Kind::Max | Kind::LogSumExp => (Reduction::Max, Expr::In(0)),
            Kind::Min => (Reduction::Min, Expr::In(0)),
            Kind::Any => (Reduction::Max, truth),
            Kind::All => (Reduction::Min, truth),
            Kind::L1 => (Reduction::Sum, element.abs()),
            Kind::L2 | Kind::SumSquares => (Reduction::Sum, element.clone().mul(element)),
        }
    }
}

struct ReductionAttributes {
    kind: Kind,
    axes: Vec<usize>,
    keep: bool,
    n: SymExpr,
}

fn plan(call: &Call) -> Result<ReductionAttributes, OpError> {
    let x = call.input(0)?;
    let axes = axes(call, x.rank())?;
    Ok(ReductionAttributes {
        kind: Kind::new(call)?,
        keep: call.bool_or("keep", false)?,
        n: extent(&x.shape, &axes),
        axes,
    })
}

/// The values that go into each element of the result, in row-major order.
pub(crate) fn gather_groups(x: &Tensor, axes: &[usize]) -> Vec<Vec<f64>> {
    gather_scalars(x, axes, Scalar::as_f64)
}

/// Like [`gather_groups`], but collects what `of` makes of each value.
pub(crate) fn gather_scalars<T>(
    x: &Tensor,
    axes: &[usize],
    of: impl Fn(Scalar) -> T,
) -> Vec<Vec<T>> {
    let kept: Vec<usize> = (0..x.shape.len()).filter(|d| !axes.contains(d)).collect();
    let shape: Vec<usize> = kept.iter().map(|d| x.shape[*d]).collect();
    let mut groups: Vec<Vec<T>> = (0..shape.iter().product()).map(|_| Vec::new()).collect();
    for at in 0..x.len() {
        let index = unravel(at, &x.shape);
        let place: Vec<usize> = kept.iter().map(|d| index[*d]).collect();
        groups[ravel(&place, &shape)].push(of(x.at(at)));
    }
    groups
}

fn nan_or_fold(values: &[f64], start: f64, f: impl Fn(f64, f64) -> f64) -> f64 {
    if values.iter().any(|v| v.is_nan()) {
        f64::NAN
    } else {
        values.iter().copied().fold(start, f)
    }
}

fn reduce_values(kind: Kind, values: &[f64]) -> f64 {
    let sum = |f: &dyn Fn(f64) -> f64| values.iter().map(|v| f(*v)).sum::<f64>();
    let max = || nan_or_fold(values, f64::NEG_INFINITY, f64::max);
    match kind {
        Kind::Sum => sum(&|v| v),
        Kind::Mean => sum(&|v| v) / values.len() as f64,
        Kind::Prod => values.iter().product(),
        Kind::Max => max(),
        Kind::Min => nan_or_fold(values, f64::INFINITY, f64::min),
        Kind::Any => f64::from(u8::from(values.iter().any(|v| *v != 0.0))),
        Kind::All => f64::from(u8::from(values.iter().all(|v| *v != 0.0))),
        Kind::LogSumExp => {
            let m = max();
            if m.is_infinite() {
                m
            } else {
                m + sum(&|v| (v - m).exp()).ln()
            }
        }
        Kind::L1 => sum(&f64::abs),
        Kind::L2 => sum(&|v| v * v).sqrt(),
        Kind::SumSquares => sum(&|v| v * v),
    }
}

/// Reduces integers without rounding to 53 bits; `None` for kinds whose results are floats or truth values.
fn reduce_integers(kind: Kind, values: &[i64]) -> Option<i64> {
    let sum = |f: &dyn Fn(i64) -> i64| values.iter().fold(0i64, |s, v| s.wrapping_add(f(*v)));
    Some(match kind {
        Kind::Sum => sum(&|v| v),
        Kind::Prod => values.iter().fold(1i64, |p, v| p.wrapping_mul(*v)),
        Kind::Max => values.iter().copied().fold(i64::MIN, i64::max),
        Kind::Min => values.iter().copied().fold(i64::MAX, i64::min),
        Kind::L1 => sum(&i64::wrapping_abs),
        Kind::SumSquares => sum(&|v| v.wrapping_mul(v)),
        Kind::Mean | Kind::Any | Kind::All | Kind::LogSumExp | Kind::L2 => return None,
    })
}

impl Op for Reduce {
    fn name(&self) -> &'static str {
        "reduce"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let x = call.input(0)?;
        let plan = plan(call)?;
        Ok(vec![TensorType::new(
            plan.kind.dtype(call, x.dtype)?,
            reduced(&x.shape, &plan.axes, plan.keep),
        )])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let x = required(call, inputs, 0)?;
        let plan = plan(call)?;
        let ty = &self.infer(call)?[0];
        let shape = constant_shape(call, &ty.shape)?;
        if !x.dtype.is_float() && ty.dtype != DType::Bool {
            let groups = gather_scalars(x, &plan.axes, Scalar::as_i64);
            let values: Option<Vec<i64>> = groups
                .iter()
                .map(|g| reduce_integers(plan.kind, g))
                .collect();
            if let Some(values) = values {
                return Ok(vec![Tensor::from_i64(ty.dtype, &shape, values)]);
            }
        }
        let groups = gather_groups(x, &plan.axes);
        let values = groups.iter().map(|g| reduce_values(plan.kind, g)).collect();
        Ok(vec![Tensor::from_f64(ty.dtype, &shape, values)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let x = call.input_id(0)?;
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let plan = plan(call)?;
        let (shape, dtype) = (builder.shape(x), builder.dtype(x));
        let dims = (plan.axes.as_slice(), plan.keep);
        let tasklet = plan.kind.tasklet(dtype, &plan.n);
        let read = |i: &[SymExpr]| vec![Memlet::new(x, i.iter().cloned())];
        match plan.kind {
            Kind::L2 => {
                // The squares of 16-bit numbers may be infinite where the root is not.
                let wide = match dtype {
                    DType::F16 | DType::BF16 => DType::F32,
                    _ => dtype,
                };
                let squares = builder.transient("sum_of_squares", wide, &builder.shape(out));
                let (reduction, mut square) = tasklet;
                let mut root = Expr::In(0).sqrt();
                if wide != dtype {
                    square = square.substitute_inputs(&|i| Expr::In(i).cast(wide));
                    root = root.cast(dtype);
                }
                builder.reduce_over(&shape, dims, squares, (reduction, square), read);
                write(builder, out, root, &[squares]);
            }
            Kind::LogSumExp => {
                let kept = reduced(&shape, &plan.axes, plan.keep);
                let max = builder.transient("max", dtype, &kept);
                builder.reduce_over(&shape, dims, max, tasklet, read);
                let sum = builder.transient("sum_of_exponentials", dtype, &kept);
                let term = (
                    Reduction::Sum,
                    Expr::In(0).sub(finite_shift(Expr::In(1))).exp(),
                );
                builder.reduce_over(&shape, dims, sum, term, |i| {
                    let group = reduced(i, &plan.axes, false);
                    let group = if plan.keep {
                        kept_index(i, &plan.axes)
                    } else {
                        group
                    };
                    vec![Memlet::new(x, i.iter().cloned()), Memlet::new(max, group)]
                });
                let shifted = Expr::In(0).log().add(finite_shift(Expr::In(1)));
                write(builder, out, shifted, &[sum, max]);
            }
            _ => builder.reduce_over(&shape, dims, out, tasklet, read),
        }
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let plan = plan(&g.call)?;
        if matches!(plan.kind, Kind::Any | Kind::All) {
            return Ok(Gradient::Zero);
        }
        let Some(dy) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        let x = g.call.input_id(0)?;
        let shape = builder.shape(x);
        let kept = reduced(&shape, &plan.axes, true);
        let dy = reshape(builder, dy, &kept)?;
        let dx = match plan.kind {
            Kind::Sum => expand_to(builder, dy, &shape)?,
            Kind::Mean => {
                let scaled = builder.elementwise(Expr::In(0).mul(reciprocal(&plan.n)), &[dy])?;
                expand_to(builder, scaled, &shape)?
            }
            Kind::L1 => {
                builder.elementwise(Expr::In(0).mul(Expr::In(1).slope_of_abs()), &[dy, x])?
            }
            Kind::SumSquares => {
                let twice = Expr::In(0).mul(Expr::float(2.0)).mul(Expr::In(1));
                builder.elementwise(twice, &[dy, x])?
            }
            Kind::Prod => product_gradient(builder, dy, x, &plan.axes)?,
            _ => {
                let y = reshape(builder, g.output(0)?, &kept)?;
                match plan.kind {
                    Kind::Max | Kind::Min => {
                        let at_nan = AtNan::new(&g.call)?;
                        extreme_gradient(builder, at_nan, [dy, x, y], &plan.axes)?
                    }
                    kind => gradient_from_output(builder, kind, [dy, x, y])?,
                }
            }
        };
        Ok(g.only(0, dx))
    }

    fn samples(&self) -> Vec<Sample> {
        let mut samples = Vec::new();
        for (name, kind) in Kind::NAMED {
            let attrs = |axes: &[i64], keep| reduce_attrs(name, axes, keep);
            let x: &[&[i64]] = &[&[2, 3, 4]];
            let cases = [
                Sample::new(&format!("{name} of the middle"), x, attrs(&[1], false)),
                Sample::new(&format!("{name} of two, kept"), x, attrs(&[0, -1], true)),
                Sample::new(&format!("{name} of all"), x, attrs(&[], false)),
            ];
            let smooth = !matches!(kind, Kind::Any | Kind::All);
            samples.extend(cases.map(|s| if smooth { s } else { s.not_differentiable() }));
        }
        let rows = |dtype, data| Tensor::from_f64(dtype, &[2, 3], data);
        let with = |name: &str, kind, x| {
            Sample::new(name, &[], reduce_attrs(kind, &[1], false)).value(0, x)
        };
        let zeros = vec![0.0, 2.0, 3.0, 0.0, 0.0, 4.0];
        let truth = vec![0.0, 1.0, 1.0, 0.0, 0.0, 0.0];
        samples.extend([
            with("prod around zeros", "prod", rows(DType::F32, zeros.clone())),
            with("any of zeros", "any", rows(DType::F32, zeros.clone())).not_differentiable(),
            with("sum of integers", "sum", rows(DType::I32, zeros.clone())).not_differentiable(),
            with("max of integers", "max", rows(DType::I32, zeros)).not_differentiable(),
            with("count of true", "sum", rows(DType::Bool, truth.clone())).not_differentiable(),
            with("all of bool", "all", rows(DType::Bool, truth)).not_differentiable(),
        ]);
        samples
    }
}

/// Attributes of a reduction.
pub fn reduce_attrs(kind: &str, axes: &[i64], keep: bool) -> Attrs {
    attrs([
        ("kind", Attr::Str(kind.into())),
        ("axes", Attr::Ints(axes.to_vec())),
        ("keep", Attr::Bool(keep)),
    ])
}

/// Appends a reduction that keeps reduced dimensions with size 1.
///
/// # Errors
/// As [`OpBuilder::op`].
pub fn reduce_kept(
    builder: &mut Builder,
    kind: &str,
    x: ContainerId,
    axes: &[usize],
) -> Result<ContainerId, OpError> {
    let axes: Vec<i64> = axes.iter().map(|a| *a as i64).collect();
    if axes.is_empty() {
        // An empty list would mean all axes; nothing is to be reduced.
        return Ok(x);
    }
    builder.op1("reduce", &[x], reduce_attrs(kind, &axes, true))
}

/// Appends `out[i…] = expr(inputs[i…])` for inputs of the shape of `out`.
fn write(builder: &mut Builder, out: ContainerId, expr: Expr, inputs: &[ContainerId]) {
    let shape = builder.shape(out);
    builder.map_over(&shape, out, expr, |i| {
        let read = |id: &ContainerId| Memlet::new(*id, i.iter().cloned());
        inputs.iter().map(read).collect()
    });
}

/// `i` with 0 along `axes`: the index of the element's group in a reduction that keeps dimensions.
pub(crate) fn kept_index(i: &[SymExpr], axes: &[usize]) -> Vec<SymExpr> {
    let at = |(d, index): (usize, &SymExpr)| {
        if axes.contains(&d) {
            SymExpr::constant(0)
        } else {
            index.clone()
        }
    };
    i.iter().enumerate().map(at).collect()
}

/// The maximum as a shift; 0 where it is infinite, as ∞ − ∞ is not a number.
fn finite_shift(max: Expr) -> Expr {
    let infinite = max.clone().abs().eq_(Expr::float(f64::INFINITY));
    Expr::select(infinite, Expr::float(0.0), max)
}

fn gradient_from_output(
    builder: &mut Builder,
    kind: Kind,
    [dy, x, y]: [ContainerId; 3],
) -> Result<ContainerId, OpError> {
    let (e_dy, e_x, e_y) = (Expr::In(0), Expr::In(1), Expr::In(2));
    match kind {
        Kind::LogSumExp => {
            // NaN where every element is −∞, as in PyTorch.
            builder.elementwise(e_dy.mul(e_x.sub(e_y).exp()), &[dy, x, y])
        }
        _ => {
            let zero = e_y.clone().eq_(Expr::float(0.0));
            let ratio = Expr::select(zero, Expr::float(0.0), e_x.div(e_y));
            builder.elementwise(e_dy.mul(ratio), &[dy, x, y])
        }
    }
}

/// Which elements get the gradient of an extreme that is NaN.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AtNan {
    None,
    Nan,
    All,
}

impl AtNan {
    fn new(call: &Call) -> Result<AtNan, OpError> {
        if !call.library.attrs.contains_key("at_nan") {
            return Ok(AtNan::None);
        }
        match call.str("at_nan")?.as_str() {
            "none" => Ok(AtNan::None),
            "nan" => Ok(AtNan::Nan),
            "all" => Ok(AtNan::All),
            other => Err(call.unsupported(format!("at_nan `{other}`"))),
        }
    }
}

/// `dy` shared evenly among the elements that equal the extreme.
fn extreme_gradient(
    builder: &mut Builder,
    at_nan: AtNan,
    [dy, x, y]: [ContainerId; 3],
    axes: &[usize],
) -> Result<ContainerId, OpError> {
    let dtype = builder.dtype(x);
    let is_hit = |x: Expr, y: Expr| {
        let equal = x.clone().eq_(y.clone());
        match at_nan {
            AtNan::Nan => equal.or(x.is_nan().and(y.is_nan())),
            AtNan::None | AtNan::All => equal,
        }
    };
    // A count may be beyond the largest number of 16 bits.
    let hit = is_hit(Expr::In(0), Expr::In(1)).cast(dtype.arithmetic());
    let hits = builder.elementwise(hit, &[x, y])?;
    let count = reduce_kept(builder, "sum", hits, axes)?;
    let (e_dy, e_count) = (Expr::In(0), Expr::In(3));
    let is_hit = is_hit(Expr::In(1), Expr::In(2));
    let zero = Expr::float(0.0);
    let share = match at_nan {
        // Nothing equals a NaN, so that the count is 0, and 0 / 0 is NaN.
        AtNan::All => Expr::select(is_hit, e_dy, zero).div(e_count),
        AtNan::None | AtNan::Nan => Expr::select(is_hit, e_dy.div(e_count), zero),
    };
    let share = match dtype == dtype.arithmetic() {
        true => share,
        false => share.cast(dtype),
    };
    builder.elementwise(share, &[dy, x, y, count])
}

/// `dy · Π of the other elements`: with no zero among them `y / x`; with one zero only that
/// element's gradient is not zero; with more, none.
fn product_gradient(
    builder: &mut Builder,
    dy: ContainerId,
    x: ContainerId,
    axes: &[usize],
) -> Result<ContainerId, OpError> {
    let dtype = builder.dtype(x);
    let is_zero = |e: Expr| e.eq_(Expr::float(0.0));
    let zero = builder.elementwise(is_zero(Expr::In(0)).cast(dtype), &[x])?;
    let zeros = reduce_kept(builder, "sum", zero, axes)?;
    let factor = Expr::select(is_zero(Expr::In(0)), Expr::float(1.0), Expr::In(0));
    let factors = builder.elementwise(factor, &[x])?;
    let product = reduce_kept(builder, "prod", factors, axes)?;
    let (e_dy, e_x, zeros_here, others) = (Expr::In(0), Expr::In(1), Expr::In(2), Expr::In(3));
    let none = zeros_here.clone().eq_(Expr::float(0.0));
    let one = zeros_here.eq_(Expr::float(1.0)).and(is_zero(e_x.clone()));
    let rest = Expr::select(
        none,
        others.clone().div(e_x),
        Expr::select(one, others, Expr::float(0.0)),
    );
    builder.elementwise(e_dy.mul(rest), &[dy, x, zeros, product])
}
