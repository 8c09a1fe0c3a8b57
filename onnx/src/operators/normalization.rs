//! Normalizations: by given or batch statistics, by rows, by groups, by neighbours. Statistics are
//! summed in `f64`.

use super::real::{Real, in_real};
use super::threads;
use super::{Call, Inference, Operator};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::Tensor;
use graph::SymExpr;

pub const ROWS: &[Operator] = &[
    Operator::new("BatchNormalization", infer_batch, batch),
    Operator::new("InstanceNormalization", super::movement::same, |call| {
        let channels = call.input(0)?.shape.get(1).copied().unwrap_or(1);
        grouped(call, channels, true)
    }),
    Operator::new("GroupNormalization", super::movement::same, group),
    Operator::new("LayerNormalization", infer_layer, |call| layer(call, true)),
    Operator::new("RMSNormalization", super::movement::same, |call| {
        layer(call, false)
    }),
    Operator::new("LRN", super::movement::same, local_response),
    Operator::new("LpNormalization", super::movement::same, lp),
    Operator::new(
        "MeanVarianceNormalization",
        super::movement::same,
        mean_variance,
    ),
];

fn epsilon(call: &Call) -> f64 {
    epsilon_or(call, 1e-5)
}

/// What a node adds to variances.
pub fn epsilon_or(call: &Call, default: f64) -> f64 {
    call.attributes.float("epsilon").map_or(default, f64::from)
}

/// Mean and variance of numbers, the variance around the mean.
pub fn statistics<R: Real>(x: impl Iterator<Item = R> + Clone) -> (f64, f64) {
    let (mut sum, mut n) = (0.0, 0usize);
    for x in x.clone() {
        sum += x.wide();
        n += 1;
    }
    let mean = sum / n as f64;
    let squares: f64 = x.map(|x| (x.wide() - mean) * (x.wide() - mean)).sum();
    (mean, squares / n as f64)
}

fn infer_batch(cx: &Inference) -> Option<Vec<Fact>> {
    let mut outputs = super::movement::same(cx)?;
    let training = cx.opset >= 14 && cx.attributes.flag("training_mode");
    if training && cx.node.output.len() > 1 {
        for at in [3, 4] {
            let fact = cx.fact(at)?;
            outputs.push(Fact::new(fact.element, fact.shape.clone()));
        }
    }
    Some(outputs)
}

/// The vector at input `at`, which has `n` elements.
fn vector<R: Real>(call: &Call, at: usize, n: usize) -> Result<Vec<R>, String> {
    let v = R::read(call.input(at)?)?;
    match v.len() == n {
        true => Ok(v.into_owned()),
        false => Err(format!("its input {at} has {} elements, not {n}", v.len())),
    }
}

/// `[batch, channels, elements of an image]`; a vector is a batch of one channel each.
fn images(x: &Tensor) -> (usize, usize, usize) {
    let batch = x.shape.first().copied().unwrap_or(1);
    let channels = x.shape.get(1).copied().unwrap_or(1);
    (batch, channels, x.shape.iter().skip(2).product())
}

fn batch(call: &Call) -> Result<Vec<Tensor>, String> {
    in_real!(call.input(0)?.element(), R => real_batch::<R>(call))
}

