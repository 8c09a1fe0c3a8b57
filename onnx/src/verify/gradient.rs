//! Whether a training graph gives the loss of a model, and that loss's gradients.
//!
//! Everything runs in float64 in this room's interpreter, which shares nothing with what differentiates.
//! The loss is computed again from the outputs of the model itself. Gradients are compared with central
//! differences `(L(p + h·d) − L(p − h·d)) / 2h` along random directions `d` through all that is
//! differentiated at once; a direction's parts are scaled so that what each tensor contributes counts.
//! Parameters are first moved a little at random, off the kinks on which zeros and bounds put them. A
//! gradient is wrong only where differences of several steps agree with each other and not with it: where
//! they do not agree, rounding or kinks decide, and nothing is proven. Never looks at the graph's structure.

mod objective;
mod step;
mod work;

pub use objective::Objective;
pub use step::check_same_step;

use super::cuts::Cuts;
use super::masks;
use super::random::Random;
use super::samples::{Planted, Sampler};
use super::{Options, VerifyError, program};
use crate::evaluate::{EvaluateError, Precision, Program, Values, label};
use crate::file::Model;
use crate::tensor::{Tensor, Values as Elements};
use work::RunCost;

/// Directions along which gradients are tried, unless each run takes long.
pub const N_DIRECTIONS: usize = 2;
/// How far the gradients' sum along a direction may be from the difference, relative to the sum of
/// what each tensor contributes: a difference has about half of the digits of float64.
pub const MOST_ERROR: f64 = 1e-5;
/// The same where differences of several steps are not closer to each other than to the gradient: a few
/// elements of a large network always pass a kink.
const MOST_UNSETTLED: f64 = 1e-3;
/// How far the loss may be from that of the model's outputs, relative to it: constants are rounded to
/// the types of the file.
const MOST_LOSS_ERROR: f64 = 1e-6;
/// Together, constants in types narrower than f32 are assumed to be off by this many of their roundings.
const ROUNDINGS: f64 = 8.0;
/// Steps relative to the parameters: where one meets a kink or drowns in rounding, another may not.
const STEPS: [f64; 5] = [3e-7, 3e-6, 3e-8, 3e-5, 3e-9];
/// Two differences agree if they are at most this part of their distance to the gradient apart.
const AGREEING: f64 = 0.1;
/// How far parameters are moved first, relative to their size.
const MOVED: f64 = 1e-2;
/// Tensors that contribute little are moved by up to that factor more.
const MOST_BOOST: f64 = 100.0;
/// Most numbers that are differentiated; each takes about 50 bytes here.
const MOST_NUMBERS: usize = 1 << 27;

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
    /// For a training graph that does not return its gradients: how far its step is from the step of the graph that
    /// does.
    pub step: Option<f64>,
}

/// Why gradients are not proven.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GradientError {
    /// It cannot be tried; a sentence.
    #[error("{0}")]
    Untried(String),
    /// The loss is not that of the model's outputs.
    #[error("the loss is {found:e}, but from the model's outputs it is {expected:e} ({run})")]
    Loss {
        /// The training graph's.
        found: f64,
        /// Computed from the model's outputs.
        expected: f64,
        /// The seed and the sizes.
        run: String,
    },
    /// The loss can be computed, but what computes the gradients does not fit together.
    #[error("its gradients cannot be computed: {what} ({run})")]
    Broken {
        /// The node that refuses, and why.
        what: String,
        /// The seed and the sizes.
        run: String,
    },
    /// An output of a training graph changes if the graph does not give its gradients as well.
    #[error("`{name}` changes by {error:.1e} if the gradients are not outputs ({run})")]
    Step {
        /// The output.
        name: String,
        /// Relative to its largest element.
        error: f64,
        /// The seed and the sizes.
        run: String,
    },
    /// A gradient is wrong.
    #[error(
        "`{name}` is wrong: along a random direction the loss changes by {measured:e}, but the gradient \
         predicts {claimed:e} ({run})"
    )]
    Gradient {
        /// The output.
        name: String,
        /// The derivative by central differences.
        measured: f64,
        /// The derivative by the gradient.
        claimed: f64,
        /// The seed and the sizes.
        run: String,
    },
}

