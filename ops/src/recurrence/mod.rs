//! Recurrences over time, without the products of their inputs, and their gradients.
//!
//! With a cell ([`graph::Cell`]) of `G` gates and states `s_0, s_1, …` of width `H`, step `t` computes
//! `q_t = s_0[t−1]·Wᵀ + b` and the cell's values of `x_t`, `q_t` and the states before. Backwards in time,
//! [`graph::CellGradient`] gives the gradients of `x_t` and `q_t`; `dq_t·W` is added to the gradient of the state
//! before. Gradients of `W`, `b` and of what `x` is made of are ordinary products and sums over all steps, so they do
//! not wait for one another. Expansion unrolls the steps; a target may keep the node whole (`compute_by`).
//!
//! With `reverse`, time runs from the last step to the first.
//!
//! Sources: `torch.nn.LSTM`, `torch.nn.GRU`, `torch.nn.RNN`.

mod backward;
pub mod cells;
mod forward;
mod unrolled;

pub use backward::RecurrenceGradient;
pub use forward::Recurrence;

use crate::op::{Call, OpError, TensorType};
use crate::reference::constant_shape;
use graph::{DType, Expr, Scalar, SymExpr, Tensor};

/// Steps, rows and width, and the type of the elements.
struct Sizes {
    t: SymExpr,
    b: SymExpr,
    h: SymExpr,
    dtype: DType,
}

impl Sizes {
    /// The sizes of the operand `[T, B, …]` and the weights at positions `all` and `w`. Checks every input against the
    /// shape that `expected` gives.
    fn new(
        call: &Call,
        (all, w): (usize, usize),
        expected: &dyn Fn(&Sizes) -> Vec<Vec<SymExpr>>,
    ) -> Result<Self, OpError> {
        let (x, w) = (call.input(all)?, call.input(w)?);
        if x.rank() != 3 || w.rank() != 2 {
            return Err(call.shape_error("steps of rank 3 and weights of rank 2 expected"));
        }
        let sizes = Sizes {
            t: x.shape[0].clone(),
            b: x.shape[1].clone(),
            h: w.shape[1].clone(),
            dtype: x.dtype,
        };
        for (n, shape) in expected(&sizes).into_iter().enumerate() {
            let given = call.inputs.get(n).and_then(Option::as_ref);
            if given.is_some_and(|given| given.shape != shape) {
                return Err(call.shape_error(format!("input {n} does not fit the others")));
            }
        }
        Ok(sizes)
    }

    fn times(&self, n: usize) -> SymExpr {
        self.h.clone() * SymExpr::constant(n as i64)
    }

    fn state(&self) -> Vec<SymExpr> {
        vec![self.b.clone(), self.h.clone()]
    }

    /// `[T, B, n·H]`.
    fn all(&self, n: usize) -> Vec<SymExpr> {
        vec![self.t.clone(), self.b.clone(), self.times(n)]
    }

    fn typed(&self, shapes: Vec<Vec<SymExpr>>) -> Vec<TensorType> {
        let typed = |shape| TensorType::new(self.dtype, shape);
        shapes.into_iter().map(typed).collect()
    }

    /// `[T, B, H]` as constants.
    fn constants(&self, call: &Call) -> Result<[usize; 3], OpError> {
        let shape = constant_shape(call, &self.all(1))?;
        Ok([shape[0], shape[1], shape[2]])
    }
}

/// The order of steps in time.
#[derive(Clone, Copy)]
struct Order {
    n_steps: i64,
    reverse: bool,
}

impl Order {
    fn from_call(call: &Call, n_steps: i64) -> Result<Self, OpError> {
        let reverse = call.bool_or("reverse", false)?;
        Ok(Order { n_steps, reverse })
    }

    /// Positions of the steps in the arrays, in order of time.
    fn places(self) -> Vec<i64> {
        let forward = 0..self.n_steps;
        match self.reverse {
            true => forward.rev().collect(),
            false => forward.collect(),
        }
    }

    /// Position of the step before the one at `t`; `None` for the first in time.
    fn before(self, t: i64) -> Option<i64> {
        let before = if self.reverse { t + 1 } else { t - 1 };
        (0..self.n_steps).contains(&before).then_some(before)
    }

    /// Puts values that are in order of time into the order of the arrays.
    fn in_place<T>(self, mut values: Vec<T>) -> Vec<T> {
        if self.reverse {
            values.reverse();
        }
        values
    }
}

fn evaluated(e: &Expr, inputs: &[f64]) -> f64 {
    let given: Vec<Scalar> = inputs.iter().map(|x| Scalar::Float(*x)).collect();
    e.eval(&given, &|_| None).map_or(f64::NAN, Scalar::as_f64)
}

fn tensors(call: &Call, types: &[TensorType], data: Vec<Vec<f64>>) -> Result<Vec<Tensor>, OpError> {
    let typed = types.iter().zip(data);
    typed
        .map(|(ty, data)| {
            let shape = constant_shape(call, &ty.shape)?;
            Ok(Tensor::from_f64(ty.dtype, &shape, data))
        })
        .collect()
}
