//! What is known of a value before anything runs: element type, symbolic sizes, elements.

use crate::element::Element;
use crate::stored::Stored;
use crate::tensor::Tensor;
use graph::SymExpr;
use std::sync::Arc;

/// Integer tensors of up to this many elements are known element by element.
pub const MAX_ELEMENTS: usize = 4096;

/// The sizes of a value with more dimensions count as unknown, even their number: a file may ask for billions.
pub const MAX_RANK: usize = 64;

/// What is known of a value.
#[derive(Clone, Debug, Default)]
pub struct Fact {
    /// Element type.
    pub element: Option<Element>,
    /// Sizes, outermost first; `None` if not even their number is known. A size nothing is known of
    /// is a symbol of its own. Symbols stand for sizes of at least 0.
    pub shape: Option<Vec<SymExpr>>,
    /// Integers or truth values that follow from sizes, row-major. Absent for constants.
    pub elements: Option<Arc<[SymExpr]>>,
    /// The value, if it is the same in every run.
    pub constant: Option<Arc<Stored>>,
}

impl Fact {
    /// A value of that type and those sizes.
    pub fn new(element: Option<Element>, shape: Option<Vec<SymExpr>>) -> Fact {
        Fact {
            element,
            shape,
            ..Fact::default()
        }
    }

    /// A constant.
    pub fn of_stored(stored: &Arc<Stored>) -> Fact {
        Fact {
            element: stored.element(),
            shape: stored
                .shape()
                .map(|s| s.into_iter().map(SymExpr::from).collect()),
            elements: None,
            constant: Some(Arc::clone(stored)),
        }
    }

    /// A constant computed here.
    pub fn of_tensor(tensor: Tensor) -> Fact {
        Fact::of_stored(&Arc::new(Stored::of_tensor("", tensor)))
    }

    /// Number of dimensions.
    pub fn rank(&self) -> Option<usize> {
        self.shape.as_ref().map(Vec::len)
    }

    /// Sizes, if none is symbolic.
    pub fn sizes(&self) -> Option<Vec<usize>> {
        let size = |n: &SymExpr| n.as_const().and_then(|n| usize::try_from(n).ok());
        self.shape.as_ref()?.iter().map(size).collect()
    }

    /// Number of elements, if no size is symbolic.
    pub fn len(&self) -> Option<usize> {
        self.sizes()?
            .iter()
            .try_fold(1usize, |p, n| p.checked_mul(*n))
    }

    /// Whether it is known to have no element.
    pub fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }

    /// The constant's elements, if it is one of at most [`MAX_ELEMENTS`].
    pub fn small(&self) -> Option<Tensor> {
        let stored = self.constant.as_ref().filter(|s| s.len() <= MAX_ELEMENTS)?;
        stored.tensor().ok()
    }

    /// The constant's elements, whatever its size.
    pub fn tensor(&self) -> Option<Tensor> {
        self.constant.as_ref()?.tensor().ok()
    }

    /// Integers or truth values, constant or following from sizes, row-major.
    pub fn ints(&self) -> Option<Vec<SymExpr>> {
        match &self.elements {
            Some(elements) => Some(elements.to_vec()),
            None => {
                let known = self.small()?.to_i64()?;
                Some(known.into_iter().map(SymExpr::constant).collect())
            }
        }
    }

    /// Integers of a constant.
    pub fn known_ints(&self) -> Option<Vec<i64>> {
        self.ints()?.iter().map(SymExpr::as_const).collect()
    }

    /// The one element of a constant (of any shape of one element) as a real number.
    pub fn scalar(&self) -> Option<f64> {
        self.small()?.scalar()
    }
}
