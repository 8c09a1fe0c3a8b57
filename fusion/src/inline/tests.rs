//! Each condition of inlining: a case in which it alone refuses, beside one that is accepted.

use super::{Obstacle, inline, inlined_node};
use crate::decision::{Decision, Demand};
use graph::{Node, Place, Recipe, Rewrite};
use models::text_graph as graph;

/// The tasklet of the second map after its reads of `%t` are replaced by the definition of `%t`, the first map.
fn inlined(containers: &str, maps: &str) -> Result<String, Obstacle> {
    let mut g = graph(containers, maps, "%y");
    let nodes = std::mem::take(&mut g.last_state().nodes);
    let t = g.find("t").expect("a container t");
    let node = inlined_node(&g, &nodes[0], t, &nodes[1], Demand::IfItPays)?;
    assert!(!node.reads().contains(&t), "a read is left");
    g.last_state().nodes = vec![node.clone()];
    graph::verify(&g).unwrap_or_else(|e| panic!("{e:?}\n{g}"));
    let text = node.text(&g);
    let line = text.lines().find(|l| l.contains("tasklet"));
    Ok(line.expect("a tasklet").trim().to_string())
}

const VECTORS: &str = "%x: f32[4] input
    %t: f32[4]
    %y: f32[4]";

#[test]
fn a_definition_takes_the_place_of_every_read() {
    let one = inlined(
        VECTORS,
        "map [i < 4] { tasklet %t[i] = exp($0) from %x[i] }
         map [j < 4] { tasklet %y[j] = $0 + 1.0 from %t[j] }",
    );
    assert_eq!(one.unwrap(), "tasklet %y[j] = exp($0) + 1.0 from %x[j]");
    // All of several neighbouring reads are replaced.
    let many = inlined(
        "%x: f32[2, 2, 2] input
         %t: f32[2, 2, 2]
         %y: f32[2, 2, 2]",
        "map [i < 2, j < 2, k < 2] { tasklet %t[i, j, k] = $0 * 2.0 from %x[i, j, k] }
         map [a < 2, b < 2, c < 2] {
           tasklet %y[a, b, c] = $0 + $1 * ($2 + $3 * $4)
             from %t[a, b, c], %t[b, a, c], %t[c, b, a], %t[a, c, b], %t[b, c, a]
         }",
    );
    assert!(many.unwrap().ends_with("%x[b, c, a]"));
}

#[test]
fn what_decides_is_rounded_as_it_would_have_been_stored() {
    let one = |reader: &str| {
        let vectors = VECTORS.replace("f32", "bf16");
        let definition = "map [i < 4] { tasklet %t[i] = $0 + 1.0 from %x[i] }";
        let reader = format!("map [j < 4] {{ tasklet %y[j] = {reader} from %t[j] }}");
        inlined(&vectors, &format!("{definition}\n{reader}")).unwrap()
    };
    assert!(
        one("$0 * 2.0").contains("($0 + 1.0) * 2.0"),
        "{}",
        one("$0 * 2.0")
    );
    assert!(
        one("max($0, 0.0)").contains("max(bf16($0 + 1.0), 0.0)"),
        "{}",
        one("max($0, 0.0)")
    );
    for jumps in [
        "trunc($0)",
        "floordiv($0, 2.0)",
        "mod($0, 2.0)",
        "f32(i64($0))",
    ] {
        let text = one(jumps);
        assert!(text.contains("bf16($0 + 1.0)"), "{text}");
    }
}

