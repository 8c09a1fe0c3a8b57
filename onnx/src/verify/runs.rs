//! What the original gives on inputs made up for it: in its own types, and in float64 as the reference.
//!
//! Owns the order of these runs. Small models run side by side on threads with decoded initializers kept;
//! of large ones all runs go through the file in step, so that it is read once for all of them.

use super::asked::Asked;
use super::attempts::Attempt;
use super::cuts::Cuts;
use super::samples::{MOST_ELEMENTS, Planted, STRING_WEIGHT, Sampler};
use super::{Options, Oracle, VerifyError, program};
use crate::evaluate::{EvaluateError, Lane, Outcome, Precision, Program, Values, run_in_step};
use crate::file::Model;
use crate::operators::threads;
use crate::tensor::Tensor;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One run of the original.
pub(super) struct Run {
    pub described: String,
    pub feeds: Values,
    pub stored: Vec<Tensor>,
    /// Absent where NaN or infinities were planted.
    pub exact: Option<Vec<Tensor>>,
}

impl Run {
    pub fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let shape = |(name, tensor): (&String, &Tensor)| (name.clone(), tensor.shape.clone());
        self.feeds.iter().map(shape).collect()
    }

    /// Bytes of the values that it keeps.
    pub fn n_bytes(&self) -> usize {
        let outputs = self.stored.iter().chain(self.exact.iter().flatten());
        let all = self
            .feeds
            .values()
            .chain(outputs)
            .map(Tensor::n_bytes_in_memory);
        all.fold(0, usize::saturating_add)
    }

    /// The feeds for a model in which some of them have other names.
    pub fn feeds_of(&self, renamed: &[(String, String)]) -> Cow<'_, Values> {
        let mut feeds = Cow::Borrowed(&self.feeds);
        for (before, after) in renamed {
            if let Some(value) = self.feeds.get(before) {
                feeds.to_mut().insert(after.clone(), value.clone());
            }
        }
        feeds
    }
}

/// What a program gives for each of `feeds`.
pub(super) fn all(program: &Program, feeds: &[Cow<Values>], wanted: &[&str]) -> Vec<Outcome> {
    if program.keeps() {
        let feeds = feeds.iter().collect();
        return threads::map_if(true, feeds, |feeds: &Cow<Values>| {
            program.run(feeds, wanted)
        });
    }
    let lane = |feeds| Lane { program, feeds };
    let lanes: Vec<Lane> = feeds.iter().map(|feeds| lane(feeds.as_ref())).collect();
    run_in_step(&lanes, wanted)
}

/// Whether there are elements, but none that can be compared.
pub(super) fn is_blind(tensor: &Tensor) -> bool {
    let is_float = tensor.element().is_float() && !tensor.is_empty();
    is_float
        && tensor
            .to_f64()
            .is_some_and(|v| v.iter().all(|x| !x.is_finite()))
}

fn blind_name(names: &[&str], outputs: &[Tensor]) -> String {
    let blind = names.iter().zip(outputs).find(|(_, t)| is_blind(t));
    blind.map_or(String::new(), |(name, _)| name.to_string())
}

/// Most bytes of a run's values with which runs are made side by side.
const MOST_SIDE_BY_SIDE: usize = 128 << 20;

/// How long to look for sizes and numbers with which a model runs.
const LONGEST_TRYING: Duration = Duration::from_secs(30);
/// Most draws of numbers; a further draw is made only if the model runs on none of those before.
const DRAWS: usize = 3;
/// Distance between the seeds of these draws: more than there are seeds of other runs, so that none is drawn twice, and
/// a multiple of 2 and 3, so that the batch and whatever else a seed decides by its remainder stay.
const NEXT_DRAW: usize = 96;

/// The runs after the first.
#[derive(Default)]
pub(super) struct Others {
    pub runs: Vec<Run>,
    /// Runs that are left out because the original does not run: which, and why.
    pub left_out: Vec<String>,
}

