//! Sizes of a model's inputs fixed on request.
//!
//! Owns which dynamic sizes of a file become numbers: those of the inputs that are given sizes, and every other size of
//! the same name. Never touches nodes: what follows from the sizes is for the rewriting.

use crate::proto::{
    Dimension, DimensionProto, ModelProto, TensorShapeProto, TypeProto, ValueInfoProto,
};
use std::collections::BTreeMap;

/// Sizes for one input, outermost first; `None` leaves a size as it is.
pub type Wanted = Vec<Option<i64>>;

/// Why sizes cannot be fixed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetShapeError {
    /// No input of that name.
    #[error("there is no input `{name}`; the inputs are {known}")]
    NoInput {
        /// What was given.
        name: String,
        /// What there is.
        known: String,
    },
    /// It is not a tensor.
    #[error("input `{name}` is not a tensor")]
    NoTensor {
        /// The input.
        name: String,
    },
    /// Another number of dimensions.
    #[error("input `{name}` has {rank} dimensions, but {given} sizes were given")]
    Rank {
        /// The input.
        name: String,
        /// Its dimensions.
        rank: usize,
        /// What was given.
        given: usize,
    },
    /// The file has another number there.
    #[error("dimension {d} of input `{name}` is fixed to {is} in the file and cannot be {given}")]
    Fixed {
        /// The input.
        name: String,
        /// The dimension.
        d: usize,
        /// The file's size.
        is: i64,
        /// What was given.
        given: i64,
    },
    /// Two numbers for one name.
    #[error("the dynamic size `{size}` cannot be both {first} and {second}")]
    Twice {
        /// Its name.
        size: String,
        /// What it was given first.
        first: i64,
        /// What it was given then.
        second: i64,
    },
}

/// `NAME=SIZE,SIZE,…`; `_` leaves a size as it is.
///
/// # Errors
/// A sentence about what is wrong with the text.
pub fn parse(text: &str) -> Result<(String, Wanted), String> {
    let expected = "expected INPUT=SIZES, such as image=1,3,224,224 (`_` leaves a size as it is)";
    // A name may hold `=`, sizes never do.
    let (name, sizes) = text.rsplit_once('=').ok_or(expected)?;
    let size = |text: &str| match (text.trim(), text.trim().parse()) {
        ("_", _) => Ok(None),
        (_, Ok(n)) if n >= 0 => Ok(Some(n)),
        (other, _) => Err(format!("`{other}` is no size; {expected}")),
    };
    let sizes: Wanted = match sizes.trim() {
        "" => Vec::new(),
        sizes => sizes.split(',').map(size).collect::<Result<_, _>>()?,
    };
    match name.is_empty() {
        true => Err(expected.to_string()),
        false => Ok((name.to_string(), sizes)),
    }
}

/// The model with the sizes of these inputs.
///
/// # Errors
/// They do not fit the file, or each other.
pub fn set_shapes(
    model: &ModelProto,
    shapes: &BTreeMap<String, Wanted>,
) -> Result<ModelProto, SetShapeError> {
    let mut model = model.clone();
    let Some(graph) = &mut model.graph else {
        return Ok(model);
    };
    let mut named: BTreeMap<String, i64> = BTreeMap::new();
    for (name, wanted) in shapes {
        let Some(at) = graph.input.iter().position(|i| i.name == *name) else {
            let known: Vec<&str> = graph.input.iter().map(|i| i.name.as_str()).collect();
            return Err(SetShapeError::NoInput {
                name: name.clone(),
                known: known.join(", "),
            });
        };
        fix(&mut graph.input[at], wanted, &mut named)?;
    }
    let ports = graph.input.iter_mut().chain(&mut graph.output);
    for port in ports.chain(&mut graph.value_info) {
        for dim in dimensions(port).into_iter().flatten() {
            if let Some(Dimension::DimParam(size)) = &dim.value
                && let Some(n) = named.get(size)
            {
                dim.value = Some(Dimension::DimValue(*n));
            }
        }
    }
    Ok(model)
}

