//! Orders chosen together beside all combinations tried one by one.

use super::{LayoutChoice, Times, choose};
use crate::assign;
use crate::quadratic::USUAL_BRANCHES;
use graph::{ContainerId, Graph, Index, Node, Recipe};

/// A contraction takes 100 ns, and `operand_ns` more for each array whose fastest dimension is not one of `fast`.
struct Made {
    fast: &'static [&'static str],
    operand_ns: f64,
    byte_ns: f64,
}

impl Times for Made {
    fn contraction_ns(&mut self, graph: &Graph, node: &Node) -> Option<f64> {
        let mut ns = None;
        node.visit_tasklets(&mut |t| {
            let Some(product) = t.summed_product() else {
                return;
            };
            let is_slow = |m: &&graph::Memlet| {
                let d = graph.container(m.container).layout.order().last();
                let index = d.and_then(|d| m.subset.get(*d));
                !matches!(index, Some(Index::At(e)) if self.fast.iter().any(|f| e.mentions(&(*f).into())))
            };
            let all = [product.a, product.b, product.out];
            let n_slow = all.iter().copied().filter(is_slow).count();
            ns = Some(100.0 + self.operand_ns * n_slow as f64);
        });
        ns
    }

    fn moved_ns(&self, bytes: i64) -> f64 {
        self.byte_ns * bytes as f64
    }
}

/// Two products with an element-wise function between them, and a sum that reads it too.
const CHAIN: &str = r#"graph "chain" {
  %x: f32[8, 16] input
  %v: f32[16, 32] input
  %w: f32[32, 4] input
  %h: f32[8, 32]
  %g: f32[8, 32]
  %y: f32[8, 4]
  %s: f32[8]
  inputs %x, %v, %w
  state {
    map [m < 8, k < 32, c < 16] {
      tasklet %h[m, k] (sum) = $0 * $1 from %x[m, c], %v[c, k]
    }
    map [m < 8, k < 32] {
      tasklet %g[m, k] = max($0, 0.0) from %h[m, k]
    }
    map [m < 8, k < 32, n < 4] {
      tasklet %y[m, n] (sum) = $0 * $1 from %g[m, k], %w[k, n]
    }
    map [m < 8, k < 32] {
      tasklet %s[m] (sum) = $0 from %g[m, k]
    }
  }
  outputs %y, %s
}
"#;

fn chosen(text: &str, times: &mut dyn Times) -> (Graph, LayoutChoice) {
    let mut graph = graph::parse(text).unwrap();
    let assignment = assign(&mut graph, &Recipe::default());
    let choice = choose(&graph, &assignment, times, USUAL_BRANCHES);
    (graph, choice)
}

fn order(graph: &Graph, choice: &LayoutChoice, name: &str) -> Option<Vec<usize>> {
    let id: ContainerId = graph.find(name)?;
    let found = choice.changed.iter().find(|(own, _)| *own == id);
    found.map(|(_, order)| order.clone())
}

#[test]
fn what_no_order_makes_faster_stays_as_it_is() {
    let mut times = Made {
        fast: &["k", "n"],
        operand_ns: 10.0,
        byte_ns: 1.0,
    };
    let (_, choice) = chosen(CHAIN, &mut times);
    assert_eq!(choice.changed, []);
    assert_eq!(choice.rule_ns, choice.chosen_ns);
    assert_eq!((choice.bound_ns, choice.n_branches), (choice.chosen_ns, 0));
    assert_eq!((choice.n_containers, choice.n_contractions), (2, 2));
}

#[test]
fn an_order_spreads_to_what_is_indexed_alike() {
    // Every array is better with `m` last; a conversion in a loop costs more than a slow array.
    let mut times = Made {
        fast: &["m"],
        operand_ns: 10.0,
        byte_ns: 1.0,
    };
    let (graph, choice) = chosen(CHAIN, &mut times);
    assert_eq!(order(&graph, &choice, "h"), Some(vec![1, 0]));
    assert_eq!(order(&graph, &choice, "g"), Some(vec![1, 0]));
    // Two products with three arrays each; `x`, `v`, `w` and `y` belong to the caller.
    assert_eq!(choice.rule_ns, 260.0);
    assert_eq!(choice.chosen_ns, 240.0);
    assert_eq!(choice.row_major_ns, choice.rule_ns);
}

/// The two products prefer different orders of what the function between them reads and writes. So there is a
/// conversion or a slow product.
#[test]
fn a_conversion_is_made_where_it_costs_less_than_a_slow_product() {
    struct Torn(f64);
    impl Times for Torn {
        fn contraction_ns(&mut self, graph: &Graph, node: &Node) -> Option<f64> {
            let mut is_product = false;
            node.visit_tasklets(&mut |t| is_product |= t.summed_product().is_some());
            let last = |name: &str| {
                let id = graph
                    .find(name)
                    .filter(|id| node.writes().contains(id) || node.reads().contains(id))?;
                graph.container(id).layout.order().last().copied()
            };
            match (last("h").filter(|_| is_product), last("y")) {
                (Some(fast), None) => Some(if fast == 0 { 100.0 } else { 500.0 }),
                (None, Some(_)) => Some(if last("g") == Some(1) { 100.0 } else { 500.0 }),
                _ => None,
            }
        }
        fn moved_ns(&self, bytes: i64) -> f64 {
            self.0 * bytes as f64
        }
    }
    // `h` has 1,024 bytes: a conversion moves 2,048.
    let (graph, cheap) = chosen(CHAIN, &mut Torn(0.1));
    assert_eq!(order(&graph, &cheap, "h"), Some(vec![1, 0]));
    assert_eq!(order(&graph, &cheap, "g"), None);
    // The conversion takes 204.8 ns, counted as 205.
    assert_eq!(cheap.chosen_ns, 405.0);
    assert_eq!(cheap.bound_ns, cheap.chosen_ns);
    let (_, dear) = chosen(CHAIN, &mut Torn(1.0));
    assert_eq!((dear.changed.len(), dear.chosen_ns), (0, 600.0));
}

