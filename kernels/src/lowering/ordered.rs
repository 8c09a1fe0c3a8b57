//! Nodes that stay whole: which kernel computes each, and loops along an axis (running sums, first elements).

use super::{KernelCost, Lowering, PLACEHOLDER};
use crate::lower::LowerError;
use crate::ordered::{Along, First};
use crate::plan::Buffer;
use graph::{Attr, DType, Library, Node, Operand};

impl Lowering<'_> {
    /// Lowers a node that stays whole.
    pub(super) fn whole(&mut self, node: &Node, library: &Library) -> Result<(), LowerError> {
        match library.op.as_str() {
            "cumsum" => self.running_sums(node, library),
            "topk" => self.first_elements(node, library),
            "attention_with_lse" | "attention_gradient" => self.attention(node, library),
            _ => self.recurrence(node, library),
        }
    }

    fn running_sums(&mut self, node: &Node, library: &Library) -> Result<(), LowerError> {
        let (along, x) = self.along(node, library)?;
        let Some(out) = library.outputs.first().copied().flatten() else {
            return Ok(());
        };
        let reverse = library.attrs.get("reverse") == Some(&Attr::Bool(true));
        let into = self.graph.container(out).dtype;
        let text = along.running_sums(PLACEHOLDER, into, reverse);
        let args = vec![x, Buffer::Container(out)];
        self.ordered(node, text, args, along.elements() as u64, along);
        Ok(())
    }

    fn first_elements(&mut self, node: &Node, library: &Library) -> Result<(), LowerError> {
        let (along, x) = self.along(node, library)?;
        let outputs: Vec<_> = (0..2)
            .map(|n| library.outputs.get(n).copied().flatten())
            .collect();
        let Some(known) = outputs.iter().flatten().next() else {
            return Ok(());
        };
        let taken = self.elements(*known)? as i64;
        let first = First {
            k: taken / (along.outer * along.inner),
            largest: library.attrs.get("largest") != Some(&Attr::Bool(false)),
        };
        if first.k == 0 {
            return Ok(());
        }
        let mut args = vec![x];
        for (output, dtype) in outputs.into_iter().zip([along.dtype, DType::I64]) {
            // The loop also writes a result that nobody reads, so it needs a place.
            args.extend(match output {
                Some(id) => Some(Buffer::Container(id)),
                None => self.workspace(taken as usize * dtype.bytes()),
            });
        }
        self.scratch = self.scratch.max(along.sort_bytes(first));
        let text = along.first_elements(PLACEHOLDER, first);
        self.ordered(node, text, args, along.comparisons(first), along);
        Ok(())
    }

    /// Adds the kernel and its launch.
    fn ordered(
        &mut self,
        node: &Node,
        text: String,
        args: Vec<Buffer>,
        operations: u64,
        along: Along,
    ) {
        let kernel = self.kernel(node, ("loop along an axis", None), operations, 1);
        self.kernels[kernel].work = KernelCost {
            product_ns: 0,
            loop_operations: operations,
            points: along.elements() as u64,
        };
        let source = self.source(node, text, vec![PLACEHOLDER.to_string()]);
        let symbol = self.sources[source].symbols[0].clone();
        self.launches
            .push((node.stage, source, symbol, args, kernel));
    }

    /// The operand by its axis, and its buffer.
    fn along(&self, node: &Node, library: &Library) -> Result<(Along, Buffer), LowerError> {
        let Some(id) = library.inputs.first().copied().flatten() else {
            return Err(LowerError::Library {
                op: library.op.clone(),
                origin: node.origin.to_string(),
            });
        };
        let view = self.view(library, Operand::Input(0), id)?;
        let rank = view.sizes.len() as i64;
        let axis = match library.attrs.get("axis") {
            Some(Attr::Int(axis)) => axis.rem_euclid(rank.max(1)),
            _ => rank - 1,
        } as usize;
        let along = Along {
            outer: view.sizes[..axis].iter().product(),
            n: view.sizes[axis],
            inner: view.sizes[axis + 1..].iter().product(),
            dtype: self.graph.container(id).dtype,
            offset: view.offset,
        };
        Ok((along, Buffer::Container(id)))
    }
}