/// The model that a training graph was made of.
#[derive(Clone, Copy)]
pub struct Original<'a> {
    /// The model.
    pub model: &'a Model,
    /// What is minimized.
    pub objective: &'a Objective,
    /// The output that the loss is computed from; `None`: the first.
    pub output: Option<&'a str>,
    /// Whether the training graph runs the model in the form that the file has, so that both have the same loss.
    pub same_form: bool,
}

impl Original<'_> {
    /// The output that the loss is of, if the model runs so.
    fn output(&self, feeds: &Values) -> Option<Tensor> {
        let model = self.model;
        let graph = model.proto.graph.as_ref()?;
        let wanted = match self.objective {
            Objective::Output(name) => name.as_str(),
            _ => match self.output {
                Some(name) => name,
                None => graph.output.first()?.name.as_str(),
            },
        };
        let is_input = |name: &&String| graph.input.iter().any(|i| i.name == **name);
        let feeds = feeds.iter().filter(|(name, _)| is_input(name));
        let feeds: Values = feeds.map(|(n, t)| (n.clone(), t.clone())).collect();
        if !Cuts::new(&model.proto).nodes.is_empty() {
            return None;
        }
        let exact = program(&model.proto, &model.folder, Precision::Float64, None).ok()?;
        exact.run(&feeds, &[wanted]).ok()?.into_iter().next()
    }

    /// Gives targets the sizes of the output: the file may name these in another way than those of the inputs.
    fn fit(&self, feeds: &mut Values, output: &Tensor) {
        let mut shape = output.shape.clone();
        match self.objective {
            Objective::MeanSquaredError => {
                let Some(target) = feeds.get_mut("target").filter(|t| t.shape != shape) else {
                    return;
                };
                let mut random = Random::new(1);
                let values: Vec<f64> = (0..output.len()).map(|_| random.normal()).collect();
                *target = Tensor::new(&shape, Elements::F64(values));
            }
            Objective::CrossEntropy(_) if shape.len() >= 2 => {
                let n_classes = shape.remove(1).max(1);
                let Some(labels) = feeds.get_mut("labels").filter(|t| t.shape != shape) else {
                    return;
                };
                let n: usize = shape.iter().product();
                let values = (0..n).map(|k| (k % n_classes) as i64).collect();
                *labels = Tensor::new(&shape, Elements::I64(values));
            }
            _ => {}
        }
    }
}

/// Tries a training graph.
///
/// # Errors
/// See [`GradientError`].
pub fn check_gradients(
    training: &Model,
    original: Option<Original>,
    options: &Options,
) -> Result<GradientEvidence, GradientError> {
    let untried = |what: String| GradientError::Untried(what);
    let held = masks::held(&training.proto).map(|proto| training.with(proto));
    let training = held.as_ref().unwrap_or(training);
    let cuts = Cuts::new(&training.proto);
    if let Some(node) = cuts.nodes.first() {
        let what = format!("{} gives what is not computed here", label(node));
        return Err(untried(what));
    }
    let sampler = Sampler::new(training, &cuts, options).map_err(|e| untried(e.to_string()))?;
    let exact = program(&training.proto, &training.folder, Precision::Float64, None)
        .map_err(|e| untried(e.to_string()))?;
    // Runs that take more are refused before they start.
    exact.allow(usize::try_from(work::MOST_BYTES).unwrap_or(usize::MAX));
    let run = |unmasked: bool| -> Result<(Tried, Option<f64>, f64), GradientError> {
        let mut point = Point::find(training, (&sampler, &exact), original, unmasked)?;
        if held.is_some() {
            point.run.push_str(", random numbers held");
        }
        let same = original.filter(|o| o.same_form);
        let loss = same.map(|o| point.loss_error(o.objective));
        let loss = loss.transpose()?.flatten();
        let tried = Tried::new(training, &point, &exact)?;
        let gradients = tried.gradients(&exact)?;
        Ok((tried, loss, gradients))
    };
    let found = match run(false) {
        // Where a mask leaves nothing of a row, exporters add a number so large that what is beside it is
        // lost: the loss does not change with it, though the sum's derivative is 1.
        Err(GradientError::Gradient { .. }) if sampler.has_masks(&["labels"]) => {
            let mut found = run(true);
            if let Ok((tried, ..)) = &mut found {
                tried
                    .run
                    .push_str(", nothing masked; where masks are drawn differences disagree");
            }
            found
        }
        found => found,
    };
    let (tried, loss, gradients) = found?;
    Ok(GradientEvidence {
        run: tried.run,
        loss,
        gradients,
        step: None,
    })
}

