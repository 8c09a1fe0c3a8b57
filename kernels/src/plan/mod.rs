//! Buffer planning: where every container of a fused graph lives while its kernels run.
//!
//! Inputs and outputs are the caller's. What the forward pass makes and the backward pass reads is
//! saved in one block that the caller keeps between the two. Everything else shares one arena
//! per pass: containers whose lifetimes (first write to last read, in launch order) do not meet may
//! have the same bytes. Offsets come from placing the largest first into the lowest gap that fits,
//! which is deterministic and close to the peak of live bytes in practice. Reshapes that stayed
//! in the graph are aliases of their input; the inputs of concatenations that stayed are ranges of their result.

mod arena;
mod needed;

use crate::run::BufferRef;
use arena::Interval;
use graph::{Attr, ContainerId, Graph, Lifetime, Node, NodeKind, Stage, Storage, SymExpr};
pub use needed::{Dependences, Part};
use std::collections::{BTreeMap, BTreeSet};

/// Something a launch is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Buffer {
    /// A container's memory.
    Container(ContainerId),
    /// Memory that the launches of one kernel share, by the kernel's number.
    Workspace(usize),
}

/// The buffers one launch touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Touches {
    /// The pass it belongs to.
    pub stage: Stage,
    /// Buffers, in any order.
    pub buffers: Vec<Buffer>,
}

/// Where everything lives.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct MemoryPlan {
    places: BTreeMap<Buffer, BufferRef>,
    /// Arena size of the forward pass, in bytes.
    pub forward_arena_bytes: usize,
    /// Arena size of the backward pass, in bytes.
    pub backward_arena_bytes: usize,
    /// Size of the block that lives from forward to backward, in bytes.
    pub saved_bytes: usize,
    /// Containers with known contents, by their position in [`BufferRef::Constant`].
    pub constants: Vec<ContainerId>,
}

impl MemoryPlan {
    /// The place of a buffer; `None` for one that no launch touches.
    pub fn place(&self, buffer: Buffer) -> Option<BufferRef> {
        self.places.get(&buffer).copied()
    }
}

/// Why memory cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Two boundary containers would be the same bytes.
    #[error(
        "`{one}` and `{other}` are both the caller's but share bytes; copy one of them in the graph"
    )]
    SharedBoundary {
        /// A container.
        one: String,
        /// Another.
        other: String,
    },
    /// A size without a value.
    #[error("`{container}` has size `{size}`, which has no value; bind sizes before lowering")]
    Unbound {
        /// The container.
        container: String,
        /// The size.
        size: String,
    },
}

/// Plans memory for launches in order. External slots are the graph's inputs, then its outputs.
///
/// # Errors
/// A size without a value, or a container that would be two of the caller's buffers at once.
pub fn plan_memory(
    graph: &Graph,
    launches: &[Touches],
    workspace_bytes: &[usize],
) -> Result<MemoryPlan, PlanError> {
    let classes = Classes::new(graph)?;
    let external = external_slots(graph, &classes)?;
    let mut plan = MemoryPlan::default();
    let mut lives: BTreeMap<Buffer, Life> = BTreeMap::new();
    for (at, launch) in launches.iter().enumerate() {
        for buffer in &launch.buffers {
            let root = classes.root_of(*buffer);
            lives.entry(root).or_default().touch(at, launch.stage);
        }
    }
    let mut roots: BTreeMap<Buffer, BufferRef> = BTreeMap::new();
    let mut arenas: BTreeMap<bool, Vec<Interval<Buffer>>> = BTreeMap::new();
    for (root, life) in &lives {
        let bytes = match root {
            Buffer::Container(id) => container_bytes(graph, *id)?,
            Buffer::Workspace(n) => workspace_bytes[*n],
        };
        // An empty container has a place too.
        let bytes = bytes.max(1);
        if let Buffer::Container(id) = root {
            if let Some(slot) = external.get(id) {
                roots.insert(*root, BufferRef::External(*slot));
                continue;
            }
            if matches!(graph.container(*id).lifetime, Lifetime::Constant(_)) {
                roots.insert(*root, BufferRef::Constant(plan.constants.len()));
                plan.constants.push(*id);
                continue;
            }
        }
        if life.forward && life.later {
            roots.insert(*root, BufferRef::Saved(plan.saved_bytes));
            plan.saved_bytes += arena::aligned(bytes);
            continue;
        }
        arenas.entry(life.later).or_default().push(Interval {
            owner: *root,
            first: life.first,
            last: life.last,
            bytes,
        });
    }
    for (later, intervals) in arenas {
        let (offsets, size) = arena::place(intervals);
        if later {
            plan.backward_arena_bytes = size;
        } else {
            plan.forward_arena_bytes = size;
        }
        for (owner, offset) in offsets {
            roots.insert(owner, BufferRef::Arena(offset));
        }
    }
    for buffer in launches.iter().flat_map(|l| &l.buffers) {
        // An empty part at the end of its container would begin after it.
        let start = match buffer {
            Buffer::Container(id) if container_bytes(graph, *id)? == 0 => 0,
            _ => classes.start_of(*buffer),
        };
        let place = match roots[&classes.root_of(*buffer)] {
            BufferRef::Arena(at) => BufferRef::Arena(at + start),
            BufferRef::Saved(at) => BufferRef::Saved(at + start),
            whole if start == 0 => whole,
            _ => return Err(boundary_of_a_part(graph, &classes, *buffer)),
        };
        plan.places.insert(*buffer, place);
    }
    Ok(plan)
}

