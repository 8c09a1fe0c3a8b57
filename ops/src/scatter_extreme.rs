//! The largest or the smallest of the elements that an index sends to each place: `scatter_max`, `scatter_min`.

use crate::index::{checked, data_memlet, scatter_parts, scatter_zeros};
use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{ravel, required, unravel};
use graph::{Attr, Binary, Builder, DType, Expr, Memlet, Reduction, Scalar, Tensor};

/// `scatter_max`, `scatter_min`: `out[i… with index[i…] along axis]` is the largest or the smallest of the elements of
/// `src` that go there and of the element of `x` that is there. With attribute `include_self: Bool` false, `x` counts
/// only at places to which no element goes. A NaN wins.
///
/// Inputs x, index, src of the index's shape; attribute `axis: Int`. Floats only. Gradient: shared evenly among the
/// elements of x and src that equal the result. If x does not count, its elements that equal the result still get a
/// share, which is lost, as in PyTorch.
/// Source: ONNX ScatterElements-18 with `max` and `min`, `torch.scatter_reduce` with `amax` and `amin`.
#[derive(Debug)]
pub struct ScatterExtreme {
    /// The largest, not the smallest.
    pub largest: bool,
}

impl ScatterExtreme {
    fn type_of(&self, call: &Call) -> Result<(usize, TensorType), OpError> {
        let (x, src) = (call.input(0)?, call.input(2)?);
        if x.dtype != src.dtype || !x.dtype.is_float() {
            return Err(call.unsupported(format!("{} joined with {}", x.dtype, src.dtype)));
        }
        scatter_parts(call)
    }

    fn join(&self) -> (Reduction, Binary) {
        match self.largest {
            true => (Reduction::Max, Binary::Max),
            false => (Reduction::Min, Binary::Min),
        }
    }
}

impl Op for ScatterExtreme {
    fn name(&self) -> &'static str {
        match self.largest {
            true => "scatter_max",
            false => "scatter_min",
        }
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![self.type_of(call)?.1])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let x = required(call, inputs, 0)?;
        let (index, src) = (required(call, inputs, 1)?, required(call, inputs, 2)?);
        let axis = self.type_of(call)?.0;
        let include_self = call.bool_or("include_self", true)?;
        let mut found: Vec<Option<f64>> = (0..x.len())
            .map(|at| include_self.then(|| x.at(at).as_f64()))
            .collect();
        for at in 0..index.len() {
            let mut target = unravel(at, &index.shape);
            target[axis] = checked(call, index.at(at).as_i64(), x.shape[axis])?;
            let (place, new) = (ravel(&target, &x.shape), src.at(at).as_f64());
            let wins = |old: f64| match self.largest {
                true => new > old,
                false => new < old,
            };
            if found[place].is_none_or(|old| !old.is_nan() && (wins(old) || new.is_nan())) {
                found[place] = Some(new);
            }
        }
        let mut out = x.clone();
        for (at, value) in found.into_iter().enumerate() {
            if let Some(value) = value {
                out.set(at, Scalar::Float(value));
            }
        }
        Ok(vec![out])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let (x, index, src) = (call.input_id(0)?, call.input_id(1)?, call.input_id(2)?);
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let (axis, ty) = self.type_of(call)?;
        let (reduction, join) = self.join();
        let shape = builder.shape(index);
        let found = builder.transient("found", ty.dtype, &ty.shape);
        builder.map_into(&shape, Expr::In(1), |i| {
            let reads = [index, src].map(|id| Memlet::new(id, i.iter().cloned()));
            let write = data_memlet(found, axis, 0, i.to_vec()).or_fill(0.0);
            (reads.to_vec(), write.reduce(reduction))
        });
        if call.bool_or("include_self", true)? {
            let joined = Expr::binary(join, Expr::In(0), Expr::In(1));
            builder.map_over(&ty.shape, out, joined, |i| {
                [x, found]
                    .map(|id| Memlet::new(id, i.iter().cloned()))
                    .to_vec()
            });
            return Ok(());
        }
        let is_hit = builder.transient("is_hit", DType::Bool, &ty.shape);
        builder.map_into(&shape, Expr::Const(Scalar::Bool(true)), |i| {
            let write = data_memlet(is_hit, axis, 0, i.to_vec()).or_fill(0.0);
            let reads = vec![Memlet::new(index, i.iter().cloned())];
            (reads, write.reduce(Reduction::Max))
        });
        let chosen = Expr::select(Expr::In(2), Expr::In(1), Expr::In(0));
        builder.map_over(&ty.shape, out, chosen, |i| {
            let read = |id| Memlet::new(id, i.iter().cloned());
            [x, found, is_hit].map(read).to_vec()
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0).filter(|_| g.wants(0) || g.wants(2)) else {
            return Ok(g.nothing());
        };
        let (axis, ty) = self.type_of(&g.call)?;
        let (x, index, src) = (
            g.call.input_id(0)?,
            g.call.input_id(1)?,
            g.call.input_id(2)?,
        );
        let y = g.output(0)?;
        let along = attrs([("axis", Attr::Int(axis as i64))]);
        // Counts may be beyond the largest number of 16 bits.
        let counted = ty.dtype.arithmetic();
        let is_result = || Expr::In(0).eq_(Expr::In(1)).cast(counted);
        let at_src = builder.op1("gather_elements", &[y, index], along.clone())?;
        let x_is = builder.elementwise(is_result(), &[x, y])?;
        let src_is = builder.elementwise(is_result(), &[src, at_src])?;
        let count = builder.op1("scatter_add", &[x_is, index, src_is], along.clone())?;
        let share =
            builder.elementwise(Expr::In(0).div(Expr::In(1)).cast(counted), &[dy, count])?;
        let part = Expr::In(0).mul(Expr::In(1)).cast(ty.dtype);
        let dx = match (g.wants(0), g.call.bool_or("include_self", true)?) {
            (false, _) => None,
            (true, true) => Some(builder.elementwise(part.clone(), &[x_is, share])?),
            (true, false) => {
                let hit = builder.elementwise(Expr::Const(Scalar::Bool(true)), &[index])?;
                let is_hit = scatter_zeros(builder, axis, &ty.shape, index, hit)?;
                let kept = Expr::select(Expr::In(2), Expr::float(0.0), part.clone());
                Some(builder.elementwise(kept.cast(ty.dtype), &[x_is, share, is_hit])?)
            }
        };
        let d_src = match g.wants(2) {
            true => {
                let share = builder.op1("gather_elements", &[share, index], along)?;
                Some(builder.elementwise(part, &[src_is, share])?)
            }
            false => None,
        };
        Ok(Gradient::Rule(vec![dx, None, d_src]))
    }

    fn samples(&self) -> Vec<Sample> {
        let along = |axis| attrs([("axis", Attr::Int(axis))]);
        let index = Tensor::from_i64(DType::I64, &[2, 3], vec![1, 0, 1, 2, 1, 1]);
        let mut alone = along(0);
        alone.insert("include_self".into(), Attr::Bool(false));
        let shapes: &[&[i64]] = &[&[3, 4], &[], &[2, 3]];
        vec![
            Sample::new("rows", shapes, along(0)).value(1, index.clone()),
            Sample::new("columns", shapes, along(1)).value(1, index.clone()),
            Sample::new("without itself", shapes, alone).value(1, index),
        ]
    }
}
