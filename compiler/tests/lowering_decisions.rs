//! Decisions that lowering takes or undoes are in the report.
//!
//! What fusion joins and lowering writes as several kernels is not counted as done: the decision has the reason, its
//! bytes are not saved, and a recipe that asks for it is told.

use compiler::report::{Memory, Report};
use compiler::steering::Described;
use compiler::{Executable, Plan, PlanOptions, Step, Target};
use cuda_kernels::lower::lower;
use graph::{Bindings, Blocking, Place, Recipe, Rewrite};
use kernels::compile::CompileOptions;
use kernels::contraction::NoFastForm;
use kernels::lowering::SplitReason;
use kernels::progress::Silent;

/// A product of two windows that leave their containers, which has no fast form, with work around it.
fn planted(before: &str, x: &str, after: &str, outputs: &str) -> String {
    format!(
        r#"graph "planted" {{
  %u: f32[69, 40] input
  %t: f32[69, 40]
  %z: f32[79, 50] input
  %y: f32[40, 50]
  %v: f32[40, 50]
  %s: f32[50]
  inputs %u, %z
  state {{
    {before}
    map [p < 40, q < 50, r < 30] {{
      tasklet %y[p, q] (sum) = $0 * $1 from {x}[p + r - 9, p | 0.0], %z[q + r - 9, q | 0.0]
    }}
    {after}
  }}
  outputs {outputs}
}}
"#
    )
}

/// The bytes of the product's result.
const RESULT: i64 = 40 * 50 * 4;
const RELU: &str = "map [p < 40, q < 50] { tasklet %v[p, q] = max($0, 0.0) from %y[p, q] }";
const SUMS: &str = "map [p < 40, q < 50] { tasklet %s[q] (sum) = $0 from %y[p, q] }";
const SCALE: &str = "map [i < 69, c < 40] { tasklet %t[i, c] = $0 * 3.0 from %u[i, c] }";

fn planned(text: &str, recipe: Recipe) -> Plan {
    let graph = graph::parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let step = Step::forward(&graph).expect("a step");
    let options = PlanOptions {
        recipe,
        ..PlanOptions::for_target(Target::Cpu)
    };
    step.plan_with(&Bindings::new(), &options).expect("plans")
}

/// The only decision of a kind, which was applied and undone: its bytes, and the reason.
fn undone(plan: &Plan, rewrite: Rewrite) -> (i64, SplitReason) {
    let mut decisions = plan.decisions.iter();
    let decision = decisions.find(|d| d.rewrite() == rewrite && d.is_applied());
    let decision = decision.unwrap_or_else(|| panic!("no {rewrite}: {:#?}", plan.decisions));
    let report = Report::of_plan(plan, 2).expect("a report");
    let [undone] = report.undone.as_slice() else {
        panic!("{:#?}", report.undone);
    };
    assert_eq!(undone.place, decision.place);
    assert_eq!(undone.bytes, decision.bytes);
    let applied = plan.decisions.iter().filter(|d| d.is_applied());
    let decided: i64 = applied.map(|d| d.bytes).sum();
    assert_eq!(report.bytes_saved, decided - undone.bytes);
    let described = Described::of_plan(plan, 2).expect("a description");
    let row = described.decisions.iter();
    let mut row = row.filter(|row| row.entry.kind == rewrite.name());
    let row = row.find(|row| row.entry.container == undone.place.container);
    let row = row.expect("a row");
    assert!(!row.entry.applied, "{row:?}");
    assert_eq!(row.reason, Some(undone.reason.to_string()));
    assert!(undone.sentence.contains(&undone.reason.to_string()));
    (undone.bytes, undone.reason)
}

#[test]
fn an_epilogue_of_a_contraction_without_a_fast_form_is_undone() {
    let plan = planned(&planted("", "%u", RELU, "%v"), Recipe::default());
    let no_form = SplitReason::Contraction(NoFastForm::TwoGuardedOperands);
    assert_eq!(undone(&plan, Rewrite::Epilogue), (2 * RESULT, no_form));
    let report = Report::of_plan(&plan, 2).expect("a report");
    let [product, relu] = report.kernels.as_slice() else {
        panic!("{:#?}", report.kernels);
    };
    assert_eq!(
        (&product.writes, &relu.reads),
        (&vec!["y".into()], &vec!["y".into()])
    );
    assert_eq!((product.bytes_written, relu.bytes_read), (RESULT, RESULT));
}

#[test]
fn sums_of_such_a_contraction_are_undone() {
    let plan = planned(&planted("", "%u", SUMS, "%y, %s"), Recipe::default());
    let no_form = SplitReason::Contraction(NoFastForm::TwoGuardedOperands);
    assert_eq!(undone(&plan, Rewrite::Epilogue), (RESULT, no_form));
}

#[test]
fn a_prologue_of_such_a_contraction_is_undone() {
    let plan = planned(&planted(SCALE, "%t", "", "%y"), Recipe::default());
    let operand = 69 * 40 * 4;
    let found = undone(&plan, Rewrite::Prologue);
    assert_eq!(found, (2 * operand, SplitReason::Packing));
}

#[test]
fn a_recipe_that_asks_for_it_is_told() {
    let text = planted("", "%u", RELU, "%v");
    let plan = planned(&text, Recipe::default());
    let mut epilogues = plan.decisions.iter();
    let epilogue = epilogues.find(|d| d.rewrite() == Rewrite::Epilogue);
    let mut recipe = Recipe::default();
    recipe.tell(epilogue.expect("an epilogue").place.clone(), true);
    let plan = planned(&text, recipe);
    let described = Described::of_plan(&plan, 2).expect("a description");
    let [note] = described.notes.as_slice() else {
        panic!("{:?}", described.notes);
    };
    assert!(note.contains("both operands have guarded axes"), "{note}");
}

