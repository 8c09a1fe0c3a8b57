//! Graphs that a node has as attributes, put in the place where the node uses them.

use super::import::Importer;
use super::proto::GraphProto;
use super::value::Value;
use graph::ContainerId;
use std::sync::Arc;

impl Importer<'_> {
    /// Appends the nodes of a body whose inputs are these values; returns the values of its outputs.
    ///
    /// # Errors
    /// The body does not fit, or a node of it cannot be imported, which is a problem of its own.
    pub(super) fn inlined(
        &mut self,
        body: &GraphProto,
        inputs: &[ContainerId],
    ) -> Result<Vec<ContainerId>, String> {
        if body.input.len() != inputs.len() {
            let (n, own) = (inputs.len(), body.input.len());
            return Err(format!("its graph has {own} inputs instead of {n}"));
        }
        // The same body may stand in another node too.
        let made = body.node.iter().flat_map(|node| &node.output);
        for name in made.chain(body.initializer.iter().map(|t| &t.name)) {
            self.values.remove(name);
            self.made.remove(name);
        }
        for tensor in &body.initializer {
            self.initializer(tensor);
        }
        for (input, id) in body.input.iter().zip(inputs) {
            self.made.remove(&input.name);
            self.values.insert(input.name.clone(), Value::Data(*id));
        }
        let origin = Arc::clone(&self.builder.origin);
        let n_problems = self.problems.len();
        for (position, node) in body.node.iter().enumerate() {
            if super::import::rule_for(node).is_none() {
                return Err(format!("its graph has the operator `{}`", node.op_type));
            }
            self.node(position, node);
        }
        self.builder.origin = origin;
        if self.problems.len() > n_problems {
            return Err("a node of its graph cannot be imported".to_string());
        }
        let outputs = body.output.iter();
        outputs.map(|output| self.container(&output.name)).collect()
    }
}
