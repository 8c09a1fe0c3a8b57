//! Tests generated from `Op::samples`: for every operator and case, the inferred type is the
//! evaluated one, the expansion means what `evaluate` says, and the gradient rule agrees with
//! central differences of `evaluate`.
//!
//! Everything runs in double precision, so tolerances are those of f64 arithmetic.

use graph::{
    Bindings, Builder, ContainerId, DType, Graph, Library, Lifetime, Origin, Precision, Scalar,
    Stage, Tensor, Values,
};
use ops::{Call, Gradient, GradientCall, Meaning, Op, Sample, TensorType};
use std::sync::Arc;

/// Expansions reorder sums of a few dozen terms.
const EXPANSION: f64 = 1e-10;
/// Central differences with step 1e-5 err by h²·f''' plus ε/h.
const DIFFERENCE: f64 = 2e-7;
const STEP: f64 = 1e-5;

/// Deterministic numbers in [0, 1), different for each `(stream, n)`.
fn random(stream: u64, n: usize) -> f64 {
    f64::from(graph::philox::uniform(0x5eed + stream, n as u64))
}

fn random_tensor(ty: &TensorType, (low, high): (f64, f64), stream: u64) -> Tensor {
    let shape: Vec<usize> = ty
        .shape
        .iter()
        .map(|n| n.as_const().expect("samples have constant shapes") as usize)
        .collect();
    let count = shape.iter().product();
    let value = |n| {
        let x = low + (high - low) * random(stream, n);
        match ty.dtype {
            DType::Bool => f64::from(u8::from(random(stream, n) < 0.5)),
            d if d.is_float() => x,
            _ => x.round(),
        }
    };
    Tensor::from_f64(ty.dtype, &shape, (0..count).map(value).collect())
}

/// A case with a graph of one library node, the node not yet appended.
struct Case {
    op: &'static dyn Op,
    sample: Sample,
    inputs: Vec<Option<Tensor>>,
    library: Library,
}

impl Case {
    fn new(op: &'static dyn Op, sample: Sample) -> Self {
        let tensor = |(position, ty): (usize, &Option<TensorType>)| {
            let given = sample.values.iter().find(|(p, _)| *p == position);
            match (given, ty) {
                (Some((_, value)), _) => Some(value.clone()),
                (None, Some(ty)) => Some(random_tensor(ty, sample.range, position as u64)),
                (None, None) => None,
            }
        };
        Case {
            op,
            inputs: sample.inputs.iter().enumerate().map(tensor).collect(),
            library: Library {
                op: op.name().to_string(),
                attrs: sample.attrs.clone(),
                inputs: vec![None; sample.inputs.len()],
                outputs: Vec::new(),
            },
            sample,
        }
    }

    fn name(&self) -> String {
        format!("{}: {}", self.op.name(), self.sample.name)
    }