#[test]
fn what_a_fast_form_takes_is_not_undone() {
    let text = r#"graph "fast" {
  %x: f32[40, 30] input
  %w: f32[30, 50] input
  %y: f32[40, 50]
  %v: f32[40, 50]
  inputs %x, %w
  state {
    map [n < 40, k < 50, c < 30] {
      tasklet %y[n, k] (sum) = $0 * $1 from %x[n, c], %w[c, k]
    }
    map [n < 40, k < 50] { tasklet %v[n, k] = max($0, 0.0) from %y[n, k] }
  }
  outputs %v
}
"#;
    let report = Report::of_plan(&planned(text, Recipe::default()), 2).expect("a report");
    assert_eq!(report.undone, []);
    assert_eq!(report.bytes_saved, 2 * RESULT);
}

/// A kernel of two products on one tile, which fusion would not make: the tile is read across.
#[test]
fn a_chain_that_no_kernel_knows_is_split_with_the_reason() {
    let text = r#"graph "chain" {
  %q: bf16[64, 16] input
  %k: bf16[64, 16] input
  %s: f32[64, 64] local
  %o: bf16[64, 16]
  inputs %q, %k
  state {
    map [] kernel {
      map [i < 64, j < 64, d < 16] sequential {
        tasklet %s[i, j] (sum) = $0 * $1 from %q[i, d], %k[j, d]
      }
      map [i < 64, j < 64, e < 16] sequential {
        tasklet %o[i, e] (sum) = $0 * $1 from %s[63 - j, i], %k[j, e]
      }
    }
  }
  outputs %o
}
"#;
    let graph = graph::parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let program = lower(&graph).expect("lowers");
    let splits: Vec<_> = program.maps.iter().flat_map(|m| &m.splits).collect();
    let [split] = splits[..] else {
        panic!("{splits:?}");
    };
    let container = |name| graph.find(name).expect("a container");
    assert_eq!(split.reason, SplitReason::Chain);
    assert_eq!(split.parts, [vec![container("s")], vec![container("o")]]);
}

/// A product, in bf16, whose kernel a recipe would cut otherwise.
#[test]
fn a_recipe_does_not_cut_contractions_of_16_bit_numbers_and_says_so() {
    let text = r#"graph "half" {
  %x: bf16[40, 30] input
  %w: bf16[30, 50] input
  %y: bf16[40, 50]
  inputs %x, %w
  state {
    map [n < 40, k < 50, c < 30] {
      tasklet %y[n, k] (sum) = $0 * $1 from %x[n, c], %w[c, k]
    }
  }
  outputs %y
}
"#;
    let plan = planned(text, Recipe::default());
    let state = plan.graph.single_state().expect("one state");
    let place = Place::new(Rewrite::Blocking, &state.nodes[0], "y");
    let mut recipe = Recipe::default();
    recipe.cut(place, Blocking::Cuts(vec![[0, 0, 4, 0, 2, 1, 1, 0]]));
    let described = Described::of_plan(&planned(text, recipe), 2).expect("a description");
    let [note] = described.notes.as_slice() else {
        panic!("{:?}", described.notes);
    };
    assert!(note.contains("contractions of 16-bit numbers"), "{note}");
}

#[test]
fn a_small_step_says_why_it_runs_on_one_thread() {
    let built = |size: usize| {
        let text = format!(
            r#"graph "small" {{
  %x: f32[{size}] input
  %y: f32[{size}]
  inputs %x
  state {{
    map [i < {size}] {{ tasklet %y[i] = exp($0) from %x[i] }}
  }}
  outputs %y
}}
"#
        );
        let options = CompileOptions::from_environment(&mut Silent).expect("a compiler");
        let plan = planned(&text, Recipe::default());
        Executable::build(plan, &options, 2, &mut Silent).expect("builds")
    };
    let small = built(64);
    let why = small.plan.one_thread.expect("a decision");
    assert_eq!((small.on.threads, why.n_threads), (1, 2));
    assert!(why.saved_us <= why.waited_us, "{why:?}");
    let memory = Memory::default();
    let report = Report::new(&small.plan, &small.kernels, memory, Some(small.on));
    assert_eq!(report.one_thread, Some(why));
    let large = built(1 << 22);
    assert_eq!((large.on.threads, large.plan.one_thread), (2, None));
}

#[test]
fn a_product_that_sums_columns_has_a_predicted_time_and_a_choice_of_blocking() {
    let text = r#"graph "summed" {
  %a: f32[256, 192] input
  %b: f32[192, 128] input
  %y: f32[256, 128]
  %s: f32[128]
  inputs %a, %b
  state {
    map [p < 256, q < 128, r < 192] {
      tasklet %y[p, q] (sum) = $0 * $1 from %a[p, r], %b[r, q]
    }
    map [p < 256, q < 128] { tasklet %s[q] (sum) = $0 from %y[p, q] }
  }
  outputs %y, %s
}
"#;
    let plan = planned(text, Recipe::default());
    let report = Report::of_plan(&plan, 2).expect("a report");
    let [kernel] = report.kernels.as_slice() else {
        panic!("{:#?}", report.kernels);
    };
    assert_eq!(kernel.writes, ["y", "s"]);
    let predicted = kernel.predicted.as_ref().expect("a prediction");
    assert!(predicted.product_us > 0.0, "{predicted:?}");
    assert!(kernel.cuts.is_some());
}
