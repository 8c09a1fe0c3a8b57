//! Matrix products and convolutions. Every matrix product becomes an `einsum`; biases are added
//! element by element, where the product's kernel can take them in.

use super::Table;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site};
use graph::{Attr, ContainerId, Expr, SymExpr};
use ops::attrs;

pub(super) const RULES: Table = &[
    ("aten.linear.default", linear),
    ("aten.bilinear.default", bilinear),
    ("aten.matmul.default", |s| product(s, "self", "other")),
    ("aten.mm.default", |s| product(s, "self", "mat2")),
    ("aten.bmm.default", |s| product(s, "self", "mat2")),
    ("aten.mv.default", |s| product(s, "self", "vec")),
    ("aten.dot.default", |s| product(s, "self", "tensor")),
    ("aten.addmm.default", |s| add_product(s, "mat1", "mat2")),
    ("aten.addmv.default", |s| add_product(s, "mat", "vec")),
    ("aten.baddbmm.default", |s| {
        add_product(s, "batch1", "batch2")
    }),
    ("aten.einsum.default", einsum),
    ("aten.conv1d.default", |s| convolution(s, 1)),
    ("aten.conv2d.default", |s| convolution(s, 2)),
    ("aten.conv3d.default", |s| convolution(s, 3)),
    ("aten.conv1d.padding", |s| convolution(s, 1)),
    ("aten.conv2d.padding", |s| convolution(s, 2)),
    ("aten.conv3d.padding", |s| convolution(s, 3)),
    ("aten.conv_transpose1d.default", |s| transposed(s, 1)),
    ("aten.conv_transpose2d.input", |s| transposed(s, 2)),
    ("aten.conv_transpose3d.input", |s| transposed(s, 3)),
    ("aten.convolution.default", general_convolution),
];

/// Letters for dimensions that both operands have; the rules' own are lowercase.
const BATCH: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";

/// An einsum.
fn contract(
    s: &mut Site,
    equation: String,
    operands: &[ContainerId],
) -> Result<ContainerId, RuleError> {
    s.op1(
        "einsum",
        operands,
        attrs([("equation", Attr::Str(equation))]),
    )
}

fn batch_letters(s: &Site, n: usize) -> Result<&'static str, RuleError> {
    BATCH
        .get(..n)
        .ok_or_else(|| s.unsupported("more than 26 leading dimensions"))
}

/// `y = x·wᵀ + b`, x `[…, in]`, w `[out, in]`, b `[out]`.
fn linear(s: &mut Site) -> Results {
    let (x, w) = (s.tensor("input")?, s.tensor("weight")?);
    let lead = batch_letters(s, s.rank(x).saturating_sub(1))?;
    let equation = match s.rank(w) {
        1 => format!("{lead}k,k->{lead}"),
        _ => format!("{lead}k,nk->{lead}n"),
    };
    let y = contract(s, equation, &[x, w])?;
    let bias = s.optional_tensor("bias")?;
    Ok(vec![Some(with_bias(s, y, bias)?)])
}

/// `y_o = x1·W_o·x2 + b`, W `[out, in1, in2]`.
fn bilinear(s: &mut Site) -> Results {
    let (a, b) = (s.tensor("input1")?, s.tensor("input2")?);
    let (w, lead) = (s.tensor("weight")?, batch_letters(s, s.rank(a) - 1)?);
    let half = contract(s, format!("{lead}i,oij->{lead}oj"), &[a, w])?;
    let y = contract(s, format!("{lead}oj,{lead}j->{lead}o"), &[half, b])?;
    let bias = s.optional_tensor("bias")?;
    Ok(vec![Some(with_bias(s, y, bias)?)])
}

fn with_bias(
    s: &mut Site,
    y: ContainerId,
    bias: Option<ContainerId>,
) -> Result<ContainerId, RuleError> {
    let dtype = s.builder.dtype(y);
    match bias {
        Some(bias) => s.elementwise(Expr::In(0).add(Expr::In(1)), &[y, bias], dtype),
        None => Ok(y),
    }
}

/// `torch.matmul`: leading dimensions broadcast, vectors lose their dimension.
fn matrix_product(s: &mut Site, a: ContainerId, b: ContainerId) -> Result<ContainerId, RuleError> {
    let lead = |rank: usize| rank.saturating_sub(2);
    let n_batch = lead(s.rank(a)).max(lead(s.rank(b)));
    let letters = batch_letters(s, n_batch)?;
    let of = |rank: usize| &letters[n_batch - lead(rank)..];
    let (left, keeps_row) = match s.rank(a) {
        1 => ("k".to_string(), ""),
        rank => (format!("{}mk", of(rank)), "m"),
    };
    let (right, keeps_column) = match s.rank(b) {
        1 => ("k".to_string(), ""),
        rank => (format!("{}kn", of(rank)), "n"),
    };
    contract(
        s,
        format!("{left},{right}->{letters}{keeps_row}{keeps_column}"),
        &[a, b],
    )
}

