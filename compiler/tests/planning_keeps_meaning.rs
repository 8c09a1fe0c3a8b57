//! A planned step computes what its operators mean: the interpreter runs both on the same inputs.

use compiler::Step;
use graph::{
    Bindings, ContainerId, Expr, Graph, Library, LibraryMeaning, Precision, Refusal, SymExpr,
    Tensor, interpret,
};
use models::net::{Net, Window};
use models::transformer::{Encoder, encoder_layer};

/// Knows `reshape`, the only operator that survives expansion.
struct Reshapes<'g>(&'g Graph);

impl LibraryMeaning for Reshapes<'_> {
    fn evaluate(
        &self,
        library: &Library,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, Refusal> {
        let out = library.outputs[0].ok_or("reshape without result")?;
        let shape = constant(&self.0.container(out).shape);
        let x = inputs[0].ok_or("reshape without input")?;
        Ok(vec![Tensor { shape, ..x.clone() }])
    }
    fn is_random(&self, _: &str) -> bool {
        false
    }
}

fn constant(shape: &[SymExpr]) -> Vec<usize> {
    let size = |s: &SymExpr| s.as_const().expect("constant") as usize;
    shape.iter().map(size).collect()
}

/// Reproducible values in [−1, 1], positive for running variances.
fn inputs(graph: &Graph, ids: &[ContainerId]) -> Vec<Tensor> {
    let value = |n: usize, id: &ContainerId| {
        let c = graph.container(*id);
        let shape = constant(&c.shape);
        let len: usize = shape.iter().product();
        let data = (0..len).map(|i| {
            let u = f64::from(graph::philox::uniform(7 + n as u64, i as u64)) * 2.0 - 1.0;
            if c.name.contains("running_var") {
                u.abs()
            } else {
                u
            }
        });
        Tensor::from_f64(c.dtype, &shape, data.collect())
    };
    ids.iter().enumerate().map(|(n, id)| value(n, id)).collect()
}

/// Every output of the plan equals that of the expanded step to double precision.
fn check(graph: &Graph) {
    let trained: Vec<usize> = (0..graph.inputs.len())
        .filter(|i| {
            let c = graph.container(graph.inputs[*i]);
            c.dtype.is_float() && !c.name.contains("running")
        })
        .collect();
    let step = Step::training(graph, &trained).expect("differentiates");
    let plan = step.plan(&Bindings::new()).expect("plans");
    let mut plain = step.graph().clone();
    ops::expand_all(&mut plain).expect("expands");
    let given = inputs(&plain, &plain.inputs);
    // Planning may split dimensions of inputs; their bytes stay.
    let split: Vec<Tensor> = given
        .iter()
        .zip(&plan.graph.inputs)
        .map(|(t, id)| Tensor {
            shape: constant(&plan.graph.container(*id).shape),
            ..t.clone()
        })
        .collect();
    let run = |g: &Graph, with: &[Tensor]| {
        interpret(g, with, &Bindings::new(), &Reshapes(g), Precision::Double).expect("runs")
    };
    let (expected, found) = (run(&plain, &given), run(&plan.graph, &split));
    assert_eq!(expected.len(), found.len());
    for (n, (e, f)) in expected.iter().zip(&found).enumerate() {
        let (e, f) = (e.to_f64(), f.to_f64());
        let scale = e.iter().fold(1e-30_f64, |m, x| m.max(x.abs()));
        let worst = e
            .iter()
            .zip(&f)
            .fold(0.0_f64, |m, (x, y)| m.max((x - y).abs()));
        assert!(worst <= 1e-9 * scale, "output {n}: {worst:e} of {scale:e}");
    }
}

#[test]
fn residual_block_with_batch_norm() {
    let mut net = Net::new("block");
    let size = |n: i64| SymExpr::constant(n);
    let x = net.input(
        "x",
        graph::DType::F32,
        &[size(2), size(3), size(6), size(6)],
    );
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
    check(&net.finish(&[y]));
}

#[test]
fn encoder_layer_of_a_transformer() {
    let e = Encoder {
        batch: 2,
        length: 5,
        hidden: 8,
        heads: 2,
        inner: 12,
    };
    check(&encoder_layer(e).expect("builds"));
}
