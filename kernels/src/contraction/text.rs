//! Writing of indented C text. Knows nothing about contractions.

use graph::DType;
use std::fmt::Write;

/// C text under construction.
#[derive(Default)]
pub struct CText {
    out: String,
    depth: usize,
}

impl CText {
    /// Appends a line; braces at its ends change the indentation.
    pub fn line(&mut self, s: impl AsRef<str>) {
        let s = s.as_ref();
        if s.starts_with('}') {
            self.depth = self.depth.saturating_sub(1);
        }
        let _ = writeln!(self.out, "{:indent$}{s}", "", indent = self.depth * 2);
        if s.ends_with('{') {
            self.depth += 1;
        }
    }

    /// Closes `n` braces.
    pub fn close(&mut self, n: usize) {
        for _ in 0..n {
            self.line("}");
        }
    }

    /// Appends text that is already complete.
    pub fn raw(&mut self, s: &str) {
        self.out.push_str(s);
    }

    /// The text.
    pub fn finish(self) -> String {
        self.out
    }
}

/// `sum of var*stride` as a C expression; zero strides vanish.
pub fn affine(terms: &[(String, i64)], constant: i64) -> String {
    let mut s = String::new();
    for (var, k) in terms.iter().filter(|t| t.1 != 0) {
        let sep = if s.is_empty() { "" } else { " + " };
        let _ = if *k == 1 {
            write!(s, "{sep}{var}")
        } else {
            write!(s, "{sep}{var}*{k}L")
        };
    }
    if constant != 0 || s.is_empty() {
        let sep = if s.is_empty() { "" } else { " + " };
        let _ = write!(s, "{sep}{constant}L");
    }
    s
}

/// The type of the numbers that are multiplied and summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Element {
    /// Single precision; operands may be stored in 16 bits and widened on the way.
    #[default]
    F32,
    /// Double precision.
    F64,
    /// Operands hold two bf16 numbers, neighbouring steps of the reduction, in each 32 bits; sums are in single
    /// precision. Needs vectors of 64 bytes and AVX512-BF16.
    Words,
}

impl Element {
    /// The C type.
    pub fn c_type(self) -> &'static str {
        match self {
            Element::F32 | Element::Words => "float",
            Element::F64 => "double",
        }
    }

    /// The type in the graph of the numbers that are multiplied.
    pub fn dtype(self) -> DType {
        match self {
            Element::F32 => DType::F32,
            Element::F64 => DType::F64,
            Element::Words => DType::BF16,
        }
    }

    /// Bytes of a number.
    pub fn bytes(self) -> i64 {
        match self {
            Element::F32 | Element::Words => 4,
            Element::F64 => 8,
        }
    }

    /// Numbers in a cache line.
    pub(super) fn per_line(self) -> i64 {
        64 / self.bytes()
    }
}

/// A vector register: lanes of numbers of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vector {
    /// The type of a number.
    pub element: Element,
    /// How many numbers.
    pub lanes: i64,
}

impl Vector {
    /// The register that holds `floats` numbers in single precision, with another type in it.
    pub fn new(element: Element, floats: i64) -> Self {
        Vector {
            element,
            lanes: floats * Element::F32.bytes() / element.bytes(),
        }
    }

    /// The C type that the preamble defines.
    pub fn c_type(self) -> String {
        match self.element {
            Element::F32 => format!("vf{}", self.lanes),
            Element::F64 => format!("vd{}", self.lanes),
            Element::Words => format!("vw{}", self.lanes),
        }
    }

    /// Bytes of the register.
    pub fn bytes(self) -> i64 {
        self.lanes * self.element.bytes()
    }
}

/// The start of every emitted source: the vector type, branch-free small functions.
pub fn preamble(vector: Vector) -> String {
    let (name, element) = (vector.c_type(), vector.element);
    let guard = name.to_uppercase();
    let (bytes, aligned, number) = (vector.bytes(), element.bytes(), element.c_type());
    let functions = match element {
        Element::Words => word_functions(&name),
        _ => vector_functions(&name, number, bytes),
    };
    format!(
        "#include <string.h>\n#ifndef SHORTHAUL_{guard}\n#define SHORTHAUL_{guard}\n\
         typedef {number} {name} __attribute__((vector_size({bytes}), aligned({aligned}), may_alias));\n{functions}#endif\n\
         #ifndef SHORTHAUL_MINMAX\n#define SHORTHAUL_MINMAX\n\
         static inline long shl_min(long a, long b) {{ return a < b ? a : b; }}\n\
         static inline long shl_max(long a, long b) {{ return a > b ? a : b; }}\n#endif\n"
    )
}

/// For vectors of type `name`: `{name}_all(x)`, whose numbers are all `x`, and `{name}_fma(a, b, c)`, which is a·b + c,
/// rounded once where the processor can.
pub fn vector_functions(name: &str, number: &str, bytes: i64) -> String {
    let (kind, scalar, fast) = match number {
        "double" => ("pd", "fma", "FMA"),
        _ => ("ps", "fmaf", "FMAF"),
    };
    let (feature, instruction) = match bytes {
        64 => ("AVX512F", format!("vfmadd{kind}512_mask(a, b, c, -1, 4)")),
        32 => ("FMA", format!("vfmadd{kind}256(a, b, c)")),
        _ => ("FMA", format!("vfmadd{kind}(a, b, c)")),
    };
    let head = "static inline __attribute__((always_inline, unused))";
    // x − 0 is x, but −0 + 0 is 0.
    format!(
        "{head} {name} {name}_all({number} x) {{ return x - ({name}){{0}}; }}\n\
         {head} {name} {name}_fma({name} a, {name} b, {name} c) {{\n\
         #if defined(__clang__)\n\
         #pragma clang fp contract(fast)\n\
         return a*b + c;\n\
         #elif defined(__{feature}__)\n\
         return __builtin_ia32_{instruction};\n\
         #elif defined(__FP_FAST_{fast})\n\
         for (unsigned i = 0; i < sizeof(a)/sizeof({number}); ++i) c[i] = __builtin_{scalar}(a[i], b[i], c[i]);\n\
         return c;\n\
         #else\n\
         return a*b + c;\n\
         #endif\n}}\n"
    )
}

/// The same for vectors of 16 words of two bf16 numbers each: `{name}_fma` adds both products of each word. Bits are
/// copied as integers, since they are no numbers in single precision.
fn word_functions(name: &str) -> String {
    let head = "static inline __attribute__((always_inline, unused))";
    format!(
        "{head} {name} {name}_all(float x) {{\n\
         typedef unsigned U __attribute__((vector_size(64)));\n\
         unsigned bits; memcpy(&bits, &x, 4);\n\
         return ({name})((U){{0}} + bits);\n}}\n\
         {head} {name} {name}_fma({name} a, {name} b, {name} c) {{\n\
         __asm__(\"vdpbf16ps %2, %1, %0\" : \"+v\"(c) : \"v\"(a), \"v\"(b));\n\
         return c;\n}}\n"
    )
}

/// Stable 64-bit FNV-1a, so that equal text gets equal names in every run.
pub fn hash(s: &str) -> u64 {
    s.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
    })
}
