//! The C text of single values and elements: what a tasklet computes, where its memlets point.
//!
//! Owns the spelling of expressions over the variables `tN` of a [`Values`] table. Never decides where
//! a value is computed; that is the caller's.

use super::element_type;
use graph::{Binary, ContainerId, DType, Scalar};
use kernels::emit::index::Extents;
use kernels::emit::scalar;
use kernels::emit::values::{Address, Op, ValueId, Values};
use std::collections::BTreeMap;

/// The C type of a value in a register.
pub(super) fn value_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 | DType::BF16 => element_type(dtype),
        d => scalar::value_type(d),
    }
}

/// A literal of type `dtype`.
pub(super) fn literal(s: Scalar, dtype: DType) -> String {
    match dtype {
        DType::F16 | DType::BF16 => {
            let single = scalar::literal(s.cast(dtype), DType::F32);
            format!("sh_from_float<{}>({single})", element_type(dtype))
        }
        d => scalar::literal(s, d),
    }
}

/// Conversion of a value; half precision through single. To integers by one function of the prelude,
/// since what C leaves undefined (negative numbers to unsigned types, what is out of range, NaN) differs
/// between devices and hosts.
pub(super) fn cast(text: &str, from: DType, to: DType) -> String {
    let half = |d| matches!(d, DType::F16 | DType::BF16);
    if from == to {
        return text.to_string();
    }
    if half(from) {
        let single = format!("sh_to_float({text})");
        return cast(&single, DType::F32, to);
    }
    if half(to) {
        let single = scalar::cast(text, from, DType::F32);
        return format!("sh_from_float<{}>({single})", element_type(to));
    }
    match to {
        DType::I64 if from.is_float() => format!("sh_to_long({text})"),
        DType::I8 | DType::U8 | DType::I16 | DType::I32 if from.is_float() => {
            format!("({})sh_to_long({text})", value_type(to))
        }
        _ => scalar::cast(text, from, to),
    }
}

/// A table of values and the names its text uses.
#[derive(Clone, Copy)]
pub(super) struct ValueText<'a> {
    pub(super) values: &'a Values,
    pub(super) extents: &'a Extents,
    /// The C names of containers.
    pub(super) names: &'a BTreeMap<ContainerId, String>,
}

impl ValueText<'_> {
    /// What must hold for the element to exist.
    pub(super) fn conditions(&self, a: &Address) -> Vec<String> {
        let within = |index: &str, size: i64| format!("((unsigned long){index} < {size}UL)");
        let mut all: Vec<String> = a
            .guards
            .iter()
            .map(|g| within(&self.extents.c_text(&g.index), g.size))
            .collect();
        if a.fill.is_some() {
            let gathered = a.gather.iter();
            all.extend(gathered.map(|(v, _, size)| within(&self.operand(*v), *size)));
        }
        all
    }

    /// The element in memory.
    pub(super) fn element(&self, a: &Address) -> String {
        let mut offset = self.extents.c_text(&a.offset);
        for (index, stride, _) in &a.gather {
            offset.push_str(&format!(" + {}*{stride}", self.operand(*index)));
        }
        format!("{}[{offset}]", self.names[&a.container])
    }

    /// A value where it is used: its variable or a literal.
    pub(super) fn operand(&self, id: ValueId) -> String {
        match &self.values.get(id).op {
            Op::Const(s) => literal(*s, self.values.get(id).dtype),
            _ => format!("t{}", id.0),
        }
    }

    /// How the `n`-th value is made.
    pub(super) fn computation(&self, n: usize) -> String {
        let value = &self.values.values[n];
        let of = |v: &ValueId| self.operand(*v);
        match &value.op {
            Op::Const(s) => scalar::literal(*s, value.dtype),
            Op::Load(a) => self.load(a, value.dtype),
            Op::Index(e) => self.extents.c_text(e),
            Op::Unary(f, a) => scalar::unary(*f, &of(a), self.values.get(*a).dtype),
            // Fused with a sum, a product would differ from the same one elsewhere, such as a row's maximum.
            Op::Binary(Binary::Mul, d, a, b) if d.is_float() => {
                format!("sh_mul{}({}, {})", scalar::prelude_suffix(*d), of(a), of(b))
            }
            Op::Binary(f, d, a, b) => scalar::binary(*f, &of(a), &of(b), *d),
            Op::Select(c, a, b) => format!("({} ? {} : {})", of(c), of(a), of(b)),
            Op::Cast(a) => cast(&of(a), self.values.get(*a).dtype, value.dtype),
            Op::Uniform(k, n) => format!(
                "sh_uniform((unsigned long){}, (unsigned long){})",
                of(k),
                of(n)
            ),
        }
    }

    fn load(&self, a: &Address, dtype: DType) -> String {
        let conditions = self.conditions(a);
        let ctype = value_type(dtype);
        match a.fill {
            Some(fill) if !conditions.is_empty() => format!(
                "{} ? ({ctype}){} : {}",
                conditions.join(" & "),
                self.element(a),
                literal(fill, dtype)
            ),
            _ => self.element(a),
        }
    }
}
