//! Operators that work element by element on several operands, with broadcasting: arithmetic,
//! comparisons, logic, bits, Where.

use super::strided::{View, taken, zipped};
use super::symbolic;
use super::{Call, Inference, Operator, Symbolic, broadcast};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::{Item, Tensor, Values};
use graph::SymExpr;
use std::sync::Arc;

use Symbolic::Pointwise;

pub const ROWS: &[Operator] = &[
    Operator::new("Add", infer_broadcast, |c| two(c, add)).symbolic(Pointwise(symbolic::add)),
    Operator::new("Sub", infer_broadcast, |c| two(c, sub)).symbolic(Pointwise(symbolic::sub)),
    Operator::new("Mul", infer_broadcast, |c| two(c, mul)).symbolic(Pointwise(symbolic::mul)),
    Operator::new("Div", infer_broadcast, |c| two(c, div)).symbolic(Pointwise(symbolic::div)),
    Operator::new("Mod", infer_broadcast, modulo).symbolic(Pointwise(symbolic::modulo)),
    Operator::new("Pow", infer_broadcast, |c| two(c, super::power::pow)),
    Operator::new("PRelu", infer_broadcast, |c| two(c, prelu)),
    Operator::new("Min", infer_broadcast, |c| many(c, min)).symbolic(Pointwise(symbolic::min)),
    Operator::new("Max", infer_broadcast, |c| many(c, max)).symbolic(Pointwise(symbolic::max)),
    Operator::new("Sum", infer_broadcast, |c| many(c, add)).symbolic(Pointwise(symbolic::add)),
    Operator::new("Mean", infer_broadcast, mean),
    Operator::new("Equal", infer_truth, |c| two(c, equal)).symbolic(Pointwise(symbolic::equal)),
    Operator::new("Less", infer_truth, |c| two(c, less)).symbolic(Pointwise(symbolic::less)),
    Operator::new("LessOrEqual", infer_truth, |c| two(c, less_or_equal))
        .symbolic(Pointwise(symbolic::less_or_equal)),
    Operator::new("Greater", infer_truth, |c| two(c, greater))
        .symbolic(Pointwise(symbolic::greater)),
    Operator::new("GreaterOrEqual", infer_truth, |c| two(c, greater_or_equal))
        .symbolic(Pointwise(symbolic::greater_or_equal)),
    Operator::new("And", infer_truth, |c| two(c, and)).symbolic(Pointwise(symbolic::and)),
    Operator::new("Or", infer_truth, |c| two(c, or)).symbolic(Pointwise(symbolic::or)),
    Operator::new("Xor", infer_truth, |c| two(c, xor)),
    Operator::new("BitwiseAnd", infer_broadcast, |c| two(c, bit_and)),
    Operator::new("BitwiseOr", infer_broadcast, |c| two(c, bit_or)),
    Operator::new("BitwiseXor", infer_broadcast, |c| two(c, bit_xor)),
    Operator::new("BitShift", infer_broadcast, shift),
    Operator::new("Where", infer_where, choose).symbolic(Pointwise(symbolic::choose)),
];

/// Sizes the inputs broadcast to.
fn broadcast_shape(cx: &Inference) -> Option<Vec<SymExpr>> {
    let shapes: Option<Vec<&[SymExpr]>> = (0..cx.inputs.len()).map(|n| cx.shape(n)).collect();
    broadcast(&shapes?, cx.unknowns)
}

/// The type of the first input, sizes broadcast.
pub fn infer_broadcast(cx: &Inference) -> Option<Vec<Fact>> {
    cx.like_first(broadcast_shape(cx))
}

fn infer_truth(cx: &Inference) -> Option<Vec<Fact>> {
    Some(vec![Fact::new(Some(Element::Bool), broadcast_shape(cx))])
}

fn infer_where(cx: &Inference) -> Option<Vec<Fact>> {
    let element = cx.element(1).or(cx.element(2));
    Some(vec![Fact::new(element, broadcast_shape(cx))])
}

/// Sizes two tensors broadcast to.
///
/// # Errors
/// They do not fit.
pub fn joined(a: &[usize], b: &[usize]) -> Result<Vec<usize>, String> {
    if a == b {
        return Ok(a.to_vec());
    }
    let rank = a.len().max(b.len());
    let at = |s: &[usize], d: usize| (d + s.len()).checked_sub(rank).map_or(1, |i| s[i]);
    let size = |d: usize| match (at(a, d), at(b, d)) {
        (x, y) if x == y || y == 1 => Ok(x),
        (1, y) => Ok(y),
        _ => Err(format!("{a:?} and {b:?} do not broadcast")),
    };
    let shape: Vec<usize> = (0..rank).map(size).collect::<Result<_, _>>()?;
    crate::tensor::room(&shape)?;
    Ok(shape)
}

