//! Which reshapes go and which stay, each condition alone.

use super::{common_refinement, digits, drop_unit_params, merge_views, split_composite_dims};
use graph::{Node, NodeKind, SymExpr, Symbol};
use models::text_graph as graph;
use std::collections::BTreeMap;

#[test]
fn refinement_is_the_coarsest_common_shape() {
    assert_eq!(
        common_refinement(&[8, 64], &[8, 4, 16]),
        Some(vec![8, 4, 16])
    );
    assert_eq!(common_refinement(&[2, 3, 1], &[6]), Some(vec![2, 3]));
    assert_eq!(common_refinement(&[4, 6], &[6, 4]), None);
    // Sizes whose product overflows.
    assert_eq!(common_refinement(&[1 << 40, 1 << 40], &[1 << 20]), None);
    assert_eq!(common_refinement(&[0, 4], &[4, 0]), None);
}

#[test]
fn digits_need_ranges_that_fit() {
    let ranges = BTreeMap::from([(Symbol::new("a"), 4), (Symbol::new("b"), 16)]);
    let e = SymExpr::symbol("a") * 16 + SymExpr::symbol("b");
    let d = digits(&e, &[4, 16], &ranges).expect("fits");
    assert_eq!(
        (d[0].to_string(), d[1].to_string()),
        ("a".into(), "b".into())
    );
    assert_eq!(digits(&(e + 1), &[4, 16], &ranges), None);
}

/// Merges and splits dimensions of a graph. Returns the number of reshapes left and the graph's text.
fn merged(containers: &str, nodes: &str, outputs: &str) -> (usize, String) {
    let mut g = graph(containers, nodes, outputs);
    let mut nodes: Vec<Node> = std::mem::take(&mut g.last_state().nodes);
    merge_views(&mut g, &mut nodes);
    split_composite_dims(&mut g, &mut nodes);
    drop_unit_params(&mut nodes);
    let is_reshape = |n: &&Node| matches!(n.kind, NodeKind::Library(_));
    let reshapes = nodes.iter().filter(is_reshape).count();
    g.last_state().nodes = nodes;
    graph::verify(&g).unwrap_or_else(|e| panic!("{e:?}\n{g}"));
    (reshapes, g.to_string())
}

/// Reshapes left of `%v = reshape(%t)`, where `producer` makes `%t: [8, 6]` from `%x`, and `reader` reads `%v`, of
/// shape `shape`.
fn left(shape: &str, producer: &str, reader: &str) -> usize {
    let containers = format!(
        "%x: f32[8, 6] input
         %ids: i64[8] input
         %t: f32[8, 6]
         %v: f32[{shape}]
         %y: f32[8, 6]"
    );
    let nodes = format!(
        "map [i < 8, j < 6] {{ tasklet {producer} }}
         %v = reshape(%t) {{shape=sizes[{shape}]}}
         {reader}"
    );
    merged(&containers, &nodes, "%y").0
}

const PLAIN: &str = "%t[i, j] = exp($0) from %x[i, j]";
const FLAT: &str = "map [a < 8, b < 6] { tasklet %y[a, b] = $0 from %v[6*a + b] }";
const SPLIT: &str = "map [a < 8, b < 2, c < 3] {
      tasklet %y[a, 3*b + c] = $0 from %v[a, b, c]
    }";

#[test]
fn a_reshape_goes_where_both_sides_have_a_common_refinement() {
    assert_eq!(left("48", PLAIN, FLAT), 0);
    assert_eq!(left("8, 2, 3", PLAIN, SPLIT), 0);
    let skewed = "map [a < 8, b < 6] { tasklet %y[a, b] = $0 from %v[b, a] }";
    assert_eq!(left("6, 8", PLAIN, skewed), 1);
}

#[test]
fn a_parameter_is_split_only_if_it_covers_the_dimension() {
    // The map covers half of the dimension that would be split.
    let half = "map [a < 8, b < 6] { tasklet %y[a, b] = $0 from %v[a] }";
    assert_eq!(left("48", PLAIN, half), 1);
    let whole = "map [a < 8, b < 6] { tasklet %y[a, b] = $0 from %v[a, b] }";
    assert_eq!(left("8, 6", PLAIN, whole), 0);
}

