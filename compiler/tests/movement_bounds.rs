//! Lower bounds of movement hold against a simulated cache that runs kernels point by point, and the counted bytes
//! are what a cache moves that holds everything.

use compiler::bounds::{bound, touched};
use graph::{Bindings, ContainerId, Graph, Index, Machine, Node, NodeKind, SymExpr, parse};
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

/// Runs a node's maps in order and gives the bytes that a cache of so many bytes moves.
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
                let c = graph.container(memlet.container);
                let shape: Vec<i64> = c.shape.iter().filter_map(SymExpr::as_const).collect();
                let strides = c.layout.strides(&shape);
                let mut offset = 0;
                let mut is_inside = true;
                for ((index, size), stride) in memlet.subset.iter().zip(&shape).zip(strides) {
                    let Index::At(index) = index else {
                        panic!("no data here")
                    };
                    let at = index.eval(values).expect("a value");
                    is_inside &= (0..*size).contains(&at);
                    offset += at * stride;
                }
                if is_inside {
                    let address = starts[&memlet.container] + offset * c.dtype.bytes() as i64;
                    cache.touch(address, writes);
                }
            }
        }
        NodeKind::Library(_) => panic!("no library nodes here"),
    }
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
    let (_, graph, node) = &cases[4];
    assert_eq!(
        bound(graph, node, &machine(1 << 10), 1).cache_bytes,
        0,
        "a window has no such bound"
    );
}
