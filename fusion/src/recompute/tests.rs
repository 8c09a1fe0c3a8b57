//! Recomputation keeps the meaning, does what recipes say, and chooses as well as trying every choice does.

use super::{BackwardNode, Choice, Copies, Problem, Speed, Unit, Value};
use crate::{Decision, Expanded};
use graph::{ContainerId, Graph, Place, Recipe, Rewrite, Stage};
use models::{results, text_graph as graph};
use std::collections::BTreeSet;

/// `t = exp(x)`, `u = t·t + x`, results `y = Σ u`, and in the backward pass `g = t·d`, `h = u·d`.
const CONTAINERS: &str = "%x: f32[64] input
    %d: f32[64] input
    %t: f32[64]
    %u: f32[64]
    %y: f32[]
    %g: f32[64]
    %h: f32[64]";
const MAPS: &str = "map [i < 64] { tasklet %t[i] = exp($0) from %x[i] }
    map [i < 64] { tasklet %u[i] = $0 * $0 + $1 from %t[i], %x[i] }
    map [i < 64] { tasklet %y[] (sum) = $0 from %u[i] }
    map [i < 64] !backward { tasklet %g[i] = $0 * $1 from %t[i], %d[i] !backward }
    map [i < 64] !backward { tasklet %h[i] = $0 * $1 from %u[i], %d[i] !backward }";

fn expanded() -> Expanded {
    Expanded {
        graph: graph(CONTAINERS, MAPS, "%y, %g, %h"),
        decisions: Vec::new(),
    }
}

fn place(graph: &Graph, node: usize, container: &str) -> Place {
    let node = &graph.single_state().expect("one state").nodes[node];
    Place::new(Rewrite::Recompute, node, container)
}

/// Names of what the forward pass writes and the backward pass reads.
fn kept(graph: &Graph) -> Vec<String> {
    let nodes = &graph.single_state().expect("one state").nodes;
    let of = |stage| move |n: &&graph::Node| n.stage == stage;
    let read: Vec<ContainerId> = nodes
        .iter()
        .filter(of(Stage::Backward))
        .flat_map(|n| n.reads())
        .collect();
    let written = nodes
        .iter()
        .filter(of(Stage::Forward))
        .flat_map(|n| n.writes());
    let names = written.filter(|id| read.contains(id));
    names.map(|id| graph.container(id).name.clone()).collect()
}

fn pinned(recipe: &Recipe) -> (Graph, Vec<Decision>) {
    let before = expanded();
    let problem = Problem::new(&before, recipe, &Speed::default());
    let (after, _) = problem.apply(before.clone(), &problem.pinned());
    graph::verify(&after.graph).unwrap_or_else(|e| panic!("{e:?}\n{}", after.graph));
    assert_eq!(results(&before.graph), results(&after.graph));
    (after.graph, after.decisions)
}

#[test]
fn a_recipe_says_what_is_computed_again() {
    let g = expanded().graph;
    let (same, decisions) = pinned(&Recipe::default());
    assert_eq!(same, g);
    assert_eq!(kept(&same), ["t", "u"]);
    assert!(decisions.iter().all(|d| !d.is_applied() && d.may_change()));
    let mut recipe = Recipe::default();
    recipe.tell(place(&g, 1, "u"), true);
    let (after, decisions) = pinned(&recipe);
    assert_eq!(kept(&after), ["t"]);
    let done: Vec<_> = decisions.iter().filter(|d| d.is_applied()).collect();
    // `t` and `x` are read again and `u` is written; there are a product and a sum at each of 64 points.
    assert_eq!((done[0].bytes, done[0].memory_bytes), (-3 * 256, 256));
    assert_eq!((done.len(), done[0].operations), (1, 128));
    recipe.tell(place(&g, 0, "t"), true);
    let (after, _) = pinned(&recipe);
    assert_eq!(kept(&after), Vec::<String>::new());
}

#[test]
fn a_limit_is_kept_and_the_choice_is_a_recipe() {
    let before = expanded();
    let problem = Problem::new(&before, &Recipe::default(), &Speed::default());
    assert_eq!(problem.solve(512).expect("fits").choice, Choice::default());
    for limit in [256, 0] {
        let solution = problem.solve(limit).expect("fits");
        assert!(solution.cost.kept_bytes <= limit && solution.cost.us > 0.0);
        let (after, _) = problem.apply(before.clone(), &solution.choice);
        assert_eq!(results(&before.graph), results(&after.graph));
        let mut recipe = Recipe::default();
        for (place, take) in problem.recipe(&before, &solution.choice) {
            recipe.tell(place, take);
        }
        let again = Problem::new(&before, &recipe, &Speed::default());
        assert_eq!(again.pinned(), solution.choice);
        assert_eq!(
            again.apply(before.clone(), &again.pinned()).0.graph,
            after.graph
        );
    }
    let infeasible = problem
        .solve(-1)
        .expect_err("nothing keeps less than nothing");
    assert_eq!(infeasible.least_bytes, 0);
}

