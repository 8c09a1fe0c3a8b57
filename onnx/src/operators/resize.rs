//! Resize and Upsample: interpolation, one dimension after the other.
//!
//! Coordinates are computed in `f32`, as runtimes do, in widened runs too: which element is nearest must
//! not depend on the precision of a run.

use super::real::{Real, in_real};
use super::{Call, Inference, Operator};
use crate::fact::Fact;
use crate::tensor::{Tensor, room};
use graph::SymExpr;

pub const ROWS: &[Operator] = &[
    Operator::new("Resize", infer, resize),
    Operator::new("Upsample", infer, resize),
];

/// Where scales and sizes are.
fn places(upsample: bool, opset: i64) -> (usize, Option<usize>) {
    match (upsample, opset < 11) {
        (false, false) => (2, Some(3)),
        _ => (1, None),
    }
}

/// Dimensions that are resized.
fn axes(given: Option<&[i64]>, rank: usize) -> Option<Vec<usize>> {
    match given.filter(|g| !g.is_empty()) {
        None => Some((0..rank).collect()),
        Some(axes) => axes.iter().map(|d| super::axis(*d, rank)).collect(),
    }
}

fn infer(cx: &Inference) -> Option<Vec<Fact>> {
    let Some(x) = cx.shape(0) else {
        return cx.like_first(None);
    };
    let (scales, sizes) = places(cx.node.op_type == "Upsample", cx.opset);
    let axes = axes(cx.attributes.ints("axes"), x.len())?;
    let mut shape = x.to_vec();
    let empty = |at: usize| cx.fact(at).is_none_or(|f| f.is_empty());
    let policy = cx
        .attributes
        .text("keep_aspect_ratio_policy")
        .unwrap_or("stretch");
    let given = match cx.attributes.floats("scales") {
        Some(scales) => Some(scales.iter().map(|s| f64::from(*s)).collect()),
        None => cx.fact(scales).and_then(|f| f.small()?.to_f64()),
    };
    let given = given.filter(|s: &Vec<f64>| s.len() == axes.len());
    for (n, d) in axes.iter().enumerate() {
        shape[*d] = match (sizes.filter(|at| !empty(*at)), &given) {
            (Some(at), _) => match (policy, cx.ints(at)) {
                ("stretch", Some(sizes)) => sizes.get(n)?.clone(),
                _ => cx.unknown(),
            },
            (None, Some(scales)) => scaled(&x[*d], scales[n]).unwrap_or_else(|| cx.unknown()),
            (None, None) => cx.unknown(),
        };
    }
    cx.like_first(Some(shape))
}

/// `⌊size·scale⌋` as runtimes compute it.
fn scaled(size: &SymExpr, scale: f64) -> Option<SymExpr> {
    if let Some(size) = size.as_const() {
        let scaled = scaled_size(usize::try_from(size).ok()?, scale);
        return Some(SymExpr::constant(i64::try_from(scaled).ok()?));
    }
    let whole = |x: f64| (x == x.trunc() && (1.0..1e6).contains(&x)).then_some(x as i64);
    match (whole(scale), whole(scale.recip())) {
        (Some(times), _) => Some(size.clone() * times),
        // Only powers of two are exact in `f32`.
        (_, Some(part)) if part & (part - 1) == 0 => Some(size.floor_div(&part.into())),
        _ => None,
    }
}

fn scaled_size(size: usize, scale: f64) -> usize {
    (size as f32 * scale as f32).floor() as usize
}

/// How coordinates and weights are found.
struct Method<'a> {
    upsample: bool,
    mode: &'a str,
    transform: &'a str,
    nearest: &'a str,
    antialias: bool,
    exclude_outside: bool,
    cubic: f32,
    extrapolation: f32,
}

