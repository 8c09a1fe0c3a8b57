//! Rewriting with proof: on a difference the guilty application is found, refused, and the rest kept.
//!
//! Rewriting is a function of the model and the options, so the first k applications can be made again
//! for any k. If the first k make no difference and the first k + 1 do, application k + 1 is guilty: it is refused by
//! rule and site, and all begins again. Cost: one run of the rewritten model per halving. A rule that is guilty at
//! several sites is refused everywhere. If too many are guilty, or the search takes too long, what was rewritten
//! before the last guilty one is kept, which was shown to make no difference. If the caller's time is over, the
//! longest beginning that was shown to make none is kept.

use super::{Checker, Evidence, Options, SamplesRun, VerifyError};
use crate::file::Model;
use crate::rewrite::{self, Application, Rewritten};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Most guilty applications that are dropped one by one. After these, only what was rewritten before the last is kept.
const MAX_DROPPED: usize = 32;
/// Most sites at which a rule may be guilty; after these it is refused everywhere.
const MAX_SITES: usize = 4;
/// How long guilty applications are looked for.
const LONGEST_SEARCH: Duration = Duration::from_secs(300);

/// A rewritten model that was shown to give what the original gives.
#[derive(Clone, Debug)]
pub struct Proof {
    /// The model and what fired.
    pub rewritten: Rewritten,
    /// How it was shown.
    pub evidence: Evidence,
    /// What was dropped because it made a difference.
    pub dropped: Vec<Dropped>,
    /// Where the time limit was reached before everything was verified.
    pub stopped: Option<Stopped>,
}

/// How far verification came in the time that was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Stopped {
    /// Rewrites that were shown to make no difference; the model has these.
    pub n_verified: usize,
    /// Rewrites there would have been with more time.
    pub n_rewrites: usize,
    /// With how many of the given samples the original ran, if time was over before it had run with all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples: Option<SamplesRun>,
}

/// An application that made a difference.
#[derive(Clone, Debug)]
pub struct Dropped {
    /// The application.
    pub application: Application,
    /// The difference.
    pub difference: VerifyError,
}

/// Why there is no proof.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ProveError {
    /// The original cannot be run.
    #[error(transparent)]
    Original(VerifyError),
    /// The model differs even when nothing fires.
    #[error("internal error: two runs of the same model differ: {0}; please report this file")]
    Itself(VerifyError),
}

/// Rewrites a model and verifies it, dropping what makes a difference. `progress` is told what goes on.
///
/// # Errors
/// See [`ProveError`].
pub fn prove(
    model: &Model,
    rewriting: &rewrite::Options,
    verifying: &Options,
    progress: &mut dyn FnMut(&str),
) -> Result<Proof, ProveError> {
    progress("running the original and rewriting");
    let mut options = rewriting.clone();
    // The first rewriting does not depend on the results of the original.
    let (checker, first) = std::thread::scope(|scope| {
        let rewriting = scope.spawn(|| rewrite::rewrite(&model.proto, &model.folder, rewriting));
        let checker = Checker::in_time(model, verifying);
        let rewritten = rewriting.join();
        (
            checker,
            rewritten.unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        )
    });
    let checker = match checker {
        Ok(checker) => checker,
        // Nothing was compared, so the model stays as it is.
        Err(VerifyError::Late { .. }) => {
            return Ok(Proof {
                rewritten: unchanged(model),
                evidence: Evidence::default(),
                dropped: Vec::new(),
                stopped: Some(Stopped {
                    n_verified: 0,
                    n_rewrites: first.applied.len(),
                    samples: none_run(verifying.samples.len()),
                }),
            });
        }
        Err(error) => return Err(ProveError::Original(error)),
    };
    let mut first = Some(first);
    let mut dropped: Vec<Dropped> = Vec::new();
    let mut best: Option<(Rewritten, Evidence)> = None;
    let started = Instant::now();
    loop {
        let rewritten = first.take().unwrap_or_else(|| {
            progress("rewriting");
            rewrite::rewrite(&model.proto, &model.folder, &options)
        });
        progress("comparing");
        let difference = match judged(checker.check(&rewritten.model))? {
            Ok(evidence) => {
                let n_rewrites = rewritten.applied.len();
                let stopped = |samples| Stopped {
                    n_verified: n_rewrites,
                    n_rewrites,
                    samples: Some(samples),
                };
                return Ok(Proof {
                    rewritten,
                    evidence,
                    dropped,
                    stopped: checker.samples_run().map(stopped),
                });
            }
            Err(difference) => difference,
        };
        let n_rewrites = rewritten.applied.len();
        let stopped = |best| stopped(model, &checker, best, dropped.clone(), n_rewrites);
        // A run that was cut short says nothing about a rewrite.
        if verifying.is_late() {
            return stopped(best);
        }
        progress("looking for the rewrite that makes a difference");
        let found = guilty(model, &checker, &options, &rewritten, &mut best)?;
        let (Some((guilty, good)), false) = (found, verifying.is_late()) else {
            return stopped(best);
        };
        let is_of_rule = |d: &&Dropped| d.application.rule == guilty.rule;
        if dropped.len() >= MAX_DROPPED || started.elapsed() > LONGEST_SEARCH {
            options.limit = Some(good);
        } else if dropped.iter().filter(is_of_rule).count() + 1 >= MAX_SITES {
            options.without.insert(guilty.rule.to_string());
        } else {
            let site = (guilty.rule.to_string(), guilty.site.clone());
            options.refused.insert(site);
        }
        dropped.push(Dropped {
            application: guilty,
            difference,
        });
    }
}