/// Inputs at which the loss is finite.
struct Point {
    run: String,
    feeds: Values,
    loss: f64,
    /// What the model itself gives.
    output: Option<Tensor>,
    /// The unit roundoff of the narrowest type of floats in the file, if it is wider than that of f32.
    roundoff: f64,
    /// Directions to try.
    n_directions: usize,
}

impl Point {
    /// Tries sizes until the graph runs.
    fn find(
        training: &Model,
        (sampler, exact): (&Sampler, &Program),
        original: Option<Original>,
        unmasked: bool,
    ) -> Result<Point, GradientError> {
        // An even seed keeps the file's parameters, and this one has batches of three: what is normalized by
        // the statistics of two values hardly depends on what is in front of it.
        let seed = 2;
        let mut why = "no inputs could be made up".to_string();
        for attempt in sampler.attempts(seed, Planted::Nothing) {
            let attempt = match unmasked {
                true => attempt.unmasked(),
                false => attempt,
            };
            let untried = |e: VerifyError| GradientError::Untried(e.to_string());
            let Some(shapes) = sampler.shapes(&attempt).map_err(untried)? else {
                why = "inputs of the sizes tried are too large to be made up, or a size is negative; a \
                       smaller batch may do"
                    .to_string();
                continue;
            };
            let work = RunCost::new(training, &shapes);
            if let Some(refusal) = work.refusal() {
                why = refusal;
                continue;
            }
            let feeds = sampler.feeds(seed, &attempt, Planted::Nothing);
            let Some(mut feeds) = feeds.map_err(untried)? else {
                continue;
            };
            let output = original.and_then(|o| o.output(&feeds));
            if let Some((original, output)) = original.zip(output.as_ref()) {
                original.fit(&mut feeds, output);
            }
            match exact.run(&feeds, &["loss"]) {
                Err(error) => why = error.to_string(),
                Ok(found) => match found.first().and_then(Tensor::scalar) {
                    Some(loss) if loss.is_finite() => {
                        return Ok(Point {
                            run: attempt.describe(seed, Planted::Nothing),
                            feeds,
                            loss,
                            output,
                            roundoff: sampler.roundoff(),
                            n_directions: if work.is_large() { 1 } else { N_DIRECTIONS },
                        });
                    }
                    _ => why = "its loss is not finite on inputs made up for it".to_string(),
                },
            }
        }
        Err(GradientError::Untried(why))
    }

    /// How far the loss is from that of the model's outputs; `None` if the model does not run so.
    fn loss_error(&self, objective: &Objective) -> Result<Option<f64>, GradientError> {
        let output = self.output.as_ref();
        let Some(expected) = output.and_then(|o| objective.of(o, &self.feeds)) else {
            return Ok(None);
        };
        let error = (self.loss - expected).abs() / expected.abs().max(f64::MIN_POSITIVE);
        let most = MOST_LOSS_ERROR.max(ROUNDINGS * self.roundoff);
        let same = self.loss == expected || error <= most;
        same.then_some(Some(error))
            .ok_or_else(|| GradientError::Loss {
                found: self.loss,
                expected,
                run: self.run.clone(),
            })
    }
}

/// What a difference says of gradients.
enum Verdict {
    /// They are close; the error.
    Close(f64),
    /// Differences agree with each other, and not with them.
    Wrong { measured: f64, claimed: f64 },
    /// Differences do not agree; the closest is that far away.
    Unsettled(f64),
}

/// A run of the training graph.
struct Tried {
    run: String,
    feeds: Values,
    loss: f64,
    roundoff: f64,
    n_directions: usize,
    /// What is differentiated: its name, its value, its gradient.
    parts: Vec<(String, Tensor, Vec<f64>)>,
}

