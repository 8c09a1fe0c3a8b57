//! What planned training steps of five networks cost on a GPU with our own kernels, against a committed
//! file: a lost fusion moves more bytes, and a chain that is no longer found tells why.
//!
//! Nothing is compiled or run. Bytes are those of the containers and workspaces that each launch is
//! given, each once and whole per launch. `SHORTHAUL_UPDATE=1` (or `cargo xtask snapshots`) writes the
//! file anew.

mod snapshot;

use compiler::{Plan, Target};
use cuda_kernels::ParamType;
use cuda_kernels::lower::{CudaProgram, Placed, lower};
use graph::{DType, Graph, Rewrite, Stage};
use kernels::plan::{Buffer, container_bytes};
use models::convolutional::{mobilenet_v2_with, resnet_with};
use models::transformer::{Decoder, Encoder, decoder_layer, encoder_layer_of};
use snapshot::{compare, training_plan};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;

/// A layer of a decoder as wide as a layer of BERT-large.
const DECODER: Decoder = Decoder {
    batch: 8,
    length: 1024,
    hidden: 1024,
    heads: 16,
    key_heads: 16,
    inner: 4096,
};

#[test]
fn networks_cost_on_a_gpu_what_they_did() {
    let bert = Encoder::bert_large(8, 512);
    let grouped = Decoder {
        key_heads: 4,
        ..DECODER
    };
    let networks = [
        (
            "ResNet-50, batch 8, 224 x 224, f32",
            resnet_with(8, 224, [3, 4, 6, 3], None),
        ),
        (
            "ResNet-50, batch 8, 224 x 224, autocast to bf16",
            resnet_with(8, 224, [3, 4, 6, 3], Some(DType::BF16)),
        ),
        (
            "MobileNetV2, batch 8, 224 x 224, f32",
            mobilenet_v2_with(8, 224, None),
        ),
        (
            "MobileNetV2, batch 8, 224 x 224, autocast to bf16",
            mobilenet_v2_with(8, 224, Some(DType::BF16)),
        ),
        (
            "a layer of BERT-large, batch 8, 512 positions, f32",
            encoder_layer_of(bert, DType::F32),
        ),
        (
            "a layer of BERT-large, batch 8, 512 positions, bf16",
            encoder_layer_of(bert, DType::BF16),
        ),
        (
            "a causal decoder layer, batch 8, 1024 positions, 16 heads, bf16",
            decoder_layer(DECODER, DType::BF16),
        ),
        (
            "a causal decoder layer, batch 8, 1024 positions, 16 heads on 4 of keys, bf16",
            decoder_layer(grouped, DType::BF16),
        ),
    ];
    let mut found = String::from("forward and backward, own kernels; bytes\n");
    for (name, graph) in networks {
        let plan = training_plan(&graph.expect("a network of ours builds"), Target::Cuda);
        let _ = write!(found, "\n{name}\n{}", cost(&plan));
    }
    compare("cuda_plans.txt", &found);
}

fn cost(plan: &Plan) -> String {
    let program = lower(&plan.graph).expect("lowers");
    let mut text = String::new();
    for (name, is_forward) in [("forward", true), ("backward", false)] {
        let launches = || {
            let all = program.launches.iter();
            all.filter(|l| (l.stage == Stage::Forward) == is_forward)
        };
        let bytes: usize = launches().map(|l| moved(&program, &plan.graph, l)).sum();
        let mut paths: BTreeMap<&str, usize> = BTreeMap::new();
        for launch in launches() {
            *paths.entry(program.maps[launch.map].path).or_default() += 1;
        }
        let paths: Vec<String> = paths.iter().map(|(p, n)| format!("{n} {p}")).collect();
        let _ = writeln!(
            text,
            "  {name}: {} launches ({}), {bytes} moved",
            launches().count(),
            paths.join(", ")
        );
    }
    let memory = &program.memory;
    let _ = writeln!(
        text,
        "  arena: {} forward, {} backward\n  saved for backward: {}",
        memory.forward_arena_bytes, memory.backward_arena_bytes, memory.saved_bytes
    );
    let chains = plan
        .decisions
        .iter()
        .filter(|d| d.rewrite() == Rewrite::Chain);
    let (applied, mut refused) = chains.partition::<Vec<_>, _>(|d| d.is_applied());
    for d in applied {
        let _ = writeln!(
            text,
            "  at {}: {}; saved {}",
            d.origin,
            d.sentence(),
            d.bytes
        );
    }
    refused.sort_by_key(|d| Reverse(d.bytes));
    if let Some(d) = refused.first() {
        let n = refused.len();
        let _ = writeln!(
            text,
            "  {n} chains refused, the largest at {}: {}",
            d.origin,
            d.sentence()
        );
    }
    text
}

/// Bytes of a launch's buffers.
fn moved(program: &CudaProgram, graph: &Graph, launch: &Placed) -> usize {
    let params = program.params(launch.work);
    let buffers = launch.args.iter().zip(params);
    let bytes = |(buffer, param): (&Buffer, &cuda_kernels::Param)| match (buffer, param.ty) {
        (_, ParamType::Scalar(_)) => 0,
        (Buffer::Container(id), _) => container_bytes(graph, *id).expect("sizes are bound"),
        (Buffer::Workspace(n), _) => program.workspace_bytes[*n],
    };
    buffers.map(bytes).sum()
}
