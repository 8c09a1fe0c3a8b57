//! What the norms and their gradients share: which elements have common statistics and weights, and
//! the index spaces that visit them. The formulas are in `norm` and `norm_gradient`.

use crate::index_space::{IndexSpace, Reads, combine, for_each_index};
use crate::op::{Call, OpError, TensorType, attrs};
use crate::reference::constant_shape;
use graph::{Attr, Attrs, Builder, ContainerId, DType, Expr, Reduction, SymExpr, Tensor};

/// Which elements share statistics and which share a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    /// Statistics and weights of each channel (dimension 1).
    Batch,
    /// Statistics of each row of the last `axes` dimensions, weights of each place in the row.
    Layer,
    /// Statistics of each sample's groups of channels, weights of each channel.
    Channels,
}

/// What a norm does to an x of some shape.
pub(crate) struct NormShapes {
    pub(crate) x: TensorType,
    pub(crate) group: Group,
    /// Trailing dimensions of a row, or groups of channels.
    extent: i64,
    pub(crate) stat_shape: Vec<SymExpr>,
    pub(crate) affine_shape: Vec<SymExpr>,
    /// Elements that share statistics.
    count: SymExpr,
    pub(crate) eps: f64,
}

/// A way through x: index space, index of x, of statistics, of weights.
pub(crate) struct Walk {
    pub(crate) space: IndexSpace,
    pub(crate) x: Vec<SymExpr>,
    pub(crate) stat: Vec<SymExpr>,
    pub(crate) affine: Vec<SymExpr>,
}

impl NormShapes {
    pub(crate) fn new(call: &Call, group: Group, x: &TensorType) -> Result<NormShapes, OpError> {
        let shape = &x.shape;
        if !x.dtype.is_float() {
            return Err(call.unsupported(format!("elements of type {}", x.dtype)));
        }
        let rank = shape.len();
        let extent = match group {
            Group::Batch => 1,
            Group::Layer => call.int_or("axes", 1)?,
            Group::Channels => call.int("groups")?,
        };
        let fits = match group {
            Group::Batch => rank >= 2,
            Group::Layer => (1..=rank as i64).contains(&extent),
            Group::Channels => {
                let groups = SymExpr::constant(extent);
                rank >= 2 && extent > 0 && shape[1].divide_exactly(&groups).is_some()
            }
        };
        if !fits {
            return Err(call.shape_error(format!(
                "a value of rank {rank} cannot be normalized this way (axes or groups {extent})"
            )));
        }
        let (stat_shape, affine_shape) = match group {
            Group::Batch => (vec![shape[1].clone()], vec![shape[1].clone()]),
            Group::Layer => {
                let (rows, row) = shape.split_at(rank - extent as usize);
                (rows.to_vec(), row.to_vec())
            }
            Group::Channels => (
                vec![shape[0].clone(), SymExpr::constant(extent)],
                vec![shape[1].clone()],
            ),
        };
        let n_statistics = SymExpr::product(&stat_shape);
        let count = SymExpr::product(shape)
            .divide_exactly(&n_statistics)
            .ok_or_else(|| call.unsupported("sizes whose product does not divide"))?;
        Ok(NormShapes {
            x: x.clone(),
            group,
            extent,
            stat_shape,
            affine_shape,
            count,
            eps: call.float_or("eps", 1e-5)?,
        })
    }

    /// Checks that a weight or bias has the shape of the weights.
    pub(crate) fn check(&self, call: &Call, position: usize) -> Result<(), OpError> {
        match call.inputs.get(position) {
            Some(Some(w)) if w.shape != self.affine_shape => {
                let text = |s: &[SymExpr]| s.iter().map(ToString::to_string).collect::<Vec<_>>();
                Err(call.shape_error(format!(
                    "input {position} should be of shape {:?}, found {:?}",
                    text(&self.affine_shape),
                    text(&w.shape)
                )))
            }
            _ => Ok(()),
        }
    }

    /// Statistics are kept in single precision at least.
    pub(crate) fn stat_type(&self) -> TensorType {
        let dtype = match self.x.dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        TensorType::new(dtype, self.stat_shape.clone())
    }

    pub(crate) fn transient_stat(&self, builder: &mut Builder, name: &str) -> ContainerId {
        builder.transient(name, self.stat_type().dtype, &self.stat_shape)
    }

    pub(crate) fn channels_per_group(&self) -> SymExpr {
        self.x.shape[1].floor_div(&SymExpr::constant(self.extent))
    }

    /// One parameter for each dimension of x: for element-wise maps and sums for weights.
    pub(crate) fn element_walk(&self) -> Walk {
        let space = IndexSpace::over(&self.x.shape);
        let x = space.indices();
        let (stat, affine) = match self.group {
            Group::Batch => (vec![x[1].clone()], vec![x[1].clone()]),
            Group::Layer => {
                let (rows, row) = x.split_at(x.len() - self.extent as usize);
                (rows.to_vec(), row.to_vec())
            }
            Group::Channels => {
                let group = x[1].floor_div(&self.channels_per_group());
                (vec![x[0].clone(), group], vec![x[1].clone()])
            }
        };
        Walk {
            space,
            x,
            stat,
            affine,
        }
    }

