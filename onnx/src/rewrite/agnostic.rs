//! Operators that compute the same on a value whose dimensions stand in another order, and how each is
//! written for it: element-wise ones, Concat, Split, Softmax, reductions, Slice, Pad.
//!
//! A value `v` is moved by `q` when `v'` is kept instead, with `v = Transpose(v', perm=q)`: dimension
//! `k` of `v` is dimension `q[k]` of `v'`.

use super::broadcasting::{broadcasts, is_unary};
use super::patch::{Patch, int, ints};
use super::scope::Scope;
use crate::attributes::{Attributes, is_standard};
use crate::operators::axis;
use crate::operators::permute::permuted;
use crate::proto::NodeProto;
use crate::tensor::Tensor;

/// A constant that others read too is stored a second time, moved, if it has at most this many bytes.
const SHARED_BYTES: usize = 4096;

const REDUCTIONS: [&str; 10] = [
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
];

/// How a node's inputs and attributes depend on the order of dimensions.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Element by element; all inputs are broadcast together.
    Broadcast,
    /// Element by element of the first input.
    Unary,
    /// All inputs, along an axis.
    Concat,
    /// The first input, along an axis.
    Axis,
    /// The first input, over axes that an attribute or the second input gives.
    Reduction,
    /// The first input, with bounds for axes that are the fourth.
    Slice,
    /// The first input, with two numbers per dimension.
    Pad,
}

fn kind(scope: &Scope, n: usize) -> Option<Kind> {
    let node = scope.node(n);
    if !is_standard(node) {
        return None;
    }
    let a = Attributes::new(node);
    let known = |at: usize| {
        let given = scope.input(n, at)?;
        scope.fact(given)?.known_ints()
    };
    Some(match node.op_type.as_str() {
        "PRelu" | "BitShift" => return None,
        _ if broadcasts(node) => Kind::Broadcast,
        _ if is_unary(node) => Kind::Unary,
        "Concat" => Kind::Concat,
        "Split" => Kind::Axis,
        "Softmax" | "LogSoftmax" if scope.opset() >= 13 => Kind::Axis,
        op if REDUCTIONS.contains(&op) => {
            let axes = a.ints("axes").map(<[i64]>::to_vec).or_else(|| known(1))?;
            (!axes.is_empty()).then_some(Kind::Reduction)?
        }
        "Slice" if scope.opset() >= 10 => {
            known(3)?;
            Kind::Slice
        }
        "Pad" if scope.input(n, 3).is_none() => {
            a.ints("pads").map(<[i64]>::to_vec).or_else(|| known(1))?;
            Kind::Pad
        }
        _ => return None,
    })
}

/// Whether a node can be written for moved values of that rank.
pub fn is_agnostic(scope: &Scope, n: usize, rank: usize) -> bool {
    let Some(kind) = kind(scope, n) else {
        return false;
    };
    let node = scope.node(n);
    let of_rank = |name: &String| scope.fact(name).and_then(|f| f.rank()) == Some(rank);
    let keeps = Attributes::new(node).int("keepdims").unwrap_or(1) != 0;
    let outputs = node.output.iter().filter(|o| !o.is_empty());
    (kind != Kind::Reduction || keeps)
        && outputs.into_iter().all(of_rank)
        && data(scope, n).iter().all(|name| {
            of_rank(name) || is_number(scope, name) || is_movable_constant(scope, name, rank)
        })
}

/// The inputs whose dimensions matter.
pub fn data<'a>(scope: &Scope<'a>, n: usize) -> &'a [String] {
    let inputs = scope.node(n).input.as_slice();
    match kind(scope, n) {
        Some(Kind::Broadcast | Kind::Concat) => inputs,
        _ => inputs.get(..1).unwrap_or_default(),
    }
}

/// Whether every size is 1, in as many dimensions as one likes.
pub fn is_number(scope: &Scope, name: &str) -> bool {
    let sizes = scope.fact(name).and_then(|f| f.sizes());
    sizes.is_some_and(|s| s.iter().all(|n| *n == 1))
}

/// Whether a constant may be stored moved: it broadcasts to that rank and the file does not grow much.
pub fn is_movable_constant(scope: &Scope, name: &str, rank: usize) -> bool {
    let Some(fact) = scope.fact(name) else {
        return false;
    };
    let fits = fact.rank().is_some_and(|r| r <= rank);
    let Some(stored) = fact.constant.as_ref().filter(|_| fits) else {
        return false;
    };
    scope.sole_reader(name).is_some() || stored.n_bytes() <= SHARED_BYTES
}

