//! Takes out loops that combine equal terms.
//!
//! Before: `map [j < 2, i < 9] { %y[j] (sum) = %x[j] }`. After: `map [j < 2] { %y[j] (sum) = %x[j] * 9.0 }`; a maximum or a
//! minimum stays as it is. Legal because no index and no term depends on `i`, and the map reads nothing that it writes. Only
//! the sign of a zero may differ: a sum begins at +0. Contractions stay, since they have kernels of their own.
//! Gradients of mean losses and of broadcast biases have such sums once their broadcasts are inlined. Saves the loop,
//! and one rounding takes the place of a systematic error that grows with the number of terms.

use crate::unit::{constant, is_contraction, unit, unit_tasklet_mut};
use graph::{
    Binary, DType, Expr, Graph, Index, Memlet, Node, NodeKind, Reduction, Scalar, Symbol, Tasklet,
};
use std::collections::BTreeSet;

/// Replaces sums of equal terms by products, in all units.
pub(crate) fn multiply_equal_terms(graph: &Graph, nodes: &mut [Node]) {
    for node in nodes {
        let (unused, times) = unused_params(node);
        if unused.is_empty() || !combines_once(node) || is_contraction(node) {
            continue;
        }
        if let Some(tasklet) = unit_tasklet_mut(node) {
            multiply(graph, tasklet, times);
        }
        if let NodeKind::Map(map) = &mut node.kind {
            map.params.retain(|p| !unused.contains(&p.name));
        }
    }
}

/// The parameters of a unit that nothing in it depends on, and the product of their sizes.
fn unused_params(node: &Node) -> (BTreeSet<Symbol>, i64) {
    let Some((map, tasklet)) = unit(node) else {
        return (BTreeSet::new(), 1);
    };
    let used = symbols(tasklet);
    let unused = map.params.iter().filter(|p| !used.contains(&p.name));
    let times = unused.clone().map(|p| constant(&p.size)).product();
    (unused.map(|p| p.name.clone()).collect(), times)
}

fn symbols(tasklet: &Tasklet) -> BTreeSet<Symbol> {
    let mut found = BTreeSet::new();
    let written = tasklet.outputs.iter().map(|(memlet, _)| memlet);
    for memlet in tasklet.inputs.iter().chain(written) {
        for index in &memlet.subset {
            if let Index::At(e) = index {
                found.extend(e.symbols());
            }
        }
    }
    for (_, expr) in &tasklet.outputs {
        expr.visit(&mut |e| {
            if let Expr::Index(e) = e {
                found.extend(e.symbols());
            }
        });
    }
    found
}

/// Whether combining equal terms at all points is the same as combining the term, or a multiple of it, once.
fn combines_once(node: &Node) -> bool {
    let Some((_, tasklet)) = unit(node) else {
        return false;
    };
    let written: BTreeSet<_> = tasklet.outputs.iter().map(|(m, _)| m.container).collect();
    let is_read = tasklet
        .inputs
        .iter()
        .any(|m| written.contains(&m.container));
    let is_product = |(m, _): &(Memlet, Expr)| m.conflict == Some(Reduction::Prod);
    !is_read && !tasklet.outputs.iter().any(is_product)
}

fn multiply(graph: &Graph, tasklet: &mut Tasklet, times: i64) {
    let of = |memlet: &Memlet| graph.container(memlet.container).dtype;
    let types: Vec<DType> = tasklet.inputs.iter().map(of).collect();
    for (memlet, expr) in &mut tasklet.outputs {
        if memlet.conflict != Some(Reduction::Sum) {
            continue;
        }
        let (wide, factor) = match of(memlet) {
            DType::Bool => continue,
            DType::F16 | DType::BF16 => (DType::F32, Scalar::Float(times as f64)),
            dtype if dtype.is_float() => (dtype, Scalar::Float(times as f64)),
            dtype => (dtype, Scalar::Int(times)),
        };
        let term = match expr.natural_dtype(wide, &types) == wide {
            true => expr.clone(),
            false => expr.clone().cast(wide),
        };
        *expr = Expr::binary(Binary::Mul, term, Expr::Const(factor));
    }
}

#[cfg(test)]
mod tests {
    use super::multiply_equal_terms;
    use graph::{Graph, Node, parse};

    fn multiplied(y: &str, node: &str) -> String {
        let text = format!(
            "graph \"g\" {{\n%x: f32[4] input\n%n: i64[4] input\n%y: {y}\n\
             inputs %x, %n\nstate {{\n{node}\n}}\noutputs %y\n}}\n"
        );
        let mut graph: Graph = parse(&text).unwrap();
        let mut nodes: Vec<Node> = std::mem::take(&mut graph.last_state().nodes);
        multiply_equal_terms(&graph, &mut nodes);
        graph.last_state().nodes = nodes;
        let text = graph.to_string();
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        let first = lines.iter().position(|l| l.starts_with("map")).unwrap();
        lines[first..first + 2].join(" ")
    }

    #[test]
    fn a_sum_of_equal_terms_is_a_product() {
        let found = multiplied(
            "f32[4]",
            "map [i < 9, j < 4, k < 2] { tasklet %y[j] (sum) = $0 from %x[j] }",
        );
        assert!(
            found.contains("[j < 4]") && found.contains("* 18.0"),
            "{found}"
        );
        let found = multiplied(
            "i64[1]",
            "map [i < 9] { tasklet %y[0] (sum) = $0 from %n[0] }",
        );
        assert!(found.contains("* 9 "), "{found}");
    }

    #[test]
    fn the_largest_of_equal_terms_is_one_of_them() {
        let found = multiplied(
            "f32[4]",
            "map [j < 4, i < 9] { tasklet %y[j] (max) = $0 from %x[j] }",
        );
        assert!(found.contains("[j < 4]") && !found.contains('*'), "{found}");
    }

    #[test]
    fn contractions_stay() {
        let product = "map [i < 64, j < 64, b < 2, k < 64] { \
                       tasklet %y[i, j] (sum) = $0 * $1 from %a[i, k], %a[k, j] }";
        let text = format!(
            "graph \"g\" {{\n%a: f32[64, 64] input\n%y: f32[64, 64]\n\
             inputs %a\nstate {{\n{product}\n}}\noutputs %y\n}}\n"
        );
        let mut graph: Graph = parse(&text).unwrap();
        let mut nodes: Vec<Node> = std::mem::take(&mut graph.last_state().nodes);
        let before = nodes.clone();
        multiply_equal_terms(&graph, &mut nodes);
        assert_eq!(nodes, before);
    }

    #[test]
    fn terms_that_differ_stay() {
        for node in [
            "map [j < 4, i < 4] { tasklet %y[j] (sum) = $0 from %x[i] }",
            "map [j < 4, i < 4] { tasklet %y[j] (sum) = $0 * f32({i}) from %x[j] }",
            "map [j < 4, i < 9] { tasklet %y[j] (prod) = $0 from %x[j] }",
            "map [j < 4, i < 9] { tasklet %y[j] (sum) = $0 from %y[j] }",
        ] {
            assert!(multiplied("f32[4]", node).contains("i <"), "{node}");
        }
    }
}
