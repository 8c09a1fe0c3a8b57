//! Library nodes that an operator of PyTorch's computes: one launch each, on views of containers.
//!
//! Owns their place in a program. Never chooses who computes what: the node says it.

use super::{Lowering, MapInfo, Placed};
use crate::LaunchOp;
use crate::vendor::Call;
use graph::{Library, Node, Operand};
use kernels::lower::LowerError;
use kernels::plan::Buffer;

impl Lowering {
    /// Places a node that says who computes it.
    pub(super) fn call(&mut self, node: &Node, library: &Library) -> Result<(), LowerError> {
        let container = |operand: Operand| match operand {
            Operand::Input(n) => library.inputs.get(n).copied().flatten(),
            Operand::Output(n) => library.outputs.get(n).copied().flatten(),
        };
        let dtype = |operand| Some(self.graph.container(container(operand)?).dtype);
        let described = Call::of(library, &dtype);
        let in_order = |id: &graph::ContainerId| self.graph.container(*id).layout.is_row_major();
        let ids: Vec<_> = library
            .inputs
            .iter()
            .chain(&library.outputs)
            .copied()
            .flatten()
            .collect();
        // Strides count in row-major containers.
        let Some(call) = described.filter(|_| ids.iter().all(in_order)) else {
            return Err(LowerError::Library {
                op: library.op.clone(),
                origin: node.origin.to_string(),
            });
        };
        let info = self.info(node, call.by.name(), call.flops(), 1)?;
        self.program.maps.push(MapInfo {
            bytes_copied: call.copied_bytes(),
            ..info
        });
        let n = self.program.calls.len();
        self.program.launches.push(Placed {
            work: LaunchOp::Call(n),
            grid: 1,
            args: ids.into_iter().map(Buffer::Container).collect(),
            stage: node.stage,
            map: self.program.maps.len() - 1,
        });
        self.program.calls.push(Call {
            name: format!("sh_c{n}"),
            ..call
        });
        Ok(())
    }
}