impl Tried {
    /// The gradients near the file's parameters.
    fn new(training: &Model, point: &Point, exact: &Program) -> Result<Tried, GradientError> {
        let untried = |what: String| GradientError::Untried(what);
        let graph = training.proto.graph.iter();
        let outputs = graph.flat_map(|g| &g.output).map(|o| o.name.as_str());
        let names: Vec<&str> = outputs.filter_map(|o| o.strip_suffix(".grad")).collect();
        let n_numbers = differentiated(training, &names);
        if n_numbers > MOST_NUMBERS {
            let what = format!(
                "{n_numbers} numbers are differentiated; up to {MOST_NUMBERS} are tried at once"
            );
            return Err(untried(what));
        }
        let gradients: Vec<String> = names.iter().map(|n| format!("{n}.grad")).collect();
        let mut wanted = vec!["loss"];
        wanted.extend(gradients.iter().map(String::as_str));
        let values = exact
            .run(&point.feeds, &names)
            .map_err(|e| untried(e.to_string()))?;
        // Some values cannot be moved, such as those that have to stay positive.
        for scale in [MOVED, 0.0] {
            let mut feeds = point.feeds.clone();
            let moved = names.iter().zip(&values).enumerate();
            for (n, (name, value)) in moved {
                feeds.insert(name.to_string(), nearby(value, scale, n as u64));
            }
            let found = exact.run(&feeds, &wanted).map_err(|error| match error {
                EvaluateError::Operator { .. } | EvaluateError::Node { .. } => {
                    GradientError::Broken {
                        what: error.to_string(),
                        run: point.run.clone(),
                    }
                }
                error => untried(error.to_string()),
            })?;
            let numbers: Option<Vec<Vec<f64>>> = found.iter().map(Tensor::to_f64).collect();
            let numbers = numbers.unwrap_or_default();
            let finite = numbers.iter().flatten().all(|v| v.is_finite());
            let Some(loss) = numbers.first().and_then(|l| l.first()).filter(|_| finite) else {
                continue;
            };
            let parts = names.iter().zip(&numbers[1..]).map(|(name, gradient)| {
                let value = feeds.get(*name).cloned();
                let value = value.unwrap_or_else(|| Tensor::new(&[0], Elements::F64(Vec::new())));
                (name.to_string(), value, gradient.clone())
            });
            return Ok(Tried {
                run: point.run.clone(),
                loss: *loss,
                roundoff: point.roundoff,
                n_directions: point.n_directions,
                parts: parts.collect(),
                feeds,
            });
        }
        let what = "its gradients are not finite on inputs made up for it";
        Err(untried(what.to_string()))
    }

    /// The largest error of a direction.
    fn gradients(&self, exact: &Program) -> Result<f64, GradientError> {
        let directions = 0..self.n_directions;
        directions
            .map(|direction| self.along(exact, direction))
            .try_fold(0.0f64, |worst, error| Ok(worst.max(error?)))
    }

    /// The error along a direction.
    fn along(&self, exact: &Program, direction: usize) -> Result<f64, GradientError> {
        let directions = self.directions(direction);
        let all: Vec<usize> = (0..self.parts.len()).collect();
        let unsettled = |error: f64| {
            GradientError::Untried(format!(
                "differences of the loss do not settle ({error:.0e} of what gradients say)"
            ))
        };
        let all = match self.difference(exact, &directions, &all)? {
            Verdict::Close(error) => return Ok(error),
            Verdict::Unsettled(error) if error <= MOST_UNSETTLED => return Ok(error),
            Verdict::Unsettled(error) => return Err(unsettled(error)),
            Verdict::Wrong { measured, claimed } => (all, measured, claimed),
        };
        let (set, measured, claimed) = self.guilty(exact, &directions, all)?;
        let names: Vec<String> = set
            .iter()
            .map(|n| format!("{}.grad", self.parts[*n].0))
            .collect();
        Err(GradientError::Gradient {
            name: names.join("` or `"),
            measured,
            claimed,
            run: self.run.clone(),
        })
    }

