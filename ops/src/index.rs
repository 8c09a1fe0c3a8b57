//! Elements picked and placed by indices that are data: gather, gather_elements, scatter_add.
//!
//! Indices are integers in `[0, size)`; importers count negative ones from the end. An index outside
//! reads NaN (0 for integers) and writes nothing; the reference evaluation refuses it.

use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{add_at, constant_shape, ravel, required, unravel};
use crate::shape_rules::{axis, display};
use graph::{
    Attr, Attrs, Binary, Builder, ContainerId, DType, Expr, Index, Memlet, Reduction, Scalar,
    SymExpr, Tensor,
};

/// A read of `x` whose index along `axis` is the value of tasklet input `index`.
fn data_read(x: ContainerId, dtype: DType, axis: usize, index: usize, at: Vec<SymExpr>) -> Memlet {
    let outside = if dtype.is_float() {
        Scalar::Float(f64::NAN)
    } else {
        Scalar::Int(0)
    };
    Memlet {
        fill: Some(outside),
        ..data_memlet(x, axis, index, at)
    }
}

/// A summed write to `out`, dropped outside.
fn data_sum(out: ContainerId, axis: usize, index: usize, at: Vec<SymExpr>) -> Memlet {
    data_memlet(out, axis, index, at)
        .or_fill(0.0)
        .reduce(Reduction::Sum)
}

/// How values of a type are added up: truth values by "or".
fn sum_of(dtype: DType) -> (Reduction, Binary) {
    match dtype {
        DType::Bool => (Reduction::Max, Binary::Or),
        _ => (Reduction::Sum, Binary::Add),
    }
}

/// `at` with the data index put at `axis` (replacing what is there).
pub(crate) fn data_memlet(
    container: ContainerId,
    axis: usize,
    index: usize,
    at: Vec<SymExpr>,
) -> Memlet {
    let mut memlet = Memlet::new(container, at);
    memlet.subset[axis] = Index::Data(index);
    memlet
}

fn index_type<'a>(call: &'a Call, position: usize) -> Result<&'a TensorType, OpError> {
    let index = call.input(position)?;
    if !index.dtype.is_int() {
        return Err(call.shape_error(format!(
            "input {position} must hold integer indices, it is {}",
            index.dtype
        )));
    }
    Ok(index)
}

pub(crate) fn checked(call: &Call, index: i64, size: usize) -> Result<usize, OpError> {
    usize::try_from(index)
        .ok()
        .filter(|i| *i < size)
        .ok_or_else(|| call.shape_error(format!("index {index} is outside 0..{size}")))
}

/// `gather`: `out[a…, j…, b…] = x[a…, index[j…], b…]`, with the index's dimensions in place of `axis`.
///
/// Attributes `axis: Int`, `padding_idx: Int` (absent: none): rows of that index get no gradient
/// (`torch.nn.Embedding`). Gradient: `gather_gradient`. Source: ONNX Gather-13,
/// `torch.index_select`, `torch.nn.functional.embedding`.
#[derive(Debug)]
pub struct Gather;

/// The axis, and the index's type.
fn gather_parts<'a>(call: &'a Call) -> Result<(usize, &'a TensorType), OpError> {
    let axis = axis(call, call.int_or("axis", 0)?, call.input(0)?.rank())?;
    Ok((axis, index_type(call, 1)?))
}

