//! Sampling at computed positions: GridSample and AffineGrid.

use super::real::{Real, in_real};
use super::{Call, Inference, Operator, threads};
use crate::fact::Fact;
use graph::SymExpr;

pub const ROWS: &[Operator] = &[
    Operator::new("GridSample", infer_sample, |call| {
        let element = call.input(0)?.element();
        in_real!(element, R => {
            let (shape, y) = sample::<R>(call)?;
            R::tensor(element, &shape, y)
        })
        .map(|y| vec![y])
    }),
    Operator::new("AffineGrid", infer_grid, |call| {
        let element = call.input(0)?.element();
        in_real!(element, R => {
            let (shape, y) = grid::<R>(call)?;
            R::tensor(element, &shape, y)
        })
        .map(|y| vec![y])
    }),
];

fn infer_sample(cx: &Inference) -> Option<Vec<Fact>> {
    let (x, grid) = (cx.shape(0)?, cx.shape(1)?);
    let mut shape = x.get(..2)?.to_vec();
    shape.extend_from_slice(grid.get(1..grid.len().checked_sub(1)?)?);
    cx.like_first(Some(shape))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Outside {
    Zeros,
    Border,
    Reflection,
}

struct Method {
    outside: Outside,
    mode: Mode,
    align_corners: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Nearest,
    Linear,
    Cubic,
}

impl Method {
    fn of(call: &Call) -> Result<Method, String> {
        let mode = match call.attributes.text("mode").unwrap_or("linear") {
            "nearest" => Mode::Nearest,
            "linear" | "bilinear" => Mode::Linear,
            "cubic" | "bicubic" => Mode::Cubic,
            other => return Err(format!("the mode `{other}` is not known")),
        };
        let outside = match call.attributes.text("padding_mode").unwrap_or("zeros") {
            "zeros" => Outside::Zeros,
            "border" => Outside::Border,
            "reflection" => Outside::Reflection,
            other => return Err(format!("the padding_mode `{other}` is not known")),
        };
        Ok(Method {
            outside,
            mode,
            align_corners: call.attributes.flag("align_corners"),
        })
    }

    fn borders(&self, size: usize) -> (f64, f64) {
        match self.align_corners {
            true => (0.0, size as f64 - 1.0),
            false => (-0.5, size as f64 - 0.5),
        }
    }

    /// Elements along a dimension of `size` and their weights for the normalized coordinate `at`.
    fn taps(&self, at: f64, size: usize) -> Vec<(usize, f64)> {
        let n = size as f64;
        let mut x = match self.align_corners {
            true => (at + 1.0) / 2.0 * (n - 1.0),
            false => ((at + 1.0) * n - 1.0) / 2.0,
        };
        if self.mode == Mode::Nearest {
            x = x.round_ties_even();
        }
        let (low, high) = self.borders(size);
        if x < low || x > high {
            x = match self.outside {
                Outside::Zeros => x,
                // Cubic windows stay where they are; each of their elements is clamped.
                Outside::Border if self.mode == Mode::Cubic => x,
                Outside::Border => x.clamp(0.0, n - 1.0),
                Outside::Reflection => reflected(x, low, high),
            };
        }
        let base = x.floor();
        let t = x - base;
        let weights: Vec<(f64, f64)> = match self.mode {
            Mode::Nearest => vec![(x, 1.0)],
            Mode::Linear => vec![(base, 1.0 - t), (base + 1.0, t)],
            Mode::Cubic => (-1..3)
                .map(|k| (base + f64::from(k), cubic(t - f64::from(k))))
                .collect(),
        };
        let inside = |(x, weight): (f64, f64)| {
            let x = match self.outside {
                _ if (0.0..n).contains(&x) => x,
                Outside::Border => x.clamp(0.0, n - 1.0),
                Outside::Reflection => reflected(x, low, high).trunc().clamp(0.0, n - 1.0),
                Outside::Zeros => return None,
            };
            (!x.is_nan()).then_some((x as usize, weight))
        };
        weights.into_iter().filter_map(inside).collect()
    }
}

fn cubic(x: f64) -> f64 {
    let (a, x) = (-0.75, x.abs());
    if x <= 1.0 {
        ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    } else {
        ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
    }
}

/// Reflected at the nearer border until it is inside.
fn reflected(x: f64, low: f64, high: f64) -> f64 {
    let range = high - low;
    if range <= 0.0 {
        return low.max(0.0);
    }
    let past = if x < low {
        low - x
    } else if x > high {
        x - high
    } else {
        return x;
    };
    let (turns, rest) = ((past / range).trunc(), past % range);
    match (x < low) == (turns % 2.0 == 0.0) {
        true => low + rest,
        false => high - rest,
    }
}

fn sample<R: Real>(call: &Call) -> Result<(Vec<usize>, Vec<R>), String> {
    let (x, grid) = (call.input(0)?, call.input(1)?);
    let method = Method::of(call)?;
    let n = x.shape.len().saturating_sub(2);
    let fits = n > 0
        && grid.shape.len() == n + 2
        && grid.shape[0] == x.shape[0]
        && grid.shape[n + 1] == n
        && x.shape[2..].iter().all(|s| *s > 0);
    if !fits {
        return Err(format!(
            "a grid of sizes {:?} does not fit {:?}",
            grid.shape, x.shape
        ));
    }
    let spatial = &x.shape[2..];
    let (vx, vg) = (R::read(x)?, R::read(grid)?);
    let (channels, image) = (x.shape[1], spatial.iter().product::<usize>());
    let points: usize = grid.shape[1..=n].iter().product();
    let mut shape = x.shape[..2].to_vec();
    shape.extend_from_slice(&grid.shape[1..=n]);
    let mut y = vec![R::zero(); shape.iter().product()];
    threads::runs(&mut y, channels * points, 1 << 12, |batch, y| {
        for point in 0..points {
            let at = &vg[(batch * points + point) * n..][..n];
            // Positions in an image with weights; a grid names the last dimension first.
            let mut taps = vec![(0, 1.0)];
            for (d, size) in spatial.iter().enumerate() {
                let own = method.taps(at[n - 1 - d].wide(), *size);
                let both = |(p, w): &(usize, f64)| -> Vec<(usize, f64)> {
                    own.iter().map(|(q, v)| (p * size + q, w * v)).collect()
                };
                taps = taps.iter().flat_map(both).collect();
            }
            for c in 0..channels {
                let x = &vx[(batch * channels + c) * image..][..image];
                let sum: f64 = taps.iter().map(|(p, w)| x[*p].wide() * w).sum();
                y[c * points + point] = R::of(sum);
            }
        }
    });
    Ok((shape, y))
}

fn infer_grid(cx: &Inference) -> Option<Vec<Fact>> {
    let Some(size) = cx.ints(1) else {
        // Batch, spatial dimensions and coordinates: as many dimensions as the list of sizes has entries.
        return cx.like_first(cx.shape_as_long_as(1));
    };
    let spatial = size.get(2..)?;
    let mut shape = vec![size[0].clone()];
    shape.extend_from_slice(spatial);
    shape.push(SymExpr::from(spatial.len()));
    cx.like_first(Some(shape))
}

fn grid<R: Real>(call: &Call) -> Result<(Vec<usize>, Vec<R>), String> {
    let theta = call.input(0)?;
    let align_corners = call.attributes.flag("align_corners");
    let (sizes, _) = crate::tensor::sizes(&call.ints(1)?)?;
    let spatial = sizes.get(2..).ok_or("its size has no channels")?;
    let n = spatial.len();
    if theta.shape != [sizes[0], n, n + 1] {
        return Err(format!(
            "a transform of sizes {:?} does not fit {sizes:?}",
            theta.shape
        ));
    }
    let v = R::read(theta)?;
    let points: usize = spatial.iter().product();
    let mut y = Vec::with_capacity(sizes[0] * points * n);
    for batch in 0..sizes[0] {
        for point in 0..points {
            // Coordinates, the last dimension first, then 1.
            let mut at = Vec::with_capacity(n + 1);
            let mut rest = point;
            for size in spatial.iter().rev() {
                let (i, size) = ((rest % size) as f64, *size as f64);
                rest /= size as usize;
                at.push(match align_corners {
                    true if size == 1.0 => -1.0,
                    true => 2.0 * i / (size - 1.0) - 1.0,
                    false => (2.0 * i + 1.0) / size - 1.0,
                });
            }
            at.push(1.0);
            for d in 0..n {
                let row = &v[(batch * n + d) * (n + 1)..][..=n];
                let sum: f64 = row.iter().zip(&at).map(|(a, b)| a.wide() * b).sum();
                y.push(R::of(sum));
            }
        }
    }
    let mut shape = vec![sizes[0]];
    shape.extend_from_slice(spatial);
    shape.push(n);
    Ok((shape, y))
}
