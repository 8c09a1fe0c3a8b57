//! The floats an operator computes in: `f64` for doubles and widened runs, `f32` for all others.
//!
//! Owns reading tensors into them and rounding results back. Never computes.

use crate::element::Element;
use crate::tensor::{Tensor, Values};
use half::{bf16, f16};
use std::borrow::Cow;

/// `f32` or `f64`.
pub trait Real:
    num_traits::Float
    + super::blocks::Lanes
    + ndarray::LinalgScalar
    + std::ops::AddAssign
    + std::ops::MulAssign
    + std::iter::Sum
    + std::fmt::Debug
    + Send
    + Sync
{
    /// The nearest number.
    fn of(x: f64) -> Self;

    /// The same number.
    fn wide(self) -> f64;

    /// A tensor's elements as `Self`, whichever type of float they have in the tensor.
    ///
    /// # Errors
    /// It is no tensor of floats.
    fn read(tensor: &Tensor) -> Result<Cow<'_, [Self]>, String>;

    /// A tensor of floats of type `element`.
    ///
    /// # Errors
    /// `element` is no float type.
    fn tensor(element: Element, shape: &[usize], values: Vec<Self>) -> Result<Tensor, String>;
}

fn refuse<T>(element: Element) -> Result<T, String> {
    Err(format!("it is not defined on {element}"))
}

impl Real for f32 {
    fn of(x: f64) -> f32 {
        x as f32
    }

    fn wide(self) -> f64 {
        f64::from(self)
    }

    fn read(tensor: &Tensor) -> Result<Cow<'_, [f32]>, String> {
        Ok(match &*tensor.values {
            Values::F32(v) => Cow::Borrowed(v),
            Values::F64(v) => Cow::Owned(v.iter().map(|x| *x as f32).collect()),
            Values::F16(v) => Cow::Owned(v.iter().map(|x| x.to_f32()).collect()),
            Values::BF16(v) => Cow::Owned(v.iter().map(|x| x.to_f32()).collect()),
            other => return refuse(other.element()),
        })
    }

    fn tensor(element: Element, shape: &[usize], values: Vec<f32>) -> Result<Tensor, String> {
        let values = match element {
            Element::F32 => Values::F32(values),
            Element::F64 => Values::F64(values.into_iter().map(f64::from).collect()),
            Element::F16 => Values::F16(values.into_iter().map(f16::from_f32).collect()),
            Element::BF16 => Values::BF16(values.into_iter().map(bf16::from_f32).collect()),
            other => return refuse(other),
        };
        Ok(Tensor::new(shape, values))
    }
}

impl Real for f64 {
    fn of(x: f64) -> f64 {
        x
    }

    fn wide(self) -> f64 {
        self
    }

    fn read(tensor: &Tensor) -> Result<Cow<'_, [f64]>, String> {
        match &*tensor.values {
            Values::F64(v) => Ok(Cow::Borrowed(v)),
            other if other.element().is_float() => {
                tensor.to_f64().map(Cow::Owned).ok_or_else(String::new)
            }
            other => refuse(other.element()),
        }
    }

    fn tensor(element: Element, shape: &[usize], values: Vec<f64>) -> Result<Tensor, String> {
        match element {
            Element::F64 => Ok(Tensor::new(shape, Values::F64(values))),
            _ => match Tensor::floats(element, shape, &values) {
                Some(tensor) => Ok(tensor),
                None => refuse(element),
            },
        }
    }
}

/// Evaluates `$body`, a `Result<_, String>`, with `$real` naming the float type that tensors of
/// `$element` are computed in.
macro_rules! in_real {
    ($element:expr, $real:ident => $body:expr) => {
        match $element {
            $crate::element::Element::F64 => {
                type $real = f64;
                $body
            }
            $crate::element::Element::F32
            | $crate::element::Element::F16
            | $crate::element::Element::BF16 => {
                type $real = f32;
                $body
            }
            other => Err(format!("it is not defined on {other}")),
        }
    };
}
pub(crate) use in_real;
