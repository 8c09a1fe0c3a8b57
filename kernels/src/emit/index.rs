//! Index expressions inside a kernel: ranges, coefficients, C text.
//!
//! Owns the properties of a [`SymExpr`] over loop variables of known extent: the interval of its
//! values, its coefficient along one loop, its text in C. Never knows what is indexed.

use graph::{Atom, SymExpr, Symbol};
use std::collections::BTreeMap;

/// A loop variable running over `[0, size)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    /// The variable; unique within its kernel and a C identifier.
    pub var: Symbol,
    /// Number of iterations, at least 1.
    pub size: i64,
}

/// Extents of the variables in scope.
#[derive(Clone, Debug, Default)]
pub struct Extents(BTreeMap<Symbol, i64>);

impl Extents {
    /// Records a variable running over `[0, size)`.
    pub fn insert(&mut self, var: &Symbol, size: i64) {
        self.0.insert(var.clone(), size);
    }

    /// The number of values of a variable; 1 if unknown.
    pub fn size(&self, var: &Symbol) -> i64 {
        self.0.get(var).copied().unwrap_or(1)
    }

    /// The number of values of a variable, if it has one.
    pub fn known(&self, var: &Symbol) -> Option<i64> {
        self.0.get(var).copied()
    }

    /// A bound on the magnitude of the expression and of its intermediate results.
    pub fn magnitude(&self, e: &SymExpr) -> i64 {
        let mut sum = 0i64;
        for (atoms, c) in e.terms() {
            let mut product = c.saturating_abs();
            for atom in atoms {
                let (lo, hi) = self.atom_interval(atom);
                let own = lo.saturating_abs().max(hi.saturating_abs());
                let within = match atom {
                    Atom::Symbol(_) => 0,
                    Atom::FloorDiv(a, b) | Atom::Mod(a, b) | Atom::Min(a, b) | Atom::Max(a, b) => {
                        self.magnitude(a).max(self.magnitude(b))
                    }
                };
                product = product.saturating_mul(own.max(1)).max(within);
            }
            sum = sum.saturating_add(product);
        }
        sum
    }

    /// Smallest and largest value of an expression (a superset, by interval arithmetic).
    pub fn interval(&self, e: &SymExpr) -> (i64, i64) {
        let mut sum = (0i64, 0i64);
        for (atoms, c) in e.terms() {
            let mut product = (*c, *c);
            for atom in atoms {
                product = multiply(product, self.atom_interval(atom));
            }
            sum = (
                sum.0.saturating_add(product.0),
                sum.1.saturating_add(product.1),
            );
        }
        sum
    }

    fn atom_interval(&self, atom: &Atom) -> (i64, i64) {
        match atom {
            Atom::Symbol(s) => (0, self.size(s) - 1),
            Atom::FloorDiv(a, b) => match (self.interval(a), self.interval(b)) {
                ((lo, hi), (d, e)) if d == e && d > 0 => (lo.div_euclid(d), hi.div_euclid(d)),
                _ => (i64::MIN / 4, i64::MAX / 4),
            },
            Atom::Mod(a, b) => match (self.interval(a), self.interval(b)) {
                ((lo, hi), (d, e)) if d == e && d > 0 && lo >= 0 && hi < d => (lo, hi),
                (_, (d, e)) if d == e && d > 0 => (0, d - 1),
                _ => (i64::MIN / 4, i64::MAX / 4),
            },
            Atom::Min(a, b) => {
                let (x, y) = (self.interval(a), self.interval(b));
                (x.0.min(y.0), x.1.min(y.1))
            }
            Atom::Max(a, b) => {
                let (x, y) = (self.interval(a), self.interval(b));
                (x.0.max(y.0), x.1.max(y.1))
            }
        }
    }

    /// C text of type `long`, fit to be an operand of any operator.
    pub fn c_text(&self, e: &SymExpr) -> String {
        let mut text = String::new();
        for (atoms, c) in e.terms().iter().filter(|(a, _)| !a.is_empty()) {
            let sign = if *c < 0 { " - " } else { " + " };
            if text.is_empty() {
                text.push_str(if *c < 0 { "-" } else { "" });
            } else {
                text.push_str(sign);
            }
            let mut factors: Vec<String> = atoms.iter().map(|a| self.atom_text(a)).collect();
            if c.unsigned_abs() != 1 {
                factors.push(c.unsigned_abs().to_string());
            }
            text.push_str(&factors.join("*"));
        }
        let constant = e
            .terms()
            .iter()
            .find(|(a, _)| a.is_empty())
            .map_or(0, |(_, c)| *c);
        match (text.is_empty(), constant) {
            (true, c) if c >= 0 => return c.to_string(),
            (true, c) => return format!("({c})"),
            (false, 0) => {}
            (false, c) if c < 0 => text.push_str(&format!(" - {}", c.unsigned_abs())),
            (false, c) => text.push_str(&format!(" + {c}")),
        }
        // A single quotient or remainder already has parentheses or is a call.
        let lone = matches!(e.terms(), [(atoms, 1)] if atoms.len() == 1);
        let simple = text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if simple || lone {
            text
        } else {
            format!("({text})")
        }
    }

