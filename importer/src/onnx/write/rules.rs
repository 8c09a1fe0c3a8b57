//! How each of our operators is written: one row for each.
//!
//! Owns the table, and the rules of element-wise operators, movement, reductions and softmax; families
//! with more to say have files of their own.

use super::arranged::arranged;
use super::nodes::{Nodes, Refusal, int, int_list, text};
use super::scalar::Operands;
use super::{convolutions, lookups, losses, norms, products, windows};
use graph::{Binary, DType, Expr, Lifetime, Scalar, SymExpr};
use ops::Call;

pub(super) type Written = Result<(), Refusal>;
pub(super) type Rule = fn(&mut Nodes, &Call) -> Written;

/// The rule for one of our operators.
pub(super) fn rule_of(op: &str) -> Option<Rule> {
    RULES.iter().find(|(name, _)| *name == op).map(|row| row.1)
}

const RULES: &[(&str, Rule)] = &[
    ("elementwise", elementwise),
    ("reshape", reshape),
    ("permute", |n, c| {
        let order = int_list("perm", &c.ints("order")?);
        n.apply(c, "Transpose", vec![order])
    }),
    ("expand", |n, c| {
        let shape = n.shape(&c.sizes("shape")?)?;
        n.apply_with(c, "Expand", &[shape], Vec::new())
    }),
    ("slice", slice),
    ("flip", flip),
    ("tile", |n, c| {
        let repeats = n.shape(&c.sizes("repeats")?)?;
        n.apply_with(c, "Tile", &[repeats], Vec::new())
    }),
    ("concat", |n, c| {
        let axis = int("axis", c.int("axis")?);
        n.apply(c, "Concat", vec![axis])
    }),
    ("pad", pad),
    ("reduce", reduce),
    ("arg_reduce", lookups::arg_reduce),
    ("topk", lookups::topk),
    ("scatter_add", lookups::scatter_add),
    ("iota", lookups::iota),
    ("one_hot", lookups::one_hot),
    ("cumsum", |n, c| {
        let axis = n.number(Scalar::Int(c.int("axis")?), DType::I64);
        let reverse = int("reverse", c.bool_or("reverse", false)?.into());
        n.apply_with(c, "CumSum", &[axis], vec![reverse])
    }),
    ("full", full),
    ("stop_gradient", |n, c| n.apply(c, "Identity", Vec::new())),
    ("straight_through", |n, c| {
        let value = n.input(c, 0)?;
        n.output(c, 0, value);
        Ok(())
    }),
    ("dropout", dropout),
    ("einsum", products::einsum),
    ("conv", convolutions::conv),
    ("conv_transpose", convolutions::conv_transpose),
    ("conv_data_gradient", convolutions::conv_data_gradient),
    ("conv_weight_gradient", convolutions::conv_weight_gradient),
    ("max_pool", windows::max_pool),
    ("max_pool_gradient", windows::max_pool_gradient),
    ("average_pool", windows::average_pool),
    ("average_pool_gradient", windows::average_pool_gradient),
    ("adaptive_average_pool", windows::adaptive_average_pool),
    ("batch_norm", norms::batch_norm),
    ("batch_norm_inference", norms::batch_norm_inference),
    ("layer_norm", norms::layer_norm),
    ("group_norm", norms::composed_norm),
    ("rms_norm", norms::composed_norm),
    ("batch_norm_gradient", norms::batch_norm_gradient),
    ("group_norm_gradient", norms::norm_gradient),
    ("rms_norm_gradient", norms::norm_gradient),
    ("layer_norm_gradient", norms::norm_gradient),
    ("softmax", softmax),
    ("log_softmax", |n, c| {
        let axis = int("axis", c.int("axis")?);
        n.apply(c, "LogSoftmax", vec![axis])
    }),
    ("softmax_gradient", |n, c| softmax_gradient(n, c, false)),
    ("log_softmax_gradient", |n, c| softmax_gradient(n, c, true)),
    ("cross_entropy", losses::class_loss),
    ("nll_loss", losses::class_loss),
    ("cross_entropy_gradient", losses::class_loss_gradient),
    ("nll_loss_gradient", losses::class_loss_gradient),
    ("gather", lookups::gather),
    ("gather_gradient", lookups::gather_gradient),
    ("gather_elements", |n, c| {
        let axis = int("axis", c.int("axis")?);
        n.apply(c, "GatherElements", vec![axis])
    }),
];

