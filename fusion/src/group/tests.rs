//! Each condition of grouping: a case in which it alone refuses, beside one that is accepted.

use super::{Group, Obstacle, group, merge};
use crate::Target;
use crate::decision::{Decision, Demand};
use crate::unit::is_contraction;
use graph::{Graph, Node, NodeKind, Recipe, Storage};
use models::text_graph as graph;

/// The loops two maps have in common when they are one kernel.
fn merged(containers: &str, maps: &str, outputs: &str) -> Result<Vec<i64>, Obstacle> {
    let g = graph(containers, maps, outputs);
    let nodes = &g.single_state().expect("one state").nodes;
    let of = |at: usize| Group::new(&g, at, nodes[at].clone());
    merge(&g, &of(0), &of(1), Target::Cpu, Demand::IfItPays).map(|group| group.outer)
}

/// Kernels, their number of members, and refusals.
fn kernels(containers: &str, maps: &str, outputs: &str) -> (Graph, Vec<usize>, Vec<String>) {
    let mut g = graph(containers, maps, outputs);
    let nodes = std::mem::take(&mut g.last_state().nodes);
    let mut decisions = Vec::new();
    let kernels = group(
        &mut g,
        nodes,
        Target::Cpu,
        &Recipe::default(),
        &mut decisions,
    )
    .expect("no circle");
    let members = |n: &Node| {
        let mut members = 0;
        n.visit_tasklets(&mut |_| members += 1);
        members
    };
    let counts = kernels.iter().map(members).collect();
    g.last_state().nodes = kernels;
    graph::verify(&g).unwrap_or_else(|e| panic!("{e:?}\n{g}"));
    let refused = decisions.iter().filter(|d| !d.is_applied());
    let refused = refused.map(Decision::sentence).collect();
    (g, counts, refused)
}

const MATRICES: &str = "%x: f32[64, 48] input
    %ids: i64[64] input
    %t: f32[64, 48]
    %y: f32[64, 48]";
const TWICE: &str = "map [i < 64, j < 48] { tasklet %t[i, j] = $0 * 2.0 from %x[i, j] }";

fn after_twice(reader: &str) -> Result<Vec<i64>, Obstacle> {
    merged(MATRICES, &format!("{TWICE}\n{reader}"), "%y")
}

#[test]
fn what_is_passed_is_indexed_alike_in_both() {
    let same = "map [a < 64, b < 48] { tasklet %y[a, b] = exp($0) from %t[a, b] }";
    assert_eq!(after_twice(same), Ok(vec![64, 48]));
    // A window along rows: only the other parameter is common, and rows lie across memory.
    let window = "map [a < 64, b < 48] { tasklet %y[a, b] = $0 + $1 from %t[a, b], %t[a, 47 - b] }";
    assert_eq!(after_twice(window), Ok(vec![64]));
    let other = "map [a < 64, b < 48] { tasklet %y[a, b] = exp($0) from %t[63 - a, 47 - b] }";
    assert_eq!(after_twice(other), Err(Obstacle::Indices));
    let looked_up = "map [a < 64, b < 48] { tasklet %y[a, b] = $1 from %ids[a], %t[$0, b] }";
    assert_eq!(after_twice(looked_up), Ok(vec![48]));
}

#[test]
fn a_diagonal_is_no_common_loop() {
    let square = "%x: f32[64, 64] input
         %t: f32[64, 64]
         %y: f32[64]";
    let twice = "map [i < 64, j < 64] { tasklet %t[i, j] = $0 * 2.0 from %x[i, j] }";
    let diagonal = "map [k < 64] { tasklet %y[k] = $0 from %t[k, k] }";
    let refused = merged(square, &format!("{twice}\n{diagonal}"), "%y, %t");
    assert_eq!(refused, Err(Obstacle::Diagonal));
    let row = "map [k < 64] { tasklet %y[k] = $0 from %t[k, 0] }";
    let accepted = merged(square, &format!("{twice}\n{row}"), "%y, %t");
    assert_eq!(accepted, Ok(vec![64]));
    // The other way round: both maps read one container, the first one its diagonal.
    let shared = format!(
        "map [k < 64] {{ tasklet %y[k] = $0 from %x[k, k] }}\n{}",
        twice
    );
    assert_eq!(merged(square, &shared, "%y, %t"), Err(Obstacle::Diagonal));
}