    fn call(&self) -> Call<'_> {
        Call {
            library: &self.library,
            inputs: self
                .inputs
                .iter()
                .map(|t| t.as_ref().map(ops::meaning::type_of))
                .collect(),
        }
    }

    fn evaluate(&self, inputs: &[Option<Tensor>]) -> Vec<Tensor> {
        let inputs: Vec<_> = inputs.iter().map(Option::as_ref).collect();
        self.op
            .evaluate(&self.call(), &inputs)
            .unwrap_or_else(|e| panic!("{}: evaluate: {e}", self.name()))
    }

    fn types(&self) -> Vec<TensorType> {
        self.op
            .infer(&self.call())
            .unwrap_or_else(|e| panic!("{}: infer: {e}", self.name()))
    }

    /// A graph with the inputs as containers, transient outputs, and the node that joins them.
    fn graph(&self) -> (Graph, Library) {
        let mut graph = Graph::new("case");
        let mut library = self.library.clone();
        for (position, tensor) in self.inputs.iter().enumerate() {
            library.inputs[position] = tensor.as_ref().map(|t| {
                let ty = ops::meaning::type_of(t);
                graph.add_input(&format!("x{position}"), ty.dtype, ty.shape, Lifetime::Input)
            });
        }
        library.outputs = self
            .types()
            .into_iter()
            .enumerate()
            .map(|(n, ty)| Some(graph.add_transient(&format!("y{n}"), ty.dtype, ty.shape)))
            .collect();
        (graph, library)
    }

    fn given(&self) -> Vec<Tensor> {
        self.inputs.iter().flatten().cloned().collect()
    }

    fn check_types(&self) {
        let results = self.evaluate(&self.inputs);
        let found: Vec<_> = results.iter().map(ops::meaning::type_of).collect();
        assert_eq!(
            self.types(),
            found,
            "{}: inferred and evaluated",
            self.name()
        );
    }

    fn check_expansion(&self) {
        let expected = self.evaluate(&self.inputs);
        let (mut graph, library) = self.graph();
        for output in library.outputs.iter().flatten() {
            graph.add_output(*output);
        }
        // Directly, as `expand_all` would keep a reshape.
        let mut builder = builder(&mut graph);
        let call = Call::of(builder.graph, &library);
        let expanded = self.op.expand(&call, &mut builder);
        expanded.unwrap_or_else(|e| panic!("{}: expand: {e}", self.name()));
        append(builder);
        ops::expand_all(&mut graph).unwrap_or_else(|e| panic!("{}: expand: {e}", self.name()));
        let found = run(
            &graph,
            &self.given(),
            &format!("{}: expansion", self.name()),
        );
        for (n, (a, b)) in expected.iter().zip(&found).enumerate() {
            let what = format!("{}: output {n} of the expansion", self.name());
            assert_close(a, b, EXPANSION, &what);
        }
    }

    /// Compares the gradient of `Σ w·y`, with random weights `w` for every floating-point output.
    /// Returns whether there was a rule to compare.
    fn check_gradient(&self) -> bool {
        let types = self.types();
        let weights: Vec<_> = types
            .iter()
            .enumerate()
            .map(|(n, ty)| {
                ty.dtype
                    .is_float()
                    .then(|| random_tensor(ty, (-1.0, 1.0), 100 + n as u64))
            })
            .collect();
        let Some((graph, gradients)) = self.gradient_graph(&weights) else {
            return false;
        };
        let mut given = self.given();
        given.extend(weights.iter().flatten().cloned());
        let what = format!("{}: gradient", self.name());
        let mut found = run(&graph, &given, &what).into_iter();
        for (position, gradient) in gradients.iter().enumerate() {
            let Some(x) = &self.inputs[position] else {
                continue;
            };
            if !x.dtype.is_float() {
                assert!(gradient.is_none(), "{what} of an integer input {position}");
                continue;
            }
            let differences = self.differences(position, &weights);
            let found = match gradient {
                Some(_) => found.next().expect("an output for each gradient"),
                None => Tensor::zeros(x.dtype, &x.shape),
            };
            assert_close(
                &differences,
                &found,
                DIFFERENCE,
                &format!("{what} of input {position}"),
            );
        }
        true
    }

    /// The forward node and the nodes of its gradient rule; `None` without a rule.
    fn gradient_graph(
        &self,
        weights: &[Option<Tensor>],
    ) -> Option<(Graph, Vec<Option<ContainerId>>)> {
        let (mut graph, library) = self.graph();
        let output_gradients: Vec<_> = weights
            .iter()
            .enumerate()
            .map(|(n, w)| {
                w.as_ref().map(|w| {
                    let ty = ops::meaning::type_of(w);
                    graph.add_input(&format!("dy{n}"), ty.dtype, ty.shape, Lifetime::Input)
                })
            })
            .collect();
        let mut builder = builder(&mut graph);
        builder.library(library.clone());
        let rule = GradientCall {
            call: Call::of(builder.graph, &library),
            output_gradients: &output_gradients,
            wanted: &vec![true; self.inputs.len()],
        };
        let gradient = self
            .op
            .gradient(&rule, &mut builder)
            .unwrap_or_else(|e| panic!("{}: gradient: {e}", self.name()));
        let Gradient::Rule(gradients) = gradient else {
            return None;
        };
        append(builder);
        for (position, id) in gradients.iter().enumerate() {
            if let Some(id) = id {
                let ty = ops::meaning::type_of(self.inputs[position].as_ref()?);
                let c = graph.container(*id);
                assert_eq!(
                    TensorType::new(c.dtype, c.shape.clone()),
                    ty,
                    "{}: type of the gradient of input {position}",
                    self.name()
                );
                graph.add_output(*id);
            }
        }
        Some((graph, gradients))
    }

    fn differences(&self, position: usize, weights: &[Option<Tensor>]) -> Tensor {
        let mut inputs = self.inputs.clone();
        let x = self.inputs[position].clone().expect("present");
        let mut slopes = Tensor::zeros(x.dtype, &x.shape);
        let loss = |inputs: &[Option<Tensor>]| -> f64 {
            let terms = self.evaluate(inputs).into_iter().zip(weights);
            terms
                .filter_map(|(y, w)| Some((y.to_f64(), w.as_ref()?.to_f64())))
                .map(|(y, w)| y.iter().zip(&w).map(|(y, w)| y * w).sum::<f64>())
                .sum()
        };
        for at in 0..x.len() {
            let value = x.at(at).as_f64();
            let mut at_offset = |offset: f64| {
                let mut moved = x.clone();
                moved.set(at, Scalar::Float(value + offset));
                inputs[position] = Some(moved);
                loss(&inputs)
            };
            let slope = (at_offset(STEP) - at_offset(-STEP)) / (2.0 * STEP);
            slopes.set(at, Scalar::Float(slope));
        }
        slopes
    }
}

