//! Prints the kernels of a network after fusion: what each reads and writes, in MB, and what fusion
//! refused.
//! `cargo run --release --example plan -- resnet`

use compiler::report::Report;
use graph::{Bindings, ContainerId, DType, Graph, Lifetime, Node, NodeKind, Storage, SymExpr};

fn main() {
    let name = std::env::args().nth(1).unwrap_or_default();
    let graph = match name.as_str() {
        "resnet" => models::convolutional::resnet(8, 224, [3, 4, 6, 3]),
        "block" => models::convolutional::resnet(8, 224, [1, 0, 0, 0]),
        "mobilenet" => models::convolutional::mobilenet_v2(8, 224),
        "bert" => {
            models::transformer::encoder_layer(models::transformer::Encoder::bert_large(2, 512))
        }
        other => return eprintln!("no network `{other}`: resnet, block, mobilenet or bert"),
    };
    let graph = graph.expect("a network of ours builds");
    let wrt: Vec<usize> = (0..graph.inputs.len())
        .filter(|i| is_trained(&graph, graph.inputs[*i]))
        .collect();
    let step = compiler::Step::training(&graph, &wrt).expect("differentiates");
    let plan = step.plan(&Bindings::new()).expect("plans");
    let nodes = &plan.graph.single_state().expect("no control flow").nodes;
    for node in nodes {
        print_node(&plan.graph, node);
    }
    for decision in plan.decisions.iter().filter(|d| !d.is_applied()) {
        let sentence = format!("{} {}", decision.origin, decision.sentence());
        println!(
            "refused: {} {sentence} ({} bytes)",
            decision.rewrite(),
            decision.bytes
        );
    }
    let report = Report::of_plan(&plan, 2).expect("lowers");
    let mb = |n: i64| n as f64 / 1e6;
    println!(
        "{} kernels, {:.1} MB moved, at least {:.1} MB, {:.1} MB saved for backward",
        report.kernels.len(),
        mb(report.bytes_moved),
        mb(report.bytes_least),
        mb(report.memory.saved_bytes as i64)
    );
}

fn is_trained(graph: &Graph, id: ContainerId) -> bool {
    let c = graph.container(id);
    let running = c.name.contains("running");
    c.lifetime == Lifetime::Parameter && c.dtype == DType::F32 && !running
}

fn print_node(graph: &Graph, node: &Node) {
    let kind = match &node.kind {
        NodeKind::Library(l) => format!("[{}]", l.op),
        NodeKind::Map(m) => {
            let params: Vec<_> = m
                .params
                .iter()
                .map(|p| format!("{}:{}", p.name, p.size))
                .collect();
            format!("map({}) of {}", params.join(","), m.body.len())
        }
        NodeKind::Tasklet(_) => "tasklet".into(),
    };
    println!("{:?} {} {kind}", node.stage, node.origin.node);
    for (what, ids) in [("  <", node.reads()), ("  >", node.writes())] {
        for id in ids {
            let c = graph.container(id);
            let shape: Vec<_> = c.shape.iter().map(SymExpr::to_string).collect();
            let local = if c.storage == Storage::Local {
                "local "
            } else {
                ""
            };
            let big = bytes(graph, id) as f64 / 1e6;
            println!(
                "{what} {local}{} [{}] {} {big:.2} MB",
                c.name,
                shape.join(","),
                c.layout
            );
        }
    }
}

fn bytes(graph: &Graph, id: ContainerId) -> i64 {
    let c = graph.container(id);
    SymExpr::product(&c.shape).as_const().unwrap_or(0) * c.dtype.bytes() as i64
}