impl Op for Gather {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let x = call.input(0)?;
        let (axis, index) = gather_parts(call)?;
        let mut shape = x.shape.clone();
        shape.splice(axis..=axis, index.shape.iter().cloned());
        Ok(vec![TensorType::new(x.dtype, shape)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let (x, index) = (required(call, inputs, 0)?, required(call, inputs, 1)?);
        let axis = gather_parts(call)?.0;
        let shape = constant_shape(call, &self.infer(call)?[0].shape)?;
        let end = axis + index.shape.len();
        let mut out = Tensor::zeros(x.dtype, &shape);
        for at in 0..out.len() {
            let place = unravel(at, &shape);
            let picked = index.at(ravel(&place[axis..end], &index.shape)).as_i64();
            let mut source = place.clone();
            source.splice(axis..end, [checked(call, picked, x.shape[axis])?]);
            out.set(at, x.at(ravel(&source, &x.shape)));
        }
        Ok(vec![out])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let (x, index) = (call.input_id(0)?, call.input_id(1)?);
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let (axis, ty) = gather_parts(call)?;
        let end = axis + ty.rank();
        let (shape, dtype) = (builder.shape(out), builder.dtype(x));
        builder.map_over(&shape, out, Expr::In(1), |i| {
            let mut source = i.to_vec();
            source.splice(axis..end, [SymExpr::constant(0)]);
            vec![
                Memlet::new(index, i[axis..end].iter().cloned()),
                data_read(x, dtype, axis, 0, source),
            ]
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        let axis = gather_parts(&g.call)?.0;
        let mut attrs = attrs([
            ("axis", Attr::Int(axis as i64)),
            (
                "size",
                Attr::Sizes(vec![g.call.input(0)?.shape[axis].clone()]),
            ),
        ]);
        if let Some(padding) = g.call.library.attrs.get("padding_idx") {
            attrs.insert("padding_idx".into(), padding.clone());
        }
        let dx = builder.op1("gather_gradient", &[dy, g.call.input_id(1)?], attrs)?;
        Ok(g.only(0, dx))
    }

    fn samples(&self) -> Vec<Sample> {
        let along = |axis| attrs([("axis", Attr::Int(axis))]);
        let index =
            |shape: &[usize], data: &[i64]| Tensor::from_i64(DType::I64, shape, data.to_vec());
        vec![
            Sample::new("rows of a table", &[&[4, 3]], along(0))
                .value(1, index(&[2, 2], &[3, 0, 3, 1])),
            Sample::new("inner dimension", &[&[2, 4, 3]], along(1))
                .value(1, index(&[3], &[2, 2, 0])),
            Sample::new("one element", &[&[2, 4]], along(-1)).value(1, index(&[], &[1])),
        ]
    }
}

/// `gather_gradient`: sums rows back to where `gather` took them,
/// `out[a…, index[j…], b…] += dy[a…, j…, b…]`.
///
/// Inputs dy, index; attributes `axis: Int`, `size: Sizes[1]` (of the result along `axis`),
/// `padding_idx: Int` (absent: none; that row stays zero). Gradient: gather.
/// Source: `torch.ops.aten.embedding_dense_backward`.
#[derive(Debug)]
pub struct GatherGradient;

struct GatherBack {
    axis: usize,
    index_rank: usize,
    shape: Vec<SymExpr>,
    padding: Option<i64>,
}

fn gather_back(call: &Call) -> Result<GatherBack, OpError> {
    let mut shape = call.input(0)?.shape.clone();
    let index = index_type(call, 1)?;
    let end_rank = shape.len() + 1;
    let index_rank = index.rank();
    let rank = end_rank.saturating_sub(index_rank);
    let axis = axis(call, call.int_or("axis", 0)?, rank)?;
    let end = axis + index_rank;
    if shape.get(axis..end) != Some(index.shape.as_slice()) {
        return Err(call.shape_error(format!(
            "index of shape {} does not lie in the gradient {} at dimension {axis}",
            display(&index.shape),
            display(&shape)
        )));
    }
    shape.splice(axis..end, call.sizes("size")?);
    let padding = match call.library.attrs.contains_key("padding_idx") {
        true => Some(call.int("padding_idx")?),
        false => None,
    };
    Ok(GatherBack {
        axis,
        index_rank,
        shape,
        padding,
    })
}

impl Op for GatherGradient {
    fn name(&self) -> &'static str {
        "gather_gradient"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let dtype = call.input(0)?.dtype;
        Ok(vec![TensorType::new(dtype, gather_back(call)?.shape)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let (dy, index) = (required(call, inputs, 0)?, required(call, inputs, 1)?);
        let back = gather_back(call)?;
        let shape = constant_shape(call, &back.shape)?;
        let end = back.axis + back.index_rank;
        let mut sums = Tensor::zeros(dy.dtype, &shape);
        for at in 0..dy.len() {
            let place = unravel(at, &dy.shape);
            let picked = index
                .at(ravel(&place[back.axis..end], &index.shape))
                .as_i64();
            if back.padding == Some(picked) {
                continue;
            }
            let mut target = place.clone();
            target.splice(back.axis..end, [checked(call, picked, shape[back.axis])?]);
            add_at(&mut sums, ravel(&target, &shape), dy.at(at));
        }
        Ok(vec![sums])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let (dy, index) = (call.input_id(0)?, call.input_id(1)?);
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let back = gather_back(call)?;
        let (axis, end) = (back.axis, back.axis + back.index_rank);
        let value = match back.padding {
            None => Expr::In(1),
            Some(padding) => Expr::select(
                Expr::In(0).eq_(Expr::int(padding)),
                Expr::float(0.0),
                Expr::In(1),
            ),
        };
        let shape = builder.shape(dy);
        builder.map_into(&shape, value, |i| {
            let mut target = i.to_vec();
            target.splice(axis..end, [SymExpr::constant(0)]);
            let reads = vec![
                Memlet::new(index, i[axis..end].iter().cloned()),
                Memlet::new(dy, i.iter().cloned()),
            ];
            (reads, data_sum(out, axis, 0, target))
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(ddx) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        let index = g.call.input_id(1)?;
        let back = gather_back(&g.call)?;
        let along = attrs([("axis", Attr::Int(back.axis as i64))]);
        let rows = builder.op1("gather", &[ddx, index], along)?;
        let Some(padding) = back.padding else {
            return Ok(g.only(0, rows));
        };
        // The index with a further dimension of size 1 for each dimension of `rows` that follows it.
        let mut wide = builder.shape(index);
        wide.resize(builder.shape(rows).len() - back.axis, SymExpr::constant(1));
        let index = crate::shape_rules::reshape(builder, index, &wide)?;
        let padded = Expr::In(1).eq_(Expr::int(padding));
        let kept = Expr::select(padded, Expr::float(0.0), Expr::In(0));
        let kept = builder.elementwise(kept, &[rows, index])?;
        Ok(g.only(0, kept))
    }

    fn samples(&self) -> Vec<Sample> {
        let by = |axis, size| {
            attrs([
                ("axis", Attr::Int(axis)),
                ("size", Attr::Sizes(crate::shape_rules::fixed(&[size]))),
            ])
        };
        let index = Tensor::from_i64(DType::I64, &[2, 2], vec![3, 0, 3, 1]);
        let mut padded = by(0, 4);
        padded.insert("padding_idx".into(), Attr::Int(3));
        vec![
            Sample::new("rows", &[&[2, 2, 3]], by(0, 4)).value(1, index.clone()),
            Sample::new("inner dimension", &[&[3, 2, 2]], by(1, 5)).value(1, index.clone()),
            Sample::new("without a padding row", &[&[2, 2, 3]], padded).value(1, index),
        ]
    }
}

/// `gather_elements`: `out[i…] = x[i…]` with the index along `axis` replaced by `index[i…]`.
///
/// Attribute `axis: Int`; the index has the rank of x and is not larger than it elsewhere.
/// Gradient: `scatter_add`. Source: ONNX GatherElements-13, `torch.gather`.
#[derive(Debug)]
pub struct GatherElements;

fn elements_axis(call: &Call, rank: usize, index: usize) -> Result<usize, OpError> {
    let found = index_type(call, index)?.rank();
    if found != rank {
        return Err(call.shape_error(format!("an index of rank {found} for rank {rank}")));
    }
    axis(call, call.int("axis")?, rank)
}

impl Op for GatherElements {
    fn name(&self) -> &'static str {
        "gather_elements"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let x = call.input(0)?;
        elements_axis(call, x.rank(), 1)?;
        Ok(vec![TensorType::new(x.dtype, call.input(1)?.shape.clone())])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let (x, index) = (required(call, inputs, 0)?, required(call, inputs, 1)?);
        let axis = elements_axis(call, x.shape.len(), 1)?;
        let mut out = Tensor::zeros(x.dtype, &index.shape);
        for at in 0..out.len() {
            let mut source = unravel(at, &index.shape);
            source[axis] = checked(call, index.at(at).as_i64(), x.shape[axis])?;
            out.set(at, x.at(ravel(&source, &x.shape)));
        }
        Ok(vec![out])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let (x, index) = (call.input_id(0)?, call.input_id(1)?);
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let (shape, dtype) = (builder.shape(out), builder.dtype(x));
        let axis = elements_axis(call, shape.len(), 1)?;
        builder.map_over(&shape, out, Expr::In(1), |i| {
            vec![
                Memlet::new(index, i.iter().cloned()),
                data_read(x, dtype, axis, 0, i.to_vec()),
            ]
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        let x = g.call.input(0)?;
        let axis = elements_axis(&g.call, x.rank(), 1)?;
        let index = g.call.input_id(1)?;
        let dx = scatter_zeros(builder, axis, &x.shape, index, dy)?;
        Ok(g.only(0, dx))
    }

    fn samples(&self) -> Vec<Sample> {
        let along = |axis| attrs([("axis", Attr::Int(axis))]);
        let index = Tensor::from_i64(DType::I64, &[2, 3], vec![1, 0, 1, 2, 2, 0]);
        vec![
            Sample::new("along the last", &[&[2, 3]], along(-1)).value(1, index.clone()),
            Sample::new("a part along the first", &[&[3, 4]], along(0)).value(1, index),
        ]
    }
}

/// Appends the sum of `src` into zeros of `shape` at `index` along `axis`.
///
/// # Errors
/// As [`OpBuilder::op`].
pub fn scatter_zeros(
    builder: &mut Builder,
    axis: usize,
    shape: &[SymExpr],
    index: ContainerId,
    src: ContainerId,
) -> Result<ContainerId, OpError> {
    let attrs: Attrs = attrs([
        ("axis", Attr::Int(axis as i64)),
        ("shape", Attr::Sizes(shape.to_vec())),
    ]);
    Ok(builder.op("scatter_add", &[None, Some(index), Some(src)], attrs)?[0])
}

/// `scatter_add`: `out = x`, then `out[i… with index[i…] along axis] += src[i…]`.
///
/// Inputs x (absent: zeros of attribute `shape: Sizes`), index, src of the index's shape; attribute
/// `axis: Int`. Gradient: of x the incoming one, of src `gather_elements` of it.
/// Source: ONNX ScatterElements-18 with `add`, `torch.scatter_add`.
#[derive(Debug)]
pub struct ScatterAdd;

/// The axis and the type of the result.
pub(crate) fn scatter_parts(call: &Call) -> Result<(usize, TensorType), OpError> {
    let (index, src) = (call.input(1)?, call.input(2)?);
    if index.shape != src.shape {
        return Err(call.shape_error(format!(
            "source of shape {} for an index of shape {}; cut it to the index first",
            display(&src.shape),
            display(&index.shape)
        )));
    }
    let ty = match call.inputs[0].clone() {
        Some(x) => x,
        None => TensorType::new(src.dtype, call.sizes("shape")?),
    };
    Ok((elements_axis(call, ty.rank(), 1)?, ty))
}

impl Op for ScatterAdd {
    fn name(&self) -> &'static str {
        "scatter_add"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![scatter_parts(call)?.1])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let (index, src) = (required(call, inputs, 1)?, required(call, inputs, 2)?);
        let (axis, ty) = scatter_parts(call)?;
        let shape = constant_shape(call, &ty.shape)?;
        let mut sums = match inputs[0] {
            Some(x) => x.clone(),
            None => Tensor::zeros(ty.dtype, &shape),
        };
        for at in 0..index.len() {
            let mut target = unravel(at, &index.shape);
            target[axis] = checked(call, index.at(at).as_i64(), shape[axis])?;
            add_at(&mut sums, ravel(&target, &shape), src.at(at));
        }
        Ok(vec![sums])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let (index, src) = (call.input_id(1)?, call.input_id(2)?);
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let (axis, ty) = scatter_parts(call)?;
        let sums = match call.optional_id(0) {
            Some(_) => builder.transient("scattered", ty.dtype, &ty.shape),
            None => out,
        };
        let shape = builder.shape(index);
        let (reduction, add) = sum_of(ty.dtype);
        builder.map_into(&shape, Expr::In(1), |i| {
            let reads = [index, src].map(|id| Memlet::new(id, i.iter().cloned()));
            let write = data_sum(sums, axis, 0, i.to_vec()).reduce(reduction);
            (reads.to_vec(), write)
        });
        if let Some(x) = call.optional_id(0) {
            let expr = Expr::binary(add, Expr::In(0), Expr::In(1));
            builder.map_over(&ty.shape, out, expr, |i| {
                [x, sums]
                    .map(|id| Memlet::new(id, i.iter().cloned()))
                    .to_vec()
            });
        }
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0) else {
            return Ok(g.nothing());
        };
        let axis = scatter_parts(&g.call)?.0;
        let d_src = if g.wants(2) {
            let along = attrs([("axis", Attr::Int(axis as i64))]);
            let index = g.call.input_id(1)?;
            Some(builder.op1("gather_elements", &[dy, index], along)?)
        } else {
            None
        };
        Ok(Gradient::Rule(vec![g.wants(0).then_some(dy), None, d_src]))
    }

    fn samples(&self) -> Vec<Sample> {
        let along = attrs([("axis", Attr::Int(0))]);
        let index = Tensor::from_i64(DType::I64, &[2, 3], vec![1, 0, 1, 2, 1, 1]);
        let mut into_zeros = attrs([("axis", Attr::Int(1))]);
        into_zeros.insert(
            "shape".into(),
            Attr::Sizes(crate::shape_rules::fixed(&[2, 4])),
        );
        vec![
            Sample::new("rows", &[&[3, 4], &[], &[2, 3]], along).value(1, index.clone()),
            Sample::new("into zeros", &[&[], &[], &[2, 3]], into_zeros)
                .without(0)
                .value(1, index),
        ]
    }
}
