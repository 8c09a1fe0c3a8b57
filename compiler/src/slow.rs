//! Kernels that are predicted to be far from the machine's limits.
//!
//! A kernel is far from them if it takes more than [`FAR`] times its roofline. One that takes a small part of the
//! step, or less than a few launches, is not worth naming. Nothing here is measured.

use crate::report::KernelReport;
use serde::Serialize;

/// A kernel is named if it takes more than this many times its roofline.
pub const FAR: f64 = 5.0;

/// A kernel is named if it takes at least this part of the step.
const PART: f64 = 0.01;

/// A kernel is named if it takes at least this many microseconds.
const LEAST_US: f64 = 20.0;

/// What most of a kernel's predicted time goes into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Multiplying, and fetching operands again for each block.
    Products,
    /// Operations of loops.
    Loops,
    /// Moving bytes.
    Movement,
    /// Launches.
    Launches,
}

impl Cause {
    fn words(self) -> &'static str {
        match self {
            Cause::Products => "its products",
            Cause::Loops => "operations of its loops",
            Cause::Movement => "moving its bytes",
            Cause::Launches => "its launches",
        }
    }
}

/// A kernel that is far from the limits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlowKernel {
    /// Its name.
    pub kernel: String,
    /// Where its operators came from.
    pub origin: String,
    /// Microseconds that it is predicted to take.
    pub predicted_us: f64,
    /// Microseconds that it takes at the machine's limits.
    pub roofline_us: f64,
    /// What most of its time goes into.
    pub cause: Cause,
    /// All that in a sentence.
    pub sentence: String,
}

/// The kernels of a step that are far from the limits, the slowest first. Those that run as scalar loops are left to
/// their own warnings.
pub fn slow(kernels: &[KernelReport]) -> Vec<SlowKernel> {
    let us = |k: &KernelReport| k.predicted.map_or(0.0, |p| p.us);
    let whole: f64 = kernels.iter().map(us).sum();
    let mut found: Vec<SlowKernel> = kernels
        .iter()
        .filter(|k| k.path != "generic")
        .filter_map(|k| {
            let (predicted, bound) = (k.predicted?, k.bound?);
            let least = (PART * whole).max(LEAST_US).max(FAR * bound.roofline_us);
            (predicted.us > least).then(|| {
                let parts = [
                    (predicted.product_us, Cause::Products),
                    (predicted.loop_us, Cause::Loops),
                    (predicted.movement_us, Cause::Movement),
                    (predicted.launch_us, Cause::Launches),
                ];
                let longest = parts.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
                let cause = longest.map_or(Cause::Movement, |(_, cause)| cause);
                let sentence = format!(
                    "{} ({}, {}): predicted {:.2} ms, and {:.2} ms at the limits of the machine; most of it for {}",
                    k.origin,
                    k.stage,
                    k.path,
                    predicted.us / 1e3,
                    bound.roofline_us / 1e3,
                    cause.words(),
                );
                SlowKernel {
                    kernel: k.name.clone(),
                    origin: k.origin.clone(),
                    predicted_us: predicted.us,
                    roofline_us: bound.roofline_us,
                    cause,
                    sentence,
                }
            })
        })
        .collect();
    found.sort_by(|a, b| b.predicted_us.total_cmp(&a.predicted_us));
    found
}
