//! Whether a training graph that does not give its gradients takes the same step as the one that does.

use super::{GradientError, MOST_LOSS_ERROR, Point, ROUNDINGS};
use crate::evaluate::{Precision, Program};
use crate::file::Model;
use crate::tensor::{Tensor, Values as Elements};
use crate::verify::cuts::Cuts;
use crate::verify::samples::Sampler;
use crate::verify::{Options, masks, program};

/// Results are compared relative to at least this part of the largest element of a whole step: less counts as nothing.
const NOTHING: f64 = 1e-12;

/// Compares a training graph that does not give its gradients with the one that gives them as well: they must have the
/// same loss and the same successors of parameters and state. Returns the largest difference of a result, relative to
/// the result's largest element.
///
/// # Errors
/// See [`GradientError`].
pub fn check_same_step(
    whole: &Model,
    without: &Model,
    options: &Options,
) -> Result<f64, GradientError> {
    let untried = GradientError::Untried;
    let held = |model: &Model| masks::held(&model.proto).map(|proto| model.with(proto));
    let (held_whole, held_without) = (held(whole), held(without));
    let whole = held_whole.as_ref().unwrap_or(whole);
    let without = held_without.as_ref().unwrap_or(without);
    let programs = [exact(whole)?, exact(without)?];
    let cuts = Cuts::new(&whole.proto);
    let sampler = Sampler::new(whole, &cuts, options).map_err(|e| untried(e.to_string()))?;
    let mut point = Point::find(whole, (&sampler, &programs[0]), None, false)?;
    // Averages of squares are never negative, and steps are counted.
    for (name, value) in &mut point.feeds {
        if (name.ends_with(".square") || name == "step")
            && let Some(numbers) = value.to_f64()
        {
            let numbers = numbers.iter().map(|x| 1.0 + x.abs()).collect();
            *value = Tensor::new(&value.shape, Elements::F64(numbers));
        }
    }
    let outputs = without.proto.graph.iter().flat_map(|g| &g.output);
    let names: Vec<&str> = outputs.map(|o| o.name.as_str()).collect();
    let run = |program: &Program| {
        let found = program.run(&point.feeds, &names);
        found.map_err(|e| untried(e.to_string()))
    };
    let [wanted, found] = [run(&programs[0])?, run(&programs[1])?];
    let most = MOST_LOSS_ERROR.max(ROUNDINGS * point.roundoff);
    let largest = wanted.iter().map(largest).fold(0.0, f64::max);
    let mut worst = 0.0f64;
    for ((name, wanted), found) in names.iter().zip(&wanted).zip(&found) {
        let error = apart(wanted, found, NOTHING * largest).ok_or_else(|| {
            untried(format!(
                "`{name}` is nowhere finite on inputs made up for it"
            ))
        })?;
        if error > most {
            return Err(GradientError::Step {
                name: name.to_string(),
                error,
                run: point.run.clone(),
            });
        }
        worst = worst.max(error);
    }
    Ok(worst)
}

fn exact(model: &Model) -> Result<Program<'_>, GradientError> {
    let made = program(&model.proto, &model.folder, Precision::Float64, None);
    made.map_err(|error| GradientError::Untried(error.to_string()))
}

/// The largest finite element.
fn largest(tensor: &Tensor) -> f64 {
    let values = tensor.to_f64().unwrap_or_default();
    let finite = values.iter().filter(|v| v.is_finite());
    finite.fold(0.0, |m, v| m.max(v.abs()))
}

/// The largest difference relative to the largest element, or to `least` if that is larger; infinite where
/// sizes or kinds of numbers differ. `None` where there are elements, and none is finite on either side.
fn apart(a: &Tensor, b: &Tensor, least: f64) -> Option<f64> {
    let (Some(x), Some(y)) = (a.to_f64(), b.to_f64()) else {
        return Some(f64::INFINITY);
    };
    if a.shape != b.shape {
        return Some(f64::INFINITY);
    }
    let scale = largest(a).max(largest(b)).max(least).max(f64::MIN_POSITIVE);
    let difference = |(x, y): (&f64, &f64)| match (x.is_nan() && y.is_nan()) || x == y {
        true => 0.0,
        false if x.is_finite() && y.is_finite() => (x - y).abs() / scale,
        false => f64::INFINITY,
    };
    let known = x.is_empty() || x.iter().chain(&y).any(|v| v.is_finite());
    known.then(|| x.iter().zip(&y).map(difference).fold(0.0, f64::max))
}
