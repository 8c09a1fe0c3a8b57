//! Control flow: If. Bodies see the values around them.

use super::{EvaluateError, Program, Scope, label, missing};
use crate::attributes::Attributes;
use crate::infer::Opsets;
use crate::proto::NodeProto;
use crate::tensor::Tensor;
use std::collections::BTreeMap;

/// Whether a node is control flow that is run here.
pub fn is_control(node: &NodeProto) -> bool {
    crate::attributes::is_standard(node) && node.op_type == "If"
}

impl Program<'_> {
    /// The outputs of a node with bodies; `None` if it is no control flow.
    pub(super) fn control(
        &self,
        node: &NodeProto,
        scope: &Scope,
        opsets: &Opsets,
    ) -> Result<Option<Vec<Tensor>>, EvaluateError> {
        if !crate::attributes::is_standard(node) {
            return Ok(None);
        }
        match node.op_type.as_str() {
            "If" => self.branch(node, scope, opsets).map(Some),
            _ => Ok(None),
        }
    }

    fn branch(
        &self,
        node: &NodeProto,
        scope: &Scope,
        opsets: &Opsets,
    ) -> Result<Vec<Tensor>, EvaluateError> {
        let refuse = |what: &str| EvaluateError::Node {
            node: label(node),
            what: what.to_string(),
        };
        let name = node
            .input
            .first()
            .ok_or_else(|| refuse("it has no condition"))?;
        let condition = scope.get(name).ok_or_else(|| missing(name))?;
        let taken = match condition.to_i64().as_deref() {
            Some([value]) => *value != 0,
            _ => return Err(refuse("its condition is not one truth value")),
        };
        let branch = if taken { "then_branch" } else { "else_branch" };
        let body = Attributes::of(node)
            .body(branch)
            .ok_or_else(|| refuse("a branch is missing"))?;
        let wanted: Vec<&str> = body.output.iter().map(|o| o.name.as_str()).collect();
        self.body(body, &BTreeMap::new(), &wanted, scope, opsets)
    }
}
