//! Each condition of prologues: a case in which it alone refuses, beside one that is accepted.

use super::Obstacle;
use crate::decision::{Applied, Decision, Outcome, Refusal};
use crate::group::group;
use crate::{Decision as AnyDecision, Target};
use graph::{Graph, Recipe, Rewrite, Storage};
use models::text_graph as graph;

const CONTAINERS: &str = "%x: f32[640, 32] input
    %scale: f32[32] input
    %w: f32[32, 48] input
    %g: f32[640, 48] input
    %t: f32[640, 32]
    %y: f32[640, 48]
    %dw: f32[32, 48]
    %s: f32[640]
    %v: f32[638, 48]";
const MAKE: &str =
    "map [i < 640, j < 32] { tasklet %t[i, j] = exp($0 * $1) from %x[i, j], %scale[j] }";
const MULTIPLY: &str = "map [n < 640, k < 48, c < 32] {
      tasklet %y[n, k] (sum) = $0 * $1 from %t[n, c], %w[c, k]
    }";
/// Reads each element at several points, so that blocks of the product share elements.
const WINDOW: &str = "map [n < 638, k < 48, c < 32, r < 3] {
      tasklet %v[n, k] (sum) = $0 * $1 from %t[n + r, c], %w[c, k]
    }";
const GRADIENT: &str = "map [n < 640, k < 48, c < 32] !backward {
      tasklet %dw[c, k] (sum) = $0 * $1 from %t[n, c], %g[n, k] !backward
    }";

struct Grouped {
    graph: Graph,
    n_kernels: usize,
    decision: Option<Decision>,
}

fn grouped(containers: &str, maps: &[&str], outputs: &str, recipe: &Recipe) -> Grouped {
    let mut g = graph(containers, &maps.join("\n"), outputs);
    let nodes = std::mem::take(&mut g.last_state().nodes);
    let mut decisions: Vec<AnyDecision> = Vec::new();
    let kernels = group(&mut g, nodes, Target::Cpu, recipe, &mut decisions).expect("no circle");
    let n_kernels = kernels.len();
    g.last_state().nodes = kernels;
    graph::verify(&g).unwrap_or_else(|e| panic!("{e:?}\n{g}"));
    let decision = decisions
        .into_iter()
        .find(|d| d.rewrite() == Rewrite::Prologue);
    Grouped {
        graph: g,
        n_kernels,
        decision,
    }
}

/// Why the first map's result is stored, if it is.
fn obstacle(containers: &str, maps: &[&str], outputs: &str) -> Option<Obstacle> {
    let found = grouped(containers, maps, outputs, &Recipe::default());
    match found.decision?.outcome {
        Outcome::Refused(Refusal::Unpacked(obstacle)) => Some(obstacle),
        outcome => {
            assert!(matches!(outcome, Outcome::Applied(Applied::Packed { .. })));
            None
        }
    }
}

#[test]
fn each_product_computes_its_own_operand() {
    let maps = [MAKE, MULTIPLY, GRADIENT];
    let found = grouped(CONTAINERS, &maps, "%y, %dw", &Recipe::default());
    assert_eq!(found.n_kernels, 2, "{}", found.graph);
    let decision = found.decision.expect("a decision");
    let operands = ["t", "t.packed1"].map(|name| found.graph.find(name).expect("an operand"));
    let operands = operands.to_vec();
    assert_eq!(
        decision.outcome,
        Outcome::Applied(Applied::Packed { operands })
    );
    // t is neither written nor read twice, and x is read once less.
    let (t, x, scale) = (640 * 32 * 4, 640 * 32 * 4, 32 * 4);
    assert_eq!(decision.bytes, 3 * t + (x + scale) - 2 * (x + scale));
    let local = found.graph.containers.iter();
    let local = local.filter(|c| c.storage == Storage::Local);
    let names: Vec<&str> = local.map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["t", "t.packed1"]);
}

#[test]
fn a_window_reads_zeros_outside_the_operand() {
    let window = WINDOW.replace("%t[n + r, c]", "%t[n + r - 1, c | 0.0]");
    assert_eq!(obstacle(CONTAINERS, &[MAKE, &window], "%v"), None);
}

#[test]
fn only_products_read_the_operand() {
    let row = "map [i < 640] { tasklet %s[i] = $0 from %t[639 - i, 31] }";
    assert_eq!(obstacle(CONTAINERS, &[MAKE, MULTIPLY], "%y"), None);
    assert_eq!(obstacle(CONTAINERS, &[MAKE, WINDOW], "%v"), None);
    let beside = obstacle(CONTAINERS, &[MAKE, WINDOW, row], "%v, %s");
    assert_eq!(beside, Some(Obstacle::OtherReader));
    // What the step returns is in memory: nothing is decided.
    let returned = grouped(CONTAINERS, &[MAKE, MULTIPLY], "%y, %t", &Recipe::default());
    assert_eq!((returned.decision, returned.n_kernels), (None, 2));
}