/// `h = x·w`, `g = exp(h)`, `y = g·v` for `rows` rows. The backward pass computes the gradients with respect to `v`
/// and `h`. `g` and `h` are kept.
fn layer(rows: usize) -> Expanded {
    let containers = format!(
        "%x: f32[{rows}, 512] input
    %w: f32[512, 512] input
    %v: f32[512, 512] input
    %dy: f32[{rows}, 512] input
    %h: f32[{rows}, 512]
    %g: f32[{rows}, 512]
    %y: f32[{rows}, 512]
    %dv: f32[512, 512]
    %dg: f32[{rows}, 512]
    %dh: f32[{rows}, 512]"
    );
    let product = |n: usize, k: usize, stage: &str, tasklet: &str| {
        format!("map [i < {n}, j < 512, k < {k}] {stage} {{ tasklet {tasklet} {stage} }}\n")
    };
    let forward = product(
        rows,
        512,
        "",
        "%h[i, j] (sum) = $0 * $1 from %x[i, k], %w[k, j]",
    ) + &format!(
        "map [i < {rows}, j < 512] {{ tasklet %g[i, j] = exp($0) from %h[i, j] }}\n"
    ) + &product(
        rows,
        512,
        "",
        "%y[i, j] (sum) = $0 * $1 from %g[i, k], %v[k, j]",
    );
    let later = "!backward";
    let backward = product(
        512,
        rows,
        later,
        "%dv[i, j] (sum) = $0 * $1 from %g[k, i], %dy[k, j]",
    ) + &product(
        rows,
        512,
        later,
        "%dg[i, j] (sum) = $0 * $1 from %dy[i, k], %v[j, k]",
    ) + &format!(
        "map [i < {rows}, j < 512] !backward {{ tasklet %dh[i, j] = $0 * exp($1) from %dg[i, j], %h[i, j] !backward }}"
    );
    Expanded {
        graph: graph(&containers, &(forward + &backward), "%y, %dv, %dh"),
        decisions: Vec::new(),
    }
}

/// What is kept of a layer without a budget, and what the decisions say.
fn kept_by_default(rows: usize, recipe: &Recipe, speed: &Speed) -> (Vec<String>, Vec<String>) {
    let before = layer(rows);
    let problem = Problem::new(&before, recipe, speed);
    let (after, _) = problem.apply(before, &problem.by_default());
    graph::verify(&after.graph).unwrap_or_else(|e| panic!("{e:?}\n{}", after.graph));
    let said = after.decisions.iter().map(|d| format!("{d:?}")).collect();
    (kept(&after.graph), said)
}

#[test]
fn without_a_budget_large_values_that_take_little_time_are_computed_again() {
    let recipe = Recipe::default();
    // Products take 13 ms each; `exp` reads and writes 4 MiB in 0.1 ms.
    let speed = Speed {
        bytes_per_us: 40_000.0,
        product_operations_per_us: 40_000.0,
        loop_operations_per_us: 1e9,
    };
    let (kept, said) = kept_by_default(1024, &recipe, &speed);
    assert_eq!(kept, ["h"], "{said:?}");
    // Computing the result of a product again would take as long as the product.
    assert!(said.iter().any(|d| d.contains("Unasked")), "{said:?}");
    // Here `g` has half a MiB, which is too little.
    assert_eq!(kept_by_default(256, &recipe, &speed).0, ["h", "g"]);
    // `exp` would take more than a tenth of the step.
    let slow_memory = Speed {
        bytes_per_us: 100.0,
        ..speed
    };
    assert_eq!(kept_by_default(1024, &recipe, &slow_memory).0, ["h", "g"]);
    // A recipe has the last word.
    let mut forbidden = Recipe::default();
    forbidden.tell(place(&layer(1024).graph, 1, "g"), false);
    assert_eq!(kept_by_default(1024, &forbidden, &speed).0, ["h", "g"]);
}

