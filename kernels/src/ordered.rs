//! C text of loops that need the order of an axis: running sums, and the first elements by size.
//!
//! Each thread takes rows of the axis; no row depends on another, so results do not depend on the number of threads.
//! Running sums of floats are kept in 64 bits, and those of 16-bit floats in 32, as `torch.cumsum` keeps them on a
//! CPU. First elements are found by keys: unsigned integers in the order that is asked for, where equal elements have
//! equal keys. If few are asked for, each is inserted into a sorted list. Otherwise a stable sort finds them, digit by
//! digit in long rows (Knuth, The Art of Computer Programming, volume 3, section 5.2.5), after those that are surely
//! too late were left out. Meaning: `ops::cumsum`, `ops::topk`.
//! Never decides which nodes stay whole.

use crate::emit::scalar::{c_type, cast};
use graph::DType;

/// Elements that are always inserted one by one.
const FEW: i64 = 64;
/// Most elements that are inserted one by one into the list of a long row; in the worst case, each moves all others.
const MOST: i64 = 128;
/// Elements that are sorted by digits rather than merged.
const DIGITS: i64 = 128;
/// If a row has this many elements for each that is asked for, the late ones are left out before the rest is sorted.
const SPARE: i64 = 3;

/// An array with one axis, from outside to inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Along {
    /// Elements before the axis.
    pub(crate) outer: i64,
    /// Elements of the axis.
    pub(crate) n: i64,
    /// Elements after the axis, for each of its elements.
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

    /// The bits of a key.
    fn key_bits(&self) -> usize {
        match self.dtype {
            DType::F64 | DType::I64 => 64,
            _ => 32,
        }
    }

    /// The C type of a key.
    fn key_type(&self) -> &'static str {
        match self.key_bits() {
            64 => "unsigned long",
            _ => "unsigned int",
        }
    }

    /// Bytes that each thread needs for the first elements.
    pub(crate) fn sort_bytes(&self, first: First) -> usize {
        let n = if self.is_few(first) {
            first.k
        } else {
            2 * self.n
        };
        n as usize * (self.key_bits() / 8 + 4) + 64
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
        let stored = c_type(self.dtype);
        let (n, inner, k, offset) = (self.n, self.inner, first.k, self.offset);
        let (helper, body) = match self.is_few(first) {
            true => (String::new(), self.inserted(name, k)),
            false => (self.sort_text(name, first), self.sorted(name, first)),
        };
        format!(
            "{key_text}{helper}void {name}(void *const *buf, void *scratch, long tid, long nt) {{
  const {stored} *restrict const x = (const {stored} *)buf[0] + {offset};
  {stored} *const values = ({stored} *)buf[1];
  long *const positions = (long *)buf[2];
  for (long row = {rows} * tid / nt; row < {rows} * (tid + 1) / nt; ++row) {{
    const {stored} *const from = x + row / {inner} * {all} + row % {inner};
    const long to = row / {inner} * {taken} + row % {inner};
{body}    for (long i = 0; i < {k}; ++i) {{
      values[to + i * {inner}] = from[at[i] * (long){inner}];
      positions[to + i * {inner}] = at[i];
    }}
  }}
}}
",
            key_text = self.key_text(name, first.largest),
            rows = self.outer * inner,
            all = n * inner,
            taken = k * inner,
        )
    }

    /// A C function that gives an element's key. NaN is larger than every number, zeros of both signs are equal.
    fn key_text(&self, name: &str, largest: bool) -> String {
        let (stored, key) = (c_type(self.dtype), self.key_type());
        let turned = if largest { "~" } else { "" };
        let bits = self.key_bits();
        let body = match self.dtype {
            dtype if dtype.is_float() => {
                let real = c_type(dtype.arithmetic());
                let value = cast("x", dtype, dtype.arithmetic());
                format!(
                    "  const union {{ {real} f; {key} u; }} v = {{{value} + 0}};
  const {key} up = v.u ^ (v.u >> {sign} ? ~({key})0 : ({key})1 << {sign});
  return {turned}(v.f != v.f ? ~({key})0 : up);
",
                    sign = bits - 1,
                )
            }
            _ => format!("  return {turned}(({key})x ^ ({key})1 << {});\n", bits - 1),
        };
        format!("static inline {key} {name}_key({stored} x) {{\n{body}}}\n")
    }

    fn inserted(&self, name: &str, k: i64) -> String {
        let (key, n, inner) = (self.key_type(), self.n, self.inner);
        format!(
            "    {key} *const key = ({key} *)scratch;
    int *const at = (int *)(key + {k});
    long count = 0;
    for (long i = 0; i < {n}; ++i) {{
      const {key} own = {name}_key(from[i * {inner}]);
      if (count == {k} && own >= key[{k} - 1]) continue;
      long j = count < {k} ? count++ : {k} - 1;
      for (; j > 0 && own < key[j - 1]; --j) {{ key[j] = key[j - 1]; at[j] = at[j - 1]; }}
      key[j] = own;
      at[j] = (int)i;
    }}
"
        )
    }

    /// Whether elements that are surely too late are left out before the others are sorted.
    fn selects(&self, first: First) -> bool {
        // The first bits of small integers are all equal.
        self.dtype.is_float() && self.n >= 4 * DIGITS && first.k * SPARE <= self.n
    }

    fn sorted(&self, name: &str, first: First) -> String {
        let (key, n, inner) = (self.key_type(), self.n, self.inner);
        let left = match self.selects(first) {
            true => format!("{name}_select(key, at)"),
            false => n.to_string(),
        };
        format!(
            "    {key} *key = ({key} *)scratch;
    int *at = (int *)(key + 2 * {n});
    for (long i = 0; i < {n}; ++i) {{ key[i] = {name}_key(from[i * {inner}]); at[i] = (int)i; }}
    if ({name}_sort(key, at, {left})) at += {n};
"
        )
    }

    /// C functions that sort keys and positions, stable. Both have room for as many elements after the row's; what the
    /// sort returns is whether the sorted elements lie there.
    fn sort_text(&self, name: &str, first: First) -> String {
        let (key, n) = (self.key_type(), self.n);
        let select = match self.selects(first) {
            true => select_text(name, key, self.key_bits(), n, first.k),
            false => String::new(),
        };
        let sort = match n >= DIGITS {
            true => digits_text(name, key, self.key_bits(), n),
            false => merge_text(name, key, n),
        };
        format!("{select}{sort}")
    }
}

