//! Sums of products over named dimensions: every matrix product goes through `einsum`.
//!
//! `einsum(a, b; "bij,bjk->bik")` is `y[b,i,k] = Σ_j a[b,i,j]·b[b,j,k]`. Its gradients are einsums of
//! the incoming gradient with the other operand. This file never decides how a product is computed.

use crate::index_space::for_each_index;
use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::constant_shape;
use graph::{Attr, Builder, ContainerId, DType, Expr, Memlet, Reduction, SymExpr, Tasklet, Tensor};

/// `einsum` (a) or (a, b), attribute `equation`: one lowercase or uppercase letter for each dimension,
/// operands separated by a comma, the result after `->`. A letter absent from the result is summed.
/// An operand's dimension of size 1 stretches to the size its letter has elsewhere.
#[derive(Debug)]
pub struct Einsum;

/// The parsed equation with the size of each letter.
struct Equation {
    operands: Vec<Vec<char>>,
    result: Vec<char>,
    /// Letters with sizes: the result's in order, then the summed ones as they occur.
    letters: Vec<(char, SymExpr)>,
}

impl Equation {
    fn new(call: &Call) -> Result<Self, OpError> {
        let text = call.str("equation")?;
        let (left, result) = text
            .split_once("->")
            .ok_or_else(|| call.shape_error(format!("equation `{text}` has no `->`")))?;
        let operands: Vec<Vec<char>> = left
            .split(',')
            .map(|o| o.trim().chars().collect())
            .collect();
        let result: Vec<char> = result.trim().chars().collect();
        if let Some(bad) = operands
            .iter()
            .flatten()
            .chain(&result)
            .find(|c| !c.is_ascii_alphabetic())
        {
            return Err(call.shape_error(format!("`{bad}` in equation `{text}` is no letter")));
        }
        if operands.len() > 2 || operands.len() != call.inputs.len() {
            return Err(call.shape_error(format!(
                "equation `{text}` does not fit {} inputs; one or two are possible",
                call.inputs.len()
            )));
        }
        let sized = Equation::sizes(call, &operands, &text)?;
        let mut letters: Vec<(char, SymExpr)> = Vec::new();
        for letter in result.iter().chain(operands.iter().flatten()) {
            let known = letters.iter().any(|(l, _)| l == letter);
            match sized.iter().find(|(l, _)| l == letter) {
                Some(_) if known => {}
                Some(entry) => letters.push(entry.clone()),
                None => {
                    return Err(call.shape_error(format!(
                        "`{letter}` of the result in `{text}` is in no operand"
                    )));
                }
            }
        }
        let mut once = result.clone();
        once.sort_unstable();
        once.dedup();
        if once.len() != result.len() {
            return Err(call.shape_error(format!("the result of `{text}` repeats a letter")));
        }
        Ok(Equation {
            operands,
            result,
            letters,
        })
    }

    /// The size of each letter, from the operands' shapes.
    fn sizes(
        call: &Call,
        operands: &[Vec<char>],
        text: &str,
    ) -> Result<Vec<(char, SymExpr)>, OpError> {
        let one = SymExpr::constant(1);
        let mut sized: Vec<(char, SymExpr)> = Vec::new();
        for (position, letters) in operands.iter().enumerate() {
            let shape = &call.input(position)?.shape;
            if shape.len() != letters.len() {
                return Err(call.shape_error(format!(
                    "operand {position} of `{text}` has {} dimensions",
                    shape.len()
                )));
            }
            for (letter, size) in letters.iter().zip(shape) {
                match sized.iter_mut().find(|(l, _)| l == letter) {
                    None => sized.push((*letter, size.clone())),
                    Some((_, known)) if known == size || *size == one => {}
                    Some((_, known)) if *known == one => *known = size.clone(),
                    Some((_, known)) => {
                        return Err(call.shape_error(format!(
                            "`{letter}` in `{text}` has sizes {known} and {size}"
                        )));
                    }
                }
            }
        }
        Ok(sized)
    }

    fn size(&self, letter: char) -> SymExpr {
        self.letters
            .iter()
            .find(|(l, _)| *l == letter)
            .map_or_else(|| SymExpr::constant(1), |(_, size)| size.clone())
    }

    fn shape(&self) -> Vec<SymExpr> {
        self.result.iter().map(|l| self.size(*l)).collect()
    }