fn builder(graph: &mut Graph) -> Builder<'_> {
    Builder::new(graph, Arc::new(Origin::default()), Stage::Forward)
}

fn append(builder: Builder<'_>) {
    let nodes = builder.nodes;
    builder.graph.last_state().nodes.extend(nodes);
}

fn run(graph: &Graph, inputs: &[Tensor], what: &str) -> Vec<Tensor> {
    graph::interpret(graph, inputs, &Bindings::new(), &Meaning, Precision::Double)
        .unwrap_or_else(|e| panic!("{what}: {e}\n{graph:#?}"))
}

/// Relative to the largest element, as sums cancel.
fn assert_close(expected: &Tensor, found: &Tensor, tolerance: f64, what: &str) {
    assert_eq!(expected.shape, found.shape, "{what}: shape");
    if let (Values::Int(a), Values::Int(b)) = (&expected.values, &found.values) {
        assert_eq!(a, b, "{what}");
        return;
    }
    let (a, b) = (expected.to_f64(), found.to_f64());
    let finite = a.iter().filter(|v| v.is_finite());
    let scale = finite.fold(1.0, |m: f64, v| m.max(v.abs()));
    for (n, (a, b)) in a.iter().zip(&b).enumerate() {
        let same = a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * scale;
        assert!(same, "{what}: element {n} is {b}, expected {a}");
    }
}

fn cases() -> impl Iterator<Item = Case> {
    ops::registry::ALL
        .iter()
        .flat_map(|op| op.samples().into_iter().map(|s| Case::new(*op, s)))
}

/// Runs a check on every case and reports all that fail at once.
fn for_all(check: impl Fn(&Case) + std::panic::RefUnwindSafe) {
    let failed: Vec<String> = cases()
        .filter_map(|case| {
            let run = std::panic::AssertUnwindSafe(|| check(&case));
            std::panic::catch_unwind(run).err().map(|_| case.name())
        })
        .collect();
    assert!(
        failed.is_empty(),
        "{} cases failed: {failed:#?}",
        failed.len()
    );
}

#[test]
fn every_operator_has_samples() {
    for op in ops::registry::ALL {
        assert!(!op.samples().is_empty(), "{} has no samples", op.name());
        let same_name = ops::registry::ALL.iter().filter(|o| o.name() == op.name());
        assert_eq!(same_name.count(), 1, "{} is registered twice", op.name());
    }
}

#[test]
fn inferred_types_are_evaluated_types() {
    for_all(Case::check_types);
}

#[test]
fn expansions_mean_what_evaluate_says() {
    for_all(Case::check_expansion);
}

#[test]
fn gradient_rules_agree_with_finite_differences() {
    for_all(|case| {
        if case.sample.differentiable {
            case.check_gradient();
        }
    });
}
