//! Which concatenations go and which stay, each condition alone.

use super::{Obstacle, join};
use crate::decision::{Applied, Decision, Outcome, Refusal};
use graph::{Graph, Layout, Node, NodeKind, Place, Recipe, Rewrite};
use models::{results, text_graph as graph};

/// Joins the parts of `graph`, checks that it means the same, and returns it with what was decided.
fn decided(mut graph: Graph, recipe: &Recipe) -> (Graph, Vec<Decision>) {
    let before = results(&graph);
    let nodes: Vec<Node> = std::mem::take(&mut graph.last_state().nodes);
    let mut decisions = Vec::new();
    let nodes = join(&mut graph, nodes, recipe, &mut decisions);
    graph.last_state().nodes = nodes;
    graph::verify(&graph).unwrap_or_else(|e| panic!("{e:?}\n{graph}"));
    assert_eq!(before, results(&graph), "{graph}");
    (graph, decisions)
}

/// Two computed parts, stacked as `%s`, and `%y`, a function of `%s`.
fn stack(shape: &str, copies: [&str; 2], outputs: &str) -> Graph {
    let containers = format!(
        "%x: f32[4, 16] input
         %z: f32[4, 16] input
         %p: f32[4, 16]
         %q: f32[4, 16]
         %s: f32[{shape}]
         %y: f32[{shape}]"
    );
    let sizes: Vec<&str> = shape.split(", ").collect();
    let nodes = format!(
        "map [i < 4, j < 16] {{ tasklet %p[i, j] = $0 * 2.0 from %x[i, j] }}
         map [i < 4, j < 16] {{ tasklet %q[i, j] = $0 * 3.0 from %z[i, j] }}
         map [] {{
           map [i < 4, j < 16] {{ tasklet {} }}
           map [i < 4, j < 16] {{ tasklet {} }}
         }}
         map [a < {}, b < {}, c < {}] {{ tasklet %y[a, b, c] = $0 + 1.0 from %s[a, b, c] }}",
        copies[0], copies[1], sizes[0], sizes[1], sizes[2]
    );
    graph(&containers, &nodes, outputs)
}

const ROWS: [&str; 2] = [
    "%s[0, i, j] = $0 from %p[i, j]",
    "%s[1, i, j] = $0 from %q[i, j]",
];

