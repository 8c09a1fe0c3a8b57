//! What a convolution's description means, executed on the host.
//!
//! Written from the equations of cuDNN's documentation of its three convolution operations, and from
//! nothing else: tests hold descriptions against it that were made from graphs, and the emulator runs
//! convolutions by it. Sums are made in f64 and rounded once, to the result's type.

use super::convolution::{Array, Convolution, Direction};
use super::gemm::Finish;
use super::host::Operands;

/// Computes every element of the result: calls `store` with its place in the buffer and its rounded
/// value. `operands.a` and `b` are what [`Convolution::operands`] reads first and second.
///
/// # Errors
/// An element of an operand lies outside its buffer; the sentence says which.
pub fn convolve(
    c: &Convolution,
    operands: &Operands<'_>,
    store: &mut dyn FnMut(usize, f64),
) -> Result<(), String> {
    let [first, second, (_, result)] = c.operands();
    let mut sums = vec![0.0; result.len() as usize];
    for_each_product(c, |x, w, y| {
        let [from, by, to] = match c.direction {
            Direction::Forward => [x, w, y],
            Direction::Data => [y, w, x],
            Direction::Filter => [x, y, w],
        };
        let product = read(first, operands.a, from)? * read(second, operands.b, by)?;
        sums[position(result, to)] += product;
        Ok(())
    })?;
    for_each(result.sizes, |at| {
        let sum = sums[position(result, at)];
        let value = match (c.finish, operands.bias) {
            (Finish::Nothing, _) => sum,
            (finish, Some(bias)) => {
                let bias = bias.get(at[1] as usize);
                let bias = bias.ok_or_else(|| format!("there is no bias for channel {}", at[1]))?;
                let is_cut = finish == Finish::BiasRelu && sum + bias < 0.0;
                if is_cut { 0.0 } else { sum + bias }
            }
            (_, None) => return Err("there is no bias".to_string()),
        };
        store(result.place(at) as usize, result.dtype.round(value));
        Ok(())
    })
}

/// The places in x, w and y of every product of an image's element and a tap.
fn for_each_product(
    c: &Convolution,
    mut f: impl FnMut([i64; 4], [i64; 4], [i64; 4]) -> Result<(), String>,
) -> Result<(), String> {
    let [n_filters, of_group, r, s] = c.w.sizes;
    let filters_of_group = n_filters / c.groups;
    for_each(c.y.sizes, |y| {
        let [n, k, p, q] = y;
        for_each([1, of_group, r, s], |[_, channel, r, s]| {
            let at = |d: usize, o: i64, t: i64| {
                let at = o * c.strides[d] + t * c.dilations[d] - c.pads[0][d];
                (0..c.x.sizes[2 + d]).contains(&at).then_some(at)
            };
            match (at(0, p, r), at(1, q, s)) {
                (Some(h), Some(w)) => {
                    let of_image = k / filters_of_group * of_group + channel;
                    f([n, of_image, h, w], [k, channel, r, s], y)
                }
                _ => Ok(()),
            }
        })
    })
}

/// Every index of an array of these sizes, the last counting fastest.
pub(super) fn for_each(
    sizes: [i64; 4],
    mut f: impl FnMut([i64; 4]) -> Result<(), String>,
) -> Result<(), String> {
    for i in 0..sizes[0] {
        for j in 0..sizes[1] {
            for k in 0..sizes[2] {
                for l in 0..sizes[3] {
                    f([i, j, k, l])?;
                }
            }
        }
    }
    Ok(())
}

/// Counted in the order of [`for_each`].
fn position(array: &Array, at: [i64; 4]) -> usize {
    let count = |all: i64, (i, n): (&i64, &i64)| all * n + i;
    at.iter().zip(&array.sizes).fold(0, count) as usize
}

fn read((name, array): (&str, &Array), all: &[f64], at: [i64; 4]) -> Result<f64, String> {
    let place = array.place(at);
    let value = usize::try_from(place).ok().and_then(|place| all.get(place));
    value.copied().ok_or_else(|| {
        format!(
            "element {at:?} of {name} is not in its buffer of {} elements",
            all.len()
        )
    })
}
