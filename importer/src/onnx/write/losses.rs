//! Losses over classes and their gradients.

use super::nodes::{Nodes, Refusal, int, text};
use super::rules::Written;
use graph::{ContainerId, DType, Scalar, SymExpr};
use ops::Call;

/// What both passes know of the targets.
struct Targets {
    /// Classes, those that do not count replaced by 0.
    class: String,
    /// Whether a row does not count.
    skip: String,
    /// The weight of each row's class; 0 where it does not count.
    weight: String,
    /// The classes' weights as they broadcast to x.
    weights: Option<String>,
    smoothing: f64,
    zero: String,
}

/// The targets of a loss whose x, target and weight are the inputs from `first`.
fn targets(n: &mut Nodes, c: &Call, first: usize) -> Result<Targets, Refusal> {
    let (x, target) = (c.input(first)?.clone(), c.input(first + 1)?.clone());
    if target.dtype.is_float() {
        return Err(Refusal("probabilities as targets".into()));
    }
    if x.rank() < 2 {
        return Err(Refusal(
            "a loss of one sample without a batch dimension".into(),
        ));
    }
    let name = n.input(c, first + 1)?;
    let ignored = Scalar::Int(c.int_or("ignore_index", -100)?);
    let ignored = n.number(ignored, target.dtype);
    let first_class = n.number(Scalar::Int(0), target.dtype);
    let skip = n.of2("Equal", &name, &ignored);
    let class = n.node("Where", &[&skip, &first_class, &name], Vec::new());
    let zero = n.number(Scalar::Float(0.0), x.dtype);
    let own = c.optional_id(first + 2);
    let of_class = match own {
        Some(id) => {
            let weights = n.operand(id);
            n.node("Gather", &[&weights, &class], vec![int("axis", 0)])
        }
        None => n.number(Scalar::Float(1.0), x.dtype),
    };
    let mut weight = n.node("Where", &[&skip, &zero, &of_class], Vec::new());
    if own.is_none() {
        // Where no row is skipped, the value has no dimension yet.
        let shape = n.shape(&target.shape)?;
        weight = n.of2("Expand", &weight, &shape);
    }
    let smoothing = c.float_or("label_smoothing", 0.0)?;
    let weights = own.filter(|_| smoothing != 0.0);
    let weights = weights
        .map(|id| along_classes(n, id, x.rank()))
        .transpose()?;
    Ok(Targets {
        class,
        skip,
        weight,
        weights,
        smoothing,
        zero,
    })
}

/// A vector of classes that broadcasts to x of that rank.
fn along_classes(n: &mut Nodes, id: ContainerId, rank: usize) -> Result<String, Refusal> {
    let mut shape = n.graph.container(id).shape.clone();
    shape.resize(rank - 1, SymExpr::constant(1));
    let value = n.operand(id);
    n.reshaped(&value, &shape)
}

impl Targets {
    fn number(&self, n: &mut Nodes, value: f64, like: &ops::TensorType) -> String {
        n.number(Scalar::Float(value), like.dtype)
    }

    /// `(1 − s)·loss + s/C·Σ_c w_c·(log_sum − (x_c − max))`, 0 where a row does not count.
    fn smoothed(
        &self,
        n: &mut Nodes,
        x_type: &ops::TensorType,
        (loss, log_sum, shifted): (&str, &str, &str),
    ) -> String {
        let mut terms = n.of2("Sub", log_sum, shifted);
        if let Some(weights) = &self.weights {
            terms = n.of2("Mul", &terms, weights);
        }
        let mean = n.reduced("ReduceMean", &terms, &[1], false);
        let even = self.number(n, self.smoothing, x_type);
        let even = n.of2("Mul", &mean, &even);
        let even = n.node("Where", &[&self.skip, &self.zero, &even], Vec::new());
        let rest = self.number(n, 1.0 - self.smoothing, x_type);
        let hard = n.of2("Mul", loss, &rest);
        n.of2("Add", &hard, &even)
    }

