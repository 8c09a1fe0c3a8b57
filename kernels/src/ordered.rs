//! C text of loops that need the order of an axis: running sums, and the first elements by size.
//!
//! Each thread takes rows of the axis; no row depends on another, so results do not depend on the number of threads.
//! Running sums of floats are kept in 64 bits, and those of 16-bit floats in 32, as `torch.cumsum` keeps them on a
//! CPU. If few first elements are asked for, each is inserted into a sorted list; otherwise a stable merge sort finds
//! them. 16-bit floats are compared as f32, which holds each of them. Meaning: `ops::cumsum`, `ops::topk`.
//! Never decides which nodes stay whole.

use crate::emit::scalar::{c_type, cast};
use graph::DType;

/// Elements that are always inserted one by one.
const FEW: i64 = 64;
/// Most elements that are inserted one by one into the list of a long row; in the worst case, each moves all others.
const MOST: i64 = 128;

/// An array with one axis, from outside to inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Along {
    /// Elements before the axis.
    pub(crate) outer: i64,
    /// Elements of the axis.
    pub(crate) n: i64,
    /// Elements behind the axis, for each of its elements.
    pub(crate) inner: i64,
    /// Type of the elements.
    pub(crate) dtype: DType,
    /// Elements before the first one of the operand.
    pub(crate) offset: i64,
}

/// Which elements come first, and how many of them are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct First {
    /// How many.
    pub(crate) k: i64,
    /// The largest, not the smallest.
    pub(crate) largest: bool,
}

impl Along {
    /// Elements.
    pub(crate) fn elements(&self) -> i64 {
        self.outer * self.n * self.inner
    }

    /// Running sums from buffer 0 into buffer 1, of type `into`.
    pub(crate) fn running_sums(&self, name: &str, into: DType, reverse: bool) -> String {
        let sum = match self.dtype {
            DType::F16 | DType::BF16 => "float",
            dtype if dtype.is_float() => "double",
            _ => "unsigned long",
        };
        let (outer, n, inner) = (self.outer, self.n, self.inner);
        let width = inner.min(16);
        let columns = (inner + width - 1) / width;
        let place = match reverse {
            true => format!("{} - k", n - 1),
            false => "k".into(),
        };
        let element = cast("x[here + l]", self.dtype, self.dtype.arithmetic());
        // Sums of integers wrap, as in PyTorch.
        let result = match into {
            DType::F16 | DType::BF16 => cast("sums[l]", DType::F32, into),
            into if into.is_float() => format!("({})sums[l]", c_type(into)),
            into => format!("({})(long)sums[l]", c_type(into)),
        };
        format!(
            "void {name}(void *const *buf, void *scratch, long tid, long nt) {{
  const {from} *restrict const x = (const {from} *)buf[0] + {offset};
  {into} *restrict const y = ({into} *)buf[1];
  (void)scratch;
  for (long unit = {units} * tid / nt; unit < {units} * (tid + 1) / nt; ++unit) {{
    const long first = unit % {columns} * {width}, w = {inner} - first < {width} ? {inner} - first : {width};
    const long at = unit / {columns} * {row} + first;
    {sum} sums[{width}] = {{0}};
    for (long k = 0; k < {n}; ++k) {{
      const long here = at + ({place}) * {inner};
      for (long l = 0; l < w; ++l) {{
        sums[l] += {element};
        y[here + l] = {result};
      }}
    }}
  }}
}}
",
            from = c_type(self.dtype),
            into = c_type(into),
            offset = self.offset,
            units = outer * columns,
            row = n * inner,
        )
    }

    /// Whether a sorted list is cheaper than a sort: of a row in random order, about `k·ln(n/k)` elements enter the list,
    /// and each moves half of it.
    fn is_few(&self, first: First) -> bool {
        first.k <= FEW || (first.k <= MOST && first.k * first.k <= 2 * self.n)
    }

    /// The type in which elements are compared.
    fn key(&self) -> DType {
        self.dtype.arithmetic()
    }

    /// Bytes that each thread needs for the first elements.
    pub(crate) fn sort_bytes(&self, first: First) -> usize {
        let n = if self.is_few(first) {
            first.k
        } else {
            2 * self.n
        };
        (n * (self.key().bytes() as i64 + 4)) as usize + 64
    }

    /// Number of comparisons that find the first elements of all rows.
    pub(crate) fn comparisons(&self, first: First) -> u64 {
        let each = match self.is_few(first) {
            true => 1,
            false => self.n.max(2).ilog2() as u64,
        };
        self.elements() as u64 * each
    }

    /// The first elements of buffer 0 along the axis into buffer 1, their positions into buffer 2.
    pub(crate) fn first_elements(&self, name: &str, first: First) -> String {
        let (stored, real) = (c_type(self.dtype), c_type(self.key()));
        let (better, nan) = match first.largest {
            true => ("a > b", "a != a && b == b"),
            false => ("a < b", "a == a && b != b"),
        };
        let before = match self.dtype.is_float() {
            // NaN is larger than every number.
            true => format!("{better} || ({nan})"),
            false => better.to_string(),
        };
        let (n, inner, k, offset) = (self.n, self.inner, first.k, self.offset);
        let (helper, body) = match self.is_few(first) {
            true => (String::new(), self.inserted(name, k)),
            false => (sort_text(name, real), self.sorted(name)),
        };
        format!(
            "static inline int {name}_before({real} a, {real} b) {{ return {before}; }}
{helper}void {name}(void *const *buf, void *scratch, long tid, long nt) {{
  const {stored} *restrict const x = (const {stored} *)buf[0] + {offset};
  {stored} *const values = ({stored} *)buf[1];
  long *const positions = (long *)buf[2];
  for (long row = {rows} * tid / nt; row < {rows} * (tid + 1) / nt; ++row) {{
    const {stored} *const from = x + row / {inner} * {all} + row % {inner};
    const long to = row / {inner} * {taken} + row % {inner};
{body}    for (long i = 0; i < {k}; ++i) {{
      values[to + i * {inner}] = {value};
      positions[to + i * {inner}] = at[i];
    }}
  }}
}}
",
            value = cast("key[i]", self.key(), self.dtype),
            rows = self.outer * inner,
            all = n * inner,
            taken = k * inner,
        )
    }

    /// Element `i` of a row, as it is compared.
    fn element(&self) -> String {
        cast(&format!("from[i * {}]", self.inner), self.dtype, self.key())
    }

    fn inserted(&self, name: &str, k: i64) -> String {
        let (real, n) = (c_type(self.key()), self.n);
        let element = self.element();
        format!(
            "    {real} *const key = ({real} *)scratch;
    int *const at = (int *)(key + {k});
    long count = 0;
    for (long i = 0; i < {n}; ++i) {{
      const {real} own = {element};
      if (count == {k} && !{name}_before(own, key[{k} - 1])) continue;
      long j = count < {k} ? count++ : {k} - 1;
      for (; j > 0 && {name}_before(own, key[j - 1]); --j) {{ key[j] = key[j - 1]; at[j] = at[j - 1]; }}
      key[j] = own;
      at[j] = (int)i;
    }}
"
        )
    }

    fn sorted(&self, name: &str) -> String {
        let (real, n, element) = (c_type(self.key()), self.n, self.element());
        format!(
            "    {real} *key = ({real} *)scratch;
    int *at = (int *)(key + 2 * {n});
    for (long i = 0; i < {n}; ++i) {{ key[i] = {element}; at[i] = (int)i; }}
    if ({name}_sort(key, at, {n})) {{ key += {n}; at += {n}; }}
"
        )
    }
}

