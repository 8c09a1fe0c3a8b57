//! Tuning with a clock of its own: what is faster stays, what is known is not timed, and nothing is lost.

use super::{Tuned, Tuner};
use crate::cutout::Cutout;
use crate::error::CompileError;
use crate::tuning_database::Database;
use crate::{PlanOptions, Step};
use graph::{Bindings, Graph, Machine, parse};
use kernels::compile::CompileError as Uncompiled;
use kernels::features::{CpuTarget, Isa};
use kernels::toolchain::Family;
use std::path::Path;

fn model() -> Graph {
    let text = "graph \"g\" {
  %x: f32[256, 128] input
  %w: f32[128, 96] parameter
  %b: f32[96] parameter
  %p: f32[256, 96]
  %u: f32[256, 96]
  %y: f32[256, 96]
  inputs %x, %w, %b
  state {
    %p = einsum(%x, %w) {equation=\"ni,io->no\"} @ \"layer\"
    %u = elementwise(%p, %b) {expr=($0 + $1)} @ \"layer.bias\"
    %y = elementwise(%u) {expr=(tanh($0))} @ \"layer.tanh\"
  }
  outputs %y
}";
    parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// The seconds of each round, for each kernel.
type Times = Result<Vec<Vec<f64>>, CompileError>;

/// Tunes with times that `timer` gives.
fn tuned(
    path: &Path,
    seconds: f64,
    timer: &mut dyn FnMut(&[Cutout]) -> Times,
) -> (Tuned, Step, usize) {
    tuned_with(path, "gcc 14", seconds, timer)
}

/// The same for kernels that `toolchain` compiles.
fn tuned_with(
    path: &Path,
    toolchain: &str,
    seconds: f64,
    timer: &mut dyn FnMut(&[Cutout]) -> Times,
) -> (Tuned, Step, usize) {
    let step = Step::training(&model(), &[1, 2]).expect("differentiates");
    let (mut database, _) = Database::open(path);
    let target = CpuTarget::for_isa(Isa::Avx512, Family::Gcc);
    let mut tuner = Tuner {
        step: &step,
        sizes: &Bindings::new(),
        options: PlanOptions {
            machine: Some(Machine::with_vector_width(16)),
            threads: 1,
            ..PlanOptions::default()
        },
        target: &target,
        toolchain,
        database: &mut database,
        say: &mut |_| {},
    };
    let found = tuner.tune(seconds, &mut |cutouts, _| timer(cutouts));
    let found = found.expect("plans");
    let n_used = database.n_used();
    (found, step, n_used)
}

/// The first kernel takes two seconds, all others one.
fn others_are_faster(cutouts: &[Cutout]) -> Times {
    let mut times = vec![vec![1.0; 3]; cutouts.len()];
    times[0] = vec![2.0; 3];
    Ok(times)
}

#[test]
fn what_is_faster_stays_and_is_known_the_next_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tuning.json");
    let (first, step, n_used) = tuned(&path, 60.0, &mut others_are_faster);
    assert!(first.n_tried > 0 && n_used == 0 && !first.is_interrupted);
    assert!(
        first.failed.is_empty() && !first.kept.is_empty(),
        "{first:?}"
    );
    let n_cuts = first.recipe.blockings().count();
    assert!(n_cuts > 0, "the product and its gradients can be cut");
    let options = PlanOptions {
        recipe: first.recipe.clone(),
        ..PlanOptions::default()
    };
    let plan = step.plan_with(&Bindings::new(), &options).expect("plans");
    assert_eq!(plan.unmet, []);
    let (second, _, n_used) = tuned(&path, 60.0, &mut |_| panic!("everything is known"));
    assert_eq!((second.recipe, second.n_tried), (first.recipe, 0));
    assert!(n_used > 0);
}

#[test]
fn times_hold_for_one_compiler() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tuning.json");
    let (first, ..) = tuned_with(&path, "gcc 14", 60.0, &mut others_are_faster);
    let (other, _, n_used) = tuned_with(&path, "clang 20", 60.0, &mut others_are_faster);
    assert_eq!((other.n_tried, n_used), (first.n_tried, 0));
    let (_, _, n_used) = tuned_with(&path, "gcc 14", 60.0, &mut others_are_faster);
    assert!(n_used > 0);
}

#[test]
fn a_decision_is_one_way_however_many_kernels_it_changes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tuning.json");
    let mut asked: Vec<usize> = Vec::new();
    let equal = &mut |cutouts: &[Cutout]| {
        asked.push(cutouts.len());
        Ok(vec![vec![1.0; 3]; cutouts.len()])
    };
    let (found, ..) = tuned(&path, 60.0, equal);
    // Each way has one answer in the file.
    let n_answers = std::fs::read_to_string(&path).unwrap().matches('>').count();
    assert_eq!(
        found.n_tried, n_answers,
        "kernels timed together: {asked:?}"
    );
}

#[test]
fn what_is_not_faster_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tuning.json");
    let equal = &mut |cutouts: &[Cutout]| Ok(vec![vec![1.0; 3]; cutouts.len()]);
    let (found, ..) = tuned(&path, 60.0, equal);
    assert!(found.n_tried > 0 && found.recipe.is_empty() && found.kept.is_empty());
}

#[test]
fn an_interruption_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tuning.json");
    let mut n_calls = 0;
    let (found, ..) = tuned(&path, 60.0, &mut |cutouts| {
        n_calls += 1;
        match n_calls {
            1 => others_are_faster(cutouts),
            _ => Err(Uncompiled::Interrupted.into()),
        }
    });
    assert!(found.is_interrupted && found.kept.len() == 1);
    assert!(found.recipe.blockings().count() > 0);
    // The answer to the first question is in the file.
    let mut n_questions = 0;
    let (_, _, n_used) = tuned(&path, 0.0, &mut |cutouts| {
        n_questions += 1;
        others_are_faster(cutouts)
    });
    assert!(n_used > 0 && n_questions == 0, "no time is left to ask");
}

#[test]
fn a_way_that_does_not_compile_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tuning.json");
    let broken = &mut |_: &[Cutout]| Err(CompileError::Cutout("it does not run".into()));
    let (found, ..) = tuned(&path, 60.0, broken);
    assert!(found.recipe.is_empty() && found.n_tried == 0);
    assert!(
        found.failed[0].contains("it does not run"),
        "{:?}",
        found.failed
    );
}
