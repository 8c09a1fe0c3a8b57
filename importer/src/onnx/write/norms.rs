//! Normalizations and their gradients.

use super::nodes::{Nodes, Refusal, float, int};
use super::rules::Written;
use graph::{DType, Scalar, SymExpr, Tensor};
use ops::Call;

/// How a normalization sees x: groups of channels are a dimension of their own.
struct View {
    /// Sizes of x as it is seen.
    shape: Vec<SymExpr>,
    /// Dimensions that share statistics.
    axes: Vec<i64>,
    /// Dimensions that a weight's gradient sums.
    others: Vec<i64>,
    /// The shape in which a weight broadcasts to x.
    weight: Vec<SymExpr>,
    /// Sizes with 1 along the axes.
    kept: Vec<SymExpr>,
}

impl View {
    fn new(c: &Call, x: &ops::TensorType) -> Result<View, Refusal> {
        let one = SymExpr::constant(1);
        let rank = x.rank();
        let (shape, axes, weighted): (Vec<SymExpr>, Vec<usize>, Vec<usize>) =
            if c.library.op.starts_with("batch_norm") {
                let axes = (0..rank).filter(|d| *d != 1).collect();
                (x.shape.clone(), axes, vec![1])
            } else if c.library.op.starts_with("group_norm") {
                let groups = SymExpr::constant(c.int("groups")?);
                let each = x.shape[1].floor_div(&groups);
                let mut shape = vec![x.shape[0].clone(), groups, each];
                shape.extend_from_slice(&x.shape[2..]);
                (shape, (2..rank + 1).collect(), vec![1, 2])
            } else {
                let first = rank - c.int("axes")? as usize;
                (
                    x.shape.clone(),
                    (first..rank).collect(),
                    (first..rank).collect(),
                )
            };
        let only = |dims: &dyn Fn(usize) -> bool| -> Vec<SymExpr> {
            let size = |(d, n): (usize, &SymExpr)| if dims(d) { n.clone() } else { one.clone() };
            shape.iter().enumerate().map(size).collect()
        };
        let first = weighted.first().copied().unwrap_or(0);
        let others = (0..shape.len()).filter(|d| !weighted.contains(d));
        Ok(View {
            kept: only(&|d| !axes.contains(&d)),
            weight: only(&|d| weighted.contains(&d))[first..].to_vec(),
            others: others.map(|d| d as i64).collect(),
            axes: axes.into_iter().map(|d| d as i64).collect(),
            shape,
        })
    }

    /// How many elements share statistics, as a number of type `dtype`.
    fn count(&self, n: &mut Nodes, dtype: DType) -> Result<String, Refusal> {
        let sizes = self.axes.iter().map(|d| &self.shape[*d as usize]);
        let count = SymExpr::product(sizes);
        if let Some(count) = count.as_const() {
            return Ok(n.number(Scalar::Float(count as f64), dtype));
        }
        let count = n.size(&count)?;
        Ok(n.cast(count, DType::I64, dtype))
    }

    /// `x − mean` (if there is one), mean square of that, and `1/√(that + eps)`.
    fn statistics(
        &self,
        n: &mut Nodes,
        x: &str,
        (centered, eps, dtype): (bool, f64, DType),
    ) -> (Option<String>, String, String) {
        let mean = centered.then(|| n.reduced("ReduceMean", x, &self.axes, true));
        let from_mean = match &mean {
            Some(mean) => n.of2("Sub", x, mean),
            None => x.to_string(),
        };
        let squares = n.of2("Mul", &from_mean, &from_mean);
        let var = n.reduced("ReduceMean", &squares, &self.axes, true);
        let eps = n.number(Scalar::Float(eps), dtype);
        let shifted = n.of2("Add", &var, &eps);
        let std = n.node("Sqrt", &[&shifted], Vec::new());
        let inv_std = n.node("Reciprocal", &[&std], Vec::new());
        (mean, from_mean, inv_std)
    }

