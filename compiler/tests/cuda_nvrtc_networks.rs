//! Every kernel of five large training steps compiled for Hopper by NVRTC: no spills, no stack frames,
//! no warnings of ptxas that cost speed.
//!
//! Ignored in a plain `cargo test`; `cargo xtask test` runs it with `SHORTHAUL_NVRTC` set to the folder
//! of PyTorch's wheel. All architectures and numbers: `cargo run --example cuda_table`.

use compiler::optimizer::Rule;
use compiler::{Step, Target};
use cuda_kernels::contraction::n_warpgroup_tiles;
use cuda_kernels::lower::lower_with;
use cuda_kernels::nvrtc::{Nvrtc, compile_all, gate};
use cuda_kernels::pooled;
use cuda_kernels::vendor::{Candidate, Offers, Products};
use cuda_kernels::{Arch, Kernel};
use graph::{Bindings, DType, Graph, Lifetime};
use kernels::cache::{Cache, CacheSettings};
use kernels::progress::Silent;
use models::convolutional::{mobilenet_v2, resnet};
use models::transformer::{Decoder, Encoder, decoder_layer, encoder_layer_of};

/// All parameters are trained; running statistics are none.
fn kernels(graph: &Graph, products: &Products) -> Vec<Kernel> {
    let is_trained = |position: &usize| {
        let c = graph.container(graph.inputs[*position]);
        c.lifetime == Lifetime::Parameter && c.dtype.is_float() && !c.name.contains("running")
    };
    let trained: Vec<usize> = (0..graph.inputs.len()).filter(is_trained).collect();
    let step = Step::training(graph, &trained).expect("differentiates");
    let plan = step
        .plan_for(&Bindings::new(), Target::Cuda)
        .expect("plans");
    let program = lower_with(&plan.graph, products);
    program.expect("lowers").kernels
}

/// Compiles for Hopper, and finds nothing that the gate refuses.
fn keep_to_registers(name: &str, kernels: &[Kernel]) {
    keep_to_registers_on(Arch::Sm90a, name, kernels);
}

fn keep_to_registers_on(arch: Arch, name: &str, kernels: &[Kernel]) {
    let nvrtc = Nvrtc::find(&[]).expect("NVRTC is there");
    let cache = Cache::open(&CacheSettings::from_environment(), &mut Silent).expect("a cache");
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let cubins = compile_all(kernels, arch, &nvrtc, &cache, threads, &mut Silent);
    let cubins = cubins.expect("NVRTC takes all kernels");
    let n: usize = cubins.iter().map(|c| c.resources.len()).sum();
    assert_eq!(n, kernels.len());
    let refused = gate(kernels, &cubins);
    assert!(refused.is_empty(), "{name}: {refused:#?}");
    let registers = cubins
        .iter()
        .flat_map(|c| &c.resources)
        .map(|r| r.registers);
    println!("{name}: {:?} registers", registers.collect::<Vec<_>>());
}

#[test]
#[ignore = "needs NVRTC: run by `cargo xtask test`"]
fn kernels_of_networks_keep_to_registers() {
    let shared = Decoder {
        batch: 8,
        length: 1024,
        hidden: 1024,
        heads: 16,
        key_heads: 4,
        inner: 4096,
    };
    let networks = [
        resnet(8, 224, [3, 4, 6, 3]),
        mobilenet_v2(8, 224),
        encoder_layer_of(Encoder::bert_large(8, 512), DType::F32),
        encoder_layer_of(Encoder::bert_large(8, 512), DType::BF16),
        decoder_layer(shared, DType::BF16),
    ];
    for graph in networks {
        let graph = graph.expect("a network of ours builds");
        keep_to_registers(&graph.name, &kernels(&graph, &Products::Own));
    }
}

/// Compiles one launch of Adam with as many parameters as it takes, of an encoder's sizes, in every type and for every
/// architecture.
#[test]
#[ignore = "needs NVRTC: run by `cargo xtask test`"]
fn steps_of_optimizers_keep_to_registers() {
    let sizes: Vec<usize> = [1024 * 1024, 1024, 4096 * 1024, 4096, 3].repeat(25);
    let adam = |decoupled| Rule::Adam {
        decay: true,
        decoupled,
    };
    let momentum = Rule::Sgd {
        momentum: true,
        decay: true,
        nesterov: true,
    };
    let mut kernels = Vec::new();
    for rule in [adam(true), adam(false), momentum] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for aligned in [true, false] {
                let step = pooled::emit(&rule.update(dtype, false), &sizes, aligned);
                let step = step.expect("emits");
                assert_eq!(step.kernels.len(), 1);
                kernels.extend(step.kernels);
            }
        }
    }
    for (n, kernel) in kernels.iter_mut().enumerate() {
        kernel.text = kernel.text.replace("sh_pooled0", &format!("sh_step{n}"));
        kernel.name = format!("sh_step{n}");
    }
    for arch in Arch::ALL {
        keep_to_registers_on(arch, arch.name(), &kernels);
    }
}

/// Products of warpgroups with what a layer does to their sums, in every tile.
#[test]
#[ignore = "needs NVRTC: run by `cargo xtask test`"]
fn products_of_warpgroups_keep_to_registers() {
    let graph = encoder_layer_of(Encoder::bert_large(8, 512), DType::BF16);
    let graph = graph.expect("a network of ours builds");
    for tile in 0..n_warpgroup_tiles() {
        let products = Products::Every {
            candidate: Candidate::Warpgroup(tile),
            workspace_bytes: 0,
            offers: Offers::default(),
        };
        let mut kernels = kernels(&graph, &products);
        kernels.retain(|kernel| kernel.text.contains("sh_wgmma"));
        assert!(kernels.len() > 5, "only {} kernels", kernels.len());
        keep_to_registers(&format!("tile {tile}"), &kernels);
    }
}