#[test]
fn scatters_stay_alone() {
    let scattered = "map [a < 64, b < 48] {
           tasklet %y[$0, b | 0.0] (sum) = $1 from %ids[a], %t[a, b]
         }";
    assert_eq!(after_twice(scattered), Err(Obstacle::Alone));
    let summed = "map [a < 64, b < 48] { tasklet %y[a, b] (sum) = $0 from %t[a, b] }";
    assert_eq!(after_twice(summed), Ok(vec![64, 48]));
}

#[test]
fn passes_do_not_mix() {
    let backward = "map [a < 64, b < 48] !backward {
           tasklet %y[a, b] = exp($0) from %t[a, b] !backward
         }";
    assert_eq!(after_twice(backward), Err(Obstacle::Stage));
}

const PRODUCT: &str = "%x: f32[64, 32] input
    %w: f32[32, 48] input
    %t: f32[64, 48]
    %y: f32[64, 48]
    %s: f32[64]";
const MULTIPLY: &str = "map [n < 64, k < 48, c < 32] {
      tasklet %t[n, k] (sum) = $0 * $1 from %x[n, c], %w[c, k]
    }";

fn after_product(reader: &str, output: &str) -> Result<Vec<i64>, Obstacle> {
    merged(PRODUCT, &format!("{MULTIPLY}\n{reader}"), output)
}

#[test]
fn an_epilogue_covers_its_product_point_by_point() {
    let same = "map [a < 64, b < 48] { tasklet %y[a, b] = exp($0) from %t[a, b] }";
    assert_eq!(after_product(same, "%y"), Ok(vec![64, 48]));
    let turned = "map [b < 48, a < 64] { tasklet %y[a, b] = exp($0) from %t[a, b] }";
    assert_eq!(after_product(turned, "%y"), Ok(vec![64, 48]));
    let part = "map [a < 64] { tasklet %s[a] = $0 from %t[a, 0] }";
    assert_eq!(after_product(part, "%s"), Err(Obstacle::Epilogue));
    let summed = "map [a < 64, b < 48] { tasklet %s[a] (sum) = $0 from %t[a, b] }";
    assert_eq!(after_product(summed, "%s"), Err(Obstacle::Epilogue));
}

const SUMS: &str = "%m: f32[48]
    %v: f32[48]";
const MEAN: &str = "map [a < 640, b < 48] { tasklet %m[b] (sum) = $0 * 0.0015625 from %t[a, b] }";

/// Members of the kernels of a product and what follows it.
fn summed(maps: &[&str], outputs: &str) -> Vec<usize> {
    // Sums of little data would rather share a kernel with each other.
    let maps = format!("{MULTIPLY}\n{}", maps.join("\n")).replace("n < 64", "n < 640");
    let containers = format!("{PRODUCT}\n{SUMS}").replace("[64", "[640");
    kernels(&containers, &maps, outputs).1
}

#[test]
fn a_product_sums_its_contiguous_columns() {
    let columns = "map [a < 640, b < 48] { tasklet %m[b] (sum) = $0 from %t[a, b] }";
    assert_eq!(summed(&[columns], "%t, %m"), [2]);
    let two =
        "map [a < 640, b < 48] { tasklet %m[b] (sum) = $0, %v[b] (sum) = $0 * $0 from %t[a, b] }";
    assert_eq!(summed(&[two], "%t, %m, %v"), [2]);
    let rows = "map [a < 640, b < 48] { tasklet %s[a] (sum) = $0 from %t[a, b] }";
    assert_eq!(summed(&[rows], "%t, %s"), [1, 1]);
    let largest = "map [a < 640, b < 48] { tasklet %m[b] (max) = $0 from %t[a, b] }";
    assert_eq!(summed(&[largest], "%t, %m"), [1, 1]);
    let more = "map [a < 640, b < 48, i < 2] { tasklet %m[b] (sum) = $0 from %t[a, b] }";
    assert_eq!(summed(&[more], "%t, %m"), [1, 1]);
}

