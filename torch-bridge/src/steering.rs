//! Recipes at the boundary to Python: texts and JSON in, plans described as JSON out.
//!
//! Owns the exception for a text that is not a recipe. What is planned here is neither compiled nor run.

use crate::built::Built;
use crate::listener::detached;
use crate::program::{CompileFailure, Failure};
use compiler::Target;
use compiler::budget::MemoryBudget;
use compiler::graph::Machine;
use compiler::kernels::compile::CompileOptions;
use compiler::kernels::progress::Silent;
use compiler::recipe::RecipeFile;
use compiler::report::{Report, planning_target};
use compiler::search::{USUAL_PLANS, search};
use compiler::steering::{Choices, Described};
use compiler::torch::Captured;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;

create_exception!(
    shorthaul._native,
    RecipeFailure,
    PyException,
    "The text is not a recipe; the message says why."
);

create_exception!(
    shorthaul._native,
    BudgetFailure,
    PyException,
    "A memory budget cannot be kept; the message says what can be."
);

/// What a caller tells the compiler; a budget below 1 is a part of what a program takes without one.
pub fn choices(
    recipe: Option<&str>,
    budget: Option<f64>,
    machine: Option<&str>,
) -> PyResult<Choices> {
    let recipe = recipe.map(parsed).transpose()?;
    let budget = budget.map(|n| match n < 1.0 {
        true => MemoryBudget::Fraction(n),
        false => MemoryBudget::Bytes(n as usize),
    });
    let machine = machine.map(machine_of).transpose()?;
    Ok(Choices {
        recipe,
        budget,
        machine,
    })
}

/// A machine's limits from JSON.
fn machine_of(text: &str) -> PyResult<Machine> {
    serde_json::from_str(text)
        .map_err(|e| PyValueError::new_err(format!("these are not the limits of a machine: {e}")))
}

/// The limits that are assumed of this machine where none were measured, as JSON.
#[pyfunction]
pub fn assumed_machine() -> PyResult<String> {
    // Without a compiler nobody knows which instructions for bf16 run here.
    let probed = CompileOptions::from_environment(&mut Silent).map(|options| options.target);
    let target = probed.or_else(|_| planning_target());
    let target = target.map_err(|e| CompileFailure::new_err(e.to_string()))?;
    json(&target.machine)
}

fn parsed(text: &str) -> PyResult<RecipeFile> {
    RecipeFile::parse(text).map_err(|e| RecipeFailure::new_err(e.to_string()))
}

pub(crate) fn json(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(|e| CompileFailure::new_err(e.to_string()))
}

/// The decisions of a compiled program.
pub fn described(built: &Built) -> PyResult<String> {
    let report = Report::new(built.plan(), built.kernels(), built.memory(), built.on());
    json(&Described::new(built.plan(), &report))
}

/// Plans a captured graph for the CPU under a recipe and a memory budget, without compiling it: the fields of
/// `compiler::steering::Described` as JSON.
#[pyfunction]
#[pyo3(signature = (graph_json, constants, requires_grad, threads, recipe=None, budget=None, machine=None))]
#[allow(clippy::too_many_arguments)]
pub fn plan_program(
    py: Python<'_>,
    graph_json: &str,
    constants: Vec<Vec<u8>>,
    requires_grad: Vec<usize>,
    threads: usize,
    recipe: Option<&str>,
    budget: Option<f64>,
    machine: Option<&str>,
) -> PyResult<String> {
    let choices = choices(recipe, budget, machine)?;
    let constants: Vec<&[u8]> = constants.iter().map(Vec::as_slice).collect();
    let work = || {
        let captured = Captured::parse(graph_json, &constants).map_err(Failure::Import)?;
        let plan = captured.plan(&requires_grad, Target::Cpu, threads.max(1), &choices);
        let plan = plan.map_err(Failure::Compile)?;
        Described::of_plan(&plan, threads.max(1)).map_err(Failure::Compile)
    };
    json(&detached(py, work)?)
}

/// Searches for a faster recipe by prediction, with at most `plans` plans. Returns the fields of
/// `compiler::search::Searched` as JSON.
#[pyfunction]
#[pyo3(signature = (graph_json, constants, requires_grad, threads, recipe=None, budget=None, machine=None, plans=None))]
#[allow(clippy::too_many_arguments)]
pub fn search_program(
    py: Python<'_>,
    graph_json: &str,
    constants: Vec<Vec<u8>>,
    requires_grad: Vec<usize>,
    threads: usize,
    recipe: Option<&str>,
    budget: Option<f64>,
    machine: Option<&str>,
    plans: Option<usize>,
) -> PyResult<String> {
    let choices = choices(recipe, budget, machine)?;
    let constants: Vec<&[u8]> = constants.iter().map(Vec::as_slice).collect();
    let work = || {
        let captured = Captured::parse(graph_json, &constants).map_err(Failure::Import)?;
        let step = captured
            .step(&requires_grad, Target::Cpu)
            .map_err(Failure::Compile)?;
        let plans = plans.unwrap_or(USUAL_PLANS);
        let found = search(&step, captured.hints(), threads.max(1), &choices, plans);
        found.map_err(Failure::Compile)
    };
    json(&detached(py, work)?)
}

/// The text of a recipe's file; `programs` are its sections as JSON.
#[pyfunction]
pub fn recipe_text(model: &str, programs: &str) -> PyResult<String> {
    let sections = serde_json::from_str(programs);
    let sections = sections.map_err(|e| RecipeFailure::new_err(e.to_string()))?;
    Ok(RecipeFile::new(model, sections).text())
}

/// A recipe's file as JSON.
#[pyfunction]
pub fn recipe_parsed(text: &str) -> PyResult<String> {
    json(&parsed(text)?)
}
