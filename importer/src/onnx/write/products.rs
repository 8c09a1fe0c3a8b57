//! Products of two arrays: einsum as matrix products.

use super::super::proto::NodeProto;
use super::nodes::{Nodes, Refusal, int, int_list, text};
use super::rules::Written;
use graph::SymExpr;
use ops::Call;
use std::collections::BTreeMap;

/// `Einsum`, written as `Gemm` or `MatMul` where each operand can be brought into the form of one.
pub(super) fn einsum(n: &mut Nodes, c: &Call) -> Written {
    let equation = c.str("equation")?;
    let mut inputs = Vec::new();
    for position in 0..c.inputs.len() {
        inputs.push(n.input(c, position)?);
    }
    let value = match ProductLetters::of(c, &equation) {
        Some(product) => product.write(n, &inputs)?,
        None => {
            let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
            n.node("Einsum", &inputs, vec![text("equation", &equation)])
        }
    };
    n.output(c, 0, value);
    Ok(())
}

impl Nodes<'_> {
    /// Two values whose product has the same sums along its last dimension as `dy·y`, up to rounding, and fewer
    /// elements.
    ///
    /// Where `o = y·v` and `dy = do·vᵀ`, `Σ_s dy·y = Σ_s Σ_d do_d·v_sd·y_s = Σ_d do_d·o_d`. The gradient of a
    /// softmax needs these sums for attention's scores; they are over the width of a head instead of the length of
    /// the text (Dao et al., arXiv 2205.14135, section B.2).
    pub(super) fn same_row_sums(&self, dy: &str, y: &str) -> Option<(String, String)> {
        let product = self.maker(dy).filter(|n| n.op_type == "MatMul")?;
        let upper = &product.input[0];
        let (values, order) = self.permuted(&product.input[1])?;
        let n = order.len() as i64;
        let swapped = (0..n - 2).chain([n - 1, n - 2]);
        if n < 3 || !order.into_iter().eq(swapped) {
            return None;
        }
        let last = |value: &str| self.shapes.get(value)?.last()?.as_const();
        // A text of unknown length counts as longer than a head is wide.
        let width = last(&values)?;
        if last(y).is_some_and(|length| width >= length) {
            return None;
        }
        let own =
            |node: &&NodeProto| node.op_type == "MatMul" && node.input == [y, values.as_str()];
        let made = self.list.iter().find(own)?;
        Some((upper.clone(), made.output[0].clone()))
    }
}

/// One of the two operands.
struct Operand {
    letters: Vec<char>,
    /// Whether dimensions of size 1, which would broadcast, have to be removed first.
    squeezed: bool,
}

/// The letters of a product, by the part that they play in it.
struct ProductLetters {
    operands: [Operand; 2],
    result: Vec<char>,
    sizes: BTreeMap<char, SymExpr>,
    is_float: bool,
}

impl ProductLetters {
    /// `None` for one operand, repeated letters, and letters that only one operand sums.
    fn of(c: &Call, equation: &str) -> Option<ProductLetters> {
        let (left, result) = equation.split_once("->")?;
        let texts: Vec<&str> = left.split(',').map(str::trim).collect();
        let [a, b] = <[&str; 2]>::try_from(texts).ok()?;
        let mut sizes: BTreeMap<char, SymExpr> = BTreeMap::new();
        let shape = |position: usize| c.inputs.get(position)?.as_ref().map(|t| t.shape.clone());
        let one = |size: &SymExpr| size.as_const() == Some(1);
        for (position, text) in [a, b].into_iter().enumerate() {
            for (d, letter) in text.chars().enumerate() {
                let size = shape(position)?.get(d)?.clone();
                match sizes.get(&letter) {
                    _ if text.matches(letter).count() > 1 => return None,
                    Some(known) if *known != size && !one(known) && !one(&size) => return None,
                    Some(known) if !one(known) => {}
                    _ => {
                        sizes.insert(letter, size);
                    }
                }
            }
        }
        let operand = |position: usize, text: &str| -> Option<Operand> {
            let shape = shape(position)?;
            let stretches = |(letter, size): &(char, &SymExpr)| *size != &sizes[letter];
            let pairs = || text.chars().zip(&shape);
            Some(Operand {
                squeezed: pairs().any(|pair| stretches(&pair)),
                letters: pairs().filter(|p| !stretches(p)).map(|p| p.0).collect(),
            })
        };
        let operands = [operand(0, a)?, operand(1, b)?];
        let result: Vec<char> = result.trim().chars().collect();
        let alone = |letter: &char| {
            let n = operands
                .iter()
                .filter(|o| o.letters.contains(letter))
                .count();
            n + usize::from(result.contains(letter)) < 2
        };
        if sizes.keys().any(alone) {
            return None;
        }
        Some(ProductLetters {
            is_float: c.inputs.iter().flatten().all(|t| t.dtype.is_float()),
            operands,
            result,
            sizes,
        })
    }

    fn sizes(&self, letters: &[char]) -> Vec<SymExpr> {
        letters.iter().map(|l| self.sizes[l].clone()).collect()
    }

    fn size(&self, letters: &[char]) -> SymExpr {
        SymExpr::product(&self.sizes(letters))
    }