#[test]
fn a_product_stays_first_when_an_earlier_sum_joins_it() {
    // The two sums share what they read, so they are one kernel before the product takes them.
    let (containers, earlier) = (
        format!("{PRODUCT}\n{SUMS}\n%z: f32[64, 48] input").replace("[64", "[640"),
        "map [a < 640, b < 48] { tasklet %v[b] (sum) = $0 from %z[a, b] }",
    );
    let later = "map [a < 640, b < 48] { tasklet %m[b] (sum) = $0 * $1 from %t[a, b], %z[a, b] }";
    let product = MULTIPLY.replace("n < 64", "n < 640");
    let maps = format!("{earlier}\n{product}\n{later}");
    let (g, counts, _) = kernels(&containers, &maps, "%t, %v, %m");
    assert_eq!(counts, [3]);
    let kernel = &g.single_state().expect("one state").nodes[0];
    let NodeKind::Map(map) = &kernel.kind else {
        panic!("a kernel is a map")
    };
    assert!(is_contraction(&map.body[0]), "{g}");
}

#[test]
fn nothing_in_a_kernel_reads_its_sums_but_a_moment_about_its_mean() {
    let moment = "map [a < 640, b < 48] { tasklet %v[b] (sum) = ($0 - $1) * ($0 - $1) * 0.0015625 from %t[a, b], %m[b] }";
    assert_eq!(summed(&[MEAN, moment], "%t, %m, %v"), [3]);
    for other in [
        // Not the mean's factor, another's mean, not the sum's own column, no square.
        moment.replace("0.0015625", "0.003125"),
        moment.replace("from %t[a, b], %m[b]", "from %x[a, 0], %m[b]"),
        moment.replace("%m[b]", "%m[47 - b]"),
        moment.replace("($0 - $1) * ($0 - $1)", "($0 - $1)"),
    ] {
        assert_eq!(summed(&[MEAN, &other], "%t, %m, %v")[0], 2, "{other}");
    }
    let sum = MEAN.replace("0.0015625", "0.5");
    let about = moment.replace("0.0015625", "0.5");
    assert_eq!(summed(&[&sum, &about], "%t, %m, %v"), [2, 1]);
    let point = "map [a < 640, b < 48] { tasklet %y[a, b] = $0 - $1 from %t[a, b], %m[b] }";
    assert_eq!(summed(&[MEAN, point], "%y, %m"), [2, 1]);
}

#[test]
fn a_gpu_sums_no_columns_in_a_product() {
    let mut g = graph(
        &format!("{PRODUCT}\n{SUMS}"),
        &format!("{MULTIPLY}\n{}", MEAN.replace("640", "64")),
        "%t, %m",
    );
    let nodes = std::mem::take(&mut g.last_state().nodes);
    let recipe = Recipe::default();
    let kernels = group(&mut g, nodes, Target::Cuda, &recipe, &mut Vec::new()).expect("no circle");
    assert_eq!(kernels.len(), 2);
}

/// A gradient of points' weights and its conversion.
#[test]
fn a_dimension_of_one_point_needs_no_parameter() {
    let containers = PRODUCT.replace("%t: f32[64, 48]", "%t: f32[64, 48, 1, 1]");
    assert_ne!(containers, PRODUCT);
    let multiply = MULTIPLY.replace("%t[n, k]", "%t[n, k, 0, 0]");
    let after = |reader: &str| merged(&containers, &format!("{multiply}\n{reader}"), "%y");
    for reader in [
        "map [a < 64, b < 48] { tasklet %y[a, b] = exp($0) from %t[a, b, 0, 0] }",
        "map [a < 64, b < 48, c < 1, d < 1] { tasklet %y[a, b] = exp($0) from %t[a, b, c, d] }",
    ] {
        assert_eq!(after(reader), Ok(vec![64, 48, 1, 1]), "{reader}");
    }
}

#[test]
fn nothing_runs_before_a_product() {
    let containers = "%x: f32[64, 32] input
         %w: f32[32, 48] input
         %t: f32[64, 32]
         %y: f32[64, 48]";
    let maps = "map [i < 64, j < 32] { tasklet %t[i, j] = exp($0) from %x[i, j] }
         map [n < 64, k < 48, c < 32] {
           tasklet %y[n, k] (sum) = $0 * $1 from %t[n, c], %w[c, k]
         }";
    assert_eq!(merged(containers, maps, "%y"), Err(Obstacle::Product));
}