    fn atom_text(&self, atom: &Atom) -> String {
        let binary = |f: &str, a: &SymExpr, b: &SymExpr| {
            format!("{f}({}, {})", self.c_text(a), self.c_text(b))
        };
        match atom {
            Atom::Symbol(s) => s.to_string(),
            // C's division rounds towards zero, which is the floor if the dividend is not negative.
            Atom::FloorDiv(a, b) if self.interval(a).0 >= 0 && self.interval(b).0 > 0 => {
                format!("({} / {})", self.c_text(a), self.c_text(b))
            }
            Atom::Mod(a, b) if self.interval(a).0 >= 0 && self.interval(b).0 > 0 => {
                format!("({} % {})", self.c_text(a), self.c_text(b))
            }
            Atom::FloorDiv(a, b) => binary("ix_floordiv", a, b),
            Atom::Mod(a, b) => binary("ix_mod", a, b),
            Atom::Min(a, b) => binary("ix_min", a, b),
            Atom::Max(a, b) => binary("ix_max", a, b),
        }
    }
}

fn multiply(a: (i64, i64), b: (i64, i64)) -> (i64, i64) {
    let products = [
        a.0.saturating_mul(b.0),
        a.0.saturating_mul(b.1),
        a.1.saturating_mul(b.0),
        a.1.saturating_mul(b.1),
    ];
    let lo = products.iter().copied().min().unwrap_or(0);
    let hi = products.iter().copied().max().unwrap_or(0);
    (lo, hi)
}

/// The expression's coefficient along `var`; `None` if it is not affine in it.
pub fn coefficient(e: &SymExpr, var: &Symbol) -> Option<i64> {
    let mut found = 0;
    for (atoms, c) in e.terms() {
        match atoms.as_slice() {
            [Atom::Symbol(s)] if s == var => found = *c,
            atoms if atoms.iter().any(|a| atom_mentions(a, var)) => return None,
            _ => {}
        }
    }
    Some(found)
}

fn atom_mentions(atom: &Atom, var: &Symbol) -> bool {
    match atom {
        Atom::Symbol(s) => s == var,
        Atom::FloorDiv(a, b) | Atom::Mod(a, b) | Atom::Min(a, b) | Atom::Max(a, b) => {
            mentions(a, var) || mentions(b, var)
        }
    }
}

/// Whether `var` occurs.
pub fn mentions(e: &SymExpr, var: &Symbol) -> bool {
    e.terms()
        .iter()
        .any(|(atoms, _)| atoms.iter().any(|a| atom_mentions(a, var)))
}

/// The expression with `var` replaced.
pub fn replace(e: &SymExpr, var: &Symbol, by: &SymExpr) -> SymExpr {
    if !mentions(e, var) {
        return e.clone();
    }
    e.substitute(&|s| (s == var).then(|| by.clone()))
}

/// The constant value of a size; `None` if a symbol is left.
pub fn constant(e: &SymExpr) -> Option<i64> {
    e.as_const().or_else(|| e.eval_with(&|_| None).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_uses_plain_division_only_where_it_is_the_floor() {
        let mut extents = Extents::default();
        extents.insert(&Symbol::new("i"), 10);
        let i = SymExpr::symbol("i");
        let text = |e: SymExpr| extents.c_text(&e);
        assert_eq!(text(i.floor_div(&3.into())), "(i / 3)".to_string());
        assert_eq!(
            text((i.clone() - 4).floor_div(&3.into())),
            "ix_floordiv((i - 4), 3)"
        );
        assert_eq!(text(i.clone() * 2 - 3), "(i*2 - 3)");
        assert_eq!(extents.interval(&(i.clone() * 2 - 3)), (-3, 15));
        assert_eq!(extents.interval(&(i.modulo(&4.into()))), (0, 3));
    }
}
