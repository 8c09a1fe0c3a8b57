//! Compiles every kernel of six training steps and of optimizers' steps by NVRTC for every architecture. Prints what
//! each needs: registers, spills, stack frame, shared memory, launches, bytes moved.
//! `SHORTHAUL_NVRTC=FOLDER cargo run --release --example cuda_table > bench/results/DATE-cuda-kernels.md`
//! A word after `cuda_table` keeps the networks whose name holds it.
//!
//! Bytes are those of the containers and workspaces that a kernel is given, whole and once for each launch. The floor
//! of the convolutions is what they would move if each were fused with all that stands between it and the next: their
//! operands and results, once for each convolution. Compilation starts with an empty cache. Its time is processor time,
//! which does not depend on what else runs.

use compiler::optimizer::Rule;
use compiler::{Step, Target};
use cuda_kernels::lower::{CudaProgram, Placed, lower};
use cuda_kernels::nvrtc::{Nvrtc, Resources, compile_all, gate};
use cuda_kernels::pooled;
use cuda_kernels::{Arch, Kernel, LaunchOp, ParamType};
use graph::{Bindings, DType, Graph, Lifetime, NodeKind};
use kernels::cache::Cache;
use kernels::plan::{Buffer, container_bytes};
use kernels::progress::Silent;
use models::convolutional::{mobilenet_v2_with, resnet_with};
use models::transformer::{Encoder, encoder_layer_of};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let nvrtc = Nvrtc::find(&[])?;
    let threads = std::thread::available_parallelism()?.get();
    println!("# CUDA kernels of training steps\n");
    println!(
        "NVRTC {}, {threads} threads; `SHORTHAUL_NVRTC=FOLDER cargo run --release --example cuda_table`. Each kernel's \
         registers, stack bytes and static shared bytes are for sm_80 / sm_89 / sm_90a, one number \
         where they are equal; shared bytes on the last with the 1024 that the system keeps. Spills are the bytes stored and loaded \
         of all three. MB are of all launches of a step. Compilation is of an empty cache; its time \
         is shared out among the threads.\n",
        nvrtc.version()
    );
    let wanted = std::env::args().nth(1).unwrap_or_default();
    for (name, graph) in networks()? {
        if !name.contains(&wanted) {
            continue;
        }
        network(name, &graph, &nvrtc, threads)?;
    }
    for dtype in [DType::F32, DType::BF16] {
        let name = format!("AdamW over the parameters of BERT-large, {dtype}");
        if name.contains(&wanted) {
            optimizer(&name, dtype, &nvrtc, threads)?;
        }
    }
    Ok(())
}

/// Time that all threads of this process have run, as Linux counts it in hundredths of a second.
fn processor_seconds() -> Result<f64, Box<dyn Error>> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after_name.split_whitespace().skip(11).take(2);
    let ticks: Vec<f64> = ticks.map(str::parse).collect::<Result<_, _>>()?;
    Ok(ticks.iter().sum::<f64>() / 100.0)
}

fn networks() -> Result<Vec<(&'static str, Graph)>, ops::OpError> {
    let bf16 = Some(DType::BF16);
    Ok(vec![
        (
            "ResNet-50, batch 8, 224 x 224, f32",
            resnet_with(8, 224, [3, 4, 6, 3], None)?,
        ),
        (
            "ResNet-50, batch 8, 224 x 224, autocast to bf16",
            resnet_with(8, 224, [3, 4, 6, 3], bf16)?,
        ),
        (
            "MobileNetV2, batch 8, 224 x 224, f32",
            mobilenet_v2_with(8, 224, None)?,
        ),
        (
            "MobileNetV2, batch 8, 224 x 224, autocast to bf16",
            mobilenet_v2_with(8, 224, bf16)?,
        ),
        (
            "a layer of BERT-large, batch 8, 512 positions, f32",
            encoder_layer_of(Encoder::bert_large(8, 512), DType::F32)?,
        ),
        (
            "a layer of BERT-large, batch 8, 512 positions, bf16",
            encoder_layer_of(Encoder::bert_large(8, 512), DType::BF16)?,
        ),
    ])
}

/// The program of both passes, its graph, and the floor in bytes. All parameters are trained; running statistics do not
/// count as parameters.
fn program(graph: &Graph) -> Result<(CudaProgram, Graph, usize), Box<dyn Error>> {
    let is_trained = |position: &usize| {
        let c = graph.container(graph.inputs[*position]);
        c.lifetime == Lifetime::Parameter && c.dtype.is_float() && !c.name.contains("running")
    };
    let trained: Vec<usize> = (0..graph.inputs.len()).filter(is_trained).collect();
    let plan = Step::training(graph, &trained)?.plan_for(&Bindings::new(), Target::Cuda)?;
    let floor = convolved(&plan.bound)?;
    Ok((lower(&plan.graph)?, plan.graph, floor))
}

/// Bytes of operands and results of convolutions and their gradients, each once per convolution.
fn convolved(graph: &Graph) -> Result<usize, Box<dyn Error>> {
    let mut bytes = 0;
    let nodes = graph.single_state().map(|state| state.nodes.as_slice());
    for node in nodes.unwrap_or_default() {
        if let NodeKind::Library(library) = &node.kind
            && library.op.starts_with("conv")
        {
            for id in library.inputs.iter().chain(&library.outputs).flatten() {
                bytes += container_bytes(graph, *id)?;
            }
        }
    }
    Ok(bytes)
}

