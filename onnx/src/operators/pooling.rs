//! Pooling by windows and over whole images.

use super::real::{Real, in_real};
use super::threads;
use super::windows::{Placed, infer_pooled, pooled};
use super::{Call, Inference, Operator};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::{Tensor, Values, room};
use graph::SymExpr;
use std::sync::atomic::{AtomicBool, Ordering};

pub const ROWS: &[Operator] = &[
    Operator::new("MaxPool", infer_max, max_pool),
    Operator::new("AveragePool", infer_windows, |call| {
        real_pool(call, Kind::Average)
    }),
    Operator::new("LpPool", infer_windows, |call| real_pool(call, Kind::Norm)),
    Operator::new("GlobalAveragePool", infer_global, |call| {
        global(call, Kind::Average)
    }),
    Operator::new("GlobalMaxPool", infer_global, global_max),
    Operator::new("GlobalLpPool", infer_global, |call| {
        global(call, Kind::Norm)
    }),
];

/// Windows whose largest elements are searched together, so that their positions take little memory.
const BLOCK: usize = 1 << 14;
/// The position of no element.
const NONE: usize = usize::MAX;

#[derive(Clone, Copy)]
enum Kind {
    Average,
    Norm,
}

fn infer_windows(cx: &Inference) -> Option<Vec<Fact>> {
    cx.like_first(infer_pooled(cx))
}

fn infer_max(cx: &Inference) -> Option<Vec<Fact>> {
    let shape = infer_pooled(cx);
    let mut outputs = cx.like_first(shape.clone())?;
    if cx.node.output.len() > 1 {
        outputs.push(Fact::new(Some(Element::I64), shape));
    }
    Some(outputs)
}

fn infer_global(cx: &Inference) -> Option<Vec<Fact>> {
    let mut shape = cx.shape(0)?.to_vec();
    let spatial = shape.get_mut(2..)?;
    spatial.fill(SymExpr::constant(1));
    cx.like_first(Some(shape))
}

/// Calls `tap` with the position in the image of every tap of window `at` that is inside it.
fn taps(w: &Placed, at: usize, mut tap: impl FnMut(usize)) {
    let n = w.input.len();
    let mut origin = vec![0; n];
    let mut rest = at;
    for d in (0..n).rev() {
        origin[d] = rest % w.output[d];
        rest /= w.output[d];
    }
    'taps: for k in 0..w.window_len() {
        let (mut position, mut step, mut rest) = (0, 1, k);
        for d in (0..n).rev() {
            let p = w.position(d, origin[d], rest % w.kernel[d]);
            rest /= w.kernel[d];
            if !(0..w.input[d] as i64).contains(&p) {
                continue 'taps;
            }
            position += p as usize * step;
            step *= w.input[d];
        }
        tap(position);
    }
}

fn output(call: &Call, w: &Placed) -> Result<Vec<usize>, String> {
    let mut shape = call.input(0)?.shape[..2].to_vec();
    shape.extend(&w.output);
    Ok(shape)
}

fn max_pool(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let w = pooled(call)?;
    match &*x.values {
        Values::I8(v) => max_of(call, &w, v, |a, b| a > b, Values::I8),
        Values::U8(v) => max_of(call, &w, v, |a, b| a > b, Values::U8),
        Values::F32(v) => max_of(call, &w, v, |a, b| a > b || a.is_nan(), Values::F32),
        Values::F64(v) => max_of(call, &w, v, |a, b| a > b || a.is_nan(), Values::F64),
        Values::F16(v) => max_of(call, &w, v, |a, b| a > b || a.is_nan(), Values::F16),
        Values::BF16(v) => max_of(call, &w, v, |a, b| a > b || a.is_nan(), Values::BF16),
        other => Err(format!("it is not defined on {}", other.element())),
    }
}

