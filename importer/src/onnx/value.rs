//! What is known of an ONNX value at import: a container, numbers of the file, or symbolic integers.
//!
//! Shapes are ordinary values in ONNX. Integers that follow from sizes are kept symbolic here, so
//! that `Reshape` or `Slice` gets expressions over sizes; they become containers only where a node
//! uses them as data.

use super::tensor::Stored;
use graph::{ContainerId, DType, SymExpr, Tensor, Values};
use std::sync::Arc;

/// Integer tensors of the file up to this many elements are known element by element.
pub const MAX_KNOWN: usize = 4096;

/// What is known of a value.
#[derive(Clone, Debug)]
pub enum Value {
    /// Computed by the graph, or given to it.
    Data(ContainerId),
    /// Integers (or truth values) that follow from sizes and constants.
    Ints(Ints),
    /// Numbers that a node of the model spells out.
    Constant(Arc<Tensor>),
    /// Numbers of the file: a parameter, if they are used as data.
    Stored(Arc<Stored>),
    /// Tensors in order, as data.
    Sequence(Vec<ContainerId>),
    /// It depends on something that could not be imported.
    Broken,
}

/// A tensor of symbolic integers, which may be stored as floats; truth values are 0 and 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Ints {
    /// Element type; a float's elements are whole numbers.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Elements, row-major.
    pub elements: Vec<SymExpr>,
}

impl Ints {
    /// A vector of `i64`.
    pub fn vector(elements: Vec<SymExpr>) -> Self {
        Ints {
            dtype: DType::I64,
            shape: vec![elements.len()],
            elements,
        }
    }

    /// A scalar of `i64`.
    pub fn scalar(element: SymExpr) -> Self {
        Ints {
            dtype: DType::I64,
            shape: Vec::new(),
            elements: vec![element],
        }
    }

    /// The integers of a tensor; `None` for floats and for very many elements.
    pub fn of_tensor(tensor: &Tensor) -> Option<Self> {
        match &tensor.values {
            Values::Int(v) if v.len() <= MAX_KNOWN => Some(Ints {
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                elements: v.iter().map(|i| SymExpr::constant(*i)).collect(),
            }),
            _ => None,
        }
    }

    /// The tensor, if no element is symbolic.
    pub fn to_tensor(&self) -> Option<Tensor> {
        let elements = self.elements.iter().map(SymExpr::as_const);
        let elements: Option<Vec<i64>> = elements.collect();
        Some(Tensor::from_i64(self.dtype, &self.shape, elements?))
    }
}
