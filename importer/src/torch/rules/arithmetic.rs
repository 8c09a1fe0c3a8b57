//! Functions of several values with broadcasting and PyTorch's type promotion.
//!
//! PyTorch converts operands before it computes; where the document's result type differs from an
//! operand's, the conversion is written into the expression.

use super::Table;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site};
use graph::{Attr, Binary, ContainerId, DType, Expr, Scalar, Unary};
use ops::attrs;
use ops::elementwise::gradient_attr;

pub(super) const RULES: Table = &[
    ("aten.add.Tensor", |s| scaled(s, Binary::Add)),
    ("aten.add.Scalar", |s| scaled(s, Binary::Add)),
    ("aten.sub.Tensor", |s| scaled(s, Binary::Sub)),
    ("aten.sub.Scalar", |s| scaled(s, Binary::Sub)),
    ("aten.rsub.Tensor", reversed_sub),
    ("aten.rsub.Scalar", reversed_sub),
    ("aten.mul.Tensor", |s| binary(s, Binary::Mul)),
    ("aten.mul.Scalar", |s| binary(s, Binary::Mul)),
    ("aten.div.Tensor", |s| binary(s, Binary::Div)),
    ("aten.div.Scalar", |s| binary(s, Binary::Div)),
    ("aten.div.Tensor_mode", div_mode),
    ("aten.div.Scalar_mode", div_mode),
    ("aten.true_divide.Tensor", |s| binary(s, Binary::Div)),
    ("aten.floor_divide.default", floor_divide),
    ("aten.remainder.Tensor", remainder),
    ("aten.remainder.Scalar", remainder),
    ("aten.remainder.Scalar_Tensor", remainder),
    ("aten.fmod.Tensor", rest_of_division),
    ("aten.fmod.Scalar", rest_of_division),
    ("aten.clamp.Tensor", clamp_between),
    ("aten.clamp_min.Tensor", clamp_between),
    ("aten.clamp_max.Tensor", clamp_between),
    ("aten.pow.Tensor_Tensor", |s| {
        binary_named(s, Binary::Pow, "exponent")
    }),
    ("aten.pow.Tensor_Scalar", pow_scalar),
    ("aten.pow.Scalar", |s| {
        binary_named(s, Binary::Pow, "exponent")
    }),
    ("aten.maximum.default", |s| binary(s, Binary::Max)),
    ("aten.minimum.default", |s| binary(s, Binary::Min)),
    ("aten.max.other", |s| binary(s, Binary::Max)),
    ("aten.min.other", |s| binary(s, Binary::Min)),
    ("aten.atan2.default", |s| binary(s, Binary::Atan2)),
    ("aten.eq.Tensor", |s| binary(s, Binary::Eq)),
    ("aten.eq.Scalar", |s| binary(s, Binary::Eq)),
    ("aten.ne.Tensor", |s| binary(s, Binary::Ne)),
    ("aten.ne.Scalar", |s| binary(s, Binary::Ne)),
    ("aten.lt.Tensor", |s| binary(s, Binary::Lt)),
    ("aten.lt.Scalar", |s| binary(s, Binary::Lt)),
    ("aten.le.Tensor", |s| binary(s, Binary::Le)),
    ("aten.le.Scalar", |s| binary(s, Binary::Le)),
    ("aten.gt.Tensor", |s| binary(s, Binary::Gt)),
    ("aten.gt.Scalar", |s| binary(s, Binary::Gt)),
    ("aten.ge.Tensor", |s| binary(s, Binary::Ge)),
    ("aten.ge.Scalar", |s| binary(s, Binary::Ge)),
    ("aten.logical_and.default", |s| binary(s, Binary::And)),
    ("aten.logical_or.default", |s| binary(s, Binary::Or)),
    ("aten.logical_xor.default", |s| binary(s, Binary::Xor)),
    ("aten.bitwise_and.Tensor", bitwise_and),
    ("aten.bitwise_and.Scalar", bitwise_and),
    ("aten.bitwise_and.Scalar_Tensor", bitwise_and),
    ("aten.bitwise_or.Tensor", bitwise_or),
    ("aten.bitwise_or.Scalar", bitwise_or),
    ("aten.bitwise_or.Scalar_Tensor", bitwise_or),
    ("aten.bitwise_xor.Tensor", bitwise_xor),
    ("aten.bitwise_xor.Scalar", bitwise_xor),
    ("aten.bitwise_xor.Scalar_Tensor", bitwise_xor),
    ("aten.__and__.Tensor", bitwise_and),
    ("aten.__or__.Tensor", bitwise_or),
    ("aten.__xor__.Tensor", bitwise_xor),
    ("aten.bitwise_left_shift.Tensor", |s| shift(s, Binary::Shl)),
    ("aten.bitwise_left_shift.Tensor_Scalar", |s| {
        shift(s, Binary::Shl)
    }),
    ("aten.bitwise_left_shift.Scalar_Tensor", |s| {
        shift(s, Binary::Shl)
    }),
    ("aten.__lshift__.Tensor", |s| shift(s, Binary::Shl)),
    ("aten.__lshift__.Scalar", |s| shift(s, Binary::Shl)),
    ("aten.bitwise_right_shift.Tensor", |s| shift(s, Binary::Shr)),
    ("aten.bitwise_right_shift.Tensor_Scalar", |s| {
        shift(s, Binary::Shr)
    }),
    ("aten.bitwise_right_shift.Scalar_Tensor", |s| {
        shift(s, Binary::Shr)
    }),
    ("aten.__rshift__.Tensor", |s| shift(s, Binary::Shr)),
    ("aten.__rshift__.Scalar", |s| shift(s, Binary::Shr)),
    ("aten.where.self", choose),
    ("aten.where.ScalarOther", choose),
    ("aten.where.ScalarSelf", choose),
    ("aten.masked_fill.Scalar", masked_fill),
    ("aten.masked_fill.Tensor", masked_fill),
    ("aten.lerp.Scalar", lerp),
    ("aten.lerp.Tensor", lerp),
    ("aten.addcmul.default", |s| add_combined(s, Binary::Mul)),
    ("aten.addcdiv.default", |s| add_combined(s, Binary::Div)),
    ("aten.clone.default", same),
    ("aten.contiguous.default", same),
    ("aten.alias.default", same),
    ("aten.detach.default", |s| {
        let x = s.subject()?;
        Ok(vec![Some(s.op1(
            "stop_gradient",
            &[x],
            graph::Attrs::new(),
        )?)])
    }),
    ("shorthaul.straight_through.default", |s| {
        let operands = [s.tensor("y")?, s.tensor("v")?];
        Ok(vec![Some(s.op1(
            "straight_through",
            &operands,
            graph::Attrs::new(),
        )?)])
    }),
    ("aten.lift_fresh_copy.default", same),
    ("aten.positive.default", same),
    ("aten.copy.default", copy),
    ("aten._to_copy.default", convert),
    ("aten.to.dtype", convert),
    ("aten.to.dtype_layout", convert),
    ("aten.to.device", convert),
    ("aten.to.other", convert),
    ("aten.type_as.default", convert),
    ("aten._conj.default", same),
];

