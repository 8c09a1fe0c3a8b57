//! What a caller may tell the compiler about a program, and the program's decisions as rows to show and to save.
//!
//! Owns the way from a captured graph and a recipe file to a plan, and the numbers by which plans are compared.
//! Nothing here is compiled or run.

use crate::budget::{KeptBudget, Limit, MemoryBudget};
use crate::error::CompileError;
use crate::plan::{Plan, PlanOptions, Recomputation, Step};
use crate::recipe::{Entry, RecipeFile, fingerprint};
use crate::report::{KernelReport, Memory, Report, planning_target};
use crate::torch::Captured;
use crate::undone::Undone;
use fusion::{Applied, Decision, Outcome, Target};
use graph::{Blocking, Machine};
use serde::Serialize;

/// What a caller tells the compiler.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choices {
    /// Decisions to take otherwise, of all programs of the model.
    pub recipe: Option<RecipeFile>,
    /// How much memory the intermediate results of each program may take.
    pub budget: Option<MemoryBudget>,
    /// The machine as it was measured; without it, limits are assumed.
    pub machine: Option<Machine>,
}

impl Captured {
    /// A plan for the sizes the graph was captured with.
    ///
    /// # Errors
    /// See [`CompileError`].
    pub fn plan(
        &self,
        wrt: &[usize],
        target: Target,
        threads: usize,
        choices: &Choices,
    ) -> Result<Plan, CompileError> {
        self.plan_for(self.hints(), wrt, target, threads, choices)
    }

    /// A plan for some sizes.
    ///
    /// # Errors
    /// See [`CompileError`].
    pub fn plan_for(
        &self,
        sizes: &graph::Bindings,
        wrt: &[usize],
        target: Target,
        threads: usize,
        choices: &Choices,
    ) -> Result<Plan, CompileError> {
        let step = self.step(wrt, target)?;
        let known = self.recomputation(wrt).filter(|_| target == Target::Cpu);
        let plan = planned_like(&step, sizes, (target, threads), choices, known)?;
        if target == Target::Cpu {
            self.recompute_so(wrt, &plan.recomputation);
        }
        Ok(plan)
    }
}

/// A plan of a step under what the caller tells.
///
/// # Errors
/// As for [`Step::plan`]; names in the recipe that Shorthaul does not know.
pub fn planned(
    step: &Step,
    sizes: &graph::Bindings,
    place: (Target, usize),
    choices: &Choices,
) -> Result<Plan, CompileError> {
    planned_like(step, sizes, place, choices, None)
}

/// Like [`planned`], with what another program of the step computes again.
fn planned_like(
    step: &Step,
    sizes: &graph::Bindings,
    (target, threads): (Target, usize),
    choices: &Choices,
    recomputation: Option<Recomputation>,
) -> Result<Plan, CompileError> {
    let mut options = PlanOptions::for_target(target);
    let isa = planning_target()?.with_machine(choices.machine);
    options.machine = Some(isa.machine);
    options.threads = threads;
    options.recomputation = recomputation;
    options.limit = choices.budget.map(|budget| Limit {
        budget,
        isa,
        threads,
    });
    let mut note = None;
    if let Some(file) = &choices.recipe {
        let is_training = !step.gradient_inputs.is_empty();
        let chosen = file.for_step(step.graph(), is_training)?;
        let same_kind = file.programs.iter().any(|p| p.training == is_training);
        if !chosen.is_for_program && same_kind {
            note = Some(OTHER_MODEL.to_string());
        }
        options.recipe = chosen.recipe;
    }
    let mut plan = step.plan_with(sizes, &options)?;
    plan.notes = note.into_iter().collect();
    let unmet = plan.unmet.iter().map(|u| u.sentence());
    plan.notes.extend(unmet.collect::<Vec<_>>());
    Ok(plan)
}

const OTHER_MODEL: &str = "the recipe belongs to another model: it has no section whose nodes are those of this \
    program, so Shorthaul decides itself";

/// A planned program in rows and numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Described {
    /// The program's structure; see [`fingerprint`].
    pub structure: String,
    /// Whether it has a backward pass.
    pub training: bool,
    /// Its decisions in order, then what the recipe says about places that do not exist.
    pub decisions: Vec<DecisionRow>,
    /// What the recipe says and could not be done, in sentences.
    pub notes: Vec<String>,
    /// Kernels.
    pub n_kernels: usize,
    /// Bytes of the containers that kernels read and write.
    pub bytes_moved: i64,
    /// Bytes that no schedule can avoid moving.
    pub bytes_least: i64,
    /// Arithmetic operations.
    pub operations: u64,
    /// Memory.
    pub memory: Memory,
    /// Most bytes of intermediate results at one time: what is kept for the backward pass, and the larger arena.
    pub peak_bytes: usize,
    /// Microseconds of all kernels by bytes and operations, predicted; `None` on a GPU.
    pub predicted_us: Option<f64>,
    /// How the memory budget was kept, if there is one.
    pub budget: Option<KeptBudget>,
}

/// One decision to show.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DecisionRow {
    /// The entry as in a file, with its sentence as the file's comment.
    #[serde(flatten)]
    pub entry: Entry,
    /// The line of the model it came from.
    pub source: String,
    /// What happened, or why not.
    pub what: String,
    /// Why it was refused.
    pub reason: Option<String>,
    /// Whether a recipe may decide otherwise.
    pub may_change: bool,
    /// Whether the program has such a decision.
    pub exists: bool,
    /// Bytes not moved because of it; for a refusal, those that it would have saved.
    pub bytes: i64,
    /// Bytes not kept for the backward pass because of it, or that would not be.
    pub memory_bytes: i64,
    /// Operations done again because of it, or that would be.
    pub operations: i64,
}

