//! What planned training steps of three networks cost, against a committed file.
//!
//! Nothing is compiled or run: kernels and launches are counted, bytes are those of the containers
//! that each kernel touches, once and whole. What fusion joined and lowering split is counted too. A change of these
//! numbers is a change of what Shorthaul does, so it must be seen: `SHORTHAUL_UPDATE=1` (or `cargo xtask snapshots`)
//! writes the file anew.

mod snapshot;

use compiler::report::{Memory, Report};
use compiler::{Plan, Target};
use kernels::features::{CpuTarget, Isa};
use kernels::lowering::lower;
use kernels::toolchain::Family;
use models::convolutional::{mobilenet_v2, resnet};
use models::transformer::{Encoder, encoder_layer};
use snapshot::{compare, training_plan};
use std::collections::BTreeMap;
use std::fmt::Write;

/// One target and one number of threads for every machine the tests run on.
const ISA: Isa = Isa::Avx512;
const THREADS: usize = 2;

#[test]
fn networks_cost_what_they_did() {
    let networks = [
        (
            "ResNet-50, batch 8, 224 x 224",
            resnet(8, 224, [3, 4, 6, 3]),
        ),
        ("MobileNetV2, batch 8, 224 x 224", mobilenet_v2(8, 224)),
        (
            "a layer of BERT-large, batch 2, 512 positions",
            encoder_layer(Encoder::bert_large(2, 512)),
        ),
    ];
    let mut found = String::from("forward and backward, f32, AVX-512, 2 threads; bytes\n");
    for (name, graph) in networks {
        let plan = training_plan(&graph.expect("a network of ours builds"), Target::Cpu);
        let _ = write!(found, "\n{name}\n{}", cost(&plan));
    }
    compare("networks.txt", &found);
}

fn cost(plan: &Plan) -> String {
    let target = CpuTarget::for_isa(ISA, Family::Gcc);
    let lowered = lower(&plan.graph, &target, THREADS).expect("lowers");
    let slow = lowered.kernels.iter().filter(|k| k.scalar.is_some());
    let slow: Vec<_> = slow.map(|k| (&k.origin, &k.scalar)).collect();
    assert!(slow.is_empty(), "contractions in scalar loops: {slow:?}");
    let memory = Memory {
        forward_arena_bytes: lowered.memory.forward_arena_bytes,
        backward_arena_bytes: lowered.memory.backward_arena_bytes,
        saved_bytes: lowered.memory.saved_bytes,
        thread_scratch_bytes: lowered.thread_scratch_bytes,
    };
    let report = Report::new(plan, &lowered.kernels, memory, None);
    let mut text = String::new();
    for stage in ["forward", "backward"] {
        let kernels = || report.kernels.iter().filter(|k| k.stage == stage);
        let launches: usize = kernels().map(|k| k.launches).sum();
        let moved: i64 = kernels().map(|k| k.bytes_read + k.bytes_written).sum();
        let n = kernels().count();
        let _ = writeln!(
            text,
            "  {stage}: {n} kernels, {launches} launches, {moved} moved"
        );
    }
    let _ = writeln!(
        text,
        "  least possible: {}\n  not moved thanks to fusion: {}\n  arena: {} forward, {} backward\n  \
         saved for backward: {}",
        report.bytes_least,
        report.bytes_saved,
        memory.forward_arena_bytes,
        memory.backward_arena_bytes,
        memory.saved_bytes
    );
    let mut undone: BTreeMap<(&str, String), (usize, i64)> = BTreeMap::new();
    for one in &report.undone {
        let key = (one.rewrite, one.reason.to_string());
        let (n, bytes) = undone.entry(key).or_default();
        *n += 1;
        *bytes += one.bytes;
    }
    for ((rewrite, reason), (n, bytes)) in undone {
        let _ = writeln!(
            text,
            "  undone: {n} times {rewrite}, {bytes} moved after all: {reason}"
        );
    }
    text
}
