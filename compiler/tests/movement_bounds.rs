//! Lower bounds of movement hold against a simulated cache that runs kernels point by point, and the counted bytes
//! are what a cache moves that holds everything.

use compiler::bounds::{bound, touched};
use fusion::lower_bound;
use graph::{
    Bindings, ContainerId, Graph, Index, Machine, Memlet, Node, NodeKind, SymExpr, parse, traffic,
};
use std::collections::{BTreeMap, VecDeque};

/// Bytes of a cache line.
const LINE: i64 = 64;

/// A fully associative cache that replaces the line unused for longest, and writes changed lines back.
struct Cache {
    lines: usize,
    /// Lines from the one unused for longest on, and whether they were changed.
    held: VecDeque<(i64, bool)>,
    moved: i64,
}

impl Cache {
    fn new(bytes: i64) -> Cache {
        Cache {
            lines: (bytes / LINE) as usize,
            held: VecDeque::new(),
            moved: 0,
        }
    }

    /// A line that is written whole sooner or later is not read first, as streaming stores do.
    fn touch(&mut self, address: i64, writes: bool) {
        let line = address / LINE;
        let at = self.held.iter().position(|held| held.0 == line);
        let before = at.and_then(|at| self.held.remove(at));
        if before.is_none() && !writes {
            self.moved += LINE;
        }
        let changed = before.is_some_and(|b| b.1) || writes;
        self.held.push_back((line, changed));
        if self.held.len() > self.lines
            && let Some((_, true)) = self.held.pop_front()
        {
            self.moved += LINE;
        }
    }

    fn flushed(mut self) -> i64 {
        self.moved += LINE * self.held.iter().filter(|held| held.1).count() as i64;
        self.moved
    }
}

/// Runs a node's maps in order and returns how many bytes a cache of `bytes` bytes moves.
fn simulated(graph: &Graph, node: &Node, bytes: i64) -> i64 {
    let mut starts = BTreeMap::new();
    let mut end = 0;
    for id in graph.container_ids() {
        starts.insert(id, end);
        end += (size(graph, id) + LINE - 1) / LINE * LINE;
    }
    let mut cache = Cache::new(bytes);
    run(graph, node, &mut Bindings::new(), &starts, &mut cache);
    cache.flushed()
}

fn size(graph: &Graph, id: ContainerId) -> i64 {
    let c = graph.container(id);
    SymExpr::product(&c.shape).as_const().expect("a size") * c.dtype.bytes() as i64
}

fn run(
    graph: &Graph,
    node: &Node,
    values: &mut Bindings,
    starts: &BTreeMap<ContainerId, i64>,
    cache: &mut Cache,
) {
    match &node.kind {
        NodeKind::Map(map) => {
            let sizes: Vec<i64> = map
                .params
                .iter()
                .filter_map(|p| p.size.as_const())
                .collect();
            for point in 0..sizes.iter().product() {
                let mut rest: i64 = point;
                for (param, size) in map.params.iter().zip(&sizes).rev() {
                    values.insert(param.name.clone(), rest % size);
                    rest /= size;
                }
                for inner in &map.body {
                    run(graph, inner, values, starts, cache);
                }
            }
        }
        NodeKind::Tasklet(tasklet) => {
            let reads = tasklet.inputs.iter().map(|memlet| (memlet, false));
            let writes = tasklet.outputs.iter().map(|(memlet, _)| (memlet, true));
            for (memlet, writes) in reads.chain(writes) {
                if let Some(offset) = offset(graph, memlet, &tasklet.inputs, values) {
                    let bytes = graph.container(memlet.container).dtype.bytes() as i64;
                    cache.touch(starts[&memlet.container] + offset * bytes, writes);
                }
            }
        }
        NodeKind::Library(_) => panic!("no library nodes here"),
    }
}

/// The element that a memlet names; `None` outside the container. An index that data gives is the position of that
/// data, counted from the end.
fn offset(graph: &Graph, memlet: &Memlet, inputs: &[Memlet], values: &Bindings) -> Option<i64> {
    let c = graph.container(memlet.container);
    let shape: Vec<i64> = c.shape.iter().filter_map(SymExpr::as_const).collect();
    let mut found = 0;
    for ((index, size), stride) in memlet
        .subset
        .iter()
        .zip(&shape)
        .zip(c.layout.strides(&shape))
    {
        let at = match index {
            Index::At(index) => index.eval(values).expect("a value"),
            Index::Data(n) => size - 1 - offset(graph, &inputs[*n], inputs, values)?,
        };
        found += (0..*size).contains(&at).then_some(at * stride)?;
    }
    Some(found)
}

fn kernel(containers: &str, map: &str) -> (Graph, Node) {
    let text = format!(
        "graph \"g\" {{\n{containers}\n  inputs %a, %b\n  state {{\n    {map}\n  }}\n  outputs %y\n}}"
    );
    let graph = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let node = graph.single_state().expect("one state").nodes[0].clone();
    (graph, node)
}

fn machine(cache_bytes: u64) -> Machine {
    let mut machine = Machine::with_vector_width(16);
    machine.l2.bytes = cache_bytes;
    machine
}