/// `above(a, b)`: whether `a` takes the place of `b`.
fn max_of<T: Copy + Send + Sync>(
    call: &Call,
    w: &Placed,
    x: &[T],
    above: impl Fn(T, T) -> bool + Sync,
    values: fn(Vec<T>) -> Values,
) -> Result<Vec<Tensor>, String> {
    let shape = output(call, w)?;
    let image: usize = w.input.iter().product();
    let n_windows = w.n_windows();
    let n = room(&shape)?;
    if image == 0 || n_windows == 0 {
        return Err(format!(
            "it is not defined on an input of sizes {:?}",
            w.input
        ));
    }
    let least = if n.saturating_mul(w.window_len()) < 1 << 15 {
        usize::MAX
    } else {
        0
    };
    let in_three = w.in_three();
    let best_of = |channel: usize, first: usize, best: &mut [usize]| {
        let x = &x[channel * image..][..image];
        best.fill(NONE);
        match &in_three {
            Some(w) => max_windows(w, x, &above, first, best),
            None => {
                for (at, best) in best.iter_mut().enumerate() {
                    taps(w, first + at, |p| {
                        if *best == NONE || above(x[p], x[*best]) {
                            *best = p;
                        }
                    });
                }
            }
        }
    };
    let empty = || "a window covers nothing but padding".to_string();
    if call.node.output.len() < 2 {
        let mut y = x.first().map_or_else(Vec::new, |any| vec![*any; n]);
        let is_whole = AtomicBool::new(true);
        threads::runs(&mut y, n_windows, least, |channel, y| {
            let mut best = vec![NONE; y.len().min(BLOCK)];
            for (block, y) in y.chunks_mut(BLOCK).enumerate() {
                let best = &mut best[..y.len()];
                best_of(channel, block * BLOCK, best);
                for (y, best) in y.iter_mut().zip(best) {
                    match x[channel * image..].get(*best) {
                        Some(x) => *y = *x,
                        None => is_whole.store(false, Ordering::Relaxed),
                    }
                }
            }
        });
        let is_whole = is_whole.load(Ordering::Relaxed);
        return match is_whole {
            true => Ok(vec![Tensor::new(&shape, values(y))]),
            false => Err(empty()),
        };
    }
    let mut best = vec![NONE; n];
    threads::runs(&mut best, n_windows, least, |channel, best| {
        for (block, best) in best.chunks_mut(BLOCK).enumerate() {
            best_of(channel, block * BLOCK, best);
        }
    });
    if best.contains(&NONE) {
        return Err(empty());
    }
    let base = |n: usize| n / n_windows * image;
    let y = best.iter().enumerate();
    let y = y.map(|(n, best)| x[base(n) + best]).collect();
    let column_major = call.attributes.flag("storage_order");
    // The standard library makes this list in the memory of `best`.
    let indices = best.into_iter().enumerate().map(|(n, best)| {
        let best = match column_major {
            true => transposed(&w.input, best),
            false => best,
        };
        (base(n) + best) as i64
    });
    let indices = Values::I64(indices.collect());
    Ok(vec![
        Tensor::new(&shape, values(y)),
        Tensor::new(&shape, indices),
    ])
}

/// The first largest element of each window from number `first` on, by its position in the image.
fn max_windows<T: Copy>(
    w: &Placed,
    x: &[T],
    above: &impl Fn(T, T) -> bool,
    first: usize,
    best: &mut [usize],
) {
    let is_in = |p: i64, d: usize| (0..w.input[d] as i64).contains(&p);
    let line_len = w.output[2];
    let mut done = 0;
    while done < best.len() {
        // The windows of the current line that are still to do.
        let (line, from) = ((first + done) / line_len, (first + done) % line_len);
        let n = (line_len - from).min(best.len() - done);
        let best = &mut best[done..done + n];
        done += n;
        let (o0, o1) = (line / w.output[1], line % w.output[1]);
        for tap in 0..w.window_len() {
            let p0 = w.position(0, o0, tap / (w.kernel[1] * w.kernel[2]));
            let p1 = w.position(1, o1, tap / w.kernel[2] % w.kernel[1]);
            let inside = w.inside(2, tap % w.kernel[2]);
            let inside = inside.start.max(from)..inside.end.min(from + n);
            if !is_in(p0, 0) || !is_in(p1, 1) || inside.is_empty() {
                continue;
            }
            let line = (p0 as usize * w.input[1] + p1 as usize) * w.input[2];
            let mut p = line + w.position(2, inside.start, tap % w.kernel[2]) as usize;
            for best in &mut best[inside.start - from..inside.end - from] {
                if *best == NONE || above(x[p], x[*best]) {
                    *best = p;
                }
                p += w.strides[2];
            }
        }
    }
}

