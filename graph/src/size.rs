//! Symbolic sizes and indices: integer polynomials over named symbols, kept canonical.
//!
//! A [`SymExpr`] is used for container shapes (`batch`, `3*seq`), map ranges and memlet
//! indices (`2*oh + r - 1`, where `oh` and `r` are map parameters). Two expressions are equal
//! exactly when their canonical forms are, so equality never runs algebra.
//! Numbers are `i64` and wrap, as the integers of a model do.
//! This file never knows what a symbol stands for.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Add, Mul, Neg, Sub};
use std::sync::Arc;

/// The name of a size (`batch`) or of a map parameter (`oh`).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Symbol(Arc<str>);

impl Symbol {
    /// A symbol of that name.
    pub fn new(name: impl AsRef<str>) -> Self {
        Symbol(Arc::from(name.as_ref()))
    }
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&str> for Symbol {
    fn from(name: &str) -> Self {
        Symbol::new(name)
    }
}

/// Values for symbols.
pub type Bindings = BTreeMap<Symbol, i64>;

/// An indivisible factor of a monomial.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Atom {
    /// A symbol.
    Symbol(Symbol),
    /// Quotient rounded towards minus infinity.
    FloorDiv(Box<SymExpr>, Box<SymExpr>),
    /// Remainder with the sign of the divisor.
    Mod(Box<SymExpr>, Box<SymExpr>),
    /// The smaller of two.
    Min(Box<SymExpr>, Box<SymExpr>),
    /// The larger of two.
    Max(Box<SymExpr>, Box<SymExpr>),
}

/// An integer polynomial: `Σ coefficient · Π atoms`, terms sorted, no zero coefficients.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct SymExpr {
    terms: Vec<(Vec<Atom>, i64)>,
}

/// A symbol had no value when one was needed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// No binding for the symbol.
    #[error("size `{0}` has no value here; bind it before evaluating")]
    Unbound(Symbol),
    /// Division by zero.
    #[error("division by zero in size expression `{0}`")]
    DivisionByZero(String),
}

impl SymExpr {
    /// The constant `value`.
    pub fn constant(value: i64) -> Self {
        if value == 0 {
            return SymExpr::default();
        }
        SymExpr {
            terms: vec![(Vec::new(), value)],
        }
    }

    /// The symbol `name`.
    pub fn symbol(name: impl Into<Symbol>) -> Self {
        Self::atom(Atom::Symbol(name.into()))
    }

    fn atom(atom: Atom) -> Self {
        SymExpr {
            terms: vec![(vec![atom], 1)],
        }
    }

    fn from_map(map: BTreeMap<Vec<Atom>, i64>) -> Self {
        SymExpr {
            terms: map.into_iter().filter(|(_, c)| *c != 0).collect(),
        }
    }

    /// The terms: sorted products of atoms with their coefficients; the empty product is the constant.
    pub fn terms(&self) -> &[(Vec<Atom>, i64)] {
        &self.terms
    }

    /// The value, if no symbol occurs.
    pub fn as_const(&self) -> Option<i64> {
        match self.terms.as_slice() {
            [] => Some(0),
            [(atoms, c)] if atoms.is_empty() => Some(*c),
            _ => None,
        }
    }

    /// The symbol, if the expression is exactly one symbol.
    pub fn as_symbol(&self) -> Option<&Symbol> {
        match self.terms.as_slice() {
            [(atoms, 1)] => match atoms.as_slice() {
                [Atom::Symbol(s)] => Some(s),
                _ => None,
            },
            _ => None,
        }
    }

    /// Whether the value is zero.
    pub fn is_zero(&self) -> bool {
        self.terms.is_empty()
    }

    /// Linear form `Σ coefficient·symbol + constant`, if it is one.
    pub fn as_affine(&self) -> Option<(Vec<(Symbol, i64)>, i64)> {
        let mut linear = Vec::new();
        let mut constant = 0;
        for (atoms, c) in &self.terms {
            match atoms.as_slice() {
                [] => constant = *c,
                [Atom::Symbol(s)] => linear.push((s.clone(), *c)),
                _ => return None,
            }
        }
        Some((linear, constant))
    }

