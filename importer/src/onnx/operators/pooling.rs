//! Pooling over windows and over everything.

use super::convolution::Geometry;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::value::Value;
use graph::{Attr, Attrs, Binary, ContainerId, DType, Expr, SymExpr, Tensor};

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
    let geometry = Geometry::new(cx, kernel)?.resolve(&shape[2..])?;
    let mut list = geometry.attrs();
    list.insert("kernel".into(), Attr::Ints(geometry.kernel.clone()));
    list.insert("ceil".into(), Attr::Bool(cx.int("ceil_mode", 0)? != 0));
    Ok(list)
}

/// The second output counts positions through the whole input, as ONNX does; the operator's own
/// counts within a channel. Integers of up to 16 bits are exact in `f32`.
fn max(cx: &mut NodeCx) -> Values {
    let given = cx.input(0)?;
    let dtype = cx.dtype(given);
    let x = match dtype {
        DType::U8 | DType::I8 | DType::I16 => cx.cast(given, DType::F32)?,
        _ => given,
    };
    let list = window(cx, x)?;
    let outputs = cx.op("max_pool", &[Some(x)], list)?;
    let mut values = vec![Value::Data(cx.cast(outputs[0], dtype)?)];
    if cx.wants(1) {
        let shape = cx.shape(x);
        let plane = SymExpr::product(&shape[2..]);
        let channel = SymExpr::symbol("i0") * shape[1].clone() + SymExpr::symbol("i1");
        let within = match cx.int("storage_order", 0)? {
            0 => Expr::In(0),
            _ => column_major(&shape[2..]),
        };
        let whole = within.add(Expr::Index(channel * plane));
        values.push(Value::Data(cx.elementwise(whole, &[outputs[1]])?));
    }
    Ok(values)
}

/// The row-major position `In(0)` in a plane, counted with the first dimension innermost.
fn column_major(plane: &[SymExpr]) -> Expr {
    let mut rest = Expr::In(0);
    let mut counted = Expr::int(0);
    for (d, size) in plane.iter().enumerate().rev() {
        let size = Expr::Index(size.clone());
        let index = Expr::binary(Binary::Mod, rest.clone(), size.clone());
        rest = Expr::binary(Binary::FloorDiv, rest, size);
        let step = SymExpr::product(&plane[..d]);
        counted = counted.add(index.mul(Expr::Index(step)));
    }
    counted
}

fn average(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let list = window(cx, x)?;
    let padded = cx.int("count_include_pad", 0)? != 0;
    single(mean(cx, x, list, Counted::of(padded))?)
}

/// Which positions of a window a mean counts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Counted {
    Inside,
    Padded,
    /// All, also those that a rounded-up output adds.
    All,
}

impl Counted {
    fn of(padded: bool) -> Counted {
        match padded {
            true => Counted::Padded,
            false => Counted::Inside,
        }
    }
}

/// Means over windows. The operator has no windows with gaps: their means are convolutions with ones.
fn mean(
    cx: &mut NodeCx,
    x: ContainerId,
    mut list: Attrs,
    counted: Counted,
) -> Result<ContainerId, Refusal> {
    let has_gaps = match list.get("dilation") {
        Some(Attr::Ints(dilation)) => dilation.iter().any(|d| *d != 1),
        _ => false,
    };
    if has_gaps {
        return mean_with_gaps(cx, x, list, counted);
    }
    list.insert(
        "count_include_pad".into(),
        Attr::Bool(counted != Counted::Inside),
    );
    cx.op1("average_pool", &[x], list)
}

/// Most elements of a window with gaps, and of the input, along a dimension.
const MOST_ALONG: i64 = 1 << 20;