fn dimensions(port: &mut ValueInfoProto) -> Option<&mut Vec<DimensionProto>> {
    let tensor = port.r#type.as_mut()?.tensor_type.as_mut()?;
    Some(&mut tensor.shape.as_mut()?.dim)
}

/// Fixes the sizes of one input; those with a name are remembered in `named`.
fn fix(
    input: &mut ValueInfoProto,
    wanted: &Wanted,
    named: &mut BTreeMap<String, i64>,
) -> Result<(), SetShapeError> {
    let name = input.name.clone();
    let tensor = input
        .r#type
        .as_mut()
        .and_then(|t: &mut TypeProto| t.tensor_type.as_mut());
    let Some(tensor) = tensor else {
        return Err(SetShapeError::NoTensor { name });
    };
    let shape = tensor.shape.get_or_insert_with(|| TensorShapeProto {
        dim: vec![DimensionProto::default(); wanted.len()],
    });
    if shape.dim.len() != wanted.len() {
        return Err(SetShapeError::Rank {
            name,
            rank: shape.dim.len(),
            given: wanted.len(),
        });
    }
    for (d, (dim, size)) in shape.dim.iter_mut().zip(wanted).enumerate() {
        let Some(given) = *size else { continue };
        match (&dim.value, dim.name()) {
            (Some(Dimension::DimValue(is)), _) if *is >= 0 && *is != given => {
                return Err(SetShapeError::Fixed {
                    name,
                    d,
                    is: *is,
                    given,
                });
            }
            (_, Some(size)) => {
                let first = *named.entry(size.to_string()).or_insert(given);
                if first != given {
                    return Err(SetShapeError::Twice {
                        size: size.to_string(),
                        first,
                        second: given,
                    });
                }
            }
            _ => {}
        }
        dim.value = Some(Dimension::DimValue(given));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rewrite::trial::Trial;

    fn sizes(port: &ValueInfoProto) -> Vec<String> {
        let mut port = port.clone();
        let dims = dimensions(&mut port)
            .map(std::mem::take)
            .unwrap_or_default();
        let text = |dim: DimensionProto| match dim.value {
            Some(Dimension::DimValue(n)) => n.to_string(),
            Some(Dimension::DimParam(name)) => name,
            None => "?".to_string(),
        };
        dims.into_iter().map(text).collect()
    }

    fn fixed(texts: &[&str]) -> Result<ModelProto, SetShapeError> {
        let trial = Trial::new(17).input("x", "n 3 h").input("z", "n h");
        let trial = trial.node("y = Relu(x)").output("y", "n 3 h");
        let shapes = texts.iter().map(|text| parse(text).expect("sizes"));
        set_shapes(&trial.model().proto, &shapes.collect())
    }

    #[test]
    fn sizes_of_one_name_are_fixed_everywhere() {
        let model = fixed(&["x=8,3,_"]).expect("it fits");
        let graph = model.graph.expect("a graph");
        assert_eq!(sizes(&graph.input[0]), ["8", "3", "h"]);
        assert_eq!(sizes(&graph.input[1]), ["8", "h"]);
        assert_eq!(sizes(&graph.output[0]), ["8", "3", "h"]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let refused = |texts: &[&str]| fixed(texts).expect_err("it does not fit").to_string();
        assert_eq!(
            refused(&["w=1"]),
            "there is no input `w`; the inputs are x, z"
        );
        assert_eq!(
            refused(&["x=1,3"]),
            "input `x` has 3 dimensions, but 2 sizes were given"
        );
        assert_eq!(
            refused(&["x=1,4,5"]),
            "dimension 1 of input `x` is fixed to 3 in the file and cannot be 4"
        );
        assert_eq!(
            refused(&["x=1,3,5", "z=2,5"]),
            "the dynamic size `n` cannot be both 1 and 2"
        );
    }

    #[test]
    fn sizes_are_numbers_from_0_or_left() {
        assert_eq!(parse("a=b=2,_"), Ok(("a=b".into(), vec![Some(2), None])));
        assert_eq!(parse("s="), Ok(("s".into(), vec![])));
        for wrong in ["x", "x=1,-2", "x=1,n", "x=1,,2", "=1"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
