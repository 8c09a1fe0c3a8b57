//! Which kernels of a backward pass some of its results need.
//!
//! The other kernels can be left out of a run. What remains computes the same numbers: a kernel that is needed finds
//! in memory what it reads, because every kernel that writes this memory before is needed too. Memory that is lent
//! twice is no exception, since the order of the launches stays as it is.

use crate::lowering::{KernelInfo, LoweredLaunch};
use crate::plan::{Buffer, Classes};
use graph::{Graph, Lifetime, Stage};
use std::collections::BTreeSet;

/// What each kernel touches and writes, and where the graph's outputs are.
#[derive(Clone, Debug, Default)]
pub struct Dependences {
    /// The memory of each output of the graph.
    outputs: Vec<Buffer>,
    kernels: Vec<Uses>,
}

/// Memory is named by the container, or workspace, whose first byte it begins with.
#[derive(Clone, Debug, Default)]
struct Uses {
    is_backward: bool,
    touched: BTreeSet<Buffer>,
    written: BTreeSet<Buffer>,
}

/// A part of a backward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// For each kernel of the program, whether the part runs it.
    pub kernels: Vec<bool>,
    /// For each output of the graph, whether the part touches its memory.
    pub outputs: Vec<bool>,
}

impl Dependences {
    pub(crate) fn new(
        graph: &Graph,
        classes: &Classes,
        launches: &[LoweredLaunch],
        kernels: &[KernelInfo],
    ) -> Dependences {
        let is_constant = |buffer: &Buffer| match buffer {
            Buffer::Container(id) => {
                matches!(graph.container(*id).lifetime, Lifetime::Constant(_))
            }
            Buffer::Workspace(_) => false,
        };
        let root = |id: &graph::ContainerId| classes.root_of(Buffer::Container(*id));
        let mut uses: Vec<Uses> = kernels
            .iter()
            .map(|kernel| Uses {
                is_backward: kernel.stage != Stage::Forward,
                touched: BTreeSet::new(),
                written: kernel.writes.iter().map(root).collect(),
            })
            .collect();
        for launch in launches {
            let kernel = &mut uses[launch.kernel];
            let roots = launch.args.iter().map(|b| classes.root_of(*b));
            for buffer in roots.filter(|b| !is_constant(b)) {
                if matches!(buffer, Buffer::Workspace(_)) {
                    kernel.written.insert(buffer);
                }
                kernel.touched.insert(buffer);
            }
        }
        let outputs = graph.outputs.iter().map(|o| root(&o.container)).collect();
        Dependences {
            outputs,
            kernels: uses,
        }
    }

    /// The kernels of the backward pass that write the given outputs of the graph, and all that these need.
    pub fn part_for(&self, outputs: &[usize]) -> Part {
        let mut needed: BTreeSet<Buffer> = outputs.iter().map(|o| self.outputs[*o]).collect();
        let mut kernels = vec![false; self.kernels.len()];
        for (kernel, is_needed) in self.kernels.iter().zip(&mut kernels).rev() {
            *is_needed = kernel.is_backward && !kernel.written.is_disjoint(&needed);
            if *is_needed {
                needed.extend(&kernel.touched);
            }
        }
        let outputs = self.outputs.iter().map(|o| needed.contains(o)).collect();
        Part { kernels, outputs }
    }
}
