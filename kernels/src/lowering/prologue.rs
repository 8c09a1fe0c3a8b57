//! Lowering of a contraction whose operands are made while it packs them.
//!
//! Owns which members of a kernel are prologues. If the contraction takes no prologue, the map that makes the
//! operand is a kernel of its own, and is counted as one.

use super::members::split_epilogue;
use super::split::{Split, SplitReason, Stop};
use super::work::work;
use super::{Lowering, PLACEHOLDER, operations, operators};
use crate::contraction::{self, Hooks};
use crate::emit;
use crate::lower::LowerError;
use crate::plan::Buffer;
use crate::recognize::Recognized;
use graph::{ContainerId, Node, NodeKind, Storage};

/// First buffer after the contraction's own.
const FIRST: usize = 4;

/// What makes operands of a contraction.
#[derive(Clone, Debug, Default)]
pub(super) struct Before {
    /// The functions that do.
    pub(super) text: String,
    /// What they read, in the order of their buffers from the fifth on.
    pub(super) args: Vec<ContainerId>,
    /// The function of each operand.
    names: [Option<String>; 2],
    /// The function that also stores an operand, if others read it.
    keeps: [Option<String>; 2],
}

impl Before {
    pub(super) fn hooks(&self) -> Hooks {
        let [prologue_a, prologue_b] = self.names.clone();
        Hooks {
            prologue_a,
            prologue_b,
            keeps: self.keeps.clone(),
            ..Hooks::default()
        }
    }

    pub(super) fn buffers(&self) -> impl Iterator<Item = Buffer> {
        self.args.iter().map(|id| Buffer::Container(*id))
    }

    /// The operands' buffers. The buffer of an operand that is made is not read.
    pub(super) fn operands(&self, found: &Recognized) -> [Buffer; 2] {
        let of = |side: usize, id: ContainerId| {
            let stands_in = self.args.first().filter(|_| self.names[side].is_some());
            Buffer::Container(stands_in.copied().unwrap_or(id))
        };
        [of(0, found.a), of(1, found.b)]
    }
}

impl Lowering<'_> {
    /// Lowers a kernel of a contraction, given as `product`, and maps before it.
    pub(super) fn after_prologues(
        &mut self,
        before: &[Node],
        product: &Node,
    ) -> Result<(), LowerError> {
        let first = self.kernels.len();
        let prologues = match self.prologues(before, product) {
            Ok(prologues) => prologues,
            Err(Stop::Error(error)) => return Err(error),
            Err(Stop::Split(reason)) => {
                for node in before {
                    for id in node.writes() {
                        self.graph.container_mut(id).storage = Storage::Global;
                    }
                    self.loops(node)?;
                }
                self.node(product)?;
                let parts = before.iter().chain([product]);
                self.record_split(first, Split::new(parts, reason));
                return Ok(());
            }
        };
        self.before = prologues;
        let done = self.node(product);
        self.before = Before::default();
        done?;
        let in_memory = |id: &ContainerId| self.graph.container(*id).storage != Storage::Local;
        let of = |list: fn(&Node) -> Vec<ContainerId>| -> Vec<ContainerId> {
            before.iter().flat_map(list).filter(in_memory).collect()
        };
        let (reads, writes) = (of(Node::reads), of(Node::writes));
        if let Some(kernel) = self.kernels.get_mut(first) {
            for node in before {
                kernel.flops += operations(node, 1);
                let more = work(node, 1);
                kernel.work.loop_operations += more.loop_operations;
                kernel.work.points += more.points;
                for operator in operators(node) {
                    if !kernel.operators.contains(&operator) {
                        kernel.operators.push(operator);
                    }
                }
            }
            kernel.reads.retain(|id| !writes.contains(id));
            kernel.writes.extend(writes);
            for id in reads {
                if !kernel.reads.contains(&id) && !kernel.writes.contains(&id) {
                    kernel.reads.push(id);
                }
            }
        }
        Ok(())
    }

    /// The maps as prologues of the contraction.
    fn prologues(&mut self, before: &[Node], product: &Node) -> Result<Before, Stop> {
        let first = match &product.kind {
            NodeKind::Map(map) => split_epilogue(product, map).map(|(first, _)| first),
            _ => None,
        };
        let found = self.recognize(first.as_ref().unwrap_or(product));
        let found = found.filter(|f| f.a != f.b).ok_or(SplitReason::Operand)?;
        if self.has_halves(&found) {
            return Err(SplitReason::Halves.into());
        }
        let mut made = Before::default();
        for node in before {
            let [operand] = node.writes()[..] else {
                return Err(SplitReason::Operand.into());
            };
            let side = [found.a, found.b].iter().position(|id| *id == operand);
            let first = FIRST + made.args.len();
            let emitted = emit::emit_prologue(&self.graph, node, operand, first)?;
            let (Some(side), Some(emitted)) = (side, emitted) else {
                return Err(SplitReason::Operand.into());
            };
            let name = format!("{PLACEHOLDER}_before{side}");
            made.text += &emitted.text.replace(emit::NAME, &name);
            made.args.extend(&emitted.args);
            if self.graph.container(operand).storage != Storage::Local {
                let own = format!("{PLACEHOLDER}_keep{side}");
                made.text += &emitted.keeping(&own, &name, FIRST + made.args.len());
                made.args.push(operand);
                made.keeps[side] = Some(own);
            }
            made.names[side] = Some(name);
        }
        let taken = contraction::takes_prologues(&found.contraction, &made.hooks(), &self.target);
        match taken {
            true => Ok(made),
            false => Err(SplitReason::Packing.into()),
        }
    }
}
