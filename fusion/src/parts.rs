//! Sums of parts that lie beside one another become copies of the parts.
//!
//! Before: `map [j < 2, i < n] { %s[j, i] = $0 + $1 from %a[j, i | 0.0], %b[j - 1, i | 0.0] }` with `%a, %b: [1, n]`.
//! After: `map [] { map [i < n] { %s[0, i] = %a[0, i] }; map [i < n] { %s[1, i] = %b[0, i] } }`.
//! Gradients of the slices of a tensor have this form: each is padded with zeros to the whole, and the results are
//! added.
//! Legal when along one parameter each part covers a range, the ranges cover all of it once, and no part reads zeros
//! for another reason: then all terms of a sum but one are zero. Done if only contractions, and sums over most of it
//! (the gradient of a bias), read the whole. It is stored in either form then, and copies read each element once,
//! without conditions. They also let the parts be written where they belong, see [`join`](crate::join). Done for
//! [many](MANY) parts whoever reads the whole, since each element would ask which of them it is in.

use crate::unit::{bytes, constant, is_contraction, unit};
use graph::range::{Ranges, index_range};
use graph::{
    Binary, ContainerId, Expr, Graph, Index, Map, Memlet, Node, NodeKind, Param, Schedule, SymExpr,
    Symbol, Tasklet,
};

/// A reader sums over most of a value if it writes at most one byte for this many bytes of the value.
const SUMMED: i64 = 16;

/// Parts for which asking where an element lies takes longer than storing it and reading it again.
const MANY: usize = 6;

/// Rewrites the sums of many parts, and those that only contractions, and sums over most of them, read. Returns
/// whether there was one.
pub(crate) fn separate(graph: &Graph, nodes: &mut [Node]) -> bool {
    let mut found = false;
    for at in 0..nodes.len() {
        let Some((whole, copies)) = copies(graph, &nodes[at]) else {
            continue;
        };
        let is_returned = graph.outputs.iter().any(|o| o.container == whole);
        let sums = |n: &Node| {
            let written: i64 = n.writes().into_iter().map(|id| bytes(graph, id)).sum();
            written * SUMMED <= bytes(graph, whole)
        };
        let readers = || nodes.iter().filter(|n| n.reads().contains(&whole));
        let multiplied = readers().any(is_contraction);
        let stays = is_returned || !multiplied || !readers().all(|n| is_contraction(n) || sums(n));
        if stays && copies.len() < MANY {
            continue;
        }
        nodes[at].kind = NodeKind::Map(Map {
            params: Vec::new(),
            body: copies,
            schedule: Schedule::Default,
        });
        found = true;
    }
    found
}

/// A term of the sum: a part that covers a range of the parameter.
struct Term<'a> {
    memlet: &'a Memlet,
    start: i64,
    extent: i64,
}

/// The container that a unit of this form writes, and the maps that copy its parts.
fn copies(graph: &Graph, node: &Node) -> Option<(ContainerId, Vec<Node>)> {
    let (map, tasklet) = unit(node)?;
    let [(to, sum)] = tasklet.outputs.as_slice() else {
        return None;
    };
    let dtype = |m: &Memlet| graph.container(m.container).dtype;
    let plain = to.fill.is_none() && to.conflict.is_none();
    if !plain || !adds_each_once(sum, tasklet.inputs.len()) {
        return None;
    }
    let params = map.params.iter();
    let ranges: Ranges = params.map(|p| (p.name.clone(), p.size.clone())).collect();
    let mut terms: Vec<(Symbol, Term)> = tasklet
        .inputs
        .iter()
        .map(|memlet| term(graph, memlet, &ranges).filter(|_| dtype(memlet) == dtype(to)))
        .collect::<Option<_>>()?;
    // A part without elements adds zeros alone, and no later pass expects loops without points.
    terms.retain(|(_, term)| term.extent > 0);
    if terms.len() < 2 {
        return None;
    }
    terms.sort_by_key(|(_, term)| term.start);
    let along = terms[0].0.clone();
    let mut next = 0;
    for (name, term) in &terms {
        if *name != along || term.start != next {
            return None;
        }
        next += term.extent;
    }
    if next != constant(&ranges[&along]) {
        return None;
    }
    let copies = terms
        .iter()
        .map(|(_, term)| copy(node, map, to, &along, term));
    Some((to.container, copies.collect()))
}

/// Whether an expression is the sum of two or more inputs, each once.
fn adds_each_once(sum: &Expr, n_inputs: usize) -> bool {
    fn inputs(e: &Expr, found: &mut Vec<usize>) -> bool {
        match e {
            Expr::In(i) => {
                found.push(*i);
                true
            }
            Expr::Binary(Binary::Add, a, b) => inputs(a, found) && inputs(b, found),
            _ => false,
        }
    }
    let mut found = Vec::new();
    let is_sum = inputs(sum, &mut found);
    found.sort_unstable();
    is_sum && n_inputs > 1 && found.into_iter().eq(0..n_inputs)
}

