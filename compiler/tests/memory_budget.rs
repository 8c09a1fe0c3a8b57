//! Steps under recipes and memory budgets mean what they meant, and keep the budget.

mod planned;

use compiler::budget::{Limit, MemoryBudget};
use compiler::{CompileError, Decision, Plan, PlanOptions, Step};
use graph::{Bindings, DType, Graph, Rewrite, SymExpr};
use kernels::features::{CpuTarget, Isa};
use kernels::lowering::lower;
use kernels::toolchain::Family;
use models::net::{Net, Window};
use models::transformer::{Encoder, encoder_layer};
use planned::{means_the_same, values};

const THREADS: usize = 2;

fn isa() -> CpuTarget {
    CpuTarget::for_isa(Isa::Avx512, Family::Gcc)
}

/// Three convolutions with normalizations and a residual.
fn convolutions() -> Graph {
    let mut net = Net::new("block");
    let size = |n: i64| SymExpr::constant(n);
    let x = net.input("x", DType::F32, &[size(2), size(3), size(8), size(8)]);
    let build = |net: &mut Net| {
        let y = net.conv("conv1", x, 6, Window::new(3, 1, 1))?;
        let y = net.batch_norm("bn1", y)?;
        let r = net.relu("relu1", y)?;
        let y = net.conv("conv2", r, 6, Window::new(3, 1, 1))?;
        let y = net.batch_norm("bn2", y)?;
        let y = net.relu("relu2", y)?;
        let y = net.conv("conv3", y, 6, Window::new(3, 1, 1))?;
        let y = net.batch_norm("bn3", y)?;
        let y = net.apply("add", graph::Expr::In(0).add(graph::Expr::In(1)), &[y, r])?;
        let y = net.relu("relu3", y)?;
        let flat = net.reshape("flatten", y, &[size(2), size(384)])?;
        net.linear("fc", flat, 5)
    };
    let y = build(&mut net).expect("builds");
    net.finish(&[y])
}

/// Convolutions with normalizations, one after the other: every second result can be computed again from the one
/// before it, and no two of them are needed at a time.
fn chain(depth: usize) -> Graph {
    let mut net = Net::new("chain");
    let size = |n: i64| SymExpr::constant(n);
    let x = net.input("x", DType::F32, &[size(2), size(6), size(8), size(8)]);
    let build = |net: &mut Net| {
        let mut y = x;
        for k in 0..depth {
            y = net.conv(&format!("conv{k}"), y, 6, Window::new(3, 1, 1))?;
            y = net.batch_norm(&format!("bn{k}"), y)?;
            y = net.relu(&format!("relu{k}"), y)?;
        }
        let flat = net.reshape("flatten", y, &[size(2), size(384)])?;
        net.linear("fc", flat, 5)
    };
    let y = build(&mut net).expect("builds");
    net.finish(&[y])
}

fn encoder() -> Graph {
    let e = Encoder {
        batch: 2,
        length: 12,
        hidden: 16,
        heads: 2,
        inner: 64,
    };
    encoder_layer(e).expect("builds")
}

fn training(graph: &Graph) -> Step {
    let is_trained = |i: &usize| {
        let c = graph.container(graph.inputs[*i]);
        c.dtype.is_float() && !c.name.contains("running") && !c.name.ends_with("k_proj.bias")
    };
    let wrt: Vec<usize> = (0..graph.inputs.len()).filter(is_trained).collect();
    Step::training(graph, &wrt).expect("differentiates")
}

fn peak(plan: &Plan) -> usize {
    let memory = lower(&plan.graph, &isa(), THREADS).expect("lowers").memory;
    memory.saved_bytes + memory.forward_arena_bytes.max(memory.backward_arena_bytes)
}

fn with_budget(step: &Step, budget: MemoryBudget) -> Result<Plan, CompileError> {
    let options = PlanOptions {
        machine: Some(isa().machine),
        threads: THREADS,
        limit: Some(Limit {
            budget,
            isa: isa(),
            threads: THREADS,
        }),
        ..PlanOptions::default()
    };
    step.plan_with(&Bindings::new(), &options)
}