/// Operands of an element-wise call: tensors by position, each named argument an expression.
pub(super) struct Operands<'s, 'a, 'g> {
    site: &'s mut Site<'a, 'g>,
    inputs: Vec<ContainerId>,
    /// The type operands are converted to before computing.
    compute: DType,
}

impl<'s, 'a, 'g> Operands<'s, 'a, 'g> {
    /// The operands of a call that computes in `compute`.
    pub(super) fn new(site: &'s mut Site<'a, 'g>, compute: DType) -> Self {
        Operands {
            site,
            inputs: Vec::new(),
            compute,
        }
    }

    /// An argument, a tensor or a number, as an expression of the computing type.
    pub(super) fn get(&mut self, name: &str) -> Result<Expr, RuleError> {
        if !self.site.is_tensor(name) {
            let number = self.site.scalar(name)?;
            return Ok(match number {
                Expr::Const(n @ (Scalar::Float(_) | Scalar::Int(_))) if self.compute.is_int() => {
                    Expr::Const(n.cast(self.compute))
                }
                number => number,
            });
        }
        let id = self.site.tensor(name)?;
        let dtype = self.site.builder.dtype(id);
        let value = self.raw(id);
        Ok(if dtype == self.compute {
            value
        } else {
            value.cast(self.compute)
        })
    }

    /// A tensor as it is.
    fn raw(&mut self, id: ContainerId) -> Expr {
        let known = self.inputs.iter().position(|i| *i == id);
        Expr::In(known.unwrap_or_else(|| {
            self.inputs.push(id);
            self.inputs.len() - 1
        }))
    }

