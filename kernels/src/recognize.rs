//! Recognition of contractions: a map with a sum over a product of two reads, seen from its memlets.
//!
//! No operator name is looked at, so products and convolutions, their gradients and whatever else
//! has the form are found alike. Strides come from the containers' layouts.

use crate::contraction::{Axis, Contraction, Element, NoFastForm, Operand, normal_form};
use graph::{
    ContainerId, DType, Graph, Index, Map, Memlet, Node, NodeKind, Param, Scalar, SummedProduct,
    SymExpr, Tasklet,
};

/// A contraction with the containers it works on.
#[derive(Clone, Debug)]
pub struct Recognized {
    /// Sizes and index expressions; dims are the map's parameters in order, or normal form's.
    pub contraction: Contraction,
    /// The left factor.
    pub a: ContainerId,
    /// The right factor.
    pub b: ContainerId,
    /// The result.
    pub out: ContainerId,
}

/// A top-level or kernel-member map as a contraction, if it is one whose sums are in single precision, or one that
/// is in double precision throughout. Its axes are in normal form, so its dims are the map's parameters or joined ones.
pub fn recognize(graph: &Graph, node: &Node) -> Option<Recognized> {
    let single = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let double = |dtype| dtype == DType::F64;
    let found =
        recognize_typed(graph, node, &single).or_else(|| recognize_typed(graph, node, &double))?;
    Some(Recognized {
        contraction: normal_form(&found.contraction),
        ..found
    })
}

/// Why the micro-kernels cannot take a map that multiplies and sums like a contraction; `None` for all other maps.
pub fn refusal(graph: &Graph, node: &Node) -> Option<NoFastForm> {
    let (map, tasklet) = map_of_tasklet(node)?;
    let (a, b, out) = factors(tasklet)?;
    let dtypes = [a, b, out].map(|m| graph.container(m.container).dtype);
    let multiplies = dtypes.iter().all(|d| d.is_float()) && is_blockable(map, a, b);
    if !multiplies || recognize(graph, node).is_some() {
        return None;
    }
    match dtypes.contains(&DType::F64) {
        true => Some(NoFastForm::ElementType),
        false => Some(NoFastForm::Index),
    }
}

/// Like [`recognize`], for operands and a result whose types, as the map has them, pass `accepts`.
pub fn recognize_typed(
    graph: &Graph,
    node: &Node,
    accepts: &dyn Fn(DType) -> bool,
) -> Option<Recognized> {
    let (map, tasklet) = map_of_tasklet(node)?;
    let (a, b, out) = factors(tasklet)?;
    let all = [a, b, out];
    let accepted = |m: &&Memlet| accepts(graph.container(m.container).dtype);
    if !all.iter().all(accepted) || !is_blockable(map, a, b) {
        return None;
    }
    let dims = map
        .params
        .iter()
        .map(|p| p.size.as_const())
        .collect::<Option<_>>()?;
    Some(Recognized {
        contraction: Contraction {
            element: match graph.container(out.container).dtype {
                DType::F64 => Element::F64,
                _ => Element::F32,
            },
            dims,
            a: operand(graph, &map.params, a)?,
            b: operand(graph, &map.params, b)?,
            out: operand(graph, &map.params, out)?,
        },
        a: a.container,
        b: b.container,
        out: out.container,
    })
}

fn map_of_tasklet(node: &Node) -> Option<(&Map, &Tasklet)> {
    let NodeKind::Map(map) = &node.kind else {
        return None;
    };
    match map.body.as_slice() {
        [one] => match &one.kind {
            NodeKind::Tasklet(tasklet) => Some((map, tasklet)),
            _ => None,
        },
        _ => None,
    }
}

/// `out += a·b` with plain reads and affine indices, guards being zeros.
fn factors(t: &Tasklet) -> Option<(&Memlet, &Memlet, &Memlet)> {
    let SummedProduct { a, b, out } = t.summed_product()?;
    let zero = |m: &Memlet| m.fill.is_none_or(is_zero);
    (zero(a) && zero(b)).then_some((a, b, out))
}

fn is_zero(s: Scalar) -> bool {
    s.as_f64() == 0.0
}

/// Whether both factors are reused: along a dimension that one of them lacks, or in a window, where
/// several points read one element. Otherwise it is a sum of element-wise products, which is bound
/// by memory and better served by plain loops.
fn is_blockable(map: &Map, a: &Memlet, b: &Memlet) -> bool {
    let reused = |m: &Memlet| {
        let lacks = |p: &Param| p.size.as_const() != Some(1) && !mentions(m, p);
        is_window(m) || map.params.iter().any(lacks)
    };
    reused(a) && reused(b)
}

fn is_window(m: &Memlet) -> bool {
    m.subset
        .iter()
        .any(|i| matches!(i, Index::At(e) if e.symbols().len() > 1))
}

fn mentions(m: &Memlet, p: &Param) -> bool {
    m.subset
        .iter()
        .any(|i| matches!(i, Index::At(e) if e.mentions(&p.name)))
}

fn operand(graph: &Graph, params: &[Param], m: &Memlet) -> Option<Operand> {
    let c = graph.container(m.container);
    let shape: Vec<i64> = c
        .shape
        .iter()
        .map(SymExpr::as_const)
        .collect::<Option<_>>()?;
    let strides = c.layout.strides(&shape);
    let mut axes = Vec::new();
    for (d, index) in m.subset.iter().enumerate() {
        let Index::At(e) = index else { return None };
        let (terms, offset) = e.as_affine()?;
        let dim = |s| params.iter().position(|p| p.name == s);
        axes.push(Axis {
            size: shape[d],
            stride: strides[d],
            terms: terms
                .into_iter()
                .map(|(s, k)| Some((dim(s)?, k)))
                .collect::<Option<_>>()?,
            offset,
            guarded: m.fill.is_some(),
        });
    }
    Some(Operand { axes, base: 0 })
}
