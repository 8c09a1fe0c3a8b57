//! burn as an independent oracle of gradients: two networks are written a second time with burn's
//! tensors, and its automatic differentiation must give the gradients of our differentiated graph.
//! Both in double precision, so that nothing but a wrong derivative can tell them apart.

use burn::tensor::activation::{log_softmax, relu, softmax};
use burn::tensor::module::{avg_pool2d, conv2d, max_pool2d};
use burn::tensor::ops::{AvgPoolOptions, ConvOptions, MaxPoolOptions};
use burn::tensor::{DType as BurnType, Device, Gradients, Tensor as Burn, TensorData};
use compiler::Step;
use graph::{Bindings, DType, Expr, Graph, Precision, SymExpr, Tensor, interpret};
use models::net::{Net, Window};
use models::transformer::{Encoder, encoder_layer};
use ops::OpBuilder;
use std::collections::BTreeMap;

/// Sums of a few hundred terms in another order, of the largest element.
const TOLERANCE: f64 = 1e-9;

/// A network's training step as we compute it: values by the names of inputs.
struct Ours {
    /// Given values: inputs, parameters and, by `grad_…`, the gradients of results.
    given: BTreeMap<String, Tensor>,
    /// The first result.
    result: Tensor,
    /// Gradients by the name of the input.
    gradients: BTreeMap<String, Tensor>,
}

impl Ours {
    fn of(graph: &Graph) -> Ours {
        let is_trained = |i: &usize| {
            let c = graph.container(graph.inputs[*i]);
            c.dtype.is_float() && !c.name.contains("running")
        };
        let trained: Vec<usize> = (0..graph.inputs.len()).filter(is_trained).collect();
        let step = Step::training(graph, &trained).expect("differentiates");
        let step_graph = step.graph();
        let values: Vec<Tensor> = step_graph
            .inputs
            .iter()
            .enumerate()
            .map(|(n, id)| value(step_graph, n, *id))
            .collect();
        let name = |id: &graph::ContainerId| step_graph.container(*id).name.clone();
        let none = Bindings::new();
        let double = Precision::Double;
        let mut results =
            interpret(step_graph, &values, &none, &ops::Meaning, double).expect("interprets");
        let gradients = results.split_off(step.n_outputs);
        let inputs = step.gradient_inputs.iter().map(|i| &step_graph.inputs[*i]);
        Ours {
            given: step_graph.inputs.iter().map(name).zip(values).collect(),
            result: results.remove(0),
            gradients: inputs.map(name).zip(gradients).collect(),
        }
    }

    /// A given value as burn's, tracked.
    fn leaf<const D: usize>(&self, name: &str) -> Burn<D> {
        let ours = self.given.get(name).unwrap_or_else(|| panic!("`{name}`"));
        let data = TensorData::new(ours.to_f64(), ours.shape.clone());
        let device = Device::flex().autodiff();
        Burn::from_data(data, (&device, BurnType::F64)).require_grad()
    }

    /// The only seed.
    fn seed<const D: usize>(&self) -> Burn<D> {
        let mut seeds = self.given.keys().filter(|name| name.starts_with("grad_"));
        let name = seeds.next().expect("a seed");
        assert!(seeds.next().is_none(), "one seed");
        self.leaf(name)
    }
}

/// Reproducible reals in [−1, 1].
fn value(graph: &Graph, n: usize, id: graph::ContainerId) -> Tensor {
    let size = |s: &SymExpr| s.as_const().expect("constant") as usize;
    let c = graph.container(id);
    let shape: Vec<usize> = c.shape.iter().map(size).collect();
    let real = |i| f64::from(graph::philox::uniform(11 + n as u64, i as u64)) * 2.0 - 1.0;
    let data = (0..shape.iter().product()).map(real).collect();
    Tensor::from_f64(c.dtype, &shape, data)
}

fn assert_close<const D: usize>(what: &str, ours: &Tensor, theirs: Burn<D>) {
    let data = theirs.into_data();
    let theirs: &[f64] = data.as_slice().expect("double precision");
    let ours = ours.to_f64();
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let scale = ours.iter().fold(1e-3_f64, |m, x| m.max(x.abs()));
    for (at, (a, b)) in ours.iter().zip(theirs).enumerate() {
        let error = (a - b).abs() / scale;
        assert!(error <= TOLERANCE, "{what}: element {at} is {a}, burn {b}");
    }
}

