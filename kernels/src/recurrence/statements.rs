//! Expressions of a cell as statements of C.

use crate::emit::scalar;
use graph::{Binary, DType, Expr, Unary};
use std::collections::BTreeMap;
use std::fmt::Write;

/// An expression that a loop over time cannot compute.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a loop over time computes real numbers only, not {0}")]
pub(crate) struct NotReal(String);

/// A part of the text that computes values of one position.
pub(super) struct Statements<'a> {
    pub(super) dtype: DType,
    pub(super) inputs: &'a [String],
    /// Names of temporaries by the expressions that they hold.
    pub(super) known: BTreeMap<String, String>,
    pub(super) text: String,
}

impl Statements<'_> {
    /// The name of a temporary that holds the expression; equal parts are computed once.
    pub(super) fn value(&mut self, e: &Expr) -> Result<String, NotReal> {
        let is_truth = matches!(
            e,
            Expr::Binary(
                Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge,
                ..
            ) | Expr::Unary(Unary::Not | Unary::IsNan, _)
        );
        let text = match e {
            Expr::In(i) => return Ok(self.inputs[*i].clone()),
            Expr::Const(c) => return Ok(scalar::literal(*c, self.dtype)),
            Expr::Unary(f, a) => scalar::unary(*f, &self.value(a)?, self.dtype),
            Expr::Binary(Binary::And | Binary::Or | Binary::Xor, ..) => {
                return Err(NotReal(format!("{e:?}")));
            }
            Expr::Binary(f, a, b) => {
                let (a, b) = (self.value(a)?, self.value(b)?);
                scalar::binary(*f, &a, &b, self.dtype)
            }
            Expr::Select(c, a, b) => {
                let (c, a, b) = (self.value(c)?, self.value(a)?, self.value(b)?);
                format!("({c} ? {a} : {b})")
            }
            Expr::Cast(dtype, a) if *dtype == self.dtype => return self.value(a),
            Expr::Cast(..) | Expr::Index(_) | Expr::Uniform(..) => {
                return Err(NotReal(format!("{e:?}")));
            }
        };
        if let Some(name) = self.known.get(&text) {
            return Ok(name.clone());
        }
        let name = format!("u{}", self.known.len());
        let real = if is_truth {
            "int"
        } else {
            scalar::c_type(self.dtype)
        };
        let _ = writeln!(self.text, "          const {real} {name} = {text};");
        self.known.insert(text, name.clone());
        Ok(name)
    }
}