/// A verdict on a rewrite. That a witness could not be asked is no verdict: no rewrite is to blame for it.
fn judged(
    verdict: Result<Evidence, VerifyError>,
) -> Result<Result<Evidence, VerifyError>, ProveError> {
    match verdict {
        Err(unasked @ VerifyError::Unasked { .. }) => Err(ProveError::Original(unasked)),
        verdict => Ok(verdict),
    }
}

/// With several samples: the record that the original ran with none of them.
fn none_run(n_given: usize) -> Option<SamplesRun> {
    (n_given > 1).then_some(SamplesRun { n_run: 0, n_given })
}

fn unchanged(model: &Model) -> Rewritten {
    Rewritten {
        model: model.proto.clone(),
        applied: Vec::new(),
    }
}

/// What is kept when the time is over.
fn stopped(
    model: &Model,
    checker: &Checker,
    best: Option<(Rewritten, Evidence)>,
    dropped: Vec<Dropped>,
    n_rewrites: usize,
) -> Result<Proof, ProveError> {
    let (rewritten, evidence) = match best {
        Some(best) => best,
        // The original gives what the original gives: only a check of that is left.
        None => {
            let unchanged = unchanged(model);
            let evidence = checker.check(&unchanged.model);
            (unchanged, evidence.map_err(ProveError::Itself)?)
        }
    };
    Ok(Proof {
        stopped: Some(Stopped {
            n_verified: rewritten.applied.len(),
            n_rewrites,
            samples: checker.samples_run(),
        }),
        rewritten,
        evidence,
        dropped,
    })
}

