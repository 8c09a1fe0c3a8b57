//! Expensive values that several loops of a kernel compute for the same row are kept beside the row.
//!
//! Before: `kernel (b): { map h: m max= f(x[b,h]); map h: s += exp(f(x[b,h]) - m); map h: y[b,h] = exp(f(x[b,h]) - m) / s }`.
//! After: `kernel (b): { map h: m max= (v[b,h] = f(x[b,h])); map h: s += (e[b,h] = exp(v[b,h] - m)); map h: y[b,h] =
//! e[b,h] / s }`, with `v` and `e` local: a row of them stays in a core's cache.
//! Legal because containers are written once, before they are read: the same expression of the same elements has the
//! same value in every loop of the kernel. Pays for a function such as `exp`, which takes some ten times as long as
//! storing its value and reading it again. Inlining puts such expressions into several loops when it only counts the
//! bytes of memory, and a softmax has its exponential twice from the start.
//! Never keeps what another kernel reads; that is [`inline`](crate::inline)'s decision.

use crate::inline::tidy_inputs;
use crate::unit::{constant, mentions, points, unit, unit_tasklet_mut};
use graph::{
    DType, Expr, Graph, Index, Map, Memlet, Node, NodeKind, Param, Storage, SymExpr, Tasklet,
};

/// Operations of a value that is worth a store and a load: one transcendental function.
const MIN_COST: u32 = 16;
/// Most bytes of a row that is kept: a part of a core's first cache.
const MAX_ROW_BYTES: i64 = 1 << 15;
/// Rows that are computed side by side where memory is contiguous from one row to the next.
const SIDE_BY_SIDE: i64 = 64;
/// Most bytes of all of these: a part of the second cache.
const MAX_SIDE_BY_SIDE_BYTES: i64 = 1 << 17;
/// Most rows that a kernel keeps.
const MAX_ROWS: usize = 3;

/// Keeps rows of values in the kernels.
pub(crate) fn keep(graph: &mut Graph, kernels: &mut [Node]) {
    for kernel in kernels {
        if let NodeKind::Map(map) = &mut kernel.kind
            && !map.params.is_empty()
        {
            for _ in 0..MAX_ROWS {
                let Some(value) = most_expensive(graph, map) else {
                    break;
                };
                keep_row(graph, map, &value);
            }
        }
    }
}

/// A value that several loops of a kernel compute.
#[derive(Clone, Debug)]
struct Value {
    /// The expression, whose inputs are counted in the order of `reads`.
    expr: Expr,
    reads: Vec<Memlet>,
    dtype: DType,
    /// The loops around it, the same for all users.
    loops: Vec<Param>,
    /// Positions of the kernel's members that compute it, in order.
    users: Vec<usize>,
}

/// The value with most operations that two loops compute, the first of several.
fn most_expensive(graph: &Graph, kernel: &Map) -> Option<Value> {
    let mut found: Vec<Value> = Vec::new();
    for (at, member) in kernel.body.iter().enumerate() {
        let Some((map, tasklet)) = unit(member).filter(|(map, _)| !map.params.is_empty()) else {
            continue;
        };
        for (_, expr) in &tasklet.outputs {
            each_value(expr, &mut |part| {
                let Some((expr, reads, dtype)) = value(graph, tasklet, part) else {
                    return;
                };
                let bytes = points(map) * dtype.bytes() as i64;
                let many = bytes * SIDE_BY_SIDE > MAX_SIDE_BY_SIDE_BYTES;
                if !is_of_each(&expr, &reads, &map.params)
                    || bytes > MAX_ROW_BYTES
                    || (many && reads.iter().any(|m| is_across(graph, m, &map.params)))
                {
                    return;
                }
                let same =
                    |v: &&mut Value| v.expr == expr && v.reads == reads && v.loops == map.params;
                match found.iter_mut().find(same) {
                    Some(known) if known.users.last() == Some(&at) => {}
                    Some(known) => known.users.push(at),
                    None => found.push(Value {
                        expr,
                        reads,
                        dtype,
                        loops: map.params.clone(),
                        users: vec![at],
                    }),
                }
            });
        }
    }
    found.retain(|v| v.users.len() > 1);
    found.reverse();
    found.into_iter().max_by_key(|v| v.expr.cost())
}

