//! What every contraction does at each of its points, read off a tasklet.
//!
//! Owns the one definition of a sum over products by which fusion, layouts and kernels recognize
//! contractions. Never looks at sizes or at the map around it.

use crate::{Binary, Expr, Memlet, Reduction, Tasklet};

/// `out += a * b`: what every contraction does at each of its points.
#[derive(Clone, Copy, Debug)]
pub struct SummedProduct<'a> {
    /// The first factor.
    pub a: &'a Memlet,
    /// The second factor.
    pub b: &'a Memlet,
    /// Where products are added up.
    pub out: &'a Memlet,
}

impl Tasklet {
    /// The tasklet as a sum over products of two reads, if it is nothing else.
    pub fn summed_product(&self) -> Option<SummedProduct<'_>> {
        let [(out, Expr::Binary(Binary::Mul, x, y))] = self.outputs.as_slice() else {
            return None;
        };
        let (Expr::In(i), Expr::In(j)) = (&**x, &**y) else {
            return None;
        };
        if out.conflict != Some(Reduction::Sum) {
            return None;
        }
        let (a, b) = (self.inputs.get(*i)?, self.inputs.get(*j)?);
        Some(SummedProduct { a, b, out })
    }
}