#[test]
fn products_read_what_was_rolled_reversed_or_looked_up_from_memory() {
    let containers = "%x: f32[6, 4] input
         %at: i64[6] input
         %w: f32[4, 5] input
         %t: f32[6, 4]
         %y: f32[6, 5]";
    let product = "map [n < 6, k < 5, c < 4] {
             tasklet %y[n, k] (sum) = $0 * $1 from %t[n, c], %w[c, k]
           }";
    let sum = "map [n < 6, k < 5] { tasklet %y[n, k] = $0 + 1.0 from %t[n, 0] }";
    let moved = |from: &str| format!("map [i < 6, j < 4] {{ tasklet %t[i, j] = $0 from {from} }}");
    for from in ["%x[mod(i + 2, 6), j]", "%x[$1, j], %at[i]"] {
        let refused = inlined(containers, &format!("{}\n{product}", moved(from)));
        assert_eq!(refused, Err(Obstacle::ProductIndex), "{from}");
        assert!(inlined(containers, &format!("{}\n{sum}", moved(from))).is_ok());
    }
    for from in ["%x[5 - i, j]", "%x[i, 3 - j]"] {
        let refused = inlined(containers, &format!("{}\n{product}", moved(from)));
        assert_eq!(refused, Err(Obstacle::ProductBackwards), "{from}");
        assert!(inlined(containers, &format!("{}\n{sum}", moved(from))).is_ok());
    }
    let straight = format!("{}\n{product}", moved("%x[i, j]"));
    assert!(inlined(containers, &straight).is_ok());
}

#[test]
fn a_product_takes_one_array_beyond_its_bounds() {
    // In the gradient of a convolution's weights behind a slice, what the slice dropped has no gradient.
    let containers = "%x: f32[2, 3, 8] input
         %dy: f32[2, 4, 8] input
         %t: f32[2, 4, 9]
         %y: f32[4, 3, 4]";
    let padded = "map [n < 2, k < 4, p < 9] { tasklet %t[n, k, p] = $0 from %dy[n, k, p | 0.0] }";
    let product = |x: &str| {
        let map = "map [k < 4, c < 3, r < 4, n < 2, p < 9]";
        let text = format!("tasklet %y[k, c, r] (sum) = $0 * $1 from %t[n, k, p], {x}");
        format!("{padded}\n{map} {{ {text} }}")
    };
    let refused = inlined(containers, &product("%x[n, c, p + r - 2 | 0.0]"));
    assert_eq!(refused, Err(Obstacle::ProductGuard));
    let long = containers.replace("%x: f32[2, 3, 8]", "%x: f32[2, 3, 12]");
    assert!(inlined(&long, &product("%x[n, c, p + r]")).is_ok());
}

#[test]
fn products_read_arithmetic_from_memory_but_movement_directly() {
    let matrices = "%x: f32[4, 3] input
         %w: f32[4, 5] input
         %t: f32[3, 4]
         %y: f32[3, 5]";
    let product = "map [n < 3, k < 5, c < 4] {
             tasklet %y[n, k] (sum) = $0 * $1 from %t[n, c], %w[c, k]
           }";
    let moved = "map [i < 3, j < 4] { tasklet %t[i, j] = $0 from %x[j, i] }";
    let computed = "map [i < 3, j < 4] { tasklet %t[i, j] = exp($0) from %x[j, i] }";
    assert_eq!(
        inlined(matrices, &format!("{moved}\n{product}")).unwrap(),
        "tasklet %y[n, k] (sum) = $1 * $0 from %w[c, k], %x[c, n]"
    );
    let refused = inlined(matrices, &format!("{computed}\n{product}"));
    assert_eq!(refused, Err(Obstacle::Product));
    // Converted where it is stored: a factor of another type is arithmetic in the product.
    let narrowed = matrices.replace("%t: f32", "%t: bf16");
    let refused = inlined(&narrowed, &format!("{moved}\n{product}"));
    assert_eq!(refused, Err(Obstacle::Product));
}

#[test]
fn what_is_dear_is_not_computed_for_each_of_several_points() {
    let spread = |value: &str| {
        inlined(
            "%x: f32[4] input
             %z: f32[4, 8] input
             %t: f32[4]
             %y: f32[4, 8]",
            &format!(
                "map [i < 4] {{ tasklet %t[i] = {value} from %x[i] }}
                 map [i < 4, j < 8] {{ tasklet %y[i, j] = $0 + $1 from %t[i], %z[i, j] }}"
            ),
        )
    };
    assert!(spread("$0 * 2.0").is_ok());
    let refused = spread("exp($0)");
    assert_eq!(refused, Err(Obstacle::Repeated { times: 8, cost: 16 }));
}

