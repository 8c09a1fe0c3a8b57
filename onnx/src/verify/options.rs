//! How to verify: seeds, sizes, inputs that are given, limits.

use super::{Oracle, VerifyError};
use crate::evaluate::Values;
use graph::SymExpr;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Inputs that are given for a run of their own.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The files that they are from, for messages.
    pub files: String,
    /// The inputs, by name; others are made up.
    pub inputs: Values,
}

/// With how many of the given samples the original ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SamplesRun {
    /// Those with which it ran.
    pub n_run: usize,
    /// Those that were given.
    pub n_given: usize,
}

/// How to verify.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seeds with finite inputs, at least one; one more has NaN, one more infinities.
    pub n_seeds: usize,
    /// Sizes to use for dynamic sizes instead of those tried here, by name; one the file has no name
    /// for is called `INPUT.DIMENSION`.
    pub sizes: BTreeMap<String, i64>,
    /// Dynamic sizes that follow from others, by name: the length of a cache and of what is added to it, say.
    pub relations: BTreeMap<String, SymExpr>,
    /// Inputs to use instead of random ones, by name.
    pub inputs: Values,
    /// Inputs for runs of their own. The first are in the place of `inputs`; each of the others is used in one run.
    pub samples: Vec<Sample>,
    /// A program that also runs both models, on the finite inputs.
    pub oracle: Option<Arc<dyn Oracle>>,
    /// A part of an output's largest element by which the rewritten model may differ whatever rounding explains.
    pub tolerance: f64,
    /// The time to stop: what is verified by then is kept.
    pub deadline: Option<Instant>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            n_seeds: 2,
            sizes: BTreeMap::new(),
            relations: BTreeMap::new(),
            inputs: Values::new(),
            samples: Vec::new(),
            oracle: None,
            tolerance: 0.0,
            deadline: None,
        }
    }
}

impl Options {
    /// Whether the time that was given is over.
    pub fn is_late(&self) -> bool {
        self.deadline.is_some_and(|end| Instant::now() >= end)
    }

    /// Inputs to use instead of random ones.
    pub(super) fn given(&self) -> &Values {
        match self.samples.first() {
            Some(sample) => &sample.inputs,
            None => &self.inputs,
        }
    }

    /// The options for each sample alone; without samples, these options. Never empty.
    pub(super) fn by_sample(&self) -> Vec<Options> {
        if self.samples.is_empty() {
            return vec![self.clone()];
        }
        let with = |sample: &Sample| Options {
            samples: vec![sample.clone()],
            ..self.clone()
        };
        self.samples.iter().map(with).collect()
    }

    /// The error, with the files of the first sample if there is one. That the time is over says nothing about them.
    pub(super) fn in_sample(&self, error: VerifyError) -> VerifyError {
        let Some(sample) = self.samples.first() else {
            return error;
        };
        let what = match error {
            VerifyError::Late { .. } => return error,
            VerifyError::Original { cause } => format!("the model does not run: {cause}"),
            other => other.to_string(),
        };
        VerifyError::Sample {
            files: sample.files.clone(),
            what,
        }
    }

    /// The description of a run, with the files of the first sample if there is one.
    pub(super) fn described(&self, run: String) -> String {
        match self.samples.first() {
            Some(sample) => format!("{run}, inputs of {}", sample.files),
            None => run,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rewrite::trial::{Trial, reals};
    use crate::tensor::{Tensor, Values as Elements};
    use crate::verify::{Checker, compare_values, made_up};

    fn sample(files: &str, shape: &[usize], value: f32) -> Sample {
        let n = shape.iter().product();
        let tensor = Tensor::new(shape, Elements::F32(vec![value; n]));
        Sample {
            files: files.to_string(),
            inputs: Values::from([("x".to_string(), tensor)]),
        }
    }

    fn with(samples: Vec<Sample>) -> Options {
        Options {
            samples,
            ..Options::default()
        }
    }

    fn model(op: &str) -> crate::file::Model {
        let trial = Trial::new(17).input("x", "n 4").output("y", "n 4");
        trial.node(&format!("y = {op}(x)")).model()
    }

    #[test]
    fn each_sample_is_a_run() {
        let (before, after) = (model("Relu"), model("Identity"));
        let above = sample("a.npz", &[1, 4], 0.5);
        let below = sample("b.npz", &[2, 4], -0.5);
        let checked = |samples: &[&Sample]| {
            let options = with(samples.iter().copied().cloned().collect());
            let checker = Checker::new(&before, &options).expect("it runs");
            checker.check(&after.proto)
        };
        // Inputs above zero do not show the difference.
        let runs = checked(&[&above]).expect("the same").runs;
        assert_eq!(runs[0], "seed 0, n=1, inputs of a.npz");
        let error = checked(&[&above, &below]).expect_err("the second differs");
        let said = error.to_string();
        assert!(
            said.starts_with("`y` differs (seed 0, n=2, inputs of b.npz)"),
            "{said}"
        );
        let both = [sample("c.npz", &[3, 4], 1.5), above.clone()];
        let runs = checked(&[&both[0], &both[1]]).expect("the same").runs;
        let of_files: Vec<&String> = runs
            .iter()
            .filter(|run| run.contains("inputs of"))
            .collect();
        let expected = [
            "seed 0, n=3, inputs of c.npz",
            "seed 0, n=1, inputs of a.npz",
        ];
        assert_eq!(of_files, expected.iter().collect::<Vec<_>>());
        // The search for the first value that differs takes all of them too.
        let found = compare_values(&before, &after, &with(vec![above.clone(), below]));
        let first = found.expect("they run").first.expect("a difference");
        assert!(first.run.ends_with("inputs of b.npz"), "{}", first.run);
        // Where one set of inputs is asked for, it is the first.
        let feeds = made_up(&before, 0, &with(both.to_vec())).expect("it runs");
        assert_eq!(feeds["x"].shape, [3, 4]);
    }

    #[test]
    fn a_sample_that_does_not_fit_is_named() {
        let model = model("Relu");
        let refused = |samples: Vec<Sample>| {
            let checker = Checker::new(&model, &with(samples));
            checker.err().expect("it does not fit").to_string()
        };
        let (good, bad) = (sample("a.npz", &[1, 4], 0.5), sample("b.npz", &[4], 0.5));
        let expected = "with the inputs of b.npz, the input `x` has 2 dimensions";
        for samples in [vec![good.clone(), bad.clone()], vec![bad, good]] {
            let said = refused(samples);
            assert!(said.starts_with(expected), "{said}");
        }
        // It fits what is declared, but the model does not run on it.
        let trial = Trial::new(17)
            .input("x", "n 4")
            .constant("w", reals(&[3, 4]));
        let trial = trial.node("y = Add(x, w)").output("y", "3 4");
        let options = with(vec![sample("c.npz", &[2, 4], 0.5)]);
        let picky = trial.model();
        let said = Checker::new(&picky, &options)
            .err()
            .expect("it does not run");
        let said = said.to_string();
        assert!(
            said.starts_with("with the inputs of c.npz, the model does not run: "),
            "{said}"
        );
    }
}