fn product(s: &mut Site, a: &str, b: &str) -> Results {
    let (a, b) = (s.tensor(a)?, s.tensor(b)?);
    Ok(vec![Some(matrix_product(s, a, b)?)])
}

/// `beta·self + alpha·(a·b)`.
fn add_product(s: &mut Site, a: &str, b: &str) -> Results {
    let (c, a, b) = (s.tensor("self")?, s.tensor(a)?, s.tensor(b)?);
    let y = matrix_product(s, a, b)?;
    let dtype = s.builder.dtype(y);
    let (alpha, beta) = (s.factor("alpha", dtype)?, s.factor("beta", dtype)?);
    let times = |factor: Expr, x: Expr| match factor.as_number() {
        Some(1.0) => x,
        _ => x.mul(factor),
    };
    if beta.as_number() == Some(0.0) {
        let scaled = times(alpha, Expr::In(0));
        return Ok(vec![Some(s.elementwise(scaled, &[y], dtype)?)]);
    }
    let sum = times(alpha, Expr::In(0)).add(times(beta, Expr::In(1)));
    Ok(vec![Some(s.elementwise(sum, &[y, c], dtype)?)])
}

/// `torch.einsum` of one or two operands; a longer chain is contracted from the left, and letters that are
/// still needed are kept.
fn einsum(s: &mut Site) -> Results {
    let equation = s.text_or("equation", "")?.replace(' ', "");
    let operands = s.tensors("tensors")?;
    let (mut terms, result) = spelled_out(s, &equation, &operands)?;
    let mut values = operands.into_iter();
    let wrong = || RuleError::Unsupported(format!("equation `{equation}`"));
    let mut value = values.next().ok_or_else(wrong)?;
    let mut term = terms.remove(0);
    if terms.is_empty() {
        return Ok(vec![Some(contract(
            s,
            format!("{term}->{result}"),
            &[value],
        )?)]);
    }
    while !terms.is_empty() {
        let (next, operand) = (terms.remove(0), values.next().ok_or_else(wrong)?);
        let kept = match terms.is_empty() {
            true => result.clone(),
            false => letters_needed(&term, &next, &terms, &result),
        };
        value = contract(s, format!("{term},{next}->{kept}"), &[value, operand])?;
        term = kept;
    }
    Ok(vec![Some(value)])
}

/// The operands' letters and the result's, with letters in place of every `...`: they align at the
/// last of the dimensions that it stands for, as in broadcasting.
fn spelled_out(
    s: &Site,
    equation: &str,
    operands: &[ContainerId],
) -> Result<(Vec<String>, String), RuleError> {
    let (left, result) = match equation.split_once("->") {
        Some((left, result)) => (left, Some(result)),
        None => (equation, None),
    };
    let ranks = operands.iter().map(|id| s.rank(*id));
    let terms: Vec<(&str, usize)> = left
        .split(',')
        .zip(ranks)
        .map(|(term, rank)| (term, (rank + 3).saturating_sub(term.len())))
        .collect();
    let dotted = terms.iter().filter(|(term, _)| term.contains("..."));
    let most = dotted.map(|(_, n)| *n).max().unwrap_or(0);
    let free: String = ('A'..='Z')
        .chain('a'..='z')
        .filter(|c| !equation.contains(*c))
        .collect();
    let dots = free
        .get(..most)
        .ok_or_else(|| s.unsupported("more dimensions than letters"))?;
    let spelled = |term: &str, n: usize| term.replace("...", &dots[most - n..]);
    let result = match result {
        Some(result) => spelled(result, most),
        None => format!("{dots}{}", letters_occurring_once(left)),
    };
    let terms = terms.iter().map(|(term, n)| spelled(term, (*n).min(most)));
    Ok((terms.collect(), result))
}

fn letters_occurring_once(equation: &str) -> String {
    let mut letters: Vec<char> = equation.chars().filter(char::is_ascii_alphabetic).collect();
    letters.sort_unstable();
    let once = |c: &char| equation.matches(*c).count() == 1;
    letters.into_iter().filter(once).collect()
}

fn letters_needed(a: &str, b: &str, rest: &[String], result: &str) -> String {
    let mut kept = String::new();
    for c in a.chars().chain(b.chars()) {
        let needed = result.contains(c) || rest.iter().any(|t| t.contains(c));
        if needed && !kept.contains(c) {
            kept.push(c);
        }
    }
    kept
}