    /// `⌊self / divisor⌋`; terms divisible by a constant divisor are taken out.
    pub fn floor_div(&self, divisor: &SymExpr) -> SymExpr {
        if divisor.as_const() == Some(1) || self.is_zero() {
            return self.clone();
        }
        if let Some(d) = divisor.as_const().filter(|d| *d != 0) {
            let (whole, rest) = self.split_multiples(d);
            if let Some(r) = rest.as_const() {
                return whole
                    + SymExpr::constant(
                        r.wrapping_div_euclid(d)
                            .wrapping_sub(i64::from(d < 0 && r.wrapping_rem_euclid(d) != 0)),
                    );
            }
            let q = Atom::FloorDiv(Box::new(rest), Box::new(divisor.clone()));
            return whole + SymExpr::atom(q);
        }
        if self == divisor {
            return SymExpr::constant(1);
        }
        if let Some(q) = self.divide_exactly(divisor) {
            return q;
        }
        SymExpr::atom(Atom::FloorDiv(
            Box::new(self.clone()),
            Box::new(divisor.clone()),
        ))
    }

    /// `self mod divisor`.
    pub fn modulo(&self, divisor: &SymExpr) -> SymExpr {
        if let Some(d) = divisor.as_const().filter(|d| *d > 0) {
            let (_, rest) = self.split_multiples(d);
            if let Some(r) = rest.as_const() {
                return SymExpr::constant(r.rem_euclid(d));
            }
            return SymExpr::atom(Atom::Mod(Box::new(rest), Box::new(divisor.clone())));
        }
        if self == divisor || self.divide_exactly(divisor).is_some() {
            return SymExpr::default();
        }
        SymExpr::atom(Atom::Mod(Box::new(self.clone()), Box::new(divisor.clone())))
    }

    /// `⌈self / divisor⌉`.
    pub fn ceil_div(&self, divisor: &SymExpr) -> SymExpr {
        -(-self.clone()).floor_div(divisor)
    }

    /// The smaller of two.
    pub fn min_with(&self, other: &SymExpr) -> SymExpr {
        match ((self.clone() - other.clone()).as_const(), self <= other) {
            (Some(d), _) if d <= 0 => self.clone(),
            (Some(_), _) => other.clone(),
            (None, true) => Self::atom(Atom::Min(Box::new(self.clone()), Box::new(other.clone()))),
            (None, false) => Self::atom(Atom::Min(Box::new(other.clone()), Box::new(self.clone()))),
        }
    }

    /// The larger of two.
    pub fn max_with(&self, other: &SymExpr) -> SymExpr {
        match ((self.clone() - other.clone()).as_const(), self <= other) {
            (Some(d), _) if d >= 0 => self.clone(),
            (Some(_), _) => other.clone(),
            (None, true) => Self::atom(Atom::Max(Box::new(self.clone()), Box::new(other.clone()))),
            (None, false) => Self::atom(Atom::Max(Box::new(other.clone()), Box::new(self.clone()))),
        }
    }

    /// `(whole, rest)` with `self = d·whole + rest`, where `d` divides no coefficient of `rest`.
    fn split_multiples(&self, d: i64) -> (SymExpr, SymExpr) {
        let (mut whole, mut rest) = (SymExpr::default(), SymExpr::default());
        for (atoms, c) in &self.terms {
            if c.wrapping_rem(d) == 0 {
                whole.terms.push((atoms.clone(), c.wrapping_div(d)));
            } else {
                rest.terms.push((atoms.clone(), *c));
            }
        }
        (whole, rest)
    }

    /// `q` with `q·divisor = self`, found when the divisor is a single term.
    pub fn divide_exactly(&self, divisor: &SymExpr) -> Option<SymExpr> {
        if let Some(d) = divisor.as_const() {
            if d == 0 {
                return None;
            }
            let (whole, rest) = self.split_multiples(d);
            return rest.is_zero().then_some(whole);
        }
        let [(factors, d)] = divisor.terms.as_slice() else {
            return (self == divisor).then(|| SymExpr::constant(1));
        };
        let mut map = BTreeMap::new();
        for (atoms, c) in &self.terms {
            let mut left = atoms.clone();
            for f in factors {
                let at = left.iter().position(|a| a == f)?;
                left.remove(at);
            }
            if c.wrapping_rem(*d) != 0 {
                return None;
            }
            let sum = map.entry(left).or_insert(0i64);
            *sum = sum.wrapping_add(c.wrapping_div(*d));
        }
        Some(Self::from_map(map))
    }

    /// Symbols that occur, each once, in order.
    pub fn symbols(&self) -> Vec<Symbol> {
        let mut found = Vec::new();
        self.collect_symbols(&mut found);
        found.sort();
        found.dedup();
        found
    }

