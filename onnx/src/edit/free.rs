//! Fixed sizes of inputs that become dynamic.
//!
//! Owns which sizes get names; what follows from them inside is inferred again. A file may hold such a size in its
//! constants too, and then it does not run with another one: [`Freed::works`] tries.

use super::described;
use crate::file::Model;
use crate::infer::known_values;
use crate::operators::Unknowns;
use crate::proto::{Dimension, DimensionProto, ModelProto, ValueInfoProto};
use crate::verify::{self, VerifyError};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Names for the sizes of one input, outermost first; `None` leaves a size as it is.
pub type Names = Vec<Option<String>>;

/// Why sizes stay fixed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FreeError {
    /// No input of that name, or of another number of dimensions.
    #[error("there is no input `{name}` of {rank} dimensions; the inputs are {known}")]
    NoInput {
        /// What was given.
        name: String,
        /// Its dimensions.
        rank: usize,
        /// What there is.
        known: String,
    },
    /// One name for two sizes.
    #[error("`{name}` would stand for {first} and for {second}")]
    Twice {
        /// The name.
        name: String,
        /// A size.
        first: i64,
        /// Another one.
        second: i64,
    },
    /// The file does not run with another size.
    #[error("the file does not run with other sizes than those it has ({cause}), so they stay")]
    Inside {
        /// With one of them.
        cause: VerifyError,
    },
}

/// A model with more dynamic sizes.
#[derive(Clone, Debug)]
pub struct Freed {
    /// The model.
    pub model: ModelProto,
    /// What the sizes were, by their new names.
    pub sizes: BTreeMap<String, i64>,
}

/// `NAME=SIZE,SIZE,…`; `_` leaves a size as it is.
///
/// # Errors
/// A sentence about what is wrong with the text.
pub fn parse_names(text: &str) -> Result<(String, Names), String> {
    let expected =
        "expected INPUT=NAMES, such as image=batch,_,height,width (`_` leaves a size as it is)";
    let (input, names) = text.rsplit_once('=').ok_or(expected)?;
    let name = |text: &str| match text.trim() {
        "_" => Ok(None),
        name if name.is_empty() || name.parse::<f64>().is_ok() => {
            Err(format!("`{name}` is no name of a size; {expected}"))
        }
        name => Ok(Some(name.to_string())),
    };
    let names: Names = names.split(',').map(name).collect::<Result<_, _>>()?;
    match input.is_empty() {
        true => Err(expected.to_string()),
        false => Ok((input.to_string(), names)),
    }
}

fn dimensions(port: &mut ValueInfoProto) -> Option<&mut Vec<DimensionProto>> {
    let tensor = port.r#type.as_mut()?.tensor_type.as_mut()?;
    Some(&mut tensor.shape.as_mut()?.dim)
}

/// The model with those names in place of sizes.
///
/// # Errors
/// They do not fit the file.
pub fn free(
    model: &ModelProto,
    folder: &Arc<Path>,
    wanted: &[(String, Names)],
) -> Result<Freed, FreeError> {
    let mut model = model.clone();
    let mut sizes: BTreeMap<String, i64> = BTreeMap::new();
    let Some(graph) = model.graph.as_mut().filter(|_| !wanted.is_empty()) else {
        return Ok(Freed { model, sizes });
    };
    let known: Vec<String> = graph.input.iter().map(|i| i.name.clone()).collect();
    for (input, names) in wanted {
        let port = graph.input.iter_mut().find(|port| port.name == *input);
        let dims = port
            .and_then(dimensions)
            .filter(|dims| dims.len() == names.len());
        let dims = dims.ok_or_else(|| FreeError::NoInput {
            name: input.clone(),
            rank: names.len(),
            known: known.join(", "),
        })?;
        for (dim, name) in dims.iter_mut().zip(names) {
            let Some(name) = name else { continue };
            if let Some(Dimension::DimValue(size)) = dim.value {
                let first = *sizes.entry(name.clone()).or_insert(size);
                if first != size {
                    return Err(FreeError::Twice {
                        name: name.clone(),
                        first,
                        second: size,
                    });
                }
            }
            dim.value = Some(Dimension::DimParam(name.clone()));
        }
    }
    graph.value_info.clear();
    for dim in graph.output.iter_mut().filter_map(dimensions).flatten() {
        dim.value = None;
    }
    let facts = known_values(&model, folder, &Unknowns::default());
    for port in model.graph.iter_mut().flat_map(|g| &mut g.output) {
        let known = facts
            .get(&port.name)
            .and_then(|fact| described(&port.name, fact));
        port.r#type = known.and_then(|known| known.r#type).or(port.r#type.take());
    }
    Ok(Freed { model, sizes })
}

impl Freed {
    /// Runs the model with other sizes than it had.
    ///
    /// # Errors
    /// [`FreeError::Inside`].
    pub fn works(&self, model: &Model, options: &verify::Options) -> Result<(), FreeError> {
        let others: [&dyn Fn(i64) -> i64; 3] = [&|n| 2 * n, &|n| n + 1, &|n| n + 32];
        let mut last = Ok(());
        for other in others {
            let mut options = options.clone();
            let sizes = self.sizes.iter().map(|(name, n)| (name.clone(), other(*n)));
            options.sizes.extend(sizes);
            match verify::made_up(model, 0, &options) {
                Ok(_) => return Ok(()),
                Err(cause) => last = Err(FreeError::Inside { cause }),
            }
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rewrite::trial::{Trial, reals};

    fn freed(trial: &Trial, texts: &[&str]) -> Result<Freed, FreeError> {
        let model = trial.model();
        let wanted: Vec<_> = texts
            .iter()
            .map(|text| parse_names(text).expect("names"))
            .collect();
        let freed = free(&model.proto, &model.folder, &wanted)?;
        let made = model.with(freed.model.clone());
        freed
            .works(&made, &verify::Options::default())
            .map(|()| freed)
    }

    #[test]
    fn a_size_that_nothing_inside_holds_gets_a_name() {
        let trial = Trial::new(17)
            .input("x", "2 4")
            .constant("w", reals(&[4, 3]));
        let trial = trial.node("y = MatMul(x, w)").output("y", "2 3");
        let freed = freed(&trial, &["x=batch,_"]).expect("it runs with others");
        assert_eq!(freed.sizes["batch"], 2);
        let same = Trial::new(17)
            .input("x", "batch 4")
            .constant("w", reals(&[4, 3]));
        let same = same.node("y = MatMul(x, w)").output("y", "batch 3");
        assert_eq!(freed.model, same.model().proto);
    }

    #[test]
    fn a_size_inside_stays_and_names_fit_the_file() {
        let trial = Trial::new(17).input("x", "2 4").ints("s", &[2, 2, 2]);
        let trial = trial.node("y = Reshape(x, s)").output("y", "2 2 2");
        let refused = |names: &str| freed(&trial, &[names]).expect_err("it stays").to_string();
        assert!(refused("x=batch,_").contains("does not run with other sizes"));
        assert!(refused("x=a,a").contains("`a` would stand for 2 and for 4"));
        assert!(refused("x=a").contains("no input `x` of 1 dimensions"));
        assert!(parse_names("x=3,_").is_err() && parse_names("=a").is_err());
    }
}