fn mean_with_gaps(
    cx: &mut NodeCx,
    x: ContainerId,
    mut list: Attrs,
    counted: Counted,
) -> Result<ContainerId, Refusal> {
    let ints = |name: &str| match list.get(name) {
        Some(Attr::Ints(values)) => values.clone(),
        _ => Vec::new(),
    };
    let [kernel, stride, dilation] = ["kernel", "stride", "dilation"].map(ints);
    let [low, mut high] = ["pad_low", "pad_high"].map(ints);
    let rounds_up = list.get("ceil") == Some(&Attr::Bool(true));
    let shape = cx.shape(x);
    let sizes: Option<Vec<i64>> = shape[2..].iter().map(SymExpr::as_const).collect();
    let sizes = sizes.ok_or("windows with gaps need an input of fixed size")?;
    let all = kernel.iter().chain(&stride).chain(&dilation);
    let is_usual = all.chain(&sizes).all(|n| (1..=MOST_ALONG).contains(n))
        && kernel.iter().try_fold(1i64, |all, n| all.checked_mul(*n)) <= Some(MOST_ALONG);
    if !is_usual {
        return Err("its window or its input has an unusual size".into());
    }
    let mut outputs = Vec::new();
    // The mean of a window divides by the product of these counts, one for each dimension.
    let mut counts: Vec<Vec<f64>> = Vec::new();
    for d in 0..kernel.len() {
        let span = dilation[d] * (kernel[d] - 1) + 1;
        let room = sizes[d] + low[d] + high[d] - span;
        if room < 0 {
            return Err("its window does not fit its input".into());
        }
        let mut n = room / stride[d] + 1;
        if rounds_up && room % stride[d] != 0 && n * stride[d] < sizes[d] + low[d] {
            n += 1;
        }
        let end = match counted {
            Counted::Inside => sizes[d],
            _ => sizes[d] + high[d],
        };
        let start = if counted == Counted::Inside {
            0
        } else {
            -low[d]
        };
        let count = |o: i64| match counted {
            Counted::All => kernel[d] as f64,
            _ => {
                let at = |r: i64| o * stride[d] + r * dilation[d] - low[d];
                (0..kernel[d])
                    .filter(|r| (start..end).contains(&at(*r)))
                    .count() as f64
            }
        };
        counts.push((0..n).map(count).collect());
        high[d] += ((n - 1) * stride[d] - room).max(0);
        outputs.push(SymExpr::constant(n));
    }
    let mut planes = vec![shape[0].clone() * shape[1].clone(), 1.into()];
    planes.extend_from_slice(&shape[2..]);
    let planes = cx.reshape(x, planes)?;
    let dtype = cx.dtype(x);
    let mut window = vec![1, 1];
    window.extend(kernel.iter().map(|k| *k as usize));
    let taps = window.iter().product();
    let ones = cx.constant(Tensor::from_f64(dtype, &window, vec![1.0; taps]));
    for name in ["kernel", "ceil"] {
        list.remove(name);
    }
    list.insert("pad_high".into(), Attr::Ints(high));
    list.insert("groups".into(), Attr::Int(1));
    let sums = cx.op1("conv", &[planes, ones], list)?;
    let to = [&shape[..2], &outputs].concat();
    let sums = cx.reshape(sums, to)?;
    let mut inputs = vec![sums];
    let mut mean = Expr::In(0);
    for (d, count) in counts.into_iter().enumerate() {
        let mut along = vec![1; kernel.len()];
        along[d] = count.len();
        let parts = count.iter().map(|n| 1.0 / n.max(1.0)).collect();
        mean = mean.mul(Expr::In(inputs.len()));
        inputs.push(cx.constant(Tensor::from_f64(dtype, &along, parts)));
    }
    cx.elementwise(mean, &inputs)
}

/// `(Σ|x|^p)^(1/p)`: the mean over the window, its size taken out again.
fn lp(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let p = cx.int("p", 2)? as f64;
    let list = window(cx, x)?;
    let size = match list.get("kernel") {
        Some(Attr::Ints(kernel)) => kernel.iter().product::<i64>() as f64,
        _ => 1.0,
    };
    let power = cx.elementwise(Expr::In(0).abs().pow(Expr::float(p)), &[x])?;
    let mean = mean(cx, power, list, Counted::All)?;
    let root = Expr::In(0).mul(Expr::float(size)).pow(Expr::float(1.0 / p));
    // The root has no slope at 0; as in PyTorch, the elements of a window of zeros have a gradient of 0.
    let is_empty = Expr::In(0).eq_(Expr::float(0.0));
    let root = Expr::select(is_empty, Expr::float(0.0), root);
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
