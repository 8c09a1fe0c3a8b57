//! Values of several dimensions, kept as the rows that matrix products give and take.
//!
//! Before: `y = Reshape(Gemm(…), [b, t, w])`, `z = Relu(y)`, `Gemm(Reshape(z, [b·t, w]), …)`. After:
//! `Gemm(Relu(Gemm(…)), …)`. Exact: a reshaping moves nothing, and what is computed of single elements, or along
//! the last dimension, is the same for rows. A runtime schedules each reshaping as a node. Only where fewer nodes
//! are left than there were.

use super::super::proto::NodeProto;
use super::nodes::{Nodes, Refusal};
use graph::SymExpr;
use std::collections::BTreeMap;

/// The rows of a value, a value of their own.
#[derive(Clone)]
struct Rows {
    /// The value of two dimensions.
    name: String,
    /// The shape of the value itself: leading sizes, whose product is the number of rows, then the width.
    shape: Vec<SymExpr>,
}

impl Rows {
    fn lead(&self) -> &[SymExpr] {
        &self.shape[..self.shape.len() - 1]
    }
}

/// Whether a shape of two dimensions is the rows of another one.
fn are_rows(flat: &[SymExpr], shape: &[SymExpr]) -> bool {
    let Some((width, lead)) = shape.split_last() else {
        return false;
    };
    flat.len() == 2
        && shape.len() > 2
        && flat[1] == *width
        && flat[0] == SymExpr::product(lead)
        && flat.iter().all(|size| size.as_const() != Some(0))
}

/// What happens if a node reads rows and a value of several dimensions that has no rows yet.
#[derive(Clone, Copy, Default, PartialEq)]
enum Meeting {
    /// Rows are made of the value.
    #[default]
    OfRows,
    /// The rows are given their own shape again.
    OfShapes,
}

/// What is known while the list is written anew.
#[derive(Default)]
struct Known {
    meeting: Meeting,
    rows: BTreeMap<String, Rows>,
    /// Values that nobody has needed in their own shape yet.
    waiting: BTreeMap<String, Rows>,
    /// Values that another value replaces, with its name.
    renamed: BTreeMap<String, String>,
}

/// How an operator sees its operands.
enum Sight {
    /// Element by element.
    Elements,
    /// Along the last dimension of its first operand.
    Last,
}

