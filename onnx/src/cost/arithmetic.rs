//! Multiplications that are summed, by operator, from sizes.

use crate::attributes::Attributes;
use crate::proto::NodeProto;
use std::collections::BTreeMap;

/// Sizes of a value; `None` if absent or unknown.
type Sizes = Option<Vec<usize>>;

/// How many products a node sums; 0 for operators that sum none. `None` if a size is not known.
pub fn multiply_adds(
    node: &NodeProto,
    attributes: Attributes,
    inputs: &[Sizes],
    outputs: &[Sizes],
) -> Option<u64> {
    let input = |at: usize| inputs.get(at)?.as_deref();
    let output = || outputs.first()?.as_deref();
    match node.op_type.as_str() {
        "Conv" | "FusedConv" | "ConvInteger" | "NhwcFusedConv" => {
            product(output()?)?.checked_mul(product(input(1)?.get(1..)?)?)
        }
        "QLinearConv" => product(output()?)?.checked_mul(product(input(3)?.get(1..)?)?),
        "ConvTranspose" => product(input(0)?)?.checked_mul(product(input(1)?.get(1..)?)?),
        "MatMul" | "MatMulInteger" | "QLinearMatMul" => {
            product(output()?)?.checked_mul(*input(0)?.last()? as u64)
        }
        "Gemm" | "FusedGemm" | "FusedMatMul" => {
            let a = input(0)?;
            let is_transposed = attributes.flag("transA");
            let at = a.len().checked_sub(if is_transposed { 2 } else { 1 })?;
            product(output()?)?.checked_mul(a[at] as u64)
        }
        "MatMulNBits" => {
            let inner = u64::try_from(attributes.int("K")?).ok()?;
            product(output()?)?.checked_mul(inner)
        }
        "Einsum" => einsum(attributes.text("equation")?, inputs),
        "LSTM" | "GRU" | "RNN" => {
            let x = input(0)?;
            let steps = product(x.get(..2)?)?;
            steps.checked_mul(product(input(1)?)? + product(input(2)?)?)
        }
        "Attention" if node.domain == "com.microsoft" => {
            let (x, w) = (input(0)?, input(1)?);
            let [batch, length, _] = *x else { return None };
            let hidden = *w.last()? as u64 / 3;
            let tokens = batch as u64 * length as u64;
            Some(tokens * product(w)? + 2 * tokens * length as u64 * hidden)
        }
        "Attention" | "MultiHeadAttention" | "GroupQueryAttention" => attention(inputs),
        _ => Some(0),
    }
}

fn product(sizes: &[usize]) -> Option<u64> {
    sizes.iter().try_fold(1u64, |p, n| p.checked_mul(*n as u64))
}

/// Scores and weighted sums: [batch, heads, length, head] or [batch, length, heads · head].
fn attention(inputs: &[Sizes]) -> Option<u64> {
    let at = |n: usize| inputs.get(n)?.as_deref();
    let (q, k, v) = (at(0)?, at(1)?, at(2)?);
    let keys = *k.get(k.len().checked_sub(2)?)? as u64;
    let width = *v.last()? as u64;
    let scores = product(q)?.checked_mul(keys)?;
    let rows = product(q.get(..q.len() - 1)?)?;
    scores.checked_add(rows.checked_mul(keys)?.checked_mul(width)?)
}

/// The product of all sizes that letters stand for, if more than one operand is multiplied.
fn einsum(equation: &str, inputs: &[Sizes]) -> Option<u64> {
    let operands = equation.split("->").next()?;
    let mut letters: BTreeMap<char, u64> = BTreeMap::new();
    let mut around = 1u64;
    let terms: Vec<&str> = operands.split(',').map(str::trim).collect();
    if terms.len() < 2 {
        return Some(0);
    }
    for (term, sizes) in terms.iter().zip(inputs) {
        let sizes = sizes.as_deref()?;
        let named: Vec<char> = term.chars().filter(|c| c.is_alphabetic()).collect();
        let n_dots = sizes.len().checked_sub(named.len())?;
        let start = term.find("...").map_or(usize::MAX, |at| {
            term[..at].chars().filter(|c| c.is_alphabetic()).count()
        });
        if start == usize::MAX && n_dots > 0 {
            return None;
        }
        let dots = sizes.iter().skip(start.min(sizes.len())).take(n_dots);
        around = around.max(dots.map(|n| *n as u64).product());
        let own = (0..sizes.len()).filter(|d| *d < start || *d >= start.saturating_add(n_dots));
        for (letter, d) in named.into_iter().zip(own) {
            let size = letters.entry(letter).or_insert(1);
            *size = (*size).max(sizes[d] as u64);
        }
    }
    letters.values().try_fold(around, |p, n| p.checked_mul(*n))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(op: &str) -> NodeProto {
        NodeProto {
            op_type: op.to_string(),
            ..Default::default()
        }
    }

    #[test]
    fn products_are_counted() {
        let count = |op: &str, inputs: &[&[usize]], output: &[usize]| {
            let inputs: Vec<Sizes> = inputs.iter().map(|s| Some(s.to_vec())).collect();
            multiply_adds(
                &node(op),
                Attributes(&[]),
                &inputs,
                &[Some(output.to_vec())],
            )
        };
        assert_eq!(count("MatMul", &[&[2, 3], &[3, 5]], &[2, 5]), Some(30));
        // A depthwise convolution reads one channel for each it gives.
        let depthwise = count("Conv", &[&[1, 8, 5, 5], &[8, 1, 3, 3]], &[1, 8, 3, 3]);
        assert_eq!(depthwise, Some(72 * 9));
        assert_eq!(count("Relu", &[&[7]], &[7]), Some(0));
        let heads: &[usize] = &[2, 4, 10, 8];
        assert_eq!(
            count("Attention", &[heads, heads, heads], heads),
            Some(2 * 640 * 10)
        );
    }

    #[test]
    fn letters_of_a_sum_are_multiplied_once() {
        let sizes = |s: &[usize]| Some(s.to_vec());
        assert_eq!(
            einsum("bij,bjk->bik", &[sizes(&[2, 3, 4]), sizes(&[2, 4, 5])]),
            Some(120)
        );
        assert_eq!(
            einsum("...ij,jk->...ik", &[sizes(&[7, 2, 3, 4]), sizes(&[4, 5])]),
            Some(7 * 2 * 3 * 4 * 5)
        );
        assert_eq!(einsum("ij->ji", &[sizes(&[3, 4])]), Some(0));
    }
}
