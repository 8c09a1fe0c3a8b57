//! Which operators broadcast, and expansions that nobody needs because of that.
//!
//! - `drop-expansion`: `Add(Expand(x, s), y)` → `Add(x, y)`; `Where(m, ConstantOfShape(s), y)` →
//!   `Where(m, c, y)`.
//!
//! Legal where every reader broadcasts and its result keeps its sizes, symbol by symbol: broadcasting
//! repeats what the expansion repeated. Saves the expanded value.

use super::Rule;
use super::patch::Patch;
use super::scope::Scope;
use crate::attributes::{Attributes, is_standard};
use crate::operators::broadcast;
use crate::proto::NodeProto;
use crate::stored::decode;
use crate::tensor::{Tensor, Values};
use graph::SymExpr;
use std::path::Path;

pub const RULES: &[Rule] = &[Rule {
    name: "drop-expansion",
    at: drop_expansion,
}];

/// Operators of the standard that compute element by element with all inputs broadcast together.
pub fn broadcasts(node: &NodeProto) -> bool {
    const OPS: [&str; 24] = [
        "Add",
        "And",
        "BitShift",
        "BitwiseAnd",
        "BitwiseOr",
        "BitwiseXor",
        "Div",
        "Equal",
        "Greater",
        "GreaterOrEqual",
        "Less",
        "LessOrEqual",
        "Max",
        "Mean",
        "Min",
        "Mod",
        "Mul",
        "Or",
        "Pow",
        "Sub",
        "Sum",
        "Where",
        "Xor",
        "PRelu",
    ];
    is_standard(node) && OPS.contains(&node.op_type.as_str())
}

/// Operators of the standard that compute element by element of their first input; the others, if
/// any, are single numbers.
pub fn is_unary(node: &NodeProto) -> bool {
    const OPS: [&str; 46] = [
        "Abs",
        "Acos",
        "Acosh",
        "Asin",
        "Asinh",
        "Atan",
        "Atanh",
        "BitwiseNot",
        "Cast",
        "Ceil",
        "Celu",
        "Clip",
        "Cos",
        "Cosh",
        "Elu",
        "Erf",
        "Exp",
        "Floor",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "IsInf",
        "IsNaN",
        "LeakyRelu",
        "Log",
        "Mish",
        "Neg",
        "Not",
        "Reciprocal",
        "Relu",
        "Round",
        "Selu",
        "Shrink",
        "Sigmoid",
        "Sign",
        "Sin",
        "Sinh",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Swish",
        "Tan",
        "Tanh",
        "ThresholdedRelu",
        "CastLike",
    ];
    is_standard(node) && OPS.contains(&node.op_type.as_str())
}

fn drop_expansion(scope: &Scope, n: usize) -> Option<Patch> {
    let node = scope.node(n);
    let value = node.output.first()?;
    let (is_expand, is_fill) = (scope.is(n, "Expand"), scope.is(n, "ConstantOfShape"));
    if !(is_expand || is_fill) || scope.is_output(value) {
        return None;
    }
    let small: Vec<SymExpr> = if is_expand {
        scope.fact(scope.input(n, 0)?)?.shape.clone()?
    } else {
        Vec::new()
    };
    let readers = scope.readers(value);
    if readers.is_empty()
        || readers
            .iter()
            .any(|r| !is_the_same(scope, *r, value, &small))
    {
        return None;
    }
    let mut patch = Patch {
        remove: vec![n],
        ..Patch::default()
    };
    if is_expand {
        read_instead(scope, &mut patch, value, scope.input(n, 0)?);
        return Some(patch);
    }
    let fill = match Attributes::new(node).tensor("value") {
        Some(proto) => decode(proto, Path::new(".")).ok()?.reshaped(&[]),
        None => Tensor::new(&[], Values::F32(vec![0.0])),
    };
    let name = patch.constant(scope, value, fill);
    read_instead(scope, &mut patch, value, &name);
    Some(patch)
}

/// The readers of `value` read `name`. They are part of the patch: each was looked at with its other
/// operands as they are, which another patch must not change in the same sweep.
fn read_instead(scope: &Scope, patch: &mut Patch, value: &str, name: &str) {
    let mut readers = scope.readers(value).to_vec();
    readers.dedup();
    for r in readers {
        let mut reader = scope.node(r).clone();
        for input in reader.input.iter_mut().filter(|i| *i == value) {
            *input = name.to_string();
        }
        patch.remove.push(r);
        patch.insert.push(reader);
    }
}

