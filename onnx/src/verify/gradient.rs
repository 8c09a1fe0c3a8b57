//! Whether a training graph gives the loss of a model, and that loss's gradients.
//!
//! Everything in float64, by this room's interpreter, which shares nothing with what differentiates.
//! The loss is computed again from the outputs of the model itself. Gradients are held against central
//! differences `(L(p + h·d) − L(p − h·d)) / 2h` along random directions `d` through all that is
//! differentiated at once; a direction's parts are scaled so that what each tensor contributes counts.
//! Never looks at the graph's structure.

use super::cuts::Cuts;
use super::samples::{Planted, Random, Sampler};
use super::{Options, program};
use crate::evaluate::{Precision, Program, Values, label};
use crate::file::Model;
use crate::tensor::{Tensor, Values as Elements};

/// Directions along which gradients are tried.
pub const N_DIRECTIONS: usize = 2;
/// How far the gradients' sum along a direction may be from the difference, relative to the sum of
/// what each tensor contributes. A difference has about half of the digits of float64, and a few
/// elements of a large network always pass a kink.
pub const MOST_ERROR: f64 = 1e-5;
/// How far the loss may be from that of the model's outputs, relative to it: constants are rounded to
/// the types of the file.
const MOST_LOSS_ERROR: f64 = 1e-6;
/// Steps relative to the parameters: where one meets a kink or drowns in rounding, another may not.
const STEPS: [f64; 4] = [1e-6, 1e-7, 1e-5, 1e-8];
/// Numbers that are differentiated at most, which take about 50 bytes each here.
const MOST_NUMBERS: usize = 1 << 27;
/// Tensors that contribute little are moved by up to that factor more.
const MOST_BOOST: f64 = 1e3;

/// A loss of a model's only output, as the training graph defines it.
#[derive(Clone, Debug, PartialEq)]
pub enum Objective {
    /// Mean cross-entropy with the input `labels`, that part of each spread over all classes.
    CrossEntropy(f64),
    /// Mean squared difference to the input `target`.
    MeanSquaredError,
    /// The output of that name.
    Output(String),
}

/// What was found.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientEvidence {
    /// The seed and the sizes.
    pub run: String,
    /// Error of the loss relative to it; `None` where the model's form is another than the training
    /// graph's.
    pub loss: Option<f64>,
    /// The largest error of a direction, relative as [`MOST_ERROR`] is.
    pub gradients: f64,
}

/// Why gradients are not proven.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GradientError {
    /// It cannot be tried; a sentence.
    #[error("{0}")]
    Untried(String),
    /// The loss is another.
    #[error("the loss is {found:e}, by the model's own outputs it is {expected:e} ({run})")]
    Loss {
        /// The training graph's.
        found: f64,
        /// Computed from the model's outputs.
        expected: f64,
        /// The seed and the sizes.
        run: String,
    },
    /// A gradient is wrong.
    #[error(
        "`{name}` is wrong: along a direction the loss changes by {measured:e}, and by that gradient \
         by {claimed:e} ({run})"
    )]
    Gradient {
        /// The output.
        name: String,
        /// By central differences.
        measured: f64,
        /// By the gradient.
        claimed: f64,
        /// The seed and the sizes.
        run: String,
    },
}

/// Tries a training graph. `original` is the model it was made of, with its loss, where both run it in
/// the same form.
///
/// # Errors
/// See [`GradientError`].
pub fn check_gradients(
    training: &Model,
    original: Option<(&Model, &Objective)>,
    options: &Options,
) -> Result<GradientEvidence, GradientError> {
    let untried = |what: String| GradientError::Untried(what);
    let cuts = Cuts::of(&training.proto);
    if let Some(node) = cuts.nodes.first() {
        let what = format!("{} gives what is not computed here", label(node));
        return Err(untried(what));
    }
    let sampler = Sampler::new(training, &cuts, options).map_err(|e| untried(e.to_string()))?;
    let exact = program(&training.proto, &training.folder, Precision::Float64)
        .map_err(|e| untried(e.to_string()))?;
    let tried = Tried::find(training, &sampler, &exact, false)?;
    let loss = original.map(|(model, objective)| tried.loss_error(model, objective));
    let loss = loss.transpose()?.flatten();
    match tried.gradients(&exact) {
        Ok(gradients) => Ok(GradientEvidence {
            run: tried.run,
            loss,
            gradients,
        }),
        // Where a mask leaves nothing of a row, exporters add a number so large that what is beside it is
        // lost: the loss does not change with it, though the sum's derivative is 1.
        Err(GradientError::Gradient { .. }) if sampler.has_masks() => {
            let tried = Tried::find(training, &sampler, &exact, true)?;
            Ok(GradientEvidence {
                gradients: tried.gradients(&exact)?,
                run: tried.run,
                loss,
            })
        }
        Err(error) => Err(error),
    }
}

