//! Nodes that stay whole as a loop over time: their buffers and launches.

use super::{KernelCost, Lowering, PLACEHOLDER};
use crate::lower::LowerError;
use crate::plan::{self, Buffer};
use crate::recurrence::Recurrence;
use graph::{ContainerId, DType, Library, Node, Operand, View};

impl Lowering<'_> {
    /// Lowers a loop over time to a launch that packs the weights and one that runs the steps.
    pub(super) fn recurrence(&mut self, node: &Node, library: &Library) -> Result<(), LowerError> {
        let is_forward = match library.op.as_str() {
            "lstm_recurrence" => true,
            "lstm_recurrence_gradient" => false,
            _ => return Err(not_expanded(node, library)),
        };
        // In the order of the buffers of the text; what may be absent comes last.
        let order: &[usize] = if is_forward {
            &[0, 1, 2, 3]
        } else {
            &[0, 2, 3, 4, 5, 1]
        };
        let mut inputs = Vec::new();
        for n in order {
            match library.inputs.get(*n).copied().flatten() {
                Some(id) => inputs.push((id, self.view(library, Operand::Input(*n), id)?)),
                None if !is_forward && *n == 1 => {}
                None => return Err(not_expanded(node, library)),
            }
        }
        let wide = &inputs[if is_forward { 0 } else { 4 }].1.sizes;
        let dtype = self.graph.container(inputs[0].0).dtype;
        let form = Recurrence {
            steps: wide[0],
            rows: wide[1],
            width: wide[2] / 4,
            is_double: dtype == DType::F64,
            vector_bytes: 4 * self.target.vector_width,
            threads: self.threads as i64,
            has_cells: inputs.len() > 5,
        };
        let offsets: Vec<i64> = inputs.iter().map(|(_, view)| view.offset).collect();
        let text = match is_forward {
            true => form.forward(PLACEHOLDER, &offsets),
            false => form.backward(PLACEHOLDER, &offsets),
        };
        let symbols = vec![format!("{PLACEHOLDER}_pack"), PLACEHOLDER.to_string()];
        let kernel = self.kernel(node, "loop over time", form.operations(), symbols.len());
        self.kernels[kernel].work = KernelCost {
            product_ns: 0,
            loop_operations: form.operations(),
            points: (form.steps * form.rows * form.width) as u64,
        };
        let source = self.source(node, text, symbols);
        self.scratch = self.scratch.max(form.scratch_bytes(is_forward));
        let n_required = order.len().min(if is_forward { 4 } else { 5 });
        let container = |(id, _): &(ContainerId, View)| Buffer::Container(*id);
        let mut args: Vec<Buffer> = inputs[..n_required].iter().map(container).collect();
        let element = dtype.bytes() as i64;
        let (state, all) = (
            form.rows * form.width * element,
            form.steps * form.rows * form.width * element,
        );
        let results = if is_forward {
            [all, all, 4 * all]
        } else {
            [4 * all, state, state]
        };
        for (n, bytes) in results.into_iter().enumerate() {
            // What nobody reads is still a place that the loop writes.
            match library.outputs.get(n).copied().flatten() {
                Some(id) => args.push(Buffer::Container(id)),
                None => args.extend(self.workspace(bytes as usize)),
            }
        }
        args.extend(self.workspace(form.packed_bytes(is_forward)));
        args.extend(inputs[n_required..].iter().map(container));
        for symbol in self.sources[source].symbols.clone() {
            self.launches
                .push((node.stage, source, symbol, args.clone(), kernel));
        }
        Ok(())
    }

    /// Which part of its container an operand is: all of it, if nothing else was said.
    fn view(
        &self,
        library: &Library,
        operand: Operand,
        id: ContainerId,
    ) -> Result<View, LowerError> {
        if let Some(view) = library.view(operand) {
            return Ok(view);
        }
        plan::container_bytes(&self.graph, id)?;
        let shape = &self.graph.container(id).shape;
        let sizes: Vec<i64> = shape.iter().filter_map(graph::SymExpr::as_const).collect();
        Ok(View::dense(&sizes, &(0..sizes.len()).collect::<Vec<_>>()))
    }
}

fn not_expanded(node: &Node, library: &Library) -> LowerError {
    LowerError::Library {
        op: library.op.clone(),
        origin: node.origin.to_string(),
    }
}
