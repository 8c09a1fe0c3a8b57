//! What a kernel computes, as far as its time depends on it: counted where the kernel is lowered, from its maps.
//! Predicts nothing.

use graph::{Expr, Node, NodeKind};

/// Operations of a random number besides those that fusion counts: ten rounds of wide multiplications.
const DRAW: u64 = 180;

/// What a kernel computes, as far as its time depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelCost {
    /// Nanoseconds of a contraction by the model that chose its blocking; they include part of the time for its bytes.
    pub product_ns: u64,
    /// Operations of loops and of what ends a contraction, in units of the cheapest: an exponential counts as
    /// many.
    pub loop_operations: u64,
    /// Points at which loops evaluate expressions.
    pub points: u64,
}

impl KernelCost {
    /// The work of both.
    pub(super) fn plus(self, other: KernelCost) -> KernelCost {
        KernelCost {
            product_ns: self.product_ns.saturating_add(other.product_ns),
            loop_operations: self.loop_operations.saturating_add(other.loop_operations),
            points: self.points.saturating_add(other.points),
        }
    }
}

/// The work of loops that are evaluated `times` times.
pub(super) fn work(node: &Node, times: u64) -> KernelCost {
    match &node.kind {
        NodeKind::Library(_) => KernelCost::default(),
        NodeKind::Map(map) => {
            let size = |p: &graph::Param| p.size.as_const().unwrap_or(1).max(0) as u64;
            let points = map.params.iter().map(size).fold(times, u64::saturating_mul);
            let each = map.body.iter().map(|n| work(n, points));
            each.fold(KernelCost::default(), KernelCost::plus)
        }
        NodeKind::Tasklet(tasklet) => {
            let each = tasklet.outputs.iter().map(|(memlet, expr)| {
                let mut n = u64::from(memlet.conflict.is_some()) + u64::from(expr.cost());
                expr.visit(&mut |e| n += u64::from(matches!(e, Expr::Uniform(..))) * DRAW);
                n
            });
            KernelCost {
                product_ns: 0,
                loop_operations: each.sum::<u64>().saturating_mul(times),
                points: times,
            }
        }
    }
}

/// Number of scalar functions that a node evaluates when it runs `times` times, with combinations of its conflict
/// resolutions.
pub fn operations(node: &Node, times: u64) -> u64 {
    match &node.kind {
        NodeKind::Library(_) => 0,
        NodeKind::Map(map) => {
            let size = |p: &graph::Param| p.size.as_const().unwrap_or(1).max(0) as u64;
            let points = map.params.iter().map(size).fold(times, u64::saturating_mul);
            map.body.iter().map(|n| operations(n, points)).sum()
        }
        NodeKind::Tasklet(tasklet) => {
            let each = tasklet.outputs.iter().map(|(memlet, expr)| {
                let mut n = u64::from(memlet.conflict.is_some());
                expr.visit(&mut |e| {
                    n += u64::from(matches!(
                        e,
                        Expr::Unary(..) | Expr::Binary(..) | Expr::Select(..) | Expr::Uniform(..)
                    ));
                });
                n
            });
            each.sum::<u64>().saturating_mul(times)
        }
    }
}
