//! Tensors in memory: a shape and elements of one type.
//!
//! Owns the conversion between a tensor and its protobuf form. Never reads files: see `stored.rs` for
//! elements that are stored beside a model.

use crate::element::Element;
use crate::fact::MAX_RANK;
use crate::proto::TensorProto;
use bytes::Bytes;
use half::{bf16, f16};
use std::convert::Infallible;
use std::sync::Arc;

/// Bytes of a string in memory beside its text.
pub const STRING_BYTES: usize = size_of::<Bytes>();

/// Elements, row-major.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Values {
    F32(Vec<f32>),
    F64(Vec<f64>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    I8(Vec<i8>),
    I16(Vec<i16>),
    I32(Vec<i32>),
    I64(Vec<i64>),
    U8(Vec<u8>),
    U16(Vec<u16>),
    U32(Vec<u32>),
    U64(Vec<u64>),
    Bool(Vec<bool>),
    String(Vec<Bytes>),
}

/// Evaluates `$body` with `$v` bound to the vector inside a [`Values`], whatever its type.
#[macro_export]
macro_rules! each_type {
    ($values:expr, $v:ident => $body:expr) => {
        match $values {
            $crate::tensor::Values::F32($v) => $body,
            $crate::tensor::Values::F64($v) => $body,
            $crate::tensor::Values::F16($v) => $body,
            $crate::tensor::Values::BF16($v) => $body,
            $crate::tensor::Values::I8($v) => $body,
            $crate::tensor::Values::I16($v) => $body,
            $crate::tensor::Values::I32($v) => $body,
            $crate::tensor::Values::I64($v) => $body,
            $crate::tensor::Values::U8($v) => $body,
            $crate::tensor::Values::U16($v) => $body,
            $crate::tensor::Values::U32($v) => $body,
            $crate::tensor::Values::U64($v) => $body,
            $crate::tensor::Values::Bool($v) => $body,
            $crate::tensor::Values::String($v) => $body,
        }
    };
}

/// Makes a [`Values`] of the type of `$values` out of `$body`, which sees its vector as `$v`.
#[macro_export]
macro_rules! same_type {
    ($values:expr, $v:ident => $body:expr) => {{
        use $crate::tensor::Values as V;
        match $values {
            V::F32($v) => V::F32($body),
            V::F64($v) => V::F64($body),
            V::F16($v) => V::F16($body),
            V::BF16($v) => V::BF16($body),
            V::I8($v) => V::I8($body),
            V::I16($v) => V::I16($body),
            V::I32($v) => V::I32($body),
            V::I64($v) => V::I64($body),
            V::U8($v) => V::U8($body),
            V::U16($v) => V::U16($body),
            V::U32($v) => V::U32($body),
            V::U64($v) => V::U64($body),
            V::Bool($v) => V::Bool($body),
            V::String($v) => V::String($body),
        }
    }};
}

/// An element type of tensors.
pub trait Item: Clone + Default + PartialEq + 'static {
    /// The elements, if they are of this type.
    fn of(values: &Values) -> Option<&[Self]>;
    /// Elements of this type.
    fn wrap(items: Vec<Self>) -> Values;
}

macro_rules! items {
    ($($variant:ident $item:ty),*) => {$(
        impl Item for $item {
            fn of(values: &Values) -> Option<&[Self]> {
                match values {
                    Values::$variant(v) => Some(v),
                    _ => None,
                }
            }
            fn wrap(items: Vec<Self>) -> Values {
                Values::$variant(items)
            }
        }
    )*};
}

items!(F32 f32, F64 f64, F16 f16, BF16 bf16, I8 i8, I16 i16, I32 i32, I64 i64);
items!(U8 u8, U16 u16, U32 u32, U64 u64, Bool bool, String Bytes);

