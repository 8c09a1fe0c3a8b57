//! The reverse sweep: gradients of containers from gradients of what they flow into.
//!
//! For each node in reverse order whose outputs have a gradient, the gradients of its inputs are
//! appended. A container read by several nodes collects one contribution from each; they are summed
//! once, when the sweep reaches the container's producer.

use crate::error::AutodiffError;
use crate::map::differentiate_map;
use graph::{Builder, ContainerId, Expr, Graph, Library, Lifetime, Node, NodeKind, Stage, State};
use ops::{Call, Gradient, GradientCall, OpBuilder, OpError};
use std::collections::{BTreeMap, BTreeSet};

/// What to differentiate.
#[derive(Clone, Debug)]
pub struct Request {
    /// Outputs whose gradient the caller will give.
    pub of: Vec<ContainerId>,
    /// Inputs and parameters whose gradient is wanted.
    pub wrt: Vec<ContainerId>,
}

/// A forward graph with its gradients.
#[derive(Clone, Debug)]
pub struct Differentiated {
    /// Forward and backward nodes; seeds are appended to its inputs and gradients to its outputs.
    pub graph: Graph,
    /// The input that holds the gradient, for each container of [`Request::of`].
    pub seeds: Vec<ContainerId>,
    /// The gradient of each container of [`Request::wrt`]; `None` if it does not influence the outputs.
    pub gradients: Vec<Option<ContainerId>>,
}

/// Appends the gradients that `request` names.
///
/// # Errors
/// An operator or map without a derivative, control flow, a graph that already holds gradients.
pub fn differentiate(graph: &Graph, request: &Request) -> Result<Differentiated, AutodiffError> {
    let mut graph = graph.clone();
    let forward = take_forward_nodes(&mut graph)?;
    let mut sweep = Sweep {
        active: active_containers(&forward, &request.wrt, &graph),
        gradients: BTreeMap::new(),
        forward: Vec::new(),
        backward: Vec::new(),
        graph,
    };
    let seeds: Vec<_> = request.of.iter().map(|of| sweep.seed(*of)).collect();
    let mut pending = forward;
    while let Some(node) = pending.pop() {
        if let Some(expanded) = sweep.visit(&node)? {
            pending.extend(expanded);
        } else {
            sweep.forward.push(node);
        }
    }
    let gradients = request
        .wrt
        .iter()
        .map(|wrt| sweep.total(*wrt))
        .collect::<Result<Vec<_>, _>>()?;
    let mut graph = sweep.graph;
    for gradient in gradients.iter().flatten() {
        graph.add_output(*gradient);
    }
    let mut nodes = sweep.forward;
    nodes.reverse();
    nodes.extend(sweep.backward);
    graph.last_state().nodes = nodes;
    Ok(Differentiated {
        graph,
        seeds,
        gradients,
    })
}

/// Floating-point containers that depend on one of `wrt`; empty for graphs with control flow.
pub fn active(graph: &Graph, wrt: &[ContainerId]) -> BTreeSet<ContainerId> {
    match graph.single_state() {
        Some(state) => active_containers(&state.nodes, wrt, graph),
        None => BTreeSet::new(),
    }
}

fn take_forward_nodes(graph: &mut Graph) -> Result<Vec<Node>, AutodiffError> {
    let name = graph.name.clone();
    let state: &mut State = graph.single_state_mut().ok_or(AutodiffError::ControlFlow {
        graph: name.clone(),
    })?;
    let nodes = std::mem::take(&mut state.nodes);
    match nodes.iter().find(|n| n.stage != Stage::Forward) {
        Some(n) => Err(AutodiffError::SecondOrder {
            graph: name,
            origin: n.origin.to_string(),
        }),
        None => Ok(nodes),
    }
}

/// Floating-point containers that depend on one of `wrt`.
fn active_containers(
    forward: &[Node],
    wrt: &[ContainerId],
    graph: &Graph,
) -> BTreeSet<ContainerId> {
    let mut active: BTreeSet<_> = wrt.iter().copied().collect();
    for node in forward {
        if node.reads().iter().any(|id| active.contains(id)) {
            let floats = |id: &ContainerId| graph.container(*id).dtype.is_float();
            active.extend(node.writes().into_iter().filter(floats));
        }
    }
    active
}

struct Sweep {
    graph: Graph,
    active: BTreeSet<ContainerId>,
    /// Contributions to each container's gradient, not yet summed.
    gradients: BTreeMap<ContainerId, Vec<ContainerId>>,
    /// Forward nodes, last first; operators differentiated by expansion are replaced by it.
    forward: Vec<Node>,
    backward: Vec<Node>,
}

impl Sweep {
    fn seed(&mut self, of: ContainerId) -> ContainerId {
        let c = self.graph.container(of).clone();
        let seed = self.graph.add_input(
            &format!("grad_{}", c.name),
            c.dtype,
            c.shape,
            Lifetime::Input,
        );
        self.gradients.entry(of).or_default().push(seed);
        seed
    }