/// Padding below and above, for `padding` given as numbers or as `same`/`valid`.
fn padding(s: &Site, w: ContainerId, dilation: &[i64]) -> Result<(Vec<i64>, Vec<i64>), RuleError> {
    let n = dilation.len();
    if !s.node.target.ends_with(".padding") {
        let both = s.ints_for("padding", n, &vec![0; n])?;
        return Ok((both.clone(), both));
    }
    if s.text_or("padding", "valid")? == "valid" {
        return Ok((vec![0; n], vec![0; n]));
    }
    let kernel = &s.builder.graph.container(w).shape[2..];
    let total = kernel
        .iter()
        .zip(dilation)
        .map(|(k, d)| (k.as_const().unwrap_or(1) - 1) * d);
    let total: Vec<i64> = total.collect();
    let low: Vec<i64> = total.iter().map(|t| t / 2).collect();
    let high = total.iter().zip(&low).map(|(t, l)| t - l).collect();
    Ok((low, high))
}

/// A bias `[K]` in the shape `[K, 1, …]` that broadcasts over `n` spatial dimensions.
fn channel_bias(s: &mut Site, n: usize) -> Result<Option<ContainerId>, RuleError> {
    let Some(bias) = s.optional_tensor("bias")? else {
        return Ok(None);
    };
    let mut shape = s.builder.shape(bias);
    shape.extend(std::iter::repeat_n(SymExpr::constant(1), n));
    Ok(Some(s.reshape(bias, shape)?))
}

/// The input with a batch of one in front, if it comes without a batch.
fn batched(s: &mut Site, n: usize) -> Result<(ContainerId, bool), RuleError> {
    let x = s.tensor("input")?;
    if s.rank(x) != n + 1 {
        return Ok((x, false));
    }
    let mut shape = s.builder.shape(x);
    shape.insert(0, SymExpr::constant(1));
    Ok((s.reshape(x, shape)?, true))
}

fn unbatched(s: &mut Site, y: ContainerId, added: bool) -> Results {
    let y = match added {
        true => s.reshape(y, s.builder.shape(y)[1..].to_vec())?,
        false => y,
    };
    Ok(vec![Some(y)])
}

fn convolution(s: &mut Site, n: usize) -> Results {
    let (x, added) = batched(s, n)?;
    let w = s.tensor("weight")?;
    let ones = vec![1; n];
    let dilation = s.ints_for("dilation", n, &ones)?;
    let (low, high) = padding(s, w, &dilation)?;
    let a = attrs([
        ("stride", Attr::Ints(s.ints_for("stride", n, &ones)?)),
        ("pad_low", Attr::Ints(low)),
        ("pad_high", Attr::Ints(high)),
        ("dilation", Attr::Ints(dilation)),
        ("groups", Attr::Int(s.int_or("groups", 1)?)),
    ]);
    let y = s.op1("conv", &[x, w], a)?;
    let bias = channel_bias(s, n)?;
    let y = with_bias(s, y, bias)?;
    unbatched(s, y, added)
}

fn transposed(s: &mut Site, n: usize) -> Results {
    let (x, added) = batched(s, n)?;
    let w = s.tensor("weight")?;
    let (ones, zeros) = (vec![1; n], vec![0; n]);
    let stride = s.ints_for("stride", n, &ones)?;
    let low = s.ints_for("padding", n, &zeros)?;
    let mut high = low.clone();
    let mut extra = s.ints_for("output_padding", n, &zeros)?;
    // `output_padding` of at least a stride: less is cut off at the end, and elements after the last window
    // are zero.
    let mut behind = vec![0; n];
    for d in 0..n {
        if extra[d] >= stride[d] {
            behind[d] = (extra[d] - high[d]).max(0);
            high[d] = (high[d] - extra[d]).max(0);
            extra[d] = 0;
        }
    }
    let a = attrs([
        ("stride", Attr::Ints(stride)),
        ("pad_low", Attr::Ints(low)),
        ("pad_high", Attr::Ints(high)),
        ("dilation", Attr::Ints(s.ints_for("dilation", n, &ones)?)),
        ("groups", Attr::Int(s.int_or("groups", 1)?)),
        ("output_padding", Attr::Ints(extra)),
    ]);
    let mut y = s.op1("conv_transpose", &[x, w], a)?;
    if behind != zeros {
        let sizes = |spatial: Vec<i64>| {
            let all = [0, 0].into_iter().chain(spatial);
            Attr::Sizes(all.map(SymExpr::constant).collect())
        };
        let a = attrs([("low", sizes(zeros)), ("high", sizes(behind))]);
        y = s.op1("pad", &[y], a)?;
    }
    let bias = channel_bias(s, n)?;
    let y = with_bias(s, y, bias)?;
    unbatched(s, y, added)
}

fn general_convolution(s: &mut Site) -> Results {
    let n = s.rank(s.tensor("weight")?).saturating_sub(2);
    match s.flag("transposed")? {
        true => transposed(s, n),
        false => convolution(s, n),
    }
}
