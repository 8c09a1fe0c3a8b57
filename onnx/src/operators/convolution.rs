//! Convolutions: Conv and ConvInteger.
//!
//! A product of the weights with what the windows read, which is copied block by block as the product
//! packs it (`blocks.rs`); a window over one channel is a loop along rows.

use super::blocks::{self, Right, pack_row};
use super::products::{LEAST, centered, matrix, matrix_mut};
use super::real::{Real, in_real};
use super::threads;
use super::windows::{Placed, Windows};
use super::{Call, Inference, Operator};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::{Tensor, Values};
use graph::SymExpr;
use ndarray::{ArrayViewMut2, Axis};
use std::ops::Range;

pub const ROWS: &[Operator] = &[
    Operator::new("Conv", infer_conv, conv),
    Operator::new("ConvInteger", infer_integer, conv_integer),
];

/// Sizes of a convolution's output, from its input's and its weights'.
pub fn output_shape(cx: &Inference, x: usize, w: usize) -> Option<Vec<SymExpr>> {
    let (x, w) = (cx.shape(x)?, cx.shape(w)?);
    if x.len() != w.len() {
        return None;
    }
    let windows = match Windows::of_attribute(cx.attributes) {
        Ok(windows) => windows,
        Err(_) => Windows::of_weights(cx.attributes, w).ok()?,
    };
    let mut shape = vec![x.first()?.clone(), w.first()?.clone()];
    shape.extend(windows.output(x.get(2..)?)?);
    Some(shape)
}

fn infer_conv(cx: &Inference) -> Option<Vec<Fact>> {
    cx.like_first(output_shape(cx, 0, 1))
}

fn infer_integer(cx: &Inference) -> Option<Vec<Fact>> {
    Some(vec![Fact::new(Some(Element::I32), output_shape(cx, 0, 1))])
}

fn conv(call: &Call) -> Result<Vec<Tensor>, String> {
    let element = call.input(0)?.element();
    let y = in_real!(element, R => {
        let (shape, y) = real_conv::<R>(call)?;
        R::tensor(element, &shape, y)
    });
    y.map(|y| vec![y])
}

/// The sizes, groups and windows of a convolution.
pub struct ConvolutionShape {
    batch: usize,
    groups: usize,
    /// Channels of the input and of the output in a group.
    channels: usize,
    filters: usize,
    windows: Placed,
    /// Sizes of the output.
    pub shape: Vec<usize>,
}

impl ConvolutionShape {
    /// The convolution of an input and weights of those sizes.
    ///
    /// # Errors
    /// A sentence: sizes or attributes that do not fit.
    pub fn new(call: &Call, x: &[usize], w: &[usize]) -> Result<ConvolutionShape, String> {
        let groups = call.attributes.int("group").unwrap_or(1);
        let groups = usize::try_from(groups).ok().filter(|g| *g > 0);
        let groups = groups.ok_or("its group is not positive")?;
        let fits = x.len() == w.len()
            && x.len() >= 2
            && w[1].checked_mul(groups) == Some(x[1])
            && w[0].is_multiple_of(groups);
        if !fits {
            return Err(format!(
                "weights of sizes {w:?} in {groups} groups do not fit an input of sizes {x:?}"
            ));
        }
        let weights: Vec<SymExpr> = w.iter().map(|n| SymExpr::from(*n)).collect();
        let windows = Windows::of_weights(call.attributes, &weights)?.placed(&x[2..])?;
        let mut shape = vec![x[0], w[0]];
        shape.extend(&windows.output);
        Ok(ConvolutionShape {
            batch: x[0],
            groups,
            channels: w[1],
            filters: w[0] / groups,
            windows: windows
                .in_three()
                .ok_or("more than three spatial dimensions are not supported")?,
            shape,
        })
    }

    /// Rows of copied taps: channels of a group times elements of a window.
    fn taps(&self) -> usize {
        self.channels * self.windows.window_len()
    }

    /// Whether windows are single elements, each read once and in order.
    fn is_product(&self) -> bool {
        let w = &self.windows;
        w.window_len() == 1 && w.output == w.input && w.low == [0; 3]
    }
}

/// A node like Conv: sizes and elements of its output, bias added.
///
/// # Errors
/// A sentence: sizes or types that do not fit.
pub fn real_conv<R: Real>(call: &Call) -> Result<(Vec<usize>, Vec<R>), String> {
    let (x, w) = (call.input(0)?, call.input(1)?);
    let plan = ConvolutionShape::new(call, &x.shape, &w.shape)?;
    let (vx, vw) = (R::read(x)?, R::read(w)?);
    let mut y = vec![R::zero(); plan.shape.iter().product()];
    convolve(&plan, &vx, &vw, &mut y)?;
    if let Some(bias) = call.optional(2) {
        let bias = R::read(bias)?;
        if bias.len() != plan.shape[1] {
            return Err(format!("a bias of {} elements does not fit", bias.len()));
        }
        threads::runs(&mut y, plan.windows.n_windows(), 1 << 16, |at, y| {
            let bias = bias[at % bias.len()];
            y.iter_mut().for_each(|y| *y += bias);
        });
    }
    Ok((plan.shape, y))
}