impl<'a> Method<'a> {
    fn of(call: &Call<'a>) -> Result<Method<'a>, String> {
        let a = call.attributes;
        let old = call.node.op_type == "Upsample" || call.opset < 11;
        let transform = match a.text("coordinate_transformation_mode") {
            _ if old => "asymmetric",
            given => given.unwrap_or("half_pixel"),
        };
        let mode = a.text("mode").unwrap_or("nearest");
        let known = [
            "align_corners",
            "asymmetric",
            "half_pixel",
            "half_pixel_symmetric",
            "pytorch_half_pixel",
            "tf_half_pixel_for_nn",
            "tf_crop_and_resize",
        ];
        if !known.contains(&transform)
            || !["nearest", "linear", "bilinear", "cubic"].contains(&mode)
        {
            return Err(format!(
                "mode `{mode}` with coordinates `{transform}` is not known"
            ));
        }
        Ok(Method {
            upsample: old,
            mode,
            transform,
            nearest: a.text("nearest_mode").unwrap_or("round_prefer_floor"),
            antialias: a.flag("antialias"),
            exclude_outside: a.flag("exclude_outside"),
            cubic: a.float("cubic_coeff_a").unwrap_or(-0.75),
            extrapolation: a.float("extrapolation_value").unwrap_or(0.0),
        })
    }

    fn crops(&self) -> bool {
        self.transform == "tf_crop_and_resize"
    }

    /// The coordinate in the input of output element `at`; `None` to extrapolate.
    fn coordinate(&self, at: usize, along: &Along) -> Option<f32> {
        let (at, input, scale) = (at as f32, along.input as f32, along.scale);
        let output = input * scale;
        Some(match self.transform {
            "asymmetric" => at / scale,
            "align_corners" if output == 1.0 => 0.0,
            "align_corners" => at * (input - 1.0) / (output - 1.0),
            "pytorch_half_pixel" if output <= 1.0 => 0.0,
            "tf_half_pixel_for_nn" => (at + 0.5) / scale,
            "half_pixel_symmetric" => {
                let offset = input / 2.0 * (1.0 - along.output as f32 / output);
                offset + (at + 0.5) / scale - 0.5
            }
            "tf_crop_and_resize" => {
                let (start, end) = along.region;
                let first = start * (input - 1.0);
                let x = match along.output {
                    1 => 0.5 * (start + end) * (input - 1.0),
                    n => first + at * (end - start) * (input - 1.0) / (n as f32 - 1.0),
                };
                if x < 0.0 || x > input - 1.0 {
                    return None;
                }
                x
            }
            _ => (at + 0.5) / scale - 0.5,
        })
    }

    fn nearest(&self, x: f32, scale: f32) -> i64 {
        let rounded = match self.nearest {
            _ if self.upsample && scale < 1.0 => x.ceil(),
            _ if self.upsample => x.trunc(),
            "floor" => x.floor(),
            "ceil" => x.ceil(),
            "round_prefer_ceil" => (x + 0.5).floor(),
            _ => (x - 0.5).ceil(),
        };
        rounded as i64
    }

    fn cubic_weight(&self, x: f32) -> f32 {
        let (a, x) = (self.cubic, x.abs());
        if x <= 1.0 {
            ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
        } else if x < 2.0 {
            ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
        } else {
            0.0
        }
    }

    /// Elements of the input and their weights for output element `at`; `None` to extrapolate.
    fn taps(&self, at: usize, along: &Along) -> Option<Vec<(usize, f32)>> {
        let x = self.coordinate(at, along)?;
        let last = along.input as i64 - 1;
        let clamped = |n: i64| n.clamp(0, last) as usize;
        if self.mode == "nearest" {
            return Some(vec![(clamped(self.nearest(x, along.scale)), 1.0)]);
        }
        // Windows grow as the output shrinks.
        let shrink = if self.antialias {
            along.scale.min(1.0)
        } else {
            1.0
        };
        let radius = if self.mode == "cubic" { 2.0 } else { 1.0 };
        let base = x.ceil() - 1.0;
        let ratio = x - base;
        let start = (-radius / shrink).floor() as i64 + 1;
        let mut taps = Vec::new();
        for n in start..=1 - start {
            let distance = (n as f32 - ratio) * shrink;
            let weight = match self.mode {
                "cubic" => self.cubic_weight(distance),
                _ => (1.0 - distance.abs()).max(0.0),
            };
            taps.push(((base as i64).saturating_add(n), weight));
        }
        if self.exclude_outside {
            taps.retain(|(n, _)| (0..=last).contains(n));
        }
        if self.exclude_outside || self.antialias {
            let sum: f32 = taps.iter().map(|(_, w)| w).sum();
            taps.iter_mut().for_each(|(_, w)| *w /= sum);
        }
        Some(taps.into_iter().map(|(n, w)| (clamped(n), w)).collect())
    }
}

/// One dimension that is resized.
#[derive(Clone, Copy, Debug)]
struct Along {
    axis: usize,
    input: usize,
    output: usize,
    scale: f32,
    region: (f32, f32),
}

fn floats(call: &Call, at: usize) -> Result<Option<Vec<f64>>, String> {
    match call.optional(at).filter(|t| !t.is_empty()) {
        None => Ok(None),
        Some(t) => t
            .to_f64()
            .map(Some)
            .ok_or_else(|| format!("its input {at} is not of numbers")),
    }
}

/// Most elements along a dimension of the result.
const MOST_ALONG: usize = 1 << 24;

/// The smaller the scale, the wider the windows of an antialiased output.
const LEAST_SCALE: f32 = 1.0 / MOST_ALONG as f32;

fn dimensions(call: &Call, shape: &[usize]) -> Result<Vec<Along>, String> {
    let (scales_at, sizes_at) = places(call.node.op_type == "Upsample", call.opset);
    let axes = axes(call.attributes.ints("axes"), shape.len()).ok_or("its axes do not fit")?;
    let scales = match call.attributes.floats("scales") {
        Some(scales) => Some(scales.iter().map(|s| f64::from(*s)).collect()),
        None => floats(call, scales_at)?,
    };
    let sizes = sizes_at.map(|at| floats(call, at)).transpose()?.flatten();
    let region = if sizes_at.is_some() {
        floats(call, 1)?
    } else {
        None
    };
    let n = axes.len();
    let region = region.filter(|r| r.len() == 2 * n);
    let fits = |v: &Option<Vec<f64>>| v.as_ref().is_none_or(|v| v.len() == n);
    if !fits(&scales) || !fits(&sizes) || (scales.is_none() && sizes.is_none()) {
        return Err(format!("its scales or sizes do not fit {n} dimensions"));
    }
    let mut all = Vec::new();
    for (n_axis, axis) in axes.iter().enumerate() {
        let input = shape[*axis];
        let (output, scale) = match (&sizes, &scales) {
            (Some(sizes), _) => (sizes[n_axis] as usize, sizes[n_axis] as f32 / input as f32),
            (None, Some(scales)) => (scaled_size(input, scales[n_axis]), scales[n_axis] as f32),
            (None, None) => (input, 1.0),
        };
        let from = |at: usize, default: f32| region.as_ref().map_or(default, |r| r[at] as f32);
        all.push(Along {
            axis: *axis,
            input,
            output,
            scale,
            region: (from(n_axis, 0.0), from(n + n_axis, 1.0)),
        });
    }
    let policy = call
        .attributes
        .text("keep_aspect_ratio_policy")
        .unwrap_or("stretch");
    if sizes.is_some() && policy != "stretch" {
        let scales = all.iter().map(|a| a.scale);
        let scale = match policy {
            "not_larger" => scales.fold(f32::INFINITY, f32::min),
            "not_smaller" => scales.fold(f32::NEG_INFINITY, f32::max),
            other => return Err(format!("keep_aspect_ratio_policy `{other}` is not known")),
        };
        for along in &mut all {
            along.scale = scale;
            along.output = (scale * along.input as f32 + 0.5).floor() as usize;
        }
    }
    let fits = |a: &Along| a.input > 0 && a.scale > LEAST_SCALE && a.output <= MOST_ALONG;
    if !all.iter().all(fits) {
        return Err("its sizes cannot be resized".to_string());
    }
    let mut to = shape.to_vec();
    all.iter().for_each(|a| to[a.axis] = a.output);
    room(&to)?;
    Ok(all)
}

/// What becomes of one dimension.
#[derive(Clone, Debug)]
pub struct Interpolation {
    /// The dimension.
    pub axis: usize,
    /// The elements of the input with their weights, for each element of the output; `None` to extrapolate.
    pub taps: Vec<Option<Vec<(usize, f32)>>>,
    /// The value of elements that are extrapolated.
    pub extrapolation: f32,
    /// Whether every element is one of the input.
    pub is_nearest: bool,
}

/// What a Resize does to an input of that shape, one dimension after the other; those that stay are left out.
///
/// # Errors
/// See [`Operator::evaluate`]: sizes or attributes that do not fit.
pub fn interpolations(call: &Call, shape: &[usize]) -> Result<Vec<Interpolation>, String> {
    let method = Method::of(call)?;
    let changed = changed(&method, dimensions(call, shape)?);
    let taps = |along: &Along| (0..along.output).map(|at| method.taps(at, along)).collect();
    let one = |along: &Along| Interpolation {
        axis: along.axis,
        taps: taps(along),
        extrapolation: method.extrapolation,
        is_nearest: method.mode == "nearest" && !method.crops(),
    };
    Ok(changed.iter().map(one).collect())
}

/// Dimensions that do not stay as they are, smaller outputs first.
fn changed(method: &Method, all: Vec<Along>) -> Vec<Along> {
    let changed = all
        .into_iter()
        .filter(|a| method.crops() || a.output != a.input || a.scale != 1.0);
    let mut changed: Vec<Along> = changed.collect();
    changed.sort_by(|a, b| a.scale.total_cmp(&b.scale));
    changed
}

fn resize(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let method = Method::of(call)?;
    let changed = changed(&method, dimensions(call, &x.shape)?);
    if method.mode == "nearest" && !method.crops() {
        return Ok(vec![nearest(&method, &changed, x)]);
    }
    let y = in_real!(x.element(), R => {
        let (mut shape, mut y) = (x.shape.clone(), R::read(x)?.into_owned());
        for along in &changed {
            y = interpolated(&method, along, &shape, &y);
            shape[along.axis] = along.output;
        }
        R::tensor(x.element(), &shape, y)
    });
    y.map(|y| vec![y])
}

fn nearest(method: &Method, all: &[Along], x: &Tensor) -> Tensor {
    let mut strides = vec![1; x.shape.len()];
    for d in (1..x.shape.len()).rev() {
        strides[d - 1] = strides[d] * x.shape[d];
    }
    let mut shape = x.shape.clone();
    let mut positions = vec![0];
    for d in 0..x.shape.len() {
        let along = all.iter().find(|a| a.axis == d);
        shape[d] = along.map_or(x.shape[d], |a| a.output);
        let from: Vec<usize> = (0..shape[d])
            .map(|at| match along.and_then(|a| method.taps(at, a)) {
                Some(taps) => taps[0].0,
                None => at,
            })
            .collect();
        positions = positions
            .iter()
            .flat_map(|first| from.iter().map(move |n| (*first, *n)))
            .map(|(first, n): (usize, usize)| first + n * strides[d])
            .collect();
    }
    Tensor {
        values: std::sync::Arc::new(x.values.pick(positions.into_iter())),
        shape,
    }
}

fn interpolated<R: Real>(method: &Method, along: &Along, shape: &[usize], x: &[R]) -> Vec<R> {
    let inner: usize = shape[along.axis + 1..].iter().product();
    if x.is_empty() || along.output == 0 {
        return Vec::new();
    }
    let taps: Vec<_> = (0..along.output).map(|at| method.taps(at, along)).collect();
    let mut y = Vec::with_capacity(x.len() / along.input * along.output);
    for block in x.chunks(along.input * inner) {
        for taps in &taps {
            let first = y.len();
            match taps {
                None => y.resize(first + inner, R::of(f64::from(method.extrapolation))),
                Some(taps) => {
                    y.resize(first + inner, R::zero());
                    for (n, weight) in taps {
                        let weight = R::of(f64::from(*weight));
                        let row = &block[n * inner..][..inner];
                        y[first..]
                            .iter_mut()
                            .zip(row)
                            .for_each(|(y, x)| *y += weight * *x);
                    }
                }
            }
        }
    }
    y
}