    fn collect_symbols(&self, found: &mut Vec<Symbol>) {
        for (atoms, _) in &self.terms {
            for atom in atoms {
                match atom {
                    Atom::Symbol(s) => found.push(s.clone()),
                    Atom::FloorDiv(a, b) | Atom::Mod(a, b) | Atom::Min(a, b) | Atom::Max(a, b) => {
                        a.collect_symbols(found);
                        b.collect_symbols(found);
                    }
                }
            }
        }
    }

    /// Whether the symbol occurs.
    pub fn mentions(&self, symbol: &Symbol) -> bool {
        self.symbols().contains(symbol)
    }

    /// The expression with symbols replaced where `replace` gives something.
    pub fn substitute(&self, replace: &dyn Fn(&Symbol) -> Option<SymExpr>) -> SymExpr {
        let mut sum = SymExpr::default();
        for (atoms, c) in &self.terms {
            let mut product = SymExpr::constant(*c);
            for atom in atoms {
                let factor = match atom {
                    Atom::Symbol(s) => replace(s).unwrap_or_else(|| SymExpr::symbol(s.clone())),
                    Atom::FloorDiv(a, b) => a.substitute(replace).floor_div(&b.substitute(replace)),
                    Atom::Mod(a, b) => a.substitute(replace).modulo(&b.substitute(replace)),
                    Atom::Min(a, b) => a.substitute(replace).min_with(&b.substitute(replace)),
                    Atom::Max(a, b) => a.substitute(replace).max_with(&b.substitute(replace)),
                };
                product = product * factor;
            }
            sum = sum + product;
        }
        sum
    }

    /// The expression with the given symbols bound.
    pub fn bind(&self, bindings: &Bindings) -> SymExpr {
        self.substitute(&|s| bindings.get(s).map(|v| SymExpr::constant(*v)))
    }

    /// The value under `bindings`.
    ///
    /// # Errors
    /// A symbol without a value, or a division by zero.
    pub fn eval(&self, bindings: &Bindings) -> Result<i64, SizeError> {
        self.eval_with(&|s| bindings.get(s).copied())
    }

    /// The value with symbols looked up by `value_of`.
    ///
    /// # Errors
    /// A symbol without a value, or a division by zero.
    pub fn eval_with(&self, value_of: &dyn Fn(&Symbol) -> Option<i64>) -> Result<i64, SizeError> {
        let mut sum = 0;
        for (atoms, c) in &self.terms {
            let mut product = *c;
            for atom in atoms {
                let factor = match atom {
                    Atom::Symbol(s) => value_of(s).ok_or_else(|| SizeError::Unbound(s.clone()))?,
                    Atom::FloorDiv(a, b) | Atom::Mod(a, b) => {
                        let (x, y) = (a.eval_with(value_of)?, b.eval_with(value_of)?);
                        if y == 0 {
                            return Err(SizeError::DivisionByZero(self.to_string()));
                        }
                        let is_below = y < 0 && x.wrapping_rem_euclid(y) != 0;
                        let q = x.wrapping_div_euclid(y).wrapping_sub(i64::from(is_below));
                        if matches!(atom, Atom::FloorDiv(..)) {
                            q
                        } else {
                            x.wrapping_sub(q.wrapping_mul(y))
                        }
                    }
                    Atom::Min(a, b) => a.eval_with(value_of)?.min(b.eval_with(value_of)?),
                    Atom::Max(a, b) => a.eval_with(value_of)?.max(b.eval_with(value_of)?),
                };
                product = product.wrapping_mul(factor);
            }
            sum = product.wrapping_add(sum);
        }
        Ok(sum)
    }

    /// The product of sizes: the number of elements of a shape.
    pub fn product<'a>(sizes: impl IntoIterator<Item = &'a SymExpr>) -> SymExpr {
        sizes
            .into_iter()
            .fold(SymExpr::constant(1), |p, s| p * s.clone())
    }
}

impl From<i64> for SymExpr {
    fn from(value: i64) -> Self {
        SymExpr::constant(value)
    }
}

impl From<i32> for SymExpr {
    fn from(value: i32) -> Self {
        SymExpr::constant(i64::from(value))
    }
}

impl From<usize> for SymExpr {
    fn from(value: usize) -> Self {
        SymExpr::constant(value as i64)
    }
}

impl From<&Symbol> for SymExpr {
    fn from(symbol: &Symbol) -> Self {
        SymExpr::symbol(symbol.clone())
    }
}

