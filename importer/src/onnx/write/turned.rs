//! Transposes of matrix products' operands, as a flag of the product.
//!
//! Before: `t = Transpose(w)`, `y = Gemm(x, t)` with `transB`. After: `y = Gemm(x, w)`, the flag turned. Exact:
//! the same products of the same elements, and `w` is not moved.

use super::nodes::{Nodes, int};

impl Nodes<'_> {
    /// Does so for every matrix product.
    pub(super) fn turn_operands(&mut self) {
        for at in 0..self.list.len() {
            if self.list[at].op_type != "Gemm" {
                continue;
            }
            for (position, flag) in [(0, "transA"), (1, "transB")] {
                let turned = self.permuted(&self.list[at].input[position]);
                let Some((from, _)) = turned.filter(|(_, order)| *order == [1, 0]) else {
                    continue;
                };
                let node = &mut self.list[at];
                node.input[position] = from;
                match node.attribute.iter_mut().find(|a| a.name == flag) {
                    Some(known) => known.i = Some(1 - known.i.unwrap_or(0)),
                    None => node.attribute.push(int(flag, 1)),
                }
            }
        }
    }

    /// What a transpose is of, and its order.
    pub(super) fn permuted(&self, value: &str) -> Option<(String, Vec<i64>)> {
        let node = self.maker(value).filter(|n| n.op_type == "Transpose")?;
        let order = node.attribute.iter().find(|a| a.name == "perm")?;
        Some((node.input[0].clone(), order.ints.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::nodes::int_list;
    use super::super::trial::written;
    use super::*;

    fn transpose(n: &mut Nodes, value: &str, order: &[i64]) -> String {
        n.node("Transpose", &[value], vec![int_list("perm", order)])
    }

    #[test]
    fn a_matrix_product_turns_its_operands_itself() {
        let lines = written(|n| {
            let (a, b) = (transpose(n, "a", &[1, 0]), transpose(n, "b", &[1, 0]));
            let flags = vec![int("transA", 0), int("transB", 1)];
            vec![n.node("Gemm", &[&a, &b], flags)]
        });
        assert_eq!(lines, ["0 = Gemm(a, b) transA 1 transB 0"]);
        let flagless = written(|n| {
            let b = transpose(n, "b", &[1, 0]);
            vec![n.node("Gemm", &["a", &b], Vec::new()), b]
        });
        let kept = ["1 = Transpose(b) perm [1, 0]", "0 = Gemm(a, b) transB 1"];
        assert_eq!(flagless, kept);
    }
}
