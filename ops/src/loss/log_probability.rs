//! Logarithms of the probabilities of classes, from two stored numbers for each row, and their weighted
//! sums.

use super::shapes::{LossShapes, without};
use crate::index_space::{IndexSpace, Reads, combine, write};
use crate::op::attrs;
use graph::{Attr, Attrs, Builder, ContainerId, Expr, Library, Reduction, SymExpr};

/// Containers of the parts of `ln Σ_c e^(x_c) = max + log_sum`, `[N, …]`.
#[derive(Clone, Copy)]
pub(super) struct Normalizer {
    pub(super) max: ContainerId,
    pub(super) log_sum: ContainerId,
}

impl Normalizer {
    /// `l_c = (x_c − max) − log_sum`, in this order.
    pub(super) fn log_probability(self, reads: &mut Reads, score: Expr, row: &[SymExpr]) -> Expr {
        let (max, log_sum) = (reads.at(self.max, row), reads.at(self.log_sum, row));
        score.sub(max).sub(log_sum)
    }
}

impl LossShapes {
    /// Appends maximum and log_sum of each row.
    pub(super) fn append_normalizer(
        &self,
        builder: &mut Builder,
        x: ContainerId,
        [max, log_sum]: [Option<ContainerId>; 2],
    ) -> Normalizer {
        let mut row = |name: &str, id: Option<ContainerId>| {
            id.unwrap_or_else(|| builder.transient(name, self.x.dtype, &self.rows))
        };
        let (greatest, sum) = (row("greatest", None), row("sum", None));
        let (max, log_sum) = (row("max", max), row("log_sum", log_sum));
        let mut library = |op: &str, attrs: Attrs, from: ContainerId, to: ContainerId| {
            builder.library(Library {
                op: op.into(),
                attrs,
                inputs: vec![Some(from)],
                outputs: vec![Some(to)],
            });
        };
        let list = attrs([
            ("kind", Attr::Str("max".into())),
            ("axes", Attr::Ints(vec![self.axis as i64])),
        ]);
        library("reduce", list, x, greatest);
        // Any shift gives the same loss, so its derivative is 0.
        library("stop_gradient", Attrs::new(), greatest, max);
        let space = IndexSpace::over(&self.x.shape);
        let at = space.indices();
        let row = without(&at, self.axis);
        let mut reads = Reads::default();
        let term = reads.at(x, &at).sub(reads.at(max, &row)).exp();
        space.append(
            builder,
            reads,
            vec![combine(Reduction::Sum, sum, &row, term)],
        );
        let space = IndexSpace::over(&self.rows);
        let row = space.indices();
        let mut reads = Reads::default();
        let value = reads.at(sum, &row).log();
        space.append(builder, reads, vec![write(log_sum, &row, value)]);
        Normalizer { max, log_sum }
    }

    /// Appends `out[row] −= w_c·t_c·l_c`. For smoothing `t` is absent, and counts as 1.
    pub(super) fn append_soft(
        &self,
        builder: &mut Builder,
        (x, normalizer, weight): (ContainerId, Normalizer, Option<ContainerId>),
        target: Option<ContainerId>,
        (out, factor): (ContainerId, Expr),
    ) {
        let space = IndexSpace::over(&self.x.shape);
        let at = space.indices();
        let row = without(&at, self.axis);
        let mut reads = Reads::default();
        let score = reads.at(x, &at);
        let log = normalizer.log_probability(&mut reads, score, &row);
        let mut value = log.neg().mul(factor);
        if let Some(t) = target {
            let smoothed = reads.at(t, &at).mul(Expr::float(1.0 - self.smoothing));
            value = value.mul(match self.smoothing > 0.0 {
                true => smoothed.add(self.even()),
                false => smoothed,
            });
        }
        if let Some(w) = weight {
            value = value.mul(reads.at(w, &at[self.axis..=self.axis]));
        }
        let index = if builder.shape(out).is_empty() {
            vec![]
        } else {
            row
        };
        space.append(
            builder,
            reads,
            vec![combine(Reduction::Sum, out, &index, value)],
        );
    }
}
