//! What may be asked of a file beside being optimized: a part of it, other sizes, names, types or another version.
//!
//! Owns the order, which the program and the Python package share. Every request names values as the file does, so new
//! names come last; another version and 16-bit floats are verified.

use super::{
    ExtractError, FreeError, HalveError, Names, RaiseError, RenameError, extract, free, halve,
    lower, rename, strip, with_sizes,
};
use crate::check::in_order;
use crate::element::Element;
use crate::file::Model;
use crate::infer::Functions;
use crate::rewrite::{InlineError, inline_all};
use crate::set_shape::{SetShapeError, Wanted, set_shapes};
use crate::verify::{self, Checker, VerifyError};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// What is asked for.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Sizes of inputs to fix.
    pub shapes: BTreeMap<String, Wanted>,
    /// Values at which the wanted part starts; none: the inputs.
    pub from: Vec<String>,
    /// Values at which it ends; none: the outputs.
    pub to: Vec<String>,
    /// Names for sizes of inputs, which then are dynamic.
    pub free: Vec<(String, Names)>,
    /// Inputs and outputs with other names: old, new.
    pub renamed: Vec<(String, String)>,
    /// Version of the standard's operators.
    pub opset: Option<i64>,
    /// The type to compute in, f16 or bf16.
    pub half: Option<Element>,
    /// Operators or nodes that stay in f32 then.
    pub keep_f32: BTreeSet<String>,
    /// Whether documentation, metadata, names of nodes and types of inner values go.
    pub strip: bool,
    /// Whether known types and sizes of inner values are written down.
    pub infer_shapes: bool,
}

/// A model that was changed as asked.
#[derive(Clone, Debug)]
pub struct Changed {
    /// The model.
    pub model: Model,
    /// What 16-bit floats made of it.
    pub in_half: Option<InHalf>,
}

/// A model in 16-bit floats.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InHalf {
    /// The type in which its nodes compute.
    #[serde(rename = "type")]
    pub element: String,
    /// Nodes that compute in it.
    pub nodes: usize,
    /// Nodes with f32 that stay, by operator.
    pub kept_f32: BTreeMap<String, usize>,
    /// The largest error of an output against float64, as a part of its largest element; `None` if no run had a
    /// finite one.
    pub error: Option<f64>,
    /// The largest error allowed.
    pub tolerance: f64,
}