impl Values {
    /// Element type.
    pub fn element(&self) -> Element {
        match self {
            Values::F32(_) => Element::F32,
            Values::F64(_) => Element::F64,
            Values::F16(_) => Element::F16,
            Values::BF16(_) => Element::BF16,
            Values::I8(_) => Element::I8,
            Values::I16(_) => Element::I16,
            Values::I32(_) => Element::I32,
            Values::I64(_) => Element::I64,
            Values::U8(_) => Element::U8,
            Values::U16(_) => Element::U16,
            Values::U32(_) => Element::U32,
            Values::U64(_) => Element::U64,
            Values::Bool(_) => Element::Bool,
            Values::String(_) => Element::String,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        each_type!(self, v => v.len())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements at those positions, in that order.
    pub fn pick(&self, positions: impl Iterator<Item = usize>) -> Values {
        fn each<T: Clone>(v: &[T], positions: impl Iterator<Item = usize>) -> Vec<T> {
            positions.map(|n| v[n].clone()).collect()
        }
        same_type!(self, v => each(v, positions))
    }
}

/// A tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Elements, row-major, as many as the sizes say; shared by tensors that differ in shape only.
    pub values: Arc<Values>,
}

impl Tensor {
    /// A tensor; `values` has as many elements as `shape` says.
    pub fn new(shape: &[usize], values: Values) -> Tensor {
        debug_assert_eq!(shape.iter().product::<usize>(), values.len());
        Tensor {
            shape: shape.to_vec(),
            values: Arc::new(values),
        }
    }

    /// A vector of `i64`.
    pub fn ints(values: &[i64]) -> Tensor {
        Tensor::new(&[values.len()], Values::I64(values.to_vec()))
    }

    /// A scalar of `i64`.
    pub fn int(value: i64) -> Tensor {
        Tensor::new(&[], Values::I64(vec![value]))
    }

