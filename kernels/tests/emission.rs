//! Emitted kernels against the reference interpreter.
//!
//! Every file of `emission_cases` is a graph of maps in text form. It is lowered, compiled and run
//! with 1, 2 and 3 threads on random inputs; all memory holds NaN or garbage before. Outputs must
//! agree with the interpreter, which computes in double precision on the same inputs.
//! `EMISSION_CASE=name` runs only cases whose names contain it.
//!
//! For some cases the C text itself is kept beside the graph (`NAME.c`); run with
//! `SHORTHAUL_UPDATE=1` to write it anew, and look at the difference.

use graph::{
    Bindings, ContainerId, DType, Graph, NoLibrary, Precision, Scalar, Tensor, Values, interpret,
};
use kernels::assemble::assemble;
use kernels::compile::{CompileOptions, compile};
use kernels::features::{self, CpuTarget, FeatureError, Isa, Pairs};
use kernels::halves;
use kernels::lowering::{Lowered, lower};
use kernels::memory::AlignedBuffer;
use kernels::pool::Pool;
use kernels::progress::Silent;
use kernels::toolchain::Family;
use std::fs;
use std::path::PathBuf;

mod emission_halves;

const THREADS: [usize; 3] = [1, 2, 3];

/// Rounding of sums of up to a few thousand terms in blocks, and 1-2 ulp of the vector functions.
const F32_TOLERANCE: f64 = 2e-5;
const F64_TOLERANCE: f64 = 1e-12;
/// Distance of neighbouring numbers, for each container on the way to a result: local ones are not
/// rounded in a kernel, but in the interpreter.
const BF16_TOLERANCE: f64 = 4.0 / 256.0;
const F16_TOLERANCE: f64 = 4.0 / 2048.0;

fn cases() -> Vec<(String, Graph)> {
    cases_in(DType::F32)
}

/// The cases with another type in place of single precision.
fn cases_in(dtype: DType) -> Vec<(String, Graph)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/emission_cases");
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "graph"))
        .collect();
    paths.sort();
    let wanted = std::env::var("EMISSION_CASE").unwrap_or_default();
    paths
        .into_iter()
        .map(|p| {
            let name = p.file_stem().unwrap().to_string_lossy().into_owned();
            let text = fs::read_to_string(&p).unwrap();
            let text = text.replace("f32", dtype.name());
            let graph = graph::parse(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
            (name, graph)
        })
        .filter(|(name, _)| name.contains(&wanted))
        .collect()
}

/// A small generator of random numbers (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn shape_of(graph: &Graph, id: ContainerId) -> Vec<usize> {
    let shape = &graph.container(id).shape;
    shape
        .iter()
        .map(|s| s.as_const().unwrap() as usize)
        .collect()
}

/// Floats in [-2, 2], integers in 0..3, truth values.
fn random_input(graph: &Graph, id: ContainerId, random: &mut Random) -> Tensor {
    let shape = shape_of(graph, id);
    let dtype = graph.container(id).dtype;
    let n: usize = shape.iter().product();
    if dtype.is_float() {
        let data = (0..n).map(|_| dtype.round(random.unit() * 4.0 - 2.0));
        return Tensor::from_f64(dtype, &shape, data.collect());
    }
    let bound = if dtype == DType::Bool { 2 } else { 3 };
    let data = (0..n).map(|_| (random.next() % bound) as i64);
    Tensor::from_i64(dtype, &shape, data.collect())
}

/// Position in memory of each element in row-major order.
fn positions(graph: &Graph, id: ContainerId) -> Vec<usize> {
    let c = graph.container(id);
    let shape: Vec<i64> = c.shape.iter().map(|s| s.as_const().unwrap()).collect();
    let strides = c.layout.strides(&shape);
    let n: i64 = shape.iter().product();
    (0..n)
        .map(|flat| {
            let (mut rest, mut at) = (flat, 0);
            for d in (0..shape.len()).rev() {
                at += rest % shape[d] * strides[d];
                rest /= shape[d];
            }
            at as usize
        })
        .collect()
}

fn element_bytes(s: Scalar, dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => (s.as_f64() as f32).to_le_bytes().to_vec(),
        DType::F64 => s.as_f64().to_le_bytes().to_vec(),
        d @ (DType::F16 | DType::BF16) => halves::bits(d, s.as_f64()).to_le_bytes().to_vec(),
        d => s.as_i64().to_le_bytes()[..d.bytes()].to_vec(),
    }
}