/// What rules say most often.
impl Nodes<'_> {
    /// The operand at a position.
    pub(super) fn input(&mut self, c: &Call, position: usize) -> Result<String, Refusal> {
        Ok(self.operand(c.input_id(position)?))
    }

    /// The output at a position stands for this value, if somebody needs it.
    pub(super) fn output(&mut self, c: &Call, position: usize, value: String) {
        if let Some(id) = c.output_id(position) {
            self.assign(id, value);
        }
    }

    /// The call as one node of all its inputs.
    pub(super) fn apply(
        &mut self,
        c: &Call,
        op: &str,
        attributes: Vec<super::nodes::Attribute>,
    ) -> Written {
        self.apply_with(c, op, &[], attributes)
    }

    /// The same with further operands.
    pub(super) fn apply_with(
        &mut self,
        c: &Call,
        op: &str,
        more: &[String],
        attributes: Vec<super::nodes::Attribute>,
    ) -> Written {
        let mut inputs = Vec::new();
        for position in 0..c.inputs.len() {
            inputs.push(self.input(c, position)?);
        }
        inputs.extend_from_slice(more);
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        let value = self.node(op, &inputs, attributes);
        self.output(c, 0, value);
        Ok(())
    }

    /// `op(a, b)`.
    pub(super) fn of2(&mut self, op: &str, a: &str, b: &str) -> String {
        self.node(op, &[a, b], Vec::new())
    }

    /// The value under another shape, in which one dynamic size may be written as -1.
    pub(super) fn reshaped(&mut self, value: &str, shape: &[SymExpr]) -> Result<String, Refusal> {
        let mut from = value.to_string();
        while let Some(maker) = self.maker(&from).filter(|m| m.op_type == "Reshape") {
            from = maker.input[0].clone();
        }
        if self.shapes.get(&from).is_some_and(|known| known == shape) {
            return Ok(from);
        }
        let (operand, attributes) = self.target(shape)?;
        let made = self.node("Reshape", &[&from, &operand], attributes);
        self.shapes.insert(made.clone(), shape.to_vec());
        Ok(made)
    }

    /// The second operand of `Reshape` and its attributes for a shape.
    pub(super) fn target(
        &mut self,
        shape: &[SymExpr],
    ) -> Result<(String, Vec<super::nodes::Attribute>), Refusal> {
        let sizes = shape.iter().map(|size| size.as_const().filter(|n| *n > 0));
        let sizes: Vec<Option<i64>> = sizes.collect();
        if sizes.iter().flatten().count() + 1 >= shape.len() {
            let sizes: Vec<i64> = sizes.into_iter().map(|n| n.unwrap_or(-1)).collect();
            return Ok((self.ints(&sizes), Vec::new()));
        }
        // A size of 0 means 0 here, not the operand's own size at that place.
        Ok((self.shape(shape)?, vec![int("allowzero", 1)]))
    }

    /// The value of shape `from` under another shape, if it is another.
    pub(super) fn reshaped_from(
        &mut self,
        value: &str,
        from: &[SymExpr],
        to: &[SymExpr],
    ) -> Result<String, Refusal> {
        if from == to {
            return Ok(value.to_string());
        }
        self.reshaped(value, to)
    }

    /// `ReduceSum` or another reduction over these axes.
    pub(super) fn reduced(&mut self, op: &str, value: &str, axes: &[i64], keep: bool) -> String {
        if axes.is_empty() {
            // An empty list means all axes in the standard; here it means none.
            return value.to_string();
        }
        let axes = self.ints(axes);
        self.node(op, &[value, &axes], vec![int("keepdims", keep.into())])
    }

    /// The sum of a value of that shape and type over its leading dimensions, in the shape `to`: a row of
    /// ones times the value's rows, which runtimes compute several times as fast as `ReduceSum`. `None` for other
    /// axes, or if there is no such product.
    pub(super) fn sum_of_rows(
        &mut self,
        value: &str,
        (shape, dtype): (&[SymExpr], DType),
        axes: &[i64],
        to: &[SymExpr],
    ) -> Result<Option<String>, Refusal> {
        let leads = axes.iter().enumerate().all(|(d, axis)| d as i64 == *axis);
        let is_written = matches!(dtype, DType::F32 | DType::F64);
        if !leads || !is_written || axes.is_empty() || axes.len() >= shape.len() {
            return Ok(None);
        }
        let (summed, kept) = shape.split_at(axes.len());
        let (n_rows, n_columns) = (SymExpr::product(summed), SymExpr::product(kept));
        let one = self.number(Scalar::Float(1.0), dtype);
        let sizes = self.shape(&[SymExpr::constant(1), n_rows.clone()])?;
        let ones = self.of2("Expand", &one, &sizes);
        let rows = match shape.len() {
            2 => value.to_string(),
            _ => self.reshaped(value, &[n_rows, n_columns.clone()])?,
        };
        let sum = self.of2("MatMul", &ones, &rows);
        let row = vec![SymExpr::constant(1), n_columns];
        self.shapes.insert(sum.clone(), row);
        Ok(Some(self.reshaped(&sum, to)?))
    }
}

