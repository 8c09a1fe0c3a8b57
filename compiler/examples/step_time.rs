//! Times a training step of a network without PyTorch, kernel by kernel.
//! `cargo run --release --example step_time -- bert 10`

use compiler::{Executable, Step};
use graph::{Bindings, DType, Lifetime};
use kernels::compile::CompileOptions;
use kernels::memory::{AlignedBuffer, Buffer};
use kernels::pool::Pool;
use kernels::progress::Silent;
use kernels::run::Threads;
use std::collections::BTreeMap;
use std::time::Instant;

fn main() {
    let name = std::env::args().nth(1).unwrap_or_default();
    let rounds: usize = std::env::args()
        .nth(2)
        .and_then(|s| s.parse().ok())
        .unwrap_or(5);
    let graph = match name.as_str() {
        "resnet" => models::convolutional::resnet(8, 224, [3, 4, 6, 3]),
        "mobilenet" => models::convolutional::mobilenet_v2(8, 224),
        "bert" => {
            models::transformer::encoder_layer(models::transformer::Encoder::bert_large(2, 512))
        }
        other => return eprintln!("no network `{other}`: resnet, mobilenet or bert"),
    }
    .expect("a network of ours builds");
    let trained: Vec<usize> = (0..graph.inputs.len())
        .filter(|i| {
            let c = graph.container(graph.inputs[*i]);
            c.lifetime == Lifetime::Parameter
                && c.dtype == DType::F32
                && !c.name.contains("running")
        })
        .collect();
    let start = Instant::now();
    let step = Step::training(&graph, &trained).expect("differentiates");
    let plan = step.plan(&Bindings::new()).expect("plans");
    println!("planned in {:.2} s", start.elapsed().as_secs_f64());
    let options = CompileOptions::from_environment(&mut Silent).expect("a compiler");
    let exe = Executable::build(plan, &options, 2, &mut Silent).expect("builds");
    println!("ready in {:.2} s", start.elapsed().as_secs_f64());
    for k in &exe.kernels {
        println!(
            "{:?} {} {} {:.2} GFLOP",
            k.stage,
            k.name,
            k.path,
            k.flops as f64 / 1e9
        );
    }
    let g = &exe.plan.graph;
    let ids: Vec<_> = g
        .inputs
        .iter()
        .copied()
        .chain(g.outputs.iter().map(|o| o.container))
        .collect();
    let mut given: Vec<Vec<f32>> = ids
        .iter()
        .enumerate()
        .map(|(n, id)| {
            let c = g.container(*id);
            let len: i64 = c.shape.iter().filter_map(|s| s.as_const()).product();
            let value = |i: i64| graph::philox::uniform(n as u64, i as u64) * 0.1 - 0.05;
            (0..len).map(value).collect()
        })
        .collect();
    let pool = Pool::global();
    pool.set_threads(2);
    let mut saved = AlignedBuffer::zeroed(exe.forward.parts().saved_bytes).expect("memory");
    let bytes = exe
        .forward
        .parts()
        .arena_bytes
        .max(exe.backward.parts().arena_bytes);
    let mut arena = AlignedBuffer::zeroed(bytes).expect("memory");
    println!(
        "saved {:.1} MB, arena {:.1} MB",
        saved.len() as f64 / 1e6,
        bytes as f64 / 1e6
    );
    let mut times: BTreeMap<(usize, String), Vec<f64>> = BTreeMap::new();
    let mut totals = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        let mut number = 0;
        for program in [&exe.forward, &exe.backward] {
            let buffers: Vec<Buffer> = given.iter_mut().map(|v| Buffer::new(v)).collect();
            let timed = program
                .run_timed(
                    &buffers,
                    arena.as_buffer(),
                    saved.as_buffer(),
                    Threads::of(pool),
                )
                .expect("runs");
            for t in timed {
                let key = (number, t.name.to_string());
                times
                    .entry(key)
                    .or_default()
                    .push(t.time.as_secs_f64() * 1e3);
                number += 1;
            }
        }
        totals.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let median = |v: &mut Vec<f64>| {
        v.sort_by(f64::total_cmp);
        v[v.len() / 2]
    };
    for ((_, name), mut v) in times {
        println!("{:9.3} ms  {name}", median(&mut v));
    }
    println!("{:9.3} ms  total (median of {rounds})", median(&mut totals));
}