fn to_memory(graph: &Graph, id: ContainerId, tensor: &Tensor) -> AlignedBuffer {
    let width = tensor.dtype.bytes();
    let mut memory = AlignedBuffer::zeroed(tensor.len() * width).unwrap();
    let bytes = memory.as_mut_slice::<u8>();
    for (n, at) in positions(graph, id).into_iter().enumerate() {
        let value = element_bytes(tensor.at(n), tensor.dtype);
        bytes[at * width..(at + 1) * width].copy_from_slice(&value);
    }
    memory
}

fn from_memory(graph: &Graph, id: ContainerId, memory: &AlignedBuffer) -> Tensor {
    let dtype = graph.container(id).dtype;
    let width = dtype.bytes();
    let mut tensor = Tensor::zeros(dtype, &shape_of(graph, id));
    for (n, at) in positions(graph, id).into_iter().enumerate() {
        let b = &memory.as_slice::<u8>()[at * width..(at + 1) * width];
        let value = match dtype {
            DType::F32 => Scalar::Float(f32::from_le_bytes(b.try_into().unwrap()).into()),
            DType::F64 => Scalar::Float(f64::from_le_bytes(b.try_into().unwrap())),
            DType::F16 | DType::BF16 => {
                let bits = u16::from_le_bytes(b.try_into().unwrap());
                Scalar::Float(halves::value(dtype, bits))
            }
            DType::I64 => Scalar::Int(i64::from_le_bytes(b.try_into().unwrap())),
            DType::I32 => Scalar::Int(i32::from_le_bytes(b.try_into().unwrap()).into()),
            _ => Scalar::Int(b[0].into()),
        };
        tensor.set(n, value);
    }
    tensor
}

fn garbage(bytes: usize) -> AlignedBuffer {
    let mut memory = AlignedBuffer::zeroed(bytes).unwrap();
    memory.as_mut_slice::<u8>().fill(0xFF);
    memory
}

fn run(
    graph: &Graph,
    lowered: &Lowered,
    options: &CompileOptions,
    threads: usize,
    inputs: &[Tensor],
) -> Vec<Tensor> {
    let modules = compile(&lowered.units, options, &mut Silent).unwrap_or_else(|e| panic!("{e}"));
    let programs = assemble(graph, lowered, &modules).unwrap();
    let mut memory: Vec<AlignedBuffer> = graph
        .inputs
        .iter()
        .zip(inputs)
        .map(|(id, t)| to_memory(graph, *id, t))
        .collect();
    for output in &graph.outputs {
        let c = graph.container(output.container);
        let n: usize = shape_of(graph, output.container).iter().product();
        memory.push(garbage(n * c.dtype.bytes()));
    }
    let pool = Pool::new();
    pool.set_threads(threads);
    let mut saved = garbage(programs[0].parts().saved_bytes);
    for program in &programs {
        let mut arena = garbage(program.parts().arena_bytes);
        let buffers: Vec<_> = memory.iter_mut().map(AlignedBuffer::as_buffer).collect();
        program
            .run(&buffers, arena.as_buffer(), saved.as_buffer(), &pool)
            .unwrap();
    }
    let outputs = graph.outputs.iter().zip(&memory[graph.inputs.len()..]);
    outputs
        .map(|(o, m)| from_memory(graph, o.container, m))
        .collect()
}

fn compare(what: &str, want: &Tensor, got: &Tensor) -> Result<(), String> {
    let tolerance = match want.dtype {
        DType::F32 => F32_TOLERANCE,
        DType::F64 => F64_TOLERANCE,
        DType::BF16 => BF16_TOLERANCE,
        DType::F16 => F16_TOLERANCE,
        _ => 0.0,
    };
    if let (Values::Int(a), Values::Int(b)) = (&want.values, &got.values) {
        return match a.iter().zip(b).position(|(x, y)| x != y) {
            Some(n) => Err(format!("{what}[{n}]: wanted {}, got {}", a[n], b[n])),
            None => Ok(()),
        };
    }
    let (a, b) = (want.to_f64(), got.to_f64());
    let largest = a
        .iter()
        .filter(|x| x.is_finite())
        .fold(1.0f64, |m, x| m.max(x.abs()));
    for (n, (x, y)) in a.iter().zip(&b).enumerate() {
        let same = x == y || (x.is_nan() && y.is_nan());
        let error = (x - y).abs();
        if !same && (error.is_nan() || error > tolerance * largest) {
            return Err(format!("{what}[{n}]: wanted {x}, got {y}"));
        }
    }
    Ok(())
}