/// Compares the gradients of those leaves, and takes them off the list of those still to compare.
macro_rules! compare_gradients {
    ($ours:expr, $gradients:expr, $($leaf:expr => $name:expr),* $(,)?) => {{
        let mut left: Vec<&String> = $ours.gradients.keys().collect();
        $(
            let gradients: &Gradients = &$gradients;
            let theirs = $leaf.grad(gradients).expect("burn has this gradient");
            assert_close($name, &$ours.gradients[$name], theirs);
            left.retain(|name| *name != $name);
        )*
        assert!(left.is_empty(), "not compared: {left:?}");
    }};
}

fn sizes(list: &[i64]) -> Vec<SymExpr> {
    list.iter().map(|n| SymExpr::constant(*n)).collect()
}

/// Convolution, batch normalization, max pooling, a strided depthwise convolution, a residual sum,
/// average pooling, a linear layer and log-probabilities: x `[2, 3, 8, 8]` to `[2, 5]`.
fn convolutional() -> Graph {
    let mut net = Net::new("convolutional");
    let x = net.input("x", DType::F32, &sizes(&[2, 3, 8, 8]));
    let build = |net: &mut Net| {
        let y = net.conv("conv1", x, 6, Window::new(3, 1, 1))?;
        let y = net.batch_norm("bn1", y)?;
        let y = net.relu("relu1", y)?;
        let window = |kernel: i64| {
            ops::attrs([
                ("kernel", graph::Attr::Ints(vec![kernel, kernel])),
                ("stride", graph::Attr::Ints(vec![2, 2])),
            ])
        };
        let r = net.with("maxpool", |b| {
            Ok(b.op("max_pool", &[Some(y)], window(2))?[0])
        })?;
        let depthwise = Window {
            groups: 6,
            ..Window::new(3, 1, 1)
        };
        let y = net.conv("conv2", r, 6, depthwise)?;
        let y = net.apply("add", Expr::In(0).add(Expr::In(1)), &[y, r])?;
        let y = net.with("avgpool", |b| b.op1("average_pool", &[y], window(2)))?;
        let y = net.conv("conv3", y, 4, Window::new(1, 1, 0))?;
        let y = net.reshape("flatten", y, &sizes(&[2, 16]))?;
        let y = net.linear("fc", y, 5)?;
        let last = ops::attrs([("axis", graph::Attr::Int(-1))]);
        net.with("log_softmax", |b| b.op1("log_softmax", &[y], last))
    };
    let y = build(&mut net).expect("builds");
    net.finish(&[y])
}

fn conv(x: Burn<4>, w: &Burn<4>, pad: usize, groups: usize) -> Burn<4> {
    let options = ConvOptions::new([1, 1], [pad, pad], [1, 1], groups);
    conv2d(x, w.clone(), None, options)
}

#[test]
fn gradients_of_a_convolutional_network() {
    let ours = Ours::of(&convolutional());
    let x = ours.leaf::<4>("x");
    let (w1, w2, w3) = (
        ours.leaf::<4>("conv1.weight"),
        ours.leaf::<4>("conv2.weight"),
        ours.leaf::<4>("conv3.weight"),
    );
    let (gamma, beta) = (ours.leaf::<1>("bn1.weight"), ours.leaf::<1>("bn1.bias"));
    let (w, b) = (ours.leaf::<2>("fc.weight"), ours.leaf::<1>("fc.bias"));
    let y = conv(x.clone(), &w1, 1, 1);
    let over = |t: Burn<4>| t.mean_dim(0).mean_dim(2).mean_dim(3);
    let centred = y.clone() - over(y);
    let variance = over(centred.clone() * centred.clone());
    let normal = centred / (variance + 1e-5).sqrt();
    let channel = |t: &Burn<1>| t.clone().reshape([1, 6, 1, 1]);
    let y = relu(normal * channel(&gamma) + channel(&beta));
    let r = max_pool2d(y, MaxPoolOptions::new([2, 2]).with_stride([2, 2]));
    let y = conv(r.clone(), &w2, 1, 6) + r;
    let y = avg_pool2d(y, AvgPoolOptions::new([2, 2]).with_stride([2, 2]));
    let y = conv(y, &w3, 0, 1).reshape([2, 16]);
    let y = y.matmul(w.clone().swap_dims(0, 1)) + b.clone().unsqueeze::<2>();
    let y = log_softmax(y, 1);
    assert_close("y", &ours.result, y.clone());
    let gradients = (y * ours.seed()).sum().backward();
    compare_gradients!(ours, gradients,
        x => "x", w1 => "conv1.weight", w2 => "conv2.weight", w3 => "conv3.weight",
        gamma => "bn1.weight", beta => "bn1.bias", w => "fc.weight", b => "fc.bias",
    );
}