#[test]
fn kernels_touch_a_bounded_number_of_containers() {
    let sums = |n: usize| {
        let inputs: Vec<String> = (0..2 * n)
            .map(|k| format!("%x{k}: f32[64] input"))
            .collect();
        let sum = |from: usize| -> (String, String) {
            let terms: Vec<_> = (0..n).map(|k| format!("${k}")).collect();
            let reads: Vec<_> = (from..from + n).map(|k| format!("%x{k}[i]")).collect();
            (terms.join(" + "), reads.join(", "))
        };
        let ((a, from_a), (b, from_b)) = (sum(0), sum(n));
        merged(
            &format!("{}\n%t: f32[64]\n%y: f32[64]", inputs.join("\n")),
            &format!(
                "map [i < 64] {{ tasklet %t[i] = {a} from {from_a} }}
                 map [i < 64] {{ tasklet %y[i] = {b} + ${n} from {from_b}, %t[i] }}"
            ),
            "%y",
        )
    };
    assert_eq!(sums(11), Ok(vec![64]));
    assert_eq!(sums(12), Err(Obstacle::Containers(26)));
}

#[test]
fn the_second_feeds_nothing_back() {
    let consumer_first = {
        let g = graph(
            MATRICES,
            &format!(
                "{TWICE}\nmap [a < 64, b < 48] {{ tasklet %y[a, b] = exp($0) from %t[a, b] }}"
            ),
            "%y",
        );
        let nodes = &g.single_state().expect("one state").nodes;
        let of = |at: usize| Group::new(&g, at, nodes[at].clone());
        merge(&g, &of(1), &of(0), Target::Cpu, Demand::IfItPays).map(|group| group.outer)
    };
    assert_eq!(consumer_first, Err(Obstacle::Circular));
}

/// `t[i] = Σ_j x[i, j]; y[i, j] = x[i, j] − t[i]` for a matrix of that shape.
fn centred(rows: i64, columns: i64) -> Result<Vec<i64>, Obstacle> {
    merged(
        &format!(
            "%x: f32[{rows}, {columns}] input
             %t: f32[{rows}]
             %y: f32[{rows}, {columns}]"
        ),
        &format!(
            "map [i < {rows}, j < {columns}] {{ tasklet %t[i] (sum) = $0 from %x[i, j] }}
             map [i < {rows}, j < {columns}] {{
               tasklet %y[i, j] = $0 - $1 from %x[i, j], %t[i]
             }}"
        ),
        "%y",
    )
}

#[test]
fn common_loops_share_their_points_among_threads() {
    assert_eq!(centred(32, 100), Ok(vec![32]));
    assert_eq!(centred(31, 100), Err(Obstacle::FewPoints(31)));
}

#[test]
fn a_point_touches_no_more_than_a_cache_holds() {
    assert_eq!(centred(64, 65_000), Ok(vec![64]));
    // x and y, and one element of t.
    let bytes = 2 * 4 * 66_000 + 4;
    assert_eq!(centred(64, 66_000), Err(Obstacle::InnerBytes(bytes)));
}

#[test]
fn what_is_contiguous_is_not_the_common_loop() {
    let down = |rows: i64| {
        merged(
            &format!(
                "%x: f32[{rows}, 64] input
                 %t: f32[64]
                 %y: f32[{rows}, 64]"
            ),
            &format!(
                "map [j < 64, i < {rows}] {{ tasklet %t[j] (sum) = $0 from %x[i, j] }}
                 map [j < 64, i < {rows}] {{ tasklet %y[i, j] = $0 - $1 from %x[i, j], %t[j] }}"
            ),
            "%y",
        )
    };
    // Small containers may be read in any order.
    assert_eq!(down(128), Ok(vec![64]));
    assert_eq!(down(129), Err(Obstacle::Strided("x".into())));
}

