//! Loops whose number of trips is known, and recurrent cells over a known length, written out as plain nodes.
//!
//! Owns where a loop is written out and how many nodes that may make; what one trip is, is in `loops.rs` and
//! `cells.rs`. A node that is not written out stays as it is. What comes out gives what went in gives, but for
//! roundings: sums are of the same terms in another order.

mod cells;
mod loops;

use crate::attributes::{Attributes, bodies, is_standard};
use crate::evaluate::reads;
use crate::infer::{Facts, known_values};
use crate::operators::Unknowns;
use crate::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, attribute_type,
};
use crate::rewrite::patch::node;
use crate::stored::Stored;
use crate::tensor::{Tensor, Values};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Most trips of a loop that is written out.
const MOST_TRIPS: i64 = 1024;
/// Most nodes that one loop may become.
const MOST_NODES: usize = 20_000;
/// Most rounds. Each writes out one level of nested loops, from the outside in.
const MOST_ROUNDS: usize = 8;

/// The model, which has version 13 of the operators or a newer one, with its loops and cells written out as far as
/// their lengths are known.
pub fn unrolled(model: &ModelProto, folder: &Arc<Path>) -> ModelProto {
    let mut model = model.clone();
    for _ in 0..MOST_ROUNDS {
        let is_one = |n: &NodeProto| is_standard(n) && WRITTEN.contains(&n.op_type.as_str());
        if !model.graph.iter().flat_map(|g| &g.node).any(is_one) {
            break;
        }
        let facts = known_values(&model, folder, &Unknowns::default());
        let Some(graph) = &mut model.graph else { break };
        let mut taken = BTreeSet::new();
        super::names(graph, &mut taken);
        let mut changed = false;
        for old in std::mem::take(&mut graph.node) {
            let mut written = Written {
                facts: &facts,
                taken,
                nodes: Vec::new(),
                initializers: Vec::new(),
            };
            let done =
                is_one(&old) && written.out(&old).is_some() && written.nodes.len() <= MOST_NODES;
            taken = written.taken;
            match done {
                true => {
                    changed = true;
                    graph.node.append(&mut written.nodes);
                    graph.initializer.append(&mut written.initializers);
                }
                false => graph.node.push(old),
            }
        }
        if !changed {
            break;
        }
    }
    model
}

/// Operators that are written out.
const WRITTEN: [&str; 5] = ["Loop", "Scan", "LSTM", "GRU", "RNN"];

/// The nodes that replace one node.
struct Written<'a> {
    facts: &'a Facts,
    /// Names that values have.
    taken: BTreeSet<String>,
    nodes: Vec<NodeProto>,
    initializers: Vec<TensorProto>,
}

impl Written<'_> {
    /// Writes a node out; `None` if it stays.
    fn out(&mut self, old: &NodeProto) -> Option<()> {
        match old.op_type.as_str() {
            "Loop" => loops::write_loop(self, old),
            "Scan" => loops::write_scan(self, old),
            _ => cells::write(self, old),
        }
    }

    /// A name like `base` that nothing has.
    fn fresh(&mut self, base: &str) -> String {
        let mut name = base.to_string();
        let mut n = 0;
        while !self.taken.insert(name.clone()) {
            n += 1;
            name = format!("{base}.{n}");
        }
        name
    }

    /// A node with one output; gives the output's name.
    fn add(
        &mut self,
        base: &str,
        op: &str,
        inputs: &[&str],
        attributes: Vec<AttributeProto>,
    ) -> String {
        let name = self.fresh(base);
        self.push(op, inputs, &[&name], attributes);
        name
    }

    fn push(
        &mut self,
        op: &str,
        inputs: &[&str],
        outputs: &[&str],
        attributes: Vec<AttributeProto>,
    ) {
        let mut new = node(op, inputs, attributes);
        new.output = outputs.iter().map(ToString::to_string).collect();
        new.name = outputs.first().map_or(String::new(), ToString::to_string);
        self.nodes.push(new);
    }

    /// A constant; gives its name.
    fn constant(&mut self, base: &str, tensor: Tensor) -> String {
        let name = self.fresh(base);
        let value = AttributeProto {
            name: "value".to_string(),
            r#type: attribute_type::TENSOR,
            t: Some(Stored::of_tensor(&name, tensor).proto().clone()),
            ..Default::default()
        };
        self.push("Constant", &[], &[&name], vec![value]);
        name
    }

    fn ints(&mut self, base: &str, values: &[i64]) -> String {
        let tensor = Tensor::new(&[values.len()], Values::I64(values.to_vec()));
        self.constant(base, tensor)
    }

    fn int(&mut self, base: &str, value: i64) -> String {
        self.constant(base, Tensor::new(&[], Values::I64(vec![value])))
    }

    /// `x` at one place of a dimension, which goes.
    fn at(&mut self, base: &str, x: &str, place: i64, axis: i64) -> String {
        let index = self.int(&format!("{base}.place"), place);
        self.add(
            base,
            "Gather",
            &[x, &index],
            vec![crate::rewrite::patch::int("axis", axis)],
        )
    }

    /// Stacks values along a new dimension, as `output`.
    fn stack(&mut self, output: &str, values: &[String], axis: i64) {
        let axes = self.ints(&format!("{output}.axes"), &[axis]);
        let wide: Vec<String> = values
            .iter()
            .map(|x| {
                self.add(
                    &format!("{output}.piece"),
                    "Unsqueeze",
                    &[x, &axes],
                    Vec::new(),
                )
            })
            .collect();
        let wide: Vec<&str> = wide.iter().map(String::as_str).collect();
        self.push(
            "Concat",
            &wide,
            &[output],
            vec![crate::rewrite::patch::int("axis", axis)],
        );
    }
}

#[cfg(test)]
mod tests;
