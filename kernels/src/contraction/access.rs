//! Index expressions of the operands in normal form: coordinates, each a sum of dims with a stride.
//! Drops dims of size one and guards that can never fail. Decides nothing about implementation.

use super::{Contraction, Operand};

/// One coordinate of an operand: `v = offset + sum coeff*dim`, at address `v*stride`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coord {
    /// Dims with their coefficients.
    pub terms: Vec<(usize, i64)>,
    /// What is added to the terms.
    pub offset: i64,
    /// Elements from one value to the next.
    pub stride: i64,
    /// Values that exist.
    pub size: i64,
    /// Whether `v` can leave `0..size`.
    pub guarded: bool,
}

/// All coordinates of an operand.
#[derive(Clone, Debug)]
pub struct Access {
    /// Element at which all coordinates are 0.
    pub base: i64,
    /// The coordinates.
    pub coords: Vec<Coord>,
}

/// A contraction in normal form.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Sizes of the dims.
    pub dims: Vec<i64>,
    /// The first operand.
    pub a: Access,
    /// The second operand.
    pub b: Access,
    /// The result.
    pub out: Access,
}

impl Coord {
    /// A single dim with coefficient one that cannot leave the container.
    pub fn is_plain(&self) -> bool {
        !self.guarded && self.offset == 0 && self.terms.len() == 1 && self.terms[0].1 == 1
    }

    /// A plain coordinate whose dim reaches every position.
    pub fn covers(&self, dims: &[i64]) -> bool {
        if self.terms.is_empty() {
            return !self.guarded && self.size == 1;
        }
        self.is_plain() && dims[self.terms[0].0] == self.size
    }

    /// The coefficient of a dim; 0 if it is not among the terms.
    pub fn coeff(&self, dim: usize) -> i64 {
        self.terms.iter().find(|t| t.0 == dim).map_or(0, |t| t.1)
    }

    fn tidy(&mut self, dims: &[i64]) {
        let mut terms: Vec<(usize, i64)> = Vec::new();
        for &(d, k) in self.terms.iter().filter(|t| dims[t.0] > 1) {
            match terms.iter_mut().find(|t| t.0 == d) {
                Some(t) => t.1 += k,
                None => terms.push((d, k)),
            }
        }
        terms.retain(|t| t.1 != 0);
        self.terms = terms;
        if self.guarded {
            let reach = |k: i64, d: usize| k * (dims[d] - 1);
            let lo = self.offset
                + self
                    .terms
                    .iter()
                    .map(|&(d, k)| reach(k, d).min(0))
                    .sum::<i64>();
            let hi = self.offset
                + self
                    .terms
                    .iter()
                    .map(|&(d, k)| reach(k, d).max(0))
                    .sum::<i64>();
            self.guarded = lo < 0 || hi >= self.size;
        }
    }
}

impl Access {
    fn new(op: &Operand, dims: &[i64]) -> Self {
        let coord = |ax: &super::Axis| Coord {
            terms: ax.terms.clone(),
            offset: ax.offset,
            stride: ax.stride,
            size: ax.size,
            guarded: ax.guarded,
        };
        let mut access = Access {
            base: op.base,
            coords: op.axes.iter().map(coord).collect(),
        };
        access.tidy(dims);
        access
    }

    /// Simplifies every coordinate under the current sizes.
    pub fn tidy(&mut self, dims: &[i64]) {
        for c in &mut self.coords {
            c.tidy(dims);
        }
    }

    /// For an operand that is read: unguarded coordinates become plain ones (one dim, coefficient
    /// one), composite ones only if `split`; a dim then has at most one plain coordinate.
    pub fn simplify_read(&mut self, split: bool) {
        let mut plain: Vec<Coord> = Vec::new();
        let mut rest = Vec::new();
        for c in std::mem::take(&mut self.coords) {
            if c.guarded || (c.terms.len() > 1 && !split) {
                rest.push(c);
                continue;
            }
            self.base += c.offset * c.stride;
            for (d, k) in c.terms {
                match plain.iter_mut().find(|p| p.terms[0].0 == d) {
                    Some(p) => p.stride += k * c.stride,
                    None => plain.push(Coord {
                        terms: vec![(d, 1)],
                        offset: 0,
                        stride: k * c.stride,
                        size: i64::MAX,
                        guarded: false,
                    }),
                }
            }
        }
        plain.retain(|p| p.stride != 0);
        rest.extend(plain);
        self.coords = rest;
    }

    /// Whether the element depends on a dim.
    pub fn has(&self, dim: usize) -> bool {
        self.coords.iter().any(|c| c.coeff(dim) != 0)
    }

    /// Whether some coordinate can leave its bounds.
    pub fn any_guard(&self) -> bool {
        self.coords.iter().any(|c| c.guarded)
    }

    /// Whether some coordinate has several terms.
    pub fn any_composite(&self) -> bool {
        self.coords.iter().any(|c| c.terms.len() > 1)
    }

    /// The address change per step of `dim`, guards aside.
    pub fn stride(&self, dim: usize) -> i64 {
        self.coords.iter().map(|c| c.coeff(dim) * c.stride).sum()
    }

    /// Whether some dim sits in two coordinates.
    pub fn repeats_a_dim(&self, n_dims: usize) -> bool {
        (0..n_dims).any(|d| self.coords.iter().filter(|c| c.coeff(d) != 0).count() > 1)
    }
}

impl Problem {
    /// The normal form of a contraction.
    pub fn new(c: &Contraction) -> Self {
        Problem {
            dims: c.dims.clone(),
            a: Access::new(&c.a, &c.dims),
            b: Access::new(&c.b, &c.dims),
            out: Access::new(&c.out, &c.dims),
        }
    }

    /// Simplifies every operand after sizes have changed.
    pub fn tidy(&mut self) {
        self.a.tidy(&self.dims);
        self.b.tidy(&self.dims);
        self.out.tidy(&self.dims);
    }
}