/// A problem of some units in which each reads some of the values before it. Its backward pass reads them in turn.
fn random_problem(seed: u64) -> Problem {
    let mut n = 0;
    let mut next = |below: u64| {
        n += 1;
        (f64::from(graph::philox::uniform(seed, n)) * below as f64) as u64
    };
    let n_units = 3 + next(6) as usize;
    let mut problem = Problem {
        units: Vec::new(),
        values: Vec::new(),
        backward: Vec::new(),
        step_us: 100.0,
        byte_us: 0.1,
        in_memory: BTreeSet::new(),
        copies_in_memory: BTreeSet::new(),
    };
    for at in 0..n_units {
        let n_values = problem.values.len();
        let reads = (0..n_values).filter(|_| next(3) == 0).collect();
        problem.units.push(Unit {
            at,
            reads,
            us: (1 + next(20)) as f64,
            bytes: 0,
            operations: 0,
            is_ours: next(8) > 0,
        });
        for _ in 0..1 + next(2) {
            let crosses = next(2) == 0;
            let bytes = (next(10) * 64) as i64;
            problem.values.push(Value {
                id: ContainerId(problem.values.len() as u32),
                unit: at,
                bytes,
                kept_bytes: bytes,
                passing_bytes: bytes,
                crosses,
                store_us: if crosses { 0.0 } else { next(4) as f64 },
                pinned: None,
            });
        }
    }
    for (v, value) in problem.values.iter().enumerate().rev() {
        if value.crosses {
            let own_bytes = (next(10) * 16) as i64;
            problem.backward.push(BackwardNode {
                reads: vec![v],
                own_bytes,
                carried_bytes: own_bytes / 2,
            });
        }
    }
    problem
}

/// Every choice of a small problem.
fn choices(problem: &Problem) -> Vec<Choice> {
    let ours: Vec<usize> = (0..problem.units.len())
        .filter(|n| problem.units[*n].is_ours)
        .collect();
    let of_bits = |bits: u32| Choice {
        copied: (0..ours.len())
            .filter(|k| bits >> k & 1 == 1)
            .map(|k| ours[k])
            .collect(),
    };
    (0..1 << ours.len()).map(of_bits).collect()
}

#[test]
fn no_other_choice_of_a_small_problem_takes_less_time() {
    for seed in 0..60 {
        let problem = random_problem(seed);
        let all: Vec<_> = choices(&problem).iter().map(|c| problem.cost(c)).collect();
        let most = problem.cost(&Choice::default()).kept_bytes;
        for limit in [most, most * 7 / 10, most / 2, most / 4] {
            let fits = all.iter().filter(|c| c.kept_bytes <= limit).map(|c| c.us);
            let least = fits.reduce(f64::min);
            match problem.solve(limit) {
                Ok(solution) => {
                    let least = least.expect("a choice fits");
                    assert!(solution.cost.kept_bytes <= limit);
                    assert!(
                        solution.cost.us <= least * 1.001 + 1e-6,
                        "{seed} {limit}: {} {least}",
                        solution.cost.us
                    );
                    assert!(solution.bound_us <= least + 1e-6, "{seed} {limit}");
                }
                Err(infeasible) => {
                    assert_eq!(least, None, "{seed} {limit}");
                    assert!(infeasible.least_bytes > limit);
                }
            }
        }
    }
}

#[test]
fn a_limit_of_memory_is_kept_nearly_as_cheaply_as_trying_every_choice_does() {
    let (mut possible, mut kept, mut best) = (0, 0, 0);
    for seed in 0..60 {
        let problem = random_problem(seed);
        let all: Vec<_> = choices(&problem)
            .iter()
            .map(|c| (problem.peak_bytes(c), problem.cost(c).us))
            .collect();
        let most = problem.peak_bytes(&Choice::default());
        for limit in [most, most * 9 / 10, most * 7 / 10, most / 2] {
            let planned = problem.within(limit);
            assert_eq!(planned.peak_bytes, problem.peak_bytes(&planned.choice));
            let fits = all.iter().filter(|(bytes, _)| *bytes <= limit).map(|c| c.1);
            let Some(least) = fits.reduce(f64::min) else {
                assert!(planned.peak_bytes > limit);
                continue;
            };
            possible += 1;
            if planned.peak_bytes <= limit {
                assert!(planned.cost.us >= least - 1e-6);
                kept += 1;
                best += usize::from(planned.cost.us <= least + 1e-6);
            }
        }
    }
    println!("{possible} limits that a choice keeps: {kept} kept, {best} in least time");
    assert!(kept * 100 >= possible * 97 && best * 100 >= possible * 85);
}

