//! The attributes and shapes of a loss, and how it reads the target and the weight of a row.

use crate::index_space::Reads;
use crate::op::{Call, OpError, TensorType};
use crate::shape_rules::reciprocal;
use graph::{Binary, ContainerId, Expr, Index, Memlet, SymExpr};

/// PyTorch's number for targets that do not count.
const IGNORED: i64 = -100;

/// How the losses of rows become one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Combine {
    No,
    Mean,
    Sum,
}

/// The attributes and shapes of a loss.
pub(super) struct LossShapes {
    pub(super) x: TensorType,
    /// Dimension of the classes.
    pub(super) axis: usize,
    pub(super) rows: Vec<SymExpr>,
    /// Targets are probabilities.
    pub(super) soft: bool,
    pub(super) combine: Combine,
    pub(super) ignored: i64,
    pub(super) smoothing: f64,
}

/// The list without the entry of dimension `axis`.
pub(super) fn without<T: Clone>(list: &[T], axis: usize) -> Vec<T> {
    [&list[..axis], &list[axis + 1..]].concat()
}

impl LossShapes {
    /// `first` is the position of x among the inputs; target and weight follow.
    pub(super) fn new(call: &Call, first: usize, of_logits: bool) -> Result<LossShapes, OpError> {
        let (x, target) = (call.input(first)?.clone(), call.input(first + 1)?);
        if x.rank() == 0 || !x.dtype.is_float() {
            return Err(
                call.shape_error("scores must be floating-point, with a dimension of classes")
            );
        }
        let axis = usize::from(x.rank() > 1);
        let rows = without(&x.shape, axis);
        let soft = target.dtype.is_float();
        let expected = if soft { &x.shape } else { &rows };
        if target.shape != *expected || soft && !of_logits {
            return Err(call.shape_error(
                "targets must be classes, one for each row, or (cross entropy) probabilities",
            ));
        }
        if let Some(Some(w)) = call.inputs.get(first + 2)
            && w.shape != x.shape[axis..=axis]
        {
            return Err(call.shape_error("there must be one weight for each class"));
        }
        let combine = match call.str_or("reduction", "mean".into())?.as_str() {
            "none" => Combine::No,
            "mean" => Combine::Mean,
            "sum" => Combine::Sum,
            other => return Err(call.unsupported(format!("reduction `{other}`"))),
        };
        let smoothing = match of_logits {
            true => call.float_or("label_smoothing", 0.0)?,
            false => 0.0,
        };
        Ok(LossShapes {
            axis,
            rows,
            soft,
            combine,
            ignored: call.int_or("ignore_index", IGNORED)?,
            smoothing,
            x,
        })
    }

    fn n_classes(&self) -> &SymExpr {
        &self.x.shape[self.axis]
    }

    /// Smoothing spread over the classes: `s/C`.
    pub(super) fn even(&self) -> Expr {
        Expr::float(self.smoothing).mul(reciprocal(self.n_classes()))
    }

    pub(super) fn loss_shape(&self) -> Vec<SymExpr> {
        match self.combine {
            Combine::No => self.rows.clone(),
            _ => vec![],
        }
    }

    /// Index of x in a row, at the class another input of the tasklet names.
    pub(super) fn at_class(&self, row: &[SymExpr], class_input: usize) -> Vec<Index> {
        let mut index: Vec<Index> = row.iter().cloned().map(Index::At).collect();
        index.insert(self.axis, Index::Data(class_input));
        index
    }

    /// Reads the target of a row: its class, and whether it counts.
    pub(super) fn target(
        &self,
        reads: &mut Reads,
        target: ContainerId,
        row: &[SymExpr],
    ) -> (Expr, Expr) {
        let class = reads.at(target, row);
        let counts = Expr::binary(Binary::Ne, class.clone(), Expr::int(self.ignored));
        (class, counts)
    }
}

/// Reads the weight of the class that `class` (an input of the tasklet) names; 1 without weights.
pub(super) fn weight_of(
    reads: &mut Reads,
    weight: Option<ContainerId>,
    class: &Expr,
) -> Option<Expr> {
    let (weight, Expr::In(class)) = (weight?, class) else {
        return None;
    };
    let mut memlet = Memlet::new(weight, []).or_fill(0.0);
    memlet.subset.push(Index::Data(*class));
    Some(reads.memlet(memlet))
}