/// The range of one parameter outside of which a read is zero; `None` if it is zero for another reason too.
fn term<'a>(graph: &Graph, memlet: &'a Memlet, ranges: &Ranges) -> Option<(Symbol, Term<'a>)> {
    if memlet.fill?.as_f64() != 0.0 {
        return None;
    }
    let shape = &graph.container(memlet.container).shape;
    let mut found = None;
    for (index, size) in memlet.subset.iter().zip(shape) {
        let Index::At(at) = index else {
            return None;
        };
        let (low, high) = index_range(at, ranges)?;
        let extent = constant(size);
        if low.as_const()? >= 0 && high.as_const()? < extent {
            continue;
        }
        let (terms, offset) = at.as_affine()?;
        let [(name, 1)] = terms.as_slice() else {
            return None;
        };
        let term = Term {
            memlet,
            start: -offset,
            extent,
        };
        let is_inside = offset <= 0 && extent - offset <= constant(&ranges[name]);
        if !is_inside || found.replace((name.clone(), term)).is_some() {
            return None;
        }
    }
    found
}

/// The map that copies a part: the parameter runs over its range.
fn copy(node: &Node, map: &Map, to: &Memlet, along: &Symbol, term: &Term) -> Node {
    let moved = match term.extent {
        1 => SymExpr::constant(term.start),
        _ => SymExpr::from(along) + term.start,
    };
    let replace = |s: &Symbol| (s == along).then(|| moved.clone());
    let shifted = |m: &Memlet| Memlet {
        subset: m
            .subset
            .iter()
            .map(|index| match index {
                Index::At(at) => Index::At(at.substitute(&replace)),
                Index::Data(_) => index.clone(),
            })
            .collect(),
        fill: None,
        ..m.clone()
    };
    let params = map.params.iter().filter_map(|p| match &p.name == along {
        true if term.extent == 1 => None,
        true => Some(Param {
            name: p.name.clone(),
            size: SymExpr::constant(term.extent),
        }),
        false => Some(p.clone()),
    });
    let params = params.collect();
    let tasklet = Node {
        kind: NodeKind::Tasklet(Tasklet {
            inputs: vec![shifted(term.memlet)],
            outputs: vec![(shifted(to), Expr::In(0))],
        }),
        ..node.clone()
    };
    Node {
        kind: NodeKind::Map(Map {
            params,
            body: vec![tasklet],
            schedule: Schedule::Default,
        }),
        ..node.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::separate;
    use graph::{Joined, Node};
    use models::{results, text_graph as graph};

    /// Whether the sum of two padded parts `%a` and `%b`, which a product reads, becomes copies of them.
    fn separated(shapes: [&str; 3], sum: &str, reader: &str) -> bool {
        let [a, b, s] = shapes;
        let containers = format!(
            "%a: f32[{a}] input\n%b: f32[{b}] input\n%w: f32[6, 5] input\n%s: f32[{s}]\n%y: f32[6, 5]\n\
             %z: f32[1]"
        );
        let mut graph = graph(&containers, &format!("{sum}\n{reader}"), "%y");
        let before = results(&graph);
        let mut nodes: Vec<Node> = std::mem::take(&mut graph.last_state().nodes);
        separate(&graph, &mut nodes);
        let joined = Joined::of(&graph, &nodes[0]);
        graph.last_state().nodes = nodes;
        graph::verify(&graph).unwrap_or_else(|e| panic!("{e:?}\n{graph}"));
        assert_eq!(before, results(&graph), "{graph}");
        joined.is_some()
    }

    const PRODUCT: &str = "map [i < 6, k < 6, j < 5] {
        tasklet %y[i, j] (sum) = $0 * $1 from %s[i, k], %w[k, j]
    }";

    fn sum_of(a: &str, b: &str) -> String {
        format!("map [i < 6, k < 6] {{ tasklet %s[i, k] = $0 + $1 from {a}, {b} }}")
    }

    #[test]
    fn parts_beside_one_another_are_copied() {
        let columns = sum_of("%a[i, k | 0.0]", "%b[i, k - 2 | 0.0]");
        assert!(separated(["6, 2", "6, 4", "6, 6"], &columns, PRODUCT));
        let rows = sum_of("%b[i - 1, k | 0.0]", "%a[i, k | 0.0]");
        assert!(separated(["1, 6", "5, 6", "6, 6"], &rows, PRODUCT));
    }

    #[test]
    fn parts_that_meet_or_leave_a_gap_are_added() {
        let columns = sum_of("%a[i, k | 0.0]", "%b[i, k - 2 | 0.0]");
        assert!(!separated(["6, 3", "6, 4", "6, 6"], &columns, PRODUCT));
        assert!(!separated(["6, 1", "6, 4", "6, 6"], &columns, PRODUCT));
        assert!(!separated(["6, 2", "6, 3", "6, 6"], &columns, PRODUCT));
        // One part also lacks rows.
        let both = sum_of("%a[i, k | 0.0]", "%b[i - 1, k - 2 | 0.0]");
        assert!(!separated(["6, 2", "5, 4", "6, 6"], &both, PRODUCT));
    }

    #[test]
    fn a_part_without_elements_is_not_copied() {
        let between = sum_of("%a[i, k | 0.0]", "%e[i, k - 2 | 0.0], %b[i, k - 2 | 0.0]")
            .replace("$0 + $1", "$0 + $1 + $2");
        let containers = "%a: f32[6, 2] input\n%b: f32[6, 4] input\n%e: f32[6, 0] input\n\
             %w: f32[6, 5] input\n%s: f32[6, 6]\n%y: f32[6, 5]";
        let mut graph = graph(containers, &format!("{between}\n{PRODUCT}"), "%y");
        let before = results(&graph);
        let mut nodes: Vec<Node> = std::mem::take(&mut graph.last_state().nodes);
        assert!(separate(&graph, &mut nodes));
        let joined = Joined::of(&graph, &nodes[0]).expect("a concatenation");
        assert_eq!(joined.parts.len(), 2);
        graph.last_state().nodes = nodes;
        assert!(!graph.to_string().contains("< 0"), "{graph}");
        assert_eq!(before, results(&graph), "{graph}");
    }

    #[test]
    fn what_else_is_computed_stays() {
        let scaled = "map [i < 6, k < 6] {
            tasklet %s[i, k] = $0 + 2.0 * $1 from %a[i, k | 0.0], %b[i, k - 2 | 0.0]
        }";
        assert!(!separated(["6, 2", "6, 4", "6, 6"], scaled, PRODUCT));
        let ones = sum_of("%a[i, k | 1.0]", "%b[i, k - 2 | 0.0]");
        assert!(!separated(["6, 2", "6, 4", "6, 6"], &ones, PRODUCT));
    }

    #[test]
    fn many_parts_are_copied_whoever_reads_them() {
        let names = ["a", "b", "c", "d", "e", "f"];
        let separated = |n: usize| {
            let inputs = names[..n].iter().enumerate();
            let inputs: Vec<_> = inputs
                .map(|(k, name)| format!("%{name}[i, k - {} | 0.0]", 2 * k))
                .collect();
            let sum: Vec<_> = (0..n).map(|k| format!("${k}")).collect();
            let sum = format!(
                "map [i < 3, k < {}] {{ tasklet %s[i, k] = {} from {} }}",
                2 * n,
                sum.join(" + "),
                inputs.join(", ")
            );
            let reader = format!(
                "map [i < 3, k < {}] {{ tasklet %y[i, k] = 2.0 * $0 from %s[i, k] }}",
                2 * n
            );
            let parts: Vec<_> = names[..n]
                .iter()
                .map(|a| format!("%{a}: f32[3, 2] input"))
                .collect();
            let containers = format!(
                "{}\n%s: f32[3, {w}]\n%y: f32[3, {w}]",
                parts.join("\n"),
                w = 2 * n
            );
            for outputs in ["%y", "%s, %y"] {
                let mut graph = graph(&containers, &format!("{sum}\n{reader}"), outputs);
                let before = results(&graph);
                let mut nodes: Vec<Node> = std::mem::take(&mut graph.last_state().nodes);
                assert_eq!(separate(&graph, &mut nodes), n >= super::MANY, "{n}");
                graph.last_state().nodes = nodes;
                graph::verify(&graph).unwrap_or_else(|e| panic!("{e:?}\n{graph}"));
                assert_eq!(before, results(&graph), "{graph}");
            }
        };
        separated(5);
        separated(6);
    }

    #[test]
    fn what_loops_read_stays_with_them() {
        let columns = sum_of("%a[i, k | 0.0]", "%b[i, k - 2 | 0.0]");
        let reader = "map [i < 6, j < 5] { tasklet %y[i, j] = $0 * $1 from %s[i, j], %w[i, j] }";
        assert!(!separated(["6, 2", "6, 4", "6, 6"], &columns, reader));
        let total = "map [i < 6, k < 6] { tasklet %z[0] (sum) = $0 from %s[i, k] }";
        let both = |reader: &str| format!("{reader}\n{total}");
        assert!(!separated(
            ["6, 2", "6, 4", "6, 6"],
            &columns,
            &both(reader)
        ));
        assert!(separated(
            ["6, 2", "6, 4", "6, 6"],
            &columns,
            &both(PRODUCT)
        ));
    }
}
