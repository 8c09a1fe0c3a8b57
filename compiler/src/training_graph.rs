//! A model with loss, gradients and an optimizer's update, as an ONNX file of standard operators.
//!
//! Owns what is added to the model: the loss and its target, the gradients, the update rules. The
//! operators are written by `importer::onnx::write`.

use crate::composed::{compose, join};
use crate::error::{CompileError, check};
use crate::functions::merge_functions;
use crate::training_input::output_of_loss;
pub use crate::training_options::{Loss, Optimizer, OptimizerState, TrainingOptions};
use crate::update_groups::{Passes, update_groups};
use autodiff::Request;
use graph::{
    Attr, Builder, ContainerId, DType, Expr, Graph, Lifetime, NodeKind, Origin, Scalar, Stage,
    SymExpr, Tensor,
};
use importer::onnx::{Model, Names, OnnxError, WriteError, write};
use ops::slicing::slice_attrs;
use ops::{OpBuilder, attrs};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Why there is no training graph.
#[derive(Debug, thiserror::Error)]
pub enum TrainingGraphError {
    /// The model cannot be read.
    #[error(transparent)]
    Onnx(#[from] OnnxError),
    /// The request does not fit the model.
    #[error("{0}")]
    Request(String),
    /// The graph cannot be made.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The graph cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// The bytes of an ONNX file whose outputs are `loss`, `NAME.next` for running statistics of batch
/// normalization in training form, `NAME.grad` for everything that is differentiated, if asked for, and, with an
/// optimizer, `NAME.next` and its state's successors. Initializers are inputs as well, with their value in the file
/// as default. Successors have the type of what they replace; updates of parameters in half precision are computed in
/// f32, and their state is f32.
///
/// # Errors
/// See [`TrainingGraphError`].
pub fn training_graph(
    model: &Model,
    options: &TrainingOptions,
) -> Result<Vec<u8>, TrainingGraphError> {
    if !options.gradients && options.optimizer.is_none() {
        let text = "without gradients and without an optimizer the file would only give the loss";
        return Err(TrainingGraphError::Request(text.to_string()));
    }
    let mut made = Made::of(model)?;
    let wrt = made.differentiated(model, options.wrt.as_deref())?;
    let loss = made.loss(model, options)?;
    made.graph.outputs.clear();
    made.graph.add_output(loss);
    let mut outputs = vec!["loss".to_string()];
    // What the forward pass leaves behind, whoever updates the parameters.
    for (statistic, next) in &model.statistics {
        if let Some(name) = made.names.inputs.get(statistic) {
            outputs.push(format!("{name}.next"));
            made.graph.add_output(*next);
        }
    }
    let composed = compose(&mut made.graph).map_err(CompileError::from)?;
    graph::simplify_before_gradients(&mut made.graph, &ops::Meaning);
    merge_functions(&mut made.graph);
    graph::simplify_before_gradients(&mut made.graph, &ops::Meaning);
    check("simplify", &made.graph)?;
    let named = options.wrt.is_some();
    let (wrt, gradients) = made.differentiate(&wrt, named)?;
    composed.restore(&mut made.graph);
    join(&mut made.graph);
    let given = wrt.iter().zip(&gradients).filter(|_| options.gradients);
    for (position, gradient) in given {
        made.graph.add_output(*gradient);
        outputs.push(format!("{}.grad", made.name(*position)));
    }
    if let Some(optimizer) = options.optimizer {
        let state = options.optimizer_state;
        made.update((optimizer, state), &wrt, &gradients, &mut outputs)?;
    }
    made.unambiguous(&outputs)?;
    graph::simplify(&mut made.graph, &ops::Meaning);
    check("simplify gradients", &made.graph)?;
    made.names.outputs = outputs;
    made.drop_seeds();
    Ok(write(&made.graph, &made.names)?)
}

/// The graph under construction.
struct Made {
    graph: Graph,
    names: Names,
}

impl Made {
    fn of(model: &Model) -> Result<Made, TrainingGraphError> {
        let mut names = Names {
            producer: "shorthaul".to_string(),
            about: model.about.clone(),
            ..Names::default()
        };
        for port in &model.inputs {
            names.inputs.insert(port.container, port.name.clone());
        }
        for p in &model.parameters {
            names.inputs.insert(p.container, p.name.clone());
            let tensor = p.stored.tensor().map_err(|error| {
                TrainingGraphError::Request(format!("initializer `{}`: {error}", p.name))
            })?;
            names.initial.push((p.container, tensor));
        }
        for (name, symbol) in &model.sizes {
            names.sizes.insert(symbol.to_string(), name.clone());
        }
        Ok(Made {
            graph: model.graph.clone(),
            names,
        })
    }

    fn name(&self, id: ContainerId) -> String {
        let own = || self.graph.container(id).name.clone();
        self.names.inputs.get(&id).cloned().unwrap_or_else(own)
    }

    fn differentiated(
        &self,
        model: &Model,
        wrt: Option<&[String]>,
    ) -> Result<Vec<ContainerId>, TrainingGraphError> {
        let is_float = |id: &ContainerId| self.graph.container(*id).dtype.is_float();
        let Some(wanted) = wrt else {
            let trainable = model.parameters.iter().filter(|p| p.trainable);
            return Ok(trainable.map(|p| p.container).filter(is_float).collect());
        };
        // What is named twice is differentiated once.
        let mut named = BTreeSet::new();
        let wanted = wanted.iter().filter(|name| named.insert(*name));
        let found = wanted.map(|name| {
            let known = self.names.inputs.iter().find(|(_, n)| *n == name);
            match known.map(|(id, _)| *id) {
                Some(id) if is_float(&id) => Ok(id),
                Some(id) => Err(TrainingGraphError::Request(format!(
                    "`{name}` holds {}; only real numbers have gradients",
                    self.graph.container(id).dtype
                ))),
                None => Err(TrainingGraphError::Request(format!(
                    "the model has no initializer or input `{name}`, and no `Constant` with a tensor of real numbers of \
                     that name"
                ))),
            }
        });
        found.collect()
    }

    /// Refuses what the training graph adds under a name that the model has for something else.
    fn unambiguous(&self, outputs: &[String]) -> Result<(), TrainingGraphError> {
        let mut taken: BTreeSet<&String> = self.names.inputs.values().collect();
        match outputs.iter().find(|name| !taken.insert(name)) {
            None => Ok(()),
            Some(name) => Err(already(name)),
        }
    }

    /// Appends what `make` builds.
    fn build(
        &mut self,
        origin: &str,
        stage: Stage,
        make: impl FnOnce(&mut Builder) -> Result<ContainerId, ops::OpError>,
    ) -> Result<ContainerId, TrainingGraphError> {
        let origin = Origin {
            node: origin.to_string(),
            ..Origin::default()
        };
        let mut builder = Builder::new(&mut self.graph, Arc::new(origin), stage);
        let made = make(&mut builder).map_err(CompileError::from)?;
        let nodes = std::mem::take(&mut builder.nodes);
        self.graph.last_state().nodes.extend(nodes);
        Ok(made)
    }

    /// An input of the training graph that the model does not have.
    fn input(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[SymExpr],
    ) -> Result<ContainerId, TrainingGraphError> {
        if self.names.inputs.values().any(|known| known == name) {
            return Err(already(name));
        }
        let id = self
            .graph
            .add_input(name, dtype, shape.to_vec(), Lifetime::Input);
        self.names.inputs.insert(id, name.to_string());
        Ok(id)
    }

    /// The container of the loss, a scalar.
    fn loss(
        &mut self,
        model: &Model,
        options: &TrainingOptions,
    ) -> Result<ContainerId, TrainingGraphError> {
        let (loss, smoothing) = (&options.loss, options.label_smoothing);
        let request = |text: String| Err(TrainingGraphError::Request(text));
        if !(0.0..=1.0).contains(&smoothing) || smoothing > 0.0 && *loss != Loss::CrossEntropy {
            return request(format!(
                "label smoothing is {smoothing}; it must be between 0 and 1, and needs the loss cross-entropy"
            ));
        }
        if let Loss::Output(name) = loss {
            if options.output.is_some() {
                return request(format!(
                    "the loss is the output `{name}` itself; leave out the option `output`"
                ));
            }
            let Some(port) = model.outputs.iter().find(|p| p.name == *name) else {
                let names: Vec<_> = model.outputs.iter().map(|p| p.name.as_str()).collect();
                return request(format!(
                    "the loss is cross-entropy, mse or an output of the model ({}), not `{name}`",
                    names.join(", ")
                ));
            };
            let c = self.graph.container(port.container);
            if c.shape.iter().any(|n| n.as_const() != Some(1)) {
                return request(format!(
                    "`{name}` has more than one element; a loss is one number"
                ));
            }
            let x = port.container;
            return self.build("loss", Stage::Forward, |b| {
                b.op1("reshape", &[x], attrs([("shape", Attr::Sizes(Vec::new()))]))
            });
        }
        let port = output_of_loss(model, options.output.as_deref())?;
        let (x, c) = (port.container, self.graph.container(port.container).clone());
        if *loss == Loss::MeanSquaredError {
            let target = self.input("target", c.dtype, &c.shape)?;
            return self.build("loss", Stage::Forward, |b| {
                let difference = Expr::In(0).sub(Expr::In(1));
                let square = difference.clone().mul(difference);
                let squares = b.elementwise(square, &[x, target])?;
                b.op1(
                    "reduce",
                    &[squares],
                    ops::reduce::reduce_attrs("mean", &[], false),
                )
            });
        }
        if c.shape.len() < 2 {
            return request("cross-entropy needs an output of shape [N, C, …]".to_string());
        }
        let mut shape = c.shape.clone();
        shape.remove(1);
        let labels = self.input("labels", DType::I64, &shape)?;
        self.build("loss", Stage::Forward, |b| {
            let list = attrs([("label_smoothing", Attr::Float(smoothing))]);
            let made = b.op("cross_entropy", &[Some(x), Some(labels)], list)?;
            Ok(made[0])
        })
    }

    /// Appends the gradients of the first output. What does not influence it is left out, unless it was asked for by
    /// name.
    fn differentiate(
        &mut self,
        wrt: &[ContainerId],
        named: bool,
    ) -> Result<(Vec<ContainerId>, Vec<ContainerId>), TrainingGraphError> {
        let request = Request {
            of: vec![self.graph.outputs[0].container],
            wrt: wrt.to_vec(),
        };
        let n_outputs = self.graph.outputs.len();
        let made = autodiff::differentiate(&self.graph, &request).map_err(CompileError::from)?;
        self.graph = made.graph;
        check("differentiate", &self.graph)?;
        for seed in made.seeds {
            self.graph.inputs.retain(|id| *id != seed);
            let dtype = self.graph.container(seed).dtype;
            let mut one = Tensor::zeros(dtype, &[]);
            one.set(0, Scalar::Float(1.0));
            self.graph.container_mut(seed).lifetime = Lifetime::Constant(Arc::new(one));
        }
        self.graph.outputs.truncate(n_outputs);
        let mut found = (Vec::new(), Vec::new());
        for (id, gradient) in wrt.iter().zip(made.gradients) {
            match gradient {
                Some(gradient) => {
                    found.0.push(*id);
                    found.1.push(gradient);
                }
                None if !named => {}
                None => {
                    let name = self.name(*id);
                    let text = format!("`{name}` does not influence the loss");
                    return Err(TrainingGraphError::Request(text));
                }
            }
        }
        if found.0.is_empty() {
            let text = "no trainable initializer influences the loss; name what to differentiate";
            return Err(TrainingGraphError::Request(text.to_string()));
        }
        Ok(found)
    }

    fn update(
        &mut self,
        (optimizer, state): (Optimizer, OptimizerState),
        wrt: &[ContainerId],
        gradients: &[ContainerId],
        outputs: &mut Vec<String>,
    ) -> Result<(), TrainingGraphError> {
        let rate = self.input("lr", DType::F32, &[])?;
        let is_adam = matches!(optimizer, Optimizer::Adam | Optimizer::AdamW);
        // Adam's corrections depend on how many updates there were, this one included.
        let step = match is_adam {
            true => Some(self.input("step", DType::F32, &[])?),
            false => None,
        };
        if let Some(step) = step {
            self.begins_with(state, step, 1.0);
        }
        let arrays = wrt.iter().map(|p| self.graph.container(*p));
        let arrays: Vec<_> = arrays.map(|c| (c.dtype, c.shape.clone())).collect();
        let passes = if is_adam { Passes::Many } else { Passes::Few };
        for group in update_groups(&arrays, passes) {
            let group: Vec<_> = group.iter().map(|at| (wrt[*at], gradients[*at])).collect();
            self.update_together((optimizer, state), (rate, step), &group, outputs)?;
        }
        Ok(())
    }

    /// Gives an input of the optimizer the default that the first step needs, if the file is to hold it. An array with
    /// a dynamic size has none.
    fn begins_with(&mut self, state: OptimizerState, id: ContainerId, value: f64) {
        let container = self.graph.container(id);
        let sizes = container.shape.iter().map(SymExpr::as_const);
        let sizes = sizes.map(|n| n.and_then(|n| usize::try_from(n).ok()));
        let Some(sizes) = sizes.collect::<Option<Vec<usize>>>() else {
            return;
        };
        if state == OptimizerState::Inside {
            let mut tensor = Tensor::zeros(container.dtype, &sizes);
            if value != 0.0 {
                (0..tensor.len()).for_each(|n| tensor.set(n, Scalar::Float(value)));
            }
            self.names.initial.push((id, tensor));
        }
    }

    /// Updates of parameters of one group of [`update_groups`], as one array.
    fn update_together(
        &mut self,
        (optimizer, begin): (Optimizer, OptimizerState),
        (rate, step): (ContainerId, Option<ContainerId>),
        group: &[(ContainerId, ContainerId)],
        outputs: &mut Vec<String>,
    ) -> Result<(), TrainingGraphError> {
        let state: &[&str] = match optimizer {
            Optimizer::Sgd => &[],
            Optimizer::Momentum => &["momentum"],
            Optimizer::Adam | Optimizer::AdamW => &["mean", "square"],
        };
        let names: Vec<String> = group.iter().map(|(p, _)| self.name(*p)).collect();
        let mut columns: Vec<Vec<ContainerId>> = vec![
            group.iter().map(|(p, _)| *p).collect(),
            group.iter().map(|(_, g)| *g).collect(),
        ];
        for part in state {
            let mut column = Vec::new();
            for ((p, _), name) in group.iter().zip(&names) {
                let c = self.graph.container(*p).clone();
                let input = self.input(&format!("{name}.{part}"), wide(c.dtype), &c.shape)?;
                self.begins_with(begin, input, 0.0);
                column.push(input);
            }
            columns.push(column);
        }
        let origin = names[0].clone();
        let dtype = self.graph.container(group[0].0).dtype;
        let mut inputs = Vec::new();
        for column in columns {
            inputs.push(match column.as_slice() {
                [one] => *one,
                many => self.build(&origin, Stage::Optimizer, |b| {
                    b.op1("concat", many, attrs([("axis", Attr::Int(0))]))
                })?,
            });
        }
        if matches!(optimizer, Optimizer::Adam | Optimizer::AdamW) {
            let part = Expr::float(ADAM_PART).mul(Expr::In(0).cast(wide(dtype)));
            inputs[1] = self.build(&origin, Stage::Optimizer, |b| {
                b.elementwise(part, &inputs[1..2])
            })?;
        }
        inputs.insert(2, rate);
        inputs.extend(step);
        for (suffix, expr) in update_rules(optimizer, dtype) {
            let next = self.build(&format!("{origin}{suffix}"), Stage::Optimizer, |b| {
                b.elementwise(expr, &inputs)
            })?;
            let mut start = SymExpr::constant(0);
            for ((p, _), name) in group.iter().zip(&names) {
                let size = self.graph.container(*p).shape.first().cloned();
                let part = match (group.len(), size) {
                    (1, _) | (_, None) => next,
                    (_, Some(size)) => {
                        let stop = start.clone() + size;
                        let list = slice_attrs(0, start, stop.clone(), 1);
                        start = stop;
                        self.build(&format!("{name}{suffix}"), Stage::Optimizer, |b| {
                            b.op1("slice", &[next], list)
                        })?
                    }
                };
                self.graph.add_output(part);
                outputs.push(format!("{name}{suffix}.next"));
            }
        }
        Ok(())
    }

    /// Drops the inputs that are seeds of random numbers: an ONNX runtime has seeds of its own.
    fn drop_seeds(&mut self) {
        let (mut seeds, mut read) = (BTreeSet::new(), BTreeSet::new());
        for node in self.graph.single_state().into_iter().flat_map(|s| &s.nodes) {
            match &node.kind {
                NodeKind::Library(l) if l.op == "dropout" => {
                    seeds.extend(l.inputs.get(1).copied().flatten());
                    read.extend(l.inputs.first().copied().flatten());
                }
                NodeKind::Library(l) if l.op == "elementwise" => {
                    let of_seeds = l.attrs.get("expr").map_or_else(BTreeSet::new, seeds_of);
                    for (i, input) in l.inputs.iter().enumerate() {
                        match of_seeds.contains(&i) {
                            true => seeds.extend(*input),
                            false => read.extend(*input),
                        }
                    }
                }
                _ => read.extend(node.reads()),
            }
        }
        self.graph
            .inputs
            .retain(|id| read.contains(id) || !seeds.contains(id));
    }
}

/// The operands of an expression that occur as keys of random numbers only.
fn seeds_of(expr: &Attr) -> BTreeSet<usize> {
    fn read(e: &Expr, inputs: &mut BTreeSet<usize>) {
        match e {
            Expr::Uniform(_, counter) => read(counter, inputs),
            Expr::In(i) => {
                inputs.insert(*i);
            }
            _ => e.children().for_each(|child| read(child, inputs)),
        }
    }
    let Attr::Expr(expr) = expr else {
        return BTreeSet::new();
    };
    let mut others = BTreeSet::new();
    read(expr, &mut others);
    let all = expr.inputs().into_iter();
    all.filter(|i| !others.contains(i)).collect()
}

fn already(name: &str) -> TrainingGraphError {
    TrainingGraphError::Request(format!(
        "the model already has a value called `{name}`, which the training graph adds; rename it"
    ))
}

/// The type of an optimizer's state and arithmetic: squares of gradients are often too small for half
/// precision, and so is what one step changes.
fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

/// How much of the gradient Adam's running mean takes: `1 − b1`.
const ADAM_PART: f64 = 1.0 - 0.9;

/// The successors of a parameter of type `dtype` and of its state, each with the suffix of its name. Operands are the
/// parameter, its gradient (for Adam times [`ADAM_PART`]), the rate, the state and, for Adam, the step.
fn update_rules(optimizer: Optimizer, dtype: DType) -> Vec<(&'static str, Expr)> {
    let [p, g, rate, m, v, t] = [0, 1, 2, 3, 4, 5].map(Expr::In);
    let is_half = wide(dtype) != dtype;
    let (p, g) = match is_half {
        true => (p.cast(wide(dtype)), g.cast(wide(dtype))),
        false => (p, g),
    };
    let number = Expr::float;
    let mut rules = match optimizer {
        Optimizer::Sgd => vec![("", p.sub(rate.mul(g)))],
        Optimizer::Momentum => {
            let next = number(0.9).mul(m).add(g);
            vec![("", p.sub(rate.mul(next.clone()))), (".momentum", next)]
        }
        Optimizer::Adam | Optimizer::AdamW => {
            let (b1, b2) = (0.9, 0.999);
            // The rule takes the scaled gradient that the mean needs: the product that computes the gradient can
            // compute it scaled instead. Its square then needs a factor only, as the gradient's own square does.
            let part = ADAM_PART;
            let m = number(b1).mul(m).add(g.clone());
            let v = number(b2)
                .mul(v)
                .add(number((1.0 - b2) / part / part).mul(g.clone().mul(g)));
            // 1 − bᵗ = −expm1(t·ln b) = 2h/(1 + h) with h = tanh(−t·ln b/2). The difference itself would
            // lose two digits of single precision in the first steps.
            let correction = |b: f64| {
                let h = number(-b.ln() / 2.0).mul(t.clone());
                let h = Expr::unary(graph::Unary::Tanh, h);
                number(2.0).mul(h.clone()).div(number(1.0).add(h))
            };
            // rate/(1 − b1ᵗ) · m/(√(v/(1 − b2ᵗ)) + ε), rearranged so that what depends only on the step is
            // computed once for all parameters.
            let root = correction(b2).sqrt();
            let rate_now = rate.clone().div(correction(b1)).mul(root.clone());
            let scale = v.clone().sqrt().add(root.mul(number(1e-8)));
            let change = rate_now.mul(m.clone().div(scale));
            let p = match optimizer {
                Optimizer::AdamW => p.mul(number(1.0).sub(number(0.01).mul(rate))),
                _ => p,
            };
            vec![("", p.sub(change)), (".mean", m), (".square", v)]
        }
    };
    if is_half {
        let next = rules[0].1.clone();
        rules[0].1 = next.cast(dtype);
    }
    rules
}