    /// The equation of the gradient for `position`, and the letters of its result: those of the operand
    /// that occur in the result or in the other operand (there not stretched from 1) and are not stretched themselves.
    fn gradient(&self, position: usize, shapes: [&[SymExpr]; 2]) -> (String, Vec<char>) {
        let shape = shapes[position];
        let own = &self.operands[position];
        let other = self.operands.get(1 - position);
        let found: Vec<char> = own
            .iter()
            .zip(shape)
            .filter(|(l, size)| {
                let in_other = other.is_some_and(|o| {
                    let mut sizes = o.iter().zip(shapes[1 - position]);
                    sizes.any(|(letter, size)| letter == *l && *size == self.size(**l))
                });
                let elsewhere = self.result.contains(l) || in_other;
                elsewhere && **size == self.size(**l)
            })
            .map(|(l, _)| *l)
            .collect();
        let text = |letters: &[char]| letters.iter().collect::<String>();
        let dy = text(&self.result);
        let left = match (other, position) {
            (None, _) => dy,
            (Some(b), 0) => format!("{dy},{}", text(b)),
            (Some(a), _) => format!("{},{dy}", text(a)),
        };
        (format!("{left}->{}", text(&found)), found)
    }
}

fn repeats(letters: &[char]) -> bool {
    (1..letters.len()).any(|n| letters[..n].contains(&letters[n]))
}

/// Appends an einsum.
///
/// # Errors
/// As [`OpBuilder::op`].
pub fn einsum(
    builder: &mut Builder,
    equation: &str,
    operands: &[ContainerId],
) -> Result<ContainerId, OpError> {
    let equation = Attr::Str(equation.to_string());
    builder.op1("einsum", operands, attrs([("equation", equation)]))
}

/// Gradient for one operand: an einsum, then the dimensions that its result lacks are put back.
fn operand_gradient(
    builder: &mut Builder,
    equation: &Equation,
    (position, id, other): (usize, ContainerId, Option<ContainerId>),
    operands: &[ContainerId],
) -> Result<ContainerId, OpError> {
    let shape = builder.shape(id);
    let of_other = other.map(|other| builder.shape(other)).unwrap_or_default();
    let shapes = match position {
        0 => [shape.as_slice(), &of_other],
        _ => [of_other.as_slice(), &shape],
    };
    let (text, found) = equation.gradient(position, shapes);
    let mut value = einsum(builder, &text, operands)?;
    if found.len() == shape.len() {
        return Ok(value);
    }
    let with_ones: Vec<SymExpr> = equation.operands[position]
        .iter()
        .zip(&shape)
        .map(|(l, size)| match found.contains(l) {
            true => size.clone(),
            false => SymExpr::constant(1),
        })
        .collect();
    let reshaped = attrs([("shape", Attr::Sizes(with_ones.clone()))]);
    value = builder.op1("reshape", &[value], reshaped)?;
    if with_ones != shape {
        value = builder.op1("expand", &[value], attrs([("shape", Attr::Sizes(shape))]))?;
    }
    Ok(value)
}

