//! What is done in place to every element of many arrays, such as an optimizer's step over all parameters.
//!
//! Owns the description of an update and the C text of its values, which kernels for the CPU ([`cpu`]) and for CUDA
//! (`pooled.rs` in `kernels/cuda`) share. Never decides who updates which elements.
//!
//! An update is legal in place because an element's successors depend on the elements of its own position only.

pub mod cpu;

use crate::emit::scalar;
use crate::emit::text::CText;
use graph::{DType, Expr};
use std::collections::BTreeMap;

/// One operand that every array has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Its name in messages.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Whether it has a successor, which takes its place.
    pub written: bool,
}

/// What is done to each element.
#[derive(Clone, Debug)]
pub struct Update {
    /// What messages call it.
    pub name: String,
    /// What every array has, all of one size.
    pub operands: Vec<Operand>,
    /// Names of single numbers that are read when the update runs: f32 in a device's memory, f64 on the CPU.
    pub numbers: Vec<String>,
    /// Position of the number that, where it is not 0, keeps everything as it is.
    pub unless: Option<usize>,
    /// The successors, each with the position of its operand: real arithmetic on the inputs, which are the operands,
    /// then the numbers.
    pub rules: Vec<(usize, Expr)>,
    /// The type that elements are computed in, f32 or f64.
    pub dtype: DType,
}

/// Why an update has no kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UpdateError {
    /// An expression that is not real arithmetic.
    #[error("the update `{update}` of `{operand}` has an operation that is no real arithmetic")]
    Operation {
        /// The update.
        update: String,
        /// The operand that the rule is for.
        operand: String,
    },
    /// An operand has several rules, or one that is not written has one, or none has.
    #[error("the update `{update}` needs one rule for each operand that is written, and no others")]
    Rules {
        /// The update.
        update: String,
    },
    /// More operands than a launch takes.
    #[error("the update `{update}` has {n} operands and numbers, more than a kernel takes")]
    Operands {
        /// The update.
        update: String,
        /// How many.
        n: usize,
    },
}

/// How a back end spells its values.
pub struct Spelling {
    /// The type of values that are the same for all elements.
    pub common: DType,
    /// The text of a conversion.
    pub cast: fn(&str, DType, DType) -> String,
}

/// The text of an update's values. Operand `n` of an element is the variable `vN`, its successor `xN`, and number `n`
/// is `sN`.
pub struct UpdateText {
    /// Declarations of values that are the same for all elements.
    pub common: String,
    /// Their names.
    pub common_names: Vec<String>,
    /// Declarations of an element's values, and assignments of its successors.
    pub element: String,
}

impl UpdateText {
    /// The text of an update's values.
    ///
    /// # Errors
    /// See [`UpdateError`].
    pub fn new(update: &Update, spelling: &Spelling) -> Result<UpdateText, UpdateError> {
        let written = update.operands.iter().enumerate();
        let written: Vec<usize> = written.filter(|(_, o)| o.written).map(|(n, _)| n).collect();
        let mut ruled: Vec<usize> = update.rules.iter().map(|(n, _)| *n).collect();
        ruled.sort_unstable();
        if ruled != written || written.is_empty() {
            let update = update.name.clone();
            return Err(UpdateError::Rules { update });
        }
        let mut lines = Lines {
            n_operands: update.operands.len(),
            dtype: update.dtype,
            common_dtype: spelling.common,
            known: BTreeMap::new(),
            narrowed: BTreeMap::new(),
            common: CText::default(),
            common_names: Vec::new(),
            element: CText::default(),
        };
        let mut successors = Vec::new();
        for (n, rule) in &update.rules {
            let value = lines.value(rule).ok_or_else(|| UpdateError::Operation {
                update: update.name.clone(),
                operand: update.operands[*n].name.clone(),
            })?;
            successors.push((*n, lines.for_elements(value)));
        }
        for (n, text) in successors {
            let stored = (spelling.cast)(&text, update.dtype, update.operands[n].dtype);
            lines.element.line(&format!("x{n} = {stored};"));
        }
        Ok(UpdateText {
            common: lines.common.finish(),
            common_names: lines.common_names,
            element: lines.element.finish(),
        })
    }
}

/// A value's text, and whether it is the same for every element.
#[derive(Clone)]
struct Value {
    text: String,
    is_common: bool,
}

/// Values of expressions, each computed once. Those that depend on elements are kept apart from the common ones.
struct Lines {
    n_operands: usize,
    dtype: DType,
    common_dtype: DType,
    known: BTreeMap<Expr, Value>,
    /// Common values in the type that elements are computed in.
    narrowed: BTreeMap<String, String>,
    common: CText,
    common_names: Vec<String>,
    element: CText,
}

impl Lines {
    /// `None` for what is not real arithmetic.
    fn value(&mut self, e: &Expr) -> Option<Value> {
        if let Some(known) = self.known.get(e) {
            return Some(known.clone());
        }
        let common = |text| Value {
            text,
            is_common: true,
        };
        let made = match e {
            Expr::In(n) if *n < self.n_operands => Value {
                text: format!("v{n}"),
                is_common: false,
            },
            Expr::In(n) => common(format!("s{}", n - self.n_operands)),
            Expr::Const(number) => {
                e.as_number()?;
                common(scalar::literal(*number, self.common_dtype))
            }
            Expr::Unary(f, a) if !matches!(f, graph::Unary::Not | graph::Unary::IsNan) => {
                let a = self.value(a)?;
                let text = scalar::unary(*f, &a.text, self.type_of(a.is_common));
                self.named(text, a.is_common)
            }
            Expr::Binary(f, a, b) if is_arithmetic(*f) => {
                let (a, b) = (self.value(a)?, self.value(b)?);
                let is_common = a.is_common && b.is_common;
                let (a, b) = match is_common {
                    true => (a.text, b.text),
                    false => (self.for_elements(a), self.for_elements(b)),
                };
                let text = scalar::binary(*f, &a, &b, self.type_of(is_common));
                self.named(text, is_common)
            }
            _ => return None,
        };
        self.known.insert(e.clone(), made.clone());
        Some(made)
    }

    fn type_of(&self, is_common: bool) -> DType {
        match is_common {
            true => self.common_dtype,
            false => self.dtype,
        }
    }

    /// A value in the type that elements are computed in.
    fn for_elements(&mut self, value: Value) -> String {
        if !value.is_common || self.common_dtype == self.dtype {
            return value.text;
        }
        if let Some(known) = self.narrowed.get(&value.text) {
            return known.clone();
        }
        let name = format!("e{}", self.narrowed.len());
        let cast = scalar::cast(&value.text, self.common_dtype, self.dtype);
        let ctype = scalar::value_type(self.dtype);
        self.common.line(&format!("const {ctype} {name} = {cast};"));
        self.narrowed.insert(value.text, name.clone());
        name
    }

    fn named(&mut self, computation: String, is_common: bool) -> Value {
        let ctype = scalar::value_type(self.type_of(is_common));
        let text = format!("t{}", self.known.len());
        let line = format!("const {ctype} {text} = {computation};");
        match is_common {
            true => {
                self.common.line(&line);
                self.common_names.push(text.clone());
            }
            false => self.element.line(&line),
        }
        Value { text, is_common }
    }
}

fn is_arithmetic(f: graph::Binary) -> bool {
    use graph::Binary::*;
    matches!(f, Add | Sub | Mul | Div | Pow | Min | Max)
}
