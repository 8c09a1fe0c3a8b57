//! Training steps of small networks as CUDA text executed on the host, forward and backward, against
//! the interpreter in double precision.

use compiler::{Step, Target};
use cuda_kernels::{execute, lower};
use graph::{
    Attr, Bindings, ContainerId, DType, Expr, Graph, Precision, SymExpr, Tensor, interpret,
};
use models::net::{Net, Window};
use models::transformer::{Decoder, decoder_layer};
use ops::{Meaning, OpBuilder, OpError, attrs};

/// Orders of blocks and threads.
const SEEDS: [u64; 2] = [1, 2];

/// Errors are held against the largest value of an output or a least scale.
#[derive(Clone, Copy)]
struct Tolerance {
    relative: f64,
    least_scale: f64,
}

/// The error of sums of a few hundred terms in single precision, through normalizations: a gradient may be exactly 0.
const SINGLE: Tolerance = Tolerance {
    relative: 3e-5,
    least_scale: 0.1,
};

/// The error of a dozen roundings to 8 bits, one for each container on the way from input to gradient. A gradient of
/// keys' biases, which is exactly 0, is the difference of sums of about 1.
const HALF: Tolerance = Tolerance {
    relative: 4e-2,
    least_scale: 1.0,
};

fn sizes(list: &[i64]) -> Vec<SymExpr> {
    list.iter().map(|n| SymExpr::constant(*n)).collect()
}

fn shape(graph: &Graph, id: ContainerId) -> Vec<usize> {
    let sizes = graph.container(id).shape.iter();
    sizes
        .map(|s| s.as_const().expect("sizes are bound") as usize)
        .collect()
}

/// Uniform in [-1, 1), variances in [0, 1), as single precision holds them; a seed of dropout is 77.
fn inputs(graph: &Graph) -> Vec<Tensor> {
    let input = |(n, id): (usize, &ContainerId)| {
        let c = graph.container(*id);
        let shape = shape(graph, *id);
        if c.dtype == DType::I64 {
            return Tensor::from_i64(DType::I64, &shape, vec![77]);
        }
        let uniform = |i| f64::from(graph::philox::uniform(11 + n as u64, i as u64)) * 2.0 - 1.0;
        let positive = c.name.contains("running_var");
        let value = |i| {
            if positive {
                f64::abs(uniform(i))
            } else {
                uniform(i)
            }
        };
        let data = (0..shape.iter().product()).map(value).collect();
        let mut tensor = Tensor::from_f64(c.dtype, &shape, data);
        tensor.round_to_dtype();
        tensor
    };
    graph.inputs.iter().enumerate().map(input).collect()
}

/// Trains every float input but running statistics. `least` has the least number of maps of each path.
fn check(graph: &Graph, tolerance: Tolerance, least: &[(&str, usize)]) {
    // The gradient of a decoder's keys' biases is 0: only rounding errors are left of sums that cancel.
    let is_trained = |i: &usize| {
        let c = graph.container(graph.inputs[*i]);
        let is_kept = c.name.contains("running") || c.name.ends_with("k_proj.bias");
        c.dtype.is_float() && !is_kept
    };
    let trained: Vec<usize> = (0..graph.inputs.len()).filter(is_trained).collect();
    let step = Step::training(graph, &trained).expect("differentiates");
    let given = inputs(step.graph());
    let none = Bindings::new();
    let expected =
        interpret(step.graph(), &given, &none, &Meaning, Precision::Double).expect("interprets");
    let plan = step.plan_for(&none, Target::Cuda).expect("plans");
    let program = lower::lower(&plan.graph).expect("lowers");
    for (path, n) in least {
        let found = program.maps.iter().filter(|m| m.path == *path).count();
        assert!(found >= *n, "{found} maps are {path}: {:#?}", program.maps);
    }
    let host = execute::compile(&plan.graph, &program).expect("compiles");
    assert_eq!(given.len(), plan.graph.inputs.len());
    let shaped: Vec<Tensor> = given
        .iter()
        .zip(&plan.graph.inputs)
        .map(|(t, id)| Tensor {
            shape: shape(&plan.graph, *id),
            ..t.clone()
        })
        .collect();
    for seed in SEEDS {
        let found = host.run(&shaped, seed).expect("no fault");
        assert_eq!(expected.len(), found.len());
        for (n, (expected, found)) in expected.iter().zip(&found).enumerate() {
            let name = &graph_name(step.graph(), n);
            close(name, &expected.to_f64(), &found.to_f64(), tolerance);
        }
    }
}