/// Whether a value depends on every loop, and what has to be computed at each point of the innermost one is expensive.
fn is_of_each(expr: &Expr, reads: &[Memlet], loops: &[Param]) -> bool {
    let moves_with = |e: &Expr, p: &Param| {
        let mut found = false;
        e.visit(&mut |part| {
            found |= match part {
                Expr::In(i) => mentions(&reads[*i], &p.name),
                Expr::Index(at) => at.mentions(&p.name),
                _ => false,
            }
        });
        found
    };
    let Some(last) = loops.last() else {
        return false;
    };
    let mut fixed = 0;
    count_fixed(expr, &|e| moves_with(e, last), &mut fixed);
    loops.iter().all(|p| moves_with(expr, p)) && expr.cost() - fixed >= MIN_COST
}

/// Adds the operations of the parts that do not move.
fn count_fixed(e: &Expr, moves: &dyn Fn(&Expr) -> bool, fixed: &mut u32) {
    if !moves(e) {
        *fixed += e.cost();
        return;
    }
    for child in e.children() {
        count_fixed(child, moves, fixed);
    }
}

/// Whether memory is contiguous across the loops, from one row to the next.
fn is_across(graph: &Graph, m: &Memlet, loops: &[Param]) -> bool {
    let fastest = graph.container(m.container).layout.order().last().copied();
    let index = fastest.and_then(|d| m.subset.get(d));
    matches!(index, Some(Index::At(at)) if !loops.iter().any(|p| at.mentions(&p.name)))
}

/// Calls `f` with the parts of an expression that are computed whatever the others are.
fn each_value(e: &Expr, f: &mut dyn FnMut(&Expr)) {
    f(e);
    match e {
        Expr::Select(condition, ..) => each_value(condition, f),
        _ => e.children().for_each(|child| each_value(child, f)),
    }
}

/// A part of a tasklet's expression on its own, if it may be kept: expensive floats, of elements that no data look up.
fn value(graph: &Graph, tasklet: &Tasklet, part: &Expr) -> Option<(Expr, Vec<Memlet>, DType)> {
    if part.cost() < MIN_COST {
        return None;
    }
    let dtype = |m: &Memlet| graph.container(m.container).dtype;
    let types: Vec<DType> = tasklet.inputs.iter().map(dtype).collect();
    // Rows of 16-bit floats are kept as they are computed, in 32 bits.
    let own = part.dtype(&types).arithmetic();
    let mut order = Vec::new();
    part.visit(&mut |e| {
        if let Expr::In(i) = e
            && !order.contains(i)
        {
            order.push(*i);
        }
    });
    let reads: Vec<Memlet> = order.iter().map(|i| tasklet.inputs[*i].clone()).collect();
    let mut indices = reads.iter().flat_map(|m| &m.subset);
    let is_looked_up = indices.any(|i| matches!(i, Index::Data(_)));
    // What is made of constants alone takes the type of what reads it.
    let is_weak = part.natural_dtype(DType::F64, &types).arithmetic() != own;
    if is_looked_up || is_weak || reads.is_empty() || !matches!(own, DType::F32 | DType::F64) {
        return None;
    }
    let expr = part.map_leaves(&|leaf| match leaf {
        Expr::In(i) => order.iter().position(|o| o == i).map(Expr::In),
        _ => None,
    });
    Some((expr, reads, own))
}

/// Lets the first loop that computes a value also store it, and the others read it.
fn keep_row(graph: &mut Graph, kernel: &mut Map, value: &Value) {
    let around = || kernel.params.iter().chain(&value.loops);
    let shape: Vec<SymExpr> = around()
        .map(|p| SymExpr::constant(constant(&p.size)))
        .collect();
    let at: Vec<SymExpr> = around().map(|p| SymExpr::from(&p.name)).collect();
    let row = graph.add_transient("row", value.dtype, shape);
    graph.container_mut(row).storage = Storage::Local;
    let memlet = Memlet::new(row, at);
    for (n, user) in value.users.iter().enumerate() {
        let Some(tasklet) = unit_tasklet_mut(&mut kernel.body[*user]) else {
            continue;
        };
        match n {
            0 => store(tasklet, value, &memlet),
            _ => read(graph, tasklet, value, &memlet),
        }
    }
}

/// The expression with an input in place of the parts that `is_it` finds.
fn replace(e: &Expr, input: usize, is_it: &dyn Fn(&Expr) -> bool) -> Expr {
    if is_it(e) {
        return Expr::In(input);
    }
    e.map_children(|child| replace(child, input, is_it))
}