fn convolve<R: Real>(plan: &ConvolutionShape, x: &[R], w: &[R], y: &mut [R]) -> Result<(), String> {
    if y.is_empty() || plan.taps() == 0 {
        return Ok(());
    }
    if plan.channels == 1 && plan.windows.window_len() > 1 {
        depthwise(plan, x, w, y);
        return Ok(());
    }
    let n_windows = plan.windows.n_windows();
    let in_len = plan.channels * plan.windows.input.iter().product::<usize>();
    let (taps, filters) = (plan.taps(), plan.filters);
    // With few windows, each thread takes some filters and copies all windows.
    let by_filters = n_windows < LEAST_WINDOWS;
    let n_threads = match plan.batch * plan.groups * filters * taps * n_windows {
        n if n < LEAST => 1,
        _ => threads::count(),
    };
    let share = |n: usize| n.div_ceil(n_threads).next_multiple_of(16);
    let mut pieces: Vec<Piece<R>> = Vec::new();
    for (at, y) in y.chunks_mut(filters * n_windows).enumerate() {
        let all = matrix_mut(y, filters, n_windows)?;
        let (axis, size) = match by_filters {
            true => (Axis(0), share(filters)),
            false => (Axis(1), share(n_windows)),
        };
        let mut rest = all;
        let mut first = 0;
        while rest.len_of(axis) > size {
            let (y, more) = rest.split_at(axis, size);
            pieces.push(Piece { at, first, y });
            first += size;
            rest = more;
        }
        pieces.push(Piece { at, first, y: rest });
    }
    threads::each(
        pieces.into_iter(),
        || (),
        |(), mut piece| {
            let (filter, window) = match by_filters {
                true => (piece.first, 0),
                false => (0, piece.first),
            };
            let x = &x[piece.at * in_len..][..in_len];
            let from = piece.at % plan.groups * filters + filter;
            let n_filters = piece.y.nrows();
            let weights = &w[from * taps..][..n_filters * taps];
            // The slice has exactly that length, so this never fails.
            let Ok(weights) = matrix(weights, n_filters, taps) else {
                return;
            };
            let mut taps = Taps {
                plan,
                x,
                window,
                row: Vec::new(),
            };
            blocks::multiply(weights, &mut taps, &mut piece.y);
        },
    );
    Ok(())
}

/// Number of windows from which on threads share the windows; below it they share the filters.
const LEAST_WINDOWS: usize = 256;

/// Some filters, or some windows, of one group of one image.
struct Piece<'y, R> {
    /// Number of the image times the number of groups, plus the group.
    at: usize,
    first: usize,
    y: ArrayViewMut2<'y, R>,
}

/// What the windows of one group of one image read: a column for each window from `window` on.
struct Taps<'a, R> {
    plan: &'a ConvolutionShape,
    x: &'a [R],
    window: usize,
    row: Vec<R>,
}

impl<R: Real> Right<R> for Taps<'_, R> {
    #[inline(always)]
    fn pack(&mut self, rows: Range<usize>, columns: Range<usize>, width: usize, panels: &mut [R]) {
        let first = self.window + columns.start;
        if self.plan.is_product() {
            let n_windows = self.plan.windows.n_windows();
            for (at, tap) in rows.clone().enumerate() {
                let row = &self.x[tap * n_windows + first..][..columns.len()];
                pack_row(row, at, rows.len(), width, panels);
            }
            return;
        }
        self.row.resize(columns.len(), R::zero());
        for (at, tap) in rows.clone().enumerate() {
            copy_tap(self.plan, self.x, tap, first, &mut self.row);
            pack_row(&self.row, at, rows.len(), width, panels);
        }
    }
}

/// What tap `tap` of a group's taps reads in windows `first..first + row.len()`; zero outside.
fn copy_tap<R: Copy + num_traits::Zero>(
    plan: &ConvolutionShape,
    x: &[R],
    tap: usize,
    first: usize,
    row: &mut [R],
) {
    let w = &plan.windows;
    let (channel, tap) = (tap / w.window_len(), tap % w.window_len());
    let [k0, k1, k2] = [
        tap / (w.kernel[1] * w.kernel[2]),
        tap / w.kernel[2] % w.kernel[1],
        tap % w.kernel[2],
    ];
    let x = &x[channel * w.input.iter().product::<usize>()..];
    let inside = w.inside(2, k2);
    let (width, stride) = (w.output[2], w.strides[2]);
    let mut done = 0;
    while done < row.len() {
        let at = first + done;
        let (line, from) = (at / width, at % width);
        let n = (width - from).min(row.len() - done);
        let out = &mut row[done..done + n];
        done += n;
        let p0 = w.position(0, line / w.output[1], k0);
        let p1 = w.position(1, line % w.output[1], k1);
        let is_in = |p: i64, d: usize| (0..w.input[d] as i64).contains(&p);
        // Windows of this line whose tap is inside, counted from the first one here.
        let start = inside.start.clamp(from, from + n) - from;
        let end = inside.end.clamp(from, from + n) - from;
        if !is_in(p0, 0) || !is_in(p1, 1) || start >= end {
            out.fill(R::zero());
            continue;
        }
        out[..start].fill(R::zero());
        out[end..].fill(R::zero());
        let line = &x[(p0 as usize * w.input[1] + p1 as usize) * w.input[2]..];
        let line = &line[w.position(2, from + start, k2) as usize..];
        if stride == 1 {
            out[start..end].copy_from_slice(&line[..end - start]);
        } else {
            let taps = line.iter().step_by(stride);
            out[start..end]
                .iter_mut()
                .zip(taps)
                .for_each(|(o, x)| *o = *x);
        }
    }
}