impl Nodes<'_> {
    /// Keeps values as rows in the whole list; `results` are the values that the file gives.
    pub(super) fn keep_rows(&mut self, results: &[&str]) {
        let before = self.list.clone();
        let mut best = before.clone();
        for meeting in [Meeting::OfRows, Meeting::OfShapes] {
            self.list.clone_from(&before);
            let known = Known {
                meeting,
                ..Known::default()
            };
            if self.rewritten(results, known).is_ok() && self.list.len() < best.len() {
                best.clone_from(&self.list);
            }
        }
        self.replace_list(best);
    }

    /// Writes the list anew.
    fn rewritten(&mut self, results: &[&str], mut known: Known) -> Result<(), Refusal> {
        for node in self.take_list() {
            self.begin_beside(&node);
            self.rewrite(node, results, &mut known)?;
        }
        for value in results {
            self.need(value, &mut known)?;
        }
        self.drop_unread(results);
        Ok(())
    }

    /// Appends a node, on rows if it can be.
    fn rewrite(
        &mut self,
        mut node: NodeProto,
        results: &[&str],
        known: &mut Known,
    ) -> Result<(), Refusal> {
        for input in &mut node.input {
            if let Some(name) = known.renamed.get(input) {
                input.clone_from(name);
            }
        }
        if node.op_type == "Reshape" && self.reshape(&mut node, results, known) {
            return Ok(());
        }
        if let Some((lead, widths)) = self.widths(&node, known) {
            return self.on_rows(node, &lead, widths, known);
        }
        for input in &node.input {
            self.need(input, known)?;
        }
        self.take_up(node);
        Ok(())
    }

    /// Finds the rows in a reshaping, or reshapes rows instead of the value that they are rows of. Returns whether
    /// the node is dealt with.
    fn reshape(&mut self, node: &mut NodeProto, results: &[&str], known: &mut Known) -> bool {
        let to = node.output[0].clone();
        let Some(shape) = self.shapes.get(&to).cloned() else {
            return false;
        };
        // Where 0 stands for the operand's own size, the node means another shape for another operand.
        let own_sizes = node.attribute.is_empty()
            && self
                .stored_ints(&node.input[1])
                .is_none_or(|n| n.contains(&0));
        if let Some(rows) = known.rows.get(&node.input[0]).filter(|_| !own_sizes) {
            node.input[0].clone_from(&rows.name);
        }
        let from = node.input[0].clone();
        let Some(of) = self.shapes.get(&from).cloned() else {
            return false;
        };
        let is_result = results.contains(&to.as_str());
        if of == shape && !is_result && !known.waiting.contains_key(&from) {
            known.renamed.insert(to, from);
            return true;
        }
        if are_rows(&of, &shape) {
            let rows = Rows { name: from, shape };
            known.rows.insert(to.clone(), rows.clone());
            known.waiting.insert(to, rows);
            return true;
        }
        if are_rows(&shape, &of) && !known.rows.contains_key(&from) {
            let rows = Rows {
                name: to,
                shape: of,
            };
            known.rows.insert(from, rows);
        }
        false
    }

    /// The leading sizes of a node's operands, and how wide the rows of its results are; `None` if the node has to
    /// see its operands in their own shape.
    fn widths(&self, node: &NodeProto, known: &Known) -> Option<(Vec<SymExpr>, Vec<SymExpr>)> {
        let one = SymExpr::constant(1);
        let lead = node
            .input
            .iter()
            .find_map(|input| known.rows.get(input))?
            .lead();
        let rank = lead.len() as i64 + 1;
        match sight(&node.op_type)? {
            Sight::Elements => {
                // The width of an operand; `None` for one that is not rows.
                let width = |input: &String| -> Option<SymExpr> {
                    if let Some(rows) = known.rows.get(input) {
                        return rows.shape.last().filter(|_| rows.lead() == lead).cloned();
                    }
                    if input.is_empty() {
                        return Some(one.clone());
                    }
                    match self.shape_of(input)?.as_slice() {
                        [] => Some(one.clone()),
                        [size] => Some(size.clone()),
                        [.., last] => {
                            let could = self.could_be_rows(input, lead, known);
                            could.then(|| last.clone())
                        }
                    }
                };
                let widths: Vec<SymExpr> = node.input.iter().map(width).collect::<Option<_>>()?;
                let wide = widths.into_iter().find(|width| *width != one);
                let width = wide.unwrap_or(one);
                Some((lead.to_vec(), vec![width; node.output.len()]))
            }
            Sight::Last => {
                let first = known.rows.get(&node.input[0])?;
                let width = first.shape.last()?.clone();
                let last = |axis: i64| axis == rank - 1 || axis == -1;
                let attribute = |name: &str| node.attribute.iter().find(|a| a.name == name)?.i;
                let others = node.input[1..].iter();
                if others.clone().any(|input| known.rows.contains_key(input)) {
                    return None;
                }
                let mut widths = vec![one; node.output.len()];
                if node.op_type.starts_with("Reduce") {
                    let axes = self.stored_ints(node.input.get(1)?)?;
                    let keeps = attribute("keepdims") == Some(1);
                    (keeps && axes.len() == 1 && last(axes[0])).then_some(())?;
                } else {
                    last(attribute("axis")?).then_some(())?;
                    widths[0] = width;
                }
                Some((first.lead().to_vec(), widths))
            }
        }
    }

    /// Whether a value that is there in its own shape could be made into rows with these leading sizes.
    fn could_be_rows(&self, value: &str, lead: &[SymExpr], known: &Known) -> bool {
        let shape = self.shapes.get(value).and_then(|shape| shape.split_last());
        let has_some = |size: &SymExpr| size.as_const() != Some(0);
        let fits = shape.is_some_and(|(width, own)| own == lead && has_some(width));
        fits && known.meeting == Meeting::OfRows && lead.len() > 1 && lead.iter().all(has_some)
    }

    /// Appends a node that works on rows.
    fn on_rows(
        &mut self,
        mut node: NodeProto,
        lead: &[SymExpr],
        widths: Vec<SymExpr>,
        known: &mut Known,
    ) -> Result<(), Refusal> {
        let flat = |width: &SymExpr| vec![SymExpr::product(lead), width.clone()];
        for input in &mut node.input {
            if !known.rows.contains_key(input) && self.could_be_rows(input, lead, known) {
                let shape = self.shapes[input.as_str()].clone();
                let name = self.reshaped(input, &flat(&shape[lead.len()]))?;
                known.rows.insert(input.clone(), Rows { name, shape });
            }
            if let Some(rows) = known.rows.get(input) {
                input.clone_from(&rows.name);
            }
        }
        if let Some(axis) = node.attribute.iter_mut().find(|a| a.name == "axis") {
            axis.i = Some(1);
        }
        if node.op_type.starts_with("Reduce") {
            node.input[1] = self.ints(&[1]);
        }
        for (output, width) in node.output.iter_mut().zip(widths) {
            let name = self.fresh(&format!("{output}.rows"));
            let value = std::mem::replace(output, name.clone());
            self.shapes.insert(name.clone(), flat(&width));
            let shape: Vec<SymExpr> = lead.iter().cloned().chain([width]).collect();
            self.shapes.insert(value.clone(), shape.clone());
            let rows = Rows { name, shape };
            known.rows.insert(value.clone(), rows.clone());
            known.waiting.insert(value, rows);
        }
        self.take_up(node);
        Ok(())
    }

    /// Gives a value its own shape, if it only waits as rows.
    fn need(&mut self, value: &str, known: &mut Known) -> Result<(), Refusal> {
        let Some(rows) = known.waiting.remove(value) else {
            return Ok(());
        };
        let (operand, attributes) = self.target(&rows.shape)?;
        self.give("Reshape", &[&rows.name, &operand], &[value], attributes);
        Ok(())
    }
}

