//! Pooling by windows and over whole images.

use super::real::{Real, in_real};
use super::threads;
use super::windows::{Placed, infer_pooled, pooled};
use super::{Call, Inference, Operator};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::{Tensor, Values};
use graph::SymExpr;

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
    let (n_windows, n_taps) = (w.n_windows(), w.window_len());
    if image == 0 || n_windows == 0 {
        return Err(format!(
            "it is not defined on an input of sizes {:?}",
            w.input
        ));
    }
    let mut best = vec![usize::MAX; shape.iter().product()];
    let least = if best.len() * n_taps < 1 << 15 {
        usize::MAX
    } else {
        0
    };
    let in_three = w.in_three();
    threads::runs(&mut best, n_windows, least, |at, best| {
        let x = &x[at * image..][..image];
        match &in_three {
            Some(w) => max_windows(w, x, &above, best),
            None => {
                for (at, best) in best.iter_mut().enumerate() {
                    taps(w, at, |p| {
                        if *best == usize::MAX || above(x[p], x[*best]) {
                            *best = p;
                        }
                    });
                }
            }
        }
    });
    if best.contains(&usize::MAX) {
        return Err("a window covers nothing but padding".to_string());
    }
    let at = |n: usize| n / n_windows * image + best[n];
    let y = (0..best.len()).map(|n| x[at(n)]).collect();
    let mut outputs = vec![Tensor::new(&shape, values(y))];
    if call.node.output.len() > 1 {
        let column_major = call.attributes.flag("storage_order");
        let indices = (0..best.len()).map(|n| {
            let base = n / n_windows * image;
            base as i64
                + if column_major {
                    transposed(&w.input, best[n])
                } else {
                    best[n]
                } as i64
        });
        outputs.push(Tensor::new(&shape, Values::I64(indices.collect())));
    }
    Ok(outputs)
}

/// The first largest element of each window, by its position in the image.
fn max_windows<T: Copy>(w: &Placed, x: &[T], above: &impl Fn(T, T) -> bool, best: &mut [usize]) {
    let is_in = |p: i64, d: usize| (0..w.input[d] as i64).contains(&p);
    for (line, best) in best.chunks_mut(w.output[2]).enumerate() {
        let (o0, o1) = (line / w.output[1], line % w.output[1]);
        for tap in 0..w.window_len() {
            let p0 = w.position(0, o0, tap / (w.kernel[1] * w.kernel[2]));
            let p1 = w.position(1, o1, tap / w.kernel[2] % w.kernel[1]);
            let inside = w.inside(2, tap % w.kernel[2]);
            if !is_in(p0, 0) || !is_in(p1, 1) || inside.is_empty() {
                continue;
            }
            let line = (p0 as usize * w.input[1] + p1 as usize) * w.input[2];
            let mut p = line + w.position(2, inside.start, tap % w.kernel[2]) as usize;
            for best in &mut best[inside] {
                if *best == usize::MAX || above(x[p], x[*best]) {
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
    let counts: Vec<usize> = (0..n_windows).map(|at| counted(w, at, padding)).collect();
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
                Kind::Average => sum / counts[at] as f64,
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
        let inside = |k: &usize| {
            let p = w.position(d, window, *k);
            (-low..w.input[d] as i64 + high).contains(&p)
        };
        count *= (0..w.kernel[d]).filter(inside).count();
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
