//! Look-ups and scatters by integer tensors, and order.

use super::Table;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site};
use graph::{Attr, ContainerId, DType};
use ops::attrs;

pub(super) const RULES: Table = &[
    ("aten.embedding.default", embedding),
    ("aten.index_select.default", index_select),
    ("aten.index.Tensor", index),
    ("aten.gather.default", gather),
    ("aten.scatter_add.default", scatter_add),
    ("aten.topk.default", topk),
];

fn axis_attr(axis: usize) -> (&'static str, Attr) {
    ("axis", Attr::Int(axis as i64))
}

fn embedding(s: &mut Site) -> Results {
    let (weight, index) = (s.tensor("weight")?, s.tensor("indices")?);
    if s.flag("scale_grad_by_freq")? || s.flag("sparse")? {
        return Err(s.unsupported("sparse or frequency-scaled gradients"));
    }
    let mut a = attrs([axis_attr(0)]);
    let padding = s.int_or("padding_idx", -1)?;
    if padding >= 0 {
        a.insert("padding_idx".into(), Attr::Int(padding));
    }
    Ok(vec![Some(s.op1("gather", &[weight, index], a)?)])
}

fn index_select(s: &mut Site) -> Results {
    let (x, index) = (s.subject()?, s.tensor("index")?);
    let axis = s.axis("dim", s.rank(x))?;
    take(s, x, index, axis)
}

fn take(s: &mut Site, x: ContainerId, index: ContainerId, axis: usize) -> Results {
    Ok(vec![Some(s.op1(
        "gather",
        &[x, index],
        attrs([axis_attr(axis)]),
    )?)])
}

/// `x[:, index]`: one integer tensor, whole slices elsewhere.
fn index(s: &mut Site) -> Results {
    let x = s.subject()?;
    let given = s.optional_tensors("indices")?;
    let mut used = given
        .iter()
        .enumerate()
        .filter_map(|(axis, i)| i.map(|i| (axis, i)));
    match (used.next(), used.next()) {
        (Some((axis, index)), None) if s.builder.dtype(index) != DType::Bool => {
            take(s, x, index, axis)
        }
        (Some(_), None) => Err(s.unsupported("a boolean mask, whose result has no known size")),
        _ => Err(s.unsupported("several index tensors")),
    }
}

fn gather(s: &mut Site) -> Results {
    let (x, index) = (s.subject()?, s.tensor("index")?);
    let axis = s.axis("dim", s.rank(x))?;
    Ok(vec![Some(s.op1(
        "gather_elements",
        &[x, index],
        attrs([axis_attr(axis)]),
    )?)])
}

fn scatter_add(s: &mut Site) -> Results {
    let (x, index, src) = (s.subject()?, s.tensor("index")?, s.tensor("src")?);
    let axis = s.axis("dim", s.rank(x))?;
    if s.builder.shape(index) != s.builder.shape(src) {
        return Err(s.unsupported("an index smaller than its source"));
    }
    Ok(vec![Some(s.op1(
        "scatter_add",
        &[x, index, src],
        attrs([axis_attr(axis)]),
    )?)])
}

fn topk(s: &mut Site) -> Results {
    let x = s.subject()?;
    let axis = if s.has("dim") {
        s.axis("dim", s.rank(x))?
    } else {
        s.rank(x) - 1
    };
    let k = s.size("k")?;
    let largest = !s.node.args.contains_key("largest") || s.flag("largest")?;
    let a = attrs([
        axis_attr(axis),
        ("k", Attr::Sizes(vec![k])),
        ("largest", Attr::Bool(largest)),
    ]);
    both(s, "topk", x, a)
}

fn both(
    s: &mut Site,
    op: &str,
    x: ContainerId,
    a: graph::Attrs,
) -> Result<Vec<Option<ContainerId>>, RuleError> {
    let made = ops::OpBuilder::op(&mut s.builder, op, &[Some(x)], a)?;
    Ok(made.into_iter().map(Some).collect())
}