/// When a buffer is needed.
#[derive(Clone, Copy, Debug)]
struct Life {
    first: usize,
    last: usize,
    forward: bool,
    later: bool,
}

impl Default for Life {
    fn default() -> Self {
        Life {
            first: usize::MAX,
            last: 0,
            forward: false,
            later: false,
        }
    }
}

impl Life {
    fn touch(&mut self, at: usize, stage: Stage) {
        self.first = self.first.min(at);
        self.last = self.last.max(at);
        if stage == Stage::Forward {
            self.forward = true;
        } else {
            self.later = true;
        }
    }
}

/// Size of a container in bytes.
///
/// # Errors
/// A size without a value.
pub fn container_bytes(graph: &Graph, id: ContainerId) -> Result<usize, PlanError> {
    let c = graph.container(id);
    let size = SymExpr::product(&c.shape);
    match size.as_const().and_then(|n| usize::try_from(n).ok()) {
        Some(n) => Ok(n * c.dtype.bytes()),
        None => Err(PlanError::Unbound {
            container: c.name.clone(),
            size: size.to_string(),
        }),
    }
}

/// Containers that are the same bytes, through reshapes that stayed in the graph, or ranges of them, through
/// concatenations that stayed.
pub(crate) struct Classes {
    root: Vec<ContainerId>,
    /// The first byte of each container in its root.
    start: Vec<usize>,
}

impl Classes {
    pub(crate) fn new(graph: &Graph) -> Result<Classes, PlanError> {
        let root: Vec<ContainerId> = graph.container_ids().collect();
        let start = vec![0; root.len()];
        let mut classes = Classes { root, start };
        for node in graph.single_state().into_iter().flat_map(|s| &s.nodes) {
            if let Some((from, to)) = alias(node) {
                classes.place(to, from, 0);
            } else if let Some((parts, whole)) = concatenation(graph, node) {
                let mut start = 0;
                for part in parts {
                    classes.place(part, whole, start);
                    start += container_bytes(graph, part)?;
                }
            }
        }
        Ok(classes)
    }

    /// Puts a container, and all that lie in it, to a place in another one.
    fn place(&mut self, inner: ContainerId, outer: ContainerId, start: usize) {
        let (old, root) = (self.root[inner.idx()], self.root[outer.idx()]);
        let start = self.start[outer.idx()] + start;
        for (own, at) in self.root.iter_mut().zip(&mut self.start) {
            if *own == old {
                (*own, *at) = (root, *at + start);
            }
        }
    }

    fn root_of(&self, buffer: Buffer) -> Buffer {
        match buffer {
            Buffer::Container(id) => Buffer::Container(self.root[id.idx()]),
            Buffer::Workspace(_) => buffer,
        }
    }

    fn start_of(&self, buffer: Buffer) -> usize {
        match buffer {
            Buffer::Container(id) => self.start[id.idx()],
            Buffer::Workspace(_) => 0,
        }
    }
}