fn graph_name(graph: &Graph, output: usize) -> String {
    graph
        .container(graph.outputs[output].container)
        .name
        .clone()
}

fn close(name: &str, expected: &[f64], found: &[f64], tolerance: Tolerance) {
    assert_eq!(expected.len(), found.len(), "{name}");
    let scale = expected
        .iter()
        .fold(tolerance.least_scale, |m, x| f64::max(m, x.abs()));
    for (i, (e, f)) in expected.iter().zip(found).enumerate() {
        let near = (e - f).abs() <= tolerance.relative * scale;
        assert!(near, "{name}: element {i} is {f}, expected {e} of {scale}");
    }
}

struct Dropout {
    seed: ContainerId,
    n: i64,
}

impl Dropout {
    fn of(&mut self, net: &mut Net, x: ContainerId) -> Result<ContainerId, OpError> {
        self.n += 1;
        let a = attrs([("p", Attr::Float(0.2)), ("id", Attr::Int(self.n))]);
        let seed = self.seed;
        net.with("dropout", |b| b.op1("dropout", &[x, seed], a))
    }
}

/// A post-normalization encoder layer with dropout on probabilities and before both additions.
fn encoder_with_dropout(
    [batch, length, hidden, heads, inner]: [i64; 5],
    dtype: DType,
) -> Result<Graph, OpError> {
    let mut net = Net::new("encoder");
    net.dtype = dtype;
    let x = net.input("x", dtype, &sizes(&[batch, length, hidden]));
    let seed = net.input("seed", DType::I64, &[]);
    let mut dropout = Dropout { seed, n: 0 };
    let mut parts = Vec::new();
    for part in ["query", "key", "value"] {
        let y = net.linear(part, x, hidden)?;
        let split = sizes(&[batch, length, heads, hidden / heads]);
        let y = net.reshape(part, y, &split)?;
        parts.push(net.permute(part, y, &[0, 2, 1, 3])?);
    }
    let equation = |s: &str| attrs([("equation", Attr::Str(s.into()))]);
    let scores = net.with("scores", |b| {
        b.op1("einsum", &parts[..2], equation("bhid,bhjd->bhij"))
    })?;
    let scale = ((hidden / heads) as f64).sqrt().recip();
    let scores = net.apply("scale", Expr::In(0).mul(Expr::float(scale)), &[scores])?;
    let softmax = attrs([("axis", Attr::Int(-1))]);
    let p = net.with("softmax", |b| b.op1("softmax", &[scores], softmax))?;
    let p = dropout.of(&mut net, p)?;
    let y = net.with("context", |b| {
        b.op1("einsum", &[p, parts[2]], equation("bhij,bhjd->bhid"))
    })?;
    let y = net.permute("context", y, &[0, 2, 1, 3])?;
    let y = net.reshape("context", y, &sizes(&[batch, length, hidden]))?;
    let y = net.linear("attention.output", y, hidden)?;
    let y = dropout.of(&mut net, y)?;
    let sum = || Expr::In(0).add(Expr::In(1));
    let y = net.apply("attention.add", sum(), &[y, x])?;
    let a = net.layer_norm("attention.norm", y)?;
    let y = net.linear("intermediate", a, inner)?;
    let half = Expr::In(0).mul(Expr::float(0.5));
    let erf = Expr::In(0)
        .mul(Expr::float(std::f64::consts::FRAC_1_SQRT_2))
        .erf();
    let y = net.apply("gelu", half.mul(Expr::float(1.0).add(erf)), &[y])?;
    let y = net.linear("output", y, hidden)?;
    let y = dropout.of(&mut net, y)?;
    let y = net.apply("output.add", sum(), &[y, a])?;
    let y = net.layer_norm("output.norm", y)?;
    Ok(net.finish(&[y]))
}

