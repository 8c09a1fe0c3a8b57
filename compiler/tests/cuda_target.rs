//! CUDA programs end to end: what cannot run is told before anything is compiled.

use compiler::Step;
use compiler::cuda::{CudaExecutable, CudaTarget, ProductsBy};
use graph::{Bindings, Builder, DType, Expr, Graph, Lifetime, Stage, SymExpr};
use kernels::progress::Silent;
use ops::OpBuilder;
use std::sync::Arc;

#[test]
fn a_device_that_is_not_there_is_told() {
    let mut graph = Graph::new("exp");
    let sizes = vec![SymExpr::constant(4)];
    let x = graph.add_input("x", DType::F32, sizes, Lifetime::Input);
    let mut builder = Builder::new(&mut graph, Arc::default(), Stage::Forward);
    let y = builder.elementwise(Expr::In(0).exp(), &[x]).unwrap();
    let nodes = builder.nodes;
    graph.last_state().nodes = nodes;
    graph.add_output(y);
    let plan = Step::forward(&graph).unwrap().plan(&Bindings::new());
    let target = CudaTarget::Device {
        ordinal: 999,
        nvrtc: &[],
    };
    let built = CudaExecutable::build(plan.unwrap(), &target, &ProductsBy::Own, &mut Silent);
    let message = built.err().unwrap().to_string();
    let known = ["no CUDA driver", "offers no device", "no device cuda:999"];
    assert!(known.iter().any(|k| message.contains(k)), "{message}");
}
