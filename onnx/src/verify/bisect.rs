//! Rewriting with proof: on a difference the guilty application is found, refused, and the rest kept.
//!
//! Rewriting is a function of the model and the options, so the first k applications can be made again
//! for any k. If k make no difference and k + 1 do, application k + 1 is guilty: it is refused by rule
//! and site, and all begins again. Cost: one run of the rewritten model per halving.

use super::{Checker, Evidence, Options, VerifyError};
use crate::file::Model;
use crate::rewrite::{self, Application, Rewritten};

/// Guilty applications that are dropped before giving up.
const MAX_DROPPED: usize = 32;

/// A rewritten model that was shown to give what the original gives.
#[derive(Clone, Debug)]
pub struct Proof {
    /// The model and what fired.
    pub rewritten: Rewritten,
    /// How it was shown.
    pub evidence: Evidence,
    /// What was dropped because it made a difference.
    pub dropped: Vec<Dropped>,
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
    #[error("the model differs from itself when nothing is rewritten: {0}; report this file")]
    Itself(VerifyError),
    /// Too many applications are guilty.
    #[error("{MAX_DROPPED} rewrites made a difference, the last one: {0}; report this file")]
    Many(VerifyError),
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
    progress("running the original");
    let checker = Checker::new(model, verifying).map_err(ProveError::Original)?;
    let mut options = rewriting.clone();
    let mut dropped: Vec<Dropped> = Vec::new();
    loop {
        progress("rewriting");
        let rewritten = rewrite::rewrite(&model.proto, &model.folder, &options);
        progress("comparing");
        let difference = match checker.check(&rewritten.model) {
            Ok(evidence) => {
                return Ok(Proof {
                    rewritten,
                    evidence,
                    dropped,
                });
            }
            Err(difference) => difference,
        };
        if dropped.len() >= MAX_DROPPED {
            return Err(ProveError::Many(difference));
        }
        progress("looking for the rewrite that makes a difference");
        let guilty = guilty(model, &checker, &options, &rewritten)?;
        options
            .refused
            .insert((guilty.rule.to_string(), guilty.site.clone()));
        dropped.push(Dropped {
            application: guilty,
            difference,
        });
    }
}

/// The application with which the difference begins.
fn guilty(
    model: &Model,
    checker: &Checker,
    options: &rewrite::Options,
    rewritten: &Rewritten,
) -> Result<Application, ProveError> {
    let with = |limit: usize| {
        let options = rewrite::Options {
            limit: Some(limit),
            ..options.clone()
        };
        rewrite::rewrite(&model.proto, &model.folder, &options)
    };
    // The first `good` make no difference, the first `bad` do.
    let (mut good, mut bad) = (0, rewritten.applied.len());
    checker.check(&with(0).model).map_err(ProveError::Itself)?;
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        match checker.check(&with(middle).model) {
            Ok(_) => good = middle,
            Err(_) => bad = middle,
        }
    }
    let applied = with(bad).applied;
    match applied.into_iter().nth(bad - 1) {
        Some(application) => Ok(application),
        None => Err(ProveError::Itself(VerifyError::Differs {
            output: String::new(),
            run: String::new(),
            what: "nothing was rewritten".to_string(),
        })),
    }
}
