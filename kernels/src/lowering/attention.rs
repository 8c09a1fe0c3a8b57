//! Attention without stored scores: its buffers and launch.

use super::{KernelCost, Lowering, PLACEHOLDER};
use crate::attention::{Attention, Pass};
use crate::lower::LowerError;
use crate::plan::Buffer;
use graph::philox::Dropout;
use graph::{Attr, DType, Library, Node, Operand, View};

impl Lowering<'_> {
    /// Lowers `attention_with_lse` or `attention_gradient`.
    pub(super) fn attention(&mut self, node: &Node, library: &Library) -> Result<(), LowerError> {
        let not_expanded = || LowerError::Library {
            op: library.op.clone(),
            origin: node.origin.to_string(),
        };
        let pass = match library.op.as_str() {
            "attention_with_lse" => Pass::Forward,
            "attention_gradient" => Pass::Backward,
            _ => return Err(not_expanded()),
        };
        let dropout = match library.attrs.get("dropout") {
            Some(Attr::Float(probability)) if *probability > 0.0 => {
                let id = match library.attrs.get("id") {
                    Some(Attr::Int(id)) => *id,
                    _ => 0,
                };
                Some(Dropout::new(*probability, id))
            }
            _ => None,
        };
        let (mut views, mut args, mut mask) = (Vec::new(), Vec::new(), None);
        let n_results = Pass::RESULTS;
        let rest = pass.operands().iter().position(|name| *name == "REST");
        let rest = rest.and_then(|n| library.inputs.get(n).copied().flatten());
        let n_inputs = pass.operands().len() - n_results;
        for (n, name) in pass.operands()[..n_inputs].iter().enumerate() {
            let id = match library.inputs.get(n).copied().flatten() {
                _ if *name == "SEED" && dropout.is_none() => continue,
                Some(id) => id,
                None if matches!(*name, "MASK" | "REST") => continue,
                None => return Err(not_expanded()),
            };
            if *name == "MASK" {
                mask = Some(self.graph.container(id).dtype);
            }
            views.push(self.view(library, Operand::Input(n), id)?);
            args.push(Buffer::Container(id));
        }
        for n in 0..n_results {
            // The kernel also writes a result that nobody reads, so it needs a place.
            let (view, buffer) = match library.outputs.get(n).copied().flatten() {
                Some(id) => {
                    let view = self.view(library, Operand::Output(n), id)?;
                    (view, Some(Buffer::Container(id)))
                }
                None => {
                    let view = unread(pass, n, &views);
                    let bytes = view.elements() as usize * DType::F32.bytes();
                    (view, self.workspace(bytes))
                }
            };
            views.push(view);
            args.push(buffer.ok_or_else(not_expanded)?);
        }
        let width = views[usize::from(pass == Pass::Backward)].sizes.last();
        let scale = match library.attrs.get("scale") {
            Some(Attr::Float(scale)) => *scale,
            _ => 1.0 / (width.copied().unwrap_or(1) as f64).sqrt(),
        };
        let q = library.inputs[usize::from(pass == Pass::Backward)].ok_or_else(not_expanded)?;
        let form = Attention {
            views,
            element: self.graph.container(q).dtype,
            mask,
            dropout,
            has_rest: pass == Pass::Forward || rest.is_some(),
            pass,
            scale,
            fill: match library.attrs.get("fill") {
                Some(Attr::Float(fill)) if mask == Some(DType::Bool) => Some(*fill),
                _ => None,
            },
            safe: library.attrs.get("safe") != Some(&Attr::Bool(false)),
            causal: library.attrs.get("causal") == Some(&Attr::Bool(true)),
            vector_bytes: 4 * self.target.vector_width,
        };
        let (products, softmax) = (form.product_operations(), form.softmax_operations());
        let made_by = ("attention", Some(DType::F32));
        let kernel = self.kernel(node, made_by, products + softmax, 1);
        self.kernels[kernel].work = KernelCost {
            product_ns: products.saturating_mul(1000)
                / self.target.machine.product_rate(DType::F32),
            loop_operations: softmax,
            points: form.points(),
        };
        self.scratch = self.scratch.max(form.scratch_bytes());
        let text = form.text(PLACEHOLDER);
        let source = self.source(node, text, vec![PLACEHOLDER.to_string()]);
        let symbol = self.sources[source].symbols[0].clone();
        self.launches
            .push((node.stage, source, symbol, args, kernel));
        Ok(())
    }
}

/// The whole of a result that has no container.
fn unread(pass: Pass, n: usize, inputs: &[View]) -> View {
    let like = |view: &View| view.sizes.clone();
    let sizes = match (pass, n) {
        (Pass::Backward, _) => like(&inputs[1 + n]),
        (Pass::Forward, 0) => {
            let mut sizes = like(&inputs[0]);
            sizes.pop();
            sizes.extend(inputs[2].sizes.last());
            sizes
        }
        (Pass::Forward, _) => {
            let mut sizes = like(&inputs[0]);
            sizes.pop();
            sizes
        }
    };
    View::dense(&sizes, &(0..sizes.len()).collect::<Vec<_>>())
}
