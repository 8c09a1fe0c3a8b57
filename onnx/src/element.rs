//! Element types of ONNX tensors.

use std::fmt;

/// An element type that is computed with here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub enum Element {
    F32,
    U8,
    I8,
    U16,
    I16,
    I32,
    I64,
    String,
    Bool,
    F16,
    F64,
    U32,
    U64,
    BF16,
}

use Element::*;

/// Every element type with its number in `TensorProto.DataType` and its name there.
const ALL: [(Element, i32, &str); 14] = [
    (F32, 1, "float"),
    (U8, 2, "uint8"),
    (I8, 3, "int8"),
    (U16, 4, "uint16"),
    (I16, 5, "int16"),
    (I32, 6, "int32"),
    (I64, 7, "int64"),
    (String, 8, "string"),
    (Bool, 9, "bool"),
    (F16, 10, "float16"),
    (F64, 11, "double"),
    (U32, 12, "uint32"),
    (U64, 13, "uint64"),
    (BF16, 16, "bfloat16"),
];

impl Element {
    /// The type of that number in `TensorProto.DataType`; `None` for types nothing is computed with
    /// (complex, 8-bit floats, 4-bit integers).
    pub fn of_number(number: i32) -> Option<Element> {
        let row = ALL.iter().find(|(_, n, _)| *n == number);
        row.map(|(element, _, _)| *element)
    }

    /// The type of that name in `TensorProto.DataType`, in small letters.
    pub fn of_name(name: &str) -> Option<Element> {
        let row = ALL.iter().find(|(_, _, n)| *n == name);
        row.map(|(element, _, _)| *element)
    }

    /// Its number in `TensorProto.DataType`.
    pub fn number(self) -> i32 {
        self.row().1
    }

    fn row(self) -> &'static (Element, i32, &'static str) {
        // Every variant has a row, which a test checks.
        ALL.iter().find(|(e, _, _)| *e == self).unwrap_or(&ALL[0])
    }

    /// Bytes of one element; `None` for strings.
    pub fn bytes(self) -> Option<usize> {
        Some(match self {
            U8 | I8 | Bool => 1,
            U16 | I16 | F16 | BF16 => 2,
            F32 | I32 | U32 => 4,
            F64 | I64 | U64 => 8,
            String => return None,
        })
    }

    /// Whether it is a floating-point type.
    pub fn is_float(self) -> bool {
        matches!(self, F32 | F64 | F16 | BF16)
    }

    /// Whether it is an integer type; `Bool` is none.
    pub fn is_int(self) -> bool {
        matches!(self, U8 | I8 | U16 | I16 | I32 | I64 | U32 | U64)
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_its_own_row() {
        for (element, number, name) in ALL {
            assert_eq!(Element::of_number(number), Some(element));
            assert_eq!(Element::of_name(name), Some(element));
            assert_eq!(
                (element.number(), element.to_string()),
                (number, name.to_string())
            );
        }
        assert_eq!(Element::of_number(14), None);
    }
}