    pub(super) fn finish(self, expr: Expr) -> Results {
        let dtype = self.site.out_dtype(0);
        let made = self.site.elementwise(expr, &self.inputs, dtype)?;
        // A single result shape may be wider than its operands' (a condition of lower rank).
        Ok(vec![Some(made)])
    }

    /// The incoming gradient in the gradients of [`Operands::finish_with`], once all operands are known.
    pub(super) fn incoming(&self) -> Expr {
        Expr::In(self.inputs.len())
    }

    /// `expr`, with a gradient for each operand as [`Operands::get`] gave it.
    pub(super) fn finish_with(
        self,
        expr: Expr,
        gradients: impl IntoIterator<Item = (Expr, Expr)>,
    ) -> Results {
        let dtype = self.site.out_dtype(0);
        let gradients: Vec<(Expr, Expr)> = gradients.into_iter().collect();
        let mut a = attrs([("expr", Attr::Expr(expr)), ("dtype", Attr::DType(dtype))]);
        if dtype.is_float() {
            for position in 0..self.inputs.len() {
                // A tensor may be both operands.
                let parts = gradients.iter().filter(|(e, _)| e.inputs() == [position]);
                if let Some(gradient) = parts.map(|(_, g)| g.clone()).reduce(Expr::add) {
                    a.insert(gradient_attr(position), Attr::Expr(gradient));
                }
            }
        }
        Ok(vec![Some(self.site.op1("elementwise", &self.inputs, a)?)])
    }
}

/// The type in which a call with these operands computes: the result's, or for comparisons the
/// operands' common one. Tensors without dimensions and numbers only decide between kinds.
fn common_type(s: &Site, names: &[&str]) -> DType {
    let out = s.out_dtype(0);
    if out != DType::Bool {
        return out;
    }
    let mut with_dims: Option<DType> = None;
    let mut scalars: Option<DType> = None;
    let mut has_real_number = false;
    for name in names {
        if let Ok(id) = s.tensor(name) {
            let (dtype, rank) = (s.builder.dtype(id), s.rank(id));
            let slot = if rank > 0 {
                &mut with_dims
            } else {
                &mut scalars
            };
            *slot = Some(slot.map_or(dtype, |d| d.promote(dtype)));
        } else {
            has_real_number |= matches!(s.scalar(name), Ok(Expr::Const(graph::Scalar::Float(_))));
        }
    }
    let dtype = match (with_dims, scalars) {
        (Some(d), Some(c)) if c.is_float() && !d.is_float() => c,
        (Some(DType::Bool), Some(c)) => c,
        (Some(d), _) | (None, Some(d)) => d,
        (None, None) => DType::F32,
    };
    if has_real_number && !dtype.is_float() {
        DType::F32
    } else {
        dtype
    }
}

fn binary(s: &mut Site, f: Binary) -> Results {
    binary_named(s, f, "other")
}

fn binary_named(s: &mut Site, f: Binary, other: &str) -> Results {
    let compute = common_type(s, &["self", other]);
    let mut operands = Operands::new(s, compute);
    let (a, b) = (operands.get("self")?, operands.get(other)?);
    let met = |e: Expr| match f {
        // In 16 bits, sums, products and quotients take a number as it is.
        Binary::Add | Binary::Sub | Binary::Mul | Binary::Div => e,
        _ => in_type(e, compute),
    };
    operands.finish(Expr::binary(f, met(a), met(b)))
}

/// A number rounded to `dtype`, as PyTorch rounds one that a tensor of this type is compared with or divided by for the
/// remainder.
fn in_type(e: Expr, dtype: DType) -> Expr {
    match e {
        Expr::Const(n @ (Scalar::Float(_) | Scalar::Int(_))) if dtype.is_float() => {
            Expr::Const(n.cast(dtype))
        }
        Expr::Index(_) if dtype.arithmetic() != dtype => e.cast(dtype),
        e => e,
    }
}

/// `self ∘ alpha·other`.
fn scaled(s: &mut Site, f: Binary) -> Results {
    let dtype = s.out_dtype(0);
    let mut operands = Operands::new(s, dtype);
    let (a, b) = (operands.get("self")?, operands.get("other")?);
    let alpha = operands.site.float_or("alpha", 1.0)?;
    if dtype == DType::Bool && f == Binary::Add {
        return operands.finish(match alpha == 0.0 {
            true => a,
            false => Expr::binary(Binary::Or, a, b),
        });
    }
    let b = match alpha == 1.0 {
        true => b,
        false => operands.site.scalar("alpha")?.mul(b),
    };
    operands.finish(Expr::binary(f, a, b))
}

