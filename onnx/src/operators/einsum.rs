//! Einsum: sums of products over named dimensions.
//!
//! Two operands at a time become one batched product; dimensions that only one of them has are summed
//! before.

use super::products::{each_product, matrix};
use super::real::{Real, in_real};
use super::strided::steps;
use super::{Call, Inference, Operator, broadcast};
use crate::fact::Fact;
use crate::tensor::{Tensor, room};
use graph::SymExpr;
use std::collections::BTreeMap;

pub const ROWS: &[Operator] = &[Operator::new("Einsum", infer, |call| {
    let element = call.input(0)?.element();
    if element.is_int() {
        let x = einsum::<f64>(call)?;
        return whole(element, x).map(|y| vec![y]);
    }
    in_real!(element, R => {
        let x = einsum::<R>(call)?;
        R::tensor(element, &x.sizes, x.values)
    })
    .map(|y| vec![y])
})];

/// Most bytes of an equation that a message repeats.
const MOST_SHOWN: usize = 200;

/// Dimensions of operands and of the result; those of an ellipsis are numbered from the last.
struct Equation {
    operands: Vec<Vec<String>>,
    result: Vec<String>,
}

impl Equation {
    fn new(text: &str, ranks: &[usize]) -> Option<Equation> {
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let (left, right) = match text.split_once("->") {
            Some((left, right)) => (left, Some(right)),
            None => (text.as_str(), None),
        };
        let terms: Vec<&str> = left.split(',').collect();
        if terms.len() != ranks.len() {
            return None;
        }
        let mut widest = 0;
        let mut operands = Vec::new();
        for (term, rank) in terms.iter().zip(ranks) {
            let letters = term.replace("...", "").chars().count();
            let wide = if term.contains("...") {
                rank.checked_sub(letters)?
            } else if letters == *rank {
                0
            } else {
                return None;
            };
            widest = widest.max(wide);
            let names = names(term, wide)?;
            operands.push((names.len() == *rank).then_some(names)?);
        }
        let result = match right {
            Some(right) => names(right, if right.contains("...") { widest } else { 0 })?,
            None => implied(&operands, widest),
        };
        let all: Vec<&String> = operands.iter().flatten().collect();
        let sound = result.iter().all(|n| all.contains(&n));
        sound.then_some(Equation { operands, result })
    }
}

fn names(term: &str, wide: usize) -> Option<Vec<String>> {
    let (before, after) = match term.split_once("...") {
        Some((before, after)) => (before, after),
        None => (term, ""),
    };
    let wide = if term.contains("...") { wide } else { 0 };
    if !before.chars().chain(after.chars()).all(char::is_alphabetic) {
        return None;
    }
    let letters = |part: &str| part.chars().map(String::from).collect::<Vec<_>>();
    let mut names = letters(before);
    names.extend((0..wide).rev().map(|n| format!(".{n}")));
    names.extend(letters(after));
    Some(names)
}

/// The ellipsis, then every letter that occurs once, in alphabetic order.
fn implied(operands: &[Vec<String>], widest: usize) -> Vec<String> {
    let mut count: BTreeMap<&String, usize> = BTreeMap::new();
    for name in operands.iter().flatten().filter(|n| !n.starts_with('.')) {
        *count.entry(name).or_default() += 1;
    }
    let mut result: Vec<String> = (0..widest).rev().map(|n| format!(".{n}")).collect();
    result.extend(
        count
            .into_iter()
            .filter(|(_, n)| *n == 1)
            .map(|(name, _)| name.clone()),
    );
    result
}

fn infer(cx: &Inference) -> Option<Vec<Fact>> {
    let shapes: Vec<&[SymExpr]> = (0..cx.inputs.len())
        .map(|n| cx.shape(n))
        .collect::<Option<_>>()?;
    let ranks: Vec<usize> = shapes.iter().map(|s| s.len()).collect();
    let equation = Equation::new(cx.attributes.text("equation")?, &ranks)?;
    let mut sizes: BTreeMap<&str, SymExpr> = BTreeMap::new();
    for (names, shape) in equation.operands.iter().zip(&shapes) {
        for (name, size) in names.iter().zip(*shape) {
            let joined = match sizes.get(name.as_str()) {
                None => size.clone(),
                Some(known) => {
                    let both = [std::slice::from_ref(known), std::slice::from_ref(size)];
                    broadcast(&both, cx.unknowns)?.pop()?
                }
            };
            sizes.insert(name, joined);
        }
    }
    let result = equation
        .result
        .iter()
        .map(|n| sizes.get(n.as_str()).cloned());
    cx.like_first(Some(result.collect::<Option<_>>()?))
}

