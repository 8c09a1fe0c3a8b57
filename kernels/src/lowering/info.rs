//! What each kernel became: the record that predictions and reports read.

use super::{BlockingDecision, KernelCost, Lowering, Split, identifier};
use crate::contraction::{NoFastForm, ScalarForm};
use graph::{ContainerId, DType, Node, NodeKind, Origin, Place, Schedule, Stage, Storage};
use std::sync::Arc;

/// How a kernel was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// Its name in the C text.
    pub name: String,
    /// Where its operators came from.
    pub origin: String,
    /// The operators that it was fused from, each once.
    pub operators: Vec<Arc<Origin>>,
    /// Forward, backward or optimizer.
    pub stage: Stage,
    /// Which generator wrote it: `loops`, or the contraction generator's path.
    pub path: &'static str,
    /// The type of the numbers that its products multiply, which decides which limit they have: `bf16` only if the CPU
    /// multiplies pairs of them. `None` for loops, and on a GPU.
    pub products: Option<DType>,
    /// Arithmetic operations: multiplications and additions of a contraction, scalar functions of
    /// other kernels.
    pub flops: u64,
    /// What its time is predicted from, besides the bytes it moves.
    pub work: KernelCost,
    /// For a contraction with a choice of blocks: how it was cut.
    pub cuts: Option<BlockingDecision>,
    /// For a contraction that the cost model cuts although the recipe says how: the place of the decision.
    pub uncut: Option<Place>,
    /// Launches it takes.
    pub n_launches: usize,
    /// Containers it reads from memory, each once; not what it made itself.
    pub reads: Vec<ContainerId>,
    /// Containers it writes to memory, each once.
    pub writes: Vec<ContainerId>,
    /// Bytes moved in addition, to put the results of a foreign operator in their places.
    pub bytes_copied: u64,
    /// Which of several candidates computes it, and why, if a table or the caller chose.
    pub choice: Option<String>,
    /// For a contraction that no fast form takes: why, and what that costs.
    pub scalar: Option<ScalarForm>,
    /// For a contraction of bf16 operands on a CPU that multiplies pairs of them: why it is computed in single
    /// precision.
    pub no_pairs: Option<NoFastForm>,
    /// The splits by which one kernel of the graph became several, and why; on the first of them only.
    pub splits: Vec<Split>,
}

/// The operators that a top-level node was fused from, each once, in order.
pub fn operators(node: &Node) -> Vec<Arc<Origin>> {
    let members = match &node.kind {
        NodeKind::Map(map) if map.schedule == Schedule::Kernel => map.body.as_slice(),
        _ => std::slice::from_ref(node),
    };
    let mut found: Vec<Arc<Origin>> = Vec::new();
    for member in members {
        if !found.contains(&member.origin) {
            found.push(member.origin.clone());
        }
    }
    found
}

impl Lowering<'_> {
    /// Adds the record of a kernel and returns its position. `path` and `products` are its generator's.
    pub(super) fn kernel(
        &mut self,
        node: &Node,
        (path, products): (&'static str, Option<DType>),
        flops: u64,
        n_launches: usize,
    ) -> usize {
        let in_memory = |id: &ContainerId| self.graph.container(*id).storage != Storage::Local;
        let writes: Vec<_> = node.writes().into_iter().filter(in_memory).collect();
        let needed = |id: &ContainerId| in_memory(id) && !writes.contains(id);
        let reads = node.reads().into_iter().filter(needed).collect();
        self.kernels.push(KernelInfo {
            name: identifier(&node.origin.node),
            origin: node.origin.to_string(),
            operators: operators(node),
            stage: node.stage,
            path,
            products,
            flops,
            work: KernelCost::default(),
            cuts: None,
            uncut: None,
            n_launches,
            reads,
            writes,
            bytes_copied: 0,
            choice: None,
            scalar: None,
            no_pairs: None,
            splits: Vec::new(),
        });
        self.kernels.len() - 1
    }
}
