//! Emitted CUDA text, executed on the host, against the reference interpreter.
//!
//! Every file of `emission_cases` is a graph of maps in text form. It runs under two orders of threads
//! on random inputs, in the precision it declares and with half-precision containers; all memory holds
//! NaN before. `EMISSION_CASE=name` runs only cases whose names contain it.

use cuda_kernels::{execute, lower};
use graph::{Bindings, ContainerId, DType, Graph, NoLibrary, Precision, Scalar, Tensor, interpret};
use graph_cases::{files, joined};
use std::fs;
use std::path::PathBuf;

#[path = "../../tests/graph_cases/mod.rs"]
mod graph_cases;

/// Orders of threads.
const SEEDS: [u64; 2] = [1, 2];

/// The wanted cases' files and texts.
fn cases() -> Vec<(PathBuf, String)> {
    let wanted = std::env::var("EMISSION_CASE").unwrap_or_default();
    files("../../tests/emission_cases", &wanted)
}

/// Characteristic cases have a text beside them, `NAME.cu`; `SHORTHAUL_UPDATE=1` writes the texts anew,
/// `EMISSION_CASE=name` prints those of any case.
#[test]
fn kernels_look_as_before() {
    let mut changed = Vec::new();
    for (path, text) in cases() {
        let path = path.with_extension("cu");
        let asked = std::env::var_os("EMISSION_CASE").is_some();
        if !(path.exists() || asked) {
            continue;
        }
        let program = lower::lower(&graph::parse(&text).unwrap()).unwrap();
        let kernels: Vec<&str> = program.kernels.iter().map(|k| k.text.as_str()).collect();
        let mut text = kernels.join("\n");
        for launch in &program.launches {
            text += &format!(
                "/* {} on {} blocks */\n",
                program.name(launch.work),
                launch.grid
            );
        }
        if asked {
            println!("{text}");
        } else if std::env::var_os("SHORTHAUL_UPDATE").is_some() {
            fs::write(&path, &text).unwrap();
        } else if fs::read_to_string(&path).unwrap() != text {
            changed.push(format!("{} is now:\n{text}", path.display()));
        }
    }
    assert!(changed.is_empty(), "{}", changed.join("\n"));
}

/// Floats in [-2, 2], integers in 0..3, truth values.
fn input(graph: &Graph, n: usize, id: ContainerId) -> Tensor {
    let c = graph.container(id);
    let shape: Vec<usize> = c
        .shape
        .iter()
        .map(|s| s.as_const().unwrap() as usize)
        .collect();
    let unit = |i: usize| f64::from(graph::philox::uniform(n as u64, i as u64));
    let all = 0..shape.iter().product::<usize>();
    if c.dtype.is_float() {
        let data = all.map(|i| c.dtype.round(unit(i) * 4.0 - 2.0)).collect();
        return Tensor::from_f64(c.dtype, &shape, data);
    }
    let bound = if c.dtype == DType::Bool { 2.0 } else { 3.0 };
    let data = all.map(|i| (unit(i) * bound) as i64).collect();
    Tensor::from_i64(c.dtype, &shape, data)
}

/// Error of what is computed before it is rounded to an element, relative to the largest element of
/// an output: sums of up to a few thousand terms in single precision, and 1-2 ulp of the functions.
fn computed(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        _ if dtype.is_float() => 2e-5,
        _ => 0.0,
    }
}

/// Half the distance between neighbours of a number in half precision, the error of rounding once.
fn rounded(dtype: DType, x: f64) -> f64 {
    let (digits, least) = match dtype {
        DType::F16 => (11, -14.0),
        DType::BF16 => (8, -126.0),
        _ => return 0.0,
    };
    let exponent = x.abs().log2().floor().max(least);
    exponent.exp2() * 2f64.powi(-digits)
}

/// Outputs made of what was stored before, in memory that has half precision.
const FROM_MEMORY: [&str; 6] = [
    "epilogue_product_kept_y",
    "saved_for_backward_",
    "column_",
    "prologue_convolution_mean",
    "prologue_depthwise_s",
    "prologue_kept_y",
];

/// `expected` is not rounded, unless `slack` says that it is: then the other neighbour will do too.
fn compare(expected: &Tensor, found: &Tensor, slack: f64) -> Result<(), String> {
    let dtype = expected.dtype;
    let (expected, found) = (expected.to_f64(), found.to_f64());
    if expected.len() != found.len() {
        return Err(format!("{} elements of {}", found.len(), expected.len()));
    }
    let sizes = expected.iter().map(|e| e.abs()).filter(|e| e.is_finite());
    let computed = computed(dtype) * sizes.fold(0.0, f64::max);
    for (n, (e, f)) in expected.iter().zip(&found).enumerate() {
        let same = e == f || e.is_nan() && f.is_nan();
        let allowed = computed + slack * rounded(dtype, e.abs().max(f.abs()));
        if !(same || (e - f).abs() <= allowed) {
            return Err(format!("element {n} is {f}, expected {e} within {allowed}"));
        }
    }
    Ok(())
}

