//! Whether the sizes of a node's operands fit each other.
//!
//! Owns the operators for which sizes alone show it. Two sizes differ if both are numbers and not equal; symbolic
//! sizes are never compared.

use super::types::text_of;
use crate::attributes::{Attributes, is_standard};
use crate::fact::Fact;
use crate::infer::Facts;
use crate::operators::axis;
use crate::proto::NodeProto;
use graph::SymExpr;

/// Whether two sizes are never the same.
pub fn differ(a: &SymExpr, b: &SymExpr) -> bool {
    matches!((a.as_const(), b.as_const()), (Some(a), Some(b)) if a != b)
}

/// What does not fit, as a sentence.
pub fn problem(node: &NodeProto, version: i64, facts: &Facts) -> Option<String> {
    if !is_standard(node) {
        return None;
    }
    let operands = Operands { node, facts };
    match node.op_type.as_str() {
        "MatMul" | "MatMulInteger" => product(operands.shape(0)?, operands.shape(1)?),
        "QLinearMatMul" => product(operands.shape(0)?, operands.shape(3)?),
        "Gemm" => gemm(&operands),
        "Concat" => concat(&operands),
        "Transpose" => transpose(&operands),
        "Conv" => convolution(&operands).or_else(|| window(&operands)),
        "ConvTranspose" | "AveragePool" | "MaxPool" | "LpPool" => window(&operands),
        "Reshape" => reshape(&operands),
        "BatchNormalization" => channels(&operands),
        "Add" | "Sub" | "Mul" | "Div" | "Pow" | "Mod" | "And" | "Or" | "Xor" | "Equal" | "Less"
        | "LessOrEqual" | "Greater" | "GreaterOrEqual" | "BitShift" | "BitwiseAnd"
        | "BitwiseOr" | "BitwiseXor" | "Where" => broadcast(&operands.shapes()),
        "Max" | "Min" | "Sum" | "Mean" if version >= 8 => broadcast(&operands.shapes()),
        "Gather" | "Split" | "ArgMax" | "ArgMin" | "TopK" | "Compress" | "GatherElements" => {
            axis_problem(&operands)
        }
        "Softmax" | "LogSoftmax" | "Hardmax" if version >= 13 => axis_problem(&operands),
        _ => None,
    }
}

/// A node with what is known of its operands.
struct Operands<'a> {
    node: &'a NodeProto,
    facts: &'a Facts,
}

impl<'a> Operands<'a> {
    fn fact(&self, at: usize) -> Option<&'a Fact> {
        let name = self.node.input.get(at).filter(|name| !name.is_empty())?;
        self.facts.get(name)
    }

    fn shape(&self, at: usize) -> Option<&'a [SymExpr]> {
        self.fact(at)?.shape.as_deref()
    }

    /// The shapes that are known.
    fn shapes(&self) -> Vec<&'a [SymExpr]> {
        let all = 0..self.node.input.len();
        all.filter_map(|at| self.shape(at)).collect()
    }

    /// An integer attribute that the node itself gives.
    fn int(&self, name: &str, default: i64) -> Option<i64> {
        match Attributes::new(self.node).get(name) {
            None => Some(default),
            Some(given) if given.ref_attr_name.is_empty() => Some(given.i.unwrap_or(0)),
            Some(_) => None,
        }
    }
}

fn never_fit(shapes: &[&[SymExpr]]) -> String {
    let texts: Vec<String> = shapes.iter().map(|s| text_of(s)).collect();
    format!("its operands of shapes {} never fit", texts.join(" and "))
}

/// Whether shapes do not broadcast: counted from the last dimension, two sizes differ and neither is 1.
fn is_apart(shapes: &[&[SymExpr]]) -> bool {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    (1..=rank).any(|d| {
        let sizes = shapes
            .iter()
            .filter_map(|s| s[s.len().checked_sub(d)?].as_const());
        let mut above = sizes.filter(|n| *n != 1);
        above.next().is_some_and(|first| above.any(|n| n != first))
    })
}

fn broadcast(shapes: &[&[SymExpr]]) -> Option<String> {
    is_apart(shapes).then(|| never_fit(shapes))
}

fn product(a: &[SymExpr], b: &[SymExpr]) -> Option<String> {
    let (Some(last), Some(rows)) = (a.last(), b.get(b.len().saturating_sub(2))) else {
        let scalar = "one of its operands is a scalar, and both are to have dimensions";
        return Some(scalar.to_string());
    };
    let stack = |s: &'_ [SymExpr]| s.len().saturating_sub(2);
    let is_wrong = differ(last, rows) || is_apart(&[&a[..stack(a)], &b[..stack(b)]]);
    is_wrong.then(|| never_fit(&[a, b]))
}

fn gemm(operands: &Operands) -> Option<String> {
    let (a, b) = (operands.shape(0)?, operands.shape(1)?);
    let ([m, k], [l, n]) = (a, b) else {
        return Some(format!(
            "its operands of shapes {} and {} are to be matrices",
            text_of(a),
            text_of(b)
        ));
    };
    let (m, k) = if operands.int("transA", 0)? == 0 {
        (m, k)
    } else {
        (k, m)
    };
    let (l, n) = if operands.int("transB", 0)? == 0 {
        (l, n)
    } else {
        (n, l)
    };
    if differ(k, l) {
        return Some(format!(
            "{} when it takes {k} and {l} as one",
            never_fit(&[a, b])
        ));
    }
    let added = operands.shape(2)?;
    let whole = [m.clone(), n.clone()];
    let is_wider = |d: usize| {
        let at = added.len().checked_sub(d).map(|at| &added[at]);
        at.is_some_and(|n| n.as_const() != Some(1) && differ(n, &whole[2 - d]))
    };
    let is_wrong = added.len() > 2 || is_wider(1) || is_wider(2);
    is_wrong.then(|| {
        let (added, whole) = (text_of(added), text_of(&whole));
        format!("it adds a value of shape {added}, which does not fit {whole}")
    })
}

