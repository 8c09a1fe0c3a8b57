//! A contraction that no fast kernel knows gives right numbers, and the report warns of it.

use compiler::Step;
use compiler::report::Report;
use graph::Bindings;
use kernels::contraction::NoFastForm;

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

fn report(text: &str) -> Report {
    let graph = graph::parse(text).expect("parses");
    let step = Step::forward(&graph).expect("a step");
    let plan = step.plan(&Bindings::new()).expect("plans");
    Report::of_plan(&plan, 2).expect("a report")
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
    assert!(warning.scalar.predicted_us > 5 * warning.scalar.fast_us);
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

#[test]
fn an_operand_indexed_by_a_remainder_is_warned_of() {
    let text = r#"graph "rolled" {
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
    let report = report(text);
    let [warning] = report.warnings.as_slice() else {
        panic!("{:?}", report.warnings);
    };
    assert_eq!(warning.scalar.reason, NoFastForm::Index);
}