/// `f` of two operands' elements with broadcasting.
pub fn zip<A: Copy + Item, B: Copy + Item, R: Item>(
    a: &Tensor,
    b: &Tensor,
    f: impl Fn(A, B) -> R,
) -> Result<Values, String> {
    let shape = joined(&a.shape, &b.shape)?;
    let (Some(x), Some(y)) = (A::of(&a.values), B::of(&b.values)) else {
        return Err(mismatch(a, b));
    };
    Ok(R::wrap(zipped((x, &a.shape), (y, &b.shape), &shape, f)))
}

fn mismatch(a: &Tensor, b: &Tensor) -> String {
    format!("it is not defined on {} and {}", a.element(), b.element())
}

type Binary = fn(&Tensor, &Tensor) -> Result<Values, String>;

/// Calls `zip` with a function of two elements of the type of `$a`. Halves are computed in `f32` and
/// integers of up to 32 bits in `i64`, then brought back, so that few types are compiled. The arms that
/// are not given are errors.
macro_rules! zip_types {
    ($a:ident, $b:ident, |$x:ident, $y:ident| $(float $f:expr;)? $(int $i:expr;)? $(bool $t:expr;)?) => {
        match $a.element() {
            _ if $a.element() != $b.element() => Err(mismatch($a, $b)),
            $(
                Element::F32 => zip($a, $b, |$x: f32, $y: f32| $f),
                Element::F64 => zip($a, $b, |$x: f64, $y: f64| $f),
                Element::F16 | Element::BF16 => {
                    let wide = zip(&single($a), &single($b), |$x: f32, $y: f32| $f);
                    wide.map(|values| narrowed($a, values))
                }
            )?
            $(
                Element::I64 => zip($a, $b, |$x: i64, $y: i64| $i),
                Element::U64 => zip($a, $b, |$x: u64, $y: u64| $i),
                element if element.is_int() => {
                    let wide = zip(&long($a), &long($b), |$x: i64, $y: i64| $i);
                    wide.map(|values| narrowed($a, values))
                }
            )?
            $(Element::Bool => zip($a, $b, |$x: bool, $y: bool| $t),)?
            _ => Err(mismatch($a, $b)),
        }
    };
}

/// Numbers as `f32`.
pub fn single(x: &Tensor) -> Tensor {
    let values = x.to_f64().unwrap_or_default();
    Tensor::new(
        &x.shape,
        Values::F32(values.iter().map(|x| *x as f32).collect()),
    )
}

/// Integers as `i64`.
pub fn long(x: &Tensor) -> Tensor {
    Tensor::new(&x.shape, Values::I64(x.to_i64().unwrap_or_default()))
}

/// Numbers in the type of `like`, integers wrapping; truth values as they are.
pub fn narrowed(like: &Tensor, values: Values) -> Values {
    let n = [values.len()];
    let narrow = match &values {
        Values::I64(v) => Tensor::of_ints(like.element(), &n, v),
        Values::F32(v) => {
            let wide: Vec<f64> = v.iter().map(|x| f64::from(*x)).collect();
            Tensor::floats(like.element(), &n, &wide)
        }
        _ => None,
    };
    narrow.map_or(values, |t| Arc::unwrap_or_clone(t.values))
}

fn add(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y| float x + y; int x.wrapping_add(y);)
}

fn sub(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y| float x - y; int x.wrapping_sub(y);)
}

fn mul(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y| float x * y; int x.wrapping_mul(y);)
}

fn div(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    refuse_zero(b)?;
    zip_types!(a, b, |x, y| float x / y; int x.wrapping_div(y);)
}

/// Integers are not divided by zero.
fn refuse_zero(b: &Tensor) -> Result<(), String> {
    match b.element().is_int() && b.to_i64().is_some_and(|v| v.contains(&0)) {
        true => Err("it divides an integer by zero".to_string()),
        false => Ok(()),
    }
}

fn modulo(call: &Call) -> Result<Vec<Tensor>, String> {
    refuse_zero(call.input(1)?)?;
    if call.attributes.flag("fmod") {
        two(
            call,
            |a, b| zip_types!(a, b, |x, y| float x % y; int x.wrapping_rem(y);),
        )
    } else {
        two(call, |a, b| {
            // With the sign of the divisor.
            zip_types!(a, b, |x, y|
                float {
                    let r = x % y;
                    if r != 0.0 && (r < 0.0) != (y < 0.0) { r + y } else { r }
                };
                int {
                    let r = x.wrapping_rem(y);
                    let turns = r != 0 && r.is_below_zero() != y.is_below_zero();
                    if turns { r.wrapping_add(y) } else { r }
                };)
        })
    }
}

fn min(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y|
        float if x < y || x.is_nan() { x } else { y };
        int x.min(y);)
}

fn max(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y|
        float if x > y || x.is_nan() { x } else { y };
        int x.max(y);)
}

fn prelu(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y|
        float if x < 0.0 { x * y } else { x };
        int {
            if x.is_below_zero() { x.wrapping_mul(y) } else { x }
        };)
}