fn real_batch<R: Real>(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let (n, channels, image) = images(x);
    if call.opset < 9 && call.attributes.int("spatial") == Some(0) {
        return Err("statistics of single positions (spatial = 0) are not supported".to_string());
    }
    if call.opset < 14 && call.node.output.iter().skip(1).any(|o| !o.is_empty()) {
        return Err("the form for training of old operator sets is not supported".to_string());
    }
    let [scale, bias, mut mean, mut variance] =
        [1, 2, 3, 4].map(|at| vector::<R>(call, at, channels));
    let (scale, bias) = (scale?, bias?);
    let mut running = Vec::new();
    if call.opset >= 14 && call.attributes.flag("training_mode") {
        let momentum = f64::from(call.attributes.float("momentum").unwrap_or(0.9));
        let v = R::read(x)?;
        let (mut means, mut variances) = (Vec::new(), Vec::new());
        for c in 0..channels {
            let all = (0..n).flat_map(|b| v[(b * channels + c) * image..][..image].iter().copied());
            let (m, v) = statistics(all);
            means.push(m);
            variances.push(v);
        }
        let blend = |old: &[R], new: &[f64]| -> Vec<R> {
            let pairs = old.iter().zip(new);
            let next = pairs.map(|(o, n)| R::of(o.wide() * momentum + n * (1.0 - momentum)));
            next.collect()
        };
        let (old_mean, old_variance) = (mean?, variance?);
        for (at, values) in [
            (3, blend(&old_mean, &means)),
            (4, blend(&old_variance, &variances)),
        ] {
            running.push(R::tensor(call.input(at)?.element(), &[channels], values)?);
        }
        mean = Ok(means.into_iter().map(R::of).collect());
        variance = Ok(variances.into_iter().map(R::of).collect());
    }
    let (mean, variance) = (mean?, variance?);
    let epsilon = epsilon(call);
    let factors: Vec<R> = (0..channels)
        .map(|c| R::of(scale[c].wide() / (variance[c].wide() + epsilon).sqrt()))
        .collect();
    let mut y = R::read(x)?.into_owned();
    threads::runs(&mut y, image, 1 << 16, |at, y| {
        let c = at % channels.max(1);
        let (mean, factor, bias) = (mean[c], factors[c], bias[c]);
        y.iter_mut().for_each(|x| *x = (*x - mean) * factor + bias);
    });
    let mut outputs = vec![R::tensor(x.element(), &x.shape, y)?];
    if call.node.output.len() > 1 {
        outputs.append(&mut running);
    }
    Ok(outputs)
}

fn group(call: &Call) -> Result<Vec<Tensor>, String> {
    let groups = call.attributes.int("num_groups").unwrap_or(0);
    let groups = usize::try_from(groups).map_err(|_| "its num_groups is negative")?;
    grouped(call, groups, call.opset >= 21)
}

/// Statistics of each group of each image; scale and bias for each channel, or for each group.
fn grouped(call: &Call, groups: usize, per_channel: bool) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let (_, channels, image) = images(x);
    if groups == 0 || !channels.is_multiple_of(groups) {
        return Err(format!("{channels} channels are not {groups} groups"));
    }
    let in_group = channels / groups;
    let epsilon = epsilon(call);
    let y = in_real!(x.element(), R => {
        let n = if per_channel { channels } else { groups };
        let (scale, bias) = (vector::<R>(call, 1, n)?, vector::<R>(call, 2, n)?);
        let mut y = R::read(x)?.into_owned();
        threads::runs(&mut y, in_group * image, 1 << 16, |at, y| {
            let (mean, variance) = statistics(y.iter().copied());
            let factor = (variance + epsilon).sqrt().recip();
            for (c, y) in y.chunks_mut(image.max(1)).enumerate() {
                let group = at % groups;
                let c = if per_channel { group * in_group + c } else { group };
                let (scale, bias) = (scale[c].wide() * factor, bias[c].wide());
                y.iter_mut().for_each(|x| *x = R::of((x.wide() - mean) * scale + bias));
            }
        });
        R::tensor(x.element(), &x.shape, y)
    });
    y.map(|y| vec![y])
}

/// The type statistics are given in.
fn stash(cx_number: Option<i64>, widened: bool) -> Element {
    let stored = i32::try_from(cx_number.unwrap_or(1))
        .ok()
        .and_then(Element::of_number);
    match stored.filter(|e| e.is_float()) {
        _ if widened => Element::F64,
        Some(element) => element,
        None => Element::F32,
    }
}