fn cases() -> Vec<(&'static str, Graph, Node)> {
    let case = |name, containers: &str, map: &str| {
        let (graph, node) = kernel(containers, map);
        (name, graph, node)
    };
    vec![
        case(
            "sum of two",
            "  %a: f32[64, 48] input\n  %b: f32[64, 48] input\n  %y: f32[64, 48]",
            "map [i < 64, j < 48] { tasklet %y[i, j] = $0 + $1 from %a[i, j], %b[i, j] }",
        ),
        case(
            "a slice, and one row for all",
            "  %a: f32[64, 48] input\n  %b: f32[48] input\n  %y: f32[16, 48]",
            "map [i < 16, j < 48] { tasklet %y[i, j] = $0 * $1 from %a[i, j], %b[j] }",
        ),
        case(
            "product",
            "  %a: f32[32, 48] input\n  %b: f32[48, 64] input\n  %y: f32[32, 64]",
            "map [i < 32, j < 64, k < 48] { tasklet %y[i, j] (sum) = $0 * $1 from %a[i, k], %b[k, j] }",
        ),
        case(
            "product, the sum outside",
            "  %a: f32[32, 48] input\n  %b: f32[48, 64] input\n  %y: f32[32, 64]",
            "map [k < 48, i < 32, j < 64] { tasklet %y[i, j] (sum) = $0 * $1 from %a[i, k], %b[k, j] }",
        ),
        case(
            "product of bf16",
            "  %a: bf16[32, 48] input\n  %b: bf16[48, 64] input\n  %y: bf16[32, 64]",
            "map [i < 32, j < 64, k < 48] { tasklet %y[i, j] (sum) = $0 * $1 from %a[i, k], %b[k, j] }",
        ),
        case(
            "product of f64",
            "  %a: f64[32, 48] input\n  %b: f64[48, 64] input\n  %y: f64[32, 64]",
            "map [i < 32, j < 64, k < 48] { tasklet %y[i, j] (sum) = $0 * $1 from %a[i, k], %b[k, j] }",
        ),
        case(
            "window",
            "  %a: f32[40, 32] input\n  %b: f32[3, 32] input\n  %y: f32[38, 32]",
            "map [i < 38, r < 3, c < 32] { tasklet %y[i, c] (sum) = $0 * $1 from %a[i + r, c], %b[r, c] }",
        ),
    ]
}

#[test]
fn a_cache_that_holds_everything_moves_the_compulsory_bytes() {
    for (name, graph, node) in cases() {
        let counted: i64 = touched(&graph, &node).values().sum();
        assert_eq!(simulated(&graph, &node, 1 << 20), counted, "{name}");
        let found = bound(&graph, &node, &machine(1 << 20), 1);
        assert_eq!(found.compulsory_bytes, counted, "{name}");
    }
}

#[test]
fn no_cache_moves_less_than_the_bounds() {
    for (name, graph, node) in cases() {
        for cache in [4 << 10, 8 << 10, 16 << 10] {
            let moved = simulated(&graph, &node, cache);
            let found = bound(&graph, &node, &machine(cache as u64), 1);
            let least = found.compulsory_bytes.max(found.cache_bytes);
            assert!(moved >= least, "{name}, {cache}: {moved} < {least}");
        }
    }
}

#[test]
fn a_product_in_a_small_cache_is_bounded_by_more_than_its_operands() {
    let cases = cases();
    let (_, graph, node) = &cases[2];
    let small = bound(graph, node, &machine(1 << 10), 1);
    assert!(small.cache_bytes > small.compulsory_bytes, "{small:?}");
    let (_, graph, node) = &cases[6];
    assert_eq!(
        bound(graph, node, &machine(1 << 10), 1).cache_bytes,
        0,
        "a window has no such bound"
    );
}

/// Kernels that touch parts of what they read.
fn parts() -> Vec<(&'static str, Graph, Node)> {
    let containers = "  %a: f32[640, 32] input\n  %b: i64[40] input\n  %y: f32[40, 32]";
    let case = |name, map: &str| {
        let (graph, node) = kernel(containers, map);
        (name, graph, node)
    };
    vec![
        case(
            "lookup",
            "map [i < 40, j < 32] { tasklet %y[i, j] = $0 from %a[$1, j], %b[i] }",
        ),
        case(
            "the same lookup twice",
            "map [i < 40, j < 32] { tasklet %y[i, j] = $0 * $2 from %a[$1, j], %b[i], %a[$1, j] }",
        ),
        case(
            "slice",
            "map [i < 40, j < 32] { tasklet %y[i, j] = $0 from %a[i + 100, j] }",
        ),
        case(
            "two slices",
            "map [i < 40, j < 32] { tasklet %y[i, j] = $0 + $1 from %a[i, j], %a[i + 600, j] }",
        ),
        case(
            "every second row",
            "map [i < 40, j < 32] { tasklet %y[i, j] = $0 from %a[2*i, j] }",
        ),
        case(
            "sums of sixteen rows",
            "map [i < 40, j < 32, k < 16] { tasklet %y[i, j] (sum) = $0 from %a[16*i + k, j] }",
        ),
        case(
            "a quarter of the result",
            "map [i < 20, j < 16] { tasklet %y[i, j] = $0 from %a[i, j] }",
        ),
    ]
}

#[test]
fn bytes_of_parts_are_what_a_cache_that_holds_everything_moves() {
    for (name, graph, node) in parts() {
        let found = traffic(&graph, &node);
        let touched = found.reads.values().chain(found.writes.values());
        let counted: i64 = touched.map(graph::Touched::most_bytes).sum();
        assert_eq!(simulated(&graph, &node, 1 << 20), counted, "{name}");
    }
}

#[test]
fn a_table_with_lookups_need_not_move() {
    let (_, graph, _) = &parts()[0];
    // The indices and the result; all indices may name one row.
    assert_eq!(lower_bound(graph), 40 * 8 + 40 * 32 * 4);
    let (_, graph, _) = &parts()[2];
    assert_eq!(lower_bound(graph), 2 * 40 * 32 * 4);
}