fn sight(op: &str) -> Option<Sight> {
    Some(match op {
        "Abs" | "Add" | "And" | "Cast" | "Ceil" | "Clip" | "Cos" | "Div" | "Dropout" | "Equal"
        | "Erf" | "Exp" | "Floor" | "Greater" | "GreaterOrEqual" | "IsInf" | "IsNaN" | "Less"
        | "LessOrEqual" | "Log" | "Max" | "Min" | "Mod" | "Mul" | "Neg" | "Not" | "Or" | "Pow"
        | "Reciprocal" | "Relu" | "Round" | "Sigmoid" | "Sign" | "Sin" | "Sqrt" | "Sub"
        | "Tanh" | "Where" => Sight::Elements,
        "LayerNormalization" | "LogSoftmax" | "ReduceMax" | "ReduceMean" | "ReduceMin"
        | "ReduceSum" | "Softmax" => Sight::Last,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::nodes::int;
    use super::super::trial::written;
    use super::*;
    use graph::{DType, Scalar};

    fn sizes(sizes: &[i64]) -> Vec<SymExpr> {
        sizes.iter().copied().map(SymExpr::constant).collect()
    }

    fn reshaped(n: &mut Nodes, value: &str, to: &[i64]) -> String {
        n.reshaped(value, &sizes(to)).expect("is written")
    }

    /// A product of four rows, as two by two of them.
    fn product(n: &mut Nodes, of: &str) -> String {
        let made = n.node("Gemm", &[of, "b"], Vec::new());
        n.shapes.insert(made.clone(), sizes(&[4, 4]));
        reshaped(n, &made, &[2, 2, 4])
    }

    #[test]
    fn what_is_computed_between_products_is_computed_of_their_rows() {
        let lines = written(|n| {
            let (x, y) = (product(n, "a"), product(n, "b"));
            let sum = n.of2("Add", &x, &y);
            let bent = n.node("Relu", &[&sum], Vec::new());
            let axes = n.ints(&[2]);
            let mean = n.node("ReduceMean", &[&bent, &axes], vec![int("keepdims", 1)]);
            let centred = n.of2("Sub", &bent, &mean);
            let normal = n.node("Softmax", &[&centred], vec![int("axis", 2)]);
            let flat = reshaped(n, &normal, &[4, 4]);
            vec![n.node("Gemm", &[&flat, "b"], Vec::new()), sum]
        });
        let made = [
            "n.gemm = Gemm(a, b)",
            "n.gemm_2 = Gemm(b, b)",
            "n.add.rows = Add(n.gemm, n.gemm_2)",
            "n.relu.rows = Relu(n.add.rows)",
            "n.reducemean.rows = ReduceMean(n.relu.rows, [1]) keepdims 1",
            "n.sub.rows = Sub(n.relu.rows, n.reducemean.rows)",
            "n.softmax.rows = Softmax(n.sub.rows) axis 1",
            "0 = Gemm(n.softmax.rows, b)",
            // A result keeps its shape.
            "1 = Reshape(n.add.rows, [2, 2, 4])",
        ];
        assert_eq!(lines, made);
    }

    #[test]
    fn every_result_of_a_node_is_rows() {
        let lines = written(|n| {
            n.shapes.insert("c".into(), sizes(&[4]));
            let x = product(n, "a");
            let half = n.number(Scalar::Float(0.5), DType::F32);
            let kept = n.nodes("Dropout", &[&x, &half], 2, Vec::new());
            let norm = n.nodes(
                "LayerNormalization",
                &[&kept[0], "c"],
                3,
                vec![int("axis", -1)],
            );
            let back = n.node("Where", &[&kept[1], &norm[0], &half], Vec::new());
            let back = n.of2("Mul", &back, &norm[2]);
            let back = n.of2("Sub", &back, &norm[1]);
            vec![reshaped(n, &back, &[2, 2, 2, 2])]
        });
        let norm = "n.layernormalization.rows = LayerNormalization(n.dropout.rows, c) axis 1";
        let made = [
            "n.gemm = Gemm(a, b)",
            "n.dropout.rows = Dropout(n.gemm, 0.5)",
            norm,
            "n.where.rows = Where(n.dropout_2.rows, n.layernormalization.rows, 0.5)",
            "n.mul.rows = Mul(n.where.rows, n.layernormalization_3.rows)",
            "n.sub.rows = Sub(n.mul.rows, n.layernormalization_2.rows)",
            "0 = Reshape(n.sub.rows, [2, 2, 2, 2])",
        ];
        assert_eq!(lines, made);
    }

    #[test]
    fn another_shape_is_made_of_the_rows() {
        let lines = written(|n| {
            let x = product(n, "a");
            let bent = n.node("Relu", &[&x], Vec::new());
            vec![reshaped(n, &bent, &[2, 2, 2, 2])]
        });
        let made = [
            "n.gemm = Gemm(a, b)",
            "n.relu.rows = Relu(n.gemm)",
            "0 = Reshape(n.relu.rows, [2, 2, 2, 2])",
        ];
        assert_eq!(lines, made);
    }

    #[test]
    fn what_sees_more_than_rows_sees_the_value() {
        let stays = |lines: Vec<String>| {
            assert!(lines.iter().all(|l| !l.contains("rows")), "{lines:?}");
        };
        // Along another dimension.
        stays(written(|n| {
            let x = product(n, "a");
            let y = n.node("Softmax", &[&x], vec![int("axis", 1)]);
            vec![reshaped(n, &y, &[4, 4])]
        }));
        // A sum that takes its dimension away.
        stays(written(|n| {
            let x = product(n, "a");
            let axes = n.ints(&[2]);
            let sum = n.node("ReduceSum", &[&x, &axes], vec![int("keepdims", 0)]);
            let flat = reshaped(n, &sum, &[4]);
            vec![n.node("Exp", &[&flat], Vec::new())]
        }));
        // A shape in which 0 stands for the size that is there.
        stays(written(|n| {
            let x = product(n, "a");
            let y = n.node("Relu", &[&x], Vec::new());
            let shape = n.ints(&[0, -1]);
            let y = n.of2("Reshape", &y, &shape);
            n.shapes.insert(y.clone(), sizes(&[2, 8]));
            vec![n.node("Exp", &[&y], Vec::new())]
        }));
        // With an operand that stretches along what counts the rows.
        stays(written(|n| {
            let (x, y) = (product(n, "a"), n.node("Exp", &["c"], Vec::new()));
            n.shapes.insert(y.clone(), sizes(&[2, 1, 4]));
            let sum = n.of2("Add", &x, &y);
            let flat = reshaped(n, &sum, &[4, 4]);
            vec![n.node("Exp", &[&flat], Vec::new())]
        }));
        // Rows that are counted in another way.
        stays(written(|n| {
            let x = product(n, "a");
            let y = n.node("Gemm", &["c", "b"], Vec::new());
            n.shapes.insert(y.clone(), sizes(&[2, 4]));
            let y = reshaped(n, &y, &[1, 2, 4]);
            let sum = n.of2("Add", &x, &y);
            let flat = reshaped(n, &sum, &[4, 4]);
            vec![n.node("Exp", &[&flat], Vec::new())]
        }));
        // No node is saved: both products are results in their own shape.
        stays(written(|n| {
            let (x, y) = (product(n, "a"), product(n, "b"));
            vec![n.of2("Add", &x, &y), x, y]
        }));
    }

    #[test]
    fn a_value_that_meets_rows_becomes_rows() {
        let lines = written(|n| {
            let (x, y) = (product(n, "a"), reshaped(n, "c", &[2, 32, 4]));
            let y = n.node("ReduceMax", &[&y], vec![int("keepdims", 1)]);
            n.shapes.insert(y.clone(), sizes(&[2, 2, 4]));
            let mean = n.ints(&[2]);
            let mean = n.node("ReduceMean", &[&x, &mean], vec![int("keepdims", 1)]);
            let (x, y) = (n.of2("Add", &x, &y), n.of2("Mul", &mean, &y));
            let [x, y] = [x, y].map(|v| reshaped(n, &v, &[4, 4]));
            vec![n.node("Gemm", &[&x, &y], Vec::new())]
        });
        let made = [
            "n.gemm = Gemm(a, b)",
            "n.reshape_2 = Reshape(c, [2, 32, 4])",
            "n.reducemax = ReduceMax(n.reshape_2) keepdims 1",
            "n.reducemean.rows = ReduceMean(n.gemm, [1]) keepdims 1",
            "n.reshape_5 = Reshape(n.reducemax, [4, 4])",
            "n.add.rows = Add(n.gemm, n.reshape_5)",
            // The result is as wide as the wider operand.
            "n.mul.rows = Mul(n.reducemean.rows, n.reshape_5)",
            "0 = Gemm(n.add.rows, n.mul.rows)",
        ];
        assert_eq!(lines, made);
    }

    #[test]
    fn vectors_and_numbers_meet_rows_as_they_are() {
        let lines = written(|n| {
            let half = n.number(Scalar::Float(0.5), DType::F32);
            let axes = n.ints(&[0]);
            let vector = n.node("ReduceSum", &["b", &axes], vec![int("keepdims", 0)]);
            n.shapes.insert(vector.clone(), sizes(&[4]));
            let x = product(n, "a");
            let x = n.of2("Sub", &x, &half);
            let x = n.of2("Add", &x, &vector);
            vec![reshaped(n, &x, &[4, 4])]
        });
        let made = [
            "n.reducesum = ReduceSum(b, [0]) keepdims 0",
            "n.gemm = Gemm(a, b)",
            "n.sub.rows = Sub(n.gemm, 0.5)",
            "n.add.rows = Add(n.sub.rows, n.reducesum)",
            "0 = Reshape(n.add.rows, [4, 4])",
        ];
        assert_eq!(lines, made);
    }
}