/// A linear layer over the last dimension, and its leaves.
fn linear(ours: &Ours, name: &str, x: Burn<3>) -> (Burn<3>, Burn<2>, Burn<1>) {
    let w = ours.leaf::<2>(&format!("{name}.weight"));
    let b = ours.leaf::<1>(&format!("{name}.bias"));
    let y = x.matmul(w.clone().swap_dims(0, 1).unsqueeze::<3>()) + b.clone().unsqueeze::<3>();
    (y, w, b)
}

fn layer_norm(ours: &Ours, name: &str, x: Burn<3>) -> (Burn<3>, Burn<1>, Burn<1>) {
    let w = ours.leaf::<1>(&format!("{name}.weight"));
    let b = ours.leaf::<1>(&format!("{name}.bias"));
    let centred = x.clone() - x.mean_dim(2);
    let variance = (centred.clone() * centred.clone()).mean_dim(2);
    let normal = centred / (variance + 1e-12).sqrt();
    let y = normal * w.clone().unsqueeze::<3>() + b.clone().unsqueeze::<3>();
    (y, w, b)
}

#[test]
fn gradients_of_a_transformer_layer() {
    let e = Encoder {
        batch: 2,
        length: 5,
        hidden: 8,
        heads: 2,
        inner: 12,
    };
    let ours = Ours::of(&encoder_layer(e).expect("builds"));
    let x = ours.leaf::<3>("x");
    let heads = |t: Burn<3>| t.reshape([2, 5, 2, 4]).swap_dims(1, 2);
    let (q, wq, bq) = linear(&ours, "attention.self.query", x.clone());
    let (k, wk, bk) = linear(&ours, "attention.self.key", x.clone());
    let (v, wv, bv) = linear(&ours, "attention.self.value", x.clone());
    let scores = heads(q).matmul(heads(k).swap_dims(2, 3)) * 0.5;
    let context = softmax(scores, 3).matmul(heads(v));
    let context = context.swap_dims(1, 2).reshape([2, 5, 8]);
    let (a, wo, bo) = linear(&ours, "attention.output.dense", context);
    let (a, g1, h1) = layer_norm(&ours, "attention.output.LayerNorm", a + x.clone());
    let (u, wi, bi) = linear(&ours, "intermediate.dense", a.clone());
    let u = u.clone() * 0.5 * ((u * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0);
    let (y, wd, bd) = linear(&ours, "output.dense", u);
    let (y, g2, h2) = layer_norm(&ours, "output.LayerNorm", y + a);
    assert_close("y", &ours.result, y.clone());
    let gradients = (y * ours.seed()).sum().backward();
    compare_gradients!(ours, gradients,
        x => "x",
        wq => "attention.self.query.weight", bq => "attention.self.query.bias",
        wk => "attention.self.key.weight", bk => "attention.self.key.bias",
        wv => "attention.self.value.weight", bv => "attention.self.value.bias",
        wo => "attention.output.dense.weight", bo => "attention.output.dense.bias",
        g1 => "attention.output.LayerNorm.weight", h1 => "attention.output.LayerNorm.bias",
        wi => "intermediate.dense.weight", bi => "intermediate.dense.bias",
        wd => "output.dense.weight", bd => "output.dense.bias",
        g2 => "output.LayerNorm.weight", h2 => "output.LayerNorm.bias",
    );
}