fn equal(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    if let (Values::String(x), Values::String(y)) = (&*a.values, &*b.values) {
        let shape = joined(&a.shape, &b.shape)?;
        let x: Vec<&[u8]> = x.iter().map(|s| &s[..]).collect();
        let y: Vec<&[u8]> = y.iter().map(|s| &s[..]).collect();
        let same = zipped((&x, &a.shape), (&y, &b.shape), &shape, |x, y| x == y);
        return Ok(Values::Bool(same));
    }
    zip_types!(a, b, |x, y| float x == y; int x == y; bool x == y;)
}

fn less(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y| float x < y; int x < y;)
}

fn less_or_equal(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y| float x <= y; int x <= y;)
}

fn greater(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y| float x > y; int x > y;)
}

fn greater_or_equal(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y| float x >= y; int x >= y;)
}

fn and(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y| bool x && y;)
}

fn or(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y| bool x || y;)
}

fn xor(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y| bool x != y;)
}

fn bit_and(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y| int x & y;)
}

fn bit_or(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y| int x | y;)
}

fn bit_xor(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    zip_types!(a, b, |x, y| int x ^ y;)
}

/// What integers of every width do alike.
trait Whole: Sized {
    fn is_below_zero(&self) -> bool;
    /// A shift by all bits or more, or by a negative number, leaves nothing.
    fn shifted_left(self, n: Self) -> Self;
    /// The same to the right; a negative number becomes -1.
    fn shifted_right(self, n: Self) -> Self;
}

macro_rules! whole {
    ($($t:ty)*) => {$(
        impl Whole for $t {
            fn is_below_zero(&self) -> bool {
                i128::from(*self) < 0
            }
            fn shifted_left(self, n: Self) -> Self {
                let n = u32::try_from(i128::from(n)).ok();
                n.and_then(|n| self.checked_shl(n)).unwrap_or(0)
            }
            fn shifted_right(self, n: Self) -> Self {
                let n = u32::try_from(i128::from(n)).ok();
                let fill = <$t>::from(false).wrapping_sub(<$t>::from(self.is_below_zero()));
                n.and_then(|n| self.checked_shr(n)).unwrap_or(fill)
            }
        }
    )*};
}

whole!(i8 i16 i32 i64 u8 u16 u32 u64);

fn shift(call: &Call) -> Result<Vec<Tensor>, String> {
    match call.attributes.text("direction") {
        Some("LEFT") => two(call, |a, b| zip_types!(a, b, |x, y| int x.shifted_left(y);)),
        Some("RIGHT") => two(
            call,
            |a, b| zip_types!(a, b, |x, y| int x.shifted_right(y);),
        ),
        _ => Err("its direction is neither LEFT nor RIGHT".to_string()),
    }
}

/// The operator on two operands.
fn two(call: &Call, f: Binary) -> Result<Vec<Tensor>, String> {
    let (a, b) = (call.input(0)?, call.input(1)?);
    Ok(vec![of_two(a, b, f)?])
}

fn of_two(a: &Tensor, b: &Tensor, f: Binary) -> Result<Tensor, String> {
    Ok(Tensor::new(&joined(&a.shape, &b.shape)?, f(a, b)?))
}

/// The operator on any number of operands, from the left.
fn many(call: &Call, f: Binary) -> Result<Vec<Tensor>, String> {
    let mut result = call.input(0)?.clone();
    for n in 1..call.inputs.len() {
        result = of_two(&result, call.input(n)?, f)?;
    }
    Ok(vec![result])
}

fn mean(call: &Call) -> Result<Vec<Tensor>, String> {
    let sum = many(call, add)?;
    let n = Tensor::floats(sum[0].element(), &[], &[call.inputs.len() as f64]);
    let n = n.ok_or_else(|| format!("it is not defined on {}", sum[0].element()))?;
    Ok(vec![of_two(&sum[0], &n, div)?])
}

fn choose(call: &Call) -> Result<Vec<Tensor>, String> {
    let (condition, a, b) = (call.input(0)?, call.input(1)?, call.input(2)?);
    let shape = joined(&joined(&condition.shape, &a.shape)?, &b.shape)?;
    let spread = |x: &Tensor| taken(x, &View::whole(&x.shape).broadcast(&shape));
    let (condition, x, y) = (spread(condition), spread(a), spread(b));
    let condition = bool::of(&condition.values).ok_or("its condition is not of truth values")?;
    let values = crate::each_type!(&*x.values, v => sides(condition, v, &y));
    let values = values.ok_or_else(|| mismatch(a, b))?;
    Ok(vec![Tensor::new(&shape, values)])
}

/// Elements of `a` where the condition holds, else of `b`.
fn sides<T: Item>(condition: &[bool], a: &[T], b: &Tensor) -> Option<Values> {
    let pairs = a.iter().zip(T::of(&b.values)?);
    let side = |(c, (a, b)): (&bool, (&T, &T))| if *c { a.clone() } else { b.clone() };
    Some(T::wrap(condition.iter().zip(pairs).map(side).collect()))
}