/// A run of the training graph.
struct Tried {
    run: String,
    feeds: Values,
    loss: f64,
    /// What is differentiated: its name, its value, its gradient.
    parts: Vec<(String, Tensor, Vec<f64>)>,
}

impl Tried {
    /// Runs the graph at sizes that work.
    fn find(
        training: &Model,
        sampler: &Sampler,
        exact: &Program,
        unmasked: bool,
    ) -> Result<Tried, GradientError> {
        let graph = training.proto.graph.iter();
        let outputs = graph.flat_map(|g| &g.output).map(|o| o.name.as_str());
        let names: Vec<&str> = outputs.filter_map(|o| o.strip_suffix(".grad")).collect();
        let n_numbers = differentiated(training, &names);
        if n_numbers > MOST_NUMBERS {
            return Err(GradientError::Untried(format!(
                "{n_numbers} numbers are differentiated; up to {MOST_NUMBERS} are tried at once"
            )));
        }
        let gradients: Vec<String> = names.iter().map(|n| format!("{n}.grad")).collect();
        let mut wanted = vec!["loss"];
        wanted.extend(gradients.iter().map(String::as_str));
        wanted.extend(&names);
        // An even seed keeps the file's parameters, and this one has batches of several.
        let seed = 2;
        let mut why = "no inputs could be made up".to_string();
        for attempt in sampler.attempts(seed, Planted::Nothing) {
            let attempt = match unmasked {
                true => attempt.unmasked(),
                false => attempt,
            };
            let feeds = sampler.feeds(seed, &attempt, Planted::Nothing);
            let Some(feeds) = feeds.map_err(|e| GradientError::Untried(e.to_string()))? else {
                continue;
            };
            let found = match exact.run(&feeds, &wanted) {
                Ok(found) => found,
                Err(error) => {
                    why = error.to_string();
                    continue;
                }
            };
            let numbers: Option<Vec<Vec<f64>>> = found.iter().map(Tensor::to_f64).collect();
            let numbers = numbers.unwrap_or_default();
            let finite = numbers.iter().flatten().all(|v| v.is_finite());
            let Some(loss) = numbers.first().and_then(|l| l.first()).filter(|_| finite) else {
                why = "its loss or gradients are not finite on inputs made up for it".to_string();
                continue;
            };
            let values = found[1 + names.len()..].iter().cloned();
            let gradients = numbers[1..=names.len()].iter().cloned();
            let names = names.iter().map(|n| n.to_string());
            return Ok(Tried {
                run: attempt.describe(seed, Planted::Nothing),
                loss: *loss,
                parts: names
                    .zip(values)
                    .zip(gradients)
                    .map(|((n, v), g)| (n, v, g))
                    .collect(),
                feeds,
            });
        }
        Err(GradientError::Untried(why))
    }

