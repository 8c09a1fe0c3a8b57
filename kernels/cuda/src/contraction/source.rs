//! Text that finds an element of an operand in memory: the row's part of the address and of each guarded
//! coordinate, kept in registers over the reduction, and what a term adds to them. Copies nothing.

use super::form::{self, Form, signed};
use graph::DType;
use kernels::contraction::access::{Access, Coord};
use kernels::contraction::text::CText;

/// An operand in memory.
pub(super) struct Source<'a> {
    pub form: &'a Form,
    pub access: &'a Access,
    /// "a" or "b": prefix of every name.
    pub letter: &'static str,
    pub dtype: DType,
    /// Dims that count its rows (columns, of the right factor).
    pub rows: &'a [usize],
    wide: bool,
}

impl<'a> Source<'a> {
    pub fn new(form: &'a Form, letter: &'static str, dtype: DType) -> Self {
        let (access, rows) = match letter {
            "a" => (&form.a, &form.m),
            _ => (&form.b, &form.n),
        };
        Source {
            form,
            access,
            letter,
            dtype,
            rows,
            wide: form.is_wide(),
        }
    }

    /// Whether `width` neighbouring terms may be read at once.
    pub fn along_terms(&self, width: i64) -> bool {
        self.form.contiguous(self.access, &self.form.k, width)
    }

    /// Whether `width` neighbouring rows may be read at once.
    pub fn along_rows(&self, width: i64) -> bool {
        self.form.contiguous(self.access, self.rows, width)
    }

    fn index(&self) -> &'static str {
        if self.wide { "long long" } else { "int" }
    }

    fn guards(&self) -> impl Iterator<Item = (usize, &Coord)> {
        self.access.coords.iter().filter(|c| c.guarded).enumerate()
    }

    /// Declares what stays in registers of each of a thread's `n` rows; `row` is the text of row number `i`.
    pub fn declare(&self, t: &mut CText, n: i64, row: &str) {
        let (x, f, index) = (self.letter, self.form, self.index());
        t.line(format!("{index} {x}_row[{n}];"));
        t.line(format!("bool {x}_in[{n}];"));
        for (g, _) in self.guards() {
            t.line(format!("int {x}_at{g}[{n}];"));
        }
        t.line("SH_UNROLL");
        t.line(format!("for (int i = 0; i < {n}; i++) {{"));
        t.line(format!("const int row = {row};"));
        t.line(format!("{x}_in[i] = row < {};", f.count(self.rows)));
        let both = |coeff: &dyn Fn(usize) -> i64, wide| {
            let batch = f.linear("batch", &f.batch, coeff, wide);
            format!("{batch} + {}", f.linear("row", self.rows, coeff, wide))
        };
        let address = both(&|d| self.access.stride(d), self.wide);
        let start = form::constant(self.access);
        t.line(format!("{x}_row[i] = {} + {address};", signed(start)));
        for (g, c) in self.guards() {
            let at = both(&|d| c.coeff(d), false);
            t.line(format!("{x}_at{g}[i] = {} + {at};", signed(c.offset)));
        }
        t.close(1);
    }

    /// Declares `at`, the element of term `k` in the row of a state, and whether it is there; `also` is
    /// a condition that is tested before the others.
    pub fn position(&self, t: &mut CText, k: &str, state: &str, also: &str) {
        let (x, f, index) = (self.letter, self.form, self.index());
        t.line(format!("const int k = {k};"));
        let step = f.linear("k", &f.k, |d| self.access.stride(d), self.wide);
        t.line(format!("const {index} at = {x}_row[{state}] + {step};"));
        let mut within = format!("{also}k < k_end && {x}_in[{state}]");
        for (g, c) in self.guards() {
            let moved = f.linear("k", &f.k, |d| c.coeff(d), false);
            within += &format!(" && (unsigned)({x}_at{g}[{state}] + {moved}) < {}u", c.size);
        }
        t.line(format!("const bool within = {within};"));
    }
}