    /// The smallest wrong set of gradients that halving leads to, with what differences measure and gradients claim of
    /// it: each trial is several runs, and a network has hundreds of parameters.
    fn guilty(
        &self,
        exact: &Program,
        directions: &[Vec<f64>],
        (mut set, mut measured, mut claimed): (Vec<usize>, f64, f64),
    ) -> Result<(Vec<usize>, f64, f64), GradientError> {
        while set.len() > 1 {
            let right = set.split_off(set.len() / 2);
            let mut found = None;
            for half in [&set, &right] {
                if let Verdict::Wrong { measured, claimed } =
                    self.difference(exact, directions, half)?
                {
                    found = Some((half.clone(), measured, claimed));
                    break;
                }
            }
            match found {
                Some(half) => (set, measured, claimed) = half,
                // Wrong only together: each half's part of the loss may be too small to tell.
                None => {
                    set.extend(right);
                    break;
                }
            }
        }
        Ok((set, measured, claimed))
    }

    /// Random directions: that of each part is as large as the part, and larger if the part contributes little.
    fn directions(&self, direction: usize) -> Vec<Vec<f64>> {
        let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
        let sizes = self.parts.iter().map(|(_, value, gradient)| {
            let size = size(&value.to_f64().unwrap_or_default());
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

    /// What differences say of gradients if these parts are moved.
    fn difference(
        &self,
        exact: &Program,
        directions: &[Vec<f64>],
        moved: &[usize],
    ) -> Result<Verdict, GradientError> {
        let contributed = moved.iter().map(|n| {
            let terms = self.parts[*n].2.iter().zip(&directions[*n]);
            terms.map(|(g, d)| g * d).sum::<f64>()
        });
        let contributed: Vec<f64> = contributed.collect();
        let claimed: f64 = contributed.iter().sum();
        // If the gradients claim nothing, the error is relative to the loss.
        let scale = contributed.iter().map(|c| c.abs()).sum::<f64>();
        let scale = scale.max(1e-6 * self.loss.abs()).max(f64::MIN_POSITIVE);
        let most = MOST_ERROR.max(ROUNDINGS * self.roundoff);
        let mut measured: Vec<f64> = Vec::new();
        let mut closest = f64::INFINITY;
        for step in STEPS {
            let ahead = self.loss_at(exact, directions, moved, step)?;
            let behind = self.loss_at(exact, directions, moved, -step)?;
            let now = (ahead - behind) / (2.0 * step);
            let error = (now - claimed).abs() / scale;
            if error <= most {
                return Ok(Verdict::Close(error));
            }
            closest = closest.min(error);
            let agrees = |other: &f64| (other - now).abs() <= AGREEING * (now - claimed).abs();
            if measured.iter().filter(|m| agrees(m)).count() >= 2 {
                return Ok(Verdict::Wrong {
                    measured: now,
                    claimed,
                });
            }
            measured.push(now);
        }
        Ok(Verdict::Unsettled(closest))
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

/// The value with every element moved at random by about `scale` of the tensor's size, which for zeros is taken as 1.
fn nearby(value: &Tensor, scale: f64, seed: u64) -> Tensor {
    let values = value.to_f64().unwrap_or_default();
    let size = scale * size(&values);
    let mut random = Random::new(0x5eed_0000 + seed);
    let moved = values.iter().map(|v| v + size * random.normal());
    Tensor::new(&value.shape, Elements::F64(moved.collect()))
}

/// Root mean square; 1 where all are 0.
fn size(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().map(|x| x * x).sum();
    match sum > 0.0 {
        true => (sum / values.len() as f64).sqrt(),
        false => 1.0,
    }
}

/// How many numbers the initializers of these names have.
fn differentiated(training: &Model, names: &[&str]) -> usize {
    let stored = training.proto.graph.iter().flat_map(|g| &g.initializer);
    let named = stored.filter(|t| names.contains(&t.name.as_str()));
    let sizes = named.map(|t| crate::tensor::sizes(&t.dims).map_or(0, |(_, n)| n));
    sizes.fold(0, usize::saturating_add)
}

#[cfg(test)]
mod tests;