/// Whether a reader gives the same sizes if `value` has the sizes `small` instead of its own.
fn is_the_same(scope: &Scope, reader: usize, value: &str, small: &[SymExpr]) -> bool {
    let node = scope.node(reader);
    if !node.input.iter().any(|i| i == value) {
        return false;
    }
    let unknowns = scope.around().unknowns;
    let sizes = |replaced: bool| -> Option<Vec<Vec<SymExpr>>> {
        let of = |name: &String| match replaced && name == value {
            true => Some(small.to_vec()),
            false => scope.fact(name)?.shape.clone(),
        };
        node.input.iter().map(of).collect()
    };
    let joined = |sizes: Vec<Vec<SymExpr>>| {
        let slices: Vec<&[SymExpr]> = sizes.iter().map(Vec::as_slice).collect();
        broadcast(&slices, unknowns)
    };
    let (Some(before), Some(after)) = (sizes(false), sizes(true)) else {
        return false;
    };
    if scope.is(reader, "MatMul") {
        return products_are_the_same(before, after, &joined);
    }
    let slope = node.op_type == "PRelu" && node.input.first().is_some_and(|x| x == value);
    let before = broadcasts(node).then(|| joined(before)).flatten();
    !slope && before.is_some() && before == joined(after)
}

/// The same for the leading dimensions of a matrix product.
fn products_are_the_same(
    mut before: Vec<Vec<SymExpr>>,
    mut after: Vec<Vec<SymExpr>>,
    joined: &dyn Fn(Vec<Vec<SymExpr>>) -> Option<Vec<SymExpr>>,
) -> bool {
    for (before, after) in before.iter_mut().zip(&mut after) {
        if before.len() < 2 || after.len() < 2 {
            return false;
        }
        let matrix = before.split_off(before.len() - 2);
        if matrix != after.split_off(after.len() - 2) {
            return false;
        }
    }
    let before = joined(before);
    before.is_some() && before == joined(after)
}

#[cfg(test)]
mod tests {
    use super::super::trial::Trial;
    use crate::tensor::Tensor;

    fn sum(other: &str, to: &str, op: &str) -> Trial {
        Trial::new(14)
            .input("x", "1 4")
            .input("z", "N 4")
            .input("y", other)
            .output("o", to)
            .node("s = Shape(z)")
            .node("e = Expand(x, s)")
            .node(&format!("o = {op}(e, y)"))
            .only(&["drop-expansion"])
    }

    #[test]
    fn an_expansion_that_broadcasting_repeats_goes() {
        sum("N 4", "N 4", "Add").gives(&["o = Add(x, y)"]);
        // Only the expansion makes N rows.
        sum("1 4", "N 4", "Add").stays();
        // A reader that does not broadcast.
        assert_eq!(sum("N 4", "M 4", "Concat").unverified().len(), 3);
    }

    #[test]
    fn an_expansion_that_is_an_output_stays() {
        sum("N 4", "N 4", "Add").output("e", "N 4").stays();
    }

    #[test]
    fn the_matrices_of_a_product_stay_and_what_is_before_broadcasts() {
        let product = |from: &str, to: &str| {
            Trial::new(14)
                .input("x", from)
                .input("z", to)
                .input("y", "N 5 4")
                .output("o", "N A 4")
                .node("s = Shape(z)")
                .node("e = Expand(x, s)")
                .node("o = MatMul(e, y)")
                .only(&["drop-expansion"])
        };
        product("1 3 5", "N 3 5").gives(&["o = MatMul(x, y)"]);
        product("1 1 5", "N 3 5").stays();
    }

    #[test]
    fn a_filled_value_that_broadcasts_is_one_number() {
        let chosen = |sizes: &str| {
            Trial::new(14)
                .input("x", "N 4")
                .input("y", sizes)
                .output("o", "N 4")
                .constant("none", Tensor::ints(&[0]))
                .node("s = Shape(x)")
                .node("f = ConstantOfShape(s)")
                .node("o = Add(f, y)")
                .only(&["drop-expansion"])
        };
        chosen("N 4").gives(&["o = Add(f_1, y)"]);
        chosen("1 4").stays();
    }
}