/// Whether a node of the graph takes no kernel: its result is its inputs' bytes.
pub fn is_alias(graph: &Graph, node: &Node) -> bool {
    alias(node).is_some() || concatenation(graph, node).is_some()
}

/// A reshape's input and output.
pub fn alias(node: &Node) -> Option<(ContainerId, ContainerId)> {
    match &node.kind {
        NodeKind::Library(l) if l.op == "reshape" => {
            Some((l.inputs.first().copied()??, l.outputs.first().copied()??))
        }
        _ => None,
    }
}

/// A concatenation along the slowest dimension, of parts in the order of the whole: its inputs, which follow one
/// another in memory, and its output.
fn concatenation(graph: &Graph, node: &Node) -> Option<(Vec<ContainerId>, ContainerId)> {
    let NodeKind::Library(l) = &node.kind else {
        return None;
    };
    let axis = match l.attrs.get("axis")? {
        Attr::Int(axis) => usize::try_from(*axis).ok()?,
        _ => return None,
    };
    let whole = l.outputs.first().copied()??;
    let layout = &graph.container(whole).layout;
    let shape = &graph.container(whole).shape;
    let mut order = layout.order().iter();
    let slowest = order.find(|d| shape[**d].as_const() != Some(1));
    let parts: Vec<ContainerId> = l.inputs.iter().copied().collect::<Option<_>>()?;
    let in_order = |id: &ContainerId| graph.container(*id).layout == *layout;
    let is_one = l.op == "concat" && slowest == Some(&axis) && parts.iter().all(in_order);
    is_one.then_some((parts, whole))
}

fn boundary_of_a_part(graph: &Graph, classes: &Classes, buffer: Buffer) -> PlanError {
    let name = |buffer: Buffer| match buffer {
        Buffer::Container(id) => graph.container(id).name.clone(),
        Buffer::Workspace(_) => String::new(),
    };
    PlanError::SharedBoundary {
        one: name(buffer),
        other: name(classes.root_of(buffer)),
    }
}

/// The caller's slot of each class that has one.
fn external_slots(
    graph: &Graph,
    classes: &Classes,
) -> Result<BTreeMap<ContainerId, usize>, PlanError> {
    let mut slots: BTreeMap<ContainerId, (usize, ContainerId)> = BTreeMap::new();
    let outputs = graph.outputs.iter().map(|o| o.container);
    for (slot, id) in graph.inputs.iter().copied().chain(outputs).enumerate() {
        let root = classes.root[id.idx()];
        if let Some((_, other)) = slots.insert(root, (slot, id)) {
            return Err(PlanError::SharedBoundary {
                one: graph.container(other).name.clone(),
                other: graph.container(id).name.clone(),
            });
        }
    }
    Ok(slots
        .into_iter()
        .map(|(id, (slot, _))| (id, slot))
        .collect())
}

/// Containers a node's launches touch in memory: all but those local to it.
pub fn touched(graph: &Graph, node: &Node) -> BTreeSet<ContainerId> {
    let all = node.reads().into_iter().chain(node.writes());
    all.filter(|id| graph.container(*id).storage != Storage::Local)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_container_has_a_place_in_the_arena() {
        let text = "graph \"g\" {
          %x: f32[4] input
          %a: f32[4]
          %none: f32[0]
          %y: f32[4]
          inputs %x
          state {
            map [i < 4] { tasklet %a[i] = ($0 * 2) from %x[i] }
            map [i < 0] { tasklet %none[i] = ($0 * 2) from %x[i] }
            map [i < 4] { tasklet %y[i] = ($0 * 2) from %a[i] }
          }
          outputs %y
        }";
        let graph = graph::parse(text).expect("a graph");
        let id = |name: &str| Buffer::Container(graph.find(name).expect("a container"));
        let launch = |names: &[&str]| Touches {
            stage: Stage::Forward,
            buffers: names.iter().map(|name| id(name)).collect(),
        };
        let launches = [
            launch(&["x", "a"]),
            launch(&["a", "none"]),
            launch(&["a", "y"]),
        ];
        let plan = plan_memory(&graph, &launches, &[]).expect("it fits");
        for name in ["a", "none"] {
            let Some(BufferRef::Arena(at)) = plan.place(id(name)) else {
                panic!("{name} is not in the arena");
            };
            assert!(at < plan.forward_arena_bytes, "{name} at {at}");
        }
    }
}