impl Op for Einsum {
    fn name(&self) -> &'static str {
        "einsum"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let equation = Equation::new(call)?;
        let mut dtype = call.input(0)?.dtype;
        if let Some(Some(b)) = call.inputs.get(1) {
            dtype = dtype.promote(b.dtype);
        }
        Ok(vec![TensorType::new(dtype, equation.shape())])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let equation = Equation::new(call)?;
        let ty = &self.infer(call)?[0];
        let letters: Vec<char> = equation.letters.iter().map(|(l, _)| *l).collect();
        let sizes: Vec<SymExpr> = equation.letters.iter().map(|(_, s)| s.clone()).collect();
        let sizes = constant_shape(call, &sizes)?;
        let shape = constant_shape(call, &ty.shape)?;
        let data: Vec<(Vec<f64>, &[usize])> = inputs
            .iter()
            .flatten()
            .map(|t| (t.to_f64(), t.shape.as_slice()))
            .collect();
        let mut out = vec![0.0; shape.iter().product()];
        for_each_index(&sizes, |index| {
            let value = |letter: &char| {
                let at = letters.iter().position(|l| l == letter);
                at.map_or(0, |at| index[at])
            };
            let offset = |names: &[char], shape: &[usize]| {
                names
                    .iter()
                    .zip(shape)
                    .fold(0, |at, (l, n)| at * n + if *n == 1 { 0 } else { value(l) })
            };
            let product: f64 = data
                .iter()
                .zip(&equation.operands)
                .map(|((values, shape), names)| values[offset(names, shape)])
                .product();
            out[offset(&equation.result, &shape)] += product;
        });
        Ok(vec![Tensor::from_f64(ty.dtype, &shape, out)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let equation = Equation::new(call)?;
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let named: Vec<(String, SymExpr)> = equation
            .letters
            .iter()
            .map(|(l, size)| (l.to_string(), size.clone()))
            .collect();
        let params: Vec<_> = named.iter().map(|(l, s)| (l.as_str(), s.clone())).collect();
        let one = SymExpr::constant(1);
        let mut reads = Vec::new();
        for (position, letters) in equation.operands.iter().enumerate() {
            let shape = &call.input(position)?.shape;
            let index = letters
                .iter()
                .zip(shape)
                .map(|(l, size)| match *size == one {
                    true => SymExpr::constant(0),
                    false => SymExpr::symbol(l.to_string().as_str()),
                });
            reads.push(Memlet::new(call.input_id(position)?, index));
        }
        let result = equation.result.iter();
        let mut write = Memlet::new(out, result.map(|l| SymExpr::symbol(l.to_string().as_str())));
        if equation.letters.len() > equation.result.len() {
            write = write.reduce(Reduction::Sum);
        }
        let expr = match reads.len() {
            1 => Expr::In(0),
            _ => Expr::In(0).mul(Expr::In(1)),
        };
        builder.map(&params, |_| Tasklet {
            inputs: reads,
            outputs: vec![(write, expr)],
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let equation = Equation::new(&g.call)?;
        let [Some(dy)] = *g.output_gradients else {
            return Ok(Gradient::Zero);
        };
        // A diagonal's gradient is a scatter, which einsum cannot say.
        if equation.operands.iter().any(|o| repeats(o)) {
            return Ok(Gradient::Derive);
        }
        let mut gradients = Vec::new();
        for position in 0..equation.operands.len() {
            if g.wanted.get(position) != Some(&true) {
                gradients.push(None);
                continue;
            }
            let id = g.call.input_id(position)?;
            let operands = match (equation.operands.len(), position) {
                (1, _) => vec![dy],
                (_, 0) => vec![dy, g.call.input_id(1)?],
                _ => vec![g.call.input_id(0)?, dy],
            };
            let other = g.call.optional_id(1 - position.min(1));
            let value = operand_gradient(builder, &equation, (position, id, other), &operands)?;
            gradients.push(Some(value));
        }
        Ok(Gradient::Rule(gradients))
    }

    fn samples(&self) -> Vec<Sample> {
        let cases: &[(&str, &[&[i64]])] = &[
            ("mk,kn->mn", &[&[3, 5], &[5, 4]]),
            ("mk,nk->mn", &[&[3, 5], &[4, 5]]),
            ("bij,bjk->bik", &[&[2, 3, 4], &[2, 4, 5]]),
            ("bhld,bhmd->bhlm", &[&[2, 2, 3, 4], &[2, 2, 5, 4]]),
            ("bij,jk->bik", &[&[2, 3, 4], &[4, 5]]),
            ("i,j->ij", &[&[3], &[4]]),
            ("i,i->", &[&[5], &[5]]),
            ("ij,j->i", &[&[3, 4], &[4]]),
            ("bij,bjk->bik", &[&[1, 3, 4], &[2, 4, 5]]),
            ("ij,kj->k", &[&[3, 4], &[5, 4]]),
            ("ijk->kij", &[&[2, 3, 4]]),
            ("ij->j", &[&[3, 4]]),
            ("ii->i", &[&[3, 3]]),
            ("ii->", &[&[4, 4]]),
        ];
        let tensor = |shape: &&[i64]| {
            let shape = shape.iter().map(|n| SymExpr::constant(*n)).collect();
            Some(TensorType::new(DType::F32, shape))
        };
        let sample = |(equation, shapes): &(&str, &[&[i64]])| Sample {
            name: format!("{equation} of {shapes:?}"),
            inputs: shapes.iter().map(tensor).collect(),
            attrs: attrs([("equation", Attr::Str(equation.to_string()))]),
            values: vec![],
            range: (-1.0, 1.0),
            differentiable: true,
        };
        cases.iter().map(sample).collect()
    }
}
