//! Tensors of a file: element types, elements inside the file or in one beside it.
//!
//! Elements are decoded only when asked for. This file never decides what a tensor is used for.

use super::proto::TensorProto;
use bytes::Bytes;
use graph::{DType, Tensor, Values};
use onnx::element::Element;
use onnx::stored::External;
use std::borrow::Cow;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Names of `TensorProto.DataType` by number, for messages.
const TYPE_NAMES: [&str; 29] = [
    "undefined",
    "float",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "int32",
    "int64",
    "string",
    "bool",
    "float16",
    "double",
    "uint32",
    "uint64",
    "complex64",
    "complex128",
    "bfloat16",
    "float8e4m3fn",
    "float8e4m3fnuz",
    "float8e5m2",
    "float8e5m2fnuz",
    "uint4",
    "int4",
    "float4e2m1",
    "float8e8m0",
    "uint2",
    "int2",
    "float6e2m3",
    "float6e3m2",
];

/// The element type of that ONNX number.
///
/// # Errors
/// There is no such type here; the sentence names it.
pub fn dtype_of(number: i32) -> Result<DType, String> {
    Ok(match number {
        1 => DType::F32,
        2 => DType::U8,
        3 => DType::I8,
        5 => DType::I16,
        6 => DType::I32,
        7 => DType::I64,
        9 => DType::Bool,
        10 => DType::F16,
        11 => DType::F64,
        16 => DType::BF16,
        _ => {
            let name = usize::try_from(number).ok().and_then(|n| TYPE_NAMES.get(n));
            let name = name.map_or_else(|| format!("number {number}"), |n| format!("`{n}`"));
            return Err(format!("element type {name} is not supported"));
        }
    })
}

/// The element type that a file has for a type of graphs.
pub fn element_of(dtype: DType) -> Element {
    match dtype {
        DType::F32 => Element::F32,
        DType::F64 => Element::F64,
        DType::F16 => Element::F16,
        DType::BF16 => Element::BF16,
        DType::I64 => Element::I64,
        DType::I32 => Element::I32,
        DType::I16 => Element::I16,
        DType::I8 => Element::I8,
        DType::U8 => Element::U8,
        DType::Bool => Element::Bool,
    }
}

/// A tensor of the file, its elements not decoded yet.
#[derive(Clone, Debug)]
pub struct Stored {
    dtype: DType,
    shape: Vec<usize>,
    elements: Elements,
}

#[derive(Clone, Debug)]
enum Elements {
    /// Little-endian, inside the file.
    Raw(Bytes),
    /// Real numbers of a typed field.
    Floats(Vec<f64>),
    /// Integers of a typed field.
    Ints(Vec<i64>),
    /// Little-endian, in another file.
    External { path: PathBuf, offset: u64 },
}

impl Stored {
    /// Checks type, sizes and number of elements; external data is looked for in `folder`.
    ///
    /// # Errors
    /// A sentence about what does not fit.
    pub(super) fn new(proto: &TensorProto, folder: &Path) -> Result<Stored, String> {
        let dtype = dtype_of(proto.data_type)?;
        let mut shape = Vec::new();
        for n in &proto.dims {
            shape.push(usize::try_from(*n).map_err(|_| format!("it has a size of {n}"))?);
        }
        let n_elements = shape.iter().try_fold(1usize, |p, n| p.checked_mul(*n));
        let n_bytes = n_elements.and_then(|n| n.checked_mul(dtype.bytes()));
        let (Some(n_elements), Some(n_bytes)) = (n_elements, n_bytes) else {
            return Err(format!(
                "its shape {shape:?} has more elements than fit in memory"
            ));
        };
        let elements = if proto.data_location == 1 {
            external(proto, folder)?
        } else if let Some(raw) = &proto.raw_data {
            if raw.len() != n_bytes {
                return Err(format!(
                    "its shape {shape:?} of {dtype} takes {n_bytes} bytes, but {} are stored",
                    raw.len()
                ));
            }
            Elements::Raw(raw.clone())
        } else {
            let elements = typed(proto, dtype);
            let found = match &elements {
                Elements::Floats(v) => v.len(),
                Elements::Ints(v) => v.len(),
                _ => n_elements,
            };
            if found != n_elements {
                return Err(format!(
                    "its shape {shape:?} has {n_elements} elements, but {found} are stored"
                ));
            }
            elements
        };
        Ok(Stored {
            dtype,
            shape,
            elements,
        })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn n_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The elements as little-endian bytes of [`Stored::dtype`], row-major; not copied where the
    /// file holds them so. They may be unaligned.
    ///
    /// # Errors
    /// External data cannot be read.
    pub fn bytes(&self) -> std::io::Result<Cow<'_, [u8]>> {
        match &self.elements {
            Elements::Raw(raw) => Ok(Cow::Borrowed(raw)),
            Elements::Floats(v) => Ok(Cow::Owned(encode(&Values::Float(v.clone()), self.dtype))),
            Elements::Ints(v) => Ok(Cow::Owned(encode(&Values::Int(v.clone()), self.dtype))),
            Elements::External { path, offset } => {
                let mut file = std::fs::File::open(path)?;
                file.seek(SeekFrom::Start(*offset))?;
                let mut bytes = vec![0; self.n_elements() * self.dtype.bytes()];
                file.read_exact(&mut bytes)?;
                Ok(Cow::Owned(bytes))
            }
        }
    }