impl Described {
    /// The description of a plan that is lowered now.
    ///
    /// # Errors
    /// A graph that has no kernels yet.
    pub fn of_plan(plan: &Plan, threads: usize) -> Result<Described, CompileError> {
        Ok(Described::new(plan, &Report::of_plan(plan, threads)?))
    }

    /// The description of a plan and its report.
    pub fn new(plan: &Plan, report: &Report) -> Described {
        let memory = report.memory;
        let rows = plan.decisions.iter().map(|d| row(plan, d, &report.undone));
        let missing = plan.unmet.iter().filter(|u| u.reason.is_none());
        let missing = missing.map(|u| DecisionRow {
            entry: Entry {
                sentence: u.sentence(),
                ..Entry::of_place(&u.place, !u.take, Some(u.take))
            },
            source: String::new(),
            what: u.sentence(),
            reason: None,
            may_change: true,
            exists: false,
            bytes: 0,
            memory_bytes: 0,
            operations: 0,
        });
        let unknown = report.notes.iter().filter(|n| !plan.notes.contains(n));
        Described {
            structure: fingerprint(plan.step.graph()),
            training: !plan.step.gradient_inputs.is_empty(),
            decisions: rows.chain(cut_rows(report)).chain(missing).collect(),
            notes: plan.notes.iter().chain(unknown).cloned().collect(),
            n_kernels: report.kernels.len(),
            bytes_moved: report.bytes_moved,
            bytes_least: report.bytes_least,
            operations: report.operations,
            memory,
            peak_bytes: memory.peak_bytes(),
            predicted_us: report.predicted_us(),
            budget: plan.budget,
        }
    }
}

fn row(plan: &Plan, decision: &Decision, undone: &[Undone]) -> DecisionRow {
    let take = plan.recipe.override_for(|| decision.place.clone());
    let undone = undone.iter().find(|u| u.place == decision.place);
    let what = match undone {
        Some(undone) => format!(
            "{}; this was undone: {}",
            decision.sentence(),
            undone.reason
        ),
        None => decision.sentence(),
    };
    let reason = undone.map(|u| u.reason.to_string());
    let is_applied = decision.is_applied() && undone.is_none();
    let entry = Entry::of_place(&decision.place, is_applied, take);
    let entry = match &decision.outcome {
        Outcome::Applied(Applied::LaidOut { order }) => entry.with_order(order),
        _ => entry,
    };
    DecisionRow {
        entry: Entry {
            sentence: comment(decision, is_applied, &what),
            ..entry
        },
        source: decision.origin.source.clone(),
        what,
        reason: reason.or_else(|| decision.reason()),
        may_change: decision.may_change(),
        exists: true,
        bytes: decision.bytes,
        memory_bytes: decision.memory_bytes,
        operations: decision.operations,
    }
}

/// How contractions are cut.
fn cut_rows(report: &Report) -> Vec<DecisionRow> {
    let row = |kernel: &KernelReport| {
        let placed = kernel.cuts.as_ref()?;
        let blocking = &placed.cuts.blocking;
        let what = match blocking {
            Blocking::Winograd => "it is a Winograd convolution".to_string(),
            Blocking::Cuts(_) => format!("the contraction is cut as {blocking}"),
        };
        let us = kernel
            .predicted
            .map_or(String::new(), |p| format!(" (predicted {:.0} µs)", p.us));
        let is_told = placed.requested.as_ref() == Some(blocking);
        Some(DecisionRow {
            entry: Entry {
                blocking: Some(blocking.to_string()),
                sentence: format!("blocking at {}: {what}{us}", placed.place.node),
                ..Entry::of_place(&placed.place, true, is_told.then_some(true))
            },
            source: kernel
                .operators
                .first()
                .map_or(String::new(), |o| o.source.clone()),
            what,
            reason: None,
            may_change: true,
            exists: true,
            bytes: 0,
            memory_bytes: 0,
            operations: 0,
        })
    };
    report.kernels.iter().filter_map(row).collect()
}

/// What a decision does and what it is worth, in one line.
fn comment(decision: &Decision, is_applied: bool, what: &str) -> String {
    let mut worth = Vec::new();
    let verb = |applied: &'static str, refused: &'static str| match is_applied {
        true => applied,
        false => refused,
    };
    match decision.bytes {
        0 => {}
        n if n > 0 => worth.push(format!("{} {}", verb("saves", "would save"), size(n))),
        n => worth.push(format!("{} {}", verb("costs", "would cost"), size(-n))),
    }
    if decision.memory_bytes > 0 {
        let freed = size(decision.memory_bytes);
        worth.push(format!("{} {freed} of memory", verb("frees", "would free")));
    }
    if decision.operations > 0 {
        let n = decision.operations;
        worth.push(format!(
            "{n} operations {}",
            verb("again", "would be done again")
        ));
    }
    let what = format!("{} at {}: {what}", decision.rewrite(), decision.origin.node,);
    match worth.is_empty() {
        true => what,
        false => format!("{what} ({})", worth.join(", ")),
    }
}

fn size(bytes: i64) -> String {
    match bytes {
        0..1024 => format!("{bytes} bytes"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
    }
}
