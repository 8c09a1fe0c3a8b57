//! Element-wise arithmetic with broadcasting: `out[i…] = expr(inputs[i…])`.
//!
//! One operator covers all of it: activations, arithmetic, comparisons, casts and dropout masks are
//! [`graph::Expr`]s. Inputs are broadcast as in NumPy (aligned at the last dimension, size 1
//! stretches). The gradient for an input is the symbolic derivative of the expression times the
//! incoming gradient, summed over the dimensions along which that input was broadcast. A call may give
//! the gradient itself, where the derivative of the formula is another one at special points.

use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{broadcast_offset, constant_shape, unravel};
use crate::shape_rules::{broadcast, broadcast_memlet, display, sum_to};
use graph::{
    Attr, Binary, Builder, DType, Expr, Scalar, SizeError, SymExpr, Symbol, Tensor, Unary,
};

/// `elementwise`: attribute `expr`, and optionally `dtype` of the result and [`gradient_attr`] of inputs.
#[derive(Debug)]
pub struct Elementwise;

/// The attribute with the gradient of input `position`: an expression of the inputs and, after them, of
/// the incoming gradient. Without it, the gradient is the derivative of `expr`.
pub fn gradient_attr(position: usize) -> String {
    format!("gradient_{position}")
}

/// The result in the arithmetic of the operands' types: see [`Expr::typed`].
///
/// # Errors
/// As [`Op::infer`].
pub(crate) fn evaluate_typed(
    call: &Call,
    inputs: &[Option<&Tensor>],
) -> Result<Vec<Tensor>, OpError> {
    let types: Vec<_> = inputs.iter().flatten().map(|t| t.dtype).collect();
    let expr = call.expr("expr")?;
    let typed = expr.typed(&types, Elementwise.infer(call)?[0].dtype);
    evaluate_by(call, inputs, |scalars, value_of| {
        typed.eval(scalars, value_of)
    })
}

/// Values of the symbols in an expression's indices.
type SymbolValues<'a> = &'a dyn Fn(&Symbol) -> Option<i64>;