/// Keeps, in order, the elements whose first 11 bits are at most those of the `k`-th one; returns how many are left.
fn select_text(name: &str, key: &str, bits: usize, n: i64, k: i64) -> String {
    let shift = bits - 11;
    format!(
        "static long {name}_select({key} *key, int *at) {{
  int counts[2048] = {{0}};
  for (long i = 0; i < {n}; ++i) ++counts[key[i] >> {shift}];
  unsigned long last = 0;
  for (long count = counts[0]; count < {k}; count += counts[last]) ++last;
  long left = 0;
  for (long i = 0; i < {n}; ++i) {{
    const {key} own = key[i];
    const int place = at[i];
    key[left] = own;
    at[left] = place;
    left += (own >> {shift}) <= last;
  }}
  return left;
}}
"
    )
}

/// A sort by digits of eight bits, the last first; digits that are equal everywhere are skipped.
fn digits_text(name: &str, key: &str, bits: usize, room: i64) -> String {
    let n_digits = bits / 8;
    format!(
        "static int {name}_sort({key} *key, int *at, long n) {{
  {key} *to = key + {room};
  int *to_at = at + {room};
  int moved = 0;
  int counts[{n_digits}][256] = {{{{0}}}};
  for (long i = 0; i < n; ++i)
    for (int d = 0; d < {n_digits}; ++d) ++counts[d][key[i] >> (8 * d) & 255];
  for (int d = 0; d < {n_digits}; ++d) {{
    int *const next = counts[d];
    if (next[key[0] >> (8 * d) & 255] == n) continue;
    int before = 0;
    for (int b = 0; b < 256; ++b) {{ const int own = next[b]; next[b] = before; before += own; }}
    for (long i = 0; i < n; ++i) {{
      const {key} own = key[i];
      const int place = next[own >> (8 * d) & 255]++;
      to[place] = own;
      to_at[place] = at[i];
    }}
    {key} *const keys = key;
    int *const places = at;
    key = to; at = to_at;
    to = keys; to_at = places;
    moved = !moved;
  }}
  return moved;
}}
"
    )
}

/// A merge sort of runs that insertion has sorted.
fn merge_text(name: &str, key: &str, room: i64) -> String {
    format!(
        "static int {name}_sort({key} *key, int *at, long n) {{
  for (long first = 0; first < n; first += 16) {{
    const long end = first + 16 < n ? first + 16 : n;
    for (long i = first + 1; i < end; ++i) {{
      const {key} own = key[i];
      const int place = at[i];
      long j = i;
      for (; j > first && own < key[j - 1]; --j) {{ key[j] = key[j - 1]; at[j] = at[j - 1]; }}
      key[j] = own;
      at[j] = place;
    }}
  }}
  {key} *to = key + {room};
  int *to_at = at + {room};
  int moved = 0;
  for (long run = 16; run < n; run *= 2, moved = !moved) {{
    for (long first = 0; first < n; first += 2 * run) {{
      const long middle = first + run < n ? first + run : n, end = middle + run < n ? middle + run : n;
      long a = first, b = middle;
      for (long i = first; i < end; ++i) {{
        const int right = b < end && (a >= middle || key[b] < key[a]);
        const long from = right ? b : a;
        to[i] = key[from];
        to_at[i] = at[from];
        b += right;
        a += !right;
      }}
    }}
    {key} *const keys = key;
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
