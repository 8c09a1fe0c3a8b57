//! A model brought to a newer version of the standard's operators.
//!
//! Owns what has to change in a node where the standard changed its operator: attributes that became inputs, defaults
//! that moved, operators that got another name. Where nothing is known of a change, inputs, outputs and attributes
//! have to fit the newer version as they are; the table of these is in `check/schemas.txt`. Never lowers a version.

mod nodes;

use crate::attributes::{bodies_mut, is_standard};
use crate::check::schemas::{counts, newest, versions};
use crate::check::{OPSETS, errors_of_any_version};
use crate::evaluate::label;
use crate::file::Model;
use crate::infer::{Facts, known_values};
use crate::operators::Unknowns;
use crate::proto::{GraphProto, ModelProto, NodeProto, OperatorSetIdProto};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Why a model stays in its version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RaiseError {
    /// It has a newer one.
    #[error("the file has version {from} of the operators, which is not converted down to {to}")]
    Newer {
        /// Its version.
        from: i64,
        /// The one asked for.
        to: i64,
    },
    /// A version that is not known here.
    #[error("version {to} of the operators is not known; the newest is {newest}")]
    Unknown {
        /// The one asked for.
        to: i64,
        /// The newest one known.
        newest: i64,
    },
    /// Functions have versions of their own.
    #[error("functions of a file keep their versions; inline them first")]
    Functions,
    /// A node means something else in the newer version, and nothing known here says the same.
    #[error("{node}: {what}")]
    Node {
        /// The node.
        node: String,
        /// What stands in the way.
        what: String,
    },
}

/// The model with version `to` of the standard's operators.
///
/// # Errors
/// See [`RaiseError`].
pub fn raise(model: &ModelProto, folder: &Arc<Path>, to: i64) -> Result<ModelProto, RaiseError> {
    let mut model = model.clone();
    let standard = |domain: &str| domain.is_empty() || domain == "ai.onnx";
    let from = version(&model);
    let newest = newest("").unwrap_or(to);
    if to > newest {
        return Err(RaiseError::Unknown { to, newest });
    }
    if from > to {
        return Err(RaiseError::Newer { from, to });
    }
    if from == to {
        return Ok(model);
    }
    if !model.functions.is_empty() {
        return Err(RaiseError::Functions);
    }
    let facts = known_values(&model, folder, &Unknowns::default());
    if let Some(graph) = &mut model.graph {
        let mut taken = BTreeSet::new();
        super::names(graph, &mut taken);
        let mut raising = Raising {
            from,
            to,
            facts: &facts,
            taken,
        };
        raising.body(graph)?;
    }
    if !model.opset_import.iter().any(|set| standard(&set.domain)) {
        model.opset_import.push(OperatorSetIdProto::default());
    }
    for set in &mut model.opset_import {
        if standard(&set.domain) {
            set.version = to;
        }
    }
    // Newer operators came with newer files.
    model.ir_version = model.ir_version.max(Some(oldest_file(to)));
    Ok(model)
}

/// The version of the standard's operators that a file has.
pub fn version(model: &ModelProto) -> i64 {
    let standard = |domain: &str| domain.is_empty() || domain == "ai.onnx";
    let mut sets = model.opset_import.iter();
    let found = sets.find(|set| standard(&set.domain));
    found.map_or(1, |set| set.version)
}

/// Files of versions too old to be known here are raised to this one: the first that has constants of integers, which
/// sizes need.
pub const RAISED_TO: i64 = 9;

/// A file of a version that is too old to be known here, in a known one; `None` if that is not needed, or if the file
/// is not well formed in any version.
///
/// # Errors
/// See [`RaiseError`].
pub fn in_known_version(model: &Model) -> Result<Option<Model>, RaiseError> {
    let is_known = version(&model.proto) >= *OPSETS.start();
    if is_known || !errors_of_any_version(model).is_empty() {
        return Ok(None);
    }
    let raised = raise(&model.proto, &model.folder, RAISED_TO)?;
    Ok(Some(model.with(raised)))
}

/// The oldest version of the file format that may hold these operators.
fn oldest_file(opset: i64) -> i64 {
    const FILES: [(i64, i64); 9] = [
        (24, 12),
        (23, 11),
        (21, 10),
        (19, 9),
        (15, 8),
        (12, 7),
        (11, 6),
        (10, 5),
        (9, 4),
    ];
    let found = FILES.iter().find(|(from, _)| opset >= *from);
    found.map_or(3, |(_, file)| *file)
}

/// What nodes are raised with.
struct Raising<'a> {
    from: i64,
    to: i64,
    /// What is known of the values of the outermost graph.
    facts: &'a Facts,
    taken: BTreeSet<String>,
}

impl Raising<'_> {
    fn body(&mut self, body: &mut GraphProto) -> Result<(), RaiseError> {
        for mut node in std::mem::take(&mut body.node) {
            for inner in bodies_mut(&mut node) {
                self.body(inner)?;
            }
            let mut raised = vec![node];
            if is_standard(&raised[0]) {
                self.node(&mut raised)?;
            }
            body.node.append(&mut raised);
        }
        Ok(())
    }

    /// Raises the last of `nodes` over every change of its operator; nodes that it needs come before it.
    fn node(&mut self, nodes: &mut Vec<NodeProto>) -> Result<(), RaiseError> {
        let first = nodes.last().map_or_else(String::new, label);
        let to = self.to;
        let refused = |what: String| RaiseError::Node {
            node: first,
            what: format!("version {to} of the operators {what}"),
        };
        if nodes::leave_experiments(self, nodes).map_err(refused)? {
            return Ok(());
        }
        let mut at = self.from;
        loop {
            let node = nodes.last().cloned().unwrap_or_default();
            let all = versions("", &node.op_type);
            let next = all.iter().find(|s| s.since > at && s.since <= self.to);
            let Some(next) = next else { return Ok(()) };
            let refused = |what: String| RaiseError::Node {
                node: label(&node),
                what: format!("version {} of the operators {what}", next.since),
            };
            at = next.since;
            if nodes::raise(self, nodes, at).map_err(refused)? {
                continue;
            }
            if next.is_deprecated {
                return Err(refused(format!("no longer has {}", node.op_type)));
            }
            let unknown = node
                .attribute
                .iter()
                .find(|a| !(next.is_open || next.attributes.contains_key(a.name.as_str())));
            if let Some(unknown) = unknown {
                return Err(refused(format!("has no attribute `{}`", unknown.name)));
            }
            let fits = counts(&next.inputs).contains(&node.input.len())
                && counts(&next.outputs).contains(&node.output.len());
            if !fits {
                return Err(refused(
                    "takes other inputs or gives other outputs".to_string(),
                ));
            }
        }
    }

    /// A name like `base` that nothing has.
    fn fresh(&mut self, base: &str) -> String {
        let mut n = 0;
        loop {
            let name = format!("{base}_{n}");
            if self.taken.insert(name.clone()) {
                return name;
            }
            n += 1;
        }
    }
}

#[cfg(test)]
mod tests;