    /// `g·(p·A − s/C·w)`, with `hard = g·(1 − s)·w_t`.
    fn without_the_class(
        &self,
        n: &mut Nodes,
        x_type: &ops::TensorType,
        (p, g, hard): (&str, &str, &str),
    ) -> Result<String, Refusal> {
        let one = n.ints(&[1]);
        let hard = n.of2("Unsqueeze", hard, &one);
        if self.smoothing == 0.0 {
            return Ok(n.of2("Mul", p, &hard));
        }
        let even = self.number(n, self.smoothing, x_type);
        let g = n.node("Where", &[&self.skip, &self.zero, g], Vec::new());
        let row = n.of2("Mul", &g, &even);
        let row = n.of2("Unsqueeze", &row, &one);
        let n_classes = n.size(&x_type.shape[1])?;
        let n_classes = n.cast(n_classes, DType::I64, x_type.dtype);
        let each = n.of2("Div", &row, &n_classes);
        let (spread, all) = match &self.weights {
            Some(weights) => {
                let mean = n.reduced("ReduceMean", weights, &[0], true);
                (n.of2("Mul", &each, weights), n.of2("Mul", &row, &mean))
            }
            None => (each, row),
        };
        let scale = n.of2("Add", &hard, &all);
        let dx = n.of2("Mul", p, &scale);
        Ok(n.of2("Sub", &dx, &spread))
    }
}

/// Cross-entropy and negative log likelihood, which takes x for logarithms of probabilities.
pub(super) fn class_loss(n: &mut Nodes, c: &Call) -> Written {
    let x_type = c.input(0)?.clone();
    let t = targets(n, c, 0)?;
    let x = n.input(c, 0)?;
    let one = n.ints(&[1]);
    let class = n.of2("Unsqueeze", &t.class, &one);
    let of_logits = c.library.op == "cross_entropy";
    let max = of_logits.then(|| n.reduced("ReduceMax", &x, &[1], true));
    let shifted = max.as_ref().map_or(x.clone(), |max| n.of2("Sub", &x, max));
    let log_sum = of_logits.then(|| n.reduced("ReduceLogSumExp", &shifted, &[1], true));
    let picked = n.node("GatherElements", &[&shifted, &class], vec![int("axis", 1)]);
    let loss = match &log_sum {
        Some(log_sum) => n.of2("Sub", log_sum, &picked),
        None => n.node("Neg", &[&picked], Vec::new()),
    };
    let loss = n.of2("Squeeze", &loss, &one);
    let mut loss = n.of2("Mul", &loss, &t.weight);
    if let (Some(log_sum), true) = (&log_sum, t.smoothing != 0.0) {
        loss = t.smoothed(n, &x_type, (&loss, log_sum, &shifted));
    }
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
    for (position, part) in [(2, max), (3, log_sum)] {
        if let Some(part) = part.filter(|_| c.output_id(position).is_some()) {
            let part = n.of2("Squeeze", &part, &one);
            n.output(c, position, part);
        }
    }
    Ok(())
}

/// With `p = softmax(x)` and the row's gradient g: `g·(p·A − (1 − s)·w_t·onehot(t) − s/C·w)`, in which
/// `A = (1 − s)·w_t + s/C·Σ w`. The term of the one class is a scatter. For negative log likelihood it
/// is the only term.
pub(super) fn class_loss_gradient(n: &mut Nodes, c: &Call) -> Written {
    let x_type = c.input(1)?.clone();
    let t = targets(n, c, 1)?;
    let mut g = n.input(c, 0)?;
    let one = n.ints(&[1]);
    if c.str_or("reduction", "mean".into())? == "mean" {
        let total = n.input(c, 4)?;
        g = n.of2("Div", &g, &total);
    }
    let mut hard = n.of2("Mul", &t.weight, &g);
    if t.smoothing != 0.0 {
        let rest = t.number(n, 1.0 - t.smoothing, &x_type);
        hard = n.of2("Mul", &hard, &rest);
    }
    let dx = match c.library.op == "cross_entropy_gradient" {
        true => {
            let mut log = n.input(c, 1)?;
            for position in [5, 6] {
                let part = n.input(c, position)?;
                let part = n.of2("Unsqueeze", &part, &one);
                log = n.of2("Sub", &log, &part);
            }
            let p = n.node("Exp", &[&log], Vec::new());
            t.without_the_class(n, &x_type, (&p, &g, &hard))?
        }
        false => n.zeros(&x_type.shape, x_type.dtype)?,
    };
    let class = n.of2("Unsqueeze", &t.class, &one);
    let less = n.node("Neg", &[&hard], Vec::new());
    let less = n.of2("Unsqueeze", &less, &one);
    let attributes = vec![int("axis", 1), text("reduction", "add")];
    let dx = n.node("ScatterElements", &[&dx, &class, &less], attributes);
    n.output(c, 0, dx);
    Ok(())
}
