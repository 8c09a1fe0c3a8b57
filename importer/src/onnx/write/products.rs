//! Products of two arrays: einsum as matrix products, convolutions and their gradients as
//! convolutions.

use super::nodes::{Nodes, Refusal, int, int_list, text};
use super::rules::Written;
use graph::SymExpr;
use ops::Call;

/// `Einsum`, written as `MatMul` where each operand can be brought into the form of one.
pub(super) fn einsum(n: &mut Nodes, c: &Call) -> Written {
    let equation = c.str("equation")?;
    let mut inputs = Vec::new();
    for position in 0..c.inputs.len() {
        inputs.push(n.input(c, position)?);
    }
    let value = match Product::of(c, &equation) {
        Some(product) => product.write(n, &inputs)?,
        None => {
            let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
            n.node("Einsum", &inputs, vec![text("equation", &equation)])
        }
    };
    n.output(c, 0, value);
    Ok(())
}

type Letters = Vec<(char, SymExpr)>;

/// Letters of a product by their part in it.
struct Product {
    operands: [Vec<char>; 2],
    result: Vec<char>,
    batch: Letters,
    rows: Letters,
    columns: Letters,
    summed: Letters,
}

impl Product {
    /// `None` for one operand, repeated letters, letters that only one operand sums, and sizes of 1
    /// that stretch.
    fn of(c: &Call, equation: &str) -> Option<Product> {
        let (left, result) = equation.split_once("->")?;
        let operands: Vec<Vec<char>> = left
            .split(',')
            .map(|o| o.trim().chars().collect())
            .collect();
        let [a, b] = <[Vec<char>; 2]>::try_from(operands).ok()?;
        let result: Vec<char> = result.trim().chars().collect();
        let mut product = Product {
            operands: [a, b],
            result,
            batch: Vec::new(),
            rows: Vec::new(),
            columns: Vec::new(),
            summed: Vec::new(),
        };
        let mut sizes: Letters = Vec::new();
        for (position, letters) in product.operands.clone().iter().enumerate() {
            for (d, letter) in letters.iter().enumerate() {
                let size = c.inputs.get(position)?.as_ref()?.shape[d].clone();
                let repeated = letters.iter().filter(|l| *l == letter).count() > 1;
                match sizes.iter().find(|(l, _)| l == letter) {
                    Some((_, known)) if *known != size => return None,
                    _ if repeated => return None,
                    Some(_) => {}
                    None => sizes.push((*letter, size)),
                }
            }
        }
        for (letter, size) in sizes {
            let [a, b] = [0, 1].map(|i| product.operands[i].contains(&letter));
            let list = match (a, b, product.result.contains(&letter)) {
                (true, true, true) => &mut product.batch,
                (true, true, false) => &mut product.summed,
                (true, false, true) => &mut product.rows,
                (false, true, true) => &mut product.columns,
                _ => return None,
            };
            list.push((letter, size));
        }
        Some(product)
    }

    fn write(&self, n: &mut Nodes, inputs: &[String]) -> Result<String, Refusal> {
        let a = self.matrix(n, &inputs[0], 0, [&self.batch, &self.rows, &self.summed])?;
        let b = self.matrix(n, &inputs[1], 1, [&self.batch, &self.summed, &self.columns])?;
        let product = n.of2("MatMul", &a, &b);
        let made: Letters = [&self.batch, &self.rows, &self.columns]
            .into_iter()
            .flatten()
            .cloned()
            .collect();
        let sizes: Vec<SymExpr> = made.iter().map(|(_, size)| size.clone()).collect();
        let product = n.reshaped(&product, &sizes)?;
        let letters: Vec<char> = made.iter().map(|(l, _)| *l).collect();
        Ok(transposed(n, product, &letters, &self.result))
    }

    /// The operand as `[batch, first, second]`, each one dimension; the batch is left out if empty.
    fn matrix(
        &self,
        n: &mut Nodes,
        input: &str,
        position: usize,
        groups: [&Letters; 3],
    ) -> Result<String, Refusal> {
        let order: Vec<char> = groups
            .iter()
            .flat_map(|g| g.iter().map(|(l, _)| *l))
            .collect();
        let value = transposed(n, input.to_string(), &self.operands[position], &order);
        let sizes = |g: &Letters| SymExpr::product(g.iter().map(|(_, size)| size));
        let shape: Vec<SymExpr> = groups
            .iter()
            .enumerate()
            .filter(|(at, g)| *at > 0 || !g.is_empty())
            .map(|(_, g)| sizes(g))
            .collect();
        n.reshaped(&value, &shape)
    }
}

fn transposed(n: &mut Nodes, value: String, from: &[char], to: &[char]) -> String {
    let at = |letter: &char| from.iter().position(|l| l == letter).unwrap_or_default();
    let order: Vec<i64> = to.iter().map(|l| at(l) as i64).collect();
    if order.iter().enumerate().all(|(d, o)| d as i64 == *o) {
        return value;
    }
    n.node("Transpose", &[&value], vec![int_list("perm", &order)])
}

/// Attributes of a convolution of ours.
struct Window {
    stride: Vec<i64>,
    low: Vec<i64>,
    high: Vec<i64>,
    dilation: Vec<i64>,
    groups: i64,
}