    fn write(&self, n: &mut Nodes, inputs: &[String]) -> Result<String, Refusal> {
        let [a, b] = &self.operands;
        let both = |l: &char| a.letters.contains(l) && b.letters.contains(l);
        let own = |o: &Operand, want: &dyn Fn(&char) -> bool| -> Vec<char> {
            o.letters.iter().copied().filter(|l| want(l)).collect()
        };
        let batch: Vec<char> = self.result.iter().copied().filter(both).collect();
        let free = [a, b].map(|o| own(o, &|l| !both(l)));
        // The operand whose letters come first in the result is the left one.
        let rest = self.result.iter().find(|l| !batch.contains(l));
        let swapped = rest.is_some_and(|l| free[1].contains(l));
        let order = if swapped { [1, 0] } else { [0, 1] };
        let [left, right] = order.map(|i| &free[i]);
        let summed = own(&self.operands[order[0]], &|l| both(l) && !batch.contains(l));
        let made: Vec<char> = [batch.as_slice(), left, right].concat();
        let product = if batch.is_empty() && self.is_float {
            let (a, trans_a) = self.matrix(n, inputs, order[0], [left, &summed])?;
            let (b, trans_b) = self.matrix(n, inputs, order[1], [&summed, right])?;
            let flags = vec![int("transA", trans_a.into()), int("transB", trans_b.into())];
            let product = n.node("Gemm", &[&a, &b], flags);
            let shape = vec![self.size(left), self.size(right)];
            n.shapes.insert(product.clone(), shape);
            product
        } else {
            let a = self.stack(n, inputs, order[0], [&batch, left, &summed])?;
            let b = self.stack(n, inputs, order[1], [&batch, &summed, right])?;
            n.of2("MatMul", &a, &b)
        };
        let is_plain = left.len() == 1 && right.len() == 1;
        let product = match is_plain {
            true => product,
            false => n.reshaped(&product, &self.sizes(&made))?,
        };
        Ok(transposed(n, product, &made, &self.result))
    }

    /// The operand without the dimensions that would broadcast.
    fn squeezed(
        &self,
        n: &mut Nodes,
        inputs: &[String],
        position: usize,
    ) -> Result<String, Refusal> {
        let operand = &self.operands[position];
        match operand.squeezed {
            true => n.reshaped(&inputs[position], &self.sizes(&operand.letters)),
            false => Ok(inputs[position].clone()),
        }
    }

    /// The operand as `[first, second]` or, with true, as `[second, first]`.
    fn matrix(
        &self,
        n: &mut Nodes,
        inputs: &[String],
        position: usize,
        [first, second]: [&[char]; 2],
    ) -> Result<(String, bool), Refusal> {
        let letters = &self.operands[position].letters;
        let value = self.squeezed(n, inputs, position)?;
        let (plain, turned) = ([first, second].concat(), [second, first].concat());
        let is_turned = *letters != plain && *letters == turned;
        let order = if is_turned { turned } else { plain };
        let value = transposed(n, value, letters, &order);
        if first.len() == 1 && second.len() == 1 {
            return Ok((value, is_turned));
        }
        let mut shape = [self.size(first), self.size(second)];
        if is_turned {
            shape.reverse();
        }
        Ok((n.reshaped(&value, &shape)?, is_turned))
    }

    /// The operand as `[batch…, first, second]`.
    fn stack(
        &self,
        n: &mut Nodes,
        inputs: &[String],
        position: usize,
        [batch, first, second]: [&[char]; 3],
    ) -> Result<String, Refusal> {
        let value = self.squeezed(n, inputs, position)?;
        let order = [batch, first, second].concat();
        let value = transposed(n, value, &self.operands[position].letters, &order);
        if first.len() == 1 && second.len() == 1 {
            return Ok(value);
        }
        let mut shape = self.sizes(batch);
        shape.extend([self.size(first), self.size(second)]);
        n.reshaped(&value, &shape)
    }
}

fn transposed(n: &mut Nodes, value: String, from: &[char], to: &[char]) -> String {
    let at = |letter: &char| {
        let at = from.iter().position(|l| l == letter);
        at.unwrap_or_else(|| unreachable!("an operand is ordered by its own letters"))
    };
    let order: Vec<i64> = to.iter().map(|l| at(l) as i64).collect();
    if order.iter().enumerate().all(|(d, o)| d as i64 == *o) {
        return value;
    }
    n.node("Transpose", &[&value], vec![int_list("perm", &order)])
}

#[cfg(test)]
mod tests {
    use super::super::trial::written;
    use super::*;

    /// The two factors under the sums of `dy·y`, where `dy = do·vᵀ` and `o = weights·v`. Here y is `a`, v is `b` and do
    /// is `c`.
    fn factors(weights: &str, order: &[i64], width: i64, length: i64) -> String {
        let lines = written(|n| {
            for (value, last) in [("a", length), ("b", width), ("c", width)] {
                let shape = [2, 3, last].map(SymExpr::constant);
                n.shapes.insert(value.into(), shape.to_vec());
            }
            let o = n.of2("MatMul", weights, "b");
            let turned = n.node("Transpose", &["b"], vec![int_list("perm", order)]);
            let dy = n.of2("MatMul", "c", &turned);
            let (left, right) = n.same_row_sums(&dy, "a").unwrap_or((dy, "a".into()));
            vec![o, n.of2("Mul", &left, &right)]
        });
        lines[lines.len() - 1].clone()
    }

    #[test]
    fn sums_of_scores_are_sums_of_what_they_weigh() {
        assert_eq!(factors("a", &[0, 2, 1], 8, 64), "1 = Mul(c, 0)");
        // Sums of as many elements, or more, stay whole.
        let whole = "1 = Mul(n.matmul_2, a)";
        assert_eq!(factors("a", &[0, 2, 1], 64, 64), whole);
        assert_eq!(factors("a", &[0, 2, 1], 64, 8), whole);
        // What is multiplied is not the transpose of v.
        assert_eq!(factors("a", &[2, 1, 0], 8, 64), whole);
        // The weights of o are not y.
        assert_eq!(factors("c", &[0, 2, 1], 8, 64), whole);
    }
}
