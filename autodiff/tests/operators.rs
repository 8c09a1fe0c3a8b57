//! Every operator's gradient, by its rule or derived from its expansion, against central differences
//! of its reference meaning; all sizes small, everything in double precision.

use autodiff::{AutodiffError, Request, differentiate};
use graph::{Bindings, Graph, Precision, Tensor};
use ops::Meaning;
use ops::check::{Case, append, builder, compare};
use std::cell::Cell;

/// Central differences with [`ops::check::STEP`] are this good.
const DIFFERENCE: f64 = 2e-7;

type Checked = Result<(), Box<dyn std::error::Error>>;

#[test]
fn derivatives_agree_with_finite_differences() {
    for_all(|case| check(case, false));
}

/// The same with operators expanded first, so that the maps themselves are differentiated. Maps that
/// reduce by a maximum, and groups of maps, are refused; such operators need their own rule, which
/// the test above has seen to exist.
#[test]
fn derivatives_of_expansions_agree_with_finite_differences() {
    let (derived, refused) = (Cell::new(0), Cell::new(0));
    for_all(|case| match check(case, true) {
        Err(e) if matches!(e.downcast_ref(), Some(AutodiffError::Map { .. })) => {
            refused.set(refused.get() + 1);
            Ok(())
        }
        other => {
            derived.set(derived.get() + 1);
            other
        }
    });
    assert!(derived.get() > refused.get(), "most maps can be derived");
}

/// Runs a check on every differentiable case and reports all that fail at once.
fn for_all(check: impl Fn(&Case) -> Checked) {
    let failed: Vec<String> = Case::all()
        .unwrap()
        .iter()
        .filter(|case| case.sample.differentiable)
        .filter_map(|case| Some(format!("{}: {}", case.name(), check(case).err()?)))
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Differentiates `Σ w·y` with random weights `w` for every floating-point output.
fn check(case: &Case, expand_first: bool) -> Checked {
    let weights = case.weights()?;
    let one = case.one_node()?;
    let mut graph = one.graph;
    let outputs = one.library.outputs.clone();
    let mut nodes = builder(&mut graph);
    nodes.library(one.library);
    append(nodes);
    let of: Vec<_> = outputs
        .iter()
        .zip(&weights)
        .filter_map(|(id, w)| id.filter(|_| w.is_some()))
        .collect();
    if expand_first {
        ops::expand_all(&mut graph)?;
    }
    let floats = |id: &graph::ContainerId| graph.container(*id).dtype.is_float();
    let wrt: Vec<_> = graph.inputs.iter().copied().filter(floats).collect();
    let request = Request { of, wrt };
    let done = differentiate(&graph, &request)?;
    let mut given = case.given();
    given.extend(weights.iter().flatten().cloned());
    let mut found = run(&done.graph, &given)?.into_iter();
    let mut gradients = done.gradients.iter();
    for (position, x) in case.inputs.iter().enumerate() {
        let Some(x) = x.as_ref().filter(|x| x.dtype.is_float()) else {
            continue;
        };
        let gradient = gradients.next().copied().flatten();
        let gradient = gradient.and_then(|_| found.next());
        let gradient = gradient.unwrap_or_else(|| Tensor::zeros(x.dtype, &x.shape));
        compare(
            &case.differences(position, &weights)?,
            &gradient,
            DIFFERENCE,
        )
        .map_err(|e| format!("gradient of input {position}: {e}"))?;
    }
    Ok(())
}

fn run(graph: &Graph, inputs: &[Tensor]) -> Result<Vec<Tensor>, Box<dyn std::error::Error>> {
    graph::verify(graph).map_err(|errors| {
        let lines: Vec<_> = errors.iter().map(ToString::to_string).collect();
        lines.join("; ")
    })?;
    let none = Bindings::new();
    Ok(graph::interpret(
        graph,
        inputs,
        &none,
        &Meaning,
        Precision::Double,
    )?)
}