#[test]
fn expressions_stay_below_a_cost() {
    let chain = |n: usize| {
        let nested = |of: &str| format!("{}{of}{}", "sin(".repeat(n), ")".repeat(n));
        inlined(
            VECTORS,
            &format!(
                "map [i < 4] {{ tasklet %t[i] = {} from %x[i] }}
                 map [i < 4] {{ tasklet %y[i] = {} from %t[i] }}",
                nested("$0"),
                nested("$0")
            ),
        )
    };
    assert!(chain(10).is_ok());
    assert_eq!(chain(15), Err(Obstacle::Cost(480)));
}

#[test]
fn maps_read_a_bounded_number_of_elements() {
    let sums = |n: usize| {
        let names: Vec<String> = (0..2 * n).map(|k| format!("x{k}")).collect();
        let inputs: Vec<String> = names
            .iter()
            .map(|x| format!("%{x}: f32[4] input"))
            .collect();
        let read = |some: &[String]| -> String {
            let list: Vec<_> = some.iter().map(|x| format!("%{x}[i]")).collect();
            list.join(", ")
        };
        let sum = |n: usize| {
            (0..n)
                .map(|k| format!("${k}"))
                .collect::<Vec<_>>()
                .join(" + ")
        };
        inlined(
            &format!("{}\n%t: f32[4]\n%y: f32[4]", inputs.join("\n")),
            &format!(
                "map [i < 4] {{ tasklet %t[i] = {} from {} }}
                 map [i < 4] {{ tasklet %y[i] = {} from {}, %t[i] }}",
                sum(n),
                read(&names[..n]),
                sum(n + 1),
                read(&names[n..])
            ),
        )
    };
    assert!(sums(7).is_ok());
    assert_eq!(sums(8), Err(Obstacle::Inputs(16)));
}

/// Inlines `%t`, of shape `t`, into a map that reads it one position to the left, or 0 outside it.
fn shifted(x: &str, t: &str, definition: &str, reader: &str) -> Result<String, Obstacle> {
    inlined(
        &format!("%x: f32[{x}] input\n%t: f32[{t}]\n%y: f32[4, 4]"),
        &format!("{definition}\nmap [a < 4, b < 4] {{ tasklet %y[a, b] = $0 from {reader} }}"),
    )
}

#[test]
fn a_guard_moves_to_what_is_moved_only_if_both_end_alike() {
    let turned = "map [i < 4, j < 4] { tasklet %t[i, j] = $0 from %x[j, i] }";
    let read = "%t[a, b - 1 | 0.0]";
    let accepted = shifted("4, 4", "4, 4", turned, read).unwrap();
    assert_eq!(accepted, "tasklet %y[a, b] = $0 from %x[b - 1, a | 0.0]");
    // What is outside a slice may be inside its source.
    let slice = "map [i < 4, j < 4] { tasklet %t[i, j] = $0 from %x[i, j] }";
    assert_eq!(shifted("4, 6", "4, 4", slice, read), Err(Obstacle::Guard));
    let late = "map [i < 4, j < 4] { tasklet %t[i, j] = $0 from %x[i, j + 2] }";
    assert_eq!(shifted("4, 6", "4, 4", late, read), Err(Obstacle::Guard));
    let flipped = "map [i < 4, j < 4] { tasklet %t[i, j] = $0 from %x[i, 3 - j] }";
    assert_eq!(shifted("4, 4", "4, 4", flipped, read), Err(Obstacle::Guard));
    let second = "map [i < 4, j < 4] { tasklet %t[i, j] = $0 from %x[i, 2*j] }";
    assert_eq!(shifted("4, 8", "4, 4", second, read), Err(Obstacle::Guard));
    // The source of a broadcast has no end along the new dimension.
    let spread = "map [i < 4, j < 4] { tasklet %t[i, j] = $0 from %x[i] }";
    assert_eq!(shifted("4", "4, 4", spread, read), Err(Obstacle::Guard));
}

