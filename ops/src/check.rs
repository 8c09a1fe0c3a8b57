//! Turning an operator's samples into tests: inputs, a graph of one node, reference results, and
//! central differences. Other rooms test their treatment of every operator with the same cases.
//!
//! This file never decides what is compared; tests do.

use crate::meaning::type_of;
use crate::op::{Call, Op, OpError, Sample, TensorType};
use crate::reference::constant_shape;
use graph::{
    Builder, ContainerId, DType, Graph, Library, Lifetime, Origin, Scalar, Stage, Tensor, Values,
};
use std::sync::Arc;

/// Step of central differences: their error is h²·f‴ plus ε/h.
pub const STEP: f64 = 1e-5;

/// One sample with its input values.
pub struct Case {
    /// The operator.
    pub op: &'static dyn Op,
    /// Where the case comes from.
    pub sample: Sample,
    /// Values of all inputs, `None` where absent.
    pub inputs: Vec<Option<Tensor>>,
    library: Library,
}

/// A graph whose body does not hold the node yet, and the node.
#[derive(Debug)]
pub struct OneNode {
    /// The inputs `x0, x1, …` of the graph are the node's present inputs; its outputs are transient.
    pub graph: Graph,
    /// The node.
    pub library: Library,
}

impl Case {
    /// Every case of every operator in the registry.
    ///
    /// # Errors
    /// A sample with a symbolic size.
    pub fn all() -> Result<Vec<Case>, OpError> {
        let samples = |op: &&'static dyn Op| {
            let op = *op;
            op.samples().into_iter().map(move |s| Case::new(op, s))
        };
        crate::registry::ALL.iter().flat_map(samples).collect()
    }

    /// A case with random values where the sample gives none.
    ///
    /// # Errors
    /// The sample has a symbolic size.
    pub fn new(op: &'static dyn Op, sample: Sample) -> Result<Self, OpError> {
        let library = Library {
            op: op.name().to_string(),
            attrs: sample.attrs.clone(),
            inputs: vec![None; sample.inputs.len()],
            outputs: Vec::new(),
        };
        let call = Call {
            library: &library,
            inputs: sample.inputs.clone(),
        };
        let mut inputs = Vec::new();
        for (position, ty) in sample.inputs.iter().enumerate() {
            let given = sample.values.iter().find(|(p, _)| *p == position);
            inputs.push(match (given, ty) {
                (Some((_, value)), _) => Some(value.clone()),
                (None, Some(ty)) => Some(random_tensor(&call, ty, sample.range, position as u64)?),
                (None, None) => None,
            });
        }
        Ok(Case {
            op,
            sample,
            inputs,
            library,
        })
    }

    /// Operator and sample, for messages.
    pub fn name(&self) -> String {
        format!("{}: {}", self.op.name(), self.sample.name)
    }

    fn call(&self) -> Call<'_> {
        Call {
            library: &self.library,
            inputs: self
                .inputs
                .iter()
                .map(|t| t.as_ref().map(type_of))
                .collect(),
        }
    }

    /// Types of the outputs.
    ///
    /// # Errors
    /// As [`Op::infer`].
    pub fn types(&self) -> Result<Vec<TensorType>, OpError> {
        self.op.infer(&self.call())
    }

    /// The outputs for those inputs.
    ///
    /// # Errors
    /// As [`Op::evaluate`].
    pub fn evaluate(&self, inputs: &[Option<Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let inputs: Vec<_> = inputs.iter().map(Option::as_ref).collect();
        self.op.evaluate(&self.call(), &inputs)
    }

    /// Values of the present inputs: what [`OneNode::graph`] is given.
    pub fn given(&self) -> Vec<Tensor> {
        self.inputs.iter().flatten().cloned().collect()
    }

    /// A graph for the case.
    ///
    /// # Errors
    /// As [`Op::infer`].
    pub fn one_node(&self) -> Result<OneNode, OpError> {
        let mut graph = Graph::new("case");
        let library = self.add_to(&mut graph)?;
        Ok(OneNode { graph, library })
    }

    /// Adds inputs and transient outputs of the case to a graph; the node is left to the caller.
    ///
    /// # Errors
    /// As [`Op::infer`].
    pub fn add_to(&self, graph: &mut Graph) -> Result<Library, OpError> {
        let mut library = self.library.clone();
        library.inputs = add_inputs(graph, "x", &self.inputs);
        library.outputs = self
            .types()?
            .into_iter()
            .enumerate()
            .map(|(n, ty)| Some(graph.add_transient(&format!("y{n}"), ty.dtype, ty.shape)))
            .collect();
        Ok(library)
    }

    /// Containers of the node's outputs that have a gradient; the others are read by the gradient itself.
    pub fn differentiated_outputs(&self, library: &Library) -> Vec<ContainerId> {
        let outputs = library.outputs.iter().enumerate();
        let outputs = outputs.filter(|(n, _)| self.op.has_gradient(library, *n));
        outputs.filter_map(|(_, output)| *output).collect()
    }

    /// Random weights in [−1, 1] for every floating-point output with a gradient: the loss is `Σ weight · output`.
    ///
    /// # Errors
    /// As [`Op::infer`].
    pub fn weights(&self) -> Result<Vec<Option<Tensor>>, OpError> {
        let call = self.call();
        let weight = |(n, ty): (usize, &TensorType)| {
            let random = || random_tensor(&call, ty, (-1.0, 1.0), 100 + n as u64);
            let counts = ty.dtype.is_float() && self.op.has_gradient(&self.library, n);
            counts.then(random).transpose()
        };
        self.types()?.iter().enumerate().map(weight).collect()
    }

    /// The loss's gradient for an input, by central differences of the reference meaning.
    ///
    /// # Errors
    /// As [`Op::evaluate`].
    pub fn differences(
        &self,
        position: usize,
        weights: &[Option<Tensor>],
    ) -> Result<Tensor, OpError> {
        let x = crate::reference::required(
            &self.call(),
            &self.inputs.iter().map(Option::as_ref).collect::<Vec<_>>(),
            position,
        )?;
        let mut inputs = self.inputs.clone();
        let mut slopes = Tensor::zeros(x.dtype, &x.shape);
        let mut loss = |at: usize, value: f64| -> Result<f64, OpError> {
            let mut moved = x.clone();
            moved.set(at, Scalar::Float(value));
            inputs[position] = Some(moved);
            let results = self.evaluate(&inputs)?.into_iter().zip(weights);
            let terms = results.filter_map(|(y, w)| Some((y.to_f64(), w.as_ref()?.to_f64())));
            Ok(terms
                .map(|(y, w)| y.iter().zip(&w).map(|(y, w)| y * w).sum::<f64>())
                .sum())
        };
        for at in 0..x.len() {
            let value = x.at(at).as_f64();
            let slope = (loss(at, value + STEP)? - loss(at, value - STEP)?) / (2.0 * STEP);
            slopes.set(at, Scalar::Float(slope));
        }
        Ok(slopes)
    }
}