/// Outputs that are not what the interpreter computes.
fn failed(graph: &Graph) -> Vec<String> {
    let program = lower::lower(graph).unwrap();
    let inputs: Vec<Tensor> = graph
        .inputs
        .iter()
        .map(|id| input(graph, id.0 as usize, *id))
        .collect();
    let none = Bindings::new();
    let by = |precision| interpret(graph, &inputs, &none, &NoLibrary, precision).unwrap();
    let (unrounded, stored) = (by(Precision::Double), by(Precision::Declared));
    let host = execute::compile(graph, &program).unwrap();
    let mut failed = Vec::new();
    for seed in SEEDS {
        let found = host.run(&inputs, seed).unwrap();
        assert_eq!(
            (unrounded.len(), found.len()),
            (graph.outputs.len(), graph.outputs.len())
        );
        for (n, (output, f)) in graph.outputs.iter().zip(&found).enumerate() {
            let name = &graph.container(output.container).name;
            let from_memory = FROM_MEMORY.iter().any(|of| name.starts_with(of));
            let (e, slack) = match from_memory {
                true => (&stored[n], 2.0),
                false => (&unrounded[n], 1.0),
            };
            if let Err(problem) = compare(e, f, slack) {
                failed.push(format!("seed {seed}, {name}: {problem}"));
            }
        }
    }
    failed
}

#[test]
fn emitted_text_computes_what_the_interpreter_does() {
    let failed = failed(&joined(&cases(), "f32"));
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn half_precision_is_rounded_once() {
    for single in ["f16", "bf16"] {
        let failed = failed(&joined(&cases(), single));
        assert!(failed.is_empty(), "{single}:\n{}", failed.join("\n"));
    }
}

/// The ends of the integer types, numbers on both sides of them, and numbers that are no integers.
const EDGES: [f64; 36] = [
    0.0,
    -0.0,
    0.5,
    -0.5,
    -1.0,
    -1.5,
    127.9,
    128.0,
    -128.0,
    -129.0,
    255.0,
    255.9,
    256.0,
    -255.5,
    32767.5,
    32768.0,
    -32769.0,
    65536.0,
    8388607.0,
    -16777215.0,
    2147483647.0,
    2147483648.0,
    -2147483648.0,
    -2147483904.0,
    4294967296.0,
    4294969344.0,
    9007199254740991.0,
    4611686018427387904.0,
    9223372036854774784.0,
    9223372036854775808.0,
    -9223372036854775808.0,
    -9223372036854777856.0,
    1e30,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
];

/// Conversions between all element types, each exactly as the type rounds.
#[test]
fn casts_are_exact() {
    let name = |from: DType, to: DType| format!("%{from}_as_{to}");
    let (mut containers, mut tasklets) = (String::new(), String::new());
    let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
    for from in DType::ALL {
        containers += &format!("  %{from}: {from}[64] input\n");
        inputs.push(format!("%{from}"));
        for to in DType::ALL {
            let made = name(from, to);
            containers += &format!("  {made}: {to}[64]\n");
            tasklets += &format!("      tasklet {made}[i] = $0 from %{from}[i]\n");
            outputs.push(made);
        }
    }
    let text = format!(
        "graph \"casts\" {{\n{containers}  inputs {}\n  state {{\n    map [i < 64] {{\n{tasklets}    }}\n  }}\n  outputs {}\n}}\n",
        inputs.join(", "),
        outputs.join(", ")
    );
    let graph = graph::parse(&text).unwrap();
    let program = lower::lower(&graph).unwrap();
    let input = |dtype: DType| {
        let drawn = (EDGES.len()..64).map(|i| {
            let unit = f64::from(graph::philox::uniform(dtype as u64, i as u64));
            unit * 600.0 - 300.0
        });
        let values = EDGES.into_iter().chain(drawn);
        if dtype.is_float() {
            Tensor::from_f64(dtype, &[64], values.map(|v| dtype.round(v)).collect())
        } else {
            let held = |v: f64| Scalar::Int(v as i64).cast(dtype).as_i64();
            Tensor::from_i64(dtype, &[64], values.map(held).collect())
        }
    };
    let inputs: Vec<Tensor> = DType::ALL.into_iter().map(input).collect();
    let expected = interpret(
        &graph,
        &inputs,
        &Bindings::new(),
        &NoLibrary,
        Precision::Declared,
    );
    let host = execute::compile(&graph, &program).unwrap();
    let found = host.run(&inputs, 1).unwrap();
    for ((e, f), output) in expected.unwrap().iter().zip(&found).zip(&graph.outputs) {
        let name = &graph.container(output.container).name;
        if e.dtype.is_float() {
            let pairs = e.to_f64().into_iter().zip(f.to_f64());
            for (i, (e, f)) in pairs.enumerate() {
                let same = e.to_bits() == f.to_bits() || e.is_nan() && f.is_nan();
                assert!(same, "{name}: element {i} is {f}, expected {e}");
            }
        } else {
            assert_eq!(e.to_i64(), f.to_i64(), "{name}");
        }
    }
}
