//! A contraction that no fast kernel knows gives right numbers, and the report warns of it.

use compiler::cuda::{CudaExecutable, CudaTarget, ProductsBy};
use compiler::report::Report;
use compiler::{Plan, Step, Target};
use cuda_kernels::lower::lower;
use graph::Bindings;
use kernels::contraction::NoFastForm;
use kernels::progress::Silent;

/// The number of multiplications and additions of [`planted`] in single precision.
const OPERATIONS: u64 = 2 * 40 * 50 * 30;

/// A product of two windows over elements of a type, shifted and filled where they leave the container.
fn planted(dtype: &str, shift: &str, fill: &str) -> Report {
    let text = format!(
        r#"graph "planted" {{
  %x: {dtype}[69, 40] input
  %z: {dtype}[79, 50] input
  %y: {dtype}[40, 50]
  inputs %x, %z
  state {{
    map [p < 40, q < 50, r < 30] {{
      tasklet %y[p, q] (sum) = $0 * $1 from %x[p + r{shift}, p{fill}], %z[q + r{shift}, q{fill}]
    }}
  }}
  outputs %y
}}
"#
    );
    report(&text)
}

fn planned(text: &str, target: Target) -> Plan {
    let graph = graph::parse(text).expect("parses");
    let step = Step::forward(&graph).expect("a step");
    step.plan_for(&Bindings::new(), target).expect("plans")
}

fn report(text: &str) -> Report {
    Report::of_plan(&planned(text, Target::Cpu), 2).expect("a report")
}

#[test]
fn a_contraction_without_a_fast_form_is_warned_of() {
    let report = planted("f32", " - 9", " | 0.0");
    let [warning] = report.warnings.as_slice() else {
        panic!("{:?}", report.warnings);
    };
    assert_eq!(warning.scalar.reason, NoFastForm::TwoGuardedOperands);
    let [kernel] = report.kernels.as_slice() else {
        panic!("{:?}", report.kernels);
    };
    assert_eq!(
        (&kernel.name, &kernel.origin),
        (&warning.kernel, &warning.origin)
    );
    assert_eq!(kernel.operations, OPERATIONS);
    let cost = warning.scalar.cost.expect("the limits of a CPU are known");
    assert!(cost.predicted_us > 5 * cost.fast_us);
    let said = ["both operands have guarded axes", "predicted", "forward"];
    for part in said {
        assert!(warning.sentence.contains(part), "{}", warning.sentence);
    }
}

#[test]
fn two_types_without_a_micro_kernel_are_warned_of() {
    let text = r#"graph "mixed" {
  %x: f32[40, 30] input
  %w: f64[30, 50] input
  %y: f64[40, 50]
  inputs %x, %w
  state {
    map [n < 40, k < 50, c < 30] {
      tasklet %y[n, k] (sum) = $0 * $1 from %x[n, c], %w[c, k]
    }
  }
  outputs %y
}
"#;
    let report = report(text);
    let [warning] = report.warnings.as_slice() else {
        panic!("{:?}", report.warnings);
    };
    assert_eq!(warning.scalar.reason, NoFastForm::ElementType);
}

const ROLLED: &str = r#"graph "rolled" {
  %x: f32[40, 30] input
  %w: f32[30, 50] input
  %y: f32[40, 50]
  inputs %x, %w
  state {
    map [n < 40, k < 50, c < 30] {
      tasklet %y[n, k] (sum) = $0 * $1 from %x[mod(n + 3, 40), c], %w[c, k]
    }
  }
  outputs %y
}
"#;

#[test]
fn an_operand_indexed_by_a_remainder_is_warned_of() {
    let report = report(ROLLED);
    let [warning] = report.warnings.as_slice() else {
        panic!("{:?}", report.warnings);
    };
    assert_eq!(warning.scalar.reason, NoFastForm::Index);
}

/// On a GPU too: the limits of the device are not known, so there are no times.
#[test]
fn a_contraction_without_tiles_is_warned_of_on_a_gpu() {
    let plan = planned(ROLLED, Target::Cuda);
    let target = CudaTarget::Emulated { seed: 1 };
    let built = CudaExecutable::build(plan, &target, &ProductsBy::Own, &mut Silent);
    let built = built.expect("builds");
    let report = Report::new(&built.plan, &built.kernels, built.memory(), None);
    let [warning] = report.warnings.as_slice() else {
        panic!("{:?}", report.warnings);
    };
    assert_eq!(
        (warning.scalar.reason, warning.scalar.cost),
        (NoFastForm::Index, None)
    );
    let reason = "an operand's index is not a sum of the loops' positions";
    assert!(warning.sentence.ends_with(reason), "{}", warning.sentence);
}

#[test]
fn a_result_that_is_written_along_a_diagonal_is_warned_of_on_a_gpu() {
    let text = r#"graph "sheared" {
  %x: f32[40, 30] input
  %w: f32[30, 50] input
  %y: f32[120, 50]
  inputs %x, %w
  state {
    map [n < 40, k < 50, c < 30] {
      tasklet %y[n + k, k] (sum) = $0 * $1 from %x[n, c], %w[c, k]
    }
  }
  outputs %y
}
"#;
    let program = lower(&planned(text, Target::Cuda).graph).expect("lowers");
    let reasons: Vec<_> = program.maps.iter().filter_map(|m| m.scalar).collect();
    assert_eq!(reasons, [NoFastForm::RepeatedOutputDim]);
}

/// Few rows reuse nothing: loops are the better form of such a contraction.
#[test]
fn a_thin_contraction_in_loops_is_not_warned_of() {
    let text = r#"graph "thin" {
  %x: f32[4, 300] input
  %w: f32[300, 50] input
  %y: f32[4, 50]
  inputs %x, %w
  state {
    map [n < 4, k < 50, c < 300] {
      tasklet %y[n, k] (sum) = $0 * $1 from %x[n, c], %w[c, k]
    }
  }
  outputs %y
}
"#;
    let program = lower(&planned(text, Target::Cuda).graph).expect("lowers");
    let [map] = program.maps.as_slice() else {
        panic!("{:?}", program.maps);
    };
    assert_eq!((map.path, map.scalar), ("loops", None));
}