    /// `x − mean`, the mean without the dimensions that were summed.
    fn off_mean(&self, n: &mut Nodes, x: &str, mean: &str) -> Result<String, Refusal> {
        let mean = n.reshaped(mean, &self.weight)?;
        Ok(n.of2("Sub", x, &mean))
    }

    /// `value · weight + bias`, for those that are there.
    fn scaled(&self, n: &mut Nodes, c: &Call, mut value: String) -> Result<String, Refusal> {
        for (position, op) in [(1, "Mul"), (2, "Add")] {
            if let Some(id) = c.optional_id(position) {
                let weight = n.operand(id);
                let weight = n.reshaped(&weight, &self.weight)?;
                value = n.of2(op, &value, &weight);
            }
        }
        Ok(value)
    }
}

/// A vector along the channels with every element the same.
fn along_channels(
    n: &mut Nodes,
    x: &ops::TensorType,
    (value, dtype): (f64, DType),
) -> Result<String, Refusal> {
    let value = Scalar::Float(value);
    match x.shape[1].as_const() {
        Some(size) => Ok(n.constant(&Tensor::filled(dtype, &[size as usize], value))),
        None => {
            let number = n.number(value, dtype);
            let shape = n.shape(&x.shape[1..2])?;
            Ok(n.of2("Expand", &number, &shape))
        }
    }
}

/// The operand at a position, or a vector of one number along the channels.
fn channels_or(
    n: &mut Nodes,
    (c, position): (&Call, usize),
    x: &ops::TensorType,
    default: f64,
) -> Result<String, Refusal> {
    match c.optional_id(position) {
        Some(id) => Ok(n.operand(id)),
        None => along_channels(n, x, (default, x.dtype)),
    }
}

/// `value · slope + offset` along the channels in one pass: a normalization by mean 0 and variance 1.
fn affine(
    n: &mut Nodes,
    value: &str,
    (slope, offset): (&str, &str),
    x: &ops::TensorType,
) -> Result<String, Refusal> {
    let zero = along_channels(n, x, (0.0, x.dtype))?;
    let one = along_channels(n, x, (1.0, x.dtype))?;
    let inputs = [value, slope, offset, &zero, &one];
    Ok(n.node("BatchNormalization", &inputs, vec![float("epsilon", 0.0)]))
}

/// Composed, as the operator's own training form may write into its operands in ONNX Runtime.
pub(super) fn batch_norm(n: &mut Nodes, c: &Call) -> Written {
    let x = c.input(0)?.clone();
    let view = View::new(c, &x)?;
    let name = n.input(c, 0)?;
    let mean = n.reduced("ReduceMean", &name, &view.axes, false);
    let from_mean = view.off_mean(n, &name, &mean)?;
    let squares = n.reduced("ReduceSumSquare", &from_mean, &view.axes, false);
    let count = view.count(n, x.dtype)?;
    let var = n.of2("Div", &squares, &count);
    let eps = n.number(Scalar::Float(c.float_or("eps", 1e-5)?), x.dtype);
    let shifted = n.of2("Add", &var, &eps);
    let std = n.node("Sqrt", &[&shifted], Vec::new());
    let inv_std = n.node("Reciprocal", &[&std], Vec::new());
    let slope = match c.optional_id(1) {
        Some(id) => {
            let weight = n.operand(id);
            n.of2("Mul", &weight, &inv_std)
        }
        None => inv_std.clone(),
    };
    let offset = channels_or(n, (c, 2), &x, 0.0)?;
    let y = affine(n, &from_mean, (&slope, &offset), &x)?;
    n.output(c, 0, y);
    for (position, value) in [(1, mean), (2, inv_std), (3, var)] {
        if let Some(id) = c.output_id(position) {
            let dtype = n.graph.container(id).dtype;
            let value = n.cast(value, x.dtype, dtype);
            n.assign(id, value);
        }
    }
    Ok(())
}