/// Types and sizes of normalized rows and of their statistics.
pub fn infer_layer(cx: &Inference) -> Option<Vec<Fact>> {
    let mut outputs = super::movement::same(cx)?;
    let mut shape = cx.shape(0).map(<[_]>::to_vec);
    if let Some(shape) = &mut shape {
        let axis = super::axis(cx.attributes.int("axis").unwrap_or(-1), shape.len())?;
        shape[axis..].fill(SymExpr::constant(1));
    }
    let element = stash(cx.attributes.int("stash_type"), false);
    for _ in 1..cx.node.output.len() {
        outputs.push(Fact::new(Some(element), shape.clone()));
    }
    Some(outputs)
}

/// Normalizes from `axis` on; means and reciprocal deviations are the further outputs, both if one is.
///
/// # Errors
/// A sentence: sizes or types that do not fit.
pub fn layer(call: &Call, centered: bool) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let axis = call.axis(-1, x.shape.len())?;
    let rows = Rows {
        epsilon: epsilon(call),
        centered,
        shape: &x.shape[axis..],
    };
    in_real!(x.element(), R => {
        let scale = rows.along::<R>(call.optional(1))?;
        let bias = rows.along::<R>(call.optional(2))?;
        let mut y = R::read(x)?.into_owned();
        let (means, factors) = rows.normalize(&mut y, scale.as_deref(), bias.as_deref());
        let mut outputs = vec![R::tensor(x.element(), &x.shape, y)?];
        let mut shape = x.shape.clone();
        shape[axis..].fill(1);
        let element = stash(call.attributes.int("stash_type"), call.widened);
        let n_wanted = if call.node.output.len() > 1 { 2 } else { 0 };
        for values in [means, factors].into_iter().take(n_wanted) {
            outputs.push(<f64 as Real>::tensor(element, &shape, values)?);
        }
        Ok(outputs)
    })
}

/// Rows that are normalized, each of sizes `shape`.
pub struct Rows<'a> {
    /// What is added to a variance.
    pub epsilon: f64,
    /// Whether the mean is subtracted.
    pub centered: bool,
    /// Sizes of a row.
    pub shape: &'a [usize],
}

impl Rows<'_> {
    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// A scale or bias broadcast to a row.
    ///
    /// # Errors
    /// It does not broadcast.
    pub fn along<R: Real>(&self, given: Option<&Tensor>) -> Result<Option<Vec<R>>, String> {
        let Some(given) = given else { return Ok(None) };
        let fits = super::products::broadcast_sizes(&[&given.shape, self.shape]);
        if fits.as_deref() != Some(self.shape) {
            return Err(format!(
                "{:?} does not broadcast to rows of {:?}",
                given.shape, self.shape
            ));
        }
        let v = R::read(given)?;
        let from = super::movement::Broadcast::new(&given.shape, self.shape);
        Ok(Some((0..self.len()).map(|n| v[from.at(n)]).collect()))
    }

    /// Normalizes every row of `y`; gives means and reciprocal deviations.
    pub fn normalize<R: Real>(
        &self,
        y: &mut [R],
        scale: Option<&[R]>,
        bias: Option<&[R]>,
    ) -> (Vec<f64>, Vec<f64>) {
        let len = self.len().max(1);
        let of_row = |row: &[R]| {
            let (mean, variance) = if self.centered {
                statistics(row.iter().copied())
            } else {
                let squares: f64 = row.iter().map(|x| x.wide() * x.wide()).sum();
                (0.0, squares / len as f64)
            };
            (mean, (variance + self.epsilon).sqrt().recip())
        };
        let statistics: Vec<(f64, f64)> = y.chunks(len).map(of_row).collect();
        threads::runs(y, len, 1 << 16, |at, row| {
            let (mean, factor) = statistics[at];
            for (n, x) in row.iter_mut().enumerate() {
                let scaled = (x.wide() - mean) * factor * scale.map_or(1.0, |s| s[n].wide());
                *x = R::of(scaled + bias.map_or(0.0, |b| b[n].wide()));
            }
        });
        statistics.into_iter().unzip()
    }
}