#[test]
fn a_guard_along_a_dimension_of_size_one_is_not_lost() {
    let turned = "map [i < 4] { tasklet %t[i, 0] = $0 from %x[0, i] }";
    assert!(shifted("1, 4", "4, 1", turned, "%t[a + b, 0 | 0.0]").is_ok());
    let refused = shifted("1, 4", "4, 1", turned, "%t[a, b | 0.0]");
    assert_eq!(refused, Err(Obstacle::Guard));
}

#[test]
fn pads_compose_if_they_fill_alike_and_the_inner_contains_its_source() {
    let pad = "map [i < 4, j < 4] { tasklet %t[i, j] = $0 from %x[i, j - 1 | 0.0] }";
    let read = |fill: &str| format!("%t[a, b - 1 | {fill}]");
    let accepted = shifted("4, 2", "4, 4", pad, &read("0.0")).unwrap();
    assert_eq!(accepted, "tasklet %y[a, b] = $0 from %x[a, b - 2 | 0.0]");
    assert_eq!(
        shifted("4, 2", "4, 4", pad, &read("1.0")),
        Err(Obstacle::Guard)
    );
    // Cut on the right: leaving the padded array is not leaving the source.
    assert_eq!(
        shifted("4, 6", "4, 4", pad, &read("0.0")),
        Err(Obstacle::Guard)
    );
}

#[test]
fn what_is_computed_or_reads_nothing_has_no_guard() {
    let read = "%t[a, b - 1 | 0.0]";
    let ones = "map [i < 4, j < 4] { tasklet %t[i, j] = 1.0 }";
    assert_eq!(
        shifted("1", "4, 4", ones, read),
        Err(Obstacle::GuardOfComputed)
    );
    assert!(shifted("1", "4, 4", ones, "%t[a, b]").is_ok());
    let computed = "map [i < 4, j < 4] { tasklet %t[i, j] = exp($0) from %x[i, j] }";
    let refused = shifted("4, 4", "4, 4", computed, read);
    assert_eq!(refused, Err(Obstacle::GuardOfComputed));
    let lookup = "map [i < 4, j < 4] { tasklet %t[i, j] = $1 from %ids[i], %x[$0, j | nan] }";
    let looked_up = inlined(
        "%x: f32[4, 4] input
         %ids: i64[4] input
         %t: f32[4, 4]
         %y: f32[4, 4]",
        &format!("{lookup}\nmap [a < 4, b < 4] {{ tasklet %y[a, b] = $0 from {read} }}"),
    );
    assert_eq!(looked_up, Err(Obstacle::GuardOfComputed));
}

/// `%y[a] = %table[%t[a]]` for a definition of the index `%t`.
fn indexed(definition: &str) -> Result<String, Obstacle> {
    inlined(
        "%table: f32[4] input
         %ids: i64[4] input
         %short: i32[4] input
         %remap: i64[4] input
         %t: i64[4]
         %y: f32[4]",
        &format!(
            "map [i < 4] {{ tasklet %t[i] = {definition} }}
             map [a < 4] {{ tasklet %y[a] = $1 from %t[a], %table[$0] }}"
        ),
    )
}

#[test]
fn an_index_may_be_moved_or_looked_up_but_not_computed() {
    assert_eq!(
        indexed("$0 from %ids[3 - i]").unwrap(),
        "tasklet %y[a] = $0 from %table[$1], %ids[-a + 3]"
    );
    // The value of a lookup, not its index, is the index.
    assert_eq!(
        indexed("$1 from %ids[i], %remap[$0]").unwrap(),
        "tasklet %y[a] = $0 from %table[$2], %ids[a], %remap[$1]"
    );
    assert_eq!(indexed("$0 + 1 from %ids[i]"), Err(Obstacle::ComputedIndex));
    assert_eq!(indexed("$0 from %short[i]"), Err(Obstacle::ComputedIndex));
}

#[test]
fn a_position_that_is_data_fits_a_plain_dimension_only() {
    let picked = |definition: &str| {
        inlined(
            "%x: f32[8] input
             %ids: i64[4] input
             %t: f32[4]
             %y: f32[4]",
            &format!(
                "map [i < 4] {{ tasklet %t[i] = {definition} }}
                 map [a < 4] {{ tasklet %y[a] = $1 from %ids[a], %t[$0] }}"
            ),
        )
    };
    assert!(picked("$0 from %x[i]").is_ok());
    assert_eq!(picked("$0 from %x[2*i]"), Err(Obstacle::DataPosition));
    assert_eq!(picked("f32({i})"), Err(Obstacle::DataPosition));
}