pub(super) fn batch_norm_inference(n: &mut Nodes, c: &Call) -> Written {
    let x = c.input(0)?.clone();
    let mut inputs = vec![n.input(c, 0)?];
    inputs.push(channels_or(n, (c, 1), &x, 1.0)?);
    inputs.push(channels_or(n, (c, 2), &x, 0.0)?);
    inputs.push(n.input(c, 3)?);
    inputs.push(n.input(c, 4)?);
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    let eps = float("epsilon", c.float_or("eps", 1e-5)?);
    let value = n.node("BatchNormalization", &inputs, vec![eps]);
    n.output(c, 0, value);
    Ok(())
}

pub(super) fn layer_norm(n: &mut Nodes, c: &Call) -> Written {
    let x = c.input(0)?.clone();
    if x.dtype == DType::F64 && (1..3).any(|position| c.output_id(position).is_some()) {
        return composed_norm(n, c);
    }
    let rank = x.rank() as i64;
    let axis = rank - c.int("axes")?;
    let mut inputs = vec![n.input(c, 0)?];
    inputs.push(match c.optional_id(1) {
        Some(id) => n.operand(id),
        None => {
            let one = n.number(Scalar::Float(1.0), x.dtype);
            let shape = n.shape(&x.shape[axis as usize..])?;
            n.of2("Expand", &one, &shape)
        }
    });
    inputs.extend(c.optional_id(2).map(|id| n.operand(id)));
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    let attributes = vec![
        int("axis", axis),
        float("epsilon", c.float_or("eps", 1e-5)?),
    ];
    let mut made = n.nodes("LayerNormalization", &inputs, 3, attributes);
    for position in (1..3).rev() {
        let value = made.remove(position);
        if let Some(id) = c.output_id(position) {
            let container = n.graph.container(id);
            // The operator gives its statistics in single precision, with 1 along what it sums.
            let mut kept = x.shape.clone();
            kept[axis as usize..].fill(SymExpr::constant(1));
            n.shapes.insert(value.clone(), kept);
            let value = n.cast(value, DType::F32, container.dtype);
            let value = n.reshaped(&value, &container.shape)?;
            n.assign(id, value);
        }
    }
    n.output(c, 0, made.remove(0));
    Ok(())
}

/// Group and root-mean-square normalization, and in double precision layer normalization, whose
/// operator keeps statistics in single precision.
pub(super) fn composed_norm(n: &mut Nodes, c: &Call) -> Written {
    let x = c.input(0)?.clone();
    let view = View::new(c, &x)?;
    let name = n.input(c, 0)?;
    let name = n.reshaped_from(&name, &x.shape, &view.shape)?;
    let centered = c.library.op != "rms_norm";
    let how = (centered, c.float_or("eps", 1e-5)?, x.dtype);
    let (mean, from_mean, inv_std) = view.statistics(n, &name, how);
    let normalized = n.of2("Mul", &from_mean, &inv_std);
    let y = view.scaled(n, c, normalized)?;
    let y = n.reshaped_from(&y, &view.shape, &x.shape)?;
    n.output(c, 0, y);
    for (position, value) in mean.iter().chain([&inv_std]).enumerate() {
        if let Some(id) = c.output_id(position + 1) {
            let container = n.graph.container(id);
            let value = n.cast(value.clone(), x.dtype, container.dtype);
            let value = n.reshaped_from(&value, &view.kept, &container.shape)?;
            n.assign(id, value);
        }
    }
    Ok(())
}