    /// How far the loss is from that of the model's outputs; `None` if the model does not run so.
    fn loss_error(
        &self,
        model: &Model,
        objective: &Objective,
    ) -> Result<Option<f64>, GradientError> {
        let graph = model.proto.graph.iter();
        let inputs: Vec<&String> = graph
            .clone()
            .flat_map(|g| &g.input)
            .map(|i| &i.name)
            .collect();
        let only = graph
            .flat_map(|g| &g.output)
            .map(|o| o.name.as_str())
            .next();
        let wanted = match objective {
            Objective::Output(name) => Some(name.as_str()),
            _ => only,
        };
        let feeds = self.feeds.iter().filter(|(name, _)| inputs.contains(name));
        let feeds: Values = feeds.map(|(n, t)| (n.clone(), t.clone())).collect();
        let cuts = !Cuts::of(&model.proto).nodes.is_empty();
        let exact = program(&model.proto, &model.folder, Precision::Float64).ok();
        let found = wanted.zip(exact.filter(|_| !cuts));
        let Some(Ok(found)) = found.map(|(name, exact)| exact.run(&feeds, &[name])) else {
            return Ok(None);
        };
        let Some(expected) = found
            .first()
            .and_then(|output| objective.of(output, &self.feeds))
        else {
            return Ok(None);
        };
        let error = (self.loss - expected).abs() / expected.abs().max(f64::MIN_POSITIVE);
        let same = self.loss == expected || error <= MOST_LOSS_ERROR;
        same.then_some(Some(error))
            .ok_or_else(|| GradientError::Loss {
                found: self.loss,
                expected,
                run: self.run.clone(),
            })
    }

    /// The largest error of a direction.
    fn gradients(&self, exact: &Program) -> Result<f64, GradientError> {
        let directions = 0..N_DIRECTIONS;
        directions
            .map(|direction| self.along(exact, direction))
            .try_fold(0.0f64, |worst, error| Ok(worst.max(error?)))
    }

    /// The error along a direction.
    fn along(&self, exact: &Program, direction: usize) -> Result<f64, GradientError> {
        let directions = self.directions(direction);
        let all: Vec<usize> = (0..self.parts.len()).collect();
        let (error, ..) = self.difference(exact, &directions, &all)?;
        if error <= MOST_ERROR {
            return Ok(error);
        }
        // Which one is it? Alone, an error is larger still.
        let (mut worst, mut found) = (0.0, None);
        for n in all {
            let (error, measured, claimed) = self.difference(exact, &directions, &[n])?;
            if error > worst {
                (worst, found) = (error, Some((n, measured, claimed)));
            }
        }
        let (n, measured, claimed) = found.unwrap_or((0, f64::NAN, f64::NAN));
        Err(GradientError::Gradient {
            name: format!("{}.grad", self.parts[n].0),
            measured,
            claimed,
            run: self.run.clone(),
        })
    }

    /// Random directions: of each part as large as it is, larger where it contributes little.
    fn directions(&self, direction: usize) -> Vec<Vec<f64>> {
        let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
        let sizes = self.parts.iter().map(|(_, value, gradient)| {
            let values = value.to_f64().unwrap_or_default();
            let size = norm(&values) / (values.len().max(1) as f64).sqrt();
            let size = if size > 0.0 { size } else { 1.0 };
            (size, size * norm(gradient))
        });
        let sizes: Vec<(f64, f64)> = sizes.collect();
        let most = sizes.iter().fold(0.0f64, |m, (_, c)| m.max(*c));
        let boosted = |(size, contributes): &(f64, f64)| match *contributes > 0.0 {
            true => size * (most / contributes).clamp(1.0, MOST_BOOST),
            false => *size,
        };
        let parts = self.parts.iter().zip(&sizes).enumerate();
        parts
            .map(|(n, ((_, value, _), size))| {
                let mut random = Random::new((direction * self.parts.len() + n) as u64);
                let size = boosted(size);
                (0..value.len()).map(|_| size * random.normal()).collect()
            })
            .collect()
    }