#[test]
fn indices_must_fall_apart_into_digits() {
    let turned = "map [a < 8, b < 6] { tasklet %y[a, b] = $0 from %v[-6*a - b + 47] }";
    assert_eq!(left("48", PLAIN, turned), 1);
    let overlapping = "map [a < 8, b < 6] { tasklet %y[a, b] = $0 from %v[5*a + b] }";
    assert_eq!(left("48", PLAIN, overlapping), 1);
    let shifted = "map [a < 8, b < 6] { tasklet %y[a, b] = $0 from %v[6*a + 3] }";
    assert_eq!(left("48", PLAIN, shifted), 0);
}

#[test]
fn data_and_guarded_indices_are_not_split() {
    let looked_up = "map [a < 8, b < 6] { tasklet %y[a, b] = $1 from %ids[a], %v[$0 | nan] }";
    assert_eq!(left("48", PLAIN, looked_up), 1);
    let beside = "map [a < 8, b < 2, c < 3] {
           tasklet %y[a, 3*b + c] = $1 from %ids[a], %v[$0, b, c | nan]
         }";
    // The dimension of the lookup stays whole; a guard may not meet one that is split.
    assert_eq!(left("8, 2, 3", PLAIN, beside), 0);
    let guarded = "map [a < 8, b < 6] { tasklet %y[a, b] = $0 from %v[6*a + b - 1 | 0.0] }";
    assert_eq!(left("48", PLAIN, guarded), 1);
    let in_producer = "%t[i, j | 0.0] = exp($0) from %x[i, j]";
    assert_eq!(left("8, 2, 3", in_producer, SPLIT), 1);
}

#[test]
fn what_the_caller_owns_is_no_view_of_another() {
    let of = |containers: &str, outputs: &str| {
        let nodes = "map [i < 6] { tasklet %t[i] = exp($0) from %x[i] }
             %v = reshape(%t) {shape=sizes[2, 3]}";
        let input = "%w = reshape(%x) {shape=sizes[2, 3]}";
        merged(containers, &format!("{nodes}\n{input}"), outputs).0
    };
    let containers = "%x: f32[6] input
         %t: f32[6]
         %v: f32[2, 3]
         %w: f32[2, 3]";
    // The second reshape, which nobody reads, disappears unless it is a result.
    assert_eq!(of(containers, "%v"), 0);
    assert_eq!(of(containers, "%v, %t"), 1);
    assert_eq!(of(containers, "%v, %w"), 1);
}

#[test]
fn only_row_major_arrays_are_views() {
    let (left, _) = merged(
        "%x: f32[2, 3] <1,0> input
         %v: f32[6]
         %y: f32[6]",
        "%v = reshape(%x) {shape=sizes[6]}
         map [i < 6] { tasklet %y[i] = $0 from %v[i] }",
        "%y",
    );
    assert_eq!(left, 1);
}

#[test]
fn a_dimension_indexed_by_digits_is_split_unless_it_is_guarded() {
    let split = |read: &str| {
        merged(
            "%x: f32[12] input
             %y: f32[3, 4]",
            &format!("map [a < 3, b < 4] {{ tasklet %y[a, b] = $0 from %x[{read}] }}"),
            "%y",
        )
        .1
    };
    assert!(split("4*a + b").contains("%x: f32[3, 4] input"));
    assert!(split("a + 3*b").contains("%x: f32[4, 3] input"));
    assert!(split("4*a + b | 0.0").contains("%x: f32[12] input"));
    assert!(split("3*a + b").contains("%x: f32[12] input"));
}

#[test]
fn parameters_of_one_point_go() {
    let (_, text) = merged(
        "%x: f32[1, 4] input
         %y: f32[1, 4]",
        "map [a < 1, b < 4] { tasklet %y[a, b] = $0 + f32({a}) from %x[a, b] }",
        "%y",
    );
    assert!(text.contains("map [b < 4] {"), "{text}");
    assert!(
        text.contains("%y[0, b] = $0 + f32({0}) from %x[0, b]"),
        "{text}"
    );
}