#[test]
fn encoder_layer_with_dropout() {
    let graph = encoder_with_dropout([2, 12, 32, 2, 48], DType::F32).expect("builds");
    check(&graph, SINGLE, &[("simt", 12)]);
}

#[test]
fn encoder_layer_with_dropout_in_bf16() {
    let graph = encoder_with_dropout([2, 40, 32, 2, 48], DType::BF16).expect("builds");
    check(&graph, HALF, &[("mma", 12), ("chain", 3)]);
}

/// Causal attention in f16 with an additive mask that hides everything from the first query.
#[test]
fn masked_attention_in_f16() {
    let mut net = Net::new("attention");
    net.dtype = DType::F16;
    let rows = |n| sizes(&[2, 3, n, 32]);
    let q = net.input("q", DType::F16, &rows(50));
    let k = net.input("k", DType::F16, &rows(70));
    let v = net.input("v", DType::F16, &rows(70));
    let mask = net.input("running_mask", DType::F16, &sizes(&[50, 70]));
    let seen = net
        .apply("mask", masked(), &[mask])
        .expect("element by element");
    let causal = attrs([("causal", Attr::Bool(true))]);
    let y = net.with("attention", |b| {
        b.op1("attention", &[q, k, v, seen], causal)
    });
    check(&net.finish(&[y.expect("builds")]), HALF, &[("chain", 3)]);
}

/// Four heads of queries share two heads of keys. A gradient that is summed over a pair of heads is one product.
#[test]
fn decoder_layer_with_shared_keys_in_bf16() {
    let layer = Decoder {
        batch: 1,
        length: 40,
        hidden: 64,
        heads: 4,
        key_heads: 2,
        inner: 48,
    };
    let graph = decoder_layer(layer, DType::BF16).expect("builds");
    check(&graph, HALF, &[("chain", 3)]);
}

/// The bias of the scores is trained. Its gradient sums over the batch what one kernel stores. The probabilities, which
/// are returned, are stored too.
#[test]
fn attention_with_trained_bias_that_returns_probabilities() {
    let mut net = Net::new("attention");
    net.dtype = DType::F16;
    let rows = |n| sizes(&[2, 3, n, 32]);
    let q = net.input("q", DType::F16, &rows(50));
    let k = net.input("k", DType::F16, &rows(70));
    let v = net.input("v", DType::F16, &rows(70));
    let bias = net.input("bias", DType::F16, &sizes(&[3, 50, 70]));
    let equation = |s: &str| attrs([("equation", Attr::Str(s.into()))]);
    let [p, y] = net
        .with("attention", |b| {
            let scores = b.op1("einsum", &[q, k], equation("bhid,bhjd->bhij"))?;
            let sum = Expr::In(0).mul(Expr::float(0.2)).add(Expr::In(1));
            let scores = b.elementwise(sum, &[scores, bias])?;
            let p = b.op1("softmax", &[scores], attrs([("axis", Attr::Int(-1))]))?;
            Ok([p, b.op1("einsum", &[p, v], equation("bhij,bhje->bhie"))?])
        })
        .expect("builds");
    check(&net.finish(&[y, p]), HALF, &[("chain", 3)]);
}