/// Nodes left, and what was decided.
fn decided(containers: &str, maps: &str, outputs: &str) -> (usize, Vec<Decision>) {
    let mut g = graph(containers, maps, outputs);
    let mut nodes: Vec<Node> = std::mem::take(&mut g.last_state().nodes);
    let mut decisions = Vec::new();
    inline(&g, &mut nodes, &Recipe::default(), &mut decisions);
    (nodes.len(), decisions)
}

fn refusals(decisions: &[Decision]) -> Vec<String> {
    let refused = decisions.iter().filter(|d| !d.is_applied());
    refused.map(Decision::sentence).collect()
}

#[test]
fn what_the_step_returns_is_read() {
    let maps = "map [i < 4] { tasklet %t[i] = exp($0) from %x[i] }
         map [i < 4] { tasklet %y[i] = $0 + 1.0 from %t[i] }";
    let (left, decisions) = decided(VECTORS, maps, "%y");
    assert_eq!((left, decisions.len()), (1, 1));
    // Before, x was read, and t was written and read; now x alone is read.
    assert_eq!(
        (decisions[0].is_applied(), decisions[0].bytes),
        (true, 2 * 16 + 1)
    );
    let (left, decisions) = decided(VECTORS, maps, "%y, %t");
    assert_eq!(left, 2);
    assert_eq!(refusals(&decisions), ["t is stored: the step returns it"]);
}

#[test]
fn reading_the_sources_again_must_not_move_more() {
    let containers = "%x0: f32[4] input
         %x1: f32[4] input
         %x2: f32[4] input
         %t: f32[4]
         %y0: f32[4]
         %y1: f32[4]
         %y2: f32[4]";
    let maps = |readers: usize| -> String {
        let reader =
            |k: usize| format!("map [i < 4] {{ tasklet %y{k}[i] = $0 + {k}.5 from %t[i] }}");
        let all: Vec<_> = (0..readers).map(reader).collect();
        format!(
            "map [i < 4] {{ tasklet %t[i] = $0 * $1 * $2 from %x0[i], %x1[i], %x2[i] }}\n{}",
            all.join("\n")
        )
    };
    assert_eq!(decided(containers, &maps(2), "%y0, %y1").0, 2);
    let (left, decisions) = decided(containers, &maps(3), "%y0, %y1, %y2");
    assert_eq!(left, 4);
    let sentence = "t is stored: reading its operands again would move 31 bytes more";
    assert_eq!(refusals(&decisions), [sentence]);
}

/// Whether the first map is inlined into the second.
fn goes(containers: &str, definition: &str) -> bool {
    let maps = format!("{definition}\nmap [a < 4] {{ tasklet %y[a] = $0 + 1.0 from %t[a] }}");
    decided(containers, &maps, "%y").0 == 1
}

#[test]
fn only_what_is_written_once_at_every_position_is_a_definition() {
    let matrix = "%x: f32[4, 4] input
         %ids: i64[4] input
         %t: f32[4]
         %y: f32[4]";
    assert!(goes(
        matrix,
        "map [i < 4] { tasklet %t[i] = $0 from %x[i, i] }"
    ));
    let summed = "map [i < 4, j < 4] { tasklet %t[i] (sum) = $0 from %x[i, j] }";
    assert!(!goes(matrix, summed));
    let guarded = "map [i < 4] { tasklet %t[i | 0.0] = $0 from %x[i, 0] }";
    assert!(!goes(matrix, guarded));
    let scattered = "map [i < 4] { tasklet %t[$1] = $0 from %x[i, 0], %ids[i] }";
    assert!(!goes(matrix, scattered));
    let shifted = "map [i < 2, j < 2] { tasklet %t[2*i + j] = $0 from %x[i, j] }";
    assert!(!goes(matrix, shifted));
    let parts = "map [] {
           map [i < 2] { tasklet %t[i] = $0 from %x[i, 0] }
           map [i < 2] { tasklet %t[i + 2] = $0 from %x[i, 1] }
         }";
    assert!(!goes(matrix, parts));
}