fn refusal(graph: Graph) -> Obstacle {
    let (_, decisions) = decided(graph, &Recipe::default());
    match decisions.as_slice() {
        [
            Decision {
                outcome: Outcome::Refused(Refusal::PartsCopied(obstacle)),
                ..
            },
        ] => *obstacle,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_stack_becomes_two_ranges_of_one_container() {
    let (graph, decisions) = decided(stack("2, 4, 16", ROWS, "%y"), &Recipe::default());
    let applied =
        |d: &Decision| d.outcome == Outcome::Applied(Applied::PartsInPlace { n_parts: 2 });
    assert!(decisions.iter().all(applied) && decisions.len() == 1);
    assert_eq!(decisions[0].bytes, 2 * 2 * 4 * 16 * 4);
    let nodes = &graph.single_state().expect("one state").nodes;
    let copies = nodes.iter().filter(|n| match &n.kind {
        NodeKind::Map(map) => map.params.is_empty(),
        _ => false,
    });
    assert_eq!(copies.count(), 0);
    // The same where all three have their last dimension slowest.
    let mut turned = stack("2, 4, 16", ROWS, "%y");
    for (name, order) in [("p", vec![1, 0]), ("q", vec![1, 0]), ("s", vec![0, 2, 1])] {
        let id = turned.find(name).expect("a container");
        turned.container_mut(id).layout = Layout::from_order(order).expect("an order");
    }
    let (_, decisions) = decided(turned, &Recipe::default());
    assert!(decisions.iter().all(applied) && decisions.len() == 1);
}

#[test]
fn parts_that_alternate_in_memory_are_copied() {
    let alternating = [
        "%s[i, 0, j] = $0 from %p[i, j]",
        "%s[i, 1, j] = $0 from %q[i, j]",
    ];
    assert_eq!(
        refusal(stack("4, 2, 16", alternating, "%y")),
        Obstacle::Order
    );
    let mut turned = stack("2, 4, 16", ROWS, "%y");
    let part = turned.find("p").expect("a part");
    turned.container_mut(part).layout = Layout::from_order(vec![1, 0]).expect("an order");
    assert_eq!(refusal(turned), Obstacle::Order);
    let transposed = [
        "%s[0, j, i] = $0 from %p[i, j]",
        "%s[1, j, i] = $0 from %q[i, j]",
    ];
    assert_eq!(
        refusal(stack("2, 16, 4", transposed, "%y")),
        Obstacle::Order
    );
}

#[test]
fn what_the_caller_sees_is_copied() {
    assert_eq!(refusal(stack("2, 4, 16", ROWS, "%y, %s")), Obstacle::Placed);
    assert_eq!(refusal(stack("2, 4, 16", ROWS, "%y, %q")), Obstacle::Placed);
    let input = [ROWS[0], "%s[1, i, j] = $0 from %x[i, j]"];
    assert_eq!(
        refusal(stack("2, 4, 16", input, "%y, %q")),
        Obstacle::Placed
    );
}

#[test]
fn a_recipe_may_forbid_it() {
    let graph = stack("2, 4, 16", ROWS, "%y");
    let whole = &graph.single_state().expect("one state").nodes[2];
    let place = Place::new(Rewrite::Join, whole, "s");
    let mut recipe = Recipe::default();
    recipe.tell(place, false);
    let (_, decisions) = decided(graph, &recipe);
    let forbidden = Outcome::Refused(Refusal::PartsCopied(Obstacle::ByRecipe));
    assert_eq!(decisions[0].outcome, forbidden);
}

/// A graph of parts of 3 by `width` elements, one stack of them for each of `wholes`.
fn stacks(width: usize, wholes: &[&str]) -> Graph {
    let mut containers = format!(
        "%x: f32[4, 16] input
         %z: f32[4, 16] input
         %p: f32[3, {width}]
         %q: f32[3, {width}]"
    );
    let map = format!("map [i < 3, j < {width}]");
    let mut nodes = format!(
        "{map} {{ tasklet %p[i, j] = $0 * 2.0 from %x[i, j] }}
         {map} {{ tasklet %q[i, j] = $0 * 3.0 from %z[i, j] }}"
    );
    let mut outputs = Vec::new();
    for s in wholes {
        containers += &format!("\n%{s}: f32[2, 3, {width}]\n%of_{s}: f32[2, 3, {width}]");
        nodes += &format!(
            "\nmap [] {{
               {map} {{ tasklet %{s}[0, i, j] = $0 from %p[i, j] }}
               {map} {{ tasklet %{s}[1, i, j] = $0 from %q[i, j] }}
             }}
             map [a < 2, i < 3, j < {width}] {{
               tasklet %of_{s}[a, i, j] = $0 + 1.0 from %{s}[a, i, j]
             }}"
        );
        outputs.push(format!("%of_{s}"));
    }
    graph(&containers, &nodes, &outputs.join(", "))
}

#[test]
fn parts_that_begin_inside_a_cache_line_are_copied() {
    assert_eq!(refusal(stacks(4, &["s"])), Obstacle::Order);
    let (_, decisions) = decided(stacks(16, &["s"]), &Recipe::default());
    assert!(decisions.len() == 1 && decisions[0].is_applied());
}

#[test]
fn parts_are_in_place_in_one_of_two_wholes() {
    let (_, decisions) = decided(stacks(16, &["s", "t"]), &Recipe::default());
    let applied: Vec<bool> = decisions.iter().map(Decision::is_applied).collect();
    assert_eq!(applied, [true, false]);
    let placed = Outcome::Refused(Refusal::PartsCopied(Obstacle::Placed));
    assert_eq!(decisions[1].outcome, placed);
}