fn elementwise(n: &mut Nodes, c: &Call) -> Written {
    let Some(out) = c.output_id(0) else {
        return Ok(());
    };
    let (mut names, mut types, mut extents) = (Vec::new(), Vec::new(), Vec::new());
    for position in 0..c.inputs.len() {
        let input = c.input(position)?;
        names.push(n.input(c, position)?);
        types.push(input.dtype);
        let wide = input.shape.iter().filter(|size| size.as_const() != Some(1));
        extents.push(wide.count());
    }
    let container = n.graph.container(out);
    let expr = c.expr("expr")?;
    if let Some(value) = sum_without_node(n, c, &expr, container) {
        n.output(c, 0, value);
        return Ok(());
    }
    let is_plain = matches!(container.dtype, DType::F32 | DType::F64)
        && types.iter().all(|dtype| *dtype == container.dtype);
    let expr = if is_plain { arranged(&expr) } else { expr };
    let of = Operands {
        names: &names,
        types: &types,
        extents: &extents,
        shape: &container.shape,
    };
    let value = n.expression(&expr, container.dtype, &of)?;
    // Without an operand of the full shape, the value is smaller than the result.
    let rank = container.shape.len();
    let full = c
        .inputs
        .iter()
        .flatten()
        .any(|t| t.shape == container.shape);
    let value = if full || rank == 0 {
        value
    } else {
        let shape = n.shape(&container.shape)?;
        n.of2("Expand", &value, &shape)
    };
    n.output(c, 0, value);
    Ok(())
}

/// The value of a sum that needs no node of its own: a sum with zeros, or one that becomes the bias of a product.
fn sum_without_node(
    n: &mut Nodes,
    c: &Call,
    expr: &Expr,
    out: &graph::Container,
) -> Option<String> {
    let Expr::Binary(Binary::Add, a, b) = expr else {
        return None;
    };
    let (Expr::In(a), Expr::In(b)) = (a.as_ref(), b.as_ref()) else {
        return None;
    };
    for (of, with) in [(*a, *b), (*b, *a)] {
        let (of, with) = (c.optional_id(of)?, c.optional_id(with)?);
        let (x, y) = (n.graph.container(of), n.graph.container(with));
        if of == with || x.shape != out.shape || (x.dtype, y.dtype) != (out.dtype, out.dtype) {
            continue;
        }
        if let Lifetime::Constant(tensor) = &y.lifetime
            && tensor.to_f64().iter().all(|v| *v == 0.0)
        {
            return Some(n.operand(of));
        }
        if let Some(value) = n.take_bias(of, with) {
            return Some(value);
        }
    }
    None
}

fn reshape(n: &mut Nodes, c: &Call) -> Written {
    let x = n.input(c, 0)?;
    // In the result's own shape, -1 is already replaced.
    let shape = c.output_id(0).map(|id| n.graph.container(id).shape.clone());
    let value = n.reshaped(&x, &shape.unwrap_or_default())?;
    n.output(c, 0, value);
    Ok(())
}

fn slice(n: &mut Nodes, c: &Call) -> Written {
    let (start, stop) = (n.shape(&c.sizes("start")?)?, n.shape(&c.sizes("stop")?)?);
    let (axis, step) = (n.ints(&[c.int("axis")?]), n.ints(&[c.int_or("step", 1)?]));
    n.apply_with(c, "Slice", &[start, stop, axis, step], Vec::new())
}

fn flip(n: &mut Nodes, c: &Call) -> Written {
    let axes = c.ints("axes")?;
    let every = |value: i64| vec![value; axes.len()];
    let operands = [every(-1), every(i64::MIN), axes.clone(), every(-1)].map(|list| n.ints(&list));
    n.apply_with(c, "Slice", &operands, Vec::new())
}

fn pad(n: &mut Nodes, c: &Call) -> Written {
    let sizes = [c.sizes("low")?, c.sizes("high")?].concat();
    let pads = n.shape(&sizes)?;
    let mode = match c.str_or("mode", "constant".into())?.as_str() {
        "constant" => "constant",
        "reflect" => "reflect",
        "replicate" => "edge",
        other => return Err(Refusal(format!("padding mode `{other}`"))),
    };
    let value = Scalar::Float(c.float_or("value", 0.0)?);
    let value = n.number(value, c.input(0)?.dtype);
    n.apply_with(c, "Pad", &[pads, value], vec![text("mode", mode)])
}