/// The position of row-major position `at` when the first dimension varies fastest.
fn transposed(sizes: &[usize], mut at: usize) -> usize {
    let mut step: usize = sizes.iter().product();
    let mut to = 0;
    for size in sizes.iter().rev() {
        step /= size;
        to += at % size * step;
        at /= size;
    }
    to
}

fn real_pool(call: &Call, kind: Kind) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let w = pooled(call)?;
    let y = in_real!(x.element(), R => {
        let y = windows_of::<R>(call, &w, &R::read(x)?, kind)?;
        R::tensor(x.element(), &output(call, &w)?, y)
    });
    y.map(|y| vec![y])
}

fn norm(call: &Call) -> f64 {
    call.attributes.int("p").unwrap_or(2) as f64
}

fn windows_of<R: Real>(call: &Call, w: &Placed, x: &[R], kind: Kind) -> Result<Vec<R>, String> {
    let image: usize = w.input.iter().product();
    let mut y = vec![R::zero(); output(call, w)?.iter().product()];
    let n_windows = w.n_windows();
    let padding = call.attributes.flag("count_include_pad");
    let least = if y.len() * w.window_len() < 1 << 15 {
        usize::MAX
    } else {
        0
    };
    let p = norm(call);
    threads::runs(&mut y, n_windows, least, |at, y| {
        let x = &x[at * image..][..image];
        for (at, y) in y.iter_mut().enumerate() {
            let mut sum = 0.0;
            match kind {
                Kind::Average => taps(w, at, |n| sum += x[n].wide()),
                Kind::Norm => taps(w, at, |n| sum += x[n].wide().abs().powf(p)),
            }
            *y = R::of(match kind {
                Kind::Average => sum / counted(w, at, padding) as f64,
                Kind::Norm => sum.powf(p.recip()),
            });
        }
    });
    Ok(y)
}

/// Elements that window `at` averages over: with `padding`, those before and after the input too, but
/// never beyond the padding.
fn counted(w: &Placed, at: usize, padding: bool) -> usize {
    let mut count = 1;
    let mut rest = at;
    for d in (0..w.input.len()).rev() {
        let window = rest % w.output[d];
        rest /= w.output[d];
        let (low, high) = if padding {
            (w.low[d], w.high[d])
        } else {
            (0, 0)
        };
        let dilation = w.dilations[d] as i64;
        let taps_before = |end: i64| {
            let n = (end - w.position(d, window, 0) + dilation - 1).div_euclid(dilation);
            n.clamp(0, w.kernel[d] as i64) as usize
        };
        count *= taps_before(w.input[d] as i64 + high).saturating_sub(taps_before(-low));
    }
    count
}

fn images(x: &Tensor) -> Result<(Vec<usize>, usize), String> {
    let spatial = x.shape.get(2..).ok_or("its input has no channels")?;
    let mut shape = x.shape.clone();
    shape[2..].fill(1);
    let image = spatial.iter().product();
    match image {
        0 => Err(format!(
            "images of sizes {spatial:?} have no elements to pool"
        )),
        _ => Ok((shape, image)),
    }
}

fn global(call: &Call, kind: Kind) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let (shape, image) = images(x)?;
    let p = norm(call);
    let y = in_real!(x.element(), R => {
        let v = R::read(x)?;
        let y = v.chunks(image).map(|x| R::of(match kind {
            Kind::Average => x.iter().map(|x| x.wide()).sum::<f64>() / image as f64,
            Kind::Norm => x.iter().map(|x| x.wide().abs().powf(p)).sum::<f64>().powf(p.recip()),
        }));
        R::tensor(x.element(), &shape, y.collect())
    });
    y.map(|y| vec![y])
}