#[test]
fn maps_that_only_read_the_same_may_share_all_loops_of_one() {
    let containers = "%x: f32[64, 48] input
         %t: f32[64]
         %y: f32[64, 48]
         %s: f32[48]";
    let rows = "map [i < 64, j < 48] { tasklet %t[i] (sum) = $0 from %x[i, j] }";
    let same = "map [i < 64, j < 48] { tasklet %y[i, j] = exp($0) from %x[i, j] }";
    let both = merged(containers, &format!("{rows}\n{same}"), "%t, %y");
    assert_eq!(both, Ok(vec![64, 48]));
    let first = "map [k < 64] { tasklet %t[k] = $0 from %x[k, 0] }";
    let partly = merged(containers, &format!("{first}\n{same}"), "%t, %y");
    assert_eq!(partly, Ok(vec![64]));
    let crossed = "map [k < 64, l < 48] { tasklet %y[k, l] = exp($0) from %x[k, 47 - l] }";
    let neither = merged(containers, &format!("{rows}\n{crossed}"), "%t, %y");
    assert_eq!(neither, Err(Obstacle::Indices));
}

#[test]
fn what_must_run_between_two_keeps_them_apart() {
    let containers = "%x: f32[64, 48] input
         %w: f32[48, 48] input
         %t: f32[64, 48]
         %p: f32[64, 48]
         %y: f32[64, 48]";
    // y needs t, and a product of t.
    let maps = format!(
        "{TWICE}
         map [n < 64, k < 48, c < 48] {{
           tasklet %p[n, k] (sum) = $0 * $1 from %t[n, c], %w[c, k]
         }}
         map [i < 64, j < 48] {{ tasklet %y[i, j] = $0 + $1 from %t[i, j], %p[i, j] }}"
    );
    let (_, members, refused) = kernels(containers, &maps, "%y");
    // The last map is the product's epilogue, not the first one's companion.
    assert_eq!(members, [1, 2]);
    assert!(
        refused
            .iter()
            .any(|r| r.ends_with("must come first in its kernel")),
        "{refused:?}"
    );
    let maps = maps.replace("$0 * $1 from %t[n, c]", "$0 * $1 from %t[63 - n, c]");
    let turned = maps.replace("from %t[i, j], %p[i, j]", "from %t[i, j], %p[63 - i, j]");
    let (_, members, refused) = kernels(containers, &turned, "%y");
    assert_eq!(members, [1, 1, 1]);
    let between = "does not join <unnamed>: another kernel must run between them";
    assert!(refused.iter().any(|r| r == between), "{refused:?}");
}

#[test]
fn what_only_a_kernel_uses_is_local_to_it() {
    let maps =
        format!("{TWICE}\nmap [i < 64, j < 48] {{ tasklet %y[i, j] = exp($0) from %t[i, j] }}");
    let storage = |outputs: &str| {
        let (g, members, _) = kernels(MATRICES, &maps, outputs);
        assert_eq!(members, [2]);
        g.container(g.find("t").expect("t")).storage
    };
    assert_eq!(storage("%y"), Storage::Local);
    assert_eq!(storage("%y, %t"), Storage::Global);
}

/// Kernels and the decisions about them, with a recipe.
fn told(containers: &str, maps: &str, recipe: &Recipe) -> (usize, Vec<Decision>) {
    let mut g = graph(containers, maps, "%y");
    let nodes = std::mem::take(&mut g.last_state().nodes);
    let mut decisions = Vec::new();
    let kernels = group(&mut g, nodes, Target::Cpu, recipe, &mut decisions).expect("no circle");
    (kernels.len(), decisions)
}

#[test]
fn a_recipe_forbids_what_pays_and_asks_for_what_does_not() {
    let containers =
        |rows: i64| format!("%x: f32[{rows}, 48] input\n%t: f32[{rows}]\n%y: f32[{rows}, 48]");
    let maps = |rows: i64| {
        format!(
            "map [i < {rows}, j < 48] {{ tasklet %t[i] (sum) = $0 from %x[i, j] }}
             map [i < {rows}, j < 48] {{ tasklet %y[i, j] = $0 + $1 from %x[i, j], %t[i] }}"
        )
    };
    // Too few rows to share among threads, and enough.
    for (rows, applied) in [(4, false), (64, true)] {
        let kernels = |recipe: &Recipe| told(&containers(rows), &maps(rows), recipe);
        let (_, decisions) = kernels(&Recipe::default());
        assert_eq!(decisions[0].is_applied(), applied);
        assert!(decisions[0].may_change());
        let mut recipe = Recipe::default();
        recipe.tell(decisions[0].place.clone(), !applied);
        let (n, decisions) = kernels(&recipe);
        assert_eq!(decisions[0].is_applied(), !applied);
        assert_eq!(n, if applied { 2 } else { 1 });
    }
}