/// One set of options for every instruction set that runs here.
fn every_isa() -> Vec<CompileOptions> {
    let own = CompileOptions::from_environment(&mut Silent).unwrap();
    let (toolchain, cache) = (&own.toolchain, &own.cache);
    let all = [Isa::Portable, Isa::Avx2, Isa::Avx512].into_iter();
    let target = |isa| match features::detect(toolchain, Some(isa), cache) {
        Ok(target) => Some(target),
        // This CPU lacks it; all other errors are defects.
        Err(FeatureError::Forced { isa, problem }) => {
            eprintln!("left out: {} ({problem})", isa.name());
            None
        }
        Err(error) => panic!("{error}"),
    };
    let found = all.filter_map(target).map(|target| CompileOptions {
        target,
        toolchain: toolchain.clone(),
        cache: cache.clone(),
        jobs: 2,
    });
    found.collect()
}

#[test]
fn kernels_agree_with_the_interpreter() {
    agree_with_the_interpreter(&cases(), &every_isa());
}

#[test]
fn kernels_agree_with_the_interpreter_in_half_precision() {
    let isas = every_isa();
    for dtype in [DType::BF16, DType::F16] {
        agree_with_the_interpreter(&cases_in(dtype), &isas[isas.len() - 1..]);
    }
}