    /// The elements as a [`Tensor`].
    ///
    /// # Errors
    /// External data cannot be read.
    pub fn tensor(&self) -> std::io::Result<Tensor> {
        let values = match &self.elements {
            Elements::Floats(v) => Values::Float(v.clone()),
            Elements::Ints(v) => Values::Int(v.clone()),
            _ => decode(&self.bytes()?, self.dtype),
        };
        Ok(Tensor {
            dtype: self.dtype,
            shape: self.shape.clone(),
            values,
        })
    }
}

fn typed(proto: &TensorProto, dtype: DType) -> Elements {
    match dtype {
        DType::F32 => Elements::Floats(proto.float_data.iter().map(|x| f64::from(*x)).collect()),
        DType::F64 => Elements::Floats(proto.double_data.clone()),
        DType::I64 => Elements::Ints(proto.int64_data.clone()),
        DType::F16 | DType::BF16 => {
            let from_bits = |bits: &i32| half_to_f64(*bits as u16, dtype);
            Elements::Floats(proto.int32_data.iter().map(from_bits).collect())
        }
        _ => Elements::Ints(proto.int32_data.iter().map(|i| i64::from(*i)).collect()),
    }
}

/// Where the elements are in another file, which is there and long enough.
fn external(proto: &TensorProto, folder: &Path) -> Result<Elements, String> {
    let found = External::new(proto, folder)?;
    let found = found.ok_or("its external data has no location")?;
    Ok(Elements::External {
        path: found.path,
        offset: found.offset,
    })
}

fn decode(bytes: &[u8], dtype: DType) -> Values {
    fn each<const N: usize, T>(bytes: &[u8], f: impl Fn([u8; N]) -> T) -> Vec<T> {
        bytes.as_chunks::<N>().0.iter().map(|b| f(*b)).collect()
    }
    match dtype {
        DType::Bool => Values::Int(each(bytes, |[b]| i64::from(b != 0))),
        DType::U8 => Values::Int(each(bytes, |[b]| i64::from(b))),
        DType::I8 => Values::Int(each(bytes, |b| i64::from(i8::from_le_bytes(b)))),
        DType::I16 => Values::Int(each(bytes, |b| i64::from(i16::from_le_bytes(b)))),
        DType::I32 => Values::Int(each(bytes, |b| i64::from(i32::from_le_bytes(b)))),
        DType::I64 => Values::Int(each(bytes, i64::from_le_bytes)),
        DType::F16 | DType::BF16 => {
            Values::Float(each(bytes, |b| half_to_f64(u16::from_le_bytes(b), dtype)))
        }
        DType::F32 => Values::Float(each(bytes, |b| f64::from(f32::from_le_bytes(b)))),
        DType::F64 => Values::Float(each(bytes, f64::from_le_bytes)),
    }
}

/// Little-endian bytes of typed fields. Halves come from exact values, so their bits are too.
fn encode(values: &Values, dtype: DType) -> Vec<u8> {
    match values {
        Values::Float(v) => v
            .iter()
            .flat_map(|x| match dtype {
                DType::F64 => x.to_le_bytes().to_vec(),
                DType::BF16 => half::bf16::from_f64(*x).to_le_bytes().to_vec(),
                DType::F16 => half::f16::from_f64(*x).to_le_bytes().to_vec(),
                _ => (*x as f32).to_le_bytes().to_vec(),
            })
            .collect(),
        Values::Int(v) => v
            .iter()
            .flat_map(|i| i.to_le_bytes()[..dtype.bytes()].to_vec())
            .collect(),
    }
}

fn half_to_f64(bits: u16, dtype: DType) -> f64 {
    if dtype == DType::BF16 {
        half::bf16::from_bits(bits).to_f64()
    } else {
        half::f16::from_bits(bits).to_f64()
    }
}
