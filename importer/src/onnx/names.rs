//! Names: ONNX values and nodes are called anything; containers and symbols are identifiers.

use std::collections::BTreeMap;

/// `name` as an identifier: `/layer1/conv/Conv_output_0` becomes `layer1.conv.Conv_output_0`.
pub fn identifier(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for c in name.trim_matches('/').chars() {
        match c {
            '/' | ':' => text.push('.'),
            c if c.is_ascii_alphanumeric() || c == '_' || c == '.' => text.push(c),
            _ => text.push('_'),
        }
    }
    if text.is_empty() || !text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
        text.insert(0, '_');
    }
    text
}

/// Symbols by the names dynamic sizes have in the file.
#[derive(Clone, Debug, Default)]
pub struct SizeNames {
    by_name: BTreeMap<String, String>,
}

impl SizeNames {
    /// The symbol for a named size; the same name gives the same symbol.
    pub fn symbol(&mut self, name: &str) -> String {
        if let Some(symbol) = self.by_name.get(name) {
            return symbol.clone();
        }
        let mut symbol = identifier(name).replace('.', "_");
        // One or two lower-case letters, or a letter and digits, may be a map's parameter.
        let letters = symbol.trim_end_matches(|c: char| c.is_ascii_digit());
        if letters.len() <= 2 && letters.chars().all(|c| c.is_ascii_lowercase()) {
            symbol = format!("size_{symbol}");
        }
        while self.by_name.values().any(|taken| *taken == symbol) {
            symbol.push('_');
        }
        self.by_name.insert(name.to_string(), symbol.clone());
        symbol
    }

    /// A symbol for dimension `d` of `input`, which the file does not name.
    pub fn unnamed(&mut self, input: &str, d: usize) -> String {
        self.symbol(&unnamed_size(input, d))
    }
}

/// What dimension `d` of `input` is called where the file has no name for it.
pub fn unnamed_size(input: &str, d: usize) -> String {
    format!("{}_dim{d}", identifier(input).replace('.', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_identifiers() {
        assert_eq!(identifier("/layer1/conv/Conv"), "layer1.conv.Conv");
        assert_eq!(identifier("onnx::MatMul_12"), "onnx..MatMul_12");
        assert_eq!(identifier("0"), "_0");
        assert_eq!(identifier(""), "_");
    }

    #[test]
    fn sizes_never_share_a_name_with_a_map_parameter_or_each_other() {
        let mut names = SizeNames::default();
        assert_eq!(names.symbol("batch"), "batch");
        assert_eq!(names.symbol("n"), "size_n");
        assert_eq!(names.symbol("i0"), "size_i0");
        assert_eq!(names.symbol("N"), "N");
        assert_eq!(names.symbol("past + 1"), "past___1");
        assert_eq!(names.symbol("past - 1"), "past___1_");
        assert_eq!(names.symbol("past + 1"), "past___1");
        assert_eq!(names.unnamed("x", 0), "x_dim0");
        // Messages name the size as a caller gives it.
        assert_eq!(
            names.unnamed("Placeholder:0", 0),
            unnamed_size("Placeholder:0", 0)
        );
    }
}