/// Elements with a name for each dimension.
struct Named<R> {
    names: Vec<String>,
    sizes: Vec<usize>,
    values: Vec<R>,
}

/// Positions of a strided walk over `sizes`, row-major.
fn positions(sizes: &[usize], strides: &[usize]) -> Vec<usize> {
    let mut positions = vec![0];
    for (n, stride) in sizes.iter().zip(strides) {
        let next = positions
            .iter()
            .flat_map(|at| (0..*n).map(move |i| at + i * stride));
        positions = next.collect();
    }
    positions
}

impl<R: Real> Named<R> {
    /// Step between elements along a name, summed over repeated names: the diagonal. Dimensions of size
    /// 1 stay where they are.
    fn step(&self, name: &String) -> usize {
        let all = steps(&self.sizes);
        let own = (0..self.names.len()).filter(|d| self.names[*d] == *name && self.sizes[*d] != 1);
        own.map(|d| all[d]).sum()
    }

    /// Returns the tensor with dimensions in that order; others are summed, and those it lacks have size 1.
    fn ordered(&self, names: &[String], sizes: &BTreeMap<String, usize>) -> Named<R> {
        let summed: Vec<String> = {
            let mut rest: Vec<String> = self.names.clone();
            rest.retain(|n| !names.contains(n));
            rest.sort_unstable();
            rest.dedup();
            rest
        };
        let own = |n: &String| {
            let at = (0..self.names.len()).filter(|d| self.names[*d] == *n);
            at.map(|d| self.sizes[d]).max().unwrap_or(1)
        };
        debug_assert!(
            names
                .iter()
                .all(|n| own(n) <= sizes.get(n).copied().unwrap_or(1))
        );
        let walk = |names: &[String]| {
            let sizes: Vec<usize> = names.iter().map(own).collect();
            let strides: Vec<usize> = names.iter().map(|n| self.step(n)).collect();
            positions(&sizes, &strides)
        };
        let (firsts, terms) = (walk(names), walk(&summed));
        let plain = terms.len() == 1;
        let values = firsts.iter().map(|first| match plain {
            true => self.values[*first],
            false => R::of(terms.iter().map(|t| self.values[first + t].wide()).sum()),
        });
        Named {
            names: names.to_vec(),
            sizes: names.iter().map(own).collect(),
            values: values.collect(),
        }
    }

    /// The same with every dimension as large as `sizes` says.
    fn stretched(self, sizes: &BTreeMap<String, usize>) -> Named<R> {
        let to: Vec<usize> = self
            .names
            .iter()
            .map(|n| sizes.get(n).copied().unwrap_or(1))
            .collect();
        if to == self.sizes {
            return self;
        }
        let from = super::movement::Broadcast::new(&self.sizes, &to);
        let n: usize = to.iter().product();
        let values = (0..n).map(|n| self.values[from.at(n)]).collect();
        Named {
            sizes: to,
            values,
            ..self
        }
    }
}

/// An equation for a message.
fn shown(text: &str) -> String {
    match text.len() <= MOST_SHOWN {
        true => format!("`{text}`"),
        false => format!("of {} bytes", text.len()),
    }
}

