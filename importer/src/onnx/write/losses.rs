//! Cross-entropy and its gradient.

use super::nodes::{Nodes, Refusal, int};
use super::rules::Written;
use graph::{Scalar, Tensor};
use ops::Call;

/// Target classes with those that do not count replaced by 0, and each one's weight.
struct Targets {
    class: String,
    weight: String,
}

fn targets(n: &mut Nodes, c: &Call, weight: usize) -> Result<Targets, Refusal> {
    let (x, t) = (c.input(weight - 2)?.clone(), weight - 1);
    let target = c.input(t)?.clone();
    if target.dtype.is_float() {
        return Err(Refusal("probabilities as targets".into()));
    }
    if c.float_or("label_smoothing", 0.0)? != 0.0 {
        return Err(Refusal("label smoothing".into()));
    }
    if x.rank() < 2 {
        return Err(Refusal(
            "a loss of one sample without a batch dimension".into(),
        ));
    }
    let name = n.input(c, t)?;
    let ignored = Scalar::Int(c.int_or("ignore_index", -100)?);
    let ignored = n.number(ignored, target.dtype);
    let zero = n.number(Scalar::Int(0), target.dtype);
    let skip = n.of2("Equal", &name, &ignored);
    let class = n.node("Where", &[&skip, &zero, &name], Vec::new());
    let none = n.number(Scalar::Float(0.0), x.dtype);
    let of_class = match c.optional_id(weight) {
        Some(id) => {
            let weights = n.operand(id);
            n.node("Gather", &[&weights, &class], vec![int("axis", 0)])
        }
        None => n.number(Scalar::Float(1.0), x.dtype),
    };
    let mut weight = n.node("Where", &[&skip, &none, &of_class], Vec::new());
    // Without weights the value may have no dimension yet.
    let shape = n.shape(&target.shape)?;
    weight = n.of2("Expand", &weight, &shape);
    Ok(Targets { class, weight })
}

pub(super) fn cross_entropy(n: &mut Nodes, c: &Call) -> Written {
    let t = targets(n, c, 2)?;
    let x = n.input(c, 0)?;
    let lse = n.reduced("ReduceLogSumExp", &x, &[1], true);
    let one = n.ints(&[1]);
    let class = n.of2("Unsqueeze", &t.class, &one);
    let picked = n.node("GatherElements", &[&x, &class], vec![int("axis", 1)]);
    let loss = n.of2("Sub", &lse, &picked);
    let loss = n.of2("Squeeze", &loss, &one);
    let loss = n.of2("Mul", &loss, &t.weight);
    let all: Vec<i64> = (0..c.input(1)?.rank() as i64).collect();
    let total = n.reduced("ReduceSum", &t.weight, &all, false);
    let value = match c.str_or("reduction", "mean".into())?.as_str() {
        "none" => loss,
        "sum" => n.reduced("ReduceSum", &loss, &all, false),
        _ => {
            let sum = n.reduced("ReduceSum", &loss, &all, false);
            n.of2("Div", &sum, &total)
        }
    };
    n.output(c, 0, value);
    n.output(c, 1, total);
    let lse = n.of2("Squeeze", &lse, &one);
    n.output(c, 2, lse);
    Ok(())
}

/// `(softmax(x) − onehot(target)) · weight · dloss`, divided by the total for a mean.
pub(super) fn cross_entropy_gradient(n: &mut Nodes, c: &Call) -> Written {
    let x_type = c.input(1)?.clone();
    let t = targets(n, c, 3)?;
    let (dloss, x, lse) = (n.input(c, 0)?, n.input(c, 1)?, n.input(c, 5)?);
    let one = n.ints(&[1]);
    let lse = n.of2("Unsqueeze", &lse, &one);
    let shifted = n.of2("Sub", &x, &lse);
    let p = n.node("Exp", &[&shifted], Vec::new());
    let depth = n.size(&x_type.shape[1])?;
    let mut values = Tensor::zeros(x_type.dtype, &[2]);
    values.set(1, Scalar::Float(1.0));
    let values = n.constant(&values);
    let hot = n.node("OneHot", &[&t.class, &depth, &values], vec![int("axis", 1)]);
    let difference = n.of2("Sub", &p, &hot);
    let mut scale = n.of2("Mul", &t.weight, &dloss);
    if c.str_or("reduction", "mean".into())? == "mean" {
        let total = n.input(c, 4)?;
        scale = n.of2("Div", &scale, &total);
    }
    let scale = n.of2("Unsqueeze", &scale, &one);
    let dx = n.of2("Mul", &difference, &scale);
    n.output(c, 0, dx);
    Ok(())
}
