//! What tests of planning share: a planned step is interpreted beside the step it is a plan of.
//!
//! Steps are interpreted operator by operator with the reference meaning of each, plans as maps, both
//! in double precision, so that only a change of meaning can tell them apart.

#![allow(dead_code)] // Each test uses some of it.

use compiler::{Plan, Step, Target};
use graph::{
    Bindings, ContainerId, DType, Expr, Graph, Library, LibraryMeaning, Precision, Refusal,
    SymExpr, Tensor, interpret,
};
use models::net::{Net, Window};
use ops::Meaning;
use ops::check::compare;

/// Fusion reorders sums of a few dozen terms; relative to the largest element.
const TOLERANCE: f64 = 1e-9;
/// Results smaller than this are the rounding errors of terms around one that cancel.
const CANCELLED: f64 = 1e-6;

/// Knows what survives expansion: `reshape`, and operators that a target computes whole.
pub struct Reshapes<'g>(pub &'g Graph);

impl LibraryMeaning for Reshapes<'_> {
    fn evaluate(
        &self,
        library: &Library,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, Refusal> {
        if library.computed_by().is_some() {
            return Meaning.evaluate(library, inputs);
        }
        let out = library.outputs[0].ok_or("reshape without result")?;
        let shape = sizes(self.0, out);
        let x = inputs[0].ok_or("reshape without input")?;
        Ok(vec![Tensor { shape, ..x.clone() }])
    }
    fn is_random(&self, _: &str) -> bool {
        false
    }
}

/// The constant sizes of a container.
pub fn sizes(graph: &Graph, id: ContainerId) -> Vec<usize> {
    let size = |s: &SymExpr| s.as_const().expect("sizes are bound") as usize;
    graph.container(id).shape.iter().map(size).collect()
}

/// Reproducible values for the inputs from position `from` on: reals in [−1, 1], positive for
/// running variances, integers below 3.
pub fn values(graph: &Graph, from: usize) -> Vec<Tensor> {
    let value = |(n, id): (usize, &ContainerId)| {
        let c = graph.container(*id);
        let shape = sizes(graph, *id);
        let data = (0..shape.iter().product()).map(|i: usize| {
            let u = f64::from(graph::philox::uniform(7 + n as u64, i as u64)) * 2.0 - 1.0;
            match c.dtype {
                d if d.is_float() && c.name.contains("running_var") => u.abs(),
                d if d.is_float() => u,
                _ => ((2 * i + 1) % 3) as f64,
            }
        });
        Tensor::from_f64(c.dtype, &shape, data.collect())
    };
    graph
        .inputs
        .iter()
        .enumerate()
        .skip(from)
        .map(value)
        .collect()
}

/// Convolutions, one of them depthwise, with batch norm, around which a value is added.
pub fn residual_block() -> Graph {
    let mut net = Net::new("block");
    let size = |n: i64| SymExpr::constant(n);
    let x = net.input("x", DType::F32, &[size(2), size(3), size(6), size(6)]);
    let build = |net: &mut Net| {
        let y = net.conv("conv1", x, 4, Window::new(3, 1, 1))?;
        let y = net.batch_norm("bn1", y)?;
        let r = net.relu("relu1", y)?;
        let depthwise = Window {
            groups: 4,
            ..Window::new(3, 1, 1)
        };
        let y = net.conv("conv2", r, 4, depthwise)?;
        let y = net.batch_norm("bn2", y)?;
        let y = net.apply("add", Expr::In(0).add(Expr::In(1)), &[y, r])?;
        let y = net.relu("relu2", y)?;
        let y = net.conv("conv3", y, 2, Window::new(1, 2, 0))?;
        let flat = net.reshape("flatten", y, &[size(2), size(18)])?;
        net.linear("fc", flat, 5)
    };
    let y = build(&mut net).expect("builds");
    net.finish(&[y])
}

/// Plans a step and compares every result of the plan with the step's own.
///
/// # Errors
/// What does not hold, in a sentence.
pub fn agrees(step: &Step, given: &[Tensor]) -> Result<Plan, String> {
    agrees_for(step, given, Target::Cpu)
}

/// Like [`agrees`], for a target.
///
/// # Errors
/// What does not hold, in a sentence.
pub fn agrees_for(step: &Step, given: &[Tensor], target: Target) -> Result<Plan, String> {
    let plan = step
        .plan_for(&Bindings::new(), target)
        .map_err(|e| format!("plan: {e}"))?;
    means_the_same(&plan, given)?;
    Ok(plan)
}

/// Compares every result of a plan with that of its step.
///
/// # Errors
/// What does not hold, in a sentence.
pub fn means_the_same(plan: &Plan, given: &[Tensor]) -> Result<(), String> {
    let (none, step) = (Bindings::new(), &plan.step);
    graph::verify(&plan.graph).map_err(|e| format!("verify: {e:?}"))?;
    // Planning may split dimensions of inputs and results; the elements stay in order.
    let shaped = |t: &Tensor, id| Tensor {
        shape: sizes(&plan.graph, id),
        ..t.clone()
    };
    let inputs = given.iter().zip(&plan.graph.inputs);
    let split: Vec<_> = inputs.map(|(t, id)| shaped(t, *id)).collect();
    let double = Precision::Double;
    let expected = interpret(step.graph(), given, &none, &Meaning, double)
        .map_err(|e| format!("the step: {e}"))?;
    let found = interpret(&plan.graph, &split, &none, &Reshapes(&plan.graph), double)
        .map_err(|e| format!("the plan: {e}"))?;
    for (n, (expected, found)) in expected.iter().zip(&found).enumerate() {
        let expected = shaped(expected, plan.graph.outputs[n].container);
        let elements = expected.to_f64().into_iter().map(f64::abs);
        let largest = elements.filter(|x| x.is_finite()).fold(CANCELLED, f64::max);
        // `compare` holds small tensors to the tolerance as it is.
        let tolerance = TOLERANCE * largest.min(1.0);
        compare(&expected, found, tolerance).map_err(|e| format!("output {n}: {e}"))?;
    }
    Ok(())
}

/// The graph's forward step and, where it has real inputs, its training step keep their meaning.
///
/// # Errors
/// What does not hold, in a sentence.
pub fn both_agree(graph: &Graph, given: &[Tensor]) -> Result<(), String> {
    let forward = Step::forward(graph).map_err(|e| e.to_string())?;
    agrees(&forward, given).map_err(|e| format!("forward: {e}"))?;
    let real = |i: &usize| {
        let c = graph.container(graph.inputs[*i]);
        c.dtype.is_float() && !c.name.contains("running")
    };
    let trained: Vec<usize> = (0..graph.inputs.len()).filter(real).collect();
    if trained.is_empty() {
        return Ok(());
    }
    let step = Step::training(graph, &trained).map_err(|e| e.to_string())?;
    let mut all = given.to_vec();
    all.extend(values(step.graph(), given.len()));
    agrees(&step, &all).map_err(|e| format!("training: {e}"))?;
    Ok(())
}
