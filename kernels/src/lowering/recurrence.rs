//! Nodes that stay whole as a loop over time: their buffers and launches.

use super::{KernelCost, Lowering, PLACEHOLDER};
use crate::lower::LowerError;
use crate::plan::{self, Buffer};
use crate::recurrence::{Place, Recurrence, Step};
use graph::{Attr, Cell, CellGradient, ContainerId, Library, Node, Operand, SymExpr, View};

impl Lowering<'_> {
    /// Lowers a loop over time to a launch that packs the weights and one that runs the steps.
    pub(super) fn recurrence(&mut self, node: &Node, library: &Library) -> Result<(), LowerError> {
        let not_expanded = || LowerError::Library {
            op: library.op.clone(),
            origin: node.origin.to_string(),
        };
        let input = |n: usize| library.inputs.get(n).copied().flatten();
        let output = |n: usize| library.outputs.get(n).copied().flatten();
        let (step, weights, first) = match library.op.as_str() {
            "recurrence" => {
                let cell = Cell::from_attrs(&library.attrs).ok_or_else(not_expanded)?;
                let stores_kept = output(cell.n_states()).is_some();
                let step = Step::Forward {
                    cell,
                    has_bias: input(2).is_some(),
                    stores_kept,
                };
                (step, 1, 0)
            }
            "recurrence_gradient" => {
                let cell = CellGradient::from_attrs(&library.attrs).ok_or_else(not_expanded)?;
                let n = cell.states.len();
                let given = (0..n).map(|k| input(2 + 2 * n + k).is_some()).collect();
                let step = Step::Backward {
                    stores_products: output(1).is_some() || !cell.is_shared(),
                    cell,
                    given,
                };
                (step, 0, 1 + n)
            }
            _ => return Err(not_expanded()),
        };
        let all = input(first).ok_or_else(not_expanded)?;
        let weights = input(weights).ok_or_else(not_expanded)?;
        let sizes = |operand: usize, id| self.view(library, Operand::Input(operand), id);
        let width = sizes(usize::from(first == 0), weights)?.sizes[1];
        let (all, dtype) = (sizes(first, all)?, self.graph.container(all).dtype);
        let mut form = Recurrence {
            steps: all.sizes[0],
            rows: all.sizes[1],
            width,
            dtype,
            vector_bytes: 4 * self.target.vector_width,
            reverse: library.attrs.get("reverse") == Some(&Attr::Bool(true)),
            threads: self.threads as i64,
            step,
            offsets: Vec::new(),
        };
        let mut args = Vec::new();
        for place in form.places() {
            let (buffer, offset) = match place {
                Place::Input(n) => {
                    let id = input(n).ok_or_else(not_expanded)?;
                    let view = self.view(library, Operand::Input(n), id)?;
                    (Some(Buffer::Container(id)), view.offset)
                }
                // The loop also writes a result that nobody reads, so it needs a place.
                Place::Output(n) => match output(n) {
                    Some(id) => (Some(Buffer::Container(id)), 0),
                    None => (self.workspace(form.output_bytes(n)), 0),
                },
                Place::Packed => (self.workspace(form.packed_bytes()), 0),
            };
            args.push(buffer.ok_or_else(not_expanded)?);
            form.offsets.push(offset);
        }
        let text = form
            .text(PLACEHOLDER)
            .map_err(|refused| LowerError::NoLoop {
                reason: refused.to_string(),
                origin: node.origin.to_string(),
            })?;
        let symbols = vec![format!("{PLACEHOLDER}_pack"), PLACEHOLDER.to_string()];
        let rate = self.target.machine.product_rate(form.dtype) * form.n_blocks();
        let (products, cells) = (form.product_operations(), form.cell_operations());
        let kernel = self.kernel(
            node,
            ("loop over time", Some(form.dtype)),
            products + cells,
            symbols.len(),
        );
        self.kernels[kernel].work = KernelCost {
            product_ns: products.saturating_mul(1000) / rate,
            loop_operations: cells,
            points: (form.steps * form.rows * form.width) as u64,
        };
        let source = self.source(node, text, symbols);
        self.scratch = self.scratch.max(form.scratch_bytes());
        for symbol in self.sources[source].symbols.clone() {
            self.launches
                .push((node.stage, source, symbol, args.clone(), kernel));
        }
        Ok(())
    }

    /// Which part of its container an operand is: all of it, unless the node has a view of it.
    pub(super) fn view(
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
        let sizes: Vec<i64> = shape.iter().filter_map(SymExpr::as_const).collect();
        Ok(View::dense(&sizes, &(0..sizes.len()).collect::<Vec<_>>()))
    }
}
