//! Renaming containers inside nodes, and dropping those nobody uses.

use crate::graph::{Attr, Block, ContainerId, Graph, Node, NodeKind};
use std::collections::BTreeSet;

impl Node {
    /// Replaces every container the node reads or writes by `rename` of it.
    pub fn rename_containers(&mut self, rename: &dyn Fn(ContainerId) -> ContainerId) {
        match &mut self.kind {
            NodeKind::Library(l) => {
                for id in l.inputs.iter_mut().chain(&mut l.outputs).flatten() {
                    *id = rename(*id);
                }
            }
            NodeKind::Map(m) => {
                m.body.iter_mut().for_each(|n| n.rename_containers(rename));
            }
            NodeKind::Tasklet(t) => {
                let writes = t.outputs.iter_mut().map(|(m, _)| m);
                for memlet in t.inputs.iter_mut().chain(writes) {
                    memlet.container = rename(memlet.container);
                }
            }
        }
    }
}

impl Graph {
    /// Drops containers that are neither inputs nor outputs nor used by a node, and numbers the
    /// rest anew in the same order. Returns the new id of each old one.
    pub fn compact(&mut self) -> Vec<Option<ContainerId>> {
        let used = self.used_containers();
        let mut next = 0;
        let renumbered: Vec<Option<ContainerId>> = self
            .container_ids()
            .map(|id| {
                used.contains(&id).then(|| {
                    next += 1;
                    ContainerId(next - 1)
                })
            })
            .collect();
        let rename = |id: ContainerId| renumbered.get(id.idx()).copied().flatten().unwrap_or(id);
        self.rename_containers(&rename);
        let mut at = 0;
        self.containers.retain(|_| {
            at += 1;
            renumbered[at - 1].is_some()
        });
        renumbered
    }

    /// Replaces every use of a container, in nodes, inputs, outputs and conditions.
    pub fn rename_containers(&mut self, rename: &dyn Fn(ContainerId) -> ContainerId) {
        for id in &mut self.inputs {
            *id = rename(*id);
        }
        for output in &mut self.outputs {
            output.container = rename(output.container);
            output.updates = output.updates.map(rename);
        }
        rename_in_blocks(&mut self.body, rename);
    }

    fn used_containers(&self) -> BTreeSet<ContainerId> {
        let mut used: BTreeSet<ContainerId> = self.inputs.iter().copied().collect();
        for output in &self.outputs {
            used.insert(output.container);
            used.extend(output.updates);
        }
        use_of_blocks(&self.body, &mut used);
        used
    }

    /// Calls `f` on the nodes of all states, not on those inside maps.
    pub fn visit_nodes(&self, f: &mut dyn FnMut(&Node)) {
        visit_nodes(&self.body, f);
    }

    /// Number of library nodes, and of all nodes that are not inside maps.
    pub fn node_counts(&self) -> (usize, usize) {
        let (mut library, mut all) = (0, 0);
        self.visit_nodes(&mut |n| {
            all += 1;
            library += usize::from(matches!(n.kind, NodeKind::Library(_)));
        });
        (library, all)
    }
}

pub(crate) fn visit_nodes(blocks: &[Block], f: &mut dyn FnMut(&Node)) {
    for block in blocks {
        match block {
            Block::State(s) => s.nodes.iter().for_each(&mut *f),
            Block::Loop(l) => visit_nodes(&l.body, f),
            Block::Branch(b) => {
                visit_nodes(&b.then, f);
                visit_nodes(&b.otherwise, f);
            }
        }
    }
}

fn rename_in_blocks(blocks: &mut [Block], rename: &dyn Fn(ContainerId) -> ContainerId) {
    for block in blocks {
        match block {
            Block::State(s) => s.nodes.iter_mut().for_each(|n| n.rename_containers(rename)),
            Block::Loop(l) => rename_in_blocks(&mut l.body, rename),
            Block::Branch(b) => {
                b.condition = rename(b.condition);
                rename_in_blocks(&mut b.then, rename);
                rename_in_blocks(&mut b.otherwise, rename);
            }
        }
    }
}

fn use_of_blocks(blocks: &[Block], used: &mut BTreeSet<ContainerId>) {
    for block in blocks {
        match block {
            Block::State(s) => {
                for node in &s.nodes {
                    node.visit_containers(&mut |id, _| {
                        used.insert(id);
                    });
                }
            }
            Block::Loop(l) => use_of_blocks(&l.body, used),
            Block::Branch(b) => {
                used.insert(b.condition);
                use_of_blocks(&b.then, used);
                use_of_blocks(&b.otherwise, used);
            }
        }
    }
}

/// Whether all sizes in the attributes are constants.
pub(crate) fn sizes_are_constant(attr: &Attr) -> bool {
    match attr {
        Attr::Sizes(sizes) => sizes.iter().all(|s| s.as_const().is_some()),
        _ => true,
    }
}
