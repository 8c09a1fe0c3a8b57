//! Values made from nothing but sizes: `full`, `iota`, and `one_hot` of indices.

use crate::op::{Call, Gradient, GradientCall, Op, OpError, Sample, TensorType, attrs};
use crate::reference::{constant, constant_shape, required, tabulate};
use graph::{Attr, Builder, DType, Expr, Memlet, Scalar, SymExpr, Tensor};

/// `full`: every element the same.
///
/// No input; attributes `shape: Sizes`, `value: Float` or `Int`, `dtype: DType`.
/// Source: ONNX ConstantOfShape-21, `torch.full`.
#[derive(Debug)]
pub struct Full;

fn full_value(call: &Call) -> Result<Scalar, OpError> {
    let dtype = call.dtype("dtype")?;
    let value = match call.library.attrs.get("value") {
        Some(Attr::Int(i)) => Scalar::Int(*i),
        Some(Attr::Bool(b)) => Scalar::Bool(*b),
        _ => Scalar::Float(call.float("value")?),
    };
    // A float's own precision is the container's matter.
    Ok(if dtype.is_float() {
        Scalar::Float(value.as_f64())
    } else {
        value.cast(dtype)
    })
}

impl Op for Full {
    fn name(&self) -> &'static str {
        "full"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        full_value(call)?;
        Ok(vec![TensorType::new(
            call.dtype("dtype")?,
            call.sizes("shape")?,
        )])
    }

    fn evaluate(&self, call: &Call, _: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let shape = constant_shape(call, &call.sizes("shape")?)?;
        let value = full_value(call)?;
        Ok(vec![Tensor::filled(call.dtype("dtype")?, &shape, value)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let value = Expr::Const(full_value(call)?);
        builder.map_over(&builder.shape(out), out, value, |_| Vec::new());
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, _: &mut Builder) -> Result<Gradient, OpError> {
        Ok(g.nothing())
    }

    fn samples(&self) -> Vec<Sample> {
        let of = |value, dtype| {
            attrs([
                ("shape", Attr::Sizes(crate::shape_rules::fixed(&[2, 3]))),
                ("value", value),
                ("dtype", Attr::DType(dtype)),
            ])
        };
        vec![
            Sample::new("floats", &[], of(Attr::Float(1.5), DType::F32)),
            Sample::new("integers", &[], of(Attr::Int(7), DType::I32)),
            Sample::new("truth", &[], of(Attr::Int(1), DType::Bool)),
        ]
    }
}

/// `iota`: `start, start + step, …`, `size` elements.
///
/// No input; attributes `start`, `step`, `size: Sizes` of one element each, `dtype: DType`.
/// Source: ONNX Range-11 of integers, `torch.arange`.
#[derive(Debug)]
pub struct Iota;

fn one_size(call: &Call, attr: &str) -> Result<SymExpr, OpError> {
    match call.sizes(attr)?.as_slice() {
        [one] => Ok(one.clone()),
        many => Err(call.shape_error(format!("`{attr}` has {} elements, not 1", many.len()))),
    }
}

impl Op for Iota {
    fn name(&self) -> &'static str {
        "iota"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        one_size(call, "start")?;
        one_size(call, "step")?;
        Ok(vec![TensorType::new(
            call.dtype("dtype")?,
            vec![one_size(call, "size")?],
        )])
    }

    fn evaluate(&self, call: &Call, _: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let ty = &self.infer(call)?[0];
        let shape = constant_shape(call, &ty.shape)?;
        let start = constant(call, &one_size(call, "start")?)?;
        let step = constant(call, &one_size(call, "step")?)?;
        Ok(vec![tabulate(ty.dtype, &shape, |i| {
            (start + step * i[0] as i64) as f64
        })])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let (start, step) = (one_size(call, "start")?, one_size(call, "step")?);
        let value = Expr::Index(start + step * SymExpr::symbol("i0"));
        let value = value.cast(builder.dtype(out));
        builder.map_over(&builder.shape(out), out, value, |_| Vec::new());
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, _: &mut Builder) -> Result<Gradient, OpError> {
        Ok(g.nothing())
    }

    fn samples(&self) -> Vec<Sample> {
        let of = |start: i64, step: i64, dtype| {
            let size = |n: i64| Attr::Sizes(vec![SymExpr::constant(n)]);
            attrs([
                ("start", size(start)),
                ("step", size(step)),
                ("size", size(5)),
                ("dtype", Attr::DType(dtype)),
            ])
        };
        vec![
            Sample::new("positions", &[], of(0, 1, DType::I64)),
            Sample::new("downwards", &[], of(3, -2, DType::F32)),
        ]
    }
}

/// `one_hot`: `out[i…, d] = 1` where `index[i…] = d`, else 0.
///
/// Input index (integers); attributes `depth: Sizes[1]`, `dtype: DType`. No gradient.
/// Source: `torch.nn.functional.one_hot`.
#[derive(Debug)]
pub struct OneHot;

impl Op for OneHot {
    fn name(&self) -> &'static str {
        "one_hot"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let mut shape = call.input(0)?.shape.clone();
        shape.push(one_size(call, "depth")?);
        Ok(vec![TensorType::new(call.dtype("dtype")?, shape)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let ty = &self.infer(call)?[0];
        let shape = constant_shape(call, &ty.shape)?;
        let depth = shape[shape.len() - 1];
        let mut out = Tensor::zeros(ty.dtype, &shape);
        for (at, index) in required(call, inputs, 0)?.to_i64().into_iter().enumerate() {
            if (0..depth as i64).contains(&index) {
                out.set(at * depth + index as usize, Scalar::Int(1));
            }
        }
        Ok(vec![out])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let index = call.input_id(0)?;
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let shape = builder.shape(out);
        let last = shape.len() - 1;
        let here = Expr::Index(SymExpr::symbol(format!("i{last}").as_str()));
        let hit = Expr::In(0).eq_(here).cast(builder.dtype(out));
        builder.map_over(&shape, out, hit, |i| {
            vec![Memlet::new(index, i[..last].iter().cloned())]
        });
        Ok(())
    }

    fn gradient(&self, _: &GradientCall, _: &mut Builder) -> Result<Gradient, OpError> {
        Ok(Gradient::Zero)
    }

    fn samples(&self) -> Vec<Sample> {
        let of = attrs([
            ("depth", Attr::Sizes(vec![SymExpr::constant(4)])),
            ("dtype", Attr::DType(DType::F32)),
        ]);
        let index = Tensor::from_i64(DType::I64, &[2, 2], vec![3, 0, 1, 3]);
        vec![Sample::new("classes", &[], of).value(0, index)]
    }
}