/// Kernels and what was decided, if another map reads the operand too.
fn beside(product: &str, other: &str, outputs: &str) -> (usize, Outcome) {
    let found = grouped(
        CONTAINERS,
        &[MAKE, product, other],
        outputs,
        &Recipe::default(),
    );
    let t = found.graph.container(found.graph.find("t").expect("t"));
    assert_eq!(t.storage, Storage::Global);
    (found.n_kernels, found.decision.expect("a decision").outcome)
}

#[test]
fn the_first_product_stores_what_others_read() {
    let row = "map [i < 640] { tasklet %s[i] = $0 from %t[639 - i, 31] }";
    let (n_kernels, outcome) = beside(MULTIPLY, row, "%y, %s");
    assert!(
        matches!(outcome, Outcome::Applied(Applied::PackedFirst { .. })),
        "{outcome:?}"
    );
    assert_eq!(n_kernels, 2);
    let refused = Outcome::Refused(Refusal::Unpacked(Obstacle::OtherReader));
    // An element at several points, or a part of all elements.
    assert_eq!(beside(WINDOW, row, "%v, %s"), (3, refused.clone()));
    let part = WINDOW
        .replace("%t[n + r, c]", "%t[n, c]")
        .replace(", r < 3", "");
    assert_eq!(beside(&part, row, "%v, %s"), (3, refused.clone()));
    // The product is of another pass, whose containers the forward pass cannot read.
    assert_eq!(beside(GRADIENT, row, "%dw, %s"), (3, refused.clone()));
    // The product needs the other's result.
    let first = "map [i < 640, j < 48] { tasklet %q[639 - i, j] = $0 from %t[639 - i, 31] }";
    let needing = MULTIPLY.replace("%t[n, c], %w[c, k]", "%t[n, c], %q2[c, k]");
    let containers = format!("{CONTAINERS}\n%q: f32[640, 48]\n%q2: f32[32, 48]");
    let second = "map [i < 32, j < 48] { tasklet %q2[i, j] = exp($0) from %q[20*i, 47 - j] }";
    let maps = [MAKE, first, second, &needing];
    let found = grouped(&containers, &maps, "%y, %q, %q2", &Recipe::default());
    assert_eq!(found.decision.map(|d| d.outcome), Some(refused));
}

#[test]
fn a_product_reads_the_operand_once_at_sums_of_its_positions() {
    let containers = CONTAINERS.replace("%y: f32[640, 48]", "%y: f32[32, 32]");
    let square = "map [n < 640, k < 32, c < 32] {
          tasklet %y[c, k] (sum) = $0 * $1 from %t[n, c], %t[n, k]
        }";
    assert_eq!(
        obstacle(&containers, &[MAKE, square], "%y"),
        Some(Obstacle::Index)
    );
    let rolled = MULTIPLY.replace("%t[n, c]", "%t[mod(n + 3, 640), c]");
    assert_eq!(
        obstacle(CONTAINERS, &[MAKE, &rolled], "%y"),
        Some(Obstacle::Index)
    );
}

#[test]
fn operands_have_the_type_of_the_sums() {
    for (from, to) in [("%t: f32", "%t: bf16"), ("%w: f32", "%w: bf16")] {
        let containers = CONTAINERS.replace(from, to);
        let found = obstacle(&containers, &[MAKE, MULTIPLY], "%y");
        assert_eq!(found, Some(Obstacle::Type), "{to}");
    }
    let double = CONTAINERS.replace("f32", "f64");
    assert_eq!(obstacle(&double, &[MAKE, MULTIPLY], "%y"), None);
}

#[test]
fn the_smaller_operand_is_stored() {
    let make = "map [i < 32, j < 48] { tasklet %v[i, j] = exp($0) from %w[i, j] }";
    let multiply = MULTIPLY.replace("%t[n, c], %w[c, k]", "%x[n, c], %v[c, k]");
    let multiply = multiply.replace("%v", "%p");
    let make = make.replace("%v", "%p");
    let containers = format!("{CONTAINERS}\n%p: f32[32, 48]");
    let found = obstacle(&containers, &[&make, &multiply], "%y");
    assert_eq!(found, Some(Obstacle::SmallOperand));
}

