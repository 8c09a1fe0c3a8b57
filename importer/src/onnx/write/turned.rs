//! Transposes of products' operands, where products take them for nothing.
//!
//! | before | after |
//! |---|---|
//! | `t = Transpose(w)`, `y = Gemm(x, t)` with `transB` | `y = Gemm(x, w)`, the flag turned |
//! | `p = Transpose(x, P)`, `q = Transpose(x, Q)`, `MatMul(p, …)`, where Q is P with the last two exchanged | `p = Transpose(q, last two)` |
//!
//! Exact: the same products of the same elements. A runtime such as ONNX Runtime makes the last form a flag
//! of the product, so that x is moved once instead of twice; without that it is a transpose as before.

use super::nodes::{Nodes, int, int_list};
use std::collections::BTreeMap;

impl Nodes<'_> {
    /// Does what the table says; `results` are the values that the file gives.
    pub(super) fn turn_operands(&mut self, results: &[&str]) {
        self.turn_matrices();
        self.share_transposes(results);
    }

    fn turn_matrices(&mut self) {
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
    fn permuted(&self, value: &str) -> Option<(String, Vec<i64>)> {
        let node = self.maker(value).filter(|n| n.op_type == "Transpose")?;
        let order = node.attribute.iter().find(|a| a.name == "perm")?;
        Some((node.input[0].clone(), order.ints.clone()))
    }

    fn share_transposes(&mut self, results: &[&str]) {
        let mut known: BTreeMap<(String, Vec<i64>), usize> = BTreeMap::new();
        for at in 0..self.list.len() {
            let of = self.list[at].output.first();
            let of = of.and_then(|value| self.permuted(value));
            if let Some(key) = of {
                known.entry(key).or_insert(at);
            }
        }
        // Each turned one with the plain one that it can be made of, in the nodes' order.
        let mut pairs = Vec::new();
        for ((from, order), plain) in &known {
            let rank = order.len();
            // Rows stay whole in the plain one.
            if rank < 3 || order[rank - 1] != rank as i64 - 1 {
                continue;
            }
            let mut turned = order.clone();
            turned.swap(rank - 2, rank - 1);
            let turned = known.get(&(from.clone(), turned)).copied();
            if let Some(turned) = turned.filter(|at| self.feeds_products(*at, results)) {
                pairs.push((turned, *plain, rank));
            }
        }
        let mut place: Vec<(usize, bool)> = (0..self.list.len()).map(|at| (at, true)).collect();
        for (turned, plain, rank) in pairs {
            let mut order: Vec<i64> = (0..rank as i64).collect();
            order.swap(rank - 2, rank - 1);
            let from = self.list[plain].output[0].clone();
            let node = &mut self.list[turned];
            node.input = vec![from];
            node.attribute = vec![int_list("perm", &order)];
            // What it is made of goes before it.
            if plain > turned {
                place[plain] = (turned, false);
            }
        }
        let mut list: Vec<_> = std::mem::take(&mut self.list)
            .into_iter()
            .zip(place)
            .collect();
        list.sort_by_key(|(_, place)| *place);
        self.list = list.into_iter().map(|(node, _)| node).collect();
        self.find_makers();
    }

    /// Whether only products of stacks of matrices read what a node makes.
    fn feeds_products(&self, at: usize, results: &[&str]) -> bool {
        let value = &self.list[at].output[0];
        let mut readers = self.list.iter().filter(|n| n.input.contains(value));
        !results.contains(&value.as_str()) && readers.all(|n| n.op_type == "MatMul")
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn a_turned_stack_is_made_of_the_plain_one_that_comes_later() {
        let lines = written(|n| {
            let turned = transpose(n, "c", &[0, 2, 3, 1]);
            let first = n.node("MatMul", &["c", &turned], Vec::new());
            let plain = transpose(n, "c", &[0, 2, 1, 3]);
            vec![first, n.node("MatMul", &["c", &plain], Vec::new())]
        });
        assert_eq!(
            lines,
            [
                "n.transpose_2 = Transpose(c) perm [0, 2, 1, 3]",
                "n.transpose = Transpose(n.transpose_2) perm [0, 1, 3, 2]",
                "0 = MatMul(c, n.transpose)",
                "1 = MatMul(c, n.transpose_2)",
            ]
        );
    }

    #[test]
    fn what_others_than_products_read_stays() {
        let order = |lines: Vec<String>| {
            let transposes = lines.iter().filter(|l| l.contains("Transpose(c)"));
            transposes.count()
        };
        let build = |n: &mut Nodes, turned: &[i64], op: &str| {
            let plain = transpose(n, "c", &[0, 2, 1, 3]);
            let turned = transpose(n, "c", turned);
            vec![
                n.node("MatMul", &["c", &plain], Vec::new()),
                n.node(op, &["c", &turned], Vec::new()),
            ]
        };
        let shared = [0, 2, 3, 1];
        assert_eq!(order(written(|n| build(n, &shared, "MatMul"))), 1);
        assert_eq!(order(written(|n| build(n, &shared, "Add"))), 2);
        // Not the last two exchanged.
        assert_eq!(order(written(|n| build(n, &[2, 0, 1, 3], "MatMul"))), 2);
        // It is a result.
        let result = written(|n| {
            let plain = transpose(n, "c", &[0, 2, 1, 3]);
            let turned = transpose(n, "c", &shared);
            let product = n.node("MatMul", &[&plain, &turned], Vec::new());
            vec![product, turned]
        });
        assert_eq!(order(result), 2);
    }
}