fn network(name: &str, graph: &Graph, nvrtc: &Nvrtc, threads: usize) -> Result<(), Box<dyn Error>> {
    let (program, graph, floor) = program(graph)?;
    println!("## {name}\n");
    let resources = compiled(&program.kernels, nvrtc, threads)?;
    totals(&program, &graph)?;
    if floor > 0 {
        println!(
            "- floor of the convolutions: {:.1} MB, each operand and result once",
            floor as f64 / 1e6
        );
    }
    println!("\n| kernel | of | path | registers | spills | stack | shared | launches | MB |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for (at, own) in resources.iter().enumerate() {
        row(&program, &graph, at, own)?;
    }
    println!();
    Ok(())
}

/// Compiles kernels for every architecture and prints how long that took. Returns what each kernel needs, for each
/// architecture.
fn compiled(
    kernels: &[Kernel],
    nvrtc: &Nvrtc,
    threads: usize,
) -> Result<Vec<Vec<Resources>>, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let cache = Cache::at(folder.path(), 1 << 30)?;
    let mut resources: Vec<Vec<Resources>> = vec![Vec::new(); kernels.len()];
    for arch in Arch::ALL {
        let begin = processor_seconds()?;
        let cubins = compile_all(kernels, arch, nvrtc, &cache, threads, &mut Silent)?;
        let seconds = processor_seconds()? - begin;
        let refused = gate(kernels, &cubins);
        let told = cubins.iter().flat_map(|cubin| &cubin.resources);
        for (all, own) in resources.iter_mut().zip(told) {
            all.push(own.clone());
        }
        println!(
            "- {}: {} kernels in {} files, compiled in {seconds:.1} s of processor time; refused by the gate: {}",
            arch.name(),
            kernels.len(),
            cubins.len(),
            refused.len()
        );
        for error in refused {
            println!("  - {error}");
        }
    }
    Ok(resources)
}

/// A step of an optimizer. Its bytes are those of the elements that it reads and writes, each counted once.
fn optimizer(
    name: &str,
    dtype: DType,
    nvrtc: &Nvrtc,
    threads: usize,
) -> Result<(), Box<dyn Error>> {
    let rule = Rule::Adam {
        decay: true,
        decoupled: true,
    };
    let sizes = bert_large();
    let step = pooled::emit(&rule.update(dtype, false), &sizes, true)?;
    println!("## {name}\n");
    let resources = compiled(&step.kernels, nvrtc, threads)?;
    println!(
        "- {} launches for {} parameters of {:.1} million elements, {:.1} MB moved\n",
        step.kernels.len(),
        sizes.len(),
        sizes.iter().sum::<usize>() as f64 / 1e6,
        step.bytes_moved as f64 / 1e6
    );
    println!("| kernel | registers | spills | stack | shared |");
    println!("|---|---|---|---|---|");
    for (kernel, own) in step.kernels.iter().zip(&resources) {
        println!("| {} | {} |", kernel.name, needs(own));
    }
    println!();
    Ok(())
}

/// Sizes of its 391 parameters: embeddings, 24 layers, the pooler.
fn bert_large() -> Vec<usize> {
    let width = 1024;
    let mut sizes = vec![30522 * width, 512 * width, 2 * width, width, width];
    for _ in 0..24 {
        sizes.extend([width * width, width].repeat(4));
        sizes.extend([width; 4]);
        sizes.extend([4 * width * width, 4 * width, 4 * width * width, width]);
    }
    sizes.extend([width * width, width]);
    sizes
}

/// Registers, spills, stack and shared memory, of all architectures.
fn needs(own: &[Resources]) -> String {
    let each = |f: &dyn Fn(&Resources) -> u32| {
        let all: Vec<String> = own.iter().map(|r| f(r).to_string()).collect();
        let same = all.iter().all(|text| *text == all[0]);
        if same { all[0].clone() } else { all.join("/") }
    };
    let spilled = own.iter().map(|r| r.spill_store_bytes + r.spill_load_bytes);
    format!(
        "{} | {} | {} | {}",
        each(&|r| r.registers),
        spilled.sum::<u32>(),
        each(&|r| r.stack_bytes),
        each(&|r| r.static_shared_bytes)
    )
}

fn totals(program: &CudaProgram, graph: &Graph) -> Result<(), Box<dyn Error>> {
    let mut bytes = 0;
    for launch in &program.launches {
        bytes += moved(program, graph, launch)?;
    }
    let flops: u64 = program.maps.iter().map(|m| m.flops).sum();
    println!(
        "- {} launches of {} maps, {:.1} MB moved, {:.1} GFLOP",
        program.launches.len(),
        program.maps.len(),
        bytes as f64 / 1e6,
        flops as f64 / 1e9
    );
    Ok(())
}

/// Bytes of a launch's buffers.
fn moved(program: &CudaProgram, graph: &Graph, launch: &Placed) -> Result<usize, Box<dyn Error>> {
    let mut bytes = 0;
    let params = program.params(launch.work);
    for (buffer, param) in launch.args.iter().zip(params) {
        bytes += match (buffer, param.ty) {
            (_, ParamType::Scalar(_)) => 0,
            (Buffer::Container(id), _) => container_bytes(graph, *id)?,
            (Buffer::Workspace(n), _) => program.workspace_bytes[*n],
        };
    }
    Ok(bytes)
}

fn row(
    program: &CudaProgram,
    graph: &Graph,
    at: usize,
    own: &[Resources],
) -> Result<(), Box<dyn Error>> {
    let kernel = &program.kernels[at];
    let launches = || {
        program
            .launches
            .iter()
            .filter(|l| l.work == LaunchOp::Kernel(at))
    };
    let mut bytes = 0;
    for launch in launches() {
        bytes += moved(program, graph, launch)?;
    }
    let path = launches()
        .next()
        .map_or("", |launch| program.maps[launch.map].path);
    println!(
        "| {} | {} | {path} | {} | {} | {:.1} |",
        kernel.name,
        kernel.origin,
        needs(own),
        launches().count(),
        bytes as f64 / 1e6
    );
    Ok(())
}