/// The application with which the difference begins, and how many before it make none; `None` if time is over
/// before it is found. `best` becomes the longest beginning that was shown to make no difference.
fn guilty(
    model: &Model,
    checker: &Checker,
    options: &rewrite::Options,
    rewritten: &Rewritten,
    best: &mut Option<(Rewritten, Evidence)>,
) -> Result<Option<(Application, usize)>, ProveError> {
    let with = |limit: usize| {
        let options = rewrite::Options {
            limit: Some(limit),
            ..options.clone()
        };
        rewrite::rewrite(&model.proto, &model.folder, &options)
    };
    // The first `good` make no difference, the first `bad` do.
    let (mut good, mut bad) = (0, rewritten.applied.len());
    let itself = checker.check(&with(0).model);
    if checker.is_late() {
        return Ok(None);
    }
    itself.map_err(ProveError::Itself)?;
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        let candidate = with(middle);
        match judged(checker.check(&candidate.model))? {
            Ok(evidence) => {
                good = middle;
                let longest = best.as_ref().map_or(0, |(known, _)| known.applied.len());
                if candidate.applied.len() > longest {
                    *best = Some((candidate, evidence));
                }
            }
            Err(_) if checker.is_late() => return Ok(None),
            Err(_) => bad = middle,
        }
    }
    let applied = with(bad).applied;
    match applied.into_iter().nth(bad - 1) {
        Some(application) => Ok(Some((application, good))),
        None => Err(ProveError::Itself(VerifyError::Differs {
            output: String::new(),
            run: String::new(),
            what: "nothing was rewritten".to_string(),
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rewrite::trial::{Trial, reals};
    use crate::rewrite::{Patch, Rule, Scope, rule_names};

    /// Sub becomes Add; Abs becomes Relu, which is right only for inputs that are not negative.
    const WRONG: &[Rule] = &[
        Rule {
            name: "wrong",
            at: |scope, n| exchanged(scope, n, "Sub", "Add"),
        },
        Rule {
            name: "wrong-below-zero",
            at: |scope, n| exchanged(scope, n, "Abs", "Relu"),
        },
    ];

    fn exchanged(scope: &Scope, n: usize, from: &str, to: &str) -> Option<Patch> {
        let mut node = scope.node(n).clone();
        scope.is(n, from).then(|| {
            node.op_type = to.to_string();
            Patch {
                remove: vec![n],
                insert: vec![node],
                ..Patch::default()
            }
        })
    }

    fn proof(trial: Trial) -> Proof {
        let options = rewrite::Options {
            planted: WRONG,
            ..Default::default()
        };
        prove(&trial.model(), &options, &Options::default(), &mut |_| {}).expect("a proof")
    }

    #[test]
    fn the_guilty_rewrite_is_found_and_dropped_and_the_others_stay() {
        let mut trial = Trial::new(17).input("x", "n 4").constant("w", reals(&[4]));
        for (n, from) in ["x", "a0", "a1", "a2"].into_iter().enumerate() {
            trial = trial.node(&format!("i{n} = Identity({from})"));
            let op = if n == 2 { "Sub" } else { "Mul" };
            trial = trial.node(&format!("a{n} = {op}(i{n}, w)"));
        }
        let proof = proof(trial.node("y = Tanh(a3)").output("y", "n 4"));
        let [dropped] = proof.dropped.as_slice() else {
            panic!("{:?}", proof.dropped);
        };
        assert_eq!(
            (dropped.application.rule, dropped.application.site.as_str()),
            ("wrong", "a2")
        );
        assert!(
            matches!(&dropped.difference, VerifyError::Differs { output, .. } if output == "y")
        );
        let fired = |rule: &str| {
            proof
                .rewritten
                .applied
                .iter()
                .filter(|a| a.rule == rule)
                .count()
        };
        assert_eq!((fired("remove-no-op"), fired("wrong")), (4, 0));
        let graph = proof.rewritten.model.graph.as_ref().expect("a graph");
        assert_eq!(graph.node.len(), 5);
    }

    #[test]
    fn several_guilty_ones_are_all_dropped() {
        let trial = Trial::new(17).input("x", "n 4").constant("w", reals(&[4]));
        let trial = trial
            .node("a = Sub(x, w)")
            .node("b = Sub(w, a)")
            .node("c = Abs(b)");
        let proof = proof(trial.node("y = Neg(c)").output("y", "n 4"));
        let mut sites: Vec<&str> = proof
            .dropped
            .iter()
            .map(|d| d.application.site.as_str())
            .collect();
        sites.sort_unstable();
        assert_eq!(sites.len(), 3, "{sites:?}");
    }

    /// `n` differences in a row of `x` and a weight.
    fn subtractions(n: usize) -> Trial {
        let mut trial = Trial::new(17).input("x", "n 4").constant("w", reals(&[4]));
        let mut from = "x".to_string();
        for k in 0..n {
            trial = trial.node(&format!("a{k} = Sub({from}, w)"));
            trial = trial.node(&format!("b{k} = Tanh(a{k})"));
            from = format!("b{k}");
        }
        trial.node(&format!("y = Neg({from})")).output("y", "n 4")
    }

    #[test]
    fn a_rule_that_is_wrong_at_several_sites_is_refused_everywhere() {
        let proof = proof(subtractions(12));
        assert_eq!(proof.dropped.len(), MAX_SITES);
        assert!(proof.rewritten.applied.iter().all(|a| a.rule != "wrong"));
        assert!(!proof.evidence.runs.is_empty());
    }

    #[test]
    fn runs_before_the_time_was_over_are_kept_and_their_samples_counted() {
        let model = subtractions(1).model();
        let mut checker = Checker::new(&model, &Options::default()).expect("it runs");
        let (n_run, n_given) = (1, 3);
        let node = "Sub".to_string();
        let late = VerifyError::Late { node };
        checker.late = Some((late, SamplesRun { n_run, n_given }));
        let proof = stopped(&model, &checker, None, Vec::new(), 2).expect("a proof");
        assert_eq!(proof.evidence.runs[0], "seed 0, n=1");
        let expected = Stopped {
            n_verified: 0,
            n_rewrites: 2,
            samples: Some(SamplesRun { n_run, n_given }),
        };
        assert_eq!(proof.stopped, Some(expected));
        assert_eq!(none_run(1), None);
    }

    #[test]
    fn a_wrong_rewrite_without_effect_on_any_output_is_no_difference() {
        assert!(rule_names().contains(&"remove-no-op"));
        let trial = Trial::new(17)
            .input("x", "n 4")
            .node("a = Relu(x)")
            .node("y = Abs(a)");
        assert!(proof(trial.output("y", "n 4")).dropped.is_empty());
    }
}