impl Window {
    fn of(c: &Call, spatial: usize) -> Result<Window, Refusal> {
        let or = |name: &str, value: i64| c.ints_or(name, vec![value; spatial]);
        Ok(Window {
            stride: or("stride", 1)?,
            low: or("pad_low", 0)?,
            high: or("pad_high", 0)?,
            dilation: or("dilation", 1)?,
            groups: c.int_or("groups", 1)?,
        })
    }
}

fn pads(low: &[i64], high: &[i64]) -> super::nodes::Attribute {
    int_list("pads", &[low, high].concat())
}

pub(super) fn conv(n: &mut Nodes, c: &Call) -> Written {
    let w = Window::of(c, c.input(0)?.rank() - 2)?;
    let (x, weight) = (n.input(c, 0)?, n.input(c, 1)?);
    let attributes = vec![
        int_list("strides", &w.stride),
        pads(&w.low, &w.high),
        int_list("dilations", &w.dilation),
        int("group", w.groups),
    ];
    let value = n.node("Conv", &[&x, &weight], attributes);
    n.output(c, 0, value);
    Ok(())
}

fn numbers(sizes: &[SymExpr], what: &str) -> Result<Vec<i64>, Refusal> {
    let fixed = sizes.iter().map(SymExpr::as_const).collect::<Option<_>>();
    fixed.ok_or_else(|| Refusal(format!("{what} of dynamic size")))
}

/// A transposed convolution; the output padding makes up for what the stride leaves out.
pub(super) fn conv_data_gradient(n: &mut Nodes, c: &Call) -> Written {
    let (dy, weight) = (c.input(0)?.clone(), c.input(1)?.clone());
    let w = Window::of(c, dy.rank() - 2)?;
    let input = numbers(&c.sizes("input_shape")?[2..], "positions")?;
    let output = numbers(&dy.shape[2..], "positions")?;
    let kernel = numbers(&weight.shape[2..], "a kernel")?;
    let missing: Vec<i64> = (0..input.len())
        .map(|d| {
            let made = (output[d] - 1) * w.stride[d] - w.low[d] - w.high[d]
                + w.dilation[d] * (kernel[d] - 1)
                + 1;
            input[d] - made
        })
        .collect();
    let attributes = vec![
        int_list("strides", &w.stride),
        pads(&w.low, &w.high),
        int_list("dilations", &w.dilation),
        int_list("output_padding", &missing),
        int("group", w.groups),
    ];
    let (dy, weight) = (n.input(c, 0)?, n.input(c, 1)?);
    let value = n.node("ConvTranspose", &[&dy, &weight], attributes);
    n.output(c, 0, value);
    Ok(())
}

/// `dw[k, c, r] = Σ dy[n, k, p] · x[n, c, p·stride + r·dilation − pad]`: a convolution of x with dy over
/// the batch, in which stride and dilation change places. Groups stay groups.
pub(super) fn conv_weight_gradient(n: &mut Nodes, c: &Call) -> Written {
    let x = c.input(1)?.clone();
    let spatial = x.rank() - 2;
    let w = Window::of(c, spatial)?;
    let shape = c.sizes("weight_shape")?;
    let kernel = numbers(&shape[2..], "a kernel")?;
    let (mut dy_name, mut x_name) = (n.input(c, 0)?, n.input(c, 1)?);
    let swapped: Vec<i64> = [1, 0].into_iter().chain(2..2 + spatial as i64).collect();
    dy_name = n.node("Transpose", &[&dy_name], vec![int_list("perm", &swapped)]);
    if w.groups == 1 {
        x_name = n.node("Transpose", &[&x_name], vec![int_list("perm", &swapped)]);
    } else {
        // [N, G·C, …] → [C, G·N, …]
        let groups = SymExpr::constant(w.groups);
        let channels = shape[1].clone();
        let tail = || x.shape[2..].iter().cloned();
        let split = [x.shape[0].clone(), groups.clone(), channels.clone()];
        let split: Vec<SymExpr> = split.into_iter().chain(tail()).collect();
        x_name = n.reshaped(&x_name, &split)?;
        let order: Vec<i64> = [2, 1, 0].into_iter().chain(3..3 + spatial as i64).collect();
        x_name = n.node("Transpose", &[&x_name], vec![int_list("perm", &order)]);
        let joined = [channels, groups * x.shape[0].clone()];
        let joined: Vec<SymExpr> = joined.into_iter().chain(tail()).collect();
        x_name = n.reshaped(&x_name, &joined)?;
    }
    let attributes = vec![
        int_list("strides", &w.dilation),
        pads(&w.low, &w.high),
        int_list("dilations", &w.stride),
        int("group", w.groups),
    ];
    let mut value = n.node("Conv", &[&x_name, &dy_name], attributes);
    // Where the stride does not reach the last positions of x, there are taps too many.
    let starts = n.ints(&vec![0; spatial]);
    let ends = n.ints(&kernel);
    let axes: Vec<i64> = (2..2 + spatial as i64).collect();
    let axes = n.ints(&axes);
    value = n.node("Slice", &[&value, &starts, &ends, &axes], Vec::new());
    value = n.node("Transpose", &[&value], vec![int_list("perm", &swapped)]);
    n.output(c, 0, value);
    Ok(())
}