fn store(tasklet: &mut Tasklet, value: &Value, memlet: &Memlet) {
    let place = |i: usize| tasklet.inputs.iter().position(|m| *m == value.reads[i]);
    let expr = value.expr.map_leaves(&|leaf| match leaf {
        Expr::In(i) => place(*i).map(Expr::In),
        _ => None,
    });
    tasklet.outputs.push((memlet.clone(), expr));
}

fn read(graph: &Graph, tasklet: &mut Tasklet, value: &Value, memlet: &Memlet) {
    let position = tasklet.inputs.len();
    let replaced: Vec<Expr> = tasklet
        .outputs
        .iter()
        .map(|(_, e)| {
            replace(e, position, &|part| {
                self::value(graph, tasklet, part)
                    .is_some_and(|(expr, reads, _)| expr == value.expr && reads == value.reads)
            })
        })
        .collect();
    for ((_, expr), new) in tasklet.outputs.iter_mut().zip(replaced) {
        *expr = new;
    }
    tasklet.inputs.push(memlet.clone());
    tidy_inputs(tasklet);
}

#[cfg(test)]
mod tests {
    use super::keep;
    use graph::{Graph, Node};
    use models::{results, text_graph as graph};

    const ROWS: &str =
        "%x: f32[40, 24] input\n%m: f32[40] local\n%s: f32[40] local\n%y: f32[40, 24]";

    /// The graph with the rows that its kernels keep; the results must stay the same bits.
    fn kept(kernel: &str) -> Graph {
        let mut graph = graph(ROWS, kernel, "%y");
        let before = results(&graph);
        let mut nodes: Vec<Node> = std::mem::take(&mut graph.last_state().nodes);
        keep(&mut graph, &mut nodes);
        graph.last_state().nodes = nodes;
        graph::verify(&graph).unwrap_or_else(|e| panic!("{e:?}\n{graph}"));
        assert_eq!(before, results(&graph), "{graph}");
        graph
    }

    fn rows(graph: &Graph) -> usize {
        graph
            .containers
            .iter()
            .filter(|c| c.name.starts_with("row"))
            .count()
    }

    fn softmax(value: &str, last: &str) -> String {
        format!(
            "map [b < 40] {{
                map [h < 24] {{ tasklet %m[b] (max) = {value} from %x[b, h] }}
                map [h < 24] {{ tasklet %s[b] (sum) = exp({value} - $1) from %x[b, h], %m[b] }}
                map [h < 24] {{ tasklet %y[b, h] = {last} from %x[b, h], %m[b], %s[b] }}
            }}"
        )
    }

    #[test]
    fn a_softmax_has_its_exponentials_once() {
        let graph = kept(&softmax("$0", "exp($0 - $1) / $2"));
        assert_eq!(rows(&graph), 1, "{graph}");
        // In the sum and, in the same loop, where it is kept.
        assert_eq!(graph.to_string().matches("exp(").count(), 2, "{graph}");
    }

    #[test]
    fn what_it_is_of_is_computed_once_too() {
        let graph = kept(&softmax("sin($0)", "exp(sin($0) - $1) / $2"));
        assert_eq!(rows(&graph), 2, "{graph}");
        assert_eq!(graph.to_string().matches("sin(").count(), 2, "{graph}");
    }

    #[test]
    fn values_of_the_row_alone_are_not_spread_over_it() {
        let graph = kept(&softmax("$0", "$0 - $1 - log($2)"));
        assert_eq!(rows(&graph), 0, "{graph}");
        let twice = "map [b < 40] {
            map [h < 24] { tasklet %m[b] (max) = $0 from %x[b, h] }
            map [h < 24] { tasklet %s[b] (sum) = $0 * exp($1) from %x[b, h], %m[b] }
            map [h < 24] { tasklet %y[b, h] = $0 * exp($1) / $2 from %x[b, h], %m[b], %s[b] }
        }";
        assert_eq!(rows(&kept(twice)), 0);
    }

    #[test]
    fn other_and_cheap_values_are_computed_again() {
        assert_eq!(rows(&kept(&softmax("$0", "exp($0 + $1) / $2"))), 0);
        assert_eq!(
            rows(&kept(&softmax("($0 * 2.0)", "($0 * 2.0 - $1) / $2"))),
            0
        );
        let one_branch = "select($2 > 1.0, exp($0 - $1), 0.0)";
        assert_eq!(rows(&kept(&softmax("$0", one_branch))), 0);
    }
}
