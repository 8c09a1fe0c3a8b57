//! Orders that containers of products get, on graphs in text form.

use models::text_graph;

/// The order that `%t` gets in a state of these nodes.
fn order(containers: &str, nodes: &str, outputs: &str) -> Vec<usize> {
    order_of("t", containers, nodes, outputs)
}

/// The order that a container gets in a state of these nodes.
fn order_of(name: &str, containers: &str, nodes: &str, outputs: &str) -> Vec<usize> {
    let mut graph = text_graph(containers, nodes, outputs);
    crate::assign(&mut graph, &graph::Recipe::default());
    graph::verify(&graph).unwrap_or_else(|e| panic!("{e:?}\n{graph}"));
    let found = graph.find(name).expect("a container of that name");
    graph.container(found).layout.order().to_vec()
}

/// Gradients of queries, keys and values `[3, batch, head, position, feature]`, and what a linear layer before them
/// does with them.
const STACKED: &str = "%g: f32[3, 2, 4, 5, 8] input
  %x: f32[2, 5, 6] input
  %w: f32[3, 4, 8, 6] input
  %t: f32[3, 2, 4, 5, 8]
  %dx: f32[2, 5, 6]
  %dw: f32[3, 4, 8, 6]";
const COPY: &str = "map [j < 3, b < 2, h < 4, n < 5, d < 8] {
    tasklet %t[j, b, h, n, d] = $0 * 2.0 from %g[j, b, h, n, d]
  }";
const DX: &str = "map [b < 2, n < 5, c < 6, j < 3, h < 4, d < 8] {
    tasklet %dx[b, n, c] (sum) = $0 * $1 from %t[j, b, h, n, d], %w[j, h, d, c]
  }";
const DW: &str = "map [j < 3, h < 4, d < 8, c < 6, b < 2, n < 5] {
    tasklet %dw[j, h, d, c] (sum) = $0 * $1 from %t[j, b, h, n, d], %x[b, n, c]
  }";

#[test]
fn what_a_loop_writes_and_products_read_gets_their_order() {
    let nodes = format!("{COPY}\n{DX}\n{DW}");
    assert_eq!(order(STACKED, &nodes, "%dx, %dw"), [1, 3, 0, 2, 4]);
}

#[test]
fn what_no_product_reads_and_what_the_caller_owns_keep_theirs() {
    assert_eq!(order(STACKED, COPY, "%t"), [0, 1, 2, 3, 4]);
    let nodes = format!("{COPY}\n{DX}\n{DW}");
    assert_eq!(order(STACKED, &nodes, "%dx, %dw, %t"), [0, 1, 2, 3, 4]);
}

#[test]
fn what_follows_a_product_element_by_element_keeps_its_order() {
    // A bias on top of a projection, before the heads of attention.
    let containers = "%x: f32[2, 5, 6] input
  %w: f32[4, 8, 6] input
  %z: f32[4, 8] input
  %o: f32[4, 8, 6] input
  %p: f32[2, 4, 5, 8]
  %t: f32[2, 4, 5, 8]
  %y: f32[2, 5, 6]";
    let product = "map [b < 2, h < 4, n < 5, d < 8, c < 6] {
    tasklet %p[b, h, n, d] (sum) = $0 * $1 from %x[b, n, c], %w[h, d, c]
  }";
    let bias = "map [b < 2, h < 4, n < 5, d < 8] {
    tasklet %t[b, h, n, d] = $0 + $1 from %p[b, h, n, d], %z[h, d]
  }";
    let next = "map [b < 2, n < 5, c < 6, h < 4, d < 8] {
    tasklet %y[b, n, c] (sum) = $0 * $1 from %t[b, h, n, d], %o[h, d, c]
  }";
    let nodes = format!("{product}\n{bias}\n{next}");
    assert_eq!(order(containers, &nodes, "%y"), [0, 1, 2, 3]);
    let copied = nodes.replace("from %p[b, h, n, d]", "from %p[b, h, 4 - n, d]");
    assert_eq!(order(containers, &copied, "%y"), [0, 2, 1, 3]);
}

#[test]
fn a_stack_of_products_has_its_axis_slowest_and_so_have_its_parts() {
    let containers = "%a: f32[2, 4, 5, 6] input
  %w: f32[3, 4, 8, 6] input
  %g: f32[2, 4, 6, 8] input
  %p: f32[2, 4, 5, 8]
  %q: f32[2, 4, 5, 8]
  %t: f32[2, 2, 4, 5, 8]
  %y: f32[2, 5, 6]";
    let part = |name: &str| {
        format!(
            "map [b < 2, h < 4, n < 5, d < 8, c < 6] {{
               tasklet %{name}[b, h, n, d] (sum) = $0 * $1 from %a[b, h, n, c], %g[b, h, c, d]
             }}"
        )
    };
    let copy = |at: usize, name: &str| {
        format!(
            "map [b < 2, h < 4, n < 5, d < 8] {{
               tasklet %t[{at}, b, h, n, d] = $0 from %{name}[b, h, n, d]
             }}"
        )
    };
    let stack = format!("map [] {{ {} {} }}", copy(0, "p"), copy(1, "q"));
    let reader = "map [b < 2, n < 5, c < 6, j < 2, h < 4, d < 8] {
      tasklet %y[b, n, c] (sum) = $0 * $1 from %t[j, b, h, n, d], %w[j, h, d, c]
    }";
    let nodes = [&part("p"), &part("q"), &stack, reader].map(|s| s.to_string());
    let nodes = nodes.join("\n");
    // Without the rule the positions of all three would come before the axis.
    assert_eq!(order(containers, &nodes, "%y"), [0, 1, 3, 2, 4]);
    assert_eq!(order_of("p", containers, &nodes, "%y"), [0, 2, 1, 3]);
}
