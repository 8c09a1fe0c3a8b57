//! Fixed sizes of inputs that become dynamic.
//!
//! Owns which sizes get names; what follows from them inside is inferred again. A file may hold such a size in its
//! constants too, and then it does not run with another one: [`Freed::works`] tries.

use super::described;
use crate::attributes::bodies_mut;
use crate::file::Model;
use crate::infer::known_values;
use crate::operators::Unknowns;
use crate::proto::{Dimension, DimensionProto, ModelProto, NodeProto, ValueInfoProto};
use crate::verify::{self, VerifyError};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Names for the sizes of one input, outermost first; `None` leaves a size as it is.
pub type Names = Vec<Option<String>>;

/// Why sizes stay fixed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FreeError {
    /// No input has that name and that number of dimensions.
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
    /// One input twice.
    #[error("the names of input `{input}` are given twice; give all of them at once")]
    Again {
        /// The input.
        input: String,
    },
    /// The file does not run with another size.
    #[error("the file does not run with other sizes than those it has ({cause}), so they stay")]
    Inside {
        /// The error of a run with another size.
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
        name if name.is_empty() || name.starts_with(|c: char| !c.is_alphabetic() && c != '_') => {
            let what = "is not a name of a size, which begins with a letter";
            Err(format!("`{name}` {what}; {expected}"))
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
    for (at, (input, names)) in wanted.iter().enumerate() {
        if wanted[..at].iter().any(|(before, _)| before == input) {
            return Err(FreeError::Again {
                input: input.clone(),
            });
        }
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
    graph.node.iter_mut().for_each(forget_sizes);
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

/// Forgets the sizes that the bodies of a node declare: they may be those that are dynamic now. The outputs of a loop's
/// body keep theirs, which are the sizes of the result if the loop never runs.
fn forget_sizes(node: &mut NodeProto) {
    let is_loop = matches!(node.op_type.as_str(), "Loop" | "Scan");
    for body in bodies_mut(node) {
        body.value_info.clear();
        let outputs = body.output.iter_mut().filter(|_| !is_loop);
        let ports = body.input.iter_mut().chain(outputs);
        for dim in ports.filter_map(dimensions).flatten() {
            dim.value = None;
        }
        body.node.iter_mut().for_each(forget_sizes);
    }
}

impl Freed {
    /// Runs the model with other sizes than it had.
    ///
    /// # Errors
    /// [`FreeError::Inside`].
    pub fn works(&self, model: &Model, options: &verify::Options) -> Result<(), FreeError> {
        // A size of a file may be any number; one that is too large is refused where inputs are made up.
        let others: [&dyn Fn(i64) -> i64; 3] =
            [&|n| n.saturating_mul(2), &|n| n.saturating_add(1), &|n| {
                n.saturating_add(32)
            }];
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
    use crate::element::Element;
    use crate::proto::{AttributeProto, GraphProto, attribute_type};
    use crate::rewrite::trial::{Trial, line, reals, value};

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
        assert!(parse_names("x=?,_").is_err() && parse_names("x=infinity,_").is_ok());
        let model = trial.model();
        let twice = ["x=a,_", "x=b,_"].map(|names| parse_names(names).expect("names"));
        let twice = free(&model.proto, &model.folder, &twice).expect_err("one input");
        assert!(
            twice
                .to_string()
                .contains("names of input `x` are given twice")
        );
    }

    #[test]
    fn a_size_near_the_largest_number_is_an_error() {
        let most = i64::MAX.to_string();
        let trial = Trial::new(17).input("x", &most).node("y = Exp(x)");
        let refused = freed(&trial.output("y", &most), &["x=n"]).expect_err("too large");
        assert!(matches!(refused, FreeError::Inside { .. }), "{refused}");
    }

    #[test]
    fn bodies_forget_sizes_that_are_dynamic_now() {
        let branch = |name: &str, op: &str| AttributeProto {
            name: name.to_string(),
            r#type: attribute_type::GRAPH,
            g: Some(GraphProto {
                name: name.to_string(),
                node: vec![
                    line(&format!("{op}_a = {op}(x)"), Vec::new()),
                    line(&format!("{op}_y = Neg({op}_a)"), Vec::new()),
                ],
                output: vec![value(&format!("{op}_y"), Element::F32, "2 4")],
                value_info: vec![value(&format!("{op}_a"), Element::F32, "2 4")],
                ..Default::default()
            }),
            ..Default::default()
        };
        let trial = Trial::new(17).input_of("c", Element::Bool, "");
        let branches = vec![branch("then_branch", "Exp"), branch("else_branch", "Abs")];
        let trial = trial.input("x", "2 4").with("y = If(c)", branches);
        let trial = trial.output("y", "2 4");
        let freed = freed(&trial, &["x=batch,_"]).expect("it runs with others");
        let graph = freed.model.graph.clone().expect("a graph");
        assert_eq!(graph.output, [value("y", Element::F32, "batch 4")]);
        for body in crate::attributes::bodies(&graph.node[0]) {
            assert!(body.value_info.is_empty());
        }
        let problems = crate::check::errors(&trial.model().with(freed.model));
        assert!(problems.is_empty(), "{problems:?}");
    }
}