#[test]
fn an_element_takes_a_bounded_number_of_operations() {
    let twice = MAKE.replace("exp($0 * $1)", "exp(exp(exp($0 * $1)))");
    assert_eq!(obstacle(CONTAINERS, &[&twice, MULTIPLY], "%y"), None);
    let often = MAKE.replace("exp($0 * $1)", "exp(exp(exp(exp($0 * $1))))");
    let found = obstacle(CONTAINERS, &[&often, MULTIPLY], "%y");
    assert_eq!(found, Some(Obstacle::Operations(65)));
}

#[test]
fn an_operand_is_computed_along_memory() {
    let containers = CONTAINERS.replace("%x: f32[640, 32]", "%x: f32[32, 640]");
    let across = MAKE.replace("%x[i, j]", "%x[j, i]");
    let found = obstacle(&containers, &[&across, MULTIPLY], "%y");
    assert_eq!(found, Some(Obstacle::Strided("x".into())));
}

#[test]
fn many_operands_are_not_read_again_for_each_product() {
    let containers = |n: usize| {
        let each = (0..n).map(|k| format!("\n%x{k}: f32[640, 32] input"));
        CONTAINERS.to_string() + &each.collect::<String>()
    };
    let make = |n: usize| {
        let terms: Vec<String> = (0..n).map(|k| format!("${k}")).collect();
        let reads: Vec<String> = (0..n).map(|k| format!("%x{k}[i, j]")).collect();
        let (terms, reads) = (terms.join(" + "), reads.join(", "));
        format!("map [i < 640, j < 32] {{ tasklet %t[i, j] = {terms} from {reads} }}")
    };
    // What t is computed from is read twice instead of once, and t is not moved three times.
    let of = |n: usize| {
        let gradient = GRADIENT
            .replace(" !backward", "")
            .replace("%t[n, c]", "%t[639 - n, c]");
        obstacle(&containers(n), &[&make(n), WINDOW, &gradient], "%v, %dw")
    };
    assert_eq!(of(1), None);
    assert_eq!(of(2), Some(Obstacle::Repeated(640 * 32 * 4)));
    assert_eq!(of(3), Some(Obstacle::Traffic(0)));
}

#[test]
fn no_more_is_kept_for_the_backward_pass() {
    let containers = format!("{CONTAINERS}\n%a: f32[640, 32]\n%b: f32[640, 32]\n%q: f32[640]");
    // Turned round, so that what reads a and b has a kernel of its own.
    let maps = |inputs: &str, expr: &str| {
        let make_both =
            "map [i < 640, j < 32] { tasklet %a[639 - i, 31 - j] = exp($0) from %x[i, j] }
             map [i < 640, j < 32] { tasklet %b[639 - i, 31 - j] = exp($0) * 2.0 from %x[i, j] }";
        let make = format!("map [i < 640, j < 32] {{ tasklet %t[i, j] = {expr} from {inputs} }}");
        [
            make_both.to_string(),
            make,
            WINDOW.to_string(),
            GRADIENT.to_string(),
        ]
    };
    let of = |inputs: &str, expr: &str| {
        let maps = maps(inputs, expr);
        let maps: Vec<&str> = maps.iter().map(String::as_str).collect();
        let found = grouped(&containers, &maps, "%v, %dw", &Recipe::default());
        found.decision.map(|d| d.outcome)
    };
    let applied = |outcome| matches!(outcome, Some(Outcome::Applied(_)));
    assert!(applied(of("%a[i, j]", "$0 * 2.0")));
    let kept = Obstacle::Kept(640 * 32 * 4);
    let refused = of("%a[i, j], %b[i, j]", "$0 * $1");
    assert_eq!(refused, Some(Outcome::Refused(Refusal::Unpacked(kept))));
}

#[test]
fn a_recipe_forbids_what_pays_and_asks_for_what_does_not() {
    let first = grouped(CONTAINERS, &[MAKE, MULTIPLY], "%y", &Recipe::default());
    let mut recipe = Recipe::default();
    recipe.tell(first.decision.expect("a decision").place, false);
    let forbidden = grouped(CONTAINERS, &[MAKE, MULTIPLY], "%y", &recipe);
    assert_eq!(forbidden.n_kernels, 2);
    let outcome = forbidden.decision.expect("a decision").outcome;
    assert_eq!(
        outcome,
        Outcome::Refused(Refusal::Unpacked(Obstacle::ByRecipe))
    );

    let often = MAKE.replace("exp($0 * $1)", "exp(exp(exp(exp($0 * $1))))");
    let refused = grouped(CONTAINERS, &[&often, MULTIPLY], "%y", &Recipe::default());
    let decision = refused.decision.expect("a decision");
    assert!(!decision.is_applied() && decision.may_change());
    recipe.tell(decision.place, true);
    assert_eq!(
        grouped(CONTAINERS, &[&often, MULTIPLY], "%y", &recipe).n_kernels,
        1
    );
}
