//! Products summed over dimensions: MatMul, Gemm, Einsum, Det.

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::{Attr, ContainerId, Expr, SymExpr};
use ops::attrs;
use std::collections::BTreeMap;

pub static RULES: Rules = &[
    ("Det", determinant),
    ("Einsum", einsum),
    ("Gemm", gemm),
    ("MatMul", matmul),
];

/// Most rows of a matrix whose determinant is written out: it has as many products as there are sets of rows.
const MOST_ROWS: i64 = 6;

/// Appends an `einsum`.
pub fn contract(
    cx: &mut NodeCx,
    equation: String,
    inputs: &[ContainerId],
) -> Result<ContainerId, Refusal> {
    cx.op1("einsum", inputs, attrs([("equation", Attr::Str(equation))]))
}

/// `n` letters from the `first`-th on.
fn letters(first: usize, n: usize) -> Result<String, Refusal> {
    let all = ('a'..='z').chain('A'..='Z');
    let text: String = all.skip(first).take(n).collect();
    if text.len() < n {
        return Err(Refusal("it has too many dimensions".into()));
    }
    Ok(text)
}

/// NumPy's `matmul` as an equation: batch dimensions broadcast, vectors get a dimension that is dropped again.
pub fn product_equation(rank_a: usize, rank_b: usize) -> Result<String, Refusal> {
    if rank_a == 0 || rank_b == 0 {
        return Err(Refusal(
            "its inputs must have at least one dimension".into(),
        ));
    }
    let n_batch = rank_a.max(rank_b).saturating_sub(2);
    let batch = letters(3, n_batch)?;
    let aligned = |rank: usize| &batch[n_batch - rank.saturating_sub(2)..];
    let left = if rank_a == 1 { "a" } else { "ca" };
    let right = if rank_b == 1 { "a" } else { "ab" };
    let rows = if rank_a == 1 { "" } else { "c" };
    let columns = if rank_b == 1 { "" } else { "b" };
    Ok(format!(
        "{}{left},{}{right}->{batch}{rows}{columns}",
        aligned(rank_a),
        aligned(rank_b)
    ))
}

fn matmul(cx: &mut NodeCx) -> Values {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    let equation = product_equation(cx.rank(a), cx.rank(b))?;
    single(contract(cx, equation, &[a, b])?)
}

/// `alpha·A'·B' + beta·C`
pub fn gemm(cx: &mut NodeCx) -> Values {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    let (alpha, beta) = (cx.float("alpha", 1.0)?, cx.float("beta", 1.0)?);
    let left = if cx.int("transA", 0)? != 0 {
        "km"
    } else {
        "mk"
    };
    let right = if cx.int("transB", 0)? != 0 {
        "nk"
    } else {
        "kn"
    };
    let product = contract(cx, format!("{left},{right}->mn"), &[a, b])?;
    let scaled = |e: Expr, factor: f64| match factor {
        1.0 => e,
        _ => e.mul(Expr::float(factor)),
    };
    let y = scaled(Expr::In(0), alpha);
    let Some(c) = cx.optional(2)? else {
        return match alpha {
            1.0 => single(product),
            _ => single(cx.elementwise(y, &[product])?),
        };
    };
    single(cx.elementwise(y.add(scaled(Expr::In(1), beta)), &[product, c])?)
}

/// Determinants of the matrices in the last two dimensions, expanded row by row: each step has the determinants of the
/// first rows for every set of as many columns.
fn determinant(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let shape = cx.shape(x);
    let [batch @ .., rows, columns] = shape.as_slice() else {
        return Err("its input must have at least 2 dimensions".into());
    };
    let n = rows
        .as_const()
        .filter(|n| *n <= MOST_ROWS && rows == columns);
    let n = n.ok_or_else(|| {
        Refusal(format!(
            "determinants of {rows} × {columns} elements are not supported"
        ))
    })?;
    let (first, dtype) = (batch.len(), cx.dtype(x));
    let mut minors = BTreeMap::from([(0u32, cx.filled(batch.to_vec(), dtype, 1.0)?)]);
    for row in 0..n {
        let mut elements = Vec::new();
        let own = cx.part(x, first, row.into(), (row + 1).into())?;
        for column in 0..n {
            let element = cx.part(own, first + 1, column.into(), (column + 1).into())?;
            elements.push(cx.reshape(element, batch.to_vec())?);
        }
        let mut next = BTreeMap::new();
        for columns in (0..1u32 << n).filter(|set| i64::from(set.count_ones()) == row + 1) {
            let mut inputs = Vec::new();
            let mut sum: Option<Expr> = None;
            for column in (0..n as usize).filter(|c| columns >> c & 1 == 1) {
                let minor = minors.get(&(columns & !(1 << column)));
                inputs.extend([elements[column], *minor.ok_or("it has no minors")?]);
                let at = inputs.len() - 2;
                let product = Expr::In(at).mul(Expr::In(at + 1));
                let is_negative = (columns >> column).count_ones() % 2 == 0;
                sum = Some(match (sum, is_negative) {
                    (None, true) => product.neg(),
                    (None, false) => product,
                    (Some(sum), true) => sum.sub(product),
                    (Some(sum), false) => sum.add(product),
                });
            }
            let sum = sum.ok_or("it has no minors")?;
            next.insert(columns, cx.elementwise(sum, &inputs)?);
        }
        minors = next;
    }
    let last = minors.into_values().next();
    single(last.ok_or("it has no minors")?)
}

