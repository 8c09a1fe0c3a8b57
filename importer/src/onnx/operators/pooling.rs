//! Pooling over windows and over everything.

use super::convolution::Geometry;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::value::Value;
use graph::{Attr, Attrs, ContainerId, Expr, SymExpr};

pub static RULES: Rules = &[
    ("AveragePool", average),
    ("GlobalAveragePool", |cx| global(cx, "mean")),
    ("GlobalMaxPool", |cx| global(cx, "max")),
    ("LpPool", lp),
    ("MaxPool", max),
];

fn window(cx: &NodeCx, x: ContainerId) -> Result<Attrs, Refusal> {
    let kernel = cx.ints("kernel_shape")?;
    let kernel = kernel.ok_or_else(|| Refusal("its attribute `kernel_shape` is missing".into()))?;
    let shape = cx.shape(x);
    if shape.len() != kernel.len() + 2 {
        return Err(Refusal(format!(
            "its input has {} dimensions; a window of {} needs {}",
            shape.len(),
            kernel.len(),
            kernel.len() + 2
        )));
    }
    let geometry = Geometry::of(cx, kernel)?.resolve(&shape[2..])?;
    let mut list = geometry.attrs();
    list.insert("kernel".into(), Attr::Ints(geometry.kernel.clone()));
    list.insert("ceil".into(), Attr::Bool(cx.int("ceil_mode", 0)? != 0));
    Ok(list)
}

/// The second output counts positions through the whole input, as ONNX does; the operator's own
/// counts within a channel.
fn max(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let list = window(cx, x)?;
    let outputs = cx.op("max_pool", &[Some(x)], list)?;
    let mut values = vec![Value::Data(outputs[0])];
    if cx.wants(1) {
        if cx.int("storage_order", 0)? != 0 {
            return Err(Refusal(
                "indices in column-major order are not supported".into(),
            ));
        }
        let shape = cx.shape(x);
        let plane = SymExpr::product(&shape[2..]);
        let channel = SymExpr::symbol("i0") * shape[1].clone() + SymExpr::symbol("i1");
        let whole = Expr::In(0).add(Expr::Index(channel * plane));
        values.push(Value::Data(cx.elementwise(whole, &[outputs[1]])?));
    }
    Ok(values)
}

fn average(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let mut list = window(cx, x)?;
    let padded = cx.int("count_include_pad", 0)? != 0;
    list.insert("count_include_pad".into(), Attr::Bool(padded));
    single(cx.op1("average_pool", &[x], list)?)
}

/// `(Σ|x|^p)^(1/p)`: the mean over the window, its size taken out again.
fn lp(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let p = cx.int("p", 2)? as f64;
    let mut list = window(cx, x)?;
    let size = match list.get("kernel") {
        Some(Attr::Ints(kernel)) => kernel.iter().product::<i64>() as f64,
        _ => 1.0,
    };
    list.insert("count_include_pad".into(), Attr::Bool(true));
    let power = cx.elementwise(Expr::In(0).abs().pow(Expr::float(p)), &[x])?;
    let mean = cx.op1("average_pool", &[power], list)?;
    let root = Expr::In(0).mul(Expr::float(size)).pow(Expr::float(1.0 / p));
    single(cx.elementwise(root, &[mean])?)
}

fn global(cx: &mut NodeCx, kind: &str) -> Values {
    let x = cx.input(0)?;
    let spatial: Vec<usize> = (2..cx.rank(x)).collect();
    if spatial.is_empty() {
        return Err(Refusal("its input has no spatial dimensions".into()));
    }
    single(cx.reduce(x, kind, &spatial, true)?)
}
