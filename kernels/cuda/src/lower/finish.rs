//! The rest of a product or a convolution that the libraries do themselves: a bias of each column or
//! channel, perhaps ReLU.
//!
//! Owns the condition, read off the values that the rest computes. The bias is added to the sum before
//! it is rounded to the product's type, so the result is at least as exact as from a product in memory.
//! Never maps GELU: cuBLASLt's is the tanh form. A sum that is NaN stays NaN by the graph's meaning;
//! the library's documentation does not say what its ReLU makes of one.

use super::epilogue::{Points, points};
use crate::vendor::{Finish, Operation};
use graph::{Binary, ContainerId, DType, Graph, Node, Scalar, Storage, SymExpr};
use kernels::emit::body::{self};
use kernels::emit::prepared;
use kernels::emit::values::{Address, Effect, Op, ValueId, Values};
use kernels::lower::LowerError;
use kernels::recognize::Recognized;

/// A rest that the library does itself.
pub(super) struct Biased {
    /// What it is.
    pub(super) finish: Finish,
    /// The vector that is added.
    pub(super) bias: ContainerId,
    /// What takes the product's place.
    pub(super) out: ContainerId,
}

/// The map `rest` as finish of an operation; `None` where it is something else.
///
/// # Errors
/// As for any map.
pub(super) fn of(
    graph: &Graph,
    rest: &Node,
    product: &Recognized,
    operation: &Operation,
) -> Result<Option<Biased>, LowerError> {
    let Some(biases) = operation.biases() else {
        return Ok(None);
    };
    let [_, _, dtype] = operation.dtypes();
    let kernel = prepared(body::kernel_of(graph, rest, true)?);
    let Some(points) = points(&kernel, product.out) else {
        return Ok(None);
    };
    let values = Values::new(&points.loops, points.statements, &kernel.arrays);
    let rest = Rest {
        graph,
        points: &points,
        values: &values,
        dtype,
    };
    Ok(rest.biased(product.out, biases))
}

struct Rest<'a> {
    graph: &'a Graph,
    points: &'a Points<'a>,
    values: &'a Values,
    /// Common type of product, bias and result.
    dtype: DType,
}

impl Rest<'_> {
    fn biased(&self, product: ContainerId, rows: i64) -> Option<Biased> {
        let in_memory =
            |e: &&Effect| self.graph.container(e.address.container).storage != Storage::Local;
        let mut stored = self.values.effects.iter().filter(in_memory);
        let (effect, None) = (stored.next()?, stored.next()) else {
            return None;
        };
        let out = effect.address.container;
        let same_place = is_plain(&effect.address) && effect.address.offset == self.points.at;
        if !same_place || self.graph.container(out).dtype != self.dtype {
            return None;
        }
        let value = self.uncast(effect.value)?;
        let (finish, sum) = match self.rectified(value) {
            Some(inner) => (Finish::BiasRelu, self.uncast(inner)?),
            None => (Finish::Bias, value),
        };
        let Op::Binary(Binary::Add, _, a, b) = self.values.get(sum).op else {
            return None;
        };
        let (a, b) = (self.load(a)?, self.load(b)?);
        let bias = match (a.container == product, b.container == product) {
            (true, false) => b,
            (false, true) => a,
            _ => return None,
        };
        let is_bias = self.counts_rows(bias, rows);
        is_bias.then_some(Biased {
            finish,
            bias: bias.container,
            out,
        })
    }

    /// The value before conversions between the type in memory and the one of arithmetic.
    fn uncast(&self, mut id: ValueId) -> Option<ValueId> {
        while let Op::Cast(inner) = self.values.get(id).op {
            let dtype = self.values.get(id).dtype;
            if dtype != self.dtype && dtype != DType::F32 {
                return None;
            }
            id = inner;
        }
        Some(id)
    }

    /// The operand of a ReLU, if a value is one.
    fn rectified(&self, id: ValueId) -> Option<ValueId> {
        let is_zero = |id: ValueId| matches!(&self.values.get(id).op, Op::Const(s) if zero(*s));
        match self.values.get(id).op {
            Op::Binary(Binary::Max, _, x, c) | Op::Binary(Binary::Max, _, c, x) if is_zero(c) => {
                Some(x)
            }
            Op::Select(condition, yes, no) => {
                let Op::Binary(relation, _, x, c) = self.values.get(condition).op else {
                    return None;
                };
                let kept = match relation {
                    Binary::Le | Binary::Lt if is_zero(yes) => no,
                    Binary::Ge | Binary::Gt if is_zero(no) => yes,
                    _ => return None,
                };
                // The condition may look at the value in the type of arithmetic.
                let same = self.uncast(x)? == self.uncast(kept)?;
                (is_zero(c) && same).then_some(kept)
            }
            _ => None,
        }
    }

    /// The element that a value is read from, of the product's type.
    fn load(&self, id: ValueId) -> Option<&Address> {
        let id = self.uncast(id)?;
        let value = self.values.get(id);
        match &value.op {
            Op::Load(address) if is_plain(address) && value.dtype == self.dtype => Some(address),
            _ => None,
        }
    }

    /// Whether a bias is read at the row of the product's element.
    fn counts_rows(&self, bias: &Address, rows: i64) -> bool {
        let mut wanted = SymExpr::default();
        for l in &self.points.loops {
            let weight = self.points.weight(l);
            if weight >= rows {
                continue;
            }
            if weight * l.size > rows {
                return false;
            }
            wanted = wanted + SymExpr::from(&l.var) * weight;
        }
        bias.offset == wanted
    }
}

fn is_plain(address: &Address) -> bool {
    address.gather.is_empty() && address.guards.is_empty()
}

fn zero(s: Scalar) -> bool {
    s.as_f64() == 0.0
}