/// Like [`decided`], with a recipe that has one entry about `%t`.
fn told(containers: &str, maps: &str, outputs: &str, apply: bool) -> (usize, Vec<Decision>) {
    let mut g = graph(containers, maps, outputs);
    let mut nodes: Vec<Node> = std::mem::take(&mut g.last_state().nodes);
    let mut recipe = Recipe::default();
    recipe.tell(Place::new(Rewrite::Inline, &nodes[0], "t"), apply);
    let mut decisions = Vec::new();
    inline(&g, &mut nodes, &recipe, &mut decisions);
    (nodes.len(), decisions)
}

#[test]
fn a_recipe_forbids_what_pays_and_asks_for_what_does_not() {
    let maps = "map [i < 4] { tasklet %t[i] = exp($0) from %x[i] }
         map [i < 4] { tasklet %y[i] = $0 + 1.0 from %t[i] }";
    let (left, decisions) = told(VECTORS, maps, "%y", false);
    assert_eq!(left, 2);
    assert_eq!(refusals(&decisions), ["t is stored: the recipe forbids it"]);
    assert!(decisions[0].may_change());
    let matrix = "%x: f32[4] input
         %t: f32[4]
         %y: f32[4, 3]";
    let repeated = "map [i < 4] { tasklet %t[i] = exp($0) from %x[i] }
         map [i < 4, j < 3] { tasklet %y[i, j] = $0 + 1.0 from %t[i] }";
    assert_eq!(decided(matrix, repeated, "%y").0, 2);
    let (left, decisions) = told(matrix, repeated, "%y", true);
    assert_eq!((left, decisions[0].is_applied()), (1, true));
    // Eight points more than the container has, sixteen operations each.
    assert_eq!(decisions[0].operations, 8 * 16);
}

#[test]
fn a_recipe_does_not_make_legal_what_is_not() {
    let maps = "map [i < 4] { tasklet %t[i] = exp($0) from %x[i] }
         map [i < 4] { tasklet %y[i] = $0 + 1.0 from %t[i] }";
    let (left, decisions) = told(VECTORS, maps, "%y, %t", true);
    assert_eq!(left, 2);
    assert_eq!(refusals(&decisions), ["t is stored: the step returns it"]);
    assert!(!decisions[0].may_change());
}

/// The containers that are written after inlining.
fn stored(containers: &str, maps: &str) -> Vec<String> {
    let mut g = graph(containers, maps, "%y");
    let mut nodes = std::mem::take(&mut g.last_state().nodes);
    inline(&g, &mut nodes, &Recipe::default(), &mut Vec::new());
    let written = nodes.iter().flat_map(Node::writes);
    written.map(|id| g.container(id).name.clone()).collect()
}

#[test]
fn a_bias_that_is_looked_up_element_by_element_is_stored() {
    let containers = |batch: usize| {
        format!(
            "%scores: f32[{batch}, 4, 4] input
             %table: f32[7, 4] input
             %ids: i64[4, 4] input
             %t: f32[4, 4]
             %y: f32[{batch}, 4, 4]"
        )
    };
    let maps = |batch: usize, row: &str| {
        format!(
            "map [i < 4, j < 4] {{ tasklet %t[i, j] = $1 from {row} }}
             map [b < {batch}, i < 4, j < 4] {{
               tasklet %y[b, i, j] = $0 + $1 from %scores[b, i, j], %t[i, j]
             }}"
        )
    };
    let scattered = "%ids[i, j], %table[$0, 1]";
    assert_eq!(stored(&containers(3), &maps(3, scattered)), ["t", "y"]);
    // Looked up once, or by rows.
    assert_eq!(stored(&containers(1), &maps(1, scattered)), ["y"]);
    let rows = "%ids[i, 0], %table[$0, j]";
    assert_eq!(stored(&containers(3), &maps(3, rows)), ["y"]);
}