    /// Like [`NormShapes::element_walk`], but statistics are indexed by plain parameters, as sums into them need.
    pub(crate) fn stat_walk(&self) -> Walk {
        let per_group = self.channels_per_group();
        if self.group != Group::Channels || per_group.as_const() == Some(1) {
            return self.element_walk();
        }
        let mut shape = self.x.shape.clone();
        shape[1] = SymExpr::constant(self.extent);
        shape.insert(2, per_group.clone());
        let space = IndexSpace::over(&shape);
        let mut x = space.indices();
        let stat = vec![x[0].clone(), x[1].clone()];
        let within = x.remove(2);
        x[1] = x[1].clone() * per_group + within;
        Walk {
            space,
            stat,
            affine: vec![x[1].clone()],
            x,
        }
    }

    /// `1 / n` with n the elements that share statistics.
    pub(crate) fn inverse_count(&self) -> Expr {
        match self.count.as_const() {
            Some(n) => Expr::float(1.0 / n as f64),
            None => Expr::float(1.0).div(Expr::Index(self.count.clone())),
        }
    }

    /// Appends `out[stat] += value / n`.
    pub(crate) fn mean_of(
        &self,
        builder: &mut Builder,
        out: ContainerId,
        value: impl FnOnce(&mut Reads, &Walk) -> Expr,
    ) {
        let walk = self.stat_walk();
        let mut reads = Reads::default();
        let value = value(&mut reads, &walk).mul(self.inverse_count());
        let sum = combine(Reduction::Sum, out, &walk.stat, value);
        walk.space.append(builder, reads, vec![sum]);
    }

    /// Positions of the statistics and of the weight of each element of x, row-major.
    pub(crate) fn positions(&self, call: &Call) -> Result<Vec<(usize, usize)>, OpError> {
        let shape = constant_shape(call, &self.x.shape)?;
        let extent = self.extent as usize;
        let mut found = Vec::new();
        for_each_index(&shape, |index| {
            let row_major =
                |dims: std::ops::Range<usize>| dims.fold(0, |at, d| at * shape[d] + index[d]);
            let split = shape.len().saturating_sub(extent);
            found.push(match self.group {
                Group::Batch => (index[1], index[1]),
                Group::Layer => (row_major(0..split), row_major(split..shape.len())),
                Group::Channels => {
                    let group = index[1] * extent / shape[1];
                    (index[0] * extent + group, index[1])
                }
            });
        });
        Ok(found)
    }

    /// Tensors of mean, inverse deviation and variance.
    pub(crate) fn statistics(
        &self,
        call: &Call,
        (x, centered): (&[f64], bool),
    ) -> Result<[Tensor; 3], OpError> {
        let positions = self.positions(call)?;
        let shape = constant_shape(call, &self.stat_shape)?;
        let n: usize = shape.iter().product();
        let count = (x.len() / n.max(1)) as f64;
        let (mut mean, mut var) = (vec![0.0; n], vec![0.0; n]);
        if centered {
            for (v, (stat, _)) in x.iter().zip(&positions) {
                mean[*stat] += v / count;
            }
        }
        for (v, (stat, _)) in x.iter().zip(&positions) {
            var[*stat] += (v - mean[*stat]).powi(2) / count;
        }
        let inv_std = var.iter().map(|v| (v + self.eps).sqrt().recip()).collect();
        let dtype = self.stat_type().dtype;
        Ok([mean, inv_std, var].map(|data| Tensor::from_f64(dtype, &shape, data)))
    }
}

/// A floating-point input by position, if it is there.
pub(crate) fn values(inputs: &[Option<&Tensor>], position: usize) -> Option<Vec<f64>> {
    inputs.get(position).copied().flatten().map(Tensor::to_f64)
}

pub(crate) type Case = (&'static str, Vec<i64>, Option<Vec<i64>>, Attrs);

/// Shapes of x and weight with attributes; samples of norms and gradients are made from these.
pub(crate) fn cases(group: Group) -> Vec<Case> {
    let eps = |e: f64| attrs([("eps", Attr::Float(e))]);
    let with = |name: &str, n: i64| attrs([(name, Attr::Int(n)), ("eps", Attr::Float(1e-3))]);
    match group {
        Group::Batch => vec![
            ("images", vec![2, 3, 4, 5], Some(vec![3]), eps(1e-5)),
            ("rows", vec![5, 3], Some(vec![3]), eps(1e-3)),
            ("no weights, 1-D", vec![2, 3, 7], None, eps(1e-5)),
        ],
        Group::Layer => vec![
            ("rows", vec![2, 3, 7], Some(vec![7]), with("axes", 1)),
            ("two axes", vec![3, 4, 5], Some(vec![4, 5]), with("axes", 2)),
            ("no weights", vec![4, 6], None, with("axes", 1)),
        ],
        Group::Channels => vec![
            (
                "two groups",
                vec![2, 4, 3, 2],
                Some(vec![4]),
                with("groups", 2),
            ),
            (
                "a group a channel",
                vec![2, 3, 5],
                Some(vec![3]),
                with("groups", 3),
            ),
            (
                "one group, no weights",
                vec![2, 4, 3],
                None,
                with("groups", 1),
            ),
        ],
    }
}

/// A single-precision type of that shape.
pub(crate) fn tensor(shape: &[i64]) -> TensorType {
    let shape = shape.iter().map(|n| SymExpr::constant(*n)).collect();
    TensorType::new(DType::F32, shape)
}