fn einsum<R: Real>(call: &Call) -> Result<Named<R>, String> {
    let inputs: Vec<&Tensor> = (0..call.inputs.len())
        .map(|n| call.input(n))
        .collect::<Result<_, _>>()?;
    let ranks: Vec<usize> = inputs.iter().map(|t| t.shape.len()).collect();
    let text = call.attributes.text("equation").unwrap_or("");
    let equation = Equation::new(text, &ranks);
    let equation =
        equation.ok_or_else(|| format!("the equation {} does not fit its inputs", shown(text)))?;
    let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
    let mut operands = Vec::new();
    for (names, t) in equation.operands.iter().zip(&inputs) {
        for (name, size) in names.iter().zip(&t.shape) {
            let known = sizes.entry(name.clone()).or_insert(*size);
            if *known == 1 {
                *known = *size;
            } else if *size != 1 && *size != *known {
                return Err(format!("its dimension `{name}` is {known} and {size}"));
            }
        }
        let values = match t.element().is_int() {
            true => t
                .to_f64()
                .unwrap_or_default()
                .into_iter()
                .map(R::of)
                .collect(),
            false => R::read(t)?.into_owned(),
        };
        operands.push(Named {
            names: names.clone(),
            sizes: t.shape.clone(),
            values,
        });
    }
    let result: Vec<usize> = equation.result.iter().map(|n| sizes[n]).collect();
    let n = room(&result)?;
    if sizes.values().any(|n| *n == 0) {
        // Other sizes may be beyond what can be walked through.
        return Ok(Named {
            names: equation.result,
            sizes: result,
            values: vec![R::zero(); n],
        });
    }
    let mut rest = operands.into_iter().enumerate();
    let (_, mut done) = rest.next().ok_or("it has no input")?;
    for (at, operand) in rest {
        let later = equation.operands[at + 1..].iter().flatten();
        let needed: Vec<&String> = equation.result.iter().chain(later).collect();
        done = pair(&done, &operand, &needed, &sizes)?;
    }
    Ok(done.ordered(&equation.result, &sizes).stretched(&sizes))
}

/// The product of two operands over names that are not needed afterwards.
fn pair<R: Real>(
    a: &Named<R>,
    b: &Named<R>,
    needed: &[&String],
    sizes: &BTreeMap<String, usize>,
) -> Result<Named<R>, String> {
    let mut all: Vec<String> = a.names.iter().chain(&b.names).cloned().collect();
    all.sort_unstable();
    all.dedup();
    let (mut batch, mut inner, mut rows, mut columns) = (vec![], vec![], vec![], vec![]);
    for name in all {
        match (
            a.names.contains(&name),
            b.names.contains(&name),
            needed.contains(&&name),
        ) {
            (true, true, true) => batch.push(name),
            (true, true, false) => inner.push(name),
            (true, false, true) => rows.push(name),
            (false, true, true) => columns.push(name),
            // Summed when the operand is put in order.
            _ => {}
        }
    }
    let size = |names: &[&[String]]| {
        let all = names.iter().flat_map(|names| names.iter());
        room(&all.map(|n| sizes[n]).collect::<Vec<_>>())
    };
    let (n, k) = (size(&[&batch])?, size(&[&inner])?);
    let (m, c) = (size(&[&rows])?, size(&[&columns])?);
    // Both operands are stretched to these sizes.
    size(&[&batch, &rows, &inner])?;
    size(&[&batch, &inner, &columns])?;
    // Shared dimensions of size 1 in one operand are stretched to the other's.
    let a = a
        .ordered(&[&batch[..], &rows, &inner].concat(), sizes)
        .stretched(sizes);
    let b = b
        .ordered(&[&batch[..], &inner, &columns].concat(), sizes)
        .stretched(sizes);
    let mut values = vec![R::zero(); room(&[n, m, c])?];
    if !values.is_empty() && k > 0 {
        each_product(&mut values, m, c, n, |at| {
            let left = matrix(&a.values[at * m * k..][..m * k], m, k)?;
            Ok((left, matrix(&b.values[at * k * c..][..k * c], k, c)?))
        })?;
    }
    let names = [batch, rows, columns].concat();
    let sizes = names.iter().map(|n| sizes[n]).collect();
    Ok(Named {
        names,
        sizes,
        values,
    })
}

/// Integers computed as `f64`.
fn whole(element: crate::element::Element, x: Named<f64>) -> Result<Tensor, String> {
    if x.values.iter().any(|x| x.abs() > 9e15) {
        return Err("its integers are too large to be summed here".to_string());
    }
    let values: Vec<i64> = x.values.iter().map(|x| *x as i64).collect();
    Tensor::of_ints(element, &x.sizes, &values)
        .ok_or_else(|| format!("it is not defined on {element}"))
}

#[cfg(test)]
mod tests {
    use super::{Equation, shown};

    #[test]
    fn a_term_has_a_letter_for_each_dimension() {
        assert!(Equation::new("ij,jk->ik", &[2, 2]).is_some());
        assert!(Equation::new("...i->...", &[3]).is_some());
        // An equation of a file may have any length.
        let long = "a".repeat(1 << 16);
        assert!(Equation::new(&long, &[2]).is_none());
        assert_eq!(shown("ij->ji"), "`ij->ji`");
        assert_eq!(shown(&long), "of 65536 bytes");
    }
}