/// Deterministic numbers, different for each stream.
fn random_tensor(
    call: &Call,
    ty: &TensorType,
    (low, high): (f64, f64),
    stream: u64,
) -> Result<Tensor, OpError> {
    let shape = constant_shape(call, &ty.shape)?;
    let value = |n: usize| {
        let u = f64::from(graph::philox::uniform(0x5eed + stream, n as u64));
        let x = low + (high - low) * u;
        match ty.dtype {
            DType::Bool => f64::from(u8::from(u < 0.5)),
            d if d.is_float() => x,
            _ => x.round(),
        }
    };
    let count = shape.iter().product();
    Ok(Tensor::from_f64(
        ty.dtype,
        &shape,
        (0..count).map(value).collect(),
    ))
}

/// A builder for the graph's last state; see [`append`].
pub fn builder(graph: &mut Graph) -> Builder<'_> {
    Builder::new(graph, Arc::new(Origin::default()), Stage::Forward)
}

/// Appends what was built to the graph's last state.
pub fn append(builder: Builder<'_>) {
    let nodes = builder.nodes;
    builder.graph.last_state().nodes.extend(nodes);
}

/// Adds an input of the tensor's type for each tensor.
pub fn add_inputs(
    graph: &mut Graph,
    name: &str,
    like: &[Option<Tensor>],
) -> Vec<Option<ContainerId>> {
    let mut add = |(n, tensor): (usize, &Option<Tensor>)| {
        let ty = type_of(tensor.as_ref()?);
        Some(graph.add_input(&format!("{name}{n}"), ty.dtype, ty.shape, Lifetime::Input))
    };
    like.iter().enumerate().map(&mut add).collect()
}

/// Compares shapes, then elements: integers exactly, floats within `tolerance` of the largest
/// element (at least 1), as sums cancel.
///
/// # Errors
/// A sentence with the first difference.
pub fn compare(expected: &Tensor, found: &Tensor, tolerance: f64) -> Result<(), String> {
    if expected.shape != found.shape {
        return Err(format!(
            "shape {:?}, expected {:?}",
            found.shape, expected.shape
        ));
    }
    let exact = matches!(
        (&expected.values, &found.values),
        (Values::Int(_), Values::Int(_))
    );
    let (a, b) = (expected.to_f64(), found.to_f64());
    let finite = a.iter().filter(|v| v.is_finite());
    let scale = finite.fold(1.0, |m: f64, v| m.max(v.abs()));
    let bound = if exact { 0.0 } else { tolerance * scale };
    for (n, (a, b)) in a.iter().zip(&b).enumerate() {
        let same = a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= bound;
        if !same {
            return Err(format!("element {n} is {b}, expected {a}"));
        }
    }
    Ok(())
}
