//! Normalizations and their gradients.

use super::nodes::{Nodes, Refusal, float, int};
use super::rules::Written;
use graph::{DType, Scalar, SymExpr};
use ops::Call;

/// The axes that a normalization reduces, and the shape in which its weights broadcast to x.
struct Normalized {
    axes: Vec<i64>,
    /// Axes that a weight's gradient sums.
    others: Vec<i64>,
    weight: Vec<SymExpr>,
    /// Sizes of x with 1 along the axes.
    kept: Vec<SymExpr>,
}

fn normalized(c: &Call, x: &ops::TensorType) -> Result<Normalized, Refusal> {
    let rank = x.rank() as i64;
    let is_batch = c.library.op.starts_with("batch_norm");
    let axes: Vec<i64> = if is_batch {
        (0..rank).filter(|d| *d != 1).collect()
    } else {
        (rank - c.int("axes")?..rank).collect()
    };
    let one = || SymExpr::constant(1);
    let along = |d: &i64| axes.contains(d);
    let size = |d: i64, keep: bool| {
        if keep {
            x.shape[d as usize].clone()
        } else {
            one()
        }
    };
    let weight = match is_batch {
        true => (1..rank).map(|d| size(d, d == 1)).collect(),
        false => axes.iter().map(|d| size(*d, true)).collect(),
    };
    Ok(Normalized {
        weight,
        kept: (0..rank).map(|d| size(d, !along(&d))).collect(),
        others: if is_batch {
            axes.clone()
        } else {
            (0..rank).filter(|d| !along(d)).collect()
        },
        axes,
    })
}

pub(super) fn batch_norm(n: &mut Nodes, c: &Call) -> Written {
    let x = c.input(0)?.clone();
    let plan = normalized(c, &x)?;
    let name = n.input(c, 0)?;
    let mean = n.reduced("ReduceMean", &name, &plan.axes, true);
    let centered = n.of2("Sub", &name, &mean);
    let squares = n.of2("Mul", &centered, &centered);
    let var = n.reduced("ReduceMean", &squares, &plan.axes, true);
    let eps = n.number(Scalar::Float(c.float_or("eps", 1e-5)?), x.dtype);
    let shifted = n.of2("Add", &var, &eps);
    let std = n.node("Sqrt", &[&shifted], Vec::new());
    let inv_std = n.node("Reciprocal", &[&std], Vec::new());
    let mut y = n.of2("Mul", &centered, &inv_std);
    for (position, op) in [(1, "Mul"), (2, "Add")] {
        if let Some(id) = c.optional_id(position) {
            let weight = n.operand(id);
            let weight = n.reshaped(&weight, &plan.weight)?;
            y = n.of2(op, &y, &weight);
        }
    }
    n.output(c, 0, y);
    let channels = [x.shape[1].clone()];
    for (position, value) in [(1, &mean), (2, &inv_std), (3, &var)] {
        if c.output_id(position).is_some() {
            let flat = n.reshaped(value, &channels)?;
            n.output(c, position, flat);
        }
    }
    Ok(())
}

pub(super) fn batch_norm_inference(n: &mut Nodes, c: &Call) -> Written {
    let x = c.input(0)?.clone();
    let channels = [x.shape[1].clone()];
    let x_name = n.input(c, 0)?;
    let mut inputs = vec![x_name];
    for (position, value) in [(1, 1.0), (2, 0.0)] {
        inputs.push(match c.optional_id(position) {
            Some(id) => n.operand(id),
            None => {
                let number = n.number(Scalar::Float(value), x.dtype);
                let shape = n.shape(&channels)?;
                n.of2("Expand", &number, &shape)
            }
        });
    }
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
            // The operator gives its statistics in single precision.
            let value = n.cast(value, DType::F32, container.dtype);
            let value = n.reshaped(&value, &container.shape)?;
            n.assign(id, value);
        }
    }
    n.output(c, 0, made.remove(0));
    Ok(())
}

/// `dx = inv_std · (g − mean(g) − x̂ · mean(g · x̂))` with `g = dy · weight` (Ioffe and Szegedy,
/// arXiv 1502.03167; Ba et al., arXiv 1607.06450).
pub(super) fn norm_gradient(n: &mut Nodes, c: &Call) -> Written {
    let x = c.input(1)?.clone();
    let plan = normalized(c, &x)?;
    let (dy, x_name) = (n.input(c, 0)?, n.input(c, 1)?);
    let (mean, inv_std) = (n.input(c, 3)?, n.input(c, 4)?);
    let mean = n.reshaped(&mean, &plan.kept)?;
    let inv_std = n.reshaped(&inv_std, &plan.kept)?;
    let centered = n.of2("Sub", &x_name, &mean);
    let x_hat = n.of2("Mul", &centered, &inv_std);
    if c.output_id(0).is_some() {
        let g = match c.optional_id(2) {
            Some(id) => {
                let weight = n.operand(id);
                let weight = n.reshaped(&weight, &plan.weight)?;
                n.of2("Mul", &dy, &weight)
            }
            None => dy.clone(),
        };
        let g_mean = n.reduced("ReduceMean", &g, &plan.axes, true);
        let product = n.of2("Mul", &g, &x_hat);
        let product = n.reduced("ReduceMean", &product, &plan.axes, true);
        let part = n.of2("Mul", &x_hat, &product);
        let rest = n.of2("Sub", &g, &g_mean);
        let rest = n.of2("Sub", &rest, &part);
        let dx = n.of2("Mul", &rest, &inv_std);
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
        let sum = n.reduced("ReduceSum", &terms, &plan.others, false);
        let shape = n.graph.container(id).shape.clone();
        let sum = n.reshaped(&sum, &shape)?;
        n.assign(id, sum);
    }
    Ok(())
}