impl Add for SymExpr {
    type Output = SymExpr;
    fn add(self, other: SymExpr) -> SymExpr {
        if self.is_zero() {
            return other;
        }
        if other.is_zero() {
            return self;
        }
        let mut map: BTreeMap<Vec<Atom>, i64> = self.terms.into_iter().collect();
        for (atoms, c) in other.terms {
            let sum = map.entry(atoms).or_insert(0);
            *sum = sum.wrapping_add(c);
        }
        SymExpr::from_map(map)
    }
}

impl Sub for SymExpr {
    type Output = SymExpr;
    fn sub(self, other: SymExpr) -> SymExpr {
        self + (-other)
    }
}

impl Neg for SymExpr {
    type Output = SymExpr;
    fn neg(mut self) -> SymExpr {
        for (_, c) in &mut self.terms {
            *c = c.wrapping_neg();
        }
        self
    }
}

impl Mul for SymExpr {
    type Output = SymExpr;
    fn mul(self, other: SymExpr) -> SymExpr {
        let mut map = BTreeMap::new();
        for (a, x) in &self.terms {
            for (b, y) in &other.terms {
                let mut atoms = a.clone();
                atoms.extend(b.iter().cloned());
                atoms.sort();
                let sum = map.entry(atoms).or_insert(0i64);
                *sum = sum.wrapping_add(x.wrapping_mul(*y));
            }
        }
        SymExpr::from_map(map)
    }
}

impl Mul<i64> for SymExpr {
    type Output = SymExpr;
    fn mul(self, factor: i64) -> SymExpr {
        self * SymExpr::constant(factor)
    }
}

impl Add<i64> for SymExpr {
    type Output = SymExpr;
    fn add(self, value: i64) -> SymExpr {
        self + SymExpr::constant(value)
    }
}

impl Sub<i64> for SymExpr {
    type Output = SymExpr;
    fn sub(self, value: i64) -> SymExpr {
        self - SymExpr::constant(value)
    }
}

impl fmt::Display for Atom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Atom::Symbol(s) => write!(f, "{s}"),
            Atom::FloorDiv(a, b) => write!(f, "floordiv({a}, {b})"),
            Atom::Mod(a, b) => write!(f, "mod({a}, {b})"),
            Atom::Min(a, b) => write!(f, "min({a}, {b})"),
            Atom::Max(a, b) => write!(f, "max({a}, {b})"),
        }
    }
}

impl fmt::Display for SymExpr {
    /// `2*oh + r - 1`; the constant comes last.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.terms.is_empty() {
            return f.write_str("0");
        }
        let constant_last = self
            .terms
            .iter()
            .filter(|(a, _)| !a.is_empty())
            .chain(self.terms.iter().filter(|(a, _)| a.is_empty()));
        for (n, (atoms, c)) in constant_last.enumerate() {
            match (n, *c < 0) {
                (0, true) => f.write_str("-")?,
                (0, false) => {}
                (_, true) => f.write_str(" - ")?,
                (_, false) => f.write_str(" + ")?,
            }
            let magnitude = c.unsigned_abs();
            if atoms.is_empty() {
                write!(f, "{magnitude}")?;
                continue;
            }
            if magnitude != 1 {
                write!(f, "{magnitude}*")?;
            }
            for (i, atom) in atoms.iter().enumerate() {
                if i > 0 {
                    f.write_str("*")?;
                }
                write!(f, "{atom}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(name: &str) -> SymExpr {
        SymExpr::symbol(name)
    }

    #[test]
    fn canonical_forms_are_equal() {
        let a = (s("x") + 2) * (s("x") - 2);
        let b = s("x") * s("x") - 4;
        assert_eq!(a, b);
        assert_eq!(a.to_string(), "x*x - 4");
    }

    #[test]
    fn floor_division_takes_multiples_out() {
        let e = (s("b") * 6 + 7).floor_div(&3.into());
        assert_eq!(e.to_string(), "2*b + 2");
        assert_eq!(
            (s("b") * 4 + s("c")).modulo(&4.into()).to_string(),
            "mod(c, 4)"
        );
        assert_eq!((s("n") * s("m")).floor_div(&s("m")), s("n"));
        assert_eq!(
            SymExpr::constant(-7).floor_div(&2.into()),
            SymExpr::constant(-4)
        );
    }

    #[test]
    fn an_unbound_symbol_is_named() {
        let err = (s("seq") + 1).eval(&Bindings::new()).unwrap_err();
        assert!(err.to_string().contains("`seq`"));
    }
}
