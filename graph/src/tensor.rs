//! Values for the interpreter and for constants: dense row-major arrays.
//!
//! Floats of every width are held as `f64`, integers and truth values as `i64`, so the
//! reference meaning of an operator can be computed in double precision.

use crate::dtype::DType;
use crate::scalar::Scalar;

/// Elements of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Elements of a floating-point tensor.
    Float(Vec<f64>),
    /// Elements of an integer or `bool` tensor.
    Int(Vec<i64>),
}

/// A dense row-major array.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Declared element type.
    pub dtype: DType,
    /// Sizes, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Elements, last dimension fastest.
    pub values: Values,
}

impl Tensor {
    /// A tensor of zeros.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Self {
        Self::filled(dtype, shape, Scalar::Int(0))
    }

    /// A tensor with every element `value`.
    pub fn filled(dtype: DType, shape: &[usize], value: Scalar) -> Self {
        let n = shape.iter().product();
        let values = if dtype.is_float() {
            Values::Float(vec![value.as_f64(); n])
        } else {
            Values::Int(vec![value.as_i64(); n])
        };
        Tensor {
            dtype,
            shape: shape.to_vec(),
            values,
        }
    }

    /// A floating-point tensor of those elements; panics if their number does not fit (a bug of the caller).
    pub fn from_f64(dtype: DType, shape: &[usize], data: Vec<f64>) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "element count");
        let values = if dtype.is_float() {
            Values::Float(data)
        } else {
            Values::Int(data.into_iter().map(|x| x as i64).collect())
        };
        Tensor {
            dtype,
            shape: shape.to_vec(),
            values,
        }
    }

    /// An integer tensor of those elements; panics if their number does not fit (a bug of the caller).
    pub fn from_i64(dtype: DType, shape: &[usize], data: Vec<i64>) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "element count");
        let values = if dtype.is_float() {
            Values::Float(data.into_iter().map(|x| x as f64).collect())
        } else {
            Values::Int(data)
        };
        Tensor {
            dtype,
            shape: shape.to_vec(),
            values,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match &self.values {
            Values::Float(v) => v.len(),
            Values::Int(v) => v.len(),
        }
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Row-major position of an index; `None` outside.
    pub fn offset(&self, index: &[i64]) -> Option<usize> {
        let mut at = 0;
        for (i, n) in index.iter().zip(&self.shape) {
            if *i < 0 || *i >= *n as i64 {
                return None;
            }
            at = at * n + *i as usize;
        }
        Some(at)
    }

    /// The element at a row-major position.
    pub fn at(&self, offset: usize) -> Scalar {
        match (&self.values, self.dtype) {
            (Values::Float(v), _) => Scalar::Float(v[offset]),
            (Values::Int(v), DType::Bool) => Scalar::Bool(v[offset] != 0),
            (Values::Int(v), _) => Scalar::Int(v[offset]),
        }
    }

    /// Stores an element at a row-major position, unrounded.
    pub fn set(&mut self, offset: usize, value: Scalar) {
        match &mut self.values {
            Values::Float(v) => v[offset] = value.as_f64(),
            Values::Int(v) => v[offset] = value.as_i64(),
        }
    }

    /// Elements as `f64`.
    pub fn to_f64(&self) -> Vec<f64> {
        match &self.values {
            Values::Float(v) => v.clone(),
            Values::Int(v) => v.iter().map(|i| *i as f64).collect(),
        }
    }

    /// Elements as `i64` (floats rounded towards zero).
    pub fn to_i64(&self) -> Vec<i64> {
        match &self.values {
            Values::Float(v) => v.iter().map(|x| *x as i64).collect(),
            Values::Int(v) => v.clone(),
        }
    }
}