/// The order that undoes `q`.
pub fn inverse(q: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; q.len()];
    for (k, at) in q.iter().enumerate() {
        inverse[*at] = k;
    }
    inverse
}

/// A constant as it is stored where values are moved by `q`.
pub fn moved_constant(tensor: &Tensor, q: &[usize]) -> Option<Tensor> {
    let mut shape = vec![1; q.len().checked_sub(tensor.shape.len())?];
    shape.extend(&tensor.shape);
    Some(permuted(&tensor.reshaped(&shape), &inverse(q)))
}

/// Whether a reduction that drops its axes gives the same if what it reads is moved.
pub fn is_indifferent(scope: &Scope, n: usize, q: &[usize]) -> bool {
    let node = scope.node(n);
    let drops = Attributes::new(node).int("keepdims") == Some(0);
    if !drops || kind(scope, n) != Some(Kind::Reduction) {
        return false;
    }
    let Some(axes) = axes(scope, n, q.len()) else {
        return false;
    };
    let kept = (0..q.len()).filter(|d| !axes.contains(d)).map(|d| q[d]);
    kept.is_sorted()
}

fn axes(scope: &Scope, n: usize, rank: usize) -> Option<Vec<usize>> {
    let given = match Attributes::new(scope.node(n)).ints("axes") {
        Some(axes) => axes.to_vec(),
        None => scope.fact(scope.input(n, 1)?)?.known_ints()?,
    };
    given.iter().map(|d| axis(*d, rank)).collect()
}

/// Node `n` where its values are moved by `q`: axes and pads follow; inputs with data and outputs are
/// for the caller to replace.
pub fn moved(scope: &Scope, n: usize, q: &[usize], patch: &mut Patch) -> Option<NodeProto> {
    let mut node = scope.node(n).clone();
    let base = node.output.first().cloned().unwrap_or_default();
    let set = |node: &mut NodeProto, attribute: crate::proto::AttributeProto| {
        node.attribute.retain(|a| a.name != attribute.name);
        node.attribute.push(attribute);
    };
    let at = |d: usize| q[d] as i64;
    match kind(scope, n)? {
        Kind::Broadcast | Kind::Unary => {}
        Kind::Concat | Kind::Axis => {
            let default = if node.op_type.ends_with("Softmax") {
                -1
            } else {
                0
            };
            let given = Attributes::new(&node).int("axis").unwrap_or(default);
            let d = axis(given, q.len())?;
            set(&mut node, int("axis", at(d)));
        }
        Kind::Reduction => {
            let axes: Vec<i64> = axes(scope, n, q.len())?.into_iter().map(at).collect();
            if Attributes::new(&node).get("axes").is_some() {
                set(&mut node, ints("axes", &axes));
            } else {
                node.input[1] = patch.constant(scope, &format!("{base}_axes"), Tensor::ints(&axes));
            }
        }
        Kind::Slice => {
            let given = scope.fact(scope.input(n, 3)?)?;
            let axes = given.known_ints()?;
            let axes: Option<Vec<i64>> =
                axes.iter().map(|d| Some(at(axis(*d, q.len())?))).collect();
            let axes = axes?;
            let tensor = Tensor::of_ints(given.element?, &[axes.len()], &axes)?;
            node.input[3] = patch.constant(scope, &format!("{base}_axes"), tensor);
        }
        Kind::Pad => {
            let attribute = Attributes::new(&node).ints("pads").map(<[i64]>::to_vec);
            let in_file = attribute.is_some();
            let given = attribute.or_else(|| scope.fact(scope.input(n, 1)?)?.known_ints())?;
            let mut pads = given.clone();
            for k in 0..q.len() {
                *pads.get_mut(q[k])? = *given.get(k)?;
                *pads.get_mut(q.len() + q[k])? = *given.get(q.len() + k)?;
            }
            if in_file {
                set(&mut node, ints("pads", &pads));
            } else {
                node.input[1] = patch.constant(scope, &format!("{base}_pads"), Tensor::ints(&pads));
            }
        }
    }
    Some(node)
}