/// −∞ for numbers below −1/2 and in the first column.
fn masked() -> Expr {
    let hidden = Expr::binary(graph::Binary::Lt, Expr::In(0), Expr::float(-0.5));
    let first = Expr::Index(SymExpr::symbol("i1"));
    let first = Expr::binary(graph::Binary::Eq, first, Expr::int(0));
    let never = Expr::float(f64::NEG_INFINITY);
    Expr::select(
        Expr::binary(graph::Binary::Or, hidden, first),
        never,
        Expr::In(0),
    )
}

/// Two residual blocks with batch normalization, the second with stride and projection.
fn residual(net: &mut Net) -> Result<ContainerId, OpError> {
    let x = net.input("x", DType::F32, &sizes(&[2, 8, 8, 8]));
    let mut y = x;
    for (block, (out, stride)) in [(8, 1), (16, 2)].into_iter().enumerate() {
        let name = |part: &str| format!("block{block}.{part}");
        let shortcut = match stride {
            1 => y,
            _ => {
                let z = net.conv(&name("project"), y, out, Window::new(1, stride, 0))?;
                net.batch_norm(&name("project.norm"), z)?
            }
        };
        y = net.conv(&name("conv1"), y, out, Window::new(3, stride, 1))?;
        y = net.batch_norm(&name("norm1"), y)?;
        y = net.relu(&name("relu1"), y)?;
        y = net.conv(&name("conv2"), y, out, Window::new(3, 1, 1))?;
        y = net.batch_norm(&name("norm2"), y)?;
        let sum = Expr::In(0).add(Expr::In(1));
        y = net.apply(&name("add"), sum, &[y, shortcut])?;
        y = net.relu(&name("relu2"), y)?;
    }
    head(net, y)
}

fn head(net: &mut Net, x: ContainerId) -> Result<ContainerId, OpError> {
    let mean = attrs([
        ("kind", Attr::Str("mean".into())),
        ("axes", Attr::Ints(vec![2, 3])),
        ("keep", Attr::Bool(false)),
    ]);
    let pooled = net.with("pool", |b| b.op1("reduce", &[x], mean))?;
    net.linear("classifier", pooled, 10)
}

#[test]
fn residual_blocks_with_batch_norm() {
    let mut net = Net::new("residual");
    let y = residual(&mut net).expect("builds");
    check(&net.finish(&[y]), SINGLE, &[("simt", 12)]);
}

/// Two inverted residual blocks: expansion, depthwise convolution, projection; the first keeps the
/// size and has a shortcut.
fn inverted(net: &mut Net) -> Result<ContainerId, OpError> {
    let mut x = net.input("x", DType::F32, &sizes(&[2, 8, 8, 8]));
    for (block, (out, stride)) in [(8, 1), (12, 2)].into_iter().enumerate() {
        let hidden = 24;
        let depthwise = Window {
            groups: hidden,
            ..Window::new(3, stride, 1)
        };
        let mut y = x;
        for (part, window) in [("expand", Window::new(1, 1, 0)), ("depthwise", depthwise)] {
            let name = format!("block{block}.{part}");
            y = net.conv(&name, y, hidden, window)?;
            y = net.batch_norm(&format!("{name}.norm"), y)?;
            let clamp = Expr::In(0).max(Expr::float(0.0)).min(Expr::float(6.0));
            y = net.apply(&format!("{name}.relu6"), clamp, &[y])?;
        }
        y = net.conv(
            &format!("block{block}.project"),
            y,
            out,
            Window::new(1, 1, 0),
        )?;
        y = net.batch_norm(&format!("block{block}.project.norm"), y)?;
        x = match stride {
            1 => net.apply("add", Expr::In(0).add(Expr::In(1)), &[x, y])?,
            _ => y,
        };
    }
    head(net, x)
}

#[test]
fn inverted_residual_blocks_with_depthwise_convolutions() {
    let mut net = Net::new("inverted");
    let y = inverted(&mut net).expect("builds");
    check(&net.finish(&[y]), SINGLE, &[("simt", 8), ("loops", 8)]);
}