fn check(plan: &Plan) {
    let given = values(plan.step.graph(), 0);
    means_the_same(plan, &given).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn budgets_are_kept_and_change_no_result() {
    for graph in [convolutions(), encoder()] {
        let step = training(&graph);
        let default = peak(&step.plan(&Bindings::new()).expect("plans"));
        let mut last = 0.0;
        for part in [1.0, 0.9, 0.8] {
            let plan = with_budget(&step, MemoryBudget::Fraction(part)).expect("keeps it");
            let kept = plan.budget.expect("a budget");
            assert_eq!(
                (kept.default_bytes, kept.peak_bytes),
                (default, peak(&plan))
            );
            assert!(kept.peak_bytes <= kept.budget_bytes, "{kept:?}");
            assert!(
                kept.added_us >= last && kept.least_us <= kept.added_us,
                "{kept:?}"
            );
            last = kept.added_us;
            check(&plan);
            // What was chosen is a recipe that gives the same step without a search.
            let options = PlanOptions {
                recipe: plan.recipe.clone(),
                ..PlanOptions::default()
            };
            let again = step.plan_with(&Bindings::new(), &options).expect("plans");
            assert_eq!(again.graph.to_string(), plan.graph.to_string());
            assert!(again.unmet.is_empty(), "{:?}", again.unmet);
        }
    }
}

#[test]
fn deep_chains_keep_small_budgets() {
    for (depth, parts) in [(6, [0.95, 0.85, 0.8]), (12, [0.9, 0.75, 0.6])] {
        let step = training(&chain(depth));
        for part in parts {
            let plan = with_budget(&step, MemoryBudget::Fraction(part))
                .unwrap_or_else(|e| panic!("{depth} convolutions, {part}: {e}"));
            let kept = plan.budget.expect("a budget");
            assert_eq!(kept.peak_bytes, peak(&plan));
            assert!(kept.peak_bytes <= kept.budget_bytes, "{kept:?}");
            assert!(kept.added_us <= 2.0 * kept.least_us, "{kept:?}");
            check(&plan);
        }
    }
}

#[test]
fn a_budget_that_cannot_be_kept_names_the_least() {
    let step = training(&convolutions());
    let error = with_budget(&step, MemoryBudget::Bytes(100)).expect_err("too little");
    let CompileError::Budget {
        least_bytes,
        default_bytes,
        ..
    } = error
    else {
        panic!("{error}");
    };
    assert!(least_bytes < default_bytes);
    with_budget(&step, MemoryBudget::Bytes(least_bytes)).expect("what was found is possible");
}

#[test]
fn a_step_without_gradients_needs_no_budget() {
    let step = Step::forward(&convolutions()).expect("a step");
    let plan = with_budget(&step, MemoryBudget::Fraction(0.1)).expect("plans");
    assert!(
        plan.decisions
            .iter()
            .all(|d| d.rewrite() != Rewrite::Recompute || !d.is_applied())
    );
}

/// Changes decisions one at a time.
#[test]
fn no_change_of_one_decision_changes_a_result() {
    for graph in [convolutions(), encoder()] {
        let step = training(&graph);
        let own = step.plan(&Bindings::new()).expect("plans");
        let may: Vec<&Decision> = own.decisions.iter().filter(|d| d.may_change()).collect();
        assert!(may.iter().any(|d| d.is_applied()) && may.iter().any(|d| !d.is_applied()));
        // Up to three decisions of every kind, applied and refused.
        for (n, decision) in may.iter().enumerate() {
            let same = |d: &&&Decision| {
                d.rewrite() == decision.rewrite() && d.is_applied() == decision.is_applied()
            };
            if may[..n].iter().filter(same).count() >= 3 {
                continue;
            }
            let mut options = PlanOptions::default();
            options
                .recipe
                .tell(decision.place.clone(), !decision.is_applied());
            let plan = step.plan_with(&Bindings::new(), &options).expect("plans");
            assert!(plan.unmet.is_empty(), "{:?}", plan.unmet);
            lower(&plan.graph, &isa(), THREADS).expect("lowers");
            check(&plan);
        }
    }
}
