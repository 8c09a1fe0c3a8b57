//! The limit of a product follows from the type of the numbers that its kernel multiplies.

use compiler::predict::On;
use compiler::report::{Memory, Report};
use compiler::{PlanOptions, Step, Target};
use graph::{Bindings, DType, Level, Machine};
use kernels::features::{CpuTarget, Isa, Pairs};
use kernels::lowering::lower;
use kernels::toolchain::Family;

/// Operations in a microsecond, of f32 and of pairs of bf16 numbers; moving takes no time.
fn machine() -> Machine {
    let level = Level {
        bytes: 1 << 20,
        bytes_per_us: 1 << 50,
        shared_bytes_per_us: 1 << 50,
    };
    Machine {
        product_operations_per_us: 1000,
        pair_operations_per_us: 8000,
        l2: level,
        l3: level,
        memory: level,
        ..Machine::with_vector_width(16)
    }
}

/// The report of a product of 64×64 matrices beside a loop, on one thread.
fn report(dtype: &str, pairs: Option<Pairs>) -> Report {
    let text = format!(
        r#"graph "product" {{
  %a: {dtype}[64, 64] input
  %b: {dtype}[64, 64] input
  %c: f32[1024] input
  %y: {dtype}[64, 64]
  %z: f32[1024]
  inputs %a, %b, %c
  state {{
    map [i < 64, j < 64, k < 64] {{ tasklet %y[i, j] (sum) = $0 * $1 from %a[i, k], %b[k, j] }}
    map [i < 1024] {{ tasklet %z[i] = exp($0) from %c[i] }}
  }}
  outputs %y, %z
}}
"#
    );
    let graph = graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let step = Step::forward(&graph).expect("a step");
    let options = PlanOptions::for_target(Target::Cpu);
    let plan = step.plan_with(&Bindings::new(), &options).expect("plans");
    let mut target = CpuTarget::for_isa(Isa::Avx512, Family::Gcc).with_machine(Some(machine()));
    if let Some(pairs) = pairs {
        target = target.with_pairs(pairs);
    }
    let lowered = lower(&plan.graph, &target, 1).expect("lowers");
    let on = On {
        machine: target.machine,
        threads: 1,
    };
    Report::new(&plan, &lowered.kernels, Memory::default(), Some(on))
}

#[test]
fn a_step_is_held_against_the_rate_of_the_numbers_that_it_multiplies() {
    for (dtype, pairs, products, rate) in [
        ("f32", None, DType::F32, 1000.0),
        ("f32", Some(Pairs::Plain), DType::F32, 1000.0),
        ("f64", Some(Pairs::Plain), DType::F64, 1000.0),
        ("bf16", Some(Pairs::Plain), DType::BF16, 8000.0),
        // Without instructions for pairs, and in the other half precision, numbers are widened.
        ("bf16", None, DType::F32, 1000.0),
        ("f16", Some(Pairs::Plain), DType::F32, 1000.0),
    ] {
        let case = format!("{dtype} with {pairs:?}");
        let report = report(dtype, pairs);
        let [product, looping] = report.kernels.as_slice() else {
            panic!("{case}: {:#?}", report.kernels);
        };
        assert_eq!(product.products.as_deref(), Some(products.name()), "{case}");
        assert_eq!(
            (looping.products.as_deref(), looping.path),
            (None, "loops"),
            "{case}"
        );
        let expected = product.operations as f64 / rate;
        assert_eq!(report.roofline_us, Some(expected), "{case}");
    }
}
