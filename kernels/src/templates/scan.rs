//! Reads emitted C text as tokens: which numbers stand in it, and where a number must be a constant.
//!
//! Knows the C that this room emits, not all of C: no character constants, no line continuations
//! outside of the prelude, one declaration of an array per statement.

use std::ops::Range;

/// What a number may become when kernels of several sizes share their text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// A value at run time.
    Value(Type),
    /// The length of an array on the stack: a longer one serves as well.
    Length,
    /// A number that a C compiler must know.
    Fixed,
}

/// The C type of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Int,
    Long,
    ULong,
    Float,
    Double,
}

/// A number in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Number {
    pub(super) at: Range<usize>,
    pub(super) usage: Use,
    /// The function around it, as a position in [`Scan::bodies`].
    pub(super) body: Option<usize>,
    /// Whether something is divided by it.
    pub(super) is_divisor: bool,
    /// Whether it bounds a loop.
    pub(super) is_bound: bool,
}

/// A text as its shape, in which numbers are left open and names of micro-kernels are counted, and its
/// numbers.
#[derive(Debug, Default)]
pub(super) struct Scan {
    pub(super) shape: Vec<u8>,
    pub(super) numbers: Vec<Number>,
    /// The first position inside each function.
    pub(super) bodies: Vec<usize>,
    /// The position after each function's last brace.
    pub(super) ends: Vec<usize>,
    /// Names of micro-kernels, in the order of their first appearance.
    pub(super) hashed: Vec<String>,
}

/// Names that end in a hash of what they name.
const HASHED: &str = "shl_mk";

/// The position from which on the arguments of a call of `name` must be constants.
fn constant_arguments(name: &str) -> Option<usize> {
    match name {
        "__attribute__"
        | "__builtin_shufflevector"
        | "_Static_assert"
        | "vector_size"
        | "aligned" => Some(0),
        "__builtin_prefetch" => Some(1),
        _ if name.starts_with("_mm") || name.starts_with("_tile") => Some(0),
        _ if name.starts_with("__builtin_ia32_vfmadd") => Some(0),
        _ => None,
    }
}

impl Scan {
    pub(super) fn new(text: &str) -> Scan {
        let mut scan = Scan::default();
        let mut reader = Reader::default();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let at = text.len() - rest.len();
            let len = scan.token(text, at, first, &mut reader);
            rest = &rest[len..];
        }
        scan
    }

    /// Takes one token that begins at `at`; gives its length.
    fn token(&mut self, text: &str, at: usize, first: char, reader: &mut Reader) -> usize {
        let rest = &text[at..];
        if rest.starts_with("/*") {
            return rest.find("*/").map_or(rest.len(), |end| end + 2);
        }
        if first == '\n' {
            reader.line_is_fixed = false;
            reader.line_is_blank = true;
            return 1;
        }
        if first.is_whitespace() {
            return first.len_utf8();
        }
        let starts_line = std::mem::replace(&mut reader.line_is_blank, false);
        if first == '"' {
            let end = rest[1..].find('"').map_or(rest.len(), |end| end + 2);
            self.push(&rest[..end]);
            return end;
        }
        if first.is_ascii_alphabetic() || first == '_' {
            let len = word(rest);
            let name = &rest[..len];
            let is_table = rest.starts_with("static const ");
            if starts_line && (is_table || matches!(name, "typedef" | "case" | "enum")) {
                reader.line_is_fixed = true;
            }
            reader.constants = constant_arguments(name);
            let lower = name.to_ascii_lowercase();
            if lower.starts_with(HASHED) {
                let known = self.hashed.iter().position(|hashed| *hashed == lower);
                let n = known.unwrap_or(self.hashed.len());
                if known.is_none() {
                    self.hashed.push(lower);
                }
                self.push(&format!("@{n}"));
            } else {
                self.push(name);
            }
            return len;
        }
        if first.is_ascii_digit() {
            let len = number(rest);
            self.number(text, at..at + len, reader);
            return len;
        }
        reader.line_is_fixed |= first == '#' && starts_line;
        self.sign(at, first, reader);
        first.len_utf8()
    }

    fn sign(&mut self, at: usize, sign: char, reader: &mut Reader) {
        match sign {
            '(' => {
                let from = reader.constants.take();
                reader.calls.push((from, 0));
            }
            ')' => {
                reader.calls.pop();
            }
            ',' => {
                if let Some(call) = reader.calls.last_mut() {
                    call.1 += 1;
                }
            }
            '{' => {
                if reader.depth == 0 && reader.last == ')' {
                    self.bodies.push(at + 1);
                }
                reader.depth += 1;
            }
            '}' => {
                reader.depth = reader.depth.saturating_sub(1);
                if reader.depth == 0 && self.ends.len() < self.bodies.len() {
                    self.ends.push(at + 1);
                }
            }
            _ => {}
        }
        reader.constants = None;
        reader.last = sign;
        let mut bytes = [0; 4];
        self.push(sign.encode_utf8(&mut bytes));
    }

    fn number(&mut self, text: &str, at: Range<usize>, reader: &Reader) {
        let at_end = at.end;
        let literal = &text[at.clone()];
        let fixed = reader.line_is_fixed
            || reader.depth == 0
            || reader
                .calls
                .iter()
                .any(|(from, n)| from.is_some_and(|from| *n >= from));
        let usage = match type_of(literal) {
            _ if fixed => Use::Fixed,
            Some(Type::Int) if is_length(text, at.end) => Use::Length,
            _ if is_declared(text, at.start) => Use::Fixed,
            Some(c_type) => Use::Value(c_type),
            None => Use::Fixed,
        };
        self.push(match usage {
            Use::Value(Type::Int) => "#i",
            Use::Value(Type::Long) => "#l",
            Use::Value(Type::ULong) => "#u",
            Use::Value(Type::Float) => "#f",
            Use::Value(Type::Double) => "#d",
            Use::Length => "#n",
            Use::Fixed => "#",
        });
        self.numbers.push(Number {
            at,
            usage,
            body: self.bodies.len().checked_sub(1),
            is_divisor: matches!(reader.last, '/' | '%'),
            is_bound: reader.last == '<' && text[at_end..].starts_with(';'),
        });
    }

    fn push(&mut self, token: &str) {
        self.shape.extend_from_slice(token.as_bytes());
        self.shape.push(b' ');
    }
}