    /// Element type.
    pub fn element(&self) -> Element {
        self.values.element()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes its elements take in a file.
    pub fn n_bytes(&self) -> usize {
        match &*self.values {
            Values::String(v) => v.iter().map(|s| s.len() + 2).sum(),
            values => values.element().bytes().unwrap_or(0) * values.len(),
        }
    }

    /// Bytes its elements take in memory, at most: strings may share theirs.
    pub fn n_bytes_in_memory(&self) -> usize {
        match &*self.values {
            Values::String(v) => {
                let texts = v.iter().map(|s| s.len().saturating_add(STRING_BYTES));
                texts.fold(0, usize::saturating_add)
            }
            _ => self.n_bytes(),
        }
    }

    /// Returns the same elements under other sizes of the same product.
    pub fn reshaped(&self, shape: &[usize]) -> Tensor {
        debug_assert_eq!(shape.iter().product::<usize>(), self.len());
        Tensor {
            shape: shape.to_vec(),
            values: Arc::clone(&self.values),
        }
    }

    /// The elements as `i64`: integers and truth values; `None` for other types.
    pub fn to_i64(&self) -> Option<Vec<i64>> {
        fn all<T: Copy>(v: &[T], f: impl Fn(T) -> i64) -> Option<Vec<i64>> {
            Some(v.iter().map(|x| f(*x)).collect())
        }
        match &*self.values {
            Values::I8(v) => all(v, i64::from),
            Values::I16(v) => all(v, i64::from),
            Values::I32(v) => all(v, i64::from),
            Values::I64(v) => Some(v.clone()),
            Values::U8(v) => all(v, i64::from),
            Values::U16(v) => all(v, i64::from),
            Values::U32(v) => all(v, i64::from),
            Values::U64(v) => v.iter().map(|x| i64::try_from(*x).ok()).collect(),
            Values::Bool(v) => all(v, i64::from),
            _ => None,
        }
    }

    /// The elements as `f64`; `None` for strings. Integers beyond 2⁵³ are rounded.
    pub fn to_f64(&self) -> Option<Vec<f64>> {
        match &*self.values {
            Values::F32(v) => Some(v.iter().map(|x| f64::from(*x)).collect()),
            Values::F64(v) => Some(v.clone()),
            Values::F16(v) => Some(v.iter().map(|x| x.to_f64()).collect()),
            Values::BF16(v) => Some(v.iter().map(|x| x.to_f64()).collect()),
            Values::U64(v) => Some(v.iter().map(|x| *x as f64).collect()),
            _ => Some(self.to_i64()?.iter().map(|x| *x as f64).collect()),
        }
    }

    /// A tensor of floats of type `element`, each rounded to nearest; `None` if it is no float type.
    pub fn floats(element: Element, shape: &[usize], values: &[f64]) -> Option<Tensor> {
        let values = match element {
            Element::F32 => Values::F32(values.iter().map(|x| *x as f32).collect()),
            Element::F64 => Values::F64(values.to_vec()),
            Element::F16 => Values::F16(values.iter().map(|x| f16::from_f64(*x)).collect()),
            Element::BF16 => Values::BF16(values.iter().map(|x| bf16::from_f64(*x)).collect()),
            _ => return None,
        };
        Some(Tensor::new(shape, values))
    }

    /// The tensor with floats as `f64`, exactly; anything else as it is.
    pub fn widened(&self) -> Tensor {
        if self.element() == Element::F64 {
            return self.clone();
        }
        match (self.element().is_float(), self.to_f64()) {
            (true, Some(values)) => Tensor::new(&self.shape, Values::F64(values)),
            _ => self.clone(),
        }
    }

    /// A tensor of integers or truth values of type `element`; `None` if it is neither. Integers wrap.
    pub fn of_ints(element: Element, shape: &[usize], values: &[i64]) -> Option<Tensor> {
        fn all<T>(v: &[i64], f: impl Fn(i64) -> T) -> Vec<T> {
            v.iter().map(|x| f(*x)).collect()
        }
        let values = match element {
            Element::I8 => Values::I8(all(values, |x| x as i8)),
            Element::I16 => Values::I16(all(values, |x| x as i16)),
            Element::I32 => Values::I32(all(values, |x| x as i32)),
            Element::I64 => Values::I64(values.to_vec()),
            Element::U8 => Values::U8(all(values, |x| x as u8)),
            Element::U16 => Values::U16(all(values, |x| x as u16)),
            Element::U32 => Values::U32(all(values, |x| x as u32)),
            Element::U64 => Values::U64(all(values, |x| x as u64)),
            Element::Bool => Values::Bool(all(values, |x| x != 0)),
            _ => return None,
        };
        Some(Tensor::new(shape, values))
    }

    /// The only element as `f64`; `None` for strings and for any other number of elements.
    pub fn scalar(&self) -> Option<f64> {
        (self.len() == 1).then(|| self.to_f64())?.map(|v| v[0])
    }

    /// Whether type, shape and elements are the same bit by bit: NaN equals NaN, 0 differs from -0.
    pub fn same_bits(&self, other: &Tensor) -> bool {
        self.shape == other.shape
            && self.element() == other.element()
            && match (&*self.values, &*other.values) {
                (Values::String(a), Values::String(b)) => a == b,
                (a, b) => raw(a) == raw(b),
            }
    }

    /// The tensor of a protobuf message whose elements are inside.
    ///
    /// # Errors
    /// A sentence: an element type nothing is computed with, sizes that do not fit, elements
    /// elsewhere.
    pub fn of_proto(proto: &TensorProto) -> Result<Tensor, String> {
        let element = Element::of_number(proto.data_type)
            .ok_or_else(|| format!("element type number {} is not supported", proto.data_type))?;
        let (shape, n) = sizes(&proto.dims)?;
        if proto.data_location == 1 {
            return Err("its elements are in another file".to_string());
        }
        let values = match (&proto.raw_data, element.bytes()) {
            (Some(bytes), Some(each)) => {
                if n.checked_mul(each) != Some(bytes.len()) {
                    return Err(format!(
                        "its shape {shape:?} of {element} does not take {} bytes",
                        bytes.len()
                    ));
                }
                of_raw(element, bytes)
            }
            _ => of_fields(element, proto),
        };
        if values.len() != n {
            return Err(format!(
                "its shape {shape:?} has {n} elements, but {} are stored",
                values.len()
            ));
        }
        Ok(Tensor {
            shape,
            values: Arc::new(values),
        })
    }

    /// A sentence if a message stores a wrong number of elements inside; they are not decoded.
    pub fn stored_size_problem(proto: &TensorProto) -> Option<String> {
        let element = Element::of_number(proto.data_type)?;
        let (shape, n) = match sizes(&proto.dims) {
            Ok(sizes) => sizes,
            Err(message) => return Some(message),
        };
        if let (Some(bytes), Some(each)) = (&proto.raw_data, element.bytes()) {
            let fits = n.checked_mul(each) == Some(bytes.len());
            let message = || {
                format!(
                    "its shape {shape:?} of {element} does not take {} bytes",
                    bytes.len()
                )
            };
            return (!fits).then(message);
        }
        let stored = match element {
            Element::F32 => proto.float_data.len(),
            Element::F64 => proto.double_data.len(),
            Element::I64 => proto.int64_data.len(),
            Element::U32 | Element::U64 => proto.uint64_data.len(),
            Element::String => proto.string_data.len(),
            _ => proto.int32_data.len(),
        };
        let message = || format!("its shape {shape:?} has {n} elements, but {stored} are stored");
        (stored != n).then(message)
    }

    /// Returns a protobuf message, with elements as little-endian bytes.
    pub fn to_proto(&self, name: &str) -> TensorProto {
        let mut proto = TensorProto {
            dims: self.shape.iter().map(|n| *n as i64).collect(),
            data_type: self.element().number(),
            name: name.to_string(),
            ..Default::default()
        };
        match &*self.values {
            Values::String(v) => proto.string_data = v.clone(),
            values => proto.raw_data = Some(Bytes::from(raw(values))),
        }
        proto
    }
}

/// Sizes as stored and their product.
///
/// # Errors
/// A sentence: more dimensions than [`MAX_RANK`], a negative size, or more elements than fit in memory.
pub fn sizes(dims: &[i64]) -> Result<(Vec<usize>, usize), String> {
    if dims.len() > MAX_RANK {
        return Err(format!(
            "a shape of {} dimensions; {MAX_RANK} at most are computed",
            dims.len()
        ));
    }
    let shape: Result<Vec<usize>, _> = dims.iter().map(|n| usize::try_from(*n)).collect();
    let shape = shape.map_err(|_| format!("its shape {dims:?} has a negative size"))?;
    let n = n_elements(&shape)
        .ok_or_else(|| format!("its shape {dims:?} has more elements than fit in memory"))?;
    Ok((shape, n))
}

/// The number of elements. `None` if the sizes other than 0 multiply to more than fits in memory: then strides would
/// not fit either, even if there is no element.
pub fn n_elements(shape: &[usize]) -> Option<usize> {
    let others = shape.iter().filter(|n| **n > 0);
    let n = others.copied().try_fold(1usize, usize::checked_mul)?;
    let is_empty = shape.contains(&0);
    (n <= isize::MAX as usize / 16).then_some(if is_empty { 0 } else { n })
}

/// A result of more elements is refused before memory is asked for.
const MAX_RESULT: usize = 1 << 31;

/// The number of elements of a result of sizes `shape`.
///
/// # Errors
/// It is more than is ever computed.
pub fn room(shape: &[usize]) -> Result<usize, String> {
    let n = n_elements(shape).filter(|n| *n <= MAX_RESULT);
    n.ok_or_else(|| format!("a result of sizes {shape:?} is too large to be computed"))
}

/// Elements from little-endian bytes.
pub fn of_raw(element: Element, bytes: &[u8]) -> Values {
    let mut rest = bytes;
    let fill = |part: &mut [u8]| -> Result<(), Infallible> {
        let (head, tail) = rest.split_at(part.len());
        part.copy_from_slice(head);
        rest = tail;
        Ok(())
    };
    match of_parts(element, bytes.len(), fill) {
        Ok(values) => values,
        Err(never) => match never {},
    }
}

/// Elements from `n_bytes` little-endian bytes that `fill` gives in order, a part at a time, so that they
/// never are in memory as bytes and as elements both.
///
/// # Errors
/// Those of `fill`.
pub fn of_parts<E>(
    element: Element,
    n_bytes: usize,
    fill: impl FnMut(&mut [u8]) -> Result<(), E>,
) -> Result<Values, E> {
    /// A multiple of every element's size that stays in the nearest cache.
    const PART: usize = 1 << 14;
    fn each<const N: usize, T, E>(
        n_bytes: usize,
        mut fill: impl FnMut(&mut [u8]) -> Result<(), E>,
        f: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, E> {
        let mut place = [0; PART];
        let mut left = n_bytes / N * N;
        let mut items = Vec::with_capacity(n_bytes / N);
        while left > 0 {
            let part = &mut place[..left.min(PART)];
            fill(part)?;
            items.extend(part.as_chunks::<N>().0.iter().map(|b| f(*b)));
            left -= part.len();
        }
        Ok(items)
    }
    Ok(match element {
        Element::F32 => Values::F32(each(n_bytes, fill, f32::from_le_bytes)?),
        Element::F64 => Values::F64(each(n_bytes, fill, f64::from_le_bytes)?),
        Element::F16 => Values::F16(each(n_bytes, fill, f16::from_le_bytes)?),
        Element::BF16 => Values::BF16(each(n_bytes, fill, bf16::from_le_bytes)?),
        Element::I8 => Values::I8(each(n_bytes, fill, i8::from_le_bytes)?),
        Element::I16 => Values::I16(each(n_bytes, fill, i16::from_le_bytes)?),
        Element::I32 => Values::I32(each(n_bytes, fill, i32::from_le_bytes)?),
        Element::I64 => Values::I64(each(n_bytes, fill, i64::from_le_bytes)?),
        Element::U8 => Values::U8(each(n_bytes, fill, u8::from_le_bytes)?),
        Element::U16 => Values::U16(each(n_bytes, fill, u16::from_le_bytes)?),
        Element::U32 => Values::U32(each(n_bytes, fill, u32::from_le_bytes)?),
        Element::U64 => Values::U64(each(n_bytes, fill, u64::from_le_bytes)?),
        Element::Bool => Values::Bool(each(n_bytes, fill, |[b]| b != 0)?),
        Element::String => Values::String(Vec::new()),
    })
}

fn of_fields(element: Element, proto: &TensorProto) -> Values {
    fn each<S: Copy, T>(v: &[S], f: impl Fn(S) -> T) -> Vec<T> {
        v.iter().map(|x| f(*x)).collect()
    }
    let small = &proto.int32_data;
    match element {
        Element::F32 => Values::F32(proto.float_data.clone()),
        Element::F64 => Values::F64(proto.double_data.clone()),
        Element::F16 => Values::F16(each(small, |b| f16::from_bits(b as u16))),
        Element::BF16 => Values::BF16(each(small, |b| bf16::from_bits(b as u16))),
        Element::I8 => Values::I8(each(small, |b| b as i8)),
        Element::I16 => Values::I16(each(small, |b| b as i16)),
        Element::I32 => Values::I32(small.clone()),
        Element::I64 => Values::I64(proto.int64_data.clone()),
        Element::U8 => Values::U8(each(small, |b| b as u8)),
        Element::U16 => Values::U16(each(small, |b| b as u16)),
        Element::U32 => Values::U32(each(&proto.uint64_data, |b| b as u32)),
        Element::U64 => Values::U64(proto.uint64_data.clone()),
        Element::Bool => Values::Bool(each(small, |b| b != 0)),
        Element::String => Values::String(proto.string_data.clone()),
    }
}

/// Little-endian bytes of the elements; of strings, their bytes one after the other.
pub fn raw(values: &Values) -> Vec<u8> {
    fn all<const N: usize, T: Copy>(v: &[T], f: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(v.len() * N);
        for x in v {
            bytes.extend_from_slice(&f(*x));
        }
        bytes
    }
    match values {
        Values::F32(v) => all(v, f32::to_le_bytes),
        Values::F64(v) => all(v, f64::to_le_bytes),
        Values::F16(v) => all(v, f16::to_le_bytes),
        Values::BF16(v) => all(v, bf16::to_le_bytes),
        Values::I8(v) => all(v, i8::to_le_bytes),
        Values::I16(v) => all(v, i16::to_le_bytes),
        Values::I32(v) => all(v, i32::to_le_bytes),
        Values::I64(v) => all(v, i64::to_le_bytes),
        Values::U8(v) => v.clone(),
        Values::U16(v) => all(v, u16::to_le_bytes),
        Values::U32(v) => all(v, u32::to_le_bytes),
        Values::U64(v) => all(v, u64::to_le_bytes),
        Values::Bool(v) => all(v, |b| [u8::from(b)]),
        Values::String(v) => v.concat(),
    }
}