fn reversed_sub(s: &mut Site) -> Results {
    let dtype = s.out_dtype(0);
    let mut operands = Operands::new(s, dtype);
    let (a, b) = (operands.get("self")?, operands.get("other")?);
    let a = match operands.site.float_or("alpha", 1.0)? == 1.0 {
        true => a,
        false => operands.site.scalar("alpha")?.mul(a),
    };
    operands.finish(b.sub(a))
}

fn div_mode(s: &mut Site) -> Results {
    match s.text_or("rounding_mode", "")?.as_str() {
        "floor" => floor_divide(s),
        "trunc" => {
            let dtype = s.out_dtype(0);
            let mut operands = Operands::new(s, dtype);
            let (a, b) = (operands.get("self")?, operands.get("other")?);
            if dtype.is_float() {
                return operands.finish(Expr::unary(Unary::Trunc, a.div(b)));
            }
            // Integers: the floor, and one more where it lies below an inexact quotient that is negative.
            let floor = Expr::binary(Binary::FloorDiv, a.clone(), b.clone());
            let rest = a.sub(floor.clone().mul(b.clone()));
            let zero = || Expr::int(0);
            let negative = Expr::binary(Binary::Lt, floor.clone(), zero());
            let inexact = Expr::binary(Binary::Ne, rest, zero());
            let more = Expr::select(
                Expr::binary(Binary::And, negative, inexact),
                Expr::int(1),
                zero(),
            );
            operands.finish(floor.add(more))
        }
        _ => binary(s, Binary::Div),
    }
}

/// Powers with an exponent known now: small ones as products, which are exact and cheap.
fn pow_scalar(s: &mut Site) -> Results {
    let exponent = s.float("exponent")?;
    let dtype = s.out_dtype(0);
    let mut operands = Operands::new(s, dtype);
    let x = operands.get("self")?;
    let expr = match exponent {
        1.0 => x,
        2.0 => x.clone().mul(x),
        3.0 => x.clone().mul(x.clone()).mul(x),
        0.5 => x.sqrt(),
        -0.5 => x.rsqrt(),
        -1.0 => x.recip(),
        whole if !dtype.is_float() && whole == whole.trunc() => {
            Expr::binary(Binary::Pow, x, Expr::int(whole as i64))
        }
        _ => Expr::binary(Binary::Pow, x, in_type(Expr::float(exponent), dtype)),
    };
    operands.finish(expr)
}

fn bitwise_and(s: &mut Site) -> Results {
    bitwise(s, Binary::And, Binary::BitAnd)
}

fn bitwise_or(s: &mut Site) -> Results {
    bitwise(s, Binary::Or, Binary::BitOr)
}

fn bitwise_xor(s: &mut Site) -> Results {
    bitwise(s, Binary::Xor, Binary::BitXor)
}

/// `logic` of truth values, or `bits` of integers.
fn bitwise(s: &mut Site, logic: Binary, bits: Binary) -> Results {
    match s.out_dtype(0) {
        DType::Bool => binary(s, logic),
        dtype if dtype.is_int() => binary(s, bits),
        dtype => Err(s.unsupported(format!("of {dtype}"))),
    }
}

/// A shift of integers. PyTorch computes those of real numbers as products.
fn shift(s: &mut Site, f: Binary) -> Results {
    let dtype = s.out_dtype(0);
    if !dtype.is_int() {
        return Err(s.unsupported(format!("of {dtype}")));
    }
    let mut operands = Operands::new(s, dtype);
    let (a, b) = (operands.get("self")?, operands.get("other")?);
    // As `i64`, so that the last cast cuts off the bits that the type does not have.
    let moved = Expr::binary(f, a.cast(DType::I64), b.cast(DType::I64));
    operands.finish(moved.cast(dtype))
}

/// The remainder with the sign of `x`: exact, which `x − y·trunc(x / y)` is not.
fn rest_of(a: Expr, b: Expr, dtype: DType) -> Expr {
    let zero = || Expr::int(0).cast(dtype);
    if !dtype.is_float() {
        // The smallest integer has no absolute value.
        let rest = Expr::binary(Binary::Mod, a.clone(), b.clone());
        let differ = Expr::binary(Binary::Xor, a.lt(zero()), rest.clone().lt(zero()));
        let is_other = Expr::binary(Binary::Ne, rest.clone(), zero()).and(differ);
        return Expr::select(is_other, rest.clone().sub(b), rest);
    }
    let size = Expr::binary(Binary::Mod, a.clone().abs(), b.abs());
    // The difference from a zero is that zero, with its sign, or NaN.
    let from_zero = a.clone().sub(size.clone());
    let positive = Expr::select(a.clone().eq_(zero()), from_zero, size.clone());
    Expr::select(a.lt(zero()), size.neg(), positive)
}