/// What the text read so far means for the next token.
#[derive(Default)]
struct Reader {
    depth: usize,
    line_is_fixed: bool,
    line_is_blank: bool,
    /// For the name just read: the first argument of its call that asks for constants.
    constants: Option<usize>,
    /// For each open parenthesis: from which argument on constants are required, and the present argument.
    calls: Vec<(Option<usize>, usize)>,
    /// The last sign.
    last: char,
}

fn word(text: &str) -> usize {
    text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .unwrap_or(text.len())
}

/// The length of the number that a text begins with, its suffix included.
fn number(text: &str) -> usize {
    let is_hex = text.starts_with("0x") || text.starts_with("0X");
    let mut previous = ' ';
    for (at, c) in text.char_indices() {
        let is_exponent = match is_hex {
            true => matches!(previous, 'p' | 'P'),
            false => matches!(previous, 'e' | 'E'),
        };
        let goes_on =
            c.is_ascii_alphanumeric() || c == '.' || (matches!(c, '+' | '-') && is_exponent);
        if !goes_on {
            return at;
        }
        previous = c;
    }
    text.len()
}

/// The type of a decimal number; `None` for one that stays as it is.
pub(super) fn type_of(literal: &str) -> Option<Type> {
    if literal.starts_with("0x") || literal.starts_with("0X") {
        return None;
    }
    let is_real = literal.contains(['.', 'e', 'E']);
    match (is_real, literal.strip_suffix(['f', 'F'])) {
        (true, Some(digits)) => digits.parse::<f32>().ok().map(|_| Type::Float),
        (true, None) => literal.parse::<f64>().ok().map(|_| Type::Double),
        (false, _) if literal.ends_with("UL") => {
            let value: Option<i64> = literal.strip_suffix("UL")?.parse().ok();
            value.map(|_| Type::ULong)
        }
        (false, _) => {
            let digits = literal.strip_suffix('L');
            let value: i64 = digits.unwrap_or(literal).parse().ok()?;
            match digits.is_none() && i32::try_from(value).is_ok() {
                true => Some(Type::Int),
                false => Some(Type::Long),
            }
        }
    }
}

/// Whether what follows shows that the number was in the brackets of an array's declaration.
fn is_length(text: &str, end: usize) -> bool {
    let rest = text[end..].trim_start_matches(')');
    rest.strip_prefix(']')
        .is_some_and(|rest| rest.trim_start().starts_with("__attribute__"))
}