    /// Error, difference and what gradients say, where those parts move.
    fn difference(
        &self,
        exact: &Program,
        directions: &[Vec<f64>],
        moved: &[usize],
    ) -> Result<(f64, f64, f64), GradientError> {
        let contributed = moved.iter().map(|n| {
            let terms = self.parts[*n].2.iter().zip(&directions[*n]);
            terms.map(|(g, d)| g * d).sum::<f64>()
        });
        let contributed: Vec<f64> = contributed.collect();
        let claimed: f64 = contributed.iter().sum();
        let mut best = (f64::INFINITY, f64::NAN);
        for step in STEPS {
            let step = step / MOST_BOOST.sqrt();
            let ahead = self.loss_at(exact, directions, moved, step)?;
            let behind = self.loss_at(exact, directions, moved, -step)?;
            let measured = (ahead - behind) / (2.0 * step);
            let scale = contributed.iter().map(|c| c.abs()).sum::<f64>();
            // Where nothing is claimed, what is measured counts against the loss.
            let least = 1e-6 * self.loss.abs();
            let error = (measured - claimed).abs() / scale.max(least).max(f64::MIN_POSITIVE);
            let error = if measured == claimed { 0.0 } else { error };
            if error < best.0 || best.1.is_nan() {
                best = (error, measured);
            }
            if error <= MOST_ERROR {
                break;
            }
        }
        Ok((best.0, best.1, claimed))
    }

    /// The loss where those parts are moved by `step` along their directions.
    fn loss_at(
        &self,
        exact: &Program,
        directions: &[Vec<f64>],
        moved: &[usize],
        step: f64,
    ) -> Result<f64, GradientError> {
        let untried = |what: String| GradientError::Untried(what);
        let mut feeds = self.feeds.clone();
        for n in moved {
            let (name, value, _) = &self.parts[*n];
            let values = value.to_f64().unwrap_or_default();
            let moved = values.iter().zip(&directions[*n]);
            let moved: Vec<f64> = moved.map(|(p, d)| p + step * d).collect();
            feeds.insert(
                name.clone(),
                Tensor::new(&value.shape, Elements::F64(moved)),
            );
        }
        let found = exact
            .run(&feeds, &["loss"])
            .map_err(|e| untried(e.to_string()))?;
        let loss = found.first().and_then(Tensor::scalar);
        loss.ok_or_else(|| untried("the loss is no number".to_string()))
    }
}

/// How many numbers the initializers of these names have.
fn differentiated(training: &Model, names: &[&str]) -> usize {
    let stored = training.proto.graph.iter().flat_map(|g| &g.initializer);
    let named = stored.filter(|t| names.contains(&t.name.as_str()));
    let sizes = named.map(|t| crate::tensor::sizes(&t.dims).map_or(0, |(_, n)| n));
    sizes.fold(0, usize::saturating_add)
}

impl Objective {
    /// The loss of an output, in float64; `None` if something does not fit.
    fn of(&self, output: &Tensor, feeds: &Values) -> Option<f64> {
        let y = output.to_f64()?;
        match self {
            Objective::Output(_) => y.first().copied(),
            Objective::MeanSquaredError => {
                let target = feeds.get("target")?.to_f64()?;
                let squares = y.iter().zip(&target).map(|(a, b)| (a - b) * (a - b));
                Some(squares.sum::<f64>() / y.len() as f64)
            }
            Objective::CrossEntropy(smoothing) => {
                let labels = feeds.get("labels")?.to_i64()?;
                let (n, classes) = (*output.shape.first()?, *output.shape.get(1)?);
                let inner: usize = output.shape[2..].iter().product();
                let mut sum = 0.0;
                for (row, label) in labels.iter().enumerate() {
                    let (outer, at) = (row / inner, row % inner);
                    let one = |c: usize| y.get((outer * classes + c) * inner + at).copied();
                    let logits: Vec<f64> = (0..classes).map(one).collect::<Option<_>>()?;
                    let most = logits.iter().fold(f64::NEG_INFINITY, |m, v| m.max(*v));
                    let total: f64 = logits.iter().map(|v| (v - most).exp()).sum();
                    let log = |v: f64| v - most - total.ln();
                    let own = log(*logits.get(usize::try_from(*label).ok()?)?);
                    let all: f64 = logits.iter().map(|v| log(*v)).sum();
                    sum -= (1.0 - smoothing) * own + smoothing * all / classes as f64;
                }
                (labels.len() == n * inner).then(|| sum / labels.len() as f64)
            }
        }
    }
}

#[cfg(test)]
mod tests;