/// `⌊a / b⌋` of the exact quotient, which the floor of the rounded one is not: 1 // 0.1 is 9.
fn floor_of_quotient(a: Expr, b: Expr, dtype: DType) -> Expr {
    if !dtype.is_float() {
        return Expr::binary(Binary::FloorDiv, a, b);
    }
    let zero = || Expr::float(0.0);
    let rest = rest_of(a.clone(), b.clone(), dtype);
    let whole = a.clone().sub(rest.clone()).div(b.clone());
    let differ = Expr::binary(Binary::Xor, rest.clone().lt(zero()), b.clone().lt(zero()));
    let is_below = Expr::binary(Binary::Ne, rest, zero()).and(differ);
    let less = Expr::select(is_below, Expr::float(1.0), zero());
    let floor = Expr::unary(Unary::Round, whole.sub(less));
    // A zero has the sign of the quotient, half of which is less than 1 here.
    let zero_of_quotient = a.clone().div(b.clone()).mul(Expr::float(0.5));
    let floor = Expr::select(
        floor.clone().eq_(zero()),
        Expr::unary(Unary::Trunc, zero_of_quotient),
        floor,
    );
    Expr::select(
        b.clone().eq_(zero()),
        Expr::unary(Unary::Round, a.div(b)),
        floor,
    )
}

fn floor_divide(s: &mut Site) -> Results {
    let dtype = common_type(s, &["self", "other"]);
    let mut operands = Operands::new(s, dtype);
    let (a, b) = (operands.get("self")?, operands.get("other")?);
    operands.finish(floor_of_quotient(a, b, dtype))
}

/// Sign of `x`; gradients 1 and `−trunc(x / y)`.
fn rest_of_division(s: &mut Site) -> Results {
    let dtype = s.out_dtype(0);
    let mut operands = Operands::new(s, dtype);
    let (a, b) = (operands.get("self")?, operands.get("other")?);
    let (a, b) = (in_type(a, dtype), in_type(b, dtype));
    let value = rest_of(a.clone(), b.clone(), dtype);
    let dy = operands.incoming();
    let quotient = Expr::unary(Unary::Trunc, a.clone().div(b.clone()));
    let gradients = [(a, dy.clone()), (b, dy.mul(quotient).neg())];
    operands.finish_with(value, gradients)
}

/// Sign of `y`; gradients 1 and `−⌊x / y⌋`.
fn remainder(s: &mut Site) -> Results {
    let dtype = s.out_dtype(0);
    let mut operands = Operands::new(s, dtype);
    let (a, b) = (operands.get("self")?, operands.get("other")?);
    let (a, b) = (in_type(a, dtype), in_type(b, dtype));
    let value = Expr::binary(Binary::Mod, a.clone(), b.clone());
    let dy = operands.incoming();
    let quotient = floor_of_quotient(a.clone(), b.clone(), dtype);
    let gradients = [(a, dy.clone()), (b, dy.mul(quotient).neg())];
    operands.finish_with(value, gradients)
}

/// Clamps between tensors, either of which may be missing.
fn clamp_between(s: &mut Site) -> Results {
    let dtype = s.out_dtype(0);
    let mut operands = Operands::new(s, dtype);
    let value = operands.get("self")?;
    let (has_min, has_max) = (operands.site.has("min"), operands.site.has("max"));
    let value = match (has_min, has_max) {
        (true, true) => {
            let bounds = (operands.get("min")?, operands.get("max")?);
            return clamp_between_both(operands, value, bounds);
        }
        (true, false) => Expr::binary(Binary::Max, value, operands.get("min")?),
        (false, true) => Expr::binary(Binary::Min, value, operands.get("max")?),
        (false, false) => value,
    };
    operands.finish(value)
}