/// Whether a number is the length of an array that is declared there, with a value.
fn is_declared(text: &str, start: usize) -> bool {
    let Some(before) = text[..start].strip_suffix('[') else {
        return false;
    };
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let before = before.trim_end_matches(is_name);
    let Some(c_type) = before.strip_suffix(' ') else {
        return false;
    };
    let c_type = &c_type[c_type.trim_end_matches(is_name).len()..];
    !c_type.is_empty() && c_type != "return"
}

#[cfg(test)]
mod tests {
    use super::{Scan, Type, Use};

    fn uses(text: &str) -> Vec<(String, Use)> {
        let scan = Scan::new(text);
        let of = |n: &super::Number| (text[n.at.clone()].to_string(), n.usage);
        scan.numbers.iter().map(of).collect()
    }

    #[test]
    fn numbers_of_a_function_are_values_of_their_types() {
        let text = "void k(void *const *buf) {\n  for (long i = 0; i < 40L; ++i) x[i*7] = 0.5f + 1e-5;\n}\n";
        let value = |text: &str, c_type| (text.to_string(), Use::Value(c_type));
        assert_eq!(
            uses(text),
            [
                value("0", Type::Int),
                value("40L", Type::Long),
                value("7", Type::Int),
                value("0.5f", Type::Float),
                value("1e-5", Type::Double),
            ]
        );
    }

    #[test]
    fn an_integer_too_large_for_int_is_long() {
        assert_eq!(super::type_of("2147483647"), Some(Type::Int));
        assert_eq!(super::type_of("2147483648"), Some(Type::Long));
        assert_eq!(super::type_of("9223372036854775808"), None);
        assert_eq!(super::type_of("0x10"), None);
        assert_eq!(super::type_of("10UL"), Some(Type::ULong));
        assert_eq!(super::type_of("10U"), None);
        assert_eq!(super::type_of("9223372036854775808UL"), None);
    }

    #[test]
    fn what_a_compiler_must_know_is_fixed() {
        let text = "typedef float v4 __attribute__((vector_size(16)));\nvoid k(void) {\n\
                    #pragma GCC unroll 8\n__builtin_prefetch(c + 32, 1);\n\
                    v = __builtin_shufflevector(x, y, 0, 4);\nfloat r[ROOM(40)] __attribute__((aligned(64)));\n}\n";
        let fixed: Vec<String> = uses(text)
            .into_iter()
            .filter(|(_, usage)| *usage == Use::Fixed)
            .map(|(text, _)| text)
            .collect();
        assert_eq!(fixed, ["16", "8", "1", "0", "4", "64"]);
        assert!(uses(text).contains(&("40".to_string(), Use::Length)));
        assert!(uses(text).contains(&("32".to_string(), Use::Value(Type::Int))));
    }

    #[test]
    fn names_with_a_hash_are_counted_and_comments_left_out() {
        let one =
            "/* m 40 */ static void shl_mk00ff(long a) { a = 1; }\nvoid k(void) { shl_mk00ff(2); }";
        let other =
            "/* m 57 */ static void shl_mk1234(long a) { a = 3; }\nvoid k(void) { shl_mk1234(4); }";
        assert_eq!(Scan::new(one).shape, Scan::new(other).shape);
        let crossed = "static void shl_mk1234(long a) { a = 3; }\nvoid k(void) { shl_mk77(4); }";
        assert_ne!(Scan::new(one).shape, Scan::new(crossed).shape);
    }

    #[test]
    fn the_length_of_an_array_with_a_value_is_fixed() {
        let text =
            "void k(void) {\n  double sum[16] = {0}, z = x[17] + 1 / y[18];\n  return x[19];\n}\n";
        let fixed = uses(text)
            .into_iter()
            .filter(|(_, usage)| *usage == Use::Fixed);
        assert_eq!(fixed.map(|(n, _)| n).collect::<Vec<_>>(), ["16"]);
    }

    #[test]
    fn each_number_knows_its_function() {
        let scan = Scan::new("static void f(void) { g(1); }\nvoid k(void) { if (1) { f(2); } }");
        let bodies: Vec<_> = scan.numbers.iter().map(|n| n.body).collect();
        assert_eq!(bodies, [Some(0), Some(1), Some(1)]);
        assert_eq!(scan.bodies.len(), 2);
        assert_eq!(scan.ends.len(), 2);
    }
}