/// Why a file cannot be changed as asked.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// Sizes cannot be fixed.
    #[error(transparent)]
    Shapes(#[from] SetShapeError),
    /// There is no such part.
    #[error(transparent)]
    Part(#[from] ExtractError),
    /// Sizes stay fixed.
    #[error(transparent)]
    Free(#[from] FreeError),
    /// A name cannot be given.
    #[error(transparent)]
    Rename(#[from] RenameError),
    /// Its functions cannot be inlined, which another version and 16-bit floats need.
    #[error(transparent)]
    Inline(#[from] InlineError),
    /// There is no such version of it.
    #[error(transparent)]
    Version(#[from] RaiseError),
    /// It stays in f32.
    #[error(transparent)]
    Halve(#[from] HalveError),
    /// It does not run.
    #[error(transparent)]
    Run(#[from] VerifyError),
    /// In the other version it gives something else.
    #[error("the file in the other version does not give the same: {cause}")]
    OtherVersion {
        /// The difference.
        cause: VerifyError,
    },
    /// In 16-bit floats it gives something else.
    #[error(
        "in {element} the file differs by more than {tolerance} of the largest element; leave more operators \
         in f32, or set a larger tolerance: {cause}"
    )]
    HalfDiffers {
        /// The type.
        element: Element,
        /// What is allowed.
        tolerance: f64,
        /// The difference.
        cause: VerifyError,
    },
    /// In 16-bit floats it cannot be compared.
    #[error("cannot compare the file with its {element} version: {cause}")]
    HalfUntried {
        /// The type.
        element: Element,
        /// Why.
        cause: VerifyError,
    },
}

impl Request {
    /// The wanted part of a file, with fixed sizes and its nodes in order, under the file's own names.
    ///
    /// # Errors
    /// There is no such part, or the sizes do not fit.
    pub fn part(&self, model: &Model) -> Result<Model, RequestError> {
        let model = in_order(model.with(set_shapes(&model.proto, &self.shapes)?));
        if self.from.is_empty() && self.to.is_empty() {
            return Ok(model);
        }
        let part = extract(&model.proto, &model.folder, &self.from, &self.to)?;
        Ok(model.with(part))
    }

    /// The part with everything else that is asked for before it is rewritten. Inputs to verify with get the new
    /// names; without verification, another version is not verified either. `progress` is told what goes on.
    ///
    /// # Errors
    /// See [`RequestError`].
    pub fn changed(
        &self,
        part: &Model,
        verifying: &mut verify::Options,
        is_verified: bool,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Changed, RequestError> {
        let freed = free(&part.proto, &part.folder, &self.free)?;
        let mut model = part.with(freed.model.clone());
        let of_samples = verifying
            .samples
            .iter_mut()
            .map(|sample| &mut sample.inputs);
        for inputs in of_samples.chain([&mut verifying.inputs]) {
            for (old, new) in &self.renamed {
                if let Some(value) = inputs.remove(old) {
                    inputs.insert(new.clone(), value);
                }
            }
        }
        model = model.with(rename(&model.proto, &self.renamed)?);
        let mut original = model.clone();
        let is_converted = self.opset.is_some() || self.half.is_some();
        if is_converted && !model.proto.functions.is_empty() {
            model = model.with(inline_all(&model.proto)?);
            // Verification cuts a model at what it does not know. With functions inlined, it cuts inside of them.
            if !is_all_known(&original) {
                original = model.clone();
            }
        }
        if let Some(version) = self.opset {
            model = model.with(lower(&model.proto, &model.folder, version)?);
        }
        if !self.free.is_empty() {
            progress("running with other sizes");
            freed.works(&model, verifying)?;
        }
        if self.opset.is_some() && is_verified {
            progress("verifying the other version");
            let same = Checker::new(&original, verifying)?.check_other(&model);
            same.map_err(|cause| RequestError::OtherVersion { cause })?;
        }
        let Some(element) = self.half else {
            let in_half = None;
            return Ok(Changed { model, in_half });
        };
        progress("verifying in 16-bit floats");
        self.halved(&original, &model, element, verifying)
    }

    /// `model` in 16-bit floats, compared with `original`.
    fn halved(
        &self,
        original: &Model,
        model: &Model,
        element: Element,
        verifying: &verify::Options,
    ) -> Result<Changed, RequestError> {
        let made = halve(&model.proto, &model.folder, element, &self.keep_f32)?;
        let mut options = verifying.clone();
        if options.tolerance == 0.0 {
            options.tolerance = half_tolerance(element);
        }
        let tolerance = options.tolerance;
        let other = model.with(made.model);
        let evidence = Checker::new(original, &options)?.check_other(&other);
        let evidence = evidence.map_err(|cause| match cause {
            VerifyError::Differs { .. } => RequestError::HalfDiffers {
                element,
                tolerance,
                cause,
            },
            cause => RequestError::HalfUntried { element, cause },
        })?;
        Ok(Changed {
            model: other,
            in_half: Some(InHalf {
                element: element.to_string(),
                nodes: made.n_halved,
                kept_f32: made.kept,
                error: evidence.worst().map(|(_, after)| after),
                tolerance,
            }),
        })
    }

    /// The optimized model with what was asked for at the end.
    pub fn finished(&self, model: Model) -> Model {
        let proto = match (self.strip, self.infer_shapes) {
            (true, _) => strip(&model.proto),
            (_, true) => with_sizes(&model.proto, &model.folder).0,
            _ => return model,
        };
        model.with(proto)
    }
}

/// A part of the largest element by which outputs in 16-bit floats may differ if nobody says: about ten roundings.
fn half_tolerance(element: Element) -> f64 {
    match element {
        Element::BF16 => 5e-2,
        _ => 1e-2,
    }
}

/// Whether Shorthaul can evaluate each node of a file's graph, with the functions that they call.
fn is_all_known(model: &Model) -> bool {
    let functions = Functions::new(&model.proto.functions);
    let mut nodes = model.proto.graph.iter().flat_map(|graph| &graph.node);
    nodes.all(|node| verify::is_known(&functions, node))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::OperatorSetIdProto;
    use crate::rewrite::trial::{Trial, function, line, shown, value};

    #[test]
    fn functions_are_inlined_for_another_version_and_for_16_bit_floats() {
        let square = function("Square", vec![line("r = Mul(p, p)", Vec::new())]);
        let trial = Trial::new(17).input("x", "n 4").output("y", "n 4");
        let trial = trial.function(square).node("a = local.Square(x)");
        let model = trial.node("y = Relu(a)").model();
        let changed = |request: &Request| {
            let mut verifying = verify::Options::default();
            let changed = request.changed(&model, &mut verifying, true, &mut |_| {});
            let proto = changed.expect("changed").model.proto;
            assert!(proto.functions.is_empty());
            shown(proto.graph.as_ref().expect("a graph"))
        };
        for opset in [13, 18] {
            let nodes = changed(&Request {
                opset: Some(opset),
                ..Request::default()
            });
            assert_eq!(nodes, ["a = Mul(x, x)", "y = Relu(a)"]);
        }
        let nodes = changed(&Request {
            half: Some(Element::F16),
            ..Request::default()
        });
        assert!(nodes.iter().any(|node| node.contains("Cast(")), "{nodes:?}");
        // Where neither is asked for, functions stay.
        let mut verifying = verify::Options::default();
        let kept = Request::default().changed(&model, &mut verifying, true, &mut |_| {});
        assert_eq!(kept.expect("unchanged").model.proto, model.proto);
    }

    #[test]
    fn a_function_with_an_unknown_operator_is_inlined_and_the_rest_compared() {
        let lines = ["q = custom.Odd(p)", "r = Mul(q, q)"];
        let mut odd = function("Odd", lines.map(|text| line(text, Vec::new())).into());
        let custom = OperatorSetIdProto {
            domain: "custom".to_string(),
            version: 1,
        };
        odd.opset_import.push(custom.clone());
        let trial = Trial::new(17).input("x", "n 4").output("y", "n 4");
        let trial = trial.function(odd).node("a = local.Odd(x)");
        let mut model = trial.node("y = Relu(a)").model();
        model.proto.opset_import.push(custom);
        if let Some(graph) = &mut model.proto.graph {
            graph.value_info = ["q", "a"]
                .map(|name| value(name, Element::F32, "n 4"))
                .into();
        }
        for (opset, half) in [(Some(18), None), (None, Some(Element::F16))] {
            let request = Request {
                opset,
                half,
                ..Request::default()
            };
            let mut verifying = verify::Options::default();
            let changed = request.changed(&model, &mut verifying, true, &mut |_| {});
            assert!(changed.is_ok(), "{:?}", changed.err());
        }
    }
}
