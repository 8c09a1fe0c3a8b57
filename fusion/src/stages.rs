//! What a step is between its passes: each stage is a type of its own, so that a wrong order does not compile.

use crate::{Decision, FuseError, require_constant_sizes};
use graph::Graph;

/// A graph of operators whose sizes are numbers.
#[derive(Clone, Debug)]
pub struct Bound(Graph);

impl Bound {
    /// # Errors
    /// A size without a value.
    pub fn new(graph: Graph) -> Result<Bound, FuseError> {
        require_constant_sizes(&graph)?;
        Ok(Bound(graph))
    }

    /// The graph.
    pub fn graph(&self) -> &Graph {
        &self.0
    }
}

/// A graph of maps, before containers have layouts.
#[derive(Clone, Debug)]
pub struct Expanded {
    /// Units (maps with one tasklet) and reshapes.
    pub graph: Graph,
    /// What was done.
    pub decisions: Vec<Decision>,
}

impl Expanded {
    /// Gives containers their layouts by `assign`, whose result is returned too.
    pub fn lay_out<T>(mut self, assign: impl FnOnce(&mut Graph) -> T) -> (LaidOut, T) {
        let assigned = assign(&mut self.graph);
        let Expanded { graph, decisions } = self;
        (LaidOut { graph, decisions }, assigned)
    }
}

/// A graph of maps whose containers have their layouts.
#[derive(Clone, Debug)]
pub struct LaidOut {
    /// Units and reshapes.
    pub graph: Graph,
    /// What was done.
    pub decisions: Vec<Decision>,
}

/// A fused graph and how it came about.
#[derive(Clone, Debug)]
pub struct Fused {
    /// Kernels (maps) and reshapes that became aliases, in execution order.
    pub graph: Graph,
    /// What was done.
    pub decisions: Vec<Decision>,
}
