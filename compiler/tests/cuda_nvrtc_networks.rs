//! Every kernel of four large training steps compiled for Hopper by NVRTC: no spills, no stack frames,
//! no warnings of ptxas that cost speed.
//!
//! Ignored in a plain `cargo test`; `cargo xtask test` runs it with `SHORTHAUL_NVRTC` set to the folder
//! of PyTorch's wheel. All architectures and numbers: `cargo run --example cuda_table`.

use compiler::{Step, Target};
use graph::{Bindings, DType, Graph, Lifetime};
use kernels::cache::{Cache, CacheSettings};
use kernels::cuda::lower::lower;
use kernels::cuda::nvrtc::{Nvrtc, compile_all, gate};
use kernels::cuda::{Arch, Kernel};
use kernels::progress::Silent;
use models::convolutional::{mobilenet_v2, resnet};
use models::transformer::{Encoder, encoder_layer_of};

/// All parameters are trained; running statistics are none.
fn kernels(graph: &Graph) -> Vec<Kernel> {
    let is_trained = |position: &usize| {
        let c = graph.container(graph.inputs[*position]);
        c.lifetime == Lifetime::Parameter && c.dtype.is_float() && !c.name.contains("running")
    };
    let trained: Vec<usize> = (0..graph.inputs.len()).filter(is_trained).collect();
    let step = Step::training(graph, &trained).expect("differentiates");
    let plan = step
        .plan_for(&Bindings::new(), Target::Cuda)
        .expect("plans");
    lower(&plan.graph).expect("lowers").kernels
}

#[test]
#[ignore = "needs NVRTC: run by `cargo xtask test`"]
fn kernels_of_networks_keep_to_registers() {
    let networks = [
        resnet(8, 224, [3, 4, 6, 3]),
        mobilenet_v2(8, 224),
        encoder_layer_of(Encoder::bert_large(8, 512), DType::F32),
        encoder_layer_of(Encoder::bert_large(8, 512), DType::BF16),
    ];
    let nvrtc = Nvrtc::find(&[]).expect("NVRTC is there");
    let cache = Cache::open(&CacheSettings::from_environment(), &mut Silent).expect("a cache");
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    for graph in networks {
        let graph = graph.expect("a network of ours builds");
        let kernels = kernels(&graph);
        let cubins = compile_all(
            &kernels,
            Arch::Sm90a,
            &nvrtc,
            &cache,
            threads,
            &mut |_, _| (),
        );
        let cubins = cubins.expect("NVRTC takes all kernels");
        let n: usize = cubins.iter().map(|c| c.resources.len()).sum();
        assert_eq!(n, kernels.len());
        let refused = gate(&kernels, &cubins);
        assert!(refused.is_empty(), "{}: {refused:#?}", graph.name);
    }
}