/// `dx = a·dy − (a·Σdy + (x − mean)·a·inv_std²·Σdy·(x − mean))/n` with `a = weight·inv_std` (Ioffe and
/// Szegedy, arXiv 1502.03167).
pub(super) fn batch_norm_gradient(n: &mut Nodes, c: &Call) -> Written {
    let x = c.input(1)?.clone();
    let view = View::new(c, &x)?;
    let (dy, x_name) = (n.input(c, 0)?, n.input(c, 1)?);
    let mut statistics = Vec::new();
    for position in [3, 4] {
        let value = n.input(c, position)?;
        statistics.push(n.cast(value, c.input(position)?.dtype, x.dtype));
    }
    let (mean, inv_std) = (&statistics[0], &statistics[1]);
    let from_mean = view.off_mean(n, &x_name, mean)?;
    let product = n.of2("Mul", &dy, &from_mean);
    let product = n.reduced("ReduceSum", &product, &view.axes, false);
    let dweight = n.of2("Mul", &product, inv_std);
    let dbias = n.reduced("ReduceSum", &dy, &view.axes, false);
    if c.output_id(0).is_some() {
        let a = match c.optional_id(2) {
            Some(id) => {
                let weight = n.operand(id);
                n.of2("Mul", &weight, inv_std)
            }
            None => inv_std.clone(),
        };
        let count = view.count(n, x.dtype)?;
        let shared = n.of2("Div", &a, &count);
        let shared = n.node("Neg", &[&shared], Vec::new());
        let offset = n.of2("Mul", &shared, &dbias);
        let slope = n.of2("Mul", &dweight, inv_std);
        let slope = n.of2("Mul", &slope, &shared);
        let rest = affine(n, &from_mean, (&slope, &offset), &x)?;
        let a = n.reshaped(&a, &view.weight)?;
        let own = n.of2("Mul", &dy, &a);
        let dx = n.of2("Add", &own, &rest);
        n.output(c, 0, dx);
    }
    n.output(c, 1, dweight);
    n.output(c, 2, dbias);
    Ok(())
}

/// `dx = inv_std · (g − mean(g) − x̂ · mean(g · x̂))` with `g = dy · weight` (Ba et al., arXiv
/// 1607.06450); without `mean(g)` if the normalization subtracts no mean from x.
pub(super) fn norm_gradient(n: &mut Nodes, c: &Call) -> Written {
    let x = c.input(1)?.clone();
    let view = View::new(c, &x)?;
    let (dy, x_name) = (n.input(c, 0)?, n.input(c, 1)?);
    let dy = n.reshaped_from(&dy, &x.shape, &view.shape)?;
    let mut x_hat = n.reshaped_from(&x_name, &x.shape, &view.shape)?;
    if let Some(mean) = c.optional_id(3) {
        let mean = n.operand(mean);
        let mean = n.reshaped(&mean, &view.kept)?;
        x_hat = n.of2("Sub", &x_hat, &mean);
    }
    let inv_std = n.input(c, 4)?;
    let inv_std = n.reshaped(&inv_std, &view.kept)?;
    x_hat = n.of2("Mul", &x_hat, &inv_std);
    if c.output_id(0).is_some() {
        let g = match c.optional_id(2) {
            Some(id) => {
                let weight = n.operand(id);
                let weight = n.reshaped(&weight, &view.weight)?;
                n.of2("Mul", &dy, &weight)
            }
            None => dy.clone(),
        };
        let product = n.of2("Mul", &g, &x_hat);
        let product = n.reduced("ReduceMean", &product, &view.axes, true);
        let part = n.of2("Mul", &x_hat, &product);
        let mut rest = n.of2("Sub", &g, &part);
        if c.optional_id(3).is_some() {
            let g_mean = n.reduced("ReduceMean", &g, &view.axes, true);
            rest = n.of2("Sub", &rest, &g_mean);
        }
        let dx = n.of2("Mul", &rest, &inv_std);
        let dx = n.reshaped_from(&dx, &view.shape, &x.shape)?;
        n.output(c, 0, dx);
    }
    for position in [1, 2] {
        let Some(id) = c.output_id(position) else {
            continue;
        };
        let terms = match position {
            1 => n.of2("Mul", &dy, &x_hat),
            _ => dy.clone(),
        };
        let shape = n.graph.container(id).shape.clone();
        let of = (view.shape.as_slice(), x.dtype);
        let sum = match n.sum_of_rows(&terms, of, &view.others, &shape)? {
            Some(sum) => sum,
            None => {
                let sum = n.reduced("ReduceSum", &terms, &view.others, false);
                n.reshaped(&sum, &shape)?
            }
        };
        n.assign(id, sum);
    }
    Ok(())
}