    /// The summed gradient of a container.
    fn total(&mut self, of: ContainerId) -> Result<Option<ContainerId>, AutodiffError> {
        let Some(parts) = self.gradients.remove(&of) else {
            return Ok(None);
        };
        let total = match parts.as_slice() {
            [one] => *one,
            _ => {
                let sum = (1..parts.len()).fold(Expr::In(0), |s, i| s.add(Expr::In(i)));
                let origin = self.backward.last().map(|n| n.origin.clone());
                let mut b =
                    Builder::new(&mut self.graph, origin.unwrap_or_default(), Stage::Backward);
                let total = b
                    .elementwise(sum, &parts)
                    .map_err(|source| AutodiffError::Op {
                        origin: b.origin.to_string(),
                        source,
                    })?;
                self.backward.append(&mut b.nodes);
                total
            }
        };
        self.gradients.insert(of, vec![total]);
        Ok(Some(total))
    }

    /// Appends the gradients of a node's inputs. If the node's expansion must be differentiated instead,
    /// returns the expansion.
    fn visit(&mut self, node: &Node) -> Result<Option<Vec<Node>>, AutodiffError> {
        let written = node.writes();
        let reached = written.iter().any(|id| self.gradients.contains_key(id));
        let wanted = node.reads().iter().any(|id| self.active.contains(id));
        if !reached || !wanted {
            return Ok(None);
        }
        for id in written {
            self.total(id)?;
        }
        match &node.kind {
            NodeKind::Library(library) => self.visit_library(node, library),
            NodeKind::Map(map) => {
                let (graph, active) = (&mut self.graph, &self.active);
                let gradient_of = |id: ContainerId| self.gradients.get(&id).map(|g| g[0]);
                let (nodes, parts) = differentiate_map(graph, node, map, active, &gradient_of)?;
                self.backward.extend(nodes);
                for (of, part) in parts {
                    self.gradients.entry(of).or_default().push(part);
                }
                Ok(None)
            }
            NodeKind::Tasklet(_) => Err(AutodiffError::Map {
                origin: node.origin.to_string(),
                what: "a tasklet outside any map; wrap it in a map without parameters".into(),
            }),
        }
    }

    fn visit_library(
        &mut self,
        node: &Node,
        library: &Library,
    ) -> Result<Option<Vec<Node>>, AutodiffError> {
        let fail = |source: OpError| AutodiffError::Op {
            origin: node.origin.to_string(),
            source,
        };
        let op = ops::registry::find(&library.op).map_err(fail)?;
        let output_gradients: Vec<_> = library
            .outputs
            .iter()
            .map(|id| id.and_then(|id| self.gradients.get(&id).map(|g| g[0])))
            .collect();
        let is_wanted = |id: &Option<ContainerId>| id.is_some_and(|id| self.active.contains(&id));
        let wanted: Vec<_> = library.inputs.iter().map(is_wanted).collect();
        let call = GradientCall {
            call: Call::of(&self.graph, library),
            output_gradients: &output_gradients,
            wanted: &wanted,
        };
        let mut b = Builder::new(&mut self.graph, node.origin.clone(), Stage::Backward);
        match op.gradient(&call, &mut b).map_err(fail)? {
            Gradient::Zero => Ok(None),
            Gradient::Rule(mut parts) => {
                for ((id, part), wanted) in library.inputs.iter().zip(&mut parts).zip(&wanted) {
                    if let (Some(id), Some(part), true) = (id, part, wanted) {
                        *part = typed_as(&mut b, *part, *id).map_err(fail)?;
                    }
                }
                self.backward.append(&mut b.nodes);
                for ((id, part), wanted) in library.inputs.iter().zip(parts).zip(&wanted) {
                    if let (Some(id), Some(part), true) = (id, part, wanted) {
                        self.gradients.entry(*id).or_default().push(part);
                    }
                }
                Ok(None)
            }
            Gradient::Derive => {
                b.stage = Stage::Forward;
                op.expand(&call.call, &mut b).map_err(fail)?;
                let nodes = std::mem::take(&mut b.nodes);
                self.activate(&nodes);
                Ok(Some(nodes))
            }
        }
    }

    fn activate(&mut self, nodes: &[Node]) {
        for node in nodes {
            if node.reads().iter().any(|id| self.active.contains(id)) {
                for id in node.writes() {
                    if self.graph.container(id).dtype.is_float() {
                        self.active.insert(id);
                    }
                }
            }
        }
    }
}

/// A gradient in the type of the value that it belongs to.
fn typed_as(
    b: &mut Builder,
    gradient: ContainerId,
    of: ContainerId,
) -> Result<ContainerId, OpError> {
    let dtype = b.dtype(of);
    if b.dtype(gradient) == dtype {
        return Ok(gradient);
    }
    b.elementwise(Expr::In(0).cast(dtype), &[gradient])
}
