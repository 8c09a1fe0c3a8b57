//! Tests generated from `Op::samples`: for every operator and case, the inferred type is the
//! evaluated one, the expansion means what `evaluate` says, and the gradient rule agrees with
//! central differences of `evaluate`.
//!
//! Everything runs in double precision, so tolerances are those of f64 arithmetic.

use graph::{Bindings, Graph, Precision, Tensor};
use ops::check::{Case, add_inputs, append, builder, compare};
use ops::meaning::type_of;
use ops::{Call, Gradient, GradientCall, Meaning, TensorType};

/// Expansions reorder sums of a few dozen terms.
const EXPANSION: f64 = 1e-10;
/// Central differences with [`ops::check::STEP`] are this good.
const DIFFERENCE: f64 = 2e-7;

type Checked = Result<(), Box<dyn std::error::Error>>;

/// Runs a check on every case and reports all that fail at once.
fn for_all(check: impl Fn(&Case) -> Checked) {
    let failed: Vec<String> = Case::all()
        .unwrap()
        .iter()
        .filter_map(|case| Some(format!("{}: {}", case.name(), check(case).err()?)))
        .collect();
    assert!(
        failed.is_empty(),
        "{} cases failed:\n{}",
        failed.len(),
        failed.join("\n")
    );
}

/// Runs a verified graph in double precision.
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

#[test]
fn every_operator_has_samples_and_its_own_name() {
    for op in ops::registry::ALL {
        assert!(!op.samples().is_empty(), "{} has no samples", op.name());
        let same_name = ops::registry::ALL.iter().filter(|o| o.name() == op.name());
        assert_eq!(same_name.count(), 1, "{} is registered twice", op.name());
    }
}

#[test]
fn inferred_types_are_evaluated_types() {
    for_all(|case| {
        let results = case.evaluate(&case.inputs)?;
        let found: Vec<_> = results.iter().map(type_of).collect();
        match case.types()? == found {
            true => Ok(()),
            false => Err(format!("inferred {:?}, evaluated {found:?}", case.types()?).into()),
        }
    });
}

#[test]
fn expansions_mean_what_evaluate_says() {
    for_all(|case| {
        let one = case.one_node()?;
        let mut graph = one.graph;
        for output in one.library.outputs.iter().flatten() {
            graph.add_output(*output);
        }
        // Not by `expand_all`, which would keep a reshape.
        let mut builder = builder(&mut graph);
        let call = Call::of(builder.graph, &one.library);
        case.op.expand(&call, &mut builder)?;
        append(builder);
        ops::expand_all(&mut graph)?;
        let found = run(&graph, &case.given())?;
        for (n, (a, b)) in case.evaluate(&case.inputs)?.iter().zip(&found).enumerate() {
            compare(a, b, EXPANSION).map_err(|e| format!("output {n}: {e}"))?;
        }
        Ok(())
    });
}

#[test]
fn gradient_rules_agree_with_finite_differences() {
    for_all(|case| match case.sample.differentiable {
        true => check_gradient(case),
        false => Ok(()),
    });
}

/// Compares the gradient of `Σ w·y`, with random weights `w` for every floating-point output, both
/// as the rule's nodes mean it and after their expansion. If the operator has no rule for that, it
/// is asked for the gradient of the first output only, as networks ask; if it has none for that either,
/// with respect to the first input only. Operators without a rule are tested where they are
/// differentiated, in the `autodiff` room.
fn check_gradient(case: &Case) -> Checked {
    let mut weights = case.weights()?;
    let mut wanted = vec![true; case.inputs.len()];
    if compare_gradient(case, &weights, &wanted)? {
        return Ok(());
    }
    weights.iter_mut().skip(1).for_each(|w| *w = None);
    if !compare_gradient(case, &weights, &wanted)? {
        wanted.iter_mut().skip(1).for_each(|w| *w = false);
        compare_gradient(case, &weights, &wanted)?;
    }
    Ok(())
}

/// Whether there was a rule to compare.
fn compare_gradient(
    case: &Case,
    weights: &[Option<Tensor>],
    wanted: &[bool],
) -> Result<bool, Box<dyn std::error::Error>> {
    let one = case.one_node()?;
    let mut graph = one.graph;
    let output_gradients = add_inputs(&mut graph, "dy", weights);
    let mut builder = builder(&mut graph);
    builder.library(one.library.clone());
    let rule = GradientCall {
        call: Call::of(builder.graph, &one.library),
        output_gradients: &output_gradients,
        wanted,
    };
    let Gradient::Rule(gradients) = case.op.gradient(&rule, &mut builder)? else {
        return Ok(false);
    };
    append(builder);
    for id in gradients.iter().flatten() {
        graph.add_output(*id);
    }
    let mut given = case.given();
    given.extend(weights.iter().flatten().cloned());
    let mut expanded = graph.clone();
    ops::expand_all(&mut expanded)?;
    let mut found = run(&graph, &given)?
        .into_iter()
        .zip(run(&expanded, &given)?);
    for (position, x) in case.inputs.iter().enumerate() {
        let gradient = gradients.get(position).copied().flatten();
        let results = gradient.and_then(|_| found.next());
        let wanted = wanted[position];
        let Some(x) = x.as_ref().filter(|x| wanted && x.dtype.is_float()) else {
            match gradient {
                None => continue,
                Some(_) => return Err(format!("input {position} has no gradient").into()),
            }
        };
        if let Some(id) = gradient {
            let c = graph.container(id);
            let ty = TensorType::new(c.dtype, c.shape.clone());
            if ty != type_of(x) {
                return Err(format!("gradient of input {position} is {ty:?}").into());
            }
        }
        let zeros = || Tensor::zeros(x.dtype, &x.shape);
        let (rule, maps) = results.unwrap_or_else(|| (zeros(), zeros()));
        let differences = case.differences(position, weights)?;
        let of = |e: String| format!("gradient of input {position}: {e}");
        compare(&differences, &rule, DIFFERENCE).map_err(of)?;
        compare(&rule, &maps, EXPANSION).map_err(|e| of(format!("expanded: {e}")))?;
    }
    Ok(true)
}
