//! Rows of sums: writes under a conflict resolution whose vector loop runs over the elements that are
//! summed into, with reduced loops around it.
//!
//! Owns where such a row is kept and in which blocks terms are added: a few dozen terms in single
//! precision, then the block's row in double precision. Rows that threads keep as parts are
//! [`super::frame`]'s.

use super::index::{Loop, coefficient, mentions};
use super::scalar;
use super::text::CText;
use super::values::{Effect, Op, Values, arithmetic};
use graph::{DType, Reduction};

/// Terms after which a row in single precision is added to the row in double precision.
const BLOCK_TERMS: i64 = 64;
/// Elements of the longest row on the stack.
const STACK_ELEMENTS: i64 = 1024;

/// A row of sums on the stack.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// The depth of the first reduced loop.
    depth: usize,
    /// Elements.
    len: i64,
    dtype: DType,
    reduction: Reduction,
    name: String,
}

/// The reduced loop that is cut, and its iterations in a block: about [`BLOCK_TERMS`] terms.
pub(crate) fn cut(loops: &[Loop]) -> Option<(usize, i64)> {
    let (_, reduced) = loops.split_last()?;
    let mut inside = 1;
    for (depth, l) in reduced.iter().enumerate().rev() {
        if inside * l.size > BLOCK_TERMS {
            return Some((depth, (BLOCK_TERMS / inside).max(1)));
        }
        inside *= l.size;
    }
    None
}

impl Row {
    /// The row of the `n`-th effect, where sums in memory would be long chains in single precision.
    /// `len` is the longest run of the vector loop.
    pub(crate) fn new(
        n: usize,
        e: &Effect,
        values: &Values,
        loops: &[Loop],
        stored: DType,
        len: i64,
    ) -> Option<Self> {
        let reduction = e.conflict?;
        let dtype = values.get(e.value).dtype;
        let wider = scalar::wide_type(dtype, reduction) != dtype && arithmetic(stored) == stored;
        let (vector, rest) = loops.split_last()?;
        let owned = |l: &Loop| e.write.owned.contains(&l.var);
        let along = coefficient(&e.address.offset, &vector.var).is_some_and(|c| c != 0);
        let depth = rest.iter().position(|l| !owned(l))?;
        let reduced = rest[depth..]
            .iter()
            .all(|l| !owned(l) && !mentions(&e.address.offset, &l.var));
        let (cut_depth, _) = cut(loops)?;
        let read = values
            .values
            .iter()
            .any(|v| matches!(&v.op, Op::Load(a) if a.container == e.address.container));
        let fits = wider && along && owned(vector) && reduced && !read;
        (fits && depth <= cut_depth && len <= STACK_ELEMENTS).then(|| Row {
            depth,
            len,
            dtype,
            reduction,
            name: format!("r{n}"),
        })
    }

    fn wide(&self) -> DType {
        scalar::wide_type(self.dtype, self.reduction)
    }

    /// Whether the row is declared right before the loop at `depth`.
    pub(crate) fn opens_at(&self, depth: usize) -> bool {
        self.depth == depth
    }

    fn fill(&self, name: &str, dtype: DType, t: &mut CText) {
        let identity = scalar::literal(self.reduction.identity(dtype), dtype);
        t.line("#pragma omp simd");
        t.line(&format!(
            "for (long i = 0; i < {}; ++i) {name}[i] = {identity};",
            self.len
        ));
    }

    /// Declares the row in both precisions and fills the double one.
    pub(crate) fn declare(&self, t: &mut CText) {
        let wide = format!("{}_w", self.name);
        for (dtype, name) in [(self.dtype, &self.name), (self.wide(), &wide)] {
            t.line(&format!(
                "{} {name}[{}] __attribute__((aligned(64)));",
                scalar::c_type(dtype),
                self.len
            ));
        }
        self.fill(&wide, self.wide(), t);
    }

    /// Writes the text before a block of terms.
    pub(crate) fn open_block(&self, t: &mut CText) {
        self.fill(&self.name, self.dtype, t);
    }

    /// Writes the text after a block of terms.
    pub(crate) fn close_block(&self, t: &mut CText) {
        let (wide, row) = (format!("{}_w[i]", self.name), format!("{}[i]", self.name));
        let sum = scalar::binary(self.reduction.combine(), &wide, &row, self.wide());
        t.line("#pragma omp simd");
        t.line(&format!(
            "for (long i = 0; i < {}; ++i) {wide} = {sum};",
            self.len
        ));
    }

    /// The element of the block's row that the vector loop's iteration adds to.
    pub(crate) fn element(&self, v: &Loop, from: &str) -> String {
        format!("{}[{} - {from}]", self.name, v.var)
    }

    /// Combines the row into memory; `place` is the element at the vector loop's variable.
    pub(crate) fn flush(&self, v: &Loop, (from, to): (&str, &str), place: &str, t: &mut CText) {
        let sum = scalar::binary(
            self.reduction.combine(),
            place,
            &format!("{}_w[{} - {from}]", self.name, v.var),
            self.wide(),
        );
        t.line("#pragma omp simd");
        t.line(&format!(
            "for (long {0} = {from}; {0} < {to}; ++{0}) {place} = ({1}){sum};",
            v.var,
            scalar::c_type(self.dtype)
        ));
    }
}