impl Others {
    /// Adds a run, or why there is none.
    ///
    /// # Errors
    /// The time is over, or the fault is not the model's.
    fn add(
        &mut self,
        (seed, planted): (usize, Planted),
        run: Result<(Run, Attempt), VerifyError>,
    ) -> Result<(), VerifyError> {
        match run {
            Ok((run, _)) => self.runs.push(run),
            Err(VerifyError::Original { cause }) => {
                let with = planted.described();
                self.left_out.push(format!("seed {seed}{with}: {cause}"));
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// One run that is to be made.
struct PlannedRun {
    seed: usize,
    planted: Planted,
    attempt: Attempt,
    feeds: Values,
}

/// The original, in its own types and as the reference.
pub(super) struct Programs<'m> {
    pub stored: Program<'m>,
    exact: Program<'m>,
    /// The program that is asked for outputs of nodes without a meaning here.
    asked: Option<Asked>,
}

impl<'m> Programs<'m> {
    pub fn new(model: &'m Model, deadline: Option<Instant>) -> Result<Programs<'m>, VerifyError> {
        let program = |precision| program(&model.proto, &model.folder, precision, deadline);
        let programs = || {
            Ok(Programs {
                stored: program(Precision::AsStored)?,
                exact: program(Precision::Float64)?,
                asked: None,
            })
        };
        programs().map_err(|cause| VerifyError::Original { cause })
    }

    /// Asks an oracle, if there is one, for what the sampler would guess.
    pub fn asking(
        mut self,
        model: &Model,
        sampler: &mut Sampler,
        oracle: Option<&Arc<dyn Oracle>>,
    ) -> Programs<'m> {
        if let Some(oracle) = oracle {
            self.asked = Asked::new(model, sampler.ask(), oracle);
        }
        self
    }

    /// Inputs of those sizes, with what an oracle gives; `None` if a size comes out negative, or the oracle refuses.
    fn feeds(
        &self,
        sampler: &Sampler,
        (seed, planted): (usize, Planted),
        attempt: &Attempt,
    ) -> Result<Option<Values>, VerifyError> {
        let feeds = sampler.feeds(seed, attempt, planted)?;
        match (&self.asked, feeds) {
            (Some(asked), Some(feeds)) => asked.with_values(feeds),
            (_, feeds) => Ok(feeds),
        }
    }

    /// The runs after the first: with each of `others` and with each size 0, where the original runs.
    ///
    /// # Errors
    /// [`VerifyError::Late`], [`VerifyError::Given`], [`VerifyError::Cut`].
    pub fn others(
        &self,
        sampler: &Sampler,
        wanted: &[String],
        others: &[(usize, Planted)],
    ) -> Result<Others, VerifyError> {
        if !self.stored.keeps() {
            return self.others_in_step(sampler, wanted, others);
        }
        let held = self.stored.most_held().max(self.exact.most_held());
        let side_by_side = held <= MOST_SIDE_BY_SIDE;
        let runs = threads::map_if(side_by_side, others.to_vec(), |(seed, planted)| {
            self.run(sampler, wanted, seed, planted)
        });
        let mut made = Others::default();
        for (plan, run) in others.iter().zip(runs) {
            made.add(*plan, run)?;
        }
        let empties = threads::map_if(side_by_side, sampler.empties(), |attempt| {
            self.run_empty(sampler, wanted, attempt)
        });
        for empty in empties {
            made.runs.extend(empty?);
        }
        Ok(made)
    }

    /// The same runs, in step.
    fn others_in_step(
        &self,
        sampler: &Sampler,
        wanted: &[String],
        others: &[(usize, Planted)],
    ) -> Result<Others, VerifyError> {
        let mut plans = Vec::new();
        for (seed, planted) in others {
            plans.push(self.first(sampler, (*seed, *planted))?);
        }
        for attempt in sampler.empties() {
            let finite = (0, Planted::Nothing);
            if let Some(feeds) = self.feeds(sampler, finite, &attempt)? {
                plans.push(Some(PlannedRun {
                    seed: 0,
                    planted: Planted::Nothing,
                    attempt,
                    feeds,
                }));
            }
        }
        let names: Vec<&str> = wanted.iter().map(String::as_str).collect();
        let all: Vec<&PlannedRun> = plans.iter().flatten().collect();
        let mut found = self.in_step(&all, &names).into_iter();
        let mut made = Others::default();
        for (n, plan) in plans.into_iter().enumerate() {
            let others = others.get(n);
            let found = plan.and_then(|plan| {
                let retried = others.is_some() && plan.planted == Planted::Nothing;
                let may_be_blind = !retried || plan.attempt.is_positive();
                let run = settled(plan, found.next()?)?;
                (may_be_blind || !run.stored.iter().any(is_blind)).then_some(run)
            });
            match (found, others) {
                (Some(run), _) => made.runs.push(run),
                // Other sizes may work.
                (None, Some(plan)) => {
                    made.add(*plan, self.run(sampler, wanted, plan.0, plan.1))?;
                }
                // The original does not run with that size 0, so the rewritten model need not either.
                (None, None) => {}
            }
        }
        Ok(made)
    }

    /// What the original gives for each plan, in its own types and exactly; nothing exact where NaN or infinities are
    /// planted.
    fn in_step<'p>(
        &'p self,
        plans: &[&'p PlannedRun],
        names: &[&str],
    ) -> Vec<(Outcome, Option<Outcome>)> {
        let is_finite = |plan: &PlannedRun| plan.planted == Planted::Nothing;
        let lanes = |program, plans: &[&'p PlannedRun]| -> Vec<Lane<'p, 'm>> {
            let feeds = plans.iter().map(|plan| &plan.feeds);
            feeds.map(|feeds| Lane { program, feeds }).collect()
        };
        let finite: Vec<&PlannedRun> = plans.iter().copied().filter(|p| is_finite(p)).collect();
        let mut all = lanes(&self.stored, plans);
        all.extend(lanes(&self.exact, &finite));
        let mut found = run_in_step(&all, names);
        let mut exact = found.split_off(plans.len()).into_iter();
        let both = found.into_iter().zip(plans);
        both.map(|(stored, plan)| match is_finite(plan) {
            true => (stored, exact.next()),
            false => (stored, None),
        })
        .collect()
    }

    /// Runs the original where a size is 0; `None` if it does not run: then the rewritten model need not either.
    fn run_empty(
        &self,
        sampler: &Sampler,
        wanted: &[String],
        attempt: Attempt,
    ) -> Result<Option<Run>, VerifyError> {
        let names: Vec<&str> = wanted.iter().map(String::as_str).collect();
        let planted = Planted::Nothing;
        let feeds = self.feeds(sampler, (0, planted), &attempt)?;
        Ok(feeds.and_then(|feeds| {
            let stored = self.stored.run(&feeds, &names);
            let exact = stored.is_ok().then(|| self.exact.run(&feeds, &names));
            let plan = PlannedRun {
                seed: 0,
                planted,
                attempt,
                feeds,
            };
            settled(plan, (stored, exact))
        }))
    }

    /// Runs the original, trying sizes and numbers until it runs; returns these too.
    ///
    /// # Errors
    /// [`VerifyError::Given`], [`VerifyError::Original`], [`VerifyError::Cut`].
    pub fn run(
        &self,
        sampler: &Sampler,
        wanted: &[String],
        seed: usize,
        planted: Planted,
    ) -> Result<(Run, Attempt), VerifyError> {
        let names: Vec<&str> = wanted.iter().map(String::as_str).collect();
        let mut last = None;
        let started = Instant::now();
        let draws = (0..DRAWS).map(|n| seed + n * NEXT_DRAW);
        let attempts = sampler.attempts(seed, planted);
        let tried = draws.flat_map(|seed| attempts.iter().map(move |attempt| (seed, attempt)));
        for (seed, attempt) in tried {
            // The last failure is reported.
            if last.is_some() && started.elapsed() > LONGEST_TRYING {
                break;
            }
            let Some(feeds) = self.feeds(sampler, (seed, planted), attempt)? else {
                continue;
            };
            let plan = PlannedRun {
                seed,
                planted,
                attempt: attempt.clone(),
                feeds,
            };
            match self.try_run(plan, &names) {
                Ok(done) => return Ok(done),
                Err(EvaluateError::Late { node }) => return Err(VerifyError::Late { node }),
                Err(cause) => last = Some(cause),
            }
        }
        Err(match last {
            Some(cause) => VerifyError::Original { cause },
            None => VerifyError::Given {
                what: format!(
                    "the made-up inputs would have a negative size, or together more than {MOST_ELEMENTS} elements, \
                     where a string counts as {STRING_WEIGHT}; give smaller sizes"
                ),
            },
        })
    }

    /// Adds the runs with those samples, in order. Gives the error if the time is over before all of them are made;
    /// those before stay.
    ///
    /// # Errors
    /// [`VerifyError::Sample`].
    pub fn add_given(
        &self,
        runs: &mut Vec<Run>,
        (model, cuts): (&Model, &Cuts),
        samples: &[Options],
        wanted: &[String],
    ) -> Result<Option<VerifyError>, VerifyError> {
        for options in samples {
            match self.given(model, cuts, options, wanted) {
                Ok(run) => runs.push(run),
                Err(late @ VerifyError::Late { .. }) => return Ok(Some(late)),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// The run with the first inputs that were given in `options`.
    ///
    /// # Errors
    /// [`VerifyError::Sample`], [`VerifyError::Late`].
    fn given(
        &self,
        model: &Model,
        cuts: &Cuts,
        options: &Options,
        wanted: &[String],
    ) -> Result<Run, VerifyError> {
        let named = |error| options.in_sample(error);
        let mut sampler = Sampler::new(model, cuts, options).map_err(named)?;
        if self.asked.is_some() {
            sampler.ask();
        }
        let run = self.run(&sampler, wanted, 0, Planted::Nothing);
        let (mut run, _) = run.map_err(named)?;
        run.described = options.described(run.described);
        Ok(run)
    }

    /// Runs the original as planned, in its own types and as the reference.
    fn try_run(&self, plan: PlannedRun, names: &[&str]) -> Result<(Run, Attempt), EvaluateError> {
        let (stored, mut exact) = match self.stored.keeps() {
            true => (self.stored.run(&plan.feeds, names), None),
            false => self.in_step(&[&plan], names).remove(0),
        };
        let stored = stored?;
        let is_finite = plan.planted == Planted::Nothing;
        // If every element is NaN or infinite, nothing can be compared: other inputs may be better.
        if is_finite && stored.iter().any(is_blind) && !plan.attempt.is_positive() {
            return Err(EvaluateError::Value {
                name: blind_name(names, &stored),
                what: "has no finite element".to_string(),
            });
        }
        if is_finite && exact.is_none() {
            exact = Some(self.exact.run(&plan.feeds, names));
        }
        let run = Run {
            described: plan.attempt.describe(plan.seed, plan.planted),
            feeds: plan.feeds,
            stored,
            exact: exact.transpose()?,
        };
        Ok((run, plan.attempt))
    }

    /// The first inputs that can be made up.
    fn first(
        &self,
        sampler: &Sampler,
        (seed, planted): (usize, Planted),
    ) -> Result<Option<PlannedRun>, VerifyError> {
        for attempt in sampler.attempts(seed, planted) {
            if let Some(feeds) = self.feeds(sampler, (seed, planted), &attempt)? {
                return Ok(Some(PlannedRun {
                    seed,
                    planted,
                    attempt,
                    feeds,
                }));
            }
        }
        Ok(None)
    }
}

/// A run that went well.
fn settled(plan: PlannedRun, (stored, exact): (Outcome, Option<Outcome>)) -> Option<Run> {
    let stored = stored.ok()?;
    Some(Run {
        described: plan.attempt.describe(plan.seed, plan.planted),
        feeds: plan.feeds,
        stored,
        exact: exact.transpose().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Element;
    use crate::rewrite::patch::int;
    use crate::rewrite::trial::{Trial, reals};
    use crate::verify::{MOST_TRIPS, Sample};

    /// What is run of a model: seeds, NaN, sizes of 0.
    fn shown(model: &Model, keeping: bool) -> Vec<String> {
        let program = |precision| {
            let program = Program::new(&model.proto, &model.folder, precision);
            let program = program.expect("a graph").within(MOST_TRIPS);
            match keeping {
                true => program.keeping(),
                false => program,
            }
        };
        let programs = Programs {
            stored: program(Precision::AsStored),
            exact: program(Precision::Float64),
            asked: None,
        };
        assert_eq!(programs.stored.keeps(), keeping);
        let cuts = Cuts::new(&model.proto);
        let mut sampler = Sampler::new(model, &cuts, &Options::default()).expect("inputs");
        let wanted = cuts.wanted(&model.proto);
        let first = programs.run(&sampler, &wanted, 0, Planted::Nothing);
        let (first, attempt) = first.expect("it runs");
        sampler.settle(&attempt);
        let others = [
            (1, Planted::Nothing),
            (2, Planted::Nan),
            (3, Planted::Infinity),
        ];
        let others = programs.others(&sampler, &wanted, &others);
        let runs = [first].into_iter().chain(others.expect("they run").runs);
        let shown = |run: Run| {
            let Run { feeds, stored, .. } = &run;
            format!("{} {feeds:?} {stored:?} {:?}", run.described, run.exact)
        };
        runs.map(shown).collect()
    }

    #[test]
    fn runs_in_step_are_those_made_alone() {
        let dense = || {
            let trial = Trial::new(17).input("x", "n 4").output("y", "n 3");
            let trial = trial.constant("w", reals(&[4, 3]));
            trial.constant("b", reals(&[3])).node("p = MatMul(x, w)")
        };
        let plain = dense().node("y = Add(p, b)");
        // Reshapes to sizes with a -1.
        let picky = dense().ints("shape", &[-1, 1, 3]).ints("back", &[-1, 3]);
        let picky = picky
            .node("r = Reshape(p, shape)")
            .node("y = Reshape(r, back)");
        // Integers of both signs look nothing up here, so that other inputs are tried.
        let table = Trial::new(17).input_of("i", Element::I64, "n");
        let table = table.output("y", "n 3").constant("w", reals(&[4, 3]));
        let table = table.with("y = Gather(w, i)", vec![int("axis", 0)]);
        for trial in [plain, picky, table] {
            let model = trial.model();
            let (alone, in_step) = (shown(&model, true), shown(&model, false));
            assert!(alone.len() >= 2, "{alone:?}");
            assert_eq!(alone, in_step);
        }
    }

    #[test]
    fn samples_after_the_time_leave_the_runs_before() {
        let trial = Trial::new(17).input("x", "n 4").output("y", "n 4");
        let model = trial.node("y = Relu(x)").model();
        let cuts = Cuts::new(&model.proto);
        let wanted = cuts.wanted(&model.proto);
        let sample = |rows: usize| Options {
            samples: vec![Sample {
                files: format!("{rows}.npz"),
                inputs: Values::from([("x".to_string(), reals(&[rows, 4]))]),
            }],
            ..Options::default()
        };
        let mut runs = Vec::new();
        let mut add = |deadline, rows| {
            let programs = Programs::new(&model, deadline).expect("a graph");
            programs.add_given(&mut runs, (&model, &cuts), &[sample(rows)], &wanted)
        };
        assert_eq!(add(None, 1), Ok(None));
        let late = add(Some(Instant::now()), 2).expect("no fault of the sample");
        assert!(matches!(late, Some(VerifyError::Late { .. })), "{late:?}");
        let runs: Vec<String> = runs.into_iter().map(|run| run.described).collect();
        assert_eq!(runs, ["seed 0, n=1, inputs of 1.npz"]);
    }

    #[test]
    fn a_lane_that_fails_leaves_the_others() {
        let trial = Trial::new(17).input("x", "n m").output("y", "n 3");
        let trial = trial.constant("w", reals(&[4, 3])).node("y = MatMul(x, w)");
        let model = trial.model();
        let program = Program::new(&model.proto, &model.folder, Precision::AsStored);
        let program = program.expect("a graph");
        let x = |columns: usize| Values::from([("x".to_string(), reals(&[2, columns]))]);
        let feeds = [x(4), x(5), x(4)].map(Cow::Owned);
        let found = all(&program, &feeds, &["y"]);
        assert!(found[1].is_err());
        assert_eq!(found[0], program.run(&feeds[0], &["y"]));
        assert_eq!(found[0], found[2]);
    }
}
