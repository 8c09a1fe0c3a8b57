//! Rows that are joined to a vector: joined as rows, then made a vector at once.
//!
//! Before: `v1 = Reshape(r1, [n1])`, …, `v = Concat(v1, …)` of rows `[1, n1]`, …. After: `r = Concat(r1, …)` along
//! the columns, `v = Reshape(r, [-1])`. Exact. A runtime schedules each node, and the gradients of all vectors
//! of a network are such rows when an optimizer joins them.

use super::nodes::{Nodes, int};
use graph::SymExpr;

impl Nodes<'_> {
    /// Joins such vectors as rows wherever that is possible. Vectors that nothing else reads are then left unread.
    pub(super) fn join_rows(&mut self) {
        let found: Vec<_> = (0..self.list.len()).map(|at| self.rows_of(at)).collect();
        for (mut node, rows) in std::mem::take(&mut self.list).into_iter().zip(found) {
            let Some(rows) = rows else {
                self.list.push(node);
                continue;
            };
            let vector = std::mem::take(&mut node.output[0]);
            let row = self.fresh(&format!("{vector}.row"));
            self.begin_beside(&node);
            node.input = rows;
            node.output[0].clone_from(&row);
            node.attribute = vec![int("axis", 1)];
            self.list.push(node);
            let any = self.ints(&[-1]);
            self.give("Reshape", &[&row, &any], &[&vector], Vec::new());
        }
        self.find_makers();
    }

    /// The rows that a node joins, if all vectors it joins are rows.
    fn rows_of(&self, at: usize) -> Option<Vec<String>> {
        let node = &self.list[at];
        let axis = node.attribute.iter().find(|a| a.name == "axis");
        if node.op_type != "Concat" || axis.is_none_or(|a| a.i != Some(0)) || node.input.len() < 2 {
            return None;
        }
        let row = |value: &String| {
            let maker = self.maker(value).filter(|m| m.op_type == "Reshape")?;
            let (of, to) = (self.shapes.get(&maker.input[0])?, self.shapes.get(value)?);
            let is_row = of.len() == 2 && of[0] == SymExpr::constant(1);
            (is_row && of[1..] == to[..]).then(|| maker.input[0].clone())
        };
        node.input.iter().map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::trial::written;
    use super::*;
    use graph::DType;

    /// A row of sums over the columns of an input, as a vector.
    fn sums(n: &mut Nodes, of: &str) -> String {
        let four = SymExpr::constant(4);
        let shape = [four.clone(), four.clone()];
        let sum = n.sum_of_rows(of, (&shape, DType::F32), &[0], &[four]);
        sum.expect("is written").expect("is a product")
    }

    #[test]
    fn rows_are_joined_before_they_are_vectors() {
        let lines = written(|n| {
            let parts = ["a", "b"].map(|of| sums(n, of));
            let parts = parts.each_ref().map(String::as_str);
            vec![n.node("Concat", &parts, vec![int("axis", 0)])]
        });
        let expand = "n.expand = Expand(1, [1, 4])";
        assert_eq!(
            lines,
            [
                expand,
                "n.matmul = MatMul(n.expand, a)",
                "n.matmul_2 = MatMul(n.expand, b)",
                "n.concat.row = Concat(n.matmul, n.matmul_2) axis 1",
                "0 = Reshape(n.concat.row, [-1])",
            ]
        );
    }

    #[test]
    fn other_lists_stay() {
        let stays = |lines: Vec<String>| {
            let joined = lines.iter().any(|l| l.contains("axis 1"));
            assert!(!joined, "{lines:?}");
        };
        // One of them is no row.
        stays(written(|n| {
            let sums = sums(n, "a");
            let other = n.reshaped("b", &[SymExpr::constant(16)]).expect("reshapes");
            vec![n.node("Concat", &[&sums, &other], vec![int("axis", 0)])]
        }));
        // One row alone.
        stays(written(|n| {
            let sums = sums(n, "a");
            vec![n.node("Concat", &[&sums], vec![int("axis", 0)])]
        }));
    }
}