fn local_response(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let (_, channels, image) = images(x);
    let size = call
        .attributes
        .int("size")
        .and_then(|n| usize::try_from(n).ok());
    let size = size.filter(|n| *n > 0).ok_or("its size is missing")?;
    let real = |name: &str, default: f64| call.attributes.float(name).map_or(default, f64::from);
    let (alpha, beta, bias) = (real("alpha", 1e-4), real("beta", 0.75), real("bias", 1.0));
    let (before, after) = ((size - 1) / 2, size - 1 - (size - 1) / 2);
    let y = in_real!(x.element(), R => {
        let v = R::read(x)?;
        let mut y = v.to_vec();
        threads::runs(&mut y, image, 1 << 14, |at, y| {
            let (b, c) = (at / channels.max(1), at % channels.max(1));
            let near = c.saturating_sub(before)..(c + after + 1).min(channels);
            let mut sums = vec![0.0; y.len()];
            for c in near {
                let row = &v[(b * channels + c) * image..][..image];
                sums.iter_mut().zip(row).for_each(|(s, x)| *s += x.wide() * x.wide());
            }
            for (y, sum) in y.iter_mut().zip(sums) {
                *y = R::of(y.wide() / (bias + alpha / size as f64 * sum).powf(beta));
            }
        });
        R::tensor(x.element(), &x.shape, y)
    });
    y.map(|y| vec![y])
}

fn lp(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let axis = call.axis(-1, x.shape.len())?;
    let p = call.attributes.int("p").unwrap_or(2);
    let size = x.shape.get(axis).copied().unwrap_or(1).max(1);
    let inner: usize = x.shape.iter().skip(axis + 1).product();
    let y = in_real!(x.element(), R => {
        let mut y = R::read(x)?.into_owned();
        threads::runs(&mut y, size * inner, 1 << 16, |_, block| {
            for at in 0..inner {
                let row = block[at..].iter().step_by(inner).map(|x| x.wide());
                let norm = match p {
                    1 => row.map(f64::abs).sum::<f64>(),
                    _ => row.map(|x| x * x).sum::<f64>().sqrt(),
                };
                for x in block[at..].iter_mut().step_by(inner) {
                    // A row of zeros stays zero.
                    *x = if norm == 0.0 { R::of(0.0) } else { R::of(x.wide() / norm) };
                }
            }
        });
        R::tensor(x.element(), &x.shape, y)
    });
    y.map(|y| vec![y])
}

fn mean_variance(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let rank = x.shape.len();
    let axes = call.attributes.ints("axes").unwrap_or(&[0, 2, 3]);
    let at =
        |d: &i64| super::axis(*d, rank).ok_or_else(|| format!("axis {d} is not one of {rank}"));
    let axes = axes.iter().map(at).collect::<Result<Vec<usize>, _>>()?;
    // Sizes of the statistics, which are broadcast back.
    let kept: Vec<usize> = (0..rank)
        .map(|d| if axes.contains(&d) { 1 } else { x.shape[d] })
        .collect();
    let from = super::movement::Broadcast::new(&kept, &x.shape);
    let n_rows: usize = kept.iter().product();
    let y = in_real!(x.element(), R => {
        let v = R::read(x)?;
        let mut rows = vec![Vec::new(); n_rows];
        for (n, x) in v.iter().enumerate() {
            rows[from.at(n)].push(*x);
        }
        let all: Vec<(f64, f64)> = rows.iter().map(|r| statistics(r.iter().copied())).collect();
        let y = v.iter().enumerate().map(|(n, x)| {
            let (mean, variance) = all[from.at(n)];
            // The standard's definition divides by a deviation with 1e-9 added.
            R::of((x.wide() - mean) / (variance.sqrt() + 1e-9))
        });
        R::tensor(x.element(), &x.shape, y.collect())
    });
    y.map(|y| vec![y])
}
