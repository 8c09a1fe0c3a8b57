//! Builders: appending nodes to a graph with a current origin and stage.
//!
//! Expansions and gradient rules use [`Builder`] so that what they add carries the origin of
//! the operator it comes from.

use crate::{
    ContainerId, DType, Expr, Graph, Library, Map, Memlet, Node, NodeKind, Origin, Param,
    Reduction, Schedule, Stage, SymExpr, Symbol, Tasklet,
};
use std::sync::Arc;

/// Appends nodes to a list, with their containers in `graph`.
#[derive(Debug)]
pub struct Builder<'g> {
    /// Where containers are added.
    pub graph: &'g mut Graph,
    /// The nodes made so far, in order.
    pub nodes: Vec<Node>,
    /// Origin given to new nodes.
    pub origin: Arc<Origin>,
    /// Stage given to new nodes.
    pub stage: Stage,
}

impl<'g> Builder<'g> {
    /// A builder without nodes.
    pub fn new(graph: &'g mut Graph, origin: Arc<Origin>, stage: Stage) -> Self {
        Builder {
            graph,
            nodes: Vec::new(),
            origin,
            stage,
        }
    }

    /// A new transient container, row-major.
    pub fn transient(&mut self, name: &str, dtype: DType, shape: &[SymExpr]) -> ContainerId {
        self.graph.add_transient(name, dtype, shape.to_vec())
    }

    /// The shape of a container.
    pub fn shape(&self, id: ContainerId) -> Vec<SymExpr> {
        self.graph.container(id).shape.clone()
    }

    /// The element type of a container.
    pub fn dtype(&self, id: ContainerId) -> DType {
        self.graph.container(id).dtype
    }

    /// Appends a node with the current origin and stage.
    pub fn push(&mut self, kind: NodeKind) {
        self.nodes.push(Node {
            kind,
            origin: self.origin.clone(),
            stage: self.stage,
        });
    }

    /// Appends a library node.
    pub fn library(&mut self, library: Library) {
        self.push(NodeKind::Library(library));
    }

    /// Appends a map with one tasklet. `tasklet` receives the parameters as expressions,
    /// one for each `(name, size)`.
    pub fn map(&mut self, params: &[(&str, SymExpr)], tasklet: impl FnOnce(&[SymExpr]) -> Tasklet) {
        let indices: Vec<SymExpr> = params.iter().map(|(n, _)| SymExpr::symbol(*n)).collect();
        let body = Node {
            kind: NodeKind::Tasklet(tasklet(&indices)),
            origin: self.origin.clone(),
            stage: self.stage,
        };
        self.push(NodeKind::Map(Map {
            params: params
                .iter()
                .map(|(name, size)| Param {
                    name: Symbol::new(name),
                    size: size.clone(),
                })
                .collect(),
            body: vec![body],
            schedule: Schedule::Default,
        }));
    }

    /// Appends a map over `shape` with parameters `i0, i1, …`: `out[i…] = expr(inputs)`, where
    /// `reads` gives the inputs' memlets for the indices.
    pub fn map_over(
        &mut self,
        shape: &[SymExpr],
        out: ContainerId,
        expr: Expr,
        reads: impl FnOnce(&[SymExpr]) -> Vec<Memlet>,
    ) {
        let params = numbered(shape);
        self.map(&borrowed(&params), |i| Tasklet {
            inputs: reads(i),
            outputs: vec![(Memlet::new(out, i.iter().cloned()), expr)],
        });
    }

    /// Appends a map over `shape` that reduces `dims` of it: `out[kept i…] (reduction)= expr(inputs)`.
    /// With `keep` the reduced dimensions stay in `out` with size 1.
    pub fn reduce_over(
        &mut self,
        shape: &[SymExpr],
        (dims, keep): (&[usize], bool),
        out: ContainerId,
        (reduction, expr): (Reduction, Expr),
        reads: impl FnOnce(&[SymExpr]) -> Vec<Memlet>,
    ) {
        let params = numbered(shape);
        self.map(&borrowed(&params), |i| {
            let mut subset = Vec::new();
            for (d, index) in i.iter().enumerate() {
                match (dims.contains(&d), keep) {
                    (false, _) => subset.push(index.clone()),
                    (true, true) => subset.push(SymExpr::constant(0)),
                    (true, false) => {}
                }
            }
            Tasklet {
                inputs: reads(i),
                outputs: vec![(Memlet::new(out, subset).reduce(reduction), expr)],
            }
        });
    }
}

fn numbered(shape: &[SymExpr]) -> Vec<(String, SymExpr)> {
    let name = |(n, size): (usize, &SymExpr)| (format!("i{n}"), size.clone());
    shape.iter().enumerate().map(name).collect()
}

fn borrowed(params: &[(String, SymExpr)]) -> Vec<(&str, SymExpr)> {
    params
        .iter()
        .map(|(n, s)| (n.as_str(), s.clone()))
        .collect()
}