/// Most bytes of transient containers in memory at one time. Those of the forward pass that the backward pass reads are
/// there all the time, the others from their first to their last node.
fn peak_of(graph: &Graph) -> i64 {
    let nodes = &graph.single_state().expect("one state").nodes;
    let results: Vec<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    let mut most = [0, 0];
    let mut kept_bytes = 0;
    let ids = (0..graph.containers.len() as u32).map(ContainerId);
    let lives: Vec<(i64, Vec<usize>)> = ids
        .filter(|id| graph.container(*id).lifetime == graph::Lifetime::Transient)
        .filter(|id| !results.contains(id))
        .map(|id| {
            let uses =
                |at: &usize| nodes[*at].reads().contains(&id) || nodes[*at].writes().contains(&id);
            (
                crate::unit::bytes(graph, id),
                (0..nodes.len()).filter(uses).collect(),
            )
        })
        .collect();
    for (at, node) in nodes.iter().enumerate() {
        let mut arena = 0;
        for (size, uses) in &lives {
            let (Some(first), Some(last)) = (uses.first(), uses.last()) else {
                continue;
            };
            let is_kept = nodes[*first].stage != nodes[*last].stage;
            arena += if !is_kept && *first <= at && at <= *last {
                *size
            } else {
                0
            };
            kept_bytes += if is_kept && at == 0 { *size } else { 0 };
        }
        let pass = usize::from(node.stage != Stage::Forward);
        most[pass] = most[pass].max(arena);
    }
    kept_bytes + most[0].max(most[1])
}

/// A chain of exponentials whose results the backward pass reads in turn, last first.
fn chain(n: usize) -> Expanded {
    let mut containers = "%x: f32[64] input\n%d0: f32[64] input\n".to_string();
    let (mut forward, mut backward) = (String::new(), String::new());
    for k in 0..n {
        let before = if k == 0 {
            "x".to_string()
        } else {
            format!("t{}", k - 1)
        };
        containers += &format!("%t{k}: f32[64]\n%d{}: f32[64]\n", k + 1);
        forward += &format!("map [i < 64] {{ tasklet %t{k}[i] = exp($0) from %{before}[i] }}\n");
        let at = n - 1 - k;
        backward += &format!(
            "map [i < 64] !backward {{ tasklet %d{}[i] = $0 * $1 from %t{at}[i], %d{k}[i] !backward }}\n",
            k + 1
        );
    }
    Expanded {
        graph: graph(&containers, &(forward + &backward), &format!("%d{n}")),
        decisions: Vec::new(),
    }
}

#[test]
fn the_estimate_is_the_memory_of_the_step_that_apply_makes() {
    let before = chain(9);
    let problem = Problem::new(&before, &Recipe::default(), &Speed::default());
    assert_eq!(
        problem.peak_bytes(&Choice::default()),
        peak_of(&before.graph)
    );
    let most = peak_of(&before.graph);
    for limit in [most * 9 / 10, most * 8 / 10, most * 65 / 100] {
        let planned = problem.within(limit);
        let (after, _) = problem.apply(before.clone(), &planned.choice);
        assert_eq!(planned.peak_bytes, peak_of(&after.graph), "{limit}");
        assert!(
            planned.peak_bytes <= limit,
            "{limit}: {}",
            planned.peak_bytes
        );
        assert_eq!(results(&before.graph), results(&after.graph));
    }
}

#[test]
fn what_a_plan_keeps_inside_a_kernel_takes_no_memory() {
    let before = chain(3);
    let mut problem = Problem::new(&before, &Recipe::default(), &Speed::default());
    let none = Choice::default();
    let kept = problem.cost(&none).kept_bytes;
    let mut planned = before.graph.clone();
    let t1 = planned.containers.iter().position(|c| c.name == "t1");
    let t1 = ContainerId(t1.expect("a container") as u32);
    planned.container_mut(t1).storage = graph::Storage::Local;
    assert!(problem.learn(&before, &planned, &Copies::new()));
    assert_eq!(problem.cost(&none).kept_bytes, kept - 256);
    assert!(!problem.learn(&before, &planned, &Copies::new()));
    // Another plan has it in memory.
    assert!(problem.learn(&before, &before.graph, &Copies::new()));
    assert_eq!(problem.cost(&none).kept_bytes, kept);
}