fn global_max(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let (shape, image) = images(x)?;
    let y = in_real!(x.element(), R => {
        let v = R::read(x)?;
        let above = |a: R, b: R| if b > a || b.is_nan() { b } else { a };
        let y = v.chunks(image).map(|x| x.iter().copied().fold(R::of(f64::NEG_INFINITY), above));
        R::tensor(x.element(), &shape, y.collect())
    });
    y.map(|y| vec![y])
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, Tensor, Values};
    use crate::attributes::Attributes;
    use crate::operators::{Call, find};
    use crate::proto::{AttributeProto, NodeProto, attribute_type};

    fn ints(name: &str, ints: &[i64]) -> AttributeProto {
        AttributeProto {
            name: name.into(),
            r#type: attribute_type::INTS,
            ints: ints.to_vec(),
            ..Default::default()
        }
    }

    /// What an operator gives for `x` with windows of size `kernel` in every dimension.
    fn pooled(
        operator: &str,
        n_outputs: usize,
        kernel: i64,
        stride: i64,
        x: Tensor,
    ) -> Vec<Tensor> {
        let n = x.shape.len() - 2;
        let node = NodeProto {
            op_type: operator.into(),
            input: vec!["x".into()],
            output: (0..n_outputs).map(|n| format!("y{n}")).collect(),
            attribute: vec![
                ints("kernel_shape", &vec![kernel; n]),
                ints("strides", &vec![stride; n]),
                ints("pads", &vec![1; 2 * n]),
            ],
            ..Default::default()
        };
        let call = Call {
            node: &node,
            attributes: Attributes::new(&node),
            opset: 22,
            inputs: &[Some(x)],
            widened: false,
        };
        let row = find(&node).expect("a known operator");
        row.run(&call, 1 << 30).expect("outputs")
    }

    /// Numbers without an order.
    fn numbers(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i * 7919 % 10007) as f32).collect()
    }

    #[test]
    fn windows_in_several_blocks_have_their_largest_elements() {
        // The last line of the second shape is cut by the end of a block.
        for shape in [vec![1, 2, 2 * BLOCK + 3], vec![1, 1, 50, 1000]] {
            let x = Tensor::new(&shape, Values::F32(numbers(shape.iter().product())));
            let lines = x.shape[2..].to_vec();
            let (rows, columns) = match lines[..] {
                [columns] => (1, columns),
                _ => (lines[0], lines[1]),
            };
            let v = x.to_f64().expect("numbers");
            let image = rows * columns;
            let near = |at: usize, n: usize| at.saturating_sub(1)..(at + 2).min(n);
            let largest = |at: usize| {
                let (channel, r, c) = (at / image, at % image / columns, at % columns);
                let taps = near(r, rows).flat_map(|r| near(c, columns).map(move |c| (r, c)));
                let taps = taps.map(|(r, c)| channel * image + r * columns + c);
                taps.fold(None, |best: Option<usize>, p| match best {
                    Some(best) if v[p] <= v[best] => Some(best),
                    _ => Some(p),
                })
            };
            let expected: Vec<usize> = (0..v.len()).filter_map(largest).collect();
            for n_outputs in [1, 2] {
                let found = pooled("MaxPool", n_outputs, 3, 1, x.clone());
                let y = expected.iter().map(|p| v[*p]).collect::<Vec<f64>>();
                assert_eq!(found[0].to_f64().expect("numbers"), y);
                if let Some(indices) = found.get(1) {
                    let expected: Vec<i64> = expected.iter().map(|p| *p as i64).collect();
                    assert_eq!(indices.to_i64().expect("integers"), expected);
                }
            }
        }
    }

    #[test]
    fn images_without_channels_give_no_maxima() {
        let x = Tensor::new(&[1, 0, 4, 4], Values::F32(Vec::new()));
        for n_outputs in [1, 2] {
            let found = pooled("MaxPool", n_outputs, 3, 2, x.clone());
            assert_eq!(found[0].shape, [1, 0, 2, 2]);
        }
    }

    #[test]
    fn an_average_is_over_the_elements_inside() {
        let x = Tensor::new(&[1, 1, 5], Values::F32(vec![1.0, 2.0, 3.0, 4.0, 5.0]));
        let found = pooled("AveragePool", 1, 3, 2, x);
        assert_eq!(found[0].to_f64(), Some(vec![1.5, 3.0, 4.5]));
    }
}
