//! Without a memory budget, a step on the CPU computes large activations again; other sizes of it do the same.

mod planned;

use compiler::budget::{Limit, MemoryBudget};
use compiler::{Plan, PlanOptions, Step, Target};
use graph::{Bindings, DType, Expr, Graph, Machine, Place, Rewrite, Stage};
use graph::{Lifetime, Storage, SymExpr, Unary};
use kernels::features::{CpuTarget, Isa};
use kernels::toolchain::Family;
use models::net::Net;
use planned::{means_the_same, values};
use std::collections::BTreeSet;

/// `depth` times two linear layers with `h · sigmoid(h)` between them. That product has `[rows, 1024]` elements, and
/// the backward pass reads both it and `h`.
fn layers(rows: i64, depth: usize) -> Graph {
    let mut net = Net::new("layers");
    let x = net.input("x", DType::F32, &[rows, 256].map(SymExpr::constant));
    let build = |net: &mut Net| {
        let mut y = x;
        for k in 0..depth {
            let h = net.linear(&format!("first{k}"), y, 1024)?;
            let silu = Expr::In(0).mul(Expr::unary(Unary::Sigmoid, Expr::In(0)));
            let g = net.apply(&format!("silu{k}"), silu, &[h])?;
            y = net.linear(&format!("second{k}"), g, 256)?;
        }
        Ok::<_, ops::OpError>(y)
    };
    let y = build(&mut net).expect("builds");
    net.finish(&[y])
}

fn training(graph: &Graph) -> Step {
    let wrt: Vec<usize> = (0..graph.inputs.len()).collect();
    Step::training(graph, &wrt).expect("differentiates")
}

fn plan(step: &Step, options: PlanOptions) -> Plan {
    let options = PlanOptions {
        machine: Some(Machine::with_vector_width(8)),
        threads: 2,
        ..options
    };
    step.plan_with(&Bindings::new(), &options).expect("plans")
}

/// Bytes that the forward pass writes and the backward pass reads.
fn kept_bytes(plan: &Plan) -> i64 {
    let nodes = &plan.graph.single_state().expect("one state").nodes;
    let (forward, later): (Vec<_>, Vec<_>) = nodes.iter().partition(|n| n.stage == Stage::Forward);
    let written: BTreeSet<_> = forward.iter().flat_map(|n| n.writes()).collect();
    let read: BTreeSet<_> = later.iter().flat_map(|n| n.reads()).collect();
    let kept = written
        .intersection(&read)
        .map(|id| plan.graph.container(*id));
    kept.filter(|c| c.lifetime == Lifetime::Transient && c.storage != Storage::Local)
        .map(|c| SymExpr::product(&c.shape).as_const().expect("bound") * c.dtype.bytes() as i64)
        .sum()
}

fn n_recomputed(plan: &Plan) -> usize {
    let is_one = |d: &&compiler::Decision| d.rewrite() == Rewrite::Recompute && d.is_applied();
    plan.decisions.iter().filter(is_one).count()
}

#[test]
fn a_large_activation_is_computed_again() {
    let step = training(&layers(1024, 1));
    let usual = plan(&step, PlanOptions::default());
    assert!(n_recomputed(&usual) > 0);
    // `h` alone, where `h` and its activation would be kept otherwise.
    let mut recipe = graph::Recipe::default();
    for d in usual
        .decisions
        .iter()
        .filter(|d| d.rewrite() == Rewrite::Recompute)
    {
        recipe.tell(d.place.clone(), false);
    }
    let options = PlanOptions {
        recipe,
        ..PlanOptions::default()
    };
    let all_kept = plan(&step, options);
    assert_eq!(n_recomputed(&all_kept), 0);
    let activation = 1024 * 1024 * 4;
    assert_eq!(kept_bytes(&all_kept) - kept_bytes(&usual), activation);
    // What it decided is a recipe for the same kernels.
    let again = plan(&step, recipe_of(&usual.recomputation));
    assert_eq!(again.graph.to_string(), usual.graph.to_string());
    assert!(again.unmet.is_empty(), "{:?}", again.unmet);
    // A GPU computes again only what a recipe asks for.
    let options = PlanOptions::for_target(Target::Cuda);
    assert_eq!(n_recomputed(&plan(&step, options)), 0);
}

/// Decisions of a recipe for each place.
fn recipe_of(told: &[(Place, bool)]) -> PlanOptions {
    let mut options = PlanOptions::default();
    for (place, take) in told {
        options.recipe.tell(place.clone(), *take);
    }
    options
}

#[test]
fn what_a_recipe_asks_for_comes_on_top() {
    let step = training(&layers(1024, 1));
    let usual = plan(&step, PlanOptions::default());
    let kept = |d: &&compiler::Decision| {
        d.rewrite() == Rewrite::Recompute && !d.is_applied() && d.may_change()
    };
    // A product, which is kept but may be computed again.
    let product = usual.decisions.iter().find(kept).expect("one is kept");
    let more = plan(&step, recipe_of(&[(product.place.clone(), true)]));
    assert_eq!(n_recomputed(&more), n_recomputed(&usual) + 1);
    assert!(more.unmet.is_empty(), "{:?}", more.unmet);
}

#[test]
fn a_fraction_counts_once_with_the_recipe_of_a_budget() {
    let step = training(&layers(1024, 4));
    let target = CpuTarget::for_isa(Isa::Avx2, Family::Gcc);
    let within = |part: f64, options: PlanOptions| {
        let limit = Limit {
            budget: MemoryBudget::Fraction(part),
            isa: target.clone(),
            threads: 2,
        };
        let options = PlanOptions {
            limit: Some(limit),
            ..options
        };
        plan(&step, options)
    };
    for part in [1.0, 0.8] {
        let first = within(part, PlanOptions::default());
        let again = PlanOptions {
            recipe: first.recipe.clone(),
            ..PlanOptions::default()
        };
        let again = within(part, again);
        assert_eq!(again.graph.to_string(), first.graph.to_string());
        let bytes = |plan: &Plan| plan.budget.expect("a budget").default_bytes;
        assert_eq!(bytes(&again), bytes(&first));
    }
}

#[test]
fn another_size_follows_the_first() {
    let large = plan(&training(&layers(1024, 1)), PlanOptions::default());
    let step = training(&layers(2, 1));
    assert_eq!(n_recomputed(&plan(&step, PlanOptions::default())), 0);
    let options = PlanOptions {
        recomputation: Some(large.recomputation.clone()),
        ..PlanOptions::default()
    };
    let small = plan(&step, options);
    assert_eq!(n_recomputed(&small), n_recomputed(&large));
    assert_eq!(small.recomputation, large.recomputation);
    assert!(small.unmet.is_empty() && small.recipe.is_empty());
    let given = values(&small.bound, 0);
    means_the_same(&small, &given).unwrap_or_else(|e| panic!("{e}"));
}