fn reduce(n: &mut Nodes, c: &Call) -> Written {
    let op = match c.str("kind")?.as_str() {
        "sum" => "ReduceSum",
        "mean" => "ReduceMean",
        "prod" => "ReduceProd",
        "max" => "ReduceMax",
        "min" => "ReduceMin",
        "logsumexp" => "ReduceLogSumExp",
        "l1" => "ReduceL1",
        "l2" => "ReduceL2",
        "sumsq" => "ReduceSumSquare",
        other => return Err(Refusal(format!("the reduction `{other}`"))),
    };
    let x = c.input(0)?.clone();
    let dtype = c
        .output_id(0)
        .map_or(x.dtype, |id| n.graph.container(id).dtype);
    let operand = n.input(c, 0)?;
    let operand = n.cast(operand, x.dtype, dtype);
    let mut axes = c.ints_or("axes", Vec::new())?;
    if axes.is_empty() {
        axes = (0..x.rank() as i64).collect();
    }
    let out = c.output_id(0).map(|id| n.graph.container(id).shape.clone());
    let of = (x.shape.as_slice(), dtype);
    let sum = match out {
        Some(out) if op == "ReduceSum" => n.sum_of_rows(&operand, of, &axes, &out)?,
        _ => None,
    };
    let value = match sum {
        Some(sum) => sum,
        None if axes.is_empty() => operand,
        None => n.reduced(op, &operand, &axes, c.bool_or("keep", false)?),
    };
    n.output(c, 0, value);
    Ok(())
}

fn full(n: &mut Nodes, c: &Call) -> Written {
    let dtype = c.dtype("dtype")?;
    let value = match c.library.attrs.get("value") {
        Some(graph::Attr::Int(i)) => Scalar::Int(*i),
        _ => Scalar::Float(c.float("value")?),
    };
    let value = n.number(value, dtype);
    let shape = n.shape(&c.sizes("shape")?)?;
    let value = n.of2("Expand", &value, &shape);
    n.output(c, 0, value);
    Ok(())
}

/// The mask is made once and used wherever the same numbers are drawn again.
fn dropout(n: &mut Nodes, c: &Call) -> Written {
    if c.output_id(1).is_some() {
        return Err(Refusal("the mask as a result".into()));
    }
    let (p, id) = (c.float("p")?, c.int_or("id", 0)?);
    let x = n.input(c, 0)?;
    if let Some(mask) = n.masks.get(&id).cloned() {
        let dtype = c.input(0)?.dtype;
        let scale = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
        let (scale, zero) = (
            n.number(Scalar::Float(scale), dtype),
            n.number(Scalar::Float(0.0), dtype),
        );
        let scaled = n.of2("Mul", &x, &scale);
        let value = n.node("Where", &[&mask, &scaled, &zero], Vec::new());
        n.output(c, 0, value);
        return Ok(());
    }
    let ratio = n.number(Scalar::Float(p), DType::F32);
    let training = n.number(Scalar::Bool(true), DType::Bool);
    let mut made = n.nodes("Dropout", &[&x, &ratio, &training], 2, Vec::new());
    if let (Some(mask), Some(value)) = (made.pop(), made.pop()) {
        n.masks.insert(id, mask);
        n.output(c, 0, value);
    }
    Ok(())
}

fn softmax(n: &mut Nodes, c: &Call) -> Written {
    let axis = c.int("axis")?;
    let x = n.input(c, 0)?;
    let mut value = n.node("Softmax", &[&x], vec![int("axis", axis)]);
    if c.bool_or("safe", false)? {
        let dtype = c.input(0)?.dtype;
        let largest = n.reduced("ReduceMax", &x, &[axis], true);
        let nothing = n.number(Scalar::Float(f64::NEG_INFINITY), dtype);
        let empty = n.of2("Equal", &largest, &nothing);
        let zero = n.number(Scalar::Float(0.0), dtype);
        value = n.node("Where", &[&empty, &zero, &value], Vec::new());
    }
    n.output(c, 0, value);
    Ok(())
}

fn softmax_gradient(n: &mut Nodes, c: &Call, log: bool) -> Written {
    let rank = c.input(1)?.rank() as i64;
    let axis = [c.int("axis")?.rem_euclid(rank.max(1))];
    let (dy, y) = (n.input(c, 0)?, n.input(c, 1)?);
    let value = if log {
        let p = n.node("Exp", &[&y], Vec::new());
        let sum = n.reduced("ReduceSum", &dy, &axis, true);
        let part = n.of2("Mul", &p, &sum);
        n.of2("Sub", &dy, &part)
    } else {
        let in_rows = n.same_row_sums(&dy, &y).filter(|_| axis[0] == rank - 1);
        let (a, b) = in_rows.unwrap_or((dy.clone(), y.clone()));
        let product = n.of2("Mul", &a, &b);
        let sum = n.reduced("ReduceSum", &product, &axis, true);
        let centered = n.of2("Sub", &dy, &sum);
        n.of2("Mul", &centered, &y)
    };
    n.output(c, 0, value);
    Ok(())
}