/// An attention without softmax: products of three containers that all have a choice.
const ATTENTION: &str = r#"graph "attention" {
  %x: f32[2, 8, 16] input
  %a: f32[4, 4, 16] input
  %b: f32[4, 4, 16] input
  %c: f32[4, 4, 16] input
  %d: f32[16, 4, 4] input
  %q: f32[2, 4, 8, 4]
  %k: f32[2, 4, 8, 4]
  %v: f32[2, 4, 8, 4]
  %scores: f32[2, 4, 8, 8]
  %scaled: f32[2, 4, 8, 8]
  %context: f32[2, 4, 8, 4]
  %y: f32[2, 8, 16]
  inputs %x, %a, %b, %c, %d
  state {
    map [n < 2, h < 4, s < 8, f < 4, e < 16] {
      tasklet %q[n, h, s, f] (sum) = $0 * $1 from %x[n, s, e], %a[h, f, e]
    }
    map [n < 2, h < 4, t < 8, f < 4, e < 16] {
      tasklet %k[n, h, t, f] (sum) = $0 * $1 from %x[n, t, e], %b[h, f, e]
    }
    map [n < 2, h < 4, t < 8, f < 4, e < 16] {
      tasklet %v[n, h, t, f] (sum) = $0 * $1 from %x[n, t, e], %c[h, f, e]
    }
    map [n < 2, h < 4, s < 8, t < 8, f < 4] {
      tasklet %scores[n, h, s, t] (sum) = $0 * $1 from %q[n, h, s, f], %k[n, h, t, f]
    }
    map [n < 2, h < 4, s < 8, t < 8] {
      tasklet %scaled[n, h, s, t] = $0 * 0.5 from %scores[n, h, s, t]
    }
    map [n < 2, h < 4, s < 8, f < 4, t < 8] {
      tasklet %context[n, h, s, f] (sum) = $0 * $1 from %scaled[n, h, s, t], %v[n, h, t, f]
    }
    map [n < 2, s < 8, o < 16, h < 4, f < 4] {
      tasklet %y[n, s, o] (sum) = $0 * $1 from %context[n, h, s, f], %d[o, h, f]
    }
  }
  outputs %y
}
"#;

/// Times that depend on all orders together, and look random.
struct Hashed(u64);

impl Times for Hashed {
    fn contraction_ns(&mut self, graph: &Graph, node: &Node) -> Option<f64> {
        let mut is_product = false;
        node.visit_tasklets(&mut |t| is_product |= t.summed_product().is_some());
        let mut hash = self.0;
        for id in node.reads().into_iter().chain(node.writes()) {
            let c = graph.container(id);
            for byte in c
                .name
                .bytes()
                .chain(c.layout.order().iter().map(|d| *d as u8))
            {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
        is_product.then_some((hash >> 20) as f64 % 1000.0)
    }

    fn moved_ns(&self, bytes: i64) -> f64 {
        bytes as f64 / 60.0
    }
}

#[test]
fn no_combination_of_orders_is_better() {
    for seed in 0..10 {
        let (mut graph, choice) = chosen(ATTENTION, &mut Hashed(seed));
        assert_eq!(choice.n_containers, 6);
        assert_eq!(choice.bound_ns, choice.chosen_ns, "seed {seed}");
        // All combinations of four orders of each: what the problem offers is among them.
        let assignment = assign(&mut graph, &Recipe::default());
        let state = graph.single_state().unwrap();
        let orders = super::candidates(&graph, &state.nodes, &assignment);
        let mut problem = super::ConfigurationProblem::new(&graph, &orders);
        let mut times = Hashed(seed);
        for node in &state.nodes {
            problem.add_node(node, &mut times);
        }
        let sizes: Vec<usize> = orders.values().map(Vec::len).collect();
        let ids: Vec<ContainerId> = orders.keys().copied().collect();
        let n: usize = sizes.iter().product();
        let cost = |n: usize| {
            let choices = super::digits(n, &sizes);
            let at = |id: ContainerId| ids.iter().position(|own| *own == id).unwrap();
            problem
                .quadratic
                .cost(&problem.completed(&|id, _| choices[at(id)]))
        };
        let least = (0..n).map(cost).fold(f64::INFINITY, f64::min);
        assert_eq!(choice.chosen_ns, least, "seed {seed}");
        assert!(choice.chosen_ns < choice.rule_ns, "seed {seed}");
    }
}