fn evaluate_by(
    call: &Call,
    inputs: &[Option<&Tensor>],
    value: impl Fn(&[Scalar], SymbolValues<'_>) -> Result<Scalar, SizeError>,
) -> Result<Vec<Tensor>, OpError> {
    let ty = &Elementwise.infer(call)?[0];
    let shape = constant_shape(call, &ty.shape)?;
    let mut out = Tensor::zeros(ty.dtype, &shape);
    for at in 0..out.len() {
        let index = unravel(at, &shape);
        let scalars: Vec<_> = inputs
            .iter()
            .flatten()
            .map(|t| t.at(broadcast_offset(&t.shape, &index)))
            .collect();
        // `i0, i1, …` are the result's indices, as in the expansion.
        let value_of = |s: &Symbol| {
            let d: usize = s.as_str().strip_prefix('i')?.parse().ok()?;
            index.get(d).map(|i| *i as i64)
        };
        let found = value(&scalars, &value_of).map_err(|e| call.shape_error(e.to_string()))?;
        out.set(at, found);
    }
    Ok(vec![out])
}

impl Op for Elementwise {
    fn name(&self) -> &'static str {
        "elementwise"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let mut shape = Vec::new();
        let mut dtypes = Vec::new();
        for position in 0..call.inputs.len() {
            let input = call.input(position)?;
            shape = broadcast(&shape, &input.shape).ok_or_else(|| {
                call.shape_error(format!(
                    "input {position} of shape {} does not broadcast with {}",
                    display(&input.shape),
                    display(&shape)
                ))
            })?;
            dtypes.push(input.dtype);
        }
        let expr = call.expr("expr")?;
        let dtype = call.dtype_or("dtype", expr.dtype(&dtypes))?;
        Ok(vec![TensorType::new(dtype, shape)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let expr = call.expr("expr")?;
        evaluate_by(call, inputs, |scalars, value_of| {
            expr.eval(scalars, value_of)
        })
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let shape = builder.shape(out);
        let expr = call.expr("expr")?;
        let ids: Vec<_> = call.library.inputs.iter().flatten().copied().collect();
        let shapes: Vec<_> = ids.iter().map(|id| builder.shape(*id)).collect();
        builder.map_over(&shape, out, expr, |i| {
            ids.iter()
                .zip(&shapes)
                .map(|(id, s)| broadcast_memlet(*id, s, i))
                .collect()
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0) else {
            return Ok(g.nothing());
        };
        let expr = g.call.expr("expr")?;
        let mut ids: Vec<_> = (0..g.call.inputs.len())
            .map(|i| g.call.input_id(i))
            .collect::<Result<_, _>>()?;
        ids.push(dy);
        let types: Vec<_> = ids.iter().map(|id| builder.dtype(*id)).collect();
        let incoming = Expr::In(g.call.inputs.len());
        let mut result = Vec::new();
        for position in 0..g.call.inputs.len() {
            let given = gradient_attr(position);
            let slope = match g.call.library.attrs.contains_key(given.as_str()) {
                true => Some(g.call.expr(&given)?),
                false => expr.pullback(position, &incoming),
            };
            let Some(slope) = slope.filter(|_| g.wants(position)) else {
                result.push(None);
                continue;
            };
            let ty = g.call.input(position)?.clone();
            let (expr, used) = keep_used(&slope.simplify_typed(&types), &ids);
            // Terms of 16 bits may be too large for their type where their sum is not.
            let is_whole = builder.shape(dy) == ty.shape;
            let is_given = expr == Expr::In(0) && builder.dtype(used[0]) == ty.dtype;
            let dtype = match is_whole || is_given {
                true => ty.dtype,
                false => ty.dtype.arithmetic(),
            };
            let list = attrs([("expr", Attr::Expr(expr)), ("dtype", Attr::DType(dtype))]);
            let terms = builder.op1("elementwise", &used, list)?;
            let sum = sum_to(builder, terms, &ty.shape)?;
            result.push(Some(match dtype == ty.dtype {
                true => sum,
                false => builder.elementwise(Expr::In(0).cast(ty.dtype), &[sum])?,
            }));
        }
        Ok(Gradient::Rule(result))
    }

    fn samples(&self) -> Vec<Sample> {
        samples()
    }
}

/// Broadcasting, and every scalar function. A sample sums the functions of one domain with different weights.
fn samples() -> Vec<Sample> {
    use Unary::*;
    let of = |name: &str, inputs: &[&[i64]], expr: Expr| {
        Sample::new(name, inputs, attrs([("expr", Attr::Expr(expr))]))
    };
    let weighted = |terms: Vec<Expr>| {
        let scaled = terms.into_iter().enumerate();
        let scaled = scaled.map(|(n, e)| e.mul(Expr::float(1.0 + 0.25 * n as f64)));
        scaled.reduce(Expr::add).unwrap_or(Expr::float(0.0))
    };
    let unary = |name: &str, list: &[Unary], low: f64, high: f64| {
        let terms = list.iter().map(|f| Expr::unary(*f, Expr::In(0)));
        of(name, &[&[2, 17]], weighted(terms.collect())).range(low, high)
    };
    let binary = |list: &[Binary]| {
        let term = |f: &Binary| Expr::binary(*f, Expr::In(0), Expr::In(1)).cast(DType::F32);
        weighted(list.iter().map(term).collect())
    };
    let two: &[&[i64]] = &[&[2, 17], &[2, 17]];
    let compared = [
        Binary::Eq,
        Binary::Ne,
        Binary::Lt,
        Binary::Le,
        Binary::Gt,
        Binary::Ge,
        Binary::And,
        Binary::Or,
        Binary::Xor,
    ];
    let index = |d: &str| Expr::Index(SymExpr::symbol(d));
    let uniform = Expr::Uniform(Expr::int(7).into(), index("i1").into());
    let tested = |f: Unary| Expr::unary(f, Expr::In(0)).cast(DType::F32);
    let integers = |f: Binary| Expr::binary(f, Expr::In(0), Expr::In(1));
    let signed = Tensor::from_i64(DType::I64, &[6], vec![-7, -6, -1, 0, 5, 7]);
    let named = |(name, expr): (&str, Expr)| of(name, &[&[2, 17]], expr).range(-4.0, 4.0);
    let divisors = Tensor::from_i64(DType::I64, &[6], vec![3, -4, 2, 5, -3, 7]);
    let amounts = Tensor::from_i64(DType::I64, &[6], vec![3, 70, 2, 0, -1, 62]);
    let bits = integers(Binary::BitAnd)
        .add(integers(Binary::BitOr).mul(Expr::int(100)))
        .sub(integers(Binary::BitXor).mul(Expr::int(10_000)))
        .add(integers(Binary::Shl))
        .add(integers(Binary::Shr).mul(Expr::int(1_000_000)));
    let difference = Expr::In(0).sub(Expr::In(1));
    let whole = integers(Binary::FloorDiv).mul(Expr::int(100));
    let mut samples: Vec<Sample> = activations().into_iter().map(named).collect();
    samples.extend([
        of(
            "x·tanh(y) with y broadcast",
            &[&[2, 3, 4], &[3, 1]],
            Expr::In(0).mul(Expr::In(1).tanh()),
        ),
        of(
            "a row and a column",
            &[&[4, 1], &[3]],
            Expr::In(0).div(Expr::In(1)),
        )
        .range(0.5, 2.0),
        unary(
            "functions of any number",
            &[
                Neg, Abs, Exp, Expm1, Sin, Cos, Tanh, Erf, Sigmoid, Atan, Sinh, Cosh, Asinh,
            ],
            -3.0,
            3.0,
        ),
        unary(
            "functions of positive numbers",
            &[Log, Log1p, Sqrt, Rsqrt, Recip],
            0.3,
            3.0,
        ),
        unary(
            "functions of small numbers",
            &[Tan, Asin, Acos, Atanh],
            -0.9,
            0.9,
        ),
        unary("functions of numbers above 1", &[Acosh], 1.2, 3.0),
        unary("steps", &[Floor, Ceil, Round, Trunc, Sign], -3.0, 3.0),
        of("tests", &[&[9]], tested(Not).add(tested(IsNan))).not_differentiable(),
        of(
            "binary functions",
            two,
            binary(&[
                Binary::Add,
                Binary::Sub,
                Binary::Mul,
                Binary::Div,
                Binary::Mod,
                Binary::FloorDiv,
                Binary::Pow,
                Binary::Min,
                Binary::Max,
                Binary::Atan2,
            ]),
        )
        .range(0.3, 3.0),
        of("comparisons", two, binary(&compared)).not_differentiable(),
        of("integer division", &[], whole.add(integers(Binary::Mod)))
            .value(0, signed.clone())
            .value(1, divisors)
            .not_differentiable(),
        of("bits of integers", &[], bits)
            .value(0, signed)
            .value(1, amounts)
            .not_differentiable(),
        of(
            "a choice by position and chance",
            &[&[2, 17]],
            Expr::select(
                index("i0").lt(Expr::int(1)),
                Expr::In(0).mul(uniform),
                Expr::In(0).mul(index("i1")),
            ),
        ),
        of(
            "rounded on the way",
            &[&[9]],
            Expr::In(0).cast(DType::I32).cast(DType::F32),
        ),
        of(
            "squared difference",
            two,
            difference.clone().mul(difference),
        ),
    ]);
    samples
}

/// Every activation, over its kinks.
fn activations() -> Vec<(&'static str, Expr)> {
    use crate::activations::*;
    let x = || Expr::In(0);
    vec![
        ("relu", relu(x())),
        ("hardtanh", hardtanh(x(), -0.5, 2.0)),
        ("hardsigmoid", hardsigmoid(x(), 1.0 / 6.0, 0.5)),
        ("hardswish", hardswish(x())),
        ("leaky_relu", leaky_relu(x(), Expr::float(0.2))),
        ("elu", elu(x(), 1.5, 0.7, 1.0)),
        ("celu", elu(x(), 1.0, 0.6, 1.0 / 0.6)),
        ("selu", selu(x())),
        ("softplus", softplus(x())),
        ("log_sigmoid", log_sigmoid(x())),
        ("silu", silu(x())),
        ("mish", mish(x())),
        ("gelu", gelu(x())),
        ("gelu by tanh", gelu_tanh(x())),
    ]
}

/// The expression over only the inputs it mentions, and those inputs.
fn keep_used(expr: &Expr, ids: &[graph::ContainerId]) -> (Expr, Vec<graph::ContainerId>) {
    let used = expr.inputs();
    let renamed = expr.map_leaves(&|leaf| match leaf {
        Expr::In(i) => used.iter().position(|u| u == i).map(Expr::In),
        _ => None,
    });
    (renamed, used.iter().map(|i| ids[*i]).collect())
}