/// Any number of operands, contracted from the left; `...` and the implicit result are spelled out.
fn einsum(cx: &mut NodeCx) -> Values {
    let equation = cx.text("equation", "")?.replace(' ', "");
    let inputs = cx.all_inputs()?;
    let (left, right) = match equation.split_once("->") {
        Some((left, right)) => (left.to_string(), Some(right.to_string())),
        None => (equation.clone(), None),
    };
    let mut terms: Vec<String> = left.split(',').map(ToString::to_string).collect();
    if terms.len() != inputs.len() {
        return Err(Refusal(format!(
            "`{equation}` does not fit {} inputs",
            inputs.len()
        )));
    }
    let ellipsis = spell_out_ellipsis(cx, &mut terms, &inputs)?;
    let fits = |(term, input): (&String, &ContainerId)| term.chars().count() == cx.rank(*input);
    if !terms.iter().zip(&inputs).all(fits) {
        return Err(Refusal(
            "its equation has not one letter for each dimension of its inputs".into(),
        ));
    }
    let right = match right {
        Some(right) => right.replace("...", &ellipsis),
        None => ellipsis + &implicit_result(&left),
    };
    let (mut value, mut value_term) = (inputs[0], terms[0].clone());
    for n in 1..inputs.len() {
        // What later operands or the result need is kept.
        let later: String = terms[n + 1..].concat() + &right;
        let mut kept = String::new();
        for c in value_term.chars().chain(terms[n].chars()) {
            if later.contains(c) && !kept.contains(c) {
                kept.push(c);
            }
        }
        let result = if n + 1 == inputs.len() {
            right.clone()
        } else {
            kept
        };
        value = contract(
            cx,
            format!("{value_term},{}->{result}", terms[n]),
            &[value, inputs[n]],
        )?;
        value_term = result;
    }
    if inputs.len() == 1 {
        value = contract(cx, format!("{value_term}->{right}"), &[value])?;
    }
    single(value)
}

/// Replaces `...` by letters nobody uses; returns those of the operand with the most.
fn spell_out_ellipsis(
    cx: &NodeCx,
    terms: &mut [String],
    inputs: &[ContainerId],
) -> Result<String, Refusal> {
    let used = terms.concat();
    let free: Vec<char> = ('A'..='Z')
        .chain('a'..='z')
        .filter(|c| !used.contains(*c))
        .collect();
    let mut longest = String::new();
    for (term, input) in terms.iter_mut().zip(inputs) {
        if !term.contains("...") {
            continue;
        }
        let named = term.len() - 3;
        let n = cx
            .rank(*input)
            .checked_sub(named)
            .filter(|n| *n <= free.len());
        let n = n.ok_or_else(|| Refusal(format!("`{term}` does not fit its input")))?;
        // Aligned at the last dimension, so that they broadcast.
        let text: String = free[..n].iter().rev().collect();
        *term = term.replace("...", &text);
        if text.len() > longest.len() {
            longest = text;
        }
    }
    Ok(longest)
}

/// Letters that occur once, in alphabetical order.
fn implicit_result(left: &str) -> String {
    let mut once: Vec<char> = left.chars().filter(char::is_ascii_alphabetic).collect();
    once.sort_unstable();
    let once = once.chunk_by(|a, b| a == b).filter(|same| same.len() == 1);
    once.flatten().collect()
}

/// `x` with its last dimension split in `[heads, width/heads]` and the heads moved before the rows.
pub fn split_heads(cx: &mut NodeCx, x: ContainerId, heads: i64) -> Result<ContainerId, Refusal> {
    let shape = cx.shape(x);
    let [batch, rows, width] = shape.as_slice() else {
        return Err(Refusal("its inputs must have 3 or 4 dimensions".into()));
    };
    let heads = SymExpr::constant(heads);
    let each = width
        .divide_exactly(&heads)
        .ok_or_else(|| Refusal(format!("{width} columns do not divide into {heads} heads")))?;
    let x = cx.reshape(x, vec![batch.clone(), rows.clone(), heads, each])?;
    cx.permute(x, &[0, 2, 1, 3])
}

#[cfg(test)]
mod tests {
    use super::implicit_result;

    #[test]
    fn letters_that_occur_once_are_the_result() {
        assert_eq!(implicit_result("ki,ij"), "jk");
        // Takes linear time: an equation of a file may have any length.
        assert_eq!(implicit_result(&("a".repeat(1 << 22) + "b")), "b");
    }
}
