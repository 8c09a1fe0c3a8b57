//! All operators by name. Adding one: its file, and a line here.

use crate::op::{Op, OpError};

/// Every operator, ordered by family.
pub static ALL: &[&dyn Op] = &[
    &crate::elementwise::Elementwise,
    &crate::contraction::Einsum,
    &crate::convolution::Conv,
    &crate::convolution::ConvTranspose,
    &crate::convolution::ConvDataGradient,
    &crate::convolution::ConvWeightGradient,
];

/// The operator of that name.
///
/// # Errors
/// There is none.
pub fn find(name: &str) -> Result<&'static dyn Op, OpError> {
    ALL.iter()
        .copied()
        .find(|op| op.name() == name)
        .ok_or_else(|| OpError::Unknown(name.to_string()))
}
