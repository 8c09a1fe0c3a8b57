//! What changes in a node on the way to version 7: how operands broadcast, and attributes of training that are gone.

use super::{Change, Made};
use crate::attributes::Attributes;
use crate::proto::{AttributeProto, attribute_type};
use crate::rewrite::patch::{int, ints, node};

/// Names of element types in `Cast` before version 6.
const TYPES: [(&str, i64); 12] = [
    ("FLOAT", 1),
    ("UINT8", 2),
    ("INT8", 3),
    ("UINT16", 4),
    ("INT16", 5),
    ("INT32", 6),
    ("INT64", 7),
    ("STRING", 8),
    ("BOOL", 9),
    ("FLOAT16", 10),
    ("DOUBLE", 11),
    ("UINT32", 12),
];

/// Brings a node to version `since`, at most 7, of its operator.
pub(super) fn raise(made: &mut Made, since: i64) -> Change {
    // `consumed_inputs` said which inputs may be overwritten.
    if since == 6 {
        made.take("consumed_inputs");
    }
    let op = made.node.op_type.clone();
    match (op.as_str(), since) {
        ("Concat", 4) => {
            if Attributes::new(&made.node).int("axis").is_none() {
                made.node.attribute.push(int("axis", 1));
            }
            Ok(true)
        }
        ("Pad", 2) => {
            let pads = made.take("paddings").map(|a| a.ints).unwrap_or_default();
            made.node.attribute.push(ints("pads", &pads));
            Ok(true)
        }
        ("Reshape", 5) => made.inputs_of_ints(&["shape"]),
        ("Cast", 6) => made.cast(),
        ("BatchNormalization" | "Dropout", 7) => made.in_evaluation(),
        ("Gemm", 7) => {
            made.take("broadcast");
            Ok(true)
        }
        ("PRelu", 7) => made.slopes_of_channels(),
        ("Upsample", 7) => made.scale_of_image(),
        ("GRU" | "LSTM" | "RNN", 7) => {
            made.take("output_sequence");
            Ok(true)
        }
        (
            "Add" | "And" | "Div" | "Equal" | "Greater" | "Less" | "Mul" | "Or" | "Pow" | "Sub"
            | "Xor",
            7,
        ) => made.broadcast(),
        _ => Ok(false),
    }
}

impl Made<'_, '_> {
    fn rank(&self, input: usize) -> Option<usize> {
        self.cx.facts.get(self.node.input.get(input)?)?.rank()
    }

    fn cast(&mut self) -> Change {
        let name = self.take("to").and_then(|a| a.s);
        let name = name.as_deref().and_then(|s| std::str::from_utf8(s).ok());
        let number = TYPES.iter().find(|(known, _)| Some(*known) == name);
        let (_, number) = number.ok_or("casts to a type without a name")?;
        self.node.attribute.push(int("to", *number));
        Ok(true)
    }

    /// For operators that use statistics of the batch or drop elements unless `is_test` is set.
    fn in_evaluation(&mut self) -> Change {
        self.take("consumed_inputs");
        match self.take("is_test").and_then(|a| a.i) {
            Some(n) if n != 0 => Ok(true),
            _ => Err(
                "has it in the form of evaluation only, and the node is in that of training"
                    .to_string(),
            ),
        }
    }

    /// The second operand's dimensions matched those of the first from `axis` on, or its last ones.
    fn broadcast(&mut self) -> Change {
        let is_asked = self.take("broadcast").and_then(|a| a.i).unwrap_or(0) != 0;
        let Some(axis) = self.take("axis").and_then(|a| a.i).filter(|_| is_asked) else {
            return Ok(true);
        };
        let ranks = self.rank(0).zip(self.rank(1));
        let (first, second) =
            ranks.ok_or("broadcasts by numbers of dimensions, which are unknown")?;
        let axis = if axis < 0 { axis + first as i64 } else { axis };
        let after = usize::try_from(axis)
            .ok()
            .and_then(|axis| first.checked_sub(axis + second));
        let after = after.ok_or("broadcasts, and the sizes do not fit")?;
        self.with_ones(1, second, after)
    }

    fn slopes_of_channels(&mut self) -> Change {
        let ranks = self.rank(0).zip(self.rank(1));
        let (first, second) =
            ranks.ok_or("broadcasts by numbers of dimensions, which are unknown")?;
        match second {
            1 => self.with_ones(1, 1, first.saturating_sub(2)),
            _ => Ok(true),
        }
    }

    /// Appends `after` dimensions of size 1 to an input of `rank` dimensions.
    fn with_ones(&mut self, input: usize, rank: usize, after: usize) -> Change {
        if after == 0 {
            return Ok(true);
        }
        // A size of 0 keeps that of the input.
        let shape = [vec![0; rank], vec![1; after]].concat();
        let shape = self.of_ints("sizes", &shape);
        let name = self.cx.fresh(&format!("{}_aligned", self.base()));
        let mut aligned = node("Reshape", &[&self.node.input[input], &shape], Vec::new());
        aligned.output = vec![name.clone()];
        self.before.push(aligned);
        self.node.input[input] = name;
        Ok(true)
    }

    /// Only images were resized, by two factors.
    fn scale_of_image(&mut self) -> Change {
        let mut factor = |name: &str| {
            let factor = self.take(name).and_then(|a| a.f);
            factor.ok_or("needs a factor for the height and one for the width")
        };
        let scales = vec![1.0, 1.0, factor("height_scale")?, factor("width_scale")?];
        self.node.attribute.push(AttributeProto {
            name: "scales".to_string(),
            r#type: attribute_type::FLOATS,
            floats: scales,
            ..Default::default()
        });
        Ok(true)
    }
}
