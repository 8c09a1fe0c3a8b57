//! C text around a contraction whose containers hold 16-bit numbers: its operands are widened while they
//! are packed or staged, its sums stay in single precision until a block is final, and each result is
//! rounded once.
//!
//! Owns that text; needs the prelude's `sh_from_*` and `sh_to_*`. What the workspace is and which buffers
//! are which is the caller's.

use super::text::{CText, affine};
use crate::emit::scalar::{c_type, cast};
use crate::emit::{ProductDim, ProductRoles};
use graph::DType;

/// A prologue for the operand in `buffer`, see [`super::Hooks`].
pub(crate) fn prologue(name: &str, buffer: usize, dtype: DType) -> String {
    let element = c_type(dtype);
    let value = |at: &str| cast(&format!("s[{at}]"), dtype, DType::F32);
    format!(
        "static inline void {name}(void *const *buf, float *restrict dst, long offset, long stride, long len) {{\n\
         \x20 const {element} *restrict s = (const {element} *)buf[{buffer}] + offset;\n\
         \x20 if (stride == 1) {{\n#pragma omp simd\n    for (long i = 0; i < len; i++) dst[i] = {};\n\
         \x20 }} else for (long i = 0; i < len; i++) dst[i] = {};\n}}\n",
        value("i"),
        value("i*stride"),
    )
}

/// `shl_TYPExWIDTH(p)`: loads `vw` numbers of 16 bits as a vector of single precision, as the prelude widens
/// one.
pub(crate) fn vector_load(vw: i64, dtype: DType) -> String {
    let name = format!("shl_{}x{vw}", dtype.name());
    let guard = name.to_uppercase();
    let widened = match dtype {
        DType::BF16 => "return (F)(w << 16);".to_string(),
        _ => "const W u = (w & 0x7fffu) << 13;\n\
              \x20 W moved = (W)((F)u * 0x1p112f);\n\
              \x20 moved |= (W)(u >= 0x0f800000u) & 0x7f800000u;\n\
              \x20 return (F)(moved | ((w & 0x8000u) << 16));"
            .to_string(),
    };
    format!(
        "#ifndef {guard}\n#define {guard}\nstatic inline vf{vw} {name}(const unsigned short *p) {{\n\
         \x20 typedef unsigned short H __attribute__((vector_size({}), aligned(2), may_alias));\n\
         \x20 typedef unsigned int W __attribute__((vector_size({1})));\n\
         \x20 typedef float F __attribute__((vector_size({1})));\n\
         \x20 const W w = __builtin_convertvector(*(const H *)p, W);\n  {widened}\n}}\n#endif\n",
        vw * 2,
        vw * 4
    )
}

/// An epilogue that rounds the product in `buf[2]`, or the block of it with `pitch` numbers between rows, into
/// buffer `to`, element for element, and then calls the epilogue `then`.
pub(crate) fn store(
    name: &str,
    dims: &ProductRoles,
    pitch: Option<i64>,
    (to, dtype): (usize, DType),
    then: Option<&str>,
) -> String {
    let mut t = CText::default();
    t.line(format!(
        "static inline void {name}(void *const *buf, long tid, long batch, long m0, long m1, long n0, long n1) {{"
    ));
    t.line("(void)tid; (void)batch;");
    t.line("const float *restrict P = (const float *)buf[2];");
    t.line(format!(
        "{0} *restrict x = ({0} *)buf[{to}];",
        c_type(dtype)
    ));
    let [batch, m, n] = [&dims.batch, &dims.m, &dims.n].map(|dims| joined(dims));
    let batch = position(&mut t, &batch, "batch", "b");
    t.line("for (long r = m0; r < m1; r++) {");
    let row = position(&mut t, &m, "r", "y");
    let start = affine(&[batch, row].concat(), 0);
    // The elements of a row whose places differ by one stride.
    let run = n.last().map_or(1, |d| d.size);
    let stride = n.last().map_or(1, |d| d.stride);
    let end = if n.len() > 1 {
        format!("(n/{run}L + 1)*{run}L < n1 ? (n/{run}L + 1)*{run}L : n1")
    } else {
        "n1".to_string()
    };
    t.line("for (long n = n0, end; n < n1; n = end) {");
    t.line(format!("end = {end};"));
    let column = position(&mut t, &n, "n", "z");
    t.line(format!(
        "const long at = {};",
        affine(&[vec![(start, 1)], column].concat(), 0)
    ));
    let place = format!("at + j*{stride}L");
    let from = match pitch {
        Some(pitch) => format!("r*{pitch}L + n + j"),
        None => place.clone(),
    };
    let rounded = cast(&format!("P[{from}]"), DType::F32, dtype);
    t.line("#pragma omp simd");
    t.line(format!(
        "for (long j = 0; j < end - n; j++) x[{place}] = {rounded};"
    ));
    t.close(2);
    if let Some(then) = then {
        t.line(format!("{then}(buf, tid, batch, m0, m1, n0, n1);"));
    }
    t.line("}");
    t.finish()
}

/// Dimensions that together are walked by one stride, as one.
fn joined(dims: &[ProductDim]) -> Vec<ProductDim> {
    let mut all: Vec<ProductDim> = Vec::new();
    for d in dims {
        match all.last_mut() {
            Some(outer) if outer.stride == d.stride * d.size => {
                *outer = ProductDim {
                    size: outer.size * d.size,
                    stride: d.stride,
                };
            }
            _ => all.push(*d),
        }
    }
    all
}

/// Declares the index of each dimension from a flat index; returns the position's terms.
fn position(t: &mut CText, dims: &[ProductDim], flat: &str, prefix: &str) -> Vec<(String, i64)> {
    if let [only] = dims {
        return vec![(flat.to_string(), only.stride)];
    }
    let mut inner: i64 = dims.iter().map(|d| d.size).product();
    let mut terms = Vec::new();
    for (j, d) in dims.iter().enumerate() {
        inner /= d.size;
        let v = format!("{prefix}{j}");
        t.line(format!("const long {v} = {flat}/{inner}L%{}L;", d.size));
        terms.push((v, d.stride));
    }
    terms
}

/// A launch that converts all `len` elements of buffer `from`, of one type, to buffer `to`, of another.
pub(crate) fn whole(
    symbol: &str,
    len: i64,
    (from, source): (usize, DType),
    (to, target): (usize, DType),
) -> String {
    let mut t = CText::default();
    t.line(format!(
        "void {symbol}(void *const *buf, void *scratch, long tid, long nt) {{"
    ));
    t.line(format!(
        "const {} *restrict s = buf[{from}]; {} *restrict d = buf[{to}]; (void)scratch;",
        c_type(source),
        c_type(target)
    ));
    t.line("#pragma omp simd");
    t.line(format!(
        "for (long i = {len}L*tid/nt; i < {len}L*(tid + 1)/nt; i++) d[i] = {};",
        cast("s[i]", source, target)
    ));
    t.line("}");
    t.finish()
}
