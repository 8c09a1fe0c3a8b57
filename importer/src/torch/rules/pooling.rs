//! Pooling over windows, and its counterpart: repeating elements.

use super::Table;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site};
use graph::{Attr, Attrs, ContainerId, SymExpr};
use ops::{OpBuilder, attrs};

pub(super) const RULES: Table = &[
    ("aten.max_pool1d.default", |s| max_pool(s, 1)),
    ("aten.max_pool2d.default", |s| max_pool(s, 2)),
    ("aten.max_pool3d.default", |s| max_pool(s, 3)),
    ("aten.max_pool2d_with_indices.default", |s| max_pool(s, 2)),
    ("aten.max_pool3d_with_indices.default", |s| max_pool(s, 3)),
    ("aten.upsample_nearest1d.vec", |s| repeat_to_size(s, 1)),
    ("aten.upsample_nearest2d.vec", |s| repeat_to_size(s, 2)),
    ("aten.upsample_nearest3d.vec", |s| repeat_to_size(s, 3)),
    ("aten.adaptive_max_pool1d.default", |s| adaptive_max(s, 1)),
    ("aten.adaptive_max_pool2d.default", |s| adaptive_max(s, 2)),
    ("aten.adaptive_max_pool3d.default", |s| adaptive_max(s, 3)),
    ("aten.avg_pool1d.default", |s| average_pool(s, 1)),
    ("aten.avg_pool2d.default", |s| average_pool(s, 2)),
    ("aten.avg_pool3d.default", |s| average_pool(s, 3)),
    ("aten.adaptive_avg_pool1d.default", |s| {
        adaptive_average(s, 1)
    }),
    ("aten.adaptive_avg_pool2d.default", |s| {
        adaptive_average(s, 2)
    }),
    ("aten._adaptive_avg_pool2d.default", |s| {
        adaptive_average(s, 2)
    }),
    ("aten.adaptive_avg_pool3d.default", |s| {
        adaptive_average(s, 3)
    }),
];

/// The window's attributes.
fn window(s: &Site, n: usize) -> Result<Attrs, RuleError> {
    let kernel = s.ints_for("kernel_size", n, &[])?;
    let pad = s.ints_for("padding", n, &vec![0; n])?;
    Ok(attrs([
        ("stride", Attr::Ints(s.ints_for("stride", n, &kernel)?)),
        ("kernel", Attr::Ints(kernel)),
        ("pad_low", Attr::Ints(pad.clone())),
        ("pad_high", Attr::Ints(pad)),
        (
            "dilation",
            Attr::Ints(s.ints_for("dilation", n, &vec![1; n])?),
        ),
        ("ceil", Attr::Bool(s.flag("ceil_mode")?)),
    ]))
}

/// Every element repeated, where the size is a whole multiple of the input's. A factor that is given must be that
/// multiple: with a factor of 3.3, three elements become nine that begin 0, 0, 0, 0, 1.
fn repeat_to_size(s: &mut Site, n: usize) -> Results {
    let x = s.subject()?;
    let (input, output) = (s.builder.shape(x), s.out_shape(0));
    let factors = s.floats("scale_factors")?;
    let mut wide = input[..2].to_vec();
    let mut repeated = wide.clone();
    for (d, (from, to)) in input[2..].iter().zip(&output[2..]).take(n).enumerate() {
        let times = to
            .divide_exactly(from)
            .ok_or_else(|| s.unsupported("a size that is no multiple of the input's"))?;
        let factor = factors.get(d).copied();
        if factor.is_some_and(|f| times.as_const().map(|t| t as f64) != Some(f)) {
            return Err(s.unsupported("a factor that is not how many times the size grows"));
        }
        wide.extend([from.clone(), SymExpr::constant(1)]);
        repeated.extend([from.clone(), times]);
    }
    let x = s.reshape(x, wide)?;
    let x = s.expand(x, repeated)?;
    Ok(vec![Some(s.reshape(x, output)?)])
}

/// The input with a batch of one, if it comes without.
fn batched(s: &mut Site, n: usize) -> Result<ContainerId, RuleError> {
    let x = s.subject()?;
    let mut shape = s.builder.shape(x);
    if shape.len() == n + 1 {
        shape.insert(0, SymExpr::constant(1));
    }
    s.reshape(x, shape)
}

fn unbatched(s: &mut Site, y: ContainerId) -> Result<ContainerId, RuleError> {
    let shape = s.builder.shape(y);
    let wanted = s.out_shape(0).len();
    s.reshape(y, shape[shape.len() - wanted..].to_vec())
}

/// y, and for `max_pool2d_with_indices` the positions of the maxima.
fn max_pool(s: &mut Site, n: usize) -> Results {
    let x = batched(s, n)?;
    let a = window(s, n)?;
    let made = s.builder.op("max_pool", &[Some(x)], a)?;
    let wanted = made.iter().take(s.node.outputs.len());
    wanted.map(|y| Ok(Some(unbatched(s, *y)?))).collect()
}

fn average_pool(s: &mut Site, n: usize) -> Results {
    let x = batched(s, n)?;
    let mut a = window(s, n)?;
    a.remove("dilation");
    let counts = !s.node.args.contains_key("count_include_pad") || s.flag("count_include_pad")?;
    a.insert("count_include_pad".into(), Attr::Bool(counts));
    if s.has("divisor_override") {
        a.insert("divisor".into(), Attr::Int(s.int("divisor_override")?));
    }
    let y = s.builder.op("average_pool", &[Some(x)], a)?[0];
    Ok(vec![Some(unbatched(s, y)?)])
}

/// Global pooling is a mean.
fn adaptive_average(s: &mut Site, n: usize) -> Results {
    let x = s.subject()?;
    let rank = s.rank(x);
    let (input, output) = (s.builder.shape(x), s.out_shape(0));
    let spatial: Vec<usize> = (rank - n..rank).collect();
    if spatial.iter().all(|d| output[*d] == SymExpr::constant(1)) {
        return Ok(vec![Some(s.reduce("mean", x, &spatial, true)?)]);
    }
    if spatial.iter().all(|d| output[*d] == input[*d]) {
        return Ok(vec![Some(x)]);
    }
    let sizes = output_sizes(s, n)?;
    let x = batched(s, n)?;
    let a = attrs([("output", Attr::Ints(sizes))]);
    let y = s.builder.op("adaptive_average_pool", &[Some(x)], a)?[0];
    Ok(vec![Some(unbatched(s, y)?)])
}

/// The pooled dimensions' sizes in the result.
fn output_sizes(s: &Site, n: usize) -> Result<Vec<i64>, RuleError> {
    let output = s.out_shape(0);
    let sizes: Option<Vec<i64>> = output[output.len() - n..]
        .iter()
        .map(SymExpr::as_const)
        .collect();
    sizes.ok_or_else(|| s.unsupported("an output of symbolic size"))
}

/// y, and the positions of the maxima.
fn adaptive_max(s: &mut Site, n: usize) -> Results {
    let a = attrs([("output", Attr::Ints(output_sizes(s, n)?))]);
    let x = batched(s, n)?;
    let made = s.builder.op("adaptive_max_pool", &[Some(x)], a)?;
    made.iter().map(|y| Ok(Some(unbatched(s, *y)?))).collect()
}