/// A stable merge sort of keys and positions. Both have room for `n` more elements behind them; the C function
/// returns whether the sorted elements lie there.
fn sort_text(name: &str, real: &str) -> String {
    format!(
        "static int {name}_sort({real} *key, int *at, long n) {{
  for (long first = 0; first < n; first += 16) {{
    const long end = first + 16 < n ? first + 16 : n;
    for (long i = first + 1; i < end; ++i) {{
      const {real} own = key[i];
      const int place = at[i];
      long j = i;
      for (; j > first && {name}_before(own, key[j - 1]); --j) {{ key[j] = key[j - 1]; at[j] = at[j - 1]; }}
      key[j] = own;
      at[j] = place;
    }}
  }}
  {real} *to = key + n;
  int *to_at = at + n;
  int moved = 0;
  for (long run = 16; run < n; run *= 2, moved = !moved) {{
    for (long first = 0; first < n; first += 2 * run) {{
      const long middle = first + run < n ? first + run : n, end = middle + run < n ? middle + run : n;
      long a = first, b = middle;
      for (long i = first; i < end; ++i) {{
        const int right = b < end && (a >= middle || {name}_before(key[b], key[a]));
        const long from = right ? b : a;
        to[i] = key[from];
        to_at[i] = at[from];
        b += right;
        a += !right;
      }}
    }}
    {real} *const keys = key;
    int *const places = at;
    key = to; at = to_at;
    to = keys; to_at = places;
  }}
  return moved;
}}
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_elements_take_less_room_than_a_sort() {
        let along = Along {
            outer: 3,
            n: 1000,
            inner: 2,
            dtype: DType::F32,
            offset: 0,
        };
        let few = First {
            k: 44,
            largest: true,
        };
        let many = First {
            k: 129,
            largest: true,
        };
        assert!(along.sort_bytes(few) < 1000);
        assert!(along.sort_bytes(many) >= 2 * 1000 * 8);
        assert!(along.first_elements("f", many).contains("f_sort("));
        assert!(!along.first_elements("f", few).contains("f_sort("));
        assert_eq!(
            (along.comparisons(few), along.comparisons(many)),
            (6000, 54_000)
        );
    }
}