fn concat(operands: &Operands) -> Option<String> {
    let shapes = operands.shapes();
    let (first, rest) = shapes.split_first()?;
    if rest.iter().any(|s| s.len() != first.len()) {
        return Some(never_fit(&shapes));
    }
    let given = operands.int("axis", 0)?;
    let Some(along) = axis(given, first.len()) else {
        return Some(no_axis(given, first));
    };
    let is_apart = |d: usize| {
        let mut known = shapes.iter().filter_map(|s| s[d].as_const());
        known.next().is_some_and(|first| known.any(|n| n != first))
    };
    let is_wrong = (0..first.len()).any(|d| d != along && is_apart(d));
    is_wrong.then(|| {
        format!(
            "{} beside each other along axis {given}",
            never_fit(&shapes)
        )
    })
}

fn no_axis(axis: i64, shape: &[SymExpr]) -> String {
    format!(
        "its axis {axis} is none of its operand of shape {}",
        text_of(shape)
    )
}

fn axis_problem(operands: &Operands) -> Option<String> {
    let shape = operands.shape(0)?;
    // Without the attribute, Compress has no axis; -1 stands for one that always exists.
    let given = operands.int("axis", -1)?;
    (!shape.is_empty() && axis(given, shape.len()).is_none()).then(|| no_axis(given, shape))
}

fn transpose(operands: &Operands) -> Option<String> {
    let perm = Attributes::new(operands.node).get("perm")?;
    let shape = operands
        .shape(0)
        .filter(|_| perm.ref_attr_name.is_empty())?;
    let mut sorted = perm.ints.clone();
    sorted.sort_unstable();
    let is_order = sorted.len() == shape.len() && sorted.iter().zip(0..).all(|(a, b)| *a == b);
    (!is_order).then(|| {
        let perm = &perm.ints;
        format!(
            "its `perm` {perm:?} is no order of the dimensions of {}",
            text_of(shape)
        )
    })
}

fn convolution(operands: &Operands) -> Option<String> {
    let (x, w) = (operands.shape(0)?, operands.shape(1)?);
    let groups = operands.int("group", 1)?;
    let is_wrong = match (x, w) {
        ([_, channels, _, ..], [_, each, ..]) if x.len() == w.len() => {
            let taken = each.as_const().and_then(|n| n.checked_mul(groups));
            taken.is_some_and(|n| differ(channels, &SymExpr::constant(n)))
        }
        _ => true,
    };
    is_wrong.then(|| match groups {
        1 => never_fit(&[x, w]),
        _ => format!("{} in {groups} groups", never_fit(&[x, w])),
    })
}

/// Whether a window has as many sizes as its operand has dimensions after the first two.
fn window(operands: &Operands) -> Option<String> {
    let shape = operands.shape(0)?;
    let Some(rank) = shape.len().checked_sub(2).filter(|rank| *rank > 0) else {
        return Some(format!(
            "its operand of shape {} has too few dimensions",
            text_of(shape)
        ));
    };
    let lists = [
        ("kernel_shape", 1),
        ("strides", 1),
        ("dilations", 1),
        ("pads", 2),
    ];
    lists.into_iter().find_map(|(name, each)| {
        let given = Attributes::new(operands.node).get(name)?;
        let is_wrong = given.ref_attr_name.is_empty() && given.ints.len() != rank * each;
        is_wrong.then(|| {
            let (n, shape) = (given.ints.len(), text_of(shape));
            format!(
                "its `{name}` has {n} integers, which does not fit its operand of shape {shape}"
            )
        })
    })
}

fn reshape(operands: &Operands) -> Option<String> {
    let from = operands.shape(0)?;
    let n = operands.fact(0)?.len()?;
    let sizes = operands.fact(1)?.known_ints()?;
    let keeps = operands.int("allowzero", 0)? == 0;
    let size = |(at, size): (usize, &i64)| match (*size, from.get(at)) {
        (0, Some(kept)) if keeps => kept.as_const().and_then(|n| usize::try_from(n).ok()),
        (size, _) => usize::try_from(size).ok(),
    };
    // A size of -1 stands for what is left: then nothing is known to be wrong.
    let sizes_given: Option<Vec<usize>> = sizes.iter().enumerate().map(size).collect();
    let wanted = sizes_given?
        .iter()
        .try_fold(1usize, |p, n| p.checked_mul(*n))?;
    (wanted != n).then(|| {
        format!(
            "its operand of shape {} never has the shape {sizes:?}",
            text_of(from)
        )
    })
}

fn channels(operands: &Operands) -> Option<String> {
    let shape = operands.shape(0)?;
    let channels = shape.get(1)?;
    let is_other = |s: &[SymExpr]| s.len() != 1 || differ(&s[0], channels);
    let found = (1..5)
        .filter_map(|at| operands.shape(at))
        .find(|s| is_other(s))?;
    Some(never_fit(&[shape, found]))
}