/// `min(max(x, low), high)`. The gradient goes to `high` if `x` lies above it or the bounds cross, to
/// `low` if `x` lies below it, else to `x`, which shares it evenly with a bound that it equals.
fn clamp_between_both(operands: Operands, x: Expr, (low, high): (Expr, Expr)) -> Results {
    let dy = operands.incoming();
    let test = |f, a: &Expr, b: &Expr| Expr::binary(f, a.clone(), b.clone());
    let choose = |test, a: &Expr, b: &Expr| Expr::select(test, a.clone(), b.clone());
    let (half, zero) = (dy.clone().mul(Expr::float(0.5)), Expr::float(0.0));
    let (below, above) = (test(Binary::Lt, &x, &low), test(Binary::Gt, &x, &high));
    let is_apart = test(Binary::Lt, &low, &high);
    let is_low = test(Binary::Eq, &x, &low).and(is_apart.clone());
    let is_high = test(Binary::Eq, &x, &high).and(is_apart);
    // False, as every comparison, where a bound is NaN.
    let is_ordered = test(Binary::Le, &low, &high);
    let is_crossing = test(Binary::Gt, &low, &high);
    let takes_low = below.clone().and(is_ordered.clone());
    let takes_high = above.clone().and(is_ordered).or(is_crossing);
    let by_low = choose(takes_low, &dy, &choose(is_low.clone(), &half, &zero));
    let by_high = choose(takes_high, &dy, &choose(is_high.clone(), &half, &zero));
    let shared = choose(is_low.or(is_high), &half, &dy);
    let by_x = choose(below.or(above), &zero, &shared);
    let at_least = Expr::binary(Binary::Max, x.clone(), low.clone());
    let value = Expr::binary(Binary::Min, at_least, high.clone());
    operands.finish_with(value, [(x, by_x), (low, by_low), (high, by_high)])
}

fn choose(s: &mut Site) -> Results {
    let dtype = s.out_dtype(0);
    let condition = s.tensor("condition")?;
    let mut operands = Operands::new(s, dtype);
    let condition = operands.raw(condition);
    let (a, b) = (operands.get("self")?, operands.get("other")?);
    operands.finish(Expr::select(condition, a, b))
}

fn masked_fill(s: &mut Site) -> Results {
    let dtype = s.out_dtype(0);
    let mask = s.tensor("mask")?;
    let mut operands = Operands::new(s, dtype);
    let mask = operands.raw(mask);
    let (x, value) = (operands.get("self")?, operands.get("value")?);
    operands.finish(Expr::select(mask, value, x))
}

/// Interpolates from the nearer end, as PyTorch does: infinite ends would give NaN in other places otherwise.
fn lerp(s: &mut Site) -> Results {
    let dtype = s.out_dtype(0);
    let mut operands = Operands::new(s, dtype);
    let (a, b) = (operands.get("self")?, operands.get("end")?);
    let weight = operands.get("weight")?;
    let way = b.clone().sub(a.clone());
    let from_start = a.add(weight.clone().mul(way.clone()));
    let from_end = b.sub(way.mul(Expr::float(1.0).sub(weight.clone())));
    let half = Expr::float(0.5);
    operands.finish(match weight.as_number() {
        Some(number) if number.abs() < 0.5 => from_start,
        Some(_) => from_end,
        None => Expr::select(weight.abs().lt(half), from_start, from_end),
    })
}

/// `self + value · (tensor1 ∘ tensor2)`.
fn add_combined(s: &mut Site, f: Binary) -> Results {
    let dtype = s.out_dtype(0);
    let mut operands = Operands::new(s, dtype);
    let (x, a, b) = (
        operands.get("self")?,
        operands.get("tensor1")?,
        operands.get("tensor2")?,
    );
    let value = operands.site.factor("value", dtype)?;
    // In this order, so that it overflows where PyTorch's does.
    let a = match value.as_number() {
        Some(1.0) => a,
        _ => value.mul(a),
    };
    operands.finish(x.add(Expr::binary(f, a, b)))
}

/// The value itself: memory formats and copies mean nothing here.
fn same(s: &mut Site) -> Results {
    Ok(vec![Some(s.subject()?)])
}

fn convert(s: &mut Site) -> Results {
    let (x, dtype) = (s.subject()?, s.out_dtype(0));
    Ok(vec![Some(s.cast(x, dtype)?)])
}

/// `src` broadcast into the place of `self`.
fn copy(s: &mut Site) -> Results {
    let (src, dtype, shape) = (s.tensor("src")?, s.out_dtype(0), s.out_shape(0));
    let converted = s.cast(src, dtype)?;
    Ok(vec![Some(s.expand(converted, shape)?)])
}