/// One input channel for each group: loops along rows of the output.
fn depthwise<R: Real>(plan: &ConvolutionShape, x: &[R], weights: &[R], y: &mut [R]) {
    let w = &plan.windows;
    let (in_len, len) = (w.input.iter().product::<usize>(), w.window_len());
    let least = if y.len() * len < 1 << 16 {
        usize::MAX
    } else {
        0
    };
    // Where the taps of a line lie is the same for every line.
    let taps = (0..len).map(|tap| {
        let inside = w.inside(2, tap % w.kernel[2]);
        let from = match inside.is_empty() {
            true => 0,
            false => w.position(2, inside.start, tap % w.kernel[2]) as usize,
        };
        let rows = (
            tap / (w.kernel[1] * w.kernel[2]),
            tap / w.kernel[2] % w.kernel[1],
        );
        (rows, inside, from)
    });
    let taps: Vec<((usize, usize), Range<usize>, usize)> = taps.collect();
    threads::runs(y, w.n_windows(), least, |at, y| {
        let (image, filter) = (at / plan.shape[1], at % plan.shape[1]);
        let x = &x[(image * plan.groups + filter / plan.filters) * in_len..][..in_len];
        let weights = &weights[filter * len..][..len];
        for (line, y) in y.chunks_mut(w.output[2]).enumerate() {
            let (o0, o1) = (line / w.output[1], line % w.output[1]);
            for (weight, ((k0, k1), inside, from)) in weights.iter().zip(&taps) {
                let p0 = w.position(0, o0, *k0);
                let p1 = w.position(1, o1, *k1);
                let is_in = |p: i64, d: usize| (0..w.input[d] as i64).contains(&p);
                if !is_in(p0, 0) || !is_in(p1, 1) || inside.is_empty() {
                    continue;
                }
                let line = &x[(p0 as usize * w.input[1] + p1 as usize) * w.input[2]..];
                let (line, y) = (&line[*from..], &mut y[inside.clone()]);
                if w.strides[2] == 1 {
                    y.iter_mut().zip(line).for_each(|(y, x)| *y += *weight * *x);
                } else {
                    let taps = line.iter().step_by(w.strides[2]);
                    y.iter_mut().zip(taps).for_each(|(y, x)| *y += *weight * *x);
                }
            }
        }
    });
}

/// The convolution of integers less their zero points.
///
/// # Errors
/// A sentence: sizes or types that do not fit.
pub fn integer_conv(
    call: &Call,
    (x, zero_x): (&Tensor, Option<&Tensor>),
    (w, zero_w): (&Tensor, Option<&Tensor>),
) -> Result<(Vec<usize>, Vec<i64>), String> {
    let plan = ConvolutionShape::new(call, &x.shape, &w.shape)?;
    let (vx, vw) = (centered(x, zero_x, 1)?, centered(w, zero_w, 0)?);
    let n_windows = plan.windows.n_windows();
    let in_len = plan.channels * plan.windows.input.iter().product::<usize>();
    let (taps, filters) = (plan.taps(), plan.filters);
    let mut y = vec![0i64; plan.shape.iter().product()];
    let mut copied = vec![0i64; taps * n_windows];
    for (at, y) in y.chunks_mut((filters * n_windows).max(1)).enumerate() {
        let x = &vx[at * in_len..][..in_len];
        let w = &vw[at % plan.groups * filters * taps..][..filters * taps];
        threads::runs(&mut copied, n_windows, 1 << 14, |tap, row| {
            copy_tap(&plan, x, tap, 0, row);
        });
        threads::runs(y, n_windows, 1 << 12, |filter, y| {
            for (w, row) in w[filter * taps..][..taps]
                .iter()
                .zip(copied.chunks(n_windows))
            {
                y.iter_mut().zip(row).for_each(|(y, x)| *y += w * x);
            }
        });
    }
    Ok((plan.shape, y))
}

fn conv_integer(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = (call.input(0)?, call.optional(2));
    let (shape, y) = integer_conv(call, x, (call.input(1)?, call.optional(3)))?;
    let y = y.into_iter().map(|x| x as i32).collect();
    Ok(vec![Tensor::new(&shape, Values::I32(y))])
}