fn agree_with_the_interpreter(cases: &[(String, Graph)], isas: &[CompileOptions]) {
    assert!(!isas.is_empty());
    let mut failures = Vec::new();
    for (name, graph) in cases {
        let mut random = Random(
            name.bytes()
                .fold(7, |h: u64, b| h.wrapping_mul(31) + u64::from(b)),
        );
        let inputs: Vec<Tensor> = graph
            .inputs
            .iter()
            .map(|id| random_input(graph, *id, &mut random))
            .collect();
        let want = interpret(
            graph,
            &inputs,
            &Bindings::new(),
            &NoLibrary,
            Precision::Double,
        )
        .unwrap_or_else(|e| panic!("{name}: {e}"));
        for options in isas {
            for threads in THREADS {
                let lowered = lower(graph, &options.target, threads)
                    .unwrap_or_else(|e| panic!("{name}: {e}"));
                let got = run(graph, &lowered, options, threads, &inputs);
                for ((o, w), g) in graph.outputs.iter().zip(&want).zip(&got) {
                    let what = format!(
                        "{name} for {:?} with {threads} threads: {}",
                        options.target.isa,
                        graph.container(o.container).name
                    );
                    failures.extend(compare(&what, w, g).err());
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// What follows a product and can run on its blocks is part of the product's kernel; what cannot is
/// a kernel of its own.
#[test]
fn element_wise_work_after_a_product_is_its_epilogue() {
    let target = CpuTarget::for_isa(Isa::Avx512, Family::Gcc);
    let mut n_cases = 0;
    for (name, graph) in cases() {
        if !name.starts_with("epilogue_") {
            continue;
        }
        let lowered = lower(&graph, &target, 2).unwrap_or_else(|e| panic!("{name}: {e}"));
        let paths: Vec<&str> = lowered.kernels.iter().map(|k| k.path).collect();
        // A data gradient with a stride is written in phases: no block is final before the last. A
        // depthwise weight gradient adds up the threads' parts at the end.
        let refused = [
            "epilogue_refused",
            "epilogue_strided_data_gradient",
            "epilogue_reduced_depthwise",
        ];
        let refused = refused.contains(&name.as_str());
        assert_eq!(paths.contains(&"loops"), refused, "{name}: {paths:?}");
        n_cases += 1;
    }
    assert_eq!(n_cases, 10);
}

/// Maps that make operands of a product run while the product packs them; the weights of a depthwise convolution
/// stay in registers.
#[test]
fn element_wise_work_on_operands_is_the_product_s_prologue() {
    let target = CpuTarget::for_isa(Isa::Avx512, Family::Gcc);
    let mut n_cases = 0;
    for (name, graph) in cases() {
        if !name.starts_with("prologue_") {
            continue;
        }
        let lowered = lower(&graph, &target, 2).unwrap_or_else(|e| panic!("{name}: {e}"));
        let paths: Vec<&str> = lowered.kernels.iter().map(|k| k.path).collect();
        let refused = name == "prologue_refused";
        assert_eq!(paths.contains(&"loops"), refused, "{name}: {paths:?}");
        for kernel in &lowered.kernels {
            assert_eq!(kernel.scalar, None, "{name}: {}", kernel.name);
            let is_local = |id: &ContainerId| {
                let name = &graph.container(*id).name;
                !refused && ["t", "u", "dy", "dy_again"].contains(&name.as_str())
            };
            // Containers that are local in the graph are in no memory.
            let mut touched = kernel.reads.iter().chain(&kernel.writes);
            let is_input = |id: &ContainerId| graph.inputs.contains(id);
            assert!(!touched.any(|id| is_local(id) && !is_input(id)), "{name}");
        }
        n_cases += 1;
    }
    assert_eq!(n_cases, 8);
}

/// Sums of a product's columns are made while its blocks are in cache, where the blocks are final one by one.
#[test]
fn sums_of_columns_are_part_of_the_product() {
    let target = CpuTarget::for_isa(Isa::Avx512, Family::Gcc);
    let mut n_cases = 0;
    for (name, graph) in cases() {
        if !name.starts_with("column_") {
            continue;
        }
        let lowered = lower(&graph, &target, 2).unwrap_or_else(|e| panic!("{name}: {e}"));
        let n_kernels = lowered.kernels.len();
        // Results that lie across memory go through scratch; phases of a stride leave no blocks; a block of the product
        // is not a block of a container whose rows have another order.
        let refused = [
            "column_moments_across",
            "column_sums_of_another_order",
            "column_sums_strided_data_gradient",
        ];
        let refused = refused.contains(&name.as_str());
        assert_eq!(n_kernels > 1, refused, "{name}: {n_kernels} kernels");
        n_cases += 1;
    }
    assert_eq!(n_cases, 8);
}

/// Digits of a position and groups of channels do not keep a contraction from the micro-kernels.
#[test]
fn composite_axes_have_fast_forms() {
    let target = CpuTarget::for_isa(Isa::Avx512, Family::Gcc);
    let composite = ["grouped_", "split_positions", "_before_pool"];
    let mut n_contractions = 0;
    for (name, graph) in cases() {
        if !composite.iter().any(|part| name.contains(part)) || name == "grouped_channels_sum" {
            continue;
        }
        let lowered = lower(&graph, &target, 2).unwrap_or_else(|e| panic!("{name}: {e}"));
        for kernel in &lowered.kernels {
            assert_eq!(kernel.scalar, None, "{name}: {}", kernel.name);
            assert_ne!(kernel.path, "loops", "{name}: {}", kernel.name);
            n_contractions += 1;
        }
    }
    assert_eq!(n_contractions, 9);
}

/// Kernels whose text is kept: one of each kind.
const SNAPSHOTS: [&str; 8] = [
    "relu_residual",
    "softmax",
    "layer_norm_backward",
    "batch_statistics",
    "max_pool",
    "pad_and_reverse",
    "embedding_backward",
    "transposition_by_tiles",
];

#[test]
fn kernels_look_as_before() {
    let target = CpuTarget::for_isa(Isa::Avx512, Family::Gcc);
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/emission_cases");
    let mut changed = Vec::new();
    for (name, graph) in cases() {
        if !SNAPSHOTS.contains(&name.as_str()) {
            continue;
        }
        let lowered = lower(&graph, &target, 2).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut text = String::new();
        for unit in &lowered.units {
            // What every file begins with is left out.
            let kernels = unit.source.find("/* ").unwrap_or(0);
            let last = unit.source.rfind("#pragma omp declare").unwrap_or(kernels);
            let line = unit.source[last..]
                .find('\n')
                .map_or(last, |n| last + n + 1);
            text.push_str(&unit.source[line..]);
        }
        let path = folder.join(format!("{name}.c"));
        if std::env::var_os("SHORTHAUL_UPDATE").is_some() {
            fs::write(&path, &text).unwrap();
        } else if fs::read_to_string(&path).unwrap_or_default() != text {
            changed.push(format!("{} is now:\n{text}", path.display()));
        }
    }
    assert!(changed.is_empty(), "{}", changed.join("\n"));
}
